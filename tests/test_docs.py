"""Agreement between docs and code: generated tables, links, and code blocks that tests must run."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from docs import generate

from . import pages as tests_pages
from .pages import EXCUSES, ROOT, Block, blocks, commands, files, is_shown, pages, shell, write

HANGS = "docs/when-something-hangs.md"


def test_names_table_of_the_porting_page_matches_the_code() -> None:
    assert list(generate.wrong_names()) == []


def test_check_of_the_names_table_finds_missing_names_and_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("aiocoll.ProcessGroup.abort", "aiocoll.ProcessGroup.store", "aiocoll.distributed.group.WORLD"):
        generate.resolve(name)
    for name in ("aiocoll.ProcessGroup.missing", "aiocoll.missing", "aiocoll.distributed.group.missing"):
        with pytest.raises(AttributeError, match="missing"):
            generate.resolve(name)
    made = generate.Name("TCPStore", "Types", ["host", "port"], None, None, "")
    monkeypatch.setattr(generate, "names", lambda: [made])
    assert "aiocoll.distributed.TCPStore(host_name" in next(iter(generate.wrong_names()))


def test_generated_names_table_of_the_porting_page_is_current() -> None:
    text = generate.PORTING.read_text()
    assert text == generate.replaced(text, generate.names_table()), "run `python docs/generate.py`"


def test_generated_index_of_examples_is_current() -> None:
    text = generate.EXAMPLES.read_text()
    assert text == generate.replaced(text, generate.examples()), "run `python docs/generate.py`"


@pytest.mark.parametrize("module", generate.modules())
def test_torch_reference_test_is_covered_or_excluded_with_a_reason(module: str) -> None:
    path = generate.ROOT / "tests/reference" / f"{module}.py"
    if not path.exists():
        pytest.skip(f"{module}.py does not exist yet")
    functions = {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for row in generate.rows():
        if row.module == module:
            assert (row.counterpart is None) is not (row.left_out is None), (
                f"{row.reference}: put it in COVERS or in LEFT_OUT"
            )
            assert row.counterpart is None or generate.function_of(row.counterpart) in functions, (
                f"{row.counterpart} does not exist"
            )
            reason = row.left_out or ""
            assert row.left_out is None or len(reason) > 10, f"{row.reference}: give the reason for leaving it out"
            named = set(re.findall("`(test_[a-z_]+)`", reason))
            assert named <= functions, f"{row.reference}: {named - functions} not found"


def test_every_ported_reference_test_is_listed_on_the_reference_tests_page() -> None:
    assert list(generate.unlisted()) == []


def test_generated_table_of_reference_tests_is_current() -> None:
    listed = [line.split(" | ") for line in generate.REFERENCE_TESTS.read_text().splitlines() if line.startswith("| `")]
    expected = [(f"| `{row.reference}`", generate.first_column(row)) for row in generate.rows()]
    assert [(first, second) for first, second, _ in listed] == expected, "run `python docs/generate.py`"
    wrong = [first for first, _, third in listed if re.search("failed|not run", third)]
    assert not wrong, f"run `python docs/generate.py`: the table has no good result for {wrong}"


@pytest.mark.slow
def test_hang_page_shows_the_output_of_its_programs(tmp_path: Path) -> None:
    """Compare the output without numbers, since durations and the order of ranks depend on the machine."""
    write(files(HANGS), tmp_path)
    output = "".join(shell(script, tmp_path) for script in commands(HANGS)).replace(f"{tmp_path}/", "")
    compared = ("A rank does not come", "Timeouts", "Calls that differ", "After the fact")
    shown = [block.code for block in blocks(HANGS) if block.language == "text" and block.heading in compared]
    assert len(shown) == 4
    assert [text for text in shown if not is_shown(text, output)] == [], output


@pytest.mark.parametrize("name", pages())
def test_links_of_the_pages_have_targets(name: str) -> None:
    page = ROOT / name
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", without_code(page)):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        headings = re.findall(r"^#+ (.*)$", without_code(linked), re.MULTILINE) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
        assert not anchor or anchor in slugs, anchor


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", pages())
def test_each_code_block_of_the_pages_is_run_or_excused(page: str) -> None:
    for block in blocks(page):
        if block.language not in ("python", "sh"):
            continue
        where = f"{page}, under {block.heading!r}, block {block.number} of {block.language}"
        if block.excuse is None:
            assert is_used(block), f"{where}: no test runs it; see tests/pages.py"
        else:
            assert block.excuse in EXCUSES, f"{where}: not one of the EXCUSES of tests/pages.py"
            # A test can run an excused block only through `code`, since `files` and `commands` omit excused blocks.
            assert place(block) not in used_blocks(), f"{where}: it has an excuse, but a test runs it"
            assert list(errors_in(block)) == [], where


@pytest.mark.parametrize("page", pages())
def test_parser_of_the_pages_finds_every_code_block(page: str) -> None:
    """Compare the number of fences, so that no block is missed because of indentation or a missing language."""
    text, fence = (ROOT / page).read_text(), re.compile("^[ >]*(?:```|~~~)", re.MULTILINE)
    inside = sum(len(fence.findall(block.code)) for block in blocks(page))
    assert len(fence.findall(text)) == 2 * len(blocks(page)) + inside
    assert text.count("<!-- not run: ") == sum(block.excuse is not None for block in blocks(page))


def test_each_code_block_that_a_test_uses_exists() -> None:
    existing = {place(block) for page in pages() for block in blocks(page)} | {(page, None) for page in pages()}
    assert {used for used in used_blocks() if used not in existing and used[:2] not in existing} == set()


def place(block: Block) -> tuple[Any, ...]:
    return block.page, block.heading, block.number, block.language


def is_used(block: Block) -> bool:
    whole = "commands" if block.language == "sh" else "files" if block.file else ""
    return bool({place(block), (block.page, None, whole)} & used_blocks())


@cache
def used_blocks() -> frozenset[tuple[Any, ...]]:
    """Return the blocks that tests use: `place(block)` for `code`, else (page, None, function name)."""
    found: set[tuple[Any, ...]] = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "pages import" not in (text := path.read_text()):
            continue
        module = ast.parse(text)
        # Module-level string constants, since the calls below may pass the page as such a constant.
        names = {
            target.id: node.value.value
            for node in module.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            function = call.func.id if isinstance(call.func, ast.Name) else ""
            if function in ("code", "files", "commands"):
                where = f"{path.name}:{call.lineno}: {ast.unparse(call)}: give the page and other arguments as literals"
                given = [value_of(each, names, where) for each in call.args]
                named = {str(each.arg): value_of(each.value, names, where) for each in call.keywords}
                arguments = inspect.signature(getattr(tests_pages, function)).bind(*given, **named)
                arguments.apply_defaults()
                found.add(arguments.args if function == "code" else (*arguments.args, None, function))
    return frozenset(found)


def value_of(node: ast.expr, names: Mapping[str, Any], where: str) -> Any:
    assert isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in names), where
    return node.value if isinstance(node, ast.Constant) else names[node.id]


def errors_in(block: Block) -> Iterator[str]:
    """Yield errors of a block that is not run: syntax errors, unknown make targets and missing files."""
    if block.language == "python":
        compile(block.code, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        return
    if error := subprocess.run(["sh", "-n"], input=block.code, capture_output=True, text=True, check=False).stderr:
        yield error
    goals = set(re.findall(r"^([\w.-]+)(?= *:(?!=))", (ROOT / "Makefile").read_text(), re.MULTILINE))
    yield from (
        f"make {goal}" for goal in re.findall(r"^make (\w[\w-]*)", block.code, re.MULTILINE) if goal not in goals
    )
    programs = re.findall(r"python3? ([\w/]+/[\w/]+\.py)", block.code)
    yield from (program for program in programs if not (ROOT / program).exists())
