"""`magnetar bookie`: runs a bookie. `magnetar bookie inspect …`: looks into its directory
(cli/storage/inspect_store.py).

With `--processes N` it runs N bookies of one machine. Each is a process with its own folder (DIR/bookie-1 …, also in
those of `--journal` and `--ledgers`), id and port; one command starts them and ends them (cli/run/brokers.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..common.lazy import LazyCommand, LazyGroup
from ..run import brokers as processes
from ..run.metrics import ServerReporter, SingleProcessReporter
from ..run.servers import (
    LISTEN_HELP,
    SECURITY_OPTION,
    accepts_only_members,
    check_listeners,
    close_metadata,
    connect_metadata,
    make_member_world,
    make_memory_plan,
    make_readiness_check,
    make_registered_world,
    parse_endpoint,
    parse_health_endpoint,
    parse_metadata_address,
    parse_metrics_endpoint,
    run_server,
    serve_metrics,
    serve_until_cancelled,
    start_following_log_level,
    with_metadata_service_options,
    with_server_options,
)

if TYPE_CHECKING:
    from ...bookie.server import BookieConfig
    from ...metadata.session import MetadataAddress
    from ...metadata.store import MetadataStore
    from ...runtime.network import Endpoint, World

DEFAULT_RACK = "/default"

BOOKIE_COMMANDS = {
    "inspect": LazyCommand(
        ".storage.inspect_store", "inspect", "Look into a bookie's directory, also beside a running one."
    )
}


@click.group(cls=LazyGroup, table=BOOKIE_COMMANDS, invoke_without_command=True)
@click.option("--listen", default="127.0.0.1:7660", show_default=True, help=LISTEN_HELP)
@click.option(
    "--advertise", default="", metavar="HOST", help="The name by which brokers reach it (default: as --listen)."
)
@with_metadata_service_options
@click.option("--data", type=click.Path(file_okay=False), default="magnetar-bookie", show_default=True, help="Folder.")
@click.option(
    "--journal", type=click.Path(file_okay=False), default=None, metavar="DIR",
    help="Folder of the journal, on a device of its own (default: in --data).",
)  # fmt: skip
@click.option(
    "--ledgers", type=click.Path(file_okay=False), multiple=True, metavar="DIR",
    help="Folder of ledgers; once for each disk, always in the same order (default: --data).",
)  # fmt: skip
@processes.with_processes_option(
    "Bookies, each in its own folder in --data (default 1, or as many as there are).", None
)
@click.option("--rack", default=None, help="Where it stands (default /default).")
@click.option("--group", default=None, help="By this namespaces choose their bookies (default: none).")
@SECURITY_OPTION
@with_server_options("info", compat=["bookkeeper"])
@click.pass_context
def bookie(
    context: click.Context,
    listen: str,
    advertise: str,
    metadata_: str,
    wait_s: float,
    session_s: float,
    data: str,
    journal: str | None,
    ledgers: tuple[str, ...],
    processes_: int | None,
    rack: str | None,
    group: str | None,
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
    """Run a bookie, which stores entries of ledgers. Each entry is synced before it is acknowledged.

    If a command follows, that command runs instead.

    \b
    Examples:
      magnetar bookie --listen 127.0.0.1:7660 --metadata 127.0.0.1:7640 --data /data
      magnetar bookie --listen 10.0.0.3:7660 --metadata meta:7640 --data /data --processes 2 --security bookie.toml
      magnetar bookie --data /data --journal /nvme/journal --ledgers /disk1/ledgers --ledgers /disk2/ledgers
    """
    if context.invoked_subcommand is not None:
        return 0
    where, tree = parse_endpoint(listen, "--listen"), parse_metadata_address(metadata_, security)
    folder, scraped = Path(data).absolute(), parse_metrics_endpoint(metrics)
    warning = check_listeners(insecure, listen=None if accepts_only_members(security) else where, metrics=scraped)

    given = BookieOptions(
        folder, where, advertise, rack, group, config, tree, wait_s, session_s, security, scraped,
        parse_health_endpoint(health), metrics_compat, warning, memory_bytes,
        journal=None if journal is None else Path(journal).absolute(),
        ledgers=tuple(Path(each).absolute() for each in ledgers),
    )
    count = decide_process_count(folder, processes_)
    if count > 1:
        return _several(given, count, log_level, log_format)
    return run_server(
        lambda world: run_bookie(given, world, SingleProcessReporter()), log_level, log_format, health=given.health
    )


class BookieOptions(NamedTuple):
    """The command-line options of a process that runs a bookie. `tree`: the address of the metadata; `wait_s`: for how
    many seconds to wait for it; `session_s`: the time-out of the session, in seconds."""

    folder: Path
    listen: Endpoint
    advertise: str
    rack: str | None
    group: str | None
    config: str | None
    tree: MetadataAddress
    wait_s: float
    session_s: float
    security: str | None
    metrics: Endpoint | None
    health: Endpoint | None  # of the first process
    compat: str
    warning: str
    memory_bytes: int | None
    processes: int = 1  # which have the memory together
    journal: Path | None = None
    ledgers: tuple[Path, ...] = ()

    @property
    def settings(self) -> BookieConfig:
        """Returns the settings of the bookie: those of the file and the environment, overridden by the options. Raises
        InvalidConfiguration if a setting is invalid."""
        from ...bookie.server import BookieConfig
        from ...runtime.config import load_config

        given = {"data": str(self.folder), "host": self.listen.host, "port": self.listen.port}
        given |= {"advertised_host": self.advertise or None, "rack": self.rack, "group": self.group}
        given |= {"journal": None if self.journal is None else str(self.journal)}
        given |= {"ledgers": tuple(map(str, self.ledgers)) or None}
        return load_config(BookieConfig, "bookie", file=self.config, overrides=given)


async def run_bookie(given: BookieOptions, world: World, voice: ServerReporter) -> None:
    """Runs a bookie in this process, until the call is cancelled. `voice` reports when it is ready. Raises Unavailable
    if the metadata does not answer in time, Busy if the port or the folder is in use, InvalidConfiguration if the
    settings are invalid."""
    from ...bookie.server import Bookie
    from ...runtime.process import ProcessParts
    from ...runtime.tasks import Supervisor
    from ..run.metrics import MeasuredParts, make_bookkeeper_metric_names

    security = given.security
    settings = given.settings
    plan = make_memory_plan(given.config, given.memory_bytes, bookie=settings, processes=given.processes)
    settings = plan.apply_to_config(settings, "bookie")
    world = make_member_world(world, security, "bookie")

    async def session() -> MetadataStore:
        return await connect_metadata(world, given.tree, given.wait_s, given.session_s)

    async with ProcessParts(world.clock) as parts:
        store = await parts.start("metadata", session(), close_metadata)
        serving = await make_registered_world(parts, world, security, "bookie", session)
        running = await parts.start("bookie", Bookie.start(serving, settings, store, session), Bookie.close)
        page = voice.combine_metrics(
            MeasuredParts(bookies=[running], second=make_bookkeeper_metric_names(given.compat, world.clock),
            memory=plan)
        )
        facts = await serve_metrics(parts, given.metrics, page)
        await parts.start("log level", start_following_log_level(lambda: running.metadata), Supervisor.close)
        voice.report_ready(f"bookie://{running.endpoint}", id=running.id, data=given.folder, **facts)
        await serve_until_cancelled(given.warning, make_readiness_check([running]))


def decide_process_count(folder: Path, wanted: int | None) -> int:
    """Returns how many processes to start: `wanted`; if that is None, one for each bookie with data in the folder, at
    least 1. Raises InvalidConfiguration if `wanted` is less than the number of bookies with data. Raises it also if
    more than one is wanted and the folder itself is the directory of a single bookie."""
    from ...bookie.store.identity import COOKIE_FILE
    from ...proto.errors import InvalidConfiguration

    there = len([path for path in folder.glob("bookie-*") if path.is_dir()])
    if wanted is not None and wanted < there:
        raise InvalidConfiguration(
            f"{folder} has the data of {there} bookies, and ledgers are on all of them: "
            f"--processes {there} or more, or leave it out"
        )
    if wanted is not None and wanted > 1 and (folder / COOKIE_FILE).exists():
        raise InvalidConfiguration(
            f"{folder} has the data of one bookie itself: start the others with another --data, or keep --processes 1"
        )
    return wanted or max(there, 1)


def _several(given: BookieOptions, count: int, log_level: str, log_format: Any) -> int:
    """Runs several bookies, each in its own process; together they hold the folder's lock. Copies of a ledger are
    placed in distinct racks first. So if no rack is given, all bookies of this machine get the same generated rack."""
    processes.check_fork_is_possible()
    held = processes.lock_folder(str(given.folder))
    ports, names = processes.ReservedPorts(), [f"bookie-{number + 1}" for number in range(count)]
    rack = given.settings.rack
    if given.rack is None and rack == DEFAULT_RACK:
        rack = f"/{given.advertise or given.listen.host}"
    specs = []
    given = given._replace(
        metrics=given.metrics and ports.reserve(given.metrics), health=given.health and ports.reserve(given.health),
        processes=count,
    )  # fmt: skip
    for number, name in enumerate(names):
        listen = ports.reserve(processes.choose_process_address(given.listen, number, forwarded=bool(given.advertise)))
        one = given._replace(
            folder=given.folder / name, listen=listen, rack=rack, journal=given.journal and given.journal / name,
            ledgers=tuple(each / name for each in given.ledgers),
        )  # fmt: skip
        if number:
            one = one._replace(metrics=None, health=None, warning="")
        main = partial(run_bookie, one)
        specs.append(
            processes.make_process_spec(name, main, log_level, log_format, shows=not number, health=one.health)
        )

    def said(facts: dict[str, dict[str, str]]) -> tuple[str, Mapping[str, object]]:
        first = dict(facts[names[0]])
        ids = ",".join(facts[name]["id"] for name in names)
        return first.pop("url"), {**first, "id": ids, "data": given.folder, "processes": count}

    processes.preload_modules(
        "bookie.server", "metadata.remote", "runtime.config", "cli.run.metrics"
    )
    try:
        return processes.run_process_tiers([specs], said, log_level, log_format)
    finally:
        held.close()
