"""TLS of plain TCP listeners: who is let in, and files that change while it listens."""

import asyncio
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime.access import CallerLimits, ListenerAccess, TlsFiles
from magnetar.runtime.network import ByteStream, Endpoint
from magnetar.runtime.tcp import listening
from magnetar.runtime.tcp.listening import make_listener_tls_context
from tests.support.byte_streams import read
from tests.support.certificates import Authority

ANY = Endpoint("127.0.0.1", 0)


async def _echo(stream: ByteStream) -> None:
    caller = stream.caller
    stream.on_caller_authenticated()
    stream.write_nowait(b"%d %d " % (caller.is_encrypted, b"BEGIN CERTIFICATE" in caller.certificate))
    while data := await read(stream):
        stream.write_nowait(data)


@asynccontextmanager
async def _listening(tls: TlsFiles | None, limits: CallerLimits = CallerLimits()) -> AsyncIterator[int]:  # noqa: B008
    serving = await listening.serve(ANY, _echo, ListenerAccess(tls=tls, limits=limits))
    try:
        yield serving.endpoint.port
    finally:
        await serving.close()


async def _said(port: int, ca: str, own: TlsFiles | None = None) -> tuple[bytes, bytes]:
    """What the listener says first, and the certificate that it shows."""
    context = ssl.create_default_context(cafile=ca)
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return await asyncio.wait_for(reader.read(100), 30), shown
    finally:
        writer.close()


async def test_a_caller_is_encrypted_and_its_certificate_is_known(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    server, caller = authority.issue("server"), authority.issue("caller")
    async with _listening(replace(server, ca="")) as port:
        assert (await _said(port, authority.ca))[0] == b"1 0 "
    async with _listening(server) as port:
        assert (await _said(port, authority.ca, caller))[0] == b"1 1 "
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError, AssertionError)):
            assert (await _said(port, authority.ca))[0], "without a certificate nothing is said"
    async with _listening(replace(server, optional=True)) as port:
        assert (await _said(port, authority.ca, caller))[0] == b"1 1 "
        assert (await _said(port, authority.ca))[0] == b"1 0 "
        foreign = Authority.make(tmp_path / "foreign").issue("foreign")
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError, AssertionError)):
            assert (await _said(port, authority.ca, foreign))[0], "a certificate of another authority is refused"
    async with _listening(None) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read(100) == b"0 0 "
        writer.close()


async def test_new_files_are_used_from_the_next_connection_on_and_bad_ones_never(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "ca")
    first, second = authority.issue("first"), authority.issue("second")
    async with _listening(replace(first, ca="")) as port:
        before = (await _said(port, authority.ca))[1]
        for new, old in ((second.certificate, first.certificate), (second.key, first.key)):
            os.replace(new, old)
        after = (await _said(port, authority.ca))[1]
        assert before != after
        shutil.copyfile(authority.ca, first.certificate)  # of another key
        assert (await _said(port, authority.ca))[1] == after


async def test_another_authority_of_callers_is_used_from_the_next_connection_on(tmp_path: Path) -> None:
    old, new = Authority.make(tmp_path / "old"), Authority.make(tmp_path / "new")
    trusted = tmp_path / "trusted.pem"
    shutil.copyfile(old.ca, trusted)
    server, known, later = old.issue("server"), old.issue("known"), new.issue("later")
    async with _listening(replace(server, ca=str(trusted))) as port:
        assert (await _said(port, old.ca, known))[0] == b"1 1 "
        shutil.copyfile(new.ca, trusted)
        assert (await _said(port, old.ca, later))[0] == b"1 1 "
        with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
            assert (await _said(port, old.ca, known))[0], "its authority is trusted no more"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_session_is_resumed_past_its_authority(tmp_path: Path, version: ssl.TLSVersion) -> None:
    """A session brings the certificate that was verified when it began, also when its authority is trusted no more."""
    old, new = Authority.make(tmp_path / "old"), Authority.make(tmp_path / "new")
    trusted = tmp_path / "trusted.pem"
    shutil.copyfile(old.ca, trusted)
    server, known = old.issue("server"), old.issue("known")
    context = ssl.create_default_context(cafile=old.ca)
    context.load_cert_chain(known.certificate, known.key)
    context.minimum_version = context.maximum_version = version

    def said(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None, bool]:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as tls,
        ):
            answer = tls.recv(100), tls.session, bool(tls.session_reused)
            if answer[0]:
                tls.unwrap()  # a session whose connection was cut is resumed only until an end has noticed
            return answer

    async with _listening(replace(server, ca=str(trusted))) as port:
        first, session, _ = await asyncio.to_thread(said, port, None)
        again, _, reused = await asyncio.to_thread(said, port, session)
        assert (first, again) == (b"1 1 ", b"1 1 ")
        assert reused is (version is ssl.TLSVersion.TLSv1_2)
        shutil.copyfile(new.ca, trusted)
        for resumed in (session, None):
            with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
                assert (await asyncio.to_thread(said, port, resumed))[0], "the connection is closed without an answer"


def test_files_that_do_not_fit_are_refused_with_their_names(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    one, other = authority.issue("one"), authority.issue("other")
    for tls in (replace(one, key=other.key), replace(one, certificate=str(tmp_path / "none.pem"))):
        with pytest.raises(InvalidConfiguration, match=r"\.pem"):
            make_listener_tls_context(tls)


async def test_an_address_has_so_many_connections_and_no_more() -> None:
    async with _listening(None, CallerLimits(streams_per_address=2)) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        assert [await reader.read(100) for reader, _ in held] == [b"0 0 ", b"0 0 "]
        assert await _first_words(port) == b""
        held[0][1].close()
        async with asyncio.timeout(10):
            while not (said := await _first_words(port)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert said == b"0 0 "
        held[1][1].close()


async def _first_words(port: int) -> bytes:
    """Empty: the connection was refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        return await reader.read(100)
    except ConnectionError:
        return b""
    finally:
        writer.close()
