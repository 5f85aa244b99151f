"""Defects of who is late: a deletion, or an owner, that goes on after another one has what it had."""

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from magnetar.broker.access.authorizer import AccessGrants
from magnetar.broker.cluster import catalog
from magnetar.broker.cluster.catalog import Catalog
from magnetar.broker.cluster.schema_registry import SchemaRegistry
from magnetar.broker.log.managed_ledger import topic_path
from magnetar.broker.subscription import cursors
from magnetar.broker.subscription.cursors import DurableCursor
from magnetar.metadata.records import CursorRecord, PartitionedRecord, TopicRecord
from magnetar.metadata.store import CheckNodeVersion, NodeUpdate, get_record
from magnetar.proto.names import TopicName
from tests.mutants.ledgers import Stack, put


def topic_of_any_life(stack: Stack) -> None:
    """M64: a deletion takes the record that has the topic's name now, with all that is its."""

    async def still(self: Catalog, topic: TopicName, ended: TopicRecord) -> CheckNodeVersion | None:
        found = await get_record(self._store, topic_path(topic), TopicRecord)
        return None if found is None else CheckNodeVersion(topic_path(topic), found[1])

    put(stack, Catalog, "make_topic_unchanged_check", still)


def subscription_of_any_owner(stack: Stack) -> None:
    """M64b: a subscription's record is deleted whichever owner has it now, and of whichever life it is."""
    honest = DurableCursor.delete

    async def delete(self: DurableCursor) -> None:
        found = await get_record(self._metadata, self._path, CursorRecord)
        if found is not None:
            self._claim = found[0].claim
        await honest(self)

    put(stack, DurableCursor, "delete", delete)


def partitioned_of_any_life(stack: Stack) -> None:
    """M64c: a deletion takes the record of partitions that has the topic's name now."""
    honest = Catalog.make_partition_count_check

    async def still(self: Catalog, topic: TopicName, ended: PartitionedRecord) -> CheckNodeVersion | None:
        found = await get_record(self._store, catalog._partitioned_path(topic), PartitionedRecord)
        return await honest(self, topic, replace(ended, created_ms=found[0].created_ms) if found is not None else ended)

    put(stack, Catalog, "make_partition_count_check", still)


def schemas_and_grants_by_name(stack: Stack) -> None:
    """M64d: what goes with a topic goes by its name, also when that topic was taken over or is another one."""
    forget_grants = AccessGrants.delete_topic_grants

    async def grants(self: AccessGrants, topic: TopicName, *still: CheckNodeVersion) -> None:
        await forget_grants(self, topic)

    async def schemas(self: SchemaRegistry, topic: TopicName, commit: Callable[..., Awaitable[None]]) -> None:
        await self._delete_versions(topic)
        await commit(())

    put(stack, AccessGrants, "delete_topic_grants", grants)
    put(stack, SchemaRegistry, "delete_schemas_with_topic", schemas)


def cursor_claimed_by_any_owner(stack: Stack) -> None:
    """M64e: an owner that stood still since it claimed its topic claims a cursor from the next one."""

    def still_claimed(topic: TopicName, claim: str) -> NodeUpdate:
        return NodeUpdate(topic_path(topic), lambda node: None)

    put(stack, cursors, "make_claim_check", still_claimed)
