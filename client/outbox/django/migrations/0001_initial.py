"""The Django migration that creates the three tables of the outbox."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models


def _id() -> tuple[str, Any]:
    return "id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """The Django migration that creates the outbox's tables."""

    initial = True
    dependencies: list[Any] = []  # noqa: RUF012 - Django's form
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="OutboxShard",
            fields=[
                ("shard", models.SmallIntegerField(primary_key=True, serialize=False)),
                ("shards", models.SmallIntegerField()),
                ("epoch", models.BigIntegerField()),
                ("next_seq", models.BigIntegerField()),
                ("holder", models.TextField()),
                ("seen", models.BigIntegerField()),
            ],
            options={"db_table": "magnetar_outbox_shards"},
        ),
        migrations.CreateModel(
            name="OutboxPosition",
            fields=[
                _id(),
                ("shard", models.SmallIntegerField()),
                ("destination", models.CharField(max_length=640)),
                ("seq", models.BigIntegerField()),
            ],
            options={
                "db_table": "magnetar_outbox_positions",
                "constraints": [
                    models.UniqueConstraint(fields=("shard", "destination"), name="magnetar_outbox_position"),
                ],
            },
        ),
        migrations.CreateModel(
            name="OutboxRow",
            fields=[
                _id(),
                ("topic", models.CharField(max_length=600)),
                ("key", models.TextField(null=True)),
                ("value", models.BinaryField(null=True)),
                ("properties", models.TextField(null=True)),
                ("event_time", models.BigIntegerField(null=True)),
                ("deliver_at", models.BigIntegerField(null=True)),
                ("created", models.BigIntegerField()),
                ("key_hash", models.IntegerField()),
                ("size", models.IntegerField()),
                ("state", models.SmallIntegerField()),
                ("attempts", models.SmallIntegerField()),
                ("error", models.TextField(null=True)),
                ("retry_at", models.BigIntegerField(null=True)),
                ("seq", models.BigIntegerField(null=True)),
                ("shard", models.SmallIntegerField(null=True)),
                ("destination", models.CharField(max_length=640, null=True)),
            ],
            options={
                "db_table": "magnetar_outbox",
                "indexes": [
                    models.Index(fields=["state", "id"], name="magnetar_outbox_state_id"),
                    models.Index(fields=["state", "topic"], name="magnetar_outbox_state_topic"),
                ],
            },
        ),
    ]
