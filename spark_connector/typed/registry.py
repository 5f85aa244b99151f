"""The schemas of a topic that a query reads and writes with, and the columns of a typed query.

A query that gives no schema reads with the newest one. A frame keeps the columns that it was planned with: a reader
gets the newest schema that has all of them, with their types. So a query goes on while its topic's schema evolves, and
shows a new field when it is started anew. All topics of a query have to have the same columns.

Columns: one for each field of the schema (shapes.py), or `value` for a schema that is no record; after them those of
rows.py (`beside_typed`), whose names begin with `META`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql.types import (
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from ...client.admin import TopicSchema
from ...proto.errors import InvalidConfiguration, InvalidSchema
from ...proto.schema import SchemaInfo, SchemaType
from .shapes import Field, Record, Shape, record_of

META = "__"
"""Beginning of the names of the columns that are not of a schema: `__key`."""
BY_AVRO = (SchemaType.AVRO, SchemaType.JSON)


def _single(spark: DataType, raw: pa.DataType, unit: pa.DataType | None = None) -> Shape:
    return Shape(spark, raw, raw if unit is None else unit, None, None)


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


class Typed(NamedTuple):
    """A schema that rows are read or written with."""

    info: SchemaInfo
    record: Record


def typed(topic: str, info: SchemaInfo) -> Typed:
    """Returns the typed schema. InvalidConfiguration: columns cannot be made of it; it says what to use instead."""
    shape = _SINGLE.get(info.type)
    if shape is not None:
        return Typed(info, Record((Field("value", shape),), None, None, is_single=True))
    if info.type not in BY_AVRO:
        raise InvalidConfiguration(
            f"topic {topic} has a schema of type {info.type.name}, which has no columns; leave out the option "
            "'schema', and decode the column 'value'"
        )
    try:
        return Typed(info, record_of(info))
    except InvalidSchema as error:
        raise InvalidConfiguration(
            f"topic {topic}: {error.message}; leave out the option 'schema', and decode the column 'value'"
        ) from error


def newest(topic: str, versions: Iterable[TopicSchema]) -> Typed:
    """Returns the newest schema. InvalidConfiguration: there is none."""
    living = [each for each in versions if not each.deleted]
    if not living:
        raise InvalidConfiguration(
            f"topic {topic} has no schema, and the option 'schema' needs one: a producer with a schema registers it, "
            "or `magnetar schemas upload`"
        )
    return typed(topic, max(living, key=lambda each: each.version).schema)


def reader(topic: str, versions: Iterable[TopicSchema], wanted: StructType) -> Typed:
    """The newest schema with these columns. InvalidConfiguration: none has them; it names what the newest lacks."""
    living = sorted((each for each in versions if not each.deleted), key=lambda each: -each.version)
    named = {each.name: each.dataType for each in wanted if not each.name.startswith(META)}
    last = newest(topic, living)
    if _has(last, named):
        return last
    for each in living[1:]:
        try:
            found = typed(topic, each.schema)
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


def _types(found: Typed) -> Mapping[str, DataType]:
    return {each.name: each.shape.spark for each in found.record.fields}


def _has(found: Typed, named: Mapping[str, DataType]) -> bool:
    there = _types(found)
    return all(there.get(name) == type_ for name, type_ in named.items())


def columns(schemas: Mapping[str, Typed], metadata: Iterable[StructField]) -> StructType:
    """Returns the columns of a query over these topics. `metadata`: the other columns. InvalidConfiguration: two topics
    differ, or a field is called as one of the others."""
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


def check_beside(wanted: StructType, metadata: Iterable[StructField]) -> None:
    """Checks the other columns of a schema that a user gives. InvalidConfiguration."""
    known = {each.name: each.dataType for each in metadata}
    for each in wanted:
        if not each.name.startswith(META):
            continue
        if each.name not in known:
            raise InvalidConfiguration(f"column {each.name!r} does not exist; there are {', '.join(known)}")
        if each.dataType != known[each.name]:
            raise InvalidConfiguration(
                f"column {each.name!r} is {known[each.name].simpleString()}, not {each.dataType.simpleString()}"
            )


def _told(found: Typed) -> str:
    return ", ".join(f"{name} {type_.simpleString()}" for name, type_ in _types(found).items())
