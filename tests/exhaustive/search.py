"""Depth first over the states of a space that were not seen before; the path to a violation is what is on the stack.

A state is remembered as the 61 bits of its hash: among ten million states two share one with a chance of 1 in 40,000,
and then one of them is not looked at.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.exhaustive.space import Space
from tests.exhaustive.symmetry import Symmetry
from tests.exhaustive.values import Broken, State

PROGRESS = 200_000


@dataclass(slots=True)
class Result:
    states: int = 0
    steps: int = 0
    depth: int = 0
    ends: int = 0
    exhausted: bool = False
    seconds: float = 0.0
    violation: str = ""
    path: list[str] = field(default_factory=list)


def search(
    space: Space, states_max: int, *, symmetric: bool = True, show: Callable[[str], object] = lambda line: None
) -> Result:
    """Until the first violation, or everything was seen, or so many states were."""
    result = Result()
    begun = time.perf_counter()
    canonical = Symmetry(space).canonical if symmetric else lambda state: state
    seen = {hash(canonical(space.first))}
    stack: list[tuple[str, Iterator[tuple[str, State]]]] = [("", space.turns(space.first))]
    words = ""
    try:
        while stack:
            turn = next(stack[-1][1], None)
            if turn is None:
                stack.pop()
                continue
            words, state = turn
            result.steps += 1
            key = hash(canonical(state))
            if key in seen:
                continue
            seen.add(key)
            if space.at_rest(state):
                result.ends += 1
                space.close_undisturbed(state)
            stack.append((words, space.turns(state)))
            result.depth = max(result.depth, len(stack) - 1)
            if len(seen) % PROGRESS == 0:
                show(f"{len(seen)} states, depth {result.depth}, {len(seen) / (time.perf_counter() - begun):.0f}/s")
            if len(seen) >= states_max:
                break
        result.exhausted = not stack
    except (Broken, AssertionError) as broken:
        result.violation = str(broken) or repr(broken)
        result.path = [each for each, _ in stack if each] + [words]
    result.states = len(seen)
    result.seconds = time.perf_counter() - begun
    return result
