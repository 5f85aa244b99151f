"""YAML of what commands answer: `-o yaml`.

Written in block style, for the values that JSON has. A text is plain only if every reader of YAML 1.1 and 1.2 takes
it as the same text; any other one is in double quotes with JSON's escapes, so `yes`, `1e3`, `: ` and line ends stay
what they are. `tests/cli/test_yaml.py` reads it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

PLAIN = re.compile(r"[A-Za-z/_](?:[\w./@+() -]|:(?=[\w/]))*", re.ASCII)
"""Begins with no sign and no digit, has no `: ` and no ` #`: neither a number, nor a time, nor a mark of YAML."""
WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Texts that some reader takes for another value, in small letters."""
UNPRINTABLE = re.compile(r"[^\x20-\x7e\u00a1-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""What YAML 1.1 does not take as it is, even in quotes."""


def yaml_lines(value: object) -> Iterator[str]:
    """Yields the lines of a value, without their ends. Raises TypeError for what JSON does not have."""
    match value:
        case Mapping() if value:
            for name, each in value.items():
                if isinstance(each, Mapping | list | tuple) and each:
                    yield f"{_scalar(str(name))}:"
                    yield from (f"  {line}" for line in yaml_lines(each))
                else:
                    yield f"{_scalar(str(name))}: {_scalar(each)}"
        case list() | tuple() if value:
            for each in value:
                first, *others = yaml_lines(each)
                yield f"- {first}"
                yield from (f"  {line}" for line in others)
        case _:
            yield _scalar(value)


def _scalar(value: object) -> str:
    match value:
        case str() if PLAIN.fullmatch(value) and value == value.strip() and value.lower() not in WORDS:
            return value
        case str():
            return UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
        case float() if value != value or value in (float("inf"), -float("inf")):
            return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
        case float():
            mantissa, mark, exponent = repr(value).partition("e")
            return f"{mantissa}{'' if '.' in mantissa else '.0'}{mark}{exponent}"  # 1e+16 is a text in YAML 1.1
        case _:
            return json.dumps(list(value) if isinstance(value, tuple) else value)
