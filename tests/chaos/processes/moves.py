"""The balance of load in haste, and a judge of the moves that it has logged.

`make_haste` divides each time of the balance by HASTE_TIMES, before the balance is loaded: a broker is judged after six
seconds, and a bundle rests one minute instead of ten. The rule stays the same: a bundle rests after each of its moves,
twice as long as before, and the leader alone knows that; the next leader leaves a bundle at its owner for
BUNDLE_OWNED_S_MIN. A move that begins before is *restless* (`find_restless`). What operators, drains and deaths move is
no move of the balance.
"""

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from magnetar.broker.cluster import balance_core

HASTE = "MAGNETAR_CHAOS_HASTE"
HASTE_TIMES = 10.0
HASTENED = {
    "magnetar.broker.cluster.balance_core": (
        "BALANCE_CHECK_INTERVAL_S", "FAST_HALF_LIFE_S", "SLOW_HALF_LIFE_S", "SILENT_BROKER_FORGOTTEN_S",
        "BUNDLE_OWNED_S_MIN", "MOVED_BUNDLE_REST_S",
    ),
    "magnetar.broker.cluster.bundles_core": ("ASSIGNED_BUNDLE_COUNTS_S",),
    "magnetar.broker.server": ("LOAD_REPORT_INTERVAL_S",),
}  # fmt: skip
LOG_S = 0.1
"""The log's time may differ from the balance's by so much."""
_LINE = re.compile(r"^(\S+) INFO .*magnetar\.broker: (this broker balances the load of brokers|(/\S+) moves from .*)$")


class LoggedMove(NamedTuple):
    """`leader`: a broker and how often it has become the leader; `at_s`: when it began, since the epoch."""

    path: str
    at_s: float
    leader: tuple[str, int]


def make_haste() -> None:
    """In a process of a cluster, before the balance is loaded."""
    assert "magnetar.broker.session.balancing" not in sys.modules, "it has the times already"
    for module, names in HASTENED.items():
        found = importlib.import_module(module)
        for name in names:
            setattr(found, name, getattr(found, name) / HASTE_TIMES)


def read_moves(logs: Iterable[Path]) -> list[LoggedMove]:
    """What brokers have logged as leaders."""
    moves = list[LoggedMove]()
    for log in logs:
        terms = 0
        for found in filter(None, map(_LINE.match, log.read_text(errors="replace").splitlines())):
            if found[3] is None:
                terms += 1
            else:
                moves.append(LoggedMove(found[3], datetime.fromisoformat(found[1]).timestamp(), (log.name, terms)))
    return sorted(moves, key=lambda each: each.at_s)


def count_most(moves: Sequence[LoggedMove]) -> int:
    """The moves of the bundle that moved most."""
    return max(Counter(each.path for each in moves).values(), default=0)


def find_restless(moves: Sequence[LoggedMove]) -> list[str]:
    """Sentences about moves that the balance's own rule does not allow. `moves`: by time."""
    wrong, last, rested = list[str](), dict[str, LoggedMove](), Counter[tuple[str, tuple[str, int]]]()
    for move in moves:
        before = last.get(move.path)
        if before is not None:
            moved = rested[move.path, move.leader]
            least_s = balance_core.BUNDLE_OWNED_S_MIN
            if moved and before.leader == move.leader:
                least_s = balance_core.MOVED_BUNDLE_REST_S * 2 ** min(moved - 1, balance_core.REST_DOUBLED_MAX)
            if (rest_s := move.at_s - before.at_s) < least_s / HASTE_TIMES - LOG_S:
                wrong.append(f"{move.path} moves again after {rest_s:.1f} s of {least_s / HASTE_TIMES:.0f} s")
        last[move.path] = move
        rested[move.path, move.leader] += 1
    return wrong
