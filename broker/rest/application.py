"""The ASGI application of the REST API: routing, authentication, limits of a request, and errors as responses.

Order: the route is found; the caller is authenticated, by the header `Authorization` or the certificate of the
connection; the body is read, at most BODY_BYTES_MAX bytes, which count in the memory for all callers; the handler runs.
A request for a topic of another broker is answered with status 307 and the address of that broker. A request that would
change data is refused if a page of another site made the browser send it. page/application.py answers requests below
/ui.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from ...proto.errors import BackPressure, MagnetarError, NotOwner, Unauthenticated
from ...proto.names import TopicName
from ...runtime.access import AUTHORIZATION_MAX, Caller, CallerLimits, Guard
from ...runtime.grpc.limits import CallerAuthenticator
from ...runtime.metrics import FillMetricsPage
from ...runtime.network import CallContext
from ..grpc.checked import AuthorizedService
from ..node.topic_manager import TopicManager
from .call import REST_ROUTES, HttpError, JsonResponse, RestRequest, RestRoute, make_error_response, make_response
from .stats import RateMeters

# Importing these registers their routes, the more special paths first.
# isort: off
from . import cluster_routes, namespaces_routes, policies, transactions_routes
from . import subscriptions_routes, topics_routes
# isort: on

BODY_BYTES_MAX = 1 << 20
QUERY_BYTES_MAX = 16 << 10
AUTHENTICATIONS_AT_ONCE = CallerLimits().authentications
"""Most authentications at a time."""

_ABSOLUTE = re.compile(r"https?://[^/]+", re.IGNORECASE)

ROUTE_MODULES = (
    cluster_routes, topics_routes, namespaces_routes, policies, namespaces_routes, transactions_routes,
    transactions_routes, subscriptions_routes, topics_routes,
)  # fmt: skip
"""The modules that have the handlers."""


class _Domain(Convertor[str]):
    regex = "persistent|non-persistent"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("domain", _Domain())


class Application:
    """The ASGI application that answers the requests of a broker's HTTP listener. `guard`: authenticates callers, None
    if the listener needs no credentials; `measure`: a function that returns the function which writes the metrics
    page."""

    def __init__(
        self,
        broker: TopicManager,
        services: Mapping[str, AuthorizedService],
        guard: Guard | None,
        measure: Callable[[], FillMetricsPage],
    ) -> None:
        self._broker = broker
        self._services = services
        self._measure = measure
        self._meters = RateMeters(broker.world.clock)
        self._callers = CallerAuthenticator(guard, broker.world.clock)
        self._authenticating = 0
        self._app = Starlette(routes=list(self._routes()), exception_handlers={HTTPException: _refused})
        self._app.router.redirect_slashes = False
        self._page: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one request, and sends its response. Routes are matched with the encoded path; its segments are
        decoded afterwards. If the request target is in absolute form (RFC 9112 §3.2.2, as sent to a proxy), only its
        path counts. An error of a handler is answered as a response."""
        path = scope["raw_path"].decode("ascii")
        if absolute := _ABSOLUTE.match(path):
            path = path[absolute.end() :]
        scope["path"] = path = path.rstrip("/") or "/"
        await (await self._load_page() if path == "/ui" or path.startswith("/ui/") else self._app)(scope, receive, send)

    async def _load_page(self) -> Any:
        """Returns the application of the page, which is imported at the first request for it."""
        if self._page is None:
            await self._broker.world.workers.load(f"{__package__}.page.application")
            from .page.application import PageApplication

            self._page = self._page or PageApplication(self._admit, self._make_call, self._broker)
        return self._page

    def _routes(self) -> Iterable[Mount | Route]:
        """Yields one Route for each path, in the order of the table; those with the same first segments under one
        Mount."""
        by_path: dict[str, dict[str, RestRoute]] = {}
        for row in REST_ROUTES:
            by_path.setdefault(row.path, {})[row.method] = row
        groups: dict[str, list[Route]] = {}
        for path, rows in by_path.items():
            parts = path.split("/")
            head = "/".join(parts[:4]) if path.startswith("/admin/") and len(parts) > 4 else ""
            groups.setdefault(head, []).append(Route(path[len(head) :], self._endpoint(rows), methods=list(rows)))
        for head, found in groups.items():
            yield from [Mount(head, routes=found)] if head else found

    def _endpoint(self, rows: dict[str, RestRoute]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            row = rows["GET" if request.method == "HEAD" else request.method]
            try:
                return await self._answer(row, request)
            except ClientDisconnect:
                return make_response(408, "the request did not come to its end")
            except NotOwner as error:
                return await self._elsewhere(request, error)
            except Exception as error:
                return make_error_response(error, row.busy)

        return endpoint

    async def _answer(self, row: RestRoute, request: Request) -> Response:
        _check_site(request)
        context = CallContext(request.state.caller.peer)
        if not row.is_open:
            context = await self._admit(request, f"http.Http/{row.handler.__name__}")
        if len(request.scope["query_string"]) > QUERY_BYTES_MAX:
            raise HttpError(f"the query is longer than {QUERY_BYTES_MAX} bytes", 414)
        memory = self._broker.memory.requests
        await memory.wait_room()
        body = await _body(request)
        memory.held += len(body)
        try:
            found = await row.handler(self._make_call(request, context, request.path_params, body))
        finally:
            memory.held -= len(body)
        if isinstance(found, Response):
            return found
        return Response(status_code=204) if found is None else JsonResponse(found)

    def _make_call(self, request: Request, context: CallContext, names: Mapping[str, str], body: bytes) -> RestRequest:
        """Returns the request as a handler sees it; `names` are encoded. Raises HttpError."""
        return RestRequest(
            self._broker, self._services, context, {name: _decoded(value) for name, value in names.items()},
            request.query_params, request.headers, body, self._measure(), self._meters,
        )  # fmt: skip

    async def _admit(self, request: Request, path: str, login: str = "") -> CallContext:
        """Authenticates the caller and returns its context. `path` is what the audit log names; `login` counts as
        its header `Authorization`, if there is none. Raises Unauthenticated and other authentication errors,
        BackPressure if too many callers are being authenticated."""
        caller: Caller = request.state.caller
        if not self._callers.requires_authentication:
            request.state.admitted()
            return CallContext(caller.peer)
        values = request.headers.getlist("authorization") or ([login] if login else [])
        if len(values) > 1 or any(len(each) > AUTHORIZATION_MAX for each in values):
            refusal = Unauthenticated(f"a request has one header `Authorization` of at most {AUTHORIZATION_MAX} bytes")
            self._callers.record_refusal(caller, path, refusal)
            raise refusal
        if values:
            caller = replace(caller, authorization=values[0])
        if self._authenticating >= AUTHENTICATIONS_AT_ONCE:
            raise BackPressure(f"{AUTHENTICATIONS_AT_ONCE} callers are being authenticated: try again")
        self._authenticating += 1
        try:
            principal = await self._callers.admit(caller, path)
        finally:
            self._authenticating -= 1
        request.state.admitted()
        return CallContext(caller.peer, principal)

    async def _elsewhere(self, request: Request, error: NotOwner) -> Response:
        """Returns a redirect (307) to the owner of the topic, or status 503 if the owner serves no HTTP."""
        names = {"domain": "persistent"}
        names |= {name: _decoded(value) for name, value in request.path_params.items()}
        try:
            topic = TopicName.parse("{domain}://{tenant}/{namespace}/{topic}".format(**names))
            owner = await self._broker.find_owner(topic)
        except (MagnetarError, KeyError):
            return make_error_response(error)
        if not owner.http or owner.name == self._broker.name:
            return make_error_response(error)
        query = request.scope["query_string"].decode("latin-1")
        where = owner.http + request.scope["path"] + (f"?{query}" if query else "")
        return make_response(307, f"topic {topic} is served by {owner.http}", {"Location": where})


async def _body(request: Request) -> bytes:
    """Reads and returns the body. Raises HttpError (413) if the body is too long, ClientDisconnect if the client
    closes the connection."""
    too_long = HttpError(f"a body has at most {BODY_BYTES_MAX} bytes", 413)
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > BODY_BYTES_MAX:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise too_long
    return bytes(body)


def _decoded(segment: str) -> str:
    """Decodes a segment of the path. Raises HttpError (412) if the segment is not UTF-8, is "." or "..", or contains a
    NUL."""
    try:
        found = unquote(segment, errors="strict")
    except UnicodeDecodeError:
        raise HttpError("a name in the path is not UTF-8", 412) from None
    if found in (".", "..") or "\x00" in found:
        raise HttpError("a name in the path is not allowed", 412)
    return found


def _check_site(request: Request) -> None:
    """Raises HttpError (403) if a page of another site made the browser send a request that changes data."""
    origin = request.headers.get("origin")
    if origin and request.method not in ("GET", "HEAD") and urlsplit(origin).netloc != request.headers.get("host"):
        raise HttpError("a page of another site may change nothing here", 403)


async def _refused(_: Request, error: Exception) -> Response:
    """Answers a request that matches no route (404), or whose method the route does not support (405)."""
    assert isinstance(error, HTTPException)
    texts = {404: "there is no such resource; GET /openapi.json lists them", 405: "not with this method"}
    return make_response(error.status_code, texts.get(error.status_code, error.detail), dict(error.headers or {}))
