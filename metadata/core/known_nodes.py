"""The nodes that were read lately: a read of one of them waits for no thread and no disk.

The rule: what is known is the tree after the last commit that was answered. The driver (metadata/sqlite.py) tells each
commit before it answers it, in the order of the commits, and each read of the tree before any commit that the read did
not see. So a reader never gets a state that is older than a commit whose outcome anybody has. Absence is known as well.
Bounds: `bytes_max` of paths and values, and the longest unread goes first; a value above VALUE_BYTES_MAX is not kept.
Guarded by tests/metadata/test_known_nodes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from ..store import Changed

KNOWN_BYTES_MAX = 2 << 20
VALUE_BYTES_MAX = 64 << 10
NODE_BYTES = 300
"""Memory of a node besides its path and value."""


class Known(Protocol):
    """A node that is kept in memory."""

    @property
    def value(self) -> bytes: ...


N = TypeVar("N", bound=Known)


class KnownNodes(Generic[N]):
    """The nodes that were read last, by path; None: the node does not exist. At most `bytes_max` bytes of memory."""

    def __init__(self, bytes_max: int = KNOWN_BYTES_MAX) -> None:
        self.bytes = 0
        self.nodes: dict[str, N | None] = {}  # in the order of the last reads; `read` one that is there
        self._bytes_max = bytes_max

    def read(self, path: str) -> N | None:
        """Returns the node of a known path, None if it does not exist. Raises KeyError if the path is not known."""
        node = self.nodes.pop(path)
        self.nodes[path] = node
        return node

    def learn(self, path: str, node: N | None) -> None:
        """Notes the node as the tree has it."""
        if path in self.nodes:
            self.forget(path)
        if node is not None and len(node.value) > VALUE_BYTES_MAX:
            return
        self.nodes[path] = node
        self.bytes += NODE_BYTES + len(path) + (len(node.value) if node is not None else 0)  # `_size`
        while self.bytes > self._bytes_max:
            self.forget(next(iter(self.nodes)))

    def forget(self, path: str) -> None:
        """Forgets a path. Idempotent."""
        if path in self.nodes:
            self.bytes -= _size(path, self.nodes.pop(path))

    def changed(self, changes: Sequence[Changed]) -> None:
        """Forgets these nodes: they have other values, or are deleted."""
        for change in changes:
            self.forget(change.path)

    def __len__(self) -> int:
        return len(self.nodes)

    def check(self) -> None:
        assert self.bytes == sum(_size(path, node) for path, node in self.nodes.items())
        assert self.bytes <= self._bytes_max


def _size(path: str, node: Known | None) -> int:
    return NODE_BYTES + len(path) + (len(node.value) if node is not None else 0)
