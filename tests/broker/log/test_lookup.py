"""Looking up by index and time in every small log of which entries are lost, or lost and passed over.

The judge knows the whole log, also what is lost: it says for each question which entry is asked for, and whether that
can be told from what is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import pytest

from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.log.log_shape_core import LOST_ENTRY_READS_MAX, LedgerSpan, LogShape, find_first_entry_by_bisection
from magnetar.broker.log.reader import TopicLogReader
from magnetar.proto.errors import DataLost, MagnetarError, Unavailable
from magnetar.proto.names import Position

THERE, PASSED, LOST = "there", "passed over", "lost"


class Entry(NamedTuple):
    position: Position
    state: str
    first_index: int
    count: int
    time_ms: int

    @property
    def end(self) -> int:
        return self.first_index + self.count


class Log:
    """A fake of the caches and the bookies: what is there is in the cache, what is lost is on no bookie."""

    recent = None

    def __init__(self, ledgers: list[list[str]], join: bool = False, error: type[MagnetarError] = DataLost) -> None:
        self.error = error
        self.entries: list[Entry] = []
        self.shape = LogShape()
        holes: dict[int, list[tuple[int, int]]] = {}
        index = 0
        for ledger_id, states in enumerate(ledgers, start=7):
            begin = index
            for number, state in enumerate(states):
                count = 1 + len(self.entries) % 2
                entry = Entry(Position(ledger_id, number), state, index, count, 10 * (len(self.entries) // 2))
                self.entries.append(entry)
                index += count
                if state == PASSED:
                    runs = holes.setdefault(ledger_id, [])
                    if join and runs and runs[-1][1] == number - 1:
                        runs[-1] = (runs[-1][0], number)
                    else:
                        runs.append((number, number))
            self.shape.add(LedgerSpan(ledger_id, begin, len(states) - 1, index))
        self.shape.set_skipped_lost_ranges(holes, 0)
        self._by_position = {each.position: each for each in self.entries}
        self.reader = TopicLogReader(cast("Any", self), self.shape, cast("Any", self))

    def get(self, position: Position) -> StoredEntry | None:
        entry = self._by_position[position]
        if entry.state != THERE:
            return None
        return StoredEntry(position, (b"",), entry.count, entry.end - 1, 1, entry.time_ms)

    async def open(self, ledger_id: int) -> Log:
        return self

    last_entry = 1 << 30

    async def read_stored(self, first: int, last: int, bytes_max: int) -> list[Any]:
        raise self.error("no bookie has it")

    # ------------------------------------------------------------------ the judge
    def next_there(self, place: int) -> Entry | None:
        """The first from a place of the list on that was not passed over. DataLost: it is lost."""
        for each in self.entries[place:]:
            if each.state == LOST:
                raise DataLost("")
            if each.state == THERE:
                return each
        return None

    def of_index(self, index: int) -> Entry | None:
        place = next(at for at, each in enumerate(self.entries) if each.first_index <= index < each.end)
        wanted = self.entries[place]
        if wanted.state == THERE:
            return wanted
        for step in (-1, 1):  # the stretch of its ledger that is not there has no indexes of its own
            at = place
            while 0 <= at < len(self.entries) and self.entries[at].position[0] == wanted.position[0]:
                if self.entries[at].state == THERE:
                    break
                if self.entries[at].state == LOST:
                    raise DataLost("")
                at += step
        return self.next_there(place)

    def of_time(self, time_ms: int) -> Entry | None:
        found = next((e for e in self.entries if e.state == THERE and e.time_ms >= time_ms), None)
        end = self.entries.index(found) if found is not None else len(self.entries)
        for each in reversed(self.entries[:end]):
            if each.state == THERE:
                break
            if each.state == LOST:
                raise DataLost("")
        return found


def logs() -> Iterator[Log]:
    for size in range(1, 6):
        for states in itertools.product((THERE, PASSED, LOST), repeat=size):
            for cut in range(size):
                ledgers = [list(states[:cut]), list(states[cut:])] if cut else [list(states)]
                yield Log(ledgers, join=bool(cut % 2))


async def asked(question: Any, expected: Any, log: Log) -> None:
    try:
        entry = expected()
    except DataLost:
        with pytest.raises(DataLost) as refused:
            await question
        fields = refused.value.fields
        ends = [Position(int(fields["ledger"]), int(fields[each])) for each in ("first", "last")]
        assert [log._by_position[each].state for each in ends] == [LOST, LOST], fields
        assert "skip-lost" in refused.value.message
        return
    found = await question
    if entry is None:
        assert found == (log.shape.position_after(log.shape.last_position), log.shape.end_index)
    else:
        assert found == (entry.position, entry.first_index)


async def test_every_index_of_every_small_log_is_found_or_told_to_be_lost() -> None:
    for log in logs():
        for index in range(log.entries[-1].end):
            await asked(log.reader.find_position_by_index(index), lambda log=log, index=index: log.of_index(index), log)  # type: ignore[misc]


async def test_every_time_of_every_small_log_is_found_or_told_to_be_lost() -> None:
    for log in logs():
        for time_ms in range(-5, log.entries[-1].time_ms + 10, 5):
            await asked(log.reader.find_position_by_time(time_ms), lambda log=log, at=time_ms: log.of_time(at), log)  # type: ignore[misc]


async def test_the_index_after_every_mark_is_known_and_the_last_one_that_is_there_is_shown() -> None:
    for log in logs():
        for place, entry in enumerate(log.entries):
            if entry.state == THERE:
                following = next((e for e in log.entries[place + 1 :] if e.state != PASSED), None)
                wanted = log.entries[-1].end if following is None else following.first_index
                if following is not None and following.state == LOST and following.position[1] > 0:
                    wanted = entry.end  # how much of what is between was passed over is not known
                assert await log.reader.find_message_index_after(entry.position) == wanted
        last = next((each for each in reversed(log.entries) if each.state != PASSED), None)
        if last is not None and last.state == THERE:
            shown = (last.position, last.count - 1 if last.count > 1 else -1, last.end - 1)
            assert await log.reader.read_last_message() == shown
        elif last is not None:
            with pytest.raises(DataLost):
                await log.reader.read_last_message()


async def test_what_a_silent_bookie_may_have_is_not_lost() -> None:
    log = Log([[THERE, LOST, THERE]], error=Unavailable)
    for question in (log.reader.find_position_by_index(2), log.reader.find_position_by_time(10)):
        with pytest.raises(Unavailable):
            await question


async def test_a_search_looks_at_a_bounded_number_of_lost_entries() -> None:
    looked = []

    async def entry_of(entry_id: int) -> StoredEntry:
        looked.append(entry_id)
        raise DataLost("no bookie has it")

    with pytest.raises(DataLost):
        await find_first_entry_by_bisection(1 << 20, entry_of, lambda entry: True)
    assert len(looked) == LOST_ENTRY_READS_MAX + 1
