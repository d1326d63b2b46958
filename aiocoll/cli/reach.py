"""Results of `aiocoll doctor` on several hosts: the table of connections, failures with remedies, the verdict.

All hosts must reach host 0, because all ranks dial its lowest rank. Of any two other hosts, one must reach the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from aiocoll.cli.checks import CheckResult

__all__ = ["Attempt", "HostFacts", "HostsMet", "findings"]

_TOPIC = "between hosts"
#: Short failure texts for the table of connections, by words that occur in the full error message.
_SHORT = {
    "does not answer": "no answer",
    "Connection refused": "refused",
    "No route to host": "no route",
    "Network is unreachable": "no route",
    "did not prove": "wrong key",
    "TLS:": "no TLS",
}
#: Failures that a firewall or a wrong address can cause. After any other failure, some process has answered.
_UNANSWERED = ("no answer", "refused", "no route")


class HostFacts(NamedTuple):
    """The facts that a host reports about itself.

    Attributes:
        name: its host name.
        system: its cores, and the versions of aiocoll, Python and the system.
        encryption: the option `encryption`.
        ports: the option `port_range` as text, "" if it is not set.
        where: address and port at which the other hosts dial it, "" if it does not listen.
        trouble: the reason why it does not listen.
    """

    name: str
    system: str
    encryption: str
    ports: str
    where: str = ""
    trouble: str = "it has not reported its address; see its output"


class Attempt(NamedTuple):
    """The result of dialling one host from another: the round-trip time, or a failure.

    Attributes:
        seconds: time of a round trip; 0.0 if the host was not reached.
        trouble: the reason of a failure, as the continuation of a sentence; "" if the host was reached.
    """

    seconds: float
    trouble: str = ""


class HostsMet(NamedTuple):
    """The results of all hosts after dialling each other.

    Attributes:
        nnodes: expected number of hosts.
        store: address and port of the store, as text.
        seconds: time limit of host 0 for the others to come.
        hosts: facts about the hosts that have come, by number.
        rows: attempts to reach the listening hosts: by dialling host, then by dialled host.
    """

    nnodes: int
    store: str
    seconds: float
    hosts: Mapping[int, HostFacts]
    rows: Mapping[int, Mapping[int, Attempt]]

    def reaches(self, source: int, target: int) -> bool:
        """Return whether `source` has reached `target`."""
        attempt = self.rows.get(source, {}).get(target)
        return attempt is not None and not attempt.trouble

    def differ(self) -> bool:
        """Return whether only some of the hosts encrypt connections. If so, no host dials."""
        return len({facts.encryption == "none" for facts in self.hosts.values()}) > 1

    def named(self, host: int) -> str:
        """Return the number and name of a host for use in a sentence, such as "host 1 (node7)"."""
        return f"host {host} ({self.hosts[host].name})"


def findings(met: HostsMet) -> Iterator[CheckResult]:
    """Yield check results, the same on all hosts: the hosts, the table, each failed attempt, and the verdict."""
    found = [*_hosts(met), *_missing(met)]
    if met.differ():
        found.append(_different_encryption(met))
    elif len(met.hosts) > 1:
        found += [*_table(met), *_failures(met)]
    yield from found
    problems = [each for each in found if not each.fine]
    yield CheckResult(_TOPIC, "a job", "would not meet on these hosts" if problems else "would meet on these hosts")


def _hosts(met: HostsMet) -> Iterator[CheckResult]:
    for host, facts in sorted(met.hosts.items()):
        secured = "not encrypted" if facts.encryption == "none" else "TLS 1.3"
        value = f"{facts.name} at {facts.where or 'no address'}, {secured}, {facts.system}"
        silent = not facts.where and not met.differ()
        advice = f"{met.named(host)} cannot be dialled: {facts.trouble}" if silent else ""
        yield CheckResult(_TOPIC, f"host {host}", value, advice, fine=not advice)


def _missing(met: HostsMet) -> Iterator[CheckResult]:
    missing = [str(host) for host in range(met.nnodes) if host not in met.hosts]
    if missing:
        who = f"host(s) {', '.join(missing)} of {met.nnodes}"
        advice = (
            f"{who} did not come within {met.seconds:g} s: check that `aiocoll doctor --nnodes {met.nnodes} "
            f"--node-rank {missing[0]}` runs there, with the same --master-addr. It prints the reason if it cannot "
            f"use the store, which listens on {met.store}"
        )
        yield CheckResult(_TOPIC, "missing", who, advice, fine=False)


def _different_encryption(met: HostsMet) -> CheckResult:
    plain = [str(host) for host, facts in sorted(met.hosts.items()) if facts.encryption == "none"]
    others = [str(host) for host in sorted(met.hosts) if str(host) not in plain]
    advice = (
        f"host(s) {', '.join(plain)} have encryption='none' (AIOCOLL_ENCRYPTION), and host(s) {', '.join(others)} have "
        "not: set the same on every host"
    )
    return CheckResult(_TOPIC, "encryption", "differs", advice, fine=False)


def _table(met: HostsMet) -> Iterator[CheckResult]:
    hosts = sorted(met.hosts)
    rows = [[f"to {target}" for target in hosts]]
    rows += [[_cell(met, source, target) for target in hosts] for source in hosts]
    width = max(len(cell) for row in rows for cell in row)
    for name, row in zip(["", *(f"from {host}" for host in hosts)], rows, strict=True):
        yield CheckResult(_TOPIC, name, "  ".join(f"{cell:{width}}" for cell in row).rstrip())


def _cell(met: HostsMet, source: int, target: int) -> str:
    if source == target:
        return "-"
    if source not in met.rows:
        return "no report"
    attempt = met.rows[source].get(target)
    if attempt is None:
        return "not tried"
    return _short(attempt.trouble) if attempt.trouble else f"ok {attempt.seconds * 1e3:.2f} ms"


def _short(trouble: str) -> str:
    return next((short for words, short in _SHORT.items() if words in trouble), "failed")


def _failures(met: HostsMet) -> Iterator[CheckResult]:
    for source in sorted(met.hosts):
        if source not in met.rows:
            advice = f"{met.named(source)} has not reported which hosts it reaches; see its output"
            yield CheckResult(_TOPIC, f"from {source}", "no report", advice, fine=False)
        for target, attempt in sorted(met.rows.get(source, {}).items()):
            if attempt.trouble:
                yield _failure(met, source, target, attempt.trouble)


def _failure(met: HostsMet, source: int, target: int, trouble: str) -> CheckResult:
    fine = source == 0 or (target > 0 and met.reaches(target, source))
    advice = _remedy(met, source, target, trouble)
    if fine:
        # If host 0 ends, the host with the next lowest rank replaces it, and all hosts must reach that one.
        so_long = " as long as host 0 runs" if source > target else ""
        advice = f"a job does not need this connection{so_long}: host {target} dials host {source}"
    sentence = f"{met.named(source)} cannot reach {met.named(target)}{trouble}; {advice}"
    return CheckResult(_TOPIC, f"{source} to {target}", _short(trouble), sentence, fine)


def _remedy(met: HostsMet, source: int, target: int, trouble: str) -> str:
    if _short(trouble) not in _UNANSWERED:
        return f"check that this address leads to host {target}, and the port to its listening socket"
    ports = met.hosts[target].ports or "any port (limit them there with AIOCOLL_PORT_RANGE)"
    either = "" if target == 0 else f", or back from host {target} to host {source}"
    return (
        f"let firewalls pass TCP from host {source} to {ports} of host {target}{either}; if another address leads to "
        f"host {target}, set AIOCOLL_ADVERTISE, AIOCOLL_BIND or AIOCOLL_INTERFACE there"
    )
