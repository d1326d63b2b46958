"""The documented commands for several hosts, carried out on several hosts."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from tests.hosts.network import Network
from tests.pages import code, files, shell, write

PAGE = "docs/several-hosts.md"
SHOWN = code(PAGE, "Starting", language="text")


async def outputs(net: Network, folder: Path, scripts: list[str]) -> list[str]:
    """Run a page's script on each host, with the real address instead of 10.0.0.1; return the outputs."""
    here = [re.sub(r"\b10\.0\.0\.1\b", net.hosts[0].ipv4, script) for script in scripts]
    started = [
        asyncio.to_thread(shell, shlex.join(host.command("sh", "-c", script)), folder)
        for host, script in zip(net.hosts, here, strict=True)
    ]
    return await asyncio.gather(*started)


async def test_launchers_on_several_hosts_run_the_job(network: Callable[[int], Network], tmp_path: Path) -> None:
    write({"ring.py": files("docs/several-hosts.md")["ring.py"]}, tmp_path)
    assert shell(code(PAGE, "Starting", 1, "sh"), tmp_path) == ""
    assert (tmp_path / "job.key").stat().st_mode & 0o777 == 0o600
    scripts = [code(PAGE, "Starting", 2, "sh"), code(PAGE, "Starting", 3, "sh")]
    assert await outputs(network(2), tmp_path, scripts) == [SHOWN, ""]


async def test_launcher_commands_of_the_documentation_work(network: Callable[[int], Network], tmp_path: Path) -> None:
    write({"script.py": files("docs/several-hosts.md")["ring.py"]}, tmp_path)
    key, *scripts = code("docs/guide.md", "Groups", language="sh").splitlines()
    assert shell(key, tmp_path) == ""
    assert await outputs(network(2), tmp_path, scripts) == [SHOWN, ""]


async def test_doctor_commands_of_the_documentation_find_no_problem(
    network: Callable[[int], Network], tmp_path: Path
) -> None:
    shell(code(PAGE, "Starting", 1, "sh"), tmp_path)
    script = code(PAGE, "Checking", language="sh")
    assert "--node-rank 0 " in script
    scripts = [script.replace("--node-rank 0 ", f"--node-rank {number} ") for number in range(3)]
    for output in await outputs(network(3), tmp_path, scripts):
        assert "would meet on these hosts" in output
        assert "PROBLEM" not in output


async def test_certificate_commands_of_the_documentation_work(
    network: Callable[[int], Network], tmp_path: Path
) -> None:
    write({"script.py": files("docs/several-hosts.md")["ring.py"]}, tmp_path)
    shell(code(PAGE, "Starting", 1, "sh"), tmp_path)
    shell(code("docs/security.md", "Making certificates", language="sh"), tmp_path)
    first = code("docs/security.md", "Making certificates", 2, "sh")
    scripts = [first, first.replace("host0.", "host1.").replace("--node-rank 0 ", "--node-rank 1 ")]
    assert await outputs(network(2), tmp_path, scripts) == ["[0] 4 ranks, sum 6000\n", ""]
