"""Payloads of a batch to columns.

JSON is decoded by field names, whichever version wrote it, by a Struct that msgspec makes of the definition; Avro with
the definition of its writer, resolved to that of the reader. A message that names no version is taken for one of the
reader's. Fields that a payload lacks have their default, or null.

**A payload that is not of its schema**, or holds a value that its column cannot (a decimal with more digits, a time
that no microsecond reaches): with schemaErrors=fail InvalidMessage, which names the message; with schemaErrors=null
all its typed columns are null, and it counts in `RowBuilder.unfit`. Work is linear in the rows of a batch: only where a
batch holds such a value, each value is tried alone.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from operator import attrgetter, itemgetter
from typing import Any, Protocol

import msgspec
import pyarrow as pa

from ...client.common.errors import InvalidMessage
from ...client.model.payloads import SINGLE, avro_definition, avro_reader
from ...proto.errors import InvalidConfiguration, InvalidSchema, SchemaNotFound
from ...proto.schema import SchemaInfo, SchemaType
from . import json_columns
from .registry import Typed
from .shapes import Field, narrowed

Decode = Callable[[bytes], Any]
WRONG_PAYLOAD = (ValueError, RecursionError, InvalidMessage)
"""What decoding raises: msgspec's errors are ValueErrors, or RecursionError for what is too deep."""
WRONG_VALUE = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""What Arrow raises for a value that its type cannot hold."""


class Versions(Protocol):
    """The schemas that messages name."""

    def __call__(self, version: int) -> SchemaInfo: ...


class Named(Protocol):
    """An entry, and the schema that it names."""

    schema_version: int | None


class Run(Protocol):
    """Consecutive rows of one entry."""

    @property
    def entry(self) -> Named: ...
    @property
    def rows(self) -> int: ...


class Rows(Protocol):
    """The rows of a batch: a RowBuilder."""

    topic: str
    partition: int
    values: list[bytes | None]
    unfit: Counter[str]

    @property
    def runs(self) -> Sequence[Run]: ...
    def offset_of(self, row: int) -> int: ...


Build = Callable[[Rows, pa.DataType], pa.Array]


class Decoding:
    """Of one topic, for one task. `columns_of` gives what builds the columns that a query names, and no others."""

    def __init__(self, reader: Typed, versions: Versions, *, is_strict: bool) -> None:
        self._reader, self._versions, self._is_strict = reader, versions, is_strict
        self._cells: dict[str, pa.Array] = {}

    def columns_of(self, names: Sequence[str], types: Sequence[pa.DataType]) -> dict[str, Build]:
        """What builds each of these columns of a batch; all are decoded when the first is asked for."""
        wanted = dict(zip(names, types, strict=True))
        if self._reader.info.type is SchemaType.JSON:
            self._reader = self._reader._replace(record=narrowed(self._reader.record, wanted))
            self._json: Decode = msgspec.json.Decoder(self._reader.record.json).decode
        self._decoders: dict[int | None, Decode] = {None: self._decoder(self._reader.info)}
        self._fields = {each.name: each for each in self._reader.record.fields}
        self._getters, self._blank = _access(self._reader)
        self._at_once = _at_once(self._reader)

        def building(name: str) -> Build:
            def build(rows: Rows, type_: pa.DataType) -> pa.Array:
                if not self._cells:
                    with without_collection():
                        self._cells = self._columns(rows, wanted)
                return self._cells.pop(name)

            return build

        return {name: building(name) for name in names}

    def _columns(self, builder: Rows, wanted: dict[str, pa.DataType]) -> dict[str, pa.Array]:
        if (found := self._columns_at_once(builder, wanted)) is not None:
            return found
        rows = self._decoded(builder)
        try:
            return {name: self._array(rows, name, type_) for name, type_ in wanted.items()}
        except WRONG_VALUE:
            self._without_unfit(builder, rows, wanted)
            return {name: self._array(rows, name, type_) for name, type_ in wanted.items()}

    def _columns_at_once(self, builder: Rows, wanted: dict[str, pa.DataType]) -> dict[str, pa.Array] | None:
        """None: the payloads have to be decoded one by one."""
        if self._at_once is None:
            return None
        own = self._decoders[None]
        if any(self._decode_of(version) is not own for version in {run.entry.schema_version for run in builder.runs}):
            return None
        found = json_columns.read_all(builder.values, self._at_once)
        if found is None:
            return None
        if any(found.column(name).null_count for name, field in self._fields.items() if field.fills):
            return None  # absent, or null
        columns: dict[str, pa.Array] = {}
        for name, type_ in wanted.items():
            array = found.column(name).combine_chunks()
            try:
                columns[name] = _converted(array, self._fields[name], type_)
            except WRONG_VALUE:
                return None
        return columns

    # ------------------------------------------------------------------------------ payloads to rows
    def _decoded(self, builder: Rows) -> list[Any]:
        rows: list[Any] = []
        blank = self._blank
        for run in builder.runs:
            values = builder.values[len(rows) : len(rows) + run.rows]
            try:
                decode = self._decode_of(run.entry.schema_version)
            except WRONG_PAYLOAD as error:
                decode = _refusing(error)
            try:
                rows += [blank if value is None else decode(value) for value in values]
            except WRONG_PAYLOAD:
                at = len(rows)
                rows += [self._one(builder, decode, value, at + number) for number, value in enumerate(values)]
        return rows

    def _one(self, builder: Rows, decode: Decode, value: bytes | None, row: int) -> Any:
        try:
            return self._blank if value is None else decode(value)
        except WRONG_PAYLOAD as error:
            return self._unfit(builder, row, error)

    def _unfit(self, builder: Rows, row: int, error: Exception) -> Any:
        """The row of a payload that is not of its schema."""
        if self._is_strict:
            raise InvalidMessage(
                f"message {builder.offset_of(row)} of {builder.topic} partition {builder.partition} is not of its "
                f"schema: {_said(error)}; set schemaErrors=null to read null in its place"
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
        return SINGLE[writer.type].decode

    def _avro(self, writer: SchemaInfo) -> Decode:
        own = self._reader.record.avro
        if writer.data == self._reader.info.data:
            return avro_reader(own)
        written = _plain(avro_definition(writer))
        if isinstance(own, dict) and isinstance(written, dict) and "name" in own and "name" in written:
            written = {**written, "name": own["name"]}  # programs name their classes as they like
        return avro_reader(written, own)

    # ------------------------------------------------------------------------------ rows to columns
    def _array(self, rows: list[Any], name: str, type_: pa.DataType) -> pa.Array:
        field = self._fields[name]
        cells = list(map(self._getters[name], rows))
        return _converted(pa.array(self._fixed(field, cells), field.shape.raw), field, type_)

    def _fixed(self, field: Field, cells: list[Any]) -> list[Any]:
        if field.shape.has_record and self._reader.info.type is SchemaType.JSON:
            cells = msgspec.to_builtins(cells, builtin_types=(Decimal,))
        fix = field.shape.fix
        return cells if fix is None else [None if each is None else fix(each) for each in cells]

    def _without_unfit(self, builder: Rows, rows: list[Any], wanted: dict[str, pa.DataType]) -> None:
        """Puts the blank row in the place of each row with a value that its column cannot hold."""
        for name, type_ in wanted.items():
            try:
                self._array(rows, name, type_)
            except WRONG_VALUE:
                for row, found in enumerate(rows):
                    try:
                        self._array([found], name, type_)
                    except WRONG_VALUE as error:
                        rows[row] = self._unfit(builder, row, ValueError(f"field {name!r}: {error}"))


def _at_once(reader: Typed) -> pa.Schema | None:
    """What Arrow's reader of JSON takes; None: it cannot read this."""
    record = reader.record
    if reader.info.type is not SchemaType.JSON or record.is_single or not record.fields:
        return None
    if not all(each.shape.plain_json for each in record.fields):
        return None
    return pa.schema([(each.name, each.shape.raw) for each in record.fields])


def _converted(found: pa.Array, field: Field, type_: pa.DataType) -> pa.Array:
    shape = field.shape
    if shape.unit != shape.raw:
        found = found.cast(shape.unit)
    return found if type_ == shape.unit else found.cast(type_, safe=not _has_nanos(shape.unit))


def _has_nanos(type_: pa.DataType) -> bool:
    """Spark's times end at the microsecond; what is below is left out."""
    if pa.types.is_timestamp(type_):
        return bool(type_.unit == "ns")
    return any(_has_nanos(type_.field(at).type) for at in range(type_.num_fields))


def _access(reader: Typed) -> tuple[dict[str, Callable[[Any], Any]], Any]:
    """How a row gives each field, and a row whose fields are all null."""
    record, fields = reader.record, reader.record.fields
    if record.is_single:
        return {fields[0].name: lambda row: row}, None
    if reader.info.type is SchemaType.JSON:
        blank = record.json(*[None] * len(fields))
        return {each.name: attrgetter(f"f{number}") for number, each in enumerate(fields)}, blank
    return {each.name: itemgetter(each.name) for each in fields}, dict.fromkeys(each.name for each in fields)


def _plain(schema: Any) -> Any:
    """Without logical types but decimal: the reader has times as numbers, and so must the writer."""
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
def without_collection() -> Iterator[None]:
    """Python looks for circles among all objects each time that thousands are made; rows have none, and the search
    costs more than the rows: 2.7 of 4.5 µs for ten fields of JSON."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
