"""`python -m tests.chaos --minutes N [--seed S]`: kills by chance, as long as you like, then looks for what is lost.

A cluster of real processes under load; every few seconds one of them (a bookie, a broker or the metadata service) gets
`kill -9` and is started again. Who and when follows from the seed; what the machine does in between does not, so the
same seed repeats the kills and not the interleaving. Prints each kill, what was broken at the end, and a last line of
JSON.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from threading import Event
from typing import Any

import click

from magnetar.cli.processes import Cluster
from tests.chaos.load import Load, check

TOPICS = ("orders", "payments", "clicks")


@click.command()
@click.option("--minutes", type=click.FloatRange(0.01), default=1.0, show_default=True)
@click.option("--seed", type=int, default=None, help="Of who is killed when (default: a new one).")
@click.option("--metadata", type=click.Choice(["sqlite"]), default="sqlite", help="Which metadata store.")
def main(minutes: float, seed: int | None, metadata: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="magnetar-chaos-") as folder:
        result = _run(Path(folder), minutes * 60, random.Random(seed))
    if result["failure"]:
        print(f"FAILED: {result['failure']}\nreplay: python -m tests.chaos --minutes {minutes} --seed {seed}")
    result |= {"seed": seed, "failed": int(bool(result["failure"])), "seconds": round(time.monotonic() - begin, 1)}
    print(json.dumps(result))
    sys.exit(result["failed"])


def _run(folder: Path, seconds: float, rng: random.Random) -> dict[str, Any]:
    kills: dict[str, int] = {}
    with Cluster(folder, session_timeout_s=2.0) as cluster, Load(cluster.url, TOPICS) as load:
        failure = ""
        try:
            _kill(cluster, load, rng, time.monotonic() + seconds, kills)
            load.stop()
            check(load, cluster.url)
        except AssertionError as error:
            failure = str(error)
        return {"failure": failure, "kills": kills, "acked": load.acked}


def _kill(cluster: Cluster, load: Load, rng: random.Random, until: float, kills: dict[str, int]) -> None:
    """After each kill every topic has to go on before the next."""
    victims = [cluster.metadata, *cluster.bookies, *cluster.brokers]
    while time.monotonic() < until:
        load.wait_acked(100)
        Event().wait(rng.uniform(0.0, 2.0))
        victim = rng.choice(victims)
        victim.kill()
        Event().wait(rng.choice([0.0, 0.0, 1.0, 4.0]))
        victim.start()
        victim.wait_ready()
        kills[victim.name] = kills.get(victim.name, 0) + 1
        print(f"{victim.name} killed; {load.acked:,} messages acknowledged", flush=True)
    load.wait_acked(100)


if __name__ == "__main__":
    main()
