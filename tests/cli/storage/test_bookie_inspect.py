"""`magnetar bookie inspect`: beside a running server and offline; damage is exit code 1; nothing secret is printed."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from magnetar.cli.common.processes import Processes
from magnetar.metadata import records
from tests.support.processes import Result, run_here

pytestmark = pytest.mark.processes

PARTS = ("store", "journal", "log", "index", "ledger", "cookie", "mark")


def inspect(*words: str) -> Result:
    return run_here("bookie", "inspect", *words)


def read(*words: str) -> Any:
    done = inspect(*words, "-o", "json")
    assert (done.code, done.err) == (0, ""), done.err
    return json.loads(done.out)


@pytest.fixture
def data(started: Processes, tmp_path: Path) -> Path:
    """The folder of a server that has stored 300 messages and was stopped; its bookie is in bookie-1."""
    folder = tmp_path / "data"
    server = started.start("s", "standalone", "--port", "0", "--data", str(folder))
    assert run_here("produce", "orders", "-m", "x" * 2000, "-n", "300", "--url", server.wait_ready()).code == 0
    assert inspect("store", str(folder / "bookie-1")).code == 0, "beside the running bookie"
    assert inspect("journal", str(folder / "bookie-1"), "--records").code == 0
    assert server.stop() == 0
    return folder


def test_each_part_is_shown_as_table_and_json_without_touching_a_file(data: Path) -> None:
    bookie = data / "bookie-1"
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(bookie.rglob("*"))}
    (topic,) = [row for row in read("ledger", str(bookie)) if (row["last"] or 0) >= 0][-1:]
    number = str(topic["ledger"])
    shown = [inspect(part, str(bookie)) for part in PARTS]
    shown += [inspect("log", str(bookie), "--verify"), inspect("ledger", str(bookie), "--ledger", number, "--entries")]
    shown += [inspect("index", str(bookie), "--ledger", number, "--entry", "0")]
    assert [(done.code, done.err) for done in shown] == [(0, "")] * len(shown)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(bookie.rglob("*"))} == before
    one = read("ledger", str(bookie), "--ledger", number, "--entries")
    assert [each["entry"] for each in one["entries"]] == list(range(topic["last"] + 1))
    assert {each["damage"] for each in one["entries"]} == {None}
    assert read("mark", str(bookie))["last_log"] >= 1
    assert read("cookie", str(bookie))["bookie"] == read("store", str(bookie))["bookie"]
    stored = read("log", str(bookie), "--ledger", number)
    assert len(stored) == topic["last"] + 1
    place = read("index", str(bookie), "--ledger", number, "--entry", "0")[0]
    assert (place["entryStart"], place["entryBytes"]) == (stored[0]["offset"], stored[0]["bytes"])
    printed = "".join(done.out for done in shown) + json.dumps(one)
    for key in keys(data):
        assert key.hex() not in printed
        assert repr(key)[2:-1] not in printed


def keys(data: Path) -> list[bytes]:
    """The master keys of all ledgers, from the metadata."""
    with sqlite3.connect(data / "metadata.sqlite") as tree:
        found = tree.execute("SELECT value, path FROM node WHERE path LIKE '/ledgers/%'").fetchall()
    keys = [records.decode_record(bytes(value), records.LedgerRecord, path).key for value, path in found]
    assert keys
    return keys


def test_damage_is_shown_with_its_place_and_is_exit_code_1(data: Path) -> None:
    bookie = data / "bookie-1"
    log = bookie / "entries" / f"{read('log', str(bookie))[0]['log']:016d}.log"
    content = bytearray(log.read_bytes())
    content[4096 + 20] ^= 1
    log.write_bytes(content)
    assert inspect("log", str(bookie)).code == 0, "the records are read with --verify only"
    done = inspect("log", str(bookie), "--verify", "-o", "json")
    assert done.code == 1
    assert f"{log}: damaged at offset 4096: not a whole record" in done.err
    row = json.loads(done.out)[0]
    assert row["damaged"] == 1
    assert row["wholeRecords"] == row["entries"] - 1
    rows = json.loads(inspect("log", str(bookie), "--records", "-o", "json").out)
    assert [each["offset"] for each in rows if each.get("damage")] == [4096]
    assert len(rows) == row["entries"]
    (bookie / "mark").write_bytes(b"MGN-MARK")
    assert inspect("mark", str(bookie)).code == 1
    assert inspect("ledger", str(bookie)).code == 1


def test_the_picture_is_one_file(data: Path, tmp_path: Path) -> None:
    page = tmp_path / "store.html"
    assert inspect("store", str(data / "bookie-1"), "--html", str(page)).code == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "<svg" in text
    assert str(data / "bookie-1") in text


def test_wrong_directories_are_refused_with_a_hint(data: Path, tmp_path: Path) -> None:
    done = inspect("store", str(data))
    assert done.code == 4
    assert f"did you mean {data / 'bookie-1'}?" in done.err
    assert inspect("log", str(tmp_path / "nothing")).code == 4
    (tmp_path / "empty").mkdir()
    assert "not the data directory of a bookie" in inspect("mark", str(tmp_path / "empty")).err
    assert inspect("ledger", str(data / "bookie-1"), "--entries").code == 2
    assert inspect("loog", str(data / "bookie-1")).code == 2


def test_a_reader_that_has_enough_ends_it_quietly(data: Path) -> None:
    done = inspect("journal", str(data / "bookie-1"), "--records", "--limit", "2")
    assert done.code == 0
    assert "stopped after 2 rows" in done.err
    assert len(done.out.splitlines()) == 4
