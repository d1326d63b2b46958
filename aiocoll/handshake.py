"""The handshake that opens every connection: three fixed-width messages, mutual proof of the job key.

    client                                              server
      HELLO      who I am, nonce            ------>
                 <------   CHALLENGE      status, who I am, nonce, mac = HMAC(K, "S" | HELLO | CHALLENGE before the mac)
      PROOF      mac = HMAC(K, "C" | HELLO | CHALLENGE)   ------>

    offset  size  HELLO and CHALLENGE begin alike (big endian)
         0     4  magic "aioc"
         4     1  wire version
         5     1  HELLO: ConnKind; CHALLENGE: Status
         6     2  reserved, zero
         8    16  job id
        24     8  epoch
        32     4  rank, -1 where the speaker has none (a store)
        36     4  world size, 0 where it is not known
        40    32  nonce
        72    32  CHALLENGE only: mac

K is HKDF-SHA256 (RFC 5869) of the job key, salted by the job id of HELLO. The labels "S" and "C" stop reflection, the
two nonces stop replay, and everything each side claims is under both macs. Nothing here does I/O or reads a clock: the
caller moves the bytes, reads exactly the sizes below, and gives the whole exchange `HANDSHAKE_TIMEOUT` seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from aiocoll.errors import AuthenticationError

__all__ = [
    "CHALLENGE_SIZE",
    "HANDSHAKE_TIMEOUT",
    "HELLO_SIZE",
    "MIN_KEY_SIZE",
    "PROOF_SIZE",
    "WIRE_VERSION",
    "ClientHandshake",
    "ConnKind",
    "HandshakeRefusedError",
    "Identity",
    "Peer",
    "ServerHandshake",
    "Status",
    "is_loopback",
    "job_id",
    "may_be_ours",
    "require_key",
]

MAGIC = b"aioc"
WIRE_VERSION = 1

_HEAD = struct.Struct("!4sBBH16sQiI32s")
_NONCE_SIZE = 32
_MAC_SIZE = hashlib.sha256().digest_size
HELLO_SIZE = _HEAD.size
CHALLENGE_SIZE = _HEAD.size + _MAC_SIZE
PROOF_SIZE = _MAC_SIZE

#: Seconds for the three messages together: ample for a loaded host, short enough that a silent client is soon gone.
HANDSHAKE_TIMEOUT = 5.0

#: Bytes of the shortest job key taken: 128 bits cannot be guessed from a recorded handshake.
MIN_KEY_SIZE = 16

_HOW_TO_GET_A_KEY = (
    "start the job with `aiocoll run`, which makes one, or pass the same job_key= (or AIOCOLL_JOB_KEY) to every rank; "
    'make one with: python -c "import secrets; print(secrets.token_hex(32))"'
)


class ConnKind(IntEnum):
    """What a connection is for."""

    STORE = 0
    CONTROL = 1
    DATA = 2
    BEACON = 3
    """Signs of life, a byte each, in both directions; no frames."""


class Status(IntEnum):
    """The server's answer to a HELLO."""

    OK = 0
    CROSSED = 1
    """Both ranks dialled at once; the server's own connection is the one that stays."""
    DUPLICATE = 2
    """That rank has a live connection of this kind."""
    REFUSED = 3
    WRONG_VERSION = 4
    WRONG_JOB = 5
    WRONG_EPOCH = 6
    WRONG_WORLD_SIZE = 7
    WRONG_KIND = 8


class Identity(NamedTuple):
    """Who one end of a connection is: 16-byte job id, epoch, rank (-1: none), world size (0: not known) and purpose."""

    job_id: bytes
    epoch: int
    rank: int
    world_size: int
    kind: ConnKind


class Peer(Identity):
    """Who the other end says it is; proven once the exchange has ended without an error."""

    __slots__ = ()


class HandshakeRefusedError(AuthenticationError):
    """One end declined the other although the bytes were well formed; `status` says why."""

    def __init__(self, message: str, status: Status) -> None:
        super().__init__(message)
        self.status = status


class _Head(NamedTuple):
    """The common beginning of HELLO and CHALLENGE; `code` is a `ConnKind` or a `Status`."""

    version: int
    code: int
    job_id: bytes
    epoch: int
    rank: int
    world_size: int
    nonce: bytes


def job_id(name: str) -> bytes:
    """Return the 16 bytes that stand for the job `name` on the wire."""
    return hashlib.sha256(name.encode()).digest()[:16]


def may_be_ours(said: bytes) -> bool:
    """Say whether a handshake message may begin with the few bytes `said` (or none)."""
    return said[: len(MAGIC)] == MAGIC[: len(said)]


def is_loopback(host: str) -> bool:
    """Say whether `host` (an address, or "localhost") cannot be reached from another machine; other names are not."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def require_key(host: str, key: bytes | None) -> None:
    """Refuse an address that other machines can reach when there is no job key, and any key that is too short.

    Raises:
        AuthenticationError: says how to make a key.
    """
    if key is not None and len(key) < MIN_KEY_SIZE:
        raise AuthenticationError(
            f"job_key has {len(key)} bytes, at least {MIN_KEY_SIZE} are needed: {_HOW_TO_GET_A_KEY}"
        )
    if key is None and not is_loopback(host):
        raise AuthenticationError(
            f"{host} can be reached from other machines, and no job key keeps strangers out: {_HOW_TO_GET_A_KEY}"
        )


class ClientHandshake:
    """The side that dials: send `hello()`, read `CHALLENGE_SIZE` bytes, send `answer()` of them.

    Args:
        identity: who this end is.
        key: the job key, None for the null key of loopback.
        random_bytes: source of the nonce, normally `Runtime.random_bytes`.

    Attributes:
        peer: the server's identity, proven, once `answer` has returned.
    """

    def __init__(self, identity: Identity, key: bytes | None, random_bytes: Callable[[int], bytes]) -> None:
        self._identity = identity
        self._secret = _derive(key, identity.job_id)
        self._hello = _pack(identity, identity.kind, random_bytes(_NONCE_SIZE))
        self.peer: Peer | None = None

    def hello(self) -> bytes:
        """Return the first message."""
        return self._hello

    def answer(self, challenge: bytes) -> bytes:
        """Check the server's message and return the proof.

        Raises:
            HandshakeRefusedError: the server, which holds the key, declined; `status` says why.
            AuthenticationError: the other end is no aiocoll process, or does not hold the key.
        """
        head = _unpack(challenge, CHALLENGE_SIZE, "the server")
        who = _name(head.rank)
        if head.version != WIRE_VERSION:
            raise _wrong_version(who, head.version)
        mac = _mac(self._secret, b"S", self._hello, challenge[: _HEAD.size])
        if not hmac.compare_digest(mac, challenge[_HEAD.size :]):
            raise AuthenticationError(
                f"{who} did not prove that it holds this job's key (its HMAC is wrong): "
                "every rank and the store need the same job_key (AIOCOLL_JOB_KEY)"
            )
        peer = Peer(head.job_id, head.epoch, head.rank, head.world_size, self._identity.kind)
        status = Status(head.code) if head.code in Status.__members__.values() else Status.REFUSED
        status = status or _compare(self._identity, peer)
        if status is not Status.OK:
            raise _refusal(f"{who} refused the connection", status, self._identity, peer)
        self.peer = peer
        return _mac(self._secret, b"C", self._hello, challenge)


class ServerHandshake:
    """The side that accepts: read `HELLO_SIZE` bytes, send `challenge()`, read `PROOF_SIZE` bytes, `verify()` them.

    Args:
        identity: who this end is. With kind STORE it accepts only STORE connections, with another kind only the others.
        key: the job key, None for the null key of loopback.
        random_bytes: source of the nonce, normally `Runtime.random_bytes`.

    Attributes:
        refusal: the error of a HELLO that was declined. Send the challenge all the same (it tells the client why,
            under a mac), then close.
    """

    def __init__(self, identity: Identity, key: bytes | None, random_bytes: Callable[[int], bytes]) -> None:
        self._identity = identity
        self._key = key
        self._nonce = random_bytes(_NONCE_SIZE)
        self._peer: Peer | None = None
        self._expected_proof = b""
        self.refusal: AuthenticationError | None = None

    def challenge(self, hello: bytes, decide: Callable[[Peer], Status]) -> bytes:
        """Answer the client's first message.

        Args:
            hello: exactly `HELLO_SIZE` bytes.
            decide: asked when the identities agree. The peer is *not proven* yet, so it must change nothing.

        Raises:
            AuthenticationError: this is no HELLO; close without a reply.
        """
        head = _unpack(hello, HELLO_SIZE, "the client")
        status = self._judge(head, decide)
        message = _pack(self._identity, status, self._nonce)
        # Salted by the client's job id, so that a holder of the key learns under a mac that it is in the wrong job.
        secret = _derive(self._key, head.job_id)
        message += _mac(secret, b"S", hello, message)
        self._expected_proof = _mac(secret, b"C", hello, message)
        return message

    def verify(self, proof: bytes) -> Peer:
        """Check the client's last message and return who it is.

        Raises:
            AuthenticationError: the client does not hold the key, or was declined by `challenge`.
        """
        if self.refusal is not None:
            raise self.refusal
        if self._peer is None:
            raise AssertionError("verify() before challenge()")
        if len(proof) != PROOF_SIZE or not hmac.compare_digest(proof, self._expected_proof):
            raise AuthenticationError(
                f"{_name(self._peer.rank)} did not prove that it holds this job's key (its HMAC is wrong): "
                "give every rank the same job_key (AIOCOLL_JOB_KEY)"
            )
        return self._peer

    def _judge(self, head: _Head, decide: Callable[[Peer], Status]) -> Status:
        who = _name(head.rank)
        if head.version != WIRE_VERSION:
            self.refusal = _wrong_version(who, head.version)
            return Status.WRONG_VERSION
        if head.code not in ConnKind.__members__.values():
            raise AuthenticationError(f"{who} asked for a connection of unknown kind {head.code}")
        peer = Peer(head.job_id, head.epoch, head.rank, head.world_size, ConnKind(head.code))
        status = _compare(self._identity, peer) or decide(peer)
        if status is not Status.OK:
            self.refusal = _refusal(f"the connection of {who} was refused", status, self._identity, peer)
        self._peer = peer
        return status


def _derive(key: bytes | None, salt: bytes) -> bytes:
    """HKDF-SHA256 of 32 bytes: extract, then the first block of expand."""
    extracted = hmac.digest(salt, key or b"", "sha256")
    return hmac.digest(extracted, b"aiocoll/1\x01", "sha256")


def _mac(secret: bytes, label: bytes, hello: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, label + hello + challenge, "sha256")


def _pack(identity: Identity, code: int, nonce: bytes) -> bytes:
    return _HEAD.pack(
        MAGIC, WIRE_VERSION, code, 0, identity.job_id, identity.epoch, identity.rank, identity.world_size, nonce
    )


def _unpack(message: bytes, size: int, who: str) -> _Head:
    if message[: len(MAGIC)] != MAGIC:
        raise AuthenticationError(f"{who} does not speak aiocoll's protocol: it sent {bytes(message[:8])!r}")
    if len(message) != size:
        raise AuthenticationError(f"{who} sent {len(message)} bytes of a handshake message of {size}")
    _, version, code, reserved, job, epoch, rank, world_size, nonce = _HEAD.unpack_from(message)
    if reserved != 0:
        raise AuthenticationError(f"{who} set reserved bits of the handshake ({reserved:#06x}): its aiocoll is too new")
    return _Head(version, code, job, epoch, rank, world_size, nonce)


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


def _wrong_version(who: str, version: int) -> HandshakeRefusedError:
    return HandshakeRefusedError(
        f"{who} speaks wire version {version}, this process speaks {WIRE_VERSION}: use one aiocoll everywhere",
        Status.WRONG_VERSION,
    )


def _refusal(what: str, status: Status, mine: Identity, peer: Peer) -> HandshakeRefusedError:
    """Name the two values that differ."""
    reasons = {
        Status.CROSSED: "both ends dialled at once, and the other connection stays",
        Status.DUPLICATE: f"rank {mine.rank} and rank {peer.rank} have a live connection of kind {peer.kind.name}",
        Status.REFUSED: f"rank {mine.rank} and rank {peer.rank} of {mine.world_size} cannot be peers",
        Status.WRONG_JOB: f"it belongs to job {peer.job_id.hex()}, this process to job {mine.job_id.hex()}",
        Status.WRONG_EPOCH: f"it is in epoch {peer.epoch}, this process in epoch {mine.epoch}",
        Status.WRONG_WORLD_SIZE: f"its world size is {peer.world_size}, this process has {mine.world_size}",
        Status.WRONG_KIND: f"a {peer.kind.name} connection was asked for, and a "
        f"{'group' if peer.kind is ConnKind.STORE else 'store'} listens there",
    }
    return HandshakeRefusedError(f"{what}: {reasons.get(status, f'status {status.name}')}", status)
