"""One partition's consumer: a stream, permits, and what was delivered and not acknowledged.

**Delivery.** Entries are taken apart when they come and their messages put into the `inbox`, which several partitions
may share. Messages that the broker knows to be acknowledged, and those before a reader's position, are left out.
A damaged entry becomes a message that raises ChecksumError when it is taken: seen once, never skipped silently, not
acknowledged.

**Acknowledging** is at least once (client/consume/acknowledgements.py). `acknowledge`, `negative_acknowledge` and
`taken` may be called from any thread; all else belongs to the event loop.

**Reconnect.** The stream is opened again after a new lookup, with back-off; what is in the inbox is thrown away,
because the broker delivers everything unacknowledged again. A reader starts behind the last message that was taken.
Guards: tests/client/consume/test_partition_consumer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

from pyroaring import BitMap

from ...proto import wire_pb2 as wire
from ...proto.entry import declared_messages
from ...proto.errors import ConnectionLost, CorruptEntry, MagnetarError, SubscriptionNotFound, TopicNotFound, from_wire
from ...proto.names import Position, TopicName
from ...runtime.network import EndOfStream, Stream, rpc
from ..common.errors import AlreadyClosed, OperationNotSupported, PulsarException, translate
from ..common.guard import run, spawn
from ..common.receive_memory import Claim
from ..common.state import State
from ..connect.connections import Connections
from ..connect.handshake import FINAL, introduce, subscribe_request
from ..connect.requests import Requests
from ..core.permits import Permits
from ..core.redelivery import EntrySets
from ..model.message import DamagedMessage, Message, ReceivedEntry
from ..model.message_id import MessageId
from ..model.schema import Schema
from ..model.settings import ConsumerSettings, ConsumerType
from ..model.start import Start, at_message
from .acknowledgements import Acknowledging, Pending, acks_of, entry_sets
from .chunk_assembler import Assembling
from .dead_letters import Letters, is_dead_letter
from .deliveries import is_removed, messages_of, share_permits
from .receiver_queue import Inbox

_LOG = logging.getLogger("magnetar.client")


class PartitionConsumer:
    def __init__(
        self, connections: Connections, topic: TopicName, subscription: str, settings: ConsumerSettings, inbox: Inbox,
        *, queue_size: int, start: Start | None = None, letters: Letters | None = None,
    ) -> None:  # fmt: skip
        self.topic = topic
        self.schema: Schema = settings.schema
        self.state = State.OPENING
        self.name = settings.consumer_name or ""
        self.end_of_topic = False
        self.last_taken: MessageId | None = None  # readers only
        self.delivered = 0  # messages put into the inbox
        self.compacted_end_index = 0  # reading compacted: messages in front of it may have been removed
        self.letters = letters
        self.on_connected: Callable[[PartitionConsumer], None] | None = None
        self.on_gone: Callable[[PartitionConsumer], None] | None = None  # its topic is gone: it leaves alone
        self.active = settings.consumer_type is not ConsumerType.Failover  # until the broker says so
        self.on_active: Callable[[int, bool], None] | None = None
        self._connections = connections
        self._subscription = subscription
        self._settings = settings
        self._inbox = inbox
        self._instance = connections.world.rng.randbytes(8).hex()  # our next connection replaces our last one
        self._start = start  # readers only: what lies before it is left out
        self._durable = start is None
        self._claim = Claim(connections.memory, queue_size)
        self._permits = Permits(self._claim.window)
        self._permits_lock = Lock()
        self._assembling = Assembling(settings, self._acknowledge_entry, self._give_back_entry, self._broke)
        self._acking = Acknowledging(
            settings, self._send, lambda: self.state is State.CONNECTED, self._broke, self._assembling.other_places
        )
        self._times_out = self._acking.times_out
        self._granted = 0
        self._streams = 0  # how many there were
        self._came = 0  # permits charged by what is being received
        self._wake_scheduled = False
        self._loop = asyncio.get_running_loop()
        self._stream: Stream[Any, Any] | None = None
        self._requests = Requests()
        self._seeks: dict[int, MessageId | int] = {}  # the one seek under way, by its request
        self._time_ms: int | None = None  # where a reader is that was sent to a time and has read nothing since
        self._first_permits = 0  # of a new stream, granted when it is there again
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._reconnected: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._error: PulsarException | None = None
        self._unsubscribed = False
        self._delivered_before = 0  # this stream
        self._begun: Position | None = None  # the first entry of what was begun, or not read, when the stream broke

    # ------------------------------------------------------------------------------ from any thread
    def taken(self, message: Message) -> None:
        """The last message of an entry (with ack time-outs: any message) was taken from the inbox."""
        with self._permits_lock:
            if message.entry.stream == self._streams:  # else they died with it
                self._granted += self._permits.used(message.permits)
            message.permits = -message.permits  # given, and still the last of its entry
        if self._times_out:
            self._acking.taken(message)
        if not self._wake_scheduled and (self._granted or self._times_out):
            self._wake()
        if isinstance(message, DamagedMessage):
            raise message.error()

    def interrupted(self) -> None:
        """Ctrl-C came into `taken`, anywhere: what it left is attended to."""
        self._wake()

    def acknowledge(self, which: Pending) -> None:
        for each in self._assembling.with_chunks(which):
            self._acknowledge_entry(each)

    def acknowledge_received(self, message: Message) -> None:
        """The same of a message of ours, each of which comes here; raises what ended the consumer."""
        if self._error is not None:
            self.raise_if_closed()
        if message.entry.chunks:
            self.acknowledge(message)
        elif self._acking.acknowledge(message) and not self._wake_scheduled:
            self._wake()

    def _acknowledge_entry(self, which: Pending) -> None:
        if self._acking.acknowledge(which) and not self._wake_scheduled:
            self._wake()

    def negative_acknowledge(self, which: Pending) -> None:
        for each in self._assembling.with_chunks(which, again=True):
            self._give_back_entry(each)

    def _give_back_entry(self, which: Pending) -> None:
        self._acking.negative_acknowledge(which)
        if not self._wake_scheduled:
            self._wake()

    def acknowledge_read(self, message: Message) -> None:
        """A reader took the last message of an entry: its cursor may go on. It is grouped like any ack."""
        entry = message.entry
        self.acknowledge(MessageId(-1, entry.ledger_id, entry.entry_id, _chunks=entry.chunks))

    @property
    def start(self) -> Start | None:
        """Where delivery began; None: at a place that only the broker knows."""
        return self._start

    def raise_if_closed(self) -> None:
        if self._error is not None:
            raise type(self._error)(self._error.message) from self._error

    def _wake(self) -> None:
        self._wake_scheduled = True
        self._loop.call_soon_threadsafe(run, self._attend, self._broke)

    # ------------------------------------------------------------------------------ in the loop: what came in
    def _attend(self) -> None:
        """Takes all that the application left for us; sends what is due and arms timers for the rest."""
        self._wake_scheduled = False
        with self._permits_lock:
            granted, self._granted = self._granted, 0
        if granted:
            self._send(wire.ConsumeRequest(permits=granted))
        self._acking.attend()

    def acknowledge_cumulative(self, which: Pending) -> None:
        """In the event loop. Up to the first message in chunks that is not acknowledged and ends behind it."""
        place = which.entry.position if isinstance(which, Message) else which.position()
        floor = self._assembling.chunks.floor(place)
        self._assembling.chunks.acknowledged_up_to(floor)
        if floor == place:
            self._acking.acknowledge_cumulative(which)
        elif floor.entry_id >= 0:
            self._acking.acknowledge_cumulative(MessageId(-1, *floor))
        self._attend()

    async def acknowledge_durably(self, which: Iterable[Pending], *, cumulative: bool = False) -> None:
        """Returns when it survives a crash of all processes; sent again over the next stream when this one breaks."""
        every = [each for one in which for each in self._assembling.with_chunks(one)]
        if cumulative:
            for each in every:
                place = each.entry.position if isinstance(each, Message) else each.position()
                if self._assembling.chunks.floor(place) != place:
                    raise OperationNotSupported(
                        f"a message in chunks begins before {place} and is not acknowledged yet: acknowledge that first"
                    )
                self._assembling.chunks.acknowledged_up_to(place)
        group = self._acking.take_over(every, cumulative=cumulative)
        for ack in acks_of(group):

            def request(request_id: int, ack: wire.Ack = ack) -> wire.ConsumeRequest:
                ack.request_id = request_id
                return wire.ConsumeRequest(ack=ack)

            await self._request(request)

    def redeliver_unacknowledged(self) -> None:
        """In the event loop: what was delivered and not acknowledged comes again; what waits here is thrown away."""
        self._acking.gather()
        self._acking.send()
        untouched = self._untouched()
        if untouched:
            self._send(wire.ConsumeRequest(redeliver=wire.Redeliver(ledgers=entry_sets(untouched), uncounted=True)))
        self._drop_queue(give_back=True)
        self._send(wire.ConsumeRequest(redeliver=wire.Redeliver()))

    def _untouched(self) -> EntrySets:
        """Entries that wait here whole: the application has seen nothing of them; they do not count as given back."""
        found: EntrySets = {}
        for message in self._inbox.messages.copy():
            entry = message.entry
            if entry.lane is self and message.batch_index == entry.first_index:
                found.setdefault(entry.ledger_id, BitMap()).add(entry.entry_id)
        return found

    def _drop_queue(self, *, give_back: bool) -> None:
        freed = self._inbox.drop(lambda message: message.entry.lane is self)
        self._acking.delivered_again()
        self._assembling.chunks.clear()
        if give_back and freed:
            self._give_back(freed)

    def resize(self, queue_size: int) -> None:
        """Its share of the room that all partitions have together."""
        self._claim.want(queue_size)
        with self._permits_lock:
            self._permits.resize(self._claim.window)

    def retire(self) -> None:
        """What it delivered and nobody took is thrown away, and its end is nobody else's."""
        self._drop_queue(give_back=False)
        self._inbox = Inbox()

    def deliver_to(self, inbox: Inbox) -> None:
        """From now on; what waits goes there too."""
        waiting, self._inbox = self._inbox.messages, inbox
        inbox.put(waiting)

    def _send(self, request: wire.ConsumeRequest) -> None:
        """Nothing is lost when there is no stream: permits begin anew and unacknowledged entries come again."""
        if self._stream is not None and self.state is State.CONNECTED:
            try:
                self._stream.send_nowait(request)
            except MagnetarError as error:
                _LOG.debug("%s: %s", self.topic, error)  # the reader of the stream finds the same and opens it again

    # ------------------------------------------------------------------------------ in the loop: deliveries
    def _receive(self, replies: Iterable[wire.ConsumeReply]) -> None:
        """The messages of all of them are put into the inbox at once: whoever waits for one is woken once."""
        came: list[Message] = []
        came_bytes = came_messages = 0
        try:
            for reply in replies:
                kind = reply.WhichOneof("kind")
                if kind == "deliveries":
                    several = reply.deliveries
                    ledger_id = several.ledger_id
                    for entry_id, entry in zip(several.entry_ids, several.entries, strict=True):
                        came_bytes += len(entry)
                        came += self._open(entry, Position(ledger_id, entry_id))
                elif kind == "delivery":
                    one = reply.delivery
                    entry = one.entry  # protobuf makes a copy of it
                    came_bytes += len(entry)
                    position = Position(one.ledger_id, one.entry_id)
                    came += self._open(entry, position, one.redelivery_count, one.acked_batch_indexes)
                else:
                    came_messages += self._came
                    with self._permits_lock:
                        self._permits.came(self._came)
                        self._came = 0
                    self._inbox.put(came)
                    came = []
                    self._hear(kind, reply)
        finally:
            came_messages += self._came
            with self._permits_lock:
                self._permits.came(self._came)
                self._came = 0
            if came:
                self._inbox.put(came)
        permits = self._permits
        if self._claim.came(came_bytes, came_messages, permits.at_broker + permits.held):
            with self._permits_lock:
                permits.resize(self._claim.window)
            self._give_back(0)

    def _hear(self, kind: str | None, reply: wire.ConsumeReply) -> None:
        match kind:
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
                if self.on_active is not None:
                    self.on_active(self.topic.partition, reply.active)
            case _:
                raise ConnectionLost(f"the broker said {kind} out of turn")

    def _answer(self, request_id: int, error: wire.Error | None, result: object) -> None:
        if error is None and request_id in self._seeks and self._requests.expects(request_id):
            self._sought(self._seeks[request_id])  # now: the next reply may be a delivery from the new place
        elif error is not None and self._first_permits and request_id in self._seeks:
            raise ConnectionLost(f"the reader did not come back to its place: {from_wire(error).message}")
        self._requests.answer(request_id, error, result)

    def _open(
        self, entry: bytes, position: Position, redelivered: int = 0, acked: Sequence[int] = ()
    ) -> Sequence[Message]:
        """Those of its messages that the application is to see."""
        try:
            received, wanted = messages_of(self, entry, position, self._start, redelivered, acked)
            if wanted is None:
                wanted = self._take_chunk(received, entry)
            else:
                self._assembling.passed(received)
        except CorruptEntry as error:
            _LOG.error("%s: entry %s is damaged: %s", self.topic, position, error)
            damaged = DamagedMessage(self, position, error, max(1, declared_messages(entry) - len(acked)))
            damaged.entry.stream = self._streams
            self._came += damaged.permits
            return [damaged]
        received.stream = self._streams
        self._came += received.charged
        if self._settings.is_read_compacted:
            wanted = self._without_removed(received, wanted)
        if not wanted:
            self._give_back(received.charged)
            return ()
        share_permits(received, wanted, of_each=self._times_out)
        if self.letters is not None and self.letters.is_dead(redelivered) and not is_dead_letter(wanted[0]):
            self.letters.bury_soon(wanted)
            return ()
        self.delivered += len(wanted)
        return wanted

    def _take_chunk(self, received: ReceivedEntry, entry: bytes) -> list[Message]:
        """The message that it completes, if it does. CorruptEntry."""
        start = self._start
        if start is not None and not start.wants_chunk(received.position):
            return []
        message = self._assembling.take(received, entry)
        if message is None or (start is not None and start.before(received.position, 0)):
            return []
        return [message]

    def _without_removed(self, received: ReceivedEntry, messages: list[Message]) -> list[Message]:
        """What compaction took out of a batch is not shown, and counts as acknowledged."""
        shown = [message for message in messages if not is_removed(message)]
        if len(shown) < len(messages) and self._durable:
            for message in messages:
                if is_removed(message):
                    self.acknowledge(message)
        return shown

    def _give_back(self, messages: int) -> None:
        """Permits of messages that do not reach the application."""
        with self._permits_lock:
            self._granted += self._permits.used(messages)
        if self._granted:
            self._attend()

    # ------------------------------------------------------------------------------ requests
    async def _request(self, make: Callable[[int], wire.ConsumeRequest]) -> Any:
        """Sends a request and waits for its answer; once more over the next stream when this one breaks."""

        async def attempt() -> Any:
            self.raise_if_closed()
            await self._connected()
            request_id, answer = self._requests.new()
            self._send(make(request_id))
            try:
                return await answer
            finally:
                self._requests.forget(request_id)

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
        """Everything that was delivered before is forgotten; what comes next is from there.

        A subscription that lasts is moved to exactly that message (`at_message`) and nothing is left out here: others
        may move its cursor back at any time. A reader's place is its own: it leaves out what lies before (`Start`).
        """
        place = to
        if isinstance(to, MessageId) and (self._durable or self._settings.start_message_id_inclusive):
            place = at_message(to, inclusive=self._settings.start_message_id_inclusive)

        def request(request_id: int) -> wire.ConsumeRequest:
            self._seeks = {request_id: to}
            seek = wire.Seek(request_id=request_id)
            if isinstance(place, MessageId):
                seek.message_id.CopyFrom(place.to_wire())
            else:
                seek.publish_time_ms = place
            return wire.ConsumeRequest(seek=seek)

        self._acking.forget_acknowledged()
        await self._request(request)

    def _sought(self, to: MessageId | int) -> None:
        self._seeks = {}
        self._drop_queue(give_back=True)
        self._acking.forget()
        self.last_taken = self._begun = None
        self._time_ms = None if self._durable or isinstance(to, MessageId) else to
        if self._first_permits:
            first, self._first_permits = self._first_permits, 0
            self._send(wire.ConsumeRequest(permits=first))
        if self._durable or not isinstance(to, MessageId):
            self._start = None
        else:
            everywhere = to in (MessageId.earliest, MessageId.latest)
            self._start = Start(to, self._settings.start_message_id_inclusive and not everywhere)

    async def unsubscribe(self) -> None:
        await self._request(lambda id_: wire.ConsumeRequest(unsubscribe=id_))
        self._unsubscribed = True  # there is nothing left to leave

    # ------------------------------------------------------------------------------ the connection
    async def open(self) -> None:
        """Raises when it cannot subscribe: at once for good reasons, else at the operation's deadline."""
        self._task = spawn(self._run(), f"consumer {self.topic}", self._broke)
        await asyncio.shield(self._opened)

    async def _run(self) -> None:
        backoff = self._connections.backoff()
        try:
            await self._connections.retry(self._connect)
        except MagnetarError as error:
            self._finish(translate(error))
            return
        if not self._opened.done():
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
                if isinstance(error, TopicNotFound) and self.on_gone is not None:
                    self.retire()
                    self._finish(translate(error))
                    self.on_gone(self)
                    return
                deleting = isinstance(error, SubscriptionNotFound) and self.on_gone is not None  # maybe its topic too
                if isinstance(error, FINAL) and not deleting:
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
        first = self._assembling.chunks.first()
        if first is not None or self.delivered > self._delivered_before:  # else chunks did not come again yet
            self._begun = first
        self._drop_queue(give_back=False)
        self._requests.fail(ConnectionLost("the connection broke with the request under way"))

    def _start_again(self) -> Start:
        """A reader goes on behind what it read."""
        if self.last_taken is not None:
            self._start = Start(self.last_taken, False, self._begun)
        return self._start or Start(MessageId.latest, False)

    async def _connect(self) -> None:
        channel = await self._connections.owner(self.topic)
        start = None if self._durable else self._start_again()
        request = subscribe_request(self.topic, self._subscription, self.name, self._instance, self._settings, start)
        stream = channel.stream(rpc("Broker", "Consume"))
        first, *replies = await introduce(stream, request, "subscribed")
        self.name = first.subscribed.consumer_name or self.name
        self.compacted_end_index = first.subscribed.compacted_end_index
        self._stream = stream
        self._delivered_before = self.delivered
        self.state = State.CONNECTED
        self._drop_queue(give_back=False)
        self._acking.gather()
        self._acking.send()
        with self._permits_lock:
            self._granted = 0
            self._streams += 1
            granted = self._permits.start()
        self._first_permits = 0
        if self._time_ms is not None and self.last_taken is None:
            self._seek_again(self._time_ms, granted)
        else:
            self._send(wire.ConsumeRequest(permits=granted))
        if self._reconnected is not None:
            self._reconnected.set_result(None)
            self._reconnected = None
        if self.on_connected is not None:
            self.on_connected(self)
        self._receive(replies)

    def _seek_again(self, time_ms: int, granted: int) -> None:
        """A reader was sent to a time and its stream broke: only the broker knows that place. Nothing comes before."""
        request_id, answer = self._requests.new()
        answer.add_done_callback(lambda over: over.cancelled() or over.exception())
        self._seeks, self._first_permits = {request_id: time_ms}, granted
        self._send(wire.ConsumeRequest(seek=wire.Seek(request_id=request_id, publish_time_ms=time_ms)))

    async def _serve(self) -> None:
        assert self._stream is not None, "a connected consumer has a stream"
        while True:
            try:
                replies = await self._stream.receive()
            except EndOfStream as error:
                raise ConnectionLost("the broker ended the stream") from error
            self._receive(replies)

    # ------------------------------------------------------------------------------ the end
    def _finish(self, error: PulsarException) -> None:
        self.state = State.CLOSED
        if self._error is None:
            self._error = error
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # who opened it may be gone
        self._claim.leave()
        self._acking.stop()
        self._assembling.stop()
        self._requests.fail(self._error)
        if self._reconnected is not None:
            self._reconnected.set_result(None)
            self._reconnected = None
        self._inbox.end(self._error)

    def abort(self) -> None:
        """Ends at once, without a word to the broker: acks that wait are not sent."""
        self._end(AlreadyClosed("the client was shut down"))

    def _broke(self, error: Exception) -> None:
        """Something failed that cannot fail: everybody who waits gets that (client/common/guard.py)."""
        self._end(translate(error))

    def _end(self, error: PulsarException) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel()
        self._finish(error)

    async def close(self) -> None:
        """Sends the acks that wait and leaves in order: when this returns the broker has them and forgot us."""
        if self.state is State.CONNECTED and not self._unsubscribed:
            try:
                async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                    await self._leave()
            except (MagnetarError, TimeoutError) as error:
                _LOG.info("%s: the consumer did not leave in order: %s", self.topic, error)
            except BaseException:  # whoever closes it was interrupted: then it ends at once
                self._end(AlreadyClosed("the consumer is closed"))
                raise
        task, self._task = self._task, None
        try:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        finally:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.cancel()
            self._finish(AlreadyClosed("the consumer is closed"))

    async def _leave(self) -> None:
        self._acking.gather()
        if self._acking.pending:
            acked_id, acked = self._requests.new()
            self._acking.send(acked_id)
            await acked
        close_id, closed = self._requests.new()
        self._send(wire.ConsumeRequest(close=close_id))
        await closed

    def check(self) -> None:
        self._permits.check()
        self._acking.check()
