"""How the metadata tree is stored in an etcd: keys, and what is asked of etcd for a commit, a listing and a watch.

**Keys.** The node `/a/b` is the key `ROOT/a/b`, its *main key*; the value is the node's. The version of a node is
etcd's version of its main key less 1: 0 at creation, one more with each put, again 0 after a delete.
A transaction of etcd writes a key at most once, and so its version grows by one at most. A commit that writes a node
twice, or deletes it and makes it again, leaves another version than etcd counts. Such a node is stored at its *second
key*, `ROOT/a/b\\0`: the head of that value has the version (`SECOND_KEY_HEAD_STRUCT`). A node has at most one of its
two keys. The next put that makes version 0 uses the main key again. A session has the key `ROOT\\0session/LEASE`, with
its lease: it exists as long as the session.

**Commits** are one transaction each. All of it happens only if the session's key exists.

    operation            compares (main key, unless it says otherwise)     then
    put ANY_VERSION      second key absent                                 put; read its version
    put NODE_ABSENT      both keys absent                                  put
    put n                version n + 1                                     put
    delete ANY_VERSION   nothing                                           delete both keys
    delete n, check n    version n + 1                                     delete; nothing
    … NODE_ABSENT        both keys absent                                  nothing

So a commit needs no read before it (`plan_blind_commit`). The else-branch reads the versions that were found, at the
same moment: they decide the refusal. Only a commit that names a path twice, or meets a second key, is planned from a
read (`plan_read_commit`); it compares the mod_revisions that were read, and is planned again when one has changed.

Commits of one process that are under way at once, and name different nodes, may be one transaction (`CommitQueue`):
each is as much all or nothing as alone. If one of them is refused, nothing was done, and each is sent alone.

**Watches** start at the revision that the reader has seen, and not after it, and drop its changes: etcd then always
says when the history after it was compacted (a deletion at the revision of the compaction is not kept). Of one commit
and node a watch reports the puts since the last deletion in it, and before them one deletion, if there was one.

**Limits.** etcd refuses a transaction of more than `--max-txn-ops` compares or operations (128), or more than
`--max-request-bytes` (1.5 MiB). Both are checked here, before anything is sent.
Guarded by tests/metadata/test_etcd_core.py, on a model of etcd and on a real one.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from ..proto import etcd_pb2 as etcd
from ..proto.errors import (
    BackPressure,
    CredentialsExpired,
    InvalidConfiguration,
    InvalidRequest,
    MagnetarError,
    MessageTooLarge,
    OutcomeUnknown,
    SessionExpired,
    Unauthenticated,
    Unauthorized,
    Unavailable,
)
from .store import (
    ANY_VERSION,
    NO_SPACE_FIELD,
    NODE_ABSENT,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    NodeChanged,
    PutNode,
)
from .tree_core import check_version, is_at_or_below

REQUEST_OVERHEAD_BYTES = 1024
"""What etcd adds to a request before it measures it: its id, and the name of the user."""
NODES_PER_PAGE = 500
"""Nodes with their values of one page of a listing, for folders of small nodes."""
KEYS_PER_PAGE = 3000
"""Keys of one page of a listing: 12 MiB of the longest paths, and about 300 kB of usual ones."""

COMMIT_GROUP_BYTES_MAX = 256 << 10
"""Bytes of commits that are sent as one transaction: more of them gain nothing."""

SECOND_KEY_HEAD_STRUCT = struct.Struct(">QHB")
"""The head of the value at a second key: the node's version, the puts of the last commit since the last deletion in it,
and whether that commit deleted the node before them."""

SECOND_KEY_SUFFIX = b"\0"
_AFTER_SECOND = b"\1"


# ------------------------------------------------------------------------------------------ keys
class TreeKeys:
    """The keys of etcd in which a metadata tree is stored. `root`: a path, with which all of them begin."""

    def __init__(self, root: str) -> None:
        self._root = root.encode()

    def main_key(self, path: str) -> bytes:
        """Returns the main key of the node at `path`."""
        return self._root + path.encode()

    def session_key(self, lease: int) -> bytes:
        """Returns the key that exists as long as the session with this lease."""
        return b"%s\0session/%016x" % (self._root, lease)

    def folder_range(self, prefix: str) -> tuple[bytes, bytes]:
        """Returns the range (first key, first key after it) of all nodes below `prefix`."""
        above = self._root if prefix == "/" else self.main_key(prefix)
        return above + b"/", above + b"0"

    def watch_range(self, prefix: str) -> tuple[bytes, bytes]:
        """Returns a range that has the keys of the node `prefix` and of all nodes below it, and may have others."""
        first, end = self.folder_range(prefix)
        return (first if prefix == "/" else first[:-1]), end

    def path_of_key(self, key: bytes) -> str | None:
        """Returns the path of the node that is stored at this key; None if it is no key of a node, but of another
        program."""
        path = _decode(key[len(self._root) :].removesuffix(SECOND_KEY_SUFFIX))
        return None if path is None or "//" in path or path.endswith("/") else path


def _decode(text: bytes) -> str | None:
    """Returns a path, or a segment of one; None if it cannot be one."""
    try:
        return None if SECOND_KEY_SUFFIX in text else text.decode()
    except UnicodeDecodeError:
        return None


def lease_seconds(timeout_s: float) -> int:
    """Returns the seconds of a lease for a session with this timeout. etcd counts whole seconds, so it is `timeout_s`
    rounded up, at least 1."""
    return max(1, math.ceil(timeout_s))


# ------------------------------------------------------------------------------------------ commits
class EtcdLimits(NamedTuple):
    """The limits with which the etcd servers were started: the largest number of compares, and of operations, of one
    transaction, and the largest request in bytes."""

    txn_operations: int
    request_bytes: int

    def check(self, request: etcd.TxnRequest) -> None:
        """Raises InvalidRequest if a transaction has more operations, MessageTooLarge if it has more bytes than etcd
        accepts."""
        self.check_count(_count_operations(request))
        size = request.ByteSize() + REQUEST_OVERHEAD_BYTES
        if size > self.request_bytes:
            raise MessageTooLarge(
                f"a commit of {size} bytes; etcd takes {self.request_bytes}: start all etcd servers with a larger "
                "--max-request-bytes, then say so in --metadata: etcd://…?max_request_bytes=BYTES",
                size=size, limit=self.request_bytes,
            )  # fmt: skip

    def check_count(self, count: int) -> None:
        """Raises InvalidRequest if etcd does not accept a transaction of `count` operations."""
        if count > self.txn_operations:
            raise InvalidRequest(
                f"a commit of {count} operations of etcd; it takes {self.txn_operations}: start all etcd servers with "
                "a larger --max-txn-ops, then say so in --metadata: etcd://…?max_txn_ops=NUMBER"
            )

    @property
    def part_operations(self) -> int:
        """Returns how many operations a part of many may have: each is one compare, beside that of the session."""
        return self.txn_operations - 1


def _count_operations(request: etcd.TxnRequest) -> int:
    return max(len(request.compare), len(request.success), len(request.failure))


class StoredVersion(NamedTuple):
    """The version of a node as it was read from etcd, the revision of its last change, and whether it is stored at its
    second key."""

    version: int
    mod_revision: int
    is_second: bool


class EtcdCommitPlan(NamedTuple):
    """The transaction of a commit, and the versions to return to its caller (None: the answer has it)."""

    request: etcd.TxnRequest
    versions: list[int | None]


class QueuedCommit:
    """A transaction that waits to be sent, and the paths of its nodes."""

    def __init__(self, request: etcd.TxnRequest, paths: frozenset[str]) -> None:
        self.request = request
        self.paths = paths


C = TypeVar("C", bound=QueuedCommit)


class CommitQueue(Generic[C]):
    """The transactions of one session that wait to be sent, in order. `take` returns those that are sent together."""

    def __init__(self, limits: EtcdLimits) -> None:
        self._limits = limits
        self.waiting: deque[C] = deque()

    def take(self) -> list[C]:
        """Removes and returns the first transaction, and those after it that fit into one with it: other nodes, at most
        COMMIT_GROUP_BYTES_MAX bytes, and no more operations than etcd takes. There must be at least one."""
        group = [self.waiting.popleft()]
        paths = set(group[0].paths)
        request = group[0].request
        compares, writes, size = len(request.compare), len(request.success), request.ByteSize()
        while self.waiting:
            following = self.waiting[0]
            compares += len(following.request.compare) - 1
            writes += len(following.request.success)
            size += following.request.ByteSize()
            many = max(compares, writes) > self._limits.txn_operations or size > COMMIT_GROUP_BYTES_MAX
            if many or not paths.isdisjoint(following.paths):
                break
            paths |= following.paths
            group.append(self.waiting.popleft())
        return group


def merge_requests(requests: Sequence[etcd.TxnRequest]) -> etcd.TxnRequest:
    """Returns one transaction that does what `requests` do together, each of which begins with the compare of the
    session."""
    merged = etcd.TxnRequest(compare=requests[0].compare[:1], failure=requests[0].failure[:1])
    for request in requests:
        merged.compare.extend(request.compare[1:])
        merged.success.extend(request.success)
    return merged


def split_answer(requests: Sequence[etcd.TxnRequest], answer: etcd.TxnResponse) -> list[etcd.TxnResponse]:
    """Returns the answer to each request of a merged transaction that was done."""
    assert answer.succeeded, "a refusal does not say whose it is"
    responses = iter(answer.responses)
    return [
        etcd.TxnResponse(header=answer.header, succeeded=True, responses=[next(responses) for _ in request.success])
        for request in requests
    ]


class CommitPlanner:
    """Plans the transactions of the commits of one session. `lease`: the id of the session's lease."""

    def __init__(self, keys: TreeKeys, lease: int, limits: EtcdLimits) -> None:
        self._keys = keys
        self._lease = lease
        self._session_key = keys.session_key(lease)
        self._limits = limits

    # ------------------------------------------------------------------ without a read
    def plan_blind_commit(self, operations: Sequence[CommitOperation]) -> EtcdCommitPlan | None:
        """Plans a commit without a read. Returns None if that is not possible: a path comes twice, a CheckNodeVersion
        expects ANY_VERSION, or reading the new versions would exceed the limits. Raises InvalidRequest if there are too
        many paths."""
        paths = {operation.path for operation in operations}
        self._limits.check_count(1 + len(paths))  # a compare of each, and of the session
        if len(paths) < len(operations):
            return None
        request = self._begin()
        versions: list[int | None] = []
        for operation in operations:
            key = self._keys.main_key(operation.path)
            if not self._compare(request, key, operation):
                return None
            versions.append(self._write(request, key, operation))
            request.failure.add().request_range.CopyFrom(_versions_range(key))
        return EtcdCommitPlan(request, versions) if self._fits(request) else None

    def _begin(self) -> etcd.TxnRequest:
        """Returns a transaction that does nothing without the session, and says in its else-branch if it exists."""
        request = etcd.TxnRequest()
        request.compare.add(result=etcd.Compare.GREATER, target=etcd.Compare.VERSION, key=self._session_key, version=0)
        request.failure.add().request_range.CopyFrom(etcd.RangeRequest(key=self._session_key, count_only=True))
        return request

    def _compare(self, request: etcd.TxnRequest, key: bytes, operation: CommitOperation) -> bool:
        """Adds what the operation expects. Returns False if it cannot be compared."""
        expected = operation.expected
        if expected == ANY_VERSION:
            if isinstance(operation, PutNode):
                request.compare.add(target=etcd.Compare.VERSION, key=key + SECOND_KEY_SUFFIX, version=0)
            return not isinstance(operation, CheckNodeVersion)
        if expected == NODE_ABSENT:
            _compare_absent(request, key)
        else:
            request.compare.add(target=etcd.Compare.VERSION, key=key, version=expected + 1)
        return True

    def _write(self, request: etcd.TxnRequest, key: bytes, operation: CommitOperation) -> int | None:
        """Adds what the operation writes. Returns the node's new version; None if the answer has it."""
        match operation:
            case PutNode(expected=expected):
                self._put(request, key, operation.value, operation.ephemeral)
                if expected == ANY_VERSION:
                    request.success.add().request_range.CopyFrom(etcd.RangeRequest(key=key, keys_only=True))
                    return None
                return 0 if expected == NODE_ABSENT else expected + 1
            case DeleteNode(expected=expected):
                if expected != NODE_ABSENT:
                    _delete(request, key)
                return NODE_ABSENT
            case CheckNodeVersion(expected=expected):
                return expected

    def _put(self, request: etcd.TxnRequest, key: bytes, value: bytes, ephemeral: bool) -> None:
        put = request.success.add().request_put
        put.key, put.value = key, bytes(value)
        if ephemeral:
            put.lease = self._lease

    def _fits(self, request: etcd.TxnRequest) -> bool:
        return _count_operations(request) <= self._limits.txn_operations

    def read_blind_answer(
        self, operations: Sequence[CommitOperation], plan: EtcdCommitPlan, answer: etcd.TxnResponse
    ) -> list[int] | None:
        """Reads etcd's answer to a plan of `plan_blind_commit`. Returns the new versions of the nodes; None if nothing
        was done because a node is stored at its second key: the commit must be planned from a read. Raises BadVersion
        or SessionExpired; then nothing was done either."""
        if answer.succeeded:
            read = iter([each.response_range for each in answer.responses if each.HasField("response_range")])
            return [next(read).kvs[0].version - 1 if version is None else version for version in plan.versions]
        self._check_session(answer)
        found = [parse_stored_version(each.response_range) for each in answer.responses[1:]]
        if any(node is not None and node.is_second for node in found):
            return None
        for operation, node in zip(operations, found, strict=True):
            check_version(operation.path, operation.expected, NODE_ABSENT if node is None else node.version)
        raise AssertionError("etcd refused a transaction whose compares are all true")

    def _check_session(self, answer: etcd.TxnResponse) -> None:
        if not answer.responses[0].response_range.count:
            raise SessionExpired(f"etcd ended the lease {self._lease:x} of the session")

    # ------------------------------------------------------------------ from a read
    def plan_read_commit(
        self, operations: Sequence[CommitOperation], found: Mapping[str, StoredVersion | None]
    ) -> EtcdCommitPlan:
        """Plans a commit from `found`, the nodes as they were read (None: no node), which it compares. Raises
        BadVersion, and the errors of `EtcdLimits.check`."""
        nodes = {path: _PlannedNode(node) for path, node in found.items()}
        versions: list[int | None] = [nodes[operation.path].apply(operation) for operation in operations]
        request = self._begin()
        for path, node in nodes.items():
            self._write_planned(request, self._keys.main_key(path), node)
        self._limits.check(request)
        return EtcdCommitPlan(request, versions)

    def _write_planned(self, request: etcd.TxnRequest, key: bytes, node: _PlannedNode) -> None:
        found, second = node.found, key + SECOND_KEY_SUFFIX
        if found is None:
            _compare_absent(request, key)
        else:
            there = second if found.is_second else key
            request.compare.add(target=etcd.Compare.MOD, key=there, mod_revision=found.mod_revision)
        if node.put is None:
            if found is not None and node.version == NODE_ABSENT:
                _delete(request, key)
        elif node.is_main:
            if found is not None and found.is_second:
                request.success.add().request_delete_range.key = second
            self._put(request, key, node.put.value, node.put.ephemeral)
        else:
            if found is not None and not found.is_second:
                request.success.add().request_delete_range.key = key
            head = SECOND_KEY_HEAD_STRUCT.pack(node.version, node.puts, node.was_deleted)
            self._put(request, second, head + bytes(node.put.value), node.put.ephemeral)

    def read_planned_answer(self, answer: etcd.TxnResponse) -> bool:
        """Returns whether the transaction of `plan_read_commit` was done, by etcd's answer; False: a node has changed,
        and the commit must be planned again. Raises SessionExpired."""
        if not answer.succeeded:
            self._check_session(answer)
        return bool(answer.succeeded)

    def read_requests(self, operations: Sequence[CommitOperation]) -> list[tuple[list[str], etcd.TxnRequest]]:
        """Returns what to ask for the versions of the nodes of a commit: (paths, transaction that reads them)."""
        paths = list(dict.fromkeys(operation.path for operation in operations))
        requests: list[tuple[list[str], etcd.TxnRequest]] = []
        for at in range(0, len(paths), self._limits.txn_operations):
            part, request = paths[at : at + self._limits.txn_operations], etcd.TxnRequest()
            for path in part:
                request.success.add().request_range.CopyFrom(_versions_range(self._keys.main_key(path)))
            requests.append((part, request))
        return requests


class _PlannedNode:
    """A node while the operations of a commit are applied to it, one after the other."""

    def __init__(self, found: StoredVersion | None) -> None:
        self.found = found
        self.version = NODE_ABSENT if found is None else found.version
        self.put: PutNode | None = None  # the last one; None: none since the last deletion
        self.puts = 0  # since the last deletion
        self.was_deleted = False

    def apply(self, operation: CommitOperation) -> int:
        """Applies an operation and returns the node's version afterwards. Raises BadVersion."""
        check_version(operation.path, operation.expected, self.version)
        match operation:
            case PutNode():
                self.version, self.put, self.puts = self.version + 1, operation, self.puts + 1
            case DeleteNode() if self.version != NODE_ABSENT:
                self.version, self.put, self.puts, self.was_deleted = NODE_ABSENT, None, 0, True
        return self.version

    @property
    def is_main(self) -> bool:
        """Returns whether etcd counts the same version at the main key, when the last put is the only one."""
        if self.found is None or self.found.is_second:
            return self.version == 0
        return self.puts == 1 and not self.was_deleted


def _compare_absent(request: etcd.TxnRequest, key: bytes) -> None:
    request.compare.add(target=etcd.Compare.VERSION, key=key, range_end=key + _AFTER_SECOND, version=0)


def _delete(request: etcd.TxnRequest, key: bytes) -> None:
    delete = request.success.add().request_delete_range
    delete.key, delete.range_end = key, key + _AFTER_SECOND


def _versions_range(key: bytes) -> etcd.RangeRequest:
    return etcd.RangeRequest(key=key, range_end=key + _AFTER_SECOND, keys_only=True)


def node_range(key: bytes) -> etcd.RangeRequest:
    """Returns the request that reads the node with this main key, at whichever of its two keys it is stored."""
    return etcd.RangeRequest(key=key, range_end=key + _AFTER_SECOND)


def parse_node(answer: etcd.RangeResponse) -> tuple[StoredVersion, bytes] | None:
    """Returns the version and the value of the node in the answer to `node_range`; None if there is no node."""
    if not answer.kvs:
        return None
    (pair,) = answer.kvs
    version, value = _parse_pair(pair)
    return StoredVersion(version, pair.mod_revision, is_second=pair.key.endswith(SECOND_KEY_SUFFIX)), value


def _parse_pair(pair: etcd.KeyValue) -> tuple[int, bytes]:
    """Returns the version and the value of the node that is stored at this key; NODE_ABSENT for the version of one at
    its second key that was read without its value."""
    if not pair.key.endswith(SECOND_KEY_SUFFIX):
        return pair.version - 1, pair.value
    if not pair.value:
        return NODE_ABSENT, b""
    version, _, _ = SECOND_KEY_HEAD_STRUCT.unpack_from(pair.value)
    return version, pair.value[SECOND_KEY_HEAD_STRUCT.size :]


def parse_stored_version(answer: etcd.RangeResponse) -> StoredVersion | None:
    """Returns the version in an answer without values; None if there is no node. If the node is stored at its second
    key, its version is not known: it is given as NODE_ABSENT."""
    if not answer.kvs:
        return None
    (pair,) = answer.kvs
    is_second = pair.key.endswith(SECOND_KEY_SUFFIX)
    return StoredVersion(NODE_ABSENT if is_second else pair.version - 1, pair.mod_revision, is_second)


# ------------------------------------------------------------------------------------------ lists
class ChildrenListing:
    """The names of the children of a node, read in pages at one revision. Keys below a child that was seen are passed
    over. `request` is what to ask next; None: all names are in `names`. Keys of other programs are left out."""

    def __init__(self, keys: TreeKeys, prefix: str, page_keys: int = KEYS_PER_PAGE) -> None:
        first, self._end = keys.folder_range(prefix)
        self._head = len(first)
        self.names: set[str] = set()
        self.request: etcd.RangeRequest | None = etcd.RangeRequest(
            key=first, range_end=self._end, limit=page_keys, keys_only=True
        )

    def receive(self, answer: etcd.RangeResponse) -> None:
        """Called with the answer to `request`: adds its names to `names`, and sets `request` to that for the next page,
        or to None."""
        asked, self.request = self.request, None
        assert asked is not None, "an answer to a question"
        for pair in answer.kvs:
            if name := _decode(pair.key[self._head :].removesuffix(SECOND_KEY_SUFFIX).partition(b"/")[0]):
                self.names.add(name)
        if not answer.more:
            return
        last = answer.kvs[-1].key
        segment, slash, _ = last[self._head :].partition(b"/")
        following = last[: self._head] + segment + b"0" if slash else last + SECOND_KEY_SUFFIX
        if following < self._end:
            self.request = etcd.RangeRequest(
                key=following, range_end=self._end, limit=asked.limit, keys_only=True,
                revision=asked.revision or answer.header.revision,
            )  # fmt: skip


class KeyPage(NamedTuple):
    """The nodes in one answer of a listing: name → (version, value), sorted by name; without a meaning if the request
    was for keys only. `following`: the key at which the next page begins; empty if there is none."""

    nodes: dict[str, tuple[int, bytes]]
    following: bytes


def make_page_range(
    keys: TreeKeys, folder: str, after: str, limit: int, *, values: bool = False
) -> etcd.RangeRequest:
    """Returns the request for at most `limit` nodes below `folder`, from the name after `after` on: for their keys, or
    with `values` for all of them."""
    first, end = keys.folder_range(folder)
    key = first + after.encode() + _AFTER_SECOND if after else first
    return etcd.RangeRequest(key=key, range_end=end, limit=limit, keys_only=not values)


def parse_page(keys: TreeKeys, folder: str, answer: etcd.RangeResponse) -> KeyPage:
    """Returns the nodes directly below `folder` that the answer to `make_page_range` has. Leaves out the nodes further
    below, and keys of other programs."""
    head, nodes = len(keys.folder_range(folder)[0]), dict[str, tuple[int, bytes]]()
    for pair in answer.kvs:
        segment = pair.key[head:].removesuffix(SECOND_KEY_SUFFIX)
        if b"/" not in segment and (name := _decode(segment)):
            nodes[name] = _parse_pair(pair)
    if not answer.more or not answer.kvs:
        return KeyPage(nodes, b"")
    last = answer.kvs[-1].key
    segment, slash, _ = last[head:].partition(b"/")
    following = last[:head] + segment + b"0" if slash else last.removesuffix(SECOND_KEY_SUFFIX) + _AFTER_SECOND
    return KeyPage(nodes, following)


# ------------------------------------------------------------------------------------------ watches
class TreeWatch:
    """One watch of the tree: turns etcd's events into changes. The reader has received every change up to and including
    the revision `seen`. Whole revisions are handed out."""

    def __init__(self, keys: TreeKeys, prefix: str, seen: int) -> None:
        self.seen = seen
        self.is_compacted = False  # etcd has ended the watch: changes after `seen` are not known any more
        self._keys = keys
        self._prefix = prefix
        self._events: list[etcd.Event] = []  # of a message whose rest has not arrived

    def make_request(self) -> etcd.WatchRequest:
        """Returns the request that begins the watch, or begins it again on another connection."""
        self.is_compacted = False
        self._events.clear()
        first, end = self._keys.watch_range(self._prefix)
        create = etcd.WatchCreateRequest(
            key=first, range_end=end, start_revision=max(1, self.seen), progress_notify=True, fragment=True
        )
        return etcd.WatchRequest(create_request=create)

    def skip_to(self, revision: int) -> None:
        """Continues after `revision`, because the reader lists the nodes again."""
        self.seen = revision

    def receive(self, answer: etcd.WatchResponse) -> list[NodeChanged]:
        """Called with each message of etcd. Returns the changes in it; [] if the message is a part of a larger one, or
        has no change. If etcd has ended the watch because it has compacted the history, sets `is_compacted` and returns
        []. Raises Unavailable if etcd has ended the watch for another reason."""
        if answer.canceled:
            if not answer.compact_revision:
                raise Unavailable(f"etcd ended a watch: {answer.cancel_reason or 'it says no reason'}")
            self.is_compacted = True
            return []
        self._events.extend(answer.events)
        if answer.fragment:
            return []
        events, self._events = self._events, []
        changes = self._changes_of([event for event in events if event.kv.mod_revision > self.seen])
        if events:
            self.seen = max(self.seen, events[-1].kv.mod_revision)
        elif not answer.created:  # the progress of a watch that has nothing to hear
            self.seen = max(self.seen, answer.header.revision)
        return changes

    def _changes_of(self, events: Sequence[etcd.Event]) -> list[NodeChanged]:
        nodes: dict[tuple[int, str], list[etcd.Event]] = {}
        for event in events:
            path = self._keys.path_of_key(event.kv.key)
            if path is not None and is_at_or_below(self._prefix, path):
                nodes.setdefault((event.kv.mod_revision, path), []).append(event)
        return [
            NodeChanged(path, version, revision)
            for (revision, path), of_node in nodes.items()
            for version in _versions_of(of_node)
        ]


def _versions_of(events: Sequence[etcd.Event]) -> list[int]:
    """Returns the versions that a node had after each change of one commit, from etcd's events of its keys."""
    deleted = any(event.type == etcd.Event.DELETE for event in events)
    for event in events:
        if event.type == etcd.Event.DELETE:
            continue
        if not event.kv.key.endswith(SECOND_KEY_SUFFIX):
            return [NODE_ABSENT, event.kv.version - 1] if deleted else [event.kv.version - 1]
        version, puts, was_deleted = SECOND_KEY_HEAD_STRUCT.unpack_from(event.kv.value)
        return [*([NODE_ABSENT] if was_deleted else []), *range(version - puts + 1, version + 1)]
    return [NODE_ABSENT]


# ------------------------------------------------------------------------------------------ servers
class EtcdClusterIdentity:
    """The etcd cluster of a session: that of the first answer. An answer of another cluster is refused, because the two
    have different trees."""

    def __init__(self) -> None:
        self.cluster_id = 0  # 0: no server has answered
        self._server = ""

    def check_answer(self, cluster_id: int, server: str) -> None:
        """Called with the cluster id of each answer, and the address of its server. Raises InvalidConfiguration if the
        server is of another cluster than the one that answered first."""
        if not self.cluster_id:
            self.cluster_id, self._server = cluster_id, server
        if cluster_id != self.cluster_id:
            raise InvalidConfiguration(
                f"{server} is a server of another etcd cluster ({cluster_id:x}) than {self._server} "
                f"({self.cluster_id:x}): --metadata may name the servers of one cluster only",
                server=server, other=self._server,
            )  # fmt: skip


# ------------------------------------------------------------------------------------------ errors
DATABASE_FULL_TEXT = "database space exceeded"
"""What etcd says with the alarm NOSPACE."""

_REFUSALS: tuple[tuple[str, type[MagnetarError], str], ...] = (
    (
        DATABASE_FULL_TEXT, OutcomeUnknown,
        "etcd is full (alarm NOSPACE): compact and defragment it, or start it with a larger --quota-backend-bytes; "
        "then: etcdctl alarm disarm",
    ),
    ("request is too large", MessageTooLarge, "etcd was started with a smaller --max-request-bytes"),
    ("message larger than max", MessageTooLarge, "etcd was started with a smaller --max-request-bytes"),
    ("too many operations", InvalidRequest, "etcd was started with a smaller --max-txn-ops"),
    ("too many requests", BackPressure, "etcd is overloaded"),
    ("lease not found", SessionExpired, "etcd ended the lease of the session"),
    ("invalid auth token", CredentialsExpired, "the token for etcd has expired"),
    ("auth store is old", CredentialsExpired, "the token for etcd is of former users and roles"),
    ("permission denied", Unauthorized, "the user of etcd may not use the keys of this cluster"),
    ("user name is empty", Unauthenticated, "etcd asks for a user: give --security with a section [etcd]"),
    ("authentication failed", Unauthenticated, "user or password of the section [etcd] are wrong"),
    ("authentication is not enabled", Unauthenticated, "etcd has no users: remove credentials of the section [etcd]"),
    ("has been compacted", Unavailable, "the revision was compacted while it was read"),
    ("is a future revision", Unavailable, "the server of etcd lags"),
)  # fmt: skip
"""Part of the text with which etcd refuses a request, the error that it becomes, and what an operator does. The texts
are part of etcd's API (etcdserver/api/v3rpc/rpctypes). For a full etcd see `decide_full`."""


def translate_refusal(error: MagnetarError) -> MagnetarError:
    """Returns the typed error that a refusal of etcd means, by the text of `error`. Returns `error` itself if its text
    is not known, such as that of UNAVAILABLE, after which the outcome is unknown."""
    for text, kind, meaning in _REFUSALS:
        if text in error.message:
            return kind(f"{meaning} ({error.message})")
    return error


def is_full(error: MagnetarError) -> bool:
    """Returns whether etcd has refused a request with the alarm NOSPACE."""
    return DATABASE_FULL_TEXT in error.message


def decide_full(error: MagnetarError, before: int, now: int) -> MagnetarError:
    """Returns the error of a commit that etcd answered with NOSPACE: Unavailable, or `error` itself. `before`: a
    revision from before the commit was sent; `now`: the revision after the answer.

    etcd says NOSPACE also of a commit that it has stored, if that is the one that filled it. Each commit that is stored
    makes a revision. So if there was none, the commit was not done (Unavailable); otherwise it is unknown."""
    if before == now:
        return Unavailable(f"nothing was written: {error.message}", **{NO_SPACE_FIELD: "etcd"})
    return error
