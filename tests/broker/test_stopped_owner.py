"""A broker that is stopped (SIGSTOP) breaks no connection: its clients are at the new owner soon all the same."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

import magnetar
from magnetar.admin import Admin
from magnetar.cli.common.processes import Cluster, Process
from tests.support.steps import stopwatch

pytestmark = pytest.mark.processes

SESSION_S = 2.0
BOUND_S = 2 * SESSION_S + 3.0


def _owner(cluster: Cluster) -> Process:
    with Admin(cluster.url) as admin:
        found = str(admin.owner("t"))
    return next(each for each in cluster.brokers if each.address in found)


def test_a_producer_and_an_idle_consumer_are_at_the_new_owner_within_twice_the_sessions_time(tmp_path: Path) -> None:
    with Cluster(tmp_path, session_timeout_s=SESSION_S) as cluster, contextlib.closing(
        magnetar.Client(cluster.url)
    ) as client:  # fmt: skip
        producer = client.create_producer("t", send_timeout_millis=60_000)
        consumer = client.subscribe("t", "s")
        producer.send(b"before")
        consumer.acknowledge(consumer.receive(10_000))
        owner = _owner(cluster)
        os.kill(owner.pid, signal.SIGSTOP)
        try:
            with stopwatch() as seconds:
                producer.send(b"after")
                while consumer.receive(60_000).data() != b"after":
                    continue  # an acknowledgement that was on its way
        finally:
            os.kill(owner.pid, signal.SIGCONT)
        assert seconds() < BOUND_S
