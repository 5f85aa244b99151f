"""A consumer of a Pulsar client, on a session of the broker (broker/session/consumer.py).

Deliveries leave as MESSAGE frames around the stored bytes, without the broker's part of an entry.

**Seek.** Pulsar's clients rely on this order: CLOSE_CONSUMER to each consumer of the subscription, the cursor moves,
SUCCESS; then they subscribe again. So the consumer that seeks is closed first too and gets nothing from then on, but
its session lasts until the SEEK is answered. The subscription of a reader ends with its last consumer, so the session
of a reader lasts until it subscribes again (`must_resubscribe`): the new one begins where the old one was moved to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ...proto import pulsar_pb2 as pulsar
from ...proto.checksum import encode_varint
from ...proto.entry import strip_broker_part
from ...proto.errors import InvalidRequest, MagnetarError, Unavailable
from ...proto.names import LATEST, MessageId, Position
from ...proto.states import InitialPosition
from ...runtime.access import Principal
from ...runtime.tasks import run_and_clean_up, run_or_undo
from ..common.refusals import SubscribeRefusal
from ..log.cache import StoredEntry
from ..session.consumer import PERMITS_MAX, ConsumerSession, SubscribeOptions
from ..subscription.core.dispatch import Delivery
from ..subscription.core.in_log_order import KeySharedOptions
from ..subscription.core.subscription_types import find_subscription_type
from . import translate
from .frames import NO_REQUEST_ID, encode_frame, encode_message_head
from .producer import has_txn, transaction_id_of
from .translate import ensure_magnetar_error, find_pulsar_error_number

if TYPE_CHECKING:
    from .connection import PulsarConnection

CLIENTS_IGNORING_TOPIC_END = ("Pulsar-CPP", "Pulsar-Python", "Pulsar Go", "pulsar-client-node")
"""Clients that close their connection at REACHED_END_OF_TOPIC."""

INDEX_ACKS_PROPERTY = "magnetar.index_acks"
"""Property of a consumer: with the value true, it acknowledges by index, and what is acknowledged or filtered of a
batch is hidden from it. Otherwise that begins with its first acknowledgement by index."""
ACTIVE_NOTICE_DELAY_S = 0.1
"""Seconds after which ACTIVE_CONSUMER_CHANGE is sent, for the last change only: Go's client registers a consumer after
it handled the answer to SUBSCRIBE, and drops what comes earlier."""
SLOT_REFUSALS = (SubscribeRefusal.POLICY.name, SubscribeRefusal.OTHER_MODE.name)
"""Refusals of a Key_Shared consumer that are about its slots."""


class PulsarConsumerHandler:
    """Translates between the commands of one consumer and its session, and is the port of this session
    (broker/session/consumer.py `ConsumerPort`). `session`: None until the consumer is open. `must_resubscribe`: the
    consumer has sought, and gets nothing until its client subscribes again."""

    def __init__(
        self, connection: PulsarConnection, asked: pulsar.CommandSubscribe, before: PulsarConsumerHandler | None = None
    ) -> None:
        """Makes a handler. `before`: the handler of the same id that has sought, if this is its reader subscribing
        again."""
        self.id = asked.consumer_id
        self.must_resubscribe = False
        self.session: ConsumerSession | None = None
        self._connection = connection
        self._asked = asked
        self._before = before
        self._opening: asyncio.Task[None] | None = None
        self._epoch = asked.consumer_epoch if asked.HasField("consumer_epoch") else None
        """Epoch of the messages that are sent. Java's client drops those of an earlier one, which were sent before it
        asked for redelivery of all."""
        self._head = b"\x08" + encode_varint(self.id)
        self._over = self._is_moving = False
        self._is_active = False
        self._told_active: bool | None = None
        self._queue = 0  # the largest FLOW, which is the client's queue
        self._notice: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ opening
    def start_opening(self) -> None:
        """Starts a task that opens the consumer, and sends the outcome to the client."""
        self._opening = self._connection.start_request(self._open())

    def answer_repeated_open(self, request_id: int) -> None:
        """Answers a client that opens this consumer again: success if it is open, Unavailable while it is being opened
        or its topic moves to another broker."""
        if self.session is None or self._is_moving:
            why = "being opened" if self.session is None else "about to be closed: its topic moves"
            self._connection.send_error(request_id, Unavailable(f"the consumer of this id is {why}"))
        else:
            self._connection.send_success(request_id)

    async def _open(self) -> None:
        asked, connection = self._asked, self._connection
        try:
            options = parse_subscribe_command(asked)
            if self._before is not None:
                options = await self._before.end_session_after_seek(options)
            session = await ConsumerSession.open(connection.broker, options, self, connection.caller)
            if not asked.durable and asked.start_message_rollback_duration_sec and self._before is None:
                back_ms = asked.start_message_rollback_duration_sec * 1000
                since_ms = max(0, connection.broker.world.clock.wall_ms() - back_ms)
                await run_or_undo(session.seek_time(since_ms), session.leave)
        except Exception as error:
            connection.handlers.remove_consumer(self)
            why = ensure_magnetar_error(error)
            assign = asked.subType == pulsar.CommandSubscribe.Key_Shared and why.fields.get("refusal") in SLOT_REFUSALS
            connection.send_error(asked.request_id, why, pulsar.ConsumerAssignError if assign else None)
            return
        self.session = session
        if self._over:  # it was closed meanwhile: `leave` waits for this task, and ends the session
            return
        self.on_credentials_renewed(connection.caller.principal)
        connection.send_success(asked.request_id)

    def on_credentials_renewed(self, principal: Principal) -> None:
        """Called when the client has renewed its credentials. Passes `principal`, the caller with the new credentials,
        to the session."""
        if self.session is not None:
            self.session.on_credentials_renewed(principal)

    async def end_session_after_seek(self, options: SubscribeOptions) -> SubscribeOptions:
        """Ends the session of a reader after a seek. Returns the options for the next session of this reader: a copy of
        `options` whose start position is the target of the seek."""
        session = self.session
        assert session is not None, "it has sought"
        mark, log = session.subscription.cursor.mark, session.subscription.log
        first = log.shape.position_after(mark)
        acked = session.subscription.cursor.acked_message_count(first)
        await self.leave()
        start = MessageId(*first, batch_index=acked) if acked else MessageId(*mark)
        return replace(options, start=start, start_inclusive=bool(acked))

    # ------------------------------------------------------------------ commands
    def add_permits(self, permits: int) -> None:
        """Grants the consumer the permits of a FLOW command, but at most so many that it has as many as its largest
        FLOW. That is the size of the client's queue: C++'s and Go's clients also return permits for messages that they
        hide. A client whose FLOWs are all of 1 has no queue, and may have up to PERMITS_MAX permits. Does nothing
        before the consumer is open, and after a seek."""
        if self.session is not None and not self.must_resubscribe:
            self._queue = max(self._queue, permits)
            most = min(self._queue, PERMITS_MAX) if self._queue > 1 else PERMITS_MAX
            self.session.grant_permits(min(permits, max(0, most - self.session.member.permits)))

    def ack(self, asked: pulsar.CommandAck) -> Iterator[None]:
        """Carries out an ACK command, in steps: the caller iterates, and may let other tasks run in between. An error
        is sent to the client only if the command asks for an answer, as in Pulsar. Does nothing before the consumer is
        open, and after a seek."""
        error: MagnetarError | None = None
        session = self.session
        if session is None or self.must_resubscribe:
            return
        if has_txn(asked):
            self._connection.start_request(self._ack_in(session, asked))
            return
        try:
            yield from translate.acknowledge_in_steps(session, asked)
        except MagnetarError as refused:  # told with a receipt only, as Pulsar does
            error = refused
        if asked.HasField("request_id"):
            self._connection.start_request(self._receipt(session, asked.request_id, error))

    async def _ack_in(self, session: ConsumerSession, asked: pulsar.CommandAck) -> None:
        """Acknowledges in a transaction; answers with the transaction's id if the client asks for an answer."""
        answer = pulsar.CommandAckResponse(
            consumer_id=self.id, txnid_most_bits=asked.txnid_most_bits, txnid_least_bits=asked.txnid_least_bits
        )
        try:
            await translate.ack_in_transaction(session, transaction_id_of(asked), asked)
        except Exception as failure:
            error = ensure_magnetar_error(failure)
            answer.error, answer.message = find_pulsar_error_number(error), error.message
        if asked.HasField("request_id"):
            answer.request_id = asked.request_id
            self._connection.send(encode_frame(ack_response=answer))

    async def _receipt(self, session: ConsumerSession, request_id: int, error: MagnetarError | None) -> None:
        answer = pulsar.CommandAckResponse(consumer_id=self.id, request_id=request_id)
        try:
            if error is None:
                await session.wait_durable()
        except Exception as failure:
            error = ensure_magnetar_error(failure)
        if error is not None:
            answer.error, answer.message = find_pulsar_error_number(error), error.message
        self._connection.send(encode_frame(ack_response=answer))

    def redeliver(self, asked: pulsar.CommandRedeliverUnacknowledgedMessages) -> Iterator[None]:
        """Requeues the messages that the command names, in steps: the caller iterates, and may let other tasks run in
        between. From now on deliveries have the consumer epoch of the command, if it has one. Requeues nothing before
        the consumer is open, and after a seek."""
        if asked.HasField("consumer_epoch"):
            self._epoch = asked.consumer_epoch
        if self.session is not None and not self.must_resubscribe:
            yield from translate.redeliver_in_steps(self.session, asked)

    async def seek(self, asked: pulsar.CommandSeek) -> None:
        """Moves the cursor of the subscription as a SEEK command says; the new position is durable when this method
        returns. The client is told before that its consumer is closed, and subscribes again. Raises Unavailable if the
        consumer is not open, InvalidRequest if the command names no position, and the errors of
        `ConsumerSession.seek_message`."""
        session = self._opened()
        self.must_resubscribe = True
        self._close_at_client()
        await run_and_clean_up(self._seek(session, asked), self._after_seek)

    async def _seek(self, session: ConsumerSession, asked: pulsar.CommandSeek) -> None:
        if asked.HasField("message_id"):
            await session.seek_message(translate.parse_message_id(asked.message_id))
        elif asked.HasField("message_publish_time"):
            await session.seek_time(asked.message_publish_time)
        else:
            raise InvalidRequest("a SEEK names a message or a time")

    async def _after_seek(self) -> None:
        if self._asked.durable:
            self._connection.handlers.remove_consumer(self)
            await self.leave()

    async def unsubscribe(self, *, force: bool) -> None:
        """Deletes the subscription, and ends this consumer. Raises Unavailable if the consumer is not open, and the
        errors of `ConsumerSession.unsubscribe`."""
        session = self._opened()
        await session.unsubscribe(force=force)
        self._connection.handlers.remove_consumer(self)
        await self.leave()

    @property
    def address(self) -> str:
        """The address (HOST:PORT) from which the client is connected."""
        return self._connection.caller.peer

    def _opened(self) -> ConsumerSession:
        if self.session is None or self.must_resubscribe:
            raise Unavailable("the consumer of this id is not open")
        return self.session

    # ------------------------------------------------------------------ the port
    def deliver(self, deliveries: Sequence[Delivery]) -> bool:
        for delivery in deliveries:
            entry = delivery.entry
            assert isinstance(entry, StoredEntry)
            part = strip_broker_part(entry.frames[-1])
            head = encode_message_head(self._message(delivery, entry.position), len(part))
            self._connection.send_parts((head, part), len(head) + len(part))
        return self.must_resubscribe or self._connection.is_full

    def _message(self, delivery: Delivery, position: Position) -> bytes:
        """Encodes a CommandMessage."""
        assert self.session is not None, "a delivery comes after the opening"
        partition = self.session.topic.name.partition
        place = b"".join((b"\x08", encode_varint(position[0]), b"\x10", encode_varint(position[1])))
        if partition >= 0:
            place += b"\x18" + encode_varint(partition)
        parts = [self._head, b"\x12", encode_varint(len(place)), place]
        if delivery.redelivery_count:
            parts.append(b"\x18" + encode_varint(delivery.redelivery_count))
        if delivery.acked_indexes:
            words = translate.encode_ack_set(delivery.acked_indexes, delivery.entry.count)
            parts += [b"\x20" + encode_varint(translate.to_unsigned_long(word)) for word in words]
        if self._epoch is not None:
            parts.append(b"\x28" + encode_varint(self._epoch))
        return b"".join(parts)

    def on_end_of_topic(self) -> None:
        if not self._connection.client.startswith(CLIENTS_IGNORING_TOPIC_END):
            self._connection.send(
                encode_frame(reached_end_of_topic=pulsar.CommandReachedEndOfTopic(consumer_id=self.id))
            )

    def on_active_changed(self, active: bool) -> None:
        self._is_active = active
        if self._connection.version >= 12 and self._notice is None:
            self._notice = asyncio.get_running_loop().call_later(ACTIVE_NOTICE_DELAY_S, self._send_active)

    def _send_active(self) -> None:
        self._notice = None
        if not self._over and self._is_active is not self._told_active:
            self._told_active = self._is_active
            change = pulsar.CommandActiveConsumerChange(consumer_id=self.id, is_active=self._is_active)
            self._connection.send(encode_frame(active_consumer_change=change))

    def on_topic_moving(self, error: MagnetarError) -> asyncio.Future[None] | None:
        """Called when the topic moves to another broker. Tells the client that its consumer is closed. Acknowledgements
        that the client sends before it reads this command still count if they arrive in time. Returns None, because
        Pulsar's protocol does not say which acknowledgement is the last."""
        if self.session is not None and not (self._over or self.must_resubscribe):
            self._is_moving = True
            self._close_at_client(error)
        return None

    def on_closed(self, error: MagnetarError) -> None:
        if not self._over:
            self._over = True
            if not self._is_moving:
                self._close_at_client(error)
            self._connection.handlers.remove_consumer(self)
            self._connection.start_uncancelled_cleanup(self.leave())

    def _close_at_client(self, error: MagnetarError | None = None) -> None:
        urls = self._connection.make_next_owner_fields(error) if error is not None else {}
        self._connection.send(
            encode_frame(close_consumer=pulsar.CommandCloseConsumer(
                consumer_id=self.id, request_id=NO_REQUEST_ID, **urls
            ))
        )  # fmt: skip

    async def wait_drained(self) -> None:
        if self.must_resubscribe:
            await asyncio.get_running_loop().create_future()  # nothing more: until its session ends
        await self._connection.wait_drained()

    # ------------------------------------------------------------------ the end
    async def close(self, request_id: int) -> None:
        """Closes the consumer as a CLOSE_CONSUMER command asks. Answers the command when everything that the consumer
        acknowledged is durable."""
        await run_and_clean_up(self._close(request_id), self.leave)

    async def _close(self, request_id: int) -> None:
        try:
            await self._stop_opening()
            if self.session is not None:
                await self.session.close()
        except Exception as error:
            self._connection.send_error(request_id, ensure_magnetar_error(error))
        else:
            self._connection.send_success(request_id)

    async def leave(self) -> None:
        """Ends the consumer at once: cancels its opening if that is in progress, and leaves the subscription.
        Idempotent."""
        self._over = True
        if self._notice is not None:
            self._notice.cancel()
        await self._stop_opening()
        if self.session is not None:
            await self.session.leave()

    async def _stop_opening(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done() and opening is not asyncio.current_task():
            opening.cancel()
            await asyncio.wait((opening,))


def parse_subscribe_command(asked: pulsar.CommandSubscribe) -> SubscribeOptions:
    """Returns the options of the consumer that a SUBSCRIBE command opens. Raises InvalidRequest if they are invalid."""
    start = None
    if not asked.durable:
        start = translate.parse_message_id(asked.start_message_id) if asked.HasField("start_message_id") else None
    shared = asked.keySharedMeta
    policy = KeySharedOptions(
        shared.keySharedMode == pulsar.STICKY, shared.allowOutOfOrderDelivery,
        tuple((each.start, each.end) for each in shared.hashRanges),
    )  # fmt: skip
    again = start is not None and start.position < LATEST  # the client passes over what it wants no more
    return SubscribeOptions(
        asked.topic, asked.subscription, find_subscription_type(asked.subType), InitialPosition(asked.initialPosition),
        asked.consumer_name, asked.durable, start, again, translate.make_property_map(asked.metadata),
        asked.priority_level, translate.make_property_map(asked.subscription_properties), asked.read_compacted,
        not asked.force_topic_creation, "", policy,
        schema=translate.parse_schema(asked.schema) if asked.HasField("schema") else None,
        acks_by_index=any(pair.key == INDEX_ACKS_PROPERTY and pair.value == "true" for pair in asked.metadata),
    )  # fmt: skip
