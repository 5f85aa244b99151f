"""The pump of a subscription: delivers entries to the consumers, until no consumer may get the next entry.

The pump asks the dispatcher which entries come next, takes them from memory or reads them (read_ahead.py), delivers
them, and repeats. `wake` runs the pump once in the next turn of the event loop, however often it is called: after new
entries, permits, acknowledgements. Nothing here is per message. In each turn, the entries that consumers give back are
handled first (`RedeliveryReturnQueue`); then consumers are notified of what the policy reports
(`DispatchPolicy.take_active_changes`). `blocked` is the reason why no consumer gets the next entry. A dispatch rate
that is exceeded has one timer.

Also in this file, below their headings: entries whose head declares messages that are not in them (malformed); entries
on their way back to the dispatcher (returns); questions of consumers whether they get a message now (probes).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from ...proto.entry import decode_message_columns, has_valid_checksum, parse_header, strip_broker_part
from ...proto.errors import ConnectionLost, CorruptEntry, InternalError, MagnetarError
from ...proto.names import Position
from ...proto.states import Blocked, TopicState
from ...runtime.alarm import LOOP_SLICE_S, EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.files import Buffer
from ...runtime.tasks import Tasks
from ...runtime.token_bucket import RateLimit, compute_rate_delay_s, count_entries_within_rates
from ..common.config import BrokerConfig
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from ..log.reader import ReadMemoryBudget
from ..log.unfolding import run_in_thread_if_slow
from .consumer import Consumer
from .core.dispatch import TIME_AFTER_ALL_MS, Delivery, Dispatcher, DispatchLimits, PlannedRead, ReadForRedelivery
from .core.policy import Member
from .dead_letters import HeldBackEntries
from .filtering import ENTRY_ID_MAX
from .read_ahead import ReadAheadBuffer

if TYPE_CHECKING:
    from .subscription import Subscription

# ----------------------------------------------------------------------------------------------------- malformed
# Entries whose head declares messages that are not in them: no number of a head charges a limit for ever.
#
# A delivery charges the limits of unacknowledged messages with what the entry's head declares (core/dispatch.py): to
# look inside would be work for each message. A consumer that cannot read the entry may never acknowledge it; it would
# be blocked, and so would the next one that gets it. So at the moment when a limit is reached, the entries that take
# more than 1 / DOUBTED_SIZE_DIVISOR of it are parsed, in a thread where that takes long. What is malformed is
# discarded: acknowledged by the broker, and logged. Only bytes that are intact are judged, and what is encrypted or a
# chunk is left to its consumers. Many small numbers charge no more than entries of that size would that a consumer does
# not acknowledge. Guarding tests: tests/client/consume/test_malformed.py.


DOUBTED_SIZE_DIVISOR = 16
"""Divisor of a limit: an entry that takes more than this part of it is doubted. At most so many entries are checked
when the limit is reached."""


def find_oversized_entries(member: Member, limits: DispatchLimits) -> list[Position]:
    """Returns the entries outstanding at the consumer that contain too many messages: more than 1 /
    DOUBTED_SIZE_DIVISOR of the smallest limit that is set, and at least 2 messages. If no limit is set, returns all
    entries of at least 2 messages."""
    share = max(1, min((each for each in limits if each), default=0) // DOUBTED_SIZE_DIVISOR)
    return [position for position, messages in member.outstanding.items() if messages > share]


def is_malformed_entry(entry: Buffer) -> bool:
    """Returns True if no consumer can read the stored entry: its checksum is right, but it does not contain the
    messages that its header declares. Encrypted entries and chunks are never malformed, because only a consumer can
    read them."""
    if not has_valid_checksum(entry):
        return False
    try:
        part = strip_broker_part(entry)
        header = parse_header(part, verify=False)
        if not header.metadata.encryption_keys and header.metadata.num_chunks_from_msg <= 1:
            decode_message_columns(header, part)
    except CorruptEntry:
        return True
    return False


# ------------------------------------------------------------------------------------------------------- returns
# The entries on their way back to the dispatcher: what consumers give back, what a leaving consumer held, and what
# aborted transactions had acknowledged.
#
# It goes back in slices of RETURNED_ENTRIES_PER_SLICE. Nothing is handed out before the last of it, so the order is the
# same as at once, and 150,000 entries delay no other subscription. Guarding test:
# tests/broker/node/test_giving_back.py.


RETURNED_ENTRIES_PER_SLICE = 200
"""Entries given back between two readings of the clock: some tenths of a millisecond."""


class _Return(msgspec.Struct):
    """Entries that a consumer gives back. Entries that are not outstanding at this consumer any more are ignored."""

    member: Member
    positions: deque[Position]
    counted: bool  # they count as given back
    leaves: bool  # the consumer is disconnected, and leaves the dispatcher with the last of them


class _Freed(msgspec.Struct):
    """Entries whose acknowledgements were aborted with a transaction. Each entry counts as redelivered."""

    positions: Iterator[Position]


class RedeliveryReturnQueue:
    """The queue of entries that consumers give back to one subscription. Many entries are given back in slices, so that
    other tasks run in between. `counting`: a function that returns the object that counts redeliveries; if it returns
    None, the cursor counts them. `waiting`: the queue; None while it is empty."""

    __slots__ = ("_clock", "_counting", "_dispatcher", "waiting")

    def __init__(self, dispatcher: Dispatcher, counting: Callable[[], HeldBackEntries | None], clock: Clock) -> None:
        self._clock = clock
        self._dispatcher = dispatcher
        self._counting = counting
        self.waiting: deque[_Return | _Freed] | None = None  # until there is one: an empty deque takes 700 bytes

    def __len__(self) -> int:
        return len(self.waiting or ())

    def add_returned_entries(
        self, member: Member, positions: Iterable[Position], *, counted: bool, leaves: bool = False
    ) -> None:
        """Queues entries that a consumer gives back, and gives back the first RETURNED_ENTRIES_PER_SLICE of the queue
        at once. `counted`: the entries count as redelivered. `leaves`: the consumer is removed from the dispatcher
        after the last of them."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(_Return(member, deque(positions), counted, leaves))
        self.return_next_entries()

    def add_entries_of_aborted_acks(self, positions: Iterator[Position]) -> None:
        """Queues entries whose acknowledgements were aborted with their transaction, to be delivered again. Each counts
        as redelivered. The entries must not be outstanding or pending. Gives back the first RETURNED_ENTRIES_PER_SLICE
        of the queue at once."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append(_Freed(positions))
        self.return_next_entries()

    def add_batches_of_aborted_acks(self, batches: Iterable[Position]) -> None:
        """Counts a redelivery of each batch of which an aborted transaction had acknowledged some messages. Gives a
        batch back if it is outstanding at a consumer, which may hold other messages of it; other batches are not
        queued."""
        for position in batches:
            holder = self._dispatcher.find_consumer_of_entry(position)
            if holder is not None:
                self.add_returned_entries(holder, (position,), counted=True)
            else:
                self._dispatcher.cursor.count_redelivery(position)

    def _some_freed(self, positions: Iterator[Position]) -> bool:
        """Makes the next RETURNED_ENTRIES_PER_SLICE of `positions` deliverable. Returns True if `positions` has no
        more."""
        some, cursor = list(islice(positions, RETURNED_ENTRIES_PER_SLICE)), self._dispatcher.cursor
        free = [position for position in some if not cursor.is_acked_or_pending(position)]
        if (counting := self._counting()) is not None:
            counting.on_entries_returned(free, at_once=self._dispatcher.ordered)  # in its place, and not later
        else:
            for position in free:
                cursor.count_redelivery(position)
        self._dispatcher.add_entries_of_aborted_acks(free)
        return len(some) < RETURNED_ENTRIES_PER_SLICE

    def return_next_entries(self) -> bool:
        """Gives the next RETURNED_ENTRIES_PER_SLICE entries of the queue back to the dispatcher. Returns True if the
        queue is empty then; False if the caller must call it again."""
        while self.waiting:
            first = self.waiting[0]
            if isinstance(first, _Freed):
                if not self._some_freed(first.positions):
                    return False
                self.waiting.popleft()
                continue
            member, some = first.member, list(islice(first.positions, RETURNED_ENTRIES_PER_SLICE))
            for _ in some:
                first.positions.popleft()
            counted = first.counted
            if counted and self._dispatcher.ordered:
                some = self._dispatcher.mark_entries_failed(member, some)
            if counted and (counting := self._counting()) is not None:
                counting.on_entries_returned([each for each in some if each in member.outstanding])
                counted = False
            self._dispatcher.redeliver(member, some, counted=counted and not first.leaves)
            if first.positions:
                return False
            if first.leaves:
                self._dispatcher.leave(member)
            self.waiting.popleft()
        self.waiting = None
        return True

    def return_all_entries(self) -> None:
        """Gives all entries of the queue back to the dispatcher at once, without letting other tasks run."""
        while not self.return_next_entries():
            pass

    async def finish(self) -> None:
        """Waits until all entries of the queue are given back to the dispatcher, in slices between which other tasks
        run."""
        turns = EventLoopSlices(self._clock)
        while not self.return_next_entries():
            if turns.is_slice_used_up:
                await turns.begin_slice()

    def clear(self) -> None:
        """Removes all entries from the queue, because no entry is outstanding any more. Consumers that were to be
        removed after their last entry stay in the queue, and are removed by the next call of `return_next_entries`."""
        for each in self.waiting or ():
            if isinstance(each, _Freed):
                each.positions = iter(())
            else:
                each.positions.clear()


# -------------------------------------------------------------------------------------------------------- probes
# A consumer asks whether it gets a message now, and waits for the answer only as long as that is being found out.
#
# The answer is given when the consumer got something, or when the pump has stopped for a reason that does not end by
# itself at once. An entry that is being read, a seek that is being stored and delays that are being looked up make the
# consumer wait: to answer "nothing" then would hide a message that was confirmed before the question. A subscription
# that is busy with others answers when everything that was confirmed before the question has gone to them. The answer
# follows the deliveries on the stream. Guarding tests: tests/broker/subscription/test_probes.py.


SHORT_BLOCK_REASONS = (Blocked.MOVING, Blocked.FINDING_DELAYS)
"""Reasons that end within one write or read."""


class DeliveryProbe(msgspec.Struct, eq=False):
    """The question of a consumer whether it gets a message now. `delivered`: how many messages it had got before the
    question; `last`: the last entry of the log at that time. `answer`: gets the reason why the consumer gets nothing;
    NO if it got something."""

    member: Member
    delivered: int
    last: Position
    answer: asyncio.Future[Blocked]


def judge_probe(probe: DeliveryProbe, dispatcher: Dispatcher, blocked: Blocked | None) -> Blocked | None:
    """Returns the answer to a probe: the reason why its consumer gets no message now, or NO if it got one. Returns None
    if the answer is not known yet. `blocked`: why the pump has stopped; None: it has more to do, or waits for a
    read."""
    member = probe.member
    if member.delivered_messages != probe.delivered:
        return Blocked.NO
    if member not in dispatcher.policy.candidates:
        return Blocked.INACTIVE
    if not member.may_receive:
        return Blocked.TOO_MANY_UNACKED if member.blocked else Blocked.NO_PERMITS
    if blocked is not None:
        return None if blocked in SHORT_BLOCK_REASONS else blocked
    if dispatcher.read_position > probe.last and not dispatcher.redelivery_entry_count:
        return Blocked.CAUGHT_UP
    return None


# ---------------------------------------------------------------------------------------------------------- pump


_LOG = logging.getLogger("magnetar.broker.subscription.subscription")

PUMPED_ENTRIES_MAX = 1000
"""Entries handed out between two checks of the consumers' queues."""
RATE_CHECKED_AGAIN_S = 1.0
"""Seconds after which a subscription that waits for a rate looks again: the rate may have become higher meanwhile."""
SLOTS_PER_SLICE = 1000
"""Slots of Key_Shared that are checked after a join or a leave between two readings of the clock: half a millisecond.
"""


class SubscriptionDeliveryPump:
    """Delivers the entries of one subscription to its consumers. It has the entries that were read ahead, and the
    entries that are being given back. `blocked`: the reason why nothing can be delivered now; None: the pump goes on by
    itself."""

    __slots__ = (
        "_buffer", "_clock", "_closed", "_config", "_cursor", "_delayed", "_dispatcher", "_due", "_end_told",
        "_full_said", "_log", "_loop", "_memory", "_probes", "_returned", "_started", "_subscription", "_timer",
        "_wakes_at", "blocked", "is_moving", "rates",
    )  # fmt: skip

    def __init__(
        self, subscription: Subscription, clock: Clock, config: BrokerConfig, memory: ReadMemoryBudget | None = None
    ) -> None:
        self._subscription = subscription
        self._cursor = subscription.cursor
        self._dispatcher = subscription.dispatcher
        self._delayed = subscription.delayed
        self._log = subscription.log
        self.blocked: Blocked | None = Blocked.NO_CONSUMER
        self.rates: tuple[RateLimit, ...] = (RateLimit(),)  # its own first, then those of what it is part of
        self.is_moving = False  # nothing is delivered: a seek is not durable yet, or the topic closes
        self._config = config
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._memory = memory or ReadMemoryBudget(config.read_memory_bytes)
        self._buffer: ReadAheadBuffer | None = None  # None, as the next two: most subscriptions have no consumer
        self._returned: RedeliveryReturnQueue | None = None
        self._started: Tasks | None = None
        self._probes: list[DeliveryProbe] | None = None  # that have no answer yet
        self._due = False
        self._closed = False
        self._full_said = False
        self._end_told = False
        self._timer: asyncio.TimerHandle | None = None  # runs until the debt of a rate is paid …
        self._wakes_at = 0.0  # … at that time

    @property
    def _at_hand(self) -> ReadAheadBuffer:
        """Returns the buffer of entries that were read ahead. Creates it on the first use, like `return_queue` and
        `_tasks`."""
        if self._buffer is None:
            self._buffer = ReadAheadBuffer(
                self._subscription.name, self._log, self._clock, self._config, self._dispatcher, self.wake,
                self.deliver_available_entries, self._tasks, self._memory, self._subscription.disconnect_all,
                self._subscription.skip_entries, self._find_next_to_read, self._find_last_to_read,
            )  # fmt: skip
        return self._buffer

    @property
    def return_queue(self) -> RedeliveryReturnQueue:
        """The entries that consumers gave back, and that the dispatcher has not got yet."""
        if self._returned is None:
            self._returned = RedeliveryReturnQueue(self._dispatcher, self._counting, self._clock)
        return self._returned

    @property
    def _tasks(self) -> Tasks:
        if self._started is None:
            self._started = Tasks()
        return self._started

    @property
    def _title(self) -> str:
        return f"{self._log.topic}/{self._subscription.name}"

    def _counting(self) -> HeldBackEntries | None:
        """Returns the object that counts redeliveries; None if neither a dead-letter policy nor ordered redelivery
        needs one."""
        letters = self._subscription.dead_letters
        return letters if letters is not None and letters.may_hold_back_entries else None

    def wake(self) -> None:
        """Schedules one run of `deliver_available_entries` in the next turn of the event loop. Several calls schedule
        only one run. Does nothing after `stop`."""
        if not self._due and not self._closed:
            self._due = True
            self._loop.call_soon(self.deliver_available_entries)

    def deliver_available_entries(self) -> None:
        """Delivers entries to the consumers now, until no consumer can get the next entry or a slice of the loop is
        used up; then the rest is delivered in the next turn."""
        self._due = False
        if self._closed:
            return
        if self.is_moving:
            self.blocked = Blocked.MOVING
            return  # the store wakes it when that is durable; nothing wakes that of a topic which closes
        self._hand_out_some()
        if self._delayed is not None and self._delayed.core.count:
            self._delayed.set_release_timer(self._dispatcher)  # also for what was just held
        if self._probes is not None:
            self._answer_probes(self._probes)

    def probe_delivery_to(self, member: Member) -> asyncio.Future[Blocked]:
        """Returns a future with the reason why the consumer gets no message now; NO if it got one since this call. All
        entries that the log has now are considered. The future fails with ConnectionLost when the consumer leaves or
        the pump stops."""
        answer: asyncio.Future[Blocked] = self._loop.create_future()
        if self._probes is None:
            self._probes = []
        self._probes.append(DeliveryProbe(member, member.delivered_messages, self._log.shape.last_position, answer))
        self.wake()
        return answer

    def _answer_probes(self, probes: Sequence[DeliveryProbe]) -> None:
        blocked = None if self._due else self.blocked
        left = list[DeliveryProbe]()
        for probe in probes:
            if probe.answer.done():  # its caller was cancelled
                continue
            if (why := judge_probe(probe, self._dispatcher, blocked)) is None:
                left.append(probe)
            else:
                probe.answer.set_result(why)
        self._probes = left or None

    def end_probes(self, member: Member | None = None) -> None:
        """Fails the probes of a consumer that leaves with ConnectionLost, because it gets no more messages. `member`:
        the consumer; None: all consumers."""
        for probe in self._probes or ():
            if (member is None or probe.member is member) and not probe.answer.done():
                probe.answer.set_exception(ConnectionLost("the consumer is closed"))

    def _hand_out_some(self) -> None:
        end = self._clock.monotonic() + LOOP_SLICE_S
        returns, policy = self._returned, self._dispatcher.policy
        while (
            returns is not None and returns.waiting and not returns.return_next_entries()
        ) or not policy.rebalance_slots(SLOTS_PER_SLICE):
            if self._clock.monotonic() > end:
                self.wake()
                return
        for event in policy.take_active_changes():
            self._subscription.consumers[event.member.id].outlet.on_active_changed(event.active)
        now_ms = TIME_AFTER_ALL_MS
        if self._delayed is not None and self._dispatcher.delaying:
            if not self._delayed.is_ready:
                self.blocked = Blocked.FINDING_DELAYS
                return
            now_ms = self._delayed.release_due_entries(self._dispatcher)
        handed_out = 0
        while handed_out < PUMPED_ENTRIES_MAX and (now := self._clock.monotonic()) <= end:
            rates: Sequence[RateLimit] = ()
            for rate in self.rates:
                if rate.limited:  # seldom: else no list is made
                    rates = [each for each in self.rates if each.limited]
                    break
            if rates and self._throttled(rates, now):
                return
            if self._buffer is not None and self._buffer.reading_again and self._subscription.consumers:
                self.blocked = None
                return  # it is handed out before anything new
            policy = self._dispatcher.policy
            if policy.paced:
                policy.advance_clock(now)
            want = self._dispatcher.choose_next_read()
            if isinstance(want, Blocked):
                self.blocked = want
                if policy.paced and (wait_s := policy.next_release_s()):
                    self._wake_later(wait_s, now)
                if want is Blocked.HOLES or self._full_said:
                    self._log_full(want)
                if self._log.state is TopicState.TERMINATED:
                    self._notify_end()
                return
            self.blocked = None
            found = self._find_entries(want, end)
            if found is None:
                return
            passed_over, entries = found
            handed_out += passed_over
            if not entries:
                continue
            entries = entries[: count_entries_within_rates(rates, entries, now)] if rates else entries
            before = self._dispatcher.progress_marker
            for entry in entries:
                if entry.expiry is not None or entry.redriven_to:  # seldom: else the time of day is not asked for
                    self._subscription.expired.acknowledge_expired_messages(entries, self._clock.wall_ms())
                    break
            deliveries = self._dispatcher.assign_entries(entries, now_ms)
            for rate in rates:
                for each in deliveries:
                    rate.spend_tokens(each.entry.count, each.entry.size, now)
            self._deliver(deliveries)
            if self._dispatcher.parked:
                self._at_hand.add_waiting_entries(
                    [entry for entry in self._dispatcher.parked if isinstance(entry, StoredEntry)]
                )
            handed_out += len(entries)
            if not deliveries and self._dispatcher.progress_marker == before:
                self.blocked = self._dispatcher.why_blocked() or Blocked.NO_PERMITS
                return
        self.wake()

    def _find_entries(
        self, want: PlannedRead | ReadForRedelivery, end: float
    ) -> tuple[int, Sequence[StoredEntry]] | None:
        """Returns how many of the entries `want` the filter has acknowledged, and the others, which may be assigned;
        None if nothing can be done before a read, or a thread that judges a long entry, is done."""
        policy, filtering = self._dispatcher.policy, self._subscription.filtering
        unread: int | None = 0
        if filtering is not None and isinstance(want, PlannedRead):
            unread = filtering.ack_excluded_unread_entries(self._log, want.position)
            if unread:
                policy.on_entries_passed_over(1)  # however many: none of them was read
                return 1, ()
        entries = self._at_hand.get_requested_entries(want, end) if unread is not None else ()
        if not entries and policy.is_looking_ahead and isinstance(want, PlannedRead):  # they go out during the read
            if (again := self._dispatcher.choose_waiting_entries()) is None:
                return None
            want, entries = again, self._at_hand.get_requested_entries(again, end)
        if not entries:
            return None
        if filtering is None:
            return 0, entries
        judged, wanted = filtering.select_wanted_entries(
            entries, self._log.world, end, new=isinstance(want, PlannedRead)
        )
        if not judged:
            return None
        if isinstance(want, PlannedRead):
            policy.on_entries_passed_over(judged - len(wanted))
        return judged - len(wanted), wanted

    def _find_next_to_read(self, position: Position) -> Position | None:
        filtering = self._subscription.filtering
        return position if filtering is None else filtering.find_next_to_read(self._log, position)

    def _find_last_to_read(self, position: Position) -> int:
        filtering = self._subscription.filtering
        return ENTRY_ID_MAX if filtering is None else filtering.find_last_to_read(self._log, position)

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        of_each: dict[int, list[Delivery]] = {}
        for each in deliveries:
            of_each.setdefault(each.member.id, []).append(each)
        for id_, own in of_each.items():
            consumer = self._subscription.consumers[id_]
            try:
                if consumer.outlet.deliver(own):
                    self._pause(consumer)
            except Exception as error:  # a fault of the broker at one connection: the other consumers get theirs
                _LOG.exception("%s: a consumer that cannot be sent anything is disconnected", self._title)
                consumer.member.paused = True
                self._tasks.spawn(self._disconnect(consumer, error), "end of a consumer that cannot be sent anything")
            if consumer.member.blocked or self._dispatcher.full:
                positions = find_oversized_entries(consumer.member, self._dispatcher.limits)
                if positions:
                    self._tasks.spawn(self._judge(positions), "look at entries that block consumers")
        if self._buffer is not None:
            self._buffer.discard_delivered_entries(deliveries)

    async def _disconnect(self, consumer: Consumer, error: Exception) -> None:
        if self._subscription.consumers.get(consumer.member.id) is consumer:
            self._subscription.disconnect(consumer, InternalError(f"it cannot be sent anything: {error!r}"))

    async def _judge(self, positions: Sequence[Position]) -> None:
        """Acknowledges those of the entries that are malformed (`is_malformed_entry`), because no consumer can read
        them."""
        for position in positions:
            if self._cursor.is_acked_or_pending(position):
                continue
            try:
                entry = await self._log.reader.read_entry(position)
            except MagnetarError:
                continue  # trimmed, or not to be read now: its consumer has it
            if await run_in_thread_if_slow(entry.frames[-1], self._log.world, is_malformed_entry, entry.payload):
                _LOG.error("%s: entry %s is malformed, and discarded", self._title, position)
                self._subscription.skip_entries([position])

    def delay_entry_until(self, position: Position, at_ms: int) -> None:
        """Holds a new entry back until `at_ms` (ms since the epoch), if the subscription type delays messages. Does
        nothing if the subscription has a filter: then the entry is held back when it is read, if it is wanted."""
        if self._subscription.filtering is not None:
            return
        if self._delayed is not None and (self._dispatcher.delaying or self._delayed.core.count):
            self._delayed.delay_until(position, at_ms)

    def _log_full(self, why: Blocked) -> None:
        """Writes a log line when the acknowledgement state has become too large, and when it is small enough again."""
        if why is Blocked.HOLES and not self._full_said:
            _LOG.warning(
                "%s: %s (%d bytes, %d entries after %s); nothing new is delivered until then",
                self._title, why.value, self._cursor.memory_bytes, self._cursor.hole_entry_count, self._cursor.mark,
            )  # fmt: skip
            self._full_said = True
        elif self._full_said and self._cursor.memory_bytes < self._config.cursor_memory_bytes // 2:
            _LOG.info("%s: acknowledgement state has shrunk: delivery resumes", self._title)
            self._full_said = False

    def _throttled(self, rates: Sequence[RateLimit], now: float) -> bool:
        """Returns True if a dispatch rate is exceeded. Then nothing may be read or delivered; a timer runs the pump
        again when the rate permits."""
        seconds = compute_rate_delay_s(rates, now)
        if seconds > 0:
            self.blocked = Blocked.THROTTLED
            self._wake_later(min(seconds, RATE_CHECKED_AGAIN_S), now)
        return seconds > 0

    def _wake_later(self, seconds: float, now: float) -> None:
        """Sets the timer to run the pump in `seconds`, unless the timer ends earlier already."""
        if self._timer is not None:
            if self._wakes_at <= now + seconds:
                return
            self._timer.cancel()
        self._wakes_at = now + seconds
        self._timer = self._loop.call_later(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self.wake()

    def _notify_end(self) -> None:
        """Notifies the consumers that the topic is terminated, if all of its entries were delivered."""
        if self._end_told or not self._subscription.consumers:
            return
        if self._cursor.pending is not None:
            return  # an abort gives back
        if self._dispatcher.has_entries_for_later():
            return
        shape = self._log.shape
        if not self._dispatcher.redelivery_entry_count and not shape.has_entry(
            shape.position_at_or_after(self._dispatcher.read_position)
        ):
            self._end_told = True
            for consumer in self._subscription.consumers.values():
                consumer.outlet.on_end_of_topic()

    def on_consumer_joined(self) -> None:
        """Called when a consumer has joined. Runs the pump, and makes it notify the consumers of the end of a
        terminated topic again."""
        self._end_told = False
        self.wake()

    def _pause(self, consumer: Consumer) -> None:
        """Delivers nothing to a consumer whose connection is full, until its queue is drained."""
        if consumer.waiting is None:
            consumer.member.paused = True
            consumer.waiting = self._tasks.spawn(self._resume(consumer), "drain of a consumer's queue")

    async def _resume(self, consumer: Consumer) -> None:
        try:
            await consumer.outlet.wait_drained()
        except MagnetarError:
            return  # the stream broke; its handler removes the consumer
        except Exception as error:  # a fault of the broker: the consumer would get nothing more without notice
            _LOG.exception("%s: a consumer whose queue was full is disconnected", self._title)
            self._subscription.disconnect(consumer, InternalError(f"its connection cannot be waited for: {error!r}"))
            return
        consumer.waiting = None
        consumer.member.paused = False
        self.wake()

    # ------------------------------------------------------------------ what it reads, and its end
    def restart_with_log(self, log: ReadableLog) -> None:
        """Replaces the log from which the pump delivers. The caller moves the read position; entries in memory are
        dropped."""
        self._log = log
        if self._buffer is not None:
            self._buffer.restart_with_log(log)

    def switch_log(self, log: ReadableLog) -> None:
        """Replaces the log from which the pump delivers, and keeps the entries in memory. Up to the last entry that
        consumers may get, both logs must have the same entries."""
        self._log = log
        if self._buffer is not None:
            self._buffer.switch_log(log)

    def clear_buffer(self) -> None:
        """Drops the entries that were read ahead. They are read again when the dispatcher needs them."""
        if self._buffer is not None:
            self._buffer.clear()

    def stop(self) -> None:
        """Stops the delivery for good: cancels the timer and all tasks, and fails the probes."""
        self._closed = True
        self.end_probes()
        if self._buffer is not None:
            self._buffer.stop()
        if self._timer is not None:
            self._timer.cancel()
        if self._started is not None:
            self._started.cancel()

    async def wait_stopped(self) -> None:
        """Waits until the tasks that `stop` has cancelled have ended. Must be called after `stop`."""
        if self._started is not None:
            await self._started.drain()
