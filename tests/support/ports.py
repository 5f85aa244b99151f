"""Ports of servers that have to come back on the same one.

A port that the system gave and that is free again may be given to anybody before its server listens, in tests that run
side by side. So it is drawn below the range from which the system gives any.
"""

from __future__ import annotations

import random
import socket

RANGE = range(20_000, 32_000)
_RNG = random.SystemRandom()


def free_port(*hosts: str, count: int = 1) -> int:
    """Nobody listens there now, at any of these addresses; nor at the ports after it, `count` in all."""
    while True:
        port = _RNG.choice(RANGE)
        if all(_is_free(host, port + number) for host in hosts for number in range(count)):
            return port


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
