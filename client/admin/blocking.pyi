"""Of blocking.py, for type checkers and editors; `python -m tests.stubs` writes it."""

from collections.abc import Mapping, Sequence

from ...proto import statistics as values
from ...proto.policies import Policies
from ...proto.schema import SchemaInfo
from ...proto.states import TxnId, TxnState
from ..common.closing import ClosedAfterWith
from ..model.message_id import MessageId
from .grpc_transport import FindResult, StoredMessage

class Admin(ClosedAfterWith):
    """Administration of a cluster, blocking: each method has the parameters, the return value and the errors of
    AdminClient's method.

        with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
            admin.create_topic("flights", partitions=4)

    The event loop thread of the process does the work, and a method waits for its outcome. The methods may be called
    from any thread but that one, where they raise Interrupted; after Ctrl-C they raise CtrlC. Close the object after
    use, or use a `with` statement.
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
        """Closes the connections of this object, and waits until they are closed. A method that is called later
        connects again.
        """

    def abort_transaction(self, txn: TxnId | str) -> TxnState:
        """Aborts an open or prepared transaction, also one that another role began. Returns the state of the
        transaction; a transaction that has ended stays as it was. Raises NotFound if there is no such coordinator,
        InvalidRequest if `txn` is no id of a transaction or has not begun, TransactionForgotten if it ended too long
        ago.
        """

    def advance_subscription(self, topic: str, name: str, index: int, *, incarnation: int = 0) -> None:
        """Acknowledges durably, for the subscription `name`, every message of the partition `topic` whose index is less
        than `index`. Never moves the subscription back. `incarnation`: the topic's incarnation, from an answer of
        `offsets`; 0: any. Raises TopicNotFound if the topic does not exist, or was deleted and created again since that
        answer; SubscriptionNotFound if it has no such subscription.
        """

    def all_halves(self, *, group: str = "", limit: int = 1000) -> list[values.CoordinatorHalves]:
        """Returns the undecided half messages of every coordinator, ordered by the coordinator's number; at most
        `limit` of each coordinator. `group`: only those of this group; empty: those of all groups. Raises Unavailable
        or TimedOut if a coordinator does not answer.
        """

    def all_transactions(self, limit: int = 1000) -> list[values.CoordinatorTransactions]:
        """Returns the transactions of every coordinator that have not ended yet, ordered by the coordinator's number;
        at most `limit` of each coordinator. Raises Unavailable or TimedOut if a coordinator does not answer.
        """

    def analyze_backlog(self, topic: str, name: str) -> values.BacklogAnalysis:
        """Counts the backlog of one partition message by message."""

    def backlog_size(self, topic: str, position: MessageId) -> int:
        """Returns the approximate number of bytes that are stored in a topic after the message with the id `position`.
        Raises TopicNotFound if there is no such topic.
        """

    def balance_brokers(self, *, dry_run: bool = False) -> values.Balance:
        """Moves bundles from brokers that carry much to those that carry little. `dry_run`: only says which."""

    def balance_status(self, *, here: bool = False) -> values.BalanceStatus:
        """Returns whether brokers balance their load, which one decides, how busy each is, and what moves now."""

    def bookies(self) -> list[values.BookieInfo]:
        """Returns the registered bookies."""

    def brief_namespace_stats(self, namespace: str) -> list[values.BriefTopicStats]:
        """Returns a few figures of each topic that `namespace_stats` returns, in the same order, and raises its errors.
        Sends as many requests, but takes a third of the time.
        """

    def broker_summaries(self, *, here: bool = False) -> values.ClusterSummary:
        """Returns the sums of all brokers, and their largest topics. `here`: of the broker that is asked alone."""

    def brokers(self) -> list[values.BrokerInfo]:
        """Returns a list of the registered brokers, each with the number of topics that it has loaded and the number of
        bundles and transaction coordinators that it owns. These numbers are None if the broker did not answer within 5
        s. Raises Unavailable or TimedOut if no broker answers.
        """

    def cancel_delayed(
        self,
        topic: str,
        *,
        ledger_id: int = 0,
        entry_id: int = 0,
        batch_index: int = 0,
    ) -> values.CancelledMessage:
        """Acknowledges a delayed message for every subscription. NotAllowed: one of them has got it, or it is due."""

    def change_setting(self, *, name: str = "", value: str = "") -> None:
        """Changes a setting of all brokers while they run. InvalidRequest: it cannot change, or not to this value."""

    def clear_namespace_backlog(self, name: str, subscription: str = "") -> int:
        """Acknowledges all messages of all persistent topics of a namespace for `subscription`, or for every
        subscription if none is given. Returns the number of topics and partitions that were cleared; those without the
        subscription do not count. A failure at one topic does not stop the others; the first such error is raised at
        the end. Raises NamespaceNotFound if there is no such namespace.
        """

    def commit_half(self, half: TxnId | str) -> None:
        """Publishes a half message, also a parked one, without asking its group. Raises NotFound if there is no such
        half message, TransactionEnded if it was rolled back already, InvalidRequest if `half` is no id, or the error
        with which publishing failed.
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
        """Creates a namespace with `bundles` bundles (0: the cluster's default). `auto_topic_creation`: whether its
        topics are created when they are first used. `default_partitions`: the number of partitions of such a topic; 0:
        it is not partitioned. Raises AlreadyExists if there is such a namespace, TenantNotFound if its tenant does not
        exist, InvalidRequest if a number is out of bounds, NotAllowed if the tenant may not have it.
        """

    def create_schedule(
        self,
        topic: str,
        name: str,
        *,
        cron: str = "",
        every_s: float = 0,
        at_ms: int = 0,
        zone: str = "UTC",
        payload: bytes = b'',
        key: str = "",
        properties: Mapping[str, str] | None = None,
        missed: str = "skip",
    ) -> None:
        """Creates a schedule: at set times the owner of the topic publishes a message with `payload`, `key` and
        `properties`, once for each time.

        Exactly one parameter says when: `cron`, five fields in the time zone `zone`; `every_s`, an interval of one
        second or more; or `at_ms`, a single time in ms since the epoch. `missed` says what happens to times at which no
        broker could publish: "skip" drops them, "last" makes up for the latest, "all" for the latest 100.

        Raises AlreadyExists if the topic has a schedule of that name; InvalidRequest if a value is wrong, or the
        schedule would never fire; NotAllowed if the topic is not persistent or is a single partition, or the namespace
        has its maximum of schedules; TopicNotFound if there is no such topic.
        """

    def create_subscription(
        self,
        topic: str,
        name: str,
        position: MessageId | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Creates a durable subscription. `position`: the first message that the subscription delivers; None: it begins
        after the last message. `properties`: its properties; None: it has none. Raises AlreadyExists if the topic has a
        subscription of that name, NotAllowed if it has its maximum of subscriptions, TopicNotFound if there is no such
        topic.
        """

    def create_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Creates a tenant. The roles `admin_roles` may administer the tenant. If `allowed_clusters` is not empty, the
        tenant may have namespaces only in those clusters. Raises InvalidName if the name is malformed, AlreadyExists if
        there is such a tenant.
        """

    def create_topic(self, topic: str, *, partitions: int = 0) -> None:
        """Creates a topic. `partitions` 0: not partitioned. AlreadyExists."""

    def delete_namespace(self, name: str, *, force: bool = False) -> None:
        """Deletes a namespace. Busy: it has topics, which `force` deletes too."""

    def delete_resource_group(self, name: str) -> None:
        """Deletes a resource group. Raises NotFound if there is no such group, Busy if a namespace has it."""

    def delete_schedule(self, topic: str, *, name: str = "") -> None:
        """Deletes a schedule. NotFound: the topic has none of that name."""

    def delete_schemas(self, topic: str, *, force: bool = False) -> int | None:
        """Deletes the schemas of a topic. Returns the newest version that was deleted; None: the topic had no schema.
        Messages written with these schemas can still be decoded, unless `force` is true: then the definitions are
        deleted, too. Raises TopicNotFound if there is no such topic, OutcomeUnknown if the schemas may be deleted.
        """

    def delete_subscription(self, topic: str, name: str, *, force: bool = False) -> None:
        """Deletes a subscription. Busy: it has consumers, which `force` overrides."""

    def delete_tenant(self, name: str) -> None:
        """Deletes a tenant. Raises TenantNotFound if there is no such tenant, Busy if it has namespaces."""

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic with all its partitions. Raises Busy if the topic has producers or subscriptions, unless
        `force` is true; TransactionsOpen if prepared transactions have messages there, or open ones and `force` is
        false; TopicNotFound if there is no such topic. A topic of the same name that another program creates in the
        meantime is not deleted.
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
        """Removes a topic from the participants of a transaction: the transaction no longer waits until this topic
        stores its outcome. Use it for a topic that cannot store the outcome any more. Raises NotFound if there is no
        such transaction, or it does not wait for this topic; InvalidRequest if `txn` is no id of a transaction.
        """

    def drain_broker(self, name: str) -> None:
        """Drains a broker: the broker gives its bundles to the other brokers of its group. The broker gets no new
        bundles until `undrain_broker` is called, also after a restart. Draining begins within some seconds; `brokers()`
        returns how many bundles are left.

        Raises NotFound if there is no such broker. Raises NotAllowed if this broker, or each broker that could get its
        bundles, is of a release that cannot drain.
        """

    def expire_messages(self, topic: str, name: str, older_than: float | MessageId) -> int:
        """Acknowledges old messages for the subscription `name`, or for every durable subscription if `name` is empty:
        those older than `older_than` seconds, or, if `older_than` is a message id, all up to and including that
        message. Returns the number of entries that were acknowledged. Raises InvalidRequest if the seconds are not
        above 0, TopicNotFound or SubscriptionNotFound if it does not exist.
        """

    def find_messages(
        self,
        topic: str,
        *,
        key: str = "",
        property: str = "",
        text: str = "",
        where: str = "",
        since_ms: int = 0,
        until_ms: int = 0,
        before_index: int = 0,
        limit: int = 0,
        dry_run: bool = False,
        acked_by: str = "",
    ) -> FindResult:
        """Searches one partition, or a topic without partitions, for messages, from its end backwards. A message is
        found if it fits every condition that is given: the key `key`; the property `property` (NAME or NAME=VALUE); a
        payload that contains `text`; the filter expression `where`. `since_ms`, `until_ms`: only messages that a broker
        stored in this time (ms since the epoch).

        The broker stops after `limit` found messages (0: 100), after it has looked at 100,000 messages or 64 MiB, or
        after 10 s. To continue, search again with the `before_index` of the result.

        With `dry_run` the broker reads only key indexes: `looked_at` and `bytes` then say what a search would look at.
        `acked_by`: a subscription; `is_acknowledged` of each message says whether that subscription has acknowledged
        it, and is None if the broker is older or has no such subscription. Raises InvalidRequest for a wrong filter
        (its field `position` says where the filter is wrong) or another wrong value; TopicNotFound if there is no such
        topic; BackPressure if another search of this topic, or too many searches, run at its broker.
        """

    def find_orphans(self, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
        """Returns the orphaned ledgers: those to which no topic and no cursor refers. If `remove` is true, these
        ledgers are fenced and deleted now, as brokers do every hour. Ledgers whose owner has no record are returned,
        too. They are deleted only if `unexplained` is true as well, and never by a broker on its own. Raises
        Unavailable or TimedOut if no broker answers.
        """

    def forget_broker(self, name: str) -> None:
        """Removes the record of a broker that died and will not come back: `broker_summaries()` does not name the
        broker any more. Raises NotFound if no broker of that name has died; NotAllowed if it is registered; BadVersion
        if its record changes at the same moment.
        """

    def grant_namespace_permission(self, name: str, role: str, actions: Sequence[str]) -> None:
        """Grants the role `role` the actions `actions` ("produce", "consume", …) at a namespace; these actions replace
        the actions that the role had there. Raises InvalidRequest if an action is unknown or there is none,
        NamespaceNotFound if there is no such namespace.
        """

    def grant_subscription_permission(self, name: str, subscription: str, roles: Sequence[str]) -> None:
        """Restricts every subscription with the name `subscription` in the namespace: only the roles `roles` may use
        it, and they need the permission `consume`, too. The roles replace those of an earlier call. Raises
        InvalidRequest if there is no role, NamespaceNotFound if there is no such namespace.
        """

    def grant_topic_permission(self, topic: str, role: str, actions: Sequence[str]) -> None:
        """Grants the role `role` the actions `actions` ("produce", "consume", …) at one topic with its partitions;
        these actions replace the actions that the role had there. Raises InvalidRequest if an action is unknown or
        there is none, TopicNotFound if there is no such topic.
        """

    def half(self, half: TxnId | str) -> values.HalfStats:
        """Returns the record of one undecided half message. Raises NotFound if the half message is decided, or never
        existed; InvalidRequest if `half` is no id.
        """

    def halves(self, coordinator: int, *, group: str = "", limit: int = 1000) -> values.CoordinatorHalves:
        """Returns the half messages of one coordinator that are neither committed nor rolled back, the oldest first, at
        most `limit` (5,000 at most; 0: 1,000). `group`: lists only those of this group; empty: those of all. `open`,
        `parked` and `bytes` always count all of the coordinator. Raises NotFound if there is no such coordinator.
        """

    def last_message_id(self, topic: str) -> MessageId:
        """Returns the id of the last message of a topic that consumers may get. If there is none, returns the topic's
        last position, whose entry id is -1 before the first message. Raises TopicNotFound if there is no such topic.
        """

    def list_bundles(self, *, namespace: str = "", here: bool = False) -> values.BundlePage:
        """Returns the bundles that brokers own, and what flows there. `namespace`: only those of this one."""

    def message_id_by_time(self, topic: str, publish_time_ms: int) -> MessageId:
        """Returns the id of the first message that a broker stored at `publish_time_ms`, in ms since the epoch by its
        clock, or later; if there is none, the position that the next published message will have. Raises TopicNotFound
        if there is no such topic.
        """

    def messages(self, topic: str, ledger_id: int, entry_id: int) -> list[StoredMessage]:
        """Returns the messages of the stored entry `entry_id` of the ledger `ledger_id`. Raises NotFound if the topic
        has no such entry, TopicNotFound if there is no such topic, CorruptEntry if the entry is damaged.
        """

    def namespace(self, name: str) -> values.NamespaceInfo:
        """Returns the settings of a namespace. Raises NamespaceNotFound."""

    def namespace_permissions(self, name: str) -> values.Permissions:
        """Returns the permissions of roles in the namespace, and the roles of its restricted subscriptions. Permissions
        for single topics are not included. Raises NamespaceNotFound if there is no such namespace.
        """

    def namespace_policies(self, name: str, *, applied: bool = False) -> Policies:
        """Returns the policies that are set for the namespace (None: not set); if `applied` is true, returns every
        policy, with the values that are inherited from the broker. Raises NamespaceNotFound if there is no such
        namespace.
        """

    def namespace_properties(self, name: str) -> dict[str, str]:
        """Returns the properties that are set for a namespace. A namespace inherits no properties. Raises
        NamespaceNotFound if there is no such namespace.
        """

    def namespace_stats(self, namespace: str) -> list[values.TopicStats]:
        """Returns the statistics of all topics of a namespace, sorted by name: one value for each partition and each
        topic without partitions. The field `oldest_ms` is not set. Sends one request to each broker, more if there are
        many topics, and one for each topic that no broker reported. Raises TenantNotFound or NamespaceNotFound if there
        is no such namespace.
        """

    def namespaces(self, tenant: str) -> list[str]:
        """Returns the names of a tenant's namespaces, each as TENANT/NAMESPACE, sorted. Raises TenantNotFound if there
        is no such tenant.
        """

    def nth_message(self, topic: str, number: int, *, from_latest: bool = False) -> StoredMessage:
        """Returns the n-th message of a topic, counted from 1: from the oldest stored message, or from the newest if
        `from_latest` is true. Raises InvalidRequest if `number` is below 1, NotFound if the topic has fewer messages,
        TopicNotFound if there is no such topic, CorruptEntry if the entry is damaged.
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
        """Returns the range of message indexes of one partition, its size in bytes and its incarnation.

        `publish_times_ms`: times in ms since the epoch; for each the answer has the index of the first message that was
        stored then or later. `subscription`: the answer has the index of its first unacknowledged message; a
        subscription that does not exist is created at the earliest message. `aborted_in`: a range of indexes (first,
        end), without `end`, in which the answer counts messages of aborted transactions.

        `incarnation`: a number of the topic, which is another one after the topic was deleted and created again: that
        of an earlier answer, or 0 for any. Raises TopicNotFound if the topic does not exist, or was created again since
        that answer, because its indexes mean other messages then.
        """

    def owner(self, topic: str) -> str:
        """Returns HOST:PORT of the broker that owns the topic. `topic`: a partition, or a topic without partitions.
        Raises the errors that AdminClient lists, such as Unavailable if no broker can own the topic now.
        """

    def park_half(self, half: TxnId | str) -> None:
        """Parks a half message: its group is not asked about it any more, and an operator must decide. Raises NotFound
        if there is no such half message, TransactionEnded if it is decided, InvalidRequest if `half` is no id.
        """

    def partitions(self, topic: str) -> int:
        """Returns the number of partitions of a topic; 0: the topic is not partitioned, or is itself a partition.
        Raises TopicNotFound if the topic does not exist; does not create it.
        """

    def parts(self, topic: str) -> list[str]:
        """Returns the full names of a topic's partitions. For a topic without partitions, or for a single partition,
        returns only its own name. Raises TopicNotFound if the topic does not exist.
        """

    def pause_schedule(self, topic: str, *, name: str = "", paused: bool = False) -> None:
        """Pauses a schedule, or lets it go on. What was due meanwhile is not made up for."""

    def peek_messages(self, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
        """Returns the next messages that a subscription will deliver, at most `messages`; does not move the
        subscription. Returns an empty list if there is none. Raises InvalidRequest if `messages` is too large,
        TopicNotFound or SubscriptionNotFound if it does not exist, CorruptEntry if an entry is damaged.
        """

    def put_schema(self, topic: str, schema: SchemaInfo) -> int:
        """Registers a schema for a topic and returns its version. If the topic has an equal schema already, registers
        nothing and returns the version of that one. Raises IncompatibleSchema if the compatibility rule of the topic
        refuses the schema, InvalidSchema if its definition is malformed, NotAllowed if the topic has its maximum of
        schemas, TopicNotFound if there is no such topic, OutcomeUnknown if it may be registered.
        """

    def remove_namespace_policies(self, name: str, *fields: str) -> None:
        """Removes the named fields from the policies of a namespace: the namespace then inherits these policies from
        the broker again. Raises NamespaceNotFound if there is no such namespace, InvalidRequest if there is no such
        policy.
        """

    def remove_namespace_properties(self, name: str, *keys: str) -> None:
        """Removes the properties `keys` of a namespace; removes all of its properties if no key is given. A key that
        the namespace lacks is ignored. Raises NamespaceNotFound if there is no such namespace.
        """

    def remove_setting(self, *, name: str = "") -> None:
        """Removes what `change_setting` changed: each broker has its own value again. InvalidRequest."""

    def remove_tenant_policies(self, name: str, *fields: str) -> None:
        """Removes the named fields from the policies of a tenant. Raises TenantNotFound if there is no such tenant,
        InvalidRequest if there is no such policy.
        """

    def remove_topic_policies(self, topic: str, *fields: str) -> None:
        """Removes the named fields from the policies of a topic: the topic then inherits these policies from its
        namespace again. Raises TopicNotFound if there is no such topic, InvalidRequest if there is no such policy.
        """

    def remove_topic_properties(self, topic: str, *keys: str) -> None:
        """Removes the properties `keys` of a topic; removes all of its properties if no key is given. A key that the
        topic lacks is ignored. Raises TopicNotFound if there is no such topic.
        """

    def reset_subscription(self, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False) -> None:
        """Moves a subscription to the position `to`: a message id, or a time in ms since the epoch. The time is that at
        which a broker stored the message (not `publish_timestamp()`, which is the producer's clock). Delivery begins at
        the message of the id, or after it if `exclusive` is true. Raises TopicNotFound or SubscriptionNotFound if it
        does not exist.
        """

    def resource_group(self, name: str) -> values.ResourceGroup:
        """Returns the rates of a resource group. Raises NotFound if there is no such group."""

    def resource_groups(self) -> list[str]:
        """Returns the names of the resource groups, sorted."""

    def revive_half(self, half: TxnId | str) -> None:
        """Revives a parked half message: its group is asked about it again at once, and the count of the group's
        answers starts again at 0. Raises NotFound if there is no such half message, TransactionEnded if it is decided,
        InvalidRequest if `half` is no id.
        """

    def revoke_namespace_permission(self, name: str, role: str) -> None:
        """Revokes all permissions of `role` at the namespace; does nothing if it has none. Connected clients of that
        role are disconnected within a second. Raises NamespaceNotFound if there is no such namespace.
        """

    def revoke_subscription_permission(self, name: str, subscription: str, role: str) -> None:
        """Removes `role` from the roles that may use a restricted subscription. When no role is left, every role with
        the permission `consume` may use the subscription again. Raises NamespaceNotFound if there is no such namespace.
        """

    def revoke_topic_permission(self, topic: str, role: str) -> None:
        """Revokes all permissions that the role `role` has at the topic itself; does nothing if it has none.
        Permissions at the namespace of the topic stay. Raises TopicNotFound if there is no such topic.
        """

    def rollback_half(self, half: TxnId | str) -> None:
        """Drops a half message, also a parked one, without publishing it. Raises NotFound if there is no such half
        message, TransactionEnded if it was committed already, InvalidRequest if `half` is no id.
        """

    def run_schedule(self, topic: str, *, name: str = "") -> None:
        """Publishes the message of a schedule once, now. After an error it may have been published."""

    def schedules(self, topic: str) -> list[values.ScheduleStats]:
        """Returns the schedules of a topic, sorted by name. Each says when it fires next, what it has fired and, if it
        cannot fire, why. Raises TopicNotFound if there is no such topic.
        """

    def schema(self, topic: str, version: int | None = None) -> values.TopicSchema:
        """Returns the newest schema of a topic; if `version` is given, the schema with that version, even if it is
        deleted. Raises SchemaNotFound if there is no such schema, InvalidRequest if `version` is negative,
        TopicNotFound if there is no such topic.
        """

    def schema_version(self, topic: str, schema: SchemaInfo) -> int:
        """Returns the version under which a schema equal to `schema` is registered for the topic. Raises SchemaNotFound
        if there is none, TopicNotFound if there is no such topic.
        """

    def schemas(self, topic: str) -> list[values.TopicSchema]:
        """The versions that are not deleted, in their order. SchemaNotFound: there is none."""

    def set_namespace_policies(self, name: str, policies: Policies) -> None:
        """Sets policies of a namespace: each field of `policies` that is not None replaces the present value; the other
        policies stay as they are. Raises NamespaceNotFound if there is no such namespace, InvalidRequest for a wrong
        value.
        """

    def set_namespace_properties(self, name: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a namespace; its other properties stay. Raises InvalidRequest if they are too many or too
        long (proto/policies.py), NamespaceNotFound if there is no such namespace.
        """

    def set_resource_group(
        self,
        name: str,
        *,
        publish_rate_messages: int | None = None,
        publish_rate_bytes: int | None = None,
        dispatch_rate_messages: int | None = None,
        dispatch_rate_bytes: int | None = None,
    ) -> None:
        """Makes a resource group, or changes one: rates per second that all its namespaces share, in sum over brokers.
        0: no limit; None: the rate stays as it is, in a new group without limit. A namespace gets into the group by its
        policy `resource_group`. Raises InvalidName if the name is malformed, InvalidRequest for a wrong rate.
        """

    def set_subscription_filter(self, topic: str, name: str, *, filter: str = "") -> None:
        """Sets the filter of a subscription, for what is not acknowledged. Busy: consumers are connected."""

    def set_subscription_prefix_mode(self, name: str, on: bool) -> None:
        """Switches the subscription prefix mode of a namespace on or off. While it is on, the name of a subscription
        must be the role of its consumer, or begin with the role and `-`. Raises NamespaceNotFound if there is no such
        namespace.
        """

    def set_subscription_properties(self, topic: str, name: str, properties: Mapping[str, str]) -> None:
        """Replaces all properties of a subscription by `properties`. Raises NotAllowed if the topic is not persistent,
        TopicNotFound or SubscriptionNotFound if it does not exist.
        """

    def set_tenant_policies(self, name: str, policies: Policies) -> None:
        """Sets policies of a tenant: each field of `policies` that is not None replaces the present value; the other
        policies stay as they are. Raises TenantNotFound if there is no such tenant, InvalidRequest for a wrong value
        or a policy that tenants do not have.
        """

    def set_topic_policies(self, topic: str, policies: Policies) -> None:
        """Sets policies of a topic: each field of `policies` that is not None replaces the present value; the other
        policies stay as they are. Raises TopicNotFound if there is no such topic, InvalidRequest for a wrong value or a
        policy that only namespaces have.
        """

    def set_topic_properties(self, topic: str, properties: Mapping[str, str]) -> None:
        """Sets properties of a topic; its other properties stay. Raises InvalidRequest if the properties are too many
        or too long (proto/policies.py), TopicNotFound if there is no such topic.
        """

    def shared_limits(self, *, here: bool = False) -> values.SharedLimits:
        """Returns the limits in sum over brokers: each broker's share, its use, how often something waited, and why."""

    def skip_lost(
        self,
        topic: str,
        *,
        ledger_id: int | None = None,
        force: bool = False,
        forgotten: str = "",
    ) -> values.SkippedLost:
        """Skips, for all readers of one partition, the entries that every replica certainly lost: in all ledgers, or
        only in the ledger `ledger_id`. Returns the ranges that are skipped now, and the subscriptions concerned.
        Unloads the topic.

        Raises NotAllowed if a replica that does not answer may have the entries, unless `force` is true; InvalidRequest
        if the topic is not persistent, or `forgotten` is another text; TopicNotFound if there is no such topic. Skipped
        entries stay skipped, even if such a replica comes back.

        The field `forgotten` of the result names the transactions whose outcomes are lost, which hold back all later
        messages. The parameter `forgotten` decides about them: "commit" shows their messages, "abort" hides them for
        ever. Then no entry is skipped.
        """

    def skip_messages(self, topic: str, name: str, messages: int = -1) -> None:
        """Acknowledges the next `messages` messages of a subscription without delivering them; -1: all messages. If
        `name` is empty, does so for every durable subscription. Raises InvalidRequest if `messages` is below -1,
        TopicNotFound or SubscriptionNotFound if it does not exist.
        """

    def split_bundles(self, name: str, *, bundles: int = 0) -> values.SplitBundles:
        """Doubles the number of a namespace's bundles, once or until there are `bundles`. No topic moves or closes."""

    def subscription_filter(self, topic: str, name: str) -> values.SubscriptionFilterState:
        """Returns the filter of a subscription of one partition, and what it has done there."""

    def subscription_properties(self, topic: str, name: str) -> dict[str, str]:
        """The properties, name to value."""

    def subscriptions(self, topic: str) -> list[str]:
        """Returns the names of the durable subscriptions, sorted."""

    def tenant(self, name: str) -> values.TenantInfo:
        """Returns the settings of a tenant. Raises TenantNotFound."""

    def tenant_policies(self, name: str, *, applied: bool = False) -> Policies:
        """Returns the policies that are set for the tenant (None: not set); if `applied` is true, returns every policy,
        with the values that are inherited from the broker. Raises TenantNotFound if there is no such tenant.
        """

    def tenants(self) -> list[str]:
        """Returns the names of the tenants, sorted."""

    def terminate_topic(self, topic: str) -> MessageId:
        """Terminates a topic: its messages can still be read, and new messages are refused. Returns the id of its last
        entry; the entry id is -1 if the topic never had one. May be called again. Raises TopicNotFound if there is no
        such topic.
        """

    def test_schema(self, topic: str, schema: SchemaInfo) -> values.SchemaTest:
        """Tests a schema against those of a topic without registering it. Returns the reason why the schema would be
        refused (empty: it could be registered), and the compatibility rule that was applied. Raises InvalidSchema if
        the definition is malformed, TopicNotFound if there is no such topic.
        """

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
        """Returns the permissions that were granted for this topic with all its partitions. Permissions of its
        namespace are not included. Raises TopicNotFound if there is no such topic.
        """

    def topic_policies(self, topic: str, *, applied: bool = False) -> Policies:
        """Returns the policies that are set for a topic (None: not set); if `applied` is true, returns every policy,
        with the values that the topic inherits from its namespace, then from the broker. Raises TopicNotFound if there
        is no such topic.
        """

    def topic_properties(self, topic: str) -> dict[str, str]:
        """Returns the properties of a topic; for a partition, those of its partitioned topic. Properties of the
        namespace are not included. Raises TopicNotFound if there is no such topic.
        """

    def topic_stats(self, topic: str, *, precise: bool = False) -> values.TopicStats:
        """Returns the statistics of one partition, or of a topic without partitions. Backlogs are counted in messages
        if `precise` is true, else in entries. Raises TopicNotFound if there is no such topic.
        """

    def topics(self, namespace: str = "public/default", *, partitions: bool = False) -> list[str]:
        """Returns the full names of a namespace's topics, sorted. If `partitions` is true, the list has the name of
        each partition in place of the name of its topic.

        Non-persistent topics are included if they have partitions or are in use. Raises TenantNotFound or
        NamespaceNotFound if there is no such namespace; a caller who does not administer the tenant gets an empty list
        then. Asks in pages of TOPICS_PER_PAGE names, so the list may change between two of them.
        """

    def trace_message(
        self,
        topic: str,
        *,
        ledger_id: int = 0,
        entry_id: int = 0,
        batch_index: int = 0,
    ) -> values.MessageTrace:
        """Returns what has become of a message: whether the topic has it, and its state in each subscription."""

    def transaction(self, txn: TxnId | str) -> values.TransactionStats:
        """Returns the state and the participants of one transaction. Raises NotFound if the coordinator never issued
        this id, or there is no such coordinator; InvalidRequest if `txn` is no id of a transaction.
        """

    def transaction_at(self, txn: TxnId | str, topic: str) -> values.TransactionHere:
        """Returns the part of a transaction at one topic (a partition, or a topic without partitions), and the
        operations that wait at this topic for the transaction's end. Loads the topic if it is not loaded. Raises
        TopicNotFound if it does not exist and may not be created, InvalidRequest if `txn` is no id of a transaction.
        """

    def transactions(self, coordinator: int, limit: int = 1000) -> values.CoordinatorTransactions:
        """Returns the transactions of one coordinator that have not ended yet, the oldest first; at most `limit`.
        Raises NotFound if there is no such coordinator.
        """

    def trim_topic(self, topic: str) -> None:
        """Deletes the ledgers that no subscription and no retention needs, now."""

    def truncate_topic(self, topic: str) -> None:
        """Acknowledges everything for every subscription, and deletes all ledgers but the one that is written."""

    def try_filter(self, topic: str, *, filter: str = "", messages: int = 0) -> values.FilterTrial:
        """Returns what a filter does with the newest messages of one partition; changes nothing."""

    def undrain_broker(self, name: str) -> None:
        """Ends the draining of a broker: the broker may own bundles again. Bundles that it gave away do not return by
        themselves. Raises NotFound if there is no such broker.
        """

    def unload_namespace(self, name: str, bundle: str = "", *, destination: str = "") -> values.Unloaded:
        """Unloads all bundles of a namespace from their brokers, or only the bundle `bundle`. Returns how many topics
        and bundles were unloaded. At the next look-up other brokers own the topics; if `destination` is given, the
        broker with that name or address does. A broker of an older release ignores `destination`. Raises
        NamespaceNotFound if there is no such namespace, NotFound if no broker has that name or address, NotAllowed if
        that broker gets no bundles.
        """

    def unload_topic(self, topic: str) -> None:
        """Unloads a topic: its owner closes it, and the next use opens it again."""

    def unsubscribe_namespace(self, name: str, subscription: str, *, force: bool = False) -> int:
        """Deletes `subscription` from every topic of the namespace that has it. Returns the number of topics and
        partitions from which it was deleted. `force`: also while consumers are connected; otherwise Busy is raised for
        them. A failure at one topic does not stop the others; the first such error is raised at the end. Raises
        NamespaceNotFound if there is no such namespace.
        """

    def update_namespace(
        self,
        name: str,
        *,
        bundles: int | None = None,
        auto_topic_creation: bool | None = None,
        default_partitions: int | None = None,
        is_creation_set: bool | None = None,
    ) -> None:
        """Changes settings of a namespace; a setting that is None stays as it is. `is_creation_set`: whether the
        namespace has its own rules for creating topics (the two settings before it); None: true as soon as one of them
        was ever set. Raises NamespaceNotFound if there is no such namespace; InvalidRequest if a number is out of
        bounds, or `bundles` is not the number with which the namespace was created.
        """

    def update_tenant(
        self,
        name: str,
        *,
        admin_roles: Sequence[str] = (),
        allowed_clusters: Sequence[str] = (),
    ) -> None:
        """Replaces the admin roles and the allowed clusters of a tenant; a list that is left out becomes empty. Raises
        TenantNotFound if there is no such tenant.
        """

    def update_topic(self, topic: str, *, partitions: int) -> None:
        """Increases the number of partitions of a partitioned topic to `partitions`. Raises TopicNotFound if there is
        no such topic; InvalidRequest if it is not partitioned, has more partitions already, or `partitions` is too
        large; NotAllowed if the namespace has its maximum of topics.
        """

    def why_kept(self, topic: str) -> values.WhyKept:
        """Returns what keeps each ledger of one partition: a subscription, retention, a transaction, compaction."""

    def why_stuck(self, topic: str, name: str) -> values.WhyStuck:
        """Returns why a subscription of one partition does not get on, and what would end that, as sentences."""
