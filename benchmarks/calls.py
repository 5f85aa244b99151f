"""calls: Python calls and objects that one message costs the server and the client. A busy machine counts the same.

    load        one message after the other of
    fifty       fifty threads of one client, each with a topic, `send()`, all settings at their defaults (small-sends)
    lone        one producer, not batched: each send waits for its receipt
    delivered   a lone send that a consumer receives and acknowledges: less `lone`, delivery and acknowledgement
    backlog     a Shared consumer receives entries of one message and acknowledges each

*Calls* are of Python functions, of all threads (counted.py). *Objects* are among them: calls of `__init__` and of the
constructors of named tuples. What is compiled by mypyc makes neither: count on the sources, where the figures say how
many hops a message has. `lone` and `fifty` differ by what is done once for all that waits.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import counted
from .harness import Options, Run, Server, progress
from .messaging import TOPIC, payloads
from .small_sends import THREADS

WARM_UP, MESSAGES = 500, 2000
PART = 500
"""Of --messages: counted is one in so many, at most MESSAGES."""
RECEIVE_MS = 30_000
SETTLE_S = 0.1
"""Until what is grouped has left: acknowledgements, credit."""
_ANSWER_S = 10.0


class _CountedServer(Server):
    command = (str(Path(counted.__file__)),)
    has_input = True

    def turn(self, line: str) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


@contextmanager
def _counting(server: _CountedServer, client: counted.CallCount) -> Iterator[dict[str, dict[str, int]]]:
    found: dict[str, dict[str, int]] = {}
    path = Path(server.directory, "calls.json")
    path.unlink(missing_ok=True)
    server.turn("")
    client.on = True
    yield found
    client.on = False
    server.turn(str(path))
    deadline = time.monotonic() + _ANSWER_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    found["server"], found["client"] = json.loads(path.read_text()), client.take()


Load = Callable[[int], None]
"""Does so many messages."""


def _fifty(client: Any, contents: list[bytes]) -> Load:
    producers = [client.create_producer(f"small-{n}") for n in range(THREADS)]

    def one(producer: Any, messages: int) -> None:
        for number in range(messages):
            producer.send(contents[number % len(contents)])

    def load(messages: int) -> None:
        threads = [threading.Thread(target=one, args=(each, messages // THREADS)) for each in producers]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    return load


def _lone(client: Any, contents: list[bytes]) -> Load:
    producer = client.create_producer(TOPIC, batching_enabled=False)

    def load(messages: int) -> None:
        for number in range(messages):
            producer.send(contents[number % len(contents)])

    return load


def _delivered(client: Any, contents: list[bytes]) -> Load:
    consumer, producer = _consumer(client), client.create_producer(TOPIC, batching_enabled=False)

    def load(messages: int) -> None:
        for number in range(messages):
            producer.send(contents[number % len(contents)])
            consumer.acknowledge(consumer.receive(RECEIVE_MS))

    return load


def _backlog(client: Any, contents: list[bytes]) -> Load:
    _consumer(client).close()
    producer = client.create_producer(TOPIC, batching_enabled=False, block_if_queue_full=True)
    for number in range(WARM_UP + 2 * MESSAGES):  # the queue of the consumer is filled ahead
        producer.send_async(contents[number % len(contents)], None)
    producer.flush()
    consumer = _consumer(client)

    def load(messages: int) -> None:
        for _ in range(messages):
            consumer.acknowledge(consumer.receive(RECEIVE_MS))

    return load


def _consumer(client: Any) -> Any:
    import magnetar

    return client.subscribe(TOPIC, "bench", consumer_type=magnetar.ConsumerType.Shared)


LOADS: dict[str, Callable[[Any, list[bytes]], Load]] = {
    "fifty": _fifty, "lone": _lone, "delivered": _delivered, "backlog": _backlog,
}  # fmt: skip


def is_object(function: str) -> bool:
    """`function`: as counted.py names it."""
    return function.startswith("<string>:1 ") or function.endswith("__init__")


def calls(options: Options) -> Run:
    client_calls = counted.CallCount()
    client_calls.install()  # before the client's thread begins
    import magnetar

    from .harness import server

    run, messages = Run(0.0), min(MESSAGES, max(2 * THREADS, options.messages // PART))
    for kind, make in LOADS.items():
        with server(options.bookies, made=_CountedServer) as running, magnetar.Client(running.url) as client:
            load = make(client, payloads(options.size, options.seed))
            load(WARM_UP)
            time.sleep(SETTLE_S)
            with _counting(running, client_calls) as found:
                load(messages)
                time.sleep(SETTLE_S)
        run.detail[kind] = {name: _account(functions, messages) for name, functions in found.items()}
        progress(f"calls: {kind}: " + ", ".join(
            f"{name} {each['calls']} calls, {each['objects']} objects" for name, each in run.detail[kind].items()
        ))  # fmt: skip
    run.value = run.detail["fifty"]["server"]["calls"]
    print(_table(run.detail), file=sys.stderr)
    return run


def _account(functions: dict[str, int], messages: int) -> dict[str, Any]:
    objects = sum(calls for name, calls in functions.items() if is_object(name))
    return {
        "calls": round(sum(functions.values()) / messages, 1),
        "objects": round(objects / messages, 1),
        "functions": {name: round(calls / messages, 2) for name, calls in functions.items() if calls >= messages / 50},
    }


def _table(kinds: dict[str, Any]) -> str:
    """In Markdown, for docs/performance.md."""
    rows = [["a message of", "server: calls", "objects", "client: calls", "objects"], ["---"] * 5]
    for kind, found in kinds.items():
        rows.append([kind, *(str(found[who][what]) for who in ("server", "client") for what in ("calls", "objects"))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
