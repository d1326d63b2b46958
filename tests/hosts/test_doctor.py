"""`aiocoll doctor` on several hosts: the connections that doctor reports, and whether its prediction is right."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.hosts.network import Network, Process
from tests.pages import code, is_shown

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

#: The host name that doctor prints for all simulated hosts, since all of them run on this machine.
NAME = re.escape(socket.gethostname())
MEETS, DOES_NOT = "would meet on these hosts", "would not meet on these hosts"
SILENT = r"it does not answer \(tried for 5\.\d s\)"
#: The error text of the kernel for an address that no host has.
NO_ROUTE = r"No route to host \(tried for 5\.\d s\)"
NAME_IT = "set AIOCOLL_ADVERTISE, AIOCOLL_BIND or AIOCOLL_INTERFACE there"


class DoctorReport(NamedTuple):
    """The output of `aiocoll doctor` on one host.

    Attributes:
        code: the exit code.
        table: the cells of the table, row by row.
        problems, hints: the sentences of each kind.
        verdict: whether a job would meet; "" if doctor stopped before.
        text: the part of the output about the hosts.
    """

    code: int | None
    table: list[list[str]]
    problems: list[str]
    hints: list[str]
    verdict: str
    text: str


async def printed_report(process: Process) -> DoctorReport:
    code, out, complaints = await process.wait_output()
    assert complaints == ""
    text = out[out.index("\nbetween hosts\n") :]
    rows = [re.split("  +", line.strip())[1:] for line in text.splitlines() if line.startswith("  from ")]
    verdict = re.search("^  a job +(.*)$", text, re.MULTILINE)
    problems, hints = (re.findall(rf"{kind}: (.*)", text) for kind in ("PROBLEM", "hint"))
    assert ("PROBLEM" in out) == (code == 1), out
    return DoctorReport(code, rows, problems, hints, verdict[1] if verdict else "", text)


async def doctor_report(network: Network, ranks: Ranks, *more: str, master: str = "", **env: str) -> DoctorReport:
    """Run `aiocoll doctor` on all hosts, and check that all hosts print the same report; return this report."""
    master = master or network.hosts[0].ipv4
    started = [await ranks.start_doctor(host, len(network.hosts), master, *more, **env) for host in network.hosts]
    first, *others = [await printed_report(process) for process in started]
    assert all(other.text == first.text for other in others), others
    return first


async def can_meet(network: Network, ranks: Ranks, **env: str) -> bool:
    """Return whether ranks on these hosts meet and exchange data with each other."""
    codes = [(await process.end())[0] for process in await ranks.start_all(network, "carriers", TIMEOUT="6", **env)]
    assert len(set(codes)) == 1
    return codes[0] == 0


def missing_connection(source: int, target: int, why: str, advice: str, port: str = r"\d+") -> str:
    """Return a pattern for the sentence in which doctor reports a missing connection."""
    at = rf"10\.77\.0\.{target + 1} port {port}"
    return rf"host {source} \({NAME}\) cannot reach host {target} \({NAME}\) at {at}: {why}; {advice}"


def all_match(patterns: Sequence[str], sentences: Sequence[str]) -> bool:
    return len(patterns) == len(sentences) and all(map(re.fullmatch, patterns, sentences))


@pytest.mark.parametrize(
    ("size", "version"), [(3, 4), (2, 6), *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, 4), (3, 6)))]
)
async def test_doctor_reports_full_reachability(
    network: Callable[[int], Network], ranks: Ranks, size: int, version: int
) -> None:
    net = network(size)
    found = await doctor_report(net, ranks, master=net.hosts[0].ipv6 if version == 6 else "")
    for source, row in enumerate(found.table):
        for target, cell in enumerate(row):
            assert re.fullmatch("-" if source == target else r"ok \d+\.\d\d ms", cell)
    for host in net.hosts:
        address = host.ipv6 if version == 6 else host.ipv4
        line = (
            rf"  host {host.number}  {NAME} at {address} port \d+, TLS 1\.3, \d+ cores, aiocoll .*, Python .*, Linux .*"
        )
        assert re.search(rf"^{line}$", found.text, re.MULTILINE)
    assert (len(found.table), found.problems, found.hints, found.verdict) == (size, [], [], MEETS)


async def test_doctor_accepts_a_one_way_firewall(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Refuse connections from lower ranks to higher ranks."""
    net = network(3)
    for lower, higher in (0, 1), (0, 2), (1, 2):
        net.refuse_connections(lower, higher)
    found = await doctor_report(net, ranks)
    assert [[cell[:2] for cell in row] for row in found.table] == [
        ["-", "no", "no"],
        ["ok", "-", "no"],
        ["ok", "ok", "-"],
    ]
    does_without = "a job does not need this connection: host {} dials host {}"
    assert all_match(
        [missing_connection(a, b, SILENT, does_without.format(b, a)) for a, b in ((0, 1), (0, 2), (1, 2))], found.hints
    )
    assert (found.problems, found.verdict) == ([], MEETS)
    assert await can_meet(net, ranks)


async def test_doctor_reports_a_firewall_in_front_of_the_first_host(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Let host 1 connect only to the store on host 0; links would need a connection from host 1 to host 0."""
    net = network(2)
    net.refuse_connections(1, 0, "tcp dport != 29500")
    found = await doctor_report(net, ranks)
    assert [cell[:9] for cell in found.table[1]] == ["no answer", "-"]
    firewall = (
        r"let firewalls pass TCP from host 1 to any port \(limit them there with AIOCOLL_PORT_RANGE\) of host 0; "
    )
    advice = f"{firewall}if another address leads to host 0, {NAME_IT}"
    assert all_match([missing_connection(1, 0, SILENT, advice)], found.problems)
    assert (found.hints, found.verdict) == ([], DOES_NOT)
    assert not await can_meet(net, ranks)


@pytest.mark.parametrize(("lost", "why"), [("meta l4proto tcp", SILENT), ("", NO_ROUTE)], ids=["tcp", "all"])
async def test_doctor_reports_two_hosts_without_a_connection(
    network: Callable[[int], Network], ranks: Ranks, lost: str, why: str
) -> None:
    net = network(3)
    net.separate(1, 2, lost)
    found = await doctor_report(net, ranks)
    firewall = (
        r"let firewalls pass TCP from host {0} to any port \(limit them there with AIOCOLL_PORT_RANGE\) of host {1}, "
    )
    advice = firewall + "or back from host {1} to host {0}; if another address leads to host {1}, " + NAME_IT
    assert all_match([missing_connection(a, b, why, advice.format(a, b)) for a, b in ((1, 2), (2, 1))], found.problems)
    named = re.sub(rf"\b{NAME}\b", "node0", found.text)
    assert why != SILENT or is_shown(code("docs/several-hosts.md", "Checking", language="text"), named)
    assert (found.hints, found.verdict) == ([], DOES_NOT)
    assert not await can_meet(net, ranks)


async def test_doctor_reports_ports_that_a_firewall_rejects(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Reject all ports except the store's port and a range; hosts that use this port range have no problem."""
    net = network(2)
    for host in net.hosts:
        rule = "tcp flags & (syn | ack) == syn tcp dport != { 29500, 31000-31003 } ip daddr 10.77.0.0/24 reject"
        host.run("nft", f"add rule inet filter output {rule} with tcp reset")
    found = await doctor_report(net, ranks, AIOCOLL_PORT_RANGE="32000-32001")
    assert [row[1 - number] for number, row in enumerate(found.table)] == ["refused", "refused"]
    firewall = "let firewalls pass TCP from host 1 to ports 32000 to 32001 of host 0; "
    refused = r"Connection refused \(tried for 5\.\d s\)"
    advice = f"{firewall}if another address leads to host 0, {NAME_IT}"
    assert all_match([missing_connection(1, 0, refused, advice, "32000")], found.problems)
    assert found.verdict == DOES_NOT
    found = await doctor_report(net, ranks, AIOCOLL_PORT_RANGE="31000-31003")
    assert (found.problems, found.hints, found.verdict) == ([], [], MEETS)
    assert await can_meet(net, ranks, AIOCOLL_PORT_RANGE="31000-31003")


async def test_doctor_reports_an_unreachable_address(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Let host 0 advertise an address to which host 1 has no route; host 1 advertises a reachable address."""
    net = network(2)
    net.hosts[1].run("ip", "addr", "add", "10.77.0.22/24", "dev", "eth0")
    master = net.hosts[0].ipv4
    started = [
        await ranks.start_doctor(net.hosts[0], 2, master, AIOCOLL_ADVERTISE="203.0.113.5"),
        await ranks.start_doctor(net.hosts[1], 2, master, AIOCOLL_BIND="10.77.0.22"),
    ]
    first, other = [await printed_report(process) for process in started]
    assert first.text == other.text
    assert (first.table[0][1][:2], first.table[1][0]) == ("ok", "no route")
    assert re.search(rf"host 1  {NAME} at 10\.77\.0\.22 port ", first.text)
    (problem,) = first.problems
    start = rf"host 1 \({NAME}\) cannot reach host 0 \({NAME}\) at 203\.0\.113\.5 port \d+: Network is unreachable "
    assert re.match(start, problem)
    assert problem.endswith(f"if another address leads to host 0, {NAME_IT}")


async def test_doctor_reports_a_missing_host(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Check that the hosts that do run doctor still report the connections between each other."""
    net = network(3)
    started = [
        await ranks.start_doctor(host, 3, net.hosts[0].ipv4, "--timeout", "6") for host in (net.hosts[0], net.hosts[2])
    ]
    first, other = [await printed_report(process) for process in started]
    assert first.text == other.text
    assert [[cell[:2] for cell in row] for row in first.table] == [["-", "ok"], ["ok", "-"]]
    assert first.problems == [
        "host(s) 1 of 3 did not come within 6 s: check that `aiocoll doctor --nnodes 3 --node-rank 1` runs there, with "
        "the same --master-addr. It prints the reason if it cannot use the store, which listens on 10.77.0.1 port 29500"
    ]
    assert first.verdict == DOES_NOT


async def test_doctor_reports_an_unreachable_store(network: Callable[[int], Network], ranks: Ranks) -> None:
    net = network(2)
    net.refuse_connections(1, 0)
    started = [await ranks.start_doctor(host, 2, net.hosts[0].ipv4, "--timeout", "6") for host in net.hosts]
    first, other = [await printed_report(process) for process in started]
    assert "which listens on 10.77.0.1 port 29500" in first.problems[0]
    assert all_match(
        [
            r"no store at 10\.77\.0\.1:29500: no answer to the connection attempt; check the address and the "
            r"firewall \(tried for 6\.\d s\)"
        ],
        other.problems,
    )


async def test_doctor_reports_a_wrong_key(network: Callable[[int], Network], ranks: Ranks) -> None:
    net = network(2)
    master = net.hosts[0].ipv4
    started = [
        await ranks.start_doctor(net.hosts[0], 2, master, "--timeout", "6"),
        await ranks.start_doctor(net.hosts[1], 2, master, key=b"of another test, and no other"),
    ]
    first, other = [await printed_report(process) for process in started]
    assert first.problems[0].startswith("host(s) 1 of 2 did not come within 6 s: ")
    assert other.problems == [
        "cannot use the store at 10.77.0.1:29500: the other end did not prove that it holds this job's key: every rank "
        "and the store need the same job_key (AIOCOLL_JOB_KEY)"
    ]


async def test_doctor_reports_different_encryption_options(network: Callable[[int], Network], ranks: Ranks) -> None:
    """Check the errors of the store connection, since hosts connect to the store first."""
    net = network(2)
    master = net.hosts[0].ipv4
    started = [
        await ranks.start_doctor(net.hosts[0], 2, master, "--timeout", "6"),
        await ranks.start_doctor(net.hosts[1], 2, master, "--timeout", "3", AIOCOLL_ENCRYPTION="none"),
    ]
    first, other = [await printed_report(process) for process in started]
    assert first.problems[0].startswith("host(s) 1 of 2 did not come within 6 s: ")
    (problem,) = other.problems
    assert problem.startswith("no store at 10.77.0.1:29500: something listens there but closes the connection")
    assert "check that the server also uses encryption='none' (AIOCOLL_ENCRYPTION)" in problem


async def test_doctor_accepts_a_host_name_that_resolves_to_loopback_on_its_own_host(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Use the /etc/hosts entry that Debian writes; the store then listens on all addresses of its host."""
    net = network(2)
    net.hosts[0].file("hosts", "127.0.0.1 localhost\n127.0.1.1 master\n")
    net.hosts[1].file("hosts", f"{net.hosts[0].ipv4} master\n")
    found = await doctor_report(net, ranks, master="master")
    assert (found.problems, found.hints, found.verdict) == ([], [], MEETS)


async def test_doctor_reports_a_host_name_that_resolves_to_loopback_on_another_host(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    net = network(1)
    net.hosts[0].number = 1
    net.hosts[0].file("hosts", "127.0.0.1 localhost\n127.0.1.1 master\n")
    found = await printed_report(await ranks.start_doctor(net.hosts[0], 2, "master", "--timeout", "2"))
    assert all_match(
        [
            r"no store at master:29500: nothing listens there \(connection refused\); check that rank 0 or the "
            r"launcher runs at this address; 'master' resolves to 127\.0\.1\.1 here, this machine itself "
            r"\(see /etc/hosts\) \(tried for 2\.\d s\)"
        ],
        found.problems,
    )
