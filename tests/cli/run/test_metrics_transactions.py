"""Transactions on the page of metrics: what happened is counted, and Pulsar's names have the same numbers."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from magnetar.broker.server import Broker
from magnetar.cli.run.metrics import PULSAR_TXN_METRICS, TXN_LATENCY_METRIC_PREFIX, MeasuredParts
from magnetar.client.client import Client
from magnetar.client.model.settings import ConsumerType, InitialPosition
from tests.broker.rest.http import Http, serving

ORDERS, BILLS = "persistent://public/default/orders", "persistent://public/default/bills"


class Shown:
    def __init__(self, text: str) -> None:
        self.text = text
        samples = [each for family in text_string_to_metric_families(text) for each in family.samples]
        keys = [(each.name, *sorted(each.labels.items())) for each in samples]
        assert len(keys) == len(set(keys)), "a sample is shown twice"
        self.samples = [(each.name, each.labels, each.value) for each in samples]

    def names(self) -> set[str]:
        return {name for name, _, _ in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum over all labels that are not given."""
        found = [value for known, those, value in self.samples if known == name and labels.items() <= those.items()]
        assert found, f"there is no {name} with {labels}"
        return sum(found)


async def page(http: Http, broker: Broker, *, pulsar: bool) -> Shown:
    broker.rest.measure = MeasuredParts(broker=broker, pulsar=pulsar)
    found = await http.ask("GET", "/metrics")
    assert found.status == 200, found.body
    return Shown(found.body.decode())


async def run_some(client: Client) -> None:
    """Two transactions that commit, one that is aborted, one that stays open: each with a message and an ack."""
    orders = await client.create_producer("orders")
    bills = await client.create_producer("bills")
    start = InitialPosition.Earliest
    consumer = await client.subscribe("bills", "s", ConsumerType.Shared, initial_position=start)
    for end in ("commit", "commit", "abort", ""):
        await bills.send(b"1")
        txn = await client.transaction()
        await orders.send(b"2", txn=txn)
        await consumer.acknowledge(await consumer.receive(), txn=txn)
        if end == "commit":
            await txn.commit(wait="visible")
        elif end:
            await txn.abort()
            await consumer.acknowledge(await consumer.receive())


async def test_what_transactions_did_is_counted_also_under_pulsars_names(tmp_path: Path) -> None:
    async with serving(tmp_path, cluster="c") as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await run_some(client)
        async with asyncio.timeout(20.0):  # until every topic has stored the abort
            while (shown := await page(http, broker, pulsar=True)).value("magnetar_transactions_settled_total") < 3:
                pass
        told = {name: shown.value(f"magnetar_transactions_{name}") for name in (
            "open", "prepared", "begun_total", "committed_total", "settled_total", "settle_failures_total",
            "seconds_count",
        )}  # fmt: skip
        assert told == {
            "open": 1, "prepared": 0, "begun_total": 4, "committed_total": 2, "settled_total": 3,
            "settle_failures_total": 0, "seconds_count": 3,
        }  # fmt: skip
        assert shown.value("magnetar_transactions_aborted_total", reason="client") == 1
        assert shown.value("magnetar_transactions_aborted_total") == 1
        assert shown.value("magnetar_transactions_oldest_seconds") > 0
        halves = [shown.value(f"magnetar_transactions_halves_{name}") for name in ("open", "parked", "bytes")]
        assert halves == [0, 0, 0], "numbers that can fall are gauges"
        assert shown.value("magnetar_topic_open_transactions", topic=ORDERS) == 1
        assert shown.value("magnetar_topic_committed_transactions_total", topic=ORDERS) == 2
        assert shown.value("magnetar_topic_aborted_transactions_total", topic=ORDERS) == 1
        assert shown.value("magnetar_topic_aborted_entries", topic=ORDERS) == 1
        assert shown.value("magnetar_topic_aborted_bytes", topic=ORDERS) > 0
        assert shown.value("magnetar_topic_waiting_messages", topic=ORDERS) == 1
        of_bills = {"topic": BILLS, "subscription": "s"}
        assert shown.value("magnetar_subscription_pending_entries", **of_bills) == 1
        assert shown.value("magnetar_subscription_pending_transactions", **of_bills) == 1

        for second in PULSAR_TXN_METRICS:
            labels = {"reason": "timeout"} if "timeout" in second.name else {}
            if not second.name.startswith(TXN_LATENCY_METRIC_PREFIX):
                assert shown.value(second.name) == sum(shown.value(ours, **labels) for ours in second.ours), second.name
        buckets = {name: shown.value(name) for name in shown.names() if name.startswith(TXN_LATENCY_METRIC_PREFIX)}
        assert len(buckets) == 14
        assert sum(buckets.values()) == 3, "each transaction is in one bucket"
        assert shown.value("pulsar_txn_active_count", cluster="c") == 1
        assert shown.value("pulsar_txn_tb_active_total", cluster="c", namespace="public/default", topic=ORDERS) == 1
        acked = {"namespace": "public/default", **of_bills, "status": "succeed"}
        assert shown.value("pulsar_txn_tp_committed_count_total", **acked) == 2
        ours = {name for name in shown.names() if name.startswith("pulsar_txn_")}
        foreign = {name for name in ours if not name.startswith(TXN_LATENCY_METRIC_PREFIX)}
        assert foreign == {
            second.name for second in PULSAR_TXN_METRICS if not second.name.startswith(TXN_LATENCY_METRIC_PREFIX)
        }

        plain = await page(http, broker, pulsar=False)
        assert not [name for name in plain.names() if name.startswith("pulsar_")]


@pytest.mark.parametrize("pulsar", [False, True])
async def test_a_topic_without_transactions_has_no_line_of_them(tmp_path: Path, pulsar: bool) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await (await client.create_producer("orders")).send(b"plain")
        shown = await page(http, broker, pulsar=pulsar)
        assert shown.value("magnetar_topic_messages_in_total", topic=ORDERS) == 1
        assert not [name for name in shown.names() if "transaction" in name or "_txn_" in name]
        assert "subscription_pending" not in shown.text, "not even a head"
