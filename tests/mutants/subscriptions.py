"""Defects of subscriptions: patches of the dispatcher, the cursor and the index of delays."""

import asyncio
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from pyroaring import BitMap

from magnetar.broker.log.cache import StoredEntry
from magnetar.broker.session import backlogs
from magnetar.broker.session.consumer import ConsumerSession
from magnetar.broker.session.schedules import ScheduleRunner
from magnetar.broker.subscription import cursors, expiry
from magnetar.broker.subscription.core.cursor import AckHoles, Cursor
from magnetar.broker.subscription.core.delays import DelayIndex
from magnetar.broker.subscription.core.dispatch import Delivery, Dispatcher
from magnetar.broker.subscription.core.fair_shared import FairKeyQueues, FairShared, KeyQueue
from magnetar.broker.subscription.core.key_slots import KeySlotTable
from magnetar.broker.subscription.core.policy import DispatcherEntry, HeldSlot, Member
from magnetar.broker.subscription.core.positions import CursorRecordState
from magnetar.broker.subscription.dead_letters import HeldBackEntries
from magnetar.broker.subscription.expiry import MessageExpirer
from magnetar.broker.subscription.filtering import SubscriptionFilter
from magnetar.broker.subscription.subscription import Subscription
from magnetar.broker.topic.topic import SubscriptionRegistry, Topic
from magnetar.client import streams
from magnetar.client.core.debounce import Debounce
from magnetar.client.model.settings import ProducerAccessMode
from magnetar.metadata.records import CursorRecord, ScheduleProgressRecord
from magnetar.proto import entry_filter, names
from magnetar.proto.entry import Buffer, StoredEntryHead
from magnetar.proto.entry_filter import EntryFilter
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import Position
from magnetar.proto.states import AckedEntry
from tests.mutants.ledgers import Stack, put


def freed_twice(stack: Stack) -> None:
    """M66: what an abort gives back waits for the next consumer although one has it already."""

    def freed(self: Dispatcher, positions: Iterable[Position]) -> None:
        self.add_released_entries([each for each in positions if each not in self.held])

    put(stack, Dispatcher, "add_entries_of_aborted_acks", freed)


def persisted_mark_is_safe(stack: Stack) -> None:
    """M69: after a seek backwards, and before it is stored, what it wants again is trimmed."""
    put(stack, Cursor, "durable_trim_mark", property(lambda self: self.persisted_mark))


def acknowledged_is_due_again(stack: Stack) -> None:
    """M99: after a restart what was delayed and is acknowledged beyond the mark is held again, and comes again."""

    def add(self: DelayIndex, ledger_id: int, entries: BitMap) -> bool:
        acked, self.cursor.acked = self.cursor.acked, {}
        try:
            return honest(self, ledger_id, entries)
        finally:
            self.cursor.acked = acked

    honest = DelayIndex._add
    put(stack, DelayIndex, "_add", add)


def last_acks_do_not_count(stack: Stack) -> None:
    """M39b: what a consumer acknowledged before it learned that its topic moves counts only if it came before."""
    honest = Subscription.stop_delivery_for_move

    def begin(self: Subscription, error: MagnetarError) -> list[asyncio.Future[None]]:
        honest(self, error)
        return []

    put(stack, Subscription, "stop_delivery_for_move", begin)


def first_message_decides(stack: Stack) -> None:
    """M99b: a batch is filtered by its first message, and the wanted ones after it are acknowledged unseen."""

    def find(self: EntryFilter, head: StoredEntryHead, entry: Buffer) -> int:
        unwanted = honest(self, head, entry)
        return (1 << max(1, head.metadata.num_messages_in_batch)) - 1 if unwanted & 1 else 0

    honest = EntryFilter.find_unwanted_bits
    put(stack, EntryFilter, "find_unwanted_bits", find)


def hidden_from_everybody(stack: Stack) -> None:
    """M99c: a filter hides messages of a batch from a consumer that acknowledges whole entries, and never this one."""

    def take(self: SubscriptionFilter, *given: Any, **named: Any) -> Any:
        members = [each for each in self._dispatcher.members.values() if not each.acks_by_index]
        for each in members:
            each.acks_by_index = True
        try:
            return honest(self, *given, **named)
        finally:
            for each in members:
                each.acks_by_index = False

    honest = SubscriptionFilter.select_wanted_entries
    put(stack, SubscriptionFilter, "select_wanted_entries", take)


def judged_for_ever(stack: Stack) -> None:
    """M99d: after a seek what was judged is not judged again, and what is not wanted is delivered."""
    put(stack, Subscription, "_filter_anew", lambda self: None)


def verdicts_of_another_entry(stack: Stack) -> None:
    """M99e: a verdict that depends on the producer or the time of an entry counts for all messages that look alike."""
    put(stack, entry_filter, "_OF_ENTRY", frozenset[str]())


def rest_is_hidden_from_whole_ackers(stack: Stack) -> None:
    """M99f: a consumer that acknowledges whole entries is shown the rest of a batch, which it never acknowledges."""

    def deliver(self: Dispatcher, member: Member, entry: DispatcherEntry, again: bool) -> Delivery:
        before, member.acks_by_index = member.acks_by_index, True
        try:
            return honest(self, member, entry, again)
        finally:
            member.acks_by_index = before

    honest = Dispatcher._deliver
    put(stack, Dispatcher, "_deliver", deliver)


def held_since_the_last_look(stack: Stack) -> None:
    """M89e: a key is held since the last look at it, and not since the first that saw its oldest entry."""
    honest = KeySlotTable.find_held_slots

    def find(self: KeySlotTable, now_s: float) -> list[HeldSlot]:
        self._oldest = {}
        return honest(self, now_s)

    put(stack, KeySlotTable, "find_held_slots", find)


def next_window_supersedes(stack: Stack) -> None:
    """M99g: a message is superseded by the next one of its key, also if that is in a later window (ours)."""
    put(stack, Debounce, "find_window_end_ms", lambda self, key, published_ms: 1 << 60)


def error_stays_with_its_consumer(stack: Stack) -> None:
    """M99h: the broker forgets why a consumer gave a message back: the letter of another one has no error (ours)."""
    put(stack, HeldBackEntries, "record_failure_reasons", lambda self, failures: None)


def former_worker_writes_on(stack: Stack) -> None:
    """M99i: who takes a partition of state over does not fence the former worker, which commits (ours)."""
    modes = SimpleNamespace(ExclusiveWithFencing=ProducerAccessMode.Shared)
    put(stack, streams, "ProducerAccessMode", modes)


def given_back_is_in_flight(stack: Stack) -> None:
    """M32b: what was given back counts as in flight until it is acknowledged: its key is stuck (ours)."""

    def returned(self: FairKeyQueues, position: Position) -> None:
        slot = self._held[position][0] if position in self._held else -1
        if slot < 0:
            self.entries += self.unread.add(position)
        else:
            self.add_entry_of_key(position, slot)

    put(stack, FairKeyQueues, "add", returned)


def idle_time_saves_turns(stack: Stack) -> None:
    """M32c: a key that was idle gets all the turns that it did not need, before any other key (ours)."""
    honest = FairKeyQueues._first_in_turn

    def first(self: FairKeyQueues, count: int) -> list[KeyQueue]:
        found = honest(self, count)
        self._served = 0.0
        return found

    put(stack, FairKeyQueues, "_first_in_turn", first)


def what_waits_goes_before_what_is_unread(stack: Stack) -> None:
    """M32d: a fair subscription reads on when nothing that it has read may go: a quiet key is not seen (ours)."""
    put(stack, FairShared, "is_looking_ahead", property(lambda self: False))


def idle_key_forgets_its_rate(stack: Stack) -> None:
    """M32e: a key of which nothing is in flight or waits has its whole rate again (ours)."""

    def forget(self: FairKeyQueues, slot: int, queue: KeyQueue) -> None:
        if not queue.in_flight and not queue.waiting:
            del self.of[slot]

    put(stack, FairKeyQueues, "_forget_if_idle", forget)


def expired_is_redelivered(stack: Stack) -> None:
    """M99j: what expires while a consumer has it is delivered again when it is given back."""
    honest = MessageExpirer._find_free_bits

    def find(self: MessageExpirer, entry: StoredEntry, bits: int) -> int:
        is_new = entry.position >= self._subscription.dispatcher.read_position
        return honest(self, entry, bits) if is_new else 0

    put(stack, MessageExpirer, "_find_free_bits", find)


def redriven_to_all(stack: Stack) -> None:
    """M98h: a letter that went back for one subscription is delivered to all of them."""
    put(stack, expiry, "is_of_other_subscription", lambda entry, subscription: False)


def redriven_in_every_topic(stack: Stack) -> None:
    """M98i: a message is for one subscription in whatever topic a copy of it is: its dead letters are read by none."""
    put(stack, expiry, "parse_redriven_to", lambda value, topic: value.rpartition("/")[2])


def cancelled_although_delivered(stack: Stack) -> None:
    """M99k: a delayed message is cancelled for the others although a subscription has got it."""
    put(stack, backlogs, "_why_delivered", lambda subscription, position, bits: None)


def fired_again(stack: Stack) -> None:
    """M99l: who takes a schedule over publishes all times that were begun, and does not look into the log."""

    async def find(
        self: ScheduleRunner, topic: Topic, known: object, progress: ScheduleProgressRecord
    ) -> tuple[int, ...]:
        return progress.firing

    put(stack, ScheduleRunner, "_find_missing", find)


def letters_of_long_names_mixed(stack: Stack) -> None:
    """M99m: a name of a dead-letter topic that is too long is cut, so that several topics share one."""

    def cut(text: str, size_bytes: int) -> str:
        return text.encode()[:size_bytes].decode(errors="ignore")

    put(stack, names, "shorten_name", cut)


def cumulative_in_unchecked_steps(stack: Stack) -> None:
    """M99n: a large cumulative acknowledgement is checked at its last step, after earlier ones have acknowledged."""

    def steps(self: ConsumerSession, acked: AckedEntry) -> Iterator[None]:
        for mark in self.subscription.acks.split_cumulative_ack_into_steps(self.member, acked.position):
            self.subscription.ack_cumulative(self._consumer, AckedEntry(mark))
            yield
        self.subscription.ack_cumulative(self._consumer, acked)

    put(stack, ConsumerSession, "ack_cumulative", steps)


def name_is_free_at_once(stack: Stack) -> None:
    """M99o: a deletion that failed is forgotten: its subscription has no name, and its record refuses a new one."""
    honest = SubscriptionRegistry._remove

    async def remove(self: SubscriptionRegistry, subscription: Subscription) -> None:
        try:
            await honest(self, subscription)
        finally:
            self._deleting.clear()

    put(stack, SubscriptionRegistry, "_remove", remove)


def loose_holes_stop_delivery(stack: Stack) -> None:
    """M97p: bitmaps that are not compressed hold up new messages, though compressed they take a twentieth."""
    put(stack, AckHoles, "compress_all_holes", lambda self: None)


def written_holes_keep_their_size(stack: Stack) -> None:
    """M97q: a bitmap that a write has compressed counts with its size from before."""

    def compressed(self: AckHoles, ledger_id: int) -> BitMap:
        holes = self._acked[ledger_id]
        holes.run_optimize()
        return holes

    put(stack, AckHoles, "compress_holes_of_ledger", compressed)


def holes_from_before_a_seek_count(stack: Stack) -> None:
    """M99q: a state in the metadata that lacks holes is completed by those of a ledger from before a seek."""
    honest = cursors._with_state

    def kept(state: CursorRecordState, record: CursorRecord, *, is_ledger_older: bool) -> CursorRecord:
        return honest(state, record, is_ledger_older=True)

    put(stack, cursors, "_with_state", kept)


def state_without_room_is_durable(stack: Stack) -> None:
    """M99r: receipts are answered for a state that lacks holes, and no ledger has them."""
    honest = cursors.plan_record_state

    def whole(cursor: Cursor, sequence: int, bytes_max: int) -> CursorRecordState | None:
        planned = honest(cursor, sequence, bytes_max)
        return None if planned is None else planned._replace(lacks=0)

    put(stack, cursors, "plan_record_state", whole)
