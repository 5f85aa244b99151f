"""Certificates of any shape, made in the session."""

import datetime as dt
from collections.abc import Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.security.test_token import NOW_S

MakeCertificate = Callable[..., bytes]


@pytest.fixture(scope="session")
def make_certificate() -> MakeCertificate:
    """`make_certificate(subject, uris)`: PEM, of 90 days; `subject` is a list of RDNs, each a list of common names."""
    key = ec.generate_private_key(ec.SECP256R1())

    def make(subject: list[list[str]] | None = None, uris: list[str] | None = None) -> bytes:
        now = dt.datetime.fromtimestamp(NOW_S, dt.UTC)
        rdns = [
            x509.RelativeDistinguishedName([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
            for names in subject or []
        ]
        builder = (
            x509.CertificateBuilder().subject_name(x509.Name(rdns)).public_key(key.public_key()).serial_number(0xABC)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")]))
            .not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=90))
        )  # fmt: skip
        if uris is not None:
            names = [x509.DNSName("localhost"), *map(x509.UniformResourceIdentifier, uris)]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    return make
