"""`magnetar standalone`: metadata, bookies and broker in one process and one event loop, on one folder.

    DIR/lock               locked while a process uses the folder
    DIR/metadata.sqlite    the metadata tree
    DIR/bookie-1 …         one folder per bookie

With one bookie a message is synced once before it is acknowledged (E/Qw/Qa 1/1/1), with three on two of three (3/3/2):
on one machine that rehearses a cluster and makes nothing safer. The number of bookies may grow between starts and never
shrink: ledgers are on all of them.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from .memory import STANDALONE_BYTES, planned
from .servers import (
    SECURITY,
    asks_and_encrypts,
    check_reach,
    door_facts,
    metrics_endpoint,
    ready,
    scheme,
    secured,
    serve,
    serve_for_ever,
    serve_metrics,
    server_options,
)

if TYPE_CHECKING:
    from ...bookie.server import Bookie, BookieConfig
    from ...metadata.sqlite import SqliteStore
    from ...runtime.lifecycle import Parts
    from ...runtime.memory.shares import Plan
    from ...runtime.network import Endpoint
    from ...runtime.world import World

DATA = "magnetar-data"
CLUSTER = "standalone"
"""As Pulsar's standalone calls it, and set-up scripts."""
PORT = 7650
PULSAR_PORTS = (6650, 6651)
HTTP_PORTS = (8080, 8443)
"""In clear, and with TLS."""


@click.command()
@click.option(
    "--data", type=click.Path(file_okay=False), envvar="MAGNETAR_DATA", default=DATA, show_default=True, help="Folder."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Of gRPC; 0: a free one (default 7650).")
@click.option(
    "--pulsar-port", type=click.IntRange(0, 65535), default=None,
    help="Of Pulsar's protocol; 0: a free one (default 6650, with TLS 6651; with --port a free one).",
)  # fmt: skip
@click.option(
    "--http-port", type=click.IntRange(0, 65535), default=None,
    help="Of REST administration; 0: a free one (default 8080, with TLS 8443; with --port a free one).",
)  # fmt: skip
@click.option(
    "--bookies", type=click.IntRange(1, 16), default=None, help="How many (default 1, or as many as there are)."
)
@SECURITY
@server_options("warning", compat=["bookkeeper", "pulsar", "both"])
def standalone(
    data: str, host: str, port: int | None, pulsar_port: int | None, http_port: int | None, bookies: int | None,
    security: str | None, config: str | None, memory_bytes: int | None, metrics: str | None, insecure: bool,
    metrics_compat: str, log_level: str, log_format: str,
) -> int:  # fmt: skip
    """Run everything in one process; prints one line, `ready magnetar://HOST:PORT …`, when it serves.

    Without --data everything is stored in ./magnetar-data. Without --port it serves gRPC on 7650, and if they are
    free Pulsar's protocol on 6650 (with TLS 6651) and REST on 8080 (8443); the line names them.

    \b
    Examples:
      magnetar standalone
      magnetar standalone --data /var/lib/magnetar --port 0 --bookies 3
    """
    from ...runtime.network import Endpoint

    scraped = metrics_endpoint(metrics)
    where = Endpoint(host, PORT if port is None else port)
    warning = check_reach(insecure, host=None if asks_and_encrypts(security) else where, metrics=scraped)
    encrypted = asks_and_encrypts(security)
    pulsar = _door(host, port, pulsar_port, PULSAR_PORTS[encrypted], "Pulsar's protocol")
    http = _door(host, port, http_port, HTTP_PORTS[encrypted], "HTTP")
    given = Given(
        Path(data).absolute(), where, pulsar, http, bookies, config, scraped, metrics_compat, warning, security,
        memory_bytes,
    )
    return serve(lambda world: run(world, given), log_level, log_format)


class Given(NamedTuple):
    """What the command was given."""

    folder: Path
    listen: Endpoint
    pulsar: Endpoint | None = None
    http: Endpoint | None = None
    bookies: int | None = None
    config: str | None = None
    metrics: Endpoint | None = None
    compat: str = "none"
    warning: str = ""
    security: str | None = None
    memory_bytes: int | None = None


async def run(world: World, given: Given) -> None:
    from ...bookie.node.identity import lock_directory

    world.files.make_directories(str(given.folder))
    with contextlib.closing(lock_directory(world.files, str(given.folder))):
        await _serve(world, given)


async def _serve(world: World, given: Given) -> None:
    from ...broker.common.config import BrokerConfig
    from ...broker.server import Broker
    from ...metadata.sqlite import SqliteStore
    from ...runtime.config import load
    from ...runtime.lifecycle import Parts
    from ...runtime.peer.inside import InsideNetwork
    from ..metrics.samples import Measured, pulsars_names, second_names

    folder, config, security = given.folder, given.config, given.security
    world = replace(world, network=InsideNetwork(world.network, world.clock))  # the broker and its bookies are here
    count = _count(folder, given.bookies)
    copies = min(3, count)
    overrides = {
        "listen": str(given.listen), "pulsar_listen": None if given.pulsar is None else str(given.pulsar),
        "http_listen": None if given.http is None else str(given.http),
        "ensemble_size": copies, "write_quorum": copies, "ack_quorum": copies // 2 + 1,
    }  # fmt: skip
    settings = load(BrokerConfig, "broker", file=config, overrides=overrides, defaults={"cluster": CLUSTER})
    stored = _bookie_settings(folder / "bookie-1", config)
    most = STANDALONE_BYTES * (1 + count)
    plan = planned(config, given.memory_bytes, broker=settings, bookie=stored, bookies=count, most=most)
    settings = plan.applied(settings, "broker")
    async with Parts(world.clock) as parts:
        opening = SqliteStore.open(world, str(folder / "metadata.sqlite"))
        store = await parts.start("metadata", opening, SqliteStore.close)
        numbers = range(1, count + 1)
        started = [await _bookie(parts, world, store, folder / f"bookie-{each}", config, plan) for each in numbers]
        asking = secured(world, security)
        broker = await parts.start("broker", Broker.start(asking, settings, store.session()), Broker.close)
        second = second_names(given.compat, world.clock)
        named = pulsars_names(given.compat)
        measured = Measured(metadata=store, bookies=started, broker=broker, second=second, pulsar=named, memory=plan)
        broker.rest.measure = measured
        facts = {"data": folder, "bookies": count, **await serve_metrics(parts, given.metrics, measured)}
        facts |= door_facts(broker)
        ready(f"{scheme(security)}://{broker.endpoint}", **facts)
        await serve_for_ever(given.warning)


def _door(host: str, port: int | None, wanted: int | None, default: int, what: str) -> Endpoint | None:
    """Where that is served. None: its default port is taken, which is said."""
    from ...runtime.network import Endpoint

    if wanted is not None or port is not None:
        return Endpoint(host, wanted or 0)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, default))
        except OSError:
            print(f"magnetar: port {default} is taken; {what} is not served", file=sys.stderr)
            return None
    return Endpoint(host, default)


def _count(folder: Path, wanted: int | None) -> int:
    """How many bookies to start: as many as have data in the folder, or more."""
    from ...proto.errors import InvalidConfiguration

    there = len([path for path in folder.glob("bookie-*") if path.is_dir()])
    if wanted is not None and wanted < there:
        raise InvalidConfiguration(
            f"{folder} has the data of {there} bookies, and topics lie on all of them: "
            f"--bookies {there} or more, or leave it out"
        )
    return wanted or max(there, 1)


def _bookie_settings(folder: Path, config: str | None) -> BookieConfig:
    from ...bookie.server import BookieConfig
    from ...runtime.config import load

    given = {"data": str(folder), "place": folder.name, "host": "127.0.0.1", "port": 0}
    return load(BookieConfig, "bookie", file=config, overrides=given)


async def _bookie(
    parts: Parts, world: World, store: SqliteStore, folder: Path, config: str | None, plan: Plan
) -> Bookie:
    from ...bookie.server import Bookie

    settings = plan.applied(_bookie_settings(folder, config), "bookie")
    return await parts.start(folder.name, Bookie.start(world, settings, store.session()), Bookie.close)
