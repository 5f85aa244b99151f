"""`python -m tests.exhaustive`: every interleaving of a small protocol; prints what it saw, or the way to a violation.

Examples:

    python -m tests.exhaustive                                     all of it in small, as CI does: 50,000 states of each
    python -m tests.exhaustive --states 0 --quorum 3/3/2 --entries 1 --recoverers 2 --fault late      … to the end
    python -m tests.exhaustive --states 0 --quorum 2/2/2 --entries 2 --recoverers 1 --fault unknown

Without --fault every kind is searched, each alone (tests/exhaustive/space.py), and without --quorum 3/3/2, 3/2/2 and
2/2/2, all on three bookies: the last has one to spare, so its writer changes ensembles. The last line is JSON.
Exit code 1: something was violated.
"""

import argparse
import json
import sys

from tests.exhaustive.search import Result, search
from tests.exhaustive.space import Space
from tests.exhaustive.values import FAULTS, Shape

BOOKIES = 3
QUORUMS = ((3, 3, 2), (3, 2, 2), (2, 2, 2))


def main(arguments: list[str] | None = None) -> int:
    """0: nothing was violated; 1: something was; 2: wrong arguments (argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.exhaustive", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--states", type=int, default=50_000, metavar="N", help="of each search; 0: all (50,000)")
    parser.add_argument("--quorum", type=_quorum, metavar="E/QW/QA", help="of the ledger, on three bookies")
    parser.add_argument("--entries", type=int, default=2, metavar="N", help="that the writer appends (2)")
    parser.add_argument("--recoverers", type=int, default=2, choices=(0, 1, 2), metavar="N", help="at once (2)")
    parser.add_argument("--fault", choices=FAULTS, help="which one may happen once")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="entries that a recovery reads at once (1)")
    options = parser.parse_args(arguments)
    results: list[Result] = []
    exhausted = 0
    for quorum in [options.quorum] if options.quorum else QUORUMS:
        for fault in [options.fault] if options.fault else FAULTS:
            shape = Shape(quorum, BOOKIES, options.entries, options.recoverers, fault, options.batch)
            result = search(Space(shape), options.states or sys.maxsize, show=print)
            results.append(result)
            exhausted += result.exhausted
            _report(shape, result)
    figures = {
        "searches": len(results),
        "exhausted": exhausted,
        "states": sum(result.states for result in results),
        "steps": sum(result.steps for result in results),
        "depth": max(result.depth for result in results),
        "violations": sum(bool(result.violation) for result in results),
        "seconds": round(sum(result.seconds for result in results), 1),
    }
    print(json.dumps(figures), flush=True)
    return 1 if figures["violations"] else 0


def _report(shape: Shape, result: Result) -> None:
    quorum = "/".join(map(str, shape.quorum))
    how = "VIOLATED" if result.violation else "all seen" if result.exhausted else "bounded"
    print(
        f"{quorum}, {shape.entries} entries, {shape.recoverers} recoverers, fault {shape.fault}: {how}, "
        f"{result.states} states, {result.steps} steps, depth {result.depth}, {result.ends} ends, "
        f"{result.seconds:.1f} s",
        flush=True,
    )
    if result.violation:
        print(*result.path, f"VIOLATED {result.violation}", sep="\n    ", flush=True)


def _quorum(text: str) -> tuple[int, int, int]:
    try:
        ensemble, write, ack = map(int, text.split("/"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not E/QW/QA, for example 3/3/2") from error
    if not BOOKIES >= ensemble >= write >= ack >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: three bookies >= E >= Qw >= Qa >= 1")
    return ensemble, write, ack


if __name__ == "__main__":
    sys.exit(main())
