"""The rules for a path, a watch prefix and a commit. Every store checks them before it sends or writes anything.

A path is "/" and then segments separated by "/": none empty, none "." or "..", no control characters, at most
PATH_BYTES_MAX bytes in UTF-8. A prefix (of `children` and `watch`) is a path, or "/" for the whole tree.
A commit has 1 to OPERATIONS_PER_COMMIT_MAX operations that together have at most COMMIT_BYTES_MAX bytes of paths and
values. A broken rule is the caller's fault: InvalidName, MessageTooLarge or InvalidRequest, and nothing was done.

Also in this file, each below its heading: the parts of the tree that a member of a secured cluster may write, by its
role (rights_core); commits of one batch, decided one after the other before any of them is written (commits_core); the
last changes of the tree, for watches that resume without a gap (history_core); the nodes that were read lately
(known_nodes_core); the table of sessions (sessions_core).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from ..proto.errors import BadVersion, InvalidName, InvalidRequest, MessageTooLarge, NodeExists, NoNode, SessionExpired
from . import paths
from .store import (
    ANY_VERSION,
    NODE_ABSENT,
    VALUE_BYTES_MAX,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    NodeChanged,
    PutNode,
    WatchReset,
)

PATH_BYTES_MAX = 4096
"""The longest path, in bytes: several times the length of an encoded topic name with a subscription name."""
OPERATIONS_PER_COMMIT_MAX = 1024
COMMIT_BYTES_MAX = 8 << 20
"""The largest commit, in bytes: half of the largest gRPC message, so that a commit also fits into a request."""

_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+)+")


def check_path(path: str) -> None:
    """Raises InvalidName if `path` is not a valid path of a metadata node, or has more than PATH_BYTES_MAX bytes."""
    if _PATH.fullmatch(path) is None:
        raise InvalidName(f"{path!r} is not a metadata path such as '/a/b'", path=ascii(path))
    try:
        size = len(path) if path.isascii() else len(path.encode())
    except UnicodeEncodeError as error:
        raise InvalidName(f"{path!r} is not valid Unicode", path=ascii(path)) from error
    if size > PATH_BYTES_MAX:
        raise InvalidName(f"a path of {size} bytes; at most {PATH_BYTES_MAX} are allowed", size=size)


def check_prefix(prefix: str) -> None:
    """Raises InvalidName if `prefix` is neither "/" nor a valid path of a metadata node."""
    if prefix != "/":
        check_path(prefix)


def is_at_or_below(prefix: str, path: str) -> bool:
    """Returns whether `path` is `prefix` itself, or is below it at any depth."""
    return prefix == "/" or path == prefix or path.startswith(prefix + "/")


def check_operations(operations: Sequence[CommitOperation]) -> None:
    """Checks operations that are to be committed together. Raises InvalidRequest if there are not 1 to
    OPERATIONS_PER_COMMIT_MAX of them or an expected version is invalid, InvalidName for an invalid path,
    MessageTooLarge if a value has more than VALUE_BYTES_MAX bytes or all of them more than COMMIT_BYTES_MAX."""
    if not 1 <= len(operations) <= OPERATIONS_PER_COMMIT_MAX:
        raise InvalidRequest(f"a commit of {len(operations)} operations; 1 to {OPERATIONS_PER_COMMIT_MAX} are allowed")
    size = 0
    for operation in operations:
        check_path(operation.path)
        if operation.expected < ANY_VERSION:
            raise InvalidRequest(f"{operation.path}: {operation.expected} is not a version, ABSENT or ANY")
        size += len(operation.path)
        if isinstance(operation, PutNode):
            size += len(operation.value)
            if len(operation.value) > VALUE_BYTES_MAX:
                raise _too_large(operation)
    if size > COMMIT_BYTES_MAX:
        raise MessageTooLarge(
            f"a commit of {size} bytes; at most {COMMIT_BYTES_MAX} are allowed: split it",
            size=size, limit=COMMIT_BYTES_MAX,
        )  # fmt: skip


def _too_large(put: PutNode) -> MessageTooLarge:
    return MessageTooLarge(
        f"{put.path}: a value of {len(put.value)} bytes; at most {VALUE_BYTES_MAX} are allowed",
        size=len(put.value), limit=VALUE_BYTES_MAX,
    )  # fmt: skip


def check_version(path: str, expected: int, found: int) -> None:
    """Checks that a node has the version that an operation expects. `expected`: a version, NODE_ABSENT, or ANY_VERSION,
    which every node meets; `found`: the node's version, NODE_ABSENT if there is no node. Raises NodeExists, NoNode or
    BadVersion, with the path and both versions."""
    if expected in (ANY_VERSION, found):
        return
    facts = {"path": path, "expected": expected, "found": found}
    if expected == NODE_ABSENT:
        raise NodeExists(f"{path}: exists (version {found}), and was expected to be absent", **facts)
    if found == NODE_ABSENT:
        raise NoNode(f"{path}: does not exist; version {expected} was expected", **facts)
    raise BadVersion(f"{path}: version {found} was found, {expected} was expected", **facts)


# --------------------------------------------------------------------------------------------------- rights_core
# The parts of the tree that a member of a secured cluster may write, by its role; each may read all of it.
#
# A role writes its own keys only (`/members/<role>`), so none can make a key of another role; and such a key ends with
# the session that wrote it, so none stays after its process. A bookie writes what repair
# and its registration need, and no topic, owner, policy or grant; a broker writes no bookie's registration.


_ROLES = ("broker", "bookie", "operator")
_OF_BOOKIES = (
    paths.BOOKIES_ROOT, paths.LEDGERS, paths.DAMAGED_LEDGERS, paths.UNDER_REPLICATED_LEDGERS, "/repair",
    paths.LEDGER_IDS, paths.CLUSTER,
)  # fmt: skip
_NOT_OF_BROKERS = (paths.COOKIES, paths.AVAILABLE_BOOKIES)


def may_role_write(role: str, path: str, *, lasting: bool = True) -> bool:
    """Returns whether a member of the cluster with this role ("broker", "bookie" or "operator") may write or delete the
    node at `path`; False for any other role. `lasting`: whether the operation writes a node that is not ephemeral; a
    key in /members may only be ephemeral."""
    if _is_in(path, paths.MEMBERS):
        return role in _ROLES and path.startswith(paths.member(role, "")) and not lasting
    match role:
        case "operator":
            return True
        case "broker":
            return not any(_is_in(path, each) for each in _NOT_OF_BROKERS)
        case "bookie":
            return any(_is_in(path, each) for each in _OF_BOOKIES)
    return False


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


# -------------------------------------------------------------------------------------------------- commits_core
# Commits of one batch, decided one after the other before any of them is written.
#
#     batch = CommitGroup(versions, revision)      of the nodes that the commits name; one without a version is absent
#     outcome = batch.add(commit)                  TreeJobResult, or BadVersion: the others are not affected by it
#     batch.nodes                                  what is to be written: the last state of each node; None: deleted
#
# Each commit finds the nodes as those before it left them, and each operation as those before it in its commit. A
# refused commit leaves nothing. The driver (metadata/tree.py) reads the versions in one statement and writes the nodes
# in one. Guarded by tests/metadata/test_commits.py.


class CommitJob(msgspec.Struct, frozen=True):
    """Job for the tree: commit these operations, all or none. The ephemeral nodes that they write belong to `session`;
    "": they write none."""

    operations: Sequence[CommitOperation]
    session: str


class TreeJobResult(msgspec.Struct, frozen=True):
    """The result of a job for the tree: the new version of each operation's node (none for a job about a session), the
    changes, and the revision of the tree afterwards. Each CommitJob makes a new revision."""

    versions: list[int]
    revision: int
    changes: list[NodeChanged] = []


NodeRow = tuple[str, bytes, int, int, str | None]
"""The row of a node in the file: path, value, version, revision, session (None: the node is not ephemeral)."""


class CommitGroup:
    """A batch of commits that are written together. Made from the versions of the nodes that the commits name (a
    missing path: no node) and the revision before. `nodes` are the nodes to write (None: to delete), `revision` is the
    revision of the tree after the commits that were added."""

    def __init__(self, versions: Mapping[str, int], revision: int) -> None:
        self.revision = revision
        self.nodes: dict[str, NodeRow | None] = {}
        self._versions = versions

    def add(self, commit: CommitJob) -> TreeJobResult | BadVersion:
        """Adds a commit to the batch and returns its result. If a node does not have the expected version, adds nothing
        and returns the BadVersion (it is not raised)."""
        done, nodes = TreeJobResult([], self.revision + 1), dict[str, NodeRow | None]()
        try:
            for operation in commit.operations:
                done.versions.append(self._operate(operation, commit.session, nodes, done))
        except BadVersion as refused:
            return refused
        self.nodes |= nodes
        self.revision = done.revision
        return done

    def _operate(
        self, operation: CommitOperation, session: str, nodes: dict[str, NodeRow | None], done: TreeJobResult
    ) -> int:
        """Applies one operation to `nodes` and returns the node's new version. Raises BadVersion."""
        path = operation.path
        written = nodes if path in nodes else self.nodes
        if path in written:
            row = written[path]
            found = NODE_ABSENT if row is None else row[2]
        else:
            found = self._versions.get(path, NODE_ABSENT)
        if operation.expected not in (found, ANY_VERSION):
            check_version(path, operation.expected, found)
        match operation:
            case CheckNodeVersion():
                return found
            case DeleteNode():
                if found != NODE_ABSENT:
                    nodes[path] = None
                    done.changes.append(NodeChanged(path, NODE_ABSENT, done.revision))
                return NODE_ABSENT
            case PutNode():
                owner = session if operation.ephemeral else None
                nodes[path] = (path, bytes(operation.value), found + 1, done.revision, owner)
                done.changes.append(NodeChanged(path, found + 1, done.revision))
                return found + 1


def list_commit_paths(commits: Sequence[CommitJob]) -> Iterator[str]:
    """Yields the path of each node that the commits name, each path once."""
    return iter({operation.path: None for commit in commits for operation in commit.operations})


# -------------------------------------------------------------------------------------------------- history_core
# The last changes of the tree, for watches that resume without a gap.
#
# The history keeps every change of the revisions above `floor`, in order, up to `revision`. A watch is one number here,
# the revision that it has seen; `changes_since` returns the changes after it. So a slow watcher costs nothing and grows
# no queue. A watcher gets `WatchReset` when changes after its revision have left the history, or when its revision is
# in the future (an older tree replaced this one): it lists again, and continues after the revision of the WatchReset.
# The changes of one revision are returned together or not at all. Guarded by test_history.py.


KEPT_CHANGES_MAX = 10_000
"""The largest number of changes that are kept, about 2 MB. A watch that lags by 10,000 changes is faster with a new
list of the nodes."""


class ChangeHistory:
    """The latest changes of the metadata tree, from which watches read. Keeps at most `changes_max` changes. It has all
    changes after the revision `floor`, up to `revision`."""

    def __init__(self, revision: int, changes_max: int = KEPT_CHANGES_MAX) -> None:
        """Makes a history without changes that begins at `revision`. A watch from an earlier revision gets a
        WatchReset."""
        assert changes_max >= 1
        self.revision = revision
        self.floor = revision
        self._changes_max = changes_max
        self._changes: deque[NodeChanged] = deque()

    def __len__(self) -> int:
        return len(self._changes)

    def append(self, revision: int, changes: Sequence[NodeChanged]) -> None:
        """Adds the next revision of the tree, with all its changes; there may be none. Drops the oldest revisions if
        there are more than `changes_max` changes."""
        assert revision == self.revision + 1, f"revision {revision} after {self.revision}"
        self.revision = revision
        self._changes.extend(changes)
        while len(self._changes) > self._changes_max:
            self.floor = self._changes[0].revision
            while self._changes and self._changes[0].revision == self.floor:
                self._changes.popleft()

    def changes_since(self, prefix: str, after_revision: int) -> list[NodeChanged] | WatchReset:
        """Returns the changes of the nodes at or below `prefix` after the revision `after_revision`, in order. Returns
        a WatchReset if the history does not have all of them any more, or if `after_revision` is later than the tree's
        revision."""
        if not self.floor <= after_revision <= self.revision:
            return WatchReset(self.revision)
        news: list[NodeChanged] = []
        under = "/" if prefix == "/" else prefix + "/"
        for change in reversed(self._changes):  # from the newest: a watch usually lags by one or two revisions
            if change.revision <= after_revision:
                break
            # `is_at_or_below`: each watch asks it of each change
            if change.path.startswith(under) or change.path == prefix:
                news.append(change)
        news.reverse()
        return news

    def check(self) -> None:
        assert self.floor <= self.revision
        revisions = [change.revision for change in self._changes]
        assert revisions == sorted(revisions), "changes are in the order of revisions"
        assert not revisions or self.floor < revisions[0] <= revisions[-1] <= self.revision


# ---------------------------------------------------------------------------------------------- known_nodes_core
# The nodes that were read lately: a read of one of them waits for no thread and no disk.
#
# The rule: what is known is the tree after the last commit that was answered. The driver (metadata/sqlite.py) tells
# each commit before it answers it, in the order of the commits, and each read of the tree before any commit that the
# read did not see. So a reader never gets a state that is older than a commit whose outcome anybody has. Absence is
# known as well. Bounds: `bytes_max` of paths and values, and the longest unread goes first; a value above
# VALUE_BYTES_MAX is not kept. Guarded by tests/metadata/test_known_nodes.py.


CACHED_NODES_BYTES_MAX = 2 << 20
CACHED_VALUE_BYTES_MAX = 64 << 10
NODE_MEMORY_BYTES = 300
"""Approximate memory of a cached node besides its path and value, in bytes."""


class CachedNode(Protocol):
    """The interface of a node that a NodeCache can store. StoredNode of metadata/tree.py has it."""

    @property
    def value(self) -> bytes: ...


N = TypeVar("N", bound=CachedNode)


class NodeCache(Generic[N]):
    """A cache of the metadata nodes that were read last, by path, of at most `bytes_max` bytes. Also caches that a node
    does not exist, as the value None. The node that was not read for the longest time is dropped first."""

    def __init__(self, bytes_max: int = CACHED_NODES_BYTES_MAX) -> None:
        self.bytes = 0
        self.nodes: dict[str, N | None] = {}  # in the order of the last reads; `get` one that is there
        self._bytes_max = bytes_max

    def get(self, path: str) -> N | None:
        """Returns the cached node; None if the tree has no such node. Raises KeyError if the cache does not have the
        path."""
        node = self.nodes.pop(path)
        self.nodes[path] = node
        return node

    def add(self, path: str, node: N | None) -> None:
        """Caches the node at `path` (None: the tree has no such node), which must be its present state. Removes the
        path instead if the value is larger than CACHED_VALUE_BYTES_MAX."""
        if path in self.nodes:
            self.discard(path)
        if node is not None and len(node.value) > CACHED_VALUE_BYTES_MAX:
            return
        self.nodes[path] = node
        self.bytes += NODE_MEMORY_BYTES + len(path) + (len(node.value) if node is not None else 0)  # `_size`
        while self.bytes > self._bytes_max:
            self.discard(next(iter(self.nodes)))

    def discard(self, path: str) -> None:
        """Removes the path from the cache, if the cache has it."""
        if path in self.nodes:
            self.bytes -= _size(path, self.nodes.pop(path))

    def on_changes(self, changes: Sequence[NodeChanged]) -> None:
        """Called when nodes of the tree were changed or deleted: removes them from the cache."""
        for change in changes:
            self.discard(change.path)

    def __len__(self) -> int:
        return len(self.nodes)

    def check(self) -> None:
        assert self.bytes == sum(_size(path, node) for path, node in self.nodes.items())
        assert self.bytes <= self._bytes_max


def _size(path: str, node: CachedNode | None) -> int:
    return NODE_MEMORY_BYTES + len(path) + (len(node.value) if node is not None else 0)


# ------------------------------------------------------------------------------------------------- sessions_core
# The table of sessions: which are open, and the deadline of each without a sign of life.
#
#     open ──touch──▶ open        the deadline becomes now + timeout
#     open ──close──▶ ended       at once, by its owner
#     open ──expire─▶ ended       the deadline has passed
#
# A session without a deadline (that of a user in the same process) ends only by `close`; `abandon` gives it a deadline.
# The driver that ends a session deletes its ephemerals after every commit that was accepted under it
# (metadata/sqlite.py). An id that is missing from the table has expired; ids are never reused.
#
# *A process that stood still does not judge*: a check more than TIMER_LATE_S after a deadline means that this process
# was stopped (a stopped machine, a blocked loop), and signs of life may be unread in its sockets. Then no session
# expires, and every deadline moves by the lateness and one timeout. Guarded by test_sessions.py.


TIMER_LATE_S = 1.0
"""If a timer is late by more than this, in seconds, the process was stopped for a while: a healthy event loop runs it
within milliseconds."""


class _Session(msgspec.Struct):
    timeout_s: float
    deadline: float | None  # None: lives as long as this process


class MetadataSessions:
    """The open sessions of a metadata service, and their deadlines. Every `now` is a time of the caller's monotonic
    clock, in seconds."""

    def __init__(self) -> None:
        self.open_ones: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self.open_ones)

    def __contains__(self, session: str) -> bool:
        return session in self.open_ones

    def open(self, session: str, timeout_s: float, now: float | None) -> None:
        """Adds a session that expires `timeout_s` seconds after `now`; if `now` is None, it does not expire."""
        assert session, "a session has a name"
        assert session not in self.open_ones, f"session {session!r} is opened twice"
        assert timeout_s > 0
        self.open_ones[session] = _Session(timeout_s, None if now is None else now + timeout_s)

    def renew_session(self, session: str, now: float) -> float:
        """Moves the deadline of the session to its timeout after `now`, because its client has shown that it is alive.
        Returns the session's timeout in seconds. Raises SessionExpired if the session is not open."""
        found = self.get(session)
        if found.deadline is not None:
            found.deadline = now + found.timeout_s
        return found.timeout_s

    def abandon(self, session: str, now: float) -> None:
        """Makes the session expire one timeout after `now`, because its user is gone and has not ended it. Does nothing
        if the session is not open."""
        if session in self.open_ones:
            found = self.open_ones[session]
            found.deadline = now + found.timeout_s

    def get(self, session: str) -> _Session:
        """Returns the session. Raises SessionExpired if it is not open."""
        found = self.open_ones.get(session)
        if found is None:
            raise SessionExpired(f"metadata session {session} has ended; open a new one", session=session)
        return found

    def close(self, session: str) -> bool:
        """Ends the session. Returns whether it was open."""
        return self.open_ones.pop(session, None) is not None

    def next_deadline(self) -> float | None:
        """Returns the earliest deadline of the sessions, in seconds of the clock; None if no session has a deadline."""
        return min((s.deadline for s in self.open_ones.values() if s.deadline is not None), default=None)

    def expire(self, now: float) -> list[str]:
        """Removes the sessions whose deadline has passed. Returns their ids, in the order in which they were opened; []
        if none has expired.

        If this call comes much too late (TIMER_LATE_S), this process itself was stopped. Then it removes no session,
        and gives all of them more time."""
        first = self.next_deadline()
        if first is None or now < first:
            return []
        if now - first > TIMER_LATE_S:
            self._excuse(now - first)
            return []
        ended = [s for s, state in self.open_ones.items() if state.deadline is not None and state.deadline <= now]
        for session in ended:
            del self.open_ones[session]
        return ended

    def _excuse(self, late_s: float) -> None:
        """Moves all deadlines, because this process was stopped and could not receive signs of life."""
        for state in self.open_ones.values():
            if state.deadline is not None:
                state.deadline += late_s + state.timeout_s

    def check(self) -> None:
        for session, state in self.open_ones.items():
            assert session, "a session has a name"
            assert state.timeout_s > 0, f"{session}: a timeout is positive"
