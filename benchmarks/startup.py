"""startup and idle: what a developer feels first."""

from __future__ import annotations

import time

from .harness import Options, Run, Usage, server

SETTLE_S = 3.0


def startup(options: Options) -> Run:
    """Start of `magnetar standalone` on an empty directory to the first message consumed; the client is imported."""
    import magnetar
    import magnetar.asyncio  # the driver: its import belongs to the user's program

    with server(options.bookies, start=False) as running:
        begin = time.perf_counter()
        ready = running.start()
        with magnetar.Client(running.url) as client:
            consumer = client.subscribe("first", "bench")
            client.create_producer("first").send(b"hello")
            assert consumer.receive(10_000).data() == b"hello"
            elapsed = time.perf_counter() - begin
            return Run(
                elapsed,
                detail={"ready_s": round(ready, 3)},
                processes={"server": Usage(running.pid, from_start=True).read()},
            )


def idle(options: Options) -> Run:
    """RSS of a standalone server that has served one message and has nothing to do; its CPU share is in the detail."""
    import magnetar

    with server(options.bookies) as running:
        with magnetar.Client(running.url) as client:
            client.create_producer("first").send(b"hello")
        time.sleep(SETTLE_S)
        usage = Usage(running.pid)
        time.sleep(options.seconds)
        used = usage.read()
        return Run(
            used["rss_mb"],
            processes={"server": used},
            detail={"cpu_percent": round(100 * used["cpu_s"] / options.seconds, 2)},
        )
