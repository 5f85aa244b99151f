"""`redelivery_order="key"` through the SDK: a program that fails at a message gets what follows it after it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.broker.subscription import dead_letters
from magnetar.client.client import Client
from magnetar.client.common.errors import InvalidConfiguration
from magnetar.client.core.chunking import encode_chunks
from magnetar.client.model.settings import ConsumerKeySharedPolicy, ConsumerType, InitialPosition
from magnetar.proto.entry_pb2 import MessageMetadata
from tests.support.cluster import Cluster, TestProducer, cluster

TOPIC = "orders"
FULL = "persistent://public/default/orders"
KEYS = ("a", "b", "c")
MESSAGES = 8  # of each key


async def fill(running: Cluster, *, batch: bool, by_key: bool = False) -> Client:
    client = Client(f"magnetar://{running.brokers[0].endpoint}")
    kind = magnetar.BatchingType.KeyBased if by_key else magnetar.BatchingType.Default
    producer = await client.create_producer(
        TOPIC, batching_enabled=batch, batching_max_publish_delay_ms=1000, batching_type=kind, batching_max_messages=5
    )
    sent = [
        asyncio.create_task(producer.send(f"{key}{number}".encode(), partition_key=key))
        for number in range(MESSAGES) for key in KEYS
    ]  # fmt: skip
    await asyncio.sleep(0)
    await producer.flush()
    await asyncio.gather(*sent)
    await producer.close()
    return client


class Program:
    """Fails so often at each of some messages, and notes what it got right, in order."""

    def __init__(self, fails: dict[bytes, int]) -> None:
        self.fails, self.done = dict(fails), list[bytes]()

    def does(self, payload: bytes) -> bool:
        left = self.fails.get(payload, 0)
        if left:
            self.fails[payload] = left - 1
            return False
        self.done.append(payload)
        return True

    @property
    def over(self) -> bool:
        return len(set(self.done)) == MESSAGES * len(KEYS)

    def check(self, *, whole: bool) -> None:
        """Each key in its order (`whole`: everything), each message once."""
        assert not any(self.fails.values()), "it has not failed as often as it should"
        assert sorted(self.done) == sorted(set(self.done))
        for key in KEYS:
            own = [each for each in self.done if each[:1] == key.encode()]
            assert own == [f"{key}{number}".encode() for number in range(MESSAGES)]
        if whole:
            assert self.done == [f"{key}{number}".encode() for number in range(MESSAGES) for key in KEYS]


FAILS = {b"a0": 2, b"a1": 1, b"b3": 1, b"c7": 1, b"a6": 1, b"b4": 2}
TYPES = [ConsumerType.Exclusive, ConsumerType.Failover, ConsumerType.KeyShared]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(("batch", "by_key"), [(False, False), (True, False), (True, True)])
async def test_a_program_that_fails_gets_each_key_in_order(
    tmp_path: Path, type_: ConsumerType, batch: bool, by_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "ORDERED_BACKOFF_S", (0.1, 0.2))
    async with cluster(tmp_path) as running:
        client = await fill(running, batch=batch, by_key=by_key)
        consumer = await client.subscribe(
            TOPIC, "s", type_, initial_position=InitialPosition.Earliest, redelivery_order="key"
        )
        program = Program(FAILS)
        while not program.over:
            message = await consumer.receive(20_000)
            if program.does(message.data()):
                await consumer.acknowledge(message)
            else:
                await consumer.negative_acknowledge(message)
        program.check(whole=type_ is not ConsumerType.KeyShared and not by_key)
        await client.close()


async def given(client: Client, type_: ConsumerType, *, batch: bool, **options: Any) -> list[bytes]:
    """To a program that fails for ever at the first and at the third of four messages of a key."""
    consumer = await client.subscribe(
        TOPIC, "s", type_, initial_position=InitialPosition.Earliest, redelivery_order="key",
        negative_ack_redelivery_delay_ms=10, **options,
    )  # fmt: skip
    producer = await client.create_producer(TOPIC, batching_enabled=batch, batching_max_publish_delay_ms=1000)
    sent = [asyncio.create_task(producer.send(b"%d" % number, partition_key="k")) for number in range(4)]
    await asyncio.sleep(0)
    await producer.flush()
    await asyncio.gather(*sent)
    got = list[bytes]()
    while got[-1:] != [b"3"]:
        message = await consumer.receive(20_000)
        got.append(message.data())
        fails = message.data() in (b"0", b"2")
        await (consumer.negative_acknowledge(message) if fails else consumer.acknowledge(message))
    return got


EACH_IN_ITS_TURN = [b"0"] * 3 + [b"1"] + [b"2"] * 3 + [b"3"]


@pytest.mark.parametrize("batch", [False, True])
async def test_what_was_held_back_is_no_dead_letter_before_the_program_had_it(
    tmp_path: Path, batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "ORDERED_BACKOFF_S", (0.1, 0.2))
    async with cluster(tmp_path) as running:
        client = Client(f"magnetar://{running.brokers[0].endpoint}")
        letters = await client.subscribe("letters", "s", initial_position=InitialPosition.Earliest)
        policy = magnetar.ConsumerDeadLetterPolicy(2, "letters")
        got = await given(client, ConsumerType.KeyShared, batch=batch, dead_letter_policy=policy)
        assert got == EACH_IN_ITS_TURN
        assert [(await letters.receive(20_000)).data() for _ in range(2)] == [b"0", b"2"]
        with pytest.raises(magnetar.Timeout):
            await letters.receive(200)
        await client.close()


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("batch", [False, True])
async def test_nor_does_the_broker_make_it_one(
    tmp_path: Path, type_: ConsumerType, batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "ORDERED_BACKOFF_S", (0.1, 0.2))
    async with cluster(tmp_path, dead_letter_max_redeliver_count=2) as running:
        client = Client(f"magnetar://{running.brokers[0].endpoint}")
        letters = await client.subscribe(f"{TOPIC}-s-DLQ", "s", initial_position=InitialPosition.Earliest)
        assert await given(client, type_, batch=batch) == EACH_IN_ITS_TURN
        assert [(await letters.receive(20_000)).data() for _ in range(2)] == [b"0", b"2"]
        with pytest.raises(magnetar.Timeout):
            await letters.receive(200)
        await client.close()


async def test_by_default_what_follows_goes_on(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        client = await fill(running, batch=False)
        consumer = await client.subscribe(
            TOPIC, "s", ConsumerType.KeyShared, initial_position=InitialPosition.Earliest,
            negative_ack_redelivery_delay_ms=10,
        )  # fmt: skip
        program = Program({b"a0": 1})
        while not program.over:
            message = await consumer.receive(20_000)
            act: Callable[..., Any] = consumer.acknowledge if program.does(message.data()) else (
                consumer.negative_acknowledge
            )
            await act(message)
        assert program.done.index(b"a1") < program.done.index(b"a0")
        await client.close()


@pytest.mark.parametrize("options", [
    {"consumer_type": ConsumerType.Shared},
    {"consumer_type": ConsumerType.KeyShared,
     "key_shared_policy": ConsumerKeySharedPolicy(allow_out_of_order_delivery=True)},
    {"redelivery_order": "keys"},
])  # fmt: skip
async def test_what_keeps_no_order_is_refused_before_anything_is_sent(options: dict[str, Any]) -> None:
    client = Client("magnetar://127.0.0.1:1")
    with pytest.raises((InvalidConfiguration, TypeError, ValueError, magnetar.PulsarException)):
        await client.subscribe(TOPIC, "s", **({"redelivery_order": "key"} | options))
    await client.close()


@pytest.mark.parametrize("type_", TYPES)
async def test_a_message_in_chunks_that_fails_comes_again_whole_and_before_what_follows(
    tmp_path: Path, type_: ConsumerType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "ORDERED_BACKOFF_S", (0.1, 0.2))
    async with cluster(tmp_path, max_message_bytes=20_000) as running:
        client = Client(f"magnetar://{running.brokers[0].endpoint}")
        consumer = await client.subscribe(
            TOPIC, "s", type_, initial_position=InitialPosition.Earliest, redelivery_order="key"
        )
        producer = await client.create_producer(TOPIC, batching_enabled=False, chunking_enabled=True)
        sent = [f"{key}{number}".encode() for number in range(MESSAGES) for key in KEYS]
        for payload in sent:
            large = b"." * 50_000 if int(payload[1:]) % 2 else b""
            await producer.send(payload + large, partition_key=payload[:1].decode())
        program = Program({b"a0": 1, b"a1": 2, b"b2": 1, b"a3": 1, b"b7": 1, b"c1": 1})
        while not program.over:
            message = await consumer.receive(20_000)
            if program.does(message.data()[:2]):
                await consumer.acknowledge(message)
            else:
                await consumer.negative_acknowledge(message)
        program.check(whole=type_ is not ConsumerType.KeyShared)
        await client.close()


@pytest.mark.parametrize("fails", ["x", "M", "xM"])
@pytest.mark.parametrize("type_", TYPES)
async def test_a_message_in_chunks_with_another_one_between_them_is_taken_back_whole(
    tmp_path: Path, type_: ConsumerType, fails: str
) -> None:
    """Else its consumer gets the rest of it alone, takes its beginning for lost, and drops it."""
    async with cluster(tmp_path) as running:
        client, broker = Client(f"magnetar://{running.brokers[0].endpoint}"), running.brokers[0]
        consumer = await client.subscribe(
            FULL, "s", type_, initial_position=InitialPosition.Earliest, redelivery_order="key"
        )
        one, other = [await TestProducer(running.world, broker, FULL, name).opened() for name in "ab"]
        metadata = MessageMetadata(producer_name="a", sequence_id=0, publish_time=1, partition_key="k")
        chunks = encode_chunks(metadata, b"M" * 900, 400, "u")
        for number, chunk in enumerate(chunks):
            one.frame(publish=chunk)
            await one.next("receipt")
            if number == 0:
                await other.send(b"x", key="k")
        await other.send(b"y", key="k")
        done, left = list[str](), set(fails)
        while not done or done[-1] != "y":
            message = await consumer.receive(20_000)
            name = message.data()[:1].decode()
            if name in left:
                left.discard(name)
                await consumer.negative_acknowledge(message)
            else:
                done.append(name)
                await consumer.acknowledge(message)
        assert done == ["x", "M", "y"]
        await client.close()


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("most", [0, 1])
async def test_each_message_of_a_batch_has_a_count_and_a_wait_of_its_own(
    tmp_path: Path, type_: ConsumerType, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fails once; `most`: redeliveries that the broker allows (0: any number). The second step of the ladder is
    longer than the test."""
    monkeypatch.setattr(dead_letters, "ORDERED_BACKOFF_S", (0.05, 1000.0))
    async with cluster(tmp_path, dead_letter_max_redeliver_count=most) as running:
        client = Client(f"magnetar://{running.brokers[0].endpoint}")
        consumer = await client.subscribe(
            TOPIC, "s", type_, initial_position=InitialPosition.Earliest, redelivery_order="key"
        )
        producer = await client.create_producer(TOPIC, batching_enabled=True, batching_max_publish_delay_ms=1000)
        sent = [asyncio.create_task(producer.send(b"%d" % number, partition_key="k")) for number in range(4)]
        await asyncio.sleep(0)
        await producer.flush()
        await asyncio.gather(*sent)
        for number in range(4):
            for count in range(2):
                message = await consumer.receive(20_000)
                assert (message.data(), message.redelivery_count()) == (b"%d" % number, count)
                await (consumer.acknowledge(message) if count else consumer.negative_acknowledge(message))
        await client.close()
