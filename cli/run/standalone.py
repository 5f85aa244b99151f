"""`magnetar standalone`: metadata, bookies and broker on one folder, in one process and one event loop.

    DIR/lock               locked while a process uses the folder
    DIR/metadata.sqlite    the metadata tree
    DIR/bookie-1 …         one folder per bookie

With one bookie a message is synced once before it is acknowledged (E/Qw/Qa 1/1/1), with three on two of three (3/3/2):
on one machine that rehearses a cluster and makes nothing safer. The number of bookies may grow between starts and never
shrink: ledgers are on all of them. With `--processes N` there are several processes, for the storage and as brokers
(`run_processes`).

Also in this file, below its heading: the parts of `magnetar standalone`, in one process or in several
(standalone_parts).
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from . import brokers
from . import brokers as processes
from .brokers import with_processes_option
from .metrics import announce_process_ready
from .servers import (
    SECURITY_OPTION,
    STANDALONE_MEMORY_BYTES,
    accepts_only_members,
    check_listeners,
    close_metadata,
    connect_metadata,
    is_listener_secured,
    make_authenticating_world,
    make_backup_settings,
    make_member_world,
    make_memory_plan,
    make_pulsar_ready_facts,
    make_readiness_check,
    make_registered_world,
    parse_health_endpoint,
    parse_metrics_endpoint,
    run_server,
    serve_metrics,
    serve_until_cancelled,
    start_backups,
    url_scheme,
    with_backup_options,
    with_server_options,
)

if TYPE_CHECKING:
    from ...bookie.registration import OpenMetadataSession
    from ...bookie.server import Bookie, BookieConfig
    from ...broker.common.config import BrokerConfig
    from ...metadata.backups import BackupSettings
    from ...metadata.store import MetadataStore
    from ...runtime.config import MemoryPlan
    from ...runtime.network import Endpoint, World
    from ...runtime.process import ProcessParts
    from .metrics import ServerReporter

# ---------------------------------------------------------------------------------------------- standalone_parts
# The parts of `magnetar standalone`, in one process (`run_standalone`) or in several (`run_processes`).


CLUSTER_NAME = "standalone"
"""Name of the cluster, as Pulsar's standalone and set-up scripts have it."""


class StandaloneOptions(NamedTuple):
    """The options of the command `magnetar standalone`. An endpoint that is None is not served. `bookies` None: as many
    as have data in `folder`. `warning`: text for the log while the server runs; "": none."""

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
    health: Endpoint | None = None
    backups: BackupSettings | None = None


def broker_settings(given: StandaloneOptions, bookies: int) -> BrokerConfig:
    """Returns the settings of the broker: those of the file and the environment, overridden by the options. Ledgers get
    as many copies as there are bookies, at most 3, and a majority of them must confirm. Raises InvalidConfiguration if
    a setting is invalid."""
    from ...broker.common.config import BrokerConfig
    from ...runtime.config import load_config

    copies = min(3, bookies)
    overrides = {
        "listen": str(given.listen), "pulsar_listen": None if given.pulsar is None else str(given.pulsar),
        "http_listen": None if given.http is None else str(given.http),
        "ensemble_size": copies, "write_quorum": copies, "ack_quorum": copies // 2 + 1,
    }  # fmt: skip
    return load_config(
        BrokerConfig, "broker", file=given.config, overrides=overrides, defaults={"cluster": CLUSTER_NAME}
    )


def decide_bookie_count(folder: Path, wanted: int | None) -> int:
    """Returns how many bookies to start: `wanted`, or, if that is None, the number of bookies that have data in the
    folder, at least 1. Raises InvalidConfiguration if `wanted` is less than the number of bookies with data."""
    from ...proto.errors import InvalidConfiguration

    there = len([path for path in folder.glob("bookie-*") if path.is_dir()])
    if wanted is not None and wanted < there:
        raise InvalidConfiguration(
            f"{folder} has the data of {there} bookies, and ledgers are on all of them: "
            f"--bookies {there} or more, or leave it out"
        )
    return wanted or max(there, 1)


def load_bookie_settings(given: StandaloneOptions, number: int) -> BookieConfig:
    """Returns the settings of bookie `number` (from 1), with its folder. They do not contain its share of the memory
    yet. Raises InvalidConfiguration if a setting is invalid."""
    from ...bookie.server import BookieConfig
    from ...runtime.config import load_config

    folder = given.folder / f"bookie-{number}"
    own = {"data": str(folder), "place": folder.name, "host": "127.0.0.1", "port": 0}
    return load_config(BookieConfig, "bookie", file=given.config, overrides=own)


async def start_bookie(
    parts: ProcessParts, world: World, given: StandaloneOptions, number: int, plan: MemoryPlan, store: MetadataStore,
    new_session: OpenMetadataSession | None = None,
) -> Bookie:  # fmt: skip
    """Starts bookie `number` (from 1) in its folder and returns it; it is closed with `parts`. `store`: its session
    with the metadata. `new_session` opens the next one when that is lost; None: it cannot be lost. Raises
    InvalidConfiguration if its settings are invalid, and the errors of `Bookie.start`."""
    from ...bookie.server import Bookie

    settings = plan.apply_to_config(load_bookie_settings(given, number), "bookie")
    return await parts.start(f"bookie-{number}", Bookie.start(world, settings, store, new_session), Bookie.close)


# ---------------------------------------------------------------------------------------------------- standalone


DEFAULT_DATA_FOLDER = "magnetar-data"
DEFAULT_PORT = 7650
PULSAR_PORTS = (6650, 6651)
HTTP_PORTS = (8080, 8443)
"""Ports in clear, and with TLS."""


@click.command()
@click.option(
    "--data",
    type=click.Path(file_okay=False),
    envvar="MAGNETAR_DATA",
    default=DEFAULT_DATA_FOLDER,
    show_default=True,
    help="Folder.",
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
@with_processes_option("One for the storage, the others brokers that share the topics; 1: everything in one process.")
@SECURITY_OPTION
@with_backup_options
@with_server_options("warning", compat=["bookkeeper", "pulsar", "both"])
def standalone(
    data: str, host: str, port: int | None, pulsar_port: int | None, http_port: int | None, bookies: int | None,
    processes_: int, security: str | None, backup_every: float | None, backup_keep: int, backup_folder: str | None,
    config: str | None, memory_bytes: int | None, metrics: str | None,
    health: str | None, insecure: bool, metrics_compat: str, log_level: str, log_format: str,
) -> int:  # fmt: skip
    """Run a whole cluster in one command: metadata, bookies and broker. Prints one line, `ready magnetar://HOST:PORT
    …`, when it serves.

    Without --data everything is stored in ./magnetar-data. Without --port the server listens for gRPC on 7650, and,
    where these ports are free, for Pulsar's protocol on 6650 (with TLS 6651) and for REST on 8080 (8443). The line
    names the addresses in use.

    \b
    Examples:
      magnetar standalone
      magnetar standalone --data /var/lib/magnetar --port 0 --bookies 3
      magnetar standalone --bookies 3 --processes 2
    """
    from ...runtime.network import Endpoint

    scraped = parse_metrics_endpoint(metrics)
    where = Endpoint(host, DEFAULT_PORT if port is None else port)
    warning = check_listeners(insecure, host=None if is_listener_secured(security) else where, metrics=scraped)
    encrypted = is_listener_secured(security)
    pulsar = _protocol_endpoint(host, port, pulsar_port, PULSAR_PORTS[encrypted], "Pulsar's protocol")
    http = _protocol_endpoint(host, port, http_port, HTTP_PORTS[encrypted], "HTTP")
    given = StandaloneOptions(
        Path(data).absolute(), where, pulsar, http, bookies, config, scraped, metrics_compat, warning, security,
        memory_bytes, parse_health_endpoint(health),
        make_backup_settings(backup_every, backup_keep, backup_folder, Path(data).absolute()),
    )
    if processes_ > 1:

        return run_processes(given, processes_, log_level, log_format)
    return run_server(lambda world: run_standalone(world, given), log_level, log_format, health=given.health)


async def run_standalone(world: World, given: StandaloneOptions) -> None:
    """Runs the metadata, the bookies and the broker in this process, until the call is cancelled. Raises Busy if the
    folder or a port is in use, InvalidConfiguration if the settings are invalid, OSError if the folder cannot be made,
    and the errors of `SqliteStore.open`, `Bookie.start` and `Broker.start`."""
    from ...bookie.store.identity import lock_directory

    world.files.make_directories(str(given.folder))
    with contextlib.closing(lock_directory(world.files, str(given.folder))):
        await _serve(world, given)


async def _serve(world: World, given: StandaloneOptions) -> None:
    from ...broker.server import Broker
    from ...metadata.sqlite import SqliteStore
    from ...metadata.store import adopt_cluster_format
    from ...runtime.peer.inside import InProcessNetwork
    from ...runtime.process import ProcessParts
    from .metrics import CachedMetricsPage, MeasuredParts, make_bookkeeper_metric_names, wants_pulsar_names

    folder, security = given.folder, given.security
    world = replace(world, network=InProcessNetwork(world.network, world.clock))  # the broker and its bookies are here
    count = decide_bookie_count(folder, given.bookies)
    settings, stored = broker_settings(given, count), load_bookie_settings(given, 1)
    most = STANDALONE_MEMORY_BYTES * (1 + count)
    plan = make_memory_plan(given.config, given.memory_bytes, broker=settings, bookie=stored, bookies=count, most=most)
    settings = plan.apply_to_config(settings, "broker")
    async with ProcessParts(world.clock) as parts:
        opening = SqliteStore.open(world, str(folder / "metadata.sqlite"))
        store = await parts.start("metadata", opening, SqliteStore.close)
        await adopt_cluster_format(store.new_session())
        await start_backups(parts, world, store, given.backups)
        numbers = range(1, count + 1)
        started = [await start_bookie(parts, world, given, number, plan, store.new_session()) for number in numbers]
        asking = make_authenticating_world(world, security)
        broker = await parts.start("broker", Broker.start(asking, settings, store.new_session()), Broker.close)
        second = make_bookkeeper_metric_names(given.compat, world.clock)
        named = wants_pulsar_names(given.compat)
        measured = MeasuredParts(
            metadata=store, bookies=started, broker=broker, second=second, pulsar=named, memory=plan
        )
        broker.rest.measure = broker.topic_manager.measure = page = CachedMetricsPage(measured, world.clock)
        facts = {"data": folder, "bookies": count, **await serve_metrics(parts, given.metrics, page)}
        facts |= make_pulsar_ready_facts(broker)
        announce_process_ready(f"{url_scheme(security)}://{broker.endpoint}", **facts)
        await serve_until_cancelled(given.warning, make_readiness_check(started, broker))


def _protocol_endpoint(host: str, port: int | None, wanted: int | None, default: int, what: str) -> Endpoint | None:
    """Returns the endpoint at which a protocol is served. If its default port is in use, prints that and returns
    None."""
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


# ------------------------------------------------------------------------------------------ standalone_processes
# `magnetar standalone --processes N`: the storage in some processes, brokers in the others, on one folder.
#
#     storage       the metadata, which listens on loopback, and the first bookie
#     storage-2 …   other bookies: each has a process of its own, as long as one is left for a broker
#     broker-1      the broker at the ports of the command; its page of metrics is that of all
#     broker-2 …    brokers that share what it is asked for (brokers.py), each at ports of its own
#
# So a message is stored in another process than the one that speaks with its clients; bookies come before further
# brokers because the storage of three copies costs more than the broker. The parent holds the lock of the folder, and
# the ports (brokers.py). When the storage is killed, the brokers keep their clients and wait for it; when a broker is
# killed, the others go on, and its topics are served again by the one that follows it, under the same name.


STORAGE_NAME = "storage"
SESSION_TIMEOUT_S = 10.0
"""Seconds of a broker's session: so long after the death of one that does not come back, others take its topics."""
STORAGE_WAIT_S = 60.0
"""Seconds to wait for the storage, which may have a journal to replay."""

PRELOADED_MODULES = ("bookie.server", "metadata.server", "runtime.peer.inside")
"""Modules that the storage imports besides those of a broker: in the parent."""


def run_processes(given: StandaloneOptions, count: int, log_level: str, log_format: Any) -> int:
    """Runs a standalone server that consists of `count` processes, until it ends, and returns its exit code. Raises
    Busy if the folder or a port is in use, InvalidConfiguration if the settings are invalid, UsageError if they have no
    section [members], CommandFailure if the system cannot fork processes."""
    from ...runtime.network import Endpoint

    processes.check_fork_is_possible()
    accepts_only_members(given.security)
    held = processes.lock_folder(str(given.folder))
    bookies = decide_bookie_count(given.folder, given.bookies)
    ports = processes.ReservedPorts()
    tree = ports.reserve(Endpoint("127.0.0.1", 0))
    settings = broker_settings(given, bookies)
    memory = SharedMemoryLimit(STANDALONE_MEMORY_BYTES * (1 + bookies), count)
    first = brokers.BrokerOptions(
        settings, tree, STORAGE_WAIT_S, SESSION_TIMEOUT_S, given.security, given.metrics, given.health, given.compat,
        given.warning, given.config, given.memory_bytes, *memory,
    )  # fmt: skip
    groups = assign_bookies_to_processes(bookies, count)
    mains = [partial(_storage, given, memory, tree, groups[0])]
    mains += [partial(_bookies, given, memory, tree, each) for each in groups[1:]]
    names = [STORAGE_NAME, *(f"{STORAGE_NAME}-{number}" for number in range(2, len(groups) + 1))]
    stores = [
        processes.make_process_spec(name, main, log_level, log_format) for name, main in zip(names, mains, strict=True)
    ]
    own = settings.name or CLUSTER_NAME
    serving = brokers.make_broker_specs(first, count - len(groups), own, ports, log_level, log_format)
    tiers = [each for each in (stores[:1], stores[1:], serving) if each]
    processes.preload_modules(*brokers.PRELOADED_MODULES, *PRELOADED_MODULES)

    def said(facts: dict[str, dict[str, str]]) -> tuple[str, Mapping[str, object]]:
        url, first = brokers.make_broker_ready_line(facts)
        return url, {"data": given.folder, "bookies": bookies, "processes": count, "metadata": tree, **first}

    try:
        return processes.run_process_tiers(tiers, said, log_level, log_format)
    finally:
        held.close()


def assign_bookies_to_processes(bookies: int, processes: int) -> list[list[int]]:
    """Returns for each storage process the numbers (from 1) of its bookies. The first process also runs the metadata
    service. At least one of the `processes` processes (2 or more) is left for a broker."""
    count = min(bookies, processes - 1)
    return [list(range(first, bookies + 1, count)) for first in range(1, count + 1)]


class SharedMemoryLimit(NamedTuple):
    """The memory of all `processes` processes of a standalone server, which get equal shares. If no setting limits the
    memory, all of them together may use at most `most` bytes."""

    most: int
    processes: int

    def plan(self, given: StandaloneOptions, numbers: list[int], *, metadata: bool) -> MemoryPlan:
        """Returns the memory plan for the process that runs the bookies with these `numbers`. `metadata`: whether it
        also runs the metadata service. Raises InvalidConfiguration if the memory is too small."""
        return make_memory_plan(
            given.config, given.memory_bytes, bookie=load_bookie_settings(given, numbers[0]), bookies=len(numbers),
            metadata=metadata, most=self.most, processes=self.processes,
        )  # fmt: skip


async def _storage(
    given: StandaloneOptions,
    memory: SharedMemoryLimit,
    tree: Endpoint,
    numbers: list[int],
    world: World,
    voice: ServerReporter,
) -> None:
    """Runs a storage process: the metadata service and these bookies."""
    from ...metadata.server import MetadataServer
    from ...runtime.process import ProcessParts
    from .metrics import MeasuredParts, make_bookkeeper_metric_names

    plan = memory.plan(given, numbers, metadata=True)
    async with ProcessParts(world.clock) as parts:
        starting = MetadataServer.start(
            make_member_world(world, given.security, "metadata"), tree, str(given.folder / "metadata.sqlite"),
            plan.values["metadata.client_memory_bytes"],
        )  # fmt: skip
        server = await parts.start("metadata", starting, MetadataServer.close)
        await start_backups(parts, world, server.store, given.backups)

        async def session() -> MetadataStore:
            return server.store.new_session()

        serving = await make_registered_world(parts, _inside(world), given.security, "bookie", session)
        started = [
            await start_bookie(parts, serving, given, each, plan, server.store.new_session()) for each in numbers
        ]
        second = make_bookkeeper_metric_names(given.compat, world.clock)
        voice.combine_metrics(MeasuredParts(metadata=server, bookies=started, second=second, memory=plan))
        voice.report_ready(f"metadata://{server.endpoint}")
        await serve_until_cancelled(readiness=make_readiness_check(started))


async def _bookies(
    given: StandaloneOptions,
    memory: SharedMemoryLimit,
    tree: Endpoint,
    numbers: list[int],
    world: World,
    voice: ServerReporter,
) -> None:
    """Runs a storage process with these bookies; the metadata service is in another process."""
    from ...runtime.process import ProcessParts
    from .metrics import MeasuredParts, make_bookkeeper_metric_names

    plan = memory.plan(given, numbers, metadata=False)
    member = make_member_world(world, given.security, "bookie")

    async def session() -> MetadataStore:
        return await connect_metadata(member, tree, STORAGE_WAIT_S, SESSION_TIMEOUT_S)

    async with ProcessParts(world.clock) as parts:
        serving = await make_registered_world(parts, _inside(member), given.security, "bookie", session)
        started = []
        for number in numbers:
            store = await parts.start("metadata", session(), close_metadata)
            started.append(await start_bookie(parts, serving, given, number, plan, store, session))
        voice.combine_metrics(
            MeasuredParts(bookies=started, second=make_bookkeeper_metric_names(given.compat, world.clock), memory=plan)
        )
        voice.report_ready("bookies://")
        await serve_until_cancelled(readiness=make_readiness_check(started))


def _inside(world: World) -> World:
    """Returns a world in which bookies of one process ask each other without a socket."""
    from ...runtime.peer.inside import InProcessNetwork

    return replace(world, network=InProcessNetwork(world.network, world.clock))
