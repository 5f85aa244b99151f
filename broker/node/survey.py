"""Measures the loaded topics of a broker: their sums, the sums per namespace, and the largest topics.

    survey = await runner.run_survey()  walks over all loaded topics, in slices of the event loop; returns the last
                                        survey if it is younger than SURVEY_CACHE_S
    survey.total.backlog, survey.namespaces["public/default"].bytes_in
    survey.largest["traffic"]           at most TOP_TOPICS topics, the largest first; also by "backlog" and by "age"

With more than TOPICS_WALKED_ON_REQUEST topics a walk would hold the loop for too long. Then the maintenance, which
looks at each topic every `trim_interval_s` anyway, walks them in its rounds, and a request gets the last round, which
began at most ROUND_AGE_S_MAX before: it costs nothing, however many topics there are.

The metrics (cli/run/metrics.py) and the summaries (broker/session/summaries.py) show the survey. A walk reads no entry,
and messages do no work for it: a walk compares the counters of each topic with those of the previous walk. So totals
never decrease when topics are unloaded; only what a topic counts between the last walk and its unloading is missing. If
the exact backlog is not in memory, it is estimated from the position in the ledger. The age of the oldest message is
the last one that was read (broker/topic/maintenance.py). If none was read, it is read after the walk, for at most
AGES_READ_MAX subscriptions.
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
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.tasks import Tasks
from ..common.retry import SharedCallsByKey
from ..topic.statistics import NO_RATES, TrafficRates, estimate_backlog
from ..topic.topic import Topic

_LOG = logging.getLogger("magnetar.broker")

SURVEY_CACHE_S = 2.0
"""Seconds for which a walk is shown again."""
TOPICS_WALKED_ON_REQUEST = 10_000
"""With more loaded topics the rounds of maintenance measure them: a walk over 10,000 takes 30 ms."""
ROUND_AGE_S_MAX = 30.0
"""Seconds after whose begin a round is not shown any more: when maintenance is held up, a request walks by itself."""
TOP_TOPICS = 50
"""Topics that are shown by each measure."""
TOPICS_PER_CLOCK_READ = 16
"""Topics between two readings of the clock: less than 0.1 ms."""
AGES_READ_MAX = 100
"""Entries that are read after a walk to learn how old the oldest message of a subscription is."""
AGE_READ_TIMEOUT_S = 2.0
"""Seconds after which such reads are given up until the next walk."""

TOPIC_MEASURES = ("traffic", "backlog", "age")


class TopicGroupTotals(msgspec.Struct):
    """Sums over a group of loaded topics: their number, that of their durable subscriptions, producers and consumers,
    their backlog, stored bytes and rates. Rates are messages per second, throughputs bytes per second. Counters of
    messages and bytes count from the start of the broker; all other fields are current values."""

    topics: int = 0
    subscriptions: int = 0
    producers: int = 0
    consumers: int = 0
    storage_bytes: int = 0
    backlog: int = 0  # messages of all durable subscriptions
    degraded: int = 0  # topics whose ledger has fewer copies than asked for
    in_memory: int = 0  # topics with durability=memory
    rate_in: float = 0.0  # messages a second since the walk before, as the next three
    rate_out: float = 0.0
    throughput_in: float = 0.0
    throughput_out: float = 0.0
    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0


class MeasuredTopic(NamedTuple):
    """The measured values of one topic. `rates`: its traffic between the last two surveys; `backlog`: the
    unacknowledged messages of all durable subscriptions. `oldest_ms`: the arrival time (ms since the epoch) of the
    oldest unacknowledged message of the subscription that has acknowledged least; 0 if there is no such message, or its
    time is not known yet."""

    topic: Topic
    rates: TrafficRates
    backlog: int
    oldest_ms: int


class LoadedTopicsSurvey(msgspec.Struct, frozen=True):
    """The result of measuring all loaded topics: totals of the broker, totals per namespace (by its name), and the
    largest topics by each of TOPIC_MEASURES. `at_s`: when the measurement began (monotonic seconds)."""

    at_s: float  # of the clock
    total: TopicGroupTotals
    namespaces: Mapping[str, TopicGroupTotals]
    largest: Mapping[str, tuple[MeasuredTopic, ...]]  # by each of TOPIC_MEASURES, the largest first
    full: tuple[str, ...] = ()  # at most TOP_TOPICS topics that take no publishes, because of their backlog quota

    def count_topics(self) -> int:
        """Returns the number of topics in all namespaces of this survey."""
        return sum(each.topics for each in self.namespaces.values())

    def select_namespace(self, name: str) -> LoadedTopicsSurvey:
        """Returns a survey that has only the totals and the largest topics of one namespace. Its `total` remains the
        total of all namespaces."""
        largest = {
            measure: tuple(each for each in found if str(each.topic.name.namespace_name) == name)
            for measure, found in self.largest.items()
        }
        return LoadedTopicsSurvey(
            self.at_s, self.total, {at: sums for at, sums in self.namespaces.items() if at == name}, largest
        )


def measure_topic(topic: Topic) -> MeasuredTopic:
    """Returns the measured values of one topic. Backlog (an estimate) and age are measured now; the rates are those of
    the last survey. Reads no entry."""
    log, shape, backlog, oldest, first = topic.log, topic.log.shape, 0, 0, None
    for each in topic.subscriptions.values():
        mark = each.cursor.mark
        if each.is_durable and shape.has_readable_entry_after(mark):
            backlog += estimate_backlog(log, each)
            arrived = topic.maintenance.oldest_arrival_ms_in_memory(each)
            if first is None or mark < first:  # it has the oldest message, whether or not its age is known
                first, oldest = mark, arrived
    return MeasuredTopic(topic, topic.traffic.walked_rates, backlog, oldest)


def find_slowest_subscription(topic: Topic) -> tuple[str, int]:
    """Returns the name and the estimated backlog (messages) of the durable subscription with the largest backlog; ("",
    0) if none has a backlog. Reads no entry."""
    waiting = (
        (estimate_backlog(topic.log, each), name) for name, each in topic.subscriptions.items()
        if each.is_durable and topic.log.shape.has_readable_entry_after(each.cursor.mark)
    )  # fmt: skip
    backlog, name = max(waiting, default=(0, ""))
    return (name, backlog) if backlog else ("", 0)


class _Group:
    """The topics of one namespace. A topic keeps its group (`TopicStatistics.walked_group`), so that a walk need not
    read the topic's name: with 100,000 topics, a walk takes as long as its reads of memory."""

    __slots__ = ("name", "sums", "walk")

    def __init__(self, name: str) -> None:
        self.name = name
        self.walk: _Walk | None = None  # the one that the sums are of
        self.sums = TopicGroupTotals()


class _Walk:
    """A walk that has begun. `groups`: those of the walks before, by namespace; a namespace that is new is added."""

    __slots__ = ("_groups", "ageless", "at_s", "found", "full", "heaps", "passed_s", "walked")

    def __init__(self, at_s: float, passed_s: float, groups: dict[str, _Group]) -> None:
        self.at_s = at_s
        self.passed_s = passed_s
        self._groups = groups
        self.found: list[_Group] = []  # that have a topic
        self.heaps: dict[str, list[tuple[float, int, MeasuredTopic]]] = {name: [] for name in TOPIC_MEASURES}
        self.ageless: list[Callable[[], Coroutine[Any, Any, object]]] = []  # the reads of ages
        self.full: list[str] = []
        self.walked = 0

    def add(self, topic: Topic) -> None:
        self.walked += 1
        log, traffic = topic.log, topic.traffic
        group = traffic.walked_group
        if group is None or group.walk is not self:  # else it is in `found` already
            group = self._begin_group(topic)
        sums, only = group.sums, traffic.walked_span
        if only is None or not only.open:  # while it is open, no other ledger is added, and it is not trimmed
            only = traffic.walked_span = log.shape.single_open_span
        sums.topics += 1
        sums.storage_bytes += log.shape.size if only is None else only.size
        if log.is_degraded:
            sums.degraded += 1
        if topic.applied.durability == "memory":
            sums.in_memory += 1
        if topic.maintenance.quota is not None and len(self.full) < TOP_TOPICS:
            self.full.append(topic.name.full)
        producers = len(topic.producers)
        if producers:
            sums.producers += producers
        now = traffic.messages_in, traffic.messages_out, traffic.bytes_in, traffic.bytes_out
        if now != traffic.walked:
            self._count(sums, topic, now)
        elif traffic.walked_rates is not NO_RATES:
            traffic.walked_rates = NO_RATES
        backlog, oldest, first = 0, 0, None
        for each in topic.subscriptions.values():
            if each.consumers:
                sums.consumers += len(each.consumers)
            if each.store is not None:
                sums.subscriptions += 1
                mark = each.cursor.mark
                if only is not None and mark[1] >= only.last_entry and mark[0] == only.ledger_id:
                    continue
                if log.shape.has_readable_entry_after(mark):
                    backlog += estimate_backlog(log, each)
                    arrived = topic.maintenance.oldest_arrival_ms_in_memory(each)
                    if arrived == 0 and len(self.ageless) < AGES_READ_MAX:
                        self.ageless.append(partial(topic.maintenance.oldest_arrival_ms, each))
                    if first is None or mark < first:  # as in `measure_topic`
                        first, oldest = mark, arrived
        if backlog:
            sums.backlog += backlog
            self._note("backlog", backlog, topic, backlog, oldest)
            if oldest:
                self._note("age", -oldest, topic, backlog, oldest)
        rates = traffic.walked_rates
        if rates is not NO_RATES:
            self._note("traffic", rates.bytes_in + rates.bytes_out, topic, backlog, oldest)

    def _begin_group(self, topic: Topic) -> _Group:
        """Returns the group of a topic that is the first of its group in this walk, or has no group yet. There is one
        group of a name in a walk, whatever group the topic has from the walk before."""
        name = str(topic.name.namespace_name)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name)
        if group.walk is not self:
            group.walk, group.sums = self, TopicGroupTotals()
            self.found.append(group)
        topic.traffic.walked_group = group
        return group

    def _count(self, sums: TopicGroupTotals, topic: Topic, now: tuple[int, int, int, int]) -> None:
        traffic, passed_s, before = topic.traffic, self.passed_s, topic.traffic.walked
        messages_in, messages_out = now[0] - before[0], now[1] - before[1]
        bytes_in, bytes_out = now[2] - before[2], now[3] - before[3]
        traffic.walked = now
        sums.messages_in += messages_in
        sums.messages_out += messages_out
        sums.bytes_in += bytes_in
        sums.bytes_out += bytes_out
        rates = traffic.walked_rates = TrafficRates(
            messages_in / passed_s, messages_out / passed_s, bytes_in / passed_s, bytes_out / passed_s
        )
        sums.rate_in += rates.messages_in
        sums.rate_out += rates.messages_out
        sums.throughput_in += rates.bytes_in
        sums.throughput_out += rates.bytes_out

    def _note(self, measure: str, size: float, topic: Topic, backlog: int, oldest: int) -> None:
        heap = self.heaps[measure]
        if len(heap) < TOP_TOPICS:
            heappush(heap, (size, self.walked, MeasuredTopic(topic, topic.traffic.walked_rates, backlog, oldest)))
        elif size > heap[0][0]:
            facts = MeasuredTopic(topic, topic.traffic.walked_rates, backlog, oldest)
            heappushpop(heap, (size, self.walked, facts))

    def largest(self) -> dict[str, tuple[MeasuredTopic, ...]]:
        return {
            measure: tuple(facts for _, _, facts in sorted(heap, reverse=True)) for measure, heap in self.heaps.items()
        }


class TopicSurveyRunner:
    """Measures all loaded topics of a broker on request, at most once in SURVEY_CACHE_S seconds. `topics`: a function
    that returns the loaded topics."""

    def __init__(self, clock: Clock, topics: Callable[[], Iterable[Topic]]) -> None:
        self._clock = clock
        self._topics = topics
        self._began_s = clock.monotonic()
        self._last: LoadedTopicsSurvey | None = None
        self._groups: dict[str, _Group] = {}  # by the name of the namespace, of namespaces that have a topic
        self._totals: dict[str, TopicGroupTotals] = {}  # since the broker was started, of namespaces that have a topic
        self._total = TopicGroupTotals()
        self._runs: SharedCallsByKey[None, LoadedTopicsSurvey] = SharedCallsByKey()
        self._tasks = Tasks()  # it logs a fault of ours
        self._reading: asyncio.Task[None] | None = None
        self._is_walking = False  # a request measures the topics now
        self._round: _Walk | None = None  # of maintenance, that has begun; None: requests measure the topics

    async def run_survey(self) -> LoadedTopicsSurvey:
        """Measures all loaded topics and returns the survey. If the last survey is not older than SURVEY_CACHE_S
        seconds (in rounds: ROUND_AGE_S_MAX), returns it instead. Concurrent callers share one measurement. Does not
        wait for reads of entries: a task reads ages of oldest messages that are not known, for the next survey."""
        last = self._last
        age_s_max = SURVEY_CACHE_S if self._round is None else ROUND_AGE_S_MAX
        if last is not None and self._clock.monotonic() - last.at_s < age_s_max:
            return last
        return await self._runs.run(None, self._walk)

    # ------------------------------------------------------------------ rounds
    def begin_round(self) -> None:
        """Begins a round of maintenance that measures the topics. The caller adds every loaded topic once, then ends
        the round. A round that was not ended is given up. While a request measures the topics, does nothing: that round
        has no result."""
        if not self._is_walking:
            self._give_up_round()
            self._round = self._begin_walk()

    async def add_to_round(self, topics: Sequence[Topic]) -> None:
        """Measures topics for the round, in slices of the event loop. Does nothing if a request has given it up."""
        walk = self._round
        if walk is not None:
            await self._walk_over(walk, topics, lambda: self._round is walk)

    def end_round(self) -> None:
        """Ends the round: from now on requests get it. Stays the one that is shown until another one has ended."""
        walk = self._round
        if walk is not None:
            self._finish(walk)
            self._round = self._begin_walk()

    def stop_rounds(self) -> None:
        """Called when there are so few topics that requests measure them."""
        self._give_up_round()

    def _give_up_round(self) -> None:
        """Keeps what the round has counted for the totals, which never decrease, and forgets the rest."""
        walk, self._round = self._round, None
        for group in walk.found if walk is not None else ():
            for totals in (self._total, self._totals.setdefault(group.name, TopicGroupTotals())):
                _add_totals(totals, group.sums)
            group.walk = None

    def _begin_walk(self) -> _Walk:
        before_s = self._last.at_s if self._last is not None else self._began_s
        at_s = self._clock.monotonic()
        return _Walk(at_s, max(at_s - before_s, 0.001), self._groups)

    async def _walk(self) -> LoadedTopicsSurvey:
        self._give_up_round()
        walk, self._is_walking = self._begin_walk(), True
        try:
            await self._walk_over(walk, list(self._topics()), lambda: True)
        finally:
            self._is_walking = False
        return self._finish(walk)

    async def _walk_over(self, walk: _Walk, topics: Sequence[Topic], goes_on: Callable[[], bool]) -> None:
        turns = EventLoopSlices(self._clock)
        for start in range(0, len(topics), TOPICS_PER_CLOCK_READ):
            for topic in topics[start : start + TOPICS_PER_CLOCK_READ]:
                walk.add(topic)
            if turns.is_slice_used_up:
                await turns.begin_slice()
                if not goes_on():
                    return

    def _finish(self, walk: _Walk) -> LoadedTopicsSurvey:
        found = self._last = self._sum_up(walk.at_s, walk)
        if walk.ageless and (self._reading is None or self._reading.done()):
            self._reading = self._tasks.spawn(_read_ages(walk.ageless), "ages of oldest messages")
        return found

    def _sum_up(self, at_s: float, walk: _Walk) -> LoadedTopicsSurvey:
        self._groups = {group.name: group for group in walk.found}
        namespaces = {group.name: group.sums for group in walk.found}
        total = TopicGroupTotals()
        for name, sums in namespaces.items():
            for each in TopicGroupTotals.__struct_fields__:
                setattr(total, each, getattr(total, each) + getattr(sums, each))
            _add_totals(sums, self._totals.get(name))
        _add_totals(total, self._total)
        self._totals, self._total = namespaces, total
        return LoadedTopicsSurvey(at_s, total, namespaces, walk.largest(), tuple(sorted(walk.full)))

    def close(self) -> None:
        """Cancels the reads of ages that are in progress."""
        self._tasks.cancel()


async def _read_ages(ageless: Sequence[Callable[[], Coroutine[Any, Any, object]]]) -> None:
    """Has the topics learn when the oldest messages of some subscriptions arrived, for the next walks."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(AGE_READ_TIMEOUT_S):
            for read in ageless:
                try:
                    await read()
                except MagnetarError as error:
                    _LOG.debug("the age of an oldest message is not known: %s", error)


def _add_totals(sums: TopicGroupTotals, before: TopicGroupTotals | None) -> None:
    """Adds to the totals of `sums`, which are those since the walk before, what was counted until then."""
    if before is not None:
        sums.messages_in += before.messages_in
        sums.bytes_in += before.bytes_in
        sums.messages_out += before.messages_out
        sums.bytes_out += before.bytes_out
