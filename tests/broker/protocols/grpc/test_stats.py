"""The statistics that any protocol shows, and their messages."""

from __future__ import annotations

from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from magnetar.broker.protocols.grpc import stats
from magnetar.broker.session import statistics as plain
from magnetar.client.admin import values
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position

MESSAGES = {
    plain.ProducerStats: wire.ProducerStats, plain.SlotRange: wire.SlotRange, plain.ConsumerStats: wire.ConsumerStats,
    plain.DrainingSlot: wire.DrainingSlot, plain.SubscriptionStats: wire.SubscriptionStats,
    plain.TopicStats: wire.TopicStatsReply, plain.LedgerStats: wire.LedgerStats,
    plain.TopicInternalStats: wire.TopicInternalStatsReply, plain.CompactionStatus: wire.CompactionStatusReply,
}  # fmt: skip


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: value.__name__)
def test_a_value_has_the_fields_of_its_message(value: type[msgspec.Struct]) -> None:
    of_clients = {"partitions"} if value is plain.TopicStats else set[str]()  # the sum of them, made by a client
    of_message = {each.name for each in MESSAGES[value].DESCRIPTOR.fields}
    assert set(value.__struct_fields__) == of_message - of_clients


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: value.__name__)
def test_a_value_is_answered_by_the_admin_client_with_the_same_types(value: type[Any]) -> None:
    answered = get_type_hints(getattr(values, value.__name__))
    assert {name: _plain(kind) for name, kind in get_type_hints(value).items()} == {
        name: _plain(kind) for name, kind in answered.items() if (value, name) != (plain.TopicStats, "partitions")
    }


def _plain(kind: Any) -> str:
    """A closed set is text, a tuple is a list, and what may be missing is there or has its default."""
    if get_origin(kind) in (list, tuple):
        return f"list of {_plain(get_args(kind)[0])}"
    if get_origin(kind) is UnionType:
        return _plain(get_args(kind)[0])
    return "str" if issubclass(kind, str) else str(kind.__name__)


def test_values_inside_values_and_positions_are_translated() -> None:
    ledgers = [plain.LedgerStats(7, "open", 3, 90, 0, ("a", "b"), "it is written")]
    internals = plain.TopicInternalStats("serving", ledgers, Position(7, 2), 10, 1, "3/3/2", "3/3/2", False)
    found = wire.TopicInternalStatsReply(**stats.fields(internals))
    assert (found.last_confirmed.ledger_id, found.last_confirmed.entry_id) == (7, 2)
    ledger = found.ledgers[0]
    assert (list(ledger.bookies), ledger.bytes, ledger.stays) == (["a", "b"], 90, "it is written")


def test_a_topic_that_was_never_compacted_has_no_horizon() -> None:
    found = wire.CompactionStatusReply(**stats.fields(plain.CompactionStatus("NOT_RUN", "", "", 0, 0, 0, 5)))
    assert (found.ledger_id, found.HasField("horizon"), found.due_bytes) == (-1, False, 5)
