"""The producer's core against a broker that loses connections, answers late or never, and refuses: thousands of steps.

The broker stores what comes over a connection in order, answers in order, and forgets a connection's rest when the next
one is opened. Everything else happens by chance, at any time. In a third of the walks it also tells of first copies, of
some entries and in order, also of entries that it then cannot store.
"""

import random
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from magnetar.client.core import batcher as batcher_core
from magnetar.client.core import chunking as chunking_core
from magnetar.client.core.batcher import OutgoingMessage
from magnetar.client.core.effects import (
    AttachedProducerOptions,
    AttachToBroker,
    DetachFromBroker,
    EndFlushes,
    EndWithError,
    LogWarning,
    MessageAddResult,
    PartitionClientState,
    ProducerEffect,
    ReportOutcome,
    ReportSent,
    SendEntry,
)
from magnetar.client.core.failover import Backoff
from magnetar.client.core.producer import ProducerCore
from magnetar.proto.entry import EntryEncoding, decode_batch, parse_header
from magnetar.proto.errors import (
    ConnectionLost,
    MagnetarError,
    MessageTooLarge,
    NotEnoughBookies,
    NotOwner,
    ProducerFenced,
    TimedOut,
)
from magnetar.proto.states import ENTRY_COST_BYTES
from tests.compiled import replaces_code

LEDGER = 3
FIRST_COPY = -2
"""The entry id of a message that was reported with a first copy: in this file alone."""


class Connection:
    """What is on its way, both ways."""

    def __init__(self, credit: int) -> None:
        self.up: deque[bytes] = deque()
        self.down: deque[tuple[str, Any]] = deque()
        self.refuses = False  # an entry could not be stored: nor is what follows it
        self.credit = credit  # as the client may count it, with what it published taken off


class Walk:
    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        batching = rng.random() < 0.6
        self.options = AttachedProducerOptions(
            batching=batching,
            batch_messages_max=rng.choice([1, 3, 1000]),
            batch_bytes_max=rng.choice([50, 1000]),
            batch_delay_s=0.01,
            key_based=batching and rng.random() < 0.3,
            batch_by=("tag",) if batching and rng.random() < 0.2 else (),
            send_timeout_s=rng.choice([0.0, 2.0, 30.0]),
            chunking=not batching and rng.random() < 0.5,
            reports_first_copy=seed % 3 == 0,
        )
        self.core = ProducerCore(
            "p", self.options, max_pending=rng.choice([5, 50, 500]), lock=nullcontext(), backoff=Backoff(rng), uuid="u"
        )
        self.late = rng.random() < 0.2
        if self.late:
            self.core.open_at_first_message()
        self.connection: Connection | None = None
        self.connect_at: float | None = None if self.late else 0.0
        self.log: list[list[int]] = []  # entry → its messages; a chunk that is not its message's last has none
        self.chunks: dict[str, list[bytes]] = {}
        self.refused: set[int] = set()  # for good: each time that they come
        self.added = 0
        self.keyed = False
        self.outcomes: dict[int, tuple[MagnetarError | None, int]] = {}
        self.flushes: dict[int, int] = {}  # number → messages that were added before
        self.flushed: set[int] = set()
        self.finished: MagnetarError | None = None
        self.told = 0
        self.provisional: list[int] = []  # messages that were reported with a first copy
        self.failed_later = 0  # … and then failed
        if not self.late:
            self.open()  # messages are taken from there on

    # ------------------------------------------------------------------------------ effects
    def do(self, effects: list[ProducerEffect]) -> None:
        for effect in effects:
            match effect:
                case SendEntry(entry):
                    assert self.connection is not None, "an entry is published over a connection"
                    assert self.connection.credit > 0, "nothing is published without credit"
                    self.connection.credit -= len(entry) + ENTRY_COST_BYTES
                    self.connection.up.append(entry)
                case ReportOutcome(batch, error, ledger_id, entry_id):
                    for callback in batch.callbacks:
                        if callback is None:
                            assert self.options.reports_first_copy
                            self.failed_later += error is not None
                        else:
                            callback(error, entry_id)
                    self.reached(batch.waiters or [])
                    assert error is not None or ledger_id == LEDGER
                case ReportSent(batch):
                    callbacks, batch.callbacks = batch.callbacks, [None] * len(batch.callbacks)
                    for callback in callbacks:
                        assert callback is not None, "it was not reported before"
                        callback(None, FIRST_COPY)
                case EndFlushes(waiters):
                    self.reached(waiters)
                case AttachToBroker(after_s):
                    assert self.connect_at is None, "one attempt at a time"
                    assert self.connection is None
                    self.connect_at = self.now + after_s
                case DetachFromBroker():
                    assert self.connection is not None
                    self.left()
                case LogWarning(text):
                    assert text
                case EndWithError(error):
                    self.finished = error
                    self.connect_at = None
                    self.left()

    def left(self) -> None:
        """What is on its way to the broker still comes, until the next connection is opened."""
        self.last = self.connection
        self.connection = None

    last: Connection | None = None

    def reached(self, flushes: list[int]) -> None:
        for number in flushes:
            assert number not in self.flushed, "a flush ends once"
            self.flushed.add(number)
            assert all(each in self.outcomes for each in range(self.flushes[number])), "all before it has its outcome"

    # ------------------------------------------------------------------------------ the application
    def add(self) -> None:
        number = self.added
        payload = b"%d" % number + b"." * self.rng.choice([0, 0, 5, 60])

        def outcome(error: MagnetarError | None, entry_id: int) -> None:
            assert number not in self.outcomes, "one outcome"
            self.outcomes[number] = error, entry_id
            if entry_id == FIRST_COPY:
                self.provisional.append(number)

        if self.rng.random() < 0.5:
            added = self.core.add(payload, outcome)
        else:
            key = self.rng.choice([None, "a", "b"])
            grouped = self.options.key_based or bool(self.options.batch_by)
            self.keyed = self.keyed or (grouped and key is not None)
            tagged = {} if key is None else {"tag": key}
            added = self.core.add_message(OutgoingMessage(payload, tagged, partition_key=key), outcome)
        if added in (None, MessageAddResult.WAKE):
            self.added += 1
        else:
            assert added is (MessageAddResult.CLOSED if self.core.error is not None else MessageAddResult.FULL)

    def turn(self) -> None:
        self.do(self.core.publish_closed_batches(self.now, int(self.now * 1000)))

    def flush(self) -> None:
        number = len(self.flushes)
        self.flushes[number] = self.added
        if self.core.state is not PartitionClientState.CLOSED:
            self.do(self.core.flush(number, self.now, int(self.now * 1000)))
        else:
            self.flushed.add(number)

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.0001, 0.005, 0.02, 0.5, 3.0])
        due = self.core.next_timer_at
        if due is not None and due <= self.now:
            self.do(self.core.run_timers(self.now, int(self.now * 1000)))

    # ------------------------------------------------------------------------------ the broker
    def open(self) -> None:
        if self.connect_at is None or self.now < self.connect_at:
            return
        self.connect_at = None
        self.last = None
        if self.core.state is not PartitionClientState.OPENING and self.rng.random() < 0.3:
            error = self.rng.choice([ConnectionLost("no"), NotOwner("moved"), TimedOut("nothing came")])
            self.do(self.core.on_lost(error, self.now))
            return
        credit = self.rng.choice([0, 1, 300, 100_000])
        self.connection = Connection(credit)
        self.core.count_open_attempt()
        self.do(self.core.on_opened("p", -1, self.entry_max(), credit, 0, self.now, int(self.now * 1000)))

    def entry_max(self) -> int:
        return 90 if self.options.chunking else 0

    def store(self) -> None:
        connection = self.connection or self.last
        if connection is None or not connection.up:
            return
        entry = connection.up.popleft()
        header = parse_header(entry)
        chance = self.rng.random()
        whole = header.metadata.num_chunks_from_msg <= 1
        by_policy = whole and (chance < 0.02 or header.sequence_id in self.refused)
        if self.options.reports_first_copy and not by_policy and self.rng.random() < 0.7:
            connection.down.append(("first_copy", header.sequence_id))
        if not connection.refuses and by_policy:
            self.refused.add(header.sequence_id)
            connection.down.append(("failed", (header.sequence_id, MessageTooLarge("by policy"))))
        elif chance < 0.04 or connection.refuses:
            connection.refuses = True
            connection.down.append(("failed", (header.sequence_id, NotEnoughBookies("two of three"))))
        else:
            self.log.append(self.messages_of(header, entry))
            if chance > 0.05:  # else it answers never
                connection.down.append(("receipt", (header.sequence_id, len(self.log) - 1)))
            else:
                connection.down.append(("nothing", None))
        connection.down.append(("credit", len(entry) + ENTRY_COST_BYTES))

    def messages_of(self, header: Any, entry: bytes) -> list[int]:
        metadata = header.metadata
        if metadata.num_chunks_from_msg > 1:
            bodies = self.chunks.setdefault(metadata.uuid, [])
            if metadata.chunk_id == 0:
                bodies.clear()
            if metadata.chunk_id == len(bodies):
                bodies.append(bytes(entry[header.payload_offset :]))
            if len(bodies) < metadata.num_chunks_from_msg or metadata.chunk_id + 1 < metadata.num_chunks_from_msg:
                return []
            payloads = [b"".join(bodies)]
        else:
            payloads = [payload for _, payload in decode_batch(header, entry)]
        return [int(payload.rstrip(b".")) for payload in payloads]

    def answer(self) -> None:
        connection = self.connection
        if connection is None or not connection.down:
            return
        if connection.down[0][0] == "nothing":
            return  # it is stuck: nothing that comes later may be answered first
        kind, content = connection.down.popleft()
        self.told += 1
        if kind == "credit":
            connection.credit += content
            self.do(self.core.on_credit_granted(content))
        elif kind == "first_copy":
            self.do(self.core.on_first_copy(content))
        elif kind == "receipt":
            self.do(self.core.on_entry_receipt(content[0], LEDGER, content[1], self.now))
        else:
            self.do(self.core.on_refused(content[0], content[1], self.now))

    def lose(self) -> None:
        if self.connection is not None and self.rng.random() < 0.2:
            self.left()
            error = self.rng.choice([ConnectionLost("cut"), NotOwner("unloaded")])
            self.do(self.core.on_lost(error, self.now))

    # ------------------------------------------------------------------------------ the walk
    def run(self, steps: int) -> None:
        actions = [self.add, self.add, self.add, self.turn, self.turn, self.pass_time, self.flush, self.open, self.open,
                   self.store, self.store, self.store, self.answer, self.answer, self.answer, self.answer, self.answer,
                   self.lose]  # fmt: skip
        for _ in range(steps):
            self.rng.choice(actions)()
            self.core.check()
            self.check()

    def heal(self) -> None:
        """The broker answers all from now on."""
        for _ in range(100_000):
            if not self.core.pending:
                break
            self.turn()
            self.now += 0.01
            due = self.core.next_timer_at
            if due is not None and due <= self.now:
                self.do(self.core.run_timers(self.now, int(self.now * 1000)))
            if self.connection is not None and any(kind == "nothing" for kind, _ in self.connection.down):
                self.left()
                self.do(self.core.on_lost(ConnectionLost("cut"), self.now))
            self.open()
            if self.connection is not None and self.connection.credit <= 0 and not self.connection.up:
                self.connection.down.append(("credit", 5000))
            self.store()
            while self.connection is not None and self.connection.down and self.connection.down[0][0] != "nothing":
                self.answer()
            self.core.check()

    def check(self) -> None:
        stored = {number for entry in self.log for number in entry}
        for number, (error, entry_id) in self.outcomes.items():
            if entry_id == FIRST_COPY:
                assert self.options.reports_first_copy, "it is asked for"
            elif error is None:
                assert number in self.log[entry_id], "what is called stored is stored, there"
            elif error.definite:
                assert number not in stored, "what is called failed is not stored"
        for number in stored:
            assert number < self.added

    def check_order(self) -> None:
        assert self.core.lost == self.failed_later, "what failed after it was reported is counted"
        if self.options.key_based or self.options.batch_by:
            return  # order is that of each key
        first = list(dict.fromkeys(number for entry in self.log for number in entry))
        assert self.provisional == sorted(self.provisional), "first copies are reported in order"
        assert first == sorted(first), "messages are stored in the order in which they were added"


@pytest.mark.parametrize("seed", range(150))
def test_each_message_gets_one_true_outcome_in_order_whatever_happens(seed: int) -> None:
    walk = Walk(seed)
    walk.run(600)
    walk.heal()
    assert not walk.core.pending, "with a broker that answers every message gets its outcome"
    assert set(walk.outcomes) == set(range(walk.added))
    assert walk.flushed == set(walk.flushes), "each flush ends"
    walk.check()
    walk.check_order()


@pytest.mark.parametrize("seed", range(40))
def test_a_producer_that_ends_tells_every_outcome(seed: int) -> None:
    walk = Walk(1000 + seed)
    walk.run(200)
    error = walk.rng.choice([ProducerFenced("a later one"), ConnectionLost("the client is closed")])
    if walk.connection is not None and walk.rng.random() < 0.5:
        walk.left()
        walk.do(walk.core.on_lost(ProducerFenced("a later one"), walk.now))
    else:
        walk.do(walk.core.finish(error))
    walk.core.check()
    walk.check()
    assert set(walk.outcomes) == set(range(walk.added))
    assert walk.flushed == set(walk.flushes)
    assert walk.finished is not None
    walk.add()
    assert walk.core.add(b"x", None) is MessageAddResult.CLOSED


def test_a_time_out_takes_all_that_is_under_way_and_gives_the_connection_up() -> None:
    walk = Walk(0)
    walk.core = ProducerCore(
        "p", AttachedProducerOptions(send_timeout_s=2.0), max_pending=100, lock=nullcontext(), backoff=Backoff(walk.rng)
    )
    walk.connect_at = None
    walk.connection = Connection(100_000)
    walk.do(walk.core.on_opened("p", -1, 0, 100_000, 0, 0.0, 0))
    outcomes: list[Any] = []
    for _ in range(3):
        walk.core.add(b"x", lambda error, _: outcomes.append(error))
    walk.turn()
    assert len(walk.connection.up) == 3
    effects = walk.core.run_timers(2.5, 2500)
    assert [type(effect) for effect in effects] == [
        ReportOutcome,
        ReportOutcome,
        ReportOutcome,
        DetachFromBroker,
        AttachToBroker,
    ]
    walk.do(effects)
    assert [type(error) for error in outcomes] == [TimedOut] * 3
    assert not any(error.definite for error in outcomes), "a time-out is unknown"


@pytest.mark.parametrize("chunking", [False, True])
def test_what_is_sent_again_names_the_schema_of_the_topic_that_is_there(chunking: bool) -> None:
    """A topic that was made anew numbers the same schema otherwise; all else of the entries stays."""
    walk = Walk(0)
    options = AttachedProducerOptions(chunking=chunking, batching=False)
    walk.core = ProducerCore("p", options, max_pending=100, lock=nullcontext(), backoff=Backoff(walk.rng), uuid="u")
    walk.connect_at = None
    walk.connection = Connection(100_000)
    one, two = (number.to_bytes(8, "big") for number in (3, 0))
    most = 200 if chunking else 0
    walk.do(walk.core.on_opened("p", -1, most, 100_000, 0, 0.0, 0, one))
    for _ in range(3):
        walk.core.add(b"x" * 300, lambda error, _: None)
    walk.turn()
    sent, walk.connection = list(walk.connection.up), None
    before = [parse_header(entry) for entry in sent]
    assert before
    payloads = [entry[header.payload_offset :] for entry, header in zip(sent, before, strict=True)]
    assert {header.metadata.schema_version for header in before} == {one}
    walk.do(walk.core.on_lost(ConnectionLost("its topic was deleted"), 1.0))
    walk.connect_at = None
    walk.connection = Connection(100_000)
    walk.core.count_open_attempt()
    walk.do(walk.core.on_opened("p", -1, most, 100_000, 0, 1.0, 1000, two))
    after = [parse_header(entry) for entry in walk.connection.up]
    assert [header.metadata.schema_version for header in after] == [two] * len(before)
    assert [entry[h.payload_offset :] for entry, h in zip(walk.connection.up, after, strict=True)] == payloads
    for header in (*before, *after):
        header.metadata.ClearField("schema_version")
    assert [header.metadata for header in after] == [header.metadata for header in before]


class LevelledEncoding(EntryEncoding):
    """An encoding with one more field, as a new option of a producer adds."""

    level = 9


@replaces_code
@pytest.mark.parametrize("way", ["alone", "batch", "chunks", "own encryption", "later"])
def test_all_of_a_producers_encoding_comes_to_the_codec(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a new field of `EntryEncoding` is read in proto/entry.py, and for chunks, alone."""
    came = list[EntryEncoding]()

    def recorded(codec: Callable[..., object]) -> Callable[..., object]:
        def record(*given: Any) -> object:
            came.append(given[-1])
            return codec(*given)

        return record

    for name in ("encode_entry", "encode_batch"):
        monkeypatch.setattr(batcher_core, name, recorded(getattr(batcher_core, name)))
    monkeypatch.setattr(chunking_core, "encode_chunks", recorded(chunking_core.encode_chunks))
    options = AttachedProducerOptions(
        batching=way == "batch", chunking=way == "chunks", encoding=LevelledEncoding(compression=1)
    )
    core = ProducerCore(
        "p", options, max_pending=100, lock=nullcontext(), backoff=Backoff(random.Random(0)), uuid="u"
    )  # fmt: skip
    core.on_opened("p", -1, 200 if way == "chunks" else 0, 100_000, 0, 0.0, 0, b"12345678")
    if way == "later":
        core.encode_message(OutgoingMessage(b"x"), 0, b"12345678")
    elif way == "own encryption":
        core.add_message(OutgoingMessage(b"x", encrypt=lambda metadata, payload: payload), None)
    else:
        core.add(random.Random(0).randbytes(300), None)
    core.urgent = True
    core.publish_closed_batches(0.0, 0)
    (encoding,) = came
    assert (type(encoding), encoding.compression, encoding.schema_version) == (LevelledEncoding, 1, b"12345678")


def test_haste_is_for_what_is_open_alone_and_is_not_forgotten_while_that_waits() -> None:
    """A flush of what is sent already asks for no further turn; of a batch that waits for an answer it does."""
    core = ProducerCore(
        "p", AttachedProducerOptions(batching=True, batch_delay_s=60.0), max_pending=100, lock=nullcontext(),
        backoff=Backoff(random.Random(0)),
    )  # fmt: skip
    core.on_opened("p", -1, 0, 100_000, 0, 0.0, 0)
    core.add(b"one", None)
    core.urgent = True
    assert [type(each) for each in core.publish_closed_batches(0.0, 0)] == [SendEntry]
    assert not core.urgent
    assert not core.must_publish, "nothing waits"
    core.urgent = True
    assert not core.publish_closed_batches(0.0, 0)
    assert not core.urgent, "all that was open is on its way"
    core.add(b"two", None)
    core.urgent = True
    assert not core.publish_closed_batches(0.0, 0), "it goes out after the first"
    assert core.urgent
    core.on_entry_receipt(0, LEDGER, 0, 0.0)
    assert core.must_publish
    assert [type(each) for each in core.publish_closed_batches(0.0, 0)] == [SendEntry]
    assert not core.urgent
    core.on_entry_receipt(1, LEDGER, 1, 0.0)
    assert not core.must_publish
    core.check()


def test_a_limit_that_was_lowered_counts_from_the_next_attachment_on_and_a_raised_one_does_not() -> None:
    """So what is sent then is cut into chunks that the broker takes."""
    options = AttachedProducerOptions(chunking=True)
    core = ProducerCore("p", options, max_pending=100, lock=nullcontext(), backoff=Backoff(random.Random(0)), uuid="u")
    sizes = []
    for attachment, entry_max in enumerate((500, 200, 0, 900)):
        if attachment:
            core.on_lost(ConnectionLost("again"), 0.0)
        core.count_open_attempt()
        core.on_opened("p", -1, entry_max, 100_000, 0, 0.0, 0)
        core.add(b"x" * 2_000, None)
        sent = [each for each in core.publish_closed_batches(0.0, 0) if isinstance(each, SendEntry)]
        sizes.append(max(len(each.entry) for each in sent))
        for _ in sent:
            core.on_entry_receipt(attachment, LEDGER, 0, 0.0)
        core.check()
    assert 400 < sizes[0] <= 500
    assert all(150 < each <= 200 for each in sizes[1:]), sizes


def test_first_copies_are_reported_in_this_walk() -> None:
    """Else the walks would say nothing of them: both that come to their quorum and that fail."""
    walks = [Walk(seed) for seed in range(0, 150, 3)]
    for walk in walks:
        walk.run(600)
        walk.heal()
    assert sum(len(walk.provisional) for walk in walks) > 1000
    assert sum(walk.failed_later for walk in walks) > 10


def test_a_receipt_that_comes_before_its_first_copy_has_the_position() -> None:
    """An older broker sends no first copies; and the quorum may be as fast."""
    core = ProducerCore(
        "p", AttachedProducerOptions(reports_first_copy=True), max_pending=9, lock=nullcontext(),
        backoff=Backoff(random.Random(0)),
    )  # fmt: skip
    core.on_opened("p", -1, 0, 100_000, 0, 0.0, 0)
    for _ in range(3):
        core.add(b"x", None)
    core.publish_closed_batches(0.0, 0)
    (stored,) = core.on_entry_receipt(0, LEDGER, 7, 0.0)
    assert isinstance(stored, ReportOutcome)
    assert (stored.error, stored.entry_id) == (None, 7)
    assert core.on_first_copy(2) == [], "one before it is not reported"
    assert [type(each) for each in core.on_first_copy(1)] == [ReportSent]
    assert core.on_first_copy(1) == [], "once"
    assert core.pending == 2, "it is sent again until its quorum has it"
    core.check()
