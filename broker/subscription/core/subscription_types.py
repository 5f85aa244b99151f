"""The subscription types, registered: number on the wire, name, policy.

A policy is a module with a class that implements `DispatchPolicy`; its docstring starts with its invariant. A new type
is such a module, a line in `SUBSCRIPTION_TYPE_ROWS`, and a line in `Subscribe.Type` of proto/wire.proto, whose number
and name are those of the line here. Guarding test: tests/broker/subscription/test_new_type.py.

A type may also come from an installed package, by an entry point of the group ENTRY_POINT_GROUP whose object is a
`SubscriptionTypeRow`: `load_installed_types` registers those that the setting `subscription_policies` names. The
numbers INSTALLED_TYPE_NUMBERS are theirs for ever. Guarding test: tests/broker/subscription/test_installed_types.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ....proto import states as subscription_types
from ....proto.errors import InvalidConfiguration, InvalidRequest
from .fair_shared import FairShared
from .in_log_order import Exclusive, Failover
from .key_shared import KeyShared, Shared
from .policy import DispatchPolicy, KeyLimits, SubscriptionOptions


class SubscriptionTypeRow(msgspec.Struct, frozen=True):
    """A subscription type, such as Shared, as it is registered: its number in the protocol, its name in capitals, and
    the class of its policy."""

    number: int
    name: str
    policy: type[DispatchPolicy]
    installed: bool = False  # it came from an installed package, and only `subscription_policies` allows it
    fair: type[FairShared] | None = None  # the policy of subscriptions whose keys take turns; None: the type has none

    def make_policy(self, options: SubscriptionOptions) -> DispatchPolicy:
        """Makes the policy of a subscription of this type."""
        fair = self.fair if options.key_limits is not None else None
        return (fair or self.policy)(options)

    def adapt_policy(self, policy: DispatchPolicy, limits: KeyLimits | None) -> bool:
        """Changes the limits of keys of `policy`, a policy with connected consumers, to `limits` (None: the keys do not
        take turns). Returns True if the policy fits them then, also if this type has no limits of keys; False if they
        need another policy, so that the consumers must connect again."""
        if self.fair is None:
            return True
        if not isinstance(policy, self.fair):
            return limits is None
        if limits is not None:
            policy.set_key_limits(limits)
        return limits is not None

    @property
    def title(self) -> str:
        """The name of the type as users write it, such as "Key_Shared"."""
        return subscription_types.pulsar_type_name(self.name)


EXCLUSIVE_ROW = SubscriptionTypeRow(0, "EXCLUSIVE", Exclusive)
SUBSCRIPTION_TYPE_ROWS: dict[int, SubscriptionTypeRow] = {
    each.number: each
    for each in (
        EXCLUSIVE_ROW,
        SubscriptionTypeRow(1, "SHARED", Shared, fair=FairShared),
        SubscriptionTypeRow(2, "FAILOVER", Failover),
        SubscriptionTypeRow(3, "KEY_SHARED", KeyShared),
    )
}
"""Number → type."""


def find_subscription_type(number: int) -> SubscriptionTypeRow:
    """Returns the subscription type that has this number in the protocol. Raises InvalidRequest if there is none."""
    try:
        return SUBSCRIPTION_TYPE_ROWS[number]
    except KeyError:
        names = ", ".join(each.name for each in SUBSCRIPTION_TYPE_ROWS.values())
        raise InvalidRequest(f"there is no subscription type {number}; there are {names}") from None


ENTRY_POINT_GROUP = "magnetar.subscription_policies"
INSTALLED_TYPE_NUMBERS = range(64, 128)
"""The numbers of types from installed packages, on the wire: no type of Magnetar or Pulsar will have one of them."""
_MEMBERS = tuple(name for name in (*vars(DispatchPolicy), *DispatchPolicy.__annotations__) if not name.startswith("_"))


def load_installed_types(names: Sequence[str], find: Callable[[str], Sequence[object]]) -> None:
    """Registers the subscription types that installed packages provide under these names. `find(name)` returns the
    objects of the entry points of that name. Raises InvalidConfiguration if a name does not have exactly one entry
    point, or if its object is no type that may be registered; then none is registered."""
    found: dict[int, SubscriptionTypeRow] = {}
    for name in names:
        objects = find(name)
        if len(objects) != 1:
            raise InvalidConfiguration(
                f"subscription_policies: {len(objects)} installed packages have an entry point {name!r} of "
                f"{ENTRY_POINT_GROUP}, and one is needed"
            )
        type_ = _check_installed_type(name, objects[0])
        if type_.number in found:
            raise InvalidConfiguration(f"subscription_policies: {name!r} has the number {type_.number} of another one")
        found[type_.number] = type_
    SUBSCRIPTION_TYPE_ROWS.update(found)


def _check_installed_type(name: str, given: object) -> SubscriptionTypeRow:
    if not isinstance(given, SubscriptionTypeRow):
        raise InvalidConfiguration(f"subscription_policies: {name!r} is no SubscriptionTypeRow, but {given!r:.100}")
    if given.number not in INSTALLED_TYPE_NUMBERS:
        raise InvalidConfiguration(
            f"subscription_policies: {name!r} has the number {given.number}, which is not in 64 … 127"
        )
    taken = [
        each for each in SUBSCRIPTION_TYPE_ROWS.values() if each.name == given.name and each.number != given.number
    ]
    if taken or given.name != given.name.upper() or given.name in subscription_types.SUBSCRIPTION_TYPE_NUMBERS:
        raise InvalidConfiguration(f"subscription_policies: {given.name!r} is no free name in capitals")
    try:
        policy = given.policy(SubscriptionOptions())
    except Exception as error:  # of the package
        raise InvalidConfiguration(f"subscription_policies: {name!r} cannot be made: {error!r}") from error
    if missing := [each for each in _MEMBERS if not hasattr(policy, each)]:
        raise InvalidConfiguration(f"subscription_policies: the policy of {name!r} has no {', '.join(missing)}")
    return msgspec.structs.replace(given, installed=True)
