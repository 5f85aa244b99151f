"""The configuration of the outbox's Django app."""

from __future__ import annotations

from django.apps import AppConfig


class OutboxConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The configuration of the outbox as a Django app."""

    name = __package__
    label = "magnetar_outbox"
    verbose_name = "Magnetar outbox"
    default_auto_field = "django.db.models.BigAutoField"
