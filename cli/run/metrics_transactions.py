"""Transactions on the page of metrics: each coordinator that the broker has, and topics that have seen transactions.

    magnetar_transactions_…    per coordinator (label `coordinator`), since its take-over; `aborted` by `reason`
    magnetar_topic_…, magnetar_subscription_…    only of topics that have seen a transaction

With `--metrics-compat pulsar` the same numbers also under Pulsar's names, for boards made for Pulsar; `PULSAR` is the
table, docs/operations.md shows it. Guarding test: tests/cli/run/test_metrics_transactions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...runtime.metrics import Histogram, escape_label

if TYPE_CHECKING:
    from ...broker.subscription.subscription import Subscription
    from ...broker.topic.topic import Topic
    from ...broker.transaction.coordinator import RunningCoordinator
    from ...runtime.metrics import MetricSeries, MetricsPage

GAUGES = frozenset({
    "halves_bytes", "halves_open", "halves_parked", "leased", "open", "prepared", "settling_topics", "unsettled",
})  # fmt: skip
LATENCY = "pulsar_txn_execution_latency_le_"


class PulsarTxnMetric(NamedTuple):
    """A metric under Pulsar's name. Its value is computed from our metrics with the names `ours`; `note` says which
    part of them counts, or how the value differs."""

    name: str
    ours: tuple[str, ...]
    note: str = ""


PULSAR = (
    PulsarTxnMetric("pulsar_txn_active_count", ("magnetar_transactions_open", "magnetar_transactions_prepared")),
    PulsarTxnMetric("pulsar_txn_created_total", ("magnetar_transactions_begun_total",), "by its first use"),
    PulsarTxnMetric("pulsar_txn_committed_total", ("magnetar_transactions_committed_total",)),
    PulsarTxnMetric("pulsar_txn_aborted_total", ("magnetar_transactions_aborted_total",), "for whatever reason"),
    PulsarTxnMetric("pulsar_txn_timeout_total", ("magnetar_transactions_aborted_total",), "`reason` is `timeout`"),
    PulsarTxnMetric("pulsar_txn_append_log_total", ("magnetar_transactions_records_total",),
        "begins and joins write no record"),
    PulsarTxnMetric(LATENCY + "10", ("magnetar_transactions_seconds",),
        "up to 10 ms; and `…_20` to `…_3000000`, `…_overflow`: those above the bound before"),
    PulsarTxnMetric("pulsar_txn_tb_active_total", ("magnetar_topic_open_transactions",)),
    PulsarTxnMetric("pulsar_txn_tb_committed_total", ("magnetar_topic_committed_transactions_total",)),
    PulsarTxnMetric("pulsar_txn_tb_aborted_total", ("magnetar_topic_aborted_transactions_total",)),
    PulsarTxnMetric("pulsar_txn_tp_committed_count_total", ("magnetar_subscription_committed_transactions_total",),
        "`status` is `succeed`: one that fails is done again"),
    PulsarTxnMetric("pulsar_txn_tp_aborted_count_total", ("magnetar_subscription_aborted_transactions_total",),
        "likewise"),
)  # fmt: skip


def add_coordinator_metrics(page: MetricsPage, loaded: Sequence[RunningCoordinator], cluster: str | None) -> None:
    """Adds the metrics of transaction coordinators to the page. `cluster`: the cluster label of the metrics under
    Pulsar's names; None: no metrics under Pulsar's names are added."""
    from ...broker.transaction.intents_core import LASTED_S  # there is a broker, so it is loaded

    for each in loaded:
        number, aborted, numbers = str(each.number), each.aborts_by_reason(), each.statistics()
        numbers.pop("aborted")  # by reason instead
        page.add_statistics("transactions", numbers, gauges=GAUGES, coordinator=number)
        for reason, count in aborted.items():
            page.add_counter(
                "magnetar_transactions_aborted_total", "Transactions: aborted.", count, coordinator=number,
                reason=reason,
            )  # fmt: skip
        page.add_gauge(
            "magnetar_transactions_oldest_seconds", "Transactions: how long the oldest open one is open; 0: none.",
            each.oldest_open_s, coordinator=number,
        )  # fmt: skip
        lasted = Histogram(LASTED_S, *each.duration_histogram())
        page.add_histogram(
            "magnetar_transactions_seconds", "Transactions: from the first use to the outcome.", lasted,
            coordinator=number,
        )  # fmt: skip
        if cluster is not None:
            _pulsars(page, cluster, number, numbers, aborted, lasted)


def _pulsars(
    page: MetricsPage, cluster: str, number: str, numbers: dict[str, int], aborted: dict[str, int], lasted: Histogram
) -> None:
    found: dict[str, float] = {
        "active_count": numbers["open"] + numbers["prepared"], "created_total": numbers["begun"],
        "committed_total": numbers["committed"], "aborted_total": sum(aborted.values()),
        "timeout_total": aborted["timeout"], "append_log_total": numbers["records"],
    }  # fmt: skip
    shown = {f"pulsar_txn_{name}": value for name, value in found.items()}
    bounds = (*(f"{round(1000 * bound)}" for bound in lasted.bounds), "overflow")
    shown |= {LATENCY + bound: count for bound, count in zip(bounds, lasted.counts, strict=True)}
    for name, value in shown.items():
        page.add_foreign(name, "Pulsar's name: transactions.", value, cluster=cluster, coordinator_id=number)


TOPIC_SERIES = {
    "topic_open_transactions": "Topic: transactions that have not ended.",
    "topic_oldest_transaction_seconds": "Topic: age of the oldest open transaction.",
    "topic_waiting_messages": "Topic: after the last stable position.",
    "topic_committed_transactions_total": "Topic: transactions that were committed.",
    "topic_aborted_transactions_total": "Topic: transactions that were aborted.",
    "topic_aborted_entries": "Topic: entries of aborted transactions.",
    "topic_aborted_bytes": "Topic: bytes of aborted transactions.",
    "subscription_pending_transactions": "Subscription: open transactions that have acknowledged something.",
    "subscription_pending_entries": "Subscription: acknowledged in open transactions.",
    "subscription_committed_transactions_total": "Subscription: transactions whose acknowledgements count.",
    "subscription_aborted_transactions_total": "Subscription: transactions whose acknowledgements are void.",
}


class TopicTransactionSeries:
    """Adds the transaction metrics of topics to the page. Creates the series at the first topic that has seen a
    transaction, so that a topic without transactions costs almost nothing. `cluster`: the cluster label of metrics
    under Pulsar's names; None: these are not added."""

    def __init__(self, page: MetricsPage, cluster: str | None) -> None:
        self._page, self._cluster = page, cluster
        self._made: dict[str, MetricSeries] = {}

    def add(self, topic: Topic, whose: str) -> None:
        """Adds the metrics of a topic and of its durable subscriptions, if the topic has seen a transaction. `whose`:
        the topic's labels, as text of the page."""
        found = topic.transactions.statistics()
        if found is None:
            return
        if not self._made:
            for name, help in TOPIC_SERIES.items():
                kind = "counter" if name.endswith("_total") else "gauge"
                self._made[name] = self._page.add_series(f"magnetar_{name}", kind, help)
        self._lines("topic", whose, {
            "open_transactions": found.open, "oldest_transaction_seconds": found.oldest_ms / 1000,
            "waiting_messages": topic.log.shape.end_index - found.stable_index,
            "committed_transactions_total": found.commits, "aborted_transactions_total": found.aborts,
            "aborted_entries": found.aborted_entries, "aborted_bytes": found.aborted_bytes,
        })  # fmt: skip
        if self._cluster is not None:
            shown = {"active": found.open, "committed": found.commits, "aborted": found.aborts}
            namespace, name = str(topic.name.namespace_name), topic.name.full
            for kind, value in shown.items():
                self._page.add_foreign(
                    f"pulsar_txn_tb_{kind}_total", "Pulsar's name: transactions of a topic.", value,
                    cluster=self._cluster, namespace=namespace, topic=name,
                )  # fmt: skip
        for each in topic.subscriptions.values():
            if each.is_durable:
                self._subscription(topic, each)

    def _lines(self, part: str, whose: str, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._made[f"{part}_{name}"].add(whose, value)

    def _subscription(self, topic: Topic, found: Subscription) -> None:
        whose = f'{{subscription="{escape_label(found.name)}",topic="{escape_label(topic.name.full)}"}} '
        pending = found.cursor.pending
        self._lines("subscription", whose, {
            "pending_transactions": len(pending.of) if pending is not None else 0,
            "pending_entries": pending.entry_count if pending is not None else 0,
            "committed_transactions_total": found.commits, "aborted_transactions_total": found.aborts,
        })  # fmt: skip
        if self._cluster is not None:
            for kind, value in (("committed", found.commits), ("aborted", found.aborts)):
                self._page.add_foreign(
                    f"pulsar_txn_tp_{kind}_count_total", "Pulsar's name: acknowledgements in transactions.", value,
                    namespace=str(topic.name.namespace_name), topic=topic.name.full, subscription=found.name,
                    status="succeed",
                )  # fmt: skip
