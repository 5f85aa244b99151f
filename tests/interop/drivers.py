"""Drivers: one process of each client that carries out commands. Each line of stdin and stdout is one JSON object.

    {"do": "produce", "topic", "messages": [{"text", "times"?, "key"?, "ordering_key"?, "properties"?, "event_time"?,
        "deliver_after_ms"?}], "batching"?, "chunking"?, "compression"?, "keys"?, "schema"?}            -> {"sent"}
    {"do": "consume", "topic", "subscription", "type", "count", "keys"?, "schema"?, "left"?}            -> {"messages"}
        "left": batch indexes that are not acknowledged; the SDK alone
    {"do": "dead_letter", "topic", "subscription", "type", "letters", "count"}   each is refused twice  -> {"letters"}
    {"do": "open", "topic", "subscription", "type", "by_index"?}   a producer and a consumer, stay open  -> {}
        "by_index": it acknowledges by index, and says so
    {"do": "send", "texts"}   with those                                                                -> {}
    {"do": "receive", "texts"}   until they came                                                        -> {"came"}
    {"do": "examples", "topic"}   what the client's documentation shows                                 -> {"ran"}
    {"do": "administer", "url"}   Go alone: its admin client over HTTP                                   -> what it saw

`keys`: paths of the public and the private key. `schema`: JSON or AVRO, of a record Order with a: int, the length of
the text, and b: the text; or STRING. A message comes as {"text" (of 1000 bytes and more their SHA-256), "key",
"ordering_key", "properties", "event_time", "batch_index", "age_ms" (since it was published)}. A command that fails
answers {"error"}. A client's process starts once, as most of a command's time would be its start.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from magnetar.cli.common.processes import add_parent_death_signal

HERE = Path(__file__).parent
BUILD_TIMEOUT_S = 600.0
LONG = 1000
"""Texts of so many bytes and more are told as their SHA-256."""

Answer = dict[str, Any]


class Unavailable(Exception):
    """A client cannot run here; the text says what is absent."""


class Failed(Exception):
    """A driver answered with an error, or ended."""


class Driver:
    """One client's process. `ask` and `answer` are apart so that several clients work at the same time."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name = name
        self._errors = folder / f"{name}.stderr"
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                add_parent_death_signal(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def ask(self, do: str, **command: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code, errors = self._process.wait(), self._errors.read_text(errors="replace")
            raise Failed(f"{self.name} ended: {code}\n{errors[-4000:]}")
        answer: Answer = json.loads(line)
        return answer

    def run(self, do: str, **command: object) -> Answer:
        """The answer; Failed when it is an error."""
        self.ask(do, **command)
        answer = self.answer()
        if "error" in answer:
            raise Failed(f"{self.name}: {answer['error']}")
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def find_tool(*places: str) -> str:
    found = next((path for place in places if (path := shutil.which(place))), None)
    if found is None:
        raise Unavailable(f"{places[0]} is not installed")
    return found


def fetch(command: list[str]) -> None:
    """Runs what needs a registry; Unavailable when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, cwd=HERE)
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command[:2])} failed: {(done.stdout + done.stderr)[-2000:]}")


def build(command: list[str]) -> None:
    """Compiles what was fetched; Failed when it cannot be compiled."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False, cwd=HERE)
    if done.returncode != 0:
        raise Failed(f"{' '.join(command[:2])} failed: {(done.stdout + done.stderr)[-2000:]}")


def build_python(module: str) -> list[str]:
    return [sys.executable, str(HERE / "python" / "driver.py"), module]


LOGGER = "org.slf4j.simpleLogger"


def build_java(folder: Path, log_level: str = "off") -> list[str]:
    """Maven brings the client; the classes are made anew. It logs to standard error."""
    maven, compiler, java = find_tool("mvn"), find_tool("javac"), find_tool("java")
    copied = [maven, "-q", "-B", "-f", "java/pom.xml", "dependency:copy-dependencies"]
    fetch([*copied, f"-DoutputDirectory={folder / 'lib'}"])
    sources = [str(path) for path in sorted((HERE / "java" / "src").glob("*.java"))]
    jars = f"{folder / 'lib'}/*"
    build([compiler, "-cp", jars, "-d", str(folder / "out"), *sources])
    given = {"defaultLogLevel": log_level, "showDateTime": "true", "dateTimeFormat": "HH:mm:ss.SSS"}
    logs = [f"-D{LOGGER}.{name}={value}" for name, value in given.items()]
    small = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    return [java, *small, *logs, "-cp", f"{jars}:{folder / 'out'}"]


def build_go(folder: Path) -> list[str]:
    """Go's proxy brings the client, and Go's cache keeps what was compiled."""
    program = folder / "go-driver"
    go = find_tool("go", "/usr/local/go/bin/go")
    fetch([go, "-C", "go", "mod", "download"])
    build([go, "build", "-C", "go", "-o", str(program), "."])
    return [str(program)]


BUILDS: dict[str, Callable[[Path], list[str]]] = {
    "sdk": lambda folder: build_python("magnetar"),
    "python": lambda folder: build_python("pulsar"),
    "java": lambda folder: [*build_java(folder), "Driver"],
    "go": build_go,
}
"""Each client's name, and what makes the command of its driver; its last argument is the service URL."""
