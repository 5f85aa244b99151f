"""Of blocking.py, for type checkers and editors; `python -m tests.stubs` writes it."""

from collections.abc import Mapping, Sequence

from ...proto import statistics as values
from ...proto.policies import Policies
from ...proto.schema import SchemaInfo
from ...proto.states import TxnId, TxnState
from ..common.closing import ClosedAfterWith
from ..model.message_id import MessageId
from .grpc_transport import StoredMessage

class Admin(ClosedAfterWith):
    """Administration of a cluster, blocking: parameters, answers and errors of each method are AdminClient's.

        with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
            admin.create_topic("flights", partitions=4)

    It runs in the client's loop thread of this process; any thread may call it. Close it, or use a `with` statement.
    """

    def __init__(
        self,
        service_url: str,
        *,
        timeout_s: float = 30.0,
        authentication: object = None,
        tls_trust_certs_file_path: str = "",
    ) -> None: ...

    def close(self) -> None:
        """Closes the connections."""

    def abort_transaction(self, txn: TxnId | str) -> TxnState:
        """Aborts an open or prepared transaction of any role. Returns the state of the transaction; one that has
        ended stays as it was.
        """

    def advance_subscription(self, topic: str, name: str, index: int, *, incarnation: int = 0) -> None:
        """Acknowledges every message of the partition before `index`, durably. `incarnation`: from an answer of
        `offsets`.
        """

    def all_halves(self, *, group: str = "", limit: int = 1000) -> list[values.CoordinatorHalves]:
        """Returns the half messages of every coordinator, ordered by its number; at most `limit` of each."""

    def all_transactions(self, limit: int = 1000) -> list[values.CoordinatorTransactions]:
        """Returns the transactions of every coordinator, ordered by its number; at most `limit` of each."""

    def analyze_backlog(self, topic: str, name: str) -> values.BacklogAnalysis:
        """Counts the backlog of one partition message by message."""

    def backlog_size(self, topic: str, position: MessageId) -> int:
        """Returns the approximate number of bytes stored after the message."""

    def bookies(self) -> list[values.BookieInfo]:
        """Returns the registered bookies."""

    def broker_summaries(self, *, here: bool = False) -> values.ClusterSummary:
        """Returns the sums of all brokers, and their largest topics. `here`: of the broker that is asked alone."""

    def brokers(self) -> list[values.BrokerInfo]:
        """Returns the registered brokers, each with its numbers of loaded topics and owned bundles; None if the broker
        did not answer within 5 s.
        """

    def change_setting(self, *, name: str = "", value: str = "") -> None:
        """Changes a setting of all brokers while they run. InvalidRequest: it cannot change, or not to this value."""

    def clear_namespace_backlog(self, name: str, subscription: str = "") -> int:
        """Acknowledges everything for `subscription`, or for every subscription. Returns the number of topics and
        partitions.
        """

    def commit_half(self, half: TxnId | str) -> None:
        """Publishes a half message, also a parked one, without asking its group. Raises NotFound; TransactionEnded if
        it was rolled back already; or the error with which publishing failed.
        """

    def compact(self, topic: str) -> None:
        """Starts a compaction. Busy: one is running."""

    def compaction_status(self, topic: str) -> values.CompactionStatus:
        """Returns the last compaction of one partition, and the compacted ledger that is read now."""

    def create_namespace(
        self,
        name: str,
        *,
        bundles: int = 0,
        auto_topic_creation: bool = True,
        default_partitions: int = 0,
    ) -> None:
        """Creates a namespace. The parameters are those of NamespaceInfo."""

    def create_subscription(
        self,
        topic: str,
        name: str,
        position: MessageId | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a subscription; `position` (default: latest) is the first message that it delivers."""

    def create_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Creates a tenant. `admin_roles` may administer it; with `allowed_clusters` it may have namespaces only in
        those clusters. Raises InvalidName.
        """

    def create_topic(self, topic: str, *, partitions: int = 0) -> None:
        """Creates a topic. `partitions` 0: not partitioned. AlreadyExists."""

    def delete_namespace(self, name: str, *, force: bool = False) -> None:
        """Deletes a namespace. Busy: it has topics, which `force` deletes too."""

    def delete_schemas(self, topic: str, *, force: bool = False) -> int | None:
        """Deletes the schemas of a topic. Returns the newest version that was deleted; None: there were none. Their
        messages can still be decoded, unless `force` deletes the definitions, too.
        """

    def delete_subscription(self, topic: str, name: str, *, force: bool = False) -> None:
        """Deletes a subscription. Busy: it has consumers, which `force` overrides."""

    def delete_tenant(self, name: str) -> None:
        """Deletes a tenant. Raises Busy if it has namespaces."""

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic with all its partitions. Raises Busy if it has producers or subscriptions, unless `force`.
        A topic of the same name that another program creates in the meantime is not deleted.
        """

    def describe_broker(self, *, tasks: bool = False, metrics: bool = False) -> values.BrokerDescription:
        """Returns what the broker that is asked says of itself: clock, limit of open files, settings in force."""

    def describe_cursor(self, topic: str, name: str, *, buckets: int = 0) -> values.CursorShape:
        """Returns what a subscription of one partition has acknowledged, in buckets, and its ten largest gaps."""

    def describe_ledgers(self, topic: str, *, after: int = 0, limit: int = 0) -> list[values.LedgerCopies]:
        """Returns ledgers of one partition, the oldest first: their bookies, and where copies are missing or damaged.
        """

    def describe_metadata(self, *, node: str = "", after: str = "", limit: int = 0) -> values.MetadataNode:
        """Returns a node of the metadata: its record without keys and tokens, and a page of what is below it."""

    def describe_security(self) -> values.SecurityDescription:
        """Returns who is connected to the broker that is asked, until when, and whom it denied something."""

    def detach_transaction(self, txn: TxnId | str, topic: str) -> None:
        """Removes a topic from the participants of a transaction, which then no longer waits until that topic stores
        its outcome. For a topic that cannot store the outcome any more. Raises NotFound.
        """

    def drain_broker(self, name: str) -> None:
        """Lets a broker give what it owns to the other brokers of its group, and get nothing, until `undrain_broker`,
        also after a restart. It begins within some seconds; `brokers()` shows what is left. Raises NotFound.
        """

    def expire_messages(self, topic: str, name: str, older_than: float | MessageId) -> int:
        """Acknowledges messages older than `older_than` seconds, or everything up to a message, for the subscription,
        or for all if `name` is empty. Returns the number of entries.
        """

    def find_orphans(self, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
        """Returns the orphaned ledgers. With `remove` they are fenced and deleted now, as brokers do every hour. With
        `unexplained` also those whose owner has no record, which no broker deletes by itself.
        """

    def grant_namespace_permission(self, name: str, role: str, actions: Sequence[str]) -> None:
        """Grants `role` these actions ("produce", "consume", …) at the namespace; they replace its earlier ones. Raises
        InvalidRequest.
        """

    def grant_subscription_permission(self, name: str, subscription: str, roles: Sequence[str]) -> None:
        """Restricts subscriptions of that name in the namespace to `roles`, which also need `consume`."""

    def grant_topic_permission(self, topic: str, role: str, actions: Sequence[str]) -> None:
        """Grants `role` its actions like grant_namespace_permission, for one topic and its partitions."""

    def half(self, half: TxnId | str) -> values.HalfStats:
        """Returns a half message. Raises NotFound if it is decided, or never existed."""

    def halves(self, coordinator: int, *, group: str = "", limit: int = 1000) -> values.CoordinatorHalves:
        """Returns the undecided half messages of one coordinator, the oldest first; `group`: only those of that group.
        Raises NotFound if there is no such coordinator.
        """

    def last_message_id(self, topic: str) -> MessageId:
        """Returns the id of the last message; -1:-1 when there is none."""

    def message_id_by_time(self, topic: str, publish_time_ms: int) -> MessageId:
        """Returns the id of the first message published at or after that time; if there is none, the position of the
        next one.
        """

    def messages(self, topic: str, ledger_id: int, entry_id: int) -> list[StoredMessage]:
        """Returns the messages of an entry. Raises NotFound if there is no such entry."""

    def namespace(self, name: str) -> values.NamespaceInfo:
        """Returns the settings of a namespace. Raises NamespaceNotFound."""

    def namespace_permissions(self, name: str) -> values.Permissions:
        """Returns the permissions of roles in the namespace, and the roles of its restricted subscriptions.
        Permissions for single topics are not included.
        """

    def namespace_policies(self, name: str, *, applied: bool = False) -> Policies:
        """Returns the policies that are set for the namespace; with `applied` every policy, with what is inherited from
        the broker.
        """

    def namespace_properties(self, name: str) -> dict[str, str]:
        """Returns the properties of a namespace; none are inherited."""

    def namespace_stats(self, namespace: str) -> list[values.TopicStats]:
        """Returns the statistics of each partition and each topic without partitions, sorted by name; without
        `oldest_ms`. It sends one request to each broker, more if there are many topics, and one for each topic that no
        broker serves now.
        """

    def namespaces(self, tenant: str) -> list[str]:
        """Returns the namespaces of a tenant as tenant/namespace, sorted."""

    def nth_message(self, topic: str, number: int, *, from_latest: bool = False) -> StoredMessage:
        """Returns the n-th message, counted from 1, from the oldest stored message or from the newest. Raises NotFound
        if there are fewer.
        """

    def offsets(
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

    def owner(self, topic: str) -> str:
        """Returns HOST:PORT of the broker that serves the topic (a partition, or a topic without partitions)."""

    def park_half(self, half: TxnId | str) -> None:
        """Parks a half message: its group is not asked about it any more, and an operator must decide. Raises NotFound,
        TransactionEnded.
        """

    def partitions(self, topic: str) -> int:
        """Returns the number of partitions; 0: not partitioned, or itself a partition. Raises TopicNotFound; creates
        nothing.
        """

    def parts(self, topic: str) -> list[str]:
        """Returns the full names of the partitions; for a topic without partitions, or a partition, its own name."""

    def peek_messages(self, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
        """Returns the next messages of a subscription, at most `messages`, without moving the subscription."""

    def put_schema(self, topic: str, schema: SchemaInfo) -> int:
        """Registers a schema; returns its version, or the version of an equal one. Raises IncompatibleSchema,
        InvalidSchema.
        """

    def remove_namespace_policies(self, name: str, *fields: str) -> None:
        """Removes these fields from the policies of a namespace: they are inherited again."""

    def remove_namespace_properties(self, name: str, *keys: str) -> None:
        """Removes properties of a namespace; without `keys` all of them. A missing key is ignored."""

    def remove_setting(self, *, name: str = "") -> None:
        """Removes what `change_setting` changed: each broker has its own value again. InvalidRequest."""

    def remove_topic_policies(self, topic: str, *fields: str) -> None:
        """Removes fields from the policies of a topic, like remove_namespace_policies."""

    def remove_topic_properties(self, topic: str, *keys: str) -> None:
        """Removes properties of a topic, like remove_namespace_properties."""

    def reset_subscription(self, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False) -> None:
        """Moves a subscription to a message id, or to a publish time in ms since the epoch. `exclusive`: delivery
        begins after the message.
        """

    def revive_half(self, half: TxnId | str) -> None:
        """Revives a parked half message: its group is asked about it again at once, and its counted answers are reset.
        Raises NotFound, TransactionEnded.
        """

    def revoke_namespace_permission(self, name: str, role: str) -> None:
        """Revokes all permissions of `role` at the namespace. Its connected clients are disconnected within a second.

        """

    def revoke_subscription_permission(self, name: str, subscription: str, role: str) -> None:
        """Removes `role` from the roles of a restricted subscription. Without any, every role with `consume` may use it
        again.
        """

    def revoke_topic_permission(self, topic: str, role: str) -> None:
        """Revokes all permissions of `role` at the topic itself."""

    def rollback_half(self, half: TxnId | str) -> None:
        """Drops a half message, also a parked one. Raises NotFound; TransactionEnded if it was committed already."""

    def schema(self, topic: str, version: int | None = None) -> values.TopicSchema:
        """Returns the newest schema of a topic; with `version` that version, even if it is deleted. Raises
        SchemaNotFound.
        """

    def schema_version(self, topic: str, schema: SchemaInfo) -> int:
        """Returns the version of the topic's schema that equals `schema`. Raises SchemaNotFound."""

    def schemas(self, topic: str) -> list[values.TopicSchema]:
        """The versions that are not deleted, in their order. SchemaNotFound: there is none."""

    def set_namespace_policies(self, name: str, policies: Policies) -> None:
        """Sets policies of a namespace: the fields that are not None get these values; the others stay."""

    def set_namespace_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a namespace; its other properties stay. Raises InvalidRequest if they are too many or
        too long (proto/policies.py).
        """

    def set_subscription_prefix_mode(self, name: str, on: bool) -> None:
        """Sets the prefix mode. If it is on, a subscription of the namespace must be named like its role, or begin with
        the role and `-`.
        """

    def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """Replaces all properties of a subscription."""

    def set_topic_policies(self, topic: str, policies: Policies) -> None:
        """Sets policies of a topic, like set_namespace_policies."""

    def set_topic_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a topic, like set_namespace_properties."""

    def skip_lost(self, topic: str, *, ledger_id: int | None = None, force: bool = False) -> values.SkippedLost:
        """Skips entries of one partition that every replica certainly lost, for all its readers: in all ledgers, or in
        `ledger_id`. Unloads the topic. Raises NotAllowed if a replica that does not answer may have them, unless
        `force`. What is skipped stays skipped, even if such a replica comes back.
        """

    def skip_messages(self, topic: str, name: str, messages: int = -1) -> None:
        """Acknowledges the next `messages` messages without delivering them; -1: all. With an empty `name` for every
        subscription.
        """

    def subscription_properties(self, topic: str, name: str) -> dict[str, str]:
        """The properties, name to value."""

    def subscriptions(self, topic: str) -> list[str]:
        """Returns the names of the durable subscriptions, sorted."""

    def tenant(self, name: str) -> values.TenantInfo:
        """Returns the settings of a tenant. Raises TenantNotFound."""

    def tenants(self) -> list[str]:
        """Returns the names of the tenants, sorted."""

    def terminate_topic(self, topic: str) -> MessageId:
        """Terminates a topic: it can be read and not written. Returns the id of its last message."""

    def test_schema(self, topic: str, schema: SchemaInfo) -> values.SchemaTest:
        """Returns whether the schema could be registered, and by which rule. Raises InvalidSchema."""

    def topic_internal_stats(self, topic: str) -> values.TopicInternalStats:
        """The log of one partition: its ledgers, positions and replication."""

    def topic_page(
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

    def topic_permissions(self, topic: str) -> values.Permissions:
        """Returns the permissions that were granted for this topic, with all its partitions. Those of its namespace
        are not included.
        """

    def topic_policies(self, topic: str, *, applied: bool = False) -> Policies:
        """Returns the policies that are set for a topic; with `applied` every policy, with what the topic inherits
        from its namespace, then from the broker.
        """

    def topic_properties(self, topic: str) -> dict[str, str]:
        """Returns the properties of a topic; a partition has those of its topic. None are inherited."""

    def topic_stats(self, topic: str, *, precise: bool = False) -> values.TopicStats:
        """Returns the statistics of one partition. With `precise` backlogs are counted by message, not by entry."""

    def topics(self, namespace: str = "public/default", *, partitions: bool = False) -> list[str]:
        """Returns the full names of the topics, sorted; with `partitions` single partitions instead of partitioned
        topics.

        Non-persistent topics are included if they have partitions or are in use.
        """

    def transaction(self, txn: TxnId | str) -> values.TransactionStats:
        """Returns a transaction. Raises NotFound if the coordinator never issued this id."""

    def transaction_at(self, txn: TxnId | str, topic: str) -> values.TransactionHere:
        """Returns the part of a transaction at one partition, or at a topic without partitions, and what waits there
        for the transaction's end.
        """

    def transactions(self, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
        """Returns the transactions of one coordinator that are not completed, the oldest first; at most `limit`.
        Raises NotFound if there is no such coordinator.
        """

    def trim_topic(self, topic: str) -> None:
        """Deletes the ledgers that no subscription and no retention needs, now."""

    def truncate_topic(self, topic: str) -> None:
        """Acknowledges everything for every subscription, and deletes all ledgers but the one that is written."""

    def undrain_broker(self, name: str) -> None:
        """Lets a broker get bundles again. Nothing comes back by itself. Raises NotFound."""

    def unload_namespace(self, name: str, bundle: str = "") -> values.Unloaded:
        """Unloads all bundles of a namespace, or the one named, from their brokers; the next lookups find new owners.

        """

    def unload_topic(self, topic: str) -> None:
        """Unloads a topic: its owner closes it, and the next use opens it again."""

    def unsubscribe_namespace(self, name: str, subscription: str, *, force: bool = False) -> int:
        """Deletes `subscription` from every topic that has it. Returns the number of topics and partitions."""

    def update_namespace(
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

    def update_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Replaces both settings of a tenant; a parameter that is left out becomes empty."""

    def update_topic(self, topic: str, *, partitions: int) -> None:
        """Increases the number of partitions of a topic."""

    def why_kept(self, topic: str) -> values.WhyKept:
        """Returns what keeps each ledger of one partition: a subscription, retention, a transaction, compaction."""

    def why_stuck(self, topic: str, name: str) -> values.WhyStuck:
        """Returns why a subscription of one partition does not get on, and what would end that, as sentences."""
