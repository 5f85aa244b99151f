"""Administration over gRPC: the Admin and Broker services of proto/wire.proto.

**Which broker.** What concerns one topic goes to its owner: any broker is asked first, which answers or names the
owner; all else goes to any broker of the service URL. When none of them could ever be reached the first round fails
at once, with what to do; later a failure that may pass is tried again until the time is over.

**How arguments become messages.** By name (proto/translation.py), and so do messages become answers. Guard:
tests/client/admin/test_grpc_transport.py compares every operation with its messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, MagnetarError, NotOwner, Unavailable
from ...proto.names import TopicName
from ...proto.operation import AskedOf, Operation
from ...proto.operations import answer_of
from ...proto.translation import request_of, value_of
from ...runtime.network import Channel, Endpoint, Rpc, rpc
from ...runtime.world import World
from ..connect.authentication import caller_access
from ..connect.connections import Connections
from ..connect.first_contact import how_unreached, no_server
from ..connect.service_url import parse_service_url
from ..connect.world import client_world
from ..model.message_id import MessageId
from ..model.settings import ClientSettings
from .stored_messages import StoredMessage, stored_messages

T = TypeVar("T")


class GrpcTransport:
    """The transport over gRPC. `timeout_s` bounds an operation with all its attempts. `world`: of tests."""

    def __init__(
        self, service_url: str, timeout_s: float, world: World | None = None, authentication: object = None,
        trust_certs_file: str = "",
    ) -> None:  # fmt: skip
        url = parse_service_url(service_url)
        self._url = url
        self._access = caller_access(url, authentication, {"tls_trust_certs_file_path": trust_certs_file})
        self._settings = ClientSettings(operation_timeout_s=timeout_s, connection_timeout_s=timeout_s)
        self._world = world
        self._made: Connections | None = None
        self._reached = False  # a broker has answered

    @property
    def _connections(self) -> Connections:
        if self._made is None:
            self._made = Connections(self._world or client_world(), self._url, self._settings, self._access)
            if self._world is None:
                self._made.leave_with_the_loop()
        return self._made

    async def call(self, operation: Operation[T], arguments: Mapping[str, object], *, at: str = "") -> T:
        target, request = encode(operation, arguments)
        now = self._connections.world.clock.monotonic
        deadline = now() + self._settings.operation_timeout_s

        async def ask(channel: Channel) -> Message:
            left_s = max(0.001, deadline - now())
            reply: Message = await channel.call(target, request, timeout_s=left_s)
            return reply

        if at:
            reply = await ask(self._connections.channel(Endpoint.parse(at)))
        else:
            topic = TopicName.parse(str(arguments["topic"])) if operation.asked_of is AskedOf.OWNER else None
            reply = await self._retried(ask, topic, deadline)
        return decode(operation, arguments, reply)

    async def _retried(
        self, ask: Callable[[Channel], Awaitable[Message]], topic: TopicName | None, end_s: float
    ) -> Message:
        """Asks until `end_s`, in the time of the world's clock."""
        now, backoff, first = self._connections.world.clock.monotonic, self._connections.backoff(), True
        while True:
            try:
                if first or topic is None:
                    return await self._round(ask)
                return await ask(await self._connections.owner(topic))
            except MagnetarError as error:
                delay_s = backoff.next_s()
                if not error.retryable or not self._reached or now() + delay_s > end_s:
                    raise
            first = False
            await asyncio.sleep(delay_s)

    async def _round(self, ask: Callable[[Channel], Awaitable[Message]]) -> Message:
        """Asks the brokers of the service URL in turn until one answers, and the owner that one names."""
        failure: MagnetarError | None = None
        for _ in self._url.endpoints:
            try:
                reply = await self._ask_any(ask)
            except (Unavailable, ConnectionLost) as error:
                self._reached |= how_unreached(error) is None
                failure = error
            else:
                self._reached = True
                return reply
        assert failure is not None, "a service URL names at least one broker"
        raise failure if self._reached else no_server(failure, self._url.endpoints)

    async def _ask_any(self, ask: Callable[[Channel], Awaitable[Message]]) -> Message:
        try:
            return await ask(await self._connections.any())
        except NotOwner as error:
            self._reached = True
            if not (owner := error.fields.get("owner")):
                raise
            return await ask(self._connections.channel(Endpoint.parse(owner)))

    async def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            await made.close()


# ------------------------------------------------------------------------------------ messages
def target_of(operation: Operation[Any]) -> Rpc[Any, Any]:
    return rpc(operation.service, operation.name)


def encode(operation: Operation[Any], arguments: Mapping[str, object]) -> tuple[Rpc[Any, Any], Message]:
    """The rpc and its request. InvalidRequest: a value does not fit its field."""
    target = target_of(operation)
    return target, request_of(target.request, arguments, operation.name)


def decode(operation: Operation[T], arguments: Mapping[str, object], reply: Message) -> T:
    kind = answer_of(operation.name, MessageId=MessageId, StoredMessage=StoredMessage)
    if kind == tuple[StoredMessage, ...]:
        entries = cast(wire.PeekMessagesReply, reply).entries
        return cast(T, tuple(stored_messages(entries, str(arguments["topic"]))))
    return cast(T, value_of(kind, reply, operation.of_reply, {MessageId: MessageId.from_wire}))
