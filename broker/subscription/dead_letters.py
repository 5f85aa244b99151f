"""Dead letters and back-off by the server, for every client of a subscription (`HeldBackEntries`; policy:
broker/subscription/core/redelivery_backoff.py). Before them in this file: the search for all chunks of a message, which
expiry, skips and seeks use too (`find_whole_message`, `find_remaining_chunks`, `move_mark_before_chunked_message`).

With a policy on a Shared or Key_Shared subscription each failed delivery counts: that of an entry that is given back,
and that of an entry whose consumer disconnects without giving it back, as a message may crash its consumers. All
entries that were outstanding at a lost consumer count, also those that only waited in its receiver queue. So with a
policy on, that queue should be small.

Order, for one entry: counted and held → stored with the cursor → then either delivered again when its wait is over, or
    DEAD_LETTER_STEPS   read → published to the dead-letter topic → its receipt → acknowledged → stored
The copy and the acknowledgement are no transaction. A crash before the acknowledgement is stored doubles a letter and
loses none; with deduplication the second copy is dropped (broker/subscription/core/redelivery_backoff.py). A restart
continues with the entries that are held back (`BackoffQueue.restore_backoffs`). Writing to a dead-letter topic is
retried, with pauses up to a minute; the messages stay in the topic and keep their ledgers.

**A message in chunks** is moved as a whole: when one of its entries was given back too often, all of them are moved,
also those that are counted less or are outstanding (`find_whole_message`). They are published in order, some
LETTER_GROUP_BYTES at a time, and acknowledged after the last. A crash between them leaves a copy that is not complete.
The next try repeats it under the same uuid, so that a consumer puts both together to one message. While the rest of a
message may still be on its way to the log, the move is tried again. Entries of a message that will never be complete
are moved one by one.

Where the subscription is ordered (core/dispatch.py), Exclusive and Failover have back-off and dead letters too, and
there is a back-off without a policy. Else subscriptions with one consumer at a time have none, and readers never. Nor
has a topic that is the dead-letter topic of its own policy, or is named like one: a dead letter stays there
(core/redelivery_backoff.py `DeadLetterPolicy.resolve_for_subscription`).

Where it is ordered, the counts of a batch are those of its first unacknowledged message (core/cursor.py), and only that
message is moved: the messages after it were not given to a program yet. If the messages of a batch cannot be told
apart, because they are encrypted or damaged, all of them are moved.
Guarding tests: tests/broker/subscription/test_dead_letters.py, tests/client/consume/test_redelivery_order.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from msgspec.structs import replace

from ...proto.applied import AppliedPolicies
from ...proto.entry import parse_header, parse_stored_head
from ...proto.errors import CorruptEntry, DataLost, InvalidRequest, MagnetarError, Unavailable
from ...proto.names import Position, TopicName
from ...proto.states import Failure
from ...runtime.clock import Clock
from ...runtime.tasks import Tasks
from ..common.retry import LogThrottle
from ..log.cache import StoredEntry
from ..log.log import ReadableLog
from ..log.unfolding import run_in_thread_if_slow
from .core.cursor import Cursor
from .core.cursor_state import bit_indexes
from .core.dispatch import Dispatcher
from .core.policy import MessageChunk, MessageChunkRun, find_chunk_run_at, find_chunk_runs
from .core.redelivery_backoff import (
    BackoffQueue,
    DeadLetterOrigin,
    DeadLetterPolicy,
    make_chunk_dead_letter,
    make_dead_letters,
    merge_dead_letter_policy,
)
from .cursors import DurableCursor

# ------------------------------------------------------------------------------------------------ whole_messages
# Looks up all chunks of the message of which one entry is a chunk, for the dead letters.
#
# Between the first and the last chunk of a message its producer publishes nothing else (client/core/chunking.py), and
# other producers anything. So the log is read backwards from the entry to its producer's entry before the message, and
# forwards until the message is whole. The cursor's mark ends the way back: what is before it is acknowledged. After
# chunk 0 the way back goes on for REPEATED_ENTRIES_MAX, because a producer repeats what has no receipt.
#
# | what is found | answer |
# |---|---|
# | the chunks from 0 to the last | the run of them |
# | no beginning, a gap, a damaged chunk, a later entry of the producer before its end | None: it is never whole |
# | the end of the log before the last chunk, which may be on its way | Unavailable; None after INCOMPLETE_GIVEN_UP_MS |
#
# Nothing is kept of what is read but the places. It costs the entries between the ends; dead letters are rare. Guarding
# tests: tests/broker/subscription/test_letters_of_chunks.py, tests/broker/subscription/core/test_chunk_runs.py.


SEARCH_WINDOW_ENTRIES = 256
"""Entries that one step of a backward search reads."""
LOG_READ_BYTES = 1 << 20
REPEATED_ENTRIES_MAX = 2000
SEARCH_ENTRIES_MAX = 200_000
"""Entries that one search reads, in both directions and of all messages that it looks for: some seconds. A chunk that
is not found by then counts as missing. A skip or seek among chunks of very many foreign messages costs no more."""
INCOMPLETE_GIVEN_UP_MS = 3_600_000
"""Milliseconds without a chunk after which an incomplete message at the end of the log has no producer any more."""


class _Budget:
    """The number of entries that a search may still read."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = SEARCH_ENTRIES_MAX


async def find_whole_message(
    log: ReadableLog, entry: StoredEntry, mark: Position, now_ms: int, budget: _Budget | None = None
) -> MessageChunkRun | None:
    """Returns all chunks of the large message to which the chunk `entry` belongs; None if the message will never be
    complete. Does not search the entries up to and including `mark`. `now_ms`: ms since the epoch. `budget`: counts the
    entries that may still be read; None: SEARCH_ENTRIES_MAX. Raises Unavailable if the missing chunks may still arrive
    (the last one came less than INCOMPLETE_GIVEN_UP_MS ago), and the errors of reading the log; CorruptEntry if the
    head of an entry cannot be parsed."""
    search = _Search(log, entry, _Budget() if budget is None else budget)
    found = await search.before(mark)
    found.append(search.chunk(entry))
    latest_ms, went_on = entry.timestamp_ms, False
    async for each in search.after():
        if each.chunk_of == search.uuid:
            found.append(search.chunk(each))
            latest_ms = each.timestamp_ms
            if any(run.whole and entry.position in run.places for run in find_chunk_runs(found)):
                break
        elif search.is_from_same_producer(each):
            went_on = True
            break
    run, last = find_chunk_run_at(found, entry.position)
    if run.whole:
        return run
    if run.chunks and last and not went_on and search.at_end and now_ms - latest_ms < INCOMPLETE_GIVEN_UP_MS:
        raise Unavailable(f"the message of the chunk {entry.position} is not complete yet")
    return None


async def find_chunks_across_mark(log: ReadableLog, mark: Position) -> list[MessageChunkRun]:
    """Returns the complete chunked messages of which some chunks are at or before `mark`, and some are after it.
    Searches only the messages of the entry at the mark, and of the entries after it that one read returns. A message
    with a lost, missing, trimmed or unreadable chunk is not complete. Raises Unavailable if bookies do not answer."""
    shape, runs, seen, budget = log.shape, list[MessageChunkRun](), set[str](), _Budget()
    entries = list[StoredEntry]()
    if shape.has_visible_entry(mark) and shape.skipped_lost_range_end(mark) is None:
        with suppress(DataLost, InvalidRequest):  # a message of which a chunk is gone is not whole: no mark divides it
            entries += [await log.reader.read_entry(mark)]
    following = shape.next_unskipped_position(shape.position_after(mark))
    if shape.has_visible_entry(following):
        with suppress(DataLost, InvalidRequest):
            entries += await log.reader.read(following, LOG_READ_BYTES)
    for entry in entries:
        if not entry.chunk_of or entry.chunk_of in seen or budget.left <= 0:
            continue
        seen.add(entry.chunk_of)
        try:
            run = await find_whole_message(log, entry, Position(-1, -1), log.world.clock.wall_ms(), budget)
        except (Unavailable, DataLost, InvalidRequest):
            continue  # the rest is not here yet, or never will be
        if run is not None and run.places[0] <= mark < run.places[-1]:
            runs.append(run)
    return runs


async def find_remaining_chunks(log: ReadableLog, mark: Position) -> list[Position]:
    """Returns the positions of the chunks after `mark` of those messages whose first chunks are at or before `mark`.
    The caller acknowledges these chunks too, because a message can only be skipped or expired as a whole. Raises the
    errors of `find_chunks_across_mark`."""
    return [place for run in await find_chunks_across_mark(log, mark) for place in run.places if place > mark]


async def move_mark_before_chunked_message(log: ReadableLog, mark: Position) -> Position:
    """Returns `mark`, or, if `mark` is inside a chunked message, the position before this message. So a consumer that
    seeks to `mark` receives all chunks of the message. Raises the errors of `find_chunks_across_mark`."""
    return min(
        [mark, *(log.shape.position_before(run.places[0]) for run in await find_chunks_across_mark(log, mark))]
    )


class _Search:
    """A search for the other chunks of a message. It starts at one of its chunks, and goes backwards and forwards."""
    def __init__(self, log: ReadableLog, entry: StoredEntry, budget: _Budget) -> None:
        self._budget = budget
        self.uuid = entry.chunk_of
        self.at_end = False
        self._log = log
        self._entry = entry
        self._producer = parse_stored_head(entry.frames[-1]).metadata.producer_name

    def is_from_same_producer(self, entry: StoredEntry) -> bool:
        return parse_stored_head(entry.frames[-1]).metadata.producer_name == self._producer

    def chunk(self, entry: StoredEntry) -> MessageChunk:
        """Returns the entry as a MessageChunk. If the entry is damaged, its number is -1."""
        try:
            metadata = parse_header(entry.frames[-1]).metadata
        except CorruptEntry:
            return MessageChunk(entry.position, -1, 1)
        return MessageChunk(entry.position, metadata.chunk_id, metadata.num_chunks_from_msg)

    async def before(self, mark: Position) -> list[MessageChunk]:
        """Returns the chunks of the message that are between `mark` and the entry at which the search starts, in log
        order."""
        shape, found, left = self._log.shape, list[MessageChunk](), self._budget.left
        end = self._entry.position
        while left > 0 and (last := shape.position_before(end)) > mark and last < end and last.entry_id >= 0:
            first = max(
                Position(last.ledger_id, max(0, last.entry_id - SEARCH_WINDOW_ENTRIES + 1)), shape.position_after(mark)
            )
            window = [each async for each in self._read(first, last)]
            self._budget.left -= len(window)
            for each in reversed(window):
                left -= 1
                if each.chunk_of == self.uuid:
                    chunk = self.chunk(each)
                    found.append(chunk)
                    if chunk.number == 0:
                        left = min(left, REPEATED_ENTRIES_MAX)
                elif self.is_from_same_producer(each):
                    left = 0
                    break
            end = first
        return found[::-1]

    async def after(self) -> AsyncIterator[StoredEntry]:
        """Yields all entries after the one at which the search starts, until the end of the log or of the budget."""
        shape, budget = self._log.shape, self._budget
        position = shape.position_after(self._entry.position)
        while budget.left > 0 and shape.has_visible_entry(position := shape.next_unskipped_position(position)):
            async for each in self._read(position, Position(position.ledger_id, (1 << 62) - 1), once=True):
                yield each
                budget.left -= 1
                position = shape.position_after(each.position)
        self.at_end = budget.left > 0

    async def _read(self, first: Position, last: Position, *, once: bool = False) -> AsyncIterator[StoredEntry]:
        """Yields the entries of one ledger from `first` to `last`. `once`: only the entries that one read returns."""
        shape = self._log.shape
        position = shape.next_unskipped_position(first)
        while position <= last and shape.has_visible_entry(position):
            for each in await self._log.reader.read(position, LOG_READ_BYTES, last.entry_id):
                yield each
                position = shape.next_unskipped_position(shape.position_after(each.position))
            if once:
                return


# -------------------------------------------------------------------------------------------------- dead_letters


_LOG = logging.getLogger("magnetar.broker.subscription.dead_letters")

DEAD_LETTER_RETRY_S, RETRY_PAUSE_S_MAX = 1.0, 60.0
UNSTORED_COUNT_HOLD_MS = 3_600_000
"""For how many ms at most an entry is held back until its redelivery count is stored."""
ORDERED_BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Back-off of an entry that failed, where it holds back what follows it and no policy has a ladder: it is tried soon,
and then seldom."""
DEAD_LETTER_STEPS = ("read", "publish", "acknowledge", "store")
LETTER_GROUP_BYTES = 4 << 20
"""Bytes of a message in chunks that are in memory at a time, and one chunk more."""
ForwardLetters = Callable[[tuple[TopicName, int], TopicName, str, Sequence[bytes], int], Awaitable[object]]
"""Publishes copies of messages: (the source topic and its incarnation, the target topic, the producer name, the
messages as client-parts, a number by which the partition is chosen)."""


NO_FAILURES: Mapping[Position, Failure] = {}
"""What no consumer has said. One for all subscriptions: never add to it."""
KEPT_FAILURES_MAX = 200
"""Failures that are remembered of a subscription: 800 KB at most."""


class HeldBackEntries:
    """Holds back the entries of one subscription that wait for a back-off, and moves entries to the dead-letter topic.
    `store`: the cursor's storage; `forward`: the function that publishes copies; `wake`: a function that runs the
    delivery of the subscription in the next turn. At its creation, entries continue that an earlier owner of the topic
    held back."""

    __slots__ = (
        "_clock", "_cursor", "_dispatcher", "_forward", "_incarnation", "_log", "_loop", "_message", "_started_ms",
        "_store", "_subscription", "_tasks", "_timer", "_topic", "_wake", "applied", "failures", "held", "letters",
    )  # fmt: skip

    def __init__(
        self, subscription: str, log: ReadableLog, cursor: Cursor, store: DurableCursor, dispatcher: Dispatcher,
        clock: Clock, *, topic: TopicName, applied: AppliedPolicies, incarnation: int,
        forward: ForwardLetters, wake: Callable[[], None],
    ) -> None:  # fmt: skip
        self.letters = 0  # entries that were moved
        self.failures: Mapping[Position, Failure] = NO_FAILURES  # why entries were given back last
        self.held: BackoffQueue = dispatcher.held
        self._subscription = subscription
        self._log = log
        self._cursor = cursor
        self._store = store
        self._dispatcher = dispatcher
        self._clock = clock
        self._started_ms = clock.wall_ms() - clock.monotonic() * 1000
        self._topic, self._incarnation = topic, incarnation
        self.applied = applied  # `Subscription.apply` changes it
        self._forward = forward
        self._wake = wake
        self._tasks: Tasks | None = None  # most topics have none
        self._message: asyncio.Lock | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        if cursor.counts:
            self._move_soon(self.held.restore_backoffs(cursor.counts, self._policy(), self._now_ms()))
            self._arm()

    def _now_ms(self) -> int:
        """Returns the present time (ms since the epoch), computed from the time at which this object was created. It
        does not change when the wall clock is set, so that a clock that is set back does not prolong a back-off."""
        return int(self._started_ms + self._clock.monotonic() * 1000)

    def _policy(self) -> DeadLetterPolicy:
        """Returns the policy that is in force now."""
        return merge_dead_letter_policy(
            self.applied, self._store.properties
        ).resolve_for_subscription(self._topic, self._subscription)

    @property
    def may_hold_back_entries(self) -> bool:
        """True if entries that are given back may have to wait for a back-off, or may become dead letters. If False,
        the caller only needs to count the redelivery."""
        return self._dispatcher.ordered or self.must_count_disconnect_as_redelivery

    @property
    def must_count_disconnect_as_redelivery(self) -> bool:
        """True if the loss of a consumer's connection counts as a redelivery of each entry that was outstanding at
        it."""
        return bool(self._policy()) and (self._dispatcher.policy.individual or self._dispatcher.ordered)

    def record_failure_reasons(self, failures: Mapping[Position, Failure]) -> None:
        """Stores in memory why consumers gave entries back, by position. If there are more than KEPT_FAILURES_MAX,
        drops those of acknowledged entries, and then the oldest. A new owner of the topic does not have them."""
        kept = {position: each for position, each in self.failures.items() if position not in failures}
        kept |= {position: each.cut_long_texts() for position, each in failures.items()}
        if len(kept) > KEPT_FAILURES_MAX:
            kept = {position: each for position, each in kept.items() if not self._cursor.is_acked_or_pending(position)}
        self.failures = dict(islice(kept.items(), max(0, len(kept) - KEPT_FAILURES_MAX), None))

    def on_entries_returned(self, positions: Sequence[Position], *, at_once: bool = False) -> None:
        """Called before the dispatcher takes back the entries at `positions`. Counts a redelivery of each entry; a task
        stores the counts. Then holds each entry back, until the end of its back-off or until it is moved to the
        dead-letter topic. `at_once`: the entries have no back-off, so that only dead letters are held back."""
        policy, now_ms = self._policy(), self._now_ms()
        counted = [position for position in positions if not self._cursor.is_acked_or_pending(position)]
        for position in counted:
            times = self._cursor.redelivery_count(position) + 1
            dead = bool(policy) and policy.is_dead_letter(times)
            until_ms = 0 if dead or at_once else now_ms + self._wait_ms(policy, times)
            self._cursor.count_redelivery(position, until_ms)
            if dead or not at_once:
                self.held.add(position, None if dead else now_ms + UNSTORED_COUNT_HOLD_MS)  # until it is stored
        if counted:
            self._spawn(self._stored(counted), "store of redelivery counts")

    def _wait_ms(self, policy: DeadLetterPolicy, times: int) -> int:
        if self._dispatcher.ordered and not policy.backoff_s:
            policy = replace(policy, backoff_s=ORDERED_BACKOFF_S)
        return policy.backoff_ms(times)

    async def _stored(self, positions: list[Position]) -> None:
        """Waits until the redelivery counts are durable. Then starts the back-off of these entries, and moves the dead
        letters."""
        try:
            await self._store.make_acks_durable_future()
        except MagnetarError:
            return  # the topic belongs to another broker
        policy, dead = self._policy(), list[Position]()
        for position in positions:
            count = self._cursor.counts.get(position)
            if count is None:
                self.held.discard(position)  # acknowledged meanwhile
            elif policy and policy.is_dead_letter(count.redeliveries):
                dead.append(position)
            elif position in self.held:
                self.held.add(position, count.until_ms)
        self._move_soon(dead)
        self._release()

    def _release(self) -> None:
        """Makes the entries deliverable whose back-off has ended."""
        due = self.held.take_due(self._now_ms())
        if due:
            self._dispatcher.add_released_entries(due)
            self._wake()
        self._arm()

    def _arm(self) -> None:
        """Sets the timer for the entry whose back-off ends next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_ms = self.held.next_due_ms
        if next_ms is not None:
            wait_s = max(0.0, (next_ms - self._now_ms()) / 1000)
            self._timer = self._loop.call_later(wait_s, self._release)

    # ------------------------------------------------------------------ dead letters
    def _move_soon(self, positions: Sequence[Position]) -> None:
        for position in positions:
            self._spawn(self._dead_letter(position), "dead letter")

    async def _dead_letter(self, position: Position) -> None:
        """Moves the entry to the dead-letter topic, and retries until that succeeds. Stops if the entry is acknowledged
        or trimmed, or if the policy has changed."""
        throttle, pause_s = LogThrottle(self._clock), DEAD_LETTER_RETRY_S
        while position in self.held:
            policy, times = self._policy(), self._cursor.redelivery_count(position)
            if not policy.is_dead_letter(times) or not self._log.shape.has_visible_entry(position):
                break  # the policy has changed, or the entry is acknowledged or trimmed
            try:
                await self._move(position, policy, times)
                return
            except MagnetarError as error:
                if throttle.should_log(error):
                    name = f"{self._log.topic}/{self._subscription}"
                    _LOG.warning("%s: %s is no dead letter yet: %s", name, position, error)
            await asyncio.sleep(pause_s)
            pause_s = min(RETRY_PAUSE_S_MAX, 2 * pause_s)
        if position in self.held:
            self.held.discard(position)
            self._dispatcher.add_released_entries([position])
            self._wake()

    async def _move(self, position: Position, policy: DeadLetterPolicy, times: int) -> None:
        entry = await self._log.reader.read_entry(position)
        if not entry.chunk_of:
            await self._move_entry(entry, policy, times)
            return
        if self._message is None:
            self._message = asyncio.Lock()
        async with self._message:  # the first of its chunks takes the others along
            if position in self.held:
                message = await find_whole_message(self._log, entry, self._cursor.mark, self._clock.wall_ms())
                if message is None:
                    await self._move_entry(entry, policy, times)
                else:
                    await self._move_message(position, message, policy, times)

    async def _move_entry(self, entry: StoredEntry, policy: DeadLetterPolicy, times: int) -> None:
        position = entry.position
        source = DeadLetterOrigin(
            self._log.topic, self._subscription, position, times, policy.max_redeliver_count,
            self.failures.get(position),
        )  # fmt: skip
        done = frozenset(bit_indexes(self._cursor.acked_or_pending_bits(position)))
        letters = await run_in_thread_if_slow(
            entry.frames[-1], self._log.world, make_dead_letters, source, entry.payload, done, self._clock.wall_ms()
        )
        if self._dispatcher.ordered and len(letters) == entry.count - len(done) > 1:  # what follows was not given yet
            await self._publish(policy, source, letters[:1])
            await self._first_moved(position, entry.count, done, times)
            return
        await self._publish(policy, source, letters)
        await self._moved(position, (position,), entry.count, times)

    async def _move_message(
        self, position: Position, message: MessageChunkRun, policy: DeadLetterPolicy, times: int
    ) -> None:
        source = DeadLetterOrigin(
            self._log.topic, self._subscription, message.chunks[-1], times, policy.max_redeliver_count,
            self.failures.get(position),
        )  # fmt: skip
        letters, now_ms = list[bytes](), self._clock.wall_ms()
        for place in message.chunks:
            letters.append(make_chunk_dead_letter(source, (await self._log.reader.read_entry(place)).payload, now_ms))
            if sum(map(len, letters)) >= LETTER_GROUP_BYTES:
                await self._publish(policy, source, letters)
                letters = []
        if letters:
            await self._publish(policy, source, letters)
        await self._moved(position, message.places, 1, times)

    async def _publish(self, policy: DeadLetterPolicy, source: DeadLetterOrigin, letters: Sequence[bytes]) -> None:
        topic, here = policy.dead_letter_topic(source.topic, self._subscription), (self._topic, self._incarnation)
        await self._forward(here, topic, source.producer_name, letters, source.position[1])

    async def _first_moved(self, position: Position, messages: int, done: frozenset[int], times: int) -> None:
        """Acknowledges the first unacknowledged message of a batch, because its dead letter is stored."""
        if position not in self.held:
            return
        first = next(index for index in range(messages) if index not in done)
        self._cursor.ack_messages_of_batch(position, 1 << first, messages)
        self.held.discard(position)
        self._dispatcher.add_released_entries([position])
        await self._on_stored(f"message {first} of {position}", times)

    async def _moved(self, position: Position, places: Sequence[Position], count: int, times: int) -> None:
        """Acknowledges the entries `places` of a message, because its dead letter is stored."""
        if position not in self.held:
            return  # acknowledged meanwhile, or the subscription was moved and wants it again
        for place in places:
            if self._cursor.ack(place) or self._ack_rest(place, count):
                self._dispatcher.on_acked(None, place)
            self.held.discard(place)
        await self._on_stored(str(position), times)

    async def _on_stored(self, what: str, times: int) -> None:
        self.letters += 1
        topic = self._log.topic
        _LOG.info("%s/%s: %s is a dead letter after %d redeliveries", topic, self._subscription, what, times - 1)
        await self._store.make_acks_durable_future()
        self._wake()

    def _ack_rest(self, position: Position, messages: int) -> bool:
        """Acknowledges the remaining messages of a batch, except those that are pending in a transaction. Returns True
        if anything changed."""
        version = self._cursor.version
        self._cursor.ack_messages_of_batch(position, (1 << messages) - 1, messages)
        return self._cursor.version != version

    def _spawn(self, work: Coroutine[Any, Any, object], name: str) -> None:
        if self._tasks is None:
            self._tasks = Tasks()
        self._tasks.spawn(work, name)

    def stop(self) -> None:
        """Stops the timer of the back-offs, and cancels the tasks that store counts and move dead letters."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks is not None:
            self._tasks.cancel()

    async def wait_stopped(self) -> None:
        """Waits until the tasks that `stop` has cancelled have ended. Must be called after `stop`."""
        if self._tasks is not None:
            await self._tasks.drain()
