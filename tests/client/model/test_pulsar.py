"""The official client decrypts what ours encrypts, and ours what it encrypts: through one broker, on loopback."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.client.model.settings import CompressionType, ConsumerCryptoFailureAction
from magnetar.runtime.network import Endpoint
from tests.client.conftest import in_thread
from tests.client.model.keys import Keys, files, pair
from tests.support.cluster import cluster

pulsar = pytest.importorskip("pulsar")
QUIET = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
CONTENTS = [b"content %d " % at * 30 for at in range(10)]
LARGE = bytes(range(251)) * 48_000


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Of the broker: for our client, and for Pulsar's."""
    folder: Path = tmp_path_factory.mktemp("cluster")

    @asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        async with cluster(folder, pulsar_listen=Endpoint("127.0.0.1", 0)) as running:
            broker = running.brokers[0]
            yield f"magnetar://{broker.endpoint} {broker.pulsar_urls[''][0]}"

    with in_thread(serve) as both:
        yield both.split()


@pytest.fixture
def clients(urls: list[str]) -> Iterator[tuple[magnetar.Client, Any]]:
    theirs = pulsar.Client(urls[1], logger=QUIET)
    with magnetar.Client(urls[0]) as ours:
        yield ours, theirs
        theirs.close()


def keys_of_pulsar(folder: Path, name: str = "a") -> Any:
    files(folder, name)
    return pulsar.CryptoKeyReader(str(folder / f"{name}-public.pem"), str(folder / f"{name}-private.pem"))


def send(producer: Any, contents: Sequence[bytes]) -> None:
    for content in contents:
        producer.send_async(content, None, partition_key="k", properties={"p": "q"})
    producer.flush()


def received(consumer: Any, contents: Sequence[bytes]) -> bool:
    """Whether it gets these, decrypted, with all that is beside them."""
    found = [consumer.receive(20_000) for _ in contents]
    assert not any(each.encryption_context().is_decryption_failed() for each in found)
    told = [(each.data(), each.properties(), each.partition_key()) for each in found]
    return told == [(content, {"p": "q"}, "k") for content in contents]


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("compression", [each.name for each in CompressionType])
def test_we_decrypt_what_pulsars_client_encrypts(
    clients: tuple[magnetar.Client, Any], tmp_path: Path, compression: str, batching: bool
) -> None:
    ours, theirs = clients
    topic = f"theirs-{compression}-{batching}"
    consumer = ours.subscribe(topic, "s", crypto_key_reader=Keys("a"))
    stranger = ours.subscribe(topic, "stranger", crypto_failure_action=ConsumerCryptoFailureAction.CONSUME)
    producer = theirs.create_producer(
        topic, encryption_key="a", crypto_key_reader=keys_of_pulsar(tmp_path), batching_max_messages=5,
        compression_type=getattr(pulsar.CompressionType, compression), batching_enabled=batching,
        batching_max_publish_delay_ms=200,
    )  # fmt: skip
    send(producer, CONTENTS)
    assert received(consumer, CONTENTS)
    for _ in range(2 if batching else 10):
        entry = stranger.receive(20_000)
        context = entry.encryption_context()
        assert context is not None
        assert (context.algorithm(), len(context.param())) == ("", 12), "as we write it"
        assert b"content" not in entry.data()
    with pytest.raises(magnetar.Timeout):
        stranger.receive(100)


@pytest.mark.parametrize("batching", [False, True])
@pytest.mark.parametrize("compression", CompressionType)
def test_pulsars_client_decrypts_what_we_encrypt(
    clients: tuple[magnetar.Client, Any], tmp_path: Path, compression: CompressionType, batching: bool
) -> None:
    ours, theirs = clients
    topic = f"ours-{compression.name}-{batching}"
    consumer = theirs.subscribe(topic, "s", crypto_key_reader=keys_of_pulsar(tmp_path))
    producer = ours.create_producer(
        topic, encryption_keys=("other", "a"), crypto_key_reader=Keys(), batching_max_messages=5,
        compression_type=compression, batching_enabled=batching,
    )  # fmt: skip
    send(producer, CONTENTS)
    assert received(consumer, CONTENTS)


def test_chunks_of_either_client_are_decrypted_by_the_other(
    clients: tuple[magnetar.Client, Any], tmp_path: Path
) -> None:
    ours, theirs = (clients[0], Keys("a")), (clients[1], keys_of_pulsar(tmp_path))
    for (one, keys), (other, others) in ((ours, theirs), (theirs, ours)):
        topic = f"chunks-of-{type(one).__module__}"
        consumer = other.subscribe(topic, "s", crypto_key_reader=others)
        options = {"chunking_enabled": True, "batching_enabled": False}
        send(one.create_producer(topic, encryption_key="a", crypto_key_reader=keys, **options), [LARGE])
        assert received(consumer, [LARGE])


def test_pulsars_client_finds_our_ciphertext_to_be_for_another_reader(
    clients: tuple[magnetar.Client, Any], tmp_path: Path
) -> None:
    ours, theirs = clients
    action = pulsar.ConsumerCryptoFailureAction.CONSUME
    assert action.value == ConsumerCryptoFailureAction.CONSUME
    assert pair("a") != pair("c")
    reader = keys_of_pulsar(tmp_path, "c")
    consumer = theirs.subscribe("other", "s", crypto_key_reader=reader, crypto_failure_action=action)
    send(ours.create_producer("other", encryption_key="a", crypto_key_reader=Keys(), batching_enabled=False), [b"one"])
    message = consumer.receive(20_000)
    assert message.encryption_context().is_decryption_failed()
    assert b"one" not in message.data()
