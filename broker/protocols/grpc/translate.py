"""Between messages of proto/wire.proto and the plain values of the broker's sessions.

Rule: no request costs the broker more than linear work in its bytes, and none leaves anything half made. So values that
the wire can carry and the broker has no use for (an enum's unknown number, an index that no entry can have) are refused
here, as InvalidRequest, before a session sees them. What is long is translated as it is taken, a step at a time.
Guarding test: tests/broker/protocols/grpc/test_extreme_requests.py, for each request of proto/wire.proto.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from msgspec.structs import replace

from ....metadata.records import GrantsRecord
from ....proto import wire_pb2 as wire
from ....proto.errors import InvalidRequest
from ....proto.model import (
    AccessMode,
    AckedEntry,
    EntrySet,
    InitialPosition,
    KeySharedMode,
    LastMessage,
    RedeliveryOrder,
    enum_of,
)
from ....proto.names import MessageId, Position
from ....proto.schema import SchemaInfo, SchemaType, SchemaVersion, version_bytes
from ....proto.transactions import Isolation, TxnId
from ...access import permissions
from ...common.config import BrokerConfig
from ...common.refusals import AckRefusal
from ...session.consumer import ACK_ENTRIES, ConsumerSession, SubscribeOptions
from ...session.producer import ProducerOptions, ProducerSession, room_of
from ...subscription.core.bits import bits_of
from ...subscription.core.cursor_state import BATCH_INDEXES_MAX
from ...subscription.core.policies import type_of
from ...subscription.core.policies.policy import PolicyOptions
from ...subscription.core.policies.slot_owners import KeySharedOptions


# ------------------------------------------------------------------ schemas
def schema(given: wire.SchemaInfo) -> SchemaInfo:
    return SchemaInfo(
        type=enum_of(SchemaType, given.type, "schema type"), data=given.data, name=given.name,
        properties=dict(given.properties),
    )  # fmt: skip


def schema_reply(found: SchemaVersion) -> wire.SchemaReply:
    info = found.info
    return wire.SchemaReply(
        version=version_bytes(found.version), created_ms=found.created_ms, user=found.user, deleted=found.deleted,
        schema=wire.SchemaInfo(type=info.type, data=info.data, name=info.name, properties=info.properties),
    )  # fmt: skip


# ------------------------------------------------------------------ producers
def producer_options(asked: wire.OpenProducer, config: BrokerConfig) -> ProducerOptions:
    return ProducerOptions(
        asked.topic, asked.producer_name, enum_of(AccessMode, asked.access_mode, "access mode"),
        dict(asked.properties), asked.instance, asked.connection, asked.initial_subscription, asked.topic_epoch,
        schema(asked.schema) if asked.HasField("schema") else None, room_of(config) if asked.copies else 0,
    )  # fmt: skip


def producer_opened(id_: int, session: ProducerSession) -> wire.ServerFrame:
    return wire.ServerFrame(
        id=id_,
        producer_opened=wire.ProducerOpened(
            producer_name=session.name, last_sequence_id=session.last_sequence_id, credit=session.credit,
            max_message_size=session.max_message_bytes, topic_epoch=session.topic_epoch,
            schema_version=version_bytes(session.schema_version),
        ),
    )  # fmt: skip


# ------------------------------------------------------------------ consumers
def subscribe_options(asked: wire.Subscribe) -> SubscribeOptions:
    return SubscribeOptions(
        asked.topic, asked.subscription, type_of(asked.type),
        enum_of(InitialPosition, asked.initial_position, "initial position"), asked.consumer_name, asked.durable,
        MessageId.from_wire(asked.start) if asked.HasField("start") else None, asked.start_inclusive,
        dict(asked.properties), asked.priority_level, dict(asked.subscription_properties), asked.read_compacted,
        asked.existing_only, asked.instance, _policy_options(asked), asked.many_topics,
        schema(asked.schema) if asked.HasField("schema") else None,
        enum_of(Isolation, asked.isolation, "isolation"),
        enum_of(RedeliveryOrder, asked.redelivery_order, "redelivery order") is RedeliveryOrder.KEY,
        asked.incarnation,
    )  # fmt: skip


def _policy_options(asked: wire.Subscribe) -> PolicyOptions:
    """Returns the options of the message that the type has in a Subscribe; types without one leave it alone."""
    shared = asked.key_shared
    return KeySharedOptions(
        enum_of(KeySharedMode, shared.mode, "mode of Key_Shared") is KeySharedMode.STICKY,
        shared.allow_out_of_order_delivery, tuple((each.first, each.last) for each in shared.ranges),
    )  # fmt: skip


def subscribed(id_: int, session: ConsumerSession) -> wire.ServerFrame:
    answer = wire.Subscribed(
        consumer_name=session.name, compacted_end_index=session.compacted_end_index,
        incarnation=session.topic.incarnation,
    )  # fmt: skip
    return wire.ServerFrame(id=id_, subscribed=answer)


def ack_steps(session: ConsumerSession, ack: wire.Ack) -> Iterator[None]:
    """Acknowledges in steps. InvalidRequest, NotAllowed: as far as it was taken it counts."""
    yield from _check_ack(ack)
    if ack.kind == wire.Ack.CUMULATIVE:
        for entry in acked(ack.entries):
            yield from session.ack_cumulative(entry)
            yield
    else:
        yield from session.ack(acked(ack.entries), sets(ack.ledgers))


async def ack_in(session: ConsumerSession, ack: wire.Ack) -> None:
    """Acknowledges in a transaction, like the session's `ack_in`."""
    txn = TxnId.checked(ack.txn.most, ack.txn.least)
    for _ in _check_ack(ack):
        await asyncio.sleep(0)
    cumulative = ack.kind == wire.Ack.CUMULATIVE
    await session.ack_in(txn, acked(ack.entries), tuple(sets(ack.ledgers)), cumulative=cumulative)


def pend_now(session: ConsumerSession, ack: wire.Ack) -> bool:
    """Whether the session took the acknowledgement at once (its `pend_now`); False also if it is not a few entries."""
    if ack.kind != wire.Ack.INDIVIDUAL or len(ack.entries) + len(ack.ledgers) > ACK_ENTRIES:
        return False
    try:
        txn = TxnId.checked(ack.txn.most, ack.txn.least)
        for _ in _check_ack(ack):
            pass
    except InvalidRequest:
        return False
    return session.pend_now(txn, acked(ack.entries), sets(ack.ledgers))


def _check_ack(ack: wire.Ack) -> Iterator[None]:
    """Checks an acknowledgement, in steps, before the first entry of it is acknowledged."""
    if ack.kind not in (wire.Ack.INDIVIDUAL, wire.Ack.CUMULATIVE):
        raise AckRefusal.UNKNOWN_KIND.error(
            f"there is no kind of acknowledgement {ack.kind}; there are INDIVIDUAL, CUMULATIVE"
        )
    entries, reached = iter(ack.entries), 0
    while some := list(islice(entries, ACK_ENTRIES)):
        reached += sum(max(max(each.batch_indexes, default=0), 8 * len(each.batch_bits)) for each in some)
        yield
    if reached > BATCH_INDEXES_MAX:
        raise AckRefusal.TOO_MANY_INDEXES.error(
            f"the batch indexes of one acknowledgement reach over {BATCH_INDEXES_MAX} messages at most, in all entries"
        )


def acked(entries: Iterable[wire.AckedEntry]) -> Iterator[AckedEntry]:
    for each in entries:
        bits = 0
        if each.batch_indexes or each.batch_bits:
            bits = bits_of(each.batch_indexes) | int.from_bytes(each.batch_bits, "little")
            if not bits:
                continue  # none of its messages
        yield AckedEntry(Position(each.ledger_id, each.entry_id), bits)


def sets(given: Iterable[wire.EntrySet]) -> Iterator[EntrySet]:
    for each in given:
        yield EntrySet(each.ledger_id, each.entries)


def redeliver_steps(session: ConsumerSession, asked: wire.Redeliver) -> Iterator[None]:
    positions = (Position(each.ledger_id, each.entry_id) for each in asked.entries)
    return session.redeliver(positions, list(sets(asked.ledgers)), counted=not asked.uncounted)


async def seek(session: ConsumerSession, asked: wire.Seek) -> None:
    if asked.HasField("message_id"):
        await session.seek_message(MessageId.from_wire(asked.message_id))
    elif asked.HasField("publish_time_ms"):
        await session.seek_time(asked.publish_time_ms)
    else:
        await session.seek_index(asked.index)


def last(id_: int, request_id: int, found: LastMessage) -> wire.ServerFrame:
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


def permission_change(request: wire.ChangePermissionsRequest) -> Callable[[GrantsRecord, str], GrantsRecord]:
    """Returns the function that changes a record of grants; it gets the record and the full name of the topic ("": the
    namespace). Raises InvalidRequest."""
    kind, given = request.WhichOneof("change"), request
    if kind == "grant":
        return lambda record, topic: permissions.grant(record, topic, given.grant.role, given.grant.actions)
    if kind == "revoke":
        return lambda record, topic: permissions.revoke(record, topic, given.revoke)
    if given.topic:
        raise InvalidRequest("the lists of subscriptions are those of a namespace: name that")
    if kind == "grant_subscription":
        of = given.grant_subscription
        return lambda record, _: permissions.grant_subscription(record, of.subscription, of.roles)
    if kind == "revoke_subscription":
        left = given.revoke_subscription
        return lambda record, _: permissions.revoke_subscription(record, left.subscription, left.roles)
    if kind == "prefix_mode":
        return lambda record, _: replace(record, prefix_mode=given.prefix_mode)
    raise InvalidRequest("a change of permissions that this broker does not know")
