"""The negative control: a sync that can be left out unnoticed was not needed, or we do not look well enough.

`find(site, recordings)` makes the syncs of one site count for nothing and looks for a state that fails, in all
recordings, at the crash points where that leaves another disk: first with everything volatile lost, then with the most
telling cuts, then with all of them; and where a start passes the site, at the crashes of that start.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tests.crashes.enumerate import Enumeration, Failure
from tests.crashes.facts import Expected
from tests.crashes.image import Cut, Image, State, cuts_of
from tests.crashes.sites import WRITE_BACK, function_of
from tests.crashes.verify import Started
from tests.crashes.workload import Recording

FIRST_CUTS = 6
START_EVERY = 20
STATES_MAX = 8_000
"""Of one site: then it counts as not missed. Those that are missed took less than a tenth of that."""

IN_CASES = ("DataLossLog._write", "DataLossLog.delete_log")
"""Workloads enter limbo without damage that a second start could miss: nothing rests on the note of a loss there."""

NOTHING = Cut("none", ())


class Found(NamedTuple):
    site: str
    failure: Failure | None  # None: nothing failed without it
    states: int


def sites_of(recordings: Sequence[Recording]) -> list[str]:
    """Of the workloads and of the starts that follow their crashes, in the order in which they first come up.

    Without those of the cases (tests/crashes/cases.py).
    """
    found = {step.site: None for recording in recordings for step in recording.steps if step.site}
    for recording in recordings:
        for started in starts_of(recording):
            found.update({step.site: None for step in started.steps if step.site})
    return [site for site in found if site != WRITE_BACK and function_of(site) not in IN_CASES]


def starts_of(recording: Recording) -> Iterator[Started]:
    """Of a few states: enough to see every site that a start passes."""
    enumeration = Enumeration(recording)
    for at, image, expected in enumeration.walk():
        if at % START_EVERY == 0:
            for cut in islice(cuts_of(image, enumeration.name_of(at)), 2):
                started = enumeration.try_start("", image.state(cut), expected, None, asked=False)
                if started is not None:
                    yield started


def find(site: str, recordings: Sequence[Recording]) -> Found:
    """A state that fails when the syncs of `site` do not count. The last recordings show the rarest sites soonest."""
    states = 0
    for cuts_max in (1, FIRST_CUTS, 1 << 30):
        for recording in reversed(recordings):
            control = _Control(recording, site)
            failure = control.search(cuts_max, STATES_MAX - states)
            states += control.outcome.states
            if failure is not None or states >= STATES_MAX:
                return Found(site, failure, states)
    return Found(site, None, states)


class _Control(Enumeration):
    def __init__(self, recording: Recording, site: str) -> None:
        super().__init__(recording, (site,))
        self._site = site
        self._honest = Enumeration(recording)
        self._seen_starts: set[tuple[int, int]] = set()

    def search(self, cuts_max: int, states_max: int) -> Failure | None:
        for (at, image, expected), (_, honest, _) in zip(self.walk(), self._honest.walk(), strict=True):
            name = self.name_of(at)
            if differ(image, honest):
                for cut in islice(cuts_of(image, name), cuts_max):
                    self.look(f"{name}/{cut.name}", image.state(cut), expected)
            for cut in _cuts_of_starts(honest, name, cuts_max):
                self._crash_start(f"{name}/{cut.name}", honest.state(cut), expected)
            if self.outcome.failures:
                return self.outcome.failures[0]
            if self.outcome.states >= states_max:
                return None
        return None

    def _nest(self, name: str, state: State, expected: Expected, started: Started, depth: int) -> None:
        return

    def _crash_start(self, name: str, state: State, expected: Expected) -> None:
        """When a start passes the site and that makes a difference later in it, it is crashed there."""
        key = (state.key(), expected.epoch)
        if key in self._seen_starts:
            return
        self._seen_starts.add(key)
        if not self._passes(name, state, expected):
            return
        started = self.try_start(name, state, expected, None)
        if started is None:
            return
        image, honest = Image(state, self.removed), Image(state)
        wheres: list[int] = []
        for at, step in enumerate(started.steps, 1):
            image.follow(step)
            honest.follow(step)
            if differ(image, honest):
                wheres.append(at)
        for at in sorted({wheres[0], wheres[len(wheres) // 2], wheres[-1]}) if wheres else ():
            image, inner = self.after(state, started.steps[:at]), f"{name}~{at}"
            for cut in islice(cuts_of(image, inner), 2):
                self.try_start(f"{inner}/{cut.name}", image.state(cut), expected, started.answers)
            if self.outcome.failures:
                return


    def _passes(self, name: str, state: State, expected: Expected) -> bool:
        """Whether the start on what every sync left passes the site; it is one start for all sites."""
        key = (self.recording.name, state.key(), state.operations % 2, expected.epoch)
        passed = _passed.get(key)
        if passed is None:
            started = self.try_start(name, state, expected, None, asked=False)
            if started is None:
                return False
            passed = _passed[key] = frozenset(step.site for step in started.steps)
        return self._site in passed


_passed: dict[tuple[str, int, int, int], frozenset[str]] = {}
"""The sites of each start that was looked at, in this process: by recording, state, O_DIRECT and facts."""


def _cuts_of_starts(honest: Image, name: str, cuts_max: int) -> Iterable[Cut]:
    """Of which crashes the start is looked at, and crashed if it passes the site."""
    if cuts_max == 1:
        return ()
    cuts = list(cuts_of(honest, name))
    return [*cuts[:2], *cuts[3:][-1:]] if cuts_max == FIRST_CUTS else cuts


def differ(image: Image, honest: Image) -> bool:
    """Something is volatile that would be durable, and was not so before."""
    if len(image.volatile) == len(honest.volatile):
        return False
    return image.state(NOTHING).key() != honest.state(NOTHING).key()
