"""Requests over a stream that the broker answers by number, and what becomes of them when the stream breaks."""

from __future__ import annotations

import asyncio
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.errors import from_wire


class Requests:
    """Numbers are never used twice, so that a late answer cannot be taken for another's."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._last = 0

    def new(self) -> tuple[int, asyncio.Future[Any]]:
        self._last += 1
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting[self._last] = answer
        return self._last, answer

    def expects(self, request_id: int) -> bool:
        answer = self._waiting.get(request_id)
        return answer is not None and not answer.done()

    def answer(self, request_id: int, error: wire.Error | None, result: object) -> None:
        answer = self._waiting.pop(request_id, None)
        if answer is None or answer.done():
            return
        if error is not None:
            answer.set_exception(from_wire(error))
        else:
            answer.set_result(result)

    def forget(self, request_id: int) -> None:
        self._waiting.pop(request_id, None)

    def fail(self, error: Exception) -> None:
        """All that wait get this error."""
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(error)
