"""Who a token says its holder is, and every token that is refused."""

import base64
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.proto.errors import InvalidConfiguration, InvalidRequest, Unauthenticated
from magnetar.proto.names import check_role
from magnetar.runtime.access import PrincipalKind
from magnetar.security.settings import Secret, TokenSection
from magnetar.security.token import TokenVerifier, create_token, format_unverified_token

NOW_S = 1_800_000_000
SECRET = b"k" * 32


@dataclass
class Clock:
    now_ms: int = NOW_S * 1000

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_ms / 1000


@pytest.fixture
def secret_path(tmp_path: Path) -> str:
    path = tmp_path / "secret.key"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return str(path)


def verifier(path: str, **settings: Any) -> TokenVerifier:
    return TokenVerifier(TokenSection(secret_key=path, **settings), Clock())


def signed(claims: dict[str, Any], key: Any = SECRET, algorithm: str = "HS256", **headers: Any) -> str:
    return jwt.encode(claims, key, algorithm=algorithm, headers=headers or None)


# ---------------------------------------------------------------------------------- accepted
def test_the_subject_is_the_role_and_the_end_is_known(secret_path: str) -> None:
    found = verifier(secret_path).verify(signed({"sub": "ada", "exp": NOW_S + 60, "jti": "t1"}))
    assert (found.name, found.kind, found.method) == ("ada", PrincipalKind.CLIENT, "token")
    assert (found.expires_ms, found.credential_id) == ((NOW_S + 60) * 1000, "t1")
    assert verifier(secret_path).verify(signed({"sub": "ada"})).expires_ms == 0


def test_another_claim_may_be_the_role_and_of_a_list_the_first(secret_path: str) -> None:
    assert verifier(secret_path, role_claim="roles").verify(signed({"roles": ["first", "second"]})).name == "first"


def test_an_audience_is_compared_where_one_is_configured(secret_path: str) -> None:
    asks = verifier(secret_path, audience="magnetar")
    for audience in ("magnetar", ["other", "magnetar"]):
        assert asks.verify(signed({"sub": "ada", "aud": audience})).name == "ada"
    for audience in ("other", ["other"], None, 7, {"magnetar": 1}):
        with pytest.raises(Unauthenticated, match="audience"):
            asks.verify(signed({"sub": "ada", "aud": audience} if audience is not None else {"sub": "ada"}))
    assert verifier(secret_path).verify(signed({"sub": "ada", "aud": "whatever"})).name == "ada"


@pytest.mark.parametrize("skew_s", [0, 30])
def test_times_are_compared_with_the_clock_and_its_skew(secret_path: str, skew_s: int) -> None:
    asks = verifier(secret_path, clock_skew_s=skew_s)
    asks.verify(signed({"sub": "a", "exp": NOW_S + 1 - skew_s, "nbf": NOW_S + skew_s}))
    with pytest.raises(Unauthenticated, match="has expired at 2027-01-15"):
        asks.verify(signed({"sub": "a", "exp": NOW_S - skew_s}))
    with pytest.raises(Unauthenticated, match="valid from"):
        asks.verify(signed({"sub": "a", "nbf": NOW_S + skew_s + 1}))


@pytest.mark.parametrize("algorithm", ["RS256", "PS512", "ES256"])
def test_a_public_key_verifies_its_algorithms(tmp_path: Path, algorithm: str) -> None:
    on_a_curve = algorithm == "ES256"
    key: Any = ec.generate_private_key(ec.SECP256R1()) if on_a_curve else rsa.generate_private_key(65537, 2048)
    for form, suffix in ((serialization.Encoding.PEM, "pem"), (serialization.Encoding.DER, "der")):
        path = tmp_path / f"public.{suffix}"
        path.write_bytes(key.public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo))
        asks = TokenVerifier(TokenSection(public_key=str(path)), Clock())
        assert asks.verify(signed({"sub": "ada"}, key, algorithm)).name == "ada"
        with pytest.raises(Unauthenticated, match="algorithm"):
            asks.verify(signed({"sub": "ada"}))


# ---------------------------------------------------------------------------------- refused
def _unsigned(header: dict[str, Any], claims: dict[str, Any]) -> str:
    parts = [base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode() for each in (header, claims)]
    return ".".join(parts) + "."


def test_an_unsigned_token_is_refused_whatever_its_header_says(secret_path: str) -> None:
    for algorithm in ("none", "None", "NONE", "", None):
        with pytest.raises(Unauthenticated):
            verifier(secret_path).verify(_unsigned({"alg": algorithm, "typ": "JWT"}, {"sub": "admin"}))


def test_a_public_key_is_no_secret_of_hmac(tmp_path: Path) -> None:
    """The classic confusion: a token that is signed with the text of the public key as if it were a secret."""
    import hashlib
    import hmac

    pem = rsa.generate_private_key(65537, 2048).public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )  # fmt: skip
    path = tmp_path / "public.pem"
    path.write_bytes(pem)
    forged = _unsigned({"alg": "HS256"}, {"sub": "admin"}).rstrip(".")
    mac = base64.urlsafe_b64encode(hmac.new(pem, forged.encode(), hashlib.sha256).digest()).rstrip(b"=").decode()
    with pytest.raises(Unauthenticated, match="algorithm"):
        TokenVerifier(TokenSection(public_key=str(path)), Clock()).verify(f"{forged}.{mac}")


def test_keys_that_a_token_names_itself_are_not_followed(secret_path: str) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    own = {"jwk": json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key())), "jku": "http://127.0.0.1:1/keys"}
    with pytest.raises(Unauthenticated):
        verifier(secret_path).verify(signed({"sub": "admin"}, key, "ES256", **own))


@pytest.mark.parametrize("role", ["*", "ünï", "a b", "client:admin", "../x", "角色", "a,b"])
def test_a_printable_role_is_exactly_itself(secret_path: str, role: str) -> None:
    assert verifier(secret_path).verify(signed({"sub": role})).name == role


@pytest.mark.parametrize("jti", [7, None, ["x"], "x" * 300, ""])
def test_an_id_that_is_no_short_text_is_none(secret_path: str, jti: Any) -> None:
    assert verifier(secret_path).verify(signed({"sub": "a", "jti": jti})).credential_id == ""


ROLES = [None, "", 7, [], [7], "a\nb", "a\0", " a", "a\n", "a\u202eb", "a\ud800", "a" * 257, {"a": 1}, True]


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_printable_text(secret_path: str, role: Any) -> None:
    with pytest.raises(Unauthenticated, match="role"):
        verifier(secret_path).verify(signed({"role": role} if role is not None else {}))


@pytest.mark.parametrize("claim", ["exp", "nbf"])
@pytest.mark.parametrize("value", ["tomorrow", True, 1e300, -1e300, [1], 10**400])
def test_a_time_is_a_number_of_seconds(secret_path: str, claim: str, value: Any) -> None:
    with pytest.raises(Unauthenticated):
        verifier(secret_path).verify(signed({"sub": "a", claim: value}))


def test_another_key_and_a_token_of_a_megabyte_are_refused(secret_path: str) -> None:
    with pytest.raises(Unauthenticated, match="not signed with a key of this server"):
        verifier(secret_path).verify(signed({"sub": "ada"}, b"x" * 32))
    with pytest.raises(Unauthenticated, match="characters"):
        verifier(secret_path).verify("x" * 1_000_000)


_VERIFIER: list[TokenVerifier] = []


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(max_size=200), st.lists(st.binary(max_size=60), min_size=1, max_size=5).map(
    lambda parts: ".".join(base64.urlsafe_b64encode(each).decode().rstrip("=") for each in parts))))  # fmt: skip
def test_any_other_text_is_refused_and_is_not_quoted(text: str) -> None:
    if not _VERIFIER:
        os.environ["MAGNETAR_TEST_TOKEN_KEY"] = "k" * 32
        _VERIFIER.append(verifier("env:MAGNETAR_TEST_TOKEN_KEY"))
    with pytest.raises(Unauthenticated) as found:
        _VERIFIER[0].verify(text)
    assert len(text) < 12 or text not in str(found.value)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)  # fmt: skip
CLAIMS = st.dictionaries(st.sampled_from(["sub", "exp", "nbf", "iat", "aud", "jti", "iss", "x"]), JSON)


def _hand_signed(header: bytes, payload: bytes) -> str:
    import hashlib
    import hmac

    text = b".".join(base64.urlsafe_b64encode(each).rstrip(b"=") for each in (header, payload))
    mac = base64.urlsafe_b64encode(hmac.new(SECRET, text, hashlib.sha256).digest()).rstrip(b"=")
    return (text + b"." + mac).decode()


@settings(max_examples=400, deadline=None)
@given(CLAIMS, st.one_of(st.just({}), st.dictionaries(st.sampled_from(["kid", "typ", "crit", "b64", "zip"]), JSON)))
def test_any_signed_claims_give_a_role_or_are_refused(claims: dict[str, Any], more: dict[str, Any]) -> None:
    os.environ["MAGNETAR_TEST_TOKEN_KEY"] = "k" * 32
    token = _hand_signed(json.dumps({"alg": "HS256", **more}).encode(), json.dumps(claims).encode())
    try:
        found = verifier("env:MAGNETAR_TEST_TOKEN_KEY", audience="a" if "x" in claims else "").verify(token)
    except Unauthenticated:
        return
    assert found.name == (claims["sub"][0] if isinstance(claims["sub"], list) else claims["sub"])
    assert found.expires_ms > NOW_S * 1000 or claims.get("exp") is None


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"[]", b"7", b'"a"', b"{", b'{"sub": "a\xff"}', b'{"sub": "a", "exp": 1' + b"0" * 5000 + b"}", b"[" * 5000,
        b'{"sub": "a", "exp": NaN}', b'{"sub": "a", "exp": -Infinity}', b'{"sub": "a", "exp": 1e400}',
    ],
)  # fmt: skip
def test_signed_text_that_is_no_object_of_claims_is_refused(secret_path: str, payload: bytes) -> None:
    with pytest.raises(Unauthenticated):
        verifier(secret_path).verify(_hand_signed(b'{"alg": "HS256"}', payload))


# ---------------------------------------------------------------------------------- keys and tokens of our own
def test_weak_wrong_and_missing_keys_are_named_at_the_start(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"short")
    small.chmod(0o600)
    pem = tmp_path / "pem"
    pem.write_bytes(b"-----BEGIN PUBLIC KEY-----" + b"x" * 40)
    pem.chmod(0o600)
    weak = tmp_path / "weak.pem"
    weak.write_bytes(rsa.generate_private_key(65537, 1024).public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo))  # fmt: skip
    for section, words in (
        (TokenSection(secret_key=str(small)), "32"),
        (TokenSection(secret_key=str(pem)), "public_key"),
        (TokenSection(secret_key=str(tmp_path / "none")), "cannot be read"),
        (TokenSection(public_key=str(pem)), "no public key"),
        (TokenSection(public_key=str(weak)), "2048"),
    ):
        with pytest.raises(InvalidConfiguration, match=words):
            TokenVerifier(section, Clock())


def test_a_token_that_is_made_here_is_taken_here(secret_path: str) -> None:
    made = create_token(Secret(SECRET), "HS256", "ada", NOW_S * 1000, 60)
    assert verifier(secret_path).verify(made).expires_ms == (NOW_S + 60) * 1000
    assert json.loads(format_unverified_token(made))["claims"]["sub"] == "ada"
    with pytest.raises(InvalidConfiguration, match="ES256"):
        create_token(Secret(SECRET), "ES256", "ada", 0)
    for wrong in ("", "a\n", "a" * 300):
        with pytest.raises(InvalidRequest):
            check_role(wrong)
    with pytest.raises(InvalidRequest, match="no token"):
        format_unverified_token("a.b.c")
