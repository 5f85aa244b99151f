"""A subscription: the driver of one dispatcher and one cursor.

Its pump asks the dispatcher what it wants, takes that from memory or has it read (read_ahead.py), hands it out, and
repeats until no consumer may get the next entry. `wake` pumps once in the next turn of the event loop, however often
it
is called: after new entries, permits, acknowledgements. Nothing here is per message.

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

What consumers give back, and what a leaving consumer held, goes back in slices (`_Return`): nothing is handed out
before
the last of it, so the order is the same as at once, and 150,000 entries delay no other subscription.

A durable subscription stores its acknowledgements (acks.py) with its cursor (cursors.py); a reader's live as long as
its consumers and keep no data.

The connected consumers determine the type: the first one brings it (and, for Key_Shared, mode and order), others have
to agree, and it ends with the last one (Pulsar S13). A consumer of a Failover subscription is notified who is active
when it joins and whenever that changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from pyroaring import BitMap

from ...proto.errors import InternalError, MagnetarError, Unavailable
from ...proto.model import AckedEntry, EntrySet
from ...proto.names import Position
from ...runtime.clock import Clock
from ...runtime.tasks import Tasks
from ..common.applied import Applied
from ..common.config import BrokerConfig
from ..common.refusals import AckRefusal, SubscribeRefusal
from ..common.token_bucket import Rate, portion, wait_s
from ..common.turns import SLICE_S, Turns
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from ..log.topic_log import TopicLogState
from .acks import Acks, entries_of
from .consumer import Consumer
from .core.cursor import Cursor
from .core.deliveries import ALL_TIME, Delivery, DispatchLimits
from .core.dispatch import Dispatcher
from .core.policies import EXCLUSIVE, SubscriptionType
from .core.policies.policy import Blocked, Member, SubscriptionOptions
from .cursors import DurableCursor
from .dead_letters import DeadLetters
from .delays import DelayedDelivery
from .read_ahead import ReadAheadBuffer

_LOG = logging.getLogger("magnetar.broker.subscription.subscription")

PUMP_ENTRIES_MAX = 1000
"""Entries handed out between two checks of the consumers' queues."""

SEEK = ("disconnect", "move", "store", "answer")
RETURN_ENTRIES = 200
"""Entries given back between two readings of the clock: some tenths of a millisecond."""
SLOTS_AT_ONCE = 1000
"""Slots of Key_Shared that are checked after a join or a leave between two readings of the clock: half a millisecond.
"""
MARK_ENTRIES = 1000
"""Held entries that one step of a cumulative acknowledgement, or of a check of them, passes: about a millisecond."""


@dataclass(slots=True)
class _Return:
    """Entries that a consumer gives back, as far as it still holds them at their turn."""

    member: Member
    positions: deque[Position]
    counted: bool  # they count as given back
    leaves: bool  # the consumer is disconnected, and leaves the dispatcher with the last of them


class Subscription:
    """One subscription of a topic on its owner: consumers, dispatcher, cursor, and the pump between them."""

    __slots__ = (
        "__dict__", "_acks", "_at_hand", "_clock", "_closed", "_config", "_due", "_end_told", "_full_said", "_log",
        "_loop", "_moving", "_returns", "_tasks", "_timer", "_wakes_at", "blocked", "consumers", "cursor",
        "dead_letters", "delayed", "dispatcher", "dropped", "name", "rates", "store", "type",
    )  # fmt: skip

    def __init__(
        self, name: str, log: ReadableLog, cursor: Cursor, store: DurableCursor | None, clock: Clock,
        config: BrokerConfig, applied: Applied, delayed: DelayedDelivery | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.delayed = delayed
        self.cursor = cursor
        self.store = store
        self.type: SubscriptionType | None = None
        self.consumers: dict[int, Consumer] = {}
        self.dropped = 0  # messages that no consumer got, of a non-persistent topic
        self.dead_letters: DeadLetters | None = None  # of durable ones
        self.blocked: Blocked | None = Blocked.NO_CONSUMER
        self.dispatcher = Dispatcher(
            log.shape, cursor, EXCLUSIVE.policy(SubscriptionOptions()), tracks=store is not None,
            memory_bytes_max=config.cursor_memory_bytes,
            limits=_limits(applied), delays=delayed.core if delayed is not None else None,
        )  # fmt: skip
        self.rates: tuple[Rate, ...] = (Rate(),)  # its own first, then the topic's and the broker's
        self._log: ReadableLog = log
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._closed = False
        self._tasks = Tasks()
        self._acks = Acks(log.shape, cursor, self.dispatcher)
        self._at_hand = ReadAheadBuffer(name, log, clock, config, self.dispatcher, self.wake, self._tasks)
        self._full_said = False
        self._end_told = False
        self._moving = False  # a seek is not durable yet
        self._returns: deque[_Return] = deque()
        self._timer: asyncio.TimerHandle | None = None  # runs until the debt of a rate is paid …
        self._wakes_at = 0.0  # … at that time
        if delayed is not None:
            delayed.start(self.wake)

    @property
    def durable(self) -> bool:
        return self.store is not None

    def apply(self, applied: Applied) -> None:
        """Takes over changed policies of the topic."""
        if self.dispatcher.limits != _limits(applied):
            self.dispatcher.limit(_limits(applied))
            self.wake()

    # ------------------------------------------------------------------ what it reads
    @property
    def log(self) -> ReadableLog:
        return self._log

    @property
    def compacted(self) -> bool:
        """Whether it reads the compacted form of the topic (broker/log/compacted_view.py)."""
        return self._log.is_compacted

    def read_from(self, log: ReadableLog) -> None:
        """Reads `log` from the mark on; only while no consumer is connected."""
        self._log = log
        self._at_hand.read_from(log)
        self.cursor.over(log.shape)
        self._acks.over(log.shape)
        self._leave_out()
        self.dispatcher.over(log.shape)

    def _leave_out(self) -> None:
        self._log.leave_out(self.cursor)
        if self.compacted and self.store is not None:
            self.store.touched()

    def needs(self, horizon: Position) -> bool:
        """Whether something before `horizon` is not delivered, or is not acknowledged."""
        return self.dispatcher.read_position <= horizon or (self.durable and self.cursor.mark < horizon)

    # ------------------------------------------------------------------ consumers
    def join(self, consumer: Consumer, type_: SubscriptionType) -> None:
        """Adds the consumer. ConsumerBusy: another type, or the policy refuses.

        What others give back is finished first: await `expect` before, so that it is done in slices.
        """
        for other in list(self.consumers.values()):
            if consumer.instance and other.instance == consumer.instance:
                self.disconnect(other, Unavailable("the same consumer has connected again"))
        self._return_all()
        self._admit(consumer.member, type_)
        self._end_told = False
        self.consumers[consumer.member.id] = consumer
        self.dispatcher.join(consumer.member)
        self.wake()

    def _admit(self, newcomer: Member, type_: SubscriptionType) -> None:
        """Sets the type, if it is the first consumer. ConsumerBusy: it may not join."""
        if not self.consumers:
            topic = self._log.topic
            options = SubscriptionOptions(topic.full, topic.partition, newcomer.options, self._config)
            self.dispatcher.use(type_.policy(options))
            self.type = type_
        policy = self.dispatcher.policy
        if type_ is not self.type:
            raise self._refused(
                SubscribeRefusal.OTHER_TYPE,
                f"it is {self._type_title} while its consumers are connected, and cannot be {type_.title}"
            )
        if (why := policy.differs(newcomer)) is not None:
            raise self._refused(SubscribeRefusal.OTHER_MODE, why)
        if (why := policy.refuses(newcomer)) is not None:
            raise self._refused(SubscribeRefusal.POLICY, why)

    @property
    def _type_title(self) -> str:
        return self.type.title if self.type is not None else "of no type"

    def _refused(self, refusal: SubscribeRefusal, why: str) -> MagnetarError:
        return refusal.error(f"subscription {self.name!r}: {why}", subscription=self.name)

    def leave(self, consumer: Consumer, *, lost: bool = False) -> None:
        """Removes the consumer; what it held goes to the others. Idempotent. `lost`: it left without saying so."""
        if self.consumers.pop(consumer.member.id, None) is None:
            return
        if consumer.waiting is not None:
            consumer.waiting.cancel()
        member, counted = consumer.member, lost and self._counts
        member.paused = True
        if self.consumers or counted or self._returns:
            self._give_back(member, list(member.outstanding), counted=counted, leaves=True)
        else:
            self.dispatcher.leave_all()  # the next one that joins begins anew
        if not self.consumers:
            self.type = None
            self._at_hand.forget()
        self.wake()

    @property
    def _counts(self) -> bool:
        """Whether a policy of the server counts what is given back."""
        return self.dead_letters is not None and self.dead_letters.on

    # ------------------------------------------------------------------ giving back
    def _give_back(self, member: Member, positions: Iterable[Position], *, counted: bool, leaves: bool = False) -> None:
        self._returns.append(_Return(member, deque(positions), counted, leaves))
        self._return_some()

    def _return_some(self) -> bool:
        """Gives RETURN_ENTRIES of them back. True: there are no more."""
        while self._returns:
            first = self._returns[0]
            member, some = first.member, list(islice(first.positions, RETURN_ENTRIES))
            for _ in some:
                first.positions.popleft()
            counted = first.counted
            if counted and self._counts:
                assert self.dead_letters is not None, "it counts"
                self.dead_letters.given_back([each for each in some if each in member.outstanding])
                counted = False
            self.dispatcher.redeliver(member, some, counted=counted and not first.leaves)
            if first.positions:
                return False
            if first.leaves:
                self.dispatcher.leave(member)
            self._returns.popleft()
        return True

    def _return_all(self) -> None:
        while not self._return_some():
            pass

    async def expect(self, consumer: Consumer) -> None:
        """Before the consumer joins: waits until what others give back, and what its own last connection held, is
        back.
        """
        for other in self.consumers.values():
            if consumer.instance and other.instance == consumer.instance:
                self._give_back(other.member, list(other.member.outstanding), counted=False)
        turns = Turns()
        while not self._return_some():
            if turns.over:
                await turns.next()

    def disconnect(self, consumer: Consumer, error: MagnetarError) -> None:
        self.leave(consumer)
        consumer.outlet.closed(error)

    def disconnect_all(self, error: MagnetarError) -> None:
        for consumer in list(self.consumers.values()):
            self.disconnect(consumer, error)

    def flow(self, consumer: Consumer, permits: int) -> None:
        self.dispatcher.flow(consumer.member, permits)
        self.wake()

    # ------------------------------------------------------------------ handing out
    def wake(self) -> None:
        if not self._due and not self._closed:
            self._due = True
            self._loop.call_soon(self._pump)

    def hand_out(self) -> None:
        """Pumps now, not in the next turn."""
        self._pump()

    def _pump(self) -> None:
        self._due = False
        if self._closed:
            return
        self._hand_out()
        if self.delayed is not None:
            self.delayed.arm(self.dispatcher)  # also for what was just held

    def _hand_out(self) -> None:
        end = self._clock.monotonic() + SLICE_S
        if self._moving:
            self.blocked = Blocked.MOVING
            return  # the store wakes it when that is durable
        while not (self._return_some() and self.dispatcher.policy.look_again(SLOTS_AT_ONCE)):
            if self._clock.monotonic() > end:
                self.wake()
                return
        for event in self.dispatcher.policy.events():
            self.consumers[event.member.id].outlet.active(event.active)
        now_ms = ALL_TIME
        if self.delayed is not None and self.dispatcher.delaying:
            if not self.delayed.ready:
                self.blocked = Blocked.FINDING_DELAYS
                return
            now_ms = self.delayed.look(self.dispatcher)
        handed_out = 0
        while handed_out < PUMP_ENTRIES_MAX and (now := self._clock.monotonic()) <= end:
            rates = [rate for rate in self.rates if rate.limited]
            if rates and self._throttled(rates, now):
                return
            if self._at_hand.reading_again:
                return  # it is handed out before anything new
            want = self.dispatcher.want()
            if isinstance(want, Blocked):
                self._block(want)
                self._tell_end()
                return
            self.blocked = None
            entries = self._at_hand.take(want, end)
            if not entries:
                return
            entries = entries[: portion(rates, entries, now)] if rates else entries
            before = self.dispatcher.progress
            deliveries = self.dispatcher.assign(entries, now_ms)
            for rate in rates:
                for each in deliveries:
                    rate.take(each.entry.count, each.entry.size, now)
            self._deliver(deliveries)
            if self.dispatcher.parked:
                self._at_hand.keep([entry for entry in self.dispatcher.parked if isinstance(entry, StoredEntry)])
            handed_out += len(entries)
            if self.dispatcher.progress == before:
                self.blocked = self.dispatcher.blocked() or Blocked.NO_PERMITS
                return
        self.wake()

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        of_each: dict[int, list[Delivery]] = {}
        for each in deliveries:
            of_each.setdefault(each.member.id, []).append(each)
        for id_, own in of_each.items():
            consumer = self.consumers[id_]
            consumer.outlet.deliver(own)
            if consumer.outlet.full:
                self._pause(consumer)
        self._at_hand.gone(deliveries)

    def noted(self, position: Position, at_ms: int) -> None:
        """A new entry is not to be delivered before `at_ms` (ms since the epoch), on types that delay."""
        if self.delayed is not None and (self.dispatcher.delaying or self.delayed.core.count):
            self.delayed.noted(position, at_ms)

    def _block(self, why: Blocked) -> None:
        self.blocked = why
        if why is Blocked.HOLES and not self._full_said:
            _LOG.warning(
                "%s/%s: %s (%d bytes, %d entries after %s); nothing new is delivered until then",
                self._log.topic, self.name, why.value, self.cursor.memory_bytes, self.cursor.hole_entries,
                self.cursor.mark,
            )  # fmt: skip
            self._full_said = True
        elif self._full_said and self.cursor.memory_bytes < self._config.cursor_memory_bytes // 2:
            _LOG.info("%s/%s: acknowledgement state has shrunk: delivery resumes", self._log.topic, self.name)
            self._full_said = False

    def _throttled(self, rates: Sequence[Rate], now: float) -> bool:
        """Whether a dispatch rate is exceeded: nothing is read or handed out, and the pump resumes when the debt is
        paid.
        """
        seconds = wait_s(rates, now)
        if seconds > 0:
            self.blocked = Blocked.THROTTLED
            self._wake_later(seconds, now)
        return seconds > 0

    def _wake_later(self, seconds: float, now: float) -> None:
        """Keeps one timer, the earliest, however often it is requested."""
        if self._timer is not None:
            if self._wakes_at <= now + seconds:
                return
            self._timer.cancel()
        self._wakes_at = now + seconds
        self._timer = self._loop.call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.wake()

    def _tell_end(self) -> None:
        """Consumers of a terminated topic that have got everything learn that nothing more will come."""
        if self._log.state is not TopicLogState.TERMINATED or self._end_told or not self.consumers:
            return
        shape = self._log.shape
        if not self.dispatcher.replay_entries and not shape.readable(shape.seat(self.dispatcher.read_position)):
            self._end_told = True
            for consumer in self.consumers.values():
                consumer.outlet.ended()

    def _pause(self, consumer: Consumer) -> None:
        """Sends nothing more to a consumer whose connection is full until its queue has drained."""
        if consumer.waiting is None:
            consumer.member.paused = True
            consumer.waiting = self._tasks.spawn(self._resume(consumer), "drain of a consumer's queue")

    async def _resume(self, consumer: Consumer) -> None:
        try:
            await consumer.outlet.drained()
        except MagnetarError:
            return  # the stream broke; its handler removes the consumer
        except Exception as error:  # a fault of the broker: the consumer would get nothing more without notice
            _LOG.exception("%s/%s: a consumer whose queue was full is disconnected", self._log.topic, self.name)
            self.disconnect(consumer, InternalError(f"its connection cannot be waited for: {error!r}"))
            return
        consumer.waiting = None
        consumer.member.paused = False
        self.wake()

    # ------------------------------------------------------------------ acknowledging
    def ack(self, consumer: Consumer | None, entries: Sequence[AckedEntry]) -> None:
        """Acknowledges each entry, or some messages of it. Trimmed entries are done already; InvalidRequest: beyond the
        end.
        """
        try:
            self._acks.ack(consumer.member if consumer is not None else None, entries)
        finally:
            self._changed()

    def ack_set(self, consumer: Consumer | None, ledger_id: int, entries: bytes) -> None:
        """Acknowledges many whole entries of one ledger, as a roaring bitmap. InvalidRequest: it does not parse, or
        goes beyond the end.
        """
        before = self.cursor.version
        try:
            self._acks.ack_set(consumer.member if consumer is not None else None, ledger_id, entries)
        finally:
            if self.cursor.version != before:
                self._changed()

    def ack_cumulative(self, consumer: Consumer | None, acked: AckedEntry) -> None:
        """Acknowledges everything up to and with the entry. NotAllowed where several consumers share the subscription.
        """
        if consumer is not None and self.dispatcher.policy.individual:
            raise AckRefusal.CUMULATIVE.error(
                f"cumulative acknowledgement is not possible on the {self._type_title} subscription {self.name!r}"
            )
        self._acks.ack_cumulative(consumer.member if consumer is not None else None, acked)
        self._changed()

    def give_up(self, mark: Position) -> None:
        """Counts everything up to the mark as acknowledged: it expired, or exceeds the quota."""
        self._acks.give_up(mark)
        self._changed()

    def _changed(self) -> None:
        if self.store is not None:
            self.store.touched()
        if self.blocked is not None and self.blocked is not Blocked.CAUGHT_UP:
            self.wake()  # a consumer may take more, or a key is free

    def redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, *, counted: bool = True
    ) -> None:
        """Gives entries back (None: all that it holds). Entries that it does not hold are ignored."""
        wanted = list(consumer.member.outstanding) if positions is None else dict.fromkeys(positions)
        self._give_back(consumer.member, wanted, counted=counted)
        if self.store is not None:
            self.store.touched()
        self.wake()

    def held(self, consumer: Consumer, sets: Iterable[EntrySet]) -> Iterator[list[Position]]:
        """Those of the sets that the consumer holds, in slices. InvalidRequest: a set does not parse."""
        wanted: dict[int, BitMap] = {}
        for each in sets:
            entries = entries_of(each.entries)
            if each.ledger_id in wanted:
                wanted[each.ledger_id] |= entries
            elif self._log.shape.span(each.ledger_id) is not None:
                wanted[each.ledger_id] = entries
        outstanding = consumer.member.outstanding
        if sum(map(len, wanted.values())) <= len(outstanding):
            named = (Position(id_, entry_id) for id_, entries in wanted.items() for entry_id in entries)
            while some := list(islice(named, MARK_ENTRIES)):
                yield [each for each in some if each in outstanding]
        else:
            every = iter(list(outstanding))
            while some := list(islice(every, MARK_ENTRIES)):
                yield [each for each in some if each[0] in wanted and each[1] in wanted[each[0]]]

    def marks_up_to(self, consumer: Consumer, mark: Position) -> Iterator[Position]:
        """Steps on the way to `mark`: every MARK_ENTRIES-th entry that the consumer holds, if it holds so many."""
        member = consumer.member
        while len(member.outstanding) > MARK_ENTRIES and not member.reordered:
            step = next(islice(member.outstanding, MARK_ENTRIES, None))
            if step >= mark:
                return
            yield step
            if step in member.outstanding:
                return  # it was refused

    async def durable_now(self) -> None:
        """Returns when what was acknowledged up to now survives a crash."""
        if self.store is not None:
            await self.store.durable()

    @cached_property
    def moving(self) -> asyncio.Lock:
        """Held while the subscription is moved, from finding the position until it is durable."""
        return asyncio.Lock()

    async def seek(self, mark: Position, acked_messages: int = 0, *, keep: Consumer | None = None) -> None:
        """Starts over after `mark` (and after so many messages of the next entry); durable when it returns.

        The caller holds `moving`. The other consumers are disconnected: their outstanding entries have no meaning any
        more.
        """
        assert self.moving.locked(), "one after the other"
        for consumer in list(self.consumers.values()):
            if consumer is not keep:
                self.disconnect(consumer, Unavailable(f"the subscription {self.name!r} was moved; subscribe again"))
        self.cursor.seek(mark)
        self._leave_out()
        if acked_messages:
            self.cursor.ack_first(self._log.shape.after(mark), acked_messages)
        self.dispatcher.seek()
        for each in self._returns:
            each.positions.clear()  # no consumer holds anything any more
        self._at_hand.forget()
        self._moving = True
        try:
            await self.durable_now()
        finally:
            self._moving = False
            self.wake()  # in the next turn: the caller goes on first

    # ------------------------------------------------------------------ ending
    def stop(self) -> None:
        """Stops handing out. The consumers were notified before."""
        self._closed = True
        if self.dead_letters is not None:
            self.dead_letters.stop()
        if self.delayed is not None:
            self.delayed.stop()
        self._at_hand.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._tasks.cancel()

    async def close(self) -> None:
        if self.delayed is not None:
            await self.delayed.close()
        self.stop()
        await self._tasks.drain()
        if self.dead_letters is not None:
            await self.dead_letters.stopped()
        if self.store is not None:
            await self.store.close()


def _limits(applied: Applied) -> DispatchLimits:
    return DispatchLimits(applied.max_unacked_per_consumer, applied.max_unacked_per_subscription)


