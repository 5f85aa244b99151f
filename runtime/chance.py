"""The system's random source: the kernel's bytes, `BLOCK_BYTES` at a time.

Each question to the kernel is a system call for which the interpreter's lock is given away, and a loop that is busy
waits for it again: the claims and tokens of a topic that is opened took 20 us each. A process that was forked begins
with a block of its own. Guarded by tests/runtime/test_chance.py.
"""

from __future__ import annotations

import os
import random
import weakref

BLOCK_BYTES = 4096


class SystemChance(random.SystemRandom):
    """Random numbers of the system, for one thread. `randbytes` never returns a byte twice."""

    def __init__(self) -> None:
        super().__init__()
        self._block = b""
        self._at = 0
        _ALL.add(self)

    def randbytes(self, n: int) -> bytes:
        end = self._at + n
        if end > len(self._block):
            if n > BLOCK_BYTES:
                return super().randbytes(n)
            self._block, self._at, end = super().randbytes(BLOCK_BYTES), 0, n
        taken, self._at = self._block[self._at : end], end
        return taken

    def forget(self) -> None:
        """Forgets what was drawn and not used."""
        self._block, self._at = b"", 0


_ALL: weakref.WeakSet[SystemChance] = weakref.WeakSet()


def _forked() -> None:
    for each in _ALL:
        each.forget()


os.register_at_fork(after_in_child=_forked)
