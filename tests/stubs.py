"""`python -m tests.stubs [--check]`: writes the stubs of classes whose methods are made when they are imported, and
client/blocking/faces.py (tests/faces.py); and, in `__init__.py`, the imports for type checkers and `__all__`.

Type checkers and editors read client/admin/client.pyi and blocking.pyi in the place of the modules: each method with
its parameters and its docstring, as the class has them.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import magnetar
from magnetar.client.admin import Admin, AdminClient
from magnetar.client.common import errors
from magnetar.proto.applied import Durability, InactiveMode, KeyIndexPolicy, QuotaPolicy, StoragePolicy, TypeTitle
from magnetar.proto.policy_levels import Policies
from tests import faces
from tests.docs.documents import ROOT

IMPORTS = (
    ("values.", "from ...proto import statistics as values"),
    ("Policies", "from ...proto.policies import Policies"),
    ("SchemaInfo", "from ...proto.schema import SchemaInfo"),
    ("TxnId", "from ...proto.states import TxnId, TxnState"),
    ("World", "from ...runtime.network import World"),
    ("ClosedAfterAsyncWith", "from ..common.closing import ClosedAfterAsyncWith"),
    ("ClosedAfterWith", "from ..common.closing import ClosedAfterWith"),
    ("MessageId", "from ..model.message_id import MessageId"),
    ("FindResult", "from .grpc_transport import FindResult"),
    ("StoredMessage", "from .grpc_transport import StoredMessage"),
    ("Transport", "from .grpc_transport import Transport"),
)
"""What a stub imports where it names it, in the order of ruff."""

MODULES = (
    ("client", "admin, functions, streams"), ("client", "aio as asyncio  # noqa: F401 - see __all__"),
    ("client.blocking", "client as tableview"), ("client.common", "errors as exceptions"),
    ("client.model", "schemas as schema"),
)  # fmt: skip
"""Modules among the public names of `__init__.py`."""


def stubs() -> dict[Path, str]:
    folder = ROOT / "client" / "admin"
    return {
        folder / "blocking.pyi": _stub("blocking.py", "Admin(ClosedAfterWith)", Admin, ("__init__",), "def"),
        folder / "client.pyi": _stub(
            "client.py", "AdminClient(ClosedAfterAsyncWith)", AdminClient, ("__init__",), "async def"
        ),
        ROOT / "proto" / "policy_levels.pyi": _levels(),
        ROOT / "client" / "blocking" / "faces.py": faces.text((ROOT / "client" / "blocking" / "faces.py").read_text()),
        ROOT / "__init__.py": _package((ROOT / "__init__.py").read_text()),
    }


def _package(text: str) -> str:
    """`__init__.py` with the imports and the `__all__` of all public names."""
    public = {**magnetar._PLACES, "client.common.errors": errors.__all__}
    classes = [(place, ", ".join(sorted(names, key=_order_in_import))) for place, names in public.items()]
    lines = [_import(*each) for each in sorted([*classes, *MODULES])]
    listed = {name for names in public.values() for name in names} | {
        names.rpartition(" as ")[2].split("  #")[0] for _, joined in MODULES for names in joined.split(", ")
    }
    names = "".join(f'    "{name}",\n' for name in sorted(listed - {"asyncio"}, key=_order))
    head, _, rest = text.partition("if TYPE_CHECKING:\n")
    opening, _, rest = rest[rest.index("__all__ = [") :].partition("\n")
    return f"{head}if TYPE_CHECKING:\n{''.join(lines)}\n{opening}\n{names}{rest[rest.index(']') :]}"


def _import(place: str, names: str) -> str:
    line = f"    from .{place} import {names}"
    if len(line.partition("  #")[0]) <= faces.WIDTH:
        return f"{line}\n"
    return f"    from .{place} import (\n{''.join(f'        {name},{chr(10)}' for name in names.split(', '))}    )\n"


def _order(name: str) -> tuple[int, str]:
    """The place of a name in `__all__`: constants, classes, then all else."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2, name


def _order_in_import(name: str) -> tuple[int, str]:
    return _order(name)[0], name.lower()


def _levels() -> str:
    fields = "\n".join(f"    {name}: {_named(kind)} = None" for name, kind in get_type_hints(Policies).items())
    settings = "frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False"
    return f'''"""Of policy_levels.py, for type checkers and editors; `python -m tests.stubs` writes it."""

import msgspec

from .applied import Durability, InactiveMode, KeyIndexPolicy, QuotaPolicy, StoragePolicy, TypeTitle
from .schema import Compatibility

class Policies(msgspec.Struct, {settings}):
{faces.doc_of(Policies.__doc__ or "", "    ")}

{fields}
'''


def _named(kind: Any) -> str:
    """A type as a program writes it."""
    names = {
        QuotaPolicy: "QuotaPolicy", StoragePolicy: "StoragePolicy",
        InactiveMode: "InactiveMode", TypeTitle: "TypeTitle",
        KeyIndexPolicy: "KeyIndexPolicy", Durability: "Durability",
    }  # fmt: skip
    if kind in names:
        return names[kind]
    if get_origin(kind) in (UnionType, Union):
        return " | ".join(map(_named, get_args(kind))) if kind not in names else names[kind]
    if get_origin(kind) is tuple:
        return f"tuple[{_named(get_args(kind)[0])}, ...]"
    return "None" if kind is NoneType else str(kind.__name__)


def _stub(module: str, head: str, kind: type, also: tuple[str, ...], verb: str) -> str:
    names = [*also, *(name for name in vars(kind) if not name.startswith("_"))]
    methods = "\n".join(_method(name, vars(kind)[name], "def" if name == "__init__" else verb) for name in names)
    body = f"class {head}:\n{faces.doc_of(inspect.cleandoc(kind.__doc__ or ''), '    ')}\n\n{methods}"
    found = [name for name in ("Mapping", "Sequence") if name in body]
    standard = [f"from collections.abc import {', '.join(found)}"] if found else []
    standard += ["from typing import Any"] if "Any" in body else []
    ours = list[str]()
    for word, line in IMPORTS:
        if word in body:
            home, _, name = line.partition(" import ")
            if ours and ours[-1].startswith(f"{home} import "):
                ours[-1] += f", {name}"
            else:
                ours.append(line)
    imports = "\n\n".join("\n".join(group) for group in (standard, ours) if group)
    head = f'"""Of {module}, for type checkers and editors; `python -m tests.stubs` writes it."""'
    return f"{head}\n\n{imports}\n\n{body}"


def _method(name: str, method: Callable[..., Any], verb: str) -> str:
    signature = inspect.signature(method)
    head = faces.head_of(verb, name, [*signature.parameters.values()], signature.return_annotation)
    doc = inspect.getdoc(method)
    return f"{head} ...\n" if doc is None or name.startswith("_") else f"{head}\n{faces.doc_of(doc, ' ' * 8)}\n"


def outdated() -> Iterator[Path]:
    for path, text in stubs().items():
        if not path.exists() or path.read_text() != text:
            yield path


def main() -> None:
    if "--check" in sys.argv:
        sys.exit("\n".join(f"{path} is not what the class has: python -m tests.stubs" for path in outdated()) or 0)
    for path, text in stubs().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
