"""Waiting for a healed cluster: when it is stuck, and when the machine is only busy.

`wait_until(missing, bound_s)` looks again and again until nothing is missing, or the bound has passed. What counts
towards the bound is *granted* time: each look counts the pause that it asked for, and not what it had to wait longer.
If this process was stopped, or got no processor, so were the others; with the machine for itself it is the wall's time.

    bound_s = STUCK_S = 90 s    a cluster without faults in which somebody has made no progress

Where that number comes from: nothing in Magnetar that waits gives a try more than 30 s (a send's time-out, after which
its outcome is unknown and its producer goes on), and the longest chain of what may have to happen after the healing is
a session that ends (2 s here), a bundle that is taken over, two ledgers that are recovered, and one try of a client on
top. So whoever makes no progress in three times the longest single wait waits for something that never comes. Seen on
the two busy processors of a development machine: 2 to 25 s (a run's JSON tells its own, `slowest_s`).
"""

import time
from collections.abc import Callable

STUCK_S = 90.0
LOOK_S = 0.1


def wait_until(missing: Callable[[], list[str]], bound_s: float = STUCK_S, look_s: float = LOOK_S) -> list[str]:
    """What was still missing when the bound had passed; empty: nothing."""
    granted_s = 0.0
    while (found := missing()) and granted_s < bound_s:
        time.sleep(look_s)
        granted_s += look_s
    return found
