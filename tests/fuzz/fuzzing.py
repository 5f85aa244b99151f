"""Mutations of samples, from a seed, and what a target does with them."""

import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from .targets import TARGETS

NUMBERS = [(value % (1 << 8 * width)).to_bytes(width, order)
           for width in (1, 2, 4, 8) for order in ("big", "little")
           for value in (0, 1, -1, 127, 128, 1 << 31, (1 << 31) - 1, 1 << 63, 255, 65535)]  # fmt: skip
TEXTS = [b"\0", b"../", b"1e999", b"9" * 400, b'"', b"{", b"[" * 200, b"]", b"null", b"-", b"\xff\xfe", b"true"]
SLOW_S = 0.5
"""For an input of at most BYTES_MAX."""
BYTES_MAX = 16 << 10


class Fault(NamedTuple):
    number: int
    data: bytes
    what: str


def mutated(samples: list[bytes], rng: random.Random) -> bytes:
    data = bytearray(rng.choice(samples) if rng.random() < 0.97 else rng.randbytes(rng.randrange(80)))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                known = rng.choice(NUMBERS)
                data[at : at + len(known)] = known
            case 2:
                del data[at : at + rng.choice((1, 2, 4, 8, 64))]
            case 3:
                data[at:at] = rng.choice(TEXTS)
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 64)]
            case 5:
                del data[at:]
            case _:
                other = rng.choice(samples)
                data[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(data[:BYTES_MAX])


def inputs(name: str, seed: int) -> Iterator[bytes]:
    samples = TARGETS[name].samples()
    yield from samples
    number = 0
    while True:
        yield mutated(samples, random.Random(f"{seed}/{number}"))
        number += 1


def attempt(name: str, data: bytes, number: int = 0) -> Fault | None:
    """What is wrong with how the target takes it; None: nothing. It is slow when it is so twice: the first time may
    have paid for something else of this process, such as a collection of garbage."""
    fault, spent = _once(name, data, number)
    if fault is None and spent > SLOW_S:
        fault, again = _once(name, data, number)
        spent = min(spent, again)
    return fault or (Fault(number, data, f"{spent:.1f} s of CPU") if spent > SLOW_S else None)


def _once(name: str, data: bytes, number: int) -> tuple[Fault | None, float]:
    """Also the seconds of CPU."""
    target, begin = TARGETS[name], time.thread_time()
    try:
        target.run(data)
    except target.errors:
        pass
    except Exception as error:
        return Fault(number, data, f"{type(error).__name__}: {error}"), 0.0
    return None, time.thread_time() - begin
