"""A disk of a real bookie vanishes under load: publishers feel nothing, and nothing acknowledged is lost."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Cluster, Process
from tests.chaos.workload.load import Load, check
from tests.support.processes import run_cli

TOPICS = ("orders", "payments", "clicks")
ACKS_BETWEEN = 2000
"""Of each topic: some checkpoints long."""
SETTINGS = """
[bookie]
upkeep_interval_s = 0.5
[bookie.store]
journal_bytes = 1048576
"""

pytestmark = pytest.mark.processes


class ClusterOfDisks(Cluster):
    """Each bookie has its journal in a directory of its own, and two ledgers directories."""

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        if arguments[0] == "bookie":
            settings = self.directory / "disks.toml"
            settings.write_text(SETTINGS)
            arguments += ("--config", str(settings), "--journal", str(self.directory / f"{name}-journal"))
            for number in range(2):
                arguments += ("--ledgers", str(self.disk(name, number)))
        return super().start(name, *arguments, environment=environment)

    def disk(self, name: str, number: int) -> Path:
        return self.directory / f"{name}-disk-{number}"


def states(cluster: Cluster) -> list[dict[str, object]]:
    done = run_cli("bookies", "state", "-o", "json", "--url", cluster.url)
    assert done.code == 0, done.err
    return json.loads(done.out)  # type: ignore[no-any-return]


def test_a_disk_of_a_bookie_that_vanishes_is_not_felt_by_publishers(tmp_path: Path) -> None:
    with ClusterOfDisks(tmp_path, brokers=1, session_timeout_s=2.0) as cluster, Load(cluster.url, TOPICS) as load:
        load.wait_acked(ACKS_BETWEEN)
        disk = cluster.disk("bookie-1", 1)
        disk.rename(disk.with_name("pulled"))
        load.wait_acked(ACKS_BETWEEN)
        load.wait_acked(ACKS_BETWEEN)
        load.stop()
        assert load.failures == []
        check(load, cluster.url)
        assert all(bookie.is_running for bookie in cluster.bookies), "no bookie ended"
        failed = [each for each in states(cluster) if each["disk"] == "failed"]
        assert [each["path"] for each in failed] == [str(disk)]
        disk.with_name("pulled").rename(disk)
        victim = cluster.bookies[1]
        victim.stop()
        victim.start()
        victim.wait_ready()
        assert [each["disk"] for each in states(cluster)] == ["writable"] * 6
