"""`Function`, the base of a program's functions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any


class Function:
    """Takes each message of its input topics, and may give one for its output topic."""

    @abstractmethod
    def process(self, input: Any, context: Any) -> Any:
        """Returns what the message `input` becomes; None: nothing. `context`: a `Context`."""
