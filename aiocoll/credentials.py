"""Credential files: the paths of TLS files, and reading of files with secrets."""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

from aiocoll.users import owner_trouble

__all__ = ["TlsFiles", "read_private", "tls_files"]


class TlsFiles(NamedTuple):
    """Paths of PEM files: CA certificates, this process's certificate, and its private key."""

    ca: str
    certificate: str
    key: str


def tls_files(ca: str | None, certificate: str | None, key: str | None) -> TlsFiles | None:
    """Return the paths in the options `tls_ca`, `tls_certificate` and `tls_key`; None if all three are missing.

    Raises:
        TypeError: an option is neither a str nor None.
        ValueError: an option is given without the others.
    """
    given = {"tls_ca": ca, "tls_certificate": certificate, "tls_key": key}
    for name, path in given.items():
        if path is not None and not isinstance(path, str):
            raise TypeError(f"{name} must be a str or None, not {type(path).__name__}")
    missing = [name for name, path in given.items() if not path]
    if len(missing) == len(given):
        return None
    if missing:
        present = next(name for name in given if name not in missing)
        variables = ", ".join(f"AIOCOLL_{name.upper()}" for name in missing)
        raise ValueError(
            f"{present}={given[present]!r} is given without {' and '.join(missing)} ({variables}): the certificates of "
            "the CA, the certificate of this process and its key belong together; give all three, or none"
        )
    assert ca is not None
    assert certificate is not None
    assert key is not None
    return TlsFiles(ca, certificate, key)


def read_private(path: str, label: str, most: int) -> bytes:
    """Return up to `most` bytes of a file that only this user may access.

    Raises:
        ValueError: the file is missing, a symbolic link, owned by another user, or accessible to others. The message
            begins with `label`.
    """
    where = f"{label}={path!r}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{where}: cannot be opened ({error.strerror}); symbolic links are not followed") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{where}: is not a regular file")
        if (foreign := owner_trouble(fd)) is not None:
            raise ValueError(f"{where}: {foreign}; chown it")
        if status.st_mode & 0o077:
            raise ValueError(f"{where}: other users may access it; chmod 600 it")
        return os.read(fd, most)
    finally:
        os.close(fd)
