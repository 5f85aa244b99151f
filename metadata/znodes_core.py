"""How the tree of keys is stored in a ZooKeeper: the names of znodes, and the transaction of a commit.

**Names.** A path is a key and needs no parents; a znode needs all of them, and an ephemeral one may have no children.
So values and folders are different znodes: the value of `/a/b/c` is znode `/a/b/=c` in the folders `/a` and `/a/b`.
A folder has no value and is a *container*: ZooKeeper deletes it some time after its last child. Folders are not listed:
a segment is listed when it has a value, or when a key below its folder has one. Characters that ZooKeeper refuses in a
name, a first "=" and "\\\\" itself are written `\\\\<hex>;`.

**Commits.** ZooKeeper's transaction has create, set, delete and check, each at an exact version; it has no operation at
any version. So a commit is planned from a read of its paths, in order, each operation after those before it; every step
names the version that was read. When one version has changed, nothing is done, and the commit is planned again.

    found        operation              steps
    absent       put                    create
    version v    put                    set at v (the node keeps its kind: lasting, or ephemeral of this session)
    version v    put that changes its kind, or takes it from another session
                                        delete at v, create, and v + 1 sets: the version is always ZooKeeper's
    version v    delete                 delete at v
    version v    check                  check at v
    absent       delete, check          create and delete, which proves the absence; nothing if it were the only step

A watch sees these steps: a node that changes its kind is deleted and created for the watch. The change costs a step per
version, so beyond REPLACED_ZNODE_VERSION_MAX it is refused: delete the node first.
Guarded by tests/metadata/test_znodes.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..proto.errors import InvalidRequest
from .store import NODE_ABSENT, CheckNodeVersion, CommitOperation, DeleteNode, PutNode
from .tree_core import check_version

VALUE_ZNODE_PREFIX = "="
REPLACED_ZNODE_VERSION_MAX = 500
"""The highest version of a node that can change between lasting and ephemeral: each version is a step of the
transaction. Only the nodes of running processes do so, and their versions stay small."""

_FORBIDDEN = re.compile("^[=]|[\\\\\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")
"""Matches what ZooKeeper forbids in names. It checks Java chars: a character beyond the basic plane is a pair of
surrogates, which it forbids."""
_ESCAPED = re.compile(r"\\([0-9a-f]+);")


# -------------------------------------------------------------------------------------------- names
def _escape(segment: str) -> str:
    return _FORBIDDEN.sub(lambda found: f"\\{ord(found[0]):x};", segment)


def _unescape(segment: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), segment)


def folder_znode_path(prefix: str) -> str:
    """Returns the path of the folder znode below which the znodes of all nodes below `prefix` are; "" for the prefix
    "/"."""
    return "" if prefix == "/" else "/".join(map(_escape, prefix.split("/")))


def value_znode_path(path: str) -> str:
    """Returns the path of the znode that contains the value of the metadata node at `path`."""
    above, _, last = path.rpartition("/")
    return f"{folder_znode_path(above) if above else ''}/{VALUE_ZNODE_PREFIX}{_escape(last)}"


def folder_znode_paths(path: str) -> list[str]:
    """Returns the paths of the folder znodes that must exist before the node at `path` can be written, the outermost
    first."""
    parts = folder_znode_path(path.rpartition("/")[0] or "/").split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts) + 1)]


def node_path_of_znode(znode: str) -> str | None:
    """Returns the path of the metadata node whose value the znode contains; None if the znode is a folder. The inverse
    of `value_znode_path`."""
    above, _, last = znode.rpartition("/")
    if not last.startswith(VALUE_ZNODE_PREFIX):
        return None
    return f"{_unescape(above)}/{_unescape(last[len(VALUE_ZNODE_PREFIX) :])}"


class FolderContent(NamedTuple):
    """The content of a folder znode: the names of metadata nodes that have a value, and the names below which there may
    be further nodes. Both are sorted."""

    values: list[str]
    below: list[str]  # segments that have a folder, which may be empty

    @classmethod
    def from_names(cls, names: Sequence[str]) -> FolderContent:
        """Returns the content of a folder znode from `names`, the names of its children."""
        values = sorted(
            _unescape(name[len(VALUE_ZNODE_PREFIX) :]) for name in names if name.startswith(VALUE_ZNODE_PREFIX)
        )
        return cls(values, sorted(_unescape(name) for name in names if not name.startswith(VALUE_ZNODE_PREFIX)))


# -------------------------------------------------------------------------------------------- commits
class NodeVersionAndOwner(NamedTuple):
    """The version and the owner of a metadata node, as they were read from ZooKeeper."""

    version: int
    owner: int  # the session of an ephemeral; 0: lasting


@dataclass(frozen=True, slots=True)
class CreateZnode:
    """Step of a ZooKeeper transaction: create the znode with the value of the metadata node at `path`. `ephemeral`: the
    znode ends with the session."""

    path: str
    value: bytes
    ephemeral: bool


@dataclass(frozen=True, slots=True)
class SetZnodeValue:
    """Step of a ZooKeeper transaction: write `value` to the znode of the metadata node at `path`; fail if the znode
    does not have this version."""

    path: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class DeleteZnode:
    """Step of a ZooKeeper transaction: delete the znode of the metadata node at `path`; fail if the znode does not have
    this version."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class CheckZnodeVersion:
    """Step of a ZooKeeper transaction: change nothing, but fail if the znode of the metadata node at `path` does not
    have this version."""

    path: str
    version: int


ZnodeStep = CreateZnode | SetZnodeValue | DeleteZnode | CheckZnodeVersion


class ZookeeperCommitPlan(NamedTuple):
    """How to do a commit: the steps of its ZooKeeper transaction, and the versions to return to its caller."""

    steps: list[ZnodeStep]  # empty: nothing to do
    versions: list[int]  # the answer to the commit


def plan_zookeeper_commit(
    operations: Sequence[CommitOperation], found: Mapping[str, NodeVersionAndOwner | None], session: int
) -> ZookeeperCommitPlan:
    """Plans the ZooKeeper transaction of a commit and returns the plan. `found`: the nodes as they were read at the
    paths of the operations (None: no node). `session`: the id of the ZooKeeper session that shall own the ephemeral
    nodes.

    Raises BadVersion if a node does not have the expected version, InvalidRequest if a node above
    REPLACED_ZNODE_VERSION_MAX would become ephemeral, lasting or another session's."""
    nodes = dict(found)
    steps: list[ZnodeStep] = []
    absences: dict[str, None] = {}  # paths whose steps depend only on the node's absence
    versions: list[int] = []
    for operation in operations:
        path, node = operation.path, nodes[operation.path]
        check_version(path, operation.expected, NODE_ABSENT if node is None else node.version)
        match operation:
            case PutNode():
                nodes[path] = _put(steps, operation, node, session)
            case DeleteNode() if node is not None:
                steps.append(DeleteZnode(path, node.version))
                nodes[path] = None
            case CheckNodeVersion() if node is not None:
                steps.append(CheckZnodeVersion(path, node.version))
            case DeleteNode() | CheckNodeVersion():
                absences[path] = None
        after = nodes[path]
        versions.append(NODE_ABSENT if after is None else after.version)
    proven = {step.path for step in steps}
    for path in absences if steps else ():
        if path not in proven:
            steps += [CreateZnode(path, b"", ephemeral=False), DeleteZnode(path, 0)]
    return ZookeeperCommitPlan(steps, versions)


def _put(steps: list[ZnodeStep], put: PutNode, node: NodeVersionAndOwner | None, session: int) -> NodeVersionAndOwner:
    owner = session if put.ephemeral else 0
    if node is None:
        steps.append(CreateZnode(put.path, put.value, put.ephemeral))
        return NodeVersionAndOwner(0, owner)
    version = node.version + 1
    if node.owner == owner:
        steps.append(SetZnodeValue(put.path, put.value, node.version))
        return NodeVersionAndOwner(version, owner)
    if version > REPLACED_ZNODE_VERSION_MAX:
        raise InvalidRequest(
            f"{put.path}: version {node.version} is too high for a node that becomes ephemeral, or lasting, or "
            "another session's: delete it first", path=put.path,
        )  # fmt: skip
    steps += [DeleteZnode(put.path, node.version), CreateZnode(put.path, put.value, put.ephemeral)]
    steps += [SetZnodeValue(put.path, put.value, at) for at in range(version)]
    return NodeVersionAndOwner(version, owner)


# -------------------------------------------------------------------------------------------- size
STEP_OVERHEAD_BYTES = 24
"""The size of a step in ZooKeeper's encoding, in bytes, besides path, value and access list: lengths, kind, and version
or flags (at most 21)."""
MULTI_OVERHEAD_BYTES = 64


def request_size_bytes(steps: Sequence[ZnodeStep], root_bytes: int, access_list_bytes: int) -> int:
    """Returns the estimated size of the transaction on the wire, in bytes. It is not less than the real size.
    `root_bytes`: the length of the path of the tree's root znode. `access_list_bytes`: the size of the access list,
    which each znode that is created gets."""
    size = MULTI_OVERHEAD_BYTES
    for step in steps:
        size += STEP_OVERHEAD_BYTES + root_bytes + len(value_znode_path(step.path).encode())
        if isinstance(step, CreateZnode | SetZnodeValue):
            size += len(step.value)
        if isinstance(step, CreateZnode):
            size += access_list_bytes
    return size
