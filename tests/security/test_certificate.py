"""Whom a client certificate names, and every certificate that names no role."""

import base64
import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from magnetar.proto.errors import Unauthenticated
from magnetar.runtime.access import Principal, PrincipalKind
from magnetar.security.authenticator import CertificateProvider
from magnetar.security.settings import CertificateSection
from tests.security.conftest import MakeCertificate
from tests.security.test_token import NOW_S, Clock

DAY_MS = 86_400_000
UUID = "0b8f4a52-4c5e-4f0e-8a8e-0c5f5f2c9a11"
BY_URI = CertificateSection("prod", common_name=False)
BY_NAME = CertificateSection("prod")


def principal(pem: bytes, section: CertificateSection = BY_NAME, clock: Clock | None = None) -> Principal:
    return CertificateProvider(section, clock or Clock()).verify_principal(pem)


def test_a_role_uri_makes_a_client_with_the_end_and_the_serial_number(make_certificate: MakeCertificate) -> None:
    pem = make_certificate([["ignored"]], ["magnetar://prod/role/orders"])
    for section in (BY_URI, BY_NAME):
        found = principal(pem, section)
        assert found == Principal("orders", PrincipalKind.CLIENT, "tls", NOW_S * 1000 + 90 * DAY_MS, "abc")


@pytest.mark.parametrize("name", ["broker/b-1", f"bookie/{UUID}", "operator/admin"])
def test_a_member_uri_makes_a_member_and_never_a_client(make_certificate: MakeCertificate, name: str) -> None:
    found = principal(make_certificate(uris=[f"magnetar://prod/{name}"]))
    assert (found.name, found.kind) == (name, PrincipalKind.MEMBER)


@pytest.mark.parametrize(
    "uris",
    [
        ["magnetar://test/role/a"],  # another cluster's
        ["magnetar://prod/role/a", "magnetar://prod/role/b"],
        ["magnetar://prod/role/a", "spiffe://other/x"],
        ["spiffe://other/x"],
        ["magnetar://prod/root/a"],
        ["magnetar://prod/role/"],
        ["magnetar://prod/role/a/b"],
        ["magnetar://prod/role/a%2Fb"],
        ["magnetar://prod/role/a?x"],
        ["magnetar://prod/bookie/not-a-uuid"],
        ["magnetar:///role/a"],
        ["MAGNETAR://prod/role/a"],
    ],
)
@pytest.mark.parametrize("section", [BY_URI, BY_NAME])
def test_a_foreign_double_or_malformed_uri_is_refused_whatever_the_common_name(
    make_certificate: MakeCertificate, uris: list[str], section: CertificateSection
) -> None:
    with pytest.raises(Unauthenticated):
        principal(make_certificate([["admin"]], uris), section)


def test_without_a_cluster_in_the_settings_no_uri_names_a_role(make_certificate: MakeCertificate) -> None:
    with pytest.raises(Unauthenticated, match="cluster"):
        principal(make_certificate(uris=["magnetar://prod/role/a"]), CertificateSection())


def test_the_common_name_is_the_whole_role_and_only_where_the_settings_say_so(
    make_certificate: MakeCertificate,
) -> None:
    pem = make_certificate([["a,CN=admin"]])
    assert (principal(pem).name, principal(pem).kind) == ("a,CN=admin", PrincipalKind.CLIENT)
    with pytest.raises(Unauthenticated):
        principal(pem, BY_URI)


@pytest.mark.parametrize("subject", [[], [["a"], ["b"]], [["a", "b"]], [["a\n"]], [["a\0b"]], [[" a"]], [["a\u202eb"]]])
def test_an_absent_double_or_unprintable_common_name_is_refused(
    make_certificate: MakeCertificate, subject: list[list[str]]
) -> None:
    with pytest.raises(Unauthenticated):
        principal(make_certificate(subject))


def test_a_certificate_expires_although_it_is_remembered(make_certificate: MakeCertificate) -> None:
    clock, pem = Clock(), make_certificate([["ada"]])
    provider = CertificateProvider(BY_NAME, clock)
    clock.now_ms += 90 * DAY_MS - 1
    assert provider.verify_principal(pem).name == "ada"
    clock.now_ms += 1
    with pytest.raises(Unauthenticated, match=r"has expired at 2027-04-15 08:00:00 UTC"):
        provider.verify_principal(pem)


# ---------------------------------------------------------------------------------- fuzz
EDITS = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), min_size=1, max_size=6)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, cut=st.integers(0, 5000))
def test_a_mutated_certificate_gives_a_principal_or_is_refused_and_nothing_else(
    make_certificate: MakeCertificate, edits: list[tuple[int, int]], cut: int
) -> None:
    pem = make_certificate([["name"]], ["magnetar://prod/role/orders"])
    der = bytearray(base64.b64decode(b"".join(pem.splitlines()[1:-1])))
    for place, value in edits:
        der[place % len(der)] = value
    body = base64.encodebytes(bytes(der[: cut % len(der)] if cut % 7 == 0 else der))
    with contextlib.suppress(Unauthenticated):
        principal(b"-----BEGIN CERTIFICATE-----\n" + body + b"-----END CERTIFICATE-----\n")


@given(st.binary(max_size=300))
def test_bytes_that_are_no_certificate_are_refused(pem: bytes) -> None:
    with pytest.raises(Unauthenticated):
        principal(pem)
