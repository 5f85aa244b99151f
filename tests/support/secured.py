"""A secured cluster of real processes: `magnetar security init`, then every process and command with its settings.

    with SecuredCluster(tmp_path) as secured:               # metadata over TLS, keys among peers, tokens at the brokers
        secured.cli("topics", "list")                       # as the operator
        client = secured.client()

For tests and benchmarks: `secured.url` and `secured.settings` are what else they need.
"""

from pathlib import Path

import magnetar
from magnetar.cli.common.processes import Cluster
from tests.support.processes import Result, run_here


class SecuredCluster(Cluster):
    def __init__(
        self, directory: Path, *, bookies: int = 3, brokers: int = 1, session_timeout_s: float | None = None
    ) -> None:
        self.folder = directory / "security"
        done = run_here("security", "init", str(self.folder))
        assert done.code == 0, done.err
        self.settings = str(self.folder / "security.toml")
        super().__init__(
            directory, bookies=bookies, brokers=brokers, session_timeout_s=session_timeout_s, security=self.settings
        )

    def cli(self, *arguments: str) -> Result:
        """A command of the operator's, to the brokers."""
        return run_here(
            *arguments, MAGNETAR_URL=self.url, MAGNETAR_SECURITY=self.settings,
            MAGNETAR_METADATA=self.metadata.address, MAGNETAR_TLS_CA=str(self.folder / "ca.pem"),
            MAGNETAR_TOKEN=str(self.folder / "admin.token"),
        )  # fmt: skip

    def client(self) -> magnetar.Client:
        return magnetar.Client(
            self.url, magnetar.AuthenticationToken((self.folder / "admin.token").read_text().strip()),
            tls_trust_certs_file_path=str(self.folder / "ca.pem"),
        )  # fmt: skip
