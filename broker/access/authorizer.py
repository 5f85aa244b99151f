"""Decides what a caller may do: before a request is handled, and for open producers and consumers when grants change.

    await authorizer.check_permission(principal, Permission.CONSUME, topic=…, subscription=…)    raises Unauthorized
    authorizer.on_grants_changed(tenant, namespace)    decides again about open producers and consumers, in a task

A publish, a delivery or an acknowledgement is not checked: a caller that has opened a producer or a consumer may use it
until it is closed. A LOCAL caller (a listener without security), a super user, and a broker or operator of the cluster
may do everything. The text of a refusal contains names from the request only, and does not show which objects exist:
the decision is made before the topic is read, and is the same for a topic, namespace or tenant that does not exist.

Also in this file, each below its heading: how grants change, with pulsar-admin's meaning (permissions); the grants of
namespaces and the administrators of tenants, kept current by metadata watches (grants).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial

from msgspec.structs import replace

from ...metadata import paths
from ...metadata.records import DamagedRecord, GrantsRecord, TenantRecord
from ...metadata.store import CheckNodeVersion, MetadataStore, WatchReset, get_record, make_put_operation, update_record
from ...proto.errors import BadVersion, InvalidRequest, MagnetarError, Unauthorized, Unavailable
from ...proto.names import NamespaceName, TopicName, check_role, check_subscription_name
from ...proto.operations import Permission
from ...runtime.access import Principal, PrincipalKind
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.logs import AuditLog
from ...runtime.tasks import Supervisor, Tasks
from ..common.retry import LogThrottle
from ..topic.topic import Topic
from .table_core import GRANT_ACTIONS, AccessRight, GrantsAndAdministrators, why_right_denied

GRANTS_RETRY_S = 0.5
"""Seconds between two tries to decide again while the grants cannot be read."""

_LOG = logging.getLogger("magnetar.broker")
_VERBS = {
    Permission.OPERATE: "operate", Permission.MANAGE: "administer", Permission.PRODUCE: "produce to",
    Permission.CONSUME: "consume from", Permission.LOOKUP: "look up",
}  # fmt: skip
_RIGHTS = {
    Permission.PRODUCE: AccessRight.PRODUCE, Permission.CONSUME: AccessRight.CONSUME,
    Permission.LOOKUP: AccessRight.LOOKUP,
}


class Authorizer:
    """Decides which operations a caller may call. `rights`: a function that returns the grants of a namespace and the
    administrators of its tenant. `administrators`: a function that returns the administrators of a tenant. `loaded`: a
    function that returns the topics that this broker has loaded. `wildcards`: whether the roles in grants may contain
    `*`."""

    def __init__(
        self, clock: Clock, rights: Callable[[NamespaceName], Awaitable[GrantsAndAdministrators]],
        administrators: Callable[[str], Awaitable[frozenset[str]]], loaded: Callable[[], Iterable[Topic]],
        *, wildcards: bool,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._rights = rights
        self._administrators = administrators
        self._loaded = loaded
        self._wildcards = wildcards
        self._again = Tasks()
        self.audit = AuditLog(clock)

    async def close(self) -> None:
        """Cancels the tasks that decide again about open producers and consumers. Later calls of `on_grants_changed` do
        nothing."""
        await self._again.close()

    # ------------------------------------------------------------------ before a request
    async def check_permission(
        self, principal: Principal, permission: Permission, *, topic: TopicName | None = None,
        namespace: NamespaceName | None = None, tenant: str = "", subscription: str = "", peer: str = "",
        audited: bool = True,
    ) -> None:  # fmt: skip
        """Raises Unauthorized if the caller does not have the permission for the topic, namespace or tenant that is
        given (none: for the cluster). Raises Unavailable, or another error of the metadata, if the grants cannot be
        read. The permissions SHOWN and OWN are never refused here. PRODUCE, CONSUME and LOOKUP need a topic or a
        namespace. `audited`: a refusal is written to the audit log, with the client's address `peer`."""
        if may_call_every_operation(principal) or permission in (Permission.SHOWN, Permission.OWN):
            return
        what = str(topic or namespace or tenant or "the cluster")
        why = await self._why_not(principal, permission, topic, namespace, tenant, subscription)
        if why:
            what = f"{what}, subscription {subscription!r}" if subscription else what
            if audited:
                self.audit.record_denial(principal, permission.name.lower(), what, why, peer)
            raise make_unauthorized_error(principal, permission, f" {what}", why)

    async def _why_not(
        self, principal: Principal, permission: Permission, topic: TopicName | None, namespace: NamespaceName | None,
        tenant: str, subscription: str,
    ) -> str:  # fmt: skip
        if permission is Permission.OPERATE:
            return "it is no super user"
        if permission is Permission.MANAGE:
            of = topic.tenant if topic is not None else namespace.tenant if namespace is not None else tenant
            known = of and principal.name in await self._administrators(of)
            return "" if known else "it is no administrator of the tenant"
        name = topic.namespace_name if topic is not None else namespace
        assert name is not None, "produce, consume and look-up are about a topic or a namespace"
        return self._decide(principal, _RIGHTS[permission], await self._rights(name), topic, subscription)

    def _decide(
        self,
        principal: Principal,
        right: AccessRight,
        rights: GrantsAndAdministrators,
        topic: TopicName | None,
        subscription: str,
    ) -> str:
        named = topic.base.full if topic is not None else ""
        return why_right_denied(principal.name, right, rights, named, subscription, wildcards=self._wildcards)

    async def make_topic_filter(self, principal: Principal, name: NamespaceName) -> Callable[[str], bool]:
        """Returns a function that takes the full name of a topic of the namespace, and returns True if the caller may
        look the topic up. The function decides by the grants as they are now. Raises Unavailable, or another error of
        the metadata, if the grants cannot be read."""
        if may_call_every_operation(principal):
            return lambda topic: True
        rights = await self._rights(name)
        return lambda topic: not self._decide(principal, AccessRight.LOOKUP, rights, TopicName.parse(topic), "")

    async def find_granted_namespaces_and_topics(
        self, principal: Principal, names: Iterable[NamespaceName], limit: int
    ) -> tuple[list[str], list[str]]:
        """Returns (namespaces, topics). `namespaces` are those of `names` in which the caller may look up every topic.
        `topics` are the sorted full names of topics in the other ones that were granted to the caller by name, at most
        `limit`. Reads the grants of each namespace that are not cached, and raises Unavailable, or another error of the
        metadata, if they cannot be read."""
        namespaces, topics, turns = list[str](), list[str](), EventLoopSlices(self._clock)
        for name in names:
            rights = await self._rights(name)
            if not self._decide(principal, AccessRight.LOOKUP, rights, None, ""):
                namespaces.append(str(name))
                continue
            for topic in list(rights.topics):
                if len(topics) >= limit:
                    break
                if not self._decide(principal, AccessRight.LOOKUP, rights, TopicName.parse(topic), ""):
                    topics.append(topic)
                if turns.is_slice_used_up:
                    await turns.begin_slice()
        return namespaces, sorted(topics)

    async def is_administrator(self, principal: Principal, tenant: str) -> bool:
        """Returns True if the principal may administer the tenant, False if not or if there is no such tenant. A tenant
        with a damaged record counts as one without administrators, so that a list of several tenants still succeeds;
        the damage is logged. Raises the other errors of the metadata if the record cannot be read."""
        if may_call_every_operation(principal):
            return True
        try:
            return principal.name in await self._administrators(tenant)
        except DamagedRecord as error:
            _LOG.error("tenant %s: %s", tenant, error)
            return False

    # ------------------------------------------------------------------ when grants change
    def on_grants_changed(self, tenant: str, namespace: str) -> None:
        """Called when grants or administrators have changed. Starts a task that decides again whether the producers and
        consumers of the loaded topics of the namespace may stay connected, and closes the others. An empty `namespace`
        means all namespaces of the tenant; an empty `tenant` means all tenants. Does nothing after `close`."""
        if not self._again.closed:
            self._again.spawn(self._decide_again(tenant, namespace), "broker-decides-again")

    async def _decide_again(self, tenant: str, namespace: str) -> None:
        """Checks the clients of the loaded topics again, and repeats this for topics whose grants could not be read."""
        left = [
            topic for topic in self._loaded()
            if topic.name.tenant == (tenant or topic.name.tenant)
            and topic.name.namespace == (namespace or topic.name.namespace)
        ]  # fmt: skip
        while left := await self._undecided(left):  # noqa: ASYNC110 - a broken metadata store has no event for it
            await asyncio.sleep(GRANTS_RETRY_S)

    async def _undecided(self, topics: Iterable[Topic]) -> list[Topic]:
        """Checks the clients of the topics again; returns the topics whose grants cannot be read now."""
        turns, left = EventLoopSlices(self._clock), []
        for topic in topics:
            try:
                self._close_unauthorized(topic, await self._rights(topic.name.namespace_name))
            except DamagedRecord as error:  # it is decided again when the record changes
                _LOG.error("%s: who is connected stays: %s", topic.name, error)
            except MagnetarError as error:
                _LOG.warning("%s: who is connected is decided when the grants can be read: %s", topic.name, error)
                left.append(topic)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        return left

    def _close_unauthorized(self, topic: Topic, rights: GrantsAndAdministrators) -> None:
        """Closes the producers and consumers of the topic whose right to it was revoked."""
        for producer in list(topic.producers):
            if why := self._why_revoked(producer.principal, AccessRight.PRODUCE, rights, topic.name):
                producer.close(self._end_error(producer.principal, Permission.PRODUCE, topic.name, why))
        for subscription in list(topic.subscriptions.values()):
            for consumer in list(subscription.consumers.values()):
                if why := self._why_revoked(
                    consumer.principal, AccessRight.CONSUME, rights, topic.name, subscription.name
                ):
                    subscription.disconnect(
                        consumer, self._end_error(consumer.principal, Permission.CONSUME, topic.name, why)
                    )

    def _why_revoked(
        self,
        principal: Principal,
        right: AccessRight,
        rights: GrantsAndAdministrators,
        topic: TopicName,
        subscription: str = "",
    ) -> str:
        """Returns why a connected caller does not have its right any more; empty if it still has the right."""
        return "" if may_call_every_operation(principal) else self._decide(
            principal, right, rights, topic, subscription
        )

    def _end_error(self, principal: Principal, permission: Permission, topic: TopicName, why: str) -> MagnetarError:
        self.audit.record_denial(principal, f"{permission.name.lower()} (connected)", str(topic), why)
        return make_unauthorized_error(principal, permission, f" {topic}", why)


def may_call_every_operation(principal: Principal) -> bool:
    """Returns True if the principal may call every operation. That is true of a super user, of a local caller without
    security, and of another broker or an operator with a certificate of the cluster. It is false of a bookie, which
    calls no operation of a broker."""
    member = principal.kind is PrincipalKind.MEMBER and principal.name.startswith(("broker/", "operator/"))
    return principal.is_super or principal.kind is PrincipalKind.LOCAL or member


def make_unauthorized_error(principal: Principal, permission: Permission, what: str, why: str) -> Unauthorized:
    """Returns the Unauthorized error for a caller that does not have the permission. `what`: the name of the object,
    with a space in front. `why`: the reason."""
    return Unauthorized(f"{principal} may not {_VERBS[permission]}{what}: {why}")


# --------------------------------------------------------------------------------------------------- permissions
# How grants change, with pulsar-admin's meaning: each function gives the record after the change, or InvalidRequest.
#
# A grant replaces the actions that the role had there. To revoke what was not granted is no error.


GRANTS_PER_RECORD_MAX = 5000
"""Roles with grants in a namespace, its topics and subscriptions together: a record of the metadata holds 1 MiB."""

GrantsByRole = dict[str, tuple[str, ...]]


def set_role_grant(record: GrantsRecord, topic: str, role: str, actions: Sequence[str]) -> GrantsRecord:
    """Returns a copy of the record in which `role` has the actions `actions` in place of those granted to it before.
    `topic`: the full name of a topic without partition; "": the grant is for the namespace. Raises InvalidRequest if an
    action is unknown, none is given, or the record would have more than GRANTS_PER_RECORD_MAX grants; InvalidName if
    the role is invalid."""
    unknown = sorted({each for each in actions if each not in GRANT_ACTIONS})
    if unknown or not actions:
        raise InvalidRequest(f"actions are {', '.join(GRANT_ACTIONS)}, not {', '.join(map(repr, unknown)) or 'none'}")
    given = {check_role(role): tuple(each for each in GRANT_ACTIONS if each in actions)}
    if not topic:
        return _bounded(replace(record, roles={**record.roles, **given}))
    return _bounded(replace(record, topics={**record.topics, topic: {**record.topics.get(topic, {}), **given}}))


def remove_role_grant(record: GrantsRecord, topic: str, role: str) -> GrantsRecord:
    """Returns a copy of the record without the grants of the role at the topic; if `topic` is "", without its grants at
    the namespace."""
    if not topic:
        return replace(record, roles=_without(record.roles, role))
    topics = {**record.topics, topic: _without(record.topics.get(topic, {}), role)}
    return replace(record, topics={name: granted for name, granted in topics.items() if granted})


def set_subscription_roles(record: GrantsRecord, subscription: str, roles: Sequence[str]) -> GrantsRecord:
    """Returns a copy of the record in which only the given roles may use the subscription. Raises InvalidRequest if no
    role is given, or the record would have more than GRANTS_PER_RECORD_MAX grants; InvalidName if a name is invalid."""
    if not roles:
        raise InvalidRequest("a subscription's list names at least one role; without a list it takes every consumer")
    named = tuple(dict.fromkeys(check_role(each) for each in roles))
    return _bounded(
        replace(record, subscriptions={**record.subscriptions, check_subscription_name(subscription): named})
    )


def remove_subscription_roles(record: GrantsRecord, subscription: str, roles: Collection[str]) -> GrantsRecord:
    """Returns a copy of the record in which the given roles are removed from the subscription's list of roles. When no
    role is left, every consumer may use the subscription again, as in Pulsar."""
    left = tuple(each for each in record.subscriptions.get(subscription, ()) if each not in roles)
    lists = {**record.subscriptions, subscription: left}
    return replace(record, subscriptions={name: roles for name, roles in lists.items() if roles})


def remove_topic_grants(record: GrantsRecord, topic: str) -> GrantsRecord:
    """Returns a copy of the record without any grants at the topic."""
    return replace(record, topics={name: granted for name, granted in record.topics.items() if name != topic})


def _without(granted: GrantsByRole, role: str) -> GrantsByRole:
    return {name: actions for name, actions in granted.items() if name != role}


def _bounded(record: GrantsRecord) -> GrantsRecord:
    """Returns the record. Raises InvalidRequest if it has more than GRANTS_PER_RECORD_MAX grants."""
    count = len(record.roles) + sum(map(len, record.topics.values())) + sum(map(len, record.subscriptions.values()))
    if count > GRANTS_PER_RECORD_MAX:
        raise InvalidRequest(
            f"{count} grants in one namespace are more than {GRANTS_PER_RECORD_MAX}: grant at the namespace"
        )
    return record


# -------------------------------------------------------------------------------------------------------- grants
# The grants of namespaces and the administrators of tenants, kept current by metadata watches.
#
#     grants = AccessGrants(metadata, changed)
#     await grants.open()                      later changes are seen
#     await grants.get_grants_and_administrators(namespace)    those of the namespace, and those of its tenant
#     await grants.change_grants(namespace, change)    stored, and in force at this broker, when it returns
#     await grants.close()
#
# A change by any broker is known here after the watch's delay (milliseconds); then `changed(tenant, namespace)` is
# called (the namespace is empty where the tenant's administrators changed), and what is open is decided again
# (broker/access/authorizer.py). While a watch is broken the last known grants decide, for at most STALE_GRANTS_S_MAX;
# after that `get_grants_and_administrators` is Unavailable, so that a revocation that cannot be read is not ignored for
# ever. Guarding tests: tests/broker/access/test_grants.py.


STALE_GRANTS_S_MAX = 30.0
CACHED_NAMESPACES_MAX = 10_000
"""Namespaces whose grants are remembered: a caller may ask for any number of names."""
GRANT_CHANGE_ATTEMPTS_MAX = 20
"""Attempts to remove the grants of a topic, while others change those of its namespace."""
WATCH_RETRY_S = 1.0

OnGrantsChanged = Callable[[str, str], None]
"""Called with a tenant and the name of its namespace (empty: all of its namespaces)."""


class AccessGrants:
    """Caches the grants of namespaces and the administrators of tenants. They are read from the metadata at the first
    request and kept current by watches. At each change, the function `changed` is called with the tenant and the
    namespace; both are empty if anything may have changed. A method that reads or changes the metadata also raises the
    errors of the metadata."""

    def __init__(self, metadata: MetadataStore, clock: Clock, changed: OnGrantsChanged) -> None:
        self._metadata = metadata
        self._clock = clock
        self._changed = changed
        self._known: OrderedDict[NamespaceName, GrantsAndAdministrators] = OrderedDict()
        self._reads = 0  # a read that began before a change is not remembered
        self._broken: dict[str, float] = {}  # watched path → since when, monotonic
        self._background = Supervisor()

    async def open(self) -> None:
        """Starts the watches of the metadata. Every later change of grants or administrators is then seen. Raises the
        error of the metadata if it does not answer."""
        revision = await self._metadata.revision()
        for path in (paths.GRANTS, paths.TENANTS):
            self._background.start_supervised(f"broker-watch-{path[1:]}", partial(self._follow, path, revision))

    async def close(self) -> None:
        """Ends the watches."""
        await self._background.close()

    # ------------------------------------------------------------------ asking
    async def get_grants_and_administrators(self, name: NamespaceName) -> GrantsAndAdministrators:
        """Returns the grants of a namespace and the administrators of its tenant. A namespace or tenant that does not
        exist counts as one without grants or administrators. Raises Unavailable if the watches have failed for more
        than STALE_GRANTS_S_MAX seconds, and the error of the metadata if what is not cached cannot be read
        (DamagedRecord for a damaged record)."""
        if self._broken and self._clock.monotonic() - min(self._broken.values()) > STALE_GRANTS_S_MAX:
            raise Unavailable("grants cannot be read from the metadata at the moment; try again")
        found = self._known.get(name)
        if found is not None:
            self._known.move_to_end(name)
            return found
        before = self._reads
        found = await self._read(name)
        if before == self._reads:
            self._known[name] = found
            if len(self._known) > CACHED_NAMESPACES_MAX:
                self._known.popitem(last=False)
        return found

    async def read_grants_record(self, name: NamespaceName) -> GrantsRecord:
        """Reads the record with the grants of a namespace from the metadata, past the cache, and returns it. Returns an
        empty record if there is none. Raises the errors of the metadata."""
        found = await get_record(self._metadata, paths.grants(name.tenant, name.namespace), GrantsRecord)
        return GrantsRecord() if found is None else found[0]

    async def read_administrators(self, tenant: str) -> frozenset[str]:
        """Reads the administrators of the tenant from the metadata, past the cache, and returns their roles. Returns an
        empty set if the tenant does not exist. Raises the errors of the metadata."""
        found = await get_record(self._metadata, paths.tenant(tenant), TenantRecord)
        return frozenset(found[0].admin_roles) if found is not None else frozenset()

    async def _read(self, name: NamespaceName) -> GrantsAndAdministrators:
        record, admins = await asyncio.gather(self.read_grants_record(name), self.read_administrators(name.tenant))
        return GrantsAndAdministrators(admins, record.roles, record.topics, record.subscriptions, record.prefix_mode)

    # ------------------------------------------------------------------ changing
    async def change_grants(self, name: NamespaceName, change: Callable[[GrantsRecord], GrantsRecord]) -> None:
        """Replaces the record of grants of a namespace by the record that the function `change` returns for the current
        record. `change` may be called several times, when others change the record at the same time; its errors, and
        those of `update_record`, are raised. This broker decides by the new grants when the call returns."""
        path = paths.grants(name.tenant, name.namespace)
        await update_record(self._metadata, path, GrantsRecord, lambda found: change(found or GrantsRecord()))
        self._discard(name.tenant, name.namespace)

    async def delete_topic_grants(self, topic: TopicName, *still: CheckNodeVersion) -> None:
        """Deletes the grants of a topic; does nothing if it has none. Must be called before the topic's record is
        deleted, so that a later topic of the same name does not inherit the grants. Raises BadVersion if a check in
        `still` fails, because the name belongs to another topic by now; Unavailable if the grants of the namespace were
        changed during each of GRANT_CHANGE_ATTEMPTS_MAX attempts. Raises the errors of the metadata, too."""
        name = topic.namespace_name
        path = paths.grants(name.tenant, name.namespace)
        for _ in range(GRANT_CHANGE_ATTEMPTS_MAX):
            found = await get_record(self._metadata, path, GrantsRecord)
            if found is None or topic.full not in found[0].topics:
                return
            try:
                await self._metadata.commit(
                    [*still, make_put_operation(path, remove_topic_grants(found[0], topic.full), found[1])]
                )
            except BadVersion as error:
                if error.fields.get("path") != path:
                    raise
            finally:
                self._discard(name.tenant, name.namespace)
        raise Unavailable(f"the grants of namespace {name} are changed all the time; delete {topic} again")

    def _discard(self, tenant: str, namespace: str) -> None:
        self._reads += 1
        if namespace:
            self._known.pop(NamespaceName(tenant, namespace), None)
        else:
            for name in [each for each in self._known if each.tenant == tenant]:
                del self._known[name]
        self._changed(tenant, namespace)

    # ------------------------------------------------------------------ the watches
    async def _follow(self, path: str, revision: int) -> None:
        throttle = LogThrottle(self._clock)
        while True:
            try:
                if path in self._broken:
                    revision = await self._metadata.revision()
                    del self._broken[path]
                    self._discard_all()
                async for event in self._metadata.watch(path, revision):
                    if isinstance(event, WatchReset):
                        self._discard_all()
                    else:
                        self._on_change(path, event.path)
            except MagnetarError as error:
                if throttle.should_log(error):
                    _LOG.warning("grants as they were decide until they can be read: %s", error)
            self._broken.setdefault(path, self._clock.monotonic())
            await asyncio.sleep(WATCH_RETRY_S)

    def _on_change(self, path: str, changed: str) -> None:
        parts = [paths.decode_segment(each) for each in changed.removeprefix(path).strip("/").split("/")]
        if path == paths.TENANTS and len(parts) == 1:
            self._discard(parts[0], "")
        elif path == paths.GRANTS and len(parts) == 2:
            self._discard(parts[0], parts[1])

    def _discard_all(self) -> None:
        self._reads += 1
        self._known.clear()
        self._changed("", "")
