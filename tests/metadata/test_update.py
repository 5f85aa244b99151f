"""The read-check-write loop: no lost update, and an unknown outcome decided by content."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import msgspec
import pytest

from magnetar.metadata import paths
from magnetar.metadata.records import (
    CLUSTER_FORMAT,
    BookieRecord,
    BrokerRecord,
    ClusterRecord,
    CounterRecord,
    DamagedRecord,
    encode_record,
)
from magnetar.metadata.sqlite import IN_MEMORY_PATH, SqliteStore
from magnetar.metadata.store import (
    NO_SPACE_ATTEMPTS_MAX,
    NO_SPACE_FIELD,
    CommitOperation,
    MetadataStore,
    NodeUpdate,
    PutNode,
    VersionedValue,
    allocate_ids,
    ensure_cluster_record,
    ensure_id_counter,
    finish_upgrade,
    get_record,
    put_record,
    read_cluster_format,
    update_node,
    update_nodes,
    update_record,
)
from magnetar.proto.errors import (
    BadVersion,
    ConnectionLost,
    NotEnoughBookies,
    OutcomeUnknown,
    SessionExpired,
    TimedOut,
    Unavailable,
)
from magnetar.runtime.process import make_system_world
from tests.metadata.stores import Forgetful


@pytest.fixture
async def store() -> AsyncIterator[MetadataStore]:
    sqlite = await SqliteStore.open(make_system_world(1), IN_MEMORY_PATH)
    yield sqlite.new_session()
    await sqlite.close()


def _join(member: str, calls: list[VersionedValue | None] | None = None):  # type: ignore[no-untyped-def]
    def transform(current: VersionedValue | None) -> bytes | None:
        if calls is not None:
            calls.append(current)
        members = current.value.decode().split() if current else []
        return None if member in members else " ".join([*members, member]).encode()

    return transform


@pytest.mark.parametrize("faults", list(itertools.product(["applied", "dropped", "ok"], repeat=3)), ids=" ".join)
async def test_an_update_whose_answers_are_lost_happens_exactly_once(
    store: MetadataStore, faults: tuple[str, ...]
) -> None:
    await store.put("/members", b"a")
    forgetful = Forgetful(store, faults)
    assert await update_node(forgetful, "/members", _join("b")) == VersionedValue(b"a b", 1)
    assert await store.get("/members") == VersionedValue(b"a b", 1)
    written = [fault for fault in faults if fault != "dropped"]
    assert forgetful.commits == (faults.index(written[0]) + 1 if written else 4)


@pytest.mark.parametrize("faults", list(itertools.product(["applied", "dropped", "ok"], repeat=4)), ids=" ".join)
async def test_ids_are_never_given_twice_whatever_answers_are_lost(
    store: MetadataStore, faults: tuple[str, ...]
) -> None:
    lossy, other = Forgetful(store, faults), Forgetful(store, faults[::-1])
    blocks = await asyncio.gather(*[allocate_ids(s, 3) for _ in range(4) for s in (lossy, store, other)])
    taken = [id_ for block in blocks for id_ in block]
    assert len(set(taken)) == len(taken) == 36
    assert min(taken) >= 1


@pytest.mark.parametrize("faults", list(itertools.product(["applied", "dropped", "ok"], repeat=3)), ids=" ".join)
async def test_changes_together_happen_all_or_not_at_all_and_exactly_once(
    store: MetadataStore, faults: tuple[str, ...]
) -> None:
    await store.put("/members", b"a")
    await store.put("/has-it", b"b")
    forgetful = Forgetful(store, faults)
    changes = [
        NodeUpdate("/members", _join("b")),
        NodeUpdate("/made", _join("b"), absent=True),
        NodeUpdate("/has-it", _join("b")),
    ]
    written = [VersionedValue(b"a b", 1), VersionedValue(b"b", 0), VersionedValue(b"b", 0)]
    assert await update_nodes(forgetful, changes) == written
    assert [await store.get(each.path) for each in changes] == written
    commits = forgetful.commits
    assert await update_nodes(forgetful, [each._replace(absent=False) for each in changes]) == written
    assert forgetful.commits == commits, "nothing to do, nothing written"


@pytest.mark.parametrize("other", ["/members", "/has-it"])
async def test_a_node_that_stays_is_the_one_that_was_read_when_the_others_change(
    store: MetadataStore, other: str
) -> None:
    """Otherwise what was decided by it would be written although it is not so any more."""
    await store.put("/members", b"a")
    await store.put("/has-it", b"b")
    seen: list[VersionedValue | None] = []

    class Contended(Forgetful):
        async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
            if not self.commits:
                await self._store.put(other, b"c")
            return await super().commit(operations)

    await update_nodes(
        Contended(store, []), [NodeUpdate("/has-it", _join("b", seen)), NodeUpdate("/members", _join("b", seen))]
    )
    assert len(seen) == 4, "it was all read again"
    at = await store.get("/has-it")
    assert at == (VersionedValue(b"c b", 2) if other == "/has-it" else VersionedValue(b"b", 0))


async def test_a_change_that_gives_up_ends_those_with_it(store: MetadataStore) -> None:
    def refuse(_: VersionedValue | None) -> bytes:
        raise NotEnoughBookies("3 are needed")

    with pytest.raises(NotEnoughBookies):
        await update_nodes(store, [NodeUpdate("/m", _join("b")), NodeUpdate("/n", refuse)])
    assert await store.get("/m") is None


async def test_the_transform_sees_its_own_write_after_an_unknown_outcome(store: MetadataStore) -> None:
    calls: list[VersionedValue | None] = []
    await update_node(Forgetful(store, ["applied"]), "/m", _join("a", calls))
    assert calls == [None, VersionedValue(b"a", 0)]


async def test_nothing_is_written_when_there_is_nothing_to_do(store: MetadataStore) -> None:
    await store.put("/m", b"a")
    before = await store.revision()
    assert await update_node(store, "/m", _join("a")) == VersionedValue(b"a", 0)
    assert await update_node(store, "/m", lambda current: current and current.value) == VersionedValue(b"a", 0)
    assert await update_node(store, "/none", lambda _: None) is None
    assert await store.revision() == before


async def test_a_transform_that_gives_up_is_not_asked_again(store: MetadataStore) -> None:
    """Also when its error could be retried: that is for the caller to decide."""
    calls = 0

    def refuse(_: VersionedValue | None) -> bytes:
        nonlocal calls
        calls += 1
        raise NotEnoughBookies("3 are needed")

    with pytest.raises(NotEnoughBookies):
        await update_node(store, "/m", refuse)
    assert calls == 1


async def test_the_error_is_definite_only_when_no_attempt_was_unknown(store: MetadataStore) -> None:
    await store.put("/m", b"")
    counter = itertools.count()

    class Contended(Forgetful):
        async def get(self, path: str) -> VersionedValue | None:
            found = await super().get(path)
            await store.put(path, str(next(counter)).encode())  # somebody else is always faster
            return found

    with pytest.raises(BadVersion):
        await update_node(Contended(store, []), "/m", _join("a"), attempts_max=3)
    with pytest.raises(OutcomeUnknown):
        await update_node(Contended(store, ["dropped"]), "/m", _join("a"), attempts_max=3)
    with pytest.raises(ConnectionLost):
        await update_node(Forgetful(store, ["dropped"] * 3), "/m", _join("a"), attempts_max=3)


async def test_a_store_that_never_answers_is_timed_out(store: MetadataStore) -> None:
    class Silent(Forgetful):
        async def get(self, path: str) -> VersionedValue | None:
            await asyncio.Event().wait()
            raise AssertionError

    with pytest.raises(TimedOut):
        await update_node(Silent(store, []), "/m", _join("a"), deadline_s=0.01)


async def test_an_update_of_a_full_store_ends_with_the_reason_and_one_of_another_that_refuses_goes_on(
    store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.metadata.store.ERROR_PAUSE_S_MAX", 0.0)

    class Refusing(Forgetful):
        fields: ClassVar[dict[str, str]] = {}

        async def commit(self, operations: Sequence[CommitOperation]) -> list[int]:
            self.commits += 1
            raise Unavailable("nothing was written", **self.fields)

    class Full(Refusing):
        fields: ClassVar[dict[str, str]] = {NO_SPACE_FIELD: "disk"}

    for refusing, attempts in ((Full(store, []), NO_SPACE_ATTEMPTS_MAX), (Refusing(store, []), 20)):
        with pytest.raises(Unavailable, match="nothing was written"):
            await update_node(refusing, "/m", _join("a"), attempts_max=20)
        assert refusing.commits == attempts


async def test_a_lost_session_is_raised_at_once(store: MetadataStore) -> None:
    await store.close()
    with pytest.raises(SessionExpired):
        await update_node(store, "/m", _join("a"))


async def test_records_are_read_written_and_changed_with_their_versions(store: MetadataStore) -> None:
    assert await get_record(store, "/n", CounterRecord) is None
    assert await put_record(store, "/n", CounterRecord(next=1)) == 0
    changed = await update_record(store, "/n", CounterRecord, lambda c: CounterRecord(next=c.next + 1) if c else None)
    assert changed == (CounterRecord(next=2), 1)
    assert await get_record(store, "/n", CounterRecord) == (CounterRecord(next=2), 1)
    with pytest.raises(DamagedRecord, match="/n: a CounterRecord, not a ClusterRecord"):
        await get_record(store, "/n", ClusterRecord)
    with pytest.raises(DamagedRecord):
        await update_record(store, "/n", ClusterRecord, lambda c: c)


async def test_a_cluster_is_made_once(store: MetadataStore) -> None:
    made = await asyncio.gather(
        *[ensure_cluster_record(Forgetful(store, ["applied"]), random.Random(i)) for i in range(5)]
    )
    assert len({cluster.instance for cluster in made}) == 1
    assert len(made[0].instance) == 32
    assert await ensure_cluster_record(store, random.Random(99)) == made[0]


async def test_a_counter_of_ids_is_begun_once_and_never_set_back(store: MetadataStore) -> None:
    await asyncio.gather(*[ensure_id_counter(store) for _ in range(3)])
    assert await allocate_ids(store, 2) == range(1, 3)
    await ensure_id_counter(store)
    assert await allocate_ids(store, 2) == range(3, 5)


async def test_an_upgrade_is_finished_when_no_older_process_is_registered(store: MetadataStore) -> None:
    older = encode_record(ClusterRecord(instance="c0ffee"), paths.CLUSTER, cluster_format=1)
    await store.put(paths.CLUSTER, older)
    await put_record(store, paths.broker("old"), BrokerRecord(name="old", endpoint="a:1"))
    bookie = BookieRecord(bookie="b", endpoint="b:1", version="0.1.0")
    await put_record(store, paths.bookie("b"), bookie)
    await put_record(store, paths.broker("new"), BrokerRecord(name="new", endpoint="a:2", format=CLUSTER_FORMAT))
    told = ["broker old (of a version that does not say it)", "bookie b (0.1.0)"]
    assert await finish_upgrade(store) == (1, 1, told)
    await store.delete(paths.broker("old"))
    await put_record(store, paths.bookie("b"), msgspec.structs.replace(bookie, format=CLUSTER_FORMAT))
    assert await finish_upgrade(store, dry_run=True) == (1, 1, [])
    assert await read_cluster_format(store) == 1
    assert await finish_upgrade(store) == (1, CLUSTER_FORMAT, [])
    node = await store.get(paths.CLUSTER)
    assert node is not None
    assert node.value == encode_record(ClusterRecord(instance="c0ffee", format=CLUSTER_FORMAT), paths.CLUSTER)
    assert await finish_upgrade(store) == (CLUSTER_FORMAT, CLUSTER_FORMAT, [])


async def test_an_older_process_that_registers_while_the_upgrade_is_finished_is_named(
    store: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put(paths.CLUSTER, encode_record(ClusterRecord(instance="c0ffee"), paths.CLUSTER, cluster_format=1))
    commit = store.commit

    async def commit_late(operations: Sequence[CommitOperation]) -> list[int]:
        if operations[0].path == paths.CLUSTER:
            old = BrokerRecord(name="old", endpoint="a:1", version="0.1.0")
            await commit([PutNode(paths.broker("old"), encode_record(old, paths.broker("old")))])
        return await commit(operations)

    monkeypatch.setattr(store, "commit", commit_late)
    assert await finish_upgrade(store) == (1, CLUSTER_FORMAT, ["broker old (0.1.0)"])
    assert await finish_upgrade(store) == (CLUSTER_FORMAT, CLUSTER_FORMAT, ["broker old (0.1.0)"])
