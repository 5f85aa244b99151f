"""Schemas over HTTP, with Pulsar's statuses and bodies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.broker.rest.http import V2, serving

NS = f"{V2}/namespaces/public/default"
SCHEMAS = f"{V2}/schemas/public/default/typed"


def _record(*fields: tuple[str, Any]) -> dict[str, Any]:
    described = [{"name": name, "type": kind} for name, kind in fields]
    text = json.dumps({"type": "record", "name": "Order", "fields": described})
    return {"type": "AVRO", "schema": text, "properties": {"of": "test"}}


async def test_schemas_are_registered_shown_compared_and_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _, _):
        first, second = _record(("a", "int")), _record(("a", "int"), ("b", "long"))
        await http.get(f"{SCHEMAS}/schema", 404)
        assert (await http.done("POST", f"{SCHEMAS}/schema", first, 200)).json == {"version": 0}
        shown = await http.get(f"{SCHEMAS}/schema")
        assert (shown["version"], shown["type"], shown["properties"]) == (0, "AVRO", {"of": "test"})
        assert json.loads(shown["data"]) == json.loads(first["schema"])
        assert shown["timestamp"] > 0
        refused = await http.done("POST", f"{SCHEMAS}/schema", second, 409)
        assert "b" in refused.reason
        tested = await http.done("POST", f"{SCHEMAS}/compatibility", second, 200)
        assert tested.json == {"compatibility": False, "schemaCompatibilityStrategy": "FULL"}
        await http.done("PUT", f"{NS}/schemaCompatibilityStrategy", "FORWARD")
        assert (await http.done("POST", f"{SCHEMAS}/schema", second, 200)).json == {"version": 1}
        assert (await http.done("POST", f"{SCHEMAS}/version", first, 200)).json == {"version": 0}
        await http.done("POST", f"{SCHEMAS}/version", {"type": "STRING", "schema": "", "properties": None}, 404)
        assert (await http.get(f"{SCHEMAS}/schema/0"))["version"] == 0
        every = await http.get(f"{SCHEMAS}/schemas")
        assert [each["version"] for each in every["getSchemaResponses"]] == [0, 1]
        await http.get(f"{SCHEMAS}/schema/7", 404)
        assert (await http.ask("DELETE", f"{SCHEMAS}/schema?force=true")).status == 200
        await http.get(f"{SCHEMAS}/schema", 404)


async def test_what_is_no_schema_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _, _):
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
