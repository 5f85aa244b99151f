"""`python -m tests.spark.kills --runs N [--seed S]`: a query from topic to topic, whose processes get `kill -9`.

Numbered rows go into the topic `in`; a stream writes them exactly once to `out`, through a shuffle. In each run new
rows come, the query reads them to the end, and at a random moment one process is killed: a worker of a task, the
driver, the driver just after the sink's commit (before Spark notes the batch), a broker, a bookie, or the metadata
service. What died is started again, the query too, until it ends; with another number of tasks each time. In the end a
consumer of committed messages reads `out`: each number once. The run has tested something only if some messages there
are aborted. The seed gives moments, targets and tasks; what the machine does in between is its own. Last line: JSON.

`--guarantee at-least-once` is the control: numbers may come twice, and none is missing.
"""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

import magnetar
from magnetar.cli.common.processes import Cluster, Process
from tests.layout import ROOT
from tests.spark.kill_driver import BATCH_ROWS, SINK

TARGETS = ("worker", "driver", "commit", "broker", "bookie", "metadata")
SESSION_S = 2.0
RUN_S = 300.0
"""A query that has not ended by then hangs."""
TRIES = 8
SETTLED_S = 60.0


class Driver:
    """The process with the query, and its JVM."""

    def __init__(self, url: str, checkpoint: Path, guarantee: str, log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.spark.kill_driver", url, str(checkpoint), guarantee],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
            )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.expect("ready")

    def _read(self) -> None:
        assert self._process.stdout is not None, "it is a pipe"
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("gone")

    def line(self, timeout_s: float = RUN_S) -> str:
        try:
            return self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(f"the driver says nothing for {timeout_s:g} s") from None

    def expect(self, word: str) -> None:
        found = self.line()
        assert found == word, f"the driver says {found!r}, not {word}"

    def run(self, tasks: int) -> None:
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(f"run {tasks}\n")
        self._process.stdin.flush()

    def _below(self) -> list[tuple[int, bytes]]:
        """Its processes and their command lines."""
        parents: dict[int, int] = {}
        for each in Path("/proc").glob("[0-9]*/stat"):
            try:
                parents[int(each.parent.name)] = int(each.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
        mine = [self._process.pid]
        for pid in mine:
            mine += [child for child, parent in parents.items() if parent == pid]
        found = []
        for pid in mine[1:]:
            try:
                found.append((pid, Path(f"/proc/{pid}/cmdline").read_bytes()))
            except OSError:
                continue
        return found

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def kill_worker(self, rng: random.Random) -> bool:
        workers = [pid for pid, line in self._below() if b"pyspark" in line and b"java" not in line]
        if not workers:
            return False
        os.kill(rng.choice(workers), signal.SIGKILL)
        return True

    def kill(self) -> None:
        """Workers that are busy live on for a while, as zombies of the query."""
        machines = [pid for pid, line in self._below() if b"java" in line.split(b"\0", 1)[0]]
        self._process.kill()
        for pid in machines:
            os.kill(pid, signal.SIGKILL)
        self._process.wait()


class Killing:
    def __init__(self, folder: Path, rng: random.Random, guarantee: str, rows: int) -> None:
        self._folder, self._rng, self._guarantee, self._rows = folder, rng, guarantee, rows
        self.counted: Counter[str] = Counter()
        self._number = 0
        self._driver: Driver | None = None
        self.cluster = Cluster(folder, bookies=3, brokers=2, session_timeout_s=SESSION_S)
        self.client = magnetar.Client(self.cluster.url)
        with magnetar.admin.Admin(self.cluster.url) as admin:
            for topic in ("in", "out"):
                admin.create_topic(topic, partitions=2)
        for topic in ("in", "out"):
            self.client.subscribe(topic, "keep", initial_position=magnetar.InitialPosition.Earliest).close()

    def driver(self) -> Driver:
        if self._driver is None or not self._driver.running:  # it may be killed when the query has just ended
            arguments = self.cluster.url, self._folder / "checkpoint", self._guarantee, self._folder / "driver.log"
            self._driver = Driver(*arguments)
        return self._driver

    def run(self, target: str) -> str:
        """One kill, and the query to its end. What was killed."""
        with self.client.create_producer("in", batching_enabled=True, block_if_queue_full=True) as producer:
            for number in range(self._number, self._number + self._rows):
                producer.send_async(b"%d" % number, None)
        self._number += self._rows
        before = self._committed()
        killed, tries, reason = "", 0, ""
        while True:
            driver = self.driver()
            driver.run(self._rng.randint(2, 4))
            tries += 1
            assert tries <= TRIES, f"the query does not end: {reason}"
            if not killed:
                killed = target
                self._kill(target, driver, before)  # in this thread: what a thread started dies with it
            said = driver.line()
            said = driver.line() if said == "started" else said
            if said == "done":
                return target
            reason = said
            self.counted["restarts"] += 1
            if said == "gone":
                self._driver = None

    def _committed(self) -> int:
        if self._guarantee != "exactly-once":
            return -1
        found = self.client.sink_status(SINK)
        return -1 if found is None else found.batch

    def _kill(self, target: str, driver: Driver, before: int) -> None:
        if target == "commit" and self._guarantee == "exactly-once":  # else there is none: at a random moment
            deadline = time.monotonic() + 60
            while self._committed() <= before and time.monotonic() < deadline:
                time.sleep(0.01)
            driver.kill()
            return
        time.sleep(self._rng.uniform(0.3, 5.0))
        if target in ("driver", "commit"):
            driver.kill()
        elif target == "worker":
            self.counted["no worker"] += not driver.kill_worker(self._rng)
        else:
            cluster = self.cluster
            nodes = {"broker": cluster.brokers, "bookie": cluster.bookies, "metadata": [cluster.metadata]}
            node = self._rng.choice(nodes[target])
            node.kill()
            time.sleep(self._rng.uniform(0.0, 3.0))
            _start(node)

    def judge(self) -> dict[str, Any]:
        found: Counter[int] = Counter()
        consumer = self.client.subscribe("out", "judge", initial_position=magnetar.InitialPosition.Earliest)
        while True:
            try:
                found[int(consumer.receive(5_000).data())] += 1
            except magnetar.Timeout:
                break
        missing = [number for number in range(self._number) if not found[number]]
        doubled = [number for number, count in found.items() if count > 1]
        with magnetar.admin.Admin(self.cluster.url) as admin:
            parts = admin.parts("out")
            aborted = sum(admin.offsets(part, aborted_in=(0, 1 << 40)).aborted for part in parts)

            def undecided() -> int:
                known = [admin.topic_stats(part).transactions for part in parts]
                return sum(each.open for each in known if each is not None)

            open_ = _lowest(undecided)
        return {
            "rows": self._number, "missing": len(missing), "doubled": len(doubled), "aborted": aborted, "open": open_,
        }  # fmt: skip

    def close(self) -> None:
        if self._driver is not None:
            self._driver.kill()
        self.client.close()
        self.cluster.close()


def _lowest(count: Callable[[], int]) -> int:
    deadline = time.monotonic() + SETTLED_S
    while (found := count()) and time.monotonic() < deadline:
        time.sleep(1)
    return found


def _start(node: Process) -> None:
    node.start()
    node.wait_ready()


@click.command()
@click.option("--runs", type=click.IntRange(1), default=50, show_default=True, help="One kill in each.")
@click.option("--seed", type=int, default=None, help="Of moments, targets and tasks (default: a new one).")
@click.option("--rows", type=click.IntRange(1), default=3 * BATCH_ROWS, show_default=True, help="In each run.")
@click.option("--seconds", type=float, default=None, help="Begin no run after so long.")
@click.option("--guarantee", type=click.Choice(("exactly-once", "at-least-once")), default="exactly-once")
def main(runs: int, seed: int | None, rows: int, seconds: float | None, guarantee: str) -> None:
    """Kill the processes of a query again and again, and compare its output with its input.

    Example: python -m tests.spark.kills --runs 50 --seed 1
    """
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    rng, begin, failure = random.Random(seed), time.monotonic(), ""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="magnetar-spark-kills-") as folder:
        killing = Killing(Path(folder), rng, guarantee, rows)
        try:
            for number in range(runs):
                if seconds is not None and time.monotonic() - begin > seconds:
                    break
                killed = killing.run(rng.choice(TARGETS))
                killing.counted[killed] += 1
                killing.counted["runs"] += 1
                print(f"run {number + 1}: {killed}, {killing.counted['restarts']} restarts so far", flush=True)
            result = killing.judge()
            failure = _wrong(result, guarantee)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        finally:
            killing.close()
    if failure:
        print(f"FAILED: {failure}\nreplay: python -m tests.spark.kills --runs {runs} --seed {seed} --rows {rows}")
    result |= dict(killing.counted) | {"failed": int(bool(failure)), "seed": seed}
    print(json.dumps(result | {"guarantee": guarantee, "seconds": round(time.monotonic() - begin, 1)}))
    sys.exit(int(bool(failure)))


def _wrong(result: dict[str, Any], guarantee: str) -> str:
    if result["missing"]:
        return f"{result['missing']} rows are missing"
    if guarantee == "at-least-once":
        return "" if result["doubled"] else "no row came twice: the kills test nothing"
    if result["doubled"]:
        return f"{result['doubled']} rows came twice"
    if result["open"]:
        return f"{result['open']} transactions are open"
    return "" if result["aborted"] else "no message is aborted: the kills test nothing"


if __name__ == "__main__":
    main()
