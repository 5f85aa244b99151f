"""The decisions on what a trigger reads, from index ranges: pure, no I/O here.

An offset is one index per partition: that of the first unread message. Spark compares offsets as JSON text, so the JSON
form (`offset_to_json`) is sorted and canonical, `{"persistent://t/n/topic": {"0": 23, "1": 42}}`. A partition that is
missing from the start of a batch is new and is read from its earliest index (Kafka's rule).

**An index is of one incarnation of a topic**: the time when it was made. The JSON names it beside the indexes, under
`INCARNATIONS`: of a topic by its name, of a partition that was made at another time by its own. A topic of another
incarnation than the checkpoint's was deleted and made anew, with however many messages: what the query had not read is
lost (`LostMessages`), and it goes on at the earliest. Offsets of a Magnetar that named none are read as before: then
only a topic that is shorter than its offset is known to be another one. Guard: tests/spark/test_identity.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..proto.errors import InvalidRequest

Partition = tuple[str, int]
"""(full topic name without partition, partition number)"""

Index = dict[Partition, int]

Incarnations = Mapping[Partition, int]
"""Time at which each partition was made; one that is missing, or 0: not known."""

UNKNOWN: Incarnations = {}

INCARNATIONS = "incarnations"
"""Key beside the topics of an offset; no full name of a topic is like it."""
SOURCE = "source"
"""Key beside them in what a query reports (`make_progress_report`), and in no offset."""
_PART = "-partition-"


class AvailableRange(NamedTuple):
    """The messages of one partition that are stored at the broker: those with the indexes `earliest` … `end - 1`."""

    earliest: int
    end: int
    bytes: int  # stored between the two
    incarnation: int = 0  # when it was made; 0: the broker does not say


class MessageRange(NamedTuple):
    """A range of messages of one partition: those with the indexes `first` … `end - 1`."""

    partition: Partition
    first: int
    end: int  # exclusive
    incarnation: int = 0  # of the topic that they are of; 0: not known

    @property
    def messages(self) -> int:
        return self.end - self.first


class LostMessages(NamedTuple):
    """Messages that a query needs and the topic does not have, because it lost them or was created again. The text of
    the error uses: `wanted`, the index that is needed; `there`, the index that the topic has instead, or the end of the
    lost range."""

    partition: Partition
    wanted: int
    there: int
    reason: str


MADE_ANEW = "the topic was deleted and made anew since the checkpoint"
SHORTER = "the topic is shorter than the checkpoint: it was deleted and made anew"


def is_other_incarnation(one: int, other: int) -> bool:
    """Returns whether both incarnations (ids of a topic that may be deleted and created again) are known, and
    differ."""
    return bool(one and other and one != other)


def reset_recreated_partitions(
    start: Index, available: Mapping[Partition, AvailableRange], made: Incarnations = UNKNOWN
) -> Index:
    """Returns `start`, in which each partition that was created again has its earliest index. A partition was created
    again if its incarnation differs from that in `made`, or if it ends before its offset."""
    return {p: at if _why_anew(p, at, available, made) is None else available[p].earliest for p, at in start.items()}


def find_recreated_partitions(
    start: Index, available: Mapping[Partition, AvailableRange], made: Incarnations
) -> list[LostMessages]:
    """Returns, as lost messages, the partitions that were created again: those whose index `reset_recreated_partitions`
    would change."""
    found = ((p, at, _why_anew(p, at, available, made)) for p, at in sorted(start.items()))
    return [LostMessages(p, at, available[p].end, reason) for p, at, reason in found if reason is not None]


def _why_anew(p: Partition, at: int, available: Mapping[Partition, AvailableRange], made: Incarnations) -> str | None:
    there = available.get(p)
    if there is None:
        return None
    if is_other_incarnation(made.get(p, 0), there.incarnation):
        return MADE_ANEW
    return SHORTER if there.end < at else None


def offset_to_json(index: Index, made: Incarnations = UNKNOWN) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for (topic, partition), value in sorted(index.items()):
        result.setdefault(topic, {})[str(partition)] = value
    named: dict[str, int] = {}
    for (topic, partition), at in sorted(made.items()):
        if at and (topic, partition) in index and named.setdefault(topic, at) != at:
            named[f"{topic}{_PART}{partition}"] = at
    return result | ({INCARNATIONS: dict(sorted(named.items()))} if named else {})


def make_progress_report(index: Index, available: Mapping[Partition, AvailableRange]) -> dict[str, Any]:
    """Returns what Spark's progress report shows for a query at the offset `index`: the messages that are available,
    and the lag. It is part of `latestOffset`, because Spark has no other metrics of a source in Python."""
    waiting = {p: max(0, a.end - index.get(p, a.earliest)) for p, a in available.items()}
    by_topic: dict[str, int] = {}
    for (topic, _), messages in sorted(waiting.items()):
        by_topic[topic] = by_topic.get(topic, 0) + messages
    found: dict[str, Any] = {
        "description": f"magnetar: {', '.join(by_topic) or 'no topic'}; {len(available)} partitions",
        "lag": sum(waiting.values()),
        "lagBytes": round(sum(_bytes_of(a, waiting[p]) for p, a in available.items())),
        "lagByTopic": by_topic,
    }
    ends = offset_to_json({p: a.end for p, a in available.items()}, {p: a.incarnation for p, a in available.items()})
    return {**ends, SOURCE: found}


def parse_offset(offset: Mapping[str, Mapping[str, int]]) -> Index:
    """Returns the index of each partition from an offset in a checkpoint. Raises InvalidRequest if the offset does not
    come from this source."""
    try:
        return {
            (topic, int(partition)): operator.index(value)
            for topic, partitions in offset.items()
            for partition, value in partitions.items()
            if topic not in (INCARNATIONS, SOURCE)
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest("the checkpoint's offset is not {topic: {partition: index}}") from error


def parse_incarnations(offset: Mapping[str, Mapping[str, int]]) -> dict[Partition, int]:
    """Returns the incarnation of each partition that an offset names. Raises InvalidRequest."""
    index = parse_offset(offset)
    try:
        named = {name: operator.index(at) for name, at in offset.get(INCARNATIONS, {}).items()}
    except (AttributeError, TypeError) as error:
        raise InvalidRequest("the checkpoint's offset names no incarnation of a topic by a number") from error
    return {(t, n): named.get(f"{t}{_PART}{n}", named.get(t, 0)) for t, n in index}


def find_batch_end(
    start: Index, available: Mapping[Partition, AvailableRange], offsets_max: int | None, bytes_max: int | None
) -> Index:
    """Returns the end of the next batch: at most `offsets_max` messages and about `bytes_max` bytes, whichever is
    reached first.

    The batch is divided over the partitions in proportion to their unread messages (Kafka's rule), with at least one
    message of each that has any while the limit lasts; a partition never goes back. Unread messages may already be
    trimmed, even all of them: they count as messages without bytes.
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


def _bytes_of(there: AvailableRange, waiting: int) -> float:
    """Returns the approximate number of bytes of the newest `waiting` messages, as far as they are still stored."""
    held = there.end - there.earliest
    return there.bytes * min(waiting, held) / held if held > 0 else 0.0


def plan_readable_ranges(
    start: Index, end: Index, available: Mapping[Partition, AvailableRange], begun: Incarnations = UNKNOWN,
    planned: Incarnations = UNKNOWN,
) -> tuple[list[MessageRange], list[LostMessages]]:  # fmt: skip
    """Returns the ranges that can be read between two offsets, and the messages that cannot be read any more. `begun`,
    `planned`: the incarnations to which start and end belong.

    Two incarnations, or an end before its start, mean that the topic was created again since the checkpoint
    (`reset_recreated_partitions`): it is read from its earliest message, and the old topic's messages are lost. If the
    end belongs to another incarnation than the present one, the batch was planned before the topic was created again:
    nothing of it can be read.
    """
    found: list[MessageRange] = []
    lost: list[LostMessages] = []
    for p in sorted(end):
        there = available.get(p)
        first, last = start.get(p, there.earliest if there else 0), end[p]
        if there is not None and is_other_incarnation(planned.get(p, 0), there.incarnation):
            if last > (0 if is_other_incarnation(begun.get(p, 0), planned.get(p, 0)) else start.get(p, 0)):
                lost.append(LostMessages(p, first, last, MADE_ANEW))
            continue
        if there is None:
            if first < last:
                lost.append(LostMessages(p, first, last, "the topic or partition does not exist any more"))
            continue
        if last < first or is_other_incarnation(begun.get(p, 0), planned.get(p, 0)):
            lost.append(LostMessages(p, first, last, SHORTER if last < first else MADE_ANEW))
            first = there.earliest
        if first < there.earliest and first < last:
            lost.append(LostMessages(p, first, there.earliest, "retention removed them before they were read"))
        if last > there.end:
            lost.append(LostMessages(p, last, there.end, SHORTER))
        first, last = max(first, there.earliest), min(last, there.end)
        if first < last:
            found.append(MessageRange(p, first, last, planned.get(p) or there.incarnation))
    return found, lost


def split_into_task_ranges(
    whole: list[MessageRange], partitions_min: int | None, records_max: int | None
) -> list[MessageRange]:
    """Divides ranges of messages into tasks: about `partitions_min` tasks if there are enough messages, and none with
    more than `records_max` messages. The result depends only on the arguments, so that a batch that is run again has
    the same tasks."""
    total = sum(r.messages for r in whole)
    result: list[MessageRange] = []
    for r in whole:
        pieces = 1
        if partitions_min is not None and len(whole) < partitions_min:
            pieces = max(1, round(partitions_min * r.messages / total))
        if records_max is not None:
            pieces = max(pieces, -(-r.messages // records_max))
        pieces = min(pieces, r.messages)
        cuts = [r.first + r.messages * i // pieces for i in range(pieces + 1)]
        result.extend(MessageRange(r.partition, a, b, r.incarnation) for a, b in pairwise(cuts))
    return result
