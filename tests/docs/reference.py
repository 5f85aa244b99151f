"""The reference of the SDK, made from its docstrings by pdoc: `python -m tests.docs.reference FOLDER` (`make docs`).

A page for each module that a program imports: `MODULES`. pdoc documents modules by their files; four of ours are names
for modules inside client/, and the root's names are loaded when first used, so each page is made of a module object
that has the public names and nothing else. Comments after fields become their texts, and what opens producers and
consumers gets its table of docs/settings.md. A warning of pdoc is an error.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, get_type_hints
from unittest.mock import patch

from magnetar.client.model.settings import ClientSettings, ConsumerSettings, ProducerSettings
from tests.docs.tables import settings_table

if TYPE_CHECKING:
    import pdoc.doc

MODULES = ("magnetar", "magnetar.asyncio", "magnetar.schema", "magnetar.admin", "magnetar.exceptions")
TABLES = {"Client": ClientSettings, "Client.create_producer": ProducerSettings, "Client.subscribe": ConsumerSettings}
_FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.M)


def public(name: str) -> dict[str, object]:
    """The public names of a module, and what they are, without the modules in it; `magnetar.admin` re-exports all."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [each for each in vars(module) if not each.startswith("_")]
    found = {each: getattr(module, each) for each in names}
    own = ("magnetar", "pyspark_magnetar")
    return {
        each: value for each, value in found.items()
        if not isinstance(value, ModuleType) and getattr(value, "__module__", "").partition(".")[0] in own
    }  # fmt: skip


def members(kind: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties that a class of ours defines or inherits from another class of ours."""
    seen = set()
    for base in kind.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("magnetar") else ():
            callable_ = inspect.isfunction(value) or isinstance(value, property | staticmethod | classmethod)
            if callable_ and not name.startswith("_") and name not in seen:
                seen.add(name)
                yield name, getattr(base, name)


def write(folder: Path) -> None:
    """The pages, an index and its search, in a folder that need not exist."""
    import pdoc.doc
    import pdoc.render

    pdoc.render.configure(docformat="markdown", show_source=False)
    with warnings.catch_warnings(), patch.object(pdoc.doc._PrettySignature, "from_callable", _signature):
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"Error parsing type annotation .* for [\w.]+\._\w+:")  # of a private name
        pages = {name: _page(name) for name in MODULES}
        for name, page in pages.items():
            path = folder / f"{name.replace('.', '/')}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pdoc.render.html_module(page, pages), encoding="utf-8")
        (folder / "index.html").write_text(pdoc.render.html_index(pages), encoding="utf-8")
        (folder / "search.js").write_text(pdoc.render.search_index(pages), encoding="utf-8")


def _signature(function: Callable[..., object]) -> inspect.Signature:
    """Returns a signature that pdoc may change: it evaluates annotations in place, and methods of rows keep theirs."""
    import pdoc.doc

    found = inspect.signature(function)
    parameters = [each.replace() for each in found.parameters.values()]
    return pdoc.doc._PrettySignature(parameters, return_annotation=found.return_annotation)


def _page(name: str) -> pdoc.doc.Module:
    import pdoc.doc

    made = ModuleType(name, importlib.import_module(name).__doc__)
    names = public(name)
    vars(made).update(names, __all__=list(names))
    page = pdoc.doc.Module(made)
    for each in page.classes:
        if issubclass(each.obj, tuple):  # its `__new__` is in a module that lacks the names of its types
            each.obj.__new__.__annotations__ = get_type_hints(each.obj)
        _explain_fields(each)
    for place, settings in TABLES.items():
        if (found := page.get(place)) is not None:
            found.docstring += "\n\n" + settings_table(settings)
    return page


def _explain_fields(described: pdoc.doc.Class) -> None:
    try:
        comments = _FIELD.findall(inspect.getsource(described.obj))
    except OSError:  # an enum that is made by a call
        return
    for name, comment in comments:
        if (field := described.get(name)) is not None:
            field.docstring = comment


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(f"the reference begins at {Path(sys.argv[1]) / 'index.html'}")
