"""`magnetar check publish`: what it measures, and how monitoring reads it."""

import json
import re
from pathlib import Path

import pytest

from magnetar.cli.check import ProbeTimes, format_nagios_line, format_prometheus_page
from magnetar.cli.common.processes import Processes
from tests.support.processes import run_here

QUICK = ProbeTimes(0.2, 0.01, 0.02)
AWAY = ProbeTimes(error="nobody listens\nthere | at all")


def test_states_are_by_publish_and_delivery_together() -> None:
    assert QUICK.judge_times(1, 5) == "ok"
    assert QUICK.judge_times(0.03, 5) == "warning"
    assert QUICK.judge_times(0.01, 0.03) == "critical"
    assert AWAY.judge_times(1, 5) == "critical"


def test_nagios_reads_one_line_with_its_numbers() -> None:
    assert format_nagios_line("t", QUICK, "ok", 1, 5) == (
        "MAGNETAR OK - t: published in 0.010 s, delivered in 0.020 s"
        "|total=0.030000s;1;5;0 connect=0.200000s publish=0.010000s deliver=0.020000s"
    )
    assert format_nagios_line("t", AWAY, "critical", 1, 5) == "MAGNETAR CRITICAL - t: nobody listens there / at all"


def test_a_page_for_prometheus_has_no_times_of_what_failed() -> None:
    assert format_prometheus_page('a"b', AWAY).splitlines()[2:] == ['magnetar_check_publish_up{topic="a\\"b"} 0']
    lines = format_prometheus_page("t", QUICK).splitlines()
    assert 'magnetar_check_publish_seconds{topic="t",step="deliver"} 0.020000' in lines
    assert all(re.fullmatch(r"# (HELP|TYPE) .+|[a-z_]+\{.+\} [0-9.]+", line) for line in lines)


@pytest.mark.processes
def test_a_message_goes_through_a_server_and_its_failure_is_told_to_each(started: Processes, tmp_path: Path) -> None:
    url = started.start("s", "standalone", "--port", "0", "--data", str(tmp_path / "data")).wait_ready()
    slow = ("--warn", "20s", "--critical", "30s", "--url", url)
    done = run_here("check", "publish", "probes", *slow)
    assert done.code == 0, done.err
    assert done.out.startswith("ok: published in 0.")
    found = json.loads(run_here("check", "publish", "probes", "-o", "json", *slow).out)
    assert found["state"] == "ok"
    assert 0 < found["publishSeconds"] < 20
    told = run_here("check", "publish", "probes", "-o", "nagios", *slow)
    assert (told.code, told.out.split(" - ")[0]) == (0, "MAGNETAR OK")
    at_once = ("--warn", "100ms", "--critical", "100ms")
    late = run_here("check", "publish", "probes", "-o", "nagios", *at_once, "--url", url)
    assert late.code in (0, 2)
    page = run_here("check", "publish", "probes", "-o", "prometheus", *slow)
    assert 'magnetar_check_publish_up{topic="probes"} 1' in page.out
    stats = json.loads(run_here("topics", "stats", "probes", "-o", "json", "--url", url).out)
    assert "magnetar-probe" not in json.dumps(stats), "no reader is left"

    nowhere = ("--url", "magnetar://127.0.0.1:1", "--timeout", "2")
    failed = run_here("check", "publish", "probes", "-o", "nagios", *nowhere)
    assert failed.code == 2
    assert failed.out.startswith("MAGNETAR CRITICAL - probes: ")
    page = run_here("check", "publish", "probes", "-o", "prometheus", *nowhere)
    assert page.code == 1
    assert page.out.strip().endswith('magnetar_check_publish_up{topic="probes"} 0')
    assert run_here("check", "publish", "probes", *nowhere).code == 1
