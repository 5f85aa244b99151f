"""The four answers to "who may get this entry", registered by subscription type.

A policy is a module with a class that keeps `broker.core.dispatch.Policy`; it starts with its invariant. A new type is
a new file and a line in `_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable

from ....proto import wire_pb2 as wire
from ....proto.errors import InvalidRequest, NotAllowed
from ..dispatch import Policy
from .exclusive import Exclusive
from .shared import Shared

_POLICIES: dict[int, Callable[[], Policy]] = {
    wire.Subscribe.EXCLUSIVE: Exclusive,
    wire.Subscribe.SHARED: Shared,
}


def policy_of(type_: int) -> Policy:
    """A new policy of that subscription type; NotAllowed for one that this broker does not serve."""
    if type_ not in wire.Subscribe.Type.values():
        raise InvalidRequest(f"there is no subscription type {type_}")
    kind = _POLICIES.get(type_)
    if kind is None:
        name = wire.Subscribe.Type.Name(type_).capitalize()
        raise NotAllowed(f"{name} subscriptions are not served by this broker; use Exclusive or Shared", type=name)
    return kind()
