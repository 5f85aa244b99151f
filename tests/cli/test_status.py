"""`magnetar status`, `top` and `why`: what an operator asks first."""

import asyncio
import json
import os
import shlex
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.cli.admin import cluster
from magnetar.cli.admin.cluster import ask_bookie_states, make_topic_row
from magnetar.cli.common.output import CommandOutput, format_cell
from magnetar.cli.common.processes import Processes
from magnetar.cli.storage import ledgers
from magnetar.cli.storage.admin_port import BookiePeer, OperatorOptions
from magnetar.proto.alarms import (
    find_alarms,
    find_backup_alarms,
    find_certificate_alarms,
    find_metadata_alarms,
    find_metadata_disk_alarms,
    find_metadata_refusal_alarms,
    find_repair_alarms,
)
from magnetar.proto.errors import TimedOut
from magnetar.proto.statistics import (
    BookieInfo,
    BrokerInfo,
    BrokerSummary,
    ClusterSummary,
    NamespaceSums,
    SecurityDescription,
)
from tests.support.processes import Cluster, run_cli, run_here

NOW_MS = 1_000_000_000_000
GOOD = {"enabled": True, "auditor": "b", "underReplicated": 0, "reasons": {}, "stuck": {}, "secondsToGo": None}


def broker(**changed: Any) -> dict[str, Any]:
    none = {"busy": None, "degraded": 0, "tokenEndsMs": 0, "certificateEndsMs": 0, "draining": False, "full": ()}
    return {"broker": "one", **none, **changed}


def bookie(**changed: Any) -> dict[str, Any]:
    return {"bookie": "12345678-90", "state": "writable", "freeBytes": 50, "totalBytes": 100, **changed}


def alarms(
    brokers: Any = (), silent: Any = (), bookies: Any = None, repair: Any = GOOD, oldest: Any = (), refusing: Any = (),
    why: str = "", refused: bool = False,
) -> list[tuple[str, bool]]:
    known = [bookie()] if bookies is None else bookies
    found = find_repair_alarms(repair, why, refused=refused)
    found += find_alarms([broker(), *brokers], silent, known, oldest, NOW_MS, refusing)
    assert all(each.command.startswith("magnetar ") for each in found)
    return [(each.text, each.needed) for each in found]


def test_copies_that_move_off_a_departing_bookie_are_a_remark() -> None:
    departing = GOOD | {"underReplicated": 2, "reasons": {"departing": 2}, "stuck": {}}
    found = alarms(bookies=[bookie(), bookie(state="departing")], repair=departing)
    assert found == [("2 ledgers still move off departing bookies.", False)]


@pytest.mark.parametrize("nowhere", [0, 402])
def test_a_decommission_says_of_how_many_ledgers_no_bookie_can_take_the_copies(
    nowhere: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = {"ledgers": 402, "nowhere": nowhere, "takers": 2}
    monkeypatch.setattr(ledgers, "ask_any_bookie", lambda *_, **__: left)
    session: Any = SimpleNamespace(out=CommandOutput("table"))
    ledgers._show_progress(session, "b", False, None, "empty")
    printed = capsys.readouterr()
    assert printed.out == "402 ledgers move off bookie b\n"
    assert printed.err.startswith("no other bookie can take the copies of 402 ledgers: 2 take writes") == bool(nowhere)


def test_a_cluster_where_all_is_well_has_no_alarm() -> None:
    assert alarms() == []


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (alarms(silent=["two"]), "Broker two is registered and does not answer."),
        (alarms(bookies=[]), "No bookie takes writes: nothing can be published."),
        (alarms(bookies=[bookie(), bookie(state="read-only", freeBytes=4)]),
         "Bookie 12345678 is read-only, with 4% of its disk free (disk_full_share says when)."),
        (alarms(bookies=[bookie(), bookie(state="limbo")]),
         "Bookie 12345678 lost data, and looks for it at other bookies."),
        (alarms(bookies=[bookie(), bookie(state="absent", totalBytes=0)]),
         "Bookie 12345678 is not registered, and ledgers name it."),
        (alarms(bookies=[bookie(freeBytes=14)]), "The disk of bookie 12345678 has 14% left; at 5 % it is read-only."),
        (alarms(repair=GOOD | {"underReplicated": 2}), "2 ledgers miss copies."),
        (alarms(repair=GOOD | {"underReplicated": 2, "reasons": {"departing": 1, "lost": 1}}),
         "2 ledgers miss copies."),
        (alarms(repair=GOOD | {"underReplicated": 2, "reasons": {"departing": 2}, "stuck": {"no target": 1}}),
         "2 ledgers miss copies (1: no target)."),
        (alarms(repair=GOOD | {"enabled": False}),
         "Auto-recovery is disabled: copies of lost bookies are not made again."),
        (alarms(repair=None), "No bookie says how repair gets on."),
        (alarms(repair=None, why="it hangs"), "No bookie says how repair gets on: it hangs."),
        (alarms([broker(busy=0.9)]), "The event loop of broker one is busy 90% of its time."),
        (alarms([broker(degraded=1)]), "1 topic writes fewer copies than asked for."),
        (alarms(silent=["two"], refusing=["two"]),
         "Broker two refuses the own token or certificate of the broker that was asked: ended, revoked, or without the "
         "right."),
        (alarms([broker(tokenEndsMs=NOW_MS + 3_600_000)]),
         "The own token of broker one ends in 1 h: no other broker answers it then."),
        (alarms([broker(tokenEndsMs=NOW_MS - 1)]),
         "The own token of broker one has ended: no other broker answers it then."),
        (alarms([broker(full=["t"])]),
         "t takes no publishes: the backlog of its slowest subscription is above the quota."),
        (alarms(bookies=[bookie(gcRefused="why")]), "Bookie 12345678 deletes nothing of some ledgers: why."),
    ],
)  # fmt: skip
def test_each_alarm_is_a_sentence_and_needs_somebody(found: list[tuple[str, bool]], text: str) -> None:
    assert found == [(text, True)]


def test_who_is_refused_makes_a_token_anew_only_where_brokers_have_tokens_that_end() -> None:
    for ends_ms, command in ((NOW_MS + 10**10, "magnetar security token create"), (0, "magnetar security --help")):
        (found,) = find_alarms([broker(tokenEndsMs=ends_ms)], ["two"], [bookie()], [], NOW_MS, ["two"])
        assert found.command.startswith(command)


def test_an_own_token_of_a_broker_that_ends_in_two_weeks_can_wait_and_a_later_end_is_no_alarm() -> None:
    day_ms = 86_400_000
    assert alarms([broker(tokenEndsMs=NOW_MS + 14 * day_ms)]) == []
    text = "The own token of broker one ends in 13 d: no other broker answers it then."
    assert alarms([broker(tokenEndsMs=NOW_MS + 14 * day_ms - 1)]) == [(text, False)]


def test_a_certificate_of_any_server_that_ends_is_an_alarm_and_in_two_weeks_a_remark() -> None:
    day_ms = 86_400_000
    for ends_ms, ends, needed in ((-1, "has ended", True), (13 * day_ms, "ends in 13 d", False)):
        text = f"A certificate of broker one {ends}: no new connection is made then."
        assert alarms([broker(certificateEndsMs=NOW_MS + ends_ms)]) == [(text, needed)]
        text = f"A certificate of bookie 12345678 {ends}: no new connection is made then."
        assert alarms(bookies=[bookie(certificateEndsMs=NOW_MS + ends_ms)]) == [(text, needed)]
        (found,) = find_certificate_alarms("the metadata service", NOW_MS + ends_ms, NOW_MS)
        assert (found.needed, found.code) == (needed, "D16")
    assert alarms([broker(certificateEndsMs=NOW_MS + 14 * day_ms)], bookies=[bookie(certificateEndsMs=None)]) == []


def test_a_broker_that_drains_is_a_remark_with_the_command_that_ends_it() -> None:
    (found,) = find_alarms([broker(draining=True)], [], [bookie()], [], NOW_MS)
    assert (found.needed, found.command) == (False, "magnetar brokers undrain one")


def test_fewer_copies_are_a_remark_once_all_bookies_are_back() -> None:
    back = [bookie()] * 3
    (found,) = alarms([broker(degraded=14)], bookies=back)
    assert found[0].startswith("14 topics write fewer copies than asked for, and all copies again")
    assert not found[1]
    for state in ("absent", "read-only", "departing", "limbo"):
        found = alarms([broker(degraded=14)], bookies=[*back, bookie(state=state)])
        assert ("14 topics write fewer copies than asked for.", True) in found
    assert ("1 topic writes fewer copies than asked for.", True) in alarms([broker(degraded=1)], bookies=back[:2])


def test_each_broker_is_asked_who_is_connected_and_one_that_is_silent_is_named() -> None:
    class Other:
        """A session at one broker."""

        def __init__(self, endpoint: str) -> None:
            self.endpoint, self.admin = endpoint, self

        def with_timeout(self, timeout_s: float) -> Any:
            return self

        def describe_security(self) -> SecurityDescription:
            if self.endpoint == "b2:1":
                raise TimedOut("too slow")
            return SecurityDescription(self.endpoint, (), ())

        def close(self) -> None:
            closed.append(self.endpoint)

    closed = list[str]()
    session: Any = SimpleNamespace(with_broker=Other)
    brokers = [BrokerInfo(f"broker-{number}", f"b{number}:1") for number in (1, 2, 3)]
    found, silent = cluster.ask_who_is_connected(session, brokers)
    assert [each["broker"] for each in found] == ["b1:1", "b3:1"]
    assert silent == {"broker-2": "too slow"}
    assert closed == ["b1:1", "b2:1", "b3:1"]


def test_that_bookies_do_not_answer_this_caller_is_a_note_and_no_alarm() -> None:
    found = alarms(repair=None, why="b:1 asks for keys: give --security", refused=True)
    assert found == [("Bookies and repair were not asked: b:1 asks for keys: give --security.", False)]


def test_a_tight_disk_can_wait_and_is_said_once_where_little_is_free() -> None:
    text = (
        "The disk of bookie 12345678 is 50% used, which is disk_warn_share or more: it runs no major compaction. Free "
        "space, or add bookies."
    )
    assert alarms(bookies=[bookie(disk="tight")]) == [(text, False)]
    assert alarms(bookies=[bookie(disk="writable")]) == []
    ((text, needed),) = alarms(bookies=[bookie(disk="tight", freeBytes=9)])
    assert (text, needed) == ("The disk of bookie 12345678 has 9% left; at 5 % it is read-only.", True)


@pytest.mark.parametrize("hangs", [False, True])
def test_bookies_that_do_not_answer_are_asked_once_each_for_a_third_of_the_time_out(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    asked = list[tuple[str, str, float]]()

    async def ask(peer: BookiePeer, verb: str) -> None:
        asked.append((peer.id, verb, peer._timeout_s))
        if hangs:
            await asyncio.sleep(5)
        raise TimedOut("it hangs")

    monkeypatch.setattr(BookiePeer, "ask", ask)
    known = tuple(BookieInfo(each, "b:1", False, "", 50, 100) for each in "xyz")
    operator = OperatorOptions("s", "m", 0.3)
    session: Any = SimpleNamespace(timeout_s=0.3, operator=operator, admin=SimpleNamespace(bookies=lambda: known))
    found = ask_bookie_states(session, ClusterSummary((), (), known))
    assert sorted(asked) == [(each, "state", pytest.approx(0.1)) for each in "xyz"]
    assert (found.repair, found.refused, len(found.bookies)) == (None, False, 3)
    assert found.why == ("bookie x did not answer within 0.1 s" if hangs else "it hangs")
    assert (session.timeout_s, session.operator.timeout_s) == (0.3, 0.3)


@pytest.mark.parametrize("lost", [(), ("bookies",), ("repair-status",)])
def test_another_bookie_is_asked_when_the_first_does_not_say_and_what_is_not_known_is_a_note(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    async def ask(peer: BookiePeer, verb: str, **_: object) -> dict[str, Any]:
        if verb != "state" and (peer.id == "x" or verb in lost):
            raise TimedOut("it hangs")
        gone = {"id": "gone", "state": "absent", "ledgers": 2}
        return {"freeBytes": 1, "totalBytes": 2, "gcRefused": None, "disk": "tight", "bookies": [gone], **GOOD}

    monkeypatch.setattr(BookiePeer, "ask", ask)
    known = tuple(BookieInfo(each, "b:1", False, "", 50, 100) for each in "xy")
    session: Any = SimpleNamespace(timeout_s=30.0, operator=None, admin=SimpleNamespace(bookies=lambda: known))
    found = ask_bookie_states(session, ClusterSummary((), (), known))
    assert (found.repair == GOOD) == ("repair-status" not in lost)
    assert found.answered
    assert [each["bookie"] for each in found.bookies] == (["x", "y"] if "bookies" in lost else ["x", "y", "gone"])
    assert [each["disk"] for each in found.bookies[:2]] == ["tight", "tight"]
    notes = find_repair_alarms(GOOD, unlisted=found.unlisted)
    assert [(each.code, each.needed) for each in notes] == ([("D03", False)] if "bookies" in lost else [])


def test_a_bookie_that_is_away_and_that_no_ledger_names_can_wait() -> None:
    text = "Bookie 12345678 is not registered, and no ledger names it: forget it, or start it again."
    gone = bookie(state="absent", totalBytes=0, ledgers=0)
    assert alarms(bookies=[bookie(), gone]) == [(text, False)]
    (found,) = find_alarms([], [], [bookie(), gone], [], NOW_MS)
    assert found.command == "magnetar bookies forget 12345678"
    assert alarms(bookies=[bookie(), gone | {"ledgers": 1}])[0][1]


def test_one_line_says_whether_brokers_balance_their_load_and_who_leads() -> None:
    assert cluster.describe_balancers(["one"]) == "Brokers balance their load; the leader is one."
    assert cluster.describe_balancers(["two", "one"]).endswith("the leader is one and two.")
    assert cluster.describe_balancers([]).startswith("No broker balances their load: ")


def test_namespaces_whose_messages_a_crash_may_lose_are_named_with_the_number_of_their_topics() -> None:
    def summary(name: str, **topics: int) -> BrokerSummary:
        sums = tuple(NamespaceSums(each, 9, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0, 0, count) for each, count in topics.items())
        return BrokerSummary(name, "h:1", "v", 1, 0.0, 0, 0, sums[0], sums, (), (), ())

    brokers = summary("one", clicks=2, orders=0), summary("two", clicks=1, beats=1)
    found = cluster.sum_topics_in_memory(ClusterSummary(brokers, (), ()))
    assert found == {"beats": 1, "clicks": 3}
    assert cluster.describe_in_memory(found) == "beats (1 topic), clicks (3 topics)"
    many = {f"n{number:02}": 1 for number in range(13)}
    assert cluster.describe_in_memory(many).endswith("n09 (1 topic) and 3 more")


def test_that_the_metadata_does_not_answer_is_said_with_the_time_since_when() -> None:
    assert find_metadata_alarms(0, NOW_MS) == []
    (found,) = find_metadata_alarms(NOW_MS - 61_000, NOW_MS)
    assert found.command == "magnetar health --http http://HOST:PORT  # of a metadata server: its --health address"
    assert found.text.startswith("The metadata does not answer since 2001-09-09 01:45:39 UTC (1 min): ")
    assert (found.needed, found.code) == (True, "D00")


def test_a_disk_of_the_metadata_that_is_nearly_full_is_said() -> None:
    assert find_metadata_disk_alarms(0, 0) == [], "it is not known"
    assert find_metadata_disk_alarms(100 << 20, 15 << 20) == []
    (soon,), (now,) = find_metadata_disk_alarms(100 << 20, 14 << 20), find_metadata_disk_alarms(100 << 20, 4 << 20)
    assert [(each.needed, each.code) for each in (soon, now)] == [(False, "D20"), (True, "D20")]
    assert now.text.startswith("The disk of the metadata has 4% left (4 MiB): ")


def test_that_the_metadata_refuses_commits_is_said_with_its_reason() -> None:
    assert find_metadata_refusal_alarms("") == []
    (found,) = find_metadata_refusal_alarms("etcd is full (alarm NOSPACE)")
    assert (found.needed, found.code) == (True, "D20")
    assert found.text.endswith("taken over: etcd is full (alarm NOSPACE).")


def test_scheduled_copies_of_the_metadata_that_fail_or_are_late_are_said() -> None:
    hour_ms = 3_600_000
    assert find_backup_alarms(0, 0, "", NOW_MS) == [], "no copies are scheduled"
    assert find_backup_alarms(NOW_MS - 9 * hour_ms, 0, "", NOW_MS) == []
    assert find_backup_alarms(0, hour_ms, "", NOW_MS) == [], "the first one is not due yet"
    assert find_backup_alarms(NOW_MS - 2 * hour_ms, hour_ms, "", NOW_MS) == []
    (soon,) = find_backup_alarms(NOW_MS - 1000, hour_ms, "no room", NOW_MS)
    (late,) = find_backup_alarms(NOW_MS - 3 * hour_ms, hour_ms, "", NOW_MS)
    (never,) = find_backup_alarms(0, hour_ms, "no room", NOW_MS)
    assert [(each.needed, each.code) for each in (soon, late, never)] == [
        (False, "D15"), (True, "D15"), (True, "D15")
    ]  # fmt: skip
    begin = "The scheduled copies of the metadata (every 1 h)"
    assert [each.text for each in (soon, late, never)] == [
        f"{begin} fail: no room. The newest is 1 s old.", f"{begin} are late. The newest is 3 h old.",
        f"{begin} fail: no room. The newest does not exist.",
    ]  # fmt: skip


def test_a_server_that_answers_late_is_a_remark_and_no_alarm() -> None:
    (found,) = find_metadata_alarms(0, NOW_MS, late=True)
    assert (found.text.partition(":")[0], found.needed, found.code) == ("The metadata answers late", False, "D00")
    (found,) = find_alarms([broker()], [], [bookie()], [], NOW_MS, late=["two"])
    assert (found.text, found.needed, found.code) == (
        "Broker two answers late: only when it was asked again.", False, "D01"
    )  # fmt: skip


def test_an_old_message_is_shown_and_can_wait() -> None:
    rows = [{"name": "t", "oldest_ms": NOW_MS - 7_300_000}, {"name": "u", "oldest_ms": NOW_MS - 5}]
    assert alarms(oldest=rows) == [("The oldest message of t has not been acknowledged for 2 h.", False)]


def test_the_command_of_an_alarm_is_safe_to_copy_whatever_a_topic_is_called() -> None:
    name = "persistent://public/default/t;reboot $(id)"
    (alarm,) = find_alarms([], [], [bookie()], [{"name": name, "oldest_ms": 1}], NOW_MS)
    assert shlex.split(alarm.command) == ["magnetar", "why", name]


def test_an_age_that_is_not_known_is_a_dash_and_null() -> None:
    names = ("rate_in", "rate_out", "throughput_in", "throughput_out", "storage_bytes", "producers", "consumers")
    row = {"name": "t", "owner": "o", "backlog": 9, "oldest_ms": 0, "slowest": "", "slowest_backlog": 0}
    row |= dict.fromkeys(names, 0)
    shown = make_topic_row(row, NOW_MS)
    assert (shown["oldest"], shown["oldestMs"], format_cell(shown["oldest"])) == (None, None, "-")
    shown = make_topic_row(row | {"oldest_ms": NOW_MS - 61_000}, NOW_MS)
    assert (shown["oldest"], shown["oldestMs"]) == ("1 min", NOW_MS - 61_000)


@pytest.mark.processes
def test_a_server_says_its_status_its_largest_topics_and_why_a_subscription_waits(
    started: Processes, tmp_path: Path
) -> None:
    url = started.start("s", "standalone", "--port", "0", "--data", str(tmp_path / "data")).wait_ready()
    run_here("topics", "create", "orders", "--url", url)
    run_here("topics", "create-subscription", "orders", "-s", "billing", "--url", url)
    run_here("produce", "orders", "-m", "x", "-n", "7", "--url", url)

    told = run_here("status", "-o", "json", "--url", url)
    found = json.loads(told.out)
    free = found["bookies"][0]["freePercent"]
    assert told.code == int(free < 15), told.out
    assert [each["topics"] for each in found["brokers"]] == [1]
    topic = "persistent://public/default/orders"
    assert [(each["topic"], each["backlog"]) for each in found["backlogs"]] == [(topic, 7)]
    assert found["repair"]["underReplicated"] == 0
    shown = run_here("status", "--url", url)
    assert ("All is well." in shown.out) == (free >= 15)

    (row,) = json.loads(run_here("top", "--by", "backlog", "--once", "-o", "json", "--url", url).out)
    assert (row["topic"], row["backlog"]) == (topic, 7)
    assert json.loads(run_here("top", "--contains", "none", "-o", "json", "--url", url).out) == []
    told_why = run_here("why", "orders", "--url", url)
    assert "subscription billing: No consumer is connected." in told_why.out
    assert "It is the last of the list, or it is written." in told_why.out
    assert run_here("why", "orders", "none", "--url", url).code == 4
    (part,) = json.loads(run_here("why", "orders", "billing", "-o", "json", "--url", url).out)
    assert part["subscriptions"][0]["stuck"]


@pytest.mark.processes
def test_a_killed_broker_is_shown_until_it_is_forgotten_and_a_stopped_one_is_not(tmp_path: Path) -> None:
    with Cluster(tmp_path, bookies=1, brokers=3) as running:
        first, killed, stopped = running.brokers
        at = ("--url", f"magnetar://{first.address}")
        assert stopped.stop() == 0
        os.kill(killed.pid, signal.SIGKILL)
        while not (died := json.loads(run_here("status", "-o", "json", *at).out)["died"]):
            time.sleep(0.2)  # until its session ends
        ((name, endpoint),) = {(each["broker"], each["endpoint"]) for each in died}
        assert endpoint == killed.address
        told = run_here("status", *at)
        assert (told.code, f"Broker {name} ({endpoint}) is not seen since" in told.out) == (1, True)
        assert f"! D19 Broker {name} ({endpoint}) is not seen" in run_here("doctor", *at).out
        asked = run_here("brokers", "forget", name, *at)
        assert asked.code != 0
        assert f"Broker {name} ({endpoint}) is gone for good" in asked.out + asked.err
        assert run_here("brokers", "forget", name, "--yes", *at).code == 0
        assert json.loads(run_here("status", "-o", "json", *at).out)["died"] == []
        assert run_here("brokers", "forget", name, *at).code == 4, "there is nothing to ask about"


@pytest.mark.processes
def test_while_the_metadata_is_away_status_and_doctor_say_since_when_and_what_the_broker_knows(tmp_path: Path) -> None:
    with Cluster(tmp_path, bookies=1, brokers=2) as running:
        url = f"magnetar://{running.brokers[0].address}"
        assert run_here("status", "--url", url).out.count("127.0.0.1:") == 3
        os.kill(running.metadata.pid, signal.SIGSTOP)
        try:
            for _ in range(5):  # it is late, and then away
                told = run_cli("status", "--url", url, timeout_s=60)
                if told.out.startswith("! "):
                    break
                assert told.out.startswith("- The metadata answers late: ")
            assert (told.code, told.err) == (1, "")
            assert told.out.startswith("! The metadata does not answer since ")
            assert told.out.count("127.0.0.1:") == 3, "both brokers and the bookie are shown"
            found = json.loads(run_cli("status", "-o", "json", "--url", url, timeout_s=60).out)
            assert (len(found["brokers"]), len(found["bookies"]), found["silent"]) == (2, 1, [])
            assert found["alarms"][0]["code"] == "D00"
            examined = run_cli("doctor", "-o", "json", "--url", url, timeout_s=60)
            assert examined.code == 1
            assert json.loads(examined.out)["findings"][0]["code"] == "D00"
        finally:
            os.kill(running.metadata.pid, signal.SIGCONT)
