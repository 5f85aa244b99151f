"""The tables of docs/design/recipes.md: which modules know a thing of that kind, found in the code.

A module that comes to know it changes its table, and so fails `python -m tests.docs.tables --check`.
"""

import ast
import re
from collections.abc import Iterator

from magnetar.metadata import paths, records
from magnetar.proto import wire_pb2 as wire
from magnetar.runtime.tasks import Supervisor
from tests import layout

STORES = {"SqliteStore", "RemoteStore", "ZookeeperStore", "connect_metadata", "connect_zookeeper", "ZookeeperAddress",
          "EtcdStore", "connect_etcd", "EtcdAddress"}  # fmt: skip
"""Names of one kind of metadata store."""
STORE_MODULES = ("metadata/sqlite", "metadata/remote", "metadata/zookeeper", "metadata/etcd")
SERVICES = {"Broker": "BrokerService", "Transactions": "TransactionService"}
"""Of the wire, and the class that answers; administration has a table of its own."""


def stores_table() -> str:
    """The modules that name one kind of metadata store, but for those that are one."""
    lines = ["| module | names |", "|---|---|"]
    for module in layout.modules():
        names = sorted({node.id for node in module.nodes if isinstance(node, ast.Name)} & STORES)
        if names and not module.path.startswith(STORE_MODULES):
            lines.append(f"| `{module.path}` | `{'`, `'.join(names)}` |")
    return "\n".join(lines)


def tasks_table() -> str:
    """The long-lived tasks of a broker: the calls of `Supervisor.start_supervised`."""
    lines = ["| task | begun in |", "|---|---|"]
    for module in layout.modules("broker", "ledger"):
        for name, owner in _supervised(module.tree, ""):
            lines.append(f"| `{name}` | `{module.path}` `{owner}` |")
    return "\n".join(lines)


def _supervised(node: ast.AST, owner: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inner = owner
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{owner}.{child.name}".lstrip(".")
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            receiver = ast.unparse(child.func.value).rpartition(".")[2].strip("_")
            if receiver == "background" and child.func.attr == Supervisor.start_supervised.__name__:
                yield ast.unparse(child.args[0]).removeprefix("f").strip("'\""), owner
        yield from _supervised(child, inner)


def numbers_table() -> str:
    """Whose `statistics()` are shown as they are, and under which beginning of a name."""
    lines = ["| metrics | from |", "|---|---|"]
    for module in layout.modules("cli"):
        for node in module.nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "page.add_statistics":
                prefix, numbers = (ast.unparse(each) for each in node.args[:2])
                lines.append(f"| `magnetar_{ast.literal_eval(prefix)}_…` | `{numbers}` in `{module.path}` |")
    return "\n".join(lines)


def records_table() -> str:
    """The records of the metadata: number, class, path."""
    told = re.findall(r"^    (/.+?)\s{2,}(\w+Record)", paths.__doc__ or "", re.M)
    lines = ["| kind | record | path |", "|---|---|---|"]
    for kind, record in sorted(records._KINDS.items()):
        places = ", ".join(f"`{path}`" for path, name in told if name == record.__name__)
        lines.append(f"| {kind} | `{record.__name__}` | {places} |")
    return "\n".join(lines)


def rpcs_table() -> str:
    """The rpcs of programs, and the frames of a client's stream, with the module that takes each."""
    known = {(module.path, symbol) for module in layout.modules("broker") for symbol in layout.symbols(module.tree)}
    lines = ["| rpc or frame | taken in |", "|---|---|"]
    for service, owner in SERVICES.items():
        for method in wire.DESCRIPTOR.services_by_name[service].methods:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower()
            (path,) = [path for path, symbol in known if symbol in (f"{owner}.{name}", f"HalfMessageService.{name}")]
            lines.append(f"| `{service}.{method.name}` | `{path}` |")
    for field in wire.ClientFrame.DESCRIPTOR.oneofs_by_name["kind"].fields:
        taken = sorted(module.path for module in layout.modules("broker") if _takes(module, field.name))
        lines.append(f"| `ClientFrame.{field.name}` | {', '.join(f'`{path}`' for path in taken)} |")
    return "\n".join(lines)


def _takes(module: layout.Module, kind: str) -> bool:
    """Whether it reads that field of a frame, or compares the kind with its name."""
    if not module.path.startswith("broker/grpc/"):
        return False
    return any(
        (isinstance(node, ast.Attribute) and node.attr == kind and ast.unparse(node.value) == "frame")
        or (isinstance(node, ast.Constant) and node.value == kind)
        for node in module.nodes
    )
