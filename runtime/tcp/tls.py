"""TLS of listeners on plain TCP: one context whose certificate and authority are read again when their files change.

The files are looked at before each handshake: open connections stay, the next one is shown the new certificate, and
asked for one of the new authority. A session is resumed in TLS 1.2 alone, and only while the files are those of the
start: a resumed session brings the certificate that was verified when it began. Files that cannot be used leave those
before in use, and are logged. Guarding tests: tests/runtime/tcp/test_tls.py.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Sequence

from ...proto.errors import InvalidConfiguration
from ..access import TlsFiles

HANDSHAKE_S = 5.0
SHUTDOWN_S = 1.0

_LOG = logging.getLogger("magnetar.bytes")


def listener_context(tls: TlsFiles, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Returns the context of a listener: TLS 1.2 or later; with `ca` each caller has to have a certificate of it, or
    may (`optional`). `protocols`: those that the handshake agrees on (ALPN). InvalidConfiguration."""
    found = _Reloaded(tls, protocols)
    found.outer.sni_callback = found.before_handshake
    return found.outer


def caller_context(tls: TlsFiles) -> ssl.SSLContext:
    """Returns the context of a connection that is made: the other end is verified, by `ca` or the system's authorities,
    and is shown the certificate, when there is one. InvalidConfiguration."""
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key or None)
    except (ssl.SSLError, OSError) as error:
        files = f"{tls.ca} {tls.certificate} {tls.key}".strip()
        raise InvalidConfiguration(f"{files} cannot be read as certificates and key in PEM: {error}") from error
    return context


class _Reloaded:
    def __init__(self, tls: TlsFiles, protocols: Sequence[str]) -> None:
        self._tls = tls
        self._protocols = protocols
        self._stamps = _stamps(tls)
        self.outer = self._now = _context(tls, protocols)

    def before_handshake(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> int | None:
        """Loads changed files before a handshake. Returns None, or an alert, which ends the handshake."""
        try:
            stamps = _stamps(self._tls)
            if stamps != self._stamps:
                self._now, self._stamps = _context(self._tls, self._protocols), stamps
                _LOG.info("new TLS files are used from now on: %s", self._tls.certificate)
        except InvalidConfiguration as error:
            _LOG.error("new TLS files are not used, the ones before stay: %s", error)
        if self._now is not self.outer:
            if connection.session_reused:
                return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE  # of a certificate that another authority verified
            connection.context = self._now
        return None


def _context(tls: TlsFiles, protocols: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    if protocols:
        context.set_alpn_protocols(list(protocols))
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        if tls.ca:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_OPTIONAL if tls.optional else ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise InvalidConfiguration(f"the TLS files {tls.certificate} and {tls.key} do not fit: {error}") from error
    return context


def _stamps(tls: TlsFiles) -> list[tuple[int, int, int]]:
    try:
        found = [os.stat(path) for path in (tls.certificate, tls.key, tls.ca) if path]
    except OSError as error:
        raise InvalidConfiguration(f"{error.filename} cannot be read: {error.strerror}") from error
    return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]
