"""balance: how long four brokers take to balance a load that is skewed over bundles, with nobody asking for it.

The cluster is metadata, three bookies and four brokers as single processes on this machine. Each of TOPICS bundles has
a topic with a producer; one of HOT_EACH sends ten times as much as the others. At the start one broker has all bundles
that are hot. Time counts from when all producers send, until the busiest broker is at most 1.25 times as busy as the
mean, as the leader says in SEEN polls in a row: a move counts there when it begins, as expected. Then the cluster is
watched for as long as --seconds says, at least WATCHED_S, for moves to and fro.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

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


async def _carried(admin: Any, load: Load) -> list[float]:
    """What the producers send to each broker, messages a second."""
    rates = Counter({each.endpoint: 0.0 for each in await admin.brokers()})
    for name, rate in load.rates.items():
        rates[(await admin.owner(name)).rpartition("/")[2]] += rate
    return sorted(rates.values(), reverse=True)


def _max_to_mean(carried: list[float]) -> float:
    return max(carried) * len(carried) / max(1e-9, sum(carried))


async def _is_balanced(admin: Any) -> bool:
    scores = [each.score for each in (await admin.balance_status()).brokers]
    return len(scores) == BROKERS and sum(scores) > BROKERS and _max_to_mean(scores) <= 1.25


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
            began, before = time.perf_counter(), _max_to_mean(await _carried(admin, load))
            took_s = await _until_balanced(admin, began)
            moves = (await admin.balance_status()).moves
            await asyncio.sleep(max(options.seconds, WATCHED_S))
            told, after = await admin.balance_status(), _max_to_mean(await _carried(admin, load))
    run.value = PATIENCE_S if took_s is None else round(took_s, 1)
    run.detail = {
        "balanced": took_s is not None, "sent_before": round(before, 2), "sent_after": round(after, 2), "moves": moves,
        "moves_later": told.moves - moves, "moves_failed": told.failed, "sent": load.sent,
        "errors": dict(load.errors), "scores": {each.broker: each.score for each in told.brokers},
    }  # fmt: skip


def balance(options: Options) -> Run:
    """Seconds until the busiest of four brokers is at most a quarter above the mean; moves and errors in `detail`."""
    from magnetar.cli.common.processes import Cluster

    run = Run(0.0)
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        with Cluster(Path(directory), bookies=3, brokers=BROKERS) as cluster:
            asyncio.run(_measure(cluster, options, run))
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)
    return run
