"""For type checkers: `magnetar.inbox` is client/inbox/."""

from .client.inbox import *  # noqa: F403
