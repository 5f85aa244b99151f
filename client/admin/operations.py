"""The operations of administration as data, and what a transport has to do with them.

An operation has a name, the arguments that AdminClient passes by keyword (plain values: text, numbers, MessageId,
sequences, mappings) and the type of its answer. How they become bytes, and which server is asked, is the transport's:
client/admin/grpc_transport.py now; REST is another table over the same operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from ...proto import statistics as values
from ...proto.transactions import TxnState
from ..model.message_id import MessageId
from .stored_messages import StoredMessage

T = TypeVar("T")


class AskedOf(Enum):
    """Who can answer."""

    ANY = "any broker"
    OWNER = "the owner of the argument `topic`: a partition, or a topic without partitions"


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """What a Transport carries: a name, the type of the answer, and who can answer."""

    name: str
    answer: type[T]
    asked_of: AskedOf = AskedOf.ANY


def _of_topic(name: str, answer: type[T]) -> Operation[T]:
    return Operation(name, answer, AskedOf.OWNER)


class Transport(Protocol):
    """Carries operations to the cluster. Belongs to one event loop."""

    async def call(self, operation: Operation[T], arguments: Mapping[str, object], *, at: str = "") -> T:
        """The answer. `at`: HOST:PORT of the broker that is asked; empty: one that can answer.

        Raises the MagnetarError that the server answered with; Unavailable, ConnectionLost or TimedOut when none did
        within the time of the transport.
        """
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...


NONE = type(None)

LIST_TENANTS = Operation("ListTenants", tuple[str, ...])
CREATE_TENANT = Operation("CreateTenant", NONE)
GET_TENANT = Operation("GetTenant", values.TenantInfo)
UPDATE_TENANT = Operation("UpdateTenant", NONE)
DELETE_TENANT = Operation("DeleteTenant", NONE)

LIST_NAMESPACES = Operation("ListNamespaces", tuple[str, ...])
CREATE_NAMESPACE = Operation("CreateNamespace", NONE)
GET_NAMESPACE = Operation("GetNamespace", values.NamespaceInfo)
UPDATE_NAMESPACE = Operation("UpdateNamespace", NONE)
DELETE_NAMESPACE = Operation("DeleteNamespace", NONE)
UNLOAD_NAMESPACE = Operation("UnloadNamespace", values.Unloaded)
GET_PERMISSIONS = Operation("GetPermissions", values.Permissions)
CHANGE_PERMISSIONS = Operation("ChangePermissions", NONE)
GET_POLICIES = Operation("GetPolicies", str)
CHANGE_POLICIES = Operation("ChangePolicies", NONE)
GET_PROPERTIES = Operation("GetProperties", dict[str, str])
CHANGE_PROPERTIES = Operation("ChangeProperties", NONE)

LIST_TOPICS = Operation("ListTopics", tuple[str, ...])
CREATE_TOPIC = Operation("CreateTopic", NONE)
UPDATE_TOPIC = Operation("UpdateTopic", NONE)
DELETE_TOPIC = Operation("DeleteTopic", NONE)
CHECK_DELETE = Operation("CheckDelete", int)
PARTITIONS = Operation("Partitions", int)
LOOKUP = Operation("Lookup", str)
OFFSETS = _of_topic("Offsets", values.TopicOffsets)
TOPIC_STATS = _of_topic("TopicStats", values.TopicStats)
NAMESPACE_STATS = Operation("NamespaceStats", values.NamespaceStats)
TOPIC_INTERNAL_STATS = _of_topic("TopicInternalStats", values.TopicInternalStats)
UNLOAD_TOPIC = _of_topic("UnloadTopic", NONE)
TRIM_TOPIC = _of_topic("TrimTopic", NONE)
TRUNCATE_TOPIC = _of_topic("TruncateTopic", NONE)
SKIP_LOST = _of_topic("SkipLost", values.SkippedLost)
TERMINATE_TOPIC = _of_topic("TerminateTopic", MessageId)
COMPACT = _of_topic("Compact", NONE)
COMPACTION_STATUS = _of_topic("CompactionStatus", values.CompactionStatus)
LAST_MESSAGE_ID = _of_topic("LastMessageId", MessageId)
MESSAGE_ID_BY_TIME = _of_topic("MessageIdByTime", MessageId)
BACKLOG_SIZE = _of_topic("BacklogSize", int)
GET_MESSAGE = _of_topic("GetMessage", tuple[StoredMessage, ...])
EXAMINE_MESSAGES = _of_topic("ExamineMessages", tuple[StoredMessage, ...])

LIST_SUBSCRIPTIONS = _of_topic("ListSubscriptions", tuple[str, ...])
CREATE_SUBSCRIPTION = _of_topic("CreateSubscription", NONE)
DELETE_SUBSCRIPTION = _of_topic("DeleteSubscription", NONE)
GET_SUBSCRIPTION_PROPERTIES = _of_topic("GetSubscriptionProperties", dict[str, str])
SET_SUBSCRIPTION_PROPERTIES = _of_topic("SetSubscriptionProperties", NONE)
RESET_SUBSCRIPTION = _of_topic("ResetSubscription", NONE)
ADVANCE_SUBSCRIPTION = _of_topic("AdvanceSubscription", NONE)
SKIP_MESSAGES = _of_topic("SkipMessages", NONE)
EXPIRE_MESSAGES = _of_topic("ExpireMessages", int)
PEEK_MESSAGES = _of_topic("PeekMessages", tuple[StoredMessage, ...])
ANALYZE_BACKLOG = _of_topic("AnalyzeBacklog", values.BacklogAnalysis)

GET_SCHEMA = Operation("GetSchema", values.TopicSchema)
LIST_SCHEMAS = Operation("ListSchemas", tuple[values.TopicSchema, ...])
PUT_SCHEMA = Operation("PutSchema", int)
FIND_SCHEMA = Operation("FindSchema", int)
TEST_SCHEMA = Operation("TestSchema", values.SchemaTest)
DELETE_SCHEMA: Operation[int | None] = Operation("DeleteSchema", int)

LIST_TRANSACTIONS = Operation("ListTransactions", values.CoordinatorTransactions)
ABORT_TRANSACTION = Operation("AbortTransaction", TxnState)
DETACH_TRANSACTION = Operation("DetachTransaction", NONE)
LIST_HALVES = Operation("ListHalves", values.CoordinatorHalves)
CHANGE_HALF = Operation("ChangeHalf", NONE)
TOPIC_TRANSACTION = _of_topic("TopicTransaction", values.TransactionHere)

LIST_BROKERS = Operation("ListBrokers", tuple[values.BrokerInfo, ...])
LIST_BOOKIES = Operation("ListBookies", tuple[values.BookieInfo, ...])
FIND_ORPHANS = Operation("FindOrphans", values.Orphans)
