"""The parts of `magnetar standalone`, in one process (standalone.py) or in several (standalone_processes.py)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ...bookie.node.registration import NewSession
    from ...bookie.server import Bookie, BookieConfig
    from ...broker.common.config import BrokerConfig
    from ...metadata.store import MetadataStore
    from ...runtime.lifecycle import Parts
    from ...runtime.memory.shares import Plan
    from ...runtime.network import Endpoint
    from ...runtime.world import World

CLUSTER = "standalone"
"""Name of the cluster, as Pulsar's standalone and set-up scripts have it."""


class Given(NamedTuple):
    """The options of the command."""

    folder: Path
    listen: Endpoint
    pulsar: Endpoint | None = None
    http: Endpoint | None = None
    bookies: int | None = None
    config: str | None = None
    metrics: Endpoint | None = None
    compat: str = "none"
    warning: str = ""
    security: str | None = None
    memory_bytes: int | None = None


def broker_settings(given: Given, bookies: int) -> BrokerConfig:
    from ...broker.common.config import BrokerConfig
    from ...runtime.config import load

    copies = min(3, bookies)
    overrides = {
        "listen": str(given.listen), "pulsar_listen": None if given.pulsar is None else str(given.pulsar),
        "http_listen": None if given.http is None else str(given.http),
        "ensemble_size": copies, "write_quorum": copies, "ack_quorum": copies // 2 + 1,
    }  # fmt: skip
    return load(BrokerConfig, "broker", file=given.config, overrides=overrides, defaults={"cluster": CLUSTER})


def count_bookies(folder: Path, wanted: int | None) -> int:
    """Returns how many bookies to start: as many as have data in the folder, or more."""
    from ...proto.errors import InvalidConfiguration

    there = len([path for path in folder.glob("bookie-*") if path.is_dir()])
    if wanted is not None and wanted < there:
        raise InvalidConfiguration(
            f"{folder} has the data of {there} bookies, and ledgers are on all of them: "
            f"--bookies {there} or more, or leave it out"
        )
    return wanted or max(there, 1)


def bookie_settings(given: Given, number: int) -> BookieConfig:
    """Returns the settings of bookie `number`, from 1, in its folder; before the memory is shared out."""
    from ...bookie.server import BookieConfig
    from ...runtime.config import load

    folder = given.folder / f"bookie-{number}"
    own = {"data": str(folder), "place": folder.name, "host": "127.0.0.1", "port": 0}
    return load(BookieConfig, "bookie", file=given.config, overrides=own)


async def start_bookie(
    parts: Parts, world: World, given: Given, number: int, plan: Plan, store: MetadataStore,
    new_session: NewSession | None = None,
) -> Bookie:  # fmt: skip
    """Starts bookie `number`, from 1, in its folder. `new_session`: where a session may be lost."""
    from ...bookie.server import Bookie

    settings = plan.applied(bookie_settings(given, number), "bookie")
    return await parts.start(f"bookie-{number}", Bookie.start(world, settings, store, new_session), Bookie.close)
