"""For type checkers: `magnetar.admin` is client/admin/."""

from .client.admin import *  # noqa: F403
