"""Settings of a broker. Behaviour first, performance second; each with what it bounds and what it costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from ..bookie.ledger.handle import ENTRY_BYTES_MAX
from ..proto.errors import InvalidConfiguration
from ..runtime.network import Endpoint

Positive = Annotated[int, Meta(ge=1)]

LISTEN = Endpoint("127.0.0.1", 7650)
MESSAGE_BYTES_LIMIT = ENTRY_BYTES_MAX - 1024
"""What a ledger takes, less what the broker puts in front. The log's entry ids are those of the ledger only as long as
the ledger refuses no entry for its size."""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    # ---- behaviour
    name: str = ""  # in the registry of brokers; empty: a random one
    listen: Endpoint = LISTEN  # where clients connect; port 0 takes a free one
    advertised: Endpoint | None = None  # what lookups answer; none: the address that it listens at
    ensemble_size: Positive = 3  # bookies over which a topic's ledger is striped
    write_quorum: Positive = 3  # copies of each entry; each costs its bytes on disk and network
    ack_quorum: Positive = 2  # synced copies before a publish is confirmed
    degraded_writes: bool = True  # with bookies missing, new ledgers have fewer copies, never below ack_quorum; or wait
    min_racks_per_write_quorum: Positive = 1  # racks that the copies of an entry lie on, at most write_quorum
    enforce_min_racks: bool = False  # with too few racks publishing waits; or copies share racks, with a warning
    degraded_roll_s: float = 60.0  # such a ledger ends at this age, with the next publish: bookies may be back
    namespace_bundles: Positive = 4  # of namespaces that do not say; each is one ephemeral node of its owner
    auto_topic_creation: bool = True  # a topic is made when it is first looked at
    max_message_bytes: Positive = 5 << 20  # of one entry; larger is refused
    roll_entries: Positive = 50_000  # a ledger ends with so many entries; fewer: finer trimming, more metadata
    roll_bytes: Positive = 2 << 30  # … or so many bytes
    roll_minutes: Positive = 240  # … or at this age, with the next publish
    cursor_flush_s: float = 1.0  # an ack without receipt is durable after so long; what a crash may redeliver
    cursor_roll_entries: Positive = 50_000  # a cursor ledger ends with so many states …
    cursor_roll_bytes: Positive = 64 << 20  # … or so many bytes
    trim_interval_s: float = 10.0  # between two looks at what may be trimmed; late: disk space
    reroute_timeout_s: float = 60.0  # of finding a new ledger when one fails; then the topic is given up
    session_lost_grace_s: float = 30.0  # topics are served on without a metadata session; then given up, 0: at once

    # ---- performance
    cache_bytes: int = 64 << 20  # memory for new entries, from which tailing consumers are served; 0: from bookies
    read_bytes: Positive = 1 << 20  # one read of a consumer that catches up; two of them are in memory for each
    pending_bytes: Positive = 16 << 20  # unconfirmed publishes of one producer; above, its stream is not read
    close_timeout_s: float = 5.0  # of ending one topic in order; later the next owner has to recover it
    close_grace_s: float = 1.0  # streams get so long to end when the broker closes

    def validate(self) -> None:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            raise InvalidConfiguration(
                f"ensemble_size ({self.ensemble_size}) >= write_quorum ({self.write_quorum}) >= "
                f"ack_quorum ({self.ack_quorum}) must hold"
            )
        if self.max_message_bytes > MESSAGE_BYTES_LIMIT:
            raise InvalidConfiguration(
                f"max_message_bytes ({self.max_message_bytes}) is above {MESSAGE_BYTES_LIMIT}, what a ledger takes",
                setting="max_message_bytes",
            )
        for name in ("cursor_flush_s", "degraded_roll_s", "trim_interval_s", "reroute_timeout_s", "close_timeout_s"):
            if getattr(self, name) <= 0:
                raise InvalidConfiguration(f"{name} must be positive, not {getattr(self, name)}", setting=name)
        if self.session_lost_grace_s < 0:
            raise InvalidConfiguration("session_lost_grace_s must not be negative", setting="session_lost_grace_s")


@dataclass(frozen=True, slots=True)
class Replication:
    """Of new ledgers: over how many bookies, how many copies, how many of them synced before a confirmation."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int

    def __str__(self) -> str:
        return f"{self.ensemble_size}/{self.write_quorum}/{self.ack_quorum}"


Policy = Callable[[], Awaitable[Replication]]
"""Asked before each new ledger, so that a changed policy holds from the next one on."""
