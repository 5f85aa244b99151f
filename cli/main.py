"""`magnetar …`: the table of all commands. Nothing heavy is imported before a command is known."""

from __future__ import annotations

import gc
import sys

import click

from .common.exits import run_command_line
from .common.lazy import LazyCommand, LazyGroup

ROOT_COMMANDS = {
    "standalone": LazyCommand(".run.standalone", "standalone", "Run everything in one process."),
    "metadata": LazyCommand(".run.servers", "metadata", "Run the metadata service of a cluster."),
    "bookie": LazyCommand(
        ".storage.bookie", "bookie", "Run a bookie: the storage process; or look into its directory."
    ),
    "broker": LazyCommand(".run.brokers", "broker", "Run a broker: owns topics, keeps nothing."),
    "health": LazyCommand(".check", "health", "Ask a server whether it is ready, or alive; for probes."),
    "produce": LazyCommand(".produce", "produce", "Send messages to a topic."),
    "consume": LazyCommand(".produce", "consume", "Receive messages of a topic."),
    "migrate": LazyCommand(".migrate.migrate", "migrate", "Copy topics of an Apache Pulsar cluster."),
    "outbox": LazyCommand(".outbox", "outbox", "Outbox of a database: relay its rows; list, park, revive, drop them."),
    "status": LazyCommand(".admin.cluster", "status", "The cluster on one screen, and whether somebody is needed."),
    "top": LazyCommand(".admin.cluster", "top", "Topics with most traffic, the largest backlog or the oldest message."),
    "why": LazyCommand(".admin.cluster", "why", "Why subscriptions of a topic do not get on, and what keeps its data."),
    "doctor": LazyCommand(".admin.doctor", "doctor", "Go through coded checks: what is wrong, and what helps."),
    "support-bundle": LazyCommand(
        ".admin.support_bundle", "support_bundle", "Collect what support asks for, without secrets and messages."
    ),
    "plan": LazyCommand(".bench", "plan", "What a load needs: disk, network and memory of brokers and bookies."),
    "check": LazyCommand(".check", "check", "Probes: publish and receive a message of a topic."),
    "tenants": LazyCommand(".admin.namespaces", "tenants", "Tenants: list, create, delete, stats."),
    "resourcegroups": LazyCommand(
        ".admin.namespaces", "resource_groups", "Resource groups: rates that namespaces share."
    ),
    "namespaces": LazyCommand(".admin.namespaces", "namespaces", "Namespaces: list, create, delete, stats, policies."),
    "topics": LazyCommand(".admin.topics", "topics", "Topics: list, create, delete, stats, unload, terminate, …"),
    "subscriptions": LazyCommand(
        ".admin.subscriptions", "subscriptions", "Subscriptions: list, create, delete, stats, skip, …"
    ),
    "transactions": LazyCommand(
        ".admin.transactions", "transactions", "Transactions, half messages: list, show, abort, …"
    ),
    "schedules": LazyCommand(
        ".admin.schedules", "schedules", "Schedules of topics: create, list, show, delete, pause, resume, run-now."
    ),
    "schemas": LazyCommand(".admin.schemas", "schemas", "Schemas of topics: get, upload, compatibility, delete, …"),
    "spark": LazyCommand(".admin.cluster", "spark", "Spark's streaming queries that hold data: queries, forget."),
    "brokers": LazyCommand(".admin.cluster", "brokers", "Brokers of the cluster."),
    "cluster": LazyCommand(".admin.cluster", "cluster", "The cluster: finish an upgrade."),
    "bookies": LazyCommand(".admin.cluster", "bookies", "Bookies of the cluster."),
    "ledgers": LazyCommand(".storage.ledgers", "ledgers", "Ledgers and their copies: list, show, under-replicated."),
    "repair": LazyCommand(
        ".storage.ledgers", "repair", "Auto-recovery: status, enable, disable; or run a worker alone."
    ),
    "security": LazyCommand(".security", "security", "Keys, certificates and tokens."),
    "bench": LazyCommand(".bench", "bench", "Measure a server from here: produce, consume, latency."),
    "context": LazyCommand(".context", "context", "Contexts: servers with your credentials; add, use, list, show, …"),
    "completion": LazyCommand(".context", "completion", "Completion of commands and names: bash, zsh, fish."),
    "demo": LazyCommand(".demo", "demo", "Flights through a cluster and Spark, and back."),
}

ROOT_HELP = """A durable message broker with Pulsar's model: topics, subscriptions and replicated ledgers.

\b
  magnetar standalone                           start everything here
  magnetar produce orders -m hello              send
  magnetar consume orders -s billing -n 1       receive

The server is given by --url, MAGNETAR_URL or a context ('magnetar context'), in this order (default
magnetar://127.0.0.1:7650); --url, -o, --timeout and --context may be before or after the command. With -o json or
jsonl failures are JSON too, on standard error.
Exit codes: 0 done, 1 failed, 2 usage, 3 a part is not available here, 4 not found, 5 in use,
6 not found in what was looked at, 130 interrupted.
"""


class RootGroup(LazyGroup):
    """The command group `magnetar` itself, which has all other commands and `--version`."""

    def __init__(self) -> None:
        super().__init__("magnetar", ROOT_COMMANDS, help=ROOT_HELP)
        self.context_settings = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        self.params.append(
            click.Option(
                ["--version"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=_version,
                help="Show the versions of the product, the wire protocols and the stored formats.",
            )
        )


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from ..proto.versions import format_version_text

        click.echo(format_version_text())
        ctx.exit()


root = RootGroup()


GC_IMPORT_THRESHOLDS = (200_000, 20, 50)
"""Thresholds of the collector while a command imports modules, which leave no garbage: to look for it takes 5 ms. A
server sets its own later (runtime/process.py)."""


def main() -> None:
    """Runs the command line of this process and ends the process with its exit code."""
    gc.set_threshold(*GC_IMPORT_THRESHOLDS)
    sys.exit(run_command_line(root))


if __name__ == "__main__":
    main()
