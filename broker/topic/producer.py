"""A connected producer (`TopicProducer`), which passes entries to the log, and reports their outcomes to its outcome
port. After it, the gate at which publishes wait (`PublishGate`).

The session calls `publish` for each entry, in order. Outcomes are reported in the same order. A stored entry gets its
receipt after an ack quorum of bookies has it. The outcome of a refused entry, or of a duplicate, is reported after
those of all earlier entries. With acks=one an entry also gets a provisional receipt when one bookie has it, unless its
quorum has it by then; provisional receipts are in order, too, and the outcome is reported later as ever. Where that is
no receipt, messages may be lost of which the program was told that they are stored: `FIRST_COPIES` counts them.

Later entries are published nevertheless, except that after a refused or failed chunk the
later chunks of its message are refused for the same reason, until that chunk is published again. With deduplication
(broker/topic/dedup_core.py) the producer is closed when an entry fails, or when an entry with the same sequence id is
in flight. The client then opens the producer again, and sends all unanswered messages again, in order. The session
bounds the bytes in flight (broker/session/producer.py); the port reports to it how many bytes each outcome frees.
Guarding tests: tests/broker/topic/test_producer.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ...proto.entry import get_sequence_id, parse_checked_head, parse_stored_head
from ...proto.entry_filter import find_redriven_to
from ...proto.errors import CorruptEntry, InvalidRequest, MagnetarError, MessageTooLarge, NotOwner
from ...proto.expiry import find_entry_expiry
from ...proto.names import Position
from ...proto.states import AccessMode, TopicState
from ...runtime.access import LOCAL_PRINCIPAL, Principal
from ...runtime.alarm import EventLoopSlices
from ...runtime.clock import Clock
from ...runtime.files import Buffer
from ...runtime.token_bucket import RateLimit, compute_rate_delay_s
from ..common.refusals import PublishRefusal
from ..common.transactions import get_required_transaction_role
from ..log.appender import Publish
from ..log.log_queue_core import SEQUENCE_ID_END, SEQUENCE_SPAN_MAX, SequenceRange
from .dedup import parse_sequence_range
from .dedup_core import DedupVerdict, why_publish_refused
from .transactions import TransactionEventToAwait, transaction_id_of

if TYPE_CHECKING:
    from .topic import Topic

_LOG = logging.getLogger("magnetar.broker")

LOSS_LOG_INTERVAL_S = 10.0
"""Least seconds between two lines of the log about messages that were reported with one copy and then failed."""
NO_SEQUENCE_ID = -1
"""The sequence id of a refused entry that names none."""


class PublishOutcomePort(Protocol):
    """The port through which a topic's producer reports the outcomes of its entries to its connection. No method may
    wait or raise. `sequence_id`: the first sequence id of the entry."""

    def on_duplicate(self, sequence_id: int) -> None:
        """Called when the entry is a duplicate of an entry that is stored already. The position of the stored entry is
        not known."""
        ...

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        """Called when the entry is not stored, or when it is not known whether it is stored (`error.definite` says
        which). `sequence_id`: NO_SEQUENCE_ID if the sequence id of the entry cannot be read."""
        ...

    def on_closed(self, error: MagnetarError) -> None:
        """Called when the broker closes the producer because of `error`. After this call no outcome is reported."""
        ...

    def on_publish_waiting(self, error: MagnetarError) -> None:
        """Called when entries in flight wait unusually long for their outcome. `error`: the reason. May be called again
        with another reason. The outcomes of the entries are reported later."""
        ...


class FirstCopies:
    """Counts, in this process, the messages of producers with acks=one whose first copy was reported and whose quorum
    then failed. `lost`: it is not known whether they are stored, or they are not. A client that still runs sends them
    again where it may, so this is the most that can be lost."""

    def __init__(self) -> None:
        self.lost = 0
        self.log_due_s = 0.0  # the next line of the log, on the monotonic clock


FIRST_COPIES = FirstCopies()


class PublishOutcomeAndBytesPort(PublishOutcomePort, Protocol):
    """A PublishOutcomePort to which a producer also reports how many bytes are no longer in flight."""

    def on_stored(self, size: int, sequence_id: int, position: Position, index: int) -> None:
        """Called when the entry is stored at `position`, so that its `size` bytes are no longer in flight.
        `sequence_id`: its first sequence id; `index`: the index of its last message."""
        ...

    def on_first_copy(self, sequence_id: int) -> None:
        """Called when one bookie has the entry of a producer with acks=one; its outcome is reported later."""
        ...

    def on_bytes_freed(self, size: int) -> None:
        """Called when an entry of `size` bytes, which was given to the log, is no longer in flight, and `on_stored` is
        not called for the entry. If the entry gets another outcome, that is reported after this call."""
        ...


class TopicProducer:
    """A producer that is connected to a topic. `id`: a number that is unique in the process; `epoch`: the epoch of the
    topic, while this producer has exclusive access to the topic; `size_max`: the largest entry in bytes that it may
    publish; `close_error`: why the broker has closed it, None before. The head of the module says how it works."""

    __slots__ = (
        "_dedup",
        "_first_copies",
        "_idle",
        "_logged",
        "_outlet",
        "_refused",
        "_refused_chunk",
        "_settled",
        "_tells_first_copies",
        "_topic",
        "acks",
        "address",
        "bytes",
        "client",
        "close_error",
        "connection",
        "duplicates",
        "epoch",
        "id",
        "instance",
        "messages",
        "mode",
        "name",
        "principal",
        "properties",
        "room",
        "since_ms",
        "size_max",
        "transactions",
        "turn",
        "writer",
    )  # fmt: skip

    def __init__(
        self, id_: int, name: str, mode: AccessMode, topic: Topic, outlet: PublishOutcomeAndBytesPort, *,
        address: str, instance: str, size_max: int, connection: int = 0, epoch: int = 0,
        principal: Principal = LOCAL_PRINCIPAL, client: str = "", since_ms: int = 0,
        properties: dict[str, str] | None = None, room: int = 0, acks: str = "quorum",
    ) -> None:  # fmt: skip
        self.acks = acks  # what its client waits for: "quorum", "one" or "none"
        self._tells_first_copies = acks == "one"
        self.principal = principal
        self.writer = get_required_transaction_role(principal)
        self.client = client  # its name and version, as it says
        self.since_ms = since_ms  # it was opened, wall clock
        self.properties = properties or {}
        self.id = id_
        self.name = name
        self.mode = mode
        self.instance = instance
        self.connection = connection
        self.epoch = epoch
        self.address = address
        self.messages = self.bytes = self.duplicates = 0
        self._dedup = topic.dedup
        self.transactions = topic.transactions
        self._refused_chunk: tuple[SequenceRange, MagnetarError] | None = None
        self.turn: asyncio.Future[None] | None = None  # of one that waits until it may join
        self._topic = topic
        self._outlet = outlet
        self.room = room
        self.size_max = size_max + room
        self.close_error: MagnetarError | None = None  # why the broker closed it
        self._logged = 0  # entries given to the log …
        self._settled = 0  # … and those of them with an outcome
        self._first_copies = 0  # the first so many of them had a first copy that was reported, or have an outcome
        self._refused: deque[tuple[int, int, MagnetarError | None]] | None = None
        self._idle: asyncio.Future[None] | None = None

    @property
    def last_sequence_id(self) -> int:
        """Returns the highest stored sequence id of the producer, including entries in open transactions; -1 if none is
        known."""
        return max(self._dedup.core.last_sequence_id(self.name), self.transactions.last_sequence_id(self.name))

    @property
    def has_pending(self) -> bool:
        """Returns True if an entry is in flight."""
        return self._settled < self._logged

    # ------------------------------------------------------------------ in
    def publish(self, client_part: Buffer) -> bool | TransactionEventToAwait:
        """Publishes an entry (its client-part). Returns True if the entry was given to the log; False if it was not,
        because it is refused or a duplicate, or because the producer is closed. Returns a TransactionEventToAwait if
        nothing was done: after that event the caller must call `publish` again, before it publishes a later entry.
        Raises no MagnetarError: the outcome port gets the error. Keeps no reference to `client_part`."""
        topic = self._topic
        state = topic.log.state
        if self.close_error is not None or state is not TopicState.SERVING or len(client_part) > self.size_max:
            why = why_publish_refused(
                size=len(client_part), size_max=self.size_max, terminated=state is TopicState.TERMINATED,
                owned=state is not TopicState.LOST, fenced=self.close_error is not None,
            )  # fmt: skip
            if why is not None:
                return self._refuse(client_part, why)
        try:
            metadata, offset, checksum, unfolded = parse_checked_head(client_part)
            txn = transaction_id_of(metadata) if metadata.HasField("txnid_most_bits") else None
        except CorruptEntry as error:
            return self._refuse(client_part, PublishRefusal.CORRUPT, error)
        except InvalidRequest as error:
            return self._refuse(client_part, PublishRefusal.NO_TRANSACTION, error)
        if unfolded > self.size_max and metadata.num_chunks_from_msg <= 1:
            text = f"the entry declares {unfolded} uncompressed bytes, the limit is {self.size_max}"
            return self._refuse(client_part, PublishRefusal.TOO_LARGE, MessageTooLarge(text))
        wanted, dedup = topic.applied.deduplication, self._dedup.core
        if wanted is not dedup.enabled:
            self._dedup.set_enabled(wanted)
        if (wanted or txn is not None) and topic.is_durable_in_memory:
            return self._refuse(client_part, PublishRefusal.MEMORY)
        if dedup.enabled and metadata.producer_name != self.name:
            return self._refuse(client_part, PublishRefusal.WRONG_NAME)
        numbers = parse_sequence_range(metadata)
        if self._refused_chunk is not None and (why_not := self._why_chunk_refused(numbers)) is not None:
            return self.refuse_entry(client_part, why_not)
        if txn is not None and dedup.enabled and numbers.has_too_many_ids:
            text = (
                f"the sequence ids of an entry in a transaction span {SEQUENCE_SPAN_MAX} at most, and are below "
                f"{SEQUENCE_ID_END}"
            )
            wide = PublishRefusal.WIDE_IDS.error(f"{text}; this one has {numbers.first} to {numbers.last}")
            return self._refuse(client_part, PublishRefusal.WIDE_IDS, wide)
        if dedup.enabled and (
            other := self.transactions.find_other_transaction_of_sequence(self.name, txn, numbers)
        ) is not None:
            return TransactionEventToAwait(other, end=True)  # it is stored if that commits, and new if not
        if txn is None:
            verdict = dedup.judge_duplicate(self.name, numbers)
        elif self.transactions.joins.join_nowait(txn, self.writer):
            verdict = dedup.judge_by_stored_entries(self.name, numbers)
            if verdict is DedupVerdict.NEW:
                verdict = self.transactions.judge_duplicate(txn, metadata.producer_name, numbers)
        else:
            return TransactionEventToAwait(txn, owner=self.writer)
        if verdict is not DedupVerdict.NEW:
            return self._judged(client_part, metadata.sequence_id, verdict)
        if self._refused_chunk is not None and self._refused_chunk[0].uuid == numbers.uuid:
            self._refused_chunk = None  # it was published again
        batched = metadata.HasField("num_messages_in_batch")
        publish = Publish(
            self, client_part, numbers, count=metadata.num_messages_in_batch if batched else 1,
            deliver_at_ms=metadata.deliver_at_time, txn=txn, name=metadata.producer_name, checksum=checksum,
            expiry=find_entry_expiry(metadata, client_part, offset, batched=batched),
            redriven_to=find_redriven_to(metadata, client_part, offset),
        )  # fmt: skip
        try:
            if publish.deliver_at_ms:
                topic.check_delivery_time(publish.deliver_at_ms)
            topic.log.publish(publish)
        except MagnetarError as error:
            self._has_failed(publish, error)
            return self._answer_in_place(metadata.sequence_id, error)
        self._logged += 1
        if self._tells_first_copies:
            topic.log.await_first_copy(publish)
        return True

    def _judged(self, client_part: Buffer, sequence_id: int, verdict: DedupVerdict) -> bool:
        """Answers an entry whose verdict is not NEW. Closes the producer if the verdict is UNKNOWN. Returns False, as
        `publish` does for an entry that is not given to the log."""
        if verdict is DedupVerdict.DUPLICATE:
            self.duplicates += 1
            return self._answer_in_place(sequence_id, None)
        if verdict is DedupVerdict.OVERLAP:
            return self._refuse(client_part, PublishRefusal.OVERLAP)
        if verdict is DedupVerdict.UNORDERED:
            return self._refuse(client_part, PublishRefusal.UNORDERED)
        self.close(
            PublishRefusal.IN_DOUBT.error(
                f"entry {sequence_id} of producer {self.name!r} is on its way into topic {self._topic.name};"
                " connect and send it again", topic=self._topic.name, sequence_id=sequence_id,
            )
        )  # fmt: skip
        return False

    def _refuse(self, client_part: Buffer, why: PublishRefusal, cause: MagnetarError | None = None) -> bool:
        error = self.close_error or why.error(
            f"topic {self._topic.name}: {cause or why.value}", size=len(client_part), limit=self.size_max
        )
        return self.refuse_entry(client_part, error)

    def refuse_entry(self, client_part: Buffer, error: MagnetarError) -> bool:
        """Refuses the entry with `error`. The refusal is reported after the outcomes of all earlier entries. Returns
        False, as `publish` does for an entry that is not given to the log."""
        sequence_id = get_sequence_id(client_part)
        if sequence_id is not None:
            self._note_refused_chunk(parse_sequence_range(parse_stored_head(client_part).metadata), error)
        return self._answer_in_place(NO_SEQUENCE_ID if sequence_id is None else sequence_id, error)

    async def wait_idle(self) -> None:
        """Waits until no entry is in flight, or the producer is closed."""
        while self.has_pending and self.close_error is None:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    # ------------------------------------------------------------------ out
    def on_confirmed(self, publish: Publish, position: Position, index: int) -> None:
        size, traffic = publish.client_bytes, self._topic.traffic
        self.messages += publish.count
        self.bytes += size
        traffic.messages_in += publish.count
        traffic.bytes_in += size
        if publish.txn is None:
            dedup = self._dedup
            dedup.core.on_publish_confirmed(self.name, publish.numbers, position)
            if dedup.waiting or dedup.core.enabled:
                dedup.on_publish_confirmed(self.name)
        else:
            self._dedup.on_uncommitted_entry_stored(position)
            self.transactions.on_publish_confirmed(
                publish.txn, publish.name, publish.numbers, position, index - publish.count + 1, publish.count, size
            )
        if self.close_error is None:
            self._outlet.on_stored(size, publish.numbers.first, position, index)
        else:
            self._outlet.on_bytes_freed(size)
        self._settled += 1
        if self._refused or self._idle is not None:
            self._go_on()

    def on_first_copy(self, publish: Publish) -> None:
        self._first_copies = max(self._first_copies, self._settled) + 1
        if self.close_error is None:
            self._outlet.on_first_copy(publish.numbers.first)

    def _note_loss(self, publish: Publish, error: MagnetarError) -> None:
        FIRST_COPIES.lost += publish.count
        if (now := self._topic.world.clock.monotonic()) >= FIRST_COPIES.log_due_s:
            FIRST_COPIES.log_due_s = now + LOSS_LOG_INTERVAL_S
            _LOG.error(
                "%s: messages of producer %r were reported with one copy (acks=one), and their quorum failed; they are "
                "lost unless the producer sends them again; %d of all topics so far: %s", self._topic.name, self.name,
                FIRST_COPIES.lost, error,
            )  # fmt: skip

    def on_failed(self, publish: Publish, error: MagnetarError) -> None:
        if self._settled < self._first_copies:
            self._note_loss(publish, error)
        self._outlet.on_bytes_freed(publish.client_bytes)
        if self.close_error is None:
            self._outlet.on_failed(publish.numbers.first, error)
        self._has_failed(publish, error)
        if self._dedup.is_enabled or publish.txn is not None:
            self.close(error)  # later entries of this connection must not pass it
        self._settled += 1
        self._go_on()

    def on_publish_waiting(self, error: MagnetarError) -> None:
        if self.close_error is None:
            self._outlet.on_publish_waiting(error)

    def _note_refused_chunk(self, numbers: SequenceRange, error: MagnetarError) -> None:
        """Records that an entry was refused or failed with `error`, if the entry is a chunk and no earlier chunk of its
        message was."""
        if numbers.uuid and self._why_chunk_refused(numbers) is None:
            self._refused_chunk = numbers, error

    def _why_chunk_refused(self, numbers: SequenceRange) -> MagnetarError | None:
        """Returns the error of an earlier chunk of the same message; None if the entry is no chunk, or none failed."""
        if self._refused_chunk is None or not numbers.uuid:
            return None
        refused, error = self._refused_chunk
        return error if numbers.uuid == refused.uuid and numbers.chunk > refused.chunk else None

    def _has_failed(self, publish: Publish, error: MagnetarError) -> None:
        self._note_refused_chunk(publish.numbers, error)
        if publish.txn is None:
            self._dedup.on_publish_failed(self.name)
        else:
            self.transactions.on_publish_failed(publish.txn, publish.name)

    def _go_on(self) -> None:
        """Called after an entry got its outcome: reports the outcomes of the refused entries that directly follow
        it."""
        while self._refused and self._refused[0][0] <= self._settled:
            _, sequence_id, error = self._refused.popleft()
            self._answer(sequence_id, error)
        if self._idle is not None and not self.has_pending:
            self._wake()

    def _answer_in_place(self, sequence_id: int, error: MagnetarError | None) -> bool:
        """Reports the outcome of an entry that was not given to the log, after the outcomes of all earlier entries.
        `error`: why it is refused; None: it is a duplicate. Returns False."""
        if not self.has_pending:
            self._answer(sequence_id, error)
        else:
            if self._refused is None:
                self._refused = deque()
            self._refused.append((self._logged, sequence_id, error))
        return False

    def _answer(self, sequence_id: int, error: MagnetarError | None) -> None:
        """Reports the outcome of an entry that was not given to the log. `error`: why it is refused; None: it is a
        duplicate.

        Reports nothing if the producer is closed, or if the entry is refused because the topic closes. The producer is
        closed next, and the client then sends the unanswered entries to the next owner, which the close names. After a
        refusal the client would first look the topic up, after a pause.
        """
        if self.close_error is not None or (isinstance(error, NotOwner) and self._topic.is_ended):
            return
        if error is None:
            self._outlet.on_duplicate(sequence_id)
        else:
            self._outlet.on_failed(sequence_id, error)

    def _wake(self) -> None:
        if self._idle is not None:
            self._idle.set_result(None)
            self._idle = None

    def close(self, error: MagnetarError) -> None:
        """Closes the producer, and reports `error` to its outcome port. The entries in flight get no outcome. After the
        first call, a further call changes nothing and reports nothing."""
        if self.close_error is None:
            self.close_error = error
            self._outlet.on_closed(error)
        if self.turn is not None and not self.turn.done():
            self.turn.set_exception(error)
            self.turn.exception()  # marks it as retrieved: nothing may wait for it any more
        self._wake()


# ---------------------------------------------------------------------------------------------------------- gate
# The gate for publishes: open below the topic's publish rates and while its backlog quota does not block producers.
#
# A producer's session checks `must_wait` before it publishes, reports to `count_published` what it published, and
# queues entries that arrive while the gate is closed. `queue_waiting_publish` calls the session once for each entry
# that may be published then, in turn with the other sessions, so that no producer takes the share of another. So a
# producer that is too fast gets no receipts, and therefore no credit (broker/session/producer.py; PIP-322, Pulsar L1,
# T18); entries are never dropped, and nothing else on the connection waits. One timer for all producers of a topic, and
# none while nothing is limited. Guarding tests: tests/broker/topic/test_maintenance.py.


PublishStep = Callable[[], bool]
"""A function that publishes one waiting entry, and returns True if there are more."""


RATE_CHECKED_AGAIN_S = 1.0
"""Seconds after which a publish that waits for a rate looks again: the rate may have become higher meanwhile."""


class PublishGate:
    """The gate of one topic: a queue of publishes that wait while a publish rate or the backlog quota blocks
    producers."""

    __slots__ = ("_clock", "_held", "_loop", "_own", "_timer", "_waiting", "limited")

    def __init__(self, clock: Clock, rates: Sequence[RateLimit], held: Callable[[], bool]) -> None:
        self._clock = clock
        self.set_rates(rates)
        self._held = held  # by the backlog quota: `resume_queued_publishes` is called when that may have changed
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[PublishStep, None] | None = None  # in the order of their turns
        self._timer: asyncio.Handle | None = None

    def set_rates(self, rates: Sequence[RateLimit]) -> None:
        """Sets the publish rates: that of the topic first, and then those of what it is part of. Must be called when
        one of them gets a limit, or has none any more."""
        self._own = rates[0]
        self.limited = tuple(rate for rate in rates if rate.limited)  # only with these is something counted

    @property
    def rate_limited_count(self) -> int:
        """Returns how many times the topic's own publish rate made a producer wait since the topic was loaded."""
        return self._own.throttled

    def count_published(self, messages: int, size: int) -> None:
        """Counts `messages` published messages of `size` bytes together against the publish rates."""
        for rate in self.limited:
            rate.spend_tokens(messages, size, self._clock.monotonic())

    @property
    def must_wait(self) -> bool:
        """Returns True if an entry that arrives now must wait at the gate, because a publish rate is used up or the
        backlog quota blocks producers."""
        if self._held():
            return True
        if not self.limited:
            return False
        return any(rate.delay_s(self._clock.monotonic()) > 0 for rate in self.limited)

    def queue_waiting_publish(self, step: PublishStep) -> None:
        """Queues the function `step`, which publishes one waiting entry. While the gate is open, `step` is called
        repeatedly, in turn with the other queued functions, until it returns False."""
        if self._waiting is None:
            self._waiting = {}
        self._waiting[step] = None
        self._arm()

    def remove_waiting_publish(self, step: PublishStep) -> None:
        """Removes the function `step` from the queue of publishes that wait. Idempotent."""
        if self._waiting is not None:
            self._waiting.pop(step, None)

    def resume_queued_publishes(self) -> None:
        """Calls the queued functions as long as the gate is open; lets other tasks of the event loop run in between.
        Must be called when the state of the quota, or a rate, has changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, turns = self._waiting, EventLoopSlices(self._clock)
        while waiting and not self.must_wait and not turns.is_slice_used_up:
            step = next(iter(waiting))
            del waiting[step]
            if step():
                waiting[step] = None
        if waiting:
            self._arm()
        else:
            self._waiting = None

    def _arm(self) -> None:
        """Sets a timer to the time at which the publish rates permit the next entry. Sets none while the quota blocks
        producers."""
        if self._timer is not None or self._held():
            return
        seconds = min(compute_rate_delay_s(self.limited, self._clock.monotonic()), RATE_CHECKED_AGAIN_S)
        self._timer = (
            self._loop.call_later(seconds, self.resume_queued_publishes)
            if seconds > 0
            else self._loop.call_soon(self.resume_queued_publishes)
        )
