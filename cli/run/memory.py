"""The memory of a process: `memory_bytes` is shared out to what runs in it, before that starts.

    plan = planned(config, option, broker=settings)       InvalidConfiguration: it cannot be shared out
    settings = plan.applied(settings, "broker")           as runtime/memory/shares.py says
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...bookie.server import BookieConfig
    from ...broker.common.config import BrokerConfig
    from ...runtime.memory.shares import Plan, Share

_LOG = logging.getLogger("magnetar")

STANDALONE_BYTES = 256 << 20
"""Memory of the broker and of each bookie of a standalone server, at most, when nothing is set: others are on its
machine."""
DERIVED = frozenset({"broker.client_memory_bytes", "broker.state_memory_bytes"})
"""Settings whose value 0 asks for the share."""


def planned(
    file: str | None, option: int | None, *, broker: BrokerConfig | None = None, bookie: BookieConfig | None = None,
    bookies: int = 1, metadata: bool = False, most: int | None = None, processes: int = 1,
) -> Plan:  # fmt: skip
    """Plans the memory of a process with these parts, as they are loaded from `file` and the environment; it is one of
    so many `processes` that have the memory together, equal parts of it."""
    from ...runtime import process
    from ...runtime.config import chosen, value_of
    from ...runtime.memory.settings import memory_of
    from ...runtime.memory.shares import NO_LIMIT, plan

    shares: list[Share] = []
    given: dict[str, int] = {}
    if broker is not None:
        from ...broker.common.memory import SHARES as OF_BROKER

        shares += OF_BROKER
    if bookie is not None:
        from ...bookie.memory import SHARES as OF_BOOKIE

        shares += [each.times(bookies) for each in OF_BOOKIE]
    if metadata:
        from ...metadata.core.memory import SHARES as OF_METADATA

        shares += OF_METADATA
    for section, config in (("broker", broker), ("bookie", bookie)):
        for name in chosen(type(config), section, file=file) if config is not None else ():
            value, setting = value_of(config, name) if config is not None else None, f"{section}.{name}"
            if any(each.setting == setting for each in shares) and (value or setting not in DERIVED):
                assert isinstance(value, int), "what is shared out are numbers"
                given[setting] = value
    budget = memory_of(file, option, shares, given, NO_LIMIT if most is None else most, processes)
    found = plan(budget, shares, given)
    process.trim_above(budget // 8)
    told = ", ".join(f"{name} {limit >> 20}" for name, limit in found.limits.items())
    _LOG.info("memory_bytes: %d MiB (%s)", budget >> 20, told)
    return found
