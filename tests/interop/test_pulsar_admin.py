"""The official command line `pulsar-admin transactions`, unchanged, against a real server: `make interop`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.cli.common.processes import Processes
from tests.interop.drivers import fetch, find_tool
from tests.interop.test_pulsar_python import url_of

pytestmark = pytest.mark.interop
ORDERS, BILLS = "persistent://public/default/orders", "persistent://public/default/bills"
Tool = Callable[..., str]


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tool]:
    """Of a URL: what the tool prints, or says when it fails with `code`."""
    folder = tmp_path_factory.mktemp("tools")
    copied = [find_tool("mvn"), "-q", "-B", "-f", "tools/pom.xml", "dependency:copy-dependencies"]
    fetch([*copied, f"-DoutputDirectory={folder}"])
    settings = folder / "client.conf"
    settings.touch()
    command = [find_tool("java"), "-cp", f"{folder}/*", "org.apache.pulsar.admin.cli.PulsarAdminTool", str(settings)]

    def of(url: str) -> Tool:
        def run(*arguments: object, code: int = 0) -> str:
            asked = [*command, "--admin-url", url, "transactions", *map(str, arguments)]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout if not code else done.stdout + done.stderr

        return run

    return of


def test_pulsar_admin_sees_and_aborts_an_open_transaction(tool: Callable[[str], Tool], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        admin = tool(url_of(server, "http"))

        def told(*arguments: object) -> Any:
            return json.loads(admin(*arguments))

        with magnetar.Client(server.wait_ready()) as client:
            bills = client.subscribe("bills", "s", initial_position=magnetar.InitialPosition.Earliest)
            orders = client.create_producer("orders")
            client.create_producer("bills").send(b"1")
            orders.send(b"plain")
            txn = client.transaction(timeout=900)
            orders.send(b"hidden", txn=txn)
            bills.acknowledge_cumulative(bills.receive(timeout_millis=10_000), txn=txn)
            half = ("-m", txn.id.most, "-l", txn.id.least)

            listed = admin("coordinators-list").split()
            assert url_of(server) in listed
            found = told("transaction-metadata", *half)
            assert (found["txnId"], found["status"], found["timeoutAt"]) == (str(txn.id), "OPEN", 900_000)
            assert list(found["producedPartitions"]) == [ORDERS]
            assert list(found["ackedPartitions"][BILLS]) == ["s"]
            place = found["producedPartitions"][ORDERS]["startPosition"]
            in_buffer = told("transaction-in-buffer-stats", "-t", ORDERS, *half)
            assert in_buffer == {"startPosition": place, "aborted": False}
            acked = told("transaction-in-pending-ack-stats", "-t", BILLS, "-s", "s", *half)["cumulativeAckPosition"]
            assert acked == found["ackedPartitions"][BILLS]["s"]["cumulativeAckPosition"]
            buffer = told("transaction-buffer-stats", "-t", ORDERS, "-l", "-s")
            assert (buffer["state"], buffer["ongoingTxnSize"]) == ("Ready", 1)
            assert buffer["maxReadPosition"].partition(":")[2] == "0"
            assert told("pending-ack-stats", "-t", BILLS, "-s", "s", "-l")["ongoingTxnSize"] == 1
            ledger, _, entry = acked.partition(":")
            admin("position-stats-in-pending-ack", "-t", BILLS, "-s", "s", "-l", ledger, "-e", entry)  # prints nothing
            assert told("coordinator-stats", "-c", txn.id.most)["ongoingTxnSize"] == 1
            internals = told("coordinator-internal-stats", "-c", txn.id.most, "-m")
            assert internals["transactionLogStats"]["managedLedgerName"] == f"coordinator-{txn.id.most}"
            assert str(txn.id) in admin("slow-transactions", "-t", "0s")
            assert str(txn.id) not in admin("slow-transactions", "-t", "1h")
            assert "fixed by the first transaction" in admin("scale-transactionCoordinators", "-r", 32, code=1)
            assert "with the cursor" in admin("pending-ack-internal-stats", "-t", BILLS, "-s", "s", code=1)
            assert "beside the log" in admin("buffer-snapshot-internal-stats", "-t", ORDERS, code=1)
            admin("abort-transaction", *half)
            assert client.transaction_status(txn.id).name == "ABORTED"
            assert told("transaction-in-buffer-stats", "-t", ORDERS, *half)["aborted"] is True
