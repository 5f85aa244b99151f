"""Bits flipped and files cut at every kind of place: noticed, never served, never turned into "no such entry" (17).

The store under test has closed and open logs, moved ledgers, tombstones, fences, LACs, and a journal with entries that
no log has yet. Whatever is damaged, its start serves: each acknowledged entry is answered with its bytes or UNKNOWN,
and no fence is forgotten. Thousands of cases, each on its own copy of the disk (tests/crashes/image.py). Beside it the
cookie, with which no bookie starts when it is damaged, and the scrubber's note, without which it begins again.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from magnetar.bookie.format.journal import crc32c
from magnetar.bookie.maintenance.scrub import SCRUB_FILE
from magnetar.bookie.store import disk as store_disk
from magnetar.bookie.store.identity import COOKIE_FILE
from magnetar.bookie.store.state_log import RecordedDirectoryState
from magnetar.bookie.store.store import Store
from magnetar.ledger.peer_format import Status
from magnetar.metadata import paths
from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime.sim.disk import SimDirectory, SimDisk, SimFiles, UnsyncedResize, UnsyncedWrite
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, payload_of, stored_entry
from tests.bookie.stores import DATA, NODE, SMALL, UUID, Model, load, payload
from tests.crashes.image import State
from tests.crashes.limits import small_limits
from tests.crashes.loop import TinyLoop, tiny_world
from tests.crashes.verify import listening
from tests.crashes.workload import ALL, TINY

pytestmark = pytest.mark.run_by.with_args(with_cluster)

FLIPS = 25
"""Of each file, besides half of the bytes of its first 64."""
CUTS = 20


@dataclass
class Undamaged:
    state: State
    model: Model
    known: RecordedDirectoryState


async def live(store: Store, model: Model) -> None:
    rng = random.Random(7)
    await load(store, model, rng, 15)
    await model.fence(store, 20)
    for ledger in (3, 4):
        assert await store.delete_ledgers([ledger])
        model.deleted[ledger] = None
        model.fenced.pop(ledger, None)
    for key in [key for key in model.sent if key[0] in (3, 4)]:
        del model.sent[key]
        model.acked.pop(key, None)
    await store.compactor.run_compaction(ALL, major=True, roll=False)
    for ledger in (21, 22):
        for entry in range(3):
            await model.add(store, ledger, entry, 300)
    await store.checkpoint()
    await model.fence(store, 21)
    for entry in range(3, 5):
        await model.add(store, 22, entry, 300)


def undamaged() -> Undamaged:
    """Killed with a journal to replay."""
    disk, loop, model = SimDisk(), TinyLoop(), Model()
    world = tiny_world(loop, SimFiles(disk), 1)

    async def run() -> RecordedDirectoryState:
        world.files.make_directories(DATA)
        store = await Store.open(world, DATA, UUID, TINY)
        await live(store, model)

        async def upto() -> int:
            return 1000

        return RecordedDirectoryState(journal=store.journal_position, upto=upto)

    with small_limits():
        known = loop.drive(run())
    loop.abandon()
    return Undamaged(_state(disk), model, known)


def _state(disk: SimDisk) -> State:
    folders = {path.rsplit("/", 1)[0] for path in disk.list_paths()}
    folders |= {"/data", DATA}
    names = {path: number for number, path in enumerate(disk.list_paths(), 1)}
    return State(names, frozenset(folders), {n: disk.find_inode(path).now for path, n in names.items()}, 1)


def start(disk: SimDisk, known: RecordedDirectoryState) -> tuple[TinyLoop, Store]:
    loop = TinyLoop()
    world = tiny_world(loop, SimFiles(disk), 2)

    async def run() -> Store:
        world.files.make_directories(DATA)
        return await Store.open(world, DATA, UUID, SMALL, known)

    return loop, loop.drive(run())


async def check(store: Store, model: Model) -> int:
    """How many acknowledged entries are unknown; everything else is as it was."""
    unknown = 0
    for (ledger, entry), data in model.sent.items():
        result = await store.read_entries(ledger, entry)
        if result.status is Status.OK:
            assert payload_of(result.entries[0]) == data, f"entry {entry} of ledger {ledger} has other bytes"
        elif (ledger, entry) in model.acked:
            assert result.status is Status.UNKNOWN, f"entry {entry} of ledger {ledger}: {result.status!r}"
            unknown += 1
    for ledger in model.fenced:
        stored = stored_entry(ledger, 1 << 40, b"late")
        assert store.add_entry(ledger, 1 << 40, KEY, (stored,), len(stored), -1, False) in (
            Status.FENCED, Status.UNAUTHORIZED
        ), f"ledger {ledger} was fenced and takes adds"  # fmt: skip
    return unknown


def flip(disk: SimDisk, path: str, offset: int, bit: int) -> None:
    inode = disk.find_inode(path)
    byte = inode.now.read(1, offset)[0]
    inode.apply(UnsyncedWrite(offset, bytes([byte ^ 1 << bit])))


def remove(disk: SimDisk, path: str) -> None:
    folder = disk.find_node(path.rsplit("/", 1)[0])
    assert isinstance(folder, SimDirectory)
    del folder.now[path.rsplit("/", 1)[1]]


def places(disk: SimDisk, path: str, rng: random.Random) -> Iterator[int]:
    """Half of the bytes of the header, and some of what is written behind it."""
    pages = disk.find_inode(path).now
    yield from range(rng.randrange(2), min(64, pages.size), 2)
    written = [
        number * 4096 + at for number, page in sorted(pages.numbered_pages()) for at, byte in enumerate(page) if byte
    ]
    written = [offset for offset in written if 64 <= offset < pages.size]
    yield from rng.sample(written, min(FLIPS, len(written)))


@pytest.fixture(scope="module")
def whole() -> Undamaged:
    return undamaged()


def kinds(whole: Undamaged) -> list[str]:
    return sorted(whole.state.names)


def test_the_undamaged_store_serves_everything(whole: Undamaged) -> None:
    loop, store = start(whole.state.disk(), whole.known)
    assert loop.drive(check(store, whole.model)) == 0
    assert store.descriptors.limbo_upto < 0
    suffixes = {path.rsplit(".", 1)[-1] for path in whole.state.names}
    assert {"log", "idx", "lidx", "jnl", f"{DATA}/mark"} <= suffixes
    loop.abandon()


def test_a_flipped_bit_anywhere_is_never_served_and_never_no_such_entry(whole: Undamaged) -> None:
    rng = random.Random(1)
    unknown = cases = 0
    with listening():
        for path in kinds(whole):
            for offset in places(whole.state.disk(), path, rng):
                disk = whole.state.disk()
                bit = rng.randrange(8)
                flip(disk, path, offset, bit)
                unknown += judge(disk, whole, f"bit {bit} of byte {offset} of {path}")
                cases += 1
    assert cases > 300
    assert unknown > 0, "some damage must cost something, or nothing was damaged"


def test_a_file_cut_anywhere_or_gone_is_never_no_such_entry(whole: Undamaged) -> None:
    rng = random.Random(2)
    unknown = 0
    with listening():
        for path in kinds(whole):
            size = whole.state.disk().find_inode(path).now.size
            ends = {0, 1, 63, 64, size // 2, size - 1} | {rng.randrange(size + 1) for _ in range(CUTS)}
            for end in sorted(at for at in ends if 0 <= at < size):
                disk = whole.state.disk()
                disk.find_inode(path).apply(UnsyncedResize(end))
                unknown += judge(disk, whole, f"{path} cut to {end}")
            disk = whole.state.disk()
            remove(disk, path)
            unknown += judge(disk, whole, f"{path} removed")
    assert unknown > 0


def test_damage_under_a_running_store_is_unknown(whole: Undamaged) -> None:
    rng = random.Random(3)
    unknown = 0
    with listening():
        for path in kinds(whole):
            if not path.endswith((".log", ".idx")):
                continue
            for offset in places(whole.state.disk(), path, rng):
                disk = whole.state.disk()
                loop, store = start(disk, whole.known)
                if disk.find_node(path) is None:
                    loop.abandon()
                    break  # gone with the start
                flip(disk, path, offset, rng.randrange(8))
                unknown += loop.drive(check(store, whole.model))
                loop.abandon()
    assert unknown > 0


def judge(disk: SimDisk, whole: Undamaged, what: str) -> int:
    """Starts twice: what was found is not forgotten."""
    unknown = 0
    for _ in range(2):
        try:
            loop, store = start(disk, whole.known)
        except Exception as error:
            raise AssertionError(f"{what}: the start refuses: {error!r}") from error
        try:
            unknown = loop.drive(check(store, whole.model))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
        assert loop.complaints == [], what
        loop.abandon()
    return unknown


# ---------------------------------------------------------------------------------------- the small files beside it
async def a_bookie_with_notes(cluster: Cluster) -> tuple[bytes, bytes]:
    """Ended cleanly, with an entry, a cookie and a scrubber's note in its directory: the two files."""
    bookie = await cluster.start(scrub_pass_s=30.0)
    assert (await cluster.caller(bookie).add(1, 0, payload(1, 0))).status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    await asyncio.sleep(60)
    await cluster.simulation.spawn(NODE, bookie.close())
    cluster.simulation.crash(NODE)
    cookie, scrub = (contents(cluster, name) for name in (COOKIE_FILE, SCRUB_FILE))
    return cookie, scrub


def contents(cluster: Cluster, name: str) -> bytes:
    pages = cluster.simulation.node(NODE).disk.find_inode(f"{DATA}/{name}").now
    return bytes(pages.read(pages.size, 0))


def damages(whole: bytes, rng: random.Random) -> list[bytes]:
    """Every bit of the head and some of the rest flipped, of a newer format, and cut everywhere."""
    bits = [*range(8 * 14), *rng.sample(range(8 * 14, 8 * len(whole)), 100)]
    flipped = []
    for bit in bits:
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        flipped.append(bytes(data))
    newer = whole[:8] + b"\0\3" + whole[10:-4]
    flipped.append(newer + crc32c(newer).to_bytes(4, "big"))
    return flipped + [whole[:end] for end in range(len(whole))] + [whole + b"\0"]


def write(cluster: Cluster, name: str, data: bytes) -> None:
    store_disk.replace_file(cluster.simulation.world(NODE).files, DATA, name, data)


async def test_a_damaged_cookie_is_never_taken_for_another_or_for_none(cluster: Cluster, /) -> None:
    cookie, _ = await a_bookie_with_notes(cluster)
    known = await cluster.metadata.children(paths.COOKIES)
    for data in damages(cookie, random.Random(4)):
        write(cluster, COOKIE_FILE, data)
        with pytest.raises(InvalidConfiguration, match=r"damaged at offset|format version"):
            await cluster.start()
        assert contents(cluster, COOKIE_FILE) == data, "nothing was changed"
        cluster.simulation.crash(NODE)
    assert await cluster.metadata.children(paths.COOKIES) == known
    write(cluster, COOKIE_FILE, cookie)
    bookie = await cluster.start()
    answer, frames = await cluster.caller(bookie).read(1, 0)
    assert answer.status is Status.OK
    assert payload_of(frames[0]) == payload(1, 0)


async def test_a_damaged_note_of_the_scrubber_is_said_and_costs_a_pass(
    cluster: Cluster, /, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins again with the first log, and it is told from a whole one."""
    _, scrub = await a_bookie_with_notes(cluster)
    bookie = await cluster.start(scrub_pass_s=30.0)
    scrubber = bookie.scrubber
    await cluster.simulation.spawn(NODE, scrubber._load())
    assert scrubber.describe()["pass"] != 1, "the whole one is read"
    for data in damages(scrub, random.Random(5)):
        write(cluster, SCRUB_FILE, data)
        caplog.clear()
        await cluster.simulation.spawn(NODE, scrubber._load())
        assert any("the scrubber starts again" in message for message in caplog.messages)
        assert (scrubber.describe()["pass"], scrubber.describe()["log"]) == (1, 0)
    await asyncio.sleep(100)
    assert bookie.statistics()["scrub_pass"] > 1, "it goes on"
    assert bookie.store.descriptors.quarantined() == []
