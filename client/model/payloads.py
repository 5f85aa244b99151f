"""Encodes and decodes payloads by a topic's schema for programs that have no class of its records: to and from plain
values.

Used by the Spark connector. An Avro value is what fastavro makes of it; single values are in composite_schemas.py.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from ...proto.errors import InvalidSchema
from ...proto.schema import SchemaInfo
from ..common.errors import InvalidMessage
from .composite_schemas import SINGLE, PreEncodedSchema
from .fields import CheckedSchema, collect_named_types
from .schema import decode_avro_payload, fastavro

__all__ = [
    "SINGLE", "PreEncodedSchema", "collect_named_types", "make_avro_decoder", "make_avro_encoder",
    "parse_avro_definition",
]

Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]


def parse_avro_definition(info: SchemaInfo) -> Any:
    """Parses the definition of an AVRO or JSON schema and returns the schema as fastavro parsed it, with full names.
    Raises InvalidSchema."""
    try:
        return fastavro().parse_schema(json.loads(info.data))
    except RecursionError:
        raise InvalidSchema(f"the definition of this {info.type.name} schema is too deep") from None
    except Exception as error:  # fastavro's own kinds, and those of JSON
        raise InvalidSchema(f"the definition of this {info.type.name} schema is no Avro: {error}") from error


def make_avro_decoder(writer: Any, reader: Any = None) -> Decode:
    """Returns a function that decodes payloads written by the definition `writer` to values of the definition `reader`
    (None: of `writer`). The function raises InvalidMessage for a payload that does not fit `writer`."""
    parsed = CheckedSchema(fastavro().parse_schema(writer))
    own = None if reader is None else fastavro().parse_schema(reader)
    return lambda payload: decode_avro_payload(payload, parsed, own)


def make_avro_encoder(definition: Any) -> Encode:
    """Returns a function that encodes values by a definition. The function raises InvalidMessage for a value that does
    not fit."""
    write, schema = fastavro().schemaless_writer, fastavro().parse_schema(definition)

    def encode(value: Any) -> bytes:
        out = io.BytesIO()
        try:
            write(out, schema, value)
        except (ValueError, TypeError, KeyError, OverflowError, AttributeError) as error:
            raise InvalidMessage(f"the value does not fit its Avro schema: {error}") from error
        return out.getvalue()

    return encode
