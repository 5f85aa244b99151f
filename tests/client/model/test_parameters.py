"""No parameter of a public function is ignored silently: it is used, refused, or named in a warning of the log."""

import ast
import asyncio
import inspect
import logging
import re
import textwrap
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import magnetar
from magnetar.client import aio
from magnetar.client.admin import AdminClient
from magnetar.client.blocking import client as blocking
from magnetar.client.client import Client
from magnetar.client.common.errors import InvalidConfiguration, OperationNotSupported
from magnetar.client.common.loggers import STATISTICS
from magnetar.client.connect.authentication import make_caller_access
from magnetar.client.model.options import IGNORED_OPTIONS
from magnetar.client.model.settings import ClientSettings, ConsumerSettings, ProducerSettings
from magnetar.proto import errors as wire_errors
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

URL = "magnetar://localhost:7650"
REFUSED: dict[str, dict[str, Any]] = {
    "Client": {"tls_allow_insecure_connection": True},
}
ALWAYS = {
    "batch_index_ack_enabled", "regex_subscription_mode", "pattern_auto_discovery_period",
    "replicate_subscription_state_enabled",
}  # fmt: skip
"""What they ask for is done whether they ask or not."""
SETTINGS = {field.name for kind in (ClientSettings, ProducerSettings, ConsumerSettings) for field in fields(kind)}
SETTINGS |= {"operation_timeout_seconds", "connection_timeout_ms", "encryption_key"}

CLASSES = [
    blocking.Client, blocking.Producer, blocking.Consumer, blocking.Reader, blocking.TableView,
    aio.Client, aio.Producer, aio.Consumer, aio.Reader, aio.TableView, AdminClient, magnetar.MessageId,
    magnetar.Message,
]  # fmt: skip


def _public() -> list[Any]:
    found = []
    for kind in CLASSES:
        for name, member in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") or (name == "__init__" and kind.__name__ == "Client"):
                id_ = f"{kind.__module__.split('.')[-1]}.{member.__qualname__}"
                found.append(pytest.param(kind, name, member, id=id_))
    return found


def _read(function: Callable[..., Any]) -> set[str]:
    """The names that the body reads."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


OF_ACCESS = set(re.findall(r'"((?:use_)?tls\w*)"', inspect.getsource(make_caller_access)))
"""Parameters of Client about TLS, which are read by name."""
ALWAYS_ON = {"tls_validate_hostname"}
"""Of pulsar-client: its default leaves the host's name unverified; here it always is, and nothing turns that off."""


@pytest.mark.parametrize(("kind", "name", "function"), _public())
def test_every_parameter_is_used_refused_or_warned_of(kind: type[Any], name: str, function: Callable[..., Any]) -> None:
    read = _read(function)
    refused = REFUSED.get("Client" if name == "__init__" else name, {})
    for parameter in list(inspect.signature(function).parameters)[1:]:
        by_name = "locals" in read and (parameter in SETTINGS or parameter in IGNORED_OPTIONS or parameter in ALWAYS)
        passed_on = "locals" in read and ".blocking" in kind.__module__  # to the asyncio face, by its name
        passed_on |= {"row", "bound"} <= read  # of a row (client/admin/grpc_transport.py): all that is bound is sent
        by_name = by_name or parameter in ALWAYS_ON or ("locals" in read and parameter in OF_ACCESS)
        assert parameter in read or by_name or passed_on or parameter in refused, f"{parameter} is read nowhere"


@pytest.mark.parametrize(("name", "value"), REFUSED["Client"].items())
def test_a_client_refuses_what_is_not_there(name: str, value: object) -> None:
    for face in (magnetar.Client, Client):
        with pytest.raises(OperationNotSupported, match=name):
            face(URL, **{name: value})


@pytest.mark.run_by.with_args(simulate)
async def test_a_message_names_the_clusters_that_may_get_it_as_pulsars_clients_write_it(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", batching_enabled=True)
    await producer.send(b"x", replication_clusters=["a", "b"])
    await producer.send(b"x", disable_replication=True)
    await producer.send(b"x", replication_clusters=[], disable_replication=False)
    [topic] = broker.topics.values()
    assert [list(each.metadata.replicate_to) for each in topic.headers] == [["a", "b"], ["__local__"], []]


@pytest.mark.parametrize("name", IGNORED_OPTIONS)
def test_what_tunes_nothing_here_is_named_in_the_log(
    name: str, fake: tuple[str, FakeBroker], caplog: pytest.LogCaptureFixture
) -> None:
    seven: Any = "7" if name == "log_conf_file_path" else 7
    with caplog.at_level(logging.WARNING, "magnetar.client"):
        on_client = name in inspect.signature(magnetar.Client).parameters
        with magnetar.Client(fake[0], **{name: seven} if on_client else {}) as client:
            client.subscribe("t", "s", **{} if on_client else {name: seven}).close()
            assert caplog.text.count(f"{name}={seven!r} has no effect") == 1
            client.subscribe("t", "s").close()
    assert caplog.text.count("has no effect") == 1, "defaults are not warned of"


@pytest.mark.parametrize(("name", "value"), [("message_listener_threads", 0), ("stats_interval_in_seconds", -1)])
def test_threads_and_intervals_have_a_least_value(name: str, value: int) -> None:
    with pytest.raises(InvalidConfiguration, match=name):
        magnetar.Client(URL, **{name: value})  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------- what they do
@pytest.mark.parametrize("threads", [1, 2])
def test_as_many_listeners_of_a_client_are_called_at_once_as_it_has_threads_for(
    threads: int, fake: tuple[str, FakeBroker]
) -> None:
    """Two consumers and a reader; who is inside waits until as many are inside as may be, and a while for one more."""
    lock, full, one_more, everybody = threading.Lock(), threading.Event(), threading.Event(), threading.Event()
    inside, most = 0, 0
    got: dict[str, list[bytes]] = {}

    def listener(receiver: Any, message: magnetar.Message) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
            first = not full.is_set()
            if inside == threads:
                full.set()
            if inside > threads:
                one_more.set()
        assert full.wait(20), "fewer come than have a thread"
        if first:
            one_more.wait(0.3)
        with lock:
            inside -= 1
            got.setdefault(receiver.topic(), []).append(message.data())
            if sum(map(len, got.values())) == 12:
                everybody.set()

    with magnetar.Client(fake[0], message_listener_threads=threads) as client:
        for number in range(3):
            with client.create_producer(f"t{number}") as producer:
                for content in range(4):
                    producer.send(b"%d" % content)
        earliest = magnetar.InitialPosition.Earliest
        for number in range(2):
            client.subscribe(f"t{number}", "s", message_listener=listener, initial_position=earliest)
        client.create_reader("t2", magnetar.MessageId.earliest, reader_listener=listener)
        assert everybody.wait(30)
    assert most == threads
    assert list(got.values()) == [[b"0", b"1", b"2", b"3"]] * 3, "each keeps its order"


def test_statistics_are_logged_at_the_interval_until_the_client_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", "p")
        await client.subscribe("t", "s", consumer_name="c")
        await producer.send(b"x")
        await asyncio.sleep(61)
        assert caplog.text.count("producer p of persistent://public/default/t: stored_messages 1") == 2
        assert caplog.text.count("stored_messages 1 (0.0333/s), stored_bytes") == 1, "the rate since the line before"
        assert caplog.text.count("consumer c of s on persistent://public/default/t:") == 2
        await client.close()
        await asyncio.sleep(61)
        assert caplog.text.count("stored_messages") == 2

    with caplog.at_level(logging.INFO, "magnetar.client"):
        simulate(body, stats_interval_in_seconds=30)
        caplog.clear()

        async def silent(client: Client, broker: FakeBroker) -> None:
            await client.create_producer("t", "p")
            await asyncio.sleep(10_000)
            assert "stored_messages" not in caplog.text

        simulate(silent, stats_interval_in_seconds=0)


@pytest.mark.parametrize("measured", [True, False])
def test_statistics_are_those_of_one_table_and_how_long_sends_take_is_among_them_when_asked_for(measured: bool) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", "p")
        consumer = await client.subscribe("t", "s", initial_position=magnetar.InitialPosition.Earliest)
        await producer.send_many([b"%d" % number for number in range(10)])
        messages = [await consumer.receive() for _ in range(10)]
        await consumer.acknowledge(messages[:6])
        await consumer.negative_acknowledge(messages[7])
        await consumer.acknowledge_cumulative(messages[9])
        broker.publish_errors.append(wire_errors.NotAllowed("no"))
        with pytest.raises(magnetar.PulsarException):
            await producer.send(b"x")
        await asyncio.sleep(1)
        sent, received = client.statistics().values()
        assert {*sent, *received} <= set(STATISTICS)
        assert measured == ({*sent, *received} == set(STATISTICS))
        assert (sent["stored_messages"], sent["failed_messages"], sent["pending_messages"]) == (10, 1, 0)
        assert sent["stored_bytes"] > 10
        assert (received["delivered_messages"], received["acknowledgements"]) == (10, 7)
        assert (received["negative_acknowledgements"], received["delivered_bytes"] > 10) == (1, True)
        if measured:
            assert 0 < sent["send_p50_us"] <= sent["send_p95_us"] <= sent["send_p99_us"] < 10**6

    simulate(body, latency_statistics=measured)
