"""The Consume stream: subscribe, then permits and acknowledgements in and entries out, until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from ....proto import wire_pb2 as wire
from ....proto.errors import ConnectionLost, InternalError, InvalidRequest, MagnetarError, to_wire
from ....runtime.network import STREAM_QUEUE_BYTES, CallContext, EndOfStream, Stream
from ...common.turns import Turns
from ...node.topic_manager import OwnedTopics
from ...session.consumer import ConsumerSession
from ...subscription.core.dispatch import Delivery
from . import translate
from .delivery import delivery_items

_LOG = logging.getLogger("magnetar.broker.consume")

Consumes = Stream[wire.ConsumeReply | bytes, wire.ConsumeRequest]

ANSWERS_MAX = 1000
"""Of one consumer, under way; its stream is not read on meanwhile."""


class StreamOutlet:
    """A consumer's deliveries, as items of its stream."""

    def __init__(self, stream: Consumes) -> None:
        self._stream = stream
        self.over = False

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        for item in delivery_items(deliveries):
            self.send(item)

    def ended(self) -> None:
        self.send(wire.ConsumeReply(end_of_topic=wire.Empty()))

    def active(self, active: bool) -> None:
        self.send(wire.ConsumeReply(active=active))

    def closed(self, error: MagnetarError) -> None:
        self.over = True
        self.send(wire.ConsumeReply(closed=to_wire(error)))

    def send(self, reply: wire.ConsumeReply | bytes) -> None:
        with contextlib.suppress(ConnectionLost):  # the reading side of the handler learns it too, and ends
            self._stream.send_nowait(reply)

    @property
    def full(self) -> bool:
        return self._stream.queued_bytes > STREAM_QUEUE_BYTES

    async def drained(self) -> None:
        await self._stream.drained()


async def serve(broker: OwnedTopics, stream: Consumes, context: CallContext) -> None:
    """Errors before the consumer is subscribed fail the call; later ones travel as `closed` or in `done`."""
    items = await stream.receive()
    if items[0].WhichOneof("kind") != "subscribe":
        raise InvalidRequest("the first item of a Consume stream is `subscribe`")
    outlet = StreamOutlet(stream)
    options = translate.subscribe_options(items[0].subscribe)
    session = _Session(await ConsumerSession.open(broker, options, outlet, context.peer), outlet)
    try:
        outlet.send(wire.ConsumeReply(subscribed=translate.subscribed(0, session.of).subscribed))
        await session.take(items[1:])
        while not session.finished:
            await session.take(await stream.receive())
        await session.answered()
    except EndOfStream:
        await session.answered()
    finally:
        await session.end()


def _told(failure: Exception) -> wire.Error:
    """What a request that failed is answered. A fault of ours is logged: who asked must not wait for ever."""
    if isinstance(failure, MagnetarError):
        return to_wire(failure)
    _LOG.error("a request of a consumer failed", exc_info=failure)
    return to_wire(InternalError(f"the request failed: {failure!r}"))


class _Session:
    """What a consumer asks for on its stream, after it has subscribed."""

    def __init__(self, of: ConsumerSession, outlet: StreamOutlet) -> None:
        self.of = of
        self.finished = False
        self._outlet = outlet
        self._answers: set[asyncio.Task[None]] = set()

    async def take(self, items: Sequence[wire.ConsumeRequest]) -> None:
        """In slices; what one request asks for is done before the next."""
        of, turns = self.of, Turns()
        for item in items:
            if turns.over:
                await turns.next()
            if len(self._answers) >= ANSWERS_MAX:
                await asyncio.wait(self._answers, return_when=asyncio.FIRST_COMPLETED)
            if self._outlet.over:
                return  # the consumer was told that it is over; what it sends is for nobody
            kind = item.WhichOneof("kind")
            if kind == "permits":
                of.flow(item.permits)
            elif kind == "ack":
                await self._ack(item.ack, turns)
            elif kind == "redeliver":
                for _ in translate.redeliver_steps(of, item.redeliver):
                    if turns.over:
                        await turns.next()
            elif kind == "seek":
                self._answer(item.seek.request_id, translate.seek(of, item.seek))
            elif kind == "unsubscribe":
                self._answer(item.unsubscribe, of.unsubscribe())
            elif kind == "last_message_id":
                self._start(self._last(item.last_message_id))
            elif kind == "close":
                self.finished = True
                self._answer(item.close, of.close())
            else:
                raise InvalidRequest(f"a Consume stream does not take {kind or 'an item of unknown kind'} here")

    async def _ack(self, ack: wire.Ack, turns: Turns) -> None:
        """Applied in the order of the stream, in slices; the receipt, if one is wanted, when it is durable."""
        error: MagnetarError | None = None
        try:
            for _ in translate.ack_steps(self.of, ack):
                if turns.over:
                    await turns.next()
        except MagnetarError as failure:
            error = failure
        if ack.request_id:
            self._answer(ack.request_id, self._receipt(error))

    async def _receipt(self, error: MagnetarError | None) -> None:
        if error is not None:
            raise error
        await self.of.durable()

    # ------------------------------------------------------------------ answers
    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    def _answer(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        self._start(self._done(request_id, work))

    async def _done(self, request_id: int, work: Coroutine[Any, Any, None]) -> None:
        error = None
        try:
            await work
        except Exception as failure:
            error = _told(failure)
        self._outlet.send(wire.ConsumeReply(done=wire.Done(request_id=request_id, error=error)))

    async def answered(self) -> None:
        """Returns when everything that was asked is answered."""
        while self._answers:
            await asyncio.gather(*self._answers, return_exceptions=True)

    async def end(self) -> None:
        for task in self._answers:
            task.cancel()
        await self.of.leave()

    async def _last(self, request_id: int) -> None:
        try:
            found = translate.last(0, request_id, await self.of.last_message())
            self._outlet.send(wire.ConsumeReply(last=found.last))
        except Exception as failure:
            self._outlet.send(wire.ConsumeReply(done=wire.Done(request_id=request_id, error=_told(failure))))
