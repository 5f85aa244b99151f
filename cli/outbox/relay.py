"""`magnetar outbox relay`: the relay of a shard as a process. One line `ready NAME` when it has its shard, then its
state every `--report` seconds; SIGTERM and Ctrl-C end it in order."""

from __future__ import annotations

import json
import signal
import threading
from typing import TYPE_CHECKING, Any

import click

from ..common.session import Session, connected
from ..common.units import Real
from .database import Database, with_database

if TYPE_CHECKING:
    from ...client.outbox import Relay

READY_POLL_S = 1.0


@click.command()
@click.option("--shard", type=click.IntRange(0), default=0, show_default=True, help="The shard to relay.")
@click.option("--shards", type=click.IntRange(1), default=1, show_default=True, help="How many there are.")
@click.option("--name", default=None, help="Of the outbox: a part of the producers' name (default: the database's).")
@click.option("--standby", is_flag=True, help="Wait while another relay has the shard, and take over when it is gone.")
@click.option(
    "--atomic", is_flag=True, help="Send what one transaction of the application wrote in one transaction; one shard."
)
@click.option("--until-empty", is_flag=True, help="End when no row waits or is claimed.")
@click.option("--report", type=Real(0.1), default=10.0, show_default=True, help="Seconds between reports.")
@with_database
@connected
def relay(
    session: Session, database: Database, shard: int, shards: int, name: str | None, standby: bool, atomic: bool,
    until_empty: bool, report: float,
) -> None:  # fmt: skip
    """Send the rows of a shard to their topics, each exactly once, until it is stopped.

    One relay per shard: a newer one fences the older, which ends with exit code 5. It waits for a database or a broker
    that is away, as long as it takes.

    \b
    Examples:
      magnetar outbox relay --database postgresql+psycopg://shop@localhost/shop
      magnetar outbox relay --database sqlite:///shop.db --until-empty
      magnetar outbox relay --database sqlite:///shop.db --atomic
      magnetar outbox relay --shard 1 --shards 4 --standby --report 60 -o json
    """
    from ...client.outbox import Relay
    from ...runtime.monitoring.logs import configure

    if shard >= shards:
        raise click.UsageError(f"--shard {shard} of --shards {shards}: shards count from 0")
    if atomic and shards > 1:
        raise click.UsageError("an atomic relay is alone: --atomic goes with --shards 1")
    configure()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    client = session.client()
    try:
        running = Relay(
            client, database.engine, database.outbox, shard, shards, name=name, standby=standby, atomic=atomic
        ).start()
        try:
            _report(running, session, stopped, report, until_empty)
        finally:
            running.stop()
        if running.error is not None:
            raise running.error
        if not session.out.json:
            print(_line(running), flush=True)
    finally:
        client.close()


def _report(running: Relay, session: Session, stopped: threading.Event, every_s: float, until_empty: bool) -> None:
    while not running.wait_ready(READY_POLL_S):
        if stopped.is_set():
            return
    if running.error is None and not session.out.json:
        print(f"ready {running.name}", flush=True)
    wait_s = min(every_s, 0.2) if until_empty else every_s
    while running.error is None and not stopped.wait(wait_s):
        if until_empty:
            if _is_empty(running):
                return
            continue
        print(json.dumps(_record(running)) if session.out.json else _line(running), flush=True)


def _is_empty(running: Relay) -> bool:
    from ...client.outbox.errors import OutboxUnreachable

    try:
        lag = running.lag()
    except OutboxUnreachable:
        return False
    return lag.waiting + lag.claimed + lag.held == 0


def _record(running: Relay) -> dict[str, Any]:
    from ...client.outbox.errors import OutboxUnreachable

    record = running.statistics()
    try:
        record["lag"] = running.lag()._asdict()
    except OutboxUnreachable as error:
        record["lag"] = None
        record["trouble"] = error.message
    return record


def _line(running: Relay) -> str:
    record = _record(running)
    lag = record["lag"]
    text = f"{record['name']}: {record['phase']}, {record['stored_rows']:,} rows stored"
    if lag is not None:
        text += f"; lag {lag['waiting'] + lag['claimed'] + lag['held']:,} rows, {lag['oldest_s']:.1f} s"
        text += f"; parked {lag['parked']:,}"
    waits = "; ".join(f"{where}: {why}" for where, why in record["waits"].items())
    return "; waits: ".join(each for each in (text, record["trouble"] or waits) if each)
