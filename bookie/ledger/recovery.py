"""The driver of one recovery (core/recovery.py states the guarantee): mark IN_RECOVERY, then carry out the core's
effects.

Order: the record becomes IN_RECOVERY and is read, *then* the last fragment is fenced, read, written back, and the
record closed. Stopping anywhere leaves the ledger IN_RECOVERY: its writer is dead, readers have what was confirmed,
anybody may finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from ...metadata.records import CLOSED, LedgerRecord
from ...metadata.store import MetadataStore
from ...proto.errors import LedgerNotFound, MagnetarError, NotEnoughBookies, OutcomeUnknown, Unavailable
from ...runtime.files import Buffer
from ...runtime.network import Reply
from ..format.peer import AnswerHead, Flags, Op, RequestHead, Status, decode_answer, encode_add
from .bookies import Bookies
from .config import LedgerConfig
from .core import metadata as transitions
from .core.pending import AddAcked, AddFailed, SendAdd
from .core.recovery import (
    Abort,
    CloseRecovered,
    CloseRefused,
    Effect,
    EntryFound,
    EntryMissing,
    Fact,
    Fenced,
    FenceFailed,
    Finish,
    GiveUp,
    ReadFailed,
    RecordClosed,
    Recovery,
    SendFence,
    SendRead,
)
from .core.stored import StoredEntry, seal, unseal
from .records import apply

_CERTAIN = (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)
_ENTRY_BYTES_MAX = (1 << 32) - 1


async def recover(
    ledger_id: int, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig
) -> LedgerRecord:
    """The CLOSED record of the ledger, whoever closed it.

    LedgerNotFound; Unavailable or NotEnoughBookies when too few bookies answered: nothing was decided, try again.
    """
    outcome = await apply(
        metadata, ledger_id, transitions.start_recovery, timeout_s=config.close_timeout_s
    )
    if isinstance(outcome, transitions.Refused):
        raise LedgerNotFound(f"ledger {ledger_id} does not exist", ledger=ledger_id)
    if outcome.record.state == CLOSED:
        return outcome.record
    return await _Attempt(outcome.record, bookies, metadata, config).run()


class _Attempt:
    """One core and its outstanding requests; ends with the record or an error."""

    def __init__(
        self, record: LedgerRecord, bookies: Bookies, metadata: MetadataStore, config: LedgerConfig
    ) -> None:
        self._record = record
        self._bookies = bookies
        self._metadata = metadata
        self._config = config
        self._core = Recovery(record, self._choose, batch=config.recovery_batch)
        self._result: asyncio.Future[LedgerRecord] = asyncio.get_running_loop().create_future()
        self._closing: asyncio.Task[None] | None = None

    async def run(self) -> LedgerRecord:
        try:
            self._run(self._core.start())
            return await self._result
        finally:
            if self._closing is not None and not self._closing.done():
                self._closing.cancel()

    def _choose(self, exclude: Sequence[str]) -> str | None:
        try:
            return self._bookies.choose(1, exclude)[0]
        except NotEnoughBookies:
            return None

    def _receive(self, fact: Fact) -> None:
        if not self._result.done():
            self._run(self._core.receive(fact))

    def _run(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendFence):
                self._fence(effect)
            elif isinstance(effect, SendRead):
                self._read(effect)
            elif isinstance(effect, SendAdd):
                self._write_back(effect)
            elif isinstance(effect, CloseRecovered):
                self._closing = asyncio.get_running_loop().create_task(self._close(effect))
            elif isinstance(effect, Finish):
                self._result.set_result(effect.record)
            else:
                self._result.set_exception(_error(effect, self._record.ledger_id))

    # ------------------------------------------------------------------------------ requests
    def _request(self, bookie: str, op: Op, entry: int) -> asyncio.Future[Reply]:
        head = RequestHead(op, Flags.FENCE, self._record.ledger_id, entry, 1, _ENTRY_BYTES_MAX, self._record.key)
        return self._bookies.request(bookie, head.encode(), timeout_s=self._config.fence_timeout_s)

    def _fence(self, effect: SendFence) -> None:
        answer = self._request(effect.bookie, Op.READ_LAC, -1)
        answer.add_done_callback(partial(self._fence_answered, effect))

    def _fence_answered(self, asked: SendFence, answer: asyncio.Future[Reply]) -> None:
        head, _ = _result(answer)
        if head is not None and head.status is Status.OK:
            self._receive(Fenced(asked.slot, head.lac))
        elif head is not None and head.status in _CERTAIN:
            self._receive(Fenced(asked.slot, -1))
        else:
            self._receive(FenceFailed(asked.slot))

    def _read(self, effect: SendRead) -> None:
        answer = self._request(effect.bookie, Op.READ, effect.entry)
        answer.add_done_callback(partial(self._read_answered, effect))

    def _read_answered(self, asked: SendRead, answer: asyncio.Future[Reply]) -> None:
        """Only OK with undamaged bytes is a yes, only a definite miss is a no (M05, M06)."""
        head, frames = _result(answer)
        fact: Fact = ReadFailed(asked.entry, asked.slot)
        if head is not None and head.status is Status.OK and frames:
            stored = unseal(frames[0], self._record.ledger_id, asked.entry)
            if stored is not None:
                fact = EntryFound(asked.entry, asked.slot, stored)
        elif head is not None and head.status in _CERTAIN:
            fact = EntryMissing(asked.entry, asked.slot)
        self._receive(fact)

    def _write_back(self, effect: SendAdd[StoredEntry]) -> None:
        stored = effect.add.payload
        ledger = self._record.ledger_id
        frames = (seal(ledger, stored.entry, effect.lac, stored.length, (stored.payload,)), stored.payload)
        head = encode_add(ledger, stored.entry, self._record.key, Flags.RECOVERY)
        answer = self._bookies.request(effect.bookie, head, frames, timeout_s=self._config.add_timeout_s)
        answer.add_done_callback(partial(self._write_answered, stored.entry, effect.slot, effect.bookie))

    def _write_answered(self, entry: int, slot: int, bookie: str, answer: asyncio.Future[Reply]) -> None:
        head, _ = _result(answer)
        if head is not None and head.status is Status.OK:
            self._receive(AddAcked(entry, slot, bookie))
            return
        self._bookies.failed(bookie)
        self._receive(AddFailed(entry, slot, bookie))

    async def _close(self, effect: CloseRecovered) -> None:
        try:
            outcome = await apply(
                self._metadata, self._record.ledger_id,
                partial(
                    transitions.close_recovered, snapshot=self._record.fragments, fragments=effect.fragments,
                    last_entry=effect.last_entry, length=effect.length,
                ),
                timeout_s=self._config.close_timeout_s,
            )  # fmt: skip
        except MagnetarError as error:
            if not self._result.done():
                unknown = OutcomeUnknown(
                    f"ledger {self._record.ledger_id}: no word from the metadata whether its end was stored; try again",
                    ledger=self._record.ledger_id,
                )
                unknown.__cause__ = error
                self._result.set_exception(unknown)
            return
        if isinstance(outcome, transitions.Refused):
            self._receive(CloseRefused())
        else:
            self._receive(RecordClosed(outcome.record))


def _result(answer: asyncio.Future[Reply]) -> tuple[AnswerHead | None, Sequence[Buffer]]:
    """The parsed answer; None for whatever is not one."""
    if answer.cancelled() or answer.exception() is not None:
        return None, ()
    reply = answer.result()
    try:
        return decode_answer(reply.head), reply.frames
    except ValueError:
        return None, ()


def _error(effect: GiveUp, ledger_id: int) -> MagnetarError:
    where = f"ledger {ledger_id}" + (f", entry {effect.entry}" if effect.entry >= 0 else "")
    cls = NotEnoughBookies if effect.why is Abort.NOT_STORED else Unavailable
    return cls(f"{where}: {effect.why.value}; it stays in recovery", ledger=ledger_id, entry=effect.entry,
               reason=effect.why.name)  # fmt: skip
