"""The risks of a choice of ensemble, write quorum and ack quorum (E, Qw, Qa); reported to the operator who sets it,
never refused.

E ≥ Qw ≥ Qa ≥ 1 is demanded elsewhere (broker/cluster/catalog.py). What is allowed may still be unwise:

- Qa = 1: an entry may be confirmed with one synced copy, and is lost with that disk.
- Qw = Qa: each entry waits for its slowest bookie, and for a replacement when one fails.
- E above the available bookies: ledgers shrink (ledger/core/placement.py `fit`), down to Qw in any case.
- Qw above them: copies are given up, or publishing waits, as the brokers' `degraded_writes` says.
- E = Qw = the available bookies: no other one can replace one that fails.

Guarding test: tests/broker/log/core/test_quorums.py.
"""

from __future__ import annotations

from ....ledger.core.placement import Shrink


def allowed(*, degraded_writes: bool) -> Shrink:
    """Returns what a new ledger may lack while bookies are missing: bookies in any case, copies where that is set."""
    return Shrink.COPIES if degraded_writes else Shrink.BOOKIES


def risks(ensemble: int, write_quorum: int, ack_quorum: int, bookies: int) -> list[str]:
    """Returns the risks of the choice, one sentence each; `bookies` is the number that is writable now."""
    found = []
    if ack_quorum < 2:
        found.append("an ack quorum of 1 confirms with one synced copy: what is confirmed is lost with one disk")
    if write_quorum == ack_quorum and write_quorum > 1:
        found.append(
            f"with a write quorum equal to the ack quorum ({ack_quorum}) each entry waits for its slowest bookie, and "
            "publishing stops at each failure until another bookie has taken the place"
        )
    if write_quorum > bookies:
        found.append(
            f"a write quorum of {write_quorum} needs {write_quorum} bookies and {bookies} are writable: new ledgers "
            f"have {'fewer copies' if bookies >= ack_quorum else 'to wait'}, or publishing waits where "
            "degraded_writes is off"
        )
    elif ensemble > bookies:
        found.append(
            f"an ensemble of {ensemble} needs {ensemble} bookies and {bookies} are writable: new ledgers are made over "
            f"{bookies}"
        )
    elif ensemble == write_quorum == bookies > 1:
        found.append(f"no bookie is left to take the place of one that fails: {bookies} are writable, each is needed")
    return found
