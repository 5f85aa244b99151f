"""The body of the answer to HELD: which entries of a ledger a bookie holds (head: format/peer.py).

All integers are big-endian. The request asks about the entries `entry … entry + count - 1` of its head, at most
ENTRIES_MAX of them. The answer has status OK and one frame:

    frame = run × count of the answer's head
    run   = first i64 | last i64           ascending, neither empty nor touching, all within what was asked

A bookie holds an entry that it could return now, by memory and index alone: quarantined entries are left out, and the
bytes on the disk are not read. An entry that is not named is *not* certainly missing (limbo, damage), so HELD is no
vote to end a ledger. A run that breaks these rules is a ValueError. Guards: tests/bookie/store/test_held.py.

Example: entries 0 to 4 and 7 of eight: `0000000000000000 0000000000000004 0000000000000007 0000000000000007`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from ...runtime.files import Buffer
from .peer import AnswerHead, Op, Status

ENTRIES_MAX = 1 << 16
"""Entries of one request: the answer is half a megabyte at most."""

_RUN = struct.Struct(">qq")


def encode_runs(runs: Iterable[tuple[int, int]]) -> bytes:
    return b"".join([_RUN.pack(first, last) for first, last in runs])


def decode_held(answer: AnswerHead, frames: Sequence[Buffer], first: int, last: int) -> list[tuple[int, int]]:
    """Returns the runs within `first … last`; ValueError when this is not the answer to that request."""
    if answer.op is not Op.HELD or answer.status is not Status.OK:
        raise ValueError(f"an answer to {answer.op.name}, {answer.status.name}")
    if len(frames) != 1 or len(frames[0]) != answer.count * _RUN.size:
        raise ValueError(f"{answer.count} runs take {answer.count * _RUN.size} bytes in one frame")
    found = list(_RUN.iter_unpack(bytes(frames[0])))
    before = first - 2
    for low, high in found:
        if not before + 1 < low <= high <= last:
            raise ValueError(f"a run from {low} to {high} of entries {first} to {last}")
        before = high
    return found
