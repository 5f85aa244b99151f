"""The judge finds each class of wrong in hand-made histories, and nothing in random good ones."""

import random
from collections.abc import Callable

import pytest

from tests.chaos.workload.history import (
    Acked,
    AckSent,
    Connected,
    Delivered,
    Disturbed,
    Drained,
    Id,
    Nacked,
    Order,
    Read,
    ReadToEnd,
    Record,
    Send,
    SendFailed,
    SendOk,
    SendUnknown,
    Sought,
    Subscribed,
    value_of,
)
from tests.chaos.workload.judge import LATE_MAX, Wrong, judge

TOPIC = "t"
GOOD = 1000
"""Random good histories."""


def _id(at: int) -> Id:
    return (1, at, -1)


def _send(seq: int, producer: str = "p") -> Send:
    return Send(TOPIC, producer, seq, str(seq % 2), value_of(TOPIC, producer, seq))


def _ok(seq: int, at: int, producer: str = "p") -> SendOk:
    return SendOk(TOPIC, producer, seq, _id(at))


def _failed(seq: int) -> SendFailed:
    return SendFailed(TOPIC, "p", seq)


def _unknown(seq: int) -> SendUnknown:
    return SendUnknown(TOPIC, "p", seq)


def _sub(order: Order = Order.NONE) -> list[Record]:
    return [Subscribed(TOPIC, "s", order), Connected(TOPIC, "s", "c")]


def _give(at: int, seq: int, consumer: str = "c", producer: str = "p", redelivery: int = 0) -> Delivered:
    return Delivered(TOPIC, "s", consumer, _id(at), value_of(TOPIC, producer, seq), redelivery)


def _ack(at: int, durable: bool = True) -> list[Record]:
    return [AckSent(TOPIC, "s", _id(at)), Acked(TOPIC, "s", _id(at), durable)]


def _sent(*seqs: int) -> list[Record]:
    """Each sent and acknowledged, one after the other, at the place of its number."""
    return [record for seq in seqs for record in (_send(seq), _ok(seq, seq))]


def _read(*places: tuple[int, int]) -> list[Record]:
    """The log: (place, number)."""
    log: list[Record] = [Read(TOPIC, _id(at), value_of(TOPIC, "p", seq)) for at, seq in places]
    return [*log, ReadToEnd(TOPIC)]


def _plain(*seqs: int) -> list[Record]:
    return _read(*((seq, seq) for seq in seqs))


OTHER = Connected(TOPIC, "s", "d")
DRAINED = Drained(TOPIC, "s")
FOREIGN = value_of("other", "p", 0)
FILTERED = [Subscribed(TOPIC, "s", Order.NONE, 2), Connected(TOPIC, "s", "c")]
BAD: list[tuple[Wrong, list[Record]]] = [
    (Wrong.LOST_PREFIX, [*_sent(0, 1, 2), *_plain(1, 2)]),
    (Wrong.LOST_PREFIX, [*_sent(0, 1, 2, 3), *_plain(3)]),
    (Wrong.LOST_MIDDLE, [*_sent(0, 1, 2), *_plain(0, 2)]),
    (Wrong.LOST_MIDDLE, [*_sent(0, 1), _send(2), _ok(2, 2), *_sent(3), *_plain(0, 1, 3)]),
    (Wrong.LOST_POSTFIX, [*_sent(0, 1, 2), *_plain(0, 1)]),
    (Wrong.LOST_POSTFIX, [*_sent(0), ReadToEnd(TOPIC)]),
    (Wrong.LOST_POSTFIX, [*_sent(0, 1), *_sub(), _give(1, 1), *_ack(1), *_plain(0)]),
    (Wrong.MISPLACED, [*_sent(0, 1), *_read((0, 0), (5, 1))]),
    (Wrong.ABORTED_READ, [*_sent(0), _send(1), _failed(1), *_plain(0, 1)]),
    (Wrong.ABORTED_READ, [*_sub(), _send(0), _failed(0), _give(0, 0)]),
    (Wrong.PHANTOM, [*_sent(0), *_plain(0, 1)]),
    (Wrong.PHANTOM, [*_sent(0), *_sub(), Delivered(TOPIC, "s", "c", _id(1), FOREIGN, 0)]),
    (Wrong.PHANTOM, [*_sub(), _give(0, 0), *_sent(0)]),
    (Wrong.PHANTOM, [*_sent(0), *_plain(0)[:-1], Read(TOPIC, _id(1), value_of(TOPIC, "p", 0)[:-1] + "?")]),
    (Wrong.DISAGREEMENT, [*_sent(0, 1), *_sub(), _give(0, 1)]),
    (Wrong.DISAGREEMENT, [*_sub(), _send(0), _send(1), _give(0, 0), _give(0, 1), _unknown(0), _unknown(1)]),
    (Wrong.DISAGREEMENT, [_send(0), _ok(0, 0), _send(0, "q"), _ok(0, 0, "q")]),
    (Wrong.ORDER, [*(_send(seq) for seq in (0, 1)), _unknown(0), _unknown(1), *_read((0, 1), (1, 0))]),
    (Wrong.ORDER, [*_sent(0, 1, 2), *_sub(Order.ALL), _give(1, 1), _give(0, 0)]),
    (Wrong.ORDER, [*_sent(0, 1, 2), *_sub(Order.KEY), _give(2, 2), _give(1, 1), _give(0, 0)]),
    (Wrong.ORDER, [*_sent(0, 1, 2), *_sub(Order.HELD), _give(2, 2), _give(0, 0)]),
    (Wrong.ORDER, [*_sent(0, 1, 2), *_sub(Order.HELD), _give(0, 0), Nacked(TOPIC, "s", _id(0)), _give(2, 2)]),
    (Wrong.DUPLICATED, [*_sent(0), *_sent(1), *_read((0, 0), (1, 1), (2, 0))]),
    (Wrong.DUPLICATED, [*_sent(0, 1, 2), *_read((0, 0), (1, 1), (2, 2), (3, 1))]),
    (Wrong.REDELIVERED, [*_sent(0), *_sub(), _give(0, 0), _give(0, 0)]),
    (Wrong.REDELIVERED, [*_sent(0, 1), *_sub(), _give(0, 0), Nacked(TOPIC, "s", _id(1)), _give(0, 0)]),
    (Wrong.REDELIVERED, [*_sent(0), *_sub(), Disturbed(), _give(0, 0), *_ack(0, False), _give(0, 0)]),
    (Wrong.REDELIVERED, [*_sent(0), *_sub(), OTHER, _give(0, 0), _give(0, 0, "d")]),
    (
        Wrong.REDELIVERED,
        [
            *_sent(*range(LATE_MAX + 1)), *_sub(), OTHER, _give(0, 0), _give(0, 0, "d"),
            *(_give(at, at) for at in range(1, LATE_MAX + 1)), Disturbed(),
        ],
    ),
    (Wrong.REDELIVERED_ACKED, [*_sent(0), *_sub(), _give(0, 0), *_ack(0), OTHER, _give(0, 0, "d")]),
    (Wrong.SKIPPED, [*_sent(0, 1), *_sub(), _give(1, 1), DRAINED, *_plain(0, 1)]),
    (Wrong.SKIPPED, [*_sent(0), *_sub(), _give(0, 0), Sought(TOPIC, "s", _id(0)), DRAINED, *_plain(0)]),
    (Wrong.SKIPPED, [*_sent(0, 1), *FILTERED, DRAINED, *_plain(0, 1)]),
    (Wrong.UNWANTED, [*_sent(0, 1), *FILTERED, _give(1, 1)]),
    (Wrong.STUCK, [*_sent(0), _send(1), *_plain(0)]),
    (Wrong.STUCK, [*_sent(0), *_sub(), _give(0, 0), AckSent(TOPIC, "s", _id(0)), DRAINED]),
    (Wrong.ID_REGRESS, [_send(0), _ok(0, 1), _send(1), _ok(1, 0)]),
    (Wrong.ID_REGRESS, [*_sent(0, 1), *_read((0, 0), (1, 1), (0, 0))]),
]


@pytest.mark.parametrize(("wrong", "records"), BAD, ids=[f"{wrong.name}-{at}" for at, (wrong, _) in enumerate(BAD)])
def test_a_bad_history_is_flagged_with_its_class(wrong: Wrong, records: list[Record]) -> None:
    verdict = judge(records)
    assert wrong in verdict.counts
    assert len(verdict.counts) <= 2, verdict  # a copy read at an older id is both a duplicate and a regress


def test_every_class_of_wrong_has_a_bad_history() -> None:
    assert {wrong for wrong, _ in BAD} == set(Wrong)
    assert len(BAD) >= 30


def test_a_copy_is_wrong_where_topics_deduplicate_and_explained_where_not() -> None:
    records = [_send(0), _send(1), _ok(0, 0), _ok(1, 1), *_read((0, 0), (1, 1), (2, 0), (3, 1))]
    assert (judge(records).counts, judge(records).repeated) == ({}, 2)
    assert set(judge(records, dedup=True).counts) == {Wrong.DUPLICATED}


def test_a_consumer_may_say_with_a_later_message_that_it_was_disturbed() -> None:
    """It takes what it had fetched before it looks at its connection."""
    again = [*_sent(*range(LATE_MAX + 1)), *_sub(), OTHER, _give(0, 0), _give(0, 0, "d")]
    fetched = [_give(at, at) for at in range(1, LATE_MAX + 1)]
    assert not judge([*again, *fetched[:-1], Disturbed(), fetched[-1]]).counts
    assert set(judge([*again, *fetched, Disturbed()]).counts) == {Wrong.REDELIVERED}
    assert set(judge([*again, *fetched[:-1]]).counts) == {Wrong.REDELIVERED}
    assert set(judge(again).counts) == {Wrong.REDELIVERED}


def test_what_a_consumer_had_fetched_before_it_lost_its_connection_may_come_again() -> None:
    """It takes that after it has said so, and gets it again over its next connection."""
    late = [*_sent(*range(LATE_MAX + 2)), *_sub(), _give(0, 0), Disturbed(noticed=True)]
    taken = [_give(at, at) for at in range(1, LATE_MAX + 2)]
    assert not judge([*late, *taken[:-1], taken[-2]]).counts
    assert set(judge([*late, *taken, taken[-1]]).counts) == {Wrong.REDELIVERED}
    assert set(judge([*late, Connected(TOPIC, "s", "c"), *taken[:1], taken[0]]).counts) == {Wrong.REDELIVERED}
    assert set(judge([*late, OTHER, _give(1, 1, "d"), _give(1, 1, "d")]).counts) == {Wrong.REDELIVERED}


class Model:
    """A topic that keeps all promises, with a broker that repeats, forgets and gives again where it may."""

    def __init__(self, rng: random.Random, size: int) -> None:
        self.rng, self.records = rng, list[Record]()
        self.log: list[str] = []
        self.size = size
        self.order = rng.choice(list(Order))

    def run(self) -> list[Record]:
        self.records += [Subscribed(TOPIC, "s", self.order), Connected(TOPIC, "s", "c0")]
        given = acked = connects = 0
        seqs = {"p": 0, "q": 0}
        while len(self.records) < self.size:
            self._burst(self.rng.choice("pq"), seqs)
            if self.rng.random() < 0.1:
                connects += 1
                self.records.append(Connected(TOPIC, "s", f"c{connects}"))
                given = acked  # from the durable mark
            given = self._give(given, f"c{connects}")
            acked = self._ack(acked, given)
        self._give(given, f"c{connects}", self.size)
        self.records += [Read(TOPIC, _id(at), value) for at, value in enumerate(self.log)]
        self.records += [ReadToEnd(TOPIC), DRAINED]
        return self.records

    def _burst(self, producer: str, seqs: dict[str, int]) -> None:
        batch = range(seqs[producer], seqs[producer] + self.rng.randint(1, 4))
        seqs[producer] = batch.stop
        self.records += [_send(seq, producer) for seq in batch]
        values = [value_of(TOPIC, producer, seq) for seq in batch]
        match self.rng.random():
            case chance if chance < 0.05:
                self.records += [SendFailed(TOPIC, producer, seq) for seq in batch]
            case chance if chance < 0.15:
                self.log += values[: self.rng.randint(0, len(values))]
                self.records += [SendUnknown(TOPIC, producer, seq) for seq in batch]
            case chance:
                if chance < 0.3:
                    self.log += values[: self.rng.randint(0, len(values))]  # no outcome: sent again
                at = len(self.log)
                self.log += values
                self.records += [_ok(seq, at + place, producer) for place, seq in enumerate(batch)]

    def _give(self, given: int, consumer: str, most: int = 6) -> int:
        end = min(len(self.log), given + self.rng.randint(0, most) if most < self.size else len(self.log))
        for at in range(given, end):
            self.records.append(Delivered(TOPIC, "s", consumer, _id(at), self.log[at], 0))
            if self.rng.random() < 0.1:
                self.records.append(Nacked(TOPIC, "s", _id(at)))
                self.records.append(Delivered(TOPIC, "s", consumer, _id(at), self.log[at], 1))
        return end

    def _ack(self, acked: int, given: int) -> int:
        end = self.rng.randint(acked, given)
        for at in range(acked, end):
            self.records += _ack(at)
        return end


def test_random_good_histories_pass() -> None:
    for seed in range(GOOD):
        verdict = judge(Model(random.Random(seed), 120).run())
        assert not verdict.counts, f"seed {seed}: {verdict}"


Damage = Callable[[random.Random, list[Record]], Wrong | None]


def _remove_an_acknowledged_message(rng: random.Random, records: list[Record]) -> Wrong | None:
    acknowledged = {record.id for record in records if isinstance(record, SendOk)}
    reads = [at for at, record in enumerate(records) if isinstance(record, Read) and record.id in acknowledged]
    if not reads:
        return None
    del records[rng.choice(reads)]
    return Wrong.LOST_MIDDLE


def _remove_the_deliveries_of_a_message(rng: random.Random, records: list[Record]) -> Wrong | None:
    given = sorted({record.id for record in records if isinstance(record, Delivered)})
    if not given:
        return None
    gone = rng.choice(given)
    records[:] = [record for record in records if not (isinstance(record, Delivered) and record.id == gone)]
    return Wrong.SKIPPED


@pytest.mark.parametrize("damage", [_remove_an_acknowledged_message, _remove_the_deliveries_of_a_message])
def test_a_good_history_that_is_damaged_by_chance_is_flagged(damage: Damage) -> None:
    flagged = 0
    for seed in range(200):
        rng = random.Random(seed)
        records = Model(rng, 120).run()
        wrong = damage(rng, records)
        verdict = judge(records)
        if wrong is Wrong.LOST_MIDDLE:
            assert verdict.lost or verdict.counts[Wrong.MISPLACED], f"seed {seed}"
        elif wrong is not None:
            assert wrong in verdict.counts, f"seed {seed}"
        flagged += wrong is not None
    assert flagged > 150
