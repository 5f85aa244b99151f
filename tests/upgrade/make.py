"""Makes the archive of this version: `python -m tests.upgrade.make`, once, when the version is released.

A standalone server's folder with what content.py writes, after a stop in order and a `kill -9`: entry logs, indexes and
checkpoints of the first, a journal to replay of the second. Never made again for a version that is released.
"""

import tarfile
import tempfile
from pathlib import Path

from magnetar.cli.common.processes import Processes
from magnetar.proto.versions import PRODUCT
from tests.upgrade import content

FOLDER = Path(__file__).parent
BYTES_MAX = 200_000


def make(archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="magnetar-upgrade-") as made:
        folder = Path(made)
        (folder / "config.toml").write_text(content.CONFIG)
        with Processes(folder) as processes:
            arguments = ("standalone", "--port", "0", "--data", "data", "--config", "config.toml")
            first = processes.start("first", *arguments)
            content.write(first.wait_ready())
            first.stop()
            second = processes.start("second", *arguments)
            content.check(second.wait_ready())
            second.kill()
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(folder / "data", "data", filter=_nameless)
    size = archive.stat().st_size
    assert size < BYTES_MAX, f"{archive} has {size} bytes"
    print(f"{archive.name}: {size} bytes")


def _nameless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    make(FOLDER / f"{PRODUCT}.tar.xz")
