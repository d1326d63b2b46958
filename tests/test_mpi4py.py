"""docs/coming-from-mpi4py.md: the named objects exist, the shown calls are valid, and the programs run."""

from __future__ import annotations

import argparse
import ast
import asyncio
import builtins
import importlib
import inspect
import re
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.cli import run
from aiocoll.rendezvous.launchers import OPEN_MPI, PMI, SLURM

from .pages import ROOT, code, commands, execute, files, shell, write

PAGE = "docs/coming-from-mpi4py.md"


def code_spans() -> set[str]:
    """Return the code spans in the middle column of all tables on the page, which shows aiocoll's calls."""
    found: set[str] = set()
    for line in (ROOT / PAGE).read_text().splitlines():
        if line.startswith("|"):
            _, _, middle, *_ = line.split("|")
            found.update(re.findall("`([^`]+)`", middle))
    return found


@pytest.mark.ranks(1)
async def test_names_and_arguments_on_the_mpi4py_page_exist(pg: ProcessGroup) -> None:
    texts = code_spans()
    assert len(texts) > 70
    for command in [text for text in texts if text.startswith("aiocoll run ")]:
        texts.remove(command)
        parser = argparse.ArgumentParser()
        run.configure(parser.add_subparsers().add_parser("run"))
        assert parser.parse_args(command.split()[1:]).nproc > 1
    await (work := pg.barrier())
    names = {name: importlib.import_module(name) for name in ("aiocoll", "asyncio", "socket", "time")}
    names |= vars(builtins) | {"np": np, "pg": pg, "work": work} | await execute(code(PAGE, "One-sided calls"))
    for text in texts:
        for node in ast.walk(ast.parse(text.removeprefix("await "))):
            if isinstance(node, ast.Attribute):
                eval(ast.unparse(node), names)
            elif isinstance(node, ast.Call):
                function = eval(ast.unparse(node.func), names)
                given = {str(keyword.arg): keyword.value for keyword in node.keywords}
                with suppress(ValueError):  # builtins may have no signature
                    inspect.signature(function).bind(*node.args, **given)


def test_ported_mpi4py_program_prints_the_same_result_as_a_serial_computation(tmp_path: Path) -> None:
    u = np.zeros(1 + 50 + 1)
    u[0] = 1.0
    for _ in range(100):
        change = np.diff(u, 2) / 4
        u[1:-1] += change
    shown = code(PAGE, "A program and its port", language="text")
    assert shown == f"[0] {abs(change).max():.6f} {u[1:-1].sum():.6f}\n"
    write(files(PAGE), tmp_path)
    alone, two = commands(PAGE)
    assert shell(two, tmp_path) == shown
    assert re.fullmatch(r"0\.\d{6} \d\.\d{6}\n", shell(alone, tmp_path))


@pytest.mark.ranks(4)
async def test_minloc_example_of_the_mpi4py_page_finds_the_lowest_rank(pg: ProcessGroup) -> None:
    space = await execute(code(PAGE, "MINLOC"), np=np, ReduceOp=ReduceOp)
    rank = pg.rank()
    values, ranks = await space["minloc"](pg, np.array([2.0, 3.0 - rank, rank % 2]))
    assert (values.tolist(), ranks.tolist()) == ([2.0, 0.0, 0.0], [0, 3, 0])


@pytest.mark.ranks(3)
async def test_one_sided_example_of_the_mpi4py_page_lets_all_ranks_access_a_window(pg: ProcessGroup) -> None:
    space = await execute(code(PAGE, "One-sided calls"))
    window = np.zeros(8)
    serving = asyncio.create_task(space["serve"](pg, window)) if pg.rank() == 0 else None
    before = [float(await space["call"](pg, 0, "accumulate", 5, 1.0)) for _ in range(10)]
    everyone = sorted(value for values in await pg.allgather_object(before) for value in values)
    assert everyone == [float(number) for number in range(30)]
    if pg.rank() == 2:
        assert await space["call"](pg, 0, "put", 3, 1.5) == 0.0
    await pg.barrier()
    assert await space["call"](pg, 0, "get", 3, None) == 1.5
    await pg.barrier()
    if serving is not None:
        assert window.tolist() == [0.0, 0.0, 0.0, 1.5, 0.0, 30.0, 0.0, 0.0]
        serving.cancel()


@pytest.mark.ranks(2)
async def test_dtypes_and_operations_of_the_mpi4py_page_work(pg: ProcessGroup) -> None:
    """Broadcast an array with a structured dtype, and reduce with logical operations."""
    x = np.zeros(2, [("mass", "f8"), ("charge", "i4")])
    x["charge"] = pg.rank()
    await pg.broadcast(x, root=1)
    assert x["charge"].tolist() == [1, 1]
    # Check logical operations.
    for op, expected in ((ReduceOp.LAND, [0.0, 0.0]), (ReduceOp.LOR, [1.0, 0.0]), (ReduceOp.LXOR, [1.0, 0.0])):
        assert (await pg.allreduce(np.array([pg.rank() * 2.5, 0.0]), op)).tolist() == expected


def test_launcher_variables_named_on_the_mpi4py_page_are_recognised() -> None:
    (row,) = (
        line for line in (ROOT / PAGE).read_text().splitlines() if "| `aiocoll.new_group()` | reads these" in line
    )
    variables = set(re.findall("`([A-Z_]+)`", row.split("|")[1]))
    assert variables == {launcher.rank for launcher in (OPEN_MPI, PMI, SLURM)}
