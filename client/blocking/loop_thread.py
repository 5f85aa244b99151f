"""The event loop of the blocking clients (`LoopThread`): one daemon thread per process, which all clients share. It is
started when it is first needed. The module imports nothing of the SDK but its errors, so that the commands of
administration start fast. Guarded by tests/client/blocking/test_loop_thread.py.

A forked child process has none of its parent's threads: it starts a thread of its own (client/common/closing.py).

The thread is stopped before the interpreter ends. Otherwise CPython would kill the daemon thread when it next asks for
the interpreter lock, inside compiled code of the event loop or of gRPC. The process would then end with a segmentation
fault, after its work was done, and with a wrong exit code.

Also the base classes of the blocking classes: `BlockingFacade`, `ForkReopenedFacade`, `ProcessBoundFacade`.

A blocking object calls an asyncio object. `python -m tests.stubs` writes most of its methods from those of the asyncio
class (client/blocking/faces.py). `_current` returns the asyncio object of this process. The administration client uses
the event loop without these classes.

Also in this file, below its heading: waits of an application's thread that Ctrl-C always ends, with the error `CtrlC`
(waits)."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, overload
from weakref import WeakKeyDictionary, finalize

from ...proto.errors import MagnetarError
from ...runtime.clock import SystemClock
from ...runtime.tasks import Tasks
from ..common.checks import WrongMessageType, shorten_value
from ..common.closing import FORK_COUNT, AsyncClosable, ClosedAfterWith
from ..common.errors import (
    AlreadyClosed,
    CtrlC,
    Interrupted,
    PulsarException,
    Timeout,
    TransactionEnded,
    translate_error,
)

if TYPE_CHECKING:
    from .. import client as aio
    from ..consume.consumer import Consumer as AsyncConsumer
    from ..consume.pull import PullConsumer as AsyncPullConsumer
    from ..consume.ranges import Reader as AsyncReader
    from ..consume.table_view import TableView as AsyncTableView
    from ..produce.producer import Producer as AsyncProducer
    from ..transactions.transaction import Transaction as AsyncTransaction

# --------------------------------------------------------------------------------------------------------- waits
# Waits of an application's thread that Ctrl-C always ends, as `CtrlC`: Pulsar's Interrupted and KeyboardInterrupt.
#
# A signal that arrives after the interpreter has checked signals and before the thread sleeps on its lock does not end
# the sleep: its handler runs when the thread wakes for another reason. So no wait of ours lasts longer than
# INTERRUPT_POLL_S at a time. Guarded by tests/client/blocking/test_waking.py.


T = TypeVar("T")
Of = TypeVar("Of")

INTERRUPT_POLL_S = 0.5
monotonic = SystemClock.monotonic
"""The clock of waits in a program's own thread: always the real clock, never that of a test."""


def acquire_lock(gate: threading.Lock, deadline: float | None = None) -> bool:
    """Waits for the lock until the time `deadline` (seconds of `monotonic`; None: no limit). Returns True if the lock
    was acquired, False at the deadline. Raises CtrlC if Ctrl-C is pressed during the wait."""
    while True:
        left = INTERRUPT_POLL_S if deadline is None else min(INTERRUPT_POLL_S, deadline - monotonic())
        if left <= 0:
            return False
        try:
            if gate.acquire(timeout=left):
                return True
        except KeyboardInterrupt as pressed:
            raise CtrlC("Ctrl-C while a call waited") from pressed


def wait_result(future: Future[T], timeout_s: float | None = None) -> T:
    """Waits until `future` has a result and returns the result, or raises the exception of the work, as `future.result`
    does. Raises concurrent.futures.TimeoutError if there is no result within `timeout_s` seconds (None: no limit), and
    CtrlC if Ctrl-C is pressed. The work goes on after either."""
    deadline = None if timeout_s is None else monotonic() + timeout_s
    while True:
        left = INTERRUPT_POLL_S if deadline is None else min(INTERRUPT_POLL_S, deadline - monotonic())
        try:
            return future.result(max(0.0, left))
        except FutureTimeout:
            if future.done():
                return future.result()
            if deadline is not None and monotonic() >= deadline:
                raise
        except CtrlC:
            raise
        except KeyboardInterrupt as pressed:
            raise CtrlC("Ctrl-C while a call waited") from pressed


# --------------------------------------------------------------------------------------------------- loop_thread


_LOG = logging.getLogger("magnetar.client")

EXIT_WAIT_S = 5.0
"""Longest time in seconds for which the end of the interpreter waits for the thread; a callback of the program may be
running in it."""


class LoopThread:
    """The thread that runs the event loop of all blocking clients of a process. `shared_loop_thread` makes the only
    one."""

    def __init__(self) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="magnetar-client", daemon=True)
        self._thread.start()
        self.ident = self._thread.ident  # of the loop's own thread: there nothing may wait
        self._ended = False
        self._tasks = Tasks()
        self._counts: WeakKeyDictionary[Any, Callable[[Any], int]] = WeakKeyDictionary()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Stops the event loop and waits up to EXIT_WAIT_S seconds for its thread to end; does nothing at a second
        call, or in a forked child process. `stop` is called at the end of the interpreter: `atexit` runs functions that
        a program registered later before it, and they still find the loop running.

        Messages that have no outcome then are not waited for: a warning says how many there are."""
        if self._ended or _thread is not self:  # `is not self`: in a forked child, which has no such thread
            return
        self._ended = True
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(EXIT_WAIT_S)
        lost = 0 if self._thread.is_alive() else sum(count(client) for client, count in self._counts.items())
        if lost:
            _LOG.warning(
                "the program ends without close: %d messages have no outcome, and those that were not sent are lost",
                lost,
            )

    def count_at_end(self, client: Of, count: Callable[[Of], int]) -> None:
        """Has `stop` call `count(client)`, which returns how many messages of the client have no outcome. The client is
        not kept alive."""
        self._counts[client] = count

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                return
            except (SystemExit, KeyboardInterrupt):  # of a callback: it ends a program from the main thread alone
                _LOG.exception("a callback raised what would end a program; the client goes on")

    def is_current(self) -> bool:
        """Returns whether the calling thread is the loop's own thread, in which no call may block."""
        return threading.get_ident() == self.ident

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Runs the coroutine in the event loop, waits for its end and returns its result, or raises its error. If there
        is no result within `timeout_s` seconds (None: no limit), cancels the coroutine and raises Timeout. If Ctrl-C is
        pressed, cancels it and raises CtrlC.

        Raises Interrupted if called from a callback in the loop's thread, where the wait would never end. Raises
        AlreadyClosed if the interpreter is ending."""
        if self.is_current():
            coroutine.close()
            raise Interrupted("a blocking call inside a callback would wait for itself; use send_async there")
        future = self.submit(coroutine)
        try:
            return wait_result(future, timeout_s)
        except FutureTimeout:
            if future.done():
                raise
            future.cancel()
            raise Timeout(f"no answer within {timeout_s:g} s") from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts the coroutine in the event loop and returns a future of its outcome. Raises AlreadyClosed if the
        interpreter is ending: the loop has stopped, and the future would never end."""
        if self._ended:
            coroutine.close()
            raise AlreadyClosed("the interpreter is ending; close clients before")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run_uninterrupted(self, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
        """Runs the coroutine `work` in the event loop and waits for its outcome; raises its error. If Ctrl-C is
        pressed, `work` goes on, and the thread waits for its outcome before CtrlC is raised; a second Ctrl-C ends this
        wait. `limit_s`: the longest of each of the two waits in seconds, after which TimeoutError is raised and `work`
        goes on; None: no limit. Raises Interrupted if called in the loop's thread, AlreadyClosed if the interpreter is
        ending."""
        if self.is_current():
            work.close()
            raise Interrupted("a transaction ended inside a callback would wait for itself")
        future = self.submit(work)
        try:
            wait_result(future, limit_s)
        except BaseException as error:
            if isinstance(error, PulsarException) and not isinstance(error, CtrlC):
                raise
            if not future.done():
                with suppress(PulsarException):
                    wait_result(future, limit_s)
            raise

    def start_in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Starts the coroutine in the event loop without waiting for its end; an error of the coroutine is logged. May
        be called from any thread. Does nothing if the interpreter is ending."""
        if self._ended:
            coroutine.close()
        else:
            self.loop.call_soon_threadsafe(self._tasks.spawn, coroutine, "client in the background")


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_lock = threading.Lock()
_thread: LoopThread | None = None


def shared_loop_thread() -> LoopThread:
    """Returns the loop thread of this process; the first call in a process starts it. The LoopThread is made in another
    thread than the caller's: Ctrl-C interrupts only the main thread, so that no event loop is left half made. Raises
    RuntimeError if no thread can be started, for example while the interpreter ends."""
    if _thread is not None:
        return _thread
    made: Future[LoopThread] = Future()
    threading.Thread(target=_make_loop_thread, args=(made,), name="magnetar-client-start").start()
    return made.result()


def _make_loop_thread(made: Future[LoopThread]) -> None:
    global _thread
    try:
        with _lock:
            if _thread is None:
                _thread = LoopThread()
            made.set_result(_thread)
    except BaseException as error:
        made.set_exception(error)


def _after_fork() -> None:
    global _thread, _lock
    _lock = threading.Lock()
    _thread = None


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


class BlockingFacade(Generic[Of]):
    """Base class of the blocking classes: an object that has an asyncio object, and runs the methods of that object in
    the event loop of the loop thread. A derived class implements `_current`, which returns the asyncio object for this
    process. A method that waits raises Interrupted if it is called in the loop thread, CtrlC after Ctrl-C, and
    AlreadyClosed if the interpreter is ending."""

    _inner: Of

    def __init_subclass__(cls) -> None:
        """Names methods of faces as programs know them: `Client.subscribe` in the text of a TypeError."""
        super().__init_subclass__()
        for each in vars(cls).values():
            if isinstance(each, FunctionType):
                each.__qualname__ = each.__qualname__.replace("Facade.", ".")

    def _current(self) -> Of:
        raise NotImplementedError

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return shared_loop_thread().run(work)

    def _finish(self, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
        shared_loop_thread().run_uninterrupted(work, limit_s)


Inner = TypeVar("Inner", "AsyncProducer", "AsyncConsumer", "AsyncPullConsumer", "AsyncReader", "AsyncTableView")


class ForkReopenedFacade(BlockingFacade[Inner], ClosedAfterWith):
    """Base class of the blocking producer, consumer, reader and table view: objects that are opened again in a forked
    child process.

    If a program drops its last reference to such an object without `close`, the object is closed when it is
    garbage-collected: otherwise a consumer would go on receiving messages that no program reads. Messages that were
    sent stay sent. The thread of a listener keeps its consumer alive."""

    def __init__(self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any]) -> None:
        """Makes the asyncio object. `client()` is the asyncio client of this process; `open_` makes the object from it,
        again after a fork."""
        self._client = client
        self._open = open_
        self._epoch = FORK_COUNT[0]
        self._thread: LoopThread = shared_loop_thread()
        self._inner = self._thread.run(open_(client()))
        self._dropped: finalize[..., Any] = self._when_dropped()

    def _when_dropped(self) -> finalize[..., Any]:
        dropped = finalize(self, close_soon, self._thread, self._inner, self._epoch)
        dropped.atexit = False
        return dropped

    def _current(self) -> Inner:
        if self._epoch != FORK_COUNT[0]:
            self._reopen()
        return self._inner

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._thread.run(work)
        except PulsarException:
            raise
        except MagnetarError as error:
            raise translate_error(error) from error

    def inner(self) -> Inner:
        """Returns the asyncio object that does the work in this process. In a forked child process the first call opens
        a new one, and raises the errors of opening it, such as OperationNotSupported if the parent had connections."""
        return self._current()

    def _reopen(self) -> None:
        self._thread = shared_loop_thread()
        self._inner = self._thread.run(self._open(self._client()))
        self._epoch = FORK_COUNT[0]
        self._dropped.detach()
        self._dropped = self._when_dropped()

    def is_connected(self) -> bool:
        """Returns whether all partitions of the object are connected to their brokers. Returns False in a forked child
        process in which the object is not opened again yet."""
        return self._epoch == FORK_COUNT[0] and self._inner.is_connected()

    def topic(self) -> str:
        """Returns the full name of the topic; if the object has several topics, their names separated by commas."""
        return self._inner.topic()

    def close(self) -> None:
        """Closes the object, and waits until it is closed. A producer is flushed before; a consumer sends its waiting
        acknowledgements before. Does nothing in a forked child process in which the object was not opened again. A
        producer raises Timeout if messages have no outcome in time, AlreadyClosed if it is closed already. Raises
        Interrupted in the loop thread, CtrlC after Ctrl-C."""
        self._dropped.detach()
        if self._epoch == FORK_COUNT[0]:
            self._thread.run(self._inner.close())


def close_soon(thread: LoopThread, inner: AsyncClosable, epoch: int) -> None:
    """Starts to close the asyncio object `inner`, and does not wait for it. Does nothing in a process that was forked
    after `epoch`, the fork count of the process that opened the object. May be called from any thread, also from that
    of the event loop, where the garbage collector may run."""
    if epoch == FORK_COUNT[0]:
        thread.start_in_background(_close_quietly(inner))


async def _close_quietly(inner: AsyncClosable) -> None:
    try:
        await inner.close()
    except MagnetarError as error:
        _LOG.info("what was dropped without close did not end in order: %s", error)


class ProcessBoundFacade(BlockingFacade[Of]):
    """Base class of the blocking transaction, half message and listener, which cannot leave the process that began
    them: in a forked child process their methods raise TransactionEnded.

    If Ctrl-C is pressed during a commit or an abort, the commit or abort goes on. The thread waits for its outcome
    before it is interrupted; a second Ctrl-C ends this wait."""

    is_transaction: ClassVar[bool] = False
    """Whether the asyncio object is a Transaction: this module must not import its class."""

    def __init__(self, inner: Of) -> None:
        self._inner = inner
        self._epoch = FORK_COUNT[0]

    def _current(self) -> Of:
        if self._epoch != FORK_COUNT[0]:
            raise TransactionEnded(f"{self._inner!r} is of the process before the fork")
        return self._inner

    def __repr__(self) -> str:
        return repr(self._inner)


@overload
def asyncio_transaction_of(txn: None) -> None: ...
@overload
def asyncio_transaction_of(txn: BlockingFacade[AsyncTransaction]) -> AsyncTransaction: ...
def asyncio_transaction_of(txn: object) -> AsyncTransaction | None:
    """Returns the asyncio transaction of the blocking transaction `txn`; None for None. Raises InvalidMessage if `txn`
    is no transaction, TransactionEnded if it was begun before this process was forked."""
    if txn is None:
        return None
    if isinstance(txn, ProcessBoundFacade) and txn.is_transaction:
        return cast("AsyncTransaction", txn._current())
    raise WrongMessageType(f"txn is a transaction of this client, or None, not {shorten_value(txn)}")
