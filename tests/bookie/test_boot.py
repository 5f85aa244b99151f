"""A start on damaged files: what is whole is served, the rest is unknown, and what was found is never forgotten."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from magnetar.bookie.format.journal import ForeignFile
from magnetar.bookie.store.entrylog.mover import CompactionPolicy
from magnetar.bookie.store.replay import JournalPosition
from magnetar.bookie.store.state_log import LIMBO_FILE, RecordedDirectoryState
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.disk import SimDisk, SimInode
from magnetar.runtime.sim.world import NodeCrashed, Simulation
from tests.bookie.entries import payload_of
from tests.bookie.stores import DATA, NODE, SMALL, UUID, add, fence, payload, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

LEDGERS = (1, 2, 3)
ENTRIES = 12
LAST_LEDGER = 5
LOG_END = 4096 + ENTRIES * 344
"""Of the first two logs: a third of the entries of three ledgers, 300 bytes each, 36 and 8 in front."""
QUIET = replace(SMALL, memtable_bytes=60 << 10, journal_bytes=1 << 20, journal_first_segment_bytes=64 << 10)
"""Nothing is flushed but by a checkpoint that the test makes."""


async def upto(last: int = LAST_LEDGER) -> int:
    return last


KNOWN = RecordedDirectoryState(upto=upto)


async def start(simulation: Simulation, known: RecordedDirectoryState = KNOWN) -> Store:
    world = simulation.world(NODE)

    async def opened() -> Store:
        world.files.make_directories(DATA)
        return await Store.open(world, DATA, UUID, QUIET, known)

    return await simulation.spawn(NODE, opened())


async def fill(simulation: Simulation, store: Store, entries: range, ledgers: tuple[int, ...] = LEDGERS) -> None:
    for ledger in ledgers:
        for entry in entries:
            assert await simulation.spawn(NODE, add(store, ledger, entry, payload(ledger, entry))) is Status.OK


async def three_logs_and_a_journal(simulation: Simulation) -> None:
    """Each third of the entries is in a log, the last one in the journal alone; ledger 3 is fenced in it."""
    third = ENTRIES // 3
    for part in range(2):
        store = await start(simulation)
        await fill(simulation, store, range(part * third, (part + 1) * third))
        await simulation.spawn(NODE, store.close())
        simulation.crash(NODE)
    store = await start(simulation)
    await fill(simulation, store, range(2 * third, ENTRIES))
    await simulation.spawn(NODE, fence(store, 3))
    simulation.crash(NODE, power_loss=True)


def one(disk: SimDisk, suffix: str, at: int = 0) -> str:
    return [path for path in disk.list_paths() if path.endswith(suffix)][at]


def remove(disk: SimDisk, path: str) -> None:
    directory = disk.find_node(path.rpartition("/")[0])
    for names in (directory.now, directory.durable):  # type: ignore[union-attr]
        del names[path.rpartition("/")[2]]


def size(disk: SimDisk, path: str) -> int:
    inode = disk.find_node(path)
    assert isinstance(inode, SimInode)
    return inode.now.size


def flip(suffix: str, offset: int, at: int = 0) -> Callable[[SimDisk], None]:
    return lambda disk: disk.flip_bit(one(disk, suffix, at), offset)


def gone(suffix: str, at: int = 0) -> Callable[[SimDisk], None]:
    return lambda disk: remove(disk, one(disk, suffix, at))


def room(suffix: str) -> Callable[[SimDisk], None]:
    """Zeros behind the end."""

    def harm(disk: SimDisk) -> None:
        inode = disk.find_node(one(disk, suffix))
        assert isinstance(inode, SimInode)
        inode.now.resize(1 << 16)
        inode.durable.resize(1 << 16)

    return harm


def cut(suffix: str, by: int, at: int = 0) -> Callable[[SimDisk], None]:
    return lambda disk: disk.truncate_file(one(disk, suffix, at), max(0, size(disk, one(disk, suffix, at)) - by))


def both(*harms: Callable[[SimDisk], None]) -> Callable[[SimDisk], None]:
    def harm(disk: SimDisk) -> None:
        for each in harms:
            each(disk)

    return harm


@dataclass(frozen=True)
class Case:
    name: str
    harm: Callable[[SimDisk], None]
    limbo: bool = True  # else everything that is lost is known
    lost: bool = True  # entries are lost


CASES = [
    Case("nothing", lambda disk: None, limbo=False, lost=False),
    Case("mark flipped", flip("/mark", 90), lost=False),
    Case("mark header flipped", flip("/mark", 10), lost=False),
    Case("mark cut", cut("/mark", 60), lost=False),
    Case("mark empty", cut("/mark", 1 << 20), lost=False),
    Case("mark gone", gone("/mark"), lost=False),
    Case("ledger index record flipped", flip(".lidx", 64 + 60), lost=False),
    Case("ledger index header flipped", flip(".lidx", 12), lost=False),
    Case("ledger index cut", cut(".lidx", 40), lost=False),
    Case("ledger index empty", cut(".lidx", 1 << 20), lost=False),
    Case("ledger index gone", gone(".lidx"), lost=False),
    Case("index header flipped", flip(".idx", 12), limbo=False, lost=False),
    Case("index group flipped", flip(".idx", 70), limbo=False, lost=False),
    Case("index cut", cut(".idx", 5), limbo=False, lost=False),
    Case("index cut to its header", lambda disk: disk.truncate_file(one(disk, ".idx"), 64), limbo=False, lost=False),
    Case("index empty", cut(".idx", 1 << 20), limbo=False, lost=False),
    Case("index gone", gone(".idx"), limbo=False, lost=False),
    Case("log header flipped", flip(".log", 12), limbo=False, lost=False),
    Case("log entry flipped", flip(".log", 4096 + 100), limbo=False),
    Case("log cut", lambda disk: disk.truncate_file(one(disk, ".log"), LOG_END - 100), limbo=False),
    Case("log empty", cut(".log", 1 << 20), limbo=False),
    Case("index gone, and the log has its allocated room again", both(gone(".idx"), room(".log")), False, False),
    Case("log gone", gone(".log"), limbo=False),
    Case("log and index gone", both(gone(".log"), gone(".idx"))),
    Case("log entry and index flipped", both(flip(".log", 4096 + 500), flip(".idx", 70))),
    Case("log end and index flipped", both(flip(".log", LOG_END - 9), flip(".idx", 70))),
    Case("log gone and index flipped", both(gone(".log"), flip(".idx", 70))),
    Case("newest log gone", gone(".log", -1), limbo=False),
    Case("newest log and index gone", both(gone(".log", -1), gone(".idx", -1))),
    Case("journal block flipped", flip(".jnl", 3 * 4096 + 200, -1)),
    Case("journal headers flipped", both(flip(".jnl", 12, -1), flip(".jnl", 2048 + 12, -1))),
    Case("journal gone", gone(".jnl", -1)),
]  # fmt: skip


async def judge(simulation: Simulation, store: Store, case: Case) -> int:
    """What is there is right, what is not is unknown; how many are lost."""
    store.check()
    lost = 0
    for ledger in LEDGERS:
        for entry in range(ENTRIES):
            result = await simulation.spawn(NODE, store.read_entries(ledger, entry))
            if result.status is Status.OK:
                assert payload_of(result.entries[0]) == payload(ledger, entry)
            else:
                assert result.status is Status.UNKNOWN, f"entry {entry} of ledger {ledger}: {result.status!r}"
                lost += 1
        beyond = await simulation.spawn(NODE, store.read_entries(ledger, ENTRIES + 1))
        assert beyond.status is (Status.UNKNOWN if case.limbo else Status.NO_SUCH_ENTRY)
    assert await simulation.spawn(NODE, add(store, 3, 50, b"late")) is Status.FENCED
    return lost


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_start_on_damage_serves_what_is_whole_and_says_unknown_for_the_rest(
    simulation: Simulation, /, case: Case
) -> None:
    await three_logs_and_a_journal(simulation)
    case.harm(simulation.node(NODE).disk)
    store = await start(simulation)
    assert store.descriptors.limbo_upto == (LAST_LEDGER if case.limbo else -1)
    lost = await judge(simulation, store, case)
    assert (lost > 0) == case.lost
    wanted = Status.FENCED if case.limbo else Status.OK
    assert await simulation.spawn(NODE, add(store, 1, 50, b"new")) is wanted
    assert await simulation.spawn(NODE, add(store, 9, 0, payload(9, 0))) is Status.OK
    for _ in range(2):  # and again: the same, and limbo does not grow
        simulation.crash(NODE, power_loss=True)
        store = await start(simulation, KNOWN._replace(upto=lambda: upto(100)))
        assert store.descriptors.limbo_upto == (LAST_LEDGER if case.limbo else -1)
        assert await judge(simulation, store, case) == lost
        new = await simulation.spawn(NODE, store.read_entries(9, 0))
        assert payload_of(new.entries[0]) == payload(9, 0)


@pytest.mark.parametrize("case", [case for case in CASES if case.lost or case.limbo], ids=lambda case: case.name)
def test_what_was_found_survives_a_crash_at_any_operation_of_the_start(case: Case) -> None:
    """Two starts are cut short before the one that ends; each row begins at another operation."""
    last = 100
    for operation in range(1 + CASES.index(case) % 7, last, 7):

        async def main(simulation: Simulation, operation: int = operation) -> None:
            await three_logs_and_a_journal(simulation)
            case.harm(simulation.node(NODE).disk)
            for cut_at in (operation, last - operation):
                simulation.world(NODE)
                simulation.crash_at(NODE, cut_at, power_loss=operation % 2 == 0)
                try:
                    await start(simulation)
                    simulation.crash(NODE)
                except NodeCrashed:
                    simulation.add_line("the start was cut short")
            store = await start(simulation)
            assert store.descriptors.limbo_upto == (LAST_LEDGER if case.limbo else -1)
            assert (await judge(simulation, store, case) > 0) == case.lost

        simulate(main, operation)


async def test_compaction_goes_on_without_a_log_that_is_gone(simulation: Simulation, /) -> None:
    """Its index is still here, until the next start."""
    await three_logs_and_a_journal(simulation)
    gone(".log")(simulation.node(NODE).disk)
    for _ in range(2):
        store = await start(simulation)
        await simulation.spawn(NODE, store.compactor.run_compaction(CompactionPolicy(1.1, 1.1)))
        assert len(store.descriptors.quarantined()) == 3
        simulation.crash(NODE, power_loss=True)


async def test_journal_that_ends_before_what_was_synced_once_is_limbo(simulation: Simulation, /) -> None:
    """The directory was rolled back: nothing in it is wrong."""
    store = await start(simulation)
    await fill(simulation, store, range(3))
    before = store.journal_position
    simulation.crash(NODE)
    store = await start(simulation, KNOWN._replace(journal=before))
    assert store.descriptors.limbo_upto == -1
    simulation.crash(NODE)
    behind = JournalPosition(store.journal_position.journal, store.journal_position.offset + 4096)
    store = await start(simulation, KNOWN._replace(journal=behind))
    assert store.descriptors.limbo_upto == LAST_LEDGER


async def test_loss_that_is_known_before_the_start_is_limbo(simulation: Simulation, /) -> None:
    store = await start(simulation, KNOWN._replace(losses=("it was rolled back",)))
    assert store.descriptors.limbo_upto == LAST_LEDGER
    assert simulation.world(NODE).files.exists(f"{DATA}/{LIMBO_FILE}")


async def test_file_of_another_bookie_stops_the_start(simulation: Simulation, /) -> None:
    await three_logs_and_a_journal(simulation)
    world = simulation.world(NODE)
    for suffix in ("mark", ".lidx", ".log", ".idx"):
        other = Store.open(world, DATA, bytes(16), QUIET, KNOWN)
        with pytest.raises(ForeignFile, match=suffix):
            await simulation.spawn(NODE, other)
        remove(simulation.node(NODE).disk, one(simulation.node(NODE).disk, suffix))
