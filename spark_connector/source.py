"""Reads topics, for Spark: the batch and streaming interfaces of Spark over ranges of message indexes.

Where the methods run (Spark's rules): all methods but `read` run in one long-lived Python process at the driver, one
call after the other. `read` runs in forked, reused Python workers on the executors, with a pickled copy of the reader.
So a reader has only options and decisions; connections are in ranges.py, one per process, made when they are first
used.

A streaming batch is a pair of offsets that Spark writes to its checkpoint before anything is read; `partitions(start,
end)` depends only on the two offsets and on the messages that the topic still has, so a retried batch reads the same
messages. Spark calls `commit(end)` for the *previous* batch when it plans the next one: a durable subscription lags by
one batch, which is safe. For the source a topic ends before the first message of an open transaction. Aborted messages
keep their indexes and become no rows; they do not count as lost.

**A query retains its unread messages by itself**, with a durable subscription whose name contains the query's id in its
checkpoint. Spark passes that id only to tasks. So in each batch the first task of a partition creates the subscription,
if it does not exist, and moves it to the start of the batch. It may do so because Spark plans a batch after all earlier
batches are committed. With the option `subscription` or `durableCursor=true` the driver does this, with a subscription
of that name; with `durableCursor=false` there is no subscription."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from ..client.aio import StoredEntry
from ..client.common.errors import TopicNotFound as NoSuchTopic
from ..proto.errors import DataLost, InvalidConfiguration, MagnetarError, TopicNotFound
from ..proto.filters import parse_filter
from ..proto.names import TopicName
from ..proto.schema import SchemaInfo
from ..runtime.clock import SystemClock
from . import offsets as decide
from .decoding import ColumnDecoder
from .offsets import (
    UNKNOWN_INCARNATIONS,
    AvailableRange,
    IncarnationByPartition,
    IndexByPartition,
    MessageRange,
    Partition,
)
from .options import EARLIEST_OFFSET, LATEST_OFFSET, Offsets, SourceOptions
from .ranges import PartitionIncarnation, QueryConnection, get_query_connection
from .rows import RowBuilder, decode_readable_entry
from .shapes import find_reader_schema

if TYPE_CHECKING:
    import pyarrow as pa

_LOG = logging.getLogger("magnetar.spark")

QUERY_ID_PROPERTY = "sql.streaming.queryId"
"""Name of the task property in which Spark passes the id of a query; the checkpoint has the id, so it is the same over
all restarts."""
QUERY_PREFIX = "spark-query-"
"""Prefix of the names of the subscriptions that queries create for themselves; `magnetar spark` recognizes them by
it."""


class RangeTask(InputPartition):
    """The work of one Spark task: to read the messages `first` … `end - 1` of one partition, in the incarnation that
    was planned. `done`: in the first task of a partition, the index before which all earlier batches are committed;
    None in its other tasks. `name`: the name of the partition; empty: the topic has no partitions."""

    def __init__(self, range_: MessageRange, done: int | None = None, name: str = "") -> None:
        super().__init__(range_)
        self.range, self.done = range_, done
        self.part = PartitionIncarnation(name or range_.partition[0], range_.incarnation)


def _resolve(
    wanted: Offsets | int,
    times: dict[str, dict[int, int]] | int | None,
    available: Mapping[Partition, AvailableRange],
    asked: QueryConnection,
    on_none: str,
) -> IndexByPartition:
    """Converts the offsets of an option (words, Kafka's JSON) and times to indexes. Times override offsets (Kafka's
    rule)."""
    index: IndexByPartition = {}
    for (topic, number), there in available.items():
        at = wanted if isinstance(wanted, int) else wanted.get(topic, {}).get(number, EARLIEST_OFFSET)
        index[topic, number] = there.earliest if at == EARLIEST_OFFSET else there.end if at == LATEST_OFFSET else at
    unknown = [] if isinstance(wanted, int) else [(t, n) for t, ns in wanted.items() for n in ns if (t, n) not in index]
    if unknown:
        raise InvalidConfiguration(
            f"offsets are given for {unknown}, which the query does not read; there are {sorted(index)}"
        )
    if times is None:
        return index
    for partition in index:
        at_ms = times if isinstance(times, int) else times.get(partition[0], {}).get(partition[1])
        if at_ms is None:
            continue
        found = asked.find_index_by_time(partition, at_ms)
        if found >= available[partition].end and on_none == "error":
            raise InvalidConfiguration(
                f"no message of {partition} was published at or after {at_ms} ms; "
                "set startingOffsetsByTimestampStrategy=latest to begin at the end"
            )
        index[partition] = found
    return index


def _tasks(
    options: SourceOptions, names: Mapping[Partition, TopicName], start: IndexByPartition, end: IndexByPartition,
    available: Mapping[Partition, AvailableRange], begun: IncarnationByPartition = UNKNOWN_INCARNATIONS,
    planned: IncarnationByPartition = UNKNOWN_INCARNATIONS,
) -> list[InputPartition]:  # fmt: skip
    """Returns the tasks that read from `start` to `end`. `names`: of the available partitions. `begun`, `planned`: the
    incarnations to which `start` and `end` belong."""
    whole, lost = decide.plan_readable_ranges(start, end, available, begun, planned)
    _report(lost, options)
    parts = decide.split_into_task_ranges(whole, options.min_partitions, options.max_records_per_partition)
    tasks: list[InputPartition] = []
    seen: set[Partition] = set()
    for each in sorted(parts):
        done = None if each.partition in seen else start.get(each.partition, each.first)
        if done is not None and decide.is_other_incarnation(begun.get(each.partition, 0), each.incarnation):
            done = each.first
        tasks.append(RangeTask(each, done, names[each.partition].full))
        seen.add(each.partition)
    return tasks


def _report(lost: Sequence[decide.LostMessages], options: SourceOptions) -> None:
    """Reports messages that a query cannot read: raises DataLost, or logs a warning with failOnDataLoss=false."""
    if not lost:
        return
    text = "; ".join(
        f"{topic} partition {number}: wanted {item.wanted}, there {item.there}: {item.reason}"
        for item in lost
        for topic, number in [item.partition]
    )
    if options.fail_on_data_loss:
        raise DataLost(f"some messages do not exist any more: {text}. Set failOnDataLoss=false to go on without them")
    _LOG.warning("messages skipped (failOnDataLoss=false): %s", text)


def _read(options: SourceOptions, schema: StructType, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """Yields Arrow batches of the range of one task, in order, each message once."""
    if not isinstance(partition, RangeTask):  # Spark's stand-in for an empty list of partitions
        return
    try:
        yield from _rows(options, schema, partition)
    except (TopicNotFound, NoSuchTopic) as error:
        wanted = partition.range
        _report([decide.LostMessages(wanted.partition, wanted.first, wanted.end, error.message)], options)


def _rows(options: SourceOptions, schema: StructType, partition: RangeTask) -> Iterator[pa.RecordBatch]:
    """Yields Arrow batches. Raises TopicNotFound, or the client's NoSuchTopic, if the topic was deleted since the task
    was planned, and perhaps created again."""
    wanted, part = partition.range, partition.part
    asked, at = get_query_connection(options), wanted.first
    if options.by_query and partition.done is not None and (query := _query()) is not None:
        asked.acknowledge_before(part, query, partition.done)
    decoding = _decoding(options, asked, schema, wanted.partition[0], part) if options.by_registry else None
    only = parse_filter(options.wanted) if options.wanted is not None else None
    builder = RowBuilder(schema, wanted.partition, TopicName.parse(part.name).partition, decoding, only)
    gaps: list[tuple[int, int]] = []
    for entries in asked.read_range(part, wanted.first, wanted.end):
        for stored in entries:
            try:
                entry = decode_readable_entry(stored)
            except MagnetarError as error:
                at = _unreadable(options, wanted, at, stored, error)
                continue
            if entry.first_index > at:
                gaps.append((at, entry.first_index))
            at = builder.add(entry, at, wanted.end)
            if builder.is_full:
                yield builder.finish()
    if at < wanted.end:
        gaps.append((at, wanted.end))
    if gaps:
        _check_gaps(options, asked, partition, gaps)
    if builder.rows:
        yield builder.finish()
    if builder.unfit:
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(builder.unfit.items()))
        _LOG.warning("%s: values that do not fit their column, by the rules of docs/spark.md: %s", wanted, counts)


def _query() -> str | None:
    """Returns the subscription of the streaming query to which the running task belongs; None: the query is
    no stream."""
    from pyspark import TaskContext

    task = TaskContext.get()
    found = task.getLocalProperty(QUERY_ID_PROPERTY) if task is not None else None
    return QUERY_PREFIX + found if found else None


def _decoding(
    options: SourceOptions, asked: QueryConnection, schema: StructType, topic: str, part: PartitionIncarnation
) -> ColumnDecoder:
    """Returns a ColumnDecoder with the topic's current schemas. It must be made before entries are read: reading
    another incarnation than that of `part` fails, so entries and schemas belong to one topic. Missing schemas are
    fetched later."""
    listed = asked.list_schemas(topic)
    known = {each.version: each.schema for each in listed}

    def fetch_schema_version(version: int) -> SchemaInfo:
        if version not in known:
            known[version] = asked.get_schema(topic, version)
            asked.check_incarnation(part)
        return known[version]

    return ColumnDecoder(
        find_reader_schema(topic, listed, schema), fetch_schema_version, is_strict=options.strict_schema
    )


def _unreadable(
    options: SourceOptions, wanted: MessageRange, at: int, stored: StoredEntry, error: MagnetarError
) -> int:
    """Handles an entry of which no rows can be made; returns the index after it. With failOnDataLoss raises the error,
    with the entry's position."""
    end = max(at, min(stored.end_index, wanted.end))
    (topic, number), place = wanted.partition, f"entry ({stored.ledger_id}, {stored.entry_id})"
    text = f"messages {at} to {end - 1} of {topic} partition {number}, {place}, cannot be read: {error.message}"
    if options.fail_on_data_loss or stored.end_index <= at:
        raise type(error)(f"{text}; set failOnDataLoss=false to go on without them", **error.fields) from error
    _LOG.warning("%s (failOnDataLoss=false)", text)
    return end


def _check_gaps(
    options: SourceOptions, asked: QueryConnection, task: RangeTask, gaps: list[tuple[int, int]]
) -> None:
    """Checks indexes for which there is no row: those of aborted transactions are no loss, all others are. Raises
    DataLost, or logs a warning."""
    first, end = gaps[0][0], gaps[-1][1]
    missing = sum(after - at for at, after in gaps)
    lost = missing - asked.count_aborted(task.part, first, end)
    if lost <= 0:
        return
    topic, number = task.range.partition
    which = f"messages {first} to {end - 1}"
    if len(gaps) > 1 or lost < missing:
        which = f"{lost} of the {which}"
    text = f"{which} of {topic} partition {number} do not exist any more"
    if options.fail_on_data_loss:
        raise DataLost(f"{text}; set failOnDataLoss=false to go on without them")
    _LOG.warning("%s (failOnDataLoss=false)", text)


def _incarnations_of(available: Mapping[Partition, AvailableRange]) -> dict[Partition, int]:
    return {p: each.incarnation for p, each in available.items()}


def _limit_to(target: AvailableRange, there: AvailableRange) -> AvailableRange:
    """Returns `there` limited to the target; if the partition was created again since the target was set, an empty
    range."""
    if decide.is_other_incarnation(target.incarnation, there.incarnation):
        return there._replace(end=there.earliest, bytes=0)
    return there._replace(end=min(there.end, target.end))


class MagnetarReader(DataSourceReader):
    """Spark's reader of a batch query: reads the messages between two offsets, which are fixed when Spark plans the
    query at the driver (`partitions`). `read` then reads the range of one task, in a worker."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options, self.schema = options, schema

    def partitions(self) -> Sequence[InputPartition]:
        options, asked = self.options, get_query_connection(self.options)
        available = asked.read_available(anew=True)
        start = _resolve(
            EARLIEST_OFFSET if options.starting is None else options.starting,
            options.starting_times,
            available,
            asked,
            options.on_no_offset_for_time,
        )
        end = _resolve(options.ending, options.ending_times, available, asked, "latest")
        return _tasks(options, asked.known_partitions, start, end, available)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self.options, self.schema, partition)


class MagnetarStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's reader of a streaming query. It supports limits for each batch (admission control), Trigger.AvailableNow,
    and a durable subscription that retains the messages that Spark has not committed. Spark calls `read` in workers and
    all other methods at the driver."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self.options, self.schema = options, schema
        self._target: dict[Partition, AvailableRange] | None = None  # of Trigger.AvailableNow: where all reading ends
        self._clock = SystemClock()
        self._waiting_since: float | None = None  # for minOffsetsPerTrigger
        self._at: IndexByPartition = {}  # the end of the batch that was planned last

    def initialOffset(self) -> dict[str, Any]:
        options, asked = self.options, get_query_connection(self.options)
        starting = LATEST_OFFSET if options.starting is None else options.starting
        available = asked.read_available(anew=True)
        start = _resolve(starting, options.starting_times, available, asked, options.on_no_offset_for_time)
        return decide.offset_to_json(start, _incarnations_of(available))

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self.options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Returns the offset at the end of the next batch, as JSON; `start` itself if there is nothing to read, or less
        than minOffsetsPerTrigger. With failOnDataLoss, raises DataLost if a topic was created again since `start`.
        Raises InvalidRequest if `start` is no offset of this source, and the errors of
        `QueryConnection.read_available`."""
        options = self.options
        begin, made = decide.parse_offset(start), decide.parse_incarnations(start)
        available = get_query_connection(self.options).read_available()
        _report(decide.find_recreated_partitions(begin, available, made), options)
        anew = decide.reset_recreated_partitions(begin, available, made)
        if self._target is not None:
            available = {p: _limit_to(self._target[p], a) for p, a in available.items() if p in self._target}
        unlimited = isinstance(limit, ReadAllAvailable)
        self._at = anew
        if not unlimited and self._target is None and self._too_few(anew, available):
            return start
        end = decide.find_batch_end(
            anew,
            available,
            None if unlimited else options.max_offsets_per_trigger,
            None if unlimited else options.max_bytes_per_trigger,
        )
        now, self._at = {**made, **_incarnations_of(available)}, end
        unchanged = end == begin and not any(decide.is_other_incarnation(made[p], now[p]) for p in begin)
        return start if unchanged else decide.offset_to_json(end, now)

    def _too_few(self, begin: IndexByPartition, available: Mapping[Partition, AvailableRange]) -> bool:
        minimum = self.options.min_offsets_per_trigger
        waiting = sum(max(0, a.end - begin.get(p, a.earliest)) for p, a in available.items())
        now = self._clock.monotonic()
        if minimum is None or waiting >= minimum:
            self._waiting_since = None
            return False
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if waiting and now - self._waiting_since >= self.options.max_trigger_delay_s:
            self._waiting_since = None
            return False
        return True

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = get_query_connection(self.options).read_available(anew=True)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return decide.make_progress_report(self._at, get_query_connection(self.options).read_available())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        begun, planned = decide.parse_incarnations(start), decide.parse_incarnations(end)
        asked = get_query_connection(self.options)
        available, first, last = asked.read_available(), decide.parse_offset(start), decide.parse_offset(end)
        return _tasks(self.options, asked.known_partitions, first, last, available, begun, planned)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self.options, self.schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        if self.options.subscription is not None:
            made = decide.parse_incarnations(end)
            get_query_connection(self.options).acknowledge_up_to_offset(
                decide.parse_offset(end), made, self.options.subscription
            )

    def stop(self) -> None:
        get_query_connection(self.options).close()
