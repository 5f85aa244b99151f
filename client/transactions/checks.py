"""Answers for half messages whose program does not say: `Client.on_check` registers a function of a group.

    @client.on_check(group="orders")
    async def check(half: HalfCheck) -> Decision:
        return Decision.COMMIT if await order_exists(half.check_key) else Decision.UNKNOWN

A watch is connected to the coordinator of its group for as long as its client is open, and is asked over that stream,
AT_ONCE questions at a time. A coroutine function runs in the event loop, another one in a thread of its own. What the
function returns is the answer. A function that raises, returns something else or takes longer than the cluster waits is
no answer: that is told, logged, and not counted, and another program of the group is asked. A thread that hangs is not
ended; it holds one of the AT_ONCE places until it returns.
Guards: tests/client/transactions/test_halves.py.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

from ...proto import wire_pb2 as wire
from ...proto.entry import decode_payload, parse_header, properties_of
from ...proto.errors import ConnectionLost, MagnetarError
from ...proto.transactions import TxnId, coordinator_of
from ...runtime.network import EndOfStream, Stream, rpc
from ...runtime.tasks import Tasks
from ..common.checks import shown
from ..common.guard import ignored, is_cancelled, run
from .halves import Halves

_LOG = logging.getLogger("magnetar.client")

AT_ONCE = 16
CONNECTED_S = 5.0
"""Seconds that a stream lasted which worked: the next one is opened soon after it."""


class Decision(Enum):
    """The answer of a check of a half message. UNKNOWN: it cannot be said yet; too many of them park the half."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


VERBS = {
    Decision.COMMIT: wire.EndHalfRequest.COMMIT, Decision.ROLLBACK: wire.EndHalfRequest.ROLLBACK,
    Decision.UNKNOWN: wire.EndHalfRequest.UNKNOWN,
}  # fmt: skip


class HalfContent(NamedTuple):
    """A message of a half. `data`: as it was encoded by its producer's schema; None: it is encrypted, or a message
    without a value."""

    topic: str
    data: bytes | None
    partition_key: str
    properties: dict[str, str]
    event_timestamp: int  # ms since the epoch; 0: none


class HalfCheck(NamedTuple):
    """A half message that its group is asked about."""

    id: TxnId
    group: str
    check_key: str
    unknown: int  # answers of that kind so far
    age: float  # seconds since it was stored
    messages: tuple[HalfContent, ...]


class CheckWatch:
    """The watch of one group and function, in the event loop of the client."""

    def __init__(self, halves: Halves, group: str, function: Callable[[HalfCheck], Any]) -> None:
        self.group = group
        self._halves = halves
        self._function = function
        self._in_loop = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with a coroutine method
        )
        self._busy = 0  # places that are taken, by threads that hang too
        self._tasks = Tasks()
        self._tasks.spawn(self._run(), f"checks of group {group}")

    async def _run(self) -> None:
        backoff, now = self._halves.backoff(), self._halves.now
        while True:
            begun = now()
            try:
                await self._connected()
            except MagnetarError as error:
                _LOG.info("group %s is connected again: %s", self.group, error)
            except Exception:
                _LOG.exception("group %s is connected again", self.group)
            if now() - begun > CONNECTED_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_s())

    async def _connected(self) -> None:
        coordinators = self._halves.coordinators
        number = coordinator_of(self.group, await coordinators.count())
        stream: Stream[Any, Any] | None = None
        try:
            stream = (await coordinators.channel(number)).stream(rpc("Transactions", "WatchHalves"))
            stream.send_nowait(wire.WatchHalvesItem(group=self.group))
            while True:
                for check in await stream.receive():
                    self._tasks.spawn(self._answer(check), f"check of group {self.group}")
        except EndOfStream as error:
            raise ConnectionLost("the broker ended the stream") from error
        finally:
            coordinators.forget(number)
            if stream is not None:
                stream.cancel()

    async def _answer(self, check: wire.HalfCheck) -> None:
        id_ = TxnId(check.half.most, check.half.least)
        verb, why = await self._ask(check, id_)
        try:
            await self._halves.end(id_, verb, check.check, why)
        except MagnetarError as error:
            _LOG.warning("half %s of group %s: the check's answer does not count: %s", id_, self.group, error)

    async def _ask(
        self, check: wire.HalfCheck, id_: TxnId
    ) -> tuple[wire.EndHalfRequest.Verb, str]:
        """Returns the answer; FAILED and why: there is none."""
        if self._busy >= AT_ONCE:
            return wire.EndHalfRequest.FAILED, f"{AT_ONCE} checks are under way, or hang"
        answer_s = check.answer_ms / 1000
        try:
            half = _half_of(check, id_, self.group)
            async with asyncio.timeout(answer_s):
                found = await (self._call(half) if self._in_loop else self._call_in_thread(half))
            if not isinstance(found, Decision):
                raise TypeError(f"it returned {shown(found)}, which is no Decision")
        except TimeoutError:
            why = f"no answer within {answer_s:g} s"
            _LOG.error("half %s: the check of group %s has %s", id_, self.group, why)
            return wire.EndHalfRequest.FAILED, why
        except BaseException as error:
            if is_cancelled(error):
                raise
            _LOG.exception("half %s: the check of group %s failed", id_, self.group)
            return wire.EndHalfRequest.FAILED, f"{type(error).__name__}: {error}"[:300]
        return VERBS[found], ""

    async def _call(self, half: HalfCheck) -> Any:
        self._busy += 1
        try:
            return await self._function(half)
        finally:
            self._busy -= 1

    async def _call_in_thread(self, half: HalfCheck) -> Any:
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            self._busy -= 1
            if answered.done():
                return
            if error is None:
                answered.set_result(result)
            else:
                answered.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))

        def work() -> None:
            result, failed = None, None
            try:
                result = self._function(half)
            except BaseException as error:  # a SystemExit too is no answer
                failed = error
            try:
                loop.call_soon_threadsafe(run, lambda: tell(result, failed), ignored)
            except RuntimeError:
                _LOG.info("half %s: a check was answered after its client was closed", half.id)

        self._busy += 1
        threading.Thread(target=work, name=f"check of {half.id}", daemon=True).start()
        return await answered

    def stop(self) -> None:
        self._tasks.cancel()

    async def close(self) -> None:
        await self._tasks.close()


def _half_of(check: wire.HalfCheck, id_: TxnId, group: str) -> HalfCheck:
    return HalfCheck(
        id_, group, check.check_key, check.unknown, check.age_ms / 1000, tuple(map(_content, check.messages))
    )


def _content(message: wire.HalfMessage) -> HalfContent:
    header = parse_header(message.entry)
    metadata = header.metadata
    is_hidden = metadata.encryption_param or metadata.null_value
    data = None if is_hidden else decode_payload(header, message.entry)
    properties = properties_of(metadata)
    return HalfContent(message.topic, data, metadata.partition_key, properties, metadata.event_time)
