"""How long something takes, whatever the machine does meanwhile: of a step of an event loop and of a wait.

A step is judged by the processor time of its thread, without the garbage collector: a collection is no work of the step
it happens to fall into, and in a process that ran thousands of tests one takes 20 ms. A wait is judged by a stopwatch
that does not count what the whole machine stalls.
"""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from magnetar.client.common.errors import Timeout

T = TypeVar("T")


class WorkTimer:
    """Seconds of processor time of this thread, less those of the collector."""

    def __init__(self) -> None:
        self._collecting = self._began = 0.0
        gc.callbacks.append(self._collected)

    def close(self) -> None:
        gc.callbacks.remove(self._collected)

    def seconds(self) -> float:
        return time.thread_time() - self._collecting

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._began


REFERENCE_S = 0.003
"""What `slowness` computes takes this long on the machine that the bounds of the tests are for."""


def slowness() -> float:
    """How many times slower this machine is just now than the one that the bounds are for; 1 at least.

    Processor time grows as well where a machine is throttled or shares its cores, so a bound in seconds times this one
    judges the code alone.
    """
    begun, total = time.thread_time(), 0
    for number in range(100_000):
        total += number & 7
    return max(1.0, (time.thread_time() - begun) / REFERENCE_S)


class Steps:
    """Of the loop's steps since `clear`: the longest, where it was, and the sum. Seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clear()
        timer, honest = WorkTimer(), asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            begun = timer.seconds()
            honest(handle)
            took = timer.seconds() - begun
            self.all += took
            if took > self.longest:
                self.longest, self.where = took, repr(handle)[:200]

        monkeypatch.setattr(asyncio.Handle, "_run", run)
        self.close = timer.close

    def clear(self) -> None:
        self.longest, self.all, self.where = 0.0, 0.0, ""


def measured(method: Callable[..., Any], steps: list[float], timer: WorkTimer) -> Callable[..., Any]:
    """`method`, which appends the seconds of each of its calls to `steps`."""

    def run(*arguments: Any) -> Any:
        begun = timer.seconds()
        try:
            return method(*arguments)
        finally:
            steps.append(timer.seconds() - begun)

    return run


TICK_S, LONGEST_TICK_S = 0.01, 0.05


@contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Gives a function that returns the seconds since the beginning, without stalls of this process: a thread counts
    them in ticks, and a tick counts LONGEST_TICK_S at most, however late it comes."""
    counted, ended = 0.0, threading.Event()

    def count() -> None:
        nonlocal counted
        before = time.monotonic()
        while not ended.wait(TICK_S):
            now = time.monotonic()
            counted += min(now - before, LONGEST_TICK_S)
            before = now

    counting = threading.Thread(target=count, daemon=True)
    counting.start()
    try:
        yield lambda: counted
    finally:
        ended.set()
        counting.join()


async def take_until_quiet(take: Callable[[int], Awaitable[T]], quiet_ms: int) -> list[T]:
    """What `take`, which gets a time-out in milliseconds, gives until nothing comes for `quiet_ms`; a stall of the
    machine does not count as quiet."""
    found: list[T] = []
    with stopwatch() as seconds:
        last = 0.0
        while seconds() - last < quiet_ms / 2000:
            try:
                found.append(await take(quiet_ms))
            except Timeout:
                continue
            last = seconds()
    return found
