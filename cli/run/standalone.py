"""`magnetar standalone`: metadata, bookies and broker on one folder, in one process and one event loop.

    DIR/lock               locked while a process uses the folder
    DIR/metadata.sqlite    the metadata tree
    DIR/bookie-1 …         one folder per bookie

With one bookie a message is synced once before it is acknowledged (E/Qw/Qa 1/1/1), with three on two of three (3/3/2):
on one machine that rehearses a cluster and makes nothing safer. The number of bookies may grow between starts and never
shrink: ledgers are on all of them. With `--processes N` there are several processes: standalone_processes.py.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .memory import STANDALONE_BYTES, planned
from .processes import processes_option
from .servers import (
    SECURITY,
    asks_and_encrypts,
    check_reach,
    door_facts,
    metrics_endpoint,
    scheme,
    secured,
    serve,
    serve_for_ever,
    serve_metrics,
    server_options,
)
from .standalone_parts import Given, bookie_settings, broker_settings, count_bookies, start_bookie
from .voice import ready

if TYPE_CHECKING:
    from ...runtime.network import Endpoint
    from ...runtime.world import World

DATA = "magnetar-data"
PORT = 7650
PULSAR_PORTS = (6650, 6651)
HTTP_PORTS = (8080, 8443)
"""Ports in clear, and with TLS."""


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
@processes_option("One for the storage, the others brokers that share the topics; 1: everything in one process.")
@SECURITY
@server_options("warning", compat=["bookkeeper", "pulsar", "both"])
def standalone(
    data: str, host: str, port: int | None, pulsar_port: int | None, http_port: int | None, bookies: int | None,
    processes_: int, security: str | None, config: str | None, memory_bytes: int | None, metrics: str | None,
    insecure: bool, metrics_compat: str, log_level: str, log_format: str,
) -> int:  # fmt: skip
    """Run everything here; prints one line, `ready magnetar://HOST:PORT …`, when it serves.

    Without --data everything is stored in ./magnetar-data. Without --port it serves gRPC on 7650, and if they are
    free Pulsar's protocol on 6650 (with TLS 6651) and REST on 8080 (8443); the line names them.

    \b
    Examples:
      magnetar standalone
      magnetar standalone --data /var/lib/magnetar --port 0 --bookies 3
      magnetar standalone --bookies 3 --processes 2
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
    if processes_ > 1:
        from .standalone_processes import several

        return several(given, processes_, log_level, log_format)
    return serve(lambda world: run(world, given), log_level, log_format)


async def run(world: World, given: Given) -> None:
    from ...bookie.node.identity import lock_directory

    world.files.make_directories(str(given.folder))
    with contextlib.closing(lock_directory(world.files, str(given.folder))):
        await _serve(world, given)


async def _serve(world: World, given: Given) -> None:
    from ...broker.server import Broker
    from ...metadata.sqlite import SqliteStore
    from ...runtime.lifecycle import Parts
    from ...runtime.peer.inside import InsideNetwork
    from ..metrics.samples import Measured, pulsars_names, second_names

    folder, security = given.folder, given.security
    world = replace(world, network=InsideNetwork(world.network, world.clock))  # the broker and its bookies are here
    count = count_bookies(folder, given.bookies)
    settings, stored = broker_settings(given, count), bookie_settings(given, 1)
    most = STANDALONE_BYTES * (1 + count)
    plan = planned(given.config, given.memory_bytes, broker=settings, bookie=stored, bookies=count, most=most)
    settings = plan.applied(settings, "broker")
    async with Parts(world.clock) as parts:
        opening = SqliteStore.open(world, str(folder / "metadata.sqlite"))
        store = await parts.start("metadata", opening, SqliteStore.close)
        numbers = range(1, count + 1)
        started = [await start_bookie(parts, world, given, number, plan, store.session()) for number in numbers]
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
    """Returns where a protocol is served. None: its default port is taken, which is said."""
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
