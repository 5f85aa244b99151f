"""`python -m tests.pairs`: the table of all pairs of features, and what meets each: a test, or why none does.

Examples:

    python -m tests.pairs                                    the table
    python -m tests.pairs --rounds 500 --seed 7              five hundred triples, drawn at random, are played
    python -m tests.pairs --rounds 100 --size 4              four features each
    python -m tests.pairs --play "chunk + dead letter"       one scene, with what the judge says of it

Scenes with kill -9 are played on a process, which is killed once while all of them send; those with Spark by the tests
alone. The last line of what is played is JSON: `scenes`, `failed`, `known` (the defect is in tests/pairs/known.py) and
`seconds`. Exit code 1: a scene failed of which no defect is known.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from magnetar.cli.common.processes import Processes
from tests.pairs.features import FEATURES
from tests.pairs.known import defect_of
from tests.pairs.pairs import Names, excluded, table, title, where
from tests.pairs.stage import in_process, in_processes, play, play_through_a_kill

AT_A_TIME = 100


def main(arguments: list[str] | None = None) -> int:
    """0: nothing failed that is not known; 2: wrong arguments (argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.pairs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="scenes that are drawn and played (0)")
    parser.add_argument("--size", type=int, default=3, metavar="N", help="features of each (3)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of scenes and their variety (1)")
    parser.add_argument("--play", action="append", default=[], metavar="SCENE", help='names, with " + " between them')
    options = parser.parse_args(arguments)
    wanted = [tuple(part.strip() for part in scene.split("+")) for scene in options.play]
    if unknown := [name for names in wanted for name in names if name not in FEATURES]:
        parser.error(f"no such feature: {', '.join(unknown)}; there are {', '.join(FEATURES)}")
    if not wanted and not options.rounds:
        _print_table()
        return 0
    return _play(wanted or drawn(options.rounds, options.size, options.seed), options.seed)


def drawn(rounds: int, size: int, seed: int) -> list[Names]:
    """Scenes of `size` features that make sense together, without Spark."""
    rng = random.Random(seed)
    names = [name for name in FEATURES if FEATURES[name].where != "spark"]
    found: list[Names] = []
    while len(found) < rounds:
        scene = tuple(sorted(rng.sample(names, size), key=names.index))
        if not excluded(scene):
            found.append(scene)
    return found


def _print_table() -> None:
    wide = max(len(name) for name in FEATURES)
    for name, feature in FEATURES.items():
        print(f"{name:{wide}}  {feature.promise}")
    print()
    found = table()
    for (one, other), what in found.items():
        print(f"{one:{wide}}  {other:{wide}}  {what}")
    met = sum("::" in what for what in found.values())
    print(json.dumps({"features": len(FEATURES), "pairs": len(found), "met": met, "excluded": len(found) - met}))


def _play(scenes: Sequence[Names], seed: int) -> int:
    began = time.perf_counter()
    failed = known = 0
    for first in range(0, len(scenes), AT_A_TIME):
        part = scenes[first : first + AT_A_TIME]
        with tempfile.TemporaryDirectory(prefix="magnetar-pairs-") as folder:
            for names, faults in _played(part, Path(folder), seed):
                why = defect_of(names) if faults else ""
                known += bool(why)
                failed += bool(faults) and not why
                if faults:
                    replay = f"python -m tests.pairs --seed {seed} --play {title(names)!r}"
                    print(f"{'known: ' + why if why else 'FAILED'}: {replay}")
                    print("".join(f"    {fault.rstrip()}\n" for fault in faults), end="", flush=True)
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"scenes": len(scenes), "failed": failed, "known": known, "seconds": seconds}))
    return 1 if failed else 0


def _played(scenes: Sequence[Names], folder: Path, seed: int) -> list[tuple[Names, list[str]]]:
    here = [names for names in scenes if where(names) == "here"]
    killed = [names for names in scenes if where(names) == "processes"]
    found: list[tuple[Names, list[str]]] = []
    if here:

        async def in_here() -> None:
            (folder / "here").mkdir()
            async with in_process(folder / "here") as server:
                found.extend(await play(server, here, seed=seed))

        asyncio.run(in_here())
    if killed:
        (folder / "killed").mkdir()
        with Processes(folder / "killed") as processes, in_processes(processes, folder / "killed") as (one, server):
            found.extend(asyncio.run(play_through_a_kill(one, server, killed)))
    return found


if __name__ == "__main__":
    sys.exit(main())
