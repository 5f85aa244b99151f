"""The document of OpenAPI 3.1, made of the table of routes."""

from __future__ import annotations

import functools
import re
from typing import Any

from ....proto.versions import PRODUCT
from .table import ROUTES, Row

_NAME = re.compile(r"\{(\w+)(?::\w+)?\}")
_SECRETS = {
    "bearer": {"type": "http", "scheme": "bearer"}, "basic": {"type": "http", "scheme": "basic"},
    "certificate": {"type": "mutualTLS"},
}  # fmt: skip


def plain_path(row: Row) -> str:
    """Returns the path with names in braces alone."""
    return _NAME.sub(r"{\1}", row.path)


@functools.cache
def document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for row in ROUTES:
        paths.setdefault(plain_path(row), {})[row.method.lower()] = _operation(row)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Magnetar: administration by REST, as Pulsar's v2", "version": PRODUCT},
        "paths": paths,
        "components": {"securitySchemes": _SECRETS, "schemas": {"Error": {
            "type": "object", "properties": {"reason": {"type": "string"}}, "required": ["reason"],
        }}},
    }  # fmt: skip


def _operation(row: Row) -> dict[str, Any]:
    done = {"200": {"description": row.answer}} if row.answer else {"204": {"description": "done"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {
        "operationId": f"{row.handler.__name__}_{re.sub(r'[^a-z]+', '_', row.path.lower()).strip('_')}_{row.method}",
        "summary": row.summary, "parameters": [_parameter(name) for name in _NAME.findall(row.path)],
        "responses": {**done, "default": {"description": "an error", "content": error}},
        "security": [] if row.is_open else [{name: []} for name in _SECRETS],
    }  # fmt: skip
    if row.body:
        found["requestBody"] = {"description": row.body, "content": {"application/json": {}}}
    return found


def _parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if name == "domain":
        schema["enum"] = ["persistent", "non-persistent"]
    return {"name": name, "in": "path", "required": True, "schema": schema}
