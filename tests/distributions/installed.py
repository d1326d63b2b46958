"""Installation of the test distributions into a folder, with the metadata that pip would write."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("abacus", "rail", "shelf")


def install(name: str, site: Path) -> None:
    """Install the test distribution in the subfolder `name` into the folder `site`."""
    project = tomllib.loads((HERE / name / "pyproject.toml").read_text())["project"]
    for module in (HERE / name).glob("*.py"):
        shutil.copy2(module, site)
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{point} = {target}" for point, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
