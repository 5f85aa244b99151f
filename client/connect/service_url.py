"""Service URLs: `magnetar://host[:port][,host[:port]…]`; `pulsar://` means the same.

This SDK speaks gRPC. Programs that were written for Pulsar name the ports of its protocol, 6650 and 6651, where a
broker does not serve gRPC: with `pulsar://` these two mean 7650, and any other port itself.

With `+ssl` after the scheme the connections are encrypted and the brokers' certificates are verified. Any of the
brokers may be asked first. Raises InvalidUrl for anything else, with what to write instead.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.network import Endpoint
from ..common.errors import InvalidUrl

PORT = 7650
SCHEMES = ("magnetar", "magnetar+ssl", "pulsar", "pulsar+ssl")
PULSAR_PORTS = (6650, 6651)


class ServiceUrl(NamedTuple):
    endpoints: tuple[Endpoint, ...]  # at least one, in the order given, each once
    encrypted: bool  # TLS


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
    hosts = rest.split("/")[0]
    if rest[len(hosts) :] not in ("", "/"):
        raise InvalidUrl(f"{text!r}: nothing follows HOST:PORT in a service URL")
    found = dict.fromkeys(_endpoint(text, part, of_pulsar=scheme.startswith("pulsar")) for part in hosts.split(","))
    return ServiceUrl(tuple(found), scheme.endswith("+ssl"))


def _endpoint(text: str, part: str, *, of_pulsar: bool) -> Endpoint:
    part = part.strip()
    bare = part.endswith("]") or ":" not in part
    try:
        endpoint = Endpoint.parse(f"{part}:{PORT}" if bare else part)
    except ValueError as error:
        raise InvalidUrl(f"{text!r}: {part!r} is not HOST[:PORT]") from error
    if not endpoint.host or endpoint.port == 0 or any(c.isspace() or c == "@" for c in endpoint.host):
        raise InvalidUrl(f"{text!r}: {part!r} is not HOST[:PORT]")
    return endpoint._replace(port=PORT) if of_pulsar and endpoint.port in PULSAR_PORTS else endpoint
