"""The blocking transaction, over the asyncio one. It is begun when it is made.

    with client.transaction() as txn:
        producer.send(b"…", txn=txn)
        consumer.acknowledge(message, txn=txn)

Ctrl-C in the body aborts. Ctrl-C while it commits: the commit goes on, and the thread waits for its outcome before it
is interrupted; a second one ends that wait. A transaction stays with the process that began it: after a fork it is
refused. Guards: tests/client/blocking/test_blocking_transactions.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Literal, Self, overload

from ...proto.transactions import TxnId
from .. import client as aio
from ..common.checks import WrongMessageType, shown
from ..common.errors import CtrlC, Interrupted, PulsarException, TransactionEnded
from ..common.fork import EPOCH
from ..core.transaction import TransactionState
from ..transactions.transaction import LEAVE_S
from ..transactions.transaction import Transaction as AsyncTransaction
from .loop_thread import LoopThread, loop_thread
from .waits import result_of

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
        raise WrongMessageType(f"txn is a transaction of this client, or None, not {shown(txn)}")
    return txn.inner()
