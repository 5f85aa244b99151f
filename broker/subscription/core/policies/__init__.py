"""The four answers to "which consumer may get this entry", registered by subscription type.

A policy is a module with a class that implements `broker.core.dispatch.Policy`; it starts with its invariant. A new
type
is a new file and a line in `_POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .....proto.model import SubscriptionType
from .exclusive import Exclusive
from .failover import Failover
from .key_shared import KeyShared
from .policy import Policy
from .shared import Shared
from .slot_owners import Halves, Ring, Sticky


@dataclass(frozen=True, slots=True)
class SubscriptionOptions:
    """What a policy depends on beside its type: of the topic, of the first consumer, and of the broker."""

    topic: str = ""
    partition: int = -1  # -1: the topic has none
    sticky: bool = False  # Key_Shared: consumers say which ranges they take
    out_of_order: bool = False  # Key_Shared: allow_out_of_order_delivery
    hash_ranges: bool = False  # Key_Shared: AUTO_SPLIT by halving ranges, not by consistent hashing
    waiting_bytes_max: int = 16 << 20  # Key_Shared: memory for entries that wait for their key's consumer


def _key_shared(terms: SubscriptionOptions) -> Policy:
    owners = Sticky() if terms.sticky else Halves() if terms.hash_ranges else Ring()
    return KeyShared(
        owners, out_of_order=terms.out_of_order, sticky=terms.sticky, waiting_bytes_max=terms.waiting_bytes_max
    )


_POLICIES: dict[SubscriptionType, Callable[[SubscriptionOptions], Policy]] = {
    SubscriptionType.EXCLUSIVE: lambda terms: Exclusive(),
    SubscriptionType.SHARED: lambda terms: Shared(),
    SubscriptionType.FAILOVER: lambda terms: Failover(terms.topic, terms.partition),
    SubscriptionType.KEY_SHARED: _key_shared,
}


DEFAULTS = SubscriptionOptions()


def policy_of(type_: SubscriptionType, terms: SubscriptionOptions = DEFAULTS) -> Policy:
    """A new policy of that subscription type."""
    return _POLICIES[type_](terms)
