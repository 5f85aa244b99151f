"""The principal of a client certificate that TLS has verified.

| certificate | principal |
|---|---|
| URI `magnetar://CLUSTER/role/NAME` | CLIENT `NAME` |
| URI `magnetar://CLUSTER/broker/NAME`, `…/bookie/UUID`, `…/operator/NAME` | MEMBER `broker/NAME`, … |
| no URI, and `common_name` | CLIENT, the one common name of the subject |

A certificate has at most one URI, and its cluster is this one: a certificate of the test cluster is refused here. What
is ambiguous is refused, never chosen from: two URIs, two common names, a relative name with several values. The names
are read as the certificate has them, never out of a printed subject, so a comma in a name is a part of it (Pulsar
splits at it).
"""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from ..proto.errors import InvalidConfiguration, Unauthenticated
from ..proto.names import is_role
from ..runtime.access import Principal, PrincipalKind
from ..runtime.clock import Clock
from .remembered import Remembered, digest_of
from .settings import CertificateSection
from .token import at

if TYPE_CHECKING:
    from cryptography import x509

CERTIFICATE_BYTES_MAX = 64 << 10
"""Most bytes of a certificate in PEM; one of RSA-4096 with fifty names has 6 KiB."""

_URI = re.compile(r"magnetar://([A-Za-z0-9._-]+)/(role|broker|bookie|operator)/([^/?#%\s]+)")


class CertificateProvider:
    """Principals of client certificates. Raises InvalidConfiguration if the library for certificates is missing."""

    def __init__(self, settings: CertificateSection, clock: Clock) -> None:
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise InvalidConfiguration("security needs more packages: pip install 'magnetar[security]'") from error
        self._settings = settings
        self._clock = clock
        self._known = Remembered()

    def principal(self, pem: bytes) -> Principal:
        """Returns the principal of a certificate. Unauthenticated: it has expired, or names no principal of this
        cluster."""
        if len(pem) > CERTIFICATE_BYTES_MAX:
            raise Unauthenticated(f"the client certificate has more than {CERTIFICATE_BYTES_MAX} bytes")
        digest, now_ms = digest_of(pem), self._clock.wall_ms()
        found = self._known.find(digest, now_ms)
        if found is None:
            found = self._read(pem, now_ms)
            self._known.add(digest, found, found.expires_ms)
        return found

    def _read(self, pem: bytes, now_ms: int) -> Principal:
        certificate, uris, ends_ms = _parsed(pem)
        if now_ms >= ends_ms:
            raise Unauthenticated(
                f"the client certificate has expired at {at(ends_ms)}; it is {at(now_ms)} at this server"
            )
        name, kind = self._of_uri(uris) if uris else (self._common_name(certificate), PrincipalKind.CLIENT)
        return Principal(name, kind, "tls", ends_ms, f"{certificate.serial_number:x}")

    def _of_uri(self, uris: list[str]) -> tuple[str, PrincipalKind]:
        match = _URI.fullmatch(uris[0])
        if len(uris) > 1 or match is None:
            raise Unauthenticated("the client certificate has another URI than one magnetar://CLUSTER/role/NAME")
        cluster, kind, name = match.groups()
        if cluster != self._settings.cluster:
            raise Unauthenticated("the client certificate is of another cluster than `cluster` of [certificate] names")
        if not is_role(name) or (kind == "bookie" and not _is_uuid(name)):
            raise Unauthenticated("the magnetar:// URI of the client certificate names no role")
        return (name, PrincipalKind.CLIENT) if kind == "role" else (f"{kind}/{name}", PrincipalKind.MEMBER)

    def _common_name(self, certificate: x509.Certificate) -> str:
        from cryptography.x509.oid import NameOID

        if not self._settings.common_name:
            raise Unauthenticated("the client certificate has no URI magnetar://CLUSTER/role/NAME")
        holders = [rdn for rdn in certificate.subject.rdns if rdn.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if len(holders) != 1 or len(list(holders[0])) != 1:
            raise Unauthenticated("the subject of the client certificate needs exactly one common name, by itself")
        name = next(iter(holders[0])).value
        if not isinstance(name, str) or not is_role(name):
            raise Unauthenticated("the common name of the client certificate is no role")
        return name


def _parsed(pem: bytes) -> tuple[x509.Certificate, list[str], int]:
    """The certificate, its URIs, and when it expires, in milliseconds."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        _ = certificate.subject, certificate.serial_number  # parsed at their first use: here
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        except x509.ExtensionNotFound:
            uris = []
        return certificate, uris, int(certificate.not_valid_after_utc.timestamp() * 1000)
    except Exception:  # of a dozen types without a common base, and some quote the certificate
        raise Unauthenticated("the client certificate does not parse") from None


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
