"""The client runs where Windows is: without uvloop, forks, and what POSIX has of files and signals."""

import os
import subprocess
import sys

from tests.client.fake_broker import FakeBroker

PROGRAM = """
import os, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "uvloop", "resource", "termios", "pwd", "grp", "zmq"):
            raise ImportError(f"there is no {name} here")

sys.meta_path.insert(0, Missing())
for name in ("register_at_fork", "fork", "getuid", "geteuid", "pread", "preadv", "pwritev", "posix_fadvise"):
    delattr(os, name)

import asyncio, magnetar

with magnetar.Client(sys.argv[1]) as client:
    producer, consumer = client.create_producer("t"), client.subscribe("t", "s")
    producer.send(b"x")
    message = consumer.receive(30_000)
    consumer.acknowledge(message)
    print(message.data())

async def main():
    async with magnetar.asyncio.Client(sys.argv[1]) as client:
        print((await (await client.create_producer("t")).send(b"y")).entry_id())

asyncio.run(main())
"""


def test_a_client_sends_and_receives_without_what_windows_lacks(fake: tuple[str, FakeBroker]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fake[0]], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout.split()) == (0, ["b'x'", "1"]), done.stderr
