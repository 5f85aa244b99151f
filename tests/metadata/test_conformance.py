"""What metadata/store.py promises, asked of every store: SQLite in process, remote and simulated; ZooKeeper; etcd."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata.server import MetadataService
from magnetar.metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    READS_SPREAD_ABOVE,
    READS_SPREAD_S_MAX,
    VALUE_BYTES_MAX,
    CheckNodeVersion,
    DeleteNode,
    MetadataStore,
    NodeChanged,
    PutNode,
    VersionedValue,
    WatchReset,
    allocate_ids,
    choose_read_delay,
    group_changes,
    iterate_nodes,
    read_ledger_ids,
    update_node,
)
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import (
    BadVersion,
    InvalidName,
    InvalidRequest,
    MessageTooLarge,
    NodeExists,
    NoNode,
    SessionExpired,
)
from tests.metadata.stores import EXPIRING_S, Backend, EtcdBackend, RemoteBackend, SqliteBackend, conformance


async def _take(watch: AsyncIterator[NodeChanged | WatchReset], count: int) -> list[NodeChanged | WatchReset]:
    return [await anext(watch) for _ in range(count)]


async def _wait_deleted(store: MetadataStore, path: str, after_revision: int) -> None:
    async for change in store.watch(path, after_revision):
        if change.version == NODE_ABSENT if isinstance(change, NodeChanged) else await store.get(path) is None:
            return


@conformance
async def test_versions_start_at_0_grow_by_one_and_start_again_after_a_delete(backend: Backend) -> None:
    store = await backend.store()
    assert await store.get("/a") is None
    assert [await store.put("/a", b"x"), await store.put("/a", b"y", 0), await store.put("/a", b"z")] == [0, 1, 2]
    assert await store.get("/a") == VersionedValue(b"z", 2)
    await store.delete("/a", 2)
    assert await store.get("/a") is None
    assert await store.put("/a", b"", NODE_ABSENT) == 0


@conformance
async def test_a_wrong_expectation_is_definite_and_names_what_was_found(backend: Backend) -> None:
    store = await backend.store()
    await store.put("/a", b"x")
    with pytest.raises(NodeExists) as exists:
        await store.put("/a", b"y", NODE_ABSENT)
    with pytest.raises(NoNode) as none:
        await store.put("/b", b"y", 3)
    with pytest.raises(BadVersion) as bad:
        await store.delete("/a", 7)
    assert type(bad.value) is BadVersion
    assert bad.value.definite
    assert bad.value.fields == {"path": "/a", "expected": "7", "found": "0"}
    assert exists.value.fields["found"] == "0"
    assert none.value.fields == {"path": "/b", "expected": "3", "found": "-1"}
    assert await store.get("/a") == VersionedValue(b"x", 0)
    await store.delete("/nothing", ANY_VERSION)


@conformance
async def test_a_commit_is_all_or_nothing_and_its_operations_see_each_other(backend: Backend) -> None:
    store = await backend.store()
    assert await store.commit(
        [PutNode("/a", b"1"), PutNode("/a", b"2", 0), CheckNodeVersion("/a", 1), DeleteNode("/b")]
    ) == [0, 1, 1, -1]
    before = await store.revision()
    for refused in (
        [PutNode("/a", b"3"), PutNode("/c", b""), CheckNodeVersion("/a", 9)],
        [DeleteNode("/a"), PutNode("/c", b"", 0)],
        [PutNode("/c", b"", NODE_ABSENT), PutNode("/c", b"", NODE_ABSENT)],
    ):
        with pytest.raises(BadVersion):
            await store.commit(refused)
    assert await store.get("/a") == VersionedValue(b"2", 1)
    assert await store.children("/") == ["a"]
    assert await store.revision() == before
    assert await store.commit([CheckNodeVersion("/zero", NODE_ABSENT), PutNode("/c", b"", NODE_ABSENT)]) == [-1, 0]


@conformance
async def test_children_are_the_next_segments_sorted(backend: Backend) -> None:
    store = await backend.store()
    paths = ["/t/b/1", "/t/b/2/x", "/t/b-c", "/t/a/1", "/t/c", "/tt/no", "/t0", "/t/é %2F/1"]
    await store.commit([PutNode(path, b"") for path in paths])
    assert await store.children("/t") == ["a", "b", "b-c", "c", "é %2F"]
    assert await store.children("/t/b") == ["1", "2"]
    assert await store.children("/t/c") == []
    assert await store.children("/") == ["t", "t0", "tt"]


@conformance
async def test_many_writers_of_one_counter_lose_no_update(backend: Backend) -> None:
    stores = [await backend.store() for _ in range(3)]

    def increment(current: VersionedValue | None) -> bytes:
        return str(int(current.value if current else b"0") + 1).encode()

    await asyncio.gather(*[update_node(stores[i % 3], "/n", increment) for i in range(30)])
    assert await stores[0].get("/n") == VersionedValue(b"30", 29)
    blocks = await asyncio.gather(*[allocate_ids(stores[i % 3], 5) for i in range(12)])
    assert sorted(id_ for block in blocks for id_ in block) == list(range(1, 61))


@conformance
async def test_bad_paths_and_values_are_refused_before_anything_happens(backend: Backend) -> None:
    store = await backend.store()
    for path in ("", "a", "/", "//", "/a/", "/a//b", "/a/..", "/./a", "/a\n", "/\x00", "/" + "x" * 5000, "/\ud800"):
        with pytest.raises(InvalidName):
            await store.put(path, b"")
        with pytest.raises(InvalidName):
            await store.get(path)
        if path != "/":
            with pytest.raises(InvalidName):
                await store.children(path)
            with pytest.raises(InvalidName):
                store.watch(path, 0)
    with pytest.raises(MessageTooLarge):
        await store.put("/a", bytes(VALUE_BYTES_MAX + 1))
    with pytest.raises(MessageTooLarge):
        await store.commit([PutNode(f"/a{i}", bytes(VALUE_BYTES_MAX)) for i in range(8)])
    with pytest.raises(InvalidRequest):
        await store.commit([])
    with pytest.raises(InvalidRequest):
        await store.commit([CheckNodeVersion("/a", NODE_ABSENT)] * 1025)
    with pytest.raises(InvalidRequest):
        await store.put("/a", b"", -3)
    assert await store.children("/") == []
    assert await store.put("/a", bytes(VALUE_BYTES_MAX)) == 0
    assert await store.get("/a") == VersionedValue(bytes(VALUE_BYTES_MAX), 0)


@conformance
async def test_ephemerals_go_with_their_session_and_only_they(backend: Backend) -> None:
    mine, other = await backend.store(), await backend.store()
    await mine.commit(
        [PutNode("/e/1", b"", ephemeral=True), PutNode("/e/2", b"", ephemeral=True), PutNode("/stays", b"")]
    )
    await mine.put("/e/3", b"", ephemeral=True)
    await mine.put("/e/4", b"", ephemeral=True)
    await other.put("/e/3", b"taken over", ephemeral=True)
    await other.put("/e/4", b"kept by a put that is not ephemeral")
    await other.put("/e/5", b"", ephemeral=True)
    await mine.close()
    assert await other.children("/e") == ["3", "4", "5"]
    assert await other.children("/") == ["e", "stays"]


@conformance
async def test_a_session_without_a_sign_of_life_expires_with_its_ephemerals(backend: Backend) -> None:
    mine, other = await backend.store(EXPIRING_S), await backend.store()
    await mine.commit([PutNode("/e", b"", ephemeral=True), PutNode("/stays", b"")])
    seen = await other.revision()
    await backend.vanish(mine)
    assert await other.get("/e") == VersionedValue(b"", 0)
    await _wait_deleted(other, "/e", seen)
    assert await other.get("/e") is None
    assert await other.get("/stays") == VersionedValue(b"", 0)


@conformance
async def test_a_closed_store_says_session_expired_to_everything(backend: Backend) -> None:
    store, other = await backend.store(), await backend.store()
    watch = store.watch("/", await store.revision())
    waiting = asyncio.ensure_future(anext(watch))
    lost = asyncio.ensure_future(store.wait_session_lost())
    await store.put("/a", b"")
    begun = await other.revision()
    assert await waiting == (NodeChanged("/a", 0, begun) if backend.keeps_history else WatchReset(begun))
    waiting = asyncio.ensure_future(anext(watch))
    await store.close()
    await lost
    asked = (store.get("/a"), store.children("/"), store.put("/a", b""), store.revision())
    for call in (waiting, *asked, *([store.measure_disk()] if isinstance(backend, SqliteBackend) else [])):
        with pytest.raises(SessionExpired):
            await call
    await store.close()
    assert await other.get("/a") == VersionedValue(b"", 0)


@conformance
async def test_a_watch_gives_every_change_below_its_prefix_in_order(backend: Backend) -> None:
    store, other = await backend.store(), await backend.store()
    watch = store.watch("/w", await store.revision())
    first = asyncio.ensure_future(anext(watch))
    await store.put("/w", b"")
    begun = await other.revision()
    assert await first == (NodeChanged("/w", 0, begun) if backend.keeps_history else WatchReset(begun))
    first = asyncio.ensure_future(anext(watch))
    await other.commit([PutNode("/w/a", b""), PutNode("/ww", b""), PutNode("/w/a", b""), PutNode("/x/w", b"")])
    r1 = await other.revision()
    await store.delete("/w/a")
    r2 = await other.revision()
    await store.delete("/w/nothing")
    await other.put("/w/b/c", b"")
    r3 = await other.revision()
    await store.put("/w", b"")
    r4 = await other.revision()
    expected = [
        NodeChanged("/w/a", 0, r1), NodeChanged("/w/a", 1, r1),
        NodeChanged("/w/a", -1, r2),
        NodeChanged("/w/b/c", 0, r3),
        NodeChanged("/w", 1, r4),
    ]  # fmt: skip
    assert begun < r1 < r2 < r3 < r4
    assert [await first, *await _take(watch, 4)] == expected
    for seen in (begun, r1, r2, r2 + 1, r3):  # a watch resumes after any revision: without a gap, or it says so
        rest = [change for change in expected if change.revision > seen]
        resumed = other.watch("/w", seen)
        if backend.keeps_history:
            assert await _take(resumed, len(rest)) == rest
        else:
            assert await anext(resumed) == WatchReset(r4)


@conformance
async def test_a_watch_is_told_when_its_history_is_gone(backend: Backend) -> None:
    store = await backend.store()
    start = await store.revision()
    if isinstance(backend, EtcdBackend):  # whose history is older than this store
        await backend.lose_history(store)
    if backend.keeps_history:
        assert await anext(store.watch("/", start - 1)) == WatchReset(start)
    assert await anext(store.watch("/", start + 1000)) == WatchReset(start)
    await store.put("/w", b"")
    await backend.lose_history(store)
    watch = store.watch("/", start)
    assert await anext(watch) == WatchReset(await store.revision())
    await store.put("/w/after", b"")
    assert await anext(watch) == NodeChanged("/w/after", 0, await store.revision())


@conformance
async def test_a_read_sees_every_commit_that_was_answered_before_it(backend: Backend) -> None:
    store, other = await backend.store(), await backend.store()

    async def write_and_read(i: int) -> None:
        version = await store.put(f"/r/{i % 4}", str(i).encode())
        revision = await other.revision()
        found = await other.get(f"/r/{i % 4}")
        assert found is not None
        assert found.version >= version
        assert await store.revision() >= revision

    await asyncio.gather(*[write_and_read(i) for i in range(40)])


@conformance
async def test_a_store_measures_the_disk_of_the_tree_if_it_knows_it(backend: Backend) -> None:
    found = await (await backend.store()).measure_disk()
    if isinstance(backend, SqliteBackend | RemoteBackend):
        assert found is not None
        assert 0 < found[1] <= found[0]
        assert (found.backup_ms, found.backup_every_ms, found.backup_failure) == (0, 0, "")
    else:
        assert found is None, "on ZooKeeper and etcd, and in memory"


@conformance
async def test_pages_of_a_folder_have_each_node_once_in_order_and_no_folder(backend: Backend) -> None:
    store = await backend.store()
    names = ["a", "a b", "a-b", "a.", "b", "ä", "10", "9", "a-bc"]
    for name in names:
        await store.put(f"/f/{name}", b"")
    for path in ("/f/a/below", "/f/a-/only/deep", "/f/b/x/y", "/f", "/f0", "/f-", "/g/a"):
        await store.put(path, b"")
    for limit in (1, 2, 4, 100):
        found: list[str] = []
        more = True
        while more:
            page = await store.list_nodes("/f", found[-1] if found else "", limit)
            assert page.names or not page.more, "a page that is empty is the last"
            found, more = found + page.names, page.more
        assert found == sorted(names), limit
    assert (await store.list_nodes("/f", "a-b")).names == ["a-bc", "a.", "b", "ä"]
    assert await store.list_nodes("/nothing") == ([], False)
    assert [name async for part in iterate_nodes(store, "/f", "a-b", 2) for name in part] == ["a-bc", "a.", "b", "ä"]
    assert (await store.list_nodes("/")).names == ["f", "f-", "f0"]
    with pytest.raises(InvalidName):
        await store.list_nodes("no/path")


@conformance
async def test_a_node_written_twice_in_a_commit_is_on_one_page_once(backend: Backend) -> None:
    """An etcd keeps it at another key."""
    store = await backend.store()
    for name in ("a", "b", "c"):
        await store.put(f"/f/{name}", b"")
    await store.commit([PutNode("/f/b", b"1"), PutNode("/f/b", b"2")])
    await store.commit([DeleteNode("/f/b"), PutNode("/f/b", b"3")])
    found = [part async for part in iterate_nodes(store, "/f", limit=1)]
    assert found == [["a"], ["b"], ["c"]]


@conformance
async def test_a_listing_in_pages_misses_nothing_that_was_there_before_and_stays(backend: Backend) -> None:
    store = await backend.store()
    for number in range(0, 20, 2):
        await store.put(f"/f/{number:02}", b"")
    found: list[str] = []
    async for names in iterate_nodes(store, "/f", limit=3):
        found += names
        await store.put(f"/f/{len(found) + 1:02}", b"")
        await store.delete(f"/f/{18:02}")
    assert {f"{number:02}" for number in range(0, 18, 2)} <= set(found)
    assert found == sorted(set(found))


@conformance
async def test_ids_of_ledgers_are_read_and_other_names_left_out(backend: Backend) -> None:
    store = await backend.store()
    for name in (f"{7:020}", f"{2**40:020}", "x", f"{9:019}"):
        await store.put(f"/ledgers/{name}", b"")
    assert list(await read_ledger_ids(store)) == [7, 2**40]


@conformance
async def test_the_nodes_of_a_folder_are_read_as_each_is_alone(backend: Backend) -> None:
    store = await backend.store()
    for number in range(150):  # more than one round of a store that reads each by itself
        await store.put(f"/f/{number:03}", b"%d" % number, ephemeral=number % 2 == 0)
    await store.put("/f/003", b"again")
    await store.delete("/f/004")
    await store.commit([PutNode("/f/005", b"1"), PutNode("/f/005", b"twice")])  # an etcd keeps it at another key
    await store.put("/f/b/below", b"")
    await store.put("/f/large", bytes(1 << 20))
    found = await store.read_nodes("/f")
    assert list(found) == sorted({f"{number:03}" for number in range(150)} - {"004"} | {"large"})
    for name, node in found.items():
        assert await store.get(f"/f/{name}") == node, name
    some = await store.read_nodes("/f", ["003", "004", "005", "b", "none", "large"])
    assert some == {name: found[name] for name in ("003", "005", "large")}
    assert await store.read_nodes("/f", []) == await store.read_nodes("/nothing") == {}
    with pytest.raises(InvalidName):
        await store.read_nodes("no/path")


async def test_nodes_are_read_from_a_service_that_answers_their_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = RemoteBackend(tmp_path)
    honest = MetadataService.children

    async def answer_names(self: MetadataService, request: wire.GetRequest, context: Any) -> wire.Names:
        return await honest(self, wire.GetRequest(path=request.path), context)

    try:
        store = await backend.store()
        await store.put("/f/a", b"1")
        await store.put("/f/b/below", b"2")
        monkeypatch.setattr(MetadataService, "children", answer_names)
        assert await store.read_nodes("/f") == {"a": VersionedValue(b"1", 0)}
        assert await store.read_nodes("/f", ["a", "b", "c"]) == {"a": VersionedValue(b"1", 0)}
    finally:
        await backend.close()


async def test_changes_that_come_together_are_reported_together_and_the_first_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("magnetar.metadata.store.CHANGES_PAUSE_S", 0.01)
    reported: asyncio.Queue[NodeChanged | WatchReset] = asyncio.Queue()

    async def watch() -> AsyncIterator[NodeChanged | WatchReset]:
        while True:
            yield await reported.get()

    groups = group_changes(watch())
    reported.put_nowait(NodeChanged("/a", 0, 1))
    assert await anext(groups) == {"/a"}
    for number in range(1000):
        reported.put_nowait(NodeChanged(f"/{number % 10}", number, number))
    assert await anext(groups) == {f"/{number}" for number in range(10)}
    reported.put_nowait(NodeChanged("/b", 0, 1))
    reported.put_nowait(WatchReset(2))
    assert await anext(groups) == {"/b"}, "what came before the reset is reported"
    assert [each async for each in groups] == []


async def test_what_changes_while_a_watcher_waits_to_read_is_read_with_it_and_the_end_ends_the_wait() -> None:
    reported: asyncio.Queue[NodeChanged | WatchReset] = asyncio.Queue()
    delays = iter([0.01, 3600.0])

    async def watch() -> AsyncIterator[NodeChanged | WatchReset]:
        while True:
            yield await reported.get()

    def choose_delay() -> float:
        reported.put_nowait(NodeChanged("/later", 0, 2))
        return next(delays)

    groups = group_changes(watch(), choose_delay)
    reported.put_nowait(NodeChanged("/a", 0, 1))
    assert await anext(groups) == {"/a", "/later"}
    reported.put_nowait(NodeChanged("/b", 0, 3))
    reported.put_nowait(WatchReset(4))
    assert await anext(groups) == {"/b"}, "the watch has ended: nothing more comes"
    assert [each async for each in groups] == []


def test_watchers_of_a_large_cluster_read_within_a_moment_and_those_of_a_small_one_at_once() -> None:
    rng = random.Random(1)
    assert {choose_read_delay(each, rng) for each in range(READS_SPREAD_ABOVE + 1)} == {0.0}
    for processes, longest_s in ((21, 0.021), (1_000, 1.0), (1_000_000, READS_SPREAD_S_MAX)):
        delays = [choose_read_delay(processes, rng) for _ in range(1_000)]
        assert min(delays) < 0.1 * longest_s
        assert 0.9 * longest_s < max(delays) <= longest_s


async def test_a_watch_that_fails_fails_the_groups_of_its_changes() -> None:
    async def watch() -> AsyncIterator[NodeChanged | WatchReset]:
        yield NodeChanged("/a", 0, 1)
        raise SessionExpired("over")

    groups = group_changes(watch())
    assert await anext(groups) == {"/a"}
    with pytest.raises(SessionExpired):
        await anext(groups)
