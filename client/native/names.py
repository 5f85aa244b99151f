"""The names of `_pulsar`, the module of Pulsar's C++ client: `magnetar._pulsar`. Most are those of `magnetar`.

A program that imports it runs after `sys.modules["_pulsar"] = magnetar._pulsar`.
"""

from __future__ import annotations

import importlib
from typing import Any

from ..model.schema import SchemaDescription as SchemaInfo
from ..model.schema import SchemaTypeOfClient as SchemaType
from ..model.settings import ConsumerDeadLetterPolicy as DeadLetterPolicy
from .configurations import ClientConfiguration, ConsumerConfiguration, ProducerConfiguration, ReaderConfiguration

__all__ = [
    "ClientConfiguration", "ConsumerConfiguration", "DeadLetterPolicy", "ProducerConfiguration", "ReaderConfiguration",
    "SchemaInfo", "SchemaType",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(__name__.removesuffix(".client.native.names")), name)
