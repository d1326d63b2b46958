"""The public names and their parameters, compared with the record in `tests/public_names.txt`."""

from __future__ import annotations

import difflib

from .public_names import RECORD, public_names


def test_public_names_match_the_record() -> None:
    recorded = RECORD.read_text().splitlines()
    difference = [line for line in difflib.ndiff(recorded, public_names()) if line[0] in "+-"]
    assert not difference, "\n".join(
        [
            "the public names differ from tests/public_names.txt:",
            *difference,
            "If the change is intended, add it to CHANGELOG.md and record the names: python -m tests.public_names",
        ]
    )
