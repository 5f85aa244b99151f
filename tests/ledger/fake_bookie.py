"""A bookie in memory behind a real peer service, which also misbehaves on request.

Keeps the promises of ledger/peer_format.py (an answer means that it is kept, a fence is for ever); forgets everything
when the test ends. `silent`, `status`, `flip` make it hang, refuse, or hand out damaged bytes.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from magnetar.ledger.peer_format import (
    ENTRY_HEADER_STRUCT,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    decode_request,
    encode_add_statuses,
    verify_adds,
)
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, encode_record
from magnetar.metadata.store import MetadataStore
from magnetar.runtime.network import Endpoint, PeerRequest, RunningServer, World


@dataclass
class Shelf:
    """One ledger on one bookie."""

    entries: dict[int, bytes] = field(default_factory=dict)
    lac: int = -1
    fenced: bool = False


class FakeBookie:
    def __init__(self, number: int) -> None:
        self.id = str(uuid.UUID(int=number + 1))
        self.shelves: dict[int, Shelf] = {}
        self.requests: list[BookieRequestHead] = []
        self.silent: set[BookieOperation] = set()
        self.unanswered: list[tuple[BookieRequestHead, PeerRequest]] = []  # as they were silent
        self.status: dict[BookieOperation, Status] = {}
        self.flip: set[int] = set()  # entries that are handed out damaged
        self._came = asyncio.Event()
        self._serving: RunningServer | None = None

    async def start(self, world: World, metadata: MetadataStore, *, rack: str = "/default") -> FakeBookie:
        identity = uuid.UUID(self.id).bytes
        self._serving = await world.network.serve_peers(Endpoint("127.0.0.1", 0), identity, self._serve)
        record = BookieRecord(bookie=self.id, endpoint=str(self._serving.endpoint), rack=rack)
        await metadata.put(paths.bookie(self.id), encode_record(record, paths.bookie(self.id)))
        return self

    async def stop(self) -> None:
        if self._serving is not None:
            await self._serving.close()
            self._serving = None

    async def wait_requests(self, op: BookieOperation, count: int) -> None:
        while sum(head.op is op for head in self.requests) < count:
            self._came.clear()
            await self._came.wait()

    def _serve(self, requests: Sequence[PeerRequest]) -> None:
        """An ADD_MANY is so many ADDs, here as in `requests`, `silent` and `status`."""
        for request in requests:
            head = decode_request(bytes(request.head))
            if head.op is BookieOperation.ADD_MANY:
                self._serve_many(head, request)
                continue
            self.requests.append(head)
            self._came.set()
            if head.op in self.silent:
                self.unanswered.append((head, request))
                continue
            answer, frames = self._answer(head, request)
            request.reply(answer.encode(), frames)

    def _serve_many(self, head: BookieRequestHead, request: PeerRequest) -> None:
        opened = verify_adds(head, request.frames, 8 << 20)
        assert not any(opened.statuses), "the library sends whole entries"
        statuses = bytearray()
        for entry, stored, _ in opened.entries:
            one = head._replace(op=BookieOperation.ADD, entry=entry, count=0)
            self.requests.append(one)
            statuses.append(self.status.get(BookieOperation.ADD) or self._add(one, b"".join(stored)))
        self._came.set()
        if BookieOperation.ADD in self.silent:
            self.unanswered.append((head, request))
        else:
            request.reply(*encode_add_statuses(head.ledger, head.entry, statuses))

    def answer_late(self, ledger: int) -> None:
        """OK to all adds of the ledger that were not answered."""
        for head, request in [each for each in self.unanswered if each[0].ledger == ledger]:
            self.unanswered.remove((head, request))
            request.reply(*encode_add_statuses(head.ledger, head.entry, bytes(max(head.count, 1))))

    def _answer(self, head: BookieRequestHead, request: PeerRequest) -> tuple[BookieAnswerHead, list[bytes]]:
        def answer(status: Status, entry: int = head.entry, lac: int = -1, count: int = 0) -> BookieAnswerHead:
            return BookieAnswerHead(head.op, status, head.ledger, entry, lac, count)

        if head.op in self.status:
            return answer(self.status[head.op]), []
        if head.op is BookieOperation.ADD:
            return answer(self._add(head, b"".join(bytes(frame) for frame in request.frames))), []
        shelf = self.shelves.get(head.ledger)
        if head.flags & BookieRequestFlags.FENCE:
            shelf = self.shelves.setdefault(head.ledger, Shelf())
            shelf.fenced = True
        if shelf is None:
            return answer(Status.NO_SUCH_LEDGER), []
        if head.op is BookieOperation.WRITE_LAC:
            shelf.lac = max(shelf.lac, head.entry)
            return answer(Status.OK), []
        if head.op is BookieOperation.READ_LAC:
            return answer(Status.OK, max(shelf.entries, default=-1), shelf.lac), []
        frames = self._read(shelf, head)
        return answer(Status.OK if frames else Status.NO_SUCH_ENTRY, lac=shelf.lac, count=len(frames)), frames

    def _add(self, head: BookieRequestHead, stored: bytes) -> Status:
        shelf = self.shelves.setdefault(head.ledger, Shelf())
        if shelf.fenced and not head.flags & BookieRequestFlags.RECOVERY:
            return Status.FENCED
        shelf.entries[head.entry] = stored
        shelf.lac = max(shelf.lac, ENTRY_HEADER_STRUCT.unpack_from(stored)[2])
        return Status.OK

    def _read(self, shelf: Shelf, head: BookieRequestHead) -> list[bytes]:
        frames: list[bytes] = []
        size = 0
        for entry in range(head.entry, head.entry + head.count):
            stored = shelf.entries.get(entry)
            if stored is None or (frames and size + len(stored) > head.bytes_max):
                break
            size += len(stored)
            frames.append(stored[:-1] + bytes([stored[-1] ^ 1]) if entry in self.flip else stored)
        return frames
