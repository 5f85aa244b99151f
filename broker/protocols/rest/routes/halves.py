"""Half messages: what `magnetar transactions halves` does. Pulsar has none; the paths are in the way of its v3.

Any broker answers: it asks the one that has the coordinator. The forms: proto/pulsar_json.py.
"""

from __future__ import annotations

from typing import Any

from .....proto import operations as op
from .....proto.errors import NotFound
from .....proto.pulsar_json import half_form
from ..call import Call
from ..table import route
from .transactions import BASE, ID, LIST_DEFAULT, numbers, txn_of

HALVES = BASE + "/halves"


@route("GET", HALVES, "Half messages that are not decided, the oldest first; `coordinatorId`, `group`, `parked=true`, "
       "`limit` (of each coordinator).", answer="[{half, state, owner, group, …, reason}]")  # fmt: skip
async def list_halves(call: Call) -> object:
    limit = min(call.number(call.query.get("limit", str(LIST_DEFAULT)), "limit", least=1), LIST_DEFAULT)
    group, parked, rows = call.query.get("group", ""), call.flag("parked"), list[dict[str, Any]]()
    for number in await numbers(call):
        found = await call.at_coordinator(op.LIST_HALVES, coordinator=number, group=group, limit=limit)
        rows += map(half_form, found.items)
    return sorted((each for each in rows if each["state"] == "PARKED" or not parked), key=lambda each: -each["ageMs"])


@route("GET", HALVES + ID, "A half message. 404: it is decided, or never was.",
       answer="{half, state, owner, group, …, reason}")  # fmt: skip
async def show(call: Call) -> object:
    half = txn_of(call)
    found = await call.at_coordinator(op.LIST_HALVES, half=half, limit=1)
    if not found.items:
        raise NotFound(f"no half {half} is open")
    return half_form(found.items[0])
