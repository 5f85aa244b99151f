"""The Django migration that adds two columns: the schema with which a row's value is encoded, and the form of a key
that is not text."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):  # type: ignore[misc]  # Django has no types
    """The Django migration that adds the columns for schemas and for the form of keys."""

    dependencies = [("magnetar_outbox", "0002_units")]  # noqa: RUF012 - Django's form
    operations = [  # noqa: RUF012
        migrations.AddField("OutboxRow", "value_schema", models.TextField(null=True)),
        migrations.AddField("OutboxRow", "key_form", models.SmallIntegerField(null=True)),
    ]
