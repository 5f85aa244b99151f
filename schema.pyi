"""For type checkers: `magnetar.schema` is client/schemas.py."""

from .client.schemas import *  # noqa: F403
