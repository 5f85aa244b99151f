"""Columns of a batch to payloads, by a schema of the topic; and whether the columns of a frame are those of the schema.

The driver checks the columns before anything runs: each is a field of the schema, of its type (shapes.py), and each
field that has no default and cannot be null has a column. A field without a column is written as its default, or null.
A column of `METADATA` says something else of the message; those that only the source has are left out, so that rows
that were read can be written.

A row that the schema does not take ends its task with InvalidRequest, which names the column: null in a field that has
no null, a symbol that an enum does not have, NaN in JSON, a time that the schema's unit does not reach. Times are cut
to the unit of the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import DataType, StructType

from ...client.common.errors import InvalidMessage
from ...client.model.payloads import SINGLE, avro_definition, avro_writer, names_of
from ...proto.errors import InvalidConfiguration, InvalidRequest
from ...proto.schema import SchemaType
from .registry import META, Typed
from .shapes import Field

METADATA = {f"{META}{name}" for name in ("key", "partition", "eventTime", "properties")}
SOURCE_ONLY = {f"{META}{name}" for name in ("topic", "offset", "messageId", "publishTime", "producerName")}


def check_columns(schema: StructType, topic: str, known: Typed) -> None:
    """Raises InvalidConfiguration, which names the column."""
    fields = {each.name: each for each in known.record.fields}
    for column in schema:
        if column.name in METADATA | SOURCE_ONLY:
            continue
        field = fields.get(column.name)
        if field is None:
            raise InvalidConfiguration(
                f"column {column.name!r} is no field of the schema of {topic}, which has {', '.join(fields)}; "
                f"others are {', '.join(sorted(METADATA))}"
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
    """Whether the types are equal but for what may be null: each row is looked at."""
    return found.simpleString() == wanted.simpleString()


class Encoding:
    """The encoding of one topic, for one task."""

    def __init__(self, known: Typed) -> None:
        self._known = known
        self._fields = {each.name: each for each in known.record.fields}
        self._names: dict[str, Any] = {}
        if known.record.is_single and known.info.type in SINGLE:
            self._encode: Callable[[Any], bytes] = SINGLE[known.info.type].encode
        elif known.info.type is SchemaType.AVRO:
            self._names = names_of(avro_definition(known.info))
            self._encode = avro_writer(known.record.avro)
        else:
            self._names = names_of(avro_definition(known.info))
            self._encode = msgspec.json.Encoder(decimal_format="number").encode

    def payloads(self, batch: pa.RecordBatch) -> list[bytes | None]:
        """Encodes each row. Raises InvalidRequest."""
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
        """Returns what JSON says of fields that have no column; Avro's library knows it itself."""
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

    def _raw(self, column: pa.Array, field: Field) -> pa.Array:
        unit, raw = field.shape.unit, field.shape.raw
        if column.type != unit:
            column = column.cast(unit, safe=not _is_coarse(unit))
        return column if unit == raw else column.cast(raw)

    def _definition(self, field: Field) -> Any:
        record = self._known.record
        if record.is_single:
            return record.avro
        return next(each["type"] for each in record.avro["fields"] if each["name"] == field.name)

    def _check(self, column: pa.Array, definition: Any, path: str) -> None:
        """Refuses what Arrow has and the definition has not. By columns, also of what is inside."""
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
    """Whether it has times of milliseconds, and none of nanoseconds: what is below a millisecond is left out."""
    units = _units(type_)
    return "ms" in units and "ns" not in units


def _units(type_: pa.DataType) -> set[str]:
    if pa.types.is_timestamp(type_):
        return {type_.unit}
    return {unit for at in range(type_.num_fields) for unit in _units(type_.field(at).type)}


def _with_maps(type_: pa.DataType) -> Callable[[Any], Any] | None:
    """Returns a function that turns Arrow's maps, lists of pairs, into the encoders' dicts. None: there is none in it.
    """
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
