"""Handshake that opens every connection: five messages of fixed length, in which both ends prove the job key.

    client                                              server
      HELLO      nonce                    ------>
                 <------   CHALLENGE      nonce
      PROOF      identity, mac "C"        ------>
                 <------   VERDICT        status, identity, mac "S"
      CONFIRM    mac "D"                  ------>

    offset  size  HELLO and CHALLENGE, in every version of the wire (big endian)
         0     4  magic "aioc"
         4     1  wire version
         5     3  reserved, zero
         8    32  nonce

    offset  size  PROOF and VERDICT
         0     1  PROOF: ConnKind; VERDICT: Status
         1     1  PROOF: 1 if the link will have further connections; otherwise 0
         2     2  ended connections of this kind between the two, as counted by the sender, modulo 65536
         4    16  job id
        20     8  epoch
        28     4  rank, -1 if the sender has none (a store)
        32     4  world size, 0 if it is unknown
        36    32  mac

CONFIRM is only a mac. A mac is HMAC-SHA256(K, label | all messages so far, including its own up to the mac). K is
HKDF-SHA256 (RFC 5869) of the job key, salted by HELLO, CHALLENGE and the hash of the certificate, if one secures the
connection. So the labels prevent reflection, and the two nonces prevent replay. The certificate prevents an attacker
between the ends from relaying their messages. Both macs cover all claims of both sides.

- Unproven claims have no effect. The server reads a client's claims, and calls `decide`, only if the mac of PROOF is
  right. The client reads the server's answer only if the mac of VERDICT is right.
- A client without the key learns nothing. It receives a nonce, and for a wrong PROOF a VERDICT of zeros. It receives
  no job, no rank, and no mac on which it could test guesses of the key. The client proves itself first because any
  process can connect to a server, while a client connects only to addresses from its job. A process that listens there
  instead of a rank learns the client's identity.
- The client sends the last message. The server accepts the connection only after CONFIRM. So if a client gives up
  earlier, neither end has a link that the other end does not have.

This module does no I/O and reads no clock. The caller moves the bytes, reads exactly the sizes below, and gives the
other end `HANDSHAKE_TIMEOUT` seconds to prove the key. After that, an end waits as long as the other end lives. The
client has a connection once it has sent CONFIRM, so a server must not give up later and break a connection in use.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from aiocoll.errors import AuthenticationError

__all__ = [
    "CHALLENGE_SIZE",
    "CONFIRM_SIZE",
    "HANDSHAKE_TIMEOUT",
    "HELLO_SIZE",
    "PROOF_SIZE",
    "VERDICT_SIZE",
    "WIRE_VERSION",
    "ClientHandshake",
    "ConnKind",
    "HandshakeRefusedError",
    "Identity",
    "Peer",
    "ServerHandshake",
    "Status",
    "UnprovenError",
    "job_id",
    "may_be_handshake",
]

MAGIC = b"aioc"
WIRE_VERSION = 5

_OPENING = struct.Struct("!4sB3x32s")
_CLAIM = struct.Struct("!B?H16sQiI")
_MAC_SIZE = hashlib.sha256().digest_size
HELLO_SIZE = CHALLENGE_SIZE = _OPENING.size
PROOF_SIZE = VERDICT_SIZE = _CLAIM.size + _MAC_SIZE
CONFIRM_SIZE = _MAC_SIZE

#: Seconds in which the other end must prove the job key, TLS included: ample for a loaded host. A silent client is
#: removed within 5 s, even if a loaded host notices the timeout late.
HANDSHAKE_TIMEOUT = 4.5


class ConnKind(IntEnum):
    """The purpose of a connection."""

    STORE = 0
    CONTROL = 1
    DATA = 2
    HEARTBEAT = 3
    """A connection for heartbeats of one byte each, in both directions, without frames."""
    STRIPE = 4
    """A further connection of a data link."""
    PROBE = 5
    """A connection for one measurement of the path between two hosts, without frames."""


class Status(IntEnum):
    """The server's answer to a client that has proven the job key."""

    OK = 0
    CROSSED = 1
    """Both ranks dialled at the same time, and another of their connections is further along."""
    DUPLICATE = 2
    """The rank already has a live connection of this kind."""
    REFUSED = 3
    WRONG_JOB = 4
    WRONG_EPOCH = 5
    WRONG_WORLD_SIZE = 6
    WRONG_KIND = 7
    WRONG_CERTIFICATE = 8
    """The client's certificate does not contain the name of the rank that the client claims to be."""


class Identity(NamedTuple):
    """The identity of a connection's end: job id (16 bytes), epoch, rank (-1: none), world size (0: unknown), kind.

    `ended` is the number of its ended connections of that kind with the other end, modulo 65536. `striped` is True if
    the link will have further connections.
    """

    job_id: bytes
    epoch: int
    rank: int
    world_size: int
    kind: ConnKind
    ended: int = 0
    striped: bool = False


class Peer(Identity):
    """The proven identity of the other end of a connection."""

    __slots__ = ()


class UnprovenError(AuthenticationError):
    """Raised when the other end has not proven that it has the job key, so its messages have no effect."""


class HandshakeRefusedError(AuthenticationError):
    """Raised when one end rejects the other, although both have the job key; `status` is the reason."""

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


def job_id(name: str) -> bytes:
    """Return the 16-byte id of the job `name`, as sent in handshakes.

    Raises:
        ValueError: `name` has a lone surrogate.
    """
    try:
        return hashlib.sha256(name.encode()).digest()[:16]
    except UnicodeEncodeError:
        raise ValueError(
            f"job={name!r} is not valid text: it has a lone surrogate, which UTF-8 cannot encode"
        ) from None


def may_be_handshake(received: bytes) -> bool:
    """Return whether the bytes `received`, which may be empty, can be the start of a handshake message."""
    return received[: len(MAGIC)] == MAGIC[: len(received)]


class ClientHandshake:
    """The handshake at the dialling end: `hello()`, then `prove()` for CHALLENGE and `confirm()` for VERDICT.

    Args:
        identity: the identity of this end.
        key: the job key, None for the null key of loopback.
        random_bytes: source of the nonce, normally `Runtime.random_bytes`.
        bound: see the attribute.

    Attributes:
        bound: the value that binds the handshake to the connection (`aiocoll.security.tls.binding`); needed by `prove`.
        peer: the server's proven identity, once `confirm` has returned.
    """

    def __init__(
        self, identity: Identity, key: bytes | None, random_bytes: Callable[[int], bytes], bound: bytes = b""
    ) -> None:
        self._identity = identity
        self._key = key
        self.bound = bound
        self._transcript = _opening(random_bytes)
        self._secret = b""
        self.peer: Peer | None = None

    def hello(self) -> bytes:
        """Return HELLO, the first message of the handshake."""
        return self._transcript[:HELLO_SIZE]

    def prove(self, challenge: bytes) -> bytes:
        """Return PROOF, the reply to a CHALLENGE of `CHALLENGE_SIZE` bytes.

        Raises:
            UnprovenError: the other end is not an aiocoll process, or uses another version.
        """
        version = _version(challenge, "the other end")
        if version != WIRE_VERSION:
            raise _wrong_version(version)
        self._transcript += challenge
        self._secret = _derive(self._key, self._transcript + self.bound)
        proof = _claim(self._identity, self._identity.kind)
        proof += _mac(self._secret, b"C", self._transcript + proof)
        self._transcript += proof
        return proof

    def confirm(self, verdict: bytes) -> bytes:
        """Return CONFIRM, the reply to a VERDICT of `VERDICT_SIZE` bytes. Sending it accepts the connection.

        Raises:
            HandshakeRefusedError: the server, which holds the key, rejected the client; `status` is the reason.
            UnprovenError: the other end does not hold the key.
        """
        claim = _proven(self._secret, b"S", self._transcript, verdict, "the other end")
        code, peer = _read(claim, self._identity.kind)
        status = Status(code) if code in Status.__members__.values() else Status.REFUSED
        status = status or _compare(self._identity, peer)
        if status is not Status.OK:
            raise _refusal(f"{_name(peer.rank)} refused the connection", status, self._identity, peer)
        self.peer = peer
        return _mac(self._secret, b"D", self._transcript + verdict)


class ServerHandshake:
    """The handshake at the dialled end: `challenge()` for HELLO, `verdict()` for PROOF, `accept()` for CONFIRM.

    Args:
        identity: the identity of this end. Kind STORE accepts only STORE connections; another kind accepts all others.
        key: the job key, None for the null key of loopback.
        random_bytes: source of the nonce, normally `Runtime.random_bytes`.
        bound: the value that binds the handshake to the connection (`aiocoll.security.tls.binding`).

    Attributes:
        refusal: the error of a rejected client. Send the answer, which reveals nothing else, and close.
    """

    def __init__(
        self, identity: Identity, key: bytes | None, random_bytes: Callable[[int], bytes], bound: bytes = b""
    ) -> None:
        self._identity = identity
        self._key = key
        self._bound = bound
        self._opening = _opening(random_bytes)
        self._transcript = self._secret = b""
        self._peer: Peer | None = None
        self.refusal: AuthenticationError | None = None

    def challenge(self, hello: bytes) -> bytes:
        """Return CHALLENGE, the reply to a HELLO of `HELLO_SIZE` bytes.

        Raises:
            UnprovenError: this is not a HELLO; close without a reply.
        """
        version = _version(hello, "the client")
        if version != WIRE_VERSION:
            self.refusal = _wrong_version(version)
        self._transcript = hello + self._opening
        self._secret = _derive(self._key, self._transcript + self._bound)
        return self._opening

    def verdict(
        self, proof: bytes, decide: Callable[[Peer], Status], ended: Callable[[Peer], int] = lambda peer: 0
    ) -> bytes:
        """Return VERDICT, the reply to a PROOF of `PROOF_SIZE` bytes.

        Args:
            proof: the client's message.
            decide: called with a client that has proven the key and whose identity agrees with this end's.
            ended: returns the number of ended connections with such a client.
        """
        try:
            status = self._judge(_proven(self._secret, b"C", self._transcript, proof, "the client"), decide)
        except UnprovenError as error:
            self.refusal = error
            return bytes(VERDICT_SIZE)
        self._transcript += proof
        number = ended(self._peer) if self._peer is not None else 0
        verdict = _claim(self._identity._replace(ended=number), status)
        verdict += _mac(self._secret, b"S", self._transcript + verdict)
        self._transcript += verdict
        return verdict

    def accept(self, confirm: bytes) -> Peer:
        """Check CONFIRM, the client's last message of `CONFIRM_SIZE` bytes; return the client's identity.

        Raises:
            AuthenticationError: the client was rejected, or this is not its last message.
        """
        if self.refusal is not None:
            raise self.refusal
        assert self._peer is not None  # `verdict` has set it
        if not hmac.compare_digest(confirm, _mac(self._secret, b"D", self._transcript)):
            raise UnprovenError(f"{_name(self._peer.rank)} did not send a valid CONFIRM")
        return self._peer

    def _judge(self, claim: bytes, decide: Callable[[Peer], Status]) -> Status:
        code, peer = _read(claim, self._identity.kind)
        status = Status.REFUSED
        if code in ConnKind.__members__.values():
            peer = peer._replace(kind=ConnKind(code))
            status = _compare(self._identity, peer) or decide(peer)
        if status is not Status.OK:
            event = f"the connection of {_name(peer.rank)} was refused"
            self.refusal = _refusal(event, status, self._identity, peer)
        self._peer = peer
        return status


def _opening(random_bytes: Callable[[int], bytes]) -> bytes:
    """Return a HELLO or CHALLENGE message."""
    return _OPENING.pack(MAGIC, WIRE_VERSION, random_bytes(32))


def _version(message: bytes, sender: str) -> int:
    """Return the protocol version in a HELLO or CHALLENGE message."""
    if message[: len(MAGIC)] != MAGIC or len(message) != _OPENING.size:
        raise UnprovenError(f"{sender} does not use aiocoll's protocol: it sent {bytes(message[:8])!r}")
    return message[len(MAGIC)]


def _derive(key: bytes | None, salt: bytes) -> bytes:
    """Derive the handshake key K by HKDF-SHA256: the extract step, then the first block of the expand step."""
    extracted = hmac.digest(salt, key or b"", "sha256")
    return hmac.digest(extracted, b"aiocoll/2\x01", "sha256")


def _mac(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, label + transcript, "sha256")


def _proven(secret: bytes, label: bytes, transcript: bytes, message: bytes, sender: str) -> bytes:
    """Return the claim in a PROOF or VERDICT message; raise `UnprovenError` if the message's MAC is wrong."""
    claim, mac = message[: _CLAIM.size], message[_CLAIM.size :]
    if not hmac.compare_digest(mac, _mac(secret, label, transcript + claim)):
        raise UnprovenError(
            f"{sender} did not prove that it holds this job's key: "
            "every rank and the store need the same job_key (AIOCOLL_JOB_KEY)"
        )
    return claim


def _claim(identity: Identity, code: int) -> bytes:
    job_id, epoch, rank, world_size, _, ended, striped = identity
    return _CLAIM.pack(code, striped, ended, job_id, epoch, rank, world_size)


def _read(claim: bytes, kind: ConnKind) -> tuple[int, Peer]:
    code, striped, ended, job, epoch, rank, world_size = _CLAIM.unpack(claim)
    return code, Peer(job, epoch, rank, world_size, kind, ended, striped)


def _compare(mine: Identity, peer: Peer) -> Status:
    if mine.job_id != peer.job_id:
        return Status.WRONG_JOB
    if (mine.kind is ConnKind.STORE) != (peer.kind is ConnKind.STORE):
        return Status.WRONG_KIND
    if mine.epoch != peer.epoch:
        return Status.WRONG_EPOCH
    if mine.world_size != peer.world_size:
        return Status.WRONG_WORLD_SIZE
    return Status.OK


def _name(rank: int) -> str:
    return f"rank {rank}" if rank >= 0 else "the other end"


def _wrong_version(version: int) -> UnprovenError:
    return UnprovenError(
        f"the other end uses wire version {version}, this process {WIRE_VERSION}; use the same aiocoll on all ranks"
    )


def _refusal(event: str, status: Status, mine: Identity, peer: Peer) -> HandshakeRefusedError:
    """Return the error for a rejected connection. Its text contains the values on which the two ends differ."""
    reasons = {
        Status.CROSSED: "both ends dialled at once, and the other connection is further ahead",
        Status.DUPLICATE: f"rank {mine.rank} and rank {peer.rank} have an open connection of kind {peer.kind.name}",
        Status.REFUSED: f"rank {mine.rank} and rank {peer.rank} of {mine.world_size} cannot be peers",
        Status.WRONG_JOB: f"it belongs to job {peer.job_id.hex()}, this process to job {mine.job_id.hex()}",
        Status.WRONG_EPOCH: f"it is in epoch {peer.epoch}, this process in epoch {mine.epoch}",
        Status.WRONG_WORLD_SIZE: f"its world size is {peer.world_size}, this process has {mine.world_size}",
        Status.WRONG_CERTIFICATE: "the certificate of this process does not name it; the other end has logged the "
        "names in the certificate and the expected name",
        Status.WRONG_KIND: f"a {peer.kind.name} connection was requested, but a "
        f"{'group' if peer.kind is ConnKind.STORE else 'store'} listens there",
    }
    return HandshakeRefusedError(f"{event}: {reasons.get(status, f'status {status.name}')}", status)
