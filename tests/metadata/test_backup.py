"""Copies of the tree whose records are of this version or of the one before, and their restoration."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from magnetar.metadata import paths, sqlite
from magnetar.metadata.records import (
    PLACES,
    BookieRecord,
    ClusterRecord,
    CounterRecord,
    LedgerRecord,
    MetadataRecord,
    TopicRecord,
    decode_record,
    encode_record,
)
from magnetar.metadata.store import ABSENT, PutNode
from magnetar.metadata.tree import MetadataTree, OpenSession
from magnetar.metadata.tree_core import CommitJob
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
    return place(record) if type(record) in PLACES else f"/of/{type(record).__name__}"


def a_copy(folder: Path, encoded: Encoded) -> tuple[str, dict[str, MetadataRecord]]:
    """With a record of every kind, and a registered bookie."""
    live = {where(record): record for record in EXAMPLES}
    tree = MetadataTree(str(folder / "metadata.sqlite"), "first")
    tree.apply([OpenSession("s", 10.0)])
    for path, record in live.items():
        data = encoded(record, path)
        tree.apply([CommitJob([PutNode(path, data, ABSENT, ephemeral=isinstance(record, BookieRecord))], "s")])
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
