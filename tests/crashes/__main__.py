"""`python -m tests.crashes`: crashes a store everywhere and starts it on what is left; prints what failed.

Examples:

    python -m tests.crashes --states 50000 --jobs 2
    python -m tests.crashes --replay 3/512/without4                  one state, with its log of operations
    python -m tests.crashes --replay '3/512/all~17/none'             and a crash of the start on it
    python -m tests.crashes --replay stop17/312/all                  one of a stop (tests/crashes/stops.py)
    python -m tests.crashes --replay loss/188/none                   one of a case (tests/crashes/cases.py)
    python -m tests.crashes --states 0                               the negative control alone

Workloads 0, 1, 2, … of the seed (tests/crashes/workload.py), and beside them stops 0, 1, 2, … (tests/crashes/stops.py:
work that is cancelled at each operation), are looked at until there were so many states; then every
sync of the store is taken away in turn (tests/crashes/control.py), and each must be missed; and the same for the
cases of what a healthy store never does (tests/crashes/cases.py). The last line is JSON.
Exit code 1: a state failed, a sync was not missed, or a function that asks for one was never reached.
"""

import argparse
import json
import sys
import time

from tests.crashes import run
from tests.crashes.replay import replay


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """Wrong ones end the process (argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.crashes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=50_000, metavar="N", help="how many states (50,000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the workloads and of chance (0)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--replay", metavar="STATE", help="one state by its name, with all that was done")
    parser.add_argument("--without", default="", metavar="SITE", help="with --replay: the sync that does not count")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """0: nothing failed; 1: something did; 2: wrong arguments (argparse)."""
    options = options_of(arguments)
    run.quiet()
    if options.replay:
        return replay(options.replay, options.without, print)
    begun = time.perf_counter()
    result = run.everything(options.states, options.seed, options.jobs, show=print)
    print(json.dumps({**result.figures(), "seconds": round(time.perf_counter() - begun, 1)}), flush=True)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
