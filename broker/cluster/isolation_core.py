"""Decides which brokers may own the bundles of a namespace, by the labels of the brokers and the namespace's policy.

    isolation = read_isolation(applied)          None: any broker may
    isolation.select_allowed(available)          the brokers that may get a bundle now
    tracker.find_misplaced(…)                    the bundles that must leave this broker

A broker has the labels of its setting `labels`, as in tier=gold,zone=a; a broker of an older release has none. A broker
is *primary* for a namespace if it has all labels of the policy `primary_broker_labels`, and *fallback* if it has all of
`fallback_broker_labels` (`*`: each broker). A bundle goes to a primary broker. While fewer than `primary_brokers_min`
primary brokers are available, it may go to a fallback broker, too (Pulsar: the auto-failover policy min_available). A
broker is available if it is registered, is of the same group and does not drain. Transaction coordinators have no
namespace: any broker may own them.

A bundle is *misplaced* at a broker that is neither primary nor fallback. At a fallback broker it is misplaced when
enough primary brokers have been available for FALLBACK_KEPT_S without a break. So a primary broker that comes and goes
does not take bundles to and fro. The policy of a namespace may be set when its bundles have owners: the owner of a
misplaced bundle gives it to a broker that may own it (`TopicManager.evict_misplaced_bundles`), as soon as one is
available. Where brokers balance their load, the leader does so first (balance_core.py).

Guards: tests/broker/cluster/test_isolation.py, tests/balance/test_isolated.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...metadata.records import BrokerRecord
from ...proto.applied import AppliedPolicies
from ...proto.policies import ANY_BROKER, Policies

FALLBACK_KEPT_S = 300.0
"""Seconds for which enough primary brokers must have been available before bundles return to them: a broker that
restarts, or dies again and again, moves nothing twice."""


class BrokerIsolation(NamedTuple):
    """Which brokers may own the bundles of a namespace: the labels of primary brokers, those of fallback brokers (():
    there are none), and how many primary brokers are enough."""

    primary: tuple[str, ...]
    fallback: tuple[str, ...] = ()
    primaries_min: int = 1

    def is_primary(self, broker: BrokerRecord) -> bool:
        """Returns True if the broker has all labels of primary brokers."""
        return set(self.primary) <= set(broker.labels)

    def is_fallback(self, broker: BrokerRecord) -> bool:
        """Returns True if there are fallback brokers, and the broker has all of their labels."""
        return self.fallback == (ANY_BROKER,) or (bool(self.fallback) and set(self.fallback) <= set(broker.labels))

    def has_enough_primaries(self, available: Sequence[BrokerRecord]) -> bool:
        """Returns True if enough of the available brokers are primary, so that fallback brokers get nothing."""
        return sum(map(self.is_primary, available)) >= self.primaries_min

    def select_allowed(self, available: Sequence[BrokerRecord]) -> list[BrokerRecord]:
        """Returns those of the available brokers that may get a bundle of the namespace now; [] if none may."""
        enough = self.has_enough_primaries(available)
        return [each for each in available if self.is_primary(each) or (not enough and self.is_fallback(each))]

    def __str__(self) -> str:
        wanted = f"labels {','.join(self.primary)}"
        if not self.fallback:
            return wanted
        other = "any" if self.fallback == (ANY_BROKER,) else ",".join(self.fallback)
        return f"{wanted} (or {other}, while fewer than {self.primaries_min} have those)"


def read_isolation(applied: AppliedPolicies | Policies) -> BrokerIsolation | None:
    """Returns which brokers may own the bundles of a namespace, from the policies in force there, or from those that
    are set for it; None: any broker."""
    if not applied.primary_broker_labels:
        return None
    fallback = applied.fallback_broker_labels or ()
    return BrokerIsolation(
        tuple(sorted(applied.primary_broker_labels)), tuple(sorted(fallback)), applied.primary_brokers_min or 1
    )


class IsolationTracker:
    """Finds the misplaced bundles of one broker. Records since when enough primary brokers are available."""

    def __init__(self) -> None:
        self._enough_since_s: dict[BrokerIsolation, float] = {}

    def find_misplaced(
        self, owned: Mapping[str, BrokerIsolation], me: BrokerRecord, available: Sequence[BrokerRecord], now_s: float
    ) -> list[str]:
        """Returns the bundles that must leave the broker `me`, sorted: the misplaced ones for which an available broker
        may get them. `owned`: the isolation of each bundle of this broker for which it is no primary broker;
        `available`: the brokers that may get bundles, with or without `me`; `now_s`: monotonic seconds. Called
        periodically, with all of these bundles."""
        wanted = set(owned.values())
        self._observe(wanted, available, now_s)
        leaving = {each for each in wanted if self._must_leave(each, me, available, now_s)}
        return sorted(path for path, isolation in owned.items() if isolation in leaving)

    def _observe(self, wanted: Iterable[BrokerIsolation], available: Sequence[BrokerRecord], now_s: float) -> None:
        known = self._enough_since_s
        self._enough_since_s = {
            each: known.get(each, now_s) for each in wanted if each.has_enough_primaries(available)
        }

    def _must_leave(
        self, isolation: BrokerIsolation, me: BrokerRecord, available: Sequence[BrokerRecord], now_s: float
    ) -> bool:
        if isolation.is_primary(me) or not isolation.select_allowed(available):
            return False
        since_s = self._enough_since_s.get(isolation)
        stays = since_s is None or now_s - since_s < FALLBACK_KEPT_S
        return not (isolation.is_fallback(me) and stays)
