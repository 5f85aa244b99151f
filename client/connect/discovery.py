"""Finds the gRPC addresses of the brokers, if the service URL names a port of another protocol (`BrokerDiscovery`).
Also tracks which brokers do not answer, and asks who owns their topics now (`SilentBrokerTracker`).

    pulsar://host[:6650]    the answer to CONNECT has the address (CommandConnected.magnetar_address)
    http://host[:8080]      GET /lookup/v2/service-url answers {"serviceUrl": "magnetar://HOST:PORT"}

The addresses of the URL are asked in turn, and the first answer is used until `clear`. An answer gives two endpoints:
the answered port at the host of the URL, which the program can reach, and the address exactly as answered.

If nothing listens at the ports of a `pulsar://` URL, or a server there speaks another protocol, the URL's own endpoints
are used: they belong to a broker that does not serve Pulsar's clients. Errors: WrongProtocol if a broker of Pulsar
itself, or another HTTP server, answers; Unauthenticated if the credentials are refused; Unavailable, with its field
`unreached` (runtime/grpc/stream.py), if no server answers. Guard: tests/client/connect/test_discovery.py.

**Service URLs** (`parse_service_url`): `magnetar://host[:port][,host[:port]…]`, and the `pulsar://` and `http://` URLs
of Pulsar's programs. This SDK speaks gRPC. A `magnetar://` URL names gRPC ports of brokers. The other URLs name ports
at which a broker speaks Pulsar's protocol or HTTP; the broker is asked there for its gRPC address. If nothing listens
at a port of a `pulsar://` URL, the SDK tries 7650 in place of 6650 and 6651, and otherwise the port itself.

With `+ssl` after the scheme, and with https, the connections are encrypted and the brokers' certificates are verified.
The SDK may ask any of the named brokers first."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ...proto.errors import MagnetarError, TimedOut, Unauthenticated, Unavailable, WrongProtocol
from ...proto.names import TopicName
from ...proto.versions import PRODUCT
from ...runtime.access import BEARER, CREDENTIAL_SCHEMES, CallerAccess
from ...runtime.network import ByteStream, Endpoint, Network
from ...runtime.tasks import run_together
from ..common.errors import InvalidUrl

DEFAULT_PORT = 7650
PULSAR_PORTS = (6650, 6651)


class DiscoveryProtocol(Enum):
    """The protocol in which a broker of a service URL is asked for its gRPC address. NOT: the URL contains the gRPC
    addresses themselves, and no broker is asked."""

    NOT = "not"  # they are the addresses
    PULSAR = "pulsar"
    HTTP = "http"


class _Scheme(NamedTuple):
    port: int
    asked: DiscoveryProtocol = DiscoveryProtocol.NOT
    encrypted: bool = False


URL_SCHEMES = {
    "magnetar": _Scheme(DEFAULT_PORT),
    "magnetar+ssl": _Scheme(DEFAULT_PORT, encrypted=True),
    "pulsar": _Scheme(6650, DiscoveryProtocol.PULSAR),
    "pulsar+ssl": _Scheme(6651, DiscoveryProtocol.PULSAR, encrypted=True),
    "http": _Scheme(8080, DiscoveryProtocol.HTTP),
    "https": _Scheme(8443, DiscoveryProtocol.HTTP, encrypted=True),
}


class ServiceUrl(NamedTuple):
    """A parsed service URL: its addresses, whether connections are encrypted, and how the brokers are found.
    `endpoints`: the gRPC addresses to try. `ask_at`: the addresses that are asked for gRPC addresses first, in
    `protocol`; empty: `endpoints` are those of the brokers."""

    endpoints: tuple[Endpoint, ...]  # at least one, in the order given, each once
    encrypted: bool = False  # TLS
    protocol: DiscoveryProtocol = DiscoveryProtocol.NOT
    ask_at: tuple[Endpoint, ...] = ()  # who knows where gRPC is; empty: `endpoints` are it


def parse_service_url(text: str) -> ServiceUrl:
    """Parses a service URL (see the head of the module). Raises InvalidUrl for any other text or value; the error says
    what to write instead, and never repeats a text that may contain a password."""
    if not isinstance(text, str):
        raise InvalidUrl(f"a service URL is text such as magnetar://localhost:7650, not {text!r}")
    if "@" in text or "?" in text:  # never quoted: it may have a password or a token
        raise InvalidUrl(
            "a service URL is magnetar://HOST[:PORT]: who you are is said by `authentication`, or --token of a command"
        )
    scheme, separator, rest = text.strip().partition("://")
    scheme = scheme.lower()
    if not separator:
        raise InvalidUrl(f"{text!r} is not a service URL; write magnetar://{text.strip() or 'localhost:7650'}")
    if scheme not in URL_SCHEMES:
        raise InvalidUrl(f"{text!r}: a service URL starts with magnetar:// or magnetar+ssl://, not {scheme}://")
    means = URL_SCHEMES[scheme]
    hosts = rest.split("/")[0]
    if rest[len(hosts) :] not in ("", "/"):
        raise InvalidUrl(f"{text!r}: nothing follows HOST:PORT in a service URL")
    found = tuple(dict.fromkeys(_parse_host(text, part, means.port) for part in hosts.split(",")))
    if means.asked is DiscoveryProtocol.NOT:
        return ServiceUrl(found, means.encrypted)
    grpc = (each._replace(port=DEFAULT_PORT) if each.port in PULSAR_PORTS else each for each in found)
    return ServiceUrl(tuple(dict.fromkeys(grpc)), means.encrypted, means.asked, found)


def _parse_host(text: str, part: str, port: int) -> Endpoint:
    part = part.strip()
    bare = part.endswith("]") or ":" not in part
    try:
        endpoint = Endpoint.parse(f"{part}:{port}" if bare else part)
    except ValueError as error:
        raise InvalidUrl(f"{text!r}: {part!r} is not HOST[:PORT]") from error
    if not endpoint.host or endpoint.port == 0 or any(c.isspace() or c == "@" for c in endpoint.host):
        raise InvalidUrl(f"{text!r}: {part!r} is not HOST[:PORT]")
    return endpoint


ANSWER_BYTES_MAX = 64 << 10
LOOKUP_PATH = "/lookup/v2/service-url"
_U32 = struct.Struct(">I")


class WrongServerProtocol(Exception):
    """Raised when the server at an address does not speak the expected protocol, or gives no address of a broker."""


class BrokerDiscovery:
    """Finds the gRPC addresses of the brokers of a service URL, and caches them. `timeout_s`: the longest wait in
    seconds for a connection to one address, and the longest wait for its answer."""

    def __init__(self, url: ServiceUrl, network: Network, access: CallerAccess, timeout_s: float) -> None:
        self._url = url
        self._network = network
        self._access = access
        self._timeout_s = timeout_s
        self._found: Sequence[Endpoint] = () if url.ask_at else url.endpoints
        self._begin = 0  # the address that is asked first

    async def endpoints(self) -> Sequence[Endpoint]:
        """Returns the gRPC endpoints of the brokers, at least one; asks the addresses of the URL only if they are not
        cached. If no server speaks Pulsar's protocol at a `pulsar://` URL, returns the endpoints of the URL itself.
        Raises Unavailable if no server answers, WrongProtocol if a server answers in another protocol, Unauthenticated
        if the credentials are refused."""
        if self._found:
            return self._found
        failure: MagnetarError | None = None
        ask, begin = self._url.ask_at, self._begin
        for address in (*ask[begin:], *ask[:begin]):
            self._begin = (self._begin + 1) % len(ask)
            try:
                told = await self._asked(address)
            except WrongServerProtocol as error:
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
        if self._url.protocol is DiscoveryProtocol.PULSAR and other:
            return self._url.endpoints
        raise failure

    def clear(self) -> None:
        """Drops the cached addresses, because the servers there do not answer any more. Does nothing for a URL that
        names the gRPC addresses itself."""
        if self._url.ask_at:
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
                ask = (
                    ask_endpoint_over_pulsar_protocol
                    if self._url.protocol is DiscoveryProtocol.PULSAR
                    else ask_endpoint_over_http
                )
                return await ask(stream, address, self._access)
        except TimeoutError as error:
            raise _silent(address) from error
        finally:
            await stream.close()


def _silent(address: Endpoint) -> Unavailable:
    return Unavailable(f"cannot connect to {address}: no answer", endpoint=str(address), unreached="silent")


# ------------------------------------------------------------------ Pulsar's protocol
async def ask_endpoint_over_pulsar_protocol(stream: ByteStream, address: Endpoint, access: CallerAccess) -> Endpoint:
    """Asks a server for its gRPC address over Pulsar's binary protocol, and returns this endpoint. Raises
    WrongServerProtocol if the server speaks another protocol, and WrongProtocol if it is a broker of Pulsar itself.
    Raises Unauthenticated if it refuses the credentials, or the function that gives them failed; Unavailable if the
    broker does not serve at the moment; ConnectionLost if the connection breaks."""
    from ...proto import pulsar_pb2 as pulsar

    method, data = parse_authorization(access.authorization() if access.authorization is not None else "")
    connect = pulsar.CommandConnect(
        client_version=f"Magnetar-Python-v{PRODUCT}", protocol_version=21, auth_method_name=method, auth_data=data
    )
    command = pulsar.BaseCommand(type=pulsar.BaseCommand.CONNECT, connect=connect).SerializeToString()
    stream.write_nowait(_U32.pack(len(command) + 4) + _U32.pack(len(command)) + command)
    head = await _read(stream, 8)
    total, size = _U32.unpack_from(head)[0], _U32.unpack_from(head, 4)[0]
    if not 0 < size <= total - 4 <= ANSWER_BYTES_MAX:
        raise WrongServerProtocol("it does not speak Pulsar's protocol")
    try:
        answer = pulsar.BaseCommand.FromString(await _read(stream, size))
    except DecodeError as error:
        raise WrongServerProtocol("it does not speak Pulsar's protocol") from error
    if answer.type == pulsar.BaseCommand.ERROR:
        raise Unauthenticated(f"{address} refuses the connection: {answer.error.message:.300}")
    if answer.type != pulsar.BaseCommand.CONNECTED:
        raise WrongServerProtocol("it does not answer a connection of Pulsar's protocol")
    told, version = answer.connected.magnetar_address, answer.connected.server_version
    if not told and version.startswith("Magnetar"):
        raise Unavailable(f"the broker at {address} does not serve at the moment", endpoint=str(address))
    if not told:
        why = f"{address} is a broker of {version:.50}, and this client connects to Magnetar's: use pulsar-client"
        raise WrongProtocol(why, endpoint=str(address))
    return _endpoint(told)


def parse_authorization(authorization: str) -> tuple[str, bytes]:
    """Returns the auth method ("basic", "token") and the auth data for Pulsar's command CONNECT; two empty values if
    there is no credential. `authorization`: the value of the HTTP header `authorization`; a scheme that is not one of
    `CREDENTIAL_SCHEMES` counts as that of a token."""
    word, _, value = authorization.partition(" ")
    scheme = next((each for each in CREDENTIAL_SCHEMES if each.name.lower() == word.lower()), BEARER)
    return (scheme.method, scheme.parse_header_value(value)) if value or scheme is not BEARER else ("", b"")


async def _read(stream: ByteStream, size: int) -> bytes:
    """Reads and returns `size` bytes. Raises WrongServerProtocol if the stream ends before."""
    found, came = bytearray(size), 0
    view = memoryview(found)
    while came < size:
        more = await stream.read_into(lambda: view[came:])  # noqa: B023 - called before `came` changes
        if not more:
            raise WrongServerProtocol("it closed the connection")
        came += more
    return bytes(found)


# ------------------------------------------------------------------ HTTP
async def ask_endpoint_over_http(stream: ByteStream, address: Endpoint, access: CallerAccess) -> Endpoint:
    """Asks a server for its gRPC address over HTTP, and returns this endpoint. Raises WrongServerProtocol if the server
    gives no such answer, Unavailable for a status of 500 or more, ConnectionLost if the connection breaks. `access` is
    ignored: the request needs no credentials."""
    request = (
        f"GET {LOOKUP_PATH} HTTP/1.0\r\nHost: {address}\r\nAccept: application/json\r\nUser-Agent: Magnetar\r\n\r\n"
    )
    stream.write_nowait(request.encode())
    answer = bytearray()
    room = bytearray(16 << 10)
    while size := await stream.read_into(lambda: memoryview(room)):
        answer += room[:size]
        if len(answer) > ANSWER_BYTES_MAX:
            raise WrongServerProtocol("its answer is too large")
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if not head.startswith(b"HTTP/1.") or not status or not status[0].isdigit():
        raise WrongServerProtocol("it does not speak HTTP")
    if int(status[0]) >= 500:
        raise Unavailable(f"{address} answers with status {int(status[0])}", endpoint=str(address))
    try:
        found = json.loads(body if int(status[0]) == 200 else b"")
        return parse_service_url(found["serviceUrl"]).endpoints[0]
    except (ValueError, RecursionError, TypeError, KeyError, InvalidUrl) as error:
        raise WrongServerProtocol(f"it is no broker of Magnetar: it does not answer GET {LOOKUP_PATH}") from error


def _endpoint(text: str) -> Endpoint:
    try:
        return Endpoint.parse(text)
    except ValueError as error:
        raise WrongServerProtocol(f"it names {text!r:.100} as its address") from error


# ------------------------------------------------------------------------------------------------------- silence
# A broker that says nothing: who owns its topics now is asked of the others.
#
#     silence = SilentBrokerTracker(…)                            one of a client
#     silence.other_brokers(endpoint)                             whom to ask; empty: nothing to find out
#     moved = await silence.find_moved_topics(endpoint, topics)   which of them another broker owns
#     silence.on_answered(endpoint)                               it said something
#
# A broker that is stopped (SIGSTOP, a machine that hangs, a network that drops) breaks no connection. When its metadata
# session ends, another broker may own its topics. So a stream with owners (`broker_stream.py`) that got nothing for
# PING_AFTER_SILENCE_S pings it. A ping without an answer for PING_TIMEOUT_S makes the broker silent: another is asked,
# and again after each further PING_TIMEOUT_S. An owner leaves when another broker owns its topic, and for no other
# reason: a broker that is slow, or whose session lasts, keeps them until HTTP/2 gives the connection up. The others are
# those of the service URL and those that the client has connected to. A client that knows one broker neither pings nor
# asks. While a broker is silent, questions that any broker answers go to the others first. One broker may have two
# addresses, that of the service URL and the one that brokers tell: `set_advertised_endpoint` makes them one. Guards:
# tests/client/connect/test_silence.py, tests/broker/test_stopped_owner.py.


PING_AFTER_SILENCE_S = 2.5
"""Seconds without a frame after which the client pings the broker. An idle client pings at most that often."""
PING_TIMEOUT_S = 1.25
"""Longest wait in seconds for the answer to a ping or to a question to another broker; also the time between two rounds
of questions."""
SILENT_MARK_S = 10.0
"""Seconds for which a broker counts as silent after its last unanswered ping."""
OWNER_LOOKUPS_AT_ONCE = 32
"""Topics whose owners are asked for together. If none of so many topics moved, their broker still owns its topics; the
other topics are asked for in the next round."""


class SilentBrokerTracker:
    """Tracks which brokers do not answer; asks the other brokers which topics of a silent broker have a new owner."""

    def __init__(
        self, now: Callable[[], float], known: Callable[[], Iterable[Endpoint]],
        owner: Callable[[Endpoint, TopicName], Awaitable[Endpoint]],
    ) -> None:  # fmt: skip
        """Makes the object; no broker is silent at first. `known()`: the brokers' endpoints. `owner(endpoint, topic)`:
        asks a broker which one owns a topic, for at most PING_TIMEOUT_S."""
        self._now = now
        self._known = known
        self._owner = owner
        self._until: dict[Endpoint, float] = {}  # of those that are silent
        self._names: dict[Endpoint, Endpoint] = {}  # of the service URL → as brokers tell it

    def set_advertised_endpoint(self, endpoint: Endpoint, name: Endpoint) -> None:
        """Records that the broker at `endpoint` is known to other brokers under the address `name`, so that both count
        as one broker."""
        if endpoint != name:
            self._names[endpoint] = name

    def _name(self, endpoint: Endpoint) -> Endpoint:
        return self._names.get(endpoint, endpoint)

    def is_silent(self, endpoint: Endpoint) -> bool:
        """Returns whether the broker at `endpoint` did not answer within the last SILENT_MARK_S seconds."""
        return bool(self._until) and self._until.get(self._name(endpoint), 0.0) > self._now()

    def on_answered(self, endpoint: Endpoint) -> None:
        """Fact: the broker at `endpoint` answers. The broker does not count as silent any more."""
        self._until.pop(self._name(endpoint), None)

    def on_unanswered(self, endpoint: Endpoint) -> None:
        """Fact: the broker at `endpoint` did not answer. The broker counts as silent for SILENT_MARK_S seconds."""
        self._until[self._name(endpoint)] = self._now() + SILENT_MARK_S

    def other_brokers(self, endpoint: Endpoint) -> list[Endpoint]:
        """Returns one address of each broker except the broker at `endpoint`. Brokers that did not answer lately come
        last."""
        me = self._name(endpoint)
        found = {self._name(each): each for each in self._known() if self._name(each) != me}
        return sorted(found.values(), key=self.is_silent)

    async def find_moved_topics(self, endpoint: Endpoint, topics: Sequence[TopicName]) -> set[TopicName]:
        """Records that the broker at `endpoint` does not answer. Asks the other brokers, one after the other until one
        answers, for the owners of `topics`. Returns those topics that now have another owner; an empty set also if no
        broker answers. Topics that were not asked about (OWNER_LOOKUPS_AT_ONCE) are not returned."""
        self.on_unanswered(endpoint)
        moved: set[TopicName] = set()
        for asked in self.other_brokers(endpoint):
            for at in range(0, len(topics), OWNER_LOOKUPS_AT_ONCE):
                part = topics[at : at + OWNER_LOOKUPS_AT_ONCE]
                answers = await self._ask(asked, part)
                moved |= {topic for topic, owner in answers.items() if self._name(owner) != self._name(endpoint)}
                if not moved.intersection(part):
                    break
            else:
                return moved
            if answers:
                return moved
        return moved

    async def _ask(self, asked: Endpoint, topics: Sequence[TopicName]) -> dict[TopicName, Endpoint]:
        """Asks one broker for the owners of topics. Topics are left out whose owner the broker does not know, or for
        which it does not answer."""
        answers: dict[TopicName, Endpoint] = {}

        async def ask(topic: TopicName) -> None:
            try:
                answers[topic] = await self._owner(asked, topic)
            except TimedOut:
                self.on_unanswered(asked)
            except MagnetarError:
                return  # the next one is asked, or in the next round

        await run_together(map(ask, topics), f"owners by {asked}")
        return answers
