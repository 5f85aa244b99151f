"""The lobby: producers that have nothing or little to publish share one stream to their broker.

    place = lobby.enter()          the doors of a stream, as far as the opening of a producer needs them
    place.publish(entry)           a small one, when nothing is on its way: so nobody ever waits behind it
    place.move()                   it has more to say: whoever reads it gets Moves, and the place stays taken
    place.cancel(), close()        the producer leaves

A producer with more than that to say goes from here to a stream of its own when the last answer is there, and never
comes back (PartitionProducer). Its place is given up when its own stream is open, so that its seat at the broker is
never free in between. When the lobby's
stream breaks all its producers learn it and open again. A broker without lobbies is `missing` one: producers have their
own streams from the beginning.
Guards: tests/broker/protocols/grpc/test_lobby.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, InternalError, MagnetarError, WrongProtocol
from ...runtime.network import Channel, EndOfStream, Stream, rpc
from ..common.guard import ignored, spawn

ENTRY_BYTES_MAX = 64 << 10
"""Of one that is published in the lobby; the broker refuses larger ones."""
MESSAGES_MAX = 10
"""Entries that a producer publishes in the lobby: whoever says more than a few words is no visitor."""
LEAVE_TIMEOUT_S = 10.0
"""How long a producer that closes waits until the broker has forgotten it."""


class Moves(Exception):
    """The producer goes on on a stream of its own."""


class Lobby:
    """Of one channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.missing = False  # the broker has none
        self._stream: Stream[Any, Any] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._places: dict[int, Place] = {}
        self._last = 0

    def enter(self) -> Place:
        if self._stream is None:
            self._stream = self.channel.stream(rpc("Broker", "Lobby"))
            self._reading = spawn(self._read(self._stream), "lobby", ignored)  # its places hear of its end
        self._last += 1
        place = self._places[self._last] = Place(self, self._last)
        return place

    def say(self, request: wire.LobbyRequest) -> None:
        if self._stream is None:
            raise ConnectionLost("the lobby's stream is over")
        self._stream.send_nowait(request)

    async def _read(self, stream: Stream[Any, Any]) -> None:
        error: MagnetarError = ConnectionLost("the lobby's stream ended")
        heard = False
        try:
            while True:
                for reply in await stream.receive():
                    heard = True
                    self._hear(reply)
        except EndOfStream:
            pass
        except MagnetarError as broken:
            error = broken
            # A stream that is refused while its first item leaves may end with "Internal error from Core" instead.
            self.missing = not heard and isinstance(broken, WrongProtocol | InternalError)
        finally:
            stream.cancel()
            self._stream = None
            places, self._places = self._places, {}
            for place in places.values():
                place.break_off(error)

    def _hear(self, reply: wire.LobbyReply) -> None:
        place = self._places.get(reply.place)
        if place is None:
            return
        if reply.HasField("reply"):
            place.hear(reply.reply)
        else:
            del self._places[reply.place]
            place.break_off(ConnectionLost("the producer has left the lobby"))

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)


class Place:
    """One reader at a time."""

    __slots__ = ("_came", "_end", "_leaving", "_lobby", "_news", "_number", "_over")

    def __init__(self, lobby: Lobby, number: int) -> None:
        self._lobby = lobby
        self._number = number
        self._came: list[wire.ProduceReply] = []
        self._end: Exception | None = None  # what the reader gets when it has read all that came
        self._news: asyncio.Future[None] | None = None  # somebody waits for it
        self._over: asyncio.Future[None] | None = None  # somebody waits until it was left
        self._leaving = False

    # ------------------------------------------------------------------------------ the lobby's side
    def hear(self, reply: wire.ProduceReply) -> None:
        self._came.append(reply)
        self._tell()

    def break_off(self, error: MagnetarError) -> None:
        """It is nobody's any more."""
        self._leaving = True
        self._finish(error)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _finish(self, why: Exception) -> None:
        self._end = self._end or why
        self._tell()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # ------------------------------------------------------------------------------ the producer's side
    def send_nowait(self, request: wire.ProduceRequest) -> None:
        """`open`, once and first."""
        self._lobby.say(wire.LobbyRequest(place=self._number, open=request.open))

    async def receive(self) -> Sequence[wire.ProduceReply]:
        while not self._came:
            if self._end is not None:
                raise self._end
            self._news = asyncio.get_running_loop().create_future()
            try:
                await self._news
            finally:
                self._news = None
        came, self._came = self._came, []
        return came

    def publish(self, entry: bytes) -> None:
        """The receipt, or its failure, comes as a reply."""
        self._lobby.say(wire.LobbyRequest(place=self._number, publish=entry))

    def move(self) -> None:
        """Whoever reads gets Moves; the place is taken until it is left."""
        self._finish(Moves())

    def cancel(self) -> None:
        """It is left, without waiting for an answer."""
        self._finish(ConnectionLost("the producer has left the lobby"))
        if not self._leaving:
            self._leaving = True
            with contextlib.suppress(MagnetarError):
                self._lobby.say(wire.LobbyRequest(place=self._number, leave=wire.Empty()))

    async def close(self) -> None:
        """It is left when this returns, and the broker has forgotten the producer."""
        if not self._leaving:
            self._over = asyncio.get_running_loop().create_future()
            self.cancel()
            await asyncio.wait((self._over,), timeout=LEAVE_TIMEOUT_S)
