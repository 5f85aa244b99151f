"""Asks an issuer: one bounded GET of JSON, in a worker's thread. Addresses come from the settings alone.

A redirect is an error: it would lead where the settings do not."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from ..proto.errors import InvalidConfiguration, Unavailable
from ..runtime.clock import Clock

TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 256 << 10
_CHUNK = 16 << 10


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Https:
    """`ca`: a PEM file of whom to trust; empty: the system's. InvalidConfiguration: it cannot be read."""

    def __init__(self, clock: Clock, ca: str = "", require_https: bool = True) -> None:
        self._clock = clock
        self._require_https = require_https
        try:
            context = ssl.create_default_context(cafile=ca or None)
        except OSError as error:
            raise InvalidConfiguration(f"{ca} cannot be read as certificates of authorities") from error
        self._opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=context))

    def is_allowed(self, url: object) -> bool:
        try:
            found = urlsplit(url) if isinstance(url, str) else None
        except ValueError:
            return False
        schemes = {"https"} if self._require_https else {"https", "http"}
        return found is not None and found.scheme in schemes and bool(found.hostname) and not found.username

    def get_json(self, url: str) -> dict[str, Any]:
        """Waits. Unavailable: no answer within TIMEOUT_S, or none that is a JSON object of ANSWER_BYTES_MAX."""
        if not self.is_allowed(url):
            raise Unavailable(f"{url} is not asked: its address does not begin with https://")
        try:
            with self._opener.open(url, timeout=TIMEOUT_S) as answer:
                found = json.loads(self._body(answer, url))
        except (OSError, HTTPException) as error:
            why = f"code {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
            raise Unavailable(f"{url} does not answer: {why}") from error
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"{url} does not answer with JSON") from error
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
