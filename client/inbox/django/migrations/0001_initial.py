"""The Django migration that creates the inbox's table."""

from __future__ import annotations

from typing import Any

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """The Django migration that creates the inbox's table."""

    initial = True
    dependencies: list[Any] = []  # noqa: RUF012 - Django's form
    operations = [  # noqa: RUF012
        migrations.CreateModel(
            name="InboxRow",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("subscription", models.CharField(max_length=255)),
                ("key", models.CharField(max_length=255)),
                ("done", models.BigIntegerField()),
            ],
            options={
                "db_table": "magnetar_inbox",
                "constraints": [
                    models.UniqueConstraint(fields=("subscription", "key"), name="magnetar_inbox_key"),
                ],
                "indexes": [models.Index(fields=["done"], name="magnetar_inbox_done")],
            },
        ),
    ]
