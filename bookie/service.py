"""The peer service of a bookie: translates requests (format/peer.py) into the store's intents, and answers.

All requests of one turn of the event loop become one `Store.seal`: no task per add; the journal's completion
answers them together. What is answered when (BookKeeper protocol §1.5, §1.7, §1.9):

    ADD                after the sync of its record; refused at once when the entry is damaged, fenced or unauthorized
    READ, READ_LAC     at once from memory, else after one file read
    … with FENCE       every answer, also NO_SUCH_*, after the sync of the fence
    WRITE_LAC          after the sync
    ADMIN              by `on_admin` in a task of its own; at most ADMIN_MAX at a time, further ones are BUSY

Adds that find the memtable or the journal's queue full are held (at most `held_bytes_max`), and admitted in order when
there is room; past that they are BUSY. A read-only bookie takes recovery adds and fences as long as there is room.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from ..runtime.files import Buffer
from ..runtime.network import Request
from .format.framing import crc32c
from .format.peer import (
    ADMIN_BYTES_MAX,
    ENTRY_HEADER,
    NO_KEY,
    AnswerHead,
    Flags,
    Op,
    RequestHead,
    Status,
    decode_request,
)
from .store.store import Store

log = logging.getLogger(__name__)

ADMIN_MAX = 4
"""ADMIN requests at a time: an operator and a script or two."""

_CHECKED = ENTRY_HEADER.size - 4
Entry = tuple[bytes, ...]
_Held = tuple[Request, RequestHead, Entry, int]


def split_entry(frames: Sequence[Buffer]) -> Entry:
    """The stored entry as its 36-byte header and what follows, copied once: three checksums need bytes of their own.

    Fewer than 36 bytes come back as one short buffer.
    """
    if not frames:
        return (b"",)
    first = frames[0] if len(frames[0]) >= ENTRY_HEADER.size else b"".join(frames)
    rest = frames[1:] if first is frames[0] else ()
    parts = [bytes(first[: ENTRY_HEADER.size]), bytes(first[ENTRY_HEADER.size :]), *map(bytes, rest)]
    return (parts[0], *[part for part in parts[1:] if part])


def verify_entry(head: RequestHead, stored: Entry) -> int | None:
    """The entry's LAC; None when its checksum, ids or size are wrong."""
    if len(stored[0]) != ENTRY_HEADER.size:
        return None
    ledger, entry, lac, _, crc = ENTRY_HEADER.unpack(stored[0])
    if ledger != head.ledger or entry != head.entry or not -1 <= lac < entry or ledger < 0:
        return None
    return int(lac) if crc32c(stored[0][:_CHECKED], *stored[1:]) == crc else None


class BookieService:
    """`serve` is the PeerService. Owns the requests that wait; `close` answers nothing more."""

    def __init__(self, store: Store, *, entry_bytes_max: int, held_bytes_max: int, reads_max: int) -> None:
        self._store = store
        self._entry_bytes_max = entry_bytes_max
        self._held_bytes_max = held_bytes_max
        self._reads_max = reads_max
        self._turn: list[tuple[Request, RequestHead]] = []
        self._held: deque[_Held] = deque()
        self._held_bytes = 0
        self._reads: dict[asyncio.Task[None], None] = {}
        self._admins: dict[asyncio.Task[None], None] = {}
        self._closed = False
        self.read_only = False
        self.on_admin: Callable[[bytes], Awaitable[bytes]] = _no_verbs
        self.counters = {
            "requests": 0,
            "bad_requests": 0,
            "fenced": 0,
            "unauthorized": 0,
            "busy": 0,
            "refused_read_only": 0,
        }
        store.on_room = self._admit_held

    # ------------------------------------------------------------------------------------ a turn
    def serve(self, requests: Sequence[Request]) -> None:
        if self._closed:
            return
        self.counters["requests"] += len(requests)
        for request in requests:
            try:
                head = decode_request(request.head)
            except ValueError as error:
                log.warning("bad peer request: %s", error)
                self._refuse(request, _NO_HEAD, Status.BAD_REQUEST)
                continue
            self._take(request, head)
        self._seal()

    def _take(self, request: Request, head: RequestHead) -> None:
        match head.op:
            case Op.ADD:
                self._add(request, head)
            case Op.READ | Op.READ_LAC if head.flags & Flags.FENCE:
                self._intend(request, head, self._store.fence(head.ledger, head.key) if head.ledger >= 0 else _BAD)
            case Op.READ:
                self._read(request, head)
            case Op.READ_LAC:
                self._answer_lac(request, head)
            case Op.WRITE_LAC:
                bad = head.ledger < 0 or head.entry < -1
                self._intend(request, head, _BAD if bad else self._store.write_lac(head.ledger, head.key, head.entry))
            case Op.PING:
                _answer(request, head, Status.OK)
            case Op.ADMIN:
                self._start_admin(request, head)

    def _seal(self) -> None:
        if not self._turn:
            return
        turn, self._turn = self._turn, []
        self._store.seal(lambda ok: self._sealed(turn, ok))

    def _sealed(self, turn: list[tuple[Request, RequestHead]], ok: bool) -> None:
        """Everything of a turn is durable, or there was no room for it."""
        if self._closed:
            return
        for request, head in turn:
            if not ok:
                self._refuse(request, head, Status.READ_ONLY if head.op is Op.ADD else Status.UNKNOWN)
            elif head.op is Op.READ:
                self._read(request, head)
            elif head.op is Op.READ_LAC:
                self._answer_lac(request, head)
            else:
                _answer(request, head, Status.OK)
        if self._held:
            self._admit_held()

    # ------------------------------------------------------------------------------------ adds and fences
    def _add(self, request: Request, head: RequestHead) -> None:
        size = sum(map(len, request.frames))
        stored = split_entry(request.frames) if size <= self._entry_bytes_max else (b"",)
        lac = verify_entry(head, stored)
        if lac is None:
            self._refuse(request, head, Status.BAD_REQUEST)
        elif self.read_only and not head.flags & Flags.RECOVERY:
            self._refuse(request, head, Status.READ_ONLY)
        elif self._held:
            self._hold(request, head, stored, lac)
        else:
            self._admit(request, head, stored, lac)

    def _admit(self, request: Request, head: RequestHead, stored: Entry, lac: int) -> None:
        recovery = bool(head.flags & Flags.RECOVERY)
        size = sum(map(len, stored))
        status = self._store.add(head.ledger, head.entry, head.key, stored, size, lac, recovery)
        if status is Status.BUSY:
            self._hold(request, head, stored, lac)
        else:
            self._intend(request, head, status)

    def _hold(self, request: Request, head: RequestHead, stored: Entry, lac: int) -> None:
        size = sum(map(len, stored))
        if self._held_bytes + size > self._held_bytes_max:
            self._refuse(request, head, Status.BUSY)
            return
        self._held.append((request, head, stored, lac))
        self._held_bytes += size

    def _admit_held(self) -> None:
        """Takes held adds in their order while there is room."""
        while self._held and self._store.has_room:
            request, head, stored, lac = self._held.popleft()
            self._held_bytes -= sum(map(len, stored))
            self._admit(request, head, stored, lac)
        self._seal()

    def _intend(self, request: Request, head: RequestHead, status: Status) -> None:
        if status is Status.OK:
            self._turn.append((request, head))
        else:
            self._refuse(request, head, status)

    def _refuse(self, request: Request, head: RequestHead, status: Status) -> None:
        name = _COUNTED.get(status)
        if name is not None:
            self.counters[name] += 1
        _answer(request, head, status)

    # ------------------------------------------------------------------------------------ reads
    def _answer_lac(self, request: Request, head: RequestHead) -> None:
        status, lac, last = self._store.read_lac(head.ledger)
        request.reply(AnswerHead(head.op, status, head.ledger, last, lac, 0).encode())

    def _read(self, request: Request, head: RequestHead) -> None:
        if head.count < 1 or head.entry < 0:
            self._refuse(request, head, Status.BAD_REQUEST)
        elif len(self._reads) >= self._reads_max:
            self._refuse(request, head, Status.BUSY)
        elif not self._read_now(request, head):
            task = asyncio.create_task(self._read_disk(request, head), name="bookie-read")
            self._reads[task] = None
            task.add_done_callback(lambda done: self._reads.pop(done, None))

    def _read_now(self, request: Request, head: RequestHead) -> bool:
        result = self._store.read_now(head.ledger, head.entry, head.count, head.bytes_max)
        if result is None:
            return False
        _answer(request, head, result.status, result.lac, result.entries)
        return True

    async def _read_disk(self, request: Request, head: RequestHead) -> None:
        result = await self._store.read(head.ledger, head.entry, head.count, head.bytes_max)
        if not self._closed:
            _answer(request, head, result.status, result.lac, result.entries)

    # ------------------------------------------------------------------------------------ administration
    def _start_admin(self, request: Request, head: RequestHead) -> None:
        if len(request.frames) != 1 or len(request.frames[0]) > ADMIN_BYTES_MAX:
            self._refuse(request, head, Status.BAD_REQUEST)
        elif len(self._admins) >= ADMIN_MAX:
            self._refuse(request, head, Status.BUSY)
        else:
            task = asyncio.create_task(self._do_admin(request, head), name="bookie-admin")
            self._admins[task] = None
            task.add_done_callback(lambda done: self._admins.pop(done, None))

    async def _do_admin(self, request: Request, head: RequestHead) -> None:
        """ValueError of the verb is the caller's fault; anything else is ours, and no reason to fall."""
        try:
            answer = await self.on_admin(bytes(request.frames[0]))
        except ValueError as error:
            log.warning("bad admin request: %s", error)
            self._refuse(request, head, Status.BAD_REQUEST)
        except Exception:
            log.exception("an admin request failed")
            self._refuse(request, head, Status.UNKNOWN)
        else:
            _answer(request, head, Status.OK, entries=(answer,))

    async def close(self) -> None:
        """Nothing is answered any more; reads on their way are awaited, admin requests are not."""
        self._closed = True
        self._held.clear()
        admins = list(self._admins)
        for task in admins:
            task.cancel()
        await asyncio.gather(*admins, return_exceptions=True)
        while self._reads:
            await asyncio.wait(list(self._reads))

    def statistics(self) -> dict[str, int]:
        return {
            **self.counters,
            "held_adds": len(self._held),
            "held_bytes": self._held_bytes,
            "disk_reads": len(self._reads),
            "admin_requests": len(self._admins),
        }


async def _no_verbs(request: bytes) -> bytes:
    """Until somebody sets `on_admin`."""
    raise ValueError("this bookie takes no admin requests")


_NO_HEAD = RequestHead(Op.PING, Flags.NONE, -1, -1, 0, 0, NO_KEY)
_BAD = Status.BAD_REQUEST
_COUNTED = {
    Status.BAD_REQUEST: "bad_requests",
    Status.FENCED: "fenced",
    Status.UNAUTHORIZED: "unauthorized",
    Status.BUSY: "busy",
    Status.READ_ONLY: "refused_read_only",
}


def _answer(request: Request, head: RequestHead, status: Status, lac: int = -1, entries: Sequence[Buffer] = ()) -> None:
    request.reply(AnswerHead(head.op, status, head.ledger, head.entry, lac, len(entries)).encode(), entries)
