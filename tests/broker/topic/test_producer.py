"""The broker's end of a producer, alone: what is not confirmed yet is bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.common.config import MESSAGE_BYTES_LIMIT, BrokerConfig
from magnetar.broker.log.topic_log import Publish, State
from magnetar.broker.topic.core.publish import SHARED
from magnetar.broker.topic.dedup import Deduplication
from magnetar.broker.topic.producer import Producer
from magnetar.broker.topic.statistics import Traffic
from magnetar.ledger.handle import ENTRY_BYTES_MAX
from magnetar.proto.entry import broker_part
from magnetar.proto.errors import InvalidConfiguration
from magnetar.proto.names import Position, TopicName
from tests.support.cluster import SMALL, client_part

PENDING_BYTES_MAX = 20_000


def topic_over(log: Any) -> Any:
    unused: Any = None
    dedup = Deduplication(unused, unused, SMALL, log, unused)
    return SimpleNamespace(
        name=TopicName.parse("t"), log=log, traffic=Traffic(), applied=SMALL, dedup=dedup
    )


async def test_a_producers_stream_is_not_read_while_too_much_is_unconfirmed() -> None:
    under_way: deque[Publish] = deque()
    replies: list[Any] = []
    log = SimpleNamespace(state=State.SERVING, publish=under_way.append)
    topic = topic_over(log)
    producer = Producer(
        1, "p", SHARED, topic, replies.append, address="here", instance="i",
        size_max=1 << 20, pending_bytes_max=PENDING_BYTES_MAX,
    )  # fmt: skip
    waiting = await _room(producer)
    while waiting.done() and len(under_way) < 20:
        producer.publish(client_part("p", len(under_way), bytes(4000)))
        waiting = await _room(producer)
    assert PENDING_BYTES_MAX / 6000 < len(under_way) <= PENDING_BYTES_MAX / 4000 + 1
    assert not waiting.done()

    confirmed = 0
    while under_way and not waiting.done():
        producer.confirmed(under_way.popleft(), Position(1, confirmed), confirmed)
        confirmed += 1
        await asyncio.sleep(0)
    assert waiting.done(), "there is room again"
    assert under_way, "and not only when all is confirmed"
    assert [reply.receipt.entry_id for reply in replies] == list(range(confirmed))


async def test_m28_a_producer_that_returns_is_told_what_is_stored_and_not_what_is_on_its_way() -> None:
    """Or it would go on behind what was lost, and take it for stored."""
    under_way: deque[Publish] = deque()
    log = SimpleNamespace(state=State.SERVING, publish=under_way.append)
    topic = topic_over(log)

    def opened() -> Producer:
        return Producer(1, "p", SHARED, topic, lambda reply: None, address="here", instance="i",
                        size_max=1 << 20, pending_bytes_max=PENDING_BYTES_MAX)  # fmt: skip

    producer = opened()
    for number in range(3):
        producer.publish(client_part("p", number, b"x"))
    producer.confirmed(under_way.popleft(), Position(1, 0), 0)
    assert opened().last_sequence_id == 0


async def _room(producer: Producer) -> asyncio.Task[None]:
    """Done when there is room at once."""
    waiting = asyncio.create_task(producer.room())
    await asyncio.sleep(0)
    return waiting


def test_entries_that_no_ledger_takes_are_refused_in_the_configuration() -> None:
    """A ledger that refuses an entry for its size gives no id to it, and the log would be one ahead of the ledger."""
    largest = BrokerConfig(max_message_bytes=MESSAGE_BYTES_LIMIT)
    largest.validate()
    assert MESSAGE_BYTES_LIMIT + len(broker_part(1 << 62, 1 << 62)) <= ENTRY_BYTES_MAX
    with pytest.raises(InvalidConfiguration, match="max_message_bytes"):
        replace(largest, max_message_bytes=MESSAGE_BYTES_LIMIT + 1).validate()
