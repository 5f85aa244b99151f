"""Memory for blocks that bypass the page cache: aligned, as the disk needs it, and used again in turn.

At most `count` blocks are on their way (`DEPTH` of journal/journal.py), so the next arena in turn is free.
Guarded by tests/bookie/store/journal/test_journal.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....runtime.files import Buffer, Files

COPIED_APART_BYTES = 4096
"""Average size of buffers above which they are copied into the arena one by one; smaller ones are joined first."""


class Arenas:
    """The arenas of a journal, `count` of `size` bytes. A longer block makes the one in turn as long, and it stays so:
    to map memory for each such block costs the kernel 4 MiB of zeros, a tenth of the time of a bookie that gets entries
    of 1 MiB."""

    def __init__(self, files: Files, size: int, count: int) -> None:
        self._files = files
        self._size = size
        self._arenas = [memoryview(b"")] * count
        self._turn = -1

    def fill(self, buffers: Sequence[Buffer], size: int) -> memoryview:
        """Returns one buffer of `size` bytes: the given ones, then zeros."""
        view = self._next(size)[:size]
        if len(buffers) * COPIED_APART_BYTES > size:
            buffers = [b"".join(buffers)]
        at = 0
        for buffer in buffers:
            view[at : at + len(buffer)] = buffer
            at += len(buffer)
        view[at:] = bytes(size - at)
        return view

    def _next(self, size: int) -> memoryview:
        self._turn = (self._turn + 1) % len(self._arenas)
        if len(self._arenas[self._turn]) < size:
            self._arenas[self._turn] = self._files.arena(max(size, self._size))
        return self._arenas[self._turn]
