"""The rules for a path, a watch prefix and a commit. Both stores check this before they send or write anything.

A path is "/" and then segments separated by "/": none empty, none "." or "..", no control characters, at most
PATH_BYTES_MAX bytes in UTF-8. A prefix (of `children` and `watch`) is a path, or "/" for the whole tree.
A commit has 1 to OPERATIONS_MAX operations that together have at most COMMIT_BYTES_MAX bytes of paths and values.
A broken rule is the caller's fault: InvalidName, MessageTooLarge or InvalidRequest, and nothing was done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...proto.errors import BadVersion, InvalidName, InvalidRequest, MessageTooLarge, NodeExists, NoNode
from ..store import ABSENT, ANY, VALUE_BYTES_MAX, Operation, Put

PATH_BYTES_MAX = 4096
"""Most bytes of a path: several times the length of a percent-encoded topic name and subscription name."""
OPERATIONS_MAX = 1024
COMMIT_BYTES_MAX = 8 << 20
"""Most bytes of a commit: half of the largest gRPC message, so that a permitted commit also fits into a request."""

_PATH = re.compile(r"(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f\x7f]+)+")


def check_path(path: str) -> None:
    """Raises InvalidName if it is not a path of the metadata."""
    if _PATH.fullmatch(path) is None:
        raise InvalidName(f"{path!r} is not a metadata path such as '/a/b'", path=ascii(path))
    try:
        size = len(path) if path.isascii() else len(path.encode())
    except UnicodeEncodeError as error:
        raise InvalidName(f"{path!r} is not valid Unicode", path=ascii(path)) from error
    if size > PATH_BYTES_MAX:
        raise InvalidName(f"a path of {size} bytes; at most {PATH_BYTES_MAX} are allowed", size=size)


def check_prefix(prefix: str) -> None:
    """Raises InvalidName if it is neither a path nor "/"."""
    if prefix != "/":
        check_path(prefix)


def below(prefix: str, path: str) -> bool:
    """Whether `path` is `prefix` itself or below it, at any depth."""
    return prefix == "/" or path == prefix or path.startswith(prefix + "/")


def check_operations(operations: Sequence[Operation]) -> None:
    """Raises InvalidName, InvalidRequest or MessageTooLarge."""
    if not 1 <= len(operations) <= OPERATIONS_MAX:
        raise InvalidRequest(f"a commit of {len(operations)} operations; 1 to {OPERATIONS_MAX} are allowed")
    size = 0
    for operation in operations:
        check_path(operation.path)
        if operation.expected < ANY:
            raise InvalidRequest(f"{operation.path}: {operation.expected} is not a version, ABSENT or ANY")
        size += len(operation.path)
        if isinstance(operation, Put):
            size += len(operation.value)
            if len(operation.value) > VALUE_BYTES_MAX:
                raise _too_large(operation)
    if size > COMMIT_BYTES_MAX:
        raise MessageTooLarge(
            f"a commit of {size} bytes; at most {COMMIT_BYTES_MAX} are allowed: split it",
            size=size, limit=COMMIT_BYTES_MAX,
        )  # fmt: skip


def _too_large(put: Put) -> MessageTooLarge:
    return MessageTooLarge(
        f"{put.path}: a value of {len(put.value)} bytes; at most {VALUE_BYTES_MAX} are allowed",
        size=len(put.value), limit=VALUE_BYTES_MAX,
    )  # fmt: skip


def check_version(path: str, expected: int, found: int) -> None:
    """Compares, as compare-and-set does. Raises NodeExists, NoNode or BadVersion, with path, expected and found."""
    if expected in (ANY, found):
        return
    facts = {"path": path, "expected": expected, "found": found}
    if expected == ABSENT:
        raise NodeExists(f"{path}: exists (version {found}), and was expected to be absent", **facts)
    if found == ABSENT:
        raise NoNode(f"{path}: does not exist; version {expected} was expected", **facts)
    raise BadVersion(f"{path}: version {found} was found, {expected} was expected", **facts)
