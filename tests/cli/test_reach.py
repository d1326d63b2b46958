"""Findings about connections between hosts, and the verdict whether a job would meet on these hosts."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest

from aiocoll.cli.checks import CheckResult
from aiocoll.cli.reach import Attempt, HostFacts, HostsMet, findings

SILENT = " at 10.0.0.{} port 31000: it does not answer (tried for 5.0 s)"
PAIRS = list(itertools.permutations(range(3), 2))


def host(number: int, encryption: str = "auto", ports: str = "") -> HostFacts:
    return HostFacts(f"node{number}", "4 cores", encryption, ports, f"10.0.0.{number} port 31000", "")


def hosts_met(failing: Collection[tuple[int, int]] = (), size: int = 3, trouble: str = SILENT) -> HostsMet:
    """Return the facts about hosts that all reach each other, except for the pairs in `failing`."""
    rows = {
        source: {
            target: Attempt(0.0, trouble.format(target)) if (source, target) in failing else Attempt(0.00021)
            for target in range(size)
            if target != source
        }
        for source in range(size)
    }
    return HostsMet(size, "10.0.0.0 port 29500", 30.0, {number: host(number) for number in range(size)}, rows)


def advice(met: HostsMet) -> dict[str, tuple[bool, str]]:
    return {each.name: (each.fine, each.advice) for each in findings(met) if each.advice}


def verdict(met: HostsMet) -> str:
    *_, last = findings(met)
    assert (last.topic, last.name, last.advice, last.fine) == ("between hosts", "a job", "", True)
    return last.value


@pytest.mark.parametrize("size", [1, 2, 3])
def test_verdict_predicts_a_meeting_of_hosts_that_reach_each_other(size: int) -> None:
    met = hosts_met(size=size)
    assert advice(met) == {}
    assert verdict(met) == "would meet on these hosts"


def test_connection_table_has_one_row_per_host() -> None:
    lines = [f"{each.name:8}{each.value}" for each in findings(hosts_met([(1, 2), (2, 0)]))]
    assert lines[:7] == [
        "host 0  node0 at 10.0.0.0 port 31000, TLS 1.3, 4 cores",
        "host 1  node1 at 10.0.0.1 port 31000, TLS 1.3, 4 cores",
        "host 2  node2 at 10.0.0.2 port 31000, TLS 1.3, 4 cores",
        "        to 0        to 1        to 2",
        "from 0  -           ok 0.21 ms  ok 0.21 ms",
        "from 1  ok 0.21 ms  -           no answer",
        "from 2  no answer   ok 0.21 ms  -",
    ]


def test_verdict_is_correct_for_every_set_of_failed_connections() -> None:
    """Fail every set of connections of three hosts: hosts 1 and 2 must reach host 0, and one of them the other."""
    for count in range(len(PAIRS) + 1):
        for failing in itertools.combinations(PAIRS, count):
            met = hosts_met(failing)
            wrong = {(1, 0), (2, 0)} & set(failing)
            wrong |= {(1, 2), (2, 1)} if {(1, 2), (2, 1)} <= set(failing) else set()
            assert {name for name, (fine, _) in advice(met).items() if not fine} == {f"{a} to {b}" for a, b in wrong}
            assert advice(met).keys() == {f"{a} to {b}" for a, b in failing}
            assert verdict(met) == f"would {'not ' if wrong else ''}meet on these hosts"


def test_host_that_cannot_reach_host_0_is_explained() -> None:
    met = hosts_met([(1, 0)])
    assert advice(met) == {
        "1 to 0": (
            False,
            "host 1 (node1) cannot reach host 0 (node0) at 10.0.0.0 port 31000: it does not answer (tried for 5.0 s); "
            "let firewalls pass TCP from host 1 to any port (limit them there with AIOCOLL_PORT_RANGE) of host 0; if "
            "another address leads to host 0, set AIOCOLL_ADVERTISE, AIOCOLL_BIND or AIOCOLL_INTERFACE there",
        )
    }


def test_missing_connections_in_both_directions_between_two_hosts_are_explained() -> None:
    met = hosts_met([(1, 2), (2, 1)])
    met = met._replace(hosts={**met.hosts, 2: host(2, ports="ports 31000 to 31001")})
    (_, first), (_, second) = advice(met)["1 to 2"], advice(met)["2 to 1"]
    assert (
        "let firewalls pass TCP from host 1 to ports 31000 to 31001 of host 2, or back from host 2 to host 1;" in first
    )
    assert (
        "from host 2 to any port (limit them there with AIOCOLL_PORT_RANGE) of host 1, or back from host 1 to" in second
    )


def test_connection_in_one_direction_between_two_hosts_suffices() -> None:
    explanations = {name: text.partition("; ")[2] for name, (_, text) in advice(hosts_met([(0, 1), (1, 2)])).items()}
    assert explanations == {
        "0 to 1": "a job does not need this connection: host 1 dials host 0",
        "1 to 2": "a job does not need this connection: host 2 dials host 1",
    }
    ((_, text),) = advice(hosts_met([(2, 1)])).values()
    assert text.endswith("; a job does not need this connection as long as host 0 runs: host 1 dials host 2")


@pytest.mark.parametrize(
    ("reason", "short", "unanswered"),
    [
        ("it does not answer", "no answer", True),
        ("Connection refused", "refused", True),
        ("No route to host", "no route", True),
        ("Network is unreachable", "no route", True),
        ("the other end did not prove that it holds this job's key", "wrong key", False),
        ("TLS: WRONG_VERSION_NUMBER", "no TLS", False),
        ("the peer closed the connection during the handshake", "failed", False),
    ],
)
def test_connection_failure_is_shown_in_the_table_and_explained(reason: str, short: str, unanswered: bool) -> None:
    met = hosts_met([(1, 0)], size=2, trouble=f": {reason}")
    (finding,) = [each for each in findings(met) if each.advice]
    assert (finding.name, finding.value, finding.fine) == ("1 to 0", short, False)
    assert finding.advice.startswith(f"host 1 (node1) cannot reach host 0 (node0): {reason}; ")
    assert ("firewalls" in finding.advice) == unanswered
    assert ("check that this address leads to host 0, and the port to its" in finding.advice) != unanswered
    assert next(each.value for each in findings(met) if each.name == "from 1").split("  ")[0] == short


def test_missing_hosts_are_explained() -> None:
    met = hosts_met(size=2)._replace(nnodes=4)
    assert advice(met) == {
        "missing": (
            False,
            "host(s) 2, 3 of 4 did not come within 30 s: check that `aiocoll doctor --nnodes 4 --node-rank 2` runs "
            "there, with the same --master-addr. It prints the reason if it cannot use the store, which listens on "
            "10.0.0.0 port 29500",
        )
    }
    assert verdict(met) == "would not meet on these hosts"


def test_report_of_a_single_host_has_no_connection_table() -> None:
    met = hosts_met(size=1)._replace(nnodes=2)
    assert [each.name for each in findings(met)] == ["host 0", "missing", "a job"]


def test_different_encryption_options_are_reported_as_a_problem() -> None:
    met = hosts_met()
    hosts = {0: host(0), 1: host(1, "none"), 2: host(2, "tls")}
    met = met._replace(hosts={number: each._replace(where="") for number, each in hosts.items()}, rows={})
    assert advice(met) == {
        "encryption": (
            False,
            "host(s) 1 have encryption='none' (AIOCOLL_ENCRYPTION), and host(s) 0, 2 have not: set the same on "
            "every host",
        )
    }
    values = [each.value for each in findings(met)]
    assert values[:2] == ["node0 at no address, TLS 1.3, 4 cores", "node1 at no address, not encrypted, 4 cores"]
    assert verdict(met) == "would not meet on these hosts"


def test_host_that_cannot_listen_is_explained() -> None:
    met = hosts_met()
    deaf = host(1)._replace(where="", trouble="no port of port_range=(1, 1) is free")
    rows = {source: {to: each for to, each in row.items() if to != 1} for source, row in met.rows.items()}
    met = met._replace(hosts={**met.hosts, 1: deaf}, rows=rows)
    assert advice(met) == {
        "host 1": (False, "host 1 (node1) cannot be dialled: no port of port_range=(1, 1) is free"),
    }
    assert CheckResult("between hosts", "from 0", "-           not tried   ok 0.21 ms") in findings(met)


def test_host_without_a_report_is_explained() -> None:
    met = hosts_met()
    met = met._replace(rows={0: met.rows[0], 2: met.rows[2]})
    assert advice(met) == {
        "from 1": (False, "host 1 (node1) has not reported which hosts it reaches; see its output"),
    }
    assert CheckResult("between hosts", "from 1", "no report   -           no report") in findings(met)
