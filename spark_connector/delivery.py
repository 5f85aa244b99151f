"""Exactly once: a transaction for each attempt of a task, and one commit for the batch.

    task     batch_transaction(batch)        the sink has the batch already: the rows are taken, and nothing is written
             sends its rows, awaits receipts, prepare(until batchTimeout)        its message: `TaskReport`
    driver   commit(messages)                commit_batch: all of them in one record, once for each batch of a sink
             abort(messages)                 aborts those, unless the sink has the batch

**Why once.** Rows are visible only by a commit of their transaction. A sink has one commit for each number of a batch,
of one complete set of tasks: Spark calls `commit` with the message of one attempt of each partition. What other
attempts wrote (retries, speculation, tasks of a driver that is dead) is in no commit, and is aborted by the commit of
their batch, or by its deadline. Spark goes on to the next batch when `commit` returned, which means that the commit is
durable; a batch that runs again finds it. It does not matter whether its rows come again in the same order, or in as
many tasks: the batch counts as it was first committed.

**Order.** offsets/N → tasks → `commit` → commits/N. When `commit` raises, Spark calls `abort`: it names transactions,
never "all of the batch", since a newer run may be at work; of a batch that is committed it aborts nothing. Errors of an
abort are logged: time ends what it did not.

**Which batch.** Of a stream: sinkId (else the id of the query) and Spark's number of the batch, which tasks have as
properties. Of a batch query, also in foreachBatch: sinkId and batchId; without them the tasks commit together, and a
query that runs again writes again.
Guards: tests/spark/test_delivery.py, tests/spark/test_exactly_once.py, `python -m tests.spark.kills`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from ..client.aio import Batch, BatchOutcome, Client, PulsarException
from ..client.common.errors import OutcomeUnknown
from ..proto.errors import InvalidConfiguration
from ..runtime.clock import SystemClock
from .options import SinkOptions

T = TypeVar("T")
_NOW = SystemClock().monotonic
_LOG = logging.getLogger("magnetar.spark")

TASK_TIMEOUT_S = 900.0
"""Seconds from a task's first row to its last receipt: the longest that a cluster allows by default."""
KEPT_BYTES_MAX = 64 << 20
"""Most bytes of a task's rows with sendAtEnd. Until they are sent, readers of the topic do not wait for the task."""
OUTCOME_S = 120.0
"""Seconds that the driver asks what became of a commit that got no answer."""
BETWEEN_QUESTIONS_S = 1.0
_QUERY, _NUMBER = "sql.streaming.queryId", "streaming.sql.batchId"
"""Properties that Spark sets for the tasks of a batch of a stream."""


class TaskReport(WriterCommitMessage):
    """The message of a task to the driver: how many rows it stored, and in which transaction of which batch."""

    def __init__(
        self, rows: int, batch: Batch | None = None, txn: str | None = None, *, is_already: bool = False
    ) -> None:
        self.rows = rows
        self.batch = batch
        self.txn = txn
        self.is_already = is_already  # an earlier run wrote the batch


def batch_of_task(options: SinkOptions, run: str, *, streaming: bool = False) -> Batch | None:
    """Returns the batch that the running task writes; None if the sink writes at least once. `run`: random, of this
    run of the batch."""
    once, context = options.once, TaskContext.get()
    if once is None:
        return None
    query = (context.getLocalProperty(_QUERY) or "") if context is not None else ""
    if not streaming:
        if once.batch_id is None:
            return Batch("", query, 0, run)
        return Batch(once.sink_id, query, once.batch_id, run, once.adopt)
    number = context.getLocalProperty(_NUMBER) if context is not None else None
    if not query or number is None:
        raise InvalidConfiguration(
            "deliveryGuarantee=exactly-once needs a query of micro-batches; a continuous one has no numbers of batches"
        )
    return Batch(once.sink_id or f"spark-{query}", query, int(number), run, once.adopt)


class BatchCommitter:
    """Ends a batch at the driver: commits or aborts the transactions of its tasks. Does nothing if the sink writes at
    least once."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self.run = uuid4().hex

    def commit(self, messages: Sequence[WriterCommitMessage | None], number: int | None = None) -> None:
        """Commits the transactions of a batch. `number`: of the batch of a stream, from Spark. Raises
        TransactionAborted, SinkFenced or OutcomeUnknown; then Spark ends the query, and runs the batch again after a
        restart."""
        written = [each for each in messages if isinstance(each, TaskReport) and each.batch is not None]
        if self._options.once is None or not written:
            return
        batch = written[0].batch
        assert batch is not None, "it was asked for"
        batches = {each.batch._replace(run="") for each in written if each.batch is not None}
        assert len(batches) == 1, f"tasks of one batch wrote {batches}"
        assert number is None or number == batch.number, f"tasks of batch {number} wrote {batch.number}"
        assert len(written) == len(messages), "a batch is committed with the message of every task"
        txns = [each.txn for each in written if each.txn is not None]
        outcome = self._ask(lambda client: _committed(client, batch, txns))
        rows = sum(each.rows for each in written)
        _LOG.info("batch %d of sink %s: %s, %d rows", batch.number, batch.sink_id, outcome.name, rows)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Aborts the transactions of a batch. Never raises: errors are logged."""
        written = [each for each in messages if isinstance(each, TaskReport) and each.txn is not None]
        if self._options.once is None or not written:
            return
        try:
            self._ask(lambda client: _aborted(client, written))
        except Exception as error:
            _LOG.warning("the transactions of a failed batch end by their time-out: %s", error)

    def _ask(self, question: Callable[[Client], Awaitable[T]]) -> T:
        options = self._options

        async def asked() -> T:
            client = options.access.client(**options.client)
            try:
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(asked())


async def _committed(client: Client, batch: Batch, txns: Sequence[str]) -> BatchOutcome:
    deadline = _NOW() + OUTCOME_S
    while True:
        try:
            return await client.commit_batch(batch, txns)
        except OutcomeUnknown as error:
            if _NOW() >= deadline:
                raise
            _LOG.warning("%s", error)
            if await _has(client, batch):
                return BatchOutcome.ALREADY
        await asyncio.sleep(BETWEEN_QUESTIONS_S)


async def _has(client: Client, batch: Batch) -> bool:
    """Whether the sink has committed the batch. False also if no coordinator answers."""
    if not batch.sink_id:
        return False
    try:
        found = await client.sink_status(batch.sink_id)
    except PulsarException as error:
        _LOG.warning("sink %s: %s", batch.sink_id, error)
        return False
    return found is not None and found.query_id == batch.query_id and found.batch >= batch.number


async def _aborted(client: Client, written: Sequence[TaskReport]) -> None:
    batch = written[0].batch
    if batch is None or await _has(client, batch):
        return
    for each in written:
        if each.txn is None:
            continue
        try:
            await client.abort_transaction(each.txn)
        except PulsarException as error:
            _LOG.warning("transaction %s of batch %d is not aborted: %s", each.txn, batch.number, error)
