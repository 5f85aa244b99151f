"""Of client.py, for type checkers and editors; `python -m tests.stubs` writes it."""

from collections.abc import Mapping, Sequence

from ...proto import statistics as values
from ...proto.policies import Policies
from ...proto.schema import SchemaInfo
from ...proto.states import TxnId, TxnState
from ...runtime.network import World
from ..common.closing import ClosedAfterAsyncWith
from ..model.message_id import MessageId
from .grpc_transport import StoredMessage, Transport

class AdminClient(ClosedAfterAsyncWith):
    """Administration of a cluster, for asyncio: tenants, namespaces, policies, topics, subscriptions, brokers, bookies.

        async with magnetar.admin.AdminClient("magnetar://localhost:7650") as admin:
            await admin.create_topic("flights", partitions=4)
            print(await admin.topics(), await admin.subscriptions("flights-partition-0"))

    It connects by `service_url` as `Client` does, or by another `transport`. It belongs to one event loop; `Admin` has
    the same methods for programs without asyncio. Answers are the frozen dataclasses of proto/statistics.py.

    `timeout_s` bounds each operation with all its attempts. Errors are those of proto/errors.py as the server raised
    them: TenantNotFound, NamespaceNotFound, TopicNotFound, SubscriptionNotFound, AlreadyExists, Busy (in use),
    InvalidName and InvalidRequest (before anything is sent, where the client can tell), NotAllowed; Unavailable when
    no broker is reached; ConnectionLost and TimedOut leave open whether it happened.
    """

    def __init__(
        self,
        service_url: str = "",
        *,
        timeout_s: float = 30.0,
        world: World | None = None,
        transport: Transport | None = None,
        authentication: object = None,
        tls_trust_certs_file_path: str = "",
    ) -> None: ...

    async def close(self) -> None:
        """Closes the connections."""

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

    async def broker_summaries(self, *, here: bool = False) -> values.ClusterSummary:
        """Returns the sums of all brokers, and their largest topics. `here`: of the broker that is asked alone."""

    async def topic_page(
        self,
        *,
        prefix: str = "",
        contains: str = "",
        sort: str = "",
        after: str = "",
        limit: int = 0,
        here: bool = False,
    ) -> values.TopicPage:
        """Returns a page of the loaded topics of all brokers. `sort`: a field of its rows, or name."""

    async def why_stuck(self, topic: str, name: str) -> values.WhyStuck:
        """Returns why a subscription of one partition does not get on, and what would end that, as sentences."""

    async def why_kept(self, topic: str) -> values.WhyKept:
        """Returns what keeps each ledger of one partition: a subscription, retention, a transaction, compaction."""

    async def describe_broker(self, *, tasks: bool = False, metrics: bool = False) -> values.BrokerDescription:
        """Returns what the broker that is asked says of itself: clock, limit of open files, settings in force."""

    async def change_setting(self, *, name: str = "", value: str = "") -> None:
        """Changes a setting of all brokers while they run. InvalidRequest: it cannot change, or not to this value."""

    async def remove_setting(self, *, name: str = "") -> None:
        """Removes what `change_setting` changed: each broker has its own value again. InvalidRequest."""

    async def describe_cursor(self, topic: str, name: str, *, buckets: int = 0) -> values.CursorShape:
        """Returns what a subscription of one partition has acknowledged, in buckets, and its ten largest gaps."""

    async def describe_ledgers(self, topic: str, *, after: int = 0, limit: int = 0) -> list[values.LedgerCopies]:
        """Returns ledgers of one partition, the oldest first: their bookies, and where copies are missing or damaged.
        """

    async def describe_metadata(self, *, node: str = "", after: str = "", limit: int = 0) -> values.MetadataNode:
        """Returns a node of the metadata: its record without keys and tokens, and a page of what is below it."""

    async def describe_security(self) -> values.SecurityDescription:
        """Returns who is connected to the broker that is asked, until when, and whom it denied something."""

    async def brokers(self) -> list[values.BrokerInfo]:
        """Returns the registered brokers, each with its numbers of loaded topics and owned bundles; None if the broker
        did not answer within 5 s.
        """

    async def clear_namespace_backlog(self, name: str, subscription: str = "") -> int:
        """Acknowledges everything for `subscription`, or for every subscription. Returns the number of topics and
        partitions.
        """

    async def create_namespace(
        self,
        name: str,
        *,
        bundles: int = 0,
        auto_topic_creation: bool = True,
        default_partitions: int = 0,
    ) -> None:
        """Creates a namespace. The parameters are those of NamespaceInfo."""

    async def create_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Creates a tenant. `admin_roles` may administer it; with `allowed_clusters` it may have namespaces only in
        those clusters. Raises InvalidName.
        """

    async def delete_tenant(self, name: str) -> None:
        """Deletes a tenant. Raises Busy if it has namespaces."""

    async def drain_broker(self, name: str) -> None:
        """Lets a broker give what it owns to the other brokers of its group, and get nothing, until `undrain_broker`,
        also after a restart. It begins within some seconds; `brokers()` shows what is left. Raises NotFound.
        """

    async def find_orphans(self, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
        """Returns the orphaned ledgers. With `remove` they are fenced and deleted now, as brokers do every hour. With
        `unexplained` also those whose owner has no record, which no broker deletes by itself.
        """

    async def grant_namespace_permission(self, name: str, role: str, actions: Sequence[str]) -> None:
        """Grants `role` these actions ("produce", "consume", …) at the namespace; they replace its earlier ones. Raises
        InvalidRequest.
        """

    async def grant_subscription_permission(self, name: str, subscription: str, roles: Sequence[str]) -> None:
        """Restricts subscriptions of that name in the namespace to `roles`, which also need `consume`."""

    async def grant_topic_permission(self, topic: str, role: str, actions: Sequence[str]) -> None:
        """Grants `role` its actions like grant_namespace_permission, for one topic and its partitions."""

    async def namespace_permissions(self, name: str) -> values.Permissions:
        """Returns the permissions of roles in the namespace, and the roles of its restricted subscriptions.
        Permissions for single topics are not included.
        """

    async def namespace_policies(self, name: str, *, applied: bool = False) -> Policies:
        """Returns the policies that are set for the namespace; with `applied` every policy, with what is inherited from
        the broker.
        """

    async def namespace_properties(self, name: str) -> dict[str, str]:
        """Returns the properties of a namespace; none are inherited."""

    async def namespaces(self, tenant: str) -> list[str]:
        """Returns the namespaces of a tenant as tenant/namespace, sorted."""

    async def remove_namespace_policies(self, name: str, *fields: str) -> None:
        """Removes these fields from the policies of a namespace: they are inherited again."""

    async def remove_namespace_properties(self, name: str, *keys: str) -> None:
        """Removes properties of a namespace; without `keys` all of them. A missing key is ignored."""

    async def remove_topic_policies(self, topic: str, *fields: str) -> None:
        """Removes fields from the policies of a topic, like remove_namespace_policies."""

    async def remove_topic_properties(self, topic: str, *keys: str) -> None:
        """Removes properties of a topic, like remove_namespace_properties."""

    async def revoke_namespace_permission(self, name: str, role: str) -> None:
        """Revokes all permissions of `role` at the namespace. Its connected clients are disconnected within a second.

        """

    async def revoke_subscription_permission(self, name: str, subscription: str, role: str) -> None:
        """Removes `role` from the roles of a restricted subscription. Without any, every role with `consume` may use it
        again.
        """

    async def revoke_topic_permission(self, topic: str, role: str) -> None:
        """Revokes all permissions of `role` at the topic itself."""

    async def set_namespace_policies(self, name: str, policies: Policies) -> None:
        """Sets policies of a namespace: the fields that are not None get these values; the others stay."""

    async def set_namespace_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a namespace; its other properties stay. Raises InvalidRequest if they are too many or
        too long (proto/policies.py).
        """

    async def set_subscription_prefix_mode(self, name: str, on: bool) -> None:
        """Sets the prefix mode. If it is on, a subscription of the namespace must be named like its role, or begin with
        the role and `-`.
        """

    async def set_topic_policies(self, topic: str, policies: Policies) -> None:
        """Sets policies of a topic, like set_namespace_policies."""

    async def set_topic_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a topic, like set_namespace_properties."""

    async def topic_permissions(self, topic: str) -> values.Permissions:
        """Returns the permissions that were granted for this topic, with all its partitions. Those of its namespace
        are not included.
        """

    async def topic_policies(self, topic: str, *, applied: bool = False) -> Policies:
        """Returns the policies that are set for a topic; with `applied` every policy, with what the topic inherits
        from its namespace, then from the broker.
        """

    async def topic_properties(self, topic: str) -> dict[str, str]:
        """Returns the properties of a topic; a partition has those of its topic. None are inherited."""

    async def undrain_broker(self, name: str) -> None:
        """Lets a broker get bundles again. Nothing comes back by itself. Raises NotFound."""

    async def unload_namespace(self, name: str, bundle: str = "") -> values.Unloaded:
        """Unloads all bundles of a namespace, or the one named, from their brokers; the next lookups find new owners.

        """

    async def unsubscribe_namespace(self, name: str, subscription: str, *, force: bool = False) -> int:
        """Deletes `subscription` from every topic that has it. Returns the number of topics and partitions."""

    async def update_namespace(
        self,
        name: str,
        *,
        bundles: int | None = None,
        auto_topic_creation: bool | None = None,
        default_partitions: int | None = None,
        is_creation_set: bool | None = None,
    ) -> None:
        """Updates the settings of a namespace; a setting that is None stays as it is. The number of bundles is fixed
        at creation: raises InvalidRequest for another number.
        """

    async def update_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Replaces both settings of a tenant; a parameter that is left out becomes empty."""

    async def abort_transaction(self, txn: TxnId | str) -> TxnState:
        """Aborts an open or prepared transaction of any role. Returns the state of the transaction; one that has
        ended stays as it was.
        """

    async def advance_subscription(self, topic: str, name: str, index: int, *, incarnation: int = 0) -> None:
        """Acknowledges every message of the partition before `index`, durably. `incarnation`: from an answer of
        `offsets`.
        """

    async def all_halves(self, *, group: str = "", limit: int = 1000) -> list[values.CoordinatorHalves]:
        """Returns the half messages of every coordinator, ordered by its number; at most `limit` of each."""

    async def all_transactions(self, limit: int = 1000) -> list[values.CoordinatorTransactions]:
        """Returns the transactions of every coordinator, ordered by its number; at most `limit` of each."""

    async def backlog_size(self, topic: str, position: MessageId) -> int:
        """Returns the approximate number of bytes stored after the message."""

    async def commit_half(self, half: TxnId | str) -> None:
        """Publishes a half message, also a parked one, without asking its group. Raises NotFound; TransactionEnded if
        it was rolled back already; or the error with which publishing failed.
        """

    async def create_subscription(
        self,
        topic: str,
        name: str,
        position: MessageId | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a subscription; `position` (default: latest) is the first message that it delivers."""

    async def delete_schemas(self, topic: str, *, force: bool = False) -> int | None:
        """Deletes the schemas of a topic. Returns the newest version that was deleted; None: there were none. Their
        messages can still be decoded, unless `force` deletes the definitions, too.
        """

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic with all its partitions. Raises Busy if it has producers or subscriptions, unless `force`.
        A topic of the same name that another program creates in the meantime is not deleted.
        """

    async def detach_transaction(self, txn: TxnId | str, topic: str) -> None:
        """Removes a topic from the participants of a transaction, which then no longer waits until that topic stores
        its outcome. For a topic that cannot store the outcome any more. Raises NotFound.
        """

    async def expire_messages(self, topic: str, name: str, older_than: float | MessageId) -> int:
        """Acknowledges messages older than `older_than` seconds, or everything up to a message, for the subscription,
        or for all if `name` is empty. Returns the number of entries.
        """

    async def half(self, half: TxnId | str) -> values.HalfStats:
        """Returns a half message. Raises NotFound if it is decided, or never existed."""

    async def halves(self, coordinator: int, *, group: str = "", limit: int = 1000) -> values.CoordinatorHalves:
        """Returns the undecided half messages of one coordinator, the oldest first; `group`: only those of that group.
        Raises NotFound if there is no such coordinator.
        """

    async def last_message_id(self, topic: str) -> MessageId:
        """Returns the id of the last message; -1:-1 when there is none."""

    async def message_id_by_time(self, topic: str, publish_time_ms: int) -> MessageId:
        """Returns the id of the first message published at or after that time; if there is none, the position of the
        next one.
        """

    async def messages(self, topic: str, ledger_id: int, entry_id: int) -> list[StoredMessage]:
        """Returns the messages of an entry. Raises NotFound if there is no such entry."""

    async def namespace_stats(self, namespace: str) -> list[values.TopicStats]:
        """Returns the statistics of each partition and each topic without partitions, sorted by name; without
        `oldest_ms`. It sends one request to each broker, more if there are many topics, and one for each topic that no
        broker serves now.
        """

    async def nth_message(self, topic: str, number: int, *, from_latest: bool = False) -> StoredMessage:
        """Returns the n-th message, counted from 1, from the oldest stored message or from the newest. Raises NotFound
        if there are fewer.
        """

    async def offsets(
        self,
        topic: str,
        *,
        publish_times_ms: Sequence[int] = (),
        subscription: str = "",
        aborted_in: tuple[int, int] = (0, 0),
        incarnation: int = 0,
    ) -> values.TopicOffsets:
        """Returns the indexes and the size of one partition. `subscription` is created at the earliest message if it
        does not exist. `aborted_in`: a range of indexes (first, end) in which messages of aborted transactions are
        counted. `incarnation`: from an earlier answer; raises TopicNotFound if the topic was deleted and created again
        since, so that its indexes mean other messages.
        """

    async def owner(self, topic: str) -> str:
        """Returns HOST:PORT of the broker that serves the topic (a partition, or a topic without partitions)."""

    async def park_half(self, half: TxnId | str) -> None:
        """Parks a half message: its group is not asked about it any more, and an operator must decide. Raises NotFound,
        TransactionEnded.
        """

    async def partitions(self, topic: str) -> int:
        """Returns the number of partitions; 0: not partitioned, or itself a partition. Raises TopicNotFound; creates
        nothing.
        """

    async def parts(self, topic: str) -> list[str]:
        """Returns the full names of the partitions; for a topic without partitions, or a partition, its own name."""

    async def peek_messages(self, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
        """Returns the next messages of a subscription, at most `messages`, without moving the subscription."""

    async def put_schema(self, topic: str, schema: SchemaInfo) -> int:
        """Registers a schema; returns its version, or the version of an equal one. Raises IncompatibleSchema,
        InvalidSchema.
        """

    async def reset_subscription(self, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False) -> None:
        """Moves a subscription to a message id, or to a publish time in ms since the epoch. `exclusive`: delivery
        begins after the message.
        """

    async def revive_half(self, half: TxnId | str) -> None:
        """Revives a parked half message: its group is asked about it again at once, and its counted answers are reset.
        Raises NotFound, TransactionEnded.
        """

    async def rollback_half(self, half: TxnId | str) -> None:
        """Drops a half message, also a parked one. Raises NotFound; TransactionEnded if it was committed already."""

    async def schema(self, topic: str, version: int | None = None) -> values.TopicSchema:
        """Returns the newest schema of a topic; with `version` that version, even if it is deleted. Raises
        SchemaNotFound.
        """

    async def schema_version(self, topic: str, schema: SchemaInfo) -> int:
        """Returns the version of the topic's schema that equals `schema`. Raises SchemaNotFound."""

    async def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """Replaces all properties of a subscription."""

    async def skip_lost(self, topic: str, *, ledger_id: int | None = None, force: bool = False) -> values.SkippedLost:
        """Skips entries of one partition that every replica certainly lost, for all its readers: in all ledgers, or in
        `ledger_id`. Unloads the topic. Raises NotAllowed if a replica that does not answer may have them, unless
        `force`. What is skipped stays skipped, even if such a replica comes back.
        """

    async def skip_messages(self, topic: str, name: str, messages: int = -1) -> None:
        """Acknowledges the next `messages` messages without delivering them; -1: all. With an empty `name` for every
        subscription.
        """

    async def terminate_topic(self, topic: str) -> MessageId:
        """Terminates a topic: it can be read and not written. Returns the id of its last message."""

    async def test_schema(self, topic: str, schema: SchemaInfo) -> values.SchemaTest:
        """Returns whether the schema could be registered, and by which rule. Raises InvalidSchema."""

    async def topic_stats(self, topic: str, *, precise: bool = False) -> values.TopicStats:
        """Returns the statistics of one partition. With `precise` backlogs are counted by message, not by entry."""

    async def topics(self, namespace: str = "public/default", *, partitions: bool = False) -> list[str]:
        """Returns the full names of the topics, sorted; with `partitions` single partitions instead of partitioned
        topics.

        Non-persistent topics are included if they have partitions or are in use.
        """

    async def transaction(self, txn: TxnId | str) -> values.TransactionStats:
        """Returns a transaction. Raises NotFound if the coordinator never issued this id."""

    async def transaction_at(self, txn: TxnId | str, topic: str) -> values.TransactionHere:
        """Returns the part of a transaction at one partition, or at a topic without partitions, and what waits there
        for the transaction's end.
        """

    async def transactions(self, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
        """Returns the transactions of one coordinator that are not completed, the oldest first; at most `limit`.
        Raises NotFound if there is no such coordinator.
        """

    async def update_topic(self, topic: str, *, partitions: int) -> None:
        """Increases the number of partitions of a topic."""
