"""Schemas over HTTP, with Pulsar's statuses and bodies."""

import json

from tests.broker.rest.http import V2, Http

SCHEMAS = f"{V2}/schemas/public/default/typed"


async def test_what_is_no_schema_is_refused(http: Http) -> None:
    for given, status in (
        ({"type": "AVRO", "schema": "{", "properties": {}}, 422),
        ({"type": "AVRO", "schema": json.dumps({"type": "record"})}, 422),
        ({"type": "SONG", "schema": ""}, 422),
        ({"type": "KEY_VALUE", "schema": "[]"}, 422),
        ({"schema": ""}, 400),
        ({"type": "STRING", "properties": {"a": 1}}, 400),
    ):  # fmt: skip
        for path in ("schema", "compatibility", "version"):
            found = await http.done("POST", f"{SCHEMAS}/{path}", given, status)
            assert found.reason
    await http.get(f"{SCHEMAS}/schema/x", 400)
    await http.get(f"{V2}/schemas/public/none/typed/schemas", 404)
