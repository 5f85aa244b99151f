"""`magnetar brokers …` and `magnetar bookies …`: who is there."""

from __future__ import annotations

from dataclasses import asdict

import click
from click import option

from ..common.lazy import Lazy, LazyGroup
from ..common.session import Session, verb
from ..storage.operator import operating

brokers = LazyGroup(
    "brokers",
    {"list": Lazy(".admin.cluster", "list_brokers", "Brokers and how many topics they own.")},
    help="Brokers of the cluster.\n\nExample: magnetar brokers list",
)
bookies = LazyGroup(
    "bookies",
    {
        "list": Lazy(".admin.cluster", "list_bookies", "Bookies: state, disk, how many ledgers lie on them."),
        "state": Lazy(".storage.gc", "state", "What each says of itself: disk, limbo, scrubber, garbage collection."),
        "accept-loss": Lazy(".storage.gc", "accept_loss", "Let one leave limbo with entries that are lost for good."),
        "gc": Lazy(".storage.gc", "gc", "Garbage collection: what would be done (--plan), or do it (--now)."),
        "racks": Lazy(".storage.racks", "racks", "Where bookies stand, as the metadata says."),
        "set-rack": Lazy(".storage.racks", "set_rack", "Say where one stands, above what it says itself."),
        "delete-rack": Lazy(".storage.racks", "delete_rack", "… and go back to what it says itself."),
        "decommission": Lazy(".storage.departure", "decommission", "Empty one before it is taken away."),
        "recover": Lazy(".storage.departure", "recover", "Make every copy again that lay on a dead one, now."),
        "forget": Lazy(".storage.identity", "forget", "A bookie's data is lost for good: its place may be taken."),
        "move": Lazy(".storage.identity", "move", "A bookie's directory has moved to another place."),
        "accept-metadata": Lazy(".storage.identity", "accept_metadata", "Start on metadata older than the directory."),
    },
    {"list-bookies": "list"},
    help="Bookies of the cluster.\n\nExample: magnetar bookies list",
)


@verb(name="list")
def list_brokers(session: Session) -> None:
    """Brokers and how many topics each owns; - when it does not answer.

    Example: magnetar brokers list -o json
    """
    rows = [asdict(broker) for broker in session.admin.brokers()]
    session.out.rows(rows, ("name", "endpoint", "topics"), empty="no brokers")


@click.command("list")
@option("--registered", is_flag=True, help="Only those that are registered; asks no bookie.")
@operating
def list_bookies(session: Session, registered: bool) -> None:
    """Bookies: their state, their disks, and how many ledgers name them; also those that are away.

    writable, read-only, limbo (it lost data and looks for it), departing (it is being emptied), absent (not
    registered), forgotten (no cookie any more, and ledgers still name it). The free space is what each bookie says now;
    of one that does not answer, and with --registered, what it registered, a minute ago at most.

    \b
    Examples:
      magnetar bookies list
      magnetar bookies list -o json
    """
    from ...proto.errors import MagnetarError
    from ..common.exits import Failure
    from ..storage.admin_port import answers
    from ..storage.ledgers import ask_any

    known = {
        bookie.id: {
            "id": bookie.id,
            "endpoint": bookie.endpoint,
            "state": "read-only" if bookie.read_only else "writable",
            "readOnly": bookie.read_only,
            "rack": bookie.rack,
            "freeBytes": bookie.free_bytes,
            "totalBytes": bookie.total_bytes,
        }
        for bookie in session.admin.bookies()
    }
    if known and not registered:
        for id_, state in answers(session, "state").items():
            if id_ in known:
                known[id_].update(freeBytes=state["freeBytes"], totalBytes=state["totalBytes"])
        try:
            for each in ask_any(session, "bookies")["bookies"]:
                read_only = each["state"] in ("read-only", "departing")
                known[each["id"]] = {**each, **known.get(each["id"], {}), "state": each["state"], "readOnly": read_only}
        except (MagnetarError, Failure) as error:
            click.echo(f"only what is registered, no bookie answers: {error}", err=True)
    columns = ("id", "endpoint", "state", "rack", "freeBytes", "totalBytes", "ledgers")
    session.out.rows(list(known.values()), columns, empty="no bookies")
