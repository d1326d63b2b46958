"""Docstrings of public functions and methods: required sections, documented arguments, and units."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import aiocoll
import aiocoll.distributed
import aiocoll.testing
from aiocoll import (
    BlockingGroup,
    CallPlan,
    CartesianGroup,
    GroupOptions,
    Meeting,
    ProcessGroup,
    ReduceOp,
    Store,
    TCPStore,
    Work,
)
from aiocoll.group.flight_recorder import FlightRecorder
from aiocoll.store import KeyValueStore

from .each import each

#: The allowed docstring sections. A docstring has each section at most once, and in this order.
SECTIONS = ("Attributes", "Args", "Returns", "Raises", "Cost", "Source")

#: Group methods that need no section "Cost": they send nothing, or their cost is the cost of other calls.
FREE = {"abort", "add_hook", "aclose", "backend_for", "coords", "drain", "pending", "rank", "rank_at", "shift",
        "shutdown", "size", "stats", "time_estimator", "wait_revoked"}  # fmt: skip
#: Methods and functions that need no section "Raises", since they raise no error.
SAFE = {"pending", "rank", "size", "add_done_callback", "cancelled", "done", "dump", "get_future", "is_completed",
        "is_success", "remove_done_callback", "signalled", "process_group", "current_process_group"}  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (name, function) of the group and work methods whose docstrings need all sections."""
    for cls in (ProcessGroup, CallPlan, CartesianGroup, Work, FlightRecorder):
        for name, found in inspect.getmembers(cls, inspect.isfunction):
            if not name.startswith("_"):
                yield f"{cls.__name__}.{name}", found
    yield "GroupOptions.resolve", GroupOptions.resolve
    for function in (aiocoll.new_group, aiocoll.process_group, aiocoll.current_process_group):
        yield function.__name__, function


def other_calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield (name, function) of public functions, and of methods of classes that programs instantiate."""
    for module in (aiocoll, aiocoll.distributed, aiocoll.store, aiocoll.testing):
        for name in module.__all__:
            found = getattr(module, name)
            if inspect.isfunction(found):
                yield f"{module.__name__}.{name}", found
    for cls in (BlockingGroup, Meeting, ReduceOp, Store, TCPStore, KeyValueStore):
        for name, found in vars(cls).items():
            found = getattr(found, "__func__", found)
            if inspect.isfunction(found) and not name.startswith("_") and not hasattr(found, "__wrapped__"):
                yield f"{cls.__name__}.{name}", found


CALLS = dict(calls())
every_call = each("name", CALLS)


def sections(found: object) -> dict[str, str]:
    """Return the text of each docstring section by section name, in order."""
    text = inspect.getdoc(found) or ""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", text, flags=re.MULTILINE)
    assert len(parts[1::2]) == len(set(parts[1::2])), "a section occurs twice"
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@every_call
def test_docstring_begins_with_a_single_line_summary(name: str) -> None:
    first, *rest = (inspect.getdoc(CALLS[name]) or "").splitlines()
    assert first.endswith(".")
    assert not rest or rest[0] == ""


@every_call
def test_docstring_sections_are_in_order(name: str) -> None:
    found = list(sections(CALLS[name]))
    assert found == sorted(found, key=SECTIONS.index)


@every_call
def test_docstring_documents_exactly_the_arguments_of_the_function(name: str) -> None:
    parameters = [each for each in inspect.signature(CALLS[name]).parameters if each not in ("self", "cls")]
    documented = re.findall(r"^    (\w+):", sections(CALLS[name]).get("Args", ""), re.MULTILINE)
    assert documented == parameters


@every_call
def test_docstring_documents_results_errors_and_costs(name: str) -> None:
    call, found, last = CALLS[name], sections(CALLS[name]), name.rpartition(".")[2]
    returns = inspect.isclass(call) or inspect.signature(call).return_annotation != "None"
    assert ("Returns" in found) is returns
    assert "Raises" in found or last in SAFE
    if name.startswith(("ProcessGroup.", "CartesianGroup.")):
        assert ("Cost" in found) is (last not in FREE)


#: Public functions and methods that need only the section "Args": `aiocoll.distributed`, stores, and testing.
OTHERS = dict(other_calls())


@each("name", OTHERS)
def test_docstring_of_a_public_function_has_a_summary_and_documents_all_arguments(name: str) -> None:
    first, *rest = (inspect.getdoc(OTHERS[name]) or "").splitlines()
    assert first.endswith(".")
    assert not rest or rest[0] == ""
    parameters = [each for each in inspect.signature(OTHERS[name]).parameters if each not in ("self", "cls")]
    documented = re.findall(r"^    \*{0,2}(\w+):", sections(OTHERS[name]).get("Args", ""), re.MULTILINE)
    assert documented == parameters


@each("name", CALLS | OTHERS)
def test_docstring_documents_seconds_as_the_unit_of_durations(name: str) -> None:
    text = sections((CALLS | OTHERS)[name]).get("Args", "")
    for line in re.findall(r"^    ((?:timeout|wait|seconds)\b.*)", text, re.MULTILINE):
        assert re.search("seconds|time to", line), line


#: Words of which an array argument's description needs at least one, to describe the array's shape.
SHAPE = re.compile(
    r"\belements|\bshape|\bcounts?\b|\blength|\brows|split along|one array per rank|any size|array per rank"
)


@each("name", [name for name in CALLS if name.startswith("ProcessGroup.")])
def test_docstring_documents_array_shapes(name: str) -> None:
    text = sections(CALLS[name]).get("Args", "")
    for argument in re.findall(r"^    ((?:tensors?|outputs?|inputs?):.*(?:\n {8}.*)*)", text, re.MULTILINE):
        assert SHAPE.search(argument), argument


@each("name", [name for name, found in OTHERS.items() if "Work[" in str(inspect.signature(found).return_annotation)])
def test_docstring_of_a_distributed_function_names_the_method_with_the_details(name: str) -> None:
    text = (inspect.getdoc(OTHERS[name]) or "").split("\n\n")[0]
    named = re.findall(r"`(?:ProcessGroup\.)?(\w+)`", text)
    assert any(f"ProcessGroup.{each}" in CALLS or f"aiocoll.distributed.{each}" in OTHERS for each in named), text


def test_docstring_of_group_options_documents_each_option() -> None:
    documented = re.findall(r"^    (\w+):", sections(GroupOptions)["Attributes"], re.MULTILINE)
    assert documented == list(GroupOptions.__dataclass_fields__)
    assert "Raises" in sections(GroupOptions)


def test_help_text_of_shrink_describes_shrink() -> None:
    text = inspect.getdoc(ProcessGroup.shrink) or ""
    assert text.startswith("Make a new group of the ranks that are alive")
