"""What the matrix of clients exercises: a feature is what is sent, how, and how it is received."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.interop.drivers import LONG

EVENT_TIME_MS = 1_700_000_000_123
DELAY_MS = 1500
BATCHED = 20
CHUNKED_BYTES = 6 << 20
"""More than a broker takes as one message, so that every client must split it."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Feature:
    """`produce` and `consume` are options of those commands (tests/interop/drivers.py)."""

    messages: Sequence[Message]
    produce: Mapping[str, Any] = field(default_factory=dict)
    consume: Mapping[str, Any] = field(default_factory=dict)
    type: str = "Exclusive"

    def expected(self) -> list[Message]:
        """What each client describes when it receives them."""
        return [
            {
                "text": shown(message["text"] * message.get("times", 1)),
                "key": message.get("key", ""),
                "ordering_key": message.get("ordering_key", ""),
                "properties": message.get("properties", {}),
                "event_time": message.get("event_time", 0),
            }
            for message in self.messages
        ]


def shown(text: str) -> str:
    return text if len(text.encode()) < LONG else hashlib.sha256(text.encode()).hexdigest()


def texts(*found: str, **more: Any) -> list[Message]:
    return [{"text": text, **more} for text in found]


def batch(both: Mapping[str, Any] | None = None, **produce: Any) -> Feature:
    messages = [{"text": f"{number}-" * 9, "key": f"k{number % 3}"} for number in range(BATCHED)]
    return Feature(messages, {"batching": True, **produce, **(both or {})}, both or {})


def features(keys: Sequence[str]) -> dict[str, Feature]:
    """`keys`: paths of a public and a private RSA key."""
    encrypted = {"keys": list(keys)}
    return {
        "plain": Feature(texts("one", "två")),
        "empty": Feature(texts("", properties={"a": "b"})),  # Go's client drops one without properties
        "keys": Feature(texts("a", "b", key="k")),
        "ordering keys": Feature(texts("a", key="k", ordering_key="o"), type="KeyShared"),
        "properties": Feature(texts("a", properties={"one": "1", "två": "", "": "empty"})),
        "event times": Feature(texts("a", event_time=EVENT_TIME_MS)),
        "batches": batch(),
        **{name.lower(): batch(compression=name) for name in ("LZ4", "ZLib", "ZSTD", "SNAPPY")},
        "lz4, one message": Feature(texts("x", times=2000), {"compression": "LZ4"}),
        "chunks": Feature(texts("0123456789abcdef", times=CHUNKED_BYTES // 16), {"chunking": True}),
        "encryption": Feature(texts("secret", "other", key="k"), encrypted, encrypted),
        "encrypted batches": batch(encrypted, compression="ZSTD"),
        "delays": Feature(texts("later", deliver_after_ms=DELAY_MS), type="Shared"),
        **{
            f"{name} schema": Feature(texts("first", "second"), {"schema": name}, {"schema": name})
            for name in ("STRING", "JSON", "AVRO")
        },
    }  # fmt: skip
