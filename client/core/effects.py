"""The options and effects of the cores of producers and consumers. Also what both cores use: the errors that finish
them (`FINAL_ERRORS`), `ErrorLogThrottle` and `PartitionClientState`. Options are given to a core when it is made;
effects are the actions that a core asks its driver to do.

A driver does the effects of a fact in their order, before it passes the next fact to the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Any, NamedTuple

from ...proto.entry import PLAIN, EntryEncoding
from ...proto.errors import (
    ConnectionLost,
    DataLost,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    NotOwner,
    ProducerFenced,
    TimedOut,
    TopicTerminated,
    Unauthorized,
)
from ...proto.names import Position
from .batcher import OutgoingBatch
from .redelivery import AckGroup, EntrySets


# ------------------------------------------------------------------------------ both
class DetachFromBroker(NamedTuple):
    """Effect: end the attachment to the broker without waiting for answers: the producer or consumer is closed there.
    """


class AttachToBroker(NamedTuple):
    """Effect: open the producer or consumer at its broker after `after_s` seconds. Its driver reports the outcome with
    `on_opened` or `on_lost`."""

    after_s: float


class EndWithError(NamedTuple):
    """Effect: end the producer or consumer for good; its callers get `error`. `topic_is_gone`: the topic was deleted,
    and a consumer of several topics goes on with the others."""

    error: MagnetarError
    topic_is_gone: bool = False


# ------------------------------------------------------------------------------ the producer's
class AttachedProducerOptions(NamedTuple):
    """The options of a ProducerCore. `initial_sequence_id`: the one before that of the first message; None: the highest
    that the broker knows of the producer's name. With `batching`, an entry is a batch of up to `batch_messages_max`
    messages and about `batch_bytes_max` bytes, for which messages wait `batch_delay_s` seconds. `key_based`: all
    messages of a batch have the same key. `send_timeout_s`: when the oldest entry has waited that long for its outcome,
    all entries get TimedOut. `chunking`: whether a message that is too large for an entry is sent as several chunks.
    `encoding`: the compression, the encryption and the schema version of each entry. `reports_when_sent`: the messages
    of an entry are reported when it is sent for the first time, and not when they have their outcome.
    `reports_first_copy`: they are reported when one bookie has the entry, if that is before their outcome."""

    initial_sequence_id: int | None = None
    batching: bool = False
    batch_messages_max: int = 1000
    batch_bytes_max: int = 131072
    batch_delay_s: float = 0.01
    key_based: bool = False
    batch_by: tuple[str, ...] = ()  # properties of which all messages of a batch have the same values
    summarized: tuple[str, ...] = ()  # properties that the summary of a batch covers
    send_timeout_s: float = 30.0  # 0: none
    chunking: bool = False
    encoding: EntryEncoding = PLAIN  # of every entry
    reports_when_sent: bool = False
    reports_first_copy: bool = False


class MessageAddResult(Enum):
    """The result of adding a message to a producer's core. WAKE: the message was added, and the driver must call
    `publish_closed_batches` soon. Each other member is the reason why the message was refused. (`add` returns None for
    a message that was added if the driver need not do anything.)"""

    WAKE = auto()  # added; the driver must call `publish_closed_batches` soon
    FULL = auto()  # refused: the producer has as many pending messages as it may have
    NO_MEMORY = auto()  # refused: the pending messages of all producers use all their memory
    CLOSED = auto()  # refused: see `error` and `closing`
    TOO_LARGE = auto()  # refused: see `payload_max`
    # refused: the transaction has not allowed a further message of this producer (SendAllowance)
    NOT_IN_TRANSACTION = auto()


class SendEntry(NamedTuple):
    """Effect: send an encoded entry to the broker, which publishes it."""

    entry: bytes


class ReportSent(NamedTuple):
    """Effect: report to the callbacks of a batch that its entry was written to the connection, or is stored at one
    bookie, and to none of them its outcome."""

    batch: OutgoingBatch


class ReportOutcome(NamedTuple):
    """Effect: report the outcome of a batch to the callbacks of its messages. `error` None: the batch is stored at the
    position (`ledger_id`, `entry_id`); -1: its position is not known, because the broker had stored it already."""

    batch: OutgoingBatch
    error: MagnetarError | None
    ledger_id: int = -1
    entry_id: int = -1


class EndFlushes(NamedTuple):
    """Effect: let the `flush` calls of these waiters return, because all messages before these calls have outcomes."""

    waiters: list[Any]


class LogWarning(NamedTuple):
    """Effect: write a warning to the log."""

    text: str


class MessageNotEncodable(MagnetarError):
    """The outcome of a message that cannot be encoded; `__cause__` is the reason. Nothing was sent."""

    definite = True


ProducerEffect = (
    SendEntry
    | ReportSent
    | ReportOutcome
    | EndFlushes
    | DetachFromBroker
    | AttachToBroker
    | LogWarning
    | EndWithError
)


# ------------------------------------------------------------------------------ the consumer's
class AttachedConsumerOptions(NamedTuple):
    """The options of a ConsumerCore: time-outs, redelivery delays, chunking, and the order of deliveries.
    `ack_timeout_s`: after so many seconds, or up to `ack_timeout_tick_s` later, entries that the application has not
    acknowledged are delivered again. `nack_delay_ms` returns the redelivery delay in ms for a redelivery count.
    `chunks_pending_max`: the most chunked messages that may be incomplete. `chunks_auto_ack`: the chunks of an
    incomplete message that makes room for another one are acknowledged, so that the message is lost; False: they are
    delivered again later."""

    durable: bool = True  # False: a reader
    ack_timeout_s: float = 0.0  # 0: none
    ack_timeout_tick_s: float = 1.0  # so late it ends at most
    ack_group_s: float = 0.1  # acknowledgements are sent so much later at most; 0: in the same turn of the loop
    nack_delay_ms: Callable[[int], int] = lambda _: 60_000  # called with the entry's redelivery count
    redeliveries_max: int | None = None  # an entry with more redeliveries is a dead letter; None: never
    chunks_pending_max: int = 10
    chunks_auto_ack: bool = False
    ordered: bool = True  # the chunks of a message arrive in order
    log_order: bool = True  # all entries arrive in log order
    failure_blocks: bool = False  # a failed entry blocks the entries after it
    ends_with_topic: bool = False  # the consumer ends without an error when its topic is deleted
    debounced: bool = False  # the application gets entries in another order


class GrantPermits(NamedTuple):
    """Effect: allow the broker to send `messages` more messages."""

    messages: int


class SendAcks(NamedTuple):
    """Effect: send a group of acknowledgements to the broker. `request_id`: the number of the request that the broker
    answers when they are durable; 0: no answer."""

    group: AckGroup
    request_id: int  # 0: no answer is wanted


class DropMessagesAfterFailure(NamedTuple):
    """Effect: discard the messages in the receiver queue that belong to the entries `failed`, or that must be processed
    after them. The broker delivers all these entries again."""

    failed: tuple[Position, ...]


class RequestRedelivery(NamedTuple):
    """Effect: ask the broker to deliver the entries `entries` again; None: all unacknowledged entries. `counted`:
    whether this raises their redelivery counts. `request_id`: the number of the request that the broker answers; 0: no
    answer."""

    entries: EntrySets | None  # None: all that was delivered and not acknowledged
    counted: bool = True  # False: the application has not seen them
    request_id: int = 0  # 0: nothing answers


@dataclass(frozen=True, slots=True)
class SeekIndex:
    """A position to seek to: the message with this index in its partition."""

    index: int


class SendSeekRequest(NamedTuple):
    """Effect: ask the broker to move the subscription's cursor to `to`: a message id, a SeekIndex, or a time in ms
    since the epoch. `request_id`: the number of the request, which the broker answers."""

    request_id: int
    to: Any


class ReportSeekDone(NamedTuple):
    """Effect: report that the broker has moved the cursor to `to` (as in SendSeekRequest); later deliveries start
    there."""

    to: Any


class DropQueuedMessages(NamedTuple):
    """Effect: discard the messages in the receiver queue. If `give_back` is true, the driver must then report their
    permits with `ConsumerCore.on_entries_dropped`."""

    give_back: bool


class AnswerRequest(NamedTuple):
    """Effect: give the outcome of the request `request_id` to its caller: `error`, or `result` if `error` is None."""

    request_id: int
    error: MagnetarError | None
    result: Any = None


class ReaderPosition(NamedTuple):
    """The position at which a reader continues after a reconnect: after the message id `taken` (None: at the reader's
    start). `begun`: the first chunk of the messages of which the reader has received only a part, from which on chunks
    are delivered again; None: there are no such messages."""

    taken: Any
    begun: Position | None


ConsumerEffect = (
    GrantPermits
    | SendAcks
    | RequestRedelivery
    | SendSeekRequest
    | ReportSeekDone
    | DropQueuedMessages
    | DropMessagesAfterFailure
    | AnswerRequest
    | DetachFromBroker
    | AttachToBroker
    | EndWithError
)


# ------------------------------------------------------------------------------------------------------- reasons
# Errors of a broker: which of them finish a producer or a consumer, and why messages are not acknowledged.
#
# A broker that cannot store sends an error and the producer tries again, until the message's time is over; then the
# user wants the reason and not only "timeout". Each kind of reason is said at once, and again when ERROR_LOG_EVERY_S
# have passed. An acknowledgement ends it: what was wrong before says nothing about later messages. Guard:
# tests/client/core/test_cores.py.


FINAL_ERRORS = (NotAllowed, NotFound, Unauthorized, InvalidRequest, DataLost)
"""Errors after which a producer or consumer is not opened again: a further attempt would fail, too."""
SEALED_ERRORS = (ProducerFenced, TopicTerminated)
PRODUCER_FINAL_ERRORS = (*SEALED_ERRORS, *FINAL_ERRORS)
_ROUTINE = (ConnectionLost, TimedOut, NotOwner, *PRODUCER_FINAL_ERRORS)
"""Errors that a topic's move or a broker's restart causes, or that finish the producer: they are not logged as
warnings."""

ERROR_LOG_EVERY_S = 60.0


class ErrorLogThrottle:
    """Decides which errors of a producer are logged: each kind of error at most once in ERROR_LOG_EVERY_S seconds.
    `last`: the reason why the broker does not acknowledge messages, as text; empty if no reason is known. The
    producer's core clears it at the next acknowledgement."""

    def __init__(self) -> None:
        self.last = ""
        self._said: dict[str, float] = {}  # by kind, which is the name of an error class: bounded

    def admit(self, error: MagnetarError, now: float) -> str | None:
        """Records an error of the broker at the time `now` (seconds). Returns the text to log now, or None if nothing
        is to be logged. Ignores a lost connection and a time-out; an error of a topic's move, or one that finishes the
        producer, is recorded and not logged."""
        if isinstance(error, ConnectionLost | TimedOut):
            return None
        kind = type(error).__name__
        self.last = f"the broker said: {kind}: {error.message}"
        if now - self._said.get(kind, -inf) < ERROR_LOG_EVERY_S:
            return None
        self._said[kind] = now
        return None if isinstance(error, _ROUTINE) else self.last


# --------------------------------------------------------------------------------------------------------- state
# The states of one partition's producer or consumer.


class PartitionClientState(Enum):
    """The states of one partition's producer or consumer. OPENING: it was never open. CLOSING: a producer has all
    outcomes and waits until the broker has closed it. CLOSED: it has ended for good."""

    OPENING = auto()
    CONNECTED = auto()
    RECONNECTING = auto()
    CLOSING = auto()  # a producer that waits until the broker has forgotten it
    CLOSED = auto()
