"""Group commit, decided: which block the journal writes next and where, and whose waiters a synced block answers.

    append_group(group, size, records)   intent: the records of a group wait for their block
    close()                              intent: `is_ended` is true after everything that waits
    receive(fact)   → effects            BlockSynced, NoRoomForBlock, SegmentBegun, NoRoomForSegment, DiskRoomFound,
                                         JournalFailed
    next_effects(spare)   → effects      what to do next; an empty list: nothing before the next fact or group

Effects: `WriteBlock` and `BeginSegment` go to the disk, and each comes back as one fact. `ConfirmBlock` and
`ReportNoRoomForBlock` answer the groups of a block. bookie/store/journal.py carries them out; it owns threads, files,
encoding and clock.

Rules (invariants 14, 15):

1. *Confirmed*: the groups of a block are confirmed when this block and all blocks before it in the file are synced.
   Answers have the order of `append_group`.
2. *On their way*: at most `BLOCKS_IN_FLIGHT_MAX` blocks are written and not answered. `WriteBlock.synced_upto` says
   what was synced when the block was made: a reader takes a bad block before that offset for damage, and after it for a
   torn tail.
3. *Next segment*: it begins when no block is on its way, because its header says that all of its predecessor up to
   `BeginSegment.end` is synced. Nothing after that offset is read.
4. *Full disk*: the first block that finds no room is refused. All blocks after it that are on their way are refused
   too, also when the disk has stored them. No block is written until all of them are back.
   The next block is written at the offset of the first refused block. Before it, zeros overwrite the header of each
   later refused block, because the new block may end where such a block begins, and a reader would replay it. No other
   block is on its way meanwhile: the zeros may fall into its bytes, and a reader may find it at the end of the refused
   block if a crash loses the new one.

       on their way   | A | B | E |     A finds no room; B and E may be whole on the disk
       next           | C |0  |0  |     the headers of B and E first, then C in the place of A

   Without a segment to roll to, and with room again, the file goes on after C.
5. *Failed disk*: after any other failed write, or a failed sync, there is no effect any more: the process ends, and no
   waiter is answered.

A crash leaves at most `BLOCKS_IN_FLIGHT_MAX` unconfirmed blocks at the end of the newest file; a reader replays those
that are whole up to the first that is not. Bytes of an earlier use of a recycled file never count: they carry another
salt. Guarded by tests/bookie/store/journal/test_group_commit.py: a walk at random over a model disk, read back by the
real reader, replay.py. """

from __future__ import annotations

import enum
from collections import deque
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import msgspec

from ..format.journal import BLOCK_ALIGNMENT_BYTES, BLOCK_HEADER_BYTES, round_up_to_alignment

G = TypeVar("G")

JOURNAL_WORKERS = 2
"""The number of direct blocks that are written to the disk at the same time."""

BLOCKS_IN_FLIGHT_MAX = 3
"""The largest number of blocks that are given to workers and not yet answered. It is one more than JOURNAL_WORKERS, so
that a worker has its next block when it has written one."""


# ---------------------------------------------------------------------------------------- facts
class SegmentBegun(NamedTuple):
    """Fact: a new journal file (segment) is durable, with its header and its name. `number`: its number. Blocks can be
    written to it."""

    number: int
    size: int  # bytes that are filled ahead
    direct: bool  # each write is durable when it returns, and two may be in the disk at once


class NoRoomForSegment(NamedTuple):
    """Fact: the disk had no room to begin the next journal file (segment)."""


class BlockSynced(NamedTuple):
    """Fact: the block number `sequence` of the journal file is written and durable."""

    sequence: int


class NoRoomForBlock(NamedTuple):
    """Fact: the disk had no room for the block number `sequence`. Any part of the block may be on the disk."""

    sequence: int


class DiskRoomFound(NamedTuple):
    """Fact: the disk has room again for a block of the largest size."""


class JournalFailed(NamedTuple):
    """Fact: a write or a sync of the journal failed, and not because the disk is full. What is on the disk is
    unknown."""


GroupCommitFact = SegmentBegun | NoRoomForSegment | BlockSynced | NoRoomForBlock | DiskRoomFound | JournalFailed


# ---------------------------------------------------------------------------------------- effects
class WriteBlock(NamedTuple, Generic[G]):
    """Effect: write this block to the journal and sync it. Before that, write and sync `BLOCK_ALIGNMENT_BYTES` zero
    bytes at each offset of `zeros`. `groups`: the groups whose records are in the block. `records`: their number.
    `synced_upto`: the offset up to which the journal file is synced when the block is made."""

    groups: tuple[G, ...]
    sequence: int  # counts from 0 in each file
    offset: int
    size: int  # with header and padding; 0: no records, nothing is written
    length: int  # bytes of the records
    records: int
    synced_upto: int
    zeros: tuple[int, ...]
    lane: int  # below JOURNAL_WORKERS; blocks of one lane are written one after the other

    @property
    def end_offset(self) -> int:
        """The offset in the journal file at which the block ends, with its padding."""
        return self.offset + self.size


class BeginSegment(NamedTuple):
    """Effect: create the next journal file (segment). `journal` is the number of the file before it; `end` is the
    offset at which the last block of that file ends."""

    journal: int
    end: int


class ConfirmBlock(NamedTuple, Generic[G]):
    """Effect: tell the callers that their records in this block are durable."""

    block: WriteBlock[G]


class ReportNoRoomForBlock(NamedTuple, Generic[G]):
    """Effect: tell the callers that the disk had no room for this block with their records."""

    block: WriteBlock[G]


# ---------------------------------------------------------------------------------------- state
class GroupCommitState(enum.Enum):
    """The state of group commit. It decides what may be written next."""

    NEW = "no segment yet"
    WRITING = "blocks are written"
    STAYING = "no room for a new segment: the next block goes into this one"
    REFUSING = "a block found no room, and blocks after it are on their way"
    BEGINNING = "a segment begins"
    FAILED = "the disk failed"


_WRITING, _STAYING, _REFUSING, _FAILED = (
    GroupCommitState.WRITING,
    GroupCommitState.STAYING,
    GroupCommitState.REFUSING,
    GroupCommitState.FAILED,
)
"""Members of `GroupCommitState` as names of the module: reading a member of an enum costs as much as a call, for each
block."""


class _Flight(msgspec.Struct, Generic[G]):
    """A block that is not answered yet. `synced`: True if it is durable, False if the disk had no room for it, None
    while it is being written."""

    block: WriteBlock[G]
    synced: bool | None


class _Waiting(NamedTuple, Generic[G]):
    group: G
    size: int
    records: int


class GroupCommit(Generic[G]):
    """The core of the journal's group commit: decides which waiting records are written together in one block, and when
    their callers are answered. The module's docstring states the rules. `synced_upto` is the offset in the segment up
    to which everything is synced; `queued_bytes` are the bytes of records that wait or are on their way."""

    def __init__(self, *, block_bytes_max: int) -> None:
        self._block_bytes_max = block_bytes_max
        self._stage = GroupCommitState.NEW
        self._closing = False
        self._waiting: deque[_Waiting[G]] = deque()
        self._flights: deque[_Flight[G]] = deque()
        self._refused: set[int] = set()  # offsets of blocks refused since the last one was confirmed
        self._segment = SegmentBegun(0, 0, False)
        self._offset = 0  # of the next block
        self._sequence = 0
        self.synced_upto = 0  # of the segment
        self.queued_bytes = 0  # of records that wait or are on their way
        self.no_room = False  # the last block found none

    # ------------------------------------------------------------------------------------ intents
    def append_group(self, group: G, size: int, records: int) -> None:
        """Queues a group of records; `size` is the sum of their bytes, `records` their number. A group without records
        is answered after everything that was queued before it."""
        self._waiting.append(_Waiting(group, size, records))
        self.queued_bytes += size

    def close(self) -> None:
        """Ends the journal: `is_ended` becomes true when all groups are answered. No group may be appended after
        this."""
        self._closing = True

    # ------------------------------------------------------------------------------------ state
    @property
    def segment_number(self) -> int:
        """Returns the number of the journal file that is being written."""
        return self._segment.number

    @property
    def is_ended(self) -> bool:
        """Returns whether `close` was called and all groups are answered."""
        return self._closing and not (self._waiting or self._flights) and self._stage is not GroupCommitState.BEGINNING

    @property
    def has_waiting_groups(self) -> bool:
        """Returns whether any group of records waits to be put into a block."""
        return bool(self._waiting)

    @property
    def must_make_spare_file(self) -> bool:
        """Returns whether the current journal file is more than half full, so that the driver should make the next one
        (a spare file) ready."""
        return self._offset > self._segment.size // 2

    @property
    def queued_records(self) -> int:
        """Returns the number of records that wait to be put into a block. Walks over all waiting groups: use it only
        for statistics."""
        return sum(each.records for each in self._waiting)

    # ------------------------------------------------------------------------------------ facts
    def receive(self, fact: GroupCommitFact) -> list[ConfirmBlock[G] | ReportNoRoomForBlock[G]]:
        """Applies a fact. Returns the effects that answer callers because of it, in order; often none."""
        match fact:
            case BlockSynced():
                return self._back(fact.sequence, True)
            case NoRoomForBlock():
                return self._back(fact.sequence, False)
            case SegmentBegun():
                self._segment = fact
                self._stage = GroupCommitState.WRITING
                self._offset, self._sequence, self.synced_upto = BLOCK_ALIGNMENT_BYTES, 0, BLOCK_ALIGNMENT_BYTES
                self._refused.clear()  # they are after the end that the new header names
            case NoRoomForSegment():
                self._stage = GroupCommitState.STAYING
            case DiskRoomFound():
                self.no_room = False
            case JournalFailed():
                self._stage = GroupCommitState.FAILED
        return []

    def _back(self, sequence: int, synced: bool) -> list[ConfirmBlock[G] | ReportNoRoomForBlock[G]]:
        if self._stage is _FAILED:
            return []
        for flight in self._flights:
            if flight.synced is None and flight.block.sequence == sequence:
                flight.synced = synced
                break
        return self._answers()

    def _answers(self) -> list[ConfirmBlock[G] | ReportNoRoomForBlock[G]]:
        """Returns the effects that answer the oldest blocks, up to the first block that is still being written."""
        found: list[ConfirmBlock[G] | ReportNoRoomForBlock[G]] = []
        flights = self._flights
        while flights and flights[0].synced is not None:
            flight = flights.popleft()
            block = flight.block
            self.queued_bytes -= block.length
            if not block.size:
                found.append(ConfirmBlock(block))
            elif flight.synced and self._stage is not _REFUSING:
                self._refused.clear()
                self.synced_upto = block.offset + block.size
                self.no_room = False
                found.append(ConfirmBlock(block))
            else:
                self._refuse(block)
                found.append(ReportNoRoomForBlock(block))
        if not flights and self._stage is _REFUSING:
            self._stage = GroupCommitState.WRITING
        return found

    def _refuse(self, block: WriteBlock[G]) -> None:
        self.no_room = True
        self._refused.add(block.offset)
        if self._stage is not GroupCommitState.REFUSING:
            self._stage = GroupCommitState.REFUSING
            self._offset, self._sequence = block.offset, block.sequence

    # ------------------------------------------------------------------------------------ what comes next
    def next_effects(
        self, spare: bool
    ) -> list[WriteBlock[G] | BeginSegment | ConfirmBlock[G] | ReportNoRoomForBlock[G]]:
        """Returns the effects to carry out now: write the next block, begin the next journal file, or answer callers;
        none if nothing may be written now. `spare`: whether a spare file is ready to become the next journal file."""
        if not self._waiting or not (self._stage is _WRITING or self._stage is _STAYING):
            return []
        if len(self._flights) >= (1 if self._refused else BLOCKS_IN_FLIGHT_MAX):
            return []
        count, length, records = self._next_block()
        size = round_up_to_alignment(BLOCK_HEADER_BYTES + length) if records else 0
        end = self._offset + size
        if spare and end > self._segment.size and self._may_roll(size):
            if self._flights:
                return []
            self._stage = GroupCommitState.BEGINNING
            return [BeginSegment(self._segment.number, self._offset)]
        sequence = self._sequence
        block = WriteBlock(
            tuple([self._waiting.popleft().group for _ in range(count)]), sequence, self._offset, size, length,
            records, self.synced_upto, self._zeros() if self._refused else (),
            sequence % JOURNAL_WORKERS if self._segment.direct else 0,
        )  # fmt: skip
        if not size:
            self._flights.append(_Flight(block, True))
            return [*self._answers()]
        self._stage = _WRITING
        self._flights.append(_Flight(block, None))
        self._offset = end
        self._sequence = sequence + 1
        return [block]

    def _next_block(self) -> tuple[int, int, int]:
        """Returns (groups, bytes, records), the size of the next block: the first waiting group, and the groups after
        it that fit."""
        count = length = records = 0
        for _, size, number in self._waiting:
            if count and length + size > self._block_bytes_max:
                break
            count += 1
            length += size
            records += number
        return count, length, records

    def _may_roll(self, size: int) -> bool:
        """Returns whether the next journal file may begin: the current one has a block, and the last attempt to begin
        one did not find the disk full."""
        return size > 0 and self._offset > BLOCK_ALIGNMENT_BYTES and self._stage is GroupCommitState.WRITING

    def _zeros(self) -> tuple[int, ...]:
        """Returns the offsets of the refused blocks after the place where the next block is written."""
        return tuple(sorted(offset for offset in self._refused if offset > self._offset))

    # ------------------------------------------------------------------------------------ invariants
    def check(self) -> None:
        blocks = [flight.block for flight in self._flights]
        written = [block for block in blocks if block.size]
        assert len(blocks) <= BLOCKS_IN_FLIGHT_MAX, "more blocks are on their way than allowed"
        assert not blocks or self._stage not in (GroupCommitState.NEW, GroupCommitState.BEGINNING), (
            "a segment begins beside a block"
        )
        for before, after in pairwise(written):
            assert (before.end_offset, before.sequence + 1) == (after.offset, after.sequence), "blocks leave a gap"
        assert all(block.synced_upto <= self.synced_upto <= block.offset for block in written), (
            "a block that is not answered is before what is synced"
        )
        if self._stage is GroupCommitState.REFUSING:
            assert written, "a refusal outlasts the blocks on their way"
            assert self._offset < written[0].offset, "the next block would leave a gap at the refused one"
        elif self._stage in (GroupCommitState.WRITING, GroupCommitState.STAYING):
            expected = written[-1].end_offset if written else self.synced_upto
            assert self._offset == expected, "the next block would leave a gap"
            assert len(written) <= (1 if self._refused else BLOCKS_IN_FLIGHT_MAX), (
                "a block is on its way beside a repeated one"
            )
        zeroed = [block for block in written if block.zeros]
        assert all(offset > block.offset for block in zeroed for offset in block.zeros), "zeros over the block itself"
        assert not self._refused or min(self._refused) >= self.synced_upto, "what is synced was refused"
        waiting = sum(each.size for each in self._waiting)
        assert self.queued_bytes == waiting + sum(block.length for block in blocks), "bytes are counted wrongly"
