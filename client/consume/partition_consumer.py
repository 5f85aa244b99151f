"""One partition's consumer: the driver of client/core/consumer.py, which decides.

Each fact is given to the core, and each of its effects is done at once, in order. Entries are taken apart when they
come (client/consume/deliveries.py) and their messages are put into the `inbox`, which several partitions may share.
`acknowledge`, `negative_acknowledge` and `taken` may be called from any thread; all else belongs to the event loop.
What fails here unforeseen finishes the consumer, and every waiter gets that error (client/common/guard.py). Guards:
tests/client/consume/test_partition_consumer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any

from pyroaring import BitMap

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, MagnetarError, from_wire
from ...proto.names import Position, TopicName
from ..common.errors import (
    AlreadyClosed,
    OperationNotSupported,
    PulsarException,
    translate,
)
from ..common.guard import run
from ..common.receive_memory import Claim
from ..connect.attachment import CLOSE, Attachment
from ..connect.connections import Connections
from ..connect.handshake import subscribe
from ..core.consumer import ConsumerCore
from ..core.effects import Answer, Connect, ConsumerEffect, Drop, Finished, Leave, Sought
from ..core.redelivery import EntrySets
from ..core.state import State
from ..model.message import DamagedMessage, Message
from ..model.message_id import MessageId
from ..model.schema import Schema
from ..model.settings import ConsumerSettings, ConsumerType
from ..model.start import Start
from .acknowledgements import AckSender, Pending, options_of, place_of
from .dead_letters import DeadLetterProducer
from .deliveries import Deliveries
from .frames import acks_of, frames_of
from .receiver_queue import ReceiverQueue
from .requests import Requests

_LOG = logging.getLogger("magnetar.client")


class PartitionConsumer:
    def __init__(
        self, connections: Connections, topic: TopicName, subscription: str, settings: ConsumerSettings,
        inbox: ReceiverQueue,
        *, queue_size: int, start: Start | None = None, letters: DeadLetterProducer | None = None,
        on_gone: Callable[[PartitionConsumer], None] | None = None,
    ) -> None:  # fmt: skip
        """`on_gone`: called when its topic is deleted; without it the receiver gets an error."""
        self.topic = topic
        self.schema: Schema = settings.schema
        self.name = settings.consumer_name or ""
        self.end_of_topic = False
        self.compacted_end_index = 0  # reading compacted: messages in front of it may have been removed
        self.letters = letters
        self.on_connected: Callable[[PartitionConsumer], None] | None = None
        self.active = settings.consumer_type is not ConsumerType.Failover  # until the broker says so
        self.on_active: Callable[[int, bool], None] | None = None
        self._on_gone = on_gone
        self._connections = connections
        self._subscription = subscription
        self._settings = settings
        self._inbox = inbox
        self._instance = connections.world.rng.randbytes(8).hex()  # our next connection replaces our last one
        self._loop = asyncio.get_running_loop()
        self._now = connections.world.clock.monotonic
        self._claim = Claim(connections.memory, queue_size)
        dead_after = letters.policy.max_redeliver_count if letters is not None else None
        options = options_of(settings, durable=start is None, dead_after=dead_after, alone=on_gone is not None)
        self._core = ConsumerCore(
            options, queue_size=self._claim.window, lock=Lock(), backoff=connections.backoff()
        )
        self._acking = AckSender(settings, self._core, self._wake)
        self._deliveries = Deliveries(self, settings, self._core, self._now, letters, start)
        self._attachment = Attachment(connections, self)
        self._wakes = connections.wakes
        self._woken = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._requests = Requests(connections, self._core)
        self._durable = start is None
        self._unsubscribed = False

    # ------------------------------------------------------------------------------ from any thread
    def taken(self, message: Message) -> None:
        """The last message of an entry (with ack time-outs: any message) was taken from the inbox."""
        wake = self._core.taken(message.entry.stream, message.permits)
        message.permits = -message.permits  # given, and still the last of its entry
        if self._acking.times_out:
            self._acking.taken(message)
            wake = True
        if wake:
            self._wake()
        if isinstance(message, DamagedMessage):
            raise message.error()

    def interrupted(self) -> None:
        """Ctrl-C came into `taken`, anywhere: what it left is attended to."""
        self._woken = False
        self._wake()

    def acknowledge(self, which: Pending) -> None:
        self._acking.acknowledge(which)

    def acknowledge_received(self, message: Message) -> None:
        """The same of a message of ours, each of which comes here; raises what ended the consumer."""
        if self._core.error is not None:
            self.raise_if_closed()
        if message.entry.chunks:
            self._acking.acknowledge(message)
        else:
            self._acking.acknowledge_entry(message)

    def acknowledge_read(self, message: Message) -> None:
        """A reader took the last message of an entry: its cursor may go on. It is grouped like any ack."""
        entry = message.entry
        self.acknowledge(MessageId(-1, entry.ledger_id, entry.entry_id, _chunks=entry.chunks))

    def negative_acknowledge(self, which: Pending) -> None:
        self._acking.negative_acknowledge(which)

    def raise_if_closed(self) -> None:
        self._requests.raise_if_closed()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._wakes.call(self._turn, self.broke)

    # ------------------------------------------------------------------------------ facts of it
    @property
    def state(self) -> State:
        return self._core.state

    @property
    def delivered(self) -> int:
        return self._core.delivered

    @property
    def start(self) -> Start | None:
        """Where delivery began; None: at a place that only the broker knows."""
        return self._deliveries.start

    @property
    def last_taken(self) -> MessageId | None:
        """Readers only."""
        last: MessageId | None = self._core.last_taken
        return last

    @last_taken.setter
    def last_taken(self, last: MessageId) -> None:
        self._core.last_taken = last

    # ------------------------------------------------------------------------------ facts in
    def _turn(self) -> None:
        self._woken = False
        now = self._now()
        self._acking.gather(now)
        self._do(self._core.turn(now))

    def _time_passed(self) -> None:
        self._timer = None
        now = max(self._now(), self._timer_at)  # the loop rounds its timers: this one may be early
        self._acking.gather(now)
        self._do(self._core.time_passed(now))

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None:
        """The messages of all of them are put into the inbox at once: a waiter for one is woken once."""
        deliveries, opened = self._deliveries, self._deliveries.open
        came: list[Message] = []
        came_bytes = came_messages = 0
        for frame in frames:
            kind = frame.WhichOneof("kind")
            if kind == "deliveries":
                several = frame.deliveries
                ledger_id = several.ledger_id
                for entry_id, entry in zip(several.entry_ids, several.entries, strict=True):
                    came_bytes += len(entry)
                    came += opened(entry, Position(ledger_id, entry_id))
            elif kind == "delivery":
                one = frame.delivery
                entry = one.entry  # protobuf makes a copy of it
                came_bytes += len(entry)
                position = Position(one.ledger_id, one.entry_id)
                came += opened(entry, position, one.redelivery_count, one.acked_batch_indexes)
            else:
                came_messages += deliveries.charged
                self._put(came)
                came = []
                self._rare(kind, frame)
        came_messages += deliveries.charged
        self._put(came)
        if came_messages:
            permits = self._core.permits
            if self._claim.came(came_bytes, came_messages, permits.at_broker + permits.held):
                self._do(self._core.resize(self._claim.window))

    def _put(self, came: list[Message]) -> None:
        deliveries = self._deliveries
        if not deliveries.charged:
            return
        self._core.charged(deliveries.charged)
        hidden, deliveries.charged, deliveries.hidden = deliveries.hidden, 0, 0
        if came:
            self._inbox.put(came)
        if hidden:
            self._do(self._core.dropped(hidden))
        self._arm()

    def _rare(self, kind: str | None, frame: wire.ServerFrame) -> None:
        match kind:
            case "done" if frame.done.request_id == CLOSE:
                self._attachment.done()
            case "done":
                done = frame.done
                error = from_wire(done.error) if done.HasField("error") else None
                self._do(self._core.answered(done.request_id, error))
            case "last":
                self._do(self._core.answered(frame.last.request_id, None, frame.last))
            case "subscribed":
                self.name = frame.subscribed.consumer_name or self.name
                self.compacted_end_index = frame.subscribed.compacted_end_index
                self._attachment.opened()
                self._acking.gather(self._now())
                self._do(self._core.opened())
                self._requests.tell_change()
                if self.on_connected is not None:
                    self.on_connected(self)
            case "closed":
                self._attachment.closed(from_wire(frame.closed))
            case "end_of_topic":
                self.end_of_topic = True
            case "active":
                self.active = frame.active
                if self.on_active is not None:
                    self.on_active(self.topic.partition, frame.active)
            case _:
                self._attachment.leave()
                self._attachment.lost(ConnectionLost(f"the broker said {kind} out of turn"))

    def on_lost(self, error: MagnetarError) -> None:
        if self.state is not State.CLOSED:
            _LOG.info("%s: the consumer lost its connection: %s", self.topic, error)
        self._do(self._core.lost(error))

    # ------------------------------------------------------------------------------ effects
    def _do(self, effects: list[ConsumerEffect]) -> None:
        for effect in effects:
            match effect:
                case Drop(give_back):
                    freed = self._inbox.drop(lambda message: message.entry.consumer is self)
                    if give_back and freed:
                        self._do(self._core.dropped(freed))
                case Answer(request_id, error, result):
                    self._requests.answer(request_id, error, result)
                case Sought(to):
                    self._sought(to)
                case Connect(after_s):
                    self._attachment.reopen(after_s)
                case Leave():
                    self._attachment.leave()
                case Finished(error, topic_is_gone):
                    self._end(translate(error), topic_is_gone=topic_is_gone)
                case _:
                    inclusive = self._settings.start_message_id_inclusive
                    for kind in frames_of(effect, durable=self._durable, inclusive=inclusive):
                        self._attachment.send(**kind)
        self._arm()

    def _arm(self) -> None:
        due = self._core.due
        if due is not None and (self._timer is None or due < self._timer_at):
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_later(max(0.0, due - self._now()), run, self._time_passed, self.broke)

    def _sought(self, to: MessageId | int) -> None:
        self._acking.forget()
        if not self._durable and isinstance(to, MessageId):
            everywhere = to in (MessageId.earliest, MessageId.latest)
            self._deliveries.start = Start(to, self._settings.start_message_id_inclusive and not everywhere)
        else:
            self._deliveries.start = None

    # ------------------------------------------------------------------------------ in the loop
    def acknowledge_cumulative(self, which: Pending) -> None:
        self._acking.gather(self._now())
        self._core.acknowledge_cumulative(*place_of(which))
        self._turn()

    async def acknowledge_durably(self, which: Iterable[Pending], *, cumulative: bool = False) -> None:
        """Returns when it survives a crash of all processes; sent again over the next connection when this one
        breaks."""
        every = [each for one in which for each in self._acking.with_chunks(one)]
        if cumulative:
            for each in every:
                place = place_of(each)[0]
                if not self._core.covers(place):
                    raise OperationNotSupported(
                        f"a message in chunks begins before {place} and is not acknowledged yet: acknowledge that first"
                    )
        self._acking.gather(self._now())
        for ack in acks_of(self._acking.take_over(every, cumulative=cumulative)):

            def request(request_id: int, ack: wire.Ack = ack) -> None:
                ack.request_id = request_id
                self._attachment.send(ack=ack)

            await self._requests.ask(request)

    def redeliver_unacknowledged(self) -> None:
        """What was delivered and not acknowledged comes again; what waits here is thrown away."""
        self._acking.gather(self._now())
        self._do(self._core.redeliver_all(self._untouched()))

    def _untouched(self) -> EntrySets:
        """Entries that wait here whole: the application has seen nothing of them; they do not count as given back."""
        found: EntrySets = {}
        for message in self._inbox.messages.copy():
            entry = message.entry
            if entry.consumer is self and message.batch_index == entry.first_index:
                found.setdefault(entry.ledger_id, BitMap()).add(entry.entry_id)
        return found

    def resize(self, queue_size: int) -> None:
        """Its share of the room that all partitions have together."""
        self._claim.want(queue_size)
        self._do(self._core.resize(self._claim.window))

    def retire(self) -> None:
        """What it delivered and the application did not take is thrown away; its end is not told to the others."""
        self._inbox.drop(lambda message: message.entry.consumer is self)
        self._inbox = ReceiverQueue()

    def deliver_to(self, inbox: ReceiverQueue) -> None:
        """From now on; what waits goes there too."""
        waiting, self._inbox = self._inbox.messages, inbox
        inbox.put(waiting)

    # ------------------------------------------------------------------------------ requests
    async def last_message_id(self) -> wire.LastMessageId:
        reply: wire.LastMessageId = await self._requests.ask(lambda id_: self._attachment.send(last_message_id=id_))
        return reply

    async def seek(self, to: MessageId | int) -> None:
        """Everything that was delivered before is forgotten; what comes next is from there."""
        self._acking.forget()
        self._core.forget_acknowledged()
        await self._requests.ask(lambda id_: self._do(self._core.seek(id_, to)))

    async def unsubscribe(self) -> None:
        await self._requests.ask(lambda id_: self._attachment.send(unsubscribe=id_))
        self._unsubscribed = True  # there is nothing left to leave

    # ------------------------------------------------------------------------------ the beginning
    def first_frame(self) -> dict[str, Any]:
        start = None if self._durable else self._start_again()
        request = subscribe(self.topic, self._subscription, self.name, self._instance, self._settings, start)
        return {"subscribe": request}

    def _start_again(self) -> Start:
        """A reader goes on after what it read."""
        taken, begun = self._core.place()
        if taken is not None:
            self._deliveries.start = Start(taken, False, begun)
        return self._deliveries.start or Start(MessageId.latest, False)

    async def open(self) -> None:
        """Raises when it cannot subscribe: at once for good reasons, else at the operation's deadline."""
        self._attachment.open()
        await self._requests.changed()
        if self._core.error is not None:
            raise translate(self._core.error)

    def on_open(self, error: MagnetarError | None) -> None:
        if error is not None:
            self._finish(error)

    # ------------------------------------------------------------------------------ the end
    def abort(self) -> None:
        """Ends at once, without a word to the broker: acks that wait are not sent."""
        self._finish(AlreadyClosed("the client was shut down"))

    def broke(self, error: Exception) -> None:
        self._finish(translate(error))

    def _finish(self, error: MagnetarError) -> None:
        self._do(self._core.finish(error))

    def _end(self, error: PulsarException, *, topic_is_gone: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._attachment.stop()
        self._attachment.leave()
        self._claim.leave()
        self._requests.tell_change()
        if topic_is_gone and self._on_gone is not None:
            self.retire()
        self._inbox.end(error)
        if topic_is_gone and self._on_gone is not None:
            self._on_gone(self)

    async def close(self) -> None:
        """Sends the acks that wait and leaves in order: when this returns the broker has them and forgot us."""
        try:
            if self.state is State.CONNECTED and not self._unsubscribed:
                async with asyncio.timeout(self._connections.settings.operation_timeout_s):
                    await self._leave()
        except (MagnetarError, TimeoutError) as error:
            _LOG.info("%s: the consumer did not leave in order: %s", self.topic, error)
        finally:  # also when it was interrupted
            self._finish(AlreadyClosed("the consumer is closed"))

    async def _leave(self) -> None:
        self._acking.gather(self._now())
        request_id, effects = self._core.last_acks()
        if request_id:
            acked = self._requests.expect(request_id)
            self._do(effects)
            await acked
        await self._attachment.close()

    def check(self) -> None:
        self._core.check()
