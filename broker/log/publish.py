"""One entry in flight to a topic's log, and its publisher, which gets the outcome."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ...proto.errors import MagnetarError
from ...proto.names import Position
from ...proto.transactions import TxnId
from .core.sequence_range import SequenceRange


class Publisher(Protocol):
    """Gets the outcome of a publish. Neither method may wait or raise."""

    def confirmed(self, publish: Publish, position: Position, index: int) -> None: ...
    def failed(self, publish: Publish, error: MagnetarError) -> None: ...


class Publish:
    """One entry in flight to the log."""

    __slots__ = ("arrived_s", "client_part", "count", "deliver_at_ms", "frames", "future", "highest_sequence_id",
                 "name", "numbers", "publisher", "sequence_id", "size", "timestamp_ms", "txn")  # fmt: skip

    def __init__(
        self, publisher: Publisher, client_part: bytes, *, count: int, sequence_id: int, highest_sequence_id: int,
        numbers: SequenceRange | None = None, deliver_at_ms: int = 0, txn: TxnId | None = None,
        name: str = "",
    ) -> None:  # fmt: skip
        self.txn = txn  # that it is in; None: it counts when it is stored
        self.name = name  # of its producer, as the entry says
        self.publisher = publisher
        self.client_part = client_part
        self.count = count
        self.sequence_id = sequence_id
        self.highest_sequence_id = highest_sequence_id
        self.numbers = numbers or SequenceRange(sequence_id, highest_sequence_id)
        self.size = len(client_part)
        self.deliver_at_ms = deliver_at_ms
        self.timestamp_ms = 0
        self.arrived_s = 0.0  # on the monotonic clock
        self.frames: tuple[bytes, bytes] = (b"", client_part)
        self.future: asyncio.Future[int] | None = None
