"""The conformance test of a policy: a random walk of the dispatcher with the policy, compared with a model of what may
happen. For authors of policies (docs/design/extending.md):

    import random
    from magnetar.broker.subscription.core.policy_walk import walk_policy

    for seed in range(50):
        walk_policy(MyPolicy, random.Random(seed))        # AssertionError: the promise that is broken, in a sentence

Consumers join, crash, read, pause, acknowledge and give back, in any order. In each step the model checks what holds
for every type. An entry goes to a consumer of the subscription that has permits and reads. An entry is outstanding at
one consumer at most. No entry is delivered again after it was acknowledged. A policy in log order delivers in that
order, to one consumer at a time. The policy's own `check` holds. At the end all consumers read and acknowledge, and
everything must have been delivered. The rules of one type (which consumer is next) need a test of their own.
Guarding test: tests/broker/subscription/core/test_policy_walk.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import msgspec

from ....proto.names import Position, compute_key_slot
from ....proto.states import Blocked
from ...log.log_shape_core import LedgerSpan, LogShape
from .cursor import Cursor
from .cursor_state import CursorState
from .dispatch import TIME_AFTER_ALL_MS, Delivery, Dispatcher, PlannedRead
from .policy import DispatchPolicy, Member, SubscriptionOptions

T = TypeVar("T")
WALK_CONSUMERS_MAX = 4
WALK_ROUNDS_MAX = 10_000
"""Most rounds in which everything must have been delivered at the end."""


class RandomNumbers(Protocol):
    """The source of the random decisions of a walk. A `random.Random` with a seed implements it; the walk calls it."""

    def random(self) -> float: ...
    def choice(self, seq: Sequence[T], /) -> T: ...
    def randrange(self, stop: int, /) -> int: ...


class WalkEntry(msgspec.Struct, frozen=True):
    """An entry of the walk's log. It implements `DispatcherEntry`."""

    position: Position
    count: int
    slots: tuple[int, ...]
    size: int = 100
    deliver_at_ms: int = 0
    chunk_of: str = ""
    has_more_chunks: bool = False


class _Account:
    """What the model knows of a consumer."""

    __slots__ = ("held", "member", "permits")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.permits = 0
        self.held: dict[Position, int] = {}  # position → messages


def walk_policy(
    policy: type[DispatchPolicy], rng: RandomNumbers, steps: int = 400, options: SubscriptionOptions | None = None
) -> int:
    """Tests a policy by `steps` random steps, after which everything must be delivered. Returns the number of
    deliveries. Raises AssertionError when a promise is broken. `policy`: the class of the policy; `options`: the
    argument with which it is made; None: that of a topic without partitions, with defaults."""
    walk = _Walk(policy, rng, options or SubscriptionOptions("persistent://public/default/walk"))
    walk.run(steps)
    return walk.deliveries


class _Walk:
    def __init__(self, policy: type[DispatchPolicy], rng: RandomNumbers, options: SubscriptionOptions) -> None:
        self._rng = rng
        self._policy, self._options = policy, options
        self._shape = LogShape()
        self._shape.add(LedgerSpan(10, 0, open=True))
        self._cursor = Cursor(self._shape, CursorState(self._shape.start_position))
        self._dispatcher = Dispatcher(self._shape, self._cursor, policy(options))
        self._items: dict[Position, WalkEntry] = {}
        self._accounts: dict[int, _Account] = {}
        self._done: set[Position] = set()
        self._next_id = 1
        self.deliveries = 0

    def run(self, steps: int) -> None:
        actions = (
            *[self._grow] * 4, *[self._pump] * 8, *[self._flow] * 4, *[self._ack] * 6, *[self._give_back] * 2,
            self._join, self._leave, self._pause, self._read_on, self._ack_by_another,
        )  # fmt: skip
        for _ in range(steps):
            self._rng.choice(actions)()
            self._dispatcher.check()
            self._cursor.check()
        self._finish()

    # ------------------------------------------------------------------ steps
    def _grow(self) -> None:
        tail = self._shape.tail_span
        if self._rng.random() < 0.05:
            self._shape.close_last_ledger_span(tail.ledger_id, tail.last_entry, tail.end_index, tail.size, 0)
            tail = self._shape.add(LedgerSpan(tail.ledger_id + 10, tail.end_index, open=True))
        for _ in range(self._rng.choice((1, 2, 6))):
            count = self._rng.choice((1, 1, 3))
            tail.last_entry += 1
            tail.end_index += count
            position = Position(tail.ledger_id, tail.last_entry)
            self._items[position] = WalkEntry(position, count, (compute_key_slot(f"k{self._rng.randrange(5)}"),))

    def _join(self) -> None:
        if len(self._accounts) >= WALK_CONSUMERS_MAX:
            return
        member = Member(self._next_id, f"consumer-{self._next_id}")
        if not self._accounts:
            self._dispatcher.set_policy(self._policy(self._options))
        policy = self._dispatcher.policy
        if policy.why_incompatible(member) is not None or policy.why_refused(member) is not None:
            assert self._accounts, "the first consumer is refused"
            return
        self._next_id += 1
        self._dispatcher.join(member)
        self._accounts[member.id] = _Account(member)
        self._settle_holders()
        self._grant(self._accounts[member.id], self._rng.choice((0, 3, 10)))

    def _settle_holders(self) -> None:
        """A consumer that was active before may have lost what it held."""
        for account in self._accounts.values():
            account.held = {each: kept for each, kept in account.held.items() if each in account.member.outstanding}

    def _some(self) -> _Account | None:
        return self._rng.choice(list(self._accounts.values())) if self._accounts else None

    def _leave(self) -> None:
        if (account := self._some()) is not None:
            del self._accounts[account.member.id]
            self._dispatcher.leave(account.member)
            self._settle_holders()

    def _pause(self) -> None:
        if (account := self._some()) is not None:
            account.member.paused = True

    def _read_on(self) -> None:
        if (account := self._some()) is not None:
            account.member.paused = False

    def _flow(self) -> None:
        if (account := self._some()) is not None:
            self._grant(account, self._rng.choice((1, 4, 9)))

    def _grant(self, account: _Account, permits: int) -> None:
        account.permits += permits
        self._dispatcher.grant_permits(account.member, permits)

    def _ack(self) -> None:
        if (account := self._some()) is not None and account.held:
            self._acknowledge(account, self._rng.choice(list(account.held)))

    def _ack_by_another(self) -> None:
        if (account := self._some()) is not None and self._items:
            self._acknowledge(account, self._rng.choice(list(self._items)))

    def _acknowledge(self, account: _Account, position: Position) -> None:
        if self._cursor.ack(position):
            self._dispatcher.on_acked(account.member, position)
        self._done.add(position)
        for each in self._accounts.values():
            each.held.pop(position, None)

    def _give_back(self) -> None:
        if (account := self._some()) is not None and account.held:
            some = [each for each in account.held if self._rng.random() < 0.5]
            self._dispatcher.redeliver(account.member, some)
            for position in some:
                del account.held[position]

    # ------------------------------------------------------------------ delivering
    def _pump(self) -> None:
        for _ in range(500):
            if not self._dispatcher.policy.rebalance_slots(10):
                continue
            self._dispatcher.policy.take_active_changes()
            want = self._dispatcher.choose_next_read()
            if isinstance(want, Blocked):
                return
            positions = self._following(want.position) if isinstance(want, PlannedRead) else want.positions[:3]
            before = self._dispatcher.progress_marker
            for position in positions:
                for delivery in self._dispatcher.assign_entries([self._items[position]], TIME_AFTER_ALL_MS):
                    self._on_delivered(delivery)
            if self._dispatcher.progress_marker == before:
                return  # the policy said why, as in the pump
        raise AssertionError("the policy wants entries without end, and gives none to a consumer")

    def _following(self, first: Position) -> list[Position]:
        last = first.entry_id + self._rng.choice((1, 2, 5))
        found = (Position(first.ledger_id, each) for each in range(first.entry_id, last))
        return [each for each in found if each in self._items]

    def _on_delivered(self, delivery: Delivery) -> None:
        position = delivery.entry.position
        account = self._accounts.get(delivery.member.id)
        assert account is not None, f"{position} goes to a consumer that is not connected"
        assert position not in self._done, f"{position} was acknowledged, and comes again"
        holders = [each.member.name for each in self._accounts.values() if position in each.held]
        assert not holders, f"{position} has the holder {holders[0]}, and goes to {account.member.name}"
        assert account.permits > 0, f"{position} goes to {account.member.name}, which has no permits"
        assert not account.member.paused, f"{position} goes to {account.member.name}, which does not read"
        if not self._dispatcher.policy.individual:
            first = next(each for each in self._items if each not in self._done and not self._is_held(each))
            assert position == first, f"{position} comes before {first}, and the policy promises the order of the log"
            others = [each for each in self._accounts.values() if each is not account and each.held]
            assert not others, f"{position} goes to {account.member.name} while {others[0].member.name} holds some"
        account.permits -= delivery.entry.count
        account.held[position] = delivery.entry.count
        self.deliveries += 1

    def _is_held(self, position: Position) -> bool:
        return any(position in each.held for each in self._accounts.values())

    # ------------------------------------------------------------------ the end
    def _finish(self) -> None:
        """All consumers read and acknowledge. Everything must go out."""
        if not self._accounts:
            self._join()
        for _ in range(WALK_ROUNDS_MAX):
            if all(each in self._done for each in self._items):
                break
            for account in self._accounts.values():
                account.member.paused = False
                self._grant(account, max(0, 5 - account.permits))
            self._pump()
            for account in list(self._accounts.values()):
                for position in list(account.held):
                    self._acknowledge(account, position)
        self._dispatcher.check()
        left = [each for each in self._items if each not in self._done]
        assert not left, f"never delivered: {left[:3]}; {self._dispatcher.choose_next_read()!s}"
        assert self._dispatcher.redelivery_entry_count == 0, "something waits with the policy that is acknowledged"
