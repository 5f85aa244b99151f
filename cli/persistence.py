"""`magnetar namespaces set-persistence|get-persistence|remove-persistence`: how many copies of each entry.

The options have pulsar-admin's names too. A changed policy holds from the next ledger of each topic on, whichever
broker serves it (broker/topic.py); what is written already stays as it is.
"""

from __future__ import annotations

import click

from .session import Session, connected

FIELDS = ("ensemble_size", "write_quorum", "ack_quorum")
NEXT_LEDGER = "holds from each topic's next ledger on; 'magnetar topics unload TOPIC' begins one now"


@click.command("set-persistence")
@click.argument("namespace")
@click.option("-e", "--ensemble", "--bookkeeper-ensemble", type=click.IntRange(1), help="Bookies of a ledger.")
@click.option("-w", "--write-quorum", "--bookkeeper-write-quorum", type=click.IntRange(1), help="Copies of an entry.")
@click.option(
    "-a", "--ack-quorum", "--bookkeeper-ack-quorum", type=click.IntRange(1), help="Copies synced before the ack."
)
@connected
def set_persistence(
    session: Session, namespace: str, ensemble: int | None, write_quorum: int | None, ack_quorum: int | None
) -> None:
    """Set over how many bookies the ledgers of a namespace lie, and how many copies each entry has.

    What is not given stays as it was set before. Warns of what the choice risks.

    Example: magnetar namespaces set-persistence public/default -e 3 -w 3 -a 2
    """
    from ..broker.core.persistence import risks
    from ..proto import wire_pb2 as wire

    given = dict(zip(FIELDS, (ensemble, write_quorum, ack_quorum), strict=True))
    if all(value is None for value in given.values()):
        raise click.UsageError("nothing to set; give -e, -w and -a, as in -e 3 -w 3 -a 2")
    spec = session.call("GetNamespace", wire.Name(name=namespace))
    for field, value in given.items():
        if value is not None:
            setattr(spec, field, value)
    shape = (spec.ensemble_size, spec.write_quorum, spec.ack_quorum)
    if 0 in shape:
        raise click.UsageError(f"{namespace} has no persistence yet: give all of -e, -w and -a, as in -e 3 -w 3 -a 2")
    if not shape[0] >= shape[1] >= shape[2]:
        raise click.UsageError(
            f"ensemble ≥ write quorum ≥ ack quorum must hold, not {shape[0]}, {shape[1]}, {shape[2]}"
        )
    bookies = sum(not each.read_only for each in session.call("ListBookies", wire.Empty()).bookies)
    for risk in risks(*shape, bookies):
        click.echo(f"warning: {risk}", err=True)
    session.call("UpdateNamespace", spec)
    shown = "/".join(map(str, shape))
    session.out.done(
        f"persistence of {namespace} is {shown}; it {NEXT_LEDGER}",
        namespace=namespace, **dict(zip(FIELDS, shape, strict=True)),
    )  # fmt: skip


@click.command("get-persistence")
@click.argument("namespace", default="public/default")
@connected
def get_persistence(session: Session, namespace: str) -> None:
    """Ensemble, write quorum and ack quorum of a namespace; 0: the brokers' default.

    Example: magnetar namespaces get-persistence public/default
    """
    from ..proto import wire_pb2 as wire

    spec = session.call("GetNamespace", wire.Name(name=namespace))
    session.out.record({field: getattr(spec, field) for field in FIELDS})


@click.command("remove-persistence")
@click.argument("namespace")
@connected
def remove_persistence(session: Session, namespace: str) -> None:
    """Go back to the brokers' ensemble, write quorum and ack quorum.

    Example: magnetar namespaces remove-persistence public/default
    """
    from ..proto import wire_pb2 as wire

    spec = session.call("GetNamespace", wire.Name(name=namespace))
    for field in FIELDS:
        setattr(spec, field, 0)
    session.call("UpdateNamespace", spec)
    session.out.done(f"persistence of {namespace} is the brokers' default; it {NEXT_LEDGER}", namespace=namespace)
