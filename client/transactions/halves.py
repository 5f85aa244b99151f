"""Half messages, for asyncio: stored and not published, until the program that prepared them says commit.

    half = await producer.prepare(b"…", group="orders", check_key="17")
    await half.commit()                 or rollback(); any program of the role may, by its id: Halves.end

**An id first.** The id of a half is one of a block that its coordinator gave, so a request that is repeated, or comes
late, is the same half.
**Cancelled, or unanswered.** A program that waited for `prepare` was told nothing, so nothing of its own can depend on
the half: it is rolled back in the background. A `commit` or `rollback` goes on when its caller is cancelled, and the
caller is cancelled when the outcome is there.
The coordinator of a group is always the same; what answers for the group is client/transactions/checks.py.
Guards: tests/client/transactions/test_halves.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError, TransactionAborted
from ...proto.names import TopicName
from ...proto.transactions import HALF_BYTES_MAX, HALF_MESSAGES_MAX, TxnId, TxnState, coordinator_of
from ...runtime.unbroken import unbroken
from ..common.checks import Check, WrongValue, check
from ..common.errors import AlreadyClosed, MessageTooBig, OutcomeUnknown, translate
from ..connect.connections import Connections
from ..core.backoff import Backoff
from ..core.transaction import TransactionState
from ..produce.half import Half
from .leased_ids import LeasedIds

if TYPE_CHECKING:
    from .coordinators import Coordinators
    from .transactions import Transactions

T = TypeVar("T")
_LOG = logging.getLogger("magnetar.client")

NAME_MAX = 512
IDS_TRIED = 3
"""Ids that are tried in turn, when they are void: their coordinator was lost since it gave them."""
TABLE = {
    "group": Check(f"text of 1 to {NAME_MAX} characters", (str,), lambda text: 0 < len(text) <= NAME_MAX),
    "check_key": Check(f"text of at most {NAME_MAX} characters", (str,), lambda text: len(text) <= NAME_MAX),
    "check_after": Check("a number of seconds, 0 or more", (int, float), lambda value: 0 <= value <= 1e8),
}


class Watch(Protocol):
    """The watch that asks a program about its half messages (client/transactions/checks.py)."""

    def stop(self) -> None: ...
    async def close(self) -> None: ...


class Halves:
    """The half messages of one client."""

    def __init__(self, home: Transactions) -> None:
        self._home = home
        self._ids: dict[int, LeasedIds] = {}
        self._watches: dict[str, Watch] = {}

    @classmethod
    def of(cls, connections: Connections) -> Halves:
        """Returns the halves of a client, made when first used."""
        from .transactions import Transactions

        found = connections.halves
        if found is None:
            found = connections.halves = cls(Transactions.of(connections))
        assert isinstance(found, cls), "a client has its halves"
        return found

    @property
    def coordinators(self) -> Coordinators:
        return self._home.coordinators

    @property
    def now(self) -> Callable[[], float]:
        return self._home.now

    def backoff(self) -> Backoff:
        return self._home.connections.backoff()

    # ------------------------------------------------------------------------------ checks
    def watch(self, group: str, watch: Callable[[Halves], Watch]) -> None:
        """Watches a group. InvalidConfiguration: it has a function already."""
        if group in self._watches:
            raise WrongValue(f"this client answers for group {group!r} already: a group has one function")
        self._watches[group] = watch(self)

    def stop(self) -> None:
        for each in self._watches.values():
            each.stop()
        self._watches.clear()

    async def close(self) -> None:
        """Closes the halves: nothing is asked of this client any more."""
        watches, self._watches = self._watches, {}
        await asyncio.gather(*[each.close() for each in watches.values()])

    # ------------------------------------------------------------------------------ prepare
    async def prepare(
        self, messages: Sequence[tuple[TopicName, bytes]], group: str, check_key: str, check_after: float
    ) -> Half:
        check(TABLE, {"group": group, "check_key": check_key, "check_after": check_after})
        if not 1 <= len(messages) <= HALF_MESSAGES_MAX:
            raise WrongValue(f"a half has 1 to {HALF_MESSAGES_MAX} messages, not {len(messages)}")
        size = sum(len(topic.full) + len(entry) for topic, entry in messages)
        if size > HALF_BYTES_MAX:
            raise MessageTooBig(
                f"a half of {size} bytes; the limit is {HALF_BYTES_MAX}: store the content elsewhere, and send where",
                size=size,
            )
        request = wire.HalfRequest(group=group, check_key=check_key, check_after_ms=round(check_after * 1000))
        for topic, entry in messages:
            request.messages.add(topic=topic.full, entry=entry)
        storing = self._spawn(self._store(request), f"prepare of a half of {group}")
        try:
            return _result(await asyncio.shield(storing))
        except asyncio.CancelledError:
            storing.add_done_callback(lambda _: self._undo(request))
            raise

    async def _store(self, request: wire.HalfRequest) -> Half:
        """Stores a half. Errors are translated; what may be stored is rolled back."""
        try:
            number = coordinator_of(request.group, await self.coordinators.count())
            for left in reversed(range(IDS_TRIED)):
                id_ = await self._id(number)
                request.half.most, request.half.least = id_
                try:
                    await self.coordinators.ask(number, "PrepareHalf", request)
                except MagnetarError as error:
                    self._ids.pop(number, None)
                    if not isinstance(error, TransactionAborted) or not left:
                        raise
                else:
                    return Half(self, id_, request.group, request.check_key)
        except MagnetarError as error:
            if not error.definite and request.HasField("half"):
                self._undo(request)
            raise translate(error) from error
        raise AssertionError("each try returns or raises")

    async def _id(self, number: int) -> TxnId:
        ids, now = self._ids.setdefault(number, LeasedIds()), self._home.now
        while (found := ids.take(now())) is None:
            asked_at = now()
            reply: wire.BeginReply = await self.coordinators.ask(
                number, "Begin", wire.BeginRequest(coordinator=number, count=ids.wanted)
            )
            ids.leased(TxnId(reply.first.most, reply.first.least), reply.count, reply.lease_ms / 1000, asked_at)
        return found

    def _undo(self, request: wire.HalfRequest) -> None:
        """Rolls a half back of which its program was not told."""
        id_ = TxnId(request.half.most, request.half.least)
        with suppress(AlreadyClosed):  # its group is asked
            self._spawn(self._roll_back_quietly(id_), f"rollback of half {id_}")

    async def _roll_back_quietly(self, id_: TxnId) -> None:
        try:
            await self.end(id_, wire.EndHalfRequest.ROLLBACK)
        except MagnetarError as error:
            _LOG.info("half %s, which was not told to be stored, is not rolled back: %s", id_, error)

    # ------------------------------------------------------------------------------ decisions
    async def commit(self, id_: TxnId) -> TransactionState:
        return await self._outlived(self.end(id_, wire.EndHalfRequest.COMMIT))

    async def rollback(self, id_: TxnId) -> TransactionState:
        return await self._outlived(self.end(id_, wire.EndHalfRequest.ROLLBACK))

    async def end(
        self, id_: TxnId, verb: wire.EndHalfRequest.Verb, number: int = 0, why: str = ""
    ) -> TransactionState:
        """Ends a half. `number`: of the question that is answered."""
        request = wire.EndHalfRequest(verb=verb, check=number, why=why)
        request.half.most, request.half.least = id_
        try:
            reply: wire.HalfReply = await self.coordinators.ask(id_.most, "EndHalf", request)
        except MagnetarError as error:
            if error.definite:
                raise translate(error) from error
            raise OutcomeUnknown(
                f"half {id_}: its end got no answer ({error.message}); repeat it, or its group is asked", txn=id_
            ) from error
        return TransactionState[TxnState(reply.state).name]

    async def _outlived(self, work: Coroutine[Any, Any, TransactionState]) -> TransactionState:
        """Returns the result of `work`, which goes on if the caller is cancelled. OutcomeUnknown: the client is closed.
        """
        task = self._spawn(work, "end of a half")
        try:
            return _result(await unbroken(task))
        except asyncio.CancelledError:
            if task.cancelled():
                raise OutcomeUnknown("the client was closed while a half was ended: its group is asked") from None
            raise

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T | MagnetarError]:
        """Starts a task. Raises AlreadyClosed."""
        try:
            return self._home.spawn(_outcome(work), name)
        except RuntimeError as error:
            work.close()
            raise AlreadyClosed("the client is closed") from error


async def _outcome(work: Coroutine[Any, Any, T]) -> T | MagnetarError:
    """Returns the result of `work`, or its error, which is its caller's, and none of the task's."""
    try:
        return await work
    except MagnetarError as error:
        return error


def _result(found: T | MagnetarError) -> T:
    if isinstance(found, MagnetarError):
        raise found
    return found
