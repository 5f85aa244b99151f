"""The numbers of docs/limits.md are those of the code."""

import importlib
import re
from operator import attrgetter

from magnetar.runtime.config import list_setting_defaults
from tests.docs.documents import ROOT

ROW = re.compile(r"^\| ([^|]+) \| ([\d,]+(?: [KMG]iB)?)[^|]* \| `([\w/]+)\.py` `([\w.]+)` \|", re.M)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def value_of(path: str, name: str) -> object:
    """Of a constant, or the default of a setting (`BrokerConfig.roll_entries`)."""
    module = importlib.import_module(f"magnetar.{path.replace('/', '.')}")
    kind, _, setting = name.rpartition(".")
    return list_setting_defaults(attrgetter(kind)(module))[setting] if kind else attrgetter(name)(module)


def number_of(text: str) -> int:
    digits, _, unit = text.partition(" ")
    return int(digits.replace(",", "")) * UNITS.get(unit, 1)


def test_each_limit_is_that_of_the_code() -> None:
    text = (ROOT / "docs/limits.md").read_text(encoding="utf-8")
    rows = ROW.findall(text)
    assert len(rows) == len(re.findall(r"^\| [^|]+ \| [\d,]+", text, re.M)) > 25
    wrong = [(what, told) for what, told, path, name in rows if number_of(told) != value_of(path, name)]
    assert not wrong
