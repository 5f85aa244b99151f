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

Also in this file, below its heading: the stored entry (stored_core).
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
from .metadata_core import find_fragment_of_entry, get_striping_of_record
from .peer_format import ENTRY_HEADER_STRUCT
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
    """A verified copy of an entry: its id, the last-add-confirmed (LAC) in its header, its payload, and `length`, the
    payload bytes of the ledger up to and including this entry."""

    entry: int
    lac: int
    length: int
    payload: bytes


class PayloadTailChecksum(NamedTuple):
    """The known checksum of the end of a payload: `checksum` is the CRC32C of its last `size` bytes. With it these
    bytes need not be read again."""

    checksum: int
    size: int


class PendingAppend(PendingAdd):
    """An entry that is being appended, until its outcome is known. `frames` are its payload and must never change;
    `size` is their size in bytes. `tail`: the known checksum of the end of the payload, if it is in one frame.
    `header`: the header of the stored entry; empty until the entry is first sent."""

    __slots__ = ("frames", "header", "size", "tail")

    def __init__(self, frames: tuple[Buffer, ...], size: int, tail: PayloadTailChecksum | None = None) -> None:
        self.frames = frames
        self.size = size
        self.tail = tail
        self.header = b""


def encode_header(
    ledger: int, entry: int, lac: int, length: int, frames: Sequence[Buffer], tail: PayloadTailChecksum | None = None
) -> bytes:
    """Encodes the header (36 bytes) of a stored entry with the payload `frames`, and returns it. `lac`: the
    last-add-confirmed at that time. `length`: the ledger's payload bytes up to and including this entry. With a `tail`
    of at least JOINED_BYTES_MIN bytes, the payload must be one frame, and the tail's checksum is used instead of
    reading its bytes again."""
    facts = _FACTS.pack(ledger, entry, lac, length)
    if tail is not None and tail.size >= JOINED_BYTES_MIN:
        [payload] = frames
        return facts + _CRC.pack(combine_checksums(crc32c(facts + payload[: -tail.size]), *tail))
    crc = crc32c(facts)
    for frame in frames:
        crc = crc32c(frame, crc)
    return facts + _CRC.pack(crc)


def verify_entry(stored: Buffer, ledger: int, entry: int) -> StoredCopy | None:
    """Verifies the stored entry in `stored` and returns it. Returns None if the bytes are damaged or are another entry;
    then they must count as no answer."""
    if len(stored) < ENTRY_HEADER_STRUCT.size:
        return None
    found_ledger, found_entry, lac, length, crc = ENTRY_HEADER_STRUCT.unpack_from(stored)
    if found_ledger != ledger or found_entry != entry:
        return None
    payload = bytes(stored[ENTRY_HEADER_STRUCT.size :])
    if crc32c(payload, crc32c(_FACTS.pack(ledger, entry, lac, length))) != crc:
        return None
    return StoredCopy(entry, lac, length, payload)


# --------------------------------------------------------------------------------------------------- reader_core


class ReadFailure(enum.Enum):
    """The reason why a read failed. LOST is an alarm (see the module's docstring)."""

    LOST = "every replica is certain that it does not have the entry"
    UNAVAILABLE = "no replica gave the entry, and not all are certain"


class SendReadToBookie(NamedTuple):
    """Effect: send a READ to `bookie`, for `count` entries from `entry` on, of about `bytes_max` bytes."""

    bookie: str
    entry: int
    count: int  # type: ignore[assignment]  # tuple.count is not used
    bytes_max: int


class EntriesRead(NamedTuple):
    """Fact: the bookie answered the read with these stored entries, one in each of `frames`, which are not verified
    yet."""

    bookie: str
    frames: Sequence[Buffer]


class EntryMissing(NamedTuple):
    """Fact: the bookie is certain that it does not have the first entry of the read."""

    bookie: str


class ReadFailed(NamedTuple):
    """Fact: the bookie did not answer the read, or answered with an error that does not say whether it has the
    entry."""

    bookie: str


class SpeculativeReadDue(NamedTuple):
    """Fact: the bookies that were asked have not answered for some time, so the read may ask another one."""


class FinishRead(NamedTuple):
    """Effect: end the read with these entries: at least one, in order and without a gap, from the first entry of the
    read on."""

    entries: list[StoredCopy]


class FailRead(NamedTuple):
    """Effect: end the read with a failure, because no bookie sent its first entry. `asked` are the bookies that were
    asked, in order."""

    why: ReadFailure
    asked: tuple[str, ...]


ReadFact = EntriesRead | EntryMissing | ReadFailed | SpeculativeReadDue
ReadEffect = SendReadToBookie | FinishRead | FailRead


_NO_TROUBLE: Mapping[str, float] = MappingProxyType({})


class EntryRangeRead:
    """The core of one read of the entries `first … last`: decides which bookie to ask next, and when the read ends. The
    result has at least one entry, and about `bytes_max` bytes. The caller must make sure that the reader may read up to
    `last`.

    `damaged` has (bookie, entry) of each answer that was not the entry; `slow` are the bookies that had not answered
    when another one was asked."""

    def __init__(
        self, record: LedgerRecord, first: int, last: int, bytes_max: int, trouble: Mapping[str, float] = _NO_TROUBLE,
        prefer: int = 0,
    ) -> None:  # fmt: skip
        """Begins a read. `trouble`: the weight of each bookie's recent faults; a bookie with a larger weight is asked
        later. `prefer`: of equal slots, the one to ask first."""
        assert 0 <= first <= last, "a range has at least one entry"
        fragment, fragment_end = find_fragment_of_entry(record, first)
        striping = get_striping_of_record(record)
        self.ledger_id = record.ledger_id
        self.first = first
        self.last = last if fragment_end < 0 else min(last, fragment_end)
        self.bytes_max = bytes_max
        self.damaged: list[tuple[str, int]] = []  # (bookie, entry): the bookie sent bytes that are not the entry
        self.slow: list[str] = []  # bookies that had not answered when another one had to be asked
        self._closed = record.state == CLOSED
        # Longest runs first, then one fixed order per ledger, so that reads in sequence find the same read-ahead.
        slots = sorted(
            striping.slots_of_entry(first),
            key=lambda slot: (
                trouble.get(fragment.bookies[slot], 0.0),
                -striping.count_consecutive_entries(first, slot),
                (slot - prefer) % striping.ensemble_size,
            ),
        )  # fmt: skip
        self._to_ask = [
            SendReadToBookie(
                fragment.bookies[slot],
                first,
                min(striping.count_consecutive_entries(first, slot), self.last - first + 1),
                bytes_max,
            )
            for slot in slots
        ]
        self._asked: list[str] = []
        self._open: dict[str, None] = {}  # bookies that were asked and have not answered; an ordered set
        self._missing: set[str] = set()
        self._finished = False

    def start(self) -> ReadEffect:
        """Begins the read. Returns the first effect, a `SendReadToBookie`."""
        effect = self._next_effect()
        assert effect is not None, "a write set is not empty"
        return effect

    @property
    def has_bookie_to_ask(self) -> bool:
        """Returns whether another bookie can be asked while the bookies asked so far have not answered."""
        return bool(self._to_ask)

    def receive(self, fact: ReadFact) -> ReadEffect | None:
        """Applies a fact. Returns the effect to carry out next; None if the driver must wait for answers. After
        `FinishRead` or `FailRead` no further fact may be given."""
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

    def _next_effect(self) -> ReadEffect | None:
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
    """The last entry that a reader may read. It never decreases. It is the *end* of the ledger only if the ledger is
    CLOSED (M22).

    Before that it is a lower bound: the largest last-add-confirmed (LAC) known, or the last entry before the last
    fragment. For an open ledger -1 means "nothing known yet", never "empty"."""

    __slots__ = ("closed", "last_entry")

    def __init__(self, record: LedgerRecord) -> None:
        self.last_entry = -1
        self.closed = False
        self.apply_record(record)

    def apply_record(self, record: LedgerRecord) -> None:
        """Moves the bound up to what a newer record of the ledger proves: its end if it is CLOSED, otherwise the entry
        before its last fragment."""
        if record.state == CLOSED:
            assert not self.closed or self.last_entry == record.last_entry, "the end of a closed ledger never changes"
            assert self.last_entry <= record.last_entry, "a ledger never ends before a confirmed entry"
            self.closed = True
            self.last_entry = record.last_entry
        else:
            self.advance_lac(record.fragments[-1].first_entry - 1)

    def advance_lac(self, lac: int) -> None:
        """Moves the bound up to `lac`, which a bookie or the writer reports. Does nothing if the bound is higher, or if
        the ledger is CLOSED."""
        if not self.closed and lac > self.last_entry:
            self.last_entry = lac
