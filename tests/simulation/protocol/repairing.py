"""The driver of a re-replication: copies one slot of a fragment to another bookie, then puts that one into the record.

As the workers of bookie/maintenance do (ledger protocol §1.12): every entry of the slot is read from the others of its
write set and added with RECOVERY; the data first, the record after. What cannot be read leaves the record as it is.
Which fragments are final, and whether the record may be changed, is for the real core and transition to say (M21).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from magnetar.bookie.maintenance import repair_core as copies
from magnetar.ledger import metadata_core as m
from magnetar.ledger.peer_format import Status
from magnetar.ledger.reader_core import StoredCopy
from magnetar.metadata.records import LedgerRecord

from .network import Client
from .register import Change

if TYPE_CHECKING:
    from .run import Simulation

TIMEOUT_S = 0.25


class Repairer:
    """Begins at once; ends by itself."""

    def __init__(
        self, simulation: Simulation, client: Client, record: LedgerRecord, fragment: copies.FinalFragment, slot: int
    ) -> None:
        self._simulation = simulation
        self._client = client
        self._record = record
        self._fragment = fragment
        self._slot = slot
        self._striping = m.get_striping_of_record(record)
        self._left = [
            entry
            for first, last in copies.find_runs_of_slot(self._striping, slot, fragment.first, fragment.last)
            for entry in range(first, last + 1)
        ]
        found = simulation.network.choose(1, fragment.bookies)
        if found:
            self._new = found[0]
            simulation.story(f"{client.name} copies {self._old} of ledger {record.ledger_id} to {self._new}")
            self._go_on()

    @property
    def _old(self) -> str:
        return self._fragment.bookies[self._slot]

    def _go_on(self) -> None:
        if not self._left:
            first = self._fragment.first
            decide = partial(m.decide_bookie_replacement, first_entry=first, old=self._old, new=self._new)
            Change(self._simulation, self._client, self._record.ledger_id, decide, lambda outcome: None)
            return
        entry = self._left[0]
        self._read(entry, [slot for slot in self._striping.slots_of_entry(entry) if slot != self._slot])

    def _read(self, entry: int, slots: list[int]) -> None:
        """From one after the other; with nobody left the record stays as it is."""
        if not slots:
            return
        name, rest = self._fragment.bookies[slots[0]], slots[1:]

        def answered(found: tuple[Status, int, list[StoredCopy | None]]) -> None:
            status, _, entries = found
            if status is Status.OK and entries[0] is not None:
                self._add(entries[0])
            else:
                self._read(entry, rest)

        self._simulation.network.request(
            self._client, name, lambda bookie, reply: bookie.read(self._record.ledger_id, entry, 1, False, reply),
            answered, lambda: self._read(entry, rest), TIMEOUT_S,
        )  # fmt: skip

    def _add(self, stored: StoredCopy) -> None:
        def answered(statuses: Sequence[Status]) -> None:
            if statuses[0] is Status.OK:
                self._left.pop(0)
                self._go_on()

        def serve(bookie: Any, reply: Any) -> None:
            bookie.add(self._record.ledger_id, (stored,), True, reply)

        self._simulation.network.request(self._client, self._new, serve, answered, lambda: None, TIMEOUT_S)
