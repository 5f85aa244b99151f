"""`python -m tests.chaos --minutes N [--seed S]`: faults on real processes under load, and a judge of what clients saw.

Four bookies, two brokers and the metadata service, three copies of which two are synced; every link goes through a
proxy (tests/chaos/cluster.py). About every fifteen seconds something happens to it (tests/chaos/faults.py), and after
each fault every topic has to acknowledge again before the next. Which faults follows from the seed; what the machine
does in between does not, so a seed repeats the faults and not the interleaving. At the end the history of all clients
is judged (tests/chaos/judge.py). Prints each fault, what is wrong, and a last line of JSON.

`--control` is the known-bad configuration: disks that lie about syncs, and power cuts. Something has to be lost
or refuse to start, and the exit code is 0 only when that is said.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from magnetar.cli.processes import NotReady
from tests.chaos.clients import Clients
from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import Faults
from tests.chaos.history import Disturbed
from tests.chaos.judge import Verdict, Wrong, judge

TOPICS = ("orders", "payments")
FAULT_EVERY_S = 15.0
BETWEEN = 20
"""Messages that each topic acknowledges after a fault: it serves again."""


@click.command()
@click.option("--minutes", type=click.FloatRange(0.01), default=1.0, show_default=True)
@click.option("--seed", type=int, default=None, help="Of what happens to whom (default: a new one).")
@click.option("--metadata", type=click.Choice(["sqlite", "zookeeper"]), default="sqlite", help="Which metadata store.")
@click.option("--kinds", default="", help="Only these faults, one after the other: kill,freeze,…")
@click.option("--every", default=FAULT_EVERY_S, show_default=True, help="Seconds from one fault to the next.")
@click.option("--control", is_flag=True, help="Disks that lie: something has to be wrong.")
def main(minutes: float, seed: int | None, metadata: str, kinds: str, every: float, control: bool) -> None:
    if metadata == "zookeeper":
        raise click.UsageError("--metadata zookeeper is not there yet: no process of a cluster can be told to use one")
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    chosen = "power_cut" if control else kinds
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="magnetar-chaos-") as folder:
        wanted = chosen.split(",") if chosen else []
        result = run(Path(folder), minutes * 60, random.Random(seed), wanted, every, control)
    result |= {"minutes": round((time.monotonic() - begin) / 60, 2), "seed": seed, "metadata": metadata}
    if result["failed"]:
        only = f" --kinds {kinds}" if kinds else ""
        print(f"replay: python -m tests.chaos --minutes {minutes} --seed {seed}{only}")
    print(json.dumps(result))
    sys.exit(1 - result["failed"] if control else result["failed"])


def run(
    folder: Path, seconds: float, rng: random.Random, kinds: list[str], every: float, lies: bool = False
) -> dict[str, Any]:
    with ChaosCluster(folder, lies=lies) as cluster:
        clients = Clients(cluster.url, TOPICS, rng)
        faults = Faults(cluster, rng)
        try:
            clients.start()
            stuck = _disturb(clients, faults, time.monotonic() + seconds, kinds, every)
            stuck += clients.settle() if not stuck else []
        finally:
            clients.close()
    verdict = judge(clients.note.records)
    for line in [*stuck, *filter(None, str(verdict).splitlines())]:
        print(f"WRONG: {line}", flush=True)
    return _result(faults, verdict, stuck) | {"records": len(clients.note.records)}


def _disturb(clients: Clients, faults: Faults, until: float, kinds: list[str], every: float) -> list[str]:
    stuck: list[str] = []
    while not stuck:
        stuck = [f"{topic} acknowledges nothing" for topic in clients.wait_acknowledged(BETWEEN)]
        began = time.monotonic()
        if stuck or (began >= until and faults.count >= len(kinds)):
            return stuck
        clients.note(Disturbed())
        try:
            said = faults.one(kinds[faults.count % len(kinds)] if kinds else None)
        except NotReady as error:
            return [f"after a fault: {error}"]
        clients.note(Disturbed())
        print(f"{faults.count}: {said}; {sum(clients.acknowledged.values()):,} acknowledged", flush=True)
        while time.monotonic() < min(began + every, until):
            time.sleep(0.25)
            clients.note(Disturbed())  # a lost connection may be noticed late
    return stuck


def _result(faults: Faults, verdict: Verdict, stuck: list[str]) -> dict[str, Any]:
    counted = (Wrong.DUPLICATED, Wrong.STUCK)
    others = {wrong.value: count for wrong, count in verdict.counts.items() if wrong not in counted}
    return {
        "faults": faults.count, "acknowledged": verdict.acknowledged, "lost": verdict.lost,
        "duplicated": verdict.counts[Wrong.DUPLICATED], "stuck": len(stuck) + verdict.counts[Wrong.STUCK],
        "failed": int(bool(stuck or verdict.counts)), "wrong": others, "by_kind": faults.by_kind,
        "unsynced_writes_dropped": faults.dropped, "repeated": verdict.repeated, "delivered": verdict.delivered,
    }  # fmt: skip


if __name__ == "__main__":
    main()
