"""The figures of docs/performance.md: each scenario by each rule, as JSON lines.

Example: python -m tests.balance --brokers 1000 --bundles 100000
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from .scenarios import RULES, SCENARIOS


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options of a command line (None: of this process). Exits with a sentence if they are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.balance", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--brokers", type=int, default=100, help="brokers of the simulated cluster (100)")
    parser.add_argument("--bundles", type=int, default=10_000, help="bundles of the simulated cluster (10000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of loads, noise and faults (1)")
    parser.add_argument("--rule", choices=RULES, action="append", help="only this rule; may be given again")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of {', '.join(SCENARIOS)} (all)")
    options = parser.parse_args(words)
    if unknown := set(options.scenarios) - set(SCENARIOS):
        parser.error(f"no scenario {', '.join(sorted(unknown))}: there are {', '.join(SCENARIOS)}")
    return options


def main() -> int:
    options = read_options()
    for name in options.scenarios or SCENARIOS:
        for rule in options.rule or RULES:
            print(f"{name} by {rule} …", file=sys.stderr, flush=True)
            began = time.process_time()
            found = SCENARIOS[name](options.seed, options.brokers, options.bundles, RULES[rule]())
            found = {key: round(each, 3) for key, each in found.items()}
            asked = {"scenario": name, "rule": rule, "brokers": options.brokers, "bundles": options.bundles}
            took = {"processor_seconds": round(time.process_time() - began, 1)}
            print(json.dumps(asked | found | took), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
