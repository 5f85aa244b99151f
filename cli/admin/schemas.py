"""`magnetar schemas …`: pulsar-admin's verbs for the schemas of topics."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import option

from ..common.lazy import LazyCommand, LazyGroup
from ..common.session import CommandSession, confirm_deletion, session_command
from .topics import full_name

if TYPE_CHECKING:
    from ...proto.schema import SchemaInfo
    from ...proto.statistics import TopicSchema

SCHEMA_COLUMNS = ("version", "type", "name", "created", "user", "schema")
FILE_OPTION = option(
    "-f", "--filename", "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), required=True,
    help='JSON: {"type": "AVRO", "schema": "…", "properties": {}}; - reads standard input.',
)  # fmt: skip

schemas = LazyGroup(
    "schemas",
    {
        "get": LazyCommand(".admin.schemas", "get", "The newest schema of a topic, or a version."),
        "list": LazyCommand(".admin.schemas", "list_", "All versions."),
        "upload": LazyCommand(".admin.schemas", "upload", "Register a schema from a file."),
        "extract": LazyCommand(".admin.schemas", "extract", "Register the schema of a Python class."),
        "compatibility": LazyCommand(".admin.schemas", "compatibility", "Whether a schema could be registered."),
        "delete": LazyCommand(".admin.schemas", "delete", "Delete the schemas of a topic."),
    },
    with_rows=True,
    help="Schemas of topics.\n\nExample: magnetar schemas get orders",
)


@session_command(
    option("-v", "--version", type=click.IntRange(0), help="That one, also when it is deleted."),
    option("-a", "--all-version", "all_", is_flag=True, help="All that are not deleted."),
)
def get(session: CommandSession, topic: str, version: int | None, all_: bool) -> None:
    """Show the newest schema of a topic, or the version that is given.

    Example: magnetar schemas get orders -v 0
    """
    if all_:
        session.out.print_rows([_row(each) for each in session.admin.schemas(topic)], SCHEMA_COLUMNS)
    else:
        session.out.print_record(_row(session.admin.schema(topic, version)))


@session_command(watched=True)
def list_(session: CommandSession, topic: str) -> None:
    """List all versions of a topic's schema that are not deleted, the oldest first.

    Example: magnetar schemas list orders
    """
    session.out.print_rows([_row(each) for each in session.admin.schemas(topic)], SCHEMA_COLUMNS)


def _row(found: TopicSchema) -> dict[str, Any]:
    from datetime import UTC, datetime

    from ...proto.schema import format_schema_definition

    info = found.schema
    return {
        "version": found.version, "type": info.type.name, "name": info.name, "properties": info.properties,
        "created": datetime.fromtimestamp(found.created_ms / 1000, UTC).isoformat(timespec="seconds"),
        "user": found.user, "deleted": found.deleted, "schema": format_schema_definition(info),
    }  # fmt: skip


@session_command(FILE_OPTION)
def upload(session: CommandSession, topic: str, file: str) -> None:
    """Register a schema, also where producers may not. A schema that is registered already keeps its version.

    Example: magnetar schemas upload orders -f order.json
    """
    _register(session, topic, _read(file))


@session_command(
    option("-c", "--classname", required=True, metavar="MODULE:CLASS", help="A Record of magnetar.schema."),
    option("-t", "--type", "type_", type=click.Choice(["avro", "json"]), default="avro", show_default=True),
    option("-n", "--dry-run", is_flag=True, help="Print the schema and register nothing."),
)
def extract(session: CommandSession, topic: str, classname: str, type_: str, dry_run: bool) -> None:
    """Register the schema of a Python class, which must be importable from the current directory.

    Example: magnetar schemas extract orders -c shop.records:Order
    """
    from ...proto.schema import make_schema_info

    definition = json.dumps(_class(classname).schema())
    if dry_run:
        session.out.print_record({"type": type_.upper(), "schema": definition})
    else:
        _register(session, topic, make_schema_info(type_, definition, {}, type_.upper()))


def _class(named: str) -> Any:
    from ...client.model.record import Record

    module, colon, name = named.partition(":")
    if not colon:
        module, _, name = named.rpartition(".")
    sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise click.UsageError(f"{named}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Record)):
        raise click.UsageError(f"{named} is no Record of magnetar.schema")
    return found


@session_command(FILE_OPTION)
def compatibility(session: CommandSession, topic: str, file: str) -> None:
    """Show whether a schema could be registered at a topic, and by which compatibility rule. Nothing is registered.

    Example: magnetar schemas compatibility orders -f order.json
    """
    found = session.admin.test_schema(topic, _read(file))
    session.out.print_record(
        {"compatible": not found.refused, "strategy": found.compatibility.upper(), "why": found.refused}
    )


@session_command(
    option("-f", "--force", is_flag=True, help="The definitions too: what was written with them stays bytes.")
)
def delete(session: CommandSession, topic: str, force: bool, yes: bool) -> None:
    """Delete the schemas of a topic: new schemas are not compared with them any more. Messages that were written with
    them can still be decoded, unless --force is given, which asks first.

    Example: magnetar schemas delete orders
    """
    if force:
        confirm_deletion(f"Delete the definitions of all schemas of {full_name(topic)}", yes)
    version = session.admin.delete_schemas(topic, force=force)
    what = "has no schema" if version is None else f"has no schema any more, up to version {version}"
    session.out.print_result_text(f"topic {full_name(topic)} {what}", topic=full_name(topic), version=version)


def _register(session: CommandSession, topic: str, info: SchemaInfo) -> None:
    version = session.admin.put_schema(topic, info)
    session.out.print_result_text(
        f"topic {full_name(topic)} has it as version {version}", topic=full_name(topic), version=version
    )


def _read(file: str) -> SchemaInfo:
    from ...proto.schema import make_schema_info

    try:
        loaded = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text())
        properties = {str(key): str(value) for key, value in (loaded.get("properties") or {}).items()}
        text = loaded["schema"]
        return make_schema_info(loaded["type"], text if isinstance(text, str) else json.dumps(text), properties)
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise click.UsageError(f'{file}: no {{"type": …, "schema": …}}: {error}') from error
