"""A server that starts imports what it needs until it serves its first messages, and nothing else.

What an idle server does not need is loaded when it is first needed (runtime/tasks.py `Workers`): each module costs
the start and the memory of every server that never uses it. Python itself says what it imports.
"""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Process, Processes
from tests import layout
from tests.support.processes import run_cli

pytestmark = pytest.mark.processes

LATER = {
    "magnetar.bookie.admin": "the verbs of an operator",
    "magnetar.bookie.inspect": "commands",
    "magnetar.broker.node.one_producer": "the first dead letter, or half message",
    "magnetar.broker.grpc.admin": "the first call of the administration",
    "magnetar.broker.grpc.transactions": "the first call about a transaction",
    "magnetar.broker.pulsar.connection": "the first connection of a client of Pulsar",
    "magnetar.broker.rest.application": "the first connection over HTTP",
    "magnetar.broker.session.administration": "the first call of the administration",
    "magnetar.broker.session.balancing": "the second broker",
    "magnetar.broker.session.summaries": "the first call of the administration",
    "magnetar.broker.cluster.schema_core": "the first schema",
    "magnetar.broker.transaction.coordinator": "the first coordinator",
    "magnetar.broker.transaction.begins_core": "the first coordinator",
    "magnetar.broker.transaction.coordinator_core": "the first coordinator",
    "magnetar.broker.transaction.halves_core": "the first coordinator",
    "magnetar.broker.transaction.intents_core": "the first coordinator",
    "magnetar.broker.transaction.outcomes_core": "the first coordinator",
    "magnetar.broker.transaction.records_core": "the first coordinator",
    "magnetar.broker.transaction.state_core": "the first coordinator",
    "magnetar.client": "the producers of a broker are loaded by the first message that it publishes itself",
    "magnetar.metadata.etcd": "--metadata etcd://…",
    "magnetar.metadata.zookeeper": "--metadata zk://…",
    "magnetar.proto.etcd_pb2": "--metadata etcd://…",
    "magnetar.proto.pulsar_pb2": "the first connection of a client of Pulsar",
    "magnetar.runtime.sim": "simulations",
    "magnetar.security": "--security",
    "magnetar.spark_connector": "programs",
    "cramjam": "the first payload that is compressed",
    "cryptography": "--security", "jwt": "--security", "bcrypt": "--security",
    "difflib": "a name that is wrong",
    "encodings.idna": "a name to listen at, which is looked up in threads",
    "email": "HTTP", "http": "HTTP", "starlette": "HTTP", "uvicorn": "HTTP",
    "jinja2": "the page", "fastavro": "programs", "kazoo": "--metadata zk://…", "rich": "commands",
    "google.protobuf.descriptor_pb2": "the first Protobuf schema",
    "logging.handlers": "an audit log in a file",
    "prometheus_client": "--metrics",
    "statistics": "nothing: it loads fractions and their regular expressions",
    "tomllib": "--config",
}  # fmt: skip
"""Module, with those in it → what loads it."""

DATACLASSES = {
    "magnetar.proto.names", "magnetar.proto.states", "magnetar.proto.schema",
    "magnetar.runtime.access", "magnetar.runtime.network", "magnetar.runtime.peer.envelope",
}  # fmt: skip
"""Values of clients too, which import no msgspec. A dataclass takes half a millisecond, a struct a fiftieth of it."""


def _imported(server: Process) -> set[str]:
    """Its output has a line for each, `import 'MODULE' # LOADER` (PYTHONVERBOSE)."""
    return set(re.findall(r"^import '([\w.]+)' #", server.output(), re.MULTILINE))


def _started(started: Processes, tmp_path: Path) -> Process:
    return started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), environment={"PYTHONVERBOSE": "1"}
    )


def test_an_idle_server_has_imported_nothing_that_it_does_not_need(started: Processes, tmp_path: Path) -> None:
    server = _started(started, tmp_path)
    with magnetar.Client(server.wait_ready()) as client:
        consumer = client.subscribe("first", "s")
        client.create_producer("first").send(b"hello")
        assert consumer.receive(10_000).data() == b"hello"
    found = _imported(server)
    assert "magnetar.broker.topic.topic" in found, "the server says what it imports"
    early = {each: why for each, why in LATER.items() if any(f"{name}.".startswith(f"{each}.") for name in found)}
    assert early == {}, "imported before they are needed"
    made = {f"magnetar.{module.dotted}" for module in layout.modules() if "\n@dataclass" in module.text}
    assert (found & made) - DATACLASSES == set(), "dataclasses that every server makes at its start"


def _of_pulsar(server: Process, url: str) -> None:
    host, _, port = _door(server, "pulsar").rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(b"\x00\x00\x00\x04none")
        assert connection.recv(1) == b"", "a connection that sends no frame is closed"


def _over_http(server: Process, url: str) -> None:
    with urllib.request.urlopen(f"http://{_door(server, 'http')}/admin/v2/tenants", timeout=30) as answer:
        assert json.loads(answer.read()) == ["public"]


def _a_transaction(server: Process, url: str) -> None:
    with magnetar.Client(url) as client:
        producer = client.create_producer("transacted")
        with client.transaction() as txn:
            producer.send(b"hello", txn=txn)


def _a_schema(server: Process, url: str) -> None:
    class Order(magnetar.schema.Record):
        number = magnetar.schema.Integer()

    with magnetar.Client(url) as client:
        client.create_producer("typed", schema=magnetar.schema.JsonSchema(Order)).send(Order(number=1))


def _command(*arguments: str) -> None:
    assert run_cli(*arguments).code == 0


def _door(server: Process, name: str) -> str:
    (ready,) = (line for line in server.lines if line.startswith("ready "))
    return dict(each.split("=", 1) for each in ready.split()[2:])[name].partition("://")[2]


USES: dict[str, Callable[[Process, str], object]] = {
    "magnetar.broker.grpc.admin": lambda _, url: _command("topics", "list", "--url", url),
    "magnetar.bookie.admin": lambda _, url: _command("ledgers", "list", "--url", url),
    "magnetar.broker.pulsar.connection": _of_pulsar,
    "magnetar.broker.rest.application": _over_http,
    "magnetar.broker.transaction.coordinator": _a_transaction,
    "magnetar.broker.cluster.schema_core": _a_schema,
}


def test_what_is_loaded_later_is_there_when_it_is_asked_for(started: Processes, tmp_path: Path) -> None:
    server = _started(started, tmp_path)
    url = server.wait_ready()
    for module, use in USES.items():
        assert module not in _imported(server)
        use(server, url)
        assert module in _imported(server)
    assert "Traceback" not in server.output()
