"""The shape of a log: positions across ledgers, empty ones included."""

from collections import Counter

import pytest

from magnetar.broker.log.log_shape_core import LEDGER_AGE_JITTER, LedgerSpan, LogShape, find_ledger_age_share
from magnetar.proto.names import EARLIEST, LATEST, Position, TopicName
from tests.broker.subscription.core.shapes import positions_of, shape_of

SHAPE = shape_of(3, 0, 2, 1)  # ledgers 10, 20 (empty), 30, 40 (open)


@pytest.mark.parametrize(
    ("position", "after", "before"),
    [
        ((10, 0), (10, 1), (10, -1)),
        ((10, 2), (30, 0), (10, 1)),
        ((20, 0), (30, 0), (10, 2)),
        ((30, 1), (40, 0), (30, 0)),
        ((40, 0), (40, 1), (30, 1)),
        ((15, 7), (30, 0), (10, 2)),
        ((-1, -1), (10, 0), (10, -1)),
    ],
)
def test_the_neighbours_of_a_position(
    position: tuple[int, int], after: tuple[int, int], before: tuple[int, int]
) -> None:
    assert SHAPE.position_after(Position(*position)) == after
    assert SHAPE.position_before(Position(*position)) == before


def test_after_and_before_walk_the_whole_log() -> None:
    walked, position = [], SHAPE.start_position
    while SHAPE.has_visible_entry(SHAPE.position_after(position)):
        position = SHAPE.position_after(position)
        walked.append(position)
    assert walked == positions_of(SHAPE)
    back = [SHAPE.last_position]
    while (earlier := SHAPE.position_before(back[-1])) != SHAPE.start_position:
        back.append(earlier)
    assert back[::-1] == walked


def test_a_mark_is_clamped_into_the_log() -> None:
    assert SHAPE.clamp_mark_to_log(EARLIEST) == (10, -1)
    assert SHAPE.clamp_mark_to_log(LATEST) == (40, 0)
    assert SHAPE.clamp_mark_to_log(Position(20, -1)) == (20, -1)
    assert shape_of(0).clamp_mark_to_log(LATEST) == (10, -1)


def test_nothing_can_be_read_of_a_log_whose_entries_were_all_trimmed() -> None:
    empty, mark = shape_of(0), Position(7, 3)
    assert mark < empty.last_position
    assert not empty.has_readable_entry_after(mark)
    assert SHAPE.has_readable_entry_after(mark)


def test_indexes_find_their_ledger() -> None:
    assert [span.ledger_id if (span := SHAPE.find_span_of_index(index)) else None for index in range(-1, 7)] == [
        10, 10, 10, 10, 30, 30, 40, None,
    ]  # fmt: skip


def test_what_breaks_the_shape_is_refused() -> None:
    shape = shape_of(1, 1)
    with pytest.raises(AssertionError, match="increase"):
        shape.add(LedgerSpan(5, 2))
    with pytest.raises(AssertionError, match="only the last"):
        shape.add(LedgerSpan(50, 2))
    with pytest.raises(AssertionError, match="never trimmed"):
        shape.remove(20)
    broken = LogShape()
    broken.add(LedgerSpan(1, 0, 0, 6))
    broken.add(LedgerSpan(2, 5, open=True))
    with pytest.raises(AssertionError, match="overlap"):
        broken.check()


def test_a_ledger_that_is_gone_between_two_others_is_leapt_over() -> None:
    shape = shape_of(3, 4, 2, 1, per_entry=2)  # indexes 0 … 5, 6 … 13, 14 … 17, 18 … 19
    shape.remove(20)
    shape.check()
    assert shape.position_after(Position(10, 2)) == shape.position_at_or_after(Position(20, 1)) == shape.position_after(
        Position(20, 3)
    ) == (30, 0)
    assert shape.position_before(Position(30, 0)) == shape.position_before(Position(20, 2)) == (10, 2)
    assert not shape.has_visible_entry(Position(20, 0))
    assert shape.clamp_mark_to_log(Position(20, 2)) == (20, 2), "a mark may stand where something was"
    found = [shape.find_span_of_index(index) for index in (5, 6, 13, 14, 19)]
    assert [span.ledger_id if span else None for span in found] == [10, 30, 30, 30, 40]
    assert [shape.count_messages_from(index) for index in (0, 5, 6, 10, 14, 19, 20)] == [12, 7, 6, 6, 6, 1, 0]
    assert [shape.index_after_next_messages(0, messages) for messages in (0, 5, 6, 9, 10, 11, 12, 99)] == [
        0,
        5,
        14,
        17,
        18,
        19,
        20,
        20,
    ]
    assert [shape.index_after_next_messages(index, 1) for index in (5, 6, 13, 14)] == [14, 15, 15, 15]


# ------------------------------------------------------------------------------------ the age at which a ledger ends
def test_ten_thousand_topics_of_one_age_end_their_ledgers_evenly_over_a_fifth_of_it() -> None:
    """They began at one moment, with ids in a row, and end by `roll_minutes` = 240: within 48 minutes, 208 a minute."""
    topics = [TopicName.parse(f"persistent://tenant/namespace/topic-{number}") for number in range(10_000)]
    for first_id in (1, 90_000):
        ends = Counter(int(find_ledger_age_share(topic, first_id + at) * 240) for at, topic in enumerate(topics))
        assert min(ends) == 192, "none earlier than four fifths"
        assert max(ends) <= 240, "and none later than the limit"
        assert max(ends.values()) < 1.5 * 10_000 / 48
        assert min(ends[minute] for minute in range(192, 240)) > 0.5 * 10_000 / 48


def test_topics_that_ended_together_once_do_not_end_together_again() -> None:
    topics = [TopicName.parse(f"persistent://tenant/namespace/topic-{number}") for number in range(10_000)]
    first = [find_ledger_age_share(topic, 7 + at) for at, topic in enumerate(topics)]
    together = [at for at, share in enumerate(first) if share > 1 - LEDGER_AGE_JITTER / 48]
    again = Counter(int(find_ledger_age_share(topics[at], 20_000 + at) * 240) for at in together)
    assert len(together) > 100
    assert max(again.values()) < len(together) / 5


def test_a_ledgers_share_of_the_age_is_the_same_at_every_look() -> None:
    topic = TopicName.parse("persistent://tenant/namespace/topic")
    assert find_ledger_age_share(topic, 7) == find_ledger_age_share(TopicName.parse(topic.full), 7)
    assert 1 - LEDGER_AGE_JITTER < find_ledger_age_share(topic, 7) <= 1
