"""`aiocoll trace`: reports on ranks that hang, make different calls or run; errors for unusable files; pictures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, GroupOptions, ProcessGroup, ReduceOp, Work
from aiocoll.cli import timeline_plot as picture
from aiocoll.cli.divergence import lateness
from aiocoll.cli.main import main
from aiocoll.cli.merge import Unusable, collect
from aiocoll.dump.files import FORMAT, file_name
from aiocoll.engine.journal import HISTORY
from aiocoll.testing import run_processes
from aiocoll.testing.virtual import run_virtual
from tests.cli import traced_ranks

HERE = traced_ranks.__file__


def trace(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Run `aiocoll trace`; return its exit code and output."""
    code = main(["trace", *map(str, arguments)])
    output = capsys.readouterr()
    assert (output.err == "") == (code != 2)
    return code, output.out + output.err


def files(path: Path) -> list[Path]:
    return sorted(path.glob("dump-*"))


def ignore_failure(work: Work[Any]) -> None:
    """Mark the failure of a work as retrieved, so that no warning follows."""
    work.add_done_callback(lambda _: None)


def record(world_size: int, fn: Callable[..., Awaitable[Any]], path: Path, **options: Any) -> list[Path]:
    """Run `fn` on a virtual clock; return the dumps that the ranks have written at the end."""

    async def rank(pg: ProcessGroup) -> None:
        await fn(pg)
        pg.recorder.dump_json(path / file_name(pg.group_name, pg.rank()))
        await asyncio.sleep(5)  # more seconds than any test here takes
        pg.abort()

    run_virtual(world_size, rank, options=GroupOptions(**options))
    return files(path)


# -- real ranks


async def test_trace_of_a_hang_names_the_collective_the_line_and_the_missing_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = GroupOptions(dump_dir=str(tmp_path))
    lines = await run_processes(3, traced_ranks.hang, 2, 1, options=options)
    perfetto = tmp_path / "trace.json"
    code, output = trace(capsys, *files(tmp_path), "--perfetto", perfetto)
    assert code == 1
    assert "group 'world:0': 3 ranks, 9 collectives remembered\n  verdict: rank 1 did not enter BARRIER 5: " in output
    assert f": it waited in RECV at {Path(HERE).name}:{lines[1] + 3}; ranks 0, 2 waited " in output
    assert "\n  failed: CollectiveTimeoutError: BARRIER" in output
    assert "\n  diverged first: BARRIER (sequence 5)\n    ranks 0, 2 called BARRIER(" in output
    assert f"SequenceNumber=5) at {HERE}:{lines[0]} in hang\n    missing: rank 1, last in ALLGATHER_OBJECT" in output
    assert f"(sequence 4) at {HERE}:{lines[1]} in hang, entered" in output
    assert f"it waited in RECV (from rank 0, tag 5) at {HERE}:{lines[1] + 3} in hang" in output
    names = {event["name"] for event in json.loads(perfetto.read_text())["traceEvents"]}
    assert {"BARRIER 5", "ALLREDUCE 'layer1' 2", "RECV"} < names
    # Pass only the dumps of the waiting ranks, which do not contain the calls of the missing rank.
    code, output = trace(capsys, *(files(tmp_path)[rank] for rank in (0, 2)))
    assert code == 1
    assert "no dump of rank 1: killed, blocked, or its dump was not passed" in output
    assert "\n    rank 1, as its peers recorded it: waiting in RECV; last in ALLGATHER_OBJECT, " in output
    assert "missing" not in output


@pytest.mark.slow
async def test_trace_of_a_mismatch_names_both_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await run_processes(3, traced_ranks.reduce_different_sizes, options=GroupOptions(dump_dir=str(tmp_path)))
    code, output = trace(capsys, *files(tmp_path))
    assert code == 1
    assert "failed: CollectiveMismatchError: Collectives differ in the following: counts, shape. Group" in output
    # Either rank may find the mismatch first; the group's cause may come from the comparison of the other rank.
    lines = output.partition("diverged first: ALLREDUCE (sequence 5)\n")[2].splitlines()
    if lines[0].startswith("    Collectives differ in the following: counts, shape. Group 'world:0': rank "):
        del lines[0]
    assert lines[0].startswith("    ranks 0, 1 called ALLREDUCE(shape=[7]")
    assert "\n    rank 2 called ALLREDUCE(shape=[8], dtype=float64, device=cpu, counts=[8]" in output
    assert output.count(f"{HERE}:") >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "blocked"), [("asyncio", True), ("uvloop", False)])
async def test_signal_makes_a_living_rank_write_a_dump(
    loop: Any, blocked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = GroupOptions(dump_dir=str(tmp_path))
    await run_processes(2, traced_ranks.signal_each_other, str(tmp_path), blocked, options=options, loop=loop)
    code, output = trace(capsys, *files(tmp_path))
    assert code == 0
    assert "no collective diverged" in output
    assert "last to arrive on average: rank" in output


# -- reports from dumps


def test_trace_of_a_healthy_group_names_the_rank_that_is_last_on_average(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        for _ in range(4):
            await asyncio.sleep(0.25 * (pg.rank() == 2))
            await pg.barrier()

    dumps = record(3, rank, tmp_path)
    code, output = trace(capsys, *dumps)
    assert code == 0
    late_words = "rank 2, 250 ms after the first; it was the last in 4 of 4 collectives"
    assert f"  no collective diverged\n  last to arrive on average: {late_words}\n" in output
    late = lateness(collect(list(map(str, dumps)))[0])
    assert late is not None
    assert (late.rank, late.seconds, late.last, late.calls) == (2, pytest.approx(0.25), 4, 4)


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        ((0, 0, 2, 0), "rank 2 entered BARRIER 3 2 s after ranks 0, 1; no failure"),
        ((0.1, 0.1, 1.5, 0.1), "rank 2 entered BARRIER 3 1.5 s after ranks 0, 1; no failure"),
        ((2, 2, 2, 2), "rank 2 arrived last in 4 of 4 collectives, 2 s after the first on average; no failure"),
        ((0, 0.9, 0, 0), "rank 2 arrived last in 4 of 4 collectives, 225 ms after the first on average; no failure"),
    ],
)
def test_verdict_names_the_collective_that_one_rank_entered_late(
    delays: tuple[float, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        for delay in delays:
            await asyncio.sleep(delay * (pg.rank() == 2))
            await pg.barrier()

    code, output = trace(capsys, *record(3, rank, tmp_path))
    assert code == 0
    assert f"\n  verdict: {expected}\n" in output


@pytest.mark.parametrize(
    ("world_size", "delays", "expected"),
    [
        (3, {0: (0.3, 0, 0), 1: (0, 0.3, 0), 2: (0, 0, 0.3)}, "no failure: no collective diverged"),
        (2, {0: (0.3, 0, 0.2), 1: (0, 0.3, 0)}, "no failure: no collective diverged"),
        (
            4,
            {0: (0, 0, 0, 0.9), 1: (0.01, 0, 0, 0), 2: (0, 0.01, 0, 0), 3: (0, 0, 0.01, 0)},
            "rank 0 arrived last in 3 of 12 collectives, 225 ms after the first on average; no failure",
        ),
    ],
    ids=["three in turn", "two in turn", "rarely late"],
)
def test_verdict_names_a_rank_only_if_the_others_wait_for_it_much_longer_than_for_any_other(
    world_size: int,
    delays: dict[int, tuple[float, ...]],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        for delay in delays[pg.rank()] * 3:
            await asyncio.sleep(delay)
            await pg.barrier()

    code, output = trace(capsys, *record(world_size, rank, tmp_path))
    assert code == 0
    assert f"\n  verdict: {expected}\n" in output


@pytest.mark.parametrize(
    ("began", "seconds", "expected"),
    [
        (1.0, 4.0, "rank 1 was blocked at train.py:15 in load, and entered BARRIER 1 4 s after rank 0"),
        (3.0, 9.0, "rank 1 was blocked at train.py:15 in load, and entered BARRIER 1 4 s after rank 0"),
        (3.5, 1.0, "rank 1 entered BARRIER 1 4 s after rank 0"),
        (5.0, 9.0, "rank 1 entered BARRIER 1 4 s after rank 0"),
    ],
)
def test_verdict_on_a_late_rank_names_the_line_that_blocked_it_meanwhile(
    began: float, seconds: float, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let rank 0 enter the barrier at 1 s and rank 1 at 5 s; block rank 1 during this time, partly, or later."""
    clock = {"host": "h", "monotonic": 20.0, "wall": 20.0}
    block = {
        "began": began,
        "seconds": seconds,
        "line": "/srv/my, folder/train.py:15 in load, called from /srv/train.py:30 in main",
    }
    early = {"began": 0.0, "seconds": 0.9, "line": "/srv/train.py:3 in load_model"}
    for rank, entered in enumerate((1.0, 5.0)):
        call = recorded_call(state="finished", error=None, entered=entered, finished=6.0)
        dump = valid_dump(
            rank=rank, clock=clock, entered=1, entries=[call], longest_blocks=[early, block] if rank else []
        )
        (tmp_path / str(rank)).write_text(json.dumps(dump))
    code, output = trace(capsys, tmp_path / "0", tmp_path / "1")
    assert code == 0
    assert f"\n  verdict: {expected}; no failure\n" in output


def test_verdict_on_a_missing_rank_names_the_line_that_blocked_it_until_its_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let rank 0 enter the barrier at 1 s and fail at 6 s, while a line blocks rank 1 from 1 s to 6 s."""
    clock = {"host": "h", "monotonic": 6.5, "wall": 6.5}
    waits = recorded_call(entered=1.0, finished=6.0)
    block = {"began": 1.0, "seconds": 5.0, "line": "/srv/train.py:15 in load"}
    cause = {"kind": "CollectiveTimeoutError", "text": "BARRIER timed out", "ranks": [1]}
    dumps = [
        valid_dump(clock=clock, state="revoked", cause=cause, entered=1, entries=[waits]),
        valid_dump(rank=1, clock=clock, state="revoked", cause=cause, longest_blocks=[block]),
    ]
    for rank, dump in enumerate(dumps):
        (tmp_path / str(rank)).write_text(json.dumps(dump))
    _, output = trace(capsys, tmp_path / "0", tmp_path / "1")
    assert "\n  verdict: rank 1 was blocked at train.py:15 in load; rank 0 waited 5 s in BARRIER 1\n" in output


@pytest.mark.parametrize("debug", ["off", "detail"])
@pytest.mark.parametrize("keyed", [False, True])
def test_trace_names_a_missing_rank_of_an_open_group(
    keyed: bool, debug: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check a broadcast too, whose root has completed its call long ago."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() != 1:
            ignore_failure(pg.broadcast(np.zeros(3), 0, key="k" if keyed else None))
        await asyncio.sleep(1)

    code, output = trace(capsys, *record(3, rank, tmp_path, debug=debug))
    assert code == 1
    name = "BROADCAST (sequence 'k' 1)" if keyed else "BROADCAST (sequence 2)"
    assert f"diverged first: {name}\n    ranks 0, 2 called BROADCAST(shape=[3]" in output
    assert "missing: rank 1, last in BARRIER (sequence 1)" in output
    assert f"  pending on ranks 0, 2: {name} at" in output or debug == "off"
    assert "failed" not in output


def test_trace_does_not_report_a_rank_as_missing_that_enters_the_call_soon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == 0:
            ignore_failure(pg.barrier())
        await asyncio.sleep(0.2)

    code, output = trace(capsys, *record(2, rank, tmp_path))
    assert code == 0
    assert "no collective diverged\n  pending on rank 0: BARRIER (sequence 2)" in output


@pytest.mark.parametrize("field", ["op", "root", "reduce", "dtype", "shape"])
def test_trace_reports_the_first_of_several_mismatches(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Use call comparison, so that the group remains usable after a mismatch."""

    async def rank(pg: ProcessGroup) -> None:
        await pg.allreduce(1.0)
        odd = pg.rank() == 1
        for _ in range(3):
            x = np.zeros(4 + (odd and field == "shape"), np.float32 if odd and field == "dtype" else np.float64)
            if odd and field == "op":
                work = pg.broadcast(x, 0)
            else:
                op = ReduceOp.MAX if odd and field == "reduce" else ReduceOp.SUM
                work = pg.reduce(x, 2 if odd and field == "root" else 0, op)
            with pytest.raises(GroupError):
                await work

    code, output = trace(capsys, *record(3, rank, tmp_path, debug="detail"))
    assert code == 1
    assert "diverged first: REDUCE (sequence 2)\n    Collectives differ in the following:" in output
    assert f"following: {'counts, shape' if field == 'shape' else field}" in output
    assert "    ranks 0, 2 called REDUCE(shape=[4]" in output
    assert "    and 2 later collectives diverged too\n" in output


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_trace_does_not_report_a_rank_with_a_shorter_history_as_missing(
    late: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Let the dump of one rank begin with an earlier collective than the other dump, with either rank late."""

    async def rank(pg: ProcessGroup) -> None:
        for number in range(HISTORY // 2 + 5):
            await asyncio.sleep(0.001 * (pg.rank() == late))
            await pg.barrier(key="again")
            await pg.barrier(key=f"once {number}")
        if pg.rank() == 0:
            ignore_failure(pg.broadcast(np.zeros(1), 0, key="last"))
        await asyncio.sleep(1)

    code, output = trace(capsys, *record(2, rank, tmp_path))
    assert code == 1
    assert "diverged first: BROADCAST (sequence 'last' 1)\n" in output
    assert "later" not in output


def test_trace_aligns_the_clocks_of_two_hosts(tmp_path: Path) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()

    dumps = record(3, rank, tmp_path)
    # Rank 2 is on a second host, whose monotonic clock started 100 s later. Ranks 0 and 1 share a monotonic clock,
    # although their wall clocks differ.
    for path, host, monotonic, wall in zip(dumps, "aab", (0.0, 0.0, -100.0), (5.0, 5.5, 5.0), strict=True):
        dump = json.loads(path.read_text())
        dump["clock"]["host"] = host
        dump["clock"]["wall"] += wall
        dump["clock"]["monotonic"] += monotonic
        for recorded_call in dump["entries"]:
            recorded_call["entered"] += monotonic
            recorded_call["finished"] += monotonic
        path.write_text(json.dumps(dump))
    (group,) = collect(list(map(str, dumps)))
    (call,) = group.calls
    assert call.entered[0] == call.entered[1]
    assert call.entered[2] == pytest.approx(call.entered[0] - 0.5)


def test_trace_reports_several_groups_and_a_group_without_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        pass

    dumps = record(1, rank, tmp_path)
    other = json.loads(dumps[0].read_text()) | {"group": "another", "id": 1}
    (tmp_path / "dump-b").write_text(json.dumps(other))
    code, output = trace(capsys, *files(tmp_path), "--perfetto", tmp_path / "trace.json")
    assert code == 0
    assert output == (
        "group 'another': 1 rank, 0 collectives remembered\n"
        "  verdict: no failure: no collective diverged\n  no collective diverged\n\n"
        "group 'world:0': 1 rank, 0 collectives remembered\n"
        "  verdict: no failure: no collective diverged\n  no collective diverged\n"
    )


# -- the verdict

#: Causes of hangs by name; in each case, rank 1 is at fault.
CAUSES = {
    "a lost rank": (
        {"kind": "PeerLostError", "text": "rank 1 of group 'g' is gone: its process is gone", "ranks": [1]},
        "rank 1 was lost: its process is gone; rank 0 waited 4 s in BARRIER 1",
    ),
    "a silent rank": (
        {
            "kind": "CollectiveTimeoutError",
            "text": "BARRIER (sequence 1) of group 'g' did not complete within 4 s on rank 0, which called "
            "BARRIER(shape=[]): it waits for rank 1 (which has not answered for 3.78 s, its process is alive "
            "(sleeping))",
            "ranks": [1],
        },
        "rank 1 did not enter BARRIER 1: it has not answered for 3.78 s, its process is alive (sleeping); "
        "rank 0 waited 4 s",
    ),
    "no rank": (
        {"kind": "GroupError", "text": "BARRIER(shape=[]) was cancelled", "ranks": []},
        "the group failed: GroupError: BARRIER was cancelled",
    ),
}


def recorded_call(**changes: Any) -> dict[str, Any]:
    call = {
        **{"rank": 0, "op": "BARRIER", "shape": [], "dtype": None, "device": "cpu", "counts": [], "sends": None},
        **{"receives": None, "members": None, "root": None, "reduce": None, "seq": 1, "key": None, "debug": None},
        **{"kind": "collective", "peer": None, "tag": None, "bytes": None, "entered": 1.0, "finished": 5.0},
        **{"state": "failed", "error": "GroupError", "site": "/srv/train.py:15", "function": "main"},
    }
    return {**call, **changes}


@pytest.mark.parametrize("cause", CAUSES)
def test_trace_without_the_dump_of_the_faulty_rank_uses_the_records_of_its_peers(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, words = CAUSES[cause]
    clock = {"host": "h", "monotonic": 5.0, "wall": 5.0}
    dump = valid_dump(cause=given, state="revoked", entered=1, clock=clock, entries=[recorded_call()])
    (tmp_path / "one").write_text(json.dumps(dump))
    code, output = trace(capsys, tmp_path / "one")
    assert code == 1
    assert output.splitlines()[1] == f"  verdict: {words}"


def test_trace_verdict_names_the_line_that_blocks_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = {"host": "h", "monotonic": 5.25, "wall": 5.25}
    pending = recorded_call(entered=1.05, finished=None, state="pending", error=None)
    (tmp_path / "0").write_text(json.dumps(valid_dump(clock=clock, entered=1, entries=[pending])))
    blocked = [4.0, "/srv/train.py:15 in load, called from /srv/train.py:20 in main"]
    (tmp_path / "1").write_text(json.dumps(valid_dump(rank=1, clock=clock, blocked=blocked)))
    code, output = trace(capsys, tmp_path / "0", tmp_path / "1")
    assert code == 1
    assert output.splitlines()[1] == (
        "  verdict: rank 1 was blocked at train.py:15 in load; rank 0 waited 4.2 s in BARRIER 1"
    )


def test_trace_verdict_of_a_mismatch_names_the_lines_of_both_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        makes = {0: lambda: pg.allreduce(np.zeros(4)), 1: lambda: pg.allreduce(np.zeros(7))}
        work = makes[pg.rank() % 2]()
        with pytest.raises(GroupError):
            await work

    _, output = trace(capsys, *record(3, rank, tmp_path, debug="detail"))
    here = f"{Path(__file__).name}:{rank.__code__.co_firstlineno + 1}"
    assert f"verdict: ranks made different calls in ALLREDUCE 1: rank 1 at {here}; ranks 0, 2 at {here}" in output


# -- files that cannot be used


def valid_dump(**changes: Any) -> dict[str, Any]:
    clock = {"host": "h", "monotonic": 1.0, "wall": 1.0}
    dump = {
        **{"format": FORMAT, "version": 1, "group": "g", "id": 1, "rank": 0, "world_size": 2, "global_ranks": [0, 1]},
        **{"host": "h", "pid": 1, "clock": clock, "state": "open", "cause": None, "entered": 0, "keys": {}},
        "entries": [],
    }
    return {**dump, **changes}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is not JSON, or incomplete"),
        (json.dumps(valid_dump()).encode()[:-3], "is not JSON, or incomplete"),
        (b"\xff\xfe\xfd", "is not JSON, or incomplete"),
        (b"[1, 2]", "is not a dump of pg.recorder"),
        (b'{"a": 1}', "is not a dump of pg.recorder"),
        (b'{"traceEvents": []}', "is a trace for Perfetto; give the dumps from which it was made"),
        (valid_dump(version=2), "has version 2 of the dump format; this aiocoll reads version 1"),
        (valid_dump(rank=2), "is damaged: rank: the group has no rank of this number"),
        (valid_dump(rank=True), "is damaged: rank: True is not a number"),
        (valid_dump(clock={}), "is damaged: clock: host is missing"),
        (valid_dump(entries=[1]), "is damaged: entries: each entry must be a map"),
        (valid_dump(longest_blocks=[{"began": 1.0, "seconds": 1.0}]), "is damaged: longest_blocks: line is missing"),
        (
            valid_dump(longest_blocks=[{"began": 1, "seconds": "x", "line": ""}]),
            "is damaged: longest_blocks: seconds: ",
        ),
        (valid_dump(entries=[{"kind": "collective"}]), "is damaged: rank is missing"),
        ({key: value for key, value in valid_dump().items() if key != "cause"}, "is damaged: cause is missing"),
    ],
)
def test_trace_refuses_a_file_that_is_not_a_dump(
    content: bytes | dict[str, Any] | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    code, output = trace(capsys, path)
    assert (code, output.startswith(f"aiocoll trace: {path}: {words}")) == (2, True), output


def test_trace_refuses_inconsistent_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(json.dumps(valid_dump()))
    two.write_text(json.dumps(valid_dump()))
    code, output = trace(capsys, one, two)
    assert (code, f"{one} and {two} are both dumps of rank 0 of group 'g': give one dump per rank" in output) == (
        2,
        True,
    )
    two.write_text(json.dumps(valid_dump(rank=1, global_ranks=[0, 2])))
    code, output = trace(capsys, one, two)
    assert (code, f"{one} and {two} disagree on the ranks of group 'g': they are from different jobs" in output) == (
        2,
        True,
    )


def test_trace_reports_an_unwritable_output_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one"
    path.write_text(json.dumps(valid_dump()))
    code, output = trace(capsys, path, "--perfetto", tmp_path / "missing" / "trace.json")
    assert (code, "No such file or directory" in output) == (2, True)


# -- the picture


def test_trace_picture_without_matplotlib_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(Unusable, match=r"--png needs matplotlib: pip install 'aiocoll\[trace\]'"):
        picture.draw([], "a.png")


@pytest.fixture(scope="module")
def _first_drawing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Draw one picture in advance: matplotlib keeps the files of its fonts open from then on."""
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("matplotlib")
    (path / "one").write_text(json.dumps(valid_dump()))
    picture.draw(collect([str(path / "one")]), str(path / "one.png"))


@pytest.mark.slow
@pytest.mark.usefixtures("_first_drawing")
@pytest.mark.parametrize("calls", [0, 3, 40])
@pytest.mark.parametrize("hangs", [False, True])
def test_trace_picture_is_drawn_for_any_number_of_calls(
    calls: int, hangs: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    async def rank(pg: ProcessGroup) -> None:
        for number in range(calls):
            await asyncio.sleep(0.001 * pg.rank())
            await pg.allreduce(1.0, key=f"key {number}")
            if pg.rank():
                await pg.recv(np.zeros(1), 0)
            else:
                await pg.send(np.zeros(1), 1)
        if hangs and pg.rank():
            ignore_failure(pg.barrier())
            await asyncio.sleep(1)

    path = tmp_path / "timeline.png"
    code, _ = trace(capsys, *record(2, rank, tmp_path), "--png", path)
    assert code in (0, 1)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[20:24], "big") > (400 if calls == 40 else 200)


@pytest.mark.usefixtures("_first_drawing")
def test_trace_picture_shows_the_verdict_and_marks_the_faulty_rank(tmp_path: Path) -> None:
    """Let rank 0 wait for rank 1 from 1 s to 3 s, end at 5 s, and wait for rank 1 again in the next call."""
    from matplotlib.figure import Figure

    clock = {"host": "h", "monotonic": 9.0, "wall": 9.0}
    first = recorded_call(state="finished", error=None)
    waits = recorded_call(seq=2, entered=6.0, finished=None, state="pending", error=None)
    (tmp_path / "0").write_text(json.dumps(valid_dump(clock=clock, entered=2, entries=[first, waits])))
    late = recorded_call(state="finished", error=None, entered=3.0)
    blocked = [3.0, "/srv/train.py:15 in load"]
    dump = valid_dump(rank=1, clock=clock, entered=1, entries=[late], blocked=blocked)
    (tmp_path / "1").write_text(json.dumps(dump))
    (made,) = picture.make_pictures(collect([str(tmp_path / "0"), str(tmp_path / "1")])[0])
    ax = Figure().subplots()
    made.draw(ax)
    words = [text.get_text() for text in ax.texts]
    assert "g: rank 1 was blocked at train.py:15 in load; rank 0 waited 3 s in BARRIER 2" in words
    assert "blocked at train.py:15 in load" in words
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "BARRIER: transfer",
        "BARRIER: waiting for other ranks",
        "pending at the end",
    ]
    bars = [(each.get_paths()[0].get_extents(), each.get_alpha()) for each in ax.collections]
    spans = [(round(box.x0, 3), round(box.x1, 3), alpha) for box, alpha in bars]
    assert spans[:4] == [(0, 2, picture.PALE), (2, 4, None), (5, 8, picture.PALE), (2, 4, None)]
    assert [label.get_text() for label in ax.get_yticklabels() if label.get_fontweight() == "bold"] == ["rank 1"]
