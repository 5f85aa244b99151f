"""The consumer's core against a broker that loses connections, answers late or refuses: thousands of steps.

The broker delivers entries in order while the consumer has permits, delivers again what was given back, and after a new
connection, or when another consumer was active meanwhile, all that is not acknowledged. Requests are done in the order
in which they come. What the application does, seeks, redeliveries and losses happen by chance, at any time.
"""

import random
from collections import deque
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
from pyroaring import BitMap

from magnetar.client.core.consumer import ConsumerCore
from magnetar.client.core.effects import (
    AnswerRequest,
    AttachedConsumerOptions,
    AttachToBroker,
    ConsumerEffect,
    DetachFromBroker,
    DropMessagesAfterFailure,
    DropQueuedMessages,
    EndWithError,
    GrantPermits,
    PartitionClientState,
    ReportSeekDone,
    RequestRedelivery,
    SendAcks,
    SendSeekRequest,
)
from magnetar.client.core.failover import Backoff
from magnetar.proto.errors import (
    ConnectionLost,
    MagnetarError,
    NotOwner,
    SubscriptionNotFound,
    TimedOut,
    TopicNotFound,
    Unauthorized,
)
from magnetar.proto.names import Position

LEDGER = 5


class Broker:
    """A subscription's cursor, and one connection."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of entries
        self.acked: dict[int, int] = {}  # entry → the bits of its messages
        self.read = 0
        self.again: list[int] = []
        self.held: set[int] = set()  # delivered and not acknowledged
        self.permits = 0
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.start = 0

    def is_whole(self, entry: int) -> bool:
        return self.acked.get(entry, 0) == (1 << self.sizes[entry]) - 1

    def charge(self, entry: int) -> int:
        return self.sizes[entry] - self.acked.get(entry, 0).bit_count()

    def disconnected(self) -> None:
        self.up.clear()
        self.down.clear()
        self.permits = 0
        self.again = sorted({*self.again, *self.held})
        self.held.clear()

    def depose(self) -> None:
        """Another consumer is active for a moment, and the broker takes all from this one."""
        self.again = sorted({*self.again, *self.held})
        self.held.clear()
        self.down.append(("inactive",))

    def seek(self, to: int) -> None:
        self.acked = dict.fromkeys(range(min(to, len(self.sizes))), 0)
        self.acked = {entry: (1 << self.sizes[entry]) - 1 for entry in self.acked}
        self.read = min(to, len(self.sizes))
        self.again.clear()
        self.held.clear()
        self.start = to  # also when the answer is lost

    def deliver(self) -> None:
        if self.permits <= 0:
            return
        while self.again or self.read < len(self.sizes):
            entry = self.again.pop(0) if self.again else self.read
            self.read = max(self.read, entry + 1)
            if self.is_whole(entry):
                continue
            self.permits -= self.charge(entry)
            self.held.add(entry)
            self.down.append(("entry", entry, self.acked.get(entry, 0), self.charge(entry)))
            return


class Waiting(NamedTuple):
    entry: int
    messages: list[int]
    permits: int
    connection: int
    seeks: int  # that were done before it came


class Walk:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.size = rng.choice([1, 3, 10, 100])
        self.options = AttachedConsumerOptions(
            ack_timeout_s=rng.choice([0.0, 10.0]), nack_delay_ms=lambda _: 1000, ends_with_topic=rng.random() < 0.2
        )
        self.core = ConsumerCore(self.options, queue_size=self.size, lock=nullcontext(), backoff=Backoff(rng))
        self.broker = Broker()
        self.connected = False
        self.connect_at: float | None = 0.0
        self.queue: deque[Waiting] = deque()
        self.hand: list[Waiting] = []  # another thread takes it at this moment
        self.seeks = 0
        self.taken: list[tuple[int, int]] = []  # messages that the application has, and neither acked nor gave back
        self.mine: set[tuple[int, int]] = set()  # messages that were acknowledged since the last seek
        self.up_to = -1  # … or by a cumulative ack: the entry
        self.shown: set[tuple[int, int]] = set()  # since the last seek
        self.acks: list[tuple[int, int]] = []  # all that was ever acknowledged
        self.asked: dict[int, int] = {}  # seek → acks that were made before it was asked for
        self.acks_before = 0  # … the one that the broker did last
        self.requests: dict[int, str] = {}
        self.answers: dict[int, MagnetarError | None] = {}
        self.finished: EndWithError | None = None

    # ------------------------------------------------------------------------------ effects
    def do(self, effects: list[ConsumerEffect]) -> None:
        for effect in effects:
            match effect:
                case DropQueuedMessages(give_back):
                    if self.queue and self.rng.random() < 0.3:
                        self.hand.append(self.queue.popleft())
                    freed = sum(each.permits for each in self.queue)
                    self.queue.clear()
                    if give_back and freed:
                        self.do(self.core.on_entries_dropped(freed))
                case AnswerRequest(request_id, error):
                    assert request_id not in self.answers, "a request gets one answer"
                    self.answers[request_id] = error
                case ReportSeekDone():
                    self.seeks += 1
                    self.shown.clear()
                    self.taken.clear()
                    self.mine.clear()
                    self.up_to = -1
                case AttachToBroker(after_s):
                    assert self.connect_at is None, "one attempt at a time"
                    self.connected, self.connect_at = False, self.now + after_s
                case DetachFromBroker():
                    self.connected = False
                    self.broker.disconnected()
                case EndWithError():
                    self.finished, self.connect_at, self.connected = effect, None, False
                    self.broker.disconnected()
                case GrantPermits() | SendAcks() | RequestRedelivery() | SendSeekRequest():
                    assert self.connected, "what is said is said over a connection"
                    if isinstance(effect, SendAcks):
                        self.check_acks(effect)
                    self.broker.up.append(effect)

    def check_acks(self, acks: SendAcks) -> None:
        """The application acknowledged each of them."""
        whole, parts, cumulative = acks.group
        for entries in whole.values():
            for entry in entries:
                assert all((entry, index) in self.mine for index in range(self.broker.sizes[entry]))
        for (_, entry), bits in parts.items():
            for index in range(bits.bit_length()):
                assert not bits >> index & 1 or (entry, index) in self.mine
        if cumulative is not None:
            assert cumulative[0].entry_id <= self.up_to

    # ------------------------------------------------------------------------------ the broker
    def grow(self) -> None:
        self.broker.sizes.append(self.rng.choice([1, 1, 2, 7]))

    def open(self) -> None:
        if self.connect_at is None or self.now < self.connect_at:
            return
        self.connect_at = None
        if self.rng.random() < 0.2:
            self.do(self.core.on_lost(self.rng.choice([ConnectionLost("no"), NotOwner("moved"), TimedOut("late")])))
        else:
            self.connected = True
            self.do(self.core.on_opened())

    def work(self) -> None:
        """The broker does one request."""
        broker = self.broker
        if not broker.up:
            return
        request = broker.up.popleft()
        match request:
            case GrantPermits(messages):
                broker.permits += messages
            case SendAcks(group, request_id):
                self.acknowledge(group)
                if request_id:
                    broker.down.append(("done", request_id, None))
            case RequestRedelivery(None):
                broker.again = sorted({*broker.again, *broker.held})
                broker.held.clear()
            case RequestRedelivery(entries) if entries is not None:
                asked = set(entries[LEDGER]) & broker.held
                broker.again = sorted({*broker.again, *asked})
                broker.held -= asked
            case SendSeekRequest(request_id, to):
                error = NotOwner("not now") if self.rng.random() < 0.2 else None
                if error is None:
                    broker.seek(to)
                    self.acks_before = self.asked.get(request_id, 0)
                broker.down.append(("done", request_id, error))

    def acknowledge(self, group: Any) -> None:
        broker = self.broker
        if group.cumulative is not None:
            (_, last), _ = group.cumulative
            for entry in range(last + 1):
                broker.acked[entry] = (1 << broker.sizes[entry]) - 1
        for entries in group.whole.values():
            for entry in entries:
                broker.acked[entry] = (1 << broker.sizes[entry]) - 1
        for (_, entry), bits in group.parts.items():
            broker.acked[entry] = broker.acked.get(entry, 0) | bits
        broker.held = {entry for entry in broker.held if not broker.is_whole(entry)}

    def deliver(self) -> None:
        if self.connected:
            self.broker.deliver()

    def receive(self) -> None:
        """The client reads one frame."""
        if not self.broker.down:
            return
        kind, *content = self.broker.down.popleft()
        if kind == "done":
            request_id, error = content
            self.do(self.core.on_answered(request_id, error))
            return
        if kind == "inactive":
            self.do(self.core.on_inactive())
            assert not self.queue, "the application gets nothing that another consumer has"
            return
        entry, gone, charge = content
        self.core.permits.count_received(charge)
        messages = [index for index in range(self.broker.sizes[entry]) if not gone >> index & 1]
        self.core.delivered += len(messages)
        self.queue.append(Waiting(entry, messages, charge, self.core.permits.stream, self.seeks))

    def lose(self) -> None:
        if self.connected and self.rng.random() < 0.3:
            self.connected = False
            self.broker.disconnected()
            self.do(self.core.on_lost(self.rng.choice([ConnectionLost("cut"), NotOwner("unloaded")])))

    def depose(self) -> None:
        if self.connected and self.rng.random() < 0.2:
            self.broker.depose()

    # ------------------------------------------------------------------------------ the application
    def take(self) -> None:
        if not self.queue:
            return
        entry, messages, permits, connection, seeks = self.queue.popleft()
        assert seeks == self.seeks, "what came before a seek is not shown after it"
        self.core.permits.count_used_permits(permits, connection)
        self.core.start_ack_timeout(Position(LEDGER, entry), self.now, 0.0)
        for index in messages:
            self.taken.append((entry, index))
            self.shown.add((entry, index))

    def take_late(self) -> None:
        """What another thread had in its hand when the rest was thrown away."""
        while self.hand:
            each = self.hand.pop()
            self.core.permits.count_used_permits(each.permits, each.connection)

    def ack(self) -> None:
        if not self.taken:
            return
        entry, index = self.taken.pop(self.rng.randrange(len(self.taken)))
        self.mine.add((entry, index))
        self.acks.append((entry, index))
        size = self.broker.sizes[entry]
        if self.rng.random() < 0.5:
            self.core.acknowledge_batch_indexes(Position(LEDGER, entry), 1 << index, 1, size)
        else:
            self.core.acknowledge(Position(LEDGER, entry), index, size)

    def ack_up_to(self) -> None:
        if not self.taken or self.rng.random() < 0.8:
            return
        entry, _ = self.rng.choice(self.taken)
        last = self.broker.sizes[entry] - 1
        self.up_to = max(self.up_to, entry)
        self.acks += [(each, index) for each in range(entry + 1) for index in range(self.broker.sizes[each])]
        self.taken = [each for each in self.taken if each[0] > entry]
        self.core.acknowledge_cumulative(Position(LEDGER, entry), last, last + 1)

    def give_back(self) -> None:
        if self.taken:
            entry, _ = self.taken.pop(self.rng.randrange(len(self.taken)))
            self.core.negative_acknowledge(Position(LEDGER, entry), 0, self.now)

    def redeliver(self) -> None:
        if self.rng.random() < 0.2:
            self.do(self.core.redeliver_all({}))

    def seek(self) -> None:
        if self.connected and self.rng.random() < 0.2:
            self.core.discard_unsent_acks()
            request_id = self.core.register_request()
            self.requests[request_id] = "seek"
            self.asked[request_id] = len(self.acks)
            self.do(self.core.seek(request_id, self.rng.randrange(len(self.broker.sizes) + 1)))

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.001, 0.05, 0.3, 2.0])
        due = self.core.next_timer_at
        if due is not None and due <= self.now:
            self.do(self.core.run_timers(self.now))

    def turn(self) -> None:
        self.do(self.core.take_effects(self.now))

    def resize(self) -> None:
        if self.connected and self.rng.random() < 0.05:
            self.size = max(self.size, self.rng.choice([1, 3, 10, 100]))
            self.do(self.core.resize_queue(self.size))

    # ------------------------------------------------------------------------------ the walk
    def run(self, steps: int) -> None:
        actions = [self.grow, self.open, self.work, self.work, self.work, self.deliver, self.deliver, self.deliver,
                   self.receive, self.receive, self.receive, self.take, self.take, self.ack, self.ack, self.take_late,
                   self.ack_up_to, self.give_back, self.redeliver, self.seek, self.pass_time, self.turn, self.turn,
                   self.lose, self.depose, self.resize]  # fmt: skip
        for _ in range(steps):
            self.rng.choice(actions)()
            self.check()

    def check(self) -> None:
        self.core.check()
        if not self.connected:
            return
        broker = self.broker
        granted = sum(each.messages for each in broker.up if isinstance(each, GrantPermits))
        coming = sum(each[3] for each in broker.down if each[0] == "entry")
        waiting = sum(each.permits for each in self.queue)
        over = 6  # an entry is never split: the last one may take more than is left
        assert broker.permits + granted + coming + waiting <= self.size + over, "permits never exceed the queue"

    def heal(self) -> None:
        """All is delivered and acknowledged."""
        for _ in range(20_000):
            while self.taken:
                self.ack()
            self.turn()
            self.now += 0.05
            due = self.core.next_timer_at
            if due is not None and due <= self.now:
                self.do(self.core.run_timers(self.now))
            self.open()
            while self.broker.up:
                self.work()
            self.deliver()
            while self.broker.down:
                self.receive()
            while self.queue:
                self.take()
            self.take_late()
            self.check()
            if self.connected and all(map(self.broker.is_whole, range(len(self.broker.sizes)))):
                return
        raise AssertionError("something is never delivered, or its acknowledgement never comes")


@pytest.mark.parametrize("seed", range(150))
def test_nothing_is_lost_skipped_or_acknowledged_unseen_whatever_happens(seed: int) -> None:
    walk = Walk(seed)
    walk.run(800)
    walk.heal()
    seen = walk.shown | set(walk.acks[walk.acks_before :])
    for entry in range(walk.broker.start, len(walk.broker.sizes)):
        for index in range(walk.broker.sizes[entry]):
            assert (entry, index) in seen, "each message after the last seek was shown"
    assert set(walk.requests) <= set(walk.answers), "each request has its answer"


@pytest.mark.parametrize("seed", range(40))
def test_a_consumer_that_ends_answers_every_request_and_says_why(seed: int) -> None:
    walk = Walk(1000 + seed)
    walk.run(300)
    error = walk.rng.choice([TopicNotFound("deleted"), SubscriptionNotFound("deleted"), Unauthorized("no")])
    alone = walk.options.ends_with_topic
    walk.connected = False
    walk.broker.disconnected()
    walk.connect_at = None
    walk.do(walk.core.on_lost(error))
    walk.core.check()
    assert set(walk.requests) <= set(walk.answers)
    if alone and isinstance(error, SubscriptionNotFound):
        assert walk.core.state is PartitionClientState.RECONNECTING, (
            "its topic may be deleted too, which the next attempt tells"
        )
    else:
        assert walk.finished is not None
        assert walk.finished.topic_is_gone == (alone and isinstance(error, TopicNotFound))
        assert walk.core.next_timer_at is None


def test_a_reader_that_was_sent_to_a_time_goes_there_again_before_it_gets_permits() -> None:
    walk = Walk(0)
    walk.options = AttachedConsumerOptions(durable=False)
    walk.core = ConsumerCore(walk.options, queue_size=10, lock=nullcontext(), backoff=Backoff(walk.rng))
    walk.connected, walk.connect_at = True, None
    walk.do(walk.core.on_opened())
    request_id = walk.core.register_request()
    walk.do(walk.core.seek(request_id, 0))
    walk.do(walk.core.on_answered(request_id, None))
    walk.connected = False
    walk.broker.disconnected()
    walk.do(walk.core.on_lost(ConnectionLost("cut")))
    walk.connected = True
    walk.do(walk.core.on_opened())
    assert [type(each) for each in walk.broker.up] == [SendSeekRequest]
    again = walk.broker.up[0].request_id
    walk.do(walk.core.on_answered(again, None))
    assert [type(each) for each in walk.broker.up] == [SendSeekRequest, GrantPermits]
    assert walk.broker.up[1].messages == 10


def test_acks_that_were_made_without_a_connection_are_sent_over_the_next_one() -> None:
    walk = Walk(0)
    walk.connect_at = None
    walk.connected = True
    walk.do(walk.core.on_opened())
    walk.grow()
    walk.core.permits.count_received(walk.broker.sizes[0])
    walk.mine |= {(0, index) for index in range(7)}
    walk.core.acknowledge(Position(LEDGER, 0), -1, 0)
    walk.turn()
    walk.broker.up.clear()
    walk.connected = False
    walk.broker.disconnected()
    walk.do(walk.core.on_lost(ConnectionLost("cut")))
    walk.now += 5.0
    walk.do(walk.core.run_timers(walk.now))
    assert not walk.broker.up
    walk.connected = True
    walk.do(walk.core.on_opened())
    assert [type(each) for each in walk.broker.up] == [SendAcks, GrantPermits]


def test_what_was_given_back_before_a_seek_is_not_asked_for_after_it() -> None:
    """It comes again by the seek; asked for once more it would come while the application has it."""
    walk = Walk(1)
    core = walk.core = ConsumerCore(
        AttachedConsumerOptions(ordered=False, log_order=False, ack_timeout_s=0.0, nack_delay_ms=lambda _: 100),
        queue_size=10, lock=nullcontext(), backoff=Backoff(walk.rng),
    )  # fmt: skip
    core.on_opened()
    core.negative_acknowledge(Position(LEDGER, 3), 0, now=1.0)
    assert core.next_timer_at is not None
    request = core.register_request()
    core.seek(request, None)
    core.on_answered(request, None)
    assert core.next_timer_at is None
    assert not [each for each in core.run_timers(60.0) if isinstance(each, RequestRedelivery)]
    core.check()


def test_what_failed_behind_a_dead_letter_of_its_batch_waits_for_its_acknowledgement() -> None:
    """The broker would count it in the place of that one."""
    walk, batch, other = Walk(1), Position(LEDGER, 3), Position(LEDGER, 5)
    core = walk.core = ConsumerCore(
        AttachedConsumerOptions(log_order=False, failure_blocks=True),
        queue_size=10,
        lock=nullcontext(),
        backoff=Backoff(walk.rng),
    )
    core.on_opened()
    core.moving_bits[batch] = 0b01
    core.negative_acknowledge(batch, 0, now=1.0)
    core.negative_acknowledge(other, 0, now=1.0)
    dropped, asked = core.take_effects(1.0)
    assert isinstance(dropped, DropMessagesAfterFailure)
    assert {*dropped.failed} == {batch, other}, "nothing that follows it is given out meanwhile"
    assert isinstance(asked, RequestRedelivery)
    assert asked.entries == {LEDGER: BitMap([5])}
    assert {*core.failed_positions()} == {batch, other}
    core.acknowledge_batch_indexes(batch, 0b10, 1, 2)
    assert not [each for each in core.take_effects(1.0) if isinstance(each, RequestRedelivery)], (
        "another one's acknowledgement"
    )
    assert core.failed
    core.acknowledge_batch_indexes(batch, 0b01, 1, 2)
    acks, again = [each for each in core.take_effects(1.0) if isinstance(each, SendAcks | RequestRedelivery)]
    assert isinstance(acks, SendAcks)
    assert isinstance(again, RequestRedelivery)
    assert again.entries == {LEDGER: BitMap([3])}
    assert not core.moving_bits
