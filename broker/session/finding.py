"""Finds messages of a topic by what they contain, for `magnetar topics find` and the search of the web page.

    found = await find_messages(broker, FindRequest(topic, SearchCriteria(key="k7")), caller)     at the topic's owner

A search reads the topic backwards from its end, or from `before_index` where the search before it stopped, in windows
of indexes; each window is read forwards by `EntryRangeReader`. It finds only messages that a consumer could get: no
message of an open or an aborted transaction.

What need not be read is not read, in this order: the bounds of time and index; the key indexes of sealed ledgers
(broker/log/key_indexes.py), where the topic has them, which say which blocks may have a match; then the heads, and
payloads only for `text`. The answer says how many messages were passed over, and how many ledgers have no index. A
*dry run* reads indexes alone, and says what would be read.

One search ends when it has found `limit` messages, looked at SEARCHED_MESSAGES_MAX messages or SEARCHED_BYTES_MAX
bytes, has FOUND_BYTES_MAX of found entries, or has run for SEARCH_S_MAX seconds; it always ends the window that it has
begun. The answer says how far it got and why it stopped, so that what was not looked at is not taken for absent. At
most SEARCHES_AT_ONCE_MAX searches run at a broker at a time, and one in each topic.

The caller needs the permission to consume, which is checked again while a search reads.
Guarding tests: tests/broker/session/test_finding.py, tests/broker/rest/test_page_messages.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
from pyroaring import BitMap

from ...proto.entry import (
    EntryHeader,
    decode_for_inspection,
    decode_properties,
    decode_text,
    parse_entry,
    parse_stored_head,
)
from ...proto.entry_filter import EntryFilter, read_field
from ...proto.errors import BackPressure, CorruptEntry, InvalidRequest, MagnetarError
from ...proto.filters import And, Compare, Filter, FilterNode, IsNull, Literal, Name, Not, parse_filter
from ...proto.names import Position, TopicName
from ...proto.statistics import FilterTrial, FoundEntry, FoundMessages
from ...runtime.alarm import EventLoopSlices
from ...runtime.files import Buffer
from ...runtime.network import CallContext, World
from ..log.cache import StoredEntry
from ..log.key_index_core import DamagedKeyIndex, EntryRun, find_block_of_index
from ..log.log_shape_core import LedgerSpan
from ..log.unfolding import run_in_thread_if_slow
from ..node.topic_manager import TopicManager
from ..subscription.core.cursor import Cursor
from ..topic.topic import Topic
from .backlogs import EntryRangeReader, MessageIndexRange

FOUND_MESSAGES_MAX = 100
"""Most messages that one search finds, and as many as it finds if the caller says nothing."""
SEARCHED_MESSAGES_MAX = 100_000
SEARCHED_BYTES_MAX = 64 << 20
SEARCH_S_MAX = 10.0
"""What one search looks at: about a second of a core."""
FOUND_BYTES_MAX = 4 << 20
"""Bytes of the entries in one answer, above which a search stops."""
SEARCHES_AT_ONCE_MAX = 2
PATTERN_CHARACTERS_MAX = 1000
"""Characters of what is searched for."""
WINDOW_MESSAGES_MAX = 1000
WINDOW_BYTES_MAX = 4 << 20
"""A window has at most so many messages, and less of them where they are larger."""
UNCOMPRESSED_ENTRY_BYTES_MAX = 8 << 20
ENTRY_MESSAGES_MAX = 1000
"""Uncompressed bytes and messages of an entry that is looked into."""


class SearchCriteria(NamedTuple):
    """What a message must have to be found: the key `key`, the property `name` with the value `value` (None: any
    value), a payload that contains `text`, and what the filter `where` demands. An empty criterion is ignored; all
    others must hold."""

    key: str = ""
    name: str = ""
    value: str | None = None
    text: bytes = b""
    where: Filter | None = None

    def make_expression(self) -> FilterNode | None:
        """Returns the part of the criteria that a key index can evaluate, as an expression that is TRUE for each
        message that matches; None if only `text` is given, or nothing."""
        parts = list[FilterNode]()
        if self.key:
            parts.append(Compare("=", Name("message.key", is_system=True), Literal(self.key)))
        if self.name:
            name = Name(self.name, is_system=False)
            parts.append(Not(IsNull(name)) if self.value is None else Compare("=", name, Literal(self.value)))
        if self.where is not None:
            parts.append(self.where.root)
        return And(tuple(parts)) if parts else None

    def matches_message(self, about: Any, payload: bytes, header: EntryHeader) -> bool:
        """Returns True if a message matches all criteria. `about`: the metadata of the message; `header`: that of its
        entry. An encrypted payload, or a chunk of one, never contains `text`."""
        if self.key and decode_text(about.partition_key) != self.key:
            return False
        if self.text and (is_encrypted_or_chunked(header) or self.text not in payload):
            return False
        if not self.name and self.where is None:
            return True
        found = decode_properties(about)
        if self.name and (self.name not in found or self.value not in (None, found[self.name])):
            return False
        read = partial(read_field, about, len(payload), header.metadata)
        return self.where is None or self.where.matches(found, read)


def parse_criteria(key: str, property_: str, text: str, where: str) -> SearchCriteria:
    """Returns the criteria of a search. `property_`: NAME, or NAME=VALUE; `where`: a filter (proto/filters.py). An
    empty text is no criterion. Raises InvalidRequest if the filter does not parse, or another text is longer than
    PATTERN_CHARACTERS_MAX."""
    if any(len(each) > PATTERN_CHARACTERS_MAX for each in (key, property_, text)):
        raise InvalidRequest(f"what is searched for has at most {PATTERN_CHARACTERS_MAX} characters")
    name, has_value, value = property_.partition("=")
    wanted = parse_filter(where) if where else None
    return SearchCriteria(key, name.strip(), value.strip() if has_value else None, text.encode(), wanted)


def is_encrypted_or_chunked(header: EntryHeader) -> bool:
    """Returns True if a broker cannot read the payloads of the entry: they are encrypted, or a chunk of a larger
    message."""
    return bool(header.metadata.encryption_keys) or header.metadata.num_chunks_from_msg > 1


def is_too_large(header: EntryHeader) -> bool:
    """Returns True if the entry is too large for a search: it has more than UNCOMPRESSED_ENTRY_BYTES_MAX uncompressed
    bytes, or more than ENTRY_MESSAGES_MAX messages."""
    return header.uncompressed_size > UNCOMPRESSED_ENTRY_BYTES_MAX or header.num_messages > ENTRY_MESSAGES_MAX


async def decode_messages(world: World, header: EntryHeader, entry: Buffer) -> Sequence[tuple[Any, bytes]]:
    """Returns the metadata and the payload of each message of an entry, decoded in a thread if that takes long. Raises
    CorruptEntry if the entry does not decode."""
    return await run_in_thread_if_slow(entry, world, decode_for_inspection, header, entry)


# --------------------------------------------------------------------------------------------------------- trial
TRIAL_MESSAGES_DEFAULT, TRIAL_MESSAGES_MAX = 1000, 10_000
"""How many of the newest messages a trial of a filter judges, if the caller does not say, and at most."""


async def try_filter(
    broker: TopicManager, topic_name: str, text: str, messages: int, caller: CallContext
) -> FilterTrial:
    """Judges the newest `messages` messages (0: TRIAL_MESSAGES_DEFAULT) of a topic that this broker owns by the filter
    `text`, and returns how many it wants. Changes nothing. Raises InvalidRequest if the filter does not parse, or
    `messages` is not 0 to TRIAL_MESSAGES_MAX; BackPressure if SEARCHES_AT_ONCE_MAX searches are running, or one in this
    topic; and the errors of `TopicManager.load_topic` and `EntryRangeReader.read_entries`."""
    wanted = parse_filter(text.strip())
    if not 0 <= messages <= TRIAL_MESSAGES_MAX:
        raise InvalidRequest(f"a filter is tried on 1 to {TRIAL_MESSAGES_MAX} messages, not {messages}")
    shape = (await broker.load_topic(TopicName.parse(topic_name), create=False)).shown.shape
    first = max(shape.first_index, shape.end_index - (messages or TRIAL_MESSAGES_DEFAULT))
    asked = MessageIndexRange(topic_name, first, shape.end_index, SEARCHED_BYTES_MAX)
    judge, turns = EntryFilter(wanted), EventLoopSlices(broker.world.clock)
    judged = unwanted = entries = whole = mixed = unread = 0
    with _running(broker, topic_name):
        reader = EntryRangeReader(broker, asked, caller, counts_as_delivered=False)
        async with aclosing(reader.read_entries(turns)) as found:
            async for entry in found:
                head = parse_stored_head(entry.frames[-1])
                bits = await run_in_thread_if_slow(
                    entry.frames[-1], broker.world, judge.find_unwanted_bits, head, entry.frames[-1]
                )
                judged, unwanted, entries = judged + entry.count, unwanted + bits.bit_count(), entries + 1
                whole += bits.bit_count() == entry.count
                mixed += 0 < bits.bit_count() < entry.count
                batched = head.metadata.HasField("num_messages_in_batch")
                unread += entry.count if batched and head.metadata.encryption_keys else 0
                if turns.is_slice_used_up:
                    await turns.begin_slice()
    return FilterTrial(judged, judged - unwanted, entries, whole, mixed, unread)


# -------------------------------------------------------------------------------------------------------- search
class FindRequest(msgspec.Struct, frozen=True):
    """A search for messages of `topic` (its full name) that meet the `criteria`. `since_ms`, `until_ms`: when they were
    stored, from (inclusive) and to (exclusive), in ms since the epoch; 0: no bound. `before_index`: their indexes are
    below it; 0: up to the end. `limit`: the most messages to find; 0: FOUND_MESSAGES_MAX. `dry_run`: reads key indexes
    only; the answer has no messages, and says how many messages and bytes a search would look at."""

    topic: str
    criteria: SearchCriteria
    since_ms: int = 0
    until_ms: int = 0
    before_index: int = 0
    limit: int = 0
    dry_run: bool = False
    acknowledged_by: str = ""  # a subscription: the answer says which of the messages it has acknowledged


class _Found(NamedTuple):
    message_index: int
    entry: StoredEntry
    batch_index: int


class _Window(msgspec.Struct):
    """What a window of indexes has. `is_cut`: it is larger than WINDOW_BYTES_MAX, and was not read to its end."""

    found: list[_Found]
    bytes: int = 0
    unread: int = 0
    is_cut: bool = False


@contextmanager
def _running(broker: TopicManager, topic: str) -> Iterator[None]:
    """Counts a search in the topic as running while the `with` block runs. Raises BackPressure if too many searches
    are running, or one in this topic."""
    if topic in broker.searched or len(broker.searched) >= SEARCHES_AT_ONCE_MAX:
        raise BackPressure("another search is running: try again in some seconds")
    broker.searched.add(topic)
    try:
        yield
    finally:
        broker.searched.discard(topic)


async def find_messages(broker: TopicManager, wanted: FindRequest, caller: CallContext) -> FoundMessages:
    """Searches a topic that this broker owns, and returns the found messages, the newest entry first, and how far the
    search got. Raises InvalidRequest (such as for a limit above FOUND_MESSAGES_MAX), NotAllowed, NotOwner,
    TopicNotFound, Unauthorized, Unavailable or DataLost, or another error of `TopicManager.load_topic`; BackPressure if
    SEARCHES_AT_ONCE_MAX searches are running, or one in this topic."""
    if wanted.limit > FOUND_MESSAGES_MAX or min(wanted.since_ms, wanted.until_ms, wanted.before_index) < 0:
        raise InvalidRequest(
            f"a search finds at most {FOUND_MESSAGES_MAX} messages, between two times, before an index"
        )
    topic = await broker.load_topic(TopicName.parse(wanted.topic), create=False)
    shape, reader = topic.shown.shape, topic.shown.reader
    floor = max(
        shape.first_index, (await reader.find_position_by_time(wanted.since_ms)).first_index if wanted.since_ms else 0
    )
    end = (await reader.find_position_by_time(wanted.until_ms)).first_index if wanted.until_ms else shape.end_index
    waiting = topic.waiting_message_count if end == shape.end_index else 0
    end = min(end, wanted.before_index or end)
    # without criteria it wants the newest messages, which is as much as any read
    with nullcontext() if wanted.criteria == SearchCriteria() else _running(broker, wanted.topic):
        found = await _BackwardSearch(broker, wanted, caller, topic, floor, end).run()
    found = found if wanted.before_index else replace(found, waiting=waiting)
    if not (subscription := topic.subscriptions.get(wanted.acknowledged_by)):
        return found
    entries = tuple(_mark_acknowledged(each, subscription.cursor) for each in found.entries)
    return replace(found, entries=entries, tells_acknowledged=True)


def _mark_acknowledged(entry: FoundEntry, cursor: Cursor) -> FoundEntry:
    """Returns the entry with the batch indexes of those messages that the subscription has acknowledged."""
    position = Position(entry.ledger_id, entry.entry_id)
    if cursor.is_acked(position):
        return replace(entry, acknowledged=tuple(range(parse_entry(entry.entry)[1].num_messages)))
    return replace(entry, acknowledged=tuple(sorted(cursor.acked_indexes(position))))


class _Range(NamedTuple):
    """Consecutive indexes, from `low` to below `high`, of about so many bytes. `is_block`: they are a block of a key
    index, and are read at once. `entries`: the first and the last entry of them, if they are known."""

    low: int
    high: int
    bytes: int = 0
    is_block: bool = False
    entries: tuple[Position, Position] | None = None


class _IndexedRanges:
    """Goes backwards through the indexes of a topic, by the key indexes of its ledgers. `ledgers`: that it came to,
    `unindexed` of them sealed and without an index; both 0 if no index can help."""

    def __init__(self, topic: Topic, expression: FilterNode | None) -> None:
        self.ledgers = self.unindexed = self.read_bytes = 0
        self._topic, self._expression = topic, expression
        self._is_on = expression is not None and topic.key_indexes.is_on
        self._ledger_id = -1
        self._blocks: list[EntryRun] | None = None  # of that ledger; None: it has no index
        self._candidates = BitMap()

    async def find_next_range(self, floor: int, before: int) -> _Range:
        """Returns the range next below `before` that may have a match; what is between its end and `before` has none.
        It is empty if the ledger has none. No range is larger than a ledger."""
        span = self._find_span_below(before) if self._is_on else None
        if span is None:
            return _Range(floor, before, self._estimate_bytes(floor, before))
        if span.end_index < before and not span.open:
            end = max(floor, span.end_index)
            return _Range(end, end)  # no message has the indexes in between
        if span.ledger_id != self._ledger_id:
            await self._open_index(span)
        low = max(floor, span.first_index)
        if self._blocks is None:
            return _Range(low, before, self._estimate_bytes(low, before))
        while count := self._candidates.rank(find_block_of_index(self._blocks, before - 1)):
            number = self._candidates[count - 1]
            block, following = self._blocks[number], self._blocks[number + 1 : number + 2]
            high = min(before, following[0].first_index) if following else before
            if block.first_index < high:
                first = Position(span.ledger_id, block.first_entry)
                last = Position(span.ledger_id, following[0].first_entry - 1 if following else span.last_entry)
                entries = (first, last) if low <= block.first_index else None
                return _Range(max(low, block.first_index), max(low, high), block.bytes, True, entries)
            before = block.first_index  # it has only what cannot be parsed
            self._candidates.discard(number)
        return _Range(low, low)

    def _estimate_bytes(self, low: int, high: int) -> int:
        size = 0.0
        for span in self._topic.log.shape.spans:
            common = min(high, span.end_index) - max(low, span.first_index)
            size += span.size * max(0, common) / max(1, span.end_index - span.first_index)
        return int(size)

    def _find_span_below(self, before: int) -> LedgerSpan | None:
        spans = [span for span in self._topic.log.shape.spans if span.last_entry >= 0]
        place = bisect_left(spans, before, key=lambda span: span.first_index)
        return spans[place - 1] if place else None

    async def _open_index(self, span: LedgerSpan) -> None:
        indexes, self._ledger_id, self._blocks = self._topic.key_indexes, span.ledger_id, None
        self.ledgers += 1
        if span.open:
            return
        assert self._expression is not None, "an index is asked something"
        search = await indexes.open_index(span.ledger_id)
        if search is not None:
            try:
                self._candidates = await search.find_candidates(self._expression)
                self._blocks = search.index.blocks
            except (MagnetarError, DamagedKeyIndex) as error:
                indexes.on_index_unusable(span.ledger_id, error)
            self.read_bytes += search.read_bytes
        self.unindexed += self._blocks is None


class _BackwardSearch:
    """Searches the indexes of a topic from `before - 1` down to `floor`."""

    def __init__(
        self, broker: TopicManager, wanted: FindRequest, caller: CallContext, topic: Topic, floor: int, before: int
    ) -> None:
        self._broker, self._wanted, self._caller = broker, wanted, caller
        self._clock = broker.world.clock
        self._ranges = _IndexedRanges(topic, wanted.criteria.make_expression())
        self._floor, self._before = floor, before
        self._most = wanted.limit or FOUND_MESSAGES_MAX
        self._turns, self._end_s = EventLoopSlices(self._clock), self._clock.monotonic() + SEARCH_S_MAX
        self._found = list[_Found]()
        self._messages = self._skipped = self._bytes = self._answer_bytes = self._unread = 0
        all_wanted = wanted.criteria == SearchCriteria()
        self._width = min(self._most, WINDOW_MESSAGES_MAX) if all_wanted else WINDOW_MESSAGES_MAX

    async def run(self) -> FoundMessages:
        why = ""
        while self._before > self._floor and not why:
            within = await self._ranges.find_next_range(self._floor, self._before)
            self._skipped += self._before - within.high
            self._before = within.high
            if self._wanted.dry_run:
                self._messages += within.high - within.low
                self._bytes += within.bytes
                self._before = within.low
                why = self._find_reason_of_time()
            elif within.low < within.high:
                why = await self._search_range(within)
            else:
                why = self._find_reason_to_stop()
            if self._turns.is_slice_used_up:
                await self._turns.begin_slice()
        is_complete, ranges = self._before <= self._floor, self._ranges
        return FoundMessages(
            _make_entries(self._found), 0 if is_complete else self._before, self._messages, self._read_bytes,
            self._unread, "" if is_complete else why, 0, self._skipped, ranges.ledgers, ranges.unindexed,
        )  # fmt: skip

    @property
    def _read_bytes(self) -> int:
        return self._bytes + self._ranges.read_bytes

    async def _search_range(self, within: _Range) -> str:
        """Searches a range in windows, from its end. Returns why the search must stop in it or after it; "" if it need
        not."""
        width, why = within.high - within.low if within.is_block else self._width, ""
        while self._before > within.low and not why:
            low = max(within.low, self._before - width)
            window = await _search_window(
                self._broker, self._wanted, self._caller, (low, self._before), self._turns,
                within.entries if low == within.low else None,
            )  # fmt: skip
            self._bytes += window.bytes
            if window.is_cut:
                width = max(1, (self._before - low) // 4)
                continue
            self._take_window(window, low)
            if window.bytes < WINDOW_BYTES_MAX // 4:
                width = min(2 * width, WINDOW_MESSAGES_MAX)
            why = self._find_reason_to_stop()
        if not within.is_block:
            self._width = width
        return why

    def _take_window(self, window: _Window, low: int) -> None:
        self._messages += self._before - low
        self._unread += window.unread
        self._found += reversed(window.found)
        self._answer_bytes += sum(
            each.size for each in {each.entry.position: each.entry for each in window.found}.values()
        )
        self._before = low
        if len(self._found) > self._most:
            self._found = self._found[: self._most]
            self._messages -= self._found[-1].message_index - self._before
            self._before = self._found[-1].message_index

    def _find_reason_to_stop(self) -> str:
        if len(self._found) >= self._most:
            return f"it has {self._most} messages"
        if self._messages >= SEARCHED_MESSAGES_MAX:
            return f"it has looked at {SEARCHED_MESSAGES_MAX:,} messages"
        if self._read_bytes >= SEARCHED_BYTES_MAX:
            return f"it has read {SEARCHED_BYTES_MAX >> 20} MiB"
        if self._answer_bytes >= FOUND_BYTES_MAX:
            return f"its answer has {FOUND_BYTES_MAX >> 20} MiB"
        return self._find_reason_of_time()

    def _find_reason_of_time(self) -> str:
        return f"it took {SEARCH_S_MAX:g} s" if self._clock.monotonic() >= self._end_s else ""


def _make_entries(found: Sequence[_Found]) -> tuple[FoundEntry, ...]:
    of_each: dict[tuple[int, int], tuple[StoredEntry, set[int]]] = {}
    for each in found:
        of_each.setdefault(each.entry.position, (each.entry, set()))[1].add(each.batch_index)
    return tuple(
        FoundEntry(*position, entry.payload, tuple(at for at in range(entry.count) if at not in wanted))
        for position, (entry, wanted) in of_each.items()
    )


async def _search_window(
    broker: TopicManager, wanted: FindRequest, caller: CallContext, indexes: tuple[int, int], turns: EventLoopSlices,
    block: tuple[Position, Position] | None,
) -> _Window:  # fmt: skip
    window, (first, end) = _Window([]), indexes
    reader = EntryRangeReader(
        broker, MessageIndexRange(wanted.topic, first, end, 2 * WINDOW_BYTES_MAX), caller, counts_as_delivered=False,
        entries=block,
    )  # fmt: skip
    async with aclosing(reader.read_entries(turns)) as entries:
        async for entry in entries:
            if window.bytes > WINDOW_BYTES_MAX and end - first > 1:
                window.is_cut = True
                return window
            await _search_entry(broker.world, wanted.criteria, entry, (first, end), window)
            if turns.is_slice_used_up:
                await turns.begin_slice()
    return window


async def _search_entry(
    world: World, criteria: SearchCriteria, entry: StoredEntry, indexes: tuple[int, int], window: _Window
) -> None:
    payload, (first, end) = entry.payload, indexes
    window.bytes += len(payload)
    try:
        last_index, header = parse_entry(payload)
        window.bytes += header.uncompressed_size  # it may unfold to a thousand times its size
        first_index = last_index + 1 - header.num_messages
        if is_too_large(header):
            window.unread += min(last_index + 1, end) - max(first_index, first)
            return
        messages = await decode_messages(world, header, payload)
    except CorruptEntry:
        window.unread += 1
        return
    encoded = is_encrypted_or_chunked(header)
    for at, (about, content) in enumerate(messages):
        if not first <= first_index + at < end:
            continue
        if criteria.matches_message(about, content, header):
            window.found.append(_Found(first_index + at, entry, at))
        window.unread += bool(criteria.text) and encoded
