"""python -m benchmarks.peers: Pulsar, Kafka and this broker in turns; a table of ratios, ours / the peer's.

In each round each side has a turn; before it all written pages go to the disk and the machine rests. Every server
syncs before it acknowledges. Maven brings Pulsar and Kafka, and `pip install '.[peers]'` their clients for Python; a
peer that cannot run is named with the reason, and the rest runs.

Example: python -m benchmarks.peers --rows produce,latency --rounds 3 --json peers.json --plot peers.svg
         python -m benchmarks.peers --json peers.json --table peers.md       all rows; takes about an hour
         python -m benchmarks.peers --cores 1 --rounds 2 --json slow.json    on half of a machine of two cores
         python -m benchmarks.peers --rows "" --json peers.json --plot peers.svg   the picture of what is there

Exit codes: 0, all sides of all rows were measured; 1, one was not, and standard error says which and why; 2, a wrong
option. A run that is interrupted has its rows until then in the file of --json.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from ..harness import progress
from . import table, turns
from .maven import Missing
from .plot import as_plot
from .rows import OURS, ROWS, Plan
from .servers import servers
from .slow import slow_down


def _why(error: Exception) -> str:
    """For a table that others read: of a program its name, and not where it is on this machine."""
    if isinstance(error, subprocess.CalledProcessError):
        return f"{Path(error.cmd[0]).name} ended with {error.returncode}"
    return f"{type(error).__name__}: {error}"


def measure(name: str, plan: Plan) -> table.Record:
    """One row, with servers and processes of its own."""
    row, missing = ROWS[name], dict[str, str]()
    progress(f"{name}: {row.title}")
    opened: dict[str, turns.Load] = {}
    failed: dict[str, str] = {}
    with servers() as running:
        for side in row.sides:
            try:
                opened[side.name] = side.open(running, plan)
            except Missing as error:
                missing[side.name] = str(error)
                progress(f"  {side.name} is missing: {error}")
            except Exception as error:
                failed[side.name] = _why(error)
                progress(f"  {side.name} did not start: {failed[side.name]}")
        taken = turns.Turns()
        if OURS in opened and len(opened) > 1:
            quiet = lambda: turns.rest(plan.pause_s)
            taken = turns.take(opened, rounds=plan.rounds, seconds=plan.seconds, quiet=quiet)
    taken.failed |= failed
    return table.record(name, plan, taken, missing)


def _rows(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    names = list(ROWS) if value == "all" else [each for each in value.split(",") if each]
    if unknown := [each for each in names if each not in ROWS]:
        raise click.BadParameter(f"{', '.join(unknown)}: no such row; there are {', '.join(ROWS)}")
    return names


def _help() -> str:
    names = "\n".join(
        f"  {name:<22} {each.title}; {', '.join(side.name for side in each.sides[1:])}" for name, each in ROWS.items()
    )
    return "\n\n".join(f"\b\n{part}" for part in (*(__doc__ or "").strip().split("\n\n"), f"Rows:\n{names}"))


@click.command(help=_help(), context_settings={"max_content_width": 120})
@click.option("--rows", callback=_rows, default="all", metavar="NAME,…", help='These alone; "": none is measured.')
@click.option("--rounds", type=click.IntRange(1), default=5, help="Turns of each side; ratios are medians of them (5).")
@click.option("--seconds", type=click.FloatRange(0.1), default=10.0, help="Of a turn (10); by pulsar-perf tens.")
@click.option("--pause", type=click.FloatRange(0), default=3.0, help="Seconds before each turn, after a sync (3).")
@click.option(
    "--cores", type=click.FloatRange(0.1), default=None,
    help="What servers and clients together get of the processors; needs root and cgroups (all).",
)
@click.option("--messages", type=click.IntRange(64), default=2_000_000, help="Of a backlog (2,000,000).")
@click.option("--spark-rows", type=click.IntRange(1000), default=1_000_000, help="Of Spark (1,000,000).")
@click.option(
    "--json", "as_json", type=click.Path(dir_okay=False, path_type=Path),
    help="File of all turns, written after each row; rows of earlier runs stay in it.",
)
@click.option("--table", "as_table", type=click.Path(dir_okay=False, path_type=Path), help="File of the table.")
@click.option("--plot", type=click.Path(dir_okay=False), help="File of the picture, .svg or .png.")
def main(
    rows: list[str], rounds: int, seconds: float, pause: float, cores: float | None, messages: int, spark_rows: int,
    as_json: Path | None, as_table: Path | None, plot: str | None,
) -> None:  # fmt: skip
    plan = Plan(rounds, seconds, pause, messages, spark_rows, cores)
    if cores is not None:
        try:
            slow_down(cores)
        except OSError as error:
            raise click.UsageError(f"--cores: the kernel does not let this user limit processes: {error}") from error
    try:
        records = table.stored(as_json) if as_json else []
    except ValueError as error:
        raise click.UsageError(f"--json: {error}") from error
    measured = []
    for name in rows:
        measured.append(measure(name, plan))
        records = table.merged(records, measured)
        if as_json:
            as_json.write_text(table.as_json(records))
    if as_table:
        as_table.write_text(table.as_table(records) + "\n")
    if plot:
        as_plot(list(table.ratios(records)), plot)
    print(table.as_table(records))
    sys.exit(any(each["missing"] or each["failed"] for each in measured))


if __name__ == "__main__":
    main()
