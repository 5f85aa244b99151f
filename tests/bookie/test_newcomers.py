"""A ledger begins at a bookie only under the key that the metadata has of it, and is told only to who has the key."""

import asyncio

import pytest

from magnetar.bookie import service
from magnetar.bookie.server import Bookie
from magnetar.ledger.peer_format import BookieOperation, BookieRequestFlags, Status
from magnetar.metadata import paths, records
from magnetar.metadata.store import VersionedValue, put_record
from magnetar.proto.errors import Unavailable
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import OTHER_KEY, PeerCaller, a_record, stored_entry
from tests.bookie.test_admin import ask

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def a_cluster(cluster: Cluster, **settings: int) -> tuple[Bookie, PeerCaller]:
    """Ledger 7 was made, ids up to 99 were given out, nothing was said to the bookie."""
    bookie = await cluster.start(**settings)
    await put_record(cluster.metadata, paths.LEDGER_IDS, records.CounterRecord(next=100))
    await cluster.metadata.put(paths.ledger(7), a_record(7, bookie.id))
    return bookie, cluster.caller(bookie)


@pytest.mark.parametrize(("ledger", "key"), [(7, OTHER_KEY), (8, OTHER_KEY), (100, OTHER_KEY), (1 << 62, OTHER_KEY)])
async def test_a_stranger_takes_no_id_with_an_add_a_fence_or_a_lac(
    cluster: Cluster, /, ledger: int, key: bytes
) -> None:
    bookie, caller = await a_cluster(cluster)
    stored = (stored_entry(ledger, 0, b"mine"),)
    for answer in (
        await caller.send(BookieOperation.ADD, ledger, 0, key=key, frames=stored),
        await caller.send(BookieOperation.ADD, ledger, 0, key=key, flags=BookieRequestFlags.RECOVERY, frames=stored),
        await caller.send(BookieOperation.WRITE_LAC, ledger, 5, key=key),
        await caller.send(BookieOperation.READ_LAC, ledger, key=key, flags=BookieRequestFlags.FENCE),
        await caller.send(BookieOperation.READ, ledger, 0, key=key, flags=BookieRequestFlags.FENCE),
    ):
        assert answer[0].status is Status.UNAUTHORIZED
    assert await caller.add_many(ledger, {0: b"mine", 1: b"too"}, key=key) == [Status.UNAUTHORIZED] * 2
    assert len(bookie.store.descriptors) == 0
    if ledger != 7:
        await cluster.metadata.put(paths.ledger(ledger), a_record(ledger, bookie.id))
    assert (await caller.add(ledger, 0, b"its owner's")).status is Status.OK, "and it was not refused for ever"


async def test_the_first_requests_of_a_ledger_wait_for_one_look_at_the_metadata_and_are_done_in_order(
    cluster: Cluster, /
) -> None:
    bookie, caller = await a_cluster(cluster)
    parts = [dict.fromkeys(range(10 * at, 10 * at + 10), b"x") for at in range(5)]
    adds = [asyncio.ensure_future(caller.add_many(7, part)) for part in parts]
    await asyncio.sleep(0)
    fence = caller.send(BookieOperation.READ_LAC, 7, flags=BookieRequestFlags.FENCE)
    assert await asyncio.gather(*adds, fence) == [*[[Status.OK] * 10] * 5, await fence]
    assert (await fence)[0].entry == 49, "the fence came after the adds"
    assert (await caller.add(7, 50, b"x")).status is Status.FENCED
    assert bookie.statistics()["newcomers_asked"] == 1
    assert bookie.statistics()["newcomers_waiting_bytes"] == 0


async def test_while_the_metadata_cannot_be_asked_a_new_ledger_is_busy_and_others_go_on(cluster: Cluster, /) -> None:
    bookie, caller = await a_cluster(cluster)
    assert (await caller.add(7, 0, b"x")).status is Status.OK
    await cluster.metadata.put(paths.ledger(9), a_record(9, bookie.id))
    metadata = bookie._registration.metadata
    real = metadata.get

    async def unreachable(path: str) -> VersionedValue | None:
        raise Unavailable("no connection")

    metadata.get = unreachable  # type: ignore[method-assign]
    assert (await caller.add(9, 0, b"x")).status is Status.BUSY
    assert (await caller.add(7, 1, b"x")).status is Status.OK
    metadata.get = real  # type: ignore[method-assign]
    assert (await caller.add(9, 0, b"x")).status is Status.OK


def test_a_flood_of_unknown_ids_is_bounded_and_leaves_room_for_a_ledger_that_begins() -> None:
    async def main(cluster: Cluster) -> None:
        bookie, caller = await a_cluster(cluster, held_bytes_max=200 << 10)
        stranger = cluster.caller(bookie)
        metadata = bookie._registration.metadata
        real = metadata.get
        under_way = most = 0

        async def slow(path: str) -> VersionedValue | None:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.1)
            under_way -= 1
            return await real(path)

        metadata.get = slow  # type: ignore[method-assign]
        flood = [stranger.send(BookieOperation.WRITE_LAC, 1000 + each, 0) for each in range(1000)]
        await asyncio.sleep(0.01)
        assert bookie.statistics()["newcomers_waiting_bytes"] <= 100 << 10
        assert (await caller.add(7, 0, b"x")).status is Status.OK
        answers = [(await each)[0].status for each in flood]
        assert set(answers) == {Status.UNAUTHORIZED, Status.BUSY}
        assert most <= service.LEDGER_LOOKUPS_MAX

    with_cluster(main)


async def test_without_the_key_nothing_of_a_ledger_is_told(cluster: Cluster, /) -> None:
    _, caller = await a_cluster(cluster)
    assert (await caller.add(7, 0, b"secret")).status is Status.OK
    for head, frames in (
        await caller.read(7, 0, key=OTHER_KEY),
        await caller.read(7, 0, key=OTHER_KEY, fence=True),
        await caller.send(BookieOperation.READ_LAC, 7, key=OTHER_KEY, count=0),
        await caller.send(BookieOperation.READ_LAC, 7, key=OTHER_KEY, count=1000),
        await caller.send(BookieOperation.READ_LAC, 7, key=OTHER_KEY, flags=BookieRequestFlags.FENCE),
        await caller.send(BookieOperation.HELD, 7, 0, key=OTHER_KEY, count=10),
        await caller.send(BookieOperation.WRITE_LAC, 7, 0, key=OTHER_KEY),
    ):
        assert (head.status, head.lac, frames) == (Status.UNAUTHORIZED, -1, [])
    assert (await caller.add(7, 1, b"not fenced")).status is Status.OK


@pytest.mark.parametrize("verb", ["accept-loss", "gc-start", "repair-enable", "depart"])
async def test_what_changes_something_is_done_for_the_bookies_own_machine_alone(cluster: Cluster, /, verb: str) -> None:
    _, caller = await a_cluster(cluster)
    stranger = PeerCaller(caller.peer)
    refused = await ask(stranger, verb)
    assert refused["error"] == "Unauthorized"
    assert "own machine" in refused["message"]
    assert (await ask(caller, verb)).get("error") != "Unauthorized"
    assert "error" not in await ask(stranger, "state"), "who only asks is answered"
