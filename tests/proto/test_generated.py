
import shutil
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("entry", "wire")


def test_the_committed_code_is_what_protoc_makes(tmp_path: Path) -> None:
    """The same call as `make proto`, into another folder."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    deployment = tmp_path / "magnetar" / "proto"
    deployment.mkdir(parents=True)
    for name in NAMES:
        shutil.copy(ROOT / "proto" / f"{name}.proto", deployment)
    out = tmp_path / "out"
    out.mkdir()
    includes = str(files("grpc_tools") / "_proto")
    code = protoc.main(
        [
            "protoc", f"-I{tmp_path}", f"-I{includes}", f"--python_out={out}", f"--pyi_out={out}",
            *(f"magnetar/proto/{name}.proto" for name in NAMES),
        ]
    )  # fmt: skip
    assert code == 0
    for name in NAMES:
        for suffix in ("_pb2.py", "_pb2.pyi"):
            made = (out / "magnetar" / "proto" / f"{name}{suffix}").read_text()
            committed = (ROOT / "proto" / f"{name}{suffix}").read_text()
            assert made == committed, f"proto/{name}{suffix} is not what `make proto` makes"
