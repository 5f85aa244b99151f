"""Ledgers that are new to the bookie: the metadata says whether the id was given out, and with which key.

A ledger's record is in the metadata before its writer or a recoverer sends a request to a bookie. So the first request
of a ledger waits here until the record was read; the next ones find its descriptor and cost nothing.

| the record | the request |
|---|---|
| exists, with this key | is done, in the order of arrival |
| exists, with another key | UNAUTHORIZED |
| is missing | UNAUTHORIZED: the id was not given out, or the ledger was deleted |
| is missing, and the tree has no counter of ids at all | is done: no ledger was ever made through this metadata |
| cannot be read | BUSY, nothing was done: the client asks again |

So a stranger takes no id before its owner does, and creates no descriptor without an owner. A refusal is not
remembered: a request that comes before its id was given out is refused, and a later one is not.

Bounds: `waiting_bytes_max` of requests wait, half of that from one connection, past it BUSY; `LOOKUPS_MAX` records are
read at a time, one of a ledger. Guarded by tests/bookie/test_newcomers.py.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Callable

from ..ledger.peer_format import RequestHead, Status
from ..metadata import paths
from ..metadata.records import CounterRecord, LedgerRecord
from ..metadata.store import MetadataStore, get_record
from ..proto.errors import MagnetarError
from ..runtime.network import Request
from ..runtime.tasks import Tasks
from .adds import RequestBudget, request_memory_bytes

_LOG = logging.getLogger("magnetar.bookie.requests")

LOOKUPS_MAX = 32
LOOKUP_TIMEOUT_S = 5.0
"""Seconds that a request waits at most; a longer one is BUSY. As long as a writer waits for an add
(`LedgerConfig.add_timeout_s`) before it counts the bookie as failed."""

Parked = tuple[Request, RequestHead, float]
"""A request, its head, and when it arrived."""


class RequestsOfUnknownLedgers:
    """Holds requests for ledgers that are unknown to this bookie while it reads their records in the metadata. If a
    record permits a request, calls `record_key_of_metadata(ledger, key)` and then `again(parked)`; else `refuse`.
    """

    def __init__(
        self, metadata: Callable[[], MetadataStore], record_key_of_metadata: Callable[[int, bytes], None],
        again: Callable[[list[Parked]], None], refuse: Callable[[Request, RequestHead, Status], None], *,
        waiting_bytes_max: int,
    ) -> None:  # fmt: skip
        self._metadata = metadata
        self._introduce = record_key_of_metadata
        self._again = again
        self._refuse = refuse
        self._parked: dict[int, list[Parked]] = {}  # by ledger
        self._next: deque[int] = deque()  # ledgers to be asked for
        self._lookups = Tasks()
        self._waiting = RequestBudget(waiting_bytes_max)
        self._closed = False
        self.lookups = 0

    def add_request(self, request: Request, head: RequestHead, came: float) -> None:
        """Holds the request until the record of its ledger was read. Refuses the request (BUSY) if too many requests
        are held."""
        size = request_memory_bytes(request)
        if not self._waiting.reserve(request.connection, size):
            self._refuse(request, head, Status.BUSY)
            return
        if head.ledger not in self._parked:
            self._next.append(head.ledger)
        self._parked.setdefault(head.ledger, []).append((request, head, came))
        self._look_up_waiting()

    def _look_up_waiting(self) -> None:
        while self._next and len(self._lookups) < LOOKUPS_MAX and not self._closed:
            task = self._lookups.spawn(self._look_up(self._next.popleft()), "bookie-newcomer")
            task.add_done_callback(lambda _: self._look_up_waiting())

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
        """Returns the key in the ledger's record. None: any key is accepted. b"": no key is accepted."""
        metadata = self._metadata()
        found = await get_record(metadata, paths.ledger(ledger), LedgerRecord)
        if found is not None:
            return found[0].key
        return None if await get_record(metadata, paths.LEDGER_IDS, CounterRecord) is None else b""

    def _settle(self, ledger: int, key: bytes | None, status: Status) -> None:
        parked = self._parked.pop(ledger, [])
        fine: list[Parked] = []
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
        """Cancels the reads of ledger records. The held requests get no answer."""
        self._closed = True
        await self._lookups.close()
        self._parked.clear()

    def statistics(self) -> dict[str, int]:
        return {"newcomers_waiting_bytes": self._waiting.bytes, "newcomers_asked": self.lookups}
