"""Repeats work that bookies or the metadata refuse temporarily (`retry_until_done`), and limits the log lines about it
(`LogThrottle`).

Also in this file: a call that several callers share (`SharedCallsByKey`), and the last answers of the metadata, which
are used while the metadata does not answer (`LastMetadataAnswers`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar

from ...proto.errors import ConnectionLost, MagnetarError, SessionExpired, Unavailable
from ...runtime.clock import Clock

# -------------------------------------------------------------------------------------------------- log_throttle
# Rate-limits the log lines of a loop that retries: a line when the reason changes, and the same one after a while.


SAME_REASON_LOG_INTERVAL_S = 10.0
"""Seconds after which an unchanged reason is logged again."""


class LogThrottle:
    """Limits how often a retrying loop logs the same kind of error. The loop calls `should_log` before it writes a log
    line."""

    __slots__ = ("_at", "_clock", "_reason")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reason: type[Exception] | None = None
        self._at = 0.0

    def should_log(self, error: Exception) -> bool:
        """Returns True if the error should be logged: its class differs from the class of the last logged error, or
        SAME_REASON_LOG_INTERVAL_S seconds have passed since then. If the result is True, the error counts as logged."""
        now = self._clock.monotonic()
        if type(error) is self._reason and now - self._at < SAME_REASON_LOG_INTERVAL_S:
            return False
        self._reason, self._at = type(error), now
        return True


# --------------------------------------------------------------------------------------------------------- retry


T = TypeVar("T")


async def retry_until_done(
    work: Callable[[], Awaitable[T]], clock: Clock, log: logging.Logger, what: str, *,
    ends: Callable[[MagnetarError], bool], pause_s: float,
) -> T:  # fmt: skip
    """Calls the function `work` until it succeeds, with pauses of `pause_s` seconds, and returns its result. Raises the
    first error for which the function `ends` returns True; other errors are logged as warnings that name `what`."""
    throttle = LogThrottle(clock)
    while True:
        try:
            return await work()
        except MagnetarError as error:
            if ends(error):
                raise
            if throttle.should_log(error):
                log.warning("%s: %s", what, error)
        await asyncio.sleep(pause_s)


# --------------------------------------------------------------------------------------------------- shared_runs
# One run of some work, shared by all callers that ask for it while it runs.
#
#     shared = SharedCallsByKey()
#     value = await shared.run(key, work)       calls `work()`, or joins the call for that key
#
# A caller that is cancelled leaves the run to the others, and it goes on to its end. Its result and its error go to the
# callers; when all of them were cancelled they go nowhere. Guarding tests: tests/broker/node/test_failover.py.


K = TypeVar("K", bound=Hashable)


class SharedCallsByKey(Generic[K, T]):
    """Shares calls of an async function by key: callers that ask for the same key at the same time share one call and
    its result."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[T]] = {}

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Calls `work` for `key`, or joins the call for `key` that is in progress. Returns the result of the call, or
        raises its error. When a caller is cancelled, the call goes on."""
        run = self._running.get(key)
        if run is None:
            run = self._running[key] = asyncio.get_running_loop().create_task(work())
            run.add_done_callback(partial(self._remove_run, key))
        return await asyncio.shield(run)

    def _remove_run(self, key: K, run: asyncio.Task[T]) -> None:
        del self._running[key]
        if not run.cancelled():
            run.exception()  # the callers get it

    async def wait_idle(self) -> None:
        """Waits until no call is in progress, including calls that begin while it waits."""
        while self._running:
            await asyncio.wait(list(self._running.values()))


# ---------------------------------------------------------------------------------------------------- last_known
# The last answers of the metadata, for callers that open what exists while the metadata does not answer.
#
#     count = await known.read_or_get_last(topic, lambda: self._read(topic))
#
# The metadata is asked each time. When it does not answer within METADATA_WAIT_S, or says that it cannot, the last
# answer counts: nothing that depends on it can be changed meanwhile by anybody who has no metadata either, and what
# another broker changed is found by the owner of the topic (ownership, fencing). What was never asked has no answer:
# its error is raised as ever. Guard: tests/broker/node/test_session_lost.py.


METADATA_WAIT_S = 1.0
"""Seconds to wait for the metadata: several times what its process needs for an answer under load."""
CACHED_ANSWERS_MAX = 10_000
V = TypeVar("V")


class LastMetadataAnswers(Generic[K, V]):
    """Stores the last answers of the metadata to one kind of query, by key, at most CACHED_ANSWERS_MAX. A stored answer
    is used while the metadata does not answer."""

    def __init__(self) -> None:
        self._answers: dict[K, V] = {}  # in the order of the last answers

    async def read_or_get_last(self, key: K, read: Callable[[], Awaitable[V]]) -> V:
        """Calls the function `read`, which reads from the metadata, stores its answer for the key and returns it. If an
        earlier answer is stored, waits at most METADATA_WAIT_S seconds: if `read` takes longer, it is cancelled, and
        the earlier answer is returned. The earlier answer is also returned if `read` raises Unavailable, ConnectionLost
        or SessionExpired. Raises every other error of `read`, and each of its errors if no answer is stored."""
        if key not in self._answers:
            answer = await read()
        else:
            try:
                async with asyncio.timeout(METADATA_WAIT_S):
                    answer = await read()
            except (TimeoutError, Unavailable, ConnectionLost, SessionExpired):
                if key not in self._answers:
                    raise
                return self._answers[key]
        self.store_answer(key, answer)
        return answer

    def store_answer(self, key: K, answer: V) -> None:
        """Stores `answer` as the last answer for the key. Called by `read_or_get_last`, and when this process has
        changed the object in the metadata. Of more than CACHED_ANSWERS_MAX answers, the oldest tenth is removed."""
        self._answers.pop(key, None)
        self._answers[key] = answer
        if len(self._answers) > CACHED_ANSWERS_MAX:
            # a dictionary forgets its first slowly
            for oldest in list(islice(self._answers, CACHED_ANSWERS_MAX // 10)):
                del self._answers[oldest]

    def discard(self, key: K) -> None:
        """Removes the stored answer for the key. Called when this process has deleted the object."""
        self._answers.pop(key, None)
