"""Copies of the metadata tree's file: what a copy contains, and how a copy replaces a file that is lost or older.

    inspect(path)                               what bookies can be asked to compare with the copy
    restore(backup, target, least_id, token)    the copy replaces the file; the service must be stopped

A restore never overwrites: the replaced file is kept beside the new one, numbered. In the new file, in one transaction
1. the counter of ledger ids begins above `least_id`, the highest id that bookies (or the replaced file) saw, so that no
   id is allocated twice;
2. all sessions and ephemerals are deleted: processes that run register again;
3. an incarnation begins that is marked `restored`: bookies accept the tree although it is older than the one they saw,
   and keep the ledgers that it does not contain (bookie/maintenance/seen.py).
A crash before the rename leaves the old file, and beside it a partial one that the next restore replaces.
Guarded by tests/cli/storage/test_metadata_copies.py.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..proto.errors import Busy, NotFound
from . import paths
from .records import BookieRecord, CounterRecord, DamagedRecord, LedgerRecord, decode
from .store import make_put_operation, parse_ledger_ids
from .tree import ENDING, MetadataTree, create_private_file, sync_file
from .tree_core import CommitJob


class BackupContents(NamedTuple):
    """What a backup of the metadata contains, as far as bookies can compare it with their own data."""

    revision: int
    highest: int  # ledger id that was allocated, 0: none
    ledgers: frozenset[int]
    bookies: tuple[BookieRecord, ...]  # that were registered; one whose record is damaged has no endpoint
    topics: dict[str, int]  # topic → how many of its ledgers are not among the `known` ones


def read_backup_contents(path: str, known: frozenset[int] | None = None) -> BackupContents:
    """Reads the backup at `path` and returns its contents. Neither changes nor locks the file. `known`: the ledgers of
    another copy, with which it is compared; None: no comparison. Raises NotFound, DataLost, InvalidConfiguration or
    Busy."""
    if not os.path.exists(path):
        raise NotFound(f"{path}: there is no such file", path=path)
    scratch = f"{path}.looked-at"
    _copy(path, scratch)
    try:
        tree = MetadataTree(scratch, keeps_ephemerals=True)
        try:
            return _contents(tree, known)
        finally:
            tree.close()
    finally:
        remove_store_files(scratch)


def _contents(tree: MetadataTree, known: frozenset[int] | None) -> BackupContents:
    bookies = []
    for name in tree.children(paths.BOOKIES):
        node = tree.get(paths.bookie(name))
        try:
            if node is not None:
                bookies.append(decode(node.value, BookieRecord, paths.bookie(name)))
        except DamagedRecord:  # it cannot be asked
            bookies.append(BookieRecord(bookie=name, endpoint=""))
    ledgers = frozenset(parse_ledger_ids(paths.LEDGERS, tree.children(paths.LEDGERS)))
    topics = _count_by_topic(tree, ledgers - known) if known is not None else {}
    highest = max(_next_id(tree) - 1, max(ledgers, default=0))
    return BackupContents(tree.revision, highest, ledgers, tuple(bookies), topics)


def _count_by_topic(tree: MetadataTree, ledgers: Iterable[int]) -> dict[str, int]:
    """Returns how many of these ledgers belong to each topic, including those of its subscriptions; "" counts the
    ledgers of no topic."""
    found = Counter[str]()
    for path, node in tree.get_nodes([paths.ledger(each) for each in sorted(ledgers)]).items():
        try:
            found[decode(node.value, LedgerRecord, path).properties.get("topic", "")] += 1
        except DamagedRecord:
            found[""] += 1
    return dict(sorted(found.items()))


def _next_id(tree: MetadataTree) -> int:
    node = tree.get(paths.LEDGER_IDS)
    return 1 if node is None else decode(node.value, CounterRecord, paths.LEDGER_IDS).next


def restore_backup(backup: str, target: str, least_id: int, token: str) -> str:
    """Replaces the metadata file `target` by a copy of the file `backup`. Makes sure that the ids up to `least_id` are
    not allocated again, and begins an incarnation named `token`. Returns the name to which the old file was renamed; ""
    if there was none. Raises Busy if the metadata service is running."""
    check_service_stopped(target)
    scratch = f"{target}.restoring"
    os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
    _copy(backup, scratch)
    tree = MetadataTree(scratch)
    try:
        if _next_id(tree) <= least_id:
            tree.apply([CommitJob([make_put_operation(paths.LEDGER_IDS, CounterRecord(next=least_id + 1))], "")])
        tree.mark_restored(token)
    finally:
        tree.close()
    sync_file(scratch)
    kept = _set_aside(target)
    os.rename(scratch, target)
    sync_file(os.path.dirname(target) or ".")
    return kept


def check_service_stopped(target: str) -> None:
    """Raises Busy if a metadata service has the file `target` open."""
    if not os.path.exists(target):
        return
    sql = sqlite3.connect(target, isolation_level=None, timeout=0)
    try:
        sql.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        sql.execute("BEGIN IMMEDIATE")
        sql.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        raise Busy(f"{target}: the metadata service has it open; stop it first", path=target) from error
    except sqlite3.DatabaseError:  # damaged: a reason to restore
        return
    finally:
        sql.close()


def _set_aside(target: str) -> str:
    """Renames the metadata file and the files that belong to it. Returns the new name; "" if there was no file."""
    if not os.path.exists(target):
        if os.path.exists(target + ENDING):
            os.remove(target + ENDING)  # the file that it was of is lost
        return ""
    number = 1
    while os.path.exists(f"{target}.replaced-{number}"):
        number += 1
    kept = f"{target}.replaced-{number}"
    for end in (ENDING, "-wal", "-shm", ""):  # the file last: while it exists, the service would start with it
        if os.path.exists(target + end):
            os.rename(target + end, kept + end)
    return kept


def _copy(source: str, to: str) -> None:
    """Copies the metadata file `source` and its write-ahead log to the path `to`."""
    remove_store_files(to)
    create_private_file(to)
    shutil.copyfile(source, to)
    if os.path.exists(f"{source}-wal"):
        create_private_file(f"{to}-wal")
        shutil.copyfile(f"{source}-wal", f"{to}-wal")


def remove_store_files(path: str) -> None:
    """Deletes the metadata file at `path` and the files that belong to it (the write-ahead log and the file with the
    answered revision), if they exist."""
    for end in ("", "-wal", "-shm", ENDING):
        if os.path.exists(path + end):
            os.remove(path + end)
