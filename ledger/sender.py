"""Sends the adds of one ledger: all entries queued for a bookie in one turn of the loop travel in one request.

    send(add, lac) queues a new entry for each of its bookies. It is sealed at once, with the LAC of that moment, once
                   for all replicas. At the end of the turn each bookie gets one ADD_MANY of up to REQUEST_BYTES_MAX
                   (a single entry: an ADD); replicas that get the same entries share the same frames.
    acked(adds, …) gets the adds that a bookie has stored, `receive(fact)` its other answers: `AddRefused`, `AddFailed`

An answer has a status for each entry. No answer (time-out, broken connection), or one that cannot be decoded, is
AddFailed for every entry of the request: unknown. A bookie that answers BUSY for an entry did nothing with it and is
asked again every `retry_s`, for about `add_timeout_s` in all; so is a bookie whose queue in this process is full. If it
stores another entry, it has room, and is asked again BUSY_RESEND_DELAY_S later: a missing entry delays the confirmation
of all later ones. A bookie that was replaced meanwhile is not asked again. `unanswered_bytes` counts the requests
without an answer, each copy: a bookie that hangs keeps them in memory after the others confirmed them. The handle
bounds it, and `AppendMemoryBudget` (writer_core.py) bounds what all ledgers of the process have.
Guards: tests/ledger/test_sender.py, tests/ledger/test_ledger.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..metadata.records import LedgerRecord
from ..proto.errors import BackPressure
from ..runtime.files import Buffer
from ..runtime.peer.inside import InProcessRequest
from .bookies import Bookies, LedgerConfig
from .metadata_core import is_answered_from_memory
from .peer_format import (
    ADD_OK_ANSWER_PREFIX,
    ADDS_PER_REQUEST_MAX,
    ANSWER_HEAD_BYTES,
    BookieOperation,
    BookieRequestFlags,
    Status,
    decode_add_statuses,
    decode_answer,
    encode_add_many_request,
    encode_adds,
    pack_add_request,
    pack_unsynced_add_request,
)
from .reader_core import PayloadTailChecksum, PendingAppend, encode_header
from .writer_core import AddFailed, AddRefused, AddsAcked, EntryOutcome, SendAdd

REQUEST_BYTES_MAX = 1 << 20
"""A request ends with the entry with which its payloads reach this size, in bytes. A journal block of a bookie has the
same size."""


BUSY_RESEND_DELAY_S = 0.005
"""Seconds from the first sign that a busy bookie has room until the entries that it refused are sent again. If it
refuses them again, that costs little compared with what it stores in this time."""

LATE_REQUESTS_MAX = 64
"""The largest number of late answers that are kept of a ledger."""


class PendingAppendWithFuture(PendingAppend):
    """An entry that is being appended, and the future that gets its outcome: the entry id, or the error."""

    __slots__ = ("future",)

    def __init__(
        self,
        frames: tuple[Buffer, ...],
        size: int,
        future: asyncio.Future[int],
        tail: PayloadTailChecksum | None = None,
    ) -> None:
        super().__init__(frames, size, tail)
        self.future = future


AddOutcomeFact = AddsAcked | AddFailed | AddRefused
_Place = tuple[int, str]
"""(slot of the ensemble, bookie)."""


class SentAddRequest(InProcessRequest):
    """An add request that was sent to a bookie and is not answered yet (a `runtime.network.AnswerListener`).

    The copies of a request to several bookies share their memory: it counts once, at the `first` copy, whose `copies`
    is the number of copies without an answer. `adds` are its entries; `place` is (slot of the ensemble, bookie).
    `tries`: how often the request was repeated after `retry_s`. `sent_s`: when it was sent first, in seconds of the
    monotonic clock; 0 if `late_s` is not set."""

    __slots__ = ("adds", "bytes", "copies", "first", "place", "sender", "sent_s", "tries")

    def __init__(
        self, sender: AddSender, place: _Place, adds: list[PendingAppend], size: int, copies: int,
        first: SentAddRequest | None,
        tries: int, sent_s: float,
    ) -> None:  # fmt: skip
        self.sent_s = sent_s
        self.sender = sender
        self.place = place
        self.adds = adds
        self.bytes = size
        self.copies = copies
        self.first = first  # None: this one
        self.tries = tries

    def release_buffers(self) -> None:
        """Releases the memory that the request takes. Must be called exactly once: when the request is answered, or
        when no answer can arrive any more."""
        sender, first = self.sender, self.first or self
        sender.unanswered_bytes -= self.bytes
        first.copies -= 1
        if not first.copies:
            sender.memory.held -= self.bytes
            if sender.memory.waiting:
                sender.memory.notify_waiters()

    def on_answered(self, head: bytes, frames: Sequence[Buffer]) -> None:
        adds, sender, first = self.adds, self.sender, self.first or self
        sender.unanswered_bytes -= self.bytes  # as `release_buffers`, a call less
        first.copies -= 1
        if not first.copies:
            sender.memory.held -= self.bytes
            if sender.memory.waiting:
                sender.memory.notify_waiters()
        if len(adds) > 1 or len(head) != ANSWER_HEAD_BYTES or not head.startswith(ADD_OK_ANSWER_PREFIX):
            try:
                statuses = _statuses(head, frames, len(adds))
            except ValueError as wrong:
                sender.on_adds_failed(self.place, adds, wrong)
                return
            if any(statuses):
                sender.apply_entry_statuses(self, statuses)
                return
        if sender.late_s:
            sender.record_answer_if_late(self, adds)
        sender.acked(adds, self.place)
        if sender.busy:
            sender.on_bookie_has_room(self.place)

    def on_failed(self, error: BaseException) -> None:
        self.release_buffers()
        if isinstance(error, BackPressure):
            self.sender.retry_adds_later(self.place, self.adds, self.tries, self.sent_s)  # nothing was sent
        else:
            self.sender.on_adds_failed(self.place, self.adds, error)


class LateBookieAnswer(NamedTuple):
    """An answer to adds that took longer than `late_s`: the bookie has stored the entries `first_entry … last_entry`.
    Times are in seconds of the monotonic clock."""

    bookie: str
    first_entry: int
    last_entry: int
    sent_s: float
    answered_s: float


class _Busy:
    """The requests that a bookie answered with BUSY, until they are sent again."""

    __slots__ = ("is_soon", "requests", "timer")

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.is_soon = False  # whether the bookie has room again, so that the timer is that of BUSY_RESEND_DELAY_S
        self.requests: list[tuple[SentAddRequest, bytes, Sequence[Buffer]]] = []


class AddSender:
    """Sends the entries of one ledger to bookies, repeats what busy bookies refuse, and passes the outcomes on (see the
    module's docstring)."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, config: LedgerConfig,
        acked: Callable[[list[PendingAppend], _Place], None], receive: Callable[[AddOutcomeFact], None],
        failed: Callable[[str, object], None],
    ) -> None:  # fmt: skip
        """Makes a sender. `acked` is called with the entries that a bookie has stored, once for each answer; with
        none when entries are not sent again because their bookie was replaced. `receive` is called with every other
        outcome as a fact. `failed(bookie, why)` is called before `receive` gets the AddFailed of a bookie that did not
        answer or answered with an error."""
        self._ledger = record.ledger_id
        self._key = record.key
        unsynced = is_answered_from_memory(record)
        self._flags = BookieRequestFlags.UNSYNCED if unsynced else BookieRequestFlags.NONE
        self._pack_add = pack_unsynced_add_request if unsynced else pack_add_request
        self._bookies = bookies
        self._config = config
        self.acked = acked
        self._receive = receive
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self.memory = bookies.memory
        self._waiting: dict[_Place, list[PendingAppend]] = {}
        self.busy: dict[_Place, _Busy] = {}
        self._waiting_bytes = 0  # payload bytes of the entries in `_waiting`, each counted once
        self.unanswered_bytes = 0
        self.late_s = config.late_s
        self.late: deque[LateBookieAnswer] | None = None  # the last ones; None: there was none
        self._closed = False

    def send(self, add: PendingAppend, lac: int) -> None:
        """Queues a new entry for each bookie in `add.sent`. All that is queued is sent at the end of this turn of the
        event loop. `lac` is the last-add-confirmed for the entry's header."""
        waiting = self._waiting
        add.header = encode_header(self._ledger, add.entry, lac, add.length, add.frames, add.tail)
        if not add.sent:  # all its bookies failed: it is sent to those that replace them
            return
        self._waiting_bytes += add.size
        self.memory.held += add.size
        if not waiting:
            self._loop.call_soon(self._flush)
        for place in add.sent.items():
            if place in waiting:
                waiting[place].append(add)
            else:
                waiting[place] = [add]

    def send_to_replacement(self, effect: SendAdd[PendingAppend]) -> None:
        """Queues an entry, with the header that it has already, for the bookie that has replaced a failed one. The
        entry is sent at the end of this turn of the event loop."""
        add, slot, bookie, _ = effect
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.setdefault((slot, bookie), []).append(add)

    def close(self) -> None:
        """Stops sending, because the ledger has ended. Entries that wait are not sent any more, so they may be appended
        to another ledger. Requests that a bookie has got are still answered."""
        self._closed = True

    # ------------------------------------------------------------------------------ requests
    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        several = [] if self._closed else list(waiting.items())  # else they may be another ledger's, with its header
        at, timeout_s, peers = 0, self._config.add_timeout_s, self._bookies.peers
        now_s = self._bookies.now() if self.late_s else 0.0
        while at < len(several):
            adds, copies = several[at][1], 1
            while at + copies < len(several) and several[at + copies][1] == adds:
                copies += 1
            for part in _parts(adds) if len(adds) > 1 else (adds,):
                head, frames, size = self._encode(part)
                self.memory.held += size
                self.unanswered_bytes += size * copies
                first: SentAddRequest | None = None
                for place, _ in several[at : at + copies]:
                    sent = SentAddRequest(self, place, part, size, copies, first, 0, now_s)
                    first = first or sent
                    refused = peers[place[1]].send_request(sent, head, frames, timeout_s=timeout_s)
                    if refused is not None:
                        self._loop.call_soon(sent.on_failed, refused)
            at += copies
        self.memory.release(self._waiting_bytes)  # its requests are counted now; there are none if the ledger has ended
        self._waiting_bytes = 0

    def _encode(self, adds: Sequence[PendingAppend]) -> tuple[bytes, Sequence[Buffer], int]:
        """Encodes a request with these entries. Returns (head, frames, size of the frames in bytes)."""
        first = adds[0]
        if len(adds) == 1:
            frames: Sequence[Buffer] = (first.header, *first.frames)
            return self._pack_add(self._ledger, first.entry, 0, 0, self._key), frames, len(first.header) + first.size
        frames = encode_adds([(add.header, add.frames, add.size) for add in adds])
        head = encode_add_many_request(self._ledger, first.entry, len(adds), self._key, self._flags)
        return head, frames, sum(map(len, frames))

    def _post(self, sent: SentAddRequest, head: bytes, frames: Sequence[Buffer]) -> None:
        timeout_s = self._config.add_timeout_s
        refused = self._bookies.peers[sent.place[1]].send_request(sent, head, frames, timeout_s=timeout_s)
        if refused is not None:
            self._loop.call_soon(sent.on_failed, refused)

    # ------------------------------------------------------------------------------ answers
    def apply_entry_statuses(self, sent: SentAddRequest, statuses: list[Status]) -> None:
        """Applies an answer with a status for each entry: reports the stored entries first, then the refused and the
        failed ones. Entries with BUSY are sent again later."""
        place, adds = sent.place, sent.adds
        by_status: dict[Status, list[PendingAppend]] = {}
        for add, status in zip(adds, statuses, strict=True):
            by_status.setdefault(status, []).append(add)
        stored, busy = by_status.pop(Status.OK, None), by_status.pop(Status.BUSY, None)
        if stored is not None:
            if self.late_s:
                self.record_answer_if_late(sent, stored)
            self.acked(stored, place)
            if self.busy:
                self.on_bookie_has_room(place)
        for status in sorted(by_status):
            if status in _REFUSED:
                self._receive(AddRefused(_REFUSED[status]))
            else:
                self.on_adds_failed(place, by_status[status], status.name)
        if busy is not None:
            self.retry_adds_later(place, busy, sent.tries, sent.sent_s)

    def on_adds_failed(self, place: _Place, adds: Sequence[PendingAppend], why: object) -> None:
        """Called when the bookie in `place` (slot, bookie) has not stored these entries: passes the failure and an
        AddFailed for each entry on. `why` is the error or the name of the status."""
        self._failed(place[1], why)
        for add in adds:
            self._receive(AddFailed(add.entry, *place))

    def retry_adds_later(self, place: _Place, adds: list[PendingAppend], tries: int, sent_s: float) -> None:
        """Sends entries that the bookie in `place` (slot, bookie) had no room for again, after `retry_s`. Reports them
        as failed instead if the sender is closed, or if `tries` repetitions took about `add_timeout_s`. Drops entries
        of a bookie that was replaced, and then calls `acked` with none, because the handle may have room again."""
        slot, bookie = place
        if self._closed:  # first: the entries may be in another ledger now
            for add in adds:
                self._receive(AddFailed(add.entry, *place))
            return
        wanted = [add for add in adds if add.sent[slot] == bookie]
        if len(wanted) < len(adds):
            self.acked([], place)
        adds = wanted
        if not adds:
            return
        if (tries + 1) * self._config.retry_s > self._config.add_timeout_s:
            self.on_adds_failed(place, adds, f"busy for {self._config.add_timeout_s} s")
        else:
            head, frames, size = self._encode(adds)
            self.memory.held += size
            self.unanswered_bytes += size
            busy = self.busy.get(place)
            if busy is None:
                timer = self._loop.call_later(self._config.retry_s, self._repeat, place, 1)
                busy = self.busy[place] = _Busy(timer)
            busy.requests.append((SentAddRequest(self, place, adds, size, 1, None, tries, sent_s), head, frames))

    def record_answer_if_late(self, sent: SentAddRequest, stored: Sequence[PendingAppend]) -> None:
        """Records the answer of a bookie that has stored these entries, if it came more than `late_s` seconds after the
        request `sent`. Only the last LATE_REQUESTS_MAX are kept."""
        now_s = self._bookies.now()
        if now_s - sent.sent_s > self.late_s:
            if self.late is None:
                self.late = deque(maxlen=LATE_REQUESTS_MAX)
            self.late.append(LateBookieAnswer(sent.place[1], stored[0].entry, stored[-1].entry, sent.sent_s, now_s))

    def on_bookie_has_room(self, place: _Place) -> None:
        """Called when the busy bookie in `place` (slot, bookie) has stored an entry: BUSY_RESEND_DELAY_S seconds later,
        the requests that it answered with BUSY are sent again."""
        busy = self.busy.get(place)
        if busy is not None and not busy.is_soon:
            busy.is_soon = True
            busy.timer.cancel()
            busy.timer = self._loop.call_later(BUSY_RESEND_DELAY_S, self._repeat, place, 0)

    def _repeat(self, place: _Place, passed: int) -> None:
        for sent, head, frames in self.busy.pop(place).requests:
            if self._closed:
                sent.release_buffers()
                self.retry_adds_later(place, sent.adds, sent.tries, sent.sent_s)
            else:
                sent.tries += passed
                self._post(sent, head, frames)


_REFUSED = {Status.FENCED: EntryOutcome.FENCED, Status.UNAUTHORIZED: EntryOutcome.UNAUTHORIZED}


def _statuses(head: bytes, frames: Sequence[Buffer], count: int) -> list[Status]:
    """Returns the status of each entry in an answer. Raises ValueError if this is no valid answer to a request with
    `count` entries."""
    answer = decode_answer(head)
    if count == 1 and answer.op is BookieOperation.ADD:
        return [answer.status]
    return decode_add_statuses(answer, frames, count)


def _parts(adds: list[PendingAppend]) -> list[list[PendingAppend]]:
    """Splits `adds` into parts for one request each, of about REQUEST_BYTES_MAX bytes and at most ADDS_PER_REQUEST_MAX
    entries."""
    parts: list[list[PendingAppend]] = []
    begin = size = 0
    for at, add in enumerate(adds, 1):
        size += add.size
        if size >= REQUEST_BYTES_MAX or at - begin == ADDS_PER_REQUEST_MAX:
            parts.append(adds[begin:at])
            begin, size = at, 0
    if begin < len(adds):
        parts.append(adds[begin:])
    return parts
