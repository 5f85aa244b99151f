"""`magnetar bookies forget|move|accept-metadata`: what an operator says when a bookie cannot know.

They change the metadata about a bookie that is stopped (bookie/node/identity.py): over the metadata service, or
in the folder of a stopped `magnetar standalone`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..common.output import Output
from ..common.session import YES, confirm
from ..run.servers import METADATA_HELP

if TYPE_CHECKING:
    from ...metadata.records import CookieRecord
    from ...metadata.store import MetadataStore

WAIT_S = 5.0
SESSION_S = 10.0

BOOKIE = click.argument("bookie")


def of_metadata(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --metadata and --data, which say where the metadata is."""

    @click.option(
        "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
        help=METADATA_HELP,
    )  # fmt: skip
    @click.option("--data", type=click.Path(file_okay=False, exists=True), help="Or a stopped standalone's folder.")
    @click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
    @wraps(function)
    def command(*args: Any, **options: Any) -> None:
        function(*args, **options)

    return command


@contextlib.asynccontextmanager
async def metadata_at(where: str, data: str | None) -> AsyncIterator[MetadataStore]:
    from ...runtime.process import real_world
    from ..run.servers import connect, metadata_address

    world = real_world()
    if data is None:
        store: MetadataStore = await connect(world, metadata_address(where), WAIT_S, SESSION_S)
        try:
            yield store
        finally:
            await store.close()
        return
    from ...bookie.node.identity import lock_directory
    from ...metadata.sqlite import SqliteStore

    with contextlib.closing(lock_directory(world.files, data)):
        tree = await SqliteStore.open(world, str(Path(data) / "metadata.sqlite"))
        try:
            yield tree.session()
        finally:
            await tree.close()


def _change(
    metadata: str, data: str | None, output: str, change: Callable[[MetadataStore], Awaitable[CookieRecord]]
) -> None:
    async def run() -> CookieRecord:
        async with metadata_at(metadata, data) as store:
            return await change(store)

    record = asyncio.run(run())
    row = {"bookie": record.bookie, "places": list(record.directories), "starts": record.starts}
    Output(output).rows([row], ("bookie", "places", "starts"))


@click.command()
@BOOKIE
@of_metadata
@YES
def forget(bookie: str, metadata_: str, data: str | None, output: str, yes: bool) -> None:
    """Forget a bookie whose data is lost for good: its place may be taken by a new one.

    BOOKIE is its id. It must be stopped. Its directory, if it is found again, can never start any more.

    Example: magnetar bookies forget 6f9619ff-8b86-4d01-b42d-00cf4fc964ff
    """
    from ...bookie.node import identity

    confirm(f"Forget bookie {bookie}; its directory never starts again", yes)
    _change(metadata_, data, output, lambda store: identity.forget(store, bookie))


@click.command()
@BOOKIE
@click.argument("place")
@of_metadata
def move(bookie: str, place: str, metadata_: str, data: str | None, output: str) -> None:
    """Register that a bookie's directory has moved to another place.

    PLACE is HOST:DIRECTORY as the bookie was given it, or its `place` setting; no copy may be left at the old one.

    Example: magnetar bookies move 6f9619ff-8b86-4d01-b42d-00cf4fc964ff bookie-7:/data
    """
    from ...bookie.node import identity

    _change(metadata_, data, output, lambda store: identity.move(store, bookie, place))


@click.command("accept-metadata")
@BOOKIE
@of_metadata
@YES
def accept_metadata(bookie: str, metadata_: str, data: str | None, output: str, yes: bool) -> None:
    """Let a bookie start on metadata that was restored from a backup older than its directory.

    Example: magnetar bookies accept-metadata 6f9619ff-8b86-4d01-b42d-00cf4fc964ff
    """
    from ...bookie.node import identity

    confirm("What this metadata does not know of ledgers is kept, and cannot be read. Go on", yes)
    _change(metadata_, data, output, lambda store: identity.accept_metadata(store, bookie))
