"""What hosts have found when each dialled each other one: who reaches whom, why not, and whether a job would meet.

All hosts have to reach host 0, whose lowest rank all others dial; of any other two, one has to reach the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from aiocoll.cli.checks import CheckResult

__all__ = ["Attempt", "HostFacts", "HostsMet", "findings"]

_TOPIC = "between hosts"
#: What the table says of a failure whose reason has these words.
_SHORT = {
    "does not answer": "no answer",
    "Connection refused": "refused",
    "No route to host": "no route",
    "Network is unreachable": "no route",
    "did not prove": "wrong key",
    "TLS:": "no TLS",
}
#: Failures that a firewall, or a wrong address, is the cause of; whatever else happens, somebody has answered.
_UNANSWERED = ("no answer", "refused", "no route")


class HostFacts(NamedTuple):
    """One host, as it has told the others.

    Attributes:
        name: its host name.
        system: its cores and the versions there.
        encryption: the option.
        ports: the option `port_range` in words, "" if there is none.
        where: address and port at which others are to dial it, "" if there are none.
        trouble: why there are none.
    """

    name: str
    system: str
    encryption: str
    ports: str
    where: str = ""
    trouble: str = "it has not told where it listens: see what it prints"


class Attempt(NamedTuple):
    """One host has dialled another.

    Attributes:
        seconds: of a round trip, 0.0 if the other host was not reached.
        trouble: why not; it continues a sentence.
    """

    seconds: float
    trouble: str = ""


class HostsMet(NamedTuple):
    """All that is known once the hosts have dialled each other.

    Attributes:
        nnodes: how many there should be.
        store: where the store listens, in words.
        seconds: how long host 0 has waited for the others at most.
        hosts: those that have come.
        rows: by each host that has told them, its attempts to reach those that listen.
    """

    nnodes: int
    store: str
    seconds: float
    hosts: Mapping[int, HostFacts]
    rows: Mapping[int, Mapping[int, Attempt]]

    def reaches(self, source: int, target: int) -> bool:
        """Whether one host has reached another."""
        attempt = self.rows.get(source, {}).get(target)
        return attempt is not None and not attempt.trouble

    def differ(self) -> bool:
        """Whether some hosts encrypt and others do not; then nobody dials."""
        return len({facts.encryption == "none" for facts in self.hosts.values()}) > 1

    def named(self, host: int) -> str:
        """Return what to call a host in a sentence."""
        return f"host {host} ({self.hosts[host].name})"


def findings(met: HostsMet) -> Iterator[CheckResult]:
    """Yield the hosts, the table, a sentence for each pair that has failed, and the verdict; the same on all hosts."""
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
            f"{who} did not come within {met.seconds:g} s: does `aiocoll doctor --nnodes {met.nnodes} --node-rank "
            f"{missing[0]}` run there, with the same --master-addr? It says why it cannot use the store, which listens "
            f"on {met.store}"
        )
        yield CheckResult(_TOPIC, "missing", who, advice, fine=False)


def _different_encryption(met: HostsMet) -> CheckResult:
    plain = [str(host) for host, facts in sorted(met.hosts.items()) if facts.encryption == "none"]
    others = [str(host) for host in sorted(met.hosts) if str(host) not in plain]
    advice = (
        f"host(s) {', '.join(plain)} have encryption='none' (AIOCOLL_ENCRYPTION), and host(s) {', '.join(others)} have "
        "not: connections are plain only where every host says so"
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
        return "not told"
    attempt = met.rows[source].get(target)
    if attempt is None:
        return "not tried"
    return _short(attempt.trouble) if attempt.trouble else f"ok {attempt.seconds * 1e3:.2f} ms"


def _short(trouble: str) -> str:
    return next((short for words, short in _SHORT.items() if words in trouble), "failed")


def _failures(met: HostsMet) -> Iterator[CheckResult]:
    for source in sorted(met.hosts):
        if source not in met.rows:
            advice = f"{met.named(source)} has not told whom it reaches: see what it prints"
            yield CheckResult(_TOPIC, f"from {source}", "not told", advice, fine=False)
        for target, attempt in sorted(met.rows.get(source, {}).items()):
            if attempt.trouble:
                yield _failure(met, source, target, attempt.trouble)


def _failure(met: HostsMet, source: int, target: int, trouble: str) -> CheckResult:
    fine = source == 0 or (target > 0 and met.reaches(target, source))
    advice = _remedy(met, source, target, trouble)
    if fine:
        # With host 0 goes what all have to reach, and the next lowest rank takes its place.
        so_long = " as long as host 0 runs" if source > target else ""
        advice = f"a job does without that{so_long}: it is host {target} that dials host {source}"
    sentence = f"{met.named(source)} cannot reach {met.named(target)}{trouble}; {advice}"
    return CheckResult(_TOPIC, f"{source} to {target}", _short(trouble), sentence, fine)


def _remedy(met: HostsMet, source: int, target: int, trouble: str) -> str:
    if _short(trouble) not in _UNANSWERED:
        return f"does that address lead to host {target}, and the port to the one on which it listens?"
    ports = met.hosts[target].ports or "any port (AIOCOLL_PORT_RANGE there says which)"
    either = "" if target == 0 else f", or back from host {target} to host {source}"
    return (
        f"let firewalls pass TCP from host {source} to {ports} of host {target}{either}; if another address leads to "
        f"host {target}, name it there: AIOCOLL_ADVERTISE, AIOCOLL_BIND or AIOCOLL_INTERFACE"
    )
