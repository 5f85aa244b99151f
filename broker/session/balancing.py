"""Moves bundles from the brokers with the most load to those with the least, when an operator asks for it.

    done = await balance_brokers(broker, administration, dry_run=False)

The broker that is asked lets each broker measure its bundles, and plans the moves (broker/cluster/bundles_core.py
`plan_balance`). Then the owners move the bundles, as a drain does, to the brokers that the plan names. Bundles move
between brokers of one group only, and a broker that drains gets none. If a broker does not say what it owns, nothing is
moved: it would count as idle. Guarding tests: tests/broker/cluster/test_balance.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ...proto.errors import MagnetarError, Unavailable
from ...proto.names import NamespaceName
from ...proto.statistics import Balance, BalancedBroker, BundleMove, BundleRow
from ...runtime.tasks import run_together
from ..cluster.bundles_core import BundleLoad, PlannedMove, plan_balance
from ..node.topic_manager import MOVED_AT_ONCE, TopicManager
from .administration import Administration, may_get_bundles
from .summaries import ClusterSummaries

TOPIC_LOAD = 0.1
"""Messages a second that a loaded topic counts as, so that idle topics are shared too."""


def plan_for_group(
    names: Sequence[str], bundles: Sequence[BundleRow]
) -> tuple[list[PlannedMove], list[BalancedBroker]]:
    """Returns (the moves that balance the brokers `names`, the load of each of them before and after the moves). The
    load of a bundle is its messages per second, its KiB per second, and TOPIC_LOAD for each topic. `bundles` of other
    brokers are ignored."""
    owned: dict[str, list[BundleLoad]] = {name: [] for name in names}
    for each in bundles:
        kib = (each.throughput_in + each.throughput_out) / 1024
        load = each.rate_in + each.rate_out + kib + TOPIC_LOAD * each.topics
        if each.broker in owned:
            owned[each.broker].append(BundleLoad(f"{each.namespace}/{each.bundle}", load))
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
    """Moves bundles from the brokers with the most load to those of their group with the least; at most MOVES_MAX moves
    in each group. Returns the moves, and the load of each broker before and after them. `dry_run`: only plans the
    moves. Raises Unavailable, and moves nothing, if a broker does not answer. If a move fails, raises its error after
    the others have ended."""
    page = await ClusterSummaries(broker).list_bundles(None, here=False)
    registered = await broker.list_brokers()
    missing = sorted(set(page.silent).intersection(each.name for each in registered))
    if missing:
        raise Unavailable(f"nothing is moved: {', '.join(missing)} does not answer, or is of an older release")
    moves, loads = list[PlannedMove](), list[BalancedBroker]()
    for group in sorted({each.group for each in registered} - {""}):
        names = [each.name for each in registered if each.group == group and may_get_bundles(each)]
        planned, carried = plan_for_group(names, page.bundles)
        moves += planned
        loads += carried
    done = tuple(_describe_move(move) for move in moves)
    if not dry_run:
        await _move_bundles(broker, administration, done)
    return Balance(done, tuple(loads))


async def _move_bundles(broker: TopicManager, administration: Administration, moves: Sequence[BundleMove]) -> None:
    turns, errors = asyncio.Semaphore(MOVED_AT_ONCE), list[MagnetarError]()
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
