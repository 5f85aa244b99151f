"""The metadata's file on a disk that crashes and rots: a tier of its own, on real files of SQLite.

    python -m tests.metadata.rot --states 20000 --seed 7

A workload of commits, sessions and checkpoints of the write-ahead log runs on a `MetadataTree`, and after every
transaction the files are kept, as they are on the disk then (*moments*), with what the tree contains. From them come
the states:

- *crash*: power is lost within the next transaction. What was synced is there: the log may have any sectors of what is
  written next, and, when that is whole, the file any sectors of a checkpoint. The note of what was answered is not
  synced: any earlier one may be there. The tree is that of the moment or of the next one, and the start works.
- *rot*: at rest, when the note is on the disk, a file loses its end, a sector, a bit, or is an earlier one of itself.
  The start is refused with a reason, or the tree is that of the moment; a value that changed is told by its record.

Nothing may be older than what was answered, and nothing a mixture. The last line is JSON: `states`, `failed`, and how
often a start was `refused`, the tree was `whole`, or a damaged record was `told`.
"""

import argparse
import json
import os
import random
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from magnetar.metadata.records import CounterRecord, DamagedRecord, decode_record, encode_record
from magnetar.metadata.store import ANY_VERSION, CommitOperation, DeleteNode, PutNode
from magnetar.metadata.tree import (
    ANSWERED_FILE_SUFFIX,
    EndSession,
    MetadataDiskFailed,
    MetadataTree,
    OpenSession,
    TreeJob,
)
from magnetar.metadata.tree_core import CommitJob
from magnetar.proto.errors import DataLost, InvalidConfiguration, MagnetarError

SECTOR, PAGE = 512, 4096
LOG_HEADER = 32
ENDINGS = ("", "-wal", ANSWERED_FILE_SUFFIX)
SMALL_LOG_PAGES = 12
"""Of a write-ahead log before SQLite checkpoints it: so a short workload has some checkpoints."""

Files = dict[str, bytes]
Rows = dict[str, tuple[bytes, int, bool]]


class Moment(NamedTuple):
    """After a transaction, when it is durable and noted."""

    files: Files
    rows: Rows
    revision: int


@dataclass(slots=True)
class Failure:
    name: str
    why: str


# ------------------------------------------------------------------------------------------ the workload
def _jobs(rng: random.Random, sessions: list[str]) -> list[TreeJob]:
    """What one transaction does."""
    jobs: list[TreeJob] = []
    for _ in range(rng.choice((1, 1, 1, 5))):
        drawn = rng.random()
        if drawn < 0.1:
            sessions.append(f"session-{len(sessions)}")
            jobs.append(OpenSession(sessions[-1], 60.0))
        elif drawn < 0.15 and sessions:
            jobs.append(EndSession(rng.choice(sessions)))
        else:
            jobs.append(CommitJob(tuple(_operation(rng) for _ in range(rng.choice((1, 1, 3)))), ""))
    return jobs


def _operation(rng: random.Random) -> CommitOperation:
    path = f"/some/{rng.randrange(30):02d}"
    if rng.random() < 0.15:
        return DeleteNode(path, ANY_VERSION)
    return PutNode(path, _value(rng, path), ANY_VERSION)


def _value(rng: random.Random, path: str) -> bytes:
    """A record, as every value of ours is."""
    return encode_record(CounterRecord(next=rng.randrange(10 ** rng.choice((1, 9)))), path)


def record(folder: str, seed: int, transactions: int) -> list[Moment]:
    rng = random.Random(f"metadata {seed}")
    path = os.path.join(folder, "live")
    tree = MetadataTree(path, "first")
    tree._sql.execute(f"PRAGMA wal_autocheckpoint={SMALL_LOG_PAGES}").fetchall()
    sessions: list[str] = []
    moments = [_moment(path, tree)]
    for _ in range(transactions):
        tree.apply(_jobs(rng, sessions))
        moments.append(_moment(path, tree))
    tree.close()
    _remove(path)
    return moments


def _moment(path: str, tree: MetadataTree) -> Moment:
    files = {}
    for ending in ENDINGS:
        with open(path + ending, "rb") as file:
            files[ending] = file.read()
    return Moment(files, rows_of(tree), tree.revision)


def closed(folder: str, moment: Moment) -> Moment:
    """The same after a stop in order: without a log."""
    path = os.path.join(folder, "closing")
    for ending, data in moment.files.items():
        with open(path + ending, "wb") as file:
            file.write(data)
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    with open(path, "rb") as file:
        files = {"": file.read(), ANSWERED_FILE_SUFFIX: moment.files[ANSWERED_FILE_SUFFIX]}
    _remove(path)
    return moment._replace(files=files)


def rows_of(tree: MetadataTree) -> Rows:
    """Each node, by its path: what a reader of all of them, and one of each, sees."""
    paths = [f"/some/{each}" for each in tree.children("/some")]
    found = {path: tree.get(path) for path in paths}
    return {path: (bytes(node.value), node.version, node.ephemeral) for path, node in found.items() if node is not None}


# ------------------------------------------------------------------------------------------ states
class State(NamedTuple):
    name: str
    files: Files
    may_be: tuple[Moment, ...]
    crash: bool  # then the start works


def _mixed(rng: random.Random, before: bytes, after: bytes) -> bytes:
    """Any sectors of what was written may be there, and any length of the file."""
    size = max(len(before), len(after))
    old, new = before.ljust(size, b"\0"), after.ljust(size, b"\0")
    survives = rng.choice((0.1, 0.5, 0.9))
    parts = [(new if rng.random() < survives else old)[at : at + SECTOR] for at in range(0, size, SECTOR)]
    mixed = b"".join(parts)
    return mixed if len(after) <= len(before) or rng.random() < 0.5 else mixed[: rng.randint(len(before), size)]


def _log(rng: random.Random, before: bytes, after: bytes) -> bytes:
    """A log that begins anew after a checkpoint has its header synced before anything else of it is written."""
    if before[:LOG_HEADER] == after[:LOG_HEADER] or not before:
        return _mixed(rng, before, after)
    if rng.random() < 0.2:
        return before
    return _mixed(rng, after[:LOG_HEADER] + before[LOG_HEADER:], after)


def crashed(rng: random.Random, moments: list[Moment], number: int) -> State:
    """Within the transaction after that moment. A checkpoint writes the file after the log was synced."""
    now, then = moments[number], moments[number + 1]
    noted = moments[rng.randint(0, number)] if rng.random() < 0.5 else now
    files = {"": now.files[""], "-wal": then.files["-wal"], ANSWERED_FILE_SUFFIX: noted.files[ANSWERED_FILE_SUFFIX]}
    if now.files[""] != then.files[""] and rng.random() < 0.5:
        files[""] = _mixed(rng, now.files[""], then.files[""])
        return State(f"crash {number} in a checkpoint", files, (then,), crash=True)
    files["-wal"] = _log(rng, now.files["-wal"], then.files["-wal"])
    return State(f"crash {number}", files, (now, then), crash=True)


def _bit(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _sector(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data)) // SECTOR * SECTOR
    return data[:at] + rng.choice((bytes(SECTOR), rng.randbytes(SECTOR)))[: len(data) - at] + data[at + SECTOR :]


def _shorter(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.choice((0, rng.randrange(len(data))))]


def _lost(rng: random.Random, before: bytes, after: bytes) -> bytes:
    """Writes of pages that the disk said it had done."""
    keeps = rng.choice((0.2, 0.7, 0.95))
    pages = [(after if rng.random() < keeps else before.ljust(len(after), b"\0"))[at : at + PAGE]
             for at in range(0, len(after), PAGE)]  # fmt: skip
    return b"".join(pages)


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes]] = {"bit": _bit, "sector": _sector, "shorter": _shorter}


def rotten(rng: random.Random, moments: list[Moment], number: int, folder: str) -> State:
    """At rest, after that moment."""
    now = moments[number] if rng.random() < 0.5 else closed(folder, moments[number])
    files = dict(now.files)
    what = rng.choice((*DAMAGE, *DAMAGE, "older", "lost", "lost", "gone"))
    whole = [ending for ending in ("", "-wal") if files.get(ending)]
    ending = rng.choice(whole)
    name = f"rot {number} {what} {ending or 'file'}"
    if what == "older":
        earlier = moments[rng.randint(0, number)]
        for each in whole if rng.random() < 0.5 else [ending]:
            files[each] = earlier.files[each]
    elif what == "lost":
        files[""] = _lost(rng, moments[rng.randint(0, number)].files[""], files[""])
    elif what == "gone":
        del files[ending]
    else:
        files[ending] = DAMAGE[what](rng, files[ending])
    return State(name, files, (now,), crash=False)


# ------------------------------------------------------------------------------------------ the verdict
def judge(folder: str, state: State) -> tuple[str, Failure | None]:
    """What came of a start: whole, refused, told."""
    path = os.path.join(folder, "state")
    for ending, data in state.files.items():
        with open(path + ending, "wb") as file:
            file.write(data)
    try:
        try:
            tree = MetadataTree(path, "next")
        except (DataLost, InvalidConfiguration) as error:  # the latter: its magic or its version is another one
            return "refused", Failure(state.name, f"a crash is called damage: {error}") if state.crash else None
        except MagnetarError as error:
            return "refused", Failure(state.name, f"the start fails: {error!r}")
        with closing(tree):
            return _compared(state, tree)
    finally:
        _remove(path)


def _compared(state: State, tree: MetadataTree) -> tuple[str, Failure | None]:
    try:
        found, told = rows_of(tree), 0
    except MetadataDiskFailed as error:
        return "", Failure(state.name, f"it started, and cannot be read: {error}")
    for moment in state.may_be:
        if found == moment.rows and tree.revision >= moment.revision:
            return "whole", None
    (wanted, *others) = state.may_be
    if not others and found.keys() == wanted.rows.keys():
        for path, row in found.items():
            if row != wanted.rows[path]:
                if row[1:] != wanted.rows[path][1:] or not _says_that_it_is_damaged(path, row[0]):
                    return "", Failure(state.name, f"{path} is {row}, and was {wanted.rows[path]}")
                told += 1
        if tree.revision >= wanted.revision:
            return "told", None
    known = [(each.revision, len(each.rows)) for each in state.may_be]
    return "", Failure(state.name, f"revision {tree.revision} with {len(found)} nodes, of {known}")


def _says_that_it_is_damaged(path: str, value: bytes) -> bool:
    try:
        decode_record(value, CounterRecord, path)
    except DamagedRecord:
        return True
    return False


def _remove(path: str) -> None:
    for ending in (*ENDINGS, "-shm"):
        if os.path.exists(path + ending):
            os.remove(path + ending)


def run(seed: int, states: int, transactions: int = 60) -> tuple[Counter[str], list[Failure]]:
    """So many states of one workload after the other."""
    came: Counter[str] = Counter()
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory(prefix="magnetar-rot-") as folder:
        while sum(came.values()) < states:
            workload = seed + sum(came.values()) // 1000
            moments, rng = record(folder, workload, transactions), random.Random(f"states {workload}")
            for number in range(min(1000, states - sum(came.values()))):
                at = rng.randrange(len(moments) - 1)
                state = crashed(rng, moments, at) if rng.random() < 0.5 else rotten(rng, moments, at, folder)
                what, failure = judge(folder, state)
                came[what or "failed"] += 1
                if failure is not None:
                    failures.append(Failure(f"{workload}/{number} {failure.name}", failure.why))
    return came, failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.metadata.rot", description=__doc__)
    parser.add_argument("--states", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    came, failures = run(options.seed, options.states)
    for failure in failures[:20]:
        print(f"{failure.name}: {failure.why}")
    counts = {name: came[name] for name in ("whole", "refused", "told")}
    print(json.dumps({"states": sum(came.values()), "failed": len(failures), **counts}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
