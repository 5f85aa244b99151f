"""`magnetar bookies gc` and `state`: running bookies are asked, topics are named, space comes back."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.cli.common.output import CommandOutput
from magnetar.cli.common.processes import Processes
from magnetar.cli.storage import admin_port
from magnetar.cli.storage.identity import _report
from tests.support.processes import run_here

pytestmark = pytest.mark.processes

CONFIG = """
[bookie]
gc_grace_s = 0.0
[bookie.store]
memtable_bytes = 100_000
log_bytes_max = 10_000_000
"""


@pytest.fixture
def url(started: Processes, tmp_path: Path) -> str:
    """A server with two bookies whose logs hold two topics."""
    (tmp_path / "magnetar.toml").write_text(CONFIG, encoding="utf-8")
    server = started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--bookies", "2",
        "--config", str(tmp_path / "magnetar.toml"),
    )  # fmt: skip
    url = server.wait_ready()
    for topic, count in (("orders", "900"), ("billing", "100")):
        assert run_here("produce", topic, "-m", "x" * 1000, "-n", count, "--url", url).code == 0
    return url


def test_the_plan_says_which_bookie_deletes_nothing_of_some_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = [SimpleNamespace(id="b-one"), SimpleNamespace(id="b-two")]
    monkeypatch.setattr(admin_port, "find_bookies", lambda *_: peers)
    answers = [{"refused": "the metadata is older", "logs": []}, {"refused": None, "logs": []}]
    monkeypatch.setattr(admin_port, "ask_bookies", lambda *_, **__: answers)
    done = run_here("bookies", "gc", "--plan")
    assert done.code == 0
    assert "bookie b-one deletes nothing of some ledgers: the metadata is older." in done.err
    assert "b-two" not in done.err


def test_a_collection_says_which_ledgers_wait_until_when(capsys: pytest.CaptureFixture[str]) -> None:
    peers: Any = [SimpleNamespace(id="b-one"), SimpleNamespace(id="b-two")]
    session: Any = SimpleNamespace(out=CommandOutput("json"))
    last = {"suspected": 3, "graceEndsMs": 1_800_000_000_000, "ledgersDeleted": 0}
    _report(session, peers, [{"last": last}, {"last": last | {"suspected": 0, "graceEndsMs": 0}}])
    told = capsys.readouterr().err
    assert "bookie b-one: 3 ledgers not deleted yet, their grace ends at 2027-01-15 08:00:00 UTC; " in told
    assert "b-two" not in told


def read(*words: str, told: str = "") -> Any:
    """`told`: what each line of standard error has, if there is one."""
    done = run_here(*words, "-o", "json")
    assert done.code == 0, done.err
    assert all(told and told in line for line in done.err.splitlines()), done.err
    return json.loads(done.out)


def test_the_plan_names_logs_topics_actions_and_reasons(url: str) -> None:
    rows = read("bookies", "gc", "--plan", "--url", url)
    ids = {row["id"] for row in read("bookies", "list", "--url", url)}
    assert {row["bookie"] for row in rows} == ids
    held = {name for row in rows for name in row["heldBy"]}
    assert "public/default/orders" in held
    assert {holder["topic"] for row in rows for holder in row["holders"] if "topic" in holder} >= {
        "persistent://public/default/orders"
    }
    assert {row["action"] for row in rows} <= {"keep", "compact", "delete"}
    assert all(row["reason"] and row["bytes"] >= row["liveBytes"] for row in rows)
    one = sorted(ids)[0]
    table = run_here("bookies", "gc", "--plan", "--bookie", one[:12], "--url", url)
    assert table.code == 0
    assert "public/default/orders" in table.out
    assert one in table.out
    assert sorted(ids)[1] not in table.out


def test_a_collection_now_frees_the_space_of_a_deleted_topic(url: str) -> None:
    before = sum(row["bytes"] for row in read("bookies", "gc", "--plan", "--url", url))
    assert run_here("topics", "delete", "orders", "--force", "--yes", "--url", url).code == 0
    freed = 0
    for _ in range(2):  # two passes, each sure of the metadata
        rows = read("bookies", "gc", "--now", "--major", "--roll", "--url", url, told="their grace ends at")
        assert len(rows) == 2
        assert {row["error"] for row in rows} == {None}
        freed += sum(row["bytesFreed"] for row in rows)
    assert freed > 500_000
    after = read("bookies", "gc", "--plan", "--url", url)
    assert sum(row["bytes"] for row in after) < before
    assert "orders" not in json.dumps(after)
    status = read("bookies", "gc", "--status", "--url", url)
    assert {row["running"] for row in status} == {False}
    assert sum(row["bytesFreed"] for row in status) <= freed
    done = run_here("bookies", "gc", "--now", "--url", url)
    assert (done.code, done.err) == (0, "")
    assert "bytes freed" in done.out


def test_the_state_of_each_bookie(url: str) -> None:
    rows = read("bookies", "state", "--url", url)
    assert len(rows) == 2
    assert {(row["disk"], row["limboUpto"], row["gc"]) for row in rows} == {("writable", -1, "idle")}
    assert run_here("bookies", "state", "--url", url).code == 0


def test_wrong_words_are_refused(url: str) -> None:
    assert run_here("bookies", "gc", "--url", url).code == 2
    assert run_here("bookies", "gc", "--plan", "--force", "--url", url).code == 2
    done = run_here("bookies", "gc", "--plan", "--bookie", "nobody", "--url", url)
    assert done.code == 4
    assert "no registered bookie's id begins with 'nobody'" in done.err
