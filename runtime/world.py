"""The world as one value: all that a process, real or simulated, reaches outside itself."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .clock import Clock
from .files import Files
from .network import Network
from .workers import Workers


@dataclass(frozen=True, slots=True)
class World:
    """Every driver, store and service reaches time, chance, disk, threads and network through this and nothing else.

    The real one is `runtime.process.real_world()`; the simulated one `runtime.sim.world.Simulation.world(node)`.
    """

    clock: Clock
    rng: random.Random
    files: Files
    workers: Workers
    network: Network
