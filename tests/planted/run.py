"""Mutation testing: plant faults in a copy of the tree, one at a time, and report those that no test catches.

python -m tests.planted                     all faults: written by hand, and drawn at random
python -m tests.planted --only relay        the faults of a subject, or of a function
python -m tests.planted --draw              replace drawn faults whose place no longer exists
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .mutations import Mutant, draw, mutants
from .places import Package
from .subjects import SUBJECTS, files, pytest_arguments, quota

__all__ = ["BY_HAND", "FAULTS", "ROOT", "Tree", "key", "main", "read", "reasons"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAULTS = HERE / "faults.json"
EQUIVALENT = HERE / "equivalent.json"
#: The seed of the random choice of faults.
SEED = "planted"
BY_HAND = "by hand"
#: The time limit of a test run: FLOOR seconds, plus TIMES the duration without a fault. A longer run counts as hung.
FLOOR, TIMES = 40.0, 4.0
#: Files and folders of the tree that the tests need.
PARTS = ("aiocoll", "tests", "docs", "examples", "bench", "pyproject.toml", "Makefile", "README.md", "CHANGELOG.md")


class Verdict(NamedTuple):
    """The result of the tests with one planted fault.

    Attributes:
        mutant: the fault.
        outcome: "caught", "survived" or "equivalent".
        detail: the test that caught the fault, or the reason why the fault is equivalent.
        seconds: the duration of the test run.
    """

    mutant: Mutant
    outcome: str
    detail: str
    seconds: float


def read(path: Path = FAULTS) -> list[Mutant]:
    """Read faults from a JSON file."""
    return [
        Mutant(**{**each, "old": tuple(each["old"]), "new": tuple(each["new"])})
        for each in json.loads(path.read_text())
    ]


def write(faults: Sequence[Mutant], path: Path = FAULTS) -> None:
    """Write faults to a JSON file, one per line."""
    lines = ",\n".join(json.dumps(each._asdict(), ensure_ascii=False) for each in faults)
    path.write_text(f"[\n{lines}\n]\n")


def reasons(path: Path = EQUIVALENT) -> dict[tuple[str, str, str], str]:
    """Return the reasons why some faults have no observable effect, by function, old and new code."""
    return {(each["where"], each["old"], each["new"]): each["why"] for each in json.loads(path.read_text())}


def key(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.where, "; ".join(mutant.old), "; ".join(mutant.new)


class Tree:
    """A copy of the source tree that contains at most one fault at a time.

    Args:
        root: the original tree.
        parts: files and folders to copy; the first one is the package.
    """

    def __init__(self, root: Path = ROOT, parts: Sequence[str] = PARTS) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="planted-"))
        for part in parts:
            if (root / part).is_dir():
                shutil.copytree(root / part, self.root / part, ignore=shutil.ignore_patterns("__pycache__", ".venvs"))
            elif (root / part).exists():
                shutil.copy(root / part, self.root / part)
        # Validate bytecode by hash: with time stamps, a file changed twice within a second would keep old bytecode.
        compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", parts[0]]
        subprocess.run(compiled, cwd=self.root, check=True)
        self._package = Package(self.root / parts[0])

    def close(self) -> None:
        """Delete the copy of the source tree."""
        shutil.rmtree(self.root)

    def tests(self, runs: Sequence[tuple[str, ...]], limits: Sequence[float], *, native: bool = False) -> str | None:
        """Run tests in the copied tree, with or without the C accelerator.

        Returns:
            The first test that fails, or "no end within ... s"; None if all pass.
        """
        for run, limit in zip(runs, limits, strict=True):
            arguments = pytest_arguments(self.root / "tests", run)
            failed = self._pytest(arguments, limit, native)
            if (
                failed is not None
                and "::" in failed
                and self._pytest([failed.partition(" ")[2]], limit, native) is None
            ):
                # The test passes alone, so repeat the run: the failure may be due to a busy machine.
                failed = self._pytest(arguments, limit, native)
            if failed is not None:
                return failed
        return None

    def _pytest(self, arguments: list[str], limit: float, native: bool) -> str | None:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not soak and not matrix and not gpu"]
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONASYNCIODEBUG": "0"}
        if not native:
            environment["AIOCOLL_NATIVE"] = "0"
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return f"no end within {limit:.0f} s"
        finally:
            if process.poll() is None:
                # Kill all processes of the session, since tests start processes of their own.
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode == 0:
            return None
        failed = [line for line in output.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
        return failed[0].split(" - ")[0] if failed else f"pytest ended with {process.returncode}"

    def judge(
        self, mutant: Mutant, runs: Sequence[tuple[str, ...]], limits: Sequence[float], *, native: bool = False
    ) -> str | None:
        """Plant a fault in the copied tree, return the result of `tests`, and restore the file."""
        spots = self._package.find(mutant.place)
        if len(spots) != 1:
            raise LookupError(f"{mutant.where}: {len(spots)} places with {'; '.join(mutant.old)}; run with --draw")
        source = spots[0].path.read_bytes()
        try:
            spots[0].path.write_bytes(spots[0].replaced(source, mutant.new))
            return self.tests(runs, limits, native=native)
        finally:
            spots[0].path.write_bytes(source)


def redraw_lost(faults: Sequence[Mutant]) -> list[Mutant]:
    """Return the faults, with new random faults for drawn faults whose code no longer exists."""
    package = Package(ROOT / "aiocoll")
    kept = [mutant for mutant in faults if len(package.find(mutant.place)) == 1]
    for subject, count in quota().items():
        mine = [mutant for mutant in kept if mutant.subject == subject and mutant.kind != BY_HAND]
        candidates = mutants(package, subject, files(package, subject))
        kept += draw(candidates, count - len(mine), f"{SEED} {subject}", kept)
    subjects = list(SUBJECTS)
    # Keep hand-written faults whose code no longer exists, since they must be updated by hand. The test
    # `test_code_places_of_all_recorded_faults_exist` reports them.
    lost = [mutant for mutant in faults if mutant.kind == BY_HAND and mutant not in kept]
    return sorted([*kept, *lost], key=lambda mutant: (mutant.kind != BY_HAND, subjects.index(mutant.subject)))


class Limits:
    """Time limits of test runs, derived from the duration of each run without a fault."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], float] = {}
        self._lock = threading.Lock()

    def of(self, subject: str, tree: Tree) -> list[float]:
        """Return the time limit for each run of a subject's tests, in seconds; `tree` must contain no fault."""
        found = SUBJECTS[subject]
        with self._lock:
            for run in found.tests:
                if run not in self._found:
                    start = time.monotonic()
                    if (failed := tree.tests([run], [600.0], native=found.native)) is not None:
                        raise RuntimeError(f"{subject}: tests fail without a fault: {failed}")
                    self._found[run] = FLOOR + TIMES * (time.monotonic() - start)
            return [self._found[run] for run in found.tests]


def judge_faults(faults: Sequence[Mutant], jobs: int, out: Path) -> list[Verdict]:
    """Test faults in `jobs` threads, each with its own copy of the tree, and return the verdicts."""
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    equivalent, limits = reasons(), Limits()
    verdicts = [Verdict(each, "equivalent", equivalent[key(each)], 0.0) for each in faults if key(each) in equivalent]
    for mutant in faults:
        if key(mutant) not in equivalent:
            waiting.put(mutant)
    errors: list[BaseException] = []

    def judge(mutant: Mutant, tree: Tree) -> None:
        allowed = limits.of(mutant.subject, tree)
        start = time.monotonic()
        subject = SUBJECTS[mutant.subject]
        test = tree.judge(mutant, subject.tests, allowed, native=subject.native)
        outcome = "survived" if test is None else "caught"
        verdicts.append(Verdict(mutant, outcome, test or "", time.monotonic() - start))
        print(f"{len(verdicts)}/{len(faults)} {describe_verdict(verdicts[-1])}", flush=True)

    def work() -> None:
        tree = Tree()
        try:
            while not errors:
                judge(waiting.get_nowait(), tree)
                report(list(verdicts), out)
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)
        finally:
            tree.close()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return verdicts


def describe_verdict(verdict: Verdict) -> str:
    """Return a verdict as one line of text."""
    mutant = verdict.mutant
    fault = f"{'; '.join(mutant.old)}  ->  {'; '.join(mutant.new)}"
    return f"{verdict.outcome}: {mutant.subject}, {mutant.where}: {fault}  [{verdict.detail}] {verdict.seconds:.0f} s"


def report(verdicts: Sequence[Verdict], out: Path) -> None:
    """Write the verdicts to `planted.json` and `planted.md`, surviving faults first."""
    out.mkdir(parents=True, exist_ok=True)
    ordered = sorted(verdicts, key=lambda each: (each.outcome != "survived", each.outcome, each.mutant))
    rows: list[dict[str, Any]] = [
        {**each.mutant._asdict(), "outcome": each.outcome, "detail": each.detail, "seconds": round(each.seconds, 1)}
        for each in ordered
    ]
    (out / "planted.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    counts = {outcome: sum(each.outcome == outcome for each in verdicts) for outcome in ("caught", "equivalent")}
    lines = [
        f"{len(verdicts)} faults: {counts['caught']} caught, {counts['equivalent']} equivalent, "
        f"{len(verdicts) - sum(counts.values())} survived.\n",
        "| outcome | subject | kind | where | fault | by |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        fault = f"`{'; '.join(row['old'])}` → `{'; '.join(row['new'])}`".replace("|", "\\|")
        cells = (row["outcome"], row["subject"], row["kind"], f"`{row['where']}`", fault, row["detail"])
        lines.append(f"| {' | '.join(cells)} |")
    (out / "planted.md").write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `python -m tests.planted`.

    Returns:
        1 if a fault has survived, else 0.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--draw", action="store_true", help="replace drawn faults whose place no longer exists")
    parser.add_argument("--only", nargs="*", default=[], help="subjects, or qualified names of functions")
    parser.add_argument("--jobs", type=int, default=2, help="number of faults tested at a time (2)")
    parser.add_argument("--out", type=Path, default=ROOT / "planted-figures", help="folder for the results")
    options = parser.parse_args(arguments)
    faults = read()
    if options.draw:
        faults = redraw_lost(faults)
        write(faults)
        return 0
    if options.only:
        faults = [each for each in faults if any(only in (each.subject, each.where) for only in options.only)]
    verdicts = judge_faults(faults, options.jobs, options.out)
    report(verdicts, options.out)
    survivors = [verdict for verdict in verdicts if verdict.outcome == "survived"]
    print(f"{len(verdicts)} faults, {len(survivors)} survived; all of them in {options.out}")
    for verdict in survivors:
        print(describe_verdict(verdict))
    return bool(survivors)
