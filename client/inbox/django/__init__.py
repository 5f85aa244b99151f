"""The Django app of the inbox: `INSTALLED_APPS = [..., "magnetar.inbox.django"]`, then `manage.py migrate`.

The inbox of an application that uses Django (`DjangoInbox`); works like the inbox for SQLAlchemy
(client/inbox/tables.py).

    inbox = DjangoInbox()
    with transaction.atomic():
        if inbox.first_time("billing", message_key(message)):
            ...                                   # the work, in this transaction
    consumer.acknowledge(message)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import router, transaction

from ....runtime.clock import SystemClock
from ...common.checks import WrongType
from .. import KEPT_S, shorten_inbox_key

_clock = SystemClock()


class DjangoInbox:
    """The inbox of an application that uses Django: records which messages were processed, so that a message that is
    delivered twice is processed once. `using`: the alias of the database; by default the database that Django's routers
    choose."""

    def __init__(self, using: str | None = None) -> None:
        self._using = using

    @contextmanager
    def open_transaction(self, begin: object = None) -> Iterator[tuple[()]]:
        """Begins a transaction, for `once`, and yields an empty tuple. Raises WrongType if `begin` is given: Django
        begins its transactions itself."""
        from .models import InboxRow

        if begin is not None:
            raise WrongType("once(DjangoInbox()) begins its own transaction: no begin")
        with transaction.atomic(using=self._using or router.db_for_write(InboxRow)):
            yield ()

    def first_time(self, subscription: str, key: str) -> bool:
        """Records the message `key` as processed by `subscription`, in the current database transaction of this thread.
        Returns False if it was recorded before, else True. Raises TransactionManagementError outside of `atomic()`:
        there the record would be committed before the work. Raises the errors of Django if the database fails."""
        from .models import InboxRow

        using = self._using or router.db_for_write(InboxRow)
        if not transaction.get_connection(using).in_atomic_block:
            raise transaction.TransactionManagementError(
                "inbox.first_time belongs into the transaction of the work: with transaction.atomic(): …"
            )
        row = {"subscription": subscription, "key": shorten_inbox_key(key)}
        _, created = InboxRow.objects.using(using).get_or_create(**row, defaults={"done": _clock.wall_ms()})
        return bool(created)

    def purge(self, older_than_s: float = KEPT_S, limit: int = 10_000) -> int:
        """Deletes up to `limit` records that are older than `older_than_s` seconds, and returns their number.
        `older_than_s` must be longer than the time within which a message may be delivered again. Raises the errors of
        Django if the database fails."""
        from .models import InboxRow

        using = self._using or router.db_for_write(InboxRow)
        before = _clock.wall_ms() - int(older_than_s * 1000)
        ids = InboxRow.objects.using(using).filter(done__lt=before).values_list("pk", flat=True)[:limit]
        deleted, _ = InboxRow.objects.using(using).filter(pk__in=list(ids)).delete()
        return int(deleted)
