"""The table view: the latest value of each key of a topic, kept up to date, for asyncio.

    async with await client.create_table_view("prices") as view:
        print(view.get("ACME"))
        await view.for_each_and_listen(print)

A view reads the compacted topic from its beginning, without a durable subscription. When `create_table_view` returns,
the view contains all messages that were stored at the time of the call. A message without a value, or with an empty
value, deletes its key, as in Pulsar; a message without a key is ignored. A partitioned topic is one table; partitions
that are added later are included.

**Compaction meanwhile.** A message that compaction removed is never delivered, nor is a removed tombstone. The reader
of a partition may reconnect at a position before the compaction horizon after the horizon has moved. Then the partition
is read again from its beginning, and keys that are missing now are deleted: no key outlives its tombstone. A topic that
was deleted and created again is read from its beginning, too, and the keys of the former topic are deleted. Guard:
tests/client/consume/test_table_view.py."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from ...proto.errors import MagnetarError
from ...runtime.tasks import Tasks
from ..common.checks import FUNCTION_CHECK, check_parameter
from ..common.closing import ClosedAfterAsyncWith
from ..common.errors import AlreadyClosed, ChecksumError, CryptoError, PulsarException, translate_error
from ..common.loggers import is_cancelled, log_foreign_error, reraise_interrupt
from ..model.message import CiphertextMessage, Message
from ..model.message_id import MessageId
from .partition_consumer import PartitionConsumer
from .ranges import Reader
from .receiver_queue import ReceiverQueue

_LOG = logging.getLogger("magnetar.client")
TableListener = Callable[[str, Any], object]
CATCH_UP_POLL_S = 0.02
"""Seconds between two checks whether all messages that were stored when the view was opened have arrived."""
SCHEMA_RETRY_S = 1.0
"""Seconds after which a message is read again whose schema no broker could give."""


class TableView(ClosedAfterAsyncWith):
    """A read-only dictionary of the latest value of each key of a topic, for asyncio; see `Client.create_table_view`.

    Keys are text; values are `bytes`, or what the schema decodes. `keys`, `values` and `items` return copies.
    `view[key]` raises KeyError if the key has no value. A view belongs to the event loop that opened it; listeners run
    there, in the order of the changes. If the view cannot be kept up to date any more, a warning is logged.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._values: dict[str, Any] = {}
        self._of: dict[str, PartitionConsumer] = {}  # key → the partition that it is in
        self._last: dict[PartitionConsumer, int] = {}  # index of the last message that was applied
        self._anew: dict[PartitionConsumer, set[str]] = {}  # read again: keys that were not seen yet
        self._listeners: list[TableListener] = []
        self._horizons: dict[PartitionConsumer, int] = {}  # when it began to be read
        self._tasks = Tasks(self._broke)
        self._callbacks = Tasks()  # their errors are also raised to the caller of `for_each`
        self._error: PulsarException | None = None
        self._is_open = False

    @classmethod
    async def open(cls, reader: Reader) -> TableView:
        """Returns a table view that `reader` fills. Returns when the table contains all messages that the topic had
        stored at the time of the call. Raises the error with which reading failed; the reader is closed then."""
        view = cls(reader)
        view._horizons = {consumer: consumer.compacted_end_index for consumer in reader.partitions}
        reader.on_connected, reader.on_anew = view._connected, view._made_anew
        view._tasks.spawn(view._follow(), f"table {reader.topic()}")
        try:
            while await reader.has_message_available() or len(reader.inbox):
                if view._error is not None:
                    break
                await asyncio.sleep(CATCH_UP_POLL_S)
            if view._error is not None:
                raise view._error
        except BaseException:
            await view.close()
            raise
        view._is_open = True
        return view

    @property
    def partitions(self) -> list[PartitionConsumer]:
        """Returns the PartitionConsumers that read the partitions of the topic."""
        return self._reader.partitions

    @property
    def is_over(self) -> bool:
        """Returns whether the view is closed or has failed."""
        return self._reader.is_over

    @property
    def inbox(self) -> ReceiverQueue:
        """Returns the queue of received messages that are not in the table yet."""
        return self._reader.inbox

    # ------------------------------------------------------------------------------ reading
    def topic(self) -> str:
        """Returns the full name of the topic."""
        return self._reader.topic()

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the latest value of the key; `default` if the key has none."""
        return self._values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._values))

    def keys(self) -> KeysView[str]:
        """Returns a copy of the keys that the table has now."""
        return dict(self._values).keys()

    def values(self) -> ValuesView[Any]:
        """Returns a copy of the values that the table has now."""
        return dict(self._values).values()

    def items(self) -> ItemsView[str, Any]:
        """Returns a copy of the keys with their values: later changes do not appear in it."""
        return dict(self._values).items()

    def for_each(self, callback: TableListener) -> asyncio.Future[None]:
        """Calls `callback(key, value)` for each key that the table has now, before `for_each` returns; raises what the
        callback raises. If `callback` is a coroutine function, its coroutines run one after the other. The returned
        future ends when the last has ended, or gets the exception of the first that raises. Raises InvalidConfiguration
        if `callback` is not callable. Must be called in the event loop."""
        return self._each(self.items(), callback)

    def for_each_and_listen(self, callback: TableListener) -> asyncio.Future[None]:
        """Calls `callback(key, value)` for each key that the table has now, and then for each change; returns a future
        as `for_each` does. For a deleted key the value is empty, as in Pulsar: the value that the schema decodes from
        no bytes, b"" or ""; None if the schema cannot decode them. An exception at a change is logged. Raises the
        errors of `for_each`."""
        now = self.items()
        check_parameter("callback", FUNCTION_CHECK, callback)
        self._listeners.append(callback)  # in the same step: no change is missed
        return self._each(now, callback)

    def _each(self, items: ItemsView[str, Any], callback: TableListener) -> asyncio.Future[None]:
        check_parameter("callback", FUNCTION_CHECK, callback)
        outcomes = [callback(key, value) for key, value in items]
        waiting = [outcome for outcome in outcomes if inspect.isawaitable(outcome)]
        if waiting:
            return self._callbacks.spawn(_in_turn(waiting), f"callbacks of table {self.topic()}")
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    # ------------------------------------------------------------------------------ following
    async def _follow(self) -> None:
        reader = self._reader
        while True:
            try:
                message = await reader.read_next()
            except AlreadyClosed:
                return
            except ChecksumError:
                _LOG.exception("%s: a damaged message is not in the table", reader.topic())
                continue
            except PulsarException as error:
                if self._is_open and error.retryable and not reader.inbox.is_closed:
                    _LOG.warning("%s: the table is not up to date now: %s", reader.topic(), error)
                    # the message is in the inbox again: its schema was not found out
                    await asyncio.sleep(SCHEMA_RETRY_S)
                    continue
                _LOG.warning("%s: the table is not kept up to date any more: %s", reader.topic(), error)
                self._error = error
                return
            if isinstance(message, CiphertextMessage):
                self._error = CryptoError(f"the table is not kept up to date any more: {message!r} is not decrypted")
                _LOG.error("%s: %s", reader.topic(), self._error)
                return
            await self._on_message(message)

    def _broke(self, error: Exception) -> None:
        self._error = self._error or translate_error(error)

    async def _on_message(self, message: Message) -> None:
        consumer: Any = message.entry.consumer
        self._last[consumer] = max(self._last.get(consumer, -1), message.index())
        self._horizons.setdefault(consumer, consumer.compacted_end_index)
        await self._apply(consumer, message)
        missing = self._anew.get(consumer)
        if missing is not None:
            missing.discard(message.partition_key())
            if message.index() + 1 >= consumer.compacted_end_index or not len(self._reader.inbox):
                await self._sweep(consumer)

    # ------------------------------------------------------------------------------ compaction meanwhile
    def _connected(self, consumer: PartitionConsumer) -> None:
        """Handles a reconnect. If the compaction horizon moved past messages that this partition has not read,
        tombstones may have been missed, and the partition is read again."""
        before = self._horizons.get(consumer)
        self._horizons[consumer] = consumer.compacted_end_index
        lags = self._last.get(consumer, -1) + 1 < consumer.compacted_end_index
        if before is not None and before < consumer.compacted_end_index and lags:
            self._tasks.spawn(self._read_again(consumer), f"table {self.topic()} anew")

    def _made_anew(self, consumer: PartitionConsumer) -> None:
        """Handles a topic that was deleted and created again: deletes the keys of the old topic, except those that the
        new topic sets in the meantime."""
        self._last.pop(consumer, None)
        self._horizons.pop(consumer, None)
        self._anew[consumer] = {key for key, of in self._of.items() if of is consumer}
        self._tasks.spawn(self._delete_unseen(consumer), f"table {self.topic()} of another topic")

    async def _delete_unseen(self, consumer: PartitionConsumer) -> None:
        for key in sorted(self._anew.pop(consumer, ())):
            await self._set(consumer, key, None)

    async def _read_again(self, consumer: PartitionConsumer) -> None:
        self._anew[consumer] = {key for key, of in self._of.items() if of is consumer}
        try:
            await consumer.requests.seek(MessageId.earliest)
        except (PulsarException, MagnetarError) as error:
            _LOG.warning("%s: the table may hold deleted keys until the next reconnect: %s", consumer.topic, error)
            self._horizons[consumer] = 0
            return
        if not len(self._reader.inbox):
            await self._sweep(consumer)

    async def _sweep(self, consumer: PartitionConsumer) -> None:
        """After a partition was read again up to the horizon, deletes the keys that were not seen."""
        index = self._last.get(consumer, -1)
        try:
            if index + 1 < consumer.compacted_end_index and await self._reader.has_more(consumer):
                return
        except (PulsarException, MagnetarError):
            return  # the next message, or the next connection, decides
        await self._delete_unseen(consumer)

    async def _apply(self, consumer: PartitionConsumer, message: Message) -> None:
        if not message.fields.HasField("partition_key"):
            return
        value = None
        if message.payload and not message.has_null_value():
            try:
                value = message.value()
            except BaseException as error:  # the schema's
                reraise_interrupt(error)
                _LOG.exception("%s: %r cannot be decoded and is not in the table", consumer.topic, message)
                return
        await self._set(consumer, message.partition_key(), value)

    async def _set(self, consumer: PartitionConsumer, key: str, value: Any) -> None:
        if value is not None:
            self._values[key], self._of[key] = value, consumer
        elif self._values.pop(key, None) is None:
            return
        else:
            del self._of[key]
        for listener in list(self._listeners):
            await self._call_listener(listener, key, _empty(consumer) if value is None else value)

    async def _call_listener(self, listener: TableListener, key: str, value: Any) -> None:
        what = f"{self.topic()}: a listener of the table"
        try:
            outcome = listener(key, value)
        except BaseException as error:
            log_foreign_error(error, what)
            return
        if inspect.isawaitable(outcome):
            try:
                await outcome
            except BaseException as error:
                if is_cancelled(error):
                    raise
                log_foreign_error(error, what)

    # ------------------------------------------------------------------------------ the end
    def abort(self) -> None:
        """Ends the table view at once, without informing the brokers; its values stay readable."""
        self._tasks.cancel()
        self._reader.abort()

    async def close(self) -> None:
        """Closes the table view, and waits until its reader is closed: the table is no longer kept up to date, and its
        values stay readable. Coroutines of `for_each` that still run are cancelled."""
        self._callbacks.cancel()
        self._tasks.cancel()
        await self._reader.close()  # after it no partition reconnects, which begins a task
        await self._tasks.close()

    def is_connected(self) -> bool:
        """Returns whether the readers of all partitions are connected to their brokers."""
        return self._reader.is_connected()


def _empty(consumer: PartitionConsumer) -> Any:
    try:
        return consumer.schema.decode(b"")
    except BaseException as error:  # the schema's: it has no empty value
        reraise_interrupt(error)
        return None


async def _in_turn(waiting: Iterable[Awaitable[object]]) -> None:
    for each in waiting:
        await each

