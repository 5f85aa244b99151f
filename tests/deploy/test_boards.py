"""Alerts and boards ask for metrics that a server has: each metric of a query is in the list of docs/metrics.md, which
tests/cli/run/test_metrics.py compares with a page."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.documents import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
BOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
_METRIC = re.compile(r"\bmagnetar_[a-z0-9_]+")
SOMETIMES = {
    "magnetar_subscription_blocked": {"reason", "subscription", "topic"},
    "magnetar_subscription_oldest_slot_seconds": {"subscription", "topic"},
    "magnetar_process_certificate_seconds": {"file"},
    "magnetar_process_token_seconds": set[str](),
    "magnetar_metadata_backup_age_seconds": set[str](),
    "magnetar_metadata_backup_failing": set[str](),
}
"""Metrics of which the page that made the list has no line: nothing is blocked or of Key_Shared, there is no TLS, token
or copy."""


def listed() -> dict[str, set[str]]:
    """The metrics of the document, each with its labels."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(magnetar_\w+)` \| (\w+) \| (.*?) \|", text, re.M)
    found = {name: set(re.findall(r"`(\w+)`", labels)) for name, _, labels in rows}
    for name, kind, _ in rows:
        if kind == "histogram":
            found |= {f"{name}_{part}": found[name] | {"le"} for part in ("bucket", "sum", "count")}
    return found | SOMETIMES


def expressions() -> Iterator[tuple[str, str]]:
    rules = (PROMETHEUS / "rules.yml").read_text(encoding="utf-8")
    for each in re.findall(r"expr: (?:>-\n((?:          .*\n)+)|(.*))", rules):
        yield "rules.yml", "".join(each)
    for path in BOARDS:
        board: Any = json.loads(path.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield path.name, target["expr"]
        for variable in board["templating"]["list"]:
            yield path.name, variable["query"]


def test_each_metric_of_an_alert_or_a_board_is_one_of_a_page_and_has_the_labels() -> None:
    known, looked_at = listed(), 0
    for where, text in expressions():
        for match in _METRIC.finditer(text):
            name = match[0]
            assert name in known, f"{where}: {text}"
            asked = re.match(r"\{([^}]*)\}", text[match.end() :])
            labels = set(re.findall(r"(\w+)=", asked[1])) if asked else set[str]()
            assert labels <= known[name] | {"instance", "job"}, f"{where}: {text}"
            looked_at += 1
    assert looked_at > 80


def test_metrics_that_are_there_sometimes_are_written_by_the_code() -> None:
    code = (ROOT / "cli/run/metrics.py").read_text(encoding="utf-8")
    for name in SOMETIMES:
        assert re.search(rf'"(magnetar_)?{name.removeprefix("magnetar_")}"', code)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_board_is_whole(path: Path) -> None:
    board = json.loads(path.read_text(encoding="utf-8"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 8
    assert board["uid"] == f"magnetar-{path.stem}"
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(ids), "no panel covers another"
    names = {variable["name"] for variable in board["templating"]["list"]}
    asked = [target["expr"] for each in board["panels"] for target in each["targets"]]
    used = set(re.findall(r"\$(\w+)", "".join(asked)))
    assert used - {"__rate_interval"} <= names


@pytest.mark.parametrize("words", [("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")], ids=" ".join)
def test_prometheus_takes_the_rules_and_they_fire_when_they_should(words: tuple[str, ...]) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not here: apt-get install prometheus")
    done = subprocess.run(["promtool", *words], cwd=PROMETHEUS, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
