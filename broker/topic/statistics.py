"""The traffic of a topic: totals and rates per second, published and delivered; and the rate limits that all topics of
a broker share (`BrokerRateLimits`). Also, for operators, each below its heading: the backlog of a subscription
(backlog: its size, its first entries, skipping messages), and examining a topic's log (examine: an exact analysis of a
backlog, single messages)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from ...proto.applied import AppliedPolicies
from ...proto.entry import parse_stored_head
from ...proto.errors import NotFound
from ...proto.names import NamespaceName, Position
from ...proto.policies import Policies
from ...proto.states import Blocked
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.token_bucket import RateLimit
from ..common.config import BrokerConfig
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from ..log.log_shape_core import LedgerSpan
from ..log.unfolding import run_in_thread_if_slow
from ..subscription.dead_letters import find_remaining_chunks
from ..subscription.expiry import is_of_other_subscription
from ..subscription.filtering import SubscriptionFilter
from ..subscription.subscription import Subscription
from .admission_core import compute_backlog_bytes

if TYPE_CHECKING:
    from .topic import Topic


Limits = tuple[int, int]
"""A limit in messages and one in bytes per second; 0: no limit."""
NO_LIMITS: tuple[Limits, Limits] = ((0, 0), (0, 0))
"""Of publishing and of dispatch."""


def _get_namespace_limits(applied: AppliedPolicies | Policies) -> tuple[Limits, Limits]:
    """Returns (limits of publishing, limits of dispatch) that hold in sum over brokers: of a namespace, or, from the
    policies of a resource group, of all its namespaces together."""
    return (
        (applied.namespace_publish_rate_messages or 0, applied.namespace_publish_rate_bytes or 0),
        (applied.namespace_dispatch_rate_messages or 0, applied.namespace_dispatch_rate_bytes or 0),
    )


def _get_tenant_limits(applied: AppliedPolicies) -> tuple[Limits, Limits]:
    """Returns the same of a tenant."""
    return (
        (applied.tenant_publish_rate_messages, applied.tenant_publish_rate_bytes),
        (applied.tenant_dispatch_rate_messages, applied.tenant_dispatch_rate_bytes),
    )


def make_group_place(group: str) -> str:
    """Returns what a resource group is called among the places with limits: no tenant has such a name."""
    return f"@{group}"


class SharedRate:
    """The publish or dispatch rate of a namespace, a tenant or a resource group at this broker: its share of a limit
    that holds in sum over all brokers (broker/cluster/shares_core.py). `names`: the texts of the limits in messages and
    in bytes, by which brokers report them; `policies`: their fields in AppliedPolicies (of a group: names alike);
    `limits`: their values, 0 without a limit; `rate`: what topics ask."""

    __slots__ = ("_get_share", "limits", "names", "place", "policies", "rate")

    def __init__(self, place: str, policy: str, get_share: Callable[[str, float], float]) -> None:
        self.rate = RateLimit()
        self.place = place
        self.policies = (f"{policy}_messages", f"{policy}_bytes")
        self.names = (f"{self.policies[0]} {place}", f"{self.policies[1]} {place}")
        self.limits: Limits = (0, 0)
        self._get_share = get_share

    def set_limits(self, limits: Limits, now: float) -> None:
        """Sets the limits, and the rate to this broker's share of them."""
        self.limits = limits
        self.update_share(now)

    def update_share(self, now: float) -> None:
        """Sets the rate to the share that this broker has now."""
        messages, size = (
            limit * self._get_share(name, now) if limit else 0.0
            for limit, name in zip(self.limits, self.names, strict=True)
        )
        self.rate.set_rate(messages, size, now)


class SharedRates:
    """The rates of a namespace, a tenant or a resource group in sum over brokers, at this broker. `place`: its name;
    `level`: what it is, the beginning of its policies' names."""

    __slots__ = ("__weakref__", "dispatch", "place", "publish")

    def __init__(self, place: str, level: str, get_share: Callable[[str, float], float]) -> None:
        self.place = place
        self.publish = SharedRate(place, f"{level}_publish_rate", get_share)
        self.dispatch = SharedRate(place, f"{level}_dispatch_rate", get_share)

    def set_limits(self, publish: Limits, dispatch: Limits, now: float) -> None:
        """Sets the limits of publishing and of dispatch."""
        self.publish.set_limits(publish, now)
        self.dispatch.set_limits(dispatch, now)


class BrokerRateLimits:
    """What all topics of a broker share: the publish rate and the dispatch rate of the broker, those of each namespace
    and tenant that has a limit in sum over brokers and a loaded topic (`shared`), and two semaphores. A topic that
    compacts holds `compacting`, and a topic that writes key indexes of a ledger holds `indexing`; one topic at a time
    has each."""

    def __init__(
        self, config: BrokerConfig, get_share: Callable[[str, float], float] = lambda _, __: 1.0,
        get_group: Callable[[str], Policies] = lambda _: Policies(),
    ) -> None:  # fmt: skip
        self._get_group = get_group
        self.shared: WeakValueDictionary[str, SharedRates] = WeakValueDictionary()  # their topics keep them
        self._get_share = get_share
        self.compacting = asyncio.Semaphore(1)  # one topic at a time
        self.indexing = asyncio.Semaphore(1)  # likewise: one ledger at a time
        self.publish = RateLimit(config.broker_publish_rate_messages, config.broker_publish_rate_bytes)
        self.dispatch = RateLimit(config.broker_dispatch_rate_messages, config.broker_dispatch_rate_bytes)

    def apply_shared_rates(
        self, namespace: NamespaceName, applied: AppliedPolicies, now: float
    ) -> tuple[SharedRates, ...]:
        """Sets the limits of a namespace and of its tenant to those in `applied`, and those of its resource group to
        the group's, and returns the rates of those of the three that have a limit."""
        found, group = list[SharedRates](), applied.resource_group
        for level, place, limits in (
            ("namespace", str(namespace), _get_namespace_limits(applied)),
            ("tenant", namespace.tenant, _get_tenant_limits(applied)),
            ("group", make_group_place(group), _get_namespace_limits(self._get_group(group)) if group else NO_LIMITS),
        ):
            rates = self.shared.get(place)
            limited = any(limits[0]) or any(limits[1])
            if rates is None and limited:
                rates = self.shared[place] = SharedRates(place, level, self._get_share)
            if rates is not None:
                rates.set_limits(*limits, now)
                found += [rates] if limited else []
        return tuple(found)


class TrafficRates(NamedTuple):
    """The traffic of a topic per second: messages and bytes that were published (`…_in`) and delivered (`…_out`)."""

    messages_in: float
    messages_out: float
    bytes_in: float
    bytes_out: float


NO_RATES = TrafficRates(0.0, 0.0, 0.0, 0.0)
NO_TRAFFIC = (NO_RATES, (0, 0, 0, 0))


class TopicStatistics:
    """Counts the traffic of a topic since it was loaded. `…_in`: messages that were published and stored; `…_out`:
    messages that were delivered to consumers, where each redelivery counts again."""

    __slots__ = (
        "_clock", "_rated", "_rated_at", "_rates", "bytes_in", "bytes_out", "messages_in", "messages_out", "walked",
        "walked_group", "walked_rates", "walked_span",
    )  # fmt: skip

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.messages_in = self.bytes_in = 0
        self.messages_out = self.bytes_out = 0
        self._rates, self._rated = NO_TRAFFIC
        self.walked_rates, self.walked = NO_TRAFFIC  # as of the last walk over all topics (broker/node/survey.py)
        self.walked_group: Any = None  # the sums of its namespace there
        self.walked_span: LedgerSpan | None = None  # the only ledger of the topic, if it was open then
        self._rated_at = self._clock.monotonic()

    def record_published(self, messages: int, size: int) -> None:
        """Adds `messages` messages of `size` bytes together to the counters of published and stored messages."""
        self.messages_in += messages
        self.bytes_in += size

    def record_delivered(self, messages: int, size: int) -> None:
        """Adds `messages` messages of `size` bytes together to the counters of messages that were delivered to
        consumers."""
        self.messages_out += messages
        self.bytes_out += size

    def rates(self) -> TrafficRates:
        """Returns the traffic per second since the rates were last computed. If that was less than a second ago,
        returns the same rates again. Within the first second after the topic was loaded, all rates are 0."""
        now = self._clock.monotonic()
        passed_s = now - self._rated_at
        if passed_s >= 1.0:
            totals = (self.messages_in, self.messages_out, self.bytes_in, self.bytes_out)
            self._rates = TrafficRates(*((new - old) / passed_s for new, old in zip(totals, self._rated, strict=True)))
            self._rated, self._rated_at = totals, now
        return self._rates


# ------------------------------------------------------------------------------------------------------- backlog
# The backlog of a subscription: its size, a peek at its beginning, and skipping it. For operators; nothing here is in
# the path of a message. `analyze_backlog` counts exactly, and reads for it; `count_unacknowledged` reads nothing but
# the place of the mark.


def find_blocked_reason(topic: Topic, subscription: Subscription, backlog: int | None) -> Blocked:
    """Returns the reason why no consumer gets the next message of the subscription; `Blocked.NO` if delivery is not
    blocked. `backlog`: the number of its unacknowledged messages, None if that is not known. CAUGHT_UP, and not
    NO_CONSUMER, is the reason without a backlog. OPEN_TRANSACTION replaces CAUGHT_UP if an open transaction hides later
    messages from the subscription."""
    blocked = subscription.pump.blocked or Blocked.NO
    if blocked is Blocked.NO_CONSUMER and backlog == 0:
        blocked = Blocked.CAUGHT_UP
    if blocked is Blocked.CAUGHT_UP and not subscription.reads_uncommitted and topic.waiting_message_count:
        return Blocked.OPEN_TRANSACTION
    return blocked


async def count_unacknowledged(log: ReadableLog, subscription: Subscription) -> int:
    """Returns the number of messages that the subscription has not acknowledged. The number is exact, except that a
    batch after the mark that is acknowledged as a whole counts as one acknowledged message. Raises the errors of
    reading the log."""
    return _size(log, subscription, await log.reader.find_message_index_after(subscription.cursor.mark))


def count_unacknowledged_from_memory(log: ReadableLog, subscription: Subscription) -> int | None:
    """Returns the same number as `count_unacknowledged`, but reads no entry; None if an entry would have to be read."""
    after = log.reader.find_cached_message_index_after(subscription.cursor.mark)
    return None if after is None else _size(log, subscription, after)


def estimate_backlog(log: ReadableLog, subscription: Subscription) -> int:
    """Returns an estimate of the number of messages that the subscription has not acknowledged. Reads no entry: where
    `count_unacknowledged` would read one, assumes that all entries of the ledger contain equally many messages."""
    shape, mark = log.shape, subscription.cursor.mark
    after = log.reader.find_cached_message_index_after(mark)
    if after is None:
        span = shape.find_span_of_ledger(mark[0])
        assert span is not None, "the entry after the mark is in its ledger"
        passed = (span.end_index - span.first_index) * (mark[1] + 1) // (span.last_entry + 1)
        after = span.first_index + passed
    return _size(log, subscription, after)


def _size(log: ReadableLog, subscription: Subscription, after: int) -> int:
    shape, acked, holes = log.shape, subscription.cursor.acked, 0
    if acked:
        holes = sum(
            len(entries) for ledger_id, entries in acked.items() if shape.find_span_of_ledger(ledger_id) is not None
        )
    return max(0, shape.count_messages_from(after) - holes - subscription.cursor.partial_messages)


PEEK_BYTES_MAX = 8 << 20
"""Bytes of one peek: an answer has to fit into a gRPC message."""


async def read_first_backlog_entries(log: ReadableLog, subscription: Subscription, messages: int) -> list[StoredEntry]:
    """Returns the first entries that the subscription has not acknowledged: as many as contain `messages` messages, but
    at most PEEK_BYTES_MAX bytes. Returns at least one entry if there is any and `messages` is above 0; else an empty
    list. Raises the errors of reading the log."""
    shape, found, size, turns = log.shape, list[StoredEntry](), 0, EventLoopSlices(log.world.clock)
    position = shape.position_after(subscription.cursor.mark)
    while messages > 0 and shape.has_visible_entry(
        position := subscription.cursor.next_unacked_position(shape.next_unskipped_position(position))
    ):
        entry = await log.reader.read_entry(position)
        size += entry.size
        if found and size > PEEK_BYTES_MAX:
            break
        found.append(entry)
        messages -= entry.count
        position = shape.position_after(position)
        if turns.is_slice_used_up:
            await turns.begin_slice()
    return found


async def skip_messages(log: ReadableLog, subscription: Subscription, messages: int) -> None:
    """Acknowledges the next `messages` messages of the subscription (-1: all messages), and returns when that is
    durable. Skips over messages that are acknowledged in an open transaction. Each chunk counts as one message, as in
    the size of the backlog; if the last message is a chunk, acknowledges all chunks of the same message. Raises the
    errors of reading the log and of `Subscription.wait_durable`."""
    shape = log.shape
    mark, acked = shape.last_position, 0
    if messages >= 0:
        index = shape.index_after_next_messages(
            await log.reader.find_message_index_after(subscription.cursor.mark), messages
        )
        place = await log.reader.find_position_by_index(index)
        mark, acked = shape.position_before(place.position), max(0, index - place.first_index)
    subscription.skip_up_to(mark, acked if shape.has_visible_entry(shape.position_after(mark)) else 0)
    subscription.skip_entries(await find_remaining_chunks(log, mark))
    await subscription.wait_durable()
    subscription.pump.wake()


# ------------------------------------------------------------------------------------------------------- examine
# Examining a topic's log for an operator: single messages, and exactly what a subscription has left.
#
# `analyze_backlog` reads the backlog as far as it must: where nothing after the mark is acknowledged, the index gives
# the number of messages there and nothing is read; ledgers with holes or partly acknowledged batches are read,
# `entries_max` at most.


ANALYZE_ENTRIES_MAX = 1_000_000
"""Entries that one request reads: some seconds. Beyond, an acknowledged entry counts as one message."""
READ_CHUNK_BYTES = 1 << 20


class Backlog(NamedTuple):
    """The size of a subscription's backlog, in entries, messages and bytes."""

    entries: int
    messages: int
    acknowledged: int  # messages after the mark that are acknowledged
    bytes: int  # about
    complete: bool  # False: `ANALYZE_ENTRIES_MAX` was reached
    unwanted_entries: int = 0  # of `entries`: the subscription's filter wants nothing in them
    unwanted_messages: int = 0  # of `messages`


async def analyze_backlog(
    log: ReadableLog, subscription: Subscription, entries_max: int = ANALYZE_ENTRIES_MAX
) -> Backlog:
    """Reads the subscription's backlog, at most about `entries_max` entries of it, and returns its size; `complete`
    says whether all of it was read. Reads only the ledgers with acknowledgements after the mark; with a filter, all
    ledgers of the backlog. Raises the errors of reading the log."""
    shape, cursor = log.shape, subscription.cursor
    mark, acknowledged, entries, left = cursor.mark, 0, 0, entries_max
    for span in shape.spans:
        first = mark[1] + 1 if span.ledger_id == mark[0] else 0
        if span.ledger_id < mark[0] or first > span.last_entry:
            continue
        entries += shape.count_visible_entries(span.ledger_id, first)
        holes = len(cursor.acked.get(span.ledger_id, ()))
        entries -= holes
        partial = any(position[0] == span.ledger_id for position in cursor.partial)
        if not (holes or partial):
            continue
        if left > 0:
            acknowledged += await _acknowledged(log, subscription, span, first)
            left -= span.last_entry - first + 1
        else:
            acknowledged += holes
            left = -1  # the answer is not complete, also if `left` was 0
    messages = shape.count_messages_from(await log.reader.find_message_index_after(mark)) - acknowledged
    unwanted = (0, 0)
    if subscription.filtering is not None:
        unwanted, left = await _count_unwanted(log, subscription, subscription.filtering, left)
    return Backlog(entries, max(0, messages), acknowledged, compute_backlog_bytes(shape, mark), left >= 0, *unwanted)


async def _count_unwanted(
    log: ReadableLog, subscription: Subscription, filtering: SubscriptionFilter, entries_max: int
) -> tuple[tuple[int, int], int]:
    """Returns how many entries and messages of the backlog the filter does not want, and how many of `entries_max` were
    not read. Reads the backlog."""
    cursor, shape, turns = subscription.cursor, log.shape, EventLoopSlices(log.world.clock)
    judge = filtering.make_entry_filter(keeps_tombstones=subscription.reads_compacted)
    entries = messages = 0
    position = shape.next_unskipped_position(shape.position_after(cursor.mark))
    while entries_max > 0 and shape.has_visible_entry(position):
        for entry in await log.reader.read(position, READ_CHUNK_BYTES):
            entries_max -= 1
            position = shape.next_unskipped_position(shape.position_after(entry.position))
            if cursor.is_acked_or_pending(entry.position):
                continue
            data = entry.frames[-1]
            if entry.redriven_to and is_of_other_subscription(entry, subscription):
                bits = 1
            else:
                bits = await run_in_thread_if_slow(
                    data, log.world, judge.find_unwanted_bits, parse_stored_head(data), data
                )
            entries += bits.bit_count() == entry.count
            messages += (bits & ~cursor.acked_or_pending_bits(entry.position)).bit_count()
            if turns.is_slice_used_up:
                await turns.begin_slice()
    return (entries, messages), entries_max - int(shape.has_visible_entry(position))


async def _acknowledged(log: ReadableLog, subscription: Subscription, span: LedgerSpan, first: int) -> int:
    """Returns how many messages in the ledger of `span`, from message index `first` on, the subscription has
    acknowledged."""
    cursor, found = subscription.cursor, 0
    position = log.shape.next_unskipped_position(Position(span.ledger_id, first))
    while position[0] == span.ledger_id and log.shape.has_visible_entry(position):
        for entry in await log.reader.read(position, READ_CHUNK_BYTES):
            if cursor.is_acked(entry.position):
                found += entry.count
            else:
                found += len(cursor.acked_indexes(entry.position))
            position = log.shape.next_unskipped_position(log.shape.position_after(entry.position))
    return found


async def find_nth_message(log: ReadableLog, number: int, *, from_latest: bool) -> tuple[StoredEntry, int]:
    """Returns the entry that contains the n-th message of the topic, and the index of the message in its batch (from 0;
    0 if it is in none). `number`: n, from 1; `from_latest`: counts from the newest message, else from the oldest.
    Raises NotFound if the topic has fewer messages, or `number` is below 1; and the errors of reading the log."""
    shape = log.shape
    count = shape.count_messages_from(shape.first_index)
    if not 1 <= number <= count:
        raise NotFound(f"topic {log.topic} has {count} messages; there is no message number {number}")
    index = shape.index_after_next_messages(shape.first_index, count - number if from_latest else number - 1)
    place = await log.reader.find_position_by_index(index)
    return await log.reader.read_entry(place.position), max(0, index - place.first_index)


async def read_message(log: ReadableLog, position: Position) -> StoredEntry:
    """Returns the entry at `position`. Raises NotFound if there is no entry, or if it was trimmed or skipped as lost;
    and the errors of reading the log."""
    if not log.shape.has_visible_entry(position) or log.shape.skipped_lost_range_end(position) is not None:
        raise NotFound(f"topic {log.topic} has no message {position} (any more)", position=position)
    return await log.reader.read_entry(position)
