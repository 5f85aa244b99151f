"""The adds of a bookie: from a request, ADD or ADD_MANY, to its answer. The rules are the same for both.

Each entry is verified first (checksum, ids, size). The good entries of a request are admitted in one step with their
journal records (`Store.add_entries`), and answered after their sync with a status for each entry. Those of a request
with the flag UNSYNCED are answered when they are admitted. All else is the same: their records are in the same blocks,
in the order of their arrival, they count in the bounds until they are synced, and a fence after them is synced after
them. What they lose, an answer that a crash makes untrue, no other ledger can lose.
Guard: tests/bookie/test_unsynced_adds.py.

**Held adds.** When the store has no room (memtables or journal queue full), requests are held. They are admitted in the
order of their arrival when there is room. Recovery adds have a queue of their own and go first, so that a recovery does
not wait for adds of clients. Fences and reads are never held.

| what waits | bound | past it |
|---|---|---|
| adds of clients | `held_bytes_max` | BUSY, nothing was done |
| adds of recoverers | `held_bytes_max` | BUSY |
| adds of one connection | `CONNECTION_ADDS_SHARE` of either | BUSY |
| adds on their way to the disk | `WAITING_ADDS_MAX` requests, besides the store's bounds | held |
| the socket | half of `held_bytes_max` held: `pressure` | read slowly (runtime/peer/server.py), until a quarter |

Each request counts with the memory that Python needs for it (`request_memory_bytes`). So there is a bound for the
memory of all adds, however many clients write, and however small their adds are. It is the sum of three memtables, the
journal's queue, twice `held_bytes_max`, `WAITING_ADDS_MAX` KiB and the buffers of the sockets.

A held add waits for the disk alone, never for another request, so there is no deadlock. On a full disk adds of clients
are not held: they are answered READ_ONLY. Without a free file descriptor the next checkpoint cannot be made, and adds
are not held either: they are answered BUSY, so that their sender asks again and does not count the bookie as failed.
Guards: tests/bookie/test_back_pressure.py, tests/bookie/test_adds.py, tests/bookie/test_few_descriptors.py.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence

from ..ledger.peer_format import (
    FLAGS_WITH_FENCE,
    FLAGS_WITH_RECOVERY,
    FLAGS_WITH_UNSYNCED,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestHead,
    ReadEntryRow,
    Status,
    decode_request,
    encode_add_statuses,
    pack_add_ok_answer,
    verify_add,
    verify_adds,
)
from ..runtime.clock import Clock
from ..runtime.metrics import DURATION_BOUNDS, SIZE_BOUNDS, Histogram
from ..runtime.network import PeerRequest
from .store.store import Store

_LOG = logging.getLogger("magnetar.bookie.adds")

# ------------------------------------------------------------------------------------------------------- waiting
# Requests that wait at a bookie, counted in bytes of memory: in all, and of each connection.
#
# A request costs its frames and REQUEST_MEMORY_BYTES for the memory that Python needs until it is answered, so that a
# flood of empty requests is bounded too. One connection has at most CONNECTION_BUDGET_SHARE of the bound, so that there
# is room for others. A lone request is always taken: it may be larger than a small bound.


REQUEST_MEMORY_BYTES = 1024
"""Approximate memory, in bytes, of a waiting request besides its frames: the object, its head, its callback and its
journal record."""

CONNECTION_BUDGET_SHARE = 0.5


class RequestBudget:
    """Bounds the memory of the requests that wait for an answer: `bytes_max` for all requests together, and the share
    CONNECTION_BUDGET_SHARE of it for those of one connection. `bytes` is what is reserved now."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._by_connection: dict[Hashable, int] = {}
        self.bytes = 0

    def reserve(self, connection: Hashable, size: int) -> bool:
        """Reserves `size` bytes for a request of this `connection`. Returns True if that succeeds; returns False, and
        reserves nothing, if a bound would be exceeded. If no other request waits, always succeeds."""
        own = self._by_connection.get(connection, 0) + size
        if self.bytes and (self.bytes + size > self._bytes_max or own > CONNECTION_BUDGET_SHARE * self._bytes_max):
            return False
        self.bytes += size
        self._by_connection[connection] = own
        return True

    def release(self, connection: Hashable, size: int) -> None:
        """Gives back what `reserve` reserved for a request of this connection. Must be called once for each successful
        `reserve`, with the same arguments."""
        self.bytes -= size
        own = self._by_connection[connection] - size
        if own:
            self._by_connection[connection] = own
        else:
            del self._by_connection[connection]

    def check(self) -> None:
        assert self.bytes == sum(self._by_connection.values())
        assert self.bytes <= self._bytes_max or len(self._by_connection) == 1, "only a lone request exceeds the bound"
        assert all(self._by_connection.values())


def request_memory_bytes(request: PeerRequest) -> int:
    """Returns how many bytes of memory the request occupies, approximately, while it waits for its answer."""
    return REQUEST_MEMORY_BYTES + len(request.head) + sum(map(len, request.frames))


# ---------------------------------------------------------------------------------------------------------- adds


CONNECTION_ADDS_SHARE = 0.75
"""The largest share of a queue's memory bound that the adds of one connection may occupy, so that other connections
find room too."""
WAITING_ADDS_MAX = 32_768
"""The largest number of add requests that are admitted and not yet answered. They occupy about 32 MiB of memory."""


class VerifiedAddRequest:
    """A verified ADD or ADD_MANY request, from its arrival until it is answered. `entry` is the first entry id, as its
    head says; `recovery`: whether it has the flag RECOVERY; `unsynced`: whether it has the flag UNSYNCED.

    `came` is when it arrived, in seconds of the monotonic clock. `statuses` has OK or BAD_REQUEST for each entry of an
    ADD_MANY; None for an ADD, whose only entry is good. `entries` are the entries that passed the verification, `size`
    is the sum of their bytes, `lac` is the largest last-add-confirmed among them."""

    __slots__ = (
        "came", "entries", "entry", "key", "lac", "ledger", "recovery", "request", "size", "statuses", "unsynced",
    )  # fmt: skip

    def __init__(
        self, request: PeerRequest, came: float, ledger: int, entry: int, key: bytes, recovery: bool,
        statuses: bytearray | None, entries: list[ReadEntryRow], size: int, lac: int, *, unsynced: bool,
    ) -> None:  # fmt: skip
        self.request = request
        self.came = came
        self.ledger = ledger
        self.entry = entry  # the first, as the head says
        self.key = key
        self.recovery = recovery
        self.unsynced = unsynced
        self.statuses = statuses
        self.entries = entries
        self.size = size
        self.lac = lac


PendingJournalItem = VerifiedAddRequest | Callable[[bool], None]
"""An item that waits for the journal: a request of adds, or a function. The function is called with True when the
item's record is durable, with False if the journal had no room for it."""
GROUP_SEAL_BYTES = 1 << 20
"""When the adds that one turn of the event loop has collected reach this size in bytes, they are sealed at once. The
journal never splits a sealed group, and larger blocks take longer to sync."""


class LoopTurnAdds:
    """Collects the items that wait for the journal (mostly add requests) during one turn of the event loop, in order.
    `bytes` is the sum of the sizes of their entries. Calling `seal` writes the items to the journal as one group."""

    __slots__ = ("bytes", "seal", "turn")

    def __init__(self, seal: Callable[[], None]) -> None:
        self.turn: list[PendingJournalItem] = []
        self.bytes = 0
        self.seal = seal

    def take_all(self) -> list[PendingJournalItem]:
        """Removes and returns all collected items, in the order in which they were added."""
        turn, self.turn, self.bytes = self.turn, [], 0
        return turn


class _Queue:
    def __init__(self) -> None:
        self.batches: deque[VerifiedAddRequest] = deque()
        self.bytes = 0
        self._by_connection: dict[Hashable, int] = {}

    def has_room_for(self, batch: VerifiedAddRequest, bytes_max: int) -> bool:
        """Returns whether the batch fits into the queue's bound `bytes_max` and its connection's share of it. An empty
        queue has room for any batch."""
        size = batch.size + REQUEST_MEMORY_BYTES
        own = self._by_connection.get(batch.request.connection, 0)
        if not self.batches:
            return True
        return self.bytes + size <= bytes_max and (not own or own + size <= CONNECTION_ADDS_SHARE * bytes_max)

    def push(self, batch: VerifiedAddRequest) -> None:
        self.batches.append(batch)
        self._count(batch, batch.size + REQUEST_MEMORY_BYTES)

    def pop(self) -> VerifiedAddRequest:
        batch = self.batches.popleft()
        self._count(batch, -batch.size - REQUEST_MEMORY_BYTES)
        return batch

    def _count(self, batch: VerifiedAddRequest, size: int) -> None:
        self.bytes += size
        own = self._by_connection.get(batch.request.connection, 0) + size
        if own:
            self._by_connection[batch.request.connection] = own
        else:
            del self._by_connection[batch.request.connection]


class AddRequestHandler:
    """Passes the ADD and ADD_MANY requests of a bookie to the store and answers them. The service must call
    `on_add_request` or `serve_client_add` for each request, `answer_journaled_adds` when the journal has written
    a group, and `admit_held_adds` when the store may have room again. Calls `pressure(True)` when the sockets should
    read slowly, `pressure(False)` when they may read normally. Calls `newcomer` with a request whose ledger is unknown
    here. Bounds, in bytes: `entry_bytes_max` for one entry, `held_bytes_max` for each of the two queues of held
    requests."""

    def __init__(
        self, store: Store, clock: Clock, intents: LoopTurnAdds,
        newcomer: Callable[[PeerRequest, BookieRequestHead, float], None],
        pressure: Callable[[bool], None], *, entry_bytes_max: int, held_bytes_max: int,
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._intents = intents
        self._entry_bytes_max = entry_bytes_max
        self._held_bytes_max = held_bytes_max
        self._held = _Queue()
        self._held_recovery = _Queue()
        self._pressed = False
        self._in_flight = 0  # requests that were admitted and are not answered
        self.closed = False
        self._newcomer = newcomer
        self.read_only = False
        self.pressure = pressure
        # of a request all of whose entries were stored, from arrival to answer
        self.seconds = Histogram(DURATION_BOUNDS)
        self.failed_seconds = Histogram(DURATION_BOUNDS)
        self.entry_bytes = Histogram(SIZE_BOUNDS)  # of stored entries
        self.refused: dict[Status, int] = dict.fromkeys(Status, 0)  # entries
        self.pressures = 0

    # ------------------------------------------------------------------------------------ requests
    def on_add_request(self, request: PeerRequest, head: BookieRequestHead, came: float) -> None:
        """Verifies an ADD or ADD_MANY request. Then passes it to the store, holds it in a queue until the store has
        room, or answers it with an error. `came`: when the request arrived, in seconds of the monotonic clock."""
        try:
            batch = self._open(request, head, came)
        except ValueError:
            self._refuse_whole(request, head.op, head.ledger, head.entry, came)
            return
        if not batch.entries:
            self._answer(batch)
        elif batch.recovery:
            if self._held_recovery.batches:
                self._enqueue(batch)
            else:
                self._admit(batch)
        elif self.read_only:
            self._refuse(batch, Status.READ_ONLY)
        elif self._held.batches:
            self._enqueue(batch)
        else:
            self._admit(batch)

    def serve_client_add(
        self, request: PeerRequest, ledger: int, entry: int, key: bytes, flags: int, came: float
    ) -> None:
        """Does the same as `on_add_request`, for an ADD request without flags, or with UNSYNCED alone, and with the
        fields of its head. It is faster, because most requests are such ADDs."""
        opened = verify_add(ledger, entry, request.frames, self._entry_bytes_max)
        if opened is None:
            self._refuse_whole(request, BookieOperation.ADD, ledger, entry, came)
            return
        stored, lac = opened
        batch = VerifiedAddRequest(
            request, came, ledger, entry, key, False, None, [stored], stored[2], lac, unsynced=flags != 0
        )
        if self.read_only:
            self._refuse(batch, Status.READ_ONLY)
        elif self._held.batches:
            self._enqueue(batch)
        else:
            self._admit(batch)

    def _open(self, request: PeerRequest, head: BookieRequestHead, came: float) -> VerifiedAddRequest:
        if head.flags and head.flags in FLAGS_WITH_FENCE:
            raise ValueError("an add fences nothing")
        recovery = bool(head.flags) and head.flags in FLAGS_WITH_RECOVERY
        unsynced = bool(head.flags) and head.flags in FLAGS_WITH_UNSYNCED
        if recovery and unsynced:
            raise ValueError("what a recovery writes is synced")
        if head.op is BookieOperation.ADD_MANY:
            statuses, entries, size, lac = verify_adds(head, request.frames, self._entry_bytes_max)
            return VerifiedAddRequest(
                request, came, head.ledger, head.entry, head.key, recovery, statuses, entries, size, lac,
                unsynced=unsynced,
            )  # fmt: skip
        opened = verify_add(head.ledger, head.entry, request.frames, self._entry_bytes_max)
        if opened is None:
            raise ValueError("not a stored entry")
        stored, lac = opened
        return VerifiedAddRequest(
            request, came, head.ledger, head.entry, head.key, recovery, None, [stored], stored[2], lac,
            unsynced=unsynced,
        )  # fmt: skip

    def _admit(self, batch: VerifiedAddRequest) -> None:
        """Passes the batch to the store. If the store has no room, queues the batch; if the store does not accept it,
        answers it with the store's status."""
        if self._in_flight >= WAITING_ADDS_MAX:
            self._enqueue(batch)
            return
        status = self._store.add_entries(batch.ledger, batch.key, batch.entries, batch.size, batch.lac, batch.recovery)
        if status is Status.OK:
            self._in_flight += 1
            intents = self._intents
            intents.turn.append(batch)
            intents.bytes += batch.size
            if batch.unsynced:
                self._answer_stored(batch, self._clock.monotonic())
            if intents.bytes >= GROUP_SEAL_BYTES:
                intents.seal()
        elif status is Status.BUSY:
            self._enqueue(batch)
        elif status is Status.NO_SUCH_LEDGER:
            self._newcomer(batch.request, decode_request(batch.request.head), batch.came)
        else:
            self._refuse(batch, status)

    def answer_journaled_adds(self, intents: Sequence[PendingJournalItem], ok: bool) -> None:
        """Answers `intents`, the requests of one journal group, in the order of their arrival. `ok` True: the journal
        has made the group's records durable; False: the disk had no room for them, so the adds are refused with
        READ_ONLY."""
        now, waits, sizes, broken = self._clock.monotonic(), list[float](), list[float](), 0
        for each in intents:
            if self.closed:
                break
            if not isinstance(each, VerifiedAddRequest):
                each(ok)
                continue
            self._in_flight -= 1
            statuses = each.statuses
            if each.unsynced:  # it was answered
                broken += 0 if ok else len(each.entries)
            elif not ok:
                self._refuse(each, Status.READ_ONLY)
            elif statuses is None:
                waits.append(now - each.came)
                sizes.append(each.size)
                each.request.reply(pack_add_ok_answer(each.ledger, each.entry, -1, 0))
            elif any(statuses):
                self._answer(each)
            else:
                waits.append(now - each.came)
                sizes += [size for _, _, size in each.entries]
                each.request.reply(*encode_add_statuses(each.ledger, each.entry, statuses))
        self.seconds.observe_values(waits)
        self.entry_bytes.observe_values(sizes)
        if broken:
            _LOG.error("the disk has no room for %d entries that were answered before their sync (durability=memory): "
                       "they are in memory alone", broken)  # fmt: skip

    def _answer_stored(self, batch: VerifiedAddRequest, now: float) -> None:
        """Answers a request with the flag UNSYNCED, whose good entries are in memory."""
        statuses = batch.statuses
        if statuses is not None and any(statuses):
            self._answer(batch)
            return
        self.seconds.observe_value(now - batch.came)
        self.entry_bytes.observe_values([float(size) for _, _, size in batch.entries])
        if statuses is None:
            batch.request.reply(pack_add_ok_answer(batch.ledger, batch.entry, -1, 0))
        else:
            batch.request.reply(*encode_add_statuses(batch.ledger, batch.entry, statuses))

    # ------------------------------------------------------------------------------------ what waits
    def _enqueue(self, batch: VerifiedAddRequest) -> None:
        """Queues the batch until the store has room. Answers it with READ_ONLY or BUSY if the queue is full, or if
        waiting would not help."""
        queue = self._held_recovery if batch.recovery else self._held
        if self._store.is_flush_blocked and not batch.recovery:
            self._refuse(batch, Status.READ_ONLY)
        elif self._store.is_short_of_descriptors or not queue.has_room_for(batch, self._held_bytes_max):
            self._refuse(batch, Status.BUSY)
        else:
            queue.push(batch)
            self._press()

    def admit_held_adds(self) -> None:
        """Passes the held requests to the store, in order, as long as the store has room and has fewer than
        WAITING_ADDS_MAX of them; requests of recoveries go first. Then, if the disk is full, answers the held requests
        of clients with READ_ONLY; if no file descriptor is free, answers all held requests with BUSY."""
        if not (self._held.batches or self._held_recovery.batches or self._pressed):
            return
        for queue in (self._held_recovery, self._held):
            while queue.batches and self._store.has_room and self._in_flight < WAITING_ADDS_MAX:
                self._admit(queue.pop())
        if self._store.is_flush_blocked:
            while self._held.batches:
                self._refuse(self._held.pop(), Status.READ_ONLY)
        if self._store.is_short_of_descriptors:
            for queue in (self._held_recovery, self._held):
                while queue.batches:
                    self._refuse(queue.pop(), Status.BUSY)
        self._press()

    def _press(self) -> None:
        limit = self._held_bytes_max // (4 if self._pressed else 2)
        pressed = self._held.bytes > limit
        if pressed != self._pressed:
            self._pressed = pressed
            self.pressures += pressed
            self.pressure(pressed)

    @property
    def held_adds_and_bytes(self) -> tuple[int, int]:
        """Returns (number of held add requests, their approximate memory in bytes)."""
        queues = (self._held, self._held_recovery)
        return sum(len(queue.batches) for queue in queues), sum(queue.bytes for queue in queues)

    def close(self) -> None:
        """Drops the held add requests. After this call no add request is answered, not even a request whose entries are
        being written."""
        self.closed = True
        self._held, self._held_recovery = _Queue(), _Queue()

    # ------------------------------------------------------------------------------------ answers
    def _refuse(self, batch: VerifiedAddRequest, status: Status) -> None:
        """Answers the batch: `status` for each entry that passed the verification, BAD_REQUEST for the others."""
        statuses = batch.statuses
        if statuses is None:
            self._refuse_whole(batch.request, BookieOperation.ADD, batch.ledger, batch.entry, batch.came, status)
            return
        for index, before in enumerate(bytes(statuses)):
            if before == Status.OK:
                statuses[index] = status
        self._answer(batch)

    def _refuse_whole(
        self,
        request: PeerRequest,
        op: BookieOperation,
        ledger: int,
        entry: int,
        came: float,
        status: Status = Status.BAD_REQUEST,
    ) -> None:
        """Answers a request with one `status` for the whole request: an ADD, or a request that cannot be decoded."""
        if self.closed:
            return
        self.refused[status] += 1
        self.failed_seconds.observe_value(self._clock.monotonic() - came)
        request.reply(BookieAnswerHead(op, status, ledger, entry, -1, 0).encode())

    def _answer(self, batch: VerifiedAddRequest) -> None:
        """Answers an ADD_MANY with the status of each of its entries, and counts the refused entries."""
        statuses = batch.statuses
        if self.closed or statuses is None:
            return
        self.failed_seconds.observe_value(self._clock.monotonic() - batch.came)
        for value, count in Counter(statuses).items():
            if value:
                self.refused[Status(value)] += count
        batch.request.reply(*encode_add_statuses(batch.ledger, batch.entry, statuses))
