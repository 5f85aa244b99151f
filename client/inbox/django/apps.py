"""The configuration of the inbox's Django app."""

from __future__ import annotations

from django.apps import AppConfig


class InboxConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The configuration of the inbox as a Django app."""

    name = __package__
    label = "magnetar_inbox"
    verbose_name = "Magnetar inbox"
    default_auto_field = "django.db.models.BigAutoField"
