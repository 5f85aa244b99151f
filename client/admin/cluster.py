"""Methods of AdminClient: brokers, and ledgers that no record refers to."""

from __future__ import annotations

import asyncio
from functools import partial

from ...proto import operations as op
from ...proto import statistics as values
from ...proto.errors import MagnetarError
from .caller import Caller

BROKER_ASK_S = 5.0
"""Seconds that one broker may take to report how many topics it has loaded."""


async def brokers(self: Caller) -> list[values.BrokerInfo]:
    """The registered brokers. Each reports its number of loaded topics; None: no answer within 5 s."""
    return await asyncio.gather(*map(partial(_broker, self), await self._all(op.LIST_BROKERS)))


async def _broker(self: Caller, listed: values.BrokerInfo) -> values.BrokerInfo:
    try:
        async with asyncio.timeout(min(BROKER_ASK_S, self._timeout_s)):
            found = await self._transport.call(op.LIST_BROKERS, {}, at=listed.endpoint)
    except (MagnetarError, TimeoutError):
        found = ()
    own = next((each.topics for each in found if each.endpoint == listed.endpoint), None)
    return values.BrokerInfo(listed.name, listed.endpoint, own)


async def find_orphans(self: Caller, *, remove: bool = False, unexplained: bool = False) -> values.Orphans:
    """Returns the orphans. `remove`: they are fenced and deleted now; brokers do it every hour. `unexplained`: also
    those whose owner has no record, which no broker deletes by itself."""
    return await self._call(op.FIND_ORPHANS, remove=remove, unexplained=unexplained)
