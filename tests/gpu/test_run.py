"""The GPU test runner `tests/gpu/run.py`: missing requirements, the steps, and steps that fail or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiocoll.testing.skips import _gpus

from . import machine_info, processes
from . import run as module
from .device_kinds import ADAPTER, ADAPTERS
from .on_device import two
from .run import Run
from .simulated_machine import torch_machine
from .steps import ROOT, Outcome, Step, all_steps, end_process, run_step

EVERYTHING: dict[str, Any] = {
    "modules": dict.fromkeys(machine_info.MODULES, "99.0"),
    "plugins": ["asyncio", "aiocoll"],
    "driver": {"version": 13000, "devices": 2},
    "cuda": {"runtime": 13000, "devices": ["a", "b"]},
    "nccl": {"version": 22809},
    "ctypes": {"driver": 13000, "nccl": 22809},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(module, "run_step", lambda step, *_: Outcome("passed", 1.0))
    with Run(tmp_path, fake=False) as made:
        yield made


def python_step(code: str, name: str = "it") -> Step:
    return Step(name, 60, ("-c", code))


def run_and_log(step: Step, folder: Path, limit: float = 60) -> tuple[Outcome, str]:
    log = folder / "log"
    log.write_bytes(b"of the step before: 3 passed\n")
    return run_step(step, limit, os.environ, log), log.read_text()


# -- what is missing


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ({}, {}),
        (
            {"modules": {"pytest_asyncio": {"error": "ModuleNotFoundError: no"}, "pytest": "8.4.1"}},
            {"pytest": "8.4.1 is too old; install 9 or later", "pytest_asyncio": "ModuleNotFoundError: no"},
        ),
        (
            {"modules": {"torch": {"error": "no"}}, "cuda": {"devices": ["a"]}},
            {"torch": "no", "two devices": "1 found"},
        ),
        (
            {"cuda": {"error": "no driver"}, "nccl": {"error": "no libnccl"}, "ctypes": {"error": "no library"}},
            {"device": "no driver", "nccl": "no libnccl", "ctypes": "no library", "two devices": "0 found"},
        ),
        ({"modules": {"cupy": {"error": "no CuPy"}}}, {"cupy": "no CuPy"}),
        (
            {"modules": {"cupy": {"error": "no CuPy"}, "torch": {"error": "no torch"}}},
            {"arrays": "neither CuPy nor torch is installed", "cupy": "no CuPy", "torch": "no torch"},
        ),
    ],
)
def test_gpu_run_lists_missing_requirements_with_reasons(gone: dict[str, Any], expected: dict[str, str]) -> None:
    found = EVERYTHING | gone | {"modules": EVERYTHING["modules"] | gone.get("modules", {})}
    assert machine_info.missing_parts(found, fake=False) == expected
    needed = {name: why for name, why in expected.items() if name.startswith("pytest")}
    assert machine_info.missing_parts(found, fake=True) == needed


def test_gpu_run_loads_pytest_plugins_of_packages_that_are_not_installed() -> None:
    assert machine_info.plugin_options(EVERYTHING) == []
    assert machine_info.plugin_options({"plugins": ["asyncio", "xdist"]}) == ["-p", "aiocoll.testing.plugin"]
    assert machine_info.plugin_options({"plugins": []})[:2] == ["-p", "pytest_asyncio.plugin"]


def test_gpu_run_counts_a_requirement_whose_query_hangs_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> None:
        raise KeyboardInterrupt

    known: list[str] = []
    monkeypatch.setattr(machine_info, "_cuda", hang)
    with pytest.raises(KeyboardInterrupt):
        machine_info.describe_machine(lambda found: known.append(json.dumps(found)))
    found = json.loads(known[-1])
    assert found["modules"]["numpy"].startswith("2.")
    assert machine_info.missing_parts(found, fake=False)["device"] == "the query hung, or crashed the process"


def test_description_of_this_machine_contains_all_parts(tmp_path: Path) -> None:
    # Use a separate process, because CUDA never closes its files.
    file = tmp_path / "found.json"
    subprocess.run([sys.executable, "-m", "tests.gpu.machine_info", str(file)], cwd=ROOT, check=True)
    found = json.loads(file.read_text())
    assert found["modules"]["numpy"].startswith("2.")
    assert found["interfaces"]["127.0.0.1"] == "answers"
    shown = machine_info.format_description(found)
    assert f"numpy {found['modules']['numpy']}" in shown
    if not _gpus():
        assert {"device", "two devices"} <= machine_info.missing_parts(found, fake=False).keys()


@pytest.mark.slow
@pytest.mark.skipif(_gpus() > 0, reason="a CUDA device is available: run `make gpu`")
def test_gpu_run_without_a_device_runs_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main([str(tmp_path)]) == 2
    output = capsys.readouterr().out
    assert "missing: device: " in output
    assert "No step was run" in output
    results = json.loads((tmp_path / "results.json").read_text())
    assert [step["name"] for step in results["steps"]] == ["versions and interfaces"]


def test_gpu_run_reports_a_machine_that_cannot_be_described(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Let the process that describes the machine hang, or end without output."""
    assert not run.check_machine()
    assert "The machine could not be described; versions and interfaces" in capsys.readouterr().out


# -- the steps


def test_steps_of_the_gpu_run_have_a_fixed_order() -> None:
    found = all_steps(fake=False, folder=Path("there"), plugins=["-p", "plugin"], missing=())
    names = [step.name for step in found]
    kinds = ("cupy", "torch")
    tests = [f"{name} {kind}" for name in ("failures", "streams", "staged 2", "staged 4", "staged 8", "loop", "calls")
             for kind in kinds]  # fmt: skip
    raw, exits = ["raw by cupy", "raw by library"], ["exit with RAS", "exit with RAS unclosed"]
    paired = ("killed", "aborted", "mismatched", "crossed", "queued")
    pair = [*raw, "aiocoll", *paired, "compared before", *exits]
    two_ranks = [f"two ranks {kind}" for kind in kinds]
    by = [f"{name} by ctypes" for name in ("alone torch", "sum", *paired, "streams torch")]
    assert names == ["signatures", "alone cupy", "alone torch", *pair, *two_ranks, *tests, *by, "bench"]
    assert max(step.limit for step in found) <= 60
    for step in found:
        for kind in kinds:
            assert kind not in step.name or kind in step.needs or "by ctypes" in step.name
        assert "CUDA_MODULE_LOADING" not in step.environment or "torch" not in step.name
        assert ("plugin" in step.words) == ("pytest" in step.words)


def test_gpu_run_omits_cupy_steps_on_a_machine_without_cupy(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_info.metadata, "version", lambda name: "2.13.0")
    with torch_machine():
        found = machine_info.describe_machine()
    run.missing = machine_info.missing_parts(found, fake=False)
    assert run.missing.keys() & {*machine_info.NEEDED, "torch"} == set()
    assert found["cuda"]["by"] == "ctypes_cuda"
    chosen = all_steps(False, run.folder, machine_info.plugin_options(found), run.missing)
    run.run_steps(chosen)
    assert run.print_summary()
    left_out = [name for name, ended in run.outcomes.items() if ended.state == "left out"]
    assert left_out == [step.name for step in chosen if "cupy" in step.name or "by ctypes" in step.name]
    assert {run.outcomes[name].why for name in left_out} == {"missing: cupy"}
    for step in chosen:
        assert step.name in left_out or "cupy" not in step.words
    assert {step.after for step in chosen} == {None, "raw by library", "aiocoll"}


def test_import_of_the_gpu_run_loads_no_third_party_package() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import tests.gpu.run, tests.gpu.machine_info
print(*({{"aiocoll", "numpy", "msgpack", "pytest", "ml_dtypes"}} & {{*sys.modules}}))
"""
    assert processes.run_code(code) == ""


def test_gpu_run_on_the_fake_device_has_separate_steps_for_each_adapter() -> None:
    found = all_steps(fake=True, folder=Path("there"), plugins=[], missing=())
    for adapter in ADAPTERS:
        names = [step.name for step in found if step.environment.get(ADAPTER) == adapter]
        paired = ("sum", "killed", "aborted", "mismatched", "crossed", "queued")
        assert names == [f"{name} by {adapter}" for name in ("alone fake", *paired, "streams fake", "overlapping")]


def test_gpu_run_does_not_report_a_step_with_a_missing_requirement_as_passed(run: Run) -> None:
    run.missing = {"torch": "no", "nccl": "no"}
    chosen = [
        python_step("", "raw")._replace(needs=("nccl",)),
        python_step("", "torch")._replace(needs=("torch",)),
        python_step("", "both")._replace(needs=("torch", "nccl")),
        python_step("", "aiocoll")._replace(after="raw"),
        python_step("", "other"),
    ]
    run.run_steps(chosen)
    assert [(name, ended.state) for name, ended in run.outcomes.items()] == [
        ("raw", "not run"), ("torch", "left out"), ("both", "not run"), ("aiocoll", "not run"), ("other", "passed"),
    ]  # fmt: skip
    assert run.outcomes["both"].why == "missing: torch, nccl"
    assert run.outcomes["aiocoll"].why == "raw has not passed"
    assert not run.print_summary()


@pytest.mark.parametrize(
    ("states", "well"), [(["passed", "left out"], True), *((["passed", bad], False) for bad in module.FAILURES)]
)
def test_gpu_run_summary_reports_failure_if_a_step_failed(
    run: Run, states: list[str], well: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, state in enumerate(states):
        run._record(str(number), Outcome(state, 1.5, "because"))
    assert run.print_summary() is well
    assert [line.split() for line in capsys.readouterr().out.splitlines()[-len(states) :]] == [
        [str(number), *state.split(), "1.5", "s", "because"] for number, state in enumerate(states)
    ]
    results = json.loads((run.folder / "results.json").read_text())
    assert [step["state"] for step in results["steps"]] == states


def test_gpu_run_does_not_start_a_step_if_too_little_time_is_left(run: Run) -> None:
    run.until = 0.0
    run.run_steps([python_step("")])
    assert run.outcomes["it"].why == "no time was left"


def test_gpu_run_steps_keep_the_existing_python_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for before, path in ((None, [ROOT]), ("/some/site:/other", [ROOT, "/some/site", "/other"])):
        monkeypatch.delenv("PYTHONPATH", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONPATH", before)
        with Run(tmp_path, fake=True) as run:
            assert run.environment["PYTHONPATH"] == os.pathsep.join(map(str, path))


# -- outcomes of steps


@pytest.mark.parametrize(
    ("code", "state", "why"),
    [
        ("print('well')", "passed", ""),
        ("raise SystemExit('this is wrong')", "failed", "this is wrong"),
        ("raise SystemExit(3)", "failed", "no output"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "killed by SIGKILL"),
    ],
)
def test_outcome_of_a_gpu_run_step_contains_state_and_reason(code: str, state: str, why: str, tmp_path: Path) -> None:
    ended, output = run_and_log(python_step(code), tmp_path)
    assert (ended.state, ended.why) == (state, why)
    assert output.startswith("of the step before")


@pytest.mark.slow
def test_gpu_run_step_whose_tests_are_all_skipped_fails(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("import pytest\ndef test_it():\n    pytest.skip('no')\n")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path), str(file))
    ended, _ = run_and_log(Step("it", 60, words), tmp_path)
    assert ended.state == "failed"
    assert ended.why.startswith("no test passed: 1 skipped")


def test_hanging_gpu_run_step_is_killed_at_its_time_limit(tmp_path: Path) -> None:
    ended, _ = run_and_log(python_step("import threading; threading.Event().wait()"), tmp_path, limit=0.2)
    assert ended.state == "hung"
    assert ended.why == "killed after 0.2 s; the log has the stacks"


#: Code of a process that hangs, and starts a child process in another session that hangs too.
HANG = """
import subprocess, sys, threading
def where_it_hangs(number):
    print(number, flush=True)
    threading.Event().wait()
if sys.argv[1] == "1":
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "2", ""], start_new_session=True)
where_it_hangs(sys.argv[1])
"""


def test_hanging_gpu_run_processes_write_their_stacks_and_are_ended() -> None:
    hanging = subprocess.Popen(
        [sys.executable, "-c", HANG, "1", HANG],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        start_new_session=True,
    )
    with hanging as process:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {b"1\n", b"2\n"}
        end_process(process)
        output = process.stdout.read().decode()  # reads until both processes have ended
    assert output.count("in where_it_hangs") == 2


# -- two ranks


@pytest.mark.slow
def test_two_rank_step_names_failed_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    message = two.main("raw", "nonsense", "fake", str(tmp_path))
    assert message == "raw, nonsense: rank 0 ended with code 1, rank 1 ended with code 1"
    assert "AssertionError" in capfd.readouterr().err


def test_two_rank_step_waits_only_briefly_for_a_rank_whose_peer_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two, "GRACE", 0.0)
    codes = ["raise SystemExit(3)", "import threading; threading.Event().wait()"]
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    two._wait(ranks, [0, 0])
    assert [process.poll() for process in ranks] == [3, None]
    ranks[1].kill()
    ranks[1].wait()


def test_two_rank_step_names_hung_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(two, "LIMIT", 0.0)

    def write_log(meeting: Path, rank: int) -> Path:
        file = tmp_path / f"of-rank{rank}"
        file.write_text("NCCL INFO Bootstrap\n")
        return file

    monkeypatch.setattr(two, "nccl_log", write_log)
    message = two.main("aiocoll_rank", "sum", "fake", str(tmp_path))
    assert message == "aiocoll_rank, sum: rank 0 hung, rank 1 hung"
    assert capfd.readouterr().out.count("NCCL INFO Bootstrap") == 2


def test_nccl_settings_for_two_ranks_on_one_device_depend_on_the_nccl_version() -> None:
    hosts = [two.rank_settings(rank, two.way_for_version(22809))["NCCL_HOSTID"] for rank in range(2)]
    assert len(set(hosts)) == 2
    assert "NCCL_HOSTID" not in two.rank_settings(0, two.way_for_version(23004))
    assert two.rank_settings(0, two.way_for_version(23004))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


# -- whole runs


@pytest.mark.slow
@pytest.mark.parametrize(
    "only",
    [
        "raw by fake,killed,two ranks simulated,bench",
        pytest.param("", marks=pytest.mark.soak, id="everything"),
    ],
)
def test_gpu_run_on_the_fake_device_passes(only: str, tmp_path: Path) -> None:
    words = ["--fake", *(["--only", only] if only else []), str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "tests/gpu/run.py", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    chosen = only.split(",") if only else [step.name for step in all_steps(True, tmp_path, [], ())]
    assert [step["name"] for step in results["steps"]] == ["versions and interfaces", *chosen]
    assert {step["state"] for step in results["steps"]} == {"passed"}
    measured = {figure["name"] for figure in results["figures"]}
    assert "from kill -9 of rank 1 to its error on rank 0: ms" in measured
    assert "\nraw by fake                 passed" in ran.stdout
    assert "1 passed" in (tmp_path / "log.txt").read_text()


#: A `sitecustomize` module that simulates a machine without CuPy in every process, including both ranks of a pair.
ALONE = """
import atexit, sys
from tests.fakes.nccl import FakeNccl
from tests.gpu.on_device.far_nccl import FarNccl
from tests.gpu.simulated_machine import torch_machine

pair = {"tests.gpu.on_device.aiocoll_rank", "tests.gpu.on_device.raw"}
simulated = torch_machine(1, FarNccl if pair & {*sys.orig_argv} else FakeNccl)
simulated.__enter__()
atexit.register(simulated.__exit__, None, None, None)
"""


@pytest.mark.slow
def test_gpu_run_passes_on_a_simulated_machine_without_cupy(tmp_path: Path) -> None:
    """Simulate only the work of the CUDA libraries; the steps find them as on a real machine."""
    (tmp_path / "sitecustomize.py").write_text(ALONE)
    (tmp_path / "torch-2.13.0.dist-info").mkdir()
    (tmp_path / "torch-2.13.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n")
    left_out = ["alone cupy", "raw by cupy", "sum by ctypes"]
    passing = ["signatures", "alone torch", "raw by library", "aiocoll", "aborted"]
    words = ["tests/gpu/run.py", "--only", ",".join([*passing, *left_out]), str(tmp_path / "figures")]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ran = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = json.loads((tmp_path / "figures/results.json").read_text())
    ended = {step["name"]: (step["state"], step["why"]) for step in results["steps"]}
    assert ended.pop("versions and interfaces") == ("passed", "")
    wanted = {**dict.fromkeys(passing, ("passed", "")), **dict.fromkeys(left_out, ("left out", "missing: cupy"))}
    assert ended == wanted
    assert results["found"]["cuda"]["by"] == "ctypes_cuda"


def test_gpu_run_refuses_an_unknown_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "check_machine", lambda run: run.found.update(EVERYTHING) is None)
    with pytest.raises(SystemExit) as error:
        module.main(["--fake", "--only", "aiocoll,unknown", str(tmp_path)])
    assert error.value.code == 2
