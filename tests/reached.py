"""`python -m tests.reached`: which branches of the store and of the ledgers no tier of the proofs reaches.

Runs crash states (workloads, stops and cases, tests/crashes) and seeds of both tiers of the simulation in one process
under coverage.py, and prints, by file, the lines and the branches (from line → to line, "exit" is the function's end)
that none of them came by. What is reached is not proved; what is not reached is certainly not.

    python -m tests.reached --states 2000 --cluster 300 --protocol 3000

Slow: coverage costs about four times the time. The last line is JSON: files by folder, branches, and how many
were not reached.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
LOOKED_AT = (ROOT / "bookie" / "store", ROOT / "ledger")
"""Every module of these folders is in the report, also one that no run imports."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.reached", description=__doc__)
    parser.add_argument("--states", type=int, default=2_000, metavar="N", help="crash states (2,000)")
    parser.add_argument("--cluster", type=int, default=300, metavar="N", help="seeds of whole clusters (300)")
    parser.add_argument("--protocol", type=int, default=3_000, metavar="N", help="seeds of the protocol tier (3,000)")
    options = parser.parse_args(arguments)
    if gone := [folder for folder in LOOKED_AT if not any(folder.rglob("*.py"))]:
        parser.error(f"there is no code in {', '.join(map(str, gone))}")
    folders = [str(each) for each in LOOKED_AT]
    measured = coverage.Coverage(branch=True, data_file=None, config_file=False, source=folders)
    measured.start()
    failures = [*_crash(options.states), *_simulate(options.protocol, options.cluster)]
    measured.stop()
    for failure in failures:
        print(f"FAILED {failure}")
    _show(measured)
    return 1 if failures else 0


def _crash(states: int) -> Iterator[str]:
    from tests.crashes import cases, run

    run.quiet()
    done = number = 0
    while done < states:
        for part in (run.workload(str(number), 500), run.some_stops(range(8 * number, 8 * number + 8))):
            done += part.states
            yield from (failure.state for failure in part.failures)
        number += 1
    if states:
        for name in cases.CASES:
            run.case(name)


def _simulate(protocol: int, cluster: int) -> Iterator[str]:
    from tests.simulation.run import quiet
    from tests.simulation.tiers import run_any

    quiet()
    for tier, seeds in (("protocol", protocol), ("cluster", cluster)):
        for seed in range(1, seeds + 1):
            if run_any(tier, seed).failures:
                yield f"{tier} seed {seed}"


def _show(measured: coverage.Coverage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        measured.json_report(outfile=str(report))
        found = json.loads(report.read_text())
    branches = unreached = 0
    for path, file in sorted(found["files"].items()):
        branches += file["summary"]["num_branches"]
        missing = [f"{start}→{'exit' if end < 0 else end}" for start, end in file["missing_branches"]]
        unreached += len(missing)
        if missing or file["missing_lines"]:
            lines = ", ".join(map(str, file["missing_lines"]))
            name = Path(path).resolve().relative_to(ROOT)
            print(f"{name}: lines {lines or 'none'}; branches {', '.join(missing) or 'none'}")
    of = Counter(Path(path).resolve().relative_to(ROOT).parts[0] for path in found["files"])
    print(json.dumps({"files": dict(of), "branches": branches, "unreached": unreached}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
