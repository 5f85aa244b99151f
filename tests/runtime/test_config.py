"""Configuration: the order of its sources, and an error for everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime.config import (
    Setting,
    find_explicit_settings,
    get_setting_value,
    list_settings,
    load_config,
    replace_settings,
    set_variables_from_files,
)
from magnetar.runtime.network import Endpoint


class Sample(msgspec.Struct, frozen=True):
    """A configuration as processes have them."""

    flush_bytes: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 10  # ends a flush; more costs memory
    timeout_s: float = 1.5
    """Bounds a wait.

    Over two lines."""
    mode: Literal["fast", "safe"] = "safe"
    listen: Endpoint = Endpoint("127.0.0.1", 7650)
    directories: tuple[str, ...] = ()
    verbose: bool = False
    limit: int | None = None

    def validate(self) -> None:
        if self.limit is not None and self.limit < self.flush_bytes:
            raise ValueError("limit is below flush_bytes")


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "magnetar.toml"
    path.write_text(text)
    return str(path)


def test_options_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, '[bookie]\nflush_bytes = 1\ntimeout_s = 2\nmode = "fast"\n[broker]\nunknown = 1\n')
    environment = {"MAGNETAR_BOOKIE_FLUSH_BYTES": "2", "MAGNETAR_BOOKIE_TIMEOUT_S": "3", "MAGNETAR_BROKER_X": "1"}
    config = load_config(
        Sample, "bookie", file=file, environment=environment, overrides={"flush_bytes": 3, "mode": None}
    )
    assert (config.flush_bytes, config.timeout_s, config.mode, config.verbose) == (3, 3.0, "fast", False)


def test_every_type_may_come_as_text() -> None:
    environment = {
        "MAGNETAR_BOOKIE_LISTEN": "[::1]:80",
        "MAGNETAR_BOOKIE_DIRECTORIES": "/a, /b",
        "MAGNETAR_BOOKIE_VERBOSE": "true",
        "MAGNETAR_BOOKIE_LIMIT": "70",
    }
    config = load_config(Sample, "bookie", environment=environment)
    assert config.listen == Endpoint("::1", 80)
    assert config.directories == ("/a", "/b")
    assert config.verbose is True
    assert config.limit == 70


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("flush_bytes", 0, "int ≥ 1 and ≤ 1000"),
        ("flush_bytes", "many", "int ≥ 1 and ≤ 1000"),
        ("flush_bytes", 1.5, "int ≥ 1 and ≤ 1000"),
        ("mode", "slow", "'fast' | 'safe'"),
        ("listen", "nowhere", "HOST:PORT"),
        ("verbose", "perhaps", "bool"),
        ("limit", "x", "int | none"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(InvalidConfiguration, match=name) as raised:
        load_config(Sample, "bookie", environment={}, overrides={name: value})
    assert raised.value.fields["setting"] == name
    assert raised.value.fields["allowed"] == allowed
    assert raised.value.definite


def test_unknown_names_are_errors_wherever_they_stand(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="did you mean 'flush_bytes'"):
        load_config(Sample, "bookie", environment={}, overrides={"flush_byte": 1})
    with pytest.raises(InvalidConfiguration, match="no setting 'color'"):
        load_config(Sample, "bookie", environment={"MAGNETAR_BOOKIE_COLOR": "red"})
    with pytest.raises(InvalidConfiguration, match="no setting 'color'"):
        load_config(Sample, "bookie", environment={}, file=write(tmp_path, "[bookie]\ncolor = 1\n"))
    with pytest.raises(InvalidConfiguration, match="did you mean 'bookie'"):
        load_config(Sample, "bookie", environment={}, file=write(tmp_path, "[boookie]\n"))
    with pytest.raises(InvalidConfiguration, match="no section"):
        load_config(Sample, "bookie", environment={}, file=write(tmp_path, "flush_bytes = 3\n"))


def test_an_unknown_name_in_a_table_of_a_file_is_an_error_too(tmp_path: Path) -> None:
    from magnetar.bookie.server import BookieConfig

    for text, said in (
        ("[bookie.store]\ndisk_full_share = 0.5\n", "there is no setting 'store.disk_full_share'"),
        ("[bookie.store]\nmemtable_byte = 1\n", "did you mean 'memtable_bytes'"),
        ("[bookie.repair]\nspeed = 1\n", "there is no setting 'repair.speed'"),
    ):
        with pytest.raises(InvalidConfiguration, match=said):
            load_config(BookieConfig, "bookie", environment={}, file=write(tmp_path, text), overrides={"data": "d"})


def test_a_file_that_cannot_be_read_or_is_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"missing\.toml"):
        load_config(Sample, "bookie", environment={}, file=str(tmp_path / "missing.toml"))
    with pytest.raises(InvalidConfiguration, match="not TOML"):
        load_config(Sample, "bookie", environment={}, file=write(tmp_path, "[bookie\n"))


def test_relations_are_checked_by_the_configuration_itself() -> None:
    with pytest.raises(InvalidConfiguration, match="limit is below flush_bytes"):
        load_config(Sample, "bookie", environment={}, overrides={"limit": 9})


def test_all_settings_are_listed_with_their_text() -> None:
    rows = list_settings(Sample)
    assert [row.name for row in rows][:3] == ["flush_bytes", "timeout_s", "mode"]
    assert rows[0] == Setting("flush_bytes", "int ≥ 1 and ≤ 1000", "10", "ends a flush; more costs memory")
    assert rows[1] == Setting("timeout_s", "float", "1.5", "Bounds a wait. Over two lines.")
    assert rows[2].doc == ""


class Outer(msgspec.Struct, frozen=True):
    inner: Sample = msgspec.field(default_factory=Sample)  # a table in the section
    size: int = 1  # of it


def test_what_was_chosen_is_known_by_name_and_can_be_replaced_in_tables_too(tmp_path: Path) -> None:
    file = write(tmp_path, "[bookie]\nsize = 1\n[bookie.inner]\nflush_bytes = 10\n[broker]\nunknown = 1\n")
    environment = {"MAGNETAR_BOOKIE_VERBOSE": "yes", "MAGNETAR_BROKER_X": "1", "MAGNETAR_BOOKIE": "1"}
    assert find_explicit_settings(Outer, "bookie", file=file, environment=environment) == {
        "size",
        "inner.flush_bytes",
        "verbose",
    }
    assert find_explicit_settings(Outer, "bookie", environment={}) == frozenset()
    changed = replace_settings(Outer(), {"size": 5, "inner.flush_bytes": 7, "inner.verbose": True})
    assert changed == Outer(Sample(flush_bytes=7, verbose=True), 5)
    assert [get_setting_value(changed, name) for name in ("size", "inner.flush_bytes")] == [5, 7]


class Journal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a table."""

    block_bytes: Annotated[int, msgspec.Meta(ge=1)] = 4096


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table."""

    low: int = 1
    high: int = 2
    journal: Journal = msgspec.field(default_factory=Journal)

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


class Deep(msgspec.Struct, frozen=True):
    """A configuration with tables."""

    data: str = ""
    store: Store = msgspec.field(default_factory=Store)


def test_two_underscores_of_a_variable_are_a_level_at_any_depth(tmp_path: Path) -> None:
    file = write(tmp_path, "[bookie.store]\nlow = 2\nhigh = 9\n")
    environment = {
        "MAGNETAR_BOOKIE__DATA": "/data", "MAGNETAR_BOOKIE__STORE__LOW": "8",
        "MAGNETAR_BOOKIE_STORE__JOURNAL__BLOCK_BYTES": "512",
    }  # fmt: skip
    found = load_config(Deep, "bookie", file=file, environment=environment)
    assert found == Deep("/data", Store(8, 9, Journal(512)))
    assert find_explicit_settings(Deep, "bookie", file=file, environment=environment) == {
        "data", "store.low", "store.high", "store.journal.block_bytes"
    }  # fmt: skip
    together = {"MAGNETAR_BOOKIE__STORE__LOW": "50", "MAGNETAR_BOOKIE__STORE__HIGH": "60"}
    assert load_config(Deep, "bookie", environment=together).store == Store(50, 60)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("MAGNETAR_BOOKIE__STORE__LOWER", "1", "no setting 'lower' (did you mean 'low'?)"),
        ("MAGNETAR_BOOKIE__STORES__LOW", "1", "no table 'stores' (did you mean 'store'?)"),
        ("MAGNETAR_BOOKIE__STORE__JOURNAL__X__Y", "1", "no table 'x'"),
        ("MAGNETAR_BOOKIE__STORE", "1", "store is a table"),
        ("MAGNETAR_BOOKIE__STORE__JOURNAL__BLOCK_BYTES", "0", "allowed: int ≥ 1"),
        ("MAGNETAR_BOOKIE__STORE__LOW", "3", "low is above high"),
    ],
)
def test_a_wrong_variable_of_a_table_is_named(variable: str, text: str, said: str) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        load_config(Deep, "bookie", environment={variable: text})
    assert said in str(raised.value)
    if "above" not in said:
        assert variable in str(raised.value)


def test_two_spellings_of_one_setting_are_refused() -> None:
    environment = {"MAGNETAR_BOOKIE_DATA": "a", "MAGNETAR_BOOKIE__DATA": "b"}
    with pytest.raises(InvalidConfiguration, match="MAGNETAR_BOOKIE_DATA and MAGNETAR_BOOKIE__DATA are the same"):
        load_config(Deep, "bookie", environment=environment)


def test_a_variable_may_be_the_content_of_a_file(tmp_path: Path) -> None:
    secret, empty = tmp_path / "secret", tmp_path / "empty"
    secret.write_text("two\nlines\n\n")
    empty.write_text("")
    environment = {
        "MAGNETAR_BOOKIE__DATA_FILE": str(secret), "MAGNETAR_METADATA_FILE": str(empty),
        "MAGNETAR_TOKEN_FILE": str(secret), "OTHER_FILE": "nowhere",
    }  # fmt: skip
    set_variables_from_files(environment)
    assert environment == {
        "MAGNETAR_BOOKIE__DATA": "two\nlines\n", "MAGNETAR_METADATA": "", "MAGNETAR_TOKEN": str(secret),
        "OTHER_FILE": "nowhere",
    }  # fmt: skip
    assert load_config(Deep, "bookie", environment=environment).data == "two\nlines\n"


def test_a_file_that_cannot_be_read_or_is_given_beside_the_value_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for given, said in (
        ({"MAGNETAR_X_FILE": str(tmp_path / "none")}, "MAGNETAR_X_FILE: .*none cannot be read: No such file"),
        ({"MAGNETAR_X_FILE": str(tmp_path)}, "cannot be read: Is a directory"),
        ({"MAGNETAR_X_FILE": str(binary)}, "is no text"),
        ({"MAGNETAR_X_FILE": str(binary), "MAGNETAR_X": ""}, "MAGNETAR_X and MAGNETAR_X_FILE are both given"),
    ):
        with pytest.raises(InvalidConfiguration, match=said):
            set_variables_from_files(given)
