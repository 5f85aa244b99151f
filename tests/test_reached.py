"""What `python -m tests.reached` looks at is there: of each folder every module is in its report."""

import json
import subprocess
import sys

from tests.reached import LOOKED_AT, ROOT


def test_the_report_has_every_module_of_the_store_and_of_the_ledgers() -> None:
    command = [sys.executable, "-m", "tests.reached", "--states", "0", "--cluster", "0", "--protocol", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    modules = {folder.relative_to(ROOT).parts[0]: len(list(folder.rglob("*.py"))) for folder in LOOKED_AT}
    assert found["files"] == modules
    assert found["branches"] > found["unreached"] > 0, "a seed of the protocol reaches some of them, and not all"
