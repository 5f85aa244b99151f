"""When certificates end, as the metrics show it."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from magnetar.runtime.tcp import listening
from magnetar.runtime.tcp.listening import CertificateFiles, find_certificate_expiry
from tests.support.certificates import Authority


def made(end: datetime) -> str:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "n" * 60)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(end - timedelta(days=365)).not_valid_after(end)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize("year", [1975, 2026, 2049, 2050, 2120])
def test_the_end_is_read_in_both_forms_of_time(year: int) -> None:
    end = datetime(year, 2, 3, 4, 5, 6, tzinfo=UTC)
    assert find_certificate_expiry(made(end)) == end.timestamp()


def test_of_a_chain_the_first_to_end_counts() -> None:
    ends = [datetime(year, 1, 1, tzinfo=UTC) for year in (2040, 2030, 2060)]
    assert find_certificate_expiry("text\n".join(map(made, ends))) == ends[1].timestamp()


def test_what_is_no_certificate_is_a_value_error() -> None:
    whole = made(datetime(2030, 1, 1, tzinfo=UTC))
    with pytest.raises(ValueError, match=r"."):
        find_certificate_expiry("nothing")
    head, body, end = whole.partition("\n")[0], whole.splitlines()[1:-1], whole.splitlines()[-1]
    for cut in range(len(body)):
        with pytest.raises(ValueError, match=r"."):
            find_certificate_expiry("\n".join([head, *body[:cut], end]))


def test_a_file_that_is_replaced_is_read_again_and_one_that_is_gone_keeps_its_end(tmp_path: Path) -> None:
    files, path = CertificateFiles(), tmp_path / "server.pem"
    files.add(str(path))
    assert files.read_expiry_times() == {}
    for year in (2030, 2031):
        end = datetime(year, 1, 1, tzinfo=UTC)
        path.write_text(made(end) + "#" * (year - 2030))
        assert files.read_expiry_times() == {str(path): end.timestamp()}
    path.unlink()
    assert files.read_expiry_times() == {str(path): end.timestamp()}


def test_what_a_listener_and_a_caller_show_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, authority = CertificateFiles(), Authority.make(tmp_path)
    monkeypatch.setattr(listening, "PROCESS_CERTIFICATES", files)
    server, caller = authority.issue("server"), authority.issue("caller")
    listening.make_listener_tls_context(server)
    listening.make_caller_tls_context(caller)
    assert list(files.read_expiry_times()) == [server.certificate, caller.certificate]
