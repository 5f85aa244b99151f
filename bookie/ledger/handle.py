"""LedgerWriter: the driver of one writer core (core/writer.py states the guarantee).

`append` never waits: at the end of the turn all that was appended in it goes to each replica at once (sender.py). The
caller never changes the frames again: when the future is done, the slowest replica may still be on its way. The
future resolves to the entry id, strictly in entry order, or fails with

| error | the entry is | then |
|---|---|---|
| LedgerClosed | certainly not stored | append it to a new ledger: no duplicate |
| LedgerFenced | unknown; another client has the ledger | stop; the owner reads its end |
| OutcomeUnknown | unknown (no answer in time, key refused, `abandon`) | close the handle; its end tells |

An append to a handle that is no longer OPEN fails at once with LedgerClosed (nothing was sent). A bookie that does
not answer within `add_timeout_s` has failed; a failed bookie ends the ledger: the handle closes itself, and its owner
goes on in a new one. Back-pressure is the owner's, by `pending_entries` and `pending_bytes`.
Guards: tests/bookie/ledger/test_ledger.py, test_with_bookies.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from ...metadata.records import LedgerRecord
from ...metadata.store import MetadataStore
from ...proto.errors import (
    InternalError,
    LedgerClosed,
    LedgerFenced,
    MagnetarError,
    MessageTooLarge,
    OutcomeUnknown,
)
from ...runtime.files import Buffer
from .bookies import Bookies
from .config import LedgerConfig
from .core.metadata import Refused, close_by_writer, striping_of
from .core.pending import PendingAdd, SendAdd
from .core.writer import (
    CloseLedger,
    Confirm,
    Effect,
    EndRefused,
    EndUnknown,
    Fact,
    Fail,
    LedgerEnded,
    Outcome,
    QuorumTimedOut,
    State,
    Writer,
)
from .records import apply
from .sender import AddSender, Append

log = logging.getLogger(__name__)

ENTRY_BYTES_MAX = (5 << 20) + (64 << 10)
"""The largest message (5 MiB) and what client and broker put in front; a bookie takes a little more."""

_WATCH_TICKS = 4
"""The watchdog looks so many times per quorum time-out, so an append waits at most a quarter longer than it says."""


class LedgerEnd(NamedTuple):
    """How a closed ledger ends: `last_entry` -1 is an empty one; `length` in payload bytes."""

    last_entry: int
    length: int


class LedgerWriter:
    """The one writer of an OPEN ledger; made by `LedgerClient.create`. Call from the event loop that made it."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig
    ) -> None:
        self._record = record
        self._bookies = bookies
        self._metadata = metadata
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._core: Writer[Append] = Writer(striping_of(record), record.fragments[-1].bookies)
        self._sender = AddSender(record, bookies, config, self._learn, self._bookie_failed)
        self._bytes = 0
        self._finished = asyncio.Event()
        self._end_task: asyncio.Task[None] | None = None
        self._end_error: MagnetarError | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._watched = (-1, 0)  # first pending entry at the last look, and how many looks it has been so

    @property
    def ledger_id(self) -> int:
        return self._record.ledger_id

    @property
    def record(self) -> LedgerRecord:
        """As created; the end is not in it."""
        return self._record

    @property
    def last_confirmed(self) -> int:
        return self._core.adds.lac

    @property
    def length(self) -> int:
        """Payload bytes of the confirmed entries."""
        return self._core.adds.length_confirmed

    @property
    def pending_entries(self) -> int:
        return len(self._core.adds)

    @property
    def pending_bytes(self) -> int:
        return self._bytes

    @property
    def writable(self) -> bool:
        """False once the ledger is ending or the handle is poisoned; every append then fails at once."""
        return self._core.state is State.OPEN

    @property
    def state(self) -> State:
        return self._core.state

    def append(self, *frames: Buffer) -> asyncio.Future[int]:
        future: asyncio.Future[int] = self._loop.create_future()
        size = sum(map(len, frames))
        if size > ENTRY_BYTES_MAX:
            future.set_exception(MessageTooLarge(f"an entry of {size} bytes", size=size, limit=ENTRY_BYTES_MAX))
        elif self._core.state is not State.OPEN:
            future.set_exception(self._closed_error())
        else:
            self._bytes += size
            self._sender.push(self._core.append(Append(frames, size, future), size))
            if self._watchdog is None:
                self._watch()
        return future

    async def close(self) -> LedgerEnd:
        """Ends the ledger after what is pending; idempotent. Waits about `add_timeout_s` + `close_timeout_s` at most.

        Raises LedgerFenced while another client recovers the ledger or when it was deleted (ask again later),
        OutcomeUnknown when the metadata did not answer. When another closed it, the end is the stored one.
        """
        self._run(self._core.close())
        await self._finished.wait()
        if self._core.end is None:
            assert self._core.why is not None, "a writer that did not end says why"
            raise _error(self._core.why, self.ledger_id) from self._end_error
        return LedgerEnd(self._core.end.last_entry, self._core.end.length)

    async def abandon(self) -> None:
        """Lets go at once: what is pending fails with OutcomeUnknown, and the ledger stays open for a recoverer."""
        if self._end_task is not None and not self._end_task.done():
            self._end_task.cancel()
            await asyncio.gather(self._end_task, return_exceptions=True)
        self._run(self._core.abandon())
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None

    async def wait_finished(self) -> None:
        """Returns when the ledger has ended or the handle is poisoned, by whatever cause: then call `close`."""
        await self._finished.wait()

    # ------------------------------------------------------------------------------ effects
    def _run(self, effects: Iterable[Effect[Append]]) -> None:
        for effect in effects:
            if isinstance(effect, Confirm):
                self._done(effect.add).set_result(effect.add.entry)
            elif isinstance(effect, Fail):
                self._done(effect.add).set_exception(_error(effect.why, self.ledger_id, effect.add.entry))
            elif isinstance(effect, SendAdd):
                self._sender.push((effect,))
            else:
                self._finished.clear()
                self._end_task = self._loop.create_task(self._end(effect))
        if self._core.state in (State.CLOSED, State.POISONED):
            self._sender.close()
            self._finished.set()

    def _done(self, add: PendingAdd[Append]) -> asyncio.Future[int]:
        self._bytes -= add.payload.size
        future = add.payload.future
        if future.done():  # its owner gave up waiting for it: nobody looks at the outcome
            future = self._loop.create_future()
            future.add_done_callback(asyncio.Future.exception)
        return future

    def _learn(self, fact: Fact) -> None:
        effects = self._core.receive(fact)
        if effects:
            self._run(effects)

    def _bookie_failed(self, bookie: str, why: object) -> None:
        self._bookies.failed(bookie)
        if self._core.state is State.OPEN:
            log.warning("ledger %d ends: bookie %s failed: %s", self.ledger_id, bookie, why)

    async def _end(self, close: CloseLedger) -> None:
        """Writes the end, or learns it; the result is the next fact."""
        fact: Fact = EndUnknown()
        try:
            outcome = await apply(
                self._metadata, self.ledger_id,
                partial(close_by_writer, last_entry=close.last_entry, length=close.length),
                timeout_s=self._config.close_timeout_s,
            )  # fmt: skip
        except MagnetarError as error:
            log.warning("ledger %d: it is unknown whether its end was stored: %s", self.ledger_id, error)
            self._end_error = error
        except Exception as error:  # a fault of ours, or a damaged record: nobody else would wake who waits for the end
            log.exception("ledger %d: its end cannot be stored", self.ledger_id)
            self._end_error = InternalError(f"ledger {self.ledger_id}: its end cannot be stored: {error!r}")
        else:
            if isinstance(outcome, Refused):
                fact = EndRefused()
            else:
                fact = LedgerEnded(outcome.record.last_entry, outcome.record.length)
        try:
            self._run(self._core.receive(fact))
        finally:
            self._finished.set()

    # ------------------------------------------------------------------------------ the watchdog
    def _watch(self) -> None:
        """One timer for all pending entries: the first of them may not stay first for longer than the time-out."""
        self._watchdog = None
        if not len(self._core.adds):
            self._watched = (-1, 0)
            return
        first, looks = self._core.adds.lac + 1, self._watched[1] + 1
        self._watched = (first, looks if first == self._watched[0] else 0)
        if self._watched[1] >= _WATCH_TICKS:
            self._run(self._core.receive(QuorumTimedOut(first)))
            return
        self._watchdog = self._loop.call_later(self._config.quorum_timeout_s / _WATCH_TICKS, self._watch)

    def _closed_error(self) -> MagnetarError:
        why = self._core.why
        reason = why.value if why is not None else "it is closed or about to be"
        return LedgerClosed(f"ledger {self.ledger_id} takes no more entries: {reason}", ledger=self.ledger_id)


def _error(why: Outcome, ledger_id: int, entry: int = -1) -> MagnetarError:
    where = f"ledger {ledger_id}" + (f", entry {entry}" if entry >= 0 else "")
    cls: type[MagnetarError] = {
        Outcome.NOT_STORED: LedgerClosed,
        Outcome.FENCED: LedgerFenced,
        Outcome.UNAUTHORIZED: OutcomeUnknown,  # the other replicas may have it
        Outcome.UNKNOWN: OutcomeUnknown,
    }[why]
    return cls(f"{where}: {why.value}", ledger=ledger_id, entry=entry)
