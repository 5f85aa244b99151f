"""Logs to test cursors and dispatchers on."""

from dataclasses import dataclass

from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.subscription.core.policy import DispatchPolicy, SubscriptionOptions
from magnetar.broker.subscription.core.subscription_types import find_subscription_type
from magnetar.proto.names import Position


def shape_of(*entries: int, per_entry: int = 1) -> LogShape:
    """Ledgers 10, 20, … with so many entries each; the last one is open."""
    shape, index = LogShape(), 0
    for number, count in enumerate(entries):
        end = index + count * per_entry
        last = number == len(entries) - 1
        shape.add(LedgerSpan((number + 1) * 10, index, count - 1, end, size=count * 100, open=last))
        index = end
    return shape


def positions_of(shape: LogShape) -> list[Position]:
    return [Position(span.ledger_id, entry) for span in shape.spans for entry in range(span.last_entry + 1)]


def policy_of(number: int) -> DispatchPolicy:
    """Of the subscription type, with its defaults."""
    return find_subscription_type(number).policy(SubscriptionOptions())


@dataclass(frozen=True)
class Item:
    position: Position
    count: int = 1
    size: int = 100
    slots: tuple[int, ...] = ()
    chunk_of: str = ""
    has_more_chunks: bool = False
    deliver_at_ms: int = 0
