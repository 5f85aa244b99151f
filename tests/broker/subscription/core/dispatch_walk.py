"""A random walk through everything that can happen to a dispatcher, beside a model that knows what may happen.

The model keeps its own account (who holds what, what is acknowledged, permits, counts, who owns a slot: computed
anew, naively), and looks at each delivery and at each moment at which the dispatcher says that nobody can get anything.
No event loop, no clock: some thousand steps a second. A seed gives the same walk again.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import pytest
from msgspec.structs import replace
from pyroaring import BitMap

from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.log.log_shape_core import LedgerSpan, LogShape
from magnetar.broker.subscription.acks import TransactionalAcks
from magnetar.broker.subscription.core.cursor import Cursor
from magnetar.broker.subscription.core.cursor_state import CursorState, TxnAcks, bits_of_indexes
from magnetar.broker.subscription.core.delays import DelayIndex
from magnetar.broker.subscription.core.dispatch import (
    NO_DISPATCH_LIMITS,
    Delivery,
    Dispatcher,
    DispatchLimits,
    PlannedRead,
)
from magnetar.broker.subscription.core.fair_shared import FairShared
from magnetar.broker.subscription.core.in_log_order import KeySharedOptions, to_key_shared_options
from magnetar.broker.subscription.core.key_shared import KeyShared
from magnetar.broker.subscription.core.pending_acks import entries_of_aborted_acks, find_first_redelivered_entry
from magnetar.broker.subscription.core.policy import CAUGHT_UP_REASONS, KeyLimits, Member, SubscriptionOptions
from magnetar.broker.subscription.core.subscription_types import find_subscription_type
from magnetar.broker.subscription.filtering import SubscriptionFilter
from magnetar.broker.subscription.pump import RedeliveryReturnQueue
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import TransactionConflict
from magnetar.proto.filters import parse_filter
from magnetar.proto.names import STICKY_SLOTS, Position, compute_key_slot
from magnetar.proto.states import AckedEntry, Blocked, TxnId
from tests.broker.subscription.core.shapes import Item

EXCLUSIVE, SHARED = wire.Subscribe.EXCLUSIVE, wire.Subscribe.SHARED
FAILOVER, KEY_SHARED = wire.Subscribe.FAILOVER, wire.Subscribe.KEY_SHARED
STICKY_RANGES = [((0, 20000),), ((20001, 40000), (60001, 65535)), ((40001, 60000),)]
NAMES = ["a", "b", "c"]


@dataclass
class Account:
    """What the model knows of a consumer."""

    member: Member
    permits: int = 0
    held: dict[Position, int] = field(default_factory=dict)  # position → messages not acknowledged
    blocked: bool = False
    reads: bool = True
    unshown: dict[Position, set[int]] = field(default_factory=dict)  # pending when it was delivered
    must_restart: bool = False  # an abort freed what comes before some that it had

    @property
    def unacked(self) -> int:
        return sum(self.held.values())


class WalkFilter(SubscriptionFilter):
    """The filter of a subscription, without entries to judge: the walk says what is wanted."""

    def __init__(self, walk: "Walk") -> None:
        none = walk.unblock
        super().__init__(
            parse_filter("wanted"), walk.dispatcher, walk.acks, cast(Any, walk), wake=none, on_acked=none
        )  # fmt: skip
        self.walk = walk

    def _find_unwanted_bits(self, entry: Any, world: object) -> int | None:
        return None if self.walk.rng.random() < 0.05 else self.walk.unwanted[entry.position]


class Walk:
    def __init__(
        self, type_: int, seed: int, *, holds: bool = False, delays: bool = False, transactions: bool = False,
        ordered: bool = False, filters: bool = False, whole: bool = False, fair: KeyLimits | None = None,
    ) -> None:  # fmt: skip
        """`fair`: the keys of a Shared subscription take turns, within these limits.
        `ordered`: what fails holds back what follows it; `holds`: entries are held back by a policy of the server
        too; `delays`: some have a time of delivery;
        `transactions`: some are acknowledged in one; `filters`: the subscription has a filter; `whole`: some consumers
        acknowledge whole entries alone.
        """
        self.filters, self.whole = filters, whole
        self.unwanted: dict[Position, int] = {}  # messages, as bits
        self.looked_up_to = Position(-1, -1)
        self.transactions = transactions
        self.ordered = ordered
        self.failed: set[Position] = set()
        self.in_txn: dict[TxnId, dict[Position, set[int]]] = {}  # messages that are pending
        self.cumulative: TxnId | None = None
        self.holds, self.delays = holds, delays and type_ in (SHARED, KEY_SHARED)
        self.now_ms = 1000
        self.rng = rng = random.Random(f"{type_} {seed}")
        self.type = type_
        self.individual = type_ in (SHARED, KEY_SHARED)
        self.shape = LogShape()
        self.shape.add(LedgerSpan(10, 0, open=True))
        self.items: dict[Position, Item] = {}
        self.keys = rng.choice([1, 3, 8, 40])
        self.mixed = rng.choice([0.0, 0.0, 0.2])
        self.keyless = rng.choice([0.0, 0.1])
        partition = rng.choice([-1, 0, 1, 5])
        self.asked = KeySharedOptions(rng.random() < 0.25, rng.random() < 0.15 and not ordered)
        config = BrokerConfig(
            key_shared_hash_ranges=rng.random() < 0.4, key_shared_waiting_bytes=rng.choice([1 << 20, 1 << 20, 2000])
        )
        self.options = SubscriptionOptions("t", partition, self.asked, config, fair)
        self.fair = fair
        self.paid: dict[int, list[tuple[float, int]]] = {}  # key → when it got how many messages
        self.limits = rng.choice(
            [NO_DISPATCH_LIMITS, DispatchLimits(6, 0), DispatchLimits(0, 9), DispatchLimits(7, 11)]
        )
        self.accounts: dict[int, Account] = {}
        self.next_id = 1
        self.acked: set[Position] = set()
        self.acked_indexes: dict[Position, set[int]] = {}
        self.counts: dict[Position, int] = {}
        self.held_back: set[Position] = set()
        self.full = False
        self.deliveries = 0
        self.begin(CursorState(self.shape.start_position))
        self.persist()

    def begin(self, state: CursorState) -> None:
        self.cursor = Cursor(self.shape, state)
        self.cursor.adapt_to_log_after_restart()
        self.paid = {}
        self.dispatcher = Dispatcher(
            self.shape, self.cursor, find_subscription_type(self.type).make_policy(self.options), limits=self.limits,
            delays=DelayIndex(self.shape, self.cursor) if self.delays else None,
        )  # fmt: skip
        self.acks = TransactionalAcks(self.shape, self.cursor, self.dispatcher)
        self.filtering = WalkFilter(self) if self.filters else None
        self.looked_up_to = Position(-1, -1)

    def monotonic(self) -> float:
        """The clock of the filter: no turn ever ends."""
        return 0.0

    # ------------------------------------------------------------------ one step
    def run(self, steps: int) -> None:
        actions = [
            (self.grow, 10), (self.pump, 25), (self.flow, 14), (self.ack, 22), (self.ack_part, 4), (self.ack_up_to, 2),
            (self.ack_many, 3),
            (self.nack, 6), (self.nack_all, 1), (self.join, 3), (self.leave, 2), (self.stop_reading, 2),
            (self.read_on, 4), (self.ack_by_another, 1), (self.feed_anything, 2), (self.seek, 0.3),
            (self.restart, 0.3), (self.persist, 1), (self.relimit, 0.3),
        ]  # fmt: skip
        if self.filters:
            actions = [each for each in actions if each[0] != self.feed_anything]  # the pump reads nothing unasked
        if self.holds:
            actions += [(self.hold_back, 3), (self.let_go, 3)]
        if self.delays:
            actions += [(self.pass_time, 4), (self.note, 2)]
        if self.fair is not None:
            actions += [(self.pass_time, 4), (self.change_limits, 0.3)]
        if self.transactions:
            actions += [
                (self.ack_in, 14), (self.ack_part_in, 6), (self.ack_up_to_in, 1), (self.ack_in_by_another, 1),
                (self.settle, 4), (self.expire, 0.3),
            ]  # fmt: skip
        chosen = self.rng.choices([each for each, _ in actions], [weight for _, weight in actions], k=steps)
        for number, action in enumerate(chosen):
            action()
            if number % 8 == 0:
                self.dispatcher.check()
                self.cursor.check()
                self.check_owners()
        self.heal()

    def check_owners(self) -> None:
        """Before the read position each entry that is neither acknowledged nor pending is in memory elsewhere: it is
        outstanding, waits, is held back, or is delayed. Its memory is of the order of that of the holes. A ledger
        without such entries is one run."""
        dispatcher = self.dispatcher
        out: set[Position] = set().union(*(each.outstanding for each in dispatcher.members.values()))
        for position, item in self.items.items():
            if position < dispatcher.read_position and not self.cursor.is_acked_or_pending(position):
                assert (
                    position in out or position in dispatcher.held or dispatcher.policy.is_entry_waiting(item)
                    or (dispatcher.delays is not None and dispatcher.delays.is_delayed(position))
                ), f"{position} is before the read position, and nothing delivers it again"  # fmt: skip

    def heal(self) -> None:
        """Everybody reads and acknowledges: all of the backlog goes out, in as many rounds as it takes."""
        if not self.accounts:
            self.join()
        for account in self.accounts.values():
            account.reads, account.member.paused = True, False
        if self.type == KEY_SHARED and self.asked.sticky:
            for _ in range(3):
                self.join()
        while self.held_back:
            self.let_go()
        self.pass_time(1 << 30)
        while self.in_txn:
            self.settle()
        for _ in range(10_000):
            if not any(account.held for account in self.accounts.values()) and not any(self.each_pending()):
                break
            for account in self.accounts.values():
                self.grant(account, max(0, 5 - account.permits))
            if self.fair is not None:
                self.pass_time(100)
            self.pump(sure=True)
            for account in list(self.accounts.values()):
                for position in list(account.held):
                    self.ack_entry(account, position)
        self.dispatcher.check()
        assert not self.pending(), f"never delivered: {self.pending()[:5]}, {self.dispatcher.choose_next_read()}"
        assert self.cursor.mark == self.shape.last_position
        assert self.dispatcher.redelivery_entry_count == 0
        assert self.dispatcher.choose_next_read() in (*CAUGHT_UP_REASONS, Blocked.NO_PERMITS)

    # ------------------------------------------------------------------ the log
    def grow(self) -> None:
        rng, tail = self.rng, self.shape.tail_span
        if rng.random() < 0.05:
            self.shape.close_last_ledger_span(tail.ledger_id, tail.last_entry, tail.end_index, tail.size, 0)
            tail = self.shape.add(LedgerSpan(tail.ledger_id + 10, tail.end_index, open=True))
        for _ in range(rng.choice([1, 2, 6])):
            count = rng.choice([1, 1, 2, 5])
            tail.last_entry += 1
            tail.end_index += count
            position = Position(tail.ledger_id, tail.last_entry)
            at_ms = self.now_ms + rng.randrange(100) if self.delays and rng.random() < 0.3 else 0
            self.items[position] = Item(position, count, 100, self.slots(count), deliver_at_ms=at_ms)
            if self.filters:
                self.unwanted[position] = rng.choice([0, (1 << count) - 1, rng.randrange(1 << count)])

    def slots(self, count: int) -> tuple[int, ...]:
        rng = self.rng
        if rng.random() < self.keyless:
            return ()
        some = count + 1 if rng.random() < self.mixed else 1
        return tuple(dict.fromkeys(compute_key_slot(f"k{rng.randrange(self.keys)}") for _ in range(some)))

    def pass_time(self, ms: int = 0) -> None:
        self.now_ms += ms or self.rng.choice([1, 20, 60])
        delays = self.dispatcher.delays
        while delays is not None and (due := delays.take_due(self.now_ms, self.rng.choice([1, 5]))):
            self.dispatcher.add_due_entries(due)

    def note(self) -> None:
        """The newest entry is held back before anybody has read it."""
        position, delays = self.shape.last_position, self.dispatcher.delays
        item = self.items.get(position)
        if delays is None or item is None or position in self.acked or self.dispatcher.read_position > position:
            return
        if item.deliver_at_ms > self.now_ms:
            delays.add_entry(position, item.deliver_at_ms)

    def pending(self) -> list[Position]:
        """Neither acknowledged nor held, nor held back, nor early, in log order."""
        return list(self.each_pending())

    def each_pending(self) -> Iterator[Position]:
        out = self.acked.union(self.held_back, *(account.held for account in self.accounts.values()))
        for position, item in self.items.items():
            if position not in out and item.deliver_at_ms <= self.now_ms and not self.is_acked_or_pending(position):
                yield position

    # ------------------------------------------------------------------ consumers
    def join(self) -> None:
        if len(self.accounts) >= 4:
            return
        rng, id_ = self.rng, self.next_id
        ranges: tuple[tuple[int, int], ...] = ()
        if self.asked.sticky and self.type == KEY_SHARED:
            taken = [to_key_shared_options(account.member.options).ranges for account in self.accounts.values()]
            ranges = next((each for each in STICKY_RANGES if each not in taken), STICKY_RANGES[0])
        member = Member(id_, rng.choice(NAMES), rng.choice([0, 0, 1]), rng.random() < 0.2)
        member.options = replace(self.asked, ranges=ranges)
        member.acks_by_index = not self.whole or rng.random() < 0.5
        if not self.accounts:
            policy = find_subscription_type(self.type).make_policy(self.options)
            self.dispatcher.set_policy(policy, ordered=self.ordered)
            self.paid = {}
            self.full = False
            self.failed.clear()
        if self.dispatcher.policy.why_refused(member) is not None:
            assert (self.type == EXCLUSIVE and self.accounts) or len(self.accounts) == 3
            return
        self.next_id += 1
        before = self.active()
        self.dispatcher.join(member)
        account = self.accounts[id_] = Account(member)
        if self.type == FAILOVER and before is not None and self.active() is not before:
            before.held.clear()
        self.grant(account, rng.choice([0, 3, 10]))

    def leave(self) -> None:
        """A crash, or a close: the broker sees the same."""
        if self.accounts:
            account = self.accounts.pop(self.some_id())
            self.dispatcher.leave(account.member)
            self.unblock()

    def some_id(self) -> int:
        return self.rng.choice(sorted(self.accounts))

    def stop_reading(self) -> None:
        if self.accounts:
            account = self.accounts[self.some_id()]
            account.reads, account.member.paused = False, True

    def read_on(self) -> None:
        if self.accounts:
            account = self.accounts[self.some_id()]
            account.reads, account.member.paused = True, False

    def flow(self) -> None:
        if self.accounts:
            self.grant(self.accounts[self.some_id()], self.rng.choice([1, 4, 9]))

    def grant(self, account: Account, permits: int) -> None:
        account.permits += permits
        self.dispatcher.grant_permits(account.member, permits)

    # ------------------------------------------------------------------ what consumers do
    def some_held(self) -> tuple[Account, Position] | None:
        holders = [account for _, account in sorted(self.accounts.items()) if account.held]
        if not holders:
            return None
        account = self.rng.choice(holders)
        return account, self.rng.choice(list(account.held))

    def ack(self) -> None:
        if found := self.some_held():
            self.ack_entry(*found)

    def ack_entry(self, account: Account | None, position: Position) -> None:
        if self.transactions:
            self.ack_beside_transactions(account, position)
            return
        if self.cursor.ack(position):
            self.dispatcher.on_acked(account.member if account else None, position)
        self.done(position)

    def ack_by_another(self) -> None:
        """Somebody acknowledges what he does not hold: what another has, or what waits."""
        if self.items:
            position = self.rng.choice(list(self.items))
            self.ack_entry(self.accounts[self.some_id()] if self.accounts else None, position)

    def ack_many(self) -> None:
        """In one request: of one ledger, most of them held by the one who says so."""
        if found := self.some_held():
            account, (ledger_id, _) = found
            several = {each[1] for each in [*account.held][:4] if each[0] == ledger_id}
            several |= {each[1] for each in self.rng.sample(list(self.items), 1) if each[0] == ledger_id}
            if self.transactions:
                self.ack_set_beside_transactions(account, ledger_id, several)
                return
            done = self.cursor.ack_entries_of_ledger(ledger_id, BitMap(several))
            self.dispatcher.on_entries_acked(account.member, ledger_id, done)
            for entry_id in several:
                self.done(Position(ledger_id, entry_id))

    def ack_part(self) -> None:
        found = self.some_held()
        if found is None or self.items[found[1]].count == 1:
            return
        account, position = found
        if self.transactions:
            self.ack_part_beside_transactions(account, position)
            return
        count, before = self.items[position].count, self.acked_indexes.setdefault(position, set())
        index, known = self.rng.randrange(count), len(before)
        if index not in before:
            before.add(index)
            self.count_anew(position, index)
        if self.cursor.ack_messages_of_batch(
            position, bits_of_indexes([index]), account.held[position] if not known else 0
        ):
            self.dispatcher.on_acked(account.member, position)
        else:
            self.dispatcher.on_messages_acked(account.member, position, len(before) - known)
        if len(before) == count:
            self.done(position)
        elif len(before) > known:
            account.held[position] -= 1
            self.unblock()

    def count_anew(self, position: Position, index: int) -> None:
        """In order, a count is that of the first message that is left: this one is not any more, if it was."""
        if self.ordered and all(each in self.acked_indexes[position] for each in range(index)):
            self.counts.pop(position, None)

    def ack_up_to(self) -> None:
        found = self.some_held()
        if found is None or self.individual:
            return
        mark = found[1]
        if any(position <= mark for position in self.pending_positions()):
            with pytest.raises(TransactionConflict):
                self.acks.ack_cumulative(found[0].member, AckedEntry(mark))
            return
        self.cursor.ack_cumulative(mark)
        self.dispatcher.on_acked_up_to(self.cursor.mark)
        for position in [each for each in self.items if each <= mark]:
            self.done(position)

    def done(self, position: Position) -> None:
        self.acked.add(position)
        self.acked_indexes.pop(position, None)
        self.counts.pop(position, None)
        self.held_back.discard(position)
        self.failed.discard(position)
        for account in self.accounts.values():
            account.held.pop(position, None)
        self.unblock()

    # ------------------------------------------------------------------ what fails holds back what follows it
    def follows(self, position: Position, first: Position) -> bool:
        """By the words of the contract: everything, or what has one of its keys."""
        if position <= first or self.type == SHARED:
            return False
        return not self.individual or bool({*self.items[position].slots} & {*self.items[first].slots})

    def fails(self, account: Account, positions: list[Position]) -> list[Position]:
        """What is outstanding after each of them comes back with it."""
        if not self.ordered:
            return positions
        failed = self.dispatcher.mark_entries_failed(account.member, positions)
        assert failed == self.note_failed(account, positions), "what failed is not what was given back first"
        return failed

    def note_failed(self, account: Account, positions: list[Position]) -> list[Position]:
        expected: list[Position] = []
        for position in sorted(positions):
            if position not in account.held:
                continue
            expected.append(position)
            self.failed.add(position)
            for each in self.accounts.values():
                each.held = {key: held for key, held in each.held.items() if not self.follows(key, position)}
        self.unblock()
        return expected

    def nack(self) -> None:
        if found := self.some_held():
            account, position = found
            nonsense = [each for each in self.items if each not in account.held][:2]
            self.fails(account, [position, *nonsense])
            self.dispatcher.redeliver(account.member, [position, *nonsense])
            self.give_back(account, [position])

    def hold_back(self) -> None:
        """Given back, to come later: a policy of the server."""
        if (found := self.some_held()) and (self.individual or self.ordered):
            account, position = found
            self.fails(account, [position])
            self.cursor.count_redelivery(position)
            self.dispatcher.held.add(position, None)
            self.held_back.add(position)
            self.dispatcher.redeliver(account.member, [position], counted=False)
            self.give_back(account, [position])

    def let_go(self) -> None:
        if self.held_back:
            position = self.rng.choice(sorted(self.held_back))
            self.held_back.discard(position)
            self.dispatcher.held.discard(position)
            self.dispatcher.add_released_entries([position])

    def nack_all(self) -> None:
        if self.accounts:
            account = self.accounts[self.some_id()]
            self.fails(account, list(account.held))
            account.must_restart = account.member.must_restart = False  # as Subscription.redeliver does
            self.dispatcher.redeliver(account.member, None)
            self.give_back(account, list(account.held))

    def give_back(self, account: Account, positions: list[Position]) -> None:
        for position in positions:
            del account.held[position]
            self.counts[position] = self.counts.get(position, 0) + 1
        self.unblock()

    # ------------------------------------------------------------------ transactions
    def pending_at(self, position: Position) -> set[int]:
        return set().union(*[own[position] for own in self.in_txn.values() if position in own])

    def pending_positions(self) -> set[Position]:
        return {position for own in self.in_txn.values() for position in own}

    def is_acked_or_pending(self, position: Position) -> bool:
        if position in self.acked:
            return True
        done = self.pending_at(position).union(self.acked_indexes.get(position, ()))
        return len(done) == self.items[position].count

    def meant(self, account: Account | None, position: Position) -> set[int] | None:
        """The messages that a consumer means by a whole entry; None: all, whether it was shown them or not."""
        if account is None:
            return None
        everything, unshown = set(range(self.items[position].count)), account.unshown.get(position, set())
        hidden = self.acked_indexes.get(position, set()) | self.pending_at(position)
        if not hidden and not unshown:
            return None
        left = everything - hidden - unshown
        if position in account.held and (account.held[position] == len(left) or not account.member.acks_by_index):
            return left
        return everything - unshown if unshown else None

    def plain(self, account: Account | None, position: Position, indexes: set[int]) -> None:
        """The model: those of the messages that are free are acknowledged."""
        item, pending = self.items[position], self.pending_at(position)
        if position in self.acked:
            return
        done = self.acked_indexes.setdefault(position, set())
        new = indexes - pending - done
        for index in sorted(new):
            done.add(index)
            self.count_anew(position, index)
        if len(done) == item.count:
            self.done(position)
        elif self.is_acked_or_pending(position):
            self.out_of_hands(position)
        else:
            self.less(account, position, len(new))
        if not self.acked_indexes.get(position, {0}):
            del self.acked_indexes[position]

    def less(self, account: Account | None, position: Position, messages: int) -> None:
        if account is not None and position in account.held:
            account.held[position] -= min(messages, account.held[position])
            if not account.held[position]:
                del account.held[position]
            self.unblock()

    def out_of_hands(self, position: Position) -> None:
        self.held_back.discard(position)
        self.failed.discard(position)
        for each in self.accounts.values():
            each.held.pop(position, None)
        self.unblock()

    def ack_beside_transactions(self, account: Account | None, position: Position) -> None:
        member = account.member if account is not None else None
        meant, pending = self.meant(account, position), self.pending_at(position)
        wanted = meant if meant is not None else set(range(self.items[position].count))
        refused = bool(pending & wanted) and position not in self.acked
        try:
            self.acks.ack(member, [AckedEntry(position)])
        except TransactionConflict:
            assert refused, f"{position} is not pending, and was refused"
        else:
            assert not refused, f"{position} is pending, and was acknowledged"
        self.plain(account, position, wanted)

    def ack_set_beside_transactions(self, account: Account, ledger_id: int, several: set[int]) -> None:
        refused = False
        meant = {Position(ledger_id, each): self.meant(account, Position(ledger_id, each)) for each in several}
        for position, indexes in meant.items():
            wanted = indexes if indexes is not None else set(range(self.items[position].count))
            refused |= bool(self.pending_at(position) & wanted) and position not in self.acked
        try:
            self.acks.ack_entries_of_ledger(account.member, ledger_id, BitMap(several).serialize())
        except TransactionConflict:
            assert refused
        else:
            assert not refused
        for position, indexes in meant.items():
            self.plain(account, position, indexes if indexes is not None else set(range(self.items[position].count)))

    def ack_part_beside_transactions(self, account: Account, position: Position) -> None:
        index = self.rng.randrange(self.items[position].count)
        refused = index in self.pending_at(position)
        try:
            self.acks.ack(account.member, [AckedEntry(position, 1 << index)])
        except TransactionConflict:
            assert refused
        else:
            assert not refused
        self.plain(account, position, {index})

    def some_txn(self) -> TxnId:
        return TxnId(0, self.rng.randrange(3))

    def ack_in(self) -> None:
        """One that it holds, as it was shown: that is always taken, unless another one has acknowledged of it."""
        if found := self.some_held():
            account, position = found
            rest = self.rng.random() < 0.5
            meant = self.meant(account, position) if rest else None
            sure = meant is None or account.held[position] == len(meant)
            hidden = self.acked_indexes.get(position, set()) | self.pending_at(position)
            self.pend(account, position, meant, sure=sure and not (meant is None and hidden), rest=rest)

    def ack_in_by_another(self) -> None:
        if self.items and self.accounts:
            account, position = self.accounts[self.some_id()], self.rng.choice(list(self.items))
            rest = self.rng.random() < 0.5
            self.pend(account, position, self.meant(account, position) if rest else None, sure=False, rest=rest)

    def ack_part_in(self) -> None:
        if (found := self.some_held()) and self.items[found[1]].count > 1:
            account, position = found
            index = self.rng.randrange(self.items[position].count)
            busy = index in self.acked_indexes.get(position, set()) | self.pending_at(position)
            self.pend(account, position, {index}, sure=not busy, bits=1 << index, rest=self.rng.random() < 0.5)

    def pend(
        self, account: Account, position: Position, indexes: set[int] | None, *, sure: bool, bits: int = 0,
        rest: bool = False,
    ) -> None:  # fmt: skip
        txn, wanted = self.some_txn(), TxnAcks()
        own = self.in_txn.get(txn, {}).get(position, set())
        everything = set(range(self.items[position].count))
        asked = indexes if indexes is not None else everything
        taken = self.acked_indexes.get(position, set()) | (self.pending_at(position) - own)
        twice = rest and bool(own & asked if bits else own and self.is_acked_or_pending(position))
        wanted.add(position, bits)
        try:
            self.acks.add_pending_acks(account.member, txn, wanted, None, 1 << 60, rest=rest)
        except TransactionConflict:
            assert not sure, f"{position} is free, and was refused"
            assert asked & taken or position in self.acked or twice, f"{position} was refused without a reason"
            return
        assert not twice, f"{position} was taken twice in one transaction"
        assert position not in self.acked, f"{position} is acknowledged, and was taken"
        if asked & taken:
            assert own, f"{position} was taken twice"
            assert self.is_acked_or_pending(position)
            return
        new = asked - own
        if new:
            self.in_txn.setdefault(txn, {}).setdefault(position, set()).update(new)
        if self.is_acked_or_pending(position):
            self.out_of_hands(position)
        else:
            self.less(account, position, len(new))

    def ack_up_to_in(self) -> None:
        if self.individual or not (found := self.some_held()):
            return
        account, mark = found
        txn = self.some_txn()
        others = {each for other, own in self.in_txn.items() if other != txn for each in own}
        free = self.cumulative in (None, txn) and not any(each <= mark for each in others)
        free = free and not account.must_restart
        try:
            self.acks.add_pending_acks(account.member, txn, TxnAcks(), AckedEntry(mark), 1 << 60)
        except TransactionConflict:
            assert not free, "nothing of it is in another transaction, and it was refused"
            return
        assert free
        self.cumulative, own = txn, self.in_txn.setdefault(txn, {})
        for position in [each for each in self.items if each <= mark and each not in self.acked]:
            own[position] = set(range(self.items[position].count)) - self.acked_indexes.get(position, set())
            self.out_of_hands(position)

    def settle(self) -> None:
        txn, committed = self.some_txn(), self.rng.random() < 0.5
        own = self.in_txn.pop(txn, {})
        first = min(own, default=None)
        if self.cumulative == txn:
            self.cumulative = None
        settled = self.acks.settle(txn, committed=committed)
        assert (settled is not None) == bool(own)
        if settled is None or first is None:
            return
        if committed:
            for position, indexes in own.items():
                self.plain(None, position, indexes)
            return
        assert find_first_redelivered_entry(self.cursor, settled.acks) == first
        if not self.individual:
            self.dispatcher.move_read_position_back(first)
            for account in self.accounts.values():
                account.must_restart |= any(each >= first for each in account.held)
                account.held = {each: held for each, held in account.held.items() if each < first}
            self.unblock()
        returns = RedeliveryReturnQueue(self.dispatcher, lambda: None, None)  # type: ignore[arg-type]
        returns.add_batches_of_aborted_acks(sorted(settled.shown))
        for position in sorted(settled.shown) if self.ordered else ():
            for account in self.accounts.values():
                self.note_failed(account, [position])
        for account in self.accounts.values():
            account.held = {each: held for each, held in account.held.items() if each not in own}
        self.unblock()
        returns.add_entries_of_aborted_acks(entries_of_aborted_acks(self.cursor, settled, tail=not self.individual))
        returns.return_all_entries()
        for position in own:
            self.counts[position] = self.counts.get(position, 0) + 1

    def expire(self) -> None:
        """As the time to live does it: what is pending stays so."""
        if not self.items:
            return
        mark = self.rng.choice(list(self.items))
        self.acks.skip_up_to(mark)
        for position in [each for each in self.items if each <= mark]:
            self.plain(None, position, set(range(self.items[position].count)))

    # ------------------------------------------------------------------ what the broker does
    def persist(self) -> None:
        parts = {position: set(indexes) for position, indexes in self.acked_indexes.items()}
        in_txn = {txn: {each: set(some) for each, some in own.items()} for txn, own in self.in_txn.items()}
        self.persisted = (
            self.cursor.copy_cursor_state(), set(self.acked), parts, dict(self.counts), in_txn, self.cumulative
        )

    def restart(self) -> None:
        """A crash, or a move to another broker: only the stored cursor is left."""
        state, acked, parts, counts, in_txn, self.cumulative = self.persisted
        self.in_txn = {txn: {each: set(some) for each, some in own.items()} for txn, own in in_txn.items()}
        self.acked, self.acked_indexes = set(acked), {position: set(each) for position, each in parts.items()}
        self.begin(state)
        self.full = False
        self.held_back.clear()
        self.failed.clear()
        self.counts = dict(counts)
        self.accounts.clear()
        self.persist()

    def seek(self) -> None:
        kept = list(self.accounts.values())[:1]
        for account in list(self.accounts.values())[1:]:
            self.dispatcher.leave(account.member)
            del self.accounts[account.member.id]
        mark = self.rng.choice([self.shape.start_position, self.shape.last_position, *self.items])
        self.cursor.seek(mark)
        if self.filtering is not None:
            self.filtering.restart_judging(compacted=False)
            self.looked_up_to = Position(-1, -1)
        self.dispatcher.restart_delivery_after_mark()
        for account in kept:
            account.held.clear()
            account.unshown.clear()
            account.blocked = account.must_restart = False
        self.in_txn.clear()
        self.cumulative = None
        self.forget()
        self.acked = {position for position in self.items if position <= mark}
        self.acked_indexes.clear()
        self.persist()

    def forget(self) -> None:
        self.counts.clear()
        self.held_back.clear()
        self.failed.clear()
        self.full = False

    def relimit(self) -> None:
        self.limits = self.rng.choice([NO_DISPATCH_LIMITS, DispatchLimits(5, 0), DispatchLimits(4, 8)])
        self.dispatcher.set_unacked_limits(self.limits)
        for account in self.accounts.values():
            account.blocked = False
        self.full = False
        self.block()

    def block(self) -> None:
        if self.individual:
            consumer, subscription = self.limits
            for account in self.accounts.values():
                account.blocked |= 0 < consumer <= account.unacked
            self.full |= 0 < subscription <= sum(account.unacked for account in self.accounts.values())

    def unblock(self) -> None:
        consumer, subscription = self.limits
        for account in self.accounts.values():
            account.blocked &= account.unacked > consumer // 2
        self.full &= sum(account.unacked for account in self.accounts.values()) > subscription // 2

    # ------------------------------------------------------------------ handing out
    def pump(self, *, sure: bool = False) -> None:
        """As the driver does it; not `sure`: reading may fail, or end early."""
        rng = self.rng
        if rng.random() < 0.3 and not self.dispatcher.policy.rebalance_slots(rng.choice([1, 2])) and not sure:
            return  # the rest in another turn
        for _ in range(500):
            self.tell_time()
            want = self.dispatcher.choose_next_read()
            if isinstance(want, Blocked):
                self.nobody_could(want)
                return
            if not sure and rng.random() < 0.05:
                return  # the bookies do not answer; it is tried again later
            before = self.dispatcher.progress_marker
            entries = self.read(want.position) if isinstance(want, PlannedRead) else self.again(want.positions)
            if self.filtering is not None:
                judged, entries = self.filter(self.filtering, entries, new=isinstance(want, PlannedRead))
                if not judged:
                    continue  # the first one is judged in a thread
                if not entries:
                    continue
            self.hand(entries)
            progress = self.dispatcher.progress_marker != before
            assert progress or self.dispatcher.why_blocked(), f"{want}, and nothing came of it"
        raise AssertionError("the dispatcher wants without end")

    def read(self, position: Position) -> list[Item]:
        entries = range(position.entry_id, position.entry_id + self.rng.choice([1, 2, 5]))
        return [self.items[each] for id_ in entries if (each := Position(position.ledger_id, id_)) in self.items]

    def again(self, positions: tuple[Position, ...]) -> list[Item]:
        assert list(positions) == sorted(positions), "what is read again is asked for in log order"
        if self.rng.random() < 0.5 and not self.filters:
            return self.read(positions[0])
        return [self.items[each] for each in positions[: self.rng.choice([1, 3, 100])]]

    def filter(self, filtering: SubscriptionFilter, entries: list[Item], *, new: bool) -> tuple[int, list[Item]]:
        """What is not wanted is acknowledged, in the model as in the cursor, before anybody gets it."""
        by_index = all(account.member.acks_by_index for account in self.accounts.values())
        acked = set(self.acked)
        judged, left = filtering.select_wanted_entries(cast(Any, entries), cast(Any, None), float("inf"), new=new)
        for item in entries[:judged]:
            position, bits = item.position, self.unwanted[item.position]
            everything = (1 << item.count) - 1
            looks = position > self.looked_up_to if new else item.deliver_at_ms > 0
            if not looks or position in acked:
                continue
            if bits == everything and any(self.pending_at(position)):
                pass  # of an entry that is pending in part nothing is acknowledged
            elif bits == everything or by_index:
                self.plain(None, position, {index for index in range(item.count) if bits >> index & 1})
        if new and judged:
            self.looked_up_to = max(self.looked_up_to, entries[judged - 1].position)
        return judged, [self.items[each.position] for each in left]

    def feed_anything(self) -> None:
        """What was read for a place at which the dispatcher is no longer, or twice: it must not matter."""
        if self.items:
            self.tell_time()
            self.hand(self.read(self.rng.choice(list(self.items))))

    def tell_time(self) -> None:
        if self.dispatcher.policy.paced:
            self.dispatcher.policy.advance_clock(self.now_ms / 1024)

    def hand(self, entries: list[Item]) -> list[Delivery]:
        given = []
        for entry in entries:  # one by one, so that the model sees each as it is
            for delivery in self.dispatcher.assign_entries([entry], self.now_ms):
                self.delivered(delivery)
                given.append(delivery)
        return given

    # ------------------------------------------------------------------ the promises
    def delivered(self, delivery: Delivery) -> None:
        item = self.items[delivery.entry.position]
        position = item.position
        account = self.accounts[delivery.member.id]
        assert position not in self.held_back, f"{position} comes before it was let go"
        assert item.deliver_at_ms <= self.now_ms, f"{position} comes before its time"
        assert not self.is_acked_or_pending(position), f"{position} was acknowledged, or is pending, and comes again"
        assert not any(position in each.held for each in self.accounts.values()), f"{position} has two holders"
        assert account.permits > 0, "sent without a permit"
        assert account.reads, "sent to one that does not read"
        assert not account.blocked, "sent beyond the consumer's limit of unacknowledged messages"
        assert not self.full, "sent beyond the subscription's limit of unacknowledged messages"
        pending = self.pending_at(position)
        hidden = self.acked_indexes.get(position, set()) if account.member.acks_by_index else set[int]()
        assert set(delivery.acked_indexes) == hidden | pending
        if self.filters:
            assert self.unwanted[position] != (1 << item.count) - 1 or self.transactions, "nothing of it is wanted"
        assert len(delivery.acked_indexes) < item.count, "nothing of it is left to be shown"
        late = [each for each in self.failed if self.follows(position, each)]
        assert not late, f"{position} comes although {late[0]} before it failed and is not done"
        account.unshown.pop(position, None)
        if pending:
            account.unshown[position] = pending
        assert delivery.redelivery_count == self.counts.get(position, 0)
        if self.type in (EXCLUSIVE, FAILOVER):
            assert account is self.active(), "sent to one that is not active"
            first = next(self.each_pending())
            assert first == position, f"{position} came before {first}"
        elif self.type == SHARED:
            better = [each for each in self.able() if each.member.priority < account.member.priority]
            assert not better, "a better consumer could have taken it"
            if self.fair is not None:
                assert self.may_go(item), f"{position} passes the limits of its key"
                self.paid.setdefault(key_of(item), []).append((self.now_ms / 1024, item.count))
        elif item.slots:
            assert account is self.target(item, self.each_pending()), f"{position} does not belong to this consumer now"
        shown = item.count - len(delivery.acked_indexes)
        account.permits -= shown
        account.held[position] = shown
        self.block()
        self.deliveries += 1
        assert account.permits == account.member.permits > -item.count, "permits are counted wrong"

    def nobody_could(self, why: Blocked) -> None:
        """The dispatcher says that nothing can go out now: nothing could."""
        able = self.able()
        if not able or self.full or not (pending := self.pending()):
            return
        policy = self.dispatcher.policy
        if self.type in (EXCLUSIVE, FAILOVER):
            if any(self.follows(pending[0], each) for each in self.failed):
                return
            assert self.active() not in able, f"{pending[0]} could go out, {why}"
        elif self.fair is not None:
            seen = [each for each in pending if not policy.is_full or each < self.dispatcher.read_position]
            free = [each for each in seen if self.may_go(self.items[each])]
            assert not free, f"{free[0]} could go out, {why}"
        elif self.type == SHARED:
            raise AssertionError(f"{pending[0]} could go out, {why}")
        else:
            for position in pending:
                if policy.is_full and position >= self.dispatcher.read_position:
                    assert why is Blocked.KEYS_BUSY
                    break
                item = self.items[position]
                target = self.target(item, pending) if item.slots else able[0]
                assert target not in able, f"{position} could go out, {why}"

    def may_go(self, item: Item) -> bool:
        """By the words of the contract: less in flight than the key may have, and at no time more than its rate."""
        assert self.fair is not None
        key, limits = key_of(item), self.fair
        if limits.max_in_flight:
            held = [self.items[each] for account in self.accounts.values() for each in account.held]
            if limits.max_in_flight <= sum(each.count for each in held if key_of(each) == key):
                return False
        paid, now = self.paid.get(key, []), self.now_ms / 1024
        return not limits.rate or all(
            at + sum(count for _, count in paid[place:]) / limits.rate <= now + 1 for place, (at, _) in enumerate(paid)
        )

    def change_limits(self) -> None:
        """While consumers are connected. (The model of a rate is that of one rate.)"""
        assert self.fair is not None
        policy = self.dispatcher.policy
        if isinstance(policy, FairShared):
            self.fair = KeyLimits(self.rng.choice([0, 1, 4]), self.fair.rate)
            policy.set_key_limits(self.fair)
            self.options = replace(self.options, key_limits=self.fair)

    def able(self) -> list[Account]:
        return [each for each in self.accounts.values() if each.permits > 0 and each.reads and not each.blocked]

    def active(self) -> Account | None:
        """Of Exclusive and Failover, by the words of the contract."""
        if self.type not in (EXCLUSIVE, FAILOVER) or not self.accounts:
            return None
        members = [account.member for account in self.accounts.values()]
        best = [member for member in members if member.priority == min(each.priority for each in members)]
        chosen = min(best, key=lambda member: member.id)
        if self.options.partition >= 0:
            by_name = sorted(best, key=lambda member: (member.name, member.id))
            chosen = by_name[self.options.partition % len(by_name)]
        elif any(member.many_topics for member in best):
            chosen = ring_owner(best, compute_key_slot(self.options.topic))
        return self.accounts[chosen.id]

    def target(self, item: Item, pending: Iterable[Position]) -> Account | None:
        """Whose an entry is by the rule of Key_Shared; None: it has to wait. `pending`: in log order."""
        if self.asked.out_of_order:
            return self.find_owner(item.slots[0])
        slots = set(item.slots)
        if any(self.follows(item.position, each) for each in self.failed):
            return None
        before = itertools.takewhile(lambda each: each < item.position, pending)
        if any(not slots.isdisjoint(self.items[each].slots) for each in before):
            return None
        holders = {
            id_: account for id_, account in self.accounts.items()
            if any(not slots.isdisjoint(self.items[each].slots) for each in account.held)
        }  # fmt: skip
        if not holders:
            return self.find_owner(item.slots[0])
        (holder, *others) = holders.values()
        if others or (len(slots) == 1 and holder is not self.find_owner(item.slots[0])):
            return None
        return holder

    def find_owner(self, slot: int) -> Account | None:
        """Whose a slot is; test_slot_owners.py holds that against the words of the contract."""
        policy = self.dispatcher.policy
        assert isinstance(policy, KeyShared)
        member = policy.owners.find_owner(slot)
        return self.accounts[member.id] if member is not None else None


def key_of(item: Item) -> int:
    return item.slots[0] if item.slots else 0


def ring_points(name: str, number: int) -> Iterator[int]:
    for i in range(100):
        yield compute_key_slot(f"{name}\0{number}\0{i}")


def ring_owner(members: list[Member], slot: int) -> Member:
    """By trying every slot from this one on; `members` in order of joining."""
    seen: dict[str, int] = {}
    names = []
    for member in members:
        seen[member.name] = seen.get(member.name, -1) + 1
        names.append((member.name, seen[member.name]))
    return members[_ring_place(tuple(names), slot)]


@lru_cache(maxsize=4096)
def _ring_place(names: tuple[tuple[str, int], ...], slot: int) -> int:
    at: dict[int, int] = {}
    for place, (name, number) in enumerate(names):
        for point in ring_points(name, number):
            at.setdefault(point, place)
    for step in range(STICKY_SLOTS):
        point = (slot - 1 + step) % STICKY_SLOTS + 1
        if point in at:
            return at[point]
    raise AssertionError("nobody is on the ring")
