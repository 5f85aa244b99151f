"""Service URLs: `magnetar://host[:port][,host[:port]…]`, and the `pulsar://` and `http://` URLs of Pulsar's programs.

This SDK speaks gRPC. A `magnetar://` URL names gRPC ports of brokers. The others name ports where a broker speaks
Pulsar's protocol or HTTP: there the broker is asked for its gRPC address (client/connect/discovery.py). Where nothing
listens at a port of `pulsar://`, 6650 and 6651 mean 7650, and any other port itself.

With `+ssl` after the scheme, and with https, the connections are encrypted and the brokers' certificates are verified.
Any of the brokers may be asked first. Raises InvalidUrl for anything else, with what to write instead.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...runtime.network import Endpoint
from ..common.errors import InvalidUrl

PORT = 7650
PULSAR_PORTS = (6650, 6651)


class DiscoveryProtocol(Enum):
    """By which protocol the addresses of a URL are asked for the broker's gRPC address; NOT: they are
    gRPC addresses."""

    NOT = "not"  # they are the addresses
    PULSAR = "pulsar"
    HTTP = "http"


class _Scheme(NamedTuple):
    port: int
    asked: DiscoveryProtocol = DiscoveryProtocol.NOT
    encrypted: bool = False


SCHEMES = {
    "magnetar": _Scheme(PORT),
    "magnetar+ssl": _Scheme(PORT, encrypted=True),
    "pulsar": _Scheme(6650, DiscoveryProtocol.PULSAR),
    "pulsar+ssl": _Scheme(6651, DiscoveryProtocol.PULSAR, encrypted=True),
    "http": _Scheme(8080, DiscoveryProtocol.HTTP),
    "https": _Scheme(8443, DiscoveryProtocol.HTTP, encrypted=True),
}


class ServiceUrl(NamedTuple):
    """A parsed service URL."""

    endpoints: tuple[Endpoint, ...]  # at least one, in the order given, each once
    encrypted: bool = False  # TLS
    protocol: DiscoveryProtocol = DiscoveryProtocol.NOT
    ask_at: tuple[Endpoint, ...] = ()  # who knows where gRPC is; empty: `endpoints` are it


def parse_service_url(text: str) -> ServiceUrl:
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
    if scheme not in SCHEMES:
        raise InvalidUrl(f"{text!r}: a service URL starts with magnetar:// or magnetar+ssl://, not {scheme}://")
    means = SCHEMES[scheme]
    hosts = rest.split("/")[0]
    if rest[len(hosts) :] not in ("", "/"):
        raise InvalidUrl(f"{text!r}: nothing follows HOST:PORT in a service URL")
    found = tuple(dict.fromkeys(_endpoint(text, part, means.port) for part in hosts.split(",")))
    if means.asked is DiscoveryProtocol.NOT:
        return ServiceUrl(found, means.encrypted)
    grpc = (each._replace(port=PORT) if each.port in PULSAR_PORTS else each for each in found)
    return ServiceUrl(tuple(dict.fromkeys(grpc)), means.encrypted, means.asked, found)


def _endpoint(text: str, part: str, port: int) -> Endpoint:
    part = part.strip()
    bare = part.endswith("]") or ":" not in part
    try:
        endpoint = Endpoint.parse(f"{part}:{port}" if bare else part)
    except ValueError as error:
        raise InvalidUrl(f"{text!r}: {part!r} is not HOST[:PORT]") from error
    if not endpoint.host or endpoint.port == 0 or any(c.isspace() or c == "@" for c in endpoint.host):
        raise InvalidUrl(f"{text!r}: {part!r} is not HOST[:PORT]")
    return endpoint
