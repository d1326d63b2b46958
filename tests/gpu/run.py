"""All that needs a GPU, in under 8 minutes: ``make gpu``, or ``python tests/gpu/run.py [--fake] [FOLDER]``.

First it is said what is missing. Every step is a process with a limit of its own; one that hangs leaves the stacks of
its threads, and what it leaves running is killed. Nothing is installed, and nothing is fetched. FOLDER (default:
``gpu-figures``) gets ``results.json``, which grows with every step; ``log.txt``, all that the steps have said; and what
NCCL and the benchmark have to say. ``--fake`` runs the same steps on the fake device, to see that they run.

The exit status is 0 if all has passed, 1 if anything failed, hung, or lacked what it needs, and 2 if nothing was run.
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

from tests.gpu import found as things  # noqa: E402
from tests.gpu.on_device.two import TWO_BY, way  # noqa: E402
from tests.gpu.steps import Ended, Step, carry_out, steps  # noqa: E402

#: Seconds for everything, and for looking what there is.
WHOLE, LOOKING = 470.0, 60.0
#: Seconds below which there is no use in beginning a step.
LEAST = 5.0
#: Lines of a step's output that are shown: of one that has failed, and of one that has passed.
SHOWN = (60, 3)
#: NCCL would open a port.
QUIET = {"NCCL_RAS_ENABLE": "0", "NCCL_DEBUG": "WARN"}
FAILURES = ("failed", "hung", "not run")


class Run:
    """One run of the steps.

    Args:
        folder: for what they write.
        fake: on the fake device.
    """

    def __init__(self, folder: Path, fake: bool) -> None:
        self.until = monotonic() + WHOLE
        self.folder, self.fake, self.log = folder, fake, folder / "log.txt"
        self.ended: dict[str, Ended] = {}
        self.found: dict[str, Any] = {}
        self.missing: dict[str, str] = {}
        self._scratch = tempfile.TemporaryDirectory()
        self._figures = Path(self._scratch.name) / "figures.jsonl"
        before = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(ROOT), before] if before else [str(ROOT)])
        self.environment = {**os.environ, **QUIET, "PYTHONPATH": path, "GPU_FIGURES": str(self._figures)}
        folder.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")

    def look(self) -> bool:
        """Say what there is and what is missing; return whether anything can be run."""
        into = Path(self._scratch.name) / "found.json"
        step = Step("versions and interfaces", LOOKING, ("-m", "tests.gpu.found", str(into)))
        self._note(step.name, carry_out(step, step.limit, self.environment, self.log))
        try:
            self.found = json.loads(into.read_text())
        except (OSError, ValueError):
            print(f"What there is could not be found out; {step.name}: {self.ended[step.name].why}\n{self._said(0)}")
            return False
        self.missing = things.missing(self.found, self.fake)
        self.environment[TWO_BY] = way(self.found["nccl"].get("version", 0))
        print("The fake device: nothing here says anything of a real one." if self.fake else things.told(self.found))
        for name, why in self.missing.items():
            optional = ", which may be" if name in things.OPTIONAL else ""
            print(f"missing{optional}: {name}: {why}")
        return not any(name in self.missing for name in things.VITAL)

    def go(self, chosen: Sequence[Step]) -> None:
        """Run steps, as far as there is what they need, and time."""
        for step in chosen:
            where = self.log.stat().st_size
            ended = self._hindered(step)
            if ended is None:
                limit = min(step.limit, self.until - monotonic())
                print(f"\n== {step.name}, at most {limit:.0f} s", flush=True)
                ended = carry_out(step, limit, self.environment, self.log)
                print(self._said(where, SHOWN[ended.state == "passed"]))
            self._note(step.name, ended)
            print(f"{step.name}: {ended.state}, {ended.seconds:g} s {ended.why}", flush=True)

    def _hindered(self, step: Step) -> Ended | None:
        """Return why a step is not run, if it is not."""
        if lacking := [name for name in step.needs if name in self.missing]:
            state = "left out" if set(lacking) <= {*things.OPTIONAL} else "not run"
            return Ended(state, why=f"there is no {' and no '.join(lacking)}")
        if step.after is not None and not self._passed(step.after):
            return Ended("not run", why=f"{step.after} has not passed")
        return Ended("not run", why="no time was left") if self.until - monotonic() < LEAST else None

    def _passed(self, name: str) -> bool:
        return name not in self.ended or self.ended[name].state == "passed"

    def _note(self, name: str, ended: Ended) -> None:
        self.ended[name] = ended
        self.write()

    def _said(self, where: int, lines: int = SHOWN[0]) -> str:
        return "\n".join(self.log.read_bytes()[where:].decode(errors="replace").splitlines()[-lines:])

    def figures(self) -> list[dict[str, Any]]:
        """Return what the steps have measured."""
        lines = self._figures.read_text().splitlines() if self._figures.exists() else []
        return [json.loads(line) for line in lines]

    def write(self) -> None:
        """Write down what is known by now."""
        told = {
            "fake": self.fake,
            "found": self.found,
            "missing": self.missing,
            "steps": [{"name": name, **ended._asdict()} for name, ended in self.ended.items()],
            "figures": self.figures(),
        }
        (self.folder / "results.json").write_text(json.dumps(told, indent=1) + "\n")

    def show(self) -> bool:
        """Print figures and how the steps ended; return whether all is well."""
        print("\n== figures")
        for each in self.figures():
            print(f"{each['world']:5}  {each['name']}: {each['value']}")
        print("\n== steps")
        for name, ended in self.ended.items():
            print(f"{name:26}  {ended.state:8}  {ended.seconds:6.1f} s  {ended.why}")
        return not any(ended.state in FAILURES for ended in self.ended.values())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self._scratch.cleanup()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="All that needs a GPU, in under 8 minutes.")
    parser.add_argument("folder", nargs="?", default="gpu-figures", type=Path, help="for results and figures")
    parser.add_argument("--fake", action="store_true", help="run the same steps on the fake device")
    parser.add_argument("--only", metavar="STEPS", help="run only those with these names, with commas in between")
    args = parser.parse_args(words)
    # Of a process with CUDA, what it leaves when it is ended to have its stacks would take minutes to write.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with Run(args.folder.resolve(), args.fake) as run:
        if not run.look():
            print("Nothing was run. To see that it runs, without a device: python tests/gpu/run.py --fake")
            return 2
        found = steps(args.fake, run.folder, things.plugins(run.found), run.missing)
        only = args.only.split(",") if args.only else [step.name for step in found]
        if unknown := set(only) - {step.name for step in found}:
            parser.error(f"--only: no step is called {', '.join(sorted(unknown))}")
        run.go([step for step in found if step.name in only])
        return int(not run.show())


if __name__ == "__main__":
    sys.exit(main())
