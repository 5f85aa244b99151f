"""How our tree of keys lies in a ZooKeeper: names of znodes, and what a commit becomes.

**Names.** A path is a key and needs no parents; a znode needs all of them, and an ephemeral one may have no children.
So values and folders are different znodes: the value of `/a/b/c` is znode `/a/b/=c` in the folders `/a` and `/a/b`.
A folder holds no value and is a *container*: ZooKeeper deletes it some time after its last child. Nobody sees folders:
a segment is listed when its value is there, or when some value lies below its folder. What ZooKeeper does not allow
in a name, a first "=" and "\\\\" itself are written `\\\\<hex>;`.

**Commits.** ZooKeeper's transaction has create, set, delete and check, each at an exact version, and no "whatever is
there". So a commit is planned on what was read of its paths, in order, each operation seeing those before it; every
step names the version that the plan stands on. When one no longer holds, nothing was done, and it is planned again.

    found        operation              steps
    absent       put                    create
    version v    put                    set at v (the node stays what it was, lasting or ephemeral of this session)
    version v    put that makes it another kind, or takes it from another session
                                        delete at v, create, and v + 1 sets: the version is ZooKeeper's, always
    version v    delete                 delete at v
    version v    check                  check at v
    absent       delete, check          create and delete: only that proves absence; nothing if it would stand alone

A watch sees these steps, so a node that changes its kind is seen to go and to come again. It costs a step per
version, so beyond RETYPED_VERSION_MAX it is refused: delete the node first.
Guarded by tests/metadata/zookeeper/test_znodes.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...proto.errors import InvalidRequest
from ..store import ABSENT, Check, Delete, Operation, Put
from .rules import check_version

VALUE = "="
RETYPED_VERSION_MAX = 500
"""Each version is a step of the transaction; nodes whose kind changes are records of who lives, hardly ever changed."""

_FORBIDDEN = re.compile("^[=]|[\\\\\x00-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\uffff\U00010000-\U0010ffff]")
"""ZooKeeper looks at Java's chars: whatever is beyond the basic plane is a pair of forbidden surrogates to it."""
_ESCAPED = re.compile(r"\\([0-9a-f]+);")


# -------------------------------------------------------------------------------------------- names
def _escape(segment: str) -> str:
    return _FORBIDDEN.sub(lambda found: f"\\{ord(found[0]):x};", segment)


def _unescape(segment: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), segment)


def folder(prefix: str) -> str:
    """The folder below which everything lies whose key stands below `prefix`; "" for "/"."""
    return "" if prefix == "/" else "/".join(map(_escape, prefix.split("/")))


def value(path: str) -> str:
    """The znode that holds the value of a key."""
    above, _, last = path.rpartition("/")
    return f"{folder(above) if above else ''}/{VALUE}{_escape(last)}"


def folders(path: str) -> list[str]:
    """The folders that the value of a key needs, the outermost first."""
    parts = folder(path.rpartition("/")[0] or "/").split("/")
    return ["/".join(parts[:end]) for end in range(2, len(parts) + 1)]


def key(znode: str) -> str | None:
    """The key whose value the znode holds; None for a folder. Inverse of `value`."""
    above, _, last = znode.rpartition("/")
    if not last.startswith(VALUE):
        return None
    return f"{_unescape(above)}/{_unescape(last[len(VALUE) :])}"


class Listed(NamedTuple):
    """What a folder holds: segments of keys, sorted."""

    values: list[str]
    below: list[str]  # that have a folder, which may hold something or not

    @classmethod
    def of(cls, names: Sequence[str]) -> Listed:
        values = sorted(_unescape(name[len(VALUE) :]) for name in names if name.startswith(VALUE))
        return cls(values, sorted(_unescape(name) for name in names if not name.startswith(VALUE)))


# -------------------------------------------------------------------------------------------- commits
class Found(NamedTuple):
    """A node as it was read."""

    version: int
    owner: int  # the session of an ephemeral; 0: lasting


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    value: bytes
    ephemeral: bool


@dataclass(frozen=True, slots=True)
class Set:
    path: str
    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Remove:
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Require:
    path: str
    version: int


Step = Create | Set | Remove | Require


class Plan(NamedTuple):
    steps: list[Step]  # empty: nothing to do
    versions: list[int]  # the answer to the commit


def plan(operations: Sequence[Operation], found: Mapping[str, Found | None], session: int) -> Plan:
    """What a commit becomes, given what was read of each of its paths. BadVersion: refused, as things stood then."""
    nodes = dict(found)
    steps: list[Step] = []
    absences: dict[str, None] = {}  # stand only on the node's absence
    versions: list[int] = []
    for operation in operations:
        path, node = operation.path, nodes[operation.path]
        check_version(path, operation.expected, ABSENT if node is None else node.version)
        match operation:
            case Put():
                nodes[path] = _put(steps, operation, node, session)
            case Delete() if node is not None:
                steps.append(Remove(path, node.version))
                nodes[path] = None
            case Check() if node is not None:
                steps.append(Require(path, node.version))
            case Delete() | Check():
                absences[path] = None
        after = nodes[path]
        versions.append(ABSENT if after is None else after.version)
    proven = {step.path for step in steps}
    for path in absences if steps else ():
        if path not in proven:
            steps += [Create(path, b"", ephemeral=False), Remove(path, 0)]
    return Plan(steps, versions)


def _put(steps: list[Step], put: Put, node: Found | None, session: int) -> Found:
    owner = session if put.ephemeral else 0
    if node is None:
        steps.append(Create(put.path, put.value, put.ephemeral))
        return Found(0, owner)
    version = node.version + 1
    if node.owner == owner:
        steps.append(Set(put.path, put.value, node.version))
        return Found(version, owner)
    if version > RETYPED_VERSION_MAX:
        raise InvalidRequest(
            f"{put.path}: version {node.version} is too far on for a node that becomes ephemeral, or lasting, or "
            "another session's: delete it first", path=put.path,
        )  # fmt: skip
    steps += [Remove(put.path, node.version), Create(put.path, put.value, put.ephemeral)]
    steps += [Set(put.path, put.value, at) for at in range(version)]
    return Found(version, owner)


# -------------------------------------------------------------------------------------------- size
STEP_BYTES = 64
"""Of a step in ZooKeeper's form, beside path and value: lengths, kind, the open ACL (at most 56)."""
MULTI_BYTES = 64


def size_bytes(steps: Sequence[Step], root_bytes: int) -> int:
    """At least what the transaction has on the wire; `root_bytes`: of the path before ours."""
    size = MULTI_BYTES
    for step in steps:
        size += STEP_BYTES + root_bytes + len(value(step.path).encode())
        if isinstance(step, Create | Set):
            size += len(step.value)
    return size
