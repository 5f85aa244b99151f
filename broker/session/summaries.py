"""The overview of a cluster, for gRPC, REST and the console: sums and largest topics of each broker, pages of topics,
and why a subscription delivers nothing or a ledger is not deleted.

    await ClusterSummaries(broker).summarize_brokers(here=False)        of all brokers, one request to each
    await ClusterSummaries(broker).list_topic_page(query, here=False)   of all brokers, merged
    explain_stuck_subscription(topic, subscription, backlog)    sentences, from what the dispatcher and the pump know
    explain_kept_ledgers(topic)                         per ledger, from what holds it (`Topic.trim_limits`)

The broker that is asked asks each other one at once, never once per topic, and waits OTHER_BROKERS_WAIT_S for them. A
broker that does not answer by then is asked once more and waited for LATE_BROKERS_WAIT_S: it is named in `late` if it
answers, else in `silent`. All of it is from memory; nothing is read from bookies or the metadata but the lists of
brokers and bookies, which are the last known ones while the metadata does not answer (broker/cluster/ownership.py). So
there is an answer within three seconds; within five while the metadata is away, and seven while it is late. Guarding
tests: tests/broker/session/test_summaries.py.

Also in this file: the statistics of a topic for operators (its producers, subscriptions, ledgers and compaction, as in
proto/statistics.py), guarded by tests/broker/grpc/test_stats.py; and below its heading: pages of topics (pages).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import nsmallest
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar, cast

from ...metadata import paths
from ...metadata.records import BookieRecord, BrokerRecord
from ...metadata.store import MetadataDisk
from ...proto import operations as op
from ...proto import states
from ...proto import statistics as values
from ...proto.entry import find_distinct_keys, key_of_single_message, parse_stored_head
from ...proto.errors import InvalidRequest, MagnetarError, Unauthenticated, Unauthorized, is_unknown_operation
from ...proto.names import NamespaceName, Position, compute_key_slot, parse_redriven_to
from ...proto.operations import Operation
from ...proto.states import Blocked, LedgerStays, TxnId
from ...proto.statistics import (
    BookieInfo,
    BrokerSummary,
    BundlePage,
    BundleRow,
    ClusterSummary,
    DiedBroker,
    KeptLedger,
    MessageState,
    MessageTrace,
    NamespaceSums,
    SharedLimits,
    TopicPage,
    TopicRow,
    WhyKept,
    WhyStuck,
)
from ...proto.versions import PRODUCT
from ...runtime.alarm import EventLoopSlices
from ...runtime.descriptors import PROCESS_DESCRIPTORS
from ...runtime.health import LOOP_HEARTBEAT
from ...runtime.tcp.listening import PROCESS_CERTIFICATES
from ..cluster.ownership import RegisteredServers
from ..log.log_shape_core import LedgerSpan
from ..log.unfolding import is_entry_slow_to_parse
from ..node.survey import (
    TOP_TOPICS,
    TOPICS_PER_CLOCK_READ,
    MeasuredTopic,
    TopicGroupTotals,
    find_slowest_subscription,
    measure_topic,
)
from ..node.topic_manager import TopicManager
from ..subscription.consumer import Consumer
from ..subscription.core.cursor_state import BATCH_INDEXES_MAX, NO_POSITION
from ..subscription.core.policy import SlotDistribution
from ..subscription.core.subscription_types import SubscriptionTypeRow as Registered
from ..subscription.expiry import is_of_other_subscription
from ..subscription.subscription import Subscription
from ..topic.admission_core import compute_backlog_bytes
from ..topic.statistics import analyze_backlog, count_unacknowledged, estimate_backlog, find_blocked_reason
from ..topic.topic import Topic
from .administration import call_operation_at_broker
from .sharing import describe_shared_limits

_LOG = logging.getLogger("magnetar.broker")

OLDEST_READ_TIMEOUT_S = 1.0
"""Seconds that reading a subscription's oldest message may take."""
SHOWN_HELD_KEYS_MAX, KEY_CHARACTERS_MAX = 10, 100
"""Held keys that statistics show, and how much of each."""
KEY_STUCK_AFTER_S = 60.0
"""Seconds after which a held key counts as stuck, as in deploy/prometheus/rules.yml and in the log of the SDK."""


async def collect_topic_stats(
    topic: Topic, owner: str, *, precise: bool = False, ages: bool = True
) -> values.TopicStats:
    """Returns the statistics of a topic and of its subscriptions. `owner`: the address (HOST:PORT) of its owner.
    `precise`: counts the messages of each backlog exactly, which reads the log. `ages`: if False, reads no entry from
    bookies; then `oldest_ms` is 0, and backlogs for which an entry would have to be read are estimated. Raises the
    errors of reading the log."""
    shape, traffic, rates, life = topic.log.shape, topic.traffic, topic.traffic.rates(), topic.maintenance
    return values.TopicStats(
        name=topic.name.full, owner=owner, partitions=0, messages_in=traffic.messages_in, bytes_in=traffic.bytes_in,
        messages_out=traffic.messages_out, bytes_out=traffic.bytes_out, rate_in=rates.messages_in,
        rate_out=rates.messages_out, throughput_in=rates.bytes_in, throughput_out=rates.bytes_out,
        storage_bytes=shape.size, earliest_index=shape.first_index, end_index=shape.end_index,
        producers=tuple(
            values.ProducerStats(
                each.name, each.address, each.messages, each.bytes, each.last_sequence_id, each.principal.name,
                each.since_ms, each.acks,
            )
            for each in topic.producers
        ),
        subscriptions=tuple(
            [await collect_subscription_stats(topic, each, precise, ages) for each in [*topic.subscriptions.values()]]
        ),
        dropped=topic.dropped_messages, quota=life.quota or states.BacklogQuotaState.NOT_REACHED,
        expired_entries=life.expired, evicted_entries=life.evicted, publish_throttled=topic.gate.rate_limited_count,
        terminated=topic.log.state is states.TopicState.TERMINATED, created_ms=topic.incarnation,
        published_ms=topic.log.last_published_ms, unsubscribed=topic.retention_without_subscriptions().describe(),
        transactions=_transactions(topic), key_index=topic.applied.key_index,
        unindexed_ledgers=topic.key_indexes.count_unindexed_ledgers(), durability=topic.applied.durability,
    )  # fmt: skip


def collect_brief_topic_stats(topic: Topic) -> values.BriefTopicStats:
    """Returns a part of the statistics of a topic, from memory alone: what flowed in and out, the rates, the stored
    bytes, and an estimate of each subscription's backlog. Takes a tenth of the time of `collect_topic_stats`."""
    traffic, rates, backlogs = topic.traffic, topic.traffic.rates(), dict[str, int]()
    for each in topic.subscriptions.values():
        backlogs[each.name] = estimate_backlog(topic.readable_log(uncommitted=each.reads_uncommitted), each)
    return values.BriefTopicStats(
        topic.name.full, traffic.messages_in, traffic.messages_out, topic.log.shape.size, rates.messages_in,
        rates.messages_out, rates.bytes_in, rates.bytes_out, backlogs,
    )  # fmt: skip


def _transactions(topic: Topic) -> values.TopicTransactions | None:
    found = topic.transactions.statistics()
    if found is None:
        return None
    return values.TopicTransactions(
        found.last_stable, found.stable_index, found.open, found.oldest, found.oldest_ms, found.aborted_entries,
        found.aborted_bytes, found.commits, found.aborts,
    )  # fmt: skip


def collect_transaction_stats(topic: Topic, txn: TxnId) -> values.TransactionHere:
    """Returns what an open transaction has written to this topic and acknowledged in its subscriptions. The first field
    of the result is False if the transaction has nothing here."""
    subscriptions = tuple(
        values.PendingOfTransaction(each.name, acks.entry_count, acks.up_to if acks.up_to != NO_POSITION else None)
        for each in topic.subscriptions.values()
        if each.cursor.pending is not None and (acks := each.cursor.pending.of.get(txn)) is not None
    )
    found = topic.transactions.find_open_transaction_stats(txn)
    if found is None:
        return values.TransactionHere(bool(subscriptions), None, 0, 0, False, 0, subscriptions)
    entries = found.entries, found.size, found.holds, found.waiting
    return values.TransactionHere(True, found.first, *entries, subscriptions)


async def collect_subscription_stats(
    topic: Topic, subscription: Subscription, precise: bool = False, ages: bool = True
) -> values.SubscriptionStats:  # fmt: skip
    """Returns the statistics of a subscription. `precise`: counts the messages of the backlog, which reads the log.
    `ages`: may read entries for the length of the backlog, and reads the arrival time of its oldest message; otherwise
    the backlog is an estimate, and that time is 0. Raises the errors of reading the log."""
    log = topic.readable_log(uncommitted=subscription.reads_uncommitted)
    backlog = (
        (await analyze_backlog(log, subscription)).messages
        if precise
        else await count_unacknowledged(log, subscription) if ages
        else estimate_backlog(log, subscription)
    )
    oldest_ms = await _oldest_ms(topic, subscription) if ages else 0
    cursor, dispatcher = subscription.cursor, subscription.dispatcher
    type_ = subscription.type
    active, keys = dispatcher.policy.statistics()
    keys = keys if keys is not None and subscription.consumers else SlotDistribution("", False, 0, [], [])
    slots: dict[int, list[values.SlotRange]] = {id_: [] for id_ in subscription.consumers}
    for first, last, owner in keys.ranges:
        slots[owner.id].append(values.SlotRange(first, last))
    delays = subscription.delayed.core if subscription.delayed is not None else None
    filtering, redriven = describe_filter(subscription), subscription.expired.redriven
    return values.SubscriptionStats(
        name=subscription.name, type=_name(type_), durable=subscription.is_durable,
        backlog=backlog, backlog_bytes=compute_backlog_bytes(topic.log.shape, cursor.mark), oldest_ms=oldest_ms,
        unacked=dispatcher.unacked, mark_delete=cursor.mark, read_position=dispatcher.read_position,
        acked_ranges=cursor.holes.hole_range_count if cursor.acked else 0,
        consumers=tuple(_consumer(each, slots[id_]) for id_, each in subscription.consumers.items()),
        active_consumer=active.name if active is not None else "",
        blocked=find_blocked_reason(topic, subscription, backlog), blocked_on_unacked=dispatcher.full,
        dispatch_throttled=subscription.pump.rates[0].throttled, replay_entries=dispatcher.redelivery_entry_count,
        key_shared_mode=states.KeyDistribution(keys.mode), allow_out_of_order_delivery=keys.out_of_order,
        draining=tuple(values.DrainingSlot(*each) for each in keys.draining), drained_total=keys.drained_total,
        delayed=delays.count if delays is not None else 0,
        delayed_buckets=delays.bucket_count if delays is not None else 0,
        delayed_memory_bytes=delays.memory_bytes if delays is not None else 0,
        pending_transactions=len(subscription.pending_transactions),
        pending_entries=cursor.pending.entry_count if cursor.pending is not None else 0,
        held_keys=tuple(list_held_keys(topic, subscription)),
        filter=filtering.filter, judged=filtering.judged, filtered=filtering.filtered + redriven,
        filtered_entries=filtering.filtered_entries + redriven, shown_unwanted=filtering.shown_unwanted,
        filtered_unread=filtering.filtered_unread,
        expired=subscription.expired.count,
    )  # fmt: skip


def list_held_keys(topic: Topic, subscription: Subscription) -> list[values.HeldKey]:
    """Returns the slots of keys in which entries wait until an earlier entry is acknowledged, at most
    SHOWN_HELD_KEYS_MAX, the longest held first. Reads nothing from bookies."""
    clock, found = topic.world.clock, list[values.HeldKey]()
    now_s, now_ms = clock.monotonic(), clock.wall_ms()
    for each in subscription.dispatcher.policy.find_held_slots(now_s)[:SHOWN_HELD_KEYS_MAX]:
        consumer = subscription.consumers.get(each.holder.id)
        found.append(values.HeldKey(
            each.slot, _key_in_memory(topic, each.oldest, each.slot), each.holder.name,
            consumer.address if consumer is not None else "", now_ms - int((now_s - each.since_s) * 1000),
            each.following_entries,
        ))  # fmt: skip
    return found


def _key_in_memory(topic: Topic, position: Position, slot: int) -> str:
    """Returns the key of that slot in an entry, shortened; empty if the entry is not in the broker's memory, is
    encrypted, or would take long to parse."""
    entry = topic.log.reader.get(position)
    if entry is None:
        return ""
    try:
        head = parse_stored_head(entry.frames[-1])
        keys: Iterable[bytes | None] = (key_of_single_message(head.metadata),)
        if entry.count > 1 and not head.metadata.encryption_keys and not is_entry_slow_to_parse(head.metadata):
            keys = find_distinct_keys(head.metadata, head.payload_offset, entry.frames[-1])
    except MagnetarError:
        return ""  # damaged: its consumer detects that
    key = next((each for each in keys if each is not None and compute_key_slot(each) == slot), b"")
    return key.decode(errors="replace")[:KEY_CHARACTERS_MAX]


def _name(type_: Registered | None) -> states.SubscriptionType:
    """Returns the subscription type as a value of `states.SubscriptionType`; for a type that only this broker knows,
    its name."""
    if type_ is None:
        return states.SubscriptionType.NONE
    return states.SubscriptionType.__members__.get(type_.name, cast(states.SubscriptionType, type_.name))


async def _oldest_ms(topic: Topic, subscription: Subscription) -> int:
    """Returns the arrival time of the oldest unacknowledged message (ms since the epoch); 0 if there is none, or if it
    cannot be read within OLDEST_READ_TIMEOUT_S seconds."""
    try:
        async with asyncio.timeout(OLDEST_READ_TIMEOUT_S):
            return await topic.maintenance.oldest_arrival_ms(subscription) or 0
    except (MagnetarError, TimeoutError) as error:
        _LOG.debug("%s/%s: when its oldest message came is not known: %r", topic.name, subscription.name, error)
        return 0


def _consumer(consumer: Consumer, slots: list[values.SlotRange]) -> values.ConsumerStats:
    member = consumer.member
    return values.ConsumerStats(
        name=member.name, address=consumer.address, permits=member.permits, unacked=member.unacked,
        delivered_messages=member.delivered_messages, delivered_bytes=member.delivered_bytes,
        redelivered_messages=member.redelivered_messages, blocked=member.blocked, priority_level=member.priority,
        slots=tuple(slots), role=consumer.principal.name, connected_ms=consumer.since_ms,
        acked_ms=consumer.activity.acked_ms,
    )  # fmt: skip


def collect_internal_stats(topic: Topic, cache_bytes: int) -> values.TopicInternalStats:
    """Returns the internal statistics of a topic's log. `cache_bytes`: how many bytes are in the tail cache of the
    whole broker; the result repeats this number."""
    log = topic.log
    return values.TopicInternalStats(
        state=log.state,
        ledgers=tuple(
            values.LedgerStats(
                span.ledger_id, states.LedgerState.OPEN if span.open else states.LedgerState.CLOSED,
                span.last_entry + 1, span.size, span.first_index, log.ensemble.get(span.ledger_id, ()),
                stays or states.LedgerStays.NO, topic.key_indexes.describe_index(span.ledger_id),
            )
            for span, (_, stays) in zip(log.shape.spans, topic.list_reasons_ledgers_kept(), strict=True)
        ),
        last_confirmed=log.shape.last_position, cache_bytes=cache_bytes, pending_adds=log.pending_entries,
        replication=str(log.replication or ""), wanted_replication=str(log.wanted_replication),
        degraded=log.is_degraded,
    )  # fmt: skip


def collect_compaction_stats(topic: Topic) -> values.CompactionStatus:
    """Returns the state and the progress of the topic's compaction. If the topic was never compacted, `ledger_id` is
    -1."""
    progress, record = topic.compaction.progress, topic.compaction.record
    found = values.CompactionStatus(
        progress.state, progress.step, progress.error, progress.looked_at, progress.to_look_at, progress.rounds,
        ledger_id=-1, horizon=Position(0, 0), messages=0, entries=0, bytes=0, end_index=0, compacted_ms=0,
        due_bytes=topic.compaction.estimate_uncompacted_bytes(),
    )  # fmt: skip
    if record is None:
        return found
    return replace(
        found, ledger_id=record.ledger_id, horizon=Position(record.horizon_ledger, record.horizon_entry),
        messages=record.messages, entries=record.entries, bytes=record.size, end_index=record.end_index,
        compacted_ms=record.compacted_ms,
    )  # fmt: skip


OTHER_BROKERS_WAIT_S, LATE_BROKERS_WAIT_S = 1.0, 2.0
"""Seconds to wait for other brokers, and for those that are asked again: a broker on a busy machine answers then. An
overview with most of them is better than none."""
LISTED_TOPICS_DEFAULT, LISTED_TOPICS_MAX = 100, 200
"""Rows of a page: if the caller does not say, and at most. 200 take 40 KB."""
SORT_FIELDS = (
    "backlog", "consumers", "oldest_ms", "producers", "rate_in", "rate_out", "storage_bytes", "subscriptions",
    "throughput_in", "throughput_out",
)  # fmt: skip
"""Fields of a row by which pages are sorted, besides the name."""

T = TypeVar("T")


class TopicPageQuery(NamedTuple):
    """A query for one page of the list of all topics in the cluster: which names are selected (those that begin with
    `prefix` and contain `contains`), how the topics are sorted, and after which topic the page begins. `limit`: the
    most rows of the page, 1 to LISTED_TOPICS_MAX; 0: LISTED_TOPICS_DEFAULT."""

    prefix: str = ""  # of the full name, as `contains`
    contains: str = ""
    sort: str = ""  # one of SORT_FIELDS, the largest first; else by name
    after: str = ""  # `next` of the page before
    limit: int = 0


def measure_loop_busy() -> float:
    """Returns the share of the time during which the event loop of this process works, from 0 to 1; -1 if that is not
    measured."""
    return LOOP_HEARTBEAT.busy_ratio if LOOP_HEARTBEAT.beat_at is not None else -1.0


class AnswersOfBrokers(NamedTuple, Generic[T]):
    """The answers of the other brokers to one question, and the names of the brokers without an answer, or with a late
    one.

    `silent`: those that did not answer. `refusing`: of these, those that refused this broker's credentials. `late`:
    those that answered only when they were asked again. `older`: those that do not know the question, because they are
    of an older release; they are not in `silent`."""

    answers: list[T]
    silent: tuple[str, ...]
    refusing: tuple[str, ...]
    late: tuple[str, ...]
    older: frozenset[str]


class ClusterSummaries:
    """Collects summaries of brokers and lists of topics and bundles, from this broker and from all other brokers.
    Brokers that do not answer in time are named in the result."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def summarize_brokers(self, *, here: bool) -> ClusterSummary:
        """Returns a summary of each broker, sorted by name, and of the bookies. `here`: only of this broker, without
        bookies. The result names the brokers that did not answer."""
        if here:
            return ClusterSummary((await self._summary(),), ())
        mine, members = await asyncio.gather(self._summary(), self._broker.read_brokers_and_bookies())
        others, disk = await asyncio.gather(
            self._ask_others(members, op.BROKER_SUMMARIES), self._measure_metadata_disk(members)
        )
        found = [mine, *(each for other in others.answers for each in other.brokers)]
        found += [_unknown_summary(each) for each in members.brokers if each.name in others.older]
        return ClusterSummary(
            tuple(sorted(found, key=attrgetter("name"))), others.silent, tuple(map(describe_bookie, members.bookies)),
            members.away_ms, others.refusing, others.late, members.late,
            tuple(DiedBroker(each.broker, each.endpoint, each.seen_ms) for each in members.died), *disk,
        )  # fmt: skip

    async def _measure_metadata_disk(self, members: RegisteredServers) -> MetadataDisk:
        """Returns the disk with the metadata, the end of its certificate, and its copies; zeros if the metadata does
        not say."""
        if members.away_ms or members.late:
            return MetadataDisk(0, 0)
        try:
            async with asyncio.timeout(OTHER_BROKERS_WAIT_S):
                return await self._broker.metadata.measure_disk() or MetadataDisk(0, 0)
        except (MagnetarError, TimeoutError) as error:
            _LOG.debug("the disk of the metadata is not known: %r", error)
            return MetadataDisk(0, 0)

    async def _summary(self) -> BrokerSummary:
        broker = self._broker
        survey, me = await broker.survey.run_survey(), broker.own_broker_record

        def rows(measure: str) -> tuple[TopicRow, ...]:
            return tuple(_row(facts, broker.endpoint) for facts in survey.largest[measure])

        return BrokerSummary(
            broker.name, broker.endpoint, PRODUCT, broker.started_ms, measure_loop_busy(),
            PROCESS_DESCRIPTORS.connections, survey.total.degraded, _sums("", survey.total),
            tuple(_sums(name, each) for name, each in sorted(survey.namespaces.items())),
            rows("traffic"), rows("backlog"), rows("age"), broker.world.own_token_ends_ms(), survey.full,
            PROCESS_CERTIFICATES.find_first_end_ms(), me is not None and me.draining,
            broker.balancing.balancer is not None,
            tuple(each.hot_topic for each in broker.balancing.crowded if each.hot_topic)[:TOP_TOPICS],
        )  # fmt: skip

    async def list_topic_page(self, query: TopicPageQuery, *, here: bool) -> TopicPage:
        """Returns one page of the list of topics that are loaded at any broker. `here`: at this broker only. The result
        names the brokers that did not answer. Raises InvalidRequest if the query's `limit` is not 0 to
        LISTED_TOPICS_MAX (0: LISTED_TOPICS_DEFAULT), its `sort` is unknown, or its `after` does not fit."""
        query = query._replace(limit=query.limit or LISTED_TOPICS_DEFAULT)
        if not 1 <= query.limit <= LISTED_TOPICS_MAX:
            raise InvalidRequest(f"limit must be 1 to {LISTED_TOPICS_MAX}, not {query.limit}")
        if query.sort not in ("", "name", *SORT_FIELDS):
            raise InvalidRequest(f"sort must be name, {', '.join(SORT_FIELDS)}, not {query.sort!r:.100}")
        key, after = _sort_key(query.sort), _parse_after(query)
        mine = await self._page(query, key, after)
        if here:
            return mine
        members = await self._broker.read_brokers_and_bookies()
        others = await self._ask_others(members, op.TOPIC_PAGE, **query._asdict())
        pages = [mine, *others.answers]
        rows = nsmallest(query.limit, (row for page in pages for row in page.topics), key=key)
        more = any(page.next for page in pages) or sum(len(page.topics) for page in pages) > len(rows)
        after_it = _next(query, rows) if more else ""
        missing = tuple(sorted({*others.silent, *others.older}))
        return TopicPage(tuple(rows), after_it, sum(page.found for page in pages), missing)

    async def list_bundles(self, name: NamespaceName | None, *, here: bool) -> BundlePage:
        """Returns the bundles of a namespace that brokers own, with their topics and rates, sorted by name. None: the
        bundles of all namespaces. `here`: those of this broker only. The result names the brokers that did not answer.
        Raises Unavailable if this broker has no ownership session."""
        mine = await self._list_own_bundles(name)
        if here:
            return BundlePage(mine, ())
        members = await self._broker.read_brokers_and_bookies()
        others = await self._ask_others(members, op.LIST_BUNDLES, namespace=str(name or ""))
        rows = sorted((*mine, *(row for each in others.answers for row in each.bundles)), key=_by_bundle)
        return BundlePage(tuple(rows), tuple(sorted({*others.silent, *others.older})))

    async def list_shared_limits(self, *, here: bool) -> SharedLimits:
        """Returns the limits that hold in sum over brokers, at each broker with topics that they bound, sorted by place
        and policy. `here`: at this broker only. The result names the brokers that did not answer."""
        mine = describe_shared_limits(self._broker)
        if here:
            return SharedLimits(mine, ())
        members = await self._broker.read_brokers_and_bookies()
        others = await self._ask_others(members, op.SHARED_LIMITS)
        rows = (*mine, *(row for each in others.answers for row in each.limits))
        return SharedLimits(
            tuple(sorted(rows, key=attrgetter("place", "policy", "broker"))),
            tuple(sorted({*others.silent, *others.older})),
        )

    async def _list_own_bundles(self, name: NamespaceName | None) -> tuple[BundleRow, ...]:
        broker = self._broker
        await broker.survey.run_survey()  # the rates are those of a walk
        found = list[BundleRow]()
        for path, sums in (await broker.sum_traffic_by_bundle()).items():
            place = paths.parse_bundle_owner(path)
            if place is not None and name in (None, NamespaceName.parse(place[0])):
                rates = sums.rate_in, sums.rate_out, sums.throughput_in, sums.throughput_out
                found.append(BundleRow(*place, broker.name, broker.endpoint, sums.topics, *rates))
        return tuple(sorted(found, key=_by_bundle))

    async def _page(
        self, query: TopicPageQuery, key: Callable[[TopicRow], tuple[float, str]], after: tuple[float, str] | None
    ) -> TopicPage:
        """Returns one page of the list of topics that are loaded at this broker."""
        broker, turns = self._broker, EventLoopSlices(self._broker.world.clock)
        await broker.survey.run_survey()  # the rates are those of a walk
        fitting = [
            topic for name, topic in broker.loaded.items() if name.startswith(query.prefix) and query.contains in name
        ]
        if key is _by_name:  # only what is shown is looked at
            fitting.sort(key=lambda topic: topic.name.full)
            later = [each for each in fitting if after is None or each.name.full > after[1]]
            rows = [_row(measure_topic(each), broker.endpoint) for each in later[: query.limit]]
            return TopicPage(tuple(rows), _next(query, rows) if len(later) > len(rows) else "", len(fitting), ())
        found = list[TopicRow]()
        for start in range(0, len(fitting), TOPICS_PER_CLOCK_READ):
            for each in fitting[start : start + TOPICS_PER_CLOCK_READ]:
                row = _row(measure_topic(each), broker.endpoint)
                if after is None or key(row) > after:
                    found.append(row)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        rows = nsmallest(query.limit, found, key=key)
        return TopicPage(tuple(rows), _next(query, rows) if len(found) > len(rows) else "", len(fitting), ())

    async def _ask_others(
        self, members: RegisteredServers, operation: Operation[T], **arguments: object
    ) -> AnswersOfBrokers[T]:
        """Calls the operation at all other brokers, and once more at those that do not answer in time."""
        broker = self._broker
        others = [each for each in members.brokers if each.name != broker.name]
        refusing, late, older = list[str](), list[str](), set[str]()

        async def ask(name: str, endpoint: str) -> T | None:
            again = False
            for wait_s in (OTHER_BROKERS_WAIT_S, LATE_BROKERS_WAIT_S):
                try:
                    async with asyncio.timeout(wait_s):
                        answer = await call_operation_at_broker(
                            broker.world, endpoint, operation, timeout_s=wait_s, here=True, **arguments
                        )
                except (MagnetarError, TimeoutError) as error:
                    if isinstance(error, Unauthorized) or isinstance(error.__cause__, Unauthenticated):
                        refusing.append(name)
                        return None
                    if is_unknown_operation(error):
                        older.add(name)
                        return None
                    again = True
                else:
                    if again:
                        late.append(name)
                    return answer
            return None

        answers = await asyncio.gather(*(ask(each.name, each.endpoint) for each in others))
        silent = sorted(
            each.name for each, answer in zip(others, answers, strict=True) if answer is None and each.name not in older
        )
        found = [each for each in answers if each is not None]
        return AnswersOfBrokers(found, tuple(silent), tuple(sorted(refusing)), tuple(sorted(late)), frozenset(older))


def _by_bundle(row: BundleRow) -> tuple[str, str]:
    return row.namespace, row.bundle


def _unknown_summary(broker: BrokerRecord) -> BrokerSummary:
    """Returns the summary of a broker of an older release, which does not answer for it: what its registration says."""
    nothing = _sums("", TopicGroupTotals())
    return BrokerSummary(broker.name, broker.endpoint, broker.version, 0, -1.0, 0, 0, nothing, (), (), (), ())


def describe_bookie(record: BookieRecord) -> BookieInfo:
    """Returns what operators see of a bookie's record: its address, rack, group and disk space, and whether it is
    read-only."""
    return BookieInfo(
        record.bookie, record.endpoint, record.read_only, record.rack, record.free_bytes, record.total_bytes,
        record.group,
    )  # fmt: skip


def _row(facts: MeasuredTopic, owner: str) -> TopicRow:
    topic, rates = facts.topic, facts.rates
    subscriptions = topic.subscriptions.values()
    return TopicRow(
        topic.name.full, owner, rates.messages_in, rates.messages_out, rates.bytes_in, rates.bytes_out,
        topic.log.shape.size, facts.backlog, facts.oldest_ms, len(topic.producers),
        sum(len(each.consumers) for each in subscriptions), sum(each.is_durable for each in subscriptions),
        *find_slowest_subscription(topic),
    )  # fmt: skip


def _sums(name: str, found: TopicGroupTotals) -> NamespaceSums:
    return NamespaceSums(
        name, found.topics, found.subscriptions, found.producers, found.consumers, found.rate_in, found.rate_out,
        found.throughput_in, found.throughput_out, found.storage_bytes, found.backlog, found.in_memory,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------- pages
# A page ends at a value and a name, which are the text `next`: rows that change their place meanwhile are shown twice
# or not at all, and no broker has to remember a reader.


def _by_name(row: TopicRow) -> tuple[float, str]:
    return 0.0, row.name


def _sort_key(sort: str) -> Callable[[TopicRow], tuple[float, str]]:
    """Returns a function that computes the sort key of a row. The row with the smallest key is shown first."""
    if sort in ("", "name"):
        return _by_name
    if sort == "oldest_ms":
        return lambda row: (float(row.oldest_ms) if row.oldest_ms else float("inf"), row.name)
    value = attrgetter(sort)
    return lambda row: (-float(value(row)), row.name)


def _next(query: TopicPageQuery, rows: Sequence[TopicRow]) -> str:
    if not rows:
        return ""
    number, name = _sort_key(query.sort)(rows[-1])
    return f"{number!r} {name}"


def _parse_after(query: TopicPageQuery) -> tuple[float, str] | None:
    if not query.after:
        return None
    number, _, name = query.after.partition(" ")
    try:
        return float(number), name
    except ValueError:
        raise InvalidRequest(f"after must be `next` of the page before, not {query.after!r:.100}") from None


# --------------------------------------------------------------------------------------------------------- why


HOW_BLOCK_ENDS = {
    Blocked.NO_CONSUMER: "A consumer has to connect; or delete the subscription if nothing reads it any more, for it "
    "keeps what it has not acknowledged.",
    Blocked.NO_PERMITS: "Its consumers ask for no more messages: they work on what they have, or wait. Add consumers, "
    "or look at what their programs wait for.",
    Blocked.INACTIVE: "Nothing has to be done: it gets messages when the active consumer has left.",
    Blocked.SLOW_CONSUMER: "The connection of a consumer does not take more: its program or its network is slow.",
    Blocked.TOO_MANY_UNACKED: "Its consumers have to acknowledge what they hold; or raise max_unacked_per_consumer or "
    "max_unacked_per_subscription.",
    Blocked.NOT_YET: "Nothing has to be done: an earlier message is read or delivered first.",
    Blocked.FAILED: "The failed message has to be acknowledged; a dead-letter policy would move it away after some "
    "deliveries.",
    Blocked.KEYS_BUSY: "The consumers that hold messages of these keys have to acknowledge them, or to disconnect.",
    Blocked.KEY_LIMITS: "It goes on when messages of these keys are acknowledged, or their rates allow; or raise "
    "fair.max-in-flight-per-key or fair.rate-per-key of the subscription.",
    Blocked.HOLES: "The oldest messages have to be acknowledged: those after them cannot be remembered.",
    Blocked.THROTTLED: "It goes on by itself; or raise the dispatch rate of the subscription, the topic or the broker.",
    Blocked.MOVING: "It goes on by itself, as soon as bookies have stored the new place.",
    Blocked.FINDING_DELAYS: "It goes on by itself.",
    Blocked.DELAYS: "Bookies have to take the delayed messages: look at them.",
    Blocked.DELAYED: "It goes on by itself, when the messages are due.",
    Blocked.HELD: "It goes on by itself, after the back-off.",
    Blocked.OPEN_TRANSACTION: "It goes on when that has ended: by its program, its time-out, or 'magnetar transactions "
    "abort'.",
}
"""For each reason why a subscription delivers nothing: what would end this reason."""


def explain_stuck_subscription(topic: Topic, subscription: Subscription, backlog: int) -> WhyStuck:
    """Returns an explanation why a subscription delivers no more messages, or the statement that it does deliver or has
    delivered everything. `backlog`: the number of its unacknowledged messages. Reads nothing from bookies."""
    blocked = find_blocked_reason(topic, subscription, backlog)
    dispatcher, now_ms = subscription.dispatcher, topic.world.clock.wall_ms()
    if blocked in (Blocked.NO, Blocked.CAUGHT_UP) and not dispatcher.unacked:
        text = "It has delivered everything." if backlog == 0 else "It delivers."
        return WhyStuck(False, blocked, tuple(each for each in (text, _explain_filter(subscription)) if each))
    sentences = list[str]()
    waits = blocked is Blocked.OPEN_TRANSACTION
    stuck = waits or (backlog > 0 and blocked not in (Blocked.NO, Blocked.CAUGHT_UP))
    held_keys = [
        each for each in list_held_keys(topic, subscription) if now_ms - each.since_ms >= KEY_STUCK_AFTER_S * 1000
    ]
    if stuck:
        sentences += [f"{str(blocked).capitalize()}.", HOW_BLOCK_ENDS.get(blocked, "")]
    if waits:
        sentences.append(_describe_waiting_for_transaction(topic))
    elif stuck:
        oldest = topic.maintenance.oldest_arrival_ms_in_memory(subscription) if subscription.is_durable else 0
        since = f", the oldest for {_span((now_ms - oldest) / 1000)}" if oldest else ""
        sentences.append(f"{_count(backlog, 'message')} wait{'' if backlog > 1 else 's'}{since}.")
    holders = sorted(subscription.consumers.values(), key=lambda each: -each.member.unacked)[:3]
    for each in holders:
        if each.member.unacked:
            first = min(each.member.outstanding, default=None)
            place = f", the first at {first[0]}:{first[1]}" if first is not None else ""
            role = f", role {each.principal.name}" if each.principal.name else ""
            who = f"Consumer {each.member.name!r} ({each.address}{role})"
            text = f"{who} holds {_count(each.member.unacked, 'message')} that it has not acknowledged{place}"
            sentences.append(f"{text}{_last_acknowledged(each, now_ms)}.")
    sentences += [_explain_parts(subscription), _explain_filter(subscription)]
    if blocked is Blocked.NO_PERMITS:
        sentences.append(f"{_count(len(subscription.consumers), 'consumer')} connected, with no permits.")
    draining = dispatcher.policy.statistics()[1]
    for slot in draining.draining[:3] if draining is not None and subscription.consumers else ():
        sentences.append(f"Slot {slot[0]} of the keys waits for {_count(slot[1], 'entry')} of its last consumer.")
    sentences += [_describe_held_key(each, now_ms) for each in held_keys[:3]]
    if not any(sentences):  # without a consumer, and without anything for one
        sentences = ["It has delivered everything."]
    return WhyStuck(stuck or bool(held_keys), blocked, tuple(each for each in sentences if each))


def _describe_held_key(held: values.HeldKey, now_ms: int) -> str:
    key = f"Key {held.key!r} (slot {held.slot})" if held.key else f"Slot {held.slot} of the keys"
    return (
        f"{key} does not get on: consumer {held.consumer!r} ({held.address}) has had its oldest message for "
        f"{_span((now_ms - held.since_ms) / 1000)}, and {_count(held.following_entries, 'entry')} of it "
        f"{'waits' if held.following_entries == 1 else 'wait'}."
    )


def describe_filter(subscription: Subscription) -> values.SubscriptionFilterState:
    """Returns the filter of a subscription, and what it has judged since it was set or the topic was loaded. Without a
    filter, returns an empty text and zeros."""
    found = subscription.filtering
    if found is None:
        return values.SubscriptionFilterState("", 0, 0, 0, 0, 0)
    return values.SubscriptionFilterState(
        found.filter.text, found.judged, found.filtered, found.filtered_entries, found.shown_unwanted,
        found.filtered_unread,
    )  # fmt: skip


def _explain_filter(subscription: Subscription) -> str:
    """Returns what the filter of a subscription has done; "" if it has none, or has judged nothing."""
    found = subscription.filtering
    if found is None or not found.judged:
        return ""
    wanted, shown = found.judged - found.filtered - found.shown_unwanted, ""
    if found.shown_unwanted:
        shown = (
            f"; {found.shown_unwanted:,} others came in batches with wanted ones, as a consumer does not acknowledge "
            "by index"
        )
    return f"The filter has looked at {_count(found.judged, 'message')}, and wants {wanted:,}{shown}."


def _explain_parts(subscription: Subscription) -> str:
    """Returns what consumers that acknowledge whole entries alone are shown again; "" if they are shown nothing
    twice."""
    whole = [each.member.name for each in subscription.consumers.values() if not each.member.acks_by_index]
    if not whole or not (entries := len(subscription.cursor.partial)):
        return ""
    return (
        f"{_count(entries, 'entry')} {'is' if entries == 1 else 'are'} acknowledged in part, by consumers that "
        f"acknowledge by index; {whole[0]!r} does not, and gets them whole."
    )


def _describe_waiting_for_transaction(topic: Topic) -> str:
    transactions, waiting = topic.transactions.statistics(), topic.waiting_message_count
    assert transactions is not None, "without transactions every message is shown"
    which = "one that is ending"
    core = topic.transactions.core
    if core is not None and (lost := core.forgotten_transaction_ids):
        which = f"{lost[0]}, whose outcome is lost: 'magnetar topics skip-lost --forgotten' decides"
    elif transactions.oldest is not None:
        which = f"{transactions.oldest}, open for {_span(transactions.oldest_ms / 1000)}"
    return f"{_count(waiting, 'message')} wait{'' if waiting > 1 else 's'} for {which}."


async def trace_message(topic: Topic, position: Position, batch_index: int) -> MessageTrace:
    """Returns what has become of a message: whether the topic has it, and its one state in each subscription.
    `batch_index`: its place in its batch; -1: the whole entry. Reads the entry if a durable subscription has
    acknowledged it, and raises the errors of reading."""
    shape = topic.log.shape
    if not shape.has_entry(position):
        if position > shape.last_confirmed:
            return MessageTrace("The topic has no such message yet: its newest is before it.", ())
        return MessageTrace("The topic has no such message: it never had it, or it was deleted.", ())
    if shape.skipped_lost_range_end(position) is not None:
        return MessageTrace("The message is lost: no bookie has it, and an operator let consumers pass over it.", ())
    if not topic.shown.shape.has_visible_entry(position):
        if position > topic.shown.shape.stable_position:
            return MessageTrace(
                "The message comes after the begin of an open transaction, or is of one: consumers get it when all "
                "that began before it have ended, unless its own is aborted; 'magnetar transactions list' shows "
                "them.", (),
            )  # fmt: skip
        return MessageTrace("The message is of a transaction that was aborted: no consumer gets it.", ())
    filters = await _find_why_filtered(topic, position, batch_index)
    states = [_state_of_message(topic, each, position, batch_index) for each in topic.subscriptions.values()]
    states = [
        MessageState(each.subscription, "filtered", filters[each.subscription])
        if each.state == "acknowledged" and each.subscription in filters else each
        for each in states
    ]  # fmt: skip
    return MessageTrace("The topic has the message.", tuple(sorted(states, key=lambda each: each.subscription)))


async def _find_why_filtered(topic: Topic, position: Position, batch_index: int) -> dict[str, str]:
    """Returns why subscriptions do not get the message, by the subscription: their filters, or because it went back for
    another one. Judges for those subscriptions alone that have acknowledged the message or a part of its entry."""
    asked = [
        each for each in topic.subscriptions.values()
        if each.is_durable and (each.cursor.is_acked(position) or each.cursor.acked_indexes(position))
    ]  # fmt: skip
    if not asked:
        return {}
    entry = await topic.log.reader.read_entry(position)
    wanted, found = (1 << entry.count) - 1 if batch_index < 0 else 1 << min(batch_index, BATCH_INDEXES_MAX), {}
    for each in asked:
        if entry.redriven_to and is_of_other_subscription(entry, each):
            other = parse_redriven_to(entry.redriven_to, topic.name)
            found[each.name] = f"It went back for the subscription {other!r} alone."
            continue
        filtering = each.filtering
        if filtering is not None and wanted & ~await filtering.judge_stored_entry(entry, topic.world) == 0:
            found[each.name] = f"The filter does not want it: {filtering.filter.text}"
    return found


def _state_of_message(topic: Topic, subscription: Subscription, position: Position, batch_index: int) -> MessageState:
    cursor, dispatcher = subscription.cursor, subscription.dispatcher
    now_ms = topic.world.clock.wall_ms()

    def make_state(name: str, detail: str) -> MessageState:
        times = cursor.redelivery_count(position)
        again = f" It was delivered again {_count(times, 'time')}." if times else ""
        return MessageState(subscription.name, name, detail + again)

    if cursor.is_acked(position):
        upto = position <= cursor.mark
        return make_state("acknowledged", "Everything up to it is." if upto else "Some messages before it are not.")
    if batch_index in cursor.acked_indexes(position):
        return make_state("acknowledged", "Other messages of its batch are not.")
    bits = -1 if batch_index < 0 else 1 << min(batch_index, BATCH_INDEXES_MAX)
    if (pending := cursor.pending) is not None and (
        pending.is_entry_pending(position) or pending.message_bits_at(position) & bits
    ):
        txns = ", ".join(map(str, pending.find_transactions(position)))
        return make_state("pending", f"It is acknowledged when transaction {txns} commits.")
    if (member := dispatcher.find_consumer_of_entry(position)) is not None:
        consumer = subscription.consumers.get(member.id)
        at = f" ({consumer.address})" if consumer is not None else ""
        return make_state("delivered", f"Consumer {member.name!r}{at} has it, and has not acknowledged it.")
    if position in dispatcher.held:
        until_ms = dispatcher.held.until[position]
        if until_ms is None:
            return make_state("held back", "It becomes a dead letter.")
        return make_state("held back", f"Its back-off ends in {_span(max(0, until_ms - now_ms) / 1000)}.")
    if dispatcher.delays is not None and dispatcher.delaying and dispatcher.delays.is_delayed(position):
        return make_state("delayed", "Its delivery time has not come.")
    blocked = find_blocked_reason(topic, subscription, 1)
    why = f": {blocked}" if blocked not in (Blocked.NO, Blocked.CAUGHT_UP) else ""
    if position < dispatcher.read_position:
        return make_state("redelivery", f"It was taken back, and comes again{why}.")
    return make_state("waiting", f"It comes after what is before it{why}.")


def _last_acknowledged(consumer: Consumer, now_ms: int) -> str:
    """Returns the end of a sentence about a consumer: when it acknowledged last, or that it never has."""
    acked_ms, since_ms = consumer.activity.acked_ms, consumer.since_ms
    if acked_ms:
        return f"; its last acknowledgement came {_span(max(0, now_ms - acked_ms) / 1000)} ago"
    return f"; it has acknowledged nothing since it connected {_span(max(0, now_ms - since_ms) / 1000)} ago"


def explain_kept_ledgers(topic: Topic) -> WhyKept:
    """Returns, for each ledger of the topic, an explanation why the ledger is not deleted."""
    now_ms, found = topic.world.clock.wall_ms(), list[KeptLedger]()
    durable = [each for each in topic.subscriptions.values() if each.is_durable]
    for span, (_, stays) in zip(topic.log.shape.spans, topic.list_reasons_ledgers_kept(), strict=True):
        holders = tuple(sorted(each.name for each in durable if not each.cursor.trim_limit.has_released_ledger(span)))
        sentence = _kept_sentence(topic, stays, holders, span.closed_ms, now_ms) + _index_sentence(topic, span)
        messages = span.end_index - span.first_index
        found.append(KeptLedger(span.ledger_id, span.size, messages, stays or LedgerStays.NO, holders, sentence))
    return WhyKept(tuple(found))


def _index_sentence(topic: Topic, span: LedgerSpan) -> str:
    """Returns the sentence about the key index of a sealed ledger; "" while the policy is off."""
    indexes = topic.key_indexes
    if span.open or not indexes.is_on:
        return ""
    if found := indexes.describe_index(span.ledger_id):
        return f" Its key index has {found.replace('+', ' and ')}."
    return " Its key index is being built." if indexes.building == span.ledger_id else " It has no key index yet."


def _kept_sentence(
    topic: Topic, stays: LedgerStays | None, holders: Sequence[str], closed_ms: int, now_ms: int
) -> str:
    if stays is None:
        return "Nothing keeps it: the next trim deletes it."
    text = f"{str(stays).capitalize()}."
    if stays is LedgerStays.NOT_ACKNOWLEDGED and holders:
        return f"{text} It waits for {_listed(holders)}."
    if stays is LedgerStays.RETAINED_BY_TIME and topic.applied.retention_minutes > 0:
        left_s = topic.applied.retention_minutes * 60 - (now_ms - closed_ms) / 1000
        return f"{text} It may go in {_span(max(0.0, left_s))}."
    return text


def _listed(names: Iterable[str], shown: int = 5) -> str:
    known = list(names)
    more = f" and {len(known) - shown} more" if len(known) > shown else ""
    return ", ".join(known[:shown]) + more


def _count(number: int, what: str) -> str:
    plural = what if number == 1 else f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {plural}"


def _span(seconds: float) -> str:
    for size, name in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return _count(int(seconds // size), name)
    return _count(int(seconds), "second")
