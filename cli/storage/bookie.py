"""`magnetar bookie`: runs a bookie. `magnetar bookie inspect …`: looks into its directory (cli/storage/inspect.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.lazy import Lazy, LazyGroup
from ..run.members import as_member, asks_members, join
from ..run.memory import planned
from ..run.servers import (
    LISTEN_HELP,
    SECURITY,
    check_reach,
    connect,
    disconnect,
    endpoint,
    metadata_address,
    metadata_options,
    metrics_endpoint,
    ready,
    serve,
    serve_for_ever,
    serve_metrics,
    server_options,
)

if TYPE_CHECKING:
    from ...runtime.world import World

TABLE = {"inspect": Lazy(".storage.inspect", "inspect", "Look into a bookie's directory, also beside a running one.")}


@click.group(cls=LazyGroup, table=TABLE, invoke_without_command=True)
@click.option("--listen", default="127.0.0.1:7660", show_default=True, help=LISTEN_HELP)
@click.option(
    "--advertise", default="", metavar="HOST", help="The name by which brokers reach it (default: as --listen)."
)
@metadata_options
@click.option("--data", type=click.Path(file_okay=False), default="magnetar-bookie", show_default=True, help="Folder.")
@click.option("--rack", default=None, help="Where it stands (default /default).")
@SECURITY
@server_options("info", compat=["bookkeeper"])
@click.pass_context
def bookie(
    context: click.Context,
    listen: str,
    advertise: str,
    metadata_: str,
    wait_s: float,
    session_s: float,
    data: str,
    rack: str | None,
    security: str | None,
    config: str | None,
    memory_bytes: int | None,
    metrics: str | None,
    insecure: bool,
    metrics_compat: str,
    log_level: str,
    log_format: str,
) -> int:
    """Run a bookie: it keeps entries of ledgers, synced before each acknowledgement.

    With a command after it, it runs that instead.

    Example: magnetar bookie --listen 127.0.0.1:7660 --metadata 127.0.0.1:7640 --data /data
    """
    if context.invoked_subcommand is not None:
        return 0
    where, tree = endpoint(listen, "--listen"), metadata_address(metadata_, security)
    folder, scraped = Path(data).absolute(), metrics_endpoint(metrics)
    warning = check_reach(insecure, listen=None if asks_members(security) else where, metrics=scraped)

    async def main(world: World) -> None:
        from ...bookie.server import Bookie, BookieConfig
        from ...runtime.config import load
        from ...runtime.lifecycle import Parts
        from ..metrics.samples import Measured, second_names

        given = {"data": str(folder), "host": where.host, "port": where.port}
        given |= {"advertised_host": advertise or None, "rack": rack}
        settings = load(BookieConfig, "bookie", file=config, overrides=given)
        plan = planned(config, memory_bytes, bookie=settings)
        settings = plan.applied(settings, "bookie")
        world = as_member(world, security, "bookie")
        async with Parts(world.clock) as parts:
            store = await parts.start("metadata", connect(world, tree, wait_s, session_s), disconnect)
            serving = await join(parts, world, security, "bookie", lambda: connect(world, tree, wait_s, session_s))
            starting = Bookie.start(serving, settings, store, lambda: connect(world, tree, wait_s, session_s))
            running = await parts.start("bookie", starting, Bookie.close)
            measured = Measured(bookies=[running], second=second_names(metrics_compat, world.clock), memory=plan)
            facts = await serve_metrics(parts, scraped, measured)
            ready(f"bookie://{running.endpoint}", id=running.id, data=folder, **facts)
            await serve_for_ever(warning)

    return serve(main, log_level, log_format)
