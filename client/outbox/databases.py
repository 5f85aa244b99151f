"""Errors of a database, translated once: what SQLAlchemy raises becomes an OutboxError that says what to do.

What is not known here counts as unreachable, and is tried again: a lock that timed out, a deadlock, a fail-over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, inspect
from sqlalchemy.exc import DBAPIError, InterfaceError, SQLAlchemyError

from .errors import OutboxColumnsMissing, OutboxError, OutboxReadOnly, OutboxTableMissing, OutboxUnreachable
from .tables import SQLAlchemyOutbox

_TABLE = ("no such table", "undefinedtable", "doesn't exist")
_COLUMN = ("no such column", "no column named", "unknown column")
_READ_ONLY = ("readonly database", "read-only", "read only", "permission denied")
_SQLSTATES: dict[str, type[OutboxError]] = {
    "42P01": OutboxTableMissing, "42703": OutboxColumnsMissing, "25006": OutboxReadOnly, "42501": OutboxReadOnly,
}  # fmt: skip
"""SQLSTATE of PostgreSQL → error: undefined_table, undefined_column, read_only_sql_transaction, insufficient_privilege.
"""

WHAT_TO_DO = {
    OutboxTableMissing: "a migration makes it, or metadata.create_all(engine), or 'magnetar outbox create'",
    OutboxColumnsMissing: "a migration of this version is not applied, or another program has a table of that name:"
    " apply it, or choose another name (table=…, --table)",
    OutboxReadOnly: "a relay claims and deletes rows: give it the primary server, and a role that may SELECT, INSERT,"
    " UPDATE and DELETE on the three tables of the outbox",
    OutboxUnreachable: "is the server there, and are URL and password right?",
}


@contextmanager
def translated() -> Iterator[None]:
    """Raises an OutboxError in place of what SQLAlchemy raises; the original is its cause."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _translate(error) from error
    except OSError as error:
        raise OutboxUnreachable(f"the database: {error}; {WHAT_TO_DO[OutboxUnreachable]}") from error


def _translate(error: SQLAlchemyError) -> OutboxError:
    original = getattr(error, "orig", None)
    text = str(original or error).strip().splitlines()[0] if str(original or error).strip() else type(error).__name__
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    kind: type[OutboxError] = OutboxUnreachable
    if state in _SQLSTATES:
        kind = _SQLSTATES[state]
    elif isinstance(error, DBAPIError) and not isinstance(error, InterfaceError):
        lower = text.lower()
        for candidate, signs in (
            (OutboxTableMissing, _TABLE), (OutboxColumnsMissing, _COLUMN), (OutboxReadOnly, _READ_ONLY),
        ):  # fmt: skip
            if any(sign in lower for sign in signs):
                kind = candidate
                break
    return kind(f"the database said: {text}; {WHAT_TO_DO[kind]}")


def check_tables(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    """Raises OutboxTableMissing or OutboxColumnsMissing if the tables are not as `outbox` needs them."""
    with translated():
        found = inspect(engine)
        for table in (outbox.rows, outbox.shards, outbox.positions):
            if not found.has_table(table.name, schema=table.schema):
                what = f"the database {shown(engine)} has no table {table.name}"
                raise OutboxTableMissing(f"{what}; {WHAT_TO_DO[OutboxTableMissing]}")
            there = {column["name"] for column in found.get_columns(table.name, schema=table.schema)}
            missing = [column.name for column in table.columns if column.name not in there]
            if missing:
                what = f"table {table.name} of {shown(engine)} has no column {', '.join(missing)}"
                raise OutboxColumnsMissing(f"{what}; {WHAT_TO_DO[OutboxColumnsMissing]}")


def shown(engine: Engine) -> str:
    """The URL without its password."""
    return engine.url.render_as_string(hide_password=True)
