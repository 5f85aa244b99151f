"""The Django migration that adds the column `unit`: rows with the same number were written by one transaction of the
application, and an atomic relay sends them in one transaction of the cluster."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """The Django migration that adds the column for units."""

    dependencies = [("magnetar_outbox", "0001_initial")]  # noqa: RUF012 - Django's form
    operations = [  # noqa: RUF012
        migrations.AddField("OutboxRow", "unit", models.BigIntegerField(null=True)),
        migrations.AddField("OutboxShard", "atomic", models.SmallIntegerField(null=True)),
        migrations.AddIndex("OutboxRow", models.Index(fields=["unit"], name="magnetar_outbox_unit")),
    ]
