"""The effects of a fork on a client, and what is done about them.

A child has none of its parent's threads, and gRPC, once it was used, does not come up again in a child: its poller
thread is gone and its locks are as they were (measured: with its fork support on, calls hang; with it off, the process
aborts). So:

- A process that forks *before* the first connection is safe, and so are its children, also with the same Client object:
  connections are made when first needed. (Prefork servers, Celery, multiprocessing, Spark's daemon.)
- A child of a process that *had* connections gets OperationNotSupported at once from everything that would connect,
  instead of a hang. Start such children with multiprocessing's `spawn` or `forkserver`, or connect after the fork.
- The parent is not touched: what the child inherited is kept and never closed there, because closing would act on
  shared sockets and dead locks.

`EPOCH[0]` counts the forks above this process; an object that keeps something of an event loop keeps the epoch
with it. Guard: tests/client/blocking/test_fork.py.
"""

from __future__ import annotations

import os
from weakref import WeakSet

from .errors import OperationNotSupported

EPOCH = [0]
"""A list, so that looking at it costs no call."""

_inherited: list[object] = []
_live: WeakSet[object] = WeakSet()
_used_by_parent = [False]


def connected(holder: object) -> None:
    """Notes that `holder` of connections is about to make its first. Raises OperationNotSupported where it cannot work.
    """
    if _used_by_parent[0]:
        raise OperationNotSupported(
            "this process was forked from one that had connections, and gRPC does not survive that: "
            "connect after the fork, or start processes with multiprocessing's 'spawn' or 'forkserver'"
        )
    _live.add(holder)


def _after_fork() -> None:
    EPOCH[0] += 1
    inherited = list(_live)
    if inherited:
        _inherited.extend(inherited)
        _used_by_parent[0] = True
    _live.clear()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_after_fork)
