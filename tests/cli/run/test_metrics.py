"""`--metrics`: what Prometheus reads is what happened; off by default."""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import magnetar
from magnetar.cli.common.processes import Process, Processes
from magnetar.cli.run import metrics as metrics
from tests.docs.documents import ROOT
from tests.docs.metrics import stale
from tests.support.processes import run_cli, run_here

pytestmark = pytest.mark.processes

TOPIC = "persistent://public/default/orders"
Key = tuple[str, tuple[tuple[str, str], ...]]


class Scrape:
    def __init__(self, where: str) -> None:
        with urllib.request.urlopen(f"http://{where}/metrics", timeout=30) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain")
            self.families = list(text_string_to_metric_families(reply.read().decode()))
        self.values: dict[Key, float] = {}
        self.rising: dict[Key, float] = {}
        for family in self.families:
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in self.values, f"{key} is shown twice"
                self.values[key] = sample.value
                if family.type in ("counter", "histogram"):
                    self.rising[key] = sample.value

    def value(self, name: str, **labels: str) -> float:
        """The sum over all labels that are not given."""
        found = [
            value for (known, those), value in self.values.items()
            if known == name and labels.items() <= dict(those).items()
        ]  # fmt: skip
        assert found, f"there is no {name} with {labels}"
        return sum(found)


def facts(server: Process) -> dict[str, str]:
    server.wait_ready()
    return dict(word.split("=", 1) for word in server.lines[0].split()[2:])


@pytest.fixture
def server(started: Processes, tmp_path: Path) -> Process:
    return started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--bookies", "2", "--metrics", "0"
    )


def test_what_was_published_and_synced_is_counted_and_counters_never_fall(server: Process) -> None:
    where, url = facts(server)["metrics"], server.wait_ready()
    assert where.startswith("127.0.0.1:"), "loopback unless somebody says otherwise"
    run_here("topics", "create", "orders", "--url", url)
    run_here("topics", "create-subscription", "orders", "-s", "billing", "--url", url)
    run_here("produce", "others", "-m", "x", "--url", url)  # before that the broker has no peers
    before = Scrape(where)
    assert before.value("magnetar_topic_messages_in_total", topic=TOPIC) == 0
    assert run_here("produce", "orders", "-m", "x", "-n", "500", "--url", url).code == 0
    between = Scrape(where)
    assert run_here("consume", "orders", "-s", "billing", "-n", "500", "--url", url).code == 0
    after = Scrape(where)

    assert after.value("magnetar_topic_messages_in_total", topic=TOPIC) == 500
    assert after.value("magnetar_topic_bytes_in_total") >= 500
    assert after.value("magnetar_topic_messages_out_total") == 500
    billing = {"topic": TOPIC, "subscription": "billing"}
    scrapes = (before, between, after)
    assert [each.value("magnetar_subscription_backlog_messages", **billing) for each in scrapes] == [0, 500, 0]
    assert after.value("magnetar_broker_backlogs_missing") == 0
    assert after.value("magnetar_broker_publish_seconds_count") > 0
    assert after.value("magnetar_bookie_adds_total") > before.value("magnetar_bookie_adds_total")
    assert after.value("magnetar_broker_peer_requests_total") > before.value("magnetar_broker_peer_requests_total")
    for scrape in scrapes:
        blocks = scrape.value("magnetar_bookie_journal_blocks_total")
        assert scrape.value("magnetar_bookie_journal_sync_seconds_count") == blocks
    assert after.value("magnetar_bookie_journal_blocks_total") > before.value("magnetar_bookie_journal_blocks_total")
    assert after.value("magnetar_metadata_commits_total") > 0

    assert {family.name for family in before.families} <= {family.name for family in after.families}
    assert all(name.startswith("magnetar_") for name, _ in after.values)
    assert len({dict(labels)["bookie"] for _, labels in after.values if dict(labels).get("bookie")}) == 2
    fallen = {key for key, value in before.rising.items() if after.rising[key] < value}
    assert not fallen, "a number that falls is a gauge: name it in cli/run/metrics.py"
    assert server.stop() == 0
    assert "Traceback" not in server.output()


def test_each_gauge_is_a_number_that_its_part_has(server: Process) -> None:
    run_here("produce", "orders", "-m", "x", "--url", server.wait_ready())
    shown = {name for name, _ in Scrape(facts(server)["metrics"]).values}
    tables = {
        "metadata": metrics.METADATA_GAUGES, "bookie": metrics.BOOKIE_GAUGES,
        "broker_cache": metrics.CACHE_GAUGES, "broker_peer": metrics.PEER_GAUGES,
    }  # fmt: skip
    assert {f"magnetar_{part}_{name}" for part, names in tables.items() for name in names} <= shown


def test_the_metrics_that_the_storage_document_names_are_there(server: Process) -> None:
    shown = {name for name, _ in Scrape(facts(server)["metrics"]).values}
    shown |= {name.removesuffix("_count") for name in shown}
    told = re.findall(r"`(magnetar_bookie_\w+)`", (ROOT / "docs/design/storage.md").read_text(encoding="utf-8"))
    assert len(told) > 10
    assert not set(told) - shown


def test_the_list_of_all_metrics_is_that_of_a_page(server: Process) -> None:
    where, url = facts(server)["metrics"], server.wait_ready()
    with magnetar.Client(url) as client:
        consumer = client.subscribe("orders", "billing", magnetar.ConsumerType.Shared)
        producer = client.create_producer("orders")
        producer.send(b"a")
        with client.transaction() as txn:
            producer.send(b"b", txn=txn)
            consumer.acknowledge(consumer.receive(10000), txn=txn)
        open_one = client.transaction()
        producer.send(b"c", txn=open_one)
        with magnetar.admin.Admin(url) as admin:
            admin.set_tenant_policies("public", magnetar.admin.Policies(tenant_publish_rate_messages=1000))
        with urllib.request.urlopen(f"http://{where}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        open_one.abort()
    recorded = "MAGNETAR_RECORD" in os.environ
    assert not stale(page, write=recorded) or recorded, "MAGNETAR_RECORD=1 writes it"


def test_what_a_broker_has_and_uses_of_a_limit_in_sum_is_shown_and_how_often_something_waited(server: Process) -> None:
    where, url = facts(server)["metrics"], server.wait_ready()
    labels = {"place": "public/limited", "policy": "namespace_publish_rate_messages"}
    with magnetar.Client(url) as client, magnetar.admin.Admin(url) as admin:
        admin.create_namespace("public/limited")
        admin.set_namespace_policies("public/limited", magnetar.admin.Policies(namespace_publish_rate_messages=2))
        producer = client.create_producer("public/limited/t", batching_enabled=False)
        for _ in range(4):
            producer.send(b"a")
        page = Scrape(where)
    assert page.value("magnetar_broker_shared_limit_share", **labels) == 1
    assert page.value("magnetar_broker_shared_limit_throttled_total", **labels) > 0


def test_the_age_of_the_last_copy_of_the_metadata_is_shown_also_after_a_restart_and_when_the_copy_was_moved(
    started: Processes, tmp_path: Path
) -> None:
    data = tmp_path / "m"
    service = ("metadata", "--listen", "127.0.0.1:0", "--data", str(data), "--metrics", "127.0.0.1:0")
    metadata, name = started.start("m", *service), "magnetar_metadata_backup_age_seconds"
    assert not any(shown == name for shown, _ in Scrape(facts(metadata)["metrics"]).values)
    done = run_here("metadata", "backup", "-o", "json", MAGNETAR_METADATA=metadata.address)
    (data / Path(json.loads(done.out)[0]["file"]).name).rename(tmp_path / "elsewhere")
    assert 0 <= Scrape(facts(metadata)["metrics"]).value(name) < 30
    metadata.stop()
    (note,) = data.glob("*-backed-up")
    os.utime(note, (note.stat().st_mtime - 1000,) * 2)
    metadata.start()
    assert 1000 <= Scrape(facts(metadata)["metrics"]).value(name) < 1060


def test_each_process_of_a_cluster_shows_its_own_part(started: Processes, tmp_path: Path) -> None:
    metadata = started.start(
        "m", "metadata", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "m"), "--metrics", "127.0.0.1:0"
    )
    page = Scrape(facts(metadata)["metrics"])
    assert page.value("magnetar_metadata_sessions") == 1, "its own, which follows the log level"
    assert 0 < page.value("magnetar_metadata_disk_free_bytes") <= page.value("magnetar_metadata_disk_total_bytes")
    common = ("--listen", "127.0.0.1:0", "--metadata", metadata.address, "--metrics", "0")
    bookie = started.start("b", "bookie", *common, "--data", str(tmp_path / "b"))
    assert Scrape(facts(bookie)["metrics"]).value("magnetar_bookie_read_only", bookie=facts(bookie)["id"]) == 0
    broker = started.start("r", "broker", *common)
    assert Scrape(facts(broker)["metrics"]).value("magnetar_broker_topics") == 0


def test_a_taken_port_is_busy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_cli("standalone", "--port", "0", "--data", str(tmp_path / "data"), "--metrics", port)
    assert done.code == 5
    assert f"cannot listen on 127.0.0.1:{port}" in done.err
    assert "ready" not in done.out


def test_it_is_off_by_default_and_costs_no_import(started: Processes, tmp_path: Path) -> None:
    server = started.start("s", "standalone", "--port", "0", "--data", str(tmp_path / "data"))
    assert "metrics" not in facts(server)
    modules = ("cli.run.standalone", "cli.run.metrics", "runtime.metrics", "broker.server")
    text = "import sys, " + ", ".join(f"magnetar.{each}" for each in modules)
    text += "; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False, timeout=60).returncode == 0


def test_each_share_of_memory_is_shown_with_its_limit_and_all_are_within_the_setting(
    started: Processes, tmp_path: Path
) -> None:
    budget = 160 << 20
    server = started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--metrics", "0",
        "--memory-bytes", str(budget),
    )  # fmt: skip
    run_here("produce", "orders", "-m", "x", "-n", "100", "--url", server.wait_ready())
    scrape = Scrape(facts(server)["metrics"])
    assert scrape.value("magnetar_process_memory_bytes") == budget
    limits, used = (
        {dict(labels)["share"]: value for (name, labels), value in scrape.values.items() if name == wanted}
        for wanted in ("magnetar_process_memory_share_limit_bytes", "magnetar_process_memory_share_bytes")
    )
    assert 0.9 * budget < sum(limits.values()) <= budget
    assert limits.keys() - used.keys() == {"compaction", "repair"}
    assert used["tail-cache"] > 0
    assert used["memtables"] > 0
    assert all(used[share] <= limits[share] for share in used)


def test_a_process_without_the_memory_that_it_needs_does_not_start(tmp_path: Path) -> None:
    done = run_cli("standalone", "--port", "0", "--data", str(tmp_path / "data"), "--memory-bytes", str(50 << 20))
    assert done.code == 2
    assert "memory_bytes is 50 MiB; this process needs 88 MiB at least" in done.err
    file = tmp_path / "magnetar.toml"
    file.write_text("[process]\nmemory_bytes = 268435456\n[broker]\ncache_bytes = 300000000\n")
    done = run_cli("standalone", "--port", "0", "--data", str(tmp_path / "data"), "--config", str(file))
    assert done.code == 2
    assert "broker.cache_bytes = 300000000 (287 MiB)" in done.err
