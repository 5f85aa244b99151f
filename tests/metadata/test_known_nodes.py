"""What was read lately: never older than a commit that was answered, and bounded."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata.sqlite import CACHED_READS_PER_TURN, IN_MEMORY_PATH, SqliteStore
from magnetar.metadata.store import NODE_ABSENT, CheckNodeVersion, DeleteNode, PutNode, VersionedValue
from magnetar.metadata.tree import StoredNode
from magnetar.metadata.tree_core import CACHED_NODES_BYTES_MAX, NodeCache
from magnetar.metadata.tree_core import CACHED_VALUE_BYTES_MAX as VALUE_BYTES_MAX
from magnetar.proto.errors import MagnetarError, SessionExpired, Unavailable
from magnetar.runtime.process import make_system_world


@pytest.fixture
async def store() -> AsyncIterator[SqliteStore]:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    yield store
    await store.close()


def counted(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the store's worker from now on."""
    calls: list[Any] = []
    run = store._worker.run

    def counting(function: Any, *arguments: Any) -> Any:
        calls.append(function)
        return run(function, *arguments)

    monkeypatch.setattr(store._worker, "run", counting)
    return calls


async def test_what_was_read_is_read_again_without_a_thread(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = store.new_session(), store.new_session()
    await session.put("/a", b"1")
    store._known.discard("/a")
    calls = counted(store, monkeypatch)
    for each in (session, other, session):
        assert await each.get("/a") == VersionedValue(b"1", 0)
        assert await each.get("/none") is None
    assert len(calls) == 2
    assert store.statistics()["known_nodes"] == 2


async def test_what_a_commit_changed_stays_known_and_is_what_the_tree_has(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = store.new_session()
    await session.commit([PutNode("/a", b"1"), PutNode("/d", b"1")])
    store._known.discard("/d")
    for path in ("/a", "/b", "/c"):
        await session.get(path)
    many = [
        PutNode("/a", b"2"),
        PutNode("/a", bytearray(b"3")),
        PutNode("/b", b"", ephemeral=True),
        PutNode("/c", b"x"),
    ]
    await session.commit([*many, CheckNodeVersion("/a", 2), DeleteNode("/c"), PutNode("/d", b"unknown")])
    calls = counted(store, monkeypatch)
    known = [await store.get(path) for path in ("/a", "/b", "/c")]
    assert len(calls) == 1, "one that is deleted is read again"
    assert known == [StoredNode(b"3", 2, False), StoredNode(b"", 0, True), None]
    assert known == [await store._worker.run(store._tree.get, path) for path in ("/a", "/b", "/c")]
    assert "/d" not in store._known.nodes


async def test_what_a_commit_makes_is_known(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    session = store.new_session()
    await session.commit(
        [PutNode("/a", b"1", NODE_ABSENT), PutNode("/b", b"2", ephemeral=True), PutNode("/c", b"3"), DeleteNode("/c")]
    )
    calls = counted(store, monkeypatch)
    assert await store.get("/a") == StoredNode(b"1", 0, False)
    assert await store.get("/b") == StoredNode(b"2", 0, True)
    assert not calls
    assert await store.get("/c") is None
    assert len(calls) == 1, "one that is deleted is read again"
    await session.close()
    assert await store.get("/b") is None, "it ends with its session"


async def test_a_caller_that_reads_many_known_nodes_lets_others_have_their_turn(store: SqliteStore) -> None:
    session, turns = store.new_session(), 0
    await session.put("/a", b"1")
    await session.get("/a")

    async def beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(beside())
    for _ in range(10 * CACHED_READS_PER_TURN):
        assert await session.get("/a") == VersionedValue(b"1", 0)
    assert turns >= 9
    other.cancel()


async def test_a_commit_is_seen_by_whoever_asks_after_its_answer(store: SqliteStore) -> None:
    session, other = store.new_session(), store.new_session()
    await session.put("/a", b"1")
    assert await other.get("/a") == VersionedValue(b"1", 0)
    assert await other.get("/b") is None
    await session.put("/a", b"2")
    await session.put("/b", b"", ephemeral=True)
    assert await other.get("/a") == VersionedValue(b"2", 1)
    assert await other.get("/b") == VersionedValue(b"", 0)
    await session.delete("/a")
    assert await other.get("/a") is None
    await session.close()
    assert await other.get("/b") is None


async def test_what_is_known_is_not_told_to_a_session_that_ended_nor_by_a_closed_store(store: SqliteStore) -> None:
    session, other = store.new_session(), store.new_session()
    await session.put("/a", b"1")
    assert await other.get("/a") is not None
    await session.close()
    with pytest.raises(SessionExpired):
        await session.get("/a")
    await store.close()
    with pytest.raises(SessionExpired):
        await other.get("/a")
    with pytest.raises(Unavailable):
        await store.get("/a")


@pytest.mark.parametrize("seed", range(5))
async def test_no_reader_gets_what_is_older_than_a_commit_that_was_answered(store: SqliteStore, seed: int) -> None:
    """Writers and readers of the same nodes, on the real thread: each read is between what was answered when it was
    asked and what was asked when it was answered."""
    rng, session = random.Random(seed), store.new_session()
    asked, answered = dict.fromkeys("abc", -1), dict.fromkeys("abc", -1)
    reads = 0

    async def write(name: str) -> None:
        for _ in range(60):
            asked[name] += 1
            version = await session.put(f"/{name}", b"%d" % asked[name])
            assert version == asked[name]
            answered[name] = version
            await asyncio.sleep(rng.choice((0, 0, 0.0005)))

    async def read() -> None:
        nonlocal reads
        while writing:
            name = rng.choice("abc")
            before = answered[name]
            found = await session.get(f"/{name}")
            version = -1 if found is None else found.version
            assert before <= version <= asked[name]
            assert found is None or found.value == b"%d" % version
            reads += 1
            await asyncio.sleep(rng.choice((0, 0, 0.0002)))

    writing = True
    readers = [asyncio.create_task(read()) for _ in range(5)]
    try:
        await asyncio.gather(*(write(name) for name in "abc"))
    finally:
        writing = False
    await asyncio.gather(*readers)
    assert reads > 100


async def test_a_commit_that_is_refused_changes_nothing_that_is_known(store: SqliteStore) -> None:
    session = store.new_session()
    await session.put("/a", b"1")
    assert await session.get("/a") == VersionedValue(b"1", 0)
    with pytest.raises(MagnetarError):
        await session.put("/a", b"2", 7)
    assert await session.get("/a") == VersionedValue(b"1", 0)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 900)), max_size=60))
def test_what_is_known_is_bounded_and_the_longest_unread_goes_first(steps: list[tuple[str, int | None]]) -> None:
    known: NodeCache[StoredNode] = NodeCache(2500)
    model: dict[str, int] = {}
    for path, size in steps:
        if size is None:
            if path in known.nodes:
                node = known.get(path)
                assert node is not None
                assert len(node.value) == model[path]
                model[path] = model.pop(path)
            else:
                known.discard(path)
        else:
            known.add(path, StoredNode(bytes(size), 0, False))
            model.pop(path, None)
            model[path] = size
        known.check()
        left = [each for each in model if each in known.nodes]
        assert left == list(model)[len(model) - len(left) :], "the longest unread went first"
        model = {each: model[each] for each in left}


def test_a_large_value_is_not_kept() -> None:
    known: NodeCache[StoredNode] = NodeCache()
    known.add("/a", StoredNode(b"1", 0, False))
    known.add("/a", StoredNode(bytes(VALUE_BYTES_MAX + 1), 1, False))
    assert "/a" not in known.nodes
    assert known.bytes == 0
    assert VALUE_BYTES_MAX * 2 < CACHED_NODES_BYTES_MAX
