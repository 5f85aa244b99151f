"""`kill -9` under load, of each kind of process: nothing acknowledged is lost, every topic opens again."""

from pathlib import Path

import pytest

from magnetar.cli.common.processes import Cluster, Process, Processes
from tests.chaos.workload.load import Load, check

KILLS = 3
TOPICS = ("orders", "payments", "clicks")
ACKS_BETWEEN = 500
"""Of each topic, between two kills: it serves again, and the next kill comes under full load."""
ACKED_MIN = KILLS * ACKS_BETWEEN * len(TOPICS)

pytestmark = pytest.mark.processes


def _kill_under_load(url: str, victims: list[Process]) -> int:
    """Messages acknowledged; raises AssertionError when one is lost or a topic does not open."""
    with Load(url, TOPICS) as load:
        for turn in range(KILLS):
            load.wait_acked(ACKS_BETWEEN)
            victim = victims[turn % len(victims)]
            victim.kill()
            victim.start()
            victim.wait_ready()
        load.wait_acked(ACKS_BETWEEN)
        load.stop()
        check(load, url)
        return load.acked


@pytest.mark.parametrize("kind", ["bookie", "broker"])
def test_a_killed_process_of_a_cluster_loses_nothing(kind: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, session_timeout_s=2.0) as cluster:
        victims = cluster.bookies if kind == "bookie" else cluster.brokers
        assert _kill_under_load(cluster.url, victims) > ACKED_MIN


def test_publishing_goes_on_while_one_of_three_bookies_is_dead_and_another_one_follows_it(tmp_path: Path) -> None:
    """Two of three are left, again and again: new ledgers have fewer copies, never fewer than the ack quorum."""
    with Cluster(tmp_path, session_timeout_s=2.0) as cluster, Load(cluster.url, TOPICS) as load:
        for victim in cluster.bookies:
            load.wait_acked(ACKS_BETWEEN)
            victim.kill()
            load.wait_acked(ACKS_BETWEEN)  # it stays dead meanwhile
            victim.start()
            victim.wait_ready()
        load.stop()
        check(load, cluster.url)
        assert load.acked > 2 * len(cluster.bookies) * ACKS_BETWEEN


def test_a_killed_standalone_process_loses_nothing(started: Processes, tmp_path: Path) -> None:
    server = started.start("standalone", "standalone", "--port", "0", "--data", str(tmp_path / "data"))
    url = server.wait_ready()
    assert _kill_under_load(url, [server]) > ACKED_MIN
