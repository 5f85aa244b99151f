
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.access import authorizer as permissions
from magnetar.broker.access.table_core import GRANT_ACTIONS, AccessRight, GrantsAndAdministrators, why_right_denied
from magnetar.metadata.records import GrantsRecord
from magnetar.proto.errors import InvalidName, InvalidRequest

TOPIC, OTHER = "persistent://acme/orders/t", "persistent://acme/orders/other"
ROLES = st.sampled_from(["a", "ab", "abc", "a*", "*", "", "b"])
GRANTED = st.dictionaries(ROLES, st.lists(st.sampled_from(GRANT_ACTIONS), max_size=3).map(tuple), max_size=4)
RIGHTS = st.builds(
    GrantsAndAdministrators, admins=st.frozensets(ROLES, max_size=2), roles=GRANTED,
    topics=st.dictionaries(st.sampled_from([TOPIC, OTHER]), GRANTED, max_size=2),
    subscriptions=st.dictionaries(st.sampled_from(["s", "a", "a-x", "ab-x"]), st.lists(ROLES, max_size=3).map(tuple)),
    prefix_mode=st.booleans(),
)  # fmt: skip
SUBSCRIPTIONS = st.sampled_from(["", "s", "a", "a-x", "ab-x"])


def expected(role: str, right: AccessRight, rights: GrantsAndAdministrators, topic: str, subscription: str) -> bool:
    """The rules of the module once more, in another way: without patterns."""
    if not role:
        return False
    if role in rights.admins:
        return True
    actions = {*rights.roles.get(role, ()), *rights.topics.get(topic, {}).get(role, ())}
    wanted = {"produce", "consume"} if right is AccessRight.LOOKUP else {right.value}
    if not actions & wanted:
        return False
    named = subscription in ("", role) or subscription.startswith(role + "-") or not rights.prefix_mode
    listed = role in rights.subscriptions.get(subscription, ()) or not rights.subscriptions.get(subscription)
    return named and (listed or not subscription)


@given(ROLES, st.sampled_from(AccessRight), RIGHTS, st.sampled_from(["", TOPIC, OTHER]), SUBSCRIPTIONS)
def test_it_decides_as_the_rules_say(
    role: str, right: AccessRight, rights: GrantsAndAdministrators, topic: str, subscription: str
) -> None:
    assert (not why_right_denied(role, right, rights, topic, subscription)) == expected(
        role, right, rights, topic, subscription
    )


@given(RIGHTS, ROLES, ROLES, st.sampled_from(AccessRight), st.sampled_from(["produce", "consume"]), st.booleans())
def test_one_more_grant_takes_nothing_from_any_role(
    rights: GrantsAndAdministrators, role: str, granted: str, right: AccessRight, action: str, wildcards: bool
) -> None:
    before = not why_right_denied(role, right, rights, TOPIC, wildcards=wildcards)
    more = GrantsAndAdministrators(
        rights.admins, {**rights.roles, granted: (*rights.roles.get(granted, ()), action)}, rights.topics
    )
    assert not before or not why_right_denied(role, right, more, TOPIC, wildcards=wildcards)


@given(st.text(max_size=20), st.text(max_size=20))
def test_what_a_role_was_granted_is_of_that_role_alone(granted: str, role: str) -> None:
    """Also with line ends, NUL, stars and what only looks alike: names are compared as they are."""
    rights = GrantsAndAdministrators(roles={granted: ("produce",)})
    assert (not why_right_denied(role, AccessRight.PRODUCE, rights, TOPIC)) == (bool(role) and role == granted)


@pytest.mark.parametrize(
    ("pattern", "role", "may"),
    [
        ("team-*", "team-a", True), ("team-*", "team-", True), ("team-*", "xteam-a", False), ("*-ro", "app-ro", True),
        ("*-ro", "app-row", False), ("*", "anything", True), ("", "a", False), ("a*b", "axb", False), ("a", "a", True),
    ],
)  # fmt: skip
def test_patterns_begin_or_end_with_a_star_where_they_are_on(pattern: str, role: str, may: bool) -> None:
    rights = GrantsAndAdministrators(roles={pattern: ("produce",)})
    assert (not why_right_denied(role, AccessRight.PRODUCE, rights, TOPIC, wildcards=True)) == may
    assert (not why_right_denied(role, AccessRight.PRODUCE, rights, TOPIC)) == (pattern == role)


def test_a_role_is_no_prefix_of_another_roles_subscriptions() -> None:
    rights = GrantsAndAdministrators(roles={"a": ("consume",), "ab": ("consume",)}, prefix_mode=True)
    assert not why_right_denied("a", AccessRight.CONSUME, rights, TOPIC, "a-x")
    assert not why_right_denied("a", AccessRight.CONSUME, rights, TOPIC, "a")
    assert "named by their role" in why_right_denied("a", AccessRight.CONSUME, rights, TOPIC, "ab-x")


# ------------------------------------------------------------------------------------ changes
def test_a_grant_replaces_what_the_role_had_there_and_revoking_leaves_nothing() -> None:
    record = permissions.set_role_grant(GrantsRecord(), "", "etl", ["consume", "produce", "consume"])
    assert record.roles == {"etl": ("produce", "consume")}
    record = permissions.set_role_grant(record, "", "etl", ["consume"])
    record = permissions.set_role_grant(record, TOPIC, "web", ["produce"])
    assert (record.roles, record.topics) == ({"etl": ("consume",)}, {TOPIC: {"web": ("produce",)}})
    record = permissions.remove_role_grant(permissions.remove_role_grant(record, TOPIC, "web"), "", "etl")
    assert record == permissions.remove_role_grant(record, OTHER, "never there") == GrantsRecord()


def test_a_subscriptions_list_is_replaced_and_goes_with_its_last_role() -> None:
    record = permissions.set_subscription_roles(GrantsRecord(), "s", ["a", "b", "a"])
    assert record.subscriptions == {"s": ("a", "b")}
    record = permissions.remove_subscription_roles(record, "s", ["a"])
    assert record.subscriptions == {"s": ("b",)}
    assert permissions.remove_subscription_roles(record, "s", ["b", "c"]) == GrantsRecord()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda: permissions.set_role_grant(GrantsRecord(), "", "etl", []), InvalidRequest),
        (lambda: permissions.set_role_grant(GrantsRecord(), "", "etl", ["produce", "admin"]), InvalidRequest),
        (lambda: permissions.set_role_grant(GrantsRecord(), "", "", ["produce"]), InvalidName),
        (lambda: permissions.set_role_grant(GrantsRecord(), "", "a\nb", ["produce"]), InvalidName),
        (lambda: permissions.set_role_grant(GrantsRecord(), "", "a" * 257, ["produce"]), InvalidName),
        (lambda: permissions.set_subscription_roles(GrantsRecord(), "s", []), InvalidRequest),
        (lambda: permissions.set_subscription_roles(GrantsRecord(), "s", ["a\0"]), InvalidName),
        (lambda: permissions.set_subscription_roles(GrantsRecord(), "", ["a"]), InvalidName),
    ],
)
def test_what_no_caller_could_use_is_refused(change: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        change()


def test_a_namespaces_grants_are_bounded() -> None:
    many = {f"r{number}": ("produce",) for number in range(permissions.GRANTS_PER_RECORD_MAX)}
    with pytest.raises(InvalidRequest, match="more than 5000"):
        permissions.set_role_grant(GrantsRecord(roles=many), TOPIC, "one-more", ["consume"])
