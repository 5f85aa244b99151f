"""Producers that never stop, at full speed: bursts to several topics, each outcome noted, whatever is killed meanwhile.

clients.py does more and sends less; both write the history that judge.py judges.
"""

import threading
from types import TracebackType
from typing import Any, Self

import magnetar
from tests.chaos.workload.clients import id_of, read_to_end
from tests.chaos.workload.history import Recorder, Send, SendOk, SendUnknown, value_of
from tests.chaos.workload.judge import judge

BURST = 10
"""Messages in flight of one producer: a kill then always hits some that are half done."""
RESUME_TIMEOUT_S = 60.0
"""A cluster that gives no acknowledgement for so long after a kill has failed."""


class Load:
    """A thread for each producer, two producers for each topic, one client for all."""

    def __init__(self, url: str, topics: tuple[str, ...]) -> None:
        self.topics = topics
        self.note = Recorder()
        self.failures: list[str] = []
        self._acked = dict.fromkeys(topics, 0)
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self._client = magnetar.Client(url)
        for topic in topics:  # nothing is trimmed before this subscription has seen it, and it never looks
            self._client.subscribe(topic, "audit", initial_position=magnetar.InitialPosition.Earliest).close()
        self._threads = [
            threading.Thread(target=self._run, args=(topic, name), name=name)
            for topic in topics
            for name in (f"{topic}-0", f"{topic}-1")
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        self._client.close()

    @property
    def acked(self) -> int:
        return sum(self._acked.values())

    def wait_acked(self, more: int) -> None:
        """Until each topic has given so many acknowledgements more."""
        with self._news:
            goal = {topic: count + more for topic, count in self._acked.items()}
            reached = self._news.wait_for(
                lambda: all(self._acked[topic] >= goal[topic] for topic in self.topics), RESUME_TIMEOUT_S
            )
        assert reached, f"no {more} acknowledgements on {self._behind(goal)} in {RESUME_TIMEOUT_S} s; {self.failures}"

    def _behind(self, goal: dict[str, int]) -> list[str]:
        return [topic for topic in self.topics if self._acked[topic] < goal[topic]]

    def stop(self) -> None:
        """The last bursts are waited for."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self, topic: str, name: str) -> None:
        producer = self._client.create_producer(
            topic,
            producer_name=name,
            batching_enabled=True,
            batching_max_messages=4,
            block_if_queue_full=True,
        )
        first = 0
        while not self._stopping.is_set():
            for seq in range(first, first + BURST):
                text = value_of(topic, name, seq)
                self.note(Send(topic, name, seq, "", text))
                producer.send_async(text.encode(), self._noting(topic, name, seq))
            first += BURST
            try:
                producer.flush()
            except magnetar.PulsarException as error:
                self.failures.append(f"{name}: {error!r}")

    def _noting(self, topic: str, name: str, seq: int) -> Any:
        def note(result: magnetar.Result, message_id: Any) -> None:
            if result != magnetar.Result.Ok:
                self.note(SendUnknown(topic, name, seq))
                self.failures.append(f"{name}: message {seq}: {result!r}")
                return
            self.note(SendOk(topic, name, seq, id_of(message_id)))
            with self._news:
                self._acked[topic] += 1
                self._news.notify_all()

        return note


def check(load: Load, url: str) -> None:
    """Every topic opens again, holds what was acknowledged, and takes and gives a new message."""
    with magnetar.Client(url) as client:
        for topic in load.topics:
            reader, _ = read_to_end(client, topic, load.note)
            client.create_producer(topic).send(b"after all")
            assert reader.read_next(timeout_millis=30_000).data() == b"after all"
    verdict = judge(load.note.records)
    assert not verdict.counts, str(verdict)
