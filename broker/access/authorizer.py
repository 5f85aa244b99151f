"""Decides whether a caller may: before a request is handled, and again for what is open when grants change.

    await authorizer.require(principal, Permission.CONSUME, topic=…, subscription=…)     or Unauthorized
    authorizer.changed(tenant, namespace)    what is open there is decided again, within a turn of the loop or some

Nothing is asked for a publish, a delivery or an acknowledgement: who opened a producer or a consumer may use it until
it is closed. A LOCAL caller (a listener without security), a super user and a member of the cluster may do everything.
The text of a refusal has what the caller said itself, and nothing about what exists: the decision comes before the
first look at the topic, and is the same for a topic, namespace or tenant that is missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from ...metadata.records import DamagedRecord
from ...proto.errors import MagnetarError, Unauthorized
from ...proto.names import NamespaceName, TopicName
from ...proto.operation import Permission
from ...runtime.access import Principal, PrincipalKind
from ...runtime.clock import Clock
from ...runtime.monitoring.audit import AuditLog
from ...runtime.tasks import Tasks
from ..common.turns import Turns
from ..topic.topic import Topic
from .core.rights import Right, Rights, decide

AGAIN_S = 0.5
"""Seconds between two tries to decide again while the grants cannot be read."""

_LOG = logging.getLogger("magnetar.broker")
_VERBS = {
    Permission.OPERATE: "operate", Permission.MANAGE: "administer", Permission.PRODUCE: "produce to",
    Permission.CONSUME: "consume from", Permission.LOOKUP: "look up",
}  # fmt: skip
_RIGHTS = {Permission.PRODUCE: Right.PRODUCE, Permission.CONSUME: Right.CONSUME, Permission.LOOKUP: Right.LOOKUP}


class Authorizer:
    """Decides for callers. `rights` reads the grants of a namespace, `administrators` those of a tenant; `loaded` has
    the topics here."""

    def __init__(
        self, clock: Clock, rights: Callable[[NamespaceName], Awaitable[Rights]],
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
        await self._again.close()

    # ------------------------------------------------------------------ before a request
    async def require(
        self, principal: Principal, permission: Permission, *, topic: TopicName | None = None,
        namespace: NamespaceName | None = None, tenant: str = "", subscription: str = "", peer: str = "",
    ) -> None:  # fmt: skip
        """Checks that a caller has a permission. Raises Unauthorized; Unavailable: the grants cannot be read."""
        if may_everything(principal) or permission in (Permission.SHOWN, Permission.OWN):
            return
        what = str(topic or namespace or tenant or "the cluster")
        why = await self._why_not(principal, permission, topic, namespace, tenant, subscription)
        if why:
            what = f"{what}, subscription {subscription!r}" if subscription else what
            self.audit.denied(principal, permission.name.lower(), what, why, peer)
            raise refused(principal, permission, f" {what}", why)

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
        self, principal: Principal, right: Right, rights: Rights, topic: TopicName | None, subscription: str
    ) -> str:
        named = topic.base.full if topic is not None else ""
        return decide(principal.name, right, rights, named, subscription, wildcards=self._wildcards)

    async def shown(self, principal: Principal, name: NamespaceName) -> Callable[[str], bool]:
        """Returns whether a topic of the namespace (full name) is shown to the caller: those are that it may look up.
        """
        if may_everything(principal):
            return lambda topic: True
        rights = await self._rights(name)
        return lambda topic: not self._decide(principal, Right.LOOKUP, rights, TopicName.parse(topic), "")

    async def administers(self, principal: Principal, tenant: str) -> bool:
        """Whether the principal administers the tenant. A tenant whose record is damaged has no administrators: it is
        no matter of others' lists."""
        if may_everything(principal):
            return True
        try:
            return principal.name in await self._administrators(tenant)
        except DamagedRecord as error:
            _LOG.error("tenant %s: %s", tenant, error)
            return False

    # ------------------------------------------------------------------ when grants change
    def changed(self, tenant: str, namespace: str) -> None:
        """Decides again, in a task, for all streams of a namespace. `namespace` empty: each of the tenant's; `tenant`
        too: all."""
        if not self._again.closed:
            self._again.spawn(self._decide_again(tenant, namespace), "broker-decides-again")

    async def _decide_again(self, tenant: str, namespace: str) -> None:
        """Decides until all is decided: a change whose grants could not be read is not forgotten."""
        left = [
            topic for topic in self._loaded()
            if topic.name.tenant == (tenant or topic.name.tenant)
            and topic.name.namespace == (namespace or topic.name.namespace)
        ]  # fmt: skip
        while left := await self._undecided(left):  # noqa: ASYNC110 - a broken metadata store has no event for it
            await asyncio.sleep(AGAIN_S)

    async def _undecided(self, topics: Iterable[Topic]) -> list[Topic]:
        """Decides again for the topics; returns those whose grants cannot be read now."""
        turns, left = Turns(self._clock), []
        for topic in topics:
            try:
                self._look_at(topic, await self._rights(topic.name.namespace_name))
            except DamagedRecord as error:  # it is decided again when the record changes
                _LOG.error("%s: who is connected stays: %s", topic.name, error)
            except MagnetarError as error:
                _LOG.warning("%s: who is connected is decided when the grants can be read: %s", topic.name, error)
                left.append(topic)
            if turns.over:
                await turns.next()
        return left

    def _look_at(self, topic: Topic, rights: Rights) -> None:
        """Closes the producers and consumers of the topic that may not be there any more."""
        for producer in list(topic.producers):
            if why := self._gone(producer.principal, Right.PRODUCE, rights, topic.name):
                producer.close(self._ended(producer.principal, Permission.PRODUCE, topic.name, why))
        for subscription in list(topic.subscriptions.values()):
            for consumer in list(subscription.consumers.values()):
                if why := self._gone(consumer.principal, Right.CONSUME, rights, topic.name, subscription.name):
                    subscription.disconnect(
                        consumer, self._ended(consumer.principal, Permission.CONSUME, topic.name, why)
                    )

    def _gone(
        self, principal: Principal, right: Right, rights: Rights, topic: TopicName, subscription: str = ""
    ) -> str:
        return "" if may_everything(principal) else self._decide(principal, right, rights, topic, subscription)

    def _ended(self, principal: Principal, permission: Permission, topic: TopicName, why: str) -> MagnetarError:
        self.audit.denied(principal, f"{permission.name.lower()} (connected)", str(topic), why)
        return refused(principal, permission, f" {topic}", why)


def may_everything(principal: Principal) -> bool:
    """Whether the principal may do everything: so may other brokers and operators, by a certificate of the cluster; a
    bookie has no business at a broker."""
    member = principal.kind is PrincipalKind.MEMBER and principal.name.startswith(("broker/", "operator/"))
    return principal.is_super or principal.kind is PrincipalKind.LOCAL or member


def refused(principal: Principal, permission: Permission, what: str, why: str) -> Unauthorized:
    return Unauthorized(f"{principal} may not {_VERBS[permission]}{what}: {why}")
