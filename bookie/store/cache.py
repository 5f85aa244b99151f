"""The read cache: entries that were read ahead from the entry log, bounded by bytes, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict

ENTRY_OVERHEAD_BYTES = 200


class ReadCache:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self.size_bytes = 0

    def get(self, ledger: int, entry: int) -> bytes | None:
        found = self._entries.get((ledger, entry))
        if found is not None:
            self._entries.move_to_end((ledger, entry))
        return found

    def put(self, ledger: int, entry: int, stored: bytes) -> None:
        if (ledger, entry) in self._entries:
            return
        self._entries[ledger, entry] = stored
        self.size_bytes += len(stored) + ENTRY_OVERHEAD_BYTES
        while self.size_bytes > self._bytes_max and self._entries:
            self.size_bytes -= len(self._entries.popitem(last=False)[1]) + ENTRY_OVERHEAD_BYTES

    def check(self) -> None:
        assert self.size_bytes == sum(len(e) + ENTRY_OVERHEAD_BYTES for e in self._entries.values())
        assert self.size_bytes <= self._bytes_max or not self._entries
