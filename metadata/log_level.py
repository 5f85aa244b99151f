"""Applies the setting `log_level` of the cluster to a process that is no broker: a bookie, or the metadata service.

    following = await start_following_log_level(lambda: bookie.metadata)    until `await following.close()`

`magnetar brokers update-dynamic-config --config log_level` stores it in the record of the settings that all brokers
follow (broker/cluster/policy_cache.py). A value that this release does not know counts as none: the process has the
level that it was started with. Guarding tests: tests/metadata/test_log_level.py.
"""

from __future__ import annotations

from collections.abc import Callable

from ..runtime import logs
from ..runtime.tasks import Supervisor
from . import paths
from .records import PoliciesRecord
from .store import MetadataStore, WatchReset, get_readable_record


async def start_following_log_level(session_of: Callable[[], MetadataStore]) -> Supervisor:
    """Begins to apply the setting in the background, and returns the Supervisor of the task, which the caller must
    close. `session_of` returns the metadata session that the process has now. It is called again after each loss of a
    session."""
    background, applied = Supervisor(), AppliedLogLevel()
    background.start_supervised("log-level", lambda: follow_log_level(session_of(), applied))
    return background


class AppliedLogLevel:
    """The level of the setting that this process has applied, in whichever session; None: the level of the start."""

    level: str | None = None


async def follow_log_level(session: MetadataStore, applied: AppliedLogLevel) -> None:
    """Applies the log level that the setting has now, and each later change, until the call is cancelled. Raises the
    errors of the metadata session when the session or its watch breaks. The next call needs the same `applied`: the
    setting may be deleted meanwhile."""
    revision = await session.revision()
    await _apply_log_level(session, applied)
    async for change in session.watch(paths.BROKER_POLICIES, revision):
        if isinstance(change, WatchReset) or change.path == paths.BROKER_POLICIES:
            await _apply_log_level(session, applied)


async def _apply_log_level(session: MetadataStore, applied: AppliedLogLevel) -> None:
    """Applies the level of the setting if it is not that which was applied last."""
    found = await get_readable_record(session, paths.BROKER_POLICIES, PoliciesRecord)
    level = found[0].properties.get("log_level") if found is not None else None
    known = level if level in logs.LEVELS else None
    if known != applied.level:
        logs.set_level(known, "the dynamic setting log_level" + ("" if known else " was deleted"))
    applied.level = known
