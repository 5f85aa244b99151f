"""Defects of what a broker and the bookies of its process say to each other (`runtime/peer/inside.py`)."""

from collections.abc import Sequence

from magnetar.runtime.files import Buffer
from magnetar.runtime.peer.inside import InProcessPeer, RequestsInFlight
from tests.mutants.ledgers import Stack, put


def lost_with_its_bookie(stack: Stack) -> None:
    """M86: a bookie that stops forgets the requests within its process that have no answer (ours)."""

    def broke(self: InProcessPeer) -> None:
        self._queue.clear()
        self.in_flight._waiting.clear()

    put(stack, InProcessPeer, "on_server_closed", broke)


def answered_twice(stack: Stack) -> None:
    """M86b: an answer within a process is given twice, the second time to the request after it (ours)."""
    honest = RequestsInFlight.answer

    def answer(self: RequestsInFlight, id_: int, head: bytes, frames: Sequence[Buffer]) -> None:
        honest(self, id_, head, frames)
        honest(self, id_ + 1, head, frames)

    put(stack, RequestsInFlight, "answer", answer)
