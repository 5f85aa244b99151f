"""The metrics of a process: every metric has its name and its kind here.

    magnetar_bookie_…          each bookie's statistics and histograms (label `bookie`, its uuid)
    magnetar_metadata_…        the metadata tree's
    magnetar_broker_…          the tail cache, the topics and the time that publishes take
    magnetar_transactions_…    per coordinator of transactions that it has (transactions.py; label `coordinator`)
    magnetar_broker_peer_…     its connections to bookies (label `bookie`)
    magnetar_topic_…           per loaded topic (label `topic`)
    magnetar_subscription_…    per durable subscription (labels `topic`, `subscription`)
    magnetar_process_memory_…  what memory_bytes is shared out to (memory.py; label `share`)
    magnetar_background_…      long-lived tasks that failed (runtime/supervisor.py)
    magnetar_unreadable_…      records of the metadata that cannot be read here (metadata/unreadable.py)

A new number of a part's `statistics()` is a counter, unless it is among the gauges here: a number that can fall must be
added there. Counters start at zero with the process, a topic's when it is loaded. Guarding test:
tests/cli/metrics/test_metrics.py, which also fails when a counter falls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...metadata.unreadable import UNREADABLE
from ...proto.errors import MagnetarError
from ...runtime.memory.descriptors import PROCESS
from ...runtime.supervisor import Supervisor
from .bookkeeper import BookKeeperNames
from .memory import add_shares, of_bookies, of_broker, of_metadata
from .transactions import OfTopics, coordinators

if TYPE_CHECKING:
    from ...bookie.server import Bookie
    from ...broker.server import Broker
    from ...broker.subscription.subscription import Subscription
    from ...broker.topic.topic import Topic
    from ...metadata.server import MetadataServer
    from ...metadata.sqlite import SqliteStore
    from ...runtime.clock import Clock
    from ...runtime.memory.shares import Plan
    from ...runtime.monitoring.metrics import Page

_Unread = tuple["Topic", "Subscription", Callable[[int], None]]
"""A subscription whose backlog is not in memory, and the function that takes its number."""

_LOG = logging.getLogger("magnetar.metrics")

BOOKIE_GAUGES = frozenset({
    "fences_waiting_bytes", "lacs_waiting_bytes", "newcomers_waiting_bytes", "reads_waiting_bytes",
    "admin_requests", "background_failing", "background_tasks", "disk_free_bytes", "disk_reads", "disk_reads_bytes",
    "disk_total_bytes",
    "gc_doubtful", "gc_refused", "gc_running", "gc_unexplained",
    "held_adds", "held_bytes", "index_cache_bytes", "index_extents", "index_logs", "index_pages",
    "journal_queued_bytes", "journal_queued_records", "ledgers", "limbo", "limbo_ledgers",
    "limbo_ledgers_done", "memtable_bytes", "quarantined", "read_cache_bytes", "read_only",
    "repair_auditor", "repair_lost_bookies", "repair_under_replicated", "repair_working_on", "reserve_held",
    "scrub_last_pass_s", "scrub_pass", "tombstones",
})  # fmt: skip
BOOKIE_HISTOGRAMS = {
    "journal_queue_seconds": "from the journal records of a turn to the hand-over of their block to the disk",
    "journal_sync_seconds": "write and sync of a journal block",
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
CACHE_GAUGES = frozenset({"bytes", "bytes_max", "entries"})
PEER_GAUGES = frozenset({"in_flight", "queued_bytes"})
BACKLOGS_TIMEOUT_S = 2.0
"""Seconds for all backlogs of a page: one that is not in memory costs a read from a bookie."""


class Measured(msgspec.Struct, frozen=True):
    """The parts of a process that have numbers. Called only from their event loop."""

    metadata: SqliteStore | MetadataServer | None = None
    bookies: Sequence[Bookie] = ()
    broker: Broker | None = None
    second: BookKeeperNames | None = None
    pulsar: bool = False  # Pulsar's names of transactions as well
    memory: Plan | None = None

    async def __call__(self, page: Page) -> None:
        if self.metadata is not None:
            page.statistics("metadata", self.metadata.statistics(), gauges=METADATA_GAUGES)
        for bookie in self.bookies:
            _bookie(page, bookie)
            if self.second is not None:
                self.second.add(page, bookie.id)
        if self.broker is not None:
            await _broker(page, self.broker, self.broker.owned.config.cluster if self.pulsar else None)
        if self.memory is not None:
            used = of_bookies(self.bookies) if self.bookies else {}
            used |= of_broker(self.broker) if self.broker is not None else {}
            used |= of_metadata(self.metadata) if self.metadata is not None else {}
            add_shares(page, self.memory, used)
        text = "Process: open on all ports, but for a bookie's."
        page.gauge("magnetar_process_connections", text, PROCESS.connections)
        text = "Process: connections that all ports may have open, of the limit of open files."
        page.gauge("magnetar_process_connections_limit", text, PROCESS.connections_max)
        text = "Connections that were refused because the others hold all that the limit of open files allows."
        page.counter("magnetar_process_connections_refused_total", text, PROCESS.refused)
        page.statistics("unreadable", UNREADABLE.statistics(), gauges=UNREADABLE_GAUGES)
        page.counter("magnetar_background_restarts_total", "Long-lived tasks that failed.", Supervisor.restarted)
        for name, count in sorted(Supervisor.failing_now().items()):
            page.gauge("magnetar_background_failing", "Long-lived tasks that fail now, by name.", count, task=name)


def second_names(compat: str, clock: Clock) -> BookKeeperNames | None:
    """Returns the second names that --metrics-compat asks for; None: none."""
    return BookKeeperNames(clock) if compat in ("bookkeeper", "both") else None


def pulsars_names(compat: str) -> bool:
    """Whether --metrics-compat asks for Pulsar's names."""
    return compat in ("pulsar", "both")


def _bookie(page: Page, bookie: Bookie) -> None:
    page.statistics("bookie", bookie.statistics(), gauges=BOOKIE_GAUGES, bookie=bookie.id)
    for name, histogram in bookie.histograms().items():
        page.histogram(f"magnetar_bookie_{name}", f"Bookie: {BOOKIE_HISTOGRAMS[name]}.", histogram, bookie=bookie.id)


async def _broker(page: Page, broker: Broker, cluster: str | None) -> None:
    """Adds the metrics of a broker. `cluster`: for Pulsar's names; None: without them."""
    owned = broker.owned
    page.statistics("broker_cache", owned.cache.statistics(), gauges=CACHE_GAUGES)
    page.gauge("magnetar_broker_topics", "Broker: topics that are loaded.", len(owned.loaded))
    for way, budget in (("requests", owned.memory.requests), ("answers", owned.memory.answers)):
        text = "Broker: bytes that its clients hold of its memory; client_memory_bytes bounds them."
        page.gauge("magnetar_broker_client_memory_bytes", text, budget.held, way=way)
    page.histogram(
        "magnetar_broker_publish_seconds", "Broker: from an entry's arrival to its confirmation.", owned.publish_seconds
    )
    for bookie, numbers in owned.connections().items():
        page.statistics("broker_peer", numbers, gauges=PEER_GAUGES, bookie=bookie)
    coordinators(page, owned.coordinators, cluster)
    topics = list(owned.loaded.values())
    degraded, unread = await _topics(page, owned.world.clock, topics, OfTopics(page, cluster))
    page.gauge(
        "magnetar_broker_degraded_ledgers", "Broker: topics whose ledger has fewer bookies or copies than asked for.",
        degraded,
    )  # fmt: skip
    await _backlogs(page, unread)


async def _topics(
    page: Page, clock: Clock, topics: Sequence[Topic], transacted: OfTopics
) -> tuple[int, list[_Unread]]:
    """Works in slices of the loop. Returns how many are degraded, and the subscriptions whose backlog must be read."""
    from ...broker.common.turns import Turns
    from ...broker.topic.backlog import size_now  # there is a broker, so it is loaded
    from ...runtime.monitoring.metrics import escaped

    def series(name: str, kind: str, help: str) -> Callable[[str, float], None]:
        return page.series(f"magnetar_{name}", kind, help).add

    messages_in = series("topic_messages_in_total", "counter", "Topic: messages published.")
    bytes_in = series("topic_bytes_in_total", "counter", "Topic: bytes published.")
    messages_out = series("topic_messages_out_total", "counter", "Topic: messages delivered.")
    bytes_out = series("topic_bytes_out_total", "counter", "Topic: bytes delivered.")
    producers = series("topic_producers", "gauge", "Topic: connected producers.")
    pending = series("topic_pending_entries", "gauge", "Topic: not confirmed yet.")
    storage = series("topic_storage_bytes", "gauge", "Topic: bytes in its ledgers.")
    ledgers = series("topic_ledgers", "gauge", "Topic: its ledgers.")
    consumers = series("subscription_consumers", "gauge", "Subscription: connected.")
    unacked = series("subscription_unacked_messages", "gauge", "Subscription: handed out.")
    backlogs = series("subscription_backlog_messages", "gauge", "Subscription: not acked.")
    delayed = series("subscription_delayed_messages", "gauge", "Subscription: of its backlog, to be delivered later.")
    held = series("subscription_held_messages", "gauge", "Subscription: of its backlog, failed and held back.")
    degraded, unread, turns = 0, list[_Unread](), Turns(clock)
    for topic in topics:
        name, traffic, log = escaped(topic.name.full), topic.traffic, topic.log
        whose = f'{{topic="{name}"}} '
        messages_in(whose, traffic.messages_in)
        bytes_in(whose, traffic.bytes_in)
        messages_out(whose, traffic.messages_out)
        bytes_out(whose, traffic.bytes_out)
        producers(whose, len(topic.producers))
        pending(whose, log.pending_entries)
        storage(whose, log.shape.size)
        ledgers(whose, len(log.shape))
        degraded += log.degraded
        transacted.add(topic, whose)
        for subscription in topic.subscriptions.values():
            if subscription.durable:
                whose = f'{{subscription="{escaped(subscription.name)}",topic="{name}"}} '
                consumers(whose, len(subscription.consumers))
                unacked(whose, subscription.dispatcher.unacked)
                delayed(whose, subscription.delayed.core.count if subscription.delayed is not None else 0)
                held(whose, len(subscription.dispatcher.held))
                backlog = size_now(log, subscription)
                if backlog is None:
                    unread.append((topic, subscription, partial(backlogs, whose)))
                else:
                    backlogs(whose, backlog)
        if turns.over:
            await turns.next()
    return degraded, unread


async def _backlogs(page: Page, unread: Sequence[_Unread]) -> None:
    """Backlogs that cannot be read, or not in time, are left out and counted."""
    from ...broker.topic.backlog import size  # there is a broker, so it is loaded

    missing = len(unread)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(BACKLOGS_TIMEOUT_S):
            for topic, subscription, add in unread:
                try:
                    add(await size(topic.log, subscription))
                    missing -= 1
                except MagnetarError as error:
                    _LOG.debug("%s/%s: no backlog: %s", topic.name, subscription.name, error)
    page.gauge("magnetar_broker_backlogs_missing", "Broker: backlogs that could not be read in time.", missing)
