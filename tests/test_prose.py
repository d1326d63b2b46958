"""The prose check `tools/prose.py`: for each rule, texts that pass and texts that fail."""

from __future__ import annotations

import re

import pytest

from tools import prose

RULES = prose.Rules("""
sentence-words = 6
first-words = ["which", "one"]
[retired]
"afresh" = "'again'"
"inform(?:s|ed)?" = "'report'"
"is done" = "'ends'"
""")


def lines(path: str, text: str) -> list[int]:
    """Return the line numbers that the prose check reports for a file with this text."""
    return [line for line, _, _ in prose.check_file(path, text, RULES)]


@pytest.mark.parametrize("definition", ["", "class A:\n", "def f():\n", "async def f():\n"])
@pytest.mark.parametrize(
    ("docstring", "bad"), [("Which rank it is.", True), ("One.", True), ("Oneness of ranks.", False)]
)
def test_prose_check_reports_a_docstring_with_a_forbidden_first_word(
    definition: str, docstring: str, bad: bool
) -> None:
    indent = "    " if definition else ""
    found = lines(
        "aiocoll/a.py", f'{definition}{indent}"""{docstring}\n\n{indent}Which is no first word.\n{indent}"""\n'
    )
    assert found == [1 + bool(definition)] * bad


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('"""A rank.\n\nIt informs others.\n"""\n', [3]),
        ("# Informed by the hub.\nx = 1  # and informed afresh\n", [1, 2, 2]),
        ("raise ValueError(f'rank {rank} informed us of its end')\n", [1]),
        ('"""A rank.\n\nIt reports `informed` and ``is done``.\n"""\n', []),
        ("informed = 'informed'  # uninformed\n", []),
        ('"""A rank.\n\nArgs:\n    informed: ranks.\n    rank: informed.\n"""\n', [5]),
        ('"""A rank.\n\nThe work is\ndone.\n"""\n', []),
    ],
)
def test_prose_check_reports_retired_words_in_docstrings_comments_and_messages(text: str, found: list[int]) -> None:
    assert lines("aiocoll/a.py", text) == found


def test_prose_check_allows_retired_words_in_strings_of_tests() -> None:
    text = "assert error == 'the message of an older release informed'  # informed\n"
    assert lines("tests/test_a.py", f"\n{text}") == [2]
    assert lines("aiocoll/a.py", text) == [1, 1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/* Informed\n * afresh. */\n", [1, 2]),
        ("int x; // informed\n", [1]),
        ("int informed = 1;\nputs('afresh');\n", []),
    ],
)
def test_prose_check_reports_retired_words_in_c_comments(text: str, found: list[int]) -> None:
    assert lines("aiocoll/native/a.c", text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("One two three four five six.\n", []),
        ("One two three four five six seven.\n", [1]),
        ("# A heading may have as many words as it likes\n", []),
        ("One two three.\nFour five six `with code in it`.\n\nOne\ntwo three four five six seven.\n", [4]),
        ("One two:\n```text\n" + "three\n" * 7 + "```\n", []),
        ("- one two three\n- four five six\n\n| one two three | four five six |\n", []),
        ("- one two three,\n  four five six seven\n", [1]),
        ("```python\none two three four five six seven informed\n```\n\nThe hub informed.\n", [5]),
        ("Read [one two](three four five six seven.md#informed).\n", []),
        ("<!-- one two three four five six seven -->\n", []),
    ],
)
def test_prose_check_reports_long_sentences_of_pages(text: str, found: list[int]) -> None:
    assert lines("docs/a.md", text) == found


def test_prose_check_prints_findings_with_file_line_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prose, "Rules", lambda text: RULES)
    assert prose.main() == 1
    printed = capsys.readouterr().out.splitlines()
    readme = next(line for line in printed if line.startswith("README.md:"))
    assert re.fullmatch(r"README\.md:\d+: a sentence has \d+ words; split it: at most 6", readme)
