"""The states of one workload, spread over all its crash points, and what became of each.

For every crash point the cuts (tests/crashes/image.py), the most telling ones first; `budget` states take so many of
each point that all points get a like share. Of every `NESTED_EVERY`-th state the start is crashed, too: at a few random
operations of it, with cuts of their own; and sometimes that start again. Equal states with equal facts are started on
once (`Outcome.equal` counts the others), also those that a crash of a start leaves, unless the answers of that start
differ. Everything is drawn from the seed, so that a state has a name by which it can be replayed:

    3/512/without4            workload 3, before its 512th step, everything but volatile change 4
    3/512/all~17/none~9/all   the start on that crashed at its 17th step, and the next one at its 9th
"""

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from tests.crashes.facts import Expected
from tests.crashes.image import Cut, Image, State, Step, cuts_of, points
from tests.crashes.verify import Answers, Broken, Started, start
from tests.crashes.workload import Recording

NESTED_EVERY = 8
NESTED_STATES = 3
DEPTH_MAX = 3
FULL_EVERY = 12
ROOM_BYTES_MAX = 24 << 10
SERVE_EVERY = 4


@dataclass
class Failure:
    state: str
    reason: str


@dataclass
class Outcome:
    states: int = 0
    equal: int = 0
    failures: list[Failure] = field(default_factory=list)


class Enumeration:
    """Of one recording. `removed`: sites whose syncs do not count."""

    def __init__(self, recording: Recording, removed: Collection[str] = ()) -> None:
        self.recording = recording
        self.removed = removed
        self.points = [at for at in points(recording.steps) if at >= recording.begin]
        self.outcome = Outcome()
        self._epoch = 0
        self._seen: dict[int, Answers | None] = {}  # of this epoch, by their keys; None: it failed

    # ------------------------------------------------------------------------------------ running
    def run(self, budget: int) -> Iterator[Outcome]:
        """Looks at about `budget` states; yields after each crash point."""
        share, more = self._share(budget)
        for number, (at, image, expected) in enumerate(self.walk(), 1):
            extra = number * more // len(self.points) - (number - 1) * more // len(self.points)
            for cut in islice(cuts_of(image, self.name_of(at)), share + extra):
                self.look(f"{self.name_of(at)}/{cut.name}", image.state(cut), expected)
            yield self.outcome

    def name_of(self, at: int) -> str:
        return f"{self.recording.name}/{at}"

    def walk(self) -> Iterator[tuple[int, Image, Expected]]:
        """Every crash point: the image before the step, and what has to be kept."""
        image, expected, steps = Image(removed=self.removed), Expected(self.recording.facts), self.recording.steps
        done = 0
        for at in self.points:
            for step in steps[done:at]:
                image.follow(step)
            done = at
            expected.forward(steps[at].operation.number - 1 if at < len(steps) else 1 << 60)
            yield at, image, expected

    def _share(self, budget: int) -> tuple[int, int]:
        """(how many cuts of each point make about `budget` states together, how many points have one more)."""
        counts = [len(list(cuts_of(image, self.name_of(at)))) for at, image, _ in self.walk()]
        budget = budget * NESTED_EVERY // (NESTED_EVERY + NESTED_STATES)  # the rest are nested
        share = 1
        while share < max(counts) and sum(min(count, share + 1) for count in counts) <= budget:
            share += 1
        return share, min(len(self.points), max(0, budget - sum(min(count, share) for count in counts)))

    # ------------------------------------------------------------------------------------ one state
    def look(self, name: str, state: State, expected: Expected) -> None:
        key = self._key(state, expected)
        if key in self._seen:
            self.outcome.equal += 1
            return
        nests = (self.outcome.states + 1) % NESTED_EVERY == 0
        started = self.try_start(name, state, expected, None, recorded=nests)
        self._seen[key] = started.answers if started is not None else None
        if started is not None and nests:
            self._nest(name, state, expected, started, 1)
        elif started is not None and self.outcome.states % FULL_EVERY == 1:
            self._fill(name, state, expected, started)

    def _key(self, state: State, expected: Expected) -> int:
        """The key of a state; those of other facts are forgotten, for facts only grow."""
        if expected.epoch != self._epoch:
            self._epoch = expected.epoch
            self._seen.clear()
        return state.key()

    def _fill(self, name: str, state: State, expected: Expected, started: Started) -> None:
        """The start on a full disk, which may have no room for it, then one with room: the same store as without."""
        room = random.Random(name).randrange(ROOM_BYTES_MAX)
        name = f"{name}+full{room}"
        full = self.try_start(name, state, expected, None, room)
        if full is not None and full.answers not in (None, started.answers):
            self.outcome.failures.append(Failure(name, f"on a full disk: {full.answers} instead of {started.answers}"))
        if full is not None:
            image = self.after(state, full.steps)
            everything = Cut("all", tuple(range(len(image.volatile))))
            inner = f"{name}~{len(full.steps)}/all"
            self.try_start(inner, image.state(everything), expected, started.answers, recorded=False)

    def _nest(self, name: str, state: State, expected: Expected, started: Started, depth: int) -> None:
        """Crashes of the start itself; what the next start makes of it must be the same."""
        rng = random.Random(name)
        wheres = list(points(started.steps))
        for _ in range(NESTED_STATES if depth == 1 else 1):
            at = rng.choice(wheres)
            image = self.after(state, started.steps[:at])
            cut = rng.choice(list(cuts_of(image, f"{name}~{at}")))
            inner, inner_state = f"{name}~{at}/{cut.name}", image.state(cut)
            key = self._key(inner_state, expected)
            if key in self._seen and self._seen[key] in (None, started.answers):
                self.outcome.equal += 1
                continue
            deeper = depth < DEPTH_MAX and rng.random() < 0.3
            again = self.try_start(inner, inner_state, expected, started.answers, recorded=deeper)
            self._seen[key] = again.answers if again is not None else None
            if again is not None and deeper:
                self._nest(inner, inner_state, expected, again, depth + 1)

    def after(self, state: State, steps: list[Step]) -> Image:
        image = Image(state, self.removed)
        for step in steps:
            image.follow(step)
        return image

    def try_start(
        self,
        name: str,
        state: State,
        expected: Expected,
        same: Answers | None,
        room: int | None = None,
        *,
        recorded: bool = True,
        asked: bool = True,
    ) -> Started | None:
        """None: it failed. `same`: what an earlier start answered. `recorded`: with what it did to the disk. Not
        `asked`: what it does is of interest, and not what it then answers."""
        self.outcome.states += 1
        try:
            serve = room is None and self.outcome.states % SERVE_EVERY == 0
            started = start(
                state, expected, self.recording.journal, serve=serve, room=room, recorded=recorded, asked=asked
            )  # fmt: skip
            if same is not None and started.answers != same:
                raise Broken(f"the start was cut off, the next one differs: {differences(same, started.answers or {})}")
            return started
        except Exception as error:
            self.outcome.failures.append(Failure(name, f"{type(error).__name__}: {error}"))
            return None


def differences(one: Answers, other: Answers) -> str:
    return "; ".join(f"ledger {at}: {one[at]} and {other[at]}" for at in one if one[at] != other.get(at))
