"""The steps of the demo, in the order of demo.py; each prints what it did and how long it took."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.clock import SystemClock
from ..common.exits import Failure
from .flights import Delays, Route, computed_from_messages

if TYPE_CHECKING:
    from rich.console import Console

    from ..common.processes import Cluster

SOURCE, SINK, PARTITIONS = "flights", "delays", 4
KILL_AT = 0.3
"""The share of the flights that is confirmed when a bookie is killed."""
DOWN_S = 1.0
"""Seconds that the bookie is down: long enough that brokers notice, short enough for a demo."""
SILENCE_MS = 10_000
"""Milliseconds without a message after which a topic is at its end, whatever number was expected."""
SPARK_TIMEOUT_S = 300.0
"""Seconds that Spark may take: it starts in 5 to 10 s and works for about as long; on a busy machine it may take
minutes."""


class Steps:
    """The demo's steps, with one console and one folder."""

    def __init__(self, console: Console, directory: Path) -> None:
        self.console, self.directory = console, directory
        self._clock = SystemClock()
        self._begin = self._clock.monotonic()

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{self._clock.monotonic() - self._begin:6.1f} s[/dim]  {text}")

    def bar(self) -> Any:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:>18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self.console)

    def make_topics(self, cluster: Cluster) -> None:
        """Makes the topics. Retention first: messages without a subscription may be deleted, and Spark begins after the
        last is sent."""
        from ...client.admin import Admin
        from ...proto.policies import Policies

        with Admin(cluster.url) as admin:
            admin.set_namespace_policies("public/default", Policies(retention_minutes=-1, retention_mib=-1))
            admin.create_topic(SOURCE, partitions=PARTITIONS)
            admin.create_topic(SINK)
        self.say(f"topics {SOURCE!r} with {PARTITIONS} partitions and {SINK!r}")

    # ------------------------------------------------------------------------------ into the topic
    def publish(self, cluster: Cluster, messages: Iterable[tuple[str, bytes]], total: int) -> None:
        """Publishes in a thread; meanwhile draws the bar, kills a bookie under load, and restarts it."""
        sender = _Sender(cluster.url, messages)
        victim = cluster.bookies[-1]
        killed_at: float | None = None
        begin = self._clock.monotonic()
        try:
            with self.bar() as bar:
                task = bar.add_task("flights → topic", total=total)
                while sender.step(0.05):
                    bar.update(task, completed=sender.confirmed)
                    if killed_at is None and sender.confirmed >= KILL_AT * total:
                        victim.kill()
                        killed_at = self._clock.monotonic()
                        self.say(f"{victim.name} killed (-9) after {sender.confirmed:,} flights")
                    elif killed_at is not None and not victim.running and self._clock.monotonic() - killed_at >= DOWN_S:
                        victim.start()
                        self.say(f"{victim.name} started again; {sender.confirmed:,} flights confirmed meanwhile")
                bar.update(task, completed=sender.confirmed)
        finally:
            sender.stop()
        if not victim.running:
            victim.start()
        victim.wait_ready()
        took = self._clock.monotonic() - begin
        self.say(
            f"{sender.confirmed:,} flights confirmed, {sender.confirmed / took:,.0f} a second, 2 synced copies each"
        )

    # ------------------------------------------------------------------------------ topic → topic
    def aggregate_in_spark(self, cluster: Cluster, total: int) -> None:
        """Runs the query in its own process group, which this step ends in any case."""
        directory = self.directory / "spark"
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "magnetar.cli.demo.flights_query", cluster.url, SOURCE, SINK, str(directory)]
        with (directory / "spark.stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, cwd=directory, text=True, start_new_session=True
            )
        watchdog = threading.Timer(SPARK_TIMEOUT_S, _end_group, (process.pid,))
        watchdog.start()
        try:
            rows = self._follow(process, total)
        finally:
            watchdog.cancel()
            _end_group(process.pid)
            process.wait()
        if process.returncode != 0 or rows != total:
            errors = (directory / "spark.stderr").read_text(errors="replace")[-2000:]
            raise Failure(f"Spark read {rows:,} of {total:,} rows and ended with {process.returncode}:\n{errors}")
        self.say(f"Spark aggregated {rows:,} rows into {SINK!r}")

    def _follow(self, process: subprocess.Popen[str], total: int) -> int:
        assert process.stdout is not None
        rows = 0
        with self.bar() as bar:
            task = bar.add_task("topic → Spark → topic", total=total)
            for line in process.stdout:
                if line.startswith("{"):
                    rows += json.loads(line)["rows"]
                    bar.update(task, completed=rows)
        process.wait()
        return rows

    def aggregate_in_python(self, cluster: Cluster, total: int) -> None:
        """Does Spark's part without Spark: a subscription over all partitions, and a row per route at the end."""
        import msgspec

        from ...client.blocking.client import Client
        from ...client.model.settings import InitialPosition

        with Client(cluster.url) as client:
            earliest = InitialPosition.Earliest
            consumer = client.subscribe(SOURCE, "python", initial_position=earliest, receiver_queue_size=10_000)
            with self.bar() as bar:
                task = bar.add_task("topic → Python", total=total)

                def payloads() -> Iterable[bytes]:
                    for at in range(1, total + 1):
                        message = consumer.receive(timeout_millis=SILENCE_MS)
                        consumer.acknowledge(message)
                        yield message.data()
                        if at % 1000 == 0 or at == total:
                            bar.update(task, completed=at)

                found = computed_from_messages(payloads())
            producer = client.create_producer(SINK)
            for row in found.values():
                producer.send(msgspec.json.encode(row), partition_key=f"{row.carrier}-{row.origin}")
        self.say(f"Python aggregated {total:,} flights into {SINK!r}")

    # ------------------------------------------------------------------------------ out of the topic
    def consume_result(self, cluster: Cluster) -> dict[Route, Delays]:
        """Returns the last row of each carrier and origin."""
        import msgspec

        from ...client.blocking.client import Client
        from ...client.model.settings import InitialPosition

        decode = msgspec.json.Decoder(Delays).decode
        found: dict[Route, Delays] = {}
        with Client(cluster.url) as client:
            consumer = client.subscribe(SINK, "demo", initial_position=InitialPosition.Earliest)
            last = consumer.get_last_message_id()
            rows = 0
            while True:
                message = consumer.receive(timeout_millis=SILENCE_MS)
                consumer.acknowledge(message)
                row = decode(message.data())
                found[Route(row.carrier, row.origin)] = row
                rows += 1
                if message.message_id() >= last:
                    break
        self.say(f"a consumer read {rows:,} rows of {SINK!r}")
        return found

    def show(self, found: dict[Route, Delays]) -> None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for column in ("carrier", "origin"):
            table.add_column(column)
        for column in ("flights", "cancelled", "mean departure delay", "mean arrival delay"):
            table.add_column(column, justify="right")
        for _, row in sorted(found.items()):
            departure = f"{row.dep_delay / row.departed:.1f} min" if row.departed else "-"
            arrival = f"{row.arr_delay / row.arrived:.1f} min" if row.arrived else "-"
            cancelled = row.flights - row.departed
            table.add_row(row.carrier, row.origin, f"{row.flights:,}", f"{cancelled:,}", departure, arrival)
        self.console.print(table)

    def compare(self, cluster: Cluster, found: dict[Route, Delays], truth: dict[Route, Delays], total: int) -> bool:
        """Compares counts and sums, row by row, and checks that the topic has each flight once."""
        stored = self._stored(cluster)
        wrong = sorted(route for route in {*found, *truth} if found.get(route) != truth.get(route))
        for route in wrong:
            self.say(f"[red]{route.carrier} {route.origin}: {found.get(route)}, pandas says {truth.get(route)}[/red]")
        if stored != total:
            self.say(f"[red]the topic holds {stored:,} messages, not {total:,}[/red]")
        if wrong or stored != total:
            return False
        minutes = sum(row.dep_delay + row.arr_delay for row in truth.values())
        flights = sum(row.flights for row in found.values())
        self.say(
            f"[green]equal to pandas[/green]: {len(found)} rows, {flights:,} flights, {minutes:,} minutes of delay; "
            f"the topic holds {stored:,} messages"
        )
        return True

    def _stored(self, cluster: Cluster) -> int:
        from ...client.admin import Admin

        with Admin(cluster.url) as admin:
            found = [admin.offsets(part) for part in admin.parts(SOURCE)]
        return sum(each.end_index - each.earliest_index for each in found)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended


class _Sender:
    """Sends in a thread of its own; the caller watches and acts meanwhile."""

    def __init__(self, url: str, messages: Iterable[tuple[str, bytes]]) -> None:
        self.confirmed = 0
        self._failures: list[object] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(url, messages), name="sender")
        self._thread.start()

    def _run(self, url: str, messages: Iterable[tuple[str, bytes]]) -> None:
        from ...client.blocking.client import Client
        from ...client.common.errors import Result

        ok = Result.Ok

        def sent(result: object, _: object) -> None:
            if result == ok:
                self.confirmed += 1
            else:
                self._failures.append(result)

        try:
            with Client(url) as client:
                producer = client.create_producer(SOURCE, batching_enabled=True, block_if_queue_full=True)
                for key, payload in messages:
                    producer.send_async(payload, sent, partition_key=key)
                    if self._stopping or self._failures:
                        break
                producer.flush()
        except Exception as error:
            self._failures.append(error)

    def step(self, wait_s: float) -> bool:
        """Waits a little; True while it sends. Raises its error."""
        self._thread.join(wait_s)
        if self._failures:
            raise Failure(f"publishing failed after {self.confirmed:,} flights: {self._failures[0]}")
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
