"""Listeners, which report groups to the viewer `aiocoll top`: contents, permitted users, and request rates."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupOptions, ProcessGroup
from aiocoll.testing import run_ranks, run_virtual
from aiocoll.top import folder as folders
from aiocoll.top import listener, messages
from aiocoll.top.viewer import State, Viewer

from ..internals import comm_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs unix sockets that report the user of a peer")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / ("a long name " * 15) / "top")  # longer than a unix socket address may be


def options(folder: str, **more: Any) -> GroupOptions:
    return GroupOptions(top_dir=folder, **more)


def reported_groups(folder: str) -> list[dict[str, Any]]:
    """Return the groups that this process reports to a viewer, sorted by name and rank."""
    viewer = Viewer(folder, time.monotonic)
    try:
        viewer.request_answers(20)
        (process,) = viewer.processes.values()
        assert (process.number, process.state, process.left_out) == (os.getpid(), State.ANSWERS, 0)
        return sorted(process.groups, key=lambda group: (group["name"], group["rank"]))
    finally:
        viewer.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Any]:
    """Yield a fake group that a listener reports, with a counter of the requests."""

    class Source:
        requests = 0
        report: dict[str, Any] = {"name": "a"}  # noqa: RUF012 - one object

        def to_data(self) -> dict[str, Any]:
            self.requests += 1
            return self.report

    os.chmod(tmp_path, 0o700)
    shown = Source()
    listener.join(shown, str(tmp_path), time.perf_counter)
    yield shown
    listener.leave(shown, str(tmp_path))


def connected(path: Path) -> socket.socket:
    fd = folders.open_folder(str(path))
    try:
        connection = folders.connect(fd, os.getpid())
    finally:
        os.close(fd)
    connection.settimeout(20)
    return connection


def answer(connection: socket.socket, reader: messages.Reader | None = None) -> dict[str, Any]:
    reader = reader or messages.Reader()
    while True:
        data = connection.recv(1 << 16)
        assert data, "the connection has ended"
        for each in reader.feed(data):
            return each


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
async def test_top_listener_reports_all_groups_of_a_process_with_their_call_counts(
    folder: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "FRESH", 0.0)
    reports: list[list[dict[str, Any]]] = []

    async def rank(pg: ProcessGroup) -> None:
        for _ in range(5):
            await pg.allreduce(np.ones(16, np.float32))
        part = await pg.split_group(range(size), group_name="part")
        assert part is not None
        await part.barrier()
        await pg.barrier()
        if pg.rank() == 0:
            reports.append(await asyncio.to_thread(reported_groups, folder))
        await pg.barrier()
        await part.shutdown()
        await pg.barrier()
        if pg.rank() == 0:
            reports.append(await asyncio.to_thread(reported_groups, folder))
        await pg.barrier()

    await run_ranks(size, rank, options=options(folder))
    both, one = reports
    assert [(each["name"], each["rank"], each["size"]) for each in both] == [
        (name, number, size) for name in ("part", "world:0") for number in range(size)
    ]
    assert [each["rank"] for each in one] == list(range(size))
    for each in both[size:]:
        (row,) = (row for row in each["operations"] if row[0] == "ALLREDUCE")
        assert (row[3], row[4], row[5], sum(calls for _, calls in row[7])) == (5, 0, 5 * 64, 5)
        assert (each["state"], each["cause"], each["lost"], each["left"], each["slow"]) == ("open", None, [], [], [])
    assert os.listdir(folder) == []
    assert not [each for each in threading.enumerate() if each.name == "aiocoll top"]


async def test_top_listener_reports_pending_calls_and_missing_ranks(folder: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            while not pg.stats().peers:  # wait until the other ranks are known to wait
                report = await asyncio.to_thread(reported_groups, folder)
                if report[0]["in_flight"] and report[0]["in_flight"][0]["missing"]:
                    break
            assert report[0]["pending"] == report[2]["pending"] == 1
            assert report[1]["pending"] == 0
            (flight,) = report[2]["in_flight"]
            assert flight["op"] == "BARRIER (sequence 1)"
            assert flight["missing"] == [1]
            assert flight["seconds"] >= 0.25
            assert flight["site"].startswith(__file__)
            assert [(row[0], row[3]) for row in report[2]["peers"]] == [(1, 1)]
        await pg.barrier()

    await run_ranks(3, rank, options=options(folder))


async def test_top_listener_reports_no_counts_for_a_group_without_statistics(folder: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == 0:
            (one, _) = await asyncio.to_thread(reported_groups, folder)
            assert (one["counted"], one["operations"], one["peers"]) == (False, [], [])
        await pg.barrier()

    await run_ranks(2, rank, options=options(folder, stats=False))


async def test_top_listener_refuses_a_folder_that_other_users_may_enter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.chmod(tmp_path, 0o750)

    async def rank(pg: ProcessGroup) -> float:
        return await pg.allreduce(1.0)

    with caplog.at_level(logging.WARNING):
        assert await run_ranks(2, rank, options=options(str(tmp_path))) == [2.0, 2.0]
    assert (
        f"cannot show this group: top_dir='{tmp_path}': other users may enter the folder; run `chmod 700` on it"
        in caplog.text
    )
    assert os.listdir(tmp_path) == []
    with pytest.raises(PermissionError, match="chmod 700"):
        Viewer(str(tmp_path), time.monotonic)


def test_top_listener_logs_a_folder_that_cannot_be_created(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()

    async def rank(pg: ProcessGroup) -> float:
        return await pg.allreduce(1.0)

    with caplog.at_level(logging.WARNING):
        assert asyncio.run(run_ranks(1, rank, options=options(str(tmp_path / "file" / "top")))) == [1.0]
    assert "aiocoll top cannot show this group" in caplog.text


def test_virtual_run_starts_no_top_listener(tmp_path: Path) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        assert not (tmp_path / "top").exists()

    run_virtual(2, rank, options=options(str(tmp_path / "top")))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_top_listener_sends_no_answer_to_another_user(source: Any, tmp_path: Path) -> None:
    """Check the folder permissions; then permit access to all users, and check that the listener refuses the user."""
    path = tmp_path / f"{os.getpid()}.sock"
    common = Path(tempfile.gettempdir())
    short = common / f"aiocoll-test-{os.getpid()}"
    os.symlink(tmp_path, short)
    try:
        for above in tmp_path.parents:
            if above != common and above.is_relative_to(common):
                os.chmod(above, 0o711)
        script = (Path(__file__).parent / "socket_client.py").read_text()

        def result_for_other_user() -> str:
            command = [sys.executable, "-c", script, str(short / path.name)]
            return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/").stdout.strip()

        assert result_for_other_user() == "denied"
        os.chmod(tmp_path, 0o711)
        os.chmod(path, 0o777)
        assert result_for_other_user() == "closed"
        assert source.requests == 0
    finally:
        os.chmod(tmp_path, 0o700)
        short.unlink()


def test_top_viewer_that_does_not_read_delays_no_other_viewer(source: Any, tmp_path: Path) -> None:
    """Check also that the listener stores at most one unread answer for this viewer."""
    source.report = {"name": "x" * 200_000}
    with connected(tmp_path) as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            stuck.send(messages.ASK)
        for _ in range(3):
            with connected(tmp_path) as other:
                other.send(messages.ASK)
                assert len(answer(other)["groups"][0]["name"]) == 200_000
        before = source.requests
        assert before <= 4
        reader = messages.Reader()
        assert len(answer(stuck, reader)["groups"][0]["name"]) == 200_000


def test_top_viewer_gets_at_most_four_answers_per_second(source: Any, tmp_path: Path) -> None:
    with connected(tmp_path) as connection:
        began, answers = time.monotonic(), 0
        while answers < 4:
            connection.send(messages.ASK * 10)
            answer(connection)
            answers += 1
        assert time.monotonic() - began >= 3 * listener.REST
    assert source.requests == 4


def test_longest_idle_top_viewer_is_disconnected_if_there_are_too_many(source: Any, tmp_path: Path) -> None:
    viewers = [connected(tmp_path) for _ in range(listener.MOST)]
    try:
        for each in viewers:
            each.send(messages.ASK)
            answer(each)
        with connected(tmp_path) as another:
            another.send(messages.ASK)
            answer(another)
            assert viewers[0].recv(1) == b""
            viewers[1].send(messages.ASK)
            answer(viewers[1])
    finally:
        for each in viewers:
            each.close()


def test_top_listener_answer_counts_the_groups_omitted_for_size() -> None:
    groups = [{"name": str(number), "text": "x" * 50_000} for number in range(9)]
    data = messages.answer(7, [*groups, {"name": "small"}])
    assert len(data) <= messages.MOST + 4
    reader = messages.Reader()
    assert reader.feed(data[:1000]) == []
    (received,) = reader.feed(data[1000:])
    assert (received["process"], received["left_out"]) == (7, 4)
    assert [each["name"] for each in received["groups"]] == ["0", "1", "2", "3", "4", "small"]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1", b"\x01\0\0\0\x01", b"\x01\0\0\0\x80"])
def test_invalid_answer_of_a_top_listener_is_refused(data: bytes) -> None:
    with pytest.raises(messages.ProtocolError):
        messages.Reader().feed(data)


def test_failing_group_report_does_not_stop_other_reports_of_the_top_listener(source: Any, tmp_path: Path) -> None:
    class BrokenSource:
        def to_data(self) -> dict[str, Any]:
            raise KeyError("gone")

    broken = BrokenSource()
    listener.join(broken, str(tmp_path), time.perf_counter)
    with connected(tmp_path) as connection:
        connection.send(messages.ASK)
        assert answer(connection)["groups"] == [{"name": "a"}, {"error": "KeyError: 'gone'"}]
    listener.leave(broken, str(tmp_path))


def test_forked_child_has_its_own_top_listener(source: Any, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # an exception of the child must not run the remaining tests
        try:
            listener.leave(source, str(tmp_path))  # the listener of the parent
            exists = (tmp_path / f"{os.getppid()}.sock").exists()
            listener.join(source, str(tmp_path), time.perf_counter)
            exists = exists and (tmp_path / f"{os.getpid()}.sock").exists()
            listener.leave(source, str(tmp_path))
            os.write(writing, b"well" if exists else b"gone")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"well"
    os.close(reading)
    os.close(writing)
    assert [path.name for path in tmp_path.glob("*.sock")] == [f"{os.getpid()}.sock"]
    with connected(tmp_path) as connection:
        connection.send(messages.ASK)
        assert answer(connection)["process"] == os.getpid()


async def test_top_listener_reports_a_blocked_loop(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def rank(pg: ProcessGroup) -> None:
        comm = comm_of(pg)
        monkeypatch.setattr(comm.endpoint.failure_detector, "blocked", lambda: (2.5, "here.py:7 in slow"))
        (report,) = await asyncio.to_thread(reported_groups, folder)
        assert report["blocked"] == [2.5, "here.py:7 in slow"]

    await run_ranks(1, rank, options=options(folder))
