"""topics: many topics on one broker, each with a producer and a subscription.

The value is creations per second: a topic is made, a producer opened and a subscription created, `AT_ONCE` at a time.
In the detail: what a topic keeps in memory of the server with its producer connected and when it has left, what it
costs the CPU to have them all idle, how long a list of them, a page of metrics and a search for orphaned ledgers take,
what is left of the memory when idle topics were unloaded (after IDLE_S, which is set for that), and the time after
`kill -9` until every one of them has taken a message again.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable

from .harness import Options, Run, Usage, progress, server

TOPICS = 10_000
AT_ONCE = 64
SETTLE_S = 5.0
IDLE_S = 30
"""Of `unload_idle_s` here: longer than what is measured before."""
UNLOADED_S = 120.0
"""Until all idle topics are unloaded, or what is measured then is said with how many are left."""


def topics(options: Options) -> Run:
    count = int(options.extra.get("topics", TOPICS // 50 if options.rehearses else TOPICS))
    run = Run(0.0)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(f"[broker]\nunload_idle_s = {2 if options.rehearses else IDLE_S}\n")
        config.flush()
        _measure(options, count, run, "--config", config.name, "--metrics", "0")
    return run


def _measure(options: Options, count: int, run: Run, *settings: str) -> None:
    with server(options.bookies, *settings) as running:
        asyncio.run(_first(running.url))
        before = Usage(running.pid).read()["rss_mb"]
        settle_s = min(SETTLE_S, options.seconds)
        asyncio.run(_made(running.url, running.metrics_url, running.pid, count, before, run, settle_s))
        running.kill()
        begin = time.perf_counter()
        running.start()
        asyncio.run(_served(running.url, count))
        run.detail["restart_s"] = round(time.perf_counter() - begin, 2)


async def _first(url: str) -> None:
    from magnetar.asyncio import Client

    async with Client(url) as client:
        await (await client.create_producer("first")).send(b"hello")


async def _made(url: str, metrics_url: str, pid: int, count: int, before_mb: float, run: Run, settle_s: float) -> None:
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
        **await _asked(url, metrics_url),
    }
    run.detail |= await _unloaded(metrics_url, pid, before_mb)


async def _asked(url: str, metrics_url: str) -> dict[str, float]:
    """How long a list of the topics, a page of metrics and a search for orphans take, in s."""
    from magnetar.admin import AdminClient

    found = dict[str, float]()
    async with AdminClient(url, timeout_s=600.0) as admin:
        for name, ask in (("list_s", admin.topics), ("orphans_s", admin.find_orphans)):
            begin = time.perf_counter()
            await ask()
            found[name] = round(time.perf_counter() - begin, 3)
    begin = time.perf_counter()
    await asyncio.to_thread(_loaded_topics, metrics_url)
    found["scrape_s"] = round(time.perf_counter() - begin, 3)
    return found


def _loaded_topics(metrics_url: str) -> int:
    """Reads a page of metrics; returns how many topics are loaded."""
    with urllib.request.urlopen(metrics_url, timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("magnetar_broker_topics "))


async def _unloaded(metrics_url: str, pid: int, before_mb: float) -> dict[str, float]:
    """Waits until the idle topics are unloaded. How long that took, how many are left, and the memory then."""
    begin = time.perf_counter()
    while True:
        left = await asyncio.to_thread(_loaded_topics, metrics_url)
        passed = time.perf_counter() - begin
        if left <= 1 or passed > UNLOADED_S:
            break
        await asyncio.sleep(1.0)
    mb = Usage(pid).read()["rss_mb"]
    return {"unloaded_s": round(passed, 1), "left_loaded": left, "mb_when_unloaded": round(mb - before_mb, 1)}


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
