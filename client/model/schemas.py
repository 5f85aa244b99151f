"""`magnetar.schema`: the names of `pulsar.schema`."""

from __future__ import annotations

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
    "AvroSchema",
    "Boolean",
    "Bytes",
    "BytesSchema",
    "CustomEnum",
    "Double",
    "Field",
    "Float",
    "Integer",
    "JsonSchema",
    "Long",
    "Map",
    "Null",
    "Record",
    "Schema",
    "String",
    "StringSchema",
]
