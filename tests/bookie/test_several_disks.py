"""Several disks of a bookie: which directory has a ledger, what a start refuses, and what a failing disk takes."""

import asyncio
import errno
import json
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from magnetar.bookie.format.mark import decode_cookie
from magnetar.bookie.holdings import read_holdings
from magnetar.bookie.inspect import journals
from magnetar.bookie.inspect.logs import EntryCopy, find_journal_copies
from magnetar.bookie.inspect.snapshot import list_ledgers_directories, snapshot_directory
from magnetar.bookie.registration import DiskState
from magnetar.bookie.server import Bookie
from magnetar.bookie.store import disk
from magnetar.bookie.store.directories import extend_generations, merge_generations
from magnetar.bookie.store.identity import accept_replaced_directory
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import BookieOperation, BookieRequestFlags, Status
from magnetar.metadata import paths, records
from magnetar.metadata.records import BookieRecord, find_ledgers_directory
from magnetar.metadata.store import get_record
from magnetar.proto.alarms import find_alarms
from magnetar.proto.errors import InvalidConfiguration, InvalidRequest, NotFound
from magnetar.runtime.access import LOCAL_PRINCIPAL
from magnetar.runtime.sim.disk import FileFault
from magnetar.runtime.sim.world import NodeCrashed
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import PeerCaller, a_record, payload_of
from tests.bookie.stores import DATA, NODE, payload

pytestmark = pytest.mark.run_by.with_args(with_cluster)

A, B, C, JOURNAL = "/disks/a", "/disks/b", "/disks/c", "/nvme/journal"
LEDGERS = range(12)
TWO = ((0, 2),)


async def start(cluster: Cluster, *ledgers: str, journal: str = JOURNAL) -> Bookie:
    return await cluster.start(ledgers=ledgers, journal=journal)


async def fill(cluster: Cluster, caller: PeerCaller, ledgers: range = LEDGERS, entries: int = 5) -> None:
    """Adds to each ledger, all of which are acknowledged."""
    for ledger in ledgers:
        if await cluster.metadata.get(paths.ledger(ledger)) is None:
            await cluster.metadata.put(paths.ledger(ledger), a_record(ledger))
        for entry in range(entries):
            assert (await caller.add(ledger, entry, payload(ledger, entry))).status is Status.OK, ledger


async def check_served(caller: PeerCaller, ledgers: range = LEDGERS, entries: int = 5) -> None:
    for ledger in ledgers:
        for entry in range(entries):
            head, frames = await caller.read(ledger, entry)
            assert head.status is Status.OK, (ledger, entry)
            assert payload_of(frames[0]) == payload(ledger, entry)


def of_directory(number: int, generations: records.LedgerGenerations = TWO) -> list[int]:
    return [ledger for ledger in LEDGERS if find_ledgers_directory(generations, ledger) == number]


async def registered(cluster: Cluster, bookie: Bookie) -> BookieRecord:
    found = await get_record(cluster.metadata, paths.bookie(bookie.id), BookieRecord)
    assert found is not None
    return found[0]


# ------------------------------------------------------------------------------------------ the map
def test_a_ledger_is_in_one_directory_for_ever_whatever_is_added_later() -> None:
    before = ((0, 1), (1000, 2))
    after = extend_generations(before, 3, upto=5000)
    assert after == ((0, 1), (1000, 2), (5001, 3))
    for ledger in range(5001):
        assert find_ledgers_directory(before, ledger) == find_ledgers_directory(after, ledger)
    assert {find_ledgers_directory(after, ledger) for ledger in range(1000)} == {0}
    assert {find_ledgers_directory(after, ledger) for ledger in range(5001, 5100)} == {0, 1, 2}
    assert extend_generations(after, 3, upto=9000) is after


def test_the_map_is_written_down_and_stays_the_same() -> None:
    """These are the directories of ledgers that exist on disks: no release may move them."""
    assert "".join(str(find_ledgers_directory(((0, 2),), ledger)) for ledger in range(40)) == MAP_OF_TWO
    assert "".join(str(find_ledgers_directory(((0, 5),), ledger)) for ledger in range(40)) == MAP_OF_FIVE


MAP_OF_TWO = "0100000001110111101101110010000111000001"
MAP_OF_FIVE = "0401222403220143023141202421241433033140"


@pytest.mark.parametrize("step", [1, 2, 3, 4, 10, 16, 64])
def test_ledgers_whose_ids_have_a_common_step_are_spread_over_the_directories(step: int) -> None:
    counts = Counter(find_ledgers_directory(((0, 4),), ledger) for ledger in range(0, 4000 * step, step))
    assert min(counts.values()) > 800


def test_a_map_that_contradicts_the_cookie_is_refused() -> None:
    assert merge_generations(((0, 1), (7, 2)), ((0, 1),)) == ((0, 1), (7, 2))
    assert merge_generations((), ((0, 2),)) == ((0, 2),)
    with pytest.raises(InvalidConfiguration, match="one of the two is of another bookie"):
        merge_generations(((0, 1), (7, 2)), ((0, 1), (8, 2)))


# ------------------------------------------------------------------------------------------ a start
async def test_entries_are_where_the_map_says_and_survive_a_power_loss(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    for each in bookie.directories:
        assert sorted(each.store.descriptors.ledger_ids()) == of_directory(each.number)
    assert of_directory(0)
    assert of_directory(1)
    bookie = await cluster.restart()
    await check_served(cluster.caller(bookie))
    found = await get_record(cluster.metadata, paths.cookie(bookie.id), records.CookieRecord)
    assert found is not None
    assert (found[0].ledgers, found[0].own_journal, len(found[0].more)) == (TWO, True, 1)
    assert (await registered(cluster, bookie)).ledgers == TWO


async def test_a_directory_that_is_added_takes_new_ledgers_and_moves_none(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    await fill(cluster, cluster.caller(bookie))
    await cluster.simulation.spawn(NODE, bookie.close())
    bookie = await start(cluster, DATA, B, journal="")
    caller = cluster.caller(bookie)
    await check_served(caller)
    assert sorted(bookie.first.store.descriptors.ledger_ids()) == list(LEDGERS)
    later = range(100, 120)
    await fill(cluster, caller, later)
    assert {find_ledgers_directory(((0, 1), (12, 2)), ledger) for ledger in later} == {0, 1}
    assert bookie.directories[1].store.descriptors.ledger_ids()
    bookie = await cluster.restart()
    await check_served(cluster.caller(bookie))
    await check_served(cluster.caller(bookie), later)


async def test_an_older_magnetar_refuses_a_bookie_with_several_directories(cluster: Cluster, /) -> None:
    await start(cluster, DATA, B, journal="")
    files = cluster.simulation.world(NODE).files
    for path in (f"{DATA}/cookie", f"{B}/cookie"):
        data = disk.read_file(files, path)
        assert data[8:10] == b"\x00\x02", "the version of the note"
        assert decode_cookie(data, path).bookie


async def refused(cluster: Cluster, verdict: str, *ledgers: str, journal: str = JOURNAL) -> str:
    with pytest.raises(InvalidConfiguration) as caught:
        await start(cluster, *ledgers, journal=journal)
    assert caught.value.fields.get("verdict") == verdict, str(caught.value)
    return str(caught.value)


async def test_directories_that_are_missing_reordered_exchanged_or_empty_are_refused(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    await cluster.simulation.spawn(NODE, bookie.close())
    assert "ledgers-1" in await refused(cluster, "MISSING", A)
    assert "journal" in await refused(cluster, "MISSING", A, B, journal="")
    assert "ledgers-1" in await refused(cluster, "REORDERED", B, A)
    assert "journal" in await refused(cluster, "REORDERED", A, JOURNAL, journal=B)
    assert "replace-directory" in await refused(cluster, "EMPTY", A, C)
    assert "replace-directory" in await refused(cluster, "EMPTY", DATA, B)
    assert "replace-directory" in await refused(cluster, "EMPTY", A, B, journal=C)
    await refused(cluster, "TWICE", A, A)
    await refused(cluster, "REORDERED", A, B, DATA)
    world = cluster.simulation.world(NODE)
    world.files.make_directories(f"{C}/photos")
    await refused(cluster, "OCCUPIED", A, B, C)
    await check_served(cluster.caller(await start(cluster, A, B)))


async def test_another_bookies_directory_is_refused_and_not_changed(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await cluster.simulation.spawn(NODE, bookie.close())
    other = replace(cluster.config, data="/data/other", journal="/nvme/other", ledgers=(C, "/disks/d"), port=3182)
    second = await cluster.simulation.spawn(
        NODE, Bookie.start(cluster.simulation.world(NODE), other, cluster.metadata)
    )
    await cluster.simulation.spawn(NODE, second.close())
    assert second.id in await refused(cluster, "FOREIGN", A, C)
    await start(cluster, A, B)


@pytest.mark.parametrize("ledgers", [(), (A, B)])
async def test_a_journal_moves_out_of_the_data_with_its_files_and_not_without(
    cluster: Cluster, /, ledgers: tuple[str, ...]
) -> None:
    bookie = await cluster.start(ledgers=ledgers, journal=f"{DATA}/journal/")  # where it is anyway
    await fill(cluster, cluster.caller(bookie))
    cluster.simulation.crash(NODE)
    for folder in ("", "/ledgers-1")[: len(bookie.directories)]:
        with pytest.raises(InvalidConfiguration, match="move all files from"):
            await cluster.start(journal=JOURNAL)
        files, old, new = cluster.simulation.world(NODE).files, f"{DATA}/journal{folder}", f"{JOURNAL}{folder}"
        files.make_directories(new)
        for name in files.list_directory(old):
            if name.endswith(".jnl"):
                files.rename(f"{old}/{name}", f"{new}/{name}")
        files.sync_directory(old)
        files.sync_directory(new)
    bookie = await cluster.start(journal=JOURNAL)
    await check_served(cluster.caller(bookie))
    await check_served(cluster.caller(await cluster.restart()))


@pytest.mark.parametrize("added", [False, True])
async def test_a_power_loss_at_any_operation_of_a_start_with_directories_costs_nothing(
    cluster: Cluster, /, added: bool
) -> None:
    """Of a first start, and of one that adds a directory: the next start goes on, and no ledger has moved."""
    if added:
        bookie = await cluster.start()
        await fill(cluster, cluster.caller(bookie), range(3))
        await cluster.simulation.spawn(NODE, bookie.close())
    device = cluster.simulation.node(NODE).disk
    ledgers = (DATA, B) if added else (A, B)
    journal = "" if added else JOURNAL
    whole = device.take_snapshot()
    stored = {path: await cluster.metadata.get(path) for path in await cookies(cluster)}
    for operation in range(1, 400):
        device.restore_snapshot(whole)
        whole = device.take_snapshot()
        await put_back(cluster, stored)
        cluster.simulation.crash_at(NODE, operation, power_loss=True)
        try:
            bookie = await start(cluster, *ledgers, journal=journal)
        except NodeCrashed:
            bookie = await start(cluster, *ledgers, journal=journal)
            assert not bookie.statistics()["limbo"], operation
            caller = cluster.caller(bookie)
            if added:
                await check_served(caller, range(3))
            await fill(cluster, caller, range(20, 24), 1)
            await cluster.simulation.spawn(NODE, bookie.close())
            continue
        break
    else:
        pytest.fail("the start has more operations")
    device.cancel_crash()
    assert operation > 50


async def cookies(cluster: Cluster) -> list[str]:
    return [paths.cookie(name) for name in await cluster.metadata.children(paths.COOKIES)]


async def put_back(cluster: Cluster, stored: dict[str, object]) -> None:
    for path in await cookies(cluster):
        if path not in stored:
            await cluster.metadata.delete(path)
    for path, node in stored.items():
        await cluster.metadata.put(path, node.value)  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ a failing disk
def fail(cluster: Cluster, where: str, kinds: tuple[str, ...] = ("fdatasync", "pwrite", "create"),
    number: int = errno.EIO) -> None:
    cluster.simulation.node(NODE).disk.faults = [FileFault(kind, where, number, times=-1) for kind in kinds]


async def let_fail(bookie: Bookie) -> None:
    """A checkpoint meets the fault."""
    with pytest.raises(OSError, match=r"\[Errno"):
        await bookie.directories[1].store.checkpoint()
    bookie.directories[1].upkeep.request_check()
    await asyncio.sleep(0.1)


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
async def test_a_failing_disk_takes_its_ledgers_and_not_the_bookie(cluster: Cluster, /, number: int) -> None:
    bookie = await start(cluster, A, B)
    caller = cluster.caller(bookie)
    await fill(cluster, caller)
    fail(cluster, B, number=number)
    await let_fail(bookie)
    for ledger in LEDGERS:
        wanted = Status.OK if ledger in of_directory(0) else Status.READ_ONLY
        assert (await caller.add(ledger, 5, payload(ledger, 5))).status is wanted
        assert (await caller.add(ledger, 6, payload(ledger, 6), recovery=True)).status is wanted
    await check_served(caller)
    record = await registered(cluster, bookie)
    assert (record.read_only, record.unwritable, record.failed) == (False, (1,), (1,))
    assert record.has_lost(of_directory(1)[0])
    assert not record.has_lost(of_directory(0)[0])
    counts = bookie.statistics()
    assert (counts["directories"], counts["directories_writable"], counts["directories_failed"]) == (2, 1, 1)
    assert counts["read_only"] == 0
    assert bookie.directories[1].upkeep.state is DiskState.FAILED
    ledger = of_directory(1)[0]
    head, _ = await caller.send(BookieOperation.READ_LAC, ledger, flags=BookieRequestFlags.FENCE)
    assert head.status is Status.OK, "a fence needs the journal alone"
    cluster.simulation.node(NODE).disk.faults = []
    bookie = await cluster.restart()
    assert not bookie.statistics()["limbo"]
    await check_served(cluster.caller(bookie))
    assert (await cluster.caller(bookie).add(ledger, 9, b"late")).status is Status.FENCED


async def test_nothing_of_a_directory_changes_after_its_first_failed_sync(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    device = cluster.simulation.node(NODE).disk
    device.faults = [FileFault("fdatasync", B, times=1)]
    await let_fail(bookie)
    changed: list[str] = []
    device.record = lambda operation: changed.append(f"{operation.kind} {operation.path}")
    with pytest.raises(OSError, match="not written any more"):
        await bookie.directories[1].store.checkpoint()
    await bookie.first.store.checkpoint()
    await cluster.simulation.spawn(NODE, bookie.close())
    device.record = None
    changing = ("pwrite", "rename", "remove", "truncate", "allocate", "create", "fdatasync", "sync_directory")
    assert [each for each in changed if each.startswith(changing) and f" {B}/" in each] == []
    assert [each for each in changed if each.startswith("pwrite") and f" {A}/" in each] != []


async def test_a_disk_that_is_gone_is_seen_without_any_add(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    await bookie.directories[1].store.checkpoint()
    device = cluster.simulation.node(NODE).disk
    device.faults = [FileFault("list", B, times=-1)]  # the reserve is measured by the logs that are there
    await asyncio.sleep(25)
    assert (await registered(cluster, bookie)).failed == (1,)
    running = {task.get_name() for task in asyncio.all_tasks()}
    assert running >= {"bookie-gc", "bookie-scrub", "bookie-upkeep", "bookie-upkeep-1"}
    assert not running & {"bookie-gc-1", "bookie-scrub-1", "bookie-mend-1"}


async def test_a_disk_that_hangs_and_returns_has_not_failed(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    delays = cluster.simulation.node(NODE).disk_delays
    delays.stall_rate, delays.stall_s = 1.0, 60.0
    hanging = asyncio.ensure_future(cluster.simulation.spawn(NODE, bookie.directories[1].store.checkpoint()))
    await asyncio.sleep(30)
    assert not hanging.done()
    assert (await registered(cluster, bookie)).failed == ()
    delays.stall_rate = 0.0
    await hanging
    assert (await registered(cluster, bookie)).failed == ()
    await fill(cluster, cluster.caller(bookie), entries=7)
    await check_served(cluster.caller(await cluster.restart()), entries=7)


async def test_adds_that_wait_for_room_on_a_failing_disk_are_answered(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    caller, ledger = cluster.caller(bookie), of_directory(1)[0]
    await cluster.metadata.put(paths.ledger(ledger), a_record(ledger))
    fail(cluster, f"{B}/entries", ("fdatasync",))  # not of the label, which comes first
    answers = await asyncio.gather(*[caller.add(ledger, entry, bytes(2000)) for entry in range(60)])
    statuses = Counter(each.status for each in answers)
    assert statuses.keys() == {Status.OK, Status.READ_ONLY}
    cluster.simulation.node(NODE).disk.faults = []
    await asyncio.sleep(2)  # the position of the journal is noted
    stored = [entry for entry, each in enumerate(answers) if each.status is Status.OK]
    caller = cluster.caller(await cluster.restart())
    for entry in stored:
        assert (await caller.read(ledger, entry))[0].status is Status.OK


async def test_a_failing_journal_disk_ends_the_process(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    caller = cluster.caller(bookie)
    await fill(cluster, caller)
    fail(cluster, JOURNAL)
    adding = asyncio.ensure_future(caller.add(0, 5, b"x"))
    await asyncio.wait([adding], timeout=20)
    assert not cluster.simulation.is_node_running(NODE)
    adding.cancel()
    cluster.simulation.node(NODE).disk.faults = []
    await check_served(cluster.caller(await cluster.start()))


async def test_a_full_disk_beside_an_empty_one_makes_its_own_ledgers_read_only(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    caller = cluster.caller(bookie)
    await fill(cluster, caller)
    fail(cluster, B, ("pwrite", "allocate"), errno.ENOSPC)
    with pytest.raises(disk.NoSpace):
        await bookie.directories[1].store.checkpoint()
    await asyncio.sleep(0.1)
    for ledger in LEDGERS:
        wanted = Status.OK if ledger in of_directory(0) else Status.READ_ONLY
        assert (await caller.add(ledger, 5, payload(ledger, 5))).status is wanted
    record = await registered(cluster, bookie)
    assert (record.read_only, record.unwritable, record.failed) == (False, (1,), ())
    assert not record.takes_adds_of(of_directory(1)[0])
    assert record.takes_adds_of(of_directory(0)[0])
    cluster.simulation.node(NODE).disk.faults = []
    await asyncio.sleep(30)
    assert (await registered(cluster, bookie)).unwritable == ()
    await fill(cluster, caller, entries=7)
    await check_served(cluster.caller(await cluster.restart()), entries=7)


async def test_a_full_journal_disk_makes_all_ledgers_read_only_until_it_has_room(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    caller = cluster.caller(bookie)
    await fill(cluster, caller)
    fail(cluster, JOURNAL, ("pwrite", "create", "allocate"), errno.ENOSPC)
    for ledger in LEDGERS:
        assert (await caller.add(ledger, 5, payload(ledger, 5))).status is Status.READ_ONLY
    await asyncio.sleep(1)
    assert (await registered(cluster, bookie)).read_only
    cluster.simulation.node(NODE).disk.faults = []
    await asyncio.sleep(30)
    assert not (await registered(cluster, bookie)).read_only
    await fill(cluster, caller, entries=7)
    await check_served(cluster.caller(await cluster.restart()), entries=7)


async def test_a_ledger_is_deleted_in_its_directory_and_what_is_absent_there_is_not(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    gone = [of_directory(0)[0], of_directory(1)[0]]
    for ledger in gone:
        await deletions.delete_ledgers(cluster.metadata, [ledger])
    for _ in range(2):
        await asyncio.sleep(1)
        for each in bookie.directories:
            await each.collector.run_pass()
    for each in bookie.directories:
        left = [ledger for ledger in of_directory(each.number) if ledger not in gone]
        assert sorted(each.store.descriptors.ledger_ids()) == left
        assert [ledger for ledger in gone if ledger in each.store.descriptors.tombstones] == [gone[each.number]]


async def test_a_replaced_directory_is_accepted_once_and_starts_in_limbo(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    for ledger in LEDGERS:
        await cluster.metadata.put(paths.ledger(ledger), a_record(ledger, bookie.id))
    await cluster.simulation.spawn(NODE, bookie.close())
    with pytest.raises(NotFound, match="ledgers-0, ledgers-1, journal"):
        await accept_replaced_directory(cluster.metadata, bookie.id, "ledgers-2")
    await accept_replaced_directory(cluster.metadata, bookie.id, "ledgers-1")
    bookie = await start(cluster, A, C)
    assert [each.limbo.limbo_upto >= 0 for each in bookie.directories] == [False, True]
    caller = cluster.caller(bookie)
    for ledger in LEDGERS:
        head, _ = await caller.read(ledger, 0)
        assert head.status is (Status.OK if ledger in of_directory(0) else Status.UNKNOWN), ledger
    await cluster.simulation.spawn(NODE, bookie.close())
    await refused(cluster, "EMPTY", A, "/disks/other")


async def test_a_bookie_starts_without_a_disk_that_cannot_be_read_and_the_disk_may_come_back(
    cluster: Cluster, /
) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    for ledger in LEDGERS:
        await cluster.metadata.put(paths.ledger(ledger), a_record(ledger, bookie.id))
    await cluster.simulation.spawn(NODE, bookie.close())
    fail(cluster, B, ("list", "open", "pread"))
    command = f"`magnetar bookies replace-directory {bookie.id} ledgers-1`"
    with pytest.raises(InvalidConfiguration, match=f"/disks/b .*{command}"):
        await start(cluster, A, B)
    assert "an empty directory of any disk" in await refused(cluster, "MISSING", A)
    await accept_replaced_directory(cluster.metadata, bookie.id, "ledgers-1")
    bookie = await start(cluster, A, f"{A}-beside")
    caller = cluster.caller(bookie)
    for ledger in LEDGERS:
        head, _ = await caller.read(ledger, 0)
        assert head.status is (Status.OK if ledger in of_directory(0) else Status.UNKNOWN), ledger
    moved = of_directory(1)[0]
    assert (await caller.add(moved, 5, payload(moved, 5), recovery=True)).status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.close())
    cluster.simulation.node(NODE).disk.faults = []
    bookie = await start(cluster, A, B)
    assert [each.limbo.limbo_upto >= 0 for each in bookie.directories] == [False, True], "it lacks what came meanwhile"
    assert (await cluster.caller(bookie).read(moved, 5))[0].status is not Status.NO_SUCH_ENTRY


# ------------------------------------------------------------------------------------------ operators
async def asked(bookie: Bookie, verb: str, **options: object) -> dict[str, Any]:
    answer = await bookie._answer_admin(json.dumps({"verb": verb, **options}).encode(), LOCAL_PRINCIPAL, True)
    return json.loads(answer)  # type: ignore[no-any-return]


async def test_an_operator_sees_all_directories_together_and_each_by_itself(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    for each in bookie.directories:
        await each.store.checkpoint()
    state = await asked(bookie, "state")
    assert state["ledgers"] == len(LEDGERS)
    assert [(each["path"], each["ledgers"]) for each in state["directories"]] == [
        (A, len(of_directory(0))), (B, len(of_directory(1))),
    ]  # fmt: skip
    plan = await asked(bookie, "gc-plan")
    assert len(plan["logs"]) == sum(len(each["logs"]) for each in plan["directories"]) == 2
    assert (await asked(bookie, "gc-start")) == {"started": True}
    async with asyncio.timeout(30):
        while (status := await asked(bookie, "gc-status"))["running"]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert status["last"]["error"] is None
    await fill(cluster, cluster.caller(bookie), entries=6)
    fail(cluster, B)
    await let_fail(bookie)
    state = await asked(bookie, "state")
    assert (state["disk"], state["readOnly"]) == ("failed", False)
    assert [each["disk"] for each in state["directories"]] == ["writable", "failed"]
    assert B in state["directories"][1]["failure"]
    row = {
        "bookie": bookie.id, "state": "writable", "freeBytes": 5, "totalBytes": 9, "directories": state["directories"],
    }  # fmt: skip
    (alarm,) = find_alarms([], (), [row], (), 0)
    assert (alarm.code, alarm.needed) == ("D04", True)
    assert B in alarm.text


async def test_the_holdings_of_a_stopped_bookie_are_those_of_all_its_directories(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie))
    await cluster.simulation.spawn(NODE, bookie.close())
    files = cluster.simulation.world(NODE).files
    held = read_holdings(files, DATA)
    assert [each.ledger_id for each in held.ledgers] == list(LEDGERS)
    assert (held.bookie, held.place, held.starts) == (bookie.id, f"{NODE}:{DATA}", 1)
    with pytest.raises(InvalidRequest, match="name its data directory"):
        read_holdings(files, B)


async def test_each_directory_can_be_inspected_and_the_data_says_where_they_are(cluster: Cluster, /) -> None:
    bookie = await start(cluster, A, B)
    await fill(cluster, cluster.caller(bookie), entries=1)
    files = cluster.simulation.world(NODE).files
    assert list_ledgers_directories(files, DATA) == (A, B)
    with pytest.raises(NotFound, match=f"its ledgers are in {A}, {B}"):
        snapshot_directory(files, DATA)
    for number, path in enumerate((A, B)):
        found = snapshot_directory(files, path)
        assert found.damages == []
        assert journals.list_journal_numbers(found) != []
        assert list(journals.find_missing_journals(found)) == []
        for ledger in of_directory(number):
            assert [each.entry for each in find_journal_copies(found, ledger) if isinstance(each, EntryCopy)] == [0]
