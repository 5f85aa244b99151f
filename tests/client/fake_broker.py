"""A broker in memory that behaves (topics, cursors, permits, redelivery) and misbehaves on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap

from magnetar.broker.subscription.core.cursor_state import bit_indexes
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_broker_part, parse_header
from magnetar.proto.errors import ConsumerBusy, MagnetarError, NotAllowed, NotOwner, TopicNotFound, Unavailable, to_wire
from magnetar.proto.names import TopicName
from magnetar.proto.states import ENTRY_COST_BYTES
from magnetar.runtime.network import EndOfStream

LEDGER = 7
CREDIT_BYTES = 200_000
"""Of a producer: less than what many tests send at once."""


@dataclass
class Subscription:
    type: int
    next_entry: int
    acked: dict[int, set[int]] = field(default_factory=dict)  # entry → indexes; all: None stands in `done`
    done: set[int] = field(default_factory=set)
    redeliver: list[int] = field(default_factory=list)
    counts: dict[int, int] = field(default_factory=dict)
    consumers: list[FakeConsumer] = field(default_factory=list)


@dataclass
class FakeProducer:
    say: Callable[..., None]  # a frame to it
    topic: Topic
    credit: int


@dataclass
class FakeConsumer:
    say: Callable[..., None]
    topic: Topic
    subscription: Subscription
    subscribe: Any
    permits: int = 0
    unacked: dict[int, None] = field(default_factory=dict)


@dataclass
class Topic:
    name: str
    entries: list[bytes] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    messages: int = 0
    subscriptions: dict[str, Subscription] = field(default_factory=dict)

    def copy(self, at: int) -> None:
        self.entries.append(self.entries[at])
        self.headers.append(self.headers[at])


class FakeBroker:
    """`drop_after`: the stream breaks, without a receipt, when it got so many entries (each once).

    `silent`: entries are stored and no receipts are sent. `refuse`: what opening a producer or consumer raises.
    `ignores`: the kinds of frames that it reads and does nothing about.
    """

    def __init__(self, partitions: dict[str, int] | None = None) -> None:
        self.topics: dict[str, Topic] = {}
        self.partition_counts = partitions or {}
        self.drop_after: list[int] = []
        self.silent = False
        self.ignores: set[str] = set()
        self.max_message_size = 5 << 20
        self.refuse: list[MagnetarError] = []
        self.publish_errors: list[MagnetarError] = []
        self.received: list[tuple[int, int]] = []  # (sequence id, messages) of every entry that came, twice when resent
        self.before_again: Callable[[], object] = lambda: None  # before what nobody has seen comes again
        self.redeliveries = 0
        self.lookups = 0
        self.streams: list[Any] = []
        self.opened: list[Callable[[MagnetarError], None]] = []
        self.owner = ""
        self.owner_here = ""  # its address, as brokers tell it

    @property
    def services(self) -> list[tuple[str, object]]:
        return [("Broker", self)]

    def topic(self, name: str) -> Topic:
        return self.topics.setdefault(name, Topic(name))

    # ------------------------------------------------------------------------------ unary
    async def lookup(self, request: Any, context: Any) -> wire.LookupReply:
        self.lookups += 1
        return wire.LookupReply(owner=self.owner or self.owner_here, here=not self.owner)

    async def partitions(self, request: Any, context: Any) -> wire.PartitionsReply:
        name = TopicName.parse(request.topic)
        if name.local == "missing":
            raise TopicNotFound(f"{name} does not exist")
        return wire.PartitionsReply(partitions=self.partition_counts.get(name.local, 0))

    # ------------------------------------------------------------------------------ Connect
    async def connect(self, stream: Any, context: Any) -> None:
        self.streams.append(stream)
        owners: dict[int, FakeProducer | FakeConsumer] = {}
        last = 0
        try:
            while True:
                for frame in await stream.receive():
                    kind = frame.WhichOneof("kind")
                    if kind in self.ignores:
                        continue
                    if kind in ("open_producer", "subscribe"):
                        assert frame.id > last, "ids ascend"
                        last = frame.id
                        self._open(stream, frame, owners)
                    elif frame.id in owners:
                        owner = owners[frame.id]
                        if isinstance(owner, FakeProducer):
                            gone = self._of_producer(owner, kind, frame)
                        else:
                            gone = self._of_consumer(owner, kind, frame)
                        if gone:
                            self._forget(owners.pop(frame.id))
        except EndOfStream:
            pass
        finally:
            for owner in owners.values():
                self._forget(owner)

    def _open(self, stream: Any, frame: Any, owners: dict[int, FakeProducer | FakeConsumer]) -> None:
        def say(**kind: Any) -> None:
            stream.send_nowait(wire.ServerFrame(id=frame.id, **kind))

        def give_up(error: MagnetarError) -> None:
            if frame.id in owners:
                self._forget(owners.pop(frame.id))
                say(closed=to_wire(error))

        if self.refuse:
            say(closed=to_wire(self.refuse.pop(0)))
        elif frame.WhichOneof("kind") == "open_producer":
            name = frame.open_producer.producer_name or "named-by-broker"
            owners[frame.id] = FakeProducer(say, self.topic(frame.open_producer.topic), CREDIT_BYTES)
            self.opened.append(give_up)
            say(producer_opened=wire.ProducerOpened(
                producer_name=name, last_sequence_id=-1, max_message_size=self.max_message_size, credit=CREDIT_BYTES,
            ))  # fmt: skip
        elif (consumer := self._subscribe(say, frame.subscribe)) is not None:
            owners[frame.id] = consumer
            self.opened.append(give_up)

    def _forget(self, owner: FakeProducer | FakeConsumer) -> None:
        if isinstance(owner, FakeConsumer):
            subscription = owner.subscription
            subscription.consumers.remove(owner)
            subscription.redeliver = sorted({*subscription.redeliver, *owner.unacked})
            if not owner.subscribe.durable:
                owner.topic.subscriptions.pop(owner.subscribe.subscription, None)

    # ------------------------------------------------------------------------------ producers
    def _of_producer(self, producer: FakeProducer, kind: str, frame: Any) -> bool:
        """Whether it has left."""
        if kind == "close":
            producer.say(done=wire.Done(request_id=frame.close))
            return True
        assert kind == "publish", f"a producer said {kind}"
        assert producer.credit > 0, "a producer published without credit"
        entry = frame.publish
        producer.credit -= len(entry) + ENTRY_COST_BYTES
        header = parse_header(entry)
        self.received.append((header.sequence_id, header.num_messages))
        if self.drop_after:
            self.drop_after[0] -= 1
            if self.drop_after[0] <= 0:
                self.drop_after.pop(0)
                raise Unavailable("dropped on purpose")
        producer.credit += len(entry) + ENTRY_COST_BYTES
        producer.say(credit=len(entry) + ENTRY_COST_BYTES)
        if self.publish_errors:
            error = to_wire(self.publish_errors.pop(0))
            producer.say(failed=wire.PublishFailed(sequence_id=header.sequence_id, error=error))
            return False
        topic = producer.topic
        self.store(topic, entry, header)
        if not self.silent:
            producer.say(receipt=wire.Receipt(
                sequence_id=header.sequence_id, ledger_id=LEDGER, entry_id=len(topic.entries) - 1,
                index=topic.messages - 1,
            ))  # fmt: skip
        return False

    def store(self, topic: Topic, entry: bytes, header: Any) -> None:
        topic.messages += header.num_messages
        topic.entries.append(encode_broker_part(topic.messages - 1, 1000) + entry)
        topic.headers.append(header)
        for subscription in topic.subscriptions.values():
            self.dispatch(topic, subscription)

    # ------------------------------------------------------------------------------ consumers
    def _subscribe(self, say: Any, subscribe: Any) -> FakeConsumer | None:
        topic = self.topic(subscribe.topic)
        subscription = topic.subscriptions.get(subscribe.subscription)
        if subscription is None:
            subscription = Subscription(subscribe.type, self._initial(topic, subscribe))
            topic.subscriptions[subscribe.subscription] = subscription
        if subscribe.type not in (0, 1):
            say(closed=to_wire(NotAllowed("not there yet")))
            return None
        if subscription.consumers and subscription.type == 0:
            say(closed=to_wire(ConsumerBusy("exclusive")))
            return None
        consumer = FakeConsumer(say, topic, subscription, subscribe)
        subscription.consumers.append(consumer)
        subscription.redeliver = sorted({*subscription.redeliver, *self._unacked(subscription)})
        say(subscribed=wire.Subscribed(consumer_name=subscribe.consumer_name or "c"))
        return consumer

    def _unacked(self, subscription: Subscription) -> set[int]:
        held = {entry for consumer in subscription.consumers for entry in consumer.unacked}
        return {e for e in subscription.redeliver if e not in held}

    def _initial(self, topic: Topic, subscribe: Any) -> int:
        if subscribe.durable:
            return 0 if subscribe.initial_position == wire.Subscribe.EARLIEST else len(topic.entries)
        start = subscribe.start
        if (start.ledger_id, start.entry_id) == (-1, -1):
            return 0
        if start.ledger_id != LEDGER:
            return len(topic.entries)
        return start.entry_id + (0 if subscribe.start_inclusive else 1)

    def _of_consumer(self, me: FakeConsumer, kind: str, frame: Any) -> bool:
        """Whether it has left."""
        topic, subscription = me.topic, me.subscription
        if kind == "permits":
            me.permits += frame.permits
        elif kind == "ack":
            self._ack(subscription, frame.ack)
            if frame.ack.request_id:
                me.say(done=wire.Done(request_id=frame.ack.request_id))
        elif kind == "redeliver":
            self.redeliveries += 1
            if frame.redeliver.uncounted:
                self.before_again()
                self.dispatch(topic, subscription)
            sets = [BitMap.deserialize(each.entries) for each in frame.redeliver.ledgers]
            wanted = [entry_id for entries in sets for entry_id in entries] or list(me.unacked)
            subscription.redeliver = sorted({*subscription.redeliver, *(e for e in wanted if e in me.unacked)})
            for entry in wanted:
                me.unacked.pop(entry, None)
            if frame.redeliver.request_id:
                me.say(done=wire.Done(request_id=frame.redeliver.request_id))
        elif kind == "seek":
            self._seek(topic, subscription, frame.seek)
            me.say(done=wire.Done(request_id=frame.seek.request_id))
        elif kind == "last_message_id":
            me.say(last=self._last(topic, subscription, frame.last_message_id))
        elif kind in ("unsubscribe", "close"):
            if kind == "unsubscribe":
                topic.subscriptions.pop(me.subscribe.subscription, None)
            me.say(done=wire.Done(request_id=getattr(frame, kind)))
            if kind == "close":
                return True
        if kind == "redeliver" and frame.redeliver.uncounted:  # another one may come with it
            asyncio.get_running_loop().call_soon(self.dispatch, topic, subscription)
        else:
            self.dispatch(topic, subscription)
        return False

    def _ack(self, subscription: Subscription, ack: Any) -> None:
        for entry in ack.entries:
            if ack.kind == wire.Ack.CUMULATIVE:
                covered = range(entry.entry_id if entry.batch_indexes else entry.entry_id + 1)
                subscription.done.update(covered)
                if entry.batch_indexes:
                    subscription.acked.setdefault(entry.entry_id, set()).update(range(entry.batch_indexes[0] + 1))
            elif not entry.batch_bits:
                subscription.done.add(entry.entry_id)
            else:
                bits = int.from_bytes(entry.batch_bits, "little")
                subscription.acked.setdefault(entry.entry_id, set()).update(bit_indexes(bits))
        for ledger in ack.ledgers:
            subscription.done.update(BitMap.deserialize(ledger.entries))
        for consumer in subscription.consumers:
            for entry_id in list(consumer.unacked):
                if entry_id in subscription.done:
                    del consumer.unacked[entry_id]

    def _seek(self, topic: Topic, subscription: Subscription, seek: Any) -> None:
        subscription.acked.clear()
        subscription.done.clear()
        subscription.redeliver.clear()
        for consumer in subscription.consumers:
            consumer.unacked.clear()
        if seek.WhichOneof("to") == "publish_time_ms":
            later = [i for i, h in enumerate(topic.headers) if h.publish_time >= seek.publish_time_ms]
            subscription.next_entry = later[0] if later else len(topic.entries)
        elif seek.message_id.ledger_id < 0:
            subscription.next_entry = 0
        else:
            subscription.next_entry = min(seek.message_id.entry_id, len(topic.entries))
            if seek.message_id.batch_index > 0:
                subscription.acked[subscription.next_entry] = set(range(seek.message_id.batch_index))

    def _last(self, topic: Topic, subscription: Subscription, request_id: int) -> wire.LastMessageId:
        if not topic.entries:
            return wire.LastMessageId(
                request_id=request_id, id=wire.MessageId(ledger_id=-1, entry_id=-1, partition=-1, batch_index=-1),
                index=-1, mark_delete=wire.MessageId(ledger_id=LEDGER, entry_id=-1, partition=-1, batch_index=-1),
            )  # fmt: skip
        header = topic.headers[-1]
        batch = header.num_messages - 1 if header.batched else -1
        mark = min((e for e in range(len(topic.entries)) if e not in subscription.done), default=len(topic.entries))
        return wire.LastMessageId(
            request_id=request_id, index=topic.messages - 1, id=wire.MessageId(ledger_id=LEDGER,
            entry_id=len(topic.entries) - 1, partition=-1, batch_index=batch),
            mark_delete=wire.MessageId(ledger_id=LEDGER, entry_id=max(mark, subscription.next_entry) - 1, partition=-1,
            batch_index=-1),
        )  # fmt: skip

    def end_of(self, topic: Topic) -> int:
        return len(topic.entries)

    def is_hidden(self, topic: Topic, subscription: Subscription, entry_id: int) -> bool:
        return False

    def pending_of(self, topic: Topic, subscription: Subscription, entry_id: int) -> set[int]:
        """Batch indexes that are not delivered, besides those that are acknowledged."""
        return set()

    def dispatch(self, topic: Topic, subscription: Subscription) -> None:
        while True:
            ready = [c for c in subscription.consumers if c.permits > 0]
            if not ready:
                return
            if subscription.redeliver:
                entry_id, again = subscription.redeliver.pop(0), True
            elif subscription.next_entry < self.end_of(topic):
                entry_id, again = subscription.next_entry, False
                subscription.next_entry += 1
            else:
                return
            if entry_id in subscription.done or self.is_hidden(topic, subscription, entry_id):
                continue
            if again:
                subscription.counts[entry_id] = subscription.counts.get(entry_id, 0) + 1
            consumer = max(ready, key=lambda c: c.permits)
            acked = sorted({*subscription.acked.get(entry_id, ()), *self.pending_of(topic, subscription, entry_id)})
            consumer.permits -= topic.headers[entry_id].num_messages - len(acked)
            consumer.unacked[entry_id] = None
            delivery = wire.Delivery(
                ledger_id=LEDGER, entry_id=entry_id, entry=topic.entries[entry_id], acked_batch_indexes=acked,
                redelivery_count=subscription.counts.get(entry_id, 0),
            )  # fmt: skip
            consumer.say(delivery=delivery)

    def give_up(self, error: MagnetarError) -> None:
        """Tells every open producer and consumer that it is served no longer, as an unload does."""
        opened, self.opened = self.opened, []
        for give_up in opened:
            give_up(error)

    def reset_cursor(self, topic: str, subscription: str, entry_id: int = 0) -> None:
        """As an administrator does: the cursor moves, the consumers are disconnected."""
        found = self.topics[topic].subscriptions[subscription]
        found.acked.clear()
        found.done.clear()
        found.redeliver.clear()
        found.next_entry = entry_id
        for consumer in found.consumers:
            consumer.unacked.clear()
        self.cut()

    def cut(self) -> None:
        """Breaks every stream."""
        for stream in self.streams:
            stream.cancel()
        self.streams.clear()


__all__ = ["FakeBroker", "NotOwner", "asyncio"]
