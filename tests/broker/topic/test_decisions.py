"""Decisions with a named reason: publishing, trimming, bundles."""

import random

import pytest

from magnetar.broker.cluster.bundles_core import find_topic_bundle_name, make_bundle_name
from magnetar.broker.common.refusals import PublishRefusal
from magnetar.broker.log.log_shape_core import (
    Retention,
    TrimLimit,
    find_trimmable_ledgers,
    list_reasons_to_keep_ledgers,
)
from magnetar.broker.topic.dedup_core import (
    EXCLUSIVE,
    EXCLUSIVE_WITH_FENCING,
    SHARED,
    WAIT_FOR_EXCLUSIVE,
    ProducerJoinDenied,
    ProducerRegistration,
    ProducerTable,
    why_publish_refused,
)
from magnetar.proto.names import Position, TopicName
from magnetar.proto.states import AccessMode
from magnetar.proto.states import LedgerStays as Stays
from tests.broker.subscription.core.shapes import shape_of

MINUTE_MS = 60_000


def test_each_reason_that_is_known_before_an_entry_is_parsed() -> None:
    good = {"size": 10, "size_max": 10, "terminated": False, "owned": True, "fenced": False}
    assert why_publish_refused(**good) is None  # type: ignore[arg-type]
    for change, why in (
        ({"size": 11}, PublishRefusal.TOO_LARGE), ({"terminated": True}, PublishRefusal.TERMINATED),
        ({"owned": False}, PublishRefusal.NOT_OWNER),
        ({"fenced": True, "owned": False}, PublishRefusal.PRODUCER_FENCED),
    ):  # fmt: skip
        assert why_publish_refused(**(good | change)) is why  # type: ignore[arg-type]


def test_access_modes() -> None:
    table = ProducerTable()
    assert table.join(ProducerRegistration(1, "a", SHARED, "")).registered
    assert table.join(ProducerRegistration(2, "b", SHARED, "")).registered
    assert table.join(ProducerRegistration(3, "c", EXCLUSIVE, "")).denied is ProducerJoinDenied.HAS_PRODUCERS
    assert not table.join(ProducerRegistration(4, "d", WAIT_FOR_EXCLUSIVE, "")).registered
    assert table.join(ProducerRegistration(5, "e", SHARED, "")).denied is ProducerJoinDenied.EXCLUSIVE_PRODUCER
    assert not table.leave(1)
    assert [each.id for each in table.leave(2)] == [4]
    table.check()
    assert table.join(ProducerRegistration(6, "f", SHARED, "")).denied is ProducerJoinDenied.EXCLUSIVE_PRODUCER
    fencing = table.join(ProducerRegistration(7, "g", EXCLUSIVE_WITH_FENCING, ""))
    assert fencing.registered
    assert [each.id for each in fencing.fenced] == [4]
    table.check()


def test_a_name_belongs_to_one_producer_and_moves_with_it() -> None:
    table = ProducerTable()
    table.join(ProducerRegistration(1, "a", EXCLUSIVE, "x"))
    assert table.join(ProducerRegistration(2, "a", SHARED, "y")).denied is ProducerJoinDenied.NAME_TAKEN
    alone = table.join(ProducerRegistration(2, "a", EXCLUSIVE, "y"))
    # what it asked for decides before its name does, as in Pulsar
    assert alone.denied is ProducerJoinDenied.HAS_PRODUCERS
    again = table.join(ProducerRegistration(3, "a", EXCLUSIVE, "x"))
    assert again.registered
    assert [each.id for each in again.replaced] == [1]
    table.check()


@pytest.mark.parametrize("instance", ["", "x", "y"])
def test_a_name_is_replaced_by_its_own_role_alone_whatever_instance_another_claims_to_be(instance: str) -> None:
    table = ProducerTable()
    assert table.join(ProducerRegistration(1, "a", SHARED, "x", 1, "ada")).registered
    for mode in (SHARED, WAIT_FOR_EXCLUSIVE):
        thief = table.join(ProducerRegistration(2, "a", mode, instance, 9, "eve"))
        assert (thief.denied, thief.replaced) == (ProducerJoinDenied.NAME_TAKEN, [])
    free = ProducerRegistration(3, "b", SHARED, "z", 1)
    assert table.join(free).registered
    assert table.join(ProducerRegistration(4, "b", SHARED, instance, 9, "eve")).denied is ProducerJoinDenied.NAME_TAKEN
    assert table.join(ProducerRegistration(5, "b", SHARED, "z", 2)).replaced == [free], "another broker"
    assert [each.id for each in table.join(ProducerRegistration(6, "a", SHARED, "x", 2, "ada")).replaced] == [1]
    table.check()


@pytest.mark.parametrize("mode", [SHARED, EXCLUSIVE, WAIT_FOR_EXCLUSIVE])
def test_a_producer_that_reconnects_takes_its_place_again_while_another_one_waits(mode: AccessMode) -> None:
    table = ProducerTable()
    first = ProducerRegistration(1, "a", mode, "x", 0)
    assert table.join(first).registered
    assert not table.join(ProducerRegistration(2, "b", WAIT_FOR_EXCLUSIVE, "y")).registered
    again = table.join(ProducerRegistration(3, "a", mode, "x", 1))
    assert (again.registered, again.denied, again.replaced) == (True, None, [first])
    table.check()
    assert not table.join(ProducerRegistration(4, "c", WAIT_FOR_EXCLUSIVE, "z")).registered
    assert table.leave(1) == [], "what left is the earlier connection"
    assert [each.id for each in table.leave(3)] == [2]


def test_a_waiting_producer_that_reconnects_keeps_its_turn() -> None:
    table = ProducerTable()
    assert table.join(ProducerRegistration(1, "a", EXCLUSIVE, "x")).registered
    for number, name in ((2, "b"), (3, "c")):
        assert not table.join(ProducerRegistration(number, name, WAIT_FOR_EXCLUSIVE, name)).registered
    again = table.join(ProducerRegistration(4, "b", WAIT_FOR_EXCLUSIVE, "b", 1))
    assert (again.registered, [each.id for each in again.replaced]) == (False, [2])
    assert [each.id for each in table.leave(1)] == [4]


def test_a_reconnect_that_is_denied_leaves_the_earlier_connection_its_place() -> None:
    """It asks for more than it had."""
    table = ProducerTable()
    for number, name in ((1, "a"), (2, "b")):
        assert table.join(ProducerRegistration(number, name, SHARED, name)).registered
    denied = table.join(ProducerRegistration(3, "a", EXCLUSIVE, "a", 1))
    assert (denied.denied, denied.replaced, denied.fenced) == (ProducerJoinDenied.HAS_PRODUCERS, [], [])
    assert list(table.registered) == [1, 2]


class ProducerWalk:
    """Random producers of one topic, with the rule of the broker: a producer publishes from the time that it is
    registered until the table names it as replaced or fenced, or until it leaves."""

    def __init__(self, seed: int) -> None:
        self.rng, self.table = random.Random(seed), ProducerTable()
        self.publishing: dict[int, ProducerRegistration] = {}
        self.connections = 0
        self.denied: set[ProducerJoinDenied] = set()
        self.replaced_beside_waiting = 0

    def step(self) -> None:
        there = [*self.table.registered.values(), *self.table.waiting.values()]
        if there and self.rng.random() < 0.3:
            self._leave(self.rng.choice(there).id)
        else:
            self._join()
        self.table.check()
        assert self.publishing == self.table.registered
        exclusive = [each for each in self.publishing.values() if each.mode != SHARED]
        assert not exclusive or len(self.publishing) == 1, "two producers, one of which is exclusive"

    def _join(self) -> None:
        rng, table = self.rng, self.table
        self.connections += 1
        name = rng.choice("abcd")
        registration = ProducerRegistration(
            self.connections, name, rng.choice(list(AccessMode)), rng.choice([name] * 6 + ["", "other"]),
            self.connections if rng.random() < 0.9 else rng.randrange(self.connections),
            rng.choice([None, "ada", "ada"]),
        )  # fmt: skip
        registered, waiting = list(table.registered.items()), list(table.waiting.items())
        answer = table.join(registration)
        if answer.denied is not None:
            self.denied.add(answer.denied)
            assert (answer.registered, answer.replaced, answer.fenced) == (False, [], [])
            assert (list(table.registered.items()), list(table.waiting.items())) == (registered, waiting)
            return
        held = [each for each in answer.replaced if self.publishing.pop(each.id, None) is not None]
        for each in answer.fenced:
            self.publishing.pop(each.id, None)
        if answer.registered:
            self.publishing[registration.id] = registration
        if self.table.waiting and answer.registered:
            assert held, "it came before those that wait, and had no place"
            self.replaced_beside_waiting += registration.mode != SHARED
        if not answer.fenced:
            names = [each.name for _, each in waiting if each not in answer.replaced or not answer.registered]
            assert [each.name for each in table.waiting.values()][: len(names)] == names, "the turns have changed"

    def _leave(self, producer_id: int) -> None:
        waiting = [each for each in self.table.waiting.values() if each.id != producer_id]
        self.publishing.pop(producer_id, None)
        for each in self.table.leave(producer_id):
            assert each is waiting[0], "first come, first served"
            self.publishing[each.id] = each


def test_an_exclusive_producer_is_alone_whatever_joins_reconnects_waits_and_leaves() -> None:
    denied, beside_waiting = set[ProducerJoinDenied](), 0
    for seed in range(200):
        walk = ProducerWalk(seed)
        for _ in range(100):
            walk.step()
        denied |= walk.denied
        beside_waiting += walk.replaced_beside_waiting
    assert denied == set(ProducerJoinDenied), "the walk has met each reason"
    assert beside_waiting > 100, "and reconnects of exclusive producers while others waited"


def test_one_that_takes_the_topic_with_fencing_fences_one_of_its_own_name() -> None:
    """A program that was started a second time; the first one still runs."""
    table = ProducerTable()
    table.join(ProducerRegistration(1, "a", EXCLUSIVE_WITH_FENCING, "x"))
    second = table.join(ProducerRegistration(2, "a", EXCLUSIVE_WITH_FENCING, "y"))
    assert second.registered
    assert [each.id for each in second.fenced] == [1]
    assert not second.replaced
    table.check()


def test_a_ledger_goes_only_when_it_is_closed_and_every_persisted_mark_is_behind_it() -> None:
    shape = shape_of(3, 3, 3)
    none = Retention()
    assert find_trimmable_ledgers(shape, [TrimLimit(Position(20, 2))], none, 0) == [10, 20]
    assert find_trimmable_ledgers(shape, [TrimLimit(Position(20, 1))], none, 0) == [10]
    assert find_trimmable_ledgers(shape, [TrimLimit(Position(30, 2)), TrimLimit(Position(10, 1))], none, 0) == []
    assert find_trimmable_ledgers(shape, [TrimLimit(Position(30, 2))], none, 0) == [10, 20], "never the open one"
    assert find_trimmable_ledgers(shape, [], none, 0) == [10, 20], "no subscription and no retention: nothing holds it"
    held = TrimLimit(Position(10, 2), why=Stays.NOT_IN_SNAPSHOT), TrimLimit(Position(20, 1), why=Stays.NOT_COMPACTED)
    assert [
        stays for _, stays in list_reasons_to_keep_ledgers(shape, held, none, 0)
    ] == [None, Stays.NOT_IN_SNAPSHOT, Stays.OPEN]
    assert [
        stays for _, stays in list_reasons_to_keep_ledgers(shape, held[1:], none, 0)
    ] == [None, Stays.NOT_COMPACTED, Stays.OPEN]
    assert list_reasons_to_keep_ledgers(shape, [TrimLimit(Position(10, 0))], none, 0) == [
        (10, Stays.NOT_ACKNOWLEDGED), (20, Stays.NOT_ACKNOWLEDGED), (30, Stays.OPEN),
    ]  # fmt: skip


def test_a_ledger_that_no_subscription_needs_stays_for_deduplication_or_compaction_and_says_so() -> None:
    shape, read = shape_of(3, 3, 3), TrimLimit(Position(30, 2))
    snapshot = TrimLimit(Position(10, 2), why=Stays.NOT_IN_SNAPSHOT)
    horizon = TrimLimit(shape.start_position, why=Stays.NOT_COMPACTED)
    assert list_reasons_to_keep_ledgers(shape, [read, snapshot], Retention(), 0)[:2] == [
        (10, None), (20, Stays.NOT_IN_SNAPSHOT)
    ]
    assert list_reasons_to_keep_ledgers(shape, [read, snapshot, horizon], Retention(), 0)[:2] == [
        (10, Stays.NOT_COMPACTED), (20, Stays.NOT_IN_SNAPSHOT),
    ]  # fmt: skip


def test_a_ledger_goes_although_an_older_one_stays_when_everybody_has_stored_that_it_is_done() -> None:
    shape = shape_of(3, 3, 3, 3)
    none, marks = Retention(), Position(10, 0)
    assert find_trimmable_ledgers(shape, [TrimLimit(marks, frozenset({20}))], none, 0) == [20]
    assert find_trimmable_ledgers(
        shape, [TrimLimit(marks, frozenset({20, 30, 40}))], none, 0
    ) == [20, 30], "never the open one"
    assert find_trimmable_ledgers(
        shape, [TrimLimit(marks, frozenset({20, 30})), TrimLimit(Position(20, 2))], none, 0
    ) == [20]
    assert find_trimmable_ledgers(shape, [TrimLimit(marks, frozenset({20})), TrimLimit(marks)], none, 0) == [], (
        "the other one has not"
    )
    for span in shape.spans:
        span.size = 2 << 20
    holders = [TrimLimit(marks, frozenset({20, 30}))]
    assert find_trimmable_ledgers(
        shape, holders, Retention(-1, 2), 0
    ) == [20], "what retention keeps is what is acknowledged"
    assert find_trimmable_ledgers(shape, holders, Retention(-1, 4), 0) == []


@pytest.mark.parametrize(
    ("retention", "now_min", "gone"),
    [
        (Retention(10, -1), 5, []),
        (Retention(10, -1), 11, [10, 20]),
        (Retention(-1, -1), 10_000, []),
        (Retention(-1, 2), 10_000, [10]),
        (Retention(10, 2), 5, [10]),
    ],
)
def test_retention_keeps_what_is_acknowledged(retention: Retention, now_min: int, gone: list[int]) -> None:
    shape = shape_of(1, 1, 1)
    for span in shape.spans:
        span.size = 2 << 20
    assert find_trimmable_ledgers(shape, [TrimLimit(Position(30, 0))], retention, now_min * MINUTE_MS) == gone


def test_bundles_cover_all_hashes_without_overlap() -> None:
    assert [make_bundle_name(number, 4) for number in range(4)] == [
        "0x00000000_0x40000000", "0x40000000_0x80000000", "0x80000000_0xc0000000", "0xc0000000_0xffffffff",
    ]  # fmt: skip
    for bundles in (1, 3, 7, 64):
        names = [make_bundle_name(number, bundles) for number in range(bundles)]
        assert [name[11:] for name in names[:-1]] == [name[:10] for name in names[1:]]
    found = {find_topic_bundle_name(TopicName.parse(f"t-{number}"), 4) for number in range(100)}
    assert found == {make_bundle_name(number, 4) for number in range(4)}
