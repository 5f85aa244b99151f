"""Several requests to coordinators that came in one RPC: one wait for all of their answers, without a task for each.

    questions = CoordinatorRequests()
    running.start_end(questions.add_question(), txn, EndVerb.COMMIT, …)    each is sent to the core in this turn
    results = await questions.wait_answers(timeout_s)           in the order in which they were added

A Question is the `request` of an intent. Its first answer counts; one without an answer in time gets TimedOut: its
outcome is unknown.
Guard: tests/broker/transaction/test_together.py.
"""

from __future__ import annotations

import asyncio
import contextlib

from ...proto.errors import MagnetarError, TimedOut
from .intents_core import Result


class CoordinatorRequest:
    """One request to a coordinator, together with its answer when there is one."""

    __slots__ = ("_together", "is_answered", "result")

    def __init__(self, together: CoordinatorRequests) -> None:
        self._together = together
        self.is_answered = False
        self.result: Result = None

    def answer(self, result: Result) -> None:
        if not self.is_answered:
            self.is_answered, self.result = True, result
            self._together.on_answered()


class CoordinatorRequests:
    """The requests to coordinators that arrived in one RPC."""

    def __init__(self) -> None:
        self._questions: list[CoordinatorRequest] = []
        self._left = 0
        self._all: asyncio.Future[None] | None = None

    def add_request(self) -> CoordinatorRequest:
        question = CoordinatorRequest(self)
        self._questions.append(question)
        self._left += 1
        return question

    def on_answered(self) -> None:
        self._left -= 1
        if not self._left and self._all is not None and not self._all.done():
            self._all.set_result(None)

    async def wait_answers(self, timeout_s: float) -> list[Result]:
        """Waits for the answers to all requests. Returns the results in the order of the requests; an error is returned
        as a value. A request without an answer after `timeout_s` seconds gets TimedOut."""
        if self._left:
            self._all = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all
        late: MagnetarError = TimedOut(f"the coordinator has no answer within {timeout_s:g} s: ask again")
        return [each.result if each.is_answered else late for each in self._questions]
