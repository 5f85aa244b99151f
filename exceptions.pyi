"""For type checkers: `magnetar.exceptions` is client/errors.py."""

from .client.errors import *  # noqa: F403
