"""Tables in docs/ that are made from the code are what the code says; no setting is without a text or a reader."""

import ast
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from magnetar.bookie.server import BookieConfig
from magnetar.broker.common.config import APPLIED_POLICY_NAMES as POLICIES
from magnetar.broker.common.config import BrokerConfig
from magnetar.cli.common.exits import (
    FAILED,
    IN_USE,
    INCOMPLETE,
    INTERRUPTED,
    NOT_AVAILABLE,
    NOT_FOUND,
    OK,
    USAGE,
    find_exit_code,
)
from magnetar.proto.errors import MagnetarError, from_wire, to_wire
from magnetar.runtime.config import CONFIG_SECTIONS, list_setting_defaults, list_settings, load_config
from magnetar.runtime.disk import EXIT_DISK_FAILED
from magnetar.security.settings import SECURITY_SECTIONS as OF_SECURITY
from magnetar.spark_connector import options as spark
from magnetar.spark_connector.options import SinkOptions, SourceOptions
from tests import layout
from tests.docs.documents import blocks, replaced
from tests.docs.tables import CONFIGURATIONS, error_classes, stale

HOLDERS = {"config", "_config", "settings", "_settings", "given", "options", "_options"}
"""What a configuration is called where it is read: `config.x`, `self._settings.x`."""
READ = {**CONFIGURATIONS, "source": SourceOptions, "sink": SinkOptions}


def test_generated_tables_are_up_to_date() -> None:
    found = stale(write=False)
    assert not found, f"run `python -m tests.docs.tables`: {found}"


def test_a_table_is_replaced_between_its_marks_only() -> None:
    text = "a\n<!-- generated: t -->\nold\n<!-- end -->\nb\n"
    assert replaced(text, "t", "new\nlines") == "a\n<!-- generated: t -->\nnew\nlines\n<!-- end -->\nb\n"
    with pytest.raises(AssertionError, match="not there"):
        replaced(text, "other", "new")


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_setting_says_what_it_is_for(name: str) -> None:
    assert not [setting.name for setting in list_settings(CONFIGURATIONS[name]) if not setting.doc]


def test_every_setting_of_security_and_each_section_says_what_it_is_for() -> None:
    assert all(kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}(") for kind in OF_SECURITY.values())
    silent = [
        (section, each.name) for section, kind in OF_SECURITY.items() for each in list_settings(kind) if not each.doc
    ]
    assert not silent


@pytest.mark.parametrize("name", READ)
def test_every_setting_is_read_somewhere(name: str) -> None:
    kind = READ[name]
    read = _read_outside(kind.__name__)
    unread = [name for name in list_setting_defaults(kind) if name not in read]
    refused = {"chunking_enabled"}  # read by its own check, which refuses it
    if kind is BrokerConfig:  # policies are inherited from it all at once, and read from what applies to a topic
        unread = [name for name in unread if name not in set(POLICIES) - _policies_unread()]
    assert not set(unread) - refused, f"nothing reads {unread} of {kind.__name__}"


def _policies_unread() -> set[str]:
    read = {
        node.attr
        for module in layout.modules("broker")
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        and (node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")) == "applied"
    }
    return set(POLICIES) - read


def _read_outside(owner: str) -> set[str]:
    """Attributes read from something that is called like a configuration, outside of the class `owner` itself."""
    return {
        name for module in layout.modules()
        for name in (_reads(module.nodes, owner) if f"class {owner}" in module.text else _all_reads(module))
    }  # fmt: skip


@functools.cache
def _all_reads(module: layout.Module) -> set[str]:
    return _reads(module.nodes, "")


def _reads(nodes: Sequence[ast.AST], owner: str) -> set[str]:
    inside = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner]
    left_out = {id(node) for each in inside for node in ast.walk(each)}
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in left_out
        if (node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")) in HOLDERS
    }


def test_every_section_of_a_settings_file_is_read_by_a_process() -> None:
    modules = layout.modules("cli", "runtime")
    calls = [node for module in modules for node in module.nodes if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "load_config" and len(call.args) == 2]
    assert {ast.literal_eval(call.args[1]) for call in loads} == set(CONFIG_SECTIONS)


def test_a_setting_that_nothing_reads_is_seen() -> None:
    text = "class C:\n    def check(self):\n        return self.config.a\nuse(self._config.b, other.c)\n"
    nodes = list(ast.walk(ast.parse(text)))
    assert _reads(nodes, "C") == {"b"}
    assert _reads(nodes, "D") == {"a", "b"}


def test_the_table_of_spark_options_names_all_that_there_are() -> None:
    text = (layout.ROOT / "docs/spark.md").read_text(encoding="utf-8").partition("## Options")[2]
    cells = re.findall(r"^\| (`[^|]+) \|", text, re.M)
    told = {name.lower() for cell in cells for name in re.findall(r"`([\w.]+)", cell)}
    named = {spark._ALIASES.get(name, name) for name in told if not name.startswith("magnetar.")}
    assert named == spark._COMMON | spark._SOURCE | spark._STREAM | spark._BATCH | spark._SINK | spark._ONCE
    settings = {name for name in re.findall(r"`magnetar\.(?:client|producer)\.(\w+)", text) if name}
    assert settings == spark._PRODUCER_SETTINGS.keys() | spark._CLIENT_SETTINGS.keys()


def test_the_example_of_a_file_is_one(tmp_path: Path) -> None:
    (example,) = [block.text for block in blocks("docs/settings.md") if block.language == "toml"]
    file = tmp_path / "magnetar.toml"
    file.write_text(example, encoding="utf-8")
    broker = load_config(BrokerConfig, "broker", file=str(file), environment={"MAGNETAR_BROKER_ROLL_MINUTES": "60"})
    bookie = load_config(BookieConfig, "bookie", file=str(file), environment={}, overrides={"data": "here"})
    assert (broker.roll_minutes, broker.cursor_flush_s) == (60, 0.2)
    assert (bookie.free_bytes_min, bookie.store.memtable_bytes, bookie.data) == (4 << 30, 32 << 20, "here")


def test_exit_codes_of_the_table_are_those_of_the_code() -> None:
    text = (layout.ROOT / "docs/errors.md").read_text(encoding="utf-8").partition("## Exit codes")[2]
    told = [int(line.split("|")[1]) for line in text.splitlines() if re.match(r"\| \d", line)]
    known = [OK, FAILED, USAGE, NOT_AVAILABLE, NOT_FOUND, IN_USE, INCOMPLETE, EXIT_DISK_FAILED, INTERRUPTED]
    assert told == known
    assert {find_exit_code(kind("")) for kind in error_classes()} <= set(told)


def test_every_error_class_has_a_code_of_its_own_and_survives_the_wire() -> None:
    kinds = list(error_classes())
    assert len({kind.code for kind in kinds}) == len(kinds) >= 40
    assert all("code" in kind.__dict__ for kind in kinds), "a class without a code arrives as its base"
    for kind in kinds:
        back = from_wire(to_wire(kind("what", size=3)))
        assert (type(back), back.message, back.fields) == (kind, "what", {"size": "3"})


def test_whoever_may_try_again_knows_what_happened_or_that_nobody_knows() -> None:
    """`definite` and `retryable` are inherited as families: no class weakens what its base promises."""
    for kind in error_classes():
        for base in kind.__mro__[1:]:
            if isinstance(base, type) and issubclass(base, MagnetarError):
                assert kind.definite >= base.definite
                assert kind.retryable >= base.retryable
