"""`magnetar migrate` from a real Pulsar that Maven brings, which the official Python client filled: `make interop`."""

import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.admin import Admin
from magnetar.cli.common.processes import Process, Processes
from magnetar.cli.migrate.copying import MIGRATION_NAME
from magnetar.proto.errors import NotFound
from tests.interop.pulsar_process import Pulsar, Unavailable, build
from tests.interop.test_pulsar_python import QUIET, url_of
from tests.support.processes import run_cli

pulsar = pytest.importorskip("pulsar", reason="pulsar-client is not installed")
pytestmark = pytest.mark.interop
Earliest = pulsar.InitialPosition.Earliest
WAIT_MS = 20_000
SINGLES, BATCHED, PARTITIONED = 6_000, 60_000, 3_000
MESSAGES = SINGLES + BATCHED
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pulsar]:
    try:
        command = build(tmp_path_factory.mktemp("jars"))
    except Unavailable as why:
        pytest.skip(f"no real Pulsar: {why}")
    with Pulsar(command, tmp_path_factory.mktemp("pulsar")) as started:
        yield started


@pytest.fixture(scope="module")
def theirs(source: Pulsar) -> Iterator[Any]:
    client = pulsar.Client(source.url, logger=QUIET)
    yield client
    client.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with Processes(tmp_path_factory.mktemp("server")) as processes:
        started = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        started.wait_ready()
        yield started


@pytest.fixture(scope="module")
def ours(server: Process) -> Iterator[Any]:
    """The official client again: what it sees of both must be the same."""
    client = pulsar.Client(url_of(server), logger=QUIET)
    yield client
    client.close()


def migrate(source: Pulsar, server: Process, *arguments: str) -> dict[str, Any]:
    done = run_cli("migrate", "--from", source.url, "--url", server.wait_ready(), "-o", "json", *arguments)
    assert done.code == 0, done
    found: dict[str, Any] = json.loads(done.out)
    return found


def seen(client: Any, topic: str, **options: Any) -> list[tuple[Any, ...]]:
    """All that the client tells of each message, but where it is stored."""
    reader = client.create_reader(topic, pulsar.MessageId.earliest, **options)
    found = []
    while reader.has_message_available():
        message = reader.read_next(WAIT_MS)
        found.append((
            message.data(), message.properties(), message.partition_key(), message.ordering_key(),
            message.event_timestamp(), message.publish_timestamp(), message.producer_name(),
            message.message_id().batch_index(),
        ))  # fmt: skip
    reader.close()
    return found


def fill(client: Any, topic: str, first: int, end: int, **options: Any) -> None:
    producer = client.create_producer(topic, block_if_queue_full=True, **options)
    failed: list[Any] = []

    def done(result: Any, _: Any) -> None:
        if result != pulsar.Result.Ok:
            failed.append(result)

    for number in range(first, end):
        producer.send_async(
            b"%d" % number, done, partition_key=f"k{number % 7}", properties={"n": str(number)},
            event_timestamp=1_000_000 + number,
        )  # fmt: skip
    producer.flush()
    producer.close()
    assert not failed


def test_a_migration_that_is_killed_three_times_loses_and_doubles_nothing(
    source: Pulsar, theirs: Any, ours: Any, server: Process, tmp_path: Path
) -> None:
    fill(theirs, "killed", 0, SINGLES, batching_enabled=False)
    fill(theirs, "killed", SINGLES, MESSAGES, batching_enabled=True, compression_type=pulsar.CompressionType.ZSTD)
    arguments = ("migrate", "--from", source.url, "--url", server.wait_ready(), "--topics", "killed")
    with Admin(server.wait_ready()) as admin, Processes(tmp_path) as processes:
        for number, at in enumerate((200, 1500, 4000)):
            process = processes.start(f"migrate-{number}", *arguments)
            wait_for(admin, "killed", at)
            process.kill()
            assert end_of(admin, "killed") < MESSAGES, "it was killed in the middle"
    fill(theirs, "killed", MESSAGES, MESSAGES + 100, batching_enabled=True)
    migrate(source, server, "--topics", "killed")
    assert seen(ours, "killed") == seen(theirs, "killed")
    assert migrate(source, server, "--topics", "killed")["messages"] == 0


def end_of(admin: Admin, topic: str) -> int:
    try:
        return admin.offsets(topic).end_index
    except NotFound:
        return 0


def wait_for(admin: Admin, topic: str, index: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while end_of(admin, topic) < index:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_partitions_chunks_delays_and_keys_arrive_as_they_were(
    source: Pulsar, theirs: Any, ours: Any, server: Process
) -> None:
    made = run_http(source, "PUT", "/admin/v2/persistent/public/default/parts/partitions", b"3")
    assert made == 204
    fill(theirs, "parts", 0, PARTITIONED, batching_enabled=True, batching_type=pulsar.BatchingType.KeyBased)
    producer = theirs.create_producer("large", chunking_enabled=True, batching_enabled=False)
    content = bytes(range(256)) * 50_000
    producer.send(content, properties={"a": "b"})
    producer.send(b"after")
    producer = theirs.create_producer("odd", batching_enabled=False)
    producer.send(b"late", deliver_after=datetime.timedelta(hours=1))
    producer.send(b"now", ordering_key="o", partition_key="p")
    producer.send(b"")
    migrate(source, server, "--topics", "parts", "--topics", "public/default/l*", "--topics", "odd")
    assert len(ours.get_topic_partitions("parts")) == 3
    for number in range(3):
        name = f"parts-partition-{number}"
        assert seen(ours, name) == seen(theirs, name) != []
    assert [each[0] for each in seen(ours, "large")] == [content, b"after"]
    assert seen(ours, "odd") == seen(theirs, "odd")
    consumer = ours.subscribe("odd", "shared", pulsar.ConsumerType.Shared, initial_position=Earliest)
    assert [consumer.receive(WAIT_MS).data() for _ in range(2)] == [b"now", b""]
    with pytest.raises(pulsar.Timeout):
        consumer.receive(500)


def test_what_is_encrypted_is_copied_without_a_key(
    source: Pulsar, theirs: Any, ours: Any, server: Process, tmp_path: Path
) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL
    paths = [str(tmp_path / name) for name in ("public.pem", "private.pem")]
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    Path(paths[0]).write_bytes(public)
    Path(paths[1]).write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))
    keys = pulsar.CryptoKeyReader(*paths)
    fill(theirs, "secret", 0, 200, batching_enabled=True, encryption_key="key", crypto_key_reader=keys)
    migrate(source, server, "--topics", "secret")
    found = seen(ours, "secret", crypto_key_reader=keys)
    assert [each[0] for each in found] == [b"%d" % number for number in range(200)]
    assert found == seen(theirs, "secret", crypto_key_reader=keys)


def test_schemas_and_positions_of_subscriptions_come_along(
    source: Pulsar, theirs: Any, ours: Any, server: Process
) -> None:
    schema = pulsar.schema
    first = type("Order", (schema.Record,), {"a": schema.Integer()})
    second = type("Order", (schema.Record,), {"a": schema.Integer(), "b": schema.String(required_default=True)})
    theirs.create_producer("typed", schema=schema.AvroSchema(first)).send(first(a=1))
    theirs.create_producer("typed", schema=schema.AvroSchema(second)).send(second(a=2, b="x"))
    fill(theirs, "typed-not", 0, 50, batching_enabled=False)
    consumer = theirs.subscribe("typed-not", "billing", initial_position=Earliest)
    for _ in range(20):
        consumer.acknowledge(consumer.receive(WAIT_MS))
    consumer.close()
    subscribed = ("--subscriptions", "--admin-url", source.http_url)
    migrate(source, server, "--topics", "public/default/typed*", *subscribed)
    reader = ours.create_reader("typed", pulsar.MessageId.earliest, schema=schema.AvroSchema(second))
    found = [reader.read_next(WAIT_MS) for _ in range(2)]
    assert [(each.value().a, each.value().b) for each in found] == [(1, None), (2, "x")]
    assert [ord(each.schema_version()[-1]) for each in found] == [0, 1]
    with Admin(server.wait_ready()) as admin:
        assert {"billing", MIGRATION_NAME} <= set(admin.subscriptions("typed-not"))
    consumer = ours.subscribe("typed-not", "billing")
    assert [consumer.receive(WAIT_MS).data() for _ in range(30)] == [b"%d" % number for number in range(20, 50)]


def test_a_copy_that_follows_takes_what_is_published_meanwhile(
    source: Pulsar, theirs: Any, ours: Any, server: Process, tmp_path: Path
) -> None:
    fill(theirs, "followed", 0, 100, batching_enabled=True)
    arguments = ("migrate", "--from", source.url, "--url", server.wait_ready(), "--topics", "followed", "--follow")
    with Admin(server.wait_ready()) as admin, Processes(tmp_path) as processes:
        process = processes.start("follow", *arguments)
        wait_for(admin, "followed", 100)
        fill(theirs, "followed", 100, 300, batching_enabled=True)
        wait_for(admin, "followed", 300)
        assert run_http(source, "PUT", "/admin/v2/persistent/public/default/followed/unload", b"") == 204
        fill(theirs, "followed", 300, 400, batching_enabled=True)
        wait_for(admin, "followed", 400)
        process.stop()
    assert seen(ours, "followed") == seen(theirs, "followed")


def run_http(source: Pulsar, method: str, path: str, body: bytes) -> int:
    import urllib.request

    asked = urllib.request.Request(source.http_url + path, body, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return int(answer.status)


def test_magnetars_own_client_decodes_what_was_copied(server: Process) -> None:
    with magnetar.Client(server.wait_ready()) as client:
        reader = client.create_reader("killed", magnetar.MessageId.earliest)
        assert [reader.read_next(WAIT_MS).data() for _ in range(MESSAGES)] == [b"%d" % n for n in range(MESSAGES)]
