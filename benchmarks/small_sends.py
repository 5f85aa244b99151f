"""small-sends: 50 threads of one client, each with its own producer and topic, send one message after another.

Blocking `send`, all settings at their defaults: what a program pays that publishes from many request handlers. Each
send waits for its own synced acknowledgement.
"""

from __future__ import annotations

import threading
import time

from .harness import Options, Run, measured, percentiles, server
from .messaging import payloads

THREADS = 50
WARM_UP_S = 2.0


class Sender(threading.Thread):
    def __init__(self, producer: object, contents: list[bytes], begin: threading.Barrier) -> None:
        super().__init__(daemon=True)
        self.samples: list[tuple[float, float]] = []  # (when it was over, seconds)
        self.stop = False
        self._producer = producer
        self._contents = contents
        self._begin = begin

    def run(self) -> None:
        send, contents, count = self._producer.send, self._contents, len(self._contents)  # type: ignore[attr-defined]
        self._begin.wait()
        sent = 0
        at = time.perf_counter()
        while not self.stop:
            send(contents[sent % count])
            sent += 1
            over = time.perf_counter()
            self.samples.append((over, over - at))
            at = over


def small_sends(options: Options) -> Run:
    import magnetar

    contents = payloads(options.size, options.seed)
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        begin = threading.Barrier(THREADS + 1)
        senders = [Sender(client.create_producer(f"small-{n}"), contents, begin) for n in range(THREADS)]
        for sender in senders:
            sender.start()
        begin.wait()
        time.sleep(options.at_most(WARM_UP_S))
        run, first = Run(0.0), time.perf_counter()
        with measured(run, server=running.pid):
            time.sleep(options.seconds)
            last = time.perf_counter()
        for sender in senders:
            sender.stop = True
        for sender in senders:
            sender.join(60)
        latencies = [took for sender in senders for over, took in sender.samples if first <= over <= last]
        run.value = len(latencies) / (last - first)
        run.latencies_ms = percentiles(latencies)
        run.detail = {
            "messages": len(latencies),
            "threads": THREADS,
            "server_cpu_ms_per_message": round(run.processes["server"]["cpu_s"] * 1000 / max(1, len(latencies)), 4),
            "client_cpu_ms_per_message": round(run.processes["client"]["cpu_s"] * 1000 / max(1, len(latencies)), 4),
        }
        return run
