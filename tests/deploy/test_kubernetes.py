"""The manifests: what the chart renders, complete in itself, with commands, options and settings that exist.

With Helm on the PATH the chart is rendered and compared, also with other values; with `kubernetes-validate` (PyPI) each
object is checked by the schema of its kind. Without them these tests are skipped, and the rest holds by structure:

    go install helm.sh/helm/v3/cmd/helm@v3.16.4           (Go fetches it from its module proxy)
    pip install kubernetes-validate
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from magnetar.bookie.server import BookieConfig
from magnetar.broker.common.config import BrokerConfig
from magnetar.cli.common.processes import Process, Processes
from magnetar.cli.main import root
from magnetar.runtime.config import load_config
from tests.layout import ROOT
from tests.support.processes import run_here

CHART = ROOT / "deploy" / "helm" / "magnetar"
FILE = ROOT / "deploy" / "kubernetes" / "magnetar.yaml"
KUBERNETES = "1.34"
ROLES = ("metadata", "bookie", "broker")
Manifest = dict[str, Any]


def manifests(text: str) -> dict[tuple[str, str], Manifest]:
    found = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


SHIPPED = manifests(FILE.read_text(encoding="utf-8"))


def rendered(name: str = "magnetar", *values: str) -> str:
    helm = shutil.which("helm")
    if helm is None:
        pytest.skip("helm is not here; the head of this file says how to install it")
    command = [helm, "template", name, str(CHART), "--namespace", name, "--kube-version", KUBERNETES]
    command += [part for value in values for part in ("--set", value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pod(role: str, objects: dict[tuple[str, str], Manifest] = SHIPPED, name: str = "magnetar") -> Manifest:
    found: Manifest = objects["StatefulSet", f"{name}-{role}"]["spec"]["template"]["spec"]
    return found


def options(role: str) -> Iterator[str]:
    container = pod(role)["containers"][0]
    for each in container["args"]:
        if each.startswith("--"):
            yield each.partition("=")[0]


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_runs_a_command_with_options_and_variables_that_exist(role: str) -> None:
    container = pod(role)["containers"][0]
    assert container["args"][0] == role
    command = root.get_command(click.Context(root), role)
    assert command is not None
    assert set(options(role)) <= {each for parameter in command.params for each in parameter.opts}
    known = {getattr(parameter, "envvar", None) for parameter in command.params} | {"POD_NAME", "POD_NAMESPACE"}
    given = {each["name"] for each in container["env"]}
    assert given <= known
    used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
    assert used <= given
    assert "--insecure" not in container["args"]
    assert "MAGNETAR_INSECURE" not in given


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_may_do_little_and_finds_its_volumes(role: str) -> None:
    spec = pod(role)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "MAGNETAR_BROKER_SERVICE_HOST would be a setting that does not exist"
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert f"--uid {spec['securityContext']['runAsUser']} " in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    claims = SHIPPED["StatefulSet", f"magnetar-{role}"]["spec"].get("volumeClaimTemplates", [])
    assert bool(claims) == (role != "broker"), "a broker keeps nothing"
    volumes = {each["name"] for each in [*spec["volumes"], *(claim["metadata"] for claim in claims)]}
    for container in [*spec["initContainers"], *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
        }  # fmt: skip
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
        assert "memory" in container["resources"]["limits"]
    mounted = next(each for each in spec["volumes"] if each["name"] == "mounted")["projected"]["sources"]
    paths = {item["path"] for each in mounted for item in each["secret"].get("items", [])}
    members = {f"members/{role}.pem", f"members/{role}-key.pem"}
    assert paths == (members if role == "broker" else members | {"security.toml", "ca.pem"}), "and no other's keys"


@pytest.mark.parametrize("role", ROLES)
def test_probes_ask_where_the_server_answers_them(role: str) -> None:
    container = pod(role)["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["MAGNETAR_HEALTH"] == f"0.0.0.0:{ports['health']}"
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    asked = {kind: probe["httpGet"] for kind, probe in probes.items()}
    assert {each["port"] for each in asked.values()} == {"health"}
    assert [each["path"] for each in asked.values()] == ["/startz", "/readyz", "/livez"]
    start = probes["startup"]
    seconds = start["periodSeconds"] * start["failureThreshold"]
    assert seconds == (1800 if role == "bookie" else 60), "a bookie replays its journal"
    assert probes["liveness"]["periodSeconds"] * probes["liveness"]["failureThreshold"] == 30


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_its_names_its_budget_and_its_places(role: str) -> None:
    own = SHIPPED["StatefulSet", f"magnetar-{role}"]["spec"]
    selector = own["selector"]["matchLabels"]
    assert selector.items() <= own["template"]["metadata"]["labels"].items()
    service = SHIPPED["Service", own["serviceName"]]["spec"]
    assert (service["clusterIP"], service["selector"]) == ("None", selector)
    ports = {each["name"] for each in pod(role)["containers"][0]["ports"]}
    assert {each["targetPort"] for each in service["ports"]} <= ports
    budget = SHIPPED["PodDisruptionBudget", f"magnetar-{role}"]["spec"]
    assert (budget["maxUnavailable"], budget["selector"]["matchLabels"]) == (1, selector)
    policy = SHIPPED["NetworkPolicy", f"magnetar-{role}"]["spec"]
    assert policy["podSelector"]["matchLabels"] == selector
    open_to_all = {port["port"] for rule in policy["ingress"] if "from" not in rule for port in rule["ports"]}
    assert open_to_all == ({"grpc", "pulsar", "http", "health"} if role == "broker" else {"health"})
    (kind, rule), = pod(role)["affinity"]["podAntiAffinity"].items()
    assert kind.startswith("preferred" if role == "broker" else "required")
    assert "kubernetes.io/hostname" in str(rule)
    assert own["replicas"] == {"metadata": 1, "bookie": 4, "broker": 2}[role]
    assert pod(role)["terminationGracePeriodSeconds"] == {"metadata": 30, "bookie": 120, "broker": 90}[role]


def test_the_servers_find_each_other_by_names_of_services() -> None:
    assert "--metadata=magnetar-metadata:7640" in pod("bookie")["containers"][0]["args"]
    for role, port in (("bookie", ""), ("broker", ":7650")):
        name = f"$(POD_NAME).magnetar-{role}.$(POD_NAMESPACE).svc.cluster.local{port}"
        assert f"--advertise={name}" in pod(role)["containers"][0]["args"]


def test_the_files_are_what_the_chart_renders() -> None:
    assert FILE.read_text(encoding="utf-8") == rendered(), "see deploy/kubernetes/README.md"


def test_settings_of_values_are_those_that_the_servers_read() -> None:
    text = rendered(
        "m", "settings.bookie.store.memtable_bytes=16777216", "settings.bookie.disk_full_share=0.9",
        "settings.broker.roll_minutes=60", "settings.process.memory_bytes=1073741824", "metrics.enabled=true",
        "bookie.rackLabel=zone", "security.enabled=false",
    )  # fmt: skip
    objects = manifests(text)
    environment = {
        role: {each["name"]: each.get("value", "") for each in pod(role, objects, "m")["containers"][0]["env"]}
        for role in ROLES
    }
    bookie = load_config(BookieConfig, "bookie", environment=environment["bookie"], overrides={"data": "-"})
    assert (bookie.store.memtable_bytes, bookie.disk_full_share) == (16 << 20, 0.9)
    assert load_config(BrokerConfig, "broker", environment=environment["broker"]).roll_minutes == 60
    for role in ROLES:
        assert environment[role]["MAGNETAR_PROCESS__MEMORY_BYTES"] == str(1 << 30)
        assert environment[role]["MAGNETAR_INSECURE"] == "1"
        assert "MAGNETAR_SECURITY" not in environment[role]
        assert "initContainers" not in pod(role, objects, "m")
    assert "--rack=/$(RACK)" in pod("bookie", objects, "m")["containers"][0]["args"]
    check_schema(objects)


def test_the_chart_refuses_fewer_bookies_than_copies() -> None:
    rendered()  # or skipped
    with pytest.raises(AssertionError, match="three copies"):
        rendered("magnetar", "bookie.replicas=2")


def test_each_object_has_the_schema_of_its_kind() -> None:
    check_schema(SHIPPED)


def check_schema(objects: dict[tuple[str, str], Manifest]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for found in objects.values():
        validate.validate(found, KUBERNETES, strict=True)


def mount(role: str, secrets: Path, mounted: Path) -> None:
    """Makes the folder of the role's projected volume as the kubelet does: links to a hidden folder. `secrets`: what
    `magnetar security init --servers` wrote."""
    (volume,) = (each["projected"] for each in pod(role)["volumes"] if each["name"] == "mounted")
    for source in volume["sources"]:
        own = secrets / ("members" if source["secret"]["name"].endswith("-member") else "")
        files = [path for path in own.iterdir() if path.is_file()]
        for item in source["secret"].get("items", [{"key": path.name, "path": path.name} for path in files]):
            path = mounted / "..2026" / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((own / item["key"]).read_bytes())
            path.chmod(volume["defaultMode"])
    (mounted / "..data").symlink_to("..2026")
    for top in os.listdir(mounted / "..2026"):
        (mounted / top).symlink_to(f"..data/{top}")


def run_init(role: str, mounted: Path, out: Path) -> None:
    """Runs the command of the init container here."""
    out.mkdir(exist_ok=True)
    shell, flag, script = pod(role)["initContainers"][0]["command"]
    script = script.replace("/mounted", str(mounted)).replace("/security/", f"{out}/")
    subprocess.run([shell, flag, script], check=True, timeout=30)


@pytest.mark.processes
def test_the_containers_serve_with_the_secrets_that_are_mounted(started: Processes, tmp_path: Path) -> None:
    """The commands of the manifests as local processes, each with the files of its own volume."""
    authority, secrets = tmp_path / "authority", tmp_path / "servers"
    made = run_here("security", "init", str(authority), "--servers", str(secrets), "--host", "localhost")
    assert made.code == 0, made.err
    where: dict[str, str] = {}

    def start(role: str, number: int = 0) -> Process:
        name = f"{role}-{number}"
        mounted, security = tmp_path / f"mounted-{name}", tmp_path / f"security-{name}"
        mount(role, secrets, mounted)
        for _ in range(2):  # a node that was restarted runs it again
            run_init(role, mounted, security)
        assert {path.stat().st_mode & 0o077 for path in security.rglob("*")} == {0}
        container = pod(role)["containers"][0]
        found = []
        for each in container["args"]:
            option, equals, value = each.partition("=")
            value = value if equals else option
            value = re.sub(r"^\$\(POD_NAME\)\..*cluster\.local", "localhost", value).replace("$(POD_NAME)", name)
            value = re.sub(r"^localhost:\d+$", "localhost:0", value)
            value = re.sub(r"^0\.0\.0\.0:\d+$", "127.0.0.1:0", value).replace("/data", str(tmp_path / f"data-{name}"))
            value = where.get(value, value)
            found += [option, value] if equals else [value]
        variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        assert variables["MAGNETAR_SECURITY"] == "/security/security.toml"
        variables |= {"MAGNETAR_HEALTH": "127.0.0.1:0", "MAGNETAR_SECURITY": f"{security}/security.toml"}
        process = started.start(name, *found, environment=variables)
        process.wait_ready()
        return process

    tree = start("metadata")
    where["magnetar-metadata:7640"] = f"localhost:{tree.address.rpartition(':')[2]}"
    servers = [tree, *(start("bookie", number) for number in range(3)), start("broker")]
    for server in servers:
        (health,) = re.findall(r"health=(\S+)", server.lines[0])
        assert run_here("health", "--http", f"http://{health}").code == 0, server.output()
    url = f"magnetar+ssl://localhost:{servers[-1].address.rpartition(':')[2]}"
    given = {"MAGNETAR_TOKEN": str(authority / "admin.token"), "MAGNETAR_TLS_CA": str(authority / "ca.pem")}
    assert run_here("produce", "orders", "-m", "hello", "--url", url, **given).code == 0
    assert run_here("produce", "orders", "-m", "hello", "--url", url).code != 0, "it asks who calls"
