"""Administration over gRPC: the Admin and Broker services of proto/wire.proto.

**Which broker.** What concerns one topic goes to its owner: any broker is asked first, which answers or names the
owner; all else goes to any broker of the service URL. When none of them could ever be reached the first round fails
at once, with what to do; later a failure that may pass is tried again until the time is over.

**How arguments become messages.** By name: an argument that the request has no field for is its `name`. Answers come
back by name too, into the fields of the operation's type; a reply of one field is that field. Guard:
tests/client/admin/test_grpc_transport.py compares every operation with its messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, InvalidRequest, MagnetarError, NotOwner, Unavailable
from ...proto.names import Position, TopicName
from ...proto.schema import SchemaInfo, SchemaType, version_of
from ...proto.statistics import NamespaceInfo
from ...proto.transactions import TxnId
from ...runtime.network import Channel, Endpoint, Rpc, rpc
from ...runtime.world import World
from ..connect.authentication import caller_access
from ..connect.connections import Connections
from ..connect.first_contact import how_unreached, no_server
from ..connect.service_url import parse_service_url
from ..connect.world import client_world
from ..model.message_id import MessageId
from ..model.settings import ClientSettings
from .operations import AskedOf, Operation
from .stored_messages import StoredMessage, stored_messages

T = TypeVar("T")

_BROKER_SERVICE = {"Lookup", "Partitions", "Offsets", "AdvanceSubscription", "GetSchema"}
"""Operations that clients have too; the others are of the Admin service."""
_ANSWER_FIELD = {"Lookup": "owner", "Partitions": "partitions", "GetSubscriptionProperties": "properties",
                 "AbortTransaction": "state"}  # fmt: skip
"""Of replies with more fields than the answer."""


class GrpcTransport:
    """`timeout_s` bounds an operation with all its attempts. `world`: of tests."""

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
        """`end_s`: in the time of the world's clock."""
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


# ------------------------------------------------------------------------------------ to messages
def target_of(operation: Operation[Any]) -> Rpc[Any, Any]:
    return rpc("Broker" if operation.name in _BROKER_SERVICE else "Admin", operation.name)


def encode(operation: Operation[Any], arguments: Mapping[str, object]) -> tuple[Rpc[Any, Any], Message]:
    """The rpc and its request. InvalidRequest: a value does not fit its field."""
    target = target_of(operation)
    known = target.request.DESCRIPTOR.fields_by_name
    given: dict[str, object] = {}
    for name, value in arguments.items():
        if name == "auto_topic_creation":
            name, value = "auto_topic_creation_off", not value
        if isinstance(value, SchemaInfo):
            value = wire.SchemaInfo(type=value.type, data=value.data, name=value.name, properties=value.properties)
        given[name if name in known else "name"] = value.to_wire() if isinstance(value, MessageId) else value
    try:
        return target, target.request(**given)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{operation.name}: {error}") from error


# ------------------------------------------------------------------------------------ from messages
def decode(operation: Operation[T], arguments: Mapping[str, object], reply: Message) -> T:
    if operation.answer == tuple[StoredMessage, ...]:
        entries = cast(wire.PeekMessagesReply, reply).entries
        return cast(T, tuple(stored_messages(entries, str(arguments["topic"]))))
    if not _is_message(operation.answer):
        reply = getattr(reply, _ANSWER_FIELD.get(operation.name) or reply.DESCRIPTOR.fields[0].name)
    return cast(T, _value(operation.answer, reply))


def _is_message(kind: Any) -> bool:
    return is_dataclass(kind) or kind in (NoneType, MessageId)


def _value(kind: Any, found: Any) -> Any:
    """What `found` (a message, a field of one) is as a `kind`."""
    if get_origin(kind) is UnionType:
        kind = get_args(kind)[0]
    if kind is NoneType:
        return None
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], each) for each in found)
    if get_origin(kind) is dict:
        return dict(found)
    if get_origin(kind) is Mapping and found.GetEntryClass().DESCRIPTOR.fields_by_name["value"].message_type:
        return {name: tuple(each.names) for name, each in found.items()}
    if kind is MessageId:
        return MessageId.from_wire(found)
    if kind is TxnId:
        return TxnId(found.most, found.least)
    if kind is Position:
        return Position(found.ledger_id, found.entry_id)
    if kind is NamespaceInfo:
        creation = not found.auto_topic_creation_off, found.default_partitions, found.is_creation_set
        return NamespaceInfo(found.name, found.bundles, *creation)
    if kind is SchemaInfo:
        return SchemaInfo(
            type=SchemaType(found.type), data=found.data, name=found.name, properties=dict(found.properties)
        )
    if kind is int and isinstance(found, bytes):
        return version_of(found)
    if is_dataclass(kind):
        hints = hints_of(cast(type, kind))
        return cast(Any, kind)(**{name: _field(hint, found, name) for name, hint in hints})
    return kind(found) if issubclass(kind, Enum) else found


def _field(hint: Any, found: Any, name: str) -> Any:
    """A field of a message; a message that is absent is None, where the type says so."""
    kind = get_args(hint)[0] if get_origin(hint) is UnionType else None
    optional = kind is not None and (is_dataclass(kind) or kind in (TxnId, Position))
    if optional and not found.HasField(name):
        return None
    return _value(hint, getattr(found, name))


@cache
def hints_of(kind: type) -> tuple[tuple[str, Any], ...]:
    """(name, type) of each field of a dataclass."""
    hints = get_type_hints(kind)
    return tuple((each.name, hints[each.name]) for each in fields(kind))
