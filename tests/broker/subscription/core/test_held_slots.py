"""Which keys are held, and since when: nothing is recorded per entry, two looks are compared."""

from magnetar.broker.subscription.core import key_slots
from magnetar.broker.subscription.core.key_slots import KeySlotTable
from magnetar.broker.subscription.core.policy import Member
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position
from tests.broker.subscription.core.shapes import policy_of

ADA, BOB = Member(1, "ada"), Member(2, "bob")


def at(entry_id: int) -> Position:
    return Position(10, entry_id)


def make_table() -> KeySlotTable:
    table = KeySlotTable(lambda _number, _slot: None)
    table.add_member(ADA)
    table.add_member(BOB)
    return table


def held(table: KeySlotTable, now_s: float) -> list[tuple[int, str, float, int]]:
    found = table.find_held_slots(now_s)
    return [(each.slot, each.holder.name, each.since_s, each.following_entries) for each in found]


def test_a_key_is_held_since_the_look_that_first_saw_its_oldest_entry_and_counts_what_follows_it() -> None:
    table = make_table()
    table.occupy_slots_of_entry(at(0), (7,), ADA)
    assert held(table, 1) == [], "nothing waits for it"
    table.occupy_slots_of_entry(at(1), (7,), ADA)
    table.add_waiting_entry(at(2), (7,))
    assert held(table, 2) == [(7, "ada", 1, 2)]
    assert held(table, 90) == [(7, "ada", 1, 2)]


def test_an_acknowledgement_of_the_oldest_entry_begins_anew_and_one_of_a_later_entry_does_not() -> None:
    table = make_table()
    for each in range(4):
        table.occupy_slots_of_entry(at(each), (7,), ADA)
    assert held(table, 1) == [(7, "ada", 1, 3)]
    table.vacate_slots_of_entries([at(2)])
    assert held(table, 5) == [(7, "ada", 1, 2)]
    table.vacate_slots_of_entries([at(0)])
    assert held(table, 9) == [(7, "ada", 9, 1)]


def test_the_longest_held_key_is_first_and_busy_keys_are_never_old() -> None:
    table = make_table()
    table.occupy_slots_of_entry(at(0), (7,), ADA)
    table.add_waiting_entry(at(1), (7,))
    for now_s in range(1, 50):
        table.occupy_slots_of_entry(at(2 * now_s), (8,), BOB)
        table.occupy_slots_of_entry(at(2 * now_s + 1), (8,), BOB)
        assert held(table, now_s) == [(7, "ada", 1, 1), (8, "bob", now_s, 1)]
        table.vacate_slots_of_entries([at(2 * now_s), at(2 * now_s + 1)])


def test_what_is_held_longest_is_found_among_more_entries_than_a_look_examines() -> None:
    table = make_table()
    table.occupy_slots_of_entry(at(0), (7,), ADA)
    table.add_waiting_entry(at(1), (7,))
    for each in range(2, key_slots.OLDEST_ENTRIES_MAX + 500):
        table.occupy_slots_of_entry(at(each), (each + 100,), BOB)
    assert held(table, 1) == [(7, "ada", 1, 1)]
    assert held(table, 61) == [(7, "ada", 1, 1)]


def test_no_other_type_holds_keys_and_a_cleared_table_holds_none() -> None:
    assert policy_of(wire.Subscribe.SHARED).find_held_slots(1.0) == ()
    table = make_table()
    table.occupy_slots_of_entry(at(0), (7,), ADA)
    table.add_waiting_entry(at(1), (7,))
    assert held(table, 1)
    table.clear()
    assert held(table, 2) == []
