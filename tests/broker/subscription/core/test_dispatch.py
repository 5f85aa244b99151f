"""The dispatcher with Exclusive and Shared: tables. Random walks of all types: test_dispatch_walk.py."""

import pytest
from pyroaring import BitMap

from magnetar.broker.log.log_shape_core import LogShape
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.core.delays import DelayIndex
from magnetar.broker.subscription.core.dispatch import (
    Delivery,
    Dispatcher,
    DispatchLimits,
    PlannedRead,
    ReadForRedelivery,
)
from magnetar.broker.subscription.core.policy import DispatchPolicy, Member
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position
from magnetar.proto.states import Blocked
from tests.broker.subscription.core.shapes import Item, policy_of, positions_of, shape_of

EXCLUSIVE, SHARED = wire.Subscribe.EXCLUSIVE, wire.Subscribe.SHARED


class Desk:
    """A dispatcher with its cursor and log; `pump` does what the driver does."""

    def __init__(self, type_: int, shape: LogShape, count: int = 1, *, tracks: bool = True) -> None:
        self.shape = shape
        self.count = count
        self.cursor = Cursor(shape, CursorState(shape.start_position))
        self.policy: DispatchPolicy = policy_of(type_)
        self.dispatcher = Dispatcher(shape, self.cursor, self.policy, tracks=tracks)
        self.members: dict[int, Member] = {}

    def delay(self) -> DelayIndex:
        """As if it had been made with this."""
        delays = self.dispatcher.delays = DelayIndex(self.dispatcher._shape, self.cursor)
        self.dispatcher.delaying = True
        return delays

    def join(self, id_: int, permits: int = 0, priority: int = 0) -> Member:
        member = self.members[id_] = Member(id_, f"c{id_}", priority)
        assert self.policy.why_refused(member) is None
        self.dispatcher.join(member)
        self.dispatcher.grant_permits(member, permits)
        return member

    def leave(self, id_: int) -> None:
        self.dispatcher.leave(self.members.pop(id_))
        self.dispatcher.check()

    def pump(self, chunk: int = 3) -> tuple[list[Delivery], Blocked]:
        given: list[Delivery] = []
        while True:
            want = self.dispatcher.choose_next_read()
            if isinstance(want, Blocked):
                return given, want
            first = want.position if isinstance(want, PlannedRead) else want.positions[0]
            run = [each for each in positions_of(self.shape) if each >= first and each[0] == first[0]][:chunk]
            deliveries = self.dispatcher.assign_entries([Item(each, self.count) for each in run])
            given += deliveries
            self.dispatcher.check()

    def ack(self, member: Member, position: Position) -> None:
        if self.cursor.ack(position):
            self.dispatcher.on_acked(member, position)


def entries(deliveries: list[Delivery]) -> list[tuple[int, int]]:
    return [(each.member.id, each.entry.position.entry_id) for each in deliveries]


def test_exclusive_gives_everything_in_log_order_as_far_as_permits_go() -> None:
    desk = Desk(EXCLUSIVE, shape_of(4, 0, 3))
    assert desk.pump() == ([], Blocked.NO_CONSUMER)
    member = desk.join(1, permits=5)
    given, why = desk.pump()
    assert [each.entry.position for each in given] == positions_of(desk.shape)[:5]
    assert why is Blocked.NO_PERMITS
    desk.dispatcher.grant_permits(member, 10)
    given, why = desk.pump()
    assert [each.entry.position for each in given] == positions_of(desk.shape)[5:]
    assert why is Blocked.CAUGHT_UP
    assert desk.policy.why_refused(Member(2, "other")) is not None


def test_what_is_given_back_comes_before_anything_new_in_log_order_with_its_count() -> None:
    desk = Desk(EXCLUSIVE, shape_of(6))
    member = desk.join(1, permits=4)
    desk.pump()
    desk.dispatcher.redeliver(member, [Position(10, 2), Position(10, 0), Position(10, 5)])
    assert desk.dispatcher.unacked == 2
    desk.dispatcher.grant_permits(member, 3)
    given, _ = desk.pump()
    assert [(each.entry.position.entry_id, each.redelivery_count) for each in given] == [(0, 1), (2, 1), (4, 0)]
    desk.dispatcher.redeliver(member, None)
    assert isinstance(desk.dispatcher.choose_next_read(), Blocked)
    desk.dispatcher.grant_permits(member, 1)
    assert desk.dispatcher.choose_next_read() == ReadForRedelivery(tuple(Position(10, entry) for entry in range(5)))


def test_shared_takes_turns_and_has_one_holder_per_entry() -> None:
    desk = Desk(SHARED, shape_of(100))
    first, second = desk.join(1, permits=100), desk.join(2, permits=30)
    given, _ = desk.pump(chunk=7)
    assert [each.member.id for each in given[:60]] == [1] * 20 + [2] * 20 + [1] * 20
    assert len(second.outstanding) == 30
    assert not set(first.outstanding) & set(second.outstanding)
    assert len(first.outstanding) == 70


def test_shared_serves_the_better_priority_until_it_has_no_permits() -> None:
    desk = Desk(SHARED, shape_of(40))
    desk.join(1, permits=5, priority=1)
    desk.join(2, permits=8, priority=0)
    given, why = desk.pump()
    assert [each.member.id for each in given] == [2] * 8 + [1] * 5
    assert why is Blocked.NO_PERMITS


def test_shared_stops_at_the_limits_of_unacknowledged_messages_and_goes_on_at_half() -> None:
    desk = Desk(SHARED, shape_of(60))
    desk.dispatcher.set_unacked_limits(DispatchLimits(10, 15))
    first = desk.join(1, permits=100)
    assert len(desk.pump()[0]) == 10
    assert desk.dispatcher.choose_next_read() is Blocked.TOO_MANY_UNACKED
    second = desk.join(2, permits=100)
    given, why = desk.pump()
    assert (len(given), why) == (5, Blocked.TOO_MANY_UNACKED)
    assert (first.blocked, second.blocked, desk.dispatcher.full) == (True, False, True)
    for position in list(first.outstanding)[:4]:
        desk.ack(first, position)
    assert (desk.dispatcher.unacked, first.unacked) == (11, 6)
    assert desk.dispatcher.choose_next_read() is Blocked.TOO_MANY_UNACKED  # less than the limit, more than half of it
    desk.ack(first, next(iter(first.outstanding)))
    assert not first.blocked
    for position in list(second.outstanding)[:3]:
        desk.ack(second, position)
    assert not desk.dispatcher.full
    assert desk.pump()[0]


def test_an_ack_by_somebody_who_does_not_hold_the_entry_frees_the_holder() -> None:
    desk = Desk(SHARED, shape_of(2))
    first = desk.join(1, permits=9)
    desk.pump()
    second = desk.join(2, permits=9)
    desk.ack(second, Position(10, 0))
    assert list(first.outstanding) == [(10, 1)]


def test_a_reader_holds_nothing() -> None:
    desk = Desk(EXCLUSIVE, shape_of(50), tracks=False)
    member = desk.join(1, permits=100)
    assert len(desk.pump()[0]) == 50
    assert not member.outstanding
    desk.dispatcher.redeliver(member, None)
    assert desk.dispatcher.choose_next_read() is Blocked.CAUGHT_UP


def test_complaint_10_past_the_memory_budget_new_messages_wait_and_nothing_is_dropped() -> None:
    """Pulsar drops what is above 10,000 holes, and a restart delivers it again."""
    shape = shape_of(1000)
    cursor = Cursor(shape, CursorState(shape.start_position))
    dispatcher = Dispatcher(shape, cursor, policy_of(SHARED), memory_bytes_max=1200)
    member = Member(1, "c")
    dispatcher.join(member)
    dispatcher.grant_permits(member, 10_000)
    done = 0
    while (want := dispatcher.choose_next_read()) is not Blocked.HOLES:
        assert isinstance(want, PlannedRead)
        (given,) = dispatcher.assign_entries([Item(want.position)])
        if given.entry.position.entry_id % 2:
            cursor.ack(given.entry.position)
            dispatcher.on_acked(member, given.entry.position)
            done += 1
    assert cursor.hole_entry_count == done > 100
    last = dispatcher.read_position
    held = [each for each in member.outstanding if each.entry_id < 4]
    dispatcher.redeliver(member, held)
    assert isinstance(dispatcher.choose_next_read(), ReadForRedelivery), "what was delivered before is delivered again"
    assert [each.redelivery_count for each in dispatcher.assign_entries([Item(each) for each in held])] == [1] * len(
        held
    )
    for position in sorted(member.outstanding)[: done // 2]:
        cursor.ack(position)
        dispatcher.on_acked(member, position)
    assert dispatcher.choose_next_read() == PlannedRead(last), "it goes on by itself"


def test_holes_that_take_few_bytes_when_they_are_compressed_hold_up_nothing() -> None:
    """One message in a thousand stays unacknowledged: bitmaps of eight kilobytes each, and of a few runs."""
    size, ledgers = 5000, 12
    shape = shape_of(*[size] * ledgers)
    cursor = Cursor(shape, CursorState(shape.start_position))
    dispatcher = Dispatcher(shape, cursor, policy_of(SHARED), memory_bytes_max=10_000)
    member = Member(1, "c")
    dispatcher.join(member)
    dispatcher.grant_permits(member, size * ledgers + 1)
    most = 0
    while isinstance(want := dispatcher.choose_next_read(), PlannedRead):
        ledger, first = want.position
        read = range(first, min(first + 500, size))
        for given in dispatcher.assign_entries([Item(Position(ledger, entry)) for entry in read]):
            if given.entry.position.entry_id % 1000:
                cursor.ack(given.entry.position)
                dispatcher.on_acked(member, given.entry.position)
        most = max(most, cursor.memory_bytes)
    assert want is Blocked.CAUGHT_UP, "nothing new was held up"
    assert most > 10_000, "while they were not compressed they took more than the budget"
    assert len(member.outstanding) == ledgers * size // 1000
    cursor.check()


def test_complaint_10_after_a_restart_past_the_budget_what_lies_between_the_holes_still_comes() -> None:
    shape = shape_of(1000)
    cursor = Cursor(shape, CursorState(shape.start_position))
    cursor.ack_entries_of_ledger(10, BitMap(range(1, 800, 2)))
    dispatcher = Dispatcher(shape, cursor, policy_of(SHARED), memory_bytes_max=10)
    member = Member(1, "c")
    dispatcher.join(member)
    dispatcher.grant_permits(member, 10_000)
    came = []
    while isinstance(want := dispatcher.choose_next_read(), PlannedRead):
        came += [each.entry.position.entry_id for each in dispatcher.assign_entries([Item(want.position)])]
    assert want is Blocked.HOLES
    assert came == list(range(0, 799, 2))


def test_complaint_11_one_unacked_message_replays_itself_and_nothing_else() -> None:
    """Pulsar reads all that lies behind it again after the topic was loaded (#742, #180)."""
    shape = shape_of(500_000, 500_000)
    cursor = Cursor(shape, CursorState(shape.start_position))
    cursor.ack_entries_of_ledger(10, BitMap(range(1, 500_000)))
    cursor.ack_entries_of_ledger(20, BitMap(range(499_000)))
    dispatcher = Dispatcher(shape, cursor, policy_of(SHARED))
    member = Member(1, "c")
    dispatcher.join(member)
    dispatcher.grant_permits(member, 10)
    assert dispatcher.choose_next_read() == PlannedRead(Position(10, 0))
    assert len(dispatcher.assign_entries([Item(Position(10, 0))])) == 1
    assert dispatcher.choose_next_read() == PlannedRead(Position(20, 499_000)), "the entries between are not even read"


@pytest.mark.parametrize("type_", [SHARED, wire.Subscribe.KEY_SHARED])
def test_delayed_entries_are_leapt_over_unread_and_come_when_they_are_due(type_: int) -> None:
    desk = Desk(type_, shape_of(8))
    later = desk.delay()
    for entry, at_ms in ((0, 1), (3, 1), (4, 2), (7, 2)):
        later.add_entry(Position(10, entry), at_ms)
    member = desk.join(1, permits=99)
    assert desk.dispatcher.choose_next_read() == PlannedRead(Position(10, 1))
    given, why = desk.pump(chunk=8)
    assert ([each.entry.position.entry_id for each in given], why) == ([1, 2, 5, 6], Blocked.DELAYED)
    desk.dispatcher.add_due_entries(later.take_due(1, 99))
    given, _ = desk.pump()
    assert [each.entry.position.entry_id for each in given] == [0, 3]
    for position in list(member.outstanding):
        desk.ack(member, position)
    assert desk.cursor.mark == Position(10, 3)
    desk.ack(member, Position(10, 4))
    desk.dispatcher.add_due_entries(later.take_due(2, 99))
    assert [each.entry.position.entry_id for each in desk.pump()[0]] == [7]


def test_what_is_left_and_comes_by_itself_is_not_called_delivered() -> None:
    desk = Desk(SHARED, shape_of(3))
    later = desk.delay()
    later.add_entry(Position(10, 1), 5)
    member = desk.join(1, permits=99)
    assert desk.pump()[1] is Blocked.DELAYED
    desk.dispatcher.held.add(Position(10, 2), 9)
    desk.dispatcher.redeliver(member, [Position(10, 2)])
    assert desk.pump()[1] is Blocked.DELAYED, "also of what failed"
    desk.ack(member, Position(10, 1))
    assert desk.pump()[1] is Blocked.HELD
    for entry in (0, 2):
        desk.ack(member, Position(10, entry))
    assert desk.pump()[1] is Blocked.CAUGHT_UP


def test_an_early_entry_is_held_when_it_is_read_and_one_that_is_held_and_due_comes_once() -> None:
    desk = Desk(SHARED, shape_of(4))
    delays = desk.delay()
    member = desk.join(1, permits=99)
    items = [Item(Position(10, entry), deliver_at_ms=5 if entry in (0, 2) else 0) for entry in range(4)]
    delays.add_entry(Position(10, 2), 5)  # noted when it was stored, and not read yet
    given = desk.dispatcher.assign_entries(items, now_ms=4)
    assert [each.entry.position.entry_id for each in given] == [1, 3]
    assert delays.count == 2
    delays.add_entry(Position(10, 4), 5)
    assert desk.dispatcher.assign_entries(items, now_ms=9) == [], "it comes through `due`, whatever is read meanwhile"
    desk.dispatcher.add_due_entries(delays.take_due(9, 99))
    assert [each.entry.position.entry_id for each in desk.dispatcher.assign_entries(items, now_ms=9)] == [0, 2]
    assert len(member.outstanding) == 4


def test_what_an_abort_gives_back_and_a_consumer_holds_already_has_one_holder() -> None:
    """An abort gives back in slices; what is released from a back-off in between is with a consumer when its slice
    comes."""
    desk = Desk(SHARED, shape_of(3))
    first = desk.join(1, permits=2)
    given, _ = desk.pump()
    assert entries(given) == [(1, 0), (1, 1)]
    desk.join(2, permits=10)
    desk.dispatcher.add_entries_of_aborted_acks([each.entry.position for each in given])
    given, why = desk.pump()
    assert (entries(given), why) == ([(2, 2)], Blocked.CAUGHT_UP)
    desk.dispatcher.redeliver(first, None)
    assert entries(desk.pump()[0]) == [(2, 0), (2, 1)], "when it gives them back another one gets them"
