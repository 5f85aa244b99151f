"""A package that is not installed is told by what installs it, never by the bare name of a module."""

import subprocess
import sys
from pathlib import Path

import pytest

import magnetar
from tests.docs.documents import ROOT

WITHOUT = """
import importlib.abc, runpy, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Missing())
{then}
"""


def run(then: str, *packages: str) -> subprocess.CompletedProcess[str]:
    """`then` in a Python that has none of the packages."""
    source = WITHOUT.format(packages=packages, then=then)
    folder = Path(magnetar.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-c", source], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("name", "package", "install"),
    [
        ("outbox.SQLAlchemyOutbox", "sqlalchemy", "magnetar[outbox]"),
        ("outbox.Relay", "sqlalchemy", "magnetar[outbox]"),
        ("inbox.SQLAlchemyInbox", "sqlalchemy", "magnetar[outbox]"), ("outbox.DjangoOutbox", "django", "django"),
        ("inbox.DjangoInbox", "django", "django"),
    ],
)  # fmt: skip
def test_a_class_whose_package_is_missing_says_what_installs_it(name: str, package: str, install: str) -> None:
    module, _, item = name.partition(".")
    done = run(f"from magnetar.{module} import {item}", package)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: magnetar.{name} needs {package}: pip install '{install}'"
    ), done.stderr


def test_the_example_of_the_outbox_says_what_installs_what_it_lacks() -> None:
    path = ROOT / "examples" / "outbox.py"
    done = run(f"runpy.run_path({str(path)!r}, run_name='__main__')", "sqlalchemy")
    assert (done.returncode, done.stderr) == (1, "SQLAlchemy is missing: pip install 'magnetar[outbox]'\n")


BOXES = """
import magnetar, magnetar.inbox, magnetar.outbox
from sqlalchemy import MetaData, create_engine
engine, metadata = create_engine("sqlite://"), MetaData()
inbox, outbox = magnetar.inbox.SQLAlchemyInbox(metadata), magnetar.outbox.SQLAlchemyOutbox(metadata)
magnetar.outbox.Relay, magnetar.outbox.RelaySettings, magnetar.outbox.Lag
metadata.create_all(engine)
with engine.begin() as session:
    outbox.send(session, "orders", b"x")
    print(inbox.first_time(session, "billing", "1"), inbox.first_time(session, "billing", "1"))
"""


def test_inbox_and_outbox_with_sqlalchemy_need_no_django() -> None:
    done = run(BOXES, "django")
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr
