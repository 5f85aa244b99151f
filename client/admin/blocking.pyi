"""Of blocking.py, for type checkers and editors; `python -m tests.stubs` writes it."""

from collections.abc import Mapping, Sequence

from ...proto import statistics as values
from ...proto.policies import Policies
from ...proto.schema import SchemaInfo
from ...proto.transactions import TxnId, TxnState
from ..common.closing import ClosedAfterWith
from ..model.message_id import MessageId
from .stored_messages import StoredMessage

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
        tls_trust_certs_file_path: str = '',
    ) -> None: ...

    def close(self) -> None:
        """Closes the connections."""

    def abort_transaction(self, txn: TxnId | str) -> TxnState:
        """Aborts one that is open or prepared, of any role; the state of one that has ended."""

    def advance_subscription(self, topic: str, name: str, index: int, *, incarnation: int = 0) -> None:
        """Acknowledges every message of the partition before `index`, durably. `incarnation`: of `offsets`."""

    def all_halves(self, *, group: str = '', limit: int = 1000) -> list[values.CoordinatorHalves]:
        """Of every coordinator, by its number; `limit` for each."""

    def all_transactions(self, limit: int = 1000) -> list[values.CoordinatorTransactions]:
        """Of every coordinator, by its number; `limit` for each."""

    def analyze_backlog(self, topic: str, name: str) -> values.BacklogAnalysis:
        """Counts the backlog of one partition message by message."""

    def backlog_size(self, topic: str, position: MessageId) -> int:
        """About how many bytes are stored after the message."""

    def bookies(self) -> list[values.BookieInfo]:
        """The registered bookies."""

    def brokers(self) -> list[values.BrokerInfo]:
        """The registered brokers. Each reports its number of loaded topics; None: no answer within 5 s."""

    def clear_namespace_backlog(self, name: str, subscription: str = '') -> int:
        """Acknowledges everything, for that subscription or for each; in how many topics and partitions."""

    def commit_half(self, half: TxnId | str) -> None:
        """Publishes a half message, whatever its group says; also a parked one. NotFound; TransactionEnded: it is
        rolled back; and what keeps it from being published.
        """

    def compact(self, topic: str) -> None:
        """Starts a compaction. Busy: one is running."""

    def compaction_status(self, topic: str) -> values.CompactionStatus:
        """The last compaction of one partition, and the compacted ledger that is read now."""

    def create_namespace(
        self,
        name: str,
        *,
        bundles: int = 0,
        auto_topic_creation: bool = True,
        default_partitions: int = 0,
    ) -> None:
        """The parameters are those of NamespaceInfo."""

    def create_subscription(
        self,
        topic: str,
        name: str,
        position: MessageId | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """At `position` (default: latest), whose message is delivered first."""

    def create_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """`admin_roles` may administer it; with `allowed_clusters` it has namespaces in those alone. InvalidName."""

    def create_topic(self, topic: str, *, partitions: int = 0) -> None:
        """0: not partitioned. AlreadyExists."""

    def delete_namespace(self, name: str, *, force: bool = False) -> None:
        """Busy: it has topics, which `force` deletes too."""

    def delete_schemas(self, topic: str, *, force: bool = False) -> int | None:
        """The newest version that is deleted with this; None: there were none. Messages that were written with them
        can be decoded until `force` deletes the definitions.
        """

    def delete_subscription(self, topic: str, name: str, *, force: bool = False) -> None:
        """Busy: it has consumers, which `force` overrides."""

    def delete_tenant(self, name: str) -> None:
        """Busy: it has namespaces."""

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """With all its partitions. Busy: it has producers or subscriptions, which `force` overrides. The topic that is
        there now is meant: one of its name that another program makes meanwhile stays.
        """

    def detach_transaction(self, txn: TxnId | str, topic: str) -> None:
        """The transaction does not wait any more for a topic that can store its outcome no more. NotFound."""

    def expire_messages(self, topic: str, name: str, older_than: float | MessageId) -> int:
        """Acknowledges what is older than so many seconds, or everything up to a message, for all subscriptions when
        `name` is empty; how many entries.
        """

    def find_orphans(self, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
        """`remove`: the orphans are fenced and deleted now; brokers do it every hour. `unexplained`: also those whose
        owner has no record, which no broker deletes by itself.
        """

    def grant_namespace_permission(self, name: str, role: str, actions: Sequence[str]) -> None:
        """The role gets these actions ("produce", "consume", …) in place of those that it had there. InvalidRequest."""

    def grant_subscription_permission(self, name: str, subscription: str, roles: Sequence[str]) -> None:
        """Only these roles may use subscriptions of that name in the namespace; they need `consume` too."""

    def grant_topic_permission(self, topic: str, role: str, actions: Sequence[str]) -> None:
        """As grant_namespace_permission, for one topic and its partitions."""

    def half(self, half: TxnId | str) -> values.HalfStats:
        """NotFound: it is decided, or never was."""

    def halves(self, coordinator: int, *, group: str = '', limit: int = 1000) -> values.CoordinatorHalves:
        """Half messages of one coordinator that are not decided, the oldest first; `group`: of this one alone.
        NotFound: there is no such coordinator.
        """

    def last_message_id(self, topic: str) -> MessageId:
        """-1:-1 when there is none."""

    def message_id_by_time(self, topic: str, publish_time_ms: int) -> MessageId:
        """The id of the first message that arrived then or later; the position of the next one when there is none."""

    def messages(self, topic: str, ledger_id: int, entry_id: int) -> list[StoredMessage]:
        """The messages of an entry. NotFound: there is none."""

    def namespace(self, name: str) -> values.NamespaceInfo:
        """Its settings. NamespaceNotFound."""

    def namespace_permissions(self, name: str) -> values.Permissions:
        """What roles may do in the namespace, and the lists of its subscriptions. Without what its topics grant."""

    def namespace_policies(self, name: str, *, applied: bool = False) -> Policies:
        """The fields that are set for the namespace; `applied`: every field, inherited from the broker where unset."""

    def namespace_properties(self, name: str) -> dict[str, str]:
        """What its users noted of it; nothing is inherited."""

    def namespace_stats(self, namespace: str) -> list[values.TopicStats]:
        """Of each partition, and each topic without partitions, sorted by name; without `oldest_ms`. One request to
        each broker, or more where many topics are, and one for each topic that no broker serves now.
        """

    def namespaces(self, tenant: str) -> list[str]:
        """As tenant/namespace, sorted."""

    def nth_message(self, topic: str, number: int, *, from_latest: bool = False) -> StoredMessage:
        """Counted from 1, from the oldest message that is kept or from the newest. NotFound: there are fewer."""

    def offsets(
        self,
        topic: str,
        *,
        publish_times_ms: Sequence[int] = (),
        subscription: str = '',
        aborted_in: tuple[int, int] = (0, 0),
        incarnation: int = 0,
    ) -> values.TopicOffsets:
        """Of one partition. `subscription` is created at the earliest message when it does not exist. `aborted_in`: a
        range of indexes (first, end), of which `aborted` is counted. `incarnation`: that an earlier answer named;
        TopicNotFound: the topic was deleted and made anew since, so that its indexes mean other messages.
        """

    def owner(self, topic: str) -> str:
        """HOST:PORT of the broker that serves the topic (a partition, or a topic without partitions)."""

    def park_half(self, half: TxnId | str) -> None:
        """Its group is not asked about it any more; an operator decides. NotFound, TransactionEnded."""

    def partitions(self, topic: str) -> int:
        """0: not partitioned, or a partition. Raises TopicNotFound; creates nothing."""

    def parts(self, topic: str) -> list[str]:
        """Full names of the partitions; of a topic without partitions, or a partition, its own."""

    def peek_messages(self, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
        """At most `messages` next messages of a subscription, without moving it."""

    def put_schema(self, topic: str, schema: SchemaInfo) -> int:
        """Registers it; its version, which is that of an equal one. IncompatibleSchema, InvalidSchema."""

    def remove_namespace_policies(self, name: str, *fields: str) -> None:
        """These fields are inherited again."""

    def remove_namespace_properties(self, name: str, *keys: str) -> None:
        """No key: all of them. A missing key does nothing."""

    def remove_topic_policies(self, topic: str, *fields: str) -> None:
        """As remove_namespace_policies."""

    def remove_topic_properties(self, topic: str, *keys: str) -> None:
        """As remove_namespace_properties."""

    def reset_subscription(self, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False) -> None:
        """To a message id, or to a publish time in ms since the epoch. `exclusive`: the message itself is left out."""

    def revive_half(self, half: TxnId | str) -> None:
        """Its group is asked about it again, at once; what was counted is forgotten. NotFound, TransactionEnded."""

    def revoke_namespace_permission(self, name: str, role: str) -> None:
        """All that the role had at the namespace. Who is connected with it is disconnected within a second."""

    def revoke_subscription_permission(self, name: str, subscription: str, role: str) -> None:
        """The role leaves the list; with the last one every role with `consume` may use the subscription again."""

    def revoke_topic_permission(self, topic: str, role: str) -> None:
        """All that the role had at the topic itself."""

    def rollback_half(self, half: TxnId | str) -> None:
        """Drops a half message, also a parked one. NotFound; TransactionEnded: it is committed."""

    def schema(self, topic: str, version: int | None = None) -> values.TopicSchema:
        """The newest schema of a topic, or that version, which may be deleted. SchemaNotFound."""

    def schema_version(self, topic: str, schema: SchemaInfo) -> int:
        """The version of an equal one. SchemaNotFound."""

    def schemas(self, topic: str) -> list[values.TopicSchema]:
        """The versions that are not deleted, in their order. SchemaNotFound: there is none."""

    def set_namespace_policies(self, name: str, policies: Policies) -> None:
        """The fields that are not None get these values; the others stay."""

    def set_namespace_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Others that are there stay. InvalidRequest: they are too many, or too long (proto/policies.py)."""

    def set_subscription_prefix_mode(self, name: str, on: bool) -> None:
        """On: the names of subscriptions in the namespace are the role's name, or begin with it and `-`."""

    def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """Replaces all properties."""

    def set_topic_policies(self, topic: str, policies: Policies) -> None:
        """As set_namespace_policies."""

    def set_topic_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """As set_namespace_properties."""

    def skip_lost(self, topic: str, *, ledger_id: int | None = None, force: bool = False) -> values.SkippedLost:
        """Passes over entries of one partition that every replica certainly lost, for all who read it: of all its
        ledgers, or of one. The topic is unloaded. NotAllowed: a replica that does not answer may have them; `force`
        gives those up too. What is passed over does not come back, also when such a replica does.
        """

    def skip_messages(self, topic: str, name: str, messages: int = -1) -> None:
        """Acknowledges the next ones unseen. -1: all; an empty name: of every subscription."""

    def subscription_properties(self, topic: str, name: str) -> dict[str, str]:
        """The properties, name to value."""

    def subscriptions(self, topic: str) -> list[str]:
        """Names of the durable ones, sorted."""

    def tenant(self, name: str) -> values.TenantInfo:
        """Its settings. TenantNotFound."""

    def tenants(self) -> list[str]:
        """Names, sorted."""

    def terminate_topic(self, topic: str) -> MessageId:
        """Terminates it: it can be read and not written. Returns the id of its last message."""

    def test_schema(self, topic: str, schema: SchemaInfo) -> values.SchemaTest:
        """Whether it could be registered, and by which rule. InvalidSchema."""

    def topic_internal_stats(self, topic: str) -> values.TopicInternalStats:
        """The log of one partition: its ledgers, positions and replication."""

    def topic_permissions(self, topic: str) -> values.Permissions:
        """What is granted for the topic alone, for all of its partitions."""

    def topic_policies(self, topic: str, *, applied: bool = False) -> Policies:
        """As namespace_policies; a topic inherits from its namespace, then from the broker."""

    def topic_properties(self, topic: str) -> dict[str, str]:
        """As namespace_properties; partitions have those of their topic."""

    def topic_stats(self, topic: str, *, precise: bool = False) -> values.TopicStats:
        """Of one partition. `precise`: backlogs count batches message by message."""

    def topics(self, namespace: str = 'public/default', *, partitions: bool = False) -> list[str]:
        """Full names, sorted; `partitions`: single partitions instead of partitioned topics.

        With the non-persistent ones that have partitions or are in use.
        """

    def transaction(self, txn: TxnId | str) -> values.TransactionStats:
        """NotFound: the coordinator has not given this id."""

    def transaction_at(self, txn: TxnId | str, topic: str) -> values.TransactionHere:
        """What a topic (without partitions, or a partition) has of it, and what waits there for its end."""

    def transactions(self, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
        """Those of one coordinator that are not done, the oldest first. NotFound: there is no such coordinator."""

    def trim_topic(self, topic: str) -> None:
        """Deletes the ledgers that no subscription and no retention needs, now."""

    def truncate_topic(self, topic: str) -> None:
        """Acknowledges everything for every subscription, and deletes all ledgers but the one that is written."""

    def unload_namespace(self, name: str, bundle: str = '') -> values.Unloaded:
        """Every broker gives its bundles up (or that one); the next lookups find new owners."""

    def unload_topic(self, topic: str) -> None:
        """Its owner closes it; the next use opens it again."""

    def unsubscribe_namespace(self, name: str, subscription: str, *, force: bool = False) -> int:
        """Deletes the subscription of every topic that has it; of how many topics and partitions."""

    def update_namespace(
        self,
        name: str,
        *,
        bundles: int | None = None,
        auto_topic_creation: bool | None = None,
        default_partitions: int | None = None,
        is_creation_set: bool | None = None,
    ) -> None:
        """None keeps a setting. The number of bundles is fixed at creation: InvalidRequest for another one."""

    def update_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Replaces both settings; a parameter that is left out becomes empty."""

    def update_topic(self, topic: str, *, partitions: int) -> None:
        """More partitions, never fewer."""
