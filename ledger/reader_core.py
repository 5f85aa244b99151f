"""Reading a range of entries: which replica to ask for what, which one next, and when to give up. Pure.

A reader that does not own the ledger reads up to a bound only: `last_entry` of a CLOSED ledger, else the largest LAC it
knows (ledger protocol §1.10). The caller has the bound (`ReadableEntryBound` below); entries up to it are stored for
ever.

`EntryRangeRead` asks one bookie (`SendReadToBookie`) for a run of entries. Of the answer only the first entries count,
up to the first one that is wrong or damaged. If that is the very first, the next replica of the write set is asked.
**Speculation**: when no bookie that was asked answers for a while (`SpeculativeReadDue`), the next replica is asked as
well, and so on. Several requests are then open, the first good answer wins, and no bookie is asked twice. A range costs
at most Qw requests, and a bookie that hangs costs the wait and not the time-out. Replicas with recent trouble
(placement_core.py) are asked last. When all have answered:
- `LOST`: the ledger is closed, and *every* replica is certain that it does not have the entry. An alarm.
- `UNAVAILABLE`: at least one did not answer, or could not say.
Guards: tests/ledger/test_reader_core.py.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..metadata.records import CLOSED, LedgerRecord
from ..proto.checksum import JOINED_BYTES_MIN, combine_checksums, crc32c
from ..runtime.files import Buffer
from .metadata_core import find_fragment_of_entry, striping_of_record
from .peer_format import ENTRY_HEADER
from .writer_core import PendingAdd

# --------------------------------------------------------------------------------------------------- stored_core
# The stored entry: sealed by its writer, opened and verified by its reader (ledger/peer_format.py).
#
#     stored entry = ledger i64 | entry i64 | lac i64 | length i64 | crc32c u32 | payload
#
# The checksum covers the four integers and the payload. A reader checks it *and* that ledger and entry are the ones it
# asked for (ledger protocol §1.10): a bookie may answer with another entry. The bytes of one
# entry may differ between replicas (recovery writes it again with another LAC); the payload may not.
# Guards: tests/ledger/test_reader_core.py.


_FACTS = struct.Struct(">qqqq")
_CRC = struct.Struct(">I")


class StoredCopy(NamedTuple):
    """A verified copy of an entry: its id, the last-add-confirmed (LAC) in its header, `length` (the ledger's payload
    bytes up to and including this entry), and its payload."""

    entry: int
    lac: int
    length: int
    payload: bytes


class PayloadTailChecksum(NamedTuple):
    """The checksum of the end of a payload: `checksum` is the verified CRC32C of its last `size` bytes, so that these
    bytes need not be read again."""

    checksum: int
    size: int


class PendingAppend(PendingAdd):
    """An entry that is being appended, from its append to its outcome: its `frames`, which must never change, and their
    `size` in bytes. `tail`: the known checksum of the end of a payload that is in one frame. `header`: the header of
    the stored entry, empty until the entry is sealed."""

    __slots__ = ("frames", "header", "size", "tail")

    def __init__(self, frames: tuple[Buffer, ...], size: int, tail: PayloadTailChecksum | None = None) -> None:
        self.frames = frames
        self.size = size
        self.tail = tail
        self.header = b""


def encode_header(
    ledger: int, entry: int, lac: int, length: int, frames: Sequence[Buffer], tail: PayloadTailChecksum | None = None
) -> bytes:
    """Returns the 36-byte header of a stored entry with the payload `frames`, which are not copied. If a long `tail` is
    given, its bytes are not read again: its known checksum is combined with that of the other bytes."""
    facts = _FACTS.pack(ledger, entry, lac, length)
    if tail is not None and tail.size >= JOINED_BYTES_MIN:
        [payload] = frames
        return facts + _CRC.pack(combine_checksums(crc32c(facts + payload[: -tail.size]), *tail))
    crc = crc32c(facts)
    for frame in frames:
        crc = crc32c(frame, crc)
    return facts + _CRC.pack(crc)


def verify_entry(stored: Buffer, ledger: int, entry: int) -> StoredCopy | None:
    """Verifies the bytes `stored` and returns the entry in them. Returns None if the bytes are damaged or belong to
    another entry: then they count as no answer."""
    if len(stored) < ENTRY_HEADER.size:
        return None
    found_ledger, found_entry, lac, length, crc = ENTRY_HEADER.unpack_from(stored)
    if found_ledger != ledger or found_entry != entry:
        return None
    payload = bytes(stored[ENTRY_HEADER.size :])
    if crc32c(payload, crc32c(_FACTS.pack(ledger, entry, lac, length))) != crc:
        return None
    return StoredCopy(entry, lac, length, payload)


# --------------------------------------------------------------------------------------------------- reader_core


class ReadFailure(enum.Enum):
    """The reason why a read of entries failed. LOST is an alarm (see the module's docstring)."""

    LOST = "every replica is certain that it does not have the entry"
    UNAVAILABLE = "no replica gave the entry, and not all are certain"


class SendReadToBookie(NamedTuple):
    """Effect: send a READ of `count` entries from `entry` on, of about `bytes_max`, to `bookie`."""

    bookie: str
    entry: int
    count: int  # type: ignore[assignment]  # tuple.count is not used
    bytes_max: int


class EntriesRead(NamedTuple):
    """Fact: the bookie answered with these stored entries, which are not verified yet."""

    bookie: str
    frames: Sequence[Buffer]


class EntryMissing(NamedTuple):
    """Fact: the bookie is certain that it does not have the first requested entry."""

    bookie: str


class ReadFailed(NamedTuple):
    """Fact: the bookie did not answer the read, or answered with an error that does not say whether the bookie has the
    entry."""

    bookie: str


class SpeculativeReadDue(NamedTuple):
    """Fact: no bookie answered within the time after which the read also asks another bookie."""


class FinishRead(NamedTuple):
    """Effect: end the read with these entries: at least one, in order, without a gap from the first requested entry."""

    entries: list[StoredCopy]


class FailRead(NamedTuple):
    """Effect: end the read with a failure, because no bookie sent the first requested entry. `asked` are the bookies,
    in the order in which they were asked."""

    why: ReadFailure
    asked: tuple[str, ...]


Fact = EntriesRead | EntryMissing | ReadFailed | SpeculativeReadDue
Effect = SendReadToBookie | FinishRead | FailRead


_NO_TROUBLE: Mapping[str, float] = MappingProxyType({})


class EntryRangeRead:
    """The core of one read of the entries `first` to `last`: decides which bookie to ask next. The read returns at
    least one entry, up to about `bytes_max`. `last` must not exceed the reader's bound."""

    def __init__(
        self, record: LedgerRecord, first: int, last: int, bytes_max: int, trouble: Mapping[str, float] = _NO_TROUBLE,
        prefer: int = 0,
    ) -> None:  # fmt: skip
        """Begins a read. `trouble`: the weight of each bookie's recent trouble; the larger, the later it is asked."""
        assert 0 <= first <= last, "a range has at least one entry"
        fragment, fragment_end = find_fragment_of_entry(record, first)
        striping = striping_of_record(record)
        self.ledger_id = record.ledger_id
        self.first = first
        self.last = last if fragment_end < 0 else min(last, fragment_end)
        self.bytes_max = bytes_max
        self.damaged: list[tuple[str, int]] = []  # (bookie, entry): the bookie sent bytes that are not the entry
        self.slow: list[str] = []  # bookies that had not answered when another one had to be asked
        self._closed = record.state == CLOSED
        # Longest runs first, then one fixed order per ledger, so that reads in sequence find the same read-ahead.
        slots = sorted(
            striping.write_set(first),
            key=lambda slot: (
                trouble.get(fragment.bookies[slot], 0.0),
                -striping.run_length(first, slot),
                (slot - prefer) % striping.ensemble_size,
            ),
        )  # fmt: skip
        self._to_ask = [
            SendReadToBookie(
                fragment.bookies[slot], first, min(striping.run_length(first, slot), self.last - first + 1), bytes_max
            )
            for slot in slots
        ]
        self._asked: list[str] = []
        self._open: dict[str, None] = {}  # bookies that were asked and have not answered; an ordered set
        self._missing: set[str] = set()
        self._finished = False

    def start(self) -> Effect:
        effect = self._next_effect()
        assert effect is not None, "a write set is not empty"
        return effect

    @property
    def may_read_speculatively(self) -> bool:
        """Returns whether the driver may ask another bookie while the bookies asked so far do not answer."""
        return bool(self._to_ask)

    def receive(self, fact: Fact) -> Effect | None:
        """Handles a fact. Returns the next effect; None if the driver must wait for the requests that are in
        progress."""
        assert not self._finished, "a read that is finished gets no more answers"
        if isinstance(fact, SpeculativeReadDue):
            if not self._to_ask:
                return None
            self.slow += [bookie for bookie in self._open if bookie not in self.slow]
            return self._next_effect()
        assert fact.bookie in self._open, "each question has one answer"
        del self._open[fact.bookie]
        if isinstance(fact, EntriesRead):
            entries = self._verified(fact)
            if entries:
                self._finished = True
                return FinishRead(entries)
        elif isinstance(fact, EntryMissing):
            self._missing.add(fact.bookie)
        return self._next_effect()

    def _verified(self, answer: EntriesRead) -> list[StoredCopy]:
        entries: list[StoredCopy] = []
        for entry, frame in zip(range(self.first, self.last + 1), answer.frames, strict=False):
            found = verify_entry(frame, self.ledger_id, entry)
            if found is None:
                self.damaged.append((answer.bookie, entry))
                break
            entries.append(found)
        return entries

    def _next_effect(self) -> Effect | None:
        if self._to_ask:
            ask = self._to_ask.pop(0)
            self._asked.append(ask.bookie)
            self._open[ask.bookie] = None
            return ask
        if self._open:
            return None
        self._finished = True
        lost = self._closed and len(self._missing) == len(self._asked)
        return FailRead(ReadFailure.LOST if lost else ReadFailure.UNAVAILABLE, tuple(self._asked))

    def check(self) -> None:
        assert self._missing <= set(self._asked), "only a bookie that was asked votes"
        assert len(self._asked) == len(set(self._asked)), "each replica is asked once"
        assert not self._missing & self._open.keys(), "a bookie that has answered is not waited for"


class ReadableEntryBound:
    """The entry up to which a reader may read. The bound never decreases, and is the *end* of the ledger only if the
    ledger is CLOSED (M22).

    Before the close it is a lower bound: `max(known LAC, first entry of the last fragment - 1)`. For an open ledger, -1
    means "nothing known yet", never "empty".
    """

    __slots__ = ("closed", "last_entry")

    def __init__(self, record: LedgerRecord) -> None:
        self.last_entry = -1
        self.closed = False
        self.apply_record(record)

    def apply_record(self, record: LedgerRecord) -> None:
        if record.state == CLOSED:
            assert not self.closed or self.last_entry == record.last_entry, "the end of a closed ledger never changes"
            assert self.last_entry <= record.last_entry, "a ledger never ends before a confirmed entry"
            self.closed = True
            self.last_entry = record.last_entry
        else:
            self.advance_lac(record.fragments[-1].first_entry - 1)

    def advance_lac(self, lac: int) -> None:
        if not self.closed and lac > self.last_entry:
            self.last_entry = lac
