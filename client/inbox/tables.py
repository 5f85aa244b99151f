"""The inbox of an application that uses SQLAlchemy (`SQLAlchemyInbox`): one row per processed message, written in the
database transaction that processes the message.

    inbox = SQLAlchemyInbox(Base.metadata)
    with Session(engine) as session, session.begin():
        if inbox.first_time(session, "billing", message_key(message)):
            ...                                   # the work, in this transaction
    consumer.acknowledge(message)                 # after the commit, whether it was done now or before

The row and the work commit together or not at all. A crash before the commit undoes both, and the message is delivered
again; after a crash that follows the commit, the row shows that the next delivery is a repeat. If two consumers process
a message at once, the later insert waits for the earlier transaction, and then finds its row (or succeeds, if that
transaction was rolled back)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from sqlalchemy import BigInteger, Column, Connection, Index, MetaData, String, Table, delete, insert, select
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.orm import Session

from ...runtime.clock import SystemClock
from ..common.checks import WrongType
from . import KEPT_S, KEY_CHARACTERS_MAX, shorten_inbox_key

_clock = SystemClock()


class SQLAlchemyInbox:
    """The inbox of an application that uses SQLAlchemy: records which messages were processed, so that a message that
    is delivered twice is processed once. `metadata`: the application's MetaData, to which the inbox's table is added,
    so that the application's migrations create it. `table`: the name of that table; `schema`: the schema of the
    database that contains it, None for the default one."""

    def __init__(self, metadata: MetaData, table: str = "magnetar_inbox", *, schema: str | None = None) -> None:
        self.rows = Table(
            table, metadata,
            Column("subscription", String(KEY_CHARACTERS_MAX), primary_key=True),
            Column("key", String(KEY_CHARACTERS_MAX), primary_key=True),
            Column("done", BigInteger, nullable=False),
            Index(f"{table}_done", "done"),
            schema=schema,
        )  # fmt: skip

    @contextmanager
    def open_transaction(
        self, begin: Callable[[], AbstractContextManager[Session | Connection]] | None
    ) -> Iterator[tuple[Session | Connection]]:
        """Begins a transaction with `begin()`, for `once`, and yields a tuple of its Session or Connection. Raises
        WrongType if `begin` is None: this inbox has no engine of its own."""
        if begin is None:
            raise WrongType("once(inbox, begin=…) needs what begins a transaction, such as sessionmaker(engine).begin")
        with begin() as session:
            yield (session,)

    def first_time(self, session: Session | Connection, subscription: str, key: str) -> bool:
        """Records the message `key` as processed by `subscription`, in the transaction of `session`. Returns False if
        it was recorded before, else True. Waits for a transaction that records the same message at this moment.
        Databases other than PostgreSQL, SQLite, MySQL and MariaDB raise IntegrityError in that case. Raises the errors
        of SQLAlchemy if the database fails."""
        row = {"subscription": subscription, "key": shorten_inbox_key(key), "done": _clock.wall_ms()}
        dialect = session.get_bind().dialect.name if isinstance(session, Session) else session.dialect.name
        statement: Any
        match dialect:
            case "postgresql":
                statement = postgresql.insert(self.rows).on_conflict_do_nothing()
            case "sqlite":
                statement = sqlite.insert(self.rows).on_conflict_do_nothing()
            case "mysql" | "mariadb":
                statement = mysql.insert(self.rows).prefix_with("IGNORE")
            case _:
                return self._insert_if_missing(session, row)
        done: Any = session.execute(statement, row, execution_options={"preserve_rowcount": True})
        return bool(done.rowcount == 1)

    def _insert_if_missing(self, session: Session | Connection, row: dict[str, Any]) -> bool:
        """Inserts the row unless it exists; returns whether it was inserted. If two transactions conflict, one of them
        gets IntegrityError: roll back and receive the message again."""
        here = self.rows.c.subscription == row["subscription"], self.rows.c.key == row["key"]
        if session.execute(select(self.rows.c.done).where(*here)).first() is not None:
            return False
        session.execute(insert(self.rows), row)
        return True

    def purge(self, session: Session | Connection, older_than_s: float = KEPT_S, limit: int = 10_000) -> int:
        """Deletes up to `limit` records that are older than `older_than_s` seconds, in the transaction of `session`,
        and returns their number. `older_than_s` must be longer than the time within which a message may be delivered
        again. Raises the errors of SQLAlchemy if the database fails."""
        c = self.rows.c
        before = _clock.wall_ms() - int(older_than_s * 1000)
        old = session.execute(select(c.subscription, c.key).where(c.done < before).limit(limit)).all()
        for row in old:
            session.execute(delete(self.rows).where(c.subscription == row.subscription, c.key == row.key))
        return len(old)
