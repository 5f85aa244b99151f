"""`--metrics-compat bookkeeper`: each name of the table is on the page, with the number that ours has."""

from pathlib import Path

import pytest

from magnetar.cli.common.processes import Processes
from magnetar.cli.run.metrics import BOOKKEEPER_METRICS, BookKeeperMetricWriter
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.metrics import Histogram, MetricsPage
from tests.cli.run.test_metrics import Scrape, facts
from tests.support.processes import run_here

pytestmark = pytest.mark.processes

WANTED = {
    "auditor_NUM_UNDER_REPLICATED_LEDGERS",
    "bookie_SERVER_STATUS", "bookie_WRITE_BYTES", "bookie_READ_BYTES", "bookie_journal_JOURNAL_ADD_ENTRY",
    "bookie_journal_JOURNAL_SYNC", "bookie_journal_JOURNAL_QUEUE_SIZE", "bookie_journal_JOURNAL_QUEUE_LATENCY",
    "bookkeeper_server_ADD_ENTRY",
    "bookkeeper_server_ADD_ENTRY_REQUEST", "bookkeeper_server_READ_ENTRY", "bookkeeper_server_READ_ENTRY_REQUEST",
    "bookie_ledgers_count", "bookie_write_cache_size", "bookie_read_cache_size", "bookie_ledger_writable_dirs",
    "bookie_throttled_write_requests", "bookie_flush", "bookie_DELETED_LEDGER_COUNT",
}  # fmt: skip
"""Those that BookKeeper's and StreamNative's dashboards ask for, and that mean something here."""


def test_each_name_of_the_table_is_shown_with_our_number(started: Processes, tmp_path: Path) -> None:
    server = started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--metrics", "0",
        "--metrics-compat", "bookkeeper",
    )  # fmt: skip
    where, url = facts(server)["metrics"], server.wait_ready()
    assert run_here("produce", "orders", "-m", "x", "-n", "300", "--url", url).code == 0
    page = Scrape(where)
    assert {second.name for second in BOOKKEEPER_METRICS} == WANTED
    for second in BOOKKEEPER_METRICS:
        kinds = {family.name: family.type for family in page.families}
        if kinds[second.name] == "summary":
            for i, ours in enumerate(second.ours):
                success = "false" if i else "true"
                count = page.value(f"{second.name}_count", success=success)
                assert count == page.value(f"{ours}_count"), second
                assert page.value(f"{second.name}_sum", success=success) == pytest.approx(
                    1000 * page.value(f"{ours}_sum")
                )
                quantile = page.value(second.name, success=success, quantile="0.99")
                assert (0 < quantile < 60_000) == bool(count)
        else:
            ours_ = sum(page.value(ours) for ours in second.ours)
            assert page.value(second.name) == (1 - ours_ if second.writable else ours_), second
    assert page.value("bookie_SERVER_STATUS") == 1
    assert page.value("bookkeeper_server_ADD_ENTRY_REQUEST_count", success="true") > 0
    assert page.value("bookie_WRITE_BYTES") > 300


def test_without_the_option_no_foreign_name_is_shown(started: Processes, tmp_path: Path) -> None:
    server = started.start("s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--metrics", "0")
    assert all(name.startswith("magnetar_") for name, _ in Scrape(facts(server)["metrics"]).values)


def test_a_read_only_bookie_has_status_0() -> None:
    page, adds = MetricsPage(), Histogram((0.1, 1.0))
    adds.observe_value(0.05)
    page.add_gauge("magnetar_bookie_read_only", "R.", 1, bookie="b")
    page.add_histogram("magnetar_bookie_add_seconds", "A.", adds, bookie="b")
    BookKeeperMetricWriter(SystemClock()).add(page, "b")
    samples = {(s.name, s.labels.get("quantile")): s.value for family in page.collect() for s in family.samples}
    assert samples["bookie_SERVER_STATUS", None] == 0
    assert samples["bookkeeper_server_ADD_ENTRY", "0.5"] == pytest.approx(50.0)
    assert not [name for name, _ in samples if "READ" in name], "what is not on our page has no second name"
