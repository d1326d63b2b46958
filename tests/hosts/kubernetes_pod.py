"""What a kubelet does for a pod of docs/kubernetes.md, in namespaces of this process: mounts, and then commands.

Argument: in JSON, `secret`, `user`, and the commands of `init` containers and of the `container`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def mounted(path: str, group: int) -> Path:
    """Mount a volume in memory, which a group may write."""
    os.makedirs(path, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "volume", path], check=True)
    os.chown(path, 0, group)
    os.chmod(path, 0o2777)
    return Path(path)


def main(pod: dict[str, object]) -> None:
    user = str(pod["user"])
    mounted("/run", 0)
    secret = mounted("/run/secret", int(user))
    (secret / "..data").mkdir(mode=0o755)
    (secret / "..data/job.key").write_text(str(pod["secret"]))
    os.chown(secret / "..data/job.key", 0, int(user))
    os.chmod(secret / "..data/job.key", 0o440)
    (secret / "job.key").symlink_to("..data/job.key")
    mounted("/run/key", int(user))
    mounted("/dev/shm", int(user))
    subprocess.run(["mount", "-o", "remount,bind,ro", "/"], check=True)
    become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"]
    for command in pod["init"]:  # type: ignore[attr-defined]
        subprocess.run([*become, "--inh-caps", "-all", "--bounding-set", "-all", *command], check=True)
    # Where the tests are may be root's alone.
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    os.execvp("setpriv", [*become, *reads, *pod["container"]])  # type: ignore[misc]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
