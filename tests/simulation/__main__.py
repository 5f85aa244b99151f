"""`python -m tests.simulation`: many seeds, each a cluster's life; prints what failed and how to replay it.

Examples:

    python -m tests.simulation --seeds 1:200 --jobs 2
    python -m tests.simulation --seeds 17:17 --trace      one seed, with everything that happened in it

The last line is JSON; `trace_hash` is a hash over the hashes of all seeds in their order: the same code and the same
seeds give the same hash, whatever --jobs, the machine's speed or PYTHONHASHSEED.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator

from tests.simulation.options import draw
from tests.simulation.run import Outcome, combine, quiet, run_seed


def main(arguments: list[str] | None = None) -> int:
    """0: every seed passed; 1: some failed; 2: wrong arguments (argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_seeds, default=(1, 200), metavar="A:B", help="first and last seed (1:200)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument("--trace", action="store_true", help="print every line of the trace (one job)")
    options = parser.parse_args(arguments)
    quiet()
    first, last = options.seeds
    begun = time.perf_counter()
    outcomes = []
    with contextlib.closing(_outcomes(range(first, last + 1), options.jobs, options.trace)) as running:
        for outcome in running:
            outcomes.append(outcome)
            _report(outcome, len(outcomes), last - first + 1)
    failed = [outcome.seed for outcome in outcomes if outcome.failures]
    result = {
        "seeds": len(outcomes),
        "failed": len(failed),
        "seconds": round(time.perf_counter() - begun, 3),
        "virtual_seconds": round(sum(outcome.virtual_seconds for outcome in outcomes), 3),
        "trace_hash": combine([outcome.trace_hash for outcome in outcomes]),
    }
    if failed:
        print(f"failed seeds: {' '.join(map(str, failed))}")
    print(json.dumps(result), flush=True)
    return 1 if failed else 0


def _seeds(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last or first)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, for example 1:200") from error
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first seed is above the last")
    return found


def _outcomes(seeds: range, jobs: int, trace: bool) -> Iterator[Outcome]:
    """In the order of the seeds, whoever ran them."""
    if jobs <= 1 or trace:
        for seed in seeds:
            yield run_seed(seed, show=print if trace else None)
        return
    # An executor, not a Pool: when a worker cannot start it says so, where a Pool would start another for ever.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=quiet) as pool:
        yield from pool.map(run_seed, seeds)


def _report(outcome: Outcome, done: int, total: int) -> None:
    if outcome.failures:
        print(f"seed {outcome.seed} ({outcome.kind}) FAILED after {outcome.virtual_seconds:.3f} virtual s:")
        for failure in outcome.failures[:5]:
            print(f"    {failure[:1000]}")
        if len(outcome.failures) > 5:
            print(f"    … and {len(outcome.failures) - 5} more")
        print(f"    options: {draw(outcome.seed).describe()}")
        print(f"    replay: python -m tests.simulation --seeds {outcome.seed}:{outcome.seed} --trace", flush=True)
    if sys.stderr.isatty():
        end = "\n" if done == total else "\r"
        print(f"{done}/{total} seeds", end=end, file=sys.stderr, flush=True)
    elif done % 25 == 0 or done == total:
        print(f"{done}/{total} seeds", flush=True)


if __name__ == "__main__":
    sys.exit(main())
