"""Translates between messages of proto/pulsar.proto and the plain values of the broker's sessions.

**Numbers.** A ledger or entry id of -1 is 2⁶⁴-1 on the wire. An ack set is a Java BitSet: words of 64 bits, the lowest
first. A bit of 1 means that the message is **not** acknowledged; zero words at the end are left out.

**Errors.** Each of our errors has an error number of Pulsar's protocol. By the number a client retries, gives up, or
reconnects, so the numbers are chosen by what the clients do. The first class in the table that fits counts, so a class
comes before its base classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from ...proto import errors
from ...proto import pulsar_pb2 as pulsar
from ...proto.entry_pb2 import KeyValue, MessageIdData
from ...proto.errors import InvalidRequest
from ...proto.names import MessageId, Position
from ...proto.schema import SchemaInfo, SchemaType
from ...proto.states import AckedEntry, TxnId, enum_from_number
from ..common.refusals import AckRefusal
from ..session.consumer import ACKED_ENTRIES_PER_SLICE, ConsumerSession
from ..subscription.core.cursor_state import BATCH_INDEXES_MAX

_LOG = logging.getLogger("magnetar.broker.pulsar")

_TABLE: tuple[tuple[type[errors.MagnetarError], pulsar.ServerError], ...] = (
    (errors.CorruptEntry, pulsar.ChecksumError),
    (errors.MessageTooLarge, pulsar.NotAllowedError),
    (errors.InvalidName, pulsar.InvalidTopicName),
    (errors.InvalidSchema, pulsar.IncompatibleSchema),
    (errors.InvalidRequest, pulsar.NotAllowedError),
    (errors.SubscriptionNotFound, pulsar.SubscriptionNotFound),
    (errors.NotFound, pulsar.TopicNotFound),
    (errors.ConsumerBusy, pulsar.ConsumerBusy),
    (errors.ProducerBusy, pulsar.ProducerBusy),
    (errors.Busy, pulsar.ServiceNotReady),
    (errors.ProducerFenced, pulsar.ProducerFenced),
    (errors.TopicTerminated, pulsar.TopicTerminatedError),
    (errors.IncompatibleSchema, pulsar.IncompatibleSchema),
    (errors.NotAllowed, pulsar.NotAllowedError),
    (errors.TransactionConflict, pulsar.TransactionConflict),
    (errors.TransactionForgotten, pulsar.TransactionNotFound),
    (errors.TransactionAborted, pulsar.InvalidTxnStatus),
    (errors.TransactionEnded, pulsar.InvalidTxnStatus),
    (errors.TransactionFenced, pulsar.InvalidTxnStatus),
    (errors.BacklogQuotaExceeded, pulsar.ProducerBlockedQuotaExceededException),
    (errors.Unauthenticated, pulsar.AuthenticationError),
    (errors.CredentialsExpired, pulsar.AuthenticationError),
    (errors.Unauthorized, pulsar.AuthorizationError),
    (errors.DataLost, pulsar.PersistenceError),
    (errors.Unavailable, pulsar.ServiceNotReady),
    (errors.BadVersion, pulsar.MetadataError),
    (errors.SessionExpired, pulsar.ServiceNotReady),
)


def find_pulsar_error_number(error: errors.MagnetarError) -> pulsar.ServerError:
    """Returns the error number in Pulsar's protocol that is sent to a client for `error`; UnknownError if the table has
    none."""
    for kind, number in _TABLE:
        if isinstance(error, kind):
            return number
    return pulsar.UnknownError


def ensure_magnetar_error(error: Exception) -> errors.MagnetarError:
    """Returns `error` if it is a MagnetarError. Logs any other exception, because it is a bug, and returns an
    InternalError in its place, so that the client gets an answer."""
    if isinstance(error, errors.MagnetarError):
        return error
    _LOG.error("a request of a client failed", exc_info=error)
    return errors.InternalError(f"the request failed: {type(error).__name__}")


UINT64_MASK = (1 << 64) - 1


def to_signed_long(number: int) -> int:
    """Returns the signed 64-bit number (a Java long) that has the same bits as the uint64 `number`."""
    return number - (1 << 64) if number >> 63 else number


def to_unsigned_long(number: int) -> int:
    """Returns the uint64 that has the same bits as the signed 64-bit number (a Java long) `number`."""
    return number & UINT64_MASK


def make_property_map(pairs: Iterable[KeyValue]) -> dict[str, str]:
    """Returns the key-value pairs of a Pulsar message as a dictionary. Of several pairs with the same key, the last one
    counts."""
    return {pair.key: pair.value for pair in pairs}


def parse_message_id(of: MessageIdData) -> MessageId:
    """Returns the message id that a MessageIdData contains. If `of` has an ack set, the batch index is that of the
    first message of the batch that is not acknowledged."""
    batch_index = of.batch_index
    if of.ack_set:
        left = _bits(of.ack_set)
        batch_index = (left & -left).bit_length() - 1 if left else batch_index
    return MessageId(to_signed_long(of.ledgerId), to_signed_long(of.entryId), of.partition, batch_index)


def encode_message_id(position: Position, partition: int, batch_index: int = -1) -> MessageIdData:
    """Returns Pulsar's id of the message at this position. `batch_index` is -1 for a message that is not in a batch."""
    return MessageIdData(
        ledgerId=to_unsigned_long(position[0]),
        entryId=to_unsigned_long(position[1]),
        partition=partition,
        batch_index=batch_index,
    )


# ------------------------------------------------------------------ schemas
def parse_schema(given: pulsar.Schema) -> SchemaInfo | None:
    """Returns the schema that a command contains; None for schema type 0, by which Java's client means plain bytes.
    Raises InvalidRequest if the number of the schema type is unknown."""
    if given.type == SchemaType.NONE:
        return None
    return SchemaInfo(
        type=enum_from_number(SchemaType, given.type, "schema type"), data=given.schema_data, name=given.name,
        properties=make_property_map(given.properties),
    )  # fmt: skip


def make_wire_schema(info: SchemaInfo) -> pulsar.Schema:
    """Returns the schema as Pulsar's protocol message."""
    pairs = [KeyValue(key=key, value=value) for key, value in info.properties.items()]
    return pulsar.Schema(name=info.name, schema_data=info.data, type=info.type, properties=pairs)


# ------------------------------------------------------------------ acknowledgements
def acknowledge_in_steps(session: ConsumerSession, ack: pulsar.CommandAck) -> Iterator[None]:
    """Acknowledges the messages of an ACK command. A generator: other tasks may run between its steps. Raises
    InvalidRequest, NotAllowed or TransactionConflict if an entry is refused; the entries before it are acknowledged
    nevertheless."""
    yield from _check_size(session, ack.message_id)
    if ack.ack_type == pulsar.CommandAck.Cumulative:
        if len(ack.message_id) != 1:
            raise InvalidRequest(f"a cumulative acknowledgement names one message, not {len(ack.message_id)}")
        for acked in parse_cumulative_ack(ack.message_id[0]):
            yield from session.ack_cumulative(acked)
    else:
        yield from session.ack(parse_individual_acks(ack.message_id, session.count_messages))


async def ack_in_transaction(session: ConsumerSession, txn: TxnId, ack: pulsar.CommandAck) -> None:
    """Acknowledges the messages of an ACK command in a transaction. Raises InvalidRequest if the command is malformed,
    TransactionConflict if it names a message twice, and the errors of `ConsumerSession.ack_in_transaction`. A
    cumulative acknowledgement that covers no message yet does nothing. Every other acknowledgement either becomes
    pending or raises an error, so that at the commit the client knows which messages are acknowledged."""
    for _ in _check_size(session, ack.message_id):
        pass
    if ack.ack_type != pulsar.CommandAck.Cumulative:
        entries = _each_once(parse_individual_acks(ack.message_id, session.count_messages, exact=True))
        await session.ack_in_transaction(txn, entries, rest=True)
        return
    if len(ack.message_id) != 1:
        raise InvalidRequest(f"a cumulative acknowledgement names one message, not {len(ack.message_id)}")
    if named := list(parse_cumulative_ack(ack.message_id[0])):
        await session.ack_in_transaction(txn, named, cumulative=True)


def _each_once(entries: Iterable[AckedEntry]) -> Iterator[AckedEntry]:
    """Yields the entries. Raises TransactionConflict if a message is named twice, because it was delivered twice."""
    seen: dict[Position, int] = {}
    for each in entries:
        before, bits = seen.get(each.position, 0), each.bits or -1
        if before & bits:
            raise AckRefusal.CONFLICT.error(f"entry {each.position} is named twice: it was delivered twice")
        seen[each.position] = before | bits
        yield each


def _check_size(session: ConsumerSession, ids: Sequence[MessageIdData]) -> Iterator[None]:
    """Checks the size of an acknowledgement, in steps, and notes whether the client acknowledges parts of batches; must
    be done before the first id is acknowledged. Raises InvalidRequest."""
    each, reached = iter(ids), 0
    while some := list(islice(each, ACKED_ENTRIES_PER_SLICE)):
        reached += sum(max(64 * len(id_.ack_set), id_.batch_size) for id_ in some if id_.ack_set)
        yield
    if reached and not session.member.acks_by_index:
        session.mark_acks_by_batch_index()
    if reached > BATCH_INDEXES_MAX:
        raise AckRefusal.TOO_MANY_INDEXES.error(
            f"the batch indexes of one acknowledgement reach over {BATCH_INDEXES_MAX} messages at most, in all entries"
        )


def parse_individual_acks(
    ids: Iterable[MessageIdData], messages_of: Callable[[Position], int], *, exact: bool = False
) -> Iterator[AckedEntry]:
    """Yields the entries that an individual acknowledgement acknowledges, wholly or in part. `messages_of`: a function
    that returns the number of messages in an entry; 0 if it is unknown.

    With `exact`, every named message counts, even if only a part of its batch is outstanding at this consumer, because
    an abort requeued the rest. Then the larger one of the batch sizes of the broker and of the client is used.
    InvalidRequest is raised if the batch size is unknown, or no message of a named batch is acknowledged."""
    for each in ids:
        position = Position(to_signed_long(each.ledgerId), to_signed_long(each.entryId))
        if position.entry_id < 0:
            continue
        if not each.ack_set:
            yield AckedEntry(position)
            continue
        size = messages_of(position)
        if exact:
            size = max(size, each.batch_size)
        elif not size:
            size = max(0, each.batch_size)
        if exact and not size:
            raise InvalidRequest(f"the size of the batch {position} is not known: this consumer does not hold it")
        if acked := _acked(each, size):
            yield AckedEntry(position, acked)
        elif exact:
            raise InvalidRequest(f"no message of the batch {position} is acknowledged")


def parse_cumulative_ack(of: MessageIdData) -> Iterator[AckedEntry]:
    """Yields the entry up to which a cumulative acknowledgement acknowledges all messages. Yields nothing if its entry
    id is -1: a client sends this before it has finished the first message of a ledger."""
    position = Position(to_signed_long(of.ledgerId), to_signed_long(of.entryId))
    if of.ack_set:
        left = _bits(of.ack_set)
        done = (left & -left).bit_length() - 1 if left else 0
        if done > 0:
            yield AckedEntry(position, (1 << done) - 1)
            return
        if left:
            position = Position(position.ledger_id, position.entry_id - 1)
    if position.entry_id >= 0:
        yield AckedEntry(position)


def _acked(of: MessageIdData, messages: int) -> int:
    """Returns the bits of the acknowledged messages of a batch. If its size `messages` is not known (0), those after
    the highest bit of the ack set are not acknowledged."""
    left = _bits(of.ack_set)
    return ~left & ((1 << (messages or left.bit_length())) - 1)


def _bits(words: Sequence[int]) -> int:
    return int.from_bytes(b"".join((word & UINT64_MASK).to_bytes(8, "little") for word in words), "little")


def encode_ack_set(acked: Sequence[int], count: int) -> list[int]:
    """Returns the words of the ack set (Pulsar's bit set of unacknowledged messages) of a batch of `count` messages.
    `acked`: the batch indexes of the acknowledged messages."""
    left = (1 << count) - 1
    for index in acked:
        left &= ~(1 << index)
    words = []
    while left:
        words.append(to_signed_long(left & UINT64_MASK))
        left >>= 64
    return words


# ------------------------------------------------------------------ redelivery
def redeliver_in_steps(
    session: ConsumerSession, asked: pulsar.CommandRedeliverUnacknowledgedMessages
) -> Iterator[None]:
    """Requeues the messages that a command names, so that the subscription delivers them again. Requeues all messages
    that are outstanding at the consumer if the command names none, or if the subscription type preserves the order, as
    in Pulsar. A generator: other tasks may run between its steps."""
    individual = session.subscription.dispatcher.policy.individual
    ids = asked.message_ids if individual else ()
    return session.redeliver(Position(to_signed_long(each.ledgerId), to_signed_long(each.entryId)) for each in ids)
