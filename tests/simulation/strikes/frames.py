"""What a broker may say twice, in every seed: `closed` of an id.

It says it when an id ends, and again for a frame that reaches the id after its end. Both may be in one read of the
client, and the second may come when the client has long opened anew. A frame for an id that is gone changes nothing.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.sim.rpc import SimStream

LATER_S = 16.0
"""Past the time after which clients of a load give an opening up (`operation_timeout_seconds`)."""


@contextlib.contextmanager
def said_twice(seed: int) -> Iterator[None]:
    """Half of them come twice in one read, and half once more later. It draws beside the simulation: the same seed has
    the same faults without it."""
    rng = random.Random(f"frames {seed}")
    honest = SimStream.send_nowait  # and not the broker's own, which is not replaced where it is compiled

    def late(stream: SimStream, frame: Any) -> None:
        with contextlib.suppress(MagnetarError):  # its stream is over
            honest(stream, frame)

    def send(self: SimStream, frame: Any) -> None:
        try:
            honest(self, frame)
        finally:
            if isinstance(frame, wire.ServerFrame) and frame.WhichOneof("kind") == "closed":
                if rng.random() < 0.5:
                    late(self, frame)
                if rng.random() < 0.5:
                    asyncio.get_running_loop().call_later(LATER_S, late, self, frame)

    with mock.patch.object(SimStream, "send_nowait", send):
        yield
