"""An issuer of OpenID Connect on loopback: discovery, keys, and tokens for client credentials."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

AUDIENCE = "magnetar"


class Issuer:
    """`asked`: the paths of all requests. `answers`: what a path answers in place of its own, as bytes or a status."""

    def __init__(self) -> None:
        self.keys: dict[str, ec.EllipticCurvePrivateKey] = {}
        self.asked: list[str] = []
        self.forms: list[dict[str, str]] = []
        self.answers: dict[str, bytes | int] = {}
        self.slow_s = 0.0
        self.go = threading.Event()  # while it is clear, no request is answered
        self.go.set()
        self.lifetime_s: float | None = 60.0
        self.more: dict[str, Any] = {}  # members of each key
        self.add_key("one")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()

    def wrap(self, tls: ssl.SSLContext) -> None:
        """It speaks TLS from now on."""
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)

    def add_key(self, kid: str) -> None:
        self.keys[kid] = ec.generate_private_key(ec.SECP256R1())

    def token(
        self, role: str, kid: str = "one", now_s: float | None = None, *, header: Any = None, **claims: Any
    ) -> str:
        now = int(time.time() if now_s is None else now_s)
        said = {"iss": self.url, "sub": role, "aud": AUDIENCE, "iat": now, "exp": now + 60, **claims}
        said = {name: value for name, value in said.items() if value is not None}
        return jwt.encode(said, self.keys[kid], algorithm="ES256", headers={"kid": kid, **(header or {})})

    def answer(self, path: str, form: dict[str, str]) -> bytes | int:
        self.asked.append(path)
        self.go.wait(60)
        if self.slow_s:
            time.sleep(self.slow_s)
        if path in self.answers:
            return self.answers[path]
        match path:
            case "/.well-known/openid-configuration":
                found: Any = {
                    "issuer": self.url, "jwks_uri": self.url + "/keys", "token_endpoint": self.url + "/token"
                }  # fmt: skip
            case "/keys" | "/moved":
                public = [(kid, ECAlgorithm.to_jwk(key.public_key(), as_dict=True)) for kid, key in self.keys.items()]
                found = {"keys": [{**key, "kid": kid, **self.more} for kid, key in public]}
            case "/token":
                self.forms.append(form)
                if form.get("client_secret") != "s3cret":
                    return 401
                lifetime_s = self.lifetime_s
                end = {"expires_in": lifetime_s} if lifetime_s is not None else {}
                token = self.token(
                    form["client_id"], exp=int(time.time() + (lifetime_s or 60)), jti=str(len(self.forms))
                )
                found = {"access_token": token, "token_type": "Bearer", **end}
            case _:
                return 404
        return json.dumps(found).encode()


def _handler(issuer: Issuer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            form = {name: values[0] for name, values in parse_qs(self.rfile.read(length).decode()).items()}
            found = issuer.answer(self.path, form)
            self.send_response(found if isinstance(found, int) else 200)
            if isinstance(found, int) and 300 <= found < 400:
                self.send_header("Location", issuer.url + "/moved")
            self.end_headers()
            if isinstance(found, bytes):
                self.wfile.write(found)

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Not on stderr."""

    return Handler


@contextmanager
def issuing() -> Iterator[Issuer]:
    issuer = Issuer()
    try:
        yield issuer
    finally:
        issuer.close()
