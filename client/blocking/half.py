"""A half message in blocking code: client/produce/half.py in the loop thread.

    half = producer.prepare(b"…", group="orders", check_key="17")
    half.commit()                       or rollback()

Ctrl-C during `commit` and `rollback`: they go on, and the thread waits for the outcome before it is interrupted; a
second one ends that wait. Ctrl-C during `prepare` rolls back. A half stays with the process that prepared it: after a
fork it is refused. Guards: tests/client/blocking/test_blocking_halves.py.
"""

from __future__ import annotations

from ...proto.transactions import TxnId
from ..common.errors import TransactionEnded
from ..common.fork import EPOCH
from ..core.transaction import TransactionState
from ..produce.half import Half as AsyncHalf
from .loop_thread import LoopThread
from .transaction import finish


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
