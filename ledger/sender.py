"""Sends the adds of one ledger: all entries queued for a bookie in one turn of the loop travel in one request.

    push(sends)    queues the core's `SendAdd` effects. An entry is sealed at once, with the LAC of that moment, once
                   for all replicas. At the end of the turn each bookie gets one ADD_MANY of up to REQUEST_BYTES_MAX
                   (a single entry: an ADD); replicas that get the same entries share the same frames.
    receive(fact)  gets the answer, entry by entry, as facts for the core: `AddsAcked`, `AddRefused`, `AddFailed`

An answer has a status for each entry. No answer (time-out, broken connection), or one that cannot be decoded, is
AddFailed for every entry of the request: unknown. A bookie that answers BUSY for an entry did nothing with it and is
asked again every `retry_s`, for about `add_timeout_s` in all; so is a bookie whose queue in this process is full. When
it stores another entry it has room, and is asked again ROOM_S later: an entry that is missing holds up the confirmation
of all after it. A bookie that was replaced meanwhile is not asked again. `unanswered_bytes`
counts the requests without an answer, each copy: what a bookie that hangs keeps in memory after the others confirmed
it. The handle bounds it, and memory.py what all ledgers of the process have.
Guards: tests/ledger/test_sender.py, tests/ledger/test_ledger.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from ..metadata.records import LedgerRecord
from ..proto.errors import BackPressure
from ..runtime.files import Buffer
from ..runtime.network import Reply
from .bookies import Bookies
from .config import LedgerConfig
from .core.pending import AddFailed, AddsAcked, PendingAdd, SendAdd
from .core.stored import Tail, seal
from .core.writer import AddRefused, Outcome
from .format.adds import ADDS_MAX, decode_statuses, encode_adds
from .format.peer import Op, Status, decode_answer, encode_add, encode_add_many, is_added
from .memory import Kept

REQUEST_BYTES_MAX = 1 << 20
"""Payload of one request; the last entry may exceed it. A journal block of a bookie has the same size."""


ROOM_S = 0.005
"""From the first sign of room to the next request for the entries that found none: what is sent twice is little beside
what a bookie takes in that time."""


class Append:
    """The driver's part of a pending entry: the payload's frames, its `size` in bytes, its future (None: the listener
    of the handle is told) and its header."""

    __slots__ = ("frames", "future", "header", "size", "tail")

    def __init__(
        self, frames: tuple[Buffer, ...], size: int, future: asyncio.Future[int] | None, tail: Tail | None = None
    ) -> None:
        self.frames = frames
        self.tail = tail
        self.size = size
        self.future = future
        self.header = b""


Add = PendingAdd[Append]
Fact = AddsAcked | AddFailed | AddRefused
_Place = tuple[int, str]
"""(slot, bookie)"""


class _Busy:
    """Requests that a bookie had no room for, until it is asked again."""

    __slots__ = ("is_soon", "requests", "timer")

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self.timer = timer
        self.is_soon = False  # it has room: the timer is one of ROOM_S
        self.requests: list[tuple[list[Add], bytes, Sequence[Buffer], Kept, int]] = []


class AddSender:
    """Sends the adds of one ledger and passes the answers to `receive` (see the module's docstring)."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, config: LedgerConfig, receive: Callable[[Fact], None],
        failed: Callable[[str, object], None],
    ) -> None:  # fmt: skip
        """`failed(bookie, why)` is called before the AddFailed of a bookie that did not answer, or refused."""
        self._ledger = record.ledger_id
        self._key = record.key
        self._bookies = bookies
        self._config = config
        self._receive = receive
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._memory = bookies.memory
        self._waiting: dict[_Place, list[Add]] = {}
        self._busy: dict[_Place, _Busy] = {}
        self._waiting_bytes = 0  # of what is in it, each entry once
        self.unanswered_bytes = 0
        self._closed = False

    def push(self, sends: Sequence[SendAdd[Append]]) -> None:
        waiting = self._waiting
        if not waiting and sends:
            self._loop.call_soon(self._flush)
        for add, slot, bookie, lac in sends:
            append = add.payload
            if not append.header:
                append.header = seal(self._ledger, add.entry, lac, add.length, append.frames, append.tail)
                self._waiting_bytes += append.size
                self._memory.held += append.size
            place = slot, bookie
            if place in waiting:
                waiting[place].append(add)
            else:
                waiting[place] = [add]

    def close(self) -> None:
        """No request is repeated any more."""
        self._closed = True

    # ------------------------------------------------------------------------------ requests
    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, {}
        before: list[Add] = []
        requests: list[tuple[list[Add], bytes, Sequence[Buffer], Kept]] = []
        several = list(waiting.items())
        for at, (place, adds) in enumerate(several):
            if adds != before:
                copies = 1
                while at + copies < len(several) and several[at + copies][1] == adds:
                    copies += 1
                parts = [adds] if len(adds) == 1 else _parts(adds)
                before, requests = adds, [(part, *self._encode(part, copies)) for part in parts]
            for part, head, frames, kept in requests:
                self.unanswered_bytes += kept.bytes
                self._request(place, part, head, frames, kept, 0)
        held, self._waiting_bytes = self._waiting_bytes, 0
        self._memory.release(held)  # its requests are counted now

    def _encode(self, adds: Sequence[Add], copies: int) -> tuple[bytes, Sequence[Buffer], Kept]:
        """A request's head, its frames and their bytes."""
        first = adds[0]
        if len(adds) == 1:
            append = first.payload
            kept = Kept(self._memory, len(append.header) + append.size, copies)
            return encode_add(self._ledger, first.entry, self._key), (append.header, *append.frames), kept
        frames = encode_adds([(add.payload.header, add.payload.frames, add.payload.size) for add in adds])
        kept = Kept(self._memory, sum(map(len, frames)), copies)
        return encode_add_many(self._ledger, first.entry, len(adds), self._key), frames, kept

    def _request(
        self, place: _Place, adds: list[Add], head: bytes, frames: Sequence[Buffer], kept: Kept, tries: int
    ) -> None:
        answer = self._bookies.request(place[1], head, frames, timeout_s=self._config.add_timeout_s)
        answer.add_done_callback(partial(self._answered, place, adds, kept, tries))

    # ------------------------------------------------------------------------------ answers
    def _answered(
        self, place: _Place, adds: list[Add], kept: Kept, tries: int, answer: asyncio.Future[Reply]
    ) -> None:
        """Turns a bookie's answer, or its absence, into facts."""
        self.unanswered_bytes -= kept.bytes
        kept.answered()
        error = asyncio.CancelledError() if answer.cancelled() else answer.exception()
        if isinstance(error, BackPressure):
            self._ask_again(place, adds, tries)  # nothing was sent
        elif error is not None:
            self._fail(place, adds, error)
        else:
            try:
                statuses = _statuses(answer.result(), len(adds))
            except ValueError as wrong:
                self._fail(place, adds, wrong)
            else:
                self._tell(place, adds, tries, statuses)

    def _tell(self, place: _Place, adds: list[Add], tries: int, statuses: list[Status] | None) -> None:
        """In this order: entries that were stored, refusals that end the ledger, entries to send again."""
        if statuses is None:
            self._stored(place, adds)
            return
        by_status: dict[Status, list[Add]] = {}
        for add, status in zip(adds, statuses, strict=True):
            by_status.setdefault(status, []).append(add)
        stored, busy = by_status.pop(Status.OK, None), by_status.pop(Status.BUSY, None)
        if stored is not None:
            self._stored(place, stored)
        for status in sorted(by_status):
            if status in _REFUSED:
                self._receive(AddRefused(_REFUSED[status]))
            else:
                self._fail(place, by_status[status], status.name)
        if busy is not None:
            self._ask_again(place, busy, tries)

    def _stored(self, place: _Place, adds: list[Add]) -> None:
        self._receive(AddsAcked([add.entry for add in adds], *place))
        if self._busy:
            self._has_room(place)

    def _fail(self, place: _Place, adds: Sequence[Add], why: object) -> None:
        self._failed(place[1], why)
        for add in adds:
            self._receive(AddFailed(add.entry, *place))

    def _ask_again(self, place: _Place, adds: list[Add], tries: int) -> None:
        """`tries`: how often `retry_s` has passed since the first time."""
        slot, bookie = place
        adds = [add for add in adds if add.sent[slot] == bookie]
        if not adds:
            return
        if self._closed:
            for add in adds:
                self._receive(AddFailed(add.entry, *place))
        elif (tries + 1) * self._config.retry_s > self._config.add_timeout_s:
            self._fail(place, adds, f"busy for {self._config.add_timeout_s} s")
        else:
            head, frames, kept = self._encode(adds, 1)
            self.unanswered_bytes += kept.bytes
            busy = self._busy.get(place)
            if busy is None:
                timer = self._loop.call_later(self._config.retry_s, self._repeat, place, 1)
                busy = self._busy[place] = _Busy(timer)
            busy.requests.append((adds, head, frames, kept, tries))

    def _has_room(self, place: _Place) -> None:
        """The bookie has stored something."""
        busy = self._busy.get(place)
        if busy is not None and not busy.is_soon:
            busy.is_soon = True
            busy.timer.cancel()
            busy.timer = self._loop.call_later(ROOM_S, self._repeat, place, 0)

    def _repeat(self, place: _Place, passed: int) -> None:
        for adds, head, frames, kept, tries in self._busy.pop(place).requests:
            if self._closed:
                self.unanswered_bytes -= kept.bytes
                kept.answered()
                self._ask_again(place, adds, tries)
            else:
                self._request(place, adds, head, frames, kept, tries + passed)


_REFUSED = {Status.FENCED: Outcome.FENCED, Status.UNAUTHORIZED: Outcome.UNAUTHORIZED}


def _statuses(reply: Reply, count: int) -> list[Status] | None:
    """The status of each add; None: all are stored. ValueError when the reply is not an answer to them."""
    if count == 1 and is_added(reply.head):
        return None
    answer = decode_answer(reply.head)
    if count == 1 and answer.op is Op.ADD:
        return [answer.status]
    statuses = decode_statuses(answer, reply.frames, count)
    return statuses if any(statuses) else None


def _parts(adds: list[Add]) -> list[list[Add]]:
    """`adds` in parts of at most about REQUEST_BYTES_MAX and ADDS_MAX entries."""
    parts: list[list[Add]] = []
    begin = size = 0
    for at, add in enumerate(adds, 1):
        size += add.payload.size
        if size >= REQUEST_BYTES_MAX or at - begin == ADDS_MAX:
            parts.append(adds[begin:at])
            begin, size = at, 0
    if begin < len(adds):
        parts.append(adds[begin:])
    return parts
