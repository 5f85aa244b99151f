"""What a producer's settings do: batches by key, routing, lazy partitions, queues, ids that are named."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import ProducerQueueIsFull, PulsarException, Result
from magnetar.client.core.batcher import OPEN_GROUPS_MAX, Batcher, OutgoingMessage, encode_batch_entry
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import BatchingType, CompressionType, InitialPosition, PartitionsRoutingMode
from magnetar.proto.entry import decode_batch, decode_properties, parse_header, split_broker_part
from magnetar.proto.errors import NotAllowed
from magnetar.proto.filters import parse_filter
from magnetar.proto.summary import may_match, parse_summary
from tests.client.fake_broker import FakeBroker
from tests.client.model.keys import Keys
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

FULL = "persistent://public/default/t"


def of(broker: FakeBroker, name: str = FULL) -> list[tuple[str, str, list[bytes], int, int]]:
    """Key and ordering key, payloads, first and last sequence id of each entry."""
    found = []
    for header, entry in zip(broker.topics[name].headers, broker.topics[name].entries, strict=True):
        part = split_broker_part(entry)[2]
        payloads = [payload for _, payload in decode_batch(parse_header(part), part)]
        metadata = header.metadata
        found.append((
            metadata.partition_key, metadata.ordering_key.decode(), payloads, header.sequence_id,
            header.highest_sequence_id,
        ))  # fmt: skip
    return found


async def test_key_based_batches_hold_one_key_each_named_by_the_entry_and_ids_that_follow_each_other(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", batching_type=BatchingType.KeyBased)
    for number in range(9):
        key = (None, "a", "b")[number % 3]
        producer.send_nowait(b"%d" % number, None, partition_key=key, ordering_key="o" if key == "b" else None)
    await producer.flush()
    assert of(broker) == [
        ("", "", [b"0", b"3", b"6"], 0, 2),
        ("a", "", [b"1", b"4", b"7"], 3, 5),
        ("b", "o", [b"2", b"5", b"8"], 6, 8),
    ]


def test_complaint_05_one_hot_key_does_not_mix_with_others_in_a_batch() -> None:
    """apache/pulsar#23999: a broker that looks at the first key of a mixed batch sends the others astray."""
    rng = random.Random(5)
    batcher = Batcher(0, key_based=True, messages_max=50)
    sent: Counter[str] = Counter()
    for _ in range(2000):
        key = "hot" if rng.random() < 0.9 else f"k{rng.randrange(20)}"
        sent[key] += 1
        batcher.add_message(OutgoingMessage(b"x", partition_key=key), None)
    batcher.close_batches()
    batcher.check()
    got: Counter[str] = Counter()
    for batch in batcher.ready:
        part = encode_batch_entry(batch, "p", 1)
        header = parse_header(part)
        keys = {fields.partition_key for fields, _ in decode_batch(header, part)}
        assert keys == {header.metadata.partition_key}
        got[header.metadata.partition_key] += header.num_messages
    assert got == sent


@pytest.mark.parametrize("key_based", [False, True])
def test_batches_by_property_hold_one_value_each_in_their_order_and_few_are_open(key_based: bool) -> None:
    rng = random.Random(6)
    batcher = Batcher(0, key_based=key_based, batch_by=("tag", "a"), summarized=("tag",), messages_max=50)
    sent: dict[tuple[str | None, ...], list[bytes]] = {}
    for number in range(1000):
        tag, key = rng.choice([None, "", *map(str, range(30))]), f"k{rng.randrange(3)}"
        properties = {} if tag is None else {"tag": tag, "other": str(number)}
        sent.setdefault((tag, key) if key_based else (tag,), []).append(b"%d" % number)
        batcher.add_message(OutgoingMessage(b"%d" % number, properties=properties, partition_key=key), None)
        assert batcher.is_open
        assert len(batcher._groups) <= OPEN_GROUPS_MAX
    batcher.close_batches()
    batcher.check()
    got: dict[tuple[str | None, ...], list[bytes]] = {}
    for batch in batcher.ready:
        part = encode_batch_entry(batch, "p", 1)
        header = parse_header(part)
        messages = decode_batch(header, part)
        groups = {(decode_properties(about).get("tag"), about.partition_key)[: 1 + key_based] for about, _ in messages}
        assert len(groups) == 1, "a batch has one value, and with keys one key"
        (group,) = groups
        got.setdefault(group, []).extend(payload for _, payload in messages)
        summary = parse_summary(header.metadata.summary)
        wants = "tag IS NULL" if group[0] is None else f"tag = '{group[0]}'"
        assert may_match(parse_filter(wants).root, summary)
        assert not may_match(parse_filter("tag = 'none'").root, summary)
    assert got == sent


@pytest.mark.parametrize("options", [
    {}, {"filter_properties": ["tag"]}, {"batch_by": ("tag",)}, {"filter_properties": ["a"], "batch_by": ("tag",)},
])  # fmt: skip
@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_batch_has_a_summary_of_the_named_properties_and_an_encrypted_one_only_if_asked(
    client: Client, broker: FakeBroker, /, options: dict[str, Any], is_encrypted: bool
) -> None:
    keys = {"encryption_key": "k", "crypto_key_reader": Keys("k")} if is_encrypted else {}
    producer = await client.create_producer("t", **options, **keys)
    for number in range(4):
        producer.send_nowait(b"", None, properties={"tag": str(number % 2)})
    producer.send_nowait(b"", None)
    await producer.flush()
    covered = set(options.get("filter_properties", ())) | (set() if is_encrypted else set(options.get("batch_by", ())))
    headers = broker.topics[FULL].headers
    assert len(headers) == (3 if "batch_by" in options else 1)
    for header in headers:
        summary = parse_summary(header.metadata.summary)
        assert (summary.names if summary else set()) == covered


async def test_a_message_alone_has_no_summary_and_wrong_names_are_refused(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", batching_enabled=False, filter_properties=("tag",), batch_by=("tag",))
    await producer.send(b"", properties={"tag": "a"})
    assert not broker.topics[FULL].headers[0].metadata.HasField("summary")
    many = [str(each) for each in range(10)]
    for wrong in ({"batch_by": "tag"}, {"batch_by": [1]}, {"filter_properties": [""]},
                  {"filter_properties": many, "batch_by": [f"b{each}" for each in range(7)]}):
        with pytest.raises(PulsarException):
            await client.create_producer("t", **wrong)  # type: ignore[arg-type]


def test_named_ids_go_up_keep_their_place_and_no_batch_lies_across_what_the_broker_has() -> None:
    for key_based, batch_by in ((False, ()), (True, ()), (False, ("tag",)), (True, ("tag",))):
        batcher = Batcher(0, key_based=key_based, batch_by=batch_by)
        batcher.set_first_sequence_id(9, 10)
        for number in (7, 8, 9, 10, 12):
            batcher.add_message(OutgoingMessage(b"%d" % number, sequence_id=number), None)
        batcher.add_message(OutgoingMessage(b"12", sequence_id=12), None)
        batcher.add(b"13", None)
        batcher.close_batches()
        batcher.check()
        found = []
        for batch in batcher.ready:
            part = encode_batch_entry(batch, "p", 1)
            header = parse_header(part)
            found.append((header.sequence_id, header.highest_sequence_id or header.sequence_id))
            for place, (fields, payload) in enumerate(decode_batch(header, part)):
                assert (getattr(fields, "sequence_id", 0) or header.sequence_id + place) == int(payload)
        assert found == [(7, 9), (10, 12), (12, 12), (13, 13)], "an id that is named again is alone"


async def test_after_a_time_out_the_same_ids_may_be_named_again(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", send_timeout_millis=1000)
    broker.silent = True
    with pytest.raises(PulsarException):
        await producer.send(b"5", sequence_id=5)
    broker.silent = False
    await producer.send(b"5", sequence_id=5)
    assert broker.received == [(5, 1), (5, 1)]


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("compression", list(CompressionType))
async def test_every_compression_of_messages_and_batches_with_all_that_is_said_of_them(
    client: Client, broker: FakeBroker, /, compression: CompressionType, batching: bool
) -> None:
    consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest)
    producer = await client.create_producer("t", compression_type=compression, batching_enabled=batching)
    for number in range(3):
        producer.send_nowait(
            b"%d" % number * 500, None, properties={"n": str(number)}, partition_key="k", ordering_key="o",
            event_timestamp=1000 + number,
        )  # fmt: skip
    producer.send_nowait(None, None, partition_key="gone")
    await producer.flush()
    for number in range(3):
        message = await consumer.receive(5000)
        assert message.data() == b"%d" % number * 500
        assert message.properties() == {"n": str(number)}
        assert (message.partition_key(), message.ordering_key()) == ("k", "o")
        assert message.event_timestamp() == 1000 + number
    tombstone = await consumer.receive(5000)
    assert (tombstone.has_null_value(), tombstone.value(), tombstone.partition_key()) == (True, None, "gone")
    if compression is not CompressionType.NONE:
        assert sum(map(len, broker.topics[FULL].entries)) < 1500


def partitions(broker: FakeBroker) -> dict[str, int]:
    return {name.rpartition("-")[2]: topic.messages for name, topic in broker.topics.items() if topic.messages}


def test_routing_modes() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        single = await client.create_producer("p4", message_routing_mode=PartitionsRoutingMode.UseSinglePartition)
        for number in range(20):
            await single.send(b"%d" % number)
        assert len(partitions(broker)) == 1, "one partition, chosen by chance, for the producer's life"
        for topic in broker.topics.values():
            topic.messages = 0
        robin = await client.create_producer("p4", batching_enabled=False)
        for number in range(20):
            await robin.send(b"%d" % number)
        assert sorted(partitions(broker).values()) == [5, 5, 5, 5]
        for topic in broker.topics.values():
            topic.messages = 0
        windows = await client.create_producer("p4", batching_max_publish_delay_ms=100)
        for _ in range(4):
            for number in range(5):
                windows.send_nowait(b"%d" % number)
            await asyncio.sleep(0.11)
        await windows.flush()
        assert sorted(partitions(broker).values()) == [5, 5, 5, 5], "a partition for each window of the batch delay"
        for topic in broker.topics.values():
            topic.messages = 0
        for mode in (robin, single, windows):
            await mode.send(b"x", partition_key="the same key")
        assert list(partitions(broker).values()) == [3], "a key always decides"
        custom = await client.create_producer("p4", message_router=lambda message, count: len(message.data()) % count)
        for topic in broker.topics.values():
            topic.messages = 0
        for size in (1, 2, 3, 5):
            await custom.send(bytes(size))
        assert partitions(broker) == {"1": 2, "2": 1, "3": 1}

    simulate(body, FakeBroker({"p4": 4}))


def test_a_lazy_producer_connects_to_a_partition_with_its_first_message() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer(
            "p4", lazy_start_partitioned_producers=True,
            message_router=lambda message, count: int(message.data()) % count,
        )  # fmt: skip
        assert len(broker.topics) == 1
        assert producer.is_connected()
        results: list[Result] = []
        for number in range(8):
            if number % 4 != 3:
                producer.send_nowait(b"%d" % number, lambda result, _: results.append(result))
        await producer.flush()
        assert results == [Result.Ok] * 6
        assert sorted(name[-1] for name in broker.topics) == ["0", "1", "2"]
        assert [payloads for _, _, payloads, _, _ in of(broker, FULL[:-1] + "p4-partition-2")] == [[b"2", b"6"]]
        broker.refuse = [NotAllowed("no")]
        with pytest.raises(PulsarException):
            await producer.send(b"3")

    simulate(body, FakeBroker({"p4": 4}))


def test_a_full_queue_refuses_or_waits_and_is_shared_out_over_partitions() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        broker.silent = True
        producer = await client.create_producer("t", max_pending_messages=3, batching_enabled=False)
        for _ in range(3):
            producer.send_nowait(b"x")
        with pytest.raises(ProducerQueueIsFull):
            producer.send_nowait(b"x")
        shared = await client.create_producer(
            "p4", max_pending_messages=100, max_pending_messages_across_partitions=8,
            message_routing_mode=PartitionsRoutingMode.UseSinglePartition,
        )  # fmt: skip
        for _ in range(2):
            shared.send_nowait(b"x")
        with pytest.raises(ProducerQueueIsFull):
            shared.send_nowait(b"x")
        broker.silent = False
        blocking = await client.create_producer("b", max_pending_messages=3, block_if_queue_full=True)
        ids = await asyncio.gather(*(blocking.send(b"%d" % number) for number in range(50)))
        assert len(set(ids)) == 50
        assert all(isinstance(id_, MessageId) for id_ in ids)
        client.shutdown()

    simulate(body, FakeBroker({"p4": 4}))


def test_pr12_flush_returns_when_everything_of_all_partitions_is_stored_and_callbacks_tell_of_each() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("p4", batching_max_publish_delay_ms=60_000)
        told: list[tuple[Result, MessageId | None]] = []
        for number in range(40):
            key = str(number)
            producer.send_nowait(b"%d" % number, lambda result, id_: told.append((result, id_)), partition_key=key)
        assert not told, "nobody waits for the delay of a batch"
        await producer.flush()
        assert [result for result, _ in told] == [Result.Ok] * 40
        assert len({id_ for _, id_ in told}) == 40
        await producer.flush()
        broker.silent = True
        producer.send_nowait(b"x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(producer.flush(), 5)
        client.shutdown()

    simulate(body, FakeBroker({"p4": 4}))


async def test_pr02_a_batch_ends_with_its_first_limit_and_whoever_waits_is_not_kept_waiting(
    client: Client, broker: FakeBroker, /
) -> None:
    loop = asyncio.get_running_loop()

    async def batches(count: int, size: int) -> list[int]:
        topic = f"t-{len(broker.topics)}"
        producer = await client.create_producer(topic, max_pending_messages=5000)
        for _ in range(count):
            producer.send_nowait(bytes(size))
        await producer.flush()
        return [len(payloads) for _, _, payloads, _, _ in of(broker, f"persistent://public/default/{topic}")]

    assert await batches(2500, 1) == [1000, 1000, 500], "1,000 messages"
    assert max(await batches(300, 1000)) <= 131, "128 KiB"
    producer = await client.create_producer("lone")
    begun = loop.time()
    await producer.send(b"x")
    assert loop.time() - begun < 0.01, "an awaited send does not wait for the 10 ms"
    done = loop.create_future()
    begun = loop.time()
    producer.send_nowait(b"x", lambda result, _: done.set_result(result))
    assert await done is Result.Ok
    assert 0.01 <= loop.time() - begun < 0.02, "10 ms"
