"""A secured cluster under faults: the files of `magnetar security init`, and what its operator and clients bring.

Clients have tokens of TOKEN_S seconds, which a callable renews. The role VISITOR loses its rights now and then (the
fault `revoke`), and has them again when it is healed.
"""

import datetime
import threading
import time
from pathlib import Path
from typing import Any

import magnetar
from magnetar.runtime.clock import SystemClock
from magnetar.security.authority import create_authority_files
from magnetar.security.settings import Secret
from magnetar.security.token import create_token
from tests.chaos.waiting import STUCK_S
from tests.support.processes import Result, run_cli

LOAD, VISITOR = "load", "visitor"
NAMESPACE = "public/default"
TOKEN_S = 60.0
RENEWED_S = 5.0
"""Before its end."""
HOSTS = [f"127.0.0.{number}" for number in range(1, 255)]
"""The proxy's addresses of the brokers, and those of the metadata, of which each process has its own."""


class Security:
    """`folder` is made. `environment` is that of every process and command of the cluster."""

    def __init__(self, folder: Path) -> None:
        create_authority_files(folder, HOSTS, datetime.datetime.now(datetime.UTC))
        self._clock = SystemClock()
        self._key = Secret((folder / "token-key.pem").read_bytes())
        self.environment = {"MAGNETAR_SECURITY": str(folder / "security.toml")}
        self._ca = str(folder / "ca.pem")
        own = {"MAGNETAR_TLS_CA": self._ca, "MAGNETAR_TOKEN": str(folder / "admin.token")}
        self._of_operator = {**own, **self.environment}

    def client(self, url: str, role: str) -> magnetar.Client:
        renewed = magnetar.AuthenticationToken(_Renewed(self, role))
        return magnetar.Client(url, renewed, tls_trust_certs_file_path=self._ca)

    def token(self, role: str) -> str:
        return create_token(self._key, "ES256", role, self._clock.wall_ms(), TOKEN_S)

    def cli(self, *arguments: str, **environment: str) -> Result:
        """A command of the operator's."""
        return run_cli(*arguments, **self._of_operator, **environment)

    # ---------------------------------------------------------------------------------------- grants
    def grant(self, url: str, role: str) -> None:
        """Until a broker does it. TimeoutError."""
        self._until_done("grant-permission", NAMESPACE, "--role", role, "--actions", "produce,consume", "--url", url)

    def revoke(self, url: str, role: str) -> bool:
        """False: no broker did it, or said so."""
        return self.cli("namespaces", "revoke-permission", NAMESPACE, "--role", role, "--url", url).code == 0

    def _until_done(self, *arguments: str) -> None:
        deadline = time.monotonic() + STUCK_S
        while (done := self.cli("namespaces", *arguments)).code:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{' '.join(arguments)}: {done.err}")
            time.sleep(0.5)


class _Renewed:
    """A token that is never older than it may be."""

    def __init__(self, security: Security, role: str) -> None:
        self._security, self._role = security, role
        self._lock = threading.Lock()
        self._token, self._until = "", 0.0

    def __call__(self) -> Any:
        with self._lock:
            if time.monotonic() >= self._until:
                self._token, self._until = self._security.token(self._role), time.monotonic() + TOKEN_S - RENEWED_S
            return self._token
