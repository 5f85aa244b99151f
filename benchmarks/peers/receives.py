"""Receiving loads of our client: each message is acknowledged by itself."""

from __future__ import annotations

import time
from typing import Any

from ..messaging import WARM_UP_S, Sending, consume, payloads, published
from ..subscriptions import CONSUMERS, Drained
from .sends import SEED, batching, connect
from .turns import Figures

QUEUE = 5000
"""Messages that wait in a consumer: 5 MB of 1 KB, for every client of every side."""


def keep(client: Any, topic: str) -> None:
    """A subscription keeps what is written from now on."""
    import magnetar

    client.subscribe(topic, "keep", initial_position=magnetar.InitialPosition.Earliest).close()


def fill(url: str, topic: str, size: int, messages: int) -> None:
    """Stores a backlog that stays."""
    with connect("magnetar", url) as client:
        keep(client, topic)
        Sending(batching(client, topic, size), payloads(size, SEED)).run(messages=messages)


class Receive:
    """What comes while a producer sends into the topic of the turn, and what the topic stored in the same time."""

    def __init__(self, url: str) -> None:
        from magnetar.admin import Admin

        self._client, self._admin = connect("magnetar", url), Admin(url)

    def turn(self, number: int, seconds: float) -> Figures:
        import magnetar

        topic, earliest = f"roundtrip-{number}", magnetar.InitialPosition.Earliest
        consumer = self._client.subscribe(topic, "bench", initial_position=earliest, receiver_queue_size=QUEUE)
        consumer.acknowledge(consumer.receive(60_000))
        consume(consumer, seconds=WARM_UP_S)
        begin, before = time.perf_counter(), published(self._admin, topic)
        count, _ = consume(consumer, seconds=seconds)
        produced, taken_s = published(self._admin, topic) - before, time.perf_counter() - begin
        consumer.close()
        return {"msg_s": count / taken_s, "produced_msg_s": produced / taken_s}

    def close(self) -> None:
        self._client.close()
        self._admin.close()


class CatchUp:
    """A backlog is read to its end, in each turn by a new subscription."""

    def __init__(self, url: str, size: int, messages: int) -> None:
        fill(url, "catchup", size, messages)
        self._client, self._messages = connect("magnetar", url), messages

    def turn(self, number: int, seconds: float) -> Figures:
        import magnetar

        begin = time.perf_counter()
        earliest = magnetar.InitialPosition.Earliest
        consumer = self._client.subscribe(
            "catchup", f"bench-{number}", initial_position=earliest, receiver_queue_size=QUEUE
        )
        count, _ = consume(consumer, messages=self._messages)
        rate = count / (time.perf_counter() - begin)
        consumer.unsubscribe()
        return {"msg_s": rate}

    def close(self) -> None:
        self._client.close()


class Shared:
    """A backlog is read and acknowledged by CONSUMERS consumers, a thread each, of a Shared subscription."""

    def __init__(self, url: str, size: int, messages: int) -> None:
        fill(url, "shared", size, messages)
        self._client, self._messages = connect("magnetar", url), messages

    def turn(self, number: int, seconds: float) -> Figures:
        import magnetar

        kind, earliest = magnetar.ConsumerType.Shared, magnetar.InitialPosition.Earliest
        name = f"bench-{number}"
        consumers = [
            self._client.subscribe("shared", name, kind, initial_position=earliest, consumer_name=f"c{each}")
            for each in range(CONSUMERS)
        ]
        drained = Drained(consumers, self._messages)
        rate = drained.run()
        if drained.count < self._messages:
            raise AssertionError(f"{drained.count} of {self._messages} messages came")
        for each in consumers:
            each.close()
        return {"msg_s": rate}

    def close(self) -> None:
        self._client.close()
