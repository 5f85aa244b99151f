"""recover-topics: a standalone server with many open ledgers is killed, and every topic takes a message again.

The value is the seconds from the start of the process until each of `--topics` topics has taken a message. At the
kill -9 each had a producer, a subscription and an open ledger. All of them are asked for at once, as by the clients of
a crashed broker. In the detail: requests that bookies answered with BUSY, for each topic, and the slowest topic.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request

from .harness import Options, Run, Usage, progress, server

TOPICS = 1_000
BUSY = "magnetar_bookie_busy_total"


def recover_topics(options: Options) -> Run:
    count = int(options.extra.get("topics", TOPICS // 50 if options.rehearses else TOPICS))
    with server(options.bookies, "--metrics", "0") as running:
        asyncio.run(_used(running.url, count, "before", []))
        running.kill()
        progress(f"recover-topics: {count:,} topics have an open ledger each, and the server is killed")
        begin = time.perf_counter()
        ready = running.start()
        seconds: list[float] = []
        asyncio.run(_used(running.url, count, "after", seconds))
        elapsed = time.perf_counter() - begin
        return Run(
            elapsed,
            detail={
                "topics": count, "ready_s": round(ready, 3), "slowest_topic_s": round(max(seconds), 3),
                "busy_per_topic": round(busy(running.metrics_url) / count, 3),
            },
            processes={"server": Usage(running.pid, from_start=True).read()},
        )  # fmt: skip


async def _used(url: str, count: int, text: str, seconds: list[float]) -> None:
    from magnetar.asyncio import Client

    begin = time.perf_counter()
    async with Client(url) as client:

        async def use(number: int) -> None:
            producer = await client.create_producer(f"t{number}", initial_subscription_name="s")
            await producer.send(text.encode())
            seconds.append(time.perf_counter() - begin)

        await asyncio.gather(*[use(number) for number in range(count)])


def busy(url: str) -> int:
    """Requests that the bookies answered with BUSY."""
    with urllib.request.urlopen(url, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(BUSY)]
    if not found:
        raise RuntimeError(f"{url} does not show {BUSY}")
    return int(sum(found))
