"""A stand-in for a kubelet that runs a pod of docs/kubernetes.md in the namespaces of this process.

It mounts the volumes and then runs the commands. The argument is JSON: `secret`, `user`, and the commands of the `init`
containers and of the `container`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def mount_volume(path: str, group: int) -> Path:
    """Mount a volume in memory that a group may write; return its path."""
    os.makedirs(path, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "volume", path], check=True)
    os.chown(path, 0, group)
    os.chmod(path, 0o2777)
    return Path(path)


def main(pod: dict[str, object]) -> None:
    user = str(pod["user"])
    mount_volume("/run", 0)
    secret = mount_volume("/run/secret", int(user))
    (secret / "..data").mkdir(mode=0o755)
    (secret / "..data/job.key").write_text(str(pod["secret"]))
    os.chown(secret / "..data/job.key", 0, int(user))
    os.chmod(secret / "..data/job.key", 0o440)
    (secret / "job.key").symlink_to("..data/job.key")
    mount_volume("/run/key", int(user))
    mount_volume("/dev/shm", int(user))
    subprocess.run(["mount", "-o", "remount,bind,ro", "/"], check=True)
    become = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--no-new-privs"]
    for command in pod["init"]:  # type: ignore[attr-defined]
        subprocess.run([*become, "--inh-caps", "-all", "--bounding-set", "-all", *command], check=True)
    # Keep the capability to read all files: the directory of the tests may be readable by root only.
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    os.execvp("setpriv", [*become, *reads, *pod["container"]])  # type: ignore[misc]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
