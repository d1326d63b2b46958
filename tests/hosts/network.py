"""Simulated hosts: network namespaces of this machine, each connected to one switch. Needs root and iproute2.

    switch (a namespace of its own): a bridge with the ports p0, p1, ...
    host i: eth0 at the other end of p<i>, 10.77.0.<i+1> and fd77::<i+1>, no route to other networks

Faults happen at the switch, as with real cables and firewalls: the ranks get no notice. `cable.c` gives a cable a rate,
a delay and losses: it carries the frames from one interface to another. All names have the number of this process, so
that a later run finds the leftovers of a killed one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: The timeout of each action in seconds; each action usually takes less than 33 % of this time.
LIMIT = 60
#: A directory with /etc files for each namespace, which `ip netns exec` mounts over the files of the machine.
_ETC = Path("/etc/netns")
_MARK = "aiocoll-test"
#: The command prefix that runs a command in a simulated pod.
_POD = (
    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts", "--ipc", "sh", "-c"),
    'hostname "$0" && mount -t tmpfs pod /dev/shm && exec "$@"',
    "pod",
)
_CABLE = Path(__file__).with_name("cable.c")
MIB = 1 << 20
#: Packet size in bytes, and the maximum size in bytes and maximum duration in seconds of a kernel (GSO) frame.
_PACKET, _SEGMENTS, _BURST = 1500, 65535, 1e-4


def obstacle() -> str | None:
    """Return the reason why this machine cannot simulate hosts, or None if it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for tool in ("ip", "nft", "cc"):
        if shutil.which(tool) is None:
            return f"needs {tool}: apt-get install iproute2 nftables gcc libc6-dev"
    try:
        with Network(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces here: {error.stderr.strip()}"


class Host:
    """A network namespace that stands in for a host.

    Args:
        number: the number of the host, and of its port at the switch.
        pods: whether each command runs in its own container, with other processes, another host name and other shared
            memory than the rest of the machine.

    Attributes:
        name: the name of its namespace.
        ipv4, ipv6: its addresses.
    """

    def __init__(self, number: int, pods: bool = False) -> None:
        self.number = number
        self.pods = pods
        self.name = f"{_MARK}-{os.getpid()}-{number}"
        self.ipv4 = f"10.77.0.{number + 1}"
        self.ipv6 = f"fd77::{number + 1}"

    def file(self, name: str, text: str) -> None:
        """Replace the content of /etc/`name` by `text` for all processes that start on this host from now on."""
        folder = _ETC / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs `arguments` on this host, or in a new pod if the host runs pods."""
        return ["ip", "netns", "exec", self.name, *(_POD if self.pods else ()), *arguments]

    def run(self, *arguments: str) -> str:
        """Run a command on this host; return its output."""
        return _run(*self.command(*arguments))


class Network:
    """A context manager with some simulated hosts and the switch between them.

    Args:
        size: number of hosts.
        pods: see `Host`.
    """

    def __init__(self, size: int, pods: bool = False) -> None:
        self.hosts = [Host(number, pods) for number in range(size)]
        self._switch = f"{_MARK}-{os.getpid()}-switch"
        self._cables: subprocess.Popen[str] | None = None

    def __enter__(self) -> Network:
        _remove_leftovers()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    # -- faults

    def unplug(self, number: int) -> None:
        """Pull the cable of a host out of the switch."""
        _run("ip", "-n", self._switch, "link", "set", f"p{number}", "down")

    def plug(self, number: int) -> None:
        """Put the cable of a host back into the switch."""
        _run("ip", "-n", self._switch, "link", "set", f"p{number}", "up")

    def drop(self, source: int, target: int, what: str = "") -> None:
        """Drop all packets from one host to another, or only packets that match `what`, an nft expression."""
        rule = f"add rule bridge filter forward iifname p{source} oifname p{target} {what} drop"
        _run("ip", "netns", "exec", self._switch, "nft", rule)

    def refuse_connections(self, source: int, target: int, what: str = "") -> None:
        """Drop connection requests from one host to another, as firewalls do, or only requests that match `what`."""
        self.drop(source, target, f"tcp flags & (syn | ack) == syn {what}")

    def separate(self, one: int, other: int, what: str = "") -> None:
        """Drop all packets between two hosts, or only packets that match `what`, an nft expression."""
        self.drop(one, other, what)
        self.drop(other, one, what)

    def reset(self, one: int, other: int) -> None:
        """Reset the connections between two hosts in both directions, like a firewall that has lost its state."""
        for source, target in ((one, other), (other, one)):
            for family, address in (("ip", self.hosts[target].ipv4), ("ip6", self.hosts[target].ipv6)):
                rule = f"{family} daddr {address} meta l4proto tcp reject with tcp reset"
                self.hosts[source].run("nft", f"add rule inet filter output {rule}")

    def heal(self) -> None:
        """Remove all rules that drop packets or reset connections."""
        _run("ip", "netns", "exec", self._switch, "nft", "flush chain bridge filter forward")
        for host in self.hosts:
            host.run("nft", "flush chain inet filter output")

    def shape(
        self, rate: float = 0, delay: float = 0, loss: float = 0, queue: int = MIB, hosts: Iterable[int] | None = None
    ) -> list[int]:
        """Set the data rate, the delay and the loss rate of the cables of `hosts` (default: all), in both directions.

        Args:
            rate: bits per second, including the headers and gaps of Ethernet; 0: as fast as this machine can.
            delay: seconds from one end of a cable to the other. A packet between two hosts takes two cables.
            loss: share of the packets that are lost.
            hosts: numbers of the hosts; None: all.
            queue: bytes that may wait at the entry of a cable. Further packets are lost.

        Returns:
            The number of packets that each of these cables has lost since it was last shaped.
        """
        if self._cables is None:
            self._cables = self._insert_cable_program()
        assert self._cables.stdin is not None
        assert self._cables.stdout is not None
        lost = []
        for number in range(len(self.hosts)) if hosts is None else hosts:
            # Limit the size of kernel frames, since all packets of a kernel frame arrive together or are lost together.
            segments = 1 if loss else max(1, int(rate * _BURST / 8 / _PACKET)) if rate else _SEGMENTS
            _batch(self.hosts[number].name, f"link set eth0 gso_max_segs {segments}")
            print(number, int(rate), int(delay * 1e9), int(loss * 1e6), queue, file=self._cables.stdin, flush=True)
            lost.append(sum(map(int, self._cables.stdout.readline().split())))
        return lost

    @contextmanager
    def capture_traffic(self, number: int) -> Iterator[list[bytes]]:
        """Yield a list, to which the end of the context appends all bytes that have crossed the cable of a host."""
        program = str(Path(__file__).with_name("capture.py"))
        command = ["ip", "netns", "exec", self._switch, sys.executable, program, f"p{number}"]
        found: list[bytes] = []
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stderr.readline() == b"capturing\n"
            read = process.stdout.read
            reader = threading.Thread(target=lambda: found.append(read()))
            reader.start()
            try:
                yield found
            finally:
                process.stdin.close()
                reader.join()

    # -- making and removing

    def _build(self) -> None:
        for name in (self._switch, *(host.name for host in self.hosts)):
            _run("ip", "netns", "add", name)
        # Disable IPv6 in the switch: interfaces that only forward frames must not send frames of their own.
        off = "echo 1 | tee /proc/sys/net/ipv6/conf/{all,default}/disable_ipv6"
        _run("ip", "netns", "exec", self._switch, "bash", "-c", off)
        _batch(self._switch, "link add br0 type bridge", "link set br0 up", "link set lo up")
        nft = "add table bridge filter; add chain bridge filter forward { type filter hook forward priority 0; }"
        _run("ip", "netns", "exec", self._switch, "nft", nft)
        for host in self.hosts:
            port = f"p{host.number}"
            _batch(
                self._switch,
                f"link add {port} type veth peer name eth0 netns {host.name}",
                f"link set {port} master br0",
                f"link set {port} up",
            )
            _batch(
                host.name,
                "link set lo up",
                f"addr add {host.ipv4}/24 dev eth0",
                f"addr add {host.ipv6}/64 dev eth0 nodad",  # nodad: duplicate address detection would delay the address
                "link set eth0 up",
            )
            host.run(
                "nft", "add table inet filter; add chain inet filter output { type filter hook output priority 0; }"
            )

    def _insert_cable_program(self) -> subprocess.Popen[str]:
        """Insert a program into each cable, between two new interfaces: n<i> (to host i) and f<i> (to port p<i>)."""
        ends = []
        for host in self.hosts:
            near, far, port = f"n{host.number}", f"f{host.number}", f"p{host.number}"
            ends += [near, far]
            _batch(
                self._switch,
                f"link set {port} nomaster down",
                f"link set {port} name {near}",
                f"link set {near} up",
                f"link add {port} type veth peer name {far}",
                f"link set {port} master br0",
                f"link set {port} up",
                f"link set {far} up",
            )
        with tempfile.TemporaryDirectory() as folder:
            program = f"{folder}/cable"
            _run("cc", "-O2", "-o", program, str(_CABLE))
            command = ["ip", "netns", "exec", self._switch, program, *ends]
            cables = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert cables.stdin is not None
            assert cables.stdout is not None
            print("0 0 0 0 0", file=cables.stdin, flush=True)
            assert cables.stdout.readline(), "the cable program has ended"
        return cables

    def _remove(self) -> None:
        if self._cables is not None:
            self._cables.communicate()  # the program ends with its input
        for name in (*(host.name for host in self.hosts), self._switch):
            _remove_namespace(name)


class Process:
    """A process on a simulated host. The process prints each report as a line of JSON."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, host: Host, command: Sequence[str], env: Mapping[str, str], user: int = 0) -> Process:
        """Start a Python program on `host` as `user`, with permission to read all files even if `user` is not root."""
        become = ["--reuid", str(user), "--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
        return cls(
            await asyncio.create_subprocess_exec(
                *host.command(*(["setpriv", *become] if user else []), sys.executable, *command),
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )

    async def next_line(self, limit: float = LIMIT) -> Any:
        """Wait for the next line of output and return its value; if the process ends, fail with its standard error."""
        assert self._process.stdout is not None
        async with asyncio.timeout(limit):
            line = await self._process.stdout.readline()
        assert line, (await self.end())[1]
        return json.loads(re.sub(rb"^\[\d+\] ", b"", line))

    def send_line(self) -> None:
        """Send a line to the process, which waits for input."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def result(self) -> Any:
        """Wait for the last line of output and a successful end without error output; return the value of the line."""
        line = await self.next_line()
        code, complaints = await self.end()
        assert code == 0, complaints
        assert not complaints, complaints
        return line

    async def end(self) -> tuple[int | None, str]:
        """Wait for the end of the process; return the exit code and the standard error."""
        code, _, complaints = await self.wait_output()
        return code, complaints

    async def wait_output(self) -> tuple[int | None, str, str]:
        """Wait for the end of the process; return the exit code, the standard output and the standard error."""
        async with asyncio.timeout(LIMIT):
            output, complaints = await self._process.communicate()
        return self._process.returncode, output.decode(), complaints.decode()

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process if it still runs."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


def _remove_leftovers() -> None:
    """Remove leftover namespaces of test runs whose process has ended."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{_MARK}-") and not Path(f"/proc/{name.split('-')[2]}").exists():
            _remove_namespace(name)


def _remove_namespace(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    shutil.rmtree(_ETC / name, ignore_errors=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _batch(name: str, *lines: str) -> None:
    """Run `ip` commands in a namespace."""
    subprocess.run(
        ["ip", "-n", name, "-batch", "-"], input="\n".join(lines), check=True, capture_output=True, text=True
    )
