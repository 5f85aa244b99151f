"""The official Python client of Pulsar (which is its C++ client), unchanged, against real processes."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.cli.common.processes import Process, Processes
from tests.support.processes import run_cli

pulsar = pytest.importorskip("pulsar", reason="pulsar-client is not installed")

pytestmark = pytest.mark.processes
Earliest = pulsar.InitialPosition.Earliest
WAIT_MS = 20_000
QUIET = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)


def url_of(server: Process, fact: str = "pulsar") -> str:
    server.wait_ready()
    [line] = [each for each in server.lines if each.startswith("ready ")]
    found = re.search(rf"\b{fact}=(\S+)", line)
    assert found is not None, line
    return found[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with Processes(tmp_path_factory.mktemp("interop")) as processes:
        started = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        started.wait_ready()
        yield started


@pytest.fixture
def client(server: Process) -> Iterator[Any]:
    made = pulsar.Client(url_of(server), logger=QUIET)
    yield made
    made.close()


def received(consumer: Any, count: int) -> list[Any]:
    return [consumer.receive(WAIT_MS) for _ in range(count)]


def contents(consumer: Any, count: int) -> list[bytes]:
    return [message.data() for message in received(consumer, count)]


@pytest.mark.parametrize("compression", ["NONE", "LZ4", "ZLib", "ZSTD", "SNAPPY"])
def test_batches_of_each_compression_are_acknowledged_message_by_message(client: Any, compression: str) -> None:
    topic = f"batch-{compression}"
    producer = client.create_producer(
        topic, batching_enabled=True, batching_max_publish_delay_ms=20,
        compression_type=getattr(pulsar.CompressionType, compression),
    )  # fmt: skip
    consumer = client.subscribe(
        topic, "s", pulsar.ConsumerType.Shared, initial_position=Earliest, negative_ack_redelivery_delay_ms=100,
        batch_index_ack_enabled=True,
    )  # fmt: skip
    for number in range(200):
        producer.send_async(b"%d" % number, lambda result, id_: None)
    producer.flush()
    found = received(consumer, 200)
    assert [message.data() for message in found] == [b"%d" % number for number in range(200)]
    for message in found[:-1]:
        consumer.acknowledge(message)
    consumer.negative_acknowledge(found[-1])
    again = consumer.receive(WAIT_MS)
    assert (again.data(), again.redelivery_count()) == (b"199", 1)
    with pytest.raises(pulsar.Timeout):
        consumer.receive(200)


def test_readers_seeks_and_last_messages(client: Any) -> None:
    producer = client.create_producer("read", batching_enabled=False)
    at_end = client.create_reader("read", pulsar.MessageId.latest)
    assert not at_end.has_message_available()
    ids = [producer.send(b"%d" % number) for number in range(5)]
    assert at_end.read_next(WAIT_MS).data() == b"0"
    reader = client.create_reader("read", pulsar.MessageId.earliest)
    found = []
    while reader.has_message_available():
        found.append(reader.read_next(WAIT_MS).data())
    assert found == [b"0", b"1", b"2", b"3", b"4"]
    reader.seek(0)
    assert reader.read_next(WAIT_MS).data() == b"0"
    reader.seek(ids[2])
    assert reader.read_next(WAIT_MS).data() == b"3"
    consumer = client.subscribe("read", "s")
    assert consumer.get_last_message_id().entry_id() == ids[-1].entry_id()
    consumer.seek(ids[3])
    assert contents(consumer, 1) == [b"4"], "this client passes over the message that it names"
    consumer.seek(int(time.time() * 1000) - 60_000)
    assert contents(consumer, 1) == [b"0"]
    consumer.unsubscribe()
    assert len(client.create_table_view("read")) == 0, "messages without a key"


def test_partitions_patterns_and_non_persistent_topics(server: Process, client: Any) -> None:
    made = run_cli("topics", "create", "parts", "--partitions", "3", MAGNETAR_URL=server.wait_ready())
    assert made.code == 0, made.err
    assert len(client.get_topic_partitions("parts")) == 3
    producer = client.create_producer("parts", message_routing_mode=pulsar.PartitionsRoutingMode.RoundRobinDistribution)
    for number in range(30):
        producer.send(b"%d" % number, partition_key=f"{number}")
    pattern = client.subscribe(re.compile("persistent://public/default/par.*"), "p", initial_position=Earliest)
    found = received(pattern, 30)
    assert {message.data() for message in found} == {b"%d" % number for number in range(30)}
    assert len({message.message_id().partition() for message in found}) == 3
    volatile = client.subscribe("non-persistent://public/default/v", "s")
    client.create_producer("non-persistent://public/default/v").send(b"now")
    assert contents(volatile, 1) == [b"now"]


def test_exclusive_producers_and_names_that_are_taken(client: Any) -> None:
    modes = pulsar.ProducerAccessMode
    first = client.create_producer("exclusive", access_mode=modes.Exclusive)
    with pytest.raises(pulsar.ProducerFenced):
        client.create_producer("exclusive", access_mode=modes.Exclusive)
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer("exclusive")
    second = client.create_producer("exclusive", access_mode=modes.ExclusiveWithFencing)
    with pytest.raises((pulsar.ProducerFenced, pulsar.AlreadyClosed)):
        first.send(b"fenced")
    second.send(b"mine")
    client.create_producer("named", "x")
    with pytest.raises(pulsar.ProducerBusy):
        client.create_producer("named", "x")
    client.subscribe("named", "s")
    for kind in (pulsar.ConsumerType.Exclusive, pulsar.ConsumerType.Shared):
        with pytest.raises(pulsar.ConsumerBusy):
            client.subscribe("named", "s", kind)
    with pytest.raises(pulsar.TopicNotFound):
        client.subscribe("persistent://public/none/t", "s")


def test_tls_and_a_token_are_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "security"
    assert run_cli("security", "init", str(folder)).code == 0
    with Processes(tmp_path) as processes:
        settings = str(folder / "security.toml")
        server = processes.start("secured", "standalone", "--port", "0", "--data", "d", "--security", settings)
        server.wait_ready()
        url, ca = url_of(server), str(folder / "ca.pem")
        assert url.startswith("pulsar+ssl://")
        token = (folder / "admin.token").read_text()
        trusted: dict[str, Any] = {"tls_trust_certs_file_path": ca, "tls_validate_hostname": True, "logger": QUIET}
        client = pulsar.Client(url, authentication=pulsar.AuthenticationToken(token), **trusted)
        client.create_producer("t").send(b"x")
        client.close()
        stranger = pulsar.Client(url, operation_timeout_seconds=1, **trusted)
        with pytest.raises((pulsar.Timeout, pulsar.AuthenticationError, pulsar.ConnectError)):
            stranger.create_producer("t")
        stranger.close()
        assert token.strip() not in "".join(path.read_text() for path in tmp_path.rglob("*.std*"))


def test_a_service_url_of_http_is_looked_up_there(server: Process) -> None:
    url = url_of(server, "http")
    asked = urllib.request.Request(f"{url}/admin/v2/persistent/public/default/by-http/partitions", b"3", method="PUT")
    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.status == 204
    client = pulsar.Client(url, logger=QUIET)
    try:
        consumer = client.subscribe("by-http", "s", initial_position=Earliest)
        producer = client.create_producer("by-http")
        for number in range(10):
            producer.send(b"%d" % number)
        assert sorted(each.data() for each in received(consumer, 10)) == [b"%d" % number for number in range(10)]
        assert len(client.get_topic_partitions("by-http")) == 3
        pattern = re.compile("persistent://public/default/by-ht.*")
        assert len(received(client.subscribe(pattern, "pattern", initial_position=Earliest), 10)) == 10
        with urllib.request.urlopen(f"{url}/admin/v2/persistent/public/default/by-http/partitioned-stats") as answer:
            shown = json.load(answer)
        assert (shown["msgInCounter"], shown["subscriptions"]["s"]["msgBacklog"]) == (10, 10)
        assert {each["clientVersion"].startswith("Pulsar-CPP") for each in shown["publishers"]} == {True}
    finally:
        client.close()


def test_schemas_are_registered_evolve_and_are_refused(client: Any) -> None:
    schemas: Any = pulsar.schema

    def order(**more: Any) -> Any:
        return type("Order", (schemas.Record,), {"a": schemas.Integer(), **more})

    first, second = order(), order(b=schemas.Integer(default=7, required_default=True))
    wrong = order(z=schemas.Integer(required=True))
    for kind in (schemas.AvroSchema, schemas.JsonSchema):
        name = f"typed-{kind.__name__}"
        consumer = client.subscribe(name, "s", schema=kind(first))
        client.create_producer(name, schema=kind(first)).send(first(a=1))
        client.create_producer(name, schema=kind(second)).send(second(a=2, b=3))
        reader = client.create_reader(name, pulsar.MessageId.earliest, schema=kind(second))
        for number in (1, 2):
            message = consumer.receive(WAIT_MS)
            assert message.value().a == number
            assert ord(message.schema_version()[-1]) == number - 1
            assert reader.read_next(WAIT_MS).value().a == number
        with pytest.raises(pulsar.IncompatibleSchema):
            client.create_producer(name, schema=kind(wrong))
        with pytest.raises(pulsar.IncompatibleSchema):
            client.subscribe(name, "t", schema=schemas.StringSchema())


# ------------------------------------------------------------------ values that are no text
FOREIGN = {"name": b"caf\xe9", "value": b"\xff\xfe\x00"}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("compression", [pulsar.CompressionType.NONE, pulsar.CompressionType.ZSTD])
def test_a_key_or_a_property_that_is_no_text_hides_no_neighbour(
    server: Process, client: Any, batched: bool, compression: Any
) -> None:
    """Through pulsar-client's C++ builder, which takes bytes where it has strings."""
    topic = f"foreign-{batched}-{compression}"
    producer = client.create_producer(
        topic, batching_enabled=batched, batching_max_publish_delay_ms=500, compression_type=compression,
        send_timeout_millis=5000,
    )  # fmt: skip
    results: list[Any] = []
    for content, key, value in ((b"1", b"a", b"v"), (b"2", FOREIGN["value"], FOREIGN["name"]), (b"3", b"b", b"v")):
        builder = pulsar._pulsar.MessageBuilder()
        builder.content(content).partition_key(key).property("p", value)
        producer._producer.send_async(builder.build(), lambda result, _: results.append(result))
    producer.flush()
    assert results == [pulsar.Result.Ok] * 3
    with magnetar.Client(server.wait_ready()) as ours:
        reader = ours.create_reader(topic, magnetar.MessageId.earliest)
        found = [reader.read_next(WAIT_MS) for _ in range(3)]
        assert [each.data() for each in found] == [b"1", b"2", b"3"]
        assert found[1].key_bytes() == FOREIGN["value"]
        assert found[1].properties() == {"p": "caf\ufffd"}
        view = ours.create_table_view(topic)
        assert (view.get("a"), view.get("b"), len(view)) == (b"1", b"3", 3)
    producer.close()
