"""The choice between several clusters (`ClusterFailoverCore`, for AutoClusterFailover). Also the pauses between
attempts (`Backoff`), and the choice of a message's partition (`PartitionRouter`).

    core = ClusterFailoverCore(3, failover_after=2, back_after=1)
    core.on_clusters_probed([False, True, True])    which clusters answered; returns the index of the one to use now

The first cluster is preferred. When the cluster in use did not answer in `failover_after` rounds in a row, the client
changes to the first cluster that answered; if none did, it stays. When the preferred cluster answered in `back_after`
rounds in a row, the client returns to it. Guard: tests/client/core/test_failover.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...proto.names import choose_partition_of_key
from ..common.errors import ClientEnum


class ClusterFailoverCore:
    """Decides which of `count` clusters a client uses, from the results of rounds of probes: each round shows which
    clusters answer. `current`: the index of the cluster in use; 0 is preferred. See the head of the module."""

    def __init__(self, count: int, *, failover_after: int, back_after: int) -> None:
        assert count >= 1 <= min(failover_after, back_after), "there is a cluster, and a round changes something"
        self.current = 0
        self._count = count
        self._failover_after = failover_after
        self._back_after = back_after
        self._failures = 0  # of the one in use, in a row
        self._answers = 0  # of the preferred one, in a row, while another one is used

    def on_clusters_probed(self, answered: Sequence[bool]) -> int:
        """Fact: a round of probes ended; `answered` contains for each cluster whether it answered. Returns the index of
        the cluster to use from now on."""
        assert len(answered) == self._count, "each of them was tried"
        self._failures = 0 if answered[self.current] else self._failures + 1
        self._answers = self._answers + 1 if answered[0] and self.current else 0
        if self._answers >= self._back_after:
            self._use(0)
        elif self._failures >= self._failover_after and any(answered):
            self._use(answered.index(True))
        return self.current

    def _use(self, which: int) -> None:
        self.current, self._failures, self._answers = which, 0, 0

    def check(self) -> None:
        assert 0 <= self.current < self._count
        assert self._answers < self._back_after, "the preferred one is used as soon as it may be"
        assert self.current or not self._answers


# ------------------------------------------------------------------------------------------------------- backoff
# Back-off between attempts: from `first_s` to `last_s`, each a quarter longer, less up to a tenth by chance.
#
# The limits are Pulsar's for reconnecting (100 ms → 60 s). It doubles there, so that a client that comes back after t
# seconds is found after up to 2 t; here after about 1.25 t, for 29 attempts on the way to 60 s instead of 10. `reset`
# after a success.


BACKOFF_GROWTH = 1.25


class RandomSource(Protocol):
    """The methods of `random.Random` that the client's cores call, so that tests can pass a seeded source."""

    def random(self) -> float: ...
    def randrange(self, start: int, /) -> int: ...


class Backoff:
    """Computes the pauses between attempts. The first pause is `first_s` seconds, and each later one is BACKOFF_GROWTH
    times as long as the one before, up to `last_s` seconds. Each is shortened by up to a tenth by chance."""

    def __init__(self, rng: RandomSource, first_s: float = 0.1, last_s: float = 60.0) -> None:
        assert 0 < first_s <= last_s, "a back-off grows"
        self._rng = rng
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s

    def next_delay_s(self) -> float:
        """Returns the seconds to wait before the next attempt. Each call raises the pause of the next call, up to the
        limit."""
        delay = self._next_s
        self._next_s = min(delay * BACKOFF_GROWTH, self._last_s)
        return delay * (1 - self._rng.random() / 10)

    def reset(self) -> None:
        """Makes the next pause the first one again, because an attempt succeeded."""
        self._next_s = self._first_s

    def check(self) -> None:
        assert self._first_s <= self._next_s <= self._last_s


# -------------------------------------------------------------------------------------------------------- router
# The partition to which a message goes.
#
# A key decides by Murmur3, whatever the mode. Without a key: RoundRobin stays on one partition for a batching window
# and then goes to the next (so that batches fill), or changes with each message when batching is off;
# UseSinglePartition keeps the one it began with. CustomPartition asks the user's function. The first partition is
# chosen by chance.


class PartitionsRoutingMode(ClientEnum):
    """The rules by which a producer chooses the partition of a message without a key. UseSinglePartition: always the
    same partition. RoundRobinDistribution: the partitions in turn. CustomPartition: the partition that `message_router`
    returns, also for a message with a key."""
    UseSinglePartition = 0
    RoundRobinDistribution = 1
    CustomPartition = 2


class PartitionRouter:
    """Chooses the partition of each message of one producer. `window_s`, `messages_max` and `bytes_max` are the limits
    of a batch. With RoundRobinDistribution the messages within these limits go to the same partition. With `window_s` 0
    the partition changes with each message."""

    def __init__(
        self, partitions: int, mode: PartitionsRoutingMode, rng: RandomSource, *,
        window_s: float, messages_max: int, bytes_max: int,
    ) -> None:  # fmt: skip
        assert partitions > 0, "a topic has at least one partition"
        self._partitions = partitions
        self._mode = mode
        self._window_s = window_s
        self._messages_max = messages_max
        self._bytes_max = bytes_max
        self._current = rng.randrange(partitions)
        self._since = -float("inf")
        self._messages = 0
        self._bytes = 0

    @property
    def partitions(self) -> int:
        return self._partitions

    def set_partition_count(self, partitions: int) -> None:
        """Sets the number of partitions of the topic. The number must not be smaller than before."""
        assert partitions >= self._partitions, "partitions are never taken away"
        self._partitions = partitions

    def choose_partition(self, key: str | bytes | None, size: int, now: float) -> int:
        """Returns the number of the partition for a message: that of its `key`, or, if `key` is None, the one that the
        mode chooses. `size`: the bytes of the message. `now`: seconds of a monotonic clock. Counts the message, so it
        must be called once for each."""
        if key is not None:
            return choose_partition_of_key(key, self._partitions)
        if self._mode is PartitionsRoutingMode.UseSinglePartition:
            return self._current
        full = self._messages >= self._messages_max or self._bytes + size > self._bytes_max
        if full or now - self._since >= self._window_s:
            self._current = (self._current + 1) % self._partitions
            self._since, self._messages, self._bytes = now, 0, 0
        self._messages += 1
        self._bytes += size
        return self._current

    def check(self) -> None:
        assert 0 <= self._current < self._partitions
