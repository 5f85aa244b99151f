"""`magnetar bookies racks|set-rack|delete-rack`: where bookies stand, said in the metadata (`RacksRecord`).

It overrides the `--rack` that a bookie was started with, and every broker uses it at once for its next choice. Ledgers
that are already on bookies stay there. Over the metadata service, or in the folder of a stopped `magnetar standalone`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

import click

from ..common.output import Output
from .identity import BOOKIE, Where, metadata_at, of_metadata

COLUMNS = ("bookie", "rack", "registered")


def _bookie(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise click.UsageError(f"{text!r} is no bookie's id; 'magnetar bookies list' shows them") from None


def _change(metadata: Where, data: str | None, output: str, change: Callable[[dict[str, str]], None] | None) -> None:
    """Changes the mapping if asked to, then shows every bookie that is registered or mapped."""
    from ...metadata import paths
    from ...metadata.records import BookieRecord, RacksRecord
    from ...metadata.update import get_record, update_record

    def changed(found: RacksRecord | None) -> RacksRecord | None:
        mapping = dict(found.racks) if found is not None else {}
        if change is not None:
            change(mapping)
        return RacksRecord(racks=dict(sorted(mapping.items()))) if found is not None or mapping else None

    async def run() -> tuple[dict[str, str], dict[str, str]]:
        async with metadata_at(metadata, data) as store:
            if change is not None:
                await update_record(store, paths.RACKS, RacksRecord, changed)
            mapped = await get_record(store, paths.RACKS, RacksRecord)
            said = {}
            for name in await store.children(paths.BOOKIES):
                record = await get_record(store, paths.bookie(name), BookieRecord)
                if record is not None:
                    said[name] = record[0].rack
            return (dict(mapped[0].racks) if mapped is not None else {}), said

    mapped, said = asyncio.run(run())
    rows = [
        {"bookie": bookie, "rack": mapped.get(bookie) or said[bookie], "registered": said.get(bookie)}
        for bookie in sorted({*mapped, *said})
    ]
    Output(output).rows(rows, COLUMNS, empty="no bookies")


@click.command()
@of_metadata
def racks(metadata_: Where, data: str | None, output: str) -> None:
    """Show where bookies stand; `registered` is what each says itself.

    Example: magnetar bookies racks --metadata 127.0.0.1:7640
    """
    _change(metadata_, data, output, None)


@click.command("set-rack")
@BOOKIE
@click.argument("rack")
@of_metadata
def set_rack(bookie: str, rack: str, metadata_: Where, data: str | None, output: str) -> None:
    """Say where a bookie stands: copies of an entry go to distinct racks.

    RACK is any name, as in /room-1/rack-7; racks with the same name are one.

    Example: magnetar bookies set-rack 6f9619ff-8b86-4d01-b42d-00cf4fc964ff /rack-7
    """
    bookie, rack = _bookie(bookie), rack.strip()
    if not rack:
        raise click.UsageError("a rack has a name; 'magnetar bookies delete-rack' goes back to the bookie's own")
    _change(metadata_, data, output, lambda mapping: mapping.update({bookie: rack}))


@click.command("delete-rack")
@BOOKIE
@of_metadata
def delete_rack(bookie: str, metadata_: Where, data: str | None, output: str) -> None:
    """Go back to the rack that a bookie says itself.

    Example: magnetar bookies delete-rack 6f9619ff-8b86-4d01-b42d-00cf4fc964ff
    """
    bookie = _bookie(bookie)

    def forget(mapping: dict[str, str]) -> None:
        mapping.pop(bookie, None)

    _change(metadata_, data, output, forget)
