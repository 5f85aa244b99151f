"""Parts of an object that are made when they are first asked for."""

from __future__ import annotations

from typing import ClassVar

import pytest

from magnetar.runtime.memory.later import MadeLater, a_dict


class Box(MadeLater):
    __slots__ = ("label", "parts", "title")
    parts: dict[str, int]
    title: str
    LATER: ClassVar = {"parts": a_dict, "title": lambda self: self.label.title()}

    def __init__(self, label: str) -> None:
        self.label = label


def test_a_part_is_made_once_and_is_the_objects_own() -> None:
    first, second = Box("a box"), Box("another")
    first.parts["lid"] = 1
    assert first.parts == {"lid": 1}
    assert second.parts == {}


def test_a_part_is_made_from_the_object_as_it_is_when_it_is_asked_for() -> None:
    box = Box("a box")
    box.label = "the box"
    assert box.title == "The Box"
    box.label = "changed"
    assert box.title == "The Box"


def test_a_part_that_was_set_is_not_made() -> None:
    box = Box("a box")
    box.parts = {"lid": 2}
    assert box.parts == {"lid": 2}


def test_another_attribute_is_missing_as_ever() -> None:
    with pytest.raises(AttributeError, match="'Box' object has no attribute 'handle'"):
        Box("a box").handle  # type: ignore[attr-defined]  # noqa: B018
