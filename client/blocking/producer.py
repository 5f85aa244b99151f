"""The blocking producer: sending without an event loop.

Under load no message costs a future, a contended lock, or a wake-up: `send_async` appends to the batcher from the
calling thread. Callbacks are called in the loop thread: they must be short and must not wait (a blocking call there
raises Interrupted). After a fork the producer opens again, under a new name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from weakref import finalize

from .. import client as aio
from ..common.checks import check_message
from ..common.errors import MemoryBufferIsFull, ProducerQueueIsFull, Result, exception_of
from ..common.fork import EPOCH
from ..common.send_memory import SendMemory
from ..core.batcher import Callback
from ..model.message_id import MessageId
from ..model.options import given
from ..model.settings import ProducerAccessMode
from ..produce.messages import NO_EXTRAS, Extras
from ..produce.partition_producer import PartitionProducer
from ..produce.producer import Producer as AsyncProducer
from .half import Half
from .handle import Handle
from .transaction import Transaction, inner_of
from .waits import acquire


class Producer(Handle[AsyncProducer]):
    """Publishes messages to one topic. `Client.create_producer` opens it; `close`, or a `with` statement, ends it.

        with client.create_producer("flights", batching_enabled=True) as producer:
            message_id = producer.send(b"UA 1545", partition_key="UA")  # waits until the message is durable
            producer.send_async(b"DL 202", lambda result, message_id: print(result, message_id))
            producer.flush()

    The content is `bytes`, or a value of the producer's schema; None publishes a message without a value, which deletes
    its key in a compacted topic. Times are in ms since the epoch; `deliver_after` is a timedelta. The order of messages
    is kept per partition; messages with one key have one partition.

    Threads: any thread may send. Callbacks are called in the client's loop thread: they must be short, and a blocking
    call there raises Interrupted. Errors: ProducerQueueIsFull at `max_pending_messages` and MemoryBufferIsFull at the
    client's `memory_limit_bytes` (with `block_if_queue_full` the call waits), MessageTooBig, InvalidMessage for a wrong
    value, Timeout after `send_timeout_millis` (the outcome is unknown), ProducerFenced, TopicTerminated, AlreadyClosed.
    """

    def __init__(self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any]) -> None:
        super().__init__(client, open_)
        self._ready()

    def _ready(self) -> None:
        self._blocks = self._inner.settings.block_if_queue_full
        self._only: PartitionProducer | None = self._inner.only_plain

    def _reopen(self) -> None:
        super()._reopen()
        self._ready()

    def _when_dropped(self) -> finalize[..., Any]:
        """Returns the finalizer. A producer that took its topic for itself has it until it, or its client, is closed,
        also when it is dropped."""
        dropped = super()._when_dropped()
        if self._inner.settings.access_mode is not ProducerAccessMode.Shared:
            dropped.detach()
        return dropped

    def producer_name(self) -> str:
        """The name, given by the program or by the broker."""
        return self._current().producer_name()

    @property
    def why(self) -> str:
        """The reason of a failed message; empty: no message failed."""
        return next((each.why for each in self._inner.partitions if each.why), "")

    def last_sequence_id(self) -> int:
        """The highest acknowledged sequence id; -1: none."""
        return self._current().last_sequence_id()

    def send_async(
        self,
        content: Any,
        callback: Callback,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = False,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        txn: Transaction | None = None,
    ) -> None:
        """Returns at once; `callback(Result, MessageId)` is called in the loop thread when the outcome is known."""
        if self._epoch != EPOCH[0]:
            self._reopen()
        if callback is not None and not callable(callback):
            check_message({"callback": callback})
        only = self._only
        if only is not None and type(content) is bytes and (
            properties is None and partition_key is None and ordering_key is None and sequence_id is None
            and replication_clusters is None and (disable_replication is False or disable_replication is None)
            and event_timestamp is None and deliver_at is None and deliver_after is None
        ):  # fmt: skip
            try:
                if txn is None:
                    only.add(content, callback)
                else:
                    only.add_in(inner_of(txn), content, callback)
                return
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                if not self._blocks:
                    raise
        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
            event_timestamp, deliver_at, deliver_after, txn=inner_of(txn),
        )  # fmt: skip
        self._enqueue(content, callback, extras)

    def _enqueue(self, content: Any, callback: Callback, extras: Extras) -> PartitionProducer:
        while True:
            try:
                return self._inner.enqueue(content, callback, extras)
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                if not self._blocks or self._thread.inside():
                    raise
            _wait_for_memory(self._inner.connections.send_memory)
            for each in self._inner.partitions:
                _wait_for_room(each)

    def send(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        sequence_id: int | None = None,
        replication_clusters: list[str] | None = None,
        disable_replication: bool | None = False,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        txn: Transaction | None = None,
    ) -> MessageId:
        """Waits until the message is durable and returns its id; raises the exception of its Result.

        `txn`: it counts when that transaction commits (docs/transactions.md).
        """
        if self._epoch != EPOCH[0]:
            self._reopen()
        if threading.get_ident() == self._thread.ident:
            raise exception_of(Result.Interrupted, "send() inside a callback would wait for itself; use send_async")
        outcome, producer = _Outcome(), self._only
        if producer is not None and type(content) is bytes and (
            properties is None and partition_key is None and ordering_key is None and sequence_id is None
            and replication_clusters is None and (disable_replication is False or disable_replication is None)
            and event_timestamp is None and deliver_at is None and deliver_after is None and txn is None
        ):  # fmt: skip
            try:
                producer.add(content, outcome)
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                producer = self._enqueue(content, outcome, NO_EXTRAS)
        else:
            extras = Extras(
                properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
                event_timestamp, deliver_at, deliver_after, txn=inner_of(txn),
            )  # fmt: skip
            producer = self._enqueue(content, outcome, extras)
        producer.flush_soon()
        acquire(outcome.gate)
        result, message_id = outcome.value
        if result is not Result.Ok:
            raise producer.exception(result)
        return message_id

    def prepare(
        self,
        content: Any,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        *,
        group: str,
        check_key: str = "",
        check_after: float = 0,
    ) -> Half:
        """Stores a message durably without publishing it: a half message, which its `commit` publishes, once, and its
        `rollback` drops. When neither comes for `check_after` seconds (0: the cluster's default), a program that
        answers for the `group` (`Client.on_check`) is asked, by the `check_key`. docs/transactions.md has the rules.

        ServiceUnitNotReady: the group has as many that are not decided as it may; MessageTooBig; Timeout: it may be
        stored, and is rolled back.
        """
        options = given(locals())
        return Half(self._thread, self._thread.run(self._current().prepare(**options)))

    def send_many(
        self,
        contents: Iterable[Any],
        *,
        properties: dict[str, str] | None = None,
        partition_key: str | None = None,
        ordering_key: str | None = None,
        event_timestamp: int | None = None,
        deliver_at: int | None = None,
        deliver_after: timedelta | None = None,
        txn: Transaction | None = None,
    ) -> list[MessageId]:
        """Sends all and returns their ids in the order of `contents`.

        When every message has an outcome and one failed, raises the exception of the first failure.
        """
        options = {**given(locals()), "txn": inner_of(txn)}
        return self._thread.run(self._current().send_many(**options))

    def flush(self) -> None:
        """Returns when every message sent before has its outcome and its callback was called."""
        inner = self._current()
        self._thread.run(inner.flush())


class _Outcome:
    """A callback that a thread waits for: a lock, and no more, for each blocking send has one."""

    __slots__ = ("gate", "value")
    value: tuple[Result, MessageId]

    def __init__(self) -> None:
        self.gate = threading.Lock()  # released with the value
        self.gate.acquire()

    def __call__(self, result: Result, message_id: MessageId) -> None:
        self.value = result, message_id
        self.gate.release()


def _wait_for_memory(memory: SendMemory | None) -> None:
    if memory is not None and not memory.has_room:
        gate = threading.Lock()
        gate.acquire()
        memory.wait(gate.release)
        if not memory.has_room:
            acquire(gate)


def _wait_for_room(producer: PartitionProducer) -> None:
    gate = threading.Lock()
    gate.acquire()
    producer.room.append(gate.release)
    if producer.core.is_full and producer.core.error is None:
        acquire(gate)
