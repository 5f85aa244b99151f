
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto import names
from magnetar.proto.errors import InvalidName
from magnetar.proto.names import EARLIEST, LATEST, MessageId, NamespaceName, Position, TopicName


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
    st.integers(-1, names.LONG_MAX), st.integers(-1, names.LONG_MAX), st.integers(-1, 1000), st.integers(-1, 1000),
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
