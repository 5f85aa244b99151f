"""ADD_MANY: its bytes (ledger/peer_format.py), and that each entry is answered as if it had come alone."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from magnetar.ledger.peer_format import (
    ADDS_PER_REQUEST_MAX,
    ENTRY_HEADER_STRUCT,
    JOINED_BYTES_MAX,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestHead,
    Status,
    VerifiedAdds,
    decode_add_statuses,
    decode_answer,
    decode_request,
    encode_add_many_request,
    encode_add_statuses,
    encode_adds,
    verify_add,
    verify_adds,
)
from magnetar.runtime.files import Buffer
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, OTHER_KEY, payload_of, rows, stored_entry
from tests.bookie.stores import NODE

pytestmark = pytest.mark.run_by.with_args(with_cluster)

MAX = 1 << 20


def request(stored: Sequence[bytes], ledger: int = 1) -> tuple[BookieRequestHead, list[Buffer]]:
    first = ENTRY_HEADER_STRUCT.unpack_from(stored[0])[1]
    return decode_request(encode_add_many_request(ledger, first, len(stored), KEY)), encode_adds(rows(stored))


def stored_of(opened: VerifiedAdds) -> list[bytes]:
    return [b"".join(stored) for _, stored, _ in opened.entries]


# ---------------------------------------------------------------------------------------- bytes
def test_example_of_the_specification() -> None:
    head, frames = request([stored_entry(1, 3, b"ab", 2), stored_entry(1, 4, b"", 2)])
    table = bytes(frames[0])
    assert table[:28].hex() == "00000002000000000000000100000000000000030000000000000002"
    assert table[40:68].hex() == "00000000000000000000000100000000000000040000000000000002"
    assert (len(table), frames[1:]) == (80, [b"ab"])
    answer, status_frames = encode_add_statuses(head.ledger, head.entry, verify_adds(head, frames, MAX).statuses)
    assert status_frames == (b"\0\0",)
    assert decode_answer(answer) == BookieAnswerHead(BookieOperation.ADD_MANY, Status.OK, 1, 3, -1, 2)
    assert decode_add_statuses(decode_answer(answer), status_frames, 2) == [Status.OK, Status.OK]


def test_what_is_sealed_is_opened_whatever_the_sizes_and_however_the_frames_came() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sizes = [
            rng.choice((0, 1, 100, 1024, JOINED_BYTES_MAX, JOINED_BYTES_MAX + 1)) for _ in range(rng.randint(1, 70))
        ]
        stored = [stored_entry(1, entry, rng.randbytes(size), entry - 1) for entry, size in enumerate(sizes)]
        rng.shuffle(stored)
        head, frames = request(stored)
        if rng.random() < 0.5:
            frames = [memoryview(frame) for frame in frames]
        opened = verify_adds(head, frames, MAX)
        assert stored_of(opened) == stored
        assert (bytes(opened.statuses), opened.size) == (bytes(len(stored)), sum(map(len, stored)))
        assert opened.lac == len(stored) - 2
        assert all(type(part) is bytes for _, parts, _ in opened.entries for part in parts)


def test_damaged_entries_are_refused_and_the_others_taken() -> None:
    good = [stored_entry(1, entry, b"payload %d" % entry) for entry in range(5)]
    for entry in range(5):
        for at in range(len(good[entry])):
            damaged = list(good)
            damaged[entry] = good[entry][:at] + bytes([good[entry][at] ^ 1]) + good[entry][at + 1 :]
            try:
                head, frames = request(damaged)
                opened = verify_adds(head, frames, MAX)
            except ValueError:
                pytest.fail("a damaged entry is no reason to refuse the others")
            assert [status != 0 for status in opened.statuses] == [index == entry for index in range(5)]
            assert stored_of(opened) == good[:entry] + good[entry + 1 :]


@pytest.mark.parametrize("wrong", [
    stored_entry(2, 3, b"of another ledger"), stored_entry(1, -3, b"negative"), stored_entry(1, 3, b"lac is entry", 3),
    stored_entry(1, 3, b"lac below -1", -2), stored_entry(1, 3, bytes(2000)), stored_entry(1, -(1 << 63), b"absurd"),
    stored_entry(1, 3, b"lac beyond", (1 << 63) - 1),
])  # fmt: skip
def test_an_entry_with_wrong_ids_lac_or_size_is_a_bad_request(wrong: bytes) -> None:
    good = stored_entry(1, 0, b"good")
    head, frames = request([good, wrong])
    opened = verify_adds(head, frames, 1000)
    assert (list(opened.statuses), stored_of(opened)) == ([Status.OK, Status.BAD_REQUEST], [good])
    entry = ENTRY_HEADER_STRUCT.unpack_from(wrong)[1]
    assert verify_add(1, entry, [wrong], 1000) is None


def test_the_largest_ids_are_ids() -> None:
    stored = stored_entry((1 << 63) - 1, (1 << 63) - 1, b"last", (1 << 63) - 2)
    head, frames = request([stored], ledger=(1 << 63) - 1)
    assert stored_of(verify_adds(head, frames, MAX)) == [stored]


def test_requests_that_do_not_add_up_are_refused_whole() -> None:
    head, frames = request([stored_entry(1, 0, b"one"), stored_entry(1, 1, b"two")])
    table = bytes(frames[0])
    for count in (0, 1, 3, ADDS_PER_REQUEST_MAX + 1, (1 << 32) - 1):
        with pytest.raises(ValueError, match=r"entries|table"):
            verify_adds(head._replace(count=count), frames, MAX)
    lies: list[list[Buffer]] = [
        [],
        [table],
        [table, b"onetw"],
        [table, b"onetwoo"],
        [table, b"on", b"etwo"],
        [table, b"onetwo", b""],
    ]
    lies += [[table[:cut], b"onetwo"] for cut in range(len(table))]
    lies += [[b"\xff\xff\xff\xff" + table[4:], b"onetwo"], [table, b"onetwo", b"x"], [table, b"", b"onetwo"]]
    for lie in lies:
        with pytest.raises(ValueError, match=r"table|frame|missing"):
            verify_adds(head, lie, MAX)
    with pytest.raises(ValueError, match="first entry"):
        verify_adds(head._replace(entry=1), frames, MAX)


def test_random_bytes_never_open_and_never_cost_more_than_they_are() -> None:
    rng = random.Random(9)
    head, frames = request([stored_entry(1, entry, rng.randbytes(40)) for entry in range(8)])
    for _ in range(3000):
        mutated = [bytearray(frame) for frame in frames]
        for _ in range(rng.randint(1, 4)):
            frame = rng.choice(mutated)
            frame[rng.randrange(len(frame))] = rng.randrange(256)
        try:
            opened = verify_adds(head, [bytes(frame) for frame in mutated], MAX)
        except ValueError:
            continue
        for stored in stored_of(opened):
            assert verify_add(1, ENTRY_HEADER_STRUCT.unpack_from(stored)[1], [stored], MAX)


def test_answers_that_are_none_are_refused() -> None:
    head, _ = request([stored_entry(1, 0, b"one"), stored_entry(1, 1, b"two")])
    good = decode_answer(encode_add_statuses(head.ledger, head.entry, b"\0\4")[0])
    assert decode_add_statuses(good, [b"\0\4"], 2) == [Status.OK, Status.FENCED]
    assert decode_add_statuses(good._replace(status=Status.BUSY), [], 2) == [Status.BUSY, Status.BUSY]
    for answer, body in ((good, []), (good, [b"\0"]), (good, [b"\0\0\0"]), (good, [b"\0\xff"]), (good, [b"\0", b"\0"]),
                         (good._replace(count=3), [b"\0\0"]),
                         (good._replace(op=BookieOperation.ADD), [b"\0\0"])):  # fmt: skip
        with pytest.raises(ValueError, match=r"answer|status"):
            decode_add_statuses(answer, body, 2)


# ---------------------------------------------------------------------------------------- service
async def test_many_adds_are_stored_and_answered_one_by_one(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    payloads = {entry: bytes([entry]) * entry for entry in range(0, 200, 2)}
    assert await caller.add_many(1, payloads) == [Status.OK] * 100
    for entry in (0, 2, 100, 198):
        assert payload_of((await caller.read(1, entry))[1][0]) == payloads[entry]
    assert (await caller.read(1, 1))[0].status is Status.NO_SUCH_ENTRY
    caller = cluster.caller(await cluster.restart())
    for entry in (0, 2, 100, 198):
        assert payload_of((await caller.read(1, entry))[1][0]) == payloads[entry]


async def test_fences_keys_and_read_only_hold_for_many_adds_as_for_one(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    caller = cluster.caller(bookie)
    two = {0: b"zero", 1: b"one"}
    assert await caller.add_many(1, two) == [Status.OK] * 2
    assert await caller.add_many(1, two, key=OTHER_KEY) == [Status.UNAUTHORIZED] * 2
    bookie.first.service.is_read_only = True
    assert await caller.add_many(1, two) == [Status.READ_ONLY] * 2
    assert await caller.add_many(1, two, recovery=True) == [Status.OK] * 2
    bookie.first.service.is_read_only = False
    assert (await caller.read(1, 0, fence=True))[0].status is Status.OK
    assert await caller.add_many(1, {2: b"two"}) == [Status.FENCED]
    assert await caller.add_many(1, {2: b"two"}, recovery=True) == [Status.OK]
    statistics = bookie.statistics()
    assert (statistics["fenced"], statistics["unauthorized"], statistics["refused_read_only"]) == (1, 2, 2)


def test_an_answered_request_of_many_adds_is_durable_wherever_the_power_fails() -> None:
    answered = 0

    async def main(cluster: Cluster) -> None:
        nonlocal answered
        for operation in range(1, 12):
            caller = cluster.caller(await cluster.start())
            cluster.simulation.crash_at(NODE, operation, power_loss=True)
            many = [caller.add_many(operation, {4 * part + at: b"x" for at in range(4)}) for part in range(3)]
            outcomes = await asyncio.gather(*many, return_exceptions=True)
            caller = cluster.caller(await cluster.restart())
            for part, outcome in enumerate(outcomes):
                if not isinstance(outcome, BaseException):
                    assert outcome == [Status.OK] * 4
                    answered += 1
                    for at in range(4):
                        assert (await caller.read(operation, 4 * part + at))[0].status is Status.OK
            cluster.simulation.crash(NODE, power_loss=True)

    with_cluster(main)
    assert 0 < answered < 33


async def test_times_and_sizes_are_observed_by_success(cluster: Cluster, /) -> None:
    bookie = await cluster.start()
    cluster.simulation.node(NODE).disk_delays.mean_s = 0.02
    caller = cluster.caller(bookie)
    await caller.add_many(1, {0: bytes(64), 1: bytes(64), 2: bytes(4000)})
    await caller.add_many(1, {3: b"x"}, key=OTHER_KEY)
    await caller.read(1, 0)
    await caller.read(1, 9)
    service = bookie.first.service
    assert (sum(service.adds.seconds.counts), sum(service.adds.failed_seconds.counts)) == (1, 1)
    assert service.adds.seconds.total > 0.001 > service.adds.failed_seconds.total
    assert (sum(service.adds.entry_bytes.counts), service.adds.entry_bytes.total) == (3, 128 + 4000 + 3 * 36)
    assert (sum(service.read_seconds.counts), sum(service.read_failed_seconds.counts)) == (1, 1)
