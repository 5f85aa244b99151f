"""The last changes of the tree, for watches that resume without a gap.

The history keeps every change of the revisions above `floor`, in order, up to `revision`. A watch is one number here,
the revision that it has seen; `since` returns the changes after it. So a slow watcher costs nothing and grows no queue.
A watcher gets `Reset` when changes after its revision have left the history, or when its revision is in the future (an
older tree replaced this one): it lists again, and continues after the revision that Reset names.
The changes of one revision are returned together or not at all. Guarded by test_history.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..store import Changed, Reset

CHANGES_MAX = 10_000
"""Most changes that are kept: about 2 MB; a watcher that lags by 10,000 changes reads a new list faster."""


class History:
    """The last changes of one tree, bounded by `changes_max`."""

    def __init__(self, revision: int, changes_max: int = CHANGES_MAX) -> None:
        """Begins empty at `revision`: earlier changes are a Reset."""
        assert changes_max >= 1
        self.revision = revision
        self.floor = revision
        self._changes_max = changes_max
        self._changes: deque[Changed] = deque()

    def __len__(self) -> int:
        return len(self._changes)

    def append(self, revision: int, changes: Sequence[Changed]) -> None:
        """Adds the next revision of the tree and all its changes, which may be none."""
        assert revision == self.revision + 1, f"revision {revision} after {self.revision}"
        self.revision = revision
        self._changes.extend(changes)
        while len(self._changes) > self._changes_max:
            self.floor = self._changes[0].revision
            while self._changes and self._changes[0].revision == self.floor:
                self._changes.popleft()

    def since(self, prefix: str, after_revision: int) -> list[Changed] | Reset:
        """The changes of `prefix` and below it after a revision. With them the watcher has seen `self.revision`."""
        if not self.floor <= after_revision <= self.revision:
            return Reset(self.revision)
        news: list[Changed] = []
        under = "/" if prefix == "/" else prefix + "/"
        for change in reversed(self._changes):  # from the newest: a watch usually lags by one or two revisions
            if change.revision <= after_revision:
                break
            if change.path.startswith(under) or change.path == prefix:  # `below`: each watch asks it of each change
                news.append(change)
        news.reverse()
        return news

    def check(self) -> None:
        assert self.floor <= self.revision
        revisions = [change.revision for change in self._changes]
        assert revisions == sorted(revisions), "changes are in the order of revisions"
        assert not revisions or self.floor < revisions[0] <= revisions[-1] <= self.revision
