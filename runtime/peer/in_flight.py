"""The requests of one peer: those that have no answer yet, each with its deadline (`InFlight`), and the queue in front
of the connection (`SendQueue`).

One alarm for all: it rings at the earliest deadline, fails the requests that are due, and is set to the earliest
deadline that is left. With equal time-outs the table is read once per time-out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from ...proto.errors import MagnetarError, TimedOut
from ..alarm import Alarm
from ..clock import Clock
from ..files import Buffer
from ..network import COALESCE_BYTES, AnswerListener, Endpoint, Reply


class FutureAnswerListener:
    """An `AnswerListener` that sets the result of a future. A future that is done already (cancelled) stays as it
    is."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Reply] = loop.create_future()

    def on_answered(self, head: bytes, frames: Sequence[Buffer]) -> None:
        if not self.future.done():
            self.future.set_result(Reply(head, frames))

    def on_failed(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class InFlight:
    """The requests of one peer that are in flight. Must be made inside a running loop. `late` counts answers to
    requests that had an outcome already.
    """

    def __init__(self, clock: Clock, endpoint: Endpoint) -> None:
        self._now = clock.monotonic
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, tuple[AnswerListener, float]] = {}
        self._alarm = Alarm(clock, self._expire)
        self._last = 0
        self.late = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, asker: AnswerListener, timeout_s: float) -> int:
        """Adds a request; returns its id."""
        self._last = id_ = self._last + 1
        deadline = self._now() + timeout_s
        self._waiting[id_] = (asker, deadline)
        if deadline < self._alarm.at:
            self._alarm.set_alarm_if_earlier(deadline)
        return id_

    def answer(self, id_: int, head: bytes, frames: Sequence[Buffer]) -> None:
        entry = self._waiting.pop(id_, None)
        if entry is None:
            self.late += 1
            return
        try:
            entry[0].on_answered(head, frames)
        except Exception as error:  # a fault of ours: the requests beside it are answered all the same
            self._broke(error)

    def fail(self, id_: int, error: MagnetarError) -> None:
        entry = self._waiting.pop(id_, None)
        if entry is not None:
            self._fail(entry[0], error)

    def fail_all(self, error: MagnetarError) -> None:
        """Fails all requests, each with a copy of the error, because their owners raise it."""
        waiting, self._waiting = self._waiting, {}
        for asker, _ in waiting.values():
            self._fail(asker, type(error)(error.message, **error.fields))

    def _fail(self, asker: AnswerListener, error: MagnetarError) -> None:
        try:
            asker.on_failed(error)
        except Exception as fault:
            self._broke(fault)

    def _broke(self, error: Exception) -> None:
        text = f"who asked {self._endpoint} failed with the answer"
        self._loop.call_exception_handler({"message": text, "exception": error})

    def close(self) -> None:
        self._alarm.cancel()

    def _expire(self) -> None:
        now = self._now()
        for id_ in [id_ for id_, (_, deadline) in self._waiting.items() if deadline <= now]:
            self.fail(id_, TimedOut(f"no answer from {self._endpoint} in time", endpoint=self._endpoint))
        if self._waiting:
            self._alarm.set_alarm_if_earlier(min(deadline for _, deadline in self._waiting.values()))


# -------------------------------------------------------------------------------------------------------- outbox
# The queue of one peer connection: bounded in bytes, sent in multiparts of about COALESCE_BYTES.


QUEUE_BYTES_MAX = 64 << 20
"""Bound of the queue of one connection: a second of 512 Mbit/s; more would only be late."""

ITEM_BYTES = 64
"""Cost of an item besides its content, so that the bound also holds for empty ones."""

Queued = tuple[int, bytes, Sequence[Buffer]]
"""(id, head, frames) of a request or a reply."""


def message_bytes(head: bytes, frames: Sequence[Buffer]) -> int:
    size = ITEM_BYTES + len(head)
    for frame in frames:
        size += len(frame)
    return size


class SendQueue:
    """The queue of what is sent on one connection; decides how much the next multipart message contains."""

    __slots__ = ("bytes", "items")

    def __init__(self) -> None:
        self.items: deque[tuple[int, Queued]] = deque()
        self.bytes = 0

    def add(self, size: int, item: Queued) -> None:
        self.items.append((size, item))
        self.bytes += size

    def is_full_for(self, size: int) -> bool:
        """Returns whether `size` more bytes would exceed the bound of the queue. An empty queue accepts an item of any
        size.
        """
        return bool(self.items) and self.bytes + size > QUEUE_BYTES_MAX

    def next_batch(self) -> tuple[int, list[Queued]]:
        """Returns (bytes, items) of the next multipart message; they stay in the queue until `remove_sent`."""
        size = 0
        batch: list[Queued] = []
        for item_bytes, item in self.items:
            if batch and size + item_bytes > COALESCE_BYTES:
                break
            batch.append(item)
            size += item_bytes
        return size, batch

    def remove_sent(self, size: int, count: int) -> None:
        self.bytes -= size
        if count == len(self.items):
            self.items.clear()
        else:
            for _ in range(count):
                self.items.popleft()

    def clear(self) -> None:
        self.items.clear()
        self.bytes = 0
