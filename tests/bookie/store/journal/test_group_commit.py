"""The journal's core, walked at random over a model disk: short writes, a full disk, a failed sync, crashes anywhere.

After each crash the real reader (bookie/store/replay.py) says what counts. A failure names its
seed: `walk(seed)`.
"""

from __future__ import annotations

import contextlib
import errno
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest

from magnetar.bookie.format.journal import BLOCK_ALIGNMENT_BYTES, RecordType, encode_record
from magnetar.bookie.store import disk
from magnetar.bookie.store import group_commit_core as core
from magnetar.bookie.store.group_commit_core import (
    BeginSegment,
    BlockSynced,
    ConfirmBlock,
    DiskRoomFound,
    GroupCommit,
    GroupCommitState,
    JournalFailed,
    NoRoomForBlock,
    NoRoomForSegment,
    ReportNoRoomForBlock,
    SegmentBegun,
    WriteBlock,
)
from magnetar.bookie.store.journal import JournalRecordGroup, encode_block_buffers
from magnetar.bookie.store.replay import JournalPosition, JournalReader, JournalSegment, JournalSegments
from magnetar.runtime.sim.disk import SECTOR_BYTES, FileFault, SimDisk, SimFiles
from tests.compiled import replaces_code

UUID = bytes(range(16))
FOLDER = "/journal"
BLOCK_BYTES_MAX = 3 * BLOCK_ALIGNMENT_BYTES
SEGMENT_BYTES = 10 * BLOCK_ALIGNMENT_BYTES
LIVES = 4
STEPS = 60


class Death(Exception):
    """The process dies here."""


def group_of(number: int, rng: random.Random) -> JournalRecordGroup:
    """A group whose entry ids name it; most fill whole blocks, so that blocks end where others began."""
    group = JournalRecordGroup()
    if rng.random() < 0.05:
        return group
    payload = rng.randbytes(rng.choice((100, 100, 4000, 4000, 4000, 7000, BLOCK_BYTES_MAX - 200)))
    header, group.size = encode_record(RecordType.ADD, 1, number, (payload,))
    group.headers, group.buffers = [header], [header, payload]
    return group


@dataclass
class Line:
    """What the file may hold after the last confirmed block: one list of groups for each try since then."""

    tries: list[list[int]] = field(default_factory=lambda: [[]])

    def allows(self, tail: list[int]) -> bool:
        return any(tail == each[: len(tail)] for each in self.tries)


class Walk:
    """One bookie's journal over several lives. `confirmed`: groups that must be replayed in this life, in order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimDisk()
        self.direct = self.disk.takes_direct = self.rng.random() < 0.6
        self.files = SimFiles(self.disk)
        self.files.make_directories(FOLDER)
        self.end = JournalPosition(0, 0)
        self.next_group = 0
        self.seen: dict[str, int] = dict.fromkeys(("confirmed", "refused", "strays", "rolls", "recycled", "torn"), 0)

    # ------------------------------------------------------------------ one life
    def live(self) -> None:
        rng = self.rng
        self.core: GroupCommit[int] = GroupCommit(block_bytes_max=BLOCK_BYTES_MAX)
        self.groups: dict[int, JournalRecordGroup] = {}
        self.empty: set[int] = set()
        self.flying: dict[int, WriteBlock[int]] = {}
        self.beginning: BeginSegment | None = None
        self.asked: list[int] = []
        self.answers: list[int] = []
        self.confirmed: list[int] = []
        self.line = Line()
        self.segments = JournalSegments(
            self.files, FOLDER, UUID, rng, mock.Mock(), segment_bytes=SEGMENT_BYTES,
            first_segment_bytes=rng.choice((3, 10)) * BLOCK_ALIGNMENT_BYTES, spares_max=2, direct=self.direct,
        )  # fmt: skip
        self.segments.adopt_spare_files()
        self.segment: JournalSegment | None = None
        try:
            self.begun(self.end)
            self.segments.release(JournalPosition(self.end.journal + 1, 0))  # a checkpoint has what was replayed
            for _ in range(rng.randrange(STEPS)):
                self.step()
                self.core.check()
        except Death:
            self.core.check()
        self.crash()

    def step(self) -> None:
        rng = self.rng
        actions: list[Callable[[], None]] = [self.append, self.advance]
        actions += [self.block_comes_back] * 2 if self.flying else []
        actions += [self.segment_comes_back] if self.beginning else []
        actions += [self.room_found] if self.core.no_room else []
        rng.choice(actions)()

    def append(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2, 4))):
            number = self.next_group
            self.next_group += 1
            group = self.groups[number] = group_of(number, self.rng)
            if not group.size:
                self.empty.add(number)
            self.asked.append(number)
            self.core.append_group(number, group.size, len(group.headers))

    def advance(self) -> None:
        for effect in self.core.next_effects(spare=bool(self.segments.spares) or self.fill()):
            match effect:
                case WriteBlock():
                    assert self.beginning is None
                    self.flying[effect.sequence] = effect
                    self.place(effect)
                case BeginSegment():
                    assert not self.flying, "the header of the next segment may only name what is synced"
                    self.beginning = effect
                case _:
                    self.answer(effect)

    def fill(self) -> bool:
        """A spare, sometimes, as the filling in the background makes one."""
        if self.rng.random() < 0.7:
            return False
        path = f"{FOLDER}/spare-{self.rng.getrandbits(64):016x}"
        file = self.files.open(path, create=True)
        file.pwrite([bytes(SEGMENT_BYTES)], 0)
        file.fdatasync()
        self.segments.spares.append(path)
        return True

    def place(self, block: WriteBlock[int]) -> None:
        """Where the block goes it takes the place of whatever was refused there."""
        if block.offset == self.core.synced_upto:
            self.line.tries.append([])
        self.line.tries[-1] += [number for number in block.groups if number not in self.empty]
        self.seen["strays"] += bool(block.zeros)

    # ------------------------------------------------------------------ the disk answers
    def block_comes_back(self) -> None:
        rng = self.rng
        lanes: dict[int, WriteBlock[int]] = {}
        for block in self.flying.values():
            lanes.setdefault(block.lane, block)
        block = rng.choice(list(lanes.values()))
        del self.flying[block.sequence]
        fate = rng.random()
        if fate < 0.02:
            self.write(block, whole=rng.random() < 0.5, synced=False)
            self.receive(JournalFailed())
            assert self.core.next_effects(spare=True) == []
            for other in self.flying.values():
                assert self.core.receive(BlockSynced(other.sequence)) == []
            raise Death
        if fate < 0.30:
            self.write(block, whole=False, synced=False)
            self.receive(NoRoomForBlock(block.sequence))
        else:
            self.write(block, whole=True, synced=True)
            self.receive(BlockSynced(block.sequence))

    def write(self, block: WriteBlock[int], *, whole: bool, synced: bool) -> None:
        """What the worker does; not whole: it finds no room somewhere, perhaps within the padding."""
        assert self.segment is not None
        file = self.segment.file if synced and self.direct else self.files.open(self.segment.file.path)
        pieces = [(place, bytes(BLOCK_ALIGNMENT_BYTES)) for place in block.zeros]
        groups = WriteBlock(tuple(self.groups[number] for number in block.groups), *block[1:])
        data = b"".join(encode_block_buffers(groups, self.segment.number, self.segment.salt))
        pieces.append((block.offset, data + bytes(block.size - len(data))))
        for number, (offset, piece) in enumerate(pieces):
            last = number == len(pieces) - 1
            if not whole and (last or self.rng.random() < 0.3):
                sectors = len(piece) // SECTOR_BYTES
                short = self.rng.choice((self.rng.randrange(sectors), sectors - 1))
                file.pwrite([piece[: short * SECTOR_BYTES]], offset)
                return
            file.pwrite([piece], offset)
            if synced or not last:
                file.fdatasync()

    def begun(self, previous: JournalPosition) -> None:
        spare = self.segments.spares.pop() if self.segments.spares else ""
        self.seen["recycled"] += spare[-16:].isdigit()
        self.segment = self.segments.make_segment(spare, previous)
        self.receive(SegmentBegun(self.segment.number, self.segment.size, self.segment.file.direct))

    def segment_comes_back(self) -> None:
        assert self.beginning is not None
        previous = JournalPosition(*self.beginning)
        self.beginning = None
        fate = self.rng.random()
        if fate < 0.15:
            self.disk.crash_at_operation(self.rng.randrange(1, 6), self.die)
        elif fate < 0.3:
            self.disk.faults.append(FileFault("pwrite", "spare", errno.ENOSPC))
        spares = list(self.segments.spares)
        try:
            self.begun(previous)
            self.seen["rolls"] += 1
            self.line = Line()
        except disk.NoSpace:
            self.segments.spares = spares
            self.receive(NoRoomForSegment())
        finally:
            self.disk.cancel_crash()

    def die(self) -> None:
        raise Death

    def room_found(self) -> None:
        self.receive(DiskRoomFound())
        assert not self.core.no_room

    # ------------------------------------------------------------------ what follows
    def receive(self, fact: core.GroupCommitFact) -> None:
        for answer in self.core.receive(fact):
            self.answer(answer)

    def answer(self, answer: ConfirmBlock[int] | ReportNoRoomForBlock[int]) -> None:
        self.answers += answer.block.groups
        numbers = [number for number in answer.block.groups if number not in self.empty]
        if isinstance(answer, ReportNoRoomForBlock):
            self.seen["refused"] += 1
            return
        self.confirmed += numbers
        self.seen["confirmed"] += len(numbers)
        if answer.block.size:
            rest = self.line.tries[-1][len(numbers) :]
            self.line = Line([rest])

    def crash(self) -> None:
        """Anything of what was on its way may be on the disk; then the real reader says what counts."""
        assert self.answers == self.asked[: len(self.answers)], "answers have the order of the groups"
        for block in self.flying.values():
            if self.rng.random() < 0.7:
                self.write(block, whole=self.rng.random() < 0.7, synced=False)
        if self.beginning is not None and self.rng.random() < 0.5:
            self.disk.crash_at_operation(self.rng.randrange(1, 6), self.die)
            with contextlib.suppress(Death):
                self.begun(JournalPosition(*self.beginning))
        self.disk.faults.clear()
        if self.rng.random() < 0.7:
            self.disk.on_power_lost(self.rng)
        else:
            self.disk.on_process_died()
        start = JournalPosition(self.end.journal + 1, BLOCK_ALIGNMENT_BYTES)
        reader = JournalReader(self.files, FOLDER, UUID, start)
        replayed: list[int] = []
        while not reader.finished:
            for found in reader.read_blocks(1 << 20):
                replayed += found.records.entries
        assert reader.damages == [], "nothing that was synced is gone"
        assert replayed[: len(self.confirmed)] == self.confirmed, "what was confirmed is replayed, in order"
        tail = replayed[len(self.confirmed) :]
        assert self.line.allows(tail), f"{tail} counts, and the file can only go on with {self.line.tries}"
        self.seen["torn"] += bool(reader.torn_bytes)
        self.end = reader.end


def walk(seed: int, lives: int = LIVES) -> dict[str, int]:
    walked = Walk(seed)
    for _ in range(lives):
        walked.live()
    return walked.seen


SEEDS = 200


def _walk_all() -> dict[str, int]:
    total: dict[str, int] = {}
    for seed in range(SEEDS):
        try:
            seen = walk(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        total = {name: total.get(name, 0) + count for name, count in seen.items()}
    return total


def test_what_is_confirmed_is_replayed_and_what_was_refused_never_counts_after_another_block() -> None:
    total = _walk_all()
    assert all(count > SEEDS // 10 for count in total.values()), total


def _no_zeros(real: Callable[..., None], commit: GroupCommit[int], block: WriteBlock[int]) -> None:
    """A block that was refused may be read after the one that takes the place of the block before it."""
    real(commit, block)
    commit._refused = {commit._offset}


def _later_block_counts(real: Callable[..., None], commit: GroupCommit[int], block: WriteBlock[int]) -> None:
    """A block that is synced is confirmed although one before it found no room."""
    real(commit, block)
    commit._stage = GroupCommitState.WRITING


def _confirmed_when_written(real: Callable[..., None], commit: GroupCommit[int], sequence: int, synced: bool) -> Any:
    """One answer of the disk counts for every block on its way."""
    for flight in commit._flights:
        flight.synced = synced
    return real(commit, sequence, synced)


@pytest.mark.parametrize(
    ("where", "fault"),
    [("_refuse", _no_zeros), ("_refuse", _later_block_counts), ("_back", _confirmed_when_written)],
    ids=lambda value: getattr(value, "__name__", ""),
)
@replaces_code
def test_the_walk_finds(where: str, fault: Callable[..., Any]) -> None:
    real = getattr(GroupCommit, where)
    with (
        mock.patch.object(GroupCommit, where, lambda *arguments: fault(real, *arguments)),
        mock.patch.object(GroupCommit, "check"),
        pytest.raises(AssertionError),
    ):
        _walk_all()
