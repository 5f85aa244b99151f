"""Every rpc of a broker and the permission that it needs: one row for each, and for each frame that opens something.

The border asks before the handler runs (broker/protocols/grpc/checked.py); a stream is asked where something is opened
(broker/session/). A missing row fails the start of a broker and tests/broker/access/test_table.py, which also tries
every row with every kind of role. docs/security.md shows this table (`python -m tests.docs.tables`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class Permission(Enum):
    """The permission that an rpc needs: who may call it."""

    OPERATE = "a super user"
    MANAGE = "an administrator of the tenant, or a super user"
    PRODUCE = "`produce` on the topic"
    CONSUME = "`consume` on the topic, and the subscription's list"
    LOOKUP = "`produce` or `consume` on the topic"
    SHOWN = "every caller; the answer has what it may see"
    OWN = "every caller, for what its role began; of another role's it is told what it is told of what does not exist"


class On(Enum):
    """The object that a permission is for: the field of the request names it."""

    NOTHING = "the cluster"
    TENANT = "tenant"
    NAMESPACE = "namespace"
    TOPIC = "topic"
    PLACE = "namespace or topic"  # fields `namespace` and `topic`; both empty: the cluster, for super users


class Rule(NamedTuple):
    """The permission of one rpc, or of one frame, and the fields that name its object."""

    permission: Permission
    on: On = On.NOTHING
    field: str = ""
    subscription: str = ""  # the field that names it; where it is empty in a request that changes: all, which is MANAGE


def _topic(permission: Permission, field: str = "name", subscription: str = "") -> Rule:
    return Rule(permission, On.TOPIC, field, subscription)


_OPERATE = Rule(Permission.OPERATE)
_OWN = Rule(Permission.OWN)
_NAMESPACE = Rule(Permission.MANAGE, On.NAMESPACE, "name")
_MANAGE = _topic(Permission.MANAGE)
_MANAGE_TOPIC = _topic(Permission.MANAGE, "topic")
_LOOKUP = _topic(Permission.LOOKUP)
_CONSUME = _topic(Permission.CONSUME, "topic")
_OF_SUBSCRIPTION = _topic(Permission.CONSUME, "topic", "name")
_PLACE = Rule(Permission.MANAGE, On.PLACE)

RULES: Mapping[str, Rule] = {
    "Broker.Lookup": _topic(Permission.LOOKUP, "topic"),
    "Broker.Partitions": _topic(Permission.LOOKUP, "topic"),
    "Broker.Connect open_producer": _topic(Permission.PRODUCE, "topic"),
    "Broker.Connect subscribe": _topic(Permission.CONSUME, "topic", "subscription"),
    "Broker.Read": _CONSUME,
    "Broker.WatchTopics": Rule(Permission.SHOWN, On.NAMESPACE, "namespace"),
    "Broker.Offsets": _topic(Permission.CONSUME, "topic", "subscription"),
    "Broker.AdvanceSubscription": _topic(Permission.CONSUME, "topic", "subscription"),
    "Broker.GetSchema": _topic(Permission.LOOKUP, "topic"),
    "Transactions.Find": Rule(Permission.SHOWN),
    "Transactions.Begin": _OWN,
    "Transactions.End": _OWN,
    "Transactions.Status": _OWN,
    "Transactions.CommitBatch": _OWN,
    "Transactions.SinkStatus": _OWN,
    "Transactions.PrepareHalf": _OWN,
    "Transactions.EndHalf": _OWN,
    "Transactions.WatchHalves": _OWN,
    "Transactions.Join": _OPERATE,
    "Transactions.Settle": _OPERATE,
    "Transactions.AbortOpen": _OPERATE,
    "Admin.ListTransactions": _OPERATE,
    "Admin.AbortTransaction": _OPERATE,
    "Admin.DetachTransaction": _OPERATE,
    "Admin.ListHalves": _OPERATE,
    "Admin.ChangeHalf": _OPERATE,
    "Admin.TopicTransaction": _MANAGE_TOPIC,
    "Admin.ListTenants": Rule(Permission.SHOWN),
    "Admin.CreateTenant": _OPERATE,
    "Admin.GetTenant": Rule(Permission.MANAGE, On.TENANT, "name"),
    "Admin.UpdateTenant": _OPERATE,
    "Admin.DeleteTenant": _OPERATE,
    "Admin.ListNamespaces": Rule(Permission.MANAGE, On.TENANT, "name"),
    "Admin.CreateNamespace": _NAMESPACE,
    "Admin.GetNamespace": _NAMESPACE,
    "Admin.UpdateNamespace": _NAMESPACE,
    "Admin.DeleteNamespace": _NAMESPACE,
    "Admin.UnloadNamespace": _OPERATE,
    "Admin.ListTopics": Rule(Permission.SHOWN, On.NAMESPACE, "namespace"),
    "Admin.CreateTopic": _MANAGE,
    "Admin.UpdateTopic": _MANAGE,
    "Admin.DeleteTopic": _MANAGE,
    "Admin.CheckDelete": _MANAGE,
    "Admin.TopicStats": _LOOKUP,
    "Admin.NamespaceStats": Rule(Permission.SHOWN, On.NAMESPACE, "namespace"),
    "Admin.TopicInternalStats": _LOOKUP,
    "Admin.UnloadTopic": _MANAGE,
    "Admin.TrimTopic": _MANAGE,
    "Admin.TerminateTopic": _MANAGE,
    "Admin.SkipLost": _MANAGE_TOPIC,
    "Admin.ListSubscriptions": _topic(Permission.CONSUME),
    "Admin.CreateSubscription": _OF_SUBSCRIPTION,
    "Admin.DeleteSubscription": _OF_SUBSCRIPTION,
    "Admin.GetSubscriptionProperties": _OF_SUBSCRIPTION,
    "Admin.SetSubscriptionProperties": _OF_SUBSCRIPTION,
    "Admin.ResetSubscription": _OF_SUBSCRIPTION,
    "Admin.SkipMessages": _OF_SUBSCRIPTION,
    "Admin.PeekMessages": _OF_SUBSCRIPTION,
    "Admin.FindOrphans": _OPERATE,
    "Admin.TruncateTopic": _MANAGE,
    "Admin.ExpireMessages": _OF_SUBSCRIPTION,
    "Admin.ExamineMessages": _CONSUME,
    "Admin.GetMessage": _CONSUME,
    "Admin.AnalyzeBacklog": _OF_SUBSCRIPTION,
    "Admin.LastMessageId": _topic(Permission.CONSUME),
    "Admin.MessageIdByTime": _CONSUME,
    "Admin.BacklogSize": _CONSUME,
    "Admin.Compact": _MANAGE,
    "Admin.CompactionStatus": _MANAGE,
    "Admin.GetPolicies": _PLACE,
    "Admin.ChangePolicies": _PLACE,
    "Admin.GetProperties": _PLACE,
    "Admin.ChangeProperties": _PLACE,
    "Admin.GetPermissions": _PLACE,
    "Admin.ChangePermissions": _PLACE,
    "Admin.ListSchemas": _LOOKUP,
    "Admin.PutSchema": _topic(Permission.PRODUCE, "topic"),
    "Admin.FindSchema": _topic(Permission.LOOKUP, "topic"),
    "Admin.TestSchema": _MANAGE_TOPIC,
    "Admin.DeleteSchema": _MANAGE,
    "Admin.ListBrokers": _OPERATE,
    "Admin.ListBookies": _OPERATE,
}
