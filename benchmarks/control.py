"""control: how fast look-ups, administration and health are answered while data floods the server.

Two processes send batches as fast as they are acknowledged, over connections of their own; a third receives all of it.
They have a lower priority (NICE): the questions wait for the server, and not for a core that its clients have.
Every PAUSE_S this process asks one question of each kind, one after another, and takes its time. `alone` has the same
questions before there is any data.
"""

from __future__ import annotations

import http.client
import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from .harness import Options, Run, Server, measured, percentiles, server
from .messaging import PENDING, WARM_UP_S, payloads

SENDERS = 2
NICE = 10
PAUSE_S = 0.02
ALONE_S = 2.0


def control(options: Options) -> Run:
    """The highest p99 of a kind of question under the flood, in ms."""
    import magnetar
    from magnetar.admin import Admin

    context = multiprocessing.get_context("spawn")
    with (
        server(options.bookies) as running,
        magnetar.Client(running.url) as client,
        closing(Admin(running.url)) as admin,
    ):
        asked = _questions(running, client, admin)
        _ask(asked, 0.2)
        alone = _ask(asked, options.at_most(ALONE_S))
        stop, counts = context.Event(), context.Queue()
        flood = [
            context.Process(target=_send, args=(running.url, number, options, stop, counts), daemon=True)
            for number in range(SENDERS)
        ]
        flood.append(context.Process(target=_receive, args=(running.url, stop), daemon=True))
        for each in flood:
            each.start()
        time.sleep(options.at_most(2 * WARM_UP_S))
        run = Run(0.0)
        with measured(run, server=running.pid):
            flooded = _ask(asked, options.seconds)
        stop.set()
        rates = [counts.get(timeout=30) for _ in range(SENDERS)]
        for each in flood:
            each.join(30)
        told = {kind: percentiles(samples) for kind, samples in flooded.items()}
        worst = max(told, key=lambda kind: told[kind]["p99"])
        run.value, run.latencies_ms = told[worst]["p99"], told[worst]
        run.detail = {
            "worst": worst, "msg_s": round(sum(rates)), "samples": len(flooded[worst]),
            **{f"{kind}_p99_ms": round(each["p99"], 2) for kind, each in told.items()},
            **{f"{kind}_alone_p99_ms": round(percentiles(each)["p99"], 2) for kind, each in alone.items()},
        }  # fmt: skip
        return run


def _questions(running: Server, client: Any, admin: Any) -> dict[str, Callable[[], Any]]:
    """Each over a connection that is open already, beside those of the flood."""
    where = urlsplit(running.http_url)
    door = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)

    def health() -> None:
        door.request("GET", "/readyz")
        answer = door.getresponse()
        answer.read()
        assert answer.status == 200, "it is ready"

    def change() -> None:
        admin.set_topic_properties("asked", {"at": str(time.time_ns())})

    admin.create_topic("asked")
    return {
        "lookup": lambda: client.get_topic_partitions("asked"),
        "statistics": lambda: admin.topic_stats("asked"),
        "metadata": change,
        "health": health,
    }


def _ask(asked: dict[str, Callable[[], Any]], seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {kind: [] for kind in asked}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for kind, ask in asked.items():
            begin = time.perf_counter()
            ask()
            found[kind].append(time.perf_counter() - begin)
        time.sleep(PAUSE_S)
    return found


def _send(url: str, number: int, options: Options, stop: Any, counts: Any) -> None:
    import magnetar

    os.nice(NICE)
    contents, sent, acked = payloads(options.size, options.seed), 0, 0

    def done(result: Any, _: Any) -> None:
        nonlocal acked
        acked += result == magnetar.Result.Ok

    with magnetar.Client(url) as client:
        producer = client.create_producer(
            f"flood-{number}", batching_enabled=True, block_if_queue_full=True, max_pending_messages=PENDING
        )
        begin = time.perf_counter()
        while not stop.is_set():
            for _ in range(1000):
                producer.send_async(contents[sent % len(contents)], done)
                sent += 1
        counts.put(acked / (time.perf_counter() - begin))


def _receive(url: str, stop: Any) -> None:
    import magnetar

    os.nice(NICE)
    with magnetar.Client(url) as client:
        consumer = client.subscribe([f"flood-{number}" for number in range(SENDERS)], "all")
        while not stop.is_set():
            for message in consumer.batch_receive():
                consumer.acknowledge(message)
