"""`magnetar ledgers list|show|under-replicated`: what the metadata says of ledgers and their copies.

Any running bookie answers (bookie/admin/repair_verbs.py): it reads the metadata at the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ..common.lazy import Lazy, LazyGroup
from ..common.session import Session
from .operator import operating

if TYPE_CHECKING:
    from ..common.output import Row

ledgers = LazyGroup(
    "ledgers",
    {
        "list": Lazy(".storage.ledgers", "list_ledgers", "Ledgers: state, quorums, size, bookies, whose they are."),
        "show": Lazy(".storage.ledgers", "show", "One ledger: its fragments, its end, what it misses."),
        "under-replicated": Lazy(
            ".storage.ledgers", "under_replicated", "Ledgers that miss copies, since when and why."
        ),
        "orphans": Lazy(".admin.backlog", "orphans", "Ledgers without a topic or cursor; listed ones that are gone."),
    },
    {"list-under-replicated": "under-replicated"},
    help="Ledgers and their copies.\n\nExample: magnetar ledgers under-replicated",
)

COLUMNS = ("ledger", "state", "quorum", "entries", "bytes", "fragments", "bookies", "owner")
MARK_COLUMNS = ("ledger", "missing", "since", "reason", "attempts", "retry", "stuck", "lastError")


def ask_any(session: Session, verb: str, **options: object) -> dict[str, Any]:
    """Returns the answer of the first registered bookie that can be reached and permits requests from this machine."""
    from ...proto.errors import ConnectionLost, TimedOut, Unauthorized, Unavailable
    from ..common.exits import Failure
    from .admin_port import ask_each, find

    failure: Exception | None = None
    refusal: Unauthorized | None = None
    for peer in find(session, None):
        try:
            (answer,) = ask_each([peer], verb, **options)
            return answer
        except (ConnectionLost, TimedOut, Unavailable) as error:
            failure = error
        except Unauthorized as error:  # another bookie may be on this machine
            refusal = error
    if refusal is not None:
        raise refusal
    raise Failure(f"no bookie answers: {failure}; 'magnetar bookies list' shows those that are registered")


@click.command("list")
@click.option("--bookie", default="", metavar="ID", help="Only those that name this bookie: its whole id.")
@click.option("--state", type=click.Choice(["open", "in-recovery", "closed"]), default=None, help="Only those.")
@click.option("--after", type=click.IntRange(0), default=None, metavar="LEDGER", help="Only those with a greater id.")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="At most so many.")
@operating
def list_ledgers(session: Session, bookie: str, state: str | None, after: int | None, limit: int) -> None:
    """Ledgers in the metadata, by id: state, quorums, size, the bookies that they name, and whose they are.

    \b
    Examples:
      magnetar ledgers list
      magnetar ledgers list --state open -o json
    """
    found = ask_any(
        session, "ledgers", bookie=bookie, state=state or "", after=-1 if after is None else after, limit=limit
    )
    rows = found["ledgers"]
    if session.out.json:
        session.out.rows(rows, COLUMNS)
        return
    session.out.rows([{**row, "bookies": short(row["bookies"])} for row in rows], COLUMNS, empty="no ledgers")
    if found["more"]:
        click.echo(f"There are more: --after {rows[-1]['ledger']}", err=True)


@click.command()
@click.argument("ledger", type=click.IntRange(0))
@operating
def show(session: Session, ledger: int) -> None:
    """One ledger: its fragments with their bookies, its end, and what it misses.

    Example: magnetar ledgers show 17
    """
    found = ask_any(session, "ledger", ledger=ledger)
    if session.out.json:
        session.out.document(found)
        return
    mark = found["underReplicated"]
    record = {name: value for name, value in found.items() if name not in ("ensembles", "underReplicated", "bookies")}
    record["properties"] = [f"{name}={value}" for name, value in found["properties"].items()]
    session.out.record(record | {"missing": None if mark is None else _missing(mark)})
    click.echo()
    session.out.rows(found["ensembles"], ("firstEntry", "bookies"))
    if mark is not None:
        click.echo()
        session.out.rows([_mark_row(mark)], MARK_COLUMNS)


@click.command("under-replicated")
@click.option("--limit", type=click.IntRange(1), default=1000, show_default=True, help="At most so many.")
@operating
def under_replicated(session: Session, limit: int) -> None:
    """Ledgers that miss copies: of whom, since when, why, and what became of the tries to make them.

    A bookie is lost when it is not registered for the grace (`lost_bookie_grace_s`); departing when it is emptied;
    incomplete when it lacks entries; damaged when it says so; returned until its copies were compared.

    \b
    Examples:
      magnetar ledgers under-replicated
      magnetar ledgers under-replicated -o json
    """
    found = ask_any(session, "under-replicated", limit=limit)
    if session.out.json:
        session.out.rows(found["ledgers"], MARK_COLUMNS)
        return
    session.out.rows([_mark_row(mark) for mark in found["ledgers"]], MARK_COLUMNS, empty="every ledger has its copies")
    if found["count"] > len(found["ledgers"]):
        click.echo(f"{found['count']} in all: --limit shows more", err=True)


def short(bookies: list[str]) -> list[str]:
    """The beginnings of ids that are long enough to be unique, and short enough to type."""
    return [bookie[:8] for bookie in bookies]


def span(seconds: float | None) -> str:
    """A duration for people: `42s`, `3m`, `2h 5m`, `4d 1h`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60}m"
    return f"{whole // 86400}d {whole % 86400 // 3600}h"


def _missing(mark: dict[str, Any]) -> list[str]:
    return [f"{bookie[:8]} ({reason})" for bookie, reason in mark["missing"].items()]


def _mark_row(mark: dict[str, Any]) -> Row:
    return {
        **mark, "missing": short(list(mark["missing"])), "since": span(mark["sinceSeconds"]),
        "retry": span(mark["retrySeconds"]) if mark["retrySeconds"] else None,
    }  # fmt: skip
