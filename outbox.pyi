"""For type checkers: `magnetar.outbox` is client/outbox/."""

from .client.outbox import *  # noqa: F403
