"""`DjangoOutbox`: the outbox of an application that uses Django.

    outbox = DjangoOutbox()
    with transaction.atomic():
        order.save()
        outbox.send("orders", b"…", key=str(order.pk))

The relay is a process (`magnetar outbox relay --database URL`), or runs beside the application with an engine of
SQLAlchemy for the same database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from django.db import router, transaction

from ...model.schema import Schema
from ..rows import TABLE, new_row

if TYPE_CHECKING:
    from ..tables import SQLAlchemyOutbox


class DjangoOutbox:
    """`using`: the alias of the database; by default the one that Django's routers say."""

    def __init__(self, using: str | None = None) -> None:
        self._using = using
        self.relays: WeakSet[Any] = WeakSet()  # of this process: a commit wakes them
        self._tables: SQLAlchemyOutbox | None = None

    def tables(self) -> SQLAlchemyOutbox:
        """The same tables, for the relay."""
        from sqlalchemy import MetaData

        from ..tables import SQLAlchemyOutbox

        if self._tables is None:
            self._tables = SQLAlchemyOutbox(MetaData(), TABLE)
        return self._tables

    def send(
        self, topic: str, value: object, *, key: str | None = None, properties: Mapping[str, str] | None = None,
        event_time: int | None = None, deliver_at: int | None = None, schema: Schema | None = None,
    ) -> None:  # fmt: skip
        """As SQLAlchemyOutbox.send, in the transaction of this thread. TransactionManagementError outside of
        `atomic()`: the row would commit alone, without what it tells of."""
        from .models import OutboxRow

        row = new_row(topic, value, key, properties, event_time, deliver_at, schema)
        using = self._using or router.db_for_write(OutboxRow)
        if not transaction.get_connection(using).in_atomic_block:
            raise transaction.TransactionManagementError(
                "outbox.send belongs into the transaction of what it tells of: with transaction.atomic(): …"
            )
        OutboxRow.objects.using(using).create(**row)
        if self.relays:
            transaction.on_commit(self.wake, using=using, robust=True)

    def wake(self) -> None:
        """Relays of this process look at once."""
        for relay in list(self.relays):
            relay.wake()
