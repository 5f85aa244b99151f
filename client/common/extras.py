"""Packages that only some parts of the SDK need, and what installs them."""

from __future__ import annotations

EXTRAS = {"sqlalchemy": "magnetar[outbox]", "django": "django"}
"""Package → what pip is told."""


def without_extra(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError:
    """The error that says what `what` needs; of a module of another package, the same."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return error
    return ModuleNotFoundError(f"{what} needs {package}: pip install '{EXTRAS[package]}'", name=error.name)
