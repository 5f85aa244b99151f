"""Commands in every wrong state, and what Pulsar's clients silently rely on; a broker in the simulator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.common.config import MESSAGE_BYTES_LIMIT, BrokerConfig
from magnetar.broker.pulsar import connection as connection_module
from magnetar.broker.pulsar import consumer as consumer_module
from magnetar.broker.pulsar import producer as producer_module
from magnetar.broker.pulsar.consumer import PulsarConsumerHandler
from magnetar.broker.pulsar.frames import encode_frame, parse_frame
from magnetar.broker.pulsar.producer import PulsarProducerHandler, compute_payload_bytes_max
from magnetar.broker.session.producer import METADATA_BYTES_LIMIT, compute_metadata_bytes_max
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import encode_batch, encode_client_part, encode_plain_items, join_client_part
from magnetar.proto.entry_pb2 import MessageIdData, MessageMetadata
from magnetar.proto.errors import Unauthenticated
from magnetar.runtime.access import Caller, Principal, PrincipalKind
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Closed, Raw, T, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

Command = pulsar.BaseCommand


# ------------------------------------------------------------------ states
@pytest.mark.parametrize(
    "first",
    [
        struct.pack(">I", 0), struct.pack(">I", 1 << 30), b"GET / HTTP/1.1\r\n\r\n",
        encode_frame(ping=pulsar.CommandPing()),
        encode_frame(flow=pulsar.CommandFlow(consumer_id=1, messagePermits=1)), struct.pack(">II", 8, 4) + b"\xff" * 4,
    ],
    ids=["empty", "huge", "http", "ping", "flow", "garbage"],
)  # fmt: skip
async def test_what_is_no_connect_ends_the_connection_and_no_other(
    world: World, endpoint: Endpoint, /, first: bytes
) -> None:
    other = await Raw.connected(world, endpoint)
    raw = Raw(await world.network.connect_bytes(endpoint))
    raw.stream.write_nowait(first)
    await raw.ended()
    other.send(ping=pulsar.CommandPing())
    await other.next("pong")


async def test_a_second_connect_and_what_only_a_broker_sends_end_the_connection(
    world: World, endpoint: Endpoint, /
) -> None:
    for command in (
        {"connect": pulsar.CommandConnect(client_version="again")},
        {"success": pulsar.CommandSuccess(request_id=1)},
        {"send": pulsar.CommandSend(producer_id=1, sequence_id=1)},  # without an entry, of no producer
    ):
        raw = await Raw.connected(world, endpoint)
        raw.send(**command)
        if "success" in command:
            assert (await raw.next("error")).request_id == 1
        else:
            await raw.ended()


async def test_a_client_of_the_first_version_and_of_a_later_one_are_answered_in_what_both_know(
    world: World, endpoint: Endpoint, /
) -> None:
    for version, answered in ((0, 1), (6, 6), (21, 21), (99, 21)):
        raw = Raw(await world.network.connect_bytes(endpoint))
        raw.send(connect=pulsar.CommandConnect(client_version="x", protocol_version=version))
        found = await raw.next("connected")
        assert found.protocol_version == answered
        assert found.max_message_size == 5 << 20


async def test_entries_of_an_unknown_producer_are_passed_over(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    raw.publish(1, producer_id=9)
    raw.send(flow=pulsar.CommandFlow(consumer_id=9, messagePermits=1))
    raw.send(ping=pulsar.CommandPing())
    await raw.next("pong")
    for command in ("close_producer", "close_consumer"):
        kind = {"close_producer": pulsar.CommandCloseProducer, "close_consumer": pulsar.CommandCloseConsumer}
        field = "producer_id" if command == "close_producer" else "consumer_id"
        raw.send(**{command: kind[command](request_id=5, **{field: 9})})
        assert (await raw.next("success")).request_id == 5


async def test_requests_about_no_consumer_are_answered_in_their_own_kind(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    raw.send(seek=pulsar.CommandSeek(consumer_id=9, request_id=1, message_publish_time=0))
    raw.send(unsubscribe=pulsar.CommandUnsubscribe(consumer_id=9, request_id=2))
    raw.send(get_last_message_id=pulsar.CommandGetLastMessageId(consumer_id=9, request_id=3))
    found = {}
    for _ in range(3):
        error = await raw.next("error")
        found[error.request_id] = error.error
    assert found == {1: pulsar.MetadataError, 2: pulsar.MetadataError, 3: pulsar.MetadataError}
    raw.send(consumer_stats=pulsar.CommandConsumerStats(consumer_id=9, request_id=4))
    assert (await raw.next("consumer_stats_response")).error_code == pulsar.ConsumerNotFound
    raw.send(get_schema=pulsar.CommandGetSchema(request_id=5, topic=T))
    assert (await raw.next("get_schema_response")).error_code == pulsar.TopicNotFound
    raw.send(lookup=pulsar.CommandLookupTopic(request_id=6, topic="a/b"))
    lookup = await raw.next("lookup_response")
    assert (lookup.response, lookup.error) == (lookup.Failed, pulsar.InvalidTopicName)
    raw.send(lookup=pulsar.CommandLookupTopic(request_id=7, topic=T, advertised_listener_name="other"))
    lookup = await raw.next("lookup_response")
    assert lookup.message == "the broker do not have other listener"
    raw.send(partitioned_metadata=pulsar.CommandPartitionedTopicMetadata(
        request_id=8, topic="persistent://public/none/t"
    ))  # fmt: skip
    partitions = await raw.next("partitioned_metadata_response")
    assert (partitions.response, partitions.error) == (partitions.Failed, pulsar.TopicNotFound)


async def _partitions_of(raw: Raw, topic: str, **flags: bool) -> Any:
    raw.send(partitioned_metadata=pulsar.CommandPartitionedTopicMetadata(request_id=1, topic=topic, **flags))
    return await raw.next("partitioned_metadata_response")


async def _topics(raw: Raw) -> list[str]:
    raw.send(get_topics_of_namespace=pulsar.CommandGetTopicsOfNamespace(request_id=1, namespace="public/default"))
    return sorted((await raw.next("get_topics_of_namespace_response")).topics)


async def test_who_asks_for_the_partitions_of_a_topic_makes_none(world: World, endpoint: Endpoint, /) -> None:
    """As in Pulsar: it is made by who uses it, unless the namespace's topics have partitions."""
    raw = await Raw.connected(world, endpoint)
    for flags in ({}, {"metadata_auto_creation_enabled": True}):
        found = await _partitions_of(raw, T, **flags)
        assert (found.response, found.partitions) == (found.Success, 0)
    found = await _partitions_of(raw, T, metadata_auto_creation_enabled=False)
    assert (found.response, found.error) == (found.Failed, pulsar.TopicNotFound)
    assert await _topics(raw) == []
    for use in (raw.open_producer(1), raw.subscribe(2, T + "2")):
        assert not isinstance(await use, pulsar.CommandError)
    assert await _topics(raw) == [T, T + "2"]
    found = await _partitions_of(raw, T, metadata_auto_creation_enabled=False)
    assert (found.response, found.partitions) == (found.Success, 0)


# ------------------------------------------------------------------ producers
async def test_receipts_echo_the_sequence_ids_in_order(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    opened = await raw.open_producer()
    assert (opened.producer_ready, opened.last_sequence_id) == (True, -1)
    for sequence_id in (5, 1, 1, 900):
        raw.publish(sequence_id, highest_sequence_id=sequence_id + 2)
    receipts = [await raw.next("send_receipt") for _ in range(4)]
    found = [(each.sequence_id, each.highest_sequence_id) for each in receipts]
    assert found == [(5, 7), (1, 3), (1, 3), (900, 902)]
    assert [each.message_id.entryId for each in receipts] == [0, 1, 2, 3]


async def test_an_entry_that_is_damaged_is_refused_in_its_place(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    metadata = MessageMetadata(producer_name="p", sequence_id=2, publish_time=1)
    raw.publish(1)
    damaged = encode_client_part(metadata, b"payload")[:-1] + b"x"
    raw.send(damaged, send=pulsar.CommandSend(producer_id=1, sequence_id=2, highest_sequence_id=3))
    raw.publish(4)
    assert (await raw.next("send_receipt", "send_error")).sequence_id == 1
    refused = await raw.next("send_receipt", "send_error")
    assert (refused.sequence_id, refused.error) == (3, pulsar.ChecksumError)
    assert (await raw.next("send_receipt", "send_error")).sequence_id == 4


def of_bytes(metadata: bytes, payload: bytes = b"x") -> bytes:
    return join_client_part(metadata, payload)


PLAIN = MessageMetadata(producer_name="p", sequence_id=2, publish_time=1)
CONTRADICTION = MessageMetadata(producer_name="p", sequence_id=2, publish_time=1, num_messages_in_batch=60_000)
LOWER = MessageMetadata(producer_name="p", sequence_id=2, publish_time=1, highest_sequence_id=1)


@pytest.mark.parametrize(
    ("entry", "options"),
    [
        (b"\x0e\x01" + bytes(4) + b"\x00\x00\x00\x01\xff", {}),
        (b"\x0e\x01" + bytes(4) + b"\xff\xff\xff\xff", {}),
        (b"\x0e\x02\x00\x00\xff\xff" + bytes(20), {}),
        (b"short", {}),
        (b"", {}),
        (of_bytes(PLAIN.SerializeToString())[:-1] + b"y", {}),
        (of_bytes(PLAIN.SerializeToString()[3:]), {}),
        (of_bytes(PLAIN.SerializeToString().replace(b"\x0a\x01p", b"\x0a\x01\xff")), {}),
        (of_bytes(CONTRADICTION.SerializeToString()), {}),
        (of_bytes(LOWER.SerializeToString()), {}),
        (of_bytes(PLAIN.SerializeToString()), {"highest_sequence_id": 1}),
    ],
    ids=["garbage", "endless", "broker-part", "short", "nothing", "checksum", "nameless", "no-text", "count", "below",
         "below-in-the-send"],
)  # fmt: skip
@pytest.mark.parametrize("client", ["Pulsar-CPP-v3.7.0", "Pulsar-Java-v4.0.8"])
@pytest.mark.parametrize("pending_bytes", [1 << 20, 1])
def test_whatever_an_entry_is_it_is_refused_by_the_number_of_its_send_and_the_producer_goes_on(
    entry: bytes, options: dict[str, int], client: str, pending_bytes: int
) -> None:
    """C++'s client opens its connection anew at any number but ChecksumError, and sends the entry again for ever. With
    little credit entries wait for it, and answers keep their order."""

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint, client_version=client)
        await raw.open_producer()
        raw.publish(1)
        raw.send(entry, send=pulsar.CommandSend(producer_id=1, sequence_id=2, **options))
        raw.publish(3)
        answers = [await raw.next("send_receipt", "send_error", "close_producer") for _ in range(3)]
        assert [each.sequence_id for each in answers] == [1, 2, 3]
        first, refused, last = answers
        assert [each.DESCRIPTOR.name for each in (first, last)] == ["CommandSendReceipt"] * 2
        assert refused.message
        assert refused.error in (
            (pulsar.ChecksumError,) if "CPP" in client else (pulsar.ChecksumError, pulsar.NotAllowedError)
        )

    simulate(scenario, pending_bytes=pending_bytes)


@pytest.mark.parametrize(
    ("client", "number"), [("Pulsar-CPP-v3.7.0", pulsar.ChecksumError), ("Pulsar-Java-v4.0.8", pulsar.NotAllowedError)]
)
@pytest.mark.run_by(simulate, max_message_bytes=1000)
async def test_what_declares_to_unfold_to_more_than_a_message_may_have_is_refused(
    world: World, endpoint: Endpoint, /, client: str, number: int
) -> None:
    """Whatever it really has; a chunk declares the size of its whole message, which its readers count."""
    raw = await Raw.connected(world, endpoint, client_version=client)
    await raw.open_producer()
    sizes = (1000, 1000 + METADATA_BYTES_LIMIT, 1001 + METADATA_BYTES_LIMIT, 60 << 20)
    for sequence_id, size in enumerate(sizes):
        head = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1, compression=3)
        head.uncompressed_size = size
        send = pulsar.CommandSend(producer_id=1, sequence_id=sequence_id)
        raw.send(encode_client_part(head, b"x"), send=send)
    answers = [await raw.next("send_receipt", "send_error", "close_producer") for _ in sizes]
    assert [each.sequence_id for each in answers] == [0, 1, 2, 3]
    assert [getattr(each, "error", None) for each in answers] == [None, None, number, number]
    head.uuid, head.num_chunks_from_msg, head.total_chunk_msg_size = "u", 2, 2
    raw.send(encode_client_part(head, b"x"), send=pulsar.CommandSend(producer_id=1, sequence_id=4))
    assert (await raw.next("send_receipt", "send_error")).DESCRIPTOR.name == "CommandSendReceipt"


async def test_a_key_and_a_property_that_are_no_text_are_stored_as_they_are(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    metadata = MessageMetadata(producer_name="p", sequence_id=2, publish_time=1, partition_key="~~~~")
    metadata.properties.add(key="a", value="}}}}")
    encoded = metadata.SerializeToString()
    encoded = encoded.replace(b"~~~~", b"\xff\x00\xfe\x80").replace(b"}}}}", b"\xc3\x28\xff\xff")
    raw.send(of_bytes(encoded), send=pulsar.CommandSend(producer_id=1, sequence_id=2))
    raw.publish(3)
    for sequence_id in (2, 3):
        assert (await raw.next("send_receipt", "send_error", "close_producer")).sequence_id == sequence_id
    for kind, name in ((pulsar.CommandSubscribe.Shared, "s"), (pulsar.CommandSubscribe.Key_Shared, "k")):
        await raw.subscribe(1 + kind, subscription=name, subType=kind)
        assert encoded in (await raw.next_with_rest("message"))[1]
        await raw.next("message")


@pytest.mark.run_by(simulate, pending_bytes=10_000)
async def test_more_entries_than_there_is_credit_for_are_all_stored_in_order(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    for number in range(300):
        raw.publish(number, bytes(1000))
    found = [(await raw.next("send_receipt")).sequence_id for _ in range(300)]
    assert found == list(range(300))


async def test_two_producers_of_one_id_and_of_one_name(world: World, endpoint: Endpoint, /) -> None:
    raw, other = [await Raw.connected(world, endpoint) for _ in range(2)]
    first = await raw.open_producer(producer_name="x")
    again = await raw.open_producer(producer_name="x")
    assert (first.producer_name, again.producer_name, again.last_sequence_id) == ("x", "x", -1)
    busy = await other.open_producer(producer_name="x")
    assert busy.error == pulsar.ProducerBusy
    returned = await other.open_producer(producer_name="x", epoch=1)
    assert returned.producer_name == "x", "the same producer, whose first connection was cut"
    assert (await raw.next("close_producer")).producer_id == 1
    await raw.open_producer(2, producer_name="y")
    raw.publish(1, producer_id=2)
    await raw.next("send_receipt")


async def test_a_producer_that_waits_is_told_so_and_again_when_it_is_its_turn(
    world: World, endpoint: Endpoint, /
) -> None:
    raw, other = [await Raw.connected(world, endpoint) for _ in range(2)]
    await raw.open_producer(producer_access_mode=pulsar.Exclusive)
    waits = await other.open_producer(producer_access_mode=pulsar.WaitForExclusive)
    assert not waits.producer_ready
    raw.send(close_producer=pulsar.CommandCloseProducer(producer_id=1, request_id=7))
    ready = await other.next("producer_success")
    assert (ready.producer_ready, ready.request_id, ready.producer_name) == (
        True, waits.request_id, waits.producer_name,
    )  # fmt: skip
    assert ready.topic_epoch > 0


# ------------------------------------------------------------------ consumers
async def test_permits_are_clamped_and_a_closed_consumer_gets_no_more(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    await raw.subscribe(permits=(1 << 32) - 1)
    raw.send(flow=pulsar.CommandFlow(consumer_id=1, messagePermits=(1 << 32) - 1))
    raw.publish(1)
    message = await raw.next("message")
    assert (message.message_id.entryId, message.redelivery_count, message.message_id.partition) == (0, 0, -1)
    raw.send(close_consumer=pulsar.CommandCloseConsumer(consumer_id=1, request_id=5))
    await raw.next("success")
    await raw.subscribe(2)
    again = await raw.next("message")
    assert (again.consumer_id, again.message_id.entryId) == (2, 0)


async def test_a_message_is_the_stored_entry_without_the_brokers_part(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    raw.publish(1, b"payload")
    await raw.subscribe()
    _, rest = await raw.next_with_rest("message")
    assert rest[:2] == b"\x0e\x01"
    assert rest.endswith(b"payload")


async def test_a_seek_closes_first_moves_then_and_answers(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    for number in range(3):
        raw.publish(number)
    await raw.subscribe()
    ids = [(await raw.next("message")).message_id for _ in range(3)]
    raw.send(ack=pulsar.CommandAck(consumer_id=1, ack_type=0, message_id=ids, request_id=3))
    assert not (await raw.next("ack_response")).HasField("error")
    raw.send(seek=pulsar.CommandSeek(consumer_id=1, request_id=4, message_id=ids[1]))
    order = [await raw.next("close_consumer", "success", "message") for _ in range(2)]
    assert [type(each).__name__ for each in order] == ["CommandCloseConsumer", "CommandSuccess"]
    await raw.subscribe()
    found = [(await raw.next("message")).message_id.entryId for _ in range(2)]
    assert found == [1, 2]


@pytest.mark.parametrize("by_time", [False, True])
def test_a_reader_goes_on_where_its_seek_went(by_time: bool) -> None:
    """Pulsar's C++ client names no start after a seek by time, and the old one after a seek to a message."""

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        await raw.open_producer()
        for number in range(3):
            raw.publish(number)
        earliest = MessageIdData(ledgerId=(1 << 64) - 1, entryId=(1 << 64) - 1)
        reader: dict[str, Any] = {"subType": 0, "durable": False, "subscription": "reader-x"}
        await raw.subscribe(start_message_id=earliest, **reader)
        ids = [(await raw.next("message")).message_id for _ in range(3)]
        seek = {"message_publish_time": 0} if by_time else {"message_id": ids[1]}
        raw.send(seek=pulsar.CommandSeek(consumer_id=1, request_id=4, **seek))
        await raw.next("success")
        await raw.subscribe(**reader)
        assert (await raw.next("message")).message_id.entryId == (0 if by_time else 1)
        await raw.stream.close()
        await asyncio.sleep(5)

    broker = simulate(scenario)
    assert not [
        topic for topic in broker.topics.values() if topic.connected_client_count
    ], "nothing of the connection is left"


async def test_unsubscribing_takes_force_while_others_are_connected(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.subscribe(1)
    await raw.subscribe(2)
    raw.send(unsubscribe=pulsar.CommandUnsubscribe(consumer_id=1, request_id=1))
    assert (await raw.next("error", "success")).error == pulsar.MetadataError
    raw.send(unsubscribe=pulsar.CommandUnsubscribe(consumer_id=1, request_id=2, force=True))
    assert (await raw.next("close_consumer")).consumer_id == 2
    await raw.next("success")


async def test_what_a_client_may_not_acknowledge_is_told_with_a_receipt_and_passed_over_without(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    raw.publish(1)
    await raw.subscribe()
    id_ = (await raw.next("message")).message_id
    beyond = MessageIdData(ledgerId=id_.ledgerId, entryId=77)
    for request, given in enumerate(
        (
            {"ack_type": 1, "message_id": [id_]}, {"ack_type": 0, "message_id": [beyond]},
            {"ack_type": 1, "message_id": []},
            {"ack_type": 0, "message_id": [id_], "txnid_least_bits": 0, "txnid_most_bits": 0},
        )
    ):
        raw.send(ack=pulsar.CommandAck(consumer_id=1, **given))
        raw.send(ack=pulsar.CommandAck(consumer_id=1, request_id=request, **given))
        answer = await raw.next("ack_response")
        assert (answer.request_id, answer.HasField("error")) == (request, True), given
    raw.send(ack=pulsar.CommandAck(consumer_id=1, ack_type=0, message_id=[id_], request_id=9))
    assert not (await raw.next("ack_response")).HasField("error")


async def test_a_message_says_what_is_left_of_its_batch_and_since_when_it_is_valid(
    world: World, endpoint: Endpoint, /
) -> None:
    """What Java's client reads of it: the ack set, and the epoch that it gave last."""
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    payloads = [b"%d" % number for number in range(70)]
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    entry = encode_batch(metadata, encode_plain_items(payloads), 70)
    raw.send(entry, send=pulsar.CommandSend(producer_id=1, sequence_id=1, num_messages=70))
    await raw.subscribe(subType=2, consumer_epoch=0)
    message = await raw.next("message")
    assert (message.consumer_epoch, message.HasField("consumer_epoch"), list(message.ack_set)) == (0, True, [])
    partly = MessageIdData(ledgerId=message.message_id.ledgerId, entryId=0, ack_set=[-2, 0b111111])
    raw.send(ack=pulsar.CommandAck(consumer_id=1, ack_type=0, message_id=[partly]))
    raw.send(redeliver_unacknowledged_messages=pulsar.CommandRedeliverUnacknowledgedMessages(
        consumer_id=1, consumer_epoch=3
    ))  # fmt: skip
    again = await raw.next("message")
    assert (again.consumer_epoch, list(again.ack_set), again.redelivery_count) == (3, [-2, 0b111111], 1)


async def test_a_producer_gets_the_version_of_its_schema_and_without_one_an_empty_version(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    schema = pulsar.Schema(name="s", schema_data=b"", type=1)
    bare = await raw.open_producer(2)
    assert (bare.HasField("schema_version"), bare.schema_version) == (True, b"")
    opened = await raw.open_producer(schema=schema)
    assert opened.schema_version == bytes(8)
    raw.send(get_or_create_schema=pulsar.CommandGetOrCreateSchema(request_id=1, topic=T, schema=schema))
    answer = await raw.next("get_or_create_schema_response")
    assert (answer.HasField("error_code"), answer.schema_version) == (False, bytes(8))


async def test_ranges_of_keys_that_overlap_are_refused_as_ranges(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    sticky = {"keySharedMode": pulsar.STICKY}
    mine = pulsar.KeySharedMeta(hashRanges=[pulsar.IntRange(start=0, end=99)], **sticky)
    other = pulsar.KeySharedMeta(hashRanges=[pulsar.IntRange(start=99, end=200)], **sticky)
    assert isinstance(await raw.subscribe(1, subType=3, keySharedMeta=mine), pulsar.CommandSuccess)
    assert (await raw.subscribe(2, subType=3, keySharedMeta=other)).error == pulsar.ConsumerAssignError
    assert (await raw.subscribe(3, subType=1)).error == pulsar.ConsumerBusy


# ------------------------------------------------------------------ time
@pytest.mark.parametrize("what", ["ping", "pong"])
async def test_a_client_that_sends_pings_without_end_is_cut_and_another_is_not(
    world: World, endpoint: Endpoint, /, what: str
) -> None:
    commands = {"ping": pulsar.CommandPing(), "pong": pulsar.CommandPong()}
    flooding, other = [await Raw.connected(world, endpoint) for _ in range(2)]
    for _ in range(connection_module.PINGS_PER_CHECK_MAX):
        flooding.send(**{what: commands[what]})
    other.send(ping=pulsar.CommandPing())
    await other.next("pong")
    flooding.send(**{what: commands[what]})
    await flooding.ended()
    other.send(ping=pulsar.CommandPing())
    await other.next("pong")


async def test_a_silent_client_is_pinged_and_then_cut_and_one_that_answers_is_not(
    world: World, endpoint: Endpoint, /
) -> None:
    silent, alive = [await Raw.connected(world, endpoint) for _ in range(2)]
    await silent.next("ping")
    for _ in range(4):
        await alive.next("ping")
        alive.send(pong=pulsar.CommandPong())
    await silent.ended()
    alive.send(ping=pulsar.CommandPing())
    await alive.next("pong")


async def test_a_client_that_sends_a_large_frame_slowly_is_not_silent(world: World, endpoint: Endpoint, /) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    part = encode_client_part(MessageMetadata(producer_name="p", sequence_id=7, publish_time=1), bytes(100_000))
    send = encode_frame(send=pulsar.CommandSend(producer_id=1, sequence_id=7))
    data = struct.pack(">I", len(send) - 4 + len(part)) + send[4:] + part
    for at in range(0, len(data), 10_000):
        raw.stream.write_nowait(data[at : at + 10_000])
        await asyncio.sleep(20)
    assert (await raw.next("send_receipt")).sequence_id == 7


async def test_a_connection_without_a_first_command_is_cut(
    world: World, endpoint: Endpoint, /, caplog: pytest.LogCaptureFixture
) -> None:
    raw = Raw(await world.network.connect_bytes(endpoint))
    began = world.clock.monotonic()
    await raw.ended()
    assert world.clock.monotonic() - began < 15
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == [], "no fault of the broker"


class TokenGuard:
    """Takes `ROLE-SECONDS` as a token of that role for so long."""

    def __init__(self) -> None:
        self.now_ms = lambda: 0
        self.ends_ms = 0  # of every token; 0: each has its own end
        self.revoked: set[str] = set()

    async def authenticate(self, caller: Caller) -> Principal:
        scheme, _, token = caller.authorization.partition(" ")
        role, _, seconds = token.partition("-")
        if scheme != "Bearer" or not seconds.isdigit():
            raise Unauthenticated("the token is no token")
        ends_ms = self.ends_ms or self.now_ms() + 1000 * int(seconds)
        return Principal(role, PrincipalKind.CLIENT, "token", ends_ms, is_super=True)

    def authorize(self, principal: Principal, path: str) -> None: ...

    def why_lapsed(self, principal: Principal) -> str:
        return "revoked" if principal.name in self.revoked else ""


def _token(text: bytes) -> dict[str, Any]:
    flags = pulsar.FeatureFlags(supports_auth_refresh=True)
    return {"auth_method_name": "token", "auth_data": text, "feature_flags": flags}


def test_credentials_are_asked_for_anew_and_without_them_the_connection_ends() -> None:
    guard = TokenGuard()

    async def scenario(world: World, endpoint: Endpoint) -> None:
        guard.now_ms = world.clock.wall_ms  # type: ignore[assignment]
        kept = await Raw.connected(world, endpoint, **_token(b"ada-60\n"))
        lost = await Raw.connected(world, endpoint, **_token(b"ada-60"))
        other = await Raw.connected(world, endpoint, **_token(b"ada-60"))
        for raw in (kept, lost, other):
            challenge = await raw.next("auth_challenge")
            assert challenge.challenge.auth_data == b"PulsarAuthRefresh"
        for raw, token in ((kept, b"ada-600"), (other, b"bob-600")):
            response = pulsar.AuthData(auth_method_name="token", auth_data=token)
            raw.send(auth_response=pulsar.CommandAuthResponse(response=response))
        assert (await other.next("error")).error == pulsar.AuthenticationError
        await lost.ended()
        kept.send(ping=pulsar.CommandPing())
        await kept.next("pong")

    simulate(scenario, guard=guard)


def test_the_same_credentials_again_are_asked_for_a_few_times_and_end_the_connection_in_time() -> None:
    guard = TokenGuard()

    async def scenario(world: World, endpoint: Endpoint) -> None:
        guard.now_ms = world.clock.wall_ms  # type: ignore[assignment]
        until_ms, token, asked = world.clock.wall_ms() + 20_000, b"ada-20", 0
        guard.ends_ms = until_ms
        raw = await Raw.connected(world, endpoint, **_token(token))
        await raw.open_producer()
        with contextlib.suppress(Closed):
            while True:
                await raw.next("auth_challenge")
                asked += 1
                response = pulsar.AuthData(auth_method_name="token", auth_data=token)
                raw.send(auth_response=pulsar.CommandAuthResponse(response=response))
        assert 2 <= asked <= 20
        assert world.clock.wall_ms() - until_ms < 1500

    simulate(scenario, guard=guard)


def test_a_connection_that_is_broken_off_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[connection_module.PulsarConnection] = []

    class Seen(connection_module.PulsarConnection):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(connection_module, "PulsarConnection", Seen)

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        await raw.subscribe()
        await raw.open_producer()
        other = await Raw.connected(world, endpoint)
        await other.open_producer()
        for number in range(80):
            other.publish(number, bytes(100_000))
            await other.next("send_receipt")
        connection = made[0]
        waits = connection._stream.queued_bytes
        assert waits, "it reads nothing, so that its stream does not end at once"
        connection.abort(Unauthenticated("it expired"))
        for number in range(3):
            raw.publish(number)
        await asyncio.sleep(0.5)
        assert connection.broker.loaded[T].log.shape.end_index == 80
        await raw.ended()

    simulate(scenario)


def test_a_credential_that_is_revoked_ends_its_connection_within_seconds_and_no_other() -> None:
    guard = TokenGuard()

    async def scenario(world: World, endpoint: Endpoint) -> None:
        guard.now_ms = world.clock.wall_ms  # type: ignore[assignment]
        ada, bob = [await Raw.connected(world, endpoint, **_token(name)) for name in (b"ada-600", b"bob-600")]
        guard.revoked.add("ada")
        began = world.clock.monotonic()
        await ada.ended()
        assert world.clock.monotonic() - began < 5
        bob.send(ping=pulsar.CommandPing())
        await bob.next("pong")

    simulate(scenario, guard=guard)


def test_a_client_that_takes_nothing_is_cut_and_its_memory_is_free() -> None:
    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw, silent = [await Raw.connected(world, endpoint) for _ in range(2)]
        await raw.open_producer()
        await silent.subscribe(permits=1000)
        for number in range(40):
            raw.publish(number, bytes(500_000))
        for _ in range(40):
            await raw.next("send_receipt")
        began = world.clock.monotonic()
        while world.clock.monotonic() - began < 200:  # it says that it lives, and reads nothing
            silent.send(ping=pulsar.CommandPing())
            raw.send(ping=pulsar.CommandPing())
            await raw.next("pong")
            await asyncio.sleep(10)
        await raw.subscribe(2)
        assert (await raw.next("message")).message_id.entryId == 0, "what it held goes to the others"

    broker = simulate(scenario, unread_s=100.0)
    assert broker.topic_manager.memory.requests.held < 1 << 20


@pytest.mark.parametrize(
    "given",
    [
        {}, _token(b"none"), {"auth_method_name": "basic", "auth_data": b"ada:x"},
        {**_token(b"ada-60"), "proxy_to_broker_url": "pulsar://x:1"},
        {**_token(b"ada-60"), "original_principal": "root"},
    ],
    ids=["nothing", "bad", "basic", "proxy", "for another"],
)  # fmt: skip
def test_who_is_not_let_in_is_told_and_cut(given: dict[str, Any]) -> None:
    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = Raw(await world.network.connect_bytes(endpoint))
        raw.send(connect=pulsar.CommandConnect(client_version="x", **given))
        error = await raw.next("error", "connected")
        assert error.error == pulsar.AuthenticationError
        await raw.ended()

    simulate(scenario, guard=TokenGuard())


def test_a_connection_holds_a_bounded_number_of_ids_and_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "RUNNING_REQUESTS_MAX", 5)

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        for number in range(3):
            assert isinstance(await raw.open_producer(number), pulsar.CommandProducerSuccess)
        assert (await raw.open_producer(3)).error == pulsar.NotAllowedError
        for number in range(20):
            raw.send(lookup=pulsar.CommandLookupTopic(request_id=number, topic=T))
        found = [await raw.next("lookup_response") for _ in range(20)]
        assert {each.error for each in found if each.response == each.Failed} <= {pulsar.ServiceNotReady}

    simulate(scenario, connection_ids=3)


@pytest.mark.parametrize("requests_max", [5, connection_module.RUNNING_REQUESTS_MAX])
def test_what_is_asked_for_at_once_waits_and_is_not_refused(
    requests_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "RUNNING_REQUESTS_MAX", requests_max)
    many = 1100 if requests_max > 5 else 40

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        for number in range(many):
            raw.send(producer=pulsar.CommandProducer(topic=T, producer_id=number, request_id=number))
            raw.send(subscribe=pulsar.CommandSubscribe(
                topic=T, consumer_id=number, request_id=number, subscription="s",
                subType=pulsar.CommandSubscribe.Shared,
            ))  # fmt: skip
            raw.send(lookup=pulsar.CommandLookupTopic(request_id=number, topic=T))
            raw.send(partitioned_metadata=pulsar.CommandPartitionedTopicMetadata(request_id=number, topic=T))
        kinds = ("producer_success", "success", "lookup_response", "partitioned_metadata_response")
        found: dict[str, set[int]] = {kind: set() for kind in kinds}
        for _ in range(4 * many):
            answer = await raw.next(*kinds, "error")
            assert not isinstance(answer, pulsar.CommandError), answer
            if isinstance(answer, pulsar.CommandLookupTopicResponse | pulsar.CommandPartitionedTopicMetadataResponse):
                assert answer.response != answer.Failed, answer
            kind = type(answer).__name__.removeprefix("Command")
            found[{
                "ProducerSuccess": kinds[0], "Success": kinds[1], "LookupTopicResponse": kinds[2],
                "PartitionedTopicMetadataResponse": kinds[3],
            }[kind]].add(answer.request_id)  # fmt: skip
        assert all(each == set(range(many)) for each in found.values())

    simulate(scenario)


def test_openings_that_wait_for_their_turn_do_not_stop_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "RUNNING_REQUESTS_MAX", 2)

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        mode = pulsar.ProducerAccessMode
        await raw.open_producer(0, producer_access_mode=mode.Exclusive)
        for number in range(1, 9):
            raw.send(producer=pulsar.CommandProducer(
                topic=T, producer_id=number, request_id=number, producer_access_mode=mode.WaitForExclusive
            ))  # fmt: skip
        for number in range(8):
            raw.send(close_producer=pulsar.CommandCloseProducer(producer_id=number, request_id=50 + number))
            while True:
                ready = await raw.next("producer_success")
                if ready.producer_ready:
                    break
            assert ready.request_id == number + 1

    simulate(scenario)


def test_openings_and_closings_without_end_leave_a_bounded_number_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "RUNNING_REQUESTS_MAX", 5)
    start, most = connection_module.PulsarConnection.start_request, [0]

    def counted(self: connection_module.PulsarConnection, work: Any) -> Any:
        most[0] = max(most[0], len(self._tasks))
        return start(self, work)

    monkeypatch.setattr(connection_module.PulsarConnection, "start_request", counted)

    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        for number in range(300):
            raw.send(producer=pulsar.CommandProducer(topic=T, producer_id=1, request_id=number))
            raw.send(close_producer=pulsar.CommandCloseProducer(producer_id=1, request_id=1000 + number))
            raw.send(lookup=pulsar.CommandLookupTopic(request_id=number, topic=T))
        for _ in range(300):
            await raw.next("lookup_response")

    simulate(scenario)
    assert most[0] <= 5 + 2


def test_a_connection_that_is_lost_leaves_nothing() -> None:
    async def scenario(world: World, endpoint: Endpoint) -> None:
        raw = await Raw.connected(world, endpoint)
        await raw.open_producer()
        await raw.subscribe()
        raw.send(producer=pulsar.CommandProducer(topic=T + "2", producer_id=5, request_id=1))
        await raw.stream.close()
        with pytest.raises((Closed, Exception)):
            await raw.next("nothing")
        await asyncio.sleep(5)

    broker = simulate(scenario)
    assert not [topic for topic in broker.topics.values() if topic.connected_client_count]


@pytest.mark.run_by(simulate, max_message_bytes=1000)
async def test_a_payload_of_the_size_that_was_told_is_stored_with_its_metadata(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await raw.open_producer()
    raw.publish(1, bytes(1000))
    assert (await raw.next("send_receipt", "send_error")).sequence_id == 1
    raw.publish(2, bytes(1000 + METADATA_BYTES_LIMIT))
    assert (await raw.next("send_receipt", "send_error")).error == pulsar.NotAllowedError
    await raw.subscribe()
    assert (await raw.next_with_rest("message"))[1].endswith(bytes(1000))


def test_near_the_bound_of_a_ledger_clients_are_told_less() -> None:
    config = BrokerConfig(max_message_bytes=MESSAGE_BYTES_LIMIT)
    assert (compute_metadata_bytes_max(config), compute_payload_bytes_max(config)) == (
        0,
        MESSAGE_BYTES_LIMIT - METADATA_BYTES_LIMIT,
    )
    assert compute_payload_bytes_max(BrokerConfig(max_message_bytes=1)) == 1


async def test_a_failover_consumer_is_told_whether_it_is_active_after_the_answer_to_its_subscribe(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    failover = {"subType": pulsar.CommandSubscribe.Failover}
    for number, active in ((1, True), (2, False)):
        asked = pulsar.CommandSubscribe(
            topic=T, consumer_id=number, request_id=number, subscription="s", consumer_name=f"c{number}", **failover
        )
        raw.send(subscribe=asked)
        assert type(await raw.next("success", "active_consumer_change")).__name__ == "CommandSuccess"
        change = await raw.next("active_consumer_change")
        assert (change.consumer_id, change.is_active) == (number, active)
    raw.send(close_consumer=pulsar.CommandCloseConsumer(consumer_id=1, request_id=3))
    change = await raw.next("active_consumer_change")
    assert (change.consumer_id, change.is_active) == (2, True)


# ------------------------------------------------------------------ the end of an id
class OneConnection:
    """What a handler says to its connection."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.leaving: list[Any] = []
        self.names = self.handlers = self
        self.caller = SimpleNamespace(peer="127.0.0.1:1", principal=None)
        self.broker = SimpleNamespace(name="b", config=BrokerConfig())

    def make_next_owner_fields(self, error: Exception) -> dict[str, str]:
        return {}

    def send(self, data: bytes) -> None:
        self.said.append(Command.Type.Name(parse_frame(memoryview(data)[4:])[0].type))

    def send_error(self, request_id: int, error: Exception, number: Any = None) -> None:
        self.said.append("ERROR")

    def send_success(self, request_id: int) -> None:
        self.said.append("SUCCESS")

    def start_request(self, work: Any) -> asyncio.Task[None]:
        return asyncio.ensure_future(work)

    def start_uncancelled_cleanup(self, work: Any) -> None:
        self.leaving.append(work)

    def find_replaced_instance(self, *of: object) -> str:
        return "instance"

    def remove_producer(self, *of: object) -> None: ...
    remove_consumer = count_waiting_bytes = add = remove = remove_producer


@pytest.mark.parametrize("kind", [PulsarProducerHandler, PulsarConsumerHandler])
async def test_an_id_that_the_broker_closes_ends_once_and_says_nothing_after_it(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its opening ends in the turn in which it is closed."""
    may_open: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    left: list[bool] = []

    class Session:
        @staticmethod
        async def open(*of: object) -> Any:
            return await may_open

        name, last_sequence_id, topic_epoch, schema_version, producer = "n", -1, None, None, SimpleNamespace()

        def leave(self) -> Any:
            left.append(True)
            (done := asyncio.get_running_loop().create_future()).set_result(None)
            return done

        def on_credentials_renewed(self, principal: object) -> None: ...

    module = producer_module if kind is PulsarProducerHandler else consumer_module
    monkeypatch.setattr(module, "ProducerSession" if kind is PulsarProducerHandler else "ConsumerSession", Session)
    connection = OneConnection()
    asked = (
        pulsar.CommandProducer(topic=T, producer_id=1, request_id=1, producer_name="n")
        if kind is PulsarProducerHandler
        else pulsar.CommandSubscribe(topic=T, subscription="s", consumer_id=1, request_id=1, subType=0)
    )
    handler = kind(connection, asked)
    handler.start_opening()
    await asyncio.sleep(0)
    may_open.set_result(Session())
    handler.on_closed(Unauthenticated("no longer"))
    handler.on_closed(Unauthenticated("no longer"))
    assert len(connection.leaving) == 1, "it leaves once"
    await asyncio.sleep(0)
    await connection.leaving[0]
    assert connection.said in (["CLOSE_PRODUCER"], ["CLOSE_CONSUMER"])
    assert left == [True]
