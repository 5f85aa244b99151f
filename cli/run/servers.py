"""`magnetar metadata`, and what all processes of a cluster share (the others: brokers.py, cli/storage/bookie.py).

Each prints one line on stdout when it serves, `ready SCHEME://HOST:PORT …`, and logs on stderr. SIGTERM and Ctrl-C end
it in order within seconds; `kill -9` is safe at any moment. Settings without an option are in `--config FILE`
(TOML, sections [bookie] and [broker]) and in the environment (`MAGNETAR_BROKER_ROLL_ENTRIES=…`).

How the processes of a secured cluster know each other: [members] of `--security FILE` (docs/security.md).

Also in this file, each below its heading: the memory of a process (memory); the log level that the cluster sets for a
process that is no broker (log level).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ...metadata import paths
from ...metadata.records import PoliciesRecord
from ...metadata.store import MetadataStore, WatchReset, get_readable_record
from ...proto.names import parse_number
from ...runtime import logs
from ...runtime.tasks import Supervisor
from ..common.lazy import LazyCommand, LazyGroup
from ..common.units import FiniteNumber, Interval
from .metrics import ChildProcessReporter, FillMetricsPage, announce_process_ready, has_announced_ready

if TYPE_CHECKING:
    from ...bookie.server import Bookie, BookieConfig
    from ...broker.common.config import BrokerConfig
    from ...broker.server import Broker
    from ...metadata.backups import BackupSettings
    from ...metadata.session import MetadataAccess, MetadataAddress
    from ...metadata.sqlite import SqliteStore
    from ...proto.errors import MagnetarError
    from ...runtime.clock import Clock
    from ...runtime.config import MemoryPlan, MemoryShare
    from ...runtime.health import CheckReadiness
    from ...runtime.network import Endpoint, World
    from ...runtime.process import ProcessParts
    from ...security.settings import EtcdSection, MembersSection, ZookeeperSection


def make_member_world(world: World, settings: str | None, role: str) -> World:
    """Returns a world (runtime/network.py) for a member of the cluster: its connections to the metadata service, or the
    listener of the metadata service itself, use the member's certificate. `settings`: the file of --security; `role`:
    "metadata", "broker", "bookie" or "operator". Returns `world` unchanged if the settings have no section [members].
    Raises InvalidConfiguration if they are invalid."""
    members = get_members_section(settings)
    if members is None:
        return world
    from ...security.members import make_member_network

    return replace(world, network=make_member_network(world.network, members, role, world.clock))


async def make_registered_world(
    parts: ProcessParts, world: World, settings: str | None, role: str, session: Callable[[], Awaitable[MetadataStore]]
) -> World:
    """Registers the key of this process in the metadata, so that the other members of the cluster accept it, and
    returns a world that uses this key. The registration ends with `parts`. Returns `world` unchanged if the settings
    have no section [members]. `session()` opens a session with the metadata. Raises InvalidConfiguration if the section
    is invalid, and the errors of `session`."""
    section = get_members_section(settings)
    if section is None:
        return world
    from ...metadata.members import Members
    from ...security.members import read_own_member_name

    starting = Members.start(world, session, role, read_own_member_name(section, role))
    members = await parts.start("members", starting, Members.close)
    return members.make_world_with_member_keys(world)


def get_members_section(settings: str | None) -> MembersSection | None:
    """Returns the section [members] of the settings file; None if there is no file or no such section. Raises
    InvalidConfiguration if the file is invalid."""
    if settings is None:
        return None
    from ...security.settings import SecuritySettings

    return SecuritySettings.load(settings).members


def accepts_only_members(settings: str | None) -> bool:
    """Returns whether the listener of the metadata service or of a bookie accepts only members of the cluster; False
    without `settings`. Raises UsageError if the settings have no section [members]. Raises InvalidConfiguration if the
    settings cannot be read, or are invalid."""
    if settings is not None and get_members_section(settings) is None:
        raise click.UsageError(f"--security: {settings} has no section [members], which this process needs")
    return settings is not None


_LOG = logging.getLogger("magnetar")

METADATA_WAIT_S = 60.0
"""Seconds that a bookie or broker which was started before the metadata service waits for it."""
DESCRIPTORS_ENOUGH = 4096
"""Value of RLIMIT_NOFILE below which the start warns. A server has about 200 files open, and a client of it one."""
LOG_WAITING_AFTER_S = 1.0
"""Seconds of a wait after which it logs that it waits."""


def with_server_options(
    level: str, *, settings: bool = True, compat: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that adds options to the command of a server: --memory-bytes, --metrics, --health,
    --insecure, --log-level (default `level`) and --log-format; --config if the process has `settings`; and
    --metrics-compat if its metrics can have the names of other systems (`compat`)."""
    names = click.option(
        "--metrics-compat",
        envvar="MAGNETAR_METRICS_COMPAT",
        type=click.Choice(["none", *compat]),
        default="none",
        show_default=True,
        help="Show metrics under the names of BookKeeper (bookies), or of Pulsar (brokers), as well.",
    )
    memory = click.option(
        "--memory-bytes", type=click.IntRange(min=0), default=None, metavar="BYTES",
        help="For all that the process keeps (default, and 0: as set in [process], else a quarter of the memory).",
    )  # fmt: skip
    file = click.option("--config", type=click.Path(exists=True, dir_okay=False), default=None, help="Settings, TOML.")
    options = (
        *([file] if settings else []),
        memory,
        click.option(
            "--metrics",
            envvar="MAGNETAR_METRICS",
            default=None,
            metavar="[HOST:]PORT",
            help="Serve Prometheus metrics there, at /metrics (default: nowhere).",
        ),
        click.option(
            "--health",
            envvar="MAGNETAR_HEALTH",
            default=None,
            metavar="[HOST:]PORT",
            help="Answer probes there, at /livez and /readyz (default: nowhere).",
        ),
        click.option(
            "--insecure",
            envvar="MAGNETAR_INSECURE",
            is_flag=True,
            help="Listen beyond this machine although every caller may do everything.",
        ),
        *([names] if compat else []),
        click.option(
            "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default=level, show_default=True
        ),
        click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True),
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def with_backup_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the command of a process with the metadata: adds the options --backup-every, --backup-keep and
    --backup-dir, from which `start_backups` makes copies of the metadata."""
    options = (
        click.option(
            "--backup-every", "backup_every", envvar="MAGNETAR_BACKUP_EVERY", type=Interval(), default=None,
            metavar="TIME", help="Make a copy of the metadata so often: 1h, 1d (default: never).",
        ),
        click.option(
            "--backup-keep", "backup_keep", envvar="MAGNETAR_BACKUP_KEEP", type=click.IntRange(1, 100_000), default=24,
            show_default=True, help="How many of these copies to keep.",
        ),
        click.option(
            "--backup-dir", "backup_folder", envvar="MAGNETAR_BACKUP_DIR", type=click.Path(file_okay=False),
            default=None, metavar="DIR",
            help="Where: NAME ANOTHER DISK, as a copy on the disk of the metadata does not survive the loss of that "
            "disk (default: metadata-backups in the --data folder).",
        ),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def make_backup_settings(every_s: float | None, keep: int, folder: str | None, data: Path) -> BackupSettings | None:
    """Returns the settings in the values of the options of `with_backup_options`; None without --backup-every. `data`:
    the folder of the metadata. Raises UsageError if the settings contradict each other."""
    from ...metadata.backups import BACKUP_FOLDER, BackupSettings

    if every_s is None:
        if folder is not None:
            raise click.UsageError("--backup-dir without --backup-every: no copy is made. Say how often, such as 1h")
        return None
    return BackupSettings(every_s, keep, str(Path(folder).absolute() if folder is not None else data / BACKUP_FOLDER))


async def start_backups(
    parts: ProcessParts, world: World, store: SqliteStore, settings: BackupSettings | None
) -> None:  # fmt: skip
    """Begins to make copies of the metadata on a schedule, which ends with `parts`; does nothing without settings."""
    from ...metadata.backups import ScheduledBackups

    if settings is not None:
        await parts.start("backups", ScheduledBackups.start(world, store, settings), ScheduledBackups.close)


LISTEN_HELP = "HOST:PORT; port 0 takes a free one."


METADATA_HELP = "The metadata service: HOST:PORT, or zk://HOST:PORT,…/PATH of ZooKeeper, etcd://HOST:PORT,…/PATH."


def with_metadata_service_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a command: adds the options --metadata, --wait and --session-timeout. They say where the metadata
    service is, for how many seconds to wait for it, and after how many seconds the other processes notice that this
    process has ended."""
    options = (
        click.option(
            "--metadata",
            "metadata_",
            envvar="MAGNETAR_METADATA",
            default="127.0.0.1:7640",
            show_default=True,
            help=METADATA_HELP,
        ),
        click.option(
            "--wait", "wait_s", type=FiniteNumber(0.1), default=METADATA_WAIT_S, show_default=True,
            help="Seconds to wait for it at the start.",
        ),
        click.option(
            "--session-timeout",
            "session_s",
            type=FiniteNumber(0.1, 600),
            default=10.0,
            show_default=True,
            help="Seconds of silence until others take over.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def parse_endpoint(text: str, option: str) -> Endpoint:
    """Parses HOST:PORT, the value of the option `option`. Raises UsageError, which names the option, if the text is not
    an address."""
    from ...runtime.network import Endpoint

    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}") from error


def parse_metadata_address(text: str, security: str | None = None) -> MetadataAddress:
    """Returns the address in the value of --metadata. `security`: the value of --security, whose section [zookeeper] or
    [etcd] contains the credentials for it. Raises UsageError if the value is invalid, InvalidConfiguration if the
    settings or the credentials are."""
    from ...metadata.session import EtcdAddress, ZookeeperAddress, parse_address

    try:
        found = parse_address(text)
    except ValueError as error:
        raise click.UsageError(f"--metadata: {error}") from error
    if security is None:
        return found
    from ...security.settings import SecuritySettings

    settings = SecuritySettings.load(security)
    if isinstance(found, ZookeeperAddress) and settings.zookeeper is not None:
        return found._replace(access=_read_access(settings.zookeeper))
    if isinstance(found, EtcdAddress) and settings.etcd is not None:
        return found._replace(access=_read_access(settings.etcd))
    return found


def _read_access(section: ZookeeperSection | EtcdSection) -> MetadataAccess:
    """Returns the files and credentials of the settings' `section`. Raises InvalidConfiguration if the credentials
    cannot be read, are not USER:PASSWORD, or if other users may read the key."""
    from ...metadata.session import MetadataAccess
    from ...security.settings import read_private_file

    if section.key:
        read_private_file(section.key)
    if section.credentials:
        _read_credentials(section.credentials)
    return MetadataAccess(
        section.ca, section.certificate, section.key,
        (lambda: _read_credentials(section.credentials)) if section.credentials else None,
    )  # fmt: skip


def _read_credentials(source: str) -> str:
    from ...proto.errors import InvalidConfiguration
    from ...security.settings import read_secret

    try:
        found = read_secret(source).reveal_bytes().decode().strip()
    except UnicodeDecodeError:
        found = ""
    user, _, password = found.partition(":")
    if not user or not password:
        raise InvalidConfiguration(f"{source} has no user:password for the metadata")
    return found


def parse_metrics_endpoint(text: str | None) -> Endpoint | None:
    """Returns the address in the value of --metrics; None if the option is not given. A port without a host means a
    loopback address. Raises UsageError if the value is no address."""
    return _local_endpoint(text, "--metrics")


def parse_health_endpoint(text: str | None) -> Endpoint | None:
    """Returns the address in the value of --health; None if the option is not given. A port without a host means a
    loopback address. Other machines may reach the address without --insecure, because the answer says only whether the
    process serves. Raises UsageError if the value is no address."""
    return _local_endpoint(text, "--health")


def _local_endpoint(text: str | None, option: str) -> Endpoint | None:
    if text is None:
        return None
    return parse_endpoint(f"127.0.0.1:{text}" if parse_number(text) is not None else text, option)


INSECURE_LOG_EVERY_S = 3600.0
"""Seconds between two log lines of a server that every caller may use, which say so."""


SECURITY_OPTION = click.option(
    "--security", envvar="MAGNETAR_SECURITY", type=click.Path(dir_okay=False), default=None, metavar="FILE",
    help="Ask who calls, by these settings (TOML; see 'magnetar security init').",
)  # fmt: skip


def make_authenticating_world(world: World, settings: str | None) -> World:
    """Returns a world for a broker whose listeners authenticate callers by the settings in the file `settings`. Returns
    `world` unchanged if `settings` is None. Raises InvalidConfiguration if the settings are invalid."""
    if settings is None:
        return world
    from ...security.authenticator import make_secured_world

    return make_secured_world(world, settings)


def is_listener_secured(settings: str | None) -> bool:
    """Returns whether the settings secure the listener with TLS, so that other machines may reach it; False without
    settings. Raises InvalidConfiguration if the settings are invalid."""
    if settings is None:
        return False
    from ...security.settings import SecuritySettings

    return SecuritySettings.load(settings).tls is not None


def url_scheme(settings: str | None) -> str:
    """Returns the scheme of the URL with which clients connect to the server: magnetar+ssl if the settings have TLS,
    else magnetar. Raises InvalidConfiguration if the settings cannot be read, or are invalid."""
    return "magnetar+ssl" if is_listener_secured(settings) else "magnetar"


def check_listeners(insecure: bool, **listeners: Endpoint | None) -> str:
    """Checks that only this machine can reach listeners that do not authenticate their callers. `listeners`: the
    address of each listener, by its option. Raises UsageError if other machines can reach one; with `insecure`, returns
    a warning for the log instead. Returns "" if there is nothing to warn of."""
    beyond = [(name, where) for name, where in listeners.items() if where is not None and not where.is_loopback]
    if not beyond:
        return ""
    at = ", ".join(f"--{name} {where}" for name, where in beyond)
    reach = f"{at}: every caller may read, write and delete everything there, because nothing asks who calls"
    if not insecure:
        raise click.UsageError(f"{reach}. Listen on 127.0.0.1; or accept that for a closed network with --insecure")
    return f"INSECURE: {reach}"


def run_server(
    main: Callable[[World], Coroutine[Any, Any, None]],
    log_level: str,
    log_format: Any,
    voice: ChildProcessReporter | None = None,
    health: Endpoint | None = None,
) -> int:
    """Runs a server to its end and returns its exit code. `main` gets the world of this process and serves until it is
    cancelled. `voice`: the reporter of a process that is one of several and that only their parent may stop; None: this
    process is the whole server. `health`: the address at which probes are answered from the start on.

    Raises the errors of the server, which cli/common/exits.py reports."""
    from ...proto.errors import MagnetarError
    from ...runtime import logs, process
    from ...runtime.clock import SystemClock
    from ...runtime.descriptors import PROCESS_DESCRIPTORS
    from ...runtime.health import LOOP_HEARTBEAT, PROCESS_HEALTH, HealthServer

    logs.configure_logging(log_format, log_level, process="" if voice is None else voice.child.name)
    shared = PROCESS_DESCRIPTORS.open_spares()
    _LOG.log(
        logging.INFO if shared.limit >= DESCRIPTORS_ENOUGH else logging.WARNING,
        "open files: %d at most (RLIMIT_NOFILE), %d of them for connections", *shared,
    )  # fmt: skip
    failures: list[MagnetarError] = []

    async def guarded() -> int:
        LOOP_HEARTBEAT.start()
        probes = None
        try:
            probes = HealthServer.start(health) if health is not None else None
            if probes is not None:
                PROCESS_HEALTH.endpoint = probes.endpoint
                _LOG.info("probes are answered at http://%s/livez and /readyz", probes.endpoint)
            if voice is None:
                await start_until_ready(SystemClock(), lambda: main(process.make_system_world()), has_announced_ready)
            else:
                await voice.attach()
                await start_until_ready(SystemClock(), lambda: main(process.make_system_world()), lambda: voice.said)
        except MagnetarError as error:
            failures.append(error)
            return 1
        finally:
            if probes is not None:
                probes.close()
            if voice is not None:
                await voice.child.detach()
        return 0

    code = process.run_process(guarded, process.STOP_SIGNALS if voice is None else (signal.SIGTERM,))
    if failures:
        raise failures[0]
    return code


async def start_until_ready(
    clock: Clock, start: Callable[[], Awaitable[None]], is_ready: Callable[[], bool], pause_s: float = 0.5
) -> None:
    """Calls `start`, which starts the server and returns at its end. If the metadata service is lost before
    `is_ready()` is true, waits `pause_s` seconds and calls `start` again: the service may restart, or the session may
    end while a bookie replays its journal. Raises the error when METADATA_WAIT_S seconds have passed, and at once a
    permanent error (a wrong directory, a taken port, no server at that address)."""
    from ...proto.errors import ConnectionLost, OutcomeUnknown, SessionExpired, TimedOut

    deadline = clock.monotonic() + METADATA_WAIT_S
    while True:
        try:
            return await start()
        except (ConnectionLost, OutcomeUnknown, SessionExpired, TimedOut) as error:
            if is_ready() or clock.monotonic() >= deadline:
                raise
            _LOG.warning("the start begins again: %s", error)
        await asyncio.sleep(pause_s)


def make_pulsar_ready_facts(broker: Broker) -> dict[str, object]:
    """Returns facts for the ready line: the addresses for Pulsar's clients and tools, and the address of the
    administration page. Leaves out those that the broker does not serve."""
    urls = broker.pulsar_urls.get("", ())
    found: dict[str, object] = {"pulsar": urls[0]} if urls else {}
    return found | ({"http": broker.http_url, "page": f"{broker.http_url}/ui"} if broker.http_url else {})


async def serve_metrics(parts: ProcessParts, where: Endpoint | None, measured: FillMetricsPage) -> dict[str, object]:
    """Starts to serve the page of metrics at the address `where`, until `parts` end, and returns this address as a fact
    for the ready line. Does nothing and returns no fact if `where` is None. Raises Busy if the port is taken."""
    if where is None:
        return {}
    from ...runtime.metrics_server import MetricsServer

    server = await parts.start("metrics", MetricsServer.start(where, measured), MetricsServer.close)
    return {"metrics": server.endpoint}


async def serve_until_cancelled(warning: str = "", readiness: CheckReadiness | None = None) -> NoReturn:
    """Waits until the call is cancelled, because this process must end. Excludes the objects that exist now from
    garbage collection. Logs the warning, if there is one, now and every INSECURE_LOG_EVERY_S seconds. `readiness`: the
    function that answers probes meanwhile; if it is None, the process counts as ready."""
    from ...runtime.health import PROCESS_HEALTH
    from ...runtime.process import freeze_objects

    freeze_objects()
    PROCESS_HEALTH.readiness = readiness or _nothing_missing
    try:
        while True:
            if warning:
                _LOG.warning("%s", warning)
            await asyncio.sleep(INSECURE_LOG_EVERY_S)
    finally:
        PROCESS_HEALTH.on_process_stopping()


async def _nothing_missing() -> Sequence[str]:
    return ()


def make_readiness_check(bookies: Sequence[Bookie] = (), broker: Broker | None = None) -> CheckReadiness:
    """Returns a function for probes. The function returns the reasons why the broker or a bookie of this process is not
    ready; no reasons if all are ready."""

    async def why_not_ready() -> Sequence[str]:
        reasons = [reason for each in bookies for reason in each.why_not_ready()]
        if broker is not None and (why := await broker.topic_manager.readiness.why_not_ready()):
            reasons.append(why)
        return reasons

    return why_not_ready


async def connect_metadata(world: World, where: MetadataAddress, wait_s: float, session_s: float) -> MetadataStore:
    """Opens a session with the metadata service, makes this process write in the format of the cluster, and returns the
    store. Waits up to `wait_s` seconds for the service to answer, then raises Unavailable; raises any other error of
    the service at once, such as Unauthorized if ZooKeeper refuses this process, or NewerFormat if the cluster has a
    format that this release cannot read. `session_s`: after how many seconds without contact the session ends."""
    from ...metadata.remote import connect_metadata_at
    from ...proto.errors import Unavailable

    deadline = world.clock.monotonic() + wait_s
    notice = asyncio.get_running_loop().call_later(
        LOG_WAITING_AFTER_S, _LOG.warning, "waiting up to %g s for the metadata service at %s", wait_s, where
    )
    try:
        while True:
            try:
                async with asyncio.timeout(deadline - world.clock.monotonic()):
                    store = await connect_metadata_at(world, where, session_s)
                    return await _settled(store)
            except Unavailable as error:
                if world.clock.monotonic() >= deadline:
                    raise _no_metadata(where, error.message) from error
            except TimeoutError as error:
                raise _no_metadata(where, f"no session within {wait_s:g} s") from error
            await asyncio.sleep(min(0.2, max(0.0, deadline - world.clock.monotonic())))
    finally:
        notice.cancel()


async def _settled(store: MetadataStore) -> MetadataStore:
    from ...metadata.store import adopt_cluster_format

    try:
        await adopt_cluster_format(store)
    except BaseException:
        await store.close()
        raise
    return store


async def close_metadata(store: MetadataStore) -> None:
    """Closes a store that `connect_metadata` returned."""
    await store.close()


def _no_metadata(where: MetadataAddress, why: str) -> MagnetarError:
    from ...metadata.session import get_store_name
    from ...proto.errors import Unavailable

    name = get_store_name(where)
    start = f"start '{name}'" if name.startswith("magnetar") else f"start {name}"
    return Unavailable(f"no metadata service at {where} ({why}); {start} or give --metadata")


class _Metadata(LazyGroup):
    def __init__(self, name: str | None = None, **settings: Any) -> None:
        table = {
            "backup": LazyCommand(".storage.metadata_copies", "backup", "Make a copy of the running service's tree."),
            "export": LazyCommand(
                ".storage.metadata_transfer", "export", "Write the tree of a stopped cluster to a file."
            ),
            "import": LazyCommand(
                ".storage.metadata_transfer", "import_", "Write an exported tree into an empty metadata store."
            ),
            "rebuild": LazyCommand(
                ".storage.metadata_rebuild", "rebuild", "Make a lost tree again from what bookies hold."
            ),
            "restore": LazyCommand(
                ".storage.metadata_copies", "restore", "Put a copy in the place of the tree's file."
            ),
        }
        super().__init__(name or "metadata", table, invoke_without_command=True, with_rows=True, **settings)


@click.command(cls=_Metadata)
@click.option("--listen", default="127.0.0.1:7640", show_default=True, help=LISTEN_HELP)
@click.option(
    "--data", type=click.Path(file_okay=False), default="magnetar-metadata", show_default=True, help="Folder."
)
@SECURITY_OPTION
@with_backup_options
@with_server_options("info", settings=False)
@click.pass_context
def metadata(
    context: click.Context, listen: str, data: str, security: str | None, backup_every: float | None,
    backup_keep: int, backup_folder: str | None, memory_bytes: int | None,
    metrics: str | None, health: str | None, insecure: bool,
    log_level: str, log_format: str,
) -> int:  # fmt: skip
    """Run the metadata service, which stores the small records on which brokers and bookies must agree.

    With --backup-every it makes copies of itself, from which `magnetar metadata restore` starts anew.

    \b
    Examples:
      magnetar metadata --listen 127.0.0.1:7640 --data /var/lib/magnetar/metadata
      magnetar metadata --data /var/lib/magnetar/metadata --backup-every 1h --backup-dir /mnt/other-disk/metadata
    """
    if context.invoked_subcommand is not None:
        return 0
    where, folder = parse_endpoint(listen, "--listen"), Path(data).absolute()
    backups = make_backup_settings(backup_every, backup_keep, backup_folder, folder)
    scraped = parse_metrics_endpoint(metrics)
    warning = check_listeners(insecure, listen=None if accepts_only_members(security) else where, metrics=scraped)

    async def main(world: World) -> None:
        from ...metadata.server import MetadataServer
        from ...runtime.process import ProcessParts
        from ...runtime.tasks import Supervisor
        from .metrics import MeasuredParts

        plan = make_memory_plan(None, memory_bytes, metadata=True)
        world = make_member_world(world, security, "metadata")
        async with ProcessParts(world.clock) as parts:
            clients = plan.values["metadata.client_memory_bytes"]
            starting = MetadataServer.start(world, where, str(folder / "metadata.sqlite"), clients)
            server = await parts.start("metadata", starting, MetadataServer.close)
            await start_backups(parts, world, server.store, backups)
            facts = await serve_metrics(parts, scraped, MeasuredParts(metadata=server, memory=plan))
            session = server.store.new_session()
            await parts.start("log level", start_following_log_level(lambda: session), Supervisor.close)
            announce_process_ready(f"metadata://{server.endpoint}", data=folder, **facts)
            await serve_until_cancelled(warning)

    return run_server(main, log_level, log_format, health=parse_health_endpoint(health))


# -------------------------------------------------------------------------------------------------------- memory
# The memory of a process: `memory_bytes` is shared out to what runs in it, before that starts.
#
#     plan = make_memory_plan(config, option, broker=settings)    raises InvalidConfiguration if memory is too small
#     settings = plan.apply_to_config(settings, "broker")         see runtime/config.py


STANDALONE_MEMORY_BYTES = 256 << 20
"""Memory of the broker and of each bookie of a standalone server, at most, when nothing is set: others are on its
machine."""
MEMORY_SHARE_SETTINGS = frozenset({"broker.client_memory_bytes", "broker.state_memory_bytes"})
"""Settings whose value 0 asks for the share."""


def make_memory_plan(
    file: str | None, option: int | None, *, broker: BrokerConfig | None = None, bookie: BookieConfig | None = None,
    bookies: int = 1, metadata: bool = False, most: int | None = None, processes: int = 1,
) -> MemoryPlan:  # fmt: skip
    """Returns the memory plan of a process that runs these parts (`bookies` bookies with equal settings), and logs it.
    `option` (the value of --memory-bytes), the settings in `file` and the environment say how much memory there is. If
    none does, it is a quarter of the machine's memory, at most `most` bytes. Each of `processes` processes gets an
    equal share.

    Also sets the threshold at which this process returns free memory to the system. Raises InvalidConfiguration if a
    setting is invalid, or the memory is too small for the parts."""
    from ...runtime import process
    from ...runtime.config import (
        NO_LIMIT,
        compute_process_memory,
        find_explicit_settings,
        get_setting_value,
        plan_memory,
    )

    shares: list[MemoryShare] = []
    given: dict[str, int] = {}
    if broker is not None:
        from ...broker.server import BROKER_MEMORY_SHARES as OF_BROKER

        shares += OF_BROKER
    if bookie is not None:
        from ...bookie.server import BOOKIE_MEMORY_SHARES as OF_BOOKIE

        shares += [each.multiply_share(bookies) for each in OF_BOOKIE]
    if metadata:
        from ...metadata.server import METADATA_MEMORY_SHARES as OF_METADATA

        shares += OF_METADATA
    for section, config in (("broker", broker), ("bookie", bookie)):
        for name in find_explicit_settings(type(config), section, file=file) if config is not None else ():
            value, setting = get_setting_value(config, name) if config is not None else None, f"{section}.{name}"
            if any(each.setting == setting for each in shares) and (value or setting not in MEMORY_SHARE_SETTINGS):
                assert isinstance(value, int), "what is shared out are numbers"
                given[setting] = value
    budget = compute_process_memory(file, option, shares, given, NO_LIMIT if most is None else most, processes)
    found = plan_memory(budget, shares, given)
    process.set_heap_trim_threshold(budget // 8)
    told = ", ".join(f"{name} {limit >> 20}" for name, limit in found.limits.items())
    _LOG.info("memory_bytes: %d MiB (%s)", budget >> 20, told)
    return found


# ------------------------------------------------------------------------------------------------------------ log level
# Applies the setting `log_level` of the cluster to a process that is no broker: a bookie, or the metadata service.
#
#     following = await start_following_log_level(lambda: bookie.metadata)    until `await following.close()`
#
# `magnetar brokers update-dynamic-config --config log_level` stores it in the record of the settings that all brokers
# follow (broker/cluster/policy_cache.py). A value that this release does not know counts as none: the process has the
# level that it was started with. Guarding tests: tests/cli/run/test_log_level.py.


async def start_following_log_level(session_of: Callable[[], MetadataStore]) -> Supervisor:
    """Begins to apply the setting in the background, and returns the Supervisor of the task, which the caller must
    close. `session_of` returns the metadata session that the process has now. It is called again after each loss of a
    session."""
    background, applied = Supervisor(), AppliedLogLevel()
    background.start_supervised("log-level", lambda: follow_log_level(session_of(), applied))
    return background


class AppliedLogLevel:
    """The log level of the cluster's setting `log_level` that this process has applied last, kept from one metadata
    session to the next. `level` None: no level is set, so the process has the level that it was started with."""

    level: str | None = None


async def follow_log_level(session: MetadataStore, applied: AppliedLogLevel) -> None:
    """Applies the log level that the setting has now, and each later change, until the call is cancelled. Raises the
    errors of the metadata session when the session or its watch breaks. The next call needs the same `applied`: the
    setting may be deleted meanwhile."""
    revision = await session.revision()
    await _apply_log_level(session, applied)
    async for change in session.watch(paths.BROKER_POLICIES, revision):
        if isinstance(change, WatchReset) or change.path == paths.BROKER_POLICIES:
            await _apply_log_level(session, applied)


async def _apply_log_level(session: MetadataStore, applied: AppliedLogLevel) -> None:
    """Applies the level of the setting if it is not that which was applied last."""
    found = await get_readable_record(session, paths.BROKER_POLICIES, PoliciesRecord)
    level = found[0].properties.get("log_level") if found is not None else None
    known = level if level in logs.LOG_LEVELS else None
    if known != applied.level:
        logs.set_level(known, "the dynamic setting log_level" + ("" if known else " was deleted"))
    applied.level = known
