"""Certificates for tests: an authority of their own, made when they are needed."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from magnetar.runtime.access import TlsFiles

_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Authority:
    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls, folder: Path, common_name: str = "test authority") -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        builder = _builder(name, name, key, days=1).add_extension(x509.BasicConstraints(True, 0), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        (folder / "ca.pem").write_bytes(certificate.public_bytes(_PEM))
        return cls(folder, key, certificate)

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def issue(self, name: str, *, hosts: tuple[str, ...] = ("127.0.0.1", "localhost"), days: float = 1) -> TlsFiles:
        """Files of a certificate for `name` (its CN) and the hosts; `ca` is this authority's."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = [_general_name(host) for host in hosts]
        builder = _builder(subject, self.certificate.subject, key, days).add_extension(
            x509.SubjectAlternativeName(names), critical=False
        )
        certificate = builder.sign(self.key, hashes.SHA256())
        chain, secret = self.folder / f"{name}.pem", self.folder / f"{name}-key.pem"
        chain.write_bytes(certificate.public_bytes(_PEM))
        secret.write_bytes(
            key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        )  # fmt: skip
        secret.chmod(0o600)
        return TlsFiles(str(chain), str(secret), self.ca)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2)).not_valid_after(now + datetime.timedelta(days=days))
    )  # fmt: skip


def _general_name(host: str) -> x509.GeneralName:
    if "://" in host:
        return x509.UniformResourceIdentifier(host)
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
