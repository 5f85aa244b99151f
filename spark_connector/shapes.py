"""Converts the Avro definition of a topic's schema to types of Spark, of Arrow and of msgspec, which decodes JSON. Also
the choice of the schema with which a query reads or writes (`find_newest_schema`, `find_reader_schema`).

| Avro | Spark | in JSON |
|---|---|---|
| boolean, int, long, float, double | boolean, int, bigint, float, double | the same |
| string, uuid | string | text |
| bytes, fixed | binary | text, and the column is string |
| decimal of up to 38 digits | decimal(precision, scale) | number or text |
| enum | string: the symbol | text; a number is read as the text of its digits |
| date | date | days since the epoch |
| timestamp-millis, -micros, -nanos | timestamp, to the microsecond | a number since the epoch |
| local-timestamp-… | timestamp_ntz | the same |
| time-millis, time-micros | int, bigint: since midnight | the same |
| array, map, record | array, map<string, …>, struct | array, object, object |
| a union with null | the other type, null | null |

Every column may be null, because a message without a value is a row, too. Refused, with the path of the field: a type
that contains itself, a union of several types, null alone, and fields whose names differ only by case (Spark does not
distinguish these).

A value that is read is converted through three Arrow types: as decoded, with times as numbers (`raw`); with the unit of
its times (`unit`); and the type of Spark. Writing converts in the opposite order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ..client.admin import TopicSchema
from ..client.model.composite_schemas import collect_named_types, parse_avro_definition
from ..proto.errors import InvalidConfiguration, InvalidSchema
from ..proto.schema import SchemaInfo, SchemaType

DECIMAL_DIGITS_MAX = 38
SCHEMA_TYPES_MAX = 10_000
"""Most types of all columns together, each counted as often as it is used: a definition may use each type twice in the
next one, which doubles the number at every level."""
MISSING_IS_NULL = None


@dataclass(frozen=True, slots=True)
class DataTypeMapping:
    """One data type, as Spark, Arrow, JSON and Avro represent it. `spark`: the type of the column. `raw`: the Arrow
    type of decoded values, with times as numbers. `unit`: the Arrow type with the unit of its times. `json`: the type
    for msgspec. `avro`: the Avro type for decoding. `nullable`: whether the schema allows null."""

    spark: DataType
    raw: pa.DataType
    unit: pa.DataType
    json: Any  # of msgspec, None included
    avro: Any  # what to decode with: without its logical types, but decimal
    nullable: bool = False
    is_plain: bool = True  # Arrow takes a decoded value as it is
    parts: tuple[DataTypeMapping, ...] = ()  # of the fields, the items, the values


@dataclass(frozen=True, slots=True)
class ColumnField:
    """A field of a record: its name, its data type (`shape`), and its default in the form of JSON."""

    name: str
    shape: DataTypeMapping
    has_default: bool = False
    default: Any = None  # as JSON has it

    @property
    def has_default_value(self) -> bool:
        """Returns whether a JSON payload that lacks the field gets a value other than null for it."""
        return self.has_default and self.default is not None


@dataclass(frozen=True, slots=True)
class RecordShape:
    """The fields of a topic's schema as columns. If the schema is not a record but a single value (`is_single`), there
    is one column, `value`. `avro`: the definition for decoding Avro; `json`: the type for decoding JSON by msgspec."""

    fields: tuple[ColumnField, ...]
    avro: Any
    json: Any  # a Struct, or the type of the value
    is_single: bool = False


_INT = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_LONG = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


def _simple(spark: DataType, arrow: pa.DataType, type_: Any, avro: str) -> DataTypeMapping:
    return DataTypeMapping(spark, arrow, arrow, type_ | None, avro)


_PRIMITIVE = {
    "boolean": _simple(BooleanType(), pa.bool_(), bool, "boolean"),
    "int": _simple(IntegerType(), pa.int32(), _INT, "int"),
    "long": _simple(LongType(), pa.int64(), _LONG, "long"),
    "float": _simple(FloatType(), pa.float32(), float, "float"),
    "double": _simple(DoubleType(), pa.float64(), float, "double"),
    "string": _simple(StringType(), pa.string(), str, "string"),
}
_BYTES = _simple(BinaryType(), pa.binary(), bytes, "bytes")
_TIMES: dict[str, tuple[str, DataType, pa.DataType]] = {
    "date": ("int", DateType(), pa.date32()),
    **{
        f"{local}timestamp-{word}": (
            "long", TimestampNTZType() if local else TimestampType(), pa.timestamp(unit)
        )
        for local in ("", "local-") for word, unit in (("millis", "ms"), ("micros", "us"), ("nanos", "ns"))
    },
}  # fmt: skip


def parse_record_shape(info: SchemaInfo) -> RecordShape:
    """Returns the RecordShape of an AVRO or JSON schema. Raises InvalidSchema if the schema cannot be represented as
    columns."""
    parsed = parse_avro_definition(info)
    try:
        return _Shapes(collect_named_types(parsed), json_=info.type is SchemaType.JSON).top(parsed)
    except RecursionError:
        raise InvalidSchema(f"the definition of this {info.type.name} schema is too deep for columns") from None


def select_record_fields(record: RecordShape, names: Collection[str]) -> RecordShape:
    """Returns a copy of `record` that has only the fields `names`, so that only these are decoded from JSON payloads.
    Returns a single value unchanged. Raises InvalidSchema if the schema has a field whose default is not of its
    type."""
    if record.is_single:
        return record
    fields = tuple(each for each in record.fields if each.name in names)
    return replace(record, fields=fields, json=_struct(record.avro["name"], fields))


class _Shapes:
    def __init__(self, names: dict[str, Any], *, json_: bool) -> None:
        self._names, self._json = names, json_
        self._seen: set[str] = set()  # named types that `avro` has defined already
        self._types = 0

    def top(self, schema: Any) -> RecordShape:
        kind = schema.get("type") if isinstance(schema, dict) else schema
        if kind not in ("record", "error"):
            shape = self.shape_of(schema, "the definition", ())
            return RecordShape((ColumnField("value", shape),), shape.avro, shape.json, is_single=True)
        fields = self._fields(schema, "", (schema["name"],))
        return RecordShape(fields, self._avro_record(schema, fields), _struct(schema["name"], fields))

    def _fields(self, schema: Any, path: str, around: tuple[str, ...]) -> tuple[ColumnField, ...]:
        found: list[ColumnField] = []
        spelled: dict[str, str] = {}
        self._seen.add(schema["name"])
        for each in schema["fields"]:
            name = each["name"]
            if (other := spelled.setdefault(name.lower(), name)) != name:
                raise InvalidSchema(f"fields {path}{other!r} and {name!r}: Spark takes them for the same column")
            shape = self.shape_of(each["type"], f"{path}{name}", around)
            found.append(ColumnField(name, shape, "default" in each, each.get("default")))
        if not found:
            raise InvalidSchema(f"{path or 'the record '}has no fields, and Spark has no such column")
        return tuple(found)

    def _avro_record(self, schema: Any, fields: tuple[ColumnField, ...]) -> Any:
        every = zip(schema["fields"], fields, strict=True)
        kept = ("name", "aliases", "default")
        plain = [{key: each[key] for key in kept if key in each} | {"type": f.shape.avro} for each, f in every]
        aliases = {"aliases": schema["aliases"]} if "aliases" in schema else {}
        return {"type": "record", "name": schema["name"], "fields": plain, **aliases}

    def shape_of(self, schema: Any, path: str, around: tuple[str, ...]) -> DataTypeMapping:
        self._types += 1
        if self._types > SCHEMA_TYPES_MAX:
            raise InvalidSchema(
                f"the definition has more than {SCHEMA_TYPES_MAX} types: columns of that many are of no use"
            )
        if isinstance(schema, list):
            return self._union(schema, path, around)
        if isinstance(schema, str):
            if schema in self._names:
                return self.shape_of(self._names[schema], path, around)
            if schema == "bytes":
                return self._bytes()
            if schema == "null":
                raise InvalidSchema(f"field {path} is always null, and Spark has no such column")
            return _PRIMITIVE[schema]
        kind = schema["type"]
        if isinstance(kind, dict | list):
            return self.shape_of(kind, path, around)
        if kind in ("record", "error"):
            return self._record(schema, path, around)
        if kind == "array":
            return self._array(self.shape_of(schema["items"], f"{path}[]", around))
        if kind == "map":
            return self._map(self.shape_of(schema["values"], f"{path}{{}}", around))
        if kind == "enum":
            return replace(
                _PRIMITIVE["string"], json=str | int | float | None, is_plain=not self._json,
                avro=self._named(schema, {"symbols": schema["symbols"]}),
            )  # fmt: skip
        return self._logical(schema, kind, path)

    def _named(self, schema: Any, what: dict[str, Any]) -> Any:
        """Returns the definition of a named type the first time, and then its name, because Avro defines each name
        once."""
        name = schema["name"]
        if name in self._seen:
            return name
        self._seen.add(name)
        more = {key: schema[key] for key in ("aliases", "default") if key in schema}
        return {"type": schema["type"], "name": name, **what, **more}

    def _bytes(self) -> DataTypeMapping:
        return replace(_PRIMITIVE["string"], avro="bytes") if self._json else _BYTES

    def _union(self, schema: list[Any], path: str, around: tuple[str, ...]) -> DataTypeMapping:
        others = [each for each in schema if each != "null"]
        if len(others) != 1:
            several = ", ".join(map(_name_of, others)) or "null alone"
            raise InvalidSchema(f"field {path} is a union of {several}, and a column has one type")
        shape = self.shape_of(others[0], path, around)
        return replace(shape, avro=[each if each == "null" else shape.avro for each in schema], nullable=True)

    def _record(self, schema: Any, path: str, around: tuple[str, ...]) -> DataTypeMapping:
        name = schema["name"]
        if name in around:
            raise InvalidSchema(f"field {path} contains itself ({name}), and a column has an end")
        is_defined = name in self._seen
        fields = self._fields(schema, f"{path}.", (*around, name))
        return DataTypeMapping(
            StructType([StructField(each.name, each.shape.spark) for each in fields]),
            pa.struct([(each.name, each.shape.raw) for each in fields]),
            pa.struct([(each.name, each.shape.unit) for each in fields]),
            _struct(name, fields) | None,
            name if is_defined else self._avro_record(schema, fields),
            is_plain=not self._json,
            parts=tuple(each.shape for each in fields),
        )

    def _array(self, item: DataTypeMapping) -> DataTypeMapping:
        return DataTypeMapping(
            ArrayType(item.spark), pa.list_(item.raw), pa.list_(item.unit),
            list[item.json] | None,  # type: ignore[name-defined]
            {"type": "array", "items": item.avro}, is_plain=item.is_plain, parts=(item,),
        )  # fmt: skip

    def _map(self, value: DataTypeMapping) -> DataTypeMapping:
        return DataTypeMapping(
            MapType(StringType(), value.spark), pa.map_(pa.string(), value.raw), pa.map_(pa.string(), value.unit),
            dict[str, value.json] | None, {"type": "map", "values": value.avro},  # type: ignore[name-defined]
            is_plain=value.is_plain, parts=(value,),
        )  # fmt: skip

    def _logical(self, schema: Any, kind: str, path: str) -> DataTypeMapping:
        logical = schema.get("logicalType")
        if logical == "decimal" and kind in ("bytes", "fixed"):
            found = self._decimal(schema, kind)
            if found is not None:
                return found
        if kind == "fixed":
            return replace(self._bytes(), avro=self._named(schema, {"size": schema["size"]}))
        if logical in _TIMES and _TIMES[logical][0] == kind:
            _, spark, unit = _TIMES[logical]
            return replace(_PRIMITIVE[kind], spark=spark, unit=unit)
        return self.shape_of(kind, path, ())

    def _decimal(self, schema: Any, kind: str) -> DataTypeMapping | None:
        """Returns the shape of a decimal. None: it stays bytes, because it has more digits than Spark allows, or is
        invalid; Avro readers ignore a logical type that they do not know."""
        precision, scale = schema.get("precision"), schema.get("scale", 0)
        if not (isinstance(precision, int) and isinstance(scale, int)):
            return None
        if not 0 <= scale <= precision <= DECIMAL_DIGITS_MAX or not precision:
            return None
        arrow = pa.decimal128(precision, scale)
        what = {"logicalType": "decimal", "precision": precision, "scale": scale}
        avro = {"type": "bytes", **what} if kind == "bytes" else self._named(schema, {"size": schema["size"], **what})
        return DataTypeMapping(DecimalType(precision, scale), arrow, arrow, Decimal | None, avro)


def _struct(name: str, fields: tuple[ColumnField, ...]) -> Any:
    """Makes a class for the fields, with numbers as names, because Python forbids some of Avro's names. A field that a
    payload lacks gets its default, or null."""
    defined = []
    for number, each in enumerate(fields):
        default: Any = MISSING_IS_NULL
        if each.has_default_value:
            default = _default(each)
        defined.append((f"f{number}", each.shape.json, default))
    rename = {f"f{number}": each.name for number, each in enumerate(fields)}
    return msgspec.defstruct(name.rpartition(".")[2], defined, rename=rename, gc=False)


def _default(field: ColumnField) -> Any:
    try:
        value = msgspec.convert(field.default, field.shape.json, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidSchema(f"field {field.name!r} has a default that is not of its type: {error}") from error
    if isinstance(value, list | dict | msgspec.Struct):
        return msgspec.field(default_factory=lambda: msgspec.convert(field.default, field.shape.json, strict=False))
    return value


def _name_of(schema: Any) -> str:
    if isinstance(schema, dict):
        return str(schema.get("name", schema["type"]))
    return str(schema)


# ------------------------------------------------------------------------------------------------------ registry
# The schemas of a topic that a query reads and writes with, and the columns of a typed query.
#
# A query that gives no schema reads with the newest one. A frame keeps the columns that it was planned with: a reader
# gets the newest schema that has all of them, with their types. So a query goes on while its topic's schema evolves,
# and shows a new field when it is started anew. All topics of a query have to have the same columns.
#
# Columns: one for each field of the schema (shapes.py), or `value` for a schema that is no record; after them those of
# rows.py (`list_metadata_columns`), whose names begin with `METADATA_PREFIX`.


METADATA_PREFIX = "__"
"""Prefix of the names of columns that are not of the schema: `__key`."""
AVRO_DEFINED_TYPES = (SchemaType.AVRO, SchemaType.JSON)


def _single(spark: DataType, raw: pa.DataType, unit: pa.DataType | None = None) -> DataTypeMapping:
    return DataTypeMapping(spark, raw, raw if unit is None else unit, None, None)


_UTC = pa.timestamp("us", tz="UTC")
_SINGLE = {
    SchemaType.BOOLEAN: _single(BooleanType(), pa.bool_()),
    SchemaType.INT8: _single(ByteType(), pa.int8()),
    SchemaType.INT16: _single(ShortType(), pa.int16()),
    SchemaType.INT32: _single(IntegerType(), pa.int32()),
    SchemaType.INT64: _single(LongType(), pa.int64()),
    SchemaType.FLOAT: _single(FloatType(), pa.float32()),
    SchemaType.DOUBLE: _single(DoubleType(), pa.float64()),
    SchemaType.STRING: _single(StringType(), pa.string()),
    SchemaType.DATE: _single(DateType(), pa.date32()),
    SchemaType.LOCAL_DATE: _single(DateType(), pa.date32()),
    SchemaType.TIMESTAMP: _single(TimestampType(), _UTC),
    SchemaType.INSTANT: _single(TimestampType(), _UTC),
    SchemaType.LOCAL_DATE_TIME: _single(TimestampNTZType(), pa.timestamp("us")),
    SchemaType.TIME: _single(LongType(), pa.time64("us"), pa.int64()),  # microseconds since midnight
    SchemaType.LOCAL_TIME: _single(LongType(), pa.time64("us"), pa.int64()),
}


class TypedSchema(NamedTuple):
    """A schema of a topic (`info`), together with its columns (`record`), by which rows are read or written."""

    info: SchemaInfo
    record: RecordShape


def make_typed_schema(topic: str, info: SchemaInfo) -> TypedSchema:
    """Returns the schema together with its RecordShape. Raises InvalidConfiguration if the schema cannot be represented
    as columns; the error says what to do instead."""
    shape = _SINGLE.get(info.type)
    if shape is not None:
        return TypedSchema(info, RecordShape((ColumnField("value", shape),), None, None, is_single=True))
    if info.type not in AVRO_DEFINED_TYPES:
        raise InvalidConfiguration(
            f"topic {topic} has a schema of type {info.type.name}, which has no columns; leave out the option "
            "'schema', and decode the column 'value'"
        )
    try:
        return TypedSchema(info, parse_record_shape(info))
    except InvalidSchema as error:
        raise InvalidConfiguration(
            f"topic {topic}: {error.message}; leave out the option 'schema', and decode the column 'value'"
        ) from error


def find_newest_schema(topic: str, versions: Iterable[TopicSchema]) -> TypedSchema:
    """Returns the newest schema of `versions` that is not deleted. Raises InvalidConfiguration if there is none, or if
    it cannot be represented as columns."""
    living = [each for each in versions if not each.deleted]
    if not living:
        raise InvalidConfiguration(
            f"topic {topic} has no schema, and the option 'schema' needs one: a producer with a schema registers it, "
            "or `magnetar schemas upload`"
        )
    return make_typed_schema(topic, max(living, key=lambda each: each.version).schema)


def find_reader_schema(topic: str, versions: Iterable[TopicSchema], wanted: StructType) -> TypedSchema:
    """Returns the newest schema of `versions` that is not deleted and has the columns `wanted`, with their types;
    metadata columns are not looked at. Raises InvalidConfiguration if there is none (the error names the first column
    that the newest schema lacks or has with another type), or if the newest schema cannot be represented as columns."""
    living = sorted((each for each in versions if not each.deleted), key=lambda each: -each.version)
    named = {each.name: each.dataType for each in wanted if not each.name.startswith(METADATA_PREFIX)}
    last = find_newest_schema(topic, living)
    if _has(last, named):
        return last
    for each in living[1:]:
        try:
            found = make_typed_schema(topic, each.schema)
        except InvalidConfiguration:
            continue
        if _has(found, named):
            return found
    there = _types(last)
    for name, type_ in named.items():
        if name not in there:
            raise InvalidConfiguration(f"column {name!r} does not exist: the schema of {topic} has {', '.join(there)}")
        if there[name] != type_:
            raise InvalidConfiguration(
                f"column {name!r} of {topic} is {there[name].simpleString()}, not {type_.simpleString()}"
            )
    return last


def _types(found: TypedSchema) -> Mapping[str, DataType]:
    return {each.name: each.shape.spark for each in found.record.fields}


def _has(found: TypedSchema, named: Mapping[str, DataType]) -> bool:
    there = _types(found)
    return all(there.get(name) == type_ for name, type_ in named.items())


def merge_schema_columns(schemas: Mapping[str, TypedSchema], metadata: Iterable[StructField]) -> StructType:
    """Returns the columns of a query over all topics of `schemas`. `metadata`: the columns that do not come from a
    schema. Raises InvalidConfiguration if the columns of two topics differ, or if a field has the name of a column in
    `metadata`."""
    if not schemas:
        raise InvalidConfiguration("no topic matches, so there is no schema: create a topic, or give one by .schema(…)")
    first = next(iter(schemas))
    fields = [StructField(each.name, each.shape.spark) for each in schemas[first].record.fields]
    for topic, found in schemas.items():
        if _types(found) != _types(schemas[first]):
            raise InvalidConfiguration(
                f"topics {first} and {topic} have different columns: {_told(schemas[first])}; {_told(found)}. "
                "Read them by two queries"
            )
    others = list(metadata)
    if taken := {each.name.lower() for each in fields} & {each.name.lower() for each in others}:
        raise InvalidConfiguration(f"topic {first} has a field {min(taken)!r}, which is the name of another column")
    return StructType([*fields, *others])


def check_metadata_columns(wanted: StructType, metadata: Iterable[StructField]) -> None:
    """Checks those columns of the user's table schema (`wanted`) that do not come from the topic's schema; `metadata`
    has the allowed columns. Raises InvalidConfiguration for an unknown column or a wrong type."""
    known = {each.name: each.dataType for each in metadata}
    for each in wanted:
        if not each.name.startswith(METADATA_PREFIX):
            continue
        if each.name not in known:
            raise InvalidConfiguration(f"column {each.name!r} does not exist; there are {', '.join(known)}")
        if each.dataType != known[each.name]:
            raise InvalidConfiguration(
                f"column {each.name!r} is {known[each.name].simpleString()}, not {each.dataType.simpleString()}"
            )


def _told(found: TypedSchema) -> str:
    return ", ".join(f"{name} {type_.simpleString()}" for name, type_ in _types(found).items())
