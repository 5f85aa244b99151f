"""The files of the metadata are of their owner alone: they have the keys of ledgers, and who may what."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.metadata.sqlite import SqliteStore, read_backup_contents, restore_backup
from magnetar.proto.errors import InvalidRequest
from magnetar.runtime.process import make_system_world


@pytest.fixture(autouse=True)
def usual_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir() if each.is_file()}


async def test_the_file_its_log_and_its_copies_are_of_their_owner_alone(tmp_path: Path) -> None:
    file, backup = tmp_path / "metadata.sqlite", tmp_path / "copy.backup"
    store = await SqliteStore.open(make_system_world(1), str(file))
    await store.new_session().put("/a", b"secret")
    with pytest.raises(InvalidRequest, match="into its own folder"):
        await store.back_up(str(backup))
    path, _, _ = await store.back_up("copy.backup")
    assert path == str(backup)
    assert set(modes(tmp_path)) >= {"metadata.sqlite", "metadata.sqlite-wal", "copy.backup"}
    assert set(modes(tmp_path).values()) == {0o600}
    await store.close()
    read_backup_contents(str(backup))
    restore_backup(str(backup), str(file), 0, "token")
    assert set(modes(tmp_path).values()) == {0o600}


async def test_a_file_that_others_could_read_is_closed_to_them_at_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "metadata.sqlite"
    await (await SqliteStore.open(make_system_world(1), str(file))).close()
    file.chmod(0o644)
    store = await SqliteStore.open(make_system_world(2), str(file))
    await store.new_session().put("/a", b"secret")
    assert set(modes(tmp_path).values()) == {0o600}
    await store.close()
