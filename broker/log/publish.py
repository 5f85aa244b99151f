"""An entry in flight to a topic's log, and its publisher, which gets the outcome."""

from __future__ import annotations

from typing import Protocol

from ...ledger.core.stored import Tail
from ...proto.checksum import JOINED_BYTES_MIN
from ...proto.entry import CHECKED_FROM
from ...proto.errors import MagnetarError
from ...proto.names import Position
from ...proto.transactions import TxnId
from ...runtime.files import Buffer
from .core.log_queue import Queued
from .core.sequence_range import SequenceRange


class Publisher(Protocol):
    """Gets the outcome of a publish. Neither method may wait or raise."""

    def confirmed(self, publish: Publish, position: Position, index: int) -> None: ...
    def failed(self, publish: Publish, error: MagnetarError) -> None: ...


class Publish(Queued):
    """An entry in flight, from the frame in which it came to its receipt: the log queues it, the ledger's writer has it
    pending and its sender sends it."""

    __slots__ = ("arrived_s", "client_bytes", "client_part", "count", "deliver_at_ms", "name", "numbers", "publisher",
                 "timestamp_ms", "txn")  # fmt: skip

    def __init__(
        self, publisher: Publisher, client_part: Buffer, numbers: SequenceRange, *, count: int, deliver_at_ms: int = 0,
        txn: TxnId | None = None, name: str = "", checksum: int | None = None,
    ) -> None:  # fmt: skip
        self.frames: tuple[Buffer, ...] = ()  # here, and not by its bases: three calls a message less
        self.size, self.header, self.tail = 0, b"", None
        self.entry = self.index = -1
        self.txn = txn  # that it is in; None: it counts when it is stored
        self.name = name  # of its producer, as the entry says
        self.publisher = publisher
        self.client_part = client_part  # empty once it is in `frames`: its buffer may change then
        self.client_bytes = len(client_part)
        self.count = count
        self.numbers = numbers
        if checksum is not None and self.client_bytes >= JOINED_BYTES_MIN:  # a shorter one is read again
            self.tail = Tail(checksum, self.client_bytes - CHECKED_FROM)  # what it covers, once it was compared
        self.deliver_at_ms = deliver_at_ms
        self.timestamp_ms = 0
        self.arrived_s = 0.0  # on the monotonic clock

