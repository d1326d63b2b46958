"""TLS with certificates of a certificate authority (CA) of the user: accepted and refused certificates."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from aiocoll import (
    AuthenticationError,
    GroupOptions,
    HashStore,
    ProcessGroup,
    TCPStore,
    new_group,
)
from aiocoll.credentials import TlsFiles, tls_files
from aiocoll.security.names import WrongCertificateError, check_names, part_name, rank_name, store_name
from aiocoll.security.tls import Tls, binding, make_own_contexts
from aiocoll.security.user_ca import RenewedContexts, prepare, read
from aiocoll.store import StoreServer
from aiocoll.transport.byte_stream import receive_message, send_message
from aiocoll.transport.stream.tls_stream import TlsStream, open_tls

from .certificates import Authority, as_options
from .internals import Limits, comm_of, replace_parts
from .ranks import wait_until
from .transport.test_stream import settle, started

KEY = b"a key of this test and no other"
ANY, STORE = "aiocoll://train/rank/*", "aiocoll://train/store"
RANK0 = "aiocoll://train/rank/0"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def certificate_in(files: TlsFiles) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(files.certificate).read_text())


# -- names


@pytest.mark.parametrize(
    ("names", "expected", "taken"),
    [
        (["aiocoll://train/rank/3"], rank_name("train", 3), True),
        (["aiocoll://train/rank/2", "aiocoll://train/rank/3"], rank_name("train", 3), True),
        ([ANY], rank_name("train", 3), True),
        ([ANY, STORE], rank_name("train", 3), True),
        (["aiocoll://train/rank/33"], rank_name("train", 3), False),
        (["aiocoll://train/rank/3"], rank_name("train", 33), False),
        (["aiocoll://train/rank/03", "aiocoll://train/rank/3 "], rank_name("train", 3), False),
        (["aiocoll://train/rank", "aiocoll://train/", "aiocoll://train/rank/"], rank_name("train", 3), False),
        (["aiocoll://Train/rank/3", "AIOCOLL://train/rank/3"], rank_name("train", 3), False),
        (["aiocoll://*/rank/*", "aiocoll://*/rank/3", "aiocoll://other/rank/*"], rank_name("train", 3), False),
        (["aiocoll://train2/rank/3", "aiocoll://trai/rank/3"], rank_name("train", 3), False),
        ([STORE], rank_name("train", 3), False),
        ([], rank_name("train", 3), False),
        ([STORE], store_name("train"), True),
        ([ANY, "aiocoll://train/rank/store", "aiocoll://other/store"], store_name("train"), False),
        ([STORE], part_name("train"), True),
        (["aiocoll://train/rank/7"], part_name("train"), True),
        ([ANY], part_name("train"), True),
        (["aiocoll://trainer/rank/7", "aiocoll://train", "aiocoll://other/store"], part_name("train"), False),
    ],
)
def test_certificate_names_that_the_documentation_lists_are_accepted(
    names: list[str], expected: str, taken: bool
) -> None:
    if taken:
        check_names(names, expected, "it")
    else:
        with pytest.raises(WrongCertificateError, match=rf"^it (names|has no) .* but {re.escape(expected)}.* was exp"):
            check_names(names, expected, "it")


def test_refusal_of_a_certificate_shows_presented_and_expected_names() -> None:
    names = [rank_name("train", rank) for rank in range(9)]
    with pytest.raises(WrongCertificateError) as caught:
        check_names(names, store_name("train"), "it")
    shown = ", ".join(names[:4])
    assert str(caught.value) == f"it names {shown} and 5 more, but {STORE} was expected"
    with pytest.raises(WrongCertificateError, match=r"names aiocoll://x/store, but aiocoll://train/\.\.\. was exp"):
        check_names(["aiocoll://x/store"], part_name("train"), "it")


def test_certificate_names_of_other_forms_are_ignored(authority: Authority) -> None:
    with pytest.raises(ValueError, match=r"has no URI of the form aiocoll://JOB/\.\.\. as a name"):
        prepare(authority.make("spiffe://train/rank/0", "https://train/rank/0", f"DNS:{RANK0}"), "train", RANK0)


@pytest.mark.parametrize("job", ["", "a/b", "a b", "*", "ä", "train\n"])
def test_job_id_that_cannot_be_part_of_a_certificate_name_is_refused(authority: Authority, job: str) -> None:
    with pytest.raises(ValueError, match=r"^job_id='.*give it an id of letters, digits .* AIOCOLL_JOB_ID"):
        prepare(authority.make(ANY), job, rank_name(job, 0))


@pytest.mark.parametrize("job", ["train", "10.0.0.1:29500", "fd77::1:29500", "run_7.B-2"])
def test_job_id_of_letters_digits_and_addresses_is_accepted_in_certificates(authority: Authority, job: str) -> None:
    """Check also addresses with ports, which `aiocoll run` uses as job ids on several hosts."""
    assert prepare(authority.make(rank_name(job, 0)), job, rank_name(job, 0)).job == job


# -- files


def test_certificate_files_of_a_user_ca_are_read(authority: Authority) -> None:
    files = authority.make(ANY, STORE, days=(-3, 10))
    tls = prepare(files, "train", RANK0)
    assert tls.own is not None
    assert (tls.own.path, tls.own.names) == (files.certificate, (ANY, STORE))
    assert tls.own.ends - tls.own.begins == 13 * 86400
    assert tls.certificate == certificate_in(files)
    for context in (tls.server, tls.client):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert len(context.get_ca_certs()) == 1, "the CAs of the system are trusted too"


def test_certificate_and_key_may_be_in_one_file_with_other_text(authority: Authority) -> None:
    """Write certificate and key to one file, which a program can replace by a single rename."""
    files = authority.make(ANY)
    key = Path(files.key)
    key.write_bytes("Rang für alle\n".encode() + key.read_bytes() + Path(files.certificate).read_bytes())
    assert prepare(files._replace(certificate=files.key), "train", RANK0).own is not None


def test_certificate_of_an_intermediate_ca_is_accepted_with_its_chain(tmp_path: Path, authority: Authority) -> None:
    between = Authority(tmp_path, "between", above=authority)
    files = between.make(ANY, ca=authority.file)
    with pytest.raises(
        ValueError, match=r"not signed by a CA in tls_ca=.*append intermediate certificates to the file"
    ):
        prepare(files, "train", RANK0)
    with open(files.certificate, "ab") as file:
        file.write(between.file.read_bytes())
    assert prepare(files, "train", RANK0).own is not None


def test_rank_certificate_cannot_sign_other_certificates(tmp_path: Path, authority: Authority) -> None:
    rank = Authority(tmp_path, "rank", above=authority, proper=False)
    files = rank.make(RANK0, ca=authority.file)
    with open(files.certificate, "ab") as file:
        file.write(rank.file.read_bytes())
    with pytest.raises(ValueError, match="is not signed by a CA in tls_ca="):
        prepare(files, "train", RANK0)


def test_certificate_of_the_process_is_used_if_no_files_are_given() -> None:
    assert prepare(None, "", "") is make_own_contexts()


Change = Callable[[TlsFiles], TlsFiles | None]


def with_text(name: str, text: bytes, mode: int = 0o600) -> Change:
    def change(files: TlsFiles) -> TlsFiles:
        path = Path(getattr(files, name)).with_name("wrong")
        path.touch(mode=mode)
        path.write_bytes(text)
        return files._replace(**{name: str(path)})

    return change


def with_symbolic_link(files: TlsFiles) -> TlsFiles:
    link = Path(files.key).with_name("link")
    link.symlink_to(files.key)
    return files._replace(key=str(link))


def with_other_key(files: TlsFiles) -> TlsFiles:
    other = Authority(Path(files.ca).parent, "other")
    return files._replace(key=other.make(file="other").key)


def with_passphrase(files: TlsFiles) -> None:
    path = Path(files.key)
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"a passphrase")
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files._replace(ca="/no/ca"), "tls_ca='/no/ca': cannot be read (No such file or directory)"),
        (with_text("ca", b"\x30\x82"), "wrong' contains no certificate; convert it to PEM (openssl x509 -inform DER"),
        (
            with_text("ca", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            "wrong': OpenSSL cannot read a certificate in it",
        ),
        (lambda files: files._replace(certificate="/no/c"), "tls_certificate='/no/c': cannot be read (No such file"),
        (lambda files: files._replace(certificate="/"), "tls_certificate='/': cannot be read (Is a directory)"),
        (with_text("certificate", b"hello"), "tls_certificate='"),
        (with_text("certificate", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"), "cannot"),
        (lambda files: files._replace(key="/no/key"), "tls_key='/no/key': cannot be opened (No such file"),
        (with_text("key", b"hello"), "wrong' contains no private key; convert it to PEM (openssl pkey -inform DER"),
        (
            with_text("key", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
            "OpenSSL cannot use them",
        ),
        (with_text("key", b"hello", 0o640), "wrong': other users may access it; chmod 600 it"),
        (
            with_symbolic_link,
            "link': cannot be opened (Too many levels of symbolic links); symbolic links are not followed",
        ),
        (lambda files: os.chmod(files.key, 0o604), "own.key': other users may access it; chmod 600 it"),
        (with_other_key, "does not match tls_certificate='"),
        (with_passphrase, "own.key' has a passphrase; remove it (openssl pkey -in OLD -out NEW)"),
    ],
)
def test_unusable_certificate_files_are_refused(authority: Authority, change: Change, message: str) -> None:
    files = authority.make(ANY)
    with pytest.raises(ValueError, match="tls_") as caught:
        prepare(change(files) or files, "train", RANK0)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("days", "message"),
    [
        ((-20, -2), "has expired: it is valid from 20.. UTC until 20.. UTC, and the clock of this host shows 20.. UTC"),
        ((2, 20), "is not valid yet: it is valid from 20.. UTC until 20.. UTC, and the clock of this host shows 20.."),
    ],
)
def test_error_about_certificate_validity_shows_dates_and_the_local_clock(
    authority: Authority, days: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match="tls_certificate='") as caught:
        prepare(authority.make(ANY, days=days), "train", RANK0)
    assert message in re.sub(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d", "20..", str(caught.value))


@pytest.mark.parametrize("days", [(-20, -2), (2, 20)])
def test_expired_or_not_yet_valid_ca_is_refused(tmp_path: Path, days: tuple[int, int]) -> None:
    files = Authority(tmp_path, days=days).make(ANY)
    with pytest.raises(ValueError, match=r"one of tls_ca='.*' \(valid from 20.* UTC to 20.* UTC\), is not valid at 20"):
        prepare(files, "train", RANK0)


@pytest.mark.parametrize("use", [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
def test_certificate_must_allow_both_server_and_client_use(authority: Authority, use: Any) -> None:
    with pytest.raises(ValueError, match=r"every rank dials and is dialled.*extendedKeyUsage=serverAuth,clientAuth"):
        prepare(authority.make(ANY, uses=[use]), "train", RANK0)
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    assert prepare(authority.make(ANY, uses=both), "train", RANK0).own is not None


def test_own_certificate_not_signed_by_tls_ca_is_refused(tmp_path: Path, authority: Authority) -> None:
    files = authority.make(ANY, ca=Authority(tmp_path, "another").file)
    with pytest.raises(ValueError, match=r"is not signed by a CA in tls_ca='.*another\.pem'"):
        prepare(files, "train", RANK0)


def test_own_certificate_without_the_own_rank_name_is_refused(authority: Authority) -> None:
    with pytest.raises(
        ValueError, match=r"names aiocoll://train/rank/1, but .*/rank/0 was expected; add the name to the c"
    ):
        prepare(authority.make(rank_name("train", 1)), "train", RANK0)


# -- options


def test_certificate_file_options_must_be_given_together() -> None:
    assert tls_files(None, None, None) is None
    assert tls_files("a", "b", "c") == TlsFiles("a", "b", "c")
    message = r"tls_ca='a' is given without tls_certificate and tls_key \(AIOCOLL_TLS_CERTIFICATE, AIOCOLL_TLS_KEY\)"
    with pytest.raises(ValueError, match=message):
        GroupOptions.resolve(None, {"AIOCOLL_TLS_CA": "a"})
    with pytest.raises(ValueError, match=r"tls_ca='a' is given without tls_key \(AIOCOLL_TLS_KEY\): .* all three, or"):
        GroupOptions.resolve(GroupOptions(tls_ca="a"), {"AIOCOLL_TLS_CERTIFICATE": "b"})
    with pytest.raises(ValueError, match="without tls_ca"):
        TCPStore("127.0.0.1", 1, tls_key="c")
    with pytest.raises(ValueError, match="without tls_ca"):
        StoreServer(tls_key="c")
    with pytest.raises(TypeError, match="tls_ca must be a str or None, not PosixPath"):
        TCPStore("127.0.0.1", 1, tls_ca=Path("x"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tls_key must be a str or None, not bytes"):
        GroupOptions(tls_key=b"x")  # type: ignore[arg-type]


def test_certificate_file_options_are_read_from_the_environment(authority: Authority) -> None:
    names = {"AIOCOLL_TLS_CA": "a", "AIOCOLL_TLS_CERTIFICATE": "b", "AIOCOLL_TLS_KEY": "c", "AIOCOLL_JOB_ID": "d"}
    options = GroupOptions.resolve(None, names)
    assert (options.tls_ca, options.tls_certificate, options.tls_key, options.job_id) == ("a", "b", "c", "d")


# -- errors at the two ends of a connection


@asynccontextmanager
async def connected_streams(dialled: Tls, dialling: Tls) -> AsyncIterator[tuple[TlsStream, TlsStream]]:
    """Yield the TLS streams of both ends of a TCP connection; raise `RefusedError` if an end refuses."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
    for end in ends:
        end.setblocking(False)
    opening = [open_tls(dialling, loop, ends[0], dialled=True), open_tls(dialled, loop, ends[1], dialled=False)]
    streams = await asyncio.gather(*opening, return_exceptions=True)
    opened = [stream for stream in streams if isinstance(stream, TlsStream)]
    try:
        for stream in streams:
            if isinstance(stream, BaseException):
                raise RefusedError([await error_of(stream) for stream in streams])
        yield opened[0], opened[1]
    finally:
        for stream in opened:
            stream.close()


class RefusedError(Exception):
    """An exception with the errors of both ends of a connection, the dialling end first."""


async def error_of(stream: TlsStream | BaseException) -> BaseException:
    """Return the error with which a stream fails: the given error, or the error of the next receive."""
    if isinstance(stream, BaseException):
        return stream
    with suppress(OSError):
        send_message(stream, b"hello")
    try:
        await receive_message(stream, 1)
    except OSError as error:
        return error
    raise AssertionError("the stream has not ended")


async def errors_at_both_ends(dialled: Tls, dialling: Tls) -> list[str]:
    """Let two ends refuse each other; return the error texts of both, the dialling end first."""
    with pytest.raises(RefusedError) as caught:
        async with connected_streams(dialled, dialling):
            pass
    return [f"{type(error).__name__}: {error}" for error in caught.value.args[0]]


async def test_both_ends_verify_user_certificates_and_bind_the_handshake_to_the_listeners(authority: Authority) -> None:
    first = prepare(authority.make(rank_name("train", 0), file="0"), "train", rank_name("train", 0))
    second = prepare(authority.make(rank_name("train", 1), file="1"), "train", rank_name("train", 1))
    async with connected_streams(first, second) as (dialling, dialled):
        assert dialling.bound == dialled.bound == binding(first.certificate)
        dialling.check_rank(0)
        dialled.check_rank(1)
        for stream, other in ((dialling, 1), (dialled, 0)):
            message = f"the certificate of 127.0.0.1 names .*, but aiocoll://train/rank/{other} was expected"
            with pytest.raises(WrongCertificateError, match=message):
                stream.check_rank(other)


def unchecked_tls(files: TlsFiles, monkeypatch: pytest.MonkeyPatch) -> Tls:
    """Return TLS contexts whose own certificate is not checked, like those of a malicious process."""
    with monkeypatch.context() as patch:
        replace_parts(patch, refuse_certificate=lambda *_: None, certificate_clock=lambda: Authority.middle(files))
        return read(files)._replace(job="train")


CLOCK = "by the clock of this host, which shows 20"
REFUSES = "WrongCertificateError: 127.0.0.1 rejects the certificate of this process"
CERTIFICATE = "WrongCertificateError: the certificate of 127.0.0.1"


@pytest.mark.parametrize(
    ("days", "verdict", "alert"),
    [
        ((-20, -2), f"{CERTIFICATE} (or one that has signed it) has expired {CLOCK}", f"{REFUSES} as expired: tls_"),
        ((2, 20), f"{CERTIFICATE} (or one that has signed it) is not valid yet {CLOCK}", f"{REFUSES} as invalid"),
    ],
)
@pytest.mark.parametrize("by_dialling", [False, True])
async def test_certificate_errors_due_to_different_clocks_are_reported_at_both_ends(
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    days: tuple[int, int],
    verdict: str,
    alert: str,
    by_dialling: bool,
) -> None:
    good = prepare(authority.make(ANY, file="good"), "train", RANK0)
    bad = unchecked_tls(authority.make(ANY, days=days), monkeypatch)
    errors = await errors_at_both_ends(*((good, bad) if by_dialling else (bad, good)))
    refused, refusing = errors if by_dialling else errors[::-1]
    assert refusing.startswith(verdict)
    assert refused.startswith(alert)
    assert "own.pem' is valid from 20" in refused
    assert "the clock of this host shows 20" in refused


@pytest.mark.parametrize("by_dialling", [False, True])
async def test_certificate_of_another_ca_is_reported_at_both_ends(
    tmp_path: Path, authority: Authority, by_dialling: bool
) -> None:
    good = prepare(authority.make(ANY, file="good"), "train", RANK0)
    other = prepare(Authority(tmp_path, "other").make(ANY), "train", RANK0)
    dialling, dialled = await errors_at_both_ends(*((good, other) if by_dialling else (other, good)))
    assert dialling.startswith(
        f"{CERTIFICATE} is not signed by the CA in tls_ca of this process: every rank and the store need"
    )
    assert dialled.startswith(f"{REFUSES} as not signed by its CA (compare tls_ca of both): tls_certificate='")


async def test_peer_without_user_certificate_is_refused_by_a_peer_with_user_certificate(authority: Authority) -> None:
    verifying = prepare(authority.make(ANY), "train", RANK0)
    dialling, dialled = await errors_at_both_ends(verifying, make_own_contexts())
    assert dialling.startswith(
        "WrongCertificateError: 127.0.0.1 accepts only certificates of a CA: give this process the files "
    )
    assert dialled.startswith("WrongCertificateError: 127.0.0.1 presented no certificate: give it the files tls_")
    dialling, dialled = await errors_at_both_ends(make_own_contexts(), verifying)
    assert dialling.startswith(f"{CERTIFICATE} is not signed by the CA in tls_ca of this process")
    assert "ALERT_UNKNOWN_CA" in dialled


async def test_certificate_without_names_is_refused_at_both_ends(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    nameless = unchecked_tls(authority.make(file="nobody"), monkeypatch)
    async with connected_streams(nameless, nameless) as ends:
        for stream in ends:
            with pytest.raises(
                WrongCertificateError, match=r"has no URI of the form aiocoll://JOB/\.\.\. as a name, but"
            ):
                stream.check_rank(0)


async def test_tls_refusal_reason_is_received_by_a_peer_that_cannot_send(authority: Authority, limits: Limits) -> None:
    limits(dial_retry_time=0.02)
    verifying = prepare(authority.make(ANY), "train", RANK0)
    is_refused = asyncio.Event()

    async def opened(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> TlsStream:
        is_refused.clear()
        try:
            stream = await open_tls(make_own_contexts() if dialled else verifying, loop, sock, dialled=dialled)
        except OSError:
            is_refused.set()
            raise
        if dialled:
            await is_refused.wait()
        return stream

    async with started(2, "tcp", open_stream=opened, connect_timeout=2.0) as (dialling, dialled):
        with pytest.raises(AuthenticationError, match="accepts only certificates of a CA"):
            await dialling.connect(dialled)
        await settle(dialled)


# -- ranks and stores


def options(files: TlsFiles, rank: int = 0, job: str = "train", encryption: str = "tls", **more: Any) -> GroupOptions:
    """Return the options of a rank that uses TCP and the given certificate files."""
    how: Any = {"transport": "tcp", "job_key": KEY, "bind": "127.0.0.1", "encryption": encryption, "job_id": job}
    return GroupOptions(**how, **as_options(files), **more)


async def total(pg: ProcessGroup, certificates: list[bytes] | None = None) -> float:
    """Check that all connections of a group are encrypted; return the last element of an allreduce."""
    result = await pg.allreduce(np.full(100_000, pg.rank() + 1.0))
    assert await pg.alltoall_object([pg.rank()] * pg.size()) == list(range(pg.size()))
    streams = [link._stream for link in comm_of(pg).endpoint.control._links.values()]  # type: ignore[attr-defined]
    assert all(isinstance(stream, TlsStream) for stream in streams)
    if certificates is not None:
        certificates.extend(stream.sock.getpeercert(binary_form=True) for stream in streams)
    await pg.barrier()
    return float(result[-1])


async def meet(each: Sequence[GroupOptions], timeout: float = 20) -> list[Any]:
    """Let ranks with these options form a group; return the result of `total`, or the error, for each rank."""
    store = HashStore()

    async def rank(rank: int) -> float:
        group = new_group(store=store, rank=rank, world_size=len(each), options=each[rank], timeout=timeout)
        async with group as pg:
            return await total(pg)

    results = await asyncio.gather(*map(rank, range(len(each))), return_exceptions=True)
    await store.aclose()
    return results


async def failure(each: Sequence[GroupOptions]) -> BaseException | None:
    """Let ranks with these options meet; return the error of the last rank, without waiting for other ranks."""
    store = HashStore()
    groups = [new_group(store=store, rank=rank, world_size=len(each), options=each[rank]) for rank in range(len(each))]

    async def join(group: new_group) -> None:
        await group

    *others, last = (asyncio.create_task(join(group)) for group in groups)
    await asyncio.wait([last], timeout=20)
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    await store.aclose()
    return last.exception()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("names", ["rank", "any", "all"])
async def test_ranks_with_user_certificates_meet(authority: Authority, world_size: int, names: str) -> None:
    """Use certificates with the name of one rank, with a wildcard name, or with the names of all ranks."""
    every = [rank_name("train", rank) for rank in range(world_size)]
    has = {"rank": [[name] for name in every], "any": [[ANY]] * world_size, "all": [every] * world_size}[names]
    files = [authority.make(*has[rank], file=str(rank)) for rank in range(world_size)]
    assert await meet([options(each) for each in files]) == [world_size * (world_size + 1) / 2] * world_size


async def test_auto_encryption_between_hosts_uses_the_certificate_files(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hide the package `cryptography`, so that no rank can make a certificate itself."""
    each = [options(authority.make(ANY), encryption="auto", host_id=host) for host in "ab"]
    make_own_contexts.cache_clear()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert await meet(each) == [3.0, 3.0]


async def test_ranks_with_user_certificates_meet_at_a_store_given_by_address(authority: Authority, port: int) -> None:
    """Let rank 0 serve the TCP store with the certificate that its group options name."""
    files = [authority.make(RANK0, STORE, file="0"), authority.make(rank_name("train", 1), file="1")]

    async def rank(rank: int) -> float:
        method = f"tcp://127.0.0.1:{port}"
        group = new_group(init_method=method, rank=rank, world_size=2, options=options(files[rank]), timeout=20)
        async with group as pg:
            return await total(pg)

    assert await asyncio.gather(rank(0), rank(1)) == [3, 3]


async def test_rank_with_unusable_certificate_files_is_reported_to_all_ranks(authority: Authority) -> None:
    good = authority.make(ANY)
    for bad, message in (
        (authority.make(rank_name("train", 7), file="bad"), "names aiocoll://train/rank/7, but .*rank/1 was expected"),
        (authority.make(ANY, file="old", days=(-9, -2)), "old.pem' has expired: it is valid from"),
        (good._replace(key="/no/key"), "tls_key='/no/key': cannot be opened"),
    ):
        own, other = reversed(await meet([options(good), options(bad)]))
        assert isinstance(own, ValueError)
        assert re.search(message, str(own))
        assert re.search(f"rank 1 could not join: .*{message}", str(other))


def skip_own_check(files: TlsFiles, job: str, name: str) -> Tls:
    """Return TLS contexts whose certificate names are not checked, like those of a malicious rank."""
    return read(files)._replace(job=job)


@pytest.mark.parametrize("names", [[rank_name("train", 7)], ["aiocoll://other/rank/*"], [STORE], []])
async def test_certificate_without_the_rank_is_refused_at_both_ends(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, names: list[str]
) -> None:
    """Let rank 1 dial rank 0 with a certificate that does not name rank 1."""
    good, bad = authority.make(ANY), authority.make(*names, file="bad")

    replace_parts(monkeypatch, prepare_rank_tls=skip_own_check)
    error = await failure([options(good), options(bad)])
    assert isinstance(error, AuthenticationError)
    assert "rank 0 refused the connection: the certificate of this process does not name it" in str(error)
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    shown = ", ".join(names) or "no URI"
    assert record.getMessage().startswith("rank 0 refused a connection: the certificate of 127.0.0.1 ")
    assert shown in record.getMessage()
    assert "but aiocoll://train/rank/1 was expected" in record.getMessage()


async def test_dial_of_a_rank_with_a_foreign_certificate_ends_soon(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """Let rank 1 dial rank 0, whose certificate names rank 7."""
    files = [authority.make(rank_name("train", 7), file="bad"), authority.make(ANY)]

    replace_parts(monkeypatch, prepare_rank_tls=skip_own_check)
    limits(dial_retry_time=0.05)
    error = await failure([options(each) for each in files])
    assert isinstance(error, AuthenticationError)
    message = (
        r"expected rank 0 at 127.0.0.1 port \d+, but the certificate of 127.0.0.1 names aiocoll://train/rank/7, but "
        "aiocoll://train/rank/0 was expected"
    )
    assert re.search(message, str(error)), error


@pytest.mark.parametrize("outdated", [0, 1])
async def test_rank_with_an_expired_certificate_is_named_with_its_address(
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limits: Limits,
    outdated: int,
) -> None:
    """Let rank 1 dial rank 0, while the certificate of rank 0 or rank 1 is expired."""
    limits(dial_retry_time=0.05)
    files = [authority.make(ANY, file="0"), authority.make(ANY, file="1")]
    files[outdated] = authority.make(ANY, file="old", days=(-9, -2))
    old = unchecked_tls(files[outdated], monkeypatch)
    replace_parts(
        monkeypatch, prepare_rank_tls=lambda given, *more: old if "old" in given.key else prepare(given, *more)
    )
    dialling = str(await failure([options(each) for each in files]))
    (accepting, *_) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert re.match(r"expected rank 0 at 127\.0\.0\.1 port \d+, but ", dialling)
    assert accepting.startswith("rank 0 refused a connection: ")
    owner, other = (accepting, dialling) if outdated == 0 else (dialling, accepting)
    assert "127.0.0.1 rejects the certificate of this process as expired: tls_certificate='" in owner
    assert "the certificate of 127.0.0.1 (or one that has signed it) has expired by the clock of this host" in other


@pytest.mark.parametrize("without", [0, 1])
async def test_rank_without_certificate_files_is_refused_with_a_remedy(
    authority: Authority, caplog: pytest.LogCaptureFixture, limits: Limits, without: int
) -> None:
    files = authority.make(ANY)
    each = [options(files), options(files)]
    each[without] = GroupOptions(transport="tcp", job_key=KEY, bind="127.0.0.1", encryption="tls")
    limits(dial_retry_time=0.05)
    dialling = await failure(each)
    assert isinstance(dialling, AuthenticationError)
    assert "127.0.0.1 port" in str(dialling)
    if without == 1:
        assert "accepts only certificates of a CA: give this process the files tls_ca" in str(dialling)
        assert "presented no certificate: give it the files tls_ca" in caplog.text
    else:
        assert "is not signed by the CA in tls_ca of this process" in str(dialling)


async def test_replaced_certificate_files_are_used_only_by_the_next_group(authority: Authority) -> None:
    """Replace the certificate files while a group is open. A second group shares the open connections."""
    store = HashStore()
    both = [asyncio.Barrier(2) for _ in range(4)]

    async def rank(rank: int) -> list[list[bytes]]:
        seen: list[list[bytes]] = [[], [], []]

        def make_group() -> new_group:
            return new_group(store=store, rank=rank, world_size=2, options=options(TlsFiles(*files)))

        async with make_group() as old:
            assert await total(old, seen[0]) == 3
            await both[0].wait()
            if rank == 0:
                authority.make(ANY)
            await both[1].wait()
            async with make_group() as sharing:
                assert await total(sharing, seen[1]) == 3
                shared = comm_of(sharing).endpoint.context.transport._open_stream.tls  # type: ignore[attr-defined]
                assert shared.certificate == certificate_in(files)
            assert await total(old) == 3
            await both[2].wait()
        await both[3].wait()
        async with make_group() as new:
            assert await total(new, seen[2]) == 3
        return seen

    files = authority.make(ANY)
    before = certificate_in(files)
    for seen in await asyncio.gather(rank(0), rank(1)):
        after = certificate_in(files)
        assert seen == [[before], [before], [after]]
    await store.aclose()


async def test_grown_group_uses_replaced_certificate_files(authority: Authority) -> None:
    store = HashStore()
    files = authority.make(ANY)

    async def newcomer() -> float:
        async with new_group(store=store, join=True, options=options(files), timeout=20) as pg:
            return await total(pg)

    async with new_group(store=store, rank=0, world_size=1, options=options(files)) as pg:
        authority.make(ANY)
        joining = asyncio.create_task(newcomer())
        async with await pg.grow(1) as grown:
            certificates: list[bytes] = []
            assert [await total(grown, certificates), await joining] == [3, 3]
    assert certificates == [certificate_in(files)]
    await store.aclose()


# -- stores


def stores(files: TlsFiles, job: str = "train", **more: Any) -> dict[str, Any]:
    return {"key": KEY, "job": job, "encryption": "tls", **as_options(files), **more}


async def test_store_and_clients_present_user_certificates(authority: Authority) -> None:
    server, client = authority.make(STORE, file="store"), authority.make(rank_name("train", 3))
    async with TCPStore("127.0.0.1", 0, is_master=True, **stores(server)) as master:
        async with TCPStore("127.0.0.1", master.port, **stores(client)) as store:
            await store.set("key", b"value")
        assert await master.get("key") == b"value"


async def refused_by_store(server: dict[str, Any], client: dict[str, Any]) -> str:
    """Return the error of a store client, or the problem that the client reports while it retries."""
    running = StoreServer("127.0.0.1", 0, **server)
    running.start()
    store = TCPStore("127.0.0.1", running.port, timeout=20, **client)
    opening = asyncio.create_task(store.open())
    await wait_until(lambda: opening.done() or "closes the connection" in str(store.trouble))
    opening.cancel()
    (error,) = await asyncio.gather(opening, return_exceptions=True)
    await running.aclose()
    return str(store.trouble) if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}: {error}"


WITHOUT = {"key": KEY, "job": "train", "encryption": "tls"}


async def test_client_refuses_a_store_with_a_foreign_certificate(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = stores(authority.make(STORE))
    other_job = stores(authority.make("aiocoll://other/rank/*", file="other job"), "other")
    other_ca = stores(Authority(tmp_path, "another").make(STORE, file="other"))
    for server, client, message in (
        (good, other_job, "names aiocoll://train/store, but aiocoll://other/store was expected"),
        (good, other_ca, "is not signed by the CA in tls_ca of this process"),
        (WITHOUT, good, "is not signed by the CA in tls_ca of this process"),
    ):
        said = await refused_by_store(server, client)
        assert said.startswith("StoreAuthenticationError: cannot use the store at 127.0.0.1")
        assert f": the certificate of the server {message}" in said
    rank = unchecked_tls(authority.make(ANY, file="rank"), monkeypatch)
    replace_parts(monkeypatch, prepare_server_tls=lambda *_: rank)
    said = await refused_by_store(good, good)
    assert "the certificate of the server names aiocoll://train/rank/*, but aiocoll://train/store was expected" in said


@pytest.mark.parametrize(
    ("names", "days", "logged", "refusal"),
    [
        ([ANY], (-9, -2), "(or one that has signed it) has expired by the clock of this host", None),
        ([ANY], (2, 9), "(or one that has signed it) is not valid yet by the clock of this host", None),
        (
            [],
            (-1, 9),
            "has no URI of the form aiocoll://JOB/... as a name, but aiocoll://train/... was",
            "does not name",
        ),
        (
            ["aiocoll://other/store"],
            (-1, 9),
            "names aiocoll://other/store, but aiocoll://train/... was",
            "does not name",
        ),
    ],
)
async def test_store_refuses_clients_with_invalid_certificates(
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    names: list[str],
    days: tuple[int, int],
    logged: str,
    refusal: str | None,
) -> None:
    """Let the client skip the checks of its own certificate, like a malicious client."""
    good = stores(authority.make(STORE, file="store"))
    bad = unchecked_tls(authority.make(*names, days=days), monkeypatch)
    replace_parts(monkeypatch, prepare_client_tls=lambda *_: bad)
    said = await refused_by_store(good, good)
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"refused a connection: the certificate of 127.0.0.1 {logged}" in warning
    if refusal is not None:
        assert f"the other end refused the connection: the certificate of this process {refusal}" in said
    else:
        assert "rejects the certificate of this process, and has logged the reason: tls_certificate='" in said


async def test_store_refuses_clients_without_a_certificate(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    said = await refused_by_store(stores(authority.make(STORE)), WITHOUT)
    assert "an end that accepts only certificates of a CA: then this process needs tls_ca, as every rank does" in said
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "refused a connection: 127.0.0.1 presented no certificate: give it the files tls_ca" in warning


def test_store_server_with_unusable_certificate_files_does_not_start(authority: Authority) -> None:
    files = authority.make(ANY)
    with pytest.raises(ValueError, match=r"names aiocoll://train/rank/\*, but aiocoll://train/store was expected"):
        StoreServer("127.0.0.1", 0, **stores(files)).start()
    with pytest.raises(ValueError, match=r"job_id='': certificates of your own CA name the job"):
        StoreServer("127.0.0.1", 0, **stores(files, "")).start()
    server = StoreServer("127.0.0.1", 0, **stores(files, encryption="auto"))
    server.start()  # on the loopback, this server does not encrypt
    server.close()


async def test_running_store_uses_replaced_certificate_files(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.make(STORE)
    server = StoreServer("127.0.0.1", 0, **stores(files))
    server.start()

    async def presented_certificate() -> bytes:
        async with TCPStore("127.0.0.1", server.port, timeout=5, **stores(files)) as store:
            assert store._link is not None
            certificate: bytes = store._link.transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            return certificate

    async with TCPStore("127.0.0.1", server.port, timeout=5, **stores(files)) as old:
        before = await presented_certificate()
        authority.make(STORE)
        after = await presented_certificate()
        assert before != after
        assert await presented_certificate() == after
        await old.set("key", b"value")
    await server.aclose()


def test_replacement_of_any_certificate_file_is_detected(authority: Authority) -> None:
    files = authority.make(STORE)
    renewed = RenewedContexts(files, lambda: prepare(files, "train", STORE))
    last = renewed.get()
    for path in map(Path, files):
        new = path.with_suffix(".new")
        new.write_bytes(path.read_bytes())
        new.chmod(0o600)
        new.replace(path)
        assert renewed.get() is not last, path
        last = renewed.get()
        assert renewed.get() is last


def test_unusable_replacement_certificate_files_are_not_used(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    files = authority.make(STORE)
    renewed = RenewedContexts(files, lambda: prepare(files, "train", STORE))
    first = renewed.get()
    assert renewed.get() is first
    os.chmod(files.key, 0o644)
    Path(files.certificate).write_text("half of it")
    for _ in range(3):
        assert renewed.get() is first
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the previous certificate files stay in use: tls_certificate='")
    Path(files.key).unlink()
    assert renewed.get() is first
    authority.make(STORE)
    assert renewed.get() is not first
    Path(files.certificate).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        RenewedContexts(files, lambda: prepare(files, "train", STORE)).get()
