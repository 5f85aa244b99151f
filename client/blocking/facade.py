"""The bases of the blocking classes over asyncio ones: `BlockingFacade`, `ForkReopenedFacade`, `ProcessBoundFacade`.

A blocking object over an asyncio one. Most of its methods are those of the asyncio object, and are written by
`python -m tests.stubs` (client/blocking/faces.py). `_current` returns that object, as it is in this process.
The loop in which they run is that of loop_thread.py, which the administration uses without any of these.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from types import FunctionType
from typing import Any, Generic, TypeVar, overload
from weakref import finalize

from ...proto.errors import MagnetarError
from .. import client as aio
from ..common.checks import WrongMessageType, shorten_value
from ..common.closing import EPOCH, Closable, ClosedAfterWith
from ..common.errors import PulsarException, TransactionEnded, translate_error
from ..consume.consumer import Consumer as AsyncConsumer
from ..consume.ranges import Reader as AsyncReader
from ..consume.table_view import TableView as AsyncTableView
from ..produce.producer import Producer as AsyncProducer
from ..transactions.transaction import Transaction as AsyncTransaction
from .loop_thread import LoopThread, shared_loop_thread

_LOG = logging.getLogger("magnetar.client")

T = TypeVar("T")
Of = TypeVar("Of")


class BlockingFacade(Generic[Of]):
    """Base of the blocking classes: an object that runs the methods of an asyncio object in the loop thread."""

    _inner: Of

    def __init_subclass__(cls) -> None:
        """Names methods of faces as programs know them: `Client.subscribe` in the text of a TypeError."""
        super().__init_subclass__()
        for each in vars(cls).values():
            if isinstance(each, FunctionType):
                each.__qualname__ = each.__qualname__.replace("Face.", ".")

    def _current(self) -> Of:
        raise NotImplementedError

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return shared_loop_thread().run(work)

    def _finish(self, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
        shared_loop_thread().run_uninterrupted(work, limit_s)


Inner = TypeVar("Inner", AsyncProducer, AsyncConsumer, AsyncReader, AsyncTableView)


class ForkReopenedFacade(BlockingFacade[Inner], ClosedAfterWith):
    """Base of the blocking producer, consumer, reader and table view: objects that are opened again after a fork.

    An object that is dropped without `close` is closed when it is garbage-collected: otherwise it would go on
    receiving messages that no program reads. Messages that were sent stay sent. The thread of a listener keeps its
    consumer alive.
    """

    def __init__(self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any]) -> None:
        """Makes the asyncio object. `client()` is the asyncio client of this process; `open_` makes the object from it,
        again after a fork."""
        self._client = client
        self._open = open_
        self._epoch = EPOCH[0]
        self._thread: LoopThread = shared_loop_thread()
        self._inner = self._thread.run(open_(client()))
        self._dropped: finalize[..., Any] = self._when_dropped()

    def _when_dropped(self) -> finalize[..., Any]:
        dropped = finalize(self, close_soon, self._thread, self._inner, self._epoch)
        dropped.atexit = False
        return dropped

    def _current(self) -> Inner:
        if self._epoch != EPOCH[0]:
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
        """Returns the asyncio object of this process."""
        return self._current()

    def _reopen(self) -> None:
        self._thread = shared_loop_thread()
        self._inner = self._thread.run(self._open(self._client()))
        self._epoch = EPOCH[0]
        self._dropped.detach()
        self._dropped = self._when_dropped()

    def is_connected(self) -> bool:
        """Whether all partitions are connected to their brokers, in this process."""
        return self._epoch == EPOCH[0] and self._inner.is_connected()

    def topic(self) -> str:
        """Returns the full name of the topic; several names are separated by commas."""
        return self._inner.topic()

    def close(self) -> None:
        """Closes the object: a producer is flushed first, the pending acks of a consumer are sent."""
        self._dropped.detach()
        if self._epoch == EPOCH[0]:
            self._thread.run(self._inner.close())


def close_soon(thread: LoopThread, inner: Closable, epoch: int) -> None:
    """Starts to close `inner` without waiting. May be called from any thread, also from the thread of the event loop,
    where the garbage collector may run."""
    if epoch == EPOCH[0]:
        thread.start_soon(_close_quietly(inner))


async def _close_quietly(inner: Closable) -> None:
    try:
        await inner.close()
    except MagnetarError as error:
        _LOG.info("what was dropped without close did not end in order: %s", error)


class ProcessBoundFacade(BlockingFacade[Of]):
    """Base of the blocking transaction and half message: they stay with the process that began them. After a fork
    their methods raise TransactionEnded in the child.

    If Ctrl-C comes while their end is waited for, the end goes on, and the thread waits for its outcome before it is
    interrupted; a second Ctrl-C ends that wait.
    """

    def __init__(self, inner: Of) -> None:
        self._inner = inner
        self._epoch = EPOCH[0]

    def _current(self) -> Of:
        if self._epoch != EPOCH[0]:
            raise TransactionEnded(f"{self._inner!r} is of the process before the fork")
        return self._inner

    def __repr__(self) -> str:
        return repr(self._inner)


@overload
def asyncio_transaction_of(txn: None) -> None: ...
@overload
def asyncio_transaction_of(txn: BlockingFacade[AsyncTransaction]) -> AsyncTransaction: ...
def asyncio_transaction_of(txn: object) -> AsyncTransaction | None:
    """Returns the asyncio transaction of a blocking one; None for None. Raises InvalidMessage if `txn` is no
    transaction."""
    if txn is None:
        return None
    if isinstance(txn, ProcessBoundFacade) and isinstance(found := txn._current(), AsyncTransaction):
        return found
    raise WrongMessageType(f"txn is a transaction of this client, or None, not {shorten_value(txn)}")
