"""The grants of namespaces and the administrators of tenants, kept current by metadata watches.

    grants = Grants(metadata, changed)
    await grants.open()                      from here on changes are seen
    await grants.rights(namespace)           what decides there
    await grants.change(namespace, change)   written, and known here, when it returns
    await grants.close()

A change by any broker is known here after the watch's delay (milliseconds); then `changed(tenant, namespace)` is called
(the namespace is empty where the tenant's administrators changed), and what is open is decided again
(broker/access/authorizer.py). While a watch is broken the last known grants decide, for at most STALE_S; after that
`rights` is Unavailable, so that a revocation that cannot be read is not ignored for ever.
Guarding tests: tests/broker/access/test_grants.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from ...metadata import paths
from ...metadata.records import GrantsRecord, TenantRecord
from ...metadata.store import Check, MetadataStore, Reset
from ...metadata.update import get_record, put_of, update_record
from ...proto.errors import BadVersion, MagnetarError, Unavailable
from ...proto.names import NamespaceName, TopicName
from ...runtime.clock import Clock
from ...runtime.supervisor import Supervisor
from ..common.log_throttle import LogThrottle
from .core.rights import Rights
from .permissions import without_topic

_LOG = logging.getLogger("magnetar.broker")

STALE_S = 30.0
KNOWN_MAX = 10_000
"""Namespaces whose grants are remembered: a caller may ask for any number of names."""
ATTEMPTS_MAX = 20
"""Tries to take the grants of a topic away, while others change those of its namespace."""
WATCH_RETRY_S = 1.0

Changed = Callable[[str, str], None]
"""Called with a tenant and the name of its namespace ("": all of them)."""


class Grants:
    """The grants and administrators, read from the metadata and kept current by watches."""

    def __init__(self, metadata: MetadataStore, clock: Clock, changed: Changed) -> None:
        self._metadata = metadata
        self._clock = clock
        self._changed = changed
        self._known: OrderedDict[NamespaceName, Rights] = OrderedDict()
        self._reads = 0  # a read that began before a change is not remembered
        self._broken: dict[str, float] = {}  # watched path → since when, monotonic
        self._background = Supervisor()

    async def open(self) -> None:
        revision = await self._metadata.revision()
        for path in (paths.GRANTS, paths.TENANTS):
            self._background.keep(f"broker-watch-{path[1:]}", partial(self._follow, path, revision))

    async def close(self) -> None:
        await self._background.close()

    # ------------------------------------------------------------------ asking
    async def rights(self, name: NamespaceName) -> Rights:
        """Returns the rights; none if the namespace or tenant does not exist. Unavailable: they cannot be read."""
        if self._broken and self._clock.monotonic() - min(self._broken.values()) > STALE_S:
            raise Unavailable("grants cannot be read from the metadata at the moment; try again")
        found = self._known.get(name)
        if found is not None:
            self._known.move_to_end(name)
            return found
        before = self._reads
        found = await self._read(name)
        if before == self._reads:
            self._known[name] = found
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)
        return found

    async def record(self, name: NamespaceName) -> GrantsRecord:
        """Returns the grants as they are in the metadata."""
        found = await get_record(self._metadata, paths.grants(name.tenant, name.namespace), GrantsRecord)
        return GrantsRecord() if found is None else found[0]

    async def administrators(self, tenant: str) -> frozenset[str]:
        found = await get_record(self._metadata, paths.tenant(tenant), TenantRecord)
        return frozenset(found[0].admin_roles) if found is not None else frozenset()

    async def _read(self, name: NamespaceName) -> Rights:
        record, admins = await asyncio.gather(self.record(name), self.administrators(name.tenant))
        return Rights(admins, record.roles, record.topics, record.subscriptions, record.prefix_mode)

    # ------------------------------------------------------------------ changing
    async def change(self, name: NamespaceName, change: Callable[[GrantsRecord], GrantsRecord]) -> None:
        """Changes the grants of a namespace. Raises the InvalidRequest of `change`. Once it returns, this broker
        decides by the new ones."""
        path = paths.grants(name.tenant, name.namespace)
        await update_record(self._metadata, path, GrantsRecord, lambda found: change(found or GrantsRecord()))
        self._forget(name.tenant, name.namespace)

    async def forget(self, topic: TopicName, *still: Check) -> None:
        """Deletes the grants of a topic, before its record is deleted: a topic that is made anew has no grants of an
        earlier one. BadVersion: it is not `still` that topic."""
        name = topic.namespace_name
        path = paths.grants(name.tenant, name.namespace)
        for _ in range(ATTEMPTS_MAX):
            found = await get_record(self._metadata, path, GrantsRecord)
            if found is None or topic.full not in found[0].topics:
                return
            try:
                await self._metadata.commit([*still, put_of(path, without_topic(found[0], topic.full), found[1])])
            except BadVersion as error:
                if error.fields.get("path") != path:
                    raise
            finally:
                self._forget(name.tenant, name.namespace)
        raise Unavailable(f"the grants of namespace {name} are changed all the time; delete {topic} again")

    def _forget(self, tenant: str, namespace: str) -> None:
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
                    self._forget_all()
                async for event in self._metadata.watch(path, revision):
                    if isinstance(event, Reset):
                        self._forget_all()
                    else:
                        self._told(path, event.path)
            except MagnetarError as error:
                if throttle.news(error):
                    _LOG.warning("grants as they were decide until they can be read: %s", error)
            self._broken.setdefault(path, self._clock.monotonic())
            await asyncio.sleep(WATCH_RETRY_S)

    def _told(self, path: str, changed: str) -> None:
        parts = [paths.name(each) for each in changed.removeprefix(path).strip("/").split("/")]
        if path == paths.TENANTS and len(parts) == 1:
            self._forget(parts[0], "")
        elif path == paths.GRANTS and len(parts) == 2:
            self._forget(parts[0], parts[1])

    def _forget_all(self) -> None:
        self._reads += 1
        self._known.clear()
        self._changed("", "")
