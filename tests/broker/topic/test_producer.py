"""The broker's end of a producer, alone: the order of its answers."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.broker.common.config import MESSAGE_BYTES_LIMIT, BrokerConfig
from magnetar.broker.common.transactions import NoCoordinators
from magnetar.broker.log.topic_log import Publish
from magnetar.broker.topic.dedup import Deduplication
from magnetar.broker.topic.dedup_core import SHARED
from magnetar.broker.topic.producer import TopicProducer
from magnetar.broker.topic.statistics import TopicStatistics
from magnetar.broker.topic.transactions import TopicTransactions
from magnetar.ledger.handle import ENTRY_BYTES_MAX
from magnetar.proto.entry import encode_broker_part
from magnetar.proto.errors import InvalidConfiguration, MagnetarError, Unavailable
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import TopicState
from magnetar.runtime.clock import SystemClock
from tests.support.cluster import SMALL, client_part


def topic_over(log: Any) -> Any:
    unused: Any = None
    named: Any = SimpleNamespace(name=TopicName.parse("t"))
    dedup = Deduplication(SystemClock(), unused, SMALL, log, unused)
    transactions = TopicTransactions(unused, unused, SMALL, named, log, unused, NoCoordinators())
    return SimpleNamespace(
        name=named.name, log=log, traffic=TopicStatistics(SystemClock()), applied=SMALL, dedup=dedup,
        transactions=transactions,
    )  # fmt: skip


class Told:
    """A producer's outlet: what it was told, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def on_stored(self, size: int, sequence_id: int, position: Position, index: int) -> None:
        self.told += [("freed", size), ("receipt", sequence_id)]

    def on_duplicate(self, sequence_id: int) -> None:
        self.told.append(("duplicate", sequence_id))

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        self.told.append(("failed", sequence_id))

    def on_closed(self, error: MagnetarError) -> None:
        self.told.append(("closed", -1))

    def on_publish_waiting(self, error: MagnetarError) -> None:
        self.told.append(("waits", -1))

    def on_bytes_freed(self, size: int) -> None:
        self.told.append(("freed", size))


async def test_answers_keep_their_place_and_what_an_entry_frees_is_told_before_its_outcome() -> None:
    under_way: deque[Publish] = deque()
    log = SimpleNamespace(topic=TopicName.parse("t"), state=TopicState.SERVING, publish=under_way.append)
    outlet = Told()
    producer = TopicProducer(
        1, "p", SHARED, topic_over(log), outlet, address="here", instance="i", size_max=1000
    )
    first, refused, last = (client_part("p", number, bytes(size)) for number, size in enumerate((10, 2000, 20)))
    assert [producer.publish(each) for each in (first, refused, last)] == [True, False, True]
    assert outlet.told == [], "the refusal waits for the entry before it"
    producer.on_confirmed(under_way.popleft(), Position(1, 0), 0)
    assert outlet.told == [("freed", len(first)), ("receipt", 0), ("failed", 1)]
    assert producer.has_pending
    producer.on_failed(under_way.popleft(), Unavailable("no bookie"))
    assert outlet.told[3:] == [("freed", len(last)), ("failed", 2)]
    assert not producer.has_pending


async def test_m28_a_producer_that_returns_is_told_what_is_stored_and_not_what_is_on_its_way() -> None:
    """Or it would go on behind what was lost, and take it for stored."""
    under_way: deque[Publish] = deque()
    log = SimpleNamespace(topic=TopicName.parse("t"), state=TopicState.SERVING, publish=under_way.append)
    topic = topic_over(log)

    def opened() -> TopicProducer:
        return TopicProducer(1, "p", SHARED, topic, Told(), address="here", instance="i", size_max=1 << 20)

    producer = opened()
    for number in range(3):
        producer.publish(client_part("p", number, b"x"))
    producer.on_confirmed(under_way.popleft(), Position(1, 0), 0)
    assert opened().last_sequence_id == 0


def test_entries_that_no_ledger_takes_are_refused_in_the_configuration() -> None:
    """A ledger that refuses an entry for its size gives no id to it, and the log would be one ahead of the ledger."""
    largest = BrokerConfig(max_message_bytes=MESSAGE_BYTES_LIMIT)
    largest.validate()
    assert MESSAGE_BYTES_LIMIT + len(encode_broker_part(1 << 62, 1 << 62)) <= ENTRY_BYTES_MAX
    with pytest.raises(InvalidConfiguration, match="max_message_bytes"):
        replace(largest, max_message_bytes=MESSAGE_BYTES_LIMIT + 1).validate()
