"""The base of the blocking producer, consumer and reader: an asyncio object, made again after a fork."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar
from weakref import finalize

from ...proto.errors import MagnetarError
from .. import client as aio
from ..common.closing import ClosedAfterWith
from ..common.fork import EPOCH
from ..consume.consumer import Consumer as AsyncConsumer
from ..consume.reader import Reader as AsyncReader
from ..consume.table_view import TableView as AsyncTableView
from ..produce.producer import Producer as AsyncProducer
from .loop_thread import LoopThread, loop_thread

_LOG = logging.getLogger("magnetar.client")


class Closable(Protocol):
    """An object with an asynchronous `close`."""

    async def close(self) -> None: ...


Inner = TypeVar("Inner", AsyncProducer, AsyncConsumer, AsyncReader, AsyncTableView)


class Handle(ClosedAfterWith, Generic[Inner]):
    """A blocking object over an asyncio one, which is made again after a fork.

    An object that is dropped without `close` is closed when it is collected: else it would go on taking messages that
    no program receives. What was sent stays sent. A listener's thread keeps its consumer alive.
    """

    def __init__(self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any]) -> None:
        """Makes the asyncio object. `client()` is the asyncio client of this process; `open_` makes the object from it,
        again after a fork."""
        self._client = client
        self._open = open_
        self._epoch = EPOCH[0]
        self._thread: LoopThread = loop_thread()
        self._inner: Inner = self._thread.run(open_(client()))
        self._dropped: finalize[..., Any] = self._when_dropped()

    def _when_dropped(self) -> finalize[..., Any]:
        dropped = finalize(self, close_soon, self._thread, self._inner, self._epoch)
        dropped.atexit = False
        return dropped

    def _current(self) -> Inner:
        if self._epoch != EPOCH[0]:
            self._reopen()
        return self._inner

    def inner(self) -> Inner:
        """The asyncio object of this process."""
        return self._current()

    def _reopen(self) -> None:
        self._thread = loop_thread()
        self._inner = self._thread.run(self._open(self._client()))
        self._epoch = EPOCH[0]
        self._dropped.detach()
        self._dropped = self._when_dropped()

    def is_connected(self) -> bool:
        """Whether all partitions are connected, in this process."""
        return self._epoch == EPOCH[0] and self._inner.is_connected()

    def topic(self) -> str:
        """Returns the full name of the topic; several names are separated by commas."""
        return self._inner.topic()

    def close(self) -> None:
        """Closes in order: a producer is flushed first, a consumer's pending acks are sent."""
        self._dropped.detach()
        if self._epoch == EPOCH[0]:
            self._thread.run(self._inner.close())


def close_soon(thread: LoopThread, inner: Closable, epoch: int) -> None:
    """Closes `inner` without a wait, from any thread, also from the loop's own (the collector runs anywhere)."""
    if epoch == EPOCH[0]:
        thread.start_soon(_close_quietly(inner))


async def _close_quietly(inner: Closable) -> None:
    try:
        await inner.close()
    except MagnetarError as error:
        _LOG.info("what was dropped without close did not end in order: %s", error)
