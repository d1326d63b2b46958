"""The handshake: both ends prove the key, and nothing else gets through."""

import itertools
import os

import pytest

from aiocoll.errors import AuthenticationError
from aiocoll.handshake import (
    CHALLENGE_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    ClientHandshake,
    ConnKind,
    HandshakeRefusedError,
    Identity,
    Peer,
    ServerHandshake,
    Status,
    is_loopback,
    job_id,
    may_be_ours,
    require_key,
)

KEY = bytes(range(32))
JOB = job_id("training")
CLIENT = Identity(JOB, 3, 1, 4, ConnKind.DATA)
SERVER = Identity(JOB, 3, 2, 4, ConnKind.CONTROL)


def client(identity: Identity = CLIENT, key: bytes | None = KEY) -> ClientHandshake:
    return ClientHandshake(identity, key, os.urandom)


def server(identity: Identity = SERVER, key: bytes | None = KEY) -> ServerHandshake:
    return ServerHandshake(identity, key, os.urandom)


def accept(peer: Peer) -> Status:
    return Status.OK


def refused_by_client(c: ClientHandshake, s: ServerHandshake) -> str:
    """Run the first two messages; return the client's complaint."""
    challenge = s.challenge(c.hello(), accept)
    with pytest.raises(AuthenticationError) as caught:
        c.answer(challenge)
    return str(caught.value)


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("kind", [ConnKind.CONTROL, ConnKind.DATA])
def test_both_ends_learn_who_the_other_is(key, kind):
    c, s = client(CLIENT._replace(kind=kind), key), server(key=key)
    asked = []
    challenge = s.challenge(c.hello(), lambda peer: asked.append(peer) or Status.OK)
    proof = c.answer(challenge)
    assert (len(c.hello()), len(challenge), len(proof)) == (HELLO_SIZE, CHALLENGE_SIZE, PROOF_SIZE)
    assert s.verify(proof) == Peer(JOB, 3, 1, 4, kind)
    assert asked == [Peer(JOB, 3, 1, 4, kind)]
    assert c.peer == Peer(JOB, 3, 2, 4, kind)


def test_client_with_another_key_refuses_the_server():
    message = refused_by_client(client(key=b"x" * 32), server())
    assert "rank 2 did not prove that it holds this job's key" in message
    assert "AIOCOLL_JOB_KEY" in message


def test_null_key_is_another_key():
    assert "did not prove" in refused_by_client(client(key=None), server())
    assert "did not prove" in refused_by_client(client(), server(key=None))


def test_server_refuses_a_proof_made_with_another_key():
    s = server()
    c = client()
    s.challenge(c.hello(), accept)
    stranger = client(key=b"x" * 32)
    challenge = server(key=b"x" * 32).challenge(stranger.hello(), accept)
    with pytest.raises(AuthenticationError, match="rank 1 did not prove that it holds this job's key"):
        s.verify(stranger.answer(challenge))


def test_reflecting_the_servers_mac_proves_nothing():
    s = server()
    challenge = s.challenge(client().hello(), accept)
    with pytest.raises(AuthenticationError, match="did not prove"):
        s.verify(challenge[-PROOF_SIZE:])


def test_hello_sent_back_is_no_challenge():
    c = client()
    with pytest.raises(AuthenticationError, match=f"{HELLO_SIZE} bytes of a handshake message of {CHALLENGE_SIZE}"):
        c.answer(c.hello())


def test_recorded_messages_are_worthless_with_other_nonces():
    c, s = client(), server()
    challenge = s.challenge(c.hello(), accept)
    proof = c.answer(challenge)
    again = server()
    again.challenge(c.hello(), accept)
    with pytest.raises(AuthenticationError, match="did not prove"):
        again.verify(proof)
    with pytest.raises(AuthenticationError, match="did not prove"):
        client().answer(challenge)


@pytest.mark.parametrize("message", ["hello", "challenge", "proof"])
def test_every_flipped_byte_is_refused(message):
    sizes = {"hello": HELLO_SIZE, "challenge": CHALLENGE_SIZE, "proof": PROOF_SIZE}
    for position, flip in itertools.product(range(sizes[message]), (0x01, 0x80)):
        c, s = client(), server()

        def cross(name: str, sent: bytes, position: int = position, flip: int = flip) -> bytes:
            if name != message:
                return sent
            return sent[:position] + bytes([sent[position] ^ flip]) + sent[position + 1 :]

        with pytest.raises(AuthenticationError):
            s.verify(cross("proof", c.answer(cross("challenge", s.challenge(cross("hello", c.hello()), accept)))))


def test_truncated_and_overlong_messages_are_refused():
    c, s = client(), server()
    challenge = s.challenge(c.hello(), accept)
    proof = c.answer(challenge)
    for size in (*range(HELLO_SIZE), HELLO_SIZE + 1):
        with pytest.raises(AuthenticationError):
            server().challenge((c.hello() + b"\0")[:size], accept)
    for size in (*range(CHALLENGE_SIZE), CHALLENGE_SIZE + 1):
        with pytest.raises(AuthenticationError):
            c.answer((challenge + b"\0")[:size])
    for size in (*range(PROOF_SIZE), PROOF_SIZE + 1):
        with pytest.raises(AuthenticationError):
            s.verify((proof + b"\0")[:size])


def test_other_protocols_are_named():
    with pytest.raises(AuthenticationError, match=r"client does not speak aiocoll's protocol: it sent b'GET / HT'"):
        server().challenge(b"GET / HTTP/1.1\r\n".ljust(HELLO_SIZE), accept)
    with pytest.raises(AuthenticationError, match=r"server does not speak aiocoll's protocol: it sent b'SSH-2.0-'"):
        client().answer(b"SSH-2.0-OpenSSH".ljust(CHALLENGE_SIZE))


def test_unknown_connection_kind_is_refused():
    hello = bytearray(client().hello())
    hello[5] = 9
    with pytest.raises(AuthenticationError, match="unknown kind 9"):
        server().challenge(bytes(hello), accept)


@pytest.mark.parametrize(
    ("change", "status", "values"),
    [
        ({"job_id": job_id("other")}, Status.WRONG_JOB, (JOB.hex(), job_id("other").hex())),
        ({"epoch": 7}, Status.WRONG_EPOCH, ("epoch 3", "epoch 7")),
        ({"world_size": 9}, Status.WRONG_WORLD_SIZE, ("4", "9")),
        ({"kind": ConnKind.STORE}, Status.WRONG_KIND, ("STORE connection", "group listens there")),
    ],
)
def test_disagreement_is_authenticated_and_names_both_values(change, status, values):
    c, s = client(CLIENT._replace(**change)), server()
    challenge = s.challenge(c.hello(), accept)
    with pytest.raises(HandshakeRefusedError) as at_client:
        c.answer(challenge)
    with pytest.raises(HandshakeRefusedError) as at_server:
        s.verify(bytes(PROOF_SIZE))
    assert s.refusal is at_server.value
    for error in (at_client.value, at_server.value):
        assert error.status is status
        assert all(value in str(error) for value in values)


def test_another_wire_version_names_both():
    hello = bytearray(client().hello())
    hello[4] = 9
    s = server()
    challenge = s.challenge(bytes(hello), accept)
    with pytest.raises(HandshakeRefusedError, match="rank 1 speaks wire version 9, this process speaks 1"):
        s.verify(bytes(PROOF_SIZE))
    answered = bytearray(challenge)
    answered[4] = 9
    with pytest.raises(HandshakeRefusedError, match="rank 2 speaks wire version 9, this process speaks 1"):
        client().answer(bytes(answered))


@pytest.mark.parametrize("status", [Status.CROSSED, Status.DUPLICATE, Status.REFUSED])
def test_the_servers_decision_reaches_the_client_under_a_mac(status):
    c, s = client(), server()
    challenge = s.challenge(c.hello(), lambda peer: status)
    with pytest.raises(HandshakeRefusedError) as caught:
        c.answer(challenge)
    assert caught.value.status is status
    with pytest.raises(HandshakeRefusedError):
        s.verify(bytes(PROOF_SIZE))


def test_a_server_that_claims_ok_in_another_epoch_is_refused(monkeypatch):
    c, careless = client(), server(SERVER._replace(epoch=8))
    monkeypatch.setattr(careless, "_judge", lambda head, decide: Status.OK)
    with pytest.raises(HandshakeRefusedError, match="it is in epoch 8, this process in epoch 3"):
        c.answer(careless.challenge(c.hello(), accept))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_no_key(host):
    assert is_loopback(host)
    require_key(host, None)
    require_key(host, KEY)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "2001:db8::1", "example.org", ""])
def test_other_addresses_need_a_key(host):
    assert not is_loopback(host)
    require_key(host, KEY)
    with pytest.raises(AuthenticationError, match=r"no job key.*aiocoll run.*job_key=.*AIOCOLL_JOB_KEY"):
        require_key(host, None)


@pytest.mark.parametrize("host", ["10.0.0.1", "127.0.0.1"])
def test_short_keys_are_refused_everywhere(host):
    with pytest.raises(AuthenticationError, match="job_key has 15 bytes, at least 16 are needed"):
        require_key(host, KEY[:15])
    require_key(host, KEY[:16])


def test_job_id_is_a_fixed_hash():
    assert job_id("") == bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb924")


def test_the_beginning_of_a_message_is_told_from_other_bytes() -> None:
    hello = client().hello()
    challenge = server().challenge(hello, accept)
    for message in (hello, challenge):
        assert all(may_be_ours(message[:count]) for count in range(len(message) + 1))
    for place in range(4):
        other = bytearray(hello)
        other[place] ^= 1
        assert [may_be_ours(bytes(other[:count])) for count in range(6)] == [count <= place for count in range(6)]
