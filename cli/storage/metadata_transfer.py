"""`magnetar metadata export|import`: the tree of a stopped cluster as a file, and from it into another store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from ..common.output import OUTPUT_OPTION, CommandOutput
from ..run.servers import METADATA_HELP
from .admin_port import OPERATOR_ROLE, SECURITY_OPTION, SESSION_TIMEOUT_S, resolve_context_option

if TYPE_CHECKING:
    from ...metadata.store import MetadataStore

T = TypeVar("T")

_METADATA = click.option(
    "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
    help=METADATA_HELP, callback=resolve_context_option,
)  # fmt: skip


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@_METADATA
@SECURITY_OPTION
@OUTPUT_OPTION
def export(file: Path, metadata_: str, security: str | None, output: str) -> None:
    """Write the tree of a stopped cluster to a file, to move it to another metadata store.

    FILE is new; it has a line of JSON for each node. Brokers and bookies are stopped. What ends with a session, such
    as a registration, is left out.

    Example: magnetar metadata export tree.jsonl --metadata 127.0.0.1:7640
    """
    from ...metadata.transfer import export_tree

    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise click.UsageError(f"{file} cannot be made: {error.strerror}") from error
    try:
        with open(descriptor, "wb") as target:
            lines = asyncio.run(call_with_store(metadata_, security, export_tree))
            target.write(b"".join(line + b"\n" for line in lines))
            target.flush()
            os.fsync(target.fileno())
    except BaseException:
        file.unlink()
        raise
    CommandOutput(output).print_rows([{"file": str(file), "nodes": len(lines) - 1}], ("file", "nodes"))


@click.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_METADATA
@SECURITY_OPTION
@OUTPUT_OPTION
def import_(file: Path, metadata_: str, security: str | None, output: str) -> None:
    """Write an exported tree into an empty metadata store.

    The store at --metadata must be empty; after a failure empty it and begin again. Then accept it for each bookie with
    magnetar bookies accept-metadata, and start the cluster on it.

    Example: magnetar metadata import tree.jsonl --metadata etcd://etcd1:2379,etcd2:2379/magnetar
    """
    from ...metadata.transfer import import_tree, parse_export

    head, puts = parse_export(file.read_bytes().splitlines(), str(file))
    asyncio.run(call_with_store(metadata_, security, lambda store: import_tree(store, puts)))
    CommandOutput(output).print_rows([{"cluster": head.cluster, "nodes": len(puts)}], ("cluster", "nodes"))


async def call_with_store(metadata: str, security: str | None, work: Callable[[MetadataStore], Awaitable[T]]) -> T:
    """Calls `work` with a session of the metadata, as an operator of the cluster if there is a security file."""
    from ...metadata.remote import connect_metadata_at
    from ...runtime.process import make_system_world
    from ..run.servers import make_member_world, parse_metadata_address

    world = make_member_world(make_system_world(), security, OPERATOR_ROLE)
    store = await connect_metadata_at(world, parse_metadata_address(metadata, security), SESSION_TIMEOUT_S)
    try:
        return await work(store)
    finally:
        await store.close()
