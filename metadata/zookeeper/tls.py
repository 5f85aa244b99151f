"""Whether ZooKeeper's certificate is the one that is expected, before a session is tried.

Kazoo tries again for ever whatever a server shows. So the servers are asked once here, and a certificate of another
authority or another host, and a server without TLS, are said at once. One that cannot be reached is left to kazoo.
Guard: tests/metadata/zookeeper/test_secured_zookeeper.py.
"""

from __future__ import annotations

import asyncio
import ssl

from ...proto.errors import InvalidConfiguration, UntrustedServer, WrongProtocol
from ..address import ZookeeperAddress

HANDSHAKE_S = 5.0


async def check_tls(address: ZookeeperAddress) -> None:
    """Raises UntrustedServer, WrongProtocol, or InvalidConfiguration: the files cannot be used."""
    access = address.access
    try:
        context = ssl.create_default_context(cafile=access.ca)
        if access.certificate:
            context.load_cert_chain(access.certificate, access.key or None)
    except OSError as error:
        raise InvalidConfiguration(f"the TLS files for ZooKeeper cannot be used: {error}") from error
    for server in address.servers:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                _, writer = await asyncio.open_connection(server.host, server.port, ssl=context)
        except ssl.SSLCertVerificationError as error:
            raise UntrustedServer(
                f"the certificate of ZooKeeper at {server} is not trusted: {error.verify_message}"
            ) from error
        except ssl.SSLError as error:
            raise WrongProtocol(f"ZooKeeper at {server} does not speak TLS at that port: {error.reason}") from error
        except (OSError, TimeoutError):
            continue
        writer.close()
        return
