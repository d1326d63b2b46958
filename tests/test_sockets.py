"""Socket options and TCP statistics of the kernel, as aiocoll sets and reads them.

The tests in `tests/hosts` check the effects on connections.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest

from aiocoll import sockets
from aiocoll.sockets import (
    enable_keepalive,
    is_between_hosts,
    is_ready,
    retry_soon,
    round_trip,
    send_evenly,
    send_in_bursts,
    silence,
    window,
)
from aiocoll.store import address

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these are options of Linux")

#: The number of a socket option, from <linux/tcp.h>.
TCP_RTO_MAX_MS = 44
#: The number of a socket option, from <asm-generic/socket.h>, and its value for an unlimited rate.
SO_MAX_PACING_RATE, UNLIMITED = 47, (1 << 64) - 1


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both sockets of a TCP connection over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as here,
        listener.accept()[0] as there,
    ):
        yield here, there


def knows_rto_max() -> bool:
    with socket.socket() as probe:
        try:
            probe.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError:
            return False
    return True


def option(sock: socket.socket, number: int) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, number)


@pytest.mark.skipif(not knows_rto_max(), reason="this kernel is older than 6.15")
def test_maximum_tcp_retransmission_timeout_is_set_to_one_second(pair: tuple[socket.socket, socket.socket]) -> None:
    retry_soon(pair[0])
    assert option(pair[0], TCP_RTO_MAX_MS) == 1000


def test_socket_option_unknown_to_an_older_kernel_is_ignored(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_TCP_RTO_MAX_MS", 444)
    retry_soon(pair[0])
    assert option(pair[0], socket.TCP_NODELAY) == 1


def test_connection_between_ranks_has_keepalive_probes_and_no_user_timeout(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    retry_soon(pair[0])
    enable_keepalive(pair[0])
    assert option(pair[0], socket.TCP_USER_TIMEOUT) == 0
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert (option(pair[0], socket.TCP_KEEPIDLE), option(pair[0], socket.TCP_KEEPINTVL)) == (1, 1)


def test_both_ends_of_a_store_connection_tolerate_an_outage_of_15_minutes() -> None:
    with address.listen("127.0.0.1", 0, None) as listener:
        listener.setblocking(True)
        with address.StoreEndpoint(socket.AF_INET, listener.getsockname()).socket() as client:
            client.setblocking(True)
            client.connect(listener.getsockname())
            with listener.accept()[0] as accepted:
                for sock in client, accepted:
                    assert option(sock, socket.TCP_USER_TIMEOUT) == 900_000
                    if knows_rto_max():
                        assert option(sock, TCP_RTO_MAX_MS) == 1000


def test_peer_of_a_loopback_connection_is_on_this_host(pair: tuple[socket.socket, socket.socket]) -> None:
    assert not any(map(is_between_hosts, pair))
    for sock in (unix := socket.socketpair()):
        assert not is_between_hosts(sock)
    for sock in unix:
        sock.close()


@pytest.mark.parametrize(
    ("sent_again", "probes", "since_data", "since_answer", "expected"),
    [
        (0, 0, 60_000, 60_000, 0.0),  # an idle connection has no unanswered probe
        (4, 0, 60_000, 5_300, 5.3),
        (0, 5, 5_300, 60_000, 5.3),  # data counts as an answer
        (2, 1, 60_000, 60_000, 0.0),  # no recent probe was sent, as after a pause of this host
    ],
)
def test_silence_of_a_tcp_peer_is_measured_by_unanswered_probes(
    pair: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    sent_again: int,
    probes: int,
    since_data: int,
    since_answer: int,
    expected: float,
) -> None:
    class Known:
        def getsockopt(self, level: int, name: int, size: int) -> bytes:
            # struct tcp_info: 8 bytes, then 32-bit fields. The last two of the packed fields are the times since the
            # last received data and since the last received acknowledgement.
            packed = struct.pack("=8B13I", 1, 0, sent_again, probes, 0, 0, 0, 0, *range(11), since_data, since_answer)
            return packed[:size]

    known: socket.socket = Known()  # type: ignore[assignment]
    assert silence(known) == expected
    assert silence(pair[0]) == 0.0


def test_round_trip_time_is_read_from_the_kernel(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    here.sendall(b"x")
    assert there.recv(1) == b"x"
    there.sendall(b"x")
    assert here.recv(1) == b"x"
    for end in pair:
        assert 1e-6 <= round_trip(end) < 1.0


def test_connection_that_sends_in_bursts_does_not_use_bbr() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as here:
        send_in_bursts(here)
        here.connect(listener.getsockname())
        assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"reno"


def test_paced_connection_has_a_very_high_rate_limit() -> None:
    """Check also the lower 32 bits, since older kernels read only these, and all ones would mean no limit."""
    with socket.socket() as sock:
        assert pacing_rate(sock) == UNLIMITED
        send_evenly(sock)
        assert 1 << 40 < pacing_rate(sock) < UNLIMITED
        assert 1 << 31 < pacing_rate(sock) & 0xFFFFFFFF < 0xFFFFFFFF


def pacing_rate(sock: socket.socket) -> int:
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8), sys.byteorder)


def test_send_window_is_limited_by_the_send_buffer(pair: tuple[socket.socket, socket.socket]) -> None:
    here, _ = pair
    before = window(here)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel raises it to its minimum
    assert window(here) == here.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) * 3 // 4 < before


def test_congestion_window_is_read_from_the_kernel(pair: tuple[socket.socket, socket.socket]) -> None:
    """Expect the initial window of 10 segments (RFC 6928), each with 536 bytes or more."""
    before = window(pair[0])
    assert 10 * 536 <= before <= 10 * (1 << 16)
    here, there = socket.socketpair()
    with here, there:
        assert window(here) == 0


def test_socket_with_data_to_read_is_ready(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    assert not is_ready(here.fileno())
    there.send(b"a")
    assert is_ready(here.fileno())
    here.recv(1)
    assert not is_ready(here.fileno())
    there.shutdown(socket.SHUT_WR)
    assert is_ready(here.fileno())
    assert not is_ready(-1)


def test_connected_socket_is_ready_to_write() -> None:
    full, other = socket.socketpair()
    with full, other:
        full.setblocking(False)
        assert is_ready(full.fileno(), to_write=True)
        with suppress(BlockingIOError):
            while True:
                full.send(bytes(1 << 16))
        assert not is_ready(full.fileno(), to_write=True)
    with socket.socket() as refused, socket.create_server(("127.0.0.1", 0)) as listener:
        address_of_listener = listener.getsockname()
        listener.close()
        refused.setblocking(False)
        refused.connect_ex(address_of_listener)
        assert is_ready(refused.fileno(), to_write=True), "a refused connection is not ready"
