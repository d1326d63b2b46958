"""TLS 1.3 between hosts: the TLS contexts of this process, and the binding of a handshake to its connection.

Without certificates of the user's own CA (`aiocoll.security.user_ca`), each process makes a certificate for itself.
That certificate proves nothing: its names are not checked, and it lives as long as the process. The handshake binds it
to the job key: both ends mix the hash of the dialled end's certificate into the key that they prove (`binding`). So an
attacker between them, with a different certificate, can neither prove the job key nor reuse the proofs of either end.
"""

from __future__ import annotations

import errno
import hashlib
import os
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, NamedTuple, Protocol

from aiocoll.errors import BackendUnavailableError, RendezvousError
from aiocoll.security.keys import is_loopback

__all__ = [
    "OwnCertificate",
    "Tls",
    "TlsOptions",
    "agreed",
    "binding",
    "is_encrypted",
    "load_chain",
    "make_own_contexts",
    "new_context",
]

#: Validity of a self-signed certificate before its creation (clock differences between hosts) and after it (longer than
#: a process lives). Peers do not check the validity.
_SKEW, _LIFE = timedelta(days=1), timedelta(days=3650)


class TlsOptions(Protocol):
    """The group options for encryption; see `aiocoll.GroupOptions`."""

    @property
    def job_id(self) -> str | None:
        """Return the job id that must be in the certificates' names."""

    @property
    def encryption(self) -> str:
        """Return the encryption mode of connections: "auto", "tls" or "none"."""

    @property
    def tls_ca(self) -> str | None:
        """Return the path of the CA certificates."""

    @property
    def tls_certificate(self) -> str | None:
        """Return the path of this rank's certificate."""

    @property
    def tls_key(self) -> str | None:
        """Return the path of this rank's private key."""


class OwnCertificate(NamedTuple):
    """A certificate that the user has given: its file, its names, and its validity in seconds since 1970."""

    path: str
    names: tuple[str, ...]
    begins: float
    ends: float


class Tls(NamedTuple):
    """The TLS contexts of this process.

    Attributes:
        server: the context of the end that is dialled.
        client: the context of the end that dials.
        certificate: the certificate of this process (DER).
        job: the job id that certificates must name; None if names are not checked.
        own: the user's certificate, if there is one.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes
    job: str | None = None
    own: OwnCertificate | None = None


@cache
def make_own_contexts() -> Tls:
    """Return TLS contexts with a self-signed certificate. The first call takes up to a second.

    Raises:
        BackendUnavailableError: the package `cryptography` is not installed.
    """
    certificate, chain = _certificate()
    server = new_context(ssl.PROTOCOL_TLS_SERVER)
    load_chain(server, chain)
    client = new_context(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE  # `binding` replaces the verification of certificates
    return Tls(server, client, certificate)


def is_encrypted(encryption: str, host: str) -> bool:
    """Return whether a connection to `host` is encrypted, according to the option `encryption` at both ends."""
    return encryption == "tls" or (encryption == "auto" and not is_loopback(host))


def agreed(options: Mapping[int, str], hosts: int) -> bool:
    """Return whether TCP between ranks is encrypted, from the options of all ranks. The result is equal on all ranks.

    Args:
        options: the `encryption` option of each rank.
        hosts: number of hosts.

    Raises:
        RendezvousError: some ranks have "none", and others do not.
    """
    plain = [rank for rank, encryption in options.items() if encryption == "none"]
    if plain and len(plain) < len(options):
        others = [rank for rank in options if rank not in plain]
        raise RendezvousError(
            f"rank(s) {', '.join(map(str, plain))} have encryption='none', but rank(s) {', '.join(map(str, others))} "
            "do not; TCP is plain only if every rank has encryption='none' (AIOCOLL_ENCRYPTION)"
        )
    return not plain and (hosts > 1 or "tls" in options.values())


def binding(certificate: bytes | None) -> bytes:
    """Return the hash of the dialled end's `certificate`, which binds a handshake to its TLS connection."""
    return hashlib.sha256(certificate).digest() if certificate is not None else b""


class _Socket(ssl.SSLSocket):
    def getpeername(self) -> Any:
        """Return the peer's address. If the peer is gone, close the socket, which `wrap_socket` would leak."""
        try:
            return super().getpeername()
        except OSError as error:
            if self.version() is None:
                self.close()
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)) from error
            raise


def new_context(protocol: int) -> ssl.SSLContext:
    """Return a TLS 1.3 context without a certificate."""
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = _Socket
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are never resumed
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Ignore a TCP close without a TLS close: links and stores detect a premature end by their own messages.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    return context


def _certificate() -> tuple[bytes, bytes]:
    """Make a self-signed certificate; return it in DER format, and with its private key in PEM format."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise BackendUnavailableError(
            "connections between hosts are encrypted, which needs the package cryptography: pip install aiocoll[tls]; "
            "or, on a network that you trust, set encryption='none' (AIOCOLL_ENCRYPTION=none) on every rank"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "aiocoll")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return made.public_bytes(serialization.Encoding.DER), made.public_bytes(serialization.Encoding.PEM) + private


def load_chain(context: ssl.SSLContext, chain: bytes) -> None:
    """Load a certificate and its key from a temporary file, because `ssl` reads them only from files.

    The file has no name, or only this user can read it.
    """
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("aiocoll", os.MFD_CLOEXEC)
        try:
            os.write(fd, chain)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return
    import tempfile

    with tempfile.NamedTemporaryFile() as file:  # only this user can read the file
        file.write(chain)
        file.flush()
        context.load_cert_chain(file.name)
