"""What a trigger reads: pure decisions on index ranges. No I/O here.

An offset is one index per partition: the first one not read yet. Spark compares offsets as JSON text, so the wire form
(`to_json`) is sorted and canonical, `{"persistent://t/n/topic": {"0": 23, "1": 42}}`; a partition that is not in the
start of a batch is new and is read from its earliest index (Kafka's rule).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

Partition = tuple[str, int]
"""(full topic name without partition, partition number)"""

Index = dict[Partition, int]


class Available(NamedTuple):
    """What a broker says of one partition."""

    earliest: int
    end: int
    bytes: int  # stored between the two


class Range(NamedTuple):
    partition: Partition
    first: int
    end: int  # exclusive

    @property
    def messages(self) -> int:
        return self.end - self.first


class Lost(NamedTuple):
    """Messages that a range wants and the topic does not have any more (or has not, after it was made anew)."""

    partition: Partition
    wanted: int
    there: int
    reason: str


MADE_ANEW = "the topic is shorter than the checkpoint: was it deleted and made anew?"


def restarted(start: Index, available: Mapping[Partition, Available]) -> Index:
    """`start`, with the earliest index of each partition that ends before it: the topic was made anew."""
    return {p: available[p].earliest if p in available and available[p].end < at else at for p, at in start.items()}


def to_json(index: Index) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for (topic, partition), value in sorted(index.items()):
        result.setdefault(topic, {})[str(partition)] = value
    return result


def from_json(offset: Mapping[str, Mapping[str, int]]) -> Index:
    return {
        (topic, int(partition)): value
        for topic, partitions in offset.items()
        for partition, value in partitions.items()
    }


def limit(
    start: Index, available: Mapping[Partition, Available], offsets_max: int | None, bytes_max: int | None
) -> Index:
    """The end of the next batch: at most `offsets_max` messages and about `bytes_max` bytes, the first one met wins.

    What may be read is split over the partitions in proportion to what waits in each (Kafka's rule), at least one
    message from each that has any as long as the limit lasts; a partition never goes back. What waits may be trimmed
    already, even all of it: it counts as messages, and has no bytes.
    """
    waiting = {p: max(0, a.end - start.get(p, a.earliest)) for p, a in available.items()}
    total = sum(waiting.values())
    allowed = total if offsets_max is None else min(total, offsets_max)
    if bytes_max is not None and total:
        message_bytes = sum(_bytes_of(a, waiting[p]) for p, a in available.items()) / total
        allowed = min(allowed, max(1, int(bytes_max / message_bytes))) if message_bytes else allowed
    base = {p: start.get(p, a.earliest) for p, a in available.items()}
    if allowed >= total:
        return {**start, **{p: base[p] + waiting[p] for p in available}}
    share = {p: waiting[p] * allowed // total for p in available}
    rest = allowed - sum(share.values())
    for p in sorted(available, key=lambda p: (share[p] > 0, -waiting[p], p)):
        if rest and share[p] < waiting[p]:
            share[p], rest = share[p] + 1, rest - 1
    return {**start, **{p: base[p] + share[p] for p in available}}


def _bytes_of(there: Available, waiting: int) -> float:
    """Of the newest `waiting` messages, as far as they are still held."""
    held = there.end - there.earliest
    return there.bytes * min(waiting, held) / held if held > 0 else 0.0


def ranges(start: Index, end: Index, available: Mapping[Partition, Available]) -> tuple[list[Range], list[Lost]]:
    """What lies between two offsets and can be read, and what cannot any more.

    An end before its start says that the topic was made anew since the checkpoint (`restarted`): it is read from its
    earliest message, and what the old one had is lost.
    """
    found: list[Range] = []
    lost: list[Lost] = []
    for p in sorted(end):
        there = available.get(p)
        first, last = start.get(p, there.earliest if there else 0), end[p]
        if there is None:
            if first < last:
                lost.append(Lost(p, first, last, "the topic or partition does not exist any more"))
            continue
        if last < first:
            lost.append(Lost(p, first, last, MADE_ANEW))
            first = there.earliest
        if first < there.earliest and first < last:
            lost.append(Lost(p, first, there.earliest, "retention removed them before they were read"))
        if last > there.end:
            lost.append(
                Lost(p, last, there.end, "the topic is shorter than the checkpoint: was it deleted and made anew?")
            )
        first, last = max(first, there.earliest), min(last, there.end)
        if first < last:
            found.append(Range(p, first, last))
    return found, lost


def split(whole: list[Range], partitions_min: int | None, records_max: int | None) -> list[Range]:
    """Cuts ranges into tasks: about `partitions_min` of them, as far as messages reach, none above `records_max`.

    Cuts are in proportion to size and pure arithmetic, so that a retried batch has the same tasks.
    """
    total = sum(r.messages for r in whole)
    result: list[Range] = []
    for r in whole:
        pieces = 1
        if partitions_min is not None and len(whole) < partitions_min:
            pieces = max(1, round(partitions_min * r.messages / total))
        if records_max is not None:
            pieces = max(pieces, -(-r.messages // records_max))
        pieces = min(pieces, r.messages)
        cuts = [r.first + r.messages * i // pieces for i in range(pieces + 1)]
        result.extend(Range(r.partition, a, b) for a, b in pairwise(cuts))
    return result
