"""Bookies and a broker as real processes on a real ZooKeeper: it dies, it sleeps beyond the session timeout."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Process, Processes
from tests.support.processes import run_cli
from tests.support.zookeeper import ZookeeperServer, why_no_zookeeper

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(why_no_zookeeper() is not None, reason=str(why_no_zookeeper())),
]

SESSION_S = "2"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ZookeeperServer]:
    with ZookeeperServer(tmp_path / "zookeeper") as server:
        yield server


def _wait_said(process: Process, text: str, count: int = 1) -> None:
    end = time.monotonic() + 60
    while process.output().count(text) < count:
        assert process.is_running, process.output()
        assert time.monotonic() < end, process.output()
        time.sleep(0.02)


def test_a_cluster_outlives_a_zookeeper_that_dies_and_one_that_sleeps(
    server: ZookeeperServer, started: Processes
) -> None:
    where = ("--listen", "127.0.0.1:0", "--metadata", server.url, "--session-timeout", SESSION_S)
    settings = started.directory / "settings.toml"
    settings.write_text("[broker]\nensemble_size = 1\nwrite_quorum = 1\nack_quorum = 1\n")
    bookie = started.start("bookie", "bookie", *where, "--data", str(started.directory / "bookie"))
    broker = started.start("broker", "broker", *where, "--config", str(settings))
    bookie.wait_ready()
    url = broker.wait_ready()
    sent: list[bytes] = []
    with magnetar.Client(url) as client:
        producer = client.create_producer("t", send_timeout_millis=60_000)

        def send() -> None:
            for _ in range(20):
                sent.append(b"%d" % len(sent))
                producer.send(sent[-1])

        send()
        server.kill()
        _wait_said(broker, "no connection to ZooKeeper")
        send()  # who owns a topic serves it on
        server.start()
        send()
        server.pause()
        for process in (broker, bookie):
            _wait_said(process, "the metadata session is lost")
        server.resume()
        send()  # registered again, the topic taken again
        consumer = client.subscribe("t", "all", initial_position=magnetar.InitialPosition.Earliest)
        received = [consumer.receive(30_000).data() for _ in sent]
        assert received == sent
    assert "registered in a new metadata session" in broker.output()
    _wait_said(bookie, "registered again")


def test_a_zookeeper_that_does_not_answer_and_an_address_that_is_none_are_named(started: Processes) -> None:
    nobody = run_cli("broker", "--metadata", "zk://127.0.0.1:1/m", "--wait", "0.1", "--session-timeout", "0.3")
    assert nobody.code == 1
    assert "no metadata service at zk://127.0.0.1:1/m" in nobody.err
    assert "start ZooKeeper" in nobody.err
    wrong = run_cli("broker", "--metadata", "zk://a/zookeeper")
    assert wrong.code == 2
    assert "ZooKeeper's own" in wrong.err
