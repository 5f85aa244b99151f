"""What the page changes: the backlog of one subscription of a topic, in two steps.

    action = parse_action(form)                     what the form asks for; raises BadRequest
    sentence = await preview_action(call, action)   "This would …", and nothing is changed
    await run_action(call, action)                  the operation, as the caller: authorized and audited as over REST

Guarding test: test_a_backlog_is_changed_only_after_a_preview (tests/broker/rest/test_page.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....proto import operations as op
from ....proto.names import parse_number
from ..call import BadRequest, RestRequest
from .formats import moment, number, parse_moment

ACTS = ("skip", "expire", "reset")
SECONDS_MAX = 100 * 365 * 86_400


class PageAction(NamedTuple):
    """A change of a subscription's backlog that the page offers: skip all of it, expire the messages older than `value`
    seconds, or reset to `value` milliseconds since the epoch."""

    act: str
    value: int


def parse_action(form: Mapping[str, str]) -> PageAction:
    """Parses the form of a change of a backlog. Raises BadRequest if a field is missing or invalid."""
    act, text = form.get("act", ""), form.get(form.get("act", ""), "").strip()
    if act == "skip":
        return PageAction(act, 0)
    if act == "expire":
        age_s = parse_number(text)
        if age_s is None or not 1 <= age_s <= SECONDS_MAX:
            raise BadRequest("the age is a number of seconds, 1 or more")
        return PageAction(act, age_s)
    if act == "reset":
        return PageAction(act, parse_moment(text))
    raise BadRequest(f"an action is one of {', '.join(ACTS)}")


async def preview_action(call: RestRequest, action: PageAction) -> str:
    """Returns what the action would do, as a sentence."""
    topic, name = call.topic, call.names["subscription"]
    await call.authorize(op.ANALYZE_BACKLOG, topic=topic.full, name=name)
    found = await call.call_owner(op.ANALYZE_BACKLOG, topic, name=name)
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


async def run_action(call: RestRequest, action: PageAction) -> None:
    """Changes the backlog. Raises the errors of the operation."""
    topic, name = call.topic, call.names["subscription"]
    if action.act == "skip":
        await call.authorize(op.SKIP_MESSAGES, topic=topic.full, name=name)
        await call.call_owner(op.SKIP_MESSAGES, topic, name=name, messages=-1)
    elif action.act == "expire":
        await call.authorize(op.EXPIRE_MESSAGES, topic=topic.full, name=name)
        await call.call_owner(op.EXPIRE_MESSAGES, topic, name=name, older_than_s=action.value)
    else:
        await call.authorize(op.RESET_SUBSCRIPTION, topic=topic.full, name=name)
        await call.call_owner(op.RESET_SUBSCRIPTION, topic, name=name, publish_time_ms=action.value)
