"""Requests JSON documents over HTTP from issuers of tokens (`JsonClient`). A request blocks its thread; its size and
its time are limited.

A redirect is an error, because only the configured addresses may be asked. The text of an error quotes nothing of the
answer, because an issuer may repeat secrets of the request in it.
"""

from __future__ import annotations

import io
import ipaddress
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlencode, urlsplit

from ...proto.errors import InvalidConfiguration, Unavailable
from ..access import TlsFiles
from ..clock import Clock

REQUEST_TIMEOUT_S = 10.0
ANSWER_BYTES_MAX = 256 << 10
_CHUNK = 16 << 10


class _Deadline:
    """The time at which a request must have ended."""

    def __init__(self, clock: Clock, after_s: float) -> None:
        self._clock = clock
        self._end_s = clock.monotonic() + after_s

    def left_s(self) -> float:
        """Returns the seconds that are left. Raises TimeoutError if none are."""
        left_s = self._end_s - self._clock.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return left_s

    def connect(self, address: tuple[str, int], *_more: Any) -> socket.socket:
        """Connects to the first address of the host that answers. Raises OSError."""
        failure = OSError("the host has no address")
        for *_, found in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            try:
                connected = socket.create_connection((str(found[0]), address[1]), self.left_s())
                connected.settimeout(self.left_s())  # of the TLS handshake
            except OSError as error:
                failure = error
            else:
                return connected
        raise failure


class _BoundedReader(io.RawIOBase):
    """Reads from a socket until the deadline."""

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline = sock, deadline
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open, as HTTPResponse expects

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left_s())
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _BoundedResponse(HTTPResponse):
    def __init__(self, deadline: _Deadline, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_BoundedReader(sock, deadline))


class _BoundedConnection(HTTPConnection):
    """A connection whose time-out bounds its whole life, and not each operation of the socket."""

    def __init__(self, clock: Clock, host: str, *, timeout: float, **more: Any) -> None:
        super().__init__(host, timeout=timeout, **more)
        self._deadline = _Deadline(clock, timeout)
        self._create_connection = self._deadline.connect
        self.response_class = partial(_BoundedResponse, self._deadline)  # type: ignore[assignment]

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(self._deadline.left_s())  # of sending the request


class _BoundedTlsConnection(_BoundedConnection, HTTPSConnection):
    pass


class _BoundedHandler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def __init__(self, clock: Clock, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._clock, self._tls = clock, context

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_BoundedConnection, self._clock), request)

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(_BoundedTlsConnection, self._clock), request, context=self._tls)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class JsonClient:
    """Sends HTTP requests, and returns the JSON documents in the answers. `tls.ca`: the file of trusted certificate
    authorities; empty: those of the system. `require_https` False: http:// to this machine is allowed too. The
    constructor raises InvalidConfiguration if a file of `tls` cannot be used."""

    def __init__(self, clock: Clock, tls: TlsFiles | None = None, *, require_https: bool = True) -> None:
        self._require_https = require_https
        tls = tls or TlsFiles()
        try:
            context = ssl.create_default_context(cafile=tls.ca or None)
            if tls.certificate:
                context.load_cert_chain(tls.certificate, tls.key or None)
        except OSError as error:
            files = f"{tls.ca} {tls.certificate} {tls.key}".strip()
            raise InvalidConfiguration(f"{files} cannot be read as certificates and key in PEM") from error
        self._opener = urllib.request.build_opener(_NoRedirect, _BoundedHandler(clock, context))

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

        Raises Unavailable if the URL is not allowed (`is_url_allowed`), if the whole answer has not arrived within
        REQUEST_TIMEOUT_S, or if it is not a JSON object of at most ANSWER_BYTES_MAX. For an HTTP error, the field
        `status` of the exception is the HTTP status."""
        if not self.is_url_allowed(url):
            raise Unavailable(f"{url} is not asked: its address does not begin with https://")
        data = None if form is None else urlencode(form).encode()
        request = urllib.request.Request(url, data, {"Accept": "application/json"})
        try:
            with self._opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
                found = json.loads(self._body(answer, url))
        except urllib.error.HTTPError as error:
            raise Unavailable(f"{url} answers with status {error.code}", status=error.code) from None
        except TimeoutError:
            raise Unavailable(f"{url} does not answer within {REQUEST_TIMEOUT_S:.0f} s") from None
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{url} does not answer: {type(error).__name__}") from error
        except (ValueError, RecursionError):
            raise Unavailable(f"{url} does not answer with JSON") from None
        if not isinstance(found, dict):
            raise Unavailable(f"{url} does not answer with an object of JSON")
        return found

    def _body(self, answer: Any, url: str) -> bytes:
        body = b""
        while chunk := answer.read1(_CHUNK):
            body += chunk
            if len(body) > ANSWER_BYTES_MAX:
                raise Unavailable(f"{url} answers with more than {ANSWER_BYTES_MAX} bytes")
        return body


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
