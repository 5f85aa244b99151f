"""What a trigger reads: pure decisions on index ranges. No I/O here.

An offset is one index per partition: that of the first unread message. Spark compares offsets as JSON text, so the JSON
form (`to_json`) is sorted and canonical, `{"persistent://t/n/topic": {"0": 23, "1": 42}}`. A partition that is missing
from the start of a batch is new and is read from its earliest index (Kafka's rule).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from ..proto.errors import InvalidRequest

Partition = tuple[str, int]
"""(full topic name without partition, partition number)"""

Index = dict[Partition, int]


class Available(NamedTuple):
    """What a broker has of one partition."""

    earliest: int
    end: int
    bytes: int  # stored between the two


class Range(NamedTuple):
    """The messages `first` … `end - 1` of one partition."""

    partition: Partition
    first: int
    end: int  # exclusive

    @property
    def messages(self) -> int:
        return self.end - self.first


class Lost(NamedTuple):
    """Messages that a range includes and the topic lacks: it lost them, or was made again without them."""

    partition: Partition
    wanted: int
    there: int
    reason: str


MADE_ANEW = "the topic is shorter than the checkpoint: was it deleted and made anew?"


def restarted(start: Index, available: Mapping[Partition, Available]) -> Index:
    """`start`, with the earliest index of each partition that ends before it: that topic was made again."""
    return {p: available[p].earliest if p in available and available[p].end < at else at for p, at in start.items()}


def to_json(index: Index) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for (topic, partition), value in sorted(index.items()):
        result.setdefault(topic, {})[str(partition)] = value
    return result


def from_json(offset: Mapping[str, Mapping[str, int]]) -> Index:
    """InvalidRequest: the offset, which a checkpoint's file gave, is none of this source."""
    try:
        return {
            (topic, int(partition)): operator.index(value)
            for topic, partitions in offset.items()
            for partition, value in partitions.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest("the checkpoint's offset is not {topic: {partition: index}}") from error


def limit(
    start: Index, available: Mapping[Partition, Available], offsets_max: int | None, bytes_max: int | None
) -> Index:
    """The end of the next batch: at most `offsets_max` messages and about `bytes_max` bytes, whichever is first.

    The batch is divided over the partitions in proportion to their unread messages (Kafka's rule), with at least one
    message of each that has any while the limit lasts; a partition never goes back. Unread messages may be trimmed
    already, even all of them: they count as messages, and have no bytes.
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
    """Bytes of the newest `waiting` messages, of those that are still stored."""
    held = there.end - there.earliest
    return there.bytes * min(waiting, held) / held if held > 0 else 0.0


def ranges(start: Index, end: Index, available: Mapping[Partition, Available]) -> tuple[list[Range], list[Lost]]:
    """What can be read between two offsets, and what cannot be read any more.

    An end before its start means that the topic was made again since the checkpoint (`restarted`): it is read from its
    earliest message, and the old topic's messages are lost.
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
    """Divides ranges into tasks: about `partitions_min` of them if there are enough messages, none above `records_max`.

    The division is by size and pure arithmetic, so that a retried batch has the same tasks.
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
