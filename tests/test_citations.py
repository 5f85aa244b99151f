"""What code, tests and documents cite has its line in docs/, and what those lines name exists.

| cited as | leads to |
|---|---|
| ledger protocol §1.4, or §1.4 alone | a heading of docs/design/protocol.md |
| invariant 14; test_51_… | a row of docs/design/invariants.md |
| M05b; test_m05b_… | a row of docs/design/defects.md |
| Pulsar S13, A12–A14; test_s13_… | a row of docs/features.md |
| complaint 13; test_complaint_13_… | a row of docs/features.md |
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import pytest

from magnetar.bookie.store import checkpoint
from magnetar.bookie.store.entrylog import compaction
from magnetar.broker.log.topic_log import TAKE_OVER_STEPS
from tests import layout
from tests.docs import deletion
from tests.docs.documents import DOCUMENTS, ROOT
from tests.docs.paths import PAIR, corrected
from tests.docs.refusals import OPERATIONS, places_of
from tests.mutants.bank import BANK, CRASHES
from tests.test_map import _stale

PAGES = (
    "invariants", "protocol", "defects", "features", "refusals", "data-deletion", "durability", "extending", "security",
)  # fmt: skip
_LIST = r"(?:(?:, (?:and )?| and | to |–|-)(?:{0}))*"


class Kind(NamedTuple):
    cited: re.Pattern[str]
    one: re.Pattern[str]
    known: Callable[[], set[str]]


def _listed(before: str, one: str) -> re.Pattern[str]:
    return re.compile(before + "((?:" + one + ")" + _LIST.format(one) + ")")


@cache
def _page(name: str) -> str:
    (path,) = (ROOT / "docs").rglob(f"{name}.md")
    return path.read_text(encoding="utf-8")


def _rows(page: str, pattern: str) -> set[str]:
    return set(re.findall(rf"^\| ({pattern}) \|", _page(page), re.M))


def _complaints() -> set[str]:
    section = _page("features").partition("## What users complained of")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| (\d+) \|", section, re.M))


KINDS: dict[str, Kind] = {
    "section": Kind(
        re.compile(r"(§\d(?:\.\d+)?)(?!\d)"), re.compile(r"\d(?:\.\d+)?"),
        lambda: set(re.findall(r"^##+ (\d(?:\.\d+)?) ", _page("protocol"), re.M)),
    ),
    "invariant": Kind(
        _listed(r"\b[Ii]nvariants? ", r"\d+"), re.compile(r"\d+"), lambda: _rows("invariants", r"\d+")
    ),
    "defect": Kind(
        re.compile(r"\b(M\d\d[a-f]?)\b"), re.compile(r"M\d\d[a-f]?"), lambda: _rows("defects", r"M\d\d[a-f]?")
    ),
    "feature": Kind(
        _listed(r"\bPulsar(?:'s)? ", r"[A-Z]{1,2}\d+"), re.compile(r"[A-Z]{1,2}\d+"),
        lambda: _rows("features", r"[A-Z]+\d+"),
    ),
    "complaint": Kind(_listed(r"\bcomplaints? ", r"\d+"), re.compile(r"\d+"), _complaints),
}  # fmt: skip
_TESTS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"^test_((?:m\d\d[a-f]?_)+)"), "defect"),
    (re.compile(r"^test_complaint_(\d+)_"), "complaint"),
    (re.compile(r"^test_((?:t|pr|s|a|r|cp|l|b)\d+)_"), "feature"),
    (re.compile(r"^test_(\d+)_"), "invariant"),
)


def _cited(text: str) -> Iterator[tuple[str, str]]:
    """(kind, id) of each citation; of a range, its ends."""
    flat = re.sub(r"\s*\n\s*(?:#\s*)?", " ", text)
    for name, kind in KINDS.items():
        for match in kind.cited.finditer(flat):
            for id_ in kind.one.findall(match[1]):
                yield name, id_


def _cited_by_name(test: str) -> Iterator[tuple[str, str]]:
    for pattern, kind in _TESTS:
        if match := pattern.match(test):
            for part in match[1].strip("_").split("_"):
                id_ = re.sub(r"^(\D*)0*(\d)", r"\1\2", part) if kind != "defect" else part
                yield kind, id_.upper() if kind == "feature" else re.sub("^m", "M", id_)


def _wrong(where: str, citations: Iterator[tuple[str, str]]) -> list[str]:
    return [f"{where}: {kind} {id_}" for kind, id_ in citations if id_ not in KINDS[kind].known()]


def test_every_citation_in_code_and_tests_has_its_line() -> None:
    wrong = []
    for module in layout.modules(*layout.PACKAGES, "", "tests", "benchmarks", "examples"):
        if module.path != "tests/test_citations.py":
            wrong += _wrong(module.path, _cited(module.text))
    assert not wrong, "\n".join(wrong)


def test_every_citation_in_the_documents_has_its_line() -> None:
    named = [*DOCUMENTS, "TESTING.md", "CHANGELOG.md"]
    wrong = [each for name in named for each in _wrong(name, _cited((ROOT / name).read_text(encoding="utf-8")))]
    assert not wrong, "\n".join(wrong)


def test_every_test_that_is_named_after_a_citation_has_its_line() -> None:
    names = sorted(layout.names("tests"))
    wrong = [each for name in names for each in _wrong(name, _cited_by_name(name))]
    assert not wrong, "\n".join(wrong)


def test_no_page_outside_of_the_repository_is_cited() -> None:
    others = r"\b(?:design|measurements|[Rr]eference|reliability|BookKeeper(?: protocol)?|pulsar-features) §"
    elsewhere = re.compile(others)
    modules = layout.modules(*layout.PACKAGES, "", "tests", "benchmarks", "examples")
    assert not [module.path for module in modules if elsewhere.search(module.text)]


def test_a_citation_that_leads_nowhere_is_seen() -> None:
    text = "(ledger protocol §1.4, §9.9; invariants 14 and 999; Pulsar S13, Z1; M05b, M00; complaints 13,\n    999)"
    assert _wrong("x", _cited(text)) == [
        "x: section 9.9", "x: invariant 999", "x: defect M00", "x: feature Z1", "x: complaint 999",
    ]  # fmt: skip
    assert list(_cited_by_name("test_m09_m27b_an_entry")) == [("defect", "M09"), ("defect", "M27b")]
    assert list(_cited_by_name("test_pr02_a_batch")) == [("feature", "PR2")]
    assert list(_cited_by_name("test_complaint_01_consumers")) == [("complaint", "1")]


# -------------------------------------------------------------------------------------------- what the pages name
@pytest.mark.parametrize("page", PAGES)
def test_files_symbols_and_tests_of_a_page_exist(page: str) -> None:
    rows = [line for line in _page(page).splitlines() if page != "features" or "`test_" in line]
    wrong = [token for line in rows if PAIR.search(line) or "`test_" in line for token in _stale(_code(line))]
    assert not wrong, wrong


def _code(line: str) -> str:
    """Its pairs and tests: other words in backticks are terms of the page."""
    tests = re.findall(r"`test_\w+`", line)
    return " ".join([match[0] for match in PAIR.finditer(line)] + tests)


@pytest.mark.parametrize("page", ["invariants", "defects", "durability"])
def test_every_row_names_what_guards_it(page: str) -> None:
    rows = [line for line in _page(page).splitlines() if re.match(r"\| (?!-|no |id |step )", line)]
    assert len(rows) > 30
    assert not [row for row in rows if not re.search(r"`(?:test_\w+|tests/[\w./]+)`|crash states|seeds of", row)]


def test_every_lesson_of_security_names_its_test_or_says_why_there_is_none() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*)$", _page("security"), re.M)
    assert {int(number) for number, _ in rows} >= {*range(1, 51)} - {38, 42, 44}
    assert not [row for _, row in rows if ("`test_" in row) == row.startswith("– ")]


def test_every_row_of_the_invariants_names_where_the_rule_is_kept() -> None:
    rows = re.findall(r"^\| \d+ \|.*$", _page("invariants"), re.M)
    assert not [row for row in rows if not PAIR.search(row)]


def test_a_path_follows_its_symbol_and_nothing_else_changes() -> None:
    moved = "| `old/place.py` `PublishRefusal` | `tests/no.py` `which_is_nowhere` |"
    assert corrected(moved) == "| `broker/common/refusals.py` `PublishRefusal` | `tests/no.py` `which_is_nowhere` |"


# -------------------------------------------------------------------------------------------------- completeness
def test_every_step_that_makes_something_durable_is_in_the_table() -> None:
    steps = (*(step.__name__ for step in (*checkpoint.CHECKPOINT_STEPS, *TAKE_OVER_STEPS)), *compaction.MOVE_STEPS)
    assert not [step for step in steps if f"`{step}`" not in _page("durability")]


def test_every_defect_of_order_on_a_disk_is_in_the_table_of_the_steps() -> None:
    there = set(re.findall(r"\bM\d\d[a-f]?\b", _page("durability")))
    assert not {id_ for id_, mutant in BANK.items() if mutant.tier == CRASHES} - there


def test_every_reason_to_refuse_is_used_and_told_apart() -> None:
    unused = [str(member) for kind in OPERATIONS.values() for member in kind if not places_of(member)]
    assert not unused, "no code refuses for that reason"
    for kind in OPERATIONS.values():
        assert len(list(kind)) == len(kind.__members__), "two reasons with one sentence are one reason"
        assert all(str(member.error()) == member.value for member in kind)


def test_settings_of_the_table_of_deletion_exist() -> None:
    named = {name for rows in deletion.STEPS.values() for row in rows() for name in row.settings.split(", ") if name}
    assert not {name for name in named if f"| `{name}` |" not in _page("settings")}
