"""Configuration: the order of its sources, and an error for everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime.config import Setting, explicit_settings, load, setting_value, settings, with_values
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
    config = load(
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
    config = load(Sample, "bookie", environment=environment)
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
        load(Sample, "bookie", environment={}, overrides={name: value})
    assert raised.value.fields["setting"] == name
    assert raised.value.fields["allowed"] == allowed
    assert raised.value.definite


def test_unknown_names_are_errors_wherever_they_stand(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match="did you mean 'flush_bytes'"):
        load(Sample, "bookie", environment={}, overrides={"flush_byte": 1})
    with pytest.raises(InvalidConfiguration, match="no setting 'color'"):
        load(Sample, "bookie", environment={"MAGNETAR_BOOKIE_COLOR": "red"})
    with pytest.raises(InvalidConfiguration, match="no setting 'color'"):
        load(Sample, "bookie", environment={}, file=write(tmp_path, "[bookie]\ncolor = 1\n"))
    with pytest.raises(InvalidConfiguration, match="did you mean 'bookie'"):
        load(Sample, "bookie", environment={}, file=write(tmp_path, "[boookie]\n"))
    with pytest.raises(InvalidConfiguration, match="no section"):
        load(Sample, "bookie", environment={}, file=write(tmp_path, "flush_bytes = 3\n"))


def test_a_file_that_cannot_be_read_or_is_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"missing\.toml"):
        load(Sample, "bookie", environment={}, file=str(tmp_path / "missing.toml"))
    with pytest.raises(InvalidConfiguration, match="not TOML"):
        load(Sample, "bookie", environment={}, file=write(tmp_path, "[bookie\n"))


def test_relations_are_checked_by_the_configuration_itself() -> None:
    with pytest.raises(InvalidConfiguration, match="limit is below flush_bytes"):
        load(Sample, "bookie", environment={}, overrides={"limit": 9})


def test_all_settings_are_listed_with_their_text() -> None:
    rows = settings(Sample)
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
    assert explicit_settings(Outer, "bookie", file=file, environment=environment) == {
        "size",
        "inner.flush_bytes",
        "verbose",
    }
    assert explicit_settings(Outer, "bookie", environment={}) == frozenset()
    changed = with_values(Outer(), {"size": 5, "inner.flush_bytes": 7, "inner.verbose": True})
    assert changed == Outer(Sample(flush_bytes=7, verbose=True), 5)
    assert [setting_value(changed, name) for name in ("size", "inner.flush_bytes")] == [5, 7]
