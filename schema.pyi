"""For type checkers: `magnetar.schema` is client/model/schemas.py."""

from .client.model.schemas import *  # noqa: F403
