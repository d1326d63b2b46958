"""Explanations of TLS errors in plain words, with a remedy, since OpenSSL's messages contain none."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from aiocoll.security.names import WrongCertificateError
from aiocoll.security.tls import OwnCertificate, Tls

__all__ = ["EXPIRED", "NOT_YET", "PURPOSE", "WRONG_PURPOSE", "clock", "closed_without_reason", "in_words", "moment"]

#: Numbers of OpenSSL's X509_V_ERR_... constants: not yet valid; expired; not signed by a known CA, in several ways; not
#: made for servers, or for clients.
NOT_YET, EXPIRED = 9, 10
_UNKNOWN_CA = (2, 7, 18, 19, 20, 21)
WRONG_PURPOSE = 26

PURPOSE = (
    "every rank dials and is dialled, so its certificate must be for servers and for clients; set "
    "extendedKeyUsage=serverAuth,clientAuth, or leave it out"
)

#: The other end's reason for rejecting this certificate, by the suffix of OpenSSL's name for it.
_SAID = {
    "CERTIFICATE_EXPIRED": "as expired",
    "BAD_CERTIFICATE": "as invalid, which also covers a certificate before its first day",
    "UNKNOWN_CA": "as not signed by its CA (compare tls_ca of both)",
    "UNSUPPORTED_CERTIFICATE": "as not made for this use",
    "CERTIFICATE_UNKNOWN": "without a reason",
}


def clock() -> float:
    """Return the time of this host's clock in seconds since 1970, as certificates count."""
    return datetime.now(UTC).timestamp()


def moment(seconds: float) -> str:
    """Return a time as text, such as "2030-01-31 12:00:00 UTC"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def in_words(error: ssl.SSLError, tls: Tls, who: str) -> WrongCertificateError | None:
    """Return the error to raise in place of a TLS error; None if the error is not about certificates.

    Args:
        error: the error raised by `ssl`.
        tls: the TLS contexts and certificate of this end.
        who: the address of the other end.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return WrongCertificateError(f"the certificate of {who} {_verdict(error)}")
    reason = error.reason or ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return WrongCertificateError(f"{who} presented no certificate: {_all_need_it('it')}")
    if reason.endswith("ALERT_CERTIFICATE_REQUIRED"):
        return WrongCertificateError(f"{who} accepts only certificates of a CA: {_all_need_it('this process')}")
    said = next((words for name, words in _SAID.items() if reason.endswith(f"ALERT_{name}")), None)
    if said is None or tls.own is None:
        return None
    return WrongCertificateError(
        f"{who} rejects the certificate of this process {said}: {_dates(tls.own)}; compare the clocks of both hosts"
    )


def closed_without_reason(tls: Tls) -> str:
    """Return a possible explanation for an end that closes the connection without a reason, as asyncio does."""
    if tls.own is None:
        return "an end that accepts only certificates of a CA: then this process needs tls_ca, as every rank does"
    return f"an end that rejects the certificate of this process, and has logged the reason: {_dates(tls.own)}"


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
            f"(or one that has signed it) has expired by the clock of this host, which says {now}: renew it and make "
            "a new group, or set the clock that is wrong"
        )
    if code == NOT_YET:
        return (
            f"(or one that has signed it) is not valid yet by the clock of this host, which says {now}: compare the "
            "clocks of both hosts"
        )
    if code in _UNKNOWN_CA:
        return "is not signed by the CA in tls_ca of this process: every rank and the store need certificates of one CA"
    if code == WRONG_PURPOSE:
        return f"is not made for this use: {PURPOSE}"
    return f"is rejected: {error.verify_message}"


def _all_need_it(who: str) -> str:
    return (
        f"give {who} the files tls_ca, tls_certificate and tls_key (AIOCOLL_TLS_CA, AIOCOLL_TLS_CERTIFICATE, "
        "AIOCOLL_TLS_KEY); if one rank has them, every rank and the store need them"
    )
