"""The frames between a process and the parent that forked it, over a pair of sockets.

    frame = length u32 | kind u8 | number u32 | body          length: of all after it

| kind | from | number | body |
|---|---|---|---|
| READY | the process | 0 | JSON: the facts of the ready line |
| ASK | the process | of its question | empty: the metrics of the others |
| FACTS | the parent | of that question | JSON: {"restarts": {name: count}, "asked": [names]} |
| PAGE | the parent | of that question | one name of them, a line end, the text |
| ASK | the parent | of its question | empty: your metrics |
| PAGE | the process | of that question | the text |

A question has one FACTS and then one PAGE of each that was asked and lived to answer; the asker has a deadline. The end
of the stream is the other's death. Guards: tests/runtime/children/.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = struct.Struct(">IBI")
_LENGTH = 5
"""Bytes of a frame that are no body, after its length."""
FRAME_BYTES_MAX = 256 << 20
"""Most bytes of a frame. A page has a kilobyte for each topic: more than 100,000 topics of one process."""


class Kind(enum.IntEnum):
    """The kind of a frame."""

    READY = 1
    ASK = 2
    FACTS = 3
    PAGE = 4


class Frame(NamedTuple):
    """A frame of the link."""

    kind: Kind
    number: int = 0
    body: bytes = b""


def packed(frame: Frame) -> bytes:
    return _HEAD.pack(_LENGTH + len(frame.body), frame.kind, frame.number) + frame.body


class Frames:
    """Takes bytes as they come, and gives whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def take(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames in the data so far. ValueError: that is no frame."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(self._bytes)
            if not _LENGTH <= length <= FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {length} bytes")
            end = length + _HEAD.size - _LENGTH
            if len(self._bytes) < end:
                return
            body = bytes(memoryview(self._bytes)[_HEAD.size : end])
            del self._bytes[:end]
            yield Frame(Kind(kind), number, body)
