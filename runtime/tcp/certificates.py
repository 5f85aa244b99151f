"""The TLS certificates that this process shows to others, and when each ends: for its metrics.

    CERTIFICATES.add(path)           by what makes a TLS context of the file
    CERTIFICATES.read_ends()         path → seconds since the epoch at which its first certificate to end does so

A file that was replaced is read again, because the next handshake uses it (listening.py). One that cannot be read, or
has no certificate, keeps the end that it had. Only the end is read out of a certificate, so the standard library is
enough. Guarding tests: tests/runtime/tcp/test_certificates.py.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from datetime import UTC, datetime

_LOG = logging.getLogger("magnetar.bytes")
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)
_VERSION, _UTC_TIME = 0xA0, 0x17


class CertificateFiles:
    """Files of certificates, and their ends as they were read last."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[object, float | None]] = {}  # path → (inode, time, size) as it was read, its end

    def add(self, path: str) -> None:
        self._found.setdefault(path, (None, None))

    def read_ends(self) -> dict[str, float]:
        """Returns the end of each file's certificate, or of the first of its chain to end. Reads files that changed."""
        for path, (stamp, end) in self._found.items():
            try:
                known = os.stat(path)
                now = (known.st_ino, known.st_mtime_ns, known.st_size)
                if now != stamp:
                    with open(path, encoding="ascii", errors="replace") as file:
                        self._found[path] = now, find_end(file.read())
            except (OSError, ValueError) as error:
                _LOG.debug("when the certificate of %s ends is not read: %s", path, error)
                self._found[path] = stamp, end
        return {path: end for path, (_, end) in self._found.items() if end is not None}


CERTIFICATES = CertificateFiles()
"""Those of this process."""


def find_end(pem: str) -> float:
    """Returns when the first certificate of a PEM text ends, in seconds since the epoch. Raises ValueError if the text
    has no certificate or one that is damaged."""
    return min(_end(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(pem))


def _end(der: bytes) -> float:
    """Returns the end of a certificate: { to be signed { [version] serial algorithm issuer { begin end } … …"""
    tbs = _content(der, _content(der, 0)[0])[0]
    at = tbs
    if der[at] == _VERSION:
        at = _content(der, at)[1]
    for _ in range(3):
        at = _content(der, at)[1]
    not_before = _content(der, at)[0]
    kind_at = _content(der, not_before)[1]
    first, end = _content(der, kind_at)
    text = der[first:end].decode("ascii")
    if der[kind_at] == _UTC_TIME:  # of two digits, 50 to 99 are of the last century
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _content(der: bytes, at: int) -> tuple[int, int]:
    """Returns where the content of the element at `at` begins and ends. Raises ValueError."""
    if at + 2 > len(der):
        raise ValueError("the certificate is cut")
    size, at = der[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size, at = int.from_bytes(der[at : at + count], "big"), at + count
    if at + size > len(der):
        raise ValueError("the certificate is cut")
    return at, at + size
