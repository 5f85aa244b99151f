"""Requests JSON documents over HTTP from issuers of tokens (`JsonClient`). A request blocks its thread; its size and
its time are limited.

A redirect is an error, because only the configured addresses may be asked. The text of an error quotes nothing of the
answer, because an issuer may repeat secrets of the request in it.
"""

from __future__ import annotations

import ipaddress
import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.parse import urlencode, urlsplit

from ...proto.errors import InvalidConfiguration, Unavailable
from ..access import TlsFiles
from ..clock import Clock

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 256 << 10
_CHUNK = 16 << 10


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class JsonClient:
    """Sends HTTP requests, and returns the JSON documents in the answers. `tls.ca`: the file of trusted certificate
    authorities; empty: those of the system. `require_https` False: http:// to this machine is allowed too. The
    constructor raises InvalidConfiguration if a file of `tls` cannot be used."""

    def __init__(self, clock: Clock, tls: TlsFiles | None = None, *, require_https: bool = True) -> None:
        self._clock = clock
        self._require_https = require_https
        tls = tls or TlsFiles()
        try:
            context = ssl.create_default_context(cafile=tls.ca or None)
            if tls.certificate:
                context.load_cert_chain(tls.certificate, tls.key or None)
        except OSError as error:
            files = f"{tls.ca} {tls.certificate} {tls.key}".strip()
            raise InvalidConfiguration(f"{files} cannot be read as certificates and key in PEM") from error
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))

    def is_url_allowed(self, url: object) -> bool:
        """Returns whether the URL may be requested: it has a host and no user, and is https://, or http:// to this
        machine if `require_https` is False. Returns False if it is not a text."""
        try:
            found = urlsplit(url) if isinstance(url, str) else None
        except ValueError:
            return False
        if found is None or not found.hostname or found.username:
            return False
        in_clear = found.scheme == "http" and not self._require_https and _is_loopback(found.hostname)
        return found.scheme == "https" or in_clear

    def request_json(self, url: str, form: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Sends a GET request, or a POST request if there is a `form`, and returns the JSON object of the answer.
        Blocks the calling thread.

        Raises Unavailable if the URL is not allowed (`is_url_allowed`), if the server sends nothing for TIMEOUT_S, or
        if the body does not arrive within TIMEOUT_S. Also raises it if the answer is not a JSON object of at most
        ANSWER_BYTES_MAX. For an HTTP error, the field `status` of the exception is the HTTP status."""
        if not self.is_url_allowed(url):
            raise Unavailable(f"{url} is not asked: its address does not begin with https://")
        data = None if form is None else urlencode(form).encode()
        request = urllib.request.Request(url, data, {"Accept": "application/json"})
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                found = json.loads(self._body(answer, url))
        except urllib.error.HTTPError as error:
            raise Unavailable(f"{url} answers with status {error.code}", status=error.code) from None
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{url} does not answer: {type(error).__name__}") from error
        except (ValueError, RecursionError):
            raise Unavailable(f"{url} does not answer with JSON") from None
        if not isinstance(found, dict):
            raise Unavailable(f"{url} does not answer with an object of JSON")
        return found

    def _body(self, answer: Any, url: str) -> bytes:
        end_s, body = self._clock.monotonic() + TIMEOUT_S, b""
        while chunk := answer.read1(_CHUNK):
            body += chunk
            if len(body) > ANSWER_BYTES_MAX:
                raise Unavailable(f"{url} answers with more than {ANSWER_BYTES_MAX} bytes")
            if self._clock.monotonic() > end_s:
                raise Unavailable(f"{url} does not answer within {TIMEOUT_S:.0f} s")
        return body


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
