"""Moves bundles from the brokers with the most load to those with the least: always, and at once when an operator asks
for it.

Always (`AutomaticBalancer`): each broker of a group runs it, and the one that has created the record `/balancer` is the
leader. The record ends with its session. Every BALANCE_CHECK_INTERVAL_S the leader asks each broker for its load
(`measure_load`), and gives the answers to the core (broker/cluster/balance_core.py). Then it asks the owners for the
moves that the core has planned. It waits for no move. A broker that does not answer, or is of an older release, takes
no part. The load of one that cannot be true counts as no answer, and a WARNING names the broker, once
until it reports one that can be.

    load    of a bundle: messages and KiB per second, and LOAD_PER_TOPIC for each topic, as its owner measures it
    score   of a broker, the largest of: the share of a core that its process uses, its bytes per second as a share of
            `link_bytes_s`, the memory of topics, subscriptions and connections as a share of `state_memory_bytes`

A second leader, such as one whose session has ended without its knowledge, is harmless: the owner of a bundle alone
gives it away, and a broker that does not own the bundle (any more) answers that it has moved nothing. A leader whose
process was stopped (a check took longer than BALANCE_CHECK_INTERVAL_S) plans nothing before it has asked again who
leads. When a leader dies, the moves that it has begun end at their owners; the next leader begins with its averages. A
move that fails is logged, and its bundle rests. The leader also splits namespaces whose bundles their owners find
crowded (settings `split_bundle_…`) in CROWDED_CHECKS_MIN checks in a row, to `split_bundles_max` bundles; one topic to
which most of a bundle is due is shown (`describe_balance`), and nothing is split for it. While the setting `balance` is
off, nothing is planned, and averages begin anew after it. Guarding tests:
tests/broker/cluster/test_automatic_balance.py, tests/balance/.

When asked (`balance_brokers`). `plan_balance` is no plan of the core: it equalizes what is measured now, idle topics
too, without averages, rests and thresholds.

    done = await balance_brokers(broker, administration, dry_run=False)

The broker that is asked lets each broker measure its bundles, and plans the moves (broker/cluster/bundles_core.py
`plan_balance`). Then the owners move the bundles, as a drain does, to the brokers that the plan names. Bundles move
between brokers of one group only, and a broker that drains gets none. If a broker does not say what it owns, nothing is
moved: it would count as idle. Guarding tests: tests/broker/cluster/test_balance.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from types import MappingProxyType

from ...metadata import paths
from ...metadata.records import BalancerRecord, BrokerRecord, Feature, encode_record, may_write_feature
from ...metadata.store import NODE_ABSENT, get_readable_record
from ...proto import operations as op
from ...proto.errors import BadVersion, MagnetarError, NodeExists, Unavailable, is_unknown_operation
from ...proto.names import NamespaceName
from ...proto.statistics import (
    Balance,
    BalancedBroker,
    BalanceStatus,
    BrokerScore,
    BundleMove,
    BundleRow,
    CrowdedBundleRow,
    HotTopic,
    MeasuredBundle,
    MeasuredLoad,
)
from ...runtime.tasks import Tasks, run_together
from ..cluster.balance_core import (
    BALANCE_CHECK_INTERVAL_S,
    REPORTED_BUNDLES_MAX,
    Balancer,
    BrokerLoad,
    MovableBundle,
    Move,
    find_report_fault,
)
from ..cluster.bundles_core import (
    BundleLoad,
    BundleTraffic,
    CrowdedBundle,
    PlannedMove,
    SplitPlanner,
    find_crowded_bundle,
    plan_balance,
)
from ..common.retry import LogThrottle
from ..node.survey import TopicGroupTotals
from ..node.topic_manager import BUNDLES_MOVED_AT_ONCE, TopicManager
from .administration import Administration, call_operation_at_broker, may_get_bundles
from .summaries import ClusterSummaries

_LOG = logging.getLogger("magnetar.broker")

ANSWER_TIMEOUT_S = 5.0
"""Seconds to wait for the load of a broker: half a check."""
LOAD_PER_TOPIC = 0.1
"""Messages a second that a loaded topic counts as, so that idle topics are shared too."""


def compute_bundle_load(sums: BundleRow | TopicGroupTotals) -> float:
    """Returns the load of a bundle: its messages and KiB per second, in and out, and LOAD_PER_TOPIC for each topic."""
    kib = (sums.throughput_in + sums.throughput_out) / 1024
    return sums.rate_in + sums.rate_out + kib + LOAD_PER_TOPIC * sums.topics


def plan_balance_of_brokers(
    names: Sequence[str], bundles: Sequence[BundleRow],
    allowed: Mapping[str, frozenset[str] | None] = MappingProxyType({}),
) -> tuple[list[PlannedMove], list[BalancedBroker]]:
    """Returns (the moves that balance the brokers `names`, the load of each of them before and after the moves).
    `bundles` of other brokers are ignored; `allowed`: the brokers that may get bundles of a namespace, None for any."""
    owned: dict[str, list[BundleLoad]] = {name: [] for name in names}
    for each in bundles:
        if each.broker in owned:
            path, load = f"{each.namespace}/{each.bundle}", compute_bundle_load(each)
            owned[each.broker].append(BundleLoad(path, load, allowed.get(each.namespace)))
    moves = plan_balance(names, owned)
    before = {name: sum(each.load for each in found) for name, found in owned.items()}
    after = dict(before)
    for move in moves:
        after[move.source] -= move.load
        after[move.target] += move.load
    return moves, [BalancedBroker(name, round(before[name], 1), round(after[name], 1)) for name in sorted(names)]


def _describe_move(move: PlannedMove) -> BundleMove:
    namespace, _, bundle = move.path.rpartition("/")
    return BundleMove(namespace, bundle, move.source, move.target, round(move.load, 1))


async def balance_brokers(broker: TopicManager, administration: Administration, *, dry_run: bool) -> Balance:
    """Moves bundles from the brokers with the most load to those of their group with the least; at most
    MOVES_PER_PLAN_MAX moves in each group. Returns the moves, and the load of each broker before and after them.
    `dry_run`: only plans the moves. Raises Unavailable, and moves nothing, if a broker does not answer. If a move
    fails, raises its error after the others have ended. Raises the errors of the metadata, too."""
    page = await ClusterSummaries(broker).list_bundles(None, here=False)
    registered = await broker.list_brokers()
    missing = sorted(set(page.silent).intersection(each.name for each in registered))
    if missing:
        raise Unavailable(f"nothing is moved: {', '.join(missing)} does not answer, or is of an older release")
    moves, loads = list[PlannedMove](), list[BalancedBroker]()
    for group in sorted({each.group for each in registered} - {""}):
        names = [each.name for each in registered if each.group == group and may_get_bundles(each)]
        may = {each: await broker.find_allowed_brokers(NamespaceName.parse(each), registered, group)
               for each in sorted({row.namespace for row in page.bundles})}  # fmt: skip
        planned, carried = plan_balance_of_brokers(names, page.bundles, may)
        moves += planned
        loads += carried
    done = tuple(_describe_move(move) for move in moves)
    if not dry_run:
        await _move_bundles(broker, administration, done)
    return Balance(done, tuple(loads))


async def _move_bundles(broker: TopicManager, administration: Administration, moves: Sequence[BundleMove]) -> None:
    turns, errors = asyncio.Semaphore(BUNDLES_MOVED_AT_ONCE), list[MagnetarError]()
    endpoints = {each.name: each.endpoint for each in await broker.list_brokers()}

    async def move(each: BundleMove) -> None:
        async with turns:
            name, endpoint = NamespaceName.parse(each.namespace), endpoints.get(each.source)
            try:
                if endpoint is None:
                    raise Unavailable(f"broker {each.source!r} has ended meanwhile, and its bundles move by themselves")
                await administration.unload_bundles(name, each.source, endpoint, [each.bundle], each.target)
            except MagnetarError as error:
                errors.append(error)

    await run_together([move(each) for each in moves], "balance")
    if errors:
        raise errors[0]


# ----------------------------------------------------------------------------------------------------- automatic


async def measure_load(broker: TopicManager) -> MeasuredLoad:
    """Returns the load of this broker, its misplaced bundles and its heaviest ones. Walks the loaded topics in slices
    of the loop, and waits for no read of an entry. Raises Unavailable if this broker has no ownership session, and the
    errors of the metadata if it may not own some of its bundles."""
    survey, state, config = await broker.survey.run_survey(), broker.balancing, broker.config  # the rates are of a walk
    sums = await broker.sum_traffic_by_bundle()
    loads = {path: compute_bundle_load(each) for path, each in sums.items()}
    misplaced = {path for path in await broker.list_misplaced_bundles() if path in loads}
    first = nlargest(REPORTED_BUNDLES_MAX, loads, key=lambda path: (path in misplaced, loads[path], path))
    bundles = (
        MeasuredBundle(
            path, loads[path], sums[path].topics, sums[path].producers + sums[path].consumers,
            broker.measure_owned_s(path), path in misplaced,
        )
        for path in first
    )  # fmt: skip
    sent = survey.total.throughput_in + survey.total.throughput_out
    score = max(
        state.busy,
        100 * sent / config.link_bytes_s if config.link_bytes_s else 0.0,
        100 * broker.state.bytes / config.state_memory_bytes if config.state_memory_bytes else 0.0,
    )
    window_s = max(BALANCE_CHECK_INTERVAL_S, broker.world.clock.monotonic() - state.busy_since_s)
    crowded = tuple(CrowdedBundleRow(*each) for each in _find_crowded_bundles(broker, sums))
    return MeasuredLoad(score, sum(loads.values()), window_s, tuple(bundles), crowded)


def _find_crowded_bundles(broker: TopicManager, sums: Mapping[str, TopicGroupTotals]) -> list[CrowdedBundle]:
    config = broker.config
    limits = BundleTraffic(
        config.split_bundle_topics, config.split_bundle_sessions, config.split_bundle_messages_s,
        config.split_bundle_bytes_s,
    )  # fmt: skip
    found = list[CrowdedBundle]()
    for path, each in sums.items():
        carried = BundleTraffic(
            each.topics, each.producers + each.consumers, each.rate_in + each.rate_out,
            each.throughput_in + each.throughput_out,
        )  # fmt: skip
        if find_crowded_bundle(path, carried, {}, limits) is not None and len(found) < REPORTED_BUNDLES_MAX:
            crowded = find_crowded_bundle(path, carried, broker.list_topic_traffic(path), limits)
            found += [crowded] if crowded is not None else []
    return found


def _describe_hot_topics(crowded: Sequence[CrowdedBundle]) -> tuple[HotTopic, ...]:
    advice = "more bundles do not help, as one broker serves a topic: give it more partitions"
    return tuple(HotTopic(each.hot_topic, each.why, advice) for each in crowded if each.hot_topic)


async def describe_balance(broker: TopicManager, *, here: bool) -> BalanceStatus:
    """Returns what the automatic balance does, as the leader knows it. `here`, or without a leader: as this broker
    knows it; it is not on at a broker without a group, nor before the upgrade of the cluster is finished. Raises the
    error of the call if the leader does not answer, and the errors of the metadata."""
    found = await get_readable_record(broker.metadata, paths.BALANCER, BalancerRecord)
    leader, state = "" if found is None else found[0].broker, broker.balancing
    if found is not None and leader != broker.name and not here:
        return await call_operation_at_broker(
            broker.world, found[0].endpoint, op.BALANCE_STATUS, timeout_s=ANSWER_TIMEOUT_S, here=True
        )
    runs = bool(broker.config.share_group) and may_write_feature(Feature.BALANCER)
    balancer = state.balancer
    scores = [] if balancer is None else balancer.list_scores()
    moving = [] if balancer is None else balancer.list_moves()
    return BalanceStatus(
        runs and broker.balance == "on", leader, state.moves, state.failed,
        tuple(BrokerScore(name, round(score, 1), count) for name, score, count in scores),
        tuple(
            BundleMove(*(paths.parse_bundle_owner(each.path) or ("", "")), each.source, each.target,
                       round(each.points, 1))
            for each in moving
        ),
        state.splits, _describe_hot_topics(state.crowded),
    )  # fmt: skip


class _AllowedBrokers:
    """The brokers that may get a bundle, by namespace and group, while `brokers` are registered."""

    def __init__(self, broker: TopicManager, brokers: Sequence[BrokerRecord]) -> None:
        self._broker = broker
        self._brokers = brokers
        self._found: dict[tuple[str, str], frozenset[str] | None] = {}

    async def find(self, path: str, group: str) -> frozenset[str] | None:
        """Returns the names of the brokers that may get the bundle with the owner record at `path`; None: any of its
        group."""
        namespace = (paths.parse_bundle_owner(path) or ("", ""))[0]
        if not namespace:
            return None
        if (namespace, group) not in self._found:
            self._found[namespace, group] = await self._broker.find_allowed_brokers(
                NamespaceName.parse(namespace), self._brokers, group
            )
        return self._found[namespace, group]


class AutomaticBalancer:
    """Balances the load of all brokers while this broker is the leader. `now`: the time for the core (monotonic
    seconds); None: that of the world."""

    def __init__(self, broker: TopicManager, now: Callable[[], float] | None = None) -> None:
        self._broker = broker
        self._state = broker.balancing
        self._administration = Administration(broker)
        self._now = now or broker.world.clock.monotonic
        self._token = broker.world.rng.randbytes(8).hex()
        self._splits = SplitPlanner()
        self._throttle = LogThrottle(broker.world.clock)
        self._refused = set[str]()  # brokers whose last report cannot be true

    async def run(self) -> None:
        """Checks the loads every BALANCE_CHECK_INTERVAL_S, until the task is cancelled; then also cancels the calls
        that ask owners for moves. The owners end these moves. Errors of the metadata are logged."""
        moves = Tasks()
        try:
            while True:
                await asyncio.sleep(BALANCE_CHECK_INTERVAL_S)
                try:
                    await self.check(moves)
                except MagnetarError as error:
                    if self._throttle.should_log(error):
                        _LOG.info("the load of brokers is not balanced: %s", error)
        finally:
            self._state.leads, self._state.balancer, self._state.crowded = False, None, ()
            await moves.close()

    async def check(self, moves: Tasks) -> None:
        """Takes part in the election. As the leader, collects the loads, and begins the planned moves as tasks of
        `moves`. Begins none while the setting `balance` is off, or if the collection took more than
        BALANCE_CHECK_INTERVAL_S. Raises the errors of the metadata."""
        broker, state = self._broker, self._state
        leads = broker.has_session and await self._is_leader()
        if leads != state.leads:
            _LOG.info("this broker balances the load of brokers" + ("" if leads else " no more"))
        state.leads = leads
        if not leads or broker.balance == "off":
            state.balancer, state.crowded = None, ()
            return
        balancer = state.balancer = state.balancer or Balancer()
        brokers = {each.name: each for each in await broker.list_brokers() if each.group}
        for name, _, _ in balancer.list_scores():
            if name not in brokers:
                balancer.forget_broker(name)
        began_s, crowded = self._now(), list[CrowdedBundle]()
        allowed = _AllowedBrokers(broker, list(brokers.values()))
        await run_together(
            [self._collect_load(balancer, each, allowed, crowded) for each in brokers.values()], "balancer-load"
        )
        state.crowded = crowded
        if self._now() - began_s > BALANCE_CHECK_INTERVAL_S:
            return  # by the next check another broker may lead
        for move in balancer.plan_moves(self._now()):
            moves.spawn(self._move(balancer, move, brokers[move.source].endpoint), "balancer-move")
        self._begin_splits(crowded, moves)

    def _begin_splits(self, crowded: Sequence[CrowdedBundle], splits: Tasks) -> None:
        by_namespace = dict[str, list[CrowdedBundle]]()
        for each in crowded if may_write_feature(Feature.SPLIT_BUNDLES) else ():
            if (place := paths.parse_bundle_owner(each.path)) is not None:
                by_namespace.setdefault(place[0], []).append(each)
        for name in self._splits.plan_splits(by_namespace, self._now()):
            splits.spawn(self._split(NamespaceName.parse(name), by_namespace[name]), "balancer-split")

    async def _split(self, name: NamespaceName, crowded: Sequence[CrowdedBundle]) -> None:
        why = next(each for each in crowded if not each.hot_topic)
        try:
            bundles = 2 * (await self._broker.catalog.get_namespace(name)).bundles
            if bundles > self._broker.config.split_bundles_max:
                return
            _LOG.info("namespace %s gets %d bundles: %s has %s", name, bundles, why.path, why.why)
            await self._administration.split_bundles(name, bundles)
            self._state.splits += 1
        except MagnetarError as error:
            _LOG.warning("namespace %s is not split: %s", name, error)

    async def _is_leader(self) -> bool:
        """Returns whether this broker is the leader; makes it the leader if there is none."""
        if not may_write_feature(Feature.BALANCER):
            return False
        store, path = self._broker.metadata, paths.BALANCER
        found = await get_readable_record(store, path, BalancerRecord)
        if found is not None:
            return found[0].token == self._token
        mine = BalancerRecord(broker=self._broker.name, endpoint=self._broker.endpoint, token=self._token)
        try:
            await store.put(path, encode_record(mine, path), NODE_ABSENT, ephemeral=True)
        except (NodeExists, BadVersion):
            return False
        return True

    async def _collect_load(
        self, balancer: Balancer, record: BrokerRecord, allowed: _AllowedBrokers, crowded: list[CrowdedBundle]
    ) -> None:
        broker = self._broker
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if record.name == broker.name:
                    found = await measure_load(broker)
                else:
                    found = await call_operation_at_broker(
                        broker.world, record.endpoint, op.MEASURE_LOAD, timeout_s=ANSWER_TIMEOUT_S
                    )
            bundles = [
                MovableBundle(
                    each.path, each.load, each.topics, each.sessions, each.owned_s,
                    await allowed.find(each.path, record.group), each.misplaced,
                )
                for each in found.bundles[:REPORTED_BUNDLES_MAX]
            ]  # fmt: skip
        except (MagnetarError, TimeoutError, ValueError) as error:  # ValueError: its record has no valid address
            if not (isinstance(error, MagnetarError) and is_unknown_operation(error)):
                _LOG.debug("broker %s does not tell its load: %r", record.name, error)
            return
        load = BrokerLoad(
            record.name, found.score, found.load, bundles, group=record.group, window_s=found.window_s,
            takes_bundles=may_get_bundles(record),
        )  # fmt: skip
        if fault := find_report_fault(load):
            if record.name not in self._refused:
                _LOG.warning("the load that broker %s reports does not count: %s", record.name, fault)
            self._refused.add(record.name)
            return
        self._refused.discard(record.name)
        balancer.add_report(load, self._now())
        crowded += [CrowdedBundle(each.path, each.why, each.hot_topic) for each in found.crowded[:REPORTED_BUNDLES_MAX]]

    async def _move(self, balancer: Balancer, move: Move, endpoint: str) -> None:
        moved = False
        try:
            place = paths.parse_bundle_owner(move.path)
            if place is None:
                raise Unavailable(f"{move.path} is no path of a bundle")
            _LOG.info("%s moves from %s to %s: %s", move.path, move.source, move.target, move.why)
            self._state.moves += 1
            namespace, bundle = NamespaceName.parse(place[0]), place[1]
            done = await self._administration.unload_bundles(namespace, move.source, endpoint, [bundle], move.target)
            moved = any(each.bundles for each in done)
            if not moved:
                raise Unavailable("its owner has changed meanwhile")
        except MagnetarError as error:
            self._state.failed += 1
            _LOG.warning("%s does not move from %s to %s: %s", move.path, move.source, move.target, error)
        finally:
            balancer.end_move(move.path, moved, self._now())
