"""The official Java client of Pulsar, unchanged, against a real server: `make interop` (Maven brings the client)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from magnetar.cli.common.processes import Processes
from tests.interop.test_pulsar_python import url_of

pytestmark = pytest.mark.interop
JAVA = Path(__file__).parent / "java"
PARTS = ["batches", "chunks", "keys", "letters", "failover", "patterns", "exclusive", "automatic"]

TRANSACTIONS = ["commits", "aborts", "conflicts", "batches", "ends"]
ADMIN_PARTS = ["tenants", "namespaces", "policies", "topics", "messages", "schemas", "end"]


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The class path of the driver and the client."""
    for tool in ("mvn", "javac"):
        assert shutil.which(tool) is not None, f"{tool} is missing: install Maven and a JDK of 17 or later"
    folder = tmp_path_factory.mktemp("java")
    copied = ["mvn", "-q", "-B", "-f", str(JAVA / "pom.xml"), "dependency:copy-dependencies"]
    subprocess.run([*copied, f"-DoutputDirectory={folder / 'lib'}"], check=True, timeout=600)
    sources = [str(path) for path in sorted((JAVA / "src").glob("*.java"))]
    jars = f"{folder / 'lib'}/*"
    subprocess.run(["javac", "-cp", jars, "-d", str(folder / "out"), *sources], check=True, timeout=120)
    return f"{jars}:{folder / 'out'}"


def test_each_part_of_the_java_client_works(classes: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        command = ["java", "-cp", classes, "Interop", url_of(server)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == [f"ok {part}" for part in PARTS], done.stdout + done.stderr


def test_each_part_of_the_java_admin_client_works(classes: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        command = ["java", "-cp", classes, "Administration", url_of(server, "http"), url_of(server)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == [f"ok {part}" for part in ADMIN_PARTS], done.stdout + done.stderr


def test_each_part_of_the_transactions_of_the_java_client_works(classes: str, tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data")
        command = ["java", "-cp", classes, "Transactions", url_of(server)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == [f"ok {part}" for part in TRANSACTIONS], done.stdout + done.stderr
