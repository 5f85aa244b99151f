"""A subscription: the driver of one dispatcher and one cursor. pump.py decides what it delivers, and when.

Moving it (`seek`, for a consumer or for an operator) has an order and a guarantee: nothing from the new position is
delivered to any consumer before the caller of `seek` was resumed, so its answer is on the stream first.
    SEEK    disconnect   the other consumers: their outstanding entries have no meaning any more
            move         cursor and dispatcher, in one step
            store        durably; nothing is delivered meanwhile, to consumers that join in between neither
            answer       the caller goes on, and only the next turn of the loop delivers
Seeks run one after the other, in the order of the requests (`seek_lock`), each from finding its position on. A seek
that is cancelled, or whose store fails, leaves the cursor at the new position in memory: entries are delivered from
there, and the position is stored with the next write. When that fails for good, the topic is lost and every consumer is
notified; then the next owner begins at the old position. To the caller the outcome is unknown; no message is lost in
either case.

A durable subscription stores its acknowledgements (acks.py) with its cursor (cursors.py). The acknowledgements of a
reader last as long as its consumers, and keep no data in the topic.

The connected consumers determine the type: the first one brings it (and, for Key_Shared, mode and order), others have
to agree, and it ends with the last one (Pulsar S13). A consumer of a Failover subscription is notified who is active
when it joins and whenever that changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

from ...proto.applied import AppliedPolicies
from ...proto.errors import MagnetarError, TransactionConflict, Unavailable
from ...proto.filters import Filter
from ...proto.names import Position, make_redriven_to
from ...proto.states import AckedEntry, Isolation, TxnId
from ...runtime.clock import Clock
from ...runtime.tasks import run_all_steps
from ..common.config import BrokerConfig
from ..common.refusals import AckRefusal, SubscribeRefusal
from ..log.key_indexes import KeyIndexes
from ..log.log import ReadableLog
from ..log.reader import ReadMemoryBudget
from .acks import TransactionalAcks
from .consumer import ActivityTimes, Consumer
from .core.cursor import Cursor
from .core.cursor_state import TxnAcks
from .core.dispatch import Dispatcher, DispatchLimits
from .core.pending_acks import SettledAcks, entries_of_aborted_acks, find_first_redelivered_entry
from .core.policy import CAUGHT_UP_REASONS, Member, SubscriptionOptions, parse_key_limits
from .core.subscription_types import EXCLUSIVE_ROW, SubscriptionTypeRow
from .cursors import DurableCursor
from .dead_letters import HeldBackEntries
from .delays import DelayedDelivery
from .expiry import MessageExpirer
from .filtering import SubscriptionFilter
from .pump import SubscriptionDeliveryPump

_LOG = logging.getLogger("magnetar.broker.session")

INDEX_READING_CLIENTS_MAX = 16
"""Most names and versions of clients that a subscription remembers as acknowledging by index."""
SEEK_STEPS = ("disconnect", "move", "store", "answer")


class DeliveryCounts(NamedTuple):
    """How much was delivered to consumers: the messages, their bytes (`size`), and how many of the messages were
    redelivered."""

    messages: int
    size: int
    redelivered: int

    def add_counts_of_member(self, member: Member) -> DeliveryCounts:
        """Returns the sum of these counts and those of the consumer."""
        return DeliveryCounts(
            self.messages + member.delivered_messages, self.size + member.delivered_bytes,
            self.redelivered + member.redelivered_messages,
        )  # fmt: skip


NO_DELIVERY_COUNTS = DeliveryCounts(0, 0, 0)


class Subscription:
    """A subscription at the broker that owns its topic: its cursor, its connected consumers, and the operations on
    it."""

    __slots__ = (
        "__dict__", "_clock", "_config", "_marked", "aborts", "acks", "activity", "commits", "consumers", "cursor",
        "dead_letters", "delayed", "departed", "dispatcher", "dropped", "expired", "filter_asked", "filtering",
        "index_clients", "isolation", "log", "name", "pump", "store", "type",
    )  # fmt: skip

    def __init__(
        self, name: str, log: ReadableLog, cursor: Cursor, store: DurableCursor | None, clock: Clock,
        config: BrokerConfig, applied: AppliedPolicies, delayed: DelayedDelivery | None = None, *, tracks: bool = True,
        memory: ReadMemoryBudget | None = None,
    ) -> None:  # fmt: skip
        self.dispatcher = Dispatcher(
            log.shape, cursor, EXCLUSIVE_ROW.policy(SubscriptionOptions()), tracks=tracks,
            memory_bytes_max=config.cursor_memory_bytes,
            limits=_limits(applied), delays=delayed.core if delayed is not None else None,
        )  # fmt: skip
        self.name = name
        self.log: ReadableLog = log
        self.cursor = cursor
        self.store = store
        self.delayed = delayed
        self.filtering: SubscriptionFilter | None = None
        self.filter_asked = ""  # of one that does not last: what its consumers filter by themselves
        self.dead_letters: HeldBackEntries | None = None  # of durable ones
        self.consumers: dict[int, Consumer] = {}
        self._clock = clock
        self._config = config
        self.commits = self.aborts = 0  # transactions with acknowledgements that ended since it was loaded
        self.type: SubscriptionTypeRow | None = None
        self.departed = NO_DELIVERY_COUNTS  # what consumers got that are connected no more
        self.dropped = 0  # messages that no consumer got, of a non-persistent topic
        self.index_clients: frozenset[str] = frozenset()  # clients that acknowledged parts of batches
        self.activity = ActivityTimes()
        self._marked = cursor.mark
        self.isolation = Isolation.READ_COMMITTED  # of its consumers, while one is connected
        self.acks = TransactionalAcks(log.shape, cursor, self.dispatcher)
        self.expired = MessageExpirer(self)
        self.pump = SubscriptionDeliveryPump(self, clock, config, memory)
        if delayed is not None:
            delayed.start(self.pump.wake)

    @property
    def deliveries(self) -> DeliveryCounts:
        """How much was delivered to the consumers of the subscription since it was loaded, including consumers that
        have left."""
        found = self.departed
        for each in self.consumers.values():
            found = found.add_counts_of_member(each.member)
        return found

    @property
    def is_durable(self) -> bool:
        """True if the cursor of the subscription is stored, so that it outlives the broker."""
        return self.store is not None

    @property
    def acknowledges_by_index(self) -> bool:
        """True if every connected consumer acknowledges the messages of a batch one by one, so that some of them may be
        hidden from it. True also without consumers."""
        return all(each.member.acks_by_index for each in self.consumers.values())

    def apply(self, applied: AppliedPolicies) -> None:
        """Applies changed policies of the topic to this subscription."""
        if self.delayed is not None:
            self.delayed.applied = applied
        if self.dead_letters is not None:
            self.dead_letters.applied = applied
        if self.dispatcher.limits != _limits(applied):
            self.dispatcher.set_unacked_limits(_limits(applied))
            self.pump.wake()

    @property
    def properties(self) -> Mapping[str, str]:
        """The stored properties; empty if the subscription is not durable."""
        return self.store.properties if self.store is not None else {}

    def apply_properties(self) -> None:
        """Applies changed properties of this subscription. If the connected consumers cannot go on with the new limits
        of keys, they are disconnected; the first one that connects again brings the new policy."""
        limits = parse_key_limits(self.properties)
        if self.type is not None and not self.type.adapt_policy(self.dispatcher.policy, limits):
            self.disconnect_all(Unavailable(f"whether keys take turns on {self.name!r} has changed; subscribe again"))
        self.pump.wake()

    # ------------------------------------------------------------------ what it reads
    @property
    def reads_compacted(self) -> bool:
        """True if the consumers read the compacted form of the topic, with only the last message of each key
        (broker/log/compaction.py)."""
        return self.log.is_compacted

    @property
    def reads_uncommitted(self) -> bool:
        """True if the isolation level is read-uncommitted: the consumers get all stored entries, including those of
        open and aborted transactions."""
        return self.isolation is Isolation.READ_UNCOMMITTED

    def restart_with_log(self, log: ReadableLog) -> None:
        """Replaces the log from which entries are delivered. Delivery starts again after the cursor's mark. No consumer
        may be connected. Acknowledges the entries that compaction has removed; the filter judges all entries again."""
        self.log = log
        self.pump.restart_with_log(log)
        self.cursor.rebase(log.shape)
        self.acks.rebase(log.shape)
        self._leave_out()
        self._filter_anew()
        self.dispatcher.rebase(log.shape)
        if self.delayed is not None:
            self.delayed.core.shape = log.shape

    def switch_log(self, log: ReadableLog) -> None:
        """Replaces the log from which entries are delivered, without the consumers noticing. Up to the last entry that
        consumers may get, both logs must have the same entries. Then moves the mark past hidden entries and runs the
        delivery, as `on_transaction_outcomes_known` does."""
        self.log = log
        self.pump.switch_log(log)
        self.cursor.rebase(log.shape)
        self.acks.rebase(log.shape)
        self.dispatcher.switch_log_shape(log.shape)
        if self.delayed is not None:
            self.delayed.core.shape = log.shape
        self.on_transaction_outcomes_known()

    def on_transaction_outcomes_known(self) -> None:
        """Called when transactions of the topic have ended, so that their entries became visible to consumers, or are
        hidden for ever. Moves the cursor's mark past hidden entries, and runs the delivery."""
        if self.cursor.advance_mark() and self.store is not None:
            self.store.schedule_write()
        if self.consumers:
            self.pump.wake()

    def _leave_out(self) -> None:
        """Acknowledges the entries that compaction has removed, if the subscription reads the compacted form."""
        for ledger_id, removed in self.log.removed_entries():
            if ledger_id >= self.cursor.mark[0]:
                self.cursor.ack_entries_of_ledger(ledger_id, removed)
        if self.reads_compacted and self.store is not None:
            self.store.schedule_write()

    def set_isolation_level(self, isolation: Isolation) -> None:
        """Sets the isolation level, for a consumer that is about to join. Raises ConsumerBusy if the connected
        consumers have another level."""
        if self.consumers and self.isolation is not isolation:
            raise SubscribeRefusal.OTHER_ISOLATION.error(
                f"the consumers of subscription {self.name!r} are {self.isolation.name.lower()}"
            )
        self.isolation = isolation

    @property
    def filter_text(self) -> str:
        """The text of the filter by which this broker filters for the subscription; empty: it does not filter."""
        return self.filtering.filter.text if self.filtering is not None else ""

    def set_filter(self, wanted: Filter | None, indexes: KeyIndexes | None = None) -> None:
        """Sets the filter of the subscription; None removes it. No consumer may be connected. The filter applies to
        entries that are not acknowledged; acknowledgements of an earlier filter remain. `indexes`: the key indexes of
        the topic's ledgers."""
        assert not self.consumers, "consumers would get messages by two filters"
        if self.filtering is not None:
            self.filtering.stop()
        self.filtering = None
        if wanted is not None:
            self.filtering = SubscriptionFilter(
                wanted, self.dispatcher, self.acks, self._clock, wake=self.pump.wake, on_acked=self._on_mark_moved,
                redriven_to=make_redriven_to(self.log.topic, self.name), indexes=indexes,
            )  # fmt: skip
            self._filter_anew()

    def check_filter(self, asked: str) -> None:
        """Checks the filter `asked` (its text) that a consumer asks for, before it joins. On a durable subscription an
        empty text means the filter of the subscription. A subscription that is not durable has no filter: it only
        stores the text of its first consumer, the others must ask for the same one, and its consumers filter by
        themselves. Raises ConsumerBusy if the subscription has another filter, or none."""
        own = self.filter_text
        if self.store is None:
            if not self.consumers:
                self.filter_asked = asked
            own = self.filter_asked
        if asked != own and (asked or self.store is None):
            none = "it has no filter: 'magnetar subscriptions filter set' sets one"
            raise self._refusal(SubscribeRefusal.OTHER_FILTER, f"it has the filter {own!r}" if own else none)

    def _filter_anew(self) -> None:
        """Has entries judged again that the filter judged, because the subscription was moved or reads another log."""
        if self.filtering is not None:
            self.filtering.restart_judging(compacted=self.reads_compacted)

    def has_undelivered_up_to(self, horizon: Position) -> bool:
        """Returns True if an entry up to and including `horizon` may still have to be delivered: it was not delivered
        yet, or it is not acknowledged."""
        return self.dispatcher.read_position <= horizon or (self.dispatcher.tracks and self.cursor.mark < horizon)

    # ------------------------------------------------------------------ consumers
    def join(self, consumer: Consumer, type_: SubscriptionTypeRow) -> None:
        """Adds the consumer to the subscription. An earlier connection of the same consumer object is disconnected.
        Raises ConsumerBusy if the connected consumers have another type, or if the policy refuses the consumer.

        If other consumers are giving entries back, this call first finishes that at once. If many entries may be given
        back, the caller awaits `wait_entries_returned` before, which lets other tasks run.
        """
        for other in list(self.consumers.values()):
            if consumer.instance and other.instance == consumer.instance:
                self.disconnect(other, Unavailable("the same consumer has connected again"))
        self.pump.return_queue.return_all_entries()
        self._admit(consumer.member, type_)
        self.consumers[consumer.member.id] = consumer
        self.dispatcher.join(consumer.member)
        self.pump.on_consumer_joined()

    def _admit(self, newcomer: Member, type_: SubscriptionTypeRow) -> None:
        """Sets the subscription type if this is the first consumer. Raises ConsumerBusy if the consumer may not
        join."""
        if not self.consumers:
            topic = self.log.topic
            options = SubscriptionOptions(
                topic.full, topic.partition, newcomer.options, self._config, parse_key_limits(self.properties)
            )
            self.dispatcher.set_policy(type_.make_policy(options), ordered=newcomer.ordered)
            self.type = type_
        policy = self.dispatcher.policy
        if type_ is not self.type:
            raise self._refusal(
                SubscribeRefusal.OTHER_TYPE,
                f"it is {self._type_title} while its consumers are connected, and cannot be {type_.title}"
            )
        if newcomer.ordered is not self.dispatcher.ordered:
            raise self._refusal(SubscribeRefusal.OTHER_MODE, "its consumers differ on redelivery_order")
        if (why := policy.why_incompatible(newcomer)) is not None:
            raise self._refusal(SubscribeRefusal.OTHER_MODE, why)
        if (why := policy.why_refused(newcomer)) is not None:
            raise self._refusal(SubscribeRefusal.POLICY, why)

    @property
    def _type_title(self) -> str:
        return self.type.title if self.type is not None else "of no type"

    def _refusal(self, refusal: SubscribeRefusal, why: str) -> MagnetarError:
        return refusal.error(f"subscription {self.name!r}: {why}", subscription=self.name, refusal=refusal.name)

    def leave(self, consumer: Consumer, *, lost: bool = False) -> None:
        """Removes the consumer; its outstanding entries are delivered to the other consumers. Does not call its outlet.
        Idempotent. `lost`: the connection was lost; otherwise the consumer was closed."""
        if consumer.member.id not in self.consumers:
            return
        why = "it is gone, or the broker closes it" if lost else "its client has closed it"
        _LOG.debug("%s/%s: consumer %r is closed: %s", self.log.topic, self.name, consumer.member.name, why)
        del self.consumers[consumer.member.id]
        self.pump.end_probes(consumer.member)
        self.departed = self.departed.add_counts_of_member(consumer.member)
        if consumer.waiting is not None:
            consumer.waiting.cancel()
        letters = self.dead_letters
        member, counted = consumer.member, lost and letters is not None and letters.must_count_disconnect_as_redelivery
        member.paused = True
        if self.consumers or counted or self.pump.return_queue:
            self.pump.return_queue.add_returned_entries(member, list(member.outstanding), counted=counted, leaves=True)
        else:
            self.dispatcher.remove_all_consumers()  # the next one that joins begins anew
        if not self.consumers:
            self.type = None
            self.pump.clear_buffer()
        self.pump.wake()

    async def wait_entries_returned(self, consumer: Consumer) -> None:
        """Gives back the entries that are outstanding at an earlier connection of `consumer` (the same instance), and
        waits until all entries that consumers are giving back were given back. Called before `join`."""
        for other in self.consumers.values():
            if consumer.instance and other.instance == consumer.instance:
                self.pump.return_queue.add_returned_entries(other.member, list(other.member.outstanding), counted=False)
        await self.pump.return_queue.finish()

    def disconnect(self, consumer: Consumer, error: MagnetarError) -> None:
        """Removes the consumer from the subscription, and closes it with `error`."""
        self.leave(consumer)
        consumer.outlet.on_closed(error)

    def disconnect_all(self, error: MagnetarError) -> None:
        """Disconnects all consumers. Each client gets `error` as the reason."""
        for consumer in list(self.consumers.values()):
            self.disconnect(consumer, error)

    def stop_delivery_for_move(self, error: MagnetarError) -> list[asyncio.Future[None]]:
        """Stops the delivery, because the topic moves to another broker: consumers could not acknowledge further
        messages in time. Sends `error` to the consumers. Returns futures that complete when the last acknowledgements
        of the consumers have arrived; none for consumers whose protocol does not say so."""
        self.pump.is_moving = True
        told = [consumer.outlet.on_topic_moving(error) for consumer in self.consumers.values()]
        return [last for last in told if last is not None]

    def grant_permits(self, consumer: Consumer, permits: int) -> None:
        """Permits the broker to deliver `permits` more messages to the consumer."""
        self.dispatcher.grant_permits(consumer.member, permits)
        self.pump.wake()

    # ------------------------------------------------------------------ acknowledging
    def ack(self, consumer: Consumer | None, entries: Sequence[AckedEntry]) -> None:
        """Acknowledges each of the entries as a whole, or only those of its messages that are named. Ignores entries
        that were trimmed. Raises InvalidRequest if an entry is after the last entry of the log, or has no such message;
        TransactionConflict if an entry is pending in a transaction (all other entries are acknowledged nevertheless).
        After InvalidRequest only the entries before the refused one are acknowledged. `consumer`: who acknowledges;
        None: an operator or the broker."""
        try:
            self.acks.ack(consumer.member if consumer is not None else None, entries)
        finally:
            self._acked(consumer)

    def ack_entries_of_ledger(self, consumer: Consumer | None, ledger_id: int, entries: bytes) -> None:
        """Acknowledges many whole entries of one ledger. `entries`: a serialized roaring bitmap of entry ids. Raises
        InvalidRequest if the bitmap cannot be parsed, or contains an entry after the last one; TransactionConflict if
        an entry is pending in a transaction (all other entries are acknowledged nevertheless). `consumer`: who
        acknowledges; None: an operator or the broker."""
        before = self.cursor.version
        try:
            self.acks.ack_entries_of_ledger(consumer.member if consumer is not None else None, ledger_id, entries)
        finally:
            if self.cursor.version != before:
                self._acked(consumer)

    def ack_cumulative(self, consumer: Consumer | None, acked: AckedEntry) -> None:
        """Acknowledges all messages up to and including the entry that `acked` names. Does nothing if that entry was
        trimmed. Raises NotAllowed if several consumers may share the subscription; TransactionConflict if one of these
        messages is pending in a transaction; InvalidRequest if the entry is after the last entry of the log, or has no
        such message. If it raises, nothing is acknowledged. `consumer`: who acknowledges; None: an operator or the
        broker."""
        self.check_cumulative_ack(consumer, acked)
        self.acks.ack_cumulative(consumer.member if consumer is not None else None, acked)
        self._acked(consumer)

    def check_cumulative_ack(self, consumer: Consumer | None, acked: AckedEntry) -> bool:
        """Returns False if `ack_cumulative` acknowledges nothing, because the entry was trimmed; else True. Raises what
        `ack_cumulative` raises for the same arguments. Changes nothing."""
        if consumer is not None and self.dispatcher.policy.individual:
            raise AckRefusal.CUMULATIVE.error(
                f"cumulative acknowledgement is not possible on the {self._type_title} subscription {self.name!r}"
            )
        return self.acks.check_cumulative_ack(acked)

    def set_commit_note(self, note: bytes) -> None:
        """Replaces the note of the last commit: the bytes that the committing program gives with its position. The note
        is stored with the next write of the cursor."""
        self.cursor.set_commit_note(note)
        if self.store is not None:
            self.store.schedule_write()

    def skip_up_to(self, mark: Position, messages: int = 0) -> None:
        """Acknowledges all messages up to and including `mark`, and the first `messages` messages of the entry after
        it, because they have expired, exceed the backlog quota, or are skipped by an operator. Messages that are
        acknowledged in an open transaction stay pending. They are stored with the next write of the cursor."""
        if mark.entry_id >= 0:
            self.acks.skip_up_to(mark)
        if messages:
            self.acks.ack_first_messages(self.log.shape.position_after(mark), messages)
        self._on_mark_moved()

    def skip_entries(self, positions: Sequence[Position], *, parts: bool = False) -> None:
        """Acknowledges entries that no consumer can receive, such as lost or malformed ones. Entries that are
        acknowledged in an open transaction stay pending. `parts`: True if the caller has just acknowledged messages of
        other entries, so that the cursor must be stored."""
        if positions or parts:
            with suppress(TransactionConflict):  # those that are pending are acknowledged by their transaction
                self.acks.ack(None, [AckedEntry(position) for position in positions])
            self._on_mark_moved()
            self.pump.wake()

    # ------------------------------------------------------------------ acknowledging in transactions
    @property
    def pending_transactions(self) -> Sequence[TxnId]:
        """The transactions that have acknowledged messages of this subscription and whose outcomes were not applied
        yet."""
        return tuple(self.cursor.pending.of) if self.cursor.pending is not None else ()

    def has_pending_acks(self, txn: TxnId) -> bool:
        """Returns True if the transaction has acknowledged messages of this subscription, and its outcome was not
        applied yet."""
        return self.cursor.pending is not None and txn in self.cursor.pending.of

    def conflicting_transactions(self, position: Position) -> Sequence[TxnId]:
        """Returns the transactions that have acknowledged the entry and whose outcomes were not applied yet. Another
        acknowledgement of the entry may be refused because of them."""
        return self.cursor.pending.find_transactions(position) if self.cursor.pending is not None else ()

    def ack_in_transaction(
        self, consumer: Consumer, txn: TxnId, wanted: TxnAcks, cumulative: AckedEntry | None = None, *,
        rest: bool = False,
    ) -> None:  # fmt: skip
        """Makes the acknowledgements `wanted` and `cumulative` (None: there is none) pending in the transaction, in one
        step: the messages are acknowledged if the transaction commits. A repeated call changes nothing. The topic must
        have joined the transaction, in the same turn of the event loop. `rest`: see
        `TransactionalAcks.add_pending_acks`.

        Raises NotAllowed if the subscription is not durable, or if `cumulative` is given and several consumers may
        share the subscription; TransactionConflict, InvalidRequest or BackPressure as
        `TransactionalAcks.add_pending_acks` does. If it raises, nothing has changed.
        """
        self.check_supports_transactions()
        if cumulative is not None and self.dispatcher.policy.individual:
            self.check_cumulative_ack(consumer, cumulative)
        if self.acks.add_pending_acks(
            consumer.member, txn, wanted, cumulative, self._config.cursor_memory_bytes, rest=rest
        ):
            self._on_mark_moved()

    def check_supports_transactions(self) -> None:
        """Raises NotAllowed if the subscription is not durable. A transaction needs stored acknowledgements."""
        if self.store is None:
            raise AckRefusal.NOT_KEPT.error(f"subscription {self.name!r}: {AckRefusal.NOT_KEPT.value}")

    def settle(self, txn: TxnId, committed: bool) -> None:
        """Applies the outcome of a transaction. If it committed, its acknowledgements count; otherwise its messages are
        delivered again. Idempotent. The result is durable when a later `wait_durable` returns."""
        settled = self.acks.settle(txn, committed=committed)
        if settled is None:
            return
        self.commits += committed
        self.aborts += not committed
        if not committed:
            self._come_again(settled)
        else:
            self._show_rest_whole(settled)
        if self.store is not None:
            self.store.schedule_write()
        self.pump.wake()

    def _come_again(self, settled: SettledAcks) -> None:
        """Delivers the entries again whose acknowledgements were aborted with their transaction."""
        if self.reads_compacted:
            self._leave_out()  # what was compacted while it was pending
        cursor, ordered = self.cursor, not self.dispatcher.policy.individual
        first = find_first_redelivered_entry(cursor, settled.acks)
        if ordered and first is not None:
            self.dispatcher.move_read_position_back(first)
            self.pump.clear_buffer()
        for position in settled.shown:
            self.dispatcher.on_batch_acks_aborted(position, settled.acks.parts[position].size)
        self.pump.return_queue.add_batches_of_aborted_acks(sorted(settled.shown))
        self.pump.return_queue.add_entries_of_aborted_acks(entries_of_aborted_acks(cursor, settled, tail=ordered))

    def _show_rest_whole(self, settled: SettledAcks) -> None:
        """Takes the batches back of which a committed transaction has acknowledged a part, from consumers that
        acknowledge whole entries alone: they would keep the rest for ever. They get these batches again, whole."""
        for position in settled.acks.parts:
            holder = self.dispatcher.find_consumer_of_entry(position)
            if holder is not None and not holder.acks_by_index and position in holder.unshown:
                self.pump.return_queue.add_returned_entries(holder, (position,), counted=False)

    def mark_acks_by_batch_index(self, consumer: Consumer) -> None:
        """Called when a consumer acknowledges a part of a batch for the first time. From now on the acknowledged
        messages of a batch are hidden from it, and from later consumers of the same client (its name and version); at
        most INDEX_READING_CLIENTS_MAX clients are remembered."""
        consumer.member.acks_by_index = True
        if len(self.index_clients) < INDEX_READING_CLIENTS_MAX:
            self.index_clients |= {consumer.client}

    def _acked(self, consumer: Consumer | None) -> None:
        now_ms = self.activity.acked_ms = self._clock.wall_ms()
        if consumer is not None:
            consumer.activity.acked_ms = now_ms
        self._on_mark_moved()

    def _on_mark_moved(self) -> None:
        if self._marked != self.cursor.mark:
            self._marked, self.activity.marked_ms = self.cursor.mark, self._clock.wall_ms()
        if self.store is not None:
            self.store.schedule_write()
        blocked = self.pump.blocked
        if blocked is not None and (blocked not in CAUGHT_UP_REASONS or self.dispatcher.redelivery_entry_count):
            self.pump.wake()  # a consumer may take more, a key is free, or a batch has messages that an abort freed

    def redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, *, counted: bool = True
    ) -> None:
        """Requeues outstanding entries of the consumer, to deliver them again. `positions`: which entries; None: all
        entries that are outstanding at this consumer. Ignores entries that are not outstanding at this consumer.
        `counted`: adds 1 to the redelivery count of each entry. After a call with None the consumer may acknowledge
        cumulatively in transactions again (`Member.must_restart`)."""
        if positions is None:
            consumer.member.must_restart = False
        wanted = list(consumer.member.outstanding) if positions is None else dict.fromkeys(positions)
        self.pump.return_queue.add_returned_entries(consumer.member, wanted, counted=counted)
        if self.store is not None:
            self.store.schedule_write()
        self.pump.wake()

    def call_when_durable(self, tell: Callable[[MagnetarError | None], None]) -> None:
        """Calls the function `tell` once, possibly before this method returns. `tell` gets None when everything that
        was acknowledged before this call is durable, or at once if the subscription is not durable; an error if that is
        not known, as `DurableCursor.call_when_durable` passes it. `tell` must not raise."""
        if self.store is not None:
            self.store.call_when_durable(tell)
        else:
            tell(None)

    async def wait_durable(self) -> None:
        """Waits until everything that was acknowledged in this subscription before the call is durable. Raises
        TopicFenced, or the error of a write that failed for good, if that is not known. Returns at once if the
        subscription is not durable."""
        if self.store is not None:
            await self.store.make_acks_durable_future()

    @cached_property
    def seek_lock(self) -> asyncio.Lock:
        """The lock for seeks. The caller of `seek` must hold it from the time at which it searches for the new position
        until that position is durable."""
        return asyncio.Lock()

    async def seek(self, mark: Position, acked_messages: int = 0, *, keep: Consumer | None = None) -> None:
        """Moves the subscription: it continues after `mark`, and after the first `acked_messages` messages of the next
        entry. The new position is durable when this method returns. Raises the errors of `wait_durable`; then it is
        unknown which position is stored.

        The caller must hold `seek_lock`. Disconnects all consumers except `keep` (None: all of them): their outstanding
        entries are not valid any more.
        """
        assert self.seek_lock.locked(), "one after the other"
        why = Unavailable(f"the subscription {self.name!r} was moved; subscribe again", moved=True)
        for consumer in list(self.consumers.values()):
            if consumer is not keep:
                self.disconnect(consumer, why)
        self.cursor.seek(mark)
        self._leave_out()
        self._filter_anew()
        if acked_messages:
            self.cursor.ack_first_messages(self.log.shape.position_after(mark), acked_messages)
        self.dispatcher.restart_delivery_after_mark()
        self.pump.return_queue.clear()
        self.pump.clear_buffer()
        self.pump.is_moving = True
        try:
            await self.wait_durable()
        finally:
            self.pump.is_moving = False
            self.pump.wake()  # in the next turn: the caller goes on first

    # ------------------------------------------------------------------ ending
    def stop(self) -> None:
        """Stops the delivery and all tasks of the subscription; stores nothing. The consumers must have been notified
        before this call."""
        if self.dead_letters is not None:
            self.dead_letters.stop()
        if self.delayed is not None:
            self.delayed.stop()
        if self.filtering is not None:
            self.filtering.stop()
        self.pump.stop()

    async def close(self) -> None:
        """Stops the delivery as `stop` does, and stores the delayed entries and the cursor. Takes at most some times
        `close_timeout_s` seconds; what is not stored by then is delivered again by the next owner of the topic. Each
        part is closed whatever error another one raises: the cursor is stored. Raises the errors of
        `DurableCursor.close`."""
        await run_all_steps(
            *([self.delayed.close] if self.delayed is not None else []),
            self.stop,
            self.pump.wait_stopped,
            *[part.wait_stopped for part in (self.filtering, self.dead_letters) if part is not None],
            *([self.store.close] if self.store is not None else []),
        )


def _limits(applied: AppliedPolicies) -> DispatchLimits:
    return DispatchLimits(applied.max_unacked_per_consumer, applied.max_unacked_per_subscription)


