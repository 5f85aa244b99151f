"""The walls of the page: what a request must have before a view runs, and the headers of every answer.

    check_host(host, advertised)          against DNS rebinding: a caller that brought no credentials names an address
    check_origin(headers)                 a change comes from a page of this server
    FormTokens().check(cookie, token)     … and from a form that this process made for this browser
    Sessions(clock).find(cookie)          the credentials of a caller who has logged in

Names, properties and payloads are hostile: templates escape them, and `HEADERS` lets the browser run and load only what
this server has. The page has no rights of its own: each operation is called as the caller, as over REST.
Guarding tests: tests/broker/rest/test_page.py.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from ....runtime.clock import Clock
from ..call import BadRequest

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer browsers send `Origin: null` with our own forms
    "Cache-Control": "no-store",
}
SESSION_S = 12 * 3600
SESSIONS_MAX = 1_000
"""Logins at a time; the one that was used least recently ends for a further one. A login takes up to 16 KiB."""
COOKIE_MAX = 128
"""Characters of a cookie of ours, at most."""


def check_host(host: str, advertised: str) -> None:
    """Raises BadRequest (421) unless `Host` is an address, localhost or the advertised host: a name of a stranger may
    have been pointed at this machine, so that a page of his site reads this one."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if name and name in ("localhost", advertised.lower()):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise BadRequest("open the page by its address, or by the name that the server advertises", 421) from None


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises BadRequest (403) unless a page of this server, or the user himself, made the browser send a change."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        raise BadRequest("a page of another site may change nothing here", 403)
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise BadRequest("a page of another site may change nothing here", 403)


class FormTokens:
    """The tokens in forms: each belongs to one browser, by its cookie, and to this run of the process."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def token_of(self, cookie: str) -> str:
        return hmac.new(self._secret, cookie.encode(), hashlib.sha256).hexdigest()

    def check(self, cookie: str, token: str) -> None:
        """Raises BadRequest (403) if the form is not of this browser and this run of the process."""
        if not cookie or not hmac.compare_digest(self.token_of(cookie).encode(), token.encode()):
            raise BadRequest("this form is of another session: load the page again, and send it once more", 403)


class Session(NamedTuple):
    """A login. `authorization` is checked anew at each request."""

    authorization: str
    end_s: float


class Sessions:
    """The logins of this process, by cookie."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions = OrderedDict[str, Session]()

    def add(self, authorization: str) -> str:
        """Returns the cookie of a new login."""
        cookie = make_cookie()
        self._sessions[cookie] = Session(authorization, self._clock.monotonic() + SESSION_S)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return cookie

    def find(self, cookie: str) -> str:
        """Returns the credentials of a login; "" if there is none."""
        session = self._sessions.get(cookie)
        if session is None:
            return ""
        if session.end_s <= self._clock.monotonic():
            self.discard(cookie)
            return ""
        self._sessions.move_to_end(cookie)
        return session.authorization

    def discard(self, cookie: str) -> None:
        self._sessions.pop(cookie, None)


def make_cookie() -> str:
    return secrets.token_urlsafe(24)
