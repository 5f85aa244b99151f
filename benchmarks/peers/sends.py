"""Sending loads of our client and, where `api` is `pulsar`, of Pulsar's client for Python: one program."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

from ..harness import percentiles
from ..messaging import SAMPLE, WARM_UP_S, Paced, Sending, payloads
from ..small_sends import Sender
from .turns import Figures

SEED = 1
BYTES_IN_FLIGHT = 20 << 20
"""Not acknowledged yet, of every client of every side: what the queue of a producer is bounded by."""
SMALL_WARM_UP_S = 2.0
BURST_S = 0.0005
"""Of a paced load: what is due in this time is sent at once, as a sleep is not shorter."""


def in_flight(size: int) -> int:
    """Messages of so many bytes."""
    return BYTES_IN_FLIGHT // size


def connect(api: str, url: str) -> Any:
    """A client with its default settings; Pulsar's logs errors alone."""
    module = importlib.import_module(api)
    if api == "pulsar":
        return module.Client(url, logger=module.ConsoleLogger(module.LoggerLevel.Error))
    return module.Client(url)


def batching(client: Any, topic: str, size: int) -> Any:
    return client.create_producer(
        topic, batching_enabled=True, block_if_queue_full=True, max_pending_messages=in_flight(size)
    )


class Produce:
    """As fast as acknowledgements allow, in batches, into a topic of each turn's own."""

    def __init__(self, url: str, size: int, topic: str = "produce") -> None:
        self._client, self._size, self._topic = connect("magnetar", url), size, topic

    def turn(self, number: int, seconds: float) -> Figures:
        producer = batching(self._client, f"{self._topic}-{number}", self._size)
        sending = Sending(producer, payloads(self._size, SEED))
        sending.run(seconds=WARM_UP_S)
        before = sending.acked
        sending.samples.clear()
        taken_s = sending.run(seconds=seconds)
        producer.close()
        if sending.failed:
            raise AssertionError(f"{sending.failed} sends failed")
        found = percentiles(sending.samples)
        return {"msg_s": (sending.acked - before) / taken_s, "p50_ms": found["p50"], "p99_ms": found["p99"]}

    def close(self) -> None:
        self._client.close()


class Half:
    """Latency at half of what `Produce` reaches, which is measured once, before the turns.

    From the call of a send to its acknowledgement, as pulsar-perf takes it.
    """

    def __init__(self, url: str, size: int, seconds: float) -> None:
        self._size, self._full = size, Produce(url, size, "full")
        self._client, self._rate = connect("magnetar", url), self._full.turn(0, seconds)["msg_s"] / 2

    def turn(self, number: int, seconds: float) -> Figures:
        producer = batching(self._client, f"half-{number}", self._size)
        self._paced(producer, WARM_UP_S)
        samples, rate = self._paced(producer, seconds)
        producer.close()
        found = percentiles(samples)
        return {"msg_s": rate, "p50_ms": found["p50"], "p99_ms": found["p99"]}

    def _paced(self, producer: Any, seconds: float) -> tuple[list[float], float]:
        """Latencies in seconds of one send in SAMPLE, and the messages per second that were acknowledged."""
        sending, contents, sent = Sending(producer, []), payloads(self._size, SEED), 0
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + seconds:
            for at in range(sent, due := int((now - begin) * self._rate)):
                done = sending.done if at % SAMPLE else sending.timed(time.perf_counter())
                producer.send_async(contents[at % 256], done)
            sent = due
            time.sleep(BURST_S)
        producer.flush()
        taken_s = time.perf_counter() - begin
        if sending.failed:
            raise AssertionError(f"{sending.failed} sends failed")
        return sending.samples, sending.acked / taken_s

    def close(self) -> None:
        self._full.close()
        self._client.close()


class Singles:
    """Latency of single sends at a fixed rate, not batched, from when each was due."""

    def __init__(self, api: str, url: str, size: int, rate: float) -> None:
        self._client = connect(api, url)
        self._paced = Paced(self._client, payloads(size, SEED), rate, api)

    def turn(self, number: int, seconds: float) -> Figures:
        self._paced.stretch(WARM_UP_S)
        sends = self._paced.stretch(seconds)
        found = percentiles(self._paced.samples)
        return {"p50_ms": found["p50"], "p99_ms": found["p99"], "msg_s": sends / seconds}

    def close(self) -> None:
        self._client.close()


class Small:
    """So many producers of one client, a topic and a thread each, send one message after another.

    All settings are the client's defaults: each send waits for its own acknowledgement.
    """

    def __init__(self, api: str, url: str, size: int, topics: list[str]) -> None:
        self._client = connect(api, url)
        self._producers = [self._client.create_producer(topic) for topic in topics]
        self._contents = payloads(size, SEED)

    def turn(self, number: int, seconds: float) -> Figures:
        begin = threading.Barrier(len(self._producers) + 1)
        senders = [Sender(producer, self._contents, begin) for producer in self._producers]
        for each in senders:
            each.start()
        begin.wait()
        time.sleep(SMALL_WARM_UP_S)
        first = time.perf_counter()
        time.sleep(seconds)
        last = time.perf_counter()
        for each in senders:
            each.stop = True
        for each in senders:
            each.join(60)
        taken = [took for each in senders for over, took in each.samples if first <= over <= last]
        found = percentiles(taken)
        return {"msg_s": len(taken) / (last - first), "p50_ms": found["p50"], "p99_ms": found["p99"]}

    def close(self) -> None:
        self._client.close()
