"""The service of docs/web-service.md, run by workers of a minimal web server and of uvicorn (if installed)."""

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


def fetch(port: int, method: str, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT)
    connection.request(method, path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, json.loads(body) if path != "/metrics" else body.decode()


def total(port: int) -> int:
    status, body = fetch(port, "GET", "/total")
    assert status == 200
    return int(body["total"])


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until `condition` is true, for instance until a later round of the service has counted a request."""
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
def test_web_service_workers_can_be_killed_replaced_and_stopped(ranks: Ranks, environ: dict[str, str]) -> None:
    def serve() -> int:
        processes.append(ranks.start(SERVER, APP, env=environ))
        return int(processes[-1].stdout.readline())

    processes: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(WORKERS)]
    ports = [int(process.stdout.readline()) for process in processes]
    sent = 0

    def count(place: int) -> None:
        nonlocal sent
        assert fetch(ports[place], "POST", "/count") == (200, {})
        sent += 1

    def wait_for_counts(ranks: int, *places: int) -> None:
        """Wait until the workers with the indexes `places` know all counts and are in a group of `ranks` ranks."""
        for place in places:
            health = {"worker": processes[place].pid, "ranks": ranks}
            wait_until(lambda port=ports[place], health=health: fetch(port, "GET", "/ready") == (200, health))
            wait_until(lambda port=ports[place]: total(port) == sent)

    for place in (0, 1, 1, 2):
        count(place)
    wait_for_counts(3, 0, 1, 2)
    assert fetch(ports[0], "GET", "/nothing") == (404, {})

    processes[0].kill()  # the killed process may be rank 0, which finds newcomers
    wait_for_counts(2, 1, 2)
    count(2)
    wait_for_counts(2, 1, 2)

    ports.append(serve())
    wait_for_counts(3, 1, 2, 3)
    count(3)
    wait_for_counts(3, 1, 2, 3)

    count(1)
    processes[1].send_signal(signal.SIGTERM)
    wait_for_counts(2, 2, 3)
    for process in processes[2:]:
        process.send_signal(signal.SIGTERM)
    for process in processes[1:]:
        assert process.communicate(timeout=LIMIT) == ("", "")
        assert process.returncode == 0


@pytest.mark.slow
def test_web_service_survives_two_consecutive_deaths_of_workers(ranks: Ranks, environ: dict[str, str]) -> None:
    """Kill a second worker right after the first, while the other workers detect the first death or soon after."""
    processes: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(WORKERS)]
    ports = [int(process.stdout.readline()) for process in processes]
    fetch(ports[2], "POST", "/count")
    wait_until(lambda: total(ports[2]) == 1)
    for process in processes[:2]:
        process.kill()
    wait_until(lambda: fetch(ports[2], "GET", "/ready")[1]["ranks"] == 1)
    newcomers: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(2)]
    ports += [int(process.stdout.readline()) for process in newcomers]
    wait_until(lambda: all(fetch(port, "GET", "/ready")[1]["ranks"] == 3 for port in ports[2:]))
    wait_until(lambda: all(total(port) == 1 for port in ports[2:]))


@pytest.mark.slow
def test_metrics_scrape_contains_the_metrics_of_all_web_service_workers(
    ranks: Ranks, environ: dict[str, str], tmp_path: Path
) -> None:
    """Kill and replace a worker: its counters remain in the scrape, but its gauges do not."""
    directory = tmp_path / "metrics"
    directory.mkdir()
    environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)

    def serve() -> None:
        processes.append(ranks.start(SERVER, MEASURED, env=environ))

    def port_of(place: int) -> int:
        return int(processes[place].stdout.readline())

    def processes_with_metrics() -> set[int]:
        """Return the ids of the processes with complete metric files; a scrape would fail at an empty file."""
        kinds = [
            {int(path.stem.rpartition("_")[2]) for path in directory.glob(f"{kind}_*.db") if path.stat().st_size}
            for kind in ("counter", "gauge", "histogram")
        ]
        return set.intersection(*kinds)

    def sums_by_rank(port: int, metric: str) -> dict[str, float]:
        """Return the samples of a metric in one scrape, summed by rank."""
        status, text = fetch(port, "GET", "/metrics")
        assert status == 200
        found: dict[str, float] = {}
        for rank, value in re.findall(rf'^{metric}{{.*?group="world:0".*?rank="(.)".*?}} (.+)$', text, re.MULTILINE):
            found[rank] = found.get(rank, 0) + float(value)
        return found

    processes: list[Any] = []
    for _ in range(WORKERS):
        serve()
    ports = [port_of(place) for place in range(WORKERS)]
    wait_until(lambda: processes_with_metrics() == {process.pid for process in processes})
    for port in ports:
        wait_until(lambda port=port: sums_by_rank(port, "aiocoll_operations_total").keys() == {"0", "1", "2"})
    before = sums_by_rank(ports[1], "aiocoll_operations_total")
    assert re.search(r"^service_total_age_seconds \d", fetch(ports[1], "GET", "/metrics")[1], re.MULTILINE)

    processes[0].kill()
    processes[0].wait()
    serve()
    ports[0] = port_of(WORKERS)
    wait_until(lambda: processes_with_metrics() == {process.pid for process in processes[1:]})
    for port in ports:
        assert sums_by_rank(port, "aiocoll_pending_operations").keys() == {"0", "1", "2"}
        after = sums_by_rank(port, "aiocoll_operations_total")
        assert all(after[rank] >= before[rank] for rank in before)
    for process in processes[1:]:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=LIMIT) == ("", "")
        assert process.returncode == 0


@pytest.mark.slow
def test_web_service_workers_remain_ready_while_another_worker_is_stopped(
    ranks: Ranks, environ: dict[str, str]
) -> None:
    processes: list[Any] = [ranks.start(SERVER, APP, env=environ) for _ in range(WORKERS)]
    ports = [int(process.stdout.readline()) for process in processes]
    processes[0].send_signal(signal.SIGSTOP)
    wait_until(lambda: all(fetch(port, "GET", "/total")[1]["age"] > 1 for port in ports[1:]))
    for process, port in zip(processes[1:], ports[1:], strict=True):
        assert fetch(port, "GET", "/live") == (200, {"worker": process.pid})
        assert fetch(port, "GET", "/ready")[0] == 200
    processes[0].send_signal(signal.SIGCONT)
    wait_until(lambda: all(fetch(port, "GET", "/total")[1]["age"] < 1 for port in ports[1:]))
    assert fetch(ports[1], "POST", "/count") == (200, {})
    wait_until(lambda: total(ports[2]) == 1)


@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="fastapi is not installed")
def test_fastapi_application_starts_and_stops_the_total(ranks: Ranks, environ: dict[str, str]) -> None:
    processes: list[Any] = [ranks.start(SERVER, "api:app", env=environ) for _ in range(WORKERS)]
    ports = [int(process.stdout.readline()) for process in processes]
    assert fetch(ports[1], "POST", "/count") == (200, None)
    for port in ports:
        wait_until(lambda port=port: total(port) == 1)
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=LIMIT) == ("", "")
        assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_script_returns_the_exit_code_of_a_stopped_web_server(
    ranks: Ranks, environ: dict[str, str], number: int
) -> None:
    environ["WORKERS"] = "1"
    script = "import os, sys; os.setpgid(0, 0); sys.argv = sys.argv[1:]; exec(open(sys.argv[0]).read())"
    command = ("-c", script, str(serve_script(environ)), "tests.integration.asgi_server", APP)
    process: Any = ranks.start(*command, env=environ)
    port = int(process.stdout.readline())
    assert fetch(port, "GET", "/ready")[0] == 200
    if number == signal.SIGINT:  # a terminal sends SIGINT to all processes of the group
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode == (0 if number == signal.SIGTERM else 130)


@pytest.mark.parametrize(("arguments", "code"), [(("this",), 75), (("tests.integration.asgi_server", "none:app"), 1)])
def test_serve_script_returns_an_exit_code_for_a_web_server_that_ends_by_itself(
    ranks: Ranks, environ: dict[str, str], arguments: tuple[str, ...], code: int
) -> None:
    """Use `python -m this` as a server that ends with code 0, and a server that does not find its module."""
    process: Any = ranks.start(str(serve_script(environ)), *arguments, env=environ)
    process.communicate(timeout=LIMIT)
    assert process.returncode == code


def test_serve_script_returns_an_exit_code_for_a_killed_web_server(
    ranks: Ranks, environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    process: Any = ranks.start(str(serve_script(environ)), "killed", env=environ)
    process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGKILL


def serve_script(environ: dict[str, str]) -> Path:
    """Return the path of serve.py from the page, which hosts a store itself."""
    return Path(environ.pop("STORE")).parent.parent / "serve.py"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_unit_file_of_the_documentation_is_valid(tmp_path: Path) -> None:
    unit = code(PAGE, "systemd and Kubernetes", language="ini")
    unit = unit.replace("/srv/service/venv/bin/python", sys.executable).replace("/srv/service", str(tmp_path))
    path = tmp_path / "service.service"
    path.write_text(unit)
    command = ["systemd-analyze", "verify", "--man=no", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "service.service" in line]) == (0, [])


@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
def test_uvicorn_replaces_killed_workers(ranks: Ranks, environ: dict[str, str], port: int) -> None:
    server = start_uvicorn(ranks, environ, port)
    wait_until(lambda: readiness(port)["ranks"] == WORKERS)
    for _ in range(10):
        assert fetch(port, "POST", "/count") == (200, {})
    wait_until(lambda: total(port) == 10)
    worker = readiness(port)["worker"]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: readiness(port)["ranks"] == WORKERS - 1)
    wait_until(lambda: readiness(port)["ranks"] == WORKERS)
    assert total(port) == 10
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=LIMIT)
    assert server.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
@pytest.mark.parametrize("death", ["os._exit(1)", "os.kill(os.getpid(), 9)"])
def test_uvicorn_replaces_a_worker_that_dies_during_its_start(
    ranks: Ranks, environ: dict[str, str], port: int, tmp_path: Path, death: str
) -> None:
    """Let the second worker die before it meets the other workers, which then meet its replacement."""
    let_second_worker(death, tmp_path)
    server = start_uvicorn(ranks, environ, port)
    wait_until(lambda: readiness(port)["ranks"] == WORKERS)
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=LIMIT)
    assert server.returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="uvicorn is not installed")
def test_web_service_fails_if_a_uvicorn_worker_fails_to_start(
    ranks: Ranks, environ: dict[str, str], port: int, tmp_path: Path
) -> None:
    let_second_worker("raise RuntimeError", tmp_path)
    server = start_uvicorn(ranks, environ, port)
    server.communicate(timeout=LIMIT)
    assert server.returncode == 75


def let_second_worker(fail: str, folder: Path) -> None:
    """Insert a statement into the service that the second worker runs before it meets the other workers."""
    program, place = folder / "totals.py", "        self.task = asyncio.create_task(self.run())\n"
    text = program.read_text()
    assert place in text
    fault = f"        if await self.store.add('started', 1) == 2:\n            {fail}\n"
    program.write_text(text.replace(place, fault + place))


def readiness(port: int) -> dict[str, Any]:
    try:
        return fetch(port, "GET", "/ready")[1]
    except (ConnectionError, http.client.HTTPException):  # not listening yet, or the worker was just killed
        return {"ranks": 0, "worker": 0}


def start_uvicorn(ranks: Ranks, environ: dict[str, str], port: int) -> Any:
    """Start the service with the command of the page."""
    arguments = re.search(r"python serve.py (.*)", commands(PAGE)[0])
    assert arguments is not None
    quiet = ("--port", str(port), "--log-level", "critical")
    # Ignore warnings, since uvicorn and its dependencies may emit some.
    return ranks.start(str(serve_script(environ)), *arguments[1].split(), *quiet, env=environ | {"PYTHONWARNINGS": ""})
