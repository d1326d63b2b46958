"""`aiocoll doctor`: checks of this host, a test group on it, and test connections between hosts."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from aiocoll.cli.arguments import describe_command, positive
from aiocoll.cli.checks import CheckResult, check_load, look
from aiocoll.cli.doctor_hosts import meet_hosts
from aiocoll.cli.hosts import Hosts, add_host_arguments, read_hosts
from aiocoll.cli.reach import HostsMet, findings
from aiocoll.cli.terminal import Progress, styled
from aiocoll.errors import AiocollError
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.machine_load import LoadMeter
from aiocoll.options import GroupOptions
from aiocoll.testing.processes import run_processes
from aiocoll.transport.registry import SHM, find_transport

__all__ = ["configure"]

#: Timeout in seconds within which the test ranks must start, meet and end.
_MAX_WAIT = 60.0
#: Maximum number of rank pairs in one line of the output.
_NAMED = 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `doctor`; see `aiocoll.plugins.Command`."""
    describe_command(
        parser,
        codes={
            0: "all is fine: a job would meet and run",
            1: "something fails or is slower than it could be, or output could not be written",
        },
        description="Check this host as a rank would see it, then let ranks meet. With --nnodes, run it on each host. "
        "Each host then dials all others as a rank would, and prints which host reaches which, with the reasons of "
        "failures. Each problem is printed with its remedy.",
    )
    parser.add_argument("-n", "--nproc", type=positive, default=2, metavar="N", help="ranks that meet (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_host_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=positive,
        default=30,
        metavar="SECONDS",
        help="how long to look for host 0, and then for the others (default: 30)",
    )
    parser.set_defaults(command=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        hosts = read_hosts(args, os.environ) if args.nnodes > 1 or args.node_rank else None
    except ValueError as error:
        parser.error(str(error))
    print_line: Callable[[str], None] = (lambda text: None) if args.json else (lambda text: print(text, flush=True))
    meter = LoadMeter()
    with Progress() as progress:
        progress.show(f"{args.nproc} ranks meet on this host")
        pairs, met = _meeting(args.nproc)
    found = [*look(args.nproc, args.master_addr), *check_load(meter.lap()), met]
    print_line("\n".join(_lines(found, pairs)))
    between: list[CheckResult] = []
    dialled: list[dict[str, Any]] = []
    if hosts is not None:
        between, dialled = _check_between_hosts(hosts, args.timeout, print_line)
        print_line("\n".join(_lines(between, [])))
    found += between
    problems = sum(not finding.fine for finding in found)
    print_line(_sum(problems))
    if args.json:
        result = {"fine": not problems, "findings": [asdict(each) for each in found], "pairs": pairs}
        print(json.dumps(result | ({} if hosts is None else {"hosts": dialled}), indent=1))
    return 1 if problems else 0


def _sum(problems: int) -> str:
    if not problems:
        return styled("all fine", "good", sys.stdout)
    return styled(f"{problems} problem{'s' if problems > 1 else ''}, see above", "bad", sys.stdout)


def _check_between_hosts(
    hosts: Hosts, timeout: float, print_line: Callable[[str], None]
) -> tuple[list[CheckResult], list[dict[str, Any]]]:
    """Meet the other hosts and dial them; return the check results, and the result of each dial attempt."""
    try:
        options = GroupOptions.resolve(None, os.environ)
        met: HostsMet = asyncio.run(meet_hosts(hosts, options, timeout, print_line))
    except (AiocollError, OSError, ValueError) as error:
        return [CheckResult("between hosts", "meeting", "failed", str(error), fine=False)], []
    dialled = [
        {"from": source, "to": target, "seconds": attempt.seconds, "trouble": attempt.trouble}
        for source, row in sorted(met.rows.items())
        for target, attempt in sorted(row.items())
    ]
    return list(findings(met)), dialled


def _meeting(ranks: int) -> tuple[list[dict[str, Any]], CheckResult]:
    """Let ranks meet, each in its own process; return the transport of each pair of ranks, and a check result."""
    try:
        results = asyncio.run(run_processes(ranks, _meet, timeout=_MAX_WAIT))
    except Exception as error:
        advice = f"no group can be formed here: {error}"
        return [], CheckResult("ranks", "meeting", f"failed ({type(error).__name__})", advice, fine=False)
    pairs = [
        {"ranks": [rank, peer], "transport": transport, "why": why}
        for rank, found in enumerate(results)
        for peer, transport, why in found
    ]
    wanted = find_transport(GroupOptions.resolve(None, os.environ).transport)
    slow = wanted.shares_memory and any(pair["transport"] != wanted.medium for pair in pairs)
    advice = "ranks of this host could share memory, which is faster, but do not: see the reason below" if slow else ""
    return pairs, CheckResult("ranks", "meeting", f"{ranks} met, all pairs exchanged data", advice, fine=not slow)


async def _meet(pg: ProcessGroup) -> list[tuple[int, str, str]]:
    size = pg.size()
    received = await pg.alltoall_object([pg.rank()] * size)
    if received != list(range(size)):
        raise ArithmeticError(
            f"rank {pg.rank()} received {received} from the ranks 0 to {size - 1} instead of their rank numbers"
        )
    return [(peer, *_transport_of(pg, peer)) for peer in range(pg.rank() + 1, size)]


def _transport_of(pg: ProcessGroup, peer: int) -> tuple[str, str]:
    """Return the medium that carries data between this rank and `peer`, and why this medium was chosen."""
    endpoint = parts_of(pg).comm.endpoint
    carrier, trouble = endpoint.context.transport.carrier(peer)
    cards = endpoint.cards[pg.rank()], endpoint.cards[peer]
    if cards[0]["host"] != cards[1]["host"]:
        return carrier, next((card["apart"] for card in cards if card.get("apart")), "they are on two hosts")
    if carrier == SHM.medium:
        return carrier, "both are on this host"
    return carrier, f"both are on this host, but without shared memory: {trouble or f'rank {peer} has none'}"


def _lines(found: Sequence[CheckResult], pairs: list[dict[str, Any]]) -> Iterator[str]:
    topic = ""
    width = max(len(finding.name) for finding in found)
    for finding in found:
        if finding.topic != topic:
            topic = finding.topic
            yield styled(topic, "heading", sys.stdout)
        yield f"  {finding.name:{width}}  {finding.value}"
        if finding.advice:
            kind = styled("hint:", "hint", sys.stdout) if finding.fine else styled("PROBLEM:", "bad", sys.stdout)
            yield f"  {' ' * width}  {kind} {finding.advice}"
    kinds: dict[str, list[str]] = {}
    for pair in pairs:
        kinds.setdefault(f"{pair['transport']}, {pair['why']}", []).append("{}-{}".format(*pair["ranks"]))
    for kind, names in kinds.items():
        more = f" and {len(names) - _NAMED} more pairs" if len(names) > _NAMED else ""
        yield f"  {' '.join(names[:_NAMED])}{more}: {kind}"
