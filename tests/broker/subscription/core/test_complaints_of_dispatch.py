"""What users of other brokers have met in dispatching (docs/features.md), each as the smallest walk that shows it."""

import random

from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState
from magnetar.broker.subscription.core.dispatch import Delivery, Dispatcher, PlannedRead
from magnetar.broker.subscription.core.policy import Member
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.names import Position, compute_key_slot
from magnetar.proto.states import Blocked
from tests.broker.subscription.core.shapes import Item, policy_of, positions_of, shape_of

SHARED, KEY_SHARED = wire.Subscribe.SHARED, wire.Subscribe.KEY_SHARED


class Desk:
    """A subscription of one ledger whose entries have keys in turn, each entry a batch of `count` of one key."""

    def __init__(self, type_: int, entries: int, keys: int = 1, count: int = 1) -> None:
        self.shape = shape_of(entries)
        self.cursor = Cursor(self.shape, CursorState(self.shape.start_position))
        self.dispatcher = Dispatcher(self.shape, self.cursor, policy_of(type_))
        self.items = {
            position: Item(position, count, slots=(compute_key_slot(f"k{position.entry_id % keys}"),))
            for position in positions_of(self.shape)
        }
        self.next_id = 1

    def join(self, permits: int = 0) -> Member:
        member = Member(self.next_id, f"c{self.next_id}")
        self.next_id += 1
        self.dispatcher.join(member)
        self.dispatcher.grant_permits(member, permits)
        return member

    def pump(self) -> tuple[list[Delivery], Blocked]:
        given: list[Delivery] = []
        while not isinstance(want := self.dispatcher.choose_next_read(), Blocked):
            wanted = [want.position] if isinstance(want, PlannedRead) else want.positions
            given += self.dispatcher.assign_entries([self.items[each] for each in wanted])
            self.dispatcher.check()
        return given, want

    def ack(self, member: Member, *positions: Position) -> None:
        for position in positions or list(member.outstanding):
            self.cursor.ack(position)
            self.dispatcher.on_acked(member, position)

    def drain(self, members: list[Member]) -> None:
        """Everybody takes and acknowledges: the whole backlog is done in the end."""
        for _ in range(2 * len(self.items)):
            for member in members:
                self.dispatcher.grant_permits(member, max(0, 10 - member.permits))
            self.pump()
            for member in members:
                self.ack(member)
        assert self.cursor.mark == self.shape.last_position, "something is stuck"


def test_complaint_01_consumers_added_to_key_shared_leave_nothing_stuck() -> None:
    """#8115: partitions get stuck after adding Key_Shared consumers; only an unload helps."""
    desk = Desk(KEY_SHARED, 300, keys=50)
    members = [desk.join(permits=100)]
    desk.pump()
    for _ in range(4):
        members.append(desk.join(permits=30))
        desk.pump()
    assert desk.dispatcher.redelivery_entry_count > 0, "keys wait for their old consumer"
    desk.drain(members)


def test_complaint_02_a_rolling_restart_of_key_shared_consumers_stalls_nothing() -> None:
    """#10284: a rolling restart stalls about half the time."""
    for seed in range(10):
        rng, desk = random.Random(seed), Desk(KEY_SHARED, 400, keys=40)
        members = [desk.join(permits=20) for _ in range(4)]
        for place in range(4):
            desk.pump()
            for member in members:
                held = list(member.outstanding)
                desk.ack(member, *held[: rng.randrange(1 + len(held))] or held)
            desk.dispatcher.leave(members[place])
            desk.pump()
            members[place] = desk.join(permits=20)
        desk.drain(members)


def test_complaint_03_a_consumer_that_leaves_with_everything_unacknowledged_frees_its_keys() -> None:
    """#10167: still stuck after the first mend."""
    desk = Desk(KEY_SHARED, 100, keys=10)
    old = desk.join(permits=100)
    assert len(desk.pump()[0]) == 100
    new = desk.join(permits=100)
    assert desk.pump()[0] == []
    desk.dispatcher.leave(old)
    given, _ = desk.pump()
    assert [each.entry.position for each in given] == positions_of(desk.shape)
    assert {each.member for each in given} == {new}


def test_complaint_04_a_key_moves_when_its_last_message_is_acknowledged_and_not_before() -> None:
    """#14902: the same stalls, ended only by tracking what drains (PIP-379)."""
    desk = Desk(KEY_SHARED, 40, keys=4)
    old = desk.join(permits=20)
    desk.pump()
    new = desk.join(permits=100)
    desk.dispatcher.grant_permits(old, 100)
    desk.pump()
    moving = [position for position in positions_of(desk.shape)[20:] if position not in old.outstanding]
    assert moving
    held = [each for each in old.outstanding if desk.items[each].slots in {desk.items[one].slots for one in moving}]
    desk.ack(old, *held[:-1])
    before = set(new.outstanding)
    desk.pump()
    last = desk.items[held[-1]].slots
    assert not [each for each in set(new.outstanding) - before if desk.items[each].slots == last]
    desk.ack(old, held[-1])
    desk.pump()
    assert set(moving) <= set(new.outstanding)


def test_complaint_05_one_hot_key_holds_up_no_other() -> None:
    """#23999: one hot key plus batches by key stalls the subscription."""
    desk = Desk(KEY_SHARED, 60, keys=1, count=100)
    others = [position for position in positions_of(desk.shape) if position.entry_id >= 50]
    for number, position in enumerate(others):
        desk.items[position] = Item(position, 100, slots=(compute_key_slot(f"other {number}"),))
    members = [desk.join(permits=1) for _ in range(3)]
    (hot,) = {each.member for each in desk.pump()[0] if each.entry.position.entry_id < 50}
    for member in members:
        desk.dispatcher.grant_permits(member, 2000 if member is not hot else 0)
    desk.pump()
    for member in members:
        assert member is hot or all(position.entry_id >= 50 for position in member.outstanding)
    assert sum(len(member.outstanding) for member in members if member is not hot) > 0
    desk.drain(members)


def test_complaint_06_permits_below_zero_come_back_and_are_never_more_than_one_batch() -> None:
    """#24418: negative permits, and consumers that get nothing for ever."""
    desk = Desk(SHARED, 50, count=100)
    member = desk.join(permits=1)
    for _ in range(50):
        assert len(desk.pump()[0]) == 1
        assert -100 < member.permits <= 0
        desk.ack(member)
        desk.dispatcher.grant_permits(member, 100)
    assert desk.cursor.mark == desk.shape.last_position


def test_complaint_07_thirty_partitions_of_batches_are_drained_with_a_handful_of_permits() -> None:
    """#10813: Shared on 30 partitions is stuck, with negative permits."""
    for partition in range(30):
        desk = Desk(SHARED, 20, count=1 + partition * 7)
        members = [desk.join(permits=1) for _ in range(3)]
        for _ in range(60):
            given, why = desk.pump()
            for each in given:
                desk.ack(each.member, each.entry.position)
                desk.dispatcher.grant_permits(each.member, each.entry.count)
            if why is Blocked.CAUGHT_UP:
                break
        assert desk.cursor.mark == desk.shape.last_position
        assert all(member.permits == 1 for member in members)


def test_complaint_08_with_a_backlog_and_permits_something_is_always_wanted() -> None:
    """#14082: a backlog and permits are there, and nothing is dispatched. Here reads fail at random in between."""
    for seed in range(20):
        rng, desk = random.Random(seed), Desk(rng_type(seed), 100, keys=7)
        members = [desk.join(permits=5) for _ in range(2)]
        for _ in range(5000):
            want = desk.dispatcher.choose_next_read()
            if want is Blocked.CAUGHT_UP:
                break
            if isinstance(want, Blocked):
                for member in members:
                    desk.ack(member)
                    desk.dispatcher.grant_permits(member, max(0, 5 - member.permits))
                again = desk.dispatcher.choose_next_read()
                assert not isinstance(again, Blocked) or again is Blocked.CAUGHT_UP, again
            elif rng.random() < 0.5:  # else the read failed
                wanted = [want.position] if isinstance(want, PlannedRead) else want.positions[:1]
                desk.dispatcher.assign_entries([desk.items[each] for each in wanted])
        for member in members:
            desk.ack(member)
        assert desk.cursor.mark == desk.shape.last_position


def rng_type(seed: int) -> int:
    return KEY_SHARED if seed % 2 else SHARED
