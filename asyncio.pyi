"""For type checkers: `magnetar.asyncio` is client/aio.py."""

from .client.aio import *  # noqa: F403
