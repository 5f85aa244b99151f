"""Copies of the metadata with real processes: made while it runs, refused when put back by hand, restored in order."""

import asyncio
import json
import shutil
import time
from pathlib import Path

from magnetar.cli.common.processes import Process, Processes
from magnetar.metadata import paths
from magnetar.metadata.records import ClusterRecord
from magnetar.metadata.remote import connect_metadata
from magnetar.metadata.store import put_record
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world
from tests.cli.run.test_metrics import Scrape, facts
from tests.support.processes import Result, run_here


class Cluster:
    """A metadata service, a bookie and a broker, each a process."""

    def __init__(self, started: Processes, path: Path) -> None:
        self.file = path / "metadata" / "metadata.sqlite"
        service = ("metadata", "--listen", "127.0.0.1:0", "--data", str(self.file.parent))
        self.metadata = started.start("metadata", *service)
        self.metadata.wait_ready()
        where = ("--metadata", self.metadata.address, "--session-timeout", "2", "--wait", "30")
        bookie = ("bookie", "--listen", "127.0.0.1:0", *where, "--data", str(path / "bookie"))
        self.bookie = started.start("bookie", *bookie)
        self.bookie.wait_ready()
        alone = {f"MAGNETAR_BROKER_{name}": "1" for name in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}
        self.broker = started.start("broker", "broker", "--listen", "127.0.0.1:0", *where, environment=alone)
        self.broker.wait_ready()

    def run(self, *words: str) -> Result:
        done = run_here(*words, MAGNETAR_URL=self.broker.wait_ready(), MAGNETAR_METADATA=self.metadata.address)
        assert done.code == 0, done.err
        return done

    def produce(self, topic: str) -> None:
        self.run("produce", topic, "-m", topic)

    def consume(self, topic: str) -> str:
        return self.run("consume", topic, "-s", "s", "-p", "earliest", "-n", "1", "--timeout", "20").out


def again(*processes: Process) -> None:
    for process in processes:
        process.start()
        process.wait_ready()


def kill(*processes: Process) -> None:
    for process in processes:
        process.kill()


def with_a_copy(started: Processes, path: Path) -> tuple[Cluster, Path]:
    """Topic `old` is in the copy; `new`, with a ledger of another broker's block of ids, is not."""
    cluster = Cluster(started, path)
    cluster.produce("old")
    (made,) = json.loads(cluster.run("metadata", "backup", "-o", "json").out)
    copy = path / "copy"
    shutil.copy(made["file"], copy)
    assert made["bytes"] == copy.stat().st_size
    assert made["revision"] > 0
    twice = run_here("metadata", "backup", Path(made["file"]).name, "--metadata", cluster.metadata.address)
    assert twice.code != 0
    assert "exists already" in twice.err
    kill(cluster.broker)
    again(cluster.broker)
    cluster.produce("new")
    cluster.bookie.stop()
    again(cluster.bookie)
    return cluster, copy


def test_a_bookie_refuses_an_older_copy_that_was_put_in_place_by_hand(started: Processes, tmp_path: Path) -> None:
    cluster, copy = with_a_copy(started, tmp_path)
    kill(cluster.metadata, cluster.bookie, cluster.broker)
    for file in cluster.file.parent.glob("metadata.sqlite*"):
        file.unlink()
    shutil.copy(copy, cluster.file)
    again(cluster.metadata)
    cluster.bookie.start()
    assert cluster.bookie.wait(30) != 0
    said = cluster.bookie.stderr_path.read_text()
    assert "older than what this bookie saw" in said
    assert "magnetar metadata restore" in said


def test_a_copy_is_restored_with_what_is_newer_said_and_no_id_given_twice(started: Processes, tmp_path: Path) -> None:
    cluster, copy = with_a_copy(started, tmp_path)
    words = ("metadata", "restore", str(copy), "--data", str(cluster.file.parent), "-y", "-o", "json")
    running = run_here(*words)
    assert running.code != 0
    assert "stop it first" in running.err
    kill(cluster.metadata, cluster.broker)
    asked = run_here(*(word for word in words if word != "-y"), stdin="")
    assert (asked.code, "--yes" in asked.err) == (2, True), asked
    done = run_here(*words)
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert [row["where"].split()[0] for row in rows] == ["the", "the", "bookie"]
    assert rows[1]["newer"].startswith("1 ledgers")
    assert rows[1]["topics"] == {"persistent://public/default/new": 1}
    assert "not in the copy: 1 ledger of persistent://public/default/new" in done.err
    assert "bookies that run register by themselves" in done.err
    highest = max(row["highestLedger"] for row in rows if row["highestLedger"])
    assert f"above {highest}" in done.err
    assert list(cluster.file.parent.glob("metadata.sqlite.replaced-1"))
    again(cluster.metadata)  # the bookie runs on
    again(cluster.broker)
    deadline = time.monotonic() + 60
    while "restored from an older copy" not in cluster.bookie.stderr_path.read_text():
        assert time.monotonic() < deadline, cluster.bookie.stderr_path.read_text()
        time.sleep(0.05)
    assert "old" in cluster.consume("old")
    cluster.produce("after")
    listed = json.loads(cluster.run("ledgers", "list", "-o", "json").out)
    assert max(each["ledger"] for each in listed) > highest
    assert "after" in cluster.consume("after")


def write_a_cluster(address: str, value: bytes) -> None:
    async def write() -> None:
        session = await connect_metadata(make_system_world(), Endpoint.parse(address))
        try:
            await session.put("/a", value)  # first: copies begin with the cluster's record
            await put_record(session, paths.CLUSTER, ClusterRecord(instance="0123456789abcdef"))
        finally:
            await session.close()

    asyncio.run(write())


def read_a(address: str) -> bytes | None:
    async def read() -> bytes | None:
        session = await connect_metadata(make_system_world(), Endpoint.parse(address))
        try:
            node = await session.get("/a")
            return None if node is None else node.value
        finally:
            await session.close()

    return asyncio.run(read())


def test_a_scheduled_copy_is_told_and_restored(started: Processes, tmp_path: Path) -> None:
    folder, copies = tmp_path / "metadata", tmp_path / "copies"
    service = ("metadata", "--listen", "127.0.0.1:0", "--data", str(folder), "--metrics", "0")
    options = ("--backup-every", "200ms", "--backup-keep", "2", "--backup-dir", str(copies))
    metadata = started.start("metadata", *service, *options)
    metadata.wait_ready()
    write_a_cluster(metadata.address, b"as it was")
    deadline = time.monotonic() + 30
    while len(list(copies.glob("metadata-*.backup"))) < 2:
        assert time.monotonic() < deadline, metadata.output()
        time.sleep(0.02)
    page = Scrape(facts(metadata)["metrics"])
    assert page.value("magnetar_metadata_backup_failing") == 0
    assert 0 <= page.value("magnetar_metadata_backup_age_seconds") < 30
    assert "do not survive the loss of that disk" in metadata.output()
    metadata.kill()
    newest = max(copies.glob("metadata-*.backup"))
    done = run_here("metadata", "restore", str(newest), "--data", str(tmp_path / "anew"), "-y")
    assert done.code == 0, done.err
    restored = started.start("restored", *service[:4], str(tmp_path / "anew"))
    restored.wait_ready()
    assert read_a(restored.address) == b"as it was"


def test_a_folder_of_copies_without_a_schedule_is_refused() -> None:
    done = run_here("metadata", "--backup-dir", "/var/backups/magnetar")
    assert (done.code, "--backup-every" in done.err) == (2, True), done
