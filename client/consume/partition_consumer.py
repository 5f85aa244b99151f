"""The consumer of one partition: the driver of the core in client/core/consumer.py, which makes the decisions.

The driver passes each fact to the core, and carries out the core's effects at once, in order. It splits entries into
messages when they arrive (client/consume/deliveries.py), and puts the messages into the receiver queue (`inbox`), which
several partitions may share. `acknowledge`, `on_taken`, the other methods below "from any thread", and those methods of
`acks` that say so may be called from any thread; all else belongs to the event loop. An unforeseen exception finishes
the consumer, and all waiting calls raise that error (client/common/loggers.py). Guards:
tests/client/consume/test_partition_consumer.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Any

from pyroaring import BitMap

from ...proto import wire_pb2 as wire
from ...proto.entry import EncryptFunction
from ...proto.errors import AWAITS_LAST_ACKS, MagnetarError, from_wire
from ...proto.expiry import EXPIRES_AT_PROPERTY, parse_expires_at
from ...proto.names import Position, TopicName
from ...proto.states import Failure
from ..common.closing import DueTimer
from ..common.errors import AlreadyClosed, OperationNotSupported, PulsarException, translate_error
from ..common.rate_limits import ReceiveMemoryClaim
from ..connect.attachment import Attachment, make_subscribe_frame
from ..connect.broker_stream import CLOSE_REQUEST_ID
from ..connect.connections import Connections, TopicSchemaCache
from ..core.consumer import ConsumerCore
from ..core.debounce import Debounce, KeyedMessage
from ..core.effects import (
    AnswerRequest,
    AttachToBroker,
    ConsumerEffect,
    DetachFromBroker,
    DropMessagesAfterFailure,
    DropQueuedMessages,
    EndWithError,
    PartitionClientState,
    ReportSeekDone,
    RequestRedelivery,
)
from ..core.redelivery import DuplicateFilter, EntrySets, MessagePlace
from ..model.hooks import CLOSED, MOVED, HookChain
from ..model.message import DamagedMessage, Message
from ..model.message_id import MessageId
from ..model.options import ReaderStart
from ..model.schema import Schema
from ..model.settings import ConsumerSettings, ConsumerType
from .acknowledgements import AckCollector, MessageOrId, get_ack_coordinates, make_consumer_options
from .dead_letters import DeadLetterProducer
from .deliveries import DeliveredEntries, make_client_frames
from .receiver_queue import ConsumerRequests, ReceiverQueue
from .transactional_acks import ClientTransactionalAcks

_LOG = logging.getLogger("magnetar.client")
REMEMBERED_FAILURES_MAX = 1000
"""Entries of a partition of which is remembered why they were given back: 4 MB at most."""


class PartitionConsumer:
    """The consumer of one partition: exchanges frames with the broker, passes them as facts to a ConsumerCore, and
    carries out the core's effects. It is the owner of an Attachment. See the head of the module."""

    def __init__(
        self, connections: Connections, topic: TopicName, subscription: str, settings: ConsumerSettings,
        inbox: ReceiverQueue,
        *, queue_size: int, start: ReaderStart | None = None, dead_letters: DeadLetterProducer | None = None,
        on_gone: Callable[[PartitionConsumer], None] | None = None, hooks: HookChain | None = None,
    ) -> None:  # fmt: skip
        """Makes a consumer that is not open. `queue_size`: how many of its messages may wait in `inbox`. `start`: where
        a reader begins; None: the subscription is durable. `on_gone` is called when the topic is deleted; without
        `on_gone` the receiver gets an error then."""
        self.topic = topic
        self.is_producer = self.waits = False
        self.schema: Schema = settings.schema
        self.writer_schemas = TopicSchemaCache(connections, topic)  # messages keep those of their incarnation
        self.must_keep_order = settings.redelivery_order == "key"
        self.name = settings.consumer_name or ""
        self.level = 0  # of priority, of a consumer with levels
        self.end_of_topic = False
        self.compacted_end_index = 0  # reading compacted: messages in front of it may have been removed
        self.incarnation = 0  # of the topic that it reads; 0: not known
        self.was_of: object = None  # the consumer that it left when its topic was deleted
        self.on_anew: Callable[[PartitionConsumer], None] | None = None
        self.on_connected: Callable[[PartitionConsumer], None] | None = None
        self.active = settings.consumer_type != ConsumerType.Failover  # until the broker says so
        self.received_permits = 0  # of all that the broker delivered: it grows with each entry
        self.on_active: Callable[[int, bool], None] | None = None
        self._on_gone = on_gone
        self._connections = connections
        self.subscription = subscription
        self._settings = settings
        self._inbox = inbox
        self._instance = connections.world.rng.randbytes(8).hex()  # our next connection replaces our last one
        self._now = connections.world.clock.monotonic
        self._claim = ReceiveMemoryClaim(connections.memory, queue_size)
        dead_after = dead_letters.policy.max_redeliver_count if dead_letters is not None else None
        options = make_consumer_options(
            settings, durable=start is None, dead_after=dead_after, alone=on_gone is not None
        )
        self.core = ConsumerCore(options, queue_size=self._claim.window, lock=Lock(), backoff=connections.backoff())
        times_out = bool(settings.unacked_messages_timeout_ms)
        self._hooks = None if hooks is None else hooks.add_partition(self, times_out=times_out)
        self.acks = AckCollector(settings, self.core, self._wake, self._now, self._hooks)
        self._failures: dict[Position, Failure] = {}  # the latest last
        self._failures_lock = Lock()
        self.deliveries = DeliveredEntries(self, settings, self.core, self._now, dead_letters, start,
            self.acks.extra_ack_timeout_s,
                                     connections.memory)  # fmt: skip
        self._attachment = Attachment(connections, self)
        self.requests = ConsumerRequests(connections, self.core, self.acks, self._attachment.send, self._do)
        self.in_transactions = ClientTransactionalAcks(
            self, subscription, connections, self.core, self.acks, self.requests, self._attachment.send,
            self.on_failure,
            self.redeliver_in_order,
        )  # fmt: skip
        self._wakes = connections.event_loop_caller
        self._woken = False
        self._timer = DueTimer(self._now, self._time_passed, self.on_failure)
        self.debounce: Debounce[Message] | None = None
        if settings.debounce is not None:
            self.debounce = Debounce(settings.debounce)
            self._debounce_timer = DueTimer(self._now, self._put_due, self.on_failure)
        self._durable = start is None
        self._resumes = not settings.durable  # of a consumer that is no reader: after what its application took
        self._starts_at_ms = settings.start_at_ms  # of the subscription, until it was moved

    # ------------------------------------------------------------------------------ from any thread
    def on_taken(self, message: Message) -> None:
        """Fact: the application received the last message of an entry; with ack time-outs, any message. Frees its
        permits. Raises the error of a damaged message. May be called from any thread."""
        wake = self.core.permits.count_used_permits(message.permits, message.entry.stream)
        message.permits = -message.permits  # given, and still the last of its entry
        if message.entry.unfolded:
            self.deliveries.on_large_entry_dequeued(message.entry)
            wake = True
        if self.acks.times_out:
            self.acks.on_taken(message)
            wake = True
        if self._resumes:
            self.core.set_resume_point(message.message_id())
        if wake:
            self._wake()
        if isinstance(message, DamagedMessage):
            raise message.error()

    def on_message_put_back(self, message: Message) -> None:
        """Fact: the message was taken, did not reach the application, and waits again. For a subscription that is not
        durable the consumer continues with this message after a reconnect. May be called from any thread."""
        if self._resumes:
            self._starts_at_ms = 0
            self.deliveries.start = ReaderStart(message.message_id(), True)
            self.core.set_resume_point(None)

    def remember_failure(self, position: Position, failure: Failure) -> None:
        """Records why a message of the entry at `position` was given back, for its redelivery and its dead letter.
        Keeps the latest REMEMBERED_FAILURES_MAX entries. May be called from any thread."""
        with self._failures_lock:
            self._failures.pop(position, None)
            self._failures[position] = failure
            if len(self._failures) > REMEMBERED_FAILURES_MAX:
                del self._failures[next(iter(self._failures))]

    def find_failure(self, message: Message) -> Failure | None:
        """Returns why a message of the same entry was given back last; None if that is not known."""
        return self._failures.get(message.entry.position)

    def acknowledge_if_expired(self, message: Message) -> bool:
        """Returns whether the message has expired since it was delivered; if so, acknowledges and counts the message.
        The time is that of the broker's clock at the delivery, and what has passed here since. With `is_read_compacted`
        a tombstone does not expire: its key is deleted for ever."""
        offset_ms = message.entry.broker_clock_ms
        at_ms = parse_expires_at(message.properties().get(EXPIRES_AT_PROPERTY)) if offset_ms is not None else 0
        if not at_ms or offset_ms is None or at_ms > offset_ms + 1000 * self._now():
            return False
        if self._settings.is_read_compacted and (message.fields.null_value or not message.payload):
            return False
        self.deliveries.expired += 1
        self.acknowledge(message)
        return True

    def on_dequeue_interrupted(self) -> None:
        """Fact: Ctrl-C interrupted `on_taken` at an unknown place. Wakes the event loop, so that it processes
        everything that `on_taken` recorded before. May be called from any thread."""
        self._woken = False
        self._wake()

    def flush_acks(self) -> None:
        """Passes all acknowledgements and negative acknowledgements up to now to the core, and carries out the core's
        effects at once. Must be called in the event loop."""
        self._turn()

    def send_waiting_acks(self) -> None:
        """Sends the acknowledgements that wait to be sent in groups, so that the broker applies them before the next
        request. Must be called in the event loop."""
        self.acks.flush()
        self._do(self.core.send_last_acks())

    def acknowledge(self, which: MessageOrId) -> None:
        """Acknowledges a message, with all its chunks; sent with the next group. May be called from any thread."""
        self.acks.acknowledge(which)

    def make_copy_encryptor(self, message: Message) -> EncryptFunction | None:
        """Returns the function that encrypts a copy of the message for the same readers; None if the message was not
        encrypted. Raises CryptoError if the message cannot be decrypted."""
        return self.deliveries.make_copy_encryptor(message.entry.header.metadata)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._wakes.call(self._turn, self.on_failure)

    # ------------------------------------------------------------------------------ facts in
    def _turn(self) -> None:
        self._woken = False
        self._do(self.core.take_effects(self.acks.flush()))
        if self.deliveries.decompress_waiting_entries():
            self._put()

    def _time_passed(self, now: float) -> None:
        self.acks.flush()
        self._do(self.core.run_timers(now))

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None:
        left = iter(frames)
        while (rare := self.deliveries.split_deliveries(left)) is not None:
            self._put()
            self._rare(rare.WhichOneof("kind"), rare)
            if not self._attachment.is_attached:
                return
        self._put()

    def _put(self) -> None:
        """Puts all received messages into the inbox at once, so that a waiter for one message is woken only once."""
        messages, charged, hidden, size_bytes = self.deliveries.take_received_messages()
        core = self.core
        if core.restart_request:
            charged += self.deliveries.discard_waiting_entries()
        if not charged:
            return
        self.received_permits += charged
        core.permits.count_received(charged)
        core.delivered_bytes += size_bytes
        if core.restart_request:
            core.discard_delivered()
            messages, hidden = [], charged
        elif self.must_keep_order and messages and core.has_failed_entries:
            follows = self.deliveries.make_blocked_filter(core.failed_positions())
            hidden += sum(message.permits for message in messages if follows(message))
            messages = [message for message in messages if not follows(message)]
        if messages and core.repeats is not None:
            if core.repeats.until is not None or core.repeats.in_use:
                messages, dropped = self._without_repeated(core.repeats, messages)
                hidden += dropped
            if messages:
                core.repeats.on_messages_queued(get_message_place(messages[-1]))
        if messages and self.debounce is not None:
            messages, dropped = self._without_superseded(self.debounce, messages)
            hidden += dropped
        if messages:
            self._inbox.put(messages)
        if hidden:
            self._do(core.on_entries_dropped(hidden))
        if self._claim.count_received(size_bytes, charged, core.permits.at_broker + core.permits.queued):
            self._do(core.resize_queue(self._claim.window))
        if core.has_new_times:
            core.has_new_times = False
            self._timer.move_to_earlier(core.next_timer_at)

    def _without_repeated(self, repeats: DuplicateFilter, messages: list[Message]) -> tuple[list[Message], int]:
        """Returns the messages that the application does not have, and the permits of the others."""
        until = repeats.find_end_of_repeats(get_message_place(messages[0]))
        if until is None:
            return messages, 0
        dropped = 0
        shown: list[Message] = []
        for message in messages:
            if get_message_place(message) >= until:
                shown.append(message)
                continue
            dropped += message.permits
            if message.entry.unfolded:
                self.deliveries.on_large_entry_dequeued(message.entry)
                self._wake()
        return shown, dropped

    def _without_superseded(self, debounce: Debounce[Message], messages: list[Message]) -> tuple[list[Message], int]:
        """Returns the messages that the application may have now, and the permits of those that it never gets:
        superseded ones, which are acknowledged, and copies of those that are held."""
        ready, superseded = debounce.add(map(_keyed, messages), self._now())
        dropped = 0
        for message in superseded:
            self.acknowledge(message)
        for message in (*superseded, *debounce.take_copies()):
            dropped += message.permits
            if message.entry.unfolded:
                self.deliveries.on_large_entry_dequeued(message.entry)
        self._debounce_timer.move_to_earlier(debounce.next_due)
        return ready, dropped

    def _put_due(self, now: float) -> None:
        """Puts the messages into the inbox whose windows are over."""
        assert self.debounce is not None, "it has a timer"
        if ready := self.debounce.take_due(now):
            self._inbox.put(ready)
        self._debounce_timer.move_to_earlier(self.debounce.next_due)

    def _rare(self, kind: str | None, frame: wire.ServerFrame) -> None:
        match kind:
            case "done" if frame.done.request_id == CLOSE_REQUEST_ID:
                self._attachment.on_closed()
            case "done":
                done = frame.done
                error = from_wire(done.error) if done.HasField("error") else None
                self._do(self.core.on_answered(done.request_id, error))
                if not self._durable and done.HasField("start"):
                    self.deliveries.on_start_position_known(done.start)
            case "last" | "probed" | "progress":
                answer = getattr(frame, kind)
                self._do(self.core.on_answered(answer.request_id, None, answer))
            case "subscribed":
                self.name = frame.subscribed.consumer_name or self.name
                self.compacted_end_index = frame.subscribed.compacted_end_index
                self.requests.level = frame.subscribed.level
                if self._starts_at_ms and not frame.subscribed.level:
                    self._finish(OperationNotSupported("the broker is older than this client, and knows no start_at"))
                    return
                self._set_incarnation(frame.subscribed.incarnation)
                self.deliveries.on_broker_filter_known(frame.subscribed.filter)
                if not self._durable and frame.subscribed.HasField("start"):
                    self.deliveries.on_start_position_known(frame.subscribed.start)
                self._attachment.on_opened()
                self.acks.flush()
                self._do(self.core.on_opened())
                self.requests.notify_state_changed()
                self.in_transactions.on_connected()
                if self.on_connected is not None:
                    self.on_connected(self)
            case "closed":
                error = from_wire(frame.closed)
                if "moved" in error.fields:  # by another consumer, or an operator
                    self.requests.moves += 1
                    self.requests.discard_unsent_acks()
                    self.deliveries.clear_dead_lettered_messages()
                    self.core.reset_duplicate_filter()
                elif AWAITS_LAST_ACKS in error.fields:
                    self.acks.flush()
                    self._do(self.core.send_last_acks())
                    self._attachment.send_close_frame()
                self._attachment.on_closed_by_broker(error)
            case "end_of_topic":
                self.end_of_topic = True
            case "active":
                self.active = frame.active
                if not frame.active:
                    self.acks.flush()
                    self._do(self.core.on_inactive())
                if self.on_active is not None:
                    self.on_active(self.topic.partition, frame.active)
            case _:
                self._attachment.on_unexpected_frame(kind)

    def _set_incarnation(self, incarnation: int) -> None:
        """Records the incarnation of the topic. If it differs from the one before, resets what belonged to that one:
        the schemas and, for a reader, its position."""
        before, self.incarnation = self.incarnation, incarnation or self.incarnation
        if before == self.incarnation:
            return
        self.writer_schemas = TopicSchemaCache(self._connections, self.topic, self.incarnation)
        if not before:
            return
        self.core.reset_duplicate_filter()
        _LOG.warning("%s was deleted and made anew: it is read from its beginning", self.topic)
        if not self._durable:
            self._starts_at_ms = 0
            self.core.clear_reader_position()
            self.deliveries.on_cursor_moved(MessageId.earliest)
        if self.on_anew is not None:
            self.on_anew(self)

    def on_lost(self, error: MagnetarError) -> None:
        if self.core.state is not PartitionClientState.CLOSED:
            _LOG.info("%s: the consumer reconnects: %s", self.topic, error)
        self._do(self.core.on_lost(error))

    # ------------------------------------------------------------------------------ effects
    def _do(self, effects: list[ConsumerEffect]) -> None:
        for effect in effects:
            match effect:
                case DropQueuedMessages(give_back):
                    freed = self._drop_waiting() if give_back else self._drop_lost()
                    folded = self.deliveries.discard_waiting_entries()
                    if give_back and folded:
                        self.core.permits.count_received(folded)
                        freed += folded
                    if give_back and freed:
                        self._do(self.core.on_entries_dropped(freed))
                case DropMessagesAfterFailure(failed):
                    self._drop_after(failed)
                case AnswerRequest(request_id, error, result):
                    self.requests.answer(request_id, error, result)
                case ReportSeekDone(to):
                    if self._hooks is not None:
                        self._hooks.report_settling_ended(MOVED)
                    self.acks.clear()
                    self._starts_at_ms = 0
                    self.deliveries.on_cursor_moved(to)
                case AttachToBroker(after_s):
                    self._attachment.reopen(after_s)
                case DetachFromBroker():
                    self._attachment.close_at_broker()
                case EndWithError(error, topic_is_gone):
                    self._close_with(translate_error(error), topic_is_gone=topic_is_gone)
                case _:
                    if self._hooks is not None and isinstance(effect, RequestRedelivery):
                        self._hooks.report_redelivered(effect.entries)
                    inclusive = self._settings.start_message_id_inclusive
                    for kind in make_client_frames(
                        effect, durable=self._durable, inclusive=inclusive, failures=self._failures
                    ):
                        self._attachment.send(**kind)
        self._timer.move_to_earlier(self.core.next_timer_at)

    def _drop_waiting(self) -> int:
        """Drops what waits for the application; returns the number of its permits. The duplicate filter lets it pass
        when it comes again."""
        held = self.debounce.clear() if self.debounce is not None else ()
        dropped: list[Message] = []

        def unwanted(message: Message) -> bool:
            ours = message.entry.consumer is self
            if ours:
                dropped.append(message)
            return ours

        freed = self._inbox.discard_matching_messages(unwanted)
        if dropped and self.core.repeats is not None:
            self.core.repeats.on_reading_restarted(min(map(get_message_place, dropped)))
        return freed + sum(message.permits for message in held)

    def _drop_lost(self) -> int:
        """Drops what waits for the application, which the next connection delivers again."""
        if self._resumes:
            self._resume_at_first_waiting()
        freed = self._drop_waiting()
        if self.core.repeats is not None:
            self.core.repeats.on_lost()
        return freed

    def _resume_at_first_waiting(self) -> None:
        """Has a consumer of a subscription that is not durable continue with the first message that waits, if later
        ones were taken before it: a listener takes them by their keys, and debounce holds some back. Those that were
        taken after it come again."""
        taken, waiting = self.core.last_taken, self._waiting_messages()
        first = min(waiting, key=get_message_place, default=None)
        if taken is not None and first is not None:
            ledger_id, entry_id = taken.position()
            if get_message_place(first) < (ledger_id, entry_id, taken.batch_index()):
                self.on_message_put_back(first)

    def _waiting_messages(self) -> list[Message]:
        """Returns the messages that the application has not received: in the receiver queue, and held by debounce."""
        held = self.debounce.held_messages if self.debounce is not None else ()
        return [each for each in (*self._inbox.waiting_messages(), *held) if each.entry.consumer is self]

    def _drop_after(self, failed: Collection[Position]) -> None:
        follows = self.deliveries.make_blocked_filter(failed)
        freed = self._inbox.discard_matching_messages(
            lambda message: message.entry.consumer is self and follows(message)
        )
        if freed:
            self._do(self.core.on_entries_dropped(freed))

    # ------------------------------------------------------------------------------ in the loop
    def acknowledge_cumulative(self, which: MessageOrId) -> None:
        """Acknowledges the message and all messages before it in the partition. Must be called in the event loop."""
        self.acks.flush()
        self.acks.notify_hooks((which,), cumulative=True)
        self.acks.acknowledged += 1
        self.core.acknowledge_cumulative(*get_ack_coordinates(which))
        self._turn()

    def send_waiting_now(self) -> None:
        """Sends the acknowledgements that wait for their group, because a transaction with acknowledgements of this
        consumer commits. (Those of the transaction itself are sent at the end of the loop's turn anyway.)"""
        self._turn()
        self._do(self.core.send_last_acks())

    def redeliver_unacknowledged(self) -> None:
        """Asks the broker to deliver all unacknowledged messages again, and does not wait for it. Messages that wait in
        the receiver queue are dropped; the broker delivers them again, too."""
        self.acks.flush()
        self._do(self.core.redeliver_all(self._untouched()))

    def redeliver_in_order(self) -> None:
        """Asks the broker to deliver all unacknowledged messages again, in order, and does not wait for it. Messages in
        the receiver queue, and those that arrive before the broker's answer, are dropped; the broker delivers them
        again, too."""
        self.acks.flush()
        self._do(self.core.redeliver_all(self._untouched(), in_order=True))

    def _untouched(self) -> EntrySets:
        """Returns the waiting entries of which the application has received no message, so that their redelivery is
        not counted."""
        found: EntrySets = {}
        places = self.core.chunks.incomplete_chunk_positions()
        for message in self._waiting_messages():
            entry = message.entry
            if message.batch_index == entry.first_index:
                places += entry.chunks or (entry.position,)
        places += self.deliveries.compressed_positions()
        for ledger_id, entry_id in places:
            found.setdefault(ledger_id, BitMap()).add(entry_id)
        return found

    def resize_queue(self, queue_size: int) -> None:
        """Changes the size of this partition's receiver queue to `queue_size` messages, the partition's share of the
        limit for all partitions."""
        self._claim.resize_queue(queue_size)
        self._do(self.core.resize_queue(self._claim.window))

    def discard_messages(self) -> None:
        """Drops the messages of this partition that the application has not received. Gives the consumer a receiver
        queue of its own, so that the shared queue stays open when this consumer ends."""
        self._drop_waiting()
        self._inbox = ReceiverQueue()

    def set_receiver_queue(self, inbox: ReceiverQueue) -> None:
        """Makes `inbox` the receiver queue from now on, and moves the messages of the former queue to it."""
        waiting, self._inbox = self._inbox.messages, inbox
        inbox.put(waiting)

    # ------------------------------------------------------------------------------ the beginning
    def make_opening_frame(self) -> dict[str, Any]:
        start = None if self._durable else self.deliveries.make_reader_start(self.core.reader_position())
        request = make_subscribe_frame(self.topic, self.subscription, self.name, self._instance, self._settings, start)
        request.incarnation = self.incarnation
        if self._starts_at_ms and (self._durable or self.core.last_taken is None):
            request.start_time_ms = self._starts_at_ms
            request.initial_position = wire.Subscribe.EARLIEST  # an older broker skips nothing
        return {"subscribe": request}

    async def open(self) -> None:
        """Subscribes at the broker of the partition, and returns when the broker has confirmed it. Raises a permanent
        error at once, and any other error, as an exception of the SDK, when the operation's deadline passes."""
        self._attachment.open()
        await self.requests.wait_state_changed()
        if self.core.error is not None:
            raise translate_error(self.core.error, by_slots=self._settings.consumer_type == ConsumerType.KeyShared)

    def on_opening_done(self, error: MagnetarError | None) -> None:
        if error is not None:
            self._finish(error)

    # ------------------------------------------------------------------------------ the end
    def abort(self) -> None:
        """Ends the consumer at once without informing the broker; acknowledgements that wait are not sent."""
        self._finish(AlreadyClosed(self._connections.why_closed))

    def on_failure(self, error: Exception) -> None:
        self._finish(translate_error(error))

    def _finish(self, error: MagnetarError) -> None:
        self._do(self.core.finish(error))

    def _close_with(self, error: PulsarException, *, topic_is_gone: bool) -> None:
        self._timer.stop()
        if self.debounce is not None:
            self._debounce_timer.stop()
        self._attachment.stop()
        self._attachment.close_at_broker()
        if self._hooks is not None:
            self._hooks.report_settling_ended(CLOSED)
        self._claim.release()
        self.deliveries.discard_waiting_entries()
        self.requests.notify_state_changed()
        self.in_transactions.fail_all(error)
        if topic_is_gone and self._on_gone is not None:
            self.discard_messages()
        if isinstance(error, AlreadyClosed):  # nothing of it could be acknowledged
            self._drop_waiting()
        self._inbox.close(error)
        if topic_is_gone and self._on_gone is not None:
            self._on_gone(self)

    async def close(self) -> None:
        """Sends the acknowledgements that wait, and closes the consumer at the broker. Returns when the broker has
        answered both, or after the operation time-out; an error of the broker is logged, not raised."""
        try:
            if self.core.state is PartitionClientState.CONNECTED and not self.requests.unsubscribed:
                async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                    await self.requests.send_last_acks()
                    await self._attachment.close()
        except (MagnetarError, TimeoutError) as error:
            _LOG.info("%s: the consumer did not leave in order: %s", self.topic, error)
        finally:  # also when it was interrupted
            self._finish(AlreadyClosed("the consumer is closed"))


def get_message_place(message: Message) -> MessagePlace:
    """Returns the place of the message in the log."""
    entry = message.entry
    return entry.ledger_id, entry.entry_id, message.batch_index


def _keyed(message: Message) -> KeyedMessage[Message]:
    """Returns the message with what decides whether it is superseded. One that cannot be read has no key."""
    key = message.partition_key() if type(message) is Message and message.fields.HasField("partition_key") else None
    return KeyedMessage(message, get_message_place(message), key, message.entry.published_ms)
