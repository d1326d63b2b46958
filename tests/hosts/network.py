"""Hosts that are network namespaces of this machine, each with a cable to one switch; needs root and iproute2.

    switch (a namespace of its own): a bridge with the ports p0, p1, ...
    host i: eth0 at the other end of p<i>, 10.77.0.<i+1> and fd77::<i+1>, no way out of here

Faults happen at the switch, as with real cables and firewalls: no rank is told. Everything is named with the number of
this process, so that what a killed run has left is found by a later one.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seconds after which whatever has not happened has failed; nothing takes a third of it.
LIMIT = 60
#: Files of /etc that processes of one namespace see in place of the machine's own; `ip netns exec` mounts them.
_ETC = Path("/etc/netns")
_MARK = "aiocoll-test"


def obstacle() -> str | None:
    """Say why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            return f"needs {tool}: apt-get install iproute2 nftables"
    try:
        with Network(1):
            return None
    except subprocess.CalledProcessError as error:
        return f"cannot make network namespaces here: {error.stderr.strip()}"


class Host:
    """One network namespace.

    Attributes:
        number: of the host, and of its port at the switch.
        name: of its namespace.
        ipv4, ipv6: its addresses.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"{_MARK}-{os.getpid()}-{number}"
        self.ipv4 = f"10.77.0.{number + 1}"
        self.ipv6 = f"fd77::{number + 1}"

    def file(self, name: str, text: str) -> None:
        """Let processes started from now on see `text` as /etc/`name`."""
        folder = _ETC / self.name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    def command(self, *arguments: str) -> list[str]:
        """Return what runs `arguments` on this host, as the same process."""
        return ["ip", "netns", "exec", self.name, *arguments]

    def run(self, *arguments: str) -> str:
        """Run a command on this host; return what it prints."""
        return _run(*self.command(*arguments))


class Network:
    """Some hosts and the switch between them; a context manager.

    Args:
        size: number of hosts.
    """

    def __init__(self, size: int) -> None:
        self.hosts = [Host(number) for number in range(size)]
        self._switch = f"{_MARK}-{os.getpid()}-switch"

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
        """Put it back."""
        _run("ip", "-n", self._switch, "link", "set", f"p{number}", "up")

    def drop(self, source: int, target: int, what: str = "") -> None:
        """Lose all packets from one host to another, or those that match `what`, in the words of nft."""
        rule = f"add rule bridge filter forward iifname p{source} oifname p{target} {what} drop"
        _run("ip", "netns", "exec", self._switch, "nft", rule)

    def refuse_dials(self, source: int, target: int) -> None:
        """Lose what opens connections from one host to another, as a firewall does that is open one way only."""
        self.drop(source, target, "tcp flags & (syn | ack) == syn")

    def separate(self, one: int, other: int, what: str = "") -> None:
        """Lose all packets between two hosts, or those that match `what`."""
        self.drop(one, other, what)
        self.drop(other, one, what)

    def heal(self) -> None:
        """Lose nothing any more."""
        _run("ip", "netns", "exec", self._switch, "nft", "flush chain bridge filter forward")

    # -- making and removing

    def _build(self) -> None:
        for name in (self._switch, *(host.name for host in self.hosts)):
            _run("ip", "netns", "add", name)
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
                f"addr add {host.ipv6}/64 dev eth0 nodad",  # an address is of no use while it is looked for elsewhere
                "link set eth0 up",
            )

    def _remove(self) -> None:
        for name in (*(host.name for host in self.hosts), self._switch):
            _forget(name)


class Process:
    """A process on a host, which prints a line of JSON whenever it has something to tell."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, host: Host, command: Sequence[str], env: Mapping[str, str], user: int = 0) -> Process:
        """Start a Python program on `host`; a `user` who is not root may still read what root may."""
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

    async def told(self) -> Any:
        """Wait for the next line, be it a launcher's; the whole standard error is in the failure if there is none."""
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT):
            line = await self._process.stdout.readline()
        assert line, (await self.end())[1]
        return json.loads(re.sub(rb"^\[\d+\] ", b"", line))

    def go_on(self) -> None:
        """Give it the line that it waits for."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def result(self) -> Any:
        """Wait for the last line, and the end without complaints."""
        told = await self.told()
        code, complaints = await self.end()
        assert code == 0, complaints
        assert not complaints, complaints
        return told

    async def end(self) -> tuple[int | None, str]:
        """Wait for the end; return exit code and standard error."""
        async with asyncio.timeout(LIMIT):
            _, complaints = await self._process.communicate()
        return self._process.returncode, complaints.decode()

    def signal(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    async def kill(self) -> None:
        """End it if it has not ended."""
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate()


def _remove_leftovers() -> None:
    """Remove the namespaces of runs whose process is gone."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{_MARK}-") and not Path(f"/proc/{name.split('-')[2]}").exists():
            _forget(name)


def _forget(name: str) -> None:
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    shutil.rmtree(_ETC / name, ignore_errors=True)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _batch(name: str, *lines: str) -> None:
    """Carry out commands of `ip` in a namespace."""
    subprocess.run(
        ["ip", "-n", name, "-batch", "-"], input="\n".join(lines), check=True, capture_output=True, text=True
    )
