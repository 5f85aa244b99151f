"""What a fork does, in processes of their own: pytest's has threads."""

import subprocess
import sys
import textwrap

from tests.client.fake_broker import FakeBroker

HEAD = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(25, exit=True)
import magnetar
client = magnetar.Client(sys.argv[1], operation_timeout_seconds=5)
shared = {"consumer_type": magnetar.ConsumerType.Shared, "initial_position": magnetar.InitialPosition.Earliest}

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(type(error).__name__, flush=True)
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def run(url: str, program: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + textwrap.dedent(program), url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_a_client_made_before_the_fork_works_in_the_children_and_in_the_parent(fake: tuple[str, FakeBroker]) -> None:
    """As prefork servers and multiprocessing do it: nothing was connected before."""
    printed = run(
        fake[0],
        """
        def work():
            producer = client.create_producer("t")
            producer.send(b"child")
            consumer = client.subscribe("t", "s", **shared)
            message = consumer.receive(30_000)
            consumer.acknowledge(message)
            print(message.data().decode())
            client.close()

        print(in_child(work), in_child(work))
        producer = client.create_producer("t")
        producer.send(b"parent")
        consumer = client.subscribe("t", "s", **shared)
        print(consumer.receive(30_000).data().decode())
        client.close()
        """,
    )
    assert printed == ["child", "child", "0", "0", "parent"]


def test_after_a_connection_a_child_is_told_at_once_and_the_parent_goes_on(fake: tuple[str, FakeBroker]) -> None:
    printed = run(
        fake[0],
        """
        producer = client.create_producer("t")
        consumer = client.subscribe("t", "s", **shared)
        producer.send(b"before")

        def same():
            producer.send(b"child")

        def same_consumer():
            consumer.receive(1000)

        def new():
            magnetar.Client(sys.argv[1]).create_producer("t")

        print(in_child(same), in_child(same_consumer), in_child(new))
        producer.send(b"after")
        print(consumer.receive(30_000).data().decode(), consumer.receive(30_000).data().decode())
        client.close()
        """,
    )
    assert printed == ["OperationNotSupported"] * 3 + ["1", "1", "1", "before", "after"]


def test_a_spawned_process_works_whatever_the_parent_did(fake: tuple[str, FakeBroker]) -> None:
    printed = run(
        fake[0],
        """
        import subprocess
        client.create_producer("t").send(b"parent")
        program = (
            "import magnetar, sys; c = magnetar.Client(sys.argv[1]); "
            "print(c.create_producer('t').send(b'x').entry_id())"
        )
        print(subprocess.run([sys.executable, "-c", program, sys.argv[1]], capture_output=True, text=True).stdout)
        client.close()
        """,
    )
    assert printed == ["1"]
