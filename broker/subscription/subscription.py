"""A subscription: the driver of one dispatcher and one cursor. What it hands out, and when: pump.py.

Moving it (`seek`, for a consumer or for an operator) has an order and a guarantee: nothing from the new position is
handed out to any consumer before the caller of `seek` was resumed, so its answer is on the stream first.
    SEEK    disconnect   the other consumers: their outstanding entries have no meaning any more
            move         cursor and dispatcher, in one step
            store        durably; nothing is handed out meanwhile, to consumers that join in between neither
            answer       the caller goes on, and only the next turn of the loop hands out
Seeks run one after the other, in the order of the requests (`moving`), each from finding its position on. A seek that
is cancelled, or whose store fails, leaves the cursor at the new position in memory: entries are handed out from there,
and the position is stored with the next write. When that fails for good, the topic is lost and every consumer is
notified; then the next owner begins at the old position. To the caller the outcome is unknown; no message is lost in
either case.

A durable subscription stores its acknowledgements (acks.py) with its cursor (cursors.py); a reader's live as long as
its consumers and keep no data.

The connected consumers determine the type: the first one brings it (and, for Key_Shared, mode and order), others have
to agree, and it ends with the last one (Pulsar S13). A consumer of a Failover subscription is notified who is active
when it joins and whenever that changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property

from ...proto.applied import Applied
from ...proto.errors import MagnetarError, TransactionConflict, Unavailable
from ...proto.names import Position
from ...proto.states import AckedEntry, Isolation, TxnId
from ...runtime.clock import Clock
from ..common.config import BrokerConfig
from ..common.refusals import AckRefusal, SubscribeRefusal
from ..log.log import ReadableLog
from ..log.reader import ReadMemory
from .acks import AcksInTxn
from .consumer import Activity, Consumer
from .core.cursor import Cursor
from .core.cursor_state import TxnAcks
from .core.dispatch import Dispatcher, DispatchLimits
from .core.pending_acks import SettledAcks, first_of, freed_entries
from .core.policy import AT_THE_END, Member, SubscriptionOptions
from .core.subscription_types import EXCLUSIVE, SubscriptionType
from .cursors import DurableCursor
from .dead_letters import DeadLetters
from .delays import DelayedDelivery
from .pump import Pump

SEEK = ("disconnect", "move", "store", "answer")


class Subscription:
    """A subscription of a topic on its owner: its consumers, its cursor, and what they ask for."""

    __slots__ = (
        "__dict__", "_clock", "_config", "_marked", "aborts", "acks", "activity", "commits", "consumers", "cursor",
        "dead_letters", "delayed", "dispatcher", "dropped", "isolation", "log", "name", "pump", "store", "type",
    )  # fmt: skip

    def __init__(
        self, name: str, log: ReadableLog, cursor: Cursor, store: DurableCursor | None, clock: Clock,
        config: BrokerConfig, applied: Applied, delayed: DelayedDelivery | None = None, *, tracks: bool = True,
        memory: ReadMemory | None = None,
    ) -> None:  # fmt: skip
        self.dispatcher = Dispatcher(
            log.shape, cursor, EXCLUSIVE.policy(SubscriptionOptions()), tracks=tracks,
            memory_bytes_max=config.cursor_memory_bytes,
            limits=_limits(applied), delays=delayed.core if delayed is not None else None,
        )  # fmt: skip
        self.name = name
        self.log: ReadableLog = log
        self.cursor = cursor
        self.store = store
        self.delayed = delayed
        self.dead_letters: DeadLetters | None = None  # of durable ones
        self.consumers: dict[int, Consumer] = {}
        self._clock = clock
        self._config = config
        self.commits = self.aborts = 0  # transactions with acknowledgements that ended since it was loaded
        self.type: SubscriptionType | None = None
        self.dropped = 0  # messages that no consumer got, of a non-persistent topic
        self.activity = Activity()
        self._marked = cursor.mark
        self.isolation = Isolation.READ_COMMITTED  # of its consumers, while one is connected
        self.acks = AcksInTxn(log.shape, cursor, self.dispatcher)
        self.pump = Pump(self, clock, config, memory)
        if delayed is not None:
            delayed.start(self.pump.wake)

    @property
    def durable(self) -> bool:
        return self.store is not None

    def apply(self, applied: Applied) -> None:
        """Takes over changed policies of the topic."""
        if self.delayed is not None:
            self.delayed.applied = applied
        if self.dead_letters is not None:
            self.dead_letters.applied = applied
        if self.dispatcher.limits != _limits(applied):
            self.dispatcher.limit(_limits(applied))
            self.pump.wake()

    # ------------------------------------------------------------------ what it reads
    @property
    def compacted(self) -> bool:
        """Whether it reads the compacted form of the topic (broker/log/compacted_view.py)."""
        return self.log.is_compacted

    @property
    def uncommitted(self) -> bool:
        """Whether it is shown all that is stored, also of open and aborted transactions."""
        return self.isolation is Isolation.READ_UNCOMMITTED

    def read_from(self, log: ReadableLog) -> None:
        """Reads `log` from the mark on; only while no consumer is connected."""
        self.log = log
        self.pump.read_from(log)
        self.cursor.rebase(log.shape)
        self.acks.rebase(log.shape)
        self._leave_out()
        self.dispatcher.rebase(log.shape)
        if self.delayed is not None:
            self.delayed.core.shape = log.shape

    def switch_log(self, log: ReadableLog) -> None:
        """Goes on in `log`, which has the same entries up to where this one shows any; consumers notice nothing."""
        self.log = log
        self.pump.switch_log(log)
        self.cursor.rebase(log.shape)
        self.acks.rebase(log.shape)
        self.dispatcher.extend_to(log.shape)
        if self.delayed is not None:
            self.delayed.core.shape = log.shape
        self.on_decided()

    def on_decided(self) -> None:
        """Applies new outcomes: more is shown, or something will never be."""
        if self.cursor.advance() and self.store is not None:
            self.store.touched()
        if self.consumers:
            self.pump.wake()

    def _leave_out(self) -> None:
        for ledger_id, removed in self.log.left_out():
            if ledger_id >= self.cursor.mark[0]:
                self.cursor.ack_set(ledger_id, removed)
        if self.compacted and self.store is not None:
            self.store.touched()

    def isolate(self, isolation: Isolation) -> None:
        """Sets what a consumer that is about to join sees. ConsumerBusy: others see otherwise."""
        if self.consumers and self.isolation is not isolation:
            raise SubscribeRefusal.OTHER_ISOLATION.error(
                f"the consumers of subscription {self.name!r} are {self.isolation.name.lower()}"
            )
        self.isolation = isolation

    def needs(self, horizon: Position) -> bool:
        """Whether something before `horizon` is not delivered, or is not acknowledged and may be delivered again."""
        return self.dispatcher.read_position <= horizon or (self.dispatcher.tracks and self.cursor.mark < horizon)

    # ------------------------------------------------------------------ consumers
    def join(self, consumer: Consumer, type_: SubscriptionType) -> None:
        """Adds the consumer. ConsumerBusy: another type, or the policy refuses.

        What others give back is finished first: await `expect` before, so that it is done in slices.
        """
        for other in list(self.consumers.values()):
            if consumer.instance and other.instance == consumer.instance:
                self.disconnect(other, Unavailable("the same consumer has connected again"))
        self.pump.returns.all()
        self._admit(consumer.member, type_)
        self.consumers[consumer.member.id] = consumer
        self.dispatcher.join(consumer.member)
        self.pump.on_consumer_joined()

    def _admit(self, newcomer: Member, type_: SubscriptionType) -> None:
        """Sets the type, if it is the first consumer. ConsumerBusy: it may not join."""
        if not self.consumers:
            topic = self.log.topic
            options = SubscriptionOptions(topic.full, topic.partition, newcomer.options, self._config)
            self.dispatcher.use(type_.policy(options), ordered=newcomer.ordered)
            self.type = type_
        policy = self.dispatcher.policy
        if type_ is not self.type:
            raise self._refusal(
                SubscribeRefusal.OTHER_TYPE,
                f"it is {self._type_title} while its consumers are connected, and cannot be {type_.title}"
            )
        if newcomer.ordered is not self.dispatcher.ordered:
            raise self._refusal(SubscribeRefusal.OTHER_MODE, "its consumers differ on redelivery_order")
        if (why := policy.differs(newcomer)) is not None:
            raise self._refusal(SubscribeRefusal.OTHER_MODE, why)
        if (why := policy.why_refused(newcomer)) is not None:
            raise self._refusal(SubscribeRefusal.POLICY, why)

    @property
    def _type_title(self) -> str:
        return self.type.title if self.type is not None else "of no type"

    def _refusal(self, refusal: SubscribeRefusal, why: str) -> MagnetarError:
        return refusal.error(f"subscription {self.name!r}: {why}", subscription=self.name, refusal=refusal.name)

    def leave(self, consumer: Consumer, *, lost: bool = False) -> None:
        """Removes the consumer; what it held goes to the others. Idempotent. `lost`: it left without saying so."""
        if self.consumers.pop(consumer.member.id, None) is None:
            return
        if consumer.waiting is not None:
            consumer.waiting.cancel()
        member, counted = consumer.member, lost and self.dead_letters is not None and self.dead_letters.counts_lost
        member.paused = True
        if self.consumers or counted or self.pump.returns:
            self.pump.returns.add(member, list(member.outstanding), counted=counted, leaves=True)
        else:
            self.dispatcher.leave_all()  # the next one that joins begins anew
        if not self.consumers:
            self.type = None
            self.pump.forget_buffer()
        self.pump.wake()

    async def expect(self, consumer: Consumer) -> None:
        """Waits, before the consumer joins, until what others give back, and what its own last connection held, is
        back."""
        for other in self.consumers.values():
            if consumer.instance and other.instance == consumer.instance:
                self.pump.returns.add(other.member, list(other.member.outstanding), counted=False)
        await self.pump.returns.finish()

    def disconnect(self, consumer: Consumer, error: MagnetarError) -> None:
        self.leave(consumer)
        consumer.outlet.on_closed(error)

    def disconnect_all(self, error: MagnetarError) -> None:
        for consumer in list(self.consumers.values()):
            self.disconnect(consumer, error)

    def flow(self, consumer: Consumer, permits: int) -> None:
        self.dispatcher.flow(consumer.member, permits)
        self.pump.wake()

    # ------------------------------------------------------------------ acknowledging
    def ack(self, consumer: Consumer | None, entries: Sequence[AckedEntry]) -> None:
        """Acknowledges each entry, or some messages of it. Trimmed entries are done already; InvalidRequest: beyond the
        end. TransactionConflict: one is pending in a transaction, and the others count.
        """
        try:
            self.acks.ack(consumer.member if consumer is not None else None, entries)
        finally:
            self._acked(consumer)

    def ack_set(self, consumer: Consumer | None, ledger_id: int, entries: bytes) -> None:
        """Acknowledges many whole entries of one ledger, as a roaring bitmap. InvalidRequest: it does not parse, or
        goes beyond the end. TransactionConflict: one is pending in a transaction, and the others count.
        """
        before = self.cursor.version
        try:
            self.acks.ack_set(consumer.member if consumer is not None else None, ledger_id, entries)
        finally:
            if self.cursor.version != before:
                self._acked(consumer)

    def ack_cumulative(self, consumer: Consumer | None, acked: AckedEntry) -> None:
        """Acknowledges everything up to and with the entry. NotAllowed where several consumers share the subscription.
        TransactionConflict: some of it is pending in a transaction, and nothing of it counts.
        """
        self.check_cumulative(consumer, acked)
        self.acks.ack_cumulative(consumer.member if consumer is not None else None, acked)
        self._acked(consumer)

    def check_cumulative(self, consumer: Consumer | None, acked: AckedEntry) -> None:
        """Raises NotAllowed or TransactionConflict, as `ack_cumulative` would. Nothing is done."""
        if consumer is not None and self.dispatcher.policy.individual:
            raise AckRefusal.CUMULATIVE.error(
                f"cumulative acknowledgement is not possible on the {self._type_title} subscription {self.name!r}"
            )
        self.acks.check_cumulative(acked)

    def skip_to(self, mark: Position, messages: int = 0) -> None:
        """Counts everything up to the mark, and so many messages after it, as acknowledged: it expired, exceeds the
        quota, or is skipped. What is pending in a transaction stays pending.
        """
        if mark.entry_id >= 0:
            self.acks.skip_to(mark)
        if messages:
            self.acks.ack_first(self.log.shape.after(mark), messages)
        self._on_mark_moved()

    def discard(self, positions: Sequence[Position]) -> None:
        if positions:
            with suppress(TransactionConflict):  # those that are pending are acknowledged by their transaction
                self.acks.ack(None, [AckedEntry(position) for position in positions])
            self._on_mark_moved()
            self.pump.wake()

    # ------------------------------------------------------------------ acknowledging in transactions
    @property
    def pending_transactions(self) -> Sequence[TxnId]:
        """The transactions that have acknowledged something here and have not been settled."""
        return tuple(self.cursor.pending.of) if self.cursor.pending is not None else ()

    def has_pending(self, txn: TxnId) -> bool:
        return self.cursor.pending is not None and txn in self.cursor.pending.of

    def holders(self, position: Position) -> Sequence[TxnId]:
        """The transactions for which an acknowledgement of the entry may have been refused."""
        return self.cursor.pending.holders(position) if self.cursor.pending is not None else ()

    def ack_in(
        self, consumer: Consumer, txn: TxnId, wanted: TxnAcks, cumulative: AckedEntry | None = None, *,
        rest: bool = False,
    ) -> None:  # fmt: skip
        """Makes all of it pending in the transaction, at once: acknowledged if it commits. Repeated: nothing more
        happens. The topic has joined the transaction in the same turn of the loop. `rest`: as the session's.

        NotAllowed: the subscription keeps nothing, or is shared and it is cumulative. TransactionConflict,
        InvalidRequest, BackPressure. Nothing has changed then.
        """
        self.check_transactional()
        if cumulative is not None and self.dispatcher.policy.individual:
            self.check_cumulative(consumer, cumulative)
        if self.acks.pend(consumer.member, txn, wanted, cumulative, self._config.cursor_memory_bytes, rest=rest):
            self._on_mark_moved()

    def check_transactional(self) -> None:
        """Raises NotAllowed if what it acknowledges is not kept."""
        if self.store is None:
            raise AckRefusal.NOT_KEPT.error(f"subscription {self.name!r}: {AckRefusal.NOT_KEPT.value}")

    def settle(self, txn: TxnId, committed: bool) -> None:
        """Settles a transaction that ended: what it acknowledged here counts, or comes again. Idempotent; durable after
        `stored`."""
        settled = self.acks.settle(txn, committed=committed)
        if settled is None:
            return
        self.commits += committed
        self.aborts += not committed
        if not committed:
            self._come_again(settled)
        if self.store is not None:
            self.store.touched()
        self.pump.wake()

    def _come_again(self, settled: SettledAcks) -> None:
        if self.compacted:
            self._leave_out()  # what was compacted while it was pending
        cursor, ordered = self.cursor, not self.dispatcher.policy.individual
        first = first_of(cursor, settled.acks)
        if ordered and first is not None:
            self.dispatcher.step_back(first)
            self.pump.forget_buffer()
        self.pump.returns.freed_in_part(sorted(settled.shown))
        self.pump.returns.add_freed(freed_entries(cursor, settled, tail=ordered))

    def _acked(self, consumer: Consumer | None) -> None:
        now_ms = self.activity.acked_ms = self._clock.wall_ms()
        if consumer is not None:
            consumer.activity.acked_ms = now_ms
        self._on_mark_moved()

    def _on_mark_moved(self) -> None:
        if self._marked != self.cursor.mark:
            self._marked, self.activity.marked_ms = self.cursor.mark, self._clock.wall_ms()
        if self.store is not None:
            self.store.touched()
        blocked = self.pump.blocked
        if blocked is not None and (blocked not in AT_THE_END or self.dispatcher.replay_entries):
            self.pump.wake()  # a consumer may take more, a key is free, or a batch has messages that an abort freed

    def redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, *, counted: bool = True
    ) -> None:
        """Gives entries back (None: all that it holds). Entries that it does not hold are ignored."""
        wanted = list(consumer.member.outstanding) if positions is None else dict.fromkeys(positions)
        self.pump.returns.add(consumer.member, wanted, counted=counted)
        if self.store is not None:
            self.store.touched()
        self.pump.wake()

    def when_durable(self, tell: Callable[[MagnetarError | None], None]) -> None:
        """Calls `tell` with None once all is durable, like `durable_now`, at once perhaps; or with why that is not
        known."""
        if self.store is not None:
            self.store.when_durable(tell)
        else:
            tell(None)

    async def durable_now(self) -> None:
        """Returns when what was acknowledged up to now survives a crash."""
        if self.store is not None:
            await self.store.durable()

    @cached_property
    def moving(self) -> asyncio.Lock:
        """Returns the lock that is held while the subscription is moved, from finding the position until it is durable.
        """
        return asyncio.Lock()

    async def seek(self, mark: Position, acked_messages: int = 0, *, keep: Consumer | None = None) -> None:
        """Starts over after `mark` (and after so many messages of the next entry); durable when it returns.

        The caller holds `moving`. The other consumers are disconnected: their outstanding entries have no meaning any
        more.
        """
        assert self.moving.locked(), "one after the other"
        why = Unavailable(f"the subscription {self.name!r} was moved; subscribe again", moved=True)
        for consumer in list(self.consumers.values()):
            if consumer is not keep:
                self.disconnect(consumer, why)
        self.cursor.seek(mark)
        self._leave_out()
        if acked_messages:
            self.cursor.ack_first(self.log.shape.after(mark), acked_messages)
        self.dispatcher.seek()
        self.pump.returns.clear()
        self.pump.forget_buffer()
        self.pump.is_moving = True
        try:
            await self.durable_now()
        finally:
            self.pump.is_moving = False
            self.pump.wake()  # in the next turn: the caller goes on first

    # ------------------------------------------------------------------ ending
    def stop(self) -> None:
        """Stops handing out. The consumers were notified before."""
        if self.dead_letters is not None:
            self.dead_letters.stop()
        if self.delayed is not None:
            self.delayed.stop()
        self.pump.stop()

    async def close(self) -> None:
        if self.delayed is not None:
            await self.delayed.close()
        self.stop()
        await self.pump.drain()
        if self.dead_letters is not None:
            await self.dead_letters.stopped()
        if self.store is not None:
            await self.store.close()


def _limits(applied: Applied) -> DispatchLimits:
    return DispatchLimits(applied.max_unacked_per_consumer, applied.max_unacked_per_subscription)


