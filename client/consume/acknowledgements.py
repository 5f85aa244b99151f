"""Acknowledgements and negative acknowledgements of the application: any thread adds them, and the event loop sends
them to the broker.

`acknowledge`, `negative_acknowledge` and `on_taken` may be called from any thread, and only append to a queue; `flush`
must be called in the event loop, and passes the content of the queues to the consumer's core (client/core/consumer.py).
Guards: tests/client/consume/test_partition_consumer.py."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from ...proto.names import Position
from ..core.consumer import ConsumerCore
from ..core.effects import AttachedConsumerOptions
from ..core.redelivery import ACK_GROUP_MESSAGES, AckGroup, AckTracker
from ..model.hooks import ACKNOWLEDGE, CUMULATIVE, NEGATIVE, PartitionHooks
from ..model.message import Message, ReceivedEntry
from ..model.message_id import MessageId
from ..model.settings import ORDERED_CONSUMER_TYPES, ConsumerSettings, ConsumerType, RedeliveryBackoff

_LOG = logging.getLogger("magnetar.client")

DELAY_MS_MAX = 1 << 40
"""Longest redelivery delay in ms: 35 years, less than the limit of the timers of event loops."""
MessageOrId = Message | MessageId


class AckCollector:
    """Collects the acknowledgements and negative acknowledgements of one consumer, and passes them to the consumer's
    core. When the event loop must call `flush`, AckCollector calls the function `wake`, in the thread that
    acknowledges. `acknowledged`: how many acknowledgements were passed on; a cumulative one counts as one."""

    def __init__(
        self, settings: ConsumerSettings, core: ConsumerCore, wake: Callable[[], None], now: Callable[[], float],
        hooks: PartitionHooks | None = None,
    ) -> None:  # fmt: skip
        self.times_out = bool(settings.unacked_messages_timeout_ms)  # then `on_taken` is to be told of each message
        self._hooks = hooks  # None: there are none
        self._core = core
        self._wake = wake
        self._now = now
        self._longer_ms = partial(compute_redelivery_delay_ms, settings.ack_timeout_redelivery_backoff, otherwise=0)
        self.acknowledged = 0  # acknowledgements that were passed on; a cumulative one counts as one
        self._acked: deque[MessageOrId] = deque()
        self._nacked: deque[MessageOrId] = deque()
        self._taken: deque[tuple[Position, int]] = deque()

    # ------------------------------------------------------------------------------ from any thread
    def on_taken(self, message: Message) -> None:
        """Fact: the application received the message; its ack time-out begins at the next `flush`. Called only if
        `times_out` is true. May be called from any thread."""
        self._taken.append((message.entry.position, message.redelivery_count()))

    def acknowledge(self, which: MessageOrId) -> None:
        """Adds the acknowledgement of a message, with all its chunks, and tells the hooks. May be called from any
        thread."""
        if self._hooks is not None:
            self._hooks.report_settled(which, ACKNOWLEDGE)
        if type(which) is Message and not which.entry.chunks:
            self._acked.append(which)
        else:
            self._acked.extend(self.expand_to_all_chunks(which))
        if self._core.ack_due is None or self._core.failed or len(self._acked) >= ACK_GROUP_MESSAGES:
            self._wake()

    def negative_acknowledge(self, which: MessageOrId) -> None:
        """Adds the negative acknowledgement of a message, with all its chunks, and tells the hooks. May be called from
        any thread."""
        if self._hooks is not None:
            self._hooks.report_settled(which, NEGATIVE)
        self._nacked.extend(self.expand_to_all_chunks(which, again=True))
        self._wake()

    def notify_hooks(self, which: Iterable[MessageOrId], *, cumulative: bool) -> None:
        """Reports to the hooks that the messages `which` are settled, because the caller acknowledges them in a request
        of its own. `cumulative`: whether each stands for all messages before it, too."""
        if self._hooks is not None:
            for each in which:
                self._hooks.report_settled(each, CUMULATIVE if cumulative else ACKNOWLEDGE)

    def expand_to_all_chunks(self, which: MessageOrId, *, again: bool = False) -> Iterable[MessageOrId]:
        """Returns the message `which` together with the ids of the other chunks of that message: all chunks are
        acknowledged together or, if `again` is true, redelivered together. The assembler of chunks stops tracking the
        message."""
        if isinstance(which, Message):
            known, place = which.entry.chunks, which.entry.position
            if not known:
                return (which,)
        else:
            known, place = which.chunks(), which.position()
        chunks = self._core.chunks
        found = chunks.on_redelivery_requested(place) if again else chunks.take_chunk_positions(place)
        return (which, *(MessageId(-1, *each) for each in found or known if each != place))

    # ------------------------------------------------------------------------------ in the loop
    def flush(self) -> float:
        """Passes all collected acknowledgements, negative acknowledgements and received messages to the core. Returns
        the present time, in seconds of the monotonic clock. Must be called in the event loop."""
        core, now = self._core, self._now()
        while self._taken:
            position, count = self._taken.popleft()
            core.start_ack_timeout(position, now, self.extra_ack_timeout_s(count))
        if self._acked:
            self._gather_acks()
        while self._nacked:
            which = self._nacked.popleft()
            count = which.entry.redelivery_count if isinstance(which, Message) else 0
            core.negative_acknowledge(get_ack_coordinates(which)[0], count, now)
        return now

    def extra_ack_timeout_s(self, redelivery_count: int) -> float:
        """Returns the seconds by which the application's back-off prolongs the ack time-out of an entry that was
        redelivered `redelivery_count` times."""
        return self._longer_ms(redelivery_count) / 1000

    def _gather_acks(self) -> None:
        """Passes the appended acknowledgements to the core; consecutive ones of the same entry in one step."""
        take, core = self._acked.popleft, self._core
        self.acknowledged += len(self._acked)
        entry: ReceivedEntry | None = None
        bits = messages = 0
        for _ in range(len(self._acked)):
            which = take()
            if not isinstance(which, Message):
                core.acknowledge(*get_ack_coordinates(which))
            elif which.batch_index < 0:
                core.acknowledge(which.entry.position, -1, which.entry.size)
            else:
                if which.entry is not entry:
                    if entry is not None:
                        core.acknowledge_batch_indexes(entry.position, bits, messages, entry.size)
                    entry, bits, messages = which.entry, 0, 0
                bits |= 1 << which.batch_index
                messages += 1
        if entry is not None:
            core.acknowledge_batch_indexes(entry.position, bits, messages, entry.size)

    def make_ack_group(self, which: Iterable[MessageOrId], *, cumulative: bool) -> AckGroup:
        """Returns the acknowledgements of the messages `which` as one AckGroup, which the caller sends in a request of
        its own. Ends the ack time-outs of their entries. `cumulative`: each of `which` acknowledges all messages up to
        it."""
        tracker = AckTracker()
        self.add_to_tracker(tracker, which, cumulative=cumulative)
        return tracker.take_ack_group()

    def add_to_tracker(self, tracker: AckTracker, which: Iterable[MessageOrId], *, cumulative: bool) -> None:
        """Adds acknowledgements of the messages `which` to `tracker`; the caller then sends the tracker's group in a
        request of its own. Consecutive messages of the same entry are added in one step. Ends the ack time-outs of the
        entries. `cumulative`: each of `which` acknowledges all messages up to it."""
        entry: ReceivedEntry | None = None
        bits, before = 0, tracker.pending_messages
        for each in which:
            if isinstance(each, Message) and each.batch_index >= 0 and not cumulative:
                if each.entry is not entry:
                    if entry is not None:
                        tracker.acknowledge_bits(entry.position, bits, bits.bit_count(), entry.size)
                    entry, bits = each.entry, 0
                    self._core.on_acknowledged_elsewhere(entry.position)
                bits |= 1 << each.batch_index
                continue
            position, index, size = get_ack_coordinates(each)
            if cumulative:
                tracker.acknowledge_cumulative(position, index, size)
            else:
                tracker.acknowledge(position, index, size)
            self._core.on_acknowledged_elsewhere(position)
        if entry is not None:
            tracker.acknowledge_bits(entry.position, bits, bits.bit_count(), entry.size)
        self.acknowledged += tracker.pending_messages - before

    def clear(self) -> None:
        """Drops the acknowledgements that are not passed to the core yet, because the cursor is moved. Their messages
        are delivered again, and the dropped acknowledgements must not apply to them."""
        self._acked.clear()


def compute_redelivery_delay_ms(backoff: RedeliveryBackoff | None, redelivery_count: int, *, otherwise: int) -> int:
    """Returns the delay in ms that `backoff` gives for an entry that was redelivered `redelivery_count` times. Returns
    `otherwise` if `backoff` is None, raises an exception (which is logged) or returns a wrong value."""
    if backoff is None:
        return otherwise
    try:
        return min(max(0, int(backoff.next(redelivery_count))), DELAY_MS_MAX)
    except Exception:
        _LOG.exception("a redelivery back-off failed")
        return otherwise


def get_ack_coordinates(which: MessageOrId) -> tuple[Position, int, int]:
    """Returns what acknowledges a message: the position of its entry, its batch index (-1: the whole entry), and the
    number of messages in the entry (0: not known)."""
    if isinstance(which, Message):
        entry = which.entry
        return entry.position, which.batch_index, entry.size
    return which.position(), which.batch_index(), which.batch_size()


def make_consumer_options(
    settings: ConsumerSettings, *, durable: bool, dead_after: int | None, alone: bool
) -> AttachedConsumerOptions:
    """Returns the options of a consumer's core, made from the program's settings. `durable`: False for a reader.
    `dead_after`: the most redeliveries of a message that is not a dead letter yet; None: no limit. `alone`: whether the
    consumer ends without an error when its topic is deleted."""
    return AttachedConsumerOptions(
        durable=durable,
        ack_timeout_s=(settings.unacked_messages_timeout_ms or 0) / 1000,
        ack_timeout_tick_s=settings.unacked_messages_tick_ms / 1000,
        # each acknowledgement makes room for the next message of its key
        ack_group_s=0.0 if settings.max_in_flight_per_key else settings.ack_group_ms / 1000,
        nack_delay_ms=partial(
            compute_redelivery_delay_ms,
            settings.negative_ack_redelivery_backoff,
            otherwise=settings.negative_ack_redelivery_delay_ms,
        ),
        redeliveries_max=dead_after,
        chunks_pending_max=settings.max_pending_chunked_message,
        chunks_auto_ack=settings.auto_ack_oldest_chunked_message_on_queue_full,
        ordered=settings.consumer_type == ConsumerType.KeyShared or settings.consumer_type in ORDERED_CONSUMER_TYPES,
        log_order=settings.consumer_type in ORDERED_CONSUMER_TYPES,
        failure_blocks=settings.redelivery_order == "key",
        ends_with_topic=alone,
        debounced=settings.debounce is not None,
    )
