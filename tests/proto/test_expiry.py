"""When single messages expire: the property, the runs of a batch, and what of both counts as absent."""

from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.core.batcher import Batcher, OutgoingMessage, encode_batch_entry
from magnetar.proto.entry import decode_batch, parse_header
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.expiry import (
    EXPIRED_AT_PROPERTY,
    EXPIRES_AT_PROPERTY,
    EXPIRY_RUNS_MAX,
    EntryExpiry,
    ExpiryRun,
    find_entry_expiry,
    make_dead_letter_properties,
    parse_expires_at,
)

TIMES = st.lists(st.one_of(st.just(0), st.integers(1, 6)), min_size=1, max_size=300)


def batches_of(times: list[int], *, key_based: bool = False) -> list[EntryExpiry | None]:
    """The expiry of each entry into which a producer puts messages with these times (0: never), and of how many."""
    batcher = Batcher(0, key_based=key_based)
    for at_ms in times:
        properties = {EXPIRES_AT_PROPERTY: str(at_ms)} if at_ms else {}
        batcher.add_message(OutgoingMessage(b"x", properties), None)
    batcher.close_batches()
    batcher.check()
    entries = [encode_batch_entry(each, "p", 1) for each in batcher.ready]
    headers = [parse_header(each) for each in entries]
    assert sum(each.num_messages for each in headers) == len(times)
    assert all(len(each.metadata.expiry_runs) <= 3 * EXPIRY_RUNS_MAX for each in headers)
    found = []
    for header, entry in zip(headers, entries, strict=True):
        told = [parse_expires_at({p.key: p.value for p in f.properties}.get(EXPIRES_AT_PROPERTY)) for f, _ in
                decode_batch(header, entry)]  # fmt: skip
        expiry = find_entry_expiry(header.metadata, entry, header.payload_offset, batched=header.batched)
        for now in range(8):
            bits = expiry.find_expired_bits(now) if expiry is not None else 0
            assert bits == sum(1 << at for at, each in enumerate(told) if 0 < each <= now)
        found.append(expiry)
    return found


@given(TIMES, st.booleans())
def test_the_head_of_each_entry_says_of_each_message_what_its_property_says(times: list[int], key_based: bool) -> None:
    batches_of(times, key_based=key_based)


def test_a_batch_that_would_need_too_many_runs_is_closed_and_plain_messages_between_cost_nothing() -> None:
    first, second = batches_of([1 + number % 2 for number in range(EXPIRY_RUNS_MAX + 1)])
    assert first is not None
    assert len(first.runs) == EXPIRY_RUNS_MAX
    assert second is not None
    assert second.runs == (ExpiryRun(0, 1, 1),)
    assert batches_of([0] * 500) == [None]


def test_a_single_message_has_the_time_of_its_property_and_a_strange_value_counts_as_absent() -> None:
    def of(value: str, **more: int) -> EntryExpiry | None:
        metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, **more)
        metadata.properties.add(key="other", value="7")
        metadata.properties.add(key=EXPIRES_AT_PROPERTY, value=value)
        encoded = metadata.SerializeToString()
        return find_entry_expiry(
            metadata, encoded, len(encoded), batched=metadata.HasField("num_messages_in_batch")
        )

    expiry = of("1000")
    assert expiry is not None
    assert [expiry.find_expired_bits(now) for now in (999, 1000, 1 << 70)] == [0, 1, 1]
    for value in ("", "0", "-5", "soon", "1.5", "²", str(1 << 63), "9" * 5000):
        assert of(value) is None, value
    assert of(str((1 << 63) - 1)) is not None
    chunk = of("1000", num_chunks_from_msg=3)
    assert chunk is not None
    assert chunk.find_expired_bits(5000) == 0, "its consumer judges it when it is whole"
    assert of("1000", num_messages_in_batch=4) is None, "properties in the head of a batch mean nothing"


def test_runs_that_contradict_the_batch_count_as_absent() -> None:
    def of(*numbers: int, count: int = 4) -> EntryExpiry | None:
        metadata = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=count)
        metadata.expiry_runs.extend(numbers)
        encoded = metadata.SerializeToString()
        return find_entry_expiry(
            metadata, encoded, len(encoded), batched=metadata.HasField("num_messages_in_batch")
        )

    assert of(1, 2, 7, 3, 1, 9) is not None
    wrong = ((1, 2), (3, 2, 7), (0, 0, 7), (0, 2, 7, 1, 1, 9), (0, 1, 0), (1 << 60, 1 << 60, 7), (0, 1, 1 << 63))
    for numbers in wrong:
        assert of(*numbers) is None, numbers
    many = [number for at in range(EXPIRY_RUNS_MAX + 1) for number in (at, 1, 7)]
    assert of(*many, count=1000) is None


def test_a_letter_does_not_expire() -> None:
    assert make_dead_letter_properties({"a": "b", EXPIRES_AT_PROPERTY: "9"}) == {"a": "b", EXPIRED_AT_PROPERTY: "9"}
