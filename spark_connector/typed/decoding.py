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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import pyarrow as pa
from msgspec.structs import astuple

from ...client.common.errors import InvalidMessage
from ...client.model.payloads import SINGLE, avro_definition, avro_reader
from ...proto.errors import InvalidConfiguration, InvalidSchema, SchemaNotFound
from ...proto.schema import SchemaInfo, SchemaType
from .columns import column
from .registry import Typed
from .shapes import Field, narrowed

if TYPE_CHECKING:
    from ..rows import RowBuilder

Decode = Callable[[bytes], Any]
PIECE_ROWS = 2000
"""Rows that are objects at once: 20,000 of them do not fit into the caches of a processor, and cost a tenth more."""
WRONG_PAYLOAD = (ValueError, RecursionError, InvalidMessage)
"""Errors of decoding: msgspec's errors are ValueErrors, or RecursionError for what is too deep."""
WRONG_VALUE = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of Arrow for a value that its type cannot hold."""


class Versions(Protocol):
    """The schemas that messages name."""

    def __call__(self, version: int) -> SchemaInfo: ...


Build = Callable[["RowBuilder", pa.DataType], pa.Array]


class Decoding:
    """The decoding of one topic, for one task. `columns_of` gives what builds the columns that a query names, and no
    others."""

    def __init__(self, reader: Typed, versions: Versions, *, is_strict: bool) -> None:
        self._reader, self._versions, self._is_strict = reader, versions, is_strict
        self._cells: dict[str, pa.Array] = {}

    def columns_of(self, names: Sequence[str], types: Sequence[pa.DataType]) -> dict[str, Build]:
        """Returns a function for each of these columns that builds it; all are decoded when the first is asked for."""
        wanted = dict(zip(names, types, strict=True))
        if self._reader.info.type is SchemaType.JSON:
            self._reader = self._reader._replace(record=narrowed(self._reader.record, wanted))
            self._json: Decode = msgspec.json.Decoder(self._reader.record.json).decode
        self._decoders: dict[int | None, Decode] = {None: self._decoder(self._reader.info)}
        self._fields = {each.name: each for each in self._reader.record.fields}
        self._blank = _blank(self._reader)

        def building(name: str) -> Build:
            def build(rows: RowBuilder, type_: pa.DataType) -> pa.Array:
                if not self._cells:
                    with without_collection():
                        self._cells = self._columns(rows, wanted)
                return self._cells.pop(name)

            return build

        return {name: building(name) for name in names}

    def _columns(self, builder: RowBuilder, wanted: dict[str, pa.DataType]) -> dict[str, pa.Array]:
        pieces = [self._piece(builder, first, rows, wanted) for first, rows in self._decoded(builder)]
        return {name: pa.concat_arrays([each[name] for each in pieces]) for name in wanted}

    def _piece(
        self, builder: RowBuilder, first: int, rows: list[Any], wanted: dict[str, pa.DataType]
    ) -> dict[str, pa.Array]:
        try:
            return self._arrays(rows, wanted)
        except WRONG_VALUE:
            self._without_unfit(builder, first, rows, wanted)
            return self._arrays(rows, wanted)

    # ------------------------------------------------------------------------------ payloads to rows
    def _decoded(self, builder: RowBuilder) -> Iterator[tuple[int, list[Any]]]:
        """The rows of whole runs, PIECE_ROWS at a time or some more, and the number of the first of them."""
        first, blank = 0, self._blank
        rows: list[Any] = []
        for run in builder.runs:
            at = first + len(rows)
            values = builder.values[at : at + run.rows]
            try:
                decode = self._decode_of(run.entry.schema_version)
            except WRONG_PAYLOAD as error:
                decode = _refusing(error)
            try:
                rows += [blank if value is None else decode(value) for value in values]
            except WRONG_PAYLOAD:
                rows += [self._one(builder, decode, value, at + number) for number, value in enumerate(values)]
            if len(rows) >= PIECE_ROWS:
                yield first, rows
                first, rows = at + run.rows, []
        if rows:
            yield first, rows

    def _one(self, builder: RowBuilder, decode: Decode, value: bytes | None, row: int) -> Any:
        try:
            return self._blank if value is None else decode(value)
        except WRONG_PAYLOAD as error:
            return self._unfit(builder, row, error)

    def _unfit(self, builder: RowBuilder, row: int, error: Exception) -> Any:
        """Returns a row of nulls for a payload that is not of its schema; InvalidMessage with schemaErrors=fail."""
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
    def _arrays(self, rows: list[Any], wanted: dict[str, pa.DataType]) -> dict[str, pa.Array]:
        cells = self._cells_of(rows)
        return {name: self._array(cells[name], name, type_) for name, type_ in wanted.items()}

    def _cells_of(self, rows: list[Any]) -> Mapping[str, Sequence[Any]]:
        """The values of each field."""
        if self._reader.record.is_single:
            return dict.fromkeys(self._fields, rows)
        if self._reader.info.type is SchemaType.JSON:
            return dict(zip(self._fields, zip(*map(astuple, rows), strict=True), strict=True))
        return {name: list(map(itemgetter(name), rows)) for name in self._fields}

    def _array(self, cells: Sequence[Any], name: str, type_: pa.DataType) -> pa.Array:
        field = self._fields[name]
        return _converted(column(cells, field.shape), field, type_)

    def _without_unfit(self, builder: RowBuilder, first: int, rows: list[Any], wanted: dict[str, pa.DataType]) -> None:
        """Puts the blank row in the place of each row with a value that its column cannot hold."""
        cells = self._cells_of(rows)
        for name, type_ in wanted.items():
            try:
                self._array(cells[name], name, type_)
            except WRONG_VALUE:
                for row, cell in enumerate(cells[name]):
                    try:
                        self._array([cell], name, type_)
                    except WRONG_VALUE as error:
                        if rows[row] is not self._blank:  # by another of its fields
                            rows[row] = self._unfit(builder, first + row, ValueError(f"field {name!r}: {error}"))


def _converted(found: pa.Array, field: Field, type_: pa.DataType) -> pa.Array:
    shape = field.shape
    if shape.unit != shape.raw:
        found = found.cast(shape.unit)
    return found if type_ == shape.unit else found.cast(type_, safe=not _has_nanos(shape.unit))


def _has_nanos(type_: pa.DataType) -> bool:
    """Whether the type has nanoseconds: Spark's times end at the microsecond, and what is below is left out."""
    if pa.types.is_timestamp(type_):
        return bool(type_.unit == "ns")
    return any(_has_nanos(type_.field(at).type) for at in range(type_.num_fields))


def _blank(reader: Typed) -> Any:
    """A row whose fields are all null."""
    record, fields = reader.record, reader.record.fields
    if record.is_single:
        return None
    if reader.info.type is SchemaType.JSON:
        return record.json(*[None] * len(fields))
    return dict.fromkeys(each.name for each in fields)


def _plain(schema: Any) -> Any:
    """Returns the schema without logical types but decimal: the reader has times as numbers, and so must the writer."""
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
    """Switches the collector off: Python looks for circles among all objects each time that thousands are made; rows
    have none, and the search costs more than the rows: 2.7 of 4.5 µs for ten fields of JSON."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
