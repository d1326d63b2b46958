"""TLS with certificates of the user's own CA: the files are read, and checked as the peer will check them.

Both ends present a certificate, and `ssl` verifies both. The names in a certificate are checked later, when the rank of
the peer is known: `aiocoll.security.names`. Everything else works as without a CA, including the job key.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from os import stat
from typing import NoReturn

from aiocoll.credentials import TlsFiles, read_private
from aiocoll.log import logger
from aiocoll.security.names import WrongCertificateError, certificate_names, check_job, check_names
from aiocoll.security.tls import OwnCertificate, Tls, load_chain, make_own_contexts, new_context
from aiocoll.security.tls_trouble import EXPIRED, NOT_YET, PURPOSE, WRONG_PURPOSE, clock, format_utc

__all__ = ["RenewedContexts", "prepare", "read"]

#: Maximum size of a file in bytes, far above the size of any key or certificate chain.
_MAX_PEM = 1 << 20
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(b"-----BEGIN [A-Z ]*PRIVATE KEY-----.+?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)
#: OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the module `ssl` does not define.
_NO_CHECK_TIME = 0x200000


def prepare(files: TlsFiles | None, job: str, name: str) -> Tls:
    """Return the TLS contexts for later connections. Read and check the user's files, if there are any.

    Args:
        files: the files of the user's CA; None: use the certificate that this process has made for itself.
        job: the id of the job.
        name: the name that the certificate must have, see `aiocoll.security.names`.

    Raises:
        ValueError: the files cannot be used; the message contains the file and the remedy.
        BackendUnavailableError: without files, the package `cryptography` is not installed.
    """
    if files is None:
        return make_own_contexts()
    check_job(job)
    tls = read(files)
    assert tls.own is not None
    try:
        check_names(tls.own.names, name, f"tls_certificate={files.certificate!r}")
    except WrongCertificateError as error:
        raise ValueError(f"{error}; add the name to the certificate, or fix job_id={job!r} (AIOCOLL_JOB_ID)") from None
    return tls._replace(job=job)


def read(files: TlsFiles) -> Tls:
    """Return the result of `prepare`, but without checking the names in the certificate.

    Raises:
        ValueError: as `prepare`.
    """
    authority = _certificates(files.ca, "tls_ca")
    chain = _certificates(files.certificate, "tls_certificate")
    private = "\n".join(chain).encode() + b"\n" + _key(files.key)
    server, client = new_context(ssl.PROTOCOL_TLS_SERVER), new_context(ssl.PROTOCOL_TLS_CLIENT)
    for context in (server, client):
        _load(context, private, files)
    certificate, own = _inspect(server, chain[0], files)
    client.check_hostname = False
    for context in (server, client):
        context.verify_mode = ssl.CERT_REQUIRED
        _load_authority(context, authority, files)
    _handshake(server, client, files)
    return Tls(server, client, certificate, own=own)


class RenewedContexts:
    """The newest usable TLS contexts of a running process whose certificate files may be replaced.

    Args:
        files: the files, if there are any.
        load: reads them, see `prepare`.
    """

    def __init__(self, files: TlsFiles | None, load: Callable[[], Tls]) -> None:
        self._files = files
        self._load = load
        self._tls: Tls | None = None
        self._version: object = None

    def get(self) -> Tls:
        """Return the newest usable TLS contexts. If replaced files are unusable, log that once.

        Raises:
            ValueError, BackendUnavailableError: see `prepare`.
        """
        version = None if self._files is None else tuple(map(_version, self._files))
        if self._tls is None or version != self._version:
            try:
                self._tls = self._load()
            except ValueError as error:
                if self._tls is None:
                    raise
                logger.warning("the previous certificate files stay in use: %s", error)
            self._version = version
        return self._tls


def _version(path: str) -> tuple[int, int, int]:
    """Return a value that changes when a file is replaced or written."""
    try:
        found = stat(path)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_ino, found.st_size


def _certificates(path: str, label: str) -> list[str]:
    """Return the certificates in a file, ignoring the file's other content."""
    try:
        with open(path, "rb") as file:
            found = _CERTIFICATE.findall(file.read(_MAX_PEM).decode("latin-1"))
    except OSError as error:
        raise ValueError(f"{label}={path!r}: cannot be read ({error.strerror})") from None
    if not found:
        raise ValueError(
            f"{label}={path!r} contains no certificate; convert it to PEM (openssl x509 -inform DER -in OLD -out NEW)"
        )
    return found


def _key(path: str) -> bytes:
    found = _KEY.search(read_private(path, "tls_key", _MAX_PEM))
    if found is None:
        raise ValueError(
            f"tls_key={path!r} contains no private key; convert it to PEM (openssl pkey -inform DER -in OLD -out NEW)"
        )
    if b"ENCRYPTED" in found[0]:
        raise ValueError(f"tls_key={path!r} has a passphrase; remove it (openssl pkey -in OLD -out NEW)")
    return found[0]


def _load_authority(context: ssl.SSLContext, authority: list[str], files: TlsFiles) -> None:
    try:
        context.load_verify_locations(cadata="\n".join(authority))
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ValueError(f"tls_ca={files.ca!r}: OpenSSL cannot read a certificate in it ({reason})") from None


def _load(context: ssl.SSLContext, chain: bytes, files: TlsFiles) -> None:
    try:
        load_chain(context, chain)
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if "MISMATCH" in reason:
            raise ValueError(
                f"tls_key={files.key!r} does not match tls_certificate={files.certificate!r}: it is the key of another "
                "certificate, or only one of the two files was replaced; use the key that belongs to the certificate"
            ) from None
        raise ValueError(
            f"tls_certificate={files.certificate!r} with tls_key={files.key!r}: OpenSSL cannot use them ({reason})"
        ) from None


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, files: TlsFiles) -> ssl.SSLObject:
    """Connect two TLS contexts to each other in memory; return the client's end."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = client.wrap_bio(coming, going)
    dialled = server.wrap_bio(going, coming, server_side=True)
    try:
        for end in (dialling, dialled, dialling, dialled):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        _refuse(error, client, files)
    except ssl.SSLError as error:
        raise ValueError(
            f"tls_certificate={files.certificate!r} cannot be used for TLS 1.3: {error.reason or error}"
        ) from None
    return dialling


def _refuse(error: ssl.SSLCertVerificationError, context: ssl.SSLContext, files: TlsFiles) -> NoReturn:
    """Raise an error that explains why this process's certificate is unusable. Its dates were checked before."""
    where = f"tls_certificate={files.certificate!r}"
    if error.verify_code in (EXPIRED, NOT_YET):
        ends = (
            " to ".join(map(_format_time, (each["notBefore"], each["notAfter"]))) for each in context.get_ca_certs()
        )
        raise ValueError(
            f"{where}: a certificate between it and the CA, or one of tls_ca={files.ca!r} (valid from "
            f"{', '.join(ends)}), is not valid at {format_utc(clock())}, by the clock of this host"
        ) from None
    if error.verify_code == WRONG_PURPOSE:
        raise ValueError(f"{where}: {PURPOSE}") from None
    raise ValueError(
        f"{where} is not signed by a CA in tls_ca={files.ca!r} ({error.verify_message}); append intermediate "
        "certificates to the file of the certificate"
    ) from None


def _format_time(text: object) -> str:
    return format_utc(ssl.cert_time_to_seconds(str(text)))


def _inspect(server: ssl.SSLContext, certificate_pem: str, files: TlsFiles) -> tuple[bytes, OwnCertificate]:
    """Return this process's certificate and its content; raise an error if it has expired or is not valid yet.

    `ssl` describes only a certificate that it has verified. So `client` trusts the certificate itself, whatever its
    dates.
    """
    client = new_context(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    _load_authority(client, [certificate_pem], files)
    seen = _handshake(server, client, files)
    certificate, found = seen.getpeercert(binary_form=True), seen.getpeercert()
    assert certificate is not None
    assert found is not None
    begins, ends = (float(ssl.cert_time_to_seconds(str(found[name]))) for name in ("notBefore", "notAfter"))
    trouble = "has expired" if ends < clock() else "is not valid yet" if clock() < begins else None
    if trouble is not None:
        raise ValueError(
            f"tls_certificate={files.certificate!r} {trouble}: it is valid from {format_utc(begins)} until "
            f"{format_utc(ends)}, and the clock of this host shows {format_utc(clock())}; renew it, or set the clock"
        )
    return certificate, OwnCertificate(files.certificate, certificate_names(found), begins, ends)
