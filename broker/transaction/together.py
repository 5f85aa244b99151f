"""Questions to coordinators that came in one request: one wait for all of their answers, and no task for any.

    together = Together()
    running.ask_end(together.one(), txn, Verb.COMMIT, …)      each is asked in this turn
    results = await together.answered(timeout_s)               in the order in which they were asked

A question is what the core calls a request. Its first answer counts; one without an answer in time is TimedOut:
unknown.
Guard: tests/broker/transaction/test_together.py.
"""

from __future__ import annotations

import asyncio
import contextlib

from ...proto.errors import MagnetarError, TimedOut
from .intents_core import Result


class Question:
    """A question, and its answer when there is one."""

    __slots__ = ("_together", "is_answered", "result")

    def __init__(self, together: Together) -> None:
        self._together = together
        self.is_answered = False
        self.result: Result = None

    def answer(self, result: Result) -> None:
        if not self.is_answered:
            self.is_answered, self.result = True, result
            self._together.answered_one()


class Together:
    """The questions of one request."""

    def __init__(self) -> None:
        self._questions: list[Question] = []
        self._left = 0
        self._all: asyncio.Future[None] | None = None

    def one(self) -> Question:
        question = Question(self)
        self._questions.append(question)
        self._left += 1
        return question

    def answered_one(self) -> None:
        self._left -= 1
        if not self._left and self._all is not None and not self._all.done():
            self._all.set_result(None)

    async def wait_answers(self, timeout_s: float) -> list[Result]:
        """Waits for all answers; returns each one's result, an error among them."""
        if self._left:
            self._all = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all
        late: MagnetarError = TimedOut(f"the coordinator has no answer within {timeout_s:g} s: ask again")
        return [each.result if each.is_answered else late for each in self._questions]
