"""The blocking producer. The calling thread adds messages without an event loop.

Under load a message costs no future, no contended lock and no wake-up: `send_async` adds to the batcher from the
calling thread. Callbacks are called in the loop thread: they must be short and must not wait (a blocking call there
raises Interrupted). After a fork the producer is opened again in the child process, under a new name. Also the blocking
transaction and half message (`Transaction`, `Half`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Self
from weakref import finalize

from ...proto.states import TxnId
from .. import client as aio
from ..common.checks import check_message_parameters
from ..common.closing import FORK_COUNT
from ..common.errors import (
    CtrlC,
    MemoryBufferIsFull,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    TransactionEnded,
    make_exception_for_result,
)
from ..common.rate_limits import SendMemoryLimit
from ..core.batcher import SendCallback
from ..core.transaction import TransactionState
from ..model.message_id import MessageId
from ..model.settings import ProducerAccessMode
from ..produce.entry_writer import NO_EXTRAS, Extras
from ..produce.partition_producer import PartitionProducer
from ..transactions.transaction import ABORT_WAIT_S
from ..transactions.transaction import Transaction as AsyncTransaction
from .faces import HalfFacade, ProducerFacade, TransactionFacade
from .loop_thread import acquire_lock, asyncio_transaction_of

# --------------------------------------------------------------------------------------------------- transaction
# The blocking transaction, over the asyncio one. It is begun when it is made.
#
#     with client.transaction() as txn:
#         producer.send(b"…", txn=txn)
#         consumer.acknowledge(message, txn=txn)
#
# Ctrl-C in the body aborts. Ctrl-C while it commits: it goes on (client/blocking/loop_thread.py, `ProcessBoundFacade`).
# Guards: tests/client/blocking/test_blocking_transactions.py.


class ThreadLocalTransaction(threading.local):
    """Thread-local storage: `current` is the transaction whose `with` block the thread runs now; None outside of such a
    block."""

    current: Transaction | None = None


class Transaction(TransactionFacade):
    """A transaction: the messages and acknowledgements in it count together or not at all. Blocking;
    `Client.transaction` begins it.

        with client.transaction() as txn:
            producer.send(b"…", txn=txn)
            consumer.acknowledge(message, txn=txn)

    The end of the block commits the transaction; an exception in the block, or Ctrl-C, aborts it. Without a block call
    `commit` or `abort`. Any thread may send in the transaction. Errors: TransactionAborted (nothing in the transaction
    counts: run it again), TransactionEnded, TransactionFenced, OutcomeUnknown."""

    is_transaction = True

    def __init__(
        self, client: aio.Client, timeout: float, name: str | None, id_: str | None, bodies: ThreadLocalTransaction
    ) -> None:
        async def begin() -> AsyncTransaction:
            return await client.transaction(timeout, name=name, id=id_)

        begun = client.transaction_now(timeout) if name is None and id_ is None else None
        super().__init__(begun if begun is not None else self._run(begin()))
        self._bodies = bodies

    def inner(self) -> AsyncTransaction:
        """Returns the asyncio transaction that does the work. Raises TransactionEnded in a forked child process,
        because the transaction belongs to the parent."""
        return self._current()

    def __enter__(self) -> Self:
        inside = self._bodies.current
        if inside is not None and inside.state is TransactionState.OPEN:
            raise TransactionEnded("transactions are not nested: this thread is in the body of another one")
        self._bodies.current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._bodies.current = None
        if self._epoch != FORK_COUNT[0]:
            return
        state = self.state
        if kind is None:
            ended = TransactionState.ABORTED, TransactionState.ABORTING, TransactionState.PREPARED
            if state not in ended:  # by hand, in the body
                self.commit()
        elif state is TransactionState.OPEN:
            try:
                self._finish(self._inner.abort(), ABORT_WAIT_S)
            except CtrlC:
                raise
            except (PulsarException, TimeoutError):  # the time-out of the transaction aborts it
                pass


# ---------------------------------------------------------------------------------------------------------- half
# A half message in blocking code: client/produce/producer.py in the loop thread.
#
#     half = producer.prepare(b"…", group="orders", check_key="17")
#     half.commit()                       or rollback()
#
# Ctrl-C during `commit` and `rollback`: they go on (client/blocking/loop_thread.py, `ProcessBoundFacade`). Ctrl-C
# during `prepare` rolls back. Guards: tests/client/blocking/test_blocking_halves.py.


class Half(HalfFacade):
    """A half message: one or several messages that are stored at a coordinator, and not published yet. Blocking;
    `Producer.prepare` and `Client.half` make it.

        half = producer.prepare(b"…", group="orders", check_key="17")
        half.commit()

    `commit` publishes the half message, once; `rollback` drops it. If the program does neither, the programs of the
    group are asked for the decision (`Client.on_check`). Both methods raise AlreadyClosed after the close of the
    client."""

    @property
    def id(self) -> TxnId:
        """Returns the id of the half message; its text is `(most,least)`, as the text of a transaction's id is."""
        return self._inner.id

    @property
    def group(self) -> str:
        """Returns the name of the group: the programs that answer for this group decide about the half message if this
        program does not."""
        return self._inner.group

    @property
    def check_key(self) -> str:
        """Returns the `check_key` with which the half message was prepared. A program of the group gets this text when
        it is asked about the half message."""
        return self._inner.check_key

    @property
    def state(self) -> TransactionState:
        """Returns the last state of the half message that this program knows: PREPARED, COMMITTED or ABORTED. Does not
        ask the cluster."""
        return self._inner.state


# ------------------------------------------------------------------------------------------------------ producer


class Producer(ProducerFacade):
    """Publishes messages to one topic. `Client.create_producer` opens it; `close`, or a `with` statement, ends it.

        with client.create_producer("flights", batching_enabled=True) as producer:
            message_id = producer.send(b"UA 1545", partition_key="UA")  # waits until the message is durable
            producer.send_async(b"DL 202", lambda result, message_id: print(result, message_id))
            producer.flush()

    The content is `bytes`, or a value of the producer's schema; None publishes a message without a value, which deletes
    its key in a compacted topic. Times are in ms since the epoch; `deliver_after` is a timedelta. The order of messages
    is kept per partition; all messages of a key go to the same partition.

    Threads: any thread may send. Callbacks are called in the client's loop thread: they must be short, and a blocking
    call there raises Interrupted. Errors: ProducerQueueIsFull at `max_pending_messages` and MemoryBufferIsFull at the
    client's `memory_limit_bytes` (with `block_if_queue_full` the call waits), MessageTooBig, InvalidMessage for a wrong
    value, SendVetoed if a hook refuses the message, Timeout after `send_timeout_millis` (the outcome is unknown),
    ProducerFenced, TopicTerminated, AlreadyClosed."""

    _half = Half

    def __init__(self, client: Callable[[], aio.Client], open_: Callable[[aio.Client], Any]) -> None:
        super().__init__(client, open_)
        self._ready()

    def _ready(self) -> None:
        self._blocks = self._inner.settings.block_if_queue_full
        self._hooks = self._inner.hooks
        self._only: PartitionProducer | None = self._inner.only_plain if self._hooks is None else None

    def _reopen(self) -> None:
        super()._reopen()
        self._ready()

    def _when_dropped(self) -> finalize[..., Any]:
        """Returns the finalizer. A producer with exclusive access retains it until the producer or its client is
        closed, also when the object is dropped."""
        dropped = super()._when_dropped()
        if self._inner.settings.access_mode is not ProducerAccessMode.Shared:
            dropped.detach()
        return dropped

    @property
    def why(self) -> str:
        """Returns the reason why a message failed last, as text; empty if no message failed. If messages of several
        partitions failed, returns the reason of the first of these partitions."""
        return next((each.why for each in self._inner.partitions if each.why), "")

    def send_async(
        self,
        content: Any,
        callback: SendCallback,
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
        expires_at: datetime | int | None = None,
        expires_in: timedelta | float | None = None,
        priority: int | None = None,
    ) -> None:
        """Sends a message and returns at once; `callback(Result, MessageId)` is called in the loop thread when the
        outcome is known. The other parameters are those of `send`.

        Raises ProducerQueueIsFull or MemoryBufferIsFull if there is no room (with `block_if_queue_full` waits for room,
        except in the loop thread), and InvalidMessage, MessageTooBig, CryptoError or AlreadyClosed (or the error that
        ended the producer) before anything is sent; SendVetoed if a hook refuses the message; the exception of a
        `message_router`; and with `txn` TransactionEnded if it is not open, InvalidConfiguration if it is another
        client's. `callback` is not called then."""
        if self._epoch != FORK_COUNT[0]:
            self._reopen()
        if callback is not None and not callable(callback):
            check_message_parameters({"callback": callback})
        only = self._only
        if only is not None and type(content) is bytes and (
            properties is None and partition_key is None and ordering_key is None and sequence_id is None
            and replication_clusters is None and (disable_replication is False or disable_replication is None)
            and event_timestamp is None and deliver_at is None and deliver_after is None
            and expires_at is None and expires_in is None and priority is None
        ):  # fmt: skip
            try:
                if txn is None:
                    only.add(content, callback)
                else:
                    only.add_payload_in_transaction(asyncio_transaction_of(txn), content, callback)
                return
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                if not self._blocks:
                    raise
        extras = Extras(
            properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
            event_timestamp, deliver_at, deliver_after, txn=asyncio_transaction_of(txn),
            expires_at=expires_at, expires_in=expires_in, priority=priority,
        )  # fmt: skip
        self._enqueue(content, callback, extras)

    def _enqueue(
        self, content: Any, callback: SendCallback, extras: Extras, *, hooked: bool = False
    ) -> PartitionProducer:
        if self._hooks is not None and not hooked and self._hooks.is_interested():
            passed = self._hooks.run_send_hooks(self._inner.topic(), content, extras.properties, callback)
            with passed as (changed, properties, sent):
                return self._enqueue(changed, sent, extras._replace(properties=properties), hooked=True)
        while True:
            try:
                return self._inner.enqueue(content, callback, extras)
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                if not self._blocks or self._thread.is_current():
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
        expires_at: datetime | int | None = None,
        expires_in: timedelta | float | None = None,
        priority: int | None = None,
    ) -> MessageId:
        """Sends a message, waits until it is durable and returns its id. Raises the errors of `send_async` if the
        message is refused before it is sent; if it fails later, the exception of its Result, such as Timeout
        (`send_timeout_millis` have passed: it may be stored), TopicTerminated or ProducerFenced. Raises Interrupted in
        the loop thread; CtrlC after Ctrl-C, after which the message may be stored.

        `txn`: the message counts when that transaction commits (docs/transactions.md). `expires_at` (a datetime with a
        time zone, or ms since the epoch) or `expires_in` (a timedelta, or seconds from now): from then on, by the
        broker's clock, consumers do not get the message (docs/sdk.md). `priority`: for a producer with `levels`, the
        level of the message, from 0 for the most urgent one; None: the least urgent one."""
        if self._epoch != FORK_COUNT[0]:
            self._reopen()
        if threading.get_ident() == self._thread.ident:
            raise make_exception_for_result(
                Result.Interrupted, "send() inside a callback would wait for itself; use send_async"
            )
        outcome, producer = _Outcome(), self._only
        if producer is not None and type(content) is bytes and (
            properties is None and partition_key is None and ordering_key is None and sequence_id is None
            and replication_clusters is None and (disable_replication is False or disable_replication is None)
            and event_timestamp is None and deliver_at is None and deliver_after is None and txn is None
            and expires_at is None and expires_in is None and priority is None
        ):  # fmt: skip
            try:
                producer.add(content, outcome)
            except (ProducerQueueIsFull, MemoryBufferIsFull):
                producer = self._enqueue(content, outcome, NO_EXTRAS)
        else:
            extras = Extras(
                properties, partition_key, ordering_key, sequence_id, replication_clusters, disable_replication,
                event_timestamp, deliver_at, deliver_after, txn=asyncio_transaction_of(txn),
                expires_at=expires_at, expires_in=expires_in, priority=priority,
            )  # fmt: skip
            producer = self._enqueue(content, outcome, extras)
        producer.flush_soon()
        acquire_lock(outcome.gate)
        result, message_id = outcome.value
        if result is not Result.Ok:
            raise producer.make_exception(result)
        return message_id


class _Outcome:
    """A callback for whose call a thread waits. It is a lock and no more, because each blocking send has one."""

    __slots__ = ("gate", "value")
    value: tuple[Result, MessageId]

    def __init__(self) -> None:
        self.gate = threading.Lock()  # released with the value
        self.gate.acquire()

    def __call__(self, result: Result, message_id: MessageId) -> None:
        self.value = result, message_id
        self.gate.release()


def _wait_for_memory(memory: SendMemoryLimit | None) -> None:
    if memory is not None and not memory.has_room:
        gate = threading.Lock()
        gate.acquire()
        memory.call_when_memory_is_free(gate.release)
        if not memory.has_room:
            acquire_lock(gate)


def _wait_for_room(producer: PartitionProducer) -> None:
    gate = threading.Lock()
    gate.acquire()
    producer.room.append(gate.release)
    if producer.core.is_full and producer.core.error is None:
        acquire_lock(gate)
