"""Tests of `tests.planted`: random choice of faults, places that move with the code, and verdicts."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest

from ..each import each
from .mutations import KINDS, Mutant, draw, mutants
from .places import Package, Place
from .run import BY_HAND, ROOT, Tree, key, read, reasons
from .subjects import COUNT, SUBJECTS, files, pytest_arguments, quota

package = cache(partial(Package, ROOT / "aiocoll"))
FAULTS = read()

TOY = """\
class Adder:
    def total(self, numbers):
        \"\"\"Add up; ü is for bytes that are no characters.\"\"\"
        found = 0  # nothing yet
        for number in numbers:
            if number > 0 or not self.only_positive:
                found += number
        return found

    only_positive = False


def count(numbers):
    left = list(numbers)
    done = 0
    while left:
        left.pop()
        done += 1
    return done
"""
TESTS = """\
from toy.sums import Adder, count

def test_total():
    assert Adder().total([1, 2, 3]) == 6

def test_count():
    assert count("abc") == 3
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in {"toy/__init__.py": "", "toy/sums.py": TOY, "tests/test_sums.py": TESTS}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def fault(where: str, old: str, new: str) -> Mutant:
    return Mutant("toy", BY_HAND, where, tuple(old.split("; ")), tuple(new.split("; ")))


HANGS = fault("count", "left.pop()", "pass")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "test"),
    [
        (fault("Adder.total", "found += number", "found -= number"), "test_total"),
        (fault("Adder.total", "number > 0 or not self.only_positive", "number > 0"), None),
        (HANGS, "no end within 3 s"),
    ],
)
def test_planted_fault_is_reported_as_caught_or_surviving(planted: Mutant, test: str | None, toy: Path) -> None:
    tree = Tree(toy, ("toy", "tests"))
    try:
        failed = tree.judge(planted, [("test_sums.py",)], [3.0 if planted == HANGS else 60.0])
        assert (tree.root / "toy/sums.py").read_text() == TOY, "the fault is still in the tree"
    finally:
        tree.close()
    assert not tree.root.exists()
    assert failed is None if test is None else test in str(failed)
    assert (toy / "toy/sums.py").read_text() == TOY


def test_planted_fault_changes_only_its_code_place(toy: Path) -> None:
    (spot,) = Package(toy).find(Place("count", ("left.pop()", "done += 1")))
    changed = spot.replaced(TOY.encode(), ("done += 2", "left.pop()")).decode()
    assert changed == TOY.replace("left.pop()\n        done += 1", "done += 2\n        left.pop()")
    (spot,) = Package(toy).find(Place("Adder.total", ("number > 0 or not self.only_positive",)))
    assert spot.replaced(TOY.encode(), ("True",)).decode() == TOY.replace(
        "number > 0 or not self.only_positive", "True"
    )


def test_place_of_a_fault_is_found_after_its_function_has_moved(toy: Path) -> None:
    place = Place("Adder.total", ("found += number",))
    (toy / "toy/sums.py").unlink()
    (toy / "toy/inner").mkdir()
    (toy / "toy/inner/adding.py").write_text("# Other lines above.\n\n\n" + TOY)
    (spot,) = Package(toy).find(place)
    assert spot.path == toy / "toy/inner/adding.py"
    (toy / "toy/again.py").write_text(TOY)
    assert len(Package(toy).find(place)) == 2


def test_random_choice_of_faults_depends_on_the_seed_and_covers_all_kinds(toy: Path) -> None:
    package = Package(toy / "toy")
    candidates = mutants(package, "toy", [toy / "toy/sums.py"])
    assert {mutant.kind for mutant in candidates} == set(KINDS) - {"arguments"}
    assert len(set(candidates)) == len(candidates)
    drawn = draw(candidates, 8, "a")
    assert drawn == draw(candidates, 8, "a")
    assert drawn != draw(candidates, 8, "b")
    assert len({mutant.place for mutant in drawn}) == 8
    assert not {mutant.place for mutant in draw(candidates, 3, "a", drawn)} & {mutant.place for mutant in drawn}
    for mutant in candidates:
        (spot,) = package.find(mutant.place)
        ast.parse(spot.replaced(TOY.encode(), mutant.new))


@each("mutant", FAULTS)
def test_code_places_of_all_recorded_faults_exist(mutant: Mutant) -> None:
    spots = package().find(mutant.place)
    remedy = "update faults.json" if mutant.kind == BY_HAND else "run `python -m tests.planted --draw`"
    assert len(spots) == 1, f"{mutant.where} has no {'; '.join(mutant.old)!r}: {remedy}"
    source = spots[0].path.read_bytes()
    changed = spots[0].replaced(source, mutant.new)
    assert changed != source
    ast.parse(changed)


def test_number_of_drawn_faults_equals_the_configured_number() -> None:
    drawn = Counter(mutant.subject for mutant in FAULTS if mutant.kind != BY_HAND)
    assert drawn == quota()
    assert sum(quota().values()) == COUNT
    assert len(set(FAULTS)) == len(FAULTS)


def test_every_recorded_equivalence_reason_belongs_to_a_fault() -> None:
    strange = reasons().keys() - {key(mutant) for mutant in FAULTS}
    assert not strange, f"equivalent.json has entries without a fault: {strange}"


@each("subject", SUBJECTS)
def test_modules_and_tests_of_each_fault_subject_exist(subject: str) -> None:
    assert files(package(), subject)
    for run in SUBJECTS[subject].tests:
        assert pytest_arguments(ROOT / "tests", run)
