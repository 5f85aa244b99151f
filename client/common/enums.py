"""Enums of the SDK: numbers, as on the wire, which print as Pulsar's do."""

from __future__ import annotations

from enum import Enum, IntEnum


class ClientEnum(IntEnum):
    """Prints as `CompressionType.LZ4`, not as its number."""

    __str__ = Enum.__str__
    __format__ = Enum.__format__
