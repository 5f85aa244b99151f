"""Bytes of a `runtime.network.ByteStream`, for tests that want them as they come."""

from magnetar.runtime.network import ByteStream


async def read(stream: ByteStream, size: int = 64 << 10) -> bytes:
    """At least one byte; empty: the other end has closed."""
    room = memoryview(bytearray(size))
    return bytes(room[: await stream.read_into(lambda: room)])
