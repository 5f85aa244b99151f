"""The table of bookies: whom it chooses, and what it does with changes and damage in the metadata."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from magnetar.ledger.bookies import Bookies
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, RacksRecord, encode_record
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, put_record
from magnetar.proto.errors import NotEnoughBookies, SessionExpired, Unavailable
from magnetar.runtime.process import make_system_world
from tests.ledger.conftest import QUICK


def name(number: int) -> str:
    return str(uuid.UUID(int=number))


@pytest_asyncio.fixture
async def metadata() -> AsyncIterator[MetadataStore]:
    store = await SqliteStore.open(make_system_world(seed=1), ":memory:")
    session = store.new_session()
    yield session
    await session.close()
    await store.close()


@pytest_asyncio.fixture
async def bookies(metadata: MetadataStore) -> AsyncIterator[Bookies]:
    table = Bookies(make_system_world(seed=1), metadata, QUICK)
    yield table
    await table.close()


async def register(
    metadata: MetadataStore, number: int, *, rack: str = "/a", read_only: bool = False, process: str = ""
) -> None:
    record = BookieRecord(
        bookie=name(number), endpoint="127.0.0.1:1", rack=rack, read_only=read_only, process=process
    )
    await metadata.put(paths.bookie(name(number)), encode_record(record, paths.bookie(name(number))))


async def test_distinct_racks_come_first_and_read_only_bookies_never(metadata: MetadataStore, bookies: Bookies) -> None:
    for number, rack in enumerate(("/a", "/a", "/a", "/a", "/b", "/c")):
        await register(metadata, number, rack=rack)
    await register(metadata, 9, rack="/d", read_only=True)
    await bookies.wait_bookies_listed()
    for _ in range(20):
        chosen = bookies.choose_bookies(3)
        assert {name(4), name(5)} < set(chosen)
        assert len(set(bookies.choose_bookies(6))) == 6
    with pytest.raises(NotEnoughBookies) as caught:
        bookies.choose_bookies(7)
    assert caught.value.fields == {"wanted": "7", "available": "6"}
    assert name(4) not in bookies.choose_bookies(3, exclude=[name(4)])


async def test_the_mapping_in_the_metadata_is_above_the_racks_that_bookies_say(
    metadata: MetadataStore, bookies: Bookies
) -> None:
    for number in range(4):
        await register(metadata, number)
    await bookies.wait_bookies_listed()
    await metadata.put(paths.RACKS, encode_record(RacksRecord(racks={name(3): "/b"}), paths.RACKS))
    await bookies.refresh_bookie_list()
    assert bookies.find_rack(name(3)) == "/b"
    assert all(name(3) in bookies.choose_bookies(2) for _ in range(20))
    assert bookies.choose_bookies(1, exclude=[name(0)]) == [name(3)]
    await metadata.put(paths.RACKS, b"damage")
    await bookies.refresh_bookie_list()
    assert bookies.find_rack(name(3)) == "/b"
    await metadata.delete(paths.RACKS)
    await bookies.refresh_bookie_list()
    assert bookies.find_rack(name(3)) == "/a"


async def test_a_replacement_keeps_the_racks_of_the_ensemble_apart(metadata: MetadataStore, bookies: Bookies) -> None:
    for number, rack in enumerate(("/a", "/b", "/c", "/a", "/b", "/c")):
        await register(metadata, number, rack=rack)
    await bookies.wait_bookies_listed()
    ensemble = [name(0), name(1), name(2)]
    await metadata.delete(paths.bookie(name(1)))
    await bookies.refresh_bookie_list()
    for _ in range(10):
        assert bookies.choose_replacements(ensemble, [1], 3) == {1: name(4)}
        assert set(bookies.choose_replacements(ensemble, [0, 2], 3).values()) == {name(3), name(5)}
    bookies.record_failure(name(4))
    assert bookies.choose_replacements(ensemble, [1], 3)[1] in (name(3), name(5))
    bookies.record_failure(name(3))
    bookies.record_failure(name(5))
    assert bookies.choose_replacements(ensemble, [1], 3) == {}


@pytest.mark.parametrize("left", [True, False], ids=["it was away", "its session had not ended"])
async def test_a_bookie_that_restarts_at_its_address_is_chosen_at_once(
    metadata: MetadataStore, bookies: Bookies, *, left: bool
) -> None:
    for number in range(3):
        await register(metadata, number, process="first")
    await bookies.wait_bookies_listed()
    ensemble, failed = [name(1), name(2)], name(0)
    bookies.record_failure(failed)
    await register(metadata, 0, process="first", rack="/b")
    await bookies.refresh_bookie_list()
    assert bookies.choose_replacements(ensemble, [1], 2) == {}, (
        "the process that failed told something, and is the same"
    )
    if left:
        await metadata.delete(paths.bookie(failed))
        await bookies.refresh_bookie_list()
        assert bookies.choose_replacements(ensemble, [1], 2) == {}
    await register(metadata, 0, process="second")
    await bookies.refresh_bookie_list()
    assert bookies.choose_replacements(ensemble, [1], 2) == {1: failed}
    assert not bookies.fault_weights()
    bookies.record_failure(failed)
    assert bookies.choose_replacements(ensemble, [1], 2) == {}, "the new one fails too"


async def test_too_few_racks_are_told_once_or_refused_as_configured(
    metadata: MetadataStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        await register(metadata, number)
    for enforce in (False, True):
        config = replace(QUICK, min_racks_per_write_quorum=2, enforce_min_racks=enforce)
        table = Bookies(make_system_world(seed=1), metadata, config)
        await table.wait_bookies_listed()
        if enforce:
            with pytest.raises(NotEnoughBookies, match=r"2 racks .*on too few racks: /a; start bookies"):
                table.choose_bookies(3, write_quorum=3)
            assert len(table.choose_bookies(1, [name(0)])) == 1, "recovery is not held up by racks"
        else:
            assert len(table.choose_bookies(3, write_quorum=3)) == len(table.choose_bookies(2, write_quorum=2)) + 1
            assert caplog.text.count("fewer than 2 racks") == 1
        await table.close()


async def test_the_choice_spreads(metadata: MetadataStore, bookies: Bookies) -> None:
    for number in range(6):
        await register(metadata, number)
    await bookies.wait_bookies_listed()
    chosen = [bookie for _ in range(200) for bookie in bookies.choose_bookies(3)]
    assert all(60 < chosen.count(name(number)) < 140 for number in range(6))


async def test_a_bookie_that_failed_is_chosen_only_when_the_others_do_not_suffice(
    metadata: MetadataStore, bookies: Bookies
) -> None:
    for number in range(4):
        await register(metadata, number)
    await bookies.wait_bookies_listed()
    bookies.record_failure(name(0))
    assert all(name(0) not in bookies.choose_bookies(3) for _ in range(20))
    assert name(0) in bookies.choose_bookies(4)
    assert bookies.quarantined_bookies() == {name(0)}


async def test_a_bookie_that_has_just_registered_is_found_although_the_watch_is_behind(
    metadata: MetadataStore, bookies: Bookies
) -> None:
    await bookies.wait_bookies_listed()
    await register(metadata, 1)
    assert await bookies.choose_bookies_after_listing(1) == [name(1)]
    await metadata.delete(paths.bookie(name(1)))
    with pytest.raises(NotEnoughBookies):
        await bookies.choose_bookies_after_listing(2)


async def test_a_damaged_registration_costs_that_bookie_only(metadata: MetadataStore, bookies: Bookies) -> None:
    await register(metadata, 1)
    await metadata.put(paths.bookie(name(2)), b"not a record")
    await put_record(metadata, paths.bookie("no-uuid"), BookieRecord(bookie="no-uuid", endpoint="127.0.0.1:1"))
    await put_record(metadata, paths.bookie(name(3)), BookieRecord(bookie=name(3), endpoint="nowhere"))
    await bookies.wait_bookies_listed()
    assert bookies.choose_bookies(1) == [name(1)]
    with pytest.raises(NotEnoughBookies):
        bookies.choose_bookies(2)


async def test_a_request_to_a_bookie_nobody_knows_fails_at_once(bookies: Bookies) -> None:
    await bookies.wait_bookies_listed()
    with pytest.raises(Unavailable, match="not registered"):
        await bookies.request(name(7), b"", timeout_s=60)
    assert await bookies.ask(name(7), b"", timeout_s=60) is None


async def test_a_lost_session_is_told_instead_of_waiting_for_ever(metadata: MetadataStore, bookies: Bookies) -> None:
    await metadata.close()
    async with asyncio.timeout(30):
        with pytest.raises(SessionExpired):
            await bookies.wait_bookies_listed()


async def test_a_closed_table_says_so(bookies: Bookies) -> None:
    await bookies.close()
    with pytest.raises(Unavailable, match="closed"):
        await bookies.wait_bookies_listed()


@pytest.mark.parametrize("leaving", [False, True])
async def test_what_a_table_reads_does_not_grow_with_the_bookies_that_start_or_end_together(
    metadata: MetadataStore, monkeypatch: pytest.MonkeyPatch, leaving: bool
) -> None:
    """A thousand bookies before two thousand tables: each registration was a read of each table."""
    count, reads = 400, 0

    async def counted(asked: Any, *of: Any) -> Any:
        nonlocal reads
        reads += 1
        return await asked(*of)

    for each in range(count if leaving else 1):
        await register(metadata, each)
    bookies = Bookies(make_system_world(seed=1), metadata, QUICK)
    await bookies.wait_bookies_listed()
    for method in ("read_nodes", "children"):  # by a service each is one request
        monkeypatch.setattr(metadata, method, partial(counted, getattr(metadata, method)))
    for each in range(1, count):
        if leaving:
            await metadata.delete(paths.bookie(name(each)))
        else:
            await register(metadata, each)
    left = 1 if leaving else count
    for _ in range(100):
        await asyncio.sleep(0.05)
        if await bookies.count_healthy_bookies(0) == left:
            break
    assert await bookies.count_healthy_bookies(0) == left
    assert reads < 30
    await bookies.close()
