"""Addresses: the host id, listeners on sockets, and connection attempts by `reach`."""

import asyncio
import errno
import os
import re
import socket
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from aiocoll.errors import RendezvousError
from aiocoll.runtime import Runtime
from aiocoll.transport.stream import addresses as address

from ..ports import free_ports

# Create a uvloop once: the first loop of libuv opens a pipe that stays open, and would count as a leaked descriptor.
uvloop.new_event_loop().close()

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) != errno.EADDRNOTAVAIL


ipv6 = pytest.mark.skipif(not socket.has_ipv6 or not has_ipv6(), reason="this host has no IPv6 loopback")


def test_host_identity_is_equal_for_all_processes_of_a_host() -> None:
    assert address.host_identity() == address.host_identity(None)
    assert re.fullmatch("[0-9a-f]{16}", address.host_identity())


def test_host_identity_can_be_overridden() -> None:
    assert address.host_identity("a") == address.host_identity("a")
    assert len({address.host_identity(), address.host_identity("a"), address.host_identity("b")}) == 3


def test_host_identity_is_unique_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError

    real = address.host_identity()
    monkeypatch.setattr("builtins.open", fail)
    monkeypatch.setattr("uuid.getnode", lambda: 1)
    first = address.host_identity()
    monkeypatch.setattr("uuid.getnode", lambda: 2)
    assert len({real, first, address.host_identity()}) == 3


@linux_only
def test_abstract_unix_listener_leaves_no_file_on_disk() -> None:
    listener, name = address.open_unix(lambda n: b"\xab" * n)
    with listener:
        assert name == "@aiocoll-" + "ab" * 16
        assert address.unix_address(name) == "\0aiocoll-" + "ab" * 16
        assert not listener.get_inheritable()
    address.remove_unix(name)


def test_unix_listener_on_disk_is_private_to_the_user() -> None:
    listener, name = address.open_unix(os.urandom, abstract=False)
    with listener:
        assert stat.S_IMODE(os.stat(os.path.dirname(name)).st_mode) == 0o700
        assert address.unix_address(name) == name
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
    address.remove_unix(name)
    assert not os.path.exists(os.path.dirname(name))
    address.remove_unix(name)


def test_tcp_listener_on_a_foreign_address_is_refused() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on 192\.0\.2\.254: .*bind=, interface= and port_range="):
        address.open_tcp("192.0.2.254")


def test_tcp_listeners_use_the_ports_of_the_given_range() -> None:
    first = free_ports(3)
    with ExitStack() as stack:
        taken = [stack.enter_context(address.open_tcp("127.0.0.1", (first, first + 2))) for _ in range(3)]
        assert [listener.getsockname()[1] for listener in taken] == [first, first + 1, first + 2]
        message = (
            rf"cannot listen on 127\.0\.0\.1: no port of port_range=\({first}, {first + 2}\) is free; set a wider "
        )
        with pytest.raises(RendezvousError, match=message):
            address.open_tcp("127.0.0.1", (first, first + 2))
        taken[1].close()
        assert stack.enter_context(address.open_tcp("127.0.0.1", (first, first + 2))).getsockname()[1] == first + 1


def test_port_with_connections_of_a_finished_job_can_be_used(port: int) -> None:
    where = "127.0.0.1", port
    with address.open_tcp("127.0.0.1", (port,) * 2) as listener, socket.create_connection(where) as client:
        listener.setblocking(True)
        accepted, _ = listener.accept()
        accepted.close()  # the side that closes first keeps the port for a minute
        assert client.recv(1) == b""
    address.open_tcp("127.0.0.1", (port,) * 2).close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen on any port")
def test_privileged_port_of_a_range_is_refused() -> None:
    with pytest.raises(RendezvousError, match=r"cannot listen on port 1 of 127\.0\.0\.1: .*port_range="):
        address.open_tcp("127.0.0.1", (1, 1))


async def test_reach_raises_blocking_io_error_for_a_full_backlog() -> None:
    loop = asyncio.get_running_loop()
    listener, name = address.open_unix(os.urandom)
    target = address.unix_address(name)
    with listener:
        listener.listen(0)
        first = await address.reach(loop, socket.AF_UNIX, target)
        with first, pytest.raises(BlockingIOError):
            await address.reach(loop, socket.AF_UNIX, target)
    address.remove_unix(name)


async def test_reach_reports_the_connecting_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting: list[int] = []
        loop, where = asyncio.get_running_loop(), listener.getsockname()
        with await address.reach(loop, socket.AF_INET, where, connecting=connecting.append) as sock:
            assert connecting == [sock.fileno()]


async def test_reach_is_refused_by_a_port_without_a_listener() -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            await address.reach(loop, socket.AF_INET, bound.getsockname())


@linux_only
async def test_reach_does_not_connect_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class SelfConnectingSocket(socket.socket):
        """A socket that binds itself to the port that it dials, since the kernel may choose this port, too."""

        def connect_ex(self, target: tuple[str, int]) -> int:
            self.bind(target)
            return super().connect_ex(target)

    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        free = bound.getsockname()
    monkeypatch.setattr("socket.socket", SelfConnectingSocket)
    with pytest.raises(ConnectionRefusedError):
        await address.reach(asyncio.get_running_loop(), socket.AF_INET, free)


async def test_reach_raises_connection_reset_error_for_a_listener_that_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the listener accept and reset the connection between two system calls of `reach`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        class ResetSocket(socket.socket):
            def getsockopt(self, *option: int) -> Any:
                code = super().getsockopt(*option)
                accepted, _ = listener.accept()
                with accepted:
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return code

        target = listener.getsockname()
        monkeypatch.setattr("socket.socket", ResetSocket)
        with pytest.raises(ConnectionResetError):
            await address.reach(asyncio.get_running_loop(), socket.AF_INET, target)


class StarvedListener:
    """A listening socket whose first `failures` calls of `accept` fail for lack of file descriptors."""

    def __init__(self, real: socket.socket, failures: int) -> None:
        self.real = real
        self.failures = failures

    def fileno(self) -> int:
        return self.real.fileno()

    def close(self) -> None:
        self.real.close()

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.real.accept()


class ManualTimers(Runtime):
    """A runtime that records timers, so that the test decides when each timer fires."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.timers: list[tuple[float, object, tuple[object, ...]]] = []
        self.handles: list[asyncio.TimerHandle] = []
        self.changed = asyncio.Event()
        self.call_later = self.record_timer

    def record_timer(self, delay: float, callback: object, *args: object) -> asyncio.TimerHandle:
        self.timers.append((delay, callback, args))
        self.changed.set()
        self.handles.append(self.loop.call_later(3600, lambda: None))
        return self.handles[-1]


async def test_lack_of_file_descriptors_delays_accept_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.get_running_loop()
    runtime = ManualTimers(loop)
    greeted: asyncio.Queue[socket.socket] = asyncio.Queue()
    listeners = address.Listeners(runtime, greeted.put_nowait)
    real, name = address.open_unix(os.urandom)
    starved = StarvedListener(real, 3)
    listeners.add(starved)
    client = await address.reach(loop, socket.AF_UNIX, address.unix_address(name))
    for left in (2, 1, 0):
        await runtime.changed.wait()
        runtime.changed.clear()
        for _ in range(3):
            await asyncio.sleep(0)
        assert starved.failures == left, "accept was called again during the pause"
        (delay, resume, args) = runtime.timers.pop()
        assert delay == 0.1
        resume(*args)
    with client, await greeted.get() as served:
        assert served.gettimeout() == 0
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept connections (Too many open files); trying again every 0.1 s"
    ]
    listeners.close()
    address.remove_unix(name)


async def test_close_of_a_listener_without_free_descriptors_cancels_the_accept_retry() -> None:
    loop = asyncio.get_running_loop()
    runtime = ManualTimers(loop)
    listeners = address.Listeners(runtime, socket.socket.close)
    real, name = address.open_unix(os.urandom)
    listeners.add(StarvedListener(real, 1))
    with await address.reach(loop, socket.AF_UNIX, address.unix_address(name)):
        await runtime.changed.wait()
        listeners.close()
    assert real.fileno() == -1
    assert [handle.cancelled() for handle in runtime.handles] == [True]
    address.remove_unix(name)


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_listener_that_was_finalized_before_its_owner_is_closed(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Close the event loop and the listener first, as garbage collection may finalize a cycle in any order."""
    running = loop()
    listeners = address.Listeners(Runtime(running), socket.socket.close)
    listener, name = address.open_unix(os.urandom)
    listeners.add(listener)
    running.close()
    os.close(listener.detach())
    listeners.close()
    address.remove_unix(name)
