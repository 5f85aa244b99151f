"""How the values of a function become bytes and back."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from typing import Any


class SerDe:
    """Base of a program's own serializers."""

    @abstractmethod
    def serialize(self, input: Any) -> Any:
        """Returns the bytes of a value."""

    @abstractmethod
    def deserialize(self, input_bytes: Any) -> Any:
        """Returns the value of bytes."""


class PickleSerDe(SerDe):
    """Serializes by pickle, which runs what the bytes say: only for topics whose producers are trusted."""

    def serialize(self, input: Any) -> bytes:
        return pickle.dumps(input)

    def deserialize(self, input_bytes: bytes) -> Any:
        return pickle.loads(input_bytes)


class IdentitySerDe(SerDe):
    """Numbers and text as text, bytes as they are. Bytes come back as the first of int, float, complex and text that
    they are. TypeError: a value of another type."""

    _types = (int, float, complex, str)

    def serialize(self, input: Any) -> bytes:
        if type(input) is bytes:
            return input
        if type(input) in self._types:
            return str(input).encode()
        raise TypeError(f"IdentitySerDe takes numbers, text and bytes, not {type(input).__name__}")

    def deserialize(self, input_bytes: bytes) -> Any:
        for type_ in self._types:
            try:
                return type_(input_bytes.decode())
            except ValueError:
                continue
        return input_bytes
