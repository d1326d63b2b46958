"""Names in certificates of the user's own CA: URIs in subjectAltName that name the ranks and the store of a job.

    aiocoll://JOB/rank/3    rank 3 of the job whose id is JOB
    aiocoll://JOB/rank/*    any rank of the job
    aiocoll://JOB/store     the process with the store: the launcher of host 0, or rank 0 if there is no launcher

A certificate may have any number of names, for instance on a host with several ranks. A store accepts any name of its
job from its clients, since it does not know their ranks. Names are compared character by character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiocoll.security.handshake import UnprovenError

__all__ = [
    "WrongCertificateError",
    "certificate_names",
    "check_job",
    "check_names",
    "format_names",
    "part_name",
    "rank_name",
    "store_name",
]

#: Pattern of a job id that can be part of a name in a certificate.
_JOB = re.compile(r"[A-Za-z0-9._:-]+")
_SCHEME = "aiocoll://"
#: Maximum number of names in an error message. A certificate may contain the names of hundreds of ranks.
_SHOWN = 4


class WrongCertificateError(UnprovenError):
    """Raised when a certificate of one end is missing, or is rejected by the other end."""


def rank_name(job: str, rank: int) -> str:
    """Return the name that a rank's certificate must contain."""
    return f"{_SCHEME}{job}/rank/{rank}"


def store_name(job: str) -> str:
    """Return the name that the certificate of the process that runs the store must contain."""
    return f"{_SCHEME}{job}/store"


def part_name(job: str) -> str:
    """Return the prefix of all names of a job. A store accepts clients with any name that has this prefix."""
    return f"{_SCHEME}{job}/"


def check_job(job: str) -> None:
    """Raise an error if a job id cannot be part of a name in a certificate.

    Raises:
        ValueError: the message contains the remedy.
    """
    if not _JOB.fullmatch(job):
        raise ValueError(
            f"job_id={job!r}: certificates of your own CA name the job, so give it an id of letters, digits and ._:- "
            "that is the same on all ranks: GroupOptions(job_id=...), AIOCOLL_JOB_ID for ranks and `aiocoll run`, "
            "job= of a store"
        )


def certificate_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the aiocoll names in a certificate, which `ssl.SSLSocket.getpeercert` has returned."""
    names = certificate.get("subjectAltName", ())
    return tuple(name for kind, name in names if kind == "URI" and name.startswith(_SCHEME))


def check_names(names: Sequence[str], expected: str, whose: str) -> None:
    """Raise an error if a certificate does not contain the expected name.

    Args:
        names: the certificate's names, from `certificate_names`.
        expected: the return value of `rank_name`, `store_name` or `part_name`.
        whose: description of the certificate in the error, such as "the certificate of 10.0.0.2".

    Raises:
        WrongCertificateError: no name equals or includes `expected`; the message contains both.
    """
    job, _, _ = expected.rpartition("/rank/")
    if expected in names or f"{job}/rank/*" in names:
        return
    if expected.endswith("/"):
        if any(name.startswith(expected) for name in names):
            return
        expected += "..."
    has = f"names {format_names(names)}" if names else "has no URI of the form aiocoll://JOB/... as a name"
    raise WrongCertificateError(f"{whose} {has}, but {expected} was expected")


def format_names(names: Sequence[str]) -> str:
    """Return the first few names, and the number of further names, as text for an error message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "no job"
