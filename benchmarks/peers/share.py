"""Share groups, Kafka's queues: a backlog is read by four consumers, a thread each, and each record is acknowledged.

Explicit mode: a record is acknowledged by itself, what was polled at once is committed at once without waiting. Counted
is what the broker confirmed, from the first record on: joining a share group takes seconds, which are not counted.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ..subscriptions import CONSUMERS
from .kafka import Sending
from .kafka_server import admin, make_topic
from .turns import Figures

TIMEOUT_S = 120.0


class Share:
    def __init__(self, url: str, size: int, messages: int) -> None:
        make_topic(url, "shared")
        Sending(url, "shared", size).run(messages=messages)
        self._url, self._messages = url, messages

    def turn(self, number: int, seconds: float) -> Figures:
        group = f"bench-{number}"
        _from_earliest(self._url, group)
        done = threading.Event()
        sharers = [_Sharer(self._url, group, done) for _ in range(CONSUMERS)]
        for each in sharers:
            each.start()
        deadline = time.perf_counter() + TIMEOUT_S
        while sum(each.acked for each in sharers) < self._messages and time.perf_counter() < deadline:
            if any(each.failure for each in sharers):
                break
            time.sleep(0.005)
        done.set()
        for each in sharers:
            each.join()
        if failures := [each.failure for each in sharers if each.failure]:
            raise AssertionError(failures[0])
        acked = sum(each.acked for each in sharers)
        if acked < self._messages:
            raise AssertionError(f"{acked} of {self._messages} records were acknowledged")
        first = min(each.first for each in sharers if each.first)
        return {"msg_s": acked / (max(each.last for each in sharers) - first)}


class _Sharer(threading.Thread):
    def __init__(self, url: str, group: str, done: threading.Event) -> None:
        super().__init__(daemon=True)
        self._settings = {
            "bootstrap.servers": url, "group.id": group, "share.acknowledgement.mode": "explicit", "log_level": 3,
        }  # fmt: skip
        self._over = done
        self.acked = 0
        self.first = self.last = 0.0
        self.failure: str | None = None

    def run(self) -> None:
        try:
            self._drain()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _drain(self) -> None:
        from confluent_kafka import ShareConsumer

        consumer = ShareConsumer(self._settings)
        consumer.set_acknowledgement_commit_callback(self._committed)
        consumer.subscribe(["shared"])
        while not self._over.is_set():
            polled = consumer.poll(0.2)
            if len(polled) and not self.first:
                self.first = time.perf_counter()
            for record in polled:
                assert record.error() is None, record.error()
                consumer.acknowledge(record)
            if len(polled):
                consumer.commit_async()
        consumer.close()

    def _committed(self, offsets: dict[Any, set[int]], error: Any) -> None:
        if error is not None:
            self.failure = f"an acknowledgement failed: {error}"
        self.acked += sum(len(each) for each in offsets.values())
        self.last = time.perf_counter()


def _from_earliest(url: str, group: str) -> None:
    """A share group begins at the end of a topic, unless its setting says so."""
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    begin = ConfigEntry("share.auto.offset.reset", "earliest", incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource(ResourceType.GROUP, group, incremental_configs=[begin])
    client = admin(url)
    for done in client.incremental_alter_configs([changed]).values():
        done.result(30)
