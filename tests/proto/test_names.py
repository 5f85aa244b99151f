
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto import names
from magnetar.proto.errors import InvalidName
from magnetar.proto.names import (
    DEAD_LETTERS,
    EARLIEST,
    LATEST,
    RETRIES,
    MessageId,
    NamespaceName,
    Position,
    TopicName,
    find_retried_topic,
    is_default_letter_topic,
    make_letter_topic_name,
)


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("flights", "persistent://public/default/flights"),
        ("a/b/c", "persistent://a/b/c"),
        ("persistent://a/b/c", "persistent://a/b/c"),
        ("c-partition-12", "persistent://public/default/c-partition-12"),
        ("Ölpreis 100%", "persistent://public/default/Ölpreis 100%"),
    ],
)
def test_short_names_expand_to_public_default(text: str, full: str) -> None:
    assert TopicName.parse(text).full == full
    assert TopicName.parse(full) == TopicName.parse(text)
    assert str(TopicName.parse(text)) == full


@pytest.mark.parametrize(
    "text",
    [
        "", "a/b", "a/b/c/d", "persistent://a/b", "persistent://", "persistent:///b/c", "topic://a/b/c",
        "a b/c/d", "a/b/", " x", "x\n", "x\x00", "..", "x-partition-01", "a/b/" + "x" * 256, "a/\ud800/c", "http://a/b/c",
    ],
)  # fmt: skip
def test_wrong_topic_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        TopicName.parse(text)


def test_a_partition_is_part_of_the_name() -> None:
    topic = TopicName.parse("persistent://a/b/c")
    second = topic.with_partition(2)
    assert (second.full, second.is_partition, second.base) == ("persistent://a/b/c-partition-2", True, topic)
    assert TopicName.parse(second.full) == second
    assert not topic.is_partition
    assert topic.base is topic


@pytest.mark.parametrize("text", ["", "a", "a/b/c", "a b/c", "a/b c", "/b", "a/"])
def test_wrong_namespaces_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        NamespaceName.parse(text)


@pytest.mark.parametrize("text", ["", "a/b", "\t", "a\nb", ".", "x" * 256])
def test_wrong_subscription_names_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        names.check_subscription_name(text)


@given(st.text())
def test_any_text_is_a_topic_name_or_refused(text: str) -> None:
    try:
        topic = TopicName.parse(text)
    except InvalidName:
        return
    assert TopicName.parse(topic.full) == topic
    assert len(topic.local.encode()) <= names.NAME_BYTES_MAX


IDS = st.builds(
    MessageId,
    st.integers(-1, names.INT64_MAX), st.integers(-1, names.INT64_MAX), st.integers(-1, 1000), st.integers(-1, 1000),
)  # fmt: skip


@given(IDS)
def test_a_message_id_survives_text_and_wire(id_: MessageId) -> None:
    assert MessageId.parse(str(id_)) == id_
    assert MessageId.from_wire(id_.to_wire()) == id_


@given(IDS, IDS)
def test_message_ids_order_by_ledger_entry_batch_partition(a: MessageId, b: MessageId) -> None:
    key = lambda id_: (id_.ledger_id, id_.entry_id, id_.batch_index, id_.partition)
    assert (a < b) == (key(a) < key(b))
    assert (a <= b) == (key(a) <= key(b))
    assert (a > b) == (b < a)
    assert (a >= b) == (b <= a)


@pytest.mark.parametrize("text", ["", "1", "a:b", "1:2:3:4:5", "1:2:x", "99999999999999999999:1"])
def test_wrong_message_ids_are_refused(text: str) -> None:
    with pytest.raises(InvalidName):
        MessageId.parse(text)


def test_earliest_and_latest_stand_around_everything() -> None:
    assert EARLIEST < Position(0, 0) < LATEST
    assert MessageId.parse("earliest").position == EARLIEST
    assert MessageId.parse("latest").position == LATEST


NAMED = st.tuples(st.integers(1, 255), st.sampled_from(["x", "ß", "語", "🦜"])).map(
    lambda given: "n" + given[1] * ((given[0] - 1) // len(given[1].encode()))
)


@given(NAMED, NAMED)
def test_every_topic_and_subscription_has_letter_topics_with_partitions(local: str, subscription: str) -> None:
    topic = TopicName.parse(f"a/b/{local}")
    whole = f"{topic.full}-{subscription}"
    dead, retry = (make_letter_topic_name(topic, subscription, each) for each in (DEAD_LETTERS, RETRIES))
    for letters, suffix in ((dead, DEAD_LETTERS), (retry, RETRIES)):
        assert TopicName.parse(letters.with_partition(9999).full).base == letters
        assert is_default_letter_topic(letters.with_partition(7), subscription, suffix)
        fits = len(f"{local}-{subscription}{RETRIES}-partition-9999".encode()) <= 255
        assert (letters.full == whole + suffix) is fits
    found = find_retried_topic(retry.with_partition(3), subscription)
    assert [make_letter_topic_name(found, subscription, each) for each in (DEAD_LETTERS, RETRIES)] == [dead, retry]
    assert find_retried_topic(dead, subscription) == dead


def test_shortened_letter_topics_of_different_topics_and_subscriptions_are_different() -> None:
    topics = [TopicName.parse("t" * 250), TopicName.parse("t" * 251)]
    topics += [TopicName.parse("t" * 200 + f"-priority-{level}") for level in range(3)]
    subscriptions = ["s" * 100, "s" * 99 + "t", "s" * 250, "s" * 251]
    made = {make_letter_topic_name(topic, each, DEAD_LETTERS) for topic in topics for each in subscriptions}
    assert len(made) == len(topics) * len(subscriptions)


def test_a_subscription_of_usual_size_stays_whole_in_a_shortened_letter_topic() -> None:
    made = make_letter_topic_name(TopicName.parse("orders-" * 30), "billing", DEAD_LETTERS)
    assert made.local.startswith("orders-orders-")
    assert made.local.endswith("-billing-DLQ")
    assert len(make_letter_topic_name(TopicName.parse("t" * 255), "s" * 255, RETRIES).local) == 240


def test_a_subscription_that_is_no_name_has_no_letter_topic() -> None:
    for wrong in ("a/b", "\n", "\ud800"):
        with pytest.raises(InvalidName):
            make_letter_topic_name(TopicName.parse("t"), wrong, DEAD_LETTERS)
