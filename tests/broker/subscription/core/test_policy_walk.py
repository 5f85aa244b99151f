"""The walk that everybody runs on a policy: it holds of ours, and finds what is wrong with others."""

import random

import pytest

from magnetar.broker.subscription.core.in_log_order import Exclusive
from magnetar.broker.subscription.core.key_shared import Shared
from magnetar.broker.subscription.core.policy import DispatcherEntry, DispatchPolicy, Member
from magnetar.broker.subscription.core.policy_walk import walk_policy
from magnetar.broker.subscription.core.subscription_types import SUBSCRIPTION_TYPE_ROWS, SubscriptionTypeRow
from magnetar.proto.names import Position
from magnetar.proto.states import Blocked
from tests.broker.subscription.test_new_type import Numbered


@pytest.mark.parametrize("type_", SUBSCRIPTION_TYPE_ROWS.values(), ids=lambda each: each.name)
def test_each_policy_of_ours_holds(type_: SubscriptionTypeRow) -> None:
    assert sum(walk_policy(type_.policy, random.Random(seed)) for seed in range(15)) > 1000


class Twice(Shared):
    """Gives an entry that was given back to the consumer that has no permits."""

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked | None:
        found = super().choose_member(entry, waited)
        return next(iter(self.candidates)) if isinstance(found, Member) else found


class Forgets(Shared):
    """Forgets what was given back."""

    def on_entry_returned(self, position: Position) -> None:
        if position.entry_id % 3:
            super().on_entry_returned(position)


class Stuck(Shared):
    """Has no consumer for some entries, and does not say so."""

    def choose_member(self, entry: DispatcherEntry, waited: bool) -> Member | Blocked | None:
        return Blocked.KEYS_BUSY if entry.position.entry_id == 4 else super().choose_member(entry, waited)


class Refuses(Exclusive):
    """Lets no consumer in."""

    def why_refused(self, newcomer: Member) -> str | None:
        return "never"


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Twice, "which has no permits|which does not read"), (Forgets, "never delivered"), (Stuck, "never delivered"),
        (Refuses, "the first consumer is refused"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_breaks_a_promise_is_found(policy: type[DispatchPolicy], why: str) -> None:
    def walk_all() -> None:
        for seed in range(40):
            walk_policy(policy, random.Random(seed))

    with pytest.raises(AssertionError, match=why):
        walk_all()


def test_a_policy_of_its_own_rules_holds() -> None:
    for seed in range(40):
        walk_policy(Numbered, random.Random(seed))
