"""The Django app of the outbox: `INSTALLED_APPS = [..., "magnetar.outbox.django"]`, then `manage.py migrate`.

The outbox of an application that uses Django (`DjangoOutbox`).

    outbox = DjangoOutbox()
    with transaction.atomic():
        order.save()
        outbox.send("orders", b"…", key=str(order.pk))

The relay is a process of its own (`magnetar outbox relay --database URL`), or runs in the application, with a
SQLAlchemy engine for the same database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.db import router, transaction

from ...model.schema import Schema
from ..rows import OUTBOX_TABLE, make_outbox_row, make_random_unit_id

if TYPE_CHECKING:
    from ..tables import SQLAlchemyOutbox


class _CommitCallback:
    """The callback on the commit of a transaction that wrote rows: wakes the relays. It has the unit of these rows."""

    def __init__(self, outbox: DjangoOutbox) -> None:
        self.outbox = outbox
        self.unit = make_random_unit_id()

    def __call__(self) -> None:
        self.outbox.wake()


class DjangoOutbox:
    """The outbox of an application that uses Django: writes messages as rows in the application's own database
    transaction, and relays send them later. `using`: the alias of the database; by default the database that Django's
    routers choose."""

    def __init__(self, using: str | None = None) -> None:
        self._using = using
        self.relays: WeakSet[Any] = WeakSet()  # of this process: a commit wakes them
        self._tables: SQLAlchemyOutbox | None = None

    def tables(self) -> SQLAlchemyOutbox:
        """Returns the tables of the outbox as a SQLAlchemyOutbox, which the relay needs. Raises ModuleNotFoundError if
        SQLAlchemy is not installed."""
        from sqlalchemy import MetaData

        from ..tables import SQLAlchemyOutbox

        if self._tables is None:
            self._tables = SQLAlchemyOutbox(MetaData(), OUTBOX_TABLE)
        return self._tables

    def send(
        self, topic: str, value: object, *, key: str | None = None, properties: Mapping[str, str] | None = None,
        event_time: int | None = None, deliver_at: int | None = None, schema: Schema | None = None,
    ) -> None:  # fmt: skip
        """Writes a message as a row, with the parameters of SQLAlchemyOutbox.send, in the current database transaction
        of this thread. Its commit wakes the relays of this process. Raises TransactionManagementError outside of
        `atomic()`: there the row would be committed apart from the change that the message reports. Raises
        InvalidTopicName, InvalidMessage or MessageTooBig before anything is written; later the errors of Django if the
        database fails."""
        from .models import OutboxRow

        using = self._using or router.db_for_write(OutboxRow)
        connection = transaction.get_connection(using)
        if not connection.in_atomic_block:
            raise transaction.TransactionManagementError(
                "outbox.send belongs into the transaction of what it tells of: with transaction.atomic(): …"
            )
        written = self._written(connection)
        row = make_outbox_row(topic, value, key, properties, event_time, deliver_at, schema, written.unit)
        OutboxRow.objects.using(using).create(**row)

    def _written(self, connection: Any) -> _CommitCallback:
        """Returns the callback that the transaction of this thread has for this outbox; registers one if there is none.
        Django drops it with the transaction, or with the savepoint in which it was registered, together with the rows.
        """
        for each in connection.run_on_commit:
            if isinstance(each[1], _CommitCallback) and each[1].outbox is self:
                return each[1]
        written = _CommitCallback(self)
        transaction.on_commit(written, using=connection.alias, robust=True)
        return written

    def wake(self) -> None:
        """Makes the relays that run in this process search for rows at once instead of after their pause."""
        for relay in list(self.relays):
            relay.wake()
