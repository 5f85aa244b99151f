"""What the cores of producers and consumers are given at their beginning, and what they ask their drivers to do.

A driver does the effects of a fact at once, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, NamedTuple

from ...proto.entry import Encrypt
from ...proto.errors import MagnetarError
from ...proto.names import Position
from .acks import AckGroup
from .batcher import Batch
from .redelivery import EntrySets


# ------------------------------------------------------------------------------ both
class Leave(NamedTuple):
    """Give the connection up."""


class Connect(NamedTuple):
    after_s: float


class Finished(NamedTuple):
    error: MagnetarError
    topic_is_gone: bool = False


# ------------------------------------------------------------------------------ the producer's
class ProducerOptions(NamedTuple):
    initial_sequence_id: int | None = None
    batching: bool = False
    batch_messages_max: int = 1000
    batch_bytes_max: int = 131072
    batch_delay_s: float = 0.01
    key_based: bool = False
    send_timeout_s: float = 30.0  # 0: none
    compression: int = 0
    chunking: bool = False
    encrypt: Encrypt | None = None  # of every entry; raises CryptoError, which is the outcome of its messages


class Added(Enum):
    """What is to be done about a message that was to be added. None instead: it waits with others."""

    WAKE = auto()  # it waits, and the driver is to call `turn` soon
    FULL = auto()  # refused: as many wait as may
    NO_MEMORY = auto()  # refused: as many bytes wait in all producers as may
    CLOSED = auto()  # refused: see `error` and `closing`
    TOO_LARGE = auto()  # refused: see `payload_max`
    NOT_IN = auto()  # refused: its transaction takes no message of this producer, or no more: see its `share`


class Publish(NamedTuple):
    entry: bytes


class Settle(NamedTuple):
    """The outcome of a batch: where it is stored, or its error. -1: stored, but where is not known."""

    batch: Batch
    error: MagnetarError | None
    ledger_id: int = -1
    entry_id: int = -1


class Flushed(NamedTuple):
    waiters: list[Any]


class Warn(NamedTuple):
    text: str


class InvalidContent(MagnetarError):
    """A message that cannot be encoded; `__cause__` has the reason."""

    definite = True


ProducerEffect = Publish | Settle | Flushed | Leave | Connect | Warn | Finished


# ------------------------------------------------------------------------------ the consumer's
class ConsumerOptions(NamedTuple):
    durable: bool = True  # False: a reader
    ack_timeout_s: float = 0.0  # 0: none
    nack_delay_ms: Callable[[int], int] = lambda _: 60_000  # by how often the entry was delivered again
    dead_after: int | None = None  # redeliveries, past which an entry is a dead letter; None: never
    chunks_pending_max: int = 10
    chunks_auto_ack: bool = False
    ordered: bool = True  # chunks of a message come in order
    log_order: bool = True  # all entries do
    holds_order: bool = False  # what failed holds back what follows it
    leaves_alone: bool = False  # it ends in silence with its topic


class Grant(NamedTuple):
    messages: int


class SendAcks(NamedTuple):
    group: AckGroup
    request_id: int  # 0: no answer is wanted


class DropAfter(NamedTuple):
    """What waits and follows one of these is thrown away: the broker takes it back, and delivers it again."""

    failed: tuple[Position, ...]


class Redeliver(NamedTuple):
    entries: EntrySets | None  # None: all that was delivered and not acknowledged
    counted: bool = True  # False: the application has not seen them
    request_id: int = 0  # 0: nothing answers


class SendSeek(NamedTuple):
    request_id: int
    to: Any


class Sought(NamedTuple):
    """The cursor is there: what is delivered from now on is from there."""

    to: Any


class Drop(NamedTuple):
    """What waits for the application is thrown away; `dropped` is to be told the permits, when they are given back."""

    give_back: bool


class Answer(NamedTuple):
    request_id: int
    error: MagnetarError | None
    result: Any = None


class Place(NamedTuple):
    """Where a reader goes on: after `taken` (None: where it began), and what `begun` names on was not read whole."""

    taken: Any
    begun: Position | None


ConsumerEffect = (
    Grant | SendAcks | Redeliver | SendSeek | Sought | Drop | DropAfter | Answer | Leave | Connect | Finished
)
