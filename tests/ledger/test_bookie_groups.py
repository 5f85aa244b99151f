"""Ledgers keep to the groups of bookies that their namespace asks for: when they are made, when their ensemble changes,
when they are recovered and when lost copies are made again."""

import logging
import random
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from magnetar.admin import AdminClient
from magnetar.asyncio import Client
from magnetar.bookie.server import BookieConfig
from magnetar.ledger.bookies import Bookies
from magnetar.ledger.placement_core import (
    ANY_GROUP,
    GROUPS_PROPERTY,
    BookieCandidate,
    BookieGroups,
    ChosenBookies,
    PlacementFailure,
    RackRule,
    choose_bookies_of_groups,
    decode_bookie_groups,
)
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, LedgerRecord, encode_record
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, get_readable_record
from magnetar.proto.errors import InvalidConfiguration, InvalidRequest, NotEnoughBookies
from magnetar.proto.policies import Policies, check_policies
from magnetar.runtime.process import make_system_world
from tests.bookie.maintenance.copies import Deployment, with_deployment
from tests.ledger.conftest import QUICK
from tests.support.cluster import cluster

FAST = BookieGroups(("fast",), ("slow",))
B = [str(uuid.UUID(int=number)) for number in range(6)]


# ------------------------------------------------------------------------------------------------ the choice
@st.composite
def candidates(draw: st.DrawFn) -> list[BookieCandidate]:
    return [
        BookieCandidate(
            f"b{number}", draw(st.sampled_from(("/a", "/b", "/c"))), 0, draw(st.booleans()),
            draw(st.sampled_from(("", "fast", "slow", "other"))),
        )
        for number in range(draw(st.integers(0, 9)))
    ]  # fmt: skip


@given(candidates(), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 1 << 20))
def test_only_bookies_of_the_groups_are_chosen_and_secondary_ones_only_where_primary_ones_are_too_few(
    found: list[BookieCandidate], count: int, racks_min: int, enforce: bool, seed: int
) -> None:
    rng, group_of = random.Random(seed), {each.bookie: each.group for each in found}
    rule = RackRule(racks_min, enforce)
    chosen = choose_bookies_of_groups(found, FAST, count, rng=rng, write_quorum=count, rule=rule)
    usable = [each for each in found if each.group in ("fast", "slow")]
    if isinstance(chosen, PlacementFailure):
        assert len(usable) < count or enforce
        return
    groups = [group_of[each] for each in chosen.bookies]
    assert set(groups) <= {"fast", "slow"}
    assert len(set(chosen.bookies)) == count
    well = sum(each.group == "fast" and not each.quarantined for each in found)
    others = sum(each.group == "slow" and not each.quarantined for each in found)
    if not enforce and well + others >= count:
        assert groups.count("slow") == max(0, count - well)


def test_an_enforced_rule_of_racks_takes_secondary_bookies_before_it_takes_none() -> None:
    found = [BookieCandidate(f"fast{n}", "/a", group="fast") for n in range(3)]
    found.append(BookieCandidate("slow", "/b", group="slow"))
    rng = random.Random(1)
    rule = RackRule(2, True)
    chosen = choose_bookies_of_groups(found, FAST, 2, rng=rng, write_quorum=2, rule=rule)
    assert isinstance(chosen, ChosenBookies)
    assert "slow" in chosen.bookies
    alone = choose_bookies_of_groups(found, BookieGroups(("fast",)), 2, rng=rng, write_quorum=2, rule=rule)
    assert alone is PlacementFailure.RACKS


def test_the_groups_are_read_back_from_the_properties_of_a_ledger() -> None:
    for groups in (ANY_GROUP, BookieGroups(("a",)), FAST, BookieGroups(("a", "b"), ("c", "d"))):
        assert decode_bookie_groups({"topic": "t", **groups.encode()}) == groups
    assert ANY_GROUP.encode() == {}, "the record of a ledger without groups is as before"
    assert decode_bookie_groups({}) == ANY_GROUP


def test_names_of_groups_that_mean_nothing_are_refused() -> None:
    for wrong in ("", "a,b", "a;b", "x" * 65, "a b"):
        with pytest.raises(InvalidRequest, match="a group of bookies is a name"):
            check_policies(Policies(primary_bookie_groups=(wrong,)))
    with pytest.raises(InvalidRequest, match="named once"):
        check_policies(Policies(primary_bookie_groups=("a",), secondary_bookie_groups=("a",)))
    with pytest.raises(InvalidRequest, match="needs primary_bookie_groups"):
        check_policies(Policies(secondary_bookie_groups=("a",)))
    with pytest.raises(InvalidConfiguration, match="a group of bookies is a name"):
        BookieConfig(data="/d", group="a b")


# ------------------------------------------------------------------------------------------------ the table
@pytest_asyncio.fixture
async def metadata() -> AsyncIterator[MetadataStore]:
    store = await SqliteStore.open(make_system_world(seed=1), ":memory:")
    session = store.new_session()
    yield session
    await session.close()
    await store.close()


@pytest_asyncio.fixture
async def bookies(metadata: MetadataStore) -> AsyncIterator[Bookies]:
    for number, group in enumerate(("fast", "fast", "fast", "slow", "", "")):
        record = BookieRecord(bookie=B[number], endpoint="127.0.0.1:1", group=group)
        await metadata.put(paths.bookie(record.bookie), encode_record(record, paths.bookie(record.bookie)))
    table = Bookies(make_system_world(seed=1), metadata, QUICK)
    await table.wait_bookies_listed()
    yield table
    await table.close()


async def test_a_ledger_that_asks_for_more_than_its_groups_have_is_not_made(bookies: Bookies) -> None:
    assert set(bookies.choose_bookies(3, groups=FAST)) == {B[0], B[1], B[2]}
    assert set(bookies.choose_bookies(4, groups=FAST)) == {B[0], B[1], B[2], B[3]}
    with pytest.raises(NotEnoughBookies, match="5 writable bookies of the groups fast, slow are needed, 4 are"):
        bookies.choose_bookies(5, groups=FAST)
    assert await bookies.count_healthy_bookies(5, FAST) == 4
    bookies.record_failure(B[0])
    assert await bookies.count_healthy_bookies(4, FAST) == 3
    assert set(bookies.choose_bookies(3, groups=FAST)) == {B[1], B[2], B[3]}


async def test_another_ensemble_keeps_to_the_groups_and_the_ledger_ends_rather_than_leave_them(
    bookies: Bookies,
) -> None:
    for _ in range(10):
        assert bookies.choose_replacements([B[0], B[1]], [0], 2, groups=FAST) == {0: B[2]}
    assert bookies.choose_replacements([B[0], B[1], B[2]], [0], 3, groups=FAST) == {0: B[3]}
    assert bookies.choose_replacements([B[0], B[1], B[2], B[3]], [0], 4, groups=FAST) == {}


async def test_a_lost_copy_goes_to_another_group_only_if_no_bookie_of_the_groups_can_take_it_and_it_is_said(
    bookies: Bookies, caplog: pytest.LogCaptureFixture
) -> None:
    assert bookies.choose_repair_targets([B[0], B[1], B[2]], [0], 3, [B[0]], groups=FAST) == {0: B[3]}
    assert bookies.choose_recovery_bookie([B[0], B[1], B[2]], 1, FAST) == B[3]
    assert not caplog.records
    found = bookies.choose_repair_targets([B[0], B[1], B[2]], [0], 3, [B[0], B[3]], groups=FAST)
    assert found[0] in (B[4], B[5])
    assert f"a lost copy is made to bookie {found[0]}, which is of no group of its ledger (fast, slow)" in caplog.text
    assert bookies.choose_recovery_bookie([B[0], B[1], B[2], B[3]], 1, FAST) in (B[4], B[5])
    assert caplog.text.count("of no group of its ledger") == 2


# ------------------------------------------------------------------------------------------------ auto-recovery
def test_auto_recovery_makes_copies_within_the_group_and_elsewhere_only_when_the_group_is_used_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(deployment: Deployment) -> None:
        for number in range(4):
            await deployment.start(f"fast{number}", group="fast")
        fast = {each.id for name, each in deployment.bookies.items() if name.startswith("fast")}
        client = deployment.client()
        writer = await client.create(ensemble_size=3, write_quorum=3, ack_quorum=2, groups=BookieGroups(("fast",)))
        for _ in range(5):
            await writer.append(b"entry")
        await writer.close()
        await client.close()
        assert set(writer.record.fragments[0].bookies) <= fast
        gone = await deployment.kill(deployment.node_of(writer.record.fragments[0].bookies[0]))
        record = await deployment.until_whole(writer.ledger_id, gone)
        assert set(record.fragments[0].bookies) == fast - {gone}
        assert "of no group" not in caplog.text
        again = await deployment.kill(deployment.node_of(record.fragments[0].bookies[0]))
        record = await deployment.until_whole(writer.ledger_id, again)
        assert len(set(record.fragments[0].bookies) & fast) == 2
        assert "a lost copy is made to bookie" in caplog.text

    with caplog.at_level(logging.WARNING):
        with_deployment(main, 3)


# ------------------------------------------------------------------------------------------------ through a broker
async def test_the_ledgers_of_a_namespace_are_on_its_groups_those_of_subscriptions_too(tmp_path: Path) -> None:
    async with cluster(tmp_path, bookies=2, brokers=0) as running:
        ours = {(await running.add_bookie("fast")).id for _ in range(2)}
        broker = await running.add_broker(ensemble_size=2, write_quorum=2, ack_quorum=2)
        async with AdminClient(f"magnetar://{broker.endpoint}") as admin, Client(
            f"magnetar://{broker.endpoint}"
        ) as client:
            assert {each.id for each in await admin.bookies() if each.group == "fast"} == ours
            await admin.set_namespace_policies("public/default", Policies(primary_bookie_groups=("fast",)))
            consumer, producer = await client.subscribe("t", "s"), await client.create_producer("t")
            for _ in range(3):
                await producer.send(b"x")
                await consumer.acknowledge(await consumer.receive())
            records = await ledgers(running.store.new_session())
            assert records
            for each in records:
                assert each.properties[GROUPS_PROPERTY] == "fast;"
                assert set(each.fragments[0].bookies) == ours, each.properties
            await admin.remove_namespace_policies("public/default", "primary_bookie_groups")
            await admin.unload_topic("t")
            await producer.send(b"y")
            last = max(await ledgers(running.store.new_session()), key=lambda each: each.ledger_id)
            assert GROUPS_PROPERTY not in last.properties


async def ledgers(store: MetadataStore) -> list[LedgerRecord]:
    found = [await get_readable_record(store, f"{paths.LEDGERS}/{name}", LedgerRecord)
             for name in await store.children(paths.LEDGERS)]  # fmt: skip
    return [each[0] for each in found if each is not None]


def test_a_record_of_an_older_bookie_has_no_group() -> None:
    assert msgspec.json.decode(b'{"bookie":"b","endpoint":"h:1"}', type=BookieRecord).group == ""
