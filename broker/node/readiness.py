"""Whether a broker is ready: registered, certain of what it owns, and able to create a ledger, as far as is known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...ledger import LedgerClient
from ...ledger.pending_core import Striping
from ...proto.errors import MagnetarError, NotEnoughBookies
from ...runtime.clock import Clock
from ..common.config import BrokerConfig
from ..log.log_shape_core import allowed_replication_shortfall

_LOG = logging.getLogger("magnetar.broker")

PLACE_S = 1.0
"""Seconds for which the answer whether a ledger can be created is cached, and the longest wait for it."""


class ReadinessCheck:
    """Checks whether one broker is ready. `ledgers` returns None while the broker has no metadata session, or does not
    know which topics it owns."""

    def __init__(self, config: BrokerConfig, clock: Clock, ledgers: Callable[[], LedgerClient | None]) -> None:
        self._config = config
        self._clock = clock
        self._ledgers = ledgers
        self._placed = -PLACE_S, "which bookies there are is not known yet"  # when it was checked, and why not

    async def why_not_ready(self) -> str:
        """Returns why the broker is not ready; "" if it is ready. Checks the bookies at most once per PLACE_S, because
        callers without authentication may call this."""
        ledgers, now_s = self._ledgers(), self._clock.monotonic()
        if ledgers is None:
            return "the broker is not registered now"
        if now_s - self._placed[0] >= PLACE_S:
            self._placed = now_s, self._placed[1]  # others take the answer before
            self._placed = now_s, await self._why_no_place(ledgers)
        return self._placed[1]

    async def _why_no_place(self, ledgers: LedgerClient) -> str:
        config = self._config
        shape = Striping(config.ensemble_size, config.write_quorum, config.ack_quorum)
        try:
            async with asyncio.timeout(PLACE_S):
                await ledgers.check_bookies(
                    shape, shrink=allowed_replication_shortfall(degraded_writes=config.degraded_writes)
                )
        except NotEnoughBookies as error:
            return f"no new ledger can be made: {error.message}; ledgers that are open go on while their bookies answer"
        except (MagnetarError, TimeoutError) as error:
            _LOG.debug("whether a ledger could be made is not known: %r", error)
        return ""
