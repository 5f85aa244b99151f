"""Judges a history (tests/chaos/workload/history.py) in one pass over its records and one over each topic's log.

| class | what is wrong |
|---|---|
| LOST_PREFIX, LOST_MIDDLE, LOST_POSTFIX | an acked send is not in the log: before, between, after what is there |
| MISPLACED | it is in the log, but not at the id of its acknowledgement |
| ABORTED_READ | a send that definitely failed is read or delivered |
| PHANTOM | what nobody sent (to this topic) is read or delivered, or before it was sent |
| DISAGREEMENT | one id has two values |
| ORDER | a producer's messages first appear in another order than sent, or a subscription breaks its order: of first
  deliveries, or (`redelivery_order="key"`) something comes before what was refused before it in its key |
| DUPLICATED | a value is in the log twice: with deduplication, or behind what was sent after its acknowledgement |
| REDELIVERED | delivered again without nack, seek, new consumer or disturbance since; a consumer of another library
  says with a later message that it was disturbed, so what another one got again counts after `LATE_MAX` of them |
| REDELIVERED_ACKED | delivered to a consumer that connected after the durable ack, without a seek since |
| SKIPPED | in the log, wanted, and never delivered by a subscription that was drained |
| UNWANTED | delivered to a subscription whose filter does not want it |
| STUCK | a send or an ack never got an outcome |
| ID_REGRESS | a producer's later acknowledgement, or a later record of the log, has no higher id |

`judge` needs linear time: a million records in 15 s. Guarded by test_judge.py, where each class has bad
histories that must be flagged, and random good ones must pass.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from tests.chaos.workload import history


class Wrong(Enum):
    LOST_PREFIX = "lost prefix"
    LOST_MIDDLE = "lost middle"
    LOST_POSTFIX = "lost postfix"
    MISPLACED = "misplaced"
    ABORTED_READ = "aborted read"
    PHANTOM = "phantom"
    DISAGREEMENT = "disagreement"
    ORDER = "order"
    DUPLICATED = "duplicated"
    REDELIVERED = "redelivered"
    REDELIVERED_ACKED = "redelivered after a durable ack"
    SKIPPED = "skipped"
    UNWANTED = "unwanted"
    STUCK = "stuck"
    ID_REGRESS = "id regress"


LOST = (Wrong.LOST_PREFIX, Wrong.LOST_MIDDLE, Wrong.LOST_POSTFIX, Wrong.MISPLACED)
KEPT_MAX = 20
"""Sentences of one class that are kept; all are counted."""
LATE_MAX = 20
"""Messages that a consumer may have fetched, and take, before it notices that its connection is gone."""


class Sending:
    """One send, from its intent to its outcome; times are places in the history."""

    __slots__ = ("failed", "id", "key", "ok", "sent", "seq", "unknown", "value")

    def __init__(self, record: history.Send, at: int) -> None:
        self.seq, self.key, self.value, self.sent = record.seq, record.key, record.value, at
        self.ok: int | None = None
        self.id: history.Id | None = None
        self.failed = self.unknown = False


class Delivery(NamedTuple):
    at: int
    consumer: str
    fetched_before_loss: bool
    """Fetched over a connection that is lost, so it may come again without another disturbance."""


class Doubt(NamedTuple):
    sentence: str
    until: int
    """Messages that the consumer will have taken when it would have said that it lost its connection."""


class Subscription:
    def __init__(self, order: history.Order, every: int = 1) -> None:
        self.order, self.every = order, every
        self.connected: dict[str, int] = {}
        self.newest_connect = -1
        self.delivered: dict[history.Id, Delivery] = {}
        self.excused: dict[tuple[int, int], int] = {}  # entries: a batch comes again as a whole
        self.durable: dict[history.Id, int] = {}
        self.acks: dict[history.Id, int] = defaultdict(int)
        self.highest: dict[str, history.Id] = {}
        self.refused: dict[str, set[history.Id]] = defaultdict(set)  # by key, and did not come again yet
        self.taken: Counter[str] = Counter()  # by consumer
        self.taken_at_loss: Counter[str] = Counter()  # of all consumers, when one lost its connection
        self.doubtful: dict[str, deque[Doubt]] = defaultdict(deque)  # by consumer that had it before
        self.sought = -1
        self.from_id: history.Id = (-1, -1, -1)
        self.drained = False


class Topic:
    def __init__(self, name: str) -> None:
        self.name = name
        self.sends: dict[tuple[str, int], Sending] = {}
        self.by_value: dict[str, tuple[str, Sending]] = {}
        self.values: dict[history.Id, str] = {}
        self.newest_id: dict[str, tuple[int, history.Id]] = {}
        self.subscriptions: dict[str, Subscription] = {}
        self.log: list[tuple[history.Id, str]] = []
        self.read_to_end = False

    def wants(self, of: Subscription, value: str) -> bool:
        """Whether the filter of the subscription wants a message that was sent."""
        return of.every == 1 or value not in self.by_value or self.by_value[value][1].seq % of.every == 0


class Verdict:
    def __init__(self) -> None:
        self.counts: Counter[Wrong] = Counter()
        self.sentences: dict[Wrong, list[str]] = defaultdict(list)
        self.acknowledged = 0
        self.repeated = 0
        self.delivered = 0

    def add(self, wrong: Wrong, sentence: str) -> None:
        self.counts[wrong] += 1
        if len(self.sentences[wrong]) < KEPT_MAX:
            self.sentences[wrong].append(f"{wrong.value}: {sentence}")

    @property
    def lost(self) -> int:
        return sum(self.counts[each] for each in LOST)

    @property
    def duplicated(self) -> int:
        return self.counts[Wrong.DUPLICATED]

    def __str__(self) -> str:
        return "\n".join(line for lines in self.sentences.values() for line in lines)


class _Judge:
    def __init__(self, dedup: bool) -> None:
        self.dedup = dedup
        self.verdict = Verdict()
        self.topics: dict[str, Topic] = {}
        self.disturbed = -1

    def topic(self, name: str) -> Topic:
        found = self.topics.get(name)
        if found is None:
            found = self.topics[name] = Topic(name)
        return found

    def take(self, at: int, record: history.Record) -> None:
        if isinstance(record, history.Disturbed):
            self.disturbed = at
            for each in self.topics.values():
                for of in each.subscriptions.values():
                    of.doubtful.clear()
                    if record.noticed:
                        of.taken_at_loss = of.taken.copy()
            return
        topic = self.topic(record.topic)
        match record:
            case history.Send():
                sending = Sending(record, at)
                topic.sends[record.producer, record.seq] = sending
                topic.by_value[record.value] = record.producer, sending
            case history.SendOk():
                self._send_ok(at, topic, record)
            case history.SendFailed():
                topic.sends[record.producer, record.seq].failed = True
            case history.SendUnknown():
                topic.sends[record.producer, record.seq].unknown = True
            case history.Read():
                if self._known(topic, record.id, record.value, "read"):
                    topic.log.append((record.id, record.value))
            case history.ReadToEnd():
                topic.read_to_end = True
            case history.Subscribed():
                topic.subscriptions[record.subscription] = Subscription(record.order, record.every)
            case _:
                self._of_subscription(at, topic, topic.subscriptions[record.subscription], record)

    def _of_subscription(self, at: int, topic: Topic, of: Subscription, record: history.OfSubscription) -> None:
        match record:
            case history.Delivered():
                self._delivered(at, topic, of, record)
            case history.Connected():
                of.connected[record.consumer] = of.newest_connect = at
                of.taken.setdefault(record.consumer, 0)
                del of.taken_at_loss[record.consumer]  # it fetches anew
            case history.AckSent():
                of.acks[record.id] += 1
            case history.Acked():
                of.acks[record.id] -= 1
                if record.durable:
                    of.durable[record.id] = at
            case history.AckUnknown():
                of.acks[record.id] -= 1
            case history.Nacked():
                of.excused[record.id[:2]] = at
                if of.order is history.Order.HELD:
                    of.refused[topic.by_value[topic.values[record.id]][1].key].add(record.id)
            case history.Sought():
                of.sought, of.from_id = at, record.id
                of.highest.clear()
                of.refused.clear()
                of.durable.clear()
            case history.Drained():
                of.drained = True

    # ---------------------------------------------------------------------------------------- while it goes on
    def _send_ok(self, at: int, topic: Topic, record: history.SendOk) -> None:
        sending = topic.sends[record.producer, record.seq]
        sending.ok, sending.id = at, record.id
        self.verdict.acknowledged += 1
        who = f"{topic.name} {record.producer}"
        seq, newest = topic.newest_id.get(record.producer, (-1, (-1, -1, -1)))
        if (record.seq > seq) != (record.id > newest):
            self.verdict.add(Wrong.ID_REGRESS, f"{who}: message {record.seq} is {record.id}, {seq} was {newest}")
        if record.seq > seq:
            topic.newest_id[record.producer] = record.seq, record.id
        self._agrees(topic, record.id, sending.value, f"the ack of {record.producer}:{record.seq}")

    def _known(self, topic: Topic, id_: history.Id, value: str, how: str) -> bool:
        """Whether somebody sent it; and whether all agree that this is at this id."""
        found = topic.by_value.get(value)
        if found is None:
            self.verdict.add(Wrong.PHANTOM, f"{topic.name} {id_}: {how}, and nobody sent it: {value[:60]!r}")
            return False
        if found[1].failed:
            self.verdict.add(Wrong.ABORTED_READ, f"{topic.name} {id_}: {how}, and failed: {value[:60]!r}")
        self._agrees(topic, id_, value, how)
        return True

    def _agrees(self, topic: Topic, id_: history.Id, value: str, how: str) -> None:
        if (before := topic.values.setdefault(id_, value)) != value:
            sentence = f"{topic.name} {id_}: {how} says {value[:50]!r}, before it was {before[:50]!r}"
            self.verdict.add(Wrong.DISAGREEMENT, sentence)

    def _delivered(self, at: int, topic: Topic, of: Subscription, record: history.Delivered) -> None:
        self.verdict.delivered += 1
        if not self._known(topic, record.id, record.value, f"delivered to {record.subscription}"):
            return
        what = f"{topic.name} {record.subscription}: {record.id} to {record.consumer}"
        if not topic.wants(of, record.value):
            self.verdict.add(Wrong.UNWANTED, f"{what}, which its filter does not want: {record.value[:50]!r}")
        of.taken[record.consumer] += 1
        self._redelivered(of, record.consumer, of.taken[record.consumer])
        before = of.delivered.get(record.id)
        durable = of.durable.get(record.id)
        if durable is not None and of.connected.get(record.consumer, -1) > durable:
            self.verdict.add(Wrong.REDELIVERED_ACKED, f"{what}, acknowledged before that one connected")
        if of.order is history.Order.HELD:
            refused = of.refused[topic.by_value[record.value][1].key]
            refused.discard(record.id)
            if refused and min(refused) < record.id:
                self.verdict.add(Wrong.ORDER, f"{what}, before {min(refused)} of its key, which was refused")
        reason = max(self.disturbed, of.newest_connect, of.excused.get(record.id[:2], -1))
        if before is None or before.at < of.sought:
            self._in_order(topic, of, record, what)
        elif before.at > reason and not before.fetched_before_loss:
            sentence = f"{what}, and before to {before.consumer}, for no reason"
            if before.consumer == record.consumer:
                self.verdict.add(Wrong.REDELIVERED, sentence)
            else:
                of.doubtful[before.consumer].append(Doubt(sentence, of.taken[before.consumer] + LATE_MAX))
        at_loss = of.taken_at_loss.get(record.consumer, -math.inf)
        of.delivered[record.id] = Delivery(at, record.consumer, of.taken[record.consumer] <= at_loss + LATE_MAX)

    def _redelivered(self, of: Subscription, consumer: str, taken: float) -> None:
        doubts = of.doubtful[consumer]
        while doubts and doubts[0].until <= taken:
            self.verdict.add(Wrong.REDELIVERED, doubts.popleft().sentence)

    def _in_order(self, topic: Topic, of: Subscription, record: history.Delivered, what: str) -> None:
        if of.order is history.Order.NONE:
            return
        lane = "" if of.order is history.Order.ALL else topic.by_value[record.value][1].key
        highest = of.highest.get(lane)
        if highest is not None and record.id < highest:
            self.verdict.add(Wrong.ORDER, f"{what}, for the first time, after {highest} (key {lane!r})")
        else:
            of.highest[lane] = record.id

    # ---------------------------------------------------------------------------------------- at the end
    def end(self) -> Verdict:
        for topic in self.topics.values():
            places = self._log(topic)
            if topic.read_to_end:
                self._lost(topic, places)
            for name, of in topic.subscriptions.items():
                self._skipped(topic, name, of)
                for consumer in list(of.doubtful):
                    self._redelivered(of, consumer, math.inf)
            for (producer, seq), sending in topic.sends.items():
                if sending.ok is None and not sending.failed and not sending.unknown:
                    self.verdict.add(Wrong.STUCK, f"{topic.name} {producer}: message {seq} got no outcome")
        return self.verdict

    def _log(self, topic: Topic) -> dict[str, list[history.Id]]:
        """Where each value is; order and duplicates of the log."""
        places: dict[str, list[history.Id]] = {}
        newest: dict[str, int] = {}
        latest_sent: dict[str, int] = {}
        last: history.Id = (-1, -1, -1)
        for id_, value in topic.log:
            producer, sending = topic.by_value[value]
            if id_ <= last:
                self.verdict.add(Wrong.ID_REGRESS, f"{topic.name}: {id_} is read after {last}")
            last = id_
            copies = places.setdefault(value, [])
            if copies:
                self._copy(topic, producer, sending, id_, latest_sent[producer])
            elif sending.seq < newest.get(producer, -1):
                what = f"{topic.name} {producer}: message {sending.seq} first appears after {newest[producer]}"
                self.verdict.add(Wrong.ORDER, f"{what}, at {id_}")
            copies.append(id_)
            newest[producer] = max(newest.get(producer, -1), sending.seq)
            latest_sent[producer] = max(latest_sent.get(producer, -1), sending.sent)
        return places

    def _copy(self, topic: Topic, producer: str, sending: Sending, id_: history.Id, latest_sent: int) -> None:
        """Sent again without an outcome, it comes before whatever its producer sent after the outcome."""
        self.verdict.repeated += 1
        if self.dedup or (sending.ok is not None and latest_sent > sending.ok):
            self.verdict.add(Wrong.DUPLICATED, f"{topic.name} {producer}: message {sending.seq} is again at {id_}")

    def _lost(self, topic: Topic, places: dict[str, list[history.Id]]) -> None:
        there: dict[str, tuple[int, int]] = {}
        for value in places:
            producer, sending = topic.by_value[value]
            low, high = there.get(producer, (sending.seq, sending.seq))
            there[producer] = min(low, sending.seq), max(high, sending.seq)
        for (producer, seq), sending in topic.sends.items():
            if sending.id is None:
                continue
            found = places.get(sending.value)
            what = f"{topic.name} {producer}: message {seq} was acknowledged as {sending.id}"
            if not found:
                low, high = there.get(producer, (seq, seq - 1))
                where = Wrong.LOST_POSTFIX if seq > high else Wrong.LOST_PREFIX if seq < low else Wrong.LOST_MIDDLE
                self.verdict.add(where, what)
            elif sending.id not in found:
                self.verdict.add(Wrong.MISPLACED, f"{what} and is at {found}")

    def _skipped(self, topic: Topic, name: str, of: Subscription) -> None:
        for id_, count in of.acks.items():
            if count > 0:
                self.verdict.add(Wrong.STUCK, f"{topic.name} {name}: the ack of {id_} got no outcome")
        if not of.drained:
            return
        for id_, value in topic.log:
            if not topic.wants(of, value):
                continue
            before = of.delivered.get(id_)
            if before is None or (id_ >= of.from_id and before.at < of.sought):
                self.verdict.add(Wrong.SKIPPED, f"{topic.name} {name}: {id_} was never delivered")


def judge(records: Iterable[history.Record], *, dedup: bool = False) -> Verdict:
    """All that is wrong with a history; `dedup`: whether the topics deduplicate."""
    it = _Judge(dedup)
    for at, record in enumerate(records):
        it.take(at, record)
    return it.end()
