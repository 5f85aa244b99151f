"""Translates between messages of proto/wire.proto and the plain values of the broker's sessions.

Rule: the work for a request is at most linear in its bytes, and no request is carried out in part. So invalid values
that the wire can carry (an unknown number of an enum, an index that no entry can have) raise InvalidRequest here,
before a session sees them. Long requests are translated lazily, one step at a time.
Guarding test: tests/broker/grpc/test_extreme_requests.py, for each request of proto/wire.proto.

Also in this file, below its heading: the encoding of entries as items of a stream (delivery).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from ...metadata.records import GrantsRecord
from ...proto import wire_pb2 as wire
from ...proto.checksum import encode_varint
from ...proto.errors import InvalidRequest
from ...proto.names import MessageId, Position
from ...proto.schema import SchemaInfo, SchemaType, SchemaVersion, encode_version
from ...proto.states import (
    AccessMode,
    AckedEntry,
    EntrySet,
    Failure,
    InitialPosition,
    Isolation,
    KeySharedMode,
    LastMessage,
    RedeliveryOrder,
    TxnId,
    enum_from_number,
)
from ...runtime.files import Buffer
from ...runtime.network import Pieces
from ..access import authorizer as permissions
from ..common.config import BrokerConfig
from ..common.refusals import AckRefusal
from ..log.cache import StoredEntry
from ..session.consumer import (
    ACKED_ENTRIES_PER_SLICE,
    ConsumerSession,
    DeliveryProbeResult,
    SubscribeOptions,
    SubscriptionProgress,
)
from ..session.producer import ProducerOptions, ProducerSession, compute_metadata_bytes_max
from ..subscription.core.cursor_state import BATCH_INDEXES_MAX, bits_of_indexes
from ..subscription.core.dispatch import Delivery
from ..subscription.core.in_log_order import KeySharedOptions
from ..subscription.core.policy import PolicyOptions
from ..subscription.core.subscription_types import find_subscription_type
from ..subscription.dead_letters import KEPT_FAILURES_MAX, NO_FAILURES


# ------------------------------------------------------------------ schemas
def parse_schema_info(given: wire.SchemaInfo) -> SchemaInfo:
    """Returns the schema that a client sent. Raises InvalidRequest if this version does not know the schema's type."""
    return SchemaInfo(
        type=enum_from_number(SchemaType, given.type, "schema type"), data=given.data, name=given.name,
        properties=dict(given.properties),
    )  # fmt: skip


def make_schema_reply(found: SchemaVersion) -> wire.SchemaReply:
    """Returns the reply that contains the version `found` of a schema."""
    info = found.info
    return wire.SchemaReply(
        version=encode_version(found.version), created_ms=found.created_ms, user=found.user, deleted=found.deleted,
        schema=wire.SchemaInfo(type=info.type, data=info.data, name=info.name, properties=info.properties),
    )  # fmt: skip


# ------------------------------------------------------------------ producers
def parse_producer_options(asked: wire.OpenProducer, config: BrokerConfig) -> ProducerOptions:
    """Returns the options in a request to open a producer. Raises InvalidRequest if the access mode or the type of the
    schema is unknown."""
    return ProducerOptions(
        asked.topic, asked.producer_name, enum_from_number(AccessMode, asked.access_mode, "access mode"),
        dict(asked.properties), asked.instance, asked.connection, asked.initial_subscription, asked.topic_epoch,
        parse_schema_info(asked.schema) if asked.HasField("schema") else None,
        compute_metadata_bytes_max(config) if asked.copies else 0, asked.existing_only,
        "none" if asked.waits_for_nothing else "one" if asked.hears_first_copies else "quorum",
    )  # fmt: skip


def make_producer_opened_frame(id_: int, session: ProducerSession) -> wire.ServerFrame:
    """Returns the frame that tells the client that its producer is open. `id_`: the id of the producer on the
    stream."""
    return wire.ServerFrame(
        id=id_,
        producer_opened=wire.ProducerOpened(
            producer_name=session.name, last_sequence_id=session.last_sequence_id, credit=session.credit,
            max_message_size=session.max_message_bytes, topic_epoch=session.topic_epoch,
            schema_version=encode_version(session.schema_version), redrives_to_one=True,
        ),
    )  # fmt: skip


# ------------------------------------------------------------------ consumers
def parse_subscribe_options(asked: wire.Subscribe) -> SubscribeOptions:
    """Returns the options in a request to open a consumer. Raises InvalidRequest if the number of an enum (subscription
    type, initial position, schema type …) or a policy option is unknown."""
    return SubscribeOptions(
        asked.topic, asked.subscription, find_subscription_type(asked.type),
        enum_from_number(InitialPosition, asked.initial_position, "initial position"), asked.consumer_name,
        asked.durable,
        MessageId.from_wire(asked.start) if asked.HasField("start") else None, asked.start_inclusive,
        dict(asked.properties), asked.priority_level, dict(asked.subscription_properties), asked.read_compacted,
        asked.existing_only, asked.instance, _policy_options(asked), asked.many_topics,
        parse_schema_info(asked.schema) if asked.HasField("schema") else None,
        enum_from_number(Isolation, asked.isolation, "isolation"),
        enum_from_number(RedeliveryOrder, asked.redelivery_order, "redelivery order") is RedeliveryOrder.KEY,
        asked.incarnation, start_time_ms=asked.start_time_ms, acknowledges=asked.acknowledges,
    )  # fmt: skip


def _policy_options(asked: wire.Subscribe) -> PolicyOptions:
    """Returns the Key_Shared options in a Subscribe; the other subscription types ignore them."""
    shared = asked.key_shared
    return KeySharedOptions(
        enum_from_number(KeySharedMode, shared.mode, "mode of Key_Shared") is KeySharedMode.STICKY,
        shared.allow_out_of_order_delivery, tuple((each.first, each.last) for each in shared.ranges),
    )  # fmt: skip


def make_subscribed_frame(id_: int, session: ConsumerSession) -> wire.ServerFrame:
    """Returns the frame that tells the client that its consumer has subscribed. `id_`: the id of the consumer on the
    stream."""
    answer = wire.Subscribed(
        consumer_name=session.name, compacted_end_index=session.compacted_end_index,
        incarnation=session.topic.incarnation, filter=session.subscription.filter_text, level=CONSUMER_PROTOCOL_LEVEL,
    )  # fmt: skip
    _set_start(answer, session)
    return wire.ServerFrame(id=id_, subscribed=answer)


CONSUMER_PROTOCOL_LEVEL = 1
"""What this broker takes beyond the first requests of a consumer: `Subscribed.level` of proto/wire.proto."""


def make_probe_answer_frame(id_: int, request_id: int, found: DeliveryProbeResult) -> wire.ServerFrame:
    """Returns the frame that answers a `probe` request of a consumer. `found`: the answer to the probe; `id_`: the id
    of the consumer on the stream; `request_id`: the id of the request."""
    answer = wire.Probed(request_id=request_id, end_index=found.end_index, why=str(found.why))
    return wire.ServerFrame(id=id_, probed=answer)


def make_progress_frame(id_: int, request_id: int, found: SubscriptionProgress) -> wire.ServerFrame:
    """Returns the frame that answers a request for the progress of a subscription. `found`: the progress; `id_`: the id
    of the consumer on the stream; `request_id`: the id of the request."""
    answer = wire.Progress(request_id=request_id, **msgspec.structs.asdict(found))
    return wire.ServerFrame(id=id_, progress=answer)


def make_seek_done_frame(id_: int, request_id: int, session: ConsumerSession) -> wire.ServerFrame:
    """Returns the frame that says that a seek is done. `id_`: the id of the consumer on the stream; `request_id`: the
    id of the request. For a reader the frame names the message after which the reader now starts."""
    answer = wire.Done(request_id=request_id)
    _set_start(answer, session)
    return wire.ServerFrame(id=id_, done=answer)


def _set_start(answer: wire.Subscribed | wire.Done, session: ConsumerSession) -> None:
    """Names in the answer the message after which a reader begins, if one place says that."""
    if (start := session.find_reader_start_message()) is not None:
        answer.start.ledger_id, answer.start.entry_id = start.ledger_id, start.entry_id
        answer.start.batch_index = start.batch_index


def acknowledge_in_steps(session: ConsumerSession, ack: wire.Ack) -> Iterator[None]:
    """Acknowledges the entries of a request. A generator: other tasks may run between its steps. Raises InvalidRequest,
    NotAllowed or TransactionConflict if an entry is refused; the entries before it are acknowledged nevertheless."""
    yield from _check_ack(ack)
    if ack.kind == wire.Ack.CUMULATIVE:
        for entry in parse_acked_entries(ack.entries):
            yield from session.ack_cumulative(entry)
            yield
    else:
        yield from session.ack(parse_acked_entries(ack.entries), parse_entry_sets(ack.ledgers))


async def ack_in_transaction(session: ConsumerSession, ack: wire.Ack) -> None:
    """Acknowledges the entries of a request in the request's transaction. Raises InvalidRequest if the request is
    malformed, and the errors of `ConsumerSession.ack_in_transaction`."""
    txn = TxnId.from_numbers(ack.txn.most, ack.txn.least)
    for _ in _check_ack(ack):
        await asyncio.sleep(0)
    cumulative = ack.kind == wire.Ack.CUMULATIVE
    await session.ack_in_transaction(
        txn, parse_acked_entries(ack.entries), tuple(parse_entry_sets(ack.ledgers)), cumulative=cumulative
    )


def ack_in_transaction_nowait(session: ConsumerSession, ack: wire.Ack) -> bool:
    """Acknowledges the entries of a request in the request's transaction, without waiting, and returns True. Returns
    False and changes nothing if that is not possible, or if the acknowledgement is cumulative, has more than
    ACKED_ENTRIES_PER_SLICE entries and sets, or is invalid: the caller must then call `ack_in_transaction`."""
    if ack.kind != wire.Ack.INDIVIDUAL or len(ack.entries) + len(ack.ledgers) > ACKED_ENTRIES_PER_SLICE:
        return False
    try:
        txn = TxnId.from_numbers(ack.txn.most, ack.txn.least)
        for _ in _check_ack(ack):
            pass
    except InvalidRequest:
        return False
    return session.ack_in_transaction_nowait(txn, parse_acked_entries(ack.entries), parse_entry_sets(ack.ledgers))


def _check_ack(ack: wire.Ack) -> Iterator[None]:
    """Checks an acknowledgement, in steps of a generator; must be done before the first entry is acknowledged. Raises
    InvalidRequest."""
    if ack.kind not in (wire.Ack.INDIVIDUAL, wire.Ack.CUMULATIVE):
        raise AckRefusal.UNKNOWN_KIND.error(
            f"there is no kind of acknowledgement {ack.kind}; there are INDIVIDUAL, CUMULATIVE"
        )
    entries, reached = iter(ack.entries), 0
    while some := list(islice(entries, ACKED_ENTRIES_PER_SLICE)):
        reached += sum(max(max(each.batch_indexes, default=0), 8 * len(each.batch_bits)) for each in some)
        yield
    if reached > BATCH_INDEXES_MAX:
        raise AckRefusal.TOO_MANY_INDEXES.error(
            f"the batch indexes of one acknowledgement reach over {BATCH_INDEXES_MAX} messages at most, in all entries"
        )


def parse_acked_entries(entries: Iterable[wire.AckedEntry]) -> Iterator[AckedEntry]:
    """Yields the acknowledged entries of a request. An entry without batch indexes is acknowledged as a whole. Skips an
    entry whose set of batch indexes is present but empty."""
    for each in entries:
        bits = 0
        if each.batch_indexes or each.batch_bits:
            bits = bits_of_indexes(each.batch_indexes) | int.from_bytes(each.batch_bits, "little")
            if not bits:
                continue  # none of its messages
        yield AckedEntry(Position(each.ledger_id, each.entry_id), bits)


def parse_entry_sets(given: Iterable[wire.EntrySet]) -> Iterator[EntrySet]:
    """Yields the sets of entries of a request, one for each ledger."""
    for each in given:
        yield EntrySet(each.ledger_id, each.entries)


def redeliver_in_steps(session: ConsumerSession, asked: wire.Redeliver) -> Iterator[None]:
    """Requeues the messages that a request names, so that the subscription delivers them again. Also stores why the
    client failed to process them, for at most KEPT_FAILURES_MAX messages. A generator: other tasks may run between its
    steps. A step raises InvalidRequest if a set of entries cannot be parsed."""
    session.record_failure_reasons({
        Position(each.ledger_id, each.entry_id): Failure(each.error, each.message, each.traceback, each.consumer)
        for each in asked.failures[:KEPT_FAILURES_MAX]
    })  # fmt: skip
    positions = (Position(each.ledger_id, each.entry_id) for each in asked.entries)
    return session.redeliver(positions, list(parse_entry_sets(asked.ledgers)), counted=not asked.uncounted)


async def seek_subscription(session: ConsumerSession, asked: wire.Seek) -> None:
    """Moves the subscription to the message id, publish time (ms since the epoch) or message index that the request
    names. Returns when the new position is durable. Raises the errors of the `ConsumerSession.seek_…` method that it
    calls."""
    if asked.HasField("message_id"):
        await session.seek_message(MessageId.from_wire(asked.message_id))
    elif asked.HasField("publish_time_ms"):
        await session.seek_time(asked.publish_time_ms)
    else:
        await session.seek_index(asked.index)


def make_last_message_frame(id_: int, request_id: int, found: LastMessage) -> wire.ServerFrame:
    """Returns the frame that answers a request for the topic's last message. `id_`: the id of the consumer on the
    stream; `request_id`: the id of the request; `found`: the last message."""
    answer = wire.LastMessageId(
        request_id=request_id, index=found.index,
        id=wire.MessageId(
            ledger_id=found.position[0], entry_id=found.position[1], partition=found.partition,
            batch_index=found.batch_index,
        ),
        mark_delete=wire.MessageId(
            ledger_id=found.mark_delete[0], entry_id=found.mark_delete[1], partition=found.partition, batch_index=-1
        ),
    )  # fmt: skip
    return wire.ServerFrame(id=id_, last=answer)


def parse_permission_change(request: wire.ChangePermissionsRequest) -> Callable[[GrantsRecord, str], GrantsRecord]:
    """Returns a function that makes the requested change of permissions. It takes a record of grants and the full name
    of the topic ("" for the namespace), and returns the changed record; it raises InvalidRequest or InvalidName if the
    values are invalid. Raises InvalidRequest if this broker does not know the change, or the change does not apply to a
    topic."""
    kind, given = request.WhichOneof("change"), request
    if kind == "grant":
        return lambda record, topic: permissions.set_role_grant(record, topic, given.grant.role, given.grant.actions)
    if kind == "revoke":
        return lambda record, topic: permissions.remove_role_grant(record, topic, given.revoke)
    if given.topic:
        raise InvalidRequest("the lists of subscriptions are those of a namespace: name that")
    if kind == "grant_subscription":
        of = given.grant_subscription
        return lambda record, _: permissions.set_subscription_roles(record, of.subscription, of.roles)
    if kind == "revoke_subscription":
        left = given.revoke_subscription
        return lambda record, _: permissions.remove_subscription_roles(record, left.subscription, left.roles)
    if kind == "prefix_mode":
        return lambda record, _: replace(record, prefix_mode=given.prefix_mode)
    raise InvalidRequest("a change of permissions that this broker does not know")


# ------------------------------------------------------------------------------------------------------ delivery
# Encodes entries as items of a stream, in pieces, so that the entry itself is not copied.
#
# ServerFrame.delivery (field 7) and ReadReply.entry (field 2) are a Delivery, whose last field (5) is the entry;
# ServerFrame.deliveries is field 8, with ledger (20), entry ids (21) and entries (22): whole entries that are delivered
# for the first time are sent together in it, because an item costs both ends more than a small entry. Protobuf would
# copy an entry three times (into its message, into the reply, into the item); here the reply is written around the
# entries' frames, and the stream joins the short pieces. tests/broker/grpc/test_delivery.py compares it with protobuf.


SHARED_ITEM_BYTES_MAX = 256 << 10
"""An item with several entries ends after the entry with which it reaches this size in bytes."""

_READ_ENTRY = b"\x12"  # tag of a length-delimited field 2

_FRAME_DELIVERY, _FRAME_DELIVERIES = b"\x3a", b"\x42"  # … 7 and 8
_FIELD_5 = b"\x2a"
_FIELD_1_INT, _FIELD_2_INT = b"\x08", b"\x10"
_FIELD_2, _FIELD_3 = b"\x12", b"\x1a"


def encode_deliveries(
    deliveries: Sequence[Delivery], head: bytes, failures: Mapping[Position, Failure] = NO_FAILURES
) -> list[Pieces]:
    """Returns the encoded ServerFrames with all of the deliveries, in order. `head`: the encoded id of the consumer,
    with which each frame begins. `failures`: by position, why the client gave an entry back; it is sent with the
    redelivery."""
    items: list[Pieces] = []
    run: list[StoredEntry] = []
    ledger_id, size = -1, 0
    for _, entry, count, acked in deliveries:
        assert isinstance(entry, StoredEntry)
        whole = not (count or acked or entry.expiry is not None)
        if run and (not whole or entry.position[0] != ledger_id or size >= SHARED_ITEM_BYTES_MAX):
            items.append(_together(ledger_id, run, head))
            run, size = [], 0
        if whole:
            run.append(entry)
            ledger_id = entry.position[0]
            size += entry.size
        else:
            items.append((head, *_parts(entry, count, acked, _FRAME_DELIVERY, failures.get(entry.position))))
    if len(run) == 1:
        items.append((head, *_parts(run[0], 0, None, _FRAME_DELIVERY)))
    elif run:
        items.append(_together(ledger_id, run, head))
    return items


def _together(ledger_id: int, entries: list[StoredEntry], head: bytes) -> Pieces:
    """Returns an encoded ServerFrame with these entries of one ledger."""
    if len(entries) == 1:
        return (head, *_parts(entries[0], 0, None, _FRAME_DELIVERY))
    parts: list[Buffer] = []
    ids, bodies = bytearray(), 0
    for entry in entries:
        prefix = _entry_prefix(entry.size)
        ids += encode_varint(entry.position[1])
        parts.append(prefix)
        parts += entry.frames
        bodies += len(prefix) + entry.size
    ledger = _FIELD_1_INT + encode_varint(ledger_id) if ledger_id else b""
    numbers = b"".join((ledger, _FIELD_2, encode_varint(len(ids)), ids))
    return (head, _FRAME_DELIVERIES, encode_varint(len(numbers) + bodies), numbers, *parts)


def _entry_prefix(size: int) -> bytes:
    return _PREFIXES[size] if size < PRECOMPUTED_VARINTS else _FIELD_3 + encode_varint(size)


def encode_read_reply(request_id: int, entry: StoredEntry) -> Pieces:
    """Returns an encoded ReadReply with the entry. `request_id`: the id of the request that it answers."""
    return (wire.ReadReply(request_id=request_id).SerializeToString(), *_parts(entry, 0, None, _READ_ENTRY))


def _parts(
    entry: StoredEntry, redelivery_count: int, acked_indexes: list[int] | None, tag: bytes,
    failure: Failure | None = None,
) -> tuple[Buffer, ...]:
    ledger_id, entry_id = entry.position
    if redelivery_count or acked_indexes or not entry_id or entry.expiry is not None:
        delivery = wire.Delivery(
            ledger_id=ledger_id, entry_id=entry_id, redelivery_count=redelivery_count,
            acked_batch_indexes=acked_indexes, broker_ms=entry.expiry.told_ms if entry.expiry is not None else 0,
        )  # fmt: skip
        if failure is not None:
            delivery.failure.CopyFrom(wire.Failure(**failure._asdict()))
        head = delivery.SerializeToString()
    else:
        ledger = _VARINTS[ledger_id] if ledger_id < PRECOMPUTED_VARINTS else encode_varint(ledger_id)
        head = (
            _FIELD_1_INT
            + ledger
            + _FIELD_2_INT
            + (_VARINTS[entry_id] if entry_id < PRECOMPUTED_VARINTS else encode_varint(entry_id))
        )
    size = _VARINTS[entry.size] if entry.size < PRECOMPUTED_VARINTS else encode_varint(entry.size)
    whole = len(head) + 1 + len(size) + entry.size
    return (
        tag,
        _VARINTS[whole] if whole < PRECOMPUTED_VARINTS else encode_varint(whole),
        head,
        _FIELD_5,
        size,
        *entry.frames,
    )


PRECOMPUTED_VARINTS = 4096
"""Sizes below this have precomputed prefixes: most entries are shorter."""
_VARINTS = [encode_varint(size) for size in range(PRECOMPUTED_VARINTS)]
_PREFIXES = [_FIELD_3 + size for size in _VARINTS]
"""Tag and length of an entry in `deliveries`, by its size."""
