"""Parts of an object that are made when they are first asked for, because most objects of its class never need them.

    class Compaction(MadeLater):
        __slots__ = ("_tasks", "log", "view")
        log: Log
        view: CompactedView                            as any attribute: it may be read, set and changed
        LATER = {"_tasks": lambda _: Tasks(), "view": lambda self: CompactedView(self.log)}

A broker keeps each topic in memory for as long as it owns it: an empty dictionary takes 64 bytes, an empty set 216, and
the collector looks at both again and again. An attribute that is set costs nothing more than another one. What looks
at all objects (memory, maintenance) asks first whether there is something to look at, or it makes the parts of all.
Only for classes that are not compiled (setup.py).
Guarded by tests/runtime/memory/test_later.py, tests/broker/topic/test_idle_topic.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar


class MadeLater:
    __slots__ = ()

    LATER: ClassVar[Mapping[str, Callable[[Any], object]]] = {}
    """Name of an attribute → what makes its value, from the object."""

    if not TYPE_CHECKING:  # to mypy the attributes have their own types

        def __getattr__(self, name: str) -> Any:
            """Called for an attribute that is not set."""
            make = self.LATER.get(name)
            if make is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            made = make(self)
            setattr(self, name, made)
            return made


def a_dict(_: object) -> dict[Any, Any]:
    return {}


def a_list(_: object) -> list[Any]:
    return []


def a_set(_: object) -> set[Any]:
    return set()
