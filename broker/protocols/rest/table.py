"""The table of routes: each handler is registered with its method, its path and a sentence.

    @route("GET", "/admin/v2/tenants", "The tenants that the caller may see.", answer="[name]")
    async def tenants(call: Call) -> object: …

A handler returns a value for JSON (200), None (204), or a Response. `{topic}` and other names in braces are one segment
each, percent-decoded after the path is split: a name may have an encoded slash. TOPIC is both kinds of topics.
The document of OpenAPI (openapi.py) and the table of docs/rest.md are made from these rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from .call import Call

Handler = Callable[["Call"], Awaitable[object]]
H = TypeVar("H", bound=Handler)

NAMESPACE = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPIC = "/admin/v2/{domain:domain}/{tenant}/{namespace}/{topic}"
SUBSCRIPTION = TOPIC + "/subscription/{subscription}"


class Row(NamedTuple):
    """A route: its method and path, its handler, and its texts for /openapi.json."""

    method: str
    path: str
    summary: str
    handler: Handler
    body: str = ""  # what it takes; empty: nothing
    answer: str = ""  # what it answers with 200; empty: 204
    busy: int = 409  # the status of what is in use
    is_open: bool = False  # without credentials


ROUTES: list[Row] = []


def route(
    method: str, path: str, summary: str, *, body: str = "", answer: str = "", busy: int = 409, is_open: bool = False
) -> Callable[[H], H]:
    def register(handler: H) -> H:
        ROUTES.append(Row(method, path, summary, handler, body, answer, busy, is_open))
        return handler

    return register
