"""`magnetar brokers …` and `magnetar bookies …`: who is there."""

from __future__ import annotations

import click

from .lazy import Lazy, LazyGroup
from .session import Session, connected

brokers = LazyGroup(
    "brokers",
    {"list": Lazy(".cluster", "list_brokers", "Brokers and how many topics they own.")},
    help="Brokers of the cluster.\n\nExample: magnetar brokers list",
)
bookies = LazyGroup(
    "bookies",
    {
        "list": Lazy(".cluster", "list_bookies", "Bookies, their disk, whether they take entries."),
        "state": Lazy(".bookie_gc", "state", "What each says of itself: disk, limbo, scrubber, garbage collection."),
        "accept-loss": Lazy(".bookie_gc", "accept_loss", "Let one leave limbo with what nobody has any more."),
        "gc": Lazy(".bookie_gc", "gc", "Garbage collection: what would be done (--plan), or do it (--now)."),
        "racks": Lazy(".bookie_racks", "racks", "Where bookies stand, as the metadata says."),
        "set-rack": Lazy(".bookie_racks", "set_rack", "Say where one stands, above what it says itself."),
        "delete-rack": Lazy(".bookie_racks", "delete_rack", "… and go back to what it says itself."),
        "forget": Lazy(".bookie_identity", "forget", "A bookie's data is lost for good: its place may be taken."),
        "move": Lazy(".bookie_identity", "move", "A bookie's directory stands at another place now."),
        "accept-metadata": Lazy(".bookie_identity", "accept_metadata", "Start on metadata older than the directory."),
    },
    {"list-bookies": "list"},
    help="Bookies of the cluster.\n\nExample: magnetar bookies list",
)


@click.command("list")
@connected
def list_brokers(session: Session) -> None:
    """Brokers and how many topics each owns.

    Example: magnetar brokers list -o json
    """
    from ..proto import wire_pb2 as wire

    found = session.call("ListBrokers", wire.Empty()).brokers
    rows = [{"name": broker.name, "endpoint": broker.endpoint, "topics": broker.topics} for broker in found]
    session.out.rows(rows, ("name", "endpoint", "topics"), empty="no brokers")


@click.command("list")
@connected
def list_bookies(session: Session) -> None:
    """Bookies that are registered now, with their disks.

    Example: magnetar bookies list -o json
    """
    from ..proto import wire_pb2 as wire

    rows = [
        {
            "id": bookie.id,
            "endpoint": bookie.endpoint,
            "readOnly": bookie.read_only,
            "rack": bookie.rack,
            "freeBytes": bookie.free_bytes,
            "totalBytes": bookie.total_bytes,
        }
        for bookie in session.call("ListBookies", wire.Empty()).bookies
    ]
    columns = ("id", "endpoint", "readOnly", "rack", "freeBytes", "totalBytes")
    session.out.rows(rows, columns, empty="no bookies")
