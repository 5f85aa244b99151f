"""The cores of the SDK alone: what is decided, without a loop, a network or a clock."""

import tracemalloc
from contextlib import nullcontext
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from magnetar.client.core.batcher import Batcher, OutgoingMessage, encode_batch_entry
from magnetar.client.core.effects import ErrorLogThrottle
from magnetar.client.core.failover import Backoff, PartitionRouter, PartitionsRoutingMode
from magnetar.client.core.redelivery import (
    NACK_PRECISION_MS,
    WHOLE_ENTRY,
    AckTimeoutTracker,
    AckTracker,
    NackTracker,
    ReceivePermits,
)
from magnetar.client.model.settings import MultiplierRedeliveryBackoff
from magnetar.proto.entry import decode_batch, parse_header
from magnetar.proto.errors import ConnectionLost, NotOwner, ReadOnly, Unavailable
from magnetar.proto.names import Position, choose_partition_of_key

SINGLE, ROUND = PartitionsRoutingMode.UseSinglePartition, PartitionsRoutingMode.RoundRobinDistribution


# ---------------------------------------------------------------------------------- batcher
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("plain"), st.binary(max_size=60)),
        st.tuples(st.just("keyed"), st.binary(max_size=60)),
        st.tuples(st.just("delayed"), st.binary(max_size=60)),
        st.tuples(st.just("jump"), st.binary(max_size=60)),
        st.tuples(st.just("close"), st.just(b"")),
    ),
    max_size=60,
)


@given(ACTIONS, st.integers(1, 8), st.integers(20, 200), st.booleans())
def test_batches_keep_order_bounds_and_every_message_once(
    actions: list[tuple[str, bytes]], messages_max: int, bytes_max: int, batching: bool
) -> None:
    batcher = Batcher(5, messages_max=messages_max, bytes_max=bytes_max, batching=batching)
    sent: list[bytes] = []
    for action, payload in actions:
        if action == "close":
            batcher.close_batches()
            continue
        sent.append(payload)
        if action == "plain":
            batcher.add(payload, None)
        elif action == "keyed":
            batcher.add_message(OutgoingMessage(payload, partition_key="k"), None)
        elif action == "delayed":
            batcher.add_message(OutgoingMessage(payload, deliver_at=99), None)
        else:
            jump = OutgoingMessage(payload, sequence_id=batcher.next_sequence_id + 3)
            batcher.add_message(jump, None)
        batcher.check()
    batcher.close_batches()
    batcher.check()
    seen: list[bytes] = []
    last = 4
    for batch in batcher.ready:
        entry = encode_batch_entry(batch, "p", 1)
        header = parse_header(entry)
        assert header.sequence_id > last
        last = header.highest_sequence_id if header.batched else header.sequence_id
        seen += [payload for _, payload in decode_batch(header, entry)]
        assert header.num_messages == 1 or sum(len(part) for part in batch.items) <= bytes_max + 8 * header.num_messages
    assert seen == sent
    assert last < batcher.next_sequence_id


def test_a_sequence_id_is_never_given_twice_and_one_that_is_named_again_is_alone_in_its_entry() -> None:
    batcher = Batcher(0)
    batcher.add(b"x", None)
    batcher.add_message(OutgoingMessage(b"y", sequence_id=0), None)
    batcher.add_message(OutgoingMessage(b"z", sequence_id=1), None)
    assert batcher.next_sequence_id == 2
    batcher.close_batches()
    assert [(batch.sequence_id, batch.message_count, batch.goes_back) for batch in batcher.ready] == [
        (0, 1, False), (0, 1, True), (1, 1, False),
    ]  # fmt: skip
    batcher.check()


def test_a_message_that_cannot_be_encoded_uses_up_no_sequence_id() -> None:
    """Nor one that it names: the ids after it would be unknown to a broker that counts them."""
    batcher = Batcher(0)
    batcher.add(b"x", None)
    for bad in (OutgoingMessage(b"y", {"a": 5}), OutgoingMessage(b"y", {"a": 5}, sequence_id=40)):  # type: ignore[dict-item]
        with pytest.raises(TypeError):
            batcher.add_message(bad, None)
        assert batcher.next_sequence_id == 1
    batcher.add_message(OutgoingMessage(b"z", {"a": "b"}), None)
    batcher.add_message(OutgoingMessage(b"named", {"a": "b"}, sequence_id=2), None)
    batcher.close_batches()
    assert [(batch.sequence_id, batch.highest, batch.message_count) for batch in batcher.ready] == [(0, 2, 3)]
    batcher.check()


# ---------------------------------------------------------------------------------- router
def router(mode: PartitionsRoutingMode, partitions: int = 4, window_s: float = 0.01) -> PartitionRouter:
    return PartitionRouter(partitions, mode, Random(1), window_s=window_s, messages_max=3, bytes_max=1000)


@given(st.text(), st.integers(1, 50), st.sampled_from([SINGLE, ROUND]))
def test_a_key_decides_whatever_the_mode(key: str, partitions: int, mode: PartitionsRoutingMode) -> None:
    assert router(mode, partitions).choose_partition(key, 1, 0.0) == choose_partition_of_key(key, partitions)


def test_round_robin_stays_for_a_window_or_a_batch_and_visits_all() -> None:
    routed = router(ROUND)
    within = [routed.choose_partition(None, 1, 0.0) for _ in range(3)]
    assert len(set(within)) == 1
    assert routed.choose_partition(None, 1, 0.0) == (within[0] + 1) % 4
    assert routed.choose_partition(None, 1, 0.02) == (within[0] + 2) % 4
    assert {router(ROUND, window_s=0).choose_partition(None, 1, 0.0) for _ in range(1)} <= set(range(4))
    each = router(ROUND, window_s=0)
    assert sorted(each.choose_partition(None, 1, 0.0) for _ in range(4)) == [0, 1, 2, 3]


def test_a_single_partition_is_kept() -> None:
    routed = router(SINGLE)
    assert len({routed.choose_partition(None, 1, float(i)) for i in range(20)}) == 1


# ---------------------------------------------------------------------------------- permits, back-off
@given(st.integers(0, 50), st.lists(st.integers(1, 20)))
def test_permits_are_granted_exactly_once(size: int, taken: list[int]) -> None:
    permits = ReceivePermits(size, nullcontext())
    granted = permits.reset_for_new_stream()
    assert granted == max(1, size)
    again = 0
    for messages in taken:
        permits.count_received(messages)
        permits.count_used_permits(messages, permits.stream)
        again += permits.grant()
        permits.check()
        assert sum(taken) - again >= 0 or again <= sum(taken)
    assert sum(taken) - again < max(1, max(1, size) // 2) or again == sum(taken)
    assert permits.reset_for_new_stream() == granted


def test_back_off_grows_by_a_quarter_up_to_its_limit_and_begins_anew() -> None:
    backoff = Backoff(Random(1), 0.1, 0.25)
    delays = [backoff.next_delay_s() for _ in range(7)]
    for delay, whole in zip(delays, [0.1, 0.125, 0.15625, 0.1953125, 0.24414, 0.25, 0.25], strict=True):
        assert whole * 0.9 <= delay <= whole + 1e-5


def test_whoever_comes_back_is_found_after_at_most_a_third_of_the_time_it_was_away() -> None:
    backoff = Backoff(Random(1))
    passed = 0.0
    while passed < 100:
        pause = backoff.next_delay_s()
        assert pause <= passed / 3 + 0.1, "a quarter, and what chance takes off the pauses before"
        passed += pause
    backoff.check()
    backoff.reset()
    assert backoff.next_delay_s() <= 0.1


# ---------------------------------------------------------------------------------- acks
def test_acks_of_an_entry_are_gathered_and_a_whole_entry_is_named_as_one() -> None:
    tracker = AckTracker()
    here, there = Position(1, 1), Position(1, 2)
    for index in (2, 0):
        tracker.acknowledge(here, index, 3)
    tracker.acknowledge(there, 0, 2)
    tracker.acknowledge(there, 1, 2)
    assert tracker.pending_messages == 4
    group = tracker.take_ack_group()
    assert group == ({1: BitMap([2])}, {here: 0b101}, None)
    assert not tracker.take_ack_group()


def test_a_cumulative_ack_takes_the_highest_and_drops_what_it_covers() -> None:
    tracker = AckTracker()
    tracker.acknowledge(Position(1, 1), -1, 0)
    tracker.acknowledge(Position(1, 9), 1, 5)
    tracker.acknowledge_cumulative(Position(1, 5), 2, 10)
    tracker.acknowledge_cumulative(Position(1, 4), -1, 0)
    tracker.check()
    group = tracker.take_ack_group()
    assert group == ({}, {Position(1, 9): 0b10}, (Position(1, 5), 2))
    tracker.acknowledge_cumulative(Position(1, 5), 9, 10)
    assert tracker.take_ack_group().cumulative == (Position(1, 5), WHOLE_ENTRY)


# ---------------------------------------------------------------------------------- redelivery
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 20)), max_size=40), st.sets(st.integers(0, 9)))
def test_an_entry_comes_back_once_never_early_and_at_most_a_tick_late(
    watched: list[tuple[int, float]], forgotten: set[int]
) -> None:
    tracker = AckTimeoutTracker(5.0, 0.5)
    due: dict[int, float] = {}
    for entry, at in sorted(watched, key=lambda each: each[1]):
        tracker.track(Position(1, entry), at)
        due.setdefault(entry, at + 5.0)
        tracker.check()
    for entry in sorted(forgotten):
        tracker.discard(Position(1, entry))
        due.pop(entry, None)
    came: list[int] = []
    for step in range(61):
        now = step * 0.5
        for position in tracker.take_due(now):
            assert due[position.entry_id] <= now
            assert now <= due[position.entry_id] + 1.0
            came.append(position.entry_id)
        tracker.check()
    assert sorted(came) == sorted(due)
    assert len(tracker) == 0


def test_an_ack_time_out_is_longer_by_its_back_off() -> None:
    tracker = AckTimeoutTracker(10.0, 1.0)
    tracker.track(Position(1, 0), 0.0)
    tracker.track(Position(1, 1), 0.0, 4.0)
    assert tracker.take_due(11.0) == [Position(1, 0)]
    assert tracker.take_due(14.0) == []
    assert tracker.take_due(15.0) == [Position(1, 1)]


def test_what_a_cumulative_ack_covers_is_not_watched_any_more() -> None:
    tracker = AckTimeoutTracker(1.0, 0.5)
    for entry in range(5):
        tracker.track(Position(1, entry), 0.0)
    tracker.discard_up_to(Position(1, 2))
    assert [position.entry_id for position in tracker.take_due(10.0)] == [3, 4]


NACKS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4000), st.sampled_from([0, 900, 60_000])), max_size=40)


@given(NACKS, st.sets(st.integers(0, 12), max_size=4), st.integers(-1, 6))
def test_a_nacked_entry_comes_back_once_never_early_and_a_bucket_late_at_most(
    nacks: list[tuple[int, int, int]], forgotten: set[int], covered: int
) -> None:
    tracker = NackTracker()
    due: dict[Position, tuple[int, int]] = {}
    for entry, at, delay in sorted(nacks, key=lambda each: each[1]):
        position = Position(1 + entry // 7, entry % 7)
        tracker.track(position, at, delay)
        due.setdefault(position, (at + delay, max(NACK_PRECISION_MS, -(-delay // 256))))
    tracker.check()
    for entry in forgotten:
        tracker.discard(Position(1 + entry // 7, entry % 7))
        due.pop(Position(1 + entry // 7, entry % 7), None)
    if covered >= 0:
        tracker.discard_up_to(Position(1, covered))
        due = {position: when for position, when in due.items() if position > Position(1, covered)}
    tracker.check()
    assert len(tracker) == len(due)
    now = 0
    while tracker:
        following = tracker.next_due_ms()
        assert following is not None
        assert following > now or not now
        now = following
        for ledger_id, entries in tracker.take_due(now).items():
            for entry_id in entries:
                time_ms, width = due.pop(Position(ledger_id, entry_id))
                assert time_ms <= now < time_ms + width
        tracker.check()
    assert not due


TRACED = 100_000
"""So many negative acknowledgements with tracemalloc, which takes ten times as long."""


@pytest.mark.parametrize("delay_ms", [1000, 86_400_000])
def test_complaint_17_a_million_negative_acks_take_little_memory_however_long_they_wait(delay_ms: int) -> None:
    """Pulsar: 118 bytes a message, 1.8 GB for an hour at 10,000/s. 10,000 a second here, over 20 ledgers."""
    tracemalloc.start()
    tracker = NackTracker()
    for number in range(1_000_000):
        if number == TRACED:
            python_bytes = tracemalloc.get_traced_memory()[0]
            tracemalloc.stop()
        tracker.track(Position(number // 50_000, number % 50_000), number // 10, delay_ms)
    assert len(tracker) == 1_000_000
    assert tracker.memory_bytes < 4_500_000
    assert python_bytes < 4 * TRACED, "nothing is kept for each message, which takes 8 bytes at least"
    taken = tracker.take_due(delay_ms + 100_000 + max(NACK_PRECISION_MS, delay_ms // 256 + 1))
    assert sum(map(len, taken.values())) == 1_000_000
    assert not tracker


def test_the_back_off_doubles_up_to_its_bound() -> None:
    backoff = MultiplierRedeliveryBackoff()
    assert [backoff.next(count) for count in range(9)] == [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000, 60000]
    assert MultiplierRedeliveryBackoff(10, 1000, 10).next(10**9) == 1000
    assert MultiplierRedeliveryBackoff(10, 1000, 1).next(10**9) == 10


def test_a_reason_is_said_once_a_minute_and_ends_with_an_acknowledgement() -> None:
    reasons = ErrorLogThrottle()
    said = [reasons.admit(Unavailable(f"a{now:g}"), now) for now in (0.0, 1.0, 59.0, 60.0, 61.0)]
    assert said == ["the broker said: Unavailable: a0", None, None, "the broker said: Unavailable: a60", None]
    assert reasons.admit(ReadOnly("b"), 62.0) is not None
    assert reasons.last == "the broker said: ReadOnly: b"
    assert reasons.admit(ConnectionLost("c"), 63.0) is None
    assert reasons.last == "the broker said: ReadOnly: b", "a lost connection says nothing about messages"
    reasons.last = ""
    assert reasons.last == ""
    assert reasons.admit(ReadOnly("b"), 64.0) is None
    assert reasons.admit(NotOwner("d"), 65.0) is None, "a topic's move needs no warning"
    assert reasons.last == "the broker said: NotOwner: d"
