"""Deduplication: a model of producers, a broker that fails, and the log, judged by what stands in the log at the end.

Each seed is a run. A client keeps what has no answer and sends it again, in order, after each connection, as the SDK
does; a broker confirms a prefix of what it was given, fails the rest, dies at any moment, and its log may hold more
than it confirmed. Then: each (producer, sequence id) stands in the log once at most, and in order; what was called
stored (by receipt or as a duplicate) is there; and a snapshot is exactly the effect of the entries up to its position.
"""

import random
from collections import deque

import pytest
from pyroaring import BitMap64

from magnetar.broker.common.transactions import Settlement
from magnetar.broker.log.log_queue_core import SequenceRange
from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.topic.dedup import decode_piece, decode_snapshot, encode_snapshot
from magnetar.broker.topic.dedup_core import (
    NO_PROGRESS,
    SEQUENCE_GAP_BYTES_MAX,
    DedupCore,
    DedupSnapshot,
    DedupVerdict,
    ProducerSequenceProgress,
)
from magnetar.broker.topic.transactions_core import TopicTransactionsCore, TxnSnapshot
from magnetar.proto.names import Position
from magnetar.proto.states import TxnId

START = Position(1, -1)
STEPS = 300  # of a run
Entry = tuple[str, SequenceRange]


class Client:
    """One producer's name; `born` anew it goes on behind what the broker says it has."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self.rng = rng
        self.next_id = 0
        self.waiting: deque[SequenceRange] = deque()  # without an answer, oldest first
        self.unsent = 0  # of them, from the end
        self.connected = False
        self.stored: set[SequenceRange] = set()  # that it was told of

    def produce(self) -> None:
        if self.rng.random() < 0.3:
            uuid, chunks = f"{self.name}-{self.rng.random()}", self.rng.randint(2, 4)
            found = [SequenceRange(self.next_id, self.next_id, uuid, chunk, chunks) for chunk in range(chunks)]
            self.next_id += 1
        else:
            count = self.rng.randint(1, 3)
            found = [SequenceRange(self.next_id, self.next_id + count - 1)]
            self.next_id += count + (self.rng.random() < 0.1)  # an id may be left out
        self.waiting.extend(found)
        self.unsent += len(found)

    def born_again(self, last: int) -> None:
        self.waiting.clear()
        self.unsent, self.next_id = 0, last + 1


class Deployment:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log: list[Entry] = []  # what is durable: entry n stands at Position(1, n)
        self.confirmed = 0  # of them, by the broker that serves
        self.snapshot = DedupSnapshot(START, {})
        self.clients = [Client(f"p{number}", self.rng) for number in range(3)]
        self.now = self.rng.choice((0.0, 1e4, 1e8))  # the host has been up for so long
        self.dedup = DedupCore(self.snapshot, now=self.now)
        self.queue: deque[Entry] = deque()  # given to the log; the first `sent` of them may be in it already
        self.sent = 0
        self.verdicts: set[DedupVerdict] = set()

    # ------------------------------------------------------------------ what happens
    def connect(self) -> None:
        client = self.rng.choice(self.clients)
        if self.rng.random() < 0.2 or not client.connected:
            if self.rng.random() < 0.7 and not self.dedup.is_idle(client.name):
                return  # the opening waits; without the wait the verdict is UNKNOWN
            client.connected = True
            if self.rng.random() < 0.3 and self.dedup.is_idle(client.name):
                client.born_again(self.dedup.last_sequence_id(client.name))
            client.unsent = len(client.waiting)

    def produce(self) -> None:
        self.rng.choice(self.clients).produce()

    def publish(self) -> None:
        """The broker takes the next entry from a producer's stream."""
        client = self.rng.choice(self.clients)
        if not client.connected or not client.unsent:
            return
        numbers = client.waiting[-client.unsent]
        verdict = self.dedup.judge_duplicate(client.name, numbers)
        self.verdicts.add(verdict)
        if verdict is DedupVerdict.NEW:
            client.unsent -= 1
            self.queue.append((client.name, numbers))
        elif verdict is DedupVerdict.DUPLICATE:
            assert (client.name, numbers) in self.log[: self.confirmed], "a duplicate is in the log"
            self.answer(client, numbers)
        else:
            assert verdict is DedupVerdict.UNKNOWN, "a batch that is sent again is the same batch"
            client.connected = False

    def answer(self, client: Client, numbers: SequenceRange) -> None:
        """Answers come in the order of the publishes; one that is before others on their way waits for them."""
        while client.waiting and client.waiting[0] != numbers:
            return
        if client.waiting:
            client.unsent = min(client.unsent, len(client.waiting) - 1)
            client.waiting.popleft()
            client.stored.add(numbers)

    def send(self) -> None:
        """An entry reaches the bookies: it is in the log, whether or not anybody will hear of it."""
        if self.sent < len(self.queue):
            self.log.append(self.queue[self.sent])
            self.sent += 1

    def confirm(self) -> None:
        if self.sent:
            name, numbers = self.queue.popleft()
            self.sent -= 1
            self.dedup.on_publish_confirmed(name, numbers, Position(1, self.confirmed))
            self.confirmed += 1
            client = next(each for each in self.clients if each.name == name)
            if client.connected and self.rng.random() < 0.9:  # or the receipt is lost with the connection
                self.answer(client, numbers)
            else:
                client.connected = False

    def fail(self) -> None:
        """The tail of the queue is certainly not in the log: all of it."""
        if self.rng.random() < 0.2 and len(self.queue) > self.sent:
            while len(self.queue) > self.sent:
                name, _ = self.queue.pop()
                self.dedup.on_publish_failed(name)
                self.cut(name)

    def cut(self, name: str) -> None:
        for client in self.clients:
            if client.name == name:
                client.connected = False

    def store(self) -> None:
        self.snapshot = self.dedup.snapshot()
        assert self.snapshot.position == (1, self.confirmed - 1)
        assert self.snapshot.persisted == effects(self.log[: self.confirmed])

    def crash(self) -> None:
        """The broker dies, or another takes the topic over: recovery keeps what reached the bookies."""
        if self.rng.random() < 0.2:
            self.dedup = DedupCore(self.snapshot, now=self.now)
            for entry_id in range(self.snapshot.position.entry_id + 1, len(self.log)):
                self.dedup.on_publish_confirmed(*self.log[entry_id], Position(1, entry_id))
            self.confirmed, self.sent = len(self.log), 0
            self.queue.clear()
            for client in self.clients:
                client.connected = False

    def look(self) -> None:
        """Time passes, and those that are gone are forgotten; never so much of it that one of these is."""
        self.now += self.rng.random()
        self.dedup.expire_producers(self.now, inactive_s=STEPS + 1.0, producers_max=10)

    def step(self) -> None:
        steps = (self.produce, self.publish, self.publish, self.send, self.send, self.confirm, self.confirm,
                 self.connect, self.fail, self.store, self.crash, self.look)  # fmt: skip
        self.rng.choice(steps)()
        self.dedup.check()

    def drain(self) -> None:
        """Everything heals: every message gets its answer."""
        for _ in range(10_000):
            while self.queue:
                self.send()
                self.confirm()
            for client in self.clients:
                if not client.connected:
                    client.connected, client.unsent = True, len(client.waiting)
            self.publish()
            if not any(client.waiting for client in self.clients):
                return
        raise AssertionError("a message never gets its answer")


def effects(log: list[Entry]) -> dict[str, ProducerSequenceProgress]:
    found: dict[str, ProducerSequenceProgress] = {}
    for name, numbers in log:
        found[name] = found.get(name, NO_PROGRESS).extended_by(numbers)
    return found


@pytest.mark.parametrize("block", range(5))
def test_each_sequence_id_is_in_the_log_once_and_what_is_called_stored_is_there(block: int) -> None:
    seen: set[DedupVerdict] = set()
    for seed in range(block * 40, block * 40 + 40):
        deployment = Deployment(seed)
        for _ in range(STEPS):
            deployment.step()
        deployment.drain()
        assert len(set(deployment.log)) == len(deployment.log), f"seed {seed}: an entry stands twice in the log"
        for client in deployment.clients:
            mine = [numbers for name, numbers in deployment.log if name == client.name]
            done = [each for each in mine if not each.uuid or each.chunk == each.chunks - 1]
            firsts = [each.first for each in done]
            assert firsts == sorted(set(firsts)), f"seed {seed}: ids of {client.name} are out of order, or twice"
            assert client.stored <= set(mine), f"seed {seed}: something that was called stored is not in the log"
        seen |= deployment.verdicts
    assert seen >= {DedupVerdict.NEW, DedupVerdict.DUPLICATE, DedupVerdict.UNKNOWN}


def on() -> DedupCore:
    return DedupCore(DedupSnapshot(START, {}), now=0.0)


def test_a_failure_makes_what_was_pushed_new_again() -> None:
    dedup = on()
    assert [dedup.judge_duplicate("p", SequenceRange(id_, id_)) for id_ in range(3)] == [DedupVerdict.NEW] * 3
    dedup.on_publish_confirmed("p", SequenceRange(0, 0), Position(1, 0))
    dedup.on_publish_failed("p")
    assert dedup.judge_duplicate("p", SequenceRange(2, 2)) is DedupVerdict.UNKNOWN, "one is still on its way"
    dedup.on_publish_failed("p")
    assert [dedup.judge_duplicate("p", SequenceRange(id_, id_)) for id_ in range(3)] == [DedupVerdict.DUPLICATE,
        DedupVerdict.NEW, DedupVerdict.NEW]


def test_a_batch_that_is_stored_in_part_is_neither_stored_nor_new() -> None:
    """Called a duplicate, its second half would be lost."""
    dedup = on()
    dedup.judge_duplicate("p", SequenceRange(0, 9))
    dedup.on_publish_confirmed("p", SequenceRange(0, 9), Position(1, 0))
    assert dedup.judge_duplicate("p", SequenceRange(7, 12)) is DedupVerdict.OVERLAP
    assert dedup.judge_duplicate("p", SequenceRange(10, 12)) is DedupVerdict.NEW


def test_while_it_is_off_everything_is_new_and_turned_on_it_knows_who_is_connected() -> None:
    dedup = DedupCore(now=0.0)
    dedup.on_producer_joined("here")
    for entry_id, name in enumerate(["here", "gone", "here"]):
        assert dedup.judge_duplicate(name, SequenceRange(7, 7)) is DedupVerdict.NEW
        dedup.on_publish_confirmed(name, SequenceRange(7, 7), Position(1, entry_id))
    dedup.judge_duplicate("here", SequenceRange(8, 8))
    dedup.enable()
    assert dedup.judge_duplicate("here", SequenceRange(7, 7)) is DedupVerdict.DUPLICATE
    assert dedup.judge_duplicate("here", SequenceRange(8, 8)) is DedupVerdict.UNKNOWN
    assert dedup.judge_duplicate("gone", SequenceRange(3, 3)) is DedupVerdict.NEW
    dedup.check()


def test_who_has_been_gone_for_too_long_or_is_one_too_many_is_forgotten_and_who_is_connected_never() -> None:
    dedup = on()
    for number in range(5):
        dedup.on_producer_joined(f"p{number}")
        dedup.judge_duplicate(f"p{number}", SequenceRange(0, 0))
        dedup.on_publish_confirmed(f"p{number}", SequenceRange(0, 0), Position(1, number))
    for number in range(4):
        dedup.on_producer_left(f"p{number}", now=float(number))
    dedup.expire_producers(50.0, inactive_s=100.0, producers_max=3)
    assert set(dedup.snapshot().persisted) == {"p1", "p2", "p3", "p4"}
    dedup.expire_producers(102.5, inactive_s=100.0, producers_max=3)
    assert set(dedup.snapshot().persisted) == {"p3", "p4"}
    dedup.expire_producers(1e9, inactive_s=100.0, producers_max=0)
    assert set(dedup.snapshot().persisted) == {"p4"}
    assert dedup.forgotten == 4
    dedup.check()


@pytest.mark.parametrize("up_s", [0.0, 1e4, 1e8])
def test_a_producer_that_the_log_names_is_not_forgotten_because_the_host_has_been_up_for_long(up_s: float) -> None:
    """A broker dies before any snapshot, and another producer leaves before this one is back."""
    dedup = DedupCore(DedupSnapshot(START, {}), now=up_s)
    for entry_id, name in enumerate(("back", "away")):
        dedup.on_publish_confirmed(name, SequenceRange(7, 7), Position(1, entry_id))
    dedup.on_producer_joined("back")
    dedup.on_producer_left("back", up_s + 1.0)
    dedup.expire_producers(up_s + 1.0, inactive_s=100.0, producers_max=10)
    assert set(dedup.snapshot().persisted) == {"back", "away"}
    assert dedup.judge_duplicate("away", SequenceRange(7, 7)) is DedupVerdict.DUPLICATE
    dedup.expire_producers(up_s + 100.5, inactive_s=100.0, producers_max=10)
    assert set(dedup.snapshot().persisted) == {"back"}


# ------------------------------------------------------------------------------------------------------- chunks
def chunk_of(uuid: str, number: int, sequence_id: int = 7, chunks: int = 3) -> SequenceRange:
    return SequenceRange(sequence_id, sequence_id, uuid, number, chunks)


class Chunks:
    """Entries of one producer: each that is NEW is stored at once, unless `flies`."""

    def __init__(self) -> None:
        self.dedup, self.entries = on(), 0
        self.dedup.on_producer_joined("p")

    def send(self, *entries: SequenceRange, flies: bool = False) -> list[str]:
        found = []
        for each in entries:
            verdict = self.dedup.judge_duplicate("p", each)
            found.append(verdict.name)
            if verdict is DedupVerdict.NEW and not flies:
                self.store(each)
        self.dedup.check()
        return found

    def store(self, numbers: SequenceRange) -> None:
        self.dedup.on_publish_confirmed("p", numbers, Position(1, self.entries))
        self.entries += 1

    def crash(self) -> None:
        pieces = [decode_piece(each) for each in encode_snapshot(self.dedup.snapshot(), 1)]
        self.dedup = DedupCore(decode_snapshot(pieces), now=0.0)
        self.dedup.on_producer_joined("p")


def test_an_id_counts_only_if_every_chunk_of_its_message_is_in_the_log() -> None:
    log = Chunks()
    assert log.send(chunk_of("a", 2)) == ["UNORDERED"], "the first ones were refused"
    assert log.send(chunk_of("a", 0), chunk_of("a", 2)) == ["NEW", "UNORDERED"]
    assert log.dedup.last_sequence_id("p") == -1
    assert log.send(chunk_of("b", 1), chunk_of("b", 0), chunk_of("b", 2)) == ["UNORDERED", "NEW", "UNORDERED"]
    assert log.send(chunk_of("b", 1), chunk_of("b", 2)) == ["NEW", "NEW"]
    assert log.dedup.last_sequence_id("p") == 7
    assert log.send(chunk_of("c", 2)) == ["DUPLICATE"], "the message is in the log, by another attempt"


@pytest.mark.parametrize("crashes", [False, True])
def test_after_a_reconnect_chunks_go_on_where_the_log_ends(crashes: bool) -> None:
    """What has a receipt is not sent again, and of the rest a part may be in the log."""
    log = Chunks()
    assert log.send(chunk_of("a", 0), chunk_of("a", 1)) == ["NEW", "NEW"]
    if crashes:
        log.crash()
    assert log.send(chunk_of("a", 1), chunk_of("a", 2)) == ["DUPLICATE", "NEW"]
    assert log.dedup.last_sequence_id("p") == 7


def test_a_chunk_follows_one_that_is_on_its_way_and_none_that_failed() -> None:
    log = Chunks()
    assert log.send(chunk_of("a", 0), chunk_of("a", 1), flies=True) == ["NEW", "NEW"]
    log.store(chunk_of("a", 0))
    log.dedup.on_publish_failed("p")
    assert log.send(chunk_of("a", 2)) == ["UNORDERED"]
    assert log.send(chunk_of("a", 1), chunk_of("a", 2)) == ["NEW", "NEW"]


def test_chunks_of_several_messages_may_come_in_turn_and_none_counts_that_is_not_complete() -> None:
    log = Chunks()
    both = [chunk_of(uuid, number, 7 + (uuid == "b")) for number in range(3) for uuid in "ab"]
    assert log.send(*both) == ["NEW"] * 6
    assert log.dedup.last_sequence_id("p") == 8
    assert log.send(*both) == ["DUPLICATE"] * 6
    first, later = chunk_of("c", 0, 9), [chunk_of("d", number, 10) for number in range(3)]
    assert log.send(first, *later, SequenceRange(11, 11)) == ["NEW"] * 5
    assert log.send(chunk_of("c", 1, 9)) == ["UNORDERED"], "its receipt would be one for a message that is not there"
    assert log.send(first) == ["DUPLICATE"]


def test_a_commit_in_the_middle_of_a_message_in_chunks_changes_nothing_for_it() -> None:
    log = Chunks()
    assert log.send(chunk_of("a", 0)) == ["NEW"]
    log.dedup.on_transaction_committed({"p": ProducerSequenceProgress(5)})
    assert log.send(chunk_of("a", 1), chunk_of("a", 2)) == ["NEW", "NEW"]


def test_in_a_transaction_a_chunk_follows_one_of_the_same_transaction_and_an_abort_lets_all_come_again() -> None:
    shape = LogShape()
    span = shape.add(LedgerSpan(1, 0, open=True))
    dedup, core = on(), TopicTransactionsCore(shape, TxnSnapshot(START))
    for born in (1, 2):
        txn = TxnId.from_parts(1, 1, born)
        core.register_unresolved_transaction(txn)
        core.on_transaction_joined(txn)
        assert core.judge_duplicate(txn, "p", chunk_of("a", 1)) is DedupVerdict.UNORDERED
        for number in (0, 1) if born == 1 else range(3):
            assert dedup.judge_by_stored_entries("p", chunk_of("a", number)) is DedupVerdict.NEW
            assert core.judge_duplicate(txn, "p", chunk_of("a", number)) is DedupVerdict.NEW
            span.last_entry, span.end_index = span.last_entry + 1, span.end_index + 1
            position = Position(1, span.last_entry)
            core.on_publish_confirmed(txn, "p", chunk_of("a", number), position, position[1], 1, 10)
        end = core.settle(Settlement(txn, born == 2))
        dedup.on_transaction_committed(end.numbers, end.sent)
        dedup.add_aborted_sequence_gaps(end.back)
        if born == 1:
            assert dedup.judge_by_stored_entries("p", chunk_of("a", 2)) is DedupVerdict.NEW
            dedup.on_publish_confirmed("p", SequenceRange(8, 8), Position(1, 90))
            log = Chunks()
            log.dedup, log.entries = dedup, 91
            assert log.send(chunk_of("z", 1), chunk_of("z", 2)) == ["UNORDERED"] * 2, "its ids are a gap now"
    assert dedup.judge_duplicate("p", chunk_of("z", 2)) is DedupVerdict.DUPLICATE


# ------------------------------------------------------------------------------------- transactions of a producer
@pytest.mark.parametrize("seed", range(60))
def test_a_producer_in_many_transactions_at_once_stores_each_id_once_and_what_an_abort_takes_back_is_new(
    seed: int,
) -> None:
    """Any id at any time, against plain sets. With crashes: a snapshot, and the log after it."""
    rng, shape = random.Random(seed), LogShape()
    span = shape.add(LedgerSpan(1, 0, open=True))
    dedup, core = DedupCore(DedupSnapshot(START, {}), now=0.0), TopicTransactionsCore(shape, TxnSnapshot(START))
    log: list[tuple[int, TxnId | None]] = []
    open_: dict[TxnId, set[int]] = {}
    outcome: dict[TxnId, bool] = {}
    stored: set[int] = set()
    highest, born = -1, 0
    for _ in range(STEPS):
        act = rng.random()
        if act < 0.15 or not open_:
            born += 1
            txn = TxnId.from_parts(1, 1, born)
            core.register_unresolved_transaction(txn)
            core.on_transaction_joined(txn)
            open_[txn] = set()
        elif act < 0.3:
            txn = rng.choice(list(open_))
            outcome[txn] = committed = rng.random() < 0.5
            if committed:
                stored |= open_[txn]
            del open_[txn]
            end = core.settle(Settlement(txn, committed))
            dedup.on_transaction_committed(end.numbers, end.sent)
            dedup.add_aborted_sequence_gaps(end.back)
        elif act < 0.35:
            first = core.first_open_transaction_position
            snapshot, start = dedup.snapshot(), Position(1, first[1] - 1) if first is not None else dedup.position
            dedup = DedupCore(snapshot._replace(position=min(start, snapshot.position)), now=0.0)
            core = TopicTransactionsCore(shape, core.snapshot())
            for at in range(dedup.position[1] + 1, len(log)):
                number, of = log[at]
                numbers, position = SequenceRange(number, number), Position(1, at)
                aborted = of is not None and core.add_replayed_sequence_ids(of, "p", numbers, position)
                if of is None or outcome.get(of):
                    dedup.on_publish_confirmed("p", numbers, position)
                else:
                    dedup.on_uncommitted_entry_stored(position)
                if aborted:
                    dedup.add_aborted_sequence_gaps({"p": BitMap64([number])})
            for txn in open_:
                core.register_unresolved_transaction(txn)
                core.on_transaction_joined(txn)
        else:
            to = rng.choice([None, *open_])
            number = rng.randint(0, highest + 2)
            numbers = SequenceRange(number, number)
            holder = next((txn for txn, sent in open_.items() if number in sent and txn != to), None)
            assert core.find_other_transaction_of_sequence("p", to, numbers) == holder
            if holder is not None or (to is not None and number < max(open_[to], default=-1)):
                continue  # it waits; or goes back inside its transaction
            verdict = dedup.judge_duplicate("p", numbers) if to is None else dedup.judge_by_stored_entries("p", numbers)
            if to is not None and verdict is DedupVerdict.NEW:
                verdict = core.judge_duplicate(to, "p", numbers)
            known = number in stored or (to is not None and number in open_[to])
            if not known and number <= highest and number not in {n for n, of in log if of is not None}:
                assert verdict in (DedupVerdict.DUPLICATE, DedupVerdict.NEW)  # it was left out
                known = verdict is DedupVerdict.DUPLICATE
            assert verdict is (DedupVerdict.DUPLICATE if known else DedupVerdict.NEW), (number, to)
            if verdict is DedupVerdict.NEW:
                position = Position(1, len(log))
                log.append((number, to))
                span.last_entry, span.end_index = position[1], position[1] + 1
                if to is None:
                    dedup.on_publish_confirmed("p", numbers, position)
                    stored.add(number)
                else:
                    dedup.on_uncommitted_entry_stored(position)
                    core.on_publish_confirmed(to, "p", numbers, position, position[1], 1, 10)
                    open_[to].add(number)
                highest = max(highest, number)
        dedup.check()
        core.check()


def test_gaps_of_a_producer_are_bounded_and_the_highest_are_kept() -> None:
    dedup = DedupCore(DedupSnapshot(START, {"p": ProducerSequenceProgress(1_000_000)}), now=0.0)
    dedup.add_aborted_sequence_gaps({"p": BitMap64(range(400_000))})
    assert dedup.snapshot().gaps["p"] == BitMap64(range(400_000)), "a stretch takes a few bytes"
    for number in range(400_001, 420_000, 2):
        dedup.add_aborted_sequence_gaps({"p": BitMap64([number])})
    gaps = dedup.snapshot().gaps["p"]
    assert len(gaps.serialize()) <= SEQUENCE_GAP_BYTES_MAX
    assert gaps.max() == 419_999
    assert dedup.judge_by_stored_entries("p", SequenceRange(419_999, 419_999)) is DedupVerdict.NEW
    assert dedup.judge_by_stored_entries("p", SequenceRange(5, 5)) is DedupVerdict.DUPLICATE, "it counts as left out"
