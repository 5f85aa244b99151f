"""What Pulsar's documentation shows of Python producers, with `import magnetar as pulsar`, on a broker and a bookie."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

import magnetar as pulsar
from tests.support.cluster import cluster

Example = Callable[[str], None]


def hello_world(url: str) -> None:
    client = pulsar.Client(url)
    producer = client.create_producer("my-topic")
    for i in range(10):
        producer.send(("Hello-%d" % i).encode("utf-8"))  # noqa: UP031
    client.close()


def asynchronous(url: str) -> None:
    def callback(res: pulsar.Result, msg_id: pulsar.MessageId) -> None:
        results.append((res, msg_id))

    results: list[tuple[pulsar.Result, pulsar.MessageId]] = []
    client = pulsar.Client(url)
    producer = client.create_producer(
        "my-topic", block_if_queue_full=True, batching_enabled=True, batching_max_publish_delay_ms=10
    )
    for i in range(100):
        producer.send_async(f"Hello-{i}".encode(), callback)
    producer.flush()
    assert [result for result, _ in results] == [pulsar.Result.Ok] * 100
    assert len({str(id_) for _, id_ in results}) == 100
    client.close()


def with_everything(url: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe("my-topic", "my-sub", initial_position=pulsar.InitialPosition.Earliest)
    producer = client.create_producer(
        "my-topic", producer_name="producer-1", compression_type=pulsar.CompressionType.LZ4, send_timeout_millis=30000,
        properties={"producer-name": "test-producer-name", "producer-id": "test-producer-id"},
    )  # fmt: skip
    producer.send(b"a", properties={"a": "b"}, partition_key="key", ordering_key="order", event_timestamp=123)
    producer.send(b"later", deliver_after=timedelta(milliseconds=50))
    producer.send(None, partition_key="key")
    message = consumer.receive(10_000)
    assert (message.data(), message.properties(), message.event_timestamp()) == (b"a", {"a": "b"}, 123)
    assert (message.partition_key(), message.ordering_key(), message.producer_name()) == ("key", "order", "producer-1")
    found = {message.data(): message for message in (consumer.receive(10_000), consumer.receive(10_000))}
    assert set(found) == {b"later", b""}
    assert found[b""].has_null_value()
    client.close()


def chunking(url: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(
        "my-topic", "my-subscription", max_pending_chunked_message=5, auto_ack_oldest_chunked_message_on_queue_full=True
    )
    producer = client.create_producer("my-topic", batching_enabled=False, chunking_enabled=True)
    data = bytes(range(256)) * 4 * (12 << 10)
    producer.send(data)
    message = consumer.receive(30_000)
    assert message.data() == data
    consumer.acknowledge(message)
    client.close()


def deduplication(url: str) -> None:
    client = pulsar.Client(url)
    producer = client.create_producer("dedup-topic", producer_name="producer-1", send_timeout_millis=0)
    assert producer.last_sequence_id() == -1
    for i in range(5):
        producer.send(f"{i}".encode(), sequence_id=i)
    producer.close()
    producer = client.create_producer("dedup-topic", producer_name="producer-1", send_timeout_millis=0)
    assert producer.last_sequence_id() == 4
    for i in range(3, 8):
        producer.send(f"{i}".encode(), sequence_id=i)
    reader = client.create_reader("dedup-topic", pulsar.MessageId.earliest)
    assert [reader.read_next(10_000).data() for _ in range(8)] == [b"%d" % i for i in range(8)]
    assert not reader.has_message_available()
    client.close()


def key_based_batching(url: str) -> None:
    client = pulsar.Client(url)
    producer = client.create_producer(
        "my-topic", batching_enabled=True, batching_type=pulsar.BatchingType.KeyBased, batching_max_publish_delay_ms=50
    )
    consumer = client.subscribe("my-topic", "sub", pulsar.ConsumerType.KeyShared)
    for i in range(20):
        producer.send_async(b"%d" % i, None, partition_key=f"key-{i % 4}")
    producer.flush()
    seen: dict[str, list[int]] = {}
    for _ in range(20):
        message = consumer.receive(10_000)
        seen.setdefault(message.partition_key(), []).append(int(message.data()))
        consumer.acknowledge(message)
    assert seen == {f"key-{key}": list(range(key, 20, 4)) for key in range(4)}
    client.close()


def access_modes(url: str) -> None:
    client = pulsar.Client(url, operation_timeout_seconds=2)
    first = client.create_producer("exclusive", access_mode=pulsar.ProducerAccessMode.Exclusive)
    with pytest.raises(pulsar.PulsarException):
        client.create_producer("exclusive", access_mode=pulsar.ProducerAccessMode.Exclusive)
    second = client.create_producer("exclusive", access_mode=pulsar.ProducerAccessMode.ExclusiveWithFencing)
    second.send(b"mine")
    with pytest.raises(pulsar.ProducerFenced):
        first.send(b"not mine any more")
    client.close()


EXAMPLES: list[Example] = [
    hello_world, asynchronous, with_everything, chunking, deduplication, key_based_batching, access_modes,
]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.__name__)
async def test_the_documented_examples_of_producers_run(tmp_path: Path, example: Example) -> None:
    async with cluster(tmp_path, deduplication=True) as running:
        await asyncio.to_thread(example, f"pulsar://{running.brokers[0].endpoint}")
