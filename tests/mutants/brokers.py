"""Defects of the broker: patches of a topic's log, its list of ledgers and its queue."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from magnetar.bookie.maintenance import repair_worker
from magnetar.broker.cluster import balance_core, isolation_core, stored_core
from magnetar.broker.cluster.balance_core import Balancer, BrokerLoad, _Averages
from magnetar.broker.cluster.catalog import Catalog
from magnetar.broker.cluster.isolation_core import BrokerIsolation
from magnetar.broker.cluster.ownership import BundlesChanged, Ownership
from magnetar.broker.cluster.shares_core import GrantedShare, ShareGrants, ShareReport
from magnetar.broker.cluster.stored_core import PlaceBytes, StoredHere, StoredReport, StoredSums
from magnetar.broker.log import log_shape_core
from magnetar.broker.log.compaction import Compaction, CompactionRun
from magnetar.broker.log.compaction_core import SurvivingMessageSearch
from magnetar.broker.log.log import Log
from magnetar.broker.log.log_queue_core import LogQueue, QueuedPublish, SequenceRange
from magnetar.broker.log.log_shape_core import TrimLimit
from magnetar.broker.log.managed_ledger import ManagedLedger, ManagedLedgerRecord
from magnetar.broker.log.snapshot_ledger import SnapshotLedger
from magnetar.broker.log.topic_log import TopicLog
from magnetar.broker.subscription.core.dispatch import Delivery, Dispatcher
from magnetar.broker.subscription.core.key_shared import KeyShared
from magnetar.broker.subscription.core.policy import DispatcherEntry, Member
from magnetar.broker.subscription.pump import SubscriptionDeliveryPump
from magnetar.broker.topic import topic
from magnetar.broker.topic.dedup import Deduplication
from magnetar.broker.topic.dedup_core import DedupCore, ProducerSequenceProgress
from magnetar.broker.topic.producer import TopicProducer
from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.ledger.placement_core import ANY_GROUP
from magnetar.metadata.records import BrokerRecord, OwnerRecord, TopicLedger, encode_record
from magnetar.metadata.store import NodeUpdate, PutNode, get_record, update_nodes
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.entry import parse_header
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import TopicName
from magnetar.proto.states import TopicState
from tests.mutants.ledgers import Stack, put


def sequence_at_push(stack: Stack) -> None:
    """M28: what a producer sent counts as stored when it is pushed; sent again it is a duplicate."""
    honest = TopicProducer.publish

    def publish(self: TopicProducer, client_part: bytes) -> bool:
        published = honest(self, client_part)
        if published:
            pushed = parse_header(client_part).highest_sequence_id
            known = self._topic.dedup.core._persisted
            known[self.name] = ProducerSequenceProgress(max(self.last_sequence_id, pushed))
        return published

    put(stack, TopicProducer, "publish", publish)


def snapshot_is_believed(stack: Stack) -> None:
    """M46: a new owner takes the sequence ids of the last snapshot for all: it reads nothing after it (ours)."""

    async def replay(log: Log, dedup: Deduplication, transactions: TopicTransactions) -> None:
        dedup.core.position = log.shape.last_position

    put(stack, topic, "replay_log_for_dedup_and_transactions", replay)


def deleted_before_the_list(stack: Stack) -> None:
    """M29: a ledger is deleted first, and then the list that names it is changed, or not."""
    honest = TopicLog.trim_ledgers

    async def trim(self: TopicLog, choose: Callable[[], list[int]]) -> list[int]:
        await self._managed_ledger.delete_ledgers([each for each in choose() if each != self.shape.tail_span.ledger_id])
        return await honest(self, choose)

    put(stack, TopicLog, "trim_ledgers", trim)


def idle_ledger_is_listed_as_open(stack: Stack) -> None:
    """M29d: the ledger of an idle topic ends, and the list of the topic does not say so (ours)."""

    async def commit(self: ManagedLedger, ended: TopicLedger, *, terminated: bool | None) -> None:
        pass

    put(stack, ManagedLedger, "commit_closed_last_ledger", commit)


def publish_does_not_follow_an_idle_ledger(stack: Stack) -> None:
    """M29e: what is published while the ledger of an idle topic ends waits for the next publish (ours)."""
    honest = TopicLog._end_without_next

    async def end(self: TopicLog, last_entry: int) -> bool:
        start, self._start_switch = self._start_switch, lambda *_, **__: None  # type: ignore[method-assign]
        try:
            return await honest(self, last_entry)
        finally:
            self._start_switch = start  # type: ignore[method-assign]

    put(stack, TopicLog, "_end_without_next", end)


def idle_cursor_ledger_stays_open(stack: Stack) -> None:
    """M29f: the cursor ledger of an idle subscription is given up, and not closed (ours)."""
    put(stack, SnapshotLedger, "close", SnapshotLedger.stop_writing)


def ends_although_it_is_lost(stack: Stack) -> None:
    """M30b: a topic that is lost while it ends, ends in order: it changes the list (ours)."""
    honest = TopicLog.abandon

    def lose(self: TopicLog, error: MagnetarError) -> None:
        if self.state is not TopicState.CLOSING:
            honest(self, error)

    put(stack, TopicLog, "abandon", lose)


def serves_on_after_another_owner(stack: Stack) -> None:
    """M30: a list that another broker has changed is overwritten, and the topic goes on."""

    async def change(
        self: ManagedLedgerRecord, ledgers: Sequence[TopicLedger], *, terminated: bool | None = None,
        together: Sequence[NodeUpdate] = (), **fields: object,
    ) -> None:  # fmt: skip
        before = self.record
        after = structs.replace(
            before, ledgers=tuple(ledgers), terminated=before.terminated if terminated is None else terminated, **fields
        )
        value = encode_record(after, self._path)
        await update_nodes(self._store, (*together, NodeUpdate(self._path, lambda node: value)))
        self.record, self._stored = after, value

    put(stack, ManagedLedgerRecord, "change_record", change)


def failed_but_still_queued(stack: Stack) -> None:
    """M31: what was answered as failed stays in the queue, and goes to the next ledger."""

    def give_up(self: LogQueue[Any]) -> list[QueuedPublish]:
        self.ledger_id = -1
        return [*self._sent, *self.pending]

    put(stack, LogQueue, "take_all", give_up)


def key_moves_with_its_owner(stack: Stack) -> None:
    """M32: a new consumer gets a key at once, while the old one holds messages of it that it has not acknowledged."""

    def owners_changed(self: KeyShared) -> None:
        for number, slot in self.slots.of.items():
            if slot.outstanding:
                slot.holder = self.owners.find_owner(number) or slot.holder
            if slot.waiting:
                self.slots.changed[number] = None

    put(stack, KeyShared, "_owners_changed", owners_changed)


def seek_answered_after_its_messages(stack: Stack) -> None:
    """M39: a subscription that is moved hands out from the new place before that is stored and its mover answered."""
    honest = SubscriptionDeliveryPump.deliver_available_entries

    def deliver_available_entries(self: SubscriptionDeliveryPump) -> None:
        self.is_moving = False
        honest(self)

    put(stack, SubscriptionDeliveryPump, "deliver_available_entries", deliver_available_entries)


def redelivery_is_free(stack: Stack) -> None:
    """M40: what is delivered again costs its consumer no permits, which the client gives back all the same."""
    honest = Dispatcher._deliver

    def deliver(self: Dispatcher, member: Member, entry: DispatcherEntry, again: bool) -> Delivery:
        before = member.permits
        delivery = honest(self, member, entry, again)
        if again:
            member.permits = before
        return delivery

    put(stack, Dispatcher, "_deliver", deliver)


def snapshot_counts_before_it_is_stored(stack: Stack) -> None:
    """M77: the entries that a snapshot of sequence ids covers may be trimmed before it is stored."""
    honest = Deduplication._store

    async def store(self: Deduplication) -> None:
        self._stored = self._snapshot_now().position
        await honest(self)

    put(stack, Deduplication, "_store", store)


def commit_sets_numbers_back(stack: Stack) -> None:
    """M68: a commit sets the sequence id of its producer back to that of the transaction."""

    honest = DedupCore.on_transaction_committed

    def merged(self: DedupCore, numbers: Mapping[str, ProducerSequenceProgress], *sent: Any) -> None:
        honest(self, numbers, *sent)
        self._persisted |= numbers

    put(stack, DedupCore, "on_transaction_committed", merged)


def lone_chunk_counts(stack: Stack) -> None:
    """M68b: a chunk is stored, and its id counts, without the chunks before it."""

    def is_followed_by(self: ProducerSequenceProgress, numbers: SequenceRange) -> bool:
        return True

    put(stack, ProducerSequenceProgress, "is_followed_by", is_followed_by)


def rest_of_a_refused_message(stack: Stack) -> None:
    """M68c: after a chunk that is refused the other chunks of its message are stored."""

    def why_chunk_refused(self: TopicProducer, numbers: SequenceRange) -> None:
        return None

    put(stack, TopicProducer, "_why_chunk_refused", why_chunk_refused)


# ------------------------------------------------------------------------------------ compaction
def end_index_passes_an_open_transaction(stack: Stack) -> None:
    """M79: a compaction ends before an open transaction by its positions, and after it by its indexes."""
    honest = CompactionRun.__init__

    def init(self: CompactionRun, of: Compaction) -> None:
        honest(self, of)
        self._end_index = of.log.shape.end_index

    put(stack, CompactionRun, "__init__", init)


def any_broker_gets_a_bundle(stack: Stack) -> None:
    """M30e: a bundle without an owner goes to any broker of the group, whatever its namespace asks for."""
    put(stack, BrokerIsolation, "select_allowed", lambda self, available: list(available))


def primaries_take_all_back_at_once(stack: Stack) -> None:
    """M30f: bundles leave a fallback broker as soon as enough primary brokers are there, so a flap moves them twice."""
    put(stack, isolation_core, "FALLBACK_KEPT_S", 0.0)


def bundle_counts_with_one_report(stack: Stack) -> None:
    """M30j: a bundle counts with its last report, so of many those move whose load was said too low by chance."""
    put(stack, balance_core, "BUNDLE_REPORTS", 1)


def target_counts_as_measured(stack: Stack) -> None:
    """M30k: a target counts as busy as its first report after a move says."""
    put(stack, _Averages, "most", property(lambda self: self.slow))


def slow_target_counts_as_fast(stack: Stack) -> None:
    """M30l: what a bundle costs at a busy target is not told by the target's own points."""
    put(stack, Balancer, "_points_of", lambda self, source, target, load: self._points_at(source, load))


def claimed_bundle_rests_at_its_owner(stack: Stack) -> None:
    """M30m: a bundle that another broker claims, and does not give away, rests at its owner."""
    honest = Balancer.end_move

    def end(self: Balancer, path: str, moved: bool, now_s: float) -> None:
        honest(self, path, moved, now_s)
        if not moved:
            self._rest((path, ""), now_s)

    put(stack, Balancer, "end_move", end)


def idle_liar_gets_bundles(stack: Stack) -> None:
    """M30n: a broker that carries much, and says that it is idle, gets bundles."""
    put(stack, balance_core, "CARRIED_LOAD_RATIO_MAX", math.inf)


def light_liar_is_believed(stack: Stack) -> None:
    """M30o: a broker carries less than its bundles do, as it says."""
    honest = Balancer.add_report

    def add(self: Balancer, report: BrokerLoad, now_s: float) -> None:
        honest(self, report, now_s)
        if report.name in self._brokers:
            self._brokers[report.name].load = report.load

    put(stack, Balancer, "add_report", add)


def lost_copies_go_anywhere(stack: Stack) -> None:
    """M30g: auto-recovery makes the copies of a ledger with groups at any bookie."""
    put(stack, repair_worker, "decode_bookie_groups", lambda properties: ANY_GROUP)


def first_compaction_holds_nothing(stack: Stack) -> None:
    """M87: the log is trimmed while the first compaction of a topic reads it."""
    honest = Compaction.trim_limit

    def held(self: Compaction, applied: AppliedPolicies) -> TrimLimit | None:
        first = self.record is None and not applied.compaction_threshold_bytes
        return None if first else honest(self, applied)

    put(stack, Compaction, "trim_limit", held)


def chunks_of_another_round(stack: Stack) -> None:
    """M87b: a round of a compaction keeps the chunks that it has seen of keys that it gave up to a later one."""

    def narrow(self: SurvivingMessageSearch) -> None:
        while len(self._latest) > self._keys_max and self._high - self._low > 1:
            self._high = high = (self._low + self._high) // 2
            self._latest = {key: at for key, at in self._latest.items() if int.from_bytes(key[:4]) < high}

    put(stack, SurvivingMessageSearch, "_narrow", narrow)


def served_on_while_it_is_given_away(stack: Stack) -> None:
    """M30c: a broker loads topics of a bundle that it is giving away, until the next owner is named."""

    async def move(self: Ownership, path: str, heir: BrokerRecord, unload: Callable[[], Awaitable[None]]) -> None:
        await unload()
        found = await get_record(self._store, path, OwnerRecord)
        assert found is not None
        await self._write_owner(path, heir, found[1])
        self._owned.pop(path, None)

    put(stack, Ownership, "_move", move)


def given_away_before_it_is_closed(stack: Stack) -> None:
    """M30d: the next owner of a bundle is named before the topics are closed."""

    async def move(self: Ownership, path: str, heir: BrokerRecord, unload: Callable[[], Awaitable[None]]) -> None:
        self._owned.pop(path, None)
        found = await get_record(self._store, path, OwnerRecord)
        assert found is not None
        await self._write_owner(path, heir, found[1])
        await unload()

    put(stack, Ownership, "_move", move)


def old_number_is_taken(stack: Stack) -> None:
    """M30h: a broker that knows the number of bundles before a split takes a bundle of that number."""
    honest = Ownership._check_number_of_bundles

    async def check(self: Ownership, path: str) -> Any:
        try:
            return await honest(self, path)
        except BundlesChanged:
            return type(await honest(self, "/owners"))((), 0)

    put(stack, Ownership, "_check_number_of_bundles", check)


def half_is_taken(stack: Stack) -> None:
    """M30i: a broker takes one half of a bundle that its owner has not divided yet."""

    async def find(self: Ownership, path: str, splits: int) -> None:
        return None

    put(stack, Ownership, "_find_record_before_split", find)


def share_given_away_before_it_is_given_back(stack: Stack) -> None:
    """M98s: a share is granted to a broker while the one that has it is not known to use less."""
    honest = ShareGrants.grant_shares

    def grant(self: ShareGrants, report: ShareReport, now: float) -> dict[str, GrantedShare] | None:
        granted = honest(self, report, now)
        for limit, each in (granted or {}).items():
            self._limits[limit].count(report.broker, each.share)
        return granted

    put(stack, ShareGrants, "grant_shares", grant)


def topics_counted_before_others_are_made(stack: Stack) -> None:
    """M98t: topics that brokers create at once are counted before either is there, and are more than the limit."""
    honest = Catalog._check_topics

    async def check(self: Catalog, topic: TopicName, more: int) -> list[PutNode]:
        await honest(self, topic, more)
        return []

    put(stack, Catalog, "_check_topics", check)


def a_range_counts_beside_its_parts(stack: Stack) -> None:
    """M98u: of a bundle that was divided, the bytes count twice: in the whole, and in its parts."""

    def put_row(self: StoredSums, namespace: str, at: tuple[int, int], row: Any) -> None:
        self._rows.setdefault(namespace, {})[at] = row

    put(stack, StoredSums, "_put", put_row)


def an_incomplete_sum_is_believed(stack: Stack) -> None:
    """M98v: a leader that has just begun, and has heard few brokers, lets producers go on above the limit."""
    honest = StoredHere.on_answered

    def on_answered(self: StoredHere, report: StoredReport, answer: Mapping[str, PlaceBytes], now: float) -> None:
        honest(self, report, {place: each._replace(complete=True) for place, each in answer.items()}, now)

    put(stack, StoredHere, "on_answered", on_answered)


def topics_that_leave_memory_store_nothing(stack: Stack) -> None:
    """M98w: a topic that was unloaded because it was idle does not count any more, though its bytes are stored."""
    honest = stored_core._Bundle.measure

    def measure(self: stored_core._Bundle) -> int:
        size = honest(self) - sum(self.idle.values())
        self.idle.clear()
        return size

    put(stack, stored_core._Bundle, "measure", measure)


def ledgers_of_one_age_end_together(stack: Stack) -> None:
    """M99p: ledgers that began at one moment all end at the age of the setting, at one moment."""
    put(stack, log_shape_core, "LEDGER_AGE_JITTER", 0.0)
