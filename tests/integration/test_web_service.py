"""The service of docs/web-service.md, on workers of a small server, and of uvicorn if it is installed."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LIMIT, ROOT, Ranks
from tests.pages import code, commands, files, write

PAGE = "docs/web-service.md"
SERVER = str(Path(__file__).with_name("asgi_server.py"))
APP, MEASURED = "service:app", "measured:app"
WORKERS = 3


def ask(port: int, method: str, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body) if path != "/metrics" else body.decode()


def total(port: int) -> int:
    status, body = ask(port, "GET", "/total")
    assert status == 200
    return int(body["total"])


def until(condition: Callable[[], bool]) -> None:
    """Ask again until the answer is the one that a later round brings."""
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    write(files(PAGE), tmp_path)
    (tmp_path / "store").mkdir(mode=0o700)
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {"STORE": str(tmp_path / "store" / "file"), "WORKERS": str(WORKERS), "PYTHONPATH": path}


@pytest.mark.slow
def test_workers_can_be_killed_replaced_and_stopped(ranks: Ranks, environ: dict[str, str]) -> None:
    def serve() -> int:
        processes.append(ranks.start(SERVER, APP, env=environ))
        return int(processes[-1].stdout.readline())

    processes: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(WORKERS)]
    ports = [int(process.stdout.readline()) for process in processes]
    sent = 0

    def count(place: int) -> None:
        nonlocal sent
        assert ask(ports[place], "POST", "/count") == (200, {})
        sent += 1

    def all_know(ranks: int, *places: int) -> None:
        """Wait until the workers at `places` know all that was sent, as so many ranks."""
        for place in places:
            health = {"worker": processes[place].pid, "ranks": ranks}
            until(lambda here=ports[place], health=health: ask(here, "GET", "/ready") == (200, health))
            until(lambda here=ports[place]: total(here) == sent)

    for place in (0, 1, 1, 2):
        count(place)
    all_know(3, 0, 1, 2)
    assert ask(ports[0], "GET", "/nothing") == (404, {})

    processes[0].kill()  # with the rank that looks for newcomers, perhaps
    all_know(2, 1, 2)
    count(2)
    all_know(2, 1, 2)

    ports.append(serve())
    all_know(3, 1, 2, 3)
    count(3)
    all_know(3, 1, 2, 3)

    count(1)
    processes[1].send_signal(signal.SIGTERM)
    all_know(2, 2, 3)
    for process in processes[2:]:
        process.send_signal(signal.SIGTERM)
    for process in processes[1:]:
        assert process.communicate(timeout=LIMIT) == ("", "")
        assert process.returncode == 0


@pytest.mark.slow
def test_service_survives_two_consecutive_deaths(ranks: Ranks, environ: dict[str, str]) -> None:
    """The second while the others are finding out about the first, or soon after."""
    processes: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(WORKERS)]
    ports = [int(process.stdout.readline()) for process in processes]
    ask(ports[2], "POST", "/count")
    until(lambda: total(ports[2]) == 1)
    for process in processes[:2]:
        process.kill()
    until(lambda: ask(ports[2], "GET", "/ready")[1]["ranks"] == 1)
    newcomers: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(2)]
    ports += [int(process.stdout.readline()) for process in newcomers]
    until(lambda: all(ask(port, "GET", "/ready")[1]["ranks"] == 3 for port in ports[2:]))
    until(lambda: all(total(port) == 1 for port in ports[2:]))


@pytest.mark.slow
def test_scrape_has_the_metrics_of_all_workers(ranks: Ranks, environ: dict[str, str], tmp_path: Path) -> None:
    """After one was killed and replaced, its counters are still part of those, and its gauges are not."""
    directory = tmp_path / "metrics"
    directory.mkdir()
    environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)

    def serve() -> None:
        processes.append(ranks.start(SERVER, MEASURED, env=environ))

    def port_of(place: int) -> int:
        return int(processes[place].stdout.readline())

    def written() -> set[int]:
        """Return the processes with all their files. A scrape fails at a file that was just created."""
        kinds = [
            {int(path.stem.rpartition("_")[2]) for path in directory.glob(f"{kind}_*.db") if path.stat().st_size}
            for kind in ("counter", "gauge", "histogram")
        ]
        return set.intersection(*kinds)

    def shown(port: int, metric: str) -> dict[str, float]:
        """Return the sum of the samples of a metric by rank, from one scrape."""
        status, text = ask(port, "GET", "/metrics")
        assert status == 200
        found: dict[str, float] = {}
        for rank, value in re.findall(rf'^{metric}{{.*?group="world:0".*?rank="(.)".*?}} (.+)$', text, re.MULTILINE):
            found[rank] = found.get(rank, 0) + float(value)
        return found

    processes: list[Any] = []
    for _ in range(WORKERS):
        serve()
    ports = [port_of(place) for place in range(WORKERS)]
    until(lambda: written() == {process.pid for process in processes})
    for port in ports:
        until(lambda port=port: shown(port, "aiocoll_operations_total").keys() == {"0", "1", "2"})
    before = shown(ports[1], "aiocoll_operations_total")
    assert re.search(r"^service_total_age_seconds \d", ask(ports[1], "GET", "/metrics")[1], re.MULTILINE)

    processes[0].kill()
    processes[0].wait()
    serve()
    ports[0] = port_of(WORKERS)
    until(lambda: written() == {process.pid for process in processes[1:]})
    for port in ports:
        assert shown(port, "aiocoll_pending_operations").keys() == {"0", "1", "2"}
        after = shown(port, "aiocoll_operations_total")
        assert all(after[rank] >= before[rank] for rank in before)
    for process in processes[1:]:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=LIMIT) == ("", "")
        assert process.returncode == 0


@pytest.mark.slow
def test_workers_remain_ready_while_another_one_is_stopped(ranks: Ranks, environ: dict[str, str]) -> None:
    processes: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(WORKERS)]
    ports = [int(process.stdout.readline()) for process in processes]
    processes[0].send_signal(signal.SIGSTOP)
    until(lambda: all(ask(port, "GET", "/total")[1]["age"] > 1 for port in ports[1:]))
    for process, port in zip(processes[1:], ports[1:], strict=True):
        assert ask(port, "GET", "/live") == (200, {"worker": process.pid})
        assert ask(port, "GET", "/ready")[0] == 200
    processes[0].send_signal(signal.SIGCONT)
    until(lambda: all(ask(port, "GET", "/total")[1]["age"] < 1 for port in ports[1:]))
    assert ask(ports[1], "POST", "/count") == (200, {})
    until(lambda: total(ports[2]) == 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_server_has_an_exit_code_of_its_own(ranks: Ranks, environ: dict[str, str], number: int) -> None:
    environ["WORKERS"] = "1"
    script = "import os, sys; os.setpgid(0, 0); sys.argv = sys.argv[1:]; exec(open(sys.argv[0]).read())"
    command = ("-c", script, str(serve(environ)), "tests.integration.asgi_server", APP)
    process: Any = ranks.start(*command, env=environ)
    port = int(process.stdout.readline())
    assert ask(port, "GET", "/ready")[0] == 200
    if number == signal.SIGINT:  # as a terminal does: to all processes
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == (0 if number == signal.SIGTERM else 130)


@pytest.mark.parametrize(("arguments", "code"), [(("this",), 75), (("tests.integration.asgi_server", "none:app"), 1)])
def test_server_that_ends_by_itself_has_an_exit_code(
    ranks: Ranks, environ: dict[str, str], arguments: tuple[str, ...], code: int
) -> None:
    """`python -m this` ends with 0; the server of the second command does not find its module."""
    process: Any = ranks.start(str(serve(environ)), *arguments, env=environ)
    process.communicate(timeout=LIMIT)
    assert process.returncode == code


def test_killed_server_has_an_exit_code(ranks: Ranks, environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    process: Any = ranks.start(str(serve(environ)), "killed", env=environ)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGKILL


def serve(environ: dict[str, str]) -> Path:
    """Return the path of serve.py, which makes a store of its own."""
    return Path(environ.pop("STORE")).parent.parent / "serve.py"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_unit_file_is_valid(tmp_path: Path) -> None:
    unit = code(PAGE, "systemd and Kubernetes", language="ini")
    unit = unit.replace("/srv/service/venv/bin/python", sys.executable).replace("/srv/service", str(tmp_path))
    path = tmp_path / "service.service"
    path.write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "service.service" in line]) == (0, [])


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
def test_uvicorn_replaces_workers(ranks: Ranks, environ: dict[str, str], port: int) -> None:
    server = start_uvicorn(ranks, environ, port)

    def readiness() -> dict[str, Any]:
        try:
            return ask(port, "GET", "/ready")[1]
        except (ConnectionError, http.client.HTTPException):  # it has not begun, or the worker was just killed
            return {"ranks": 0, "worker": 0}

    until(lambda: readiness()["ranks"] == WORKERS)
    for _ in range(10):
        assert ask(port, "POST", "/count") == (200, {})
    until(lambda: total(port) == 10)
    worker = readiness()["worker"]
    os.kill(worker, signal.SIGKILL)
    until(lambda: readiness()["ranks"] == WORKERS - 1)
    until(lambda: readiness()["ranks"] == WORKERS)
    assert total(port) == 10
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=LIMIT)
    assert server.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
@pytest.mark.parametrize("death", ["os._exit(1)", "os.kill(os.getpid(), 9)", "raise RuntimeError"])
def test_service_fails_if_a_worker_of_uvicorn_dies_while_it_starts(
    ranks: Ranks, environ: dict[str, str], port: int, tmp_path: Path, death: str
) -> None:
    """The second worker dies at its first call, and its successor joins no group. The time to give up is 30 s."""
    program = tmp_path / "totals.py"
    place = "        if rank < WORKERS:\n"
    text = program.read_text().replace("timeout=30", "timeout=5")
    program.write_text(text.replace(place, f"        if rank == 1:\n            {death}\n{place}"))
    server = start_uvicorn(ranks, environ, port)
    server.communicate(timeout=LIMIT)
    assert server.returncode == 75


def start_uvicorn(ranks: Ranks, environ: dict[str, str], port: int) -> Any:
    """Start the service as the page says."""
    arguments = re.search(r"python serve.py (.*)", commands(PAGE)[0])
    assert arguments is not None
    quiet = ("--port", str(port), "--log-level", "critical")
    # Warnings of uvicorn and its dependencies are not tested here.
    return ranks.start(str(serve(environ)), *arguments[1].split(), *quiet, env=environ | {"PYTHONWARNINGS": ""})
