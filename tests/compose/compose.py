"""docker-compose.yml as local processes: the same commands, service names and ports mapped to free loopback ports."""

from __future__ import annotations

import re
import shlex
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from magnetar.cli.common.processes import Processes
from tests.support.processes import run_cli

ROOT = Path(__file__).resolve().parent.parent.parent
ANY_ADDRESS = "0.0.0.0"


class Compose:
    """The services of the file, and where each port of theirs is on loopback."""

    def __init__(self, path: Path) -> None:
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))["services"]
        self._ports: dict[tuple[str, int], int] = {}
        mounts = Counter(volume for service in self.services.values() for volume in service.get("volumes", []))
        self.shared = {volume.partition(":/")[2] for volume, count in mounts.items() if count > 1}

    def arguments(self, service: str, directory: Path) -> list[str]:
        """The service's command line, as it is started here."""
        parts = shlex.split(self.services[service]["command"])
        return [
            "127.0.0.1" if before == "--advertise" and ":" not in part else self._mapped(service, part, directory)
            for before, part in zip(["", *parts], parts, strict=False)
        ]

    def environment(self, service: str, directory: Path) -> dict[str, str]:
        """As it is set there, with files where they are here."""
        found = self.services[service]["environment"]
        return {name: self._mapped(service, value, directory) for name, value in found.items()}

    def address(self, service: str, port: int) -> str:
        """Where the others find that port of the service."""
        if (service, port) not in self._ports:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self._ports[service, port] = free.getsockname()[1]
        return f"127.0.0.1:{self._ports[service, port]}"

    def _mapped(self, service: str, part: str, directory: Path) -> str:
        if part.startswith("/"):
            shared = part.removeprefix("/").split("/")[0] in self.shared
            return str(directory / ("" if shared else service) / part.lstrip("/"))
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
        """Starts all; the ready URL of each service."""
        running = {}
        for service in self.in_order():
            arguments = self.arguments(service, processes.directory)
            if self.services[service].get("restart") == "no":
                done = run_cli(*arguments)
                assert done.code == 0, done.err
            else:
                environment = self.environment(service, processes.directory)
                running[service] = processes.start(service, *arguments, environment=environment)
        return {service: process.wait_ready() for service, process in running.items()}
