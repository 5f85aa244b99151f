"""`magnetar.schema`: the names of `pulsar.schema`, and its modules."""

from __future__ import annotations

from . import composite_schemas as schema_protobuf
from . import record as definition
from . import schema
from . import schema as schema_avro
from .composite_schemas import (
    AutoConsumeSchema,
    AutoPublishSchema,
    KeyValueEncodingType,
    KeyValueSchema,
    ProtobufNativeSchema,
)
from .primitive_schemas import (
    BooleanSchema,
    DateSchema,
    DoubleSchema,
    FloatSchema,
    InstantSchema,
    Int8Schema,
    Int16Schema,
    Int32Schema,
    Int64Schema,
    LocalDateSchema,
    LocalDateTimeSchema,
    LocalTimeSchema,
    TimeSchema,
    TimestampSchema,
)
from .record import (
    Array,
    Boolean,
    Bytes,
    CustomEnum,
    Double,
    Field,
    Float,
    Integer,
    Long,
    Map,
    Null,
    Record,
    String,
)
from .schema import AvroSchema, BytesSchema, JsonSchema, Schema, StringSchema

__all__ = [
    "Array",
    "AutoConsumeSchema",
    "AutoPublishSchema",
    "AvroSchema",
    "Boolean",
    "BooleanSchema",
    "Bytes",
    "BytesSchema",
    "CustomEnum",
    "DateSchema",
    "Double",
    "DoubleSchema",
    "Field",
    "Float",
    "FloatSchema",
    "InstantSchema",
    "Int8Schema",
    "Int16Schema",
    "Int32Schema",
    "Int64Schema",
    "Integer",
    "JsonSchema",
    "KeyValueEncodingType",
    "KeyValueSchema",
    "LocalDateSchema",
    "LocalDateTimeSchema",
    "LocalTimeSchema",
    "Long",
    "Map",
    "Null",
    "ProtobufNativeSchema",
    "Record",
    "Schema",
    "String",
    "StringSchema",
    "TimeSchema",
    "TimestampSchema",
    "definition",
    "schema",
    "schema_avro",
    "schema_protobuf",
]
