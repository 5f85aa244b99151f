"""The live bytes of an entry log: counted from its extents and the tombstones, a part at a time, in a worker.

`LogSurvey` takes the heads of one log's index in parts, so that a log of a million ledgers needs little memory and does
not block the interpreter. The plan decides from its `facts` (compaction/plan.py). The number of living ledgers is
exact. The largest are chosen among `_CANDIDATES_MAX` candidates, so with more ledgers than that one in many small
pieces may be missed. Guarded by tests/bookie/store/test_compaction.py.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import nlargest

from pyroaring import BitMap64

from ....runtime.files import Files, join
from ...format import entry_log
from ...format.framing import Damaged
from ...format.mark import OpenLog
from .. import disk
from ..entrylog.files import index_name, log_name, read_extents
from ..intervals import Intervals
from .plan import HOLDERS_MAX, CompactionState, Holder, LogFacts

_CANDIDATES_MAX = 1 << 14

class DeletedLedgers:
    """The tombstones as they were when it was made, for another thread."""

    def __init__(self, tombstones: Intervals) -> None:
        pairs = list(tombstones)
        self._firsts = [first for first, _ in pairs]
        self._lasts = [last for _, last in pairs]

    def __contains__(self, ledger: int) -> bool:
        at = bisect_right(self._firsts, ledger) - 1
        return at >= 0 and ledger <= self._lasts[at]


class LogSurvey:
    """Counts the live bytes of one log. `opened`: the end of its committed bytes, if it is open."""

    def __init__(
        self, files: Files, directory: str, uuid: bytes, number: int, state: CompactionState, opened: OpenLog | None,
        deleted: DeletedLedgers,
    ) -> None:  # fmt: skip
        self._number = number
        self._state = state
        self._deleted = deleted
        self._sizes = [file_size(files, join(directory, name(number))) for name in (log_name, index_name)]
        log_end = self._sizes[0] if opened is None else opened.log_end
        self._data_bytes = max(0, log_end - entry_log.DATA_OFFSET)
        self._parts = read_extents(files, directory, number, uuid, None if opened is None else opened.index_end)
        self._ledgers = BitMap64()
        self._largest: dict[int, int] = {}
        self._live_bytes = 0
        self._live_extents = 0
        self._readable = True

    def step(self) -> bool:
        """Counts one more part; False: there is none."""
        try:
            extents = next(self._parts, None)
        except (Damaged, OSError):
            self._readable = False
            return False
        if extents is None:
            return False
        largest, ledgers = self._largest, self._ledgers
        for extent in extents:
            ledger = extent.ledger
            if ledger in self._deleted:
                continue
            self._live_bytes += extent.length
            self._live_extents += 1
            ledgers.add(ledger)
            largest[ledger] = largest.get(ledger, 0) + extent.length
        if len(largest) > _CANDIDATES_MAX:
            kept = nlargest(_CANDIDATES_MAX // 4, largest.items(), key=lambda item: item[1])
            self._largest = dict(kept)
        return True

    @property
    def facts(self) -> LogFacts:
        largest = sorted(self._largest.items(), key=lambda item: (-item[1], item[0]))[:HOLDERS_MAX]
        return LogFacts(
            self._number, self._state, sum(self._sizes), self._data_bytes, self._live_bytes, self._live_extents,
            len(self._ledgers), tuple(Holder(*item) for item in largest), self._readable,
        )  # fmt: skip


def file_size(files: Files, path: str) -> int:
    """Returns the size of a file; 0 when there is none."""
    return disk.size_of(files, path) if files.exists(path) else 0
