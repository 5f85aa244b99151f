"""docker-compose.yml as local processes: the same commands, service names and ports mapped to free loopback ports."""

import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from magnetar.cli.common.processes import Processes
from tests.support.processes import Result, run_here

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGE = ROOT / "Dockerfile"
ANY_ADDRESS = "0.0.0.0"


class Compose:
    """The services of the file, and where each port of theirs is on loopback."""

    def __init__(self, path: Path) -> None:
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
        self._ports: dict[tuple[str, int], int] = {}

    def arguments(self, service: str, directory: Path) -> list[str]:
        """The service's command line, as it is started here."""
        parts = shlex.split(self.services[service]["command"])
        return [
            "127.0.0.1" if before == "--advertise" and ":" not in part else self._mapped(service, part, directory)
            for before, part in zip(["", *parts], parts, strict=False)
        ]

    def address(self, service: str, port: int) -> str:
        """Where the others find that port of the service."""
        if (service, port) not in self._ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._ports[service, port] = free.getsockname()[1]
        return f"127.0.0.1:{self._ports[service, port]}"

    def path(self, service: str, inside: str, directory: Path) -> Path:
        """Where the path of the service's volume is here: services that share a volume share the folder."""
        for volume in self.services[service]["volumes"]:
            name, mounted = volume.split(":")[:2]
            if Path(inside).is_relative_to(mounted):
                return directory / "volumes" / name / Path(inside).relative_to(mounted)
        raise AssertionError(f"{service}: {inside} is in no volume")

    def environment(self, service: str, directory: Path) -> dict[str, str]:
        """Of commands that are typed in the service's container."""
        given: dict[str, str] = self.services[service]["environment"]
        found = {name: self._mapped(service, value, directory) for name, value in given.items()}
        scheme, _, where = given["MAGNETAR_URL"].partition("://")
        return found | {"MAGNETAR_URL": f"{scheme}://{self._mapped(service, where, directory)}"}

    def healthcheck(self, service: str) -> Result:
        """Runs the service's health check here."""
        _, program, *arguments = self.services[service]["healthcheck"]["test"]
        assert program == "magnetar"
        return run_here(*arguments, **self.probes(service))

    def probes(self, service: str) -> dict[str, str]:
        """The environment that the image has: where the service answers probes."""
        (_, port), = re.findall(r"^ENV (MAGNETAR_HEALTH)=127.0.0.1:(\d+)$", IMAGE.read_text(encoding="utf-8"), re.M)
        return {"MAGNETAR_HEALTH": self.address(service, int(port))}

    def _mapped(self, service: str, part: str, directory: Path) -> str:
        if part.startswith("/"):
            return str(self.path(service, part, directory))
        match = re.fullmatch(r"([\w.-]+):(\d+)", part)
        if match is None:
            return part
        name = service if match[1] == ANY_ADDRESS else match[1]
        assert name in self.services, f"{service}: {part} names no service of the file"
        return self.address(name, int(match[2]))

    def in_order(self) -> Iterator[str]:
        """Each service after those it depends on."""
        done: list[str] = []

        def visit(service: str) -> Iterator[str]:
            for before in self.services[service].get("depends_on", []):
                yield from visit(before)
            if service not in done:
                done.append(service)
                yield service

        for service in self.services:
            yield from visit(service)

    def start(self, processes: Processes) -> dict[str, str]:
        """Runs those that end, and starts the others; the ready URL of each of these."""
        running = {}
        for service in list(self.in_order()):
            arguments = self.arguments(service, processes.directory)
            if self.services[service]["restart"] == "no":
                done = run_here(*arguments)
                assert done.code == 0, done.err
            else:
                running[service] = processes.start(service, *arguments, environment=self.probes(service))
        return {service: process.wait_ready() for service, process in running.items()}
