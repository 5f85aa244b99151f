"""Half messages on real processes: the program is killed after `prepare`, another one of its group answers."""

import sqlite3
import time
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Cluster, Process
from magnetar.client.admin import Admin
from tests.client.transactions.shop import ORDERS
from tests.docs.documents import ROOT

pytestmark = pytest.mark.processes


class Shop(Process):
    module = "tests.client.transactions.shop"


def shop(what: str, url: str, tmp_path: Path) -> Shop:
    arguments = [what, url, str(tmp_path / "orders.sqlite")]
    return Shop(f"shop-{what}", arguments, tmp_path, {"PYTHONPATH": str(ROOT)})


def until_settled(url: str) -> None:
    """Waits until no half message is undecided, and each topic has stored what was decided: only then is it visible."""
    deadline = time.monotonic() + 60
    with Admin(url) as admin:
        while left := [each for found in (*admin.all_halves(), *admin.all_transactions()) for each in found.items]:
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


def published(url: str) -> list[int]:
    with magnetar.Client(url) as client:
        reader = client.create_reader("orders", magnetar.MessageId.earliest)
        found = []
        while reader.has_message_available():
            found.append(int(reader.read_next(10_000).data()))
        return found


def test_topic_and_database_agree_when_the_program_is_killed_and_then_every_broker(tmp_path: Path) -> None:
    with Cluster(tmp_path, session_timeout_s=2.0) as cluster:
        url = cluster.url
        program = shop("take", url, tmp_path)
        try:
            program.wait_ready()
        finally:
            program.kill()
        for broker in cluster.brokers:
            broker.kill()
        for broker in cluster.brokers:
            broker.start()
        for broker in cluster.brokers:
            broker.wait_ready()
        checker = shop("check", url, tmp_path)
        try:
            checker.wait_ready()
            until_settled(url)
        finally:
            checker.kill()
        with sqlite3.connect(tmp_path / "orders.sqlite") as database:
            rows = [number for (number,) in database.execute("SELECT number FROM orders")]
        asked = [line for line in checker.lines if line.startswith("asked")]
        assert sorted(published(url)) == sorted(rows) == [number for number in range(ORDERS) if number % 3 != 1]
        assert len(set(asked)) == len([number for number in range(ORDERS) if number % 3 != 2]), "and no others"
