"""Runs that several callers wait for: the join of a transaction, or its end, and the first of them starts it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from ...proto.errors import InternalError, MagnetarError, NotOwner
from ...proto.names import TopicName
from ...runtime.tasks import Tasks

_LOG = logging.getLogger("magnetar.broker.topic.transactions")

Key = TypeVar("Key")


class TransactionRuns:
    """The runs of one topic. After its end none begins: each caller gets NotOwner."""

    __slots__ = ("_loop", "_topic", "is_over", "tasks")

    def __init__(self, topic: TopicName, *, is_over: bool) -> None:
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self.is_over = is_over
        self.tasks = Tasks()

    def begin(
        self, runs: dict[Key, asyncio.Future[None]], txns: Sequence[Key],
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> asyncio.Future[None]:  # fmt: skip
        """Starts a run of `work`; until it is over, each of `txns` has it."""
        if self.is_over:
            return self.refused()
        future: asyncio.Future[None] = self._loop.create_future()
        runs.update(dict.fromkeys(txns, future))
        self.tasks.spawn(self._run(runs, txns, future, work), "transaction of a topic")
        return future

    async def _run(
        self, runs: dict[Key, asyncio.Future[None]], txns: Sequence[Key], future: asyncio.Future[None],
        work: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:  # fmt: skip
        error: MagnetarError | None = None
        try:
            await work()
        except MagnetarError as failure:
            error = failure
        except Exception as failure:  # a fault of ours must not leave a caller waiting
            _LOG.exception("%s: transactions %s", self._topic, txns)
            error = InternalError(f"transaction {txns[0]} of topic {self._topic}: {failure!r}")
        finally:
            for txn in txns:
                if runs.get(txn) is future:
                    del runs[txn]
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # who waits gets it

    def refused(self) -> asyncio.Future[None]:
        refused: asyncio.Future[None] = self._loop.create_future()
        refused.set_exception(self.not_here())
        refused.exception()
        return refused

    def not_here(self) -> MagnetarError:
        return NotOwner(f"topic {self._topic} is not served here any more; look it up again")


def error_of(done: asyncio.Future[None]) -> MagnetarError | None:
    error = done.exception()
    assert error is None or isinstance(error, MagnetarError), "a run raises typed errors"
    return error
