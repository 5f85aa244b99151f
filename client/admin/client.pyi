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

    async def brokers(self) -> list[values.BrokerInfo]:
        """The registered brokers. Each reports its number of loaded topics; None: no answer within 5 s."""

    async def clear_namespace_backlog(self, name: str, subscription: str = "") -> int:
        """Acknowledges everything, for that subscription or for each; in how many topics and partitions."""

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
        """Creates a tenant. `admin_roles` may administer it; with `allowed_clusters` it has namespaces in those alone.
        InvalidName.
        """

    async def delete_tenant(self, name: str) -> None:
        """Deletes a tenant. Busy: it has namespaces."""

    async def find_orphans(self, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
        """Returns the orphans. `remove`: they are fenced and deleted now; brokers do it every hour. `unexplained`: also
        those whose owner has no record, which no broker deletes by itself.
        """

    async def grant_namespace_permission(self, name: str, role: str, actions: Sequence[str]) -> None:
        """Grants the role these actions ("produce", "consume", …) in place of those that it had there. InvalidRequest.

        """

    async def grant_subscription_permission(self, name: str, subscription: str, roles: Sequence[str]) -> None:
        """Lets only these roles use subscriptions of that name in the namespace; they need `consume` too."""

    async def grant_topic_permission(self, topic: str, role: str, actions: Sequence[str]) -> None:
        """Grants a role its actions, like grant_namespace_permission, for one topic and its partitions."""

    async def namespace_permissions(self, name: str) -> values.Permissions:
        """Returns the permissions of roles in the namespace, and the lists of its subscriptions; not those granted for
        its topics.
        """

    async def namespace_policies(self, name: str, *, applied: bool = False) -> Policies:
        """The fields that are set for the namespace; `applied`: every field, inherited from the broker where unset."""

    async def namespace_properties(self, name: str) -> dict[str, str]:
        """Returns the properties that its users noted of a namespace; nothing is inherited."""

    async def namespaces(self, tenant: str) -> list[str]:
        """Returns the namespaces of a tenant as tenant/namespace, sorted."""

    async def remove_namespace_policies(self, name: str, *fields: str) -> None:
        """Removes these fields from the policies of a namespace: they are inherited again."""

    async def remove_namespace_properties(self, name: str, *keys: str) -> None:
        """Removes properties of a namespace. No key: all of them. A missing key does nothing."""

    async def remove_topic_policies(self, topic: str, *fields: str) -> None:
        """Removes fields from the policies of a topic, like remove_namespace_policies."""

    async def remove_topic_properties(self, topic: str, *keys: str) -> None:
        """Removes properties of a topic, like remove_namespace_properties."""

    async def revoke_namespace_permission(self, name: str, role: str) -> None:
        """Revokes all that the role had at the namespace. Clients that are connected with it are disconnected within a
        second.
        """

    async def revoke_subscription_permission(self, name: str, subscription: str, role: str) -> None:
        """Removes the role from the list; with the last one every role with `consume` may use the subscription again.

        """

    async def revoke_topic_permission(self, topic: str, role: str) -> None:
        """Revokes all that the role had at the topic itself."""

    async def set_namespace_policies(self, name: str, policies: Policies) -> None:
        """Sets policies of a namespace: the fields that are not None get these values; the others stay."""

    async def set_namespace_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a namespace; others that it has stay. InvalidRequest: they are too many, or too long
        (proto/policies.py).
        """

    async def set_subscription_prefix_mode(self, name: str, on: bool) -> None:
        """Sets the prefix mode. On: the names of subscriptions in the namespace are the role's name, or begin with it
        and `-`.
        """

    async def set_topic_policies(self, topic: str, policies: Policies) -> None:
        """Sets policies of a topic, like set_namespace_policies."""

    async def set_topic_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a topic, like set_namespace_properties."""

    async def topic_permissions(self, topic: str) -> values.Permissions:
        """Returns the permissions granted for the topic alone, for all of its partitions."""

    async def topic_policies(self, topic: str, *, applied: bool = False) -> Policies:
        """Returns the policies of a topic, like namespace_policies; a topic inherits from its namespace, then from the
        broker.
        """

    async def topic_properties(self, topic: str) -> dict[str, str]:
        """Returns the properties of a topic, like namespace_properties; partitions have those of their topic."""

    async def unload_namespace(self, name: str, bundle: str = "") -> values.Unloaded:
        """Makes every broker give the bundles of a namespace up (or that one); the next lookups find new owners."""

    async def unsubscribe_namespace(self, name: str, subscription: str, *, force: bool = False) -> int:
        """Deletes the subscription of every topic that has it; of how many topics and partitions."""

    async def update_namespace(
        self,
        name: str,
        *,
        bundles: int | None = None,
        auto_topic_creation: bool | None = None,
        default_partitions: int | None = None,
        is_creation_set: bool | None = None,
    ) -> None:
        """Updates the settings of a namespace; None keeps a setting. The number of bundles is fixed at creation:
        InvalidRequest for another one.
        """

    async def update_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Replaces both settings; a parameter that is left out becomes empty."""

    async def abort_transaction(self, txn: TxnId | str) -> TxnState:
        """Aborts one that is open or prepared, of any role; returns the state, also of one that has ended."""

    async def advance_subscription(self, topic: str, name: str, index: int, *, incarnation: int = 0) -> None:
        """Acknowledges every message of the partition before `index`, durably. `incarnation`: of `offsets`."""

    async def all_halves(self, *, group: str = "", limit: int = 1000) -> list[values.CoordinatorHalves]:
        """Returns the half messages of every coordinator, by its number; `limit` for each."""

    async def all_transactions(self, limit: int = 1000) -> list[values.CoordinatorTransactions]:
        """Returns the transactions of every coordinator, by its number; `limit` for each."""

    async def backlog_size(self, topic: str, position: MessageId) -> int:
        """Returns about how many bytes are stored after the message."""

    async def commit_half(self, half: TxnId | str) -> None:
        """Publishes a half message, whatever its group says; also a parked one. NotFound; TransactionEnded: it is
        rolled back; and what keeps it from being published.
        """

    async def create_subscription(
        self,
        topic: str,
        name: str,
        position: MessageId | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a subscription at `position` (default: latest), whose message is delivered first."""

    async def delete_schemas(self, topic: str, *, force: bool = False) -> int | None:
        """The newest version that is deleted with this; None: there were none. Messages that were written with them
        can be decoded until `force` deletes the definitions.
        """

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic with all its partitions. Busy: it has producers or subscriptions, which `force` overrides.
        The topic that is there now is meant: one of its name that another program makes meanwhile stays.
        """

    async def detach_transaction(self, txn: TxnId | str, topic: str) -> None:
        """Detaches a topic that can store the outcome no more: the transaction does not wait for it any longer.
        NotFound.
        """

    async def expire_messages(self, topic: str, name: str, older_than: float | MessageId) -> int:
        """Acknowledges what is older than so many seconds, or everything up to a message, for all subscriptions when
        `name` is empty; how many entries.
        """

    async def half(self, half: TxnId | str) -> values.HalfStats:
        """Returns a half message. NotFound: it is decided, or never was."""

    async def halves(self, coordinator: int, *, group: str = "", limit: int = 1000) -> values.CoordinatorHalves:
        """Returns the half messages of one coordinator that are not decided, the oldest first; `group`: of this one
        alone. NotFound: there is no such coordinator.
        """

    async def last_message_id(self, topic: str) -> MessageId:
        """Returns the id of the last message; -1:-1 when there is none."""

    async def message_id_by_time(self, topic: str, publish_time_ms: int) -> MessageId:
        """The id of the first message that arrived then or later; the position of the next one when there is none."""

    async def messages(self, topic: str, ledger_id: int, entry_id: int) -> list[StoredMessage]:
        """Returns the messages of an entry. Raises NotFound if there is no such entry."""

    async def namespace_stats(self, namespace: str) -> list[values.TopicStats]:
        """Returns the statistics of each partition, and each topic without partitions, sorted by name; without
        `oldest_ms`. One request to each broker, or more where many topics are, and one for each topic that no broker
        serves now.
        """

    async def nth_message(self, topic: str, number: int, *, from_latest: bool = False) -> StoredMessage:
        """Returns the n-th message, counted from 1, from the oldest message that is kept or from the newest. NotFound:
        there are fewer.
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
        """Returns the indexes and size of one partition. `subscription` is created at the earliest message when it does
        not exist. `aborted_in`: a range of indexes (first, end), of which `aborted` is counted. `incarnation`: that an
        earlier answer named; TopicNotFound: the topic was deleted and made anew since, so that its indexes mean other
        messages.
        """

    async def owner(self, topic: str) -> str:
        """Returns HOST:PORT of the broker that serves the topic (a partition, or a topic without partitions)."""

    async def park_half(self, half: TxnId | str) -> None:
        """Parks a half message: its group is not asked about it any more; an operator decides. NotFound,
        TransactionEnded.
        """

    async def partitions(self, topic: str) -> int:
        """Returns the number of partitions; 0: not partitioned, or a partition. Raises TopicNotFound; creates nothing.

        """

    async def parts(self, topic: str) -> list[str]:
        """Returns the full names of the partitions; of a topic without partitions, or a partition, its own."""

    async def peek_messages(self, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
        """Returns at most `messages` next messages of a subscription, without moving it."""

    async def put_schema(self, topic: str, schema: SchemaInfo) -> int:
        """Registers a schema; returns its version, which is that of an equal one. IncompatibleSchema, InvalidSchema."""

    async def reset_subscription(self, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False) -> None:
        """Resets a subscription to a message id, or to a publish time in ms since the epoch. `exclusive`: the message
        itself is left out.
        """

    async def revive_half(self, half: TxnId | str) -> None:
        """Revives a half message: its group is asked about it again, at once; what was counted is forgotten. NotFound,
        TransactionEnded.
        """

    async def rollback_half(self, half: TxnId | str) -> None:
        """Drops a half message, also a parked one. NotFound; TransactionEnded: it is committed."""

    async def schema(self, topic: str, version: int | None = None) -> values.TopicSchema:
        """The newest schema of a topic, or that version, which may be deleted. SchemaNotFound."""

    async def schema_version(self, topic: str, schema: SchemaInfo) -> int:
        """Returns the version of the topic's schema that equals `schema`. Raises SchemaNotFound."""

    async def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """Replaces all properties."""

    async def skip_lost(self, topic: str, *, ledger_id: int | None = None, force: bool = False) -> values.SkippedLost:
        """Passes over entries of one partition that every replica certainly lost, for all who read it: of all its
        ledgers, or of one. The topic is unloaded. NotAllowed: a replica that does not answer may have them; `force`
        gives those up too. What is passed over does not come back, also when such a replica does.
        """

    async def skip_messages(self, topic: str, name: str, messages: int = -1) -> None:
        """Acknowledges the next ones unseen. -1: all; an empty name: of every subscription."""

    async def terminate_topic(self, topic: str) -> MessageId:
        """Terminates a topic: it can be read and not written. Returns the id of its last message."""

    async def test_schema(self, topic: str, schema: SchemaInfo) -> values.SchemaTest:
        """Whether it could be registered, and by which rule. InvalidSchema."""

    async def topic_stats(self, topic: str, *, precise: bool = False) -> values.TopicStats:
        """Returns the statistics of one partition. `precise`: backlogs count batches message by message."""

    async def topics(self, namespace: str = "public/default", *, partitions: bool = False) -> list[str]:
        """Returns the full names of the topics, sorted; `partitions`: single partitions instead of partitioned topics.

        With the non-persistent ones that have partitions or are in use.
        """

    async def transaction(self, txn: TxnId | str) -> values.TransactionStats:
        """Returns a transaction. NotFound: the coordinator has not given this id."""

    async def transaction_at(self, txn: TxnId | str, topic: str) -> values.TransactionHere:
        """Returns what a topic (without partitions, or a partition) has of the transaction, and what waits there for
        its end.
        """

    async def transactions(self, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
        """Returns the transactions of one coordinator that are not done, the oldest first. NotFound: there is no such
        coordinator.
        """

    async def update_topic(self, topic: str, *, partitions: int) -> None:
        """Gives a topic more partitions, never fewer."""
