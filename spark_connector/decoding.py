"""Converts message payloads to columns by a topic's schema, for reading (`ColumnDecoder`), and columns to payloads, for
writing (`RowEncoder`).

JSON is decoded by field names, with a Struct that msgspec makes from the definition, whichever version of the schema
wrote it; Avro is decoded with the definition of its writer, resolved to that of the reader. A message that names no
version is decoded with the reader's schema. A field that a payload lacks has its default, or null.

**A payload that does not fit its schema**, or has a value that the column's type cannot represent (a decimal with too
many digits, a time that microseconds cannot represent): with schemaErrors=fail raises InvalidMessage, which names the
message; with schemaErrors=null all typed columns of the row are null, and `RowBuilder.unfit` counts the row. The work
is linear in the rows of a batch: only if a batch contains such a value is each value tried alone.

Also in this file: `make_arrow_column`, which converts values that msgspec decoded from JSON to an Arrow column."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import astuple
from pyspark.sql.types import DataType, StructType

from ..client.common.errors import InvalidMessage
from ..client.model.composite_schemas import (
    PRIMITIVE_SCHEMAS,
    collect_named_types,
    make_avro_decoder,
    make_avro_encoder,
    parse_avro_definition,
)
from ..proto.errors import InvalidConfiguration, InvalidRequest, InvalidSchema, SchemaNotFound
from ..proto.schema import SchemaInfo, SchemaType
from .shapes import METADATA_PREFIX, ColumnField, DataTypeMapping, TypedSchema, select_record_fields

if TYPE_CHECKING:
    from .rows import RowBuilder

# ------------------------------------------------------------------------------------------------------- columns
# Values that msgspec decoded from JSON, to Arrow: a column at a time.
#
# Arrow takes a list of plain values fast. Of the others it is given the parts: a record is a Struct, and its fields are
# columns of their own, with a mask where it is null; of arrays and maps it gets all items as one column, and where each
# begins. So a value inside costs as much as one at the top.


def make_arrow_column(cells: Sequence[Any], shape: DataTypeMapping) -> pa.Array:
    """Returns an Arrow column of the type `shape.raw` with the values `cells`, which may contain None. Raises one of
    ARROW_VALUE_ERRORS if the type cannot represent a value."""
    if shape.is_plain or not cells:
        return pa.array(cells, shape.raw)
    if not shape.parts:
        return _texts(cells, shape.raw)
    if pa.types.is_struct(shape.raw):
        return _records(cells, shape)
    items = chain.from_iterable(filter(None, cells))
    if pa.types.is_list(shape.raw):
        return pa.ListArray.from_arrays(_begins(cells), make_arrow_column(list(items), shape.parts[0]), type=shape.raw)
    keys = pa.array(list(items), pa.string())
    values = list(chain.from_iterable(each.values() for each in cells if each))
    return pa.MapArray.from_arrays(_begins(cells), keys, make_arrow_column(values, shape.parts[0]), type=shape.raw)


def _texts(cells: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Returns a column of text; a number, such as one of an enum, becomes its digits."""
    try:
        return pa.array(cells, type_)
    except (pa.ArrowException, TypeError):
        return pa.array([each if each is None or isinstance(each, str) else str(each) for each in cells], type_)


def _records(cells: Sequence[Any], shape: DataTypeMapping) -> pa.Array:
    blank = (None,) * len(shape.parts)
    rows = [blank if each is None else astuple(each) for each in cells]
    parts = [make_arrow_column(part, of) for part, of in zip(zip(*rows, strict=True), shape.parts, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=list(shape.raw), mask=pa.array([each is None for each in cells]))


def _begins(cells: Sequence[Any]) -> pa.Array:
    """Returns the offsets of a list column: where the items of each cell begin, null for a null cell, and the end."""
    begins = accumulate((len(each) if each else 0 for each in cells), initial=0)
    nulls = chain((each is None for each in cells), (False,))
    return pa.array([None if null else at for at, null in zip(begins, nulls, strict=True)], pa.int32())


# ------------------------------------------------------------------------------------------------------ decoding


Decode = Callable[[bytes], Any]
ROWS_PER_PIECE = 2000
"""Rows that exist as Python objects at the same time: 20,000 rows do not fit into the caches of a processor, and cost a
tenth more."""
PAYLOAD_ERRORS = (ValueError, RecursionError, InvalidMessage)
"""Errors of decoding a payload: errors of msgspec are ValueErrors, or RecursionError for a payload that is nested too
deeply."""
ARROW_VALUE_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of Arrow for a value that its type cannot represent."""


class SchemaVersionLookup(Protocol):
    """The interface of the function that returns one version of the topic's schema, for the number that a message
    names. Raises SchemaNotFound if the topic never had this version."""

    def __call__(self, version: int) -> SchemaInfo: ...


BuildColumn = Callable[["RowBuilder", pa.DataType], pa.Array]


class ColumnDecoder:
    """Decodes the payloads of one topic's messages to columns, for one Spark task. `reader`: the schema of the columns;
    `versions`: returns the schemas with which messages were written. `is_strict`: whether a payload that does not fit
    its schema raises InvalidMessage; otherwise the typed columns of its row are null."""

    def __init__(self, reader: TypedSchema, versions: SchemaVersionLookup, *, is_strict: bool) -> None:
        self._reader, self._versions, self._is_strict = reader, versions, is_strict
        self._cells: dict[str, pa.Array] = {}

    def make_column_builders(self, names: Sequence[str], types: Sequence[pa.DataType]) -> dict[str, BuildColumn]:
        """Returns, by column name, functions that build the columns `names`, which have the Arrow types `types`. A
        RowBuilder calls each function once for each of its batches; the first one that it calls decodes the rows for
        all of them. Must be called once. Raises InvalidSchema if the schema has a field whose default is not of its
        type."""
        wanted = dict(zip(names, types, strict=True))
        if self._reader.info.type is SchemaType.JSON:
            self._reader = self._reader._replace(record=select_record_fields(self._reader.record, wanted))
            self._json: Decode = msgspec.json.Decoder(self._reader.record.json).decode
        self._decoders: dict[int | None, Decode] = {None: self._decoder(self._reader.info)}
        self._fields = {each.name: each for each in self._reader.record.fields}
        self._blank = _blank(self._reader)

        def make_column_builder(name: str) -> BuildColumn:
            def build(rows: RowBuilder, type_: pa.DataType) -> pa.Array:
                if not self._cells:
                    with disable_garbage_collector():
                        self._cells = self._columns(rows, wanted)
                return self._cells.pop(name)

            return build

        return {name: make_column_builder(name) for name in names}

    def _columns(self, builder: RowBuilder, wanted: dict[str, pa.DataType]) -> dict[str, pa.Array]:
        pieces = [self._piece(builder, first, rows, wanted) for first, rows in self._decoded(builder)]
        return {name: pa.concat_arrays([each[name] for each in pieces]) for name in wanted}

    def _piece(
        self, builder: RowBuilder, first: int, rows: list[Any], wanted: dict[str, pa.DataType]
    ) -> dict[str, pa.Array]:
        try:
            return self._arrays(rows, wanted)
        except ARROW_VALUE_ERRORS:
            self._without_unfit(builder, first, rows, wanted)
            return self._arrays(rows, wanted)

    # ------------------------------------------------------------------------------ payloads to rows
    def _decoded(self, builder: RowBuilder) -> Iterator[tuple[int, list[Any]]]:
        """Yields (number of the first row, decoded rows) in pieces of whole runs, each of about ROWS_PER_PIECE rows or
        more."""
        first, blank = 0, self._blank
        rows: list[Any] = []
        for run in builder.runs:
            at = first + len(rows)
            values = builder.values[at : at + run.rows]
            try:
                decode = self._decode_of(run.entry.schema_version)
            except PAYLOAD_ERRORS as error:
                decode = _refusing(error)
            try:
                rows += [blank if value is None else decode(value) for value in values]
            except PAYLOAD_ERRORS:
                rows += [self._one(builder, decode, value, at + number) for number, value in enumerate(values)]
            if len(rows) >= ROWS_PER_PIECE:
                yield first, rows
                first, rows = at + run.rows, []
        if rows:
            yield first, rows

    def _one(self, builder: RowBuilder, decode: Decode, value: bytes | None, row: int) -> Any:
        try:
            return self._blank if value is None else decode(value)
        except PAYLOAD_ERRORS as error:
            return self._unfit(builder, row, error)

    def _unfit(self, builder: RowBuilder, row: int, error: Exception) -> Any:
        """Returns a row of nulls for a payload that does not fit its schema. Raises InvalidMessage with
        schemaErrors=fail."""
        if self._is_strict:
            raise InvalidMessage(
                f"message {builder.find_offset_of_row(row)} of {builder.topic} partition {builder.partition} is not of "
                f"its schema: {_said(error)}; set schemaErrors=null to read null in its place"
            ) from error
        builder.unfit["schema"] += 1
        return self._blank

    def _decode_of(self, version: int | None) -> Decode:
        found = self._decoders.get(version)
        if found is None:
            assert version is not None
            try:
                found = self._decoder(self._versions(version))
            except (SchemaNotFound, InvalidSchema, InvalidConfiguration) as error:
                found = _refusing(InvalidMessage(error.message))
            self._decoders[version] = found
        return found

    def _decoder(self, writer: SchemaInfo) -> Decode:
        reader = self._reader.info
        if writer.type is not reader.type:
            said = f"it was written as {writer.type.name}, and the query reads {reader.type.name}"
            return _refusing(InvalidMessage(said))
        if writer.type is SchemaType.JSON:  # by names, whichever version wrote it
            return self._json
        if writer.type is SchemaType.AVRO:
            return self._avro(writer)
        return PRIMITIVE_SCHEMAS[writer.type].decode

    def _avro(self, writer: SchemaInfo) -> Decode:
        own = self._reader.record.avro
        if writer.data == self._reader.info.data:
            return make_avro_decoder(own)
        written = _plain(parse_avro_definition(writer))
        if isinstance(own, dict) and isinstance(written, dict) and "name" in own and "name" in written:
            written = {**written, "name": own["name"]}  # programs name their classes as they like
        return make_avro_decoder(written, own)

    # ------------------------------------------------------------------------------ rows to columns
    def _arrays(self, rows: list[Any], wanted: dict[str, pa.DataType]) -> dict[str, pa.Array]:
        cells = self._cells_of(rows)
        return {name: self._array(cells[name], name, type_) for name, type_ in wanted.items()}

    def _cells_of(self, rows: list[Any]) -> Mapping[str, Sequence[Any]]:
        """Returns the values of each field."""
        if self._reader.record.is_single:
            return dict.fromkeys(self._fields, rows)
        if self._reader.info.type is SchemaType.JSON:
            return dict(zip(self._fields, zip(*map(astuple, rows), strict=True), strict=True))
        return {name: list(map(itemgetter(name), rows)) for name in self._fields}

    def _array(self, cells: Sequence[Any], name: str, type_: pa.DataType) -> pa.Array:
        field = self._fields[name]
        return _converted(make_arrow_column(cells, field.shape), field, type_)

    def _without_unfit(self, builder: RowBuilder, first: int, rows: list[Any], wanted: dict[str, pa.DataType]) -> None:
        """Replaces by a row of nulls each row with a value that its column cannot represent."""
        cells = self._cells_of(rows)
        for name, type_ in wanted.items():
            try:
                self._array(cells[name], name, type_)
            except ARROW_VALUE_ERRORS:
                for row, cell in enumerate(cells[name]):
                    try:
                        self._array([cell], name, type_)
                    except ARROW_VALUE_ERRORS as error:
                        if rows[row] is not self._blank:  # by another of its fields
                            rows[row] = self._unfit(builder, first + row, ValueError(f"field {name!r}: {error}"))


def _converted(found: pa.Array, field: ColumnField, type_: pa.DataType) -> pa.Array:
    shape = field.shape
    if shape.unit != shape.raw:
        found = found.cast(shape.unit)
    return found if type_ == shape.unit else found.cast(type_, safe=not _has_nanos(shape.unit))


def _has_nanos(type_: pa.DataType) -> bool:
    """Whether the type has nanoseconds, which are truncated: Spark's times have microseconds."""
    if pa.types.is_timestamp(type_):
        return bool(type_.unit == "ns")
    return any(_has_nanos(type_.field(at).type) for at in range(type_.num_fields))


def _blank(reader: TypedSchema) -> Any:
    """Returns a row whose fields are all null."""
    record, fields = reader.record, reader.record.fields
    if record.is_single:
        return None
    if reader.info.type is SchemaType.JSON:
        return record.json(*[None] * len(fields))
    return dict.fromkeys(each.name for each in fields)


def _plain(schema: Any) -> Any:
    """Returns the Avro schema without logical types other than decimal: the reader's schema represents times as
    numbers, so the writer's must, too."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = () if schema.get("logicalType") == "decimal" else ("logicalType",)
    kept = {key: value for key, value in schema.items() if key not in left_out and not key.startswith("__")}
    for key in ("type", "items", "values"):
        if key in kept:
            kept[key] = _plain(kept[key])
    if "fields" in kept:
        kept["fields"] = [_plain(each) for each in kept["fields"]]
    return kept


def _refusing(error: Exception) -> Decode:
    def refuse(payload: bytes) -> Any:
        raise InvalidMessage(_said(error))

    return refuse


def _said(error: Exception) -> str:
    return error.message if isinstance(error, InvalidMessage) else str(error)


@contextmanager
def disable_garbage_collector() -> Iterator[None]:
    """Returns a context manager that disables Python's garbage collector while its `with` block runs, if it was
    enabled. Rows have no reference cycles, and searching for cycles takes 2.7 of the 4.5 µs of a row with ten fields of
    JSON."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ------------------------------------------------------------------------------------------------------ encoding
# Columns of a batch to payloads, by a schema of the topic; and whether the columns of a frame are those of the schema.
#
# The driver checks the columns before anything runs: each is a field of the schema, of its type (shapes.py), and each
# field that has no default and cannot be null has a column. A field without a column is written as its default, or
# null. A column of `METADATA_COLUMNS` says something else of the message; those that only the source has are left out,
# so that rows that were read can be written.
#
# A row that the schema does not take ends its task with InvalidRequest, which names the column: null in a field that
# has no null, a symbol that an enum does not have, NaN in JSON, a time that the schema's unit does not reach. Times are
# cut to the unit of the schema.


METADATA_COLUMNS = {f"{METADATA_PREFIX}{name}" for name in ("key", "partition", "eventTime", "properties")}
SOURCE_ONLY_COLUMNS = {
    f"{METADATA_PREFIX}{name}" for name in ("topic", "offset", "messageId", "publishTime", "producerName")
}


def check_schema_columns(schema: StructType, topic: str, known: TypedSchema) -> None:
    """Checks the columns of a query that writes to `topic`. Raises InvalidConfiguration, which names the column, if a
    column is not a field of the topic's schema or has another type, or if a required field has no column."""
    fields = {each.name: each for each in known.record.fields}
    for column in schema:
        if column.name in METADATA_COLUMNS | SOURCE_ONLY_COLUMNS:
            continue
        field = fields.get(column.name)
        if field is None:
            raise InvalidConfiguration(
                f"column {column.name!r} is no field of the schema of {topic}, which has {', '.join(fields)}; "
                f"others are {', '.join(sorted(METADATA_COLUMNS))}"
            )
        if not _same(column.dataType, field.shape.spark):
            raise InvalidConfiguration(
                f"column {column.name!r} is {column.dataType.simpleString()}, and in the schema of {topic} it is "
                f"{field.shape.spark.simpleString()}: cast it"
            )
    for name in fields.keys() - {column.name for column in schema}:
        if not (fields[name].shape.nullable or fields[name].has_default):
            raise InvalidConfiguration(
                f"column {name!r} is missing: in the schema of {topic} it has no default and cannot be null"
            )


def _same(found: DataType, wanted: DataType) -> bool:
    """Whether the types are equal apart from nullability, which is checked in each row."""
    return found.simpleString() == wanted.simpleString()


class RowEncoder:
    """Encodes rows as message payloads by the schema of one topic, for one Spark task. The columns must have passed
    `check_schema_columns`."""

    def __init__(self, known: TypedSchema) -> None:
        self._known = known
        self._fields = {each.name: each for each in known.record.fields}
        self._names: dict[str, Any] = {}
        if known.record.is_single and known.info.type in PRIMITIVE_SCHEMAS:
            self._encode: Callable[[Any], bytes] = PRIMITIVE_SCHEMAS[known.info.type].encode
        elif known.info.type is SchemaType.AVRO:
            self._names = collect_named_types(parse_avro_definition(known.info))
            self._encode = make_avro_encoder(known.record.avro)
        else:
            self._names = collect_named_types(parse_avro_definition(known.info))
            self._encode = msgspec.json.Encoder(decimal_format="number").encode

    def encode_rows(self, batch: pa.RecordBatch) -> list[bytes | None]:
        """Returns the message payload of each row; None for a row without a value. A field without a column is encoded
        as its default, or null. Raises InvalidRequest, which names the column, if a row does not fit the schema."""
        cells = {name: self._cells(batch, name) for name in batch.schema.names if name in self._fields}
        try:
            if self._known.record.is_single:
                # a single value that is null is a message without a value
                return [None if each is None else self._encode(each) for each in cells["value"]]
            encode, names = self._encode, (*self._absent(cells), *cells)
            absent = self._absent(cells)
            columns = [*([value] * batch.num_rows for value in absent.values()), *cells.values()]
            return [encode(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]
        except (InvalidMessage, ValueError, TypeError, OverflowError) as error:
            said = error.message if isinstance(error, InvalidMessage) else str(error)
            raise InvalidRequest(f"a row does not fit the schema of its topic: {said}") from error

    def _absent(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the defaults of fields without a column, for JSON; Avro's library adds them itself."""
        if self._known.info.type is not SchemaType.JSON:
            return {}
        return {name: field.default for name, field in self._fields.items() if name not in cells}

    def _cells(self, batch: pa.RecordBatch, name: str) -> list[Any]:
        field = self._fields[name]
        column = batch.column(name)
        if not self._known.record.is_single or self._names:
            self._check(column, self._definition(field), name)
        try:
            cells = self._raw(column, field).to_pylist()
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"column {name!r} holds text that is not UTF-8: {error}") from error
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise InvalidRequest(f"column {name!r} holds a value that its field cannot: {error}") from error
        with_maps = _with_maps(field.shape.raw)
        return cells if with_maps is None else [None if each is None else with_maps(each) for each in cells]

    def _raw(self, column: pa.Array, field: ColumnField) -> pa.Array:
        unit, raw = field.shape.unit, field.shape.raw
        if column.type != unit:
            column = column.cast(unit, safe=not _is_coarse(unit))
        return column if unit == raw else column.cast(raw)

    def _definition(self, field: ColumnField) -> Any:
        record = self._known.record
        if record.is_single:
            return record.avro
        return next(each["type"] for each in record.avro["fields"] if each["name"] == field.name)

    def _check(self, column: pa.Array, definition: Any, path: str) -> None:
        """Raises InvalidRequest if an Arrow column has a value that its field does not allow. Checks whole columns,
        also nested ones."""
        if isinstance(definition, list):
            column = column.drop_null()
            definition = next(each for each in definition if each != "null")
        if column.null_count:
            raise InvalidRequest(f"column {path!r} holds null, and its field cannot be null")
        if isinstance(definition, str):
            definition = self._names.get(definition, definition)
        kind = definition["type"] if isinstance(definition, dict) else definition
        if kind in ("record", "error"):
            fields = ((each["name"], each["type"]) for each in definition["fields"])
            for (name, type_), inner in zip(fields, column.flatten(), strict=True):
                self._check(inner, type_, f"{path}.{name}")
        elif kind == "array":
            self._check(column.flatten(), definition["items"], f"{path}[]")
        elif kind == "map":
            items = column.cast(pa.list_(pa.struct([("key", pa.string()), ("value", column.type.item_type)]))).flatten()
            self._check(items.field("value"), definition["values"], f"{path}{{}}")
        elif kind == "enum":
            self._refuse(column, pc.is_in(column, pa.array(definition["symbols"], column.type)), "no symbol", path)
        elif kind in ("float", "double") and self._known.info.type is SchemaType.JSON:
            self._refuse(column, pc.is_finite(column), "no number of JSON", path)

    def _refuse(self, column: pa.Array, fits: pa.Array, what: str, path: str) -> None:
        wrong = column.filter(pc.invert(fits))
        if len(wrong):
            raise InvalidRequest(f"column {path!r} holds {wrong[0].as_py()!r}, which is {what} of its field")


def _is_coarse(type_: pa.DataType) -> bool:
    """Returns True if the type contains times in milliseconds and no times in nanoseconds. Digits below a millisecond
    are then truncated."""
    units = _units(type_)
    return "ms" in units and "ns" not in units


def _units(type_: pa.DataType) -> set[str]:
    if pa.types.is_timestamp(type_):
        return {type_.unit}
    return {unit for at in range(type_.num_fields) for unit in _units(type_.field(at).type)}


def _with_maps(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """Returns a function that converts Arrow's maps, lists of pairs, to the dicts that encoders expect; None: the type
    has no map."""
    if pa.types.is_map(type_):
        value = _with_maps(type_.item_type) or _same_value
        return lambda pairs: {key: None if each is None else value(each) for key, each in pairs}
    if pa.types.is_list(type_):
        item = _with_maps(type_.value_type)
        return None if item is None else lambda items: [None if each is None else item(each) for each in items]
    if not pa.types.is_struct(type_):
        return None
    found = {type_.field(at).name: _with_maps(type_.field(at).type) for at in range(type_.num_fields)}
    inner = {name: convert for name, convert in found.items() if convert is not None}
    if not inner:
        return None

    def converted(record: dict[str, Any]) -> dict[str, Any]:
        return record | {name: convert(record[name]) for name, convert in inner.items() if record[name] is not None}

    return converted


def _same_value(value: Any) -> Any:
    return value
