"""Converts plain values to messages of proto/wire.proto and back, by the names of their fields.

    make_request(wire.TopicSpec, {"topic": "t", "partitions": 4})   an argument without a field of its name becomes
                                                                    the field `name`
    make_reply_message(wire.Names, ["a", "b"])                      a value that is no message becomes the first field
    convert_reply(tuple[str, ...], reply)                           … and back

Guards: tests/client/admin/test_grpc_transport.py compares each answer with its message, field by field;
tests/broker/grpc/test_stats.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.message import Message

from . import wire_pb2 as wire
from .errors import InvalidRequest
from .names import Position
from .schema import SchemaInfo, SchemaType, decode_version
from .states import TxnId
from .statistics import NamespaceInfo

M = TypeVar("M", bound=Message)

_PLAIN = frozenset((bool, bytes, float, int, str))
"""The types of values that a message stores unchanged."""


# ------------------------------------------------------------------------------------ to messages
def make_request(kind: type[M], arguments: Mapping[str, object], name: str = "") -> M:
    """Makes a request message of class `kind` from these arguments and returns it. An argument without a field of its
    name becomes the field `name`. Raises InvalidRequest if a value does not fit its field; its text begins with the
    operation `name`."""
    known = kind.DESCRIPTOR.fields_by_name
    given: dict[str, object] = {}
    for argument, value in arguments.items():
        if argument == "auto_topic_creation":
            argument, value = "auto_topic_creation_off", not value
        given[argument if argument in known else "name"] = _plain(value)
    try:
        return kind(**given)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name or kind.DESCRIPTOR.name}: {error}") from error


def make_reply_message(kind: type[Message], value: object, field: str = "") -> Message:
    """Makes a reply message of class `kind` from a handler's result `value` and returns it. `field`: the field of the
    reply for the result; "": the first field, or the whole reply if `value` is a dataclass. None makes an empty
    message; a message is returned unchanged. Raises TypeError or ValueError if the value does not fit the message."""
    if isinstance(value, Message):
        return value
    if value is None:
        return kind()
    if is_dataclass(value) and not field:
        plain = _plain(value)
        return plain if isinstance(plain, Message) else kind(**plain)
    given: Any = {field or kind.DESCRIPTOR.fields[0].name: _plain(value)}
    return kind(**given)


def _plain(value: Any) -> Any:
    """Converts a value to the form that the constructor of a message accepts."""
    if type(value) in _PLAIN or isinstance(value, Enum):
        return value
    if isinstance(value, SchemaInfo):
        return wire.SchemaInfo(type=value.type, data=value.data, name=value.name, properties=value.properties)
    if hasattr(value, "to_wire"):
        return value.to_wire()
    if isinstance(value, Position | TxnId):
        return value._asdict()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(each, tuple | list) for each in value.values()):
        return {key: wire.Names(names=each) for key, each in value.items()}  # a message's own fields are not all lists
    if isinstance(value, NamespaceInfo):
        off = not value.auto_topic_creation
        plain = {each.name: getattr(value, each.name) for each in fields(value) if each.name != "auto_topic_creation"}
        return {**plain, "auto_topic_creation_off": off}
    if is_dataclass(value):
        shape, read = _reader_of(cast(type, type(value)))
        return {  # a field that has no presence is not set to zero: most fields of thousands of topics are zero
            name: each if type(each) in _PLAIN else _plain(each)
            for (name, hint, _), each in zip(shape, read(value), strict=True) if each or hint not in _PLAIN
        }  # fmt: skip
    return value


@cache
def _reader_of(kind: type) -> tuple[tuple[tuple[str, Any, bool], ...], Callable[[Any], tuple[Any, ...]]]:
    """Returns (fields of the dataclass, as `_shape_of` does; function that reads all of them from an object)."""
    shape = _shape_of(kind)
    names = [name for name, _, _ in shape]
    return shape, attrgetter(*names) if len(names) > 1 else lambda value: tuple(getattr(value, name) for name in names)


# ------------------------------------------------------------------------------------ from messages
def convert_reply(
    kind: Any, reply: Message, field: str = "", made: Mapping[Any, Callable[[Any], Any]] | None = None
) -> Any:
    """Converts a reply message to a value of type `kind` and returns it. `field`: the field of the reply with the
    value; "": the first field, or the whole reply if `kind` is a dataclass. `made`: functions that convert messages to
    the caller's own types, by type. Raises ValueError for a number that is no member of an enum of ours."""
    if not (is_dataclass(kind) or kind in (None, NoneType) or kind in (made or {})):
        return _value(kind, getattr(reply, field or reply.DESCRIPTOR.fields[0].name))
    return (made or {}).get(kind, lambda found: _value(kind, found))(reply)


def _value(kind: Any, found: Any) -> Any:
    """Converts `found`, a message or a field of a message, to a value of type `kind`."""
    if kind in _PLAIN and type(found) is kind:
        return found
    make = _MAKERS.get((kind, type(found)))
    if make is not None:
        return make(found)
    if get_origin(kind) is UnionType:
        kind = get_args(kind)[0]
    if kind in (None, NoneType):
        return None
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], each) for each in found)
    if get_origin(kind) is dict:
        return dict(found)
    if get_origin(kind) is Mapping and found.GetEntryClass().DESCRIPTOR.fields_by_name["value"].message_type:
        return {name: tuple(each.names) for name, each in found.items()}
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
        return decode_version(found)
    if is_dataclass(kind):
        make = _MAKERS[kind, type(found)] = _make_maker(kind, found)
        return make(found)
    return kind(found) if issubclass(kind, Enum) else found


_MAKERS: dict[tuple[Any, type], Callable[[Any], Any]] = {}
"""The functions that convert a message to a dataclass, by (dataclass, class of the message)."""


def _make_maker(kind: Any, found: Any) -> Callable[[Any], Any]:
    """Returns a function that converts messages of the class of `found` to the dataclass `kind`. It reads all fields at
    once, because a list of thousands of topics has a hundred fields for each."""
    shape = _shape_of(kind)
    read = attrgetter(*(name for name, _, _ in shape), "DESCRIPTOR")  # of one name it would make no tuple
    others = [
        (at, name, _converter(hint), optional) for at, (name, hint, optional) in enumerate(shape)
        if hint not in _PLAIN or type(getattr(found, name)) is not hint
    ]  # fmt: skip

    def make(found: Any) -> Any:
        values = list(read(found)[:-1])
        for at, name, convert, optional in others:
            values[at] = None if optional and not found.HasField(name) else convert(values[at])
        return kind(*values)

    return make


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Returns a function that converts a field to type `hint`, as `_value` does, but faster for many fields."""
    kind = get_args(hint)[0] if get_origin(hint) is UnionType else hint
    if kind is Position:
        return lambda found: Position(found.ledger_id, found.entry_id)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return lambda found: tuple([_value(item, each) for each in found]) if found else ()
    if isinstance(kind, type) and issubclass(kind, Enum):
        known = {each.value: each for each in kind}
        return lambda found: known[found] if found in known else kind(found)
    return partial(_value, hint)


@cache
def _shape_of(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """Returns (name, type, whether it may be None) of each field of a dataclass, in order."""
    return tuple((name, hint, _is_optional(hint)) for name, hint in get_field_types(kind))


def _is_optional(hint: Any) -> bool:
    kind = get_args(hint)[0] if get_origin(hint) is UnionType else None
    return kind is not None and (is_dataclass(kind) or kind in (TxnId, Position))


@cache
def get_field_types(kind: type) -> tuple[tuple[str, Any], ...]:
    """Returns (name, type) of each field of a dataclass, in order. Results are cached."""
    hints = get_type_hints(kind)
    return tuple((each.name, hints[each.name]) for each in fields(kind))
