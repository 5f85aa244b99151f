"""The routes that are generated from rows of proto/operations.py: the `routes` of a row.

Names in the path and parameters of the query become arguments by the names of the request's fields. An operation on a
topic is called for the topic, or for each of its partitions. The answer is nothing (204); the sorted names of all
partitions together; or a value as JSON in Pulsar's camel case, of several partitions by their names.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from ...proto.names import Position
from ...proto.operations import (
    OPERATIONS,
    AnsweringBroker,
    HttpRoute,
    Operation,
    PathPart,
    PermissionPlace,
    PermissionRule,
)
from ..grpc.checked import handler_name
from .call import NAMESPACE, SUBSCRIPTION, TOPIC, Handler, RestRequest, register_route
from .transactions_routes import parse_txn_id

BASES = {
    PermissionPlace.TOPIC: "{T}",
    PermissionPlace.NAMESPACE: "{N}",
    PermissionPlace.TENANT: "/admin/v2/tenants/{tenant}",
}
PATHS = {"{N}": NAMESPACE, "{T}": TOPIC, "{S}": SUBSCRIPTION}


def _handler(row: Operation[Any], http: HttpRoute) -> Handler:
    place = http.path[:3] if http.path[:3] in PATHS else BASES.get(row.rule.on, "")

    async def handle(call: RestRequest) -> object:
        arguments = {each.name: _taken(call, each.name, each.kind) for each in row.takes} | dict(http.fixed)
        arguments |= {each.field: _part(call, each) for each in http.parts}
        if http.body[0]:
            arguments[http.body[0]] = call.parse_body(dict[str, str])
        if row.rule.subscription:
            arguments.setdefault(row.rule.subscription, call.names.get("subscription", ""))
        if row.asked_of is AnsweringBroker.COORDINATOR:
            return await call.call_coordinator(row, **arguments, half=parse_txn_id(call))
        if row.asked_of is not AnsweringBroker.OWNER:
            found = await call.call_local(row, **_place(call, row.rule, place), **arguments)
            return _shown(found) if http.answer else None
        answers = await call.call_partitions(row, **arguments)
        if len(answers) == 1 or answers[0] is None:
            return _shown(answers[0]) if http.answer else None
        if all(map(_is_texts, answers)):
            return sorted({each for names in answers for each in names})
        parts = await call.list_partitions()
        return {part.full: _shown(each) for part, each in zip(parts, answers, strict=True)} if http.answer else None

    handle.__name__ = http.name or handler_name(row.name)
    return handle


def _part(call: RestRequest, part: PathPart) -> object:
    text = call.names[part.name]
    return call.parse_number(text, part.number, least=part.least) if part.number else text


def _taken(call: RestRequest, name: str, kind: type) -> object:
    """Returns a parameter of the query as a value of type `kind`. Raises BadRequest if it cannot be converted."""
    if kind is bool:
        return call.parse_flag(name)
    text = call.query.get(name, "")
    return call.parse_number(text, f"the parameter {name}") if kind is int and text else kind(text or kind())


def _place(call: RestRequest, rule: PermissionRule, place: str) -> dict[str, str]:
    """Returns the field of the operation's request that names the tenant, namespace or topic, with the name from the
    path."""
    if rule.on is PermissionPlace.TENANT:
        return {rule.field: call.names["tenant"]}
    if place == "{N}":
        return {rule.field or "namespace": str(call.namespace)}
    return (
        {rule.field or "topic": (call.topic.base if rule.on is PermissionPlace.PLACE else call.topic).full}
        if place
        else {}
    )


def _shown(value: Any) -> object:
    if isinstance(value, Position):
        return str(value)
    if isinstance(value, list | tuple):
        return sorted(value) if _is_texts(value) else [*map(_shown, value)]
    if not is_dataclass(value):
        return value
    parts = ((_camel(each.name), getattr(value, each.name)) for each in fields(value))
    return {name: part if _is_texts(part) else _shown(part) for name, part in parts}


def _is_texts(value: object) -> bool:
    """Returns True for a list of texts, which has its order from the operation."""
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def _register(row: Operation[Any], http: HttpRoute) -> None:
    path = http.path if http.path.startswith(("/admin/", "{")) else BASES[row.rule.on] + http.path
    path = PATHS.get(path[:3], path[:3]) + path[3:]
    register_route(http.method, path, http.summary, body=http.body[1], answer=http.answer, busy=http.busy)(
        _handler(row, http)
    )


for _row in OPERATIONS.values():
    for _http in _row.routes:
        _register(_row, _http)
