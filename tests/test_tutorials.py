"""The programs of the tutorials print the shown output, and continue after a killed process."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import aiocoll
from aiocoll import ProcessGroup

from .pages import code, commands, execute, files, shell, write

TRAINING = "docs/training.md"
SERVER = "docs/parameter-server.md"
#: A module with the function `die`, which kills its process at the 50th call with a true argument, once per test.
DEATH = """
import os

left = [50]


def die(mine):
    left[0] -= mine
    if left[0] == 0 and not os.path.exists("killed"):
        open("killed", "x").close()
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.torch
def test_tutorial_ranks_train_a_model(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    write(files(TRAINING), tmp_path)
    script, _ = commands(TRAINING)
    output = shell(script, tmp_path)
    lines = sorted(output.splitlines())
    found = [re.fullmatch(r"(.*) \(([0-9a-f]{8})\), error (0\.0\d+)", line) for line in lines]
    shown = code(TRAINING, "The program", language="text").splitlines()
    assert [match and match[1] for match in found] == [line.split(" (")[0] for line in shown], output
    assert len({(match[2], match[3]) for match in found if match}) == 1, output


def test_training_program_computes_in_a_thread() -> None:
    """Check that `backward` runs in a thread, since it would block the event loop in every step."""
    tree = ast.parse(files(TRAINING)["train.py"])
    computing = {
        function.name: isinstance(function, ast.AsyncFunctionDef)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and ".backward()" in ast.unparse(function)
    }
    assert computing == {"backward": False}
    assert "await asyncio.to_thread(backward, " in ast.unparse(tree)


@pytest.mark.slow
def test_tutorial_workers_train_with_a_parameter_server(tmp_path: Path) -> None:
    write(files(SERVER), tmp_path)
    first, second, _, fourth = commands(SERVER)
    assert shell(first, tmp_path) == code(SERVER, "The program", language="text")
    assert code(SERVER, "A worker that dies", language="text") in shell(second, tmp_path)
    assert shell(fourth, tmp_path) == code(SERVER, "Sparse gradients", language="text")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [None, "work", "serve"])
def test_tutorial_workers_can_join_a_running_parameter_server(tmp_path: Path, port: int, victim: str | None) -> None:
    """Kill no process, the server, or an additional worker, after 50 gradients."""
    script = commands(SERVER)[2]
    program = files(SERVER)["joining.py"].replace("29500", str(port))
    place = "    x = random.normal"
    if victim == "work":
        script = script.replace(
            "python joining.py work", "VICTIM=1 python joining.py work 100\npython joining.py work", 1
        )
    elif victim == "serve":
        script = "VICTIM=1 " + script.replace("work ", "work 1000000")
        place = "            for name, gradient"
    if victim is not None:
        condition = "'VICTIM' in os.environ" + (" and pg.size() == 3" if victim == "serve" else "")
        before, line, after = program.partition(place)
        death = f"{' ' * (len(line) - len(line.lstrip()))}die({condition})\n"
        program = f"import os\nfrom death import die\n{before}{death}{line}{after}"
    write({"joining.py": program, "death.py": DEATH}, tmp_path)
    output = shell(script, tmp_path)
    shown = code(SERVER, "Workers that come later", language="text")
    assert ("the server is gone\n" if victim == "serve" else shown) in output, output
    assert (tmp_path / "killed").exists() == (victim is not None)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_tutorial_processes_continue_after_a_server_or_worker_is_killed(tmp_path: Path, victim: int) -> None:
    """Kill a process during its first steps, so that the launcher starts a replacement."""
    programs = files(SERVER)
    file, line = ("lasting.py", "            state[") if victim == 0 else ("server.py", "        x = random")
    before, after = programs[file].split(line, 1)
    death = " " * (len(line) - len(line.lstrip())) + f"die(pg.rank() == {victim})\n"
    programs[file] = f"from death import die\n{before}{death}{line}{after}"
    write(programs | {"death.py": DEATH}, tmp_path)
    output = shell(commands(SERVER)[1], tmp_path)
    assert (tmp_path / "killed").exists()
    shown = code(SERVER, "A worker that dies", language="text")
    assert (shown if victim else shown.replace("[0]", "[1]")) in output, output


@pytest.mark.ranks(3)
async def test_tutorial_workers_exchange_parts_with_several_servers(pg: ProcessGroup) -> None:
    """Let ranks 0 and 1 be servers, which double their part of the gradient and send it back."""
    names = await execute(code(SERVER, "Several servers"), aiocoll=aiocoll, np=np, WEIGHTS=1)
    if pg.rank() == 2:
        weights = np.zeros(5)
        await names["exchange"](pg, 2, np.arange(5.0), weights)
        assert weights.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    else:
        async for worker, part in pg.incoming():
            await pg.send(2 * part, worker, 1)
            break
