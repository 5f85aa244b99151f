"""The database and table of every command of an outbox, and what is said when SQLAlchemy is missing."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from ..common.exits import NOT_AVAILABLE, USAGE, Failure

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from ...client.outbox import SQLAlchemyOutbox
    from ...client.outbox.administration import OutboxAdmin


class Database:
    """The engine and the tables; `close` ends it."""

    def __init__(self, url: str, table: str) -> None:
        try:
            from sqlalchemy import MetaData, create_engine
            from sqlalchemy.exc import ArgumentError, NoSuchModuleError
        except ImportError as error:
            raise Failure("an outbox needs SQLAlchemy: pip install 'magnetar[outbox]'", NOT_AVAILABLE) from error
        from ...client.outbox import SQLAlchemyOutbox

        try:
            self.engine: Engine = create_engine(url, pool_pre_ping=True)
        except (ArgumentError, NoSuchModuleError, ValueError) as error:
            raise Failure(
                f"--database is a URL of SQLAlchemy, as postgresql+psycopg://user@host/orders: {error}", USAGE
            ) from error
        except ImportError as error:
            raise Failure(f"the driver of this database is missing: pip install {error.name}", NOT_AVAILABLE) from error
        self.outbox: SQLAlchemyOutbox = SQLAlchemyOutbox(MetaData(), table)

    def admin(self, *, checked: bool = True) -> OutboxAdmin:
        from ...client.outbox.administration import OutboxAdmin

        admin = OutboxAdmin(self.engine, self.outbox)
        if checked:
            admin.check()
        return admin

    def close(self) -> None:
        self.engine.dispose()


def with_database(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --database and --table, and gives the command its Database as `database`."""

    @click.option(
        "-d", "--database", "database_url", envvar="MAGNETAR_OUTBOX_DATABASE", required=True, metavar="URL",
        help="Of SQLAlchemy; better in MAGNETAR_OUTBOX_DATABASE when it has a password.",
    )  # fmt: skip
    @click.option("--table", default="magnetar_outbox", show_default=True, help="The table of the rows.")
    @wraps(function)
    def command(*arguments: Any, database_url: str, table: str, **options: Any) -> None:
        database = Database(database_url, table)
        try:
            function(*arguments, database=database, **options)
        finally:
            database.close()

    return command


def with_output(function: Callable[..., None]) -> Callable[..., None]:
    """Adds -o for commands that ask no server, and gives the command its Output as `out`."""

    @click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
    @wraps(function)
    def command(*arguments: Any, output: str, **options: Any) -> None:
        from ..common.output import Output

        function(*arguments, out=Output(output), **options)

    return command
