"""Pulsar's names for the metrics of topics, subscriptions and brokers, for boards made for Pulsar (`--metrics-compat
pulsar`); those of transactions are in metrics.py.

`PULSAR_METRICS` is the table, docs/metrics.md shows it; `OMITTED_METRICS` are names that such boards ask for and that
stay empty here, with the reason. Rates are gauges, as in Pulsar: of topics between the last two walks
(broker/node/survey.py), of subscriptions since the page before. Where topics are not shown each (`metrics_topics`),
their numbers are shown per namespace, without the label `topic`, as Pulsar does then. Guarding test:
tests/cli/run/test_metrics_pulsar.py. """

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...runtime.metrics import RecentQuantiles, format_labels

if TYPE_CHECKING:
    from ...broker.node.survey import LoadedTopicsSurvey
    from ...broker.node.topic_manager import TopicManager
    from ...broker.topic.topic import Topic
    from ...runtime.metrics import MetricSeries, MetricsPage, MetricsQuery

PUBLISH_QUANTILES = ("0.5", "0.99", "0.999", "1.0")
TOPIC_LABELS, NAMESPACE_LABELS = ("cluster", "namespace", "topic"), ("cluster", "namespace")
SUBSCRIPTION_LABELS, BROKER_LABELS = ("cluster", "namespace", "topic", "subscription"), ("cluster",)


_Add = Callable[[str, str, float], None]
_Look = tuple[float, int, int, int]
"""When, and what a subscription had delivered: messages, bytes, messages delivered again."""


class PulsarNamedMetric(NamedTuple):
    """A metric under Pulsar's name, with the names of its labels, and the name of our metric that has the same number.
    `note`: the unit, or how the number differs."""

    name: str
    labels: tuple[str, ...]
    ours: str
    note: str = ""


_RATE = "a second, between two looks"
PULSAR_METRICS = (
    PulsarNamedMetric("pulsar_topics_count", NAMESPACE_LABELS, "magnetar_namespace_topics"),
    PulsarNamedMetric("pulsar_rate_in", TOPIC_LABELS, "magnetar_topic_messages_in_total", _RATE),
    PulsarNamedMetric("pulsar_rate_out", TOPIC_LABELS, "magnetar_topic_messages_out_total", _RATE),
    PulsarNamedMetric("pulsar_throughput_in", TOPIC_LABELS, "magnetar_topic_bytes_in_total", _RATE),
    PulsarNamedMetric("pulsar_throughput_out", TOPIC_LABELS, "magnetar_topic_bytes_out_total", _RATE),
    PulsarNamedMetric("pulsar_in_messages_total", TOPIC_LABELS, "magnetar_topic_messages_in_total"),
    PulsarNamedMetric("pulsar_in_bytes_total", TOPIC_LABELS, "magnetar_topic_bytes_in_total"),
    PulsarNamedMetric("pulsar_out_messages_total", TOPIC_LABELS, "magnetar_topic_messages_out_total"),
    PulsarNamedMetric("pulsar_out_bytes_total", TOPIC_LABELS, "magnetar_topic_bytes_out_total"),
    PulsarNamedMetric("pulsar_msg_backlog", TOPIC_LABELS, "magnetar_subscription_backlog_messages",
               "of all subscriptions, in messages; Pulsar counts entries"),
    PulsarNamedMetric("pulsar_storage_size", TOPIC_LABELS, "magnetar_topic_storage_bytes", "one copy"),
    PulsarNamedMetric("pulsar_storage_logical_size", TOPIC_LABELS, "magnetar_topic_storage_bytes"),
    PulsarNamedMetric("pulsar_subscriptions_count", TOPIC_LABELS, "magnetar_broker_subscriptions", "durable ones"),
    PulsarNamedMetric("pulsar_producers_count", TOPIC_LABELS, "magnetar_topic_producers"),
    PulsarNamedMetric("pulsar_consumers_count", TOPIC_LABELS, "magnetar_subscription_consumers"),
    PulsarNamedMetric("pulsar_subscription_back_log", SUBSCRIPTION_LABELS, "magnetar_subscription_backlog_messages",
               "in messages; Pulsar counts entries"),
    PulsarNamedMetric("pulsar_subscription_msg_rate_out", SUBSCRIPTION_LABELS,
        "magnetar_subscription_messages_out_total",
    _RATE),
    PulsarNamedMetric("pulsar_subscription_msg_throughput_out", SUBSCRIPTION_LABELS,
    "magnetar_subscription_messages_out_total",
               "bytes a second, between two looks"),
    PulsarNamedMetric("pulsar_subscription_msg_rate_redeliver", SUBSCRIPTION_LABELS,
               "magnetar_subscription_redelivered_messages_total", _RATE),
    PulsarNamedMetric("pulsar_subscription_unacked_messages", SUBSCRIPTION_LABELS,
    "magnetar_subscription_unacked_messages"),
    PulsarNamedMetric("pulsar_subscription_delayed", SUBSCRIPTION_LABELS, "magnetar_subscription_delayed_messages"),
    PulsarNamedMetric("pulsar_subscription_consumers_count", SUBSCRIPTION_LABELS, "magnetar_subscription_consumers"),
    PulsarNamedMetric("pulsar_ml_cache_used_size", BROKER_LABELS, "magnetar_broker_cache_bytes"),
    PulsarNamedMetric("pulsar_instance_publish_latency", BROKER_LABELS, "magnetar_broker_publish_seconds",
               "ms, of the last one or two minutes; with the label `quantile`"),
    PulsarNamedMetric("pulsar_broker_publish_latency", BROKER_LABELS, "magnetar_broker_publish_seconds",
        "its newer name"),
)  # fmt: skip
"""With `metrics_topics` other than for each topic, those of topics have no label `topic`."""

OMITTED_METRICS = {
    "pulsar_storage_write_latency_": "buckets per topic: the publish latency of the broker has quantiles",
    "pulsar_entry_size_": "sizes of entries are counted by bookies: magnetar_bookie_add_entry_bytes",
    "pulsar_storage_write_rate": "entries are counted by bookies: magnetar_bookie_adds_total",
    "pulsar_storage_read_": "entries are counted by bookies: magnetar_bookie_reads_total",
    "pulsar_ml_cache_hits_": "not counted: it would be work for each read",
    "pulsar_ml_cache_misses_": "not counted: it would be work for each read",
    "pulsar_ml_cache_evictions": "not counted: it would be work for each entry",
    "pulsar_lb_": "the load balancer of Pulsar",
    "pulsar_sunit_state_chn_": "the load balancer of Pulsar",
    "pulsar_proxy_": "there is no proxy", "pulsar_replication_": "there is no geo-replication",
    "caffeine_": "a library of Pulsar", "jvm_": "there is no Java", "zookeeper_": "its own metrics have it",
    "kop_": "there is no Kafka protocol",
}  # fmt: skip
"""Beginnings of names that boards ask for, and why there is none."""


CACHED_QUERIES_MAX = 4
"""Queries of which what was shown is kept: of the usual page, and of slower jobs."""


class PulsarMetricWriter:
    """Adds the metrics of topics, subscriptions and the broker to a page under Pulsar's names. Each process has one
    such object, which stores the last counters of subscriptions to compute their rates."""

    def __init__(self) -> None:
        self._recent = RecentQuantiles()
        self._before: dict[MetricsQuery, dict[tuple[str, str], _Look]] = {}  # by what the page asked for

    def add(
        self,
        page: MetricsPage,
        broker: TopicManager,
        survey: LoadedTopicsSurvey,
        topics: Sequence[Topic],
        *,
        each: bool,
    ) -> None:
        """Adds the metrics under Pulsar's names to the page. `each`: `topics` are all loaded topics, and each topic
        gets its own metrics; otherwise only sums per namespace are added. `survey` has these sums."""
        from ...broker.node.survey import measure_topic

        cluster = broker.config.cluster
        made: dict[str, MetricSeries] = {}

        def add(name: str, whose: str, value: float) -> None:
            found = made.get(name)
            if found is None:
                found = made[name] = page.add_series(name, "untyped", HELP_BY_METRIC[name], ours=False)
            found.add(whose, value)

        for namespace, sums in survey.namespaces.items():
            whose = format_labels(cluster=cluster, namespace=namespace)
            add("pulsar_topics_count", whose, sums.topics)
            if not each:
                rates = (sums.rate_in, sums.rate_out, sums.throughput_in, sums.throughput_out)
                totals = (sums.messages_in, sums.bytes_in, sums.messages_out, sums.bytes_out)
                counts = (sums.subscriptions, sums.producers, sums.consumers)
                _of_topic(add, whose, rates, totals, (sums.backlog, sums.storage_bytes), counts)
        shown: dict[tuple[str, str], _Look] = {}
        before = self._before.pop(page.query, {})
        for topic in topics if each else ():
            facts, traffic = measure_topic(topic), topic.traffic
            labels = {"cluster": cluster, "namespace": str(topic.name.namespace_name), "topic": topic.name.full}
            rates = facts.rates.messages_in, facts.rates.messages_out, facts.rates.bytes_in, facts.rates.bytes_out
            totals = (traffic.messages_in, traffic.bytes_in, traffic.messages_out, traffic.bytes_out)
            durable = [one for one in topic.subscriptions.values() if one.is_durable]
            consumers = sum(len(one.consumers) for one in topic.subscriptions.values())
            counts = (len(durable), len(topic.producers), consumers)
            _of_topic(add, format_labels(**labels), rates, totals, (facts.backlog, topic.log.shape.size), counts)
            for one in durable:
                key = topic.name.full, one.name
                shown[key] = (broker.world.clock.monotonic(), *one.deliveries)
                _of_subscription(add, format_labels(**labels, subscription=one.name), topic, one.name,
                                 before.get(key, shown[key]), shown[key])  # fmt: skip
        self._before[page.query] = shown
        if len(self._before) > CACHED_QUERIES_MAX:
            del self._before[next(iter(self._before))]
        add("pulsar_ml_cache_used_size", format_labels(cluster=cluster), broker.cache.bytes)
        histogram, now_s = broker.publish_seconds, broker.world.clock.monotonic()
        found = self._recent.compute_quantiles(
            "publish", histogram, now_s, [float(share) for share in PUBLISH_QUANTILES]
        )
        millis = {share: 1000 * value for share, value in zip(PUBLISH_QUANTILES, found, strict=True)}
        for name in ("pulsar_instance_publish_latency", "pulsar_broker_publish_latency"):
            page.add_summary_of_other_system(
                name, HELP_BY_METRIC[name], histogram.count, 1000 * histogram.total, millis, cluster=cluster
            )


def _of_topic(
    add: _Add, whose: str, rates: Sequence[float], totals: Sequence[int], held: tuple[int, int], counts: Sequence[int]
) -> None:
    for name, rate in zip(("rate_in", "rate_out", "throughput_in", "throughput_out"), rates, strict=True):
        add(f"pulsar_{name}", whose, rate)
    for name, total in zip(("in_messages", "in_bytes", "out_messages", "out_bytes"), totals, strict=True):
        add(f"pulsar_{name}_total", whose, total)
    for name, count in zip(("subscriptions", "producers", "consumers"), counts, strict=True):
        add(f"pulsar_{name}_count", whose, count)
    backlog, size = held
    add("pulsar_msg_backlog", whose, backlog)
    add("pulsar_storage_size", whose, size)
    add("pulsar_storage_logical_size", whose, size)


def _of_subscription(add: _Add, whose: str, topic: Topic, name: str, before: _Look, now: _Look) -> None:
    from ...broker.topic.statistics import estimate_backlog

    found, passed_s = topic.subscriptions[name], max(now[0] - before[0], 0.001)
    rates = [(new - old) / passed_s for new, old in zip(now[1:], before[1:], strict=True)]
    for kind, rate in zip(("msg_rate_out", "msg_throughput_out", "msg_rate_redeliver"), rates, strict=True):
        add(f"pulsar_subscription_{kind}", whose, rate)
    add("pulsar_subscription_back_log", whose, estimate_backlog(topic.log, found))
    add("pulsar_subscription_unacked_messages", whose, found.dispatcher.unacked)
    add("pulsar_subscription_delayed", whose, 0 if found.delayed is None else found.delayed.core.count)
    add("pulsar_subscription_consumers_count", whose, len(found.consumers))


HELP_BY_METRIC = {each.name: f"Pulsar's name of {each.ours}." for each in PULSAR_METRICS}
