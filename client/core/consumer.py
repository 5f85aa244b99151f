"""The core of one partition's consumer: decides what it asks the broker for, and what it acknowledges, over all its
connections.

Facts in (opened, lost, delivered, taken, acknowledged, given back, answers, time passed), effects out, in order. The
driver does each effect at once. Times are seconds of a monotonic clock.

**Permits** are conserved (client/core/redelivery.py) and counted anew for each connection: a message that arrived over
an earlier connection frees no permit of the present one. **Acknowledging** is at least once: acknowledgements are sent
in groups (client/core/redelivery.py), and those that were not sent when the connection is lost are sent over the next
one. **Redelivery** of an entry that was negatively acknowledged, or not acknowledged in time, is requested when its
delay is over. Without a connection nothing is requested, because the broker delivers all unacknowledged entries again
over the next connection. A chunk that is requested again because its message is incomplete does not count as negatively
acknowledged. **Reconnect.** After a lost connection or an error that may pass the consumer is opened again, with
back-off; one of FINAL_ERRORS finishes it. Messages that wait for the application are discarded, and the broker delivers
them again. A reader continues after the last message that the application took, or at the first chunk of a message that
it has not read whole (`ReaderPosition`). **Failover.** A consumer that is not active any more drops what the
application has not received: the active one gets it. **Seek.** When the broker has moved the cursor, all messages that
were delivered before are discarded, together with their acknowledgements and negative acknowledgements that were not
sent. An acknowledgement that is called later, of a message received before the seek, counts. A reader that was moved to
a time or an index, and has read nothing since, seeks there again after a reconnect. It gets its first permits when the
broker has answered: only the broker knows that position. **Requests** get exactly one AnswerRequest each, with
ConnectionLost if the connection is lost before the answer. **Threads.** `permits.count_used_permits` and
`set_resume_point` may be called from any thread. All else belongs to one thread. Guards:
tests/client/core/test_consumer_walk.py, tests/client/core/test_permits.py.

Also in this file, below its heading: entries that are kept from the application because they cannot be decrypted
(withheld)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from math import inf
from typing import Any

from pyroaring import BitMap

from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import ConnectionLost, MagnetarError, SubscriptionNotFound, TopicNotFound
from ...proto.names import Position
from .chunking import (
    CHUNK_REDELIVERY_S_MAX,
    CHUNK_REDELIVERY_S_MIN,
    FIRST_CHUNK_DELAY_S_MAX,
    INCOMPLETE_EXPIRE_S,
    ChunkAddResult,
    ChunkAssembler,
    PartialMessage,
)
from .effects import (
    FINAL_ERRORS,
    AnswerRequest,
    AttachedConsumerOptions,
    AttachToBroker,
    ConsumerEffect,
    DetachFromBroker,
    DropMessagesAfterFailure,
    DropQueuedMessages,
    EndWithError,
    GrantPermits,
    PartitionClientState,
    ReaderPosition,
    ReportSeekDone,
    RequestRedelivery,
    SeekIndex,
    SendAcks,
    SendSeekRequest,
)
from .failover import Backoff
from .redelivery import (
    ACK_GROUP_MESSAGES,
    AckTimeoutTracker,
    AckTracker,
    DuplicateFilter,
    EntrySets,
    NackTracker,
    ReceivePermits,
    positions_of,
)

# ------------------------------------------------------------------------------------------------------ withheld
# Entries that are kept from the application because they cannot be decrypted (ConsumerCryptoFailureAction.FAIL).
#
# An entry is withheld from its first delivery until it is decrypted, or acknowledged, or all is delivered again. In
# between it is asked for again after the ack time-out, like what is not acknowledged in time. Its permits count
# as held until then; without an ack time-out they stay held, and a full queue of such entries stops the consumer. No
# cumulative ack covers it. Guards: tests/client/core/test_withheld.py, tests/client/model/test_end_to_end.py.


class WithheldEntries:
    """The entries that a consumer withholds from the application because it cannot decrypt them. `permits`: the number
    of permits that each entry uses."""

    __slots__ = ("permits",)

    def __init__(self) -> None:
        self.permits: dict[Position, int] = {}  # 0: they were given back

    def __bool__(self) -> bool:
        return bool(self.permits)

    def add(self, place: Position, permits: int) -> None:
        """Adds the entry at `place`; an entry that is withheld already uses `permits` more permits."""
        self.permits[place] = self.permits.get(place, 0) + permits

    def on_redelivery_requested(self, places: Iterable[Position]) -> int:
        """Fact: the broker is asked to deliver the entries `places` again. Their permits are free; the entries stay
        withheld. Returns the number of permits that this frees."""
        freed = 0
        for place in places:
            if place in self.permits:
                freed += self.permits[place]
                self.permits[place] = 0
        return freed

    def release(self, place: Position) -> int:
        """Removes the entry at `place`, because it is decrypted or acknowledged now. Returns the number of permits that
        this frees."""
        return self.permits.pop(place, 0)

    def clear(self) -> int:
        """Removes all entries, because they will be delivered again. Returns the number of permits that this frees."""
        freed = sum(self.permits.values())
        self.permits.clear()
        return freed

    def find_cumulative_ack_limit(self, place: Position) -> Position:
        """Returns the highest position that a cumulative acknowledgement at `place` may cover: `place` itself, or the
        position before the first withheld entry."""
        first = min((each for each in self.permits if each <= place), default=None)
        return place if first is None else Position(first[0], first[1] - 1)


# ------------------------------------------------------------------------------------------------------ consumer


CHUNK_EXPIRY_CHECK_S = INCOMPLETE_EXPIRE_S / 4


class ConsumerCore:
    """The core of one partition's consumer: decides which acknowledgements, permits and requests are sent to the
    broker, and when. `error`: the error with which the consumer was finished; None: it is not finished. `now`: seconds
    of a monotonic clock. See the head of the module."""

    def __init__(
        self, options: AttachedConsumerOptions, *, queue_size: int, lock: AbstractContextManager[Any], backoff: Backoff
    ) -> None:
        self.state = PartitionClientState.OPENING
        self.error: MagnetarError | None = None  # it is finished
        self.delivered = 0  # messages that the application got, or will get
        self.delivered_bytes = 0  # of the entries that came
        self.negatively_acknowledged = 0  # entries, as often as the application said so
        self.last_taken: Any = None  # readers only: the last message that the application has
        self.permits = ReceivePermits(queue_size, lock)
        self.chunks = ChunkAssembler(
            pending_max=options.chunks_pending_max, auto_ack=options.chunks_auto_ack,
            ordered=options.ordered, log_order=options.log_order,
        )  # fmt: skip
        self._options = options
        self._backoff = backoff
        self._acks = AckTracker()
        self._group_messages = ACK_GROUP_MESSAGES if options.ack_group_s else 1
        self._nacks = NackTracker()
        self._pieces = NackTracker()  # chunks that are given back, and that the application has not seen
        self._unacked = AckTimeoutTracker(options.ack_timeout_s, options.ack_timeout_tick_s)
        self.ack_due: float | None = None  # when acks are sent; None: the first one is to be told of soon
        self._tick_due: float | None = None
        self._chunk_due: float | None = None
        self.has_new_times = False  # what came may make `next_timer_at` earlier
        self._requests: set[int] = set()  # sent, and not answered
        self._last_request = 0
        self._seek: tuple[int, Any] | None = None  # the one under way
        self.restart_request = 0  # the request up to whose answer what comes will come again, and is not shown; 0: none
        self._time: Any = None  # where a reader was sent by time or index, while it has read nothing since
        self._first_permits = 0  # of this connection; they wait for the reader's seek
        self._begun: Position | None = None
        self._withheld = WithheldEntries()
        filtered = options.durable and options.log_order and not options.debounced
        self.repeats = DuplicateFilter() if filtered else None
        self._delivered_before = 0  # this connection
        self.failed: set[Position] = set()  # given back, in order: the broker is not asked yet
        self.moving_bits: dict[Position, int] = {}  # of batches, as bits, what is on its way to the dead-letter topic
        self._failing: dict[int, tuple[Position, ...]] = {}  # request → what failed, until the broker has taken it back

    # ------------------------------------------------------------------------------ the connection
    def reader_position(self) -> ReaderPosition:
        """Returns the position at which a reader continues after a reconnect."""
        return ReaderPosition(self.last_taken, self._begun)

    def clear_reader_position(self) -> None:
        """Clears the position at which a reader continues, because its topic was deleted and created again, and the
        reader has read nothing of the new topic."""
        self.last_taken = self._begun = None

    def set_resume_point(self, point: Any) -> None:
        """Sets the message after which a consumer of a subscription that is not durable continues after a reconnect;
        None: its start. May be called from any thread."""
        self.last_taken = point

    def on_opened(self) -> list[ConsumerEffect]:
        """Fact: the broker has opened the consumer over a new connection. Returns the effects: messages of the last
        connection are dropped, waiting acknowledgements are sent, and the first permits are granted. Returns none if
        the consumer is finished."""
        if self.state is PartitionClientState.CLOSED:
            return []
        self.state = PartitionClientState.CONNECTED
        self._backoff.reset()
        self._delivered_before = self.delivered
        effects: list[ConsumerEffect] = [DropQueuedMessages(give_back=False)]
        self.discard_delivered()
        self._send_acks(effects)
        first = self.permits.reset_for_new_stream()
        self._first_permits = 0
        if self._time is not None and self.last_taken is None:
            self._first_permits = first
            effects += self.seek(self.register_request(), self._time)
        else:
            effects.append(GrantPermits(first))
        return effects

    def on_lost(self, error: MagnetarError) -> list[ConsumerEffect]:
        """Fact: the connection broke, the broker closed the consumer, or an attempt to open the consumer again failed;
        `error` says why. Returns the effects: AttachToBroker after a pause, or EndWithError if the error is permanent;
        none if the consumer is finished."""
        if self.state is PartitionClientState.CLOSED:
            return []
        alone = self._options.ends_with_topic
        if isinstance(error, TopicNotFound) and alone:
            return [DropQueuedMessages(give_back=False), *self.finish(error, topic_is_gone=True)]
        # maybe its topic too
        if isinstance(error, FINAL_ERRORS) and not (alone and isinstance(error, SubscriptionNotFound)):
            return self.finish(error)
        self.state = PartitionClientState.RECONNECTING
        first = self.chunks.first_chunk_position()
        if first is not None or self.delivered > self._delivered_before:  # else chunks did not come again yet
            self._begun = first
        self._unsee_incomplete()
        self.discard_delivered()
        effects: list[ConsumerEffect] = [DropQueuedMessages(give_back=False)]
        self._fail_requests(ConnectionLost("the connection broke with the request under way"), effects)
        effects.append(AttachToBroker(self._backoff.next_delay_s()))
        return effects

    def on_inactive(self) -> list[ConsumerEffect]:
        """Fact: another consumer of the Failover subscription is the active one now, to which the broker delivers all
        that is not acknowledged. Returns the effects: waiting acknowledgements are sent, messages that the application
        has not received are dropped, and their permits are granted again."""
        effects: list[ConsumerEffect] = []
        if self.state is PartitionClientState.CONNECTED:
            self._send_acks(effects)
            self._unsee_incomplete()
            if self.repeats is not None:
                self.repeats.on_consumer_inactive()
            effects.append(DropQueuedMessages(give_back=True))
            self.discard_delivered()
            self._grant(effects)
        return effects

    def _unsee_incomplete(self) -> None:
        """Has the duplicate filter let pass what comes again and was not shown: withheld entries, and the messages from
        the first incomplete one on."""
        if self.repeats is not None:
            first = self.chunks.first_chunk_position()
            for ledger_id, entry_id in (*self._withheld.permits, *(() if first is None else (first,))):
                self.repeats.on_reading_restarted((ledger_id, entry_id, -1))

    def discard_delivered(self) -> None:
        """Clears the state of all entries that were delivered and not acknowledged, because the broker will deliver
        them again. Their ack time-outs end, incomplete chunked messages are removed, and withheld entries free their
        permits."""
        self._free(self._withheld.clear())
        self._unacked.clear()
        self.chunks.clear()

    def reset_duplicate_filter(self) -> None:
        """Clears the record of received messages, so that messages that the broker delivers again reach the
        application. Must be called before the broker delivers unacknowledged messages again."""
        if self.repeats is not None:
            self.repeats.clear()

    def finish(self, error: MagnetarError, *, topic_is_gone: bool = False) -> list[ConsumerEffect]:
        """Ends the consumer for good with `error`; a second call keeps the first error. Returns the effects: each open
        request is answered with the error, then EndWithError. `topic_is_gone`: the topic was deleted, which is no
        failure."""
        effects: list[ConsumerEffect] = []
        self.state = PartitionClientState.CLOSED
        if self.error is None:
            self.error = error
        self.ack_due = self._tick_due = self._chunk_due = None
        self._nacks.clear()
        self._pieces.clear()
        self._fail_requests(self.error, effects)
        effects.append(EndWithError(self.error, topic_is_gone))
        return effects

    # ------------------------------------------------------------------------------ what comes
    def on_entries_dropped(self, permits: int) -> list[ConsumerEffect]:
        """Fact: the client dropped entries before they reached the application; the broker charged `permits` for them.
        Counts these permits as used; returns the effects that grant new ones."""
        self.permits.count_used_permits(permits, self.permits.stream)
        effects: list[ConsumerEffect] = []
        self._grant(effects)
        return effects

    def resize_queue(self, queue_size: int) -> list[ConsumerEffect]:
        """Changes the size of the receiver queue to `queue_size` messages. Returns the effects that grant more permits,
        if there are more."""
        self.permits.resize_queue(queue_size)
        return self.on_entries_dropped(0)

    def is_dead_letter(self, redelivery_count: int) -> bool:
        """Returns whether an entry that was redelivered `redelivery_count` times must be moved to the dead-letter
        topic, because the count exceeds the limit of the dead-letter policy. False if there is no policy."""
        return self._options.redeliveries_max is not None and redelivery_count > self._options.redeliveries_max

    def add_chunk(
        self, metadata: MessageMetadata, place: Position, body: bytes, now: float, entry: Any = None
    ) -> PartialMessage | None:
        """Adds the chunk in the entry at `place` to its message. Returns the message if the chunk completes it, else
        None. Raises CorruptEntry if the chunk does not fit its message. Chunks that this drops are acknowledged, and
        chunks that it gives back are requested later."""
        self.has_new_times = True
        if not self.chunks.incomplete:  # the back-off is the program's: it is asked when chunks come
            self.chunks.expire_s = INCOMPLETE_EXPIRE_S + self._options.nack_delay_ms(0) / 1000
        outcome = self.chunks.add(metadata, place, body, now, entry)
        self._settle_chunks(outcome, now, self.chunks.redelivery_request_count(metadata.uuid))
        if self._chunk_due is None and self.chunks.incomplete:
            self._chunk_due = now + CHUNK_EXPIRY_CHECK_S
        return outcome.complete

    def withhold_entry(
        self, metadata: MessageMetadata, place: Position, permits: int, now: float, longer_s: float
    ) -> None:
        """Records that the entry at `place` cannot be decrypted and is withheld from the application, and starts its
        ack time-out. `permits`: those that the entry uses; `longer_s`: seconds that are added to the time-out. If the
        entry is a chunk, the other chunks of its message are kept."""
        self.has_new_times = True
        self._withheld.add(place, permits)
        self.start_ack_timeout(place, now, longer_s)
        if self._unacked and self._tick_due is None:
            self._tick_due = now + self._options.ack_timeout_tick_s
        if metadata.num_chunks_from_msg > 1:
            self.chunks.expect_redelivery(metadata.uuid)

    @property
    def has_withheld_entries(self) -> bool:
        """Returns whether an entry is withheld because it cannot be decrypted."""
        return bool(self._withheld)

    def release_withheld(self, place: Position) -> None:
        """Fact: the entry at `place` is decrypted or acknowledged. If the entry was withheld from the application, it
        is not any more, and its permits are free."""
        self._free(self._withheld.release(place))

    def _free(self, permits: int) -> None:
        if permits:
            self.permits.count_used_permits(permits, self.permits.stream)

    def on_unchunked_entry(self, producer: str, place: Position, now: float) -> None:
        """Fact: an entry of `producer` arrived that is not a chunk. Drops the incomplete chunked messages of this
        producer that can never be completed."""
        self._settle_chunks(ChunkAddResult(None, self.chunks.on_unrelated_entry(producer, place), []), now)

    def _settle_chunks(self, outcome: ChunkAddResult, now: float, rounds: int = 0) -> None:
        for place in outcome.dropped:
            self.acknowledge(place, -1, 0)
        if outcome.given_back:
            first_s = min(FIRST_CHUNK_DELAY_S_MAX, max(CHUNK_REDELIVERY_S_MIN, self._options.nack_delay_ms(0) / 1000))
            longer_s = min(CHUNK_REDELIVERY_S_MAX, first_s * 2 ** min(rounds, 16))
            for place in outcome.given_back:
                if place not in self._nacks:
                    self._pieces.track(place, int(now * 1000) + 1, int(longer_s * 1000))
                self._unacked.discard(place)
        for place in outcome.wanted:
            if place in self._pieces:
                self._pieces.discard(place)
                self._pieces.track(place, int(now * 1000), 0)

    # ------------------------------------------------------------------------------ what the application does
    def start_ack_timeout(self, place: Position, now: float, longer_s: float) -> None:
        """Starts the ack time-out of the entry at `place`, because the application received a message of it.
        `longer_s`: seconds that are added to the time-out."""
        if self._options.ack_timeout_s:
            self._unacked.track(place, now, longer_s)

    def acknowledge(self, place: Position, index: int, size: int) -> None:
        """Acknowledges a message. `index`: its batch index; -1: the whole entry. `size`: the number of messages in the
        entry; 0: not known."""
        self._acks.acknowledge(place, index, size)
        if self.moving_bits:
            self._moved(place, 1 << index if index >= 0 else -1)
        if self._unacked.watched:
            self._unacked.discard(place)
        if self._withheld.permits and index < 0:
            self.release_withheld(place)
        if self._nacks.watched and (index < 0 or size == 1):
            self._nacks.discard(place)
        if self._pieces.watched:
            self._pieces.discard(place)

    def acknowledge_batch_indexes(self, place: Position, bits: int, messages: int, size: int) -> None:
        """Acknowledges several messages of one entry: bit i of `bits` is batch index i. `messages`: the number of set
        bits; `size`: the number of messages in the entry."""
        self._acks.acknowledge_bits(place, bits, messages, size)
        if self.moving_bits:
            self._moved(place, bits)
        if self._unacked.watched:
            self._unacked.discard(place)
        if self._nacks.watched and size == 1:
            self._nacks.discard(place)

    def acknowledge_cumulative(self, place: Position, index: int, size: int) -> None:
        """Acknowledges all messages up to the message with batch index `index` in the entry at `place`. Stops before
        the first entry that cannot be decrypted, and before the first chunk of a message that is incomplete or ends
        after `place`."""
        floor = self._floor(place)
        self.chunks.on_acknowledged_up_to(floor)
        if floor != place:
            if floor.entry_id < 0:
                return
            place, index, size = floor, -1, 0
        self._acks.acknowledge_cumulative(place, index, size)
        if self._nacks.watched and index < 0:
            self._nacks.discard_up_to(place)
        if self._pieces:
            self._pieces.discard_up_to(place)
        self._unacked.discard_up_to(place)

    def cover_by_cumulative_ack(self, place: Position) -> bool:
        """Returns whether a cumulative acknowledgement may cover the whole entry at `place`. If so, records that
        chunked messages up to this entry are acknowledged; the caller sends the acknowledgement itself."""
        covered = self._floor(place) == place
        if covered:
            self.chunks.on_acknowledged_up_to(place)
        return covered

    def _floor(self, place: Position) -> Position:
        return self._withheld.find_cumulative_ack_limit(self.chunks.cumulative_ack_limit(place))

    def on_acknowledged_elsewhere(self, place: Position) -> None:
        """Fact: a separate request acknowledges the entry at `place`. Stops the ack time-out of this entry."""
        self._unacked.discard(place)

    def negative_acknowledge(self, place: Position, redeliveries: int, now: float) -> None:
        """Acknowledges the entry at `place` negatively: its redelivery is requested after the delay for `redeliveries`,
        its redelivery count. With `redelivery_order` "key" the broker applies the delay, and the next `take_effects`
        requests the redelivery at once."""
        self.negatively_acknowledged += 1
        if self._pieces.watched:
            self._pieces.discard(place)
        if self._options.failure_blocks:
            self.failed.add(place)
            return
        self._nacks.track(place, int(now * 1000) + 1, self._options.nack_delay_ms(redeliveries))
        self._unacked.discard(place)

    def _fail(self, effects: list[ConsumerEffect]) -> None:
        """If a failed entry blocks the entries after it: asks the broker to deliver all failed entries again, at once.
        Their waiting messages are discarded, and so are messages of them that arrive before the broker's answer
        (`failed_positions`). An entry with a dead letter in flight is asked for only after that is acknowledged, or the
        broker would count one redelivery more."""
        if self.state is not PartitionClientState.CONNECTED:
            self.failed.clear()
            return
        effects.append(DropMessagesAfterFailure(tuple(self.failed)))
        for place in self.failed:
            self._unacked.discard(place)
        asked: EntrySets = {}
        for place in [each for each in self.failed if each not in self.moving_bits]:
            asked.setdefault(place.ledger_id, BitMap()).add(place.entry_id)
            self.failed.discard(place)
        if asked:
            self.reset_duplicate_filter()
            self._send_acks(effects)
            request_id = self.register_request()
            self._failing[request_id] = tuple(positions_of(asked))
            effects.append(RequestRedelivery(asked, request_id=request_id))

    def _moved(self, place: Position, bits: int) -> None:
        left = self.moving_bits.get(place, 0) & ~bits
        if left:
            self.moving_bits[place] = left
        else:
            self.moving_bits.pop(place, None)

    def failed_positions(self) -> list[Position]:
        """Returns the positions of negatively acknowledged entries for which the broker has not confirmed yet that it
        will deliver them again."""
        return [*self.failed, *(place for places in self._failing.values() for place in places)]

    @property
    def has_failed_entries(self) -> bool:
        """Returns whether `failed_positions` has entries."""
        return bool(self.failed or self._failing)

    def redeliver_all(self, untouched: EntrySets, *, in_order: bool = False) -> list[ConsumerEffect]:
        """Asks the broker to deliver again all entries that were delivered and not acknowledged. Returns the effects;
        none without a connection, because the next connection delivers these entries again. `untouched`: the entries of
        which the application has seen nothing; their redelivery is not counted. `in_order`: deliveries in flight, which
        the broker will repeat, are discarded as well (`restart_request`)."""
        effects: list[ConsumerEffect] = []
        self.reset_duplicate_filter()
        if self.state is PartitionClientState.CONNECTED:
            self._send_acks(effects)
            if untouched:
                effects.append(RequestRedelivery(untouched, counted=False))
            if in_order:
                self.restart_request = self.register_request()
            effects.append(RequestRedelivery(None, request_id=self.restart_request))
            effects.append(DropQueuedMessages(give_back=True))  # permits last: the oldest first
            self.discard_delivered()
            self._grant(effects)
        return effects

    # ------------------------------------------------------------------------------ time
    def take_effects(self, now: float) -> list[ConsumerEffect]:
        """Returns the effects that are due because of earlier facts and intents, and starts the timers for later
        effects. The driver must call this after each fact or intent."""
        effects: list[ConsumerEffect] = []
        if self.failed:
            self._fail(effects)
        self._grant(effects)
        if self._acks.pending_messages >= self._group_messages:
            self._send_acks(effects)
        elif self._acks.pending_messages and self.ack_due is None and self.state is PartitionClientState.CONNECTED:
            self.ack_due = now + self._options.ack_group_s
        if self._unacked and self._tick_due is None and self.state is not PartitionClientState.CLOSED:
            self._tick_due = now + self._options.ack_timeout_tick_s
        return effects

    @property
    def next_timer_at(self) -> float | None:
        """Returns the time at which the driver must call `run_timers`; None if no timer runs."""
        due = inf
        for each in (self.ack_due, self._tick_due, self._chunk_due):
            if each is not None and each < due:
                due = each
        for given_back in (self._nacks, self._pieces):
            if given_back.watched and (ms := given_back.next_due_ms()) is not None and ms / 1000 < due:
                due = ms / 1000
        return due if due < inf else None

    def run_timers(self, now: float) -> list[ConsumerEffect]:
        """Does what is due at the time `now`: sends acknowledgements, and requests redeliveries. Returns the effects.
        The driver must call it when the time `next_timer_at` is reached, or later."""
        effects: list[ConsumerEffect] = []
        if self.ack_due is not None and now >= self.ack_due:
            self.ack_due = None
            self._send_acks(effects)
        if self._chunk_due is not None and now >= self._chunk_due:
            self._chunk_due = now + CHUNK_EXPIRY_CHECK_S if self.chunks.incomplete else None
            self._settle_chunks(self.chunks.expire(now), now)
        if self._tick_due is not None and now >= self._tick_due:
            self._tick_due = None
            late: EntrySets = {}
            late_places = self._unacked.take_due(now)
            self._free(self._withheld.on_redelivery_requested(late_places))
            for place in late_places:
                for ledger_id, entry_id in (place, *self.chunks.on_redelivery_requested(place)):
                    late.setdefault(ledger_id, BitMap()).add(entry_id)
            self._ask_again(late, effects)
        for given_back in (self._nacks, self._pieces):
            due_ms = given_back.next_due_ms()
            if due_ms is not None and now >= due_ms / 1000:
                due = given_back.take_due(max(due_ms, int(now * 1000)))
                self._ask_again(due, effects, counted=given_back is self._nacks)
        return effects + self.take_effects(now)

    def _ask_again(self, entries: EntrySets, effects: list[ConsumerEffect], *, counted: bool = True) -> None:
        if entries and counted and self._options.failure_blocks:
            self.failed.update(positions_of(entries))
        elif entries and self.state is PartitionClientState.CONNECTED:
            self.reset_duplicate_filter()
            self._send_acks(effects)
            effects.append(RequestRedelivery(entries, counted))

    def _send_acks(self, effects: list[ConsumerEffect], request_id: int = 0) -> None:
        if self.state is PartitionClientState.CONNECTED and self._acks.pending_messages:
            self.ack_due = None
            effects.append(SendAcks(self._acks.take_ack_group(), request_id))

    def _grant(self, effects: list[ConsumerEffect]) -> None:
        granted = self.permits.grant()
        if granted and self.state is PartitionClientState.CONNECTED:
            effects.append(GrantPermits(granted))

    # ------------------------------------------------------------------------------ requests
    def register_request(self) -> int:
        """Registers a new request to the broker and returns its number, by which the broker answers. The consumer must
        be connected."""
        self._last_request += 1
        self._requests.add(self._last_request)
        return self._last_request

    def discard_unsent_acks(self) -> None:
        """Drops the acknowledgements that are not sent yet, because a seek was requested: the broker must not apply
        them after the seek."""
        self._acks.clear()

    def seek(self, request_id: int, to: Any) -> list[ConsumerEffect]:
        """Begins to move the subscription's cursor to `to`: a message id, a SeekIndex, or a time in ms since the epoch.
        `request_id`: a number of `register_request`. Returns the effect that asks the broker. Replaces an earlier seek
        that has no answer yet."""
        self._seek = request_id, to
        return [SendSeekRequest(request_id, to)]

    def send_last_acks(self) -> list[ConsumerEffect]:
        """Returns the effects that send all waiting acknowledgements now, without waiting for their group. Used when
        the broker is about to close this consumer, because the topic moves to another broker, and when a transaction
        commits."""
        effects: list[ConsumerEffect] = []
        self._send_acks(effects)
        return effects

    def take_last_acks(self) -> tuple[int, list[ConsumerEffect]]:
        """Returns the number of a request and the effects that send all waiting acknowledgements with it. The broker
        answers the request when the acknowledgements are durable. The number is 0, and there are no effects, if no
        acknowledgement waits or there is no connection."""
        effects: list[ConsumerEffect] = []
        if not self._acks.pending_messages or self.state is not PartitionClientState.CONNECTED:
            return 0, effects
        request_id = self.register_request()
        self._send_acks(effects, request_id)
        return request_id, effects

    def on_answered(self, request_id: int, error: MagnetarError | None, result: Any = None) -> list[ConsumerEffect]:
        """Fact: the broker answered the request `request_id` with `result`, or with `error`. Returns the effects, such
        as AnswerRequest; none if that request is not open."""
        effects: list[ConsumerEffect] = []
        if request_id not in self._requests:
            return effects
        if request_id == self.restart_request:
            self.restart_request = 0
        self._failing.pop(request_id, None)
        seek = self._seek
        if seek is not None and seek[0] == request_id:
            self._seek = None
            if error is None:
                self._arrive(seek[1], effects)
            elif self._first_permits:
                why = ConnectionLost(f"the reader did not come back to its place: {error.message}")
                return [DetachFromBroker(), *self.on_lost(why)]
        self._requests.remove(request_id)
        effects.append(AnswerRequest(request_id, error, result))
        return effects

    def _arrive(self, to: Any, effects: list[ConsumerEffect]) -> None:
        self.reset_duplicate_filter()
        self.discard_delivered()
        self._acks.clear()
        self._nacks.clear()
        self._pieces.clear()
        self.last_taken = self._begun = None
        self._time = to if isinstance(to, int | SeekIndex) and not self._options.durable else None
        effects += (DropQueuedMessages(give_back=True), ReportSeekDone(to))
        if self._first_permits:
            effects.append(GrantPermits(self._first_permits))
            self._first_permits = 0
        self._grant(effects)

    def _fail_requests(self, error: MagnetarError, effects: list[ConsumerEffect]) -> None:
        self._seek, self.restart_request = None, 0
        self._failing.clear()
        self.failed.clear()
        effects += (AnswerRequest(each, error) for each in sorted(self._requests))
        self._requests.clear()

    def check(self) -> None:
        """Raises AssertionError if an invariant of this core, or of one of its parts, is broken."""
        self.permits.check()
        self._acks.check()
        self._nacks.check()
        self._pieces.check()
        self._unacked.check()
        self.chunks.check()
        self._backoff.check()
        assert self.state is PartitionClientState.CONNECTED or not self._requests, "a request has a connection"
        assert self._seek is None or self._seek[0] in self._requests, "the seek under way is a request"
        assert not self.restart_request or self.restart_request in self._requests, "what comes again is asked for"
