"""Of rows.py, for type checkers and editors; `python -m tests.stubs` writes it."""

from typing import Any

from ...proto import statistics as values
from ...proto.operation import Operation

class RowMethods:
    """AdminClient derives from it."""

    async def _call(self, operation: Operation[Any], **arguments: object) -> Any: ...

    async def tenants(self) -> list[str]:
        """Returns the names of the tenants, sorted."""

    async def tenant(self, name: str) -> values.TenantInfo:
        """Returns the settings of a tenant. Raises TenantNotFound."""

    async def namespace(self, name: str) -> values.NamespaceInfo:
        """Returns the settings of a namespace. Raises NamespaceNotFound."""

    async def delete_namespace(self, name: str, *, force: bool = False) -> None:
        """Deletes a namespace. Busy: it has topics, which `force` deletes too."""

    async def create_topic(self, topic: str, *, partitions: int = 0) -> None:
        """Creates a topic. `partitions` 0: not partitioned. AlreadyExists."""

    async def topic_internal_stats(self, topic: str) -> values.TopicInternalStats:
        """The log of one partition: its ledgers, positions and replication."""

    async def unload_topic(self, topic: str) -> None:
        """Unloads a topic: its owner closes it, and the next use opens it again."""

    async def trim_topic(self, topic: str) -> None:
        """Deletes the ledgers that no subscription and no retention needs, now."""

    async def truncate_topic(self, topic: str) -> None:
        """Acknowledges everything for every subscription, and deletes all ledgers but the one that is written."""

    async def compact(self, topic: str) -> None:
        """Starts a compaction. Busy: one is running."""

    async def compaction_status(self, topic: str) -> values.CompactionStatus:
        """Returns the last compaction of one partition, and the compacted ledger that is read now."""

    async def subscriptions(self, topic: str) -> list[str]:
        """Returns the names of the durable subscriptions, sorted."""

    async def delete_subscription(self, topic: str, name: str, *, force: bool = False) -> None:
        """Deletes a subscription. Busy: it has consumers, which `force` overrides."""

    async def subscription_properties(self, topic: str, name: str) -> dict[str, str]:
        """The properties, name to value."""

    async def analyze_backlog(self, topic: str, name: str) -> values.BacklogAnalysis:
        """Counts the backlog of one partition message by message."""

    async def schemas(self, topic: str) -> list[values.TopicSchema]:
        """The versions that are not deleted, in their order. SchemaNotFound: there is none."""

    async def bookies(self) -> list[values.BookieInfo]:
        """Returns the registered bookies."""
