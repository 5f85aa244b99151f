"""The tree in an SQLite file: plain synchronous calls, made from one thread (the store's worker).

    node(path, value, version, revision, session)   session: the owner of an ephemeral, else NULL
    session(id, timeout_s)                          sessions that outlive this process (of the metadata service)
    state(revision, summed, total)                  one row; total: the sum of all nodes' rows (`compute_row_checksum`)
                                                    at the revision `summed`, which is another one than `revision` if a
                                                    version without sums wrote last
    incarnation(number, token, revision, restored)  each opening of the file, the last few

The last table tells whether a file is an older copy of another one. A process that remembers an incarnation and one of
its revisions misses it in a copy made before, or finds that the next one began too early (bookie/maintenance/seen.py).

`apply` does all jobs that wait in one transaction: one fsync answers them all. Commits are decided in memory
(tree_core.py), between one statement that reads the versions of all their nodes and one that writes these nodes: for
each step of a statement, and each row that it returns, SQLite's module gives the interpreter's lock away, and waits for
a loop that is busy before it gets it back. For the same reason `get_nodes` returns one row.

Durability: WAL with `synchronous=FULL`: `apply` returns after the fsync of the write-ahead log. SQLite does its own
file I/O, outside the Files seam; a simulation therefore uses ':memory:'. One process: the file is opened with
`locking_mode=EXCLUSIVE`, and a second process gets Busy; the kernel releases the lock with the process.
What a disk loses or changes is found at the start, or by the reader of a record:

    an end of the write-ahead log, or the file      the note of what was answered (AnsweredRevisionFile)
    rows that are gone, older, or of another time   the sum of all rows
    a path or a session in an index                 `integrity_check`
    a value                                         its record's checksum, which covers the path (records.py)

A failed write, fsync or a damaged page (SQLITE_IOERR, SQLITE_CORRUPT) is `MetadataDiskFailed`: what is on disk is
unknown, and the store ends the process (ledger protocol §2.5). A full disk rolls the transaction back: Unavailable, no
change.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any

import msgspec

from ..proto.errors import AlreadyExists, Busy, DataLost, InvalidConfiguration, MagnetarError, Unavailable
from ..proto.versions import METADATA_FILE, check_format
from . import paths
from .records import ClusterRecord, DamagedRecord, Incarnation, IncarnationsRecord, decode_record, encode_record
from .store import NO_SPACE_FIELD, NODE_ABSENT, NodeChanged
from .tree_core import CommitGroup, CommitJob, NodeRow, TreeJobResult, list_commit_paths

SQLITE_APPLICATION_ID = 0x4D414754  # "MAGT": the magic of the file
METADATA_FILE_VERSION = METADATA_FILE.version
KEPT_INCARNATIONS_MAX = 256
"""The largest number of incarnations that are kept. A process that missed more restarts of the metadata is not told
about the oldest ones."""
REVISION_NOTE_MAGIC = b"MGTA"
ANSWERED_FILE_SUFFIX = "-answered"
BACKED_UP_FILE_SUFFIX = "-backed-up"
"""The ending of the name of an empty file; its modification time is that of the last backup."""
_NOTE = struct.Struct(">4sQ")
_NOTE_SUM = struct.Struct(">I")
_RESTORE = "; restore it from the newest copy: 'magnetar metadata restore'"
_SUM_MASK = (1 << 63) - 1
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_FULL = {sqlite3.SQLITE_FULL}
_SCHEMA = f"""
CREATE TABLE node(path TEXT NOT NULL UNIQUE, value BLOB NOT NULL, version INTEGER NOT NULL, revision INTEGER NOT NULL,
                  session TEXT);
CREATE INDEX ephemeral ON node(session) WHERE session IS NOT NULL;
CREATE TABLE session(id TEXT PRIMARY KEY, timeout_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE state(only INTEGER PRIMARY KEY CHECK (only = 1), revision INTEGER NOT NULL);
INSERT INTO state VALUES (1, 0);
PRAGMA application_id = {SQLITE_APPLICATION_ID};
PRAGMA user_version = {METADATA_FILE_VERSION};
"""
_COLUMNS = {"node": "path, value, version, revision, session", "session": "id, timeout_s", "state": "only, revision"}
_INCARNATION = """
CREATE TABLE IF NOT EXISTS incarnation(number INTEGER PRIMARY KEY, token TEXT NOT NULL, revision INTEGER NOT NULL,
                                       restored INTEGER NOT NULL)
"""
_GET = "SELECT value, version, session FROM node WHERE path = ?"
_SUMS = ("summed", "total")
_MARK = "UPDATE state SET revision = ?1, summed = ?1, total = ?2"
_AMONG = "FROM node WHERE path IN (SELECT value FROM json_each(?))"
_GET_ALL = f"SELECT json_group_array(json_array(path, hex(value), version, session IS NOT NULL)) {_AMONG}"
_VERSIONS = f"SELECT json_group_object(path, json_array(version, revision)) {_AMONG}"
_DELETE = "DELETE FROM node WHERE path IN (SELECT value FROM json_each(?))"
ROWS_PER_STATEMENT = (64, 8, 1)
"""The numbers of nodes that one statement can write. They are few, so that the statements stay prepared."""
_PUT = {
    rows: f"""
INSERT INTO node VALUES {", ".join(["(?, ?, ?, ?, ?)"] * rows)} ON CONFLICT(path) DO UPDATE
SET value = excluded.value, version = excluded.version, revision = excluded.revision, session = excluded.session
"""
    for rows in ROWS_PER_STATEMENT
}
NODES_READ_AT_ONCE = 64
"""The number of nodes that one statement reads. As text they may have 128 MiB, and usually have 20 KiB."""


class MetadataDiskFailed(Exception):
    """Raised when SQLite could not write or sync the metadata file, or found it damaged. The content of the disk is
    unknown then."""


class StoredNode(msgspec.Struct, frozen=True, gc=False):
    """A metadata node as it was read from the file: its value, its version, and whether it is ephemeral."""

    value: bytes
    version: int
    ephemeral: bool


class OpenSession(msgspec.Struct, frozen=True):
    """Job for the tree: store a session durably, so that it survives a restart of the process."""

    session: str
    timeout_s: float


class EndSession(msgspec.Struct, frozen=True):
    """Job for the tree: delete a session and its ephemeral nodes."""

    session: str


TreeJob = CommitJob | OpenSession | EndSession


class MetadataTree:
    """The metadata file: its tables, and the transactions that change them. All methods must be called in one thread. A
    method that reads or writes the file raises Unavailable if the disk is full or SQLite can open no file, and
    MetadataDiskFailed if SQLite fails otherwise."""

    def __init__(self, path: str, token: str = "", *, keeps_ephemerals: bool = False) -> None:
        """Opens the metadata file, creates it if it is missing, and checks it. `token` is the name of the incarnation
        that begins. A tool gives "": then no incarnation begins, and no AnsweredRevisionFile is used.

        `keeps_ephemerals`: keeps the ephemeral nodes of sessions that ended with the former process, which are deleted
        otherwise. Raises Busy if another process has the file open, DataLost if it is damaged or has lost changes,
        InvalidConfiguration if it is another kind of file, or Unavailable."""
        self.path = path
        self._token = token
        self._keeps_ephemerals = keeps_ephemerals
        self._answered: AnsweredRevisionFile | None = None
        try:
            create_private_file(path)
            self._sql = sqlite3.connect(path, isolation_level=None, timeout=0, cached_statements=64)
            if token and path != ":memory:":
                self._answered = AnsweredRevisionFile(path)
        except (sqlite3.Error, OSError) as error:
            raise Unavailable(f"{path}: cannot be opened: {error}") from error
        try:
            self._open()
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.Error):
                raise _cannot_open(path, error) from error
            if isinstance(error, UnicodeError):  # of a name in the file, or of a message of SQLite that repeats one
                raise DataLost(f"{path}: the metadata file is damaged: {error}{_RESTORE}", path=path) from error
            raise

    def _open(self) -> None:
        self._sql.execute("PRAGMA locking_mode=EXCLUSIVE").fetchall()
        new = self._one("SELECT count(*) FROM sqlite_master") == 0
        if not new:
            self._check_file()  # before anything is written to it
        self._check_answered(-1 if new else self._one("SELECT revision FROM state"))
        self._total = 0 if new else self._check_sum()
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            self._sql.execute(f"PRAGMA {pragma}").fetchall()
        self._sql.execute("BEGIN IMMEDIATE")  # takes the lock for as long as the file is open
        if new:
            for statement in _SCHEMA.split(";\n"):
                self._sql.execute(statement)
        known = "SELECT id FROM session"
        gone = self._sql.execute(f"SELECT DISTINCT session FROM node WHERE session NOT IN ({known})").fetchall()
        self.revision: int = self._one("SELECT revision FROM state")
        for (session,) in [] if self._keeps_ephemerals else gone:  # sessions that ended with their process
            self._end_session(session)
        for column in [] if self._has_sums() else _SUMS:
            self._sql.execute(f"ALTER TABLE state ADD COLUMN {column} INTEGER NOT NULL DEFAULT -1")
        self._store_sum()
        self._sql.execute(_INCARNATION)
        if self._token:
            self.begin_incarnation(self._token, restored=False)
        self._sql.execute("COMMIT")
        self._write_revision()

    def begin_incarnation(self, token: str, *, restored: bool) -> None:
        """Begins a new incarnation of the metadata file, named `token`, as a part of the open transaction; an error of
        SQLite is raised as it is. `restored`: the file is a backup that replaces another one. The last
        KEPT_INCARNATIONS_MAX incarnations stay in the file."""
        number = (self._one("SELECT max(number) FROM incarnation") or 0) + 1
        self._sql.execute("INSERT INTO incarnation VALUES (?, ?, ?, ?)", (number, token, self.revision, int(restored)))
        self._sql.execute("DELETE FROM incarnation WHERE number <= ?", (number - KEPT_INCARNATIONS_MAX,))

    def mark_restored(self, token: str) -> None:
        """Marks this file as a backup that replaces another metadata file: ends all sessions, and begins an
        incarnation, named `token`, that says so. Also deletes all ephemeral nodes, and makes a new revision. Raises
        Unavailable or MetadataDiskFailed."""
        with _disk(self.path):
            self._sql.execute("BEGIN IMMEDIATE")
            self._sql.execute("DELETE FROM node WHERE session IS NOT NULL")
            self._sql.execute("DELETE FROM session")
            self.revision += 1
            self._total = self._sum()
            self._store_sum()
            self.begin_incarnation(token, restored=True)
            self._sql.execute("COMMIT")
            self._sql.execute("PRAGMA journal_mode=DELETE").fetchall()  # one file, without a write-ahead log

    def _check_file(self) -> None:
        if self._one("PRAGMA application_id") != SQLITE_APPLICATION_ID:
            raise InvalidConfiguration(f"{self.path}: an SQLite file, but not Magnetar's metadata", path=self.path)
        check_format(METADATA_FILE, self._one("PRAGMA user_version"), self.path)
        for table, columns in _COLUMNS.items():  # the text of a table's definition is on the disk, too
            self._sql.execute(f"SELECT {columns} FROM {table} LIMIT 0").fetchall()
        if (found := self._one("PRAGMA integrity_check(1)")) != "ok":
            raise DataLost(f"{self.path}: the metadata file is damaged: {found}{_RESTORE}", path=self.path)

    def _has_sums(self) -> bool:
        return set(_SUMS) <= {row[1] for row in self._sql.execute("PRAGMA table_info(state)")}

    def _check_sum(self) -> int:
        """Returns the checksum over all rows. Raises DataLost if the file has another one stored. A file written by a
        version without sums has none."""
        total = self._sum()
        wanted = self._one("SELECT total FROM state WHERE summed = revision") if self._has_sums() else None
        if wanted not in (None, total):
            text = "the metadata file is damaged: rows of it are missing, or of another time"
            raise DataLost(f"{self.path}: {text}{_RESTORE}", path=self.path)
        return total

    def _sum(self) -> int:
        rows = self._sql.execute("SELECT path, version, revision FROM node")
        return sum(compute_row_checksum(path, version, revision) for path, version, revision in rows) & _SUM_MASK

    def _store_sum(self) -> None:
        """Stores the revision and the checksum over all rows, as a part of the open transaction."""
        self._sql.execute(_MARK, (self.revision, self._total))

    def _update_sum(self, path: str, before: Sequence[int] | None, after: NodeRow | None) -> None:
        """Updates the checksum for a change of one node. `before`: its old version and revision; `after`: its new row;
        None: there is none."""
        if before is not None:
            self._total = (self._total - compute_row_checksum(path, *before)) & _SUM_MASK
        if after is not None:
            self._total = (self._total + compute_row_checksum(path, after[2], after[3])) & _SUM_MASK

    def _check_answered(self, revision: int) -> None:
        """Raises DataLost if a revision later than `revision` was answered to a client: then the file has lost
        changes."""
        answered = -1 if self._answered is None else self._answered.read()
        if answered > revision:
            what = f"is of revision {revision}" if revision >= 0 else "is empty"
            raise DataLost(
                f"{self.path}: the metadata file {what}, and revision {answered} was answered: what came after is lost"
                f"{_RESTORE}",
                path=self.path, revision=revision, answered=answered,
            )  # fmt: skip

    def _write_revision(self) -> None:
        """Writes the revision to the AnsweredRevisionFile, which must precede the answers to clients. Raises
        MetadataDiskFailed."""
        try:
            if self._answered is not None:
                self._answered.write(self.revision)
        except OSError as error:
            raise MetadataDiskFailed(f"{self.path}: {error}") from error

    def _one(self, query: str, *parameters: object) -> Any:
        row = self._sql.execute(query, parameters).fetchone()
        return None if row is None else row[0]

    def close(self) -> None:
        self._sql.close()
        if self._answered is not None:
            self._answered.close()

    # -------------------------------------------------------------------------------------------- reading
    def get(self, path: str) -> StoredNode | None:
        """Returns the node at `path`; None if there is none. Raises Unavailable or MetadataDiskFailed."""
        with _disk(self.path):
            row = self._sql.execute(_GET, (path,)).fetchone()
        return None if row is None else StoredNode(row[0], row[1], row[2] is not None)

    def get_nodes(self, asked: Sequence[str]) -> dict[str, StoredNode]:
        """Returns the nodes at the paths `asked`, by path. Leaves out paths without a node. Raises Unavailable or
        MetadataDiskFailed."""
        found: dict[str, StoredNode] = {}
        for start in range(0, len(asked), NODES_READ_AT_ONCE):
            with _disk(self.path):
                rows = self._one(_GET_ALL, msgspec.json.encode(asked[start : start + NODES_READ_AT_ONCE]).decode())
            for path, value, version, ephemeral in msgspec.json.decode(rows):
                found[path] = StoredNode(bytes.fromhex(value), version, bool(ephemeral))
        return found

    def children(self, path: str) -> list[str]:
        """Returns the names (segments, not paths) of the direct children of `path`, sorted. Raises Unavailable or
        MetadataDiskFailed."""
        folder = path.rstrip("/")  # "" for the root
        first, low, high = len(folder) + 2, folder + "/", folder + "0"  # SQL counts from 1; '0' follows '/'
        query = """SELECT DISTINCT substr(path, ?1, instr(substr(path, ?1) || '/', '/') - 1) AS segment
                   FROM node WHERE path > ?2 AND path < ?3 ORDER BY segment"""
        with _disk(self.path):
            return [segment for (segment,) in self._sql.execute(query, (first, low, high))]

    def list_nodes(self, folder: str, after: str, limit: int) -> list[str]:
        """Returns the names of at most `limit` nodes directly below `folder` that sort after `after`, sorted. Reads no
        more rows than that, unless there are nodes further below. Raises Unavailable or MetadataDiskFailed."""
        above = folder.rstrip("/") + "/"  # "/" for the root
        query = """SELECT substr(path, ?1) FROM node WHERE path > ?2 AND path < ?3 AND instr(substr(path, ?1), '/') = 0
                   ORDER BY path LIMIT ?4"""
        with _disk(self.path):
            rows = self._sql.execute(query, (len(above) + 1, above + after, above[:-1] + "0", limit))
            return [name for (name,) in rows]

    def read_nodes(self, folder: str, after: str, bytes_max: int) -> tuple[dict[str, StoredNode], bool]:
        """Returns (the nodes directly below `folder` that sort after `after`, by name, sorted; whether there may be
        more): as many as have `bytes_max` bytes of values, but at least one. Raises Unavailable or MetadataDiskFailed.
        """
        above = folder.rstrip("/") + "/"  # "/" for the root
        query = """SELECT substr(path, ?1), value, version, session FROM node
                   WHERE path > ?2 AND path < ?3 AND instr(substr(path, ?1), '/') = 0 ORDER BY path"""
        found, size = dict[str, StoredNode](), 0
        with _disk(self.path):
            for name, value, version, session in self._sql.execute(
                query, (len(above) + 1, above + after, above[:-1] + "0")
            ):
                found[name] = StoredNode(value, version, session is not None)
                size += len(value)
                if size >= bytes_max:
                    return found, True
        return found, False

    def incarnations(self) -> bytes:
        """Returns the encoded IncarnationsRecord of the file, with the latest incarnation last. Raises Unavailable or
        MetadataDiskFailed."""
        with _disk(self.path):
            rows = self._sql.execute("SELECT number, token, revision, restored FROM incarnation ORDER BY number")
            found = [Incarnation(number=n, token=t, revision=r, restored=bool(back)) for n, t, r, back in rows]
        node = self.get(paths.CLUSTER)
        try:
            written = None if node is None else decode_record(node.value, ClusterRecord, paths.CLUSTER).format
        except DamagedRecord:
            written = None  # bookies say so
        record = IncarnationsRecord(incarnations=tuple(found))
        return encode_record(record, paths.INCARNATIONS, cluster_format=written)

    def sessions(self) -> list[tuple[str, float]]:
        """Returns (id, timeout in seconds) of each durable session. Raises Unavailable or MetadataDiskFailed."""
        with _disk(self.path):
            return self._sql.execute("SELECT id, timeout_s FROM session ORDER BY id").fetchall()

    def last_backup_ms(self) -> int:
        """Returns when `back_up` made the last copy of this file, in milliseconds since the epoch; 0: never. The time
        is that of an empty file beside the metadata file, because the copies may be moved elsewhere."""
        try:
            return os.stat(self.path + BACKED_UP_FILE_SUFFIX).st_mtime_ns // 1_000_000
        except OSError:
            return 0

    def back_up(self, path: str) -> tuple[int, int]:
        """Writes a complete, synced copy of the metadata to `path`. Returns (revision, size in bytes) of the copy.
        Raises AlreadyExists if `path` exists, Unavailable or OSError if the copy cannot be created, synced or renamed,
        and MetadataDiskFailed.

        The copy is one step of SQLite's backup. No write happens meanwhile, because this thread does all writes."""
        if os.path.exists(path):
            raise AlreadyExists(f"{path} exists already; give another name", path=path)
        partial = path + ".partial"
        revision = self.write_copy(partial)
        sync_file(partial)
        os.rename(partial, path)
        sync_file(os.path.dirname(path) or ".")
        with contextlib.suppress(OSError):  # the copy is made, and only seems older
            mark_backed_up(self.path)
        return revision, os.path.getsize(path)

    def write_copy(self, path: str) -> int:
        """Writes a complete copy of the metadata to `path`, replaces the file that a failed copy left there, and
        returns the revision of the copy. The copy is not synced. Raises Unavailable or OSError if the copy cannot be
        written; deletes then what was written of it."""
        remove_copy(path)
        try:
            create_private_file(path)
            copy = sqlite3.connect(path, isolation_level=None)
            try:
                copy.execute("PRAGMA synchronous=OFF")  # the caller syncs the whole file
                self._sql.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE").fetchall()
            finally:
                copy.close()
        except sqlite3.Error as error:  # of the copy: the metadata file itself is unchanged
            remove_copy(path)
            raise Unavailable(f"{path}: no copy was written: {error}", path=path) from error
        except Exception:
            remove_copy(path)
            raise
        return self.revision

    # -------------------------------------------------------------------------------------------- writing
    def apply(self, jobs: Sequence[TreeJob]) -> list[TreeJobResult | MagnetarError]:
        """Does the jobs in order, in one durable transaction. Returns the outcome of each job: its result, or the
        BadVersion with which a commit was refused. Raises Unavailable (then nothing was done) or MetadataDiskFailed."""
        revision, total = self.revision, self._total
        try:
            with _disk(self.path):
                self._sql.execute("BEGIN IMMEDIATE")
                outcomes: list[TreeJobResult | MagnetarError] = []
                for commits, some in groupby(jobs, lambda job: isinstance(job, CommitJob)):
                    done = list(some)
                    outcomes += self._commit(done) if commits else [self._of_session(job) for job in done]
                self._store_sum()
                self._sql.execute("COMMIT")
            if self.revision > revision:
                self._write_revision()
        except MetadataDiskFailed:
            raise
        except BaseException:
            self.revision, self._total = revision, total
            self._roll_back()
            raise
        return outcomes

    def _roll_back(self) -> None:
        if self._sql.in_transaction:  # a full disk may have rolled it back already
            with _disk(self.path):
                self._sql.execute("ROLLBACK")

    def _of_session(self, job: TreeJob) -> TreeJobResult:
        match job:
            case OpenSession(session, timeout_s):
                self._sql.execute("INSERT OR REPLACE INTO session VALUES (?, ?)", (session, timeout_s))
                return TreeJobResult([], self.revision)
            case EndSession(session):
                return self._end_session(session)
            case CommitJob():
                raise AssertionError("commits are done together")

    def _commit(self, jobs: Sequence[TreeJob]) -> list[TreeJobResult | MagnetarError]:
        commits = [job for job in jobs if isinstance(job, CommitJob)]
        known = self._versions(list(list_commit_paths(commits)))
        batch = CommitGroup({path: version for path, (version, _) in known.items()}, self.revision)
        outcomes: list[TreeJobResult | MagnetarError] = [batch.add(commit) for commit in commits]
        self._write(batch)
        for path, row in batch.nodes.items():
            self._update_sum(path, known.get(path), row)
        self.revision = batch.revision
        return outcomes

    def _versions(self, paths: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Returns (version, revision) of each node that exists, by path."""
        rows = self._one(_VERSIONS, msgspec.json.encode(paths).decode())
        found: dict[str, tuple[int, int]] = msgspec.json.decode(rows)
        return found

    def _write(self, batch: CommitGroup) -> None:
        deleted = [path for path, row in batch.nodes.items() if row is None]
        if deleted:
            self._sql.execute(_DELETE, (msgspec.json.encode(deleted).decode(),))
        rows: list[NodeRow] = [row for row in batch.nodes.values() if row is not None]
        start = 0
        while start < len(rows):
            some = rows[start : start + next(each for each in ROWS_PER_STATEMENT if each <= len(rows) - start)]
            self._sql.execute(_PUT[len(some)], [value for row in some for value in row])
            start += len(some)

    def _end_session(self, session: str) -> TreeJobResult:
        self._sql.execute("DELETE FROM session WHERE id = ?", (session,))
        query = "SELECT path, version, revision FROM node WHERE session = ? ORDER BY path"
        gone = self._sql.execute(query, (session,)).fetchall()
        if not gone:
            return TreeJobResult([], self.revision)
        for path, *before in gone:
            self._update_sum(path, before, None)
        self._sql.execute("DELETE FROM node WHERE session = ?", (session,))
        self.revision += 1
        return TreeJobResult([], self.revision, [NodeChanged(path, NODE_ABSENT, self.revision) for path, *_ in gone])


class AnsweredRevisionFile:
    """Stores which revision of the metadata file was answered to clients last, in a small file beside it. By it a start
    notices that the metadata file lost changes. The methods raise OSError.

        <file>-answered    magic "MGTA", revision (8 bytes), CRC-32 of both

    Rule. To SQLite each of these is a valid file of an earlier moment: a file whose write-ahead log lost its end, an
    empty or a missing file, an older copy in the place of a newer one. So the revision is written after every durable
    transaction, before its changes are answered. A start on a metadata file with an earlier revision is refused. The
    stored revision is not synced, which saves time. It is never later than that of the metadata file. After a power
    loss it may be some seconds older: then a start may miss that the last changes are lost, but refuses no sound file.
    A damaged file is ignored. A restore renames this file together with its metadata file (sqlite.py)."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path + ANSWERED_FILE_SUFFIX, os.O_RDWR | os.O_CREAT, 0o600)

    def read(self) -> int:
        """Returns the stored revision; -1 if there is none, or if the file is damaged. Raises OSError."""
        data = os.pread(self._file, _NOTE.size + _NOTE_SUM.size, 0)
        if len(data) < _NOTE.size + _NOTE_SUM.size:
            return -1
        magic, revision = _NOTE.unpack_from(data)
        (total,) = _NOTE_SUM.unpack_from(data, _NOTE.size)
        return int(revision) if magic == REVISION_NOTE_MAGIC and total == zlib.crc32(data[: _NOTE.size]) else -1

    def write(self, revision: int) -> None:
        """Stores `revision` in place of the former one. Does not sync the file. Raises OSError."""
        head = _NOTE.pack(REVISION_NOTE_MAGIC, revision)
        os.pwrite(self._file, head + _NOTE_SUM.pack(zlib.crc32(head)), 0)

    def close(self) -> None:
        os.close(self._file)


def compute_row_checksum(path: str, version: int, revision: int) -> int:
    """Returns the checksum of a node's row in the table of nodes. No two rows of a node have the same revision, so an
    older row has another checksum. It does not cover the value, which has a checksum of its own."""
    return int.from_bytes(blake2b(f"{path} {version} {revision}".encode(), digest_size=8).digest()) & _SUM_MASK


def create_private_file(path: str) -> None:
    """Creates the file if it is missing, and makes it readable for its owner only, because the metadata has the keys of
    ledgers and grants. SQLite gives its write-ahead log the same mode. Raises OSError."""
    if path == ":memory:":
        return
    opened = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(opened).st_mode & 0o077:
            os.fchmod(opened, 0o600)
    finally:
        os.close(opened)


def mark_backed_up(path: str) -> None:
    """Notes, in the time of an empty file, that a copy of the metadata file `path` was made now. Raises OSError."""
    create_private_file(path + BACKED_UP_FILE_SUFFIX)
    os.utime(path + BACKED_UP_FILE_SUFFIX)


def remove_copy(path: str) -> None:
    """Deletes the file of a copy that was not finished, and its journals, if they exist. Raises OSError."""
    for each in (path, f"{path}-journal", f"{path}-wal", f"{path}-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(each)


def sync_file(path: str) -> None:
    """Syncs the file or the directory at `path` to the disk. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _cannot_open(path: str, error: sqlite3.Error) -> MagnetarError:
    code = _primary(error)
    if code in _BUSY:
        return Busy(f"{path}: another process has this metadata file open; stop it or use another folder", path=path)
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):  # the last: of its definitions
        return DataLost(f"{path}: not a readable metadata file: {error}{_RESTORE}", path=path)
    return Unavailable(f"{path}: cannot be opened: {error}", path=path)


def _primary(error: sqlite3.Error) -> int:
    """Returns SQLite's primary result code of an error: the low byte of the extended code."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code & 0xFF


@contextlib.contextmanager
def _disk(path: str) -> Iterator[None]:
    """Context manager that translates SQLite's errors: Unavailable if the disk is full or no file can be opened,
    MetadataDiskFailed otherwise."""
    try:
        yield
    except sqlite3.Error as error:
        if _primary(error) in _FULL:
            raise Unavailable(
                f"{path}: the disk is full; nothing was written", path=path, **{NO_SPACE_FIELD: "disk"}
            ) from error
        if _primary(error) == sqlite3.SQLITE_CANTOPEN:  # of a journal: the file itself is open
            raise Unavailable(f"{path}: no file can be opened; nothing was written", path=path) from error
        raise MetadataDiskFailed(f"{path}: {error}") from error
