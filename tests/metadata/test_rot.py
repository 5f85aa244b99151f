"""The metadata's file after crashes and damage: a start shows no older and no mixed state, or says why not."""

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from magnetar.metadata import sqlite
from magnetar.metadata.store import ANY_VERSION, DeleteNode, PutNode
from magnetar.metadata.tree import (
    ANSWERED_FILE_SUFFIX,
    AnsweredRevisionFile,
    EndSession,
    MetadataTree,
    OpenSession,
    compute_row_checksum,
)
from magnetar.metadata.tree_core import CommitJob
from magnetar.proto.errors import DataLost
from tests.metadata import rot

PATHS = [f"/some/{number:02d}" for number in range(20)]


def test_a_crash_anywhere_loses_nothing_and_damage_at_rest_is_refused_or_told() -> None:
    came, failures = rot.run(1, 600)
    assert failures == []
    assert came["whole"] > 300
    assert came["refused"] > 100


def without(monkeypatch: pytest.MonkeyPatch, name: str, guard: Callable[..., object]) -> None:
    monkeypatch.setattr(MetadataTree, name, guard)


@pytest.mark.parametrize(("name", "guard"), [
    ("_check_answered", lambda tree, revision: None),
    ("_check_sum", lambda tree: tree._sum()),
])  # fmt: skip
def test_each_guard_is_needed(name: str, guard: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, name, guard)
    assert any(rot.run(seed, 200)[1] for seed in range(2, 8)), name


def filled(path: str, commits: int = 30) -> MetadataTree:
    tree = MetadataTree(path, "first")
    for number in range(commits):
        tree.apply([CommitJob((PutNode(PATHS[number % len(PATHS)], b"%d" % number, ANY_VERSION),), "")])
    return tree


def test_a_log_that_lost_its_end_is_refused_and_says_which_revision_was_answered(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata.sqlite")
    tree = filled(path)
    log = Path(path + "-wal").read_bytes()
    tree._sql.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
    file = Path(path).read_bytes()
    tree.apply([CommitJob((PutNode(PATHS[0], b"last", ANY_VERSION),), "")])
    note = Path(path + ANSWERED_FILE_SUFFIX).read_bytes()
    tree.close()
    assert log
    for each, data in ((path, file), (path + ANSWERED_FILE_SUFFIX, note)):
        Path(each).write_bytes(data)
    with pytest.raises(DataLost, match=r"is of revision 30, and revision 31 was answered.*metadata restore"):
        MetadataTree(path, "second")


@pytest.mark.parametrize("gone", ["removed", "empty"])
def test_a_file_that_is_gone_is_no_new_one(tmp_path: Path, gone: str) -> None:
    path = str(tmp_path / "metadata.sqlite")
    filled(path).close()
    os.remove(path)
    if gone == "empty":
        Path(path).touch()
    with pytest.raises(DataLost, match="is empty, and revision 30 was answered"):
        MetadataTree(path, "second")


def test_a_restore_of_an_older_copy_is_accepted(tmp_path: Path) -> None:
    path, copy = str(tmp_path / "metadata.sqlite"), str(tmp_path / "copy")
    tree = filled(path)
    tree.back_up(copy)
    tree.apply([CommitJob((PutNode(PATHS[0], b"last", ANY_VERSION),), "")])
    tree.close()
    for lost in (False, True):
        if lost:
            os.remove(path)
        sqlite.restore_backup(copy, path, 0, "restored")
        with contextlib.closing(MetadataTree(path, "second")) as restored:
            found = restored.get(PATHS[0])
            assert found is not None
            assert found.value != b"last"
            restored.apply([CommitJob((PutNode(PATHS[0], b"last", ANY_VERSION),), "")] * 3)


def test_a_file_without_note_or_sums_is_one_of_an_earlier_version(tmp_path: Path) -> None:
    path = str(tmp_path / "metadata.sqlite")
    filled(path).close()
    os.remove(path + ANSWERED_FILE_SUFFIX)
    with contextlib.closing(sqlite3.connect(path)) as sql:  # and that version writes on
        sql.execute("UPDATE node SET revision = 31, version = 9 WHERE path = ?", (PATHS[0],))
        sql.execute("UPDATE state SET revision = 31")
        sql.commit()
    for life in range(2):
        with contextlib.closing(MetadataTree(path, "second")) as tree:
            found = tree.get(PATHS[0])
            assert found is not None
            assert (found.version, tree.revision) == (9 + life, 31 + life)
            tree.apply([CommitJob((PutNode(PATHS[0], b"", ANY_VERSION),), "")])
    assert AnsweredRevisionFile(path).read() == 33


def test_a_row_that_changed_in_the_table_is_damage(tmp_path: Path) -> None:
    for change in ("version = version + 1", "revision = revision - 1", "path = '/some/other'"):
        path = str(tmp_path / change[:4])
        filled(path).close()
        with contextlib.closing(sqlite3.connect(path)) as sql:
            sql.execute(f"UPDATE node SET {change} WHERE path = ?", (PATHS[3],))
            sql.commit()
        with pytest.raises(DataLost, match="rows of it are missing, or of another time"):
            MetadataTree(path, "second")


def test_the_sum_is_that_of_the_rows_whatever_was_done(tmp_path: Path) -> None:
    tree = filled(str(tmp_path / "metadata.sqlite"))
    done = tree.apply([
        OpenSession("s", 60.0), CommitJob((PutNode("/eph/1", b"", ephemeral=True), PutNode("/eph/2", b"",
        ephemeral=True)), "s"),
        CommitJob((PutNode(PATHS[1], b"x", 77),), ""),
        CommitJob((DeleteNode(PATHS[2], ANY_VERSION), DeleteNode("/nothing", ANY_VERSION)), ""),
        CommitJob((DeleteNode(PATHS[3], ANY_VERSION), PutNode(PATHS[3], b"again")), ""), EndSession("s"),
        EndSession("nobody"),
    ])  # fmt: skip
    assert [isinstance(each, Exception) for each in done].count(True) == 1
    assert tree._total == tree._sum() != 0
    tree.mark_restored("token")
    assert tree._total == tree._sum()
    tree.close()
    assert compute_row_checksum("/a", 0, 1) != compute_row_checksum("/a", 1, 0)
