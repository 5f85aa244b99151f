"""`--metrics-compat pulsar`: what boards made for Pulsar ask for is shown with its labels, or listed as left out."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from magnetar.asyncio import Client
from magnetar.broker.node import survey
from magnetar.cli.run.metrics import MeasuredParts
from magnetar.cli.run.metrics_pulsar import OMITTED_METRICS, PULSAR_METRICS
from magnetar.client.admin import AdminClient
from magnetar.runtime.metrics import MetricsPage
from magnetar.runtime.metrics_server import format_metrics_page
from tests.support.cluster import cluster

TOPIC, SUBSCRIPTION = "cluster namespace topic", "cluster namespace topic subscription"
ASKED = {
    **dict.fromkeys(
        ("pulsar_rate_in", "pulsar_rate_out", "pulsar_throughput_in", "pulsar_throughput_out", "pulsar_msg_backlog",
         "pulsar_storage_size", "pulsar_storage_logical_size", "pulsar_subscriptions_count", "pulsar_producers_count",
         "pulsar_consumers_count", "pulsar_in_messages_total", "pulsar_in_bytes_total", "pulsar_out_messages_total",
         "pulsar_out_bytes_total", "pulsar_storage_write_rate", "pulsar_storage_read_rate",
         "pulsar_storage_read_latency_count"), TOPIC),
    **{f"pulsar_storage_write_latency_{each}": TOPIC for each in (
        "le_0_5", "le_1", "le_5", "le_10", "le_20", "le_50", "le_100", "le_200", "le_1000", "overflow", "count")},
    **{f"pulsar_entry_size_{each}": TOPIC for each in (
        "le_128", "le_512", "le_1_kb", "le_2_kb", "le_4_kb", "le_16_kb", "le_100_kb", "le_1_mb", "overflow")},
    **{f"pulsar_subscription_{each}": SUBSCRIPTION for each in (
        "back_log", "msg_rate_out", "msg_throughput_out", "unacked_messages", "msg_rate_redeliver")},
    **{f"pulsar_ml_cache_{each}": "cluster" for each in (
        "used_size", "hits_rate", "misses_rate", "hits_throughput", "misses_throughput", "evictions")},
    "pulsar_topics_count": "cluster namespace",
    "pulsar_instance_publish_latency": "cluster", "pulsar_broker_publish_latency": "cluster",
    "pulsar_lb_cpu_usage": "", "pulsar_lb_unload_broker_count": "", "pulsar_lb_bundles_split_total": "",
    "pulsar_sunit_state_chn_event_publish_ops_total": "", "pulsar_proxy_active_connections": "",
    "pulsar_replication_backlog": "", "caffeine_cache_hit_total": "", "jvm_memory_bytes_used": "",
    "zookeeper_server_requests": "", "kop_server_message_in": "",
}  # fmt: skip
"""What the boards ask for (overview, messaging, topic, broker), by name and the labels of their queries."""


def test_each_metric_of_pulsars_boards_is_shown_with_its_labels_or_listed_as_left_out() -> None:
    shown = {each.name: set(each.labels) for each in PULSAR_METRICS}
    for name, labels in ASKED.items():
        left = [beginning for beginning in OMITTED_METRICS if name.startswith(beginning)]
        assert (name in shown) != bool(left), name
        if name in shown:
            assert set(labels.split()) <= shown[name], name
    unasked = [each for each in OMITTED_METRICS if not any(name.startswith(each) for name in ASKED)]
    assert not unasked, "a row that no board asks for"


async def test_the_page_has_each_of_them_and_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "SURVEY_CACHE_S", 0.0)
    async with cluster(tmp_path) as running:
        broker = running.brokers[0]
        url = f"magnetar://{broker.endpoint}"
        async with AdminClient(url) as admin, Client(url) as client:
            await admin.create_topic("orders")
            await admin.create_subscription("orders", "billing")
            measured = MeasuredParts(broker=broker, pulsar=True)
            await measured(MetricsPage())
            producer = await client.create_producer("orders")
            for _ in range(3):
                await producer.send(b"x")
            consumer = await client.subscribe("orders", "billing")
            await consumer.acknowledge(await consumer.receive())
            for _ in range(500):
                if (await admin.topic_stats("orders")).subscriptions[0].backlog == 2:
                    break
                await asyncio.sleep(0.01)
            page = MetricsPage()
            await measured(page)
    text = b"".join(format_metrics_page(page)).decode()
    samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
    for row in PULSAR_METRICS:
        found = [each for each in samples if each.name == row.name]
        assert found, row.name
        assert set(found[0].labels) - {"quantile"} == set(row.labels), row.name
    values = {each.name: each.value for each in samples if each.name.startswith("pulsar_")}
    assert values["pulsar_in_messages_total"] == 3
    assert values["pulsar_rate_in"] > 0
    assert values["pulsar_msg_backlog"] == values["pulsar_subscription_back_log"] == 2
    assert values["pulsar_subscription_msg_rate_out"] > 0
    assert values["pulsar_topics_count"] == values["pulsar_producers_count"] == values["pulsar_consumers_count"] == 1


async def test_where_topics_are_not_shown_each_their_numbers_are_shown_per_namespace(tmp_path: Path) -> None:
    async with cluster(tmp_path, metrics_topics="namespace") as running:
        broker = running.brokers[0]
        async with AdminClient(f"magnetar://{broker.endpoint}") as admin:
            for number in range(3):
                await admin.create_topic(f"t{number}")
                await admin.create_subscription(f"t{number}", "s")
        page = MetricsPage()
        await MeasuredParts(broker=broker, pulsar=True)(page)
    text = b"".join(page.series_chunks()).decode()
    whose = '{cluster="magnetar",namespace="public/default"}'
    assert f"pulsar_topics_count{whose} 3\n" in text
    assert f"pulsar_subscriptions_count{whose} 3\n" in text
    assert "pulsar_rate_in{" in text
    assert not [each for each in text.splitlines() if each.startswith("pulsar_") and "topic=" in each]
