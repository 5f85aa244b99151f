"""Administration over gRPC: the Admin and Broker services of proto/wire.proto.

**Which broker.** An operation on one topic goes to its owner: any broker is asked first, which answers or names the
owner. All other operations go to any broker of the service URL. When none of these could ever be reached the first
round fails at once, with what to do; later a failure that may pass is tried again until the time is over.

**How arguments become messages.** By name (proto/translation.py), and so do messages become answers. Guard:
tests/client/admin/test_grpc_transport.py compares every operation with its messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from google.protobuf.message import Message

from ...proto import wire_pb2 as wire
from ...proto.entry import decode_as_stored, parse_header, properties_of, split_broker_part
from ...proto.errors import ConnectionLost, MagnetarError, NotOwner, Unavailable
from ...proto.names import NamespaceName, TopicName, check_subscription_name
from ...proto.operations import AnsweringBroker, Operation, answer_of
from ...proto.translation import request_of, value_of_reply
from ...runtime.network import Channel, Endpoint, Rpc, World, rpc
from ..connect.authentication import make_caller_access
from ..connect.connections import Connections, client_world, make_unreachable_error, why_unreachable
from ..connect.service_url import parse_service_url
from ..model.message_id import MessageId, UncheckedMessageId
from ..model.settings import ClientSettings

# ----------------------------------------------------------------------------------------------- stored_messages
# Messages as they are stored, of the entries that a broker sends for a look, without being delivered.


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it is stored, without being delivered."""

    topic: str  # of one partition, full name
    message_id: MessageId
    key: str
    properties: Mapping[str, str]
    publish_time_ms: int
    payload: bytes


def decode_stored_messages(entries: Iterable[wire.Delivery], topic: str) -> list[StoredMessage]:
    """Decodes entries, as a broker sends them, into messages (proto/entry.py `decode_as_stored`); acknowledged ones are
    left out. Raises CorruptEntry."""
    partition = TopicName.parse(topic).partition
    found = []
    for entry in entries:
        client_part = split_broker_part(entry.entry)[2]
        header = parse_header(client_part)
        for at, (about, payload) in enumerate(decode_as_stored(header, client_part)):
            if at in entry.acked_batch_indexes:
                continue
            place = UncheckedMessageId(
                partition, entry.ledger_id, entry.entry_id, at if about is not header.metadata else -1
            )
            properties = properties_of(about)
            found.append(
                StoredMessage(topic, place, about.partition_key, properties, header.publish_time, payload)
            )
    return found


# ------------------------------------------------------------------------------------------------ grpc_transport


T = TypeVar("T")


class GrpcTransport:
    """Carries operations over gRPC. `timeout_s` bounds an operation with all its attempts. `world` is for tests."""

    def __init__(
        self, service_url: str, timeout_s: float, world: World | None = None, authentication: object = None,
        trust_certs_file: str = "",
    ) -> None:  # fmt: skip
        url = parse_service_url(service_url)
        self._url = url
        self._access = make_caller_access(url, authentication, {"tls_trust_certs_file_path": trust_certs_file})
        self._settings = ClientSettings(operation_timeout_s=timeout_s, connection_timeout_s=timeout_s)
        self._world = world
        self._made: Connections | None = None
        self._reached = False  # a broker has answered

    @property
    def _connections(self) -> Connections:
        if self._made is None:
            self._made = Connections(self._world or client_world(), self._url, self._settings, self._access)
            if self._world is None:
                self._made.close_with_loop()
        return self._made

    async def call(self, operation: Operation[T], arguments: Mapping[str, object], *, at: str = "") -> T:
        target, request = encode_request(operation, arguments)
        now = self._connections.world.clock.monotonic
        deadline = now() + self._settings.operation_timeout_s

        async def ask(channel: Channel) -> Message:
            left_s = max(0.001, deadline - now())
            reply: Message = await channel.call(target, request, timeout_s=left_s)
            return reply

        if at:
            reply = await ask(self._connections.channel(Endpoint.parse(at)))
        else:
            topic = TopicName.parse(str(arguments["topic"])) if operation.asked_of is AnsweringBroker.OWNER else None
            reply = await self._retried(ask, topic, deadline)
        return decode_reply(operation, arguments, reply)

    async def _retried(
        self, ask: Callable[[Channel], Awaitable[Message]], topic: TopicName | None, end_s: float
    ) -> Message:
        """Calls `ask(channel)` until it succeeds, or until the time `end_s` of the world's clock; returns the reply.
        Raises the last error."""
        now, backoff, first = self._connections.world.clock.monotonic, self._connections.backoff(), True
        while True:
            try:
                if first or topic is None:
                    return await self._round(ask)
                return await ask(await self._connections.find_owner_channel(topic))
            except MagnetarError as error:
                delay_s = backoff.next_s()
                if not error.retryable or not self._reached or now() + delay_s > end_s:
                    raise
            first = False
            await asyncio.sleep(delay_s)

    async def _round(self, ask: Callable[[Channel], Awaitable[Message]]) -> Message:
        """Asks the brokers of the service URL in turn until one answers; if one names the topic's owner, asks that one.
        """
        failure: MagnetarError | None = None
        for _ in self._url.endpoints:
            try:
                reply = await self._ask_any(ask)
            except (Unavailable, ConnectionLost) as error:
                self._reached |= why_unreachable(error) is None
                failure = error
            else:
                self._reached = True
                return reply
        assert failure is not None, "a service URL names at least one broker"
        raise failure if self._reached else make_unreachable_error(failure, self._url.endpoints)

    async def _ask_any(self, ask: Callable[[Channel], Awaitable[Message]]) -> Message:
        try:
            return await ask(await self._connections.next_broker_channel())
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
def rpc_of_operation(operation: Operation[Any]) -> Rpc[Any, Any]:
    return rpc(operation.service, operation.name)


def encode_request(operation: Operation[Any], arguments: Mapping[str, object]) -> tuple[Rpc[Any, Any], Message]:
    """Returns the rpc of an operation and its request. Raises InvalidRequest if an argument does not fit its field."""
    target = rpc_of_operation(operation)
    return target, request_of(target.request, arguments, operation.name)


def decode_reply(operation: Operation[T], arguments: Mapping[str, object], reply: Message) -> T:
    kind = answer_of(operation.name, MessageId=MessageId, StoredMessage=StoredMessage)
    if kind == tuple[StoredMessage, ...]:
        entries = cast(wire.PeekMessagesReply, reply).entries
        return cast(T, tuple(decode_stored_messages(entries, str(arguments["topic"]))))
    return cast(T, value_of_reply(kind, reply, operation.of_reply, {MessageId: MessageId.from_wire}))


# ----------------------------------------------------------------------------------------------------- transport
# What carries the operations of proto/operations.py to a cluster: gRPC (client/admin/grpc_transport.py), or what a
# program brings.
#
# A method of AdminClient is a function of this package whose first parameter is a Caller, or follows from its row
# (client/admin/arguments.py); client/admin/client.py makes the class of them.


class Transport(Protocol):
    """Carries the operations of AdminClient to the cluster. Belongs to one event loop.

    Arguments are what AdminClient passes by keyword, as plain values: text, numbers, MessageId, sequences, mappings.
    """

    async def call(self, operation: Operation[T], arguments: Mapping[str, object], *, at: str = "") -> T:
        """Calls an operation and returns its answer. `at`: HOST:PORT of the broker to ask; empty: any that can answer.

        Raises the MagnetarError with which the server answered; Unavailable, ConnectionLost or TimedOut if none
        answered within the transport's time-out.
        """
        ...

    async def close(self) -> None:
        """Closes the connections of the transport."""
        ...


class OperationCaller:
    """Sends operations through a transport. `_timeout_s` bounds each of them with all its attempts."""

    _transport: Transport
    _timeout_s: float

    async def _call(self, operation: Operation[T], **arguments: object) -> T:
        return await self._transport.call(operation, arguments)

    async def _all(self, operation: Operation[tuple[T, ...]], **arguments: object) -> list[T]:
        found = await self._call(operation, **arguments)
        return list(found)


def full_topic(topic: str) -> str:
    return TopicName.parse(topic).full


def full_namespace(name: str) -> str:
    return str(NamespaceName.parse(name))


def subscription_arguments(topic: str, name: str) -> dict[str, str]:
    return {"topic": full_topic(topic), "subscription": check_subscription_name(name)}
