"""A user's programs are typed: `mypy --strict` sees the types of an installed wheel, in all modules of the face.

The programs are `typed_program.py` and those of examples/.
"""

import importlib
import inspect
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import magnetar
from magnetar.client.admin import Admin, AdminClient
from tests.docs.documents import ROOT
from tests.docs.wheel import build_and_import

PROGRAM = Path(__file__).with_name("typed_program.py")


def test_a_users_program_is_typed_against_an_installed_wheel(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    names = build_and_import(tmp_path)
    second = [f"magnetar/{name}.py" for name in ("asyncio", "schema", "admin", "exceptions", "outbox", "inbox")]
    assert {*second, *(f"{each}i" for each in second)} <= set(names), "a second name has a stub, and a source for tools"
    python = _installed(tmp_path)
    programs = [PROGRAM, *(ROOT / "examples").glob("*.py")]
    for program in programs:
        shutil.copy(program, tmp_path)
    command = [
        sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull, "--python-executable", str(python),
        "--cache-dir", str(tmp_path / "cache"), *(program.name for program in programs),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _installed(folder: Path) -> Path:
    """The Python of an environment that has what the wheel installed, and the packages that it needs from ours."""
    venv.create(folder / "venv")
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    shutil.copytree(folder / "installed" / "magnetar", site / "magnetar")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv" / "bin" / "python"


@pytest.mark.parametrize("name", ["asyncio", "schema", "admin", "exceptions", "outbox", "inbox"])
def test_a_stub_stands_for_the_module_of_that_name(name: str) -> None:
    stub = Path(magnetar.__file__).with_name(f"{name}.pyi").read_text(encoding="utf-8")
    module = importlib.import_module(f"magnetar.{name}").__name__
    assert f"from .{module.removeprefix('magnetar.')} import" in stub


def test_the_blocking_admin_has_every_method_of_the_other_with_its_parameters() -> None:
    wanted = {n: f for n, f in inspect.getmembers(AdminClient, inspect.iscoroutinefunction) if n[0] != "_"}
    del wanted["close"]
    assert {name for name in vars(Admin) if not name.startswith("_")} == {*wanted, "close"}
    for name, method in wanted.items():
        assert inspect.signature(getattr(Admin, name)) == inspect.signature(method)
