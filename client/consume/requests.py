"""The requests of a consumer that its broker answers: each has a number, and the answer names it.

When the connection breaks before the answer comes, the request is sent again over the next one, until the deadline of
the operation. Guards: tests/client/consume/test_partition_consumer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError, SubscriptionNotFound
from ..common import errors
from ..common.errors import OperationNotSupported, translate
from ..connect.connections import Connections
from ..core.consumer import ConsumerCore
from ..core.effects import ConsumerEffect
from ..core.state import State
from ..model.message_id import MessageId
from .acknowledgements import AckSender, Pending, place_of
from .frames import acks_of


class Requests:
    """The requests of one consumer."""

    def __init__(
        self, connections: Connections, core: ConsumerCore, acks: AckSender, send: Callable[..., None],
        do: Callable[[list[ConsumerEffect]], None],
    ) -> None:  # fmt: skip
        """Makes the requests. `send` sends a ClientFrame of that kind; `do` does effects of the core."""
        self.unsubscribed = False  # there is nothing left to leave
        self._connections = connections
        self._core = core
        self._acks = acks
        self._send = send
        self._do = do
        self._loop = asyncio.get_running_loop()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._calls: dict[int, Callable[[MagnetarError | None], None]] = {}
        self._changed: asyncio.Future[None] | None = None  # it is connected, or finished

    async def last_message_id(self) -> wire.LastMessageId:
        reply: wire.LastMessageId = await self._ask(lambda id_: self._send(last_message_id=id_))
        return reply

    async def seek(self, to: MessageId | int) -> None:
        """Moves the subscription: what was delivered before is forgotten; what is delivered next is from there."""
        self.forget_acknowledged()
        await self._ask(lambda id_: self._do(self._core.seek(id_, to)))

    def forget_acknowledged(self) -> None:
        """Forgets, because the subscription is moved, what was acknowledged before and is not told yet: it is delivered
        again."""
        self._acks.forget()
        self._core.forget_acknowledged()

    async def unsubscribe(self) -> None:
        """Returns when the subscription is gone: who asked again over a new connection may have removed it before."""
        asked = False

        def ask(request_id: int) -> None:
            nonlocal asked
            asked = True
            self._send(unsubscribe=request_id)

        try:
            await self._ask(ask)
        except (SubscriptionNotFound, errors.SubscriptionNotFound):
            if not asked:
                raise
        self.unsubscribed = True

    async def acknowledge(self, which: Iterable[Pending], *, cumulative: bool = False) -> None:
        """Returns when the ack survives a crash of all processes. OperationNotSupported: a cumulative one would cover
        a part of a message in chunks."""
        every = [each for one in which for each in self._acks.with_chunks(one)]
        for each in every if cumulative else ():
            place = place_of(each)[0]
            if not self._core.covers(place):
                raise OperationNotSupported(
                    f"a message in chunks begins before {place} and is not acknowledged yet: acknowledge that first"
                )
        self._acks.gather()
        for ack in acks_of(self._acks.take_over(every, cumulative=cumulative)):

            def request(request_id: int, ack: wire.Ack = ack) -> None:
                ack.request_id = request_id
                self._send(ack=ack)

            await self._ask(request)

    async def send_last_acks(self) -> None:
        """Returns when all acks that wait are durable."""
        self._acks.gather()
        request_id, effects = self._core.last_acks()
        if request_id:
            answer = self._expect(request_id)
            self._do(effects)
            await answer

    async def _ask(self, send: Callable[[int], object]) -> Any:
        """Sends a request under a new number; once more over the next connection when this one breaks. Returns the
        answer."""

        async def attempt() -> Any:
            while self._core.state is not State.CONNECTED:
                self.raise_if_closed()
                await self.changed()
            request_id = self._core.request()
            answer = self._expect(request_id)
            send(request_id)
            try:
                return await answer
            finally:
                self._answers.pop(request_id, None)

        return await self._connections.retry(attempt)

    def _expect(self, request_id: int) -> asyncio.Future[Any]:
        answer = self._answers[request_id] = self._loop.create_future()
        return answer

    def call(self, request_id: int, told: Callable[[MagnetarError | None], None]) -> None:
        """Calls `told` with the outcome of a request that its caller sends itself."""
        self._calls[request_id] = told

    def answer(self, request_id: int, error: MagnetarError | None, result: Any) -> None:
        told = self._calls.pop(request_id, None)
        if told is not None:
            told(error)
            return
        answer = self._answers.pop(request_id, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)

    async def changed(self) -> None:
        """Returns when it is connected, or finished."""
        if self._changed is None:
            self._changed = self._loop.create_future()
        await asyncio.shield(self._changed)

    def tell_change(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    def raise_if_closed(self) -> None:
        if self._core.error is not None:
            error = translate(self._core.error)
            raise type(error)(error.message) from error
