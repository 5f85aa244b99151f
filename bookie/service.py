"""The peer service of a bookie: translates requests (ledger/peer_format.py) into the store's intents, and answers.

No task per add: the requests of one turn of the event loop become `Store.seal_group`s of about GROUP_SEAL_BYTES, and
the journal's completion answers them together. What is answered when (ledger protocol §1.5, §1.7, §1.9):

    ADD, ADD_MANY      after the sync of its records; what is refused, held or slowed down: adds.py
    … with UNSYNCED    when its entries are in memory; its records are synced as all others, and counted until then
    READ, READ_LAC     at once from memory, else after one file read
    … with FENCE       every answer, also NO_SUCH_*, after the sync of the fence; at once when that is done already
    WRITE_LAC          after the sync
    HELD               after the look at the index and the sync of what is in memory; counts as a read
    ADMIN              by `on_admin` in a task of its own; at most ADMIN_REQUESTS_MAX at a time, further ones are BUSY

Every request but PING and ADMIN carries the ledger's key. Another key is UNAUTHORIZED, also for a read. The first
request of a ledger here waits until the bookie has asked the metadata for the ledger (see below).

| what waits for the journal's sync | bound, in all; half of it for one connection | past it |
|---|---|---|
| adds | adds.py | |
| fences, of recovery alone | half of `held_bytes_max`, a bound of their own | BUSY, nothing was done |
| explicit LACs | an eighth of it, and none while the journal's queue is full | BUSY |

What is read from the disk at a time is bounded by `reads_max` and, as much as was asked for, by `reads_bytes_max`.
A read past either waits for the others, in the order of arrival; a lone read is always taken. What waits is bounded
too, in all and of one connection (WAITING_READS_DIVISOR), and by READ_WAIT_S_MAX; past that it is BUSY. A read that
needs no disk needs no room.

However many fences and LACs of one ledger wait, the journal has one record of them (`Store.fence`, `Store.write_lac`).
A read-only bookie takes recovery adds and fences as long as there is room.

**Ledgers that are new to the bookie** (`RequestsOfUnknownLedgers`): the metadata says whether the id was given out, and
with which key. A ledger's record is in the metadata before its writer or a recoverer sends a request to a bookie. So
the first request of a ledger waits here until the record was read; the next ones find its descriptor and cost nothing.

| the record | the request |
|---|---|
| exists, with this key | is done, in the order of arrival |
| exists, with another key | UNAUTHORIZED |
| is missing | UNAUTHORIZED: the id was not given out, or the ledger was deleted |
| is missing, and the tree has no counter of ids at all | is done: no ledger was ever made through this metadata |
| cannot be read | BUSY, nothing was done: the client asks again |

The request waits, too, until what the record says is stored beside the data (bookie/maintenance/labels.py).

So a stranger takes no id before its owner does, and creates no descriptor without an owner. A refusal is not
remembered: a request that comes before its id was given out is refused, and a later one is not.

Bounds: `waiting_bytes_max` of requests wait, half of that from one connection, past it BUSY; `LEDGER_LOOKUPS_MAX`
records are read at a time, one of a ledger. Guarded by tests/bookie/test_newcomers.py. """

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ..ledger.peer_format import (
    ADMIN_BYTES_MAX,
    ENTRIES_PER_ANSWER_MAX,
    FLAGS_WITH_FENCE,
    NO_LEDGER_KEY,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    decode_request,
    encode_stored_runs,
    parse_client_add_request,
)
from ..metadata import paths
from ..metadata.records import CounterRecord, LedgerRecord
from ..metadata.store import MetadataStore, get_record
from ..proto.errors import MagnetarError
from ..runtime.access import Principal
from ..runtime.clock import Clock
from ..runtime.files import Buffer
from ..runtime.metrics import DURATION_BOUNDS, Histogram
from ..runtime.network import PeerRequest
from ..runtime.tasks import Tasks
from .adds import AddRequestHandler, LoopTurnAdds, PendingJournalItem, RequestBudget, request_memory_bytes
from .store.reads import ReadResult
from .store.store import Store

LEDGER_LOOKUPS_MAX = 32
LOOKUP_TIMEOUT_S = 5.0
"""Seconds to wait for the metadata; then the request is answered with BUSY. A writer waits as long for an add
(`LedgerConfig.add_timeout_s`) before it counts the bookie as failed."""

AddLedgerLabel = Callable[[LedgerRecord], Awaitable[None]]
"""A function that stores the label of a ledger (bookie/maintenance/labels.py)."""


async def add_no_label(record: LedgerRecord) -> None:
    """Does nothing. The default of `add_label`."""


ParkedRequest = tuple[PeerRequest, BookieRequestHead, float]
"""(request, its head, time of its arrival in seconds of the monotonic clock)."""


class RequestsOfUnknownLedgers:
    """Holds requests for ledgers that this bookie does not know, and reads the records of these ledgers in the
    metadata. If a record has the key of the requests, calls `record_key_of_metadata(ledger, key)` and then `again` with
    these requests; otherwise calls `refuse` for each of them. The held requests need at most `waiting_bytes_max`
    bytes. `add_label` gets each record that was read; the requests wait for it."""

    def __init__(
        self, metadata: Callable[[], MetadataStore], record_key_of_metadata: Callable[[int, bytes], None],
        again: Callable[[list[ParkedRequest]], None],
        refuse: Callable[[PeerRequest, BookieRequestHead, Status], None], *, waiting_bytes_max: int,
        add_label: AddLedgerLabel,
    ) -> None:  # fmt: skip
        self._metadata = metadata
        self._add_label = add_label
        self._introduce = record_key_of_metadata
        self._again = again
        self._refuse = refuse
        self._parked: dict[int, list[ParkedRequest]] = {}  # by ledger
        self._next: deque[int] = deque()  # ledgers to be asked for
        self._lookups = Tasks()
        self._waiting = RequestBudget(waiting_bytes_max)
        self._closed = False
        self.lookups = 0

    def add_request(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        """Holds the request until the record of its ledger has been read. Refuses the request with BUSY if the held
        requests would need too much memory. `came`: the time of its arrival, in seconds of the monotonic clock."""
        size = request_memory_bytes(request)
        if not self._waiting.reserve(request.connection, size):
            self._refuse(request, head, Status.BUSY)
            return
        if head.ledger not in self._parked:
            self._next.append(head.ledger)
        self._parked.setdefault(head.ledger, []).append((request, head, came))
        self._look_up_waiting()

    def _look_up_waiting(self) -> None:
        while self._next and len(self._lookups) < LEDGER_LOOKUPS_MAX and not self._closed:
            task = self._lookups.spawn(self._look_up(self._next.popleft()), "bookie-newcomer")
            task.add_done_callback(self._on_looked_up)

    def _on_looked_up(self, _: asyncio.Task[None]) -> None:
        self._look_up_waiting()

    async def _look_up(self, ledger: int) -> None:
        self.lookups += 1
        key: bytes | None = None
        status = Status.OK
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                key = await self._key_of(ledger)
        except (MagnetarError, TimeoutError, OSError) as error:
            _LOG.warning("cannot ask the metadata for ledger %d: %s", ledger, error)
            status = Status.BUSY
        except ValueError as error:
            _LOG.error("ledger %d is refused, its record in the metadata is damaged: %s", ledger, error)
            status = Status.UNKNOWN
        self._settle(ledger, key, status)

    async def _key_of(self, ledger: int) -> bytes | None:
        """Returns the key in the ledger's record in the metadata. Returns b"", which no request has, if there is no
        record; None, which accepts any key, if the metadata has no counter of ledger ids either."""
        metadata = self._metadata()
        found = await get_record(metadata, paths.ledger(ledger), LedgerRecord)
        if found is not None:
            await self._add_label(found[0])
            return found[0].key
        return None if await get_record(metadata, paths.LEDGER_IDS, CounterRecord) is None else b""

    def _settle(self, ledger: int, key: bytes | None, status: Status) -> None:
        parked = self._parked.pop(ledger, [])
        fine: list[ParkedRequest] = []
        for request, head, came in parked:
            self._waiting.release(request.connection, request_memory_bytes(request))
            if self._closed:
                continue
            if status is not Status.OK:
                self._refuse(request, head, status)
            elif key is not None and not hmac.compare_digest(key, head.key):
                _LOG.warning("ledger %d: refused, the metadata has no record of it with this key", ledger)
                self._refuse(request, head, Status.UNAUTHORIZED)
            else:
                key = head.key
                fine.append((request, head, came))
        if fine and key is not None:
            self._introduce(ledger, key)
            self._again(fine)

    async def close(self) -> None:
        """Cancels the reads of ledger records and drops the held requests, which get no answer."""
        self._closed = True
        await self._lookups.close()
        self._parked.clear()

    def statistics(self) -> dict[str, int]:
        return {"newcomers_waiting_bytes": self._waiting.bytes, "newcomers_asked": self.lookups}


_LOG = logging.getLogger("magnetar.bookie.requests")

HandleAdminRequest = Callable[[bytes, Principal, bool], Awaitable[bytes]]
"""A function that gets (an admin request, its sender, whether it was sent from this machine) and returns the answer."""

ADMIN_REQUESTS_MAX = 4
"""The largest number of ADMIN requests at a time: those of an operator and of a script or two."""

WAITING_FENCES_DIVISOR, WAITING_LACS_DIVISOR = 2, 8
"""`held_bytes_max` divided by these numbers is the memory for waiting fences and for waiting LACs. Each request takes
about 1 KiB (adds.py), so 16,000 fences fit with the default, as when brokers take over the topics of another one."""
HELD_BYTES_DIVISOR = 4
"""All waiting requests together may take this multiple of `held_bytes_max`: adds of clients, adds of recoveries and
first requests of ledgers once each; fences, LACs and reads less than once together."""
WAITING_READS_DIVISOR = 8
"""`held_bytes_max` divided by this number is the memory for reads that wait: 8,000 reads with the default. One
connection may have half of them."""
READ_WAIT_S_MAX = 2.5
"""The longest time, in seconds, that a read waits before it starts. It is shorter than the time-outs of readers and
recoveries: a read for a sender that has given up would only delay the others."""
READ_BYTES_MIN = 64 << 10
"""A read counts with at least this number of bytes, however few were requested, because its entry may be long."""

class BookieService:
    """Answers the requests that clients send to a bookie. The peer server calls `serve` with the requests of one turn
    of the event loop. Owns the requests that wait for an answer; after `close` no request is answered.

    With `metadata`, a ledger that this bookie does not know may begin only if the metadata has a record of it, after
    `add_label` has stored what the record says. Calls
    `slow_down(True)` when the sockets should read slowly, `slow_down(False)` when they may read normally. Bounds:
    `entry_bytes_max` for one entry; `held_bytes_max`, of which the bounds of all waiting requests are multiples or
    parts; `reads_max` reads of the disk at a time, which ask for at most `reads_bytes_max` bytes together. `on_admin`
    answers admin requests; None: they get BAD_REQUEST."""

    def __init__(
        self, store: Store, clock: Clock, *, entry_bytes_max: int, held_bytes_max: int, reads_max: int,
        reads_bytes_max: int = 256 << 20, read_bytes_max: int = 4 << 20,
        metadata: Callable[[], MetadataStore] | None = None, on_admin: HandleAdminRequest | None = None,
        slow_down: Callable[[bool], None] = lambda pressed: None, add_label: AddLedgerLabel = add_no_label,
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._reads_max = reads_max
        self._reads_bytes_max = reads_bytes_max
        self._read_bytes_max = read_bytes_max
        self._reads_bytes = 0
        self.newcomers: RequestsOfUnknownLedgers | None = None  # None: any ledger may begin
        if metadata is not None:
            store.keys.require_keys_from_metadata()
            self.newcomers = RequestsOfUnknownLedgers(
                metadata, store.keys.record_key_of_metadata, self._handle_parked, self._refuse,
                waiting_bytes_max=held_bytes_max, add_label=add_label,
            )  # fmt: skip
        self._intents = LoopTurnAdds(self._seal)
        self.adds = AddRequestHandler(
            store, clock, self._intents, _unknown if self.newcomers is None else self.newcomers.add_request, slow_down,
            entry_bytes_max=entry_bytes_max, held_bytes_max=held_bytes_max,
        )  # fmt: skip
        self._fences = RequestBudget(held_bytes_max // WAITING_FENCES_DIVISOR)
        self._lacs = RequestBudget(held_bytes_max // WAITING_LACS_DIVISOR)
        self._reads = Tasks()
        self._waiting_reads = RequestBudget(held_bytes_max // WAITING_READS_DIVISOR)
        self._queued: deque[tuple[PeerRequest, BookieRequestHead, float]] = deque()  # reads that wait for others to end
        self._admins = Tasks()
        self._closed = False
        self.defer_answer: Callable[[Callable[[], None]], None] | None = None
        """Takes the answers of intents before the first note of the journal (bookie/registration.py)."""
        self.on_admin: HandleAdminRequest = on_admin or _no_verbs
        self.read_seconds = Histogram(DURATION_BOUNDS)  # of READs answered with OK, from arrival to answer
        self.read_failed_seconds = Histogram(DURATION_BOUNDS)
        self.requests = 0
        self.refused = dict.fromkeys(Status, 0)  # requests that are not adds

    @property
    def is_read_only(self) -> bool:
        """Whether adds of clients are refused with READ_ONLY. The owner of the service sets it."""
        return self.adds.read_only

    @is_read_only.setter
    def is_read_only(self, value: bool) -> None:
        self.adds.read_only = value

    # ------------------------------------------------------------------------------------ a turn
    def serve(self, requests: Sequence[PeerRequest]) -> None:
        """Takes all requests that arrived in one turn of the event loop. Answers each of them at once or later, exactly
        once; none after `close`. Writes their records to the journal in groups of about GROUP_SEAL_BYTES."""
        if self._closed:
            return
        self.requests += len(requests)
        came = self._clock.monotonic()
        for request in requests:
            if (add := parse_client_add_request(request.head)) is not None:
                self.adds.serve_client_add(request, *add, came)
                continue
            try:
                head = decode_request(request.head)
            except ValueError as error:
                _LOG.warning("bad peer request: %s", error)
                self._refuse(request, _NO_HEAD, Status.BAD_REQUEST)
                continue
            self._handle(request, head, came)
        self._seal()

    def _handle(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        match head.op:
            case BookieOperation.ADD | BookieOperation.ADD_MANY:
                self.adds.on_add_request(request, head, came)
            case BookieOperation.READ | BookieOperation.READ_LAC if head.flags in FLAGS_WITH_FENCE:
                self._fence(request, head, came)
            case BookieOperation.READ:
                self._read(request, head, came)
            case BookieOperation.READ_LAC:
                if self._is_opened(request, head, came):
                    self._answer_lac(request, head)
            case BookieOperation.WRITE_LAC:
                self._write_lac(request, head, came)
            case BookieOperation.HELD:
                if self._is_opened(request, head, came):
                    self._start_held(request, head)
            case BookieOperation.PING:
                _answer(request, head, Status.OK)
            case BookieOperation.ADMIN:
                self._start_admin(request, head)

    def _handle_parked(self, parked: list[ParkedRequest]) -> None:
        """Handles held requests again, because their ledger's key is known now."""
        if not self._closed:
            for request, head, came in parked:
                self._handle(request, head, came)
            self._seal()

    def _seal(self) -> None:
        """Seals all items that this turn of the event loop has collected for the journal, if there are any."""
        if self._intents.turn:
            self._store.seal_group(partial(self._sealed, self._intents.take_all()))

    def _sealed(self, turn: list[PendingJournalItem], ok: bool) -> None:
        """Called when the journal is done with a group. `ok`: all items of the group are durable; False: the disk had
        no room for them."""
        if self._closed:
            return
        if self.defer_answer is not None:
            self.defer_answer(partial(self._answer_turn, turn, ok))
        else:
            self._answer_turn(turn, ok)

    def _answer_turn(self, turn: list[PendingJournalItem], ok: bool) -> None:
        if self._closed:
            return
        self.adds.answer_journaled_adds(turn, ok)
        self.on_store_has_room()

    def on_store_has_room(self) -> None:
        """Called when the store may have room again: passes held add requests to the store, in the order of their
        arrival."""
        if not self._closed:
            self.adds.admit_held_adds()
            self._seal()

    # ------------------------------------------------------------------------------------ fences and explicit LACs
    def _fence(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        if head.ledger < 0 or (head.op is BookieOperation.READ and _is_no_read(head)):
            self._refuse(request, head, Status.BAD_REQUEST)
        elif self._store.is_fenced(head.ledger, head.key):  # each read of a recovery fences, and one waits
            self._answer_fenced(request, head, came)
        elif not self._fences.reserve(request.connection, size := request_memory_bytes(request)):
            self._refuse(request, head, Status.BUSY)
        elif (status := self._store.fence(head.ledger, head.key)) is Status.OK:
            if self._store.is_fence_durable(head.ledger):
                self._fenced(request, head, came, size, ok=True)
            else:
                self._intents.turn.append(partial(self._fenced, request, head, came, size))
        else:
            self._fences.release(request.connection, size)
            self._park_or_refuse(request, head, came, status)

    def _fenced(self, request: PeerRequest, head: BookieRequestHead, came: float, size: int, ok: bool) -> None:
        """Answers a request with the flag FENCE when the journal is done with its record. Answers UNKNOWN if the fence
        is not durable."""
        self._fences.release(request.connection, size)
        if not (ok and self._store.is_fence_durable(head.ledger)):
            self._refuse(request, head, Status.UNKNOWN)
        else:
            self._answer_fenced(request, head, came)

    def _answer_fenced(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        if head.op is BookieOperation.READ:
            self._read_opened(request, head, came)
        else:
            self._answer_lac(request, head)

    def _write_lac(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        size = request_memory_bytes(request)
        if head.ledger < 0 or head.entry < -1:
            self._refuse(request, head, Status.BAD_REQUEST)
        elif self._store.is_journal_full or not self._lacs.reserve(request.connection, size):
            self._refuse(request, head, Status.BUSY)
        elif (status := self._store.write_lac(head.ledger, head.key, head.entry)) is Status.OK:
            self._intents.turn.append(partial(self._lac_written, request, head, size))
        else:
            self._lacs.release(request.connection, size)
            self._park_or_refuse(request, head, came, status)

    def _lac_written(self, request: PeerRequest, head: BookieRequestHead, size: int, ok: bool) -> None:
        self._lacs.release(request.connection, size)
        _answer(request, head, Status.OK if ok else Status.UNKNOWN)

    def _is_opened(self, request: PeerRequest, head: BookieRequestHead, came: float) -> bool:
        """Returns whether the request has the ledger's key. If not, answers the request with an error, or holds it
        until the ledger's record in the metadata is read."""
        status = self._store.keys.judge_read_key(head.ledger, head.key)
        if status is not Status.OK:
            self._park_or_refuse(request, head, came, status)
        return status is Status.OK

    def _park_or_refuse(self, request: PeerRequest, head: BookieRequestHead, came: float, status: Status) -> None:
        """Holds the request if its ledger is unknown here (NO_SUCH_LEDGER) and the metadata can be asked; otherwise
        answers it with `status`."""
        if status is Status.NO_SUCH_LEDGER and self.newcomers is not None:
            self.newcomers.add_request(request, head, came)
        else:
            self._refuse(request, head, status)

    def _refuse(self, request: PeerRequest, head: BookieRequestHead, status: Status) -> None:
        self.refused[status] += 1
        _answer(request, head, status)

    # ------------------------------------------------------------------------------------ reads
    def _answer_lac(self, request: PeerRequest, head: BookieRequestHead) -> None:
        if head.ledger < 0:
            self._refuse(request, head, Status.BAD_REQUEST)
            return
        status, lac, last = self._store.read_lac(head.ledger)
        request.reply(BookieAnswerHead(head.op, status, head.ledger, last, lac, 0).encode())

    def _read(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        if _is_no_read(head):
            self._refuse(request, head, Status.BAD_REQUEST)
        elif self._is_opened(request, head, came):
            self._read_opened(request, head, came)

    def _read_opened(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        result = self._store.read_from_memory(head.ledger, head.entry, head.count, head.bytes_max)
        if result is not None:
            self._answer_read(request, head, result, came)
        elif self._queued or not self._has_room(head):
            self._wait_for_room(request, head, came)
        else:
            self._start_read(request, head, came)

    def _has_room(self, head: BookieRequestHead) -> bool:
        """Returns whether the bounds allow to start this read of the disk now."""
        size = self._read_size(head)
        return len(self._reads) < self._reads_max and (
            not self._reads_bytes or self._reads_bytes + size <= self._reads_bytes_max
        )

    def _read_size(self, head: BookieRequestHead) -> int:
        return 0 if head.op is BookieOperation.HELD else max(READ_BYTES_MIN, min(head.bytes_max, self._read_bytes_max))

    def _wait_for_room(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        """Queues a read until the bounds allow to start it; queued reads start in the order of arrival. Answers BUSY if
        the queue has no room for it."""
        if self._waiting_reads.reserve(request.connection, request_memory_bytes(request)):
            self._queued.append((request, head, came))
        else:
            self._refuse(request, head, Status.BUSY)

    def _read_ended(self, _: object) -> None:
        """Called when a read has ended: starts reads from the queue. Answers BUSY to a read that has waited longer than
        READ_WAIT_S_MAX, because its sender gives up soon."""
        while self._queued and not self._closed:
            request, head, came = self._queued[0]
            late = self._clock.monotonic() - came > READ_WAIT_S_MAX
            if not late and not self._has_room(head):
                return
            self._queued.popleft()
            self._waiting_reads.release(request.connection, request_memory_bytes(request))
            if late:
                self._refuse(request, head, Status.BUSY)
            else:
                self._start_read(request, head, came)

    def _start_read(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        if head.op is BookieOperation.HELD:
            task = self._reads.spawn(self._find_held(request, head), "bookie-held")
        else:
            self._reads_bytes += self._read_size(head)
            task = self._reads.spawn(self._read_disk(request, head, came), "bookie-read")
        task.add_done_callback(self._read_ended)

    def _start_held(self, request: PeerRequest, head: BookieRequestHead) -> None:
        """Handles a HELD request: starts the search for the stored entries, or queues it."""
        if _is_no_read(head) or head.count > ENTRIES_PER_ANSWER_MAX:
            self._refuse(request, head, Status.BAD_REQUEST)
        elif self._queued or not self._has_room(head):
            self._wait_for_room(request, head, self._clock.monotonic())
        else:
            self._start_read(request, head, self._clock.monotonic())

    async def _find_held(self, request: PeerRequest, head: BookieRequestHead) -> None:
        held = await self._store.find_stored_entries(head.ledger, head.entry, head.entry + head.count - 1)
        if not self._closed:
            answer = BookieAnswerHead(head.op, Status.OK, head.ledger, head.entry, -1, len(held))
            request.reply(answer.encode(), (encode_stored_runs(held),))

    async def _read_disk(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        try:
            result = await self._store.read_entries(head.ledger, head.entry, head.count, head.bytes_max)
        finally:
            self._reads_bytes -= self._read_size(head)
        if not self._closed:
            self._answer_read(request, head, result, came)

    def _answer_read(self, request: PeerRequest, head: BookieRequestHead, result: ReadResult, came: float) -> None:
        seconds = self.read_seconds if result.status is Status.OK else self.read_failed_seconds
        seconds.observe_value(self._clock.monotonic() - came)
        _answer(request, head, result.status, result.lac, result.entries)

    # ------------------------------------------------------------------------------------ administration
    def _start_admin(self, request: PeerRequest, head: BookieRequestHead) -> None:
        sender = request.principal
        if sender is None:
            self._refuse(request, head, Status.UNAUTHORIZED)
        elif len(request.frames) != 1 or len(request.frames[0]) > ADMIN_BYTES_MAX:
            self._refuse(request, head, Status.BAD_REQUEST)
        elif len(self._admins) >= ADMIN_REQUESTS_MAX:
            self._refuse(request, head, Status.BUSY)
        else:
            self._admins.spawn(self._do_admin(request, head, sender), "bookie-admin")

    async def _do_admin(self, request: PeerRequest, head: BookieRequestHead, sender: Principal) -> None:
        """Answers an admin request. A ValueError is answered with BAD_REQUEST, any other error with UNKNOWN, so that a
        bug of a verb does not end the service."""
        try:
            answer = await self.on_admin(bytes(request.frames[0]), sender, request.is_local)
        except ValueError as error:
            _LOG.warning("bad admin request: %s", error)
            self._refuse(request, head, Status.BAD_REQUEST)
        except Exception:
            _LOG.exception("an admin request failed")
            self._refuse(request, head, Status.UNKNOWN)
        else:
            _answer(request, head, Status.OK, entries=(answer,))

    async def close(self) -> None:
        """Closes the service: no request is answered any more. Cancels admin requests, and waits until the reads that
        were started have ended."""
        self._closed = True
        self.adds.close()
        await self._admins.close()
        if self.newcomers is not None:
            await self.newcomers.close()
        await self._reads.drain()

    def histograms(self) -> dict[str, Histogram]:
        return {
            "add_seconds": self.adds.seconds,
            "add_failed_seconds": self.adds.failed_seconds,
            "add_entry_bytes": self.adds.entry_bytes,
            "read_seconds": self.read_seconds,
            "read_failed_seconds": self.read_failed_seconds,
        }

    def statistics(self) -> dict[str, int]:
        held, held_bytes = self.adds.held_adds_and_bytes
        return {
            "requests": self.requests,
            **{name: self.refused[status] + self.adds.refused[status] for status, name in _COUNTED.items()},
            "held_adds": held,
            "held_bytes": held_bytes,
            "slowed_down": self.adds.pressures,
            "disk_reads": len(self._reads),
            "disk_reads_bytes": self._reads_bytes,
            "admin_requests": len(self._admins),
            "fences_waiting_bytes": self._fences.bytes,
            "lacs_waiting_bytes": self._lacs.bytes,
            "reads_waiting_bytes": self._waiting_reads.bytes,
            **({} if self.newcomers is None else self.newcomers.statistics()),
        }


def _is_no_read(head: BookieRequestHead) -> bool:
    """Returns whether the entry, the ledger or the count of a READ is out of range."""
    return head.count < 1 or head.entry < 0 or head.ledger < 0


def _unknown(request: PeerRequest, head: BookieRequestHead, came: float) -> None:
    raise AssertionError(f"ledger {head.ledger} is not known, and this service asks no metadata")


async def _no_verbs(request: bytes, sender: Principal, local: bool) -> bytes:
    """Handles admin requests in a service that has no admin verbs: raises ValueError."""
    raise ValueError("this bookie takes no admin requests")


_NO_HEAD = BookieRequestHead(BookieOperation.PING, BookieRequestFlags.NONE, -1, -1, 0, 0, NO_LEDGER_KEY)
_COUNTED = {
    Status.BAD_REQUEST: "bad_requests",
    Status.FENCED: "fenced",
    Status.UNAUTHORIZED: "unauthorized",
    Status.BUSY: "busy",
    Status.READ_ONLY: "refused_read_only",
}


def _answer(
    request: PeerRequest, head: BookieRequestHead, status: Status, lac: int = -1, entries: Sequence[Buffer] = ()
) -> None:
    request.reply(BookieAnswerHead(head.op, status, head.ledger, head.entry, lac, len(entries)).encode(), entries)
