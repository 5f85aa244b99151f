"""The ledgers' records, as a metadata store keeps them: one value and one version each, changed by compare-and-set.

What a client may see of it: an answer, an error that says nothing (applied or not), a late answer, and, of a read, a
version that was current a moment ago. `Change` is the loop of metadata/store.py: read, decide, compare-and-set, again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from magnetar.ledger import metadata_core as m
from magnetar.metadata.records import LedgerRecord

if TYPE_CHECKING:
    from .network import Client
    from .run import Simulation

TIMEOUT_S = 0.5
DEADLINE_S = 3.0
PAUSE_S = 0.02

Decide = Callable[[LedgerRecord | None], m.LedgerTransition | None]
Outcome = LedgerRecord | m.LedgerTransitionRefused | None
"""The record as stored; a refusal; None: unknown, the write may have happened or not."""


class Register:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.records: dict[int, LedgerRecord] = {}
        self.versions: dict[int, int] = {}
        self._before: dict[int, tuple[LedgerRecord | None, int]] = {}
        self.deleted: set[int] = set()
        self.down = False
        self.next_id = 1

    # ------------------------------------------------------------------------------ what the store does
    def write(self, ledger: int, record: LedgerRecord, version: int, by: str) -> bool:
        """Compare-and-set; version 0: must not exist, and never did."""
        current = self.versions.get(ledger, 0)
        if version != current or ledger in self.deleted:
            return False
        before = self.records.get(ledger)
        self._before[ledger] = before, current
        self.records[ledger] = record
        self.versions[ledger] = current + 1
        self._simulation.judge.stored(ledger, before, record, by)
        if before is None:
            self._simulation.created(ledger)
        return True

    def delete(self, ledger: int, version: int) -> bool:
        if self.versions.get(ledger) != version:
            return False
        self._before[ledger] = self.records.pop(ledger), version
        del self.versions[ledger]
        self.deleted.add(ledger)
        self._simulation.story(f"ledger {ledger} is deleted")
        return True

    def read(self, client: Client, ledger: int) -> tuple[LedgerRecord | None, int]:
        """Maybe of a replica that is a version behind; never older than what this client saw before."""
        before = self._before.get(ledger)
        if before is not None and before[1] >= client.seen.get(ledger, 0):
            simulation = self._simulation
            if simulation.faults.strikes("stale-read", simulation.scheduler.now, client.name):
                return before
        return self.records.get(ledger), self.versions.get(ledger, 0)

    # ------------------------------------------------------------------------------ how it is reached
    def ask(self, client: Client, act: Callable[[], object], answer: Callable[[object], None],
            fail: Callable[[], None], *, writing: bool) -> None:  # fmt: skip
        """One request; `answer` or `fail` (no word within TIMEOUT_S), on the client's time."""
        simulation = self._simulation
        scheduler, faults = simulation.scheduler, simulation.faults
        lag = simulation.around(simulation.options.latency_s)
        if faults.strikes("metadata-slow", scheduler.now, client.name):
            lag += simulation.rng.random() * 2 * TIMEOUT_S
        lost = writing and faults.strikes("cas-lost", scheduler.now, client.name)
        unheard = writing and faults.strikes("cas-reply-lost", scheduler.now, client.name)
        over = False

        def arrive() -> None:
            if self.down or lost:
                return
            result = act()
            if not unheard:
                scheduler.after(lag, come, result)

        def come(result: object) -> None:
            client.take(heard, result)

        def heard(result: object) -> None:
            nonlocal over
            if not over:
                over = True
                answer(result)

        def late() -> None:
            nonlocal over
            if not over:
                over = True
                fail()

        scheduler.after(lag, arrive)
        if lag * 2 >= TIMEOUT_S or lost or unheard or self.down or client.paused:
            scheduler.after(TIMEOUT_S, client.take, late)
        else:
            scheduler.after(TIMEOUT_S, lambda: None if over else client.take(late))


class Change:
    """One transition, tried until it is settled, refused, or the deadline is over. `done(outcome)` once."""

    def __init__(
        self, simulation: Simulation, client: Client, ledger: int, decide: Decide, done: Callable[[Outcome], None],
        deadline_s: float = DEADLINE_S,
    ) -> None:  # fmt: skip
        self._simulation = simulation
        self._client = client
        self._ledger = ledger
        self._decide = decide
        self._done = done
        self._end = simulation.scheduler.now + deadline_s
        self._attempts = 0
        self._try()

    def _try(self) -> None:
        self._attempts += 1
        self._simulation.register.ask(self._client, self._read, self._found, self._again, writing=False)

    def _read(self) -> tuple[LedgerRecord | None, int]:
        return self._simulation.register.read(self._client, self._ledger)

    def _found(self, found: object) -> None:
        assert isinstance(found, tuple)
        current, version = found
        self._client.seen[self._ledger] = version
        answer = self._decide(current)
        if isinstance(answer, m.RecordToStore):
            register, record = self._simulation.register, answer.record
            self._simulation.register.ask(
                self._client, lambda: register.write(self._ledger, record, version, self._client.name),
                partial(self._written, record, version), self._again, writing=True,
            )  # fmt: skip
        elif isinstance(answer, m.RecordAlreadyStored):
            self._done(answer.record)
        else:
            assert answer is not None
            self._done(answer)

    def _written(self, record: LedgerRecord, version: int, written: object) -> None:
        if written:
            self._client.seen[self._ledger] = version + 1
            self._done(record)
        else:
            self._again()

    def _again(self) -> None:
        scheduler = self._simulation.scheduler
        if scheduler.now + PAUSE_S >= self._end:
            self._done(None)
        else:
            scheduler.after(PAUSE_S, self._client.take, self._try)
