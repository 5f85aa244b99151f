"""The tables of client/outbox/tables.py as Django models: the migrations create the tables, and the admin site shows
them.

Guard: tests/client/outbox/test_django.py compares both."""

from __future__ import annotations

from django.db import models


class OutboxRow(models.Model):  # type: ignore[misc]  # Django has no types
    """The database row of one message that waits until a relay sends it."""

    topic = models.CharField(max_length=600)
    key = models.TextField(null=True)
    value = models.BinaryField(null=True)
    properties = models.TextField(null=True)
    event_time = models.BigIntegerField(null=True)
    deliver_at = models.BigIntegerField(null=True)
    created = models.BigIntegerField()
    key_hash = models.IntegerField()
    size = models.IntegerField()
    state = models.SmallIntegerField()
    attempts = models.SmallIntegerField()
    error = models.TextField(null=True)
    retry_at = models.BigIntegerField(null=True)
    seq = models.BigIntegerField(null=True)
    shard = models.SmallIntegerField(null=True)
    destination = models.CharField(max_length=640, null=True)
    unit = models.BigIntegerField(null=True)
    value_schema = models.TextField(null=True)
    key_form = models.SmallIntegerField(null=True)

    class Meta:
        """Django's options of the model: the table's name and its indexes."""

        db_table = "magnetar_outbox"
        indexes = [  # noqa: RUF012 - Django's form
            models.Index(fields=["state", "id"], name="magnetar_outbox_state_id"),
            models.Index(fields=["state", "topic"], name="magnetar_outbox_state_topic"),
            models.Index(fields=["unit"], name="magnetar_outbox_unit"),
        ]


class OutboxShard(models.Model):  # type: ignore[misc]
    """The database row of one shard of the outbox: the relay that holds it, its epoch and its next sequence id."""

    shard = models.SmallIntegerField(primary_key=True)
    shards = models.SmallIntegerField()
    epoch = models.BigIntegerField()
    next_seq = models.BigIntegerField()
    holder = models.TextField()
    seen = models.BigIntegerField()
    atomic = models.SmallIntegerField(null=True)

    class Meta:
        """Django's options of the model: the table's name."""

        db_table = "magnetar_outbox_shards"


class OutboxPosition(models.Model):  # type: ignore[misc]
    """The database row of one destination: the highest sequence id that the destination has stored."""

    shard = models.SmallIntegerField()
    destination = models.CharField(max_length=640)
    seq = models.BigIntegerField()

    class Meta:
        """Django's options of the model: the table's name and its constraint."""

        db_table = "magnetar_outbox_positions"
        constraints = [  # noqa: RUF012 - Django's form
            models.UniqueConstraint(fields=["shard", "destination"], name="magnetar_outbox_position"),
        ]
