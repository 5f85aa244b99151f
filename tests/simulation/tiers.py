"""Which tier a seed belongs to, and how it is run."""

from collections.abc import Callable

from tests.simulation.options import Options, draw
from tests.simulation.protocol import options as protocol_options
from tests.simulation.protocol.run import run_protocol
from tests.simulation.run import Outcome, run_seed

CLUSTER_EVERY = 25
"""Of the seeds: a whole cluster costs about a hundred times as much."""

SECURED = "secured"
"""The tier of whole clusters that are all secured; a share of the seeds is so in any case (options.py)."""
TRANSACTIONS = "transactions"
"""The tier of whole clusters whose clients all run transactions; a share of the seeds does so in any case."""

FILTERED = "filtered"
"""The tier of whole clusters that all have a filtered subscription and a schedule; a share of the seeds has so."""

INSIDE = "inside"
"""The tier of whole clusters whose brokers all share processes with bookies; a share of the seeds does so anyway."""


def tier_of(seed: int, wanted: str = "both") -> str:
    if wanted != "both":
        return wanted
    return "cluster" if seed % CLUSTER_EVERY == 0 else "protocol"


def drawn_for(tier: str, seed: int) -> Options:
    """Of a whole cluster, as the tier wants it."""
    secured, transactions, inside = (True if tier == each else None for each in (SECURED, TRANSACTIONS, INSIDE))
    return draw(seed, secured=secured, transactions=transactions, inside=inside, filtered=tier == FILTERED)


def run_any(tier: str, seed: int, show: Callable[[str], None] | None = None, details: bool = False) -> Outcome:
    wanted = tier_of(seed, tier)
    if wanted in ("cluster", SECURED, TRANSACTIONS, FILTERED, INSIDE):
        drawn = drawn_for(wanted, seed)
        outcome = run_seed(seed, show=show, details=details, change=lambda _: drawn)
        outcome.tier = wanted
        return outcome
    if show is not None:
        show(f"options {protocol_options.draw(seed).describe()}")
    found = run_protocol(seed, show=show)
    return Outcome(
        seed, "protocol", found.failures, found.trace_hash, found.seconds, found.virtual_seconds, found.steps,
        found.figures, tier="protocol",
    )  # fmt: skip
