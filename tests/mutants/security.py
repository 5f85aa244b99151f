"""Defects of security: who is admitted, what a role may do, and what becomes of a right that is lost."""

from __future__ import annotations

import asyncio
import math
from typing import Any
from unittest import mock

from magnetar.broker.access import authorizer as grants
from magnetar.broker.access import table_core as table
from magnetar.broker.access.authorizer import AccessGrants, Authorizer
from magnetar.broker.access.table_core import GrantsAndAdministrators
from magnetar.broker.grpc import checked
from magnetar.broker.grpc.admin import AdminService
from magnetar.broker.session import consumer
from magnetar.broker.session.backlogs import EntryRangeReader
from magnetar.broker.topic.topic import Topic
from magnetar.broker.topic.txn_joins import TransactionJoins
from magnetar.broker.transaction.halves_core import HalfMessageCore
from magnetar.broker.transaction.state_core import TransactionTable, ValuesByRoleAndName
from magnetar.metadata import members
from magnetar.metadata.members import Members
from magnetar.proto.errors import Unauthenticated
from magnetar.proto.names import NamespaceName, TopicName
from magnetar.proto.operations import Permission, PermissionRule
from magnetar.runtime.access import Caller, Principal, PrincipalKind
from magnetar.runtime.grpc.limits import CallerAuthenticator
from magnetar.security.authenticator import Authenticator
from magnetar.security.token import PrincipalCache
from tests.mutants.ledgers import Stack, put


# ------------------------------------------------------------------------------------ grants
def open_ones_stay(stack: Stack) -> None:
    """M50: a revocation is not told to producers and consumers that are open."""
    put(stack, Authorizer, "on_grants_changed", lambda *_: None)


def broken_watch_changes_nothing(stack: Stack) -> None:
    """M51: what was known before a watch broke is taken for current when it is back."""
    put(stack, AccessGrants, "_discard_all", lambda self: None)


def stale_for_ever(stack: Stack) -> None:
    """M52: a broker that cannot read the grants decides by those that it knows for ever."""
    put(stack, grants, "STALE_GRANTS_S_MAX", math.inf)


def read_failed_is_decided(stack: Stack) -> None:
    """M53: a change whose grants cannot be read is forgotten: who lost a right stays until the next change."""
    honest = Authorizer._undecided

    async def undecided(self: Authorizer, topics: Any) -> list[Topic]:
        await honest(self, topics)
        return []

    put(stack, Authorizer, "_undecided", undecided)


def second_name_is_not_asked(stack: Stack) -> None:
    """M54: of a request with two topics the first alone is checked: a dead letter topic is written by the broker."""
    honest = consumer._authorize

    async def authorize(broker: Any, options: Any, caller: Any) -> None:
        letters = options.subscription_properties.pop(consumer.DEAD_LETTER_TOPIC, None)
        await honest(broker, options, caller)
        if letters is not None:
            options.subscription_properties[consumer.DEAD_LETTER_TOPIC] = letters

    async def checks_nothing(self: AdminService, topic: str, context: Any) -> None:
        return

    put(stack, consumer, "_authorize", authorize)
    put(stack, AdminService, "_check_letters", checks_nothing)


def forwarded_by_anybody(stack: Stack) -> None:
    """M55: a request that says that a broker forwards it is taken from every caller."""
    honest = checked._authorize

    async def authorize(path: str, rule: PermissionRule, request: Any, context: Any, access: Authorizer) -> None:
        if not getattr(request, "here", False):
            await honest(path, rule, request, context, access)

    put(stack, checked, "_authorize", authorize)


def partitions_have_no_base(stack: Stack) -> None:
    """M56: grants of a topic are looked up by the name of the partition, which has none."""
    put(stack, TopicName, "base", property(lambda self: self))


def read_before_is_kept(stack: Stack) -> None:
    """M78: grants that were read before a revocation are kept after it, when the read began before and ended after."""
    honest = AccessGrants.get_grants_and_administrators

    async def rights(self: AccessGrants, name: NamespaceName) -> GrantsAndAdministrators:
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = await honest(self, name)
        return found

    put(stack, AccessGrants, "get_grants_and_administrators", rights)


def open_reads_go_on(stack: Stack) -> None:
    """M88: a read of a range goes on after its role lost the right to consume."""

    async def require(self: EntryRangeReader, name: TopicName) -> None:
        if self.next_index == self._wanted.first:
            await honest(self, name)

    honest = EntryRangeReader._require
    put(stack, EntryRangeReader, "_require", require)


# ------------------------------------------------------------------------------------ credentials
def wrong_becomes_anonymous(stack: Stack) -> None:
    """M57: a caller whose token is refused becomes the anonymous role, where there is one."""
    honest = Authenticator._of_header

    async def of_header(self: Authenticator, caller: Caller) -> Principal:
        try:
            return await honest(self, caller)
        except Unauthenticated:
            role = self._settings.authentication.anonymous_role
            if not role:
                raise
            return Principal(role, PrincipalKind.ANONYMOUS)

    put(stack, Authenticator, "_of_header", of_header)


def streams_outlive_credentials(stack: Stack) -> None:
    """M58: a stream goes on after the credentials of its caller have expired."""
    put(stack, CallerAuthenticator, "_expiry", lambda self, principal, end: None)


def remembered_for_ever(stack: Stack) -> None:
    """M59: a token that was verified once is taken after its end."""
    honest = PrincipalCache.add

    def add(self: PrincipalCache, digest: bytes, principal: Principal, until_ms: int) -> None:
        honest(self, digest, principal, 0)

    put(stack, PrincipalCache, "add", add)


# ------------------------------------------------------------------------------------ members
def any_key_is_a_members(stack: Stack) -> None:
    """M60: a bookie takes requests of every process that has a key, of a member or not."""

    async def admit(self: Members, key: str) -> bool:
        return True

    put(stack, Members, "admit", admit)
    put(stack, Members, "find_principal", lambda self, key: Principal("broker/any", PrincipalKind.MEMBER, "key"))


def dead_members_stay(stack: Stack) -> None:
    """M61: the key of a process whose session has ended is taken as before."""
    honest = Members._list

    async def listed(self: Members, session: Any) -> None:
        before = self._known
        await honest(self, session)
        self._known = {**before, **self._known}

    async def refresh(self: Members, session: Any, path: str) -> None:
        await asyncio.sleep(0)

    put(stack, Members, "_list", listed)
    put(stack, Members, "_refresh", refresh)


def keys_end_with_the_session(stack: Stack) -> None:
    """M62: a bookie refuses a broker whose metadata session has ended, on the connections that it has, too."""
    put(stack, members, "DEPARTED_MEMBER_VALID_S", 0.0)


# ------------------------------------------------------------------------------------ owners
def anybody_writes(stack: Stack) -> None:
    """M63: in a transaction that is open in a topic each role writes and acknowledges."""
    put(stack, TransactionJoins, "_is_writer", lambda *_: True)


def anybody_ends(stack: Stack) -> None:
    """M63b: a transaction is ended by each caller that knows its id."""
    put(stack, TransactionTable, "check_owner", lambda *_: None)


def names_of_all(stack: Stack) -> None:
    """M63c: a name, or a sink, of one role is that of each: it fences others, and counts their batches."""

    def find(self: ValuesByRoleAndName[Any], owner: str, name: str) -> Any:
        found = [value for (_, each), value in self._values.items() if each == name]
        return found[-1] if found else None

    put(stack, ValuesByRoleAndName, "find", find)


def anybody_decides(stack: Stack) -> None:
    """M63d: a half is ended by each caller that knows its id."""
    for name in ("_end", "find_half_message_state"):
        honest = getattr(HalfMessageCore, name)

        def unchecked(self: HalfMessageCore, *args: Any, honest: Any = honest) -> Any:
            with mock.patch.object(TransactionTable, "check_owner", return_value=None):
                return honest(self, *args)

        put(stack, HalfMessageCore, name, unchecked)


def anybody_settles(stack: Stack) -> None:
    """M63e: what brokers ask each other about transactions is answered to every caller."""
    between = dict.fromkeys(("Join", "Settle", "AbortOpen"), PermissionRule(Permission.SHOWN))
    rules: Any = table.PERMISSION_RULES
    stack.enter_context(mock.patch.dict(rules, {f"Transactions.{each}": rule for each, rule in between.items()}))
