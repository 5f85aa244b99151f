"""The pages of several processes as one: a group for each metric, and on each series whose it is."""

from prometheus_client.parser import text_string_to_metric_families

from magnetar.runtime.metrics import DURATION_BOUNDS, Histogram, MetricsPage, format_labels
from magnetar.runtime.metrics_server import format_metrics_page


def _page(topic: str, count: int) -> MetricsPage:
    page, seconds = MetricsPage(), Histogram(DURATION_BOUNDS)
    seconds.observe_value(0.02)
    page.add_counter("magnetar_a_total", "A.", count)
    page.add_gauge("magnetar_g", "G.", count, topic=topic)
    page.add_histogram("magnetar_h_seconds", "H.", seconds)
    page.add_series("magnetar_s", "gauge", "S.").add(format_labels(topic=topic), count)
    return page


def test_every_series_has_its_process_and_every_metric_one_group() -> None:
    first, other = _page('odd {"topic"} ', 1), _page("t", 2)
    first.process = "broker-1"
    first.others = {"storage": b"".join(format_metrics_page(other)), "late": b""}
    text = b"".join(format_metrics_page(first)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert text.count("# TYPE magnetar_g gauge") == text.count("# HELP magnetar_a_total") == 1
    counted = {sample.labels["process"]: sample.value for sample in families["magnetar_a"].samples}
    assert counted == {"broker-1": 1, "storage": 2}
    shown = [(sample.labels, sample.value) for sample in families["magnetar_s"].samples]
    assert shown == [
        ({"process": "broker-1", "topic": 'odd {"topic"} '}, 1), ({"process": "storage", "topic": "t"}, 2),
    ]  # fmt: skip
    assert {sample.labels["process"] for sample in families["magnetar_h_seconds"].samples} == {"broker-1", "storage"}
    assert not any("process" not in sample.labels for family in families.values() for sample in family.samples)


def test_a_server_of_one_process_has_no_such_label() -> None:
    assert b"process=" not in b"".join(format_metrics_page(_page("t", 1)))
