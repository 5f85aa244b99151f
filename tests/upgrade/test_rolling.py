"""A cluster of commit `BEFORE` is upgraded process by process under load, taken back, upgraded again and finished.

The older Magnetar is built from git; a clone without that commit has no such test (the archives are opened there too).
The topic has deduplication, and its two producers, one with the older client and one with this one, repeat what has no
receipt: in the end each message is there once, in its producer's order.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Cluster, Process
from magnetar.metadata import paths, records
from magnetar.metadata.tree import MetadataTree
from tests import layout as house
from tests.support.processes import run_cli

BEFORE = "c661f797320823d84e15b47d8f48a7f516b4dc5c"
LOAD = """
import pathlib, sys, time
import magnetar
url, name, stop, confirmed = sys.argv[1:]
n = 0
with magnetar.Client(url) as client, open(confirmed, "w", buffering=1) as log:
    producer = client.create_producer("load", name)
    while not pathlib.Path(stop).exists():
        try:
            producer.send(f"{name} {n}".encode(), sequence_id=n)
        except Exception as error:
            print(f"{n}: {error!r}", file=sys.stderr)
            time.sleep(0.2)
            continue
        print(n, file=log)
        n += 1
        time.sleep(0.01)
"""
PREPARE = """
import sys
import magnetar
from magnetar.admin import Admin
from magnetar.proto.policies import Policies
with Admin(sys.argv[1]) as admin, magnetar.Client(sys.argv[1]) as client:
    admin.create_topic("load")
    admin.set_topic_policies("load", Policies(deduplication=True))
    client.subscribe("load", "all").close()
"""
pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes of the older Magnetar."""
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE], cwd=house.ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"this clone does not have commit {BEFORE[:8]}")
    (folder / "magnetar").mkdir()
    subprocess.run(["tar", "-x", "-C", str(folder / "magnetar")], input=archive.stdout, check=True)
    return {"PYTHONPATH": str(folder), "MAGNETAR_COMPILE": "0"}


class OlderCluster(Cluster):
    """A cluster whose processes are of the older Magnetar at first."""

    def __init__(self, directory: Path, older: Mapping[str, str]) -> None:
        self.older = dict(older)
        super().__init__(directory)

    def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
        return super().start(name, *arguments, environment={**self.older, **(environment or {})})

    def change(self, processes: list[Process], environment: Mapping[str, str]) -> None:
        """Starts one after the other anew, of the Magnetar that the environment says."""
        for process in processes:
            assert process.stop() == 0, process.stderr_path.read_text()[-2000:]
            process.environment = dict(environment)
            process.start()
            process.wait_ready()

    def record_version(self, path: str) -> int:
        """The version of a record's bytes; the metadata service is stopped meanwhile."""
        self.metadata.stop()
        tree = MetadataTree(str(self.directory / "metadata" / "metadata.sqlite"), keeps_ephemerals=True)
        try:
            node = tree.get(path)
        finally:
            tree.close()
            self.metadata.start()
            self.metadata.wait_ready()
        assert node is not None
        return node.value[2]


@pytest.fixture
def cluster(tmp_path: Path, older: Mapping[str, str]) -> Iterator[OlderCluster]:
    with OlderCluster(tmp_path, older) as running:
        yield running


def _script(text: str, *arguments: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    import os

    return subprocess.Popen([sys.executable, "-c", text, *arguments], env={**os.environ, **environment})


def test_a_rolling_upgrade_and_a_downgrade_lose_nothing_until_it_is_finished(
    cluster: OlderCluster, older: Mapping[str, str], tmp_path: Path
) -> None:
    assert _script(PREPARE, cluster.url, environment=older).wait(60) == 0
    stop, logs = tmp_path / "stop", {name: tmp_path / f"{name}.log" for name in ("old", "new")}
    loads = [
        _script(LOAD, cluster.url, name, str(stop), str(log), environment=older if name == "old" else {})
        for name, log in logs.items()
    ]
    everything = [cluster.metadata, *cluster.bookies, *cluster.brokers]
    where = ("--metadata", cluster.metadata.address)
    try:
        cluster.change(everything[:3], {})
        refused = run_cli("cluster", "finish-upgrade", *where)
        assert refused.code != 0, "older processes are registered"
        assert "older processes are registered" in refused.err
        cluster.change(everything[3:], {})
        assert cluster.record_version(paths.LEDGER_IDS) == records.VERSION_WITHOUT_PATH_CHECKSUM
        cluster.change(everything[::-1], older)
        cluster.change(everything, {})
        done = run_cli("cluster", "finish-upgrade", *where)
        assert done.code == 0, done.err
        cluster.change(everything, {})
    finally:
        stop.touch()
        codes = [load.wait(90) for load in loads]
    assert codes == [0, 0]
    sent = {name: [int(line) for line in log.read_text().split()] for name, log in logs.items()}
    assert min(len(each) for each in sent.values()) > 100
    assert cluster.record_version(paths.LEDGER_IDS) == records.RECORD_VERSION
    found: dict[str, list[int]] = {name: [] for name in logs}
    with magnetar.Client(cluster.url) as client:
        consumer = client.subscribe("load", "all")
        for _ in range(sum(map(len, sent.values()))):
            message = consumer.receive(20_000)
            name, number = message.data().decode().split()
            found[name].append(int(number))
            consumer.acknowledge(message)
        with pytest.raises(magnetar.Timeout):
            consumer.receive(1000)
    assert found == sent, "each message once, in its producer's order"
    bookie = cluster.bookies[0]
    bookie.stop()
    bookie.environment = dict(older)
    bookie.start()
    assert bookie.wait(60) != 0, "an older bookie does not start any more"
    assert "format version 2" in bookie.stderr_path.read_text()


def test_an_older_broker_is_shown_by_status_and_doctor_and_no_drain_waits_for_it(
    cluster: OlderCluster, older: Mapping[str, str]
) -> None:
    newer, old = cluster.brokers
    cluster.change([cluster.metadata, *cluster.bookies, newer], {})
    for asked in (newer, old):
        at = ("--url", f"magnetar://{asked.address}", "-o", "json")
        told = run_cli("status", *at)
        assert told.out, told.err
        found = json.loads(told.out)
        rows = {each["endpoint"]: each for each in found["brokers"]}
        assert set(rows) == {newer.address, old.address}
        assert (found["silent"], found["died"]) == ([], [])
        assert (rows[old.address]["version"], rows[old.address]["topics"], rows[old.address]["up"]) == (None,) * 3
        assert (rows[newer.address]["topics"] is not None) == (asked is newer)
        checked = run_cli("doctor", *at)
        assert checked.out, checked.err
        states = {each["code"]: each["state"] for each in json.loads(checked.out)["checks"]}
        assert (states["D01"], states["D09"]) == ("ok", "look")
    at = ("--url", f"magnetar://{newer.address}")
    for drained, text in ((old, "upgrade it first"), (newer, "upgrade one of them first")):
        refused = run_cli("brokers", "drain", rows[drained.address]["broker"], "--wait", *at)
        assert refused.code != 0
        assert text in refused.err
