"""The sequence ids of one entry, from its header."""

from __future__ import annotations

from typing import NamedTuple


class SequenceRange(NamedTuple):
    """What an entry's header says: its first and last sequence id; of a chunk, its message and place."""

    first: int
    last: int
    uuid: str = ""
    chunk: int = 0
    chunks: int = 1
