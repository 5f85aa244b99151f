"""`magnetar metadata rebuild`: the tree of a cluster whose metadata is lost, made again from its stopped bookies."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..common.exits import FAILED, CommandFailure
from ..common.output import OUTPUT_OPTION, CommandOutput, OutputRow
from ..run.servers import METADATA_HELP
from .admin_port import SECURITY_OPTION, resolve_context_option
from .metadata_transfer import call_with_store

if TYPE_CHECKING:
    from ...metadata.rebuild_core import BookieHoldings, RebuildPlan
    from ...metadata.store import MetadataStore

SHOWN_MAX = 20
"""Lines of each list of what is not as it was; `-o json` has all of them."""


@click.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
    help=METADATA_HELP, callback=resolve_context_option,
)  # fmt: skip
@click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), help="Only write what SOURCE holds to this file."
)
@click.option("--dry-run", is_flag=True, help="Show what would be written, and write nothing.")
@click.option("--without", multiple=True, metavar="BOOKIE", help="Go on without this bookie, which is lost.")
@SECURITY_OPTION
@OUTPUT_OPTION
def rebuild(
    sources: tuple[Path, ...], metadata_: str, save: Path | None, dry_run: bool, without: tuple[str, ...],
    security: str | None, output: str,
) -> None:  # fmt: skip
    """Make the tree again from what bookies hold, when all metadata and all copies of it are lost.

    SOURCE is the data directory of a bookie, or a file that --save wrote on the machine of a bookie. Name all bookies.
    All processes are stopped but the metadata service at --metadata, whose tree is empty. Topics come back with all
    that was acknowledged; policies, permissions, schemas and schedules do not.

    Exit code 0: written, or it would be. 1: refused; nothing was written.

    \b
    Examples:
      magnetar metadata rebuild /var/lib/magnetar/bookie --save bookie-3.holdings
      magnetar metadata rebuild bookie-1.holdings bookie-2.holdings bookie-3.holdings --dry-run
      magnetar metadata rebuild bookie-1.holdings bookie-2.holdings bookie-3.holdings --metadata 127.0.0.1:7640
    """
    from ...bookie.holdings import encode_holdings
    from ...metadata.rebuild_core import plan_rebuild
    from ...runtime.process import make_system_world

    if save is not None and len(sources) > 1:
        raise click.UsageError("--save takes one directory")
    read = [_read(source) for source in sources]
    for bookie in read:
        for damage in bookie.damages:
            print(f"magnetar: {damage}", file=sys.stderr)
    if save is not None:
        _save(save, encode_holdings(read[0]))
        _show_saved(CommandOutput(output), read[0], save)
        return
    plan = plan_rebuild(read, now_ms=make_system_world().clock.wall_ms())
    _show(CommandOutput(output), read, plan, dry_run)
    silent = sorted(plan.silent.keys() - set(without))
    if silent:
        named = ", ".join(f"{bookie} ({plan.silent[bookie]} ledgers)" for bookie in silent)
        raise CommandFailure(
            f"these bookies have ledgers and were not read: {named}. Name their directories too; for one whose data is "
            "lost say --without BOOKIE. Nothing was written", FAILED,
        )  # fmt: skip
    if not dry_run:
        asyncio.run(call_with_store(metadata_, security, lambda store: _write(store, plan)))


def _read(source: Path) -> BookieHoldings:
    from ...bookie.holdings import decode_holdings, read_holdings
    from ...bookie.store.identity import COOKIE_FILE, lock_directory
    from ...runtime.process import make_system_world

    if source.is_file():
        return decode_holdings(source.read_bytes(), str(source))
    files, directory = make_system_world().files, str(source.absolute())
    lock = lock_directory(files, directory) if (source / COOKIE_FILE).exists() else None  # else it is not a bookie's
    try:
        return read_holdings(files, directory)
    finally:
        if lock is not None:
            lock.close()


def _save(file: Path, data: bytes) -> None:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise click.UsageError(f"{file} cannot be made: {error.strerror}") from error
    with open(descriptor, "wb") as target:
        target.write(data)
        target.flush()
        os.fsync(target.fileno())


async def _write(store: MetadataStore, plan: RebuildPlan) -> None:
    from ...metadata.records import CLUSTER_FORMAT, encode_record
    from ...metadata.store import NODE_ABSENT, PutNode
    from ...metadata.transfer import import_tree

    await import_tree(store, [
        PutNode(path, encode_record(record, path, cluster_format=CLUSTER_FORMAT), NODE_ABSENT)
        for path, record in plan.records
    ])  # fmt: skip


# ------------------------------------------------------------------------------------------------------ output
def _show_saved(out: CommandOutput, bookie: BookieHoldings, file: Path) -> None:
    row = _bookie_row(bookie)
    out.print_rows([{"file": str(file), **row}], ("file", *row))


def _bookie_row(bookie: BookieHoldings) -> OutputRow:
    return {
        "bookie": bookie.bookie, "place": bookie.place, "ledgers": len(bookie.ledgers),
        "labelled": sum(held.label is not None for held in bookie.ledgers), "damaged": len(bookie.damages),
    }  # fmt: skip


def _show(out: CommandOutput, read: Sequence[BookieHoldings], plan: RebuildPlan, dry_run: bool) -> None:
    reasons: dict[str, list[int]] = {}
    for ledger, reason in plan.left_out.items():
        reasons.setdefault(reason.value, []).append(ledger)
    thin = [each._asdict() for each in plan.thin]
    if out.is_structured:
        out.print_document({
            "cluster": plan.instance, "dryRun": dry_run, "bookies": [_bookie_row(each) for each in read],
            "nodes": len(plan.records), "topics": plan.topics, "cursors": plan.cursors, "nextLedger": plan.next_ledger,
            "leftOut": reasons, "thin": thin, "silent": plan.silent,
        })  # fmt: skip
        return
    rows = [_bookie_row(each) for each in read]
    out.print_rows(rows, tuple(rows[0]))
    print()
    out.print_record({
        "cluster": plan.instance, "nodes": len(plan.records), "topics": len(plan.topics),
        "ledgers": sum(plan.topics.values()), "cursors": plan.cursors, "leftOut": len(plan.left_out),
        "thin": len(plan.thin), "nextLedger": plan.next_ledger,
    })  # fmt: skip
    for why, ledgers in reasons.items():
        more = ", …" if len(ledgers) > SHOWN_MAX else ""
        print(f"\nleft out ({len(ledgers)}), because {why}:\n  {', '.join(map(str, ledgers[:SHOWN_MAX]))}{more}")
    if thin:
        print("\nledgers of which bookies hold fewer copies than an ack quorum:")
        out.print_rows(thin[:SHOWN_MAX], tuple(thin[0]))
