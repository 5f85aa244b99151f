"""The greeting of a ZeroMQ server (ZMTP 3): it names the mechanism with which the server secures connections.

A client learns of another mechanism than its own by an event of its socket, unless the server closes the connection
first. Then the client has seen a broken handshake only, and asks here.
"""

from __future__ import annotations

import asyncio

from ..network import Endpoint

_OURS = bytes.fromhex("ff00000000000000017f03")
"""The signature, and the version's first byte: then the server says the rest of its greeting, and waits for ours."""
_MECHANISM = slice(12, 32)
_TIMEOUT_S = 1.0


async def mechanism_of(endpoint: Endpoint) -> str:
    """Returns the mechanism of a server. In clear: "NULL"; with keys: "CURVE"; empty: it sends no greeting in time."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
            writer.write(_OURS)
            greeting = await reader.readexactly(_MECHANISM.stop)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return ""
    finally:
        if writer is not None:
            writer.close()
    return greeting[_MECHANISM].rstrip(b"\0").decode("latin-1")
