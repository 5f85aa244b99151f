
import random

from magnetar.broker.subscription.core.policy import MessageChunk, find_chunk_run_at, find_chunk_runs
from magnetar.client.core.chunking import ChunkAssembler
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.names import Position


def at(entry_id: int) -> Position:
    return Position(1, entry_id)


def laid(*numbers: int, of: int = 3) -> list[MessageChunk]:
    return [MessageChunk(at(entry_id), number, of) for entry_id, number in enumerate(numbers)]


def test_a_gap_and_a_missing_beginning_make_no_message() -> None:
    assert [(run.places, run.whole) for run in find_chunk_runs(laid(0, 2, 1))] == [
        ((at(0),), False), ((at(1),), False), ((at(2),), False)
    ]  # fmt: skip
    run, last = find_chunk_run_at(laid(0, 1), at(1))
    assert (run.places, run.whole, last) == ((at(0), at(1)), False, True)
    run, last = find_chunk_run_at(laid(0, 2, 0, 1, 2), at(0))
    assert (run.whole, last) == (False, False)
    assert find_chunk_run_at(laid(0, 2, 0, 1, 2), at(3))[0].chunks == (at(2), at(3), at(4))


def test_runs_are_what_a_consumer_puts_together() -> None:
    rng = random.Random(7)
    for _ in range(2000):
        of = rng.randint(2, 4)
        numbers = [rng.randrange(of) for _ in range(rng.randint(1, 9))]
        consumer, whole = ChunkAssembler(pending_max=10, auto_ack=False), []
        for entry_id, number in enumerate(numbers):
            metadata = MessageMetadata(
                producer_name="p", sequence_id=0, publish_time=1, uuid="u", num_chunks_from_msg=of,
                total_chunk_msg_size=of, chunk_id=number,
            )  # fmt: skip
            complete = consumer.add(metadata, at(entry_id), b"x", 0.0).complete
            if complete is not None:
                whole.append(tuple(complete.places))
        runs = find_chunk_runs(laid(*numbers, of=of))
        assert [run.places for run in runs if run.whole] == whole, numbers
        assert sorted(place for run in runs for place in run.places) == [at(each) for each in range(len(numbers))]
