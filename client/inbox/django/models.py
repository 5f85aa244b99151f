"""The inbox's table as a Django model."""

from __future__ import annotations

from django.db import models


class InboxRow(models.Model):  # type: ignore[misc]  # Django has no types
    """The database row of one message that a subscription has processed."""

    subscription = models.CharField(max_length=255)
    key = models.CharField(max_length=255)
    done = models.BigIntegerField()

    class Meta:
        """Django's options of the model: the table's name, its constraint and its index."""

        db_table = "magnetar_inbox"
        constraints = [  # noqa: RUF012 - Django's form
            models.UniqueConstraint(fields=["subscription", "key"], name="magnetar_inbox_key"),
        ]
        indexes = [  # noqa: RUF012
            models.Index(fields=["done"], name="magnetar_inbox_done"),
        ]
