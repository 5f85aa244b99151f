"""The page at /ui: HTML that the server makes, on the HTTP port.

    GET  /ui/…                  a view (topic_views.py) in its template; `?format=json`: the value of the view
    GET  /ui/…?live=1           the same as a stream of events: the part that changes, each time it has changed
    POST /ui/topics/…           changes the backlog of a subscription, or publishes a message again, after a preview
    POST /ui/login, /ui/logout  credentials as over REST; a cookie refers to them, and each request checks them
    GET  /ui/static/…           the style sheet, and one small script that keeps the shown view current

Order: the security checks; the caller is authenticated; the view runs; its template is rendered. The page works without
its script. This module and jinja2 are imported at the first request for the page, so that an unused page takes no
memory.

Bounds: LIVE_STREAMS_MAX streams, each of which renders its view every LIVE_REFRESH_S seconds; a view may take
VIEW_TIMEOUT_S seconds. Guarding tests: tests/broker/rest/test_page.py.

A user can change two things on the page, each after a preview: the backlog of one subscription of a topic, and a topic,
by publishing one of its messages or dead letters again (messages.py).

    action = parse_page_action(form)                     returns the change that the form requests
    sentence = await preview_page_action(call, action)   returns "This would …", and changes nothing
    await run_page_action(call, action)                  calls the operation as the caller: authorized and audited

Guarding test: test_a_backlog_is_changed_only_after_a_preview (tests/broker/rest/test_page.py).

The security checks of the page, before a view runs:

    check_host(host, advertised)              against DNS rebinding, for callers without credentials
    check_origin(headers)                     a change must come from a page of this server
    FormTokens().check_token(cookie, token)   … and from a form that this process made for this browser
    BrowserSessions(clock).find(cookie)       returns the credentials of a caller who has logged in

Names, properties and payloads come from clients, and may be hostile: templates escape them, and `SECURITY_HEADERS` lets
the browser run and load only files of this server. The page has no rights of its own: each operation is called as the
caller, as over REST. Guarding tests: tests/broker/rest/test_page.py. """

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, urlsplit

import jinja2
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from ....proto import operations as op
from ....proto.errors import MagnetarError, Unauthenticated
from ....proto.names import parse_number
from ....proto.versions import PRODUCT
from ....runtime.access import PrincipalKind
from ....runtime.clock import Clock
from ....runtime.network import CallContext
from ...access.authorizer import may_call_every_operation
from ...node.topic_manager import TopicManager
from ..call import HttpError, RestRequest, make_error_response
from .messages import ResendResult, parse_form_time, plan_resend, resend_message, view_messages
from .topic_views import (
    LANDING_VIEW,
    PAGE_VIEWS,
    SUBSCRIPTION_VIEW,
    TEMPLATE_FILTERS,
    PageView,
    find_view,
    moment,
    number,
)

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with no-referrer browsers send `Origin: null` with our own forms
    "Cache-Control": "no-store",
}
BROWSER_SESSION_S = 12 * 3600
SESSIONS_MAX = 1_000
"""Logins at a time; the one that was used least recently ends for a further one. A login takes up to 16 KiB."""
COOKIE_CHARACTERS_MAX = 128
"""Characters of a cookie of ours, at most."""


def check_host(host: str, advertised: str) -> None:
    """Raises HttpError (421) unless the HTTP header `Host` is an IP address, localhost or the advertised host of this
    broker. So a web page of another site cannot read this page by pointing its own host name at this machine (DNS
    rebinding). `advertised`: that host, "" if there is none."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if name and name in ("localhost", advertised.lower()):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise HttpError("open the page by its address, or by the name that the server advertises", 421) from None


def check_origin(headers: Mapping[str, str]) -> None:
    """Raises HttpError (403) if the request for a change was made by a page of another site. Requests by pages of this
    server, or by the user directly, are accepted."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin", "none"):
        raise HttpError("a page of another site may change nothing here", 403)
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        raise HttpError("a page of another site may change nothing here", 403)


class FormTokens:
    """Makes and checks the tokens in HTML forms, which prevent that another site posts a form (CSRF). A token is valid
    for one browser, identified by its cookie, until this process ends."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def make_token(self, cookie: str) -> str:
        """Returns the token for the forms of the browser that has this cookie."""
        return hmac.new(self._secret, cookie.encode(), hashlib.sha256).hexdigest()

    def check_token(self, cookie: str, token: str) -> None:
        """Raises HttpError (403) if the token of a form was not made for this browser by this process."""
        if not cookie or not hmac.compare_digest(self.make_token(cookie).encode(), token.encode()):
            raise HttpError("this form is of another session: load the page again, and send it once more", 403)


class BrowserSession(NamedTuple):
    """A login of a browser. `authorization`: its credentials, which are checked again at each request. `end_s`: when
    the login ends (monotonic seconds)."""

    authorization: str
    end_s: float


class BrowserSessions:
    """The logins of all browsers at this process, by their cookies: at most SESSIONS_MAX, each for BROWSER_SESSION_S
    seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sessions = OrderedDict[str, BrowserSession]()

    def add(self, authorization: str) -> str:
        """Creates a login with these credentials, and returns its cookie. If there are too many logins, ends the one
        that was used least recently."""
        cookie = make_cookie()
        self._sessions[cookie] = BrowserSession(authorization, self._clock.monotonic() + BROWSER_SESSION_S)
        while len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return cookie

    def find(self, cookie: str) -> str:
        """Returns the credentials of the login that has this cookie; "" if there is no such login, or it has ended."""
        session = self._sessions.get(cookie)
        if session is None:
            return ""
        if session.end_s <= self._clock.monotonic():
            self.discard(cookie)
            return ""
        self._sessions.move_to_end(cookie)
        return session.authorization

    def discard(self, cookie: str) -> None:
        """Ends the login that has this cookie, if there is one."""
        self._sessions.pop(cookie, None)


def make_cookie() -> str:
    """Returns a new random value for a session cookie."""
    return secrets.token_urlsafe(24)


SUBSCRIPTION_ACTIONS = ("skip", "expire", "reset")
AGE_SECONDS_MAX = 100 * 365 * 86_400


class PageAction(NamedTuple):
    """A change of a subscription's backlog that the user requested on the page. `act`: "skip" (the whole backlog),
    "expire" (messages older than `value` seconds), or "reset" (to the time `value`, in ms since the epoch)."""

    act: str
    value: int


def parse_page_action(form: Mapping[str, str]) -> PageAction:
    """Returns the change of a backlog that a form requests. Raises HttpError if a field of the form is missing or
    invalid."""
    act, text = form.get("act", ""), form.get(form.get("act", ""), "").strip()
    if act == "skip":
        return PageAction(act, 0)
    if act == "expire":
        age_s = parse_number(text)
        if age_s is None or not 1 <= age_s <= AGE_SECONDS_MAX:
            raise HttpError("the age is a number of seconds, 1 or more")
        return PageAction(act, age_s)
    if act == "reset":
        return PageAction(act, parse_form_time(text))
    raise HttpError(f"an action is one of {', '.join(SUBSCRIPTION_ACTIONS)}")


async def preview_page_action(call: RestRequest, action: PageAction) -> str:
    """Returns a text that tells the user what `run_page_action` would do with this action. Changes nothing. Raises the
    errors of `RestRequest.authorize`, and of the operation that analyzes the backlog."""
    topic, name = call.topic, call.names["subscription"]
    await call.authorize(op.ANALYZE_BACKLOG, topic=topic.full, name=name)
    found = await call.call_topic_owner(op.ANALYZE_BACKLOG, topic, name=name)
    left = f"{'' if found.complete else 'at least '}{number(found.messages - found.acknowledged)}"
    if action.act == "skip":
        return f"This would acknowledge all {left} messages of the backlog: they are not delivered any more."
    if action.act == "expire":
        older = f"older than {action.value} s"
        return f"This would acknowledge those of the {left} messages of the backlog that are {older}."
    return (
        f"This would move the subscription to the first message of {moment(action.value)} or later: messages after it "
        "are delivered again, also acknowledged ones; those before it are not delivered any more."
    )


async def run_page_action(call: RestRequest, action: PageAction) -> None:
    """Changes the backlog of the subscription in the path of the request, as the action requests. Raises the errors of
    `RestRequest.authorize` and of the operation."""
    topic, name = call.topic, call.names["subscription"]
    if action.act == "skip":
        await call.authorize(op.SKIP_MESSAGES, topic=topic.full, name=name)
        await call.call_topic_owner(op.SKIP_MESSAGES, topic, name=name, messages=-1)
    elif action.act == "expire":
        await call.authorize(op.EXPIRE_MESSAGES, topic=topic.full, name=name)
        await call.call_topic_owner(op.EXPIRE_MESSAGES, topic, name=name, older_than_s=action.value)
    else:
        await call.authorize(op.RESET_SUBSCRIPTION, topic=topic.full, name=name)
        await call.call_topic_owner(op.RESET_SUBSCRIPTION, topic, name=name, publish_time_ms=action.value)


PAGE_ROOT_PATH = "/ui"
LIVE_REFRESH_S = 2.0
KEEP_ALIVE_COMMENT_TURNS = 7
"""After so many turns without a change a stream sends a comment, so that what is between does not end it."""
LIVE_STREAMS_MAX = 50
VIEW_TIMEOUT_S = 30.0
RESENT_MESSAGES_MAX = 1000
"""Messages that were published again, of which the page remembers that they were."""
FORM_BYTES_MAX = 64 << 10

AdmitRequest = Callable[[Request, str, str], Awaitable[CallContext]]
"""Authenticates the caller of a request, for a path of the audit log; the text is the `Authorization` of a login."""
MakeRestRequest = Callable[[Request, CallContext, dict[str, str], bytes], RestRequest]

_WHO = "magnetar.page.who"
"""The key in a request's scope of who the caller is, for the page that says why something is not shown."""
_FOLDER = Path(__file__).parent
_STATIC = {
    "page.css": ("text/css", (_FOLDER / "static" / "page.css").read_bytes()),
    "page.js": ("text/javascript", (_FOLDER / "static" / "page.js").read_bytes()),
}
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(_FOLDER / "templates"), autoescape=True, undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True, auto_reload=False,
)  # fmt: skip
_TEMPLATES.filters.update(TEMPLATE_FILTERS)
for _name in _TEMPLATES.list_templates():
    _TEMPLATES.get_template(_name)  # read and compiled with this module, in its thread


class PageApplication:
    """The ASGI application of the HTML page at /ui. `admit`: authenticates the caller of a request; `make_call`: makes
    the RestRequest that a view gets."""

    def __init__(self, admit: AdmitRequest, make_call: MakeRestRequest, broker: TopicManager) -> None:
        self._admit = admit
        self._make_call = make_call
        self._broker = broker
        self._clock = broker.world.clock
        self._tokens = FormTokens()
        self._sessions = BrowserSessions(self._clock)
        self._streams = 0
        self._resent = OrderedDict[str, ResendResult | None]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Unauthenticated as error:
            response = self._ask_login(request, error)
        except Exception as error:
            response = self._refused(request, error)
        response.headers.update(SECURITY_HEADERS)
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(PAGE_ROOT_PATH)
        if request.method not in ("GET", "HEAD", "POST"):
            raise HttpError("the page is read by GET, and changed by POST", 405)
        if request.method == "POST":
            return await self._post(request, path)
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        if path == "/login":
            return self._render(request, "login.html", title="Log in", reason="", who="")
        view, names = find_view(path)
        context = await self._caller(request, f"{view.template.removesuffix('.html')}")
        if view is PAGE_VIEWS[""] and (
            "topic" in request.query_params or not may_call_every_operation(context.principal)
        ):
            view = LANDING_VIEW
        call = self._make_call(request, context, _topic_names(names), b"")
        if request.query_params.get("live") and view.live and request.method == "GET":
            return self._live(request, view, _topic_names(names))
        async with asyncio.timeout(VIEW_TIMEOUT_S):
            value = await view.run(call)
        if isinstance(value, Response):
            return value
        if request.query_params.get("format") == "json":
            return Response(msgspec.json.encode(value), media_type="application/json")
        return self._render(request, view.template, **_values(request, view, value, context))

    async def _caller(self, request: Request, act: str) -> CallContext:
        """Returns the caller of a view. Raises Unauthenticated; HttpError if it brought no credentials, and the server
        is called by a name that it does not know."""
        context = await self._admit(request, f"http.Page/{act}", self._sessions.find(_cookie(request)))
        if context.principal.kind in (PrincipalKind.LOCAL, PrincipalKind.ANONYMOUS):
            check_host(request.headers.get("host", ""), self._advertised_host())
        request.scope[_WHO] = context.principal.name
        return context

    def _advertised_host(self) -> str:
        advertised = self._broker.config.advertised
        return advertised.host if advertised is not None else ""

    # ------------------------------------------------------------------------------------------------- changes
    async def _post(self, request: Request, path: str) -> Response:
        check_origin(request.headers)
        form = await _read_form(request)
        self._tokens.check_token(_cookie(request), form.get("form", ""))
        if path == "/login":
            return await self._login(request, form)
        if path == "/logout":
            self._sessions.discard(_cookie(request))
            return RedirectResponse(f"{PAGE_ROOT_PATH}/login", 303)
        view, names = find_view(path)
        if view is not SUBSCRIPTION_VIEW and view.run is not view_messages:
            raise HttpError("the page has no such form", 404)
        context = await self._caller(request, view.template.removesuffix(".html"))
        call = self._make_call(request, context, _topic_names(names), b"")
        if view is not SUBSCRIPTION_VIEW:
            return await self._resend(request, call, form, context)
        action = parse_page_action(form)
        async with asyncio.timeout(VIEW_TIMEOUT_S):
            if form.get("confirm") == "1":
                await run_page_action(call, action)
                return RedirectResponse(request.scope["path"], 303)
            preview = await preview_page_action(call, action)
            value = await view.run(call)
        shown = {"preview": preview, "action": action, "given": form.get(action.act, ""), "live": False}
        return self._render(request, view.template, **{**_values(request, view, value, context), **shown})

    async def _resend(
        self, request: Request, call: RestRequest, form: dict[str, str], context: CallContext
    ) -> Response:
        """Previews to publish a message again, or does it: once for each preview, however often its form is sent."""
        act, id_, once = form.get("act", ""), form.get("id", "").strip(), form.get("once", "")
        confirmed = form.get("confirm") == "1" and re.fullmatch(r"[0-9a-f]{32}", once) is not None
        seen = f"{request.scope['path']}?id={quote(id_, safe=':')}&resent={once}"
        if confirmed and once in self._resent:
            return RedirectResponse(seen, 303)
        async with asyncio.timeout(VIEW_TIMEOUT_S):
            plan = await plan_resend(call, act, id_, once if confirmed else secrets.token_hex(16))
        if not confirmed:
            return self._render(request, "resend.html", title="Publish again", who=context.principal.name, plan=plan)
        if once in self._resent:  # the same form was sent while this one was looked at
            return RedirectResponse(seen, 303)
        self._resent[once] = None  # before it is published: a form that is sent twice publishes once
        while len(self._resent) > RESENT_MESSAGES_MAX:
            self._resent.popitem(last=False)
        self._resent[once] = await resend_message(call, plan)  # after an error it may have been published
        return RedirectResponse(seen, 303)

    async def _login(self, request: Request, form: dict[str, str]) -> Response:
        if token := form.get("token", "").strip():
            authorization = f"Bearer {token}"
        else:
            pair = f"{form.get('user', '')}:{form.get('password', '')}".encode()
            authorization = f"Basic {base64.b64encode(pair).decode()}"
        try:
            await self._admit(request, "http.Page/login", authorization)
        except MagnetarError as error:
            refused = self._render(request, "login.html", title="Log in", reason=error.message, who="")
            refused.status_code = 401
            return refused
        response = RedirectResponse(_local(form.get("next", "")), 303)
        _set_cookie(request, response, self._sessions.add(authorization))
        return response

    # ---------------------------------------------------------------------------------------------------- live
    def _live(self, request: Request, view: PageView, names: dict[str, str]) -> Response:
        if self._streams >= LIVE_STREAMS_MAX:
            raise HttpError(f"{LIVE_STREAMS_MAX} pages are live already: this one is as of its loading", 503)
        return StreamingResponse(
            self._events(request, view, names), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"}
        )

    async def _events(self, request: Request, view: PageView, names: dict[str, str]) -> AsyncIterator[bytes]:
        """Yields the events of a live view, until the browser leaves, the server ends, or the view fails. Each turn is
        for who the caller is then: its login may have ended."""
        ended: asyncio.Event = request.state.ended
        if self._streams >= LIVE_STREAMS_MAX:  # of those that were asked for in the same moment
            return  # the browser asks again, and is told why
        shown, quiet = b"", 0
        self._streams += 1
        try:
            yield b"retry: 3000\n\n"
            while not ended.is_set():
                call = self._make_call(request, await self._caller(request, "live"), names, b"")
                async with asyncio.timeout(VIEW_TIMEOUT_S):
                    value = await view.run(call)
                text = self._fragment(view, value)
                version = hashlib.sha256(text.encode()).digest()
                if version != shown:
                    shown, quiet = version, 0
                    yield f"data: {json.dumps({'id': 'live', 'html': text})}\n\n".encode()
                elif (quiet := quiet + 1) % KEEP_ALIVE_COMMENT_TURNS == 0:
                    yield b": nothing has changed\n\n"
                try:
                    async with asyncio.timeout(LIVE_REFRESH_S):
                        await ended.wait()
                except TimeoutError:
                    continue
        except (MagnetarError, HTTPException, TimeoutError):
            return  # the browser asks again, and is told why
        finally:
            self._streams -= 1

    def _fragment(self, view: PageView, value: object) -> str:
        template = _TEMPLATES.get_template(view.template)
        return "".join(template.blocks["live"](template.new_context({"view": value, "now_ms": self._clock.wall_ms()})))

    # ------------------------------------------------------------------------------------------------- answers
    def _render(self, request: Request, template: str, **values: Any) -> Response:
        cookie = _cookie(request) or make_cookie()
        shared = {
            "form": self._tokens.make_token(cookie), "product": PRODUCT, "views": PAGE_VIEWS, "root": PAGE_ROOT_PATH,
            "live": False,
            "next": request.query_params.get("next", ""), "path": None, "preview": "", "now_ms": self._clock.wall_ms(),
            "resent": self._resent.get(request.query_params.get("resent", "")),
        }  # fmt: skip
        response = HTMLResponse(_TEMPLATES.get_template(template).render(**{**shared, **values}))
        if not _cookie(request):
            _set_cookie(request, response, cookie)
        return response

    def _ask_login(self, request: Request, error: Unauthenticated) -> Response:
        if _wants_html(request):
            where = request.scope["path"] + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"{PAGE_ROOT_PATH}/login?next={quote(where, safe='')}", 303)
        return make_error_response(error)

    def _refused(self, request: Request, error: Exception) -> Response:
        if isinstance(error, TimeoutError):
            error = HttpError(f"the view was not ready within {VIEW_TIMEOUT_S:g} s", 504)
        found = make_error_response(error)
        if not _wants_html(request):
            return found
        reason = json.loads(bytes(found.body))["reason"]
        shown = {"who": request.scope.get(_WHO, ""), "refused": found.status_code == 403}
        response = self._render(request, "error.html", title="Not shown", reason=reason, **shown)
        response.status_code = found.status_code
        return response


def _values(request: Request, view: PageView, value: object, context: CallContext) -> dict[str, Any]:
    path = request.scope["path"].removeprefix(PAGE_ROOT_PATH).strip("/")
    return {
        "view": value,
        "title": view.title,
        "path": path.split("/")[0],
        "live": view.live,
        "who": context.principal.name,
    }


def _wants_html(request: Request) -> bool:
    asked = request.query_params
    return not asked.get("live") and asked.get("format") != "json"


def _static(name: str) -> Response:
    if name not in _STATIC:
        raise HttpError("the page has no such file", 404)
    kind, content = _STATIC[name]
    return Response(content, media_type=kind)


def _topic_names(segments: list[str]) -> dict[str, str]:
    return dict(zip(("domain", "tenant", "namespace", "topic", "subscription"), segments, strict=False))


def _cookie_name(request: Request) -> str:
    """Returns the name of our cookie. Ports of a host share their cookies, so the name has the port."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"magnetar_page_{parse_number(port) or 0}"


def _cookie(request: Request) -> str:
    found = request.cookies.get(_cookie_name(request), "")
    return found if len(found) <= COOKIE_CHARACTERS_MAX else ""


def _set_cookie(request: Request, response: Response, cookie: str) -> None:
    response.set_cookie(
        _cookie_name(request), cookie, max_age=BROWSER_SESSION_S, path=PAGE_ROOT_PATH, httponly=True, samesite="strict",
        secure=request.state.caller.is_encrypted,
    )  # fmt: skip


def _local(target: str) -> str:
    """Returns where to go after a login: a view of ours, whatever the form says."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc or not parts.path.startswith(f"{PAGE_ROOT_PATH}/") or "\\" in target:
        return f"{PAGE_ROOT_PATH}/"
    return target


async def _read_form(request: Request) -> dict[str, str]:
    """Returns the fields of a form. Raises HttpError if it is too long (413), or no form (415)."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise HttpError("a form is application/x-www-form-urlencoded", 415)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > FORM_BYTES_MAX:
            raise HttpError(f"a form has at most {FORM_BYTES_MAX} bytes", 413)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, strict_parsing=False, max_num_fields=50)
    except ValueError as error:
        raise HttpError("the form cannot be read") from error
    return {name: values[-1] for name, values in fields.items()}
