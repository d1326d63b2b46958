"""Generator of tables in the docs: `python docs/generate.py`, in an environment that has pytest.

The names of torch.distributed and aiocoll go into porting.md. The tests of other libraries that aiocoll's tests follow,
with their outcomes, go into reference-tests.md. The docstrings of examples/, and the places of other programs in the
pages, go into examples.md. `tests/test_docs.py` compares all three with the code.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PORTING = DOCS / "porting.md"
REFERENCE_TESTS = DOCS / "reference-tests.md"
EXAMPLES = DOCS / "examples.md"
BEGIN, END = "<!-- written by docs/generate.py -->", "<!-- end of the generated part -->"


# -- names


class Name(NamedTuple):
    """A name of torch.distributed, and its counterpart in aiocoll."""

    name: str
    section: str
    arguments: list[str] | None
    renamed: str | None
    left_out: str | None
    note: str
    differs: bool = False

    @property
    def counterpart(self) -> str | None:
        """The full name of the counterpart in aiocoll; None if aiocoll leaves it out."""
        return None if self.left_out is not None else self.renamed or f"aiocoll.distributed.{self.name}"


@cache
def names() -> list[Name]:
    """Return the entries of names.toml."""
    data = tomllib.loads((DOCS / "names.toml").read_text())
    dropped = data.pop("dropped")
    return [
        Name(
            name,
            section,
            [each for each in entry["arguments"].split() if each not in dropped] if "arguments" in entry else None,
            entry.get("renamed"),
            entry.get("left_out"),
            entry.get("note", ""),
            entry.get("differs", False),
        )
        for section, found in data.items()
        for name, entry in found.items()
    ]


def resolve(dotted: str) -> Any:
    """Import and return the object with the dotted name `aiocoll.….name`; raise AttributeError if it does not exist.

    For an attribute that exists in instances only, return its entry in the docstring.
    """
    module, _, name = dotted.rpartition(".")
    try:
        owner = importlib.import_module(module)
    except ModuleNotFoundError:
        owner = resolve(module)
        attributes = re.findall("^    ([a-z_]+): (.*)$", inspect.getdoc(owner) or "", re.MULTILINE)
        if not hasattr(owner, name) and name in dict(attributes):
            return dict(attributes)[name]
    return getattr(owner, name)


def wrong_names() -> Iterator[str]:
    """Yield a message about each entry of names.toml that contradicts the code."""
    import aiocoll.distributed

    for each in names():
        if each.counterpart is None:
            if hasattr(aiocoll.distributed, each.name):
                yield f"names.toml: {each.name} is listed as left out, but exists; remove left_out"
            continue
        try:
            found = resolve(each.counterpart)
        except AttributeError:
            yield f"names.toml: {each.counterpart} is listed, but does not exist; correct its name"
            continue
        if each.arguments is not None and _positional(found) != each.arguments:
            yield f"names.toml: {each.counterpart}{inspect.signature(found)} should take {each.arguments}"
    listed = {each.counterpart for each in names()}
    for name in aiocoll.distributed.__all__:
        if f"aiocoll.distributed.{name}" not in listed:
            yield f"names.toml: {name} is not listed; add it"


def _positional(call: Any) -> list[str]:
    parameters = inspect.signature(call).parameters.values()
    return [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]


def names_table() -> str:
    """Return the tables of names for porting.md."""
    lines = []
    for section in dict.fromkeys(each.section for each in names()):
        lines += [f"**{section}**", "", "| torch.distributed | aiocoll | notes |", "|---|---|---|"]
        rows: dict[str, list[str]] = {}  # names with the same counterpart and note share a row
        for each in names():
            if each.section == section:
                rows.setdefault(f"{_verdict(each)} | {each.note}", []).append(f"`{each.name}`")
        lines += [*(f"| {', '.join(found)} | {row} |" for row, found in rows.items()), ""]
    return "\n".join(lines).rstrip()


def _verdict(each: Name) -> str:
    if each.left_out is not None:
        return f"left out: {each.left_out}"
    if each.renamed is None:
        return "same name" if each.differs else "same"
    return f"`{each.renamed.removeprefix('aiocoll.distributed.').replace('aiocoll.ProcessGroup', 'ProcessGroup')}`"


# -- reference tests


class Row(NamedTuple):
    """A test of PyTorch: its file, and its counterpart in aiocoll or the reason for leaving it out."""

    file: str
    reference: str
    module: str
    counterpart: str | None
    left_out: str | None


def modules() -> dict[str, dict[str, Any]]:
    """Return the entries of reference_tests.toml, by module of tests/reference."""
    return tomllib.loads((DOCS / "reference_tests.toml").read_text())


def unlisted() -> Iterator[str]:
    """Yield PyTorch tests that a module covers or leaves out, but that reference_tests.toml does not list."""
    for module, entry in modules().items():
        covers, left_out = _coverage(module)
        yield from (f"{module}: {reference}" for reference in [*covers, *left_out] if reference not in entry["tests"])


def rows() -> list[Row]:
    """Return a row for each PyTorch test in reference_tests.toml."""
    found = []
    for module, entry in modules().items():
        covers, left_out = _coverage(module)
        found += [
            Row(entry["file"], reference, module, covers.get(reference), left_out.get(reference))
            for reference in entry["tests"]
        ]
    return found


def _coverage(module: str) -> tuple[Mapping[str, str], Mapping[str, str]]:
    if not (ROOT / "tests/reference" / f"{module}.py").exists():
        return {}, {}
    loaded = importlib.import_module(f"tests.reference.{module}")
    return loaded.COVERS, loaded.LEFT_OUT


def results() -> dict[tuple[str, str], Counter[str]]:
    """Run tests/reference; return how often each outcome occurred, by module and function."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not matrix and not soak", f"--junitxml={report}"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*command, "tests/reference"], cwd=ROOT, env=environ, check=False)
        cases = ElementTree.parse(report).iter("testcase")
        found: dict[tuple[str, str], Counter[str]] = {}
        for case in cases:
            module = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
            function = case.get("name", "").partition("[")[0]
            found.setdefault((module, function), Counter())[_outcome(case)] += 1
    return found


def _outcome(case: ElementTree.Element) -> str:
    if (skipped := case.find("skipped")) is not None:
        return f"skipped: {skipped.get('message', '')}"
    return "failed" if case.find("failure") is not None or case.find("error") is not None else "passed"


def function_of(counterpart: str) -> str:
    """Return the function's name from `function`, `Class.function` or `Class::function`."""
    return counterpart.replace("::", ".").rpartition(".")[2]


def tests_table(outcomes: Mapping[tuple[str, str], Counter[str]]) -> str:
    """Return the tables of tests for reference-tests.md."""
    lines = []
    for module, entry in modules().items():
        lines += [f"## `{entry['file']}`", "", f"In aiocoll: `tests/reference/{module}.py`.", ""]
        lines += ["| test in PyTorch | test in aiocoll | result |", "|---|---|---|"]
        for row in rows():
            if row.module == module:
                lines.append(f"| `{row.reference}` | {first_column(row)} | {_result(row, outcomes)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def first_column(row: Row) -> str:
    """Return the table cell that names the counterpart of a test in aiocoll; "" if it has none."""
    return "" if row.counterpart is None else f"`{function_of(row.counterpart)}`"


def _result(row: Row, outcomes: Mapping[tuple[str, str], Counter[str]]) -> str:
    if row.left_out is not None:
        return f"left out: {row.left_out}"
    if row.counterpart is None:
        return "not yet in aiocoll"
    found = outcomes.get((row.module, function_of(row.counterpart)), Counter(["not run"]))
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(found.items()))


# -- examples


def examples() -> str:
    """Return the text for examples.md: a section per program and notebook, and a table of programs on pages."""
    sections = [_program(path) for path in sorted((ROOT / "examples").glob("*.py"))]
    sections += [_notebook(path) for path in sorted((ROOT / "examples").glob("*.ipynb"))]
    return "\n\n".join([*sections, "## On pages", "| program | page |\n|---|---|\n" + "\n".join(_on_pages())])


def _program(path: Path) -> str:
    """Return the section about an example program, whose docstring begins with a title and the start command."""
    first, _, rest = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")
    title, _, command = first.partition(": ")
    return f"## {title}\n\n[examples/{path.name}](../examples/{path.name}): `{command}`\n\n{rest}"


def _notebook(path: Path) -> str:
    """Return the section about a notebook, from its first cell."""
    title, _, rest = "".join(json.loads(path.read_text())["cells"][0]["source"]).partition("\n\n")
    return f"## {title.removeprefix('# ')}\n\n[examples/{path.name}](../examples/{path.name})\n\n{rest}"


def _on_pages() -> Iterator[str]:
    from tests.pages import files, pages

    for page in pages():
        title = re.search("^# (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        if page.startswith("docs/") and title is not None and (programs := [f"`{name}`" for name in files(page)]):
            yield f"| {', '.join(programs)} | [{title[1]}]({page.removeprefix('docs/')}) |"


# -- files


def replaced(text: str, table: str) -> str:
    """Replace the generated part of `text`, between the marks `BEGIN` and `END`, by `table`."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Write the generated parts of the pages; write nothing if an entry of names.toml is wrong."""
    sys.path.insert(0, str(ROOT))
    if wrong := list(wrong_names()):
        sys.exit("\n".join(wrong))
    EXAMPLES.write_text(replaced(EXAMPLES.read_text(), examples()))
    PORTING.write_text(replaced(PORTING.read_text(), names_table()))
    REFERENCE_TESTS.write_text(replaced(REFERENCE_TESTS.read_text(), tests_table(results())))


if __name__ == "__main__":
    main()
