"""A message with what `send` may say of it, as a value: of `process`, and of half messages."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(frozen=True, slots=True)
class Output:
    """A message to send, with more than its value. `producer`: of a half message; or another one than that of
    `process`, of its client."""

    value: Any
    partition_key: str | None = None
    ordering_key: str | None = None
    properties: dict[str, str] | None = None
    event_timestamp: int | None = None
    deliver_at: int | None = None
    deliver_after: timedelta | None = None
    producer: Any = None
