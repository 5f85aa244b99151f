"""Writes rows to topics, for Spark. By default the sink of a stream writes exactly once, and that of a batch query at
least once.

A task has written its rows when every row is acknowledged, that is, synced on the ack quorum. Only then does `write`
return its message to Spark; a row without an acknowledgement fails the task, and Spark runs the task again. If the sink
writes at least once, Spark's commit changes nothing: rows are visible as soon as they are acknowledged, and a task that
ran twice has written its rows twice. Spark writes its checkpoint after all tasks of a batch have ended, so no row is
ever omitted.

A task waits while more than PENDING_ROWS_MAX of its rows are unacknowledged, or `max_pending_messages` rows of one
producer.

Rows: `value` (binary or string, required; null: a tombstone), `key` (binary or string; null: none), `properties` (map)
or `headers` (Kafka's), `topic` (without the option `topic`), `partition` (int; null: by key), `eventTime` (timestamp,
in whole ms; null and 1970-01-01 itself: not set). Columns that only the source has (offset, messageId, …) are ignored,
so that rows that were read can be written; any other column is an error.

**Rows may have values that a message cannot have**: these raise InvalidRequest, which names the column. They are an
`eventTime` before 1970; text in `topic`, `properties` or `headers` that is not UTF-8; a header without a key; a null
among the headers; a partition that the topic lacks. Cases without an error: a null value of a property or header is
written as an empty text; of a header that appears twice the last one counts; a `value` or `key` of type string that is
not UTF-8 is written as its bytes.

**With `schema=registry`** the columns are the fields of the topic's newest schema, and the columns `METADATA_COLUMNS`
of decoding.py. The driver asks for the schema and compares the columns with it when the query starts; all tasks write
by this schema, and their messages name its version.

**Exactly once**: each attempt of a task writes in a transaction of its own, and one commit ends the transactions of a
batch.

    task     batch_transaction(batch)        None: the sink has the batch already; the task writes nothing
             sends its rows, waits for receipts, prepare(until batchTimeout)     returns a `TaskReport`
    driver   commit(messages)                commit_batch: commits all of them in one record, once per batch of a sink
             abort(messages)                 aborts their transactions, unless the sink has the batch

**Why a batch counts once.** Rows are visible only after a commit of their transaction. A sink has one commit for each
batch number, of one complete set of tasks: Spark calls `commit` with the message of one attempt for each partition.
Other attempts are retries, speculation, and tasks of a driver that has crashed. Their rows are in no commit; they are
aborted by the commit of their batch, or by their time-out. Spark begins the next batch after `commit` has returned,
which means that the commit is durable; a batch that runs again finds this commit. Its rows may then be in another
order, or in another number of tasks: the batch counts as it was first committed.

**Order.** offsets/N → tasks → `commit` → commits/N. If `commit` raises, Spark calls `abort`: it names transactions,
never "all of the batch", because a newer run of the batch may be in progress; of a committed batch it aborts nothing.
Errors of an abort are logged: transactions that it did not abort end by their time-out.

**Which batch.** For a stream: sinkId (by default the id of the query) and Spark's number of the batch, which tasks have
as properties. For a batch query, also in foreachBatch: sinkId and batchId; without these options the tasks are
committed together, and a query that runs again writes its rows again. Guards: tests/spark/test_delivery.py,
tests/spark/test_exactly_once.py, `python -m tests.spark.kills`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from ..client.admin import TopicSchema
from ..client.aio import (
    Batch,
    BatchOutcome,
    Client,
    CryptoKeyReader,
    Extras,
    Producer,
    PulsarException,
    Result,
    Transaction,
)
from ..client.common.errors import OutcomeUnknown as CommitUnknown
from ..client.common.errors import ProducerQueueIsFull
from ..client.model.composite_schemas import PreEncodedSchema
from ..client.model.settings import CompressionType
from ..proto.errors import InvalidConfiguration, InvalidName, InvalidRequest, OutcomeUnknown
from ..proto.names import TopicName
from ..proto.schema import SchemaInfo
from ..runtime.clock import SystemClock
from . import decoding as encoding
from .options import SinkOptions, parse_sink_options
from .rows import HEADERS_TYPE
from .shapes import METADATA_PREFIX, find_newest_schema, make_typed_schema

if TYPE_CHECKING:
    import pyarrow as pa


T = TypeVar("T")

TASK_TIMEOUT_S = 900.0
"""Longest time in seconds from a task's first row to its last receipt: the longest transaction time-out that a cluster
allows by default."""
KEPT_BYTES_MAX = 64 << 20
"""Most bytes of a task's rows that are kept with sendAtEnd. Until the rows are sent, readers of the topic do not wait
for the task's transaction."""
OUTCOME_WAIT_S = 120.0
"""Seconds for which the driver asks for the outcome of a commit that got no answer."""
OUTCOME_POLL_S = 1.0
_QUERY, _NUMBER = "sql.streaming.queryId", "streaming.sql.batchId"
"""Names of properties that Spark sets for the tasks of a streaming batch: the id of the query, and the number of the
batch."""


class TaskReport(WriterCommitMessage):
    """The message that a task returns to the Spark driver: the number of rows that it has stored, and with exactly-once
    writing their batch and the id of their prepared transaction (`txn`; None: there were no rows). `is_already`: the
    sink had committed the batch before, so the task wrote nothing."""

    def __init__(
        self, rows: int, batch: Batch | None = None, txn: str | None = None, *, is_already: bool = False
    ) -> None:
        self.rows = rows
        self.batch = batch
        self.txn = txn
        self.is_already = is_already  # an earlier run wrote the batch


def find_batch_of_task(options: SinkOptions, run: str, *, streaming: bool = False) -> Batch | None:
    """Returns the batch that the running Spark task writes; None if the sink writes at least once. `run`: a random id
    of this attempt to run the batch. Raises InvalidConfiguration if a streaming query has no numbers of batches."""
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
    """Ends a batch at the Spark driver: commits or aborts the transactions of its tasks. Does nothing if the sink
    writes at least once."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self.run = uuid4().hex

    def commit(self, messages: Sequence[WriterCommitMessage | None], number: int | None = None) -> None:
        """Commits the transactions of all tasks of a batch, and waits until the commit is durable. `messages`: the
        TaskReport of each task. `number`: the number that Spark gives the batch of a stream; None: a batch query.
        Raises TransactionAborted if a transaction is aborted, SinkFenced if another query writes to the sink,
        OutcomeUnknown if no coordinator answers for OUTCOME_WAIT_S seconds, and the other errors of
        `Client.commit_batch`. Then Spark ends the query, and runs the batch again after a restart."""
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
        """Aborts the transactions of all tasks of a batch, unless the sink has committed the batch. Logs errors and
        does not raise them: a transaction that is not aborted ends by its time-out."""
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
    deadline = _NOW() + OUTCOME_WAIT_S
    while True:
        try:
            return await client.commit_batch(batch, txns)
        except CommitUnknown as error:
            if _NOW() >= deadline:
                raise
            _LOG.warning("%s", error)
            if await _has(client, batch):
                return BatchOutcome.ALREADY
        await asyncio.sleep(OUTCOME_POLL_S)


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


_LOG = logging.getLogger("magnetar.spark")

PENDING_ROWS_MAX = 40_000
"""Most unacknowledged rows of a task. Spark passes 10,000 rows at a time, so that the acknowledgements of four such
batches overlap."""

ADMIN_TIMEOUT_S = 30.0
"""Longest time in seconds of the request for the topic's schemas when the query starts."""

_NOW = SystemClock().monotonic
UNUSED_TRANSACTION_S = 60.0
"""Seconds after which a transaction without a message is replaced by a new one: a coordinator keeps an unused id for
600 s."""

_TYPES: dict[str, tuple[DataType, ...]] = {
    "value": (BinaryType(), StringType()),
    "key": (BinaryType(), StringType()),
    "topic": (StringType(),),
    "partition": (IntegerType(), LongType()),
    "eventTime": (TimestampType(),),
    "properties": (MapType(StringType(), StringType()),),
    "headers": (HEADERS_TYPE,),
}
_SOURCE_ONLY_COLUMNS = {"offset", "messageId", "publishTime", "timestamp", "producerName", "timestampType"}


def check_sink_columns(schema: StructType, options: SinkOptions) -> None:
    """Raises InvalidConfiguration if rows with these columns cannot be written as messages: there is no column `value`,
    no topic, an unknown column, or a column with a wrong type. For sinks without schema=registry."""
    names = {field.name for field in schema}
    if "value" not in names:
        raise InvalidConfiguration(
            "the sink needs a column 'value' (binary or string); make one, for example with to_json(struct(*))"
        )
    for field in schema:
        allowed = _TYPES.get(field.name)
        if allowed is None and field.name not in _SOURCE_ONLY_COLUMNS:
            raise InvalidConfiguration(
                f"column {field.name!r} has no meaning for the sink; it takes {', '.join(_TYPES)}"
            )
        if allowed is not None and not any(_same(field.dataType, one) for one in allowed):
            kinds = " or ".join(one.simpleString() for one in allowed)
            raise InvalidConfiguration(f"column {field.name!r} is {field.dataType.simpleString()}, not {kinds}")
    if options.topic is None and "topic" not in names:
        raise InvalidConfiguration("no topic: set the option 'topic' or give a column 'topic'")
    if {"properties", "headers"} <= names:
        raise InvalidConfiguration("columns 'properties' and 'headers' mean the same; give one of them")


def _same(found: DataType, wanted: DataType) -> bool:
    """Whether the types are equal apart from the nullability of their elements."""
    return found.simpleString() == wanted.simpleString()


class _TaskWriter:
    """The producers of a task, on an event loop that runs only while the task waits."""

    def __init__(self, options: SinkOptions, schema: SchemaInfo | None = None) -> None:
        """Makes the producers of a task. `schema`: of the topic, by which rows are encoded; None: rows have a column
        `value`."""
        self._options = options
        self._encoding = None if schema is None else encoding.RowEncoder(make_typed_schema(options.topic or "", schema))
        self._loop = asyncio.new_event_loop()
        self._client = options.access.client(**options.client)
        settings = dict(options.producer)
        if "compression_type" in settings:
            settings["compression_type"] = _compression(settings["compression_type"])
        self._settings = {
            "max_pending_messages": 4 * PENDING_ROWS_MAX,
            "max_pending_messages_across_partitions": 64 * PENDING_ROWS_MAX, "send_timeout_millis": 120_000, **settings,
        }  # fmt: skip
        if options.public_key_file is not None:
            keys = CryptoKeyReader(options.public_key_file, "")
            self._settings |= {"encryption_keys": options.encryption_keys, "crypto_key_reader": keys}
        if schema is not None:
            self._settings["schema"] = PreEncodedSchema(schema)
        self._producers: dict[tuple[str | None, int | None], Producer] = {}
        self._partitions: dict[str, list[str]] = {}
        self._sent = self._stored = 0
        self._failures: dict[Result, int] = {}
        self._progress = asyncio.Event()
        self._txn: Transaction | None = None
        self._in_txn = Extras()

    def begin(self, batch: Batch) -> bool:
        """Begins a transaction of the batch, to which later rows belong. Returns False if the sink has committed that
        batch already."""
        self._txn = self._loop.run_until_complete(self._client.batch_transaction(batch, TASK_TIMEOUT_S))
        self._in_txn = Extras(txn=self._txn)
        return self._txn is not None

    def prepare(self, until_s: float) -> str | None:
        """Waits until all rows are stored, and prepares their transaction for the commit of the batch. Returns its id;
        None: there were no rows."""
        if not self._sent:
            return None
        assert self._txn is not None, "rows of a batch are sent in a transaction"
        self._loop.run_until_complete(self._txn.prepare(until_s))
        return str(self._txn.id)

    def _on_sent(self, result: Result, _id: object) -> None:
        if result is Result.Ok:
            self._stored += 1
        else:
            self._failures[result] = self._failures.get(result, 0) + 1
        self._progress.set()

    def _producer(self, topic: str | None, partition: int | None = None) -> Producer:
        """Returns the producer of a topic, or of one partition if rows name it; opens it at first use."""
        producer = self._producers.get((topic, partition))
        if producer is None:
            name = _topic_name(topic)
            if partition is not None:
                parts = self._parts(name)
                if not 0 <= partition < len(parts):
                    raise InvalidRequest(f"a row asks for partition {partition} of {name}, which has {len(parts)}")
                name = parts[partition]
            opening = self._client.create_producer(name, **self._settings)
            producer = self._producers[topic, partition] = self._loop.run_until_complete(opening)
        return producer

    def _parts(self, topic: str) -> list[str]:
        if topic not in self._partitions:
            self._partitions[topic] = self._loop.run_until_complete(self._client.get_topic_partitions(topic))
        return self._partitions[topic]

    def write(self, batch: pa.RecordBatch) -> None:
        if self._encoding is not None:
            batch = _encoded(batch, self._encoding)
        names = set(batch.schema.names)
        if self._options.topic is not None and not names & {"key", "partition", "eventTime", "properties", "headers"}:
            self._write_values(self._producer(self._options.topic), _bytes_of(batch, "value"))
        else:
            self._write_rows(batch, names)
        self._sent += batch.num_rows
        self._loop.run_until_complete(self._room(PENDING_ROWS_MAX))

    def _write_values(self, producer: Producer, values: list[bytes | None]) -> None:
        """Writes rows in the common case, values only, at the speed of the SDK."""
        enqueue, done, extras = producer.enqueue, self._on_sent, self._in_txn
        for value in values:
            try:
                enqueue(value, done, extras)
            except ProducerQueueIsFull:
                self._send_when_there_is_room(producer, value, extras)

    def _write_rows(self, batch: pa.RecordBatch, names: set[str]) -> None:
        rows = batch.num_rows

        def column(name: str, read: Callable[[pa.RecordBatch, str], list[Any]]) -> list[Any]:
            return read(batch, name) if name in names else [None] * rows

        topics = column("topic", _texts_of) if self._options.topic is None else [self._options.topic] * rows
        headers = "headers" if "headers" in names else "properties"
        every = zip(
            topics, _bytes_of(batch, "value"), column("key", _bytes_of), column("partition", _texts_of),
            column("eventTime", _ms_of), column(headers, _texts_of), strict=True,
        )  # fmt: skip
        known, done = self._producers, self._on_sent
        for topic, value, key, partition, event_time, properties in every:
            producer = known.get((topic, partition)) or self._producer(topic, partition)
            text, raw = _key(key)
            given = _properties(properties) if properties else None
            extras = Extras(given, text, None, None, None, False, event_time, None, None, raw, txn=self._txn)
            try:
                producer.enqueue(value, done, extras)
            except ProducerQueueIsFull:
                self._send_when_there_is_room(producer, value, extras)

    def _send_when_there_is_room(self, producer: Producer, value: bytes | None, extras: Extras) -> None:
        """Flushes the producer, then sends the row. Raises OutcomeUnknown if another row has failed."""
        while True:
            self._loop.run_until_complete(producer.flush())
            self._check()
            try:
                producer.enqueue(value, self._on_sent, extras)
            except ProducerQueueIsFull:
                continue
            return

    async def _room(self, most: int) -> None:
        """Waits until at most `most` rows are without an acknowledgement. Raises OutcomeUnknown if a row has failed."""
        while not self._failures and self._sent - self._stored > most:
            self._progress.clear()
            await self._progress.wait()
        self._check()

    def _check(self) -> None:
        if self._failures:
            found = ", ".join(f"{count} × {result.name}" for result, count in self._failures.items())
            raise OutcomeUnknown(f"rows without an acknowledgement: {found}; the task has to run again")

    def finish(self) -> TaskReport:
        for producer in self._producers.values():
            self._loop.run_until_complete(producer.flush())
        self._check()
        assert self._stored == self._sent, f"{self._stored} of {self._sent} rows have an acknowledgement"
        return TaskReport(self._stored)

    def close(self) -> None:
        """Closes the client. Never raises, because the outcome was decided by `finish`, or by the error that ended the
        task."""
        try:
            self._loop.run_until_complete(self._client.close())
        except Exception as error:
            _LOG.warning("a producer did not close in order: %s", error)
        self._loop.close()


def _encoded(batch: pa.RecordBatch, by: encoding.RowEncoder) -> pa.RecordBatch:
    """Returns the batch of rows with payloads as the column `value`, in place of the columns of the topic's schema."""
    import pyarrow as pa

    others = [name for name in batch.schema.names if name in encoding.METADATA_COLUMNS]
    columns = [pa.array(by.encode_rows(batch), pa.binary()), *(batch.column(name) for name in others)]
    return pa.RecordBatch.from_arrays(columns, ["value", *(name.removeprefix(METADATA_PREFIX) for name in others)])


def _topic_name(topic: str | None) -> str:
    if topic is None:
        raise InvalidRequest("a row has no topic: its column 'topic' is null and the option 'topic' is not set")
    try:
        return TopicName.parse(topic).full
    except InvalidName as error:
        raise InvalidRequest(f"column 'topic' holds {topic!r}: {error.message}") from error


def _compression(name: str) -> CompressionType:
    for one in CompressionType:
        if one.name.upper() == name.upper():
            return one
    known = ", ".join(one.name for one in CompressionType)
    raise InvalidConfiguration(f"option 'magnetar.producer.compression_type' must be one of {known}, not {name!r}")


def _key(key: bytes | None) -> tuple[str | None, bytes | None]:
    """Returns the message key as text if it is text, else as bytes."""
    if key is None:
        return None, None
    try:
        return key.decode(), None
    except UnicodeDecodeError:
        return None, key


def _bytes_of(batch: pa.RecordBatch, name: str) -> list[bytes | None]:
    """Returns a column of binaries or texts as bytes, without checking for UTF-8."""
    import pyarrow as pa

    found: list[bytes | None] = batch.column(name).cast(pa.binary()).to_pylist()
    return found


def _texts_of(batch: pa.RecordBatch, name: str) -> list[Any]:
    try:
        found: list[Any] = batch.column(name).to_pylist()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"column {name!r} holds text that is not UTF-8: {error}") from error
    return found


def _ms_of(batch: pa.RecordBatch, name: str) -> list[int | None]:
    """Returns a column of timestamps in ms since the epoch, without Python's datetime, which ends with the year 9999.
    Raises InvalidRequest for a time before 1970."""
    import pyarrow as pa

    micros: list[int | None] = batch.column(name).cast(pa.int64()).to_pylist()
    found = [None if each is None else each // 1000 for each in micros]
    if early := [each for each in found if each is not None and each < 0]:
        raise InvalidRequest(f"column {name!r} holds {early[0]} ms: a message has no time before 1970")
    return found


def _properties(found: Any) -> dict[str, str]:
    if not found:
        return {}
    if any(each is None for each in found):
        raise InvalidRequest("column 'headers' holds a null among its headers")
    if isinstance(found[0], Mapping):  # Kafka's headers: {"key", "value" (bytes)}
        return dict(map(_header, found))
    return {key: value or "" for key, value in found}


def _header(header: Mapping[str, Any]) -> tuple[str, str]:
    if header["key"] is None:
        raise InvalidRequest("column 'headers' holds a header without a key")
    try:
        return header["key"], (header["value"] or b"").decode()
    except UnicodeDecodeError as error:
        name = header["key"]
        raise InvalidRequest(
            f"column 'headers' holds {name!r}, which is not UTF-8; properties are text: write for example base64(…)"
        ) from error


def _write(
    options: SinkOptions, iterator: Iterator[pa.RecordBatch], schema: SchemaInfo | None = None,
    batch: Batch | None = None,
) -> TaskReport:  # fmt: skip
    """Writes the rows of a task; returns its report. `batch`: the batch of the rows, if the sink writes
    exactly once."""
    task = _TaskWriter(options, schema)
    try:
        if batch is not None:
            return _write_once(task, options, iterator, batch)
        for each in iterator:
            task.write(each)
        return task.finish()
    finally:
        task.close()


def _write_once(
    task: _TaskWriter, options: SinkOptions, iterator: Iterator[pa.RecordBatch], batch: Batch
) -> TaskReport:
    once, begun_at = options.once, _NOW()
    assert once is not None, "it is asked for"
    kept: list[pa.RecordBatch] = []
    size, keeps = 0, once.send_at_end
    is_new = task.begin(batch)
    for each in iterator:
        if not is_new:
            continue  # Spark wants its rows taken
        kept.append(each)
        size += each.nbytes
        if keeps and size <= KEPT_BYTES_MAX:
            continue
        is_new, keeps = _send(task, kept, batch, begun_at if keeps else None), False
    if is_new and kept:
        is_new = _send(task, kept, batch, begun_at)
    if not is_new:
        return TaskReport(0, batch, is_already=True)
    written = task.finish()
    return TaskReport(written.rows, batch, task.prepare(once.batch_timeout_s))


def _send(task: _TaskWriter, kept: list[pa.RecordBatch], batch: Batch, begun_at: float | None) -> bool:
    """Sends the rows that were held back until the end of the task. `begun_at`: when the transaction was begun if
    nothing was sent since: an unused id becomes void after a while. Returns False if the sink has committed the batch
    in the meantime."""
    if begun_at is not None and _NOW() - begun_at > UNUSED_TRANSACTION_S and not task.begin(batch):
        return False
    for each in kept:
        task.write(each)
    kept.clear()
    return True


class MagnetarWriter(DataSourceArrowWriter):
    """Spark's writer of a batch query: each task sends its rows as messages. Spark calls `write` in each task, and
    `commit` or `abort` at the driver. `schema`: the topic's schema by which rows are encoded; None: rows have a column
    `value`."""

    def __init__(self, options: SinkOptions, schema: SchemaInfo | None = None) -> None:
        self._options, self._schema = options, schema
        self._delivery = BatchCommitter(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batch = find_batch_of_task(self._options, self._delivery.run)
        return _write(self._options, iterator, self._schema, batch)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._delivery.commit(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._delivery.abort(messages)


class MagnetarStreamWriter(DataSourceStreamArrowWriter):
    """Spark's writer of a streaming query: each task sends its rows of a batch as messages. Spark calls `write` in each
    task, and `commit` or `abort` at the driver for each batch. `schema`: the topic's schema by which rows are encoded;
    None: rows have a column `value`."""

    def __init__(self, options: SinkOptions, schema: SchemaInfo | None = None) -> None:
        self._options, self._schema = options, schema
        self._delivery = BatchCommitter(options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        batch = find_batch_of_task(self._options, self._delivery.run, streaming=True)
        return _write(self._options, iterator, self._schema, batch)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._delivery.commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._delivery.abort(messages)


def _plan(
    options: Mapping[str, str], schema: StructType, *, streaming: bool, complete: bool = False
) -> tuple[SinkOptions, SchemaInfo | None]:
    """Returns the options, and the schema with which rows are encoded, or None. Raises InvalidConfiguration if the
    columns are wrong."""
    parsed = parse_sink_options(options, streaming=streaming, complete=complete)
    if not parsed.by_registry:
        check_sink_columns(schema, parsed)
        return parsed, None
    topic = parsed.topic or ""
    known = find_newest_schema(topic, asyncio.run(_schemas(parsed, topic)))
    encoding.check_schema_columns(schema, topic, known)
    _check_types(schema)
    return parsed, known.info


def _check_types(schema: StructType) -> None:
    """Checks the types of the columns besides those of the topic's schema."""
    for field in schema:
        allowed = (
            _TYPES.get(field.name.removeprefix(METADATA_PREFIX)) if field.name in encoding.METADATA_COLUMNS else None
        )
        if allowed is not None and not any(_same(field.dataType, one) for one in allowed):
            kinds = " or ".join(one.simpleString() for one in allowed)
            raise InvalidConfiguration(f"column {field.name!r} is {field.dataType.simpleString()}, not {kinds}")


async def _schemas(options: SinkOptions, topic: str) -> list[TopicSchema]:
    timeout_s = options.client.get("operation_timeout_seconds", ADMIN_TIMEOUT_S)
    async with options.access.admin(timeout_s) as admin:
        return await admin.schemas(topic)


def make_batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> MagnetarWriter:
    """Returns the writer of a batch query. Asks the brokers for the topic's schema with schema=registry. Raises
    InvalidConfiguration if the query overwrites, or for wrong options or columns; with schema=registry also the errors
    of `AdminClient.schemas`."""
    if overwrite:
        raise InvalidConfiguration("a topic cannot be overwritten; use mode('append'), or delete the topic first")
    return MagnetarWriter(*_plan(options, schema, streaming=False))


def make_stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool = False) -> MagnetarStreamWriter:
    """Returns the writer of a streaming query. `overwrite`: the query has the output mode `complete`. Asks the brokers
    for the topic's schema with schema=registry. Raises InvalidConfiguration for wrong options or columns; with
    schema=registry also the errors of `AdminClient.schemas`."""
    return MagnetarStreamWriter(*_plan(options, schema, streaming=True, complete=overwrite))
