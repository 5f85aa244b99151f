"""The driver of a reader: as reader.py. Reads a ledger from its first entry on, while it is written, to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from magnetar.ledger import reader_core as rd
from magnetar.ledger.peer_format import Status
from magnetar.ledger.reader_core import StoredCopy, encode_header
from magnetar.metadata.records import CLOSED, LedgerRecord

from .network import Client

if TYPE_CHECKING:
    from .run import Simulation

READ_TIMEOUT_S = 0.25
SPECULATIVE_S = 0.02
RANGE_MAX = 8
CERTAIN = (Status.NO_SUCH_ENTRY, Status.NO_SUCH_LEDGER)
TRIES = 3


class Reader:
    """Reads a ledger from its beginning to what it may: while it is written, and in the end to its end."""

    def __init__(self, simulation: Simulation, client: Client, ledger: int, record: LedgerRecord, done: Any) -> None:
        self.simulation = simulation
        self.client = client
        self.ledger = ledger
        self.record = record
        self.bound = rd.ReadableEntryBound(record)
        self.next = 0
        self.done = done
        self._tries = 0
        self._after = simulation.healed  # it began when all was healed: what it cannot read is lost
        self._read: rd.EntryRangeRead | None = None  # that is under way
        self._go_on()

    def _go_on(self) -> None:
        if self.bound.closed:
            self.simulation.judge.end_believed(self.ledger, self.bound.last_entry)
        if self.next <= self.bound.last_entry:
            self._read = read = rd.EntryRangeRead(self.record, self.next, self.bound.last_entry, 1 << 20)
            self._step(read, read.start())
        elif self.bound.closed:
            self.done(True)
        else:
            self._refresh()

    def _learn(self, read: rd.EntryRangeRead, fact: rd.ReadFact) -> None:
        """Answers that come when the read is over have no use."""
        if read is self._read:
            self._step(read, read.receive(fact))
            read.check()

    def _step(self, read: rd.EntryRangeRead, effect: rd.ReadEffect | None) -> None:
        if effect is None:
            return
        if isinstance(effect, rd.SendReadToBookie):
            self._ask(read, effect)
            return
        self._read = None
        if isinstance(effect, rd.FinishRead):
            self._tries = 0
            for stored in effect.entries:
                self.simulation.judge.was_read(self.ledger, stored)
            self.next += len(effect.entries)
            self._go_on()
        else:
            self._tries += 1
            if self._tries > TRIES:
                if self._after:
                    self.simulation.judge.unreadable(self.ledger, self.next, effect.why.name)
                self.done(False)
            else:
                self._refresh()

    def _ask(self, read: rd.EntryRangeRead, ask: rd.SendReadToBookie) -> None:
        name, count = ask.bookie, min(ask.count, RANGE_MAX)

        def answered(found: tuple[Status, int, list[StoredCopy | None]]) -> None:
            status, lac, entries = found
            if status is Status.OK:
                self.bound.advance_lac(lac)
                self._learn(read, rd.EntriesRead(name, [self._frame(stored) for stored in entries]))
            elif status in CERTAIN:
                self._learn(read, rd.EntryMissing(name))
            else:
                self._learn(read, rd.ReadFailed(name))

        self.simulation.network.request(
            self.client, name, lambda bookie, reply: bookie.read(self.ledger, ask.entry, count, False, reply),
            answered, lambda: self._learn(read, rd.ReadFailed(name)), READ_TIMEOUT_S,
        )  # fmt: skip
        if read.has_bookie_to_ask:
            self.simulation.scheduler.after(SPECULATIVE_S, self.client.take, self._learn, read, rd.SpeculativeReadDue())

    def _frame(self, stored: StoredCopy | None) -> bytes:
        if stored is None:
            return b"damaged" * 8
        return encode_header(self.ledger, stored.entry, stored.lac, stored.length, (stored.payload,)) + stored.payload

    def _refresh(self) -> None:
        """The record, then what the bookies of the last fragment know; then on."""
        simulation = self.simulation
        if simulation.healed and not self.bound.closed and self._tries > 20:
            self.done(False)
            return

        def found(answer: object) -> None:
            assert isinstance(answer, tuple)
            record, self.client.seen[self.ledger] = answer
            if record is None:
                self.done(False)
            else:
                self.record = record
                self.bound.apply_record(record)
                if record.state == CLOSED:
                    self._later()
                else:
                    self._ask_lac()

        simulation.register.ask(
            self.client, lambda: simulation.register.read(self.client, self.ledger), found, self._later, writing=False
        )

    def _ask_lac(self) -> None:
        name = self.simulation.rng.choice(self.record.fragments[-1].bookies)

        def answered(found: tuple[Status, int]) -> None:
            if found[0] is Status.OK:
                self.bound.advance_lac(found[1])
            self._later()

        self.simulation.network.request(
            self.client, name, lambda bookie, reply: bookie.read_lac(self.ledger, False, reply),
            answered, self._later, READ_TIMEOUT_S,
        )  # fmt: skip

    def _later(self) -> None:
        self._tries += self.simulation.healed
        self.simulation.scheduler.after(5 * self.simulation.options.pause_s, self.client.take, self._go_on)
