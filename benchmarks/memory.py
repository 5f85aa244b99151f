"""memory: peak RSS of a standalone server under each load, against `memory_bytes` and 60 MB, at two budgets.

For each budget and load a fresh server, and clients as many loads have them: a producer of 1 KB messages, produce and
consume at once, a backlog that is caught up with, Shared and Key_Shared subscriptions, CONNECTIONS connections that
each send their maximum at once, a subscription that does not read, and TOPICS topics. `value` is the largest ratio of a
peak to its bound: above 1 the benchmark fails, and ends with exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from . import messaging, subscriptions
from .harness import Options, Run, Server, Usage, progress
from .messaging import TOPIC, Sending, payloads

MIB = 1 << 20
BUDGETS = (128 * MIB, 256 * MIB)
BASE_BYTES = 60_000_000
"""The interpreter, the modules and what they keep: an idle server has 54 MB."""
CONNECTIONS = 100
MESSAGE = 512 << 10
OF_EACH = 16
"""Messages of each connection that are sent without waiting: 8 MiB each, 800 MiB of all."""
STALLED = 20
TOPICS = 1_000
MESSAGES = 1_000_000
"""The default of --messages."""


def memory(options: Options) -> Run:
    """The largest peak over its bound."""
    run, worst = Run(0.0), {"ratio": 0.0}
    for budget in BUDGETS[:1] if options.rehearses else BUDGETS:
        for name, load in LOADS.items():
            peak = _peak(budget, load, options)
            bound = budget + BASE_BYTES
            found = {
                "load": name, "budget_mb": round(budget / 1e6, 1), "peak_rss_mb": round(peak / 1e6, 1),
                "bound_mb": round(bound / 1e6, 1), "within": peak <= bound, "ratio": round(peak / bound, 3),
            }  # fmt: skip
            progress(f"  {name} with {budget // MIB} MiB: peak {peak / 1e6:.0f} MB of {bound / 1e6:.0f} MB")
            run.detail.setdefault("loads", []).append(found)
            worst = max(worst, found, key=lambda each: each["ratio"])
    run.value = worst["ratio"]
    run.detail["within"] = all(each["within"] for each in run.detail["loads"])
    return run


def _peak(budget: int, load: Callable[[Options, Server], None], options: Options) -> int:
    """Bytes of RSS at most, from the start of the server to the end of the load."""
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    running = Server(directory, 1, "--memory-bytes", str(budget))
    try:
        running.start()
        load(options, running)
        return int(Usage(running.pid).read()["peak_rss_mb"] * MIB)
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _as_there(module: Any, benchmark: str) -> Callable[[Options, Server], None]:
    """The load of another benchmark."""

    def load(options: Options, running: Server) -> None:
        @contextlib.contextmanager
        def this(*_: Any, **__: Any) -> Iterator[Server]:
            yield running

        own, module.server = module.server, this
        try:
            getattr(module, benchmark)(options)
        finally:
            module.server = own

    return load


def _connections(options: Options, running: Server) -> None:
    """Each connection sends its maximum at once, and then waits for all receipts."""
    asyncio.run(_send_all(running.url, _part(OF_EACH, options)))


def _part(whole: int, options: Options) -> int:
    """Of `whole`, as many as --messages is of its default: a short run has a small load."""
    return max(1, min(whole, whole * options.messages // MESSAGES))


async def _send_all(url: str, of_each: int) -> None:
    import magnetar.asyncio

    clients = [magnetar.asyncio.Client(url, operation_timeout_seconds=120) for _ in range(CONNECTIONS)]
    payload = bytes(MESSAGE)
    try:
        producers = [
            await each.create_producer(f"{TOPIC}-{number % 10}", send_timeout_millis=0)
            for number, each in enumerate(clients)
        ]
        await asyncio.gather(*(each.send_many([payload] * of_each) for each in producers))
    finally:
        await asyncio.gather(*(each.close() for each in clients))


def _unread(options: Options, running: Server) -> None:
    """Subscriptions that do not read what they asked for, beside one that reads all."""
    import magnetar

    earliest = magnetar.InitialPosition.Earliest
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(magnetar.Client(running.url))
        producer = client.create_producer(TOPIC, batching_enabled=True, block_if_queue_full=True)
        stalled = [opened.enter_context(magnetar.Client(running.url, memory_limit_bytes=1)) for _ in range(STALLED)]
        for number, each in enumerate(stalled):
            each.subscribe(TOPIC, f"stalled-{number}", initial_position=earliest)
        Sending(producer, payloads(options.size, options.seed)).run(messages=options.messages // 4)
        reader = client.subscribe(TOPIC, "reads", initial_position=earliest)
        for _ in range(options.messages // 4):
            reader.acknowledge(reader.receive(30_000))


def _topics(options: Options, running: Server) -> None:
    import magnetar

    with magnetar.Client(running.url) as client:
        for number in range(_part(TOPICS, options)):
            client.subscribe(f"{TOPIC}-{number}", "bench")
            client.create_producer(f"{TOPIC}-{number}").send(bytes(options.size))


LOADS: dict[str, Callable[[Options, Server], None]] = {
    "produce": _as_there(messaging, "produce"),
    "roundtrip": _as_there(messaging, "roundtrip"),
    "catchup": _as_there(messaging, "catchup"),
    "shared": _as_there(subscriptions, "shared"),
    "key-shared": _as_there(subscriptions, "key_shared"),
    "connections": _connections,
    "unread": _unread,
    "topics": _topics,
}
