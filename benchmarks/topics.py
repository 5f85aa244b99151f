"""topics: many topics on one broker, each with a producer and a subscription.

The value is creations per second: a topic is made, a producer opened and a subscription created, `AT_ONCE` at a time.
In the detail:

- what a topic keeps in memory of the server with its producer connected and when it has left;
- what it costs the CPU to have them all idle, and how long a message to one of them takes then;
- how long a list of them, a page of metrics and a search for orphaned ledgers take;
- what is left of the memory when idle topics were unloaded (after IDLE_S, which is set for that), and by how much the
  peak grows when a fifth as many are made then: not at all if the memory is used again;
- after `kill -9`: the time until the server is ready, until the first message is taken, and until each of
  `restart_topics` of them, at most RECONNECTED, has taken a message.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from .harness import Options, Run, Usage, percentiles, progress, server

if TYPE_CHECKING:
    from magnetar.asyncio import Producer

TOPICS = 10_000
AT_ONCE = 64
OF_A_CLIENT = 25_000
"""Producers of one client: a connection carries 50,000 (`connection_ids`)."""
RECONNECTED = 25_000
"""Topics whose clients come back after the restart: what a broker takes over from one of four."""
SETTLE_S = 5.0
SEND_PAUSE_S = 0.02
IDLE_S = 30
"""Of `unload_idle_s` here: longer than what is measured before."""
UNLOADED_S = 600.0
"""Until all idle topics are unloaded, or what is measured then is said with how many are left."""


def topics(options: Options) -> Run:
    count = int(options.extra.get("topics", TOPICS // 50 if options.rehearses else TOPICS))
    run = Run(0.0)
    gc.disable()  # a collection of this process, with all producers, would let the broker miss it
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
        progress(f"topics: {run.detail}")
        running.kill()
        begin, back = time.perf_counter(), min(count, RECONNECTED)
        run.detail |= {"restart_topics": back, "ready_s": round(running.start(), 2)}
        asyncio.run(_first(running.url))
        run.detail["first_message_s"] = round(time.perf_counter() - begin, 2)
        asyncio.run(_served(running.url, back))
        run.detail["restart_s"] = round(time.perf_counter() - begin, 2)
        run.processes["restarted"] = Usage(running.pid, from_start=True).read()


async def _first(url: str) -> None:
    from magnetar.asyncio import Client

    async with Client(url) as client:
        await (await client.create_producer("first")).send(b"hello")


async def _made(url: str, metrics_url: str, pid: int, count: int, before_mb: float, run: Run, settle_s: float) -> None:
    from magnetar.admin import AdminClient
    from magnetar.asyncio import Client

    producers: list[Producer] = []
    async with AsyncExitStack() as opened, AdminClient(url) as admin:
        clients = [await opened.enter_async_context(Client(url)) for _ in range(0, count, OF_A_CLIENT)]
        first = await clients[0].create_producer("first")

        async def make(number: int) -> None:
            producers.append(await clients[number // OF_A_CLIENT].create_producer(f"t{number}"))
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
        run.latencies_ms = percentiles(await _sent(first, settle_s))
    await asyncio.sleep(settle_s)
    left = Usage(pid).read()["rss_mb"]
    progress(f"topics: {connected:,.0f} MB with producers, {left:,.0f} MB without; {run.latencies_ms}")
    run.detail = {
        "topics": count,
        "kb_per_topic_with_producer": round(1024 * (connected - before_mb) / count, 1),
        "kb_per_topic": round(1024 * (left - before_mb) / count, 1),
        "idle_cpu_percent": round(100 * cpu, 1),
        **await _asked(url, metrics_url),
    }
    progress(f"topics: {run.detail}")
    run.detail |= await _unloaded(metrics_url, pid, before_mb)
    run.detail |= await _made_again(url, pid, count)


async def _sent(producer: Producer, seconds: float) -> list[float]:
    """How long messages to one topic take while the others are idle, in s."""
    found, end = list[float](), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        await producer.send(b"idle")
        found.append(time.perf_counter() - begin)
        await asyncio.sleep(SEND_PAUSE_S)
    return found


async def _made_again(url: str, pid: int, count: int) -> dict[str, float]:
    """Makes a fifth as many topics, with a producer each. The peak of the server's memory before and after, in MB."""
    from magnetar.asyncio import Client

    before = Usage(pid).read()["peak_rss_mb"]
    async with Client(url) as client:

        async def make(number: int) -> None:
            await client.create_producer(f"more{number}", initial_subscription_name="s")

        await run_each(count // 5, make)
        after = Usage(pid).read()["peak_rss_mb"]
    return {"more_topics": count // 5, "peak_mb": before, "peak_mb_with_more": after}


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
