"""`aiocoll doctor`: check this host, and let some ranks meet."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from aiocoll.cli.arguments import positive
from aiocoll.cli.checks import CheckResult, look
from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.testing.processes import run_processes
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["add_parser"]

#: Seconds the ranks have to start, meet and end.
_PATIENCE = 60.0
#: Pairs of ranks that are named one by one.
_NAMED = 16


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `doctor` to the subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="check this host for problems and for causes of slowness",
        description="Check this host as a rank would see it, then let ranks meet. The exit code is 1 if something "
        "fails or is slower than it could be; each problem is printed with its remedy.",
    )
    parser.add_argument("-n", "--nproc", type=positive, default=2, metavar="N", help="ranks that meet (default: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    pairs, met = _meeting(args.nproc)
    findings = [*look(args.nproc), met]
    fine = all(finding.fine for finding in findings)
    if args.json:
        print(json.dumps({"fine": fine, "findings": [asdict(each) for each in findings], "pairs": pairs}, indent=1))
    else:
        print("\n".join(_lines(findings, pairs)))
    return 0 if fine else 1


def _meeting(ranks: int) -> tuple[list[dict[str, Any]], CheckResult]:
    """Let ranks meet, each in a process of its own; return how each pair is connected."""
    try:
        results = asyncio.run(run_processes(ranks, _meet, timeout=_PATIENCE))
    except Exception as error:
        advice = f"no group can be formed here: {error}"
        return [], CheckResult("ranks", "meeting", f"failed ({type(error).__name__})", advice, fine=False)
    pairs = [
        {"ranks": [rank, peer], "transport": transport, "why": why}
        for rank, found in enumerate(results)
        for peer, transport, why in found
    ]
    wanted = GroupOptions.resolve(None, os.environ).transport in ("auto", "shm")
    slow = wanted and any(pair["transport"] != "shm" for pair in pairs)
    advice = "ranks of this host could share memory, which is faster, but do not: see the reason below" if slow else ""
    return pairs, CheckResult("ranks", "meeting", f"{ranks} met, all pairs exchanged data", advice, fine=not slow)


async def _meet(pg: ProcessGroup) -> list[tuple[int, str, str]]:
    size = pg.size()
    received = await pg.alltoall_object([pg.rank()] * size)
    if received != list(range(size)):
        raise ArithmeticError(f"rank {pg.rank()} received {received} from the ranks 0 to {size - 1}")
    return [(peer, *_transport_of(pg, peer)) for peer in range(pg.rank() + 1, size)]


def _transport_of(pg: ProcessGroup, peer: int) -> tuple[str, str]:
    """Return what carries data between this rank and `peer`, and why it is that."""
    endpoint = pg._comm.endpoint
    assert isinstance(endpoint.context.transport, StreamTransport)
    carrier, trouble = endpoint.context.transport.carrier(peer)
    cards = endpoint.cards[pg.rank()], endpoint.cards[peer]
    if cards[0]["host"] != cards[1]["host"]:
        return carrier, next((card["apart"] for card in cards if card.get("apart")), "they are on two hosts")
    if carrier == "shm":
        return carrier, "both are on this host"
    return carrier, f"both are on this host, but without shared memory: {trouble or f'rank {peer} has none'}"


def _lines(findings: Sequence[CheckResult], pairs: list[dict[str, Any]]) -> Iterator[str]:
    topic = ""
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            yield topic
        yield f"  {finding.name:{width}}  {finding.value}"
        if finding.advice:
            yield f"  {' ' * width}  {'hint' if finding.fine else 'PROBLEM'}: {finding.advice}"
    kinds: dict[str, list[str]] = {}
    for pair in pairs:
        kinds.setdefault(f"{pair['transport']}, {pair['why']}", []).append("{}-{}".format(*pair["ranks"]))
    for kind, names in kinds.items():
        more = f" and {len(names) - _NAMED} more pairs" if len(names) > _NAMED else ""
        yield f"  {' '.join(names[:_NAMED])}{more}: {kind}"
    problems = sum(not finding.fine for finding in findings)
    yield f"{problems} problem{'s' if problems > 1 else ''}, see above" if problems else "all fine"
