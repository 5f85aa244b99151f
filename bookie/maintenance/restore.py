"""How a bookie makes its copy of a ledger whole again, from the other bookies (ledger protocol §2.7, steps 3 and 4).

`LedgerCopyRestorer.restore_ledger` takes these steps:

    1  closes the ledger, by recovery if necessary: only a CLOSED ledger has an end
    2  has its key: a descriptor that was lost is made again from the ledger's record
    3  reads here each entry up to the end that the record places on this bookie, and checks its checksum and ids; what
       cannot be read is read from the other bookies of its write set and added here with RECOVERY, as recovery does
    4  syncs the adds and everything that step 3 could read: an entry for which the journal had no room can be read too
    5  ends the quarantine of what could be read, and of what the record does not place here: a start quarantines whole
       ranges of a log that is cut short, and an entry that was never placed here would never be restored

`restore_ledger` returns None when the copy is whole, else why it is not. A ledger that was deleted, or of which nothing
is placed here, is whole. Nothing is ever removed. The bookie also asks itself over the network, and answers UNKNOWN: so
no vote of its own can end a ledger early. Guarded by tests/bookie/maintenance/test_limbo.py.

**Limbo**: a bookie that lost data answers reads of what it has, answers UNKNOWN for what it lacks, and restores that
(§2.7). A start enters limbo (store/boot.py): `limbo_upto` is the largest ledger id that was ever given out, durable
before the bookie serves. Ledgers up to `limbo_upto` are fenced here for ever, because a fence may be among the lost
data. A miss of theirs is UNKNOWN and therefore no vote to end a ledger (invariants 11, 17), and so is their LAC. Later
ledgers are not concerned: the registration has `limbo` and `fenced_upto`, new ledgers get larger ids, and may be placed
here.

`LimboRestorer.run` leaves limbo. It makes passes. A pass restores every ledger up to `limbo_upto`
(`LedgerCopyRestorer`), `LEDGERS_AT_ONCE` at a time. When all are whole, the bookie leaves limbo, durably with a
checkpoint, and registers that. Otherwise the next pass begins after `limbo_pause_s`, with the ledgers that remain. Each
pass logs once what blocks it. Bookies that are away return; a ledger whose only copy was here does not. Then an
operator restores the directory, or gives the entries up: `accept_data_loss` leaves limbo and names each ledger
concerned. Guarded by tests/bookie/maintenance/test_limbo.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator

from ...ledger.bookies import subtract_ranges
from ...ledger.client import LedgerClient
from ...ledger.metadata_core import get_striping_of_record
from ...ledger.peer_format import Status
from ...ledger.reader import LedgerReader
from ...ledger.reader_core import StoredCopy, encode_header
from ...metadata import paths
from ...metadata.records import CLOSED, CounterRecord, LedgerRecord
from ...metadata.store import MetadataStore, get_record, read_ledger_ids
from ...proto.errors import DataLost, InvalidRequest, MagnetarError
from ...runtime.network import World
from ...runtime.tasks import run_together
from ..store.disk import NoSpace
from ..store.store import Store

_LOG = logging.getLogger("magnetar.bookie.maintenance")

READ_BATCH_BYTES = 1 << 20
"""The size in bytes of one read, from this bookie or from another one. A restore has two such reads in memory."""
MISSING_ENTRIES_PER_READ_MAX = 64
"""The largest number of missing entries that one read requests."""
_BUSY_PAUSE_S = 0.05


class LedgerCopyRestorer:
    """Restores this bookie's copies of ledgers from other bookies. Several calls of `restore_ledger` may run at the
    same time. `counters` are totals since this object was made. `client` reads and recovers the ledgers."""

    def __init__(self, store: Store, bookie: str, metadata: MetadataStore, client: LedgerClient) -> None:
        self._store = store
        self._bookie = bookie
        self._metadata = metadata
        self._client = client
        self.counters = {"restored_entries": 0, "restored_bytes": 0, "recovered_ledgers": 0}

    async def restore_ledger(self, ledger: int, *, recover: bool = True) -> str | None:
        """Restores this bookie's copy of a ledger: fetches the entries that are missing here from other bookies.
        Returns None if the copy is complete afterwards, otherwise a text that says why not. Raises no errors of other
        bookies or of the metadata: they become such a text.

        With `recover=False`, does nothing to a ledger that is open, because its writer may still write."""
        try:
            return await self._restore(ledger, recover)
        except MagnetarError as error:
            return str(error)
        except (ValueError, OSError) as error:  # a damaged record; a disk
            return f"ledger {ledger}: {error}"

    async def _restore(self, ledger: int, recover: bool) -> str | None:
        found = await get_record(self._metadata, paths.ledger(ledger), LedgerRecord)
        if found is None:
            return None
        self._store.keys.record_key_of_metadata(ledger, found[0].key)
        if not _placed(found[0], self._bookie):
            self._end_quarantine(found[0])
            return None
        if found[0].state == CLOSED:
            reader = await self._client.open(ledger)
        elif not recover:
            return f"ledger {ledger} is open"
        else:
            reader = await self._client.recover(ledger)
            self.counters["recovered_ledgers"] += 1
        record = reader.record
        whole: list[tuple[int, int]] = []  # first and count of runs that could be read here
        for first, last in _held(record, self._bookie):
            reason = await self._fill(reader, record, first, last, whole)
            if reason is not None:
                return reason
        status = self._store.keys.bind_key(ledger, record.key) if _placed(record, self._bookie) else Status.OK
        if status is not Status.OK:
            return f"ledger {ledger}: its key here is another one"
        if not await self._store.wait_durable(ledger):
            return f"ledger {ledger}: the disk is full"
        for run in whole:
            self._store.end_quarantine(ledger, *run)
        self._end_quarantine(record)
        return None

    def _end_quarantine(self, record: LedgerRecord) -> None:
        """Does step 5: ends the quarantine of entries that the ledger does not place on this bookie. The ledger must be
        CLOSED, or have nothing placed here, so that no vote of this bookie matters any more.

        Recovery asks only the bookies that its record names, and a recovery with an older record than this one cannot
        close the ledger, because its compare-and-set fails."""
        descriptors, ledger = self._store.descriptors, record.ledger_id
        for run in subtract_ranges(
            tuple(descriptors.quarantined_runs_of_ledger(ledger)), tuple(_held(record, self._bookie))
        ):
            descriptors.end_quarantine(ledger, *run)

    async def _fill(
        self, reader: LedgerReader, record: LedgerRecord, first: int, last: int, whole: list[tuple[int, int]]
    ) -> str | None:
        """Reads the entries `first … last` from this bookie, and fetches those that are missing from other bookies.
        Appends (first entry, count) of each run that could be read here to `whole`. Returns None, or a text that says
        why it failed."""
        ledger = record.ledger_id
        while first <= last:
            here = await self._store.read_entries(ledger, first, last - first + 1, READ_BATCH_BYTES)
            if here.status is Status.OK:
                whole.append((first, len(here.entries)))
                first += len(here.entries)
                continue
            missing = await self._missing_run(ledger, first, last)
            try:
                entries = await reader.read_stored(first, missing, READ_BATCH_BYTES)
            except DataLost as error:
                return f"{error}: lost everywhere"
            reason = await self._add(record, entries)
            if reason is not None:
                return reason
            first += len(entries)
        return None

    async def _missing_run(self, ledger: int, first: int, last: int) -> int:
        """Returns the last entry of the run of missing entries that begins with `first`."""
        end = min(last, first + MISSING_ENTRIES_PER_READ_MAX - 1)
        for entry in range(first + 1, end + 1):
            if (await self._store.read_entries(ledger, entry)).status is Status.OK:
                return entry - 1
        return end

    async def _add(self, record: LedgerRecord, entries: list[StoredCopy]) -> str | None:
        ledger = record.ledger_id
        for entry in entries:
            stored = (encode_header(ledger, entry.entry, entry.lac, entry.length, (entry.payload,)), entry.payload)
            size = sum(map(len, stored))
            status = self._store.add_entry(ledger, entry.entry, record.key, stored, size, entry.lac, True)
            while status is Status.BUSY:
                await self._store.seal_group_and_wait()  # what was added before is part of what there is no room for
                await asyncio.sleep(_BUSY_PAUSE_S)
                status = self._store.add_entry(ledger, entry.entry, record.key, stored, size, entry.lac, True)
            if status is not Status.OK:
                return f"ledger {ledger}: entry {entry.entry} is refused here: {status.name}"
            self.counters["restored_entries"] += 1
            self.counters["restored_bytes"] += size
        return None if await self._store.seal_group_and_wait() else f"ledger {ledger}: the disk is full"


def _placed(record: LedgerRecord, bookie: str) -> bool:
    """Returns whether any fragment of the ledger names the bookie."""
    return any(bookie in fragment.bookies for fragment in record.fragments)


def _held(record: LedgerRecord, bookie: str) -> Iterator[tuple[int, int]]:
    """Yields (first, last) of each run of entries that the CLOSED ledger places on the bookie, in ascending order."""
    striping = get_striping_of_record(record)
    ends = [fragment.first_entry - 1 for fragment in record.fragments[1:]] + [record.last_entry]
    for fragment, end in zip(record.fragments, ends, strict=True):
        if bookie not in fragment.bookies:
            continue
        slot = fragment.bookies.index(bookie)
        entry = fragment.first_entry
        while entry <= end:
            run = striping.count_consecutive_entries(entry, slot)
            if run:
                yield entry, min(end, entry + run - 1)
            entry += max(run, 1)


LEDGERS_AT_ONCE = 8
"""The number of ledgers that are restored at a time. Each of them has two reads in memory."""
REASONS_LOGGED_MAX = 10


async def read_largest_allocated_ledger(metadata: MetadataStore) -> int:
    """Returns the largest ledger id that was given out so far; -1 if there is none. All ids of a block that a client
    has reserved count, whether they are used or not. Raises the errors of the metadata."""
    counter = await get_record(metadata, paths.LEDGER_IDS, CounterRecord)
    listed = await read_ledger_ids(metadata)
    return max(-1 if counter is None else counter[0].next - 1, listed.max() if listed else -1)


class LimboRestorer:
    """Restores the data that a bookie has lost, and then ends its limbo (the state of a bookie that may have lost
    data). Calls `left` when limbo has ended. `blocked` has the ledgers that the last pass could not restore, each with
    the reason. Calling `metadata` returns the current metadata session. Pauses `pause_s` seconds between two passes."""

    def __init__(
        self, world: World, store: Store, bookie: str, metadata: Callable[[], MetadataStore], pause_s: float,
        left: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._world = world
        self._store = store
        self._bookie = bookie
        self._metadata = metadata
        self._pause_s = pause_s
        self._left = left
        self._entered = self.limbo_upto >= 0
        self._one_pass = asyncio.Lock()
        self.blocked: dict[int, str] = {}  # ledgers that the last pass could not restore, and why
        self.counters = {
            "limbo_passes": 0, "limbo_ledgers": 0, "limbo_ledgers_done": 0, "limbo_restored_entries": 0,
            "limbo_restored_bytes": 0, "limbo_recovered_ledgers": 0,
        }  # fmt: skip

    @property
    def limbo_upto(self) -> int:
        """Returns the largest id of the ledgers that may lack entries because the bookie is in limbo; -1 if the bookie
        is not in limbo."""
        return self._store.descriptors.limbo_upto

    async def run(self) -> None:
        """Restores lost data, pass by pass, until limbo has ended and `left` has succeeded. Returns at once if the
        bookie was not in limbo at its start. After an error, and after a pass that could not restore all, pauses for
        `pause_s` seconds and makes the next pass."""
        while self._entered:
            try:
                async with self._one_pass:
                    if self.limbo_upto >= 0 and await self._pass():
                        await self._leave()
                    if self.limbo_upto < 0:
                        await self._left()
                        return
            except (MagnetarError, ValueError, OSError, NoSpace) as error:
                _LOG.warning("limbo: this pass failed, the next one continues: %s", error)
            await asyncio.sleep(self._pause_s)

    async def accept_data_loss(self) -> dict[int, str]:
        """Ends limbo although data is missing, because an operator accepts the loss. Tries to restore the data once
        more before. Returns, for each ledger that is still incomplete, a text that says what is missing.

        Raises InvalidRequest if the bookie is not in limbo. Raises NoSpace if the end of limbo cannot be stored, and
        the errors of the metadata and of `left`."""
        async with self._one_pass:
            if self.limbo_upto < 0:
                raise InvalidRequest("the bookie is not in limbo")
            await self._pass()
            given_up = dict(self.blocked)
            for ledger, reason in given_up.items():
                _LOG.error("limbo: what ledger %d lacks here is given up: %s", ledger, reason)
            await self._leave()
            await self._left()
            return given_up

    async def _leave(self) -> None:
        await self._store.leave_limbo()
        self.blocked = {}
        _LOG.warning("limbo has ended: %s", ", ".join(f"{name} {value}" for name, value in self.counters.items()))

    async def _pass(self) -> bool:
        """Tries to restore each ledger that limbo concerns. Returns whether all of them are complete."""
        metadata = self._metadata()
        upto = self.limbo_upto
        wanted = await read_ledger_ids(metadata)
        wanted.remove_range(upto + 1, 1 << 63)
        self.counters["limbo_passes"] += 1
        self.counters["limbo_ledgers"], self.counters["limbo_ledgers_done"] = len(wanted), 0
        _LOG.info("limbo: %d ledgers up to %d are compared", len(wanted), upto)
        client = LedgerClient(self._world, metadata)
        try:
            restorer = LedgerCopyRestorer(self._store, self._bookie, metadata, client)
            self.blocked = await self._restore_all(restorer, wanted)
            for name, value in restorer.counters.items():
                self.counters[f"limbo_{name}"] += value
        finally:
            await client.close()
        self._log_blocked()
        return not self.blocked

    async def _restore_all(self, restorer: LedgerCopyRestorer, wanted: Iterable[int]) -> dict[int, str]:
        waiting = iter(wanted)
        blocked: dict[int, str] = {}

        async def work() -> None:
            for ledger in waiting:
                reason = await restorer.restore_ledger(ledger)
                if reason is not None:
                    blocked[ledger] = reason
                self.counters["limbo_ledgers_done"] += reason is None

        await run_together((work() for _ in range(LEDGERS_AT_ONCE)), "bookie-limbo")
        return dict(sorted(blocked.items()))

    def _log_blocked(self) -> None:
        if not self.blocked:
            return
        some = "; ".join(list(self.blocked.values())[:REASONS_LOGGED_MAX])
        _LOG.error(
            "limbo: %d of %d ledgers are not whole, another pass follows in %g s: %s. Start the bookies that are down; "
            "if an entry's only copy was here, restore the directory from a backup, or give up what is missing with "
            "`magnetar bookies accept-loss %s`",
            len(self.blocked), self.counters["limbo_ledgers"], self._pause_s, some, self._bookie,
        )  # fmt: skip

    def statistics(self) -> dict[str, int]:
        return {
            "limbo": int(self.limbo_upto >= 0),
            "limbo_upto": self.limbo_upto,
            "limbo_blocked_ledgers": len(self.blocked),
            **self.counters,
        }
