"""Help: quick, complete, with an example for every command."""

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from magnetar.cli.common.lazy import LazyGroup
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
        "heavy = ('grpc', 'zmq', 'rich', 'pandas', 'pyspark', 'google.protobuf', 'magnetar.broker',\n"
        "         'magnetar.security', 'cryptography', 'jwt', 'bcrypt')\n"
        "print(*[name for name in sys.modules if name.startswith(heavy)], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == ""
    assert "standalone" in done.stdout


TOPICS = """list list-partitioned-topics create create-partitioned-topic update-partitioned-topic delete
    delete-partitioned-topic lookup partitioned-lookup bundle-range stats stats-internal info-internal partitioned-stats
    partitioned-stats-internal get-partitioned-topic-metadata subscriptions create-subscription unsubscribe
    get-subscription-properties update-subscription-properties peek-messages examine-messages get-message-by-id
    get-message-id skip clear-backlog expire-messages expire-messages-all-subscriptions reset-cursor last-message-id
    truncate terminate partitioned-terminate unload compact compaction-status get-backlog-size trim-topic
    analyze-backlog get-properties update-properties remove-properties"""
NAMESPACES = """list create delete policies topics bundles unload clear-backlog unsubscribe
    set-auto-topic-creation get-auto-topic-creation remove-auto-topic-creation get-properties
    set-properties remove-property clear-properties"""
OF_BOTH = """retention message-ttl backlog-quota persistence publish-rate dispatch-rate subscription-dispatch-rate
    subscribe-rate deduplication delayed-delivery inactive-topic-policies compaction-threshold
    max-unacked-messages-per-consumer max-unacked-messages-per-subscription max-consumers-per-subscription
    subscription-types-enabled auto-subscription-creation"""
OF_TOPICS = "max-producers max-consumers max-subscriptions-per-topic max-message-size"
OF_NAMESPACES = """max-producers-per-topic max-consumers-per-topic max-subscriptions-per-topic
    subscription-expiration-time max-topics-per-namespace"""


@pytest.mark.parametrize(
    ("group", "verbs", "policies"),
    [("topics", TOPICS, f"{OF_BOTH} {OF_TOPICS}"), ("namespaces", NAMESPACES, f"{OF_BOTH} {OF_NAMESPACES}")],
)
def test_verbs_are_spelt_as_in_pulsar_admin(group: str, verbs: str, policies: str) -> None:
    found = root.get_command(click.Context(root), group)
    assert isinstance(found, LazyGroup)
    context = click.Context(found)
    names = [*verbs.split(), *(f"{act}-{each}" for each in policies.split() for act in ("set", "get", "remove"))]
    assert not [name for name in names if found.get_command(context, name) is None]


def test_an_unknown_command_names_the_nearest_one() -> None:
    done = run_cli("topics", "lst")
    assert done.code == 2
    assert "did you mean 'list'" in done.err


def test_without_a_command_help_is_shown_and_the_code_is_usage() -> None:
    done = run_cli("topics")
    assert done.code == 2
    assert "create" in done.out + done.err
