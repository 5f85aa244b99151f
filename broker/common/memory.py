"""The parts of a broker that may take memory, and how much of `memory_bytes` each gets (runtime/memory/shares.py)."""

from __future__ import annotations

from ...runtime.memory.shares import MIB, NO_LIMIT, Share

SHARES = (
    Share("clients", "broker.client_memory_bytes", 1, 36, 16 * MIB, NO_LIMIT,
          "what arrives, requests of all clients that are not handled, and answers that have not left"),
    Share("appends", "broker.append_memory_bytes", 1, 24, 8 * MIB, 1 << 30,
          "entries of all ledgers that a bookie has not answered yet"),
    Share("tail-cache", "broker.cache_bytes", 1, 28, 2 * MIB, 64 * MIB, "new entries, for consumers at the tail"),
    Share("catch-up-cache", "broker.catch_up_cache_bytes", 1, 8, MIB, 16 * MIB, "what was read last from bookies"),
    Share("catch-up-reads", "broker.read_memory_bytes", 1, 12, 4 * MIB, 1 << 30,
          "what was read ahead for all subscriptions, and what waits for its key's consumer"),
    Share("compaction", "broker.compaction_memory_bytes", 1, 8, 4 * MIB, 256 * MIB, "keys of a compaction"),
    Share("state", "broker.state_memory_bytes", 1, 24, 8 * MIB, NO_LIMIT,
          "topics, subscriptions with their holes and delayed messages, connections"),
)  # fmt: skip
"""A weight is in about the mebibytes of a broker that has 128."""
