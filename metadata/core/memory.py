"""What may take memory in a metadata service, and how much it gets of `memory_bytes` (runtime/memory/shares.py)."""

from __future__ import annotations

from ...runtime.memory.shares import MIB, Share

SHARES = (
    Share("metadata-clients", "metadata.client_memory_bytes", 1, 16, 8 * MIB, 256 * MIB,
          "what arrives, requests of brokers and bookies that are not handled, and answers that have not left"),
)  # fmt: skip
