"""Files, links and names in the documents lead somewhere."""

import re
from os.path import normpath
from pathlib import PurePosixPath

import pytest

import magnetar
import magnetar.exceptions
from magnetar.broker.subscription.core.policy import Blocked
from magnetar.broker.subscription.core.subscription_types import SUBSCRIPTION_TYPE_ROWS
from magnetar.proto import errors
from tests import layout
from tests.docs.documents import DOCUMENTS, ROOT
from tests.docs.paths import PAIR

_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_PATH = re.compile(r"^(?:[\w.-]+/)+(?:[\w.-]+\.\w+)?$|^[A-Z]\w+\.md$")
ELSEWHERE = {"benchmarks/results/", "build/", "build/docs/", "dist/", "core/", "format/"}  # made; in several packages
WORDS = (
    "ledger, entry, ensemble, write quorum, ack quorum, write set, fragment, LAC, LAP, fence, recovery, journal, "
    "memtable, entry log, index, checkpoint, position, mark-delete, hole, permit, backlog, bundle, cursor ledger"
)


def _text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    folder = ROOT / PurePosixPath(document).parent
    links = [link for link in _LINK.findall(_text(document)) if "://" not in link]
    assert not [link for link in links if not (folder / link).resolve().exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_folders_in_backticks_exist(document: str) -> None:
    named = [span for span in _SPAN.findall(_text(document)) if _PATH.match(span)]
    assert not [path for path in named if path not in ELSEWHERE and not (ROOT / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_symbol_after_its_module_is_defined_there(document: str) -> None:
    pairs = {pair for pair in PAIR.findall(_text(document)) if (ROOT / pair[0]).exists()}
    assert not [pair for pair in pairs if pair[1] not in layout.symbols(layout.module(pair[0]).tree)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tests_in_backticks_exist(document: str) -> None:
    known = layout.tests()
    assert not [name for name in re.findall(r"`(test_\w+)`", _text(document)) if name not in known]


def test_each_feature_that_is_there_names_a_test_that_guards_it() -> None:
    rows = re.findall(r"^\| ([A-Z]+\d+) \| [^|]+ \| ([a-z ]+) \| (.*) \|$", _text("docs/features.md"), re.M)
    assert len(rows) == len(re.findall(r"^\| [A-Z]+\d+ ", _text("docs/features.md"), re.M)) > 70
    assert {state for _, state, _ in rows} <= {"done", "other", "not yet", "not"}
    assert not [id_ for id_, state, note in rows if state in ("done", "other") and "`test_" not in note]
    assert not [id_ for id_, state, note in rows if state != "done" and not note.strip()], "a difference has a reason"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_errors_in_backticks_exist(document: str) -> None:
    """A word that ends like an error of ours, in a table of what may be seen, is one."""
    known = layout.names() | {"AssertionError"}
    named = re.findall(r"`((?:[A-Z][a-z]+){2,}(?:Error|NotFound|Lost|Bookies|Owner|TooLarge))`", _text(document))
    assert not [name for name in named if not hasattr(errors, name) and name not in known]


def test_messages_in_the_tables_of_troubles_are_said_by_the_code() -> None:
    said = "".join(module.text for module in layout.modules())
    of_operators = _text("docs/operations.md").partition("## When something")[2]
    rows = re.findall(r"^\| `([^`]+ [^`]+)`", of_operators + _text("docs/troubleshooting.md"), re.M)
    assert rows
    pieces = [piece.strip() for row in rows for piece in row.split("…") if piece.strip()]
    assert not [piece for piece in pieces if piece not in said]


def test_errors_of_the_troubles_of_clients_are_those_of_the_sdk() -> None:
    cells = re.findall(r"^\| ([^|]+) \|", _text("docs/troubleshooting.md"), re.M)
    named = {name for cell in cells for name in re.findall(r"`([A-Z][A-Za-z]+)`", cell)}
    assert len(named) >= 20
    assert not [name for name in named if not issubclass(getattr(magnetar.exceptions, name), magnetar.PulsarException)]


def test_each_reason_why_no_consumer_gets_the_next_message_has_its_row() -> None:
    rows = re.findall(r"^\| ([^|`]+) \|", _text("docs/troubleshooting.md").partition("| `blocked` |")[2], re.M)
    reasons = [each.value for each in Blocked.reasons()]
    assert [row for row in rows if row in reasons] == reasons


def test_the_words_have_one_meaning_each() -> None:
    text = _text("docs/design/architecture.md")
    glossary = re.findall(r"^\| ([^|]+) \|", text.partition("## Words")[2], re.M)[1:]
    assert len(set(glossary)) == len(glossary)
    said = {word.strip() for row in glossary for word in re.split(r"[,(]", row)}
    assert set(WORDS.split(", ")) <= said


def test_every_document_is_reached_from_the_readme() -> None:
    reached, to_do = set(), ["README.md"]
    while to_do:
        document = to_do.pop()
        reached.add(document)
        folder = PurePosixPath(document).parent
        links = [normpath(folder / link) for link in _LINK.findall(_text(document)) if link.endswith(".md")]
        to_do += [link for link in links if link not in reached and (ROOT / link).is_file()]
    assert set(DOCUMENTS) <= reached


def test_the_figures_of_the_readme_are_rows_of_the_table_of_figures() -> None:
    rows = re.findall(r"^\| .* \| `python -m benchmarks .*$", _text("README.md"), re.M)
    assert len(rows) == 6
    assert set(rows) <= set(_text("docs/performance.md").splitlines())


def test_the_readme_promises_no_more_subscription_types_than_there_are() -> None:
    promised = not re.search(r"failover or key-shared subscriptions.*\n?.*not built", _text("README.md"))
    assert promised == (len(SUBSCRIPTION_TYPE_ROWS) == 4)
