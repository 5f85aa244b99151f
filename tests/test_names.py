"""The names of docs/design/names.md: one that is defined often is a verb with one meaning, or has its reason there."""

import ast
import re
from collections import defaultdict
from functools import cache

from tests import layout

OFTEN = 10
"""From so many definitions on neither an editor's search nor grep follows a name that has several meanings."""

PAGE = layout.ROOT / "docs" / "design" / "names.md"


@cache
def _column(heading: str) -> tuple[str, ...]:
    """Returns the first column of the table below a heading."""
    section = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    text = next(each for each in section if each.startswith(heading + "\n"))
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return tuple(rows[2:])


@cache
def _defined() -> dict[str, list[str]]:
    """Returns where each function of the product is defined, by its name without the underscore in front."""
    found = defaultdict[str, list[str]](list)
    for module in layout.modules(*layout.PACKAGES):
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].append(f"{module.path}:{node.lineno}")
    return found


def _has_form(name: str) -> bool:
    forms = [form for row in _column("Forms") for form in re.findall(r"`([^`]+)`", row)]
    return any(
        name.startswith(form.removesuffix("…")) if form.endswith("…") else name.endswith(form.removeprefix("…"))
        for form in forms
    )


def test_a_name_that_is_defined_often_is_a_verb_of_the_table_or_has_its_reason() -> None:
    named = {*_column("Verbs"), *_column("Names of the public API and of libraries")}
    wrong = [
        f"{name}: {len(places)} times, first at {places[0]}"
        for name, places in _defined().items()
        if len(places) >= OFTEN and not name.startswith("__")
        and name.lstrip("_") not in named and not _has_form(name.lstrip("_"))
    ]  # fmt: skip
    assert not wrong, "a verb of docs/design/names.md says it, with an object: " + "; ".join(wrong)


def test_each_verb_and_each_exception_is_in_use() -> None:
    """A row that no function needs any more goes."""
    defined = {name.lstrip("_") for name in _defined()}
    stale = [verb for verb in _column("Verbs") if not any(re.match(rf"{verb}(_|$)", name) for name in defined)]
    often = {name.lstrip("_") for name, places in _defined().items() if len(places) >= OFTEN}
    stale += [name for name in _column("Names of the public API and of libraries") if name not in often]
    assert not stale, stale


def test_a_verb_has_one_row() -> None:
    verbs = _column("Verbs")
    assert len(verbs) == len(set(verbs))
    assert not set(verbs) & set(_column("Names of the public API and of libraries"))


def test_each_example_exists() -> None:
    examples = set(re.findall(r"`([A-Z]\w+\.\w+)`", PAGE.read_text(encoding="utf-8")))
    assert not (wrong := sorted(examples - layout.names(*layout.PACKAGES))), wrong
