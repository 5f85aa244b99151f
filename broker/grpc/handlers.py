"""A producer or consumer of a Connect stream: passes its frames to its session, and sends the session's answers.

    Handler.on_frame(frame, turns)   handled at once, or after earlier work of the same handler
    Handler.leave()                  the stream has ended

Work of a handler that takes longer than a slice of the loop runs in a task: opening, and acknowledgements of very many
entries. Frames that arrive meanwhile are deferred until the task is done. Requests that are answered later (`seek`,
`last_message_id`, the receipt of an acknowledgement, acknowledgements in transactions) run beside that, at most
RUNNING_REQUESTS_MAX. So joining one transaction delays neither other frames nor other transactions: acknowledgements of
different transactions, and plain ones, have no order; each is checked when it is handled.

A handler ends once, in `_end_handler`. Either its client closes it (the last frame is `done`), or the broker closes it,
also because of a frame that it does not accept (the last frame is `closed`), or the stream ends.

Also in this file: the Read stream (`serve_read_stream`), which sends the entries that the EntryRangeReader of
broker/session/backlogs.py reads. Its requests are answered one after the other: the entries of the range, then `done`
with the first index that they do not cover. Below its heading: the WatchTopics stream (watch).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ...proto import wire_pb2 as wire
from ...proto.checksum import encode_varint
from ...proto.errors import (
    AWAITS_LAST_ACKS,
    BackPressure,
    ConnectionLost,
    InternalError,
    InvalidRequest,
    MagnetarError,
    to_wire,
)
from ...proto.names import NamespaceName, Position
from ...runtime.alarm import EventLoopSlices
from ...runtime.grpc.messages import LongItem
from ...runtime.network import CallContext, EndOfStream, Pieces, Stream
from ..cluster.policy_cache import TopicAdded, TopicListChange, TopicsListed
from ..node.topic_manager import TopicManager
from ..session.backlogs import EntryRangeReader, MessageIndexRange
from ..session.consumer import ConsumerSession
from ..session.producer import ProducerSession
from ..session.topics import TopicQueries
from ..subscription.core.dispatch import Delivery
from ..subscription.dead_letters import NO_FAILURES
from ..topic.producer import NO_SEQUENCE_ID
from . import translate
from .translate import encode_deliveries, encode_read_reply

if TYPE_CHECKING:
    from .connection import ConnectStream


ReadRpcStream = Stream[wire.ReadReply | Pieces, wire.ReadRequest]


async def serve_read_stream(broker: TopicManager, stream: ReadRpcStream, caller: CallContext) -> None:
    """Serves one Read stream of a client until the client ends it. For each request in turn, sends the entries of the
    requested range, and then `done` with the first index that was not read, or with the error. Raises the error with
    which the stream was lost."""
    while True:
        try:
            items = await stream.receive()
        except EndOfStream:
            return
        turns = EventLoopSlices(broker.world.clock)
        for request in items:
            await _answer(broker, stream, request, caller, turns)
            if turns.is_slice_used_up:
                await turns.begin_slice()


async def _answer(
    broker: TopicManager, stream: ReadRpcStream, request: wire.ReadRequest, caller: CallContext, turns: EventLoopSlices
) -> None:
    wanted = MessageIndexRange(
        request.topic, request.first_index, request.end_index, request.bytes_max, request.incarnation
    )
    reader, error = EntryRangeReader(broker, wanted, caller), None
    try:
        async with aclosing(reader.read_entries(turns)) as entries:
            async for entry in entries:
                await stream.send(encode_read_reply(request.request_id, entry))
    except MagnetarError as failure:
        error = to_wire(failure)
    done = wire.ReadDone(next_index=reader.next_index, error=error)
    await stream.send(wire.ReadReply(request_id=request.request_id, done=done))


_LOG = logging.getLogger("magnetar.broker.connect")

DEFERRED_FRAMES_MAX = 100
"""Most frames that wait while a handler is being opened: a client has no reason then to send more than permits and a
close."""
RUNNING_REQUESTS_MAX = 1000
"""Most requests of a handler in progress."""

RequestWork = Callable[[], Awaitable[wire.ServerFrame | None]]
"""Does a request and returns its answer; None: the answer is `done`."""


class Handler:
    """Translates between the frames of one producer or consumer and its session. `number`: the id of the producer or
    consumer on the stream. `opened`: the client was told that it is open. `has_ended`: it was closed, or its stream has
    ended."""

    __slots__ = ("_connection", "_deferred", "_requests", "_work", "has_ended", "number", "opened")

    def __init__(self, connection: ConnectStream, number: int) -> None:
        self.number = number
        self.opened = False
        self.has_ended = False
        self._connection = connection
        self._requests = 0
        self._work: asyncio.Task[None] | None = None
        self._deferred: deque[wire.ClientFrame] | None = None

    # ------------------------------------------------------------------ of a producer, or of a consumer
    async def _open(self, frame: wire.ClientFrame) -> wire.ServerFrame:
        raise NotImplementedError

    def _handle(self, kind: str | None, frame: wire.ClientFrame, turns: EventLoopSlices) -> None:
        raise NotImplementedError

    async def _close(self) -> None:
        """Closes the session; returns when the operations in progress are done."""
        raise NotImplementedError

    async def _leave(self) -> None:
        """Ends the session of the producer or consumer at once. Idempotent."""
        raise NotImplementedError

    # ------------------------------------------------------------------ opening
    def start_opening(self, frame: wire.ClientFrame) -> None:
        """Starts a task that opens the producer or consumer that the frame describes, and sends the outcome to the
        client."""
        self._work = self._connection.start_request(self._opening(frame))

    async def _opening(self, frame: wire.ClientFrame) -> None:
        try:
            opened = await self._open(frame)
        except Exception as error:
            self.close_with_error(_typed(error))
            return
        if self.has_ended:  # it was closed meanwhile: `leave` waits for this task, and ends the session
            return
        self.opened = True
        self._connection.send(opened)
        self._go_on()

    # ------------------------------------------------------------------ frames
    def on_frame(self, frame: wire.ClientFrame, turns: EventLoopSlices) -> None:
        """Handles a frame of this producer or consumer: at once, or when the task in progress is done. Closes the
        producer or consumer with InvalidRequest if the frame is not allowed now, and with BackPressure if too many
        frames wait for its opening. `turns`: the slices of the caller's loop."""
        kind = frame.WhichOneof("kind")
        if kind in ("open_producer", "subscribe"):
            self.close_with_error(InvalidRequest(f"id {self.number} is used twice"))
        elif self._work is None:
            self._handle_frame(kind, frame, turns)
        elif self.opened:
            self._defer(frame)
        elif kind == "close":
            self._end_handler(self._opening_closed(frame.close))
        elif kind == "publish":
            self.close_with_error(InvalidRequest("a producer publishes after it was opened"))
        elif self._deferred is not None and len(self._deferred) >= DEFERRED_FRAMES_MAX:
            self.close_with_error(
                BackPressure(f"more than {DEFERRED_FRAMES_MAX} frames before the answer to the first")
            )
        else:
            self._defer(frame)

    def _handle_frame(self, kind: str | None, frame: wire.ClientFrame, turns: EventLoopSlices) -> None:
        try:
            if kind == "close":
                self._on_close(frame.close)
            else:
                self._handle(kind, frame, turns)
        except Exception as error:
            self.close_with_error(_typed(error))

    def _on_close(self, request_id: int) -> None:
        self._end_handler(self._closing(request_id))

    def _defer(self, frame: wire.ClientFrame) -> None:
        if isinstance(frame, LongItem):  # a part of an envelope, which would stay as long
            frame = frame.kept()
        if self._deferred is None:
            self._deferred = deque()
        self._deferred.append(frame)
        self._connection.count_deferred_bytes(frame.ByteSize())

    def _go_on(self) -> None:
        """Called when the handler's task is done: handles the frames that were deferred."""
        self._work, turns = None, EventLoopSlices(self._connection.broker.world.clock)
        while self._deferred and self._work is None and not self.has_ended:
            frame = self._deferred.popleft()
            self._connection.count_deferred_bytes(-frame.ByteSize())
            self._handle_frame(frame.WhichOneof("kind"), frame, turns)
            if turns.is_slice_used_up and self._work is None and not self.has_ended:
                self._work = self._connection.start_request(self._later())
        if not self._deferred:
            self._deferred = None

    async def _later(self) -> None:
        await asyncio.sleep(0)
        self._go_on()

    # ------------------------------------------------------------------ work in steps
    def _go_through(
        self, steps: Iterator[None], turns: EventLoopSlices, then: Callable[[MagnetarError | None], None]
    ) -> None:
        """Runs the steps at once until the time slice is over, and the rest in a task; then calls `then` with the error
        or None."""
        try:
            for _ in steps:
                if turns.is_slice_used_up:
                    self._work = self._connection.start_request(self._rest(steps, then))
                    return
        except MagnetarError as error:
            then(error)
        else:
            then(None)

    async def _rest(self, steps: Iterator[None], then: Callable[[MagnetarError | None], None]) -> None:
        await asyncio.sleep(0)
        turns, failure = EventLoopSlices(self._connection.broker.world.clock), None
        try:
            for _ in steps:
                if turns.is_slice_used_up:
                    await turns.begin_slice()
        except Exception as error:
            failure = _typed(error)
        then(failure)
        self._go_on()

    # ------------------------------------------------------------------ requests that are answered later
    def _request(self, request_id: int, work: RequestWork) -> None:
        if self._requests >= RUNNING_REQUESTS_MAX:
            self._send_done(request_id, self._too_many())
        else:
            self._requests += 1
            self._connection.start_request(self._answer(request_id, work))

    def _too_many(self) -> MagnetarError:
        return BackPressure(f"{RUNNING_REQUESTS_MAX} requests of this consumer are under way: wait for some answers")

    async def _answer(self, request_id: int, work: RequestWork) -> None:
        try:
            answer = await work()
        except Exception as error:
            self._send_done(request_id, _typed(error))
        else:
            if answer is not None:
                self._connection.send(answer)
            else:
                self._send_done(request_id, None)
        finally:
            self._requests -= 1

    def _begin_answer(self, request_id: int) -> Callable[[MagnetarError | None], None]:
        """Counts a request without a task as in progress. Returns a function that answers the request; it must be
        called once, with the request's error or None."""
        self._requests += 1
        self._connection.add_outstanding_answers(1)

        def tell(error: MagnetarError | None) -> None:
            self._requests -= 1
            self._connection.add_outstanding_answers(-1)
            self._send_done(request_id, error)

        return tell

    def _send_done(self, request_id: int, error: MagnetarError | None) -> None:
        told = to_wire(error) if error is not None else None
        done = wire.Done(request_id=request_id, error=told)
        self._connection.send(wire.ServerFrame(id=self.number, done=done))

    # ------------------------------------------------------------------ the end
    def close_with_error(self, error: MagnetarError) -> None:
        """Closes the producer or consumer on the broker's side, because of `error`, and sends the error to the client.
        Does nothing if it has ended."""
        if not self.has_ended:
            self._send_closed(error)
            self._end_handler(self.leave())

    def _send_closed(self, error: MagnetarError) -> None:
        self._connection.send(wire.ServerFrame(id=self.number, closed=to_wire(error)))

    def _end_handler(self, leaving: Coroutine[Any, Any, None]) -> None:
        self.has_ended = True
        if self._deferred is not None:
            self._connection.count_deferred_bytes(-sum(frame.ByteSize() for frame in self._deferred))
            self._deferred = None
        self._connection.on_handler_ended(self, leaving)

    async def _closing(self, request_id: int) -> None:
        error = None
        try:
            await self._close()
        except Exception as failure:
            error = _typed(failure)
        self._send_done(request_id, error)

    async def _opening_closed(self, request_id: int) -> None:
        await self.leave()
        self._send_done(request_id, None)

    async def leave(self) -> None:
        """Ends the producer or consumer: cancels its opening if that is in progress, and ends its session. Does not
        wait for operations in progress. Called when the stream has ended, or the broker closes the producer or
        consumer. Idempotent."""
        self.has_ended = True
        work = self._work
        if work is not None and work is not asyncio.current_task() and not work.done():
            work.cancel()
            await asyncio.wait((work,))
        await self._leave()


class ProducerHandler(Handler):
    """Translates between the frames of one producer and its session, and is the port of this session
    (broker/session/producer.py `ProducerPort`)."""

    __slots__ = ("_hears_waits", "_session")

    def __init__(self, connection: ConnectStream, number: int) -> None:
        super().__init__(connection, number)
        self._session: ProducerSession | None = None
        self._hears_waits = False

    async def _open(self, frame: wire.ClientFrame) -> wire.ServerFrame:
        self._hears_waits = frame.open_producer.hears_waits
        options = translate.parse_producer_options(frame.open_producer, self._connection.broker.config)
        self._session = await ProducerSession.open(self._connection.broker, options, self, self._connection.caller)
        return translate.make_producer_opened_frame(self.number, self._session)

    def on_frame(self, frame: wire.ClientFrame, turns: EventLoopSlices) -> None:
        if self._work is not None or self._session is None or frame.WhichOneof("kind") != "publish":
            super().on_frame(frame, turns)
            return
        try:
            self._session.publish(frame.publish)
        except Exception as error:
            self.close_with_error(_typed(error))

    def _handle(self, kind: str | None, frame: wire.ClientFrame, turns: EventLoopSlices) -> None:
        if kind != "publish":
            raise InvalidRequest(f"a producer does not take {kind or 'a frame of unknown kind'}")
        assert self._session is not None, "it is open"
        self._session.publish(frame.publish)

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _leave(self) -> None:
        if self._session is not None:
            self._session.leave()

    async def wait_publishes_answered(self) -> None:
        """Closes the session of the producer, and waits until every publish is answered. Does nothing if the producer
        is not open."""
        if self.opened:
            await self._close()

    # ------------------------------------------------------------------ the port
    def send_receipt(self, sequence_id: int, position: Position, index: int) -> None:
        receipt = wire.Receipt(sequence_id=sequence_id, ledger_id=position[0], entry_id=position[1], index=index)
        try:
            self._connection.stream.send_nowait(wire.ServerFrame(id=self.number, receipt=receipt))
        except ConnectionLost:
            return  # the reader of the stream gets it too, and ends

    def send_provisional_receipt(self, sequence_id: int) -> None:
        self._connection.send(wire.ServerFrame(id=self.number, first_copy=sequence_id))

    def on_duplicate(self, sequence_id: int) -> None:
        receipt = wire.Receipt(sequence_id=sequence_id, ledger_id=-1, entry_id=-1, index=-1, duplicate=True)
        self._connection.send(wire.ServerFrame(id=self.number, receipt=receipt))

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        if sequence_id == NO_SEQUENCE_ID:  # the frame has no number of its own: which publish it was cannot be said
            self.close_with_error(error)
            return
        failed = wire.PublishFailed(sequence_id=sequence_id, error=to_wire(error))
        self._connection.send(wire.ServerFrame(id=self.number, failed=failed))

    def on_publish_waiting(self, error: MagnetarError) -> None:
        if self._hears_waits:
            self._connection.send(wire.ServerFrame(id=self.number, waits=to_wire(error)))

    def grant_credit(self, size: int) -> None:
        self._connection.send(wire.ServerFrame(id=self.number, credit=size))

    def on_closed(self, error: MagnetarError) -> None:
        self.close_with_error(error)


class ConsumerHandler(Handler):
    """Translates between the frames of one consumer and its session, and is the port of this session
    (broker/session/consumer.py `ConsumerPort`)."""

    __slots__ = ("_head", "_last_acks", "_says_last", "_session", "queued_bytes", "sent")

    def __init__(self, connection: ConnectStream, number: int) -> None:
        super().__init__(connection, number)
        self._head = b"\x08" + encode_varint(number)
        self._session: ConsumerSession | None = None
        self._says_last = False  # the client answers `closed` by `close`, after its last acknowledgements
        self._last_acks: asyncio.Future[None] | None = None  # it is told that its topic moves: done when they have come
        self.sent: deque[tuple[int, int]] | None = None  # unsent deliveries: (offset of its end on the stream, bytes) …
        self.queued_bytes = 0  # … and the sum of their bytes

    async def _open(self, frame: wire.ClientFrame) -> wire.ServerFrame:
        options = translate.parse_subscribe_options(frame.subscribe)
        self._says_last = frame.subscribe.says_last
        self._session = await ConsumerSession.open(self._connection.broker, options, self, self._connection.caller)
        return translate.make_subscribed_frame(self.number, self._session)

    def _handle(self, kind: str | None, frame: wire.ClientFrame, turns: EventLoopSlices) -> None:
        session = self._session
        assert session is not None, "it is open"
        if kind == "ack" and frame.ack.HasField("txn"):
            self._ack_in(session, frame.ack)
        elif kind == "ack":
            self._go_through(
                translate.acknowledge_in_steps(session, frame.ack), turns, self._acked(session, frame.ack.request_id)
            )
        elif kind == "permits":
            session.grant_permits(frame.permits)
        elif kind == "redeliver":
            steps = translate.redeliver_in_steps(session, frame.redeliver)
            self._go_through(steps, turns, self._given_back(frame.redeliver.request_id))
        elif kind == "seek":
            self._request(frame.seek.request_id, lambda: self._seek(session, frame.seek))
        elif kind == "probe":
            self._request(frame.probe, lambda: self._probe(session, frame.probe))
        elif kind == "commit":
            self._request(
                frame.commit.request_id, lambda: session.commit_progress(frame.commit.index, frame.commit.note)
            )
        elif kind == "progress":
            self._request(frame.progress, lambda: self._progress(session, frame.progress))
        elif kind == "unsubscribe":
            self._request(frame.unsubscribe, session.unsubscribe)
        elif kind == "last_message_id":
            self._request(frame.last_message_id, lambda: self._last(session, frame.last_message_id))
        else:
            raise InvalidRequest(f"a consumer does not take {kind or 'a frame of unknown kind'}")

    async def _seek(self, session: ConsumerSession, asked: wire.Seek) -> wire.ServerFrame:
        await translate.seek_subscription(session, asked)
        return translate.make_seek_done_frame(self.number, asked.request_id, session)

    def _ack_in(self, session: ConsumerSession, ack: wire.Ack) -> None:
        """Acknowledges in a transaction; without a task if only a write to the disk must be waited for, which is the
        usual case."""
        number = ack.request_id
        if self._requests < RUNNING_REQUESTS_MAX and translate.ack_in_transaction_nowait(session, ack):
            session.call_when_durable(self._begin_answer(number))
        else:
            self._request(number, lambda: translate.ack_in_transaction(session, ack))

    def _acked(self, session: ConsumerSession, request_id: int) -> Callable[[MagnetarError | None], None]:
        def then(error: MagnetarError | None) -> None:
            if not request_id:
                return
            if error is not None:
                self._send_done(request_id, error)
            elif self._requests < RUNNING_REQUESTS_MAX:
                session.call_when_durable(self._begin_answer(request_id))
            else:
                self._send_done(request_id, self._too_many())

        return then

    def _given_back(self, request_id: int) -> Callable[[MagnetarError | None], None]:
        """Returns a callback that answers a redelivery request in the turn in which the messages are requeued, so that
        none of them is delivered again before the answer."""

        def then(error: MagnetarError | None) -> None:
            if error is not None:
                self.close_with_error(error)
            elif request_id:
                self._send_done(request_id, None)

        return then

    def _on_close(self, request_id: int) -> None:
        if self._last_acks is not None:
            self._end_last_acks()
        else:
            super()._on_close(request_id)

    async def _last(self, session: ConsumerSession, request_id: int) -> wire.ServerFrame:
        return translate.make_last_message_frame(self.number, request_id, await session.find_last_message())

    async def _probe(self, session: ConsumerSession, request_id: int) -> wire.ServerFrame:
        return translate.make_probe_answer_frame(self.number, request_id, await session.probe_delivery())

    async def _progress(self, session: ConsumerSession, request_id: int) -> wire.ServerFrame:
        return translate.make_progress_frame(self.number, request_id, await session.find_progress())

    async def _close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _leave(self) -> None:
        self._end_last_acks()
        if self._session is not None:
            await self._session.leave()

    def _end_last_acks(self) -> None:
        if self._last_acks is not None and not self._last_acks.done():
            self._last_acks.set_result(None)

    # ------------------------------------------------------------------ the port
    def deliver(self, deliveries: Sequence[Delivery]) -> bool:
        failures = self._session.failures if self._session is not None else NO_FAILURES
        return self._connection.deliver(self, encode_deliveries(deliveries, self._head, failures))

    def on_end_of_topic(self) -> None:
        self._connection.send(wire.ServerFrame(id=self.number, end_of_topic=wire.Empty()))

    def on_active_changed(self, active: bool) -> None:
        self._connection.send(wire.ServerFrame(id=self.number, active=active))

    def on_topic_moving(self, error: MagnetarError) -> asyncio.Future[None] | None:
        if not (self._says_last and self.opened) or self.has_ended or self._last_acks is not None:
            return None
        closed = to_wire(error)
        closed.fields[AWAITS_LAST_ACKS] = "yes"
        self._connection.send(wire.ServerFrame(id=self.number, closed=closed))
        self._last_acks = asyncio.get_running_loop().create_future()
        return self._last_acks

    def _send_closed(self, error: MagnetarError) -> None:
        if self._last_acks is None:  # else the client has closed it already
            super()._send_closed(error)

    def on_closed(self, error: MagnetarError) -> None:
        self.close_with_error(error)

    async def wait_drained(self) -> None:
        await self._connection.wait_drained(self)


def _typed(error: Exception) -> MagnetarError:
    """Returns the error for the client. An unexpected exception is logged and becomes InternalError, so that the client
    gets an answer."""
    if isinstance(error, MagnetarError):
        return error
    _LOG.error("a request of a client failed", exc_info=error)
    return InternalError(f"the request failed: {error!r}")


# --------------------------------------------------------------------------------------------------------- watch
# The WatchTopics stream: sends the changes of a namespace's topics (broker/session/topics.py), until the client ends it
# or the metadata session ends.


TopicWatchStream = Stream[wire.WatchTopicsReply, wire.WatchTopicsRequest]


async def serve_topic_watch(topics: TopicQueries, stream: TopicWatchStream, caller: CallContext) -> None:
    """Serves one WatchTopics stream of a client: sends the list of the topics of a namespace, and then each change.
    Returns when the client ends the stream. Raises InvalidRequest if the first item names no namespace, InvalidName if
    the name is invalid, EndOfStream if there is no item, and the errors of `TopicQueries.watch_topics`."""
    asked = (await stream.receive())[0]
    if not asked.namespace:
        raise InvalidRequest("the first item of a WatchTopics stream names a namespace")
    await run_until_stream_ends(stream, _send_changes(topics, stream, asked, caller))


async def _send_changes(
    topics: TopicQueries, stream: TopicWatchStream, asked: wire.WatchTopicsRequest, caller: CallContext
) -> None:
    name = NamespaceName.parse(asked.namespace)
    async for told in topics.watch_topics(name, asked.after_revision, caller.principal):
        await stream.send(_reply(told))


async def run_until_stream_ends(stream: Stream[Any, Any], work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`, which sends on `stream`, until it returns or the client ends the stream. Raises what `work`
    raises."""
    tasks = (asyncio.create_task(work), asyncio.create_task(_wait_stream_ended(stream)))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            await tasks[0]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_stream_ended(stream: Stream[Any, Any]) -> None:
    try:
        while True:
            await stream.receive()
    except (EndOfStream, MagnetarError):
        return


def _reply(told: TopicListChange) -> wire.WatchTopicsReply:
    if isinstance(told, TopicsListed):
        return wire.WatchTopicsReply(topics=wire.Names(names=told.names), revision=told.revision)
    if isinstance(told, TopicAdded):
        return wire.WatchTopicsReply(added=told.name, revision=told.revision)
    return wire.WatchTopicsReply(removed=told.name, revision=told.revision)
