"""Members of a cluster: processes and operators with a certificate that says `magnetar://CLUSTER/ROLE/NAME`.

    metadata                   the role of the metadata service, which makes no calls
    broker, bookie, operator   the roles of its callers

A certificate must have exactly one URI of this scheme, and no part of the URI may be missing. Because the URI contains
the name of the cluster, a certificate of a test cluster is not valid in the production cluster, even if both have the
same authority. TLS has verified the signature before; the expiry is checked again at each call, because a connection
may outlive the certificate.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

from ..proto.errors import CredentialsExpired, InvalidConfiguration, Unauthenticated, Unauthorized
from ..runtime.access import Caller, CallerAccess, ListenerAccess, Principal, PrincipalKind, TlsFiles
from ..runtime.clock import Clock
from ..runtime.network import Network
from ..runtime.peer.sockets import MemberNetwork
from .settings import MembersSection

MEMBER_URI_SCHEME = "magnetar://"
METADATA, BROKER, BOOKIE, OPERATOR = ROLES = ("metadata", "broker", "bookie", "operator")
METADATA_SERVICE_PATH = "/magnetar.wire.Metadata/"
OPERATOR_PATHS = frozenset({"/magnetar.wire.Metadata/Backup"})
CERTIFICATE_BYTES_MAX = 64 << 10
CACHED_CERTIFICATES_MAX = 1000
"""Most certificates that are remembered: parsing one takes about 100 µs."""

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,252}")


def make_member_uri(cluster: str, role: str, name: str) -> str:
    """Returns the URI that identifies a member of the cluster in its certificate. Raises InvalidConfiguration if a part
    is empty, is too long, or contains characters other than letters, digits and ._:-"""
    for part in (cluster, role, name):
        if not _PART.fullmatch(part):
            raise InvalidConfiguration(f"{part!r} is no name of a member: letters, digits and . _ : - only")
    return f"{MEMBER_URI_SCHEME}{cluster}/{role}/{name}"


def make_member_name(host: str) -> str:
    """Returns a default name for a member of the cluster that runs at this host. It is the host's name or address, in
    which `-` replaces each character that a name may not have; `member` if nothing is left."""
    return re.sub(r"[^A-Za-z0-9._:-]", "-", host).strip("-.:") or "member"


class MemberGuard:
    """Guards the listener of the metadata service (`runtime.access.Guard`): admits only members of the cluster."""

    def __init__(self, cluster: str, clock: Clock) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: OrderedDict[bytes, Principal] = OrderedDict()

    async def authenticate(self, caller: Caller) -> Principal:
        """Returns the principal of the member that calls. Raises Unauthenticated if the caller has no certificate of a
        member, CredentialsExpired if its certificate has expired."""
        digest = hashlib.sha256(caller.certificate).digest()
        found = self._known.get(digest)
        if found is None:
            found = self._known[digest] = verify_member_certificate(caller.certificate, self._cluster)
            if len(self._known) > CACHED_CERTIFICATES_MAX:
                self._known.popitem(last=False)
        if self._clock.wall_ms() >= found.expires_ms:
            raise CredentialsExpired(f"the certificate of {found} has expired: see 'magnetar security member'")
        return found

    def authorize(self, principal: Principal, path: str) -> None:
        """Raises Unauthorized if the role of the member may not call the rpc `path`."""
        role = get_member_role(principal)
        if not path.startswith(METADATA_SERVICE_PATH) or role not in (BROKER, BOOKIE, OPERATOR):
            raise Unauthorized(f"{principal} may not call {path}")
        if path in OPERATOR_PATHS and role != OPERATOR:
            raise Unauthorized(f"{principal} is no operator, and only those may call {path}")

    def why_lapsed(self, principal: Principal) -> str:
        return ""  # certificates of members have an end, and no list of revoked ones


def get_member_role(principal: Principal) -> str:
    """Returns the role of a member, one of ROLES; "" if the principal is not a member."""
    return principal.name.partition("/")[0] if principal.kind is PrincipalKind.MEMBER else ""


def verify_member_certificate(certificate: bytes, cluster: str) -> Principal:
    """Returns the principal of the member that a certificate (PEM) names. Raises Unauthenticated if the certificate
    names no member of this cluster. Does not check whether the certificate has expired."""
    from cryptography import x509

    if not certificate:
        raise Unauthenticated("this listener is for members of the cluster: bring a member's certificate")
    if len(certificate) > CERTIFICATE_BYTES_MAX:
        raise Unauthenticated(f"a certificate of {len(certificate)} bytes; at most {CERTIFICATE_BYTES_MAX} are read")
    try:
        read = x509.load_pem_x509_certificate(certificate)
        names: Any = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        raise Unauthenticated("the certificate is of no member: it has no URI magnetar://CLUSTER/ROLE/NAME") from None
    ours = [each for each in uris if each.startswith(MEMBER_URI_SCHEME)]
    parts = ours[0].removeprefix(MEMBER_URI_SCHEME).split("/") if len(ours) == 1 else []
    if len(parts) != 3 or not all(map(_PART.fullmatch, parts)) or parts[1] not in ROLES:
        raise Unauthenticated("the certificate is of no member: it has not exactly one URI magnetar://CLUSTER/ROLE/NAME")
    if parts[0] != cluster:
        raise Unauthenticated(f"the certificate is of a member of cluster {parts[0]}, and this is {cluster}")
    expires_ms = int(read.not_valid_after_utc.timestamp() * 1000)
    return Principal(
        f"{parts[1]}/{parts[2]}", PrincipalKind.MEMBER, "tls", expires_ms, f"{read.serial_number:x}"
    )  # fmt: skip


def find_member_tls_files(settings: MembersSection, role: str) -> TlsFiles:
    """Returns the paths of the certificate and of the key of `role` in the members' folder, and of the file of the
    authorities. Raises InvalidConfiguration if the certificate is missing."""
    folder = Path(settings.folder)
    found = TlsFiles(str(folder / f"{role}.pem"), str(folder / f"{role}-key.pem"), settings.ca)
    if not os.path.exists(found.certificate):
        raise InvalidConfiguration(
            f"{found.certificate} is missing: copy it and its key from where 'magnetar security init' made them"
        )
    return found


def read_own_member_name(settings: MembersSection, role: str) -> str:
    """Returns the NAME in the certificate of `role` on this machine. Raises InvalidConfiguration if the certificate
    cannot be read, or is for another role or another cluster."""
    path = find_member_tls_files(settings, role).certificate
    try:
        with open(path, "rb") as file:
            principal = verify_member_certificate(file.read(CERTIFICATE_BYTES_MAX + 1), settings.cluster)
    except OSError as error:
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror}") from error
    except Unauthenticated as error:
        raise InvalidConfiguration(f"{path}: {error.message}") from error
    if get_member_role(principal) != role:
        raise InvalidConfiguration(f"{path} is the certificate of {principal.name}, and this is a {role}")
    return principal.name.partition("/")[2]


def make_member_network(inner: Network, settings: MembersSection, role: str, clock: Clock) -> MemberNetwork:
    """Returns a network for a process that is a member of the cluster with this role. Its connections present the
    member's certificate and verify those of other members. Raises InvalidConfiguration if the certificate is missing,
    or is for another role or cluster."""
    read_own_member_name(settings, role)
    files = find_member_tls_files(settings, role)
    return MemberNetwork(inner, ListenerAccess(MemberGuard(settings.cluster, clock), files), CallerAccess(files))
