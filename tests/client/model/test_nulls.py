"""Null is not empty: the key and the value of a pair, on every way from a producer to its readers and copies."""

from base64 import b64encode
from datetime import timedelta
from itertools import product
from typing import Any

import pytest

from magnetar.broker.subscription.core.redelivery_backoff import DeadLetterOrigin, make_dead_letters
from magnetar.client.client import Client
from magnetar.client.model.composite_schemas import KeyValueEncodingType, KeyValueSchema
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.schema import BytesSchema, StringSchema
from magnetar.client.model.settings import ConsumerDeadLetterPolicy, ConsumerType, InitialPosition
from magnetar.client.produce.entry_writer import Extras, MessageDraft, make_outgoing_message
from magnetar.proto.entry import decode_batch, encode_batch, encode_broker_part, encode_item_prefix, parse_header
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.proto.names import Position, TopicName
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

APART = KeyValueSchema(StringSchema(), StringSchema(), KeyValueEncodingType.SEPARATED)
TOGETHER = KeyValueSchema(StringSchema(), StringSchema(), KeyValueEncodingType.INLINE)
PAIRS: list[Any] = list(product([None, "", "k"], [None, "", "v"]))


@pytest.mark.parametrize("pairs", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("batched", [False, True])
async def test_a_pair_comes_with_its_nulls_to_a_consumer_and_in_its_copies(
    client: Client, broker: FakeBroker, /, pairs: KeyValueSchema, batched: bool
) -> None:
    producer = await client.create_producer("t", schema=pairs, batching_enabled=batched)
    policy = ConsumerDeadLetterPolicy(max_redeliver_count=1)
    consumer = await client.subscribe(
        "t", "s", ConsumerType.Shared, schema=pairs, initial_position=InitialPosition.Earliest,
        negative_ack_redelivery_delay_ms=100, enable_retry=True, dead_letter_policy=policy,
    )  # fmt: skip
    for pair in [*PAIRS, None]:
        await producer.send(pair)
    dead = await client.create_reader("t-s-DLQ", MessageId.earliest, schema=pairs)
    for _times in range(2):
        came = [await consumer.receive(60_000) for _ in range(len(PAIRS) + 1)]
        assert [each.value() for each in came] == [*PAIRS, None]
        for each in came:
            await consumer.reconsume_later(each, timedelta(milliseconds=10))
    assert [(await dead.read_next(60_000)).value() for _ in range(len(PAIRS) + 1)] == [*PAIRS, None]


def test_a_pair_apart_says_null_as_javas_client_does() -> None:
    for key, value in PAIRS:
        made = make_outgoing_message((key, value), Extras(), APART, lambda: 0)
        assert made.null_value == (value is None)
        assert made.null_key == (key is None)
        assert made.partition_key == (None if key is None else b64encode(key.encode()).decode())
        assert MessageDraft(made, APART).value() == (key, value)
    assert MessageDraft(make_outgoing_message(None, Extras(), APART, lambda: 0), APART).value() is None


def test_a_copy_by_the_broker_keeps_what_is_null() -> None:
    singles = [
        SingleMessageMetadata(payload_size=0, null_partition_key=True, null_value=True),
        SingleMessageMetadata(payload_size=0, partition_key="", partition_key_b64_encoded=True),
    ]
    items = [part for each in singles for part in (encode_item_prefix(each), b"")]
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    entry = encode_broker_part(1, 5) + encode_batch(metadata, items, 2)
    source = DeadLetterOrigin(TopicName.parse("t"), "s", Position(1, 2), 3, 2)
    first, second = (
        decode_batch(parse_header(each), each)[0][0] for each in make_dead_letters(source, entry, frozenset(), 1)
    )
    assert (first.null_partition_key, first.null_value, first.HasField("partition_key")) == (True, True, False)
    assert (second.null_partition_key, second.null_value, second.HasField("partition_key")) == (False, False, True)


async def test_an_empty_key_is_a_key_in_a_copy(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", schema=BytesSchema())
    consumer = await client.subscribe("t", "s", ConsumerType.Shared, enable_retry=True)
    await producer.send(b"x", partition_key="")
    await producer.send(b"y")
    for _ in range(2):
        message = await consumer.receive(60_000)
        assert message.has_null_key() == (message.data() == b"y")
        await consumer.reconsume_later(message, timedelta(milliseconds=10))
    for _ in range(2):
        message = await consumer.receive(60_000)
        assert message.has_null_key() == (message.data() == b"y")
