"""startup and idle: what a developer feels first."""

from __future__ import annotations

import time
from importlib.util import cache_from_source
from pathlib import Path

from .harness import ROOT, Options, Run, Usage, server, shared_mb

SETTLE_S = 3.0


def startup(options: Options) -> Run:
    """Start of `magnetar standalone` on an empty directory to the first message consumed; the client is imported.

    `bytecode`: the server's modules were compiled before, as an installation does it; if not, that takes 0.3 s more.
    """
    import magnetar
    import magnetar.asyncio  # the driver: its import belongs to the user's program

    with server(options.bookies, start=False, processes=options.processes) as running:
        begin = time.perf_counter()
        ready = running.start()
        with magnetar.Client(running.url) as client:
            consumer = client.subscribe("first", "bench")
            client.create_producer("first").send(b"hello")
            assert consumer.receive(10_000).data() == b"hello"
            elapsed = time.perf_counter() - begin
            return Run(
                elapsed,
                detail={"ready_s": round(ready, 3), "bytecode": _has_bytecode(ROOT / "broker" / "server.py")},
                processes={"server": Usage(running.pid, from_start=True, tree=True).read()},
            )


def _has_bytecode(source: Path) -> bool:
    """Whether Python finds bytecode of this source (PEP 3147): its header has the time of the source."""
    compiled = Path(cache_from_source(str(source)))
    if not compiled.is_file():
        return False
    return int.from_bytes(compiled.read_bytes()[8:12], "little") == int(source.stat().st_mtime) & 0xFFFFFFFF


def idle(options: Options) -> Run:
    """RSS of a standalone server that has served one message and has nothing to do; its CPU share is in the detail."""
    import magnetar

    with server(options.bookies, processes=options.processes) as running:
        with magnetar.Client(running.url) as client:
            client.create_producer("first").send(b"hello")
        time.sleep(options.at_most(SETTLE_S))
        usage = Usage(running.pid, tree=True)
        time.sleep(options.seconds)
        used = usage.read()
        return Run(
            used["rss_mb"],
            processes={"server": used},
            detail={
                "cpu_percent": round(100 * used["cpu_s"] / options.seconds, 2),
                "pss_mb": round(shared_mb(running.pid), 1),
            },
        )
