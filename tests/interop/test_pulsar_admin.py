"""The official command line `pulsar-admin`, unchanged, against a real server: `make interop`."""

import json
import subprocess
from collections.abc import Callable
from functools import partial
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
            asked = [*command, "--admin-url", url, *map(str, arguments)]
            done = subprocess.run(asked, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == code, done.stdout + done.stderr
            return done.stdout if not code else done.stdout + done.stderr

        return run

    return of


def test_pulsar_admin_sees_and_aborts_an_open_transaction(tool: Callable[[str], Tool], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        admin = partial(tool(url_of(server, "http")), "transactions")

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


NAMESPACE, TOPIC = "public/asked", "persistent://public/asked/t"
RATE = "dispatchThrottlingRatePerTopicInMsg"
PRINTED: tuple[tuple[str, str], ...] = (
    (f"namespaces create {NAMESPACE}", ""),
    (f"topics create {TOPIC}", ""),
    (f"namespaces get-deduplication-snapshot-interval {NAMESPACE}", "null"),
    (f"namespaces set-deduplication-snapshot-interval {NAMESPACE} -i 30", ""),
    (f"namespaces get-deduplication-snapshot-interval {NAMESPACE}", "30"),
    (f"namespaces remove-deduplication-snapshot-interval {NAMESPACE}", ""),
    (f"namespaces get-deduplication-snapshot-interval {NAMESPACE}", "null"),
    (f"topics set-deduplication-snapshot-interval {TOPIC} -i 20", ""),
    (f"topics get-deduplication-snapshot-interval {TOPIC}", "20"),
    (f"topics remove-deduplication-snapshot-interval {TOPIC}", ""),
    (f"namespaces get-bookie-affinity-group {NAMESPACE}", "null"),
    (f"namespaces delete-bookie-affinity-group {NAMESPACE}", ""),
    (f"namespaces get-offload-policies {NAMESPACE}", "null"),
    (f"namespaces remove-offload-policies {NAMESPACE}", ""),
    (f"namespaces get-offload-deletion-lag {NAMESPACE}", "Unset for namespace. Defaulting to broker setting."),
    (f"topics get-offload-policies {TOPIC}", "null"),
    (f"namespaces get-replicator-dispatch-rate {NAMESPACE}", "null"),
    (f"topics get-replicator-dispatch-rate {TOPIC}", "null"),
    (f"namespaces get-clusters {NAMESPACE}", "standalone"),
    (f"namespaces set-clusters {NAMESPACE} -c standalone", ""),
    (f"topics get-replication-clusters {TOPIC}", "null"),
    (f"topics get-replication-clusters {TOPIC} -ap", '[ "standalone" ]'),
    ("brokers get-all-dynamic-config", ""),
    (f"brokers update-dynamic-config --config {RATE} --value 1000", ""),
    ("brokers get-all-dynamic-config", f"{RATE}    1000"),
    (f"brokers delete-dynamic-config --config {RATE}", ""),
)
"""What Pulsar 4.0.8 prints."""
REFUSED: tuple[tuple[str, str], ...] = (
    (f"namespaces set-deduplication-snapshot-interval {NAMESPACE} -i -1", "must be greater than or equal to 0"),
    ("brokers update-dynamic-config --config nonsense --value 1", "Can't update non-dynamic configuration"),
    ("brokers delete-dynamic-config --config nonsense", "Can't delete non-dynamic configuration"),
    (f"namespaces set-clusters {NAMESPACE} -c other", "no replication between clusters"),
    (f"namespaces set-replicator-dispatch-rate {NAMESPACE} -md 10", "no replication between clusters"),
    (f"namespaces set-bookie-affinity-group {NAMESPACE} -pg g", "bookies have racks and no groups"),
    (f"namespaces set-offload-policies {NAMESPACE} -d aws-s3 -b b -r r", "no tiered storage"),
)
"""The first three as Pulsar 4.0.8; the others are not here."""


def test_pulsar_admin_prints_what_it_prints_of_pulsar(tool: Callable[[str], Tool], tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        server.wait_ready()
        admin = tool(url_of(server, "http"))
        for command, printed in PRINTED:
            assert admin(*command.split()).strip() == printed, command
        for command, reason in REFUSED:
            assert reason in admin(*command.split(), code=1), command
