"""The programs in `examples/`, run as the README and the quick start show, and the notebook."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from aiocoll import errors

from .pages import code

ROOT = Path(__file__).parents[1]
README = "README.md"
QUICK_START = "docs/quick-start.md"
#: Seconds within which an example program must end. The longest example takes a few seconds.
LIMIT = 120


def start(ranks: int, script: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # Disable asyncio's debug mode, which would slow the event loop that the demo measures.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
    return subprocess.run(
        [sys.executable, "-m", "aiocoll", "run", "-n", str(ranks), *options, str(script)],
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def run(ranks: int, script: Path) -> list[str]:
    """Run an example on some ranks; return its output lines sorted, since ranks print in any order."""
    done = start(ranks, script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return sorted(done.stdout.splitlines())


def test_hello_example_prints_the_output_that_readme_and_quick_start_show() -> None:
    command, shown = code(README, "Twelve lines", language="sh"), code(README, "Twelve lines", language="text")
    assert command == code(QUICK_START, "Two ranks", language="sh") == "aiocoll run -n 2 examples/hello.py\n"
    assert shown == code(QUICK_START, "Two ranks", language="text")
    assert run(2, ROOT / "examples" / "hello.py") == shown.splitlines()
    compile(code(README, "Twelve lines"), "README.md", "exec")


def test_survive_example_prints_the_output_that_readme_and_quick_start_show() -> None:
    script = ROOT / "examples" / "survive.py"
    assert textwrap.indent(code(README, "When a rank dies"), "    ") in script.read_text()
    command, shown = code(README, "When a rank dies", language="sh"), code(README, "When a rank dies", language="text")
    assert command == code(QUICK_START, "A rank dies", language="sh") == "aiocoll run -n 3 examples/survive.py\n"
    assert shown == code(QUICK_START, "A rank dies", language="text")
    done = start(3, script)
    assert done.returncode == 128 + signal.SIGKILL
    lines = shown.splitlines()
    assert sorted(done.stdout.splitlines()) == sorted(line for line in lines if line.startswith("["))
    assert done.stderr.splitlines() == [line for line in lines if line.startswith("aiocoll run:")]


def test_pytest_and_mismatch_examples_of_the_quick_start_print_the_shown_output(tmp_path: Path) -> None:
    (tmp_path / "test_sums.py").write_text(code(QUICK_START, "A test with ranks"))
    assert code(QUICK_START, "A test with ranks", language="sh") == "pytest -q test_sums.py\n"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sums.py"]
    tested = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert "1 passed" in tested.stdout
    script = tmp_path / "mismatch.py"
    script.write_text(code(QUICK_START, "Ranks disagree"))
    assert code(QUICK_START, "Ranks disagree", language="sh") == "aiocoll run -n 2 mismatch.py\n"
    done = start(2, script)
    assert done.returncode == 1
    assert " ".join(code(QUICK_START, "Ranks disagree", language="text").split()) in done.stderr


def test_reliability_page_lists_every_error_class() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert [name for name in errors.__all__ if f"`{name}`" not in page] == []


def test_demo_needs_no_optional_dependencies() -> None:
    """Check the demo's environment in the Makefile, and the imports of its program."""
    makefile = (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^\.venv-demo/installed:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert [line.split(" install ")[1] for line in recipe.splitlines() if " install " in line] == [
        "--quiet --editable ."
    ]
    tree = ast.parse((ROOT / "examples" / "learn_digits.py").read_text())
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    others = {name.split(".")[0] for name in modules} - sys.stdlib_module_names
    assert others <= {"aiocoll", "numpy", "msgpack", "uvloop"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_demo_ends_with_equal_weights_after_the_loss_of_a_rank(ranks: int) -> None:
    last = ranks - 1
    done = start(ranks, ROOT / "examples" / "learn_digits.py", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"aiocoll run: rank {last} was killed by SIGKILL; a newcomer is started in its place (restart 1 of 1)\n"
    )
    lines = [re.sub(r"\d\d:\d\d\.\d{3} ", "", line) for line in done.stdout.splitlines()]
    assert f"[{last}] rank {last} runs kill -9 on its own process" in lines
    first, loss, second, learnt, heading, *measured, load = (line for line in lines if line.startswith("[0]"))
    assert first == f"[0] {ranks} ranks learn from 1437 images; next step: 0"
    assert loss == f"[0] rank {last} of group 'world:0' is gone: its process is gone"
    assert second == f"[0] {ranks} ranks learn from 1437 images; next step: 150"
    accuracy = re.fullmatch(r"\[0\] all ranks have the same weights; accuracy on 360 other images: (.*)", learnt)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.9
    assert re.fullmatch(rf"\[0\] allreduce of {ranks} ranks on \d+ cores:", heading)
    assert re.match(r"\[0\] load: other processes (\d+\.\d\d cores|unknown), steal ", load)
    number = r" +([\d,.]+)"
    pattern = rf"\[0\]{number} B   median{number} µs   fastest tenth{number} µs"
    rows = [re.fullmatch(pattern, line) for line in measured]
    figures = [[float(number.replace(",", "")) for number in row.groups()] for row in rows if row is not None]
    assert [nbytes for nbytes, *_ in figures] == [8, 64 << 10, 16 << 20]
    assert all(0 < fastest <= median for _, median, fastest in figures)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "grid"), [(1, "1 x 1"), (4, "2 x 2"), (6, "3 x 2")])
def test_heat_example_on_a_grid_gives_the_result_of_one_rank(ranks: int, grid: str) -> None:
    """Check the printed heat; the example itself compares all cells with a computation on one rank."""
    assert run(ranks, ROOT / "examples" / "halo.py") == [f"[0] {grid} ranks: heat 399.125798, last change 0.001210"]


@pytest.mark.slow
def test_parameter_server_example_trains_while_workers_join_and_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    lines = run(3, ROOT / "examples" / "parameter_server.py")
    assert [line for line in lines if line.startswith(("[1]", "[2]"))] == [
        "[1] worker 1: 250 gradients of 719 images",
        "[2] worker 2: 500 gradients of 718 images",
    ]
    pattern = r"\[0\] worker (\d) (joins|leaves) at gradient (\d+): loss \d\.\d+, accuracy (0\.\d+)"
    events = [match.groups() for line in lines if (match := re.fullmatch(pattern, line))]
    assert sorted(event[:2] for event in events) == [("1", "joins"), ("1", "leaves"), ("2", "joins"), ("2", "leaves")]
    gradients, accuracy = max((int(event[2]), float(event[3])) for event in events)
    assert gradients == 750
    assert accuracy > 0.9
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()], "temporary files are left behind"


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
async def test_notebook_shows_the_output_of_its_cells(
    notebook: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the cells as IPython does, in one event loop and namespace; a last expression is output, too."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    for cell in cells(notebook):
        value = await interpret("".join(cell["source"]), names)
        output = capsys.readouterr().out + ("" if value is None else repr(value))
        shown = ["".join(each["data"]["text/plain"] if "data" in each else each["text"]) for each in cell["outputs"]]
        assert "".join(output.split()) == "".join("".join(shown).split()), cell["id"]
    assert any(cell["outputs"] for cell in cells(notebook))
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


def cells(notebook: Path) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]


async def interpret(cell: str, names: dict[str, Any]) -> Any:
    """Run a cell, which may use `await`; return the value of its last expression, or None."""
    *body, last = ast.parse(cell).body
    if isinstance(last, ast.Expr):
        await evaluate(compile(ast.Module(body, []), "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        return await evaluate(
            compile(ast.Expression(last.value), "<cell>", "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names
        )
    await evaluate(compile(ast.Module([*body, last], []), "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    return None


async def evaluate(code: CodeType, names: dict[str, Any]) -> Any:
    value = eval(code, names)
    return await value if code.co_flags & inspect.CO_COROUTINE else value
