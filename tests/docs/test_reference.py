"""Every public name of the SDK is documented, and pdoc makes the reference of them without a warning."""

import inspect
from pathlib import Path

import pytest

from tests.docs import reference


def test_every_public_name_has_a_docstring() -> None:
    missing = set()
    for module in reference.MODULES:
        for name, value in reference.public(module).items():
            own = value.__dict__.get("__doc__") if inspect.isclass(value) else value.__doc__
            if not own or own.startswith(f"{name}("):  # what a dataclass or a named tuple makes up
                missing.add(f"{module}.{name}")
            if inspect.isclass(value):
                members = reference.members(value)
                missing |= {f"{module}.{name}.{member}" for member, found in members if not inspect.getdoc(found)}
    assert not missing, "\n".join(sorted(missing))


def test_the_reference_is_made_and_knows_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    reference.write(tmp_path)
    for module in reference.MODULES:
        text = (tmp_path / f"{module.replace('.', '/')}.html").read_text(encoding="utf-8")
        assert not [name for name in reference.public(module) if f'id="{name}"' not in text]
