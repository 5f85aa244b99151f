"""The disk under a bookie: when the bookie stops taking adds of clients, and when it takes them again.

`judge_disk` decides from three facts: how much of the disk is used, whether a write found no room, and the state
before:

| state | when | what it stops |
|---|---|---|
| WRITABLE | | nothing |
| TIGHT | used ≥ `disk_warn_share` | major compaction, which needs room before it gives some |
| FULL | used ≥ `disk_full_share`, or free < the floor; until both are past what `judge_disk` says | adds of clients |
| NO_ROOM | a write found no room, or the reserve was given up and is not filled again | adds of clients |

An operator who empties the bookie (DepartingRecord) makes it read-only as FULL does, until the operator cancels it.
The floor is `free_bytes_min` as it is set, whatever share of the disk that is; unset: FLOOR_BYTES, at most 5 % of the
disk. A bookie leaves FULL below `disk_low_water_share`, with the floor and a tenth of it free. In FULL and NO_ROOM it
is read-only and registers as such. It still takes recovery adds and fences, and writes checkpoints and the ledger
index. Each pass of garbage collection then compacts (garbage.py). When no other room is left, the store gives up its
reserve for this work (bookie/store/headroom.py). The bookie leaves both states by itself. It checks the disk every
`upkeep_interval_s`, and at once when a write finds no room.
Guarded by tests/bookie/test_full_disk.py.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ..proto.errors import MagnetarError
from .registration import Registration
from .store.disk import NoSpace
from .store.store import Store

_LOG = logging.getLogger("magnetar.bookie.node")

FLOOR_BYTES = 256 << 20
SMALL_SHARE = 0.05
"""Share of the disk that a floor which is not set has at most; else it is FLOOR_BYTES."""
LEAVES_SHARE = 1.1
"""Free space at which a full bookie takes adds again, as a multiple of the floor: at 1.0 it would change state at each
check."""


class DiskState(enum.Enum):
    """How full the disk of a bookie is, from WRITABLE to NO_ROOM."""

    WRITABLE = "writable"
    TIGHT = "tight"
    FULL = "full"
    NO_ROOM = "no room"

    @property
    def is_read_only(self) -> bool:
        return self in (DiskState.FULL, DiskState.NO_ROOM)


class DiskLimits(NamedTuple):
    """The limits by which `judge_disk` decides the state of a disk: shares of its size, and bytes."""

    full_share: float
    low_water_share: float
    warn_share: float
    free_bytes_min: int  # -1: not set

    def free_floor_bytes(self, total: int) -> int:
        """Returns the free bytes below which a disk of `total` bytes is FULL."""
        return self.free_bytes_min if self.free_bytes_min >= 0 else min(FLOOR_BYTES, int(total * SMALL_SHARE))


class DiskUsage(NamedTuple):
    """The size of a file system and its free space, in bytes."""

    total: int
    free: int

    @property
    def used_share(self) -> float:
        return 1.0 - self.free / self.total if self.total else 1.0


def judge_disk(usage: DiskUsage, limits: DiskLimits, was: DiskState, *, no_room: bool) -> DiskState:
    """Returns the present state of the disk. `was`: its state before. `no_room`: a write found no room and none has
    succeeded since, or the reserve is missing.
    """
    floor = limits.free_floor_bytes(usage.total) * (LEAVES_SHARE if was.is_read_only else 1.0)
    if no_room:
        return DiskState.NO_ROOM
    if usage.used_share >= limits.full_share or usage.free < floor:
        return DiskState.FULL
    if was.is_read_only and usage.used_share >= limits.low_water_share:
        return DiskState.FULL
    return DiskState.TIGHT if usage.used_share >= limits.warn_share else DiskState.WRITABLE


class DiskMonitor:
    """Owns `state`, the state of the bookie's disk, and checks the disk periodically.

    Each change is passed to `on_read_only` at once, and to the registration when the metadata answers. `note` is called
    at each check, to compare other facts with the metadata.
    """

    def __init__(
        self, store: Store, registration: Registration, limits: DiskLimits, interval_s: float,
        on_read_only: Callable[[bool], None], note: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._store = store
        self._registration = registration
        self._limits = limits
        self._interval_s = interval_s
        self._on_read_only = on_read_only
        self._note = note
        self._asked = asyncio.Event()
        self.state = DiskState.WRITABLE
        self.usage = DiskUsage(0, 0)  # at the last check
        self.failures = 0  # of steps, by our own faults
        self.departing = False  # an operator empties the bookie: read-only, whatever the state of its disk

    @property
    def is_read_only(self) -> bool:
        return self.departing or self.state.is_read_only

    def set_departing(self, departing: bool) -> None:
        """Sets whether an operator has ordered to move all copies off this bookie; then it is read-only."""
        if departing is not self.departing:
            how = "departing: it takes no new ledgers" if departing else "not departing any more"
            _LOG.warning("the bookie is %s", how)
        self.departing = departing
        self._on_read_only(self.is_read_only)

    def on_no_space(self) -> None:
        """Called when a write found no room: refuses adds of clients from now on, and starts a check of the disk."""
        self._become(DiskState.NO_ROOM)
        self.request_check()

    def request_check(self) -> None:
        """Makes `run` check the disk and update the registration now instead of after the interval."""
        self._asked.set()

    async def check_disk(self) -> None:
        """Checks the disk and sets `state`. If there is room, first repeats the work that waits for it, and fills the
        reserve.
        """
        limits = self._limits
        limit = limits.low_water_share if self.state.is_read_only else limits.full_share
        no_room = not await self._store.room.ensure_room(limit)
        usage = self.usage = DiskUsage(*await self._store.room.usage())
        self._become(judge_disk(usage, limits, self.state, no_room=no_room), usage)

    def _become(self, state: DiskState, usage: DiskUsage | None = None) -> None:
        if state is not self.state:
            free = "" if usage is None else f", {usage.free} of {usage.total} bytes are free{self._floor_told(usage)}"
            level = logging.INFO if state is DiskState.WRITABLE else logging.WARNING
            _LOG.log(level, "the disk is %s, was %s%s", state.value, self.state.value, free)
        self.state = state
        self._on_read_only(self.is_read_only)

    def _floor_told(self, usage: DiskUsage) -> str:
        """Returns a text for the log if fewer bytes are free than the floor; else ""."""
        floor = self._limits.free_floor_bytes(usage.total)
        if usage.free >= floor:
            return ""
        why = "free_bytes_min" if self._limits.free_bytes_min >= 0 else "the least where free_bytes_min is not set"
        never = "; the disk is smaller: the bookie is never writable" if floor > usage.total else ""
        return f", fewer than the {floor} of {why}: read-only{never}"

    async def run(self) -> None:
        """Checks the disk and updates the registration at each interval, until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            for step in (self.check_disk, self._note, self._register):
                try:
                    await step()
                except (MagnetarError, OSError, NoSpace) as error:
                    _LOG.warning("the disk cannot be checked, or the registration not changed: %s", error)
                except Exception:  # the disk is checked even when the other steps fail
                    self.failures += 1
                    _LOG.exception("a step of the disk monitor failed, the others run")

    async def _register(self) -> None:
        if not self._registration.is_current(read_only=self.is_read_only, free_bytes=self.usage.free):
            await self._registration.register()
