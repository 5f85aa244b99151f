
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.common.errors import InvalidMessage
from magnetar.client.model.message_id import MessageId
from magnetar.proto.errors import InvalidName

NUMBER = st.integers(-1, (1 << 63) - 1)
IDS = st.builds(MessageId, st.integers(-1, 99), NUMBER, NUMBER, st.integers(-1, 999), st.integers(0, 1000))


@given(IDS)
def test_an_id_survives_bytes_and_text(id_: MessageId) -> None:
    copy = MessageId.deserialize(id_.serialize(), topic="t")
    assert (copy, copy.batch_size(), copy.topic_name()) == (id_, id_.batch_size(), "t")
    assert hash(copy) == hash(id_)
    assert MessageId.from_wire(id_.to_wire()) == id_
    text = f"{id_.ledger_id()}:{id_.entry_id()}:{id_.partition()}:{id_.batch_index()}"
    assert MessageId.parse(text) == id_


def test_the_bytes_of_latest_are_pulsars() -> None:
    assert MessageId.latest.serialize() == bytes.fromhex("08ffffffffffffffff7f10ffffffffffffffff7f")
    assert MessageId.deserialize(MessageId.earliest.serialize()) == MessageId.earliest
    assert MessageId.earliest < MessageId(0, 0, 0, 0) < MessageId.latest


@pytest.mark.parametrize("wrong", [b"\xff", b"", b"\x08\x01"])
def test_bytes_that_are_no_id_are_refused(wrong: bytes) -> None:
    with pytest.raises(InvalidMessage):
        MessageId.deserialize(wrong)


def test_text_that_is_no_id_is_refused() -> None:
    with pytest.raises(InvalidName):
        MessageId.parse("one:two")
    with pytest.raises(InvalidMessage, match="partition"):
        MessageId.parse("1:2:-5")
