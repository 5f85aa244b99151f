"""Arguments of AdminClient's methods are what their annotations say, or nothing is sent.

`with_argument_checks` wraps every public coroutine method of a class. The annotations are the table: a new method is
checked without a line for it. Python's own rules say what is of a type, and a method gets the plain value of it:

| annotation | taken | given to the method |
|---|---|---|
| `int` | what `operator.index` takes, but no bool: integers of numpy, members of IntEnum | an int |
| `float` | the same, and what has `__float__` | an int or a float |
| `str` | text, and its subclasses: members of enums that are text | a str, of what it is and not of what it prints |
| `Sequence` | lists, tuples, ranges; no text, and nothing that is like bytes | a list |
| `Mapping` | dicts and the like | a dict |
| another class | its instances | the same |

What they cannot say (a count from 1, a role's name) the method checks itself, or the server.
Guard: tests/client/admin/test_arguments.py.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ...proto import statistics as values
from ...proto.errors import InvalidRequest
from ...proto.names import check_subscription_name, check_tenant_name
from ...proto.operations import ANSWERS, Operation, PermissionPlace
from ..common.checks import INT64_MAX, TEXT, shorten_value, to_plain_text
from ..model.message_id import MessageId
from .grpc_transport import OperationCaller, StoredMessage, full_namespace, full_topic

C = TypeVar("C", bound=type)
N = TypeVar("N", int, float)
T = TypeVar("T")


class WrongArgumentType(InvalidRequest, TypeError):
    """An argument has another type than its annotation."""


class WrongArgument(InvalidRequest, ValueError):
    """An argument has the right type, but cannot be sent: text that UTF-8 cannot encode, or a number of more than 64
    bits."""


class _ArgumentUnfit(Exception):
    """A value does not fit its annotation; `kind` is the exception to raise."""

    def __init__(self, kind: type[WrongArgumentType] | type[WrongArgument]) -> None:
        self.kind = kind


def with_argument_checks(kind: C) -> C:
    """Decorates a class: its public asynchronous methods check their arguments."""
    for name in dir(kind):
        method = getattr(kind, name)
        if not name.startswith("_") and inspect.iscoroutinefunction(method):
            setattr(kind, name, _checked(method))
    return kind


def _checked(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    signature = inspect.signature(method)
    hints: dict[str, Any] = {}

    @functools.wraps(method)
    async def call(*arguments: Any, **options: Any) -> Any:
        if not hints:
            hints.update(get_type_hints(method))
        try:
            bound = signature.bind(*arguments, **options)
        except TypeError:  # which names the method when it is called
            return await method(*arguments, **options)
        given = bound.arguments
        for name, value in given.items():
            if name in hints:
                several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                one = functools.partial(argument_value, name, hints[name])
                given[name] = tuple(map(one, value)) if several else one(value)
        return await method(*bound.args, **bound.kwargs)

    return call


def argument_value(name: str, hint: Any, value: object) -> Any:
    """Returns `value` converted to what the method gets. Raises WrongArgumentType or WrongArgument if it does not fit
    `hint`."""
    try:
        return _fitted(hint, value)
    except _ArgumentUnfit as unfit:
        raise unfit.kind(f"{name} is {_says(hint)}, not {shorten_value(value)}") from None


def _fitted(hint: Any, value: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return _first_fitted(parts, value)
    if origin is Sequence:
        if isinstance(value, str | bytes | bytearray | memoryview) or not isinstance(value, Sequence):
            raise _ArgumentUnfit(WrongArgumentType)
        elements: list[Any] = _foreign(list, value)
        return [_fitted(parts[0], each) for each in elements]
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise _ArgumentUnfit(WrongArgumentType)
        pairs = _foreign(lambda: list(value.items()))
        return {_fitted(parts[0], key): _fitted(parts[1], each) for key, each in pairs}
    if origin is tuple:
        if not isinstance(value, tuple) or len(value) != len(parts):
            raise _ArgumentUnfit(WrongArgumentType)
        return tuple(map(_fitted, parts, value))
    return _of_one(hint, value)


def _first_fitted(hints: Sequence[Any], value: Any) -> Any:
    worst: type[WrongArgumentType] | type[WrongArgument] = WrongArgumentType
    for hint in hints:
        try:
            return _fitted(hint, value)
        except _ArgumentUnfit as unfit:
            worst = WrongArgument if unfit.kind is WrongArgument else worst
    raise _ArgumentUnfit(worst)


def _of_one(hint: Any, value: Any) -> Any:
    if hint is int:
        return _in_64_bits(_whole(value))
    if hint is float:
        return _in_64_bits(_number(value))
    if not isinstance(value, hint):
        raise _ArgumentUnfit(WrongArgumentType)
    if hint is str:
        value = to_plain_text(value)
        if not TEXT.fits(value):
            raise _ArgumentUnfit(WrongArgument)
    return value


def _whole(value: Any) -> int:
    """Returns the number by `operator.index`, as Python's own functions do; so an integer of numpy fits, too."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise _ArgumentUnfit(WrongArgumentType)
    return int.__index__(_foreign(operator.index, value))


def _number(value: Any) -> float:
    """Returns the number; a whole number stays one. Text has no `__float__`."""
    if isinstance(value, bool) or hasattr(type(value), "__index__"):
        return _whole(value)
    if not hasattr(type(value), "__float__"):
        raise _ArgumentUnfit(WrongArgumentType)
    try:
        return float(value)
    except OverflowError:
        raise _ArgumentUnfit(WrongArgument) from None
    except Exception:
        raise _ArgumentUnfit(WrongArgumentType) from None


def _in_64_bits(value: N) -> N:
    if not -INT64_MAX <= value <= INT64_MAX:  # also what is no number
        raise _ArgumentUnfit(WrongArgument)
    return value


def _foreign(call: Callable[..., T], *values: Any) -> T:
    """Calls a function that runs code of the argument itself; an exception in it means that the argument has a wrong
    type."""
    try:
        return call(*values)
    except Exception:
        raise _ArgumentUnfit(WrongArgumentType) from None


def _says(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(map(_says, parts))
    if origin is Sequence:
        return f"a list of {_says(parts[0])}"
    if origin is Mapping:
        return f"a dict of {' to '.join(map(_says, parts))}"
    if origin is tuple:
        return f"a tuple of {', '.join(map(_says, parts))}"
    return _WORDS.get(hint) or f"a {hint.__name__}"


_WORDS = {
    str: "text that can be encoded", int: "a whole number of 64 bits", float: "a number", bool: "True or False",
    NoneType: "None",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- rows
# The methods of AdminClient that follow from rows of proto/operations.py: those whose row names a `method`.
#
#     TrimTopic, of a topic        →  async def trim_topic(self, topic: str) -> None
#
# The first parameters are the place and the subscription, as the row's rule has them; what the row `takes` comes by
# keyword, with the default of its type. An answer of several is a list.


NAMED = values, MessageId, StoredMessage
"""By annotations, which are text."""
PLACES: dict[PermissionPlace, tuple[str, Callable[[str], str]]] = {
    PermissionPlace.TOPIC: ("topic", full_topic), PermissionPlace.NAMESPACE: ("name", full_namespace),
    PermissionPlace.TENANT: ("name", check_tenant_name),
}  # fmt: skip
"""What the parameter is called, and how it is checked before anything is sent."""
Checks = Mapping[str, tuple[str, Callable[[str], str]]]


def make_method(row: Operation[Any]) -> Callable[..., Awaitable[Any]]:
    """Makes the method of AdminClient for one operation of the table."""
    signature, checks = signature_of(row)
    is_list = ANSWERS[row.name].startswith("tuple[")

    async def call(self: OperationCaller, /, *given: Any, **options: Any) -> Any:
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
    """Returns the signature of an operation's method; and for each parameter with a check, the name of the argument
    and the check."""
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
