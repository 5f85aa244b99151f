"""The parts of a topic beside its log and its subscriptions: each keeps some state across owners.

A topic calls its parts in the order of its tuple `parts` (broker/topic/topic.py), and the methods of each part so:

    open      after the take-over of the log, before the first publish and before the subscriptions are opened
    look      from time to time, and after the policies changed: what is due begins, in a task of the part
    held      before each trim: what of the log the part needs, and why
    stop      the topic is lost, or closes: nothing more is written, every waiting caller is resumed. Idempotent
    close     after the log was closed; what may be stored is stored. Idempotent
    own_ledgers   the topic is deleted: they are deleted after the topic's record

Guarding test: tests/broker/topic/test_parts.py.
"""

from __future__ import annotations

from typing import Protocol

from ...proto.applied import Applied
from ..log.core.trimming import Safe


class TopicPart(Protocol):
    """A part of a topic; see the module for the order of the calls."""

    async def open(self, applied: Applied) -> None: ...
    def look(self, applied: Applied) -> None: ...
    def held(self, applied: Applied) -> Safe | None: ...
    def stop(self) -> None: ...
    async def close(self) -> None: ...
    def own_ledgers(self) -> list[int]: ...
