"""The identity of the client: the authentication classes of Pulsar's client, and the credentials of the client's
connections (`make_caller_access`).

A credential is requested for each connection and each call. So a function that reads it from a file always returns the
present one. A credential is never part of a `repr`, an error or a log line. Certificates of brokers are always
verified, and their host names, too.

Also in this file, below its heading: tokens for client credentials (oauth2)."""

from __future__ import annotations

import base64
import binascii
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from ...proto.errors import InvalidConfiguration as WireInvalidConfiguration
from ...proto.errors import MagnetarError, Unauthenticated, Unavailable
from ...proto.names import parse_number
from ...runtime.access import AUTHORIZATION_MAX, CallerAccess, TlsFiles
from ...runtime.clock import Clock, SystemClock
from ..common.checks import shorten_value
from ..common.errors import NO_TOKEN_FIELD, InvalidConfiguration, OperationNotSupported
from ..common.loggers import reraise_interrupt
from .discovery import ServiceUrl

_LOG = logging.getLogger("magnetar.client")
_TOKEN = re.compile(r"\S{32,}")
_NOT_LOADED = "a library of Pulsar's C++ client is not loaded: derive from Authentication"


class Authentication:
    """Base class of all ways to authenticate. A program may derive its own: it overrides `authorization` and sets
    `auth_method_name`.

        class Ticket(magnetar.Authentication):
            auth_method_name = "token"

            def authorization(self) -> str:
                return f"Bearer {ticket_of_today()}"

    An instance of the base class itself acts as one of the other classes, chosen by the name that Pulsar's client (or
    Java's) has for it: `Authentication("tls", "tlsCertFile:…,tlsKeyFile:…")`, `("token", "token:…" or "file:///…")`,
    `("basic", JSON)`, `("oauth2token", JSON)`. Raises InvalidConfiguration for wrong parameters."""

    auth_method_name = ""
    """Pulsar's name of the authentication method: token, basic, tls."""
    certificate_path = ""
    private_key_path = ""

    _named: Authentication | None = None

    def __init__(self, dynamicLibPath: str | None = None, authParamsString: str | None = None) -> None:
        if dynamicLibPath is None and authParamsString is None:
            return
        named = self._named = make_authentication_by_name(dynamicLibPath, authParamsString)
        self.auth_method_name = named.auth_method_name
        self.certificate_path, self.private_key_path = named.certificate_path, named.private_key_path

    def authorization(self) -> str:
        """Returns the value of the header `authorization`, such as "Bearer …"; empty: the header is not sent. Called
        for each connection and each call, perhaps in the event loop; must not block. If it raises an error that is no
        MagnetarError, the call fails with Unauthenticated."""
        return "" if self._named is None else self._named.authorization()

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class WrongAuthenticationParameters(InvalidConfiguration, RuntimeError):
    """Raised when `auth_params_string` of AuthenticationBasic has a wrong value. It is a RuntimeError, too, as in
    Pulsar's client."""


class UnsupportedAuthentication(Authentication):
    """A placeholder for an authentication library of Pulsar's C++ client, which Magnetar does not support. As in that
    client, constructing it succeeds, and opening a producer or a consumer with it fails."""

    def __init__(self, name: str) -> None:
        self.auth_method_name = name
        _LOG.warning("%s: %s", shorten_value(name), _NOT_LOADED)

    def authorization(self) -> str:
        raise Unauthenticated(f"{shorten_value(self.auth_method_name)}: {_NOT_LOADED}")


class AuthenticationTLS(Authentication):
    """Authenticates by a TLS certificate of the client and its private key. Both parameters are paths of PEM files,
    which are read at each connection. Raises InvalidConfiguration if a parameter is no path."""

    auth_method_name = "tls"

    def __init__(self, certificate_path: str, private_key_path: str) -> None:
        self.certificate_path = _text("certificate_path", certificate_path)
        self.private_key_path = _text("private_key_path", private_key_path)


class AuthenticationToken(Authentication):
    """Authenticates by a token (JWT), or by a function that returns one. The function is called for each connection and
    each call, and must not block. If the function returns an empty token or no text, that call raises
    InvalidConfiguration. Raises InvalidConfiguration if `token` is neither text nor a function."""

    auth_method_name = "token"

    def __init__(self, token: str | Callable[[], str]) -> None:
        if not (isinstance(token, str) or callable(token)):
            raise InvalidConfiguration("a token is text, or a function that gives it")
        self._token = token

    def authorization(self) -> str:
        token: object = self._token if isinstance(self._token, str) else self._token()
        if not isinstance(token, str) or not token.strip():
            raise WireInvalidConfiguration("the token is no text, or empty")
        return f"Bearer {token.strip()}"


class AuthenticationBasic(Authentication):
    """Authenticates by a user name and a password. `auth_params_string`: a JSON object with `username`, `password` and,
    optionally, `method`; it replaces the other parameters. Raises InvalidConfiguration if a value is wrong,
    WrongAuthenticationParameters if it is in `auth_params_string`.

    A `method` other than "basic" belongs to a plug-in of a Pulsar broker. A server here treats such a caller as one
    without credentials, as Pulsar does when the plug-in is missing; so the password is not sent."""

    auth_method_name = "basic"

    def __init__(
        self, username: str | None = None, password: str | None = None, method: str = "basic",
        auth_params_string: str | None = None,
    ) -> None:  # fmt: skip
        wrong: type[InvalidConfiguration] = InvalidConfiguration
        if auth_params_string is not None:
            wrong = WrongAuthenticationParameters
            try:
                found = _json(auth_params_string)
            except InvalidConfiguration as error:
                raise WrongAuthenticationParameters(error.message) from None
            username, password, method = found.get("username"), found.get("password"), found.get("method", method)
        if not isinstance(username, str) or not isinstance(password, str) or not username or ":" in username:
            raise wrong("AuthenticationBasic takes a username without a colon, and a password, as text")
        if not isinstance(method, str):
            raise wrong(f"the method of AuthenticationBasic is text, not {shorten_value(method)}")
        self.auth_method_name = method
        self._header = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()
        if method != "basic":
            _LOG.warning(
                "the method %s of AuthenticationBasic is not known here: nothing is sent", shorten_value(method)
            )
            self._header = ""

    def authorization(self) -> str:
        return self._header


class AuthenticationAthenz(Authentication):
    """Authentication by Athenz, which Magnetar does not support: constructing it raises OperationNotSupported. Exists
    because Pulsar's client has this class."""

    def __init__(self, auth_params_string: str) -> None:
        raise OperationNotSupported("AuthenticationAthenz is not supported: use a token or a certificate")


class AuthenticationOauth2(Authentication):
    """Authenticates by a token that an issuer gives for client credentials (OAuth 2.0); a new one is fetched before it
    expires.

    `auth_params_string` is a JSON object. `issuer_url` is needed. The credentials are `client_id` and `client_secret`,
    or `private_key`: a file, `file:…` or `data:application/json;base64,…`, with JSON of the two. Optional are
    `audience`, `scope`, `tls_cert_file`, `tls_key_file`, and `tokenEndpointAuthMethod` (client_secret_post,
    tls_client_auth). Raises InvalidConfiguration if a value is wrong. `OAuthTokenSource` fetches the tokens."""

    auth_method_name = "token"

    def __init__(self, auth_params_string: str, *, clock: Clock | None = None) -> None:
        found = _json(auth_params_string, "issuer_url and private_key")
        try:
            self._tokens = OAuthTokenSource(found, clock or SystemClock())
        except WireInvalidConfiguration as error:
            raise InvalidConfiguration(error.message) from None

    def authorization(self) -> str:
        return f"Bearer {self._tokens.get_token()}"


def make_authentication_by_name(name: object, parameters: object) -> Authentication:
    """Returns the Authentication object for a name of Pulsar's client, such as "tls" or "token", made with
    `parameters`, the text that Pulsar's client takes for it. For any other name, which means an authentication library,
    returns an UnsupportedAuthentication. Raises InvalidConfiguration if a parameter is no text or wrong,
    OperationNotSupported for "athenz"."""
    if not isinstance(name, str) or not isinstance(parameters, str):
        raise InvalidConfiguration("Authentication takes the name of a way and its parameters, as text")
    kind = name.rpartition(".")[2].lower().removeprefix("authentication")
    if kind == "tls":
        found = dict(each.partition(":")[::2] for each in parameters.split(","))
        return AuthenticationTLS(found.get("tlsCertFile", ""), found.get("tlsKeyFile", ""))
    if kind == "token":
        way, _, value = parameters.partition(":")
        if way == "file":
            return AuthenticationToken(lambda: _text_of(value.removeprefix("//")))
        return AuthenticationToken(value if way == "token" else parameters)
    if kind == "basic":
        return AuthenticationBasic(auth_params_string=parameters)
    if kind in ("oauth2token", "oauth2"):
        return AuthenticationOauth2(parameters)
    if kind == "athenz":
        return AuthenticationAthenz(parameters)
    return UnsupportedAuthentication(name)


def _text_of(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read(AUTHORIZATION_MAX)


def make_caller_access(
    url: ServiceUrl, authentication: object, options: Mapping[str, Any] | None = None
) -> CallerAccess:
    """Returns the credentials and TLS files with which a client connects. `options`: the client's parameters `use_tls`
    and `tls_…`. Raises InvalidConfiguration if `authentication` is no Authentication, or a secret or a certificate
    would be used without TLS (a credential may be, to this machine). Raises OperationNotSupported for
    `tls_allow_insecure_connection`."""
    if authentication is not None and not isinstance(authentication, Authentication):
        kind = type(authentication).__name__  # never its value: it may be the token
        raise InvalidConfiguration(f"authentication is one of magnetar.Authentication…, not a {kind}")
    given = options or {}
    if given.get("tls_allow_insecure_connection"):
        raise OperationNotSupported("tls_allow_insecure_connection: a broker's certificate is always verified")
    ca = given.get("tls_trust_certs_file_path") or ""
    certificate, key = given.get("tls_certificate_file_path") or "", given.get("tls_private_key_file_path") or ""
    if isinstance(authentication, Authentication) and authentication.certificate_path:
        certificate, key = authentication.certificate_path, authentication.private_key_path
    encrypted = url.encrypted or bool(given.get("use_tls"))
    if not encrypted and (ca or certificate or key):
        raise InvalidConfiguration("certificates are of TLS: begin the service URL with magnetar+ssl://")
    if not encrypted and authentication is not None and not all(each.is_loopback for each in url.endpoints):
        raise InvalidConfiguration("credentials are not sent in clear: begin the service URL with magnetar+ssl://")
    return CallerAccess(
        TlsFiles(certificate, key, ca) if encrypted else None,
        _header_of(authentication) if isinstance(authentication, Authentication) else None,
    )


def _header_of(authentication: Authentication) -> Callable[[], str]:
    """Returns a function that returns the header `authorization`. The errors of that function never contain the
    credential."""
    name = authentication.auth_method_name or type(authentication).__name__

    def header() -> str:
        try:
            found: object = authentication.authorization()
        except MagnetarError:
            raise
        except BaseException as error:
            said = f": {_without_tokens(error)}" if isinstance(authentication, AuthenticationToken) else ""
            failed = f"the authentication {name!r} failed: {type(error).__name__}{said}"
            raise Unauthenticated(failed) from reraise_interrupt(error)
        if not isinstance(found, str) or not found.isascii() or (found and not found.isprintable()):
            raise WireInvalidConfiguration(f"the authentication {name!r} gives no header of printable ASCII")
        return found

    return header


def _without_tokens(error: BaseException) -> str:
    """Returns the text of the error without words that are long enough to be tokens."""
    return _TOKEN.sub("…", str(error))[:200]


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or "-----BEGIN" in value:
        raise InvalidConfiguration(f"{name} is the path of a PEM file, not {shorten_value(value)}")
    return value


def _json(text: object, members: str = "username and password") -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) and len(text) <= 65536 else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidConfiguration(f"auth_params_string is a JSON object with {members}")
    return found


# --------------------------------------------------------------------------------------------------------------- oauth2
# Tokens for client credentials (OAuth 2.0), as Pulsar's AuthenticationOauth2 gets them.
#
#     issuer_url + /.well-known/openid-configuration → token_endpoint → access_token, used until shortly before its end
#
# `OAuthTokenSource.get_token` never waits: a thread fetches the token. While there is no token it raises Unavailable,
# after which a client tries again. When a token is close to its end, a new one is fetched while the old one is still
# used. The client's secret is sent only in the body of the POST, over https or to this machine.


DISCOVERY_PATH = "/.well-known/openid-configuration"
DEFAULT_LIFETIME_S = 60.0
"""Lifetime in seconds of a token whose issuer does not give one."""
EXPIRY_MARGIN_S = 10.0
"""Seconds before its end from which on a token is not used any more. For a token with a short lifetime: a tenth of
it."""
RENEW_AFTER_SHARE = 0.75
"""Part of a token's lifetime after which its next use makes the client fetch a new token."""
TOKEN_RETRY_S = 1.0
FILE_BYTES_MAX = 64 << 10
_REFUSALS = {"400", "401", "403"}


class OAuthTokenSource:
    """Fetches access tokens (OAuth 2.0) from an issuer, and renews them before they expire. `parameters`: those of
    AuthenticationOauth2. Asks the issuer only when a token is needed. Raises InvalidConfiguration if a parameter is
    wrong."""

    def __init__(self, parameters: Mapping[str, Any], clock: Clock) -> None:
        from ...runtime.tcp.http_client import JsonClient  # HTTP, which other clients do not need

        said = {name: value for name, value in parameters.items() if isinstance(value, str)}
        method = said.get("tokenEndpointAuthMethod") or said.get("token_endpoint_auth_method") or "client_secret_post"
        if method not in ("client_secret_post", "tls_client_auth"):
            raise WireInvalidConfiguration("tokenEndpointAuthMethod is client_secret_post or tls_client_auth")
        tls = TlsFiles(said.get("tls_cert_file", ""), said.get("tls_key_file", ""))
        self._client = JsonClient(clock, tls, require_https=False)
        self._issuer = said.get("issuer_url", "")
        if not self._client.is_url_allowed(self._issuer):
            raise WireInvalidConfiguration("issuer_url begins with https://, or is http:// to this machine")
        by_certificate = method == "tls_client_auth"
        if by_certificate and not tls.certificate:
            raise WireInvalidConfiguration("tls_client_auth needs tls_cert_file and tls_key_file")
        self._credentials = _credentials(said, by_certificate)
        self._form = {"grant_type": "client_credentials"}
        self._form.update({name: said[name] for name in ("audience", "scope") if said.get(name)})
        self._clock = clock
        self._lock = threading.Lock()
        self._fetching = False
        self._token, self._renew_at, self._ends_at = "", 0.0, 0.0
        self._failure: MagnetarError | None = None
        self._failed_at = 0.0
        self._last = ""

    def get_token(self) -> str:
        """Returns a valid access token; never blocks, and may start a thread that fetches a new one. Raises Unavailable
        while no valid token was fetched, Unauthenticated if the issuer refuses the credentials. May be called from any
        thread."""
        with self._lock:
            now = self._clock.monotonic()
            usable = self._token and now < self._ends_at
            paused = self._failure is not None and now < self._failed_at + TOKEN_RETRY_S
            if not self._fetching and not paused and not (usable and now < self._renew_at):
                self._fetching, self._failure = True, None
                threading.Thread(target=self._fetch, name="oauth2", daemon=True).start()
            if usable:
                return self._token
            failure = self._failure
        if failure is not None:
            raise type(failure)(failure.message, **failure.fields)
        raise Unavailable(
            f"the issuer {self._issuer} is asked for a token{self._last}", **{NO_TOKEN_FIELD: self._issuer}
        )

    def _fetch(self) -> None:
        """Fetches a token, in a thread of its own. Stores the token, or the error."""
        began, failure, token, lifetime_s = self._clock.monotonic(), None, "", 0.0
        try:
            token, lifetime_s = self._asked()
        except MagnetarError as error:
            failure = error
        except Exception as error:
            failure = Unavailable(f"no token from {self._issuer}: {type(error).__name__}")
        with self._lock:
            self._fetching, self._failure = False, failure
            if failure is not None:
                failure.fields.setdefault(NO_TOKEN_FIELD, self._issuer)
                self._failed_at, self._last = self._clock.monotonic(), f"; the last time: {failure.message}"
                return
            self._token, self._last = token, ""
            self._renew_at = began + lifetime_s * RENEW_AFTER_SHARE
            self._ends_at = began + lifetime_s - min(EXPIRY_MARGIN_S, lifetime_s / 10)

    def _asked(self) -> tuple[str, float]:
        """Asks the issuer; returns a token, and its lifetime in seconds."""
        endpoint = self._client.request_json(self._issuer.removesuffix("/") + DISCOVERY_PATH).get("token_endpoint")
        if not isinstance(endpoint, str) or not self._client.is_url_allowed(endpoint):
            raise Unavailable(f"the issuer {self._issuer} names no `token_endpoint` with https://")
        try:
            found = self._client.request_json(endpoint, {**self._form, **self._credentials()})
        except Unavailable as error:
            if error.fields.get("status") in _REFUSALS:
                raise Unauthenticated(f"{endpoint} refuses the client's credentials") from None
            raise
        token, lifetime_s = found.get("access_token"), found.get("expires_in", DEFAULT_LIFETIME_S)
        if not isinstance(token, str) or not 0 < len(token) < AUTHORIZATION_MAX - 7 or not token.isascii():
            raise Unavailable(f"{endpoint} answers without an `access_token`")
        if isinstance(lifetime_s, str):
            lifetime_s = parse_number(lifetime_s)
        usable = isinstance(lifetime_s, int | float) and not isinstance(lifetime_s, bool) and 0 < lifetime_s < 1e9
        return token, float(lifetime_s) if usable else DEFAULT_LIFETIME_S


def _credentials(said: Mapping[str, str], by_certificate: bool) -> Callable[[], Mapping[str, str]]:
    """Returns a function that reads the credentials at each fetch, so that a renewed file is used. The function raises
    WireInvalidConfiguration if they are missing then."""
    wanted = ("client_id",) if by_certificate else ("client_id", "client_secret")

    def read() -> Mapping[str, str]:
        found = _key_file(said["private_key"]) if said.get("private_key") else said
        if not all(isinstance(found.get(name), str) and found[name] for name in wanted):
            needed = " and ".join(wanted)
            raise WireInvalidConfiguration(f"AuthenticationOauth2 needs {needed}, or private_key with them")
        return {name: found[name] for name in wanted}

    read()
    return read


def _key_file(source: str) -> Mapping[str, Any]:
    """Reads a key file. `source`: a path, file:PATH, file:///PATH or data:application/json;base64,…"""
    wrong = WireInvalidConfiguration(
        "private_key is a file, or data:application/json;base64,…, with JSON of the client"
    )
    try:
        if source.startswith("data:"):
            head, _, body = source.partition(",")
            text = base64.b64decode(body, validate=True) if head.endswith(";base64") else b""
        else:
            path = source.removeprefix("file:").removeprefix("//")
            with open(unquote(path) if source.startswith("file:") else path, "rb") as file:
                text = file.read(FILE_BYTES_MAX)
        found = json.loads(text)
    except (OSError, ValueError, binascii.Error, RecursionError):
        raise wrong from None
    if not isinstance(found, dict):
        raise wrong
    return found
