"""The units of deploy/systemd: systemd accepts them, and they start commands and options that exist."""

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from magnetar.cli.main import root
from magnetar.runtime.health import HUNG_AFTER_S
from tests.layout import ROOT

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
PROGRAM = "/opt/magnetar/bin/magnetar"


def section(unit: Path, name: str = "Service") -> dict[str, list[str]]:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    found: dict[str, list[str]] = {}
    for line in unit.read_text().partition(f"[{name}]\n")[2].partition("\n[")[0].splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    assert set(found) == set(parser[name])
    return found


def test_each_role_has_a_unit() -> None:
    roles = {unit.stem.removeprefix("magnetar-").rstrip("@") for unit in UNITS}
    assert roles == {"metadata", "bookie", "broker", "standalone"}


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_a_command_that_exists_and_is_told_when_it_serves(unit: Path) -> None:
    service = section(unit)
    program, role, *options = shlex.split(service["ExecStart"][0])
    assert (program, f"magnetar-{role}") == (PROGRAM, unit.stem.rstrip("@"))
    command = root.get_command(click.Context(root), role)
    assert command is not None
    known = {each for parameter in command.params for each in parameter.opts}
    assert {each for each in options if each.startswith("--")} <= known
    assert service["Type"] == ["notify"]
    assert service["KillMode"] == ["mixed"], "the parent of several processes ends them"
    assert int(service["WatchdogSec"][0]) > 2 * HUNG_AFTER_S
    folders = [each for each in options if each.startswith("/var/lib/")]
    assert [f"/var/lib/{each}" for each in service.get("StateDirectory", [])] == folders
    assert service["LimitNOFILE"] == ["65536"]
    known_variables = {
        variable for parameter in command.params if isinstance(variable := getattr(parameter, "envvar", None), str)
    }
    assert {each.partition("=")[0] for each in service.get("Environment", [])} <= known_variables


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: Debian has it in the package systemd")
    copy = tmp_path / unit.name.replace("@", "@1")
    copy.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), "a sentence of systemd about the unit"
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=25", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout[-400:]
