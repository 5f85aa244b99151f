"""Encryption through a broker and a bookie: dead letters, retries, compaction, keys, and what an administrator sees."""

from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.broker.log.compaction_core import SurvivingMessageSearch, parse_entry
from magnetar.broker.subscription.core.redelivery_backoff import make_dead_letters
from magnetar.client import aio
from magnetar.client.common.errors import CryptoError, Timeout
from magnetar.client.model.encryption import Decryptor, Encryptor
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import (
    BatchingType,
    CompressionType,
    ConsumerCryptoFailureAction,
    ConsumerDeadLetterPolicy,
    ConsumerType,
    InitialPosition,
    MultiplierRedeliveryBackoff,
)
from magnetar.proto.entry import (
    EntryEncoding,
    encode_batch,
    encode_broker_part,
    encode_entry,
    encode_plain_items,
    parse_header,
)
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.names import TopicName
from magnetar.spark_connector.rows import DecodedEntry
from tests.broker.subscription.core.test_dead_letter import SOURCE
from tests.client.model.keys import Keys, files
from tests.support.cluster import Cluster, cluster
from tests.support.processes import Processes, run_cli
from tests.support.steps import take_until_quiet

EARLIEST = InitialPosition.Earliest
NOW = MultiplierRedeliveryBackoff(1, 1)


class Bench:
    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.client = aio.Client(f"magnetar://{running.brokers[-1].endpoint}")

    async def consumer(self, topic: str, keys: Any, **options: Any) -> Any:
        return await self.client.subscribe(
            topic, "s", **{"consumer_type": ConsumerType.Shared, "initial_position": EARLIEST,
            "negative_ack_redelivery_backoff": NOW, "crypto_key_reader": keys, **options},
        )  # fmt: skip

    async def producer(self, topic: str, **options: Any) -> Any:
        options = {"encryption_key": "a", "crypto_key_reader": Keys(), "batching_enabled": False, **options}
        return await self.client.create_producer(topic, **options)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with cluster(tmp_path) as running:
        bench = Bench(running)
        yield bench
        await bench.client.close()


@pytest.mark.parametrize("batching", [False, True])
async def test_a_dead_letter_stays_encrypted_for_the_readers_of_its_message(bench: Bench, batching: bool) -> None:
    policy = ConsumerDeadLetterPolicy(1, initial_subscription_name="s")
    mine = await bench.consumer("t", Keys("a"), dead_letter_policy=policy)
    producer = await bench.producer("t", batching_enabled=batching, compression_type=CompressionType.ZSTD)
    await producer.send(b"poison", properties={"a": "b"}, partition_key="k")
    for _ in range(2):
        await mine.negative_acknowledge(await mine.receive(30_000))
    with pytest.raises(Timeout):
        await mine.receive(1000)
    dead = await bench.consumer("t-s-DLQ", Keys("a"))
    letter = await dead.receive(30_000)
    context = letter.encryption_context()
    assert [each.key for each in context.keys()] == ["a"]  # noqa: SIM118
    assert not context.is_decryption_failed()
    assert (letter.data(), letter.partition_key()) == (b"poison", "k")
    assert letter.properties()["a"] == "b"
    await dead.close()
    ciphertext = await bench.consumer("t-s-DLQ", None, crypto_failure_action=ConsumerCryptoFailureAction.CONSUME)
    assert len((await ciphertext.receive(30_000)).data()) == len(b"poison") + 16


async def test_what_is_to_be_reconsumed_later_stays_encrypted(bench: Bench) -> None:
    mine = await bench.consumer("t", Keys("a"), enable_retry=True)
    producer = await bench.producer("t")
    await producer.send(b"later")
    await mine.reconsume_later(await mine.receive(30_000), timedelta(milliseconds=10))
    again = await mine.receive(30_000)
    assert (again.data(), again.properties()["RECONSUMETIMES"]) == (b"later", "1")
    assert again.encryption_context() is not None


async def test_what_is_not_decrypted_is_never_moved_to_another_topic(bench: Bench) -> None:
    mine = await bench.consumer(
        "t", Keys(), enable_retry=True, dead_letter_policy=ConsumerDeadLetterPolicy(1),
        crypto_failure_action=ConsumerCryptoFailureAction.CONSUME,
    )  # fmt: skip
    producer = await bench.producer("t")
    await producer.send(b"x")
    for _ in range(4):
        message = await mine.receive(30_000)
        await mine.negative_acknowledge(message)
    with pytest.raises(CryptoError, match="not copied to another topic"):
        await mine.reconsume_later(await mine.receive(5000), timedelta(milliseconds=10))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("compression", [0, 3])
def test_a_brokers_dead_letter_of_an_encrypted_entry_can_be_decrypted(batched: bool, compression: int) -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=5, publish_time=1, compression=compression)
    encoding = EntryEncoding(encrypt=Encryptor(Keys(), ["a"], lambda: 0.0))
    items = encode_plain_items([b"one", b"two"])
    part = encode_batch(metadata, items, 2, encoding) if batched else encode_entry(metadata, b"one", encoding)
    (letter,) = make_dead_letters(SOURCE, encode_broker_part(1, 1) + part, frozenset([0]), 1)
    before, after = parse_header(part), parse_header(letter)
    assert (after.batched, after.num_messages) == (before.batched, before.num_messages)
    ciphertext = letter[after.payload_offset :]
    assert ciphertext == part[before.payload_offset :]
    assert Decryptor(Keys("a"), lambda: 0.0)(after.metadata, ciphertext)
    assert "ORIGIN_MESSAGE_ID" in {pair.key for pair in after.metadata.properties}


async def test_compaction_reads_keys_and_tombstones_of_encrypted_messages(bench: Bench) -> None:
    producer = await bench.producer("t")
    for key, value in (("a", b"1"), ("b", b"2"), ("a", b"3"), ("c", b""), ("b", None)):
        await producer.send(value, partition_key=key, properties={"p": "q"})
    topic = await bench.running.brokers[-1].topic_manager.load_topic(TopicName.parse("t"))
    topic.compaction.start()
    await topic.compaction.wait_finished()
    reader = await bench.client.create_reader(
        "t", MessageId.earliest, is_read_compacted=True, crypto_key_reader=Keys("a")
    )
    found = []
    while await reader.has_message_available():
        message = await reader.read_next(30_000)
        found.append((message.partition_key(), message.data(), message.properties()))
    assert found == [("a", b"3", {"p": "q"}), ("c", b"", {"p": "q"})], "an empty value is no tombstone: it has 16 bytes"
    view = await bench.client.create_table_view("t", crypto_key_reader=Keys("a"))
    assert dict(view.items()) == {"a": b"3"}


def test_compaction_keeps_all_of_an_encrypted_batch() -> None:
    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, partition_key="k")
    encoding = EntryEncoding(encrypt=Encryptor(Keys(), ["a"], lambda: 0.0))
    batch = encode_batch(metadata, encode_plain_items([b"1", b"2"]), 2, encoding)
    survey = SurvivingMessageSearch(10)
    survey.add_entry(0, 2, parse_entry(encode_broker_part(1, 1) + batch))
    survey.finish_reading_round()
    assert list(survey.survivors) == [0, 1]


async def test_key_shared_goes_by_the_key_of_an_encrypted_batch(bench: Bench) -> None:
    consumers = [
        await bench.consumer("t", Keys("a"), consumer_type=ConsumerType.KeyShared, consumer_name=f"c{at}")
        for at in range(2)
    ]
    producer = await bench.producer("t", batching_enabled=True, batching_type=BatchingType.KeyBased)
    for number in range(60):
        producer.send_nowait(b"%d" % number, partition_key=f"k{number % 12}")
    await producer.flush()
    keys: list[dict[str, list[int]]] = [{}, {}]
    for at, consumer in enumerate(consumers):
        for message in await take_until_quiet(consumer.receive, 500):
            keys[at].setdefault(message.partition_key(), []).append(int(message.data()))
    assert not keys[0].keys() & keys[1].keys()
    assert keys[0]
    assert keys[1]
    assert {**keys[0], **keys[1]} == {f"k{at}": list(range(at, 60, 12)) for at in range(12)}


def test_a_real_server_stores_and_shows_ciphertext_alone(started: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    server = started.start("standalone", "standalone", "--port", "0", "--data", str(folder))
    url = server.wait_ready()
    keys = files(tmp_path)
    secret = b"the content of an envelope"
    with magnetar.Client(url) as client:
        consumer = client.subscribe("t", "s", crypto_key_reader=keys)
        client.subscribe("t", "peeked").close()
        with client.create_producer(
            "t", encryption_key="a", crypto_key_reader=keys, batching_enabled=True, compression_type=CompressionType.LZ4
        ) as producer:
            for _ in range(3):
                producer.send_async(secret, None)
            producer.flush()
        for _ in range(3):
            message = consumer.receive(10_000)
            assert message.data() == secret
            consumer.acknowledge(message)
    peeked = run_cli("topics", "peek-messages", "t", "-s", "peeked", "-n", "5", "--url", url)
    assert (peeked.code, secret.decode() in peeked.out) == (0, False)
    stored = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert stored
    assert not any(secret in each for each in stored)


async def test_a_range_is_decrypted_by_its_keys_and_stays_ciphertext_without_them(bench: Bench) -> None:
    producer = await bench.producer("t", batching_enabled=True, compression_type=CompressionType.LZ4)
    await producer.send_many([b"%d" % at for at in range(20)])
    found = []
    async for entries in bench.client.read_range("t", 0, 20, crypto_key_reader=Keys("a")):
        found += [(message.index, message.payload) for entry in entries for message in entry.messages()]
    assert found == [(at, b"%d" % at) for at in range(20)]
    for keys in (None, Keys()):
        async for entries in bench.client.read_range("t", 0, 20, crypto_key_reader=keys):
            with pytest.raises(CryptoError, match="is encrypted"):
                entries[0].messages()
            with pytest.raises(CryptoError, match="is encrypted"):
                DecodedEntry(entries[0])
