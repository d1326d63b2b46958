"""Explanations and remedies for TLS errors, since OpenSSL's messages have none."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime

from aiocoll.security.names import WrongCertificateError
from aiocoll.security.tls import OwnCertificate, Tls

__all__ = [
    "EXPIRED",
    "NOT_YET",
    "PURPOSE",
    "WRONG_PURPOSE",
    "clock",
    "explain_silent_close",
    "explain_tls_error",
    "format_utc",
]

#: Values of OpenSSL's X509_V_ERR_... constants: not valid yet; expired; signed by an unknown CA (several values); not
#: made for servers, or not for clients.
NOT_YET, EXPIRED = 9, 10
_UNKNOWN_CA = (2, 7, 18, 19, 20, 21)
WRONG_PURPOSE = 26

PURPOSE = (
    "every rank dials and is dialled, so its certificate must be for servers and for clients; set "
    "extendedKeyUsage=serverAuth,clientAuth, or leave it out"
)

#: Reasons why a peer rejected the certificate of this process, by the suffix of the TLS alert's name in OpenSSL.
_ALERT_REASONS = {
    "CERTIFICATE_EXPIRED": "as expired",
    "BAD_CERTIFICATE": "as invalid, which also covers a certificate before its first day",
    "UNKNOWN_CA": "as not signed by its CA (compare tls_ca of both)",
    "UNSUPPORTED_CERTIFICATE": "as not made for this use",
    "CERTIFICATE_UNKNOWN": "without a reason",
}


def clock() -> float:
    """Return this host's current time in seconds since 1970."""
    return datetime.now(UTC).timestamp()


def format_utc(seconds: float) -> str:
    """Return a time as text, such as "2030-01-31 12:00:00 UTC"."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def explain_tls_error(error: ssl.SSLError, tls: Tls, peer: str) -> WrongCertificateError | None:
    """Return the error to raise in place of a TLS error; None if the error does not concern certificates.

    Args:
        error: the error raised by `ssl`.
        tls: the TLS contexts and certificate of this end.
        peer: the address of the other end.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return WrongCertificateError(f"the certificate of {peer} {_explain_verification_error(error)}")
    reason = error.reason or ""
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return WrongCertificateError(f"{peer} presented no certificate: {_files_hint('it')}")
    if reason.endswith("ALERT_CERTIFICATE_REQUIRED"):
        return WrongCertificateError(f"{peer} accepts only certificates of a CA: {_files_hint('this process')}")
    verdict = next((words for name, words in _ALERT_REASONS.items() if reason.endswith(f"ALERT_{name}")), None)
    if verdict is None or tls.own is None:
        return None
    return WrongCertificateError(
        f"{peer} rejects the certificate of this process {verdict}: {_validity_text(tls.own)}; "
        "compare the clocks of both hosts"
    )


def explain_silent_close(tls: Tls) -> str:
    """Return possible reasons why a peer closed the connection without a TLS alert; asyncio sends none."""
    if tls.own is None:
        return "an end that accepts only certificates of a CA: then this process needs tls_ca, as every rank does"
    return f"an end that rejects the certificate of this process, and has logged the reason: {_validity_text(tls.own)}"


def _validity_text(own: OwnCertificate) -> str:
    return (
        f"tls_certificate={own.path!r} is valid from {format_utc(own.begins)} until {format_utc(own.ends)}, and the "
        f"clock of this host shows {format_utc(clock())}"
    )


def _explain_verification_error(error: ssl.SSLCertVerificationError) -> str:
    now = format_utc(clock())
    code = error.verify_code
    if code == EXPIRED:
        return (
            f"(or one that has signed it) has expired by the clock of this host, which shows {now}: renew it and make "
            "a new group, or set the clock that is wrong"
        )
    if code == NOT_YET:
        return (
            f"(or one that has signed it) is not valid yet by the clock of this host, which shows {now}: compare the "
            "clocks of both hosts"
        )
    if code in _UNKNOWN_CA:
        return "is not signed by the CA in tls_ca of this process: every rank and the store need certificates of one CA"
    if code == WRONG_PURPOSE:
        return f"is not made for this use: {PURPOSE}"
    return f"is rejected: {error.verify_message}"


def _files_hint(end: str) -> str:
    return (
        f"give {end} the files tls_ca, tls_certificate and tls_key (AIOCOLL_TLS_CA, AIOCOLL_TLS_CERTIFICATE, "
        "AIOCOLL_TLS_KEY); if one rank has them, every rank and the store need them"
    )
