"""A subscription: the driver of one dispatcher and one cursor.

It pumps: ask the dispatcher what it wants, take it from the tail cache, else from what was read ahead, else start one
read from bookies; hand out; again, until nobody may get the next entry. `wake` makes it pump once in the next turn of
the event loop, however often it is called: after new entries, permits, acks. Nothing here is per message.

A consumer that catches up reads in chunks of `read_bytes`, the next one while this one is handed out; what is to be
handed out again is read beside that, in stretches. Durable subscriptions store their cursor (cursors.py); those of
readers live as long as their consumers and hold no data.

The type belongs to the consumers that are there: the first one brings it (and, for Key_Shared, mode and order), others
have to agree, and with the last one it is gone (Pulsar S13). The consumers of a Failover subscription are told who is
active, each when it comes and whenever that changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Protocol

from pyroaring import BitMap

from ..proto import wire_pb2 as wire
from ..proto.errors import ConsumerBusy, InvalidRequest, MagnetarError, NotAllowed, Unavailable
from ..proto.names import Position
from ..runtime.network import STREAM_QUEUE_BYTES
from .cache import StoredEntry
from .compacted_view import CompactedView
from .config import BrokerConfig
from .core.applied import Applied
from .core.cursor import BATCH_INDEXES_MAX, Cursor
from .core.dispatch import ALL_TIME, Blocked, Delivery, Dispatcher, Limits, Member, Read, Replay, inside
from .core.policies import Terms, policy_of
from .core.policies.failover import Failover
from .core.token_bucket import Rate, portion, wait_s
from .cursors import DurableCursor
from .dead_letters import DeadLetters
from .delays import DelayedDelivery
from .patience import Patience
from .topic_log import State, TopicLog

_LOG = logging.getLogger("magnetar.broker.subscription")

CHUNK_ENTRIES = 200
"""Entries given to the dispatcher at once."""
PUMP_ENTRIES_MAX = 1000
"""Entries handed out between two looks at the consumers' queues."""
GAP_ENTRIES_MAX = 16
"""Entries read in vain between two that are wanted again, rather than reading twice."""
READ_RETRY_S = 0.5
"""Between two tries to read from bookies that do not answer."""


class Outlet(Protocol):
    """Where a consumer's deliveries go: its stream. Nothing here waits but `drained`."""

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """All of them are this consumer's; their entries are StoredEntries."""
        ...

    def ended(self) -> None:
        """The topic is terminated and everything was delivered."""
        ...

    def active(self, active: bool) -> None:
        """Failover: this consumer is the one that gets the messages, or is not."""
        ...

    def closed(self, error: MagnetarError) -> None:
        """The broker gives the consumer up; nothing more comes."""
        ...

    @property
    def queued_bytes(self) -> int: ...
    async def drained(self) -> None: ...


class Consumer:
    """A connected consumer. `member` is what the dispatcher knows of it."""

    __slots__ = ("address", "instance", "member", "outlet", "told_active", "waiting")

    def __init__(self, member: Member, outlet: Outlet, *, address: str, instance: str) -> None:
        self.member = member
        self.outlet = outlet
        self.told_active: bool | None = None
        self.address = address
        self.instance = instance
        self.waiting: asyncio.Task[None] | None = None  # for its queue to drain


_NONE: deque[StoredEntry] = deque()
"""What is read ahead while nothing is. One for all subscriptions, for it costs 700 bytes: never add to it."""


class Subscription:
    __slots__ = (
        "__dict__", "_again", "_again_bytes", "_ahead", "_ahead_bytes", "_closed", "_config", "_due", "_end_told",
        "_full_said", "_log", "_loop", "_patience", "_reading", "_reading_again", "_seeks", "_terms", "blocked",
        "consumers", "cursor", "dead_letters", "delayed", "dispatcher", "name", "rates", "store", "type",
    )  # fmt: skip

    def __init__(
        self, name: str, log: TopicLog, cursor: Cursor, store: DurableCursor | None, config: BrokerConfig,
        applied: Applied, delayed: DelayedDelivery | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.delayed = delayed
        self.cursor = cursor
        self.store = store
        self.type: int | None = None
        self._terms = Terms()
        self.consumers: dict[int, Consumer] = {}
        self.dead_letters: DeadLetters | None = None  # of durable ones
        self.blocked: Blocked | None = Blocked.NO_CONSUMER
        self.dispatcher = Dispatcher(
            log.shape, cursor, policy_of(wire.Subscribe.EXCLUSIVE), tracks=store is not None,
            memory_bytes_max=config.cursor_memory_bytes,
            limits=_limits(applied), delays=delayed.core if delayed is not None else None,
        )  # fmt: skip
        self.rates: tuple[Rate, ...] = (Rate(),)  # its own first, then the topic's and the broker's
        self._log: TopicLog | CompactedView = log
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._due = False
        self._closed = False
        self._ahead: deque[StoredEntry] = _NONE  # without a gap
        self._ahead_bytes = 0
        self._again: dict[Position, StoredEntry] = {}  # what waits with the policy, as far as it is in memory
        self._again_bytes = 0
        self._reading: asyncio.Task[None] | None = None
        self._reading_again: asyncio.Task[None] | None = None
        self._patience = Patience()
        self._full_said = False
        self._end_told = False
        self._seeks = 0  # a read that began before a seek is of no use after it
        if delayed is not None:
            delayed.start(self.wake)

    @property
    def durable(self) -> bool:
        return self.store is not None

    def apply(self, applied: Applied) -> None:
        """The policies of the topic have changed."""
        if self.dispatcher.limits != _limits(applied):
            self.dispatcher.limit(_limits(applied))
            self.wake()

    # ------------------------------------------------------------------ what it reads
    @property
    def log(self) -> TopicLog | CompactedView:
        return self._log

    @property
    def compacted(self) -> bool:
        """Whether it reads the compacted form of the topic (broker/compacted_view.py)."""
        return isinstance(self._log, CompactedView)

    def read_from(self, log: TopicLog | CompactedView) -> None:
        """From its mark on; nobody is connected."""
        self._log = log
        self._forget_read()
        self.cursor.over(log.shape)
        self._leave_out()
        self.dispatcher.over(log.shape)

    def _leave_out(self) -> None:
        if isinstance(self._log, CompactedView):
            self._log.leave_out(self.cursor)
            if self.store is not None:
                self.store.touched()

    def needs(self, horizon: Position) -> bool:
        """Something in front of it is not delivered, or is not acknowledged."""
        return self.dispatcher.read_position <= horizon or (self.durable and self.cursor.mark < horizon)

    # ------------------------------------------------------------------ consumers
    def join(self, consumer: Consumer, type_: int, *, sticky: bool = False, out_of_order: bool = False) -> None:
        """ConsumerBusy: another type, or the policy refuses; InvalidRequest: there is no such type."""
        for other in list(self.consumers.values()):
            if consumer.instance and other.instance == consumer.instance:
                self.disconnect(other, Unavailable("the same consumer has connected again"))
        topic, config = self._log.topic, self._config
        terms = Terms(
            topic=topic.full, partition=topic.partition, sticky=sticky, out_of_order=out_of_order,
            hash_ranges=config.key_shared_hash_ranges, waiting_bytes_max=config.key_shared_waiting_bytes,
        )  # fmt: skip
        if not self.consumers:
            self.dispatcher.use(policy_of(type_, terms))
            self.type, self._terms = type_, terms
        elif type_ != self.type:
            raise self._busy(
                f"it is {_type_name(self.type)} while its consumers are connected, and cannot be {_type_name(type_)}"
            )
        elif terms != self._terms:
            raise self._busy("its consumers are of another Key_Shared mode, or differ on out-of-order delivery")
        why = self.dispatcher.policy.refuses(consumer.member)
        if why is not None:
            raise self._busy(why)
        self._end_told = False
        self.consumers[consumer.member.id] = consumer
        self.dispatcher.join(consumer.member)
        self.wake()

    def _busy(self, why: str) -> ConsumerBusy:
        return ConsumerBusy(f"subscription {self.name!r}: {why}", subscription=self.name)

    def leave(self, consumer: Consumer, *, lost: bool = False) -> None:
        """What it held goes to the others. Idempotent. `lost`: it did not say that it goes."""
        if self.consumers.pop(consumer.member.id, None) is None:
            return
        if consumer.waiting is not None:
            consumer.waiting.cancel()
        if self.dead_letters is not None and self.dead_letters.on and lost:
            self.dead_letters.given_back(list(consumer.member.outstanding))
        self.dispatcher.leave(consumer.member)
        if not self.consumers:
            self.type = None
            self._forget_read()
        self.wake()

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

    def _pump(self) -> None:
        self._due = False
        if self._closed:
            return
        self._hand_out()
        if self.delayed is not None:
            self.delayed.arm(self.dispatcher)  # for what was held just now, too

    def _hand_out(self) -> None:
        self._tell_who_is_active()
        now_ms = ALL_TIME
        if self.delayed is not None and self.dispatcher.delaying:
            if not self.delayed.ready:
                self.blocked = Blocked.FINDING_DELAYS
                return
            now_ms = self.delayed.look(self.dispatcher)
        handed_out = 0
        while handed_out < PUMP_ENTRIES_MAX:
            rates = [rate for rate in self.rates if rate.limited]
            if rates and self._throttled(rates):
                return
            if self._reading_again is not None:
                return  # it goes before anything new
            want = self.dispatcher.want()
            if isinstance(want, Blocked):
                self._block(want)
                self._tell_end()
                return
            self.blocked = None
            entries = self._at_hand(want) if isinstance(want, Read) else self._at_hand_again(want)
            if not entries:
                self._start_read(want)
                return
            entries = entries[: portion(rates, entries, self._loop.time())] if rates else entries
            before = self.dispatcher.progress
            deliveries = self.dispatcher.assign(entries, now_ms)
            for rate in rates:
                for each in deliveries:
                    rate.take(each.entry.count, each.entry.size, self._loop.time())
            self._deliver(deliveries)
            if self.dispatcher.parked:
                self._keep([entry for entry in self.dispatcher.parked if isinstance(entry, StoredEntry)])
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
            if consumer.outlet.queued_bytes > STREAM_QUEUE_BYTES:
                self._pause(consumer)
        if self._again:
            for each in deliveries:
                kept = self._again.pop(each.entry.position, None)
                if kept is not None:
                    self._again_bytes -= kept.weight

    def noted(self, position: Position, at_ms: int) -> None:
        """A new entry is not to be delivered before that time, on types that delay."""
        if self.delayed is not None and (self.dispatcher.delaying or self.delayed.core.count):
            self.delayed.noted(position, at_ms)

    def _block(self, why: Blocked) -> None:
        self.blocked = why
        if why is Blocked.HOLES and not self._full_said:
            _LOG.warning(
                "%s/%s: %s (%d bytes, %d entries behind %s); nothing new is delivered until then",
                self._log.topic, self.name, why.value, self.cursor.memory_bytes, self.cursor.hole_entries,
                self.cursor.mark,
            )  # fmt: skip
            self._full_said = True
        elif self._full_said and self.cursor.memory_bytes < self._config.cursor_memory_bytes // 2:
            _LOG.info("%s/%s: what is acknowledged out of order has shrunk, all goes on", self._log.topic, self.name)
            self._full_said = False

    def _throttled(self, rates: Sequence[Rate]) -> bool:
        """Past a dispatch rate: nothing is read or handed out, and it goes on by itself when the debt is paid."""
        seconds = wait_s(rates, self._loop.time())
        if seconds > 0:
            self.blocked = Blocked.THROTTLED
            self._loop.call_later(seconds, self.wake)
        return seconds > 0

    def _tell_end(self) -> None:
        """Consumers of a terminated topic that have got everything learn that nothing more will come."""
        if self._log.state is not State.TERMINATED or self._end_told or not self.consumers:
            return
        shape = self._log.shape
        if not self.dispatcher.replay_entries and not shape.readable(shape.seat(self.dispatcher.read_position)):
            self._end_told = True
            for consumer in self.consumers.values():
                consumer.outlet.ended()

    def _tell_who_is_active(self) -> None:
        policy = self.dispatcher.policy
        if isinstance(policy, Failover):
            for consumer in self.consumers.values():
                active = consumer.member is policy.active
                if consumer.told_active is not active:
                    consumer.told_active = active
                    consumer.outlet.active(active)

    def _at_hand(self, want: Read) -> Sequence[StoredEntry]:
        """Entries from the wanted one on, without a gap, as far as they are in memory."""
        ahead = self._ahead
        while ahead and ahead[0].position < want.position:
            self._ahead_bytes -= ahead.popleft().size
        if ahead and ahead[0].position == want.position:
            self._read_ahead()
            return list(islice(ahead, CHUNK_ENTRIES))
        return self._log.reader.cached(want.position, CHUNK_ENTRIES, self._config.read_bytes)

    def _at_hand_again(self, want: Replay) -> Sequence[StoredEntry]:
        """The first of the wanted entries, as far as they are in memory."""
        found: list[StoredEntry] = []
        for position in islice(want.positions, CHUNK_ENTRIES):
            entry = self._again.get(position) or self._log.reader.get(position)
            if entry is None:
                break
            found.append(entry)
        return found

    def _pause(self, consumer: Consumer) -> None:
        """Its connection takes no more for the moment: nothing is sent to it until its queue has drained."""
        if consumer.waiting is None:
            consumer.member.paused = True
            consumer.waiting = self._loop.create_task(self._resume(consumer))

    async def _resume(self, consumer: Consumer) -> None:
        try:
            await consumer.outlet.drained()
        except MagnetarError:
            return  # the stream broke; its handler takes the consumer away
        consumer.waiting = None
        consumer.member.paused = False
        self.wake()

    # ------------------------------------------------------------------ reading from bookies
    def _start_read(self, want: Read | Replay) -> None:
        if isinstance(want, Replay):
            first, last = _stretch(want.positions)
            self._reading_again = self._loop.create_task(self._read_again(first, last, frozenset(want.positions)))
        elif self._reading is None:
            self._ahead.clear()
            self._ahead_bytes = 0
            self._reading = self._loop.create_task(self._read(want.position))

    def _read_ahead(self) -> None:
        """The next chunk, while this one is handed out."""
        if self._reading is not None or not self._ahead or self._ahead_bytes > self._config.read_bytes:
            return
        following = self._log.shape.after(self._ahead[-1].position)
        if self._log.shape.readable(following) and not self._log.reader.cached(following, 1, 1):
            self._reading = self._loop.create_task(self._read(following))

    async def _read(self, position: Position) -> None:
        seeks = self._seeks
        try:
            entries = await self._log.reader.read(position, self._config.read_bytes)
        except MagnetarError as error:
            self._reading = None
            self._cannot_read(position, error)
            return
        self._reading = None
        if seeks == self._seeks:
            if self._ahead and self._log.shape.after(self._ahead[-1].position) != position:
                self._ahead.clear()
                self._ahead_bytes = 0
            if self._ahead is _NONE:
                self._ahead = deque()
            self._ahead.extend(entries)
            self._ahead_bytes += sum(entry.size for entry in entries)
            self._read_ahead()
        self.wake()

    async def _read_again(self, first: Position, last: Position, wanted: Collection[Position]) -> None:
        try:
            entries = await self._log.reader.read(first, self._config.read_bytes, last.entry_id)
        except MagnetarError as error:
            self._reading_again = None
            self._cannot_read(first, error)
            return
        self._reading_again = None
        self._keep([entry for entry in entries if entry.position in wanted])
        self.wake()

    def _keep(self, entries: Sequence[StoredEntry]) -> None:
        """For the moment at which they go out; as many as may be in memory, the others are read again then."""
        again = self._again
        for entry in entries:
            if entry.position not in again:
                entry.stand_alone()
                again[entry.position] = entry
                self._again_bytes += entry.weight
        while self._again_bytes > self._config.key_shared_waiting_bytes:
            self._again_bytes -= again.pop(next(iter(again))).weight  # it has waited longest, and may wait on

    def _cannot_read(self, position: Position, error: MagnetarError) -> None:
        if not self._log.shape.readable(position):
            self.dispatcher.lost([position])  # trimmed meanwhile
            self.wake()
            return
        if self._patience.news(error):
            _LOG.warning("%s/%s: cannot read %s yet: %s", self._log.topic, self.name, position, error)
        self._loop.call_later(READ_RETRY_S, self.wake)

    def _forget_read(self) -> None:
        self._seeks += 1
        self._ahead.clear()
        self._ahead_bytes = 0
        self._again.clear()
        self._again_bytes = 0

    # ------------------------------------------------------------------ acknowledging
    def ack(self, consumer: Consumer | None, entries: Sequence[wire.AckedEntry]) -> None:
        """Each entry, or some messages of it. Trimmed ones are done already; InvalidRequest beyond the end."""
        member = consumer.member if consumer is not None else None
        for acked in entries:
            position = Position(acked.ledger_id, acked.entry_id)
            if not self._exists(position):
                continue
            if acked.batch_indexes or acked.batch_bits:
                self._ack_batch(member, position, _bits_of(acked))
            elif self.cursor.ack(position):
                self.dispatcher.acked(member, position)
        self._changed()

    def ack_set(self, consumer: Consumer | None, ledger_id: int, entries: bytes) -> None:
        """Many whole entries of one ledger, as a roaring bitmap. InvalidRequest: it is none, or goes beyond the end."""
        wanted = _entries_of(entries)
        span = self._log.shape.span(ledger_id)
        last = span.last_entry if span is not None else -1
        if wanted and wanted.max() > last:
            beyond = Position(ledger_id, wanted.max())
            wanted.remove_range(last + 1, beyond.entry_id + 1)
            if beyond > self._log.shape.last:
                self._acked_set(consumer, ledger_id, wanted)
                raise InvalidRequest(f"entry {beyond} is behind the last one of the topic", position=beyond)
        self._acked_set(consumer, ledger_id, wanted)

    def _acked_set(self, consumer: Consumer | None, ledger_id: int, entries: BitMap) -> None:
        new = self.cursor.ack_set(ledger_id, entries)
        if new:
            self.dispatcher.acked_set(consumer.member if consumer is not None else None, ledger_id, new)
            self._changed()

    def _ack_batch(self, member: Member | None, position: Position, bits: int) -> None:
        held = member.outstanding.get(position, 0) if member is not None else 0
        before = self.cursor.acked_count(position)
        if self.cursor.ack_bits(position, bits, held if not before else 0):
            self.dispatcher.acked(member, position)
        elif member is not None:
            self.dispatcher.acked_messages(member, position, self.cursor.acked_count(position) - before)

    def ack_cumulative(self, consumer: Consumer | None, acked: wire.AckedEntry) -> None:
        """Everything up to and with it. NotAllowed where several consumers share the subscription."""
        if consumer is not None and self.dispatcher.policy.individual:
            raise NotAllowed(
                f"cumulative acknowledgement is not possible on the {_type_name(self.type)} subscription {self.name!r}"
            )
        position = Position(acked.ledger_id, acked.entry_id)
        if not self._exists(position):
            return
        if acked.batch_indexes or acked.batch_bits:
            held = consumer.member.outstanding.get(position, 0) if consumer is not None else 0
            size = held if not self.cursor.acked_count(position) else 0
            self.cursor.ack_cumulative_batch(position, _bits_of(acked).bit_length() - 1, size)
        else:
            self.cursor.ack_cumulative(position)
        self.dispatcher.acked_up_to(self.cursor.mark)
        self._changed()

    def give_up(self, mark: Position) -> None:
        """Everything up to the mark counts as acknowledged: it expired, or is too much."""
        self.cursor.ack_cumulative(mark)
        self.dispatcher.acked_up_to(self.cursor.mark)
        self._changed()

    def _exists(self, position: Position) -> bool:
        """False: trimmed, or a ledger that is none of ours; beyond the end it is the caller's fault."""
        if self._log.shape.readable(position):
            return True
        if position > self._log.shape.last:
            raise InvalidRequest(f"entry {position} is behind the last one of the topic", position=position)
        return False

    def _changed(self) -> None:
        if self.store is not None:
            self.store.touched()
        if self.blocked is not None and self.blocked is not Blocked.CAUGHT_UP:
            self.wake()  # somebody may take more, or a key is free

    def redeliver(
        self, consumer: Consumer, positions: Sequence[Position] | None, *, counted: bool = True
    ) -> None:
        if counted and self.dead_letters is not None and self.dead_letters.on:
            held = consumer.member.outstanding
            self.dead_letters.given_back([each for each in (held if positions is None else positions) if each in held])
            counted = False
        self.dispatcher.redeliver(consumer.member, positions, counted=counted)
        if self.store is not None:
            self.store.touched()
        self.wake()

    def held(self, consumer: Consumer, ledger_id: int, entries: bytes) -> list[Position]:
        """Those of the set that the consumer holds. InvalidRequest."""
        return inside(consumer.member.outstanding, ledger_id, _entries_of(entries))

    async def durable_now(self) -> None:
        """Returns when what was acknowledged up to now survives a crash."""
        if self.store is not None:
            await self.store.durable()

    async def seek(self, mark: Position, acked_indexes: int = 0, *, keep: Consumer | None = None) -> None:
        """Starts over behind `mark` (and behind so many messages of the next entry); durable when it returns.

        The other consumers are disconnected: what they hold has no meaning any more.
        """
        for consumer in list(self.consumers.values()):
            if consumer is not keep:
                self.disconnect(consumer, Unavailable(f"the subscription {self.name!r} was moved; subscribe again"))
        self.cursor.seek(mark)
        self._leave_out()
        if acked_indexes:
            self.cursor.ack_batch(self._log.shape.after(mark), range(acked_indexes))
        self.dispatcher.seek()
        self._forget_read()
        await self.durable_now()
        self.wake()

    # ------------------------------------------------------------------ ending
    def stop(self) -> None:
        """Nothing more is handed out. The consumers were told before."""
        self._closed = True
        if self.dead_letters is not None:
            self.dead_letters.stop()
        if self.delayed is not None:
            self.delayed.stop()
        for reading in (self._reading, self._reading_again):
            if reading is not None:
                reading.cancel()
        for consumer in self.consumers.values():
            if consumer.waiting is not None:
                consumer.waiting.cancel()

    async def close(self) -> None:
        if self.delayed is not None:
            await self.delayed.close()
        self.stop()
        readings = [reading for reading in (self._reading, self._reading_again) if reading is not None]
        await asyncio.gather(*readings, return_exceptions=True)
        if self.store is not None:
            await self.store.close()


def _entries_of(data: bytes) -> BitMap:
    try:
        return BitMap.deserialize(data)
    except (ValueError, IndexError, MemoryError) as error:
        raise InvalidRequest(f"{len(data)} bytes are not a set of entries: {error}") from error


def _bits_of(acked: wire.AckedEntry) -> int:
    """Those of its messages that are acknowledged. InvalidRequest: more than an entry can have."""
    if len(acked.batch_bits) > BATCH_INDEXES_MAX // 8:
        raise InvalidRequest(f"{len(acked.batch_bits)} bytes of batch indexes are more than an entry can have")
    bits = int.from_bytes(acked.batch_bits, "little")
    for index in acked.batch_indexes:
        if index < BATCH_INDEXES_MAX:
            bits |= 1 << index
    return bits


def _stretch(positions: Sequence[Position]) -> tuple[Position, Position]:
    """The first ones of one ledger that stand so close that they are read at once."""
    first = last = positions[0]
    for position in positions:
        if position[0] != first[0] or position[1] - last[1] > GAP_ENTRIES_MAX:
            break
        last = position
    return first, last


def _limits(applied: Applied) -> Limits:
    return Limits(applied.max_unacked_per_consumer, applied.max_unacked_per_subscription)


def _type_name(type_: int | None) -> str:
    return wire.Subscribe.Type.Name(type_).capitalize() if type_ is not None else "of no type"


