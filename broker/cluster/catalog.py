"""The catalog: tenants, namespaces and topics, as records in the metadata. Every broker may change them.

A topic exists when its TopicRecord does; a partitioned topic when its PartitionedRecord does. A name never has both
records. Each partition has a TopicRecord: the first of them (`MetadataStore.part_operations`) are created with the
PartitionedRecord, the others after it, or at their first use. A non-persistent topic has a record only if it is
partitioned. `public/default` exists from the first start. Methods raise TenantNotFound, NamespaceNotFound or
TopicNotFound if an object does not exist, Busy if it is in use, and the errors of the metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import msgspec

from ...ledger import client as deletions
from ...metadata import paths
from ...metadata.records import (
    CursorRecord,
    Feature,
    MetadataRecord,
    NamespaceRecord,
    PartitionedRecord,
    TenantRecord,
    TopicRecord,
    may_write_feature,
)
from ...metadata.store import (
    NODE_ABSENT,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    MetadataStore,
    PutNode,
    commit_in_parts,
    create_if_absent,
    get_record,
    make_put_operation,
    put_record,
    update_record,
)
from ...proto.errors import (
    AlreadyExists,
    BadVersion,
    Busy,
    InvalidRequest,
    NamespaceNotFound,
    NodeExists,
    NotAllowed,
    NotOwner,
    TenantNotFound,
    TopicNotFound,
    Unavailable,
)
from ...proto.names import NamespaceName, TopicName, check_tenant_name
from ...runtime.alarm import EventLoopSlices
from ...runtime.network import World
from ..common.refusals import check_incarnation
from ..common.retry import LastMetadataAnswers
from .bundles_core import BUNDLES_PER_NAMESPACE_MAX, list_bundle_parts

PARTITIONS_MAX = 10_000
"""Most partitions of one topic."""
CREATE_ATTEMPTS_MAX = 100
"""Tries to create a topic where the number of topics is limited, while other brokers create some: each time one of
them succeeds. Those of one broker wait for each other."""
CATALOG_ATTEMPTS_MAX = 10
"""Tries to change the number of partitions, while others change it too."""


def _topic_path(topic: TopicName) -> str:
    return paths.topic(topic.tenant, topic.namespace, topic.stored_local)


def _partitioned_path(topic: TopicName) -> str:
    return paths.partitioned_topic(topic.tenant, topic.namespace, topic.local, persistent=topic.persistent)


def _cursors_path(topic: TopicName) -> str:
    return paths.cursors(topic.tenant, topic.namespace, topic.stored_local)


def _policies_path(topic: TopicName) -> str:
    return paths.topic_policies(topic.tenant, topic.namespace, topic.local)


async def _schedule_deletions(store: MetadataStore, topic: TopicName) -> list[DeleteNode]:
    """Returns the operations that delete the schedules of a topic, and how far they have come."""
    where = topic.tenant, topic.namespace, topic.local
    names = await store.children(paths.schedule_progress_of_topic(*where)) if topic.persistent else []
    progress = [DeleteNode(f"{paths.schedule_progress_of_topic(*where)}/{each}") for each in names]
    return [DeleteNode(paths.schedules(*where)), *progress] if topic.persistent else []


class TopicLimits(NamedTuple):
    """How many topics a namespace, and all namespaces of its tenant, may have; 0: any number."""

    namespace: int = 0
    tenant: int = 0


async def _any_number(_: NamespaceName) -> TopicLimits:
    return TopicLimits()


class CatalogLimits(NamedTuple):
    """The maximum numbers of tenants, of namespaces in a tenant, and of topics; 0 means no limit. `topics`: an async
    function that returns the limits of a namespace and its tenant. A limit is checked when an object is created.
    Tenants and namespaces that are created at the same time may exceed their limits together; topics do not: what
    creates one also writes the record of the namespace (or tenant), which must be as it was before the topics were
    counted. So of two creations at the same time, by any brokers, the later one counts again. Brokers of an older
    release do not write that record, and a topic with more partitions than fit into a commit counts as they are made.
    """

    tenants: int = 0
    namespaces: int = 0  # of a tenant
    topics: Callable[[NamespaceName], Awaitable[TopicLimits]] = _any_number  # partitions included


NO_CATALOG_LIMITS = CatalogLimits()
NAMESPACE_CACHE_TTL_S = 1.0
"""Seconds for which a namespace record is cached. If the namespace is deleted and created again with other bundles, a
topic may have two owners for so long: they take it over from each other, and nothing worse happens. After a split a
broker may ask for an old bundle for so long: it has its owner, or is not taken (broker/cluster/ownership.py)."""


class Catalog:
    """Reads and changes the records of tenants, namespaces and topics. A method that reads or changes the metadata also
    raises the errors of the metadata."""

    def __init__(
        self, world: World, store: MetadataStore, *, bundles: int, auto_creation: bool,
        limits: CatalogLimits = NO_CATALOG_LIMITS, cluster: str = "",
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._limits = limits
        self._world = world
        self._store = store
        self._bundles = bundles
        self.auto_creation = auto_creation  # it changes while the broker runs
        self._known: dict[NamespaceName, tuple[NamespaceRecord, float]] = {}  # record, and until when it is cached
        self._last_namespaces: LastMetadataAnswers[NamespaceName, NamespaceRecord] = LastMetadataAnswers()
        self._last_partitions: LastMetadataAnswers[TopicName, int] = LastMetadataAnswers()
        self._creating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by tenant, of limited topics
        self._made_ms = 0  # incarnation of the topic that was created last

    async def create_default_namespace(self) -> None:
        """Creates the tenant `public` and its namespace `default` if they are missing. Leaves records that exist as
        they are. Raises the errors of the metadata."""
        await update_record(self._store, paths.tenant("public"), TenantRecord, lambda found: found or TenantRecord())
        await update_record(
            self._store, paths.namespace("public", "default"), NamespaceRecord,
            lambda found: found or NamespaceRecord(bundles=self._bundles),
        )  # fmt: skip

    # ------------------------------------------------------------------ tenants
    async def list_tenants(self) -> list[str]:
        """Returns the names of all tenants, in the order of their encoded names. Raises the errors of the metadata."""
        return [paths.decode_segment(name) for name in await self._store.children(paths.TENANTS)]

    async def get_tenant(self, name: str) -> TenantRecord:
        """Returns the record of the tenant. Raises TenantNotFound if there is none; InvalidName if the name is invalid.
        Raises the errors of the metadata, too."""
        found = await get_record(self._store, paths.tenant(check_tenant_name(name)), TenantRecord)
        if found is None:
            raise TenantNotFound(f"tenant {name!r} does not exist", tenant=name)
        return found[0]

    async def create_tenant(self, name: str, record: TenantRecord) -> None:
        """Creates a tenant. Raises AlreadyExists if it exists; NotAllowed if the cluster has its maximum of tenants;
        InvalidName if the name is invalid. Raises the errors of the metadata, too."""
        await self._check_room(self._limits.tenants, paths.TENANTS, 1, "the cluster", "tenants")
        await self._create(paths.tenant(check_tenant_name(name)), record, f"tenant {name!r}")

    async def update_tenant(self, name: str, record: TenantRecord) -> None:
        """Replaces the record of a tenant. Raises TenantNotFound if there is no such tenant; InvalidName if the name is
        invalid. Raises the errors of the metadata, too."""
        await self.get_tenant(name)
        await put_record(self._store, paths.tenant(name), record)

    async def delete_tenant(self, name: str) -> None:
        """Deletes a tenant with its policies. Raises TenantNotFound if there is no such tenant; Busy if it has
        namespaces; InvalidName if the name is invalid. Raises the errors of the metadata, too."""
        await self.get_tenant(name)
        namespaces = await self._store.children(paths.namespaces(name))
        if namespaces:
            raise Busy(f"tenant {name!r} has {len(namespaces)} namespaces; delete them first", tenant=name)
        await self._store.commit([DeleteNode(paths.tenant_policies(name)), DeleteNode(paths.tenant(name))])

    # ------------------------------------------------------------------ namespaces
    async def list_namespaces(self, tenant: str) -> list[str]:
        """Returns the tenant's namespaces, each as `tenant/namespace`. Raises TenantNotFound if there is no such
        tenant; InvalidName if its name is invalid. Raises the errors of the metadata, too."""
        await self.get_tenant(tenant)
        return [
            f"{tenant}/{paths.decode_segment(name)}" for name in await self._store.children(paths.namespaces(tenant))
        ]

    async def get_namespace(self, name: NamespaceName) -> NamespaceRecord:
        """Returns the record of the namespace. Raises TenantNotFound or NamespaceNotFound if there is none. Raises the
        errors of the metadata, too."""
        found = await get_record(self._store, paths.namespace(name.tenant, name.namespace), NamespaceRecord)
        if found is None:
            await self.get_tenant(name.tenant)
            raise NamespaceNotFound(f"namespace {name} does not exist", namespace=name)
        return found[0]

    async def get_cached_namespace(self, name: NamespaceName, *, reload: bool = False) -> NamespaceRecord:
        """Returns the record of a namespace, which was read at most NAMESPACE_CACHE_TTL_S seconds ago. Callers must use
        only its number of bundles, which may be the one before a split. While the metadata does not answer, returns the
        last known record (`LastMetadataAnswers`); if none is known, raises the errors of `get_namespace`. `reload`:
        reads the record now."""
        now = self._world.clock.monotonic()
        record, until = self._known.get(name, (None, now))
        if record is None or now >= until or reload:
            self._known.pop(name, None)
            record = await self._last_namespaces.read_or_get_last(name, lambda: self.get_namespace(name))
            self._known[name] = record, now + NAMESPACE_CACHE_TTL_S
        return record

    async def create_namespace(self, name: NamespaceName, record: NamespaceRecord) -> None:
        """Creates a namespace. Raises AlreadyExists if it exists; TenantNotFound if its tenant does not; NotAllowed if
        the tenant may not use this cluster, or has its maximum of namespaces; InvalidRequest if a number in `record` is
        out of bounds. Raises the errors of the metadata, too."""
        clusters = (await self.get_tenant(name.tenant)).allowed_clusters
        if clusters and self._cluster not in clusters:
            raise NotAllowed(
                f"tenant {name.tenant!r} may not use cluster {self._cluster!r}, only {', '.join(clusters)}",
                tenant=name.tenant,
            )
        _check(record)
        limit = self._limits.namespaces
        await self._check_room(limit, paths.namespaces(name.tenant), 1, f"tenant {name.tenant}", "namespaces")
        await self._create(paths.namespace(name.tenant, name.namespace), record, f"namespace {name}")

    async def update_namespace(self, name: NamespaceName, record: NamespaceRecord) -> None:
        """Replaces the record of a namespace, except its number of bundles, which only `split_bundles` changes: in
        `record` it is the same, or 0. Raises TenantNotFound or NamespaceNotFound if there is no such namespace;
        InvalidRequest if a number in `record` is out of bounds, or the number of bundles another one. Raises the errors
        of the metadata, too."""

        def replace(found: NamespaceRecord | None) -> NamespaceRecord:
            if found is None:
                raise NamespaceNotFound(f"namespace {name} does not exist", namespace=name)
            if record.bundles not in (0, found.bundles):
                raise InvalidRequest(
                    f"namespace {name} has {found.bundles} bundles, and an update does not make them {record.bundles}: "
                    "'magnetar namespaces split-bundles' doubles the number"
                )
            mine = msgspec.structs.replace(record, bundles=found.bundles, splits=found.splits)
            _check(mine)
            return mine

        await self.get_namespace(name)
        await update_record(self._store, paths.namespace(name.tenant, name.namespace), NamespaceRecord, replace)

    async def split_bundles(self, name: NamespaceName, bundles: int = 0) -> NamespaceRecord:
        """Doubles the number of a namespace's bundles, until there are `bundles`; 0: once. Returns its record. No
        bundle changes its owner. Does nothing if there are so many already. Raises TenantNotFound or NamespaceNotFound
        if there is no such namespace; InvalidRequest if the number cannot become `bundles` by doubling, or is above
        BUNDLES_PER_NAMESPACE_MAX; NotAllowed until the cluster's upgrade is finished; Busy if bundles of a deleted
        namespace of this name still have owners. Raises the errors of the metadata, too."""
        if not may_write_feature(Feature.SPLIT_BUNDLES):
            raise NotAllowed("not before the upgrade is finished: run 'magnetar cluster finish-upgrade', then restart")
        before = await self.get_namespace(name)
        wanted = bundles or 2 * before.bundles
        _check_split(name, before.bundles, wanted)
        folder = paths.bundle_owner(name.tenant, name.namespace, "").rstrip("/")
        for each in await self._store.children(folder):
            if not _is_bundle_of(each, before):
                raise Busy(f"bundle {each} of a deleted namespace {name} still has an owner: unload it first")

        def double(found: NamespaceRecord | None) -> NamespaceRecord:
            if found is None:
                raise NamespaceNotFound(f"namespace {name} does not exist", namespace=name)
            _check_split(name, found.bundles, wanted)
            more = (wanted // found.bundles).bit_length() - 1
            return msgspec.structs.replace(found, bundles=wanted, splits=found.splits + more)

        path = paths.namespace(name.tenant, name.namespace)
        await update_record(self._store, path, NamespaceRecord, double)
        return await self.get_cached_namespace(name, reload=True)

    async def delete_namespace(self, name: NamespaceName) -> None:
        """Deletes a namespace with its policies and access rights. Raises TenantNotFound or NamespaceNotFound if there
        is no such namespace; Busy if it has topics. Raises the errors of the metadata, too."""
        await self.get_namespace(name)
        topics = await self._store.children(paths.topics(name.tenant, name.namespace))
        partitioned = await self._partitioned(name, persistent=True) + await self._partitioned(name, persistent=False)
        if topics or partitioned:
            raise Busy(f"namespace {name} has topics; delete them first, or use force", namespace=name)
        policies = await self._store.children(paths.namespace_policies(name.tenant, name.namespace))
        await commit_in_parts(
            self._store,
            [
                *(
                    DeleteNode(paths.topic_policies(name.tenant, name.namespace, paths.decode_segment(each)))
                    for each in policies
                ),
                DeleteNode(paths.namespace_policies(name.tenant, name.namespace)),
                DeleteNode(paths.grants(name.tenant, name.namespace)),
                DeleteNode(paths.namespace(name.tenant, name.namespace)),
            ],
        )
        self._known.pop(name, None)

    # ------------------------------------------------------------------ topics
    async def list_topics(self, name: NamespaceName, *, partitions: bool) -> list[str]:
        """Returns the full names of the persistent topics of a namespace, sorted. A partitioned topic is listed once by
        its own name; if `partitions` is True, each of its partitions is listed instead. Raises TenantNotFound or
        NamespaceNotFound if the namespace does not exist. Raises the errors of the metadata, too."""
        await self.get_namespace(name)
        stored = [
            paths.decode_segment(each) for each in await self._store.children(paths.topics(name.tenant, name.namespace))
        ]
        found, turns = list[str](), EventLoopSlices(self._world.clock)
        for local in stored:
            full = f"persistent://{name}/{local}"
            if partitions or "-partition-" not in local or not TopicName.parse(full).is_partition:
                found.append(full)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        if not partitions:
            found += [topic.full for topic in await self._partitioned(name, persistent=True)]
        return sorted(found)

    async def list_non_persistent_topics(self, name: NamespaceName, *, partitions: bool) -> list[str]:
        """Returns the full names of the partitioned non-persistent topics of a namespace, sorted; if `partitions` is
        True, the names of their partitions instead. A non-persistent topic without partitions is not listed: it has no
        record, and only its owner knows it. Returns [] if the namespace does not exist. Raises the errors of the
        metadata."""
        found = await self._partitioned(name, persistent=False)
        if partitions:
            counts = [await self.count_partitions(topic) or 0 for topic in found]
            found = [topic.with_partition(i) for topic, n in zip(found, counts, strict=True) for i in range(n)]
        return sorted(topic.full for topic in found)

    async def _partitioned(self, name: NamespaceName, *, persistent: bool) -> list[TopicName]:
        folder = paths.partitioned_topics(name.tenant, name.namespace, persistent=persistent)
        stored = await self._store.children(folder)
        return [
            TopicName(name.tenant, name.namespace, paths.decode_segment(each), persistent=persistent) for each in stored
        ]

    async def count_partitions(self, topic: TopicName) -> int | None:
        """Returns the number of partitions of the topic; 0 if the topic is not partitioned; None if the topic does not
        exist. A non-persistent topic without a record counts as not partitioned. Raises the errors of the metadata."""
        if topic.persistent and await self._is_there(topic):
            return 0  # it is one or the other
        found = await get_record(self._store, _partitioned_path(topic), PartitionedRecord)
        if found is not None:
            return found[0].partitions
        return None if topic.persistent else 0

    async def _is_there(self, topic: TopicName) -> bool:
        """Whether a persistent topic exists that is not partitioned."""
        return await self._store.get(_topic_path(topic.base)) is not None

    async def count_existing_partitions(self, topic: TopicName) -> int:
        """Returns the number of partitions of the topic (0: the topic is not partitioned), as `count_partitions` does.
        Raises TopicNotFound if the topic does not exist. Raises the errors of the metadata, too."""
        found = await self.count_partitions(topic)
        if found is None:
            raise TopicNotFound(f"topic {topic} does not exist", topic=topic)
        return found

    async def read_created_ms(self, topic: TopicName) -> int:
        """Returns when the topic or partition was created (ms since the epoch), which distinguishes it from deleted
        topics of its name. Raises TopicNotFound if it does not exist. Raises the errors of the metadata, too."""
        found = await get_record(self._store, _topic_path(topic), TopicRecord)
        if found is None:
            raise TopicNotFound(f"topic {topic} does not exist", topic=topic)
        return found[0].created_ms

    async def count_or_create_partitions(self, topic: TopicName, *, by_use: bool = False) -> int:
        """Returns the number of partitions like `count_partitions`. Creates a missing topic with the namespace's
        default number of partitions, if automatic creation is allowed. With `by_use`, a topic that would have no
        partitions is not created now but at its first use (`ensure_topic_exists`), because Pulsar's clients send this
        query before they use a topic. While the metadata does not answer, returns the last known number
        (broker/common/retry.py). Raises TopicNotFound if the topic is missing and not created; TenantNotFound or
        NamespaceNotFound if its namespace is missing; NotAllowed if the namespace has its maximum of topics;
        InvalidName if the names of its partitions would be too long; and the errors of the metadata."""
        return await self._last_partitions.read_or_get_last(
            topic, lambda: self._partitions_or_create(topic, by_use=by_use)
        )

    async def _partitions_or_create(self, topic: TopicName, *, by_use: bool) -> int:
        found = await self.count_partitions(topic)
        if found is not None and topic.persistent:
            return found
        policies = await self.get_namespace(topic.namespace_name)
        if found is not None:
            return found
        self._check_auto_creation(topic, policies)
        if by_use and not policies.default_partitions:
            return 0
        with contextlib.suppress(AlreadyExists):  # another broker was faster, with any number
            await self._create_topic(topic.base, policies.default_partitions)
            return policies.default_partitions
        found = await self.count_partitions(topic)
        return found if found is not None else policies.default_partitions

    async def ensure_topic_exists(self, topic: TopicName) -> None:
        """Checks that a topic or a partition may be used. Creates the missing record of the topic if automatic creation
        is allowed; a non-persistent topic needs no record. Raises TopicNotFound if the topic does not exist and is not
        created, or if it has no partition of this number; raises NotAllowed if the topic is partitioned, or the
        namespace has its maximum of topics; TenantNotFound or NamespaceNotFound if its namespace does not exist. Raises
        the errors of the metadata, too."""
        if topic.persistent and await self._store.get(_topic_path(topic)) is not None:
            return
        policies = await self.get_namespace(topic.namespace_name)
        partitions = await self.count_partitions(topic)
        if topic.is_partition:
            if partitions is None or topic.partition >= partitions:
                raise TopicNotFound(f"topic {topic.base} has no partition {topic.partition}", topic=topic)
        elif partitions:
            raise NotAllowed(
                f"topic {topic} has {partitions} partitions; use them ({topic.with_partition(0)} and so on)",
                topic=topic,
            )
        elif topic.persistent:
            self._check_auto_creation(topic, policies)
            await self._create_counted(topic, 1, self._create_missing)
            return
        if topic.persistent:
            await self._create_missing(topic, [])

    async def _create_missing(self, topic: TopicName, guards: Sequence[PutNode]) -> None:
        """Creates the record of a topic without partitions, or of one partition, in one commit with `guards`; does
        nothing if it exists. Raises BadVersion if a guard has changed, and the errors of the metadata."""
        if not guards:
            await update_record(self._store, _topic_path(topic), TopicRecord, lambda found: found or self._new())
            return
        try:
            await self._store.commit([make_put_operation(_topic_path(topic), self._new(), NODE_ABSENT), *guards])
        except BadVersion:
            if await self._store.get(_topic_path(topic)) is None:
                raise

    def _check_auto_creation(self, topic: TopicName, policies: NamespaceRecord) -> None:
        if topic.is_partition or not (self.auto_creation and policies.auto_topic_creation):
            raise TopicNotFound(f"topic {topic} does not exist, and is not made automatically", topic=topic)

    async def create_topic(self, topic: TopicName, partitions: int) -> None:
        """Creates a topic; if `partitions` is 0, a topic without partitions. Creates nothing for a non-persistent topic
        without partitions. Raises TenantNotFound or NamespaceNotFound if the namespace does not exist; AlreadyExists if
        the topic exists; NotAllowed if the namespace has its maximum of topics; InvalidRequest if `partitions` is above
        PARTITIONS_MAX, or `topic` is the name of a partition; InvalidName if the names of its partitions would be too
        long; and the errors of the metadata."""
        await self.get_namespace(topic.namespace_name)
        await self._create_topic(topic, partitions)

    async def _create_topic(self, topic: TopicName, partitions: int) -> None:
        """Creates a topic like `create_topic`. The namespace must exist."""
        if topic.is_partition:
            raise InvalidRequest(f"{topic} names a partition; create {topic.base} with partitions", topic=topic)
        if partitions > PARTITIONS_MAX:
            raise InvalidRequest(f"{partitions} partitions are more than {PARTITIONS_MAX}", limit=PARTITIONS_MAX)
        topic.check_room_for_partitions(partitions)
        try:
            await self._create_counted(
                topic, max(1, partitions), lambda topic, guards: self._create_new(topic, partitions, guards)
            )
        except NotAllowed:
            if await self.count_partitions(topic) is None:
                raise
            raise AlreadyExists(f"topic {topic} exists already", topic=topic) from None

    async def _create_new(self, topic: TopicName, partitions: int, guards: Sequence[PutNode]) -> None:
        """Creates a topic, in one commit with `guards`. Raises AlreadyExists if it exists; BadVersion if a guard has
        changed, and the errors of the metadata."""
        operations: list[CommitOperation]
        later: Sequence[PutNode] = ()  # written afterwards, or by the first use of the partition
        if not topic.persistent:
            if not partitions:  # it exists while it is used
                if await self.count_partitions(topic):
                    raise AlreadyExists(f"topic {topic} exists already, with partitions", topic=topic)
                return
            operations = [make_put_operation(_partitioned_path(topic), self._new_partitioned(partitions), NODE_ABSENT)]
        elif partitions:
            first = self._store.part_operations - 2 - len(guards)  # beside the two others
            operations = [
                CheckNodeVersion(_topic_path(topic), NODE_ABSENT),
                make_put_operation(_partitioned_path(topic), self._new_partitioned(partitions), NODE_ABSENT),
                *self._partition_records(topic, range(min(partitions, first))),
            ]
            later = self._partition_records(topic, range(first, partitions))
        else:
            operations = [
                CheckNodeVersion(_partitioned_path(topic), NODE_ABSENT),
                make_put_operation(_topic_path(topic), self._new(), NODE_ABSENT),
            ]
        try:
            await self._store.commit([*operations, *guards])
        except BadVersion as error:
            if guards and await self.count_partitions(topic) is None:
                raise
            raise AlreadyExists(f"topic {topic} exists already", topic=topic) from error
        await create_if_absent(self._store, later)

    async def add_partitions(self, topic: TopicName, partitions: int) -> None:
        """Adds partitions to a topic, so that it has `partitions` in all. Raises TopicNotFound if there is no such
        topic; InvalidRequest if it was made without partitions, has more than `partitions` already, or `partitions` is
        above PARTITIONS_MAX; InvalidName if the names of new partitions would be too long; NotAllowed if the namespace
        may not have that many topics; Unavailable if the number changes all the time; and the errors of the metadata.
        If it has changed meanwhile, decides again by the new number.

        First the new partitions get the subscriptions of the first partition, each at the beginning of the partition;
        then the number of partitions is changed. So no message is published to a partition that lacks a subscription; a
        subscription without a consumer at the moment would miss that message. After a crash before the change of the
        number, the next attempt uses the records that exist already. After a crash after that change, missing records
        of partitions are created at their first use.
        """
        for _ in range(CATALOG_ATTEMPTS_MAX):
            with contextlib.suppress(BadVersion):
                return await self._add_partitions(topic, partitions)
        raise Unavailable(f"the number of partitions of {topic} changes all the time; try again")

    async def _add_partitions(self, topic: TopicName, partitions: int) -> None:
        """Adds partitions like `add_partitions`. Raises BadVersion if their number changes meanwhile."""
        found = await get_record(self._store, _partitioned_path(topic), PartitionedRecord)
        if found is None:
            if await self._store.get(_topic_path(topic)) is not None:
                raise InvalidRequest(
                    f"topic {topic} was made without partitions, and stays so: make another one with partitions"
                )
            raise TopicNotFound(f"there is no partitioned topic {topic}", topic=topic)
        record, version = found
        if not record.partitions <= partitions <= PARTITIONS_MAX:
            raise InvalidRequest(
                f"topic {topic} has {record.partitions} partitions, so {partitions} is not possible: "
                f"the number only grows, up to {PARTITIONS_MAX}",
                topic=topic,
            )
        if partitions > record.partitions:
            topic.check_room_for_partitions(partitions)
        guards = await self._check_topics(topic, partitions - record.partitions)
        added = range(record.partitions, partitions)
        subscriptions = await self._subscription_records(topic, added) if topic.persistent else []
        topics = self._partition_records(topic, added) if topic.persistent else ()
        grown = make_put_operation(
            _partitioned_path(topic), msgspec.structs.replace(record, partitions=partitions), version
        )
        if len(subscriptions) + len(topics) + len(guards) < self._store.part_operations:
            with contextlib.suppress(NodeExists):  # left by an attempt that did not end
                await self._store.commit([*subscriptions, grown, *topics, *guards])
                return
        await create_if_absent(self._store, subscriptions)
        await self._store.commit([grown, *guards])
        await create_if_absent(self._store, topics)

    async def _subscription_records(self, topic: TopicName, numbers: range) -> list[PutNode]:
        """Returns the operations that create the subscriptions of partition 0 at these partitions, with nothing
        acknowledged."""
        first, made = topic.with_partition(0), list[PutNode]()
        for each in await self._store.children(_cursors_path(first)):
            name = paths.decode_segment(each)
            path = paths.cursor(topic.tenant, topic.namespace, first.stored_local, name)
            found = await get_record(self._store, path, CursorRecord)
            if found is None:
                continue  # just deleted
            record = CursorRecord(properties=found[0].properties, created_ms=self._world.clock.wall_ms())
            for number in numbers:
                local = topic.with_partition(number).stored_local
                made.append(
                    make_put_operation(paths.cursor(topic.tenant, topic.namespace, local, name), record, NODE_ABSENT)
                )
        return made

    def _partition_records(self, topic: TopicName, numbers: range) -> Sequence[PutNode]:
        record = self._new()
        return [
            make_put_operation(_topic_path(topic.with_partition(number)), record, NODE_ABSENT) for number in numbers
        ]

    async def check_incarnation(self, topic: TopicName, incarnation: int) -> None:
        """Raises TopicNotFound if the topic or partition with this `incarnation` does not exist any more, and the
        errors of the metadata. With `incarnation` 0, accepts any topic of this name. Does nothing for a non-persistent
        topic, because its schemas outlive the topic."""
        if not incarnation or not topic.persistent:
            return
        found = await get_record(self._store, _topic_path(topic), TopicRecord)
        if found is None:
            raise TopicNotFound(f"the topic {topic} that is meant was deleted since", topic=topic)
        check_incarnation(topic, found[0].created_ms, incarnation)

    async def make_topic_unchanged_check(self, topic: TopicName, ended: TopicRecord) -> CheckNodeVersion | None:
        """Returns a CheckNodeVersion for the commit that deletes the topic: it holds if the topic's record has not
        changed until then. `ended`: the record with which this broker ended the topic. Returns None if the topic was
        deleted already (another topic may have its name now). Raises NotOwner if another broker has taken the topic
        over. Raises the errors of the metadata, too."""
        found = await get_record(self._store, _topic_path(topic), TopicRecord)
        if found is None or found[0].created_ms != ended.created_ms:
            return None
        record, version = found
        if record.claim != ended.claim:
            raise NotOwner(f"topic {topic} was taken over by another broker while it was deleted", topic=topic)
        return CheckNodeVersion(_topic_path(topic), version)

    async def delete_topic_record(
        self, topic: TopicName, ledgers: Sequence[int], still: CheckNodeVersion, also: Sequence[CommitOperation] = ()
    ) -> None:
        """Deletes the record of a persistent topic and, unless it is a partition, its policies and its schedules, in
        one commit with the operations `also`. The same commit stores that the ledgers `ledgers` must be deleted, so
        that this is done even after a crash. Raises BadVersion and changes nothing if the check `still`
        (`make_topic_unchanged_check`) fails: the topic was taken over or created again. Raises the errors of the
        metadata, too."""
        self._last_partitions.discard(topic.base)
        operations: list[CommitOperation] = [DeleteNode(still.path, still.expected), *also]
        if not topic.is_partition:
            operations += [DeleteNode(_policies_path(topic)), *await _schedule_deletions(self._store, topic)]
        await deletions.commit_ledger_deletions(self._store, ledgers, operations)

    async def get_partitioned_record(self, topic: TopicName) -> PartitionedRecord | None:
        """Returns the record of a partitioned topic; None if no partitioned topic has this name. To delete the topic,
        pass the record to `make_partition_count_check`. Raises the errors of the metadata."""
        found = await get_record(self._store, _partitioned_path(topic), PartitionedRecord)
        return None if found is None else found[0]

    async def make_partition_count_check(self, topic: TopicName, ended: PartitionedRecord) -> CheckNodeVersion | None:
        """Returns a CheckNodeVersion for the commit that deletes the record of a partitioned topic, after its
        partitions were deleted: it holds while the record does not change. `ended`: the record when the deletion began.
        Returns None if the topic was deleted already. Raises Busy if partitions were added meanwhile. Raises the errors
        of the metadata, too."""
        found = await get_record(self._store, _partitioned_path(topic), PartitionedRecord)
        if found is None or found[0].created_ms != ended.created_ms:
            return None
        if found[0].partitions != ended.partitions:
            raise Busy(f"topic {topic} was given more partitions while it was deleted; delete it again", topic=topic)
        return CheckNodeVersion(_partitioned_path(topic), found[1])

    async def delete_partitioned_record(
        self, topic: TopicName, still: CheckNodeVersion, also: Sequence[CommitOperation] = ()
    ) -> None:
        """Deletes the record of a partitioned topic and, if the topic is persistent, its policies and its schedules, in
        one commit with the operations `also`. Raises BadVersion and changes nothing if the check `still`
        (`make_partition_count_check`) fails: partitions were added, or the topic was deleted or created again. Raises
        the errors of the metadata, too."""
        self._last_partitions.discard(topic)
        await self._store.commit([
            DeleteNode(still.path, still.expected),
            *also,
            *([DeleteNode(_policies_path(topic))] if topic.persistent else []),
            *await _schedule_deletions(self._store, topic),
        ])  # fmt: skip

    def _new(self) -> TopicRecord:
        return TopicRecord(created_ms=self._incarnation())

    def _new_partitioned(self, partitions: int) -> PartitionedRecord:
        return PartitionedRecord(partitions=partitions, created_ms=self._incarnation())

    def _incarnation(self) -> int:
        """Returns a new incarnation number, which distinguishes a topic from an earlier one of the same name: the time
        in ms, but larger than any that this broker returned before, whatever the clock does."""
        self._made_ms = max(self._world.clock.wall_ms(), self._made_ms + 1)
        return self._made_ms

    async def _create_counted(
        self, topic: TopicName, more: int, create: Callable[[TopicName, Sequence[PutNode]], Awaitable[None]]
    ) -> None:
        """Awaits `create(topic, guards)`, which creates a topic (with partitions: `more` of them) in one commit with
        the guards; again, after counting again, if that raises BadVersion because another broker has created some.
        Raises NotAllowed if the namespace or tenant may not have that many more; Unavailable if others create topics
        all the time; the errors of `create`, and those of the metadata."""
        if not any(await self._get_topic_limits(topic)):
            await create(topic, ())
            return
        async with self._creating.setdefault(topic.tenant, asyncio.Lock()):
            for _ in range(CREATE_ATTEMPTS_MAX):
                with contextlib.suppress(BadVersion):
                    await create(topic, await self._check_topics(topic, more))
                    return
        raise Unavailable(f"other brokers create topics of {topic.namespace_name} all the time; try again")

    async def _get_topic_limits(self, topic: TopicName) -> TopicLimits:
        return await self._limits.topics(topic.namespace_name) if topic.persistent else TopicLimits()

    async def _check_topics(self, topic: TopicName, more: int) -> list[PutNode]:
        """Raises NotAllowed if the namespace, or its tenant, may not have that many more topics. Returns operations
        that belong into the commit that creates them: it fails with BadVersion if another one was made meanwhile."""
        name, limits, guards = topic.namespace_name, await self._get_topic_limits(topic), list[PutNode]()
        if limits.namespace:
            guards.append(await self._read_guard(paths.namespace(name.tenant, name.namespace), f"namespace {name}"))
            there = await self._count_topics(name)
            _check_number(limits.namespace, there, more, f"namespace {name}", "topics")
        if limits.tenant:
            guards.append(await self._read_guard(paths.tenant(name.tenant), f"tenant {name.tenant}"))
            there = 0
            for each in await self._store.children(paths.namespaces(name.tenant)):
                there += await self._count_topics(NamespaceName(name.tenant, paths.decode_segment(each)))
            _check_number(limits.tenant, there, more, f"tenant {name.tenant}", "topics")
        return guards

    async def _count_topics(self, name: NamespaceName) -> int:
        return len(await self._store.children(paths.topics(name.tenant, name.namespace)))

    async def _read_guard(self, path: str, what: str) -> PutNode:
        """Returns the operation that writes a record as it is, and changes its version alone."""
        found = await self._store.get(path)
        if found is None:
            raise NamespaceNotFound(f"{what} does not exist")
        return PutNode(path, found.value, found.version)

    async def _check_room(self, limit: int, folder: str, more: int, where: str, what: str) -> None:
        there = len(await self._store.children(folder)) if limit else 0
        _check_number(limit, there, more, where, what)

    async def _create(self, path: str, record: MetadataRecord, what: str) -> None:
        try:
            await put_record(self._store, path, record, NODE_ABSENT)
        except NodeExists as error:
            raise AlreadyExists(f"{what} exists already") from error


def _check_number(limit: int, there: int, more: int, where: str, what: str) -> None:
    """Raises NotAllowed if there would be more than `limit` (0: any number is allowed)."""
    if limit and there + more > limit:
        raise NotAllowed(f"{where} has {there} {what}, and {more} more are above the {limit} that it may have")


def _check_split(name: NamespaceName, bundles: int, wanted: int) -> None:
    times, rest = divmod(wanted, bundles)
    if rest or times.bit_count() != 1:
        raise InvalidRequest(f"namespace {name} has {bundles} bundles, which are doubled: they cannot become {wanted}")
    if wanted > BUNDLES_PER_NAMESPACE_MAX:
        raise InvalidRequest(f"namespace {name} has {bundles} bundles, and may have {BUNDLES_PER_NAMESPACE_MAX}")


def _is_bundle_of(bundle: str, record: NamespaceRecord) -> bool:
    """Returns whether a namespace with this record has the bundle, or had it before it was split."""
    try:
        parts = list_bundle_parts(bundle, record.bundles)
    except ValueError:
        return True  # of another program
    return 0 < len(parts) <= 1 << record.splits


def _check(record: NamespaceRecord) -> None:
    if not 1 <= record.bundles <= BUNDLES_PER_NAMESPACE_MAX:
        raise InvalidRequest(f"{record.bundles} bundles are not within 1 to {BUNDLES_PER_NAMESPACE_MAX}")
    if record.default_partitions > PARTITIONS_MAX:
        raise InvalidRequest(f"{record.default_partitions} partitions are more than {PARTITIONS_MAX}")
