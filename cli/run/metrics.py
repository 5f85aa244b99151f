"""The metrics of a process: every metric has its name and its kind here.

    magnetar_bookie_…          each bookie's statistics and histograms (label `bookie`, its uuid)
    magnetar_metadata_…        the metadata tree's
    magnetar_broker_…          the tail cache, the topics and the time that publishes take
    magnetar_transactions_…    per coordinator of transactions that it has (label `coordinator`)
    magnetar_broker_peer_…     its connections to bookies (label `bookie`)
    magnetar_namespace_…       sums of the loaded topics of a namespace (label `namespace`)
    magnetar_topic_…           per loaded topic (label `topic`), or of the largest alone (`metrics_topics`)
    magnetar_subscription_…    per durable subscription (labels `topic`, `subscription`)
    magnetar_process_memory_…  what memory_bytes is shared out to (metrics.py; label `share`)
    magnetar_background_…      long-lived tasks that failed (runtime/tasks.py)
    magnetar_unreadable_…      records of the metadata that cannot be read here (metadata/store.py)

A new number of a part's `statistics()` is a counter, unless it is among the gauges here: a number that can fall must be
added there. Counters start at zero with the process, a topic's when it is loaded. Guarding test:
tests/cli/run/test_metrics.py, which also fails when a counter falls.

Also in this file, each below its heading: the memory of a process in `--metrics` (memory); BookKeeper's names for a
bookie's metrics, so that dashboards made for it work (bookkeeper); how a server says that it serves, and what its page
of metrics shows (voice); transactions (transactions).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from ...metadata.store import UNREADABLE_RECORDS
from ...proto.errors import MagnetarError
from ...proto.versions import PRODUCT
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import SystemClock
from ...runtime.descriptors import PROCESS_DESCRIPTORS
from ...runtime.health import LOOP_HEARTBEAT, PROCESS_HEALTH, notify_systemd
from ...runtime.metrics import Histogram, RecentQuantiles, escape_label
from ...runtime.tasks import Supervisor
from ...runtime.tcp.listening import PROCESS_CERTIFICATES
from .metrics_pulsar import PulsarMetricWriter

if TYPE_CHECKING:
    from ...bookie.server import Bookie
    from ...broker.node.survey import LoadedTopicsSurvey
    from ...broker.node.topic_manager import TopicManager
    from ...broker.server import Broker
    from ...broker.subscription.subscription import Subscription
    from ...broker.topic.topic import Topic
    from ...broker.transaction.coordinator import RunningCoordinator
    from ...metadata.server import MetadataServer
    from ...metadata.session import MetadataResponsiveness
    from ...metadata.sqlite import SqliteStore
    from ...runtime.budget import CallerMemory
    from ...runtime.clock import Clock
    from ...runtime.config import MemoryPlan
    from ...runtime.metrics import MetricSeries, MetricsPage, MetricsQuery
    from ...runtime.parent import ParentLink

# -------------------------------------------------------------------------------------------------------- memory
# The memory of a process in `--metrics`: what each share may take, and what it takes where that is known.
#
#     magnetar_process_memory_bytes                            memory_bytes
#     magnetar_process_memory_share_limit_bytes{share="…"}     of each share
#     magnetar_process_memory_share_bytes{share="…"}           but for keys of a compaction and batches of repair


def add_memory_shares(page: MetricsPage, plan: MemoryPlan, used: dict[str, int]) -> None:
    """Adds to the page how much memory each share of the plan may use, and how much it uses. `used`: bytes by the name
    of the share; a share that is missing is shown without its use."""
    page.add_gauge("magnetar_process_memory_bytes", "Process: memory_bytes, which is shared out.", plan.budget)
    for name, limit in plan.limits.items():
        text = "Process: bytes that a share of memory_bytes may take."
        page.add_gauge("magnetar_process_memory_share_limit_bytes", text, limit, share=name)
        if name in used:
            text = "Process: bytes that a share of memory_bytes takes."
            page.add_gauge("magnetar_process_memory_share_bytes", text, used[name], share=name)


def measure_broker_memory(broker: Broker) -> dict[str, int]:
    """Returns the bytes that each share of the broker's memory uses, by the name of the share."""
    owned = broker.topic_manager
    assert owned.cache.recent is not None, "a broker has both caches"
    return {
        "clients": _held(owned.memory),
        "appends": owned.bytes_in_flight,
        "tail-cache": owned.cache.bytes,
        "catch-up-cache": owned.cache.recent.bytes,
        "catch-up-reads": owned.reads.used_bytes,
        "state": owned.state.bytes,
    }


def measure_bookies_memory(bookies: Sequence[Bookie]) -> dict[str, int]:
    """Returns the bytes that each share of memory uses in all these bookies together, by the name of the share."""
    several = [each.statistics() for each in bookies]
    names = {
        "memtables": ("memtable_bytes",),
        "journal-queue": ("journal_queued_bytes",),
        "held-adds": ("held_bytes", "fences_waiting_bytes", "lacs_waiting_bytes", "newcomers_waiting_bytes"),
        "index-cache": ("index_cache_bytes",),
        "read-cache": ("read_cache_bytes",),
        "reads": ("disk_reads_bytes",),
    }
    return {share: sum(int(each[name]) for each in several for name in those) for share, those in names.items()}


def measure_metadata_memory(metadata: SqliteStore | MetadataServer) -> dict[str, int]:
    """Returns the bytes that requests and answers of metadata clients use, by share of the memory plan; empty if this
    process does not run the metadata service."""
    memory = getattr(metadata, "memory", None)
    return {} if memory is None else {"metadata-clients": _held(memory)}


def _held(memory: CallerMemory) -> int:
    return memory.requests.held + memory.answers.held


# ---------------------------------------------------------------------------------------------------- bookkeeper
# BookKeeper's names for a bookie's metrics, so that dashboards made for it work (`--metrics-compat bookkeeper`).
#
# The numbers are those of our own page under second names; `BOOKKEEPER_METRICS` is the table, docs/operations.md shows
# it. Latencies are summaries in milliseconds with the label `success`, as BookKeeper's, with the quantiles of the last
# minute or two (runtime/metrics.py `RecentQuantiles`); our own histograms are more exact. A metric of BookKeeper
# without a true counterpart (queues of threads that do not exist here) is left out. Guard:
# tests/cli/run/test_metrics_bookkeeper.py.


BOOKIE_QUANTILES = ("0.5", "0.75", "0.95", "0.99", "0.999", "0.9999", "1.0")
"""Quantiles of BookKeeper's Prometheus provider."""


class BookKeeperMetric(NamedTuple):
    """A metric under the name that BookKeeper gives it. `ours`: the names of our metrics with the same numbers; if
    there are two, the first counts successes and the second failures. `note`: how the metric differs from
    BookKeeper's."""

    name: str
    ours: tuple[str, ...]
    note: str = ""
    writable: bool = False  # 1 for a bookie that is not read-only


_ADDS = ("magnetar_bookie_add_seconds", "magnetar_bookie_add_failed_seconds")
_READS = ("magnetar_bookie_read_seconds", "magnetar_bookie_read_failed_seconds")

BOOKKEEPER_METRICS = (
    BookKeeperMetric(
        "bookie_SERVER_STATUS", ("magnetar_bookie_read_only",), "1: writable, 0: read-only", writable=True
    ),
    BookKeeperMetric(
        "bookie_ledger_writable_dirs", ("magnetar_bookie_directories_writable",), "ledgers directories that take adds"
    ),
    BookKeeperMetric("bookie_WRITE_BYTES", ("magnetar_bookie_add_bytes_total",)),
    BookKeeperMetric("bookie_READ_BYTES", ("magnetar_bookie_read_bytes_total",)),
    BookKeeperMetric("bookie_ledgers_count", ("magnetar_bookie_ledgers",)),
    BookKeeperMetric("bookie_write_cache_size", ("magnetar_bookie_memtable_bytes",)),
    BookKeeperMetric("bookie_read_cache_size", ("magnetar_bookie_read_cache_bytes",)),
    BookKeeperMetric("bookie_DELETED_LEDGER_COUNT", ("magnetar_bookie_ledgers_deleted_total",)),
    BookKeeperMetric(
        "bookie_throttled_write_requests", ("magnetar_bookie_slowed_down_total",), "a connection was not read"
    ),
    BookKeeperMetric("bookie_journal_JOURNAL_QUEUE_SIZE", ("magnetar_bookie_journal_queued_records",)),
    BookKeeperMetric(
        "bookkeeper_server_ADD_ENTRY_REQUEST", _ADDS, "from arrival to answer; many entries may be one request"
    ),
    BookKeeperMetric("bookkeeper_server_ADD_ENTRY", _ADDS, "the same: a request is not queued before it is served"),
    BookKeeperMetric("bookkeeper_server_READ_ENTRY_REQUEST", _READS, "from arrival to answer"),
    BookKeeperMetric("bookkeeper_server_READ_ENTRY", _READS, "the same"),
    BookKeeperMetric(
        "bookie_journal_JOURNAL_ADD_ENTRY", _ADDS, "the same: an add's answer waits for the journal alone"
    ),
    BookKeeperMetric(
        "bookie_journal_JOURNAL_SYNC", ("magnetar_bookie_journal_sync_seconds",), "write and sync of a block"
    ),
    BookKeeperMetric(
        "bookie_journal_JOURNAL_QUEUE_LATENCY", ("magnetar_bookie_journal_queue_seconds",), "per turn, not per add"
    ),
    BookKeeperMetric(
        "auditor_NUM_UNDER_REPLICATED_LEDGERS",
        ("magnetar_bookie_repair_under_replicated",),
        "at the bookie that is the auditor; 0 at the others",
    ),
    BookKeeperMetric("bookie_flush", ("magnetar_bookie_checkpoint_seconds",)),
)


class BookKeeperMetricWriter:
    """Adds the metrics of bookies to a page a second time, under BookKeeper's names. Each process has one such object,
    which stores earlier counts to compute quantiles from them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._recent = RecentQuantiles()

    def add(self, page: MetricsPage, bookie: str) -> None:
        """Adds each metric of the bookie again, under BookKeeper's name. Leaves out metrics that the page does not
        contain."""
        labels = (("bookie", bookie),)
        for second in BOOKKEEPER_METRICS:
            help = f"BookKeeper's name of {' and '.join(second.ours)}."
            for i, ours in enumerate(second.ours):
                found = page.shown.get((ours, labels))
                if isinstance(found, Histogram):
                    self._summary(page, second.name, help, found, bookie=bookie, success="false" if i else "true")
                elif found is not None:
                    page.add_foreign(second.name, help, 1 - found if second.writable else found, bookie=bookie)

    def _summary(self, page: MetricsPage, name: str, help: str, histogram: Histogram, **labels: str) -> None:
        key = (name, *labels.values())
        found = self._recent.compute_quantiles(
            key, histogram, self._clock.monotonic(), [float(share) for share in BOOKIE_QUANTILES]
        )
        millis = {share: 1000 * value for share, value in zip(BOOKIE_QUANTILES, found, strict=True)}
        page.add_summary_of_other_system(name, help, histogram.count, 1000 * histogram.total, millis, **labels)


# ------------------------------------------------------------------------------------------------------- samples


FillMetricsPage = Callable[["MetricsPage"], Awaitable[None]]

_Unread = tuple["Topic", "Subscription", Callable[[int], None]]
"""A subscription whose backlog is not in memory, and the function that takes its number."""

_LOG = logging.getLogger("magnetar.metrics")

BOOKIE_GAUGES = frozenset({
    "fences_waiting_bytes", "lacs_waiting_bytes", "newcomers_waiting_bytes", "reads_waiting_bytes",
    "admin_requests", "background_failing", "background_tasks", "disk_free_bytes", "disk_reads", "disk_reads_bytes",
    "directories", "directories_failed", "directories_writable", "disk_total_bytes",
    "gc_doubtful", "gc_refused", "gc_running", "gc_surplus", "gc_unexplained",
    "held_adds", "held_bytes", "index_cache_bytes", "index_extents", "index_logs", "index_pages",
    "journal_queued_bytes", "journal_queued_records", "labels_missing", "ledgers", "limbo", "limbo_blocked_ledgers",
    "limbo_ledgers", "limbo_ledgers_done", "limbo_upto", "memtable_bytes", "quarantined", "read_cache_bytes",
    "read_only",
    "rebalance_bytes", "rebalance_bytes_left", "rebalance_ledgers", "rebalance_running", "rebalance_skipped",
    "rebalance_under_way",
    "repair_auditor", "repair_lost_bookies", "repair_under_replicated", "repair_working_on", "reserve_held",
    "scrub_last_pass_s", "scrub_pass", "tombstones",
})  # fmt: skip
BOOKIE_HISTOGRAMS = {
    "journal_queue_seconds": "from the journal records of a turn to the hand-over of their block to the disk",
    "journal_sync_seconds": "write and sync of a journal block (one system call where the file is direct)",
    "journal_block_bytes": "size of a journal block, as written",
    "journal_block_records": "records of a journal block",
    "checkpoint_seconds": "a checkpoint: flush of the memtable, index, ledger index and mark",
    "compaction_seconds": "a move of what lives in sparse logs",
    "compaction_bytes": "bytes that a move copied",
    "add_seconds": "an add that was stored, from arrival to answer",
    "add_failed_seconds": "an add that was refused, from arrival to answer",
    "add_entry_bytes": "size of a stored entry",
    "read_seconds": "a read that found its entry, from arrival to answer",
    "read_failed_seconds": "a read that did not, from arrival to answer",
}
METADATA_GAUGES = frozenset({"history", "known_bytes", "known_nodes", "revision", "sessions", "waiting"})
UNREADABLE_GAUGES = frozenset({"records"})
BALANCE_GAUGES = frozenset({"leader"})
SHARES_GAUGES = frozenset({"leader", "limits"})
CACHE_GAUGES = frozenset({"bytes", "bytes_max", "entries"})
PEER_GAUGES = frozenset({"in_flight", "queued_bytes"})
TOPIC_LEVEL_TOPICS_MAX = 2000
"""Loaded topics up to which `metrics_topics = "auto"` shows each: as many as Prometheus takes from a target at ease."""
SHARED_LIMITS_SHOWN_MAX = 500
"""Limits in sum over brokers that have metrics of their own."""
NAMES_AT_ONCE = 256
TOPICS_AT_ONCE = 16
"""Topics between two readings of the clock: about 0.1 ms."""
PAGE_CACHE_S = 5.0
"""Seconds for which a page of many lines is served again."""
CACHED_PAGES_MAX = 2
REQUESTED_TOPICS_MAX = 20_000
"""Topics that a page shows which asks for each, whatever the setting: 22 MB, 60 ms of the loop."""
UNCACHED_LINES_MAX = 10_000
"""Lines of topics up to which a page is made anew for each request: they take 5 ms."""
BACKLOGS_TIMEOUT_S = 2.0
"""Seconds for all backlogs of a page: one that is not in memory costs a read from a bookie."""


class MeasuredParts(msgspec.Struct, frozen=True):
    """The parts of a process (broker, bookies, metadata service) whose metrics are served. A call of this object adds
    their metrics to a page; it must be made in the event loop of the parts. `second`: adds BookKeeper's names; None:
    without them. `memory`: the plan whose shares are shown."""

    metadata: SqliteStore | MetadataServer | None = None
    bookies: Sequence[Bookie] = ()
    broker: Broker | None = None
    second: BookKeeperMetricWriter | None = None
    pulsar: bool = False  # Pulsar's names as well
    as_pulsar: PulsarMetricWriter = msgspec.field(default_factory=PulsarMetricWriter)
    memory: MemoryPlan | None = None

    async def __call__(self, page: MetricsPage) -> None:
        if self.metadata is not None:
            page.add_statistics("metadata", self.metadata.statistics(), gauges=METADATA_GAUGES)
            if (made_ms := self.metadata.last_backup_ms) > 0:
                text = "Metadata: age of the last copy that its process or a command made; there is no line before."
                age_s = max(0.0, SystemClock().wall_ms() - made_ms) / 1000
                page.add_gauge("magnetar_metadata_backup_age_seconds", text, age_s)
            if (failing := self.metadata.is_backup_failing) is not None:
                text = "Metadata: 1 if the last scheduled copy failed; there is no line without --backup-every."
                page.add_gauge("magnetar_metadata_backup_failing", text, int(failing))
            if (disk := await self.metadata.measure_disk()) is not None:
                text = "Metadata: size of the disk with the file."
                page.add_gauge("magnetar_metadata_disk_total_bytes", text, disk[0])
                text = "Metadata: what is free of that disk. Without room nothing is made, changed or taken over."
                page.add_gauge("magnetar_metadata_disk_free_bytes", text, disk[1])
        for bookie in self.bookies:
            _bookie(page, bookie)
            if self.second is not None:
                self.second.add(page, bookie.id)
        if self.broker is not None:
            await _broker(page, self.broker, self.as_pulsar if self.pulsar else None)
        if self.memory is not None:
            used = measure_bookies_memory(self.bookies) if self.bookies else {}
            used |= measure_broker_memory(self.broker) if self.broker is not None else {}
            used |= measure_metadata_memory(self.metadata) if self.metadata is not None else {}
            add_memory_shares(page, self.memory, used)
        page.add_gauge("magnetar_build_info", "Process: 1; its version is the label.", 1, version=PRODUCT)
        text = "Process: by how much a turn of the event loop came too late at most, in the last minute."
        page.add_gauge("magnetar_process_loop_lag_seconds", text, LOOP_HEARTBEAT.lag_s)
        text = "Process: share of the last half minute in which the event loop had a processor; near 1 it is full."
        page.add_gauge("magnetar_process_loop_busy_ratio", text, LOOP_HEARTBEAT.busy_ratio)
        text = "Process: open on all ports, but for a bookie's."
        page.add_gauge("magnetar_process_connections", text, PROCESS_DESCRIPTORS.connections)
        text = "Process: connections that all ports may have open, of the limit of open files."
        page.add_gauge("magnetar_process_connections_limit", text, PROCESS_DESCRIPTORS.connections_max)
        text = "Connections that were refused because the others hold all that the limit of open files allows."
        page.add_counter("magnetar_process_connections_refused_total", text, PROCESS_DESCRIPTORS.refused)
        for file, end_s in PROCESS_CERTIFICATES.read_expiry_times().items():
            text = "Process: until the certificate of a file that it shows to others ends; below 0: it has ended."
            left_s = end_s - SystemClock().wall_ms() / 1000
            page.add_gauge("magnetar_process_certificate_seconds", text, left_s, file=file)
        if self.broker is not None and (end_ms := self.broker.topic_manager.world.own_token_ends_ms()):
            text = "Process: until the token ends with which the broker calls other brokers; below 0: it has ended."
            left_s = (end_ms - SystemClock().wall_ms()) / 1000
            page.add_gauge("magnetar_process_token_seconds", text, left_s)
        page.add_statistics("unreadable", UNREADABLE_RECORDS.statistics(), gauges=UNREADABLE_GAUGES)
        page.add_counter("magnetar_background_restarts_total", "Long-lived tasks that failed.", Supervisor.restarted)
        for name, count in sorted(Supervisor.count_failing_tasks().items()):
            page.add_gauge("magnetar_background_failing", "Long-lived tasks that fail now, by name.", count, task=name)


class CachedMetricsPage:
    """Writes the page of metrics with the function `measure`. A call fills the given page. A page of more than
    UNCACHED_LINES_MAX lines is used again for PAGE_CACHE_S seconds, so that several scrapers cost the process as much
    as one. Stores up to CACHED_PAGES_MAX pages with different queries, because two scrapers may send different queries.
    """

    def __init__(self, measure: FillMetricsPage, clock: Clock) -> None:
        self._measure = measure
        self._clock = clock
        self._turn = asyncio.Lock()
        self._pages: dict[MetricsQuery, tuple[float, MetricsPage]] = {}  # when it was made; the oldest first

    async def __call__(self, page: MetricsPage) -> None:
        async with self._turn:
            made_s, kept = self._pages.get(page.query, (0.0, page))
            if kept is page or self._clock.monotonic() - made_s >= PAGE_CACHE_S:
                kept = type(page)(page.query)
                await self._measure(kept)
                self._pages.pop(page.query, None)
                if kept.line_count > UNCACHED_LINES_MAX:
                    self._pages[page.query] = self._clock.monotonic(), kept
                    if len(self._pages) > CACHED_PAGES_MAX:
                        del self._pages[next(iter(self._pages))]
            page.copy_from(kept)


def make_bookkeeper_metric_names(compat: str, clock: Clock) -> BookKeeperMetricWriter | None:
    """Returns the object that adds metrics under BookKeeper's names if --metrics-compat requests them; else None."""
    return BookKeeperMetricWriter(clock) if compat in ("bookkeeper", "both") else None


def wants_pulsar_names(compat: str) -> bool:
    """Returns whether --metrics-compat requests metrics under Pulsar's names."""
    return compat in ("pulsar", "both")


def _bookie(page: MetricsPage, bookie: Bookie) -> None:
    page.add_statistics("bookie", bookie.statistics(), gauges=BOOKIE_GAUGES, bookie=bookie.id)
    for name, histogram in bookie.histograms().items():
        page.add_histogram(
            f"magnetar_bookie_{name}", f"Bookie: {BOOKIE_HISTOGRAMS[name]}.", histogram, bookie=bookie.id
        )


async def _broker(page: MetricsPage, broker: Broker, pulsar: PulsarMetricWriter | None) -> None:
    """Adds the metrics of a broker. `pulsar`: adds Pulsar's names; None: without them."""
    from ...broker.common import refusals  # there is a broker, so it is loaded
    from ...broker.topic.producer import FIRST_COPIES

    owned = broker.topic_manager
    cluster = owned.config.cluster if pulsar is not None else None
    page.add_statistics("broker_balance", owned.balancing.statistics(), gauges=BALANCE_GAUGES)
    page.add_statistics("broker_shares", owned.sharing.statistics(), gauges=SHARES_GAUGES)
    page.add_statistics("broker_cache", owned.cache.statistics(), gauges=CACHE_GAUGES)
    for way, budget in (("requests", owned.memory.requests), ("answers", owned.memory.answers)):
        text = "Broker: bytes that its clients hold of its memory; client_memory_bytes bounds them."
        page.add_gauge("magnetar_broker_client_memory_bytes", text, budget.held, way=way)
    page.add_histogram(
        "magnetar_broker_publish_seconds", "Broker: from an entry's arrival to its confirmation.", owned.publish_seconds
    )
    text = "Broker: take-over of a topic, from its turn to its readiness."
    page.add_histogram("magnetar_broker_load_seconds", text, owned.load_seconds)
    text = "Broker: questions for the owner of a topic."
    page.add_counter("magnetar_broker_lookups_total", text, owned.lookups)
    text = "Broker: requests of clients that were refused, by operation and reason."
    for kind in (refusals.PublishRefusal, refusals.SubscribeRefusal, refusals.AckRefusal):
        for each in kind:
            labels = {"operation": each.operation, "reason": each.name.lower()}
            page.add_counter("magnetar_broker_refused_total", text, refusals.REFUSAL_COUNTS[each], **labels)
    text = "Broker: messages that were reported with one copy (acks=one) and then failed."
    page.add_counter("magnetar_broker_first_copies_lost_total", text, FIRST_COPIES.lost)
    _metadata_use(page, owned.metadata_use)
    _shared_limits(page, owned)
    for bookie, numbers in owned.bookie_statistics().items():
        page.add_statistics("broker_peer", numbers, gauges=PEER_GAUGES, bookie=bookie)
    add_coordinator_metrics(page, owned.coordinators, cluster)
    survey, level = await owned.survey.run_survey(), page.query.level or owned.metrics_topics
    if page.query.namespace:
        survey = survey.select_namespace(page.query.namespace)
    if level == "auto":
        count = survey.count_topics() if page.query.namespace else len(owned.loaded)
        level = "topic" if count <= TOPIC_LEVEL_TOPICS_MAX else "namespace"
    if level in ("all", "topic"):
        topics = await _list_topics(owned, page.query)
    else:
        largest = survey.largest.values() if level == "namespace" else ()
        topics = list({facts.topic.name.full: facts.topic for each in largest for facts in each}.values())
    _sums(page, survey, len(owned.loaded), len(topics), by_namespace=level != "none")
    text = "Broker: idle topics that were unloaded since it was started."
    page.add_counter("magnetar_broker_idle_topics_unloaded_total", text, owned.idle_unloads)
    if pulsar is not None:
        pulsar.add(page, owned, survey, topics, each=level in ("all", "topic"))
    unread = await _topics(page, owned.world.clock, topics, TopicTransactionSeries(page, cluster))
    await _backlogs(page, unread)


async def _list_topics(owned: TopicManager, query: MetricsQuery) -> list[Topic]:
    """Returns the loaded topics of which each is shown: all, or what the query asks for, of that at most
    REQUESTED_TOPICS_MAX, in the order in which they were loaded."""
    if not query.level and not query.namespace:
        return list(owned.loaded.values())
    turns = EventLoopSlices(owned.world.clock)
    found: list[Topic] = []
    for number, topic in enumerate(list(owned.loaded.values())):
        if not query.namespace or str(topic.name.namespace_name) == query.namespace:
            found.append(topic)
            if len(found) == REQUESTED_TOPICS_MAX:
                break
        if not number % NAMES_AT_ONCE and turns.is_slice_used_up:
            await turns.begin_slice()
    return found


def _shared_limits(page: MetricsPage, broker: TopicManager) -> None:
    """Adds the limits in sum over brokers that bound topics of this broker, those first for which most waited."""
    from ...broker.session.sharing import describe_shared_limits  # there is a broker, so it is loaded

    rows = sorted(describe_shared_limits(broker), key=lambda row: (-row.throttled, row.place, row.policy))
    for row in rows[:SHARED_LIMITS_SHOWN_MAX]:
        labels = {"place": row.place, "policy": row.policy}
        text = "Broker: part of a limit in sum over brokers that this broker may use."
        page.add_gauge("magnetar_broker_shared_limit_share", text, row.share, **labels)
        text = "Broker: part of a limit in sum over brokers that this broker used in the last second, or stores."
        page.add_gauge("magnetar_broker_shared_limit_used", text, row.used, **labels)
        text = "Broker: what all brokers want together of a limit in sum over them, or store: parts of the limit."
        page.add_gauge("magnetar_broker_shared_limit_wanted", text, row.wanted, **labels)
        text = "Broker: how often something waited for its share of a limit, or a limit of stored bytes was reached."
        page.add_counter("magnetar_broker_shared_limit_throttled_total", text, row.throttled, **labels)


def _metadata_use(page: MetricsPage, use: MetadataResponsiveness) -> None:
    """Adds how the metadata answers this broker."""
    page.add_histogram(
        "magnetar_broker_metadata_commit_seconds", "Broker: a commit of the metadata that was done.", use.commit_seconds
    )
    text = "Broker: calls of the metadata that got no answer: no session, no connection, not in time."
    page.add_counter("magnetar_broker_metadata_failures_total", text, use.failures)
    text = "Broker: sessions with the metadata that were lost."
    page.add_counter("magnetar_broker_metadata_sessions_ended_total", text, use.sessions_ended)
    text = "Broker: since the metadata answered last; it is asked each second."
    page.add_gauge("magnetar_broker_metadata_silent_seconds", text, use.silent_s)


SUMMED_METRICS = {
    "subscriptions": "durable subscriptions of them",
    "producers": "connected producers",
    "consumers": "connected consumers",
    "storage_bytes": "bytes in the ledgers of its topics",
    "backlog": "not acknowledged by durable subscriptions, about",
    "messages_in": "messages published",
    "bytes_in": "bytes published",
    "messages_out": "messages delivered",
    "bytes_out": "bytes delivered",
}
"""The sums of loaded topics that are shown, of the broker and of each namespace (broker/node/survey.py
`TopicGroupTotals`)."""


def _sums(page: MetricsPage, survey: LoadedTopicsSurvey, loaded: int, shown: int, *, by_namespace: bool) -> None:
    """Adds the sums of the broker, and of each namespace."""
    from ...runtime.metrics import format_labels

    page.add_gauge("magnetar_broker_topics", "Broker: topics that are loaded.", loaded)
    text = "Broker: loaded topics that are not on this page: metrics_topics says which are."
    page.add_gauge("magnetar_broker_topics_not_shown", text, loaded - shown)
    text = "Broker: topics whose ledger has fewer bookies or copies than asked for."
    page.add_gauge("magnetar_broker_degraded_ledgers", text, survey.total.degraded)
    topics = page.add_series("magnetar_namespace_topics", "gauge", "Namespace: topics that are loaded.")
    labels = [(format_labels(namespace=name), sums) for name, sums in survey.namespaces.items() if by_namespace]
    for whose, sums in labels:
        topics.add(whose, sums.topics)
    for name, text in SUMMED_METRICS.items():
        counts = name.endswith(("_in", "_out"))
        metric = f"{name}_total" if counts else f"{name}_messages" if name == "backlog" else name
        (page.add_counter if counts else page.add_gauge)(
            f"magnetar_broker_{metric}", f"Broker: {text}.", getattr(survey.total, name)
        )
        series = page.add_series(
            f"magnetar_namespace_{metric}", "counter" if counts else "gauge", f"Namespace: {text}."
        )
        for whose, sums in labels:
            series.add(whose, getattr(sums, name))


async def _topics(
    page: MetricsPage, clock: Clock, topics: Sequence[Topic], transacted: TopicTransactionSeries
) -> list[_Unread]:
    """Adds the metrics of topics, in slices of the loop's time. Returns the subscriptions whose backlog must be
    read."""
    from ...broker.topic.statistics import count_unacknowledged_from_memory, find_blocked_reason  # it is loaded
    from ...proto.states import Blocked

    def series(name: str, kind: str, help: str) -> Callable[[str], None]:
        return page.add_series(f"magnetar_{name}", kind, help).lines.append

    messages_in = series("topic_messages_in_total", "counter", "Topic: messages published.")
    bytes_in = series("topic_bytes_in_total", "counter", "Topic: bytes published.")
    messages_out = series("topic_messages_out_total", "counter", "Topic: messages delivered.")
    bytes_out = series("topic_bytes_out_total", "counter", "Topic: bytes delivered.")
    producers = series("topic_producers", "gauge", "Topic: connected producers.")
    pending = series("topic_pending_entries", "gauge", "Topic: not confirmed yet.")
    storage = series("topic_storage_bytes", "gauge", "Topic: bytes in its ledgers.")
    ledgers = series("topic_ledgers", "gauge", "Topic: its ledgers.")
    text = "Topic: sealed ledgers without the key index that the policy asks for."
    unindexed = series("topic_unindexed_ledgers", "gauge", text)
    expired = series("topic_expired_entries_total", "counter", "Topic: not acknowledged within the TTL, so given up.")
    evicted = series("topic_evicted_entries_total", "counter", "Topic: given up to meet the backlog quota.")
    consumers = series("subscription_consumers", "gauge", "Subscription: connected.")
    unacked = series("subscription_unacked_messages", "gauge", "Subscription: handed out.")
    backlogs = series("subscription_backlog_messages", "gauge", "Subscription: not acked.")
    delayed = series("subscription_delayed_messages", "gauge", "Subscription: of its backlog, to be delivered later.")
    held = series("subscription_held_messages", "gauge", "Subscription: of its backlog, failed and held back.")
    text = "Subscription: age of its oldest message; 0: none, or not known."
    oldest = series("subscription_oldest_unacked_seconds", "gauge", text)
    out = series("subscription_messages_out_total", "counter", "Subscription: messages delivered.")
    again = series("subscription_redelivered_messages_total", "counter", "Subscription: delivered again.")
    past = series("subscription_expired_messages_total", "counter", "Subscription: their own time had passed.")
    letters = series("subscription_dead_letters_total", "counter", "Subscription: entries moved as dead letters.")
    blocked = series("subscription_blocked", "gauge", "Subscription: 1; what waits is not delivered, for this reason.")
    text = "Subscription: Key_Shared; how long the longest held key has kept others of its slot waiting; 0: none does."
    held_slots = series("subscription_oldest_slot_seconds", "gauge", text)
    unread, turns, now_ms = list[_Unread](), EventLoopSlices(clock), clock.wall_ms()
    for start in range(0, len(topics), TOPICS_AT_ONCE):
        for topic in topics[start : start + TOPICS_AT_ONCE]:
            name, traffic, log, life = escape_label(topic.name.full), topic.traffic, topic.log, topic.maintenance
            shape = log.shape
            whose = f'{{topic="{name}"}} '
            messages_in(f"{whose}{traffic.messages_in}\n")
            bytes_in(f"{whose}{traffic.bytes_in}\n")
            messages_out(f"{whose}{traffic.messages_out}\n")
            bytes_out(f"{whose}{traffic.bytes_out}\n")
            producers(f"{whose}{len(topic.producers)}\n")
            pending(f"{whose}{log.pending_entries}\n")
            storage(f"{whose}{shape.size}\n")
            ledgers(f"{whose}{len(shape)}\n")
            unindexed(f"{whose}{topic.key_indexes.count_unindexed_ledgers()}\n")
            expired(f"{whose}{life.expired}\n")
            evicted(f"{whose}{life.evicted}\n")
            transacted.add(topic, whose)
            for subscription in topic.subscriptions.values():
                if subscription.is_durable:
                    dispatcher, later = subscription.dispatcher, subscription.delayed
                    whose = f'{{subscription="{escape_label(subscription.name)}",topic="{name}"}} '
                    consumers(f"{whose}{len(subscription.consumers)}\n")
                    unacked(f"{whose}{dispatcher.unacked}\n")
                    delayed(f"{whose}{0 if later is None else later.core.count}\n")
                    held(f"{whose}{len(dispatcher.held)}\n")
                    got, moves = subscription.deliveries, subscription.dead_letters
                    out(f"{whose}{got.messages}\n")
                    again(f"{whose}{got.redelivered}\n")
                    past(f"{whose}{subscription.expired.count}\n")
                    letters(f"{whose}{0 if moves is None else moves.letters}\n")
                    backlog = count_unacknowledged_from_memory(log, subscription)
                    reason = find_blocked_reason(topic, subscription, backlog)
                    if backlog != 0 and reason not in (Blocked.NO, Blocked.CAUGHT_UP):
                        blocked(f'{{reason="{reason.name.lower()}",{whose[1:]}1\n')
                    if backlog is None:
                        unread.append((topic, subscription, partial(_add_line, backlogs, whose)))
                    else:
                        backlogs(f"{whose}{backlog}\n")
                    arrived = 0 if backlog == 0 else life.oldest_arrival_ms_in_memory(subscription)
                    oldest(f"{whose}{max(0, now_ms - arrived) / 1000 if arrived else 0}\n")
                    if dispatcher.policy.by_keys:
                        now_s = clock.monotonic()
                        slots = dispatcher.policy.find_held_slots(now_s)
                        held_slots(f"{whose}{now_s - slots[0].since_s if slots else 0:.3f}\n")
        if turns.is_slice_used_up:
            await turns.begin_slice()
    return unread


def _add_line(add: Callable[[str], None], whose: str, value: int) -> None:
    add(f"{whose}{value}\n")


async def _backlogs(page: MetricsPage, unread: Sequence[_Unread]) -> None:
    """Adds backlogs that must be read. Those that cannot be read, or not in time, are left out and counted."""
    from ...broker.topic.statistics import count_unacknowledged  # there is a broker, so it is loaded

    missing = len(unread)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BACKLOGS_TIMEOUT_S):
            for topic, subscription, add in unread:
                try:
                    add(await count_unacknowledged(topic.log, subscription))
                    missing -= 1
                except MagnetarError as error:
                    _LOG.debug("%s/%s: no backlog: %s", topic.name, subscription.name, error)
    page.add_gauge("magnetar_broker_backlogs_missing", "Broker: backlogs that could not be read in time.", missing)


# --------------------------------------------------------------------------------------------------------- voice
# How a server says that it serves, and what its page of metrics shows: alone, or as one of several processes.
#
# Alone it prints the ready line, and its page is its own. One of several tells its parent (runtime/), which
# prints one line once all serve; the page of one of them, `shows`, is that of all: each series has the label `process`.


_said: list[str] = []
"""The ready lines that this process printed: one at most, for it is one server."""


def has_announced_ready() -> bool:
    """Returns whether this process has announced that it is ready."""
    return bool(_said)


def announce_process_ready(url: str, **facts: object) -> None:
    """Prints the ready line of this process, for which scripts wait, with the address of probes if there is one.
    Nothing else is printed on stdout. From now on `has_announced_ready` returns True."""
    _said.append(url)
    print_ready_line(url, **facts, **_probed())


def _probed() -> dict[str, object]:
    """Returns the fact for the ready line that says where probes ask."""
    return {} if PROCESS_HEALTH.endpoint is None else {"health": PROCESS_HEALTH.endpoint}


def print_ready_line(url: str, **facts: object) -> None:
    """Prints `ready URL NAME=VALUE …` on stdout, and tells systemd that the server is ready."""
    notify_systemd("READY=1")
    print("ready", url, *(f"{name}={value}" for name, value in facts.items()), flush=True)


class ServerReporter(Protocol):
    """Reports that a server is ready, with its addresses, and decides which metrics the page of the server contains.
    Implemented for a server of one process and for one of several processes. The code that runs a broker or a bookie
    calls both methods once, when it serves."""

    def report_ready(self, url: str, **facts: object) -> None:
        """Reports that this process serves. `url`: the address for its clients; `facts`: other values of the ready
        line, by name."""
        ...

    def combine_metrics(self, own: FillMetricsPage) -> FillMetricsPage:
        """Returns the function that writes the complete page of metrics. `own` is the function that writes the metrics
        of this process only."""
        ...


class SingleProcessReporter:
    """The ServerReporter of a server that consists of one process."""

    def report_ready(self, url: str, **facts: object) -> None:
        announce_process_ready(url, **facts)

    def combine_metrics(self, own: FillMetricsPage) -> FillMetricsPage:
        return own


class ChildProcessReporter:
    """The ServerReporter of one process of a server that consists of several processes. It reports to the parent
    process. `shows`: the metrics page of this process has the metrics of all. `said`: the process has reported that it
    is ready."""

    def __init__(self, child: ParentLink, *, shows: bool) -> None:
        self.child = child
        self._shows = shows
        self._own: FillMetricsPage | None = None
        self.said = False

    async def attach(self) -> None:
        """Connects to the parent process, which may ask for the metrics of this process from now on."""
        await self.child.attach(self._text)

    def report_ready(self, url: str, **facts: object) -> None:
        self.said = True
        self.child.report_ready(url=url, **facts, **_probed())

    def combine_metrics(self, own: FillMetricsPage) -> FillMetricsPage:
        self._own = own
        return self._all if self._shows else own

    async def _all(self, page: MetricsPage) -> None:
        others, _ = await asyncio.gather(self.child.ask_metrics_of_others(str(page.query)), self._page(page))
        page.process, page.others = self.child.name, dict(others.pages)
        for name, count in others.restarts.items():
            text = "How often a process of this server ended and was started again."
            page.add_counter("magnetar_processes_restarts_total", text, count, child=name)
            shown = int(name == self.child.name or name in others.pages)
            text = "Whether a process of this server serves and said its metrics: 1, or 0."
            page.add_gauge("magnetar_processes_shown", text, shown, child=name)

    async def _page(self, page: MetricsPage) -> None:
        assert self._own is not None, "it was told what to measure"
        await self._own(page)

    async def _text(self, query: str) -> bytes:
        from ...runtime.metrics import MetricsPage, MetricsQuery
        from ...runtime.metrics_server import format_metrics_page

        if self._own is None:
            return b""  # it does not serve yet
        page = MetricsPage(MetricsQuery.parse(query))
        await self._own(page)
        return await asyncio.to_thread(lambda: b"".join(format_metrics_page(page)))


# --------------------------------------------------------------------------------------------------------- transactions
# Transactions on the page of metrics: each coordinator that the broker has, and topics that have seen transactions.
#
#     magnetar_transactions_…    per coordinator (label `coordinator`), since its take-over; `aborted` by `reason`
#     magnetar_topic_…, magnetar_subscription_…    only of topics that have seen a transaction
#
# With `--metrics-compat pulsar` the same numbers also under Pulsar's names, for boards made for Pulsar;
# `PULSAR_TXN_METRICS` is the table, docs/operations.md shows it. Guarding test:
# tests/cli/run/test_metrics_transactions.py.


TXN_GAUGES = frozenset({
    "halves_bytes", "halves_open", "halves_parked", "leased", "open", "prepared", "settling_topics", "unsettled",
})  # fmt: skip
TXN_LATENCY_METRIC_PREFIX = "pulsar_txn_execution_latency_le_"


class PulsarTxnMetric(NamedTuple):
    """A metric under Pulsar's name. Its value is computed from our metrics with the names `ours`; `note` says which
    part of them counts, or how the value differs."""

    name: str
    ours: tuple[str, ...]
    note: str = ""


PULSAR_TXN_METRICS = (
    PulsarTxnMetric("pulsar_txn_active_count", ("magnetar_transactions_open", "magnetar_transactions_prepared")),
    PulsarTxnMetric("pulsar_txn_created_total", ("magnetar_transactions_begun_total",), "by its first use"),
    PulsarTxnMetric("pulsar_txn_committed_total", ("magnetar_transactions_committed_total",)),
    PulsarTxnMetric("pulsar_txn_aborted_total", ("magnetar_transactions_aborted_total",), "for whatever reason"),
    PulsarTxnMetric("pulsar_txn_timeout_total", ("magnetar_transactions_aborted_total",), "`reason` is `timeout`"),
    PulsarTxnMetric("pulsar_txn_append_log_total", ("magnetar_transactions_records_total",),
        "begins and joins write no record"),
    PulsarTxnMetric(TXN_LATENCY_METRIC_PREFIX + "10", ("magnetar_transactions_seconds",),
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
    from ...broker.transaction.intents_core import DURATION_BOUNDS_S  # there is a broker, so it is loaded

    for each in loaded:
        number, aborted, numbers = str(each.number), each.aborts_by_reason(), each.statistics()
        numbers.pop("aborted")  # by reason instead
        page.add_statistics("transactions", numbers, gauges=TXN_GAUGES, coordinator=number)
        for reason, count in aborted.items():
            page.add_counter(
                "magnetar_transactions_aborted_total", "Transactions: aborted.", count, coordinator=number,
                reason=reason,
            )  # fmt: skip
        page.add_gauge(
            "magnetar_transactions_oldest_seconds", "Transactions: how long the oldest open one is open; 0: none.",
            each.oldest_open_s, coordinator=number,
        )  # fmt: skip
        lasted = Histogram(DURATION_BOUNDS_S, *each.duration_histogram())
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
    shown |= {TXN_LATENCY_METRIC_PREFIX + bound: count for bound, count in zip(bounds, lasted.counts, strict=True)}
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
