"""Routes of schemas. A definition is text, of KEY_VALUE an object with `key` and `value`, as pulsar-admin writes it.

The path has no domain: a schema is that of the persistent topic. A definition that is invalid for its type gets 422.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from ...proto import operations as op
from ...proto.errors import InvalidSchema
from ...proto.names import TopicName
from ...proto.schema import definition_text, encode_version, parse_info
from ...proto.statistics import TopicSchema
from .call import BadRequest, RestRequest, register_route

T = TypeVar("T")
SCHEMAS = "/admin/v2/schemas/{tenant}/{namespace}/{topic}"


class SchemaBody(msgspec.Struct):
    """A schema in the JSON form in which tools send it; `properties` may be null."""

    type: str
    schema: str | None = ""
    properties: dict[str, str] | None = None


def _topic(call: RestRequest) -> str:
    return TopicName.parse(f"persistent://{call.namespace}/{call.names['topic']}").base.full


def _given(call: RestRequest) -> dict[str, object]:
    """Returns the arguments `topic` and `schema` of an operation, from the request. Raises BadRequest (422) if the
    definition is invalid."""
    given = call.parse_body(SchemaBody)
    try:
        info = parse_info(given.type, given.schema or "", given.properties or {}, TopicName.parse(_topic(call)).local)
    except InvalidSchema as error:
        raise BadRequest(error.message, 422) from error
    return {"topic": _topic(call), "schema": info}


async def _valid(asked: Awaitable[T]) -> T:
    try:
        return await asked
    except InvalidSchema as error:
        raise BadRequest(error.message, 422) from error


def _shown(found: TopicSchema) -> dict[str, object]:
    info = found.schema
    return {
        "version": found.version, "type": info.type.name if info.type else "BYTES",
        "timestamp": found.created_ms, "data": definition_text(info), "properties": info.properties,
    }  # fmt: skip


@register_route("GET", SCHEMAS + "/schema", "The newest schema of the topic.",
       answer="{version, type, timestamp, data, properties}")  # fmt: skip
async def get_schema(call: RestRequest) -> object:
    return _shown(await call.call_local(op.GET_SCHEMA, topic=_topic(call)))


@register_route(
    "GET", SCHEMAS + "/schema/{version}", "A version of it.", answer="{version, type, timestamp, data, properties}"
)
async def get_schema_version(call: RestRequest) -> object:
    version = encode_version(call.parse_number(call.names["version"], "a version"))
    return _shown(await call.call_local(op.GET_SCHEMA, topic=_topic(call), version=version))


@register_route("GET", SCHEMAS + "/schemas", "All versions that are not deleted.", answer="{getSchemaResponses: […]}")
async def list_schemas(call: RestRequest) -> object:
    found = await call.call_local(op.LIST_SCHEMAS, name=_topic(call))
    return {"getSchemaResponses": [_shown(each) for each in found]}


@register_route("POST", SCHEMAS + "/schema", "Registers a schema. 409: it does not go with those of the topic.",
       body="{type, schema, properties}", answer="{version}")  # fmt: skip
async def post_schema(call: RestRequest) -> object:
    return {"version": await _valid(call.call_local(op.PUT_SCHEMA, **_given(call)))}


@register_route("DELETE", SCHEMAS + "/schema", "Deletes the schema; with `force` what decodes old messages, too.",
       answer="{version}")  # fmt: skip
async def delete_schema(call: RestRequest) -> object:
    version = await call.call_local(op.DELETE_SCHEMA, name=_topic(call), force=call.parse_flag("force"))
    return {"version": -1 if version is None else version}


@register_route("POST", SCHEMAS + "/compatibility", "Whether a schema could be registered.",
    body="{type, schema, properties}",
       answer="{compatibility, schemaCompatibilityStrategy}")  # fmt: skip
async def test_schema(call: RestRequest) -> object:
    found = await _valid(call.call_local(op.TEST_SCHEMA, **_given(call)))
    return {
        "compatibility": not found.refused,
        "schemaCompatibilityStrategy": found.compatibility.upper(),
    }


@register_route("POST", SCHEMAS + "/version", "The version of an equal schema.", body="{type, schema, properties}",
       answer="{version}")  # fmt: skip
async def find_schema(call: RestRequest) -> object:
    return {"version": await _valid(call.call_local(op.FIND_SCHEMA, **_given(call)))}


@register_route("GET", SCHEMAS + "/metadata", "The places of the versions; Magnetar has them in its metadata.",
       answer="{info, index}")  # fmt: skip
async def schema_metadata(call: RestRequest) -> object:
    found = await call.call_local(op.LIST_SCHEMAS, name=_topic(call))
    index = [{"ledgerId": -1, "entryId": -1, "version": each.version} for each in found]
    return {"info": index[-1] if index else None, "index": index}
