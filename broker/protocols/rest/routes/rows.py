"""The routes that follow from rows of proto/operations.py: those whose row has an `http`.

Names in the path and flags of the query become arguments by the names of the request's fields. What is about a topic
is asked of the topic or of each of its partitions. Answered are: nothing (204); names, sorted, of all partitions
together; a value as JSON with Pulsar's camel case, of several partitions by their names.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from .....proto.operation import AskedOf, Http, On, Operation
from .....proto.operations import OPERATIONS
from ...grpc.later import attribute_of
from ..call import Call
from ..table import NAMESPACE, TOPIC, Handler, route

BASES = {On.TOPIC: TOPIC, On.NAMESPACE: NAMESPACE, On.TENANT: "/admin/v2/tenants/{tenant}"}


def _handler(row: Operation[Any]) -> Handler:
    async def handle(call: Call) -> object:
        arguments = {each.name: _taken(call, each.name, each.kind) for each in row.takes}
        if row.rule.subscription:
            arguments[row.rule.subscription] = call.names["subscription"]
        if row.asked_of is not AskedOf.OWNER:
            place = {row.rule.field: _place(call, row.rule.on)} if row.rule.field else {}
            return _shown(await call.admin(row, **place, **arguments))
        found = await call.each_partition(row, **arguments)
        if len(found) == 1 or found[0] is None:
            return _shown(found[0])
        if isinstance(found[0], list | tuple):
            return sorted({each for names in found for each in names})
        parts = await call.partitions()
        return {part.full: _shown(each) for part, each in zip(parts, found, strict=True)}

    handle.__name__ = attribute_of(row.name)
    return handle


def _taken(call: Call, name: str, kind: type) -> object:
    """Of the query. 400: it is of another type."""
    if kind is bool:
        return call.flag(name)
    text = call.query.get(name, "")
    return call.number(text, f"the parameter {name}") if kind is int and text else kind(text or kind())


def _place(call: Call, on: On) -> str:
    if on is On.TENANT:
        return call.names["tenant"]
    return str(call.namespace) if on is On.NAMESPACE else call.topic.full


def _shown(value: Any) -> object:
    if isinstance(value, list | tuple):
        return sorted(value) if all(isinstance(each, str) for each in value) else [*map(_shown, value)]
    if not is_dataclass(value):
        return value
    return {_camel(each.name): _shown(getattr(value, each.name)) for each in fields(value)}


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _register(row: Operation[Any], http: Http) -> None:
    path = http.path if http.path.startswith("/admin/") else BASES[row.rule.on] + http.path
    route(http.method, path, http.summary, answer=http.answer, busy=http.busy)(_handler(row))


for _row in OPERATIONS.values():
    if _row.http is not None:
        _register(_row, _row.http)
