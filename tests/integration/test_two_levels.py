"""Two-level collectives between processes that pretend to be on different hosts, over TCP on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aiocoll import FileStore, GroupOptions, ProcessGroup, new_group
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.algorithms.two_level.hosts import host_numbers
from aiocoll.group.dispatch import planner
from aiocoll.testing import run_processes
from aiocoll.transport.frame import HEADER, FrameKind
from aiocoll.transport.stream.link import StreamLink

from ..group.test_collectives import COUNTS, REDUCING, ROOTED, check
from ..internals import comm_of
from ..pairwise import Case

KINDS = ("allreduce", "reduce", "reduce_scatter", "broadcast", "allgather")
#: Pairs of dtype and op.
REDUCTIONS = (
    ("float32", "SUM"),
    ("float64", "AVG"),
    ("int64", "MAX"),
    ("uint8", "BXOR"),
    ("complex64", "PRODUCT"),
    ("float32", "PREMUL_SUM"),
    ("int32", "larger"),
    ("float16", "SUM"),
    ("int64", "affine"),
)
#: Ops and dtypes whose reductions need the rank order, for which the ranks use an algorithm with one level.
ORDERED = ("affine", "float16")
MOVED = (("float32", "SUM"), ("uint8", "SUM"))
ITEMSIZE = {"float32": 4, "float64": 8, "int64": 8, "uint8": 1, "complex64": 8, "int32": 4, "float16": 2}


def matrix(world_size: int) -> list[Case]:
    """Return test cases: all collectives with several dtypes, ops and roots, and one dtype with all counts."""
    found: list[Case] = []
    for kind in KINDS:
        for dtype, op in REDUCTIONS if kind in REDUCING else MOVED:
            for number, count in enumerate(COUNTS):
                if count not in ("1", "1000") and dtype != "float32":
                    continue
                root = number % world_size if kind in ROOTED else 0
                case = {"kind": kind, "dtype": dtype, "count": count, "root": root, "world_size": world_size}
                found.append({**case, "op": op} if kind in REDUCING else case)
    return found


class HostTraffic:
    """A recorder of the algorithms that this process chooses, and of its data frames and bytes to other hosts."""

    def __init__(self, hosts: tuple[int, ...], rank: int) -> None:
        self.algorithm: str | None = None
        self.frames = self.nbytes = 0
        write, choose = StreamLink.write, planner.choose

        def count_and_write(link: StreamLink, header: bytes, payload: memoryview | None = None) -> bool:
            if HEADER.unpack(header)[0] == FrameKind.DATA and hosts[link.peer] != hosts[rank]:
                self.frames += 1
                self.nbytes += 0 if payload is None else payload.nbytes
            return write(link, header, payload)

        def choose_and_record(*args: Any, **named: Any) -> str:
            assert named["hosts"] == hosts
            self.algorithm = choose(*args, **named)
            return self.algorithm

        # Do not undo these patches: the process ends with this test.
        StreamLink.write = count_and_write  # type: ignore[method-assign]
        planner.choose = choose_and_record  # type: ignore[assignment]

    def take(self) -> tuple[str | None, int, int]:
        """Return the last algorithm, and the number of frames and bytes since the last call of `take`."""
        result = self.algorithm, self.frames, self.nbytes
        self.algorithm, self.frames, self.nbytes = None, 0, 0
        return result


async def run_on_hosts(pg: ProcessGroup, path: Path, names: str, cases: list[Case]) -> tuple[list[bytes], list[Any]]:
    """Run cases on a group with one host name per rank; return the result bits, and the traffic of each case."""
    options = GroupOptions(host_id=names[pg.rank()], bind="127.0.0.1", job_key="of this test and no other")
    bits: list[bytes] = []
    traffic: list[Any] = []
    async with (
        FileStore(str(path), pg.size()) as store,
        new_group(store=store, rank=pg.rank(), world_size=pg.size(), options=options) as inner,
    ):
        assert comm_of(pg).hosts == (0,) * pg.size()
        assert comm_of(inner).hosts == host_numbers(names)
        host_traffic = HostTraffic(comm_of(inner).hosts, inner.rank())
        for case in cases:
            bits += await check(inner, [case])
            traffic.append(host_traffic.take())
        await inner.barrier()
        traffic.append(host_traffic.take())
    return bits, traffic


@pytest.mark.slow
@pytest.mark.parametrize("names", ["aabb", "abab", pytest.param("aaab", marks=pytest.mark.soak)])
async def test_two_level_calls_give_correct_results_and_send_the_expected_bytes(names: str, tmp_path: Path) -> None:
    cases = matrix(len(names))
    results = await run_processes(len(names), run_on_hosts, tmp_path / "store", names, cases)
    bits, traffic = zip(*results, strict=True)
    assert all(each == bits[0] for each in bits), "the ranks have different bits"
    used = set()
    for case, *ranks in zip([*cases, {"kind": "barrier"}], *traffic, strict=True):
        kind, (algorithm, *_) = case["kind"], ranks[0]
        assert {each[0] for each in ranks} == {algorithm}, case
        if (kind, algorithm) not in two_level.ALGORITHMS:
            assert kind == "reduce_scatter" or case.get("op") in ORDERED or case["dtype"] in ORDERED, case
            continue
        used.add((kind, algorithm))
        count = COUNTS[case["count"]](len(names)) if kind != "barrier" else 0
        nbytes = count * ITEMSIZE[case["dtype"]] if count else 0
        assert sum(each[2] for each in ranks) == two_level.bytes_between_hosts(
            algorithm, kind, nbytes, host_numbers(names)
        ), case
        if algorithm == "leaders":
            # A single element belongs to only one host, which therefore sends the only message.
            messages = {"reduce": 1, "broadcast": 1, "allgather": min(2, count)}.get(kind, 2)
            assert sum(each[1] for each in ranks) == (messages if count or kind == "barrier" else 0), case
    # Small arrays with user-defined ops use "lanes", since with "leaders" every leader would repeat the reduction.
    assert used == set(two_level.ALGORITHMS)
