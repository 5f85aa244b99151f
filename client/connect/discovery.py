"""The gRPC addresses of the brokers of a service URL that names the port of another protocol of theirs.

    pulsar://host[:6650]    the answer to CONNECT has the address (CommandConnected.magnetar_address)
    http://host[:8080]      GET /lookup/v2/service-url answers {"serviceUrl": "magnetar://HOST:PORT"}

The addresses of the URL are asked in turn, and the first answer counts, until `forget`. It gives two endpoints: the
port that was told at the host of the URL, which the program is known to reach, and the address as it was told.

A `pulsar://` URL whose ports nothing listens at, or where something speaks another protocol, means its own endpoints:
a broker that does not serve Pulsar's clients. WrongProtocol: a broker of Pulsar itself, or another HTTP server.
Unauthenticated: the credentials are refused. Unavailable, with its field `unreached` (runtime/grpc/errors.py): nothing
answers. Guard: tests/client/connect/test_discovery.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from ...proto.errors import MagnetarError, Unauthenticated, Unavailable, WrongProtocol
from ...proto.versions import PRODUCT
from ...runtime.access import CallerAccess
from ...runtime.network import ByteStream, Endpoint, Network
from ..common.errors import InvalidUrl
from .service_url import Asked, ServiceUrl, parse_service_url

ANSWER_BYTES_MAX = 64 << 10
PATH = "/lookup/v2/service-url"
_U32 = struct.Struct(">I")


class NotSpoken(Exception):
    """The server at an address does not speak this protocol."""


class Discovery:
    """The discovery of a service URL. `timeout_s`: of one address."""

    def __init__(self, url: ServiceUrl, network: Network, access: CallerAccess, timeout_s: float) -> None:
        self._url = url
        self._network = network
        self._access = access
        self._timeout_s = timeout_s
        self._found: Sequence[Endpoint] = () if url.ask else url.endpoints
        self._begin = 0  # the address that is asked first

    async def endpoints(self) -> Sequence[Endpoint]:
        """Returns the endpoints; at least one."""
        if self._found:
            return self._found
        failure: MagnetarError | None = None
        ask, begin = self._url.ask, self._begin
        for address in (*ask[begin:], *ask[:begin]):
            self._begin = (self._begin + 1) % len(ask)
            try:
                told = await self._asked(address)
            except NotSpoken as error:
                failure = WrongProtocol(f"{address}: {error}", endpoint=str(address))
            except MagnetarError as error:
                if not error.retryable:
                    raise
                failure = error
            else:
                self._found = tuple(dict.fromkeys((Endpoint(address.host, told.port), told)))
                return self._found
        assert failure is not None, "a service URL names at least one address"
        other = isinstance(failure, WrongProtocol) or failure.fields.get("unreached") == "refused"
        if self._url.protocol is Asked.PULSAR and other:
            return self._url.endpoints
        raise failure

    def forget(self) -> None:
        """Forgets the answer: the addresses that it has do not answer any more."""
        if self._url.ask:
            self._found = ()

    async def _asked(self, address: Endpoint) -> Endpoint:
        try:
            async with asyncio.timeout(self._timeout_s):
                stream = await self._network.connect_bytes(address, self._access.tls)
        except TimeoutError as error:
            raise _silent(address) from error
        except Unavailable as error:
            raise Unavailable(error.message, endpoint=str(address), unreached="refused") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                ask = by_pulsar if self._url.protocol is Asked.PULSAR else by_http
                return await ask(stream, address, self._access)
        except TimeoutError as error:
            raise _silent(address) from error
        finally:
            await stream.close()


def _silent(address: Endpoint) -> Unavailable:
    return Unavailable(f"cannot connect to {address}: no answer", endpoint=str(address), unreached="silent")


# ------------------------------------------------------------------ Pulsar's protocol
async def by_pulsar(stream: ByteStream, address: Endpoint, access: CallerAccess) -> Endpoint:
    """Asks a port of Pulsar's protocol. NotSpoken; WrongProtocol: it is Pulsar. Unauthenticated."""
    from ...proto import pulsar_pb2 as pulsar

    method, data = credentials_of(access.authorization() if access.authorization is not None else "")
    connect = pulsar.CommandConnect(
        client_version=f"Magnetar-Python-v{PRODUCT}", protocol_version=21, auth_method_name=method, auth_data=data
    )
    command = pulsar.BaseCommand(type=pulsar.BaseCommand.CONNECT, connect=connect).SerializeToString()
    stream.write_nowait(_U32.pack(len(command) + 4) + _U32.pack(len(command)) + command)
    head = await _read(stream, 8)
    total, size = _U32.unpack_from(head)[0], _U32.unpack_from(head, 4)[0]
    if not 0 < size <= total - 4 <= ANSWER_BYTES_MAX:
        raise NotSpoken("it does not speak Pulsar's protocol")
    try:
        answer = pulsar.BaseCommand.FromString(await _read(stream, size))
    except DecodeError as error:
        raise NotSpoken("it does not speak Pulsar's protocol") from error
    if answer.type == pulsar.BaseCommand.ERROR:
        raise Unauthenticated(f"{address} refuses the connection: {answer.error.message:.300}")
    if answer.type != pulsar.BaseCommand.CONNECTED:
        raise NotSpoken("it does not answer a connection of Pulsar's protocol")
    told, version = answer.connected.magnetar_address, answer.connected.server_version
    if not told and version.startswith("Magnetar"):
        raise Unavailable(f"the broker at {address} does not serve at the moment", endpoint=str(address))
    if not told:
        why = f"{address} is a broker of {version:.50}, and this client connects to Magnetar's: use pulsar-client"
        raise WrongProtocol(why, endpoint=str(address))
    return _endpoint(told)


def credentials_of(authorization: str) -> tuple[str, bytes]:
    """The method and the data of CONNECT, for the value of the header `authorization`."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "basic":
        return "basic", base64.b64decode(value)
    return ("token", value.encode()) if value else ("", b"")


async def _read(stream: ByteStream, size: int) -> bytes:
    """Reads `size` bytes. NotSpoken: the stream ends before."""
    found, came = bytearray(size), 0
    view = memoryview(found)
    while came < size:
        more = await stream.read_into(lambda: view[came:])  # noqa: B023 - called before `came` changes
        if not more:
            raise NotSpoken("it closed the connection")
        came += more
    return bytes(found)


# ------------------------------------------------------------------ HTTP
async def by_http(stream: ByteStream, address: Endpoint, access: CallerAccess) -> Endpoint:
    """Asks a port of HTTP. NotSpoken. Unavailable: a status of 500 or more. `access` is not sent: nothing is asked that
    needs it."""
    request = f"GET {PATH} HTTP/1.0\r\nHost: {address}\r\nAccept: application/json\r\nUser-Agent: Magnetar\r\n\r\n"
    stream.write_nowait(request.encode())
    answer = bytearray()
    room = bytearray(16 << 10)
    while size := await stream.read_into(lambda: memoryview(room)):
        answer += room[:size]
        if len(answer) > ANSWER_BYTES_MAX:
            raise NotSpoken("its answer is too large")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not head.startswith(b"HTTP/1.") or not status or not status[0].isdigit():
        raise NotSpoken("it does not speak HTTP")
    if int(status[0]) >= 500:
        raise Unavailable(f"{address} answers with status {int(status[0])}", endpoint=str(address))
    try:
        found = json.loads(body if int(status[0]) == 200 else b"")
        return parse_service_url(found["serviceUrl"]).endpoints[0]
    except (ValueError, RecursionError, TypeError, KeyError, InvalidUrl) as error:
        raise NotSpoken(f"it is no broker of Magnetar: it does not answer GET {PATH}") from error


def _endpoint(text: str) -> Endpoint:
    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise NotSpoken(f"it names {text!r:.100} as its address") from error
