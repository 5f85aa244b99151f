"""Metrics: what is counted is what Prometheus reads."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from magnetar.runtime.metrics import (
    DURATION_BOUNDS,
    QUANTILE_WINDOW_S,
    Histogram,
    MetricsPage,
    RecentQuantiles,
    format_labels,
)


def text(page: MetricsPage) -> str:
    registry = CollectorRegistry()
    registry.register(page)
    return generate_latest(registry).decode()


def shown(page: MetricsPage) -> dict[str, float]:
    lines = text(page).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_a_family_has_one_help_text_and_a_sample_for_each_set_of_labels() -> None:
    page = MetricsPage()
    page.add_counter("magnetar_published_total", "Entries.", 3, topic="a")
    page.add_counter("magnetar_published_total", "Entries.", 5, topic="b")
    page.add_gauge("magnetar_topics", "Owned.", 2)
    assert shown(page) == {
        'magnetar_published_total{topic="a"}': 3,
        'magnetar_published_total{topic="b"}': 5,
        "magnetar_topics": 2,
    }
    assert text(page).count("# HELP magnetar_published_total Entries.") == 1


def test_statistics_are_counters_unless_they_are_said_to_be_gauges() -> None:
    page = MetricsPage()
    page.add_statistics("tail_cache", {"hits": 4, "bytes": 9}, gauges={"bytes"}, broker="b")
    assert shown(page) == {'magnetar_tail_cache_hits_total{broker="b"}': 4, 'magnetar_tail_cache_bytes{broker="b"}': 9}
    assert "# HELP magnetar_tail_cache_hits_total Tail cache: hits." in text(page)


def test_a_histogram_counts_each_value_in_its_bucket_and_shows_sums() -> None:
    histogram = Histogram((0.5, 1, 2))
    for value in (0.1, 0.5, 0.6, 2.0, 2.1):
        histogram.observe_value(value)
    assert histogram.counts == [2, 1, 1, 1]
    page = MetricsPage()
    page.add_histogram("magnetar_sync_seconds", "Sync.", histogram)
    assert shown(page) == {
        'magnetar_sync_seconds_bucket{le="0.5"}': 2,
        'magnetar_sync_seconds_bucket{le="1"}': 3,
        'magnetar_sync_seconds_bucket{le="2"}': 4,
        'magnetar_sync_seconds_bucket{le="+Inf"}': 5,
        "magnetar_sync_seconds_count": 5,
        "magnetar_sync_seconds_sum": pytest.approx(5.3),
    }


def test_quantiles_are_of_the_last_minute_or_two_and_interpolated() -> None:
    histogram, recent = Histogram((1.0, 2.0, 4.0)), RecentQuantiles()
    assert recent.compute_quantiles("h", histogram, 0.0, [0.5]) == [pytest.approx(float("nan"), nan_ok=True)]
    for value in (0.5, 0.5, 0.5, 0.5):
        histogram.observe_value(value)
    assert recent.compute_quantiles("h", histogram, 30.0, [0.5, 1.0]) == [0.5, 1.0]
    assert recent.compute_quantiles("h", histogram, 1 + QUANTILE_WINDOW_S, [0.5]) == [0.5]
    for value in (3.0, 3.0, 9.0, 9.0):
        histogram.observe_value(value)
    assert recent.compute_quantiles("h", histogram, 2 + QUANTILE_WINDOW_S, [0.75, 1.0]) == [4.0, 4.0], (
        "beyond the last bound: the bound"
    )
    recent.compute_quantiles("h", histogram, 2 + 2 * QUANTILE_WINDOW_S, [0.5])
    assert (
        recent.compute_quantiles("h", histogram, 3 + 3 * QUANTILE_WINDOW_S, [0.25, 0.5])
        == [pytest.approx(float("nan"), nan_ok=True)] * 2
    ), "nothing was observed since"


def test_names_of_other_systems_are_theirs_and_keep_their_spelling() -> None:
    page = MetricsPage()
    page.add_foreign("bookie_WRITE_BYTES", "W.", 5, bookie="b")
    page.add_summary_of_other_system("bookie_flush", "F.", 3, 12.5, {"0.5": 2.0}, success="true")
    assert shown(page) == {
        'bookie_WRITE_BYTES{bookie="b"}': 5,
        'bookie_flush{quantile="0.5",success="true"}': 2,
        'bookie_flush_count{success="true"}': 3,
        'bookie_flush_sum{success="true"}': 12.5,
    }
    with pytest.raises(AssertionError, match="no name"):
        page.add_foreign("magnetar_x", "X.", 1)


def test_a_page_knows_what_it_shows() -> None:
    page, histogram = MetricsPage(), Histogram((1,))
    page.add_gauge("magnetar_x", "X.", 7, bookie="b")
    page.add_histogram("magnetar_y_seconds", "Y.", histogram)
    assert page.shown == {("magnetar_x", (("bookie", "b"),)): 7, ("magnetar_y_seconds", ()): histogram}


def test_a_name_has_one_kind_one_set_of_labels_and_our_prefix() -> None:
    page = MetricsPage()
    page.add_gauge("magnetar_x", "X.", 1, topic="a")
    with pytest.raises(AssertionError, match="gauge already"):
        page.add_histogram("magnetar_x", "X.", Histogram((1,)), topic="a")
    with pytest.raises(AssertionError, match="labels"):
        page.add_gauge("magnetar_x", "X.", 1)
    with pytest.raises(AssertionError, match="no name"):
        page.add_counter("other_total", "X.", 1)
    with pytest.raises(AssertionError, match="must end in _total"):
        page.add_counter("magnetar_y", "Y.", 1)
    with pytest.raises(AssertionError, match="must not end in _total"):
        page.add_gauge("magnetar_y_total", "Y.", 1)
    with pytest.raises(AssertionError, match="rise"):
        Histogram((2, 1))
    assert list(DURATION_BOUNDS) == sorted(DURATION_BOUNDS)


@pytest.mark.parametrize("value", [0, 7, 999_999, 1_000_000, 123_456_789_012, -1, 0.5, 1e22, float("inf")])
def test_a_series_is_read_as_what_prometheus_client_writes(value: float) -> None:
    named = {"topic": 'persistent://a/b/"c"\\d\n', "subscription": "s"}
    page, same = MetricsPage(), MetricsPage()
    for name, kind in (("magnetar_x", "gauge"), ("magnetar_x_total", "counter")):
        add = page.add_series(name, kind, "What it is.").add
        for _ in range(3):
            add(format_labels(**named), value)
    for _ in range(3):
        same.add_gauge("magnetar_x", "What it is.", value, **named)
        same.add_counter("magnetar_x_total", "What it is.", value, **named)
    written = b"".join(page.series_chunks()).decode()
    assert [*text_string_to_metric_families(written)] == [*text_string_to_metric_families(text(same))]
