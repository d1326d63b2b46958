"""The connection handshake: both ends prove that they hold the job key, and reveal nothing before the proof."""

import itertools
import os

import pytest

from aiocoll.errors import AuthenticationError
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    CONFIRM_SIZE,
    HELLO_SIZE,
    PROOF_SIZE,
    VERDICT_SIZE,
    WIRE_VERSION,
    ClientHandshake,
    ConnKind,
    HandshakeRefusedError,
    Identity,
    Peer,
    ServerHandshake,
    Status,
    UnprovenError,
    job_id,
    may_be_handshake,
)
from aiocoll.security.keys import is_loopback, require_key

KEY = bytes(range(32))
JOB = job_id("training")
CLIENT = Identity(JOB, 3, 1, 4, ConnKind.DATA)
SERVER = Identity(JOB, 3, 2, 4, ConnKind.CONTROL)
SIZES = {
    "hello": HELLO_SIZE,
    "challenge": CHALLENGE_SIZE,
    "proof": PROOF_SIZE,
    "verdict": VERDICT_SIZE,
    "confirm": CONFIRM_SIZE,
}


def client(identity: Identity = CLIENT, key: bytes | None = KEY) -> ClientHandshake:
    return ClientHandshake(identity, key, os.urandom)


def server(identity: Identity = SERVER, key: bytes | None = KEY) -> ServerHandshake:
    return ServerHandshake(identity, key, os.urandom)


def accept(peer: Peer) -> Status:
    return Status.OK


def refuse_unproven(peer: Peer) -> Status:
    raise AssertionError("the decision was requested for a peer without a proof")


def exchange(c, s, decide=accept, change=lambda name, message: message) -> Peer:
    """Run the five messages of a handshake through `change`; return the client identity that the server received."""
    challenge = change("challenge", s.challenge(change("hello", c.hello())))
    verdict = change("verdict", s.verdict(change("proof", c.prove(challenge)), decide))
    return s.accept(change("confirm", c.confirm(verdict)))


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("kind", [ConnKind.CONTROL, ConnKind.DATA])
def test_handshake_reports_the_identity_of_each_end_to_the_other_end(key, kind):
    c, s = client(CLIENT._replace(kind=kind), key), server(key=key)
    decided = []
    sizes = {}

    def record_size(name: str, message: bytes) -> bytes:
        sizes[name] = len(message)
        return message

    proven = exchange(c, s, lambda peer: decided.append(peer) or Status.OK, record_size)
    assert sizes == SIZES
    assert proven == Peer(JOB, 3, 1, 4, kind)
    assert decided == [proven]
    assert c.peer == Peer(JOB, 3, 2, 4, kind)


@pytest.mark.parametrize(("client_key", "server_key"), [(KEY, b"x" * 32), (KEY, None), (None, KEY)])
def test_handshake_with_different_job_keys_fails_at_both_ends(client_key, server_key):
    c, s = client(key=client_key), server(key=server_key)
    verdict = s.verdict(c.prove(s.challenge(c.hello())), refuse_unproven)
    with pytest.raises(UnprovenError, match=r"client did not prove that it holds this job's key.*AIOCOLL_JOB_KEY"):
        s.accept(bytes(CONFIRM_SIZE))
    with pytest.raises(UnprovenError, match=r"other end did not prove that it holds this job's key.*AIOCOLL_JOB_KEY"):
        c.confirm(verdict)


def test_handshake_with_different_certificates_fails_at_both_ends():
    """Simulate a man in the middle that forwards all messages between two TLS connections."""
    for seen_by_client, seen_by_server in ((b"1" * 32, b"2" * 32), (b"", b"2" * 32), (b"1" * 32, b"")):
        c = ClientHandshake(CLIENT, KEY, os.urandom, seen_by_client)
        s = ServerHandshake(SERVER, KEY, os.urandom, seen_by_server)
        verdict = s.verdict(c.prove(s.challenge(c.hello())), refuse_unproven)
        assert isinstance(s.refusal, UnprovenError)
        with pytest.raises(UnprovenError, match="other end did not prove"):
            c.confirm(verdict)
    c, s = (
        end(identity, KEY, os.urandom, b"1" * 32)
        for end, identity in ((ClientHandshake, CLIENT), (ServerHandshake, SERVER))
    )
    assert exchange(c, s) == Peer(*CLIENT)


def test_server_reveals_nothing_to_a_client_without_the_job_key():
    """Check that the server sends only a nonce and zeros, whatever its identity and the client's proof are."""
    verdicts = set()
    for identity in (SERVER, Identity(job_id("another"), 9, 0, 77, ConnKind.STORE)):
        for proof in (bytes(PROOF_SIZE), os.urandom(PROOF_SIZE), b""):
            s = server(identity)
            challenge = s.challenge(client().hello())
            assert challenge[:8] == b"aioc" + bytes([WIRE_VERSION, 0, 0, 0])
            verdicts.add(s.verdict(proof, refuse_unproven))
            assert isinstance(s.refusal, UnprovenError)
    assert verdicts == {bytes(VERDICT_SIZE)}


def test_handshake_messages_before_the_proof_contain_only_nonces():
    """Use nonces of zeros: all HELLO and CHALLENGE messages are then equal, whatever the identities and keys are."""
    other = Identity(job_id("another"), 9, 0, 77, ConnKind.STORE)
    hellos = [ClientHandshake(identity, key, bytes).hello() for identity in (CLIENT, other) for key in (KEY, None)]
    servers = [ServerHandshake(identity, key, bytes) for identity in (SERVER, other) for key in (KEY, None)]
    assert {each.challenge(hellos[0]) for each in servers} == set(hellos) == {hellos[0]}


def test_handshake_message_reflected_to_its_sender_is_refused():
    """Send the proof back to the client, and a part of the verdict back to the server."""
    c, s = client(), server()
    proof = c.prove(s.challenge(c.hello()))
    with pytest.raises(UnprovenError):
        c.confirm(proof)
    verdict = s.verdict(proof, accept)
    with pytest.raises(UnprovenError):
        s.accept(verdict[-CONFIRM_SIZE:])


def test_client_refuses_a_server_that_echoes_its_handshake_messages():
    c = client()
    proof = c.prove(c.hello())
    with pytest.raises(UnprovenError, match="did not prove"):
        c.confirm(proof)


def test_handshake_messages_recorded_from_an_earlier_handshake_are_refused():
    c, s = client(), server()
    challenge = s.challenge(c.hello())
    proof = c.prove(challenge)
    verdict = s.verdict(proof, accept)
    confirm = c.confirm(verdict)
    again = server()
    again.challenge(c.hello())
    assert again.verdict(proof, refuse_unproven) == bytes(VERDICT_SIZE)
    other = client()
    other.prove(challenge)
    with pytest.raises(UnprovenError, match="did not prove"):
        other.confirm(verdict)
    third, new = server(), client()
    third.verdict(new.prove(third.challenge(new.hello())), accept)
    with pytest.raises(UnprovenError, match="rank 1 did not send a valid CONFIRM"):
        third.accept(confirm)


@pytest.mark.parametrize("message", list(SIZES))
def test_handshake_message_with_a_changed_byte_is_refused(message):
    for position, flip in itertools.product(range(SIZES[message]), (0x01, 0x80)):

        def flip_byte(name: str, sent: bytes, position: int = position, flip: int = flip) -> bytes:
            if name != message:
                return sent
            return sent[:position] + bytes([sent[position] ^ flip]) + sent[position + 1 :]

        with pytest.raises(UnprovenError):
            exchange(client(), server(), accept if message in ("verdict", "confirm") else refuse_unproven, flip_byte)


@pytest.mark.parametrize("message", list(SIZES))
def test_truncated_and_overlong_handshake_messages_are_refused(message):
    for size in (*range(SIZES[message]), SIZES[message] + 1):

        def resize(name: str, sent: bytes, size: int = size) -> bytes:
            return (sent + b"\0")[:size] if name == message else sent

        with pytest.raises(UnprovenError):
            exchange(client(), server(), accept if message in ("verdict", "confirm") else refuse_unproven, resize)


def test_handshake_error_shows_the_first_bytes_of_a_foreign_protocol():
    with pytest.raises(UnprovenError, match=r"client does not use aiocoll's protocol: it sent b'GET / HT'"):
        server().challenge(b"GET / HTTP/1.1\r\n".ljust(HELLO_SIZE))
    with pytest.raises(UnprovenError, match=r"other end does not use aiocoll's protocol: it sent b'SSH-2.0-'"):
        client().prove(b"SSH-2.0-OpenSSH".ljust(CHALLENGE_SIZE))


def test_handshake_with_an_unknown_connection_kind_is_refused():
    s, c = server(), client(CLIENT._replace(kind=9))
    verdict = s.verdict(c.prove(s.challenge(c.hello())), refuse_unproven)
    with pytest.raises(HandshakeRefusedError) as caught:
        s.accept(bytes(CONFIRM_SIZE))
    assert caught.value.status is Status.REFUSED
    assert verdict != bytes(VERDICT_SIZE), "a client that holds the key gets no verdict"


@pytest.mark.parametrize(
    ("change", "status", "values"),
    [
        ({"job_id": job_id("other")}, Status.WRONG_JOB, (JOB.hex(), job_id("other").hex())),
        ({"epoch": 7}, Status.WRONG_EPOCH, ("epoch 3", "epoch 7")),
        ({"world_size": 9}, Status.WRONG_WORLD_SIZE, ("4", "9")),
        ({"kind": ConnKind.STORE}, Status.WRONG_KIND, ("STORE connection", "group listens there")),
    ],
)
def test_handshake_refusal_names_the_different_values_at_both_ends(change, status, values):
    c, s = client(CLIENT._replace(**change)), server()
    verdict = s.verdict(c.prove(s.challenge(c.hello())), refuse_unproven)
    with pytest.raises(HandshakeRefusedError) as at_client:
        c.confirm(verdict)
    with pytest.raises(HandshakeRefusedError) as at_server:
        s.accept(bytes(CONFIRM_SIZE))
    assert s.refusal is at_server.value
    for error in (at_client.value, at_server.value):
        assert error.status is status
        assert all(value in str(error) for value in values)


def test_handshake_error_names_the_wire_versions_of_both_ends():
    hello = bytearray(client().hello())
    hello[4] = 9
    s = server()
    answered = bytearray(s.challenge(bytes(hello)))
    message = f"other end uses wire version 9, this process {WIRE_VERSION}; use the same aiocoll on all ranks"
    with pytest.raises(UnprovenError, match=message):
        s.accept(bytes(CONFIRM_SIZE))
    assert answered[4] == WIRE_VERSION, "the client does not receive the server's version"
    answered[4] = 9
    with pytest.raises(UnprovenError, match=message):
        client().prove(bytes(answered))


@pytest.mark.parametrize("status", [Status.CROSSED, Status.DUPLICATE, Status.REFUSED, Status.WRONG_CERTIFICATE])
def test_handshake_refusal_by_the_server_reaches_the_client_with_its_status(status):
    c, s = client(), server()
    verdict = s.verdict(c.prove(s.challenge(c.hello())), lambda peer: status)
    with pytest.raises(HandshakeRefusedError) as caught:
        c.confirm(verdict)
    assert caught.value.status is status
    with pytest.raises(HandshakeRefusedError):
        s.accept(bytes(CONFIRM_SIZE))


def test_client_refuses_a_server_of_another_epoch_that_accepts_the_handshake(monkeypatch):
    c, careless = client(), server(SERVER._replace(epoch=8))
    monkeypatch.setattr(careless, "_judge", lambda claim, decide: Status.OK)
    with pytest.raises(HandshakeRefusedError, match="it is in epoch 8, this process in epoch 3"):
        exchange(c, careless)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_connections_need_no_job_key(host):
    assert is_loopback(host)
    require_key(host, None)
    require_key(host, KEY)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "2001:db8::1", "example.org", ""])
def test_connections_to_non_loopback_addresses_need_a_job_key(host):
    assert not is_loopback(host)
    require_key(host, KEY)
    with pytest.raises(AuthenticationError, match=r"no job key.*aiocoll run.*job_key=.*AIOCOLL_JOB_KEY"):
        require_key(host, None)


@pytest.mark.parametrize("host", ["10.0.0.1", "127.0.0.1"])
def test_short_job_key_is_refused_for_loopback_and_other_addresses(host):
    with pytest.raises(AuthenticationError, match="job_key has 15 bytes, but needs at least 16"):
        require_key(host, KEY[:15])
    require_key(host, KEY[:16])


def test_job_id_is_a_fixed_hash_of_the_job_key():
    assert job_id("") == bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb924")


def test_first_bytes_of_a_handshake_message_are_recognized() -> None:
    hello = client().hello()
    challenge = server().challenge(hello)
    for message in (hello, challenge):
        assert all(may_be_handshake(message[:count]) for count in range(len(message) + 1))
    for place in range(4):
        other = bytearray(hello)
        other[place] ^= 1
        assert [may_be_handshake(bytes(other[:count])) for count in range(6)] == [count <= place for count in range(6)]
