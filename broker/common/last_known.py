"""The last answers of the metadata, for callers that open what exists while the metadata does not answer.

    count = await known.get(topic, lambda: self._read(topic))

The metadata is asked each time. When it does not answer within PATIENCE_S, or says that it cannot, the last answer
counts: nothing that depends on it can be changed meanwhile by anybody who has no metadata either, and what another
broker changed is found by the owner of the topic (ownership, fencing). What was never asked has no answer: its error is
raised as ever. Guard: tests/broker/node/test_session_lost.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from itertools import islice
from typing import Generic, TypeVar

from ...proto.errors import ConnectionLost, SessionExpired, Unavailable

PATIENCE_S = 1.0
"""Seconds to wait for the metadata: several times what its process needs for an answer under load."""
ANSWERS_MAX = 10_000

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LastKnown(Generic[K, V]):
    """The last answers of the metadata to one question, by key."""

    def __init__(self) -> None:
        self._answers: dict[K, V] = {}  # in the order of the last answers

    async def get(self, key: K, read: Callable[[], Awaitable[V]]) -> V:
        """Returns the answer of `read`, or the last one. `read` may be cancelled when there is an earlier answer."""
        if key not in self._answers:
            answer = await read()
        else:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    answer = await read()
            except (TimeoutError, Unavailable, ConnectionLost, SessionExpired):
                if key not in self._answers:
                    raise
                return self._answers[key]
        self.note(key, answer)
        return answer

    def note(self, key: K, answer: V) -> None:
        """Notes the answer that holds from now on, by a change that was made here."""
        self._answers.pop(key, None)
        self._answers[key] = answer
        if len(self._answers) > ANSWERS_MAX:
            for oldest in list(islice(self._answers, ANSWERS_MAX // 10)):  # a dictionary forgets its first slowly
                del self._answers[oldest]

    def forget(self, key: K) -> None:
        """Forgets the answer: its object is deleted here."""
        self._answers.pop(key, None)
