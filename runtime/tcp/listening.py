"""A listening socket of the event loop: at an address, which is not looked up, or at a name.

    server = await listen(endpoint, make_protocol, tls)        port 0: a free one

A loop looks an address up like a name, for which it starts four threads and loads tables of names; an address is bound
here. Guards: tests/runtime/tcp/test_listen.py, tests/cli/test_start.py.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from typing import Any

from ...proto.errors import Busy
from ..network import Endpoint
from .tls import HANDSHAKE_S, SHUTDOWN_S

BACKLOG = 1024
"""Connections that wait to be accepted: all clients of a broker come back at once."""


async def listen(
    endpoint: Endpoint, make_protocol: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext | None
) -> asyncio.Server:
    """Busy: the port is taken, or the address is not of this machine."""
    try:
        named = {"host": endpoint.host, "port": endpoint.port} if _is_name(endpoint.host) else None
        where: dict[str, Any] = named or {"sock": _bound(endpoint)}
        return await asyncio.get_running_loop().create_server(
            make_protocol, ssl=tls, backlog=BACKLOG,
            ssl_handshake_timeout=HANDSHAKE_S if tls is not None else None,
            ssl_shutdown_timeout=SHUTDOWN_S if tls is not None else None, **where,
        )  # fmt: skip
    except OSError as error:
        raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _bound(endpoint: Endpoint) -> socket.socket:
    is_6 = ":" in endpoint.host
    # By its protocol asyncio knows a socket whose answers must not wait for what would go with them (TCP_NODELAY).
    found = socket.socket(socket.AF_INET6 if is_6 else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((endpoint.host, endpoint.port))
    except OSError:
        found.close()
        raise
    return found
