"""topics: many topics on one broker, each with a producer and a subscription.

The value is creations per second: a topic is made, a producer opened and a subscription created, `AT_ONCE` at a time.
In the detail: what a topic keeps in memory of the server with its producer connected and when it has left, what it
costs the CPU to have them all idle, and the time after `kill -9` until every one of them has taken a message again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from .harness import Options, Run, Usage, progress, server

TOPICS = 10_000
AT_ONCE = 64
SETTLE_S = 5.0


def topics(options: Options) -> Run:
    count = int(options.extra.get("topics", TOPICS // 50 if options.rehearses else TOPICS))
    run = Run(0.0)
    with server(options.bookies) as running:
        asyncio.run(_first(running.url))
        before = Usage(running.pid).read()["rss_mb"]
        asyncio.run(_made(running.url, running.pid, count, before, run, min(SETTLE_S, options.seconds)))
        running.kill()
        begin = time.perf_counter()
        running.start()
        asyncio.run(_served(running.url, count))
        run.detail["restart_s"] = round(time.perf_counter() - begin, 2)
    return run


async def _first(url: str) -> None:
    from magnetar.asyncio import Client

    async with Client(url) as client:
        await (await client.create_producer("first")).send(b"hello")


async def _made(url: str, pid: int, count: int, before_mb: float, run: Run, settle_s: float) -> None:
    from magnetar.admin import AdminClient
    from magnetar.asyncio import Client, Producer

    producers: list[Producer] = []
    async with Client(url) as client, AdminClient(url) as admin:

        async def make(number: int) -> None:
            producers.append(await client.create_producer(f"t{number}"))
            await admin.create_subscription(f"t{number}", "s")

        usage, begin = Usage(pid), time.perf_counter()
        await run_each(count, make)
        seconds = time.perf_counter() - begin
        run.value = count / seconds
        run.processes = {"server": usage.read()}
        progress(f"topics: {count:,} made in {seconds:.1f} s")
        await asyncio.sleep(settle_s)
        connected = Usage(pid).read()["rss_mb"]
        idle = Usage(pid)
        await asyncio.sleep(settle_s)
        cpu = idle.read()["cpu_s"] / settle_s
    await asyncio.sleep(settle_s)
    left = Usage(pid).read()["rss_mb"]
    run.detail = {
        "topics": count,
        "kb_per_topic_with_producer": round(1024 * (connected - before_mb) / count, 1),
        "kb_per_topic": round(1024 * (left - before_mb) / count, 1),
        "idle_cpu_percent": round(100 * cpu, 1),
    }


async def _served(url: str, count: int) -> None:
    from magnetar.asyncio import Client

    async with Client(url) as client:

        async def use(number: int) -> None:
            producer = await client.create_producer(f"t{number}")
            await producer.send(b"after")
            await producer.close()

        await run_each(count, use)


async def run_each(count: int, work: Callable[[int], Awaitable[None]]) -> None:
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
