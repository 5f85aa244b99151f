"""The store on its file: group commit, what survives a kill, who may open it, and what a bad disk does."""

import asyncio
import contextlib
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata.sqlite import IN_MEMORY_PATH, WAITING_JOBS_MAX, SqliteStore
from magnetar.metadata.store import NODE_ABSENT, NodeChanged, PutNode, VersionedValue, WatchReset
from magnetar.metadata.tree import MetadataTree, TreeJob
from magnetar.metadata.tree_core import CommitJob, TreeJobResult
from magnetar.proto.errors import (
    BackPressure,
    BadVersion,
    Busy,
    DataLost,
    InternalError,
    InvalidConfiguration,
    InvalidRequest,
    MagnetarError,
    SessionExpired,
    Unavailable,
)
from magnetar.runtime.disk import SystemFiles
from magnetar.runtime.network import World
from magnetar.runtime.process import make_system_world

WRITER = """
import asyncio, sys
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import PutNode
from magnetar.runtime.process import make_system_world

async def main():
    store = await SqliteStore.open(make_system_world(), sys.argv[1])
    session = store.new_session()
    await session.put("/alive", b"", ephemeral=True)
    durable = await store.open_session(60.0)
    await store.commit([PutNode("/durable", b"", ephemeral=True)], durable)
    first = int(sys.argv[2])

    async def write(i):
        await session.commit([PutNode("/last", b"%d" % i), PutNode(f"/log/{i:06d}", b"x" * 300)])
        print(i, flush=True)

    for i in range(first, 1_000_000, 3):
        await asyncio.gather(*[write(i + k) for k in range(3)])

asyncio.run(main())
"""


@pytest.mark.processes
def test_acknowledged_commits_survive_kill_9(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata.db")
    acknowledged: set[int] = set()
    for life in range(7):
        first = life * 1000
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, path, str(first)], stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        assert writer.stdout is not None
        with writer, contextlib.closing(writer.stdout):
            for _ in range(20 + 7 * life):
                acknowledged.add(int(writer.stdout.readline()))
            writer.send_signal(signal.SIGKILL)
            acknowledged.update(int(line) for line in writer.stdout if line.endswith("\n"))
        asyncio.run(_check_after_kill(path, acknowledged))


async def _check_after_kill(path: str, acknowledged: set[int]) -> None:
    store = await SqliteStore.open(make_system_world(), path)
    session = store.new_session()
    try:
        assert acknowledged <= {int(name) for name in await session.children("/log")}
        last = await session.get("/last")
        assert last is not None
        assert await session.get(f"/log/{int(last.value):06d}") is not None  # half a commit does not exist
        assert await session.get("/alive") is None  # its session died with the process
        assert await session.get("/durable") is not None  # its session may come back
    finally:
        await store.close()


async def test_a_file_is_opened_by_one_store_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "metadata.db")
    store = await SqliteStore.open(make_system_world(), path)
    with pytest.raises(Busy, match="another process"):
        await SqliteStore.open(make_system_world(), path)
    await store.new_session().put("/a", b"")
    await store.close()
    again = await SqliteStore.open(make_system_world(), path)
    assert await again.get("/a") is not None
    await again.close()


async def test_revision_and_versions_go_on_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata.db")
    for life in range(3):
        store = await SqliteStore.open(make_system_world(), path)
        assert await store.new_session().put("/a", b"") == life
        assert await store.new_session().revision() == life + 1
        await store.close()


async def test_files_that_are_not_ours_are_refused_and_left_as_they_were(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with contextlib.closing(sqlite3.connect(foreign)) as sql:
        sql.execute("CREATE TABLE t(x)")
        sql.commit()
    before = foreign.read_bytes()
    with pytest.raises(InvalidConfiguration, match="not Magnetar's metadata"):
        await SqliteStore.open(make_system_world(), str(foreign))
    assert foreign.read_bytes() == before
    text = tmp_path / "text.db"
    text.write_bytes(b"no database at all, but long enough to look at" * 100)
    with pytest.raises(DataLost):
        await SqliteStore.open(make_system_world(), str(text))
    with pytest.raises(Unavailable):
        await SqliteStore.open(make_system_world(), str(tmp_path))


async def test_a_damaged_file_stops_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    store = await SqliteStore.open(make_system_world(), str(path))
    await store.new_session().commit([PutNode(f"/a/{i:04d}", bytes(300)) for i in range(200)])
    await store.close()
    damaged = bytearray(path.read_bytes())
    for page in range(3 * 4096, len(damaged), 4096):
        damaged[page : page + 64] = b"\xff" * 64
    path.write_bytes(damaged)
    with pytest.raises(DataLost, match=r"metadata\.db"):
        await SqliteStore.open(make_system_world(), str(path))


async def test_commits_that_wait_share_a_transaction_and_a_refused_one_harms_no_other() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    session = store.new_session()
    results = await asyncio.gather(
        *[session.put(f"/{i}", b"", 5 if i % 10 == 3 else NODE_ABSENT) for i in range(500)], return_exceptions=True
    )
    for i, result in enumerate(results):
        assert isinstance(result, BadVersion) if i % 10 == 3 else result == 0
    statistics = store.statistics()
    assert statistics["commits"] == statistics["revision"] == 450
    assert statistics["batches"] <= 3
    assert len(await session.children("/")) == 450
    await store.close()


async def test_the_queue_of_commits_is_bounded() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    session = store.new_session()
    puts = [asyncio.ensure_future(session.put("/a", b"")) for _ in range(WAITING_JOBS_MAX + 1500)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    refused = [result for result in results if isinstance(result, BackPressure)]
    assert refused
    assert await session.get("/a") == VersionedValue(b"", len(puts) - len(refused) - 1)
    await store.close()


async def test_a_caller_that_leaves_does_not_disturb_the_others() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    session = store.new_session()
    puts = [asyncio.ensure_future(session.put("/a", b"")) for _ in range(10)]
    await asyncio.sleep(0)
    for put in puts[::2]:
        put.cancel()
    await asyncio.wait(puts)
    assert [put.cancelled() for put in puts] == [True, False] * 5
    assert await session.get("/a") == VersionedValue(b"", 9)
    await store.close()


async def test_closing_answers_what_waits_and_refuses_what_comes_later() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    session = store.new_session()
    puts = [asyncio.ensure_future(session.put("/a", b"")) for _ in range(2500)]
    await asyncio.sleep(0)
    await store.close()
    assert sorted(await asyncio.gather(*puts)) == list(range(2500))
    with pytest.raises(Unavailable):
        await store.get("/a")
    await session.close()
    await store.close()


async def test_a_watch_sleeps_through_what_is_not_its_own_and_misses_nothing() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    store.history._changes_max = 20
    session = store.new_session()
    heard: list[NodeChanged | WatchReset] = []

    async def follow() -> None:
        async for change in session.watch("/mine", 0):
            heard.append(change)
            if isinstance(change, WatchReset) or change.path == "/mine/last":
                return

    following = asyncio.create_task(follow())
    await session.put("/mine/first", b"")
    await _settled()
    (watch,) = store._watches
    sleeps_on = watch.news
    for number in range(100):  # five times what the history has
        await session.put(f"/others/{number}", b"")
        await session.put(f"/mines/{number}", b"")
    await _settled()
    assert watch.news is sleeps_on
    assert not sleeps_on.done()
    await session.put("/mine/first", b"again")
    await session.commit([PutNode("/others/0", b""), PutNode("/mine", b""), PutNode("/mine/last", b"")])
    await following
    assert not any(isinstance(each, WatchReset) for each in heard)
    assert [(each.path, each.version) for each in heard if isinstance(each, NodeChanged)] == [
        ("/mine/first", 0), ("/mine/first", 1), ("/mine", 0), ("/mine/last", 0)
    ]  # fmt: skip
    assert not store._watches
    await store.close()


async def _settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_watch_that_waits_ends_with_its_session_and_with_the_store() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    for end in ("session", "store"):
        session = store.new_session()
        waiting = asyncio.create_task(anext(aiter(session.watch("/nothing", store.history.revision))))
        await _settled()
        await (session.close() if end == "session" else store.close())
        with pytest.raises(SessionExpired):
            await waiting
    assert not store._watches


async def test_an_ephemeral_needs_a_session() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    with pytest.raises(InvalidRequest):
        await store.commit([PutNode("/a", b"", ephemeral=True)], "")
    assert (await store.commit([PutNode("/a", b"")], "")).versions == [0]
    await store.close()


async def test_a_commit_of_a_session_that_has_ended_is_refused() -> None:
    store = await SqliteStore.open(make_system_world(), IN_MEMORY_PATH)
    session = await store.open_session(10.0)
    await store.commit([PutNode("/a", b"", ephemeral=True)], session)
    ending = asyncio.ensure_future(store.end_session(session))
    await asyncio.sleep(0)  # it has ended, and its ephemerals are not deleted yet
    with pytest.raises(SessionExpired):
        await store.commit([PutNode("/b", b"", ephemeral=True)], session)
    await ending
    assert await store.get("/a") is None
    assert await store.get("/b") is None
    await store.close()


def test_a_full_disk_is_unavailable_and_nothing_was_done(tmp_path: Path) -> None:
    tree = MetadataTree(str(tmp_path / "metadata.db"))
    tree.apply([CommitJob([PutNode("/a", b"1")], "s")])
    pages = tree._one("PRAGMA page_count")
    tree._one(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(Unavailable, match="disk is full") as full:
        tree.apply([CommitJob([PutNode("/a", b"2")], "s"), CommitJob([PutNode("/big", bytes(100_000))], "s")])
    assert full.value.definite
    found = tree.get("/a")
    assert found is not None
    assert (found.value, found.version, tree.revision) == (b"1", 0, 1)
    tree._one("PRAGMA max_page_count = 100000")
    (done,) = tree.apply([CommitJob([PutNode("/big", bytes(100_000))], "s")])
    assert not isinstance(done, Exception)
    assert done.revision == 2
    tree.close()


async def test_ephemerals_of_an_ended_session_go_as_soon_as_a_full_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.metadata.sqlite.SESSION_END_RETRY_S", 0.02)
    store = await SqliteStore.open(make_system_world(), str(tmp_path / "metadata.db"))
    watcher, leaving = store.new_session(), store.new_session()
    await leaving.put("/owner", b"dead", ephemeral=True)
    apply, full = store._tree.apply, [True]

    def no_room(jobs: Sequence[TreeJob]) -> list[TreeJobResult | MagnetarError]:
        if full:
            raise Unavailable("the disk is full")
        return apply(jobs)

    store._tree.apply = no_room  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await leaving.close()
    assert await watcher.get("/owner") is not None
    full.clear()
    async with asyncio.timeout(10):
        async for change in watcher.watch("/owner", await watcher.revision()):
            assert change == NodeChanged("/owner", NODE_ABSENT, change.revision)
            break
    assert await watcher.get("/owner") is None
    await store.close()


class _MortalFiles(SystemFiles):
    def __init__(self) -> None:
        self.deaths: list[str] = []

    def end_process(self, reason: str) -> None:
        self.deaths.append(reason)


class _BadDisk:
    """A connection whose COMMIT fails as SQLite fails when fsync does."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def execute(self, query: str, *parameters: Any) -> Any:
        if query == "COMMIT":
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return self._sql.execute(query, *parameters)

    def close(self) -> None:
        self._sql.close()


async def test_a_failed_fsync_ends_the_process_and_answers_nobody(tmp_path: Path) -> None:
    real = make_system_world()
    files = _MortalFiles()
    store = await SqliteStore.open(
        World(real.clock, real.rng, files, real.workers, real.network), str(tmp_path / "metadata.db")
    )
    session = store.new_session()
    store._tree._sql = _BadDisk(store._tree._sql)  # type: ignore[assignment]
    with pytest.raises(InternalError):
        await session.put("/a", b"")
    assert len(files.deaths) == 1
    assert "disk I/O error" in files.deaths[0]
    assert await session.revision() == 0
    await store.close()
