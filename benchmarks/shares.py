"""shares: what is published in sum through two brokers to a namespace whose publish rate is limited.

The cluster is metadata, three bookies and two brokers as single processes on this machine. Each broker has a topic of
the namespace, to which SENDERS tasks send as fast as they may. The parts of the run, each WINDOW_S after SETTLE_S: both
topics are published to; only one is; both again, with half the limit; both, after the bundle of one moved to the other
broker; both, with a topic that was deleted and made anew; both, after kill -9 of the broker that divides the limit and
its session. The value is the largest deviation of a part from its limit, in percent; `busiest_s` in `detail` is the
second after the kill in which most was published, as a part of the limit.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from .harness import Options, Run

LIMIT = 1000
"""Messages a second of the namespace; half in a part of the run."""
NAMESPACE = "public/shares"
SENDERS = 100
WINDOW_S = 10.0
SETTLE_S = 8.0
KILLED_S = 30
"""Seconds until another broker divides the limit, at most: a session ends, and a leader is elected."""


def _name_topic(bundle: int) -> str:
    from magnetar.broker.cluster.bundles_core import compute_bundle_number

    names = (f"persistent://{NAMESPACE}/t{number}" for number in range(100))
    return next(name for name in names if compute_bundle_number(name, 2) == bundle)


class Sending:
    """Tasks that send to a topic as fast as they may; `sent` counts what is acknowledged."""

    def __init__(self, client: Any, topic: str, size: int) -> None:
        self._client, self._topic, self._body = client, topic, bytes(size)
        self._tasks: list[asyncio.Task[None]] = []
        self.sent = 0
        self.errors = 0

    async def start(self) -> None:
        producer = await self._client.create_producer(self._topic, batching_enabled=False)
        self._tasks = [asyncio.create_task(self._send(producer)) for _ in range(SENDERS)]

    async def _send(self, producer: Any) -> None:
        from magnetar import PulsarException

        while True:
            try:
                await producer.send(self._body)
                self.sent += 1
            except PulsarException:
                self.errors += 1
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        for each in self._tasks:
            each.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []


async def _place(admin: Any, bundle: int, endpoint: str) -> None:
    from magnetar.broker.cluster.bundles_core import make_bundle_name

    topic = _name_topic(bundle)
    await admin.topic_stats(topic)
    if endpoint not in await admin.owner(topic):
        await admin.unload_namespace(NAMESPACE, make_bundle_name(bundle, 2), destination=endpoint)
    await admin.topic_stats(topic)


async def _rate(sending: list[Sending], window_s: float) -> float:
    await asyncio.sleep(SETTLE_S)
    return await _count(sending, window_s)


async def _count(sending: list[Sending], window_s: float) -> float:
    """Returns how many messages a second are acknowledged during the window."""
    began, before = time.perf_counter(), sum(each.sent for each in sending)
    await asyncio.sleep(window_s)
    return (sum(each.sent for each in sending) - before) / (time.perf_counter() - began)


async def _measure(cluster: Any, options: Options, run: Run) -> None:
    from magnetar.admin import AdminClient, Policies
    from magnetar.asyncio import Client

    window_s = max(options.seconds, WINDOW_S)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(cluster.url))
        admin = await stack.enter_async_context(AdminClient(cluster.url))
        await admin.create_namespace(NAMESPACE, bundles=2)
        first, second = sorted(each.endpoint for each in await admin.brokers())
        for bundle, endpoint in enumerate((first, second)):
            await admin.create_topic(_name_topic(bundle))
            await _place(admin, bundle, endpoint)
        await admin.set_namespace_policies(NAMESPACE, Policies(namespace_publish_rate_messages=LIMIT))
        both = [Sending(client, _name_topic(bundle), options.size) for bundle in (0, 1)]
        for each in both:
            await each.start()
        await asyncio.sleep(SETTLE_S)  # a leader is elected
        found = {"both": await _rate(both, window_s) / LIMIT}
        await both[1].stop()
        found["one"] = await _rate(both, window_s) / LIMIT
        await both[1].start()
        await admin.set_namespace_policies(NAMESPACE, Policies(namespace_publish_rate_messages=LIMIT // 2))
        found["half the limit"] = await _rate(both, window_s) / (LIMIT // 2)
        await admin.set_namespace_policies(NAMESPACE, Policies(namespace_publish_rate_messages=LIMIT))
        await _place(admin, 0, second)
        found["moved"] = await _rate(both, window_s) / LIMIT
        await both[0].stop()
        await admin.delete_topic(_name_topic(0), force=True)
        await admin.create_topic(_name_topic(0))
        await _place(admin, 0, first)
        await both[0].start()
        found["made anew"] = await _rate(both, window_s) / LIMIT
        shown = await admin.shared_limits()
        leader = (await admin.balance_status()).leader
        victim = next(each.endpoint for each in await admin.brokers() if each.name == leader)
        next(each for each in cluster.brokers if each.address == victim).kill()
        seconds = [await _count(both, 1.0) for _ in range(KILLED_S)]
        found["killed"] = await _rate(both, window_s) / LIMIT
    run.value = round(100 * max(abs(each - 1) for each in found.values()), 1)
    run.detail = {
        **{name: round(each, 3) for name, each in found.items()}, "errors": sum(each.errors for each in both),
        "shares": {each.broker: round(each.share, 3) for each in shown.limits},
        "why": sorted({each.why for each in shown.limits}), "busiest_s": round(max(seconds) / LIMIT, 3),
    }  # fmt: skip


def shares(options: Options) -> Run:
    """The largest deviation from the limit in percent; what was published of the limit in each part in `detail`."""
    from magnetar.cli.common.processes import Cluster

    run = Run(0.0)
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        with Cluster(Path(directory), bookies=3, brokers=2) as cluster:
            asyncio.run(_measure(cluster, options, run))
    finally:
        with suppress(OSError):
            shutil.rmtree(directory)
    return run
