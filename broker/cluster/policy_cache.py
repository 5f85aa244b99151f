"""Cache of policies of brokers, tenants, namespaces and topics, kept current by one metadata watch over all policies.

    cache = PolicyCache(metadata, defaults, changed)
    await cache.open()                         reads the policies of all brokers; begins to watch for changes
    await cache.get_applied_policies(topic)    reads the policies of the namespace and its topics, once
    await cache.change_policies(…)             stored, and in the cache, when it returns
    await cache.close()

The policies of all brokers, which replace their settings, are read at the start (`defaults`); a change of them counts
as a change of every namespace. `runtime_changed` is called with the other settings that change while brokers run. The
first request for a topic reads the policies of its tenant, of its namespace, of the namespace's resource group and of
all topics in it. From then on, when the watch reports a change, the cache reads the changed record again, and calls
`changed(namespace)`, for a tenant and a resource group with each of its namespaces. Reads and reports of the watch are
handled one at a time. So a change that is made during a read is either in the result, or is reported afterwards.
Another broker's change is known here after the delay of the watch (milliseconds). If the watch fails, it is started
again, and all cached policies are read again.
Guarding test: tests/broker/cluster/test_policy_cache.py.

Also in this file, below its heading: the topics of a namespace and each change of them, from the metadata
(topic_watch).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple

import msgspec

from ...metadata import paths
from ...metadata.records import DamagedRecord, Feature, PoliciesRecord, may_write_feature
from ...metadata.store import DeleteNode, MetadataStore, NodeChanged, WatchReset, get_record, update_record
from ...proto.applied import AppliedPolicies
from ...proto.errors import MagnetarError, NotAllowed, NotFound
from ...proto.names import NamespaceName, TopicName
from ...proto.policies import (
    ISOLATION_FIELDS,
    Policies,
    check_policies,
    complete_retention_pairs,
    merge_policies,
    remove_policies,
)
from ...runtime.tasks import Supervisor
from ..common.config import (
    RuntimeSettings,
    adapt_policies_to_non_persistent,
    parse_runtime_settings,
    resolve_policies_in_force,
)
from .catalog import Catalog

_LOG = logging.getLogger("magnetar.broker")

POLICIES_READ_AT_ONCE = 100
"""Records of topics that are read at a time when a namespace is read."""
WATCH_RETRY_S = 1.0
"""Seconds until a broken watch is started again."""

NO_POLICIES = Policies()
_AS_THEY_WERE = "policies as they were are used until they can be read: %s"


class _Namespace:
    __slots__ = ("applied", "own", "topics")

    def __init__(self, own: Policies, topics: dict[str, Policies], applied: AppliedPolicies) -> None:
        self.own = own
        self.topics = topics  # by the name in the path; only those that set a policy
        self.applied = applied


class PolicyCache:
    """Caches the policies of brokers, namespaces and topics. A watch of the metadata keeps the cache current.
    `changed`: a function that is called with each namespace whose policies have changed; `runtime_changed`: a function
    that is called with the runtime settings when they are read. A method that reads or changes the metadata also raises
    the errors of the metadata."""

    def __init__(
        self, metadata: MetadataStore, defaults: AppliedPolicies, changed: Callable[[NamespaceName],
        None] = lambda _: None,
        runtime_changed: Callable[[RuntimeSettings], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._metadata = metadata
        self._configured = defaults
        self.defaults = defaults  # the defaults in force: the configured ones, with the policies of all brokers
        self.all_brokers_record = PoliciesRecord()  # what is changed for all brokers, as it was read last
        self._changed = changed
        self._runtime_changed = runtime_changed
        self._known: dict[NamespaceName, _Namespace] = {}
        self._tenants: dict[str, Policies] = {}  # of those whose namespaces are known
        self._groups: dict[str, Policies | None] = {}  # of known namespaces; None: does not exist
        self._turn = asyncio.Lock()  # held while policies are read
        self._background = Supervisor()

    async def open(self) -> None:
        """Reads the policies of all brokers, and starts the watch. Must be called once, before any other method. Raises
        the errors of the metadata."""
        revision = await self._metadata.revision()
        await self._read_defaults()
        self._background.start_supervised("broker-policies", lambda: self._follow(revision))

    async def close(self) -> None:
        await self._background.close()

    # ------------------------------------------------------------------ asking
    async def get_applied_policies(self, topic: TopicName) -> AppliedPolicies:
        """Returns the policies in force for a topic. Reads the policies of its namespace first if they are not in the
        cache. Raises the errors of the metadata."""
        await self._namespace(topic.namespace_name)
        return self.get_applied_policies_nowait(topic)

    def get_applied_policies_nowait(self, topic: TopicName) -> AppliedPolicies:
        """Returns the policies in force for a topic, from the cache, without waiting. The policies of the topic's
        namespace must be in the cache already (`get_applied_policies`); raises KeyError if they are not."""
        known = self._known[topic.namespace_name]
        own = known.topics.get(topic.local)
        applied = known.applied if own is None else self._resolve(topic.namespace_name, known.own, own)
        return applied if topic.persistent else adapt_policies_to_non_persistent(applied)

    async def get_applied_namespace_policies(self, name: NamespaceName) -> AppliedPolicies:
        """Returns the policies in force for a namespace. Reads them first if they are not in the cache. Raises the
        errors of the metadata."""
        return (await self._namespace(name)).applied

    def get_resource_group_nowait(self, name: str) -> Policies:
        """Returns the rates of a resource group of a namespace that is in the cache, as policies of a namespace; those
        of a group that does not exist, or is not in the cache, have no limit."""
        return self._groups.get(name) or NO_POLICIES

    async def read_resource_group(self, name: str) -> Policies | None:
        """Reads the rates of a resource group from the metadata, as policies of a namespace (RESOURCE_GROUP_FIELDS),
        and returns them; None if there is no such group. Raises the errors of the metadata."""
        found = await get_record(self._metadata, paths.resource_group(name), PoliciesRecord)
        return None if found is None else found[0].policies

    async def list_resource_groups(self) -> list[str]:
        """Returns the names of the resource groups, sorted. Raises the errors of the metadata."""
        return sorted(paths.decode_segment(each) for each in await self._metadata.children(paths.RESOURCE_GROUPS))

    async def read_uninherited_policies(self, name: NamespaceName | None, topic: TopicName | None) -> Policies:
        """Reads the policies that are set for the topic itself from the metadata, and returns them; without `topic`,
        for the namespace `name` itself; without both, for all brokers. Inherited policies are not included. If none are
        set there, all fields of the result are None. Raises the errors of the metadata."""
        found = await get_record(self._metadata, _path(name, topic), PoliciesRecord)
        return NO_POLICIES if found is None else found[0].policies

    async def _namespace(self, name: NamespaceName) -> _Namespace:
        found = self._known.get(name)
        if found is None:
            async with self._turn:
                found = self._known.get(name) or await self._read(name)
        return found

    async def _read(self, name: NamespaceName) -> _Namespace:
        """Reads the policies of a namespace and its topics from the metadata into the cache."""
        self._tenants[name.tenant] = await self.read_tenant_policies(name.tenant)
        own = await self.read_uninherited_policies(name, None)
        local = [paths.decode_segment(each) for each in await self._metadata.children(_path(name, None))]
        topics: dict[str, Policies] = {}
        for start in range(0, len(local), POLICIES_READ_AT_ONCE):
            some = local[start : start + POLICIES_READ_AT_ONCE]
            found = await asyncio.gather(*[self.read_uninherited_policies(name, _topic(name, each)) for each in some])
            topics.update(
                (each, policies) for each, policies in zip(some, found, strict=True) if policies != NO_POLICIES
            )
        await self._read_group_of(own)
        known = self._known[name] = _Namespace(own, topics, self._resolve(name, own))
        return known

    async def _read_group_of(self, own: Policies) -> None:
        """Reads the resource group of a namespace with these policies, unless it is in the cache."""
        group = own.resource_group
        if group and group not in self._groups:
            self._groups[group] = await self.read_resource_group(group)

    async def _read_group_again(self, group: str) -> None:
        if group in self._groups:
            self._groups[group] = await self.read_resource_group(group)
            for name in [name for name, known in self._known.items() if known.own.resource_group == group]:
                self._changed(name)

    def _resolve(self, name: NamespaceName, *levels: Policies) -> AppliedPolicies:
        """Returns the policies in force where these levels (of the namespace `name`, then of a topic) are set."""
        return resolve_policies_in_force(self.defaults, self._tenants[name.tenant], *levels)

    async def read_tenant_policies(self, tenant: str) -> Policies:
        """Reads the policies that are set for a tenant from the metadata, and returns them. Raises the errors of the
        metadata."""
        found = await get_record(self._metadata, paths.tenant_policies(tenant), PoliciesRecord)
        return NO_POLICIES if found is None else found[0].policies

    async def read_cluster_policies_record(self) -> PoliciesRecord:
        """Reads the record of the settings that operators have changed for all brokers from the metadata, and returns
        it: policies, and in `properties` the texts of the settings in RuntimeSettings. Returns an empty record if none
        is stored. Raises the errors of the metadata."""
        found = await get_record(self._metadata, paths.BROKER_POLICIES, PoliciesRecord)
        return PoliciesRecord() if found is None else found[0]

    async def _read_defaults(self) -> None:
        record = self.all_brokers_record = await self.read_cluster_policies_record()
        self.defaults = resolve_policies_in_force(self._configured, record.policies)
        self._runtime_changed(parse_runtime_settings(record.properties))

    # ------------------------------------------------------------------ changing
    async def change_policies(
        self, name: NamespaceName | None, topic: TopicName | None, given: Policies, remove: tuple[str, ...] = ()
    ) -> Policies:  # fmt: skip
        """Sets the policies in `given`, and removes the policies named in `remove`, for the topic or the namespace; if
        `name` is None, for all brokers. Returns the policies that are then set there. Raises InvalidRequest if the
        policies contradict each other, NotAllowed if a policy has to wait for the end of an upgrade. Raises the errors
        of the metadata, too."""
        found = await self._change_record(_path(name, topic), given, remove)
        async with self._turn:
            if name is None:
                await self._read_defaults_again()
            elif name in self._known:
                await self._read_again(name, topic.local if topic is not None else None)
        return found

    async def change_tenant_policies(self, tenant: str, given: Policies, remove: tuple[str, ...] = ()) -> Policies:
        """Sets the policies in `given`, and removes those named in `remove`, for a tenant, as `change_policies` does
        for a namespace."""
        found = await self._change_record(paths.tenant_policies(tenant), given, remove)
        async with self._turn:
            await self._read_tenant_again(tenant)
        return found

    async def change_resource_group(self, group: str, given: Policies) -> None:
        """Makes a resource group, or changes one: sets the rates in `given`; others stay as they are. Raises
        InvalidRequest if a rate is invalid, and the errors of the metadata."""
        await self._change_record(paths.resource_group(group), given, ())
        async with self._turn:
            await self._read_group_again(group)

    async def delete_resource_group(self, group: str) -> None:
        """Deletes a resource group, if there is one. Raises the errors of the metadata."""
        await self._metadata.commit([DeleteNode(paths.resource_group(group))])
        async with self._turn:
            await self._read_group_again(group)

    async def _change_record(self, path: str, given: Policies, remove: tuple[str, ...]) -> Policies:
        isolates = any(getattr(given, each) is not None for each in ISOLATION_FIELDS)
        if isolates and not may_write_feature(Feature.ISOLATION):
            raise NotAllowed(
                "older brokers do not obey a policy of isolation: not before the upgrade is finished: run "
                "'magnetar cluster finish-upgrade', then restart"
            )
        if given.durability == "memory" and not may_write_feature(Feature.UNSYNCED_ADDS):
            raise NotAllowed(
                "durability=memory needs bookies that all know it: finish the upgrade first (`magnetar cluster "
                "finish-upgrade`)"
            )

        def changed(record: PoliciesRecord | None) -> PoliciesRecord:
            record = record or PoliciesRecord()
            policies = check_policies(
                complete_retention_pairs(merge_policies(remove_policies(record.policies, *remove), given))
            )
            return msgspec.structs.replace(record, policies=policies)

        found = await update_record(self._metadata, path, PoliciesRecord, changed)
        assert found is not None
        return found[0].policies

    async def change_runtime_setting(self, name: str, text: str | None) -> None:
        """Sets the setting `name` of RuntimeSettings for all brokers to `text`; None: removes it. This broker uses the
        new value when this call returns. `text` is stored without a check. Raises the errors of the metadata."""

        def changed(record: PoliciesRecord | None) -> PoliciesRecord:
            record = record or PoliciesRecord()
            kept = {key: value for key, value in record.properties.items() if key != name}
            return msgspec.structs.replace(record, properties=kept | ({} if text is None else {name: text}))

        await update_record(self._metadata, paths.BROKER_POLICIES, PoliciesRecord, changed)
        async with self._turn:
            await self._read_defaults_again()

    async def read_properties(self, name: NamespaceName, topic: TopicName | None) -> dict[str, str]:
        """Reads the properties of the topic, or of the namespace if `topic` is None, from the metadata. Returns {} if
        none are set. Raises the errors of the metadata."""
        found = await get_record(self._metadata, _path(name, topic), PoliciesRecord)
        return {} if found is None else found[0].properties

    async def change_properties(
        self, name: NamespaceName, topic: TopicName | None, change: Callable[[dict[str, str]], Mapping[str, str]]
    ) -> None:  # fmt: skip
        """Replaces the properties of a topic or a namespace. `change`: a function that returns the new properties for
        the current ones; it may be called several times. Raises the errors of `change` and of the metadata."""

        def changed(record: PoliciesRecord | None) -> PoliciesRecord:
            record = record or PoliciesRecord()
            return msgspec.structs.replace(record, properties=dict(change(dict(record.properties))))

        await update_record(self._metadata, _path(name, topic), PoliciesRecord, changed)

    # ------------------------------------------------------------------ the watch
    async def _follow(self, revision: int) -> None:
        broken = False
        while True:
            try:
                if broken:  # what the watch would not report is read before it goes on
                    async with self._turn:
                        revision = await self._metadata.revision()
                        await self._read_all()
                    broken = False
                async for event in self._metadata.watch(paths.POLICIES, revision):
                    async with self._turn:
                        if isinstance(event, WatchReset):
                            await self._read_all()
                        else:
                            await self._on_change(event.path)
            except MagnetarError as error:
                _LOG.warning(_AS_THEY_WERE, error)
            broken = True
            await asyncio.sleep(WATCH_RETRY_S)

    async def _read_all(self) -> None:
        """Reads all policies again; if a record is damaged, its policies stay as they were."""
        await self._unless_damaged(self._read_defaults())
        for group in list(self._groups):
            await self._unless_damaged(self._read_group_again(group))
        for name in list(self._known):
            await self._unless_damaged(self._read(name))
            self._changed(name)

    @staticmethod
    async def _unless_damaged(reading: Awaitable[object]) -> None:
        try:
            await reading
        except DamagedRecord as error:
            _LOG.warning(_AS_THEY_WERE, error)

    async def _read_defaults_again(self) -> None:
        await self._read_defaults()
        self._resolve_again(list(self._known))

    async def _read_tenant_again(self, tenant: str) -> None:
        if tenant in self._tenants:
            self._tenants[tenant] = await self.read_tenant_policies(tenant)
            self._resolve_again([name for name in self._known if name.tenant == tenant])

    def _resolve_again(self, names: list[NamespaceName]) -> None:
        for name in names:
            known = self._known[name]
            known.applied = self._resolve(name, known.own)
            self._changed(name)

    async def _on_change(self, path: str) -> None:
        if path == paths.BROKER_POLICIES:
            await self._read_defaults_again()
            return
        if path.startswith(f"{paths.RESOURCE_GROUPS}/"):
            await self._read_group_again(paths.decode_segment(path.rpartition("/")[2]))
            return
        parts = [paths.decode_segment(each) for each in path.removeprefix(paths.POLICIES).strip("/").split("/")]
        if len(parts) == 1:
            await self._read_tenant_again(parts[0])
        elif len(parts) in (2, 3):
            name = NamespaceName(parts[0], parts[1])
            if name in self._known:
                await self._read_again(name, parts[2] if len(parts) == 3 else None)

    async def _read_again(self, name: NamespaceName, local: str | None) -> None:
        known = self._known[name]
        if local is None:
            known.own = await self.read_uninherited_policies(name, None)
            await self._read_group_of(known.own)
            known.applied = self._resolve(name, known.own)
        else:
            own = await self.read_uninherited_policies(name, _topic(name, local))
            known.topics.pop(local, None)
            if own != NO_POLICIES:
                known.topics[local] = own
        self._changed(name)


def _topic(name: NamespaceName, local: str) -> TopicName:
    return TopicName(name.tenant, name.namespace, local)


def _path(name: NamespaceName | None, topic: TopicName | None) -> str:
    if name is None:
        return paths.BROKER_POLICIES
    if topic is None:
        return paths.namespace_policies(name.tenant, name.namespace)
    return paths.topic_policies(name.tenant, name.namespace, topic.local)


# --------------------------------------------------------------------------------------------------- topic_watch
# The topics of a namespace and each change of them, from the metadata: the content of WatchTopics.
#
#     async for fact in TopicWatcher(store, catalog).watch_topics_of_namespace(namespace, after_revision): …
#
# First yields all topics (`TopicsListed`), unless the caller names the last revision that it got; then each
# `TopicAdded` and `TopicRemoved`, in the order of the changes, and `TopicsListed` again if the history of the metadata
# is lost. So nothing is missed, across reconnects and from one broker to the next. The same change may be reported
# twice, which is harmless: one between the revision and the list, a record that changes, and all after the reported
# revision, which both watches have reached.
#
# Partitions are not reported one by one: a partitioned topic is added and removed as one. After a removal the metadata
# is read again, because the topic may have been created again with partitions: that record is elsewhere. Guarding test:
# tests/broker/cluster/test_topic_watch.py.


QUEUED_CHANGES_MAX = 1000
"""Most changes that wait for a slow receiver; then the watch of the metadata waits too."""


class TopicsListed(NamedTuple):
    """Fact: the namespace has these topics (full names) when the watch starts, or after changes were missed.
    `revision`: the revision of the metadata from which a later watch may continue."""

    names: list[str]
    revision: int


class TopicAdded(NamedTuple):
    """Fact: the topic with this full name was created. May be reported more than once. `revision`: as in
    TopicsListed."""

    name: str
    revision: int


class TopicRemoved(NamedTuple):
    """Fact: the topic with this full name was deleted. May be reported more than once. `revision`: as in
    TopicsListed."""

    name: str
    revision: int


TopicListChange = TopicsListed | TopicAdded | TopicRemoved


class TopicWatcher:
    """Watches which persistent topics exist in a namespace. A partitioned topic counts as one topic."""

    def __init__(self, store: MetadataStore, catalog: Catalog) -> None:
        self._store = store
        self._catalog = catalog

    async def watch_topics_of_namespace(
        self, namespace: NamespaceName, after_revision: int = 0, *, tell_missing: bool = True
    ) -> AsyncIterator[TopicListChange]:
        """Yields the list of all topics of the namespace, and then each change of the list, until the caller closes the
        generator. If `after_revision` is given, yields only the changes after that revision of the metadata. Raises
        NamespaceNotFound if the namespace does not exist; with `tell_missing` False, it then counts as a namespace
        without topics. Raises the errors of the metadata; after an error the caller must start a new watch."""
        revision = after_revision
        if not revision:
            revision = await self._store.revision()
            yield TopicsListed(await self._topics(namespace, tell_missing), revision)
        prefixes = (
            paths.topics(namespace.tenant, namespace.namespace),
            paths.partitioned_topics(namespace.tenant, namespace.namespace),
        )
        seen = dict.fromkeys(prefixes, revision)
        waiting: asyncio.Queue[tuple[str, NodeChanged | WatchReset] | BaseException] = asyncio.Queue(QUEUED_CHANGES_MAX)
        tasks = [asyncio.create_task(self._follow(prefix, revision, waiting)) for prefix in prefixes]
        try:
            while True:
                found = await waiting.get()
                if isinstance(found, BaseException):
                    raise found
                prefix, event = found
                if isinstance(event, WatchReset):
                    now = await self._store.revision()
                    yield TopicsListed(await self._topics(namespace, tell_missing), min(seen.values()))
                    seen[prefix] = now
                    continue
                seen[prefix] = event.revision
                told = await self._translate(namespace, event, min(seen.values()))
                if told is not None:
                    yield told
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _topics(self, namespace: NamespaceName, tell_missing: bool) -> list[str]:
        try:
            return list(await self._catalog.list_topics(namespace, partitions=False))
        except NotFound:
            if tell_missing:
                raise
            return []

    async def _follow(
        self, prefix: str, revision: int, waiting: asyncio.Queue[tuple[str, NodeChanged | WatchReset] | BaseException]
    ) -> None:
        try:
            async for event in self._store.watch(prefix, revision):
                await waiting.put((prefix, event))
        except Exception as error:
            await waiting.put(error)

    async def _translate(
        self, namespace: NamespaceName, event: NodeChanged, revision: int
    ) -> TopicAdded | TopicRemoved | None:
        topic = TopicName.parse(f"persistent://{namespace}/{paths.decode_segment(event.path.rsplit('/', 1)[1])}")
        if topic.is_partition:
            return None
        if event.version < 0 and await self._catalog.count_partitions(topic) is None:
            return TopicRemoved(topic.full, revision)
        return TopicAdded(topic.full, revision)
