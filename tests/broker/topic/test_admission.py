"""Who may come to a topic: limits of numbers, of addresses, and the rate of subscribing."""

from itertools import pairwise
from typing import NamedTuple

import pytest

from magnetar.broker.subscription.core.subscription_types import SUBSCRIPTION_TYPE_ROWS
from magnetar.broker.topic import admission_core as admission
from magnetar.broker.topic.admission_core import TopicAdmission, host_of_address
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.errors import BackPressure, ConsumerBusy, ProducerBusy
from magnetar.proto.names import TopicName


class Who(NamedTuple):
    address: str
    instance: str = ""


TOPIC = TopicName.parse("t")
SHARED = SUBSCRIPTION_TYPE_ROWS[1]


def test_a_host_is_an_address_without_its_port() -> None:
    assert host_of_address("ipv4:10.0.0.1:5000") == "ipv4:10.0.0.1"
    assert host_of_address("ipv6:[::1]:5000") == "ipv6:[::1]"
    assert host_of_address("client") == "client"


def test_t10_limits_count_those_who_are_there_and_not_who_comes_back() -> None:
    asked, there = TopicAdmission(TOPIC, 2, 2), [Who("h:1", "a"), Who("h:2", "b")]
    with pytest.raises(ProducerBusy, match="2 producers from h"):
        asked.check_producer(AppliedPolicies(), Who("h:3", "c"), there)
    asked.check_producer(AppliedPolicies(), Who("other:3", "c"), there)
    asked.check_producer(AppliedPolicies(max_producers=1), Who("h:3", "a"), there)
    with pytest.raises(ProducerBusy, match="has 1 producers"):
        asked.check_producer(AppliedPolicies(max_producers=1), Who("other:3", "c"), there)
    with pytest.raises(ConsumerBusy, match="2 consumers from h"):
        asked.check_consumer(AppliedPolicies(), SHARED, Who("h:3"), "s", there, there[:1])
    asked.check_consumer(
        AppliedPolicies(max_consumers_per_subscription=2), SHARED, Who("other:3"), "s", there, there[:1]
    )
    with pytest.raises(ConsumerBusy, match="'s' has 1 consumers"):
        asked.check_consumer(
            AppliedPolicies(max_consumers_per_subscription=1), SHARED, Who("o:3"), "s", there, there[:1]
        )
    asked.check_consumer(AppliedPolicies(max_consumers=1), SHARED, Who("h:3", "b"), "s", there, there[:1])


def test_l1_a_consumer_may_subscribe_at_its_rate_and_a_burst_of_one_period() -> None:
    asked, applied, times = (
        TopicAdmission(TOPIC, 0, 0),
        AppliedPolicies(subscribe_rate=3, subscribe_rate_period_s=30),
        [],
    )
    for tenth in range(1200):  # tries every 0.1 s for two minutes
        try:
            asked.check_subscribe_rate(applied, Who("h:1"), "c", tenth / 10)
        except BackPressure:
            continue
        times.append(tenth / 10)
    assert len(times) == 3 + 11
    assert times[:3] == [0.0, 0.1, 0.2]
    assert all(later - earlier >= 9.9 for earlier, later in pairwise(times[3:]))


def test_l1_buckets_are_of_each_host_and_name_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TOKEN_BUCKETS_MAX", 5)
    asked, applied = TopicAdmission(TOPIC, 0, 0), AppliedPolicies(subscribe_rate=1, subscribe_rate_period_s=10)
    asked.check_subscribe_rate(applied, Who("h:1"), "c", 0.0)
    asked.check_subscribe_rate(applied, Who("other:1"), "c", 0.0)
    asked.check_subscribe_rate(applied, Who("h:1", "x"), "", 0.0)
    with pytest.raises(BackPressure, match=r"in 5\.0 s again"):
        asked.check_subscribe_rate(applied, Who("h:2"), "c", 5.0)
    for number in range(20):
        asked.check_subscribe_rate(applied, Who(f"many-{number}:1"), "c", 20.0)
    assert asked.statistics() == {"subscribe_rate_buckets": 5}
    asked.check_subscribe_rate(AppliedPolicies(), Who("h:1"), "c", 20.0)
    assert asked.statistics() == {"subscribe_rate_buckets": 0}
