"""The shape of a topic's log (`LogShape`): which ledgers it has, in which order, and where each ends. Also in this
file: a search among entries some of which are lost (`find_first_entry_by_bisection`), the rules of trimming and
retention (`list_reasons_to_keep_ledgers`), the age at which a ledger ends (`find_ledger_age_share`), the risks of
quorums, runs of positions, and the shape for readers of committed entries (`CommittedShape`).

A topic is a list of ledgers whose ids increase, so positions (ledger, entry) compare as tuples. All ledgers but the
last are closed and end at a known entry; the last one may be open, and grows. Other modules ask the shape for "the
entry after", "the entry before" and "the number of messages between", and do not compute positions themselves.
`last_entry` of the open ledger is the last *confirmed* entry: no later entry is read, acknowledged or counted. Indexes
count the messages of the whole topic without gaps: a span has the indexes `first_index` … `end_index - 1`. Trimming
removes ledgers that no holder needs, also between others. So an index between two spans belongs to a trimmed message.

A `CommittedShape` has the positions of a log for readers of committed entries: it ends at the last stable position.

    shape = CommittedShape(log.shape)           as the log itself, at no cost
    shape.set_transaction_outcomes(outcomes)    from now on it ends where `outcomes` says, without aborted entries

The *last stable position* is the last entry up to which each entry is in no transaction, or in one that is committed or
aborted. All methods skip aborted entries: `position_after`, `position_before`, `position_at_or_after`, `last_position`,
the counts. So a cursor's mark moves over them, consumers do not read them, no backlog counts them, and no subscription
stores anything about them. An entry up to the last stable position never changes between visible and hidden.
`has_entry` and `last_confirmed` include hidden entries: acknowledgements are checked by these. (After a take-over the
last stable position may be before entries that were delivered already, until the outcomes are known again.)
Guarding tests: tests/broker/topic/test_transactions_core.py, tests/broker/topic/test_shown.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
from pyroaring import BitMap

from ...ledger.placement_core import StripingReduction
from ...proto.checksum import crc32c
from ...proto.errors import DataLost
from ...proto.names import Position, TopicName
from ...proto.states import LedgerStays
from .cache import StoredEntry


class LedgerSpan(msgspec.Struct):
    """The part of a log that is in one ledger. `last_entry`: the id of the last confirmed entry, -1 if there is none
    yet; `first_index`: the index of its first message; `end_index`: the index after its last message; `size`: its
    bytes; `open`: True while the ledger is written; `closed_ms`: when it was closed (ms since the epoch), 0 while it is
    open."""

    ledger_id: int
    first_index: int
    last_entry: int = -1
    end_index: int = -1
    size: int = 0
    open: bool = False
    closed_ms: int = 0

    def __post_init__(self) -> None:
        if self.end_index < 0:
            self.end_index = self.first_index


class LogShape:
    """The ledgers of a log, each as a LedgerSpan, oldest first. `add`, `close_last_ledger_span` and `remove` change the
    list; the last span grows with each confirmed entry. Hides no entries and counts no messages as aborted;
    CommittedShape overrides the methods that say so."""

    __slots__ = ("_followers", "_holes", "_ids", "_least_index", "_spans")

    def __init__(self) -> None:
        self._holes: dict[int, list[tuple[int, int]]] = {}  # ledger → (first, last) of entries that were passed over
        self._least_index = 0  # of the next message: lost ones before it had theirs
        self._ids: list[int] = []
        self._spans: dict[int, LedgerSpan] = {}
        self._followers: list[LogShape] = []  # shapes that hold the same spans, and maybe others

    # ------------------------------------------------------------------ changes
    def add(self, span: LedgerSpan) -> LedgerSpan:
        """Appends a span to the log and returns it. Its ledger id must be larger than all others, and all other spans
        must be closed."""
        assert not self._ids or span.ledger_id > self._ids[-1], "ledger ids of a topic increase"
        assert not self._ids or not self._spans[self._ids[-1]].open, "only the last ledger of a topic is open"
        self._ids.append(span.ledger_id)
        self._spans[span.ledger_id] = span
        for follower in self._followers:
            follower.add(span)
        return span

    def close_last_ledger_span(
        self, ledger_id: int, last_entry: int, end_index: int, size: int, closed_ms: int
    ) -> None:
        """Closes the last span. `last_entry`: its final last entry; `end_index`: the index after its last message;
        `size`: its bytes; `closed_ms`: the present time (ms since the epoch). The metadata must say already that the
        ledger is CLOSED."""
        span = self._spans[ledger_id]
        assert last_entry >= span.last_entry, "a ledger closes at or after what was confirmed"
        span.last_entry, span.end_index, span.size = last_entry, end_index, size
        span.open, span.closed_ms = False, closed_ms

    def remove(self, ledger_id: int) -> None:
        """Removes the span of a ledger that the topic's record no longer names."""
        assert not self._spans[ledger_id].open, "the open ledger is never trimmed"
        self._ids.remove(ledger_id)
        del self._spans[ledger_id]
        for follower in self._followers:
            follower.remove(ledger_id)

    def set_skipped_lost_ranges(self, holes: dict[int, list[tuple[int, int]]], least_index: int) -> None:
        """Sets the ranges of lost entries (`holes`: first and last entry id) that an operator has skipped, by ledger:
        consumers continue after these entries. From now on no new message gets an index below `least_index`."""
        self._holes, self._least_index = holes, least_index
        for follower in self._followers:
            follower.set_skipped_lost_ranges(holes, least_index)

    def skipped_lost_range_end(self, position: Position) -> Position | None:
        """Returns the last position of the range of skipped lost entries that contains `position`; None if the entry at
        `position` was not skipped."""
        found = self.skipped_lost_range(position)
        return None if found is None else Position(position[0], found[1])

    def skipped_lost_range(self, position: Position) -> tuple[int, int] | None:
        """Returns the first and the last entry id of the range of skipped lost entries that contains `position`; None
        if the entry at `position` was not skipped."""
        found = self._holes.get(position[0]) if self._holes else None
        return next((run for run in found or () if run[0] <= position[1] <= run[1]), None)

    def next_unskipped_position(self, position: Position) -> Position:
        """Returns the first position at or after `position` that is not in a range of skipped lost entries. An entry
        exists there, or the next entry will be stored there."""
        position = self.position_at_or_after(position)
        while (last := self.skipped_lost_range_end(position)) is not None:
            position = self.position_after(last)
        return position

    @property
    def last_unskipped_position(self) -> Position:
        """Returns the position of the last entry that readers see and that is not in a range of skipped lost entries; a
        position with an entry id below 0 if there is none."""
        position = self.last_position
        while (run := self.skipped_lost_range(position)) is not None:
            position = self.position_before(Position(position[0], run[0]))
        return position

    def add_follower(self, follower: LogShape) -> None:
        """Makes `follower` follow this shape: it gets all present spans, and every later change."""
        self._followers.append(follower)
        follower.set_skipped_lost_ranges(self._holes, self._least_index)
        for span in self.spans:
            follower.add(span)

    # ------------------------------------------------------------------ questions
    @property
    def spans(self) -> list[LedgerSpan]:
        """Returns a new list of the spans of the log, one for each ledger, the oldest first."""
        return [self._spans[id_] for id_ in self._ids]

    def __len__(self) -> int:
        return len(self._ids)

    def __bool__(self) -> bool:
        return True  # a log without ledgers is one

    @property
    def tail_span(self) -> LedgerSpan:
        """Returns the span of the last ledger. The log must have a ledger."""
        return self._spans[self._ids[-1]]

    def find_span_of_ledger(self, ledger_id: int) -> LedgerSpan | None:
        """Returns the span of the log in this ledger; None if the log has no such ledger."""
        return self._spans.get(ledger_id)

    @property
    def first_index(self) -> int:
        """Returns the index of the oldest message that is still in the log, or of the next message if the log is empty;
        0 if the log has no ledger."""
        return self._spans[self._ids[0]].first_index if self._ids else 0

    @property
    def end_index(self) -> int:
        """Returns the index after the last confirmed message that readers see. That is the number of messages ever
        stored, unless indexes were left out for lost messages."""
        return max(self.tail_span.end_index, self._least_index) if self._ids else self._least_index

    def count_messages_from(self, index: int) -> int:
        """Returns the number of messages in the log whose index is at least `index`."""
        if not self._ids or index >= self.tail_span.end_index:
            return 0
        count = 0
        for ledger_id in reversed(self._ids):
            span = self._spans[ledger_id]
            if span.end_index <= index:
                break
            count += span.end_index - max(span.first_index, index)
        return count

    def index_after_next_messages(self, index: int, messages: int) -> int:
        """Skips `messages` messages of the log, from the index `index` on, and returns the index of the message after
        them. If the log has fewer messages, returns the index that the next message will get."""
        for ledger_id in self._ids:
            span = self._spans[ledger_id]
            index = max(index, span.first_index)
            if index + messages < span.end_index:
                return index + messages
            messages -= max(0, span.end_index - index)
        return self.end_index

    @property
    def size(self) -> int:
        """Returns the bytes of all confirmed entries in the log."""
        if len(self._ids) == 1:
            return self._spans[self._ids[0]].size
        return sum([span.size for span in self._spans.values()])

    @property
    def single_open_span(self) -> LedgerSpan | None:
        """Returns the span of the only ledger of the log, if the log has exactly one ledger and that is open; else
        None. While this span is open, it stays the only one."""
        if len(self._ids) != 1:
            return None
        span = self._spans[self._ids[0]]
        return span if span.open else None

    def has_readable_entry_after(self, mark: Position) -> bool:
        """Returns True if there is at least one confirmed entry after the position `mark` that readers see."""
        if self._ids:
            tail = self._spans[self._ids[-1]]
            if mark[0] == tail.ledger_id and mark[1] >= tail.last_entry:
                return False
        last = self.last_position
        return last.entry_id >= 0 and mark < last

    @property
    def start_position(self) -> Position:
        """Returns the position directly before the first entry. A cursor with this mark begins at the earliest
        message."""
        return Position(self._ids[0], -1) if self._ids else Position(-1, -1)

    @property
    def last_position(self) -> Position:
        """Returns the position of the last confirmed entry that readers see; `start_position` if there is none."""
        return self.last_confirmed

    @property
    def stable_position(self) -> Position:
        """Returns the last stable position: all transactions with entries up to this position have ended. Without
        transactions, this is the position of the last confirmed entry."""
        return self.last_confirmed

    @property
    def last_confirmed(self) -> Position:
        """Returns the position of the last confirmed entry, including entries that readers do not see; `start_position`
        if the log is empty."""
        for ledger_id in reversed(self._ids):
            span = self._spans[ledger_id]
            if span.last_entry >= 0:
                return Position(ledger_id, span.last_entry)
        return self.start_position

    def position_at_or_after(self, position: Position) -> Position:
        """Returns the first position at or after `position` at which an entry exists, or at which the next entry will
        be stored."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and (span.open or entry_id <= span.last_entry):
            return position if entry_id >= 0 else Position(ledger_id, 0)
        for later in self._ids[bisect_right(self._ids, ledger_id) :]:
            if self._spans[later].open or self._spans[later].last_entry >= 0:
                return Position(later, 0)
        if not self._ids:
            return position
        return Position(self._ids[-1], self.tail_span.last_entry + 1)

    def position_after(self, position: Position) -> Position:
        """Returns the position that follows `position`, in the next ledger if necessary. The entry at this position may
        not exist yet."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and (span.open or entry_id < span.last_entry):
            return Position(ledger_id, entry_id + 1)
        return self.position_at_or_after(Position(ledger_id, entry_id + 1))

    def position_before(self, position: Position) -> Position:
        """Returns the position of the last entry before `position`; `start_position` if there is none. A cursor with
        this mark reads the entry at `position` next."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and entry_id > 0:
            return (
                Position(ledger_id, min(entry_id - 1, span.last_entry))
                if span.last_entry >= 0
                else self.position_before(Position(ledger_id, 0))
            )
        for earlier in reversed(self._ids[: bisect_left(self._ids, ledger_id)]):
            if self._spans[earlier].last_entry >= 0:
                return Position(earlier, self._spans[earlier].last_entry)
        return self.start_position

    def has_visible_entry(self, position: Position) -> bool:
        """Returns True if there is a confirmed entry at `position`, and readers see it."""
        span = self._spans.get(position[0])
        return span is not None and 0 <= position[1] <= span.last_entry

    def hidden_entries_of_ledger(self, ledger_id: int) -> BitMap | None:
        """Returns the ids of the entries of the ledger that readers never see, such as aborted ones; None if there are
        none."""
        return None

    def count_visible_entries(self, ledger_id: int, first: int) -> int:
        """Returns how many entries of the ledger readers see, beginning at the entry id `first`."""
        span = self._spans.get(ledger_id)
        return max(0, span.last_entry - first + 1) if span is not None else 0

    def count_aborted_messages(self, first: int, end: int) -> int:
        """Returns the number of messages with indexes `first` … `end - 1` that are in aborted transactions."""
        return 0

    def last_hidden_position_after(self, mark: Position) -> Position:
        """Returns the last of the consecutive positions directly after `mark` whose entries readers never see; `mark`
        itself if readers see the next entry."""
        return mark

    def has_entry(self, position: Position) -> bool:
        """Returns True if there is a confirmed entry at `position`, even if readers do not see it."""
        span = self._spans.get(position[0])
        return span is not None and 0 <= position[1] <= span.last_entry

    def clamp_mark_to_log(self, mark: Position) -> Position:
        """Returns the position `mark`, moved to the start of the log if it is before that, or to the last entry if it
        is after that."""
        return min(max(mark, self.start_position), max(self.last_position, self.start_position))

    def find_span_of_index(self, index: int) -> LedgerSpan | None:
        """Returns the span that contains the message with the index `index`, or, if that is missing, the next existing
        message; None if there is no such message."""
        spans = [span for span in self.spans if span.last_entry >= 0]
        place = bisect_right(spans, index, key=lambda span: span.end_index)
        return spans[place] if place < len(spans) else None

    def check(self) -> None:
        """Raises AssertionError unless ledger ids increase, only the last ledger is open, and the indexes of two
        ledgers do not overlap."""
        assert self._ids == sorted(self._spans), "ids are not the spans, in order"
        for ledger_id in self._ids[:-1]:
            assert not self._spans[ledger_id].open, "a ledger that is not the last is open"
        for before, after in zip(self.spans, self.spans[1:], strict=False):
            assert before.end_index <= after.first_index, "indexes of two ledgers overlap"


# --------------------------------------------------------------------------------------------------- lookup_core
# Looking an entry of a ledger up by what never falls along it (index, time), where entries are lost.
#
# Rules:
# - What an operator passed over (`topics skip-lost`) is left out: the answer is the next entry that exists.
# - A lost entry that was not passed over is skipped by the search as long as the answer does not depend on it. Where it
#   does, the caller raises `DataLost` with the range: `EntrySearchResult.lost` are the lost entries directly before the
#   one that was found, and one of them may be the right answer.
# - Unavailable is not lost: it ends the search, and the caller may ask again.
# Bounds: LOST_ENTRY_READS_MAX lost entries in a row are tried; each costs a question to every replica.
# Guarding test: tests/broker/log/test_lookup.py.


LOST_ENTRY_READS_MAX = 100
"""How many entries after a lost one are tried, to find one that still exists."""

EntryIdRange = tuple[int, int]
"""A range of entries in one ledger: the first and the last entry id."""
ReadLedgerEntry = Callable[[int], Awaitable[StoredEntry]]
"""Reads an entry of the ledger. Raises DataLost if it is lost."""


class EntrySearchResult(NamedTuple):
    """The result of a search for an entry. `entry`: the entry, or None if none was found. `lost`: the range of lost
    entries directly before the entry (if none was found, at the end of the ledger); None if no entry is lost there."""

    entry: StoredEntry | None
    lost: EntryIdRange | None = None  # directly before it, or at the end of the ledger


async def find_first_entry_by_bisection(
    last: int, entry_of: ReadLedgerEntry, reached: Callable[[StoredEntry], bool],
    passed_over: Callable[[int], EntryIdRange | None] = lambda entry_id: None,
) -> EntrySearchResult:  # fmt: skip
    """Returns the first existing entry, with an entry id from 0 to `last`, for which the function `reached` returns
    True. If there is none, `entry` of the result is None. Searches by bisection: `reached` must return True for all
    later entries, too.

    `entry_of`: reads the entry with an id; `passed_over`: returns the range of skipped lost entries that contains an
    entry id, or None. Raises DataLost if more than LOST_ENTRY_READS_MAX entries in a row are lost, and the other errors
    of `entry_of`.
    """
    lost: set[int] = set()

    async def there(first: int, end: int) -> StoredEntry | None:
        """Returns the first entry that can be read from `first` to `end`; None: there is none."""
        entry_id, looked = first, 0
        while entry_id <= end:
            run = passed_over(entry_id)
            if run is not None:
                entry_id = run[1] + 1
                continue
            if entry_id not in lost:
                try:
                    return await entry_of(entry_id)
                except DataLost:
                    lost.add(entry_id)
                    looked += 1
                    if looked > LOST_ENTRY_READS_MAX:
                        raise
            entry_id += 1
        return None

    low, high, found = 0, last, None
    while low <= high:
        middle = (low + high) // 2
        entry = await there(middle, high)
        if entry is not None and not reached(entry):
            low = entry.position[1] + 1
        else:
            found, high = entry or found, middle - 1  # none is there from the middle up to the entry
    return EntrySearchResult(found, _before(last + 1 if found is None else found.position[1], lost, passed_over))


def _before(entry_id: int, lost: set[int], passed_over: Callable[[int], EntryIdRange | None]) -> EntryIdRange | None:
    """Returns the range of lost entries directly before the entry, without those that an operator has skipped; None if
    there are none."""
    found: list[int] = []
    at = entry_id - 1
    while at >= 0:
        run = passed_over(at)
        if run is None and at not in lost:
            break
        if run is None:
            found.append(at)
        at = (at if run is None else run[0]) - 1
    return (found[-1], found[0]) if found else None


def make_data_lost_error(ledger_id: int, run: EntryIdRange, about: str = "") -> DataLost:
    """Returns the DataLost error for the entries `run` (first and last entry id), which every replica has lost.
    `about`: the beginning of its message, which names the subscription or the topic, and ends with a colon."""
    first, last = run
    return DataLost(
        f"{about}entries {first} to {last} of ledger {ledger_id} are lost: every replica is certain to lack them. "
        "Restore a bookie that has them; or pass over them on purpose: for all with "
        "`magnetar topics skip-lost`, for one subscription alone with `magnetar subscriptions reset`",
        ledger=ledger_id, first=first, last=last,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------- trimming_core
# The rules of trimming: which ledgers of a topic may be deleted, and why each of the others stays.
#
# Rules (ledger protocol §3.6, invariant 34; Pulsar A16): a ledger is deleted when it is closed, is not the last of the
# list, every holder needs it no more, and retention releases it. Holders are the durable cursors, deduplication (up to
# its last snapshot), transactions (up to the first entry of an open one, and the last stored outcomes) and compaction
# (up to its horizon): `Topic` collects them. A cursor needs a ledger no more when it has *safely* acknowledged all of
# it: its mark is at or after the end (not the position in memory alone: after a crash the cursor falls back; nor the
# persisted one alone: after a seek it is ahead), or each entry is acknowledged out of order and that is stored
# (`TrimLimit.released_ledgers`). The open ledger is never deleted. All conditions up to the bytes on the disk:
# docs/design/data-deletion.md.
#
# So one message that is not acknowledged, or that is delayed for a month, keeps its own ledger and none of those after
# it: the list has gaps then (log_shape_core.py), which every reader skips. (Pulsar keeps all after the first that
# stays.)
#
# **A topic without a durable subscription** may get one tomorrow, or is read by index (Spark, a reader): its messages
# stay for a time and up to a size of their own, the policies `unsubscribed_minutes` and `unsubscribed_mib`; what is
# reached first. `unread` is that retention, and none as soon as the topic has a durable subscription or is compacted.
#
# Retention: `minutes` and `mib`, 0 = none, -1 = without limit. Acknowledged data stays while it is younger than
# `minutes` (since its ledger closed) and while the acknowledged ledgers after it contain less than `mib`. Both 0: it is
# deleted at once.


class TrimLimit(NamedTuple):
    """The part of the log that one holder (such as a subscription) no longer needs, not even after a crash: everything
    up to `mark`, and the later ledgers `released_ledgers`. `why`: the reason that users see for a ledger that this
    holder keeps."""

    mark: Position
    released_ledgers: frozenset[int] = frozenset()  # ledgers after the mark
    why: LedgerStays = LedgerStays.NOT_ACKNOWLEDGED  # a ledger that is not passed stays

    def has_released_ledger(self, span: LedgerSpan) -> bool:
        """Returns True if the holder no longer needs the ledger of `span`."""
        return self.mark >= (span.ledger_id, span.last_entry) or span.ledger_id in self.released_ledgers


class Retention(msgspec.Struct, frozen=True):
    """For how long (`minutes`), and up to which size (`mib`), the acknowledged ledgers of a topic are kept; the limit
    that is reached first counts. Both 0: not at all; -1: no limit by this one."""

    minutes: int = 0
    mib: int = 0

    def describe(self) -> str:
        """Returns a text that describes the retention to users; empty if nothing is retained."""
        if not self.minutes:
            return ""
        time = "for ever" if self.minutes < 0 else f"for {self.minutes} minutes"
        return f"kept {time}" + (f" and up to {self.mib} MiB" if self.mib > 0 else "")


NO_RETENTION = Retention()


def list_reasons_to_keep_ledgers(
    shape: LogShape, holders: Sequence[TrimLimit], retention: Retention, now_ms: int, unread: Retention = NO_RETENTION
) -> list[tuple[int, LedgerStays | None]]:
    """Returns a pair for each ledger, oldest first: the ledger id, and the reason why the ledger is kept; None instead
    of a reason if it may be deleted. `holders`: what each holder no longer needs; `now_ms`: the wall clock (ms since
    the epoch); `unread`: the retention for a topic without durable subscriptions."""
    result: list[tuple[int, LedgerStays | None]] = []
    acknowledged = sum(span.size for span in shape.spans if not span.open and _passed(span, holders))
    for span in shape.spans:
        if span.open or span is shape.tail_span:
            stays: LedgerStays | None = LedgerStays.OPEN
        elif (holder := _holder(span, holders)) is not None:
            stays = holder.why
        else:
            acknowledged -= span.size
            stays = _kept(span, retention, now_ms, acknowledged, unread)
        result.append((span.ledger_id, stays))
    return result


def find_trimmable_ledgers(
    shape: LogShape, holders: Sequence[TrimLimit], retention: Retention, now_ms: int, unread: Retention = NO_RETENTION
) -> list[int]:
    """Returns the ids of the ledgers that may be deleted now, as `list_reasons_to_keep_ledgers`, with the same
    arguments, decides."""
    kept = list_reasons_to_keep_ledgers(shape, holders, retention, now_ms, unread)
    return [ledger for ledger, stays in kept if stays is None]


def may_trim_last_ledger(
    last: LedgerSpan, holders: Sequence[TrimLimit], retention: Retention, now_ms: int, unread: Retention = NO_RETENTION
) -> bool:
    """Returns True if the last ledger, with the span `last`, may be deleted as soon as another ledger follows it. It
    must be closed. The other arguments are those of `list_reasons_to_keep_ledgers`."""
    return _passed(last, holders) and _kept(last, retention, now_ms, 0, unread) is None


def _kept(span: LedgerSpan, retention: Retention, now_ms: int, younger: int, unread: Retention) -> LedgerStays | None:
    if _retained(span, unread, now_ms, younger) is not None:
        return LedgerStays.NOT_SUBSCRIBED
    return _retained(span, retention, now_ms, younger)


def _retained(span: LedgerSpan, retention: Retention, now_ms: int, younger: int) -> LedgerStays | None:
    """Returns the reason why the retention keeps a ledger; None if the retention does not keep it. `younger`: the bytes
    of the later ledgers that no holder needs."""
    by_time = retention.minutes < 0 or now_ms - span.closed_ms < retention.minutes * 60_000
    by_size = retention.mib < 0 or younger < retention.mib << 20
    if retention.minutes == 0 and retention.mib == 0:
        return None
    if not by_time and retention.minutes > 0:
        return None
    if not by_size and retention.mib > 0:
        return None
    return LedgerStays.RETAINED_BY_TIME if by_time and retention.minutes else LedgerStays.RETAINED_BY_SIZE


def _passed(span: LedgerSpan, holders: Sequence[TrimLimit]) -> bool:
    return _holder(span, holders) is None


def _holder(span: LedgerSpan, holders: Sequence[TrimLimit]) -> TrimLimit | None:
    """Returns the first holder that still needs the ledger; None if none does."""
    if span.last_entry < 0:
        return None
    return next((holder for holder in holders if not holder.has_released_ledger(span)), None)


# ------------------------------------------------------------------------------------------------- roll_age_core
# The age at which a topic's ledger ends. Topics that one restart, one deployment or one program began at the same
# moment would all end their ledgers at the same moment again, each with three commits to the metadata and a request to
# each bookie. So each ledger has a share of the age of its own, which is the same at every broker and at every look.

LEDGER_AGE_JITTER = 0.2
"""A ledger ends at an age between (1 - LEDGER_AGE_JITTER) times the limit and the limit: 10,000 topics with
`roll_minutes` = 240 end theirs within 48 minutes, 3.5 a second, and none later than the setting says."""


def find_ledger_age_share(topic: TopicName, ledger_id: int) -> float:
    """Returns the share of an age limit at which the ledger `ledger_id` of the topic ends: more than
    1 - LEDGER_AGE_JITTER, at most 1. It depends on the two arguments alone. The shares of many topics, and of many
    ledgers of one topic, are spread evenly. Guarding test: tests/broker/log/test_log_shape.py."""
    return 1.0 - LEDGER_AGE_JITTER * crc32c(f"{ledger_id} {topic.full}".encode()) / (1 << 32)


# -------------------------------------------------------------------------------------------------- quorums_core
# The risks of a choice of ensemble, write quorum and ack quorum (E, Qw, Qa); reported to the operator who sets it,
# never refused.
#
# E ≥ Qw ≥ Qa ≥ 1 is demanded elsewhere (broker/cluster/catalog.py). What is allowed may still be unwise:
#
# - Qa = 1: an entry may be confirmed with one synced copy, and is lost with that disk.
# - Qw = Qa: each entry waits for its slowest bookie, and for a replacement when one fails.
# - E above the available bookies: ledgers shrink (ledger/placement_core.py `fit`), down to Qw in any case.
# - Qw above them: copies are given up, or publishing waits, as the brokers' `degraded_writes` says.
# - E = Qw = the available bookies: no other one can replace one that fails.
#
# Guarding test: tests/broker/log/test_quorums.py.


def get_allowed_striping_reduction(*, degraded_writes: bool) -> StripingReduction:
    """Returns which parts of the replication may be smaller in a new ledger while bookies are missing: the number of
    bookies, and, if `degraded_writes` is set, the number of copies."""
    return StripingReduction.COPIES if degraded_writes else StripingReduction.BOOKIES


def describe_quorum_risks(ensemble: int, write_quorum: int, ack_quorum: int, bookies: int) -> list[str]:
    """Returns the risks of a ledger with these quorums, each as one sentence for users; [] if there are none.
    `ensemble`: the number of bookies of the ledger; `write_quorum`: that of the copies of an entry; `ack_quorum`: that
    of the copies that must be synced before an entry is confirmed; `bookies`: the number of bookies that are writable
    now."""
    found = []
    if ack_quorum < 2:
        found.append("an ack quorum of 1 confirms with one synced copy: what is confirmed is lost with one disk")
    if write_quorum == ack_quorum and write_quorum > 1:
        found.append(
            f"with a write quorum equal to the ack quorum ({ack_quorum}) each entry waits for its slowest bookie, and "
            "publishing stops at each failure until another bookie has taken the place"
        )
    if write_quorum > bookies:
        found.append(
            f"a write quorum of {write_quorum} needs {write_quorum} bookies and {bookies} are writable: new ledgers "
            f"have {'fewer copies' if bookies >= ack_quorum else 'to wait'}, or publishing waits where "
            "degraded_writes is off"
        )
    elif ensemble > bookies:
        found.append(
            f"an ensemble of {ensemble} needs {ensemble} bookies and {bookies} are writable: new ledgers are made over "
            f"{bookies}"
        )
    elif ensemble == write_quorum == bookies > 1:
        found.append(f"no bookie is left to take the place of one that fails: {bookies} are writable, each is needed")
    return found


# ----------------------------------------------------------------------------------------------------- runs_core
# Runs of contiguous values in bitmaps, found in logarithmically many steps.


def find_end_of_contiguous(entries: BitMap, first: int) -> int:
    """Returns the last of the consecutive values in `entries` that begin with `first`. The set must contain `first`."""
    low, step = first, 1
    while entries.contains_range(low, low + step + 1):
        low, step = low + step, step * 2
    while step:
        if entries.contains_range(low, low + step + 1):
            low += step
        step //= 2
    return low


def find_start_of_contiguous(entries: BitMap, last: int) -> int:
    """Returns the first of the consecutive values in `entries` that end with `last`. The set must contain `last`."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if entries.contains_range(middle, last + 1):
            high = middle
        else:
            low = middle + 1
    return low


# ------------------------------------------------------------------------------------------ committed_shape_core


class TxnOutcomes(Protocol):
    """Tells a shape which entries are aborted, and up to which position all transactions have ended.
    TopicTransactionsCore implements it; CommittedShape calls it."""

    @property
    def aborted(self) -> Mapping[int, BitMap]:
        """Returns, for each ledger, the ids of the entries that belong to aborted transactions."""

    @property
    def stable_position(self) -> Position:
        """Returns the last stable position: all transactions with entries up to this position have ended. Returns the
        position before the first entry of the log if there is no such position."""

    @property
    def stable_index(self) -> int:
        """Returns the index of the first message after the last stable position."""

    def count_aborted_messages(self, first: int, end: int) -> int:
        """Returns the number of messages with indexes `first` … `end - 1` that are in aborted transactions."""


class CommittedShape(LogShape):
    """The shape of a log for readers that get only committed entries. It follows the shape of the log itself
    (`LogShape.add_follower`). Before `set_transaction_outcomes` is called, it is equal to that shape."""

    __slots__ = ("_decided",)

    def __init__(self, log: LogShape) -> None:
        super().__init__()
        self._decided: TxnOutcomes | None = None
        log.add_follower(self)

    def set_transaction_outcomes(self, decided: TxnOutcomes) -> None:
        """Sets the object that knows the outcomes of transactions. From now on this shape ends at the last stable
        position, and leaves out aborted entries."""
        self._decided = decided

    @property
    def outcomes(self) -> TxnOutcomes:
        """Returns the object that knows the outcomes of transactions. `set_transaction_outcomes` must have been called
        before."""
        assert self._decided is not None, "it shows what is committed"
        return self._decided

    # ------------------------------------------------------------------ what is left out
    def _skip_aborted(self, position: Position) -> Position:
        """Returns the first position at or after `position` that is not aborted."""
        decided = self._decided
        while decided is not None and decided.aborted:
            aborted = decided.aborted.get(position[0])
            if aborted is None or position[1] < 0 or position[1] not in aborted:
                break
            position = self._following(Position(position[0], find_end_of_contiguous(aborted, position[1])))
        return position

    def _following(self, position: Position) -> Position:
        """Returns the position after `position`, even if the entry there is aborted (`position_after` skips aborted
        entries)."""
        ledger_id, entry_id = position
        span = self._spans.get(ledger_id)
        if span is not None and (span.open or entry_id < span.last_entry):
            return Position(ledger_id, entry_id + 1)
        return super().position_at_or_after(Position(ledger_id, entry_id + 1))

    def hidden_entries_of_ledger(self, ledger_id: int) -> BitMap | None:
        decided = self._decided
        return decided.aborted.get(ledger_id) if decided is not None else None

    def last_hidden_position_after(self, mark: Position) -> Position:
        if self._decided is None:
            return mark
        following = self._skip_aborted(first := self._following(mark))
        return mark if following == first else super().position_before(following)

    # ------------------------------------------------------------------ questions
    @property
    def end_index(self) -> int:
        return super().end_index if self._decided is None else self._decided.stable_index

    @property
    def last_position(self) -> Position:
        decided = self._decided
        if decided is None:
            return self.last_confirmed
        stable = decided.stable_position
        if stable[1] < 0:
            return self.start_position
        aborted = decided.aborted.get(stable[0])
        return stable if aborted is None or stable[1] not in aborted else self.position_before(stable)

    @property
    def stable_position(self) -> Position:
        """Returns the last stable position: all transactions with entries up to this position have ended. The entry at
        this position may be aborted."""
        return self.last_confirmed if self._decided is None else self._decided.stable_position

    def has_visible_entry(self, position: Position) -> bool:
        decided = self._decided
        if decided is None:
            return self.has_entry(position)
        if position > decided.stable_position or not self.has_entry(position):
            return False
        aborted = decided.aborted.get(position[0])
        return aborted is None or position[1] not in aborted

    def position_at_or_after(self, position: Position) -> Position:
        found = super().position_at_or_after(position)
        return found if self._decided is None else self._skip_aborted(found)

    def position_after(self, position: Position) -> Position:
        return (
            super().position_after(position) if self._decided is None else self._skip_aborted(self._following(position))
        )

    def position_before(self, position: Position) -> Position:
        found = super().position_before(position)
        decided = self._decided
        while decided is not None and found[1] >= 0:
            aborted = decided.aborted.get(found[0])
            if aborted is None or found[1] not in aborted:
                break
            found = super().position_before(Position(found[0], find_start_of_contiguous(aborted, found[1])))
        return found

    def is_every_entry_visible(self, first: Position, last: Position) -> bool:
        """Returns True if readers see every entry from `first` to `last`. Both positions must be in one ledger."""
        decided = self._decided
        if decided is None:
            return True
        aborted = decided.aborted.get(first[0])
        return last <= decided.stable_position and (
            aborted is None or not aborted.range_cardinality(first[1], last[1] + 1)
        )

    def count_messages_from(self, index: int) -> int:
        decided = self._decided
        if decided is None:
            return super().count_messages_from(index)
        end = decided.stable_index
        if index >= end:
            return 0
        return (
            super().count_messages_from(index)
            - super().count_messages_from(end)
            - decided.count_aborted_messages(index, end)
        )

    def index_after_next_messages(self, index: int, messages: int) -> int:
        if self._decided is None:
            return super().index_after_next_messages(index, messages)
        low, high, total = index, self.end_index, self.count_messages_from(index)
        if messages >= total:
            return high
        while low < high:  # the first index after which fewer than `total - messages` messages are left
            middle = (low + high) // 2
            if total - self.count_messages_from(middle + 1) > messages:
                high = middle
            else:
                low = middle + 1
        return low

    def count_aborted_messages(self, first: int, end: int) -> int:
        return 0 if self._decided is None or first >= end else self._decided.count_aborted_messages(first, end)

    def count_visible_entries(self, ledger_id: int, first: int) -> int:
        span = self.find_span_of_ledger(ledger_id)
        if span is None:
            return 0
        last, decided = span.last_entry, self._decided
        if decided is None:
            return max(0, last - first + 1)
        if ledger_id >= decided.stable_position[0]:
            last = min(last, decided.stable_position[1]) if ledger_id == decided.stable_position[0] else -1
        if first > last:
            return 0
        aborted = decided.aborted.get(ledger_id)
        return last - first + 1 - (aborted.range_cardinality(first, last + 1) if aborted is not None else 0)
