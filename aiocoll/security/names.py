"""What a certificate of the user's own CA has to name: parts in a job, as URIs among its subjectAltNames.

    aiocoll://JOB/rank/3    rank 3 of the job whose id is JOB
    aiocoll://JOB/rank/*    any rank of it
    aiocoll://JOB/store     the process that has its store: the launcher of host 0, or rank 0 if there is no launcher

A certificate may have any number of them, for a host with several ranks say. Whoever uses a store needs one of its job,
whichever it is: a store does not know ranks. Names are compared character by character.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from aiocoll.security.handshake import UnprovenError

__all__ = [
    "WrongCertificateError",
    "check_job",
    "check_names",
    "names_in",
    "part_name",
    "rank_name",
    "shown",
    "store_name",
]

#: What may stand in a URI for the job, and in every place where one would write it.
_JOB = re.compile(r"[A-Za-z0-9._:-]+")
_SCHEME = "aiocoll://"
#: Names that an error shows, of a certificate that may be for hundreds of ranks.
_SHOWN = 4


class WrongCertificateError(UnprovenError):
    """A certificate of one end of a connection is missing, or is none that the other end takes."""


def rank_name(job: str, rank: int) -> str:
    """Return what the certificate of a rank has to name."""
    return f"{_SCHEME}{job}/rank/{rank}"


def store_name(job: str) -> str:
    """Return what the certificate of the process that has the store has to name."""
    return f"{_SCHEME}{job}/store"


def part_name(job: str) -> str:
    """Return how the names of all parts of a job begin, of which users of a store need any."""
    return f"{_SCHEME}{job}/"


def check_job(job: str) -> None:
    """Refuse the id of a job that cannot be in a certificate.

    Raises:
        ValueError: says what to do.
    """
    if not _JOB.fullmatch(job):
        raise ValueError(
            f"job_id={job!r}: certificates of your own CA name the job, so give it an id of letters, digits and ._:- "
            "that is the same on all ranks: GroupOptions(job_id=...), AIOCOLL_JOB_ID for ranks and `aiocoll run`, "
            "job= of a store"
        )


def names_in(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names that a certificate has, as `ssl.SSLSocket.getpeercert` describes it."""
    names = certificate.get("subjectAltName", ())
    return tuple(name for kind, name in names if kind == "URI" and name.startswith(_SCHEME))


def check_names(names: Sequence[str], expected: str, whose: str) -> None:
    """Refuse a certificate that does not name what it is shown for.

    Args:
        names: what it has, of `names_in`.
        expected: what `rank_name`, `store_name` or `part_name` returns.
        whose: the certificate, in words.

    Raises:
        WrongCertificateError: it has neither this name nor one that includes it; the message has both.
    """
    job, _, _ = expected.rpartition("/rank/")
    if expected in names or f"{job}/rank/*" in names:
        return
    if expected.endswith("/"):
        if any(name.startswith(expected) for name in names):
            return
        expected += "..."
    has = f"names {shown(names)}" if names else "has no URI of the form aiocoll://JOB/... as a name"
    raise WrongCertificateError(f"{whose} {has}, but {expected} was expected")


def shown(names: Sequence[str]) -> str:
    """Write names, or the first of them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "nobody"
