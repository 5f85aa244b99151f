"""Bookies and the metadata service have the log level that an operator sets for the cluster."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.cli.run.servers import AppliedLogLevel, follow_log_level, start_following_log_level
from magnetar.metadata import paths
from magnetar.metadata.records import PoliciesRecord
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore, put_record
from magnetar.runtime.logs import get_log_level
from magnetar.runtime.process import make_system_world


@pytest.fixture(autouse=True)
def _level_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    before = root.level
    root.setLevel("INFO")
    monkeypatch.setattr("magnetar.runtime.logs._configured", "info")
    yield
    root.setLevel(before)


async def set_log_level(session: MetadataStore, level: str) -> None:
    texts = {"log_level": level} if level else {}
    await put_record(session, paths.BROKER_POLICIES, PoliciesRecord(properties=texts))


async def until(level: str) -> None:
    async with asyncio.timeout(10):
        while get_log_level() != level:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def follow_the_changes(session: MetadataStore) -> None:
    for level, then in (("debug", "debug"), ("warning", "warning"), ("loud", "info"), ("error", "error"), ("", "info")):
        await set_log_level(session, level)
        await until(then)


async def test_the_level_follows_the_setting_and_what_is_unknown_is_as_none(tmp_path: Path) -> None:
    store = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    await set_log_level(store.new_session(), "warning")
    following = asyncio.create_task(follow_log_level(store.new_session(), AppliedLogLevel()))
    await until("warning")  # which was set before it began
    await follow_the_changes(store.new_session())
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await store.close()


async def test_a_process_follows_it_also_in_its_next_session(tmp_path: Path) -> None:
    store = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    first, second = store.new_session(), store.new_session()
    sessions = iter([first])
    following = await start_following_log_level(lambda: next(sessions, second))
    await follow_the_changes(store.new_session())
    await first.close()
    await follow_the_changes(store.new_session())
    await following.close()
    await store.close()


async def test_a_setting_that_is_deleted_between_two_sessions_does_not_stay(tmp_path: Path) -> None:
    store = await SqliteStore.open(make_system_world(1), str(tmp_path / "metadata.sqlite"))
    first, second, operator = store.new_session(), store.new_session(), store.new_session()
    await set_log_level(operator, "debug")
    given: list[MetadataStore] = [first]
    following = await start_following_log_level(lambda: given[-1])
    await until("debug")
    await first.close()  # until there is another one, the session of the process is one that has ended
    await set_log_level(operator, "")
    given.append(second)
    await until("info")
    await following.close()
    await store.close()
