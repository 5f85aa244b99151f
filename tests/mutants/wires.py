"""Defects of the wires: what a connection owes to its other end, and what it takes of it."""

from __future__ import annotations

import math

from magnetar.runtime.peer import client as peers
from magnetar.runtime.peer.server import ZmqPeerServer
from magnetar.runtime.tcp import http2 as connection
from magnetar.runtime.tcp.http2 import Http2Connection, Http2Stream
from magnetar.runtime.tcp.http2_frames import FrameAllowance
from tests.mutants.ledgers import Stack, put


def reset_and_not_credited(stack: Stack) -> None:
    """M65: bytes of a stream that is reset before it is read are never credited to the connection's window."""
    honest = Http2Connection._remove_stream

    def forget(self: Http2Connection[object], stream: Http2Stream) -> None:
        stream.unread = 0
        honest(self, stream)

    put(stack, Http2Connection, "_remove_stream", forget)


def patient_for_ever(stack: Stack) -> None:
    """M65b: frames that carry nothing and refused calls are never counted."""
    put(stack, FrameAllowance, "charge_frames", lambda self, frames_=1: None)


def slice_without_end(stack: Stack) -> None:
    """M65c: a connection takes all that the system hands over in one turn of the loop."""
    put(stack, connection, "TURN_SLICE_S", math.inf)


def entries_before_receipts(stack: Stack) -> None:
    """M81t: a bookie sends all answers in one turn of the loop."""
    honest = ZmqPeerServer._flush

    def all_at_once(self: ZmqPeerServer, long_bytes: float = math.inf) -> None:
        honest(self, math.inf)

    put(stack, ZmqPeerServer, "_flush", all_at_once)


def answers_without_end(stack: Stack) -> None:
    """M81u: a broker takes all answers of a bookie that have arrived in one turn of the loop."""
    put(stack, peers, "BYTES_PER_TURN", math.inf)
