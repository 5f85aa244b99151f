"""The files of `magnetar security init`: made once, kept, and handed out to servers without the keys that sign."""

import os
from pathlib import Path

import pytest

from magnetar.security.authority import FILES_NOT_ON_SERVERS, SECURITY_FILES, write_secret
from tests.support.processes import run_here


def init(folder: Path, servers: Path, *more: str) -> str:
    """What it says; empty: nothing was written."""
    done = run_here("security", "init", str(folder), "--servers", str(servers), *more)
    return done.out if done.code == 0 else done.err


def files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def test_a_complete_folder_is_kept_and_servers_get_all_but_the_keys_that_sign(tmp_path: Path) -> None:
    folder, servers = tmp_path / "authority", tmp_path / "servers"
    assert init(folder, servers, "--keep")
    made = files(folder)
    assert set(made) == set(SECURITY_FILES)
    assert files(servers) == {name: data for name, data in made.items() if name not in FILES_NOT_ON_SERVERS}
    assert not [name for name in files(servers) if "admin" in name or "operator" in name], "of no server's business"
    modes = {name: (servers / name).stat().st_mode & 0o777 for name in files(servers)}
    assert all(modes[name] == 0o600 for name in modes if name.endswith((".token", "-key.pem")))
    assert init(folder, servers, "--keep") == ""
    assert files(folder) == made
    assert run_here("security", "certificate", "--folder", str(folder), "--host", "b").code == 0
    assert init(folder, servers, "--keep").split() == [str(servers / name) for name in ("broker-key.pem", "broker.pem")]
    assert files(servers)["broker.pem"] == files(folder)["broker.pem"]


def test_no_file_is_written_over_where_one_is_missing_or_the_authority_is_another(tmp_path: Path) -> None:
    folder, servers = tmp_path / "authority", tmp_path / "servers"
    init(folder, servers)
    assert "is not empty" in init(folder, servers)
    before = files(servers)
    assert "another authority" in init(tmp_path / "other", servers)
    assert files(servers) == before
    (folder / "ca-key.pem").unlink()
    kept = files(folder)
    assert "has no ca-key.pem" in init(folder, servers, "--keep")
    assert files(folder) == kept


def test_what_was_revoked_at_a_server_stays_revoked_when_files_are_handed_out(tmp_path: Path) -> None:
    folder, servers = tmp_path / "authority", tmp_path / "servers"
    init(folder, servers)
    for place, line in ((folder, b"id one\n"), (servers, b"id two\n")):
        with (place / "revoked.txt").open("ab") as file:
            file.write(line)
    init(folder, servers, "--keep")
    assert (servers / "revoked.txt").read_bytes().splitlines()[-2:] == [b"id one", b"id two"]
    assert init(folder, servers, "--keep") == "", "nothing is left to copy"


@pytest.mark.parametrize("over", [True, False], ids=["replaced", "new"])
def test_a_file_has_its_content_on_the_disk_before_its_name_and_its_name_before_it_is_said_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over: bool
) -> None:
    done: list[tuple[str, str, bytes]] = []
    fsync, replace, path = os.fsync, os.replace, tmp_path / "a.token"

    def record_sync(number: int) -> None:
        synced = Path(os.readlink(f"/proc/self/fd/{number}"))
        done.append(("sync", synced.name, synced.read_bytes() if synced.is_file() else b""))
        fsync(number)

    def record_rename(old: Path, new: Path) -> None:
        done.append(("rename", new.name, b""))
        replace(old, new)

    if over:
        path.write_bytes(b"before")
    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    write_secret(path, b"secret", over=over)
    folder = ("sync", tmp_path.name, b"")
    replaced = [("sync", "a.new", b"secret"), ("rename", "a.token", b""), folder]
    assert done == (replaced if over else [("sync", "a.token", b"secret"), folder])
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"secret", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["a.token"]
