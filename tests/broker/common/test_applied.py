"""What applies to a topic: topic > namespace > broker, field by field."""

import msgspec
import pytest

from magnetar.broker.common.config import (
    APPLIED_POLICY_NAMES,
    BrokerConfig,
    make_policies_with_all_values,
    resolve_policies_in_force,
)
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.errors import InvalidConfiguration
from magnetar.proto.policies import RETENTION_FIELD_PAIRS, Policies, check_policies
from magnetar.runtime.config import load_config


def test_b5_the_topic_counts_before_the_namespace_and_the_namespace_before_the_broker() -> None:
    broker = BrokerConfig(message_ttl_s=1, max_producers=1, max_consumers=1)
    namespace = Policies(max_producers=2, max_consumers=2)
    found = resolve_policies_in_force(broker, namespace, Policies(max_consumers=3))
    assert (found.message_ttl_s, found.max_producers, found.max_consumers) == (1, 2, 3)
    assert resolve_policies_in_force(broker).max_producers == 1


def test_off_at_the_topic_beats_on_at_the_namespace() -> None:
    topic = Policies(deduplication=False, message_ttl_s=0)
    found = resolve_policies_in_force(AppliedPolicies(deduplication=True), Policies(message_ttl_s=5), topic)
    assert (found.deduplication, found.message_ttl_s) == (False, 0)


def test_nobody_may_allow_larger_messages_than_the_broker() -> None:
    assert (
        resolve_policies_in_force(AppliedPolicies(max_message_bytes=100),
        Policies(max_message_bytes=200)).max_message_bytes
        == 100
    )


def test_every_field_is_shown_and_the_defaults_are_right_policies() -> None:
    shown = make_policies_with_all_values(AppliedPolicies())
    assert None not in {getattr(shown, name) for name in APPLIED_POLICY_NAMES}
    assert check_policies(shown) == shown


@pytest.mark.parametrize(("minutes", "mib"), RETENTION_FIELD_PAIRS)
def test_one_of_time_and_size_at_a_brokers_start_means_what_it_means_at_run_time(minutes: str, mib: str) -> None:
    def started(**given: int) -> tuple[int, int]:
        environment = {f"MAGNETAR_BROKER_{name.upper()}": str(value) for name, value in given.items()}
        config = load_config(BrokerConfig, "broker", environment=environment)
        return getattr(config, minutes), getattr(config, mib)

    assert started(**{minutes: 60}) == (60, -1)
    assert started(**{mib: 5}) == (-1, 5)
    assert started(**{minutes: 0}) == started(**{mib: 0}) == (0, 0)
    assert started(**{minutes: 60, mib: 5}) == (60, 5)
    assert started() == (getattr(AppliedPolicies(), minutes), getattr(AppliedPolicies(), mib))
    with pytest.raises(InvalidConfiguration, match=minutes):
        started(**{minutes: 60, mib: 0})
    with pytest.raises(InvalidConfiguration, match=mib):
        msgspec.structs.replace(BrokerConfig(), **{minutes: 0, mib: 5}).validate()
