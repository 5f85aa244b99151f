"""`python -m tests.simulation`: many seeds; prints what failed, the smallest schedule that fails, and how to replay it.

Two tiers: most seeds are the protocol's cores against a model of the service (tests/simulation/protocol/), every
twenty-fifth is a whole cluster of the real code. `--tier` runs one of them alone, for every number.

Examples:

    python -m tests.simulation --seeds 1:10000 --jobs 2
    python -m tests.simulation --seeds 1:40 --tier cluster
    python -m tests.simulation --seeds 1:20 --tier transactions    clusters whose clients run transactions
    python -m tests.simulation --seeds 1:20 --tier filtered        clusters with a filtered subscription and a schedule
    python -m tests.simulation --seeds 1:20 --tier inside          brokers within the processes of bookies
    python -m tests.simulation --seeds 17:17 --trace      one seed, and its story: time, who, what
    python -m tests.simulation --seeds 17:17 --details    … with every message and every operation of a disk
    python -m tests.simulation --seeds 17:17 --shrink     … what is left of it when all that is not needed is left out
    python -m tests.simulation --kinds                    what can go wrong in a whole cluster

The last line is JSON; `trace_hash` is a hash over the hashes of all seeds in their order: the same code and the same
seeds give the same hash, whatever --jobs, the machine's speed or PYTHONHASHSEED.
"""

import argparse
import concurrent.futures
import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial

from tests.simulation.protocol import options as protocol_options
from tests.simulation.protocol.run import run_protocol
from tests.simulation.protocol.shrink import shrink as shrink_protocol
from tests.simulation.run import Outcome, combine, quiet, run_seed
from tests.simulation.shrink import shrink as shrink_cluster
from tests.simulation.strikes.faults import kinds
from tests.simulation.tiers import CLUSTER_EVERY, FILTERED, INSIDE, SECURED, TRANSACTIONS, drawn_for, run_any

TIERS = ("both", "protocol", "cluster", SECURED, TRANSACTIONS, FILTERED, INSIDE)
SHRUNK_MAX = 3


def main(arguments: list[str] | None = None) -> int:
    """0: every seed passed; 1: some failed; 2: wrong arguments (argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=_seeds, default=(1, 200), metavar="A:B", help="first and last seed (1:200)")
    parser.add_argument("--tier", choices=TIERS, default="both", help="what the seeds run (both)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    parser.add_argument("--trace", action="store_true", help="print the story of each seed (one job)")
    parser.add_argument("--details", action="store_true", help="… with messages and operations of disks")
    parser.add_argument("--shrink", action="store_true", help="print the story of the shrunk schedule")
    parser.add_argument("--kinds", action="store_true", help="print the kinds of faults of a whole cluster, and end")
    options = parser.parse_args(arguments)
    if options.kinds:
        print(*kinds(), f"{len(kinds())} kinds", sep="\n")
        return 0
    quiet()
    first, last = options.seeds
    begun = time.perf_counter()
    outcomes: list[Outcome] = []
    trace = options.trace or options.details
    ran = _outcomes(options.tier, range(first, last + 1), options.jobs, trace, options.details)
    with contextlib.closing(ran) as running:
        for outcome in running:
            outcomes.append(outcome)
            _report(outcome, len(outcomes), last - first + 1)
    failed = [outcome for outcome in outcomes if outcome.failures]
    for outcome in failed[:SHRUNK_MAX]:
        _show_shrunk(outcome, trace=options.shrink)
    if failed:
        print(f"failed seeds: {' '.join(str(outcome.seed) for outcome in failed)}")
    print(json.dumps(_figures(outcomes, time.perf_counter() - begun)), flush=True)
    return 1 if failed else 0


def _figures(outcomes: list[Outcome], seconds: float) -> dict[str, object]:
    protocol = sum(outcome.kind == "protocol" for outcome in outcomes)
    return {
        "seeds": len(outcomes),
        "failed": sum(bool(outcome.failures) for outcome in outcomes),
        "protocol_seeds": protocol,
        "cluster_seeds": len(outcomes) - protocol,
        "seconds": round(seconds, 3),
        "virtual_seconds": round(sum(outcome.virtual_seconds for outcome in outcomes), 3),
        "trace_hash": combine([outcome.trace_hash for outcome in outcomes]),
        "seeds_per_second": round(len(outcomes) / seconds, 2),
    }


def _seeds(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        found = int(first), int(last or first)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not A:B, for example 1:200") from error
    if found[0] > found[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: the first seed is above the last")
    return found


def _outcomes(tier: str, seeds: range, jobs: int, trace: bool, details: bool) -> Iterator[Outcome]:
    """In the order of the seeds, whoever ran them."""
    if jobs <= 1 or trace:
        for seed in seeds:
            yield run_any(tier, seed, print if trace else None, details)
        return
    # An executor, not a Pool: when a worker cannot start it says so, where a Pool would start another for ever.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=quiet) as pool:
        chunk = max(1, min(CLUSTER_EVERY, len(seeds) // jobs // 4))
        yield from pool.map(partial(run_any, tier), seeds, chunksize=chunk)


def _report(outcome: Outcome, done: int, total: int) -> None:
    if outcome.failures:
        tier, seed = outcome.tier, outcome.seed
        options = protocol_options.draw(seed) if tier == "protocol" else drawn_for(tier, seed)
        print(f"seed {outcome.seed} ({outcome.kind}) FAILED after {outcome.virtual_seconds:.3f} virtual s:")
        for failure in outcome.failures[:5]:
            print(f"    {failure[:1000]}")
        if len(outcome.failures) > 5:
            print(f"    … and {len(outcome.failures) - 5} more")
        print(f"    options: {options.describe()}")
        print(f"    replay: python -m tests.simulation --seeds {outcome.seed}:{outcome.seed} --tier {tier} --trace",
              flush=True)  # fmt: skip
    every = 25 if total <= 500 else 500
    if sys.stderr.isatty():
        end = "\n" if done == total else "\r"
        print(f"{done}/{total} seeds", end=end, file=sys.stderr, flush=True)
    elif done % every == 0 or done == total:
        print(f"{done}/{total} seeds", flush=True)


def _show_shrunk(outcome: Outcome, *, trace: bool) -> None:
    seed = outcome.seed
    if outcome.tier == "protocol":
        found = shrink_protocol(seed)
        if found is not None:
            print(f"seed {seed}", *found.lines(), sep="\n    ", flush=True)
            if trace:
                run_protocol(seed, options=found.options, only=found.only, show=print)
        return
    shrunk = shrink_cluster(seed, drawn_for(outcome.tier, seed))
    if shrunk is not None:
        print(f"seed {seed}", *shrunk.lines(), sep="\n    ", flush=True)
        if trace:
            run_seed(seed, change=lambda _: shrunk.options, only=shrunk.only, show=print)


if __name__ == "__main__":
    sys.exit(main())
