"""The negative control: a sync that can be left out unnoticed was not needed, or we do not look well enough.

`find(site, recordings)` makes the syncs of one site count for nothing and looks for a state that fails. First the most
telling cuts of every crash point behind such a sync, then all of them, in one recording after the other; and where
a start passes the site, the crashes of that start.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.crashes.enumerate import Enumeration, Failure
from tests.crashes.facts import Expected
from tests.crashes.image import State, cuts_of
from tests.crashes.sites import WRITE_BACK
from tests.crashes.verify import Answers, Started
from tests.crashes.workload import Recording

FIRST_CUTS = 6
START_EVERY = 5
STARTS_PER_SITE = 400
STATES_MAX = 8_000
"""Of one site: then it counts as not missed. Those that are missed took less than a tenth of that."""


class Found(NamedTuple):
    site: str
    failure: Failure | None  # None: nothing failed without it
    states: int


def sites_of(recordings: Sequence[Recording]) -> list[str]:
    """Of the workloads and of the starts that follow their crashes, in the order in which they first come up."""
    found = {step.site: None for recording in recordings for step in recording.steps if step.site}
    for recording in recordings:
        for started in starts_of(recording):
            found.update({step.site: None for step in started.steps if step.site})
    return [site for site in found if site != WRITE_BACK]


def starts_of(recording: Recording) -> Iterator[Started]:
    """Of a few states: enough to see every site that a start passes."""
    enumeration = Enumeration(recording)
    for at, image, expected in enumeration.walk():
        if at % START_EVERY == 0:
            for cut in cuts_of(image, enumeration.name_of(at))[:2]:
                started = enumeration.try_start("", image.state(cut), expected, None)
                if started is not None:
                    yield started


def find(site: str, recordings: Sequence[Recording]) -> Found:
    """A state that fails when the syncs of `site` do not count."""
    states = 0
    for cuts_max in (FIRST_CUTS, 1 << 30):
        for recording in recordings:
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
        self._nested = 0

    def search(self, cuts_max: int, states_max: int) -> Failure | None:
        passed, at_step = False, 0
        for at, image, expected in self.walk():
            passed = passed or any(step.site == self._site for step in self.recording.steps[at_step:at])
            at_step = at
            for cut in cuts_of(image, self.name_of(at))[: cuts_max if passed else 2]:
                self.look(f"{self.name_of(at)}/{cut.name}", image.state(cut), expected)
                if self.outcome.failures:
                    return self.outcome.failures[0]
                if self.outcome.states >= states_max:
                    return None
        return None

    def _nest(self, name: str, state: State, expected: Expected, started: Started, depth: int) -> None:
        return

    def try_start(self, name: str, state: State, expected: Expected, same: Answers | None) -> Started | None:
        started = super().try_start(name, state, expected, None)
        passes = started is not None and any(step.site == self._site for step in started.steps)
        if started is not None and passes and self._nested < STARTS_PER_SITE:
            self._crash_start(name, state, expected, started)
        return started

    def _crash_start(self, name: str, state: State, expected: Expected, started: Started) -> None:
        """A start that passes the site: crash it behind the sync, at once and at its end."""
        self._nested += 1
        rng = random.Random(name)
        first = next(at for at, step in enumerate(started.steps) if step.site == self._site) + 1
        for at in (first, rng.randint(first, len(started.steps)), len(started.steps)):
            image = self.after(state, started.steps[:at])
            for cut in cuts_of(image, f"{name}~{at}")[:3]:
                inner = f"{name}~{at}/{cut.name}"
                Enumeration.try_start(self, inner, image.state(cut), expected, started.answers)
                if self.outcome.failures:
                    return
