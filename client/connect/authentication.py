"""Authentication: the classes that Pulsar's programs name. Brokers do not ask who calls yet.

So a program that brings credentials is told at once, when its client is made, that they would not be checked: silence
would look like protection.
"""

from __future__ import annotations

from collections.abc import Callable

from ..common.errors import InvalidConfiguration, OperationNotSupported


class Authentication:
    """Base of all."""


class AuthenticationTLS(Authentication):
    """A certificate of the client."""
    def __init__(self, certificate_path: str, private_key_path: str) -> None:
        self.certificate_path, self.private_key_path = certificate_path, private_key_path


class AuthenticationToken(Authentication):
    """A token, or a function that gives it."""
    def __init__(self, token: str | Callable[[], str]) -> None:
        if not (isinstance(token, str) or callable(token)):
            raise InvalidConfiguration("a token is text, or a function that gives it")
        self.token = token


class AuthenticationAthenz(Authentication):
    """Athenz."""
    def __init__(self, auth_params_string: str) -> None:
        self.auth_params_string = auth_params_string


class AuthenticationOauth2(Authentication):
    """OAuth 2.0."""
    def __init__(self, auth_params_string: str) -> None:
        self.auth_params_string = auth_params_string


class AuthenticationBasic(Authentication):
    """A user name and a password."""
    def __init__(
        self, username: str | None = None, password: str | None = None, method: str = "basic",
        auth_params_string: str | None = None,
    ) -> None:  # fmt: skip
        self.username, self.password, self.method = username, password, method
        self.auth_params_string = auth_params_string


def check_authentication(authentication: object) -> None:
    if authentication is None:
        return
    if not isinstance(authentication, Authentication):
        raise InvalidConfiguration(f"authentication is one of magnetar.Authentication…, not {authentication!r}")
    raise OperationNotSupported(f"{type(authentication).__name__}: brokers do not check who calls yet; leave it out")
