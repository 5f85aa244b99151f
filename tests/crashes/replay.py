"""One state again, by its name: what was done before the crash, what survived it, what the start said."""

import traceback
from collections.abc import Callable, Sequence

from tests.crashes import cases
from tests.crashes.enumerate import Enumeration
from tests.crashes.facts import Expected
from tests.crashes.image import Content, Image, State, Step, cut_named
from tests.crashes.stops import record_named
from tests.crashes.verify import listening, start

STEPS_SHOWN = 40


def replay(name: str, without: str, show: Callable[[str], object]) -> int:
    """1: the state fails. `without`: the site whose syncs do not count, as in the negative control."""
    first, *nested = name.split("~")
    seed, where, cut_name = first.partition("+full")[0].split("/")
    if seed in cases.CASES:
        return _replay_case(name, without, show)
    enumeration = Enumeration(record_named(seed), (without,) if without else ())
    _show_steps(enumeration.recording.steps[: int(where)], show)
    for at, image, expected in enumeration.walk():
        if at == int(where):
            state = _state(image, enumeration.name_of(at), cut_name, show)
            with listening():
                return _starts(enumeration, state, expected, first, nested, show)
    raise ValueError(f"workload {seed} has no crash point {where}")


def _replay_case(name: str, without: str, show: Callable[[str], object]) -> int:
    steps, error = cases.replay(name, without)
    _show_steps(steps, show)
    show("nothing is wrong" if error is None else "".join(traceback.format_exception(error)))
    return int(error is not None)


def _starts(
    enumeration: Enumeration,
    state: State,
    expected: Expected,
    name: str,
    nested: list[str],
    show: Callable[[str], object],
) -> int:
    """The start on the state; for each nested crash the start up to there, and the next one."""
    answers = None
    for inner in nested:
        where, cut_name = inner.split("/")
        started = start(state, expected, enumeration.recording.journal, room=room_of(name))
        answers = answers or started.answers
        show(f"the start on {name}:")
        _show_steps(started.steps[: int(where)], show)
        state = _state(enumeration.after(state, started.steps[: int(where)]), f"{name}~{where}", cut_name, show)
        name = f"{name}~{inner}"
    try:
        found = start(state, expected, enumeration.recording.journal, room=room_of(name))
    except Exception:
        show(traceback.format_exc())
        return 1
    show(f"the start on {name}:")
    _show_steps(found.steps, show)
    for ledger, answer in (found.answers or {}).items():
        show(f"ledger {ledger}: {answer}" + ("" if not answers else f"; the start before it: {answers[ledger]}"))
    return 1 if answers and answers != found.answers else 0


def _state(image: Image, name: str, cut_name: str, show: Callable[[str], object]) -> State:
    cut = cut_named(image, name, cut_name)
    for at, change in enumerate(image.volatile):
        what = f"{change.change}"[:100] if isinstance(change, Content) else f"{change.removed} -> {change.added}"
        show(f"    volatile {at}: operation {change.number} {'kept' if at in cut.kept else 'LOST'}: {what}")
    if cut.torn:
        show(f"    of the last kept write only {cut.torn}")
    return image.state(cut)


def room_of(name: str) -> int | None:
    """A start on a full disk says so at the end of its name."""
    room = name.rpartition("~")[2].partition("+full")[2]
    return int(room) if room else None


def _show_steps(steps: Sequence[Step], show: Callable[[str], object]) -> None:
    for line in map(_describe, steps[-STEPS_SHOWN:]):
        show(line)


def _describe(step: Step) -> str:
    done = step.operation
    extent = f" {done.offset}+{len(done.data) or done.size}" if done.kind in ("pread", "pwrite") else ""
    size = f" to {done.size}" if done.kind in ("allocate", "truncate") else ""
    target = f" to {done.target}" if done.target else ""
    return f"{done.number:6d} {done.kind} {done.path}{extent}{size}{target}   {step.site}"
