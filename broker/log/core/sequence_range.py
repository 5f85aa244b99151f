"""The sequence ids of one entry, from its header."""

from __future__ import annotations

from typing import NamedTuple

from pyroaring import BitMap64

SPAN_MAX = 1 << 20
"""Ids from the first to the last of an entry whose ids are noted one by one: some hundred bytes."""
ID_END = 1 << 63
"""Ids of Pulsar's clients are below."""


class SequenceRange(NamedTuple):
    """The first and last sequence id of an entry, from its header; of a chunk, also its message and place."""

    first: int
    last: int
    uuid: str = ""
    chunk: int = 0
    chunks: int = 1

    @property
    def is_wide(self) -> bool:
        """Whether its ids are too many to be noted. A header may declare any two, whatever the entry contains."""
        return self.last - self.first >= SPAN_MAX or self.last >= ID_END

    def note(self, ids: BitMap64) -> None:
        """Adds its ids; those of a wide one are left out."""
        if not self.is_wide:
            ids.add_range(self.first, self.last + 1)
