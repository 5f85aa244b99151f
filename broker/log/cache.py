"""The tail cache: the newest entries of all topics of a broker, bounded by the memory that they take.

An entry is added when it is confirmed. When the cache exceeds its bound, the entries that were added first are evicted.
Consumers that follow the tail of a topic get their entries from this cache. Entries that other consumers read from
bookies while they catch up are added to a second cache of the same kind (`recent`): so they do not evict the tail, and
several such consumers read an entry from bookies once. An entry counts with its bytes and ENTRY_OVERHEAD_BYTES for its
Python objects: entries of 100 bytes count with six times their size. Guarding test: tests/broker/log/test_cache.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...proto.entry import find_distinct_keys, get_chunk_uuid, key_of_single_message, parse_stored_head
from ...proto.entry_filter import find_redriven_to
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import MagnetarError
from ...proto.expiry import EntryExpiry, find_entry_expiry
from ...proto.names import Position, compute_key_slot
from ...runtime.files import Buffer
from .unfolding import is_entry_slow_to_parse

ENTRY_OVERHEAD_BYTES = 512
"""Memory of an entry besides its bytes: the object, position, numbers, frames, its place in the cache. Measured: 490
for one that was published, 470 for one that was read."""


class StoredEntry:
    """An entry of a topic as it is delivered. `frames`: its bytes; `count`: the number of its messages; `index`: the
    index of the last message; `size`: in bytes; `timestamp_ms`: when the broker stored it (ms since the epoch).
    `chunk_of`: the uuid of the message of which it is a chunk, "" if it is none; `deliver_at_ms`: no consumer gets it
    before (ms since the epoch; 0: at once); `expiry`: None if none of its messages expires; `redriven_to`: the only
    subscription that gets it, "" for all."""

    __slots__ = (
        "_slots", "chunk_of", "count", "deliver_at_ms", "expiry", "frames", "index", "position", "redriven_to", "size",
        "timestamp_ms",
    )  # fmt: skip

    def __init__(
        self, position: Position, frames: tuple[Buffer, ...], count: int, index: int, size: int, timestamp_ms: int,
        chunk_of: str = "", deliver_at_ms: int = 0, slots: tuple[int, ...] | None = None,
        expiry: EntryExpiry | None = None, redriven_to: str = "",
    ) -> None:  # fmt: skip
        self.chunk_of = chunk_of  # uuid of the message, of which this is one of several entries
        self.position = position
        self.count = count
        self.index = index  # of the last message
        self.size = size
        self.timestamp_ms = timestamp_ms
        self.deliver_at_ms = deliver_at_ms  # no consumer gets it before; 0: at once
        self.expiry = expiry  # None: none of its messages expires
        self.redriven_to = redriven_to  # the property REDRIVEN_TO: one subscription gets it; "": all do
        self.frames = frames  # broker-part and client-part, in one piece or several
        self._slots = slots

    @classmethod
    def parse(cls, position: Position, entry: Buffer) -> StoredEntry:
        """Parses an entry from the bytes that a bookie returned, and returns it. Raises CorruptEntry if the bytes do
        not parse."""
        index, timestamp_ms, metadata, offset = parse_stored_head(entry)
        batched = metadata.HasField("num_messages_in_batch")
        if batched:
            count, slots = metadata.num_messages_in_batch, None
        else:
            count, slots = 1, _slots_of_one(metadata)  # now: the head takes 1 KB, and is not kept
        chunk_of = get_chunk_uuid(metadata) if metadata.num_chunks_from_msg > 1 else ""
        return cls(
            position, (entry,), count, index, len(entry), timestamp_ms, chunk_of, metadata.deliver_at_time, slots,
            find_entry_expiry(metadata, entry, offset, batched=batched), find_redriven_to(metadata, entry, offset),
        )  # fmt: skip

    @property
    def has_more_chunks(self) -> bool:
        """Returns True if the entry is a chunk of a message, but not the last chunk. Parses the header of the entry at
        each call."""
        if not self.chunk_of:
            return False
        metadata = parse_stored_head(self.frames[-1]).metadata
        return metadata.chunk_id < metadata.num_chunks_from_msg - 1

    @property
    def slots(self) -> tuple[int, ...]:
        """Returns the distinct Key_Shared slots of the keys of the entry's messages, the slot of the first message
        first; () if no message has a key, or if the entry is damaged. `compute_key_slots_if_quick` or `set_key_slots`
        must have been called before."""
        assert self._slots is not None, "compute_key_slots_if_quick comes before"
        return self._slots

    def compute_key_slots_if_quick(self) -> bool:
        """Computes the Key_Shared slots of the entry's messages, stores them in this object, and returns True. If that
        would take long (unfolding.py), does nothing and returns False. Then the caller must compute the slots in a
        thread, and call `set_key_slots`."""
        if self._slots is None:
            self._slots = _slots_of(self.frames[-1])
        return self._slots is not None

    @property
    def has_key_slots(self) -> bool:
        """Returns True if the Key_Shared slots of the entry's messages are known."""
        return self._slots is not None

    def set_key_slots(self, slots: tuple[int, ...]) -> None:
        """Stores the Key_Shared slots of the entry's messages, which were computed in a thread."""
        self._slots = slots

    @property
    def memory_bytes(self) -> int:
        """Returns how many bytes of memory the entry takes, including its Python objects."""
        return self.size + ENTRY_OVERHEAD_BYTES

    def copy_buffer_views(self) -> None:
        """Copies the bytes of the entry that are views of a larger buffer. Otherwise an entry in the cache would keep
        the whole buffer in memory."""
        if any(isinstance(frame, memoryview) for frame in self.frames):
            self.frames = (b"".join(self.frames),)

    @property
    def payload(self) -> bytes:
        """Returns a copy of the entry's bytes, broker-part and client-part, in one piece."""
        return b"".join(self.frames)

    @property
    def first_index(self) -> int:
        """Returns the index of the entry's first message in its partition."""
        return self.index - self.count + 1


def _slots_of(entry: Buffer) -> tuple[int, ...] | None:
    try:
        head = parse_stored_head(entry)
        if not head.metadata.HasField("num_messages_in_batch") or head.metadata.encryption_keys:
            return _slots_of_one(head.metadata)
        if is_entry_slow_to_parse(head.metadata):
            return None
        return tuple(
            dict.fromkeys(map(compute_key_slot, find_distinct_keys(head.metadata, head.payload_offset, entry)))
        )
    except MagnetarError:
        return ()  # damaged: its consumer detects that


def _slots_of_one(metadata: MessageMetadata) -> tuple[int, ...]:
    key = key_of_single_message(metadata)
    return _SLOTS[key] if key is not None else ()


class _Slots(dict[bytes, tuple[int, ...]]):
    """A cache of the slots of keys. The same keys come again and again in a topic, and their entries share the
    tuples."""

    def __missing__(self, key: bytes) -> tuple[int, ...]:
        if len(self) >= INTERNED_KEYS_MAX:
            self.clear()
        found = (compute_key_slot(key),)
        if len(key) <= INTERNED_KEY_BYTES_MAX:
            self[key] = found
        return found


INTERNED_KEYS_MAX, INTERNED_KEY_BYTES_MAX = 16_384, 64
"""Most keys that are known, and the longest: their slots take 4 MB at most."""
_SLOTS = _Slots()


class TailCache:
    """A cache of entries, bounded by the bytes of memory that they take (`bytes_max`). If it is full, evicts the
    entries that were added first. `recent`: a second cache, for entries read from bookies, from which `discard` removes
    a ledger, too."""

    def __init__(self, bytes_max: int, recent: TailCache | None = None) -> None:
        self.bytes_max = bytes_max
        self.recent = recent
        self._ledgers: dict[int, dict[int, StoredEntry]] = {}
        self._order: deque[StoredEntry] = deque()
        self.bytes = 0

    def add(self, entry: StoredEntry) -> None:
        """Adds an entry, unless one at its position is cached, and evicts the oldest entries if the cache is full."""
        ledger_id, entry_id = entry.position
        entries = self._ledgers.get(ledger_id)
        if entries is None:
            entries = self._ledgers[ledger_id] = {}
        if entry_id not in entries:
            entries[entry_id] = entry
            self._order.append(entry)
            self.bytes += entry.size + ENTRY_OVERHEAD_BYTES
            while self.bytes > self.bytes_max:
                self._drop_oldest()

    def add_entries_of_ledger(self, ledger_id: int, several: Iterable[StoredEntry]) -> None:
        """Adds several entries of one ledger, which must be in order. Skips those that are in the cache already. Then
        evicts the oldest entries until the cache fits `bytes_max`."""
        entries = self._ledgers.get(ledger_id)
        if entries is None:
            entries = self._ledgers[ledger_id] = {}
        for entry in several:
            entry_id = entry.position[1]
            if entry_id not in entries:
                entries[entry_id] = entry
                self._order.append(entry)
                self.bytes += entry.size + ENTRY_OVERHEAD_BYTES
        if not entries:
            del self._ledgers[ledger_id]
        while self.bytes > self.bytes_max:
            self._drop_oldest()

    def resize(self, bytes_max: int) -> None:
        """Sets the maximum size of the cache in bytes, and evicts the oldest entries until the cache fits."""
        self.bytes_max = bytes_max
        while self.bytes > bytes_max:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        entry = self._order.popleft()
        self.bytes -= entry.size + ENTRY_OVERHEAD_BYTES
        ledger_id, entry_id = entry.position
        entries = self._ledgers.get(ledger_id)
        if entries is not None and entries.get(entry_id) is entry:
            del entries[entry_id]
            if not entries:
                del self._ledgers[ledger_id]

    def get(self, position: Position) -> StoredEntry | None:
        """Returns the cached entry at `position`; None if it is not cached."""
        entries = self._ledgers.get(position[0])
        return entries.get(position[1]) if entries is not None else None

    def get_cached_entries(
        self, position: Position, last_entry: int, entries_max: int, bytes_max: int
    ) -> list[StoredEntry]:
        """Returns consecutive cached entries of one ledger, beginning at `position`: up to the entry id `last_entry`,
        at most `entries_max` entries, and at most `bytes_max` bytes unless the first entry alone is larger. Returns no
        entries if the one at `position` is not cached."""
        entries = self._ledgers.get(position[0])
        found: list[StoredEntry] = []
        if entries is None:
            return found
        size = 0
        for entry_id in range(position[1], min(last_entry, position[1] + entries_max - 1) + 1):
            entry = entries.get(entry_id)
            if entry is None or (found and size + entry.size > bytes_max):
                break
            found.append(entry)
            size += entry.size
        return found

    def discard(self, ledger_id: int) -> None:
        """Removes the entries of a ledger that is no longer needed, also from the cache `recent`. Frees their memory at
        once."""
        if self.recent is not None:
            self.recent.discard(ledger_id)
        entries = self._ledgers.pop(ledger_id, None)
        if entries:
            gone = set(map(id, entries.values()))
            self._order = deque(entry for entry in self._order if id(entry) not in gone)
            self.bytes -= sum(entry.memory_bytes for entry in entries.values())

    def statistics(self) -> dict[str, int]:
        """Returns the number of cached entries, their bytes, and the maximum of bytes."""
        return {"bytes": self.bytes, "bytes_max": self.bytes_max, "entries": len(self._order)}
