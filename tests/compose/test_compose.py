"""docker-compose.yml starts a cluster that works; its commands run here as local processes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Processes
from magnetar.cli.main import root
from tests.compose.compose import ROOT, Compose
from tests.support.processes import run_cli

FILE = ROOT / "docker-compose.yml"


@pytest.fixture
def compose() -> Compose:
    return Compose(FILE)


def test_the_file_has_metadata_three_bookies_and_two_brokers(compose: Compose) -> None:
    roles = Counter(service["command"].split()[0] for service in compose.services.values())
    assert roles == {"security": 1, "metadata": 1, "bookie": 3, "broker": 2}


def test_security_is_on_and_made_before_anything_else_starts(compose: Compose) -> None:
    assert next(compose.in_order()) == "security"
    for name, service in compose.services.items():
        settings = service["environment"]
        assert settings["MAGNETAR_SECURITY"] == "/security/security.toml", name
        assert "MAGNETAR_INSECURE" not in settings
        assert "--insecure" not in service["command"]
        assert "security:/security" in service["volumes"]
    commands = {name: service["command"] for name, service in compose.services.items()}
    hosts = {name for name, command in commands.items() if command.startswith(("metadata", "broker"))}
    words = compose.services["security"]["command"].split()
    assert {after for word, after in pairwise(words) if word == "--host"} == hosts
    finished = compose.services["metadata"]["depends_on"]["security"]["condition"]
    assert finished == "service_completed_successfully"


def test_every_process_that_keeps_something_has_a_volume_of_its_own(compose: Compose) -> None:
    keepers = [service for service in compose.services.values() if "--data /data" in service["command"]]
    volumes = [volume for service in keepers for volume in service["volumes"] if not volume.startswith("security:")]
    assert len(keepers) == 4
    assert len(set(volumes)) == 4
    assert all(volume.endswith(":/data") for volume in volumes)


def test_published_ports_are_those_that_brokers_listen_on_and_advertise(compose: Compose) -> None:
    for name in ("broker-1", "broker-2"):
        service = compose.services[name]
        (published,) = service["ports"]
        machine, outside, inside = published.split(":")
        assert machine == "127.0.0.1", "the cluster of an example is this machine's"
        assert f"--listen 0.0.0.0:{inside}" in service["command"]
        assert f"--advertise {name}:{outside}" in service["command"]


def test_the_image_starts_a_command_that_exists() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    command = json.loads(next(line for line in lines if line.startswith("CMD ")).removeprefix("CMD "))
    assert command[0] in root.table
    assert 'ENTRYPOINT ["magnetar"]' in lines


@pytest.mark.processes
def test_messages_go_through_the_cluster_of_the_file(compose: Compose, started: Processes) -> None:
    urls = compose.start(started)
    assert urls["broker-1"].endswith(compose.address("broker-1", 7650))
    own = compose.environment("broker-1", started.directory)
    known = {
        "authentication": magnetar.AuthenticationToken(lambda: Path(own["MAGNETAR_TOKEN"]).read_text()),
        "tls_trust_certs_file_path": own["MAGNETAR_TLS_CA"],
    }
    with magnetar.Client(urls["broker-1"], **known) as one, magnetar.Client(urls["broker-2"], **known) as other:
        consumer = other.subscribe("orders", "billing", initial_position=magnetar.InitialPosition.Earliest)
        producer = one.create_producer("orders")
        for number in range(100):
            producer.send(f"order {number}".encode())
        for number in range(100):
            message = consumer.receive(timeout_millis=30_000)
            assert message.data() == f"order {number}".encode()
            consumer.acknowledge(message)
    listed = run_cli("bookies", "list", "-o", "json", "--url", urls["broker-2"], **own)
    assert listed.code == 0, listed.err
    assert len(json.loads(listed.out)) == 3
    brokers = json.loads(run_cli("brokers", "list", "-o", "json", "--url", urls["broker-1"], **own).out)
    assert {broker["name"] for broker in brokers} == {"broker-1", "broker-2"}
    stranger = run_cli("brokers", "list", "--url", urls["broker-1"], MAGNETAR_TLS_CA=own["MAGNETAR_TLS_CA"])
    assert (stranger.code, "bring a token" in stranger.err) == (1, True), stranger.err
    again = compose.arguments("security", started.directory)
    assert run_cli(*again).code == 0, "it may be started a second time"
