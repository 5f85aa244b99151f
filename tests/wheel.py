"""Tries a wheel as a user has it: installed into an environment of its own, by an installer that sees no compiler.

    python tests/wheel.py dist/magnetar-0.1.0-cp311-cp311-manylinux_2_17_x86_64.whl

It prints what `magnetar --version` says, and ends with 0 when that is what the wheel's name promises and a message went
through a standalone server; with 1, and the reason, otherwise. It needs the standard library alone.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

LIMIT_S = 120


def main(wheel: Path) -> str:
    """What is wrong; "": nothing."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        venv.create(folder / "venv", with_pip=True)
        bin_ = folder / "venv" / "bin"
        env = {"PATH": str(bin_), "HOME": place, "CC": "/no/compiler"}
        env |= {key: value for key, value in os.environ.items() if key.lower().startswith(("pip_", "http", "ssl_"))}

        def run(*command: str | Path) -> str:
            print("+", Path(command[0]).name, *command[1:], flush=True)
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
            if done.returncode:
                raise RuntimeError(f"{Path(command[0]).name} {command[1]}: {done.stderr or done.stdout}")
            return done.stdout

        run(bin_ / "pip", "install", "--quiet", wheel.resolve())
        said = run(bin_ / "magnetar", "--version")
        print(said.splitlines()[0])
        wanted = "(pure Python)" if wheel.stem.endswith("none-any") else "(compiled)"
        if wanted not in said:
            return f"{wheel.name}: --version does not say {wanted}"
        command = [bin_ / "magnetar", "standalone", "--port", "0", "--data", folder / "data"]
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None, "it is a pipe"
            url = next(each for line in server.stdout for each in line.split() if each.startswith("magnetar://"))
            run(bin_ / "magnetar", "produce", "orders", "-m", "hello", "--url", url)
            got = run(bin_ / "magnetar", "consume", "orders", "-s", "billing", "-n", "1", "--url", url)
        finally:
            server.terminate()
            server.wait(LIMIT_S)
        return "" if "hello" in got else f"{wheel.name}: hello was sent, and {got!r} came"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".whl"):
        sys.exit(f"{__doc__}\nGive one wheel.")
    try:
        why = main(Path(sys.argv[1]))
    except (RuntimeError, StopIteration) as error:
        why = f"{sys.argv[1]}: {error or 'the server did not say where it listens'}"
    sys.exit(why or 0)  # "" would be an error
