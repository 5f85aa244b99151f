"""Whose directory it is: the boot matrix (ledger protocol §2.7), the lock, newer formats."""

import asyncio
import copy
import errno
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.bookie.format.journal import crc32c
from magnetar.bookie.format.mark import Cookie, decode_cookie
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.bookie.store import disk, identity
from magnetar.bookie.store.identity import DirectoryAtStart, DirectoryVerdict
from magnetar.bookie.store.store import StoreConfig
from magnetar.ledger.peer_format import BookieOperation, Status
from magnetar.metadata import paths, records
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, put_record
from magnetar.proto.errors import Busy, InvalidConfiguration, NotFound, ReadOnly, SessionExpired, Unavailable
from magnetar.runtime.process import make_system_world
from magnetar.runtime.sim.disk import FileFault, SimDirectory
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY
from tests.bookie.stores import DATA, NODE, SMALL

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def test_new_bookie_gets_a_uuid_and_keeps_it(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    first = bookie.id
    found = await cluster.metadata.get(paths.cookie(first))
    assert found is not None
    cookie = records.decode_record(found.value, records.CookieRecord, paths.cookie(first))
    assert (cookie.bookie, cookie.directories) == (first, (f"{NODE}:{DATA}",))
    found = await cluster.metadata.get(paths.bookie(first))
    assert found is not None
    assert records.decode_record(found.value, records.BookieRecord, paths.bookie(first)).endpoint == str(
        bookie.endpoint
    )
    assert (await cluster.restart()).id == first
    assert await cluster.metadata.children(paths.COOKIES) == [first]


async def test_closed_bookie_is_no_longer_registered(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    await cluster.simulation.spawn(NODE, bookie.close())
    await cluster.simulation.spawn(NODE, bookie.close())
    assert await cluster.metadata.children(paths.AVAILABLE_BOOKIES) == []
    bookie = await cluster.start()
    assert await cluster.metadata.children(paths.AVAILABLE_BOOKIES) == [bookie.id]


INSTANCE = "i"
PLACE = "h:/d"


def a_cookie(*, starts: int = 3, instance: str = INSTANCE) -> Cookie:
    return Cookie("me", instance, (PLACE,), starts)


def a_record(*, starts: int = 3, place: str = PLACE) -> records.CookieRecord:
    return records.CookieRecord(bookie="me", instance=INSTANCE, directories=(place,), starts=starts)


MATRIX: list[tuple[DirectoryVerdict, Cookie | None, records.CookieRecord | None, bool, tuple[str, ...]]] = [
    # verdict             cookie here       its record           store  others here
    (DirectoryVerdict.ORPHAN, None, None, True, ()),
    (DirectoryVerdict.ORPHAN, None, None, True, ("other",)),
    (DirectoryVerdict.NEW, None, None, False, ()),
    (DirectoryVerdict.WIPED, None, None, False, ("other",)),
    (DirectoryVerdict.OTHER_CLUSTER, a_cookie(instance="x"), a_record(), True, ()),
    (DirectoryVerdict.OTHER_CLUSTER, a_cookie(instance="x"), None, False, ()),
    (DirectoryVerdict.FINISH, a_cookie(starts=0), None, False, ()),
    (DirectoryVerdict.UNKNOWN, a_cookie(), None, True, ()),
    (DirectoryVerdict.SWAPPED, a_cookie(), a_record(place="h:/elsewhere"), True, ("other",)),
    (DirectoryVerdict.MOVED, a_cookie(), a_record(place="h:/elsewhere"), True, ()),
    (DirectoryVerdict.OLD_METADATA, a_cookie(starts=5), a_record(starts=3), True, ()),
    (DirectoryVerdict.WIPED, a_cookie(), a_record(), False, ()),
    (DirectoryVerdict.ROLLED_BACK, a_cookie(starts=2), a_record(starts=3), True, ()),
    (DirectoryVerdict.START, a_cookie(starts=4), a_record(starts=3), True, ()),  # a start that was cut short
    (DirectoryVerdict.START, a_cookie(), a_record(), True, ()),
    (DirectoryVerdict.START, a_cookie(starts=0), a_record(starts=0), False, ()),  # the first one was cut short
]


@pytest.mark.parametrize(("verdict", "cookie", "record", "store", "others"), MATRIX)
def test_the_boot_matrix(
    verdict: DirectoryVerdict, cookie: Cookie | None, record: records.CookieRecord | None, store: bool,
    others: tuple[str,
        ...]
) -> None:
    assert identity.judge_directory(DirectoryAtStart(cookie, record, store, PLACE, (), others, INSTANCE)) is verdict


def test_every_verdict_has_a_row() -> None:
    assert {row[0] for row in MATRIX} == set(DirectoryVerdict)


async def test_wiped_directory_is_refused_until_its_bookie_is_forgotten_and_comes_back_under_a_new_uuid(
    cluster: Cluster, /
) -> None:
    first = (await cluster.start()).id
    with pytest.raises(Busy, match=r"is registered: stop it first"):
        await identity.delete_bookie(cluster.metadata, first)
    cluster.simulation.crash(NODE)
    cluster.simulation.node(NODE).disk.delete_everything()
    with pytest.raises(InvalidConfiguration, match=rf"knows bookie {first} at .*`magnetar bookies forget {first}`"):
        await cluster.start()
    await cluster.metadata.delete(paths.bookie(first))  # its session ends
    await identity.delete_bookie(cluster.metadata, first)
    assert (await cluster.restart()).id != first
    with pytest.raises(NotFound, match=r"knows no bookie"):
        await identity.delete_bookie(cluster.metadata, first)


async def test_directory_without_its_files_is_refused_though_the_cookie_is_there(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    await cluster.simulation.spawn(NODE, bookie.close())
    cluster.simulation.crash(NODE)
    root = cluster.simulation.node(NODE).disk.find_node(DATA)
    assert isinstance(root, SimDirectory)
    for names in (root.now, root.durable):
        for name in [name for name in names if name not in (identity.COOKIE_FILE, identity.LOCK_FILE)]:
            del names[name]
    with pytest.raises(InvalidConfiguration, match=r"is empty: its data is lost"):
        await cluster.start()


async def test_directory_that_the_metadata_does_not_know_is_refused(cluster: Cluster, /) -> None:
    first = (await cluster.start()).id
    await cluster.metadata.delete(paths.cookie(first))
    with pytest.raises(InvalidConfiguration, match=r"which the metadata does not know"):
        await cluster.restart()


async def test_exchanged_directories_are_refused_and_start_when_they_are_put_back(cluster: Cluster, /) -> None:
    first = await cluster.start()
    world = cluster.simulation.world("other")
    config = replace(cluster.config, host="other", port=0)
    second = await cluster.simulation.spawn("other", Bookie.start(world, config, cluster.metadata))
    for node in (NODE, "other"):
        cluster.simulation.crash(node)
    disks = [cluster.simulation.node(node).disk for node in (NODE, "other")]
    disks[0].root, disks[1].root = disks[1].root, disks[0].root
    wrong = rf"data of bookie {second.id}, but {NODE}:{DATA} is the place of bookie {first.id}: .* exchanged"
    with pytest.raises(InvalidConfiguration, match=wrong):
        await cluster.start()
    disks[0].root, disks[1].root = disks[1].root, disks[0].root
    assert (await cluster.restart()).id == first.id


async def test_moved_directory_is_refused_until_somebody_says_that_it_was_moved(cluster: Cluster, /) -> None:
    first = (await cluster.start()).id
    cluster.simulation.crash(NODE)
    with pytest.raises(InvalidConfiguration, match=rf"`magnetar bookies move {first} rack-9:{DATA}`"):
        await cluster.start(advertised_host="rack-9")
    await cluster.metadata.delete(paths.bookie(first))
    await identity.change_bookie_directory(cluster.metadata, first, f"rack-9:{DATA}")
    assert (await cluster.restart()).id == first
    cluster.simulation.crash(NODE)
    with pytest.raises(InvalidConfiguration, match=rf"belongs to bookie {first} at rack-9:{DATA}, and this is"):
        await cluster.start(advertised_host="")


async def test_place_with_a_name_may_move_and_takes_over_from_the_address(cluster: Cluster, /) -> None:
    first = (await cluster.start()).id
    cluster.simulation.crash(NODE)
    assert (await cluster.start(place="bookie-1")).id == first
    cluster.simulation.crash(NODE)
    assert (await cluster.start(advertised_host="rack-9")).id == first


async def test_starts_are_counted_in_the_cookie_first_and_in_the_metadata_after(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    for starts in (1, 2, 3):
        assert (await record_of(cluster, bookie.id)).starts == starts
        assert cookie_of(cluster).starts == starts
        bookie = await cluster.restart()


async def test_metadata_older_than_the_directory_is_refused_until_it_is_accepted(cluster: Cluster, /) -> None:
    first = (await cluster.start()).id
    old = await record_of(cluster, first)
    await cluster.restart()
    await cluster.restart()
    await cluster.metadata.put(paths.cookie(first), records.encode_record(old, paths.cookie(first)))
    with pytest.raises(InvalidConfiguration, match=rf"older than the directory.*accept-metadata {first}`"):
        await cluster.restart()
    await cluster.metadata.delete(paths.bookie(first))
    await identity.accept_restored_metadata(cluster.metadata, first)
    assert (await cluster.restart()).id == first
    assert (await cluster.restart()).id == first


async def test_metadata_is_accepted_for_one_start_and_as_often_as_an_operator_says_so(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    before = await record_of(cluster, bookie.id)
    for again in (False, True):  # also from a copy that knows of no accepted start
        cluster.simulation.crash(NODE)
        if again:
            await cluster.metadata.put(paths.cookie(bookie.id), records.encode_record(before, paths.cookie(bookie.id)))
        await cluster.metadata.delete(paths.bookie(bookie.id))
        await identity.accept_restored_metadata(cluster.metadata, bookie.id)
        bookie = await cluster.start()
        assert bookie._identity.is_metadata_accepted
        assert bookie._identity.losses, "it compares its ledgers"
        for _ in range(3):
            bookie = await cluster.restart()
            assert not bookie._identity.is_metadata_accepted


def test_directory_that_was_rolled_back_starts_in_limbo() -> None:
    """An older copy of it, whole in itself: of an earlier start, or of this one and without its last entries."""
    for restarts in (0, 2):

        async def main(cluster: Cluster, restarts: int = restarts) -> None:
            bookie = await cluster.start(upkeep_interval_s=1.0)
            caller = cluster.caller(bookie)
            assert (await caller.add(1, 0, b"early")).status is Status.OK
            await asyncio.sleep(2)
            disk = cluster.simulation.node(NODE).disk
            older = copy.deepcopy(disk.root)
            assert (await caller.add(1, 1, b"late" * 2000)).status is Status.OK
            await asyncio.sleep(2)
            for _ in range(restarts):
                bookie = await cluster.restart()
            cluster.simulation.crash(NODE)
            await put_record(cluster.metadata, paths.LEDGER_IDS, records.CounterRecord(next=9))
            await put_record(cluster.metadata, paths.ledger(1), a_ledger(bookie.id))
            disk.root = older
            bookie = await cluster.start()
            assert (bookie.limbo_restorer.limbo_upto, bookie.store.descriptors.fenced_upto) == (8, 8)
            caller = cluster.caller(bookie)
            assert (await caller.read(1, 0))[0].status is Status.OK
            assert (await caller.read(1, 1))[0].status is Status.UNKNOWN
            assert (await caller.send(BookieOperation.READ_LAC, 1))[0].status is Status.UNKNOWN

        with_cluster(main)


async def test_position_of_the_journal_is_in_the_metadata_at_the_start_and_whenever_it_moved(
    cluster: Cluster, /
) -> None:
    bookie = await cluster.start()
    before = await record_of(cluster, bookie.id)
    assert (before.journal, before.offset) == bookie.store.journal_position
    assert (await cluster.caller(bookie).add(1, 0, b"x" * 5000)).status is Status.OK
    await asyncio.sleep(cluster.config.upkeep_interval_s + 1)
    after = await record_of(cluster, bookie.id)
    assert (after.journal, after.offset) == bookie.store.journal_position
    assert after.offset > before.offset


def test_directory_without_permission_says_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(InvalidConfiguration, match=r"cannot be used: .*own it"):
        identity.lock_directory(make_system_world().files, str(file / "data"))
    with pytest.raises(InvalidConfiguration, match=r"cannot be used: File exists"):
        identity.lock_directory(make_system_world().files, str(file))


async def test_permission_denied_anywhere_in_a_start_is_typed(cluster: Cluster, /) -> None:
    await cluster.start()
    for path in (identity.LOCK_FILE, identity.COOKIE_FILE, "mark", ".jnl"):
        cluster.simulation.crash(NODE)
        kind = "lock" if path == identity.LOCK_FILE else "open"
        disk = cluster.simulation.node(NODE).disk
        disk.faults = [FileFault(kind, path, errno.EACCES)]
        with pytest.raises(InvalidConfiguration, match=rf"{DATA} cannot be used: Permission denied .*{path}"):
            await cluster.start()
        disk.faults = []
        await cluster.restart()


def a_ledger(bookie: str) -> records.LedgerRecord:
    """Open, on this bookie alone."""
    fragments = (records.Fragment(0, (bookie,)),)
    return records.LedgerRecord(
        ledger_id=1, state=records.OPEN, ensemble_size=1, write_quorum=1, ack_quorum=1, key=KEY, token="t",
        fragments=fragments,
    )  # fmt: skip


async def record_of(cluster: Cluster, bookie: str) -> records.CookieRecord:
    found = await cluster.metadata.get(paths.cookie(bookie))
    assert found is not None
    return records.decode_record(found.value, records.CookieRecord, paths.cookie(bookie))


def cookie_of(cluster: Cluster) -> Cookie:
    path = f"{DATA}/{identity.COOKIE_FILE}"
    files = cluster.simulation.world(NODE).files
    return decode_cookie(disk.read_file(files, path), path)


async def test_directory_of_another_cluster_is_refused(cluster: Cluster, /) -> None:
    await cluster.start()
    await put_record(cluster.metadata, paths.CLUSTER, records.ClusterRecord(instance="other"))
    with pytest.raises(InvalidConfiguration, match=r"belongs to a bookie of cluster"):
        await cluster.restart()


async def test_files_without_a_cookie_and_a_damaged_cookie_are_refused(cluster: Cluster, /) -> None:
    await cluster.start()
    cluster.simulation.crash(NODE)
    path = f"{DATA}/{identity.COOKIE_FILE}"
    cluster.simulation.node(NODE).disk.flip_bit(path, 40)
    with pytest.raises(InvalidConfiguration, match=rf"{path}: damaged"):
        await cluster.start()
    cluster.simulation.world(NODE).files.remove(path)
    with pytest.raises(InvalidConfiguration, match=r"files but no cookie"):
        await cluster.start()


def test_first_start_that_was_cut_short_is_finished_or_explained() -> None:
    """Wherever the first start dies, the next one serves: nothing was stored yet."""
    for operation in range(1, 40):

        async def main(cluster: Cluster, operation: int = operation) -> None:
            cluster.simulation.world(NODE)
            cluster.simulation.crash_at(NODE, operation, power_loss=True)
            try:
                await cluster.start()
            except Exception:
                cluster.simulation.add_line("the first start died")
            bookie = await cluster.restart()
            assert await cluster.metadata.children(paths.COOKIES) == [bookie.id]

        with_cluster(main)


async def test_newer_format_says_which_and_what_to_do(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    await cluster.simulation.spawn(NODE, bookie.close())
    cluster.simulation.crash(NODE)
    files = cluster.simulation.world(NODE).files
    file = files.open(f"{DATA}/mark")
    head = file.pread(52, 0)
    newer = head[:8] + b"\x00\x02" + head[10:]
    file.pwrite([newer, crc32c(newer).to_bytes(4, "big")], 0)
    with pytest.raises(InvalidConfiguration, match=r"mark of format version 2; .* reads up to 1"):
        await cluster.start()


async def test_two_bookies_on_one_directory_the_second_is_told_what_to_do(tmp_path: Path) -> None:
    world = make_system_world()
    store = await SqliteStore.open(world, ":memory:")
    config = BookieConfig(data=str(tmp_path / "data"), store=SMALL)
    first = await Bookie.start(world, config, store.new_session())
    with pytest.raises(Busy, match=r"is used by another process; stop that process or give another directory"):
        await Bookie.start(world, config, store.new_session())
    await first.close()
    second = await Bookie.start(world, config, store.new_session())
    assert second.id == first.id
    await second.close()
    await store.close()


async def test_full_disk_at_the_start_says_so_and_loses_nothing(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    assert (await cluster.caller(bookie).add(1, 0, b"kept")).status is Status.OK
    disk = cluster.simulation.node(NODE).disk
    cluster.simulation.crash(NODE, power_loss=True)
    capacity, disk.capacity_bytes = disk.capacity_bytes, disk.used_bytes()
    with pytest.raises(ReadOnly, match=r"no room for the journal"):
        await cluster.start()
    disk.capacity_bytes = capacity
    caller = cluster.caller(await cluster.restart())
    assert (await caller.read(1, 0))[0].status is Status.OK


async def test_bookie_registers_again_after_its_session_was_lost(cluster: Cluster, /) -> None:
    store = cluster.sqlite
    sessions = [store.new_session(timeout_s=2.0), store.new_session(timeout_s=2.0)]
    made = iter(sessions)

    async def new_session() -> MetadataStore:
        return next(made)

    world = cluster.simulation.world(NODE)
    first = await new_session()
    bookie = await cluster.simulation.spawn(NODE, Bookie.start(world, cluster.config, first, new_session))
    store.abandon_session(first.session_id)
    await asyncio.sleep(10)
    assert await cluster.metadata.children(paths.AVAILABLE_BOOKIES) == [bookie.id]
    with pytest.raises(SessionExpired):
        await first.get(paths.CLUSTER)
    assert (await cluster.caller(bookie).add(1, 0, b"x")).status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.close())
    assert await cluster.metadata.children(paths.AVAILABLE_BOOKIES) == []


def test_contradicting_settings_are_refused_at_once() -> None:
    for wrong in ({"journal_first_segment_bytes": 1 << 30}, {"memtable_bytes": 1 << 30}):
        with pytest.raises(InvalidConfiguration):
            StoreConfig(**wrong)
    with pytest.raises(InvalidConfiguration, match=r"data directory"):
        BookieConfig(data="")
    with pytest.raises(InvalidConfiguration, match=r"entry_bytes_max"):
        BookieConfig(data="d", entry_bytes_max=1 << 30)


@pytest.mark.parametrize("moment", ["before the start is counted", "before it registers"])
async def test_of_a_forget_and_a_start_at_the_same_moment_one_loses(
    cluster: Cluster, /, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bookie = await cluster.start()
    await bookie.close()
    honest = identity.record_bookie_start

    async def complete(*arguments: Any, **options: Any) -> None:
        if moment == "before the start is counted":
            await identity.delete_bookie(cluster.metadata, bookie.id)
        await honest(*arguments, **options)
        if moment == "before it registers":
            await identity.delete_bookie(cluster.metadata, bookie.id)

    monkeypatch.setattr(identity, "record_bookie_start", complete)
    with pytest.raises((Unavailable, InvalidConfiguration)):
        await cluster.start()
    assert await cluster.metadata.get(paths.cookie(bookie.id)) is None, "it stays forgotten"
    assert await cluster.metadata.get(paths.bookie(bookie.id)) is None


async def test_a_bookie_that_registers_while_it_is_forgotten_stays(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    assert not await identity.delete_cookie(cluster.metadata, bookie.id), "it came between the look and the commit"
    assert await cluster.metadata.get(paths.cookie(bookie.id)) is not None
    await bookie.close()
    assert await identity.delete_cookie(cluster.metadata, bookie.id)
