"""The system's random source, drawn in blocks."""

import os

import pytest

from magnetar.runtime import process as chance
from magnetar.runtime.process import RANDOM_BLOCK_BYTES, SystemRandomNumbers


def test_no_byte_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def kernel(size: int) -> bytes:
        drawn.append(os.urandom(size))
        return drawn[-1]

    monkeypatch.setattr("random._urandom", kernel)
    rng = SystemRandomNumbers()
    given = [rng.randbytes(48) for _ in range(200)]
    assert [len(each) for each in given] == [48] * 200
    whole = RANDOM_BLOCK_BYTES // 48 * 48
    assert b"".join(given) == b"".join(block[:whole] for block in drawn)[: 48 * 200]
    assert len(drawn) == 3


def test_more_than_a_block_is_drawn_by_itself() -> None:
    rng = SystemRandomNumbers()
    rng.randbytes(1)
    assert len(rng.randbytes(3 * RANDOM_BLOCK_BYTES)) == 3 * RANDOM_BLOCK_BYTES


def test_a_forked_process_has_bytes_of_its_own() -> None:
    rng = SystemRandomNumbers()
    rng.randbytes(1)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, rng.randbytes(32))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 32) != rng.randbytes(32)
    os.close(reading)
    os.close(writing)


def test_only_living_sources_are_told_of_a_fork() -> None:
    rng = SystemRandomNumbers()
    assert rng in chance._ALL
    before = len(chance._ALL)
    del rng
    assert len(chance._ALL) == before - 1
