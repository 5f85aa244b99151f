"""Parsers of what strangers send: some hundred mutated inputs each; `python -m tests.fuzz` runs millions."""

from itertools import islice
from pathlib import Path

import pytest

from tests.fuzz.fuzzing import attempt, inputs
from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
INPUTS = 500


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_answers_any_bytes_with_a_value_or_a_typed_error(name: str) -> None:
    for number, data in enumerate(islice(inputs(name, 1), INPUTS)):
        assert attempt(name, data, number) is None


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_an_input_that_was_a_defect_is_none_any_more(path: Path) -> None:
    """A file's name is TARGET.NUMBER, its content hexadecimal."""
    assert attempt(path.name.partition(".")[0], bytes.fromhex(path.read_text())) is None
