"""The world that a client stands on when it is given none: the system's, without what only servers need."""

from __future__ import annotations

from ..runtime.process import real_world
from ..runtime.world import World


def client_world() -> World:
    """A new one each time: connections belong to it, and to one event loop."""
    return real_world()
