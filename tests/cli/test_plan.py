"""`magnetar plan`: its sums are those of the documents, for all servers and for one less."""

import json

import pytest

from magnetar.cli.bench import (
    PlannedLoad,
    estimate_ledgers,
    estimate_metadata_nodes,
    estimate_requirements,
    format_amount,
)
from tests.support.processes import run_here

DAY = 86_400
LOAD = PlannedLoad(in_bytes_s=50e6, retention_s=7 * DAY, fanout=3, copies=3, topics=1000, subscriptions=3)


def test_disk_and_network_are_those_of_the_formulas() -> None:
    found = estimate_requirements(LOAD, bookies=4, brokers=2)
    assert found.bookie_disk_bytes == pytest.approx(50e6 * 7 * DAY * 3 / 4 / 0.75)
    assert found.bookie_write_bytes_s == pytest.approx(2 * 50e6 * 3 / 4)
    assert found.bookie_in_bytes_s == pytest.approx(50e6 * 3 / 4)
    assert found.broker_out_bytes_s == pytest.approx(50e6 * (3 + 3) / 2)
    assert found.broker_memory_bytes == pytest.approx((64 << 20) + 17_000 * 500 + (80 << 20))
    less = estimate_requirements(LOAD, bookies=3, brokers=1)
    assert less.bookie_disk_bytes == pytest.approx(found.bookie_disk_bytes * 4 / 3)
    assert less.broker_out_bytes_s == pytest.approx(2 * found.broker_out_bytes_s)


def test_nodes_of_the_metadata_are_topics_subscriptions_and_ledgers() -> None:
    assert estimate_ledgers(LOAD) == 1000 * 43 + 3000, "a ledger of each topic every four hours, and the open one"
    assert estimate_metadata_nodes(LOAD) == 1000 * 5 + estimate_ledgers(LOAD)
    few = LOAD._replace(topics=1, subscriptions=0)
    assert estimate_ledgers(few) == 14_082, "2 GiB each: of one topic the size ends them before the age"


def test_amounts_are_as_people_write_them() -> None:
    found = [format_amount(each, "B") for each in (30.24e12, 1.5e9, 2e6, 999)]
    assert found == ["30.2 TB", "1.5 GB", "2.0 MB", "999 B"]


def test_the_plan_of_the_example_is_shown_for_all_and_for_one_less() -> None:
    asked = ("plan", "--in", "50MB/s", "--retention", "7d", "--fanout", "3", "--copies", "3")
    shown = run_here(*asked)
    assert shown.code == 0, shown.err
    assert "30.2 TB" in shown.out
    assert "40.3 TB" in shown.out
    assert "Metadata: about 51,000 nodes, 46,000 of them ledgers." in shown.out
    found = json.loads(run_here(*asked, "-o", "json").out)
    assert (found["all"]["bookies"], found["oneLess"]["bookies"]) == (4, 3)
    assert found["warnings"] == []


def test_too_few_bookies_are_refused_and_barely_enough_are_warned_of() -> None:
    least = ("plan", "--in", "5MiB/s", "--retention", "1d", "--bookies")
    assert run_here(*least, "2").code == 2
    assert "fewer than 3: new ledgers get fewer copies" in run_here(*least, "3").out


@pytest.mark.parametrize(
    ("rate", "bytes_s"), [("50MB/s", 5e7), ("1GiB/s", 1 << 30), ("200k", 2e5), ("1.5 mb/s", 1.5e6), ("7", 7)]
)
def test_rates(rate: str, bytes_s: float) -> None:
    found = json.loads(run_here("plan", "--in", rate, "--retention", "1h", "-o", "json").out)
    assert found["load"]["in_bytes_s"] == bytes_s


@pytest.mark.parametrize("wrong", ["fast", "0MB/s", "-1", "1PB", "1e9"])
def test_what_is_no_rate_is_refused(wrong: str) -> None:
    done = run_here("plan", f"--in={wrong}", "--retention", "1h")
    assert done.code == 2
    assert "is not a rate such as 50MB/s" in done.err
