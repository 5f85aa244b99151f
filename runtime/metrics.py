"""Metrics: plain integers while the process works, Prometheus text when somebody asks.

    published = registry.counter("magnetar_broker_published_total", "Entries published.")
    published.value += 1                                   # the hot path: an attribute and an addition
    registry.gauge("magnetar_broker_topics", "Topics owned.", lambda: len(topics))
    synced = registry.histogram("magnetar_journal_sync_seconds", "fdatasync of a block.", SECONDS)
    synced.observe(0.0002)                                 # a bisection in C and a list element

Names begin with `magnetar_`; counters end in `_total`; units are seconds and bytes. Labels are keyword arguments; one
name has one kind, one help text and one set of label names. `exposition` imports prometheus-client, nothing else does.
Single-threaded: values are changed in the event loop, or by one thread each.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds for durations, from a fast sync to a lost quorum."""

BYTES = tuple(float(1 << shift) for shift in range(8, 25, 2))
"""Bounds for sizes, 256 bytes to 16 MiB."""

_NAME = re.compile(r"magnetar_[a-z0-9_]+")
Labels = tuple[tuple[str, str], ...]


class Counter:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class Gauge:
    """Reads its value when it is asked for."""

    __slots__ = ("read",)

    def __init__(self, read: Callable[[], float]) -> None:
        self.read = read


class Histogram:
    """Counts per bucket; `counts[i]` are the values ≤ `bounds[i]` and above the bound before; the last has no bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "the bounds of a histogram rise"
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _Family:
    __slots__ = ("help", "kind", "label_names", "members")

    def __init__(self, kind: type, help: str, label_names: tuple[str, ...]) -> None:
        self.kind = kind
        self.help = help
        self.label_names = label_names
        self.members: dict[Labels, Any] = {}


class Registry:
    """All metrics of a process. Asking for the same name and labels again gives the same counter or histogram."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    def counter(self, name: str, help: str, **labels: str) -> Counter:
        assert name.endswith("_total"), f"the counter {name} must end in _total"
        counter: Counter = self._member(name, help, Counter, labels, Counter)
        return counter

    def histogram(self, name: str, help: str, bounds: Sequence[float], **labels: str) -> Histogram:
        histogram: Histogram = self._member(name, help, Histogram, labels, lambda: Histogram(bounds))
        return histogram

    def gauge(self, name: str, help: str, read: Callable[[], float], **labels: str) -> Gauge:
        """`read` replaces the one that was registered under the same name and labels."""
        gauge: Gauge = self._member(name, help, Gauge, labels, lambda: Gauge(read))
        gauge.read = read
        return gauge

    def remove(self, name: str, **labels: str) -> None:
        """What is gone (a topic, a connection) is no longer shown; fine when it never was."""
        family = self._families.get(name)
        if family is not None:
            family.members.pop(tuple(sorted(labels.items())), None)

    def _member(self, name: str, help: str, kind: type, labels: dict[str, str], make: Callable[[], Any]) -> Any:
        key = tuple(sorted(labels.items()))
        family = self._families.get(name)
        if family is None:
            assert _NAME.fullmatch(name), f"{name!r} is no name of a metric of ours"
            family = self._families[name] = _Family(kind, help, tuple(label for label, _ in key))
        assert family.kind is kind, f"{name} is a {family.kind.__name__} already"
        assert family.label_names == tuple(label for label, _ in key), f"{name} has the labels {family.label_names}"
        if key not in family.members:
            family.members[key] = make()
        return family.members[key]

    def collect(self) -> Iterator[Any]:
        """prometheus-client's Collector interface."""
        from prometheus_client import core

        for name, family in self._families.items():
            if family.kind is Counter:
                shown: Any = core.CounterMetricFamily(name, family.help, labels=family.label_names)
            elif family.kind is Gauge:
                shown = core.GaugeMetricFamily(name, family.help, labels=family.label_names)
            else:
                shown = core.HistogramMetricFamily(name, family.help, labels=family.label_names)
            for key, member in family.members.items():
                _show(shown, [value for _, value in key], member)
            yield shown


def _show(shown: Any, labels: list[str], member: Counter | Gauge | Histogram) -> None:
    if isinstance(member, Counter):
        shown.add_metric(labels, member.value)
    elif isinstance(member, Gauge):
        shown.add_metric(labels, member.read())
    else:
        so_far = 0
        buckets = []
        for bound, count in zip((*map(str, member.bounds), "+Inf"), member.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        shown.add_metric(labels, buckets, member.total)


def exposition(registry: Registry) -> bytes:
    """All metrics as Prometheus text."""
    from prometheus_client import CollectorRegistry, generate_latest

    collectors = CollectorRegistry(auto_describe=False)
    collectors.register(registry)
    return generate_latest(collectors)
