"""The memory of blocks that bypass the page cache."""

from magnetar.bookie.store.journal import JournalBlockBuffers
from magnetar.runtime.disk import SystemFiles


class Counting(SystemFiles):
    def __init__(self) -> None:
        self.made: list[int] = []

    def allocate_buffer(self, size: int) -> memoryview:
        self.made.append(size)
        return super().allocate_buffer(size)


def test_blocks_take_turns_and_a_longer_one_keeps_its_memory_for_the_next() -> None:
    files = Counting()
    arenas = JournalBlockBuffers(files, 8192, 3)
    held = [arenas.fill([b"%d" % number], 4096) for number in range(3)]
    assert [bytes(each[:2]) for each in held] == [b"0\0", b"1\0", b"2\0"], "three are on their way"
    for number in range(9):
        block = arenas.fill([b"x" * 10_000, b"y"], 12_288)
        assert bytes(block) == b"x" * 10_000 + b"y" + bytes(2287), number
    assert files.made == [8192] * 3 + [12_288] * 3
    short = arenas.fill([b"z"], 4096)
    assert bytes(short) == b"z" + bytes(4095), "nothing of the block before"
