"""The code examples of the guide and of short pages, each run in the situation that the page describes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocoll
import aiocoll.distributed as dist
from aiocoll import CollectiveMismatchError, ProcessGroup, ReduceOp
from aiocoll.security.names import WrongCertificateError, check_names, rank_name
from aiocoll.security.tls import make_own_contexts
from aiocoll.security.tls_trouble import NOT_YET, explain_tls_error
from aiocoll.security.user_ca import prepare
from aiocoll.store import HashStore, StoreServer

from .certificates import Authority
from .pages import ROOT, code, commands, execute, files, is_shown, shell, write
from .ports import free_port
from .ranks import run_ranks
from .redis_server import redis_server

pytest_plugins = ["pytester"]

GRADIENTS = 10
OUTLIVING = "A store that outlives every rank"


def address(port: int) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


async def test_all_rendezvous_examples_of_the_guide_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each example with one rank on this host, after replacing world size and addresses."""
    for name, value in address(free_port()).items():
        monkeypatch.setenv(name, value)
    ways = code("docs/guide.md", "Groups").replace("world_size=4", "world_size=1").replace("/shared", str(tmp_path))
    *ways, last = ways.replace("10.0.0.1:29500", f"127.0.0.1:{free_port()}").splitlines()
    assert len(ways) == 4
    for way in ways:
        fragment = f"{way.split('  #')[0]}\n    size = await pg.allreduce(1)"
        assert (await execute(fragment, aiocoll=aiocoll, store=HashStore()))["size"] == 1
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    pg = (await execute(last, aiocoll=aiocoll))["pg"]
    assert await pg.allreduce(1) == 1
    await pg.shutdown()


def test_meeting_example_of_the_guide_runs(tmp_path: Path) -> None:
    write({"sums.py": files("docs/guide.md")["sums.py"]}, tmp_path)
    assert shell(f"{sys.executable} sums.py", tmp_path) == "[6, 6, 6, 6]\n"


async def test_blocking_example_of_the_guide_works() -> None:
    async with aiocoll.Meeting(1) as meeting:
        block = code("docs/guide.md", "Meetings", 2)
        names = {"aiocoll": aiocoll, "ticket": meeting.ticket(), "x": np.ones(2), "y": np.ones(3)}
        space = await asyncio.to_thread(run_sync, block, names)
    assert (space["total"].tolist(), space["later"].result().tolist()) == ([1.0] * 2, [1.0] * 3)


def run_sync(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(block, names)
    return names


@pytest.mark.parametrize(
    "victim", [2, pytest.param(0, marks=pytest.mark.slow), pytest.param(None, marks=pytest.mark.soak)]
)
def test_program_of_the_elastic_page_survives_a_killed_rank(victim: int | None, tmp_path: Path) -> None:
    programs = files("docs/elastic.md")
    if victim is not None:
        death = (
            f'    if state["step"] == 50 and pg.rank() == {victim} and not os.path.exists("killed"):\n'
            '        open("killed", "x").close()\n'
            "        os.kill(os.getpid(), 9)\n"
        )
        begin, end = programs["sums.py"].split("    gradient", 1)
        programs["sums.py"] = f"import os\n{begin}{death}    gradient{end}"
    write(programs, tmp_path)
    assert shell("python supervisor.py", tmp_path).count("[5050. 5050. 5050.]") == 4


async def test_store_example_of_the_guide_passes_the_store_contract() -> None:
    store, use = code("docs/guide.md", "Writing a store"), code("docs/guide.md", "Writing a store", 2)
    assert (ROOT / "tests/store/minimal_store.py").read_text().endswith(f'"""\n\n{store}')
    space = await execute(store)
    first, then = use.replace("...", "sizes.append(await pg.allreduce(1))").split("\n", 1)
    main = f"{first}\nasync def main(rank, sizes):\n{textwrap.indent(then, '    ')}"
    space = await execute(main, aiocoll=aiocoll, **space)
    sizes: list[int] = []
    await asyncio.gather(*(space["main"](rank, sizes) for rank in range(2)))
    assert sizes == [2, 2]


async def test_redis_example_of_the_guide_works(tmp_path: Path) -> None:
    use = code("docs/guide.md", "On a Redis server").replace("...", "sizes.append(await pg.allreduce(1))")
    user = code("docs/security.md", "What a Redis server sees", 1, "text")
    with redis_server(tmp_path, Authority(tmp_path).make("DNS:localhost")) as server:
        server.execute(*user.split())
        use = use.replace("redis://10.0.0.9:6379/0", server.url).replace("ca.pem", server.ca)
        use = use.replace("redis.internal/0", server.tls_url.removeprefix("rediss://")).replace(
            "world_size=4", "world_size=2"
        )
        main = f"async def main(rank, sizes):\n{textwrap.indent(use, '    ')}"
        space = await execute(main, aiocoll=aiocoll)
        sizes: list[int] = []
        await asyncio.gather(*(space["main"](rank, sizes) for rank in range(2)))
        assert sizes == [2, 2, 2, 2]
        assert server.execute("EXISTS", "aiocoll:train-17") == "1"


@pytest.mark.ranks(2)
async def test_later_await_example_of_the_guide_works(pg: ProcessGroup) -> None:
    x = np.ones(3)
    space = await execute(code("docs/guide.md", "Works"), pg=pg, x=x)
    assert space["work"].done()
    assert x.tolist() == [2.0] * 3


@pytest.mark.ranks(2)
async def test_key_example_of_the_guide_works(pg: ProcessGroup) -> None:
    names = [f"layer{number}" for number in range(GRADIENTS)]
    gradients = {name: np.ones(2) for name in (reversed(names) if pg.rank() else names)}
    await execute(code("docs/guide.md", "Keys"), pg=pg, asyncio=asyncio, gradients=gradients)
    assert all(gradient.tolist() == [2.0, 2.0] for gradient in gradients.values())


@pytest.mark.ranks(2)
async def test_message_example_of_the_guide_works(pg: ProcessGroup) -> None:
    calls, server = code("docs/guide.md", "Messages").replace("    ...", "    break").split("\nasync for")
    other = 1 - pg.rank()
    x, y = np.full(2, pg.rank()), np.full(2, 7)
    await execute(calls, aiocoll=aiocoll, pg=pg, x=x, y=y)
    sending = pg.send_object("last", other)
    space = await execute(f"async for{server}", pg=pg)
    await sending
    assert (y.tolist(), space["source"], space["message"]) == ([other, other], other, "last")


@pytest.mark.ranks(2)
async def test_grid_and_plan_examples_of_the_guide_work(pg: ProcessGroup) -> None:
    x = np.ones(1)
    space = await execute(code("docs/guide.md", "Grids"), pg=pg, np=np, x=x)
    await execute(code("docs/guide.md", "Plans"), pg=pg, x=(planned := np.ones(2)))
    here = space["row"], space["column"], space["above"], space["below"]
    assert here == ((1, 0, 0, -2) if pg.rank() else (0, 0, -2, 1))
    assert (space["rows"].dims, space["u"].shape) == ((1,), (12, 22))
    assert (x.tolist(), planned.tolist()) == ([1.0], [4.0, 4.0])


async def test_hook_example_of_the_guide_reports_a_slow_operation(capsys: pytest.CaptureFixture[str]) -> None:
    """Call the example's hook with an operation that took more than a second."""

    class Info:
        op, group, seconds, nbytes, transport = "ALLREDUCE", "world:0", 1.5, 8, "memory"

    async def body(pg: ProcessGroup) -> Any:
        block = code("docs/guide.md", "Hooks").replace("\n...\n", "\nawait pg.allreduce(1)\n")
        return (await execute(block, aiocoll=aiocoll, pg=pg))["Slow"]

    (slow,) = await run_ranks(1, body)
    slow().on_end(Info)
    assert capsys.readouterr().out == "ALLREDUCE of world:0: 1.5 s for 8 bytes over memory\n"


def test_pytest_examples_of_the_guide_pass(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    marked = f"import pytest\n{code('docs/guide.md', 'Tests', 2)}"
    pytester.makepyfile(test_function=code("docs/guide.md", "Tests"), test_marked=marked)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    result = pytester.runpytest_subprocess("-p", "asyncio", "-p", "aiocoll.testing.plugin", "-W", "error")
    result.assert_outcomes(passed=4)


@pytest.mark.ranks(2)
async def test_first_example_of_the_coalescing_page_computes_the_described_results(pg: ProcessGroup) -> None:
    gradients = [np.full(3, pg.rank()) for _ in range(GRADIENTS)]
    step = np.array([7 - 7 * pg.rank()])
    space = await execute(
        code("docs/coalescing-and-keys.md", "Coalescing"),
        pg=pg,
        ReduceOp=ReduceOp,
        loss=1.5,
        gradients=[gradient.astype(float) for gradient in gradients],
        step=step,
    )
    assert space["loss"].result() == 3.0
    assert all(gradient.tolist() == [0.5] * 3 for gradient in space["gradients"])
    assert step == 7


@pytest.mark.ranks(2)
async def test_task_and_key_examples_of_the_coalescing_page_work(pg: ProcessGroup) -> None:
    class Layer:
        async def reduce(self, pg: ProcessGroup) -> None:
            self.sum = await pg.allreduce(1)

    layers = [Layer() for _ in range(GRADIENTS)]
    await execute(code("docs/coalescing-and-keys.md", "Coalescing", 2), pg=pg, asyncio=asyncio, layers=layers)
    assert [layer.sum for layer in layers] == [2] * GRADIENTS
    gradient = np.ones(2)
    await execute(code("docs/coalescing-and-keys.md", "Keys"), pg=pg, gradient=gradient, name="layer3")
    assert gradient.tolist() == [2.0, 2.0]


@pytest.mark.ranks(2)
async def test_coalescing_page_shows_the_mismatch_error_of_blocks(pg: ProcessGroup) -> None:
    async def differ() -> None:
        async with pg.coalescing():
            for op in [*[ReduceOp.SUM] * 5, (ReduceOp.SUM, ReduceOp.MAX)[pg.rank()]]:
                pg.allreduce(np.ones(4), op)

    with pytest.raises(CollectiveMismatchError) as caught:
        await differ()
    assert is_shown(code("docs/coalescing-and-keys.md", "Coalescing", language="text"), str(caught.value))


async def test_estimate_example_of_the_metrics_page_works(capsys: pytest.CaptureFixture[str]) -> None:
    async def body(pg: ProcessGroup) -> None:
        gradients = np.ones(1000)
        await execute(code("docs/metrics.md", "Estimating time"), pg=pg, gradients=gradients)
        assert gradients.tolist() == [1.0] * 1000

    await run_ranks(1, body)
    total, *calls = capsys.readouterr().out.splitlines()
    assert float(total) == pytest.approx(sum(float(call.split()[-1]) for call in calls))
    assert [call.split()[:2] for call in calls] == [["ALLREDUCE", "8000"], ["BARRIER", "0"]]


async def test_store_example_of_the_reliability_page_outlives_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiocoll.rendezvous.new_group._keys", {})
    key = b"of this test and no other"
    server = code("docs/reliability.md", OUTLIVING).replace('"10.0.0.1", 29500', '"127.0.0.1", 0')
    space = await execute(server, aiocoll=aiocoll, key=key)
    (tmp_path / "job.key").touch(mode=0o600)
    (tmp_path / "job.key").write_bytes(key)
    monkeypatch.chdir(tmp_path)
    line = code("docs/reliability.md", OUTLIVING, language="sh")
    line = line.replace("10.0.0.1", space["host"]).replace("29500", str(space["port"]))
    for pair in [*line.split(), "RANK=0", "WORLD_SIZE=1"]:
        monkeypatch.setenv(*pair.split("="))
    async with aiocoll.new_group(init_method="env://") as pg:
        assert await pg.allreduce(1) == 1
    await space["server"].aclose()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
async def test_openssl_certificates_of_the_security_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the certificates of the page for four ranks on two simulated hosts, and for the store on host 0."""
    monkeypatch.chdir(tmp_path)
    shell(code("docs/security.md", "Making certificates", language="sh"), tmp_path)
    assert [os.stat(name).st_mode & 0o777 for name in ("ca.key", "host0.key", "host1.key")] == [0o600] * 3
    first, second = (
        {"tls_ca": "ca.pem", "tls_certificate": f"host{number}.pem", "tls_key": f"host{number}.key"}
        for number in range(2)
    )
    key = b"of this test and no other"
    shared: Any = {"key": key, "job": "train", "encryption": "tls"}

    async def rank(rank: int, port: int) -> float:
        files: Any = first if rank < 2 else second
        options = aiocoll.GroupOptions(
            transport="tcp", encryption="tls", bind="127.0.0.1", job_id="train", job_key=key, **files
        )
        async with aiocoll.TCPStore("127.0.0.1", port, **shared, **files) as store:
            async with aiocoll.new_group(store=store, rank=rank, world_size=4, options=options) as pg:
                total: float = await pg.allreduce(1.5)
                await pg.barrier()
            return total

    server = StoreServer(**shared, **first)
    _, port = server.start()
    assert await asyncio.gather(*(rank(each, port) for each in range(4))) == [6.0] * 4
    await server.aclose()


def test_security_page_shows_the_certificate_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    authority = Authority(Path())
    names = [rank_name("train", rank) for rank in (2, 3)]
    with pytest.raises(ValueError, match="names") as caught:
        prepare(authority.make(*names, file="host1"), "train", rank_name("train", 0))
    assert is_shown(code("docs/security.md", "When a certificate is refused", 2, "text"), str(caught.value))
    with pytest.raises(ValueError, match="expired") as caught:
        prepare(authority.make(*names, file="host1", days=(-30, -6)), "train", rank_name("train", 2))
    assert is_shown(code("docs/security.md", "When a certificate is refused", 1, "text"), str(caught.value))
    error = ssl.SSLCertVerificationError()
    error.verify_code = NOT_YET
    message = str(explain_tls_error(error, make_own_contexts(), "10.0.0.2"))
    assert is_shown(code("docs/security.md", "When a certificate is refused", 3, "text"), message)
    with pytest.raises(WrongCertificateError) as refused:
        check_names(names, rank_name("train", 0), "the certificate of 10.0.0.2")
    assert is_shown(code("docs/security.md", "When a certificate is refused", 4, "text"), str(refused.value))


async def test_ported_example_of_the_porting_page_runs() -> None:
    """Run the ported program on four ranks that are tasks of this loop, without its init and destroy calls."""
    imported = await execute(code("docs/porting.md", "Porting from torch.distributed"))
    assert imported["dist"] is dist
    ported = code("docs/porting.md", "An example", 2)
    ported = ported.replace("    await dist.init_process_group()\n", "").replace("asyncio.run(main())\n", "")
    assert "async def main" in ported
    space = await execute(ported.replace("    await dist.destroy_process_group()\n", "    return gradient, names\n"))

    async def body(pg: ProcessGroup) -> None:
        gradient, names = await space["main"]()
        assert dist.is_initialized()
        assert gradient.tolist() == [1.5] * 1000
        assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]

    await run_ranks(4, body)


async def test_program_of_the_porting_page_with_a_thread_and_an_exit_stack_runs(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    results: dict[int, int] = {}
    given = {"asyncio": asyncio, "contextlib": contextlib, "threading": threading, "dist": dist, "results": results}
    space = await execute(code("docs/porting.md", "How programs begin and end"), **given)
    await asyncio.create_task(space["main"]())
    assert results == {0: 1}
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.torch
def test_torch_example_of_the_porting_page_runs(tmp_path: Path, port: int) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    before = code("docs/porting.md", "An example") + "\n"
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    (tmp_path / "before.py").write_text(before)
    script = f"RANK=1 {sys.executable} before.py & RANK=0 {sys.executable} before.py && wait $! && echo ran"
    assert "ran" in shell(script, tmp_path, **environ)


#: A program as described on docs/recorder.md: rank 2 is late, and finally waits for a message of rank 0.
TRAIN = """
import asyncio
import contextlib

import aiocoll


async def main():
    async with aiocoll.new_group() as pg:
        for step in range(16):
            if pg.rank() == 2:
                await asyncio.sleep(0.001)
            await pg.barrier()
            await pg.allgather_object(step)
        try:
            if pg.rank() == 2:
                await pg.recv_object(0, 5)
            else:
                await pg.barrier(timeout=1)
        except aiocoll.GroupError:
            pass


asyncio.run(main())
"""


@pytest.mark.slow
def test_recorder_page_shows_the_output_of_its_commands(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "train.py").write_text(TRAIN)
    (script,) = commands("docs/recorder.md")
    output = shell(script, tmp_path).replace(f"{tmp_path}/", "")
    shown, last = code("docs/recorder.md", "In short", language="text").rsplit("\n  last", 1)
    for line in (shown, f"  last{last}"):
        assert is_shown(line, output), output
    assert {path.name for path in tmp_path.iterdir()} >= {"timeline.png", "trace.json"}


@pytest.mark.slow
def test_command_line_page_shows_the_output_of_its_commands(tmp_path: Path) -> None:
    write(files("docs/command-line.md"), tmp_path)
    output = shell(commands("docs/command-line.md")[0], tmp_path)
    assert output == code("docs/command-line.md", "For programs", language="text")
