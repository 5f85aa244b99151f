"""Who the client is: the classes that Pulsar's programs name, and what its connections bring to a broker.

A credential is asked for at each connection and call, so a function that reads it from a file renews it. It is never
part of a `repr`, an error or a log line. Brokers' certificates are always verified, their host names too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from typing import Any

from ...proto.errors import InvalidConfiguration as WireInvalidConfiguration
from ...runtime.access import CallerAccess, TlsFiles
from ..common.checks import shown
from ..common.errors import InvalidConfiguration, OperationNotSupported
from .service_url import ServiceUrl


class Authentication:
    """Base of all. A program's own overrides `authorization`."""

    certificate_path = ""
    private_key_path = ""

    def authorization(self) -> str:
        """The value of the header `authorization`, such as "Bearer …"; empty: none. It must not wait."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class AuthenticationTLS(Authentication):
    """A certificate of the client, and its private key: paths of PEM files, read at each connection."""

    def __init__(self, certificate_path: str, private_key_path: str) -> None:
        self.certificate_path = _text("certificate_path", certificate_path)
        self.private_key_path = _text("private_key_path", private_key_path)


class AuthenticationToken(Authentication):
    """A token (JWT), or a function that gives it, which is called for each connection and call and must not wait."""

    def __init__(self, token: str | Callable[[], str]) -> None:
        if not (isinstance(token, str) or callable(token)):
            raise InvalidConfiguration("a token is text, or a function that gives it")
        self._token = token

    def authorization(self) -> str:
        if isinstance(self._token, str):
            token: object = self._token
        else:
            try:
                token = self._token()
            except Exception as error:
                failed = f"the function that gives the token failed: {type(error).__name__}"
                raise WireInvalidConfiguration(failed) from error
        if not isinstance(token, str) or not token.strip() or not token.strip().isascii():
            raise WireInvalidConfiguration("the token is no text of ASCII letters, or empty")
        return f"Bearer {token.strip()}"


class AuthenticationBasic(Authentication):
    """A user name and a password; `auth_params_string` is a JSON object with both."""

    def __init__(
        self, username: str | None = None, password: str | None = None, method: str = "basic",
        auth_params_string: str | None = None,
    ) -> None:  # fmt: skip
        if method != "basic":
            raise OperationNotSupported("AuthenticationBasic: the only method is 'basic'")
        if auth_params_string is not None:
            found = _json(auth_params_string)
            username, password = found.get("username"), found.get("password")
        if not isinstance(username, str) or not isinstance(password, str) or not username or ":" in username:
            raise InvalidConfiguration("AuthenticationBasic takes a username without a colon, and a password, as text")
        self._header = "Basic " + base64.b64encode(f"{username}:{password}".encode()).decode()

    def authorization(self) -> str:
        return self._header


class AuthenticationAthenz(Authentication):
    """Athenz: not supported."""

    def __init__(self, auth_params_string: str) -> None:
        raise OperationNotSupported("AuthenticationAthenz is not supported: use a token or a certificate")


class AuthenticationOauth2(Authentication):
    """OAuth 2.0: the client does not fetch tokens yet. Give AuthenticationToken a function that does."""

    def __init__(self, auth_params_string: str) -> None:
        raise OperationNotSupported(
            "AuthenticationOauth2 is not supported yet: give AuthenticationToken a function that fetches the token"
        )


def caller_access(
    url: ServiceUrl, authentication: object, options: Mapping[str, Any] | None = None
) -> CallerAccess:
    """What the connections of a client bring. `options`: its parameters `use_tls` and `tls_…`."""
    if authentication is not None and not isinstance(authentication, Authentication):
        raise InvalidConfiguration(f"authentication is one of magnetar.Authentication…, not {shown(authentication)}")
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
        authentication.authorization if isinstance(authentication, Authentication) else None,
    )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidConfiguration(f"{name} is the path of a PEM file, not {shown(value)}")
    return value


def _json(text: object) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) and len(text) <= 65536 else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidConfiguration("auth_params_string is a JSON object with username and password")
    return found
