"""Slow records: a line for what is late, with the time at each station, and nothing for what is not."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.log.appender import SLOW_ENTRY_LINES_MAX, SLOW_ENTRY_LINES_S, SlowPublishLog, find_trace_id
from magnetar.client import aio
from magnetar.proto.entry import encode_broker_part, encode_entry, encode_item_prefix
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.proto.names import TopicName
from tests.support.cluster import Cluster, cluster

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
LOGGER = "magnetar.broker.slow"
TOPIC = TopicName.parse("t")


def lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name == LOGGER]


class SlowPeer:
    """The connection to a bookie, whose requests set out late."""

    def __init__(self, peer: Any, delay_s: float) -> None:
        self._peer = peer
        self._delay_s = delay_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._peer, name)

    def send_request(self, asker: Any, head: bytes, frames: Sequence[Any], *, timeout_s: float) -> None:
        later = lambda: self._peer.send_request(asker, head, frames, timeout_s=timeout_s)
        asyncio.get_running_loop().call_later(self._delay_s, later)


def slow_down(running: Cluster, bookie: str, delay_s: float) -> None:
    session = running.brokers[0].topic_manager._session
    assert session is not None
    peers = session.ledgers.bookies.peers
    peers[bookie] = SlowPeer(peers[bookie], delay_s)


async def test_a_late_publish_is_a_line_with_the_time_at_each_station(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(
        tmp_path, bookies=3, ensemble_size=3, write_quorum=3, ack_quorum=2, slow_publish_s=0.15
    ) as running:
        client = aio.Client(f"magnetar://{running.brokers[0].endpoint}")
        producer = await client.create_producer("t", "billing")
        await producer.send(b"in time")
        assert not lines(caplog)
        [fast, late, never] = sorted(running.brokers[0].topic_manager._session.ledgers.bookies.peers)  # type: ignore[union-attr]
        slow_down(running, late, 0.3)
        slow_down(running, never, 0.6)
        id_ = await producer.send(b"late", properties={"traceparent": PARENT})
        [line] = lines(caplog)
        await client.close()
    assert (line.levelno, line.getMessage()) == (logging.WARNING, "slow publish")
    assert (line.topic, line.producer, line.trace) == ("persistent://public/default/t", "billing", TRACE)
    assert (line.ledger, line.entry, line.entries) == (id_.ledger_id(), id_.entry_id(), 1)
    assert (line.ledger_ms, line.room_ms) == (None, None)
    assert line.bookies.keys() == {fast, late, never}
    assert line.bookies[fast] == {}
    assert line.bookies[never] == {"stored": False}
    assert 0 <= line.bookies[late]["sent_ms"] < 150 <= line.bookies[late]["stored_ms"] <= line.confirmed_ms


async def test_what_waited_for_a_ledger_says_so_and_0_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for slow_s in (1e-9, 0.0):
        caplog.clear()
        async with cluster(tmp_path / str(slow_s), slow_publish_s=slow_s) as running:
            client = aio.Client(f"magnetar://{running.brokers[0].endpoint}")
            producer = await client.create_producer("t")
            for _ in range(2):
                await producer.send(b"x")
            await client.close()
        if slow_s:
            first, second = lines(caplog)
            assert 0 <= first.ledger_ms <= first.confirmed_ms
            assert second.ledger_ms is None
            assert not hasattr(first, "trace")
        else:
            assert not lines(caplog)


async def test_while_all_is_in_time_nothing_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(SlowPublishLog, "log_slow_publishes", lambda *given, **_: asked.append(given))
    async with cluster(tmp_path, slow_publish_s=60.0) as running:
        client = aio.Client(f"magnetar://{running.brokers[0].endpoint}")
        await (await client.create_producer("t")).send_many([b"x"] * 100)
        await client.close()
    assert not asked


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def publishes(clock: Clock, *ages_s: float) -> Any:
    return [
        SimpleNamespace(
            arrived_s=clock.now - age_s, timestamp_ms=1_700_000_000_000, sent={}, acks=set(), entry=0, name="p",
            frames=(b"",),
        )
        for age_s in ages_s
    ]  # fmt: skip


def test_lines_are_limited_and_those_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    slow = SlowPublishLog(clock, 0.5)  # type: ignore[arg-type]
    for _ in range(SLOW_ENTRY_LINES_MAX + 3):
        slow.log_slow_publishes(
            TOPIC, None, publishes(clock, 2.0, 1.0, 0.1), clock.now, ledger_s=0.0, room_s=clock.now - 1
        )
    found = lines(caplog)
    assert len(found) == SLOW_ENTRY_LINES_MAX
    said = {(line.entries, line.confirmed_ms, line.room_ms, line.ledger_ms) for line in found}
    assert said == {(2, 2000, 1000, None)}
    clock.now += SLOW_ENTRY_LINES_S
    slow.log_slow_publishes(TOPIC, None, publishes(clock, 1.0), clock.now, ledger_s=0.0, room_s=0.0)
    assert lines(caplog)[-1].left_out == 3
    slow.log_slow_publishes(TOPIC, None, publishes(clock, 1.0), clock.now, ledger_s=0.0, room_s=0.0)
    assert not hasattr(lines(caplog)[-1], "left_out")


def stored(metadata: MessageMetadata, payload: bytes) -> bytes:
    return encode_broker_part(0, 1000) + encode_entry(metadata, payload)


def batch(*contexts: str) -> bytes:
    items = b""
    for context in contexts:
        single = SingleMessageMetadata(payload_size=1)
        if context:
            single.properties.add(key="traceparent", value=context)
        items += encode_item_prefix(single) + b"x"
    metadata = MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, num_messages_in_batch=len(contexts)
    )  # fmt: skip
    return stored(metadata, items)


@pytest.mark.parametrize(
    ("properties", "found"),
    [
        ({"traceparent": PARENT}, TRACE),
        ({"messaging.trace_parent": PARENT}, TRACE),
        ({"traceparent": "00-short-1-01"}, ""),
        ({"traceparent": "wrong"}, ""),
        ({"a": "b"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_the_trace_of_a_message_is_found(properties: dict[str, str], found: str) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    for key, value in properties.items():
        metadata.properties.add(key=key, value=value)
    assert find_trace_id(stored(metadata, b"x")) == found


def test_of_a_batch_the_first_message_with_a_context_counts_and_damage_is_no_trace() -> None:
    other = PARENT.replace(TRACE, "1" * 32)
    assert find_trace_id(batch("", PARENT, other)) == TRACE
    assert find_trace_id(batch("", "")) == ""
    assert find_trace_id(batch(PARENT)[:-1]) == ""
    assert find_trace_id(b"") == ""
