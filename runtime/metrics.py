"""Metrics: plain numbers while the process works, one `MetricsPage` of Prometheus text per request.

    self.sync_seconds = Histogram(DURATION_BOUNDS)                 # each part has its own integers and histograms
    self.sync_seconds.observe_value(0.0002)                # a bisection in C and a list element, about 0.3 µs
    page.add_histogram("magnetar_bookie_journal_sync_seconds", "…", bookie.sync_seconds)  # read for each page
    page.add_foreign("bookie_ledgers_count", "…", 7)       # the same number under another system's name

Nothing is registered, and nothing runs between requests (metrics_server.py): each page is made from the parts that
exist, so a deleted topic is not on it. Names begin with `magnetar_`, counters end in
`_total`, units are seconds and bytes; one name has one kind and one set of label names. Only `add_foreign` and
`add_summary_of_other_system` take other names, for the dashboards of another system. Only `MetricsPage` imports
prometheus-client. Guarding test: tests/runtime/test_metrics.py.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode

from ..proto.errors import InvalidRequest
from ..proto.names import NamespaceName

if TYPE_CHECKING:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
        SummaryMetricFamily,
        UnknownMetricFamily,
    )

    Family = TypeVar(
        "Family", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily,
        UnknownMetricFamily,
    )  # fmt: skip

DURATION_BOUNDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
"""Bounds for durations, from a fast sync to a lost quorum."""

SIZE_BOUNDS = (
    128,
    256,
    512,
    1024,
    2048,
    4096,
    8192,
    16384,
    32768,
    65536,
    131072,
    262144,
    524288,
    1 << 20,
    2 << 20,
    4 << 20,
)
"""Bounds for the sizes of entries."""

WAITING_VALUES_MAX = 64
"""Values that wait to be counted, at most about."""
COUNT_EQUAL_FROM = 16
"""Values from which on equal ones are counted first: sizes of entries are mostly equal."""
QUANTILE_WINDOW_S = 60.0
LINES_PER_CHUNK = 1000

_NAME = re.compile(r"magnetar_[a-z0-9_]+")


def combine_histograms(several: Sequence[Histogram]) -> Histogram:
    """Returns a histogram of all observations of these, which have the same bounds."""
    if len(several) == 1:
        return several[0]
    counts = [sum(each) for each in zip(*(one.counts for one in several), strict=True)]
    return Histogram(several[0].bounds, counts, sum(one.total for one in several))


class Histogram:
    """Counts values by bucket: `counts[i]` values are ≤ `bounds[i]` and above the bound before; the last bucket is
    unbounded.

    Only one thread may observe, and it must also make the page. A caller that observes one value per message may append
    it to the list `waiting`, and call `count_waiting_values` when the list has WAITING_VALUES_MAX values. The values in
    the list are counted then, or when the counts are read."""

    __slots__ = ("_counts", "_total", "bounds", "waiting")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0) -> None:
        assert list(bounds) == sorted(set(bounds)), "the bounds of a histogram rise"
        self.bounds = tuple(bounds)
        self.waiting: list[float] = []
        self._counts = list(counts) or [0] * (len(self.bounds) + 1)
        self._total = total

    def observe_value(self, value: float) -> None:
        """Records one observation of this value."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._total += value

    def observe_values(self, values: Sequence[float]) -> None:
        """Records one observation of each value."""
        bounds, counts = self.bounds, self._counts
        if len(values) > COUNT_EQUAL_FROM:
            for value, times in Counter(values).items():
                counts[bisect_left(bounds, value)] += times
        else:
            for value in values:
                counts[bisect_left(bounds, value)] += 1
        self._total += sum(values)

    def count_waiting_values(self) -> None:
        """Counts the values of the list `waiting` in their buckets, and clears the list."""
        self.observe_values(self.waiting)
        self.waiting.clear()  # the same list: who appends may hold it

    @property
    def counts(self) -> list[int]:
        """The number of observations in each bucket, not cumulative; the last bucket has no upper bound."""
        self.count_waiting_values()
        return self._counts

    @property
    def total(self) -> float:
        """The sum of all observed values."""
        self.count_waiting_values()
        return self._total

    @property
    def count(self) -> int:
        """The number of all observations."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """Returns for each bucket (upper bound, number of all values up to this bound), as in Prometheus' format."""
        so_far = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return buckets


class RecentQuantiles:
    """Computes quantiles of the values that a histogram got in the last one or two minutes, for tools that cannot read
    buckets. Calls within a minute compare with the same earlier counts. After a pause of more than a minute, the
    quantiles are of all values since the last call."""

    def __init__(self) -> None:
        self._looks: dict[object, tuple[float, list[int], list[int]]] = {}  # time, counts then, counts before that

    def compute_quantiles(self, key: object, histogram: Histogram, now: float, wanted: Sequence[float]) -> list[float]:
        """Returns one quantile for each share in `wanted` (0.99: the 99th percentile), in the same order; NaN if there
        are no values. `key` identifies the histogram, and must be the same in all calls for it; `now` is a time in
        seconds. A quantile is interpolated inside its bucket; in the last bucket it is the last bound. The first call
        for a `key` uses all values that the histogram got so far."""
        nothing = [0] * len(histogram.counts)
        since, then, before = self._looks.get(key, (now, nothing, nothing))
        if now - since >= QUANTILE_WINDOW_S or key not in self._looks:
            before = then
            self._looks[key] = now, list(histogram.counts), before
        counts = [count - old for count, old in zip(histogram.counts, before, strict=True)]
        return [_quantile(histogram.bounds, counts, share) for share in wanted]


def _quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    total = sum(counts)
    rank, so_far = share * total, 0
    for i, count in enumerate(counts):
        if total and count and so_far + count >= rank:
            low = bounds[i - 1] if i else 0.0
            high = bounds[i] if i < len(bounds) else low
            return low + (high - low) * (rank - so_far) / count
        so_far += count
    return float("nan")


_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


def format_labels(**values: str) -> str:
    """Returns the labels as text for a line of metrics, sorted and escaped: `{a="1",b="2"} `, with a space at the end.
    """
    return "{" + ",".join([f'{name}="{escape_label(text)}"' for name, text in sorted(values.items())]) + "} "


def escape_label(text: str) -> str:
    """Returns `text` with the characters escaped that the value of a label may not contain."""
    return text.translate(_ESCAPED) if '"' in text or "\\" in text or "\n" in text else text


class MetricSeries:
    """The lines of one metric that has very many label values, such as a value for each topic. A caller with very many
    lines appends them to `lines` itself. Each line consists of the labels as `format_labels` returns them, the number,
    and a line break."""

    __slots__ = ("_head", "_name", "lines")

    def __init__(self, name: str, kind: str, help: str, *, ours: bool = True) -> None:
        assert bool(_NAME.fullmatch(name)) == ours, f"{name!r} is no name of a metric of ours"
        assert not ours or name.endswith("_total") == (kind == "counter"), f"the {kind} {name} ends otherwise"
        self._head = f"# HELP {name} {help}\n# TYPE {name} {kind}\n"
        self._name = name
        self.lines: list[str] = []

    def add(self, labels: str, value: float) -> None:
        """Adds a line: `labels` as `format_labels` returns them, and the value."""
        self.lines.append(f"{labels}{value}\n")

    def chunks(self) -> Iterator[bytes]:
        """Yields the text of the metric in pieces of at most LINES_PER_CHUNK lines, so that making one piece blocks the
        interpreter only for a short time. Yields nothing if there are no lines."""
        for first in range(0, len(self.lines), LINES_PER_CHUNK):
            text = self._name + self._name.join(self.lines[first : first + LINES_PER_CHUNK])
            yield (text if first else self._head + text).encode()


METRICS_LEVELS = ("topic", "namespace", "none")


class MetricsQuery(NamedTuple):
    """The parsed query of a request for metrics: `level=topic&namespace=T/N` in its URL. `level`: whether the page has,
    beside the numbers of the server, those of each topic, only those of each namespace, or none of these."""

    level: str = ""  # one of METRICS_LEVELS; "": as the server is set
    namespace: str = ""  # T/N: only its topics, and only its sums beside those of the server; "": of all

    @classmethod
    def parse(cls, text: str) -> MetricsQuery:
        """Returns the MetricsQuery for the query part of a URL; "" gives the defaults. Raises InvalidRequest if a
        parameter is unknown or its value is invalid (InvalidName for a namespace), ValueError if there are more than 8
        parameters."""
        found = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=8)) if text else {}
        unknown = sorted(found.keys() - {"level", "namespace"})
        if unknown:
            raise InvalidRequest(f"a page of metrics takes level and namespace, not {unknown[0][:100]!r}")
        level, namespace = found.get("level", ""), found.get("namespace", "")
        if level and level not in METRICS_LEVELS:
            raise InvalidRequest(f"level must be {', '.join(METRICS_LEVELS)}, not {level[:100]!r}")
        return cls(level, str(NamespaceName.parse(namespace)) if namespace else "")

    def __str__(self) -> str:
        return urlencode({name: value for name, value in self._asdict().items() if value})


class MetricsPage:
    """The metrics of a process at one moment, which the parts of the process add. It is a Collector for
    prometheus-client, without the metrics with very many label values (`MetricSeries`).

    `shown`: every number and histogram of the page by its name and labels, for code that exports them a second time
    under other names.
    """

    def __init__(self, query: MetricsQuery = MetricsQuery()) -> None:  # noqa: B008 - it is immutable
        self.query = query  # which topics are to be on it
        self._families: dict[str, tuple[Metric, tuple[str, ...]]] = {}  # name → metric, names of its labels
        self.shown: dict[tuple[str, tuple[tuple[str, str], ...]], float | Histogram] = {}
        self._series: list[MetricSeries] = []
        self.process = ""  # which of a server's processes this page is of; "": it is the only one
        self.others: dict[str, bytes] = {}  # the pages of those (metrics_server.py), where this one is of all

    def add_series(self, name: str, kind: str, help: str, *, ours: bool = True) -> MetricSeries:
        """Adds a counter or gauge with very many label values, and returns its MetricSeries. The caller must add the
        lines to the series; they are not in `shown`. `ours` False: the name is that of another system, and `kind` is
        "untyped"."""
        made = MetricSeries(name, kind, help, ours=ours)
        self._series.append(made)
        return made

    def copy_from(self, other: MetricsPage) -> None:
        """Makes the content of `other` that of this page, which must be empty. The two pages then share it."""
        assert not self.shown, "the page is empty"
        self._families, self.shown, self._series = other._families, other.shown, other._series
        self.process, self.others = other.process, other.others

    @property
    def line_count(self) -> int:
        """Returns how many lines all MetricSeries of this page have together."""
        return sum(len(each.lines) for each in self._series)

    def series_chunks(self) -> Iterator[bytes]:
        """Yields the text of all series in chunks of UTF-8."""
        return (chunk for each in self._series for chunk in each.chunks())

    def add_counter(self, name: str, help: str, value: float, **labels: str) -> None:
        """Adds a sample of a counter (a value that only rises) to the page. The name must end in `_total`."""
        from prometheus_client.core import CounterMetricFamily

        assert name.endswith("_total"), f"the counter {name} must end in _total"
        self._family(CounterMetricFamily, name, help, labels).add_metric(list(labels.values()), value)
        self.shown[name, tuple(labels.items())] = value

    def add_gauge(self, name: str, help: str, value: float, **labels: str) -> None:
        """Adds a sample of a gauge (a value that may rise and fall) to the page. The name must not end in `_total`."""
        from prometheus_client.core import GaugeMetricFamily

        assert not name.endswith("_total"), f"the gauge {name} must not end in _total"
        self._family(GaugeMetricFamily, name, help, labels).add_metric(list(labels.values()), value)
        self.shown[name, tuple(labels.items())] = value

    def add_histogram(self, name: str, help: str, histogram: Histogram, **labels: str) -> None:
        """Adds the buckets, sum and count of a histogram to the page."""
        from prometheus_client.core import HistogramMetricFamily

        family = self._family(HistogramMetricFamily, name, help, labels)
        family.add_metric(list(labels.values()), histogram.cumulative, histogram.total)
        self.shown[name, tuple(labels.items())] = histogram

    def add_foreign(self, name: str, help: str, value: float, **labels: str) -> None:
        """Adds a number under the name that another system (Pulsar) gives it. The number has no metric type, because a
        type would add a suffix to its name. It is not in `shown`."""
        from prometheus_client.core import UnknownMetricFamily

        self._family(UnknownMetricFamily, name, help, labels, ours=False).add_metric(list(labels.values()), value)

    def add_summary_of_other_system(
        self, name: str, help: str, count: int, total: float, quantiles: Mapping[str, float], **labels: str
    ) -> None:
        """Adds a summary under the name that another system (Pulsar) gives it: quantiles, count and sum."""
        from prometheus_client.core import SummaryMetricFamily

        family = self._family(SummaryMetricFamily, name, help, labels, ours=False)
        for share, value in quantiles.items():
            family.add_sample(name, {**labels, "quantile": share}, value)
        family.add_metric(list(labels.values()), count, total)

    def add_statistics(
        self, part: str, numbers: Mapping[str, int], *, gauges: Collection[str] = (), **labels: str
    ) -> None:
        """Adds all `numbers`, which a part's method `statistics()` returned: as gauges if they are named in `gauges`,
        else as counters. The name of each metric is `magnetar_`, the name of the part and that of the number, with
        `_total` for a counter."""
        for name, value in numbers.items():
            help = f"{part.replace('_', ' ').capitalize()}: {name.replace('_', ' ')}."
            if name in gauges:
                self.add_gauge(f"magnetar_{part}_{name}", help, value, **labels)
            else:
                self.add_counter(f"magnetar_{part}_{name}_total", help, value, **labels)

    def _family(
        self, kind: type[Family], name: str, help: str, labels: dict[str, str], *, ours: bool = True
    ) -> Family:
        found = self._families.get(name)
        if found is None:
            assert bool(_NAME.fullmatch(name)) == ours, f"{name!r} is no name of a metric of ours"
            found = self._families[name] = kind(name, help, labels=tuple(labels)), tuple(labels)
        family, names = found
        assert isinstance(family, kind), f"{name} is a {family.type} already"
        assert names == tuple(labels), f"{name} has the labels {names}"
        return family

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics of the page for prometheus-client, without those in a `MetricSeries`."""
        return (family for family, _ in self._families.values())


FillMetricsPage = Callable[[MetricsPage], Awaitable[None]]
"""Writes the page of `GET /metrics`; the serving process sets it (cli/run/metrics.py `MeasuredParts`)."""


async def write_empty_metrics(page: MetricsPage) -> None:
    """Writes nothing to the page. Used in place of a function that writes metrics, at a broker without metrics."""
