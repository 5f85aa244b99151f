"""Copies of the tree whose records are of this version or of the one before, and their restoration."""

import contextlib
import itertools
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.metadata import paths, sqlite
from magnetar.metadata.records import (
    PATH_OF_RECORD,
    BookieRecord,
    ClusterRecord,
    CounterRecord,
    LedgerRecord,
    MetadataRecord,
    TopicRecord,
    decode_record,
    encode_record,
)
from magnetar.metadata.store import NODE_ABSENT, PutNode
from magnetar.metadata.tree import ANSWERED_FILE_SUFFIX, MetadataTree, OpenSession
from magnetar.metadata.tree_core import CommitJob
from magnetar.proto.errors import DataLost
from tests.metadata.test_records import EXAMPLES, place

Encoded = Callable[[MetadataRecord, str], bytes]


def version_1(record: MetadataRecord, path: str) -> bytes:
    """As the version before this one wrote it: the checksum of the body alone."""
    data = encode_record(record, "")
    return data[:2] + b"\x01" + data[3:]


def where(record: MetadataRecord) -> str:
    match record:
        case BookieRecord():
            return paths.bookie(record.bookie)
        case CounterRecord():
            return paths.LEDGER_IDS
        case ClusterRecord():
            return paths.CLUSTER
    return place(record) if type(record) in PATH_OF_RECORD else f"/of/{type(record).__name__}"


def a_copy(folder: Path, encoded: Encoded) -> tuple[str, dict[str, MetadataRecord]]:
    """With a record of every kind, and a registered bookie."""
    live = {where(record): record for record in EXAMPLES}
    tree = MetadataTree(str(folder / "metadata.sqlite"), "first")
    tree.apply([OpenSession("s", 10.0)])
    for path, record in live.items():
        data = encoded(record, path)
        tree.apply([CommitJob([PutNode(path, data, NODE_ABSENT, ephemeral=isinstance(record, BookieRecord))], "s")])
    copy = str(folder / "copy")
    tree.back_up(copy)
    tree.close()
    return copy, live


@pytest.mark.parametrize("encoded", [version_1, encode_record])
def test_a_copy_of_either_version_is_looked_at_and_restored_in_place_of_the_same_cluster(
    tmp_path: Path, encoded: Encoded
) -> None:
    copy, live = a_copy(tmp_path, encoded)
    target = str(tmp_path / "metadata.sqlite")
    found = sqlite.read_backup_contents(copy)
    bookies = [record for record in live.values() if isinstance(record, BookieRecord)]
    ledgers = [record.ledger_id for record in live.values() if isinstance(record, LedgerRecord)]
    assert bookies
    assert ledgers
    assert list(found.bookies) == bookies
    assert found.ledgers == frozenset(ledgers)
    kept = sqlite.restore_backup(copy, target, found.highest + 100, "second")
    assert kept == f"{target}.replaced-1"
    tree = MetadataTree(target, "third")
    try:
        for path, record in live.items():
            node = tree.get(path)
            if isinstance(record, BookieRecord):
                assert node is None, "it registers again"
                continue
            assert node is not None
            if path == paths.LEDGER_IDS:
                assert decode_record(node.value, CounterRecord, path).next == found.highest + 101
            else:
                assert decode_record(node.value, type(record), path) == record
        assert {type(record) for record in live.values()} >= {ClusterRecord, TopicRecord, CounterRecord}
    finally:
        tree.close()
    again = sqlite.read_backup_contents(target)
    assert again.ledgers == found.ledgers
    assert again.highest == found.highest + 100


@pytest.mark.parametrize("encoded", [version_1, encode_record])
def test_a_bookies_damaged_record_stops_no_restore(tmp_path: Path, encoded: Encoded) -> None:
    copy, live = a_copy(tmp_path, encoded)
    path = next(path for path, record in live.items() if isinstance(record, BookieRecord))
    with sqlite3.connect(copy) as sql:
        damaged = "CAST(substr(value, 1, 12) || x'00' || substr(value, 14) AS BLOB)"
        sql.execute(f"UPDATE node SET value = {damaged} WHERE path = ?", (path,))
    sql.close()
    (bookie,) = sqlite.read_backup_contents(copy).bookies
    assert (bookie.bookie, bookie.endpoint) == (path.rpartition("/")[2], "")
    sqlite.restore_backup(copy, str(tmp_path / "other" / "metadata.sqlite"), 0, "second")


# ------------------------------------------------------------------------------------------ crashes of a restore
class Killed(BaseException):
    """The process ends here."""


CHANGES = ("rename", "remove", "link")


@contextlib.contextmanager
def killed_at(step: int, *, done: bool) -> Iterator[list[str]]:
    """Ends the process at the change of a name with this number (from 0), before it or after it (`done`)."""
    calls: list[str] = []

    def wrap(name: str, change: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            calls.append(name)
            if len(calls) == step + 1:
                if done:
                    change(*args)
                raise Killed
            change(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, wrap(name, getattr(os, name)))
        yield calls


def the_old_and_a_copy(folder: Path) -> tuple[str, str]:
    """A metadata file that has `/old` and is newer than the copy, which has not."""
    target, copy = str(folder / "metadata.sqlite"), str(folder / "copy")
    with contextlib.closing(MetadataTree(target, "first")) as tree:
        tree.apply([CommitJob([PutNode("/both", b"")], "")])
        tree.back_up(copy)
        for _ in range(9):
            tree.apply([CommitJob([PutNode("/old", b"")], "")])
    return target, copy


def another_folder(folder: Path, name: str) -> str:
    """Copies the metadata file and what belongs to it; returns the path of the copied file."""
    (folder / name).mkdir()
    for each in folder.glob("metadata.sqlite*"):
        shutil.copy2(each, folder / name)
    return str(folder / name / "metadata.sqlite")


def what_a_start_finds(target: str) -> str:
    try:
        tree = MetadataTree(target, "next")
    except DataLost as error:
        return "refused" if "magnetar metadata restore" in str(error) else str(error)
    with contextlib.closing(tree):
        if tree.get("/both") is None:
            return "an empty tree"
        return "new" if tree.get("/old") is None else "old"


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("state", ["whole", "without note", "gone", "damaged"])
def test_a_crash_of_a_restore_leaves_the_old_tree_or_the_new_one_or_a_refusal(
    tmp_path: Path, state: str, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: str) -> None:
        raise OSError("no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    target, copy = the_old_and_a_copy(tmp_path)
    if state == "without note":
        os.remove(target + ANSWERED_FILE_SUFFIX)
    elif state == "gone":
        os.remove(target)
    elif state == "damaged":
        Path(target).write_bytes(bytes(8192))
        Path(f"{target}-wal").write_bytes(b"of the damaged file")
    sound = state in ("whole", "without note")
    allowed = {"old", "new", "refused"} if sound else {"new", "refused"}
    crashes = 0
    for step, done in itertools.product(range(20), (False, True)):
        here = another_folder(tmp_path, f"{step}-{done}")
        try:
            with killed_at(step, done=done):
                sqlite.restore_backup(copy, here, 0, "second")
        except Killed:
            crashes += 1
            assert what_a_start_finds(here) in allowed
            sqlite.restore_backup(copy, here, 0, "third")
        assert what_a_start_finds(here) == "new"
        if sound:
            with contextlib.closing(sqlite3.connect(f"{here}.replaced-1")) as sql:
                assert sql.execute("SELECT 1 FROM node WHERE path = '/old'").fetchall()
    assert 2 <= crashes < 40, "the last ones ran to the end"


def test_a_restore_after_a_crashed_one_keeps_the_old_file_once(tmp_path: Path) -> None:
    target, copy = the_old_and_a_copy(tmp_path)
    with pytest.raises(Killed), killed_at(0, done=True):  # the old file has its second name
        sqlite.restore_backup(copy, target, 0, "second")
    assert os.path.samefile(target, f"{target}.replaced-1")
    assert what_a_start_finds(target) == "old"
    assert sqlite.restore_backup(copy, target, 0, "third") == f"{target}.replaced-1"
    assert [each.name for each in tmp_path.glob("*.replaced-?")] == ["metadata.sqlite.replaced-1"]
    assert what_a_start_finds(target) == "new"
