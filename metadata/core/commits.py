"""Commits of one batch, decided one after the other before any of them is written.

    batch = CommitBatch(versions, revision)      of the nodes that the commits name; a node without a version is absent
    outcome = batch.add(commit)                  Done, or BadVersion: the others are not affected by it
    batch.nodes                                  what is to be written: the last state of each node; None: deleted

Each commit finds the nodes as those before it left them, and each operation as those before it in its commit. A refused
commit leaves nothing. The driver (metadata/tree.py) reads the versions in one statement and writes the nodes in one.
Guarded by tests/metadata/test_commits.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from ...proto.errors import BadVersion
from ..store import ABSENT, ANY, Changed, Check, Delete, Operation, Put
from .rules import check_version


class Commit(msgspec.Struct, frozen=True):
    """A transaction; `session` owns the ephemerals that it puts."""

    operations: Sequence[Operation]
    session: str


class Done(msgspec.Struct, frozen=True):
    """The result of a job. `revision` is that of the tree after it; a Commit always makes it grow by one."""

    versions: list[int]
    revision: int
    changes: list[Changed] = []


Row = tuple[str, bytes, int, int, str | None]
"""The row of a node: path, value, version, revision, owner of an ephemeral."""


class CommitBatch:
    """A batch of commits. `revision`: of the tree, after the commits that were added."""

    def __init__(self, versions: Mapping[str, int], revision: int) -> None:
        self.revision = revision
        self.nodes: dict[str, Row | None] = {}
        self._versions = versions

    def add(self, commit: Commit) -> Done | BadVersion:
        done, nodes = Done([], self.revision + 1), dict[str, Row | None]()
        try:
            for operation in commit.operations:
                done.versions.append(self._operate(operation, commit.session, nodes, done))
        except BadVersion as refused:
            return refused
        self.nodes |= nodes
        self.revision = done.revision
        return done

    def _operate(self, operation: Operation, session: str, nodes: dict[str, Row | None], done: Done) -> int:
        """Applies an operation; returns the node's new version."""
        path = operation.path
        written = nodes if path in nodes else self.nodes
        if path in written:
            row = written[path]
            found = ABSENT if row is None else row[2]
        else:
            found = self._versions.get(path, ABSENT)
        if operation.expected not in (found, ANY):
            check_version(path, operation.expected, found)
        match operation:
            case Check():
                return found
            case Delete():
                if found != ABSENT:
                    nodes[path] = None
                    done.changes.append(Changed(path, ABSENT, done.revision))
                return ABSENT
            case Put():
                owner = session if operation.ephemeral else None
                nodes[path] = (path, bytes(operation.value), found + 1, done.revision, owner)
                done.changes.append(Changed(path, found + 1, done.revision))
                return found + 1


def paths_of(commits: Sequence[Commit]) -> Iterator[str]:
    """Returns the paths of the nodes that the commits name, each once."""
    return iter({operation.path: None for commit in commits for operation in commit.operations})
