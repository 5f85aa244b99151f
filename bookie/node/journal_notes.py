"""Tells the metadata up to where the journal is synced: a directory that ends before that was rolled back.

A snapshot of a volume, or the asynchronous replica of a disk, is whole in itself and looks like the disk after a crash.
Only the metadata can tell that the bookie has answered more (identity.py `judge`, boot.py: such a start is limbo). So
the bookie's record has a position of the journal, which only grows:

    at each start                 the end of what was replayed (identity.py `complete`)
    before the first answer       after a start: answers wait for this note, once; a copy of before the start is told
    NOTE_S after a later answer   of what is synced by then, also of the next journal; nothing when nothing moved
    at an orderly end             of all that was answered

What it costs: no add waits for it but the first ones; one commit in NOTE_S while there are adds. What it does not see:
a copy of less than NOTE_S before a crash, of the same start, which lacks entries that were answered since.
Guarded by tests/bookie/node/test_journal_notes.py, test_identity.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...metadata.store import MetadataStore
from ...proto.errors import MagnetarError
from ..store.journal.segments import JournalPosition
from ..store.store import Store
from . import identity
from .identity import Identity

_LOG = logging.getLogger("magnetar.bookie.node")

NOTE_S = 1.0
"""Seconds. Each note is one commit of the metadata, for all of its adds."""
END_S = 2.0
"""Seconds for the note at an orderly end: the metadata may be gone before the bookie."""


class JournalNotes:
    """The notes of how far a bookie's journal is synced. `hold` takes the answers of before the first note; `on_first`
    says that there are none to hold any more."""

    def __init__(
        self, store: Store, metadata: Callable[[], MetadataStore], mine: Identity, on_first: Callable[[], None]
    ) -> None:
        self._store = store
        self._metadata = metadata
        self._identity = mine
        self._on_first = on_first
        self.noted = JournalPosition(0, 0)
        """Position up to which the metadata knows that the journal is synced, from this process."""
        self._held: list[Callable[[], None]] = []
        self._due = asyncio.Event()
        self._noting = asyncio.Lock()
        self.went_back = False
        """The metadata forgot what this process stored in it."""

    def hold(self, answer: Callable[[], None]) -> None:
        """Calls `answer` after the next note, in order. Its entries are synced."""
        self._held.append(answer)
        self._due.set()

    async def note(self) -> None:
        """Stores the position if it moved. After an error of the metadata it is as before."""
        async with self._noting:
            position = self._store.journal_position
            if position != self.noted:
                kept = await identity.note_journal(self._metadata(), self._identity, position, self.noted)
                if not kept:
                    _LOG.error("the metadata lacks what this bookie stored in it: nothing is deleted until a restart")
                self.went_back = self.went_back or not kept
                self.noted = position
        if self._held:
            self._on_first()
            held, self._held = self._held, []
            for answer in held:
                answer()

    async def keep(self) -> None:
        """Notes the position in the metadata for ever."""
        while True:
            try:
                async with asyncio.timeout(NOTE_S):
                    await self._due.wait()
            except TimeoutError:
                pass
            self._due.clear()
            try:
                await self.note()
            except MagnetarError as error:
                _LOG.warning("up to where the journal is synced is not noted: %s", error)

    async def end(self) -> None:
        """Ends the notes: nothing is answered any more."""
        try:
            async with asyncio.timeout(END_S):
                await self.note()
        except (MagnetarError, TimeoutError) as error:
            _LOG.info("up to where the journal is synced is not noted at the end: %s", error or "no answer")
