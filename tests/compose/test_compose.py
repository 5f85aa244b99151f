"""docker-compose.yml starts a cluster that works; its commands run here as local processes."""

import ast
import json
import re
import shutil
import socket
import ssl
import subprocess
import tomllib
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import magnetar
from magnetar.cli.common.processes import Processes
from magnetar.cli.main import root
from tests.compose.compose import ROOT, Compose
from tests.support.processes import run_here

FILE = ROOT / "docker-compose.yml"


@pytest.fixture
def compose() -> Compose:
    return Compose(FILE)


def test_the_file_has_metadata_three_bookies_and_two_brokers(compose: Compose) -> None:
    roles = Counter(service["command"].split()[0] for service in compose.services.values())
    assert roles == {"security": 1, "metadata": 1, "bookie": 3, "broker": 2}


def test_every_server_has_security_and_none_has_the_keys_that_sign(compose: Compose) -> None:
    done = {"security": {"condition": "service_completed_successfully"}}
    assert compose.services["metadata"]["depends_on"] == done  # bookies depend on it, and brokers on them
    assert "INSECURE" not in FILE.read_text(encoding="utf-8")
    for name, service in compose.services.items():
        if name != "security":
            assert "--security /security/security.toml" in service["command"]
            assert "security:/security:ro" in service["volumes"]
            assert not any(volume.startswith("authority:") for volume in service["volumes"])


def test_every_process_that_keeps_something_has_a_volume_of_its_own(compose: Compose) -> None:
    keepers = [service for service in compose.services.values() if "--data /data" in service["command"]]
    volumes = [volume for service in keepers for volume in service["volumes"] if volume.endswith(":/data")]
    assert len(keepers) == 4
    assert len(set(volumes)) == 4


def test_published_ports_are_those_that_brokers_listen_on_and_advertise(compose: Compose) -> None:
    for name in ("broker-1", "broker-2"):
        service = compose.services[name]
        published, http, pulsar = service["ports"]
        machine, outside, inside = published.split(":")
        assert machine == "127.0.0.1", "the authority is one of your own"
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", http), "the port is the one that is advertised"
        assert f"--http-listen 0.0.0.0:{http.rpartition(':')[2]}" in service["command"]
        assert re.fullmatch(r"127\.0\.0\.1:(\d+):\1", pulsar)
        assert f"--pulsar-listen 0.0.0.0:{pulsar.rpartition(':')[2]}" in service["command"]
        assert f"--listen 0.0.0.0:{inside}" in service["command"]
        assert f"--advertise {name}:{outside}" in service["command"]


def test_no_server_has_the_operators_credentials(compose: Compose) -> None:
    for name, service in compose.services.items():
        if name != "security":
            assert "environment" not in service


def test_the_image_starts_a_command_that_exists_and_serves_this_container_alone() -> None:
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    command = json.loads(next(line for line in lines if line.startswith("CMD ")).removeprefix("CMD "))
    assert command[0] in root.table
    assert not {"--insecure", "0.0.0.0"} & set(command), "who wants a server without security says so"
    assert 'ENTRYPOINT ["magnetar"]' in lines


def locked(name: str) -> dict[str, str]:
    lock = (ROOT / name).read_text(encoding="utf-8")
    found = dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.MULTILINE))
    assert len(found) == len(re.findall("==", lock)), "each has a hash"
    return found


def steps() -> list[tuple[str, list[str]]]:
    """The image of each stage, and what it runs and copies."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", "")
    lines = [" ".join(line.split()) for line in text.splitlines() if line and not line.startswith("#")]
    begins = [number for number, line in enumerate(lines) if line.startswith("FROM ")]
    return [
        (lines[begin].split()[1], lines[begin + 1 : end])
        for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True)
    ]


def test_the_image_installs_what_the_lock_file_names_by_hash_and_the_lock_file_has_all() -> None:
    (_, build), _ = steps()
    assert any("--require-hashes" in step and "-r requirements.lock" in step for step in build)
    found = locked("requirements.lock")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["security"], *extras["patterns"]):
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"sys_platform": "linux", "python_version": "3.13"}):
            assert found[canonicalize_name(wanted.name)] in wanted.specifier, text


def test_the_image_is_compiled_by_what_its_other_lock_file_names_by_hash() -> None:
    (image, build), (final, _) = steps()
    assert f"{image}-slim" == final, "the one with a C compiler, of the same Python on the same Linux"
    assert any("--require-hashes" in step and "-r requirements-build.lock" in step for step in build)
    assert build[-1].startswith("RUN MAGNETAR_COMPILE=1 pip wheel "), "it fails rather than being slower"
    assert "--no-build-isolation" in build[-1], "nothing is fetched that has no hash"
    found = locked("requirements-build.lock")
    install = next(node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")))
                   if isinstance(node, ast.Call) and ast.unparse(node.func) == "setup")  # fmt: skip
    required = next(each.value for each in install.keywords if each.arg == "setup_requires")
    assert isinstance(required, ast.IfExp)
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    for wanted in map(Requirement, (*ast.literal_eval(required.body), *backend)):
        assert found[canonicalize_name(wanted.name)] in wanted.specifier, wanted


def test_what_compiles_at_a_user_s_place_is_what_the_tests_compiled_with() -> None:
    """Another mypy makes another program of the same code."""
    (of_setup,) = re.findall(r'"(mypy[<>=][^"]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert of_setup in project["optional-dependencies"]["dev"]
    assert of_setup in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert Requirement(of_setup).specifier.contains(version("mypy"))
    assert not Requirement(of_setup).specifier.contains("99")


def test_each_server_says_whether_it_is_well_and_nothing_starts_before_what_it_needs(compose: Compose) -> None:
    for name, service in compose.services.items():
        if name != "security":
            assert service["healthcheck"]["test"][0] == "CMD", name
            assert all(each["condition"] != "service_started" for each in service["depends_on"].values())


def test_what_a_service_names_is_in_the_file(compose: Compose) -> None:
    declared = yaml.safe_load(FILE.read_text(encoding="utf-8"))["volumes"]
    for name, service in compose.services.items():
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= set(declared), name
        assert set(service.get("depends_on", {})) <= set(compose.services), name


def test_docker_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not here: it is Docker's plug-in of that name")
    command = ["docker", "compose", "--file", str(FILE), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_image_keeps_no_wheels_and_asks_itself_whether_it_is_well() -> None:
    _, (_, final) = steps()
    assert not any(step.startswith("COPY") for step in final), "a layer stays, whatever is removed later"
    assert any("--mount=type=bind,from=build,source=/wheels" in step for step in final)
    assert any(step.startswith("HEALTHCHECK ") and step.endswith('CMD ["magnetar", "health"]') for step in final)


@pytest.mark.processes
def test_messages_go_through_the_cluster_of_the_file(compose: Compose, started: Processes) -> None:
    urls = compose.start(started)
    exec_ = compose.environment("security", started.directory)
    assert urls["broker-1"] == f"magnetar+ssl://{compose.address('broker-1', 7650)}" == exec_["MAGNETAR_URL"]
    token = magnetar.AuthenticationToken(Path(exec_["MAGNETAR_TOKEN"]).read_text().strip())
    with (
        magnetar.Client(urls["broker-1"], token, tls_trust_certs_file_path=exec_["MAGNETAR_TLS_CA"]) as one,
        magnetar.Client(urls["broker-2"], token, tls_trust_certs_file_path=exec_["MAGNETAR_TLS_CA"]) as other,
    ):
        consumer = other.subscribe("orders", "billing", initial_position=magnetar.InitialPosition.Earliest)
        producer = one.create_producer("orders")
        for number in range(100):
            producer.send(f"order {number}".encode())
        for number in range(100):
            message = consumer.receive(timeout_millis=30_000)
            assert message.data() == f"order {number}".encode()
            consumer.acknowledge(message)
        for number in range(30):
            one.create_producer(f"spread-{number}").close()
    brokers = json.loads(run_here("brokers", "list", "-o", "json", **exec_).out)
    topics = {each["name"]: each["topics"] for each in brokers}
    assert all(count > 5 for count in topics.values()), f"both have work, whichever is asked: {topics}"
    for name in compose.services.keys() - {"security"}:
        assert compose.healthcheck(name).code == 0, name
    address = compose.address("broker-2", 6651)
    context = ssl.create_default_context(cafile=exec_["MAGNETAR_TLS_CA"])
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), 5) as plain, context.wrap_socket(plain, server_hostname=host):
        pass  # Pulsar's port speaks TLS with the cluster's certificate
    assert run_here("produce", "orders", "-m", "hello", **exec_).code == 0
    consumed = run_here("consume", "orders", "-s", "billing", "-n", "1", **exec_)
    assert "hello" in consumed.out, consumed.err
    listed = run_here("bookies", "list", "-o", "json", **exec_)
    assert listed.code == 0, listed.err
    assert len(json.loads(listed.out)) == 3
    brokers = json.loads(run_here("brokers", "list", "-o", "json", **exec_).out)
    assert {broker["name"] for broker in brokers} == {"broker-1", "broker-2"}
    again = run_here(*compose.arguments("security", started.directory))
    assert (again.code, again.out) == (0, ""), again.err
    denied = run_here("produce", "orders", "-m", "x", **exec_ | {"MAGNETAR_TOKEN": ""})
    assert denied.err == "magnetar: this server asks who calls: bring a token\n"
