"""The manifest of docs/kubernetes.md: its schema, and its commands in namespaces that stand in for pods."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.network import LIMIT, Network
from tests.pages import code, is_shown

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

NEEDED = "is not installed: pip install kubernetes-validate"
POD = str(Path(__file__).with_name("kubernetes_pod.py"))
SECRET = "of this test and no other\n"


@pytest.fixture
def manifest() -> list[Any]:
    yaml = pytest.importorskip("yaml", reason=f"PyYAML {NEEDED}")
    return list(yaml.safe_load_all(code("docs/kubernetes.md", "The job", language="yaml")))


def test_kubernetes_manifest_matches_the_schema(manifest: list[Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason=NEEDED)
    for resource in manifest:
        validate.validate(resource, validate.latest_version(), strict=True)
    service, job = manifest
    name, template = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert (service["metadata"]["name"], template["subdomain"]) == (name, name)
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["spec"]["clusterIP"] == "None"
    volumes = {volume["name"] for volume in template["volumes"]}
    for container in *template["initContainers"], *template["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert {variable["name"]: variable["value"] for variable in template["containers"][0]["env"]}[
        "AIOCOLL_WORLD_SIZE"
    ] == str(job["spec"]["completions"])


async def test_pods_meet_as_soon_as_their_names_resolve(
    manifest: list[Any], network: Callable[..., Network], ranks: Ranks, tmp_path: Path
) -> None:
    """Run the pods in namespaces that have the mounts, users and names of the manifest."""
    service, job = manifest
    name, template = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert service["spec"]["publishNotReadyAddresses"]
    size = job["spec"]["completions"]
    (rank,) = template["containers"]
    assert rank["command"][0] == "python"
    (tmp_path / "hello.py").write_text(code("README.md", "Twelve lines"))
    pod = {
        "user": template["securityContext"]["runAsUser"],
        "secret": SECRET,
        "init": [container["command"] for container in template["initContainers"]],
        "container": [sys.executable, str(tmp_path / rank["command"][1])],
    }
    net = network(size, pods=True)
    started = []
    for host in net.hosts:
        host.file("hosts", "127.0.0.1 localhost\n")
        kept = {key: text for key, text in ranks.environment.items() if not key.startswith(("XDG", "TMPDIR"))}
        variables = {variable["name"]: variable["value"] for variable in rank["env"]}
        set_by_kubernetes = {"HOSTNAME": f"{name}-{host.number}", "JOB_COMPLETION_INDEX": str(host.number)}
        started.append(
            await asyncio.create_subprocess_exec(
                *host.command(sys.executable, POD, json.dumps(pod)),
                env=kept | variables | set_by_kubernetes | {"AIOCOLL_WARN_AFTER": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        async with asyncio.timeout(LIMIT):
            waiting = [(await process.stderr.readline()).decode() for process in started if process.stderr is not None]
            shown = code("docs/kubernetes.md", "When pods do not meet", language="text")
            assert is_shown(shown, waiting[1]), (waiting, await started[1].stderr.read())
            for host in net.hosts:
                names = [f"{each.ipv4} {name}-{each.number}.{service['metadata']['name']}\n" for each in net.hosts]
                host.file("hosts", f"127.0.0.1 localhost\n{''.join(names)}")
            ended = [await process.communicate() for process in started]
    finally:
        for process in started:
            if process.returncode is None:
                process.kill()
                await process.communicate()
    everyone = [f"rank {number}" for number in range(size)]
    assert [(out.decode(), err.decode()) for out, err in ended] == [(f"[{10.0:.0f}. 10. 10.] {everyone}\n", "")] * size
