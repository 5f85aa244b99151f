"""The administrative operations on one topic's subscriptions and messages, in plain values, at the topic's owner.
Before them, where a cursor is placed that starts at a message (`compute_cursor_start`, `find_cursor_start`); after
them, reading a range of message indexes (`EntryRangeReader`).

Guarding tests: tests/broker/grpc/test_services.py, tests/broker/grpc/test_examine.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

import msgspec

from ...proto.entry_filter import FILTER, FILTER_PROPERTIES
from ...proto.errors import InvalidRequest, NotAllowed, NotFound, Unavailable
from ...proto.names import LATEST, MessageId, Position, TopicName
from ...proto.operations import Permission
from ...proto.states import AckedEntry
from ...runtime.alarm import EventLoopSlices
from ...runtime.network import CallContext
from ..common.config import DELIVERY_BATCH_BYTES
from ..common.refusals import check_incarnation
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from ..log.log_shape_core import LogShape
from ..node.topic_manager import TopicManager
from ..subscription.dead_letters import find_whole_message, move_mark_before_chunked_message
from ..subscription.subscription import Subscription
from ..topic import statistics as backlog
from ..topic import statistics as examine
from ..topic.admission_core import compute_backlog_bytes
from ..topic.topic import Topic

if TYPE_CHECKING:
    from ...proto.statistics import CancelledMessage

# --------------------------------------------------------------------------------------------------------- start
# Where a cursor is placed that starts at a message, or is moved to it.


def compute_cursor_start(
    shape: LogShape, start: MessageId, inclusive: bool, *, last_again: bool = False
) -> tuple[Position, int]:
    """Returns where a cursor starts that begins with the message `start`, or after it if `inclusive` is False. The
    result is (the mark, which is the position up to which everything counts as acknowledged; the number of messages of
    the entry after the mark that count as acknowledged).

    If `start` is `latest`, the cursor starts at the end of the topic, and gets only messages that are published later.
    With `last_again` (for a reader that is opened at `latest`, inclusive; Pulsar R1), it starts with the last entry
    instead. A seek and a reset never do that.
    """
    position = start.position
    if position >= LATEST:
        return (
            shape.position_before(shape.last_position)
            if last_again and shape.last_position.entry_id >= 0
            else shape.last_position
        ), 0
    if position.entry_id < 0:
        return shape.clamp_mark_to_log(position), 0
    if start.batch_index >= 0:
        done = start.batch_index + (0 if inclusive else 1)
        return shape.clamp_mark_to_log(shape.position_before(position)), done if shape.has_visible_entry(
            position
        ) else 0
    return shape.clamp_mark_to_log(shape.position_before(position) if inclusive else position), 0


async def find_last_message(log: ReadableLog) -> tuple[Position, int, Sequence[Position]]:
    """Returns where a reader starts that gets only the last message of the topic, because it is opened at `latest`,
    inclusive. The last message is the last one of a batch, or all chunks of a chunked message. Raises the errors of
    reading the log.

    The result is (the mark, the number of messages of the next entry that count as acknowledged, the positions of later
    entries that count as acknowledged)."""
    shape = log.shape
    last = shape.last_unskipped_position
    if last.entry_id < 0:
        return last, 0, ()
    entry = await log.reader.read_entry(last)
    mark = shape.position_before(last)
    if not entry.chunk_of:
        return mark, entry.count - 1, ()
    try:
        message = await find_whole_message(
            log, entry, shape.position_before(shape.start_position), log.world.clock.wall_ms()
        )
    except Unavailable:
        message = None  # its last chunk is not here yet
    if message is None:
        return mark, 0, ()
    mark, others = shape.position_before(message.places[0]), list[Position]()
    position = shape.position_after(mark)
    while position < last:
        others += [] if position in message.places else [position]
        position = shape.position_after(position)
    return mark, 0, others


async def find_cursor_start(log: ReadableLog, start: MessageId, inclusive: bool) -> tuple[Position, int]:
    """Returns the same as `compute_cursor_start` for `start` and `inclusive`, adapted to the entry that is stored:
    reads the entry if some of its messages count as acknowledged. If these are all of its messages, the mark is this
    entry itself. If compaction has removed the entry, none of its messages counts as acknowledged. Raises the errors of
    reading the log."""
    shape = log.shape
    mark, done = compute_cursor_start(shape, start, inclusive)
    if not done or shape.skipped_lost_range_end(start.position) is not None:
        return mark, 0
    position = start.position
    found = log.reader.read_cached(position, 1, 1) or await log.reader.read(position, 1)
    if not found or found[0].position != position:
        return mark, 0  # compaction removed it
    return (mark, done) if done < found[0].count else (shape.clamp_mark_to_log(position), 0)


async def find_first_unacked_index(subscription: Subscription) -> int:
    """Returns the index of the first message that the subscription has not acknowledged, also inside a batch. Raises
    the errors of reading the log."""
    log, cursor = subscription.log, subscription.cursor
    mark = cursor.mark
    index = await log.reader.find_message_index_after(mark)
    done = cursor.count_leading_acked_messages(log.shape.position_after(mark)) if cursor.mark == mark else 0
    return max(index + done, log.shape.first_index)


async def find_cursor_mark_by_time(log: ReadableLog, time_ms: int) -> Position:
    """Returns the mark of a cursor that begins with the first message that arrived at or after `time_ms` (ms since the
    epoch), or before its first chunk. Raises the errors of reading the log."""
    place = await log.reader.find_position_by_time(time_ms)
    return await move_mark_before_chunked_message(log, log.shape.position_before(place.position))


async def find_cumulative_ack_before(log: ReadableLog, index: int, *, whole: bool = True) -> AckedEntry | None:
    """Returns the entry that a cumulative acknowledgement must name to cover every message with an index below `index`;
    None if the log has no such message. `whole`: if a chunked message begins before the index and does not end there,
    nothing from its first chunk on is covered, so that it is delivered whole when it is delivered again. Raises the
    errors of reading the log."""
    shape = log.shape
    if index <= shape.first_index:
        return None
    if index >= shape.end_index:
        mark = shape.last_position
    else:
        place = await log.reader.find_position_by_index(index)
        if done := max(0, index - place.first_index):
            return AckedEntry(place.position, 1 << done >> 1)
        mark = shape.position_before(place.position)
    if whole:
        mark = await move_mark_before_chunked_message(log, mark)
    return AckedEntry(mark) if mark.entry_id >= 0 else None


# ------------------------------------------------------------------------------------------------------ backlogs


PEEK_MESSAGES_MAX = 1000
AGE_S_MAX = 10_000_000_000
"""Longest age in seconds: 300 years."""


class EntryWithHiddenMessages(msgspec.Struct, frozen=True):
    """A stored entry. `hidden`: the batch indexes of those of its messages that the caller may not receive."""

    entry: StoredEntry
    hidden: list[int]


def _is_acked(subscription: Subscription, position: Position, bits: int) -> bool:
    """Returns True if the messages `bits` of the entry are acknowledged."""
    cursor = subscription.cursor
    return cursor.is_acked(position) or not bits & ~sum(1 << each for each in cursor.acked_indexes(position))


def _why_delivered(subscription: Subscription, position: Position, bits: int) -> str | None:
    """Returns how far the delivery of a message has come that is not due yet; None if the subscription has not got it.
    The words follow the name of the subscription. Types that deliver in log order do not delay messages."""
    cursor, dispatcher = subscription.cursor, subscription.dispatcher
    if _is_acked(subscription, position, bits):
        return "has acknowledged it" if subscription.consumers and not dispatcher.delaying else None
    if cursor.is_acked_or_pending(position) or cursor.acked_or_pending_bits(position) & bits:
        return "acknowledges it in an open transaction"
    if (member := dispatcher.find_consumer_of_entry(position)) is not None:
        return f"has delivered it to consumer {member.name!r}"
    if position in dispatcher.held or cursor.redelivery_count(position):
        return "has delivered it, and it failed"
    delays = dispatcher.delays
    if position < dispatcher.read_position and not (delays is not None and delays.is_delayed(position)):
        return "has taken it back from a consumer"
    return None


class SubscriptionAdministration:
    """The administrative operations on the subscriptions and messages of one topic, which is loaded at this broker.
    Methods that take the name of a subscription raise SubscriptionNotFound if the topic does not have it. Methods that
    read entries raise the errors of reading the log. Methods that acknowledge or move something return when that is
    durable, and raise the errors of `Subscription.wait_durable`."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

    def _named(self, name: str) -> list[Subscription]:
        """Returns the subscription of that name; all durable subscriptions if `name` is empty."""
        every = self._topic.subscriptions
        names = [name] if name else [name for name, each in every.items() if each.is_durable]
        return [self._topic.find_subscription(each) for each in names]

    # ------------------------------------------------------------------ cancelling
    async def cancel_delayed(self, position: Position, batch_index: int) -> CancelledMessage:
        """Acknowledges a delayed message for each durable subscription, so that none of them gets it. `batch_index`:
        its place in its batch; -1: the whole entry. A message in chunks is cancelled whole. Returns when the
        acknowledgements are durable. May be repeated: the answer names the subscriptions that had acknowledged the
        message before.

        Raises NotFound if the topic has no such message, or its transaction has not committed; InvalidRequest if the
        entry has no such batch index. Raises NotAllowed if the message is not delayed any more, a subscription has got
        it, or the topic has no durable subscription. Nothing is changed then. If it raises another error, some
        subscriptions may not get the message, and the caller must repeat the request.
        """
        from ...proto.statistics import CancelledMessage  # somebody asks, so it is loaded

        topic, now_ms = self._topic, self._topic.world.clock.wall_ms()
        log, shape = topic.log, topic.shown.shape
        if not shape.has_visible_entry(position) or shape.skipped_lost_range_end(position) is not None:
            raise NotFound(f"topic {topic.name} has no message {position} that consumers may get")
        entry = await log.reader.read_entry(position)
        if batch_index >= entry.count:
            raise InvalidRequest(f"entry {position} has {entry.count} messages, and none with index {batch_index}")
        if entry.deliver_at_ms <= now_ms:
            why = "its delivery time has come" if entry.deliver_at_ms else "it has no delivery time"
            raise NotAllowed(f"message {position} of {topic.name} is not cancelled: {why}")
        places: Sequence[Position] = (position,)
        if entry.chunk_of and (
            found := await find_whole_message(log, entry, shape.position_before(shape.start_position), now_ms)
        ):
            places = found.places
        bits = 1 << batch_index if batch_index >= 0 and entry.count > 1 else (1 << entry.count) - 1
        every = self._named("")
        if not every:
            raise NotAllowed(
                f"message {position} of {topic.name} is not cancelled: the topic has no durable subscription for which "
                "it could be, and one that is made later may get it"
            )
        for each in every:
            for place in places:
                if (got := _why_delivered(each, place, bits)) is not None:
                    text = f"message {position} of {topic.name} is not cancelled: subscription {each.name!r} {got}"
                    raise NotAllowed(text, subscription=each.name)
        cancelled = [each for each in every if not all(_is_acked(each, place, bits) for place in places)]
        for each in cancelled:
            for place in places:
                each.acks.ack_messages(place, bits, entry.count)
            each.skip_entries((), parts=True)
        for each in every:
            await each.wait_durable()
        names = frozenset(each.name for each in cancelled)
        return CancelledMessage(tuple(sorted(names)), tuple(sorted({each.name for each in every} - names)))

    # ------------------------------------------------------------------ subscriptions
    async def create_subscription(self, name: str, start: MessageId | None, properties: dict[str, str]) -> None:
        """Creates a durable subscription that begins with the entry of the message `start` (the whole batch if it is in
        one); None: at the end of the topic. `properties`: those that are stored with it. It is stored when this method
        returns. Raises AlreadyExists if the topic has a subscription of that name, and the other errors of
        `SubscriptionRegistry.subscribe`."""
        mark = compute_cursor_start(self._topic.shown.shape, start, inclusive=True)[0] if start is not None else None
        await self._topic.registry.subscribe(name, mark, properties, exclusive=True)

    def properties(self, name: str) -> dict[str, str]:
        """Returns the stored properties of a subscription; {} if it is not durable. Raises SubscriptionNotFound if the
        topic has no such subscription."""
        store = self._topic.find_subscription(name).store
        return store.properties if store is not None else {}

    async def set_properties(self, name: str, properties: dict[str, str]) -> None:
        """Replaces all properties of a subscription. Raises SubscriptionNotFound if the topic has no such subscription,
        NotAllowed if the topic is not persistent, and the errors of `SubscriptionRegistry.set_properties`."""
        topic = self._topic
        if not topic.name.persistent:
            raise NotAllowed(f"topic {topic.name} keeps nothing, and no properties of subscriptions")
        await topic.registry.set_properties(topic.find_subscription(name), properties)

    async def set_filter(self, name: str, text: str) -> None:
        """Sets the filter of a subscription; an empty text removes it. The filter applies to messages that are not
        acknowledged yet. Raises SubscriptionNotFound if the topic has no such subscription; Busy if consumers are
        connected; InvalidRequest if the filter does not parse; NotAllowed if the topic is not persistent; and the other
        errors of `set_properties`."""
        kept = {key: value for key, value in self.properties(name).items() if key not in FILTER_PROPERTIES}
        await self.set_properties(name, {**kept, FILTER: text.strip()} if text.strip() else kept)

    async def reset_subscription(
        self, name: str, to: MessageId | None, publish_time_ms: int | None, *, inclusive: bool = True
    ) -> None:
        """Moves a subscription to the message `to`, or to the first message that arrived at or after `publish_time_ms`
        (ms since the epoch). `inclusive` False: to the place after the message `to`. The new position is durable when
        this method returns. Raises SubscriptionNotFound if the topic has no such subscription; InvalidRequest if
        neither is given; and the errors of reading the log and of `Subscription.seek`."""
        log, subscription = self._topic.shown, self._topic.find_subscription(name)
        if to is None and publish_time_ms is None:
            raise InvalidRequest("a subscription is reset to a message id or to a time")
        async with subscription.seek_lock:
            acked = 0
            if to is not None:
                mark, acked = await find_cursor_start(log, to, inclusive=inclusive)
            else:
                place = await log.reader.find_position_by_time(publish_time_ms or 0)
                mark = await move_mark_before_chunked_message(log, log.shape.position_before(place.position))
            await subscription.seek(mark, acked)

    async def skip_messages(self, name: str, messages: int) -> None:
        """Acknowledges the next `messages` messages (-1: all) of the subscription `name`, or of every durable
        subscription if `name` is empty. Raises SubscriptionNotFound if the topic has no such subscription;
        InvalidRequest if `messages` is below -1; and the errors of reading the log and of `Subscription.wait_durable`.
        """
        if messages < -1:
            raise InvalidRequest(f"{messages} messages cannot be skipped; -1 are all of them")
        for subscription in self._named(name):
            await backlog.skip_messages(self._topic.shown, subscription, messages)

    async def expire_messages(self, name: str, older_than_s: float, up_to: Position | None) -> int:
        """Acknowledges old messages of one subscription; of every durable subscription if `name` is empty. These are
        all messages up to and including the position `up_to`; if that is None, all messages older than `older_than_s`
        seconds. Of a chunked message that reaches over `up_to`, also the later chunks are acknowledged. Returns an
        estimate of how many entries were acknowledged, when that is durable. Raises SubscriptionNotFound if the topic
        has no such subscription; InvalidRequest if the age is not above 0 and at most AGE_S_MAX; and the errors of
        reading the log and of `Subscription.wait_durable`."""
        if up_to is None and not 0 < older_than_s <= AGE_S_MAX:
            raise InvalidRequest(
                f"messages expire when they are older than some seconds (0 to {AGE_S_MAX}), or up to a message id"
            )
        life, entries = self._topic.maintenance, 0
        for subscription in self._named(name):
            if up_to is not None:
                entries += await life.skip_whole_messages(
                    subscription, self._topic.shown.shape.clamp_mark_to_log(up_to)
                )
            else:
                entries += await life.expire_messages_older_than(subscription, older_than_s)
            await subscription.wait_durable()
        return entries

    async def peek_messages(self, name: str, messages: int) -> list[EntryWithHiddenMessages]:
        """Returns the entries that contain the next `messages` messages of the subscription. Acknowledges nothing.
        Raises SubscriptionNotFound if the topic has no such subscription; InvalidRequest if `messages` is above
        PEEK_MESSAGES_MAX; and the errors of reading the log."""
        if messages > PEEK_MESSAGES_MAX:
            raise InvalidRequest(f"{messages} messages at once are more than {PEEK_MESSAGES_MAX}")
        subscription = self._topic.find_subscription(name)
        entries = await backlog.read_first_backlog_entries(self._topic.shown, subscription, messages)
        return [EntryWithHiddenMessages(entry, subscription.cursor.acked_indexes(entry.position)) for entry in entries]

    async def analyze_backlog(self, name: str) -> examine.Backlog:
        """Reads the backlog of a subscription, at most about ANALYZE_ENTRIES_MAX entries of it, and returns how many
        entries and messages it contains; `complete` is False in the result if it has more. Raises SubscriptionNotFound
        if the topic has no such subscription, and the errors of reading the log."""
        return await examine.analyze_backlog(self._topic.shown, self._topic.find_subscription(name))

    # ------------------------------------------------------------------ messages
    async def read_nth_message(self, number: int, *, from_latest: bool) -> EntryWithHiddenMessages:
        """Returns the entry that contains the n-th message of the topic; the other messages of its batch are hidden.
        `number`: n, from 1 on; `from_latest`: counts from the newest message, else from the oldest one. Raises NotFound
        if the topic has fewer messages, or `number` is below 1. Raises the errors of reading the log, too."""
        entry, at = await examine.find_nth_message(self._topic.shown, number, from_latest=from_latest)
        return EntryWithHiddenMessages(entry, [index for index in range(entry.count) if index != at])

    async def read_message(self, position: Position) -> EntryWithHiddenMessages:
        """Returns the entry at `position`, without hidden messages. Raises NotFound if the topic has no such entry, or
        consumers may not get it. Raises the errors of reading the log, too."""
        return EntryWithHiddenMessages(await examine.read_message(self._topic.shown, position), [])

    async def find_message_by_time(self, publish_time_ms: int) -> MessageId:
        """Returns the id of the first message that arrived at or after `publish_time_ms` (ms since the epoch). If there
        is none, returns the id that the next message will get. Raises the errors of reading the log."""
        position = (await self._topic.shown.reader.find_position_by_time(publish_time_ms)).position
        return MessageId(*position, partition=self._topic.name.partition)

    async def find_last_message(self) -> MessageId:
        """Returns the id of the last message of the topic that consumers may get. If there is none, returns the topic's
        last position. Raises the errors of reading the log."""
        last = await self._topic.shown.reader.read_last_message()
        position, batch_index, _ = last or (self._topic.shown.shape.last_position, -1, -1)
        return MessageId(*position, self._topic.name.partition, batch_index)

    def estimate_bytes_after(self, position: Position) -> int:
        """Returns an estimate of the bytes that are stored after `position`."""
        shape = self._topic.shown.shape
        return compute_backlog_bytes(shape, shape.clamp_mark_to_log(position))


# -------------------------------------------------------------------------------------------------------- reader
# Entries of an index range, for readers that keep their own offsets.
#
# Yields the entries with messages of the range in order, until about `bytes_max` (PEEK_READ_BYTES_MAX if that is 0),
# the end of the range or the end of the topic, whichever is first; never waits for messages. The permission to consume
# is checked again after each DELIVERY_BATCH_BYTES: a slow read ends when it is revoked. Guarding tests:
# tests/broker/subscription/test_gaps.py.


PEEK_READ_BYTES_MAX = 16 << 20
_LAST = 1 << 62


class MessageIndexRange(msgspec.Struct, frozen=True):
    """A request to read the messages of a topic with indexes from `first` (inclusive) to `end` (exclusive), until about
    `bytes_max` bytes are read; 0: PEEK_READ_BYTES_MAX."""

    topic: str
    first: int
    end: int
    bytes_max: int = 0
    incarnation: int = 0  # of the topic; 0: whichever is there


class EntryRangeReader:
    """Reads the messages of a topic that have indexes in a given range. `next_index`: the index at which a reader must
    continue after the entries that were yielded. `counts_as_delivered`: whether they count in the topic's rates.

    `entries`: the first and the last entry of the range, both in one ledger, if the caller knows them. Otherwise the
    first one is searched for, and a bookie reads ahead past the last one."""

    def __init__(
        self, broker: TopicManager, wanted: MessageIndexRange, caller: CallContext, *, counts_as_delivered: bool = True,
        entries: tuple[Position, Position] | None = None,
    ) -> None:  # fmt: skip
        self._caller = caller
        self._counts = counts_as_delivered
        self.next_index = wanted.first
        self._broker = broker
        self._wanted = wanted
        self._entries = entries

    async def read_entries(self, turns: EventLoopSlices) -> AsyncGenerator[StoredEntry, None]:
        """Yields the entries that contain the messages of the range, in order, and moves `next_index` forward. Ends at
        the end of the range or of the topic, or after the range's `bytes_max` (0: PEEK_READ_BYTES_MAX); never waits for
        new messages. Raises Unauthorized, TopicNotFound, NotAllowed, NotOwner, InvalidRequest, Unavailable or DataLost,
        possibly after it has yielded some entries."""
        wanted = self._wanted
        name = TopicName.parse(wanted.topic)
        await self._require(name)
        topic = await self._broker.load_topic(name, create=False)
        check_incarnation(topic.name, topic.incarnation, wanted.incarnation)
        if wanted.end < wanted.first or wanted.first < 0:
            raise InvalidRequest(f"{wanted.first} to {wanted.end} is no range of indexes")
        log, chunk_bytes = topic.shown, min(DELIVERY_BATCH_BYTES, self._broker.config.read_bytes)
        end = min(wanted.end, log.shape.end_index)
        if wanted.first >= end:
            return
        if self._entries is None:
            first, self.next_index = await log.reader.find_position_by_index(wanted.first)
            last = Position(-1, -1)
        else:
            first, last = self._entries
        position, self.next_index = log.shape.next_unskipped_position(first), max(wanted.first, self.next_index)
        left = wanted.bytes_max or PEEK_READ_BYTES_MAX
        while self.next_index < end and left > 0 and log.shape.has_visible_entry(position):
            await self._require(name)
            size = min(left, chunk_bytes)
            last_entry = last.entry_id if position <= last else _LAST
            for entry in log.reader.read_cached(position, 1000, size) or await log.reader.read(
                position, size, last_entry
            ):
                if entry.first_index >= end or left <= 0:
                    self.next_index = max(self.next_index, min(end, entry.first_index))  # none before it is kept
                    break
                yield entry
                if self._counts:
                    topic.traffic.record_delivered(entry.count, entry.size)
                left -= entry.size
                self.next_index = entry.index + 1
                position = log.shape.position_after(entry.position)
                if turns.is_slice_used_up:
                    await turns.begin_slice()
            position = log.shape.next_unskipped_position(position)
        if left > 0:
            self.next_index = max(self.next_index, end)  # none of the rest is kept
        self.next_index = min(self.next_index, wanted.end)

    async def _require(self, name: TopicName) -> None:
        await self._broker.access.check_permission(self._caller.principal, Permission.CONSUME, topic=name)
