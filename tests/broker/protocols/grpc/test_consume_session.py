"""A consumer's requests that fail by an error that nobody foresaw are answered, and logged."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.broker.protocols.grpc.consume import _Session
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InternalError, from_wire


async def test_a_question_for_the_last_message_that_fails_unforeseen_is_answered_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[wire.ConsumeReply] = []
    outlet: Any = SimpleNamespace(send=sent.append, over=False)
    nothing: Any = SimpleNamespace()
    session = _Session(nothing, nothing, nothing, outlet)  # its topic has no name: AttributeError
    await session.take([wire.ConsumeRequest(last_message_id=7)])
    async with asyncio.timeout(10):
        await session.answered()
    (reply,) = sent
    assert reply.done.request_id == 7
    assert isinstance(from_wire(reply.done.error), InternalError)
    assert "AttributeError" in caplog.text
