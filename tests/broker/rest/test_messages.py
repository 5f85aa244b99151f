"""Statistics and messages as Pulsar's tools read them; every key of them is in tests/recorded/rest.txt."""

import asyncio
import json
from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from magnetar.broker.rest import subscriptions_routes as messages
from magnetar.broker.rest.stats import RateMeters
from magnetar.broker.server import Broker
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import MANY_PROPERTIES, encode_entry, join_client_part
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.pulsar_json import merge_records
from magnetar.runtime.network import Endpoint
from tests.broker.pulsar.raw import Raw
from tests.broker.rest.http import Http, T, serving
from tests.support.cluster import Cluster


async def _client(running: Cluster, broker: Broker) -> Raw:
    endpoint = Endpoint.parse(broker.pulsar_urls[""][0].partition("://")[2])
    return await Raw.connected(running.world, endpoint, client_version="Test-1.2")


async def test_statistics_have_the_clients_versions_and_who_is_connected_keeps_the_topic(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, running):
        raw = await _client(running, broker)
        await raw.open_producer()
        await raw.subscribe(subType=pulsar.CommandSubscribe.Shared)
        for number in range(3):
            raw.publish(number)
        assert len([await raw.next("message", "send_receipt") for _ in range(6)]) == 6
        found = await http.get(f"{T}/stats")
        [publisher] = found["publishers"]
        [consumer] = found["subscriptions"]["s"]["consumers"]
        assert [each["clientVersion"] for each in (publisher, consumer)] == ["Test-1.2"] * 2
        assert (found["subscriptions"]["s"]["unackedMessages"], consumer["msgOutCounter"]) == (3, 3)
        await http.done("DELETE", T, status=412)
        await http.done("DELETE", f"{T}/subscription/s", status=412)
        await http.done("DELETE", f"{T}/subscription/s?force=true")
        await raw.stream.close()


async def test_a_message_whose_values_are_no_text_is_shown(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, running):
        raw = await _client(running, broker)
        await raw.open_producer()
        metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, partition_key="~~")
        metadata.properties.add(key="p", value="}}}}")
        encoded = metadata.SerializeToString().replace(b"~~", b"\xff\xfe").replace(b"}}}}", b"caf\xe9")
        raw.send(join_client_part(encoded, b"m"), send=pulsar.CommandSend(producer_id=1, sequence_id=1))
        await raw.next("send_receipt")
        shown = await http.ask("GET", f"{T}/examinemessage?initialPosition=earliest&messagePosition=1")
        assert (shown.status, shown.body) == (200, b"m")
        assert shown.headers["x-pulsar-partition-key"] == b64encode(b"\xff\xfe").decode()
        assert json.loads(unquote(shown.headers["x-pulsar-property"])) == {"p": "caf\ufffd"}
        await raw.stream.close()


async def test_a_caller_that_leaves_cancels_nothing(http: Http) -> None:
    reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
    body = json.dumps(50).encode()
    head = f"PUT {T}/partitions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    writer.write(head + body)
    writer.close()
    del reader
    async with asyncio.timeout(10):
        while (await http.ask("GET", f"{T}/partitions")).status == 404:
            continue
    assert (await http.get(f"{T}/partitions"))["partitions"] == 50


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now * 1000)


def test_rates_are_those_since_the_last_question() -> None:
    clock = Clock()
    meters = RateMeters(clock)
    assert meters.measure_rates(1, clock.wall_ms() - 10_000, (100,)) == (10.0,)
    clock.now += 0.5
    assert meters.measure_rates(1, 0, (500,)) == (10.0,), "asked too soon"
    clock.now += 4.5
    assert meters.measure_rates(1, 0, (600,)) == (100.0,)
    clock.now += 1
    assert meters.measure_rates(1, 0, (600,)) == (0.0,)


def test_statistics_of_partitions_are_merged_by_their_kind() -> None:
    def part(count: int, acked: int, name: str, backlog: int, listed: list[int], on: bool) -> dict[str, Any]:
        subscriptions = {name: {"msgBacklog": backlog}}
        return {
            "msgInCounter": count, "lastAckedTimestamp": acked, "subscriptions": subscriptions, "list": listed, "on": on
        }  # fmt: skip

    parts = [part(1, 7, "a", 1, [1], False), part(2, 3, "b", 5, [2], True), part(4, 0, "a", 2, [], False)]
    assert merge_records(parts) == {
        "msgInCounter": 7, "lastAckedTimestamp": 7, "subscriptions": {"a": {"msgBacklog": 3}, "b": {"msgBacklog": 5}},
        "list": [1, 2], "on": True,
    }  # fmt: skip


def test_a_number_of_partitions_is_merged_by_what_its_name_says() -> None:
    waits = [{"txn": "(0,1)", "ageMs": 5, "waiting": 2}, {}, {"txn": "(0,2)", "ageMs": 9, "waiting": 1}]
    for name, values, merged in (
        ("publishRateLimitedTimes", [2, 3], 5),  # a count, though a limit and times are in its name
        ("dispatchThrottledMsgEventsBySubscriptionLimit", [2, 3], 5),
        ("backlogQuotaLimitSize", [10, 10], 10),
        ("earliestMsgPublishTimeInBacklog", [0, 7, 5], 5),  # 0 is a time that is not known
        ("earliestMsgPublishTimeInBacklog", [0, 0], 0),
        ("oldestBacklogMessageAgeSeconds", [-1, 4], 4),
        ("averageMsgSize", [1.0, 3.0], 2.0),
        ("whyBlocked", ["everything was delivered", "no permits"], "no permits"),
        ("blocked", ["", "everything was delivered"], "everything was delivered"),
        ("waitsForTransaction", waits, {"txn": "(0,2)", "ageMs": 9, "waiting": 3}),
        ("ownerBroker", [None, "b"], "b"),
    ):
        assert merge_records([{name: each} for each in values]) == {name: merged}, name


async def test_statistics_say_when_a_subscription_and_a_consumer_were_last_active(tmp_path: Path) -> None:
    names = ("lastConsumedFlowTimestamp", "lastConsumedTimestamp", "lastAckedTimestamp")
    async with serving(tmp_path) as (http, broker, running):

        async def told() -> list[list[int]]:
            found = (await http.get(f"{T}/stats"))["subscriptions"]["s"]
            return [[of[name] for name in names] for of in (found, *found["consumers"])]

        raw, began = await _client(running, broker), running.world.clock.wall_ms()
        await raw.open_producer()
        await raw.subscribe(permits=0)
        assert await told() == [[0, 0, 0], [0, 0, 0]]
        raw.publish(1)
        raw.send(flow=pulsar.CommandFlow(consumer_id=1, messagePermits=10))
        place = (await raw.next("message")).message_id
        (flow, consumed, acked), of_consumer = await told()
        assert began <= flow <= consumed
        assert (acked, of_consumer) == (0, [flow, consumed, 0])
        ack = pulsar.CommandAck(consumer_id=1, ack_type=pulsar.CommandAck.Individual, request_id=9)
        ack.message_id.append(place)
        raw.send(ack=ack)
        await raw.next("ack_response")
        (_, _, acked), of_consumer = await told()
        assert acked >= consumed
        assert of_consumer == [flow, consumed, acked]
        marked = (await http.get(f"{T}/stats"))["subscriptions"]["s"]["lastMarkDeleteAdvancedTimestamp"]
        assert marked >= acked
        await raw.stream.close()


async def test_statistics_say_how_old_the_oldest_of_the_backlog_is_and_whose(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, running):
        raw = await _client(running, broker)
        await raw.open_producer()
        await raw.subscribe(permits=0)
        raw.publish(1)
        await raw.next("send_receipt")
        found = await http.get(f"{T}/stats?getPreciseBacklog=true&getEarliestTimeInBacklog=true")
        assert found["oldestBacklogMessageSubscriptionName"] == "s"
        assert 0 <= found["oldestBacklogMessageAgeSeconds"] < 60
        await raw.stream.close()


def _bomb(sequence_id: int, size: int) -> bytes:
    """The client-part of a few KB that unfolds to so many bytes."""
    metadata = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1, compression=3)
    return encode_entry(metadata, bytes(size))


@pytest.mark.parametrize("page", [False, True])
async def test_payloads_that_unfold_have_their_place_in_memory_until_they_have_left(tmp_path: Path, page: bool) -> None:
    """Callers that read nothing hold what was shown to them, and no more than all answers may have."""
    size = 5_000_000  # more than the kernel takes for a connection
    async with serving(tmp_path, client_memory_bytes=48 << 20) as (http, broker, running):
        raw = await _client(running, broker)
        await raw.open_producer()
        raw.send(_bomb(1, size), send=pulsar.CommandSend(producer_id=1, sequence_id=1))
        id_ = (await raw.next("send_receipt")).message_id
        memory = broker.topic_manager.memory.answers
        path = f"{T}/examinemessage?initialPosition=earliest&messagePosition=1"
        if page:
            topic = T.removeprefix("/admin/v2/")
            path = f"/ui/topics/{topic}/messages?id={id_.ledgerId}:{id_.entryId}&download=1"
        shown = await http.ask("GET", path)
        assert (shown.status, shown.body) == (200, bytes(size))
        assert memory.held < size
        unread = []
        for _ in range(8):
            reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port, limit=1 << 10)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {http.endpoint}\r\n\r\n".encode())
            unread.append((reader, writer))
        statuses = [int((await reader.readuntil(b"\r\n")).split()[1]) for reader, _ in unread]
        assert set(statuses) == {200, 429}
        assert memory.held <= memory.limit
        for _, writer in unread:
            writer.transport.abort()
        async with asyncio.timeout(20):
            while memory.held >= size:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await http.ask("GET", path)).status == 200
        await raw.stream.close()


async def test_a_message_with_a_long_key_is_shown_and_what_has_no_room_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, running):
        raw = await _client(running, broker)
        await raw.open_producer()
        metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, partition_key="k" * 1_000_000)
        metadata.properties.add(key="p", value="\u00e9" * 10_000)
        raw.send(encode_entry(metadata, b"m"), send=pulsar.CommandSend(producer_id=1, sequence_id=1))
        await raw.next("send_receipt")
        shown = await http.ask("GET", f"{T}/examinemessage?initialPosition=earliest&messagePosition=1")
        assert (shown.status, shown.body) == (200, b"m")
        assert shown.headers["x-magnetar-left-out"] == "X-Pulsar-partition-key, X-Pulsar-PROPERTY"
        assert shown.headers["x-pulsar-producer-name"] == "p"
        assert "x-pulsar-partition-key" not in shown.headers


def test_more_properties_than_are_read_are_named_as_left_out() -> None:
    metadata = MessageMetadata(producer_name="p", publish_time=1)
    for number in range(MANY_PROPERTIES + 1):
        metadata.properties.add(key=str(number), value="")
    headers = dict(messages._encoded(messages._headers(metadata)))
    assert headers[b"X-Magnetar-Left-Out"] == b"X-Pulsar-PROPERTY"
    assert headers[b"X-Pulsar-producer-name"] == b"p"
    del metadata.properties[0]
    assert messages._headers(metadata)["X-Pulsar-PROPERTY"] is not None
