"""Allreduce over emulated links between hosts, compared with Gloo and MPICH: python bench/hosts.py [--quick].

Hosts are network namespaces of this machine, so the benchmark needs root. Their cables have a rate, a delay and losses
(tests/hosts/network.py). TCP uses cubic. The systems are aiocoll, encrypted (its default) and with encryption="none",
torch's Gloo, and MPICH. Each rank is on a separate host. A cell is the share of the link: 100 % means the rate minus
the headers of TCP, which leave 94.15 %, in both directions at a time. bench/main.py uses the same environments.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from environments import ROOT, Unavailable, prepare
from inflight import Case
from launch import RANK, OneHost, launch
from machine import machine
from markdown import size_of, table
from results import Results
from systems import PEERS, System, make_aiocoll

from aiocoll.cli.measure import Effort

sys.path.insert(0, str(ROOT))
from tests.hosts.network import Network

KIB, MIB = 1 << 10, 1 << 20
#: Share of payload in the bytes on the wire: 1448 of the 1538 bytes of a full Ethernet frame.
PAYLOAD = 1448 / 1538
#: Address of the store of aiocoll or Gloo. The port is free, because each table row has a new network.
METHOD = "tcp://10.77.0.1:29500"
#: Effort per case. It lasts long enough that TCP adapts its windows in a small part of it; iperf3 skips two seconds.
EFFORT = Effort(3.0, 3, 100)
#: Seconds for one launch: more than the slowest system takes over the slowest link.
LIMIT = 240


class Link(NamedTuple):
    """The emulated link between hosts: bits per second, seconds of a round trip, and share of lost packets."""

    rate: float
    rtt: float
    loss: float = 0

    def __str__(self) -> str:
        rate = f"{self.rate / 1e9:g} Gbit/s" if self.rate >= 1e9 else f"{self.rate / 1e6:g} Mbit/s"
        return f"{rate}, {self.rtt * 1e3:g} ms" + (f", {self.loss:.1%} lost" if self.loss else "")


class Row(NamedTuple):
    """A row of the table: a link, the number of hosts, and the sizes of the arrays in bytes."""

    link: Link
    hosts: int
    sizes: tuple[int, ...]


BIG = (MIB, 16 * MIB, 64 * MIB)
ROWS = (
    *(Row(Link(1e9, rtt), 2, BIG) for rtt in (0.2e-3, 10e-3, 50e-3)),
    *(Row(Link(1e8, rtt), 2, BIG[:2]) for rtt in (0.2e-3, 10e-3, 50e-3)),
    *(Row(Link(1e8, rtt, loss), 2, (8 * MIB,)) for loss in (0.001, 0.01) for rtt in (0.2e-3, 10e-3)),
    Row(Link(1e9, 0.2e-3), 4, (64 * KIB, MIB)),
    Row(Link(1e9, 50e-3), 4, (64 * KIB, MIB)),
)
QUICK_ROWS = (Row(Link(1e9, 10e-3), 2, (MIB, 16 * MIB)), Row(Link(1e9, 50e-3), 4, (64 * KIB,)))

SYSTEMS = {
    "plain": replace(make_aiocoll("auto"), name="aiocoll plain"),
    "tls": replace(make_aiocoll("auto"), name="aiocoll"),
    "gloo": PEERS["gloo-blocking"],
    "mpich": PEERS["mpich-blocking"],
}


class Loopback(OneHost):
    """A launch over the loopback interface of this host, with or without encryption."""

    def __init__(self, encryption: str) -> None:
        self._encryption = encryption

    def config(self, system: System) -> dict[str, Any]:
        return super().config(system) | {"encryption": self._encryption}


class Hosts:
    """A launch on the emulated hosts of a network, one rank per host."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def config(self, system: System) -> dict[str, Any]:
        encryption = "none" if system.name == "aiocoll plain" else "auto"
        return {"method": METHOD, "interface": "eth0", "encryption": encryption, "transport": "auto"}

    def commands(self, system: System, python: str, folder: str, world_size: int) -> list[list[str]]:
        hosts = self._network.hosts[:world_size]
        if system.mpiexec is None:
            return [host.command(python, RANK, folder, str(host.number)) for host in hosts]
        # mpiexec starts ranks on other hosts by a program that it calls like ssh, with the host and a command.
        reach = Path(folder) / "reach"
        names = "".join(f"{host.ipv4}) name={host.name};; " for host in hosts)
        reach.write_text(
            '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\n'
            f'case $1 in {names}esac\nshift\nexec ip netns exec "$name" sh -c "$*"\n'
        )
        reach.chmod(0o700)
        # Without these settings, MPICH treats all ranks on one kernel as one host with shared memory.
        separate = ("-genv", "UCX_TLS", "tcp,self", "-genv", "MPIR_CVAR_NOLOCAL", "1")
        how = ("-launcher", "ssh", "-launcher-exec", str(reach), "-iface", "eth0", "-ppn", "1", *separate)
        where = ("-hosts", ",".join(host.ipv4 for host in hosts), "-n", str(world_size))
        mpiexec = str(Path(python).with_name("mpiexec"))
        return [hosts[0].command(mpiexec, *how, *where, python, RANK, folder)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare allreduce between hosts with Gloo and MPICH.")
    add = parser.add_argument
    add("--launches", type=int, default=3, metavar="N", help="launches of each system per link (default: 3)")
    add("--rows", type=int, nargs="+", metavar="ROW", help="rows of the table, from 0 (default: all)")
    add("--systems", nargs="+", choices=tuple(SYSTEMS), default=list(SYSTEMS), help="default: all")
    add("--quick", action="store_true", help="two links, one launch")
    args = parser.parse_args()
    rows = QUICK_ROWS if args.quick else [ROWS[number] for number in args.rows] if args.rows else ROWS
    launches = 1 if args.quick else args.launches
    systems = [SYSTEMS[name] for name in args.systems]
    pythons = {}
    for name in {system.environment for system in systems if system.environment}:
        try:
            pythons[name] = prepare(name)
        except Unavailable as error:
            print(f"{name} is skipped: {error}")
    systems = [system for system in systems if system.environment in (None, *pythons)]
    print("# Allreduce between hosts\n", machine(), "", sep="\n", flush=True)
    found = [(row, *measure_row(row, systems, pythons, launches)) for row in rows]
    print(report(systems, found))
    print("", loopback(launches), sep="\n")


def measure_row(row: Row, systems: Sequence[System], pythons: dict[str, Path], launches: int) -> tuple[Results, float]:
    """Measure one row; return the results, and the share of the link that iperf3 fills (0 without iperf3)."""
    results = Results(row.hosts, [system.name for system in systems])
    cases = [Case("allreduce", nbytes) for nbytes in row.sizes]
    with Network(row.hosts) as network:
        for host in network.hosts:
            routes = [
                f"{net} dev eth0 src {mine}" for net, mine in (("10.77.0.0/24", host.ipv4), ("fd77::/64", host.ipv6))
            ]
            for route in routes:
                host.run("ip", "route", "replace", *route.split(), "proto", "kernel", "congctl", "cubic")
        network.shape(row.link.rate, row.link.rtt / 4, row.link.loss / 2)
        both = both_ways(network, row.link) if row.hosts == 2 else 0.0
        for number in range(launches):
            results.rounds.append({})
            first = number % len(systems)
            for system in (*systems[first:], *systems[:first]):
                if results.failure(system.name) is None:
                    python = None if system.environment is None else pythons[system.environment]
                    done = launch(system, python, row.hosts, cases, EFFORT, LIMIT, Hosts(network))
                    results.rounds[-1][system.name] = done
                    print(
                        f"{row.link}, {row.hosts} hosts: {system.name} {done.seconds:.0f} s",
                        done.failure or "",
                        file=sys.stderr,
                    )
    return results, both


def both_ways(network: Network, link: Link) -> float:
    """Return the share of the link that iperf3 fills with both directions in use, in the slower direction."""
    if shutil.which("iperf3") is None:
        return 0.0
    one, two = network.hosts
    with subprocess.Popen(one.command("iperf3", "--server", "--one-off"), stdout=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 10
        while "5201" not in one.run("ss", "-ltn"):
            assert time.monotonic() < deadline, "iperf3 does not listen"
        done = json.loads(two.run("iperf3", "--client", one.ipv4, "--bidir", "--time", "8", "--omit", "2", "--json"))
        server.wait(10)
    streams = [each["receiver"]["bits_per_second"] for each in done["end"]["streams"]]
    return float(min(streams) / link.rate / PAYLOAD)


def loopback(launches: int) -> str:
    """Return a text about the cost of encryption on the loopback, and the speed of the encryption library alone."""
    case, effort = Case("allreduce", 64 * MIB), Effort(2.0, 5, 100)
    rows: list[Sequence[object]] = []
    for encryption in ("none", "tls"):
        done = [
            launch(make_aiocoll("tcp"), None, 2, [case], effort, LIMIT, Loopback(encryption)) for _ in range(launches)
        ]
        assert not any(each.failure for each in done), done
        timings = [each.timings[case] for each in done]
        seconds = median(median(timing.nanoseconds) for timing in timings) / 1e9
        cpu = median(timing.cpu for timing in timings)
        rows.append((encryption, f"{case.nbytes / seconds / 1e9:.2f}", f"{cpu / (2 * case.nbytes / 1e9):.2f}"))
    how = ("-mr", "-seconds", "2", "-bytes", "16384", "-evp", "aes-256-gcm")
    speed = subprocess.run(["openssl", "speed", *how], check=True, capture_output=True, text=True)
    (cipher,) = re.findall(r"^\+F:.*:([\d.]+)$", speed.stdout, re.M)
    head = ("encryption", "GB/s each way", "CPU seconds per GB, both ends")
    return (
        f"## On the loopback, 2 ranks, {size_of(case.nbytes)}\n\n{table(head, rows)}\n\n"
        f"`openssl speed` encrypts {float(cipher) / 1e9:.1f} GB/s with AES-256-GCM on one core. "
        "Here one rank encrypts each byte, and the other decrypts it."
    )


def report(systems: Sequence[System], found: Sequence[tuple[Row, Results, float]]) -> str:
    """Return the tables of the report: shares of the link, then milliseconds."""
    names = [system.name for system in systems]
    shares, times = [], []
    for row, results, both in found:
        for nbytes in row.sizes:
            summaries = [results.summary(name, Case("allreduce", nbytes)) for name in names]
            seconds = [None if each is None else each.figures.p50 for each in summaries]
            place = (f"{row.link}, {row.hosts} hosts", size_of(nbytes))
            ideal = 2 * nbytes * (row.hosts - 1) / row.hosts * 8 / (row.link.rate * PAYLOAD)
            cells = ["failed" if each is None else f"{ideal / each:.0%}" for each in seconds]
            shares.append((*place, *cells, f"{both:.0%}" if both else ""))
            times.append((*place, *("failed" if each is None else f"{each * 1e3:,.1f}" for each in seconds)))
    head = ("what", "size", *names)
    return f"## Share of the link\n\n{table((*head, 'iperf3'), shares)}\n\n## Milliseconds\n\n{table(head, times)}"


if __name__ == "__main__":
    main()
