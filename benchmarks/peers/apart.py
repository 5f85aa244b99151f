"""A load in a process of its own, so that the clients of one side do not share an interpreter with another side's.

The process makes the load once and keeps it: its connections are open and its code is warm in every turn. What the
load raises comes out of `answer` as Failed, with its traceback.
"""

from __future__ import annotations

import multiprocessing
import statistics
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from .turns import Figures, Load

MADE_TIMEOUT_S = 300.0
"""Of a load with a backlog to store, or a Spark to start."""
TURN_TIMEOUT_S = 300.0
"""Beyond the seconds that are measured."""
LONGER_S = 2.0
"""A producer sends than its consumer is measured."""


class Failed(Exception):
    """The load raised an error, or its process ended."""


def _serve(there: Any, make: Callable[..., Load], arguments: tuple[Any, ...]) -> None:
    load: Any = None
    try:
        load = make(*arguments)
        there.send(({}, None))
        while (asked := there.recv()) is not None:
            there.send((load.turn(*asked), None))
    except EOFError:
        return
    except BaseException:
        there.send(({}, traceback.format_exc()))
    finally:
        if close := getattr(load, "close", None):
            close()


class Apart:
    """Ends with the block, or with the process that made it."""

    def __init__(self, make: Callable[..., Load], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
        self._process.start()
        there.close()
        self._made = False

    def made(self) -> None:
        """Waits until the load is there; Failed."""
        if not self._made:
            self._answer(MADE_TIMEOUT_S)
            self._made = True

    def ask(self, number: int, seconds: float) -> None:
        self.made()
        self._deadline_s = seconds + TURN_TIMEOUT_S
        self._here.send((number, seconds))

    def answer(self) -> Figures:
        return self._answer(self._deadline_s)

    def _answer(self, timeout_s: float) -> Figures:
        if not self._here.poll(timeout_s):
            raise Failed(f"no answer in {timeout_s:.0f} s")
        try:
            figures, failure = self._here.recv()
        except EOFError as error:
            raise Failed(f"its process ended: {self._process.exitcode}") from error
        if failure is not None:
            raise Failed(failure)
        told: Figures = figures
        return told

    def turn(self, number: int, seconds: float) -> Figures:
        self.ask(number, seconds)
        return self.answer()

    def __enter__(self) -> Apart:
        try:
            self.made()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process.is_alive():
            with suppress(OSError):  # it ended just now
                self._here.send(None)
            self._process.join(30)
            self._process.kill()
        self._process.join()
        self._here.close()


class Fleet:
    """Several processes with the same load at once: rates are added up, latencies are the median of theirs."""

    def __init__(self, members: Sequence[Apart]) -> None:
        self._members = members

    def turn(self, number: int, seconds: float) -> Figures:
        for each in self._members:
            each.ask(number, seconds)
        every = [each.answer() for each in self._members]
        return {
            name: sum(one[name] for one in every) if name == "msg_s" else statistics.median(one[name] for one in every)
            for name in every[0]
        }


class Together:
    """A producing load and a consuming one at once; the figures of the consuming one, which ends first."""

    def __init__(
        self,
        producer: Apart,
        consumer: Apart,
        before: Callable[[int], None] = lambda number: None,
        after: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._producer, self._consumer, self._before, self._after = producer, consumer, before, after

    def turn(self, number: int, seconds: float) -> Figures:
        """The producer sends for longer: the consumer warms up after the first message."""
        self._before(number)
        self._consumer.ask(number, seconds)
        self._producer.ask(number, seconds + LONGER_S)
        figures = self._consumer.answer()
        self._producer.answer()
        self._after(number)
        return figures
