"""`magnetar schemas` against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_admin import Cli, Json

pytestmark = pytest.mark.processes


def test_schemas_are_uploaded_shown_tested_and_deleted(
    cli: Cli, cli_json: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def file(*names: str) -> str:
        fields = [{"name": name, "type": "int"} for name in names]
        path = tmp_path / "_".join(names)
        text = json.dumps({"type": "record", "name": "R", "fields": fields})
        path.write_text(json.dumps({"type": "avro", "schema": text, "properties": {"k": "v"}}))
        return str(path)

    assert "has no schema" in cli("schemas", "get", "typed", code=4).err
    assert "as version 0" in cli("schemas", "upload", "typed", "-f", file("a")).out
    found = cli_json("schemas", "get", "typed")
    assert (found["version"], found["type"], found["properties"]) == (0, "AVRO", {"k": "v"})
    assert json.loads(found["schema"])["fields"] == [{"name": "a", "type": "int"}]
    tested = cli_json("schemas", "compatibility", "typed", "-f", file("b"))
    assert (tested["compatible"], tested["strategy"]) == (False, "FULL")
    assert "field `b`" in tested["why"]
    assert "field `b`" in cli("schemas", "upload", "typed", "-f", file("b"), code=1).err
    cli("namespaces", "set-schema-compatibility-strategy", "public/default", "-c", "ALWAYS_COMPATIBLE")
    (tmp_path / "kinds.py").write_text(
        "from magnetar.schema import Integer, Record\nclass Order(Record):\n    a = Integer()\n"
    )
    monkeypatch.chdir(tmp_path)
    extract = ("schemas", "extract", "typed", "-c", "kinds:Order")
    shown = cli_json(*extract, "--dry-run")
    assert json.loads(shown["schema"])["name"] == "Order"
    cli(*extract)
    assert "no module" in cli("schemas", "extract", "typed", "-c", "absent:Order", code=2).err.lower()
    assert [each["version"] for each in cli_json("schemas", "list", "typed")] == [0, 1]
    (tmp_path / "pair").write_text(json.dumps({"type": "KEY_VALUE", "schema": '{"key":"","value":{"type":"int"}}'}))
    assert "value.schema.type" in cli("schemas", "upload", "typed2", "-f", str(tmp_path / "pair"), code=2).err
    assert "no {" in cli("schemas", "upload", "typed2", "-f", str(tmp_path / "kinds.py"), code=2).err
    assert "up to version 1" in cli("schemas", "delete", "typed").out
    assert cli_json("schemas", "get", "typed", "-v", "0")["deleted"]
    cli("schemas", "delete", "typed", "--force")
    cli("schemas", "get", "typed", "-v", "0", code=4)
    cli("namespaces", "remove-schema-compatibility-strategy", "public/default")
