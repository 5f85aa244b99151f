"""`magnetar doctor`: what each check finds, the commands that it names, and a server and a directory that it asks."""

import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from magnetar.broker.common.config import BrokerConfig
from magnetar.cli.admin import doctor
from magnetar.cli.admin.cluster import BookiesReport
from magnetar.cli.admin.doctor import (
    CHECKS,
    OFFLINE_CHECKS,
    RISKY_SETTINGS,
    ClusterFacts,
    check_directory,
    find_newest_file_time_ms,
    run_checks,
)
from magnetar.cli.common.processes import Processes
from magnetar.cli.main import root
from magnetar.proto.alarms import Alarm
from magnetar.proto.statistics import ClusterSummary
from magnetar.runtime.config import list_setting_defaults
from tests.support.processes import run_here

NOW_MS = 1_000_000_000_000
ID = "12345678-90"


def setting(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value, "source": "file", "dynamic": False}


def described(**changed: Any) -> dict[str, Any]:
    return {
        "name": "one", "version": "1", "clock_ms": NOW_MS + 5, "open_files_max": 10_000, "settings": (),
        "askedMs": NOW_MS, "answeredMs": NOW_MS + 10, **changed,
    }  # fmt: skip


def report(**changed: Any) -> dict[str, Any]:
    return {
        "bookie": ID, "version": "1", "clockMs": NOW_MS + 5, "openFilesMax": 10_000, "syncs": 9,
        "syncP50Seconds": 0.001, "syncP99Seconds": 0.002, "askedMs": NOW_MS, "answeredMs": NOW_MS + 10, **changed,
    }  # fmt: skip


def broker(**changed: Any) -> dict[str, Any]:
    return {
        "broker": "one", "endpoint": "b1:7650", "version": "1", "busy": 0.1, "degraded": 0, "tokenEndsMs": 0,
        "certificateEndsMs": 0, "draining": False,
        "full": (), **changed,
    }  # fmt: skip


def bookie(**changed: Any) -> dict[str, Any]:
    return {"bookie": ID, "state": "writable", "freeBytes": 50, "totalBytes": 100, **changed}


def facts(**changed: Any) -> ClusterFacts:
    """A cluster of one broker and four bookies where all is well."""
    good: dict[str, Any] = {
        "now_ms": NOW_MS, "brokers": [broker()], "bookies": [bookie()] * 4,
        "repair": {"enabled": True, "underReplicated": 0}, "described": {"b1:7650": described()},
        "reports": {ID: report()}, "racks": {ID: "/r1", "2": "/r2"}, "quorums": [("public/default", 3, 3, 2)],
        "metadata_disk": (1000, 900), "backup_ms": NOW_MS - 3_600_000, "version": "1", "url": "magnetar+ssl://b1:7650",
    }  # fmt: skip
    return ClusterFacts(**good | changed)


def rate(name: str, rate_in: float) -> dict[str, Any]:
    return {"name": f"persistent://a/b/{name}", "rate_in": rate_in}


def test_where_all_is_well_nothing_is_found_and_every_check_was_made() -> None:
    findings, states = run_checks(facts())
    assert findings == []
    assert list(states) == [check.code for check in CHECKS]
    assert set(states.values()) == {"ok"}


FOUND: list[tuple[str, dict[str, Any], str, bool]] = [
    ("D00", {"metadata_away_ms": NOW_MS - 180_000},
     "The metadata does not answer since 2001-09-09 01:43:40 UTC (3 min): topics that have an owner are served, and "
     "what is shown is what the broker that was asked knew last.", True),
    ("D00", {"metadata_late": True},
     "The metadata answers late: what is shown is what the broker that was asked knew last, and bookies were not "
     "asked.", False),
    ("D20", {"metadata_disk": (1000, 100)},
     "The disk of the metadata has 10% left (0 MiB): when it is full nothing is made, changed or taken over. Free "
     "space there, or enlarge it.", False),
    ("D20", {"metadata_disk": (1000, 40)},
     "The disk of the metadata has 4% left (0 MiB): when it is full nothing is made, changed or taken over. Free "
     "space there, or enlarge it.", True),
    ("D20", {"metadata_disk": (0, 0), "metadata_refusal": "etcd is full (alarm NOSPACE)"},
     "The metadata refuses commits, so nothing is made, changed or taken over: etcd is full (alarm NOSPACE).", True),
    ("D01", {"late": ["one"]}, "Broker one answers late: only when it was asked again.", False),
    ("D01", {"silent": ["two"]}, "Broker two is registered and does not answer.", True),
    ("D01", {"unreachable": {"b2:7650": "refused"}},
     "A broker is advertised as b2:7650, and does not answer there from here: refused", True),
    ("D01", {"brokers": [broker(endpoint="127.0.0.1:7650")]},
     "Broker one is advertised as 127.0.0.1:7650, which is another machine's own.", True),
    ("D02", {"brokers": [broker(busy=0.9)]}, "The event loop of broker one is busy 90% of its time.", True),
    ("D03", {"bookies": [bookie()] * 4 + [bookie(state="limbo")]},
     "Bookie 12345678 lost data, and looks for it at other bookies.", True),
    ("D04", {"bookies": [bookie()] * 4 + [bookie(freeBytes=14)]},
     "The disk of bookie 12345678 has 14% left; at 5 % it is read-only.", True),
    ("D05", {"repair": {"enabled": True, "underReplicated": 2}}, "2 ledgers miss copies.", True),
    ("D06", {"reports": {ID: report(syncP99Seconds=0.05)}},
     "A sync of the journal of bookie 12345678 takes 50 ms (p99): each publish waits.", False),
    ("D06", {"reports": {ID: report(syncP99Seconds=0.25)}},
     "A sync of the journal of bookie 12345678 takes 250 ms (p99): each publish waits.", True),
    ("D07", {"described": {"b": described(clock_ms=NOW_MS - 6_000)}},
     "The clock of broker one is 6.0 s behind this machine's.", True),
    ("D07", {"reports": {ID: report(clockMs=NOW_MS + 1_010)}},
     "The clock of bookie 12345678 is 1.0 s ahead of this machine's.", False),
    ("D08", {"described": {"b": described(open_files_max=1024)}},
     "The process of broker one may have 1,024 files open; 4,096 are few for a server.", True),
    ("D09", {"reports": {ID: report(version="2")}}, "Servers run different versions: 1, 2. Finish the upgrade.", False),
    ("D09", {"version": "3"}, "This command is of version 3, the servers of 1.", False),
    ("D10", {"bookies": [bookie()] * 2},
     "Namespace public/default asks for 3 bookies (3 copies), and 2 take writes.", True),
    ("D10", {"bookies": [bookie()] * 3},
     "Namespace public/default needs all of the 3 bookies: without one it writes fewer copies.", False),
    ("D10", {"quorums": [("a/b", 2, 2, 1)]},
     "Namespace a/b confirms a message with one copy: a lost disk may lose it.", False),
    ("D11", {"racks": {ID: "/default", "2": "/r2"}}, "1 of 2 bookies have no rack, among them 12345678.", False),
    ("D11", {"described": {"b": described(settings=(setting("min_racks_per_write_quorum", "3"),))}},
     "Copies of an entry are to be in 3 racks, and the bookies are in 2.", True),
    ("D12", {"unread": [("t", "s", 5, NOW_MS - 7_300_000)]},
     "Subscription s of t has no consumer, and keeps 5 messages, the oldest for 2 h.", False),
    ("D12", {"unread": [("t", "s", 5, NOW_MS - 8 * 86_400_000)]},
     "Subscription s of t has no consumer, and keeps 5 messages, the oldest for 8 d.", True),
    ("D13", {"partitions": [rate("t-partition-0", 400), *(rate(f"t-partition-{n}", 1) for n in range(1, 5))]},
     "Partition 0 of persistent://a/b/t gets 99% of the messages of 5. Do most have one key?", False),
    ("D14", {"described": {"b": described(settings=(setting("retention_minutes", "-1"),))}},
     "retention_minutes is -1 (file): nothing is ever deleted: the disks fill.", False),
    ("D14", {"url": "magnetar://b1:7650"},
     "Clients talk to the brokers in clear, and no certificate says who they are.", False),
    ("D15", {"backup_ms": NOW_MS - 2 * 86_400_000 - 5}, "The newest backup of the metadata is 2 d old.", True),
    ("D15", {"backup_ms": None, "metadata_backup": (NOW_MS - 2 * 86_400_000, 0, "")},
     "The newest backup of the metadata is 2 d old.", True),
    ("D15", {"metadata_backup": (NOW_MS - 1000, 3_600_000, "no room")},
     "The scheduled copies of the metadata (every 1 h) fail: no room. The newest is 1 s old.", False),
    ("D15", {"backup_ms": 0}, "The newest backup of the metadata does not exist.", True),
    ("D15", {"backup_ms": NOW_MS + 3_600_000},
     "The newest backup of the metadata has a time 1 h from now: a clock was wrong, and its age is not known.", True),
    ("D16", {"brokers": [broker(tokenEndsMs=NOW_MS - 1)]},
     "The own token of broker one has ended: no other broker answers it then.", True),
    ("D16", {"metadata_certificate_ends_ms": NOW_MS + 13 * 86_400_000},
     "A certificate of the metadata service ends in 13 d: no new connection is made then.", False),
    ("D25", {"brokers": [broker(draining=True)]},
     "Broker one drains: it gives away what it owns, and gets nothing until that is ended.", False),
    ("D17", {"brokers": [broker(full=["t"])]},
     "t takes no publishes: the backlog of its slowest subscription is above the quota.", True),
    ("D18", {"bookies": [bookie()] * 4 + [bookie(gcRefused="why")]},
     "Bookie 12345678 deletes nothing of some ledgers: why.", True),
    ("D19", {"died": [{"name": "two", "endpoint": "b2:7650", "seen_ms": NOW_MS - 180_000}]},
     "Broker two (b2:7650) is not seen since 2001-09-09 01:43:40 UTC (3 min ago): it died, or closed while the "
     "metadata was away. Start it again, or forget it if it was removed, or is back at another address.", True),
]  # fmt: skip


@pytest.mark.parametrize(("code", "changed", "text", "needed"), FOUND, ids=[f"{each[0]}: {each[2]}" for each in FOUND])
def test_each_check_finds_its_fault_and_no_other_check_does(
    code: str, changed: dict[str, Any], text: str, needed: bool
) -> None:
    findings, states = run_checks(facts(**changed))
    assert [(each.code, each.text, each.needed) for each in findings] == [(code, text, needed)]
    unread = ("the metadata does not answer", "the metadata answers late")
    assert {each for each, state in states.items() if state not in ("ok", *unread)} == {code}
    assert states[code] == ("wrong" if needed else "look")
    _check_command(findings[0])


def test_every_check_has_a_fault_here_and_a_code_of_its_own() -> None:
    assert {each[0] for each in FOUND} == {check.code for check in CHECKS}
    codes = [check.code for check in (*CHECKS, *OFFLINE_CHECKS)]
    assert len(set(codes)) == len(codes)


def _check_command(found: Alarm) -> None:
    """A command of Magnetar's that a finding names exists."""
    words = shlex.split(found.command)
    if words[0] != "magnetar":
        return
    command: click.Command | None = root
    for word in words[1:]:
        if isinstance(command, click.Group) and not word.startswith("-"):
            command = command.get_command(click.Context(command), word)
            assert command is not None, found.command


def test_without_a_folder_of_backups_the_metadata_says_their_age() -> None:
    day_ms = 86_400_000
    for made_ms, every_ms in ((NOW_MS - day_ms, 0), (NOW_MS - 13 * day_ms, 7 * day_ms)):
        findings, states = run_checks(facts(backup_ms=None, metadata_backup=(made_ms, every_ms, "")))
        assert (findings, states["D15"]) == ([], "ok")


@pytest.mark.parametrize(
    ("changed", "code"), [({"reports": {}}, "D06"), ({"described": {}}, "D14"), ({"backup_ms": None}, "D15")]
)
def test_what_cannot_be_known_is_said_and_is_no_finding(changed: dict[str, Any], code: str) -> None:
    findings, states = run_checks(facts(**changed))
    assert findings == []
    assert states[code] not in ("ok", "look", "wrong")


def test_while_the_metadata_is_away_only_what_is_known_without_it_is_judged() -> None:
    empty = ClusterFacts(NOW_MS, silent=["two"], backup_ms=0, metadata_away_ms=NOW_MS - 1000)
    findings, states = run_checks(empty)
    assert [each.code for each in findings] == ["D00", "D01", "D15"]
    assert states["D03"] == states["D05"] == states["D10"] == "the metadata does not answer"


@pytest.mark.parametrize("answered", [False, True])
def test_bookies_that_answer_are_examined_although_none_says_how_repair_gets_on(
    monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    summary = ClusterSummary((), ())
    admin = SimpleNamespace(broker_summaries=lambda: summary, bookies=lambda: [SimpleNamespace(id=ID, rack="/r1")])
    session: Any = SimpleNamespace(admin=admin, url="")
    monkeypatch.setattr(doctor, "ask_bookie_states", lambda *_: BookiesReport([bookie()], answered=answered))
    monkeypatch.setattr(doctor, "_reports", lambda _: {ID: report()})
    monkeypatch.setattr(doctor, "_describe", lambda _: ({}, {}))
    for name in ("_read_quorums", "_read_unread", "_read_partitions"):
        monkeypatch.setattr(doctor, name, lambda *_: [])
    assert list(doctor.gather_facts(session, None).reports) == ([ID] if answered else [])


def test_the_urgent_ones_come_first() -> None:
    findings, _ = run_checks(facts(version="3", silent=["two"], backup_ms=0))
    assert [(each.needed, each.code) for each in findings] == [(True, "D01"), (True, "D15"), (False, "D09")]


def test_risks_are_of_settings_that_brokers_have_and_no_default_is_one() -> None:
    defaults = {**list_setting_defaults(BrokerConfig), "log_level": "info"}
    for risk in RISKY_SETTINGS:
        value = defaults[risk.setting]
        assert not risk.is_risky(str(value).lower() if isinstance(value, bool) else str(value)), risk.setting


def test_few_messages_are_never_skewed() -> None:
    assert run_checks(facts(partitions=[rate("t-partition-0", 90), rate("t-partition-1", 0)]))[0] == []


# ------------------------------------------------------------------------------------------------------ offline
def test_a_directory_is_looked_at_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_FREE_LOW", 0.0)
    monkeypatch.setattr(doctor, "SYNC_SLOW_S", 60.0)
    monkeypatch.setattr(doctor, "DESCRIPTORS_ENOUGH", 1)
    findings, states = check_directory(tmp_path)
    assert findings == []
    assert states["D21"] == states["D22"] == states["D23"] == "ok"
    assert states["D24"] == f"{tmp_path} is not, and has not, a directory of a bookie"
    assert os.listdir(tmp_path) == [], "what was written is removed"
    broken = tmp_path / "bookie-1"
    broken.mkdir()
    (broken / "cookie").write_bytes(b"nonsense")
    findings, states = check_directory(tmp_path)
    assert states["D24"] == "wrong"
    assert findings[0].text.startswith(f"{broken / 'cookie'} is damaged at offset ")
    for each in findings:
        _check_command(each)


def test_a_full_disk_and_a_slow_one_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK_FREE_LOW", 1.1)
    monkeypatch.setattr(doctor, "measure_sync_time_s", lambda _: 0.2)
    _, states = check_directory(tmp_path)
    assert states["D21"] in ("look", "wrong")
    assert states["D22"] == "wrong"


def test_the_newest_file_is_the_backup(tmp_path: Path) -> None:
    assert find_newest_file_time_ms(None, NOW_MS) is None
    assert (
        find_newest_file_time_ms(str(tmp_path / "none"), NOW_MS) == find_newest_file_time_ms(str(tmp_path), NOW_MS) == 0
    )
    for name, at in (("old", 1_000), ("new", 2_000)):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (at, at))
    assert find_newest_file_time_ms(str(tmp_path), NOW_MS) == 2_000_000
    assert find_newest_file_time_ms(str(tmp_path / "old"), NOW_MS) == 1_000_000


def test_a_backup_of_the_future_does_not_hide_that_there_are_no_newer_ones(tmp_path: Path) -> None:
    """It was made while a clock was ahead."""
    ahead_s = NOW_MS // 1000 + 10 * 365 * 86_400
    (tmp_path / "ahead").write_bytes(b"")
    os.utime(tmp_path / "ahead", (ahead_s, ahead_s))
    assert find_newest_file_time_ms(str(tmp_path), NOW_MS) == ahead_s * 1000
    (tmp_path / "older").write_bytes(b"")
    os.utime(tmp_path / "older", (1_000, 1_000))
    assert find_newest_file_time_ms(str(tmp_path), NOW_MS) == 1_000_000


# ------------------------------------------------------------------------------------------------------ servers
@pytest.mark.processes
def test_a_server_is_examined_and_its_settings_change_without_a_restart(started: Processes, tmp_path: Path) -> None:
    server = started.start("s", "standalone", "--port", "0", "--data", str(tmp_path / "data"))
    url = server.wait_ready()
    run_here("topics", "create", "orders", "--url", url)
    run_here("topics", "create-subscription", "orders", "-s", "billing", "--url", url)
    run_here("produce", "orders", "-m", "x", "-n", "3", "--url", url)

    told = run_here("doctor", "-o", "json", "--url", url)
    found = json.loads(told.out)
    states = {each["code"]: each["state"] for each in found["checks"]}
    assert states["D15"] == "not known"
    assert {states[each] for each in ("D01", "D05", "D07", "D09", "D10", "D11", "D13")} == {"ok"}, told.out
    assert states["D06"] in ("ok", "look", "wrong")
    texts = [each["text"] for each in found["findings"]]
    assert "Subscription billing of persistent://public/default/orders has no consumer, and keeps 3 messages." in texts
    assert told.code == int(any(each["needed"] for each in found["findings"]))
    backups = tmp_path / "backups"
    backups.mkdir()
    late = run_here("doctor", "--backup", str(backups), "--url", url)
    assert late.code == 1
    assert "! D15 The newest backup of the metadata does not exist.  magnetar metadata backup" in late.out
    offline = json.loads(run_here("doctor", "--offline", str(tmp_path / "data"), "-o", "json").out)
    assert [each["code"] for each in offline["checks"]] == [check.code for check in OFFLINE_CHECKS]
    assert {each["code"]: each["state"] for each in offline["checks"]}["D24"] == "ok"

    names = run_here("brokers", "list-dynamic-config", "--url", url).out.split()
    assert "log_level" in names
    assert "listen" not in names
    assert run_here("brokers", "get-all-dynamic-config", "--url", url).out.strip() == "(none is changed)"
    changed = run_here("brokers", "update-dynamic-config", "--config", "log_level", "--value", "debug", "--url", url)
    assert changed.out.strip() == "log_level is debug at all brokers, bookies and metadata services"
    (row,) = json.loads(run_here("brokers", "get-all-dynamic-config", "-o", "json", "--url", url).out)
    assert row == {"name": "log_level", "value": "debug"}
    shown = json.loads(run_here("brokers", "get-runtime-config", "--changed", "-o", "json", "--url", url).out)
    assert {each["name"]: each["source"] for each in shown}["log_level"] == "dynamic"
    texts = [each["text"] for each in json.loads(run_here("doctor", "-o", "json", "--url", url).out)["findings"]]
    assert any(each.startswith("log_level is debug (dynamic): each connection, producer, ") for each in texts)
    run_here("brokers", "delete-dynamic-config", "--config", "log_level", "--url", url)
    refused = run_here("brokers", "update-dynamic-config", "--config", "listen", "--value", "h:1", "--url", url)
    assert refused.code != 0
    assert "does not change while brokers run" in refused.err
