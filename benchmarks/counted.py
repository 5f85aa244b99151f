"""Runs `magnetar …` and counts its Python calls: `python benchmarks/counted.py standalone …`.

Each line on its standard input turns the count on or off. When it is turned off, the counts of the functions go to the
file that the line names, as JSON: `module:line name` → calls, of all threads. Code that mypyc compiled is not seen.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parent.parent)


class CallCount:
    """The calls of this process's threads that were started after `install`, while `on`."""

    def __init__(self) -> None:
        self.on = False
        self._found: Counter[CodeType] = Counter()

    def install(self) -> None:
        threading.setprofile(self._event)
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call":
            self._found[frame.f_code] += 1

    def take(self) -> dict[str, int]:
        """What was counted since the last time, the most frequent first."""
        found, self._found = self._found, Counter()
        named: Counter[str] = Counter()
        for code, calls in found.items():
            path = code.co_filename.removeprefix(ROOT + "/")
            named[f"{path}:{code.co_firstlineno} {code.co_qualname}"] += calls
        return dict(named.most_common())


def _listen(counts: CallCount) -> None:
    for line in sys.stdin:
        counts.on = not counts.on
        if not counts.on:
            part = Path(f"{line.strip()}.part")
            part.write_text(json.dumps(counts.take()))
            part.rename(line.strip())


if __name__ == "__main__":
    sys.path[0] = ""
    counts_ = CallCount()
    threading.Thread(target=_listen, args=(counts_,), daemon=True).start()
    counts_.install()
    from magnetar.cli.main import main

    main()
