"""The methods of AdminClient that follow from rows of proto/operations.py: those whose row names a `method`.

    TrimTopic, of a topic        →  async def trim_topic(self, topic: str) -> None

The first parameters are the place and the subscription, as the row's rule has them; what the row `takes` comes by
keyword, with the default of its type. An answer of several is a list.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ...proto import statistics as values
from ...proto.names import check_subscription_name, check_tenant_name
from ...proto.operation import On, Operation
from ...proto.operations import ANSWERS
from ..model.message_id import MessageId
from .stored_messages import StoredMessage
from .transport import Caller, full_namespace, full_topic

NAMED = values, MessageId, StoredMessage
"""By annotations, which are text."""
PLACES: dict[On, tuple[str, Callable[[str], str]]] = {
    On.TOPIC: ("topic", full_topic), On.NAMESPACE: ("name", full_namespace), On.TENANT: ("name", check_tenant_name),
}  # fmt: skip
"""What the parameter is called, and how it is checked before anything is sent."""
Checks = Mapping[str, tuple[str, Callable[[str], str]]]


def made(row: Operation[Any]) -> Callable[..., Awaitable[Any]]:
    """The method of a row."""
    signature, checks = signature_of(row)
    is_list = ANSWERS[row.name].startswith("tuple[")

    async def call(self: Caller, /, *given: Any, **options: Any) -> Any:
        try:
            bound = signature.bind(self, *given, **options)
        except TypeError as error:
            raise TypeError(f"{call.__qualname__}() {error}") from None
        bound.apply_defaults()
        taken = {name: value for name, value in bound.arguments.items() if name != "self"}
        places = {argument: check(taken.pop(name)) for name, (argument, check) in checks.items()}
        found = await self._call(row, **places, **taken)
        return list(found) if is_list else found

    call.__name__, call.__qualname__, call.__doc__ = row.method, f"AdminClient.{row.method}", row.help
    call.__signature__ = signature  # type: ignore[attr-defined]
    kinds = {each.name: each.annotation for each in signature.parameters.values() if each.name != "self"}
    call.__annotations__ = {**kinds, "return": signature.return_annotation}
    return call


def signature_of(row: Operation[Any]) -> tuple[inspect.Signature, Checks]:
    """Of the method; and of the parameters that are checked: what they are called as arguments, and the check."""
    rule, checks = row.rule, dict[str, tuple[str, Callable[[str], str]]]()
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    if rule.subscription:
        checks["name"] = "subscription", check_subscription_name
    if rule.on in PLACES:
        name, check = PLACES[rule.on]
        checks = {name: (rule.on.value, check), **checks}
    first, only = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters += [inspect.Parameter(name, first, annotation="str") for name in checks]
    parameters += [
        inspect.Parameter(each.name, only, default=each.kind(), annotation=each.kind.__name__) for each in row.takes
    ]
    answer = ANSWERS[row.name]
    if answer.startswith("tuple["):
        answer = f"list[{answer[6:-6]}]"
    return inspect.Signature(parameters, return_annotation=answer), checks

