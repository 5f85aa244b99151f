"""For type checkers: `magnetar.exceptions` is client/common/errors.py."""

from .client.common.errors import *  # noqa: F403
