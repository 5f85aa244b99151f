"""The table of the operations of administration, from which gRPC, REST, the command line and clients follow.

    TRIM_TOPIC: Operation[None] = _topic("TrimTopic", MANAGE, routes=(HttpRoute("POST", "/trim", "Deletes …"),))

A row defines an operation: its name, the type of its answer (the annotation), which broker answers it, and which
permission a caller needs. What follows from a row:

| face | how |
|---|---|
| gRPC | the rpc of that name (runtime/network.py `list_rpc_names`), translated by proto/translation.py |
| permission | broker/access/table_core.py `PERMISSION_RULES`, asked at the border (broker/grpc/checked.py) |
| REST | each of `routes` (broker/rest/transactions_routes.py), or a function in broker/rest/ |
| the command line | the verb of `cli` (cli/admin/rows.py), or a function in cli/admin/ |
| AdminClient, Admin | the method of `method` (client/admin/grpc_transport.py), or a function in client/admin/ |
| docs/administration.md | a line of its table (tests/docs/tables.py) |

A new operation is a row, and the function that does it: the method of `AdminService` (broker/grpc/admin.py) with its
name in snake case. Its rpc is a line of `service Admin` in wire.proto, or the row names its messages (`request`,
`reply`); a message that is missing in wire.proto must be added there. Special behaviour of one interface (a stream,
progress, Pulsar's own JSON) is a function of that interface. Guard: tests/broker/test_new_operation.py makes a new
operation. This module imports no message and no value, so that the command line and an idle server load neither.
"""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from . import statistics as values
    from .states import TxnState

# ----------------------------------------------------------------------------------------------------- operation
# What a row of the table of operations says (proto/operations.py).
#
# Annotations are not postponed here: a named tuple would compile each of them again, at the start of every command.


T = TypeVar("T")


class Permission(Enum):
    """The permission that an operation requires of its caller. The values describe it."""

    OPERATE = "a super user"
    MANAGE = "an administrator of the tenant, or a super user"
    PRODUCE = "`produce` on the topic"
    CONSUME = "`consume` on the topic, and the subscription's list"
    LOOKUP = "`produce` or `consume` on the topic"
    SHOWN = "every caller; the answer has what it may see"
    OWN = "every caller, for what its role began; of another role's it is told what it is told of what does not exist"


class PermissionScope(Enum):
    """The kind of object on which a permission is required, such as a topic."""

    NOTHING = "the cluster"
    TENANT = "tenant"
    NAMESPACE = "namespace"
    TOPIC = "topic"
    PLACE = "namespace or topic"  # fields `namespace` and `topic`; both empty: the cluster, for super users


class PermissionRule(NamedTuple):
    """The permission that an operation requires of its caller, the kind of object on which it is required, and the
    field of the request that names the object. `subscription`: the field that names a subscription: if that is
    restricted to some roles, the caller must have one of them. If a request to skip or expire messages leaves it empty,
    it changes all subscriptions, and requires MANAGE."""

    permission: Permission
    on: PermissionScope = PermissionScope.NOTHING
    field: str = ""
    subscription: str = ""


class AnsweringBroker(Enum):
    """Which broker of the cluster answers an operation."""

    ANY = "any broker"
    OWNER = "the owner of the argument `topic`: a partition, or a topic without partitions"
    COORDINATOR = "the broker that has the coordinator of the transaction; any other one names it"


class RequestField(NamedTuple):
    """A field of an operation's request. It becomes a keyword of the client's method, an option of the command line's
    verb, and a query parameter of the REST route."""

    name: str
    kind: type[bool] | type[int] | type[str]  # its default is that of the type
    help: str = ""  # of the option


class PathPart(NamedTuple):
    """A variable part in the path of a REST route. Its value becomes the field `field` of the request."""

    name: str
    field: str
    number: str = ""  # what an error calls the number that it is; empty: it is text
    least: int = 0


class HttpRoute(NamedTuple):
    """A REST route of an operation: its method, its path and its documentation. The path is below that of the topic,
    namespace or tenant, or a path of its own. In `path`, {N}, {T} and {S} stand for the paths of a namespace, a topic
    and a subscription."""

    method: str
    path: str
    summary: str
    busy: int = 409  # the status of what is in use
    answer: str = ""  # how the document calls what is answered; empty: 204
    name: str = ""  # of its handler, in the document; empty: that of the operation
    parts: tuple[PathPart, ...] = ()
    fixed: tuple[tuple[str, object], ...] = ()  # fields of the request that the route says
    body: tuple[str, str] = ("", "")  # the field that the body's object of texts is, and how the document calls it


class CliVerb(NamedTuple):
    """The verb of an operation on the command line, with its help and its output. In the output `{place}` stands for
    the full name of the topic, namespace or tenant, and `{subscription}` for the value of the option -s."""

    words: str  # "topics trim"
    line: str  # of the group's help
    text: str  # of its own help
    example: str  # the words after those of the verb
    done: str = ""  # what is printed; empty: the answer
    confirm: str = ""  # what is asked first, because it cannot be undone
    empty: str = "none"  # what is printed of an answer that is an empty list


class Operation(NamedTuple, Generic[T]):
    """One administrative operation: a row of the table of operations. Client methods, REST routes and command line
    verbs are made from it. T is the type of its answer."""

    name: str
    rule: PermissionRule
    asked_of: AnsweringBroker = AnsweringBroker.ANY
    service: str = "Admin"
    of_reply: str = ""  # the field that is the answer; empty: the whole reply, or its first field
    takes: tuple[RequestField, ...] = ()  # fields of the request besides the place
    method: str = ""  # of AdminClient, where that follows from the row
    help: str = ""  # its docstring
    routes: tuple[HttpRoute, ...] = ()
    cli: CliVerb | None = None
    request: str = ""  # messages of wire.proto, of a row whose rpc wire.proto does not list
    reply: str = ""


def make_topic_rule(permission: Permission, field: str = "name", subscription: str = "") -> PermissionRule:
    """Returns the rule that `permission` is required on the topic that the field `field` of the request names.
    `subscription`: the field that names a subscription; "": there is none."""
    return PermissionRule(permission, PermissionScope.TOPIC, field, subscription)


# ---------------------------------------------------------------------------------------------------- operations


# ------------------------------------------------------------------------------------ what callers need
OPERATE_RULE = PermissionRule(Permission.OPERATE)
NAMESPACE_RULE = PermissionRule(Permission.MANAGE, PermissionScope.NAMESPACE, "name")
SHOWN_RULE = PermissionRule(Permission.SHOWN, PermissionScope.NAMESPACE, "namespace")
MANAGE_RULE = make_topic_rule(Permission.MANAGE)
LOOKUP_RULE = make_topic_rule(Permission.LOOKUP)
CONSUME_RULE = make_topic_rule(Permission.CONSUME, "topic")
SUBSCRIPTION_RULE = make_topic_rule(Permission.CONSUME, "topic", "name")
TOPIC_FIELD_RULE = make_topic_rule(Permission.MANAGE, "topic")
SCHEMA_RULE = make_topic_rule(Permission.LOOKUP, "topic")
PLACE_RULE = PermissionRule(Permission.MANAGE, PermissionScope.PLACE)


def _topic(name: str, rule: PermissionRule, **faces: Any) -> Operation[Any]:
    """Returns an operation on a topic, which the topic's owner answers."""
    return Operation(name, rule, AnsweringBroker.OWNER, **faces)


# ------------------------------------------------------------------------------------ tenants
LIST_TENANTS: Operation[tuple[str, ...]] = Operation(
    "ListTenants", PermissionRule(Permission.SHOWN), method="tenants", help="Returns the names of the tenants, sorted.",
    routes=(HttpRoute("GET", "/admin/v2/tenants", "The tenants that the caller administers.", answer="[name]"),),
    cli=CliVerb("tenants list", "Names of all tenants.", "Names of all tenants.", "-o json", empty="no tenants"),
)  # fmt: skip
CREATE_TENANT: Operation[None] = Operation("CreateTenant", OPERATE_RULE)
GET_TENANT: Operation[values.TenantInfo] = Operation(
    "GetTenant", PermissionRule(Permission.MANAGE, PermissionScope.TENANT, "name"), method="tenant",
    help="Returns the settings of a tenant. Raises TenantNotFound.",
)  # fmt: skip
UPDATE_TENANT: Operation[None] = Operation("UpdateTenant", OPERATE_RULE)
DELETE_TENANT: Operation[None] = Operation("DeleteTenant", OPERATE_RULE)
GET_TENANT_POLICIES: Operation[str] = Operation(
    "GetTenantPolicies", PermissionRule(Permission.MANAGE, PermissionScope.TENANT, "name")
)
CHANGE_TENANT_POLICIES: Operation[None] = Operation("ChangeTenantPolicies", OPERATE_RULE)

# ------------------------------------------------------------------------------------ resource groups
LIST_RESOURCE_GROUPS: Operation[tuple[str, ...]] = Operation(
    "ListResourceGroups", OPERATE_RULE, method="resource_groups",
    help="Returns the names of the resource groups, sorted.",
    routes=(HttpRoute("GET", "/admin/v2/resourcegroups", "The resource groups.", answer="[name]"),),
    cli=CliVerb(
        "resourcegroups list", "Names of all resource groups.", "Names of all resource groups.", "-o json",
        empty="no resource groups",
    ),
)  # fmt: skip
GET_RESOURCE_GROUP: Operation[values.ResourceGroup] = Operation("GetResourceGroup", OPERATE_RULE)
SET_RESOURCE_GROUP: Operation[None] = Operation("SetResourceGroup", OPERATE_RULE)
DELETE_RESOURCE_GROUP: Operation[None] = Operation("DeleteResourceGroup", OPERATE_RULE, routes=(
    HttpRoute("DELETE", "/admin/v2/resourcegroups/{group}", "Deletes a resource group that no namespace has.", busy=412,
              parts=(PathPart("group", "name"),)),
))  # fmt: skip

# ------------------------------------------------------------------------------------ namespaces
LIST_NAMESPACES: Operation[tuple[str, ...]] = Operation(
    "ListNamespaces", PermissionRule(Permission.MANAGE, PermissionScope.TENANT, "name"),
    routes=(HttpRoute(
        "GET", "/admin/v2/namespaces/{tenant}", "The namespaces of a tenant.", answer="[tenant/namespace]"
    ),),
)  # fmt: skip
CREATE_NAMESPACE: Operation[None] = Operation("CreateNamespace", NAMESPACE_RULE)
GET_NAMESPACE: Operation[values.NamespaceInfo] = Operation(
    "GetNamespace",
    NAMESPACE_RULE,
    method="namespace",
    help="Returns the settings of a namespace. Raises NamespaceNotFound.",
)
UPDATE_NAMESPACE: Operation[None] = Operation("UpdateNamespace", NAMESPACE_RULE)
DELETE_NAMESPACE: Operation[None] = Operation(
    "DeleteNamespace", NAMESPACE_RULE, takes=(RequestField("force", bool, "Delete its topics too."),),
    method="delete_namespace", help="Deletes a namespace. Busy: it has topics, which `force` deletes too.",
    routes=(HttpRoute("DELETE", "", "Deletes a namespace; with `force` its topics first."),),
)  # fmt: skip
UNLOAD_NAMESPACE: Operation[values.Unloaded] = Operation("UnloadNamespace", OPERATE_RULE, takes=(
    RequestField("destination", str, "The broker that gets the bundles: its name or address."),
), routes=(
    HttpRoute("PUT", "{N}/unload", "Brokers give its topics back; the next look-up loads them."),
    HttpRoute("PUT", "{N}/{bundle}/unload", "One bundle is given back, or moves to the broker "
         "`destination`; `destinationBroker` is not looked at.", name="unload_bundle",
         parts=(PathPart("bundle", "bundle"),)),
))  # fmt: skip
SPLIT_BUNDLES: Operation[values.SplitBundles] = Operation(
    "SplitBundles", NAMESPACE_RULE, method="split_bundles",
    takes=(RequestField("bundles", int, "How many there are to be; 0: twice as many."),),
    help="Doubles the number of a namespace's bundles, once or until there are `bundles`. No topic moves or closes.",
    routes=(HttpRoute("PUT", "{N}/{bundle}/split", "The bundle, and each other one of the namespace, is divided into "
                 "two; no topic moves.", parts=(PathPart("bundle", "bundle"),)),),
    cli=CliVerb(
        "namespaces split-bundles", "Double the number of a namespace's bundles.",
        "Double the number of a namespace's bundles, once or until there are --bundles, so that more brokers can share "
        "its topics. Each broker keeps what it has: no topic moves or closes. It cannot be undone.",
        "public/default --bundles 64", "each bundle of namespace {place} is divided",
    ),
)  # fmt: skip
GET_PERMISSIONS: Operation[values.Permissions] = Operation("GetPermissions", PLACE_RULE)
CHANGE_PERMISSIONS: Operation[None] = Operation("ChangePermissions", PLACE_RULE, routes=(
    HttpRoute("DELETE", "{N}/permissions/{role}", "Revokes what a role was granted.", name="revoke_on_namespace",
         parts=(PathPart("role", "revoke"),)),
    HttpRoute("DELETE", "{T}/permissions/{role}", "Revokes what a role was granted on the topic.",
    name="revoke_on_topic",
         parts=(PathPart("role", "revoke"),)),
))  # fmt: skip
GET_POLICIES: Operation[str] = Operation("GetPolicies", PLACE_RULE)
CHANGE_POLICIES: Operation[None] = Operation("ChangePolicies", PLACE_RULE)
GET_PROPERTIES: Operation[dict[str, str]] = Operation("GetProperties", PLACE_RULE, routes=(
    HttpRoute("GET", "{N}/properties", "What users noted of the namespace.", answer="{key: value}", name="properties"),
    HttpRoute("GET", "{T}/properties", "What users noted of the topic.", answer="{key: value}", name="properties"),
))  # fmt: skip
CHANGE_PROPERTIES: Operation[None] = Operation("ChangeProperties", PLACE_RULE, routes=(
    HttpRoute("PUT", "{N}/properties", "These are noted; others stay.", name="set_properties", body=("set",
    "{key: value}")),
    HttpRoute("DELETE", "{N}/properties", "None is left.", name="clear_properties", fixed=(("clear", True),)),
    HttpRoute("PUT", "{T}/properties", "These are noted; others stay.", name="update_properties",
         body=("set", "{key: value}")),
))  # fmt: skip

# ------------------------------------------------------------------------------------ topics
LIST_TOPICS: Operation[tuple[str, ...]] = Operation("ListTopics", SHOWN_RULE)
CREATE_TOPIC: Operation[None] = Operation(
    "CreateTopic", MANAGE_RULE, takes=(RequestField("partitions", int, "0: not partitioned (default)."),),
    method="create_topic",
    help="Creates a topic. `partitions` 0: not partitioned. AlreadyExists.",
)  # fmt: skip
UPDATE_TOPIC: Operation[None] = Operation("UpdateTopic", MANAGE_RULE)
DELETE_TOPIC: Operation[None] = Operation("DeleteTopic", MANAGE_RULE)
CHECK_DELETE: Operation[int] = Operation("CheckDelete", MANAGE_RULE)
PARTITIONS: Operation[int] = Operation("Partitions", SCHEMA_RULE, service="Broker", of_reply="partitions")
LOOKUP_TOPIC: Operation[str] = Operation("Lookup", SCHEMA_RULE, service="Broker", of_reply="owner")
OFFSETS: Operation[values.TopicOffsets] = _topic(
    "Offsets", make_topic_rule(Permission.CONSUME, "topic", "subscription"), service="Broker"
)
TOPIC_STATS: Operation[values.TopicStats] = _topic("TopicStats", LOOKUP_RULE)
NAMESPACE_STATS: Operation[values.NamespaceStats] = Operation("NamespaceStats", SHOWN_RULE)
TOPIC_INTERNAL_STATS: Operation[values.TopicInternalStats] = _topic(
    "TopicInternalStats", LOOKUP_RULE, method="topic_internal_stats",
    help="The log of one partition: its ledgers, positions and replication.",
)  # fmt: skip
UNLOAD_TOPIC: Operation[None] = _topic(
    "UnloadTopic", MANAGE_RULE, method="unload_topic",
    help="Unloads a topic: its owner closes it, and the next use opens it again.",
    routes=(HttpRoute("PUT", "/unload", "Its broker gives it back; the next look-up loads it."),),
)  # fmt: skip
TRIM_TOPIC: Operation[None] = _topic(
    "TrimTopic", MANAGE_RULE, method="trim_topic",
    help="Deletes the ledgers that no subscription and no retention needs, now.",
    routes=(HttpRoute("POST", "/trim",
    "Deletes what every subscription has acknowledged and retention does not keep."),),
    cli=CliVerb(
        "topics trim", "Delete ledgers that everybody has acknowledged, now.",
        "Delete the ledgers that no subscription and no retention needs, now rather than at the next round.", "orders",
        "topic {place} trimmed",
    ),
)  # fmt: skip
TRUNCATE_TOPIC: Operation[None] = _topic(
    "TruncateTopic", MANAGE_RULE, method="truncate_topic",
    help="Acknowledges everything for every subscription, and deletes all ledgers but the one that is written.",
    routes=(HttpRoute("DELETE", "/truncate", "Acknowledges everything and deletes what nothing else holds."),),
    cli=CliVerb(
        "topics truncate", "Acknowledge everything and delete all that is not written to.",
        "Acknowledge everything for every subscription, and delete all ledgers but the one that is written.", "orders",
        "topic {place} truncated", "Delete all messages of {place}",
    ),
)  # fmt: skip
NO_LEDGER = (1 << 62) - 1
"""The ledger that a decision about lost outcomes names in SKIP_LOST: a broker that knows no such decision refuses it,
and skips nothing."""
SKIP_LOST: Operation[values.SkippedLost] = _topic("SkipLost", TOPIC_FIELD_RULE)
TERMINATE_TOPIC: Operation[Any] = _topic("TerminateTopic", MANAGE_RULE)
COMPACT: Operation[None] = _topic(
    "Compact", MANAGE_RULE, method="compact", help="Starts a compaction. Busy: one is running.",
    routes=(HttpRoute("PUT", "/compaction", "Starts a compaction."),),
    cli=CliVerb(
        "topics compact", "Keep the latest message of each key, for who reads compacted.",
        "Start to compact a topic: of each key its latest message is kept for consumers that read compacted.", "prices",
        "topic {place} is being compacted; see compaction-status",
    ),
)  # fmt: skip
COMPACTION_STATUS: Operation[values.CompactionStatus] = _topic(
    "CompactionStatus", MANAGE_RULE, method="compaction_status",
    help="Returns the last compaction of one partition, and the compacted ledger that is read now.",
)  # fmt: skip
LAST_MESSAGE_ID: Operation[Any] = _topic("LastMessageId", make_topic_rule(Permission.CONSUME))
MESSAGE_ID_BY_TIME: Operation[Any] = _topic("MessageIdByTime", CONSUME_RULE)
BACKLOG_SIZE: Operation[int] = _topic("BacklogSize", CONSUME_RULE)
GET_MESSAGE: Operation[Any] = _topic("GetMessage", CONSUME_RULE)
TRACE_MESSAGE: Operation[values.MessageTrace] = _topic(
    "TraceMessage", CONSUME_RULE, method="trace_message",
    takes=(
        RequestField("ledger_id", int, "Of its id."), RequestField("entry_id", int, "Of its id."),
        RequestField("batch_index", int, "Of its id; -1: the whole entry."),
    ),
    help="Returns what has become of a message: whether the topic has it, and its state in each subscription.",
    routes=(HttpRoute("GET", "/trace", "What has become of a message.", answer="MessageTrace"),),
)  # fmt: skip
CANCEL_DELAYED: Operation[values.CancelledMessage] = _topic(
    "CancelDelayed", make_topic_rule(Permission.PRODUCE, "topic"), method="cancel_delayed",
    takes=(
        RequestField("ledger_id", int, "Of its id."), RequestField("entry_id", int, "Of its id."),
        RequestField("batch_index", int, "Of its id; -1: the whole entry."),
    ),
    help="Acknowledges a delayed message for every subscription. NotAllowed: one of them has got it, or it is due.",
)  # fmt: skip
FIND_MESSAGES: Operation[values.FoundMessages] = _topic("FindMessages", CONSUME_RULE)
EXAMINE_MESSAGES: Operation[Any] = _topic("ExamineMessages", CONSUME_RULE)

# ------------------------------------------------------------------------------------ schedules
_PRODUCE = make_topic_rule(Permission.PRODUCE, "topic")
_SCHEDULE = (PathPart("schedule", "name"),)
CREATE_SCHEDULE: Operation[None] = Operation("CreateSchedule", _PRODUCE)
LIST_SCHEDULES: Operation[tuple[values.ScheduleStats, ...]] = Operation("ListSchedules", _PRODUCE)
DELETE_SCHEDULE: Operation[None] = Operation(
    "DeleteSchedule", _PRODUCE, takes=(RequestField("name", str, "Of the schedule."),), method="delete_schedule",
    help="Deletes a schedule. NotFound: the topic has none of that name.",
    routes=(HttpRoute("DELETE", "/schedules/{schedule}", "Deletes a schedule.", parts=_SCHEDULE),),
)  # fmt: skip
PAUSE_SCHEDULE: Operation[None] = Operation(
    "PauseSchedule", _PRODUCE, method="pause_schedule",
    takes=(RequestField("name", str, "Of the schedule."), RequestField("paused", bool, "False: it goes on.")),
    help="Pauses a schedule, or lets it go on. What was due meanwhile is not made up for.",
    routes=(
        HttpRoute("POST", "/schedules/{schedule}/pause", "It does not fire.", name="pause_schedule",
             parts=_SCHEDULE, fixed=(("paused", True),)),
        HttpRoute("POST", "/schedules/{schedule}/resume", "It fires again.", name="resume_schedule",
             parts=_SCHEDULE, fixed=(("paused", False),)),
    ),
)  # fmt: skip
RUN_SCHEDULE: Operation[None] = Operation(
    "RunSchedule", _PRODUCE, takes=(RequestField("name", str, "Of the schedule."),), method="run_schedule",
    help="Publishes the message of a schedule once, now. After an error it may have been published.",
    routes=(HttpRoute("POST", "/schedules/{schedule}/run", "Publishes its message now.", parts=_SCHEDULE),),
)  # fmt: skip

# ------------------------------------------------------------------------------------ subscriptions
LIST_SUBSCRIPTIONS: Operation[tuple[str, ...]] = _topic(
    "ListSubscriptions", make_topic_rule(Permission.CONSUME), method="subscriptions",
    help="Returns the names of the durable subscriptions, sorted.",
    routes=(HttpRoute("GET", "/subscriptions", "The durable subscriptions.", answer="[name]"),),
    cli=CliVerb(
        "subscriptions list", "Subscriptions of a topic.", "Subscriptions of a topic.", "orders",
        empty="no subscriptions of {place}",
    ),
)  # fmt: skip
CREATE_SUBSCRIPTION: Operation[None] = _topic("CreateSubscription", SUBSCRIPTION_RULE)
DELETE_SUBSCRIPTION: Operation[None] = _topic(
    "DeleteSubscription", SUBSCRIPTION_RULE, takes=(RequestField("force", bool, "Although consumers are connected."),),
    method="delete_subscription", help="Deletes a subscription. Busy: it has consumers, which `force` overrides.",
    routes=(HttpRoute(
        "DELETE", "/subscription/{subscription}",
        "Deletes the subscription; with `force` its consumers are disconnected.", busy=412,
    ),),
    cli=CliVerb(
        "subscriptions delete", "Delete a subscription.", "Delete a subscription: nothing is kept for it any more.",
        "orders -s billing", "subscription {subscription} of {place} deleted",
        "Delete subscription {subscription} of {place}",
    ),
)  # fmt: skip
GET_SUBSCRIPTION_PROPERTIES: Operation[dict[str, str]] = _topic(
    "GetSubscriptionProperties", SUBSCRIPTION_RULE, of_reply="properties", method="subscription_properties",
    help="The properties, name to value.",
)  # fmt: skip
SET_SUBSCRIPTION_PROPERTIES: Operation[None] = _topic("SetSubscriptionProperties", SUBSCRIPTION_RULE, routes=(
    HttpRoute("PUT", "{S}/properties", "These properties and no others.", name="set_properties",
         body=("properties", "{name: value}")),
    HttpRoute("DELETE", "{S}/properties", "No properties.", name="clear_properties", fixed=(("properties", {}),)),
))  # fmt: skip
SET_SUBSCRIPTION_FILTER: Operation[None] = _topic(
    "SetSubscriptionFilter", SUBSCRIPTION_RULE, method="set_subscription_filter",
    takes=(RequestField("filter", str, "An expression over the properties of messages. Empty: none."),),
    help="Sets the filter of a subscription, for what is not acknowledged. Busy: consumers are connected.",
    routes=(HttpRoute(
        "PUT", "{S}/filter", "Sets its filter, for what is not acknowledged; without `filter`: removes it.", busy=412,
        name="set_subscription_filter",
    ),),
    cli=CliVerb(
        "subscriptions filter set", "Set or remove its filter.",
        "Set the filter of a subscription, for what is not acknowledged; without --filter, remove it. No consumer may "
        "be connected.",
        """orders -s billing --filter "region = 'eu'\"""", "filter of {subscription} of {place} is now {filter!r}",
    ),
)  # fmt: skip
GET_SUBSCRIPTION_FILTER: Operation[values.SubscriptionFilterState] = _topic(
    "GetSubscriptionFilter", SUBSCRIPTION_RULE, method="subscription_filter",
    help="Returns the filter of a subscription of one partition, and what it has done there.",
    routes=(HttpRoute(
        "GET", "{S}/filter", "Its filter, and what it has done.", answer="SubscriptionFilterState",
        name="get_subscription_filter",
    ),),
    cli=CliVerb(
        "subscriptions filter show", "Its filter, and what it has done.",
        "The filter of a subscription, and how many messages it has judged and filtered since it was set or the topic "
        "was loaded.",
        "orders -s billing",
    ),
)  # fmt: skip
TRY_FILTER: Operation[values.FilterTrial] = _topic(
    "TryFilter", CONSUME_RULE, method="try_filter",
    takes=(
        RequestField("filter", str, "An expression over the properties of messages."),
        RequestField("messages", int, "The newest so many: 1 to 10,000. 0: 1,000."),
    ),
    help="Returns what a filter does with the newest messages of one partition; changes nothing.",
    routes=(HttpRoute("GET", "/filter-trial", "What a filter does with its newest messages.", answer="FilterTrial"),),
    cli=CliVerb(
        "subscriptions filter try", "What a filter does with the newest messages.",
        "What a filter would do with the newest messages of a topic: how many it wants, and how many batches are "
        "mixed. Changes nothing.",
        """orders --filter "region = 'eu'\"""",
    ),
)  # fmt: skip
RESET_SUBSCRIPTION: Operation[None] = _topic("ResetSubscription", SUBSCRIPTION_RULE, routes=(
    HttpRoute("POST", "{S}/resetcursor/{milliseconds}", "To the first message published then or later.", busy=412,
         name="reset_to_time", parts=(PathPart("milliseconds", "publish_time_ms", "the time in milliseconds"),)),
))  # fmt: skip
ADVANCE_SUBSCRIPTION: Operation[None] = _topic(
    "AdvanceSubscription", make_topic_rule(Permission.CONSUME, "topic", "subscription"), service="Broker"
)
SKIP_MESSAGES: Operation[None] = _topic("SkipMessages", SUBSCRIPTION_RULE, routes=(
    HttpRoute("POST", "{S}/skip_all", "The whole backlog counts as acknowledged.", name="skip_all",
         fixed=(("messages", -1),)),
))  # fmt: skip
_AGE = (PathPart("seconds", "older_than_s", "the age in seconds", 1),)
EXPIRE_MESSAGES: Operation[int] = _topic("ExpireMessages", SUBSCRIPTION_RULE, routes=(
    HttpRoute("POST", "{S}/expireMessages/{seconds}", "What is older counts as acknowledged.", name="expire",
    parts=_AGE),
    HttpRoute("POST", "{T}/all_subscription/expireMessages/{seconds}", "The same of every subscription.",
         name="expire_all", parts=_AGE),
))  # fmt: skip
PEEK_MESSAGES: Operation[Any] = _topic("PeekMessages", SUBSCRIPTION_RULE)
ANALYZE_BACKLOG: Operation[values.BacklogAnalysis] = _topic(
    "AnalyzeBacklog", SUBSCRIPTION_RULE, method="analyze_backlog",
    help="Counts the backlog of one partition message by message.",
    cli=CliVerb(
        "topics analyze-backlog", "What a subscription has left, exactly.",
        "What a subscription has left, exactly: entries, messages, and what is acknowledged out of order.",
        "orders -s billing",
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------ schemas
GET_SCHEMA: Operation[values.TopicSchema] = Operation("GetSchema", SCHEMA_RULE, service="Broker")
LIST_SCHEMAS: Operation[tuple[values.TopicSchema, ...]] = Operation(
    "ListSchemas", LOOKUP_RULE, method="schemas",
    help="The versions that are not deleted, in their order. SchemaNotFound: there is none.",
)  # fmt: skip
PUT_SCHEMA: Operation[int] = Operation("PutSchema", make_topic_rule(Permission.PRODUCE, "topic"), of_reply="version")
FIND_SCHEMA: Operation[int] = Operation("FindSchema", SCHEMA_RULE, of_reply="version")
TEST_SCHEMA: Operation[values.SchemaTest] = Operation("TestSchema", TOPIC_FIELD_RULE)
DELETE_SCHEMA: Operation[int | None] = Operation("DeleteSchema", MANAGE_RULE, of_reply="version")

# ------------------------------------------------------------------------------------ transactions
LIST_TRANSACTIONS: Operation[values.CoordinatorTransactions] = Operation(
    "ListTransactions", OPERATE_RULE, AnsweringBroker.COORDINATOR
)
ABORT_TRANSACTION: Operation[TxnState] = Operation(
    "AbortTransaction", OPERATE_RULE, AnsweringBroker.COORDINATOR, of_reply="state"
)
DETACH_TRANSACTION: Operation[None] = Operation("DetachTransaction", OPERATE_RULE, AnsweringBroker.COORDINATOR)
LIST_HALVES: Operation[values.CoordinatorHalves] = Operation("ListHalves", OPERATE_RULE, AnsweringBroker.COORDINATOR)
_HALF = "/admin/v3/transactions/halves/{most}/{least}"
CHANGE_HALF: Operation[None] = Operation("ChangeHalf", OPERATE_RULE, AnsweringBroker.COORDINATOR, routes=(
    HttpRoute("POST", _HALF + "/park", "Its group is not asked any more: an operator decides. 409: it is decided.",
         name="park", fixed=(("verb", "PARK"),)),
    HttpRoute("POST", _HALF + "/revive", "Its group is asked again, at once, as of a new one. 409: it is decided.",
         name="revive", fixed=(("verb", "REVIVE"),)),
    HttpRoute("POST", _HALF + "/commit", "Publishes it, parked or not. Once more is no harm. 409: it is rolled back.",
         name="commit", fixed=(("verb", "COMMIT"),)),
    HttpRoute("POST", _HALF + "/rollback", "Drops it, parked or not. Once more is no harm. 409: it is committed.",
         name="rollback", fixed=(("verb", "ROLLBACK"),)),
))  # fmt: skip
TOPIC_TRANSACTION: Operation[values.TransactionHere] = _topic("TopicTransaction", TOPIC_FIELD_RULE)

# ------------------------------------------------------------------------------------ the cluster
LIST_BROKERS: Operation[tuple[values.BrokerInfo, ...]] = Operation("ListBrokers", OPERATE_RULE)
_BROKER = (PathPart("broker", "name"),)
DRAIN_BROKER: Operation[None] = Operation("DrainBroker", OPERATE_RULE, routes=(
    HttpRoute("PUT", "/admin/v3/brokers/{broker}/drain",
    "It gives what it owns to others until that is ended, also after a"
         " restart.", parts=_BROKER),
))  # fmt: skip
UNDRAIN_BROKER: Operation[None] = Operation("UndrainBroker", OPERATE_RULE, routes=(
    HttpRoute("DELETE", "/admin/v3/brokers/{broker}/drain", "It gets bundles again.", parts=_BROKER),
))  # fmt: skip
FORGET_BROKER: Operation[None] = Operation("ForgetBroker", OPERATE_RULE, routes=(
    HttpRoute("DELETE", "/admin/v3/brokers/{broker}", "One that died will not come back: it is not shown any more.",
              parts=_BROKER),
))  # fmt: skip
LIST_BUNDLES: Operation[values.BundlePage] = Operation(
    "ListBundles", OPERATE_RULE, method="list_bundles",
    takes=(RequestField("namespace", str, "Only those of this one."),
           RequestField("here", bool, "Of the broker that is asked alone.")),
    help="Returns the bundles that brokers own, and what flows there. `namespace`: only those of this one.",
    routes=(HttpRoute("GET", "/admin/v3/bundles", "The bundles that brokers own, and what flows there.",
                 answer="BundlePage"),),
)  # fmt: skip
BALANCE_BROKERS: Operation[values.Balance] = Operation(
    "BalanceBrokers", OPERATE_RULE, method="balance_brokers",
    takes=(RequestField("dry_run", bool, "Move nothing: show what would move."),),
    help="Moves bundles from brokers that carry much to those that carry little. `dry_run`: only says which.",
    routes=(HttpRoute("PUT", "/admin/v3/brokers/balance", "Bundles move to the brokers that carry little.",
                 answer="Balance"),),
    cli=CliVerb(
        "brokers balance", "Move bundles from brokers that carry much to those that carry little.",
        "Move bundles from the brokers that carry much to those that carry little, such as one that was added or "
        "restarted. Their clients are told where to go. Shows each bundle that moved, and what each broker carries "
        "before and after: messages and KiB a second, in and out, and a tenth for each topic.", "--dry-run",
    ),
)  # fmt: skip
MEASURE_LOAD: Operation[values.MeasuredLoad] = Operation("MeasureLoad", OPERATE_RULE)
BALANCE_STATUS: Operation[values.BalanceStatus] = Operation(
    "BalanceStatus", OPERATE_RULE, method="balance_status",
    takes=(RequestField("here", bool, "As the broker that is asked knows it."),),
    help="Returns whether brokers balance their load, which one decides, how busy each is, and what moves now.",
    routes=(HttpRoute("GET", "/admin/v3/brokers/balance", "Which broker balances, how busy each is, and what moves.",
                 answer="BalanceStatus"),),
    cli=CliVerb(
        "brokers balance-status", "Whether brokers balance their load, how busy each is, and what moves now.",
        "Whether brokers balance their load by themselves, which one decides, how many bundles it has moved, how busy "
        "each broker is (100: all that it can do), and the bundles that move now.", "",
    ),
)  # fmt: skip
SHARE_LIMITS: Operation[values.SharesAnswer] = Operation("ShareLimits", OPERATE_RULE)
SHARED_LIMITS: Operation[values.SharedLimits] = Operation(
    "SharedLimits", OPERATE_RULE, method="shared_limits",
    takes=(RequestField("here", bool, "Of the broker that is asked alone."),),
    help="Returns the limits in sum over brokers: each broker's share, its use, how often something waited, and why.",
    routes=(HttpRoute("GET", "/admin/v3/brokers/shared-limits", "The limits in sum over brokers, and their shares.",
                 answer="SharedLimits"),),
    cli=CliVerb(
        "brokers shared-limits", "What limits namespaces and tenants in sum over brokers, and which are reached.",
        "The rates and the stored bytes of namespaces and tenants that are limited in sum over brokers: which part of "
        "the limit each broker has and uses, what all of them want or store together, how often something waited "
        "there, and why the broker has that part. A limit of which brokers want 1 or more together is reached.", "",
    ),
)  # fmt: skip
LIST_BOOKIES: Operation[tuple[values.BookieInfo, ...]] = Operation(
    "ListBookies", OPERATE_RULE, method="bookies", help="Returns the registered bookies."
)
FIND_ORPHANS: Operation[values.Orphans] = Operation("FindOrphans", OPERATE_RULE)

_HERE = RequestField("here", bool, "Of the broker that is asked alone.")
BROKER_SUMMARIES: Operation[values.ClusterSummary] = Operation(
    "BrokerSummaries", OPERATE_RULE, takes=(_HERE,), method="broker_summaries",
    help="Returns the sums of all brokers, and their largest topics. `here`: of the broker that is asked alone.",
    routes=(HttpRoute("GET", "/admin/v3/brokers/summaries", "Sums of all brokers, and their largest topics.",
                 answer="ClusterSummary"),),
)  # fmt: skip
TOPIC_PAGE: Operation[values.TopicPage] = Operation(
    "TopicPage", OPERATE_RULE, method="topic_page",
    takes=(
        RequestField("prefix", str, "Of the full name."), RequestField("contains", str, "What the full name contains."),
        RequestField("sort", str, "A field of the rows, the largest first; or name."),
        RequestField("after", str, "Where the page before ended."), RequestField("limit", int, "Of a page: 1 to 200."),
        _HERE,
    ),
    help="Returns a page of the loaded topics of all brokers. `sort`: a field of its rows, or name.",
    routes=(HttpRoute("GET", "/admin/v3/topics", "A page of the loaded topics of all brokers.", answer="TopicPage"),),
)  # fmt: skip
WHY_STUCK: Operation[values.WhyStuck] = _topic(
    "WhyStuck", SUBSCRIPTION_RULE, method="why_stuck",
    help="Returns why a subscription of one partition does not get on, and what would end that, as sentences.",
    routes=(HttpRoute("GET", "{S}/why", "Why the subscription does not get on.", answer="WhyStuck", name="why_stuck"),),
)  # fmt: skip
WHY_KEPT: Operation[values.WhyKept] = _topic(
    "WhyKept", LOOKUP_RULE, method="why_kept",
    help="Returns what keeps each ledger of one partition: a subscription, retention, a transaction, compaction.",
    routes=(HttpRoute("GET", "/why-kept", "What keeps each ledger.", answer="WhyKept"),),
)  # fmt: skip
DESCRIBE_BROKER: Operation[values.BrokerDescription] = Operation(
    "DescribeBroker", OPERATE_RULE, method="describe_broker",
    takes=(
        RequestField("tasks", bool, "With where each of its tasks waits."),
        RequestField("metrics", bool, "With a page of its metrics."),
    ),
    help="Returns what the broker that is asked says of itself: clock, limit of open files, settings in force.",
)  # fmt: skip
CHANGE_SETTING: Operation[None] = Operation(
    "ChangeSetting", OPERATE_RULE, takes=(RequestField("name", str), RequestField("value", str)),
    method="change_setting",
    help="Changes a setting of all brokers while they run. InvalidRequest: it cannot change, or not to this value.",
)  # fmt: skip
REMOVE_SETTING: Operation[None] = Operation(
    "RemoveSetting", OPERATE_RULE, takes=(RequestField("name", str),), method="remove_setting",
    help="Removes what `change_setting` changed: each broker has its own value again. InvalidRequest.",
)  # fmt: skip
DESCRIBE_CURSOR: Operation[values.CursorShape] = _topic(
    "DescribeCursor", SUBSCRIPTION_RULE, method="describe_cursor",
    takes=(RequestField("buckets", int, "At most so many: 1 to 1,000. 0: 600."),),
    help="Returns what a subscription of one partition has acknowledged, in buckets, and its ten largest gaps.",
    routes=(HttpRoute("GET", "{S}/cursor", "What the subscription has acknowledged, in buckets.",
                      answer="CursorShape"),),
    cli=CliVerb(
        "subscriptions cursor", "What a subscription has acknowledged, in buckets, and its gaps.",
        "What a subscription has acknowledged after mark-delete, in buckets of entries, and its ten largest gaps.",
        "orders -s billing --buckets 20",
    ),
)  # fmt: skip
DESCRIBE_LEDGERS: Operation[tuple[values.LedgerCopies, ...]] = _topic(
    "DescribeLedgers", make_topic_rule(Permission.LOOKUP, "topic"), method="describe_ledgers",
    takes=(
        RequestField("after", int, "Only ledgers with a greater id."),
        RequestField("limit", int, "At most so many: 1 to 200. 0: 100."),
    ),
    help="Returns ledgers of one partition, the oldest first: their bookies, and where copies are missing or damaged.",
    routes=(HttpRoute("GET", "/ledgers", "Its ledgers, and where copies are missing.", answer="[LedgerCopies]"),),
    cli=CliVerb(
        "topics ledgers", "Its ledgers, and where copies are missing.",
        "The ledgers of a topic, the oldest first: their bookies, and where copies are missing or damaged.", "orders",
    ),
)  # fmt: skip
DESCRIBE_METADATA: Operation[values.MetadataNode] = Operation(
    "DescribeMetadata", OPERATE_RULE, method="describe_metadata",
    takes=(
        RequestField("node", str, "Its path, such as /topics. Empty: the root."),
        RequestField("after", str, "Only children with a greater name."),
        RequestField("limit", int, "At most so many children: 1 to 1,000. 0: 100."),
    ),
    help="Returns a node of the metadata: its record without keys and tokens, and a page of what is below it.",
    routes=(HttpRoute("GET", "/admin/v3/metadata", "A node of the metadata, and a page of what is below it.",
                      answer="MetadataNode"),),
    cli=CliVerb(
        "metadata show", "A record of the metadata, and what is below it.",
        "A node of the metadata: its record without keys and tokens, and the names below it.",
        "--node /tenants/public",
    ),
)  # fmt: skip
DESCRIBE_SECURITY: Operation[values.SecurityDescription] = Operation(
    "DescribeSecurity", OPERATE_RULE, method="describe_security",
    help="Returns who is connected to the broker that is asked, until when, and whom it denied something.",
    routes=(HttpRoute("GET", "/admin/v3/security", "Who is connected to this broker, and whom it denied something.",
                      answer="SecurityDescription"),),
)  # fmt: skip

_OF_CLIENTS = {
    "TerminateTopic": "MessageId", "LastMessageId": "MessageId", "MessageIdByTime": "MessageId",
    "GetMessage": "tuple[StoredMessage, ...]", "ExamineMessages": "tuple[StoredMessage, ...]",
    "PeekMessages": "tuple[StoredMessage, ...]",
}  # fmt: skip
"""The types of answers, by operation, that only the client's library has."""


# ------------------------------------------------------------------------------------ the table
OPERATIONS: dict[str, Operation[Any]] = {}
"""All operations by their names, in the order of this file."""
ANSWER_TYPES: dict[str, str] = {}


def add_operation(operation: Operation[Any], answer: str) -> None:
    """Adds an operation to the table; its name must be new. `answer` is the name of the answer's type, as text: a type
    of proto/statistics.py or of Python."""
    assert operation.name not in OPERATIONS, f"{operation.name} is a row already"
    OPERATIONS[operation.name], ANSWER_TYPES[operation.name] = operation, answer


for _variable, _hint in list(__annotations__.items()):
    if _hint.startswith("Operation["):
        _row = globals()[_variable]
        add_operation(_row, _OF_CLIENTS.get(_row.name, _hint.removeprefix("Operation[").removesuffix("]")))
del _row, _hint, _variable


@cache
def find_answer_type(name: str, **of_clients: Any) -> Any:
    """Returns the type of the answer of the operation `name`. `of_clients`: the caller's own types for StoredMessage
    and MessageId, by these names. Raises KeyError if there is no such operation, NameError if its type is one of these
    and is not given. Results are cached."""
    from . import states as transactions
    from . import statistics

    known = {**vars(statistics), **vars(transactions), "values": statistics, **of_clients}
    return eval(ANSWER_TYPES[name], known)
