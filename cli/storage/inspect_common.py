"""The common part of the commands of `magnetar bookie inspect`: a directory to read, an output, and the count of
damage.

A damaged place is a row like the others with its reason under `damage`; the exit code is then 1, and stderr names the
first one. Files that a running bookie removed meanwhile are named on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import islice
from os.path import basename
from typing import TYPE_CHECKING, Any

import click

from ..common.exits import FAILED, Failure
from ..common.output import Output, Row

if TYPE_CHECKING:
    from ...bookie.inspect.snapshot import Damage, Gone, Snapshot


class Look:
    """A command's reading of a directory: its output, and the damage found."""

    def __init__(self, directory: str, output: str, limit: int | None = None) -> None:
        from ...bookie.inspect.snapshot import take
        from ...runtime.process import real_world

        self.out = Output(output)
        self.snapshot: Snapshot = take(real_world().files, directory)
        self.limit = limit
        self._first: Damage | None = None
        self.damages = 0
        for damage in self.snapshot.damages:
            self.damaged(damage)

    def damaged(self, damage: Damage) -> str:
        """Counts a damage; returns its reason."""
        self._first = self._first or damage
        self.damages += 1
        return damage.reason

    def gone(self, gone: Gone) -> None:
        print(f"magnetar: {gone.path} is gone: the bookie removed it meanwhile", file=sys.stderr)

    def limited(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yields at most `limit` rows; reports when there are more."""
        each = iter(rows)
        yield from islice(each, self.limit)
        if self.limit is not None and next(each, None) is not None:
            print(f"magnetar: stopped after {self.limit} rows (--limit)", file=sys.stderr)

    def finish(self) -> None:
        if self._first is not None:
            path, offset, reason = self._first
            more = "" if self.damages == 1 else f" (the first of {self.damages} damaged places)"
            raise Failure(f"{path}: damaged at offset {offset}: {reason}{more}", FAILED)


def inspecting(function: Callable[..., None]) -> Callable[..., None]:
    """Adds DIR, -o and --limit; gives the command its Look first, and exits with 1 when damage was found."""

    @click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
    @click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
    @wraps(function)
    def command(directory: str, output: str, limit: int | None = None, **options: Any) -> None:
        look = Look(directory, output, limit)
        function(look, **options)
        look.finish()

    return command


def filters() -> Callable[[Any], Any]:
    """Adds the options --number, --ledger, --entry, --from, --to, --limit."""
    options = [
        click.option("--number", type=click.IntRange(0), default=None, help="Only the file of this number."),
        click.option("--ledger", type=click.IntRange(0), default=None, help="Only this ledger."),
        click.option("--entry", type=click.IntRange(0), default=None, help="Only this entry."),
        click.option("--from", "start", type=click.IntRange(0), default=0, help="From this offset in the file."),
        click.option("--to", "stop", type=click.IntRange(0), default=None, help="Up to this offset in the file."),
        click.option("--limit", type=click.IntRange(1), default=None, help="At most so many rows."),
    ]

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def damage_row(look: Look, kind: str, number: int, damage: Damage) -> Row:
    return {kind: number, "file": basename(damage.path), "offset": damage.offset, "damage": look.damaged(damage)}
