"""What the loaded topics of a broker come to: sums, sums per namespace, and the topics that matter most.

    survey = await surveyor.take()      one walk over all loaded topics, in slices of the loop; that of the last
                                        SURVEY_S again
    survey.total.backlog, survey.namespaces["public/default"].bytes_in
    survey.largest["traffic"]           at most TOP topics, the largest first; also by "backlog" and by "age"

The metrics (cli/run/metrics.py) and the summaries (broker/session/summaries.py) show it. A walk reads no entry and adds
no work to a message: it compares the counters of each topic with those of the walk before. So totals never fall, though
topics come and go; what a topic counts between the last walk and its unloading is missing. A backlog that is not in
memory is estimated from its place in its ledger. The age of the oldest message is that of the entry last known as such
(broker/topic/maintenance.py); at most AGES_READ others are read after a walk.
Guarding tests: tests/broker/node/test_survey.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from heapq import heappush, heappushpop
from typing import Any, NamedTuple

import msgspec

from ...proto.errors import MagnetarError
from ...runtime.clock import Clock
from ...runtime.tasks import Tasks
from ..common.retry import SharedCallsByKey
from ..common.token_bucket import EventLoopSlices
from ..topic.statistics import NO_RATES, TrafficRates, estimate_backlog
from ..topic.topic import Topic

_LOG = logging.getLogger("magnetar.broker")

SURVEY_S = 2.0
"""Seconds for which a walk is shown again."""
TOP = 50
"""Topics that are shown by each measure."""
STRIDE = 16
"""Topics between two readings of the clock: less than 0.1 ms."""
AGES_READ = 100
"""Entries that are read after a walk to learn how old the oldest message of a subscription is."""
AGES_S = 2.0
"""Seconds after which such reads are given up until the next walk."""

MEASURES = ("traffic", "backlog", "age")


class TopicTotals(msgspec.Struct):
    """Sums over a group of loaded topics: number of topics, backlog, storage, rates. Counters of messages and bytes are
    since the start of the broker; all other fields are current values."""

    topics: int = 0
    subscriptions: int = 0
    producers: int = 0
    consumers: int = 0
    storage_bytes: int = 0
    backlog: int = 0  # messages of all durable subscriptions
    degraded: int = 0  # topics whose ledger has fewer copies than asked for
    rate_in: float = 0.0  # messages a second since the walk before, as the next three
    rate_out: float = 0.0
    throughput_in: float = 0.0
    throughput_out: float = 0.0
    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0


class MeasuredTopic(NamedTuple):
    """The measured values of one topic. `rates`: its traffic between the last two measurements. `oldest_ms`: the
    arrival time of the oldest unacknowledged message, in milliseconds since the epoch; 0: there is no such message, or
    its time is not known yet."""

    topic: Topic
    rates: TrafficRates
    backlog: int
    oldest_ms: int


class TopicSurvey(msgspec.Struct, frozen=True):
    """The result of one measurement of all loaded topics: totals of the broker, totals per namespace, and the largest
    topics."""

    at_s: float  # of the clock
    total: TopicTotals
    namespaces: Mapping[str, TopicTotals]
    largest: Mapping[str, tuple[MeasuredTopic, ...]]  # by each of MEASURES, the largest first
    full: tuple[str, ...] = ()  # at most TOP topics that take no publishes, because of their backlog quota

    def count_topics(self) -> int:
        """Returns the number of topics in all namespaces of this survey."""
        return sum(each.topics for each in self.namespaces.values())

    def of_namespace(self, name: str) -> TopicSurvey:
        """Returns a survey that has only the totals and the largest topics of one namespace. Its `total` remains the
        total of all namespaces."""
        largest = {
            measure: tuple(each for each in found if str(each.topic.name.namespace_name) == name)
            for measure, found in self.largest.items()
        }
        return TopicSurvey(
            self.at_s, self.total, {at: sums for at, sums in self.namespaces.items() if at == name}, largest
        )


def measure_topic(topic: Topic) -> MeasuredTopic:
    """Measures one topic now, and returns the values. The rates are those of the last survey. Reads no entry."""
    log, shape, backlog, oldest = topic.log, topic.log.shape, 0, 0
    for each in topic.subscriptions.values():
        if each.is_durable and shape.has_readable_entry_after(each.cursor.mark):
            backlog += estimate_backlog(log, each)
            arrived = topic.maintenance.oldest_arrival_ms_in_memory(each)
            if arrived and (not oldest or arrived < oldest):
                oldest = arrived
    return MeasuredTopic(topic, topic.traffic.walked_rates, backlog, oldest)


class _Walk:
    """A walk that has begun."""

    __slots__ = ("ageless", "full", "heaps", "passed_s", "sums", "walked")

    def __init__(self, passed_s: float) -> None:
        self.passed_s = passed_s
        self.sums: dict[int, tuple[str, TopicTotals]] = {}  # by the identity of the namespace's name
        self.heaps: dict[str, list[tuple[float, int, MeasuredTopic]]] = {name: [] for name in MEASURES}
        self.ageless: list[Callable[[], Coroutine[Any, Any, object]]] = []  # the reads of ages
        self.full: list[str] = []
        self.walked = 0

    def add(self, topic: Topic) -> None:
        self.walked += 1
        name = topic.name.namespace_name
        found = self.sums.get(id(name))
        if found is None:
            found = self.sums[id(name)] = str(name), TopicTotals()
        sums, log, traffic = found[1], topic.log, topic.traffic
        shape = log.shape
        sums.topics += 1
        sums.storage_bytes += shape.size
        sums.degraded += log.is_degraded
        if topic.maintenance.quota is not None and len(self.full) < TOP:
            self.full.append(topic.name.full)
        producers = len(topic.producers)
        if producers:
            sums.producers += producers
        now = traffic.messages_in, traffic.messages_out, traffic.bytes_in, traffic.bytes_out
        if now != traffic.walked:
            self._count(sums, topic, now)
        elif traffic.walked_rates is not NO_RATES:
            traffic.walked_rates = NO_RATES
        backlog = oldest = 0
        for each in topic.subscriptions.values():
            if each.consumers:
                sums.consumers += len(each.consumers)
            if each.store is not None:
                sums.subscriptions += 1
                if shape.has_readable_entry_after(each.cursor.mark):
                    backlog += estimate_backlog(log, each)
                    arrived = topic.maintenance.oldest_arrival_ms_in_memory(each)
                    if arrived == 0 and len(self.ageless) < AGES_READ:
                        self.ageless.append(partial(topic.maintenance.oldest_arrival_ms, each))
                    elif arrived and (oldest == 0 or arrived < oldest):
                        oldest = arrived
        if backlog:
            sums.backlog += backlog
            self._note("backlog", backlog, MeasuredTopic(topic, traffic.walked_rates, backlog, oldest))
            if oldest:
                self._note("age", -oldest, MeasuredTopic(topic, traffic.walked_rates, backlog, oldest))
        if traffic.walked_rates is not NO_RATES:
            rates = traffic.walked_rates
            self._note("traffic", rates.bytes_in + rates.bytes_out, MeasuredTopic(topic, rates, backlog, oldest))

    def _count(self, sums: TopicTotals, topic: Topic, now: tuple[int, int, int, int]) -> None:
        traffic, passed_s = topic.traffic, self.passed_s
        grown = [new - old for new, old in zip(now, traffic.walked, strict=True)]
        traffic.walked = now
        sums.messages_in += grown[0]
        sums.messages_out += grown[1]
        sums.bytes_in += grown[2]
        sums.bytes_out += grown[3]
        rates = traffic.walked_rates = TrafficRates(*(each / passed_s for each in grown))
        sums.rate_in += rates.messages_in
        sums.rate_out += rates.messages_out
        sums.throughput_in += rates.bytes_in
        sums.throughput_out += rates.bytes_out

    def _note(self, measure: str, size: float, facts: MeasuredTopic) -> None:
        heap = self.heaps[measure]
        if len(heap) < TOP:
            heappush(heap, (size, self.walked, facts))
        elif size > heap[0][0]:
            heappushpop(heap, (size, self.walked, facts))

    def largest(self) -> dict[str, tuple[MeasuredTopic, ...]]:
        return {
            measure: tuple(facts for _, _, facts in sorted(heap, reverse=True)) for measure, heap in self.heaps.items()
        }


class TopicSurveyRunner:
    """Measures all loaded topics of a broker on request, at most once in SURVEY_S seconds."""

    def __init__(self, clock: Clock, topics: Callable[[], Iterable[Topic]]) -> None:
        self._clock = clock
        self._topics = topics
        self._began_s = clock.monotonic()
        self._last: TopicSurvey | None = None
        self._totals: dict[str, TopicTotals] = {}  # since the broker was started, of namespaces that have a topic
        self._total = TopicTotals()
        self._runs: SharedCallsByKey[None, TopicSurvey] = SharedCallsByKey()
        self._tasks = Tasks()  # it logs a fault of ours
        self._reading: asyncio.Task[None] | None = None

    async def take(self) -> TopicSurvey:
        """Measures all loaded topics and returns the survey. If the last measurement is not older than SURVEY_S
        seconds, returns its survey instead. Concurrent callers share one measurement."""
        last = self._last
        if last is not None and self._clock.monotonic() - last.at_s < SURVEY_S:
            return last
        return await self._runs.run(None, self._walk)

    async def _walk(self) -> TopicSurvey:
        before_s = self._last.at_s if self._last is not None else self._began_s
        at_s = self._clock.monotonic()
        walk, turns = _Walk(max(at_s - before_s, 0.001)), EventLoopSlices(self._clock)
        topics = list(self._topics())
        for start in range(0, len(topics), STRIDE):
            for topic in topics[start : start + STRIDE]:
                walk.add(topic)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        found = self._last = self._sum_up(at_s, walk)
        if walk.ageless and (self._reading is None or self._reading.done()):
            self._reading = self._tasks.spawn(_read_ages(walk.ageless), "ages of oldest messages")
        return found

    def _sum_up(self, at_s: float, walk: _Walk) -> TopicSurvey:
        namespaces: dict[str, TopicTotals] = {}
        for name, sums in walk.sums.values():
            known = namespaces.setdefault(name, TopicTotals())
            for each in TopicTotals.__struct_fields__:
                setattr(known, each, getattr(known, each) + getattr(sums, each))
        total = TopicTotals()
        for name, sums in namespaces.items():
            for each in TopicTotals.__struct_fields__:
                setattr(total, each, getattr(total, each) + getattr(sums, each))
            _add_totals(sums, self._totals.get(name))
        _add_totals(total, self._total)
        self._totals, self._total = namespaces, total
        return TopicSurvey(at_s, total, namespaces, walk.largest(), tuple(sorted(walk.full)))

    def close(self) -> None:
        self._tasks.cancel()


async def _read_ages(ageless: Sequence[Callable[[], Coroutine[Any, Any, object]]]) -> None:
    """Has the topics learn when the oldest messages of some subscriptions arrived, for the next walks."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(AGES_S):
            for read in ageless:
                try:
                    await read()
                except MagnetarError as error:
                    _LOG.debug("the age of an oldest message is not known: %s", error)


def _add_totals(sums: TopicTotals, before: TopicTotals | None) -> None:
    """Adds to the totals of `sums`, which are those since the walk before, what was counted until then."""
    if before is not None:
        sums.messages_in += before.messages_in
        sums.bytes_in += before.bytes_in
        sums.messages_out += before.messages_out
        sums.bytes_out += before.bytes_out
