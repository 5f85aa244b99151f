"""The Lobby stream: producers of one client that have nothing or little to publish, all on one stream.

A stream of its own costs the broker 30 KB and a millisecond for each producer, also for one that never publishes. Here
it is seated as on a Produce stream, is told its name, and is told when the topic gives it up (`closed`). It may publish
one small entry at a time. Whoever has more to say opens the producer's own stream when the answer is there, and that
one takes the seat, as any later connection of the same producer does (broker/topic/core/publish.py).

This stream is never left unread, so nobody here holds up another one: where a Produce stream would not be read (a quota
or a rate holds its topic's producers back) the producer is given up instead, and what it had to say comes over a stream
of its own, which waits. So a lobby's entries on their way are at most ENTRY_BYTES_MAX for each place.

Shared access alone: a producer that is exclusive would have to move its exclusiveness, too. A place ends with `leave`,
which is answered when the producer has left its topic, and with the stream. Guards:
tests/broker/protocols/grpc/test_lobby.py.
"""

from __future__ import annotations

import asyncio
import contextlib

from ....proto import wire_pb2 as wire
from ....proto.errors import ConnectionLost, InternalError, InvalidRequest, MagnetarError, to_wire
from ....runtime.network import CallContext, EndOfStream, Stream
from ...common.turns import Turns
from ...node.topic_manager import OwnedTopics
from ...topic.producer import Producer
from ...topic.topic import Topic
from .produce import made, opened

ENTRY_BYTES_MAX = 64 << 10

Lobbies = Stream[wire.LobbyReply, wire.LobbyRequest]


async def serve(broker: OwnedTopics, stream: Lobbies, context: CallContext) -> None:
    lobby = _Lobby(broker, stream, context.peer)
    try:
        while True:
            items, turns = await stream.receive(), Turns()
            for item in items:
                if turns.over:
                    await turns.next()
                lobby.take(item)
    except EndOfStream:
        return
    finally:
        await lobby.close()


class _Lobby:
    def __init__(self, broker: OwnedTopics, stream: Lobbies, peer: str) -> None:
        self._broker = broker
        self._stream = stream
        self._peer = peer
        self._seated: dict[int, tuple[Topic, Producer]] = {}
        self._coming: dict[int, asyncio.Task[None]] = {}

    def take(self, item: wire.LobbyRequest) -> None:
        place = item.place
        kind = item.WhichOneof("kind")
        if kind == "publish":
            self._publish(place, item.publish)
        elif kind != "open":
            self._leave(place)
        elif place in self._seated or place in self._coming:
            raise InvalidRequest(f"place {place} of the lobby is taken")
        elif item.open.access_mode != wire.OpenProducer.SHARED:
            raise InvalidRequest("a producer that does not share its topic has a stream of its own")
        else:
            self._coming[place] = asyncio.create_task(self._come(place, item.open))

    async def _come(self, place: int, asked: wire.OpenProducer) -> None:
        try:
            topic, producer = await made(self._broker, asked, lambda reply: self._say(place, reply), self._peer)
            try:
                await topic.producers.join(producer)
            except BaseException:
                topic.producers.leave(producer)
                raise
            self._seated[place] = topic, producer
            self._say(place, opened(topic, producer))
        except MagnetarError as error:
            self._say(place, wire.ProduceReply(closed=to_wire(error)))
        except Exception as error:  # a fault of ours: the client must not wait for ever
            fault = InternalError(f"the producer cannot be opened: {error!r}")
            self._say(place, wire.ProduceReply(closed=to_wire(fault)))
            raise
        finally:
            del self._coming[place]

    def _publish(self, place: int, entry: bytes) -> None:
        seated = self._seated.get(place)
        if seated is None:
            return  # it was refused, and is told so
        topic, producer = seated
        why = topic.life.refusal()
        if why is not None:
            producer.refuse(entry, why)
        elif producer.pending or topic.gate.closed or len(entry) > ENTRY_BYTES_MAX:
            producer.close(ConnectionLost(f"topic {topic.name}: this producer needs a stream of its own"))
        else:
            before = topic.log.queued_index
            producer.publish(entry)
            topic.gate.took(topic.log.queued_index - before, len(entry))

    def _leave(self, place: int) -> None:
        coming = self._coming.get(place)
        if coming is None:
            self._left(place)
        else:  # to its end: what it has begun to make must not stay half done
            coming.add_done_callback(lambda _: self._left(place))

    def _left(self, place: int) -> None:
        seated = self._seated.pop(place, None)
        if seated is not None:
            topic, producer = seated
            topic.producers.leave(producer)
        self._say(place, None)

    def _say(self, place: int, reply: wire.ProduceReply | None) -> None:
        with contextlib.suppress(ConnectionLost):  # who reads the stream learns it too
            self._stream.send_nowait(wire.LobbyReply(place=place, reply=reply))

    async def close(self) -> None:
        try:
            await asyncio.gather(*self._coming.values(), return_exceptions=True)
        finally:
            for place in list(self._seated):
                self._left(place)
