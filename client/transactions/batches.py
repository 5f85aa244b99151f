"""Transactions that commit together, and once: what a sink such as Spark's needs, which writes batches by many tasks.

    batch = Batch("orders", query_id, 17, run)
    txn = await client.batch_transaction(batch)       None: the sink has batch 17 already; there is nothing to write
    await producer.send(b"…", txn=txn)
    await txn.prepare(until=86400)                    from here on it needs neither this client nor its coordinator
    await client.commit_batch(batch, [txn.id, …])     from any process: all of them, in one record; or ALREADY

**Once.** A sink has a number, of the last batch that was committed, at the coordinator of its id. `commit_batch`
commits the transactions and that number in one record, and it is ALREADY where the number is as large. What was begun
for the batch and is not in the record is aborted then. So the rows of a batch count once, however often some were
written.
**No sink.** With `sink_id` empty the transactions commit together, and nothing is kept of the batch; all of one `run`
have one coordinator.
Guards: tests/client/transactions/test_batches.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from ...proto import wire_pb2 as wire
from ...proto.errors import MagnetarError
from ...proto.transactions import TxnId, TxnState, coordinator_of
from ..common.checks import TEXT, YES_OR_NO, Table, WrongValue, check, instance, whole
from ..common.errors import InvalidTxnStatusError, OutcomeUnknown, translate
from .coordinators import Coordinators

NUMBER_MAX = (1 << 63) - 1


class Batch(NamedTuple):
    """A try at one batch of one query.

    `adopt`: another query takes the sink over, and its numbers begin anew; else SinkFenced.
    """

    sink_id: str
    query_id: str
    number: int
    run: str = ""  # random, of the try
    adopt: bool = False

    def check(self) -> None:
        """Checks the values. Raises InvalidConfiguration."""
        check(_TABLE, self._asdict())
        if not (self.sink_id or self.run):
            raise WrongValue("a batch has a sink_id, or a run")


_TABLE: Table = {
    "sink_id": TEXT, "query_id": TEXT, "number": whole(0, NUMBER_MAX), "run": TEXT, "adopt": YES_OR_NO,
}
BATCH = instance(Batch, optional=False)


class BatchOutcome(Enum):
    """The outcome of `commit_batch`: the rows count now, or those of an earlier try count already."""

    COMMITTED = "COMMITTED"
    ALREADY = "ALREADY"


class SinkStatus(NamedTuple):
    """The status of a sink: the last batch that was committed, and whose it is."""

    query_id: str
    batch: int  # the last one that was committed


async def begin(coordinators: Coordinators, batch: Batch, timeout_ms: int) -> TxnId | None:
    """Begins a transaction of the batch; None: the sink has the batch already. Raises SinkFenced."""
    request = wire.BeginRequest(coordinator=await _home(coordinators, batch), count=1, timeout_ms=timeout_ms)
    if batch.sink_id:
        request.sink.CopyFrom(_tag(batch))
    reply: wire.BeginReply = await coordinators.ask(request.coordinator, "Begin", request)
    return None if reply.already else TxnId(reply.first.most, reply.first.least)


async def commit(coordinators: Coordinators, batch: Batch, txns: Sequence[TxnId]) -> BatchOutcome:
    """Commits the transactions of a batch. TransactionAborted: one of them is, and nothing is committed. SinkFenced.
    OutcomeUnknown: no coordinator told."""
    number = await _home(coordinators, batch)
    if not txns and not batch.sink_id:
        return BatchOutcome.COMMITTED
    request = wire.CommitBatchRequest(coordinator=number)
    if batch.sink_id:
        request.sink.CopyFrom(_tag(batch._replace(run="")))
    for txn in dict.fromkeys(txns):
        request.items.add(verb=wire.EndItem.COMMIT).txn.CopyFrom(wire.TransactionId(most=txn.most, least=txn.least))
    try:
        reply: wire.CommitBatchReply = await coordinators.ask(number, "CommitBatch", request)
    except MagnetarError as error:
        if error.definite and not error.retryable:
            raise
        raise OutcomeUnknown(
            f"batch {batch.number} of sink {batch.sink_id!r}: its commit got no answer ({error.message}); ask"
            " sink_status, or commit it again"
        ) from error
    return BatchOutcome.ALREADY if reply.already else BatchOutcome.COMMITTED


async def sink_status(coordinators: Coordinators, sink_id: str) -> SinkStatus | None:
    """Returns the status of a sink. None: nothing was committed for it."""
    number = coordinator_of(sink_id, await coordinators.count())
    request = wire.SinkRequest(coordinator=number, sink_id=sink_id)
    reply: wire.SinkReply = await coordinators.ask(number, "SinkStatus", request)
    return SinkStatus(reply.query_id, reply.batch) if reply.known else None


async def end_prepared(coordinators: Coordinators, txn: TxnId, *, is_commit: bool) -> None:
    """Ends a transaction that another program may have prepared. An open one is only aborted: what was stored of it is
    known to its own client alone."""
    state, error = await coordinators.status(txn)
    if error is not None:
        raise translate(error) from error
    if is_commit and state is TxnState.OPEN:
        raise InvalidTxnStatusError(f"transaction {txn} is open: its own client commits it, or prepares it")
    item = wire.EndItem(verb=wire.EndItem.COMMIT if is_commit else wire.EndItem.ABORT)
    item.txn.most, item.txn.least = txn
    state, error = await coordinators.end(item)
    if error is not None:
        raise translate(error) from error
    if state is not (TxnState.COMMITTED if is_commit else TxnState.ABORTED):
        raise InvalidTxnStatusError(f"transaction {txn} is {state.name.lower()}")


async def _home(coordinators: Coordinators, batch: Batch) -> int:
    return coordinator_of(batch.sink_id or batch.run, await coordinators.count())


def _tag(batch: Batch) -> wire.SinkTag:
    return wire.SinkTag(
        sink_id=batch.sink_id, query_id=batch.query_id, batch=batch.number, run=batch.run, adopt=batch.adopt
    )
