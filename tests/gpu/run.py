"""A runner of the GPU tests in under 8 minutes: ``make gpu``, or ``python tests/gpu/run.py [--fake] [FOLDER]``.

The command first prints missing requirements. Each step is a process with its own time limit. A step that hangs writes
the stacks of its threads and is killed with its children. The command installs and downloads nothing. It writes to
FOLDER (default: ``gpu-figures``): ``results.json`` after every step, ``log.txt`` with the output of the steps, logs of
NCCL, and the results of the benchmark. ``--fake`` runs the same steps on the fake device, to test the steps themselves.

The exit status is 0 if all steps passed, 1 if a step failed, hung or lacked a requirement, and 2 if no step ran.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gpu import machine_info  # noqa: E402
from tests.gpu.on_device.two import TWO_BY, way_for_version  # noqa: E402
from tests.gpu.steps import Outcome, Step, all_steps, run_step  # noqa: E402

#: Time limits in seconds: for the whole run, and for the description of the machine.
WHOLE, LOOKING = 470.0, 60.0
#: The time in seconds that must remain to start another step.
LEAST = 5.0
#: The maximum number of printed output lines of a failed step, and of a passed step.
SHOWN = (60, 3)
#: NCCL environment variables that prevent an open port (RAS) and long logs.
QUIET = {"NCCL_RAS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
FAILURES = ("failed", "hung", "not run")


class Run:
    """A run of all test steps, with its results.

    Args:
        folder: for the results.
        fake: whether to use the fake device.
    """

    def __init__(self, folder: Path, fake: bool) -> None:
        self.until = monotonic() + WHOLE
        self.folder, self.fake, self.log = folder, fake, folder / "log.txt"
        self.outcomes: dict[str, Outcome] = {}
        self.found: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self._scratch = tempfile.TemporaryDirectory()
        self._figures = Path(self._scratch.name) / "figures.jsonl"
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(ROOT), before] if before else [str(ROOT)])
        self.environment = {**os.environ, **QUIET, "PYTHONPATH": path, "GPU_FIGURES": str(self._figures)}
        folder.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")

    def check_machine(self) -> bool:
        """Print the machine description and the missing requirements; return whether any step can run."""
        into = Path(self._scratch.name) / "found.json"
        step = Step("versions and interfaces", LOOKING, ("-m", "tests.gpu.machine_info", str(into)))
        self._record(step.name, run_step(step, step.limit, self.environment, self.log))
        try:
            self.found = json.loads(into.read_text())
        except (OSError, ValueError):
            print(
                f"The machine could not be described; {step.name}: {self.outcomes[step.name].why}\n"
                f"{self._last_lines(0)}"
            )
            return False
        self.missing = machine_info.missing_parts(self.found, self.fake)
        self.environment[TWO_BY] = way_for_version(self.found["nccl"].get("version", 0))
        print(
            "On the fake device: the results show nothing about a real device."
            if self.fake
            else machine_info.format_description(self.found)
        )
        for name, why in self.missing.items():
            optional = " (optional)" if name in machine_info.OPTIONAL else ""
            print(f"missing{optional}: {name}: {why}")
        return not any(name in self.missing for name in machine_info.VITAL)

    def run_steps(self, chosen: Sequence[Step]) -> None:
        """Run the chosen steps whose requirements are met, until the time is used up."""
        for step in chosen:
            where = self.log.stat().st_size
            outcome = self._reason_not_to_run(step)
            if outcome is None:
                limit = min(step.limit, self.until - monotonic())
                print(f"\n== {step.name}, at most {limit:.0f} s", flush=True)
                outcome = run_step(step, limit, self.environment, self.log)
                print(self._last_lines(where, SHOWN[outcome.state == "passed"]))
            self._record(step.name, outcome)
            print(f"{step.name}: {outcome.state}, {outcome.seconds:g} s {outcome.why}", flush=True)

    def _reason_not_to_run(self, step: Step) -> Outcome | None:
        """Return an outcome with the reason why a step cannot run, or None if the step can run."""
        if lacking := [name for name in step.needs if name in self.missing]:
            state = "left out" if set(lacking) <= {*machine_info.OPTIONAL} else "not run"
            return Outcome(state, why=f"missing: {', '.join(lacking)}")
        if step.after is not None and not self._passed(step.after):
            return Outcome("not run", why=f"{step.after} has not passed")
        return Outcome("not run", why="no time was left") if self.until - monotonic() < LEAST else None

    def _passed(self, name: str) -> bool:
        return name not in self.outcomes or self.outcomes[name].state == "passed"

    def _record(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        self.write()

    def _last_lines(self, where: int, lines: int = SHOWN[0]) -> str:
        return "\n".join(self.log.read_bytes()[where:].decode(errors="replace").splitlines()[-lines:])

    def figures(self) -> list[dict[str, Any]]:
        """Return the measurements that the steps have recorded."""
        lines = self._figures.read_text().splitlines() if self._figures.exists() else []
        return [json.loads(line) for line in lines]

    def write(self) -> None:
        """Write the current results to `results.json`."""
        results = {
            "fake": self.fake,
            "found": self.found,
            "missing": self.missing,
            "steps": [{"name": name, **outcome._asdict()} for name, outcome in self.outcomes.items()],
            "figures": self.figures(),
        }
        (self.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")

    def print_summary(self) -> bool:
        """Print the measurements and the outcomes of all steps; return whether no step failed."""
        print("\n== figures")
        for each in self.figures():
            print(f"{each['world']:5}  {each['name']}: {each['value']}")
        print("\n== steps")
        for name, outcome in self.outcomes.items():
            print(f"{name:26}  {outcome.state:8}  {outcome.seconds:6.1f} s  {outcome.why}")
        return not any(outcome.state in FAILURES for outcome in self.outcomes.values())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self._scratch.cleanup()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the GPU tests in under 8 minutes.")
    parser.add_argument("folder", nargs="?", default="gpu-figures", type=Path, help="for results and figures")
    parser.add_argument("--fake", action="store_true", help="run the same steps on the fake device")
    parser.add_argument("--only", metavar="STEPS", help="names of the steps to run, separated by commas")
    args = parser.parse_args(words)
    # Disable core dumps. Otherwise, SIGABRT would dump a process that uses CUDA, which takes minutes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with Run(args.folder.resolve(), args.fake) as run:
        if not run.check_machine():
            print("No step was run. To test the steps without a device: python tests/gpu/run.py --fake")
            return 2
        found = all_steps(args.fake, run.folder, machine_info.plugin_options(run.found), run.missing)
        only = args.only.split(",") if args.only else [step.name for step in found]
        if unknown := set(only) - {step.name for step in found}:
            parser.error(f"--only: unknown steps: {', '.join(sorted(unknown))}")
        run.run_steps([step for step in found if step.name in only])
        return int(not run.print_summary())


if __name__ == "__main__":
    sys.exit(main())
