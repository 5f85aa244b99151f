"""balance: how long four brokers take to balance a load that is skewed over bundles, with nobody asking for it.

The cluster is metadata, three bookies and four brokers as single processes on this machine. Each of TOPICS bundles has
a topic with a producer; one of HOT_EACH sends ten times as much as the others. At the start one broker has all bundles
that are hot. Time counts from when all producers send, until the busiest broker is at most 1.25 times as busy as the
mean, as the leader says in SEEN polls in a row: a move counts there when it begins, as expected. Then the cluster is
watched for as long as --seconds says, at least WATCHED_S, for moves to and fro.

Brokers that are equally busy may carry unequal messages. `why` in the detail says which part of a score is due to no
message: a broker needs some points for itself, measured before the first move, when the messages of the brokers differ
most.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

from .harness import Options, Run

BROKERS = 4
TOPICS = 32
HOT_EACH = 4
HOT_RATE = 120.0
"""Messages a second of a hot topic; of another a tenth."""
NAMESPACE = "public/balance"
POLL_S = 5.0
SEEN = 6
WATCHED_S = 120.0
PATIENCE_S = 900.0


def _list_topics() -> list[str]:
    """Returns a topic for each bundle, in their order."""
    from magnetar.broker.cluster.bundles_core import compute_bundle_number

    found: dict[int, str] = {}
    for number in count():
        name = f"persistent://{NAMESPACE}/t{number}"
        found.setdefault(compute_bundle_number(name, TOPICS), name)
        if len(found) == TOPICS:
            break
    return [found[number] for number in range(TOPICS)]


class Load:
    """Producers that send at their rates, and the errors that they saw."""

    def __init__(self) -> None:
        self.rates = {
            name: HOT_RATE / (1 if number % HOT_EACH == 0 else 10) for number, name in enumerate(_list_topics())
        }
        self.errors: Counter[str] = Counter()
        self.sent = 0

    @asynccontextmanager
    async def running(self, client: Any, size: int) -> AsyncIterator[None]:
        """Sends during the block."""
        producers = {name: await client.create_producer(name, batching_enabled=False) for name in self.rates}
        sending = [asyncio.create_task(self._send(producers[name], bytes(size), 1 / rate))
                   for name, rate in self.rates.items()]  # fmt: skip
        try:
            yield
        finally:
            for each in sending:
                each.cancel()
            await asyncio.gather(*sending, return_exceptions=True)

    async def _send(self, producer: Any, body: bytes, interval_s: float) -> None:
        import magnetar

        def done(result: Any, _id: Any) -> None:
            self.sent += 1
            if result != magnetar.Result.Ok:
                self.errors[str(result)] += 1

        at = time.perf_counter()
        while True:
            at += interval_s
            await asyncio.sleep(max(at - time.perf_counter(), 0))
            producer.send_nowait(body, done)


async def _skew(admin: Any, load: Load) -> None:
    """One broker gets all bundles that are hot."""
    from magnetar.broker.cluster.bundles_core import make_bundle_name

    await admin.create_namespace(NAMESPACE, bundles=TOPICS)
    target = min(each.endpoint for each in await admin.brokers())
    for name in load.rates:
        await admin.create_topic(name)
        await admin.topic_stats(name)  # now its bundle has an owner
    for number in range(0, TOPICS, HOT_EACH):
        await admin.unload_namespace(NAMESPACE, make_bundle_name(number, TOPICS), destination=target)
    for name in load.rates:
        await admin.topic_stats(name)


class Carried(NamedTuple):
    """A broker: how busy it is, as the leader says (100: a core), and what the producers send to it."""

    score: float
    messages_s: float
    leads: bool


async def _carried(admin: Any, load: Load) -> dict[str, Carried]:
    """Returns what each broker carries, by its name."""
    brokers = {each.endpoint: each.name for each in await admin.brokers()}
    rates = Counter(dict.fromkeys(brokers.values(), 0.0))
    for name, rate in load.rates.items():
        rates[brokers[(await admin.owner(name)).rpartition("/")[2]]] += rate
    told = await admin.balance_status()
    scores = {each.broker: each.score for each in told.brokers}
    return {name: Carried(scores.get(name, 0.0), rate, name == told.leader) for name, rate in sorted(rates.items())}


def _max_to_mean(carried: Iterable[float]) -> float:
    found = list(carried)
    return max(found) * len(found) / max(1e-9, sum(found))


def fit_cost(carried: Sequence[Carried]) -> tuple[float, float]:
    """Returns (points that a broker needs without messages, points for a thousand messages a second), by least squares
    over the brokers of different loads."""
    rates, scores = [each.messages_s for each in carried], [each.score for each in carried]
    if len(set(rates)) < 2:
        return fmean(scores), 0.0
    found = linear_regression(rates, scores)
    return found.intercept, 1000 * found.slope


def explain(before: Sequence[Carried], after: Sequence[Carried]) -> str:
    """Returns why brokers that are equally busy carry unequal messages: the part of a score that is due to none, and
    whether all of them are so idle that the balance leaves them alone."""
    from magnetar.broker.cluster.balance_core import IDLE_POINTS

    fixed, each = fit_cost(before)
    mean = max(1e-9, fmean(one.score for one in after))
    idle = "" if max(one.score for one in after) >= IDLE_POINTS else f"; none had {IDLE_POINTS:.0f}, so nothing moved"
    return (
        f"a broker needed {fixed:.1f} points without messages and {each:.1f} for a thousand a second, so of the mean "
        f"score at the end, {mean:.1f}, {max(0.0, min(1.0, fixed / mean)):.0%} is due to no message{idle}"
    )


async def _is_balanced(admin: Any) -> bool:
    scores = [each.score for each in (await admin.balance_status()).brokers]
    return len(scores) == BROKERS and sum(scores) > BROKERS and _max_to_mean(scores) <= 1.25


async def _wait_for_scores(admin: Any, load: Load, began: float) -> dict[str, Carried]:
    """Returns what each broker carries at the last poll before the first move."""
    found = await _carried(admin, load)
    while time.perf_counter() - began < PATIENCE_S:
        last = await _carried(admin, load)
        if (await admin.balance_status()).moves:
            break
        found = last
        await asyncio.sleep(POLL_S / 2)
    return found


async def _until_balanced(admin: Any, began: float) -> float | None:
    """Returns the seconds until it was balanced; None if it was not after PATIENCE_S."""
    seen, first = 0, 0.0
    while time.perf_counter() - began < PATIENCE_S:
        balanced = await _is_balanced(admin)
        first = time.perf_counter() - began if balanced and not seen else first
        seen = seen + 1 if balanced else 0
        if seen == SEEN:
            return first
        await asyncio.sleep(POLL_S)
    return None


async def _measure(cluster: Any, options: Options, run: Run) -> None:
    from magnetar.admin import AdminClient
    from magnetar.asyncio import Client

    load = Load()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(cluster.url))
        admin = await stack.enter_async_context(AdminClient(cluster.url))
        await _skew(admin, load)
        async with load.running(client, options.size):
            began = time.perf_counter()
            before = await _wait_for_scores(admin, load, began)
            took_s = await _until_balanced(admin, began)
            moves = (await admin.balance_status()).moves
            await asyncio.sleep(max(options.seconds, WATCHED_S))
            told, after = await admin.balance_status(), await _carried(admin, load)
    run.value = PATIENCE_S if took_s is None else round(took_s, 1)
    run.detail = {
        "balanced": took_s is not None, "moves": moves, "moves_later": told.moves - moves, "moves_failed": told.failed,
        "sent": load.sent, "errors": dict(load.errors),
        "sent_before": round(_max_to_mean(each.messages_s for each in before.values()), 2),
        "sent_after": round(_max_to_mean(each.messages_s for each in after.values()), 2),
        "busy_after": round(_max_to_mean(each.score for each in after.values()), 2),
        "before": {name: each._asdict() for name, each in before.items()},
        "after": {name: each._asdict() for name, each in after.items()},
        "why": explain(list(before.values()), list(after.values())),
    }  # fmt: skip


def balance(options: Options) -> Run:
    """Seconds until the busiest of four brokers is at most a quarter above the mean; moves and errors in `detail`."""
    from magnetar.cli.common.processes import Cluster

    run = Run(0.0)
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        with Cluster(Path(directory), bookies=3, brokers=BROKERS) as cluster:
            asyncio.run(_measure(cluster, options, run))
        print(run.detail["why"], file=sys.stderr)
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)
    return run
