"""Fair delivery by key: whose turn it is, what limits a key, and what is remembered."""

import random
from collections import Counter
from collections.abc import Iterable

import pytest

from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.log.log_shape_core import LogShape
from magnetar.broker.subscription.core import fair_shared
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.core.dispatch import Delivery, Dispatcher, PlannedRead
from magnetar.broker.subscription.core.fair_shared import FairShared
from magnetar.broker.subscription.core.policy import (
    KeyLimits,
    Member,
    SubscriptionOptions,
    check_fair_properties,
    parse_key_limits,
)
from magnetar.proto.errors import InvalidRequest
from magnetar.proto.names import Position
from magnetar.proto.states import Blocked
from tests.broker.subscription.core.shapes import Item, shape_of

NOISY, QUIET = 7, 9


class Desk:
    """A dispatcher with a fair policy, and a pump that reads what it wants from a list of entries."""

    def __init__(self, entries: Iterable[Item], limits: KeyLimits = KeyLimits(), waiting_bytes: int = 1 << 20) -> None:  # noqa: B008
        self.items = {item.position: item for item in entries}
        self.shape: LogShape = shape_of(len(self.items))
        config = BrokerConfig(key_shared_waiting_bytes=waiting_bytes)
        self.policy = FairShared(SubscriptionOptions(config=config, key_limits=limits))
        self.cursor = Cursor(self.shape, CursorState(self.shape.start_position))
        self.dispatcher = Dispatcher(self.shape, self.cursor, self.policy)
        self.reads = 0
        self.members: list[Member] = []

    def join(self, permits: int) -> Member:
        member = Member(len(self.members) + 1, "c")
        self.members.append(member)
        self.dispatcher.join(member)
        self.dispatcher.grant_permits(member, permits)
        return member

    def pump(self, now: float = 0.0) -> list[Delivery]:
        out: list[Delivery] = []
        while True:
            if self.policy.paced:
                self.policy.advance_clock(now)
            want = self.dispatcher.choose_next_read()
            if isinstance(want, Blocked):
                self.blocked = want
                return out
            if isinstance(want, PlannedRead):
                first = want.position.entry_id
                positions = [Position(want.position.ledger_id, first + more) for more in range(50)]
                self.reads += 1
            else:
                positions = list(want.positions)
            out += self.dispatcher.assign_entries([self.items[each] for each in positions if each in self.items])
            self.dispatcher.check()

    def ack(self, *deliveries: Delivery) -> None:
        for each in deliveries:
            self.cursor.ack(each.entry.position)
            self.dispatcher.on_acked(each.member, each.entry.position)


def entries(*slots: int, count: int = 1) -> list[Item]:
    """One entry for each slot; 0: without a key."""
    return [
        Item(Position(10, number), count, 100, (slot,) if slot else ()) for number, slot in enumerate(slots)
    ]  # fmt: skip


def keys_of(deliveries: Iterable[Delivery]) -> list[int]:
    return [each.entry.slots[0] if each.entry.slots else 0 for each in deliveries]


def test_a_key_with_one_message_goes_next_however_many_of_another_key_are_before_it() -> None:
    desk = Desk(entries(*[NOISY] * 5000, QUIET, *[NOISY] * 100))
    member = desk.join(1)
    assert keys_of(desk.pump()) == [NOISY], "it waits longest"
    desk.dispatcher.grant_permits(member, 1)
    assert keys_of(desk.pump()) == [QUIET]


def test_entries_that_a_filter_passes_over_count_for_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shared, "WAITING_ENTRIES_MAX", 100)
    desk = Desk(entries(*[NOISY] * 10))
    desk.join(1)
    for at in range(10):
        desk.policy.turns.add_entry_of_key(Position(9, at), QUIET)
    desk.policy.on_entries_passed_over(89)
    assert desk.policy.is_looking_ahead
    desk.policy.on_entries_passed_over(1)
    assert not desk.policy.is_looking_ahead
    for at in range(10):
        assert isinstance(desk.policy.choose_member(Item(Position(9, at), 1, 100, (QUIET,)), True), Member)
        desk.policy.on_entries_released((Position(9, at),))
        assert desk.policy.is_looking_ahead, "the window moves on with each that goes out"
    desk.policy.on_entries_passed_over(1000)
    assert desk.policy.is_looking_ahead, "nothing waits for them"


def test_keys_get_equal_shares_of_the_messages_whatever_their_number_and_batches() -> None:
    rng = random.Random(3)
    some = [Item(Position(10, at), rng.choice([1, 1, 8]), 100, (rng.choice([1] * 12 + [2, 3]),)) for at in range(4000)]
    desk = Desk(some)
    member, served = desk.join(1), Counter[int]()
    for _ in range(300):
        for each in desk.pump():
            served[each.entry.slots[0]] += each.entry.count
            desk.ack(each)
        desk.dispatcher.grant_permits(member, max(0, 1 - member.permits))
    assert max(served.values()) - min(served.values()) <= 2 * 8, served


def test_a_key_that_comes_back_is_owed_nothing_for_the_time_it_was_idle() -> None:
    desk = Desk(entries(*[1] * 100, *[2] * 100))
    turns = desk.policy.turns
    for at in range(50):
        turns.add_entry_of_key(Position(1, at), 1)
    for _ in range(40):
        (position,) = turns.choose_entries(1)
        turns.count_delivered_entry(position, 1, 1)
        turns.remove_waiting_entry(position, 1)
    for at in range(50, 90):
        turns.add_entry_of_key(Position(1, at), 2)
    for _ in range(10):
        (position,) = turns.choose_entries(1)
        slot = 1 if position.entry_id < 50 else 2
        turns.count_delivered_entry(position, slot, 1)
        turns.remove_waiting_entry(position, slot)
    assert turns.of[2].in_flight in (5, 6), "they take turns at once"
    turns.check()


def test_no_more_of_a_key_is_in_flight_than_it_may_and_others_go_on() -> None:
    desk = Desk(entries(*[NOISY] * 50, QUIET, 0, 0, 0), KeyLimits(max_in_flight=2))
    desk.join(1000)
    first = desk.pump()
    assert Counter(keys_of(first)) == {NOISY: 2, QUIET: 1, 0: 2}, "messages without a key share one"
    assert desk.blocked is Blocked.KEY_LIMITS
    desk.ack(first[0])
    assert keys_of(desk.pump()) == [NOISY]
    desk.dispatcher.redeliver(first[1].member, [first[1].entry.position])
    assert [each.entry.position for each in desk.pump()] == [first[1].entry.position], "the earliest of its key"


def test_a_batch_goes_out_whole_while_one_message_of_its_key_may() -> None:
    desk = Desk(entries(1, 1, 1, count=5), KeyLimits(max_in_flight=7))
    desk.join(1000)
    assert len(desk.pump()) == 2


def test_a_key_gets_a_seconds_worth_at_once_and_then_its_rate() -> None:
    desk = Desk(entries(*[NOISY] * 100, QUIET), KeyLimits(rate=4.0))
    desk.join(1000)
    assert Counter(keys_of(desk.pump(100.0))) == {NOISY: 5, QUIET: 1}
    assert desk.blocked is Blocked.KEY_LIMITS
    assert 0 < desk.policy.next_release_s() <= 0.25
    assert desk.pump(100.2) == []
    assert keys_of(desk.pump(100.25)) == [NOISY]
    assert len(desk.pump(1000.0)) == 5, "what was not used is not saved up"


def test_what_a_key_used_of_its_rate_counts_after_it_was_acknowledged_and_after_a_seek() -> None:
    desk = Desk(entries(*[1] * 40), KeyLimits(rate=4.0))
    desk.join(1000)
    out = desk.pump(50.0)
    desk.ack(*out)
    assert desk.pump(50.1) == []
    desk.dispatcher.restart_delivery_after_mark()
    assert desk.pump(50.1) == [], "its keys were not forgotten"


def test_new_limits_hold_at_once() -> None:
    desk = Desk(entries(*[1] * 40), KeyLimits(max_in_flight=2))
    desk.join(1000)
    assert len(desk.pump()) == 2
    desk.policy.set_key_limits(KeyLimits(max_in_flight=5))
    assert len(desk.pump()) == 3
    desk.policy.set_key_limits(KeyLimits())
    assert len(desk.pump()) == 35


def test_so_many_new_entries_wait_before_one_goes_out_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_shared, "WAITING_ENTRIES_MAX", 300)
    desk = Desk(entries(*[NOISY] * 2000, QUIET))
    member = desk.join(1)
    desk.pump()
    desk.dispatcher.grant_permits(member, 1)
    assert keys_of(desk.pump()) == [NOISY]
    assert 300 <= desk.policy.turns.entries <= 350
    assert desk.dispatcher.read_position.entry_id <= 400


def test_the_window_is_shorter_when_entries_are_large() -> None:
    desk = Desk([Item(Position(10, at), 1, 10_000, (NOISY,)) for at in range(2000)], waiting_bytes=1 << 20)
    member = desk.join(1)
    desk.pump()
    desk.dispatcher.grant_permits(member, 1)
    desk.pump()
    assert desk.policy.turns.entries <= (1 << 20) // 10_000 + 50


def test_a_million_waiting_messages_of_one_key_take_few_bytes_and_other_keys_are_found_after_them() -> None:
    desk = Desk(entries(*[NOISY] * 30_000, QUIET), KeyLimits(max_in_flight=1), waiting_bytes=200_000)
    desk.join(1000)
    assert sorted(keys_of(desk.pump())) == [NOISY, QUIET]
    assert desk.policy.turns.waiting_bytes < 70_000


def test_keys_without_end_leave_nothing_behind() -> None:
    desk = Desk(entries(*range(1, 1001)), KeyLimits(max_in_flight=1, rate=100.0))
    member = desk.join(0)
    for second in range(20):
        desk.dispatcher.grant_permits(member, 50)
        desk.ack(*desk.pump(float(second)))
    desk.policy.advance_clock(1000.0)
    assert not desk.policy.turns.of
    assert not desk.policy.turns._times


def test_chunks_are_not_held_back() -> None:
    chunks = [Item(Position(10, at), 1, 100, (1,), "uuid", at < 9) for at in range(10)]
    desk = Desk(chunks, KeyLimits(max_in_flight=1))
    desk.join(1000)
    assert len(desk.pump()) == 10


@pytest.mark.parametrize(
    ("properties", "what"),
    [
        ({"fair.by-key": "yes"}, "true or false, not 'yes'"),
        ({"fair.by-key": "true", "fair.max-in-flight-per-key": "0"}, "whole number from 1"),
        ({"fair.by-key": "true", "fair.max-in-flight-per-key": "-1"}, "whole number from 1"),
        ({"fair.by-key": "true", "fair.rate-per-key": "nan"}, "above 0"),
        ({"fair.by-key": "true", "fair.rate-per-key": "inf"}, "above 0"),
        ({"fair.by-key": "true", "fair.rate-per-key": "0"}, "above 0"),
        ({"fair.rate-per-key": "5"}, "need fair.by-key=true"),
    ],
    ids=str,
)
def test_properties_that_mean_nothing_are_refused(properties: dict[str, str], what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        check_fair_properties(properties)


def test_properties_say_the_limits_and_stored_ones_that_do_not_parse_none() -> None:
    given = {"fair.by-key": "true", "fair.max-in-flight-per-key": "3", "fair.rate-per-key": "2.5", "other": "x"}
    check_fair_properties(given)
    assert parse_key_limits(given) == KeyLimits(3, 2.5)
    assert parse_key_limits({"fair.by-key": "true", "fair.rate-per-key": "quick"}) == KeyLimits()
    assert parse_key_limits({"fair.by-key": "false"}) is parse_key_limits({}) is None


def test_a_message_goes_to_the_consumer_that_has_the_fewest_and_waits_behind_no_other_key() -> None:
    desk = Desk(entries(NOISY, NOISY, NOISY, QUIET, QUIET), KeyLimits(max_in_flight=2))
    members = [desk.join(10) for _ in range(4)]
    first = desk.pump()
    assert Counter(keys_of(first)) == {NOISY: 2, QUIET: 2}
    assert [each.member for each in first] == members, "each has one"
    desk.ack(*[each for each in first if each.member in members[1:3]])
    assert [(key, each.member in members[1:3]) for each in desk.pump() for key in keys_of([each])] == [(NOISY, True)]
