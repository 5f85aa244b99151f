"""The dispatcher of one subscription: which entry goes to which consumer, and what to read next.

One state machine for every subscription type. What differs, "which consumer may get this entry", is a policy
(policy.py); reading, permits, outstanding entries, limits and redelivery are here, once.

    want = dispatcher.choose_next_read()                # PlannedRead(position) | ReadForRedelivery(positions) | Blocked
    deliveries = dispatcher.assign_entries(entries)     # those that were read → (consumer, entry, count, acked indexes)

Rules
- Permits count messages, as the consumer is *shown* them: a delivery costs what its entry's head declares, less the
  batch indexes that it marks as acknowledged, and the client gives back just that (client/core/redelivery.py has the
  rule of both sides). A batch goes out while any permit is left, so permits may end below zero by one batch (invariant
  43). None is lost or created: the rest is what was granted less what was charged, at any moment (`check`).
- An entry has at most one outstanding holder (invariant 41). It stays outstanding until it is acknowledged, given back
  (`redeliver`), or its consumer leaves or is deposed; then it waits with the policy, before anything new is read.
- The redelivery count grows when an entry is given back, not when a consumer leaves (Pulsar A9). It is the cursor's.
- What the cursor has acknowledged is never delivered, and not read where that is known beforehand. What is pending in
  an open transaction (pending_acks.py) is treated alike: its holder holds it no longer. An abort gives it back, before
  anything new (`add_entries_of_aborted_acks`). On types that deliver in log order reading goes back to the first of it
  (`move_read_position_back`), and what was delivered after that is delivered again.
- A batch of which other messages are pending or acknowledged is shown without them. When a transaction that had some of
  it is aborted, its holder gives it back; what a holder was not shown waits like a redelivery when it has acknowledged
  what it was shown.
- A consumer that acknowledges whole entries alone (`Member.acks_by_index`) is shown what is acknowledged of a batch
  again: a client that hides messages never acknowledges their entry. What is pending is hidden from it too, until the
  transaction has committed; then it gets the whole entry again (`Subscription.settle`).
- The read position only moves over entries that were assigned, wait with the policy, or are acknowledged. An entry that
  is not at the read position, and does not wait, is never handed out: `assign_entries` can be given anything that was
  read, whatever happened meanwhile, and skips nothing. It stops at the first entry that no consumer may get.
- On types with individual acknowledgement an entry whose delivery time is in the future is neither outstanding nor
  waiting: `delays` (core/delays.py) holds it, and it is skipped like one that is acknowledged. When it is due it
  waits with the policy, if the read position has passed it; else it is read in its turn (Pulsar A12).
- While the cursor's holes take more memory than `memory_bytes_max` nothing is read beyond the last of them: replays and
  the entries between the holes continue, because they reduce it.
- **Order of redelivery** (`ordered`, a choice of the subscription). What a consumer gives back because it failed holds
  back what follows it: of its keys on Key_Shared, everything on Exclusive and Failover. What is outstanding of that is
  taken back with it, uncounted, and nothing of it goes out before the failed one is done, which comes after its
  back-off. Of a message in chunks the last one holds back what follows the message: the others come before it.
- What is held back (`held`: a back-off ladder, dead letters) is skipped, and delivered after its
  `add_released_entries`.
- On types with individual acknowledgement a consumer that holds `unacked_consumer` messages gets no more until it holds
  half of that, and no consumer does while the subscription holds `unacked_subscription`, until it holds half (Pulsar
  S4).
- A subscription whose last consumer left begins anew with the next that joins (`set_policy`): its type is free (Pulsar
  S13), and everything after the mark that is not acknowledged is read again, in log order.
Events are per entry; no question costs more with more consumers or more outstanding entries, but joining and leaving.
Guarding tests: tests/broker/subscription/core/test_dispatch.py, and the walk of
tests/broker/subscription/core/test_dispatch_walk.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pyroaring import BitMap

from ....proto.names import Position
from ....proto.states import Blocked
from ...log.log_shape_core import LogShape
from .cursor import Cursor
from .cursor_state import bit_indexes
from .delays import DelayIndex
from .in_log_order import why_no_receiver
from .policy import NO_HIDDEN_MESSAGES, DispatcherEntry, DispatchPolicy, EntrySkipReason, Member, make_delivery_filters
from .positions import select_positions
from .redelivery_backoff import BackoffQueue

# ---------------------------------------------------------------------------------------------------- deliveries
# The values that a dispatcher returns: what it wants to read, and what it hands out.


class DispatchLimits(NamedTuple):
    """The limits of unacknowledged messages: of one consumer, and of all consumers of the subscription together.
    Delivery stops when a limit is reached. 0: no limit."""

    unacked_consumer: int
    unacked_subscription: int


NO_DISPATCH_LIMITS = DispatchLimits(0, 0)
TIME_AFTER_ALL_MS = 1 << 63
"""A time of day at which every entry is due."""


class PlannedRead(NamedTuple):
    """A request to read entries of the log, beginning at a position."""

    position: Position


class ReadForRedelivery(NamedTuple):
    """A request to read these entries, which wait for redelivery, in this order."""

    positions: tuple[Position, ...]


class Delivery(NamedTuple):
    """An entry that is assigned to a consumer. `redelivery_count`: how often it was given back before. `acked_indexes`:
    the batch indexes of the messages in the entry that the consumer must not process, because they are acknowledged or
    pending."""

    member: Member
    entry: DispatcherEntry
    redelivery_count: int
    acked_indexes: list[int]


# ------------------------------------------------------------------------------------------------------ dispatch


REPLAY_ENTRIES_MAX = 200
"""Most entries in one request to read entries that wait for redelivery."""
_tuple = tuple.__new__
"""Makes a named tuple in half of the time that its own constructor takes. Used for each Position and Delivery."""


class Dispatcher:
    """The state machine of one subscription that decides which entry is read next, and which consumer gets it. An entry
    is *outstanding* from its delivery until it is acknowledged or given back. `tracks`: False for a reader, at which no
    entry is outstanding. `memory_bytes_max`: the most bytes of the cursor's holes."""

    __slots__ = (
        "_shape", "chunks", "cursor", "delaying", "delays", "failed", "full", "held", "limits", "members",
        "memory_bytes_max", "ordered", "parked", "policy", "read_position", "tracks", "unacked",
    )  # fmt: skip

    def __init__(
        self, shape: LogShape, cursor: Cursor, policy: DispatchPolicy, *, tracks: bool = True,
        limits: DispatchLimits = NO_DISPATCH_LIMITS,
        memory_bytes_max: float = float("inf"), delays: DelayIndex | None = None,
    ) -> None:  # fmt: skip
        self.tracks = tracks
        self.delays = delays
        self.memory_bytes_max = memory_bytes_max
        self._shape = shape
        self.cursor = cursor
        self.full = False  # the subscription holds as many unacknowledged messages as it may
        self.policy = policy
        self.delaying = delays is not None and policy.individual  # entries may have a time before which none gets them
        self.limits = limits
        self.members: dict[int, Member] = {}
        self.held = BackoffQueue()
        self.ordered = False
        self.failed: dict[Position, None] = {}  # not done: each holds back what follows it
        self.chunks: dict[Position, tuple[str, bool]] = {}  # not done: of which message, and whether not the last
        self.unacked = 0  # messages outstanding
        # of what `assign_entries` was given last: these wait with the policy from now on
        self.parked: list[DispatcherEntry] = []
        self.read_position = shape.position_after(cursor.mark)

    def rebase(self, shape: LogShape) -> None:
        """Replaces the shape of the log by that of another log. Delivery starts again after the cursor's mark. No
        consumer may be connected."""
        assert not self.members, "what is outstanding has its place in the old shape"
        self._shape = shape
        self.restart_delivery_after_mark()

    def switch_log_shape(self, shape: LogShape) -> None:
        """Replaces the shape of the log by `shape`, and goes on from the same read position. Up to the read position
        both logs must have the same entries."""
        self._shape = shape

    # ------------------------------------------------------------------ consumers
    def set_policy(self, policy: DispatchPolicy, *, ordered: bool = False) -> None:
        """Sets the policy of the subscription type. Delivery starts again after the cursor's mark. No consumer may be
        connected. `ordered`: redelivery must keep the order of messages. Entries that wait for the end of a back-off
        are then delivered again at once, in log order."""
        assert not self.members, "the type changes while no consumer is connected"
        self.policy, self.ordered = policy, ordered
        self.delaying = self.delays is not None and policy.individual
        self.cursor.counts_first = ordered
        if ordered:
            self.held.discard_entries_in_backoff()
        self._start_over()

    def join(self, member: Member) -> None:
        """Adds a consumer. The caller must check before that `DispatchPolicy.why_refused` returns None. If the new
        consumer takes the place of the active one, the outstanding entries of the former active consumer are delivered
        again."""
        assert member.id not in self.members, "a consumer joins once"
        self.members[member.id] = member
        deposed = self.policy.add_member(member)
        if deposed is not None:
            self._give_back(deposed, list(deposed.outstanding))

    def leave(self, member: Member) -> None:
        """Removes a consumer. Its outstanding entries wait for redelivery, but do not count as redelivered."""
        del self.members[member.id]
        self._give_back(member, list(member.outstanding))
        self.policy.remove_member(member)

    def remove_all_consumers(self) -> None:
        """Removes all consumers, and all entries that wait for redelivery. Delivery starts again after the cursor's
        mark."""
        self._start_over()
        for member in self.members.values():
            self.policy.remove_member(member)
        self.members.clear()

    def grant_permits(self, member: Member, permits: int) -> None:
        """Permits the dispatcher to deliver `permits` more messages to the consumer."""
        member.permits += permits
        member.granted += permits

    def set_unacked_limits(self, limits: DispatchLimits) -> None:
        """Sets the largest numbers of unacknowledged messages, per consumer and for the whole subscription."""
        self.limits = limits
        for member in self.members.values():
            member.blocked = self._is_above_limit(member.unacked, limits.unacked_consumer)
        self.full = self._is_above_limit(self.unacked, limits.unacked_subscription)

    def _is_above_limit(self, unacked: int, limit: int) -> bool:
        return 0 < limit <= unacked and self.policy.individual

    # ------------------------------------------------------------------ reading and handing out
    def choose_next_read(self) -> PlannedRead | ReadForRedelivery | Blocked:
        """Returns a request for the entries that must be read next. If no entry can be delivered now, returns the
        reason. May move the read position over entries that need not be delivered."""
        policy = self.policy
        blocked = why_no_receiver(policy.candidates)
        if blocked is not None or self.full:
            return blocked or Blocked.TOO_MANY_UNACKED
        if not policy.waiting.entries:
            return self._choose_new_entries()
        if not policy.is_looking_ahead:
            return self.choose_waiting_entries() or self._choose_new_entries()
        want = self._choose_new_entries()
        return want if isinstance(want, PlannedRead) else self.choose_waiting_entries() or want

    def choose_waiting_entries(self) -> ReadForRedelivery | None:
        """Returns a request for at most REPLAY_ENTRIES_MAX entries that wait with the policy and could be delivered
        now; None if there are none."""
        ready = self.policy.next_ready_entries(REPLAY_ENTRIES_MAX)
        if ready and self.failed:
            ready = [each for each in ready if not self.policy.is_held_back_by_failure(each)]
        return ReadForRedelivery(tuple(ready)) if ready else None

    def has_entries_for_later(self) -> bool:
        """Returns True if an entry waits for its time of delivery, or for its back-off after a failure: it is neither
        delivered nor among those that can be read now."""
        return bool(self.held.until) or (self.delaying and self.delays is not None and self.delays.count > 0)

    def _choose_new_entries(self) -> PlannedRead | Blocked:
        """Returns a request for the entries at the read position; or the reason why none of them is wanted now."""
        policy, cursor, position = self.policy, self.cursor, self.read_position
        some_delayed = self.delays is not None and self.delays.count > 0 and self.delaying
        readable = self._shape.has_visible_entry(position)
        if not readable or cursor.acked or cursor.pending is not None or position <= cursor.mark or some_delayed:
            self._leap()
            if self.read_position != position:
                position = self.read_position
                readable = self._shape.has_visible_entry(position)
        if self.failed and policy.is_held_back_by_failure(position):
            return Blocked.FAILED
        if not readable:
            if policy.waiting.entries:
                return policy.busy
            if some_delayed:  # nothing more to read: what is left comes by itself, or was delivered
                return Blocked.DELAYED
            return Blocked.HELD if self.held.until else Blocked.CAUGHT_UP
        if some_delayed and self.delays is not None and self.delays.is_full:
            return Blocked.DELAYS
        if policy.is_full:
            return policy.busy
        if (
            (cursor.acked or cursor.partial or cursor.counts or cursor.pending is not None)
            and cursor.exceeds_memory(self.memory_bytes_max) and position > cursor.last_hole_position
        ):  # fmt: skip
            return Blocked.HOLES
        return _tuple(PlannedRead, (position,))

    def _leap(self) -> None:
        """Moves the read position forward over entries that need not be delivered."""
        cursor, position = self.cursor, self._shape.position_at_or_after(self.read_position)
        if cursor.acked or cursor.pending is not None or position <= cursor.mark:
            position = cursor.next_deliverable_position(position)
        if self.delays is not None and self.delays.count and self.delaying:
            position = self.delays.next_undelayed_position(position)
        self.read_position = position

    def why_blocked(self) -> Blocked | None:
        """Returns the reason why no consumer can receive any entry now; None if one can."""
        why = why_no_receiver(self.policy.candidates)
        return Blocked.TOO_MANY_UNACKED if why is None and self.full else why

    def assign_entries(self, entries: Sequence[DispatcherEntry], now_ms: int = TIME_AFTER_ALL_MS) -> list[Delivery]:
        """Assigns entries that were read from the log to consumers, in the given order, and returns the deliveries.
        Stops at the first entry that no consumer may get now: it and the following entries are read again later. Holds
        back the entries whose delivery time is after `now_ms` (ms since the epoch), on types that delay messages.
        `parked` then has those of the entries that wait with the policy."""
        deliveries: list[Delivery] = []
        self.parked = []
        if self.read_position <= self.cursor.mark:
            self._leap()
        delays = self.delays if self.delaying else None
        policy, pick, deliver, at = self.policy, self.policy.choose_member, self._deliver, self.read_position
        filters = make_delivery_filters(
            self.cursor, policy, self.held, delays, entries[0].position, at
        ) if entries else []
        some_wait = policy.waiting.entries > 0
        for entry in entries:
            position = entry.position
            waited = some_wait and position < at and policy.is_entry_waiting(entry)
            if not waited and position != at:
                fate = self._out_of_turn(position)
                at = self.read_position
                if fate is EntrySkipReason.PASSED:
                    continue
                if fate is EntrySkipReason.NOT_ITS_TURN:
                    break
            for caught in filters:
                if caught(entry, waited) is not None:
                    break
            else:
                if delays is not None and entry.deliver_at_ms > now_ms:
                    delays.add_entry(position, entry.deliver_at_ms)
                    if waited:
                        policy.discard(position)
                elif self.full:
                    break
                else:
                    choice = pick(entry, waited)
                    if type(choice) is Member:
                        deliveries.append(deliver(choice, entry, waited))
                    elif choice is not None:
                        break
                    elif not waited:
                        self.parked.append(entry)
            if not waited:
                at = self.read_position = _tuple(Position, (position[0], position[1] + 1))
        return deliveries

    def _out_of_turn(self, position: Position) -> EntrySkipReason | None:
        """Called for an entry that neither waits for redelivery nor is at the read position. First moves the read
        position over entries that need not be delivered. Returns None if the entry is at the read position then, else
        the reason why it is not delivered."""
        if position > self.read_position:
            self._leap()
        if position < self.read_position:
            return EntrySkipReason.PASSED
        return EntrySkipReason.NOT_ITS_TURN if position > self.read_position else None

    def _deliver(self, member: Member, entry: DispatcherEntry, again: bool) -> Delivery:
        position, outstanding, cursor = entry.position, member.outstanding, self.cursor
        assert position not in outstanding, "an entry has one outstanding holder"
        acked = cursor.acked_indexes(position) if cursor.partial and member.acks_by_index else []
        if cursor.pending is not None and (pending := cursor.pending.message_bits_at(position)):
            hidden = cursor.acked_or_pending_bits(position) if member.acks_by_index else pending
            acked = list(bit_indexes(hidden))
            member.add_hidden_messages(position, pending, entry.count, cursor.mark)
        elif member.unshown:
            member.unshown.pop(position, None)
        count = cursor.redelivery_count(position) if cursor.counts else 0
        shown = entry.count - len(acked)
        if again:
            member.reordered = True
            if count or not entry.deliver_at_ms:
                member.redelivered_messages += shown
        if self.tracks:
            outstanding[position] = shown
            if self.ordered and entry.chunk_of:
                self.chunks[position] = entry.chunk_of, entry.has_more_chunks
            member.unacked += shown
            self.unacked += shown
            of_consumer, of_subscription = self.limits
            if (of_consumer or of_subscription) and self.policy.individual:
                member.blocked = member.blocked or 0 < of_consumer <= member.unacked
                self.full = self.full or 0 < of_subscription <= self.unacked
        else:
            self.policy.on_entries_released((position,))
        member.permits -= shown
        member.delivered_messages += shown
        member.delivered_bytes += entry.size
        return _tuple(Delivery, (member, entry, count, acked))

    # ------------------------------------------------------------------ acknowledgements, after the cursor's
    def on_acked(self, member: Member | None, position: Position) -> None:
        """Called when an entry is acknowledged or pending: it is no longer outstanding, and is not delivered again.
        `member`: the consumer that acknowledged the entry; None: the broker did."""
        if self.failed or self.chunks:
            self._recovered((position,))
        if not (member is not None and self._drop(member, position)) and not any(
            self._drop(other, position) for other in self.members.values()
        ):
            self.policy.discard(position)
            self.held.discard(position)
        else:
            self.policy.on_entries_released((position,))
        if self.delays is not None:
            self.delays.discard(position)

    def on_entries_acked(self, member: Member | None, ledger_id: int, entries: BitMap) -> None:
        """Called when many entries of one ledger are acknowledged or pending: they are no longer outstanding, and are
        not delivered again. The cost grows with the smaller of the two sets: `entries`, and the outstanding entries.
        `member`: the consumer that acknowledged them; None: the broker did."""
        if self.failed or self.chunks:
            self._recovered(select_positions(self.failed.keys() | self.chunks.keys(), ledger_id, entries))
        if self.delays is not None:
            self.delays.discard_entries_of_ledger(ledger_id, entries)
        holders = list(self.members.values()) if member is None else [member]
        holders += [other for other in self.members.values() if other is not member]
        released, left = self.policy.on_entries_released, len(entries)
        for holder in holders:
            done = select_positions(holder.outstanding, ledger_id, entries)
            if done:
                self._unload(holder, sum(map(holder.outstanding.pop, done)))
                holder.reordered = holder.reordered and bool(holder.outstanding)
                released(done)
            left -= len(done)
            if not left:
                return
        if entries and _tuple(Position, (ledger_id, entries.min())) < self.read_position:  # what waits was read
            self.policy.discard_entries_of_ledger(ledger_id, entries)
        for position in select_positions(self.held, ledger_id, entries):
            self.held.discard(position)

    def on_messages_acked(self, member: Member, position: Position, messages: int) -> None:
        """Called when `messages` more messages of a batch, which is outstanding at the consumer, are acknowledged or
        pending. If none is left, the consumer gives the batch back."""
        held = member.outstanding.get(position)
        if held is not None:
            messages = min(messages, held)
            member.outstanding[position] = held - messages
            self._unload(member, messages)
            if messages == held:
                self._give_back(member, (position,))  # what it was shown is done; of the rest others decide

    def on_batch_acks_aborted(self, position: Position, size: int) -> None:
        """Called when a transaction that had acknowledged messages of a batch was aborted, before the consumer at which
        the batch is outstanding gives it back. Counts the freed messages as outstanding there again. `size`: the number
        of messages in the batch; 0: not known. Does nothing if the size is not known, or the batch is not outstanding.

        While the cursor knows nothing of a batch, an acknowledgement takes the number of its outstanding messages for
        its size (`Cursor.find_batch_size`)."""
        member = self.find_consumer_of_entry(position)
        if member is None or not size:
            return
        hidden = self.cursor.acked_or_pending_bits(position) | member.unshown.get(position, NO_HIDDEN_MESSAGES).bits
        held = ((1 << size) - 1 & ~hidden).bit_count()
        self._unload(member, member.outstanding[position] - held)
        member.outstanding[position] = held

    def on_acked_up_to(self, mark: Position) -> None:
        """Called when all entries up to and including `mark` are acknowledged or pending: they are no longer
        outstanding, and are not delivered again."""
        if self.failed or self.chunks:
            self._recovered([each for each in self.failed.keys() | self.chunks.keys() if each <= mark])
        for member in self.members.values():
            done = member.outstanding_entries_up_to(mark)
            for position in done:
                self._drop(member, position)
            self.policy.on_entries_released(done)
        self.policy.discard_up_to(mark)
        for position in [each for each in self.held if each <= mark]:
            self.held.discard(position)
        if self.delays is not None:
            self.delays.discard_up_to(mark)
        self.read_position = max(self.read_position, self._shape.position_after(mark))

    def _drop(self, member: Member, position: Position) -> bool:
        """Removes the entry from the outstanding entries of the consumer. Returns False if the entry is not outstanding
        at this consumer."""
        messages = member.outstanding.pop(position, None)
        if messages is None:
            return False
        self._unload(member, messages)
        if not member.outstanding:
            member.reordered = False
        return True

    def _unload(self, member: Member, messages: int) -> None:
        """Subtracts `messages` from the unacknowledged messages of the consumer and of the subscription. If a limit had
        stopped delivery, resumes it when at most half of the limit is left."""
        member.unacked -= messages
        self.unacked -= messages
        if member.blocked and member.unacked <= self.limits.unacked_consumer // 2:
            member.blocked = False
        if self.full and self.unacked <= self.limits.unacked_subscription // 2:
            self.full = False

    # ------------------------------------------------------------------ redelivery
    def redeliver(
        self, member: Member, positions: Iterable[Position] | None, *, counted: bool = True
    ) -> None:
        """Requeues outstanding entries of a consumer, to deliver them again. `positions`: which entries; None: all
        entries that are outstanding at this consumer. Ignores entries that are not outstanding at this consumer.
        `counted`: adds 1 to the redelivery count of each entry."""
        wanted = list(member.outstanding) if positions is None else dict.fromkeys(positions)
        given = [position for position in wanted if position in member.outstanding]
        for position in given:
            if counted and not self.cursor.is_acked_or_pending(position):
                self.cursor.count_redelivery(position)
        self._give_back(member, given)

    def mark_entries_failed(self, member: Member, positions: Iterable[Position]) -> list[Position]:
        """Marks entries of the consumer as failed. Called only if the subscription is `ordered`, before the consumer
        gives these entries back. Each failed entry holds back the entries that follow it; those of them that are
        outstanding are taken back at once. Returns the failed entries that follow no other failed entry.

        A chunked message is taken back as a whole: a consumer cannot process a message whose first chunks it has lost.
        What follows a failed chunked message is held back by its last chunk.
        """
        failed: list[Position] = []
        for position in sorted(positions):
            if position not in member.outstanding or self.cursor.is_acked_or_pending(position):
                continue
            failed.append(position)
            if position in self.chunks and self.chunks[position][1]:
                continue
            self.failed[position] = None
            outstanding = {each: holder for holder in self.members.values() for each in holder.outstanding}
            taken = list(self.policy.on_entry_failed(position, outstanding))
            divided = {self.chunks[each][0] for each in taken if each in self.chunks}
            if divided:
                known = set(taken)
                taken += [
                    each for each, (uuid, _) in self.chunks.items()
                    if uuid in divided and each in outstanding and each not in known
                ]
            for each in taken:
                self._give_back(outstanding[each], (each,))
        return failed

    def _recovered(self, positions: Iterable[Position]) -> None:
        for position in positions:
            self.chunks.pop(position, None)
            if position in self.failed:
                del self.failed[position]
                self.policy.on_failed_entry_done(position)

    def _give_back(self, member: Member, positions: Iterable[Position]) -> None:
        """Takes back entries that the consumer gives back. Those that are neither acknowledged nor held back wait for
        redelivery."""
        for position in positions:
            self._drop(member, position)
            if self.cursor.is_acked_or_pending(position) or position in self.held:
                self.policy.on_entries_released((position,))
            else:
                self.policy.on_entry_returned(position)

    def add_due_entries(self, positions: Iterable[Position]) -> None:
        """Makes delayed entries deliverable, because their delivery time has come. Entries before the read position
        wait for redelivery from now on; the others are delivered when the read position reaches them."""
        for position in positions:
            if position not in self.held:
                self._comes_again(position)

    def add_released_entries(self, positions: Iterable[Position]) -> None:
        """Makes entries deliverable that were held back. Entries before the read position wait for redelivery from now
        on; the others are delivered when the read position reaches them."""
        for position in positions:
            if self.delays is None or not self.delays.is_delayed(position):
                self._comes_again(position)

    def _comes_again(self, position: Position) -> None:
        """Makes an entry wait for redelivery, if it is before the read position and neither acknowledged nor pending.
        Other entries are delivered when the read position reaches them."""
        if position < self.read_position and not self.cursor.is_acked_or_pending(position):
            self.policy.on_entry_returned(position)

    def add_entries_of_aborted_acks(self, positions: Iterable[Position]) -> None:
        """Makes entries deliverable again whose acknowledgements were aborted with their transaction. Entries before
        the read position wait for redelivery from now on; the others are delivered when the read position reaches
        them."""
        for position in positions:
            if position not in self.held and not any(position in each.outstanding for each in self.members.values()):
                self.add_released_entries((position,))

    def find_consumer_of_entry(self, position: Position) -> Member | None:
        """Returns the consumer at which the entry is outstanding; None if the entry is not outstanding."""
        return next((each for each in self.members.values() if position in each.outstanding), None)

    def move_read_position_back(self, first: Position) -> None:
        """Moves the read position back to `first`: all unacknowledged entries from there on are delivered again, in log
        order. Called only on subscription types that deliver in log order. Each consumer that had such entries
        outstanding must restart (`Member.must_restart`): a cumulative acknowledgement for the first delivery would
        cover entries that are delivered again."""
        for member in self.members.values():
            for position in [each for each in member.outstanding if each >= first]:
                self._drop(member, position)
                member.must_restart = True
        for position in self.policy.next_ready_entries(self.policy.waiting.entries):
            if position >= first:
                self.policy.discard(position)
        self.read_position = min(self.read_position, first)

    def discard_trimmed_entries(self, positions: Iterable[Position]) -> None:
        """Removes entries that were trimmed from the log: they are not delivered again."""
        if self.failed or self.chunks:
            self._recovered(positions := list(positions))
        for position in positions:
            self.policy.discard(position)
            if self.delays is not None:
                self.delays.discard(position)

    def restart_delivery_after_mark(self) -> None:
        """Starts delivery again after the cursor's mark, which was moved. The consumers stay, but no entry is
        outstanding or held back after this call."""
        self.held.clear()
        self._start_over()
        if self.delays is not None:
            self.delays.discard_up_to(self.cursor.mark)

    def _start_over(self) -> None:
        for member in self.members.values():
            member.outstanding.clear()
            member.unshown.clear()
            member.unacked, member.reordered, member.blocked, member.must_restart = 0, False, False, False
        self.unacked, self.full = 0, False
        self.failed.clear()
        self.chunks.clear()
        self.policy.clear()
        self.read_position = self._shape.position_after(self.cursor.mark)

    # ------------------------------------------------------------------ questions
    @property
    def redelivery_entry_count(self) -> int:
        """The number of entries that wait to be delivered again, and must be read again for that."""
        return self.policy.waiting.entries

    @property
    def progress_marker(self) -> tuple[Position, int, int]:
        """A value by which a caller detects progress: it differs after each call of `assign_entries` that delivered an
        entry or moved the read position."""
        return self.read_position, self.policy.waiting.entries, self.policy.waiting_entries_to_read

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken: an entry is outstanding at one consumer at most, and then
        neither held back nor waiting; outstanding entries are before the read position; the counts of messages and
        permits are right."""
        seen: set[Position] = set()
        for member in self.members.values():
            held = set(member.outstanding)
            assert not held & seen, "an entry has two outstanding holders"
            seen |= held
            assert member.unacked == sum(member.outstanding.values()), "a consumer's unacked count is wrong"
            assert self.tracks or not held, "a reader holds something"
            assert member.permits == member.granted - member.delivered_messages, "permits were lost or made"
        assert self.unacked == sum(member.unacked for member in self.members.values()), "the unacked count is wrong"
        for position in seen:
            assert position < self._shape.position_at_or_after(
                self.read_position
            ), "an entry beyond the read position is out"
        assert not seen & set(self.held), "what is held back is outstanding"
        assert self.ordered or not self.failed, "something holds back what follows it, and no order is kept"
        self.held.check()
        self.policy.check(seen)
        if self.delays is not None:
            self.delays.check()
            assert not any(map(self.delays.is_delayed, seen)), "an entry is held back and delivered"
