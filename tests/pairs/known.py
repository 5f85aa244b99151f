"""Pairs that do not hold yet, and the defect in plain words. A test of such a pair has to fail (xfail, strict): who
mends the defect takes its rows away."""

from __future__ import annotations

from collections.abc import Collection

CHUNKS = "a message in chunks that fails too often, or is sent again later, is moved entry by entry or as one too large"
COMPACTED = "a loaded subscription that reads what is compacted stops at the first compaction of its topic"
OPEN = "with deduplication a producer sends nothing beside an open transaction of its own"
UNVERSIONED = "the rows of an outbox are sent without the version of their schema, and read by another one"
DEFECTS: dict[tuple[str, str], str] = {
    **{("chunk", name): CHUNKS for name in ("dead letter", "retry level", "retry topic")},
    **{
        ("compaction", name): COMPACTED
        for name in (
            "chunk", "compression", "encryption", "dead letter", "retry level", "retry topic", "dedup", "Key_Shared",
            "seek", "quota", "schema", "table view", "reader", "pattern", "partition growth", "Pulsar's client", "SDK",
            "outbox",
        )
    },
    ("schema", "outbox"): UNVERSIONED,
    **{("transaction", name): OPEN for name in ("dedup", "outbox")},
}  # fmt: skip


def defect_of(names: Collection[str]) -> str:
    """"": none is known."""
    return next((why for pair, why in DEFECTS.items() if set(pair) <= set(names)), "")
