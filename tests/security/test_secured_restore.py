"""A secured cluster's metadata is restored from a copy, by real processes: the bookies are asked as they are asked by
an operator while the metadata service is there, and nobody else gets in meanwhile."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import magnetar
from tests.support.processes import Process, Result, run_here
from tests.support.secured import SecuredCluster

pytestmark = pytest.mark.processes


def restore(secured: SecuredCluster, copy: Path, *more: str) -> Result:
    data = secured.directory / "metadata"
    return run_here("metadata", "restore", str(copy), "--data", str(data), "-y", "-o", "json", *more)


def restart(processes: Sequence[Process]) -> None:
    for process in processes:
        process.kill()
        process.start()
        process.wait_ready()


def test_the_bookies_of_a_secured_cluster_are_asked_and_its_traffic_goes_on(tmp_path: Path) -> None:
    with SecuredCluster(tmp_path, session_timeout_s=3.0) as secured, secured.client() as client:
        producer = client.create_producer("old")
        producer.send(b"before")
        (made,) = json.loads(secured.cli("metadata", "backup", "-o", "json").out)
        copy = tmp_path / "copy"
        shutil.copy(made["file"], copy)
        restart(secured.brokers)  # another block of ledger ids
        running = client.create_producer("new")
        running.send(b"after the copy")
        restarted = secured.bookies[0]
        restart([restarted])  # its key is another one than in the copy, and it saw more than the copy has
        restart(secured.brokers)  # connected to all bookies: a ledger that ends now needs the metadata
        running.send(b"the bookie is back")
        secured.metadata.kill()
        where = ("--metadata", secured.metadata.address)
        open_one = run_here("metadata", "restore", str(copy), "--data", str(tmp_path / "other"), "-y")
        assert "give --security" in open_one.out
        done = restore(secured, copy, *where, "--security", secured.settings)
        assert done.code == 0, done.err
        rows = [row for row in json.loads(done.out) if row["where"].startswith("bookie")]
        assert len(rows) == 3
        assert all(isinstance(row["highestLedger"], int) and row["highestLedger"] > 0 for row in rows), rows
        assert any(row["newer"].startswith("ledgers") for row in rows), rows
        running.send(b"without metadata")
        assert not list((tmp_path / "metadata").glob("*.asking*"))
        secured.metadata.start()
        secured.metadata.wait_ready()
        reader = client.subscribe("old", "s", initial_position=magnetar.InitialPosition.Earliest)
        assert reader.receive(60_000).data() == b"before"
        producer.send(b"restored")
        assert reader.receive(60_000).data() == b"restored"
        client.create_producer("after").send(b"a new ledger")
        ledgers = [each["ledger"] for each in json.loads(secured.cli("ledgers", "list", "-o", "json").out)]
        assert max(ledgers) > max(row["highestLedger"] for row in rows)
        deadline = time.monotonic() + 60  # it looks at each upkeep
        while "restored from an older copy" not in (said := restarted.stderr_path.read_text()):
            assert time.monotonic() < deadline, said
            time.sleep(0.1)
