"""What holds for every command: where options stand, how failures are told; closed pipes, no terminal, Ctrl-C.

The codes are those of docs/errors.md.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from magnetar.cli.common.lazy import LazyGroup
from magnetar.cli.common.processes import Cluster
from magnetar.cli.main import root
from tests.support.processes import Result, heed_sigint, run_cli, run_here
from tests.support.steps import stopwatch

pytestmark = pytest.mark.processes
Cli = Callable[..., Result]
NOWHERE = "magnetar://127.0.0.1:1"


def _leaves(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _leaves(command, (*path, name))
        else:
            yield (*path, name), command


LEAVES = dict(_leaves(root))
CONNECTED = {
    path: each for path, each in LEAVES.items()
    if any("--url" in option.opts for option in each.params)
    and path[0] not in ("outbox", "context")  # its database is asked first; it asks nobody
}  # fmt: skip
ASKING = {path: each for path, each in LEAVES.items() if any("--yes" in option.opts for option in each.params)}

VALUES = {
    "topic": "t", "namespace": "public/default", "target": "public/default", "tenant": "public", "bookie": "0" * 8,
    "broker": "broker-1", "message_id": "1:2", "ledger": "1", "peer": "b", "place": "h:/d", "rack": "/r", "ids": "1",
    "directory": "journal",
    "query": "q", "txn": "(1,1099511627776)", "half": "(1,1099511627776)",
    "name": "nightly", "group": "batch",
}  # fmt: skip
OPTIONS = {
    "file": ("-f", "-"), "classname": ("-c", "magnetar.client.model.record:Record"),
    "subscription": ("-s", "s"), "partitions": ("-p", "2"), "ledger": ("-l", "1"), "entry": ("-e", "1"),
    "moment": ("-d", "1h"), "count": ("-n", "1"), "role": ("-r", "etl"), "roles": ("-r", "etl,web"),
    "source_url": ("--from", "pulsar://127.0.0.1:1"), "topics": ("--topics", "t"),
    "actions": ("-a", "consume"), "mode": ("-m", "Prefix"), "keys": ("-k", "owner"),
    "database_url": ("-d", "sqlite:///none.db"), "setting": ("-c", "log_level"), "value": ("-v", "debug"),
}  # fmt: skip


NEEDED = {
    "skip": ("-n", "1"), "update-subscription-properties": ("--clear",), "gc": ("--plan",),
    "expire-messages": ("-t", "1h"), "expire-messages-all-subscriptions": ("-t", "1h"), "reset-cursor": ("-t", "1h"),
    "reset": ("-t", "1h"), "set-properties": ("-p", "a=b"), "update-properties": ("-p", "a=b"),
    "schedules create": ("--every", "10s"),
}  # fmt: skip
"""Of options of which one has to be given."""


def _needed(path: tuple[str, ...]) -> tuple[str, ...]:
    return NEEDED.get(" ".join(path), NEEDED.get(path[-1], ()))


def _arguments(path: tuple[str, ...]) -> list[str]:
    """The least that a command takes."""
    found: list[str] = []
    command = LEAVES[path]
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and parameter.required:
            name = parameter.name or ""
            of_group = {"topics": "t", "tenants": "public"}.get(path[0], VALUES[name])
            found.append(VALUES[name] if name == "message_id" else of_group)
        elif parameter.required:
            found += OPTIONS[parameter.name or ""]
    return found


# ---------------------------------------------------------------------------------- where options stand
@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_url_and_output_are_taken_before_and_after_the_verb(place: str, url: str) -> None:
    options, group, verb = ("--url", url, "-o", "json"), ("topics",), ("list",)
    arguments = {
        "before": (*options, *group, *verb),
        "between": (*group, *options, *verb),
        "after": (*group, *verb, *options),
    }[place]
    done = run_here(*arguments, MAGNETAR_URL=NOWHERE)
    assert done.code == 0, done.err
    assert isinstance(json.loads(done.out), list)


def test_what_stands_next_to_the_verb_wins(url: str) -> None:
    done = run_here("--url", NOWHERE, "-o", "json", "topics", "list", "--url", url, "-o", "table")
    assert done.code == 0, done.err
    assert not done.out.startswith("[")


@pytest.mark.parametrize("command", [("standalone",), ("broker",), ("bookie",), ("metadata",)])
def test_a_server_takes_no_url(command: tuple[str, ...]) -> None:
    done = run_cli("--url", NOWHERE, *command)
    assert done.code == 2
    assert "--url" in done.err


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "magnetar", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("magnetar ")


# ---------------------------------------------------------------------------------- failures
@pytest.mark.parametrize("path", CONNECTED, ids=" ".join)
def test_every_verb_says_where_nobody_listens_as_json_when_json_was_asked_for(path: tuple[str, ...]) -> None:
    asks = ("--yes",) if path in ASKING else ()
    given = (*path, *_arguments(path), *asks, "--url", NOWHERE, "-o", "json", "--timeout", "5")
    if path[-1].startswith("set-") and path[0] != "bookies":
        given = (*given, *_example_options(CONNECTED[path]))
    given = (*given, *_needed(path))
    if path == ("namespaces", "update"):
        given = (*given, "--bundles", "4") if "--bundles" in _flags(CONNECTED[path]) else (*given, "-ttl", "1m")
    done = run_here(*given, stdin='{"type": "STRING", "schema": ""}' if path[0] == "schemas" else "x\n")
    assert done.code == 1, (given, done)
    assert done.out == ""
    (line,) = done.err.splitlines()
    told = json.loads(line)
    assert told["exitCode"] == 1, given
    assert "Connection refused" in told["message"], given
    assert told["definite"] is True


def _example_options(command: click.Command) -> list[str]:
    """Those of the example in its help."""
    example = next(line for line in (command.help or "").splitlines() if "Example: " in line)
    words = example.split()
    return words[words.index(command.name or "") + 2 :]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_verb_refuses_an_unknown_option_with_code_2_as_json_too(path: tuple[str, ...]) -> None:
    done = run_here(*path, "--no-such-option", "-o", "json")
    assert done.code == 2, done
    told = json.loads(done.err)
    assert told["exitCode"] == 2
    assert told["message"]
    plain = run_here(*path, "--no-such-option")
    assert plain.code == 2
    assert "Error: " in plain.err


def test_asking_for_what_is_missing_makes_nothing(cli: Cli, cli_json: Callable[..., list[str]], url: str) -> None:
    import magnetar

    with magnetar.Client(url) as client:
        assert client.get_topic_partitions("asked-for") == ["persistent://public/default/asked-for"]
    for verb in ("stats", "lookup", "offsets", "get-partitioned-topic-metadata", "last-message-id", "bundle-range"):
        run_here("topics", verb, "asked-for", MAGNETAR_URL=url)
    assert not [name for name in cli_json("topics", "list") if "asked-for" in name]


def test_a_producer_of_a_terminated_topic_is_refused_when_it_is_made(cli: Cli, url: str) -> None:
    import magnetar

    cli("produce", "finished", "-m", "x")
    cli("topics", "terminate", "finished", "-y")
    with magnetar.Client(url) as client:
        for access in magnetar.ProducerAccessMode:
            with pytest.raises(magnetar.TopicTerminated):
                client.create_producer("finished", access_mode=access)
    assert "terminated" in cli("produce", "finished", "-m", "y", code=1).err


# ---------------------------------------------------------------------------------- asking a person
ASKED_ELSEWHERE = {
    ("metadata", "restore"), ("bookies", "forget"), ("bookies", "move"), ("bookies", "accept-metadata"),
    ("bookies", "replace-directory"), ("topics", "reset-cursor"), ("subscriptions", "reset"), ("spark", "forget"),
    ("brokers", "forget"),
}  # fmt: skip
"""They look first at what they ask about, in a folder: tests/cli/storage/test_metadata_copies.py and
test_bookie_identity.py; at a subscription: tests/cli/test_lossy.py; at a query: tests/spark/test_spark.py; or at a
broker: tests/cli/test_status.py."""
ONLY_WITH = {
    ("bookies", "gc"): ("--now", "--force"), ("ledgers", "orphans"): ("--delete", "--unexplained"),
    ("schemas", "delete"): ("--force",),
}  # fmt: skip
"""With these options alone they ask."""


@pytest.mark.parametrize("path", [each for each in ASKING if each not in ASKED_ELSEWHERE], ids=" ".join)
def test_what_asks_a_person_refuses_where_there_is_none(path: tuple[str, ...], url: str, cli_json: Cli) -> None:
    """Before it does anything: what it names does not exist, or exists and stays."""
    arguments = _arguments(path)
    if path[:1] == ("bookies",) and "--url" in _flags(ASKING[path]) and "bookie" in _names(ASKING[path]):
        arguments = [cli_json("bookies", "list")[0]["id"]]  # type: ignore[index]
    arguments = [] if path[-1] == "gc" else arguments
    given = ONLY_WITH.get(path, _needed(path))
    done = run_here(*path, *arguments, *given, stdin="", MAGNETAR_URL=url)
    assert done.code == 2, done
    assert "--yes" in done.err


def _names(command: click.Command) -> set[str]:
    return {parameter.name or "" for parameter in command.params}


def _flags(command: click.Command) -> set[str]:
    return {flag for parameter in command.params for flag in parameter.opts}


# ---------------------------------------------------------------------------------- pipes and signals
@pytest.mark.parametrize(
    "arguments",
    [
        ("topics", "list"),
        ("ledgers", "list", "-o", "json"),
        ("consume", "piped", "-s", "pipe", "-n", "1"),
        ("topics", "--help"),
    ],
    ids=" ".join,
)
def test_a_reader_that_has_enough_is_no_failure(arguments: tuple[str, ...], cli: Cli, url: str) -> None:
    cli("produce", "piped", "-m", "x" * 100)
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "magnetar", *arguments],
            stdout=write, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60,
            env={**os.environ, "MAGNETAR_URL": url},
        )  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr.decode()) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("consume", "waits", "-s", "s", "--follow"),
        ("produce", "waits"),
        ("topics", "list", "--url", "SILENT"),
    ],
    ids=" ".join,
)
def test_ctrl_c_ends_within_seconds_with_code_130_and_without_a_traceback(arguments: tuple[str, ...], url: str) -> None:
    import socket

    heed_sigint()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"magnetar://127.0.0.1:{silent.getsockname()[1]}"
        command = [each if each != "SILENT" else silent_url for each in arguments]
        process = subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "magnetar", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "MAGNETAR_URL": url},
        )  # fmt: skip
        try:
            assert process.stderr is not None
            for line in process.stderr:  # -X importtime tells when the work has begun
                if line.rstrip().endswith(" uvloop"):
                    break
            time.sleep(0.3)  # the event loop runs, and the command is in its work
            process.send_signal(signal.SIGINT)
            with stopwatch() as seconds:
                _, said = process.communicate(timeout=60)
            assert seconds() < 10
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130, said
    told = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert told == [], said


# ---------------------------------------------------------------------------------- servers
@pytest.mark.parametrize("server", ["broker", "bookie"])
def test_a_server_waits_for_the_metadata_as_long_as_it_was_told(server: str, tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "bookie")) if server == "bookie" else ()
    with stopwatch() as seconds:
        done = run_cli(server, "--metadata", "127.0.0.1:1", "--listen", "127.0.0.1:0", "--wait", "1", *data)
    assert seconds() < 10, "with the start of the interpreter, and not the 60 s of the default"
    assert done.code == 1
    assert "127.0.0.1:1" in done.err
    assert "magnetar metadata" in done.err


def test_a_broker_is_drained_until_nothing_is_left_and_gets_bundles_again(tmp_path: Path) -> None:
    """A bundle belongs to the broker that is asked first: the first topic is asked of one, all others of the other."""
    with Cluster(tmp_path, bookies=3, brokers=2) as cluster:
        urls = [f"magnetar://{broker.address}" for broker in cluster.brokers]
        for n in range(12):
            assert run_here("topics", "create", f"t{n}", "-p", "0", "--url", urls[min(n, 1)]).code == 0
            assert run_here("produce", f"t{n}", "-m", "x", "--url", urls[min(n, 1)]).code == 0
        for each in urls:
            rows = json.loads(run_here("brokers", "list", "-o", "json", "--url", each).out)
            assert sum(row["topics"] for row in rows) == 12, rows
            assert all(row["topics"] for row in rows), "each of the two has some"
        at = ("--url", urls[1])

        def listed() -> dict[str, Any]:
            return {row["endpoint"]: row for row in json.loads(run_here("brokers", "list", "-o", "json", *at).out)}

        name = listed()[cluster.brokers[0].address]["name"]
        other = listed()[cluster.brokers[1].address]["name"]
        done = run_here("brokers", "drain", name, "--wait", *at)
        assert (done.code, done.out) == (0, f"broker {name} owns nothing any more\n"), done.err
        assert "bundles and " in done.err
        row = listed()[cluster.brokers[0].address]
        assert (row["topics"], row["bundles"], row["draining"]) == (0, 0, True)
        stays = run_here("brokers", "drain", other, "--wait", "--wait-s", "0", *at)
        assert stays.code == 1
        assert f"broker {other} has " in stays.err, "there is nobody to take them"
        for each in (name, other):
            assert run_here("brokers", "undrain", each, *at).out == f"broker {each} gets bundles again\n"
        for n in range(12):
            assert run_here("consume", f"t{n}", "-s", "s", "-n", "1", *at).out == "x\n"


def test_the_groups_are_lazy_groups() -> None:
    """So that options before the verb reach it."""
    for path in LEAVES:
        group: click.Command | None = root
        for name in path[:-1]:
            assert isinstance(group, LazyGroup)
            group = group.get_command(click.Context(group), name)
        assert isinstance(group, LazyGroup)
