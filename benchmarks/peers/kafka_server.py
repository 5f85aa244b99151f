"""Kafka 4.3.1 on this machine: one process in KRaft mode, broker and controller, on free loopback ports in a folder.

Topics are made with `flush.messages=1` (`make_topic`): the log is synced before each answer to a producer with
`acks=all`. Kafka's own topics, which hold the positions of groups, keep its default and are not synced.
"""

from __future__ import annotations

import base64
import subprocess
import time
import uuid
from pathlib import Path
from typing import Any, Self

from magnetar.cli.common.processes import add_parent_death_signal, find_free_port

from .maven import HERE, Missing, jars, tool

READY_TIMEOUT_S = 90.0
HEAP = ("-Xms1g", "-Xmx1g")
"""As its own start script."""
SETTINGS = {
    "process.roles": "broker,controller", "node.id": "1", "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "offsets.topic.replication.factor": "1", "group.initial.rebalance.delay.ms": "0",
    "transaction.state.log.replication.factor": "1", "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1", "share.coordinator.state.topic.min.isr": "1",
    "log.segment.delete.delay.ms": "1000", "auto.create.topics.enable": "false",
}  # fmt: skip
LOGGED = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def command() -> list[str]:
    """Java with Kafka's jars; the class and its arguments follow. Missing."""
    try:
        import confluent_kafka  # noqa: F401
    except ImportError as error:
        raise Missing("confluent-kafka is missing: pip install '.[peers]'") from error
    folder = jars("kafka-4.3.1", HERE / "kafka_jars" / "pom.xml")
    return [tool("java"), *HEAP, LOGGED, "-cp", f"{folder}/*"]


def settings(folder: Path, broker: int, controller: int) -> dict[str, str]:
    return SETTINGS | {
        "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "log.dirs": str(folder / "logs"),
    }


class Kafka:
    """Ends with the block, or with this process; its log is in the folder."""

    def __init__(self, java: list[str], folder: Path) -> None:
        broker, controller = range(first := find_free_port("127.0.0.1", count=2), first + 2)
        self.url = f"127.0.0.1:{broker}"
        written = folder / "server.properties"
        written.write_text("".join(f"{name}={value}\n" for name, value in settings(folder, broker, controller).items()))
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        formats = [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(written)]
        subprocess.run(formats, check=True, capture_output=True, timeout=60)
        self._log = folder / "kafka.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                add_parent_death_signal([*java, "kafka.Kafka", str(written)]), stdout=log, stderr=log, cwd=folder
            )

    def wait_ready(self) -> None:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + READY_TIMEOUT_S
        client = admin(self.url)
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                client.list_topics(timeout=1)
                return
            except KafkaException:
                time.sleep(0.1)  # nothing answers yet
        raise RuntimeError(f"Kafka did not start: {self._log.read_text(errors='replace')[-4000:]}")

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def admin(url: str) -> Any:
    from confluent_kafka.admin import AdminClient

    return AdminClient({"bootstrap.servers": url, "log_level": 0})


def make_topic(url: str, name: str, partitions: int = 1) -> None:
    from confluent_kafka.admin import NewTopic

    wanted = NewTopic(name, partitions, 1, config={"flush.messages": "1"})
    client = admin(url)  # it lives until all is done
    for done in client.create_topics([wanted]).values():
        done.result(30)


def delete_topic(url: str, name: str) -> None:
    client = admin(url)
    for done in client.delete_topics([name]).values():
        done.result(30)
