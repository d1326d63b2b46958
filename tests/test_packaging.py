"""Files and metadata of the source archive and the wheel, which are built from this repository.

`make release-check` installs the archives, which takes minutes.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests import public_names, release

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(TEXT)["project"]
VERSION = PROJECT["version"]
#: Files that only the source archive has, and repository files that the source archive omits.
MADE, LEFT_OUT = {"PKG-INFO"}, {".ci/run"}
BUILD = """
import sys
from hatchling.builders.{kind} import {name}
print(next(iter({name}(sys.argv[1]).build(directory=sys.argv[2], versions=["standard"]))))
"""


def build_archive(kind: str, source: Path, target: Path) -> Path:
    """Build an archive without the C accelerator, with the hatchling of this environment."""
    code = BUILD.format(kind=kind, name={"sdist": "SdistBuilder", "wheel": "WheelBuilder"}[kind])
    command = [sys.executable, "-c", code, str(source), str(target)]
    pure = {**os.environ, "AIOCOLL_NATIVE": "0"}
    done = subprocess.run(command, cwd=source, env=pure, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@contextmanager
def unpacked_source(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the source archive, and the folder in which the archive is unpacked."""
    archive = build_archive("sdist", ROOT, folder)
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    yield archive, folder / "unpacked" / f"aiocoll-{VERSION}"


def source_files() -> set[str]:
    """Return the repository files that git tracks, and new files that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    if listed.returncode or not listed.stdout:
        pytest.skip("needs a git clone, to know which files belong to the source")
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"aiocoll-{VERSION}.dist-info/METADATA").decode())


@pytest.mark.slow
def test_source_archive_is_complete_and_builds_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("hatch_fancy_pypi_readme")
    with unpacked_source(tmp_path) as (archive, folder):
        assert archive.name == f"aiocoll-{VERSION}.tar.gz"
        names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert names - MADE == source_files() - LEFT_OUT
        wheel = build_archive("wheel", folder, tmp_path)
    assert wheel.name == f"aiocoll-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archived:
        info = f"aiocoll-{VERSION}.dist-info/"
        inside = set(archived.namelist())
        modules = {name for name in names if name.startswith("aiocoll/") and not name.endswith((".c", ".h"))}
        assert inside == modules | {
            info + name for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
        }
        assert "aiocoll/py.typed" in inside
        assert archived.read(info + "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        metadata_fields = metadata(archived)
        entries = archived.read(info + "entry_points.txt").decode()
    assert (metadata_fields["Name"], metadata_fields["Version"], metadata_fields["License-Expression"]) == (
        "aiocoll",
        VERSION,
        "Apache-2.0",
    )
    assert (metadata_fields["Requires-Python"], metadata_fields["License-File"]) == (">=3.11", "LICENSE")
    assert metadata_fields["Description-Content-Type"] == "text/markdown"
    description = re.sub(r"\[([\w/.-]+)\]\(\1\)", r"`\1`", (ROOT / "README.md").read_text())
    assert metadata_fields.get_payload() == description
    assert "](" not in description
    assert set(metadata_fields.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert "aiocoll = aiocoll.cli.main:main" in entries
    assert "[pytest11]\naiocoll = aiocoll.testing.plugin" in entries


def test_package_version_equals_the_version_in_pyproject_toml() -> None:
    import aiocoll

    assert aiocoll.__version__ == VERSION


def test_metadata_classifiers_name_the_tested_python_versions() -> None:
    versions = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)}
    makefile = (ROOT / "Makefile").read_text()
    for target in ("matrix", "release-check"):
        assert set(re.findall(rf"\b{target}-(3\.\d+)", makefile)) == versions, target
    assert f">={min(versions, key=lambda each: int(each[2:]))}" == PROJECT["requires-python"]
    assert len(set(PROJECT["classifiers"])) == len(PROJECT["classifiers"])
    assert sorted(PROJECT["classifiers"]) == PROJECT["classifiers"]


def test_installation_page_lists_every_extra() -> None:
    section = TEXT.split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    said = {name: what for what, name in re.findall(r"^# (.*)\n(\w+) = \[", section, re.MULTILINE)}
    assert said.keys() == PROJECT["optional-dependencies"].keys()
    table = (ROOT / "docs" / "installation.md").read_text().split("| extra | for |\n|---|---|\n")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)) == said


def test_extra_testing_has_the_dependencies_of_the_pytest_plugin() -> None:
    extras = {name: set(needs) for name, needs in PROJECT["optional-dependencies"].items()}
    assert {re.split(r"[>=]", each)[0] for each in extras["testing"]} == {"pytest", "pytest-asyncio"}
    assert extras["testing"] <= extras["dev"]


def test_release_check_imports_every_public_module() -> None:
    assert set(public_names.MODULES) <= set(release.MODULES)


def test_release_check_installs_the_archives_for_this_machine(tmp_path: Path) -> None:
    names = [
        "aiocoll-9-cp311-abi3-manylinux_2_28_mips.whl",
        f"aiocoll-9-cp311-abi3-manylinux_2_28_{platform.machine()}.whl",
        "aiocoll-9-py3-none-any.whl",
        "aiocoll-9.tar.gz",
    ]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in release.installable(tmp_path)] == names[1:]


def test_release_check_without_archives_fails(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "dist"):
        with pytest.raises(SystemExit, match=r"no archive in .*; run make dist"):
            release.main(str(folder))


def test_release_check_runs_the_first_program_of_the_readme() -> None:
    program, printed = release.first_program()
    assert "aiocoll.new_group()" in program
    assert [line[:3] for line in printed] == ["[0]", "[1]"]


def test_release_checklist_names_existing_make_targets() -> None:
    page = (ROOT / "docs" / "releasing.md").read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([\w-]+)", page, re.MULTILINE))
    assert {"check", "matrix", "dist", "release-check"} <= named <= targets


def test_release_checklist_commits_before_the_checks_and_tags_after_them() -> None:
    page = (ROOT / "docs" / "releasing.md").read_text()
    steps = [
        "git commit ",
        "git status --short",
        "make matrix",
        "make dist\n",
        "make release-check",
        "git tag ",
        "upload",
    ]
    places = [page.index(step) for step in steps]
    assert places == sorted(places)
