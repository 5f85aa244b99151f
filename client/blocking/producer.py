"""The blocking producer: sending without an event loop.

Under load no message costs a future, a contended lock, or a wake-up: `send_async` appends to the batcher from the
calling thread. Callbacks are called in the loop thread: they must be short and must not wait (a blocking call there
raises Interrupted). After a fork the producer opens again, under a new name.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, Self, overload
from weakref import finalize

from ...proto.states import TxnId
from .. import client as aio
from ..common.checks import WrongMessageType, check_message, shown_value
from ..common.closing import EPOCH
from ..common.errors import (
    CtrlC,
    Interrupted,
    MemoryBufferIsFull,
    ProducerQueueIsFull,
    PulsarException,
    Result,
    TransactionEnded,
    exception_of,
)
from ..common.receive_memory import SendMemory
from ..core.batcher import Callback
from ..core.transaction import TransactionState
from ..model.message_id import MessageId
from ..model.options import given
from ..model.settings import ProducerAccessMode
from ..produce.entry_writer import NO_EXTRAS, Extras
from ..produce.partition_producer import PartitionProducer
from ..produce.producer import Half as AsyncHalf
from ..produce.producer import Producer as AsyncProducer
from ..transactions.transaction import LEAVE_S
from ..transactions.transaction import Transaction as AsyncTransaction
from .loop_thread import Handle, LoopThread, acquire, loop_thread, result_of

# --------------------------------------------------------------------------------------------------- transaction
# The blocking transaction, over the asyncio one. It is begun when it is made.
#
#     with client.transaction() as txn:
#         producer.send(b"…", txn=txn)
#         consumer.acknowledge(message, txn=txn)
#
# Ctrl-C in the body aborts. Ctrl-C while it commits: the commit goes on, and the thread waits for its outcome before it
# is interrupted; a second one ends that wait. A transaction stays with the process that began it: after a fork it is
# refused. Guards: tests/client/blocking/test_blocking_transactions.py.


Wait = Literal["durable", "visible"]


def finish(thread: LoopThread, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
    """Waits for the outcome of the work, whatever interrupts the calling thread."""
    if thread.inside():
        work.close()
        raise Interrupted("a transaction ended inside a callback would wait for itself")
    future = asyncio.run_coroutine_threadsafe(work, thread.loop)
    try:
        result_of(future, limit_s)
    except BaseException as error:
        if isinstance(error, PulsarException) and not isinstance(error, CtrlC):
            raise
        if not future.done():
            with suppress(PulsarException):
                result_of(future, limit_s)
        raise


class Bodies(threading.local):
    """The transaction whose body this thread is in."""

    inside: Transaction | None = None


class Transaction:
    """Sends and acknowledgements that count together or not at all. Blocking; `Client.transaction` begins it.

        with client.transaction() as txn:
            producer.send(b"…", txn=txn)
            consumer.acknowledge(message, txn=txn)

    The end of the block commits; an exception in it, or Ctrl-C, aborts. By hand: `commit` and `abort`. Any thread may
    send in it. Errors: TransactionAborted (nothing of it counts: run it again), TransactionEnded, TransactionFenced,
    OutcomeUnknown.
    """

    def __init__(self, client: aio.Client, timeout: float, name: str | None, id_: str | None, bodies: Bodies) -> None:
        self._thread: LoopThread = loop_thread()
        self._epoch = EPOCH[0]
        self._bodies = bodies

        async def begin() -> AsyncTransaction:
            return await client.transaction(timeout, name=name, id=id_)

        begun = client.transaction_now(timeout) if name is None and id_ is None else None
        self._inner = begun if begun is not None else self._thread.run(begin())

    @property
    def id(self) -> TxnId:
        """Returns the transaction's id; its text is `(most,least)`, as Pulsar prints it."""
        return self._inner.id

    @property
    def state(self) -> TransactionState:
        """Returns OPEN, PREPARING, PREPARED, COMMITTING, ABORTING, COMMITTED, ABORTED; ERROR: its end got no answer,
        and `commit` asks again."""
        return self._inner.state

    def inner(self) -> AsyncTransaction:
        """Returns the asyncio transaction. Raises TransactionEnded if it stayed in the parent of this process."""
        if self._epoch != EPOCH[0]:
            raise TransactionEnded("the transaction is of the process before the fork")
        return self._inner

    def commit(self, wait: Wait = "durable") -> None:
        """Returns when its outcome is durable, or (`visible`) when every consumer may see it. Once more is no harm.

        TransactionAborted: nothing of it counts, also when an operation in it failed. TransactionFenced.
        OutcomeUnknown: it is not told; call it again, or ask `transaction_status`.
        """
        self._finish(self.inner().commit(wait))

    def prepare(self, until: float = 0) -> None:
        """Returns when all of it is durable and waits for its end for `until` seconds (0: as long as the cluster
        allows), whatever becomes of this client and of the coordinator. Nothing can be added any more. It is ended by
        `commit` or `abort` here, or by its id from any program: `Client.commit_transaction`, `abort_transaction`.
        Readers wait for it until then. Errors as of `commit`.
        """
        self._finish(self.inner().prepare(until))

    def abort(self, wait: Wait = "durable") -> None:
        """Aborts the transaction: nothing of it counts; what it acknowledged is delivered again. A second call does no
        harm. TransactionEnded: it is committed, or may be."""
        self._finish(self.inner().abort(wait))

    def _finish(self, work: Coroutine[Any, Any, None], limit_s: float | None = None) -> None:
        finish(self._thread, work, limit_s)

    def __enter__(self) -> Self:
        inside = self._bodies.inside
        if inside is not None and inside.state is TransactionState.OPEN:
            raise TransactionEnded("transactions are not nested: this thread is in the body of another one")
        self._bodies.inside = self
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._bodies.inside = None
        if self._epoch != EPOCH[0]:
            return
        state = self.state
        if kind is None:
            ended = TransactionState.ABORTED, TransactionState.ABORTING, TransactionState.PREPARED
            if state not in ended:  # by hand, in the body
                self.commit()
        elif state is TransactionState.OPEN:
            try:
                self._finish(self._inner.abort(), LEAVE_S)
            except CtrlC:
                raise
            except (PulsarException, TimeoutError):  # the time-out of the transaction aborts it
                pass

    def __repr__(self) -> str:
        return repr(self._inner)


@overload
def inner_of(txn: None) -> None: ...
@overload
def inner_of(txn: Transaction) -> AsyncTransaction: ...
def inner_of(txn: object) -> AsyncTransaction | None:
    """Returns the asyncio transaction. InvalidMessage: it is none."""
    if txn is None:
        return None
    if not isinstance(txn, Transaction):
        raise WrongMessageType(f"txn is a transaction of this client, or None, not {shown_value(txn)}")
    return txn.inner()


# ---------------------------------------------------------------------------------------------------------- half
# A half message in blocking code: client/produce/producer.py in the loop thread.
#
#     half = producer.prepare(b"…", group="orders", check_key="17")
#     half.commit()                       or rollback()
#
# Ctrl-C during `commit` and `rollback`: they go on, and the thread waits for the outcome before it is interrupted; a
# second one ends that wait. Ctrl-C during `prepare` rolls back. A half stays with the process that prepared it: after a
# fork it is refused. Guards: tests/client/blocking/test_blocking_halves.py.


class Half:
    """A message, or some, stored and not published. Blocking; `Producer.prepare` and `Client.half` make it.

        half = producer.prepare(b"…", group="orders", check_key="17")
        half.commit()

    `commit` publishes it, once; `rollback` drops it. Without either its group is asked (`Client.on_check`).
    """

    def __init__(self, thread: LoopThread, inner: AsyncHalf) -> None:
        self._thread = thread
        self._half = inner
        self._epoch = EPOCH[0]

    @property
    def id(self) -> TxnId:
        """Returns the half's id; its text is `(most,least)`, as that of a transaction."""
        return self._half.id

    @property
    def group(self) -> str:
        """The programs that decide it when this one is silent."""
        return self._half.group

    @property
    def check_key(self) -> str:
        """Returns the text that the group is asked about: the one that the half was prepared with."""
        return self._half.check_key

    @property
    def state(self) -> TransactionState:
        """Returns PREPARED, COMMITTED or ABORTED, as this program knows it."""
        return self._half.state

    def commit(self) -> None:
        """Returns when it is published for good. Once more is no harm.

        TransactionAborted: it is rolled back. HalfParked: an operator decides. What keeps it from being published
        (TopicTerminated, …): nothing of it counts, and it is parked. OutcomeUnknown: call it again; else the group is
        asked.
        """
        finish(self._thread, self._inner().commit())

    def rollback(self) -> None:
        """Returns when it is dropped for good. Once more is no harm. TransactionEnded: it is committed. HalfParked.
        OutcomeUnknown: call it again; else the group is asked."""
        finish(self._thread, self._inner().rollback())

    def _inner(self) -> AsyncHalf:
        if self._epoch != EPOCH[0]:
            raise TransactionEnded("the half is of the process before the fork")
        return self._half

    def __repr__(self) -> str:
        return repr(self._half)


# ------------------------------------------------------------------------------------------------------ producer


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
