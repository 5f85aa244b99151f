"""`magnetar broker`: one broker, or several processes on one machine that share the topics they are asked for.

With `--processes N` each process is a broker of the cluster, with a name and ports of its own. Clients know the first
one's address; look-ups, of all protocols, lead to the process that has the topic (broker/cluster/ownership.py).

`--processes N` of `magnetar standalone`, `broker` and `bookie`: several processes as one server, on one machine.

    N is checked → the folder is locked → ports are reserved → everything is imported → the parent forks

A *reserved* port is bound here, not listened at, for as long as the server lives: the process that serves there may be
started again, and meanwhile the system gives the port to no other one, not even to a connection that a client opens.
runtime/ has the parent, and what happens when a process ends.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ..common.exits import NOT_AVAILABLE, CommandFailure, run_reporting_errors
from .metrics import ChildProcessReporter, ServerReporter, SingleProcessReporter, print_ready_line
from .servers import (
    LISTEN_HELP,
    SECURITY_OPTION,
    check_listeners,
    close_metadata,
    connect_metadata,
    is_listener_secured,
    make_authenticating_world,
    make_member_world,
    make_memory_plan,
    make_pulsar_ready_facts,
    make_readiness_check,
    make_registered_world,
    parse_endpoint,
    parse_health_endpoint,
    parse_metadata_address,
    parse_metrics_endpoint,
    run_server,
    serve_metrics,
    serve_until_cancelled,
    url_scheme,
    with_metadata_service_options,
    with_server_options,
)

if TYPE_CHECKING:
    from ...broker.common.config import BrokerConfig
    from ...metadata.session import MetadataAddress
    from ...metadata.store import MetadataStore
    from ...runtime.files import File
    from ...runtime.network import Endpoint, World
    from ...runtime.parent import ParentLink, ProcessSpec


PROCESSES_MAX = 64
"""Most processes, more than a machine has cores for; each has its own memory and connections."""
PORT_WAIT_S = 1.0
"""Seconds for the processes of a server whose parent was killed to end with it: milliseconds, on a busy machine more.
"""
T = TypeVar("T")

ProcessMain = Callable[["World", ChildProcessReporter], Any]


def with_processes_option(help: str, default: int | None = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds the option --processes (1 to PROCESSES_MAX) to a command. `help`: its line of help;
    `default` None: the command chooses the number."""
    return click.option(
        "--processes", "processes_", type=click.IntRange(1, PROCESSES_MAX), default=default, metavar="N", help=help,
        show_default=default is not None,
    )  # fmt: skip


def check_fork_is_possible() -> None:
    """Raises CommandFailure (exit code NOT_AVAILABLE) if this system cannot fork processes."""
    if not hasattr(os, "fork"):
        raise CommandFailure("--processes needs a system that forks processes: Linux or macOS", NOT_AVAILABLE)


class ReservedPorts:
    """Ports that a server reserves for its processes: the parent binds each port, and a child listens at it. They stay
    reserved until the process that made this object ends."""

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self, where: Endpoint) -> Endpoint:
        """Reserves the port of the address `where`, or a free port if the port is 0. Returns the address with the
        reserved port. Raises Busy if the port is still taken after PORT_WAIT_S seconds."""
        from ...proto.errors import Busy

        def bound() -> socket.socket:
            found = socket.socket(socket.AF_INET6 if ":" in where.host else socket.AF_INET)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                found.bind((where.host, where.port))
            except OSError as error:
                found.close()
                raise Busy(f"cannot listen on {where}: the port is taken or not ours", endpoint=where) from error
            return found

        self._held.append(_after_the_last_one(bound))
        return where._replace(port=self._held[-1].getsockname()[1])


def choose_process_address(where: Endpoint, number: int, *, forwarded: bool = False) -> Endpoint:
    """Returns the address at which process `number` (from 0) of a server listens. Process 0 listens at `where`. Another
    process listens at any free port (port 0 in the result) if `where` has port 0 or a loopback host; otherwise its port
    is the port of `where` plus `number`. `forwarded`: an advertised address leads to the process, so its port is known
    in advance on loopback too. Raises InvalidConfiguration if there is no such port."""
    from ...proto.errors import InvalidConfiguration

    if not number or not where.port:
        return where
    if where.is_loopback and not forwarded:
        return where._replace(port=0)
    if where.port + number > 65535:
        raise InvalidConfiguration(f"process {number + 1} would listen at port {where.port + number}: there is none")
    return where._replace(port=where.port + number)


def lock_folder(folder: str) -> File:
    """Locks the folder for a server: for the parent process and all its children. Returns the lock file, whose closing
    ends the lock. Raises Busy if another server still has the lock after PORT_WAIT_S seconds. Raises
    InvalidConfiguration if the folder cannot be used."""
    from ...bookie.store.identity import lock_directory
    from ...runtime.disk import SystemFiles

    return _after_the_last_one(lambda: lock_directory(SystemFiles(), folder))


def _after_the_last_one(take: Callable[[], T]) -> T:
    """Returns what `take` returns, as soon as the processes of an earlier server whose parent was killed have ended.
    Raises Busy."""
    from ...proto.errors import Busy
    from ...runtime.clock import SystemClock

    now = SystemClock().monotonic
    deadline = now() + PORT_WAIT_S
    while True:
        try:
            return take()
        except Busy:
            if now() >= deadline:
                raise
        time.sleep(0.05)


def preload_modules(*modules: str) -> None:
    """Imports modules that the child processes will use, so that the children share the memory of these modules.
    `modules` are modules of this package, relative to it; the PRELOADED_LIBRARIES are imported too. Raises ImportError
    if one is missing."""
    for name in (*PRELOADED_LIBRARIES, *(f"{__package__.partition('.')[0]}.{each}" for each in modules)):
        import_module(name)


PRELOADED_LIBRARIES = ("uvloop", "zmq", "ssl", "asyncio.runners")


def make_process_spec(
    name: str, main: ProcessMain, log_level: str, log_format: Any, *, shows: bool = False,
    health: Endpoint | None = None, drain_s: float = 0.0,
) -> ProcessSpec:  # fmt: skip
    """Returns the description of a process that runs `main(world, voice)` until it is cancelled. `shows`: the metrics
    page of this process contains the metrics of all processes. `health`: the address at which it answers probes.
    `drain_s`: by how many seconds it may exceed the usual time for its end."""
    from ...runtime.parent import ProcessSpec
    from ...runtime.schedule_core import CHILD_STOP_TIMEOUT_S

    def work(child: ParentLink) -> int:
        voice = ChildProcessReporter(child, shows=shows)
        return run_reporting_errors(
            lambda: run_server(lambda world: main(world, voice), log_level, log_format, voice, health)
        )

    return ProcessSpec(name, work, CHILD_STOP_TIMEOUT_S + drain_s)


def run_process_tiers(
    tiers: Sequence[Sequence[ProcessSpec]], said: Callable[[dict[str, dict[str, str]]], tuple[str, Mapping[str,
    object]]],
    log_level: str, log_format: Any,
) -> int:  # fmt: skip
    """Runs the processes until the server ends, and returns the exit code of the server. The processes of a tier start
    when those of the tier before serve. `said`: makes the URL and the facts of the ready line from the facts that each
    process reported; it is called when all serve. Raises InvalidConfiguration if the log format or the log level is
    unknown."""
    from ...runtime import logs
    from ...runtime.parent import ParentProcess

    def on_serve(facts: dict[str, dict[str, str]]) -> None:
        url, shown = said(facts)
        print_ready_line(url, **shown)

    logs.configure_logging(log_format, log_level, process="parent")
    return ParentProcess(tiers, on_serve).run()


class BrokerOptions(NamedTuple):
    """The command-line options of a process that runs a broker. `tree`: the address of the metadata; `wait_s`: for how
    many seconds to wait for it; `session_s`: the time-out of the session, in seconds."""

    settings: BrokerConfig
    tree: MetadataAddress
    wait_s: float
    session_s: float
    security: str | None = None
    metrics: Endpoint | None = None
    health: Endpoint | None = None  # of the first process
    compat: str = "none"
    warning: str = ""
    config: str | None = None
    memory_bytes: int | None = None
    memory_most: int | None = None  # where nothing is set
    processes: int = 1  # which have the memory together


LISTENER_OPTIONS = ("listen", "pulsar_listen", "http_listen")
PRELOADED_MODULES = ("broker.server", "metadata.remote", "runtime.config", "cli.run.metrics")
"""Modules that the processes of several brokers import: once, in the parent."""


async def run_broker(given: BrokerOptions, world: World, voice: ServerReporter) -> None:
    """Runs a broker in this process, until the call is cancelled. `voice` reports when it is ready. Raises Unavailable
    if the metadata does not answer in time, Busy if a port is taken, InvalidConfiguration if the settings are
    invalid."""
    from ...broker.server import Broker
    from ...runtime.process import STOP_TIMEOUT_S, ProcessParts
    from .metrics import CachedMetricsPage, MeasuredParts, wants_pulsar_names

    security = given.security
    plan = make_memory_plan(
        given.config, given.memory_bytes, broker=given.settings, most=given.memory_most, processes=given.processes
    )
    settings = plan.apply_to_config(given.settings, "broker")
    world = make_member_world(world, security, "broker")

    async def session() -> MetadataStore:
        return await connect_metadata(world, given.tree, given.wait_s, given.session_s)

    async with ProcessParts(world.clock) as parts:
        later: list[MetadataStore] = []

        async def next_session() -> MetadataStore:
            later.append(await session())
            return later[-1]

        async def close_sessions(first: MetadataStore) -> None:
            for each in (*reversed(later), first):
                await close_metadata(each)

        store = await parts.start("metadata", session(), close_sessions)
        serving = await make_registered_world(parts, world, security, "broker", session)
        starting = Broker.start(
            make_authenticating_world(serving, security), settings, store, next_session, time.process_time
        )
        stop_s = settings.drain_timeout_s + STOP_TIMEOUT_S  # what is not given away by then is released
        running = await parts.start("broker", starting, Broker.close, stop_timeout_s=stop_s)
        own = MeasuredParts(broker=running, pulsar=wants_pulsar_names(given.compat), memory=plan)
        page = CachedMetricsPage(voice.combine_metrics(own), world.clock)
        running.rest.measure = running.topic_manager.measure = page
        facts = await serve_metrics(parts, given.metrics, page) | make_pulsar_ready_facts(running)
        voice.report_ready(f"{url_scheme(security)}://{running.endpoint}", **facts)
        await serve_until_cancelled(given.warning, make_readiness_check(broker=running))


def make_broker_specs(
    given: BrokerOptions, count: int, base: str, ports: ReservedPorts, log_level: str, log_format: Any
) -> list[ProcessSpec]:
    """Returns the descriptions of `count` broker processes that share all their topics, so that a client may ask any of
    them. The first process has the ports, the metrics and the warning of `given`; the other processes get other ports.
    Raises Busy if a port is taken, InvalidConfiguration if the settings do not go with several processes."""
    found = []
    given = given._replace(
        metrics=given.metrics and ports.reserve(given.metrics), health=given.health and ports.reserve(given.health)
    )
    for number in range(count):
        asked = {each: getattr(given.settings, each) for each in LISTENER_OPTIONS}
        forwarded = given.settings.advertised is not None
        listening = {
            each: at and ports.reserve(choose_process_address(at, number, forwarded=forwarded)) for each,
            at in asked.items()
        }  # fmt: skip
        one = given._replace(settings=make_process_settings(given.settings, number, base, listening))
        if number:
            one = one._replace(metrics=None, health=None, warning="")
        name = f"broker-{number + 1}"
        found.append(make_process_spec(
            name, partial(run_broker, one), log_level, log_format, shows=not number, health=one.health,
            drain_s=one.settings.drain_timeout_s,
        ))  # fmt: skip
    return found


def make_broker_ready_line(facts: dict[str, dict[str, str]]) -> tuple[str, Mapping[str, object]]:
    """Returns the URL and the facts of the ready line for several broker processes: those of the first process, to
    which clients connect."""
    first = dict(facts["broker-1"])
    return first.pop("url"), first


def add_share_group(settings: BrokerConfig) -> BrokerConfig:
    """Returns the broker's settings with a share group, in which several brokers share their topics. Settings that have
    a share group already are returned unchanged."""
    import msgspec

    return settings if settings.share_group else msgspec.structs.replace(settings, share_group=settings.cluster)


def make_broker_name(settings: BrokerConfig) -> str:
    """Returns a name for the brokers of a server whose settings contain no name. It is made from the address at which
    clients reach the first broker. So it is the same after a restart, and an order to drain one of the brokers still
    applies. If the address means any address of the machine (0.0.0.0, ::) or has no port, the name is random."""
    known = settings.advertised or settings.listen
    port = known.port or settings.listen.port
    is_any = known.host in ("0.0.0.0", "::")
    digest = os.urandom(4) if is_any or not port else sha256(str(known._replace(port=port)).encode()).digest()
    return f"broker-{digest[:4].hex()}"


def make_process_settings(
    settings: BrokerConfig, number: int, base: str, listening: dict[str, Endpoint | None]
) -> BrokerConfig:
    """Returns the settings of process `number` (from 0) of several broker processes that share topics. `base`: the
    beginning of their names. `listening`: the addresses at which this process listens, by setting. Raises
    InvalidConfiguration if the settings name `pulsar_listeners`, which several processes cannot use."""
    import msgspec

    from ...proto.errors import InvalidConfiguration

    if settings.pulsar_listeners:
        raise InvalidConfiguration(
            "pulsar_listeners says where one broker is reached: it goes with one process", setting="pulsar_listeners"
        )
    known_as = settings.advertised
    return msgspec.structs.replace(
        settings, name=f"{base}-{number + 1}", share_group=settings.share_group or base,
        advertised=known_as and known_as._replace(port=known_as.port and known_as.port + number),
        **listening,
    )  # fmt: skip


@click.command()
@click.option("--listen", default="127.0.0.1:7650", show_default=True, help=LISTEN_HELP)
@click.option(
    "--pulsar-listen", default=None, metavar="HOST:PORT", help="Serve Pulsar's protocol there (default: nowhere)."
)
@click.option(
    "--http-listen", default=None, metavar="HOST:PORT",
    help="Serve REST administration, look-ups and metrics there (default: nowhere).",
)  # fmt: skip
@click.option("--advertise", default=None, metavar="HOST:PORT", help="Where clients reach it (default: as --listen).")
@with_metadata_service_options
@with_processes_option("Brokers that share the topics which the first is asked for, each at ports of its own.")
@click.option(
    "--name", default=None,
    help="Its name in 'magnetar brokers list' (default: a random one; of its address with --processes).",
)  # fmt: skip
@click.option(
    "--labels", default=None, metavar="NAME=VALUE,…",
    help="By these namespaces choose their brokers, as tier=gold,zone=a (default: none).",
)  # fmt: skip
@SECURITY_OPTION
@with_server_options("info", compat=["pulsar"])
def broker(
    listen: str,
    pulsar_listen: str | None,
    http_listen: str | None,
    advertise: str | None,
    metadata_: str,
    wait_s: float,
    session_s: float,
    processes_: int,
    name: str | None,
    labels: str | None,
    security: str | None,
    config: str | None,
    memory_bytes: int | None,
    metrics: str | None,
    health: str | None,
    insecure: bool,
    metrics_compat: str,
    log_level: str,
    log_format: str,
) -> int:
    """Run a broker, which serves topics to clients. It stores no data itself.

    \b
    Examples:
      magnetar broker --listen 127.0.0.1:7650 --metadata 127.0.0.1:7640
      magnetar broker --listen 0.0.0.0:7650 --advertise b1.example.org:7650 --processes 4 --security broker.toml
    """
    pulsar = None if pulsar_listen is None else parse_endpoint(pulsar_listen, "--pulsar-listen")
    http = None if http_listen is None else parse_endpoint(http_listen, "--http-listen")
    where, tree = parse_endpoint(listen, "--listen"), parse_metadata_address(metadata_, security)
    known_as = None if advertise is None else parse_endpoint(advertise, "--advertise")
    scraped = parse_metrics_endpoint(metrics)
    doors = {"listen": where, "pulsar-listen": pulsar, "http-listen": http}
    warning = check_listeners(insecure, **({} if is_listener_secured(security) else doors), metrics=scraped)

    from ...broker.common.config import BrokerConfig
    from ...runtime.config import load_config

    given = {
        "listen": str(where), "advertised": None if known_as is None else str(known_as), "name": name,
        "pulsar_listen": None if pulsar is None else str(pulsar),
        "http_listen": None if http is None else str(http), "labels": labels,
    }  # fmt: skip
    settings = add_share_group(load_config(BrokerConfig, "broker", file=config, overrides=given))
    one = BrokerOptions(
        settings, tree, wait_s, session_s, security, scraped, parse_health_endpoint(health), metrics_compat, warning,
        config, memory_bytes,
    )  # fmt: skip
    if processes_ > 1:
        return _several(one, processes_, log_level, log_format)
    return run_server(
        lambda world: run_broker(one, world, SingleProcessReporter()), log_level, log_format, health=one.health
    )


def _several(given: BrokerOptions, count: int, log_level: str, log_format: Any) -> int:
    check_fork_is_possible()
    given = given._replace(processes=count)
    base = given.settings.name or make_broker_name(given.settings)
    ports = ReservedPorts()
    tiers = [make_broker_specs(given, count, base, ports, log_level, log_format)]
    preload_modules(*PRELOADED_MODULES)

    def ready(facts: dict[str, dict[str, str]]) -> tuple[str, Mapping[str, object]]:
        url, first = make_broker_ready_line(facts)
        return url, {"processes": count, **first}

    return run_process_tiers(tiers, ready, log_level, log_format)
