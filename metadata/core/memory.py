"""The part of a metadata service that may take memory, and how much of `memory_bytes` it gets
(runtime/memory/shares.py)."""

from __future__ import annotations

from ...runtime.memory.shares import MIB, Share

SHARES = (
    Share("metadata-clients", "metadata.client_memory_bytes", 1, 16, 8 * MIB, 256 * MIB,
          "what arrives, requests of brokers and bookies that are not handled, and answers that have not left"),
)  # fmt: skip
