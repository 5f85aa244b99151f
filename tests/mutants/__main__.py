"""`python -m tests.mutants [M01 …]`: plants each defect of the catalogue into our code and hunts it.

Examples:

    python -m tests.mutants --jobs 2
    python -m tests.mutants M08 M11 --seeds-max 20000

A mutant per line: what is broken, the seeds that were needed, what fell. A mutant that stays alive says that the
simulator or its invariants are too weak. The last line is JSON: `killed` and `alive` are ids of docs/design/defects.md;
`median_seeds` is over those that seeds killed.
Exit code 1: one is alive.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import sys
import time

from tests.mutants.bank import BANK, CLUSTER, NO_COUNTERPART, PROTOCOL
from tests.mutants.hunt import Kill, hunt

SEEDS_MAX = 10_000


def main(arguments: list[str] | None = None) -> int:
    """0: all were killed; 1: one is alive; 2: wrong arguments (argparse)."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ids", nargs="*", metavar="M01", help="ids, M05 for all of M05, M05b … (all)")
    parser.add_argument("--seeds-max", type=int, default=SEEDS_MAX, metavar="N", help=f"of a mutant ({SEEDS_MAX})")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (1)")
    options = parser.parse_args(arguments)
    unknown = [id_ for id_ in options.ids if id_ not in BANK and id_ not in NO_COUNTERPART]
    if unknown:
        parser.error(f"no such mutant: {' '.join(unknown)}")
    wanted = [id_ for id_, each in BANK.items() if not options.ids or {id_, each.number} & {*options.ids}]
    begun = time.perf_counter()
    kills: list[Kill] = []
    # Each mutant gets a process of its own: what one broke must not be left for the next.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context, max_tasks_per_child=1) as pool:
        for kill in pool.map(hunt, wanted, [options.seeds_max] * len(wanted)):
            kills.append(kill)
            _report(kill)
    for id_, why in NO_COUNTERPART.items():
        if not options.ids or id_ in options.ids:
            print(f"{id_:5} no counterpart: {why}")
    figures = _figures(kills) | {"seconds": round(time.perf_counter() - begun, 1)}
    print(json.dumps(figures), flush=True)
    return 1 if figures["alive"] else 0


def _report(kill: Kill) -> None:
    mutant = BANK[kill.id]
    how = f"{kill.seeds} seeds" if mutant.tier in (PROTOCOL, CLUSTER) else mutant.target
    verdict = "killed" if kill.killed else "ALIVE "
    print(f"{kill.id:5} {verdict} {mutant.tier:8} {how:>12}  {mutant.what}", flush=True)
    print(f"      {kill.fell or 'nothing fell'}"[:300], flush=True)
    if mutant.why:
        print(f"      not by seeds: {mutant.why}", flush=True)


def _figures(kills: list[Kill]) -> dict[str, object]:
    alive = sorted(kill.id for kill in kills if not kill.killed)
    seeds = [kill.seeds for kill in kills if kill.killed and kill.seeds]
    return {
        "killed": sorted(kill.id for kill in kills if kill.killed),
        "alive": alive,
        "median_seeds": statistics.median(seeds) if seeds else 0,
        "seeds_max": max(seeds, default=0),
    }


if __name__ == "__main__":
    sys.exit(main())
