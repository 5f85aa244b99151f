"""Policies: what they may be, how they are merged, and their bytes."""

import pytest

from magnetar.proto.errors import InvalidRequest
from magnetar.proto.policies import (
    POLICY_NAMES,
    Policies,
    check_policies,
    complete_retention_pairs,
    decode_policies,
    encode_policies,
    merge_policies,
    remove_policies,
)


def test_json_holds_what_is_set_and_nothing_else_and_comes_back() -> None:
    policies = Policies(message_ttl_s=600, deduplication=False, subscription_types=("Shared",))
    assert encode_policies(Policies()) == "{}"
    assert encode_policies(policies) == '{"message_ttl_s":600,"deduplication":false,"subscription_types":["Shared"]}'
    assert decode_policies(encode_policies(policies)) == policies
    assert decode_policies("") == Policies()


@pytest.mark.parametrize("text", ['{"message_ttl_s":"long"}', "[]", "{", '{"subscription_types":["Solo"]}'])
def test_what_is_no_policies_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        decode_policies(text)


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert decode_policies('{"message_ttl_s":5,"of_tomorrow":1}') == Policies(message_ttl_s=5)


def test_what_is_set_stays_until_it_is_set_again_or_inherited_again() -> None:
    policies = merge_policies(Policies(message_ttl_s=5, max_producers=1), Policies(max_producers=0))
    assert policies == Policies(message_ttl_s=5, max_producers=0)
    assert remove_policies(policies, "message_ttl_s") == Policies(max_producers=0)


def test_the_policy_of_backlog_quotas_goes_with_the_last_of_them() -> None:
    both = Policies(backlog_quota_bytes=1, backlog_quota_s=2, backlog_quota_policy="producer_exception")
    one = remove_policies(both, "backlog_quota_bytes")
    assert one == Policies(backlog_quota_s=2, backlog_quota_policy="producer_exception")
    assert remove_policies(one, "backlog_quota_s") == Policies()
    alone = Policies(backlog_quota_policy="producer_exception")
    assert remove_policies(alone, "message_ttl_s") == alone


@pytest.mark.parametrize(
    "wrong",
    [
        Policies(message_ttl_s=-1), Policies(retention_minutes=-2, retention_mib=1), Policies(retention_minutes=5),
        Policies(retention_minutes=0, retention_mib=5), Policies(ensemble_size=3), Policies(max_message_bytes=0),
        Policies(subscribe_rate_period_s=0), Policies(unsubscribed_minutes=5), Policies(unsubscribed_mib=-2),
        Policies(ensemble_size=2, write_quorum=3, ack_quorum=2), Policies(subscription_types=()),
        Policies(dead_letter_backoff_s=(-1.0,)), Policies(dead_letter_backoff_s=(1.0,) * 101),
    ],
)  # fmt: skip
def test_what_no_policy_can_be_is_refused(wrong: Policies) -> None:
    with pytest.raises(InvalidRequest):
        check_policies(wrong)


def test_retention_by_one_of_time_and_size_has_no_limit_of_the_other() -> None:
    assert complete_retention_pairs(Policies(retention_minutes=5)) == Policies(retention_minutes=5, retention_mib=-1)
    assert complete_retention_pairs(Policies(retention_mib=5)) == Policies(retention_minutes=-1, retention_mib=5)
    assert complete_retention_pairs(Policies(retention_minutes=0)) == Policies(retention_minutes=0, retention_mib=0)
    assert complete_retention_pairs(Policies(unsubscribed_minutes=5)) == Policies(
        unsubscribed_minutes=5, unsubscribed_mib=-1
    )
    assert complete_retention_pairs(Policies()) == Policies()


def test_nothing_set_is_always_right() -> None:
    assert check_policies(Policies()) == Policies()
    assert len(POLICY_NAMES) == len(set(POLICY_NAMES))


def test_a_quota_that_an_earlier_version_wrote_in_mebibytes_is_read() -> None:
    assert decode_policies('{"backlog_quota_mib":2,"message_ttl_s":5}') == Policies(
        backlog_quota_bytes=2 << 20, message_ttl_s=5
    )
    assert decode_policies('{"backlog_quota_mib":0}') == Policies(backlog_quota_bytes=0)
    with pytest.raises(InvalidRequest):
        decode_policies('{"backlog_quota_mib":"x"}')
