"""The statistics that any protocol shows, and their messages."""

import dataclasses
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.grpc.admin import AdminService
from magnetar.proto import statistics as plain
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position
from magnetar.proto.states import LedgerState, LedgerStays, TopicState
from magnetar.proto.statistics import BriefTopicStats
from magnetar.proto.translation import make_reply_message
from magnetar.runtime.network import CallContext
from tests.support.cluster import cluster

MESSAGES = {
    plain.ProducerStats: wire.ProducerStats, plain.SlotRange: wire.SlotRange, plain.ConsumerStats: wire.ConsumerStats,
    plain.DrainingSlot: wire.DrainingSlot, plain.SubscriptionStats: wire.SubscriptionStats,
    plain.TopicStats: wire.TopicStatsReply, plain.LedgerStats: wire.LedgerStats,
    plain.TopicInternalStats: wire.TopicInternalStatsReply, plain.CompactionStatus: wire.CompactionStatusReply,
}  # fmt: skip


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: value.__name__)
def test_a_value_has_the_fields_of_its_message(value: type[Any]) -> None:
    assert {each.name for each in fields(value)} == {each.name for each in MESSAGES[value].DESCRIPTOR.fields}


def test_values_inside_values_and_positions_are_translated() -> None:
    ledgers = (plain.LedgerStats(7, LedgerState.OPEN, 3, 90, 0, ("a", "b"), LedgerStays.OPEN),)
    internals = plain.TopicInternalStats(TopicState.SERVING, ledgers, Position(7, 2), 10, 1, "3/3/2", "3/3/2", False)
    found: Any = make_reply_message(wire.TopicInternalStatsReply, internals)
    assert (found.last_confirmed.ledger_id, found.last_confirmed.entry_id) == (7, 2)
    ledger = found.ledgers[0]
    assert (list(ledger.bookies), ledger.bytes, ledger.stays) == (["a", "b"], 90, LedgerStays.OPEN)


async def test_a_topic_that_was_never_compacted_has_no_horizon(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        service = AdminService(running.brokers[0].topic_manager)
        await service.create_topic(wire.TopicSpec(name="t"), CallContext(""))
        found = await service.compaction_status(wire.Name(name="t"), CallContext(""))
        assert (found.ledger_id, found.HasField("horizon"), found.state) == (-1, False, "NOT_RUN")


def test_the_fields_of_a_record_are_made_once() -> None:
    first, again = (dataclasses.fields(BriefTopicStats) for _ in range(2))
    assert [each is other for each, other in zip(first, again, strict=True)] == [True] * len(first)
