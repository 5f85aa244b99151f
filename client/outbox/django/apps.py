"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The Django app of the outbox."""

    name = __package__
    label = "magnetar_outbox"
    verbose_name = "Magnetar outbox"
    default_auto_field = "django.db.models.BigAutoField"
