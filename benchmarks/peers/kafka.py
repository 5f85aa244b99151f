"""Loads by confluent-kafka, with `acks=all`; each message has a callback, as ours has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..harness import percentiles
from ..messaging import SAMPLE, WARM_UP_S, payloads
from .kafka_server import delete_topic, make_topic
from .receives import QUEUE
from .sends import BYTES_IN_FLIGHT, SEED, in_flight
from .turns import Figures

RECEIVED_AT_ONCE = 500
SILENT_S = 60.0
SETTINGS = {"acks": "all", "queue.buffering.max.kbytes": BYTES_IN_FLIGHT >> 10, "log_level": 3}


class Sending:
    """Sends as fast as the queue of the client allows, and counts acknowledgements."""

    def __init__(self, url: str, topic: str, size: int) -> None:
        from confluent_kafka import Producer

        settings = SETTINGS | {"bootstrap.servers": url, "queue.buffering.max.messages": in_flight(size)}
        self._producer, self._topic, self._contents = Producer(settings), topic, payloads(size, SEED)
        self.acked = 0
        self.samples: list[float] = []

    def _done(self, error: Any, message: Any) -> None:
        if error is not None:
            raise AssertionError(f"a send failed: {error}")
        self.acked += 1

    def _timed(self, at: float) -> Callable[[Any, Any], None]:
        def timed(error: Any, message: Any) -> None:
            self.samples.append(time.perf_counter() - at)
            self._done(error, message)

        return timed

    def run(self, seconds: float = float("inf"), messages: float = float("inf")) -> float:
        """Until the time is over or so many are sent, and all are acknowledged; the seconds that took."""
        produce, poll, contents, topic = self._producer.produce, self._producer.poll, self._contents, self._topic
        begin, sent = time.perf_counter(), 0
        while (now := time.perf_counter()) < begin + seconds and sent < messages:
            for at in range(SAMPLE):
                done = self._timed(now) if at == 0 else self._done
                while True:
                    try:
                        produce(topic, contents[at], on_delivery=done)
                        break
                    except BufferError:
                        poll(0.01)
            sent += SAMPLE
            poll(0)
        self._producer.flush()
        return time.perf_counter() - begin


class Produce:
    """As ours: into a topic of each turn's own; `alone`: makes it and deletes it."""

    def __init__(self, url: str, size: int, topic: str = "produce", alone: bool = True) -> None:
        self._url, self._size, self._topic, self._alone = url, size, topic, alone

    def turn(self, number: int, seconds: float) -> Figures:
        topic = f"{self._topic}-{number}"
        if self._alone:
            make_topic(self._url, topic)
        sending = Sending(self._url, topic, self._size)
        sending.run(seconds=WARM_UP_S)
        before = sending.acked
        sending.samples.clear()
        taken_s = sending.run(seconds=seconds)
        found = percentiles(sending.samples)
        if self._alone:
            delete_topic(self._url, topic)
        return {"msg_s": (sending.acked - before) / taken_s, "p50_ms": found["p50"], "p99_ms": found["p99"]}


class Singles:
    """Latency of single sends at a fixed rate, not batched (`linger.ms=0`), from when each was due."""

    def __init__(self, url: str, size: int, rate: float) -> None:
        from confluent_kafka import Producer

        make_topic(url, "singles")
        self._producer = Producer(SETTINGS | {"bootstrap.servers": url, "linger.ms": 0})
        self._contents, self._rate = payloads(size, SEED), rate
        self._samples: list[float] = []

    def turn(self, number: int, seconds: float) -> Figures:
        ended = threading.Event()
        polling = threading.Thread(target=self._poll, args=(ended,), daemon=True)
        polling.start()
        self._stretch(WARM_UP_S)
        sends = self._stretch(seconds)
        ended.set()
        polling.join()
        found = percentiles(self._samples)
        return {"p50_ms": found["p50"], "p99_ms": found["p99"], "msg_s": sends / seconds}

    def _poll(self, ended: threading.Event) -> None:
        while not ended.is_set():
            self._producer.poll(0.1)

    def _stretch(self, seconds: float) -> int:
        self._samples, count = [], 0
        begin = time.perf_counter()
        while (due := begin + count / self._rate) < begin + seconds:
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            self._producer.produce("singles", self._contents[count % 256], on_delivery=self._done(due))
            count += 1
        self._producer.flush()
        if len(self._samples) != count:
            raise AssertionError(f"{len(self._samples)} of {count} sends were acknowledged")
        return count

    def _done(self, due: float) -> Callable[[Any, Any], None]:
        samples = self._samples

        def done(error: Any, message: Any) -> None:
            if error is None:
                samples.append(time.perf_counter() - due)

        return done


class _Consumer:
    """Reads a partition from its begin; what was received is committed every five seconds, Kafka's default."""

    def __init__(self, url: str, topic: str, group: str) -> None:
        from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

        settings = {"bootstrap.servers": url, "group.id": group, "queued.min.messages": QUEUE, "log_level": 3}
        self._consumer = Consumer(settings | {"queued.max.messages.kbytes": QUEUE})  # of 1 KB
        self._partition = TopicPartition(topic, 0, OFFSET_BEGINNING)
        self._consumer.assign([self._partition])

    def published(self) -> int:
        """Returns how many messages the partition has stored: what the broker says."""
        return int(self._consumer.get_watermark_offsets(self._partition)[1])

    def take(self, *, seconds: float = float("inf"), messages: float = float("inf")) -> int:
        """How many were received. AssertionError: an error came, or nothing for a while."""
        receive, count, last = self._consumer.consume, 0, time.perf_counter()
        deadline = last + seconds
        while count < messages and (now := time.perf_counter()) < deadline:
            batch = receive(RECEIVED_AT_ONCE, 0.1)
            for message in batch:
                assert message.error() is None, message.error()
            assert batch or now < last + SILENT_S, f"nothing came for {SILENT_S:.0f} s"
            last, count = now if batch else last, count + len(batch)
        return count

    def close(self) -> None:
        self._consumer.close()


class Receive:
    """What comes while a producer sends into the topic of the turn, and what the topic stored in the same time."""

    def __init__(self, url: str) -> None:
        self._url = url

    def turn(self, number: int, seconds: float) -> Figures:
        topic = f"roundtrip-{number}"
        consumer = _Consumer(self._url, topic, f"bench-{number}")
        consumer.take(messages=1)
        consumer.take(seconds=WARM_UP_S)
        begin, before = time.perf_counter(), consumer.published()
        count = consumer.take(seconds=seconds)
        produced, taken_s = consumer.published() - before, time.perf_counter() - begin
        consumer.close()
        return {"msg_s": count / taken_s, "produced_msg_s": produced / taken_s}


class CatchUp:
    """A backlog is read to its end, in each turn by a new group."""

    def __init__(self, url: str, size: int, messages: int) -> None:
        make_topic(url, "catchup")
        Sending(url, "catchup", size).run(messages=messages)
        self._url, self._messages = url, messages

    def turn(self, number: int, seconds: float) -> Figures:
        begin = time.perf_counter()
        consumer = _Consumer(self._url, "catchup", f"bench-{number}")
        count = consumer.take(messages=self._messages)
        rate = count / (time.perf_counter() - begin)
        consumer.close()
        return {"msg_s": rate}
