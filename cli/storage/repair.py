"""`magnetar repair`: a worker of auto-recovery alone. `magnetar repair status|enable|disable`: the whole cluster's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..common.lazy import Lazy, LazyGroup
from ..common.session import Session
from ..run.members import as_member, join
from ..run.servers import (
    SECURITY,
    connect,
    disconnect,
    metadata_address,
    metadata_options,
    serve,
    serve_for_ever,
)
from ..run.voice import ready
from .ledgers import ask_any, short, span
from .operator import operating

if TYPE_CHECKING:
    from ...runtime.world import World

TABLE = {
    "status": Lazy(".storage.repair", "status", "Auditor, queue, rate, progress, and how long it will take."),
    "enable": Lazy(".storage.repair", "enable", "Let missing copies be looked for and made again."),
    "disable": Lazy(".storage.repair", "disable", "Leave missing copies missing, during maintenance."),
}
WORKER_COLUMNS = ("name", "workingOn", "ledgers", "entries", "bytes", "failures", "bytesPerSecond")


@click.group(cls=LazyGroup, table=TABLE, invoke_without_command=True)
@metadata_options
@SECURITY
@click.option("--name", default="", help="Its name in 'magnetar repair status' (default: a random one).")
@click.option("--bytes-per-s", type=click.IntRange(0), default=None, help="It copies at most this; 0: no limit.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), default=None, help="Settings, TOML.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def repair(
    context: click.Context, metadata_: str, wait_s: float, session_s: float, security: str | None, name: str,
    bytes_per_s: int | None, config: str | None, log_level: str, log_format: str,
) -> int:  # fmt: skip
    """Make missing copies of ledgers again: run a worker alone, beside the bookies, each of which is one by itself.

    With a command after it, it runs that instead. In a secured cluster it has a bookie's certificate. Its settings are
    those of `repair` in the file's [bookie] section.

    \b
    Examples:
      magnetar repair status
      magnetar repair --metadata metadata:7640 --bytes-per-s 0
    """
    if context.invoked_subcommand is not None:
        return 0
    tree = metadata_address(metadata_, security)

    async def main(world: World) -> None:
        from msgspec.structs import replace

        from ...bookie.repair import RepairKeeper
        from ...bookie.server import BookieConfig
        from ...runtime.config import load
        from ...runtime.lifecycle import Parts
        from ...runtime.supervisor import Supervisor

        settings = load(BookieConfig, "bookie", file=config, overrides={"data": "-"}).repair
        settings = replace(settings, enabled=True)
        if bytes_per_s is not None:
            settings = replace(settings, bytes_per_s=bytes_per_s)
        world = as_member(world, security, "bookie")
        async with Parts(world.clock) as parts:
            sessions = [await parts.start("metadata", connect(world, tree, wait_s, session_s), disconnect)]

            async def renew() -> None:
                while True:
                    await sessions[-1].wait_session_lost()
                    sessions.append(await connect(world, tree, wait_s, session_s))
                    await sessions.pop(0).close()

            serving = await join(parts, world, security, "bookie", lambda: connect(world, tree, wait_s, session_s))
            keeper = RepairKeeper(serving, lambda: sessions[-1], settings, name or world.rng.randbytes(4).hex(), 1.0)

            async def started() -> Supervisor:
                background = Supervisor()
                background.keep("repair", keeper.keep)
                background.keep("repair-session", renew)
                return background

            await parts.start("repair", started(), Supervisor.close)
            ready(f"repair://{keeper.name}", metadata=tree)
            await serve_for_ever()

    return serve(main, log_level, log_format)


@click.command()
@operating
def status(session: Session) -> None:
    """Auto-recovery now: who is the auditor, how many ledgers miss copies and why, the workers, the time to go.

    \b
    Examples:
      magnetar repair status
      magnetar repair status -o json
    """
    found = ask_any(session, "repair-status")
    if session.out.json:
        session.out.document(found)
        return
    shown = {name: found[name] for name in ("enabled", "auditor", "underReplicated")}
    for name in ("reasons", "stuck"):
        shown[name] = [f"{count} {what}" for what, count in found[name].items()] or None
    session.out.record(
        shown | {
            "bytesLeft": found["bytesLeft"], "bytesPerSecond": found["bytesPerSecond"],
            "timeToGo": span(found["secondsToGo"]),
        }
    )  # fmt: skip
    click.echo()
    rows = [
        worker | {
            "workingOn": [
                f"{ledger}: {100 * done // max(total, 1)} %" for ledger, (done, total) in worker["workingOn"].items()
            ],
            "name": short([worker["name"]])[0],
        }
        for worker in found["workers"]
    ]  # fmt: skip
    session.out.rows(rows, WORKER_COLUMNS, empty="no worker has done anything yet")


@click.command()
@operating
def enable(session: Session) -> None:
    """Let missing copies be looked for and made again, by the whole cluster.

    Example: magnetar repair enable
    """
    ask_any(session, "repair-enable", on=True)
    session.out.done("auto-recovery is on", enabled=True)


@click.command()
@operating
def disable(session: Session) -> None:
    """Leave missing copies missing, for maintenance in which bookies are away for longer than the grace.

    Nothing is marked or copied until 'magnetar repair enable'; copies in progress are dropped within seconds.

    Example: magnetar repair disable
    """
    ask_any(session, "repair-enable", on=False)
    session.out.done("auto-recovery is off until 'magnetar repair enable'", enabled=False)
