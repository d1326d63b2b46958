"""A checker of docstrings, comments, messages and pages: first words, retired words, long sentences.

`python tools/prose.py` prints `file:line: problem; remedy` for each finding, and exits with 1 if there are any.

The rules are in `tools/prose.toml`. The check covers docstrings, comments and messages of Python files, comments of C
files, and Markdown pages. It skips code: blocks and `spans`.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Finding", "Rules", "check_c", "check_file", "check_page", "check_python", "main"]

ROOT = Path(__file__).parents[1]
#: A string of at least this many words counts as a message. Shorter strings are names, keys and formats.
MESSAGE_WORDS = 4
#: Code in prose: spans, and the names of arguments and attributes in the sections of docstrings.
_CODE_SPAN = re.compile(r"(``?)[^`]+\1|^ +\w+:(?= )", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^#[^\n]*$|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
#: Ends of sentences, paragraphs, list items and table cells.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z_*\[(])|\n\s*\n|\n *(?:[-*]|\d+\.) |\|")


class Finding(NamedTuple):
    """A problem in one line of a file, with its remedy."""

    line: int
    problem: str
    remedy: str


class Rules:
    """The rules of `tools/prose.toml`.

    Attributes:
        first_words: first words that docstrings must not have, in lower case.
        sentence_words: the largest number of words in a sentence of a page.
    """

    def __init__(self, text: str) -> None:
        table = tomllib.loads(text)
        self.first_words = set(table["first-words"])
        self.sentence_words: int = table["sentence-words"]
        self._replacements = list(table["retired"].values())
        self._retired = re.compile("|".join(rf"\b({word})\b" for word in table["retired"]), re.IGNORECASE)

    def find_retired(self, line: int, text: str) -> Iterator[Finding]:
        """Yield a finding for each retired word in a text that starts on `line`."""
        prose = _CODE_SPAN.sub(_mask, text)
        for found in self._retired.finditer(prose):
            at = line + prose.count("\n", 0, found.start())
            assert found.lastindex is not None, "each pattern is a group"
            yield Finding(at, f"'{found[0]}' is retired", f"use {self._replacements[found.lastindex - 1]}")


def check_python(text: str, rules: Rules, *, messages: bool = True) -> Iterator[Finding]:
    """Yield the findings in a Python file; `messages` includes strings that are no docstrings."""
    docstrings = set()
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if docstring := ast.get_docstring(node, clean=False):
            first = node.body[0]
            docstrings.add((first.lineno, first.col_offset))
            yield from rules.find_retired(first.lineno, docstring)
            word = re.sub(r"\W.*", "", docstring.strip(), flags=re.DOTALL)
            if word.lower() in rules.first_words:
                yield Finding(
                    first.lineno, f"docstring begins with '{word}'", "begin with a verb, or for a class a noun"
                )
    for node in nodes if messages else ():
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (node.lineno, node.col_offset) not in docstrings
            and len(node.value.split()) >= MESSAGE_WORDS
        ):
            yield from rules.find_retired(node.lineno, node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from rules.find_retired(token.start[0], token.string)


def check_c(text: str, rules: Rules) -> Iterator[Finding]:
    """Yield the findings in the comments of a C file."""
    for comment in re.finditer(r"/\*.*?\*/|//[^\n]*", text, re.DOTALL):
        yield from rules.find_retired(1 + text.count("\n", 0, comment.start()), comment[0])


def check_page(text: str, rules: Rules) -> Iterator[Finding]:
    """Yield the findings in a Markdown page."""
    prose = _CODE_SPAN.sub(_mask, _CODE_BLOCK.sub(_mask, text))
    yield from rules.find_retired(1, prose)
    begin = 0
    for end in [*_SENTENCE_END.finditer(prose), None]:
        sentence = prose[begin : end.start() if end else None]
        words = sum(bool(re.search(r"\w", word)) for word in sentence.split())
        if words > rules.sentence_words:
            line = 1 + prose.count("\n", 0, begin + len(sentence) - len(sentence.lstrip()))
            yield Finding(line, f"a sentence has {words} words", f"split it: at most {rules.sentence_words}")
        begin = end.end() if end else begin


def check_file(path: str, text: str, rules: Rules) -> list[Finding]:
    """Return the findings in a file, in the order of their lines."""
    if path.endswith(".py"):
        found = check_python(text, rules, messages=not path.startswith("tests/"))
    else:
        found = check_page(text, rules) if path.endswith(".md") else check_c(text, rules)
    return sorted(found)


def main() -> int:
    """Check all files that git tracks, and print the findings; return 1 if there are any, else 0."""
    rules = Rules((ROOT / "tools" / "prose.toml").read_text())
    lines = [
        f"{path}:{line}: {problem}; {remedy}"
        for path in _files()
        for line, problem, remedy in check_file(path, (ROOT / path).read_text(), rules)
    ]
    print("\n".join(lines) or "prose: no findings")
    return bool(lines)


def _files() -> list[str]:
    """Return the paths of the Python files, C files and pages of the repository, new ones included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.[ch]", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [path for path in listed.splitlines() if (ROOT / path).exists()]


def _mask(code: re.Match[str]) -> str:
    """Return a replacement for matched code: underscores, one word per line, or spaces for a code block."""
    return re.sub(r"[^\n]", " " if "```" in code[0] else "_", code[0])


if __name__ == "__main__":
    sys.exit(main())
