"""Administration over gRPC: the Admin and Broker services of proto/wire.proto.

**Which broker.** An operation on one topic is done by the topic's owner: the first broker that is asked does the
operation or names the owner. Any broker of the service URL can do all other operations. If no broker was ever reached,
the operation fails after each broker of the service URL was asked once, and the error advises what to do. Later, a
failure that may pass is retried until the operation's time is over.

**Encoding.** The arguments of an operation become fields of its request message by their names, and the fields of the
reply become the fields of the returned value (proto/translation.py). Guard: tests/client/admin/test_grpc_transport.py
compares every operation with its messages.

**Arguments.** `add_argument_checks` wraps every public coroutine method of a class: the method first checks that its
arguments have the types of their annotations, and sends nothing if one does not. The types come from the annotations,
so that a new method is checked without further code. An argument is converted to a plain value of its type:

| annotation | accepted | passed to the method |
|---|---|---|
| `int` | what `operator.index` takes, but no bool: integers of numpy, members of IntEnum | an int |
| `float` | the same, and what has `__float__` | an int or a float |
| `str` | text, and its subclasses: members of enums that are text | a str, of what it is and not of what it prints |
| `Sequence` | lists, tuples, ranges; no text, and nothing that is like bytes | a list |
| `Mapping` | dicts and the like | a dict |
| another class | its instances | the same |

Other rules (a count begins at 1, the form of a role's name) are checked by the method itself, or by the server. Guard:
tests/client/admin/test_arguments.py.

Also in this file, each below its heading: stored messages, which a broker sends for inspection and delivers to no
consumer (stored_messages); the methods of AdminClient that are made from rows of proto/operations.py (rows)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import operator
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from ...proto import statistics as values
from ...proto import wire_pb2 as wire
from ...proto.entry import decode_for_inspection, decode_properties, parse_header, split_broker_part
from ...proto.errors import ConnectionLost, InvalidRequest, MagnetarError, NotOwner, TimedOut, Unavailable
from ...proto.names import NamespaceName, TopicName, check_subscription_name, check_tenant_name
from ...proto.operations import ANSWER_TYPES, AnsweringBroker, Operation, PermissionScope, find_answer_type
from ...proto.translation import convert_reply, make_request
from ...runtime.network import Channel, Endpoint, Rpc, World, find_rpc
from ..common.checks import INT64_MAX, TEXT_CHECK, shorten_value, to_plain_text
from ..connect.authentication import make_caller_access
from ..connect.connections import Connections, make_client_world, make_unreachable_error, why_unreachable
from ..connect.discovery import parse_service_url
from ..model.message_id import MessageId, UncheckedMessageId
from ..model.settings import ClientSettings

# ----------------------------------------------------------------------------------------------- stored_messages
# Messages as they are stored, of the entries that a broker sends for inspection and does not deliver.


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A stored message that was read for inspection; no consumer received it. `key`: empty if it has none.
    `publish_time_ms`: when it was published, by the producer's clock, in ms since the epoch. `payload`: the bytes as
    the producer's schema encoded them, decompressed."""

    topic: str  # of one partition, full name
    message_id: MessageId
    key: str
    properties: Mapping[str, str]
    publish_time_ms: int
    payload: bytes
    index: int = -1  # in its partition, from 0
    is_acknowledged: bool | None = None  # by the subscription that the request named; None: that is not known


@dataclass(frozen=True, slots=True)
class FindResult:
    """The result of one search in a partition: the messages that were found, the newest first, and how far the search
    got. `before_index`: the index below which the next search must continue; 0: everything was looked at. `why`: the
    reason why the search stopped before that. `looked_at` and `bytes`: how many messages the broker looked at, and the
    bytes of their entries."""

    messages: list[StoredMessage]
    before_index: int
    looked_at: int  # messages
    bytes: int
    unread: int  # messages that the broker could not look into: encrypted, chunks, damaged or too large
    why: str
    waiting: int  # messages after the begin of an open transaction: no consumer gets them before that ends
    skipped: int = 0  # messages that key indexes passed over; they were not read
    ledgers: int = 0  # that the search came to; 0: no key index could help
    unindexed_ledgers: int = 0  # of these: sealed, and without a key index, so all of it was looked at


def decode_stored_messages(
    entries: Iterable[wire.Delivery | values.FoundEntry], topic: str, acknowledged: Collection[int] | None = None
) -> list[StoredMessage]:
    """Decodes stored entries that a broker sent for inspection, and returns their messages. Messages that an entry
    lists in `acked_batch_indexes` are left out. `acknowledged`: the batch indexes of the messages that a subscription
    has acknowledged, for the field `is_acknowledged`; None: not known. Raises CorruptEntry if an entry is damaged,
    InvalidName if `topic` is malformed."""
    partition = TopicName.parse(topic).partition
    found = []
    for entry in entries:
        last_index, _, client_part = split_broker_part(entry.entry)
        header = parse_header(client_part)
        first_index = last_index + 1 - header.num_messages
        for at, (about, payload) in enumerate(decode_for_inspection(header, client_part)):
            if at in entry.acked_batch_indexes:
                continue
            place = UncheckedMessageId(
                partition, entry.ledger_id, entry.entry_id, at if about is not header.metadata else -1
            )
            properties = decode_properties(about)
            found.append(
                StoredMessage(
                    topic, place, about.partition_key, properties, header.publish_time, payload, first_index + at,
                    None if acknowledged is None else at in acknowledged,
                )
            )
    return found


# ------------------------------------------------------------------------------------------------ grpc_transport


T = TypeVar("T")


class GrpcTransport:
    """The Transport of AdminClient over gRPC; connects at the first operation. `timeout_s`: the longest time in seconds
    of an operation with all its attempts. `world`: the clock and network to use; only tests set it. Raises InvalidUrl
    or InvalidConfiguration if a parameter is wrong."""

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
            self._made = Connections(self._world or make_client_world(), self._url, self._settings, self._access)
            if self._world is None:
                self._made.close_when_loop_ends()
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
        Raises the last error; if that is only that time is over, its text has the refusal before it, too."""
        now, backoff, first = self._connections.world.clock.monotonic, self._connections.backoff(), True
        refused: MagnetarError | None = None
        while True:
            try:
                if first or topic is None:
                    return await self._round(ask)
                return await ask(await self._connections.find_owner_channel(topic))
            except MagnetarError as error:
                delay_s = backoff.next_delay_s()
                if not error.retryable or not self._reached or now() + delay_s > end_s:
                    if refused is not None and isinstance(error, TimedOut):
                        raise TimedOut(f"{error.message}; before: {refused.message}", **error.fields) from refused
                    raise
                refused = refused if isinstance(error, TimedOut) else error
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
    return find_rpc(operation.service, operation.name)


def encode_request(operation: Operation[Any], arguments: Mapping[str, object]) -> tuple[Rpc[Any, Any], Message]:
    """Returns the gRPC method of an operation and the request message to send to it. Raises InvalidRequest if an
    argument does not fit its field."""
    target = rpc_of_operation(operation)
    return target, make_request(target.request, arguments, operation.name)


def decode_reply(operation: Operation[T], arguments: Mapping[str, object], reply: Message) -> T:
    """Returns the value of an operation that its reply message contains; stored messages are decoded from their
    entries. Raises CorruptEntry if such an entry is damaged."""
    kind = find_answer_type(operation.name, MessageId=MessageId, StoredMessage=StoredMessage)
    if kind == tuple[StoredMessage, ...]:
        entries = cast(wire.PeekMessagesReply, reply).entries
        return cast(T, tuple(decode_stored_messages(entries, str(arguments["topic"]))))
    return cast(T, convert_reply(kind, reply, operation.of_reply, {MessageId: MessageId.from_wire}))


# ----------------------------------------------------------------------------------------------------- transport
# What carries the operations of proto/operations.py to a cluster: gRPC (client/admin/grpc_transport.py), or what a
# program brings.
#
# A method of AdminClient is a function of client/admin/topics.py whose first parameter is an OperationCaller, or
# follows from its row (below); client/admin/client.py makes the class of them.


class Transport(Protocol):
    """The interface through which AdminClient sends its operations to the cluster. GrpcTransport implements it; a
    program may pass its own implementation to AdminClient. A transport belongs to one event loop.

    AdminClient passes the arguments of an operation by their names, as plain values: text, numbers, MessageId,
    sequences, mappings."""

    async def call(self, operation: Operation[T], arguments: Mapping[str, object], *, at: str = "") -> T:
        """Sends one operation to a broker and returns the broker's answer. `at`: HOST:PORT of the broker to ask;
        empty: any broker that can answer.

        Raises the MagnetarError with which the broker answered; Unavailable, ConnectionLost or TimedOut if no
        broker answered within the transport's time-out.
        """
        ...

    async def close(self) -> None:
        """Closes the connections of the transport, and returns when they are closed."""
        ...


class OperationCaller:
    """Base class of AdminClient: sends operations through a transport, which the derived class sets. `_timeout_s`: the
    longest time in seconds of an operation with all its attempts."""

    _transport: Transport
    _timeout_s: float

    async def _call(self, operation: Operation[T], **arguments: object) -> T:
        return await self._transport.call(operation, arguments)

    async def _all(self, operation: Operation[tuple[T, ...]], **arguments: object) -> list[T]:
        found = await self._call(operation, **arguments)
        return list(found)


def to_full_topic_name(topic: str) -> str:
    return TopicName.parse(topic).full


def to_full_namespace_name(name: str) -> str:
    return str(NamespaceName.parse(name))


def make_subscription_arguments(topic: str, name: str) -> dict[str, str]:
    return {"topic": to_full_topic_name(topic), "subscription": check_subscription_name(name)}


C = TypeVar("C", bound=type)
N = TypeVar("N", int, float)


class WrongArgumentType(InvalidRequest, TypeError):
    """Raised before anything is sent when an argument of an administration method has another type than its annotation.
    """


class WrongArgument(InvalidRequest, ValueError):
    """Raised before anything is sent when an argument has the right type, but cannot be sent: text that UTF-8 cannot
    encode, or a number of more than 64 bits."""


class _ArgumentUnfit(Exception):
    """A value does not fit its annotation; `kind` is the exception to raise."""

    def __init__(self, kind: type[WrongArgumentType] | type[WrongArgument]) -> None:
        self.kind = kind


def add_argument_checks(kind: C) -> C:
    """Makes the public coroutine methods of the class `kind` check and convert their arguments (see the head of the
    module), and returns the class. Such a method raises WrongArgumentType or WrongArgument before anything is sent."""
    for name in dir(kind):
        method = getattr(kind, name)
        if not name.startswith("_") and inspect.iscoroutinefunction(method):
            setattr(kind, name, _checked(method))
    return kind


def _checked(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    signature = inspect.signature(method)
    hints: dict[str, Any] = {}

    @functools.wraps(method)
    async def call(*arguments: Any, **options: Any) -> Any:
        if not hints:
            hints.update(get_type_hints(method))
        try:
            bound = signature.bind(*arguments, **options)
        except TypeError:  # which names the method when it is called
            return await method(*arguments, **options)
        given = bound.arguments
        for name, value in given.items():
            if name in hints:
                several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                one = functools.partial(convert_argument, name, hints[name])
                given[name] = tuple(map(one, value)) if several else one(value)
        return await method(*bound.args, **bound.kwargs)

    return call


def convert_argument(name: str, hint: Any, value: object) -> Any:
    """Returns the argument `value` converted to the type that the method expects. Raises WrongArgumentType or
    WrongArgument if `value` does not fit the annotation `hint`."""
    try:
        return _fitted(hint, value)
    except _ArgumentUnfit as unfit:
        raise unfit.kind(f"{name} is {_says(hint)}, not {shorten_value(value)}") from None


def _fitted(hint: Any, value: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return _first_fitted(parts, value)
    if origin is Sequence:
        if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
            raise _ArgumentUnfit(WrongArgumentType)
        elements: list[Any] = _foreign(list, value)
        return [_fitted(parts[0], each) for each in elements]
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _ArgumentUnfit(WrongArgumentType)
        pairs = _foreign(lambda: list(value.items()))
        return {_fitted(parts[0], key): _fitted(parts[1], each) for key, each in pairs}
    if origin is tuple:
        if not isinstance(value, tuple) or len(value) != len(parts):
            raise _ArgumentUnfit(WrongArgumentType)
        return tuple(map(_fitted, parts, value))
    return _of_one(hint, value)


def _first_fitted(hints: Sequence[Any], value: Any) -> Any:
    worst: type[WrongArgumentType] | type[WrongArgument] = WrongArgumentType
    for hint in hints:
        try:
            return _fitted(hint, value)
        except _ArgumentUnfit as unfit:
            worst = WrongArgument if unfit.kind is WrongArgument else worst
    raise _ArgumentUnfit(worst)


def _of_one(hint: Any, value: Any) -> Any:
    if hint is int:
        return _in_64_bits(_whole(value))
    if hint is float:
        return _in_64_bits(_number(value))
    if not isinstance(value, hint):
        raise _ArgumentUnfit(WrongArgumentType)
    if hint is str:
        value = to_plain_text(value)
        if not TEXT_CHECK.fits(value):
            raise _ArgumentUnfit(WrongArgument)
    return value


def _whole(value: Any) -> int:
    """Returns the number by `operator.index`, as Python's own functions do; so an integer of numpy fits, too."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise _ArgumentUnfit(WrongArgumentType)
    return int.__index__(_foreign(operator.index, value))


def _number(value: Any) -> float:
    """Returns the number; a whole number stays one. Text has no `__float__`."""
    if isinstance(value, bool) or hasattr(type(value), "__index__"):
        return _whole(value)
    if not hasattr(type(value), "__float__"):
        raise _ArgumentUnfit(WrongArgumentType)
    try:
        return float(value)
    except OverflowError:
        raise _ArgumentUnfit(WrongArgument) from None
    except Exception:
        raise _ArgumentUnfit(WrongArgumentType) from None


def _in_64_bits(value: N) -> N:
    if not -INT64_MAX <= value <= INT64_MAX:  # also what is no number
        raise _ArgumentUnfit(WrongArgument)
    return value


def _foreign(call: Callable[..., T], *values: Any) -> T:
    """Calls a function that runs code of the argument itself; an exception in it means that the argument has a wrong
    type."""
    try:
        return call(*values)
    except Exception:
        raise _ArgumentUnfit(WrongArgumentType) from None


def _says(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(map(_says, parts))
    if origin is Sequence:
        return f"a list of {_says(parts[0])}"
    if origin is Mapping:
        return f"a dict of {' to '.join(map(_says, parts))}"
    if origin is tuple:
        return f"a tuple of {', '.join(map(_says, parts))}"
    return _WORDS.get(hint) or f"a {hint.__name__}"


_WORDS = {
    str: "text that can be encoded", int: "a whole number of 64 bits", float: "a number", bool: "True or False",
    NoneType: "None",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- rows
# The methods of AdminClient that follow from rows of proto/operations.py: those whose row names a `method`.
#
#     TrimTopic, of a topic        →  async def trim_topic(self, topic: str) -> None
#
# The first parameters are the place and the subscription, as the row's rule has them; what the row `takes` comes by
# keyword, with the default of its type. An answer of several is a list.


ANNOTATION_NAMESPACES = values, MessageId, StoredMessage
"""The modules and classes that the annotations name; annotations are text."""
SCOPE_ARGUMENTS: dict[PermissionScope, tuple[str, Callable[[str], str]]] = {
    PermissionScope.TOPIC: ("topic", to_full_topic_name), PermissionScope.NAMESPACE: ("name", to_full_namespace_name),
    PermissionScope.TENANT: ("name", check_tenant_name),
}  # fmt: skip
"""Scope of an operation → the name of the parameter that says where the operation applies, and its check, which is
called before anything is sent."""
ArgumentChecks = Mapping[str, tuple[str, Callable[[str], str]]]


def make_operation_method(row: Operation[Any]) -> Callable[..., Awaitable[Any]]:
    """Returns a method of AdminClient for `row`, a row of the table of operations. The method checks its arguments,
    does the operation and returns the answer, as a list if the answer is a tuple. It raises TypeError for arguments
    that do not fit its signature, InvalidName for a malformed name, and the errors of the transport."""
    signature, checks = make_method_signature(row)
    is_list = ANSWER_TYPES[row.name].startswith("tuple[")

    async def call(self: OperationCaller, /, *given: Any, **options: Any) -> Any:
        try:
            bound = signature.bind(self, *given, **options)
        except TypeError as error:
            raise TypeError(f"{call.__qualname__}() {error}") from None
        bound.apply_defaults()
        taken = {name: value for name, value in bound.arguments.items() if name != "self"}
        places = {argument: check(taken.pop(name)) for name, (argument, check) in checks.items()}
        found = await self._call(row, **places, **taken)
        return list(found) if is_list else found

    call.__name__, call.__qualname__, call.__doc__ = row.method, f"AdminClient.{row.method}", row.help
    call.__signature__ = signature  # type: ignore[attr-defined]
    kinds = {each.name: each.annotation for each in signature.parameters.values() if each.name != "self"}
    call.__annotations__ = {**kinds, "return": signature.return_annotation}
    return call


def make_method_signature(row: Operation[Any]) -> tuple[inspect.Signature, ArgumentChecks]:
    """Returns a tuple of two things for the method of one operation: its Python signature, and the checks of its
    parameters. The checks map the name of a parameter to the name of the operation's argument and the function that
    checks the value."""
    rule, checks = row.rule, dict[str, tuple[str, Callable[[str], str]]]()
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    if rule.subscription:
        checks["name"] = "subscription", check_subscription_name
    if rule.on in SCOPE_ARGUMENTS:
        name, check = SCOPE_ARGUMENTS[rule.on]
        checks = {name: (rule.on.value, check), **checks}
    first, only = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters += [inspect.Parameter(name, first, annotation="str") for name in checks]
    parameters += [
        inspect.Parameter(each.name, only, default=each.kind(), annotation=each.kind.__name__) for each in row.takes
    ]
    answer = ANSWER_TYPES[row.name]
    if answer.startswith("tuple["):
        answer = f"list[{answer[6:-6]}]"
    return inspect.Signature(parameters, return_annotation=answer), checks
