"""What is checked of a request before any work is done for it.

Rule: no request costs the broker more than linear work in its bytes, none blocks the event loop for longer than 5 ms,
and none leaves anything half made. So values that the wire can carry and the broker has no use for (an enum's unknown
number, a negative count, an index that no entry can have) are refused here, as InvalidRequest, before a topic is loaded
or a subscription is made. Guarding test: tests/broker/protocols/grpc/test_extreme_requests.py, for each request of
proto/wire.proto.
"""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.errors import InvalidRequest

PEEK_MESSAGES_MAX = 1000
AGE_S_MAX = 10_000_000_000
"""300 years."""


def check_skip(messages: int) -> None:
    if messages < -1:
        raise InvalidRequest(f"{messages} messages cannot be skipped; -1 are all of them")


def check_peek(messages: int) -> None:
    if messages > PEEK_MESSAGES_MAX:
        raise InvalidRequest(f"{messages} messages at once are more than {PEEK_MESSAGES_MAX}")


def check_age(request: wire.ExpireMessagesRequest) -> None:
    if not request.HasField("message_id") and not 0 < request.older_than_s <= AGE_S_MAX:
        raise InvalidRequest(
            f"messages expire when they are older than some seconds (0 to {AGE_S_MAX}), or up to a message id"
        )
