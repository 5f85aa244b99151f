"""One entry in flight to a topic's log, and its publisher, which gets the outcome."""

from __future__ import annotations

from typing import Protocol

from ...ledger.core.stored import Tail
from ...proto.checksum import JOINED_BYTES_MIN
from ...proto.entry import CHECKED_FROM, broker_part
from ...proto.errors import MagnetarError
from ...proto.names import Position
from ...proto.transactions import TxnId
from ...runtime.files import Buffer
from .core.sequence_range import SequenceRange


class Publisher(Protocol):
    """Gets the outcome of a publish. Neither method may wait or raise."""

    def confirmed(self, publish: Publish, position: Position, index: int) -> None: ...
    def failed(self, publish: Publish, error: MagnetarError) -> None: ...


class Publish:
    """One entry in flight to the log."""

    __slots__ = ("arrived_s", "client_part", "count", "deliver_at_ms", "highest_sequence_id", "name",
                 "numbers", "publisher", "sequence_id", "size", "stored", "tail", "timestamp_ms", "txn")  # fmt: skip

    def __init__(
        self, publisher: Publisher, client_part: Buffer, *, count: int, sequence_id: int, highest_sequence_id: int,
        numbers: SequenceRange | None = None, deliver_at_ms: int = 0, txn: TxnId | None = None,
        name: str = "", checksum: int | None = None,
    ) -> None:  # fmt: skip
        self.txn = txn  # that it is in; None: it counts when it is stored
        self.name = name  # of its producer, as the entry says
        self.publisher = publisher
        self.client_part = client_part  # empty once it is `stored`: its buffer may change then
        self.count = count
        self.sequence_id = sequence_id
        self.highest_sequence_id = highest_sequence_id
        self.numbers = numbers or SequenceRange(sequence_id, highest_sequence_id)
        self.size = len(client_part)
        # what the checksum of a client-part covers, once it was compared
        self.tail: Tail | None = None
        if checksum is not None and self.size >= JOINED_BYTES_MIN:  # a shorter one is read again
            self.tail = Tail(checksum, self.size - CHECKED_FROM)
        self.deliver_at_ms = deliver_at_ms
        self.timestamp_ms = 0
        self.arrived_s = 0.0  # on the monotonic clock
        self.stored = b""  # the entry in one piece

    def stamp(self, index: int, timestamp_ms: int) -> None:
        """It gets its place: the index of its last message, and the broker's time. This is the only copy of the bytes
        between the socket and the disk's buffer."""
        self.timestamp_ms = timestamp_ms
        self.stored = b"".join((broker_part(index, timestamp_ms), self.client_part))
        self.client_part = b""
