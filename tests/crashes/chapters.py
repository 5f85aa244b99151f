"""Chapters of the workload about facts of the store itself: limbo entered and left, entries quarantined and mended.

Each says what is about to change before it does, and that it has changed when the store says so: limbo when the start
that entered it serves, and when `leave_limbo` returns; quarantine and its end when a checkpoint returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.bookie.store import disk as store_disk
from magnetar.bookie.store.state_log import RecordedDirectoryState
from magnetar.ledger.peer_format import Status
from magnetar.runtime.sim.world import NodeCrashed
from tests.bookie.stores import NODE
from tests.crashes.facts import Kind

if TYPE_CHECKING:
    from tests.crashes.workload import Life

LOSS = "a loss that others know of"


async def limbo(life: Life) -> None:
    """A start that is told of a loss; then all goes on, with another start in limbo perhaps, and limbo is left."""
    await _end(life)
    upto = life.fenced_upto = life.first + life.rng.randrange(3)
    life.fact(Kind.LIMBO_ENTERING, upto)

    async def known_upto() -> int:
        return upto

    await life.open(RecordedDirectoryState(losses=(LOSS,), upto=known_upto))
    life.fact(Kind.LIMBO_ENTERED, upto)
    await life.turns(3)
    if life.rng.random() < 0.5:
        await _end(life)
        await life.open()
        if life.store.descriptors.limbo_upto != upto:
            life.complain("a restart forgot limbo")
    life.start(_leave(life, upto))
    for _ in range(2):
        life.add_something()
    await life.settle()


async def _end(life: Life) -> None:
    if life.rng.random() < 0.5:
        await life.simulation.spawn(NODE, life.store.close())
    life.simulation.crash(NODE)
    await life.settle()


async def _leave(life: Life, upto: int) -> None:
    life.fact(Kind.LIMBO_LEAVING, upto)
    try:
        await life.store.leave_limbo()
    except store_disk.NoSpace as error:
        life.complain(f"no room to leave limbo: {error}")
    life.fact(Kind.LIMBO_LEFT, upto)


async def quarantine(life: Life) -> None:
    """An entry that was never stored whole; later a good copy comes, by recovery or from its writer."""
    ledger = life.ledger()
    entry = 2 + max(life.sent.get(ledger, {}), default=-1)
    life.start(_quarantine(life, ledger, entry))
    life.add_something()
    await life.settle()
    await life.turns(2)
    if life.rng.random() < 0.5:
        await life.restarted()
    life.start(_mend(life, ledger, entry))
    life.add_something()
    await life.settle()


async def _quarantine(life: Life, ledger: int, entry: int) -> None:
    life.fact(Kind.QUARANTINING, ledger, entry)
    life.store.descriptors.quarantine(ledger, entry, entry)
    if await _checkpoint(life):
        life.fact(Kind.QUARANTINED, ledger, entry)


async def _mend(life: Life, ledger: int, entry: int) -> None:
    await life.add(ledger, entry, True)
    if (await life.store.read_entries(ledger, entry)).status is Status.OK and await _checkpoint(life):
        life.fact(Kind.MENDED, ledger, entry)


async def _checkpoint(life: Life) -> bool:
    try:
        await life.store.checkpoint()
    except (store_disk.NoSpace, NodeCrashed):
        return False
    return True
