"""python -m tests.fuzz TARGET --inputs 1000000 --seed N: runs a parser on mutated inputs; `all`: each of them.

Prints faults with their input in hexadecimal; its exit code is 1 then. A crash of the process is found by faulthandler;
the input is the one after the last progress line, of the same seed.
"""

import faulthandler
import re
import sys
from itertools import islice

import click

from .fuzzing import attempt, inputs
from .targets import TARGETS

PROGRESS = 20_000


@click.command(help=__doc__)
@click.argument("target", type=click.Choice([*TARGETS, "all"]))
@click.option("--inputs", "count", default=100_000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--faults", "faults_max", default=5, show_default=True, help="Of a target; then the next.")
def main(target: str, count: int, seed: int, faults_max: int) -> None:
    faulthandler.enable()
    failed = False
    for name in TARGETS if target == "all" else [target]:
        found: dict[str, str] = {}
        for number, data in enumerate(islice(inputs(name, seed), count)):
            fault = attempt(name, data, number)
            kind = "" if fault is None else re.sub(r"\d+", "", fault.what)[:30]
            if fault is not None and kind not in found:
                found[kind] = fault.data.hex()
                print(f"{name} input {number}: {fault.what[:200]}\n  {fault.data[:200].hex()}", flush=True)
            if len(found) >= faults_max:
                break
            if number and not number % PROGRESS:
                print(f"{name}: {number:,} inputs, {len(found)} faults", file=sys.stderr, flush=True)
        print(f"{name}: {number + 1:,} inputs, {len(found)} faults", flush=True)
        failed = failed or bool(found)
    sys.exit(failed)


if __name__ == "__main__":
    main()
