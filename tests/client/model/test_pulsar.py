"""The official client decrypts what ours encrypts, and ours what it encrypts. Loopback only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.model.settings import CompressionType, ConsumerCryptoFailureAction, InitialPosition
from magnetar.proto.entry import parse_header, split_broker_part
from tests.client.conftest import in_thread
from tests.client.fake_broker import FakeBroker
from tests.client.model.keys import Keys, files, pair
from tests.client.model.pulsar_server import PulsarServer
from tests.client.simulated import simulate

pulsar = pytest.importorskip("pulsar")
FULL = "persistent://public/default/t"
COMPRESSIONS = [each.name for each in CompressionType]
QUIET = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)


def keys_of_pulsar(folder: Path, name: str = "a") -> Any:
    files(folder, name)
    return pulsar.CryptoKeyReader(str(folder / f"{name}-public.pem"), str(folder / f"{name}-private.pem"))


def encrypted_by_pulsar(folder: Path, contents: Sequence[bytes], **options: Any) -> list[bytes]:
    """The entries that the official client sends."""
    server = PulsarServer()
    with in_thread(server.serve) as url:
        client = pulsar.Client(url, logger=QUIET)
        reader = keys_of_pulsar(folder)
        producer = client.create_producer(FULL, encryption_key="a", crypto_key_reader=reader, **options)
        for content in contents:
            producer.send_async(content, None, partition_key="k", properties={"p": "q"})
        producer.flush()
        client.close()
    return server.entries


def received_by_pulsar(folder: Path, entries: list[bytes], count: int, name: str = "a", **options: Any) -> list[Any]:
    """(data, properties, key, whether it stayed ciphertext) of what the official client receives of these entries."""
    server = PulsarServer(entries)
    with in_thread(server.serve) as url:
        client = pulsar.Client(url, logger=QUIET)
        reader = keys_of_pulsar(folder, name)
        consumer = client.subscribe(FULL, "s", crypto_key_reader=reader, **options)
        found = []
        for _ in range(count):
            message = consumer.receive(10_000)
            context = message.encryption_context()
            assert context is not None
            found.append(
                (message.data(), message.properties(), message.partition_key(), context.is_decryption_failed())
            )
        client.close()
    return found


def received_by_us(entries: list[bytes], count: int) -> list[Any]:
    found = []

    async def body(client: Client, broker: FakeBroker) -> None:
        for entry in entries:
            broker.store(broker.topic(FULL), entry, parse_header(entry))
        consumer = await client.subscribe(
            "t", "s", initial_position=InitialPosition.Earliest, crypto_key_reader=Keys("a")
        )
        for _ in range(count):
            message = await consumer.receive(1000)
            found.append((message.data(), message.properties(), message.partition_key()))
        consumer.check()

    simulate(body)
    return found


def encrypted_by_us(contents: Sequence[bytes], *names: str, **options: Any) -> list[bytes]:
    found: list[bytes] = []

    async def body(client: Client, broker: FakeBroker) -> None:
        broker.max_message_size = options.pop("max_message_size", 5 << 20)
        producer = await client.create_producer("t", encryption_keys=names, crypto_key_reader=Keys(), **options)
        await producer.send_many(contents, partition_key="k", properties={"p": "q"})
        found.extend(bytes(split_broker_part(entry)[2]) for entry in broker.topics[FULL].entries)

    simulate(body)
    return found


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_we_decrypt_what_pulsars_client_encrypts(tmp_path: Path, compression: str, batching: bool) -> None:
    contents = [b"content %d " % at * 30 for at in range(10)]
    kind = getattr(pulsar.CompressionType, compression)
    options = {"batching_max_publish_delay_ms": 200} if batching else {}
    entries = encrypted_by_pulsar(
        tmp_path, contents, compression_type=kind, batching_enabled=batching, batching_max_messages=5, **options
    )
    assert len(entries) == (2 if batching else 10)
    assert not any(b"content" in entry for entry in entries)
    metadata = parse_header(entries[0]).metadata
    assert (metadata.encryption_algo, len(metadata.encryption_param)) == ("", 12), "as we write it"
    assert received_by_us(entries, 10) == [(content, {"p": "q"}, "k") for content in contents]


def test_we_decrypt_the_chunks_of_pulsars_client(tmp_path: Path) -> None:
    content = bytes(at % 251 for at in range(12_000_000))
    entries = encrypted_by_pulsar(tmp_path, [content], chunking_enabled=True, batching_enabled=False)
    assert len(entries) == 3
    assert received_by_us(entries, 1) == [(content, {"p": "q"}, "k")]


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("compression", CompressionType)
def test_pulsars_client_decrypts_what_we_encrypt(tmp_path: Path, compression: CompressionType, batching: bool) -> None:
    contents = [b"content %d " % at * 30 for at in range(10)]
    entries = encrypted_by_us(
        contents, "other", "a", compression_type=compression, batching_enabled=batching, batching_max_messages=5
    )
    assert len(entries) == (2 if batching else 10)
    assert received_by_pulsar(tmp_path, entries, 10) == [(content, {"p": "q"}, "k", False) for content in contents]


def test_pulsars_client_decrypts_our_chunks(tmp_path: Path) -> None:
    content = bytes(at % 251 for at in range(50_000))
    entries = encrypted_by_us([content], "a", chunking_enabled=True, batching_enabled=False, max_message_size=20_000)
    assert len(entries) == 3
    assert received_by_pulsar(tmp_path, entries, 1) == [(content, {"p": "q"}, "k", False)]


def test_pulsars_client_finds_our_ciphertext_to_be_for_another_reader(tmp_path: Path) -> None:
    entries = encrypted_by_us([b"one"], "a", batching_enabled=False)
    action = pulsar.ConsumerCryptoFailureAction.CONSUME
    assert action.value == ConsumerCryptoFailureAction.CONSUME
    assert pair("a") != pair("c")
    found = received_by_pulsar(tmp_path, entries, 1, name="c", crypto_failure_action=action)
    assert found[0][3] is True
    assert entries[0].endswith(found[0][0])
