"""The last changes of the tree, for watches that resume without a gap.

The history holds every change of the revisions above `floor`, in order, up to `revision`. A watch is only a number
here, the revision it has seen; `since` gives what came after. So a slow watcher costs nothing and cannot grow a queue:
when the changes after its revision are no longer all there, or when its revision lies in the future (a tree that was
replaced by an older one), it gets `Reset`: list again, and go on after the revision that Reset names.
The changes of one revision are never torn apart: they come together or not at all. Guarded by test_history.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..store import Changed, Reset
from .rules import below

CHANGES_MAX = 10_000
"""About 2 MB; a watcher that is 10,000 changes late is quicker with a new list."""


class History:
    def __init__(self, revision: int, changes_max: int = CHANGES_MAX) -> None:
        """Begins empty at `revision`: nothing before it can be asked for."""
        assert changes_max >= 1
        self.revision = revision
        self.floor = revision
        self._changes_max = changes_max
        self._changes: deque[Changed] = deque()

    def __len__(self) -> int:
        return len(self._changes)

    def append(self, revision: int, changes: Sequence[Changed]) -> None:
        """The next revision of the tree and all that it changed, maybe nothing."""
        assert revision == self.revision + 1, f"revision {revision} after {self.revision}"
        self.revision = revision
        self._changes.extend(changes)
        while len(self._changes) > self._changes_max:
            self.floor = self._changes[0].revision
            while self._changes and self._changes[0].revision == self.floor:
                self._changes.popleft()

    def since(self, prefix: str, after_revision: int) -> list[Changed] | Reset:
        """The changes of `prefix` and below it after a revision; afterwards the watcher has seen `self.revision`."""
        if not self.floor <= after_revision <= self.revision:
            return Reset(self.revision)
        news: list[Changed] = []
        for change in reversed(self._changes):  # from the new end: a watch is usually one or two revisions late
            if change.revision <= after_revision:
                break
            if below(prefix, change.path):
                news.append(change)
        news.reverse()
        return news

    def check(self) -> None:
        assert self.floor <= self.revision
        revisions = [change.revision for change in self._changes]
        assert revisions == sorted(revisions), "changes are in the order of revisions"
        assert not revisions or self.floor < revisions[0] <= revisions[-1] <= self.revision
