"""Tokens for client credentials (OAuth 2.0), as Pulsar's AuthenticationOauth2 gets them.

    issuer_url + /.well-known/openid-configuration → token_endpoint → access_token, used until shortly before its end

`OAuthTokenSource.get_token` never waits: a thread fetches the token. While there is no token it raises Unavailable,
after which a client tries again. When a token is close to its end, a new one is fetched while the old one is still
used. The client's secret is sent only in the body of the POST, over https or to this machine."""

from __future__ import annotations

import base64
import binascii
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from ...proto.errors import InvalidConfiguration, MagnetarError, Unauthenticated, Unavailable
from ...proto.names import parse_number
from ...runtime.access import AUTHORIZATION_MAX, TlsFiles
from ...runtime.clock import Clock
from ...runtime.tcp.http_client import JsonClient
from ..common.errors import NO_TOKEN

DISCOVERY = "/.well-known/openid-configuration"
LIFETIME_S = 60.0
"""Lifetime in seconds of a token whose issuer does not give one."""
MARGIN_S = 10.0
"""Seconds before its end from which on a token is not used any more. For a token with a short lifetime: a tenth of
it."""
RENEW_AT = 0.75
"""Part of a token's lifetime after which its next use makes the client fetch a new token."""
RETRY_S = 1.0
FILE_BYTES_MAX = 64 << 10
_REFUSALS = {"400", "401", "403"}


class OAuthTokenSource:
    """Fetches access tokens (OAuth 2.0) from an issuer, and renews them before they expire. `parameters`: those of
    AuthenticationOauth2. Asks the issuer only when a token is needed. Raises InvalidConfiguration if a parameter is
    wrong."""

    def __init__(self, parameters: Mapping[str, Any], clock: Clock) -> None:
        said = {name: value for name, value in parameters.items() if isinstance(value, str)}
        method = said.get("tokenEndpointAuthMethod") or said.get("token_endpoint_auth_method") or "client_secret_post"
        if method not in ("client_secret_post", "tls_client_auth"):
            raise InvalidConfiguration("tokenEndpointAuthMethod is client_secret_post or tls_client_auth")
        tls = TlsFiles(said.get("tls_cert_file", ""), said.get("tls_key_file", ""))
        self._client = JsonClient(clock, tls, require_https=False)
        self._issuer = said.get("issuer_url", "")
        if not self._client.is_url_allowed(self._issuer):
            raise InvalidConfiguration("issuer_url begins with https://, or is http:// to this machine")
        by_certificate = method == "tls_client_auth"
        if by_certificate and not tls.certificate:
            raise InvalidConfiguration("tls_client_auth needs tls_cert_file and tls_key_file")
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
            paused = self._failure is not None and now < self._failed_at + RETRY_S
            if not self._fetching and not paused and not (usable and now < self._renew_at):
                self._fetching, self._failure = True, None
                threading.Thread(target=self._fetch, name="oauth2", daemon=True).start()
            if usable:
                return self._token
            failure = self._failure
        if failure is not None:
            raise type(failure)(failure.message, **failure.fields)
        raise Unavailable(f"the issuer {self._issuer} is asked for a token{self._last}", **{NO_TOKEN: self._issuer})

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
                failure.fields.setdefault(NO_TOKEN, self._issuer)
                self._failed_at, self._last = self._clock.monotonic(), f"; the last time: {failure.message}"
                return
            self._token, self._last = token, ""
            self._renew_at = began + lifetime_s * RENEW_AT
            self._ends_at = began + lifetime_s - min(MARGIN_S, lifetime_s / 10)

    def _asked(self) -> tuple[str, float]:
        """Asks the issuer; returns a token, and its lifetime in seconds."""
        endpoint = self._client.request_json(self._issuer.removesuffix("/") + DISCOVERY).get("token_endpoint")
        if not isinstance(endpoint, str) or not self._client.is_url_allowed(endpoint):
            raise Unavailable(f"the issuer {self._issuer} names no `token_endpoint` with https://")
        try:
            found = self._client.request_json(endpoint, {**self._form, **self._credentials()})
        except Unavailable as error:
            if error.fields.get("status") in _REFUSALS:
                raise Unauthenticated(f"{endpoint} refuses the client's credentials") from None
            raise
        token, lifetime_s = found.get("access_token"), found.get("expires_in", LIFETIME_S)
        if not isinstance(token, str) or not 0 < len(token) < AUTHORIZATION_MAX - 7 or not token.isascii():
            raise Unavailable(f"{endpoint} answers without an `access_token`")
        if isinstance(lifetime_s, str):
            lifetime_s = parse_number(lifetime_s)
        usable = isinstance(lifetime_s, int | float) and not isinstance(lifetime_s, bool) and 0 < lifetime_s < 1e9
        return token, float(lifetime_s) if usable else LIFETIME_S


def _credentials(said: Mapping[str, str], by_certificate: bool) -> Callable[[], Mapping[str, str]]:
    """Returns a function that reads the credentials at each fetch, so that a renewed file is used. The function raises
    InvalidConfiguration if they are missing then."""
    wanted = ("client_id",) if by_certificate else ("client_id", "client_secret")

    def read() -> Mapping[str, str]:
        found = _key_file(said["private_key"]) if said.get("private_key") else said
        if not all(isinstance(found.get(name), str) and found[name] for name in wanted):
            raise InvalidConfiguration(f"AuthenticationOauth2 needs {' and '.join(wanted)}, or private_key with them")
        return {name: found[name] for name in wanted}

    read()
    return read


def _key_file(source: str) -> Mapping[str, Any]:
    """Reads a key file. `source`: a path, file:PATH, file:///PATH or data:application/json;base64,…"""
    wrong = InvalidConfiguration("private_key is a file, or data:application/json;base64,…, with JSON of the client")
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
