"""Decides which indexes each trigger (micro-batch) of a Spark query reads. No I/O.

An *offset* of Spark contains one index per partition: that of the first unread message. Spark compares offsets as JSON
text, so the JSON form (`offset_to_json`) is sorted and canonical: `{"persistent://t/n/topic": {"0": 23, "1": 42}}`. A
partition that is missing from the start of a batch is new, and is read from its earliest index (Kafka's rule).

**An index belongs to one incarnation of a topic**; the incarnation is the time at which the topic was created. The JSON
names it next to the indexes, under `INCARNATIONS_KEY`: that of a topic by the topic's name, that of a partition that
was created at another time by the partition's name. If the incarnation differs from the checkpoint's, the topic was
deleted and created again, however many messages it has: the messages that the query had not read are lost
(`LostMessages`), and the query continues at the earliest message. Offsets of older versions of Magnetar name no
incarnation; with them a new topic is detected only if it is shorter than its offset. Guard:
tests/spark/test_identity.py."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from ..proto.errors import InvalidRequest

Partition = tuple[str, int]
"""Full topic name without the partition, and number of the partition."""

IndexByPartition = dict[Partition, int]

IncarnationByPartition = Mapping[Partition, int]
"""Partition → the time at which it was created; a partition that is missing, or 0: not known."""

UNKNOWN_INCARNATIONS: IncarnationByPartition = {}

INCARNATIONS_KEY = "incarnations"
"""Key in the JSON of an offset under which incarnations are stored; no full name of a topic is equal to it."""
PROGRESS_KEY = "source"
"""Key in the JSON that a query reports to Spark (`make_progress_report`) under which the report is; it is in no
offset."""
_PART = "-partition-"


class AvailableRange(NamedTuple):
    """The messages of one partition that are stored at the broker: those with the indexes `earliest` … `end - 1`, with
    `bytes` bytes together. `incarnation`: the time at which the topic was created; 0: not known."""

    earliest: int
    end: int
    bytes: int  # stored between the two
    incarnation: int = 0  # when it was made; 0: the broker does not say


class MessageRange(NamedTuple):
    """A range of messages of one partition: those with the indexes `first` … `end - 1`. `incarnation`: the incarnation
    of the topic to which the indexes belong; 0: not known."""

    partition: Partition
    first: int
    end: int  # exclusive
    incarnation: int = 0  # of the topic that they are of; 0: not known

    @property
    def messages(self) -> int:
        """Returns the number of messages in the range."""
        return self.end - self.first


class LostMessages(NamedTuple):
    """Messages of one partition that a query needs and the topic does not have, because they were deleted, or the topic
    was created again. `wanted`: the index that the query needs; `there`: the index that the topic has instead, or the
    end of the lost range (exclusive). `reason`: why they are lost, as text for the user."""

    partition: Partition
    wanted: int
    there: int
    reason: str


RECREATED_REASON = "the topic was deleted and made anew since the checkpoint"
SHORTENED_REASON = "the topic is shorter than the checkpoint: it was deleted and made anew"


def is_other_incarnation(one: int, other: int) -> bool:
    """Returns whether both incarnations of a topic are known and differ: the topic was deleted and created again."""
    return bool(one and other and one != other)


def reset_recreated_partitions(
    start: IndexByPartition,
    available: Mapping[Partition, AvailableRange],
    made: IncarnationByPartition = UNKNOWN_INCARNATIONS,
) -> IndexByPartition:
    """Returns a copy of `start` in which each partition that was created again has its earliest available index. A
    partition was created again if its incarnation differs from that in `made`, or if its end is below its index in
    `start`. A partition that is not in `available` keeps its index."""
    return {p: at if _why_anew(p, at, available, made) is None else available[p].earliest for p, at in start.items()}


def find_recreated_partitions(
    start: IndexByPartition, available: Mapping[Partition, AvailableRange], made: IncarnationByPartition
) -> list[LostMessages]:
    """Returns the partitions whose index `reset_recreated_partitions` would change, because they were created again;
    each as LostMessages."""
    found = ((p, at, _why_anew(p, at, available, made)) for p, at in sorted(start.items()))
    return [LostMessages(p, at, available[p].end, reason) for p, at, reason in found if reason is not None]


def _why_anew(
    p: Partition, at: int, available: Mapping[Partition, AvailableRange], made: IncarnationByPartition
) -> str | None:
    there = available.get(p)
    if there is None:
        return None
    if is_other_incarnation(made.get(p, 0), there.incarnation):
        return RECREATED_REASON
    return SHORTENED_REASON if there.end < at else None


def offset_to_json(
    index: IndexByPartition, made: IncarnationByPartition = UNKNOWN_INCARNATIONS
) -> dict[str, dict[str, int]]:
    """Returns an offset in its JSON form, with sorted keys: topic → partition → index, and under INCARNATIONS_KEY the
    known incarnations `made` of the partitions of `index`. `parse_offset` and `parse_incarnations` reverse this."""
    result: dict[str, dict[str, int]] = {}
    for (topic, partition), value in sorted(index.items()):
        result.setdefault(topic, {})[str(partition)] = value
    named: dict[str, int] = {}
    for (topic, partition), at in sorted(made.items()):
        if at and (topic, partition) in index and named.setdefault(topic, at) != at:
            named[f"{topic}{_PART}{partition}"] = at
    return result | ({INCARNATIONS_KEY: dict(sorted(named.items()))} if named else {})


def make_progress_report(index: IndexByPartition, available: Mapping[Partition, AvailableRange]) -> dict[str, Any]:
    """Returns the progress report of a query at the offset `index`, as JSON: the offset of the end of the topics, and
    under PROGRESS_KEY the lag in messages and bytes (estimated). Spark shows the report as `latestOffset` of its
    progress, because a source in Python has no other metrics."""
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
    return {**ends, PROGRESS_KEY: found}


def parse_offset(offset: Mapping[str, Mapping[str, int]]) -> IndexByPartition:
    """Returns the index of each partition in an offset of a checkpoint. Raises InvalidRequest if the offset does not
    have the form that `offset_to_json` writes."""
    try:
        return {
            (topic, int(partition)): operator.index(value)
            for topic, partitions in offset.items()
            for partition, value in partitions.items()
            if topic not in (INCARNATIONS_KEY, PROGRESS_KEY)
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequest("the checkpoint's offset is not {topic: {partition: index}}") from error


def parse_incarnations(offset: Mapping[str, Mapping[str, int]]) -> dict[Partition, int]:
    """Returns the incarnation of each partition of an offset; 0 if the offset does not name it. Raises InvalidRequest
    if the offset is malformed."""
    index = parse_offset(offset)
    try:
        named = {name: operator.index(at) for name, at in offset.get(INCARNATIONS_KEY, {}).items()}
    except (AttributeError, TypeError) as error:
        raise InvalidRequest("the checkpoint's offset names no incarnation of a topic by a number") from error
    return {(t, n): named.get(f"{t}{_PART}{n}", named.get(t, 0)) for t, n in index}


def find_batch_end(
    start: IndexByPartition,
    available: Mapping[Partition, AvailableRange],
    offsets_max: int | None,
    bytes_max: int | None,
) -> IndexByPartition:
    """Returns the end of the next batch, which begins at `start`: the index after the last message of each partition.
    The batch has at most `offsets_max` messages and about `bytes_max` bytes, but at least one message if any is unread.
    None: no limit.

    The limit is divided among the partitions in proportion to their unread messages (Kafka's rule). Each partition with
    unread messages gets at least one, as long as the limit allows it. The end of a partition is never before its start.
    Unread messages that were trimmed count as messages without bytes."""
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
    start: IndexByPartition, end: IndexByPartition, available: Mapping[Partition, AvailableRange],
    begun: IncarnationByPartition = UNKNOWN_INCARNATIONS, planned: IncarnationByPartition = UNKNOWN_INCARNATIONS,
) -> tuple[list[MessageRange], list[LostMessages]]:  # fmt: skip
    """Returns two lists: the ranges that can be read between two offsets, and the messages that cannot be read any
    more. `begun`, `planned`: the incarnations to which `start` and `end` belong.

    Different incarnations, or an end before its start, mean that the topic was created again since the checkpoint
    (`reset_recreated_partitions`): it is read from its earliest message, and the old topic's messages are lost. If the
    end belongs to another incarnation than the present one, the batch was planned before the topic was created again:
    none of its messages can be read."""
    found: list[MessageRange] = []
    lost: list[LostMessages] = []
    for p in sorted(end):
        there = available.get(p)
        first, last = start.get(p, there.earliest if there else 0), end[p]
        if there is not None and is_other_incarnation(planned.get(p, 0), there.incarnation):
            if last > (0 if is_other_incarnation(begun.get(p, 0), planned.get(p, 0)) else start.get(p, 0)):
                lost.append(LostMessages(p, first, last, RECREATED_REASON))
            continue
        if there is None:
            if first < last:
                lost.append(LostMessages(p, first, last, "the topic or partition does not exist any more"))
            continue
        if last < first or is_other_incarnation(begun.get(p, 0), planned.get(p, 0)):
            lost.append(LostMessages(p, first, last, SHORTENED_REASON if last < first else RECREATED_REASON))
            first = there.earliest
        if first < there.earliest and first < last:
            lost.append(LostMessages(p, first, there.earliest, "retention removed them before they were read"))
        if last > there.end:
            lost.append(LostMessages(p, last, there.end, SHORTENED_REASON))
        first, last = max(first, there.earliest), min(last, there.end)
        if first < last:
            found.append(MessageRange(p, first, last, planned.get(p) or there.incarnation))
    return found, lost


def split_into_task_ranges(
    whole: list[MessageRange], partitions_min: int | None, records_max: int | None
) -> list[MessageRange]:
    """Divides the ranges `whole` into one range per task. Returns about `partitions_min` ranges if there are enough
    messages, and none with more than `records_max` messages; None: no such bound. The result depends only on the
    arguments, so that a repeated batch has the same tasks."""
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
