"""How each command of the documents is tested. `RULES` is the whole list: a command that no rule covers fails.

| command                        | what the test does                                                              |
|--------------------------------|---------------------------------------------------------------------------------|
| `magnetar standalone …`        | starts a real server with these options on a free port and a fresh folder       |
| `magnetar migrate --from …`    | reads its options; tests/cli/migrate runs it between two servers                |
| `magnetar …`                   | runs it against that server (`MAGNETAR_URL`); inside a sentence: it exists      |
| `curl …/readyz`                | asks that server, which was started with `--health`                             |
| `curl …/metrics`               | reads the metrics of that server, which was started with `--metrics`            |
| `curl … localhost:8080/…`      | sends that request to the server; it is answered with 200 or 204                |
| `make TARGET`                  | the target exists, and `make -n` accepts the line                               |
| `pip install .`                | tests/docs/test_typing.py builds the wheel, installs it elsewhere, imports it   |
| `pip install 'magnetar[X]'`    | the extra X exists                                                              |
| `openssl …`                    | runs it in the folder                                                           |
| `python -m tests.simulation`   | runs it; a range of seeds is shrunk to its first two                            |
| `python -m tests.crashes`      | replays a state; of a run the options are read: tests/crashes is one            |
| `python -m tests.chaos`        | reads its options; tests/chaos runs it on each store                            |
| `python -m tests.balance`,     | reads its options; tests/balance/test_balance.py runs it with fewer brokers     |
| `… tests.balance.machines`     |                                                                                 |
| `python -m tests.spark.kills`  | reads its options                                                               |
| `python -m benchmarks`         | runs it with `--runs 1 --seconds 0.2 --messages 2000`; of those that differ in  |
|                                | a size or a length the first, and reads the options of the others               |
| `python -m benchmarks.peers`   | reads its options; tests/benchmarks/peers has its parts                         |
| `… pulsar-java-…`, `… --peer`, | its options are read; Maven brings what it runs, or it starts a cluster of      |
| `… rolling`, `… balance`,      | processes or many servers                                                       |
| `… status`, `… memory` …       |                                                                                 |
| `.venv/bin/pytest …`           | collects with the same arguments, or of tests/proto: some tests are found       |
| `python -m tests.docs.tables`  | it exists, `python -m tests.stubs` too; what they write is compared elsewhere   |
| `.ci/run`                      | is there, executable, and names make targets that exist                         |
| `docker compose up`, `exec` …  | cannot run here; tests/compose/test_compose.py runs what the file starts        |
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from benchmarks.__main__ import main as benchmarks
from benchmarks.peers.__main__ import main as peers
from magnetar.cli.main import root
from tests.balance.__main__ import read_options as balance
from tests.balance.machines import read_options as machines
from tests.chaos.__main__ import main as chaos
from tests.crashes.__main__ import options_of as crashes
from tests.docs.documents import ROOT, Command
from tests.spark.kills import main as kills
from tests.support.processes import Process, Processes

ADDRESS = re.compile(r"\b(?:localhost|127\.0\.0\.1):7650\b")
COMPOSE_TEST = "tests/compose/test_compose.py"
COMMAND_TIMEOUT_S = 240.0


class Place:
    """Where the commands of one document run: an empty folder, and the server that the document has started."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self._processes = folder, processes
        self._server: Process | None = None

    def is_first(self, what: str) -> bool:
        """Whether no other test of this run, in whichever worker, has asked for it."""
        workers = "PYTEST_XDIST_WORKER" in os.environ  # each has a folder of its own in that of the run
        claims = self.folder.parents[1 if workers else 0] / "claims"
        claims.mkdir(exist_ok=True)
        try:
            (claims / hashlib.sha256(what.encode()).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def start(self, *options: str) -> None:
        """Starts a standalone server; the one before it ends, as the reader would end it."""
        if self._server is not None:
            self._server.stop()
        number = len(self._processes.started) + 1
        given = list(options)
        if "--data" not in given:
            given += ["--data", f"data-{number}"]
        for option in {"--metrics", "--health"} & set(given):
            given[given.index(option) + 1] = "0"  # the reader's port may be taken here
        self._server = self._processes.start(f"standalone-{number}", "standalone", *given, "--port", "0")
        self._server.wait_ready()

    @property
    def address(self) -> str:
        if self._server is None:
            self.start()
        assert self._server is not None
        return self._server.address

    @property
    def metrics(self) -> str:
        """HOST:PORT of its metrics, as its ready line says."""
        assert self._server is not None, "no server was started"
        return self._said("metrics")

    @property
    def health(self) -> str:
        """The URL where its probes are answered."""
        return f"http://{self._said('health')}"

    @property
    def http(self) -> str:
        """The URL of its administration over HTTP."""
        assert self.address, "a server is started"
        return self._said("http")

    def _said(self, fact: str) -> str:
        assert self._server is not None
        return next(word for word in self._server.lines[0].split() if word.startswith(f"{fact}=")).partition("=")[2]

    def run(self, *words: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Runs a program of this project in the folder; its stdout. Anything but exit code 0 fails the test."""
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        environment["XDG_CONFIG_HOME"] = str(self.folder)  # its contexts are no person's
        if words[:3] == (sys.executable, "-m", "magnetar.cli.main"):
            environment["MAGNETAR_URL"] = f"magnetar://{self.address}"
        done = subprocess.run(
            words, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def python(self, text: str) -> str:
        """Runs a program text, with the address of the documents replaced by the real one."""
        placed = ADDRESS.sub(self.address, text) if ADDRESS.search(text) else text
        return self.run(sys.executable, "-c", placed, timeout_s=600)


def _exists(group: click.Group, words: list[str]) -> None:
    """Each word up to the first that is no command's: `bookies gc --plan`; `a|b` are two, `…` is any."""
    for name in words[0].split("|"):
        if name == "…" or name.startswith("-"):
            return
        found = group.get_command(click.Context(group), name)
        assert found is not None, f"{group.name} has no command {name!r}"
        if isinstance(found, click.Group) and words[1:]:
            _exists(found, words[1:])


def _magnetar(place: Place, command: Command) -> None:
    program = (sys.executable, "-m", "magnetar.cli.main")
    words = [ADDRESS.sub(place.address, word) for word in command.words[1:]] if command.runs else command.words[1:]
    if not command.runs:
        _exists(root, words)
    elif words[0] == "standalone":
        assert "--port" not in words, "the reader's port may be taken here"
        place.start(*words[1:])
    elif words[0] == "health":
        place.run(*program, *(place.health if word.startswith("http://") else word for word in words))
    else:
        said = place.run(*program, *words)
        if words[0] == "consume":
            wanted = int(words[words.index("-n") + 1]) if "-n" in words else 1
            assert len(said.splitlines()) >= wanted, f"fewer than {wanted} messages came:\n{said}"


def _migrate(place: Place, command: Command) -> None:
    """Its options are read; it is run in tests/cli/migrate, and from a real Pulsar by tests/interop/test_migrate.py."""
    migrate = root.get_command(click.Context(root), "migrate")
    assert migrate is not None
    migrate.make_context("magnetar migrate", command.words[2:])


PER_THING = tuple(
    f"magnetar_{each}_"
    for each in (
        "topic", "subscription", "transactions", "processes", "process_certificate", "process_token",
        "metadata_backup",
    )
)
"""Metrics that are there when their thing is: tests/cli/run/."""


def _curl(place: Place, command: Command) -> None:
    with urllib.request.urlopen(f"http://{place.metrics}/metrics", timeout=COMMAND_TIMEOUT_S) as reply:
        shown = reply.read().decode()
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").partition("## All metrics")[0]
    told = re.findall(r"`(magnetar_\w+?)(?:_total)?`", text)
    missing = [name for name in told if not f"{name}_".startswith(PER_THING) and name not in shown]
    assert told, "the document names no metric"
    assert not missing, f"the document names metrics that are not there: {missing}"


def _readyz(place: Place, command: Command) -> None:
    with urllib.request.urlopen(f"{place.health}/readyz", timeout=COMMAND_TIMEOUT_S) as reply:
        assert reply.read() == b"ok\n"


def _rest(place: Place, command: Command) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-X", dest="method", default="GET")
    parser.add_argument("-d", dest="body", type=str.encode)
    parser.add_argument("-H", dest="header", type=lambda text: text.split(": "))
    given = parser.parse_args(command.words[1:])
    url = given.url.replace("http://localhost:8080", place.http)
    headers = dict([given.header] if given.header else [])
    asked = urllib.request.Request(url, given.body, headers, method=given.method)
    with urllib.request.urlopen(asked, timeout=COMMAND_TIMEOUT_S) as reply:
        assert reply.status in (200, 204), reply.status


def _make(place: Place, command: Command) -> None:
    targets = [word for word in command.words[1:] if "=" not in word]
    assert targets, "which target?"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.M), f"the Makefile has no target {target}"
    subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=30)


def _pip(place: Place, command: Command) -> None:
    assert command.words[1] == "install", command
    for wanted in command.words[2:]:
        if wanted == ".":
            continue
        match = re.fullmatch(r"magnetar(?:\[(\w+)\])?", wanted)
        assert match, f"what is {wanted}?"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert match[1] is None or match[1] in project["optional-dependencies"], f"no extra {match[1]}"


def _openssl(place: Place, command: Command) -> None:
    place.run(*command.words)


def _simulation(place: Place, command: Command) -> None:
    words = [re.sub(r"^(\d+):\d+$", lambda seeds: f"{seeds[1]}:{int(seeds[1]) + 1}", word) for word in command.words]
    last = json.loads(place.run(sys.executable, *words[1:]).splitlines()[-1])
    assert last["failed"] == 0
    assert last["seeds"] == 2
    assert last["trace_hash"]


def _chaos(place: Place, command: Command) -> None:
    """Its options are read; runs on each store, and of the control, are in tests/chaos/test_chaos.py."""
    chaos.make_context("python -m tests.chaos", command.words[3:])


def _balance(place: Place, command: Command) -> None:
    """Its options are read; tests/balance/test_balance.py runs each scenario with fewer brokers."""
    balance(command.words[3:])


def _machines(place: Place, command: Command) -> None:
    """Its options are read; tests/balance/test_balance.py counts each event with fewer machines."""
    machines(command.words[3:])


def _kills(place: Place, command: Command) -> None:
    """Its options are read; tests/spark/test_exactly_once.py has its parts one by one."""
    kills.make_context("python -m tests.spark.kills", command.words[3:])


def _crashes(place: Place, command: Command) -> None:
    """A named state is replayed; of a run the options are read: tests/crashes/test_enumeration.py is such a run."""
    words = [{"NAME": "0/40/none"}.get(word, word) for word in command.words]
    if crashes(words[3:]).replay:
        place.run(sys.executable, *words[1:], timeout_s=600)


NUMBERS = r" --(seconds|runs|size|topics) \S+"
"""Options of which a rehearsal has its own, or that make no other program of a benchmark."""


def rehearse(place: Place, commands: Sequence[Command]) -> None:
    """Benchmarks, one after another in one process, which imports once. By one worker of a run, as several pages name
    some."""
    wanted = [words for words in map(_words, commands) if place.is_first(re.sub(NUMBERS, "", " ".join(words)))]
    for seconds in ("0.2", "0.9", "5"):  # a machine that is busy does nothing in so short a time
        if not wanted:
            return
        small = (*SMALL, "--seconds", seconds)
        called = [[*words, *small, *(("--topics", "200") if "--topics" in words else ())] for words in wanted]
        program = called[0] if len(called) == 1 else ["-c", _IN_TURN, json.dumps([words[2:] for words in called])]
        results = [json.loads(line) for line in place.run(sys.executable, *program, timeout_s=600).splitlines()]
        assert [result["benchmark"] for result in results] == [words[2] for words in wanted]
        wanted = [words for words, result in zip(wanted, results, strict=True) if not result["value"] > 0]
    assert not wanted, f"no figure of {wanted}"


SMALL = ("--runs", "1", "--messages", "2000", "--json")


def _words(command: Command) -> list[str]:
    """From `-m` on, when its options can be read."""
    benchmarks.make_context("python -m benchmarks", command.words[3:])
    return [word for word in command.words[1:] if word != "--json"]


def write_rehearsal(place: Place, commands: Sequence[Command]) -> Path:
    """A program that runs these benchmarks and fails where one has no figure; for those of Spark, which share a session
    with what ran in its process before."""
    program = place.folder / "rehearsal.py"
    wanted = [[*_words(each)[2:], *SMALL] for each in commands]
    program.write_text(f"WANTED = {wanted!r}\n{_REHEARSAL}", encoding="utf-8")
    return program


_REHEARSAL = """
import contextlib, io, json
from benchmarks.__main__ import main
for words in WANTED:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(words, standalone_mode=False)
    result = json.loads(said.getvalue())
    assert result["value"] > 0, result
    print(result["benchmark"], result["value"])
"""
_IN_TURN = """
import json, sys
from benchmarks.__main__ import main
for words in json.loads(sys.argv[1]):
    main(words, standalone_mode=False)
"""


def _benchmark(place: Place, command: Command) -> None:
    rehearse(place, [command])


def _long_benchmark(place: Place, command: Command) -> None:
    """Its options are read: Maven brings what it runs, or it starts a cluster of processes, or a server for each of
    many loads, which takes minutes. Moves and killed brokers and bookies are in tests/broker/cluster and tests/chaos,
    `magnetar status` of processes in tests/cli, bounds of memory and abuse with the parts that keep them."""
    benchmarks.make_context("python -m benchmarks", command.words[3:])


def _peers(place: Place, command: Command) -> None:
    """Its options are read: it starts Pulsar and Kafka. tests/benchmarks/peers has its parts one by one."""
    peers.make_context("python -m benchmarks.peers", command.words[3:])


def _pytest(place: Place, command: Command) -> None:
    """Collects: of a folder one file, of an expression alone one folder, as every worker of this run collects all."""
    first = lambda word: str(min((ROOT / word).rglob("test_*.py"))) if (ROOT / word).is_dir() else word
    words = [*map(first, command.words[1:])]
    words += [] if any("tests" in word for word in words) else ["tests/proto"]
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stdout + listed.stderr
    assert re.search(r"\.py: \d+$|::test_", listed.stdout, re.M), "no test was found"


def _written(place: Place, command: Command) -> None:
    """What it writes is compared in tests/docs/test_tables.py and tests/client/admin/test_stubs.py."""
    assert importlib.util.find_spec(command.words[2]) is not None


def _ci(place: Place, command: Command) -> None:
    script = ROOT / command.words[0]
    assert os.access(script, os.X_OK)
    for words in re.findall(r"^make (.+)$", script.read_text(encoding="utf-8"), re.M):
        targets = [each for each in words.split() if not each.startswith("--") and not each.isdigit()]
        _make(place, Command(command.line, ["make", *targets], runs=False))


def _compose(place: Place, command: Command) -> None:
    assert (ROOT / "docker-compose.yml").is_file()
    assert "def test_messages_go_through_the_cluster_of_the_file" in (ROOT / COMPOSE_TEST).read_text(encoding="utf-8")


LONG = "pulsar-java-|rolling|balance|status|bookie-killed|broker-killed|repair-disturb|memory|abuse"
RULES: tuple[tuple[str, Callable[[Place, Command], None]], ...] = (
    (r"magnetar migrate .*--from", _migrate),
    (r"magnetar \S", _magnetar),
    (r"curl http://127\.0\.0\.1:\d+/metrics$", _curl),
    (r"curl http://127\.0\.0\.1:\d+/readyz$", _readyz),
    (r"curl .*http://localhost:8080/", _rest),
    (r"make \S", _make),
    (r"pip install \S", _pip),
    (r"openssl \S", _openssl),
    (r"python -m tests\.simulation( |$)", _simulation),
    (r"python -m tests\.crashes( |$)", _crashes),
    (r"python -m tests\.chaos( |$)", _chaos),
    (r"python -m tests\.balance( |$)", _balance),
    (r"python -m tests\.balance\.machines( |$)", _machines),
    (r"python -m tests\.spark\.kills( |$)", _kills),
    (rf"python -m benchmarks ({LONG}|.*--peer)", _long_benchmark),
    (r"python -m benchmarks \S", _benchmark),
    (r"python -m benchmarks\.peers( |$)", _peers),
    (r"python -m tests\.(docs\.tables|docs\.metrics URL|stubs)$", _written),
    (r"\.venv/bin/pytest( |$)", _pytest),
    (r"\.ci/run$", _ci),
    (r"docker compose (up$|exec |run )", _compose),
)


def rule(command: Command) -> Callable[[Place, Command], None] | None:
    text = " ".join(command.words)
    return next((test for pattern, test in RULES if re.match(pattern, text)), None)


def is_rehearsed(command: Command) -> bool:
    """Whether it is a benchmark that is run, and not one of which the options are read."""
    return rule(command) is _benchmark
