"""Arguments of AdminClient's methods are what their annotations say, or nothing is sent.

`checked` wraps every public coroutine method of a class. The annotations are the table: a new method is checked without
a line for it. What they cannot say (a count from 1, a role's name) the method checks itself, or the server.
Guard: tests/client/admin/test_arguments.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from ...proto.errors import InvalidRequest
from ..common.checks import INT64_MAX, TEXT, shown

C = TypeVar("C", bound=type)


class WrongArgumentType(InvalidRequest, TypeError):
    """An argument is of another type than its annotation."""


class WrongArgument(InvalidRequest, ValueError):
    """An argument is of its type, and cannot be sent: text that no codec takes, a number of more than 64 bits."""


Problem = type[WrongArgumentType] | type[WrongArgument] | None


def checked(kind: C) -> C:
    """A class decorator."""
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
            given = signature.bind(*arguments, **options).arguments
        except TypeError:  # which names the method when it is called
            return await method(*arguments, **options)
        for name, value in given.items():
            if name in hints:
                several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
                for each in value if several else (value,):
                    _check(name, hints[name], each)
        return await method(*arguments, **options)

    return call


def _check(name: str, hint: Any, value: object) -> None:
    problem = _problem(hint, value)
    if problem is not None:
        raise problem(f"{name} is {_says(hint)}, not {shown(value)}")


def _problem(hint: Any, value: Any) -> Problem:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        found = [_problem(part, value) for part in parts]
        return None if None in found else WrongArgument if WrongArgument in found else WrongArgumentType
    if origin is Sequence:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence):
            return WrongArgumentType
        return _first(_problem(parts[0], each) for each in value)
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return WrongArgumentType
        return _first(_problem(part, each) for pair in value.items() for part, each in zip(parts, pair, strict=True))
    if origin is tuple:
        if not isinstance(value, tuple) or len(value) != len(parts):
            return WrongArgumentType
        return _first(_problem(part, each) for part, each in zip(parts, value, strict=True))
    return _of_one(hint, value)


def _of_one(hint: Any, value: Any) -> Problem:
    if hint is float:
        hint = (int, float)
    if (isinstance(value, bool) and hint is not bool) or not isinstance(value, hint):
        return WrongArgumentType
    if isinstance(value, str):
        return None if TEXT.fits(value) else WrongArgument
    if isinstance(value, int | float) and not -INT64_MAX <= value <= INT64_MAX:  # also what is no number
        return WrongArgument
    return None


def _first(problems: Iterable[Problem]) -> Problem:
    return next((each for each in problems if each is not None), None)


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
