"""The four answers to "who may get this entry", registered by subscription type.

A policy is a module with a class that implements `Policy`; its docstring begins with its invariant. `_POLICIES`
registers it. What else a new subscription type touches: docs/extending.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .....proto import wire_pb2 as wire
from .....proto.errors import InvalidRequest
from .exclusive import Exclusive
from .failover import Failover
from .key_shared import KeyShared
from .policy import Policy
from .shared import Shared
from .slot_owners import Halves, Ring, Sticky


@dataclass(frozen=True, slots=True)
class Terms:
    """What a policy depends on beside its type: of the topic, of the first consumer, and of the broker."""

    topic: str = ""
    partition: int = -1  # -1: the topic has none
    sticky: bool = False  # Key_Shared: consumers say which ranges they take
    out_of_order: bool = False  # Key_Shared: allow_out_of_order_delivery
    hash_ranges: bool = False  # Key_Shared: AUTO_SPLIT by halving ranges, not by consistent hashing
    waiting_bytes_max: int = 16 << 20  # Key_Shared: memory for entries that wait for their key's consumer


def _key_shared(terms: Terms) -> Policy:
    owners = Sticky() if terms.sticky else Halves() if terms.hash_ranges else Ring()
    return KeyShared(
        owners, out_of_order=terms.out_of_order, sticky=terms.sticky, waiting_bytes_max=terms.waiting_bytes_max
    )


_POLICIES: dict[int, Callable[[Terms], Policy]] = {
    wire.Subscribe.EXCLUSIVE: lambda terms: Exclusive(),
    wire.Subscribe.SHARED: lambda terms: Shared(),
    wire.Subscribe.FAILOVER: lambda terms: Failover(terms.topic, terms.partition),
    wire.Subscribe.KEY_SHARED: _key_shared,
}


DEFAULTS = Terms()


def policy_of(type_: int, terms: Terms = DEFAULTS) -> Policy:
    """A new policy of that subscription type."""
    kind = _POLICIES.get(type_)
    if kind is None:
        raise InvalidRequest(f"there is no subscription type {type_}")
    return kind(terms)
