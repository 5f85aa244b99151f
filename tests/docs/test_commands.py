"""Every command and every program of README.md, CONTRIBUTING.md and docs/ does what the reader is told it does."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.documents import DOCUMENTS, ROOT, Block, Command, blocks, commands, spoken
from tests.docs.rules import ADDRESS, Place, is_rehearsed, rehearse, rule, write_rehearsal
from tests.docs.test_examples import WITH_SPARK, run_in_turn
from tests.support.processes import Processes

pytestmark = pytest.mark.processes

SPARK_PROLOGUE = """
import magnetar
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
"""
TOPICS = ("orders", "flights")  # what the Spark programs read; there is something in them
SESSIONS = ("docs/sdk.md", "docs/tracing.md", "docs/transactions.md")
"""Their Python blocks are one program, which prints what `# → …` says ("…": anything)."""
COPIED = """
import magnetar
with magnetar.Client("magnetar://localhost:7650") as client:
    reader = client.create_reader("flights-copy", magnetar.MessageId.earliest)
    print(reader.read_next(10000).data())
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with Processes(tmp_path) as processes:
        yield Place(tmp_path, processes)


def _uses_spark(block: Block) -> bool:
    words = r"\bspark\b|readStream|writeStream|lastProgress"
    return block.language == "python" and re.search(words, block.text) is not None


def _python(document: str) -> list[Block]:
    return [block for block in blocks(document) if block.language == "python"]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_what_it_is_and_every_command_has_a_rule(document: str) -> None:
    kinds = {block.language for block in blocks(document)}
    assert kinds <= {"console", "python", "text", "toml", "mermaid", "yaml"}, f"{document}: blocks of {sorted(kinds)}"
    shown = [each for block in blocks(document) if block.language == "console" for each in commands(block)]
    uncovered = [f"{document}:{each.line}: {each}" for each in [*shown, *spoken(document)] if rule(each) is None]
    assert not uncovered, "no rule in tests/docs/rules.py covers: " + "\n".join(uncovered)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if list(blocks(name))])
def test_the_blocks_of_a_document_run_in_their_order(document: str, place: Place) -> None:
    for block in blocks(document):
        if block.language == "console":
            for command in commands(block):
                _obey(place, document, command)
        elif block.language == "python" and not _uses_spark(block) and document not in SESSIONS:
            said = place.python(block.text)
            assert said or "print(" not in block.text, f"{document}:{block.line}: nothing was printed"
    if document in SESSIONS:
        _run_session(place, document)


def _run_session(place: Place, document: str) -> None:
    text = "".join(block.text for block in _python(document))
    printed = re.findall(r"^ *print\([^#]*\)(?:  # → (.*))?$", text, re.M)
    assert all(printed), f"{document}: what a line prints is told after an arrow"
    wanted = "".join(f"{line}\n" for line in printed)
    said = place.python(text)
    assert re.fullmatch(re.escape(wanted).replace("…", ".*"), said), f"{document} tells\n{wanted}and it is\n{said}"


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if list(spoken(name))])
def test_the_commands_in_the_sentences_of_a_document_are_real(document: str, place: Place) -> None:
    """In their order; then the benchmarks. Those with Spark run with the Spark programs."""
    every = list({str(command): command for command in spoken(document)}.values())
    measuring, with_spark = [command for command in every if is_rehearsed(command)], _with_spark(document)
    for command in every:
        if command not in measuring:
            _obey(place, document, command)
    rehearse(place, [command for command in measuring if command not in with_spark])


def _with_spark(document: str) -> list[Command]:
    """The benchmarks with Spark in its sentences, each once."""
    found = {str(command): command for command in spoken(document) if is_rehearsed(command)}
    return [command for command in found.values() if command.words[3].startswith("spark-")]


def _obey(place: Place, document: str, command: Command) -> None:
    test = rule(command)
    assert test is not None, f"{document}:{command.line}: {command}: no rule"
    try:
        test(place, command)
    except AssertionError as error:
        raise AssertionError(f"{document}:{command.line}: {command}\n{error}") from error


@pytest.mark.spark
@pytest.mark.parametrize("document", [name for name in DOCUMENTS if any(_uses_spark(b) for b in _python(name))])
def test_the_spark_programs_of_a_document_run(document: str, place: Place) -> None:
    """One program, in one Spark session: later blocks use the names of earlier ones. The programs of examples/ with
    Spark come before it, the benchmarks of all documents with Spark after it: a process and a JVM for all."""
    for topic in TOPICS:
        words = [sys.executable, "-m", "magnetar.cli.main", "produce", topic, "-m", "one", "-m", "two"]
        place.run(*words)
    text = "\n".join(block.text for block in _python(document) if _uses_spark(block))
    program = place.folder / "program.py"
    program.write_text(ADDRESS.sub(place.address, f"{SPARK_PROLOGUE}{text}\nprint('done')"), encoding="utf-8")
    programs = [str(program)]
    if place.is_first("examples and benchmarks with Spark"):
        measuring = [command for name in DOCUMENTS for command in _with_spark(name)]
        programs = [*(str(ROOT / each) for each in WITH_SPARK), *programs, str(write_rehearsal(place, measuring))]
    run_in_turn(place, programs)
    if "flights-copy" in text:
        assert place.python(COPIED).strip() == "b'one'"


def test_a_command_without_a_rule_is_seen() -> None:
    """Of the extraction and the rules themselves."""
    (block,) = blocks("a text", "words\n```console\nmagnetar produce t -m 'a b'   # says hello\n\nrm -rf x\n```\n")
    first, second = commands(block)
    assert (first.line, first.words) == (3, ["magnetar", "produce", "t", "-m", "a b"])
    assert rule(first) is not None
    assert (second.line, rule(second)) == (5, None)
    assert rule(Command(1, ["pip", "uninstall", "magnetar"], runs=True)) is None
    with pytest.raises(AssertionError, match="not closed"):
        list(blocks("a text", "```console\nmake test\n"))
