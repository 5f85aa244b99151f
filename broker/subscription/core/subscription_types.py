"""The subscription types, registered: number on the wire, name, policy.

A policy is a module with a class that implements `Policy`; its docstring starts with its invariant. A new type is such
a module, a line in `TYPES`, and a line in `Subscribe.Type` of proto/wire.proto, whose number and name are those of the
line here. Guarding test: tests/broker/subscription/test_new_type.py.
"""

from __future__ import annotations

import msgspec

from ....proto import states as subscription_types
from ....proto.errors import InvalidRequest
from .in_log_order import Exclusive, Failover
from .key_shared import KeyShared, Shared
from .policy import Policy


class SubscriptionType(msgspec.Struct, frozen=True):
    """A subscription type, such as Shared, as it is registered: its name, its number in the protocol, and its
    policy."""

    number: int
    name: str
    policy: type[Policy]

    @property
    def title(self) -> str:
        """Returns the name of the type as users write it, such as "Key_Shared"."""
        return subscription_types.title(self.name)


EXCLUSIVE = SubscriptionType(0, "EXCLUSIVE", Exclusive)
TYPES: dict[int, SubscriptionType] = {
    each.number: each
    for each in (
        EXCLUSIVE,
        SubscriptionType(1, "SHARED", Shared),
        SubscriptionType(2, "FAILOVER", Failover),
        SubscriptionType(3, "KEY_SHARED", KeyShared),
    )
}
"""Number → type."""


def find_subscription_type(number: int) -> SubscriptionType:
    """Returns the subscription type that has this number in the protocol. Raises InvalidRequest if there is none."""
    try:
        return TYPES[number]
    except KeyError:
        names = ", ".join(each.name for each in TYPES.values())
        raise InvalidRequest(f"there is no subscription type {number}; there are {names}") from None
