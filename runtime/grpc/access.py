"""TLS and credentials of gRPC: what a server reads of a caller, and the credentials of a channel.

gRPC asks for a server's certificate before each handshake, and its files are read again then when they have changed. A
connection of a client has its credentials for all its life: when its files have changed, the next call makes a new
connection. A file that cannot be used keeps the one before in use. gRPC always compares the host's name with the
certificate's.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from ...proto.errors import InvalidConfiguration, Unauthenticated
from ..access import AUTHORIZATION_MAX, Caller, CallerAccess, TlsFiles
from ..network import Endpoint
from .errors import grpc_module

if TYPE_CHECKING:
    import grpc

HEADER = "authorization"
"""Of a call's metadata: "Bearer TOKEN" or "Basic BASE64"."""

_LOG = logging.getLogger("magnetar.rpc")


def peer_of(context: Any) -> str:
    """HOST:PORT of the caller (gRPC writes "ipv6:%5B::1%5D:80")."""
    peer = str(context.peer())
    kind, _, address = peer.partition(":")
    return address.replace("%5B", "[").replace("%5D", "]") if kind.startswith("ipv") else peer


def caller_of(context: Any) -> Caller:
    """Unauthenticated: the header is too long, or is there twice."""
    values = [value for key, value in context.invocation_metadata() or () if key == HEADER]
    if len(values) > 1:
        raise Unauthenticated(f"the call has {len(values)} headers `{HEADER}`; send one")
    value = values[0] if values else ""
    if len(value) > AUTHORIZATION_MAX:
        raise Unauthenticated(f"the header `{HEADER}` is too long: {len(value)} characters of {AUTHORIZATION_MAX}")
    facts = context.auth_context()
    certificates = facts.get("x509_pem_cert", ())
    return Caller(
        peer_of(context), value if isinstance(value, str) else value.decode("latin-1"),
        certificates[0] if certificates else b"",
        "ssl" in {each.decode() for each in facts.get("transport_security_type", ())},
    )  # fmt: skip


def metadata_of(access: CallerAccess) -> tuple[tuple[str, str], ...] | None:
    if access.authorization is None:
        return None
    value = access.authorization()
    return ((HEADER, value),) if value else None


# ---------------------------------------------------------------------------------- TLS
def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """InvalidConfiguration: a file cannot be read, or is none."""
    grpc_ = grpc_module()
    files = _Certificates(tls)
    credentials: grpc.ServerCredentials = grpc_.dynamic_ssl_server_credentials(
        files.first, files.changed, require_client_authentication=bool(tls.ca) and not tls.optional
    )
    return credentials


class _Certificates:
    """`changed` is called in a thread of gRPC, before each handshake, and does not raise."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self._stamps = _stamps(self._tls)
        self.first = self._configuration()

    def changed(self) -> Any:
        try:
            stamps = _stamps(self._tls)
            if stamps == self._stamps:
                return None
            found = self._configuration()
            self._stamps = stamps
        except (InvalidConfiguration, ValueError) as error:
            _LOG.error("new TLS files are not used, the ones before stay: %s", error)
            return None
        _LOG.info("new TLS files are used from now on: %s", self._tls.certificate)
        return found

    def _configuration(self) -> Any:
        chain, key = _pem(self._tls.certificate, "CERTIFICATE"), _pem(self._tls.key, "PRIVATE KEY")
        _check_pair(self._tls)
        ca = _pem(self._tls.ca, "CERTIFICATE") if self._tls.ca else None
        return grpc_module().ssl_server_certificate_configuration(((key, chain),), root_certificates=ca)


class ChannelTls:
    """Of a channel. InvalidConfiguration: a file cannot be read, or is none."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self.credentials = channel_credentials(tls)
        self._stamps = _stamps(tls)

    def changed(self) -> bool:
        """Whether there are new `credentials`, for another connection than those before."""
        try:
            stamps = _stamps(self._tls)
            if stamps == self._stamps:
                return False
            self._stamps = stamps
            self.credentials = channel_credentials(self._tls)
        except (InvalidConfiguration, ValueError) as error:
            _LOG.error("new TLS files are not used, the ones before stay: %s", error)
            return False
        return True


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    """InvalidConfiguration: a file cannot be read, or is none."""
    if bool(tls.certificate) != bool(tls.key):
        raise InvalidConfiguration("a client certificate has a certificate file and a private key file: give both")
    if tls.certificate:
        _check_pair(tls)
    credentials: grpc.ChannelCredentials = grpc_module().ssl_channel_credentials(
        _pem(tls.ca, "CERTIFICATE") if tls.ca else None,
        _pem(tls.key, "PRIVATE KEY") if tls.key else None,
        _pem(tls.certificate, "CERTIFICATE") if tls.certificate else None,
    )
    return credentials


def check_clear(endpoint: Endpoint, access: CallerAccess) -> None:
    """InvalidConfiguration: credentials would leave this machine in clear."""
    if access.authorization is not None and access.tls is None and not endpoint.is_loopback:
        raise InvalidConfiguration(
            f"credentials are not sent to {endpoint} in clear: use a magnetar+ssl:// URL, which encrypts them"
        )


def _check_pair(tls: TlsFiles) -> None:
    """gRPC takes a key that is not the certificate's, and fails each handshake."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key)
    except (ssl.SSLError, OSError) as error:
        raise InvalidConfiguration(f"{tls.key} is not the private key of {tls.certificate}: {error}") from error


def _pem(path: str, kind: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 20)
    except OSError as error:
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror}") from error
    if f"{kind}-----".encode() not in data:
        raise InvalidConfiguration(f"{path} has no {kind} in PEM form")
    return data


def _stamps(tls: TlsFiles) -> list[tuple[int, int, int]]:
    return [_stamp(path) for path in (tls.certificate, tls.key, tls.ca) if path]


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror}") from error
    return found.st_ino, found.st_mtime_ns, found.st_size
