"""`pip install .` elsewhere: the wheel is built from the tracked files, looked into, unpacked and imported.

Built in a copy, because a build leaves a folder that the next build would pack again; without isolation where the
environment of the tests has a setuptools that is new enough, else with it.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests import layout

SETUPTOOLS_MIN = 77  # as in pyproject.toml

_IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import magnetar, pyspark_magnetar, magnetar.cli.main
print(magnetar.__file__, pyspark_magnetar.__file__, magnetar.cli.main.__file__, sep="\\n")
"""


def build_and_import(folder: Path) -> list[str]:
    """Builds, installs below `folder` without dependencies, imports from there; the names in the wheel."""
    source, target = folder / "source", folder / "installed"
    for name in layout.tracked():
        to = source / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(layout.ROOT / name, to)
    isolation = ["--no-build-isolation"] if _setuptools() >= SETUPTOOLS_MIN else []
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "wheel", ".", "--no-deps", *isolation, "--wheel-dir", str(folder / "wheels")], source)
    (wheel,) = (folder / "wheels").glob("magnetar-*.whl")
    _run([*pip, "install", str(wheel), "--no-deps", "--no-compile", "--target", str(target)], folder)
    places = _run([sys.executable, "-c", _IMPORT, str(target)], folder).split()
    assert len(places) == 3
    assert all(Path(place).is_relative_to(target) for place in places), places
    assert (target / "bin" / "magnetar").is_file(), "there is no command `magnetar`"
    names = zipfile.ZipFile(wheel).namelist()
    _complete(names)
    return names


def _setuptools() -> int:
    try:
        return int(version("setuptools").partition(".")[0])
    except PackageNotFoundError:
        return 0


def _complete(names: list[str]) -> None:
    """Every package's modules, the .proto files, the mark that we are typed, licence and command; no tests."""
    settings = tomllib.loads((layout.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    roots = settings["package-dir"]
    wanted = {"magnetar/py.typed", "magnetar/proto/wire.proto", "magnetar/proto/entry.proto"}
    for package in settings["packages"]:
        top, _, below = package.partition(".")
        folder = layout.ROOT / roots[top] / below.replace(".", "/")
        wanted |= {f"{package.replace('.', '/')}/{path.name}" for path in folder.glob("*.py")}
    wanted.remove("magnetar/setup.py")
    assert "magnetar/setup.py" not in names, "the build's own file is none of the package"
    assert wanted <= set(names), f"not in the wheel: {sorted(wanted - set(names))}"
    assert not [name for name in names if name.split("/")[1] in ("tests", "benchmarks")]
    assert {"LICENSE", "entry_points.txt"} <= {name.rpartition("/")[2] for name in names if ".dist-info/" in name}


def _run(command: list[str], folder: Path) -> str:
    env = os.environ | {"MAGNETAR_COMPILE": "0"}  # `make wheels` tries what is compiled
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
