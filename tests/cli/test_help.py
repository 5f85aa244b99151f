"""Help: quick, complete, with an example for every command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from magnetar.cli.lazy import LazyGroup
from magnetar.cli.main import root
from tests.support.processes import run_cli


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))


COMMANDS = list(_commands(root))


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_every_command_has_help_with_an_example(path: tuple[str, ...], command: click.Command) -> None:
    assert "Example" in (command.help or ""), f"magnetar {' '.join(path)} shows no example"
    assert "magnetar" in (command.help or "")


def test_help_imports_no_grpc_and_nothing_of_the_servers() -> None:
    code = (
        "import sys; sys.argv = ['magnetar', '--help']\n"
        "from magnetar.cli import main\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "heavy = ('grpc', 'zmq', 'rich', 'pandas', 'pyspark', 'google.protobuf', 'magnetar.broker')\n"
        "print(*[name for name in sys.modules if name.startswith(heavy)], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == ""
    assert "standalone" in done.stdout


def test_aliases_are_spelt_as_in_pulsar_admin() -> None:
    topics = root.get_command(click.Context(root), "topics")
    assert isinstance(topics, LazyGroup)
    context = click.Context(topics)
    for name in ("create-partitioned-topic", "peek-messages", "reset-cursor", "unload", "skip", "clear-backlog"):
        assert topics.get_command(context, name) is not None, name


def test_an_unknown_command_names_the_nearest_one() -> None:
    done = run_cli("topics", "lst")
    assert done.code == 2
    assert "did you mean 'list'" in done.err


def test_without_a_command_help_is_shown_and_the_code_is_usage() -> None:
    done = run_cli("topics")
    assert done.code == 2
    assert "create" in done.out + done.err
