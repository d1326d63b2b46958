"""`aiocoll top` on jobs of `aiocoll run`: states of ranks, choice of a job, the web page, and docs/top.md."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from aiocoll.cli.top.command import Watch
from aiocoll.cli.top.jobs import JobOutcome, job_folder, jobs
from aiocoll.cli.top.model import GroupView
from aiocoll.cli.top.web import MOST, Page
from aiocoll.process import ProcessId

from ..browser import MISSING, SCHEMES, WIDTHS, browser, executable
from ..browser import Page as BrowserPage
from ..pages import code, is_shown, shell

if TYPE_CHECKING:
    from tests.cli.conftest import Job, Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SO_PEERCRED of unix sockets")

#: Ranks call allreduces until the file "end" exists. Files named "block-RANK" and "late-RANK" make a rank block or
#: wait.
SCRIPT = """
import asyncio, os, sys, time
import numpy as np
import aiocoll

async def main():
    async with aiocoll.new_group() as pg:
        x, me = np.ones(256, np.float32), pg.rank()
        print("ready", os.getpid(), flush=True)
        try:
            while not await pg.allreduce(int(me == 0 and os.path.exists("end"))):
                x[:] = 1
                await pg.allreduce(x)
                if os.path.exists(f"block-{me}"):
                    time.sleep(600)
                if os.path.exists(f"late-{me}"):
                    await asyncio.sleep(600)
        except aiocoll.PeerLostError:
            await asyncio.sleep(600)
    if os.path.exists("stay"):
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Return an environment in which `aiocoll top` finds only the jobs of this test."""
    (tmp_path / "runtime").mkdir(mode=0o700)
    return {"XDG_RUNTIME_DIR": str(tmp_path / "runtime")}


@pytest.fixture
def running_job(launch: Launch, env: Mapping[str, str]) -> tuple[Job, dict[int, int]]:
    """Start a job of four ranks; return it and their processes by rank."""
    job = launch("-n", 4, script=SCRIPT, env=env)
    found: dict[int, int] = {}
    while len(found) < 4:
        line = job.process.stdout.readline()
        assert line, job.process.stderr.read()
        if match := re.fullmatch(r"\[(\d)\] ready (\d+)\n", line):
            found[int(match[1])] = int(match[2])
    return job, found


@pytest.fixture
def watch(running_job: tuple[Job, dict[int, int]], env: Mapping[str, str]) -> Iterator[Watch]:
    (job,) = jobs(env)
    assert (job.number, job.ranks) == (running_job[0].process.pid, 4)
    watch = Watch(job.folder)
    yield watch
    watch.close()


def group_when(watch: Watch, condition: Callable[[GroupView], bool]) -> GroupView:
    """Wait until `condition` holds for the first group that `watch` shows; return the group."""
    return read_until(watch.sample, lambda groups: groups and condition(groups[0]))[0]


def read_until(read: Callable[[], Any], accept: Callable[[Any], Any]) -> Any:
    """Call `read` until `accept` holds for its result; return this result."""
    end = time.monotonic() + 30
    while not accept(found := read()):
        assert time.monotonic() < end, found
        time.sleep(0.2)
    return found


def states(group: GroupView) -> dict[int, str]:
    return {each.rank: each.state for each in group.ranks}


def top(folder: Path, env: Mapping[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiocoll", "top", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_top_shows_running_ranks_as_ok_like_the_documentation(
    running_job: tuple[Job, dict[int, int]], watch: Watch, env: Mapping[str, str], launch: Launch
) -> None:
    job, pids = running_job
    group = group_when(watch, lambda group: (group.ops or 0) > 0)
    assert states(group) == dict.fromkeys(range(4), "ok")
    assert {each.rank: each.process for each in group.ranks} == pids
    done = top(launch.path, env, "--once", "--json", str(job.process.pid))
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["groups"]
    assert (found["name"], found["size"], found["state"]) == ("world:0", 4, "open")
    assert all(rank["ops"] > 10 and rank["nbytes"] > rank["ops"] for rank in found["ranks"])
    shown = shell(code("docs/top.md", "Watching a job: `aiocoll top`", language="sh"), launch.path, **env, COLUMNS="80")
    head = code("docs/top.md", "Watching a job: `aiocoll top`", language="text").splitlines()
    for line in (head[1], head[2], head[8]):
        assert is_shown(line.replace("MiB", "…"), shown) or line in shown, shown
    shell(code("docs/top.md", "For programs", language="sh"), launch.path, **env)
    program = code("docs/top.md", "For programs")
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=launch.path, capture_output=True, text=True, timeout=60
    )
    assert re.fullmatch(r"world:0: rank \d \w+, missing in \d\n", printed.stdout), printed.stderr
    lines = subprocess.Popen(
        [sys.executable, "-m", "aiocoll", "top", "--json"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **env},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert lines.stdout is not None
    assert not json.loads(lines.stdout.readline())["over"]
    (launch.path / "end").touch()
    assert job.finish().returncode == 0
    found = [json.loads(line)["over"] for line in lines.communicate(timeout=60)[0].splitlines()]
    assert found == [False] * (len(found) - 1) + [True]
    assert lines.returncode == 0
    assert list(Path(env["XDG_RUNTIME_DIR"], "aiocoll-top").iterdir()) == []


def test_top_names_a_blocked_rank_with_its_line(
    running_job: tuple[Job, dict[int, int]], watch: Watch, env: Mapping[str, str], launch: Launch
) -> None:
    (launch.path / "block-2").touch()
    group = group_when(watch, lambda group: states(group)[2] == "blocked" and group.ranks[0].missing > 0)
    first = group.ranks[0]
    assert first.rank == 2
    assert re.fullmatch(r"its event loop has been blocked for .* s, at .*script\.py:15 in main.*", first.detail)
    assert first.waited_for is not None
    assert first.waited_for > 0.5
    (pending, *_) = group.pending
    assert (pending.ranks, pending.missing) == ((0, 1, 3), (2,))
    text = top(launch.path, env, "--once").stdout
    assert "rank 2 blocked: its event loop has been blocked" in text


@pytest.mark.slow
def test_top_shows_a_rank_that_has_not_entered_a_call_as_late(running_job: Any, watch: Watch, launch: Launch) -> None:
    (launch.path / "late-1").touch()
    group = group_when(watch, lambda group: states(group)[1] == "late")
    assert (group.ranks[0].rank, group.ranks[0].missing, states(group)[0]) == (1, 1, "ok")


@pytest.mark.slow
def test_top_shows_a_stopped_rank_as_ok_after_it_continues(
    running_job: tuple[Job, dict[int, int]], watch: Watch, env: Mapping[str, str]
) -> None:
    """Use a viewer that the rank has answered before, and a new viewer."""
    _, pids = running_job
    group_when(watch, lambda group: states(group)[3] == "ok")
    os.kill(pids[3], signal.SIGSTOP)
    try:
        group = group_when(watch, lambda group: states(group)[3] == "stopped")
        assert f"process {pids[3]} is stopped" in group.ranks[0].detail
        later = Watch(jobs(env)[0].folder)
        (group,) = later.sample()
        later.close()
        assert (states(group)[3], group.ranks[0].process) == ("stopped", pids[3])
    finally:
        os.kill(pids[3], signal.SIGCONT)
    group_when(watch, lambda group: states(group)[3] == "ok")


@pytest.mark.slow
def test_top_shows_a_killed_rank_as_gone_and_keeps_the_outcome_of_the_job(
    running_job: tuple[Job, dict[int, int]], watch: Watch
) -> None:
    job, pids = running_job
    group_when(watch, lambda group: (group.ops or 0) > 0)
    os.kill(pids[1], signal.SIGKILL)
    group = group_when(watch, lambda group: states(group)[1] in ("gone", "lost") and group.state == "revoked")
    assert group.ranks[0].rank == 1
    assert "rank 1" in (group.cause or "")
    assert job.finish().returncode == 128 + signal.SIGKILL
    news = watch.news()
    assert news["over"]
    assert news["end"]["code"] == 128 + signal.SIGKILL
    assert news["end"]["lines"][0] == "rank 1 was killed by SIGKILL"
    assert [each["name"] for each in news["groups"]] == ["world:0"], "the last state is lost"
    assert watch.sample() == watch.last


@pytest.mark.slow
def test_top_keeps_the_last_state_while_no_rank_has_an_open_group(
    running_job: tuple[Job, dict[int, int]], watch: Watch, launch: Launch
) -> None:
    group_when(watch, lambda group: (group.ops or 0) > 0)
    assert watch.news()["last"] == []
    close_groups(launch)
    news = read_until(watch.news, lambda news: not news["groups"])
    assert (news["over"], [each["name"] for each in news["last"]]) == (False, ["world:0"])


def close_groups(launch: Launch) -> None:
    """Let the ranks of `SCRIPT` close their groups, and go on."""
    (launch.path / "stay").touch()
    (launch.path / "end").touch()


def test_top_shows_the_outcome_of_a_job_after_the_removal_of_its_folder(env: Mapping[str, str]) -> None:
    end = JobOutcome(3, ("rank 1 exited with code 3",))
    with job_folder(env, ["a.py"], 3) as (folder, record_end):
        watch = Watch(folder)
        assert (watch.over, watch.end, watch.sample()) == (False, None, [])
        record_end(end)
        assert [job.folder for job in jobs(env)] == [folder]
        assert watch.end is None
    assert not os.path.exists(folder)
    assert (watch.over, watch.end) == (True, end)
    watch.close()


@pytest.mark.slow
def test_top_requires_a_job_number_if_several_jobs_run(launch: Launch, env: Mapping[str, str], tmp_path: Path) -> None:
    nothing = top(tmp_path, env, "--once")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr.startswith("aiocoll top: `aiocoll run` has started no running job of this user on this host")
    script = "import os, sys\nprint('ready', flush=True)\nos.read(os.open(sys.argv[1], os.O_RDWR), 1)\n"
    os.mkfifo(tmp_path / "fifo")
    both = [launch("-n", 1, script=script, args=[tmp_path / "fifo"], env=env) for _ in range(2)]
    for job in both:
        job.read("[0] ready")
    several = top(tmp_path, env, "--once")
    assert several.returncode == 2
    assert "several jobs run here; pass the number of one job as the argument JOB. The jobs are:" in several.stderr
    first, second = (job.process.pid for job in both)
    assert all(f"\n  {number}  1 ranks  " in several.stderr for number in (first, second))
    one = top(tmp_path, env, "--once", str(first))
    assert (one.returncode, one.stdout) == (0, "no rank has an open group\n")
    assert "no job 1 of this user runs here; these jobs run:" in top(tmp_path, env, "--once", "1").stderr
    assert "use --once for text" in top(tmp_path, env, str(first)).stderr
    both[0].process.kill()  # a killed launcher removes nothing; the next launcher removes its folder
    both[0].process.wait()
    assert [job.number for job in jobs(env)] == [second]
    with job_folder(env, ["a.py"], 3) as (folder, _):
        found = jobs(env)
        assert sorted(os.listdir(os.path.dirname(folder))) == sorted(os.path.basename(job.folder) for job in found)
        assert [(job.number, job.ranks, job.command) for job in found][1:] == [(os.getpid(), 3, "a.py")]


def test_top_distinguishes_launchers_with_equal_pids_in_several_containers(
    env: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use pid 1 twice, as in two pods that share /tmp."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr("aiocoll.cli.top.jobs.this_process", lambda: ProcessId(1, 1, 1))
    with job_folder(env, ["a.py"], 3) as (first, _):
        with job_folder(env, ["b.py"], 2) as (second, _):
            assert [(job.number, job.folder, job.command) for job in jobs(env)] == [
                (1, first, "a.py"),
                (1, second, "b.py"),
            ]
            several = top(tmp_path, env, "--once", "1")
            assert several.returncode == 2
            assert f"jobs in several containers have number 1; pass the folder of a job as JOB:\n  {first}  a.py\n" in (
                several.stderr
            )
            assert top(tmp_path, env, "--once", second).stdout == "no rank has an open group\n"
        assert [job.folder for job in jobs(env)] == [first]
    assert jobs(env) == []


def test_launcher_in_another_container_counts_as_ended_if_its_lock_is_free(
    env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiocoll.cli.top.jobs.this_process", lambda: ProcessId(1, 1, 1))
    with job_folder(env, ["a.py"], 3) as (folder, _):
        about = os.path.join(folder, "job.json")
        assert [job.folder for job in jobs(env)] == [folder]
        with open(about, "r+b") as file:  # the lock of the new file is free, as after the end of a process
            content = file.read()
        os.unlink(about)
        with open(about, "wb") as file:
            file.write(content)
        assert jobs(env) == []


def test_launcher_on_a_file_system_without_locks_counts_as_running(
    env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a file system without locks, on which a launcher in another container cannot be observed."""
    monkeypatch.setattr("aiocoll.cli.top.jobs.this_process", lambda: ProcessId(1, 1, 1))
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with job_folder(env, ["a.py"], 3) as (folder, _), job_folder(env, ["b.py"], 3) as (other, _):
        assert [job.folder for job in jobs(env)] == [folder, other]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EIO])
def test_folder_of_an_unobservable_launcher_is_not_removed(
    env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with job_folder(env, ["a.py"], 3) as (folder, _):
        failing = mock.Mock(side_effect=OSError(number, os.strerror(number)))
        monkeypatch.setattr("aiocoll.process.open", failing, raising=False)
        with job_folder(env, ["b.py"], 3):
            assert failing.called
            assert os.path.exists(folder)
        assert [job.folder for job in jobs(env)] == [folder]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--once", "--web"], "argument --once: not allowed with argument --web"),
        (["--json", "--web"], "argument --web: not allowed with argument --json"),
        (["./nowhere"], "aiocoll top: ./nowhere: No such file or directory\n"),
        (["/"], "aiocoll top: /: other users may enter the folder; run `chmod 700` on it"),
    ],
)
def test_top_refuses_invalid_arguments(tmp_path: Path, env: Mapping[str, str], args: list[str], error: str) -> None:
    done = top(tmp_path, env, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert error in done.stderr


def test_top_without_rich_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "aiocoll.cli.top.terminal", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'aiocoll\[top\]', or use --once, --json or --web"):
        import aiocoll.cli.top.terminal  # noqa: F401


# -- the web page


async def response_to(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the response to a request."""
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


def request(port: int, path: str, *headers: str, host: str | None = None, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host or f'127.0.0.1:{port}'}", *headers, "", ""]
    return "\r\n".join(lines).encode()


async def test_top_web_page_refuses_requests_without_the_token_or_for_another_host_name() -> None:
    samples = []
    page = Page("</script>job", lambda: samples.append(1) or {"groups": []})
    server = await page.listen()
    port, token = page.port, page.token
    assert server.sockets[0].getsockname()[0] == "127.0.0.1"
    async with server:
        wrong = [token[:-1], token + "a", "", "ÿ", token.swapcase()]
        for each in wrong:
            assert (await response_to(port, request(port, f"/?token={each}")))[0] == 403
            assert (await response_to(port, request(port, "/news", f"Authorization: Bearer {each}")))[0] == 403
        assert (await response_to(port, request(port, "/")))[0] == 403
        assert (await response_to(port, request(port, f"/news?token={token}")))[0] == 403, (
            "the token in the URL is accepted for news"
        )
        for host in ("localhost", f"localhost:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"evil.example:{port}"):
            assert (await response_to(port, request(port, f"/?token={token}", host=host)))[0] == 403
            assert (await response_to(port, request(port, "/news", f"Authorization: Bearer {token}", host=host)))[
                0
            ] == 403
        two = request(port, f"/?token={token}", "Host: evil.example")
        assert (await response_to(port, two))[0] == 400
        assert (await response_to(port, request(port, f"/?token={token}", method="POST")))[0] == 405
        assert (await response_to(port, b"hello\r\n\r\n"))[0] == 400
        assert (await response_to(port, request(port, "/", f"X: {'x' * 20_000}")))[0] == 431
        assert (await response_to(port, request(port, f"/other?token={token}")))[0] == 404
        assert samples == []
        status, headers, body = await response_to(port, request(port, f"/?token={token}"))
        assert status == 200
        policy = headers["content-security-policy"]
        nonce = re.search(r"script-src 'nonce-([\w-]+)'", policy)
        assert nonce is not None
        assert policy.startswith("default-src 'none'; ")
        assert body.lower().count(f'nonce="{nonce[1]}"'.encode()) == 2
        assert body.count(b"</script>") == 1
        assert not re.search(rb"https?://|src=|href=", body), "the page loads another resource"
        assert (headers["cache-control"], headers["x-frame-options"]) == ("no-store", "deny")
        status, headers, body = await response_to(port, request(port, "/news", f"Authorization: Bearer {token}"))
        assert (status, headers["content-type"], json.loads(body)["groups"]) == (200, "application/json", [])
        await response_to(port, request(port, "/news", f"Authorization: Bearer {token}"))
        assert samples == [1], "two requests within a second took two samples"


async def test_top_web_page_limits_its_open_connections() -> None:
    page = Page("job", dict)
    async with await page.listen():
        open_ones = [await asyncio.open_connection("127.0.0.1", page.port) for _ in range(MOST)]
        for _, writer in open_ones:
            writer.write(b"GET / ")
        reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
        assert await reader.read() == b""
        for _, each in [*open_ones, (reader, writer)]:
            each.close()
            await each.wait_closed()


@pytest.mark.skipif(executable() is None, reason=MISSING)
def test_top_web_page_in_a_browser_shows_and_updates_the_ranks(
    running_job: tuple[Job, dict[int, int]], env: Mapping[str, str], launch: Launch, tmp_path: Path
) -> None:
    """Check two window widths: the page shows and updates the ranks, loads nothing else, and fits the window."""
    with serve_page(env) as address, browser(tmp_path / "browser") as opened:
        for scheme, width in zip(SCHEMES, WIDTHS.values(), strict=True):
            with opened.page(width, scheme) as page:
                check_page(page, address, width)
                if scheme == "dark":
                    check_late_rank(page, launch)
                if folder := os.environ.get("PICTURES"):
                    page.save_picture(Path(folder) / f"top-{width}-{scheme}.png")


@pytest.mark.slow
@pytest.mark.skipif(executable() is None, reason=MISSING)
def test_top_web_page_in_a_browser_keeps_the_last_state_and_shows_the_outcome(
    running_job: tuple[Job, dict[int, int]], env: Mapping[str, str], launch: Launch, tmp_path: Path
) -> None:
    job, pids = running_job
    with serve_page(env) as address, browser(tmp_path / "browser") as opened, opened.page(1280, "light") as page:
        page.open(address)
        page.until("document.querySelector('.facts')?.innerText.includes('ops/s')")
        close_groups(launch)
        page.until("document.querySelector('#groups p').innerText.startsWith('No rank')")
        assert page.texts("#groups > p") == ["No rank has an open group. Last state:"]
        assert page.texts("#groups.ended h2") == ["world:0"]
        os.kill(pids[1], signal.SIGKILL)
        assert job.finish().returncode == 128 + signal.SIGKILL
        page.until("document.querySelector('#end p')")
        assert page.texts("#end p") == ["rank 1 was killed by SIGKILL", "The job has ended with exit code 137."]
        assert page.texts("#groups.ended h2") == ["world:0"]
        assert page.console_messages() == []


@contextmanager
def serve_page(env: Mapping[str, str]) -> Iterator[str]:
    """Run `aiocoll top --web`; return the address of its page."""
    command = [sys.executable, "-m", "aiocoll", "top", "--web"]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    served = subprocess.Popen(command, env={**os.environ, **path, **env}, stdout=subprocess.PIPE, text=True)
    assert served.stdout is not None
    try:
        yield served.stdout.readline().strip()
    finally:
        served.send_signal(signal.SIGINT)
        assert served.wait(20) == 0
        served.stdout.close()


def check_page(page: BrowserPage, address: str, width: int) -> None:
    page.open(address)
    page.until("document.querySelector('.facts')?.innerText.includes('ops/s')")
    assert sorted(page.texts("section:first-child .scroll:nth-of-type(1) tbody td:first-child")) == ["0", "1", "2", "3"]
    (first,) = page.texts("#state")
    page.until(f"document.querySelector('#state').innerText != {first!r}")
    assert page.eval("document.documentElement.scrollWidth") == width
    assert page.hidden_elements() == []
    assert ("process" in page.texts("th")) == (width > 640)
    assert page.console_messages() == []
    origin = address.partition("?")[0]
    assert set(page.loaded_urls()) == {address, f"{origin}news"}


def check_late_rank(page: BrowserPage, launch: Launch) -> None:
    (launch.path / "late-1").touch()
    page.until("document.querySelector('span.late')")
    page.until("document.querySelector('li')?.innerText.includes('rank 1 missing')")
    assert page.texts("tbody tr:first-child td:first-child")[0] == "1"
