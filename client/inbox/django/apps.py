"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig


class InboxConfig(AppConfig):  # type: ignore[misc]  # Django has no types
    """The Django app of the inbox."""

    name = __package__
    label = "magnetar_inbox"
    verbose_name = "Magnetar inbox"
    default_auto_field = "django.db.models.BigAutoField"
