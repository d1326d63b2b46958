"""Why a certificate is refused, in plain words: OpenSSL's do not say what to do."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from aiocoll.security.names import WrongCertificateError
from aiocoll.security.tls import OwnCertificate, Tls

__all__ = ["EXPIRED", "NOT_YET", "PURPOSE", "WRONG_PURPOSE", "clock", "closed_without_reason", "in_words", "moment"]

#: Numbers of OpenSSL's X509_V_ERR_...: not yet valid, has expired; the ways in which no CA that we know has signed it;
#: not for servers, or for clients.
NOT_YET, EXPIRED = 9, 10
_UNKNOWN_CA = (2, 7, 18, 19, 20, 21)
WRONG_PURPOSE = 26

PURPOSE = (
    "every rank dials and is dialled, so its certificate must be for servers and for clients: "
    "extendedKeyUsage=serverAuth,clientAuth, or none"
)

#: What the other end says of our certificate, by the ends of OpenSSL's names for that.
_SAID = {
    "CERTIFICATE_EXPIRED": "as expired",
    "BAD_CERTIFICATE": "as invalid, which is also what it says before its first day",
    "UNKNOWN_CA": "as not signed by its CA (compare tls_ca of both)",
    "UNSUPPORTED_CERTIFICATE": "as not made for this use",
    "CERTIFICATE_UNKNOWN": "and does not say why",
}


def clock() -> float:
    """Return what the clock of this host says, as certificates count: in seconds since 1970."""
    return datetime.now(UTC).timestamp()


def moment(seconds: float) -> str:
    """Write a time as people do."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def in_words(error: ssl.SSLError, tls: Tls, who: str) -> WrongCertificateError | None:
    """Return what to raise in place of an error of a TLS connection; None if it is not about certificates.

    Args:
        error: what `ssl` has raised.
        tls: what this end has used.
        who: the other end: its address.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return WrongCertificateError(f"the certificate of {who} {_verdict(error)}")
    reason = error.reason or ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return WrongCertificateError(f"{who} has shown no certificate: {_all_need_it('it')}")
    if reason.endswith("ALERT_CERTIFICATE_REQUIRED"):
        return WrongCertificateError(f"{who} takes only certificates of a CA: {_all_need_it('this process')}")
    said = next((words for name, words in _SAID.items() if reason.endswith(f"ALERT_{name}")), None)
    if said is None or tls.own is None:
        return None
    return WrongCertificateError(
        f"{who} refuses the certificate of this process {said}: {_dates(tls.own)}; compare the clocks of both hosts"
    )


def closed_without_reason(tls: Tls) -> str:
    """Return what may be the matter with an end that closes the connection and does not say why, as asyncio does."""
    if tls.own is None:
        return "one that takes only certificates of a CA: then this process needs tls_ca, as every rank does"
    return f"one that does not take the certificate of this process, and has logged why: {_dates(tls.own)}"


def _dates(own: OwnCertificate) -> str:
    return (
        f"tls_certificate={own.path!r} is valid from {moment(own.begins)} until {moment(own.ends)}, and the clock of "
        f"this host says {moment(clock())}"
    )


def _verdict(error: ssl.SSLCertVerificationError) -> str:
    now = moment(clock())
    code = error.verify_code
    if code == EXPIRED:
        return (
            f"(or one that has signed it) has expired by the clock of this host, which says {now}: renew it there and "
            "make a new group, or set the clock that is wrong"
        )
    if code == NOT_YET:
        return (
            f"(or one that has signed it) is not valid yet by the clock of this host, which says {now}: compare the "
            "clocks of both hosts"
        )
    if code in _UNKNOWN_CA:
        return "is not signed by the CA in our tls_ca: every rank and the store need certificates of one CA, and tls_ca"
    if code == WRONG_PURPOSE:
        return f"is not made for this use: {PURPOSE}"
    return f"is refused: {error.verify_message}"


def _all_need_it(who: str) -> str:
    return (
        f"give {who}, too, the files tls_ca, tls_certificate and tls_key (AIOCOLL_TLS_CA, AIOCOLL_TLS_CERTIFICATE, "
        "AIOCOLL_TLS_KEY), as every rank and the store need them if one has them"
    )
