"""Metrics: what is counted is what Prometheus reads."""

from __future__ import annotations

import pytest

from magnetar.runtime.metrics import SECONDS, Registry, exposition


def shown(registry: Registry) -> dict[str, float]:
    lines = exposition(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_counters_are_one_per_name_and_labels() -> None:
    registry = Registry()
    registry.counter("magnetar_published_total", "Entries.", topic="a").value += 2
    registry.counter("magnetar_published_total", "Entries.", topic="a").value += 1
    registry.counter("magnetar_published_total", "Entries.", topic="b").value += 5
    assert shown(registry) == {
        'magnetar_published_total{topic="a"}': 3,
        'magnetar_published_total{topic="b"}': 5,
    }
    assert b"# HELP magnetar_published_total Entries." in exposition(registry)


def test_gauges_are_read_when_asked_and_go_when_removed() -> None:
    registry = Registry()
    topics = ["a"]
    registry.gauge("magnetar_topics", "Owned.", lambda: len(topics))
    registry.gauge("magnetar_backlog", "Waiting.", lambda: 9, topic="a")
    topics.append("b")
    assert shown(registry) == {"magnetar_topics": 2, 'magnetar_backlog{topic="a"}': 9}
    registry.gauge("magnetar_topics", "Owned.", lambda: 7)
    registry.remove("magnetar_backlog", topic="a")
    registry.remove("magnetar_never")
    assert shown(registry) == {"magnetar_topics": 7}


def test_a_histogram_counts_each_value_in_its_bucket_and_shows_sums() -> None:
    registry = Registry()
    histogram = registry.histogram("magnetar_sync_seconds", "Sync.", (0.5, 1, 2))
    for value in (0.1, 0.5, 0.6, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert shown(registry) == {
        'magnetar_sync_seconds_bucket{le="0.5"}': 2,
        'magnetar_sync_seconds_bucket{le="1"}': 3,
        'magnetar_sync_seconds_bucket{le="2"}': 4,
        'magnetar_sync_seconds_bucket{le="+Inf"}': 5,
        "magnetar_sync_seconds_count": 5,
        "magnetar_sync_seconds_sum": pytest.approx(5.3),
    }


def test_a_name_has_one_kind_one_set_of_labels_and_our_prefix() -> None:
    registry = Registry()
    registry.counter("magnetar_x_total", "X.", topic="a")
    with pytest.raises(AssertionError, match="Counter already"):
        registry.gauge("magnetar_x_total", "X.", lambda: 1, topic="a")
    with pytest.raises(AssertionError, match="labels"):
        registry.counter("magnetar_x_total", "X.")
    with pytest.raises(AssertionError, match="no name"):
        registry.counter("other_total", "X.")
    with pytest.raises(AssertionError, match="_total"):
        registry.counter("magnetar_y", "Y.")
    with pytest.raises(AssertionError, match="rise"):
        registry.histogram("magnetar_z", "Z.", (2, 1))
    assert list(SECONDS) == sorted(SECONDS)
