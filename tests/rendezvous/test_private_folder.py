"""Tests of the private directory in which ranks of one user create unix sockets."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from aiocoll import RendezvousError, new_group
from aiocoll.rendezvous.private_folder import private_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs unix users")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory that this test uses in place of /tmp."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    return folder


def test_private_folder_is_the_runtime_directory(runtime: Path) -> None:
    assert private_folder({"XDG_RUNTIME_DIR": str(runtime)}) == str(runtime)


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, None])
def test_private_folder_is_created_if_needed(temporary: Path, runtime: Path, mode: int | None) -> None:
    if mode is None:
        runtime.rmdir()
    else:
        runtime.chmod(mode)
    for _ in range(2):
        folder = private_folder({"XDG_RUNTIME_DIR": str(runtime)})
        assert folder == str(temporary / f"aiocoll-{os.geteuid()}")
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert private_folder({}) == folder


@pytest.mark.parametrize("what", ["of another user", "open to others", "a link", "a file", "nowhere"])
def test_folder_of_other_users_is_refused(temporary: Path, runtime: Path, what: str) -> None:
    folder = temporary / f"aiocoll-{os.geteuid()}"
    if what == "a link":
        folder.symlink_to(runtime)
    elif what == "a file":
        folder.touch(mode=0o600)
    elif what == "nowhere":
        runtime.rmdir()
        temporary.rmdir()
    else:
        folder.mkdir(mode=0o700)
        if what == "open to others":
            folder.chmod(0o711)
        elif os.geteuid() == 0:
            os.chown(folder, 65534, -1)
        else:
            pytest.skip("only root can change the owner of a folder")
    with pytest.raises(RendezvousError, match=rf"{folder} is not private to this user.*XDG_RUNTIME_DIR"):
        private_folder({})


async def test_ranks_of_torchrun_meet_in_the_private_folder(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a long name of a run, with / and more, " * 5)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    async with new_group():
        (place,) = os.listdir(runtime)
        assert stat.S_ISSOCK(os.stat(f"{runtime}/{place}").st_mode)
    assert os.listdir(runtime) == []
