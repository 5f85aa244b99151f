"""The Connect stream: all producers and consumers of one client, as ids on it, each with a handler (handlers.py).

Frames are handled in the order of the stream, without a wait or a task for each: a publish is given to its topic's log
in the turn in which it arrived, and the answers of one turn are sent in one envelope. Of many frames the first half is
on its way to the disk before the rest is handled (SPLIT_BATCH_FRAMES_MIN). No handler waits for another one.

Bounds, besides those of a handler: `connection_ids` producers and consumers. DEFERRED_FRAMES_BYTES_MAX of frames that
wait for earlier work of their handlers: above that the stream is not read until the work is done, which is linear in
what was sent. CONSUMER_UNSENT_BYTES_MAX of unsent deliveries of one consumer, or CROWDED_CONSUMER_BYTES_MAX while more
than CONNECTION_CROWDED_BYTES are unsent in all or memory is tight (runtime/budget.py `CallerMemory`): above that the
consumer gets nothing, and the others of its subscription do. Publishes are bounded by their credit.
UNSENT_ANSWERS_BYTES_MAX of unsent answers: above that the stream is not read, as its client does not read either.

A frame that the client may not send is answered by `closed`, for its id alone: for an id that was never opened
(InvalidRequest), for one that is used twice (InvalidRequest), or of a kind that the handler does not accept.
Consecutive frames of an id without a handler are answered once.
Guarding tests: tests/broker/grpc/test_connect.py.

Also in this file, below its heading: the Broker service of proto/wire.proto (broker).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, InvalidRequest, MagnetarError, NotAllowed, to_wire
from ...proto.names import TopicName
from ...proto.schema import decode_version
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.network import CallContext, EndOfStream, Pieces, Stream
from ...runtime.tasks import Tasks, run_and_clean_up, run_to_end
from ..node.topic_manager import TopicManager
from ..session.topics import SchemaQueries, TopicOwner, TopicQueries
from . import handlers as read
from . import handlers as watch
from . import translate
from .handlers import ConsumerHandler, Handler, ProducerHandler

_LOG = logging.getLogger("magnetar.broker.connect")

DEFERRED_FRAMES_BYTES_MAX = 8 << 20
CONSUMER_UNSENT_BYTES_MAX = 4 << 20
CONNECTION_CROWDED_BYTES = 8 << 20
CROWDED_CONSUMER_BYTES_MAX = 64 << 10
UNSENT_ANSWERS_BYTES_MAX = 64 << 20
SPLIT_BATCH_FRAMES_MIN = 24
"""If at least so many frames arrive together, the first half is published before the rest. Otherwise clients that wait
for receipts all wait while the server works, and the server while they do: with 50 threads that send one by one, 8,950
instead of 7,900 messages a second (`small-sends`). Three parts cost more than they bring."""
SPLIT_BATCH_LOOP_TURNS = 6
"""Turns of the event loop until a publish reaches the journal thread of a bookie in this process."""

ConnectRpcStream = Stream[wire.ServerFrame | Pieces, wire.ClientFrame]


async def serve_connect_stream(broker: TopicManager, stream: ConnectRpcStream, context: CallContext) -> None:
    """Serves one Connect stream of a client until the client or the broker ends the stream. If the client has finished
    sending, the requests in progress are answered before this function returns. All producers and consumers of the
    stream are ended in every case. Raises the error with which the stream was lost."""
    connection = ConnectStream(broker, stream, context)
    await run_and_clean_up(_serve(connection, stream, broker.world.clock), lambda: run_to_end(connection.close()))


async def _serve(connection: ConnectStream, stream: ConnectRpcStream, clock: Clock) -> None:
    handlers, now = connection.handlers, clock.monotonic
    try:
        while True:
            frames, turns = await stream.receive(), EventLoopSlices(clock)
            half = len(frames) // 2 if len(frames) >= SPLIT_BATCH_FRAMES_MIN else 0
            for number, frame in enumerate(frames, 1):
                handler = handlers.get(frame.id)
                if handler is not None:
                    handler.on_frame(frame, turns)
                else:
                    connection.on_frame(frame)
                if number == half:
                    for _ in range(SPLIT_BATCH_LOOP_TURNS):
                        await turns.begin_slice()
                elif now() > turns.end:
                    await turns.begin_slice()
            await connection.wait_room()
    except EndOfStream:
        pass
    await connection.answer_outstanding_requests()


class ConnectStream:
    """One Connect stream of a client: all of its producers and consumers, each with an id on the stream and a handler.
    `handlers`: the handlers of those that are open or being opened, by id."""

    def __init__(self, broker: TopicManager, stream: ConnectRpcStream, caller: CallContext) -> None:
        self.broker = broker
        self.caller = caller
        self.stream = stream
        self.handlers: dict[int, Handler] = {}
        self._highest = 0
        self._answered = -1  # the last id without a handler for which a frame was answered
        self._tasks = Tasks()  # cancelled when the stream ends
        self._leaving = Tasks()  # not cancelled: they end handlers
        self._owed = 0  # outstanding answers without a task
        self._drained: asyncio.Future[None] | None = None
        self._deferred_bytes = 0
        self._room: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ frames in
    def on_frame(self, frame: wire.ClientFrame) -> None:
        """Called for a frame whose id has no handler. Opens the producer or consumer that the frame requests; refuses a
        frame of any other kind."""
        if frame.WhichOneof("kind") in ("open_producer", "subscribe"):
            self._open(frame)
        else:
            self._stray(frame)

    def _open(self, frame: wire.ClientFrame) -> None:
        number, limit = frame.id, self.broker.config.connection_ids
        if number <= self._highest:
            self._closed(number, InvalidRequest(f"id {number} is used again: the ids of a stream ascend from 1"))
            return
        self._highest = number
        if len(self.handlers) >= limit:
            self._closed(number, NotAllowed(f"a connection carries {limit} producers and consumers, and no more"))
            return
        kind = ProducerHandler if frame.WhichOneof("kind") == "open_producer" else ConsumerHandler
        handler = self.handlers[number] = kind(self, number)
        handler.start_opening(frame)

    def _stray(self, frame: wire.ClientFrame) -> None:
        """Answers a frame whose id was never opened, or is closed. Of consecutive frames with that id only the first is
        answered."""
        number = frame.id
        if number == self._answered and frame.WhichOneof("kind") != "close":
            return
        self._answered = number
        if 0 < number <= self._highest:
            self._closed(number, ConnectionLost(f"id {number} is closed"))
        else:
            self._closed(number, InvalidRequest(f"id {number} was not opened on this stream"))

    def _closed(self, number: int, error: MagnetarError) -> None:
        self.send(wire.ServerFrame(id=number, closed=to_wire(error)))

    def count_deferred_bytes(self, size: int) -> None:
        """Adds `size` bytes to the size of the frames that wait to be handled; `size` is negative when frames were
        handled. Wakes `wait_room` when at most DEFERRED_FRAMES_BYTES_MAX are left."""
        self._deferred_bytes += size
        if self._room is not None and self._deferred_bytes <= DEFERRED_FRAMES_BYTES_MAX:
            self._room.set_result(None)
            self._room = None

    async def wait_room(self) -> None:
        """Waits until the next frames may be read: until the unsent answers are about half of UNSENT_ANSWERS_BYTES_MAX,
        if they were above it, and the deferred frames have at most DEFERRED_FRAMES_BYTES_MAX. Raises ConnectionLost if
        the connection is lost."""
        if self.stream.queued_bytes > UNSENT_ANSWERS_BYTES_MAX:
            await self.stream.wait_sent(self.stream.sent_bytes + UNSENT_ANSWERS_BYTES_MAX // 2)
        while self._deferred_bytes > DEFERRED_FRAMES_BYTES_MAX:
            if self._room is None:
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._room,))

    # ------------------------------------------------------------------ frames out
    def send(self, frame: wire.ServerFrame | Pieces) -> None:
        """Queues a frame for sending. Drops the frame if the stream is lost or its credentials have expired, because
        the task that reads the stream then ends with the same error."""
        try:
            self.stream.send_nowait(frame)
        except MagnetarError:  # lost, or its credentials have expired
            return  # the reader of the stream gets it too, and ends

    def deliver(self, handler: ConsumerHandler, items: Iterable[Pieces]) -> bool:
        """Queues the encoded deliveries of one consumer for sending. Returns True if the consumer must get no more
        until `wait_drained`. Drops deliveries if the stream is lost or its credentials have expired, as `send` does."""
        stream, sent = self.stream, handler.sent
        if sent is None:
            sent = handler.sent = deque()
        for item in items:
            try:
                stream.send_nowait(item)
            except MagnetarError:  # as in `send`
                break  # the reader of the stream gets it too, and ends
            size = sum(map(len, item))
            sent.append((stream.sent_bytes + stream.queued_bytes, size))
            handler.queued_bytes += size
        return self._is_full(handler)

    def _is_full(self, handler: ConsumerHandler) -> bool:
        left, sent = self.stream.sent_bytes, handler.sent
        while sent and sent[0][0] <= left:
            handler.queued_bytes -= sent.popleft()[1]
        if not sent:
            handler.sent = None
        answers = self.broker.memory.answers
        if answers.held > answers.limit:
            return True
        crowded = self.stream.queued_bytes > CONNECTION_CROWDED_BYTES or answers.held > answers.tight
        return handler.queued_bytes > (CROWDED_CONSUMER_BYTES_MAX if crowded else CONSUMER_UNSENT_BYTES_MAX)

    async def wait_drained(self, handler: ConsumerHandler) -> None:
        """Waits until about half of the handler's queued deliveries are sent and the memory limits permit more. Raises
        ConnectionLost if the connection is lost."""
        while self._is_full(handler):
            if handler.sent:
                await self.stream.wait_sent(handler.sent[len(handler.sent) // 2][0])
            else:
                await self.broker.memory.answers.wait_room()

    # ------------------------------------------------------------------ tasks
    def start_request(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts `work`, which answers one request of the client, in a task, and returns the task. The task is
        cancelled when the stream ends."""
        return self._tasks.spawn(work, "client-request")

    def add_outstanding_answers(self, answers: int) -> None:
        """Adds `answers` to the number of answers that the client still waits for and that have no task of their own.
        `answers` is negative when answers were given. Wakes `answer_outstanding_requests` when none is left."""
        self._owed += answers
        if self._drained is not None and not self._owed:
            self._drained.set_result(None)
            self._drained = None

    def on_handler_ended(self, handler: Handler, leaving: Coroutine[Any, Any, None]) -> None:
        """Called when a producer or consumer ends. Removes its handler, and runs `leaving`, which ends its session, in
        a task that is not cancelled when the stream ends."""
        self.handlers.pop(handler.number, None)
        self._leaving.spawn(leaving, "client-leaves")

    # ------------------------------------------------------------------ the end of the stream
    async def answer_outstanding_requests(self) -> None:
        """Called when the client has finished sending. Cancels the opening of producers and consumers that are not open
        yet. Then waits until all publishes and all requests in progress are answered."""
        handlers = list(self.handlers.values())
        await asyncio.gather(*[handler.leave() for handler in handlers if not handler.opened])
        await asyncio.gather(
            *[handler.wait_publishes_answered() for handler in handlers if isinstance(handler, ProducerHandler)]
        )
        while self._tasks or self._leaving or self._owed:
            await self._tasks.drain()
            await self._leaving.drain()
            if self._owed:
                self._drained = asyncio.get_running_loop().create_future()
                await self._drained

    async def close(self) -> None:
        """Ends the connection: cancels its requests, makes its producers leave their topics and its consumers their
        subscriptions, and waits until they have left. Their errors are logged."""
        handlers = list(self.handlers.values())
        self.handlers.clear()
        for handler in handlers:
            handler.has_ended = True
        leaving = [handler.leave() for handler in handlers]
        left = await asyncio.gather(self._tasks.close(), *leaving, return_exceptions=True)
        for failure in left:
            if isinstance(failure, BaseException):
                _LOG.error("a producer or consumer did not leave in order", exc_info=failure)
        await self._leaving.drain()


# -------------------------------------------------------------------------------------------------------- broker
# The Broker service of proto/wire.proto: translates and calls; decides nothing.
#
# Unary calls are here; the Connect stream is above, the streams Read and WatchTopics are in handlers.py.


class BrokerService:
    """Implements the gRPC service Broker; each method implements the rpc of its name. proto/wire.proto describes the
    rpcs."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._topics = TopicQueries(broker)
        self._schemas = SchemaQueries(broker)

    async def lookup(self, request: wire.LookupRequest, context: CallContext) -> wire.LookupReply:
        return _owner(await self._topics.look_up_owner(TopicName.parse(request.topic), request.listener))

    async def partitions(self, request: wire.PartitionsRequest, context: CallContext) -> wire.PartitionsReply:
        found = await self._topics.count_partitions(TopicName.parse(request.topic), create=request.create)
        owner = _owner(found.owner) if found.owner is not None else None
        return wire.PartitionsReply(partitions=found.count, owner=owner)

    async def connect(self, stream: ConnectRpcStream, context: CallContext) -> None:
        await serve_connect_stream(self._broker, stream, context)

    async def read(self, stream: read.ReadRpcStream, context: CallContext) -> None:
        await read.serve_read_stream(self._broker, stream, context)

    async def watch_topics(self, stream: watch.TopicWatchStream, context: CallContext) -> None:
        await watch.serve_topic_watch(self._topics, stream, context)

    async def offsets(self, request: wire.OffsetsRequest, context: CallContext) -> wire.OffsetsReply:
        name = TopicName.parse(request.topic)
        range_ = request.aborted_first, request.aborted_end
        found = await self._topics.get_offsets(
            name, request.publish_times_ms, request.subscription, range_, request.incarnation
        )
        return wire.OffsetsReply(
            earliest_index=found.earliest, end_index=found.end, by_time=found.by_time, bytes=found.size,
            subscription_index=found.subscription, aborted=found.aborted, incarnation=found.incarnation,
        )  # fmt: skip

    async def advance_subscription(self, request: wire.AdvanceSubscriptionRequest, context: CallContext) -> wire.Empty:
        name = TopicName.parse(request.topic)
        await self._topics.advance_subscription(name, request.subscription, request.index, request.incarnation)
        return wire.Empty()

    async def get_schema(self, request: wire.GetSchemaRequest, context: CallContext) -> wire.SchemaReply:
        version = decode_version(request.version)
        if request.version and version is None:
            raise InvalidRequest(f"a schema version of {len(request.version)} bytes; it has 8")
        found = await self._schemas.get_schema(TopicName.parse(request.topic), version, request.incarnation)
        return translate.make_schema_reply(found)


def _owner(owner: TopicOwner) -> wire.LookupReply:
    return wire.LookupReply(owner=owner.endpoint, here=owner.here)
