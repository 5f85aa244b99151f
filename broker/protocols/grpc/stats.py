"""Statistics on the wire: each value of broker/session/statistics.py is the message with fields of the same names."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ....proto.names import Position


def fields(value: Any) -> dict[str, Any]:
    """The fields of a struct, as the constructor of its message takes them."""
    return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}


def _plain(value: Any) -> Any:
    if isinstance(value, Position):
        return value._asdict()
    if isinstance(value, list):
        return [fields(each) for each in value]
    return fields(value) if isinstance(value, Struct) else value
