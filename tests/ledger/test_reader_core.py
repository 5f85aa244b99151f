"""Range reads and the bound of reading, without a network."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.ledger import metadata_core as m
from magnetar.ledger.reader_core import (
    EntriesRead,
    EntryMissing,
    EntryRangeRead,
    FailRead,
    FinishRead,
    PayloadTailChecksum,
    ReadableEntryBound,
    ReadFailed,
    ReadFailure,
    SendReadToBookie,
    SpeculativeReadDue,
    encode_header,
    verify_entry,
)
from magnetar.ledger.writer_core import Striping
from magnetar.metadata.records import CLOSED, Fragment, LedgerRecord
from magnetar.proto.checksum import JOINED_BYTES_MIN, crc32c


def record(shape: tuple[int, int, int] = (3, 3, 2), **changes: object) -> LedgerRecord:
    names = "abcdef"[: shape[0]]
    fresh = m.make_ledger_record(
        7, Striping(*shape), tuple(names), key=b"k" * 20, token="t", created_ms=0, properties={}
    )
    return msgspec.structs.replace(fresh, **{"state": CLOSED, "last_entry": 9, **changes})


def stored(entry: int, payload: bytes = b"payload", ledger: int = 7) -> bytes:
    return encode_header(ledger, entry, entry - 1, 10, (payload,)) + payload


def ask(effect: object) -> SendReadToBookie:
    assert isinstance(effect, SendReadToBookie)
    return effect


def test_one_bookie_is_asked_for_the_whole_range_when_each_holds_everything() -> None:
    first = ask(EntryRangeRead(record(), 2, 8, 1000).start())
    assert (first.entry, first.count, first.bytes_max) == (2, 7, 1000)


def test_a_striped_ledger_is_asked_at_the_bookie_with_the_longest_run() -> None:
    first = ask(EntryRangeRead(record((4, 2, 2)), 5, 9, 1000).start())
    assert (first.bookie, first.count) == ("c", 2), "entry 5 lies on b and c, entry 6 on c and d"


def test_a_read_stops_at_the_end_of_a_fragment() -> None:
    split = record(fragments=(Fragment(0, ("a", "b", "c")), Fragment(4, ("a", "b", "d"))))
    assert ask(EntryRangeRead(split, 2, 9, 1000).start()).count == 2
    assert ask(EntryRangeRead(split, 4, 9, 1000).start()).count == 6


def test_an_answer_counts_up_to_the_first_entry_that_is_not_the_right_one() -> None:
    read = EntryRangeRead(record(), 0, 5, 1000)
    bookie = ask(read.start()).bookie
    done = read.receive(EntriesRead(bookie, [stored(0), stored(1), stored(3), stored(2)]))
    assert isinstance(done, FinishRead)
    assert [entry.entry for entry in done.entries] == [0, 1]


@pytest.mark.parametrize(
    "bad", [stored(1), stored(0, ledger=8), stored(0)[:-1], stored(0) + b"x", b"", b"short", b"\0" * 60]
)
def test_what_is_not_the_entry_is_no_answer_and_the_next_replica_is_asked(bad: bytes) -> None:
    read = EntryRangeRead(record(), 0, 0, 1000)
    first = ask(read.start()).bookie
    second = ask(read.receive(EntriesRead(first, [bad]))).bookie
    assert second != first
    assert [bookie for bookie, _ in read.damaged] == [first]
    assert isinstance(read.receive(EntriesRead(second, [stored(0)])), FinishRead)
    read.check()


def test_replicas_that_failed_a_moment_ago_are_asked_last() -> None:
    """The one that gave most trouble last of all, also of a long run of entries."""
    read = EntryRangeRead(record(), 0, 5, 1000, trouble={"a": 2.0, "b": 0.5})
    asked = [ask(read.start()).bookie]
    for _ in range(2):
        asked.append(ask(read.receive(ReadFailed(asked[-1]))).bookie)
    assert asked == ["c", "b", "a"]
    striped = EntryRangeRead(record((4, 2, 2)), 5, 9, 1000, trouble={"c": 0.5})
    assert ask(striped.start()).bookie == "b", "c has the longer run"


def test_the_next_replica_is_asked_only_when_nobody_has_answered_for_a_while_and_the_first_good_answer_wins() -> None:
    read = EntryRangeRead(record(), 0, 5, 1000)
    first = ask(read.start()).bookie
    second = ask(read.receive(SpeculativeReadDue())).bookie
    assert read.slow == [first]
    assert read.receive(EntryMissing(second)) == SendReadToBookie(({"a", "b", "c"} - {first, second}).pop(), 0, 6, 1000)
    assert not read.has_bookie_to_ask, "nobody is left"
    assert read.receive(SpeculativeReadDue()) is None
    read.check()
    done = read.receive(EntriesRead(first, [stored(0)]))
    assert isinstance(done, FinishRead), "the slow one was the first with a good answer"
    with pytest.raises(AssertionError, match="finished"):
        read.receive(ReadFailed(second))


def test_a_read_with_open_questions_fails_only_when_all_are_answered() -> None:
    read = EntryRangeRead(record(), 0, 0, 1000)
    asked = [
        ask(read.start()).bookie,
        ask(read.receive(SpeculativeReadDue())).bookie,
        ask(read.receive(SpeculativeReadDue())).bookie,
    ]
    assert sorted(asked) == ["a", "b", "c"]
    assert read.receive(EntryMissing(asked[1])) is None
    assert read.receive(EntryMissing(asked[2])) is None
    read.check()
    failed = read.receive(EntryMissing(asked[0]))
    assert isinstance(failed, FailRead)
    assert failed.why is ReadFailure.LOST
    with pytest.raises(AssertionError):
        read.receive(EntryMissing(asked[0]))


@given(st.sampled_from([(3, 3, 2), (4, 3, 2), (5, 2, 1), (1, 1, 1)]), st.lists(st.integers(0, 9), max_size=40))
def test_any_order_of_answers_and_waits_asks_each_replica_once_and_ends(
    shape: tuple[int, int, int], steps: list[int]
) -> None:
    """`LOST` is said exactly when all of the write set are certain, however many were asked at once."""
    read = EntryRangeRead(record(shape), 3, 9, 1000)
    effect: object = read.start()
    open_: list[str] = []
    facts: list[type] = []
    for step in [*steps, *([0] * 20)]:
        if isinstance(effect, SendReadToBookie):
            open_.append(effect.bookie)
        elif effect is not None:
            break
        read.check()
        if step >= 7:
            effect = read.receive(SpeculativeReadDue())
            continue
        bookie = open_.pop(step % len(open_))
        facts.append(EntryMissing if step % 2 else ReadFailed)
        effect = read.receive(facts[-1](bookie))
    assert isinstance(effect, FailRead)
    assert sorted(effect.asked) == sorted("abcdef"[slot] for slot in Striping(*shape).slots_of_entry(3))
    assert (effect.why is ReadFailure.LOST) == (ReadFailed not in facts)


def test_damage_is_told_of_the_entry_it_is_in_also_behind_good_ones() -> None:
    read = EntryRangeRead(record(), 4, 9, 1000)
    bookie = ask(read.start()).bookie
    done = read.receive(EntriesRead(bookie, [stored(4), stored(5), b"rot", stored(7)]))
    assert isinstance(done, FinishRead)
    assert read.damaged == [(bookie, 6)]


@pytest.mark.parametrize(
    ("answers", "state", "expected"),
    [
        ((EntryMissing, EntryMissing, EntryMissing), CLOSED, ReadFailure.LOST),
        ((EntryMissing, ReadFailed, EntryMissing), CLOSED, ReadFailure.UNAVAILABLE),
        ((EntryMissing, EntryMissing, EntryMissing), "open", ReadFailure.UNAVAILABLE),
    ],
)
def test_lost_is_said_only_when_every_replica_of_a_closed_ledger_is_certain(
    answers: tuple[type[EntryMissing] | type[ReadFailed], ...], state: str, expected: ReadFailure
) -> None:
    read = EntryRangeRead(record(state=state), 0, 0, 1000)
    effect: object = read.start()
    for answer in answers:
        effect = read.receive(answer(ask(effect).bookie))
    assert isinstance(effect, FailRead)
    assert effect.why is expected
    assert sorted(effect.asked) == ["a", "b", "c"]


def test_m22_the_lac_of_an_open_ledger_is_a_lower_bound_and_never_its_end() -> None:
    bound = ReadableEntryBound(record(state="open"))
    assert (bound.last_entry, bound.closed) == (-1, False)
    bound.advance_lac(4)
    bound.advance_lac(2)
    assert (bound.last_entry, bound.closed) == (4, False)
    bound.apply_record(record())
    assert (bound.last_entry, bound.closed) == (9, True)
    bound.advance_lac(12)
    assert bound.last_entry == 9


def test_entries_before_the_last_fragment_are_readable_without_a_lac() -> None:
    split = record(state="open", fragments=(Fragment(0, ("a", "b", "c")), Fragment(4, ("a", "b", "d"))))
    assert ReadableEntryBound(split).last_entry == 3


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=4), st.data())
def test_any_flipped_bit_of_a_stored_entry_is_seen(frames: list[bytes], data: st.DataObject) -> None:
    whole = encode_header(7, 3, 2, 99, frames) + b"".join(frames)
    found = verify_entry(whole, 7, 3)
    assert found is not None
    assert (found.lac, found.length, found.payload) == (2, 99, b"".join(frames))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    assert verify_entry(bytes(flipped), 7, 3) is None


@pytest.mark.parametrize("size", [5, JOINED_BYTES_MIN, 100_003])
def test_a_seal_is_the_same_when_the_checksum_of_a_tail_is_known(size: int) -> None:
    payload = random.Random(size).randbytes(size + 20)
    assert encode_header(7, 3, 2, 99, (payload,), PayloadTailChecksum(crc32c(payload[20:]), size)) == encode_header(
        7, 3, 2, 99, (payload,)
    )
