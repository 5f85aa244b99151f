"""One partition's producer: its stream, and what goes over it.

After a reconnect all entries that are not acknowledged go out again, in order, under the same ids, before anything new.
Gathering them and telling their outcome is client/produce/pending_queue.py. A broker's error that may pass, and a
broken stream, open it again, after a new look-up and with back-off; one that will stay finishes the producer. Until it
has more to say than a few words it has a place in the lobby (client/connect/lobby.py) instead of a stream of its own.
Guards: tests/client/produce/test_partition_producer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.entry import ENTRY_BYTES_MAX
from ...proto.errors import ConnectionLost, InternalError, MagnetarError, NotOwner, WrongProtocol, from_wire
from ...proto.errors import ProducerFenced as WireProducerFenced
from ...proto.errors import TopicTerminated as WireTopicTerminated
from ...proto.names import TopicName
from ...runtime.network import Channel, EndOfStream, Stream, rpc
from ..common.errors import AlreadyClosed, PulsarException, Timeout, translate
from ..common.guard import spawn
from ..common.state import State
from ..connect.connections import Connections
from ..connect.handshake import FINAL, introduce, open_request
from ..connect.lobby import ENTRY_BYTES_MAX as ENTRY_BYTES_IN_LOBBY
from ..connect.lobby import MESSAGES_MAX, Moves, Place
from ..core.batcher import Batch
from ..model.settings import ProducerAccessMode, ProducerSettings
from .pending_queue import Sending

_LOG = logging.getLogger("magnetar.client")
_SEALED = (WireProducerFenced, WireTopicTerminated)
_FINAL = (*_SEALED, *FINAL)
"""Errors after which opening the producer again is pointless."""
_ROUTINE = (ConnectionLost, NotOwner)
"""Errors that a topic's move or a broker's restart brings: no reason to warn."""


class PartitionProducer(Sending):
    def __init__(
        self, connections: Connections, topic: TopicName, settings: ProducerSettings, max_pending: int
    ) -> None:
        super().__init__(connections.world, topic, settings, max_pending)
        self._connections = connections
        self._settings = settings
        self._instance = connections.world.rng.randbytes(8).hex()  # our next connection replaces our last one
        self._connection_number = 0
        self._epoch = 0  # of the topic, while this producer has it for itself
        self._stream: Stream[Any, Any] | Place | None = None
        self._place: Place | None = None  # in the lobby, that is left when the stream of its own is open
        self._near: Channel | None = None  # to the broker of that lobby
        self._speaks = False  # in the lobby: an answer is on its way
        self._said = 0  # entries that were published there
        self._waits = settings.access_mode is ProducerAccessMode.Shared  # in the lobby, until it has something to say
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------ over the stream
    def _publish(self, batch: Batch) -> None:
        assert self._stream is not None, "a connected producer has a stream"
        if isinstance(self._stream, Place):
            self._publish_in_lobby(self._stream, batch)
            return
        try:
            self._stream.send_nowait(wire.ProduceRequest(publish=batch.entry))
        except MagnetarError:
            self.state = State.RECONNECTING  # the reader of the stream finds the same and opens it again

    def _publish_in_lobby(self, place: Place, batch: Batch) -> None:
        """A small one at a time, a few in all; with more it moves, when the answer to that one is there."""
        if self._speaks:
            return
        alone = self._in_flight[0] is batch and batch.chunks is None
        if not alone or len(batch.entry) > ENTRY_BYTES_IN_LOBBY or self._said >= MESSAGES_MAX:
            self._leave_lobby(place)
            return
        self._speaks, self._said = True, self._said + 1
        try:
            place.publish(batch.entry)
        except MagnetarError:
            self.state = State.RECONNECTING  # the reader finds the same

    def _answered(self) -> None:
        """What was published in the lobby has its outcome."""
        self._speaks = False
        if self._in_flight and isinstance(self._stream, Place):
            self._leave_lobby(self._stream)

    def _leave_lobby(self, place: Place) -> None:
        """What is in flight goes out over a stream of its own, which is opened now."""
        self.state, self._waits = State.RECONNECTING, False
        self._place, self._stream = place, None
        place.move()

    def _reset(self) -> None:
        if self._stream is not None:
            self._stream.cancel()

    def _receive(self, reply: wire.ProduceReply) -> None:
        match reply.WhichOneof("kind"):
            case "receipt":
                self._receipt(reply.receipt)
                if self._speaks:
                    self._answered()
            case "failed":
                self._publish_failed(reply.failed)
                if self._speaks:
                    self._answered()
            case "closed":
                raise self._told(from_wire(reply.closed))
            case _:
                raise ConnectionLost("the broker said something out of turn")

    def _told(self, error: MagnetarError) -> MagnetarError:
        """The broker gave this as its reason; the error, to be raised."""
        kind = type(error).__name__
        text = f"the broker said: {kind}: {error.message}"
        if self._reasons.note(kind, text, self._loop.time()) and not isinstance(error, (*_ROUTINE, *_FINAL)):
            _LOG.warning("%s: messages are not acknowledged and are sent again: %s", self.topic, text)
        return error

    def _publish_failed(self, failed: wire.PublishFailed) -> None:
        error = from_wire(failed.error)
        head = self._in_flight[0] if self._in_flight else None
        if not error.definite or error.retryable or isinstance(error, _SEALED):
            raise self._told(error)  # open the stream again and resend, or finish
        if head is not None and head.sequence_id == failed.sequence_id:
            self._why = f"the broker said: {type(error).__name__}: {error.message}"
            while not self._in_flight[0].callbacks:  # a chunk: the last one of its message has the callback
                self._fail(self._in_flight.popleft(), translate(error).result)
            self._fail(self._in_flight.popleft(), translate(error).result)

    # ------------------------------------------------------------------------------ the connection
    def wait_for_messages(self) -> None:
        """It is opened with its first message."""
        self._early = deque()

    @property
    def waits_for_messages(self) -> bool:
        return self._early is not None and self._task is None

    def _open_soon(self) -> None:
        if self._task is None and self._error is None:
            self._task = spawn(self._run(), f"producer {self.topic}", self._broke)

    async def open(self) -> None:
        """Raises when the producer cannot be opened: at once for good reasons, else at the operation's deadline."""
        self._task = spawn(self._run(), f"producer {self.topic}", self._broke)
        await asyncio.shield(self._opened)

    async def _run(self) -> None:
        try:
            await self._stay_open()
        finally:
            self._give_up_place()

    async def _stay_open(self) -> None:
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
            except Moves:
                continue
            except TimeoutError:
                _LOG.info("%s: no answer to the opening of the producer", self.topic)
            except MagnetarError as error:
                self.state = State.RECONNECTING
                if isinstance(error, _FINAL):
                    _LOG.warning("%s: the producer is finished: %s", self.topic, error)
                    self._finish(translate(error))
                    return
                _LOG.info("%s: the producer reconnects: %s", self.topic, error)
            except Exception as error:
                _LOG.exception("%s: the producer failed", self.topic)
                self._finish(translate(error))
                return
            finally:
                if self._stream is not None and self.state is not State.CLOSING:
                    self._stream.cancel()
                    self._stream = None
            await asyncio.sleep(backoff.next_s())

    async def _connect(self) -> None:
        near, self._near = self._near if self._place is not None else None, None
        channel = near or await self._connections.owner(self.topic)
        lobby = self._connections.lobby(channel)
        if self._waits and not self.pending and not lobby.missing:
            try:
                await self._open(lobby.enter())
            except (WrongProtocol, InternalError):
                if not lobby.missing:
                    raise
            else:
                self._near = channel
                return
        await self._open(channel.stream(rpc("Broker", "Produce")))

    async def _open(self, stream: Stream[Any, Any] | Place) -> None:
        self._connection_number += 1
        request = open_request(
            self.topic, self.name, self._instance, self._settings, connection=self._connection_number, epoch=self._epoch
        )
        sent = list(self._in_flight) if self._place is not None else []  # the first messages leave with the request
        behind = [wire.ProduceRequest(publish=batch.entry) for batch in sent]
        first, *replies = await introduce(stream, request, "opened", self._told, behind=behind)
        self._give_up_place()
        self._connected(stream, first.opened, sent)
        for reply in replies:
            self._receive(reply)

    def _give_up_place(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.cancel()

    def _connected(
        self, stream: Stream[Any, Any] | Place, opened: wire.ProducerOpened, sent: Sequence[Batch]
    ) -> None:
        if self.state is State.OPENING:
            self.name = opened.producer_name
            last, initial = opened.last_sequence_id, self._settings.initial_sequence_id
            self._batcher.resume(last, (last if initial is None else initial) + 1)
            if initial is None:
                self.last_sequence_id = last
            if opened.max_message_size:
                self._entry_max = min(ENTRY_BYTES_MAX, opened.max_message_size)
        self._epoch = opened.topic_epoch
        self._stream, self._speaks = stream, False
        self.state = State.CONNECTED
        self._admit()
        gone = {id(batch) for batch in sent}
        for batch in list(self._in_flight):
            if self.state is State.CONNECTED and id(batch) not in gone:
                self._publish(batch)
        self._pump()

    async def _serve(self) -> None:
        stream = self._stream
        if stream is None:  # the first message came while it was given its place
            raise Moves
        while True:
            try:
                replies = await stream.receive()
            except EndOfStream as error:
                raise ConnectionLost("the broker ended the stream") from error
            for reply in replies:
                self._receive(reply)

    # ------------------------------------------------------------------------------ the end
    def abort(self) -> None:
        """Ends at once: what is under way gets AlreadyClosed and has an unknown outcome."""
        self._end(AlreadyClosed("the client was shut down"))

    def _broke(self, error: Exception) -> None:
        self._end(translate(error))

    def _end(self, error: PulsarException) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.cancel()
        self._finish(error)

    def _finish(self, error: PulsarException) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # of a lazy one nobody asks
        super()._finish(error)

    async def close(self) -> None:
        """Waits for what is under way, as long as an operation may take; then nothing more is accepted."""
        if self.state is not State.CLOSED:
            self._take_no_more(AlreadyClosed("the producer is closed"))
            try:
                async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                    await self.flush()
                    await self._close_stream()
            except TimeoutError as error:
                raise Timeout(f"the producer was closed with messages under way{self._reason()}") from error
            finally:  # of the stream too, when it was interrupted or out of time
                try:
                    await self._stop_task()
                finally:
                    self._end(AlreadyClosed("the producer is closed"))

    async def _close_stream(self) -> None:
        """In order, so that the broker has forgotten the producer's name when we return."""
        self.state = State.CLOSING
        await self._stop_task()
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                await stream.close()
            except (MagnetarError, EndOfStream) as error:
                _LOG.debug("%s: the stream ended with the producer: %s", self.topic, error)

    async def _stop_task(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

