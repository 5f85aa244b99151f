"""TLS and credentials of gRPC: the header of a call, the context of a listener, and that of a channel.

A listener's files are looked at before each handshake (runtime/tcp/tls.py). A connection of a client has its
credentials for all its life: when its files have changed, the next call makes a new connection. A file that cannot be
used keeps the one before in use. The host's name is always compared with the certificate's.
"""

from __future__ import annotations

import logging
import os
import ssl

from ...proto.errors import InvalidConfiguration
from ..access import CallerAccess, TlsFiles
from ..network import Endpoint
from ..tcp.tls import caller_context, listener_context

HEADER = b"authorization"
"""Header of a call: "Bearer TOKEN" or "Basic BASE64"."""

PROTOCOL = "h2"
"""Protocol name by which both ends agree on HTTP/2 in the handshake (ALPN)."""

_LOG = logging.getLogger("magnetar.rpc")


def authorization_of(access: CallerAccess) -> bytes:
    """The header's value; empty: there is none."""
    return access.authorization().encode("latin-1", "replace") if access.authorization is not None else b""


def server_context(tls: TlsFiles) -> ssl.SSLContext:
    """Returns the context of a listener. InvalidConfiguration: a file cannot be read, or is none."""
    _pem(tls.certificate, "CERTIFICATE")
    _pem(tls.key, "PRIVATE KEY")
    _check_pair(tls)
    if tls.ca:
        _pem(tls.ca, "CERTIFICATE")
    return listener_context(tls, (PROTOCOL,))


class ChannelTls:
    """The TLS context of a channel. InvalidConfiguration: a file cannot be read, or is none."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self.context = channel_context(tls)
        self._stamps = _stamps(tls)

    def changed(self) -> bool:
        """Whether there is a new `context`, for another connection than those before."""
        try:
            stamps = _stamps(self._tls)
            if stamps == self._stamps:
                return False
            self._stamps = stamps
            self.context = channel_context(self._tls)
        except (InvalidConfiguration, ValueError) as error:
            _LOG.error("new TLS files are not used, the ones before stay: %s", error)
            return False
        return True


def channel_context(tls: TlsFiles) -> ssl.SSLContext:
    """Returns the context of a channel. InvalidConfiguration: a file cannot be read, or is none."""
    if bool(tls.certificate) != bool(tls.key):
        raise InvalidConfiguration("a client certificate has a certificate file and a private key file: give both")
    if tls.certificate:
        _pem(tls.certificate, "CERTIFICATE")
        _pem(tls.key, "PRIVATE KEY")
        _check_pair(tls)
    if tls.ca:
        _pem(tls.ca, "CERTIFICATE")
    context = caller_context(tls)
    context.set_alpn_protocols([PROTOCOL])
    return context


def check_clear(endpoint: Endpoint, access: CallerAccess) -> None:
    """Raises InvalidConfiguration if credentials would leave this machine in clear."""
    if access.authorization is not None and access.tls is None and not endpoint.is_loopback:
        raise InvalidConfiguration(
            f"credentials are not sent to {endpoint} in clear: use a magnetar+ssl:// URL, which encrypts them"
        )


def _check_pair(tls: TlsFiles) -> None:
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
