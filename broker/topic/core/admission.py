"""Admission to a topic: its limits of numbers (Pulsar T10, S13) and the rate of subscribing (L1).

Asked before a producer or consumer joins, in the order below; the first limit that is reached is reported, with its
figure. What is connected already stays, also when a limit is lowered; a client that connects again (same `instance`)
counts as connected, so its own old connection never locks it out.

| asked | limits | refused with |
|---|---|---|
| `check_producer` | max_producers; max_same_address_producers | ProducerBusy |
| `check_subscription` | max_subscriptions; auto_subscription_creation | NotAllowed; SubscriptionNotFound |
| `check_consumer` | subscription_types | NotAllowed |
| | max_consumers, max_consumers_per_subscription; max_same_address_consumers | ConsumerBusy |
| `check_rate` | subscribe_rate: so many times in subscribe_rate_period_s | BackPressure |

An address is a host, without its port: clients of one gateway are one. The rate is kept for each consumer by host and
name (for one without a name by its instance): a token bucket of `subscribe_rate` tokens, filled in a period, so a
consumer that connects again and again is slowed down to it. Pulsar refuses it for good (NotAllowed); here the error may
be retried, and the client's back-off does the slowing. Buckets that are full again are forgotten, at most BUCKETS_MAX
are kept. Guarding tests: tests/broker/topic/core/test_admission.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from ....proto.applied import Applied
from ....proto.errors import MagnetarError, ProducerBusy
from ....proto.names import TopicName
from ...common.refusals import SubscribeRefusal
from ...subscription.core.policies import SubscriptionType

BUCKETS_MAX = 10_000


class Present(Protocol):
    """A producer or consumer: one that is connected, or one that asks."""

    @property
    def address(self) -> str: ...
    @property
    def instance(self) -> str: ...


def host_of(address: str) -> str:
    return address.rpartition(":")[0] or address


def _returns(who: Present, there: Collection[Present]) -> bool:
    return bool(who.instance) and any(each.instance == who.instance for each in there)


class Admission:
    """The admission to one topic."""

    __slots__ = ("_buckets", "_same_address_consumers", "_same_address_producers", "_topic")

    def __init__(self, topic: TopicName, same_address_producers: int, same_address_consumers: int) -> None:
        self._topic = topic
        self._same_address_producers = same_address_producers
        self._same_address_consumers = same_address_consumers
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}  # whose → tokens, and when they were counted

    def check_producer(self, applied: Applied, who: Present, there: Collection[Present]) -> None:
        limited = applied.max_producers or self._same_address_producers
        if not limited or _returns(who, there):
            return
        if 0 < applied.max_producers <= len(there):
            limit = applied.max_producers
            raise ProducerBusy(f"topic {self._topic} has {limit} producers, as many as it may have", topic=self._topic)
        self._check_address(self._same_address_producers, who, there, "producers", ProducerBusy)

    def check_subscription(self, applied: Applied, name: str, there: int, *, by_consumer: bool) -> None:
        """Whether one more may be made, for a consumer or by an operator. NotAllowed; SubscriptionNotFound."""
        if by_consumer and not applied.auto_subscription_creation:
            raise SubscribeRefusal.NOT_MADE.error(
                f"topic {self._topic} has no subscription {name!r}, and it is not made automatically", subscription=name
            )
        if 0 < applied.max_subscriptions <= there:
            limit = applied.max_subscriptions
            raise SubscribeRefusal.TOO_MANY_SUBSCRIPTIONS.error(
                f"topic {self._topic} has {limit} subscriptions, as many as it may have"
            )

    def check_consumer(
        self, applied: Applied, type_: SubscriptionType, who: Present, subscription: str,
        everybody: Collection[Present], mine: Collection[Present],
    ) -> None:  # fmt: skip
        if type_.title not in applied.subscription_types:
            allowed = ", ".join(applied.subscription_types)
            raise SubscribeRefusal.TYPE_NOT_ALLOWED.error(
                f"topic {self._topic} allows the subscription types {allowed}, not {type_.title}"
            )
        limited = applied.max_consumers or applied.max_consumers_per_subscription or self._same_address_consumers
        if not limited or _returns(who, everybody):
            return
        for limit, count, where in (
            (applied.max_consumers, len(everybody), f"topic {self._topic}"),
            (applied.max_consumers_per_subscription, len(mine), f"subscription {subscription!r}"),
        ):
            if 0 < limit <= count:
                raise SubscribeRefusal.TOO_MANY_CONSUMERS.error(
                    f"{where} has {limit} consumers, as many as it may have", topic=self._topic
                )
        self._check_address(
            self._same_address_consumers, who, everybody, "consumers", SubscribeRefusal.TOO_MANY_OF_ADDRESS.error
        )

    def _check_address(
        self, limit: int, who: Present, there: Collection[Present], what: str,
        error: Callable[..., MagnetarError],
    ) -> None:  # fmt: skip
        host = host_of(who.address)
        if limit and sum(host_of(each.address) == host for each in there) >= limit:
            raise error(
                f"topic {self._topic} has {limit} {what} from {host}, as many as may come from one address",
                topic=self._topic,
            )

    # ------------------------------------------------------------------ the rate of subscribing
    def check_rate(self, applied: Applied, who: Present, name: str, now: float) -> None:
        """Takes a token. BackPressure: there is none."""
        rate, period_s = applied.subscribe_rate, applied.subscribe_rate_period_s
        if not rate:
            self._buckets.clear()
            return
        key = host_of(who.address), name or who.instance
        tokens, at = self._buckets.pop(key, (float(rate), now))
        tokens = min(float(rate), tokens + (now - at) * rate / period_s)
        self._buckets[key] = (tokens - 1 if tokens >= 1 else tokens), now
        if len(self._buckets) > BUCKETS_MAX:
            self._forget(rate, period_s, now)
        if tokens < 1:
            raise SubscribeRefusal.RATE.error(
                f"topic {self._topic}: consumer {name!r} has subscribed {rate} times within {period_s} s, as often as "
                f"it may (subscribe-rate); in {(1 - tokens) * period_s / rate:.1f} s again",
                topic=self._topic,
            )

    def _forget(self, rate: int, period_s: int, now: float) -> None:
        """Forgets buckets that are full; while there are too many, those that were used least lately."""
        self._buckets = {
            key: (tokens, at)
            for key, (tokens, at) in self._buckets.items()
            if tokens + (now - at) * rate / period_s < rate
        }
        while len(self._buckets) > BUCKETS_MAX:
            del self._buckets[next(iter(self._buckets))]

    def statistics(self) -> dict[str, int]:
        return {"subscribe_rate_buckets": len(self._buckets)}
