"""Starts a store on what a crash left, with the real code, and asks it for everything that was promised.

docs/design/invariants.md 14, 15, 18: acknowledged ⊆ present ⊆ sent, byte for byte; 16: fences hold, and only what
was fenced is fenced; 17: an acknowledged entry is never "no such entry", and a crash never ends in a refusal to start
nor in limbo, but for the limbo that was entered before: that one, its fences and quarantined entries are not
forgotten, a miss of theirs is UNKNOWN, and they end when the store said so; 19: the mark never regresses; 20: every
place of the index holds the record that it says; 22: deleted ledgers stay deleted. A start that is itself cut off
leaves what the next start makes the same store of (`Answers`).
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from magnetar.bookie.format.mark import decode_checkpoint_mark
from magnetar.bookie.store import disk as store_disk
from magnetar.bookie.store.boot import JournalPlace
from magnetar.bookie.store.checkpoint import MARK_FILE
from magnetar.bookie.store.state_log import RecordedDirectoryState
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.files import Files, join_path
from magnetar.runtime.sim.disk import DiskOperation, SimDisk, SimFiles, SimInode
from tests.bookie.entries import KEY
from tests.bookie.stores import DATA, SMALL, UUID
from tests.crashes.chapters import LOSS
from tests.crashes.facts import LATE, Expected, Kind, Ledger, stored_bytes
from tests.crashes.image import State, Step
from tests.crashes.limits import small_limits
from tests.crashes.loop import TinyLoop, tiny_world
from tests.crashes.sites import site_of

ROOMY = replace(SMALL, index_cache_bytes=256 << 10, read_cache_bytes=64 << 10, read_ahead_bytes=16 << 10)
"""As a store is started here: that its caches thrash is for other tests. Memtable and journal are small here, too."""


class Broken(AssertionError):
    """A promise was not kept."""


_errors: list[str] = []


class _Listener(logging.Handler):
    """What a start logs as an error."""

    def emit(self, record: logging.LogRecord) -> None:
        _errors.append(record.getMessage())


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Meanwhile nothing of the store is printed, and its errors count."""
    logger = logging.getLogger("magnetar")
    before = logger.handlers, logger.propagate, logger.manager.disable
    logging.disable(logging.WARNING)
    logger.handlers, logger.propagate = [_Listener(logging.ERROR)], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate, disabled = before
        logging.disable(disabled)


class LedgerAnswers(NamedTuple):
    known: bool
    takes_adds: bool
    lac: int
    last: int
    entries: tuple[int, ...]


Answers = dict[int, LedgerAnswers]


@dataclass(slots=True)
class Started:
    """What a start did and what the store then said."""

    steps: list[Step]  # empty: they were not recorded
    answers: Answers | None  # None: there was no room to start


def start(
    state: State, expected: Expected, journal: Callable[[Files], JournalPlace], *, serve: bool = False,
    room: int | None = None, recorded: bool = True, asked: bool = True,
) -> Started:  # fmt: skip
    """Raises Broken, or whatever the start raised. `room`: no more bytes than that are free on the disk.

    Not `recorded`: its steps are not kept (which takes time, and few are crashed themselves). Not `asked`: it starts,
    and is not asked for what was promised, which takes as long again.
    """
    disk = state.disk()
    before = mark_of(disk)
    if before < expected.mark:
        raise Broken(f"the mark is {before} and was {expected.mark} before the crash")
    steps: list[Step] = []

    def record(operation: DiskOperation) -> None:
        steps.append(Step(operation, site_of(operation)))

    disk.record = record if recorded else None
    if room is not None:
        disk.capacity_bytes = disk.used_bytes() + room
    disk.takes_direct = state.operations % 2 == 1
    loop = TinyLoop()
    world = tiny_world(loop, SimFiles(disk), state.operations)

    async def upto() -> int:
        return expected.limbo_upto

    async def run() -> Answers | None:
        try:
            store_disk.make_directories(world.files, DATA)
            place = journal(world.files)
            store = await Store.open(world, DATA, UUID, ROOMY, RecordedDirectoryState(upto=upto), journal=place)
        except store_disk.NoSpace:
            if room is None:
                raise
            return None
        disk.record = None
        if mark_of(disk) < before:
            raise Broken(f"the start moved the mark from {before} back to {mark_of(disk)}")
        _check_limbo(store, expected)
        store.check()
        answers = {ledger: await _ask(store, ledger, expected) for ledger in (expected.ledgers if asked else ())}
        if serve and not await store.seal_group_and_wait():
            raise Broken("the store does not serve")
        return answers

    _errors.clear()
    try:
        with small_limits():
            started = Started(steps, loop.drive(run()))
        errors = [error for error in _errors if not (expected.may_be_in_limbo and error.endswith(LOSS))]
        if errors and room is None:
            raise Broken("a crash is not damage, and the start says: " + "; ".join(errors))
        return started
    finally:
        if loop.complaints:
            raise Broken("; ".join(loop.complaints))
        loop.abandon()


def mark_of(disk: SimDisk) -> tuple[int, int]:
    path = join_path(DATA, MARK_FILE)
    node = disk.find_node(path)
    if not isinstance(node, SimInode):
        return 0, 0
    return decode_checkpoint_mark(node.now.read(1 << 10, 0), UUID, path)[0].position


def _check_limbo(store: Store, expected: Expected) -> None:
    upto, reasons = store.descriptors.limbo_upto, store.limbo_losses
    if upto >= 0 and not expected.may_be_in_limbo:
        raise Broken(f"a crash is not damage, and the store is in limbo: {reasons}")
    if upto not in (-1, expected.limbo_upto) or (upto < 0 and expected.limbo is Kind.LIMBO_ENTERED):
        raise Broken(f"limbo is up to {upto} and was up to {expected.limbo_upto}: {reasons}")
    if expected.fenced_upto not in (-1, store.descriptors.fenced_upto):
        raise Broken(f"limbo fenced up to {expected.fenced_upto}, and now up to {store.descriptors.fenced_upto}")


async def _ask(store: Store, ledger: int, expected: Expected) -> LedgerAnswers:
    known = expected.ledgers[ledger]
    lac = store.read_lac(ledger)
    entries = [] if lac.status is Status.NO_SUCH_LEDGER else await _entries(store, ledger, known)
    status = _try_add(store, ledger)
    wanted = (Status.UNKNOWN,) if in_limbo(store, ledger) else (Status.OK, Status.NO_SUCH_LEDGER)
    if lac.status not in wanted:
        raise Broken(f"ledger {ledger}: the LAC is answered {lac.status!r}")
    if known.deleted:
        if lac.status is Status.OK or status is not Status.FENCED:
            raise Broken(f"ledger {ledger} was deleted and is back")
    elif not known.deleting:
        fenced = known.fenced or ledger <= expected.fenced_upto
        fencing = known.fencing or ledger <= expected.limbo_upto
        _compare(ledger, known, entries, status, fenced=fenced, fencing=fencing)
        if lac.status is not Status.UNKNOWN:
            _compare_lac(ledger, known, lac.lac)
        await _check_quarantine(store, ledger, known)
    return LedgerAnswers(lac.status is Status.OK, status is Status.OK, lac.lac, lac.last, tuple(entries))


def in_limbo(store: Store, ledger: int) -> bool:
    return ledger <= store.descriptors.limbo_upto and ledger not in store.descriptors.tombstones


def _compare(
    ledger: int, known: Ledger, entries: list[int], status: Status, *, fenced: bool, fencing: bool
) -> None:
    """The promises about a ledger that nobody deleted."""
    missing = [entry for entry in known.acked if entry not in entries]
    if missing:
        raise Broken(f"ledger {ledger}: acknowledged entries {missing} are gone")
    if fenced and status is not Status.FENCED:
        raise Broken(f"ledger {ledger} was fenced and takes adds again ({status!r})")
    if not fencing and status is not Status.OK:
        raise Broken(f"ledger {ledger} was never fenced and answers {status!r}")


def _compare_lac(ledger: int, known: Ledger, lac: int) -> None:
    if lac < known.lac_acked:
        raise Broken(f"ledger {ledger}: the LAC is {lac} and {known.lac_acked} was acknowledged")
    if lac > known.lac_sent:
        raise Broken(f"ledger {ledger}: the LAC is {lac} and nobody ever said so")


async def _check_quarantine(store: Store, ledger: int, known: Ledger) -> None:
    """A hit is served, whatever is said of its entry; a miss is unknown as long as it is quarantined."""
    for entry, kind in known.quarantine.items():
        kept = store.descriptors.is_quarantined(ledger, entry)
        if kept != (kind is Kind.QUARANTINED) and kind in (Kind.QUARANTINED, Kind.MENDED):
            raise Broken(f"entry {entry} of ledger {ledger} was {kind.value}, and quarantined is {kept}")
        status = (await store.read_entries(ledger, entry)).status
        if kept and status not in (Status.UNKNOWN, Status.OK):
            raise Broken(f"entry {entry} of ledger {ledger} is quarantined and answered {status!r}")


async def _entries(store: Store, ledger: int, known: Ledger) -> list[int]:
    """The entries that are there, each compared with what was sent."""
    found: list[int] = []
    entry, last = 0, max(known.sent, default=-1)
    while entry <= last + 1:
        result = await store.read_entries(ledger, entry, last + 2 - entry, 1 << 20)
        unknown = in_limbo(store, ledger) or store.descriptors.is_quarantined(ledger, entry)
        if result.status is (Status.UNKNOWN if unknown else Status.NO_SUCH_ENTRY):
            entry += 1
            continue
        if result.status is not Status.OK:
            raise Broken(f"entry {entry} of ledger {ledger} is answered {result.status!r}")
        for stored in result.entries:
            if entry not in known.sent:
                raise Broken(f"entry {entry} of ledger {ledger} was never sent")
            if bytes(stored) != stored_bytes(ledger, entry, known.sent[entry]):
                raise Broken(f"entry {entry} of ledger {ledger} has other bytes than were sent")
            found.append(entry)
            entry += 1
    return found


def _try_add(store: Store, ledger: int) -> Status:
    stored = stored_bytes(ledger, LATE, 8)
    return store.add_entry(ledger, LATE, KEY, (stored,), len(stored), -1, False)
