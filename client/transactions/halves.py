"""Half messages, for asyncio: messages that are stored but not published until the program that prepared them commits
them.

    half = await producer.prepare(b"…", group="orders", check_key="17")
    await half.commit()                 or rollback(); also by another program, by the id: Client.commit_half

**An id first.** The client takes the id of a half message from a block of ids that the coordinator gave it in advance.
A request that is repeated, or arrives late, therefore concerns the same half message.
**Cancelled, or unanswered.** If `prepare` is cancelled or gets no answer, the program does not know about the half
message, and nothing can depend on it: it is rolled back in the background. A `commit` or `rollback` continues when its
caller is cancelled, and the cancellation takes effect when the outcome is known. A group always has the same
coordinator; a `HalfCheckWatch` answers the checks of a group.
Guards: tests/client/transactions/test_halves.py."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ...proto import wire_pb2 as wire
from ...proto.entry import decode_payload, decode_properties, parse_header
from ...proto.errors import ConnectionLost, MagnetarError, TransactionAborted
from ...proto.names import TopicName
from ...proto.states import HALF_BYTES_MAX, HALF_MESSAGES_MAX, TxnId, TxnState, coordinator_of
from ...runtime.network import EndOfStream, Stream, find_rpc
from ...runtime.tasks import Tasks, run_to_end
from ..common.checks import ParameterCheck, WrongValue, check_parameters, shorten_value
from ..common.errors import AlreadyClosed, MessageTooBig, OutcomeUnknown, translate_error
from ..common.loggers import ignore_error, is_cancelled, run_logging_errors
from ..connect.connections import Connections
from ..core.failover import Backoff
from ..core.transaction import TransactionState
from ..produce.producer import Half
from .coordinators import LeasedTransactionIds

if TYPE_CHECKING:
    from .coordinators import CoordinatorClient
    from .transaction import Transactions

T = TypeVar("T")
_LOG = logging.getLogger("magnetar.client")

NAME_MAX = 512
ID_ATTEMPTS_MAX = 3
"""Most ids that `prepare` tries, one after the other, if ids are void because their coordinator lost its state
since."""
HALF_CHECKS = {
    "group": ParameterCheck(f"text of 1 to {NAME_MAX} characters", (str,), lambda text: 0 < len(text) <= NAME_MAX),
    "check_key": ParameterCheck(f"text of at most {NAME_MAX} characters", (str,), lambda text: len(text) <= NAME_MAX),
    "check_after": ParameterCheck("a number of seconds, 0 or more", (int, float), lambda value: 0 <= value <= 1e8),
}


class HalfCheckWatchPort(Protocol):
    """The interface of a HalfCheckWatch that `ClientHalfMessages` uses. `stop` ends the watch at once, without waiting;
    `close` waits until its tasks have ended."""

    def stop(self) -> None: ...
    async def close(self) -> None: ...


class ClientHalfMessages:
    """Prepares, commits and rolls back the half messages of one client, and runs the client's HalfCheckWatches."""

    def __init__(self, home: Transactions) -> None:
        self._home = home
        self._ids: dict[int, LeasedTransactionIds] = {}
        self._watches: dict[str, HalfCheckWatchPort] = {}

    @classmethod
    def for_client(cls, connections: Connections) -> ClientHalfMessages:
        """Returns the ClientHalfMessages of the client that has these connections; makes it at the first use."""
        from .transaction import Transactions

        found = connections.halves
        if found is None:
            found = connections.halves = cls(Transactions.for_client(connections))
        assert isinstance(found, cls), "a client has its halves"
        return found

    @property
    def coordinators(self) -> CoordinatorClient:
        return self._home.coordinators

    @property
    def now(self) -> Callable[[], float]:
        return self._home.now

    def backoff(self) -> Backoff:
        """Returns a new Backoff with the client's settings."""
        return self._home.connections.backoff()

    # ------------------------------------------------------------------------------ checks
    def watch_group(self, group: str, watch: Callable[[ClientHalfMessages], HalfCheckWatchPort]) -> None:
        """Starts the watch of a group: calls `watch(self)`, which returns it. Raises InvalidConfiguration if this
        client has a watch of the group already."""
        if group in self._watches:
            raise WrongValue(f"this client answers for group {group!r} already: a group has one function")
        self._watches[group] = watch(self)

    def stop(self) -> None:
        """Ends all watches at once, without waiting: this client is not asked about half messages any more."""
        for each in self._watches.values():
            each.stop()
        self._watches.clear()

    async def close(self) -> None:
        """Ends all watches, and waits until their tasks have ended: this client is not asked about half messages any
        more."""
        watches, self._watches = self._watches, {}
        await asyncio.gather(*[each.close() for each in watches.values()])

    # ------------------------------------------------------------------------------ prepare
    async def prepare(
        self, messages: Sequence[tuple[TopicName, bytes]], group: str, check_key: str, check_after: float
    ) -> Half:
        """Stores a half message at the coordinator of its group, waits until it is durable, and returns it. `messages`:
        the topic and the encoded entry of each message, 1 to HALF_MESSAGES_MAX. `check_after`: seconds after which the
        group may be asked for a decision (0: the cluster's default). If this is cancelled, or gets no answer in time, a
        half message that was stored is rolled back. Raises InvalidConfiguration for a wrong value, MessageTooBig above
        HALF_BYTES_MAX, AlreadyClosed after the close of the client, and the error of the coordinator as an exception of
        the SDK: Timeout or ConnectError if there is no answer in time, ProducerBlockedQuotaExceededError if the group
        has too many undecided half messages."""
        check_parameters(HALF_CHECKS, {"group": group, "check_key": check_key, "check_after": check_after})
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
        """Stores a half message. Raises translated errors; a half that may be stored in spite of the error is rolled
        back."""
        try:
            number = coordinator_of(request.group, await self.coordinators.count_coordinators())
            for left in reversed(range(ID_ATTEMPTS_MAX)):
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
            raise translate_error(error) from error
        raise AssertionError("each try returns or raises")

    async def _id(self, number: int) -> TxnId:
        ids, now = self._ids.setdefault(number, LeasedTransactionIds()), self._home.now
        while (found := ids.take_leased_id(now())) is None:
            asked_at = now()
            reply: wire.BeginReply = await self.coordinators.ask(
                number, "Begin", wire.BeginRequest(coordinator=number, count=ids.wanted)
            )
            ids.add_lease(TxnId(reply.first.most, reply.first.least), reply.count, reply.lease_ms / 1000, asked_at)
        return found

    def _undo(self, request: wire.HalfRequest) -> None:
        """Rolls back, in the background, a half message whose id its program never got."""
        id_ = TxnId(request.half.most, request.half.least)
        with suppress(AlreadyClosed):  # its group is asked
            self._spawn(self._roll_back_quietly(id_), f"rollback of half {id_}")

    async def _roll_back_quietly(self, id_: TxnId) -> None:
        try:
            await self.end_half(id_, wire.EndHalfRequest.ROLLBACK)
        except MagnetarError as error:
            _LOG.info("half %s, which was not told to be stored, is not rolled back: %s", id_, error)

    # ------------------------------------------------------------------------------ decisions
    async def commit(self, id_: TxnId) -> TransactionState:
        """Commits a half message, as `Half.commit` does, with its errors, and returns its state. Raises AlreadyClosed
        after the close of the client. Goes on if the caller is cancelled; the cancellation takes effect when the
        outcome is known."""
        return await self._outlived(self.end_half(id_, wire.EndHalfRequest.COMMIT))

    async def rollback(self, id_: TxnId) -> TransactionState:
        """Rolls back a half message, as `Half.rollback` does, with its errors, and returns its state. Raises
        AlreadyClosed after the close of the client. Goes on if the caller is cancelled; the cancellation takes effect
        when the outcome is known."""
        return await self._outlived(self.end_half(id_, wire.EndHalfRequest.ROLLBACK))

    async def end_half(
        self, id_: TxnId, verb: wire.EndHalfRequest.Verb, number: int = 0, why: str = ""
    ) -> TransactionState:
        """Asks the coordinator to commit or roll back a half message (`verb`), and returns its state. `number`: the
        number of the check that this decision answers; 0: it answers no check. `why`: the reason, which the coordinator
        records. Raises the coordinator's error, or OutcomeUnknown if there is no answer in time."""
        request = wire.EndHalfRequest(verb=verb, check=number, why=why)
        request.half.most, request.half.least = id_
        try:
            reply: wire.HalfReply = await self.coordinators.ask(id_.most, "EndHalf", request)
        except MagnetarError as error:
            if error.definite:
                raise translate_error(error) from error
            raise OutcomeUnknown(
                f"half {id_}: its end got no answer ({error.message}); repeat it, or its group is asked", txn=id_
            ) from error
        return TransactionState[TxnState(reply.state).name]

    async def _outlived(self, work: Coroutine[Any, Any, TransactionState]) -> TransactionState:
        """Returns the result of `work`, which goes on even if the caller is cancelled. Raises OutcomeUnknown if the
        client is closed in the meantime."""
        task = self._spawn(work, "end of a half")
        try:
            return _result(await run_to_end(task))
        except asyncio.CancelledError:
            if task.cancelled():
                raise OutcomeUnknown("the client was closed while a half was ended: its group is asked") from None
            raise

    def _spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T | MagnetarError]:
        """Starts a task. Raises AlreadyClosed if the client is closed."""
        try:
            return self._home.spawn(_outcome(work), name)
        except RuntimeError as error:
            work.close()
            raise AlreadyClosed("the client is closed") from error


async def _outcome(work: Coroutine[Any, Any, T]) -> T | MagnetarError:
    """Returns the result of `work`, or its error, so that the caller and not the task raises it."""
    try:
        return await work
    except MagnetarError as error:
        return error


def _result(found: T | MagnetarError) -> T:
    if isinstance(found, MagnetarError):
        raise found
    return found


# -------------------------------------------------------------------------------------------------------- checks
# Answers for half messages whose program does not say: `Client.on_check` registers a function of a group.
#
#     @client.on_check(group="orders")
#     async def check(half: HalfCheck) -> Decision:
#         return Decision.COMMIT if await order_exists(half.check_key) else Decision.UNKNOWN
#
# A watch is connected to the coordinator of its group for as long as its client is open, and is asked over that stream,
# CHECKS_AT_ONCE questions at a time. A coroutine function runs in the event loop, another one in a thread of its own.
# What the function returns is the answer. A function that raises, returns something else or takes longer than the
# cluster waits is no answer: that is told, logged, and not counted, and another program of the group is asked. A thread
# that hangs is not ended; it holds a place until it returns. Guards: tests/client/transactions/test_halves.py.


CHECKS_AT_ONCE = 16
STREAM_STABLE_S = 5.0
"""A stream that lasted this many seconds has worked: the next stream is opened soon after it, without a long
back-off."""


class Decision(Enum):
    """The answers that a program can give to the check of a half message. UNKNOWN: the program has not decided yet; too
    many of these answers park the half message, and then an operator must decide."""

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


END_VERBS = {
    Decision.COMMIT: wire.EndHalfRequest.COMMIT, Decision.ROLLBACK: wire.EndHalfRequest.ROLLBACK,
    Decision.UNKNOWN: wire.EndHalfRequest.UNKNOWN,
}  # fmt: skip


class HalfContent(NamedTuple):
    """One message of a half message. `topic`: the full name of its topic. `data`: the payload as the producer's schema
    encoded it; None: the payload is encrypted, or the message has no value. `partition_key`: empty if it has no key."""

    topic: str
    data: bytes | None
    partition_key: str
    properties: dict[str, str]
    event_timestamp: int  # ms since the epoch; 0: none


class HalfCheck(NamedTuple):
    """A check: the coordinator asks a program of the group whether an undecided half message must be committed or
    rolled back. `check_key`: the text that the program gave to `prepare`. `unknown`: how often a program answered
    UNKNOWN. `age`: seconds since the half message was stored. `messages`: the messages of the half message."""

    id: TxnId
    group: str
    check_key: str
    unknown: int  # answers of that kind so far
    age: float  # seconds since it was stored
    messages: tuple[HalfContent, ...]


class HalfCheckWatch:
    """Receives the checks of half messages of one group, and answers each with the result of the program's function.
    Starts when it is made, and connects again after each failure until it is closed. Runs in the client's event
    loop."""

    def __init__(self, halves: ClientHalfMessages, group: str, function: Callable[[HalfCheck], Any]) -> None:
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
            if now() - begun > STREAM_STABLE_S:
                backoff.reset()
            await asyncio.sleep(backoff.next_delay_s())

    async def _connected(self) -> None:
        coordinators = self._halves.coordinators
        number = coordinator_of(self.group, await coordinators.count_coordinators())
        stream: Stream[Any, Any] | None = None
        try:
            stream = (await coordinators.find_coordinator_channel(number)).stream(
                find_rpc("Transactions", "WatchHalves")
            )
            stream.send_nowait(wire.WatchHalvesItem(group=self.group))
            while True:
                for check in await stream.receive():
                    self._tasks.spawn(self._answer(check), f"check of group {self.group}")
        except EndOfStream as error:
            raise ConnectionLost("the broker ended the stream") from error
        finally:
            coordinators.discard(number)
            if stream is not None:
                stream.cancel()

    async def _answer(self, check: wire.HalfCheck) -> None:
        id_ = TxnId(check.half.most, check.half.least)
        verb, why = await self._ask(check, id_)
        try:
            await self._halves.end_half(id_, verb, check.check, why)
        except MagnetarError as error:
            _LOG.warning("half %s of group %s: the check's answer does not count: %s", id_, self.group, error)

    async def _ask(
        self, check: wire.HalfCheck, id_: TxnId
    ) -> tuple[wire.EndHalfRequest.Verb, str]:
        """Returns the function's answer, or FAILED and the reason why there is none."""
        if self._busy >= CHECKS_AT_ONCE:
            return wire.EndHalfRequest.FAILED, f"{CHECKS_AT_ONCE} checks are under way, or hang"
        answer_s = check.answer_ms / 1000
        try:
            half = _half_of(check, id_, self.group)
            async with asyncio.timeout(answer_s):
                found = await (self._call(half) if self._in_loop else self._call_in_thread(half))
            if not isinstance(found, Decision):
                raise TypeError(f"it returned {shorten_value(found)}, which is no Decision")
        except TimeoutError:
            why = f"no answer within {answer_s:g} s"
            _LOG.error("half %s: the check of group %s has %s", id_, self.group, why)
            return wire.EndHalfRequest.FAILED, why
        except BaseException as error:
            if is_cancelled(error):
                raise
            _LOG.exception("half %s: the check of group %s failed", id_, self.group)
            return wire.EndHalfRequest.FAILED, f"{type(error).__name__}: {error}"[:300]
        return END_VERBS[found], ""

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
                loop.call_soon_threadsafe(run_logging_errors, lambda: tell(result, failed), ignore_error)
            except RuntimeError:
                _LOG.info("half %s: a check was answered after its client was closed", half.id)

        self._busy += 1
        threading.Thread(target=work, name=f"check of {half.id}", daemon=True).start()
        return await answered

    def stop(self) -> None:
        """Ends the watch at once, without waiting. A check that is being answered gets no answer."""
        self._tasks.cancel()

    async def close(self) -> None:
        """Ends the watch, and waits until its tasks have ended. Does not wait for a function that runs in a thread."""
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
    properties = decode_properties(metadata)
    return HalfContent(message.topic, data, metadata.partition_key, properties, metadata.event_time)
