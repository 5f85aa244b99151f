"""For type checkers: `magnetar.streams` is client/streams.py."""

from .client.streams import *  # noqa: F403
