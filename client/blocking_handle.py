"""What the blocking producer, consumer and reader share: an asyncio object, made again after a fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from . import client as aio
from .consumer import Consumer as AsyncConsumer
from .fork import EPOCH
from .loop_thread import LoopThread, loop_thread
from .producer import Producer as AsyncProducer
from .reader import Reader as AsyncReader
from .table_view import TableView as AsyncTableView

Inner = TypeVar("Inner", AsyncProducer, AsyncConsumer, AsyncReader, AsyncTableView)


class Handle(Generic[Inner]):
    """A blocking object over an asyncio one, which is made again after a fork."""

    def __init__(self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any]) -> None:
        """`client()` is the asyncio client of this process; `open_` makes the object from it, again after a fork."""
        self._client = client
        self._open = open_
        self._epoch = EPOCH[0]
        self._thread: LoopThread = loop_thread()
        self._inner: Inner = self._thread.run(open_(client()))

    def _current(self) -> Inner:
        if self._epoch != EPOCH[0]:
            self._reopen()
        return self._inner

    def _reopen(self) -> None:
        self._thread = loop_thread()
        self._inner = self._thread.run(self._open(self._client()))
        self._epoch = EPOCH[0]

    def is_connected(self) -> bool:
        return self._epoch == EPOCH[0] and self._inner.is_connected()

    def topic(self) -> str:
        return self._inner.topic()

    def close(self) -> None:
        if self._epoch == EPOCH[0]:
            self._thread.run(self._inner.close())
