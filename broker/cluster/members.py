"""The brokers and bookies of the cluster as the metadata lists them, or, while it does not answer, as it did last.

    found = await members.read(store)       after METADATA_S at most
    found.away_ms                           0, or when the metadata answered last: the lists are as of then, or older

For what an operator is shown, which is wanted most while the metadata is away. A broker reads the lists once in
MEMBERS_S, so that it knows them before it is asked. Nothing is decided by them: who owns, and where ledgers are made,
asks the metadata itself. Guarding tests: tests/broker/session/test_summaries.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

from ...metadata.records import BookieRecord, BrokerRecord
from ...metadata.session import MetadataUse
from ...metadata.store import MetadataStore
from ...proto.errors import MagnetarError
from ...runtime.clock import Clock
from .ownership import list_bookies, list_brokers

_LOG = logging.getLogger("magnetar.broker")

METADATA_S = 2.0
"""Seconds to wait for the lists: a thousand records take one."""
MEMBERS_S = 60.0
"""Seconds between two readings by a broker that is not asked: of 100 brokers and 100 bookies, 350 reads a second."""


class ClusterMembers(NamedTuple):
    """The registered brokers and bookies. `away_ms`: milliseconds since the epoch, see above."""

    brokers: tuple[BrokerRecord, ...] = ()
    bookies: tuple[BookieRecord, ...] = ()
    away_ms: int = 0


class KnownMembers:
    """The lists of one broker, over all its metadata sessions."""

    def __init__(self, clock: Clock, use: MetadataUse) -> None:
        self._clock = clock
        self._use = use
        self._last = ClusterMembers()

    async def read(self, store: MetadataStore | None) -> ClusterMembers:
        """Returns the lists; the last ones if they cannot be read in time. `store`: None while there is no session."""
        try:
            if store is not None:
                async with asyncio.timeout(METADATA_S):
                    brokers, bookies = await list_brokers(store), await list_bookies(store)
                self._last = ClusterMembers(tuple(brokers), tuple(bookies))
                return self._last
        except (MagnetarError, TimeoutError) as error:
            _LOG.debug("the lists of brokers and bookies are not read: %s", error or "too slow")
        return self._last._replace(away_ms=max(1, self._clock.wall_ms() - round(1000 * self._use.silent_s)))
