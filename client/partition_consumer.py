"""One partition's consumer: a stream, permits, and what was delivered and not acknowledged.

**Delivery.** Entries are taken apart when they come and their messages put into the `inbox`, which several partitions
may share. Messages that the broker knows to be acknowledged, and those before a seek or start position, are left out.
A damaged entry becomes a message that raises ChecksumError when it is taken: seen once, never skipped silently, not
acknowledged.

**Acknowledging** is at least once: acks are grouped (100 ms, 1000), and those not sent when the stream breaks are sent
over the next one. `acknowledge`, `negative_acknowledge` and `taken` may be called from any thread; all else belongs to
the event loop.

**Reconnect.** The stream is opened again after a new lookup, with back-off; what is in the inbox is thrown away,
because the broker delivers everything unacknowledged again. A reader starts behind the last message that was taken.
Guards: tests/client/test_partition_consumer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from threading import Lock
from typing import Any

from ..proto import wire_pb2 as wire
from ..proto.entry import decode_batch, parse_header, split_broker_part
from ..proto.errors import (
    ConnectionLost,
    CorruptEntry,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    Unauthorized,
    from_wire,
)
from ..proto.names import Position, TopicName
from ..runtime.network import EndOfStream, Stream, rpc
from .connections import Connections
from .core.acks import GROUP_MESSAGES, GROUP_S, AckedEntry, AckTracker
from .core.permits import Permits
from .core.redelivery import RedeliveryTracker
from .errors import AlreadyClosed, PulsarException, translate
from .inbox import Inbox
from .message import DamagedMessage, Message, ReceivedEntry
from .message_id import MessageId
from .schema import Schema
from .settings import ConsumerSettings
from .start import Start

_LOG = logging.getLogger("magnetar.client")
_FINAL = (NotAllowed, NotFound, Unauthorized, InvalidRequest)
NACK_TICK_S = 0.25
UNACKED_TICK_S = 1.0
Pending = Message | MessageId


class State(Enum):
    OPENING = auto()
    CONNECTED = auto()
    RECONNECTING = auto()
    CLOSED = auto()


class PartitionConsumer:
    def __init__(
        self, connections: Connections, topic: TopicName, subscription: str, settings: ConsumerSettings, inbox: Inbox,
        *, queue_size: int, start: Start | None = None,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.schema: Schema = settings.schema
        self.state = State.OPENING
        self.name = settings.consumer_name or ""
        self.end_of_topic = False
        self.last_taken: MessageId | None = None  # readers only
        self.delivered = 0  # messages put into the inbox
        self.active = True
        self._connections = connections
        self._subscription = subscription
        self._settings = settings
        self._inbox = inbox
        self._instance = connections.world.rng.randbytes(8).hex()  # our next connection replaces our last one
        self._start = start
        self._durable = start is None
        self._permits = Permits(queue_size)
        self._permits_lock = Lock()
        self._acks = AckTracker()
        self._nacks = RedeliveryTracker(settings.negative_ack_redelivery_delay_ms / 1000, NACK_TICK_S)
        timeout_ms = settings.unacked_messages_timeout_ms
        self._unacked = RedeliveryTracker(timeout_ms / 1000, UNACKED_TICK_S) if timeout_ms else None
        self._acked_in: deque[Pending] = deque()
        self._nacked_in: deque[Pending] = deque()
        self._taken_in: deque[Position] = deque()
        self._granted = 0
        self._wake_scheduled = False
        self._ack_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._stream: Stream[Any, Any] | None = None
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._last_request = 0
        self._seeks: dict[int, MessageId | int] = {}  # the one seek under way, by its request
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._reconnected: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: PulsarException | None = None
        self._unsubscribed = False

    # ------------------------------------------------------------------------------ from any thread
    def taken(self, message: Message) -> None:
        """The last message of an entry (with ack time-outs: any message) was taken from the inbox."""
        with self._permits_lock:
            self._granted += self._permits.used(message.permits)
        if self._unacked is not None:
            self._taken_in.append(message.entry.position)
        if not self._wake_scheduled and (self._granted or self._unacked is not None):
            self._wake()
        if isinstance(message, DamagedMessage):
            raise message.error()

    def acknowledge(self, which: Pending) -> None:
        acked = self._acked_in
        acked.append(which)
        if not self._wake_scheduled and (self._ack_timer is None or len(acked) >= GROUP_MESSAGES):
            self._wake()

    def negative_acknowledge(self, which: Pending) -> None:
        self._nacked_in.append(which)
        if not self._wake_scheduled:
            self._wake()

    def acknowledge_read(self, message: Message) -> None:
        """A reader took the last message of an entry: its cursor may go on. It is grouped like any ack."""
        self.acknowledge(MessageId(-1, message.entry.ledger_id, message.entry.entry_id))

    @property
    def start(self) -> Start | None:
        """Where delivery began; None: at a place that only the broker knows."""
        return self._start

    def raise_if_closed(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message) from self._error

    def _wake(self) -> None:
        self._wake_scheduled = True
        self._loop.call_soon_threadsafe(self._attend)

    # ------------------------------------------------------------------------------ in the loop: what came in
    def _attend(self) -> None:
        """Takes all that the application left for us; sends what is due and arms timers for the rest."""
        self._wake_scheduled = False
        with self._permits_lock:
            granted, self._granted = self._granted, 0
        if granted:
            self._send(wire.ConsumeRequest(permits=granted))
        now = self._loop.time()
        if self._unacked is not None:
            while self._taken_in:
                self._unacked.watch(self._taken_in.popleft(), now)
        self._gather_acks()
        while self._nacked_in:
            self._nacks.watch(_place(self._nacked_in.popleft())[0], now)
        if self._acks.pending >= GROUP_MESSAGES:
            self._send_acks()
        elif self._acks.pending and self._ack_timer is None:
            self._ack_timer = self._loop.call_later(GROUP_S, self._ack_time)
        self._arm_tick()

    def _gather_acks(self) -> None:
        acked, tracker, unacked, nacks = self._acked_in, self._acks, self._unacked, self._nacks
        for _ in range(len(acked)):
            position, index, size = _place(acked.popleft())
            tracker.acknowledge(position, index, size)
            if unacked is not None:
                unacked.forget(position)
            if nacks and index < 0:
                nacks.forget(position)

    def _ack_time(self) -> None:
        self._ack_timer = None
        self._gather_acks()
        self._send_acks()

    def _send_acks(self, request_id: int = 0) -> bool:
        """Sends all that is gathered, when there is a stream; whether anything was sent."""
        if self.state is not State.CONNECTED or not self._acks.pending:
            return False
        group = self._acks.take()
        if group.cumulative is not None:
            self._send_ack(wire.Ack.CUMULATIVE, [group.cumulative], 0 if group.individual else request_id)
        if group.individual:
            self._send_ack(wire.Ack.INDIVIDUAL, group.individual, request_id)
        return True

    def _send_ack(self, kind: Any, entries: list[AckedEntry], request_id: int) -> None:
        ack = wire.Ack(kind=kind, request_id=request_id)
        for entry in entries:
            ack.entries.add(
                ledger_id=entry.position.ledger_id, entry_id=entry.position.entry_id, batch_indexes=entry.indexes
            )
        self._send(wire.ConsumeRequest(ack=ack))

    def _arm_tick(self) -> None:
        tick_s = NACK_TICK_S if self._nacks else UNACKED_TICK_S if self._unacked else 0.0
        if tick_s and self._tick_timer is None:
            self._tick_timer = self._loop.call_later(tick_s, self._tick)

    def _tick(self) -> None:
        self._tick_timer = None
        now = self._loop.time()
        due = self._nacks.take(now)
        if self._unacked is not None:
            due += self._unacked.take(now)
        if due and self.state is State.CONNECTED:
            self._gather_acks()
            self._send_acks()
            request = wire.Redeliver()
            for position in due:
                request.entries.add(ledger_id=position.ledger_id, entry_id=position.entry_id)
            self._send(wire.ConsumeRequest(redeliver=request))
        self._arm_tick()

    def acknowledge_cumulative(self, which: Pending) -> None:
        """In the event loop."""
        self._gather_acks()
        position, index, size = _place(which)
        self._acks.acknowledge_cumulative(position, index, size)
        if self._unacked is not None:
            self._unacked.forget_up_to(position)
        self._attend()

    def redeliver_unacknowledged(self) -> None:
        """In the event loop: what was delivered and not acknowledged comes again; what waits here is thrown away."""
        self._gather_acks()
        self._send_acks()
        self._drop_queue(give_back=True)
        self._send(wire.ConsumeRequest(redeliver=wire.Redeliver()))

    def _drop_queue(self, *, give_back: bool) -> None:
        freed = 0

        def mine(message: Message) -> bool:
            nonlocal freed
            if message.entry.lane is not self:
                return False
            freed += message.permits
            return True

        self._inbox.drop(mine)
        if self._unacked is not None:
            self._unacked.clear()
        if give_back and freed:
            with self._permits_lock:
                self._granted += self._permits.used(freed)
            self._attend()

    def _send(self, request: wire.ConsumeRequest) -> None:
        """Nothing is lost when there is no stream: permits begin anew and unacknowledged entries come again."""
        if self._stream is not None and self.state is State.CONNECTED:
            try:
                self._stream.send_nowait(request)
            except MagnetarError as error:
                _LOG.debug("%s: %s", self.topic, error)  # the reader of the stream finds the same and opens it again

    # ------------------------------------------------------------------------------ in the loop: deliveries
    def _receive(self, reply: wire.ConsumeReply) -> None:
        match reply.WhichOneof("kind"):
            case "delivery":
                self._deliver(reply.delivery)
            case "done":
                self._answer(reply.done.request_id, reply.done.error if reply.done.HasField("error") else None, None)
            case "last":
                self._answer(reply.last.request_id, None, reply.last)
            case "closed":
                raise from_wire(reply.closed)
            case "end_of_topic":
                self.end_of_topic = True
            case "active":
                self.active = reply.active
            case kind:
                raise ConnectionLost(f"the broker said {kind} out of turn")

    def _answer(self, request_id: int, error: wire.Error | None, result: object) -> None:
        future = self._requests.pop(request_id, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(from_wire(error))
            return
        if request_id in self._seeks:
            self._sought(self._seeks[request_id])  # now: the next reply may be a delivery from the new place
        future.set_result(result)

    def _deliver(self, delivery: wire.Delivery) -> None:
        entry = delivery.entry
        try:
            index = split_broker_part(entry)[0]
            header = parse_header(entry)
            items = decode_batch(header, entry)
        except CorruptEntry as error:
            _LOG.error("%s: entry %d:%d is damaged: %s", self.topic, delivery.ledger_id, delivery.entry_id, error)
            self._inbox.put([DamagedMessage(self, Position(delivery.ledger_id, delivery.entry_id), error)])
            return
        received = ReceivedEntry(
            self, header, delivery.ledger_id, delivery.entry_id, index, delivery.redelivery_count
        )
        if header.batched:
            messages = [Message(received, item[0], item[1], at) for at, item in enumerate(items)]
        else:
            messages = [Message(received, items[0][0], items[0][1], -1)]
        wanted = self._wanted(received, messages, delivery.acked_batch_indexes)
        if not wanted:
            self._skipped(received)
            return
        if self._unacked is not None:
            for message in wanted:
                message.permits = 1
            wanted[-1].permits += len(messages) - len(wanted)
        else:
            wanted[-1].permits = len(messages)
        self.delivered += len(wanted)
        self._inbox.put(wanted)

    def _wanted(self, received: ReceivedEntry, messages: list[Message], acked: Any) -> list[Message]:
        if acked:
            gone = frozenset(acked)
            messages = [message for message in messages if message.batch_index not in gone]
        start = self._start
        if start is not None and received.position <= start.id.position():
            position = received.position
            messages = [message for message in messages if not start.before(position, max(0, message.batch_index))]
        return messages

    def _skipped(self, received: ReceivedEntry) -> None:
        with self._permits_lock:
            self._granted += self._permits.used(received.size)
        if self._granted:
            self._attend()

    # ------------------------------------------------------------------------------ requests
    async def _request(self, make: Callable[[int], wire.ConsumeRequest]) -> Any:
        """Sends a request and waits for its answer; once more over the next stream when this one breaks."""

        async def attempt() -> Any:
            self.raise_if_closed()
            await self._connected()
            self._last_request += 1
            request_id = self._last_request
            future: asyncio.Future[Any] = self._loop.create_future()
            self._requests[request_id] = future
            self._send(make(request_id))
            try:
                return await future
            finally:
                self._requests.pop(request_id, None)

        return await self._connections.retry(attempt)

    async def _connected(self) -> None:
        while self.state is not State.CONNECTED:
            self.raise_if_closed()
            if self._reconnected is None:
                self._reconnected = self._loop.create_future()
            await asyncio.shield(self._reconnected)

    async def last_message_id(self) -> wire.LastMessageId:
        reply: wire.LastMessageId = await self._request(lambda id_: wire.ConsumeRequest(last_message_id=id_))
        return reply

    async def seek(self, to: MessageId | int) -> None:
        """Everything that was delivered before is forgotten; what comes next is from there."""

        def request(request_id: int) -> wire.ConsumeRequest:
            self._seeks = {request_id: to}
            seek = wire.Seek(request_id=request_id)
            if isinstance(to, MessageId):
                seek.message_id.CopyFrom(to.to_wire())
            else:
                seek.publish_time_ms = to
            return wire.ConsumeRequest(seek=seek)

        self._acked_in.clear()
        self._acks.clear()
        await self._request(request)

    def _sought(self, to: MessageId | int) -> None:
        self._seeks = {}
        self._drop_queue(give_back=True)
        self._acked_in.clear()
        self._acks.clear()
        self._nacks.clear()
        self.last_taken = None
        if isinstance(to, MessageId) and to not in (MessageId.earliest, MessageId.latest):
            self._start = Start(to, self._settings.start_message_id_inclusive)
        elif isinstance(to, MessageId) and not self._durable:
            self._start = Start(to, False)
        else:
            self._start = None

    async def unsubscribe(self) -> None:
        await self._request(lambda id_: wire.ConsumeRequest(unsubscribe=id_))
        self._unsubscribed = True  # there is nothing left to leave

    # ------------------------------------------------------------------------------ the connection
    async def open(self) -> None:
        """Raises when it cannot subscribe: at once for good reasons, else at the operation's deadline."""
        self._task = self._loop.create_task(self._run(), name=f"consumer {self.topic}")
        await asyncio.shield(self._opened)

    async def _run(self) -> None:
        backoff = self._connections.backoff()
        try:
            await self._connections.retry(self._connect)
        except MagnetarError as error:
            self._finish(translate(error))
            self._opened.set_exception(translate(error))
            self._opened.exception()
            return
        self._opened.set_result(None)
        while True:
            try:
                if self.state is not State.CONNECTED:
                    async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                        await self._connect()
                    backoff.reset()
                await self._serve()
            except TimeoutError:
                _LOG.info("%s: no answer to the subscription", self.topic)
            except MagnetarError as error:
                if isinstance(error, _FINAL):
                    _LOG.warning("%s: the consumer is finished: %s", self.topic, error)
                    self._finish(translate(error))
                    return
                _LOG.info("%s: the consumer reconnects: %s", self.topic, error)
            except Exception as error:
                _LOG.exception("%s: the consumer failed", self.topic)
                self._finish(translate(error))
                return
            self._disconnected()
            await asyncio.sleep(backoff.next_s())

    def _disconnected(self) -> None:
        self.state = State.RECONNECTING
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
        self._drop_queue(give_back=False)
        for future in list(self._requests.values()):
            if not future.done():
                future.set_exception(ConnectionLost("the connection broke with the request under way"))
        self._requests.clear()

    def _subscribe_request(self) -> wire.ConsumeRequest:
        settings = self._settings
        subscribe = wire.Subscribe(
            topic=self.topic.full,
            subscription=self._subscription,
            type=int(settings.consumer_type),  # type: ignore[arg-type]
            initial_position=int(settings.initial_position),  # type: ignore[arg-type]
            consumer_name=self.name,
            durable=self._durable,
            properties=settings.properties,
            instance=self._instance,
        )
        if not self._durable:
            if self.last_taken is not None:
                self._start = Start(self.last_taken, False)
            start = self._start or Start(MessageId.latest, False)
            subscribe.start.CopyFrom(start.id.to_wire())
            # A message inside a batch: the broker sends the entry and we leave out what lies before.
            subscribe.start_inclusive = start.inclusive or start.id.batch_index() >= 0
        return wire.ConsumeRequest(subscribe=subscribe)

    async def _connect(self) -> None:
        channel = await self._connections.owner(self.topic)
        stream = channel.stream(rpc("Broker", "Consume"))
        try:
            stream.send_nowait(self._subscribe_request())
            try:
                replies = await stream.receive()
            except EndOfStream as error:
                raise ConnectionLost("the broker ended the stream before it answered the subscription") from error
            first = replies[0]
            if first.WhichOneof("kind") == "closed":
                raise from_wire(first.closed)
            if first.WhichOneof("kind") != "subscribed":
                raise ConnectionLost("the broker said something before it answered the subscription")
        except BaseException:
            stream.cancel()
            raise
        self.name = first.subscribed.consumer_name or self.name
        self._stream = stream
        self.state = State.CONNECTED
        self._drop_queue(give_back=False)
        self._gather_acks()
        self._send_acks()
        with self._permits_lock:
            self._granted = 0
            granted = self._permits.start()
        self._send(wire.ConsumeRequest(permits=granted))
        if self._reconnected is not None:
            self._reconnected.set_result(None)
            self._reconnected = None
        for reply in replies[1:]:
            self._receive(reply)

    async def _serve(self) -> None:
        assert self._stream is not None, "a connected consumer has a stream"
        while True:
            try:
                replies = await self._stream.receive()
            except EndOfStream as error:
                raise ConnectionLost("the broker ended the stream") from error
            for reply in replies:
                self._receive(reply)

    # ------------------------------------------------------------------------------ the end
    def _finish(self, error: PulsarException) -> None:
        self.state = State.CLOSED
        if self._error is None:
            self._error = error
        for timer in (self._ack_timer, self._tick_timer):
            if timer is not None:
                timer.cancel()
        self._ack_timer = self._tick_timer = None
        for future in list(self._requests.values()):
            if not future.done():
                future.set_exception(self._error)
        if self._reconnected is not None:
            self._reconnected.set_result(None)
            self._reconnected = None
        self._inbox.end(self._error)

    def abort(self) -> None:
        """Ends at once, without a word to the broker: acks that wait are not sent."""
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel()
        self._finish(AlreadyClosed("the client was shut down"))

    async def close(self) -> None:
        """Sends the acks that wait and leaves in order: when this returns the broker has them and forgot us."""
        if self.state is State.CONNECTED and not self._unsubscribed:
            try:
                async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                    await self._leave()
            except (MagnetarError, TimeoutError) as error:
                _LOG.info("%s: the consumer did not leave in order: %s", self.topic, error)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()
        self._finish(AlreadyClosed("the consumer is closed"))

    async def _leave(self) -> None:
        self._gather_acks()
        if self._acks.pending:
            self._last_request += 1
            acked: asyncio.Future[Any] = self._loop.create_future()
            self._requests[self._last_request] = acked
            self._send_acks(self._last_request)
            await acked
        self._last_request += 1
        closed: asyncio.Future[Any] = self._loop.create_future()
        self._requests[self._last_request] = closed
        self._send(wire.ConsumeRequest(close=self._last_request))
        await closed

    def check(self) -> None:
        self._permits.check()
        self._acks.check()
        self._nacks.check()


def _place(which: Pending) -> tuple[Position, int, int]:
    if isinstance(which, Message):
        entry = which.entry
        return entry.position, which.batch_index, entry.size
    return which.position(), which.batch_index(), which.batch_size()

