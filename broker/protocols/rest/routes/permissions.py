"""Grants of namespaces, topics and subscriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .....proto import operations as op
from ..call import Call
from ..errors import BadRequest
from ..table import NAMESPACE, TOPIC, route


def _roles(found: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    return {role: list(actions) for role, actions in sorted(found.items())}


def _actions(call: Call) -> list[str]:
    return call.json(list[str])


@route("GET", NAMESPACE + "/permissions", "The grants of the namespace.", answer="{role: [action]}")
async def permissions_of_namespace(call: Call) -> object:
    found = await call.admin(op.GET_PERMISSIONS, namespace=str(call.namespace))
    return _roles(found.roles)


@route("GET", NAMESPACE + "/permissions/subscription", "The roles of subscriptions.", answer="{subscription: [role]}")
async def permissions_of_subscriptions(call: Call) -> object:
    found = await call.admin(op.GET_PERMISSIONS, namespace=str(call.namespace))
    return _roles(found.subscriptions)


@route("POST", NAMESPACE + "/permissions/subscription/{subscription}", "The only roles of a subscription.",
       body="[role]")  # fmt: skip
async def grant_on_subscription(call: Call) -> None:
    given = {"subscription": call.names["subscription"], "roles": _actions(call)}
    await _change(call, grant_subscription=given)


@route("POST", NAMESPACE + "/permissions/{role}", "Grants actions to a role.", body="[action]")
async def grant_on_namespace(call: Call) -> None:
    await _change(call, grant={"role": call.names["role"], "actions": _actions(call)})


@route("DELETE", NAMESPACE + "/permissions/{subscription}/{role}", "A role leaves the list of a subscription.")
async def revoke_on_subscription(call: Call) -> None:
    given = {"subscription": call.names["subscription"], "roles": [call.names["role"]]}
    await _change(call, revoke_subscription=given)


@route("POST", NAMESPACE + "/subscriptionAuthMode", "None, or Prefix: subscriptions are named by their role.",
       body='"None" | "Prefix"')  # fmt: skip
async def set_auth_mode(call: Call) -> None:
    mode = call.json(str).lower()
    if mode not in ("none", "prefix"):
        raise BadRequest(f"the mode is None or Prefix, not {mode[:40]!r}", 412)
    await _change(call, prefix_mode=mode == "prefix")


async def _change(call: Call, **change: Any) -> None:
    await call.admin(op.CHANGE_PERMISSIONS, namespace=str(call.namespace), **change)


# ------------------------------------------------------------------ of a topic
@route("GET", TOPIC + "/permissions", "The grants of the topic, and of its namespace.", answer="{role: [action]}")
async def permissions_of_topic(call: Call) -> object:
    topic = call.topic.base
    own = await call.admin(op.GET_PERMISSIONS, topic=topic.full)
    found = _roles((await call.admin(op.GET_PERMISSIONS, namespace=str(topic.namespace_name))).roles)
    for role, actions in _roles(own.roles).items():
        found[role] = sorted({*found.get(role, ()), *actions})
    return found


@route("POST", TOPIC + "/permissions/{role}", "Grants actions on the topic to a role.", body="[action]")
async def grant_on_topic(call: Call) -> None:
    grant = {"role": call.names["role"], "actions": _actions(call)}
    await call.admin(op.CHANGE_PERMISSIONS, topic=call.topic.base.full, grant=grant)
