"""Statistics on the wire: each value of proto/statistics.py is the message with fields of the same names."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from typing import Any

from ....proto.names import Position
from ....proto.transactions import TxnId


def fields(value: Any) -> dict[str, Any]:
    """The fields of a value, as the constructor of its message takes them."""
    return {each.name: _plain(getattr(value, each.name)) for each in fields_of(value)}


def _plain(value: Any) -> Any:
    if isinstance(value, Position | TxnId):
        return value._asdict()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return fields(value) if is_dataclass(value) else value
