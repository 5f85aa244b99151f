"""small-sends: 50 threads of one client, each with its own producer and topic, send one message after another.

Blocking `send`, all settings at their defaults: what a program pays that publishes from many request handlers. Each
send waits for its own synced acknowledgement.

durability: one thread sends one message after another, in turn to a topic with durability=disk, to one with
durability=memory, and to each with acks=one and acks=none: the p50 of the first over that of the second. With one
bookie acks=one is as quorum.
"""

from __future__ import annotations

import threading
import time

from .harness import Options, Run, measured, percentiles, server
from .messaging import payloads

THREADS = 50
WARM_UP_S = 2.0
TURN_SENDS = 50
"""Sends to one topic before those to the next: what the machine does meanwhile is shared by all."""


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


def durability(options: Options) -> Run:
    """One server, one thread. The topics take turns of TURN_SENDS sends until each had `options.seconds`."""
    import magnetar
    from magnetar.admin import Admin, Policies

    contents = payloads(options.size, options.seed)
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        admin = Admin(running.url)
        producers: dict[str, object] = {}
        for durable in ("disk", "memory"):
            admin.create_topic(f"durable-{durable}")
            admin.set_topic_policies(f"durable-{durable}", Policies(durability=durable))
            for acks in ("quorum", "one", "none"):
                producers[f"{durable}, acks={acks}"] = client.create_producer(f"durable-{durable}", acks=acks)
        took: dict[str, list[float]] = {name: [] for name in producers}
        run = Run(0.0)
        with measured(run, server=running.pid):
            ends = time.perf_counter() + options.at_most(WARM_UP_S) + options.seconds * len(producers)
            counts_from = ends - options.seconds * len(producers)
            now = time.perf_counter()
            while now < ends or not all(took.values()):
                for name, producer in producers.items():
                    for content in contents[:TURN_SENDS]:
                        at = time.perf_counter()
                        producer.send(content)  # type: ignore[attr-defined]
                        if now >= counts_from:
                            took[name].append(time.perf_counter() - at)
                    producer.flush()  # type: ignore[attr-defined]  # of acks=none, not in the time of the next one
                now = time.perf_counter()
        admin.close()
        middle = {name: sorted(each)[len(each) // 2] for name, each in took.items()}
        run.value = middle["disk, acks=quorum"] / middle["memory, acks=quorum"]
        run.detail = {
            name: {
                "p50_ms": round(middle[name] * 1000, 3), "p99_ms": round(sorted(each)[len(each) * 99 // 100] * 1000, 3),
                "sends_per_s": round(len(each) / sum(each)), "sends": len(each),
            }
            for name, each in took.items()
        }  # fmt: skip
        return run
