"""What Pulsar's documentation shows of Python consumers, readers and table views, with `import magnetar as pulsar`, on
a broker and a bookie. (Of producers: tests/broker/topic/test_producer_examples.py.)
"""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import magnetar as pulsar
from magnetar.asyncio import Client as AsyncClient

Example = Callable[[str], None]
WAIT = 10_000


def soon(holds: Callable[[], bool]) -> None:
    """What a listener, or a table, is told a moment later."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def consumer(url: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe("my-topic", "my-subscription", negative_ack_redelivery_delay_ms=10)
    producer = client.create_producer("my-topic")
    for i in range(3):
        producer.send(("Hello-%d" % i).encode("utf-8"))  # noqa: UP031
    seen: list[bytes] = []
    while len(seen) < 4:
        msg = consumer.receive()
        try:
            seen.append(msg.data())
            if seen == [b"Hello-0"]:
                raise ValueError("cannot be processed the first time")
            consumer.acknowledge(msg)
        except ValueError:
            consumer.negative_acknowledge(msg)
    assert sorted(seen) == [b"Hello-0", b"Hello-0", b"Hello-1", b"Hello-2"]
    with pytest.raises(pulsar.Timeout):
        consumer.receive(timeout_millis=50)
    consumer.unsubscribe()
    client.close()


def consumer_with_a_listener(url: str) -> None:
    client, seen, done = pulsar.Client(url), list[bytes](), threading.Event()

    def listener(consumer: Any, message: pulsar.Message) -> None:
        seen.append(message.data())
        consumer.acknowledge(message)
        if len(seen) == 3:
            done.set()

    client.subscribe("listened", "sub", consumer_type=pulsar.ConsumerType.Shared, message_listener=listener)
    producer = client.create_producer("listened")
    for i in range(3):
        producer.send(b"hello-%d" % i)
    assert done.wait(10)
    assert seen == [b"hello-0", b"hello-1", b"hello-2"]
    client.close()


def batch_receive(url: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(
        "in-batches", "sub", consumer_type=pulsar.ConsumerType.Shared,
        batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(10, -1, -1),
    )  # fmt: skip
    timed = client.subscribe(
        "in-batches", "timed",
        batch_receive_policy=pulsar.ConsumerBatchReceivePolicy(
            max_num_message=100, max_num_bytes=10 * 1024 * 1024, timeout_ms=100
        ),
    )  # fmt: skip
    producer = client.create_producer("in-batches")
    for i in range(10):
        producer.send(b"hello-%d" % i)
    messages = consumer.batch_receive()
    assert [message.data() for message in messages] == [b"hello-%d" % i for i in range(10)]
    for message in messages:
        consumer.acknowledge(message)
    assert [message.data() for message in timed.batch_receive()] == [b"hello-%d" % i for i in range(10)]
    assert timed.batch_receive() == []
    client.close()


def reader(url: str) -> None:
    client = pulsar.Client(url)
    producer = client.create_producer("read")
    ids = [producer.send(b"hello-%d" % i) for i in range(10)]
    reader = client.create_reader("read", pulsar.MessageId.earliest)
    read = []
    while reader.has_message_available():
        read.append(reader.read_next().data())
    assert read == [b"hello-%d" % i for i in range(10)]
    with pytest.raises(pulsar.Timeout):
        reader.read_next(timeout_millis=50)
    reader.seek(ids[4])
    assert reader.read_next(WAIT).data() == b"hello-5"
    reader.close()
    kept = pulsar.MessageId.deserialize(ids[6].serialize())
    reader = client.create_reader("read", kept)
    assert reader.read_next(WAIT).data() == b"hello-7"
    reader = client.create_reader("read", kept, start_message_id_inclusive=True)
    assert reader.read_next(WAIT).data() == b"hello-6"
    reader = client.create_reader("read", pulsar.MessageId.latest)
    producer.send(b"later")
    assert reader.read_next(WAIT).data() == b"later"
    reader.seek(int(time.time() * 1000) - 3_600_000)
    assert reader.read_next(WAIT).data() == b"hello-0"
    client.close()


def reader_with_a_listener(url: str) -> None:
    client, seen = pulsar.Client(url), list[bytes]()

    def listener(reader: Any, message: pulsar.Message) -> None:
        seen.append(message.data())

    client.create_reader("heard", pulsar.MessageId.earliest, reader_listener=listener)
    producer = client.create_producer("heard")
    for i in range(3):
        producer.send(b"hello-%d" % i)
    soon(lambda: seen == [b"hello-0", b"hello-1", b"hello-2"])
    client.close()


def several_topics(url: str) -> None:
    client = pulsar.Client(url)
    topics = ["several-1", "several-2", "persistent://public/default/several-3"]
    consumer = client.subscribe(topics, "sub", consumer_type=pulsar.ConsumerType.Shared, receiver_queue_size=10)
    for topic in topics:
        producer = client.create_producer(topic)
        for i in range(100):
            producer.send_async(f"{topic[-1]}-{i}".encode(), None)
        producer.flush()
    seen = set()
    for _ in range(300):
        msg = consumer.receive(WAIT)
        seen.add(msg.data())
        consumer.acknowledge(msg)
    assert seen == {f"{number}-{i}".encode() for number in (1, 2, 3) for i in range(100)}
    with pytest.raises(pulsar.Timeout):
        consumer.receive(100)
    client.close()


def topics_by_pattern(url: str) -> None:
    client = pulsar.Client(url)
    first = client.create_producer("persistent://public/default/pattern-1")
    other = client.create_producer("persistent://public/default/another-1")
    consumer = client.subscribe(re.compile("persistent://public/default/pattern-.*"), "my-subscription")
    later = client.create_producer("persistent://public/default/pattern-2")
    for producer in (first, other, later):
        producer.send(producer.topic().rpartition("/")[2].encode())
    seen = []
    for _ in range(2):
        msg = consumer.receive(WAIT)
        seen.append(msg.data())
        consumer.acknowledge(msg)
    assert sorted(seen) == [b"pattern-1", b"pattern-2"]
    client.close()


def table_view(url: str) -> None:
    client = pulsar.Client(url)
    table = client.create_table_view("prices")
    assert len(table) == 0
    producer = client.create_producer("prices")
    producer.send(b"1", partition_key="ACME")
    producer.send(b"\xba\xd0", partition_key="bytes")
    soon(lambda: len(table) == 2)
    assert (table.get("ACME"), table.get("bytes"), table.get("nobody")) == (b"1", b"\xba\xd0", None)
    seen: dict[str, bytes] = {}
    table.for_each(seen.__setitem__)
    assert seen == {"ACME": b"1", "bytes": b"\xba\xd0"}
    seen.clear()

    def listener(key: str, value: bytes) -> None:
        if len(value) == 0:
            seen.pop(key)
        else:
            seen[key] = value

    table.for_each_and_listen(listener)
    producer.send(b"2", partition_key="ACME")
    producer.send(b"", partition_key="bytes")
    producer.send(b"3", partition_key="new")
    soon(lambda: seen == {"ACME": b"2", "new": b"3"})
    table.close()
    client.close()


def table_view_with_a_schema(url: str) -> None:
    client = pulsar.Client(url)
    producer = client.create_producer("names", schema=pulsar.schema.StringSchema())
    producer.send("Ada", partition_key="1")
    table = client.create_table_view("names", subscription_name="my-table", schema=pulsar.schema.StringSchema())
    assert table.get("1") == "Ada"
    client.close()


def dead_letters(url: str) -> None:
    client = pulsar.Client(url)
    consumer = client.subscribe(
        "failing", "sub", consumer_type=pulsar.ConsumerType.Shared, negative_ack_redelivery_delay_ms=10,
        dead_letter_policy=pulsar.ConsumerDeadLetterPolicy(
            max_redeliver_count=2, dead_letter_topic="dead", initial_subscription_name="init-sub"
        ),
    )  # fmt: skip
    client.create_producer("failing").send(b"poison")
    for _ in range(3):
        consumer.negative_acknowledge(consumer.receive(WAIT))
    assert client.subscribe("dead", "init-sub").receive(WAIT).data() == b"poison"
    client.close()


def key_shared(url: str) -> None:
    client = pulsar.Client(url)
    policy = pulsar.ConsumerKeySharedPolicy(
        key_shared_mode=pulsar.KeySharedMode.Sticky, allow_out_of_order_delivery=False,
        sticky_ranges=[(0, 10000), (10001, 20000), (20001, 65535)],
    )  # fmt: skip
    consumer = client.subscribe(
        "keyed", "sub", consumer_type=pulsar.ConsumerType.KeyShared, key_shared_policy=policy
    )
    producer = client.create_producer("keyed")
    for i in range(6):
        producer.send(b"hello-%d" % i, partition_key=f"k-{i % 3}")
    assert sorted(consumer.receive(WAIT).data() for _ in range(6)) == [b"hello-%d" % i for i in range(6)]
    client.close()


def with_asyncio(url: str) -> None:
    async def main() -> None:
        client = AsyncClient(url)
        producer = await client.create_producer("async")
        consumer = await client.subscribe("async", "sub")
        for i in range(3):
            await producer.send(f"hello-{i}".encode())
        for i in range(3):
            msg = await consumer.receive()
            assert msg.data() == f"hello-{i}".encode()
            await consumer.acknowledge(msg)
        reader = await client.create_reader("async", pulsar.MessageId.earliest)
        assert (await reader.read_next()).data() == b"hello-0"
        assert await reader.has_message_available()
        await client.close()

    asyncio.run(main())


EXAMPLES: list[Example] = [
    consumer, consumer_with_a_listener, batch_receive, reader, reader_with_a_listener, several_topics,
    topics_by_pattern, table_view, table_view_with_a_schema, dead_letters, key_shared, with_asyncio,
]  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.__name__)
def test_the_documented_examples_of_consumers_readers_and_tables_run(url: str, example: Example) -> None:
    example(url.replace("magnetar://", "pulsar://"))
