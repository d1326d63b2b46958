"""Torch's own backend tests, run over aio and over Gloo: `python -m tests.integrations.torch.suite`.

Every test that passes over Gloo must pass over aio. Ranks are forked, since a spawned process takes seconds to import
torch.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

#: The tested backend, and the reference backend: tests that pass over Gloo must pass over aio.
BACKENDS = ("aio", "gloo")
#: Name patterns of the tests that also run with four ranks, since some need more than two.
FOUR_RANK_TESTS = ("*_group", "*subgroup*", "*averager*", "*_object*", "*monitored_barrier*", "*undefined_grad*")
#: The backend names that `get_backend` reports to torch's tests, by actual name.
SHOWN_NAMES = {"aio": "gloo"}
#: The timeout in seconds for all tests over one backend.
LIMIT = 3600


class Outcome(unittest.TextTestResult):
    """A unittest result that records the outcome of each test."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.outcomes: dict[str, str] = {}

    def _record(self, test: unittest.TestCase, outcome: str) -> None:
        self.outcomes[test.id().rpartition(".")[2]] = outcome

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._record(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._record(test, "skipped")

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._record(test, "failed")

    addError = addFailure


def replace_gloo() -> None:
    """Use aio instead of Gloo, but report the name "gloo", from which torch's tests choose their expectations."""
    import torch.distributed as dist

    from aiocoll.integrations.torch import aio_group, lifetime, register

    register()
    c10d = dist.distributed_c10d
    get_backend, init, new_group = c10d.get_backend, c10d.init_process_group, c10d.new_group

    def actual_backend(backend: Any) -> Any:
        return "aio" if backend == "gloo" else backend

    def shown_backend(*args: Any, **kwargs: Any) -> str:
        found: str = get_backend(*args, **kwargs)
        return SHOWN_NAMES.get(found, found)

    def init_by_aio(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        init(actual_backend(backend), *args, **kwargs)

    def new_by_aio(*args: Any, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(*args, backend=actual_backend(backend), **kwargs)

    aio_group.AioGroup.getBackendName = lambda _: "aio"  # torch's C++ code calls this method
    lifetime.BACKEND = "gloo"  # the profiler's events contain this name
    c10d.get_backend = dist.get_backend = shown_backend
    c10d.init_process_group = dist.init_process_group = init_by_aio
    c10d.new_group = dist.new_group = new_by_aio


def run_tests(backend: str, out: str, patterns: list[str]) -> None:
    """Run torch's tests in this process, with the world size in the variable WORLD_SIZE."""
    import torch
    from torch.testing._internal.distributed import distributed_test as tests

    if backend == "aio":
        replace_gloo()
    torch.set_num_threads(1)

    class Tests(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # The test `test_ddp_logging_data_cpu` compares the backend name with the name in the C++ code.
            SHOWN_NAMES["aio"] = "aio" if self._testMethodName == "test_ddp_logging_data_cpu" else "gloo"
            # Set the URL for each test. Torch's module reads it only at import, so ranks would use the file of an
            # earlier test.
            tests.INIT_METHOD = self.init_method
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    loaded = unittest.defaultTestLoader.loadTestsFromTestCase(Tests)
    chosen = [each for each in loaded if any(fnmatch.fnmatch(each.id(), pattern) for pattern in patterns)]
    result = unittest.TextTestRunner(verbosity=2, resultclass=Outcome).run(unittest.TestSuite(chosen))
    Path(out).write_text(json.dumps(result.outcomes))  # type: ignore[attr-defined]


def outcomes(backend: str, ranks: int, patterns: list[str]) -> dict[str, str]:
    """Run torch's tests over one backend in a new process; return the outcome of each test."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "outcomes")
        env = {
            **os.environ,
            "BACKEND": "gloo",
            "WORLD_SIZE": str(ranks),
            "TEMP_DIR": folder,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.integrations.torch.suite",
            "--out",
            backend,
            str(out),
            *patterns,
        ]
        subprocess.run(command, env=env, timeout=LIMIT, check=False)
        if not out.exists():
            raise RuntimeError(f"the tests over {backend} have ended without a result")
        found: dict[str, str] = json.loads(out.read_text())
    return found


def compare(ranks: int, patterns: list[str]) -> bool:
    """Run tests over both backends; return whether aio passes all tests that Gloo passes, and fails none."""
    found = {backend: outcomes(backend, ranks, patterns) for backend in BACKENDS}
    for backend, each in found.items():
        counts = {kind: sum(value == kind for value in each.values()) for kind in ("passed", "failed", "skipped")}
        print(f"{ranks} ranks over {backend}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    aio, gloo = found["aio"], found["gloo"]
    wrong = [name for name, kind in aio.items() if kind == "failed"]
    wrong += [name for name, kind in gloo.items() if kind == "passed" and aio.get(name) == "skipped"]
    for name in sorted(wrong):
        print(f"{ranks} ranks: {name} is {aio[name]} over aio, {gloo.get(name)} over gloo")
    return not wrong and bool(aio)


def main() -> int:
    """Run torch's tests with two and four ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", help="names of tests, as in a shell; all by default")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--out", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    patterns = [f"*{each}*" for each in arguments.patterns] or ["*"]
    if arguments.out:
        run_tests(*arguments.out, patterns)
        return 0
    right = [compare(ranks, patterns if ranks == 2 else list(FOUR_RANK_TESTS)) for ranks in arguments.ranks]
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
