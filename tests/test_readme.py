"""README.md, the package map in docs/architecture.md, and the text of `help(aiocoll)`."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import aiocoll

from .layers import HOUSES, LAYERS, module

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
#: The package map of docs/architecture.md: the text block that contains the line `aiocoll/`.
MAP = next(
    text for text in re.findall(r"^```text\n(.*?)^```$", ARCHITECTURE, re.DOTALL | re.MULTILINE) if "aiocoll/\n" in text
)


def rows() -> list[tuple[Path, list[str]]]:
    """Return (folder, names) of each line of the package map; an indented line belongs to the folder above."""
    found: list[tuple[Path, list[str]]] = []
    folder = ROOT
    for line in MAP.splitlines():
        names = re.split(r" {3,}", line.strip())[0].split()
        inside = line.startswith(" ")
        found.append((folder if inside else ROOT, names))
        if not inside:
            folder = ROOT / names[0]
    return found


def mapped_paths() -> list[Path]:
    """Return the paths of all files and folders that the package map lists."""
    return [folder / name for folder, names in rows() for name in names]


def test_paths_in_the_package_map_exist_and_are_unique() -> None:
    wrong = {str(path.relative_to(ROOT)) for path in mapped_paths() if not path.exists()}
    assert not wrong
    assert len(set(mapped_paths())) == len(mapped_paths())


def test_package_map_lists_all_top_level_modules_in_layer_order() -> None:
    """Check that each line lists modules of one layer, and that lower layers are further down."""
    package = ROOT / "aiocoll"
    layers = [{module(name) for name in names} for folder, names in rows() if folder == package]
    assert {name for names in layers for name in names} == set().union(*LAYERS)
    heights = [{height for height, layer in enumerate(LAYERS) if layer & names} for names in layers]
    assert {len(each) for each in heights} == {1}
    assert heights == sorted(heights, key=max, reverse=True)
    for line in MAP.splitlines():
        if line.startswith("  "):
            names, house = line[:40].split(), line[40:].split()[0]
            assert {module(name) for name in names} <= HOUSES[house], line
    folders = {path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    tracked = {path for path in folders if any(path.rglob("*.py")) or any(path.glob("*.md"))}
    assert {path.name for path in tracked - set(mapped_paths())} <= {"build", "dist", "gpu-figures", "planted-figures"}


def test_readme_has_at_most_140_lines() -> None:
    assert len(README.splitlines()) <= 140


def test_paths_named_in_the_readme_exist() -> None:
    """Check the paths below docs/, examples/, bench/ and tests/ that the README names."""
    named = set(re.findall(r"(?<![\w/.-])((?:docs|examples|bench|tests)/[\w./-]*\w)", README))
    assert len(named) > 10
    assert {name for name in named if "/.venvs" not in name and not (ROOT / name).exists()} == set()


def test_readme_links_lead_to_files_with_the_shown_path() -> None:
    """Check all links: a package index shows only their texts, since it has no other files of the repository."""
    links = re.findall(r"\[([^\]]+)\]\(([^)]*)\)", README)
    assert len(links) > 20
    assert [(text, target) for text, target in links if text != target or not (ROOT / target).is_file()] == []


def test_first_commands_of_the_readme_are_make_demo_and_make_test() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert [line.split("  ")[0] for line in blocks[0].splitlines()] == ["make demo", "make test"]
    assert "pip install .\n" in blocks


def test_help_of_the_package_lists_all_public_names_for_users() -> None:
    text = aiocoll.__doc__ or ""
    assert "await pg.allreduce(x)" in text
    assert "layer" not in text
    listed = set(re.findall(r"\w+", text))
    errors = set(aiocoll.errors.__all__)
    assert set(aiocoll.__all__) - errors - listed == set(), "public names are missing in help(aiocoll)"


def test_help_of_the_package_begins_with_the_first_program() -> None:
    program = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[0]
    assert len([line for line in program.splitlines() if line]) <= 12
    lines = (ROOT / "examples" / "hello.py").read_text().splitlines()
    assert [line for line in program.splitlines() if line and "def main" not in line and line not in lines] == []
    opening = inspect.getdoc(aiocoll) or ""
    assert opening.split("\n\n", 1)[1].startswith(textwrap.indent(program, "    "))


def test_guide_documents_every_option() -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    options = aiocoll.GroupOptions.__dataclass_fields__
    assert {name for name in options if f"| `{name}` | `AIOCOLL_" not in guide} == set()
    for word in ("JAX", "scipy.sparse"):
        assert word in guide


#: Questions of new users, each with the page that answers the question.
ANSWERS = {
    "survive the death of a rank": "reliability.md",
    "encrypt": "security.md",
    "write a test with ranks": "testing-with-ranks.md",
    "port from torch.distributed": "porting.md",
    "port from mpi4py": "coming-from-mpi4py.md",
    "why is it slow": "when-something-hangs.md",
    "run on several hosts": "several-hosts.md",
    "use a GPU": "cuda-tensors.md",
    "find what hangs": "when-something-hangs.md",
    "deploy in Kubernetes": "kubernetes.md",
    "use with FastAPI and uvicorn": "web-service.md",
    "which Python, which platforms": "installation.md",
}


def test_readme_leads_to_every_page_within_two_links() -> None:
    """Check that the README links the pages in `ANSWERS`, and that one more link leads to each other page."""
    named = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", README))
    assert {question for question, page in ANSWERS.items() if page not in named} == set()
    linked = {
        page
        for each in named
        for page in re.findall(r"\]\(([\w-]+\.md)[)#]", (ROOT / "docs" / each).read_text())
        if (ROOT / "docs" / page).exists()
    }
    index = (ROOT / "docs" / "index.rst").read_text().split(":caption: Explanation")[0]
    pages = {f"{name}.md" for name in re.findall(r"^   ([\w-]+)$", index, re.MULTILINE)}
    assert len(pages) > 20
    assert pages - named - linked == set()
