"""Every rpc of a broker and the permission that it needs: one row for each, and for each frame that opens something.

The operations of administration bring theirs (proto/operations.py).
The border asks before the handler runs (broker/protocols/grpc/checked.py); a stream is asked where something is opened
(broker/session/). A missing row fails the start of a broker and tests/broker/access/test_table.py, which also tries
every row with every kind of role. docs/security.md shows this table (`python -m tests.docs.tables`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ....proto.operation import On, Permission, Rule, of_topic
from ....proto.operations import CONSUME, OPERATE, OPERATIONS

_OWN = Rule(Permission.OWN)

RULES: Mapping[str, Rule] = {
    "Broker.Connect open_producer": of_topic(Permission.PRODUCE, "topic"),
    "Broker.Connect subscribe": of_topic(Permission.CONSUME, "topic", "subscription"),
    "Broker.Read": CONSUME,
    "Broker.WatchTopics": Rule(Permission.SHOWN, On.NAMESPACE, "namespace"),
    "Transactions.Find": Rule(Permission.SHOWN),
    "Transactions.Begin": _OWN,
    "Transactions.End": _OWN,
    "Transactions.Status": _OWN,
    "Transactions.CommitBatch": _OWN,
    "Transactions.SinkStatus": _OWN,
    "Transactions.PrepareHalf": _OWN,
    "Transactions.EndHalf": _OWN,
    "Transactions.WatchHalves": _OWN,
    "Transactions.Join": OPERATE,
    "Transactions.Settle": OPERATE,
    "Transactions.AbortOpen": OPERATE,
    **{f"{each.service}.{each.name}": each.rule for each in OPERATIONS.values()},
}
