"""What `-o yaml` writes, every reader of YAML takes as what it was. PyYAML reads it where it is installed."""

import math
import random

import pytest

from magnetar.cli.common.output import format_yaml_lines

TEXTS = (
    "", " ", "yes", "No", "ON", "y", "n", "true", "NULL", "~", "null", "1", "1e3", "1_000", "0x1f", "0o7", "1:30",
    "12:30:45", "2026-11-28", ".5", ".inf", ".nan", "-", "- a", "-1", "?", "? a", ": ", "a: b", "a:", "a :b", "a #b",
    "#a", "a\nb", "a\n", "\n", "\ta", "a\tb", " a", "a ", "'", '"', "\\", "a\\nb", "[a]", "{a}", "[", "a, b", "&a",
    "*a", "!a", "%a", "@a", "`a", "|", ">", "=", "<<", "---", "...", "--- a", "persistent://public/default/orders",
    "orders-partition-3", "schön", "日本", "😀", "\x00", "\x7f", "\x85", "\u2028", "\u2029", "\ufeff",
    "\ufffe", "\r", "a\r\nb", "with space", "e5", "_", "/",
    "97:9:-1:-1", "Infinity", "NaN", "a:b", "a: ", "key:'value'", "http://[::1]:80",
)  # fmt: skip
PLAIN = ("orders", "persistent://public/default/orders", "public/default", "with space", "read-only", "a@b", "a.b")
VALUES = (
    None, True, False, 0, -1, 10**30, 0.5, -0.0, 1e16, 1e-7, 1.5e300, math.inf, -math.inf, [], {}, (), [[]], [{}],
    {"a": []}, {"a": {}}, {"a": {"b": {"c": 1}}}, [[1, [2, [3]]], 4], [{"a": 1, "b": [1, {"c": None}]}, "x"],
    {"yes": "no", "1": 1, "": "", "a b": "c: d", "a\nb": [{"x\ny": "-"}]}, ("a", ("b",)),
)  # fmt: skip


def _written(value: object) -> str:
    return "\n".join(format_yaml_lines(value)) + "\n"


def _as_json(value: object) -> object:
    match value:
        case dict():
            return {name: _as_json(each) for name, each in value.items()}
        case list() | tuple():
            return [_as_json(each) for each in value]
    return value


@pytest.mark.parametrize("value", [*TEXTS, *VALUES], ids=ascii)
def test_a_value_is_read_as_what_it_was(value: object) -> None:
    yaml = pytest.importorskip("yaml")
    for whole in (
        value,
        [value],
        {"name": value},
        [{"name": [value, value]}],
        *([{value: 1}] if isinstance(value, str) else []),
    ):
        found = yaml.safe_load(_written(whole))
        assert found == _as_json(whole), _written(whole)
        assert repr(found) == repr(_as_json(whole)), "1 and True are equal, and not the same"


def test_any_text_is_read_as_what_it_was() -> None:
    yaml = pytest.importorskip("yaml")
    rng = random.Random(7)
    letters = "ae1 09-:#.,[]{}&*!|>'\"%@`~=?\\/\n\r\t\x00\x1f\x85é\u2028\ufeff😀+_xXoYN()"
    found = ["".join(rng.choices(letters, k=rng.randrange(1, 8))) for _ in range(1_000)]
    assert yaml.safe_load(_written(found)) == found
    assert yaml.safe_load(_written(dict.fromkeys(found, "x"))) == dict.fromkeys(found, "x")


def test_texts_that_another_reader_takes_for_something_else_are_quoted() -> None:
    """Without PyYAML, and for readers of YAML 1.2 too."""
    for text in TEXTS:
        (line,) = format_yaml_lines(text)
        if text in PLAIN:
            assert line == text
        if (
            text.lower() in ("yes", "no", "on", "y", "n", "true", "null", "~", "")
            or text[:1] in "0123456789.-+ &*!|>'\"%@`"
        ):
            assert line.startswith('"'), text
        assert "\n" not in line
    assert _written({"a": "1e3", "b": "x\ny: z"}) == 'a: "1e3"\nb: "x\\ny: z"\n'


def test_a_list_of_records_is_a_block() -> None:
    rows = [
        {"topic": "orders", "owners": ["b:1", "b:2"], "stats": {"in": 3, "rate": 0.5}},
        {"topic": "none", "owners": []},
    ]
    assert _written(rows) == (
        "- topic: orders\n  owners:\n    - b:1\n    - b:2\n  stats:\n    in: 3\n    rate: 0.5\n"
        "- topic: none\n  owners: []\n"
    )


def test_what_json_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError):
        _written({"a": b"x"})
