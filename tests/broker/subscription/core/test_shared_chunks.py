"""Messages in chunks on a Shared subscription: the chunks of a message come together at one consumer, whichever of the
consumers have permits, and however often applications give the message back."""

import random
from collections.abc import Callable
from contextlib import nullcontext

from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.core.dispatch import Blocked, Dispatcher, ReadForRedelivery
from magnetar.broker.subscription.core.fair_shared import FairShared
from magnetar.broker.subscription.core.key_shared import Shared
from magnetar.broker.subscription.core.policy import Member, SubscriptionOptions
from magnetar.client.core.chunking import PartialMessage
from magnetar.client.core.consumer import ConsumerCore
from magnetar.client.core.effects import (
    AttachedConsumerOptions,
    ConsumerEffect,
    GrantPermits,
    RequestRedelivery,
    SendAcks,
)
from magnetar.client.core.failover import Backoff
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.names import Position
from tests.broker.subscription.core.shapes import Item, shape_of

LEDGER = 10
PARTED = (106, 107, 129, 195, 219, 263)
"""Seeds of walks in which one consumer has the first chunk, and another one had it before and has permits."""
DELIVERIES_MAX = 12
"""A chunk is delivered at most so often for each time that its message comes."""


def test_chunks_of_a_message_go_to_one_consumer_while_it_is_there_and_able() -> None:
    policy = Shared(SubscriptionOptions())
    members = [Member(number, f"c{number}", 0) for number in range(3)]
    for member in members:
        member.permits = 1000
        policy.add_member(member)
    outstanding = set[Position]()

    def pick(entry_id: int, uuid: str = "") -> Member:
        waited = Position(1, entry_id) in policy.waiting
        picked = policy.choose_member(Item(Position(1, entry_id), chunk_of=uuid), waited)
        assert isinstance(picked, Member)
        outstanding.add(Position(1, entry_id))
        policy.check(outstanding)
        return picked

    def returned(entry_id: int) -> None:
        outstanding.discard(Position(1, entry_id))
        policy.on_entry_returned(Position(1, entry_id))

    holder = pick(0, "u")
    assert {pick(number).id for number in range(1, 100)} == {0, 1, 2}
    assert [pick(number, "u") for number in range(100, 110)] == [holder] * 10
    holder.permits = 0
    assert pick(110, "u") is not holder, "nobody waits for it: that one gives the chunk back"
    holder.permits = 5
    returned(110)
    assert pick(110, "u") is holder
    for entry_id in (0, *range(100, 111)):
        returned(entry_id)
    holder.permits = 0
    other = pick(0, "u")
    assert other is not holder
    holder.permits = 5
    assert [pick(number, "u") for number in range(100, 105)] == [other] * 5, "that one has the first chunk now"


class Walk:
    """A dispatcher, and consumers of the SDK: each fails of each message so often, and gives it back as a whole. What
    was given back comes again after a back-off of the broker's or of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 100.0
        self.haste = rng.choice((0.5, 0.9, 1.0))
        self.log: list[tuple[Item, MessageMetadata]] = []
        for number in range(rng.randint(2, 9)):
            self.publish(number, of=rng.choice((1, 2, 3, 3)))
        shape = shape_of(len(self.log))
        policy = rng.choice((Shared, FairShared))(SubscriptionOptions())
        self.dispatcher = Dispatcher(shape, Cursor(shape, CursorState(shape.start_position)), policy)
        self.failures = {f"m{number}": rng.choice((0, 3, 6)) for number in range(9)}
        self.deliveries = dict.fromkeys((item.position for item, _ in self.log), 0)
        self.times = dict.fromkeys(self.failures, 1)
        self.coming: list[tuple[int, Position]] = []  # to a consumer, on their way
        self.queued: list[tuple[int, PartialMessage | Position]] = []  # at a consumer, before the application has it
        self.released: list[tuple[float, list[Position]]] = []
        self.members: list[Member] = []
        self.cores: list[ConsumerCore] = []
        for number in range(rng.choice((2, 2, 3))):
            self.join(number, queue_size=rng.choice((1, 2, 2, 5, 1000)))

    def publish(self, number: int, of: int) -> None:
        for chunk in range(of):
            uuid = f"m{number}" if of > 1 else ""
            metadata = MessageMetadata(
                producer_name=f"p{number}", sequence_id=number, publish_time=1, uuid=uuid, num_chunks_from_msg=of,
                total_chunk_msg_size=of, chunk_id=chunk,
            )  # fmt: skip
            item = Item(Position(LEDGER, len(self.log)), 1, 100, (1,), uuid, bool(uuid) and chunk < of - 1)
            self.log.append((item, metadata))

    def join(self, number: int, queue_size: int) -> None:
        options = AttachedConsumerOptions(nack_delay_ms=lambda _: 30, ordered=False, log_order=False)
        core = ConsumerCore(options, queue_size=queue_size, lock=nullcontext(), backoff=Backoff(self.rng))
        member = Member(number, f"c{number}")
        self.dispatcher.join(member)
        self.members.append(member)
        self.cores.append(core)
        self.do(number, core.on_opened())

    # ------------------------------------------------------------------ the broker
    def pump(self) -> None:
        while not isinstance(want := self.dispatcher.choose_next_read(), Blocked):
            places = want.positions if isinstance(want, ReadForRedelivery) else [
                item.position for item, _ in self.log if item.position >= want.position
            ]  # fmt: skip
            before = self.dispatcher.progress_marker
            deliveries = self.dispatcher.assign_entries([self.log[place.entry_id][0] for place in places])
            self.dispatcher.check()
            for member, entry, _, _ in deliveries:
                self.deliveries[entry.position] += 1
                self.coming.append((member.id, entry.position))
            if not deliveries and self.dispatcher.progress_marker == before:
                return

    def do(self, number: int, effects: list[ConsumerEffect]) -> None:
        member = self.members[number]
        for effect in effects:
            match effect:
                case GrantPermits(messages):
                    self.dispatcher.grant_permits(member, messages)
                case RequestRedelivery(entries, counted):
                    assert entries is not None
                    places = [Position(LEDGER, each) for each in entries[LEDGER]]
                    if counted and self.rng.random() < 0.8:
                        self.held_back([each for each in places if each in member.outstanding])
                    self.dispatcher.redeliver(member, places, counted=False)
                case SendAcks(group):
                    for each in group.whole.get(LEDGER, ()):
                        self.dispatcher.cursor.ack(Position(LEDGER, each))
                        self.dispatcher.on_acked(member, Position(LEDGER, each))

    def held_back(self, places: list[Position]) -> None:
        for place in places:
            self.dispatcher.held.add(place, None)
        self.released.append((self.now + self.rng.choice((0.05, 0.1)), places))

    # ------------------------------------------------------------------ the consumers
    def receive(self, number: int, place: Position) -> None:
        core, (item, metadata) = self.cores[number], self.log[place.entry_id]
        core.permits.count_received(1)
        begun = core.add_chunk(metadata, place, b"x", self.now) if item.chunk_of else None
        if begun is not None or not item.chunk_of:
            self.queued.append((number, begun or place))
        else:
            self.do(number, core.on_entries_dropped(1))
        self.do(number, core.take_effects(self.now))

    def take(self, number: int, what: PartialMessage | Position) -> None:
        """The application receives a message, and acknowledges it or fails."""
        core = self.cores[number]
        core.permits.count_used_permits(1, core.permits.stream)
        if not isinstance(what, PartialMessage):
            core.acknowledge(what, -1, 0)
            return
        uuid, last = what.metadata.uuid, next(reversed(what.places))
        if self.failures[uuid]:
            self.failures[uuid] -= 1
            self.times[uuid] += 1
            for place in core.chunks.on_redelivery_requested(last):
                core.negative_acknowledge(place, 0, self.now)
            return
        for place in core.chunks.take_chunk_positions(last):
            core.acknowledge(place, -1, 0)

    # ------------------------------------------------------------------ time
    def run(self) -> None:
        """Until all is acknowledged, or a chunk came more often than is enough."""
        while self.dispatcher.cursor.mark.entry_id < len(self.log) - 1:
            self.pump()
            self.step()
            for item, _ in self.log:
                times = self.times.get(item.chunk_of, 1)
                assert self.deliveries[item.position] <= DELIVERIES_MAX * times, f"{item.position} comes in vain"

    def step(self) -> None:
        if self.coming and self.rng.random() < self.haste:
            self.receive(*self.coming.pop(0))
            return
        if self.queued and self.rng.random() < self.haste:
            number, what = self.queued.pop(self.rng.randrange(len(self.queued)))
            self.take(number, what)
            self.do(number, self.cores[number].take_effects(self.now))
            return
        due = [at for core in self.cores if (at := core.next_timer_at) is not None]
        due += [at for at, _ in self.released]
        assert due or self.queued or self.coming, "chunks are neither on their way nor asked for"
        self.now = max(self.now + 0.001, self.now if self.coming or self.queued else min(due))
        for number, core in enumerate(self.cores):
            if (at := core.next_timer_at) is not None and at <= self.now:
                self.do(number, core.run_timers(self.now))
            core.check()
        for each in [each for each in self.released if each[0] <= self.now]:
            self.released.remove(each)
            for place in each[1]:
                self.dispatcher.held.discard(place)
            self.dispatcher.add_released_entries(each[1])


def test_a_message_in_chunks_that_is_given_back_comes_together_at_one_consumer_soon(
    walks: Callable[[int], range],
) -> None:
    for seed in (*PARTED, *walks(30)):
        Walk(seed).run()
