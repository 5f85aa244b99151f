"""Converts entries to Arrow batches: the columns of a query that reads topics, and the builder of its batches.

| column | type | |
|---|---|---|
| key | binary | null when the message has none |
| value | binary (string with valueFormat=string) | null for a tombstone |
| topic | string, not null | full name without the partition |
| partition | int, not null | 0 for a topic without partitions |
| offset | bigint, not null | the message's index in its partition: dense, from 0 |
| messageId | binary, not null | `magnetar.MessageId.deserialize` takes it |
| publishTime | timestamp, not null | also as `timestamp` |
| eventTime | timestamp | null when not set |
| producerName | string, not null | |
| properties | map<string,string> | with includeProperties |

With `schema=registry` the columns of the topic's schema replace the column `value`, and the names of the other columns
begin with `__` (shapes.py).

`columns=kafka` gives Kafka's columns instead: key, value, topic, partition, offset, timestamp, timestampType (0: set by
the producer) and, with includeHeaders=true, headers. A schema given with `.schema(…)` may name any subset in any order:
columns that are not named are not built, which makes column pruning free.

**Messages may have values that a column cannot represent.** For each case there is a rule and no error, because an
error would stop a stream at that offset for ever. `RowBuilder.unfit` counts these values by column, unless the table
says otherwise; the task logs the counts (source.py).

| in the message | in the row |
|---|---|
| event time outside the years 1 … 9999 (given in ns, say) | null |
| publish time outside them | the nearest end, because the column is never null |
| a time above 2**63 | before 1970: Pulsar's Java and C++ clients write negative times so |
| payload that is not UTF-8, with valueFormat=string | U+FFFD in place of the bytes that are no text |
| key marked as base64 that is not | the bytes of its text |
| key that is not UTF-8 | its bytes (proto/entry.py); this one is not counted |
| property that is not UTF-8 | U+FFFD in place of what is no text (proto/entry.py); this one is not counted |
| a property that appears twice | its last value, as `Message.properties()`; this one is not counted |

The Arrow types are exactly those of Spark (`to_arrow_schema`): Spark compares them strictly, including whether a column
may be null. If messages share the values of their entry, a column is built once per batch; otherwise a message costs
one slice and one list append."""

from __future__ import annotations

from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from ..client.aio import StoredEntry
from ..client.common.errors import CryptoError
from ..proto.entry import MessageFields, decode_message_columns, decode_properties, decode_text, parse_entry
from ..proto.entry_filter import passes_filter
from ..proto.entry_pb2 import MessageIdData, SingleMessageMetadata
from ..proto.errors import InvalidConfiguration, NotAllowed
from ..proto.filters import Filter
from ..proto.schema import decode_version
from .offsets import Partition
from .options import SourceOptions
from .shapes import METADATA_PREFIX

if TYPE_CHECKING:
    from .decoding import ColumnDecoder

BATCH_ROWS_MAX = 20_000
"""Most rows of an Arrow batch: the fastest size measured with Spark's `noop` sink (2.9 M rows/s)."""
BATCH_BYTES_MAX = 16 << 20
"""Most bytes of values in an Arrow batch; far below Arrow's limit of 2 GiB for 32-bit binaries."""

TIME_MS_MIN, TIME_MS_MAX = -62_135_596_800_000, 253_402_300_799_999
"""The years 1 … 9999 in ms since the epoch: the range of Spark's TimestampType."""

HEADERS_TYPE = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))


def make_default_columns(options: SourceOptions) -> StructType:
    """Returns the columns of a query that reads messages without decoding them by the topic's schema (without
    schema=registry)."""
    names = ["key", "value", "topic", "partition", "offset"]
    if options.kafka_columns:
        names += ["timestamp", "timestampType", *(["headers"] if options.include_properties else [])]
    else:
        names += [
            "messageId",
            "publishTime",
            "eventTime",
            "producerName",
            *(["properties"] if options.include_properties else []),
        ]
    return StructType([StructField(name, _type(name, options), _COLUMNS[name].nullable) for name in names])


def list_metadata_columns(options: SourceOptions) -> list[StructField]:
    """Returns the columns that a query with schema=registry has in addition to those of the topic's schema, such as the
    key of a message."""
    names = ["key", "topic", "partition", "offset", "messageId", "publishTime", "eventTime", "producerName"]
    names += ["properties"] if options.include_properties else []
    return [StructField(METADATA_PREFIX + name, _COLUMNS[name].type, _COLUMNS[name].nullable) for name in names]


def check_source_columns(schema: StructType, options: SourceOptions) -> None:
    """Checks the table schema that the user of a query gave with `.schema(…)`, for a query without schema=registry.
    Raises InvalidConfiguration for an unknown column, or a column with a wrong type."""
    for wanted in schema:
        if wanted.name not in _COLUMNS:
            raise InvalidConfiguration(f"column {wanted.name!r} does not exist; there are {', '.join(_COLUMNS)}")
        there = _type(wanted.name, options)
        if wanted.dataType != there:
            raise InvalidConfiguration(
                f"column {wanted.name!r} is {there.simpleString()}, not {wanted.dataType.simpleString()}"
            )


def _type(name: str, options: SourceOptions) -> DataType:
    return StringType() if name == "value" and options.value_as_string else _COLUMNS[name].type


class DecodedEntry:
    """A decoded entry: its messages (`fields` and `payloads`, in the order of their indexes), and what they share.
    `first_index`: the index of its first message. `uniform`: whether all messages have the same metadata. `chunk`:
    whether it is a part of a larger message. Raises CorruptEntry if the entry is damaged, CryptoError if it is
    encrypted."""

    __slots__ = (
        "batched", "chunk", "entry_id", "fields", "first_index", "ledger_id", "metadata", "payloads", "producer_name",
        "publish_ms", "schema_version", "size", "uniform",
    )  # fmt: skip

    def __init__(self, stored: StoredEntry) -> None:
        index, header = parse_entry(stored.data)
        if header.metadata.encryption_param:
            raise CryptoError("it is encrypted, and option 'crypto.private.key.file' names no key that decrypts it")
        self.metadata = header.metadata
        self.fields, self.payloads = decode_message_columns(header, stored.data)
        self.uniform = _is_uniform(self.fields)  # one metadata for all, but for the sizes of their payloads
        self.first_index = index - len(self.payloads) + 1
        self.batched, self.publish_ms, self.producer_name = header.batched, header.publish_time, header.producer_name
        self.ledger_id, self.entry_id = stored.ledger_id, stored.entry_id
        self.schema_version = decode_version(header.metadata.schema_version)  # None: none is named
        self.size = max(len(stored.data), header.metadata.uncompressed_size)  # bytes, with those of its messages
        self.chunk = header.metadata.num_chunks_from_msg > 1  # a part of a message


def _is_uniform(fields: list[MessageFields]) -> bool:
    """Whether all messages of an entry have equal metadata. Messages with equal metadata share one object
    (proto/entry.py), so only a few objects are compared."""
    distinct = {id(each): each for each in fields}
    if len(distinct) == 1:
        return True
    return len(distinct) * 8 <= len(fields) and len({_without_size(each) for each in distinct.values()}) == 1


def _without_size(fields: MessageFields) -> bytes:
    found = SingleMessageMetadata.FromString(fields.SerializeToString())
    found.payload_size = 0
    serialized: bytes = found.SerializeToString()
    return serialized


def decode_readable_entry(stored: StoredEntry) -> DecodedEntry:
    """Decodes a stored entry whose messages can become rows, and returns it. Raises CorruptEntry if the entry is
    damaged; NotAllowed if it is a chunk of a large message; CryptoError if it is still encrypted."""
    entry = DecodedEntry(stored)
    if entry.chunk:
        raise NotAllowed("it is a chunk of a larger message, and this source does not assemble chunks")
    return entry


class _Run(NamedTuple):
    """Consecutive rows of a batch that come from one entry."""

    entry: DecodedEntry
    skipped: int  # messages of the entry before the first row
    rows: int

    @property
    def fields(self) -> list[MessageFields]:
        return self.entry.fields[self.skipped : self.skipped + self.rows]


def find_wanted_runs(wanted: Filter, entry: DecodedEntry, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yields the runs of consecutive messages that match the filter `wanted`, of the messages numbers `first` … `end -
    1` of the entry: pairs of the first number of a run and the number after its last one."""
    begin: int | None = None
    for at in range(first, end):
        if passes_filter(wanted, entry.fields[at], len(entry.payloads[at]), entry.metadata):
            begin = at if begin is None else begin
        elif begin is not None:
            yield begin, at
            begin = None
    if begin is not None:
        yield begin, end


class RowBuilder:
    """Collects messages of one partition as rows, and makes Arrow batches of them, for one Spark task. `rows`: the
    number of rows since the last batch. `unfit`: column → the number of values that did not fit it, in all batches."""

    def __init__(
        self, schema: StructType, partition: Partition, message_partition: int, decoding: ColumnDecoder | None = None,
        wanted: Filter | None = None,
    ) -> None:  # fmt: skip
        """Makes a builder. `message_partition`: the partition number in message ids, -1 for a topic without
        partitions. `decoding`: builds the columns of the topic's schema; None: the query has no such columns.
        `wanted`: only messages that it wants become rows; None: all do."""
        self._wanted = wanted
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._types = [f.type for f in self._schema]
        if decoding is None:
            self._builders = [_COLUMNS[f.name].build for f in schema]
        else:
            typed = [f for f in self._schema if not f.name.startswith(METADATA_PREFIX)]
            by_schema = decoding.make_column_builders([f.name for f in typed], [f.type for f in typed])
            self._builders = [
                _COLUMNS[f.name.removeprefix(METADATA_PREFIX)].build
                if f.name.startswith(METADATA_PREFIX)
                else by_schema[f.name]
                for f in self._schema
            ]
        self.topic, self.partition = partition
        self.message_partition = message_partition
        self.unfit: Counter[str] = Counter()  # values that do not fit their column, of all batches
        self._clear()

    def _clear(self) -> None:
        self.rows = self._bytes = 0
        self.runs: list[_Run] = []
        self.values: list[bytes | None] = []

    @property
    def is_full(self) -> bool:
        """Returns whether a batch must be made before more rows are added: it has BATCH_ROWS_MAX rows or
        BATCH_BYTES_MAX bytes."""
        return self.rows >= BATCH_ROWS_MAX or self._bytes >= BATCH_BYTES_MAX

    def add(self, entry: DecodedEntry, at: int, end: int) -> int:
        """Adds the messages of the entry with the indexes `at` … `end - 1` as rows, if they are wanted. Returns the
        index after the last of these messages; `at` if there is none."""
        skipped = max(0, at - entry.first_index)
        last = min(len(entry.payloads), end - entry.first_index)
        if last <= skipped:
            return at
        if self._wanted is None:
            self._add_run(entry, skipped, last)
        else:
            for first, after in find_wanted_runs(self._wanted, entry, skipped, last):
                self._add_run(entry, first, after)
        return entry.first_index + last

    def _add_run(self, entry: DecodedEntry, first: int, end: int) -> None:
        """Adds the messages `first` … `end - 1` of the entry as rows."""
        values: list[bytes | None] = [*entry.payloads[first:end]]
        run = _Run(entry, first, len(values))
        self._bytes += entry.size * run.rows // len(entry.payloads)
        if not entry.uniform or entry.fields[0].null_value:
            values = [None if m.null_value else v for m, v in zip(run.fields, values, strict=True)]
        self.values += values
        self.rows += run.rows
        self.runs.append(run)

    def find_offset_of_row(self, row: int) -> int:
        """Returns the index (offset) of the message in row number `row` of the present batch, from 0. Raises IndexError
        if there is no such row."""
        for run in self.runs:
            if row < run.rows:
                return run.entry.first_index + run.skipped + row
            row -= run.rows
        raise IndexError(row)

    def finish(self) -> pa.RecordBatch:
        """Returns the rows as an Arrow batch, and removes them. Raises InvalidMessage for a payload that does not fit
        its schema, with schemaErrors=fail."""
        arrays = [build(self, type_) for build, type_ in zip(self._builders, self._types, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._clear()
        return batch


# ------------------------------------------------------------------------------------------ the columns
def _spread(builder: RowBuilder, values: pa.Array) -> pa.Array:
    """Repeats the value of each run of rows for each of its rows."""
    if len(values) == builder.rows:
        return values
    ends = pa.array(accumulate(run.rows for run in builder.runs), pa.int32())
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(ends, values))


def _per_entry(builder: RowBuilder, value: Callable[[DecodedEntry], Any], type_: pa.DataType) -> pa.Array:
    return _spread(builder, pa.array([value(run.entry) for run in builder.runs], type_))


def _key_of(m: MessageFields) -> bytes | None:
    """Returns the key of a message. Raises ValueError if it is marked as base64 and is not valid."""
    if m.null_partition_key or not m.HasField("partition_key"):
        return None
    return b64decode(m.partition_key, validate=True) if m.partition_key_b64_encoded else m.partition_key.encode()


def _key_or_text(m: MessageFields) -> bytes | None:
    try:
        return _key_of(m)
    except ValueError:
        return m.partition_key.encode()


def _is_wrong_key(m: MessageFields) -> bool:
    try:
        _key_of(m)
    except ValueError:
        return True
    return False


def _per_message(builder: RowBuilder, function: Callable[[MessageFields], Any]) -> list[Any]:
    """Returns `function(metadata)` for each row. For an entry whose messages share their metadata calls it
    only once."""
    result: list[Any] = []
    for run in builder.runs:
        if run.entry.uniform:
            result += [function(run.entry.fields[0])] * run.rows
        else:
            result += map(function, run.fields)
    return result


def _signed(ms: int) -> int:
    """Returns a time with its sign: entries store times as unsigned numbers, and Java and C++ clients write negative
    times as numbers above 2**63."""
    return ms - (1 << 64) if ms >> 63 else ms


def _key(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    try:
        return pa.array(_per_message(builder, _key_of), type_)
    except ValueError:  # binascii.Error is one
        builder.unfit["key"] += sum(_per_message(builder, _is_wrong_key))
        return pa.array(_per_message(builder, _key_or_text), type_)


def _value(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    if not pa.types.is_string(type_):
        return pa.array(builder.values, type_)
    try:
        return pa.array(builder.values, pa.binary()).cast(type_)
    except pa.ArrowInvalid:
        found = [None if value is None else value.decode("utf-8", "replace") for value in builder.values]
        pairs = zip(builder.values, found, strict=True)
        builder.unfit["value"] += sum(text is not None and text.encode() != value for value, text in pairs)
        return pa.array(found, type_)


def _topic(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(builder.topic, type_), builder.rows)


def _partition(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(builder.partition, type_), builder.rows)


def _offset(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    """Returns the column of offsets: the row number plus a constant of each run."""
    before = accumulate((run.rows for run in builder.runs), initial=0)
    ahead = [run.entry.first_index + run.skipped - at for run, at in zip(builder.runs, before, strict=False)]
    return pc.add(_spread(builder, pa.array(ahead, type_)), _counting(builder.rows))


_COUNTING = pa.nulls(0, pa.int64())  # `pa.array` would import pandas


def _counting(count: int) -> pa.Array:
    """Returns the numbers 0 … count - 1."""
    global _COUNTING
    if len(_COUNTING) < count:
        _COUNTING = pa.array(range(count), pa.int64())
    return _COUNTING.slice(0, count)


def _message_id(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    """Returns the column of message ids: the part that all messages of an entry share, followed by the batch index."""
    partition = builder.message_partition
    shared = [
        MessageIdData(ledgerId=run.entry.ledger_id, entryId=run.entry.entry_id, partition=partition).SerializeToString()
        for run in builder.runs
    ]
    numbers = _batch_numbers(max(run.skipped + run.rows for run in builder.runs), type_)
    alone = pa.array([b""], type_)
    ends = [numbers.slice(run.skipped, run.rows) if run.entry.batched else alone for run in builder.runs]
    return pc.binary_join_element_wise(_spread(builder, pa.array(shared, type_)), pa.concat_arrays(ends), b"")


_NUMBERS = pa.nulls(0, pa.binary())


def _batch_numbers(count: int, type_: pa.DataType) -> pa.Array:
    """Returns the encoded field `batch_index` of MessageIdData for at least 0 … count - 1."""
    global _NUMBERS
    if len(_NUMBERS) < count:
        empty = len(MessageIdData(ledgerId=0, entryId=0).SerializeToString())
        each = (MessageIdData(ledgerId=0, entryId=0, batch_index=number) for number in range(count))
        _NUMBERS = pa.array([data.SerializeToString()[empty:] for data in each], type_)
    return _NUMBERS


def _publish_time(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    if any(run.entry.publish_ms > TIME_MS_MAX for run in builder.runs):
        return _publish_time_within(builder).view(type_)
    return _per_entry(builder, lambda entry: entry.publish_ms * 1000, pa.int64()).view(type_)


def _publish_time_within(builder: RowBuilder) -> pa.Array:
    """Returns the publish times in µs. A time outside the range of years that a column can store is replaced by the
    nearest end of that range."""
    exact = [_signed(run.entry.publish_ms) for run in builder.runs]
    nearest = [min(max(ms, TIME_MS_MIN), TIME_MS_MAX) for ms in exact]
    pairs = zip(builder.runs, nearest, exact, strict=True)
    builder.unfit["publishTime"] += sum(run.rows for run, near, ms in pairs if near != ms)
    return _spread(builder, pa.array([ms * 1000 for ms in nearest], pa.int64()))


def _event_time(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    try:
        return pa.array(_per_message(builder, _event_us), pa.int64()).view(type_)
    except OverflowError:
        exact = [_signed(ms) for ms in _per_message(builder, lambda m: m.event_time)]
        held = [ms * 1000 if ms and TIME_MS_MIN <= ms <= TIME_MS_MAX else None for ms in exact]
        builder.unfit["eventTime"] += sum(us is None and ms != 0 for us, ms in zip(held, exact, strict=True))
        return pa.array(held, pa.int64()).view(type_)


def _event_us(m: MessageFields) -> int | None:
    """Returns the event time in µs. Raises OverflowError if it is after the year 9999."""
    ms: int = m.event_time
    if ms > TIME_MS_MAX:
        raise OverflowError(ms)
    return ms * 1000 if ms else None


def _producer_name(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    return _per_entry(builder, lambda entry: entry.producer_name, type_)


def _properties(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    if not any(map(_has_properties, builder.runs)):
        none, begins = pa.array([], pa.string()), pa.repeat(pa.scalar(0, pa.int32()), builder.rows + 1)
        return pa.MapArray.from_arrays(begins, none, none, type=type_)
    return pa.array(_per_message(builder, _pairs), type_)


def _has_properties(run: _Run) -> bool:
    fields = run.entry.fields[:1] if run.entry.uniform else run.fields
    return any(each.properties for each in fields)


def _pairs(m: MessageFields) -> list[tuple[str, str]]:
    return list(decode_properties(m).items())


def _headers(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    of = lambda m: [{"key": decode_text(p.key), "value": decode_text(p.value).encode()} for p in m.properties] or None
    return pa.array(_per_message(builder, of), type_)


def _timestamp_type(builder: RowBuilder, type_: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(0, type_), builder.rows)


class _Column(NamedTuple):
    type: DataType
    nullable: bool
    build: Callable[[RowBuilder, pa.DataType], pa.Array]


_COLUMNS: dict[str, _Column] = {
    "key": _Column(BinaryType(), True, _key),
    "value": _Column(BinaryType(), True, _value),
    "topic": _Column(StringType(), False, _topic),
    "partition": _Column(IntegerType(), False, _partition),
    "offset": _Column(LongType(), False, _offset),
    "messageId": _Column(BinaryType(), False, _message_id),
    "publishTime": _Column(TimestampType(), False, _publish_time),
    "timestamp": _Column(TimestampType(), False, _publish_time),
    "eventTime": _Column(TimestampType(), True, _event_time),
    "producerName": _Column(StringType(), False, _producer_name),
    "properties": _Column(MapType(StringType(), StringType()), True, _properties),
    "timestampType": _Column(IntegerType(), False, _timestamp_type),
    "headers": _Column(HEADERS_TYPE, True, _headers),
}
